//! How long, and how often, an operation tries again.

use std::time::Duration;

use tokio::time::{Instant, sleep};

const FIRST: Duration = Duration::from_millis(10);
pub(crate) const LONGEST: Duration = Duration::from_millis(250);

/// Pauses that grow, within a limit of time that starts now.
#[derive(Debug)]
pub(crate) struct Patience {
    /// `None` where the clock cannot count that far.
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

    /// Sleeps before another try; `false` if there is no time left for one.
    pub(crate) async fn pause(&mut self) -> bool {
        // Spread, so that many who met the same trouble do not come back as one.
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
    async fn pauses_end_with_the_limit() {
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
