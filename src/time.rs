//! Moments of the client's clock.

use std::fmt;
use std::ops::Add;
use std::time::Duration;

/// A moment, in nanoseconds since the client was made.
///
/// The engine is handed the time and never reads a clock, so that a simulation can run it. A number
/// also fits into an atomic, which guards read without a lock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Time(u64);

impl Time {
    /// The moment at which the clock was made.
    pub(crate) const ZERO: Self = Self(0);

    /// The last moment that can be represented: some 290 years.
    pub(crate) const MAX: Self = Self(u64::MAX >> 1);

    pub(crate) fn from_nanos(nanos: u64) -> Self {
        Self(nanos.min(Self::MAX.0))
    }

    pub(crate) fn nanos(self) -> u64 {
        self.0
    }

    /// How long ago `earlier` was; zero if it is not earlier.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self::from_nanos(self.0.saturating_add(nanos))
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.6}", self.0 as f64 / 1e9)
    }
}
