//! What travels between the engine and the link: calls, replies, and the four outcomes of a call.

use std::fmt;

use bytes::Bytes;

use crate::error::{ConnectionError, ServerError};

/// One call of a script.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) script: Source,
    /// How many locks have a row of arguments and a pair of values in the reply; 0 for a script
    /// with another layout.
    pub(crate) locks: usize,
    pub(crate) keys: Vec<Bytes>,
    pub(crate) args: Vec<Bytes>,
}

/// The text of a script and its SHA-1. The link calls the script by its SHA-1, and by its text if
/// the server does not have the script.
///
/// Locks use no plain commands: only the reply of a script proves to which call it belongs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) sha1: &'static str,
    pub(crate) text: &'static str,
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The text begins with the name.
        let name = self.text.trim_start_matches("-- ").split(':').next();
        f.write_str(name.unwrap_or(self.sha1))
    }
}

/// A reply, without types of the client library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    Nil,
    Int(i64),
    Text(Bytes),
    List(Vec<Reply>),
}

impl Reply {
    /// The number, if the reply is an integer or a text that spells one as the server does: it
    /// refuses to count on from `+1` or `01`.
    pub(crate) fn as_int(&self) -> Option<i64> {
        match self {
            Reply::Int(number) => Some(*number),
            Reply::Text(text) => {
                let text = std::str::from_utf8(text).ok()?;
                let number: i64 = text.parse().ok()?;
                (number.to_string() == text).then_some(number)
            }
            Reply::Nil | Reply::List(_) => None,
        }
    }
}

/// Why a call failed. A call has four outcomes: a reply, a server error, not sent, unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The server replied with an error.
    Server(ServerError),
    /// The call was never sent, because there is no connection.
    NotSent(ConnectionError),
    /// The client was shut down, so the call was not sent.
    Closed,
    /// The call was sent, or may have been sent, and has no reply. It may have run. It does not run
    /// after a call that is submitted later.
    Unknown(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Server(error) => write!(f, "server error: {error}"),
            Failure::NotSent(detail) => write!(f, "not sent: {detail}"),
            Failure::Closed => f.write_str("not sent: the client is shut down"),
            Failure::Unknown(detail) => write!(f, "unknown outcome: {detail}"),
        }
    }
}

impl Failure {
    /// Whether the same call may succeed later.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Failure::Server(error) => error.is_transient(),
            Failure::NotSent(_) | Failure::Unknown(_) => true,
            Failure::Closed => false,
        }
    }
}
