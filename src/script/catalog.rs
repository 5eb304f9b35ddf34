//! The scripts that this crate sends. No other file reads `lua/`.

use super::Script;

/// Acquires one hold on each lock.
pub(crate) static ACQUIRE: Script = Script::new(
    "acquire",
    include_str!("../../lua/v1/acquire.lua"),
    &["owner", "lease", "before", "target"],
);

/// Lowers a hold count; at 0 it frees the lock.
pub(crate) static RELEASE: Script = Script::new(
    "release",
    include_str!("../../lua/v1/release.lua"),
    &["owner", "channel", "lease", "leave"],
);

/// Renews leases.
pub(crate) static RENEW: Script = Script::new(
    "renew",
    include_str!("../../lua/v1/renew.lua"),
    &["owner", "lease"],
);

/// Frees locks that any owner holds.
pub(crate) static FORCE_UNLOCK: Script = Script::new(
    "force_unlock",
    include_str!("../../lua/v1/force_unlock.lua"),
    &["owner", "channel"],
);

/// Reads an owner's hold count.
pub(crate) static COUNT: Script =
    Script::new("count", include_str!("../../lua/v1/count.lua"), &["owner"]);

/// Reads the owners of a lock, their hold counts, and the time to live.
pub(crate) static INSPECT: Script =
    Script::new("inspect", include_str!("../../lua/v1/inspect.lua"), &[]);

/// All scripts: a new client loads them.
pub(crate) static ALL: [&Script; 6] = [&ACQUIRE, &RELEASE, &RENEW, &FORCE_UNLOCK, &COUNT, &INSPECT];
