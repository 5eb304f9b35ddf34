//! Requests for a lock: futures with options.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use pin_project_lite::pin_project;

use super::Kind;
use super::guard::{Guarded, LockGuard};
use crate::acquire::{Acquisition, acquire};
use crate::config::{LeaseTime, WaitTime};
use crate::core::Core;
use crate::error::Error;
use crate::keys::Keys;
use crate::lease::Mode;

/// What every request knows. Bad input waits here for the first poll, so that nothing is sent.
pub(crate) struct Options {
    core: Arc<Core>,
    keys: Result<Keys, Error>,
    kind: &'static dyn Kind,
    lease: Option<Duration>,
    wait: Option<Duration>,
}

impl Options {
    pub(crate) fn new(core: Arc<Core>, keys: Result<Keys, Error>, kind: &'static dyn Kind) -> Self {
        Self {
            core,
            keys,
            kind,
            lease: None,
            wait: None,
        }
    }

    /// To be called in the first poll: the owner is whoever polls, not whoever made the request.
    fn acquire(
        self,
        unless_asked: WaitTime,
    ) -> impl Future<Output = Result<(Acquisition, Keys), Error>> + Send {
        let current = self.core.config.owner_policy.current();
        async move {
            let keys = self.keys?;
            let mode = match self.lease {
                None => Mode::Watchdog,
                Some(lease) => Mode::Fixed(LeaseTime::new(lease)?),
            };
            let wait = match self.wait {
                None => unless_asked,
                Some(wait) => WaitTime::new(wait)?,
            };
            let ident = match current {
                Some(owner) => self.core.ident(&keys, owner),
                None => self.core.fresh_ident(&keys),
            };
            Ok((
                acquire(self.core, self.kind, ident, mode, wait).await?,
                keys,
            ))
        }
    }

    fn lock(self) -> BoxFuture<'static, Result<LockGuard, Error>> {
        let acquire = self.acquire(WaitTime::Unlimited);
        async move {
            match acquire.await? {
                (Acquisition::Granted(hold), _) => Ok(LockGuard::new(hold)),
                (
                    Acquisition::Contended {
                        waited,
                        remaining_ttl,
                    },
                    keys,
                ) => Err(Error::Contended {
                    lock: keys.display(),
                    waited,
                    remaining_ttl,
                }),
            }
        }
        .boxed()
    }

    fn try_lock(self) -> BoxFuture<'static, Result<Option<LockGuard>, Error>> {
        let acquire = self.acquire(WaitTime::AtMost(Duration::ZERO));
        async move {
            Ok(match acquire.await?.0 {
                Acquisition::Granted(hold) => Some(LockGuard::new(hold)),
                Acquisition::Contended { .. } => None,
            })
        }
        .boxed()
    }
}

/// A request that has not been polled yet, or the work that it has become.
enum Stage<T> {
    Asked(Option<Options>),
    Working(BoxFuture<'static, T>),
}

impl<T> Stage<T> {
    fn new(options: Options) -> Self {
        Stage::Asked(Some(options))
    }

    /// Sets options, before the first poll.
    fn set(&mut self, set: impl FnOnce(&mut Options)) {
        if let Stage::Asked(Some(options)) = self {
            set(options);
        }
    }

    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        begin: fn(Options) -> BoxFuture<'static, T>,
    ) -> Poll<T> {
        if let Stage::Asked(options) = self {
            let Some(options) = options.take() else {
                return Poll::Pending;
            };
            *self = Stage::Working(begin(options));
        }
        match self {
            Stage::Working(work) => work.poll_unpin(cx),
            Stage::Asked(_) => Poll::Pending,
        }
    }
}

/// A request to lock: see [`ReentrantLock::lock`](crate::ReentrantLock::lock). It is a future;
/// await it.
#[must_use = "futures do nothing unless they are awaited"]
pub struct LockRequest(Stage<Result<LockGuard, Error>>);

impl LockRequest {
    pub(crate) fn new(options: Options) -> Self {
        Self(Stage::new(options))
    }

    /// Waits at most this long while others hold the lock, then fails with [`Error::Contended`].
    /// Zero asks once.
    ///
    /// It bounds the waiting, not the asking: a script under way is seen through.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.0.set(|options| options.wait = Some(wait));
        self
    }

    /// Takes the lock for this long, in whole milliseconds, without renewal.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.0.set(|options| options.lease = Some(lease));
        self
    }
}

impl Future for LockRequest {
    type Output = Result<LockGuard, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll(cx, Options::lock)
    }
}

/// A request to lock if it is free: see
/// [`ReentrantLock::try_lock`](crate::ReentrantLock::try_lock). It is a future; await it.
#[must_use = "futures do nothing unless they are awaited"]
pub struct TryLockRequest(Stage<Result<Option<LockGuard>, Error>>);

impl TryLockRequest {
    pub(crate) fn new(options: Options) -> Self {
        Self(Stage::new(options))
    }

    /// Waits at most this long while others hold the lock, then answers `None`. Zero, the default,
    /// asks once.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.0.set(|options| options.wait = Some(wait));
        self
    }

    /// Takes the lock for this long, in whole milliseconds, without renewal.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.0.set(|options| options.lease = Some(lease));
        self
    }
}

impl Future for TryLockRequest {
    type Output = Result<Option<LockGuard>, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll(cx, Options::try_lock)
    }
}

pin_project! {
    /// A request to run a future under the lock: see
    /// [`ReentrantLock::run`](crate::ReentrantLock::run). It is a future; await it.
    #[must_use = "futures do nothing unless they are awaited"]
    pub struct RunRequest<F: Future> {
        request: LockRequest,
        #[pin]
        running: Running<F>,
    }
}

pin_project! {
    #[project = RunningProj]
    #[project_replace = RunningTaken]
    enum Running<F: Future> {
        Waiting { future: F },
        Guarded { #[pin] future: Guarded<F>, guard: LockGuard },
        Releasing { release: BoxFuture<'static, Result<(), Error>>, output: Option<F::Output> },
        Done,
    }
}

impl<F: Future> RunRequest<F> {
    pub(crate) fn new(options: Options, future: F) -> Self {
        Self {
            request: LockRequest::new(options),
            running: Running::Waiting { future },
        }
    }

    /// Waits at most this long for the lock, then fails with [`Error::Contended`]; the future never
    /// ran.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.request = self.request.wait(wait);
        self
    }

    /// Takes the lock for this long, in whole milliseconds, without renewal; the future is stopped
    /// when it is over.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.request = self.request.lease(lease);
        self
    }
}

impl<F: Future> Future for RunRequest<F> {
    type Output = Result<F::Output, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            match this.running.as_mut().project() {
                RunningProj::Waiting { .. } => {
                    let guard = match ready!(Pin::new(&mut *this.request).poll(cx)) {
                        Ok(guard) => guard,
                        Err(error) => {
                            this.running.set(Running::Done);
                            return Poll::Ready(Err(error));
                        }
                    };
                    if let RunningTaken::Waiting { future } =
                        this.running.as_mut().project_replace(Running::Done)
                    {
                        let future = guard.guarded(future);
                        this.running.set(Running::Guarded { future, guard });
                    }
                }
                RunningProj::Guarded { future, .. } => {
                    let outcome = ready!(future.poll(cx));
                    let RunningTaken::Guarded { guard, .. } =
                        this.running.as_mut().project_replace(Running::Done)
                    else {
                        return Poll::Pending;
                    };
                    match outcome {
                        Ok(output) => this.running.set(Running::Releasing {
                            release: guard.unlock().boxed(),
                            output: Some(output),
                        }),
                        // The guard of a lost lease has nothing to release that could be waited
                        // for.
                        Err(error) => return Poll::Ready(Err(error)),
                    }
                }
                RunningProj::Releasing { release, output } => {
                    let released = ready!(release.poll_unpin(cx));
                    let output = output.take();
                    this.running.set(Running::Done);
                    return match (released, output) {
                        (Err(error @ (Error::Lost { .. } | Error::NotHeld { .. })), _) => {
                            Poll::Ready(Err(error))
                        }
                        (Err(error), Some(output)) => {
                            // The work is done, and was done under the lock: that is what the
                            // caller has to know.
                            tracing::warn!(%error, "the lock's release was not confirmed; its lease will run out");
                            Poll::Ready(Ok(output))
                        }
                        (Ok(()), Some(output)) => Poll::Ready(Ok(output)),
                        (_, None) => Poll::Pending,
                    };
                }
                RunningProj::Done => return Poll::Pending,
            }
        }
    }
}

impl fmt::Debug for LockRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockRequest").finish_non_exhaustive()
    }
}

impl fmt::Debug for TryLockRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TryLockRequest").finish_non_exhaustive()
    }
}

impl<F: Future> fmt::Debug for RunRequest<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunRequest").finish_non_exhaustive()
    }
}
