//! Errors that the server answered.

use std::fmt;

/// An error that the server answered: `CODE the rest of the message`.
///
/// The codes are those of Redis and Valkey
/// (<https://redis.io/docs/latest/develop/reference/protocol-spec/#simple-errors>).
///
/// ```no_run
/// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
/// use redisson_lock::{Error, ServerErrorKind};
///
/// match lock.lock().await {
///     Err(Error::Server { error, .. }) if error.kind() == ServerErrorKind::NoPermission => {
///         eprintln!("the ACL lacks a right: {}", error.message());
///     }
///     other => drop(other?),
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ServerError {
    kind: ServerErrorKind,
    message: String,
}

impl ServerError {
    /// What the code of the message means.
    #[must_use]
    pub fn kind(&self) -> ServerErrorKind {
        self.kind
    }

    /// The whole message, as the server wrote it.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Whether the same command may succeed a little later: the server is starting, busy with a
    /// script, or not the master at the moment.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        use ServerErrorKind as Kind;
        matches!(
            self.kind,
            Kind::Loading
                | Kind::Busy
                | Kind::TryAgain
                | Kind::ClusterDown
                | Kind::MasterDown
                | Kind::ReadOnly
                | Kind::NoReplicas
                | Kind::TooManyClients
        )
    }
}

impl From<String> for ServerError {
    fn from(message: String) -> Self {
        Self {
            kind: ServerErrorKind::of(&message),
            message,
        }
    }
}

impl From<&str> for ServerError {
    fn from(message: &str) -> Self {
        message.to_owned().into()
    }
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ServerError {}

/// What the code of a [`ServerError`] means, and what has to change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ServerErrorKind {
    /// `NOAUTH`, `WRONGPASS`: user or password are missing or wrong. Correct the URL.
    Auth,
    /// `NOPERM`: the user lacks a right. [`docs::wire_format`](crate::docs::wire_format) lists the
    /// rights that are needed.
    NoPermission,
    /// `WRONGTYPE`: the lock's key holds a value of another type, such as a lock of another kind.
    /// Choose another lock name.
    WrongType,
    /// `OOM`: the server has reached `maxmemory` and may evict nothing. Raise the limit, or free
    /// memory.
    OutOfMemory,
    /// `READONLY`: the server is a replica. Transient where a replica is about to be promoted.
    ReadOnly,
    /// `LOADING`: the server is starting. Transient.
    Loading,
    /// `BUSY`: a script keeps the server busy. Transient.
    Busy,
    /// `MASTERDOWN`: the server is a replica without a master. Transient.
    MasterDown,
    /// `NOREPLICAS`: too few replicas are connected to the master. Transient.
    NoReplicas,
    /// `MISCONF`: the server cannot write its snapshot or log to its disk, and refuses writes.
    /// Correct the disk (space, rights), or the server's settings for saving.
    Misconfigured,
    /// `CLUSTERDOWN`: the cluster does not serve the slot. Transient.
    ClusterDown,
    /// `TRYAGAIN`: the keys are being moved. Transient.
    TryAgain,
    /// `CROSSSLOT`, `MOVED`, `ASK`: the server is part of a cluster, which is not supported.
    /// Connect to another server.
    Cluster,
    /// `DENIED`: the server is in protected mode and accepts local connections only. Set a password
    /// on the server, or bind it to an address.
    Denied,
    /// `ERR max number of clients reached`. Transient.
    TooManyClients,
    /// `NOSCRIPT`: the server does not know the script. The client sends the script then.
    NoScript,
    /// Any other error: [`ServerError::message`] says what has to change. For example the server
    /// does not have the database, or a script lacks the right to a command that it runs.
    Other,
}

impl ServerErrorKind {
    fn of(message: &str) -> Self {
        if message.starts_with("ERR max number of clients") {
            return Self::TooManyClients;
        }
        match message.split(' ').next().unwrap_or_default() {
            "DENIED" => Self::Denied,
            "NOAUTH" | "WRONGPASS" => Self::Auth,
            "NOPERM" => Self::NoPermission,
            "WRONGTYPE" => Self::WrongType,
            "OOM" => Self::OutOfMemory,
            "READONLY" => Self::ReadOnly,
            "LOADING" => Self::Loading,
            "BUSY" => Self::Busy,
            "MASTERDOWN" => Self::MasterDown,
            "NOREPLICAS" => Self::NoReplicas,
            "MISCONF" => Self::Misconfigured,
            "CLUSTERDOWN" => Self::ClusterDown,
            "TRYAGAIN" => Self::TryAgain,
            "CROSSSLOT" | "MOVED" | "ASK" => Self::Cluster,
            "NOSCRIPT" => Self::NoScript,
            _ => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_decides_kind_and_whether_it_is_transient() {
        for (message, kind, transient) in [
            (
                "NOPERM this user has no permissions",
                ServerErrorKind::NoPermission,
                false,
            ),
            (
                "WRONGTYPE Operation against a key",
                ServerErrorKind::WrongType,
                false,
            ),
            ("LOADING Redis is loading", ServerErrorKind::Loading, true),
            ("BUSY Redis is busy", ServerErrorKind::Busy, true),
            (
                "ERR max number of clients reached",
                ServerErrorKind::TooManyClients,
                true,
            ),
            (
                "DENIED Redis is running in protected mode",
                ServerErrorKind::Denied,
                false,
            ),
            (
                "CLUSTERDOWN The cluster is down",
                ServerErrorKind::ClusterDown,
                true,
            ),
            (
                "TRYAGAIN Multiple keys request",
                ServerErrorKind::TryAgain,
                true,
            ),
            (
                "MASTERDOWN Link with MASTER is down",
                ServerErrorKind::MasterDown,
                true,
            ),
            ("READONLY You can't write", ServerErrorKind::ReadOnly, true),
            (
                "NOREPLICAS Not enough good replicas",
                ServerErrorKind::NoReplicas,
                true,
            ),
            (
                "OOM command not allowed",
                ServerErrorKind::OutOfMemory,
                false,
            ),
            (
                "BUSYGROUP Consumer Group name already exists",
                ServerErrorKind::Other,
                false,
            ),
            ("ERR unknown command", ServerErrorKind::Other, false),
            ("", ServerErrorKind::Other, false),
        ] {
            let error = ServerError::from(message);
            assert_eq!(
                (error.kind(), error.is_transient()),
                (kind, transient),
                "{message}"
            );
            assert_eq!(error.to_string(), message);
        }
    }
}
