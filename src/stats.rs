//! Counters of a client.

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
    /// Requests of this client that are in a wait queue now.
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
    /// [`LostReason::ClientFailed`].
    pub client_failed: u64,
}

impl Losses {
    /// All of them.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.expired + self.gone + self.force_unlocked + self.shutdown + self.client_failed
    }

    pub(crate) fn add(&mut self, reason: LostReason) {
        *match reason {
            LostReason::Expired => &mut self.expired,
            LostReason::Gone => &mut self.gone,
            LostReason::ForceUnlocked => &mut self.force_unlocked,
            LostReason::Shutdown => &mut self.shutdown,
            LostReason::ClientFailed => &mut self.client_failed,
        } += 1;
    }
}
