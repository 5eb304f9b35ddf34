//! What the engine has to say in the log. The driver writes it, outside the engine's lock.

use std::time::Duration;

use bytes::Bytes;

use crate::error::{Error, LostReason, ServerError};
use crate::wire::Failure;

/// A lock and an owner, for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Subject {
    pub(crate) lock: String,
    pub(crate) owner: String,
}

/// An event of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Notice {
    Lost(Subject, LostReason),
    Deadlock {
        subject: Subject,
        held_by: String,
    },
    LongWait {
        subject: Subject,
        held_by: String,
        waited: Duration,
    },
    Unclaimed(Subject),
    ReleaseFailed(String, Error),
    NotSettled(String, Failure),
    ReleaseNotSent(Subject, LostReason),
    RenewalRefused(Subject, ServerError),
    RenewalOutage(Failure),
    RenewalOutageOver,
    SubscriptionRefused(Bytes),
}
