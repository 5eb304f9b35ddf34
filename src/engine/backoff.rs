//! Backoff between the tries of an operation.

use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;

use crate::time::Time;

/// Pauses that grow to at most 250 ms, until a time limit.
#[derive(Debug, Clone, Copy)]
pub(super) struct Backoff {
    ends: Time,
    next: Duration,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(10);
    pub(super) const LONGEST: Duration = Duration::from_millis(250);

    pub(super) fn new(now: Time, limit: Duration) -> Self {
        Self {
            ends: now + limit,
            next: Self::FIRST,
        }
    }

    /// When the next try is due; `None` if the limit leaves no time for one.
    pub(super) fn pause(&mut self, now: Time, rng: &mut StdRng) -> Option<Time> {
        // Random, so that callers that failed at the same time do not retry at the same time.
        let at = now + self.next.mul_f64(rng.random_range(0.5..1.0));
        if at > self.ends {
            return None;
        }
        self.next = (self.next * 2).min(Self::LONGEST);
        Some(at)
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn pauses_stop_at_time_limit() {
        let mut rng = StdRng::seed_from_u64(1);
        let (mut now, limit) = (Time::default(), Duration::from_secs(2));
        let mut backoff = Backoff::new(now, limit);
        let mut pauses = 0;
        while let Some(at) = backoff.pause(now, &mut rng) {
            (now, pauses) = (at, pauses + 1);
        }
        assert!(now <= Time::default() + limit);
        assert!((8..60).contains(&pauses), "{pauses}");
        assert!(
            Backoff::new(now, Duration::ZERO)
                .pause(now, &mut rng)
                .is_none()
        );
    }
}
