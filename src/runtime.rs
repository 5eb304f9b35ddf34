//! The tokio runtime on which a client connected, and what becomes of operations without it.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::error::Error;

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
        Ok(Self {
            handle,
            ended: Arc::default(),
        })
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    pub(crate) fn ensure_alive(&self) -> Result<(), Error> {
        if self.has_ended() {
            return Err(Error::NoRuntime {
                problem: "the runtime on which the client connected has ended",
            });
        }
        Ok(())
    }

    /// Makes a future work outside a runtime too, where it uses the timers of this one, and ends it
    /// with an error as soon as this runtime has ended: nothing would answer it.
    pub(crate) async fn drive<T>(
        self,
        future: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let mut future = pin!(future);
        poll_fn(|cx| match self.ensure_alive() {
            Ok(()) => self.within(|| future.as_mut().poll(cx)),
            Err(error) => Poll::Ready(Err(error)),
        })
        .await
    }

    /// Runs the function in the caller's runtime, or in this one if the caller is in none.
    pub(crate) fn within<T>(&self, run: impl FnOnce() -> T) -> T {
        let _entered = Handle::try_current().is_err().then(|| self.handle.enter());
        run()
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
