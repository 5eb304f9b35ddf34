//! Requests for a lock: options that become a future when they are awaited.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::time::timeout;
use tracing::Instrument;
use tracing::field::{Empty, debug};

use super::Kind;
use super::guard::LockGuard;
use super::reentrant::inspect::Inspected;
use crate::acquire::{Acquisition, acquire};
use crate::config::{LeaseTime, WaitTime};
use crate::core::Core;
use crate::error::Error;
use crate::info::LockInfo;
use crate::keys::Keys;
use crate::lease::Mode;
use crate::owner::Owner;

/// A request to acquire a lock: see [`ReentrantLock::lock`](crate::ReentrantLock::lock). Await it,
/// or let it [`run`](Self::run) a future.
///
/// Awaiting it yields the guard. The owner is the one that is current at the first poll.
///
/// ```no_run
/// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
/// use std::time::Duration;
///
/// let request = lock.lock().timeout(Duration::from_secs(2)); // nothing is sent yet
/// let guard = request.await?;
/// # guard.unlock().await
/// # }
/// ```
#[must_use = "a request does nothing until it is awaited"]
pub struct LockRequest(Options);

impl LockRequest {
    pub(crate) fn new(options: Options) -> Self {
        Self(options)
    }

    /// Waits at most this long while another owner holds the lock, then fails with
    /// [`Error::AcquireTimeout`]. Zero makes one attempt. Without it the request waits without
    /// limit; at most 3650 days.
    ///
    /// It limits the waiting: an attempt that is in flight is completed first. If the server does
    /// not answer, the request fails after this time, but not before the client's command timeout.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.0.timeout = Some(timeout);
        self
    }

    /// Acquires the lock for this long, in whole milliseconds from 1 ms to 3650 days, without
    /// renewal. Without it the lease is the watchdog timeout, and it is renewed.
    ///
    /// A re-entry never shortens the lease of the owner's other holds, and does not end their
    /// renewal.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.0.lease = Some(lease);
        self
    }

    /// Acquires the lock, runs the future as its owner, and releases the lock: as
    /// [`ReentrantLock::run`](crate::ReentrantLock::run), with the options of this request.
    ///
    /// ```no_run
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// use std::time::Duration;
    ///
    /// let total = lock.lock().timeout(Duration::from_secs(2)).run(async { 40 + 2 }).await?;
    /// # assert_eq!(total, 42);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`ReentrantLock::run`](crate::ReentrantLock::run).
    ///
    /// # Cancel safety
    /// As [`ReentrantLock::run`](crate::ReentrantLock::run).
    pub async fn run<F: Future>(self, future: F) -> Result<F::Output, Error> {
        self.await?.run_and_unlock(future).await
    }

    /// As [`run`](Self::run), with the guard: for work that asks how long the lease lasts, or that
    /// must be notified of a loss.
    ///
    /// # Errors
    /// As [`ReentrantLock::run`](crate::ReentrantLock::run).
    ///
    /// # Cancel safety
    /// As [`ReentrantLock::run`](crate::ReentrantLock::run).
    pub async fn run_with<F, T>(self, work: F) -> Result<T, Error>
    where
        F: AsyncFnOnce(&LockGuard) -> T,
    {
        let guard = self.await?;
        let output = guard.guarded(work(&guard)).await?;
        guard.unlock_after(output).await
    }
}

impl IntoFuture for LockRequest {
    type Output = Result<LockGuard, Error>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        self.0.lock()
    }
}

/// A request to acquire a lock that may be answered with "no": see
/// [`ReentrantLock::try_lock`](crate::ReentrantLock::try_lock) and
/// [`ReentrantLock::try_lock_for`](crate::ReentrantLock::try_lock_for). Await it, or let it
/// [`run`](Self::run) a future.
///
/// Awaiting it yields the guard, or `None` if another owner holds the lock.
///
/// ```no_run
/// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
/// use std::time::Duration;
///
/// let request = lock.try_lock().lease(Duration::from_secs(10)); // nothing is sent yet
/// let Some(guard) = request.await? else {
///     return Ok(println!("another owner holds it"));
/// };
/// # guard.unlock().await
/// # }
/// ```
#[must_use = "a request does nothing until it is awaited"]
pub struct TryLockRequest(Options);

impl TryLockRequest {
    pub(crate) fn new(options: Options, timeout: Duration) -> Self {
        Self(Options {
            timeout: Some(timeout),
            ..options
        })
    }

    /// Acquires the lock for this long, in whole milliseconds from 1 ms to 3650 days, without
    /// renewal. Without it the lease is the watchdog timeout, and it is renewed.
    ///
    /// A re-entry never shortens the lease of the owner's other holds, and does not end their
    /// renewal.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.0.lease = Some(lease);
        self
    }

    /// Acquires the lock, runs the future as its owner, and releases the lock. `None` if another
    /// owner holds the lock; then the future did not run.
    ///
    /// # Errors
    /// As [`ReentrantLock::run`](crate::ReentrantLock::run), without [`Error::AcquireTimeout`].
    ///
    /// # Cancel safety
    /// As [`ReentrantLock::run`](crate::ReentrantLock::run).
    pub async fn run<F: Future>(self, future: F) -> Result<Option<F::Output>, Error> {
        match self.await? {
            Some(guard) => guard.run_and_unlock(future).await.map(Some),
            None => Ok(None),
        }
    }

    /// As [`run`](Self::run), with the guard: for work that asks how long the lease lasts, or that
    /// must be notified of a loss.
    ///
    /// ```no_run
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// let left = lock.try_lock().run_with(async |guard| guard.remaining_lease()).await?;
    /// println!("{left:?}"); // None: another owner holds the lock
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`run`](Self::run).
    ///
    /// # Cancel safety
    /// As [`run`](Self::run).
    pub async fn run_with<F, T>(self, work: F) -> Result<Option<T>, Error>
    where
        F: AsyncFnOnce(&LockGuard) -> T,
    {
        match self.await? {
            Some(guard) => {
                let output = guard.guarded(work(&guard)).await?;
                guard.unlock_after(output).await.map(Some)
            }
            None => Ok(None),
        }
    }
}

impl IntoFuture for TryLockRequest {
    type Output = Result<Option<LockGuard>, Error>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        self.0.try_lock()
    }
}

impl fmt::Debug for LockRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.debug(f.debug_struct("LockRequest"))
    }
}

impl fmt::Debug for TryLockRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.debug(f.debug_struct("TryLockRequest"))
    }
}

/// What each request knows. Bad input is kept until the request is awaited, so that nothing is
/// sent.
pub(crate) struct Options {
    core: Arc<Core>,
    keys: Result<Keys, Error>,
    kind: &'static dyn Kind,
    lease: Option<Duration>,
    timeout: Option<Duration>,
}

impl Options {
    pub(crate) fn new(core: Arc<Core>, keys: Result<Keys, Error>, kind: &'static dyn Kind) -> Self {
        Self {
            core,
            keys,
            kind,
            lease: None,
            timeout: None,
        }
    }

    fn lock(self) -> BoxFuture<'static, Result<LockGuard, Error>> {
        let core = Arc::clone(&self.core);
        core.drive(async move {
            let (core, timeout) = (Arc::clone(&self.core), self.timeout.unwrap_or_default());
            match self.acquire().await? {
                (Acquisition::Granted(hold), _) => Ok(LockGuard::new(hold)),
                (Acquisition::Contended, keys) => Err(Error::AcquireTimeout {
                    held_by: held_by(&core, &keys).await,
                    lock: keys.display(),
                    timeout,
                }),
            }
        })
        .boxed()
    }

    fn try_lock(self) -> BoxFuture<'static, Result<Option<LockGuard>, Error>> {
        let core = Arc::clone(&self.core);
        core.drive(async move {
            Ok(match self.acquire().await?.0 {
                Acquisition::Granted(hold) => Some(LockGuard::new(hold)),
                Acquisition::Contended => None,
            })
        })
        .boxed()
    }

    /// Called in the first poll: the owner is the one of the code that polls, not of the code that
    /// made the request.
    async fn acquire(self) -> Result<(Acquisition, Keys), Error> {
        let keys = self.keys?;
        let mode = match self.lease {
            None => Mode::Watchdog,
            Some(lease) => {
                Mode::Fixed(
                    LeaseTime::new(lease).map_err(|problem| Error::InvalidLease {
                        lock: keys.display(),
                        lease,
                        problem,
                    })?,
                )
            }
        };
        let wait = match self.timeout {
            None => WaitTime::Unlimited,
            Some(timeout) => WaitTime::new(timeout).ok_or_else(|| Error::InvalidTimeout {
                lock: keys.display(),
                timeout,
            })?,
        };
        let owner = self.core.config.owner_policy.current();
        let ident = self.core.ident(&keys, owner.unwrap_or_else(Owner::new));
        let span = tracing::debug_span!(
            "acquire",
            lock = %ident.lock(),
            owner = %ident.owner_field(),
            waited = Empty,
            granted = Empty,
        );
        let begun = tokio::time::Instant::now();
        let acquired = acquire(self.core, self.kind, ident, mode, wait)
            .instrument(span.clone())
            .await;
        span.record("waited", debug(begun.elapsed()));
        span.record("granted", matches!(acquired, Ok(Acquisition::Granted(_))));
        Ok((acquired?, keys))
    }

    fn debug(&self, mut debug: fmt::DebugStruct<'_, '_>) -> fmt::Result {
        debug
            .field("lock", &self.keys.as_ref().map(Keys::display))
            .field("timeout", &self.timeout)
            .field("lease", &self.lease)
            .finish_non_exhaustive()
    }
}

/// Asks which owner holds the lock, for an error that is not to be late for it.
async fn held_by(core: &Core, keys: &Keys) -> Option<LockInfo> {
    const LIMIT: Duration = Duration::from_millis(250);
    let inspected = timeout(LIMIT, Inspected::of(core, keys)).await.ok()?;
    inspected.ok()?.info(core, keys).ok()?
}
