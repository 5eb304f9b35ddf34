//! Requests for a lock: options that become a future when they are awaited.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;
use tracing::Instrument;
use tracing::field::{Empty, debug};

use super::guard::LockGuard;
use super::kinds::{LockKind, Reentrant};
use crate::config::{LeaseTime, WaitTime};
use crate::driver::Acquisition;
use crate::engine::{AcquireRequest, Outcome, Wait};
use crate::error::Error;
use crate::handle::Handle;
use crate::info::LockInfo;
use crate::keys::Keys;
use crate::kind::Kind;
use crate::owner::{Owner, TaskKey};

/// A request to acquire a lock: see [`Lock::lock`](crate::Lock::lock). Await it,
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
pub struct LockRequest<K = Reentrant>(Options<K>);

impl<K: LockKind> LockRequest<K> {
    pub(crate) fn new(options: Options<K>) -> Self {
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
    /// [`Lock::run`](crate::Lock::run), with the options of this request.
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
    /// As [`Lock::run`](crate::Lock::run).
    ///
    /// # Cancel safety
    /// As [`Lock::run`](crate::Lock::run).
    pub async fn run<F: Future>(self, future: F) -> Result<F::Output, Error> {
        self.await?.run_and_unlock(future).await
    }

    /// As [`run`](Self::run), with the guard: for work that asks how long the lease lasts, or that
    /// must be notified of a loss.
    ///
    /// # Errors
    /// As [`Lock::run`](crate::Lock::run).
    ///
    /// # Cancel safety
    /// As [`Lock::run`](crate::Lock::run).
    pub async fn run_with<F, T>(self, work: F) -> Result<T, Error>
    where
        F: AsyncFnOnce(&LockGuard<K>) -> T,
    {
        let guard = self.await?;
        let output = guard.guarded(async { work(&guard).await }).await?;
        guard.unlock_after(output).await
    }
}

impl<K: LockKind> IntoFuture for LockRequest<K> {
    type Output = Result<LockGuard<K>, Error>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        self.0.lock()
    }
}

/// A request to acquire a lock that may be answered with "no": see
/// [`Lock::try_lock`](crate::Lock::try_lock) and
/// [`Lock::try_lock_for`](crate::Lock::try_lock_for). Await it, or let it
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
pub struct TryLockRequest<K = Reentrant>(Options<K>);

impl<K: LockKind> TryLockRequest<K> {
    pub(crate) fn new(options: Options<K>, timeout: Duration) -> Self {
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
    /// As [`Lock::run`](crate::Lock::run), without [`Error::AcquireTimeout`].
    ///
    /// # Cancel safety
    /// As [`Lock::run`](crate::Lock::run).
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
        F: AsyncFnOnce(&LockGuard<K>) -> T,
    {
        match self.await? {
            Some(guard) => {
                let output = guard.guarded(async { work(&guard).await }).await?;
                guard.unlock_after(output).await.map(Some)
            }
            None => Ok(None),
        }
    }
}

impl<K: LockKind> IntoFuture for TryLockRequest<K> {
    type Output = Result<Option<LockGuard<K>>, Error>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        self.0.try_lock()
    }
}

impl<K> fmt::Debug for LockRequest<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.debug(f.debug_struct("LockRequest"))
    }
}

impl<K> fmt::Debug for TryLockRequest<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.debug(f.debug_struct("TryLockRequest"))
    }
}

/// What each request knows. Bad input is kept until the request is awaited, so that nothing is
/// sent.
pub(crate) struct Options<K> {
    client: Arc<Handle>,
    keys: Result<Keys, Error>,
    lease: Option<Duration>,
    timeout: Option<Duration>,
    kind: PhantomData<fn() -> K>,
}

impl<K> Options<K> {
    pub(crate) fn new(client: Arc<Handle>, keys: Result<Keys, Error>) -> Self {
        Self {
            client,
            keys,
            lease: None,
            timeout: None,
            kind: PhantomData,
        }
    }
}

impl<K: LockKind> Options<K> {
    fn lock(self) -> BoxFuture<'static, Result<LockGuard<K>, Error>> {
        async move {
            let client = Arc::clone(&self.client);
            let timeout = self.timeout.unwrap_or_default();
            match self.acquire().await? {
                (Some(guard), _) => Ok(guard),
                (None, keys) => Err(Error::AcquireTimeout {
                    held_by: held_by(&client, &keys, K::KIND).await,
                    lock: keys.display(),
                    timeout,
                }),
            }
        }
        .boxed()
    }

    fn try_lock(self) -> BoxFuture<'static, Result<Option<LockGuard<K>>, Error>> {
        async move { Ok(self.acquire().await?.0) }.boxed()
    }

    /// Called in the first poll: the owner is the one of the code that polls, not of the code that
    /// made the request.
    async fn acquire(self) -> Result<(Option<LockGuard<K>>, Keys), Error> {
        let keys = self.keys?;
        let lease = match self.lease {
            None => None,
            Some(lease) => Some(
                LeaseTime::new(lease).map_err(|problem| Error::InvalidLease {
                    lock: keys.display(),
                    lease,
                    problem,
                })?,
            ),
        };
        let wait = match self.timeout {
            None => Wait::Unlimited,
            Some(timeout) => {
                let wait = WaitTime::new(timeout).ok_or_else(|| Error::InvalidTimeout {
                    lock: keys.display(),
                    timeout,
                })?;
                Wait::AtMost(wait.0)
            }
        };
        let client = self.client;
        let current = client.owner_policy.current();
        let owner = K::KIND.owner(current).unwrap_or_else(Owner::new);
        let request = AcquireRequest {
            keys: keys.clone(),
            kind: K::KIND,
            owner,
            lease,
            wait,
            task: TaskKey::current(),
        };
        let span = tracing::debug_span!(
            "acquire",
            lock = %keys.name(),
            owner = %client.field(owner),
            waited = Empty,
            granted = Empty,
        );
        // Also recorded where the request is dropped.
        let mut recorded = Recorded {
            span: span.clone(),
            begun: Instant::now(),
            is_granted: false,
        };
        let acquiring = async {
            let pending = client
                .driver
                .submit(|engine, now| engine.acquire(now, request));
            pending.acquired().await
        };
        match acquiring.instrument(span).await? {
            Acquisition::Granted(grant) => {
                recorded.is_granted = true;
                drop(recorded);
                let guard = LockGuard::new(client, keys.clone(), owner, grant);
                Ok((Some(guard), keys))
            }
            Acquisition::Contended => Ok((None, keys)),
        }
    }
}

impl<K> Options<K> {
    fn debug(&self, mut debug: fmt::DebugStruct<'_, '_>) -> fmt::Result {
        match &self.keys {
            Ok(keys) => debug.field("lock", &keys.name()),
            Err(error) => debug.field("lock", error),
        };
        debug
            .field("timeout", &self.timeout)
            .field("lease", &self.lease)
            .finish_non_exhaustive()
    }
}

/// Records in the span of an acquisition how it ended.
struct Recorded {
    span: tracing::Span,
    begun: Instant,
    is_granted: bool,
}

impl Drop for Recorded {
    fn drop(&mut self) {
        self.span.record("waited", debug(self.begun.elapsed()));
        self.span.record("granted", self.is_granted);
    }
}

/// Asks which owner holds the lock, for an error that is not to be late for it.
async fn held_by(client: &Handle, keys: &Keys, kind: Kind) -> Option<LockInfo> {
    const LIMIT: Duration = Duration::from_millis(250);
    let pending = client
        .driver
        .submit(|engine, now| engine.inspect(now, keys, kind, Some(LIMIT)));
    match pending.outcome().await {
        Outcome::Inspected(inspected) => client.info(keys, &inspected).ok()?,
        _ => None,
    }
}
