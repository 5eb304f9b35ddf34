//! Guards: a hold as a value.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use pin_project_lite::pin_project;

use crate::error::{Error, LostReason};
use crate::lease::Lease;
use crate::owner::{Owner, OwnerExt, TaskId, WithOwner};
use crate::release::Hold;

/// One hold of a lock. Dropping it releases the hold in the background; [`unlock`](Self::unlock)
/// waits for that.
///
/// The background needs the runtime: before that ends, at the end of `main` and on error paths too,
/// release with `unlock` or call [`LockClient::shutdown`](crate::LockClient::shutdown); otherwise
/// the lock stays until its lease is over.
///
/// A guard does not stop code whose lease is lost: [`run`](Self::run) does, and
/// [`lost`](Self::lost) tells.
#[must_use = "a guard that is dropped at once releases the lock at once"]
pub struct LockGuard {
    hold: Hold,
}

impl LockGuard {
    pub(crate) fn new(hold: Hold) -> Self {
        Self { hold }
    }

    /// Gives the hold back, and waits until the server has confirmed it. The last hold of a owner
    /// frees the lock.
    ///
    /// # Errors
    /// * [`Error::Lost`]: the lock was lost while it was held: what it guarded may have been done
    ///   by others, too.
    /// * [`Error::Unknown`]: the server did not answer within the client's retry timeout. The
    ///   release goes on in the background, and what was guarded *was* guarded: the lease was alive
    ///   when this was called.
    /// * [`Error::Connection`]: the server cannot be reached; the lease will run out by itself.
    /// * [`Error::Server`]: the server refused the release; the lease will run out by itself.
    ///
    /// # Cancel safety
    /// Once begun it is finished in the background; dropped before that, it drops the guard, which
    /// does the same.
    pub async fn unlock(self) -> Result<(), Error> {
        self.hold.release().await
    }

    /// Keeps the hold without a guard: it stays held, and renewed if it was taken without a lease,
    /// until [`ReentrantLock::unlock`](crate::ReentrantLock::unlock) gives it back in the owner's
    /// scope, or until the client ends. One that is lost meanwhile is remembered until `unlock`
    /// finds no other hold to give back, and says so; but not where the owner was a fresh one,
    /// which no scope has.
    pub fn forget(self) {
        self.hold.forget();
    }

    /// Whose hold it is.
    #[must_use]
    pub fn owner(&self) -> Owner {
        self.hold.entry.ident.owner
    }

    /// Runs the future in the owner's scope, where locking the same lock again re-enters, and stops
    /// it when the lease is lost. The guard stays.
    ///
    /// ```no_run
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// let guard = lock.lock().await?;
    /// let twice = guard.run(async { lock.run(async { 2 }).await }).await??;
    /// guard.unlock().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Lost`]: the lock was lost before the future was done. It was dropped where it
    /// stood.
    ///
    /// # Cancel safety
    /// Dropping it drops the future given, and nothing else.
    pub async fn run<F: Future>(&self, future: F) -> Result<F::Output, Error> {
        self.hold.lease.used_by(self.hold.id, TaskId::current());
        self.guarded(future).await
    }

    /// Resolves when the lock is lost, with the reason; never if it is released first.
    ///
    /// It resolves before anybody else can acquire the lock, except where somebody deletes the key,
    /// force-unlocks it or the server loses it: then it resolves with the next renewal, or, for a
    /// hold with a lease of its own, at the end of that lease.
    ///
    /// ```no_run
    /// # async fn work() {}
    /// # async fn example(guard: redisson_lock::LockGuard) -> Result<(), redisson_lock::Error> {
    /// tokio::select! {
    ///     () = work() => guard.unlock().await?,
    ///     why = guard.lost() => eprintln!("stopped: {why}"),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Cancel safety
    /// It changes nothing, so it may be dropped at any time.
    pub fn lost(&self) -> impl Future<Output = LostReason> + Send + use<> {
        let (lease, id) = (Arc::clone(&self.hold.lease), self.hold.id);
        async move { lease.wait_lost(id).await }
    }

    /// Whether the lock is lost, by what is known and by the clock.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.hold.lease.lost().is_some()
    }

    /// For how much longer the lock is sure to be held: by this process's clock, from the sending
    /// of the last script that the server confirmed, less a margin of a twentieth of the lease (at
    /// most 500 ms). Zero once it is lost.
    #[must_use]
    pub fn remaining_lease(&self) -> Duration {
        self.hold.lease.remaining()
    }

    pub(crate) fn guarded<F: Future>(&self, future: F) -> Guarded<F> {
        let lease = Arc::clone(&self.hold.lease);
        let (waiting, id) = (Arc::clone(&lease), self.hold.id);
        Guarded {
            lock: self.hold.entry.ident.lock(),
            lease,
            lost: async move { waiting.wait_lost(id).await }.boxed(),
            future: Some(future.with_owner(self.owner())),
        }
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("lock", &self.hold.entry.ident.lock())
            .field("owner", &self.hold.entry.ident.owner_field())
            .field("lost", &self.hold.lease.lost())
            .finish_non_exhaustive()
    }
}

pin_project! {
    /// A future in a owner's scope that is stopped when the lease is lost.
    pub(crate) struct Guarded<F> {
        lock: String,
        lease: Arc<Lease>,
        lost: BoxFuture<'static, LostReason>,
        #[pin]
        future: Option<WithOwner<F>>,
    }
}

impl<F: Future> Future for Guarded<F> {
    type Output = Result<F::Output, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        // The clock is asked before each step: a process that was stopped and goes on does nothing
        // more. The signal is for a future that is not polled otherwise.
        let stopped = match this.lease.lost() {
            Some(reason) => Some(reason),
            None => match this.lost.poll_unpin(cx) {
                Poll::Ready(reason) => Some(reason),
                Poll::Pending => None,
            },
        };
        let outcome = match (stopped, this.future.as_mut().as_pin_mut()) {
            (Some(reason), _) => Err(reason),
            (None, Some(future)) => {
                let output = ready!(future.poll(cx));
                // What was finished after the loss was not guarded to its end.
                this.lease.lost().map_or(Ok(output), Err)
            }
            (None, None) => return Poll::Pending,
        };
        this.future.set(None);
        Poll::Ready(outcome.map_err(|reason| Error::Lost {
            lock: this.lock.clone(),
            reason,
        }))
    }
}
