//! How long a reply may take.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The limit of a reply. It doubles with each connection that is given up for want of a reply,
/// because the replies may merely be late: otherwise no connection would last until its first one.
/// The first reply within half of the shortest limit has that one apply again: after one that is
/// barely in time, the next would be late.
#[derive(Debug)]
pub(crate) struct Limit {
    shortest: Duration,
    longest: Duration,
    micros: AtomicU64,
}

impl Limit {
    pub(crate) fn new(shortest: Duration, longest: Duration) -> Self {
        Self {
            shortest,
            longest: longest.max(shortest),
            micros: AtomicU64::new(micros(shortest)),
        }
    }

    pub(super) fn now(&self) -> Duration {
        Duration::from_micros(self.micros.load(Ordering::Relaxed))
    }

    pub(super) fn has_grown(&self) -> bool {
        self.now() > self.shortest
    }

    /// A connection got no reply in time.
    pub(super) fn missed(&self) {
        let longer = (self.now() * 2).min(self.longest);
        self.micros.store(micros(longer), Ordering::Relaxed);
    }

    /// A reply took so long. Returns whether the limit is shorter now.
    pub(super) fn replied(&self, took: Duration) -> bool {
        let shortest = micros(self.shortest);
        took < self.shortest / 2 && self.micros.swap(shortest, Ordering::Relaxed) != shortest
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_doubles_up_to_the_longest_until_a_reply_is_soon() {
        let ms = Duration::from_millis;
        let limit = Limit::new(ms(300), ms(1_000));
        for expected in [600, 1_000, 1_000] {
            limit.missed();
            assert_eq!(limit.now(), ms(expected));
        }
        assert!(!limit.replied(ms(400)));
        assert_eq!(limit.now(), ms(1_000));
        assert!(!limit.replied(ms(200)));
        assert!(limit.replied(ms(100)));
        assert!(!limit.replied(ms(100)));
        assert_eq!(limit.now(), ms(300));
        let fixed = Limit::new(ms(300), ms(0));
        fixed.missed();
        assert_eq!(fixed.now(), ms(300));
    }
}
