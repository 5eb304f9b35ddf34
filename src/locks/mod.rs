//! The kinds of lock, one file each, and what the shared rooms need to know of a kind.

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

/// A lock and who wants it, as the scripts see it.
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

    /// The error for a step that took too long.
    pub(crate) fn timeout(&self, step: Step, after: Duration) -> Error {
        Error::Timeout {
            step,
            after,
            lock: Some(self.lock()),
            address: None,
        }
    }

    /// The error for a call of which nothing is left to be settled.
    pub(crate) fn refused(&self, failure: Failure) -> Error {
        error(failure, &self.lock(), &self.address, None)
    }

    /// The error for a step that may have happened all the same.
    pub(crate) fn unknown(&self, failure: Failure, step: Step) -> Error {
        error(failure, &self.lock(), &self.address, Some(step))
    }
}

/// The error for a call without a reply. `unknown` is the step that may have been done all the same.
pub(crate) fn error(failure: Failure, lock: &str, address: &str, unknown: Option<Step>) -> Error {
    let lock = lock.to_owned();
    let Some(step) = unknown else {
        return match failure {
            Failure::Closed => Error::Closed,
            Failure::Server(error) => Error::Server {
                lock: Some(lock),
                error,
            },
            Failure::NotSent(detail) | Failure::Unknown(detail) => Error::Connection {
                address: address.to_owned(),
                error: detail.into(),
            },
        };
    };
    let detail = match failure {
        Failure::Closed => "the client was shut down before the reply".into(),
        Failure::Server(error) => {
            format!("a reply was lost, and the server refused the repetition: {error}")
        }
        Failure::NotSent(detail) | Failure::Unknown(detail) => format!("{address}: {detail}"),
    };
    Error::OutcomeUnknown { lock, step, detail }
}

/// A kind of lock: which scripts move it, and how their answers are read.
pub(crate) trait Kind: Send + Sync + 'static {
    /// Takes a hold: `target` over `before`.
    fn acquire(&self, ident: &Ident, before: i64, target: i64, lease: LeaseTime) -> Call;
    fn acquired(&self, reply: Reply) -> Result<Acquired, Failure>;

    /// Gives holds back until `leave` are left.
    fn release(&self, ident: &Ident, leave: i64, lease: LeaseTime) -> Call;
    fn released(&self, reply: Reply) -> Result<Released, Failure>;

    /// Restores the leases of many.
    fn renew(&self, idents: &[Arc<Ident>], lease: LeaseTime) -> Call;
    fn renewed(&self, reply: Reply, locks: usize) -> Result<Vec<Renewed>, Failure>;

    /// Asks for the owner's hold count.
    fn count(&self, ident: &Ident) -> Call;
    fn counted(&self, reply: Reply) -> Result<i64, Failure>;
}

/// What an acquire found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Acquired {
    /// The owner holds `target`.
    Granted,
    /// Somebody else holds the lock, for that long (`None`: without an expiry).
    Held(Option<Duration>),
    /// The owner's count is another one.
    Other(i64),
}

/// What a release found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Released {
    /// The lock is free.
    Freed,
    /// The owner still holds what it was told to leave.
    Left,
    /// The owner's count was lower already.
    Below(i64),
}

/// What a renewal found for one lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Renewed {
    Yes,
    /// The owner does not hold it.
    Gone,
    /// The server refused it for this lock.
    Refused(ServerError),
}
