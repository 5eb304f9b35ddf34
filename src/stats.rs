//! Counters of a client.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::LostReason;

/// What a client holds now and has done since it connected: see
/// [`LockClient::stats`](crate::LockClient::stats).
///
/// Each number is read by itself, so numbers that change together may differ by one.
///
/// ```no_run
/// # fn example(client: &redisson_lock::LockClient) {
/// let stats = client.stats();
/// println!("{} held, {} lost", stats.locks_held, stats.losses.total());
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Locks that owners of this client hold now.
    pub locks_held: u64,
    /// Requests of this client that wait for a lock now.
    pub requests_waiting: u64,
    /// Acquisitions that the server granted, re-entries included.
    pub grants: u64,
    /// Attempts that found the lock held by another owner. One request may make several.
    pub contended_attempts: u64,
    /// Tenures that ended without their owner's release, by reason.
    pub losses: Losses,
    /// Leases that the watchdog renewed: one for each lock and period.
    pub renewals: u64,
    /// Connections for calls that replaced a lost one. (The connection for wake-ups is not
    /// counted.)
    pub reconnects: u64,
    /// Operations that ended with [`Error::OutcomeUnknown`](crate::Error::OutcomeUnknown).
    pub unknown_outcomes: u64,
    /// Releases in the background that failed: of dropped guards, or of acquires with an unknown
    /// outcome. Each lock stays until its lease expires, and each is logged as a warning.
    pub failed_releases: u64,
}

/// How many tenures were lost, by [`LostReason`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Losses {
    /// [`LostReason::Expired`].
    pub expired: u64,
    /// [`LostReason::Gone`].
    pub gone: u64,
    /// [`LostReason::ForceUnlocked`].
    pub force_unlocked: u64,
    /// [`LostReason::Shutdown`].
    pub shutdown: u64,
    /// [`LostReason::RuntimeEnded`].
    pub runtime_ended: u64,
}

impl Losses {
    /// All of them.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.expired + self.gone + self.force_unlocked + self.shutdown + self.runtime_ended
    }
}

/// The counters behind [`Stats`], which all parts of a client share.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) locks_held: AtomicU64,
    requests_waiting: AtomicU64,
    pub(crate) grants: AtomicU64,
    pub(crate) contended_attempts: AtomicU64,
    expired: AtomicU64,
    gone: AtomicU64,
    force_unlocked: AtomicU64,
    shutdown: AtomicU64,
    runtime_ended: AtomicU64,
    pub(crate) renewals: AtomicU64,
    pub(crate) reconnects: AtomicU64,
    pub(crate) unknown_outcomes: AtomicU64,
    pub(crate) failed_releases: AtomicU64,
}

impl Counters {
    pub(crate) fn stats(&self) -> Stats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            locks_held: of(&self.locks_held),
            requests_waiting: of(&self.requests_waiting),
            grants: of(&self.grants),
            contended_attempts: of(&self.contended_attempts),
            losses: Losses {
                expired: of(&self.expired),
                gone: of(&self.gone),
                force_unlocked: of(&self.force_unlocked),
                shutdown: of(&self.shutdown),
                runtime_ended: of(&self.runtime_ended),
            },
            renewals: of(&self.renewals),
            reconnects: of(&self.reconnects),
            unknown_outcomes: of(&self.unknown_outcomes),
            failed_releases: of(&self.failed_releases),
        }
    }

    pub(crate) fn lost(&self, reason: LostReason) {
        add(match reason {
            LostReason::Expired => &self.expired,
            LostReason::Gone => &self.gone,
            LostReason::ForceUnlocked => &self.force_unlocked,
            LostReason::Shutdown => &self.shutdown,
            LostReason::RuntimeEnded => &self.runtime_ended,
        });
    }

    /// Counts a request as waiting until the value is dropped.
    pub(crate) fn waiting(self: &Arc<Self>) -> Waiting {
        add(&self.requests_waiting);
        Waiting(Arc::clone(self))
    }
}

/// Adds one.
pub(crate) fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// A request that waits.
#[derive(Debug)]
pub(crate) struct Waiting(Arc<Counters>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.requests_waiting.fetch_sub(1, Ordering::Relaxed);
    }
}
