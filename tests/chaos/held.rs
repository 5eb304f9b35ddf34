//! Holds that write down what becomes of them, also when the future that has them is dropped.

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use redisson_lock::{Error, LockGuard};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::history::{Event, Nanos, Recorder, now};

/// An acquire under way. Dropping it writes down that its caller went away.
pub struct PendingAcquire {
    pub attempt: u64,
    pub recorder: Arc<Recorder>,
    pub answered: bool,
}

/// A guard with what is written down of it. Dropping it gives it back.
pub struct Held {
    pub attempt: u64,
    pub lock: usize,
    pub recorder: Arc<Recorder>,
    /// `None` once it is being given back otherwise.
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

    /// Asks for how long it is sure.
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

    /// Writes down that it is about to be given back, and hands out the guard for that.
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

/// What an acquire's error says of what is left on the server.
pub fn refused(error: &Error) -> Event {
    match error {
        Error::AcquireTimeout { .. } => Event::Failed {
            why: "contended".into(),
        },
        Error::OutcomeUnknown { .. } => Event::Unknown {
            why: error.to_string(),
        },
        // The grant came too late, and is being taken back.
        Error::Lost { .. } => Event::TakenBack {
            why: error.to_string(),
        },
        error => Event::Failed {
            why: error.to_string(),
        },
    }
}

/// The future's output, unless its caller goes away before: after so many polls or so much time.
pub async fn unless_cancelled<F: Future>(
    cancels: Option<(usize, Duration)>,
    future: F,
) -> Option<F::Output> {
    let Some((mut polls, time)) = cancels else {
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
