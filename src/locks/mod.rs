//! The kinds of lock, one folder each, and the interface between a kind and the shared modules.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::config::LeaseTime;
use crate::error::{Error, ServerError, Step};
use crate::keys::Keys;
use crate::link::{Call, Failure, Reply};
use crate::owner::{ClientId, Owner, owner_field};

pub(crate) mod guard;
pub(crate) mod reentrant;
pub(crate) mod requests;

/// A lock and an owner, as the scripts take them.
#[derive(Debug)]
pub(crate) struct Ident {
    pub(crate) keys: Keys,
    pub(crate) owner: Owner,
    pub(crate) field: Bytes,
    /// Host and port of the server, for errors.
    pub(crate) address: Arc<str>,
}

impl Ident {
    pub(crate) fn new(keys: Keys, client: ClientId, owner: Owner, address: Arc<str>) -> Self {
        Self {
            field: owner_field(client, owner),
            keys,
            owner,
            address,
        }
    }

    pub(crate) fn lock(&self) -> String {
        self.keys.display()
    }

    pub(crate) fn owner_field(&self) -> String {
        String::from_utf8_lossy(&self.field).into_owned()
    }

    /// The error for a step that exceeded its limit.
    pub(crate) fn timeout(&self, step: Step, after: Duration) -> Error {
        Error::Timeout {
            step,
            after,
            lock: Some(self.lock()),
            address: Some(self.address.to_string()),
        }
    }

    /// The error for a failed call that had no effect.
    pub(crate) fn refused(&self, failure: Failure) -> Error {
        error(failure, &self.lock(), &self.address, None)
    }

    /// The error for a failed call after which the step may have been done.
    pub(crate) fn unknown(&self, failure: Failure, step: Step) -> Error {
        error(failure, &self.lock(), &self.address, Some(step))
    }
}

/// The error for a failed call. `unknown` names the step if it may have been done.
pub(crate) fn error(failure: Failure, lock: &str, address: &str, unknown: Option<Step>) -> Error {
    let lock = lock.to_owned();
    let Some(step) = unknown else {
        return match failure {
            Failure::Closed => Error::Closed,
            Failure::Server(error) => Error::Server {
                lock: Some(lock),
                address: None,
                database: None,
                error,
            },
            Failure::NotSent(error) => Error::Connection {
                address: address.to_owned(),
                error,
            },
            Failure::Unknown(detail) => Error::Connection {
                address: address.to_owned(),
                error: detail.into(),
            },
        };
    };
    let detail = match failure {
        Failure::Closed => "the client was shut down before the reply".into(),
        Failure::Server(error) => {
            format!("a reply was lost, and the server refused the repeated call: {error}")
        }
        Failure::NotSent(error) => format!("{address}: {error}"),
        Failure::Unknown(detail) => format!("{address}: {detail}"),
    };
    Error::OutcomeUnknown { lock, step, detail }
}

/// A kind of lock: the scripts that change its state, and how their replies are read.
pub(crate) trait Kind: Send + Sync + 'static {
    /// Acquires a hold: sets the owner's hold count from `before` to `target`.
    fn acquire(&self, ident: &Ident, before: i64, target: i64, lease: LeaseTime) -> Call;
    fn acquired(&self, reply: Reply) -> Result<Acquired, Failure>;

    /// Releases holds: sets the owner's hold count to `leave`.
    fn release(&self, ident: &Ident, leave: i64, lease: LeaseTime) -> Call;
    fn released(&self, reply: Reply) -> Result<Released, Failure>;

    /// Renews the leases of several locks.
    fn renew(&self, idents: &[Arc<Ident>], lease: LeaseTime) -> Call;
    fn renewed(&self, reply: Reply, locks: usize) -> Result<Vec<Renewed>, Failure>;

    /// Reads the owner's hold count.
    fn count(&self, ident: &Ident) -> Call;
    fn counted(&self, reply: Reply) -> Result<i64, Failure>;
}

/// The result of an acquire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Acquired {
    /// The owner's hold count is `target`.
    Granted,
    /// Another owner holds the lock. The time until its expiry; `None` without an expiry.
    Held(Option<Duration>),
    /// The owner's hold count is neither `before` nor `target`: nothing was changed.
    Other(i64),
}

/// The result of a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Released {
    /// The lock is free.
    Freed,
    /// The owner's hold count is `leave`, above 0.
    Left,
    /// The owner's hold count was below `leave` already: nothing was changed.
    Below(i64),
}

/// The result of a renewal, for one lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Renewed {
    /// The lease is restored.
    Yes,
    /// The owner does not hold the lock.
    Gone,
    /// The server refused the renewal of this lock.
    Refused(ServerError),
}
