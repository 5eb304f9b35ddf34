//! What the server knows of a lock, as a value.

use std::fmt::{self, Write};
use std::time::Duration;

use crate::owner::Owner;

/// The state of a held lock at one moment: see
/// [`Lock::inspect`](crate::Lock::inspect).
///
/// ```no_run
/// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
/// if let Some(info) = lock.inspect().await? {
///     println!("{info}"); // 8f0b...:17 of this client, ttl 1.2s
///     println!("{} holds, {:?} left", info.hold_count, info.ttl);
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockInfo {
    /// The owner as the server has it: `CLIENT:THREAD`. The client's connections carry CLIENT in
    /// their names, so `CLIENT LIST` shows where it runs. For a [`SimpleLock`](crate::SimpleLock)
    /// that another program holds, that program's token.
    pub owner: String,
    /// The owner, if it is one of the client that asked. In its scope a detached hold of a
    /// reentrant or fenced lock can be unlocked.
    pub local_owner: Option<Owner>,
    /// How many holds the owner has: 1 for a [`SimpleLock`](crate::SimpleLock).
    pub hold_count: u64,
    /// How long the server keeps the lock without a renewal. `None` if the key has no expiry, which
    /// neither this library nor Redisson leaves behind, but other programs may.
    pub ttl: Option<Duration>,
}

impl fmt::Display for LockInfo {
    /// As in `8f0b...:17, ttl 1.2s`, or `8f0b...:17 of this client, ttl 1.2s` if the owner is one
    /// of the client that asked. Control characters in the owner are escaped: it is one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.owner.chars() {
            match c {
                c if c.is_control() => write!(f, "{}", c.escape_default())?,
                c => f.write_char(c)?,
            }
        }
        if self.local_owner.is_some() {
            f.write_str(" of this client")?;
        }
        match self.ttl {
            Some(ttl) => write!(f, ", ttl {ttl:?}"),
            None => f.write_str(", no expiry"),
        }
    }
}
