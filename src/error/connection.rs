//! Errors of the connection itself.

use std::{fmt, io};

use super::Error;

#[cfg(feature = "tls")]
mod tls;

#[cfg(feature = "tls")]
pub use tls::TlsProblem;

/// Why a connection failed: the source of [`Error::Connection`](crate::Error::Connection).
///
/// ```no_run
/// # async fn example() -> Result<(), redisson_lock::Error> {
/// use redisson_lock::{Error, LockClient};
/// use std::io::ErrorKind;
///
/// let client = match LockClient::connect("redis://127.0.0.1:6379").await {
///     Err(Error::Connection { error, address, .. })
///         if error.kind() == ErrorKind::ConnectionRefused =>
///     {
///         return Ok(eprintln!("no server runs at {address}"));
///     }
///     other => other?,
/// };
/// # drop(client);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionError {
    kind: io::ErrorKind,
    message: String,
    #[cfg(feature = "tls")]
    tls: Option<TlsProblem>,
}

impl ConnectionError {
    /// Stands for the error of a server that answers in plain text where TLS is expected.
    pub(crate) const PLAIN_TEXT: &str = "plain text instead of TLS";

    /// The kind of I/O error, as the operating system reported it; [`io::ErrorKind::InvalidData`]
    /// if another service than Redis or Valkey answers, or if there can be no TLS connection;
    /// [`io::ErrorKind::TimedOut`] if a connection was lost and the server does not answer the
    /// attempts to replace it; [`io::ErrorKind::Other`] if none was reported.
    #[must_use]
    pub fn kind(&self) -> io::ErrorKind {
        self.kind
    }

    /// Why there can be no TLS connection; `None` if that is not the reason.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn tls_problem(&self) -> Option<TlsProblem> {
        self.tls
    }

    /// Another service answers there.
    pub(crate) fn foreign(message: String) -> Self {
        Self::new(io::ErrorKind::InvalidData, message)
    }

    fn new(kind: io::ErrorKind, message: String) -> Self {
        Self {
            kind,
            message,
            #[cfg(feature = "tls")]
            tls: None,
        }
    }

    /// An I/O error that the client library wrote as text: `Os { code: .., kind: .., message: ..
    /// }`.
    pub(crate) fn from_debug(text: &str) -> Self {
        #[cfg(feature = "tls")]
        if let Some(problem) = TlsProblem::from_debug(text) {
            let message = problem.explain(text);
            return Self {
                tls: Some(problem),
                ..Self::foreign(message)
            };
        }
        let after = |start| Some(text.split_once(start)?.1);
        let kind = after("kind: ").and_then(|rest| rest.split([',', ' ', '}']).next());
        let quoted = after("message: \"").or_else(|| after("error: \""));
        let message = quoted.and_then(|rest| rest.split('"').next());
        Self::new(
            match kind {
                Some("ConnectionRefused") => io::ErrorKind::ConnectionRefused,
                Some("ConnectionReset") => io::ErrorKind::ConnectionReset,
                Some("ConnectionAborted") => io::ErrorKind::ConnectionAborted,
                Some("BrokenPipe") => io::ErrorKind::BrokenPipe,
                Some("UnexpectedEof") => io::ErrorKind::UnexpectedEof,
                Some("HostUnreachable") => io::ErrorKind::HostUnreachable,
                Some("NetworkUnreachable") => io::ErrorKind::NetworkUnreachable,
                Some("TimedOut") => io::ErrorKind::TimedOut,
                Some("NotFound") => io::ErrorKind::NotFound,
                _ => io::ErrorKind::Other,
            },
            message.unwrap_or(text).to_owned(),
        )
    }
}

impl From<String> for ConnectionError {
    fn from(message: String) -> Self {
        Self::new(io::ErrorKind::Other, message)
    }
}

/// Why an attempt to connect failed, for the operations that wait for the connection.
impl From<Error> for ConnectionError {
    fn from(error: Error) -> Self {
        match error {
            Error::Connection { error, .. } => error,
            Error::Timeout { .. } => Self::new(io::ErrorKind::TimedOut, error.to_string()),
            error => error.to_string().into(),
        }
    }
}

impl fmt::Display for ConnectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ConnectionError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn io_error_that_was_written_as_text_is_read_back() {
        let refused = io::Error::from_raw_os_error(111);
        let error = ConnectionError::from_debug(&format!("{refused:?}"));
        assert_eq!(error.kind(), refused.kind());
        assert_eq!(error.to_string(), "Connection refused");
        let custom = io::Error::new(io::ErrorKind::UnexpectedEof, "unexpected end");
        let error = ConnectionError::from_debug(&format!("{custom:?}"));
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(error.to_string(), "unexpected end");
        let error = ConnectionError::from_debug("anything else");
        assert_eq!(
            (error.kind(), &*error.to_string()),
            (io::ErrorKind::Other, "anything else")
        );
    }
}
