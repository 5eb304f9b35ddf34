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

/// Acquires one hold on each lock, with a fencing token.
pub(crate) static FENCED_ACQUIRE: Script = Script::new(
    "fenced_acquire",
    include_str!("../../lua/v1/fenced_acquire.lua"),
    &["owner", "lease", "before", "target", "raise"],
);

/// Acquires simple locks.
pub(crate) static SIMPLE_ACQUIRE: Script = Script::new(
    "simple_acquire",
    include_str!("../../lua/v1/simple_acquire.lua"),
    &["owner", "lease"],
);

/// Frees simple locks.
pub(crate) static SIMPLE_RELEASE: Script = Script::new(
    "simple_release",
    include_str!("../../lua/v1/simple_release.lua"),
    &["owner", "channel"],
);

/// Renews the leases of simple locks.
pub(crate) static SIMPLE_RENEW: Script = Script::new(
    "simple_renew",
    include_str!("../../lua/v1/simple_renew.lua"),
    &["owner", "lease"],
);

/// Reads whether an owner holds simple locks.
pub(crate) static SIMPLE_COUNT: Script = Script::new(
    "simple_count",
    include_str!("../../lua/v1/simple_count.lua"),
    &["owner"],
);

/// Reads the owner of a simple lock, and the time to live.
pub(crate) static SIMPLE_INSPECT: Script = Script::new(
    "simple_inspect",
    include_str!("../../lua/v1/simple_inspect.lua"),
    &[],
);

/// All scripts: a new client loads them.
pub(crate) static ALL: [&Script; 12] = [
    &ACQUIRE,
    &RELEASE,
    &RENEW,
    &FORCE_UNLOCK,
    &COUNT,
    &INSPECT,
    &FENCED_ACQUIRE,
    &SIMPLE_ACQUIRE,
    &SIMPLE_RELEASE,
    &SIMPLE_RENEW,
    &SIMPLE_COUNT,
    &SIMPLE_INSPECT,
];
