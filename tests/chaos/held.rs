//! Acquires and holds that write down how they end, also if the future that owns them is dropped.

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use redisson_lock::{Error, LockGuard};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::history::{Event, Nanos, Recorder, now};

/// A pending acquire. Dropping it records that the caller dropped the future.
pub struct PendingAcquire {
    pub attempt: u64,
    pub recorder: Arc<Recorder>,
    pub answered: bool,
}

/// A guard whose events are recorded. Dropping it releases the hold.
pub struct Held {
    pub attempt: u64,
    pub lock: usize,
    pub recorder: Arc<Recorder>,
    /// `None` once its release has begun.
    pub guard: Option<LockGuard>,
    pub watch: AbortHandle,
}

impl PendingAcquire {
    pub fn answer(mut self, event: Event) {
        self.answered = true;
        self.recorder.record(now(), self.attempt, event);
    }
}

impl Drop for PendingAcquire {
    fn drop(&mut self) {
        if !self.answered {
            self.recorder.record(now(), self.attempt, Event::Cancelled);
        }
    }
}

impl Held {
    pub fn is_lost(&self) -> bool {
        self.guard.as_ref().is_some_and(LockGuard::is_lost)
    }

    /// Asks how long the lock is certainly not lost, and records that.
    pub fn sure(&self) -> bool {
        let at = now();
        let remaining = self
            .guard
            .as_ref()
            .map_or(0, |guard| guard.remaining_lease().as_nanos() as Nanos);
        if remaining > 0 {
            self.recorder
                .record(at, self.attempt, Event::Sure { remaining });
        }
        remaining > 0
    }

    /// Records that the release begins, and returns the guard for it.
    pub fn releasing(&mut self, how: &str) -> Option<LockGuard> {
        self.watch.abort();
        self.recorder
            .record(now(), self.attempt, Event::Releasing { how: how.into() });
        self.guard.take()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.guard.is_some() {
            drop(self.releasing("drop"));
        }
    }
}

/// The event for an acquire's error, by what the acquire may have left on the server.
pub fn refused(error: &Error) -> Event {
    match error {
        Error::AcquireTimeout { .. } => Event::Failed {
            why: "contended".into(),
        },
        Error::OutcomeUnknown { .. } => Event::Unknown {
            why: error.to_string(),
        },
        // The grant came too late, and the background releases it.
        Error::Lost { .. } => Event::TakenBack {
            why: error.to_string(),
        },
        error => Event::Failed {
            why: error.to_string(),
        },
    }
}

/// Runs a future, and drops it after so many polls or so much time. Returns its output if it
/// completed before.
pub async fn unless_cancelled<F: Future>(
    cancel_after: Option<(usize, Duration)>,
    future: F,
) -> Option<F::Output> {
    let Some((mut polls, time)) = cancel_after else {
        return Some(future.await);
    };
    let mut future = pin!(future);
    let limited = std::future::poll_fn(|cx| {
        if polls == 0 {
            return Poll::Ready(None);
        }
        polls -= 1;
        future.as_mut().poll(cx).map(Some)
    });
    timeout(time, limited).await.ok().flatten()
}
