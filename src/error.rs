//! Errors that a caller can act on.

use std::fmt;
use std::time::Duration;

use crate::info::LockInfo;

mod connection;
mod server;

pub use connection::ConnectionError;
#[cfg(feature = "tls")]
pub use connection::TlsProblem;
pub use server::{ServerError, ServerErrorKind};

/// Why an operation failed.
///
/// `Display` states what happened in one line, with the lock and the figures; each variant's
/// documentation states what the caller does next. Code that only sorts errors uses
/// [`is_lost`](Self::is_lost), [`is_timeout`](Self::is_timeout) and
/// [`is_retryable`](Self::is_retryable).
///
/// That a lock is held by another owner is not an error of
/// [`try_lock`](crate::Lock::try_lock): there it is the answer `None`.
///
/// ```no_run
/// # async fn example(lock: redisson_lock::ReentrantLock) {
/// use std::time::Duration;
///
/// match lock.lock().timeout(Duration::from_secs(2)).run(async { 40 + 2 }).await {
///     Ok(total) => println!("{total}"),
///     Err(error) if error.is_lost() => eprintln!("check what was done: {error}"),
///     Err(error) if error.is_retryable() => eprintln!("try again later: {error}"),
///     Err(error) => eprintln!("{error}"),
/// }
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The lock name is invalid. Nothing was sent. Choose another name.
    #[error("invalid lock name {name:?}: {problem} (allowed: 1 to {max} bytes of UTF-8)", max = crate::limits::MAX_NAME_LEN)]
    #[non_exhaustive]
    InvalidName {
        /// The name, shortened if it is long.
        name: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The lease time is invalid. Nothing was sent. Pass a lease within the limits.
    #[error(
        "invalid lease time {lease:?}: {problem} (allowed: 1ms to 3650 days), for lock {lock:?}"
    )]
    #[non_exhaustive]
    InvalidLease {
        /// The lock's name.
        lock: String,
        /// The lease time that was passed.
        lease: Duration,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The timeout is invalid. Nothing was sent. Leave it out to wait without limit.
    #[error("invalid timeout {timeout:?}: longer than 3650 days, for lock {lock:?}")]
    #[non_exhaustive]
    InvalidTimeout {
        /// The lock's name.
        lock: String,
        /// The timeout that was passed.
        timeout: Duration,
    },
    /// A setting of the client, a client id or a thread id is invalid. Nothing was sent. Correct
    /// the setting.
    #[error("invalid {setting}: {problem} (allowed: {allowed})")]
    #[non_exhaustive]
    InvalidConfig {
        /// The setting.
        setting: &'static str,
        /// What is wrong with it. It never contains a secret.
        problem: String,
        /// What is allowed.
        allowed: &'static str,
    },
    /// The server at this address cannot be used: it runs as a cluster or as a sentinel, or it is
    /// older than Redis 6.2. Connect to another server.
    #[error("unsupported server {address}: {problem}")]
    #[non_exhaustive]
    UnsupportedServer {
        /// Host and port.
        address: String,
        /// Why it cannot be used.
        problem: String,
    },
    /// The timeout of the request passed while another owner held the lock. Nothing of the request
    /// is left on the server. Wait longer, or do without the lock.
    #[error("timed out after {timeout:?} waiting for lock {lock:?}{}", by(.held_by))]
    #[non_exhaustive]
    AcquireTimeout {
        /// The lock's name.
        lock: String,
        /// The timeout of the request.
        timeout: Duration,
        /// The owner that held the lock when the timeout passed. `None` if the server did not say
        /// so in time, or if the lock had become free by then.
        held_by: Option<LockInfo>,
    },
    /// The current task waits for a lock that it holds itself under another owner, and the client
    /// was built with [`DeadlockDetection::Fail`](crate::DeadlockDetection::Fail). Nothing of the
    /// request is left. Run the nested code in the scope of the owner that holds the lock; a
    /// [`SimpleLock`](crate::SimpleLock) is released first, because nothing re-enters it.
    ///
    /// The text names the owner by its thread id. Behind
    /// [`LockClient::client_id`](crate::LockClient::client_id) and a colon it is `CLIENT:THREAD`,
    /// as in the log events and on the server.
    #[error(
        "deadlock: the current task holds lock {lock:?} as owner {owner} and waits for it as another owner"
    )]
    #[non_exhaustive]
    WouldDeadlock {
        /// The lock's name.
        lock: String,
        /// The owner of this client under which the task holds the lock.
        owner: crate::owner::Owner,
    },
    /// A step took longer than its limit. Except for [`Step::Shutdown`] it left nothing behind.
    /// Call again when the server answers.
    #[error("timed out after {after:?} {step}{}", target(.lock, .address))]
    #[non_exhaustive]
    Timeout {
        /// The step.
        step: Step,
        /// Its limit; for a wait that ended early, how long it took.
        after: Duration,
        /// The lock's name, if the step concerns a lock.
        lock: Option<String>,
        /// Host and port of the server, if the server did not answer.
        address: Option<String>,
    },
    /// The current owner does not hold the lock, or it has no detached hold: each of its holds
    /// belongs to a guard, or is being released. Unlock the guard, or unlock as the owner that
    /// holds the lock.
    #[error("cannot unlock lock {lock:?}: {problem}")]
    #[non_exhaustive]
    NotHeld {
        /// The lock's name.
        lock: String,
        /// Which owner does not hold it, or has no detached hold.
        problem: String,
    },
    /// The lock was held and is not held any more. Another owner may have held it since. Check, or
    /// undo, what was done since the lease was last known to be valid.
    #[error("lock {lock:?} was lost: {reason}")]
    #[non_exhaustive]
    Lost {
        /// The lock's name.
        lock: String,
        /// How it was lost.
        reason: LostReason,
    },
    /// The server did not answer, or could not be reached, so it is unknown whether the step was
    /// done, or will be.
    ///
    /// The client settles it in the background: it releases what an acquire may have acquired, and
    /// it repeats a release until the server answers or the lease has expired. Until then other
    /// owners may find the lock held. After an acquire call again.
    /// After an unlock there is nothing to do: do not call it again, it would release another hold.
    ///
    /// A new call of the same owner (in a scope, or under
    /// [`OwnerPolicy::PerTask`](crate::OwnerPolicy::PerTask)) waits for the settlement. Under the
    /// default policy a call outside a scope has a new owner: `lock()` waits as for any other
    /// owner, and [`try_lock`](crate::Lock::try_lock) may answer `None` until then.
    #[error("unknown outcome {step} lock {lock:?}: {detail}")]
    #[non_exhaustive]
    OutcomeUnknown {
        /// The lock's name.
        lock: String,
        /// The step.
        step: Step,
        /// What went wrong with the connection.
        detail: String,
    },
    /// The server refused a command. [`ServerError::kind`] says what has to change first.
    #[error("server error{}: {error}", of(.lock, .address, .database))]
    #[non_exhaustive]
    Server {
        /// The lock's name, if a lock is concerned.
        lock: Option<String>,
        /// Host and port of the server, if it refused to connect.
        address: Option<String>,
        /// The number of the database, if the server refused to select it: it has fewer databases,
        /// or the user lacks the right to `SELECT`. Correct the number in the URL, or the right.
        database: Option<u8>,
        /// The server's answer.
        #[source]
        error: ServerError,
    },
    /// The server cannot be reached. Nothing was changed. Call again when it is back.
    #[error("no connection to {address}{}: {error}", of_lock(.lock))]
    #[non_exhaustive]
    Connection {
        /// The lock's name, if the operation concerns a lock.
        lock: Option<String>,
        /// Host and port.
        address: String,
        /// What went wrong.
        #[source]
        error: ConnectionError,
    },
    /// The client is shut down. Nothing was sent. Connect a new client.
    #[error("the lock client is shut down")]
    Closed,
    /// The client has failed over a defect of this library, which is logged as an error. Each of
    /// its locks counts as lost, and each of its requests ends with this error. Connect a new
    /// client.
    #[error("the lock client has failed")]
    ClientFailed,
}

impl Error {
    /// Whether the lock was held and lost: [`Error::Lost`].
    #[must_use]
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }

    /// Whether a time limit passed: [`Error::AcquireTimeout`] or [`Error::Timeout`].
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::AcquireTimeout { .. } | Self::Timeout { .. })
    }

    /// Whether the same call may succeed later with nothing changed in the program: after
    /// contention, a time limit, an error of the connection, an unknown outcome of another step
    /// than a release, or a server error that is [transient](ServerError::is_transient).
    ///
    /// It is `false` for [`Error::Lost`]: the work under the lock has to be checked first. It is
    /// `false` for [`Error::OutcomeUnknown`] with [`Step::Release`], too: the client repeats the
    /// release by itself, and a second unlock would release another hold of the owner.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::AcquireTimeout { .. } => true,
            // The background repeats a release. A second one would release another hold.
            Self::OutcomeUnknown { step, .. } => *step != Step::Release,
            // Another service at that address will not become a server.
            Self::Connection { error, .. } => error.kind() != std::io::ErrorKind::InvalidData,
            Self::Timeout { step, .. } => *step != Step::Shutdown,
            Self::Server { error, .. } => error.is_transient(),
            _ => false,
        }
    }

    /// The name of the lock that is concerned.
    ///
    /// Always of [`InvalidName`](Self::InvalidName) (shortened, if it is long),
    /// [`InvalidLease`](Self::InvalidLease), [`InvalidTimeout`](Self::InvalidTimeout),
    /// [`AcquireTimeout`](Self::AcquireTimeout), [`WouldDeadlock`](Self::WouldDeadlock),
    /// [`NotHeld`](Self::NotHeld), [`Lost`](Self::Lost) and
    /// [`OutcomeUnknown`](Self::OutcomeUnknown). Of [`Timeout`](Self::Timeout),
    /// [`Server`](Self::Server) and [`Connection`](Self::Connection) if the operation concerns a
    /// lock: `None` from `connect` and `shutdown`. `None` of the others: they concern the client.
    #[must_use]
    pub fn lock(&self) -> Option<&str> {
        match self {
            Self::InvalidName { name: lock, .. }
            | Self::InvalidLease { lock, .. }
            | Self::InvalidTimeout { lock, .. }
            | Self::AcquireTimeout { lock, .. }
            | Self::WouldDeadlock { lock, .. }
            | Self::NotHeld { lock, .. }
            | Self::Lost { lock, .. }
            | Self::OutcomeUnknown { lock, .. } => Some(lock),
            Self::Timeout { lock, .. }
            | Self::Server { lock, .. }
            | Self::Connection { lock, .. } => lock.as_deref(),
            _ => None,
        }
    }
}

/// A step of an operation.
///
/// ```no_run
/// # async fn example(client: redisson_lock::LockClient) -> Result<(), redisson_lock::Error> {
/// use redisson_lock::{Error, Step};
///
/// match client.shutdown().await {
///     Err(Error::Timeout { step: Step::Shutdown, after, .. }) => {
///         eprintln!("some locks stay until their leases expire, after {after:?}");
///     }
///     other => other?,
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Step {
    /// Connecting to the server.
    Connect,
    /// Acquiring a hold.
    Acquire,
    /// Releasing a hold.
    Release,
    /// Freeing a lock that any owner holds.
    ForceUnlock,
    /// Reading the state of a lock.
    Inspect,
    /// Waiting for an earlier operation on the same lock by the same owner, or by a request that
    /// was dropped, whose reply is still missing.
    EarlierOperation,
    /// Finishing pending releases at shutdown.
    Shutdown,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connect => "connecting to",
            Self::Acquire => "acquiring",
            Self::Release => "releasing",
            Self::ForceUnlock => "force-unlocking",
            Self::Inspect => "inspecting",
            Self::EarlierOperation => "waiting for an earlier operation on",
            Self::Shutdown => "finishing pending releases",
        })
    }
}

/// How a lock was lost. The page [`docs::operations`](crate::docs::operations#why-a-lock-is-lost)
/// lists causes, and what to do about them.
///
/// ```no_run
/// # async fn example(guard: redisson_lock::LockGuard) {
/// use redisson_lock::LostReason;
///
/// match guard.lost().await {
///     LostReason::Shutdown | LostReason::ClientFailed => println!("this process ends"),
///     reason => eprintln!("stopped, check what was done: {reason}"),
/// }
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LostReason {
    /// No renewal was confirmed before the lease could expire: see
    /// [why a lock is lost](crate::docs::operations#why-a-lock-is-lost).
    Expired,
    /// The server does not have the hold any more: the key expired, or was deleted, evicted or
    /// force-unlocked. See [why a lock is lost](crate::docs::operations#why-a-lock-is-lost).
    Gone,
    /// This client force-unlocked the lock: see
    /// [why a lock is lost](crate::docs::operations#why-a-lock-is-lost).
    ForceUnlocked,
    /// This client was shut down and renews the lock no more: see
    /// [why a lock is lost](crate::docs::operations#why-a-lock-is-lost).
    Shutdown,
    /// This client has failed over a defect of this library: see [`Error::ClientFailed`].
    ClientFailed,
}

impl fmt::Display for LostReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "its lease expired, or could not be confirmed in time",
            Self::Gone => {
                "the server does not have the hold any more (expired, deleted, evicted or force-unlocked)"
            }
            Self::ForceUnlocked => "this client force-unlocked it",
            Self::Shutdown => "the client was shut down",
            Self::ClientFailed => "the client has failed",
        })
    }
}

fn by(info: &Option<LockInfo>) -> String {
    info.as_ref()
        .map(|info| format!(" (held by {info})"))
        .unwrap_or_default()
}

fn target(lock: &Option<String>, address: &Option<String>) -> String {
    match (lock, address) {
        (Some(lock), Some(address)) => format!(" lock {lock:?} at {address}"),
        (Some(lock), None) => format!(" lock {lock:?}"),
        (None, Some(address)) => format!(" {address}"),
        (None, None) => String::new(),
    }
}

fn of_lock(lock: &Option<String>) -> String {
    lock.as_ref()
        .map(|lock| format!(", for lock {lock:?}"))
        .unwrap_or_default()
}

fn of(lock: &Option<String>, address: &Option<String>, database: &Option<u8>) -> String {
    match (lock, address, database) {
        (Some(lock), ..) => format!(" on lock {lock:?}"),
        (None, Some(address), Some(database)) => format!(" from {address}, database {database}"),
        (None, Some(address), None) => format!(" from {address}"),
        (None, None, _) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each predicate for each variant.
    #[test]
    fn predicates_sort_each_variant() {
        let lock = || "stock".to_owned();
        let timeout = |step| Error::Timeout {
            step,
            after: Duration::ZERO,
            lock: Some(lock()),
            address: None,
        };
        let unknown = |step| Error::OutcomeUnknown {
            lock: lock(),
            step,
            detail: String::new(),
        };
        let server = |message: &str| Error::Server {
            lock: Some(lock()),
            address: None,
            database: None,
            error: message.into(),
        };
        let connection = |error| Error::Connection {
            lock: Some(lock()),
            address: "localhost:6379".into(),
            error,
        };
        // The error, is_lost, is_timeout, is_retryable, whether it names a lock.
        let table = [
            (
                Error::AcquireTimeout {
                    lock: lock(),
                    timeout: Duration::ZERO,
                    held_by: None,
                },
                [false, true, true, true],
            ),
            (timeout(Step::Inspect), [false, true, true, true]),
            (timeout(Step::Shutdown), [false, true, false, true]),
            (
                Error::Lost {
                    lock: lock(),
                    reason: LostReason::Gone,
                },
                [true, false, false, true],
            ),
            (unknown(Step::Acquire), [false, false, true, true]),
            (unknown(Step::ForceUnlock), [false, false, true, true]),
            (unknown(Step::Release), [false, false, false, true]),
            (
                Error::NotHeld {
                    lock: lock(),
                    problem: String::new(),
                },
                [false, false, false, true],
            ),
            (server("LOADING"), [false, false, true, true]),
            (server("NOPERM"), [false, false, false, true]),
            (
                connection("lost".to_owned().into()),
                [false, false, true, true],
            ),
            (
                connection(ConnectionError::foreign("HTTP".into())),
                [false, false, false, true],
            ),
            (Error::Closed, [false, false, false, false]),
            (Error::ClientFailed, [false, false, false, false]),
        ];
        for (error, expected) in table {
            let found = [
                error.is_lost(),
                error.is_timeout(),
                error.is_retryable(),
                error.lock() == Some("stock"),
            ];
            assert_eq!(found, expected, "{error:?}");
        }
    }
}
