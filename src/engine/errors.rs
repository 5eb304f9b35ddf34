//! The errors of operations.

use std::time::Duration;

use super::notice::Subject;
use super::{Engine, EntryId};
use crate::error::{ConnectionError, Error, LostReason, ServerError, Step};
use crate::wire::Failure;

impl Engine {
    pub(super) fn lock_name(&self, entry: EntryId) -> String {
        self.locks[self.entries[entry].lock].keys.display()
    }

    pub(super) fn owner_name(&self, entry: EntryId) -> String {
        format!("{}:{}", self.settings.client_id, self.entries[entry].owner)
    }

    pub(super) fn subject(&self, entry: EntryId) -> Subject {
        Subject {
            lock: self.lock_name(entry),
            owner: self.owner_name(entry),
        }
    }

    /// The error for a step that exceeded its limit.
    pub(super) fn timeout(&self, lock: String, step: Step, after: Duration) -> Error {
        Error::Timeout {
            step,
            after,
            lock: Some(lock),
            address: Some(self.settings.address.to_string()),
        }
    }

    pub(super) fn connection(&self, lock: String, error: ConnectionError) -> Error {
        Error::Connection {
            lock: Some(lock),
            address: self.settings.address.to_string(),
            error,
        }
    }

    /// The error for a failed call that had no effect.
    pub(super) fn refused(&self, lock: String, failure: Failure) -> Error {
        match failure {
            Failure::Closed => self.closed(),
            Failure::Server(error) => server(lock, error),
            Failure::NotSent(error) => self.connection(lock, error),
            Failure::Unknown(detail) => self.connection(lock, detail.into()),
        }
    }

    /// The error for a failed call after which the step may have been done.
    pub(super) fn unknown(&self, lock: String, step: Step, failure: Failure) -> Error {
        let detail = match failure {
            Failure::Closed => "the client was shut down before the reply".into(),
            Failure::Server(error) => {
                format!("a reply was lost, and the server refused the repeated call: {error}")
            }
            Failure::NotSent(error) => format!("{}: {error}", self.settings.address),
            Failure::Unknown(detail) => format!("{}: {detail}", self.settings.address),
        };
        Error::OutcomeUnknown { lock, step, detail }
    }
}

pub(super) fn server(lock: String, error: ServerError) -> Error {
    Error::Server {
        lock: Some(lock),
        address: None,
        database: None,
        error,
    }
}

pub(super) fn lost(lock: String, reason: LostReason) -> Error {
    Error::Lost { lock, reason }
}
