//! Locks by name: a handle for each kind.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use super::guard::LockGuard;
use super::kinds::{Fenced, LockKind, Reentrant, ReentrantKind, Simple};
use super::request::{LockRequest, Options, TryLockRequest};
use crate::engine::{Engine, Outcome, RequestId};
use crate::error::Error;
use crate::handle::{Handle, failed};
use crate::info::LockInfo;
use crate::keys::Keys;
use crate::kind::Inspected;
use crate::owner::Owner;
use crate::time::Time;

/// A reentrant lock that all clients of one server share, Java services with Redisson's `RLock`
/// included. [`LockClient::lock`](crate::LockClient::lock) makes one.
///
/// Which owner a hold belongs to, and when an acquisition re-enters, is described at [`Owner`]. The
/// methods are described at [`Lock`].
///
/// ```no_run
/// # async fn example(client: redisson_lock::LockClient) -> Result<(), redisson_lock::Error> {
/// let lock: redisson_lock::ReentrantLock = client.lock("order:42");
/// let total = lock.run(async { 40 + 2 }).await?;
/// # assert_eq!(total, 42);
/// # Ok(()) }
/// ```
pub type ReentrantLock = Lock<Reentrant>;

/// A reentrant lock whose guards have a [fencing token](LockGuard::token), Java services with
/// Redisson's `RFencedLock` (3.19.0 and later) included.
/// [`LockClient::fenced_lock`](crate::LockClient::fenced_lock) makes one.
///
/// A resource that the lock protects refuses an access with a token below the highest that it has
/// seen: so the late write of an owner that has lost the lock does no harm. See
/// [`docs::safety`](crate::docs::safety).
///
/// It is the [`ReentrantLock`] of the same name, on the same key: each excludes the other. Only the
/// grants of fenced locks raise the token.
///
/// ```no_run
/// # async fn write(_: &str, _token: i64) {}
/// # async fn example(client: redisson_lock::LockClient) -> Result<(), redisson_lock::Error> {
/// let guard = client.fenced_lock("report:7").lock().await?;
/// write("report 7", guard.token()).await;
/// guard.unlock().await
/// # }
/// ```
pub type FencedLock = Lock<Fenced>;

/// A lock that is not reentrant, in the form that many programs use: `SET key token NX PX`
/// (<https://redis.io/docs/latest/commands/set/#patterns>), released by compare-and-delete.
/// [`LockClient::simple_lock`](crate::LockClient::simple_lock) makes one.
///
/// It excludes such programs (the `Lock` of Python's redis-py is one) on the same key. An owner of
/// this library publishes its release, which wakes the waiters. Other programs publish nothing, so
/// while one of them holds the lock a waiter looks every 0.1 s (less often while this process waits
/// for more than 100 locks). A value of the form `UUID:NUMBER` is taken for an owner of this
/// library.
///
/// The key holds one kind of lock: a reentrant or fenced lock of that name is refused with
/// [`ServerErrorKind::WrongType`](crate::ServerErrorKind::WrongType).
///
/// Each acquisition has an owner of its own, whatever scope surrounds it: a task that acquires the
/// lock twice waits for itself (see [`DeadlockDetection`](crate::DeadlockDetection)).
///
/// ```no_run
/// # async fn example(client: redisson_lock::LockClient) -> Result<(), redisson_lock::Error> {
/// client.simple_lock("nightly").run(async { /* the job */ }).await
/// # }
/// ```
pub type SimpleLock = Lock<Simple>;

/// A lock by its name: a [`ReentrantLock`], a [`FencedLock`] or a [`SimpleLock`], which are aliases
/// of this type. All methods are on this page; those of `Lock<K> where K: ReentrantKind` exist for
/// reentrant and fenced locks.
///
/// ```no_run
/// use redisson_lock::{Error, Lock, LockClient, LockKind};
///
/// /// Any kind of lock will do.
/// async fn guarded<K: LockKind>(lock: &Lock<K>) -> Result<u32, Error> {
///     lock.run(async { 40 + 2 }).await
/// }
///
/// # async fn example(client: LockClient) -> Result<(), Error> {
/// guarded(&client.lock("order:42")).await?;
/// guarded(&client.simple_lock("nightly")).await?;
/// # Ok(()) }
/// ```
///
/// It is cheap to clone. Making one sends nothing, and nothing has to be cleaned up. An invalid
/// name is refused by the first operation.
pub struct Lock<K> {
    client: Arc<Handle>,
    name: Arc<str>,
    keys: Result<Keys, Error>,
    kind: PhantomData<fn() -> K>,
}

impl<K: LockKind> Lock<K> {
    pub(crate) fn new(client: Arc<Handle>, name: &str) -> Self {
        Self {
            client,
            name: name.into(),
            keys: K::KIND.keys(name),
            kind: PhantomData,
        }
    }

    /// The name of the lock, as it was passed to the client.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Acquires the lock, runs the future as its owner, and releases the lock: as a `synchronized`
    /// block does in Java.
    ///
    /// Code that the future calls re-enters the lock (it locks it again without waiting), unless
    /// it is a [`SimpleLock`]. If the lock is lost, the future is dropped where it stands, and the
    /// error is [`Error::Lost`]. The output is returned only if the lock was held for as long as
    /// the future ran. It waits for the lock without limit; `lock().timeout(..).run(..)` limits it.
    ///
    /// ```no_run
    /// # async fn example(client: redisson_lock::LockClient) -> Result<(), redisson_lock::Error> {
    /// let total = client.lock("order:42").run(async { 40 + 2 }).await?;
    /// # assert_eq!(total, 42);
    /// # Ok(()) }
    /// ```
    ///
    /// The output is returned even if the release gets no reply: the future ran under a valid
    /// lease, and the release is repeated in the background (logged as a warning).
    ///
    /// # Errors
    /// * [`Error::Lost`]: the lock was lost while the future ran. The future was dropped, perhaps
    ///   half-way: check, or undo, what it did.
    /// * Any error of [`lock`](Self::lock). The future did not run.
    ///
    /// # Cancel safety
    /// Dropping it drops the future given, and releases the lock in the background.
    pub fn run<F: Future>(
        &self,
        future: F,
    ) -> impl Future<Output = Result<F::Output, Error>> + use<F, K> {
        self.lock().run(future)
    }

    /// As [`run`](Self::run), with the guard: for work that asks how long the lease lasts, or that
    /// must be notified of a loss.
    ///
    /// ```no_run
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// let left = lock.run_with(async |guard| guard.remaining_lease()).await?;
    /// println!("{left:?}");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`run`](Self::run).
    ///
    /// # Cancel safety
    /// As [`run`](Self::run).
    pub fn run_with<F, T>(&self, work: F) -> impl Future<Output = Result<T, Error>> + use<F, T, K>
    where
        F: AsyncFnOnce(&LockGuard<K>) -> T,
    {
        self.lock().run_with(work)
    }

    /// Acquires the lock if it is free, runs the future as its owner, and releases the lock. `None`
    /// if another owner holds the lock; then the future did not run.
    ///
    /// ```no_run
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// match lock.try_run(async { /* the job */ }).await? {
    ///     Some(()) => println!("done"),
    ///     None => println!("another process does it"),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`run`](Self::run), without [`Error::AcquireTimeout`].
    ///
    /// # Cancel safety
    /// As [`run`](Self::run).
    pub fn try_run<F: Future>(
        &self,
        future: F,
    ) -> impl Future<Output = Result<Option<F::Output>, Error>> + use<F, K> {
        self.try_lock().run(future)
    }

    /// Acquires the lock, and waits for it without limit unless [`timeout`](LockRequest::timeout)
    /// sets one.
    ///
    /// The requests of one process wait in a queue, first come, first served; processes compete.
    /// Without [`lease`](LockRequest::lease) the lease is the watchdog timeout, and it is renewed
    /// until the hold is released.
    ///
    /// ```no_run
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// use std::time::Duration;
    ///
    /// let guard = lock.lock().await?; // waits without limit; renewed until it is released
    /// guard.unlock().await?;
    /// let guard = lock
    ///     .lock()
    ///     .timeout(Duration::from_secs(2)) // Err(AcquireTimeout) after two seconds
    ///     .lease(Duration::from_secs(10)) // not renewed
    ///     .await?;
    /// # drop(guard);
    /// # Ok(()) }
    /// ```
    ///
    /// A request that was polled and is kept without being polled loses what it is granted after
    /// half a second: the client releases the lock, and the request asks again when it is polled
    /// again. Drop such a request instead.
    ///
    /// A task that waits for a lock that it holds itself, under another owner, is reported at once
    /// (see [`DeadlockDetection`](crate::DeadlockDetection)).
    ///
    /// # Errors
    /// * [`Error::InvalidName`], [`Error::InvalidLease`], [`Error::InvalidTimeout`]: nothing was
    ///   sent.
    /// * [`Error::AcquireTimeout`]: the [`timeout`](LockRequest::timeout) passed.
    /// * [`Error::WouldDeadlock`]: see [`DeadlockDetection::Fail`](crate::DeadlockDetection::Fail).
    /// * [`Error::Connection`]: the server was out of reach for the client's retry timeout, or for
    ///   the timeout of the request if that is shorter (at least for the client's command timeout).
    /// * [`Error::OutcomeUnknown`]: as `Connection`, but the server may have granted the lock. The
    ///   background releases it.
    /// * [`Error::Server`]: the server refused, for example because the key holds another type.
    /// * [`Error::Timeout`]: an earlier operation of the same owner on this lock still has no
    ///   reply.
    /// * [`Error::Lost`]: the lock was lost before the caller had the guard.
    /// * [`Error::Closed`], [`Error::ClientFailed`]: the client was shut down, or has failed.
    ///
    /// # Cancel safety
    /// Dropping it removes the request from the queue and leaves nothing behind: a wake-up goes to
    /// the next request, and a grant that arrives later is released in the background.
    pub fn lock(&self) -> LockRequest<K> {
        LockRequest::new(self.options())
    }

    /// Acquires the lock if it is free; `None` if another owner holds it. It never waits for the
    /// lock.
    ///
    /// The lock is held while the guard exists: `if lock.try_lock().await?.is_some() { .. }`
    /// releases it before the block. Bind it (`if let Some(guard) = ..`), or use
    /// [`try_run`](Self::try_run).
    ///
    /// ```no_run
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// if let Some(guard) = lock.try_lock().await? {
    ///     // ... work ...
    ///     guard.unlock().await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`lock`](Self::lock), without [`Error::AcquireTimeout`] and [`Error::WouldDeadlock`].
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    pub fn try_lock(&self) -> TryLockRequest<K> {
        TryLockRequest::new(self.options(), Duration::ZERO)
    }

    /// Acquires the lock, and waits for it at most this long; `None` if another owner still holds
    /// it then. At most 3650 days.
    ///
    /// ```no_run
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// use std::time::Duration;
    ///
    /// let guard = lock.try_lock_for(Duration::from_secs(2)).await?;
    /// println!("{}", if guard.is_some() { "held" } else { "another owner holds it" });
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`lock`](Self::lock), without [`Error::AcquireTimeout`].
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    pub fn try_lock_for(&self, timeout: Duration) -> TryLockRequest<K> {
        TryLockRequest::new(self.options(), timeout)
    }

    /// The state of the lock on the server: its owner, the owner's hold count and the time to live.
    /// `None` if no owner holds it.
    ///
    /// ```no_run
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// match lock.inspect().await? {
    ///     Some(info) => println!("{} is held by {info}", lock.name()),
    ///     None => println!("{} is free", lock.name()),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// * [`Error::InvalidName`]: nothing was sent.
    /// * [`Error::Connection`], or [`Error::Timeout`] with [`Step::Inspect`](crate::Step::Inspect):
    ///   the server did not answer.
    /// * [`Error::Server`]: the key holds another type, or a hold count that is not a number.
    /// * [`Error::Closed`], [`Error::ClientFailed`]: the client was shut down, or has failed.
    ///
    /// # Cancel safety
    /// It changes nothing, so it can be dropped at any time.
    pub async fn inspect(&self) -> Result<Option<LockInfo>, Error> {
        let inspected = self.inspected().await?;
        self.client.info(self.keys()?, &inspected)
    }

    /// Whether any owner holds the lock: whether its key exists.
    ///
    /// ```no_run
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// println!("{}", if lock.is_locked().await? { "held" } else { "free" });
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect), without [`Error::Server`] for a key of another type.
    ///
    /// # Cancel safety
    /// It changes nothing, so it can be dropped at any time.
    pub async fn is_locked(&self) -> Result<bool, Error> {
        Ok(self.inspected().await?.exists())
    }

    /// Frees the lock, whichever owner holds it, and wakes its waiters. Returns whether it was
    /// held.
    ///
    /// For operators. An owner of this client is notified at once, another one with its next
    /// renewal.
    ///
    /// It reads which owner holds the lock and frees that owner's tenure. For an owner of this
    /// client the call is repeated if a reply is lost; for another one it is sent once, since a
    /// repetition could free the owner's next tenure. If another owner holds the lock at each
    /// inspection, it frees the lock whatever its owner, with a call that is sent once.
    ///
    /// ```no_run
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// if lock.force_unlock().await? {
    ///     println!("{} was held and is free now", lock.name());
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// * [`Error::Server`]: the key holds another type, and stays.
    /// * [`Error::OutcomeUnknown`]: a reply was lost; this call may have freed the lock. Calling
    ///   again is safe.
    /// * [`Error::Timeout`] with [`Step::Inspect`](crate::Step::Inspect) or
    ///   [`Step::EarlierOperation`](crate::Step::EarlierOperation): nothing was freed.
    /// * [`Error::InvalidName`], [`Error::Connection`], [`Error::Closed`]: nothing was freed.
    ///
    /// # Cancel safety
    /// Dropping it does not recall what was sent: the lock may be freed. For an owner of this
    /// client, the background finishes what has begun.
    pub async fn force_unlock(&self) -> Result<bool, Error> {
        let keys = self.keys()?;
        match self
            .ask(|engine, now| engine.force_unlock(now, keys, K::KIND))
            .await
        {
            Outcome::Freed(was_held) => Ok(was_held),
            outcome => Err(failed(outcome)),
        }
    }

    fn keys(&self) -> Result<&Keys, Error> {
        self.keys.as_ref().map_err(Clone::clone)
    }

    fn options(&self) -> Options<K> {
        Options::new(Arc::clone(&self.client), self.keys.clone())
    }

    async fn inspected(&self) -> Result<Inspected, Error> {
        let keys = self.keys()?;
        match self
            .ask(|engine, now| engine.inspect(now, keys, K::KIND, None))
            .await
        {
            Outcome::Inspected(inspected) => Ok(inspected),
            outcome => Err(failed(outcome)),
        }
    }

    async fn ask(&self, begin: impl FnOnce(&mut Engine, Time) -> RequestId) -> Outcome {
        self.client.driver.submit(begin).outcome().await
    }
}

impl<K: ReentrantKind> Lock<K> {
    /// Releases one detached hold of the current owner, as `RLock.unlock()` does in Java.
    ///
    /// For ported code, together with [`LockGuard::detach`], and for locks that another process
    /// handed over. Holds that belong to a guard are not touched. The current owner is the one of
    /// the surrounding scope, or the task's own under
    /// [`OwnerPolicy::PerTask`](crate::OwnerPolicy::PerTask).
    ///
    /// ```no_run
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// use redisson_lock::OwnerExt;
    ///
    /// let owner = lock.lock().await?.detach();
    /// lock.unlock().with_owner(owner).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// * [`Error::InvalidName`]: nothing was sent.
    /// * [`Error::NotHeld`]: there is no current owner, or it has no detached hold of this lock.
    /// * [`Error::Lost`]: the hold was lost. The client remembers the latest thousand detached
    ///   holds that were lost.
    /// * [`Error::OutcomeUnknown`]: as for [`LockGuard::unlock`]. Do not call it again: it would
    ///   release another hold of the owner.
    /// * [`Error::Connection`], [`Error::Server`]: as for [`LockGuard::unlock`]. After `Server` the
    ///   hold is still there and can be unlocked again; it is renewed no more.
    /// * [`Error::Closed`]: [`shutdown`](crate::LockClient::shutdown) was called. Nothing was sent,
    ///   and the lock stays held until its lease expires. (The unlock of a guard returns
    ///   [`Error::Lost`] then.)
    /// * [`Error::ClientFailed`]: the client has failed.
    ///
    /// # Cancel safety
    /// What it has begun is finished in the background.
    pub async fn unlock(&self) -> Result<(), Error> {
        let keys = self.keys()?;
        let Some(owner) = self.client.owner_policy.current() else {
            // A client that has ended says so.
            return Err(
                match self.client.driver.apply(|engine, _| engine.ensure_open()) {
                    Some(Ok(())) => Error::NotHeld {
                        lock: keys.display(),
                        problem: "there is no current owner".into(),
                    },
                    Some(Err(error)) => error,
                    None => Error::ClientFailed,
                },
            );
        };
        match self
            .ask(|engine, now| engine.unlock(now, keys, K::KIND, owner))
            .await
        {
            Outcome::Done => Ok(()),
            outcome => Err(failed(outcome)),
        }
    }

    /// Whether that owner of this client holds the lock, by the server's record.
    ///
    /// Redisson's `isHeldByCurrentThread` is `is_held_by` with the owner that
    /// [`LockClient::current_owner`](crate::LockClient::current_owner) returns. Outside a scope
    /// there is no current owner: ask for [`LockGuard::owner`], or ask the guard itself.
    ///
    /// ```no_run
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// let guard = lock.lock().await?;
    /// assert!(lock.is_held_by(guard.owner()).await?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`hold_count_of`](Self::hold_count_of).
    ///
    /// # Cancel safety
    /// It changes nothing, so it can be dropped at any time.
    pub async fn is_held_by(&self, owner: Owner) -> Result<bool, Error> {
        Ok(self.hold_count_of(owner).await? > 0)
    }

    /// How many holds that owner of this client has on the lock, by the server's record.
    ///
    /// ```no_run
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// let guard = lock.lock().await?;
    /// let holds = guard.run(lock.run_with(async |inner| lock.hold_count_of(inner.owner()).await));
    /// assert_eq!(holds.await???, 2);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect). [`Error::Server`] only if the key holds another type, or if
    /// this owner's hold count is not a number.
    ///
    /// # Cancel safety
    /// It changes nothing, so it can be dropped at any time.
    pub async fn hold_count_of(&self, owner: Owner) -> Result<u64, Error> {
        let keys = self.keys()?;
        let count = match self
            .ask(|engine, now| engine.count(now, keys, K::KIND, owner))
            .await
        {
            Outcome::Counted(count) => count,
            outcome => return Err(failed(outcome)),
        };
        u64::try_from(count).map_err(|_| Error::Server {
            lock: Some(keys.display()),
            address: None,
            database: None,
            error: format!("ERR the hold count is not a number: {count}").into(),
        })
    }
}

impl<K> Clone for Lock<K> {
    fn clone(&self) -> Self {
        Self {
            client: Arc::clone(&self.client),
            name: Arc::clone(&self.name),
            keys: self.keys.clone(),
            kind: PhantomData,
        }
    }
}

impl<K: LockKind> fmt::Debug for Lock<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(K::KIND.type_name())
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}
