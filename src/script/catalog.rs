//! Every script that this crate sends, and the only place that reads `lua/`.

use super::Script;

/// Takes one hold on each lock.
pub(crate) static ACQUIRE: Script = Script::new(
    "acquire",
    include_str!("../../lua/v1/acquire.lua"),
    &["owner", "lease", "before", "target"],
);

/// Lowers a hold count; frees the lock at 0.
pub(crate) static RELEASE: Script = Script::new(
    "release",
    include_str!("../../lua/v1/release.lua"),
    &["owner", "channel", "lease", "leave"],
);

/// Restores leases.
pub(crate) static RENEW: Script = Script::new(
    "renew",
    include_str!("../../lua/v1/renew.lua"),
    &["owner", "lease"],
);

/// Frees locks, whoever holds them.
pub(crate) static FORCE_UNLOCK: Script = Script::new(
    "force_unlock",
    include_str!("../../lua/v1/force_unlock.lua"),
    &["owner", "channel"],
);

/// Reads an owner's hold count.
pub(crate) static COUNT: Script =
    Script::new("count", include_str!("../../lua/v1/count.lua"), &["owner"]);

/// Tells who holds a lock, and for how long.
pub(crate) static INSPECT: Script =
    Script::new("inspect", include_str!("../../lua/v1/inspect.lua"), &[]);

/// All of them: what a connection loads.
pub(crate) static ALL: [&Script; 6] = [&ACQUIRE, &RELEASE, &RENEW, &FORCE_UNLOCK, &COUNT, &INSPECT];
