//! Errors that a caller can act on.

use std::fmt;
use std::time::Duration;

/// Why an operation did not do what it was asked to.
///
/// Contention is not an error of [`try_lock`](crate::ReentrantLock::try_lock): there it is the
/// answer `None`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The lock's name cannot be used. Nothing was sent.
    #[error("the lock name {name:?} is refused: {problem}; allowed: 1 to {max} bytes of UTF-8", max = crate::MAX_NAME_LEN)]
    InvalidName {
        /// The name, shortened where it is very long.
        name: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The lease time cannot be used. Nothing was sent.
    #[error("the lease time {lease:?} is refused: {problem}; allowed: 1 ms to 3650 days")]
    InvalidLease {
        /// The lease time that was asked for.
        lease: Duration,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The wait time cannot be used. Nothing was sent.
    #[error(
        "the wait time {wait:?} is refused: it is too long; allowed: up to 3650 days (leave it out to wait without limit)"
    )]
    InvalidWait {
        /// The wait time that was asked for.
        wait: Duration,
    },
    /// A setting of the client, a client id or a thread id cannot be used. Nothing was sent.
    #[error("the {setting} is refused: {problem}; allowed: {allowed}")]
    InvalidConfig {
        /// Which setting.
        setting: &'static str,
        /// What is wrong with it. Never holds a secret.
        problem: String,
        /// What would be taken.
        allowed: &'static str,
    },
    /// The wait time ran out while somebody else held the lock. Nothing of ours is left on the
    /// server.
    ///
    /// Wait longer, or do without.
    #[error("lock {lock:?} is held by another owner: gave up after {waited:?}{}; wait longer, or do without", remaining(*.remaining_ttl))]
    Contended {
        /// The lock's name.
        lock: String,
        /// How long the caller waited.
        waited: Duration,
        /// What the lock had left of its owner's lease when it was last tried, if that is known.
        remaining_ttl: Option<Duration>,
    },
    /// A step took too long. Except for [`Step::Shutdown`], which ends all the same, it is certain
    /// that it left nothing behind.
    ///
    /// For [`Step::Connect`]: is the server there, is the address right? For [`Step::Inspect`]: the
    /// server does not answer. For [`Step::EarlierOperation`]: an earlier acquire or release on
    /// this lock, by the same owner or by a waiter that went away, has not been answered yet.
    #[error("timed out after {after:?} in this step: {step}; {next}", next = step.after_timeout())]
    Timeout {
        /// Which step.
        step: Step,
        /// How long it was given.
        after: Duration,
    },
    /// The current owner does not hold the lock, or every hold that it has belongs to a guard:
    /// unlock the guard.
    #[error("lock {lock:?} cannot be unlocked here: {problem}")]
    NotHeld {
        /// The lock's name.
        lock: String,
        /// Who was asked to give it back, and what to do.
        problem: String,
    },
    /// The lock was held and is not held any more: what it guarded may have been done by others as
    /// well.
    ///
    /// Undo or check what was done since the lease was last known to be alive.
    #[error("lock {lock:?} was lost: {reason}; check or undo what was done under it")]
    Lost {
        /// The lock's name.
        lock: String,
        /// How it was lost.
        reason: LostReason,
    },
    /// The server did not answer, so whether the step happened is not known.
    ///
    /// It is settled in the background: what an acquire may have taken is given back, and a release
    /// goes on until the server answers or the lease is over. Until then others may find the lock
    /// held.
    #[error(
        "the outcome of this step on lock {lock:?} is not known: {step} ({detail}); it is being settled in the background"
    )]
    Unknown {
        /// The lock's name.
        lock: String,
        /// Which step.
        step: Step,
        /// What went wrong with the connection.
        detail: String,
    },
    /// The server refused a command: a key of another type, missing rights (ACL), no memory.
    ///
    /// Its words tell what has to change before it is worth trying again.
    #[error("the server refused{}: {message}{hint}", about(.lock), hint = hint(message))]
    Server {
        /// The lock's name, where one is concerned.
        lock: Option<String>,
        /// The server's words.
        message: String,
    },
    /// The server cannot be reached, and nothing was changed.
    ///
    /// Is it running, and is the address right? Once it is back, ask again.
    #[error("no connection to the server: {detail}")]
    Connection {
        /// What went wrong.
        detail: String,
    },
    /// The client has been shut down: connect a new one.
    #[error("the client has been shut down; connect a new one")]
    Closed,
}

/// A step of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// Connecting to the server.
    Connect,
    /// Taking a hold.
    Acquire,
    /// Giving a hold back.
    Release,
    /// Freeing a lock, whoever holds it.
    ForceUnlock,
    /// Asking about a lock.
    Inspect,
    /// Waiting for an earlier operation on the same lock, of the same owner or of a waiter that
    /// went away.
    EarlierOperation,
    /// Finishing pending releases at shutdown.
    Shutdown,
}

impl Step {
    /// What a caller does for whom it took too long.
    fn after_timeout(self) -> &'static str {
        match self {
            Step::Connect => "is the server running there, and is the address right?",
            Step::Shutdown => {
                "everything is ended, and what was not released runs out with its lease"
            }
            _ => "the server does not answer, so try again later",
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Step::Connect => "connecting",
            Step::Acquire => "acquiring",
            Step::Release => "releasing",
            Step::ForceUnlock => "force-unlocking",
            Step::Inspect => "asking about the lock",
            Step::EarlierOperation => "waiting for an earlier operation on the same lock",
            Step::Shutdown => "finishing pending releases",
        })
    }
}

/// How a lock was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LostReason {
    /// The lease ran out, or could not be proved alive in time: no renewal was answered.
    Expired,
    /// The server does not have the hold any more: the key expired, was deleted, evicted or
    /// force-unlocked.
    Gone,
    /// This client force-unlocked it.
    ForceUnlocked,
    /// This client was shut down and does not renew it any more.
    Shutdown,
}

impl fmt::Display for LostReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LostReason::Expired => "its lease ran out, or could not be proved alive in time",
            LostReason::Gone => {
                "the server does not have the hold any more (expired, deleted, evicted or force-unlocked)"
            }
            LostReason::ForceUnlocked => "it was force-unlocked by this client",
            LostReason::Shutdown => "the client was shut down",
        })
    }
}

fn remaining(ttl: Option<Duration>) -> String {
    ttl.map(|ttl| format!(" (its lease had {ttl:?} left)"))
        .unwrap_or_default()
}

/// What to do about a refusal, where its code tells.
fn hint(message: &str) -> &'static str {
    match message.split(' ').next().unwrap_or_default() {
        "NOAUTH" | "WRONGPASS" => {
            " (are user and password in the URL, redis://user:password@host, and right?)"
        }
        "NOPERM" => " (the user needs more rights, see ACL SETUSER)",
        "WRONGTYPE" => " (something else is stored under this name: choose another one)",
        "OOM" => " (the server is out of memory)",
        "READONLY" => " (this is a replica: connect to its master)",
        _ => "",
    }
}

fn about(lock: &Option<String>) -> String {
    lock.as_ref()
        .map(|lock| format!(" on lock {lock:?}"))
        .unwrap_or_default()
}
