//! Settings that cannot hold an invalid value.

use std::time::Duration;

use crate::error::Error;

const LONGEST: Duration = Duration::from_secs(3650 * 24 * 60 * 60);

/// A lease time in whole milliseconds: 1 ms to 3650 days.
///
/// Redis refuses an expiry that overflows, and 0 or less deletes the key
/// (<https://redis.io/docs/latest/commands/pexpire/>).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LeaseTime(u64);

impl LeaseTime {
    /// The error is the problem.
    pub(crate) fn new(lease: Duration) -> Result<Self, &'static str> {
        if lease < Duration::from_millis(1) {
            Err("shorter than 1ms")
        } else if lease > LONGEST {
            Err("longer than 3650 days")
        } else {
            // At most 3650 days, so the number fits.
            Ok(Self(lease.as_millis() as u64))
        }
    }

    pub(crate) fn millis(self) -> u64 {
        self.0
    }

    pub(crate) fn duration(self) -> Duration {
        Duration::from_millis(self.0)
    }

    /// How long the lease counts as proved, from the moment at which the script was sent.
    ///
    /// The server's expiry starts later, when the script runs, so with perfect clocks and timers
    /// the whole lease would do. The margin, a tenth, allows for clocks that differ in speed (a
    /// server's clock that is being corrected runs up to a twelfth faster: `maxslewrate` of chrony)
    /// and timers that fire late: the owner must be notified of the loss before another owner can
    /// acquire the lock.
    pub(crate) fn provable(self) -> Duration {
        self.duration() * 9 / 10
    }

    /// The lease that lasts for at least that long, and for a millisecond.
    pub(crate) fn at_least(left: Duration) -> Self {
        let millis = u64::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
        Self(millis.clamp(1, LONGEST.as_millis() as u64))
    }
}

/// How long a request waits at most for a lock that another owner holds; zero makes one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WaitTime(pub(crate) Duration);

impl WaitTime {
    /// `None` if it is longer than 3650 days.
    pub(crate) fn new(wait: Duration) -> Option<Self> {
        (wait <= LONGEST).then_some(Self(wait))
    }
}

/// What a client does when a task waits for a lock that the same task holds under another owner.
///
/// Such a task waits forever, unless the code that holds the lock runs in another branch of the
/// task (`join!`) and releases the lock.
///
/// A request is checked once, when it begins to wait: `lock()` without a timeout or with one above
/// zero, and `try_lock_for` with a time above zero. `try_lock()` and a zero timeout make one
/// attempt and end, so they are not checked.
///
/// A hold counts for the task that acquired it, or that called
/// [`LockGuard::run`](crate::LockGuard::run) last, also if its guard was passed to another task or
/// if it was detached. Outside a tokio task the thread counts as the task. A hold with a lease of
/// its own ends by itself, so it does not count.
///
/// Before it reports a deadlock, the client asks the server whether the owner still has the hold.
///
/// ```no_run
/// use redisson_lock::{DeadlockDetection, Error, LockClient};
///
/// # async fn example() -> Result<(), redisson_lock::Error> {
/// let client = LockClient::builder()
///     .deadlock_detection(DeadlockDetection::Fail)
///     .connect("redis://127.0.0.1:6379")
///     .await?;
/// let lock = client.lock("order:42");
/// let guard = lock.lock().await?;
/// // Outside a scope the second acquisition has an owner of its own.
/// assert!(matches!(lock.lock().await, Err(Error::WouldDeadlock { .. })));
/// guard.unlock().await
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DeadlockDetection {
    /// The client logs a warning and the task waits (the default).
    #[default]
    Warn,
    /// The request fails with [`Error::WouldDeadlock`], also if it has a timeout above zero, and
    /// also where another branch of the same task would have released the lock. `try_lock()` and a
    /// request with a zero timeout do not wait, so they do not fail with it.
    Fail,
}

/// The client's settings, checked by the builder.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    pub(crate) watchdog_timeout: LeaseTime,
    pub(crate) recheck_interval: Option<Duration>,
    pub(crate) retry_timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) command_timeout: Duration,
    /// What `command_timeout` may grow to while replies are late.
    pub(crate) longest_reply: Duration,
    pub(crate) renewal_batch: usize,
    pub(crate) deadlock_detection: DeadlockDetection,
    /// For how long a lock is passed on before it is released on the server.
    pub(crate) passing_time: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            watchdog_timeout: LeaseTime(30_000),
            recheck_interval: None,
            retry_timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(5),
            command_timeout: Duration::from_secs(3),
            longest_reply: Duration::from_secs(3),
            renewal_batch: 100,
            deadlock_detection: DeadlockDetection::default(),
            passing_time: Duration::from_millis(10),
        }
    }
}

/// Returns the value if it is within the bounds; `allowed` states them for the error.
pub(crate) fn bounded(
    setting: &'static str,
    value: Duration,
    bounds: std::ops::RangeInclusive<Duration>,
    allowed: &'static str,
) -> Result<Duration, Error> {
    if bounds.contains(&value) {
        Ok(value)
    } else {
        Err(Error::InvalidConfig {
            setting,
            problem: format!("{value:?} is out of bounds"),
            allowed,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_that_deletes_key_or_overflows_is_refused() {
        for lease in [
            Duration::ZERO,
            Duration::from_nanos(1),
            Duration::from_micros(999),
            Duration::MAX,
        ] {
            assert!(LeaseTime::new(lease).is_err(), "{lease:?}");
        }
        assert!(LeaseTime::new(Duration::from_millis(i64::MAX as u64)).is_err());
        assert_eq!(
            LeaseTime::new(Duration::from_micros(1_999))
                .unwrap()
                .millis(),
            1
        );
        assert_eq!(LeaseTime::new(LONGEST).unwrap().duration(), LONGEST);
    }

    #[test]
    fn proved_time_is_shorter_than_lease() {
        for (lease, micros) in [
            (1, 900),
            (2, 1_800),
            (100, 90_000),
            (2_000, 1_800_000),
            (30_000, 27_000_000),
        ] {
            let lease = LeaseTime::new(Duration::from_millis(lease)).unwrap();
            assert_eq!(lease.provable(), Duration::from_micros(micros));
        }
    }

    #[test]
    fn wait_over_limit_is_refused() {
        assert_eq!(
            WaitTime::new(Duration::ZERO),
            Some(WaitTime(Duration::ZERO))
        );
        assert_eq!(WaitTime::new(Duration::MAX), None);
    }
}
