//! Guards: a hold as a value.

use std::fmt;
use std::future::poll_fn;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pin_project_lite::pin_project;
use tracing::Instrument;
use tracing::instrument::Instrumented;

use super::kinds::{Fenced, LockKind, Reentrant, ReentrantKind};
use crate::driver::Clock;
use crate::engine::{Grant, Outcome};
use crate::error::{Error, LostReason};
use crate::handle::{Handle, failed};
use crate::keys::Keys;
use crate::lease_cell::LossWaiter;
use crate::owner::{Owner, OwnerExt, TaskKey, WithOwner};

/// One hold of a lock, as a value. Dropping it releases the hold in the background;
/// [`unlock`](Self::unlock) waits for the server's confirmation.
///
/// The background is a thread of the client. A guard that is dropped when the process ends leaves
/// the lock held until its lease expires: call
/// [`LockClient::shutdown`](crate::LockClient::shutdown) at the end of `main`, on error paths too.
///
/// A guard does not stop code whose lock is lost: [`run`](Self::run) does, and
/// [`lost`](Self::lost) reports it.
///
/// ```no_run
/// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
/// let guard = lock.lock().await?;
/// println!("held for another {:?} at least", guard.remaining_lease());
/// guard.unlock().await?;
/// # Ok(()) }
/// ```
#[must_use = "a guard that is dropped at once releases the lock at once"]
pub struct LockGuard<K = Reentrant> {
    client: Arc<Handle>,
    keys: Keys,
    owner: Owner,
    grant: Grant,
    /// Whether the hold is released, or kept without a guard.
    is_settled: bool,
    kind: PhantomData<fn() -> K>,
}

impl<K: LockKind> LockGuard<K> {
    pub(crate) fn new(client: Arc<Handle>, keys: Keys, owner: Owner, grant: Grant) -> Self {
        Self {
            client,
            keys,
            owner,
            grant,
            is_settled: false,
            kind: PhantomData,
        }
    }

    /// The name of the lock.
    #[must_use]
    pub fn name(&self) -> &str {
        self.keys.name()
    }

    /// The owner whose hold it is.
    #[must_use]
    pub fn owner(&self) -> Owner {
        self.owner
    }

    /// How much longer the lock is certain to be held: by this process's clock, counted from the
    /// moment at which the last confirmed script was sent, less a margin of a tenth of the lease.
    /// Zero once the lock is lost.
    #[must_use]
    pub fn remaining_lease(&self) -> Duration {
        self.grant.cell.lease.remaining(self.clock().now())
    }

    /// Whether the lock is lost, by what the client knows and by its clock. It sends nothing.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.loss().is_some()
    }

    /// Resolves when the lock is lost, with the reason; never if the hold is released first.
    ///
    /// It resolves before another owner can acquire the lock, unless the key is deleted,
    /// force-unlocked, evicted, or missing after a restart or a fail-over of the server. Then it
    /// resolves with the next renewal, at most a third of the watchdog timeout later; for a hold
    /// with a lease of its own at the end of that lease.
    ///
    /// ```no_run
    /// # async fn work() {}
    /// # async fn example(guard: redisson_lock::LockGuard) -> Result<(), redisson_lock::Error> {
    /// tokio::select! {
    ///     () = work() => guard.unlock().await?,
    ///     reason = guard.lost() => eprintln!("stopped: {reason}"),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Cancel safety
    /// It changes nothing, so it can be dropped at any time.
    pub fn lost(&self) -> impl Future<Output = LostReason> + Send + use<K> {
        let (clock, mut waiter) = (self.clock(), LossWaiter::new(Arc::clone(&self.grant.cell)));
        poll_fn(move |cx| waiter.poll(clock.now(), cx))
    }

    /// Runs the future in the owner's scope, where locking the same lock re-enters it, and drops it
    /// when the lock is lost. The guard stays. With a simple lock, which nothing re-enters, the
    /// scope is the surrounding one.
    ///
    /// ```no_run
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// let guard = lock.lock().await?;
    /// let two = guard.run(async { lock.run(async { 2 }).await }).await??;
    /// # assert_eq!(two, 2);
    /// guard.unlock().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Lost`]: the lock was lost before the future was done. The future was dropped where
    /// it stood: check, or undo, what it did.
    ///
    /// # Cancel safety
    /// Dropping it drops the future given, and nothing else.
    pub async fn run<F: Future>(&self, future: F) -> Result<F::Output, Error> {
        let (hold, task) = (self.grant.hold, TaskKey::current());
        let _ = self
            .client
            .driver
            .apply(|engine, _| engine.use_hold(hold, task));
        self.guarded(future).await
    }

    /// Releases the hold, and waits until the server has confirmed it. The owner's last release
    /// frees the lock.
    ///
    /// ```no_run
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// let guard = lock.lock().await?;
    /// // ... work ...
    /// match guard.unlock().await {
    ///     Err(error) if error.is_lost() => eprintln!("check what was done: {error}"),
    ///     unlocked => unlocked?,
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// * [`Error::Lost`]: the lock was lost while it was held, by
    ///   [`LockClient::shutdown`](crate::LockClient::shutdown) also. Another owner may have held
    ///   it: check, or undo, what was done under it.
    /// * [`Error::OutcomeUnknown`]: the server did not answer, or could not be reached, within the
    ///   client's retry timeout, or its command timeout if that is longer. The release is repeated
    ///   in the background: there is nothing to repeat for the caller. The work was done under the
    ///   lock: the lease was valid when `unlock` was called.
    /// * [`Error::Connection`], [`Error::Server`]: the server cannot be reached, or refused the
    ///   release. The lock stays held until its lease expires.
    ///
    /// # Cancel safety
    /// Dropping it leaves the release to the background, as dropping the guard does.
    pub async fn unlock(self) -> Result<(), Error> {
        self.release(true).await
    }

    /// Releases the hold. `is_reported` says whether the caller gets to see an unknown outcome.
    async fn release(mut self, is_reported: bool) -> Result<(), Error> {
        self.is_settled = true;
        let hold = self.grant.hold;
        let begin =
            |engine: &mut crate::engine::Engine, now| engine.release(now, hold, is_reported);
        match self.client.driver.submit(begin).outcome().await {
            Outcome::Done => Ok(()),
            outcome => Err(match failed(outcome) {
                // The client has ended, and with it the lock was lost.
                Error::Closed | Error::ClientFailed => Error::Lost {
                    lock: self.keys.display(),
                    reason: self.loss().unwrap_or(LostReason::Shutdown),
                },
                error => error,
            }),
        }
    }

    /// Runs the future under the lock and releases the lock.
    pub(crate) async fn run_and_unlock<F: Future>(self, future: F) -> Result<F::Output, Error> {
        let output = self.guarded(future).await?;
        self.unlock_after(output).await
    }

    /// Releases the lock under which the output was made.
    pub(crate) async fn unlock_after<T>(self, output: T) -> Result<T, Error> {
        let (lock, client) = (self.name().to_owned(), Arc::clone(&self.client));
        match self.release(false).await {
            Err(error @ Error::Lost { .. }) => Err(error),
            Err(error) => {
                if !matches!(error, Error::OutcomeUnknown { .. }) {
                    // Only the counter reports it.
                    let _ = client
                        .driver
                        .apply(|engine, _| engine.count_failed_release());
                }
                // The work is done, and was done under the lock: that is what the caller has to
                // know.
                tracing::warn!(%lock, %error, "a release was not confirmed, the lease will expire");
                Ok(output)
            }
            Ok(()) => Ok(output),
        }
    }

    pub(crate) fn guarded<F: Future>(&self, future: F) -> Guarded<F> {
        let future = if K::KIND.is_reentrant() {
            future.with_owner(self.owner)
        } else {
            // Nothing re-enters by this owner, so that of the surrounding scope stays.
            future.in_current_owner()
        };
        let span = tracing::debug_span!(
            "run",
            lock = %self.name(),
            owner = %self.client.field(self.owner),
        );
        Guarded {
            lock: self.keys.clone(),
            clock: self.clock(),
            lost: LossWaiter::new(Arc::clone(&self.grant.cell)),
            future: Some(future.instrument(span)),
        }
    }
}

impl<K: ReentrantKind> LockGuard<K> {
    /// How many holds the owner has on the lock, by this client's record: 1, and one more for each
    /// re-entry. 0 once the lock is lost.
    ///
    /// It sends nothing. [`Lock::hold_count_of`](crate::Lock::hold_count_of) asks
    /// the server.
    #[must_use]
    pub fn hold_count(&self) -> u64 {
        let hold = self.grant.hold;
        let count = self
            .client
            .driver
            .apply(|engine, now| engine.hold_count(now, hold));
        count.unwrap_or_default()
    }

    /// Keeps the hold without a guard, and returns the owner that can unlock it.
    ///
    /// The lock stays held, and renewed if it was acquired without a lease, until
    /// [`Lock::unlock`](crate::Lock::unlock) releases the hold in the scope of
    /// the owner, or until the client is shut down. Where the owner was current when the lock was
    /// acquired (inside a scope, or under
    /// [`OwnerPolicy::PerTask`](crate::OwnerPolicy::PerTask)) it still is, and `unlock()` is
    /// enough. Where it was made for this acquisition, only the returned value knows it: keep it.
    ///
    /// If the lock is lost while it has no guard, `unlock` reports that with [`Error::Lost`]; after
    /// [`LockClient::shutdown`](crate::LockClient::shutdown) it returns [`Error::Closed`].
    ///
    /// ```no_run
    /// use redisson_lock::OwnerExt;
    ///
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// let owner = lock.lock().await?.detach();
    /// // ... in any task of this client:
    /// lock.unlock().with_owner(owner).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// An owner that was dropped can be found again: see
    /// [`LockInfo::local_owner`](crate::LockInfo::local_owner).
    #[must_use = "only this owner can unlock a detached hold"]
    pub fn detach(mut self) -> Owner {
        self.is_settled = true;
        let hold = self.grant.hold;
        let _ = self
            .client
            .driver
            .apply(|engine, now| engine.detach(now, hold));
        self.owner
    }
}

impl LockGuard<Fenced> {
    /// The fencing token: greater than the token of each guard before, of any owner, whose hold had
    /// ended. All holds of one tenure have the same token.
    ///
    /// Send it along with each access to what the lock protects, and have that refuse a token below
    /// the highest that it has seen. An owner that has lost the lock without knowing it yet then
    /// changes nothing any more.
    ///
    /// It is the number that Redisson's `RFencedLock.lockAndGetToken` returns (3.19.0 and later).
    /// Redisson raises it with each re-entry as well. The counter is the key
    /// `redisson_lock_token:{NAME}`; it has no expiry, and begins again if it is deleted.
    ///
    /// ```no_run
    /// # async fn example(lock: redisson_lock::FencedLock) -> Result<(), redisson_lock::Error> {
    /// let first = lock.run_with(async |guard| guard.token()).await?;
    /// let second = lock.run_with(async |guard| guard.token()).await?;
    /// assert!(first < second);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn token(&self) -> i64 {
        // The grant of a fenced lock has one, which is 0 if the counter said so.
        self.grant.token.unwrap_or_default()
    }
}

impl<K> LockGuard<K> {
    fn clock(&self) -> Clock {
        self.client.driver.clock
    }

    fn loss(&self) -> Option<LostReason> {
        self.grant.cell.lost(self.clock().now())
    }
}

impl<K> Drop for LockGuard<K> {
    fn drop(&mut self) {
        if !self.is_settled {
            let hold = self.grant.hold;
            let _ = self
                .client
                .driver
                .apply(|engine, now| engine.drop_hold(now, hold));
        }
    }
}

impl<K> fmt::Debug for LockGuard<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("lock", &self.keys.name())
            .field("owner", &self.client.field(self.owner))
            .field("lost", &self.loss())
            .finish_non_exhaustive()
    }
}

pin_project! {
    /// A future in an owner's scope that is dropped when the lock is lost.
    pub(crate) struct Guarded<F> {
        lock: Keys,
        clock: Clock,
        lost: LossWaiter,
        #[pin]
        future: Option<Instrumented<WithOwner<F>>>,
    }
}

impl<F: Future> Future for Guarded<F> {
    type Output = Result<F::Output, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        // The clock is read before each step: a process that was stopped and continues does nothing
        // more. The signal is for a future that is not polled otherwise.
        let stopped = match this.lost.poll(this.clock.now(), cx) {
            Poll::Ready(reason) => Some(reason),
            Poll::Pending => None,
        };
        let outcome = match (stopped, this.future.as_mut().as_pin_mut()) {
            (Some(reason), _) => Err(reason),
            (None, Some(future)) => {
                let output = ready!(future.poll(cx));
                // What was finished after the loss was not guarded to its end.
                match this.lost.poll(this.clock.now(), cx) {
                    Poll::Ready(reason) => Err(reason),
                    Poll::Pending => Ok(output),
                }
            }
            // Only a caller that breaks the contract of `Future` comes here: a panic, not a hang.
            (None, None) => panic!("a guarded future was polled after its completion"),
        };
        this.future.set(None);
        Poll::Ready(outcome.map_err(|reason| Error::Lost {
            lock: this.lock.display(),
            reason,
        }))
    }
}
