//! The link to the server: calls with four outcomes, and the events of publish/subscribe.
//!
//! Nothing outside this room knows which client library carries a call. A [`Call`] names its keys
//! apart from its arguments, so that a link to a cluster can route it, and a call is a value that
//! is handed over before it is awaited, so that a link may gather several into one write.

use std::fmt;

use bytes::Bytes;

use crate::error::ServerError;

mod client;
mod frames;
mod keeper;
mod line;
mod pubsub;
mod settings;

pub(crate) use client::Link;
pub(crate) use pubsub::{Event, PubSub, Subscribed};
pub(crate) use settings::Settings;

/// One call of a script.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) what: What,
    pub(crate) keys: Vec<Bytes>,
    pub(crate) args: Vec<Bytes>,
}

/// A script: called by its SHA-1, by its text where the server does not know it (any more).
///
/// There is nothing but scripts: only their replies prove whose they are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct What {
    pub(crate) sha1: &'static str,
    pub(crate) text: &'static str,
}

/// A reply, free of any client library's types.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    Nil,
    Int(i64),
    Text(Bytes),
    List(Vec<Reply>),
}

impl Reply {
    /// The number that it is or that it spells.
    pub(crate) fn as_int(&self) -> Option<i64> {
        match self {
            Reply::Int(number) => Some(*number),
            Reply::Text(text) => std::str::from_utf8(text).ok()?.parse().ok(),
            Reply::Nil | Reply::List(_) => None,
        }
    }
}

/// Why a call has no reply. With the reply there are four outcomes: reply, server error, not sent,
/// unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The server answered with an error.
    Server(ServerError),
    /// The call was never sent.
    NotSent(String),
    /// This link was closed on purpose; the call was not sent.
    Closed,
    /// The call was sent, or may have been; it may run, may have run, or may be lost.
    Unknown(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Server(error) => write!(f, "server error: {error}"),
            Failure::NotSent(detail) => write!(f, "not sent: {detail}"),
            Failure::Closed => f.write_str("not sent: the client is shut down"),
            Failure::Unknown(detail) => write!(f, "no answer: {detail}"),
        }
    }
}

impl Failure {
    /// Whether the same call may succeed a little later.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Failure::Server(error) => error.is_transient(),
            Failure::NotSent(_) | Failure::Unknown(_) => true,
            Failure::Closed => false,
        }
    }
}
