//! Backoff between the tries of an operation.

use std::time::Duration;

use tokio::time::{Instant, sleep};

const FIRST: Duration = Duration::from_millis(10);
pub(crate) const LONGEST: Duration = Duration::from_millis(250);

/// Pauses that grow to at most 250 ms, until a time limit that starts with [`Patience::new`].
#[derive(Debug)]
pub(crate) struct Patience {
    /// `None` if the clock cannot represent that moment: no limit.
    ends: Option<Instant>,
    next: Duration,
}

impl Patience {
    pub(crate) fn new(limit: Duration) -> Self {
        Self {
            ends: Instant::now().checked_add(limit),
            next: FIRST,
        }
    }

    /// Sleeps before the next try. Returns `false` at once if the limit leaves no time for one.
    pub(crate) async fn pause(&mut self) -> bool {
        // Random, so that callers that failed at the same time do not retry at the same time.
        let pause = self.next.mul_f64(rand::random_range(0.5..1.0));
        if self.ends.is_some_and(|ends| Instant::now() + pause > ends) {
            return false;
        }
        sleep(pause).await;
        self.next = (self.next * 2).min(LONGEST);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pauses_stop_at_time_limit() {
        let begun = Instant::now();
        let mut patience = Patience::new(Duration::from_secs(2));
        let mut pauses = 0;
        while patience.pause().await {
            pauses += 1;
        }
        assert!(begun.elapsed() <= Duration::from_secs(2));
        assert!((8..60).contains(&pauses), "{pauses}");
        assert!(!Patience::new(Duration::ZERO).pause().await);
    }
}
