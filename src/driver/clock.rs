//! The client's clock.

use std::time::Instant;

use crate::time::Time;

/// A monotonic clock that counts from the moment at which it was made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    start: Instant,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
        }
    }

    pub(crate) fn now(&self) -> Time {
        // In 290 years the number would not fit any more.
        Time::from_nanos(self.start.elapsed().as_nanos() as u64)
    }

    /// A moment of tokio's clock.
    pub(crate) fn time(&self, instant: tokio::time::Instant) -> Time {
        let after = instant.into_std().saturating_duration_since(self.start);
        Time::from_nanos(after.as_nanos() as u64)
    }

    /// That moment for a timer of tokio.
    pub(crate) fn instant(&self, time: Time) -> tokio::time::Instant {
        let after = time.since(Time::default());
        let instant = self.start.checked_add(after).unwrap_or(self.start);
        tokio::time::Instant::from_std(instant)
    }
}
