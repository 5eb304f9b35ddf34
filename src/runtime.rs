//! The tokio runtime on which a client connected: how operations work outside it, and how they end
//! with it.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::error::Error;

const ENDED: Error = Error::NoRuntime {
    problem: "the runtime on which the client connected has ended",
};

/// The runtime that drives a client's connections and tasks.
#[derive(Debug, Clone)]
pub(crate) struct Runtime {
    handle: Handle,
    ended: Arc<AtomicBool>,
}

impl Runtime {
    /// The runtime in which the caller runs.
    pub(crate) fn current() -> Result<Self, Error> {
        let handle = Handle::try_current().map_err(|_| Error::NoRuntime {
            problem: "connect was called outside a tokio runtime",
        })?;
        // tokio has no function that tells whether a runtime has timers: without them this panics.
        catch_unwind(|| drop(tokio::time::sleep(Duration::ZERO))).map_err(|_| {
            Error::NoRuntime {
                problem: "the runtime has no timers: build it with enable_all()",
            }
        })?;
        Ok(Self {
            handle,
            ended: Arc::default(),
        })
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    pub(crate) fn ensure_alive(&self) -> Result<(), Error> {
        if self.has_ended() { Err(ENDED) } else { Ok(()) }
    }

    /// Makes a future work outside a runtime too, where it uses the timers of this one, and ends it
    /// with an error as soon as this runtime has ended: nothing would answer it.
    pub(crate) async fn drive<T>(
        self,
        future: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let mut future = pin!(future);
        poll_fn(|cx| match self.ensure_alive() {
            Ok(()) => self
                .within(|| future.as_mut().poll(cx))
                .unwrap_or(Poll::Ready(Err(ENDED))),
            Err(error) => Poll::Ready(Err(error)),
        })
        .await
    }

    /// Runs the function in the caller's runtime, or in this one if the caller is in none. `None`
    /// if this one ends meanwhile.
    pub(crate) fn within<T>(&self, run: impl FnOnce() -> T) -> Option<T> {
        if Handle::try_current().is_ok() {
            return Some(run());
        }
        let _entered = self.handle.enter();
        // A timer that is used while its runtime ends panics; the flag may be set a moment later.
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(output) => Some(output),
            Err(panic) if is_of_ending_runtime(&*panic) => None,
            Err(panic) => resume_unwind(panic),
        }
    }

    /// A value for a task of this runtime to own. If the runtime drops the task, `ended` is called;
    /// not if the client was shut down before.
    pub(crate) fn sentinel(
        &self,
        stopped: watch::Receiver<bool>,
        ended: impl FnOnce() + Send + 'static,
    ) -> Sentinel {
        Sentinel {
            runtime: self.clone(),
            stopped,
            ended: Some(Box::new(ended)),
        }
    }
}

/// See [`Runtime::sentinel`].
pub(crate) struct Sentinel {
    runtime: Runtime,
    stopped: watch::Receiver<bool>,
    ended: Option<Box<dyn FnOnce() + Send>>,
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        // An error means that the client was dropped.
        let is_expected = *self.stopped.borrow() || self.stopped.has_changed().is_err();
        if let (false, Some(ended)) = (is_expected, self.ended.take()) {
            self.runtime.ended.store(true, Ordering::Release);
            ended();
        }
    }
}

/// Whether this is the panic of tokio's timers in a runtime that ends. Only its text tells.
fn is_of_ending_runtime(panic: &(dyn Any + Send)) -> bool {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.is_some_and(|text| text.contains("being shutdown") || text.contains("shutting down"))
}
