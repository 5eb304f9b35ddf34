//! The reentrant lock, Redisson's `RLock`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use self::inspect::{Inspected, NO_KEY};
pub(crate) use self::scripts::Reentrant;
use super::Ident;
use super::requests::{LockRequest, Options, RunRequest, TryLockRequest};
use crate::core::Core;
use crate::error::Error;
use crate::holds::EntryRef;
use crate::keys::Keys;
use crate::owner::Owner;
use crate::release;

mod force_unlock;
mod inspect;
mod scripts;

/// A reentrant lock that all clients of one server share, Java services with Redisson's `RLock`
/// included.
///
/// Made by [`LockClient::lock`](crate::LockClient::lock); cheap to clone. Making one sends nothing:
/// a name that cannot be used is refused by the first operation.
///
/// Whose hold an acquisition becomes, and when it re-enters, is told at [`Owner`].
#[derive(Clone)]
pub struct ReentrantLock {
    core: Arc<Core>,
    keys: Result<Keys, Error>,
}

impl ReentrantLock {
    pub(crate) fn new(core: Arc<Core>, name: &str) -> Self {
        Self {
            core,
            keys: Keys::reentrant(name),
        }
    }

    /// Acquires the lock, runs the future as its owner, and releases the lock: what a synchronized
    /// block is in Java.
    ///
    /// Whatever the future calls re-enters: it locks the same lock again without waiting. If the
    /// lease is lost, the future is dropped where it stands and the error is [`Error::Lost`]; a
    /// result comes out only if the lock was held for as long as the future ran. Waits for the lock
    /// without limit unless [`RunRequest::wait`] says how long.
    ///
    /// ```no_run
    /// # async fn example(client: redisson_lock::LockClient) -> Result<(), redisson_lock::Error> {
    /// let total = client.lock("order:42").run(async { 40 + 2 }).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// * [`Error::Lost`]: the lock was lost while the future ran. It was stopped, possibly
    ///   half-way.
    /// * [`Error::Contended`]: the wait time ran out; the future never ran.
    /// * Any error of [`ReentrantLock::lock`]; the future never ran.
    ///
    /// A release that stays unanswered after the future has run under a proven lease does not spoil
    /// its result: it is finished in the background.
    ///
    /// # Cancel safety
    /// Dropping it drops the future given, and releases the lock in the background.
    pub fn run<F: Future>(&self, future: F) -> RunRequest<F> {
        RunRequest::new(self.options(), future)
    }

    /// Acquires the lock; waits for it without limit.
    ///
    /// The waiters of one process stand in line, first come first served; processes compete. A
    /// request that has been polled and is kept without being polled any more gives way to those
    /// behind it after two re-check intervals (after two command timeouts more if it stands still
    /// while it asks the server). If the server grants it the lock while nobody polls it, the lock
    /// is given back after two command timeouts (of 250 ms at least) and half a second at most, and
    /// the request asks again when it is polled again. Rather drop such a request.
    ///
    /// Without [`lease`](LockRequest::lease) the lock gets the watchdog timeout and is renewed
    /// until it is released.
    ///
    /// A task that waits for a lock that it took itself under another owner is warned (a `tracing`
    /// event) at once; a wait for longer than the watchdog timeout for a hold of this same client
    /// is, too, because that owner may be waiting for this one.
    ///
    /// # Errors
    /// * [`Error::InvalidName`], [`Error::InvalidLease`], [`Error::InvalidWait`]: nothing was sent.
    /// * [`Error::Contended`]: the time of [`wait`](LockRequest::wait) ran out.
    /// * [`Error::Connection`], [`Error::Unknown`]: the server was out of reach for the client's
    ///   retry timeout. After `Unknown` the lock may have been taken; the background gives it back.
    /// * [`Error::Server`]: the server refused, for example because the key holds another type.
    /// * [`Error::Timeout`]: an earlier operation of the same owner on this lock is still
    ///   unanswered.
    /// * [`Error::Lost`]: the grant arrived after its lease was over.
    /// * [`Error::Closed`]: the client is shut down.
    ///
    /// # Cancel safety
    /// Dropping it gives up the place among the waiters, and passes a wake-up on. If a script is
    /// under way, the background sees it through and gives back what it brings.
    pub fn lock(&self) -> LockRequest {
        LockRequest::new(self.options())
    }

    /// Acquires the lock if it is free; `None` if somebody else holds it.
    ///
    /// With [`wait`](TryLockRequest::wait) it waits that long before it answers `None`.
    ///
    /// # Errors
    /// Those of [`ReentrantLock::lock`] without [`Error::Contended`].
    ///
    /// # Cancel safety
    /// As [`ReentrantLock::lock`].
    pub fn try_lock(&self) -> TryLockRequest {
        TryLockRequest::new(self.options())
    }

    /// Gives back one hold of the current owner that no guard stands for, as `RLock.unlock()` does.
    ///
    /// For ported code, together with [`LockGuard::forget`](crate::LockGuard::forget), and for
    /// locks that were handed over from another process. Holds that belong to a guard are not
    /// touched.
    ///
    /// # Errors
    /// * [`Error::NotHeld`]: there is no current owner, or it has no hold that could be given back
    ///   here.
    /// * [`Error::Lost`]: the hold was lost before. Of forgotten holds that were lost a client
    ///   remembers the latest thousand.
    /// * [`Error::Unknown`], [`Error::Connection`], [`Error::Server`], [`Error::Closed`]: as for
    ///   [`LockGuard::unlock`](crate::LockGuard::unlock). After `Server` the hold is still there,
    ///   and can be unlocked again; it is not renewed any more.
    ///
    /// # Cancel safety
    /// Once begun it is finished in the background.
    pub async fn unlock(&self) -> Result<(), Error> {
        let keys = self.keys.clone()?;
        let Some(owner) = self.owner() else {
            return Err(Error::NotHeld {
                lock: keys.display(),
                problem: "there is no current owner: unlock the guard, or unlock in the scope that locked".into(),
            });
        };
        self.core.ensure_open()?;
        let ident = self.core.ident(&keys, owner);
        let entry = self.core.entry(&ident, &Reentrant);
        match self.unlock_one(&ident, &entry).await {
            Err(not_held @ Error::NotHeld { .. }) => {
                Err(release::claim_loss(&self.core, &entry).unwrap_or(not_held))
            }
            outcome => outcome,
        }
    }

    /// Whether anybody holds the lock.
    ///
    /// # Errors
    /// [`Error::InvalidName`], [`Error::Connection`], [`Error::Timeout`] with
    /// [`Step::Inspect`](crate::Step::Inspect) (the server did not answer), [`Error::Server`],
    /// [`Error::Closed`].
    ///
    /// # Cancel safety
    /// It changes nothing, so it may be dropped at any time.
    pub async fn is_locked(&self) -> Result<bool, Error> {
        Ok(self.inspect().await?.pttl != NO_KEY)
    }

    /// Whether the current owner holds the lock, by the server's word. `false` where there is no
    /// current owner.
    ///
    /// # Errors
    /// As [`ReentrantLock::is_locked`].
    ///
    /// # Cancel safety
    /// It changes nothing, so it may be dropped at any time.
    pub async fn is_held(&self) -> Result<bool, Error> {
        Ok(self.hold_count().await? > 0)
    }

    /// How many holds the current owner has, by the server's word. 0 where there is no current
    /// owner.
    ///
    /// # Errors
    /// As [`ReentrantLock::is_locked`]; [`Error::Server`] also where the field is no number.
    ///
    /// # Cancel safety
    /// It changes nothing, so it may be dropped at any time.
    pub async fn hold_count(&self) -> Result<u64, Error> {
        let keys = self.keys.clone()?;
        let Some(owner) = self.owner() else {
            return Ok(0);
        };
        let owner = self.core.ident(&keys, owner).owner_field();
        let owners = self.inspect().await?.owners(&keys)?;
        Ok(owners
            .into_iter()
            .find(|holding| holding.owner == owner)
            .map_or(0, |holding| holding.count))
    }

    /// What the lock's lease has left, by the server's word: `None` if it is not locked.
    ///
    /// A key without an expiry, which this library never leaves, answers [`Duration::MAX`].
    ///
    /// # Errors
    /// As [`ReentrantLock::is_locked`].
    ///
    /// # Cancel safety
    /// It changes nothing, so it may be dropped at any time.
    pub async fn remaining_ttl(&self) -> Result<Option<Duration>, Error> {
        Ok(match self.inspect().await?.pttl {
            NO_KEY => None,
            millis => Some(u64::try_from(millis).map_or(Duration::MAX, Duration::from_millis)),
        })
    }

    /// Who holds the lock, in any process: at most one owner, with its count.
    ///
    /// # Errors
    /// As [`ReentrantLock::is_locked`]; [`Error::Server`] also where a count is no number.
    ///
    /// # Cancel safety
    /// It changes nothing, so it may be dropped at any time.
    pub async fn owners(&self) -> Result<Vec<Holding>, Error> {
        let keys = self.keys.clone()?;
        self.inspect().await?.owners(&keys)
    }

    /// Frees the lock, whoever holds it, and wakes its waiters; `true` if it was held.
    ///
    /// For operators. A owner in this client hears of it at once, another one with its next
    /// renewal.
    ///
    /// It looks who holds the lock, and then frees that owner's possession: sent twice because a
    /// reply was lost, it takes nobody else's. Only where the lock changes hands each time it looks
    /// does it free the lock unseen.
    ///
    /// # Errors
    /// * [`Error::Server`]: the key holds another type; it stays.
    /// * [`Error::Unknown`]: a reply was lost; the lock may have been freed by this call. It is
    ///   safe to ask again.
    /// * [`Error::Timeout`] with [`Step::Inspect`](crate::Step::Inspect) or
    ///   [`Step::EarlierOperation`](crate::Step::EarlierOperation): nothing was freed.
    /// * [`Error::InvalidName`], [`Error::Connection`], [`Error::Closed`].
    ///
    /// # Cancel safety
    /// Dropping it does not recall what was sent: the lock may be freed. Where the owner is a owner
    /// of this client, the background finishes what has begun.
    pub async fn force_unlock(&self) -> Result<bool, Error> {
        force_unlock::force_unlock(&self.core, &self.keys.clone()?).await
    }

    /// The lock's name.
    ///
    /// # Errors
    /// [`Error::InvalidName`] if it cannot be used.
    pub fn name(&self) -> Result<String, Error> {
        self.keys.as_ref().map(Keys::display).map_err(Clone::clone)
    }

    fn owner(&self) -> Option<Owner> {
        self.core.config.owner_policy.current()
    }

    fn options(&self) -> Options {
        Options::new(Arc::clone(&self.core), self.keys.clone(), &Reentrant)
    }

    async fn inspect(&self) -> Result<Inspected, Error> {
        Inspected::of(&self.core, self.keys.as_ref().map_err(Clone::clone)?).await
    }

    /// Gives back a hold that no guard stands for.
    async fn unlock_one(&self, ident: &Arc<Ident>, entry: &EntryRef) -> Result<(), Error> {
        let Some(lease) = entry.latest() else {
            return self.unlock_unrecorded(ident).await;
        };
        match lease.claim_forgotten() {
            Some(id) => release::give_back(&self.core, entry.clone(), lease, id).await,
            None if lease.base() > 0 => self.unlock_unrecorded(ident).await,
            None => Err(Error::NotHeld {
                lock: ident.lock(),
                problem: format!(
                    "every hold of {} belongs to a guard: unlock the guard, or forget() it first",
                    ident.owner_field()
                ),
            }),
        }
    }

    /// Gives back a hold that only the server knows of.
    async fn unlock_unrecorded(&self, ident: &Arc<Ident>) -> Result<(), Error> {
        let not_held = || Error::NotHeld {
            lock: ident.lock(),
            problem: format!("{} does not hold it (any more)", ident.owner_field()),
        };
        if ident.owner.is_private() {
            return Err(not_held());
        }
        let entry = self.core.entry(ident, &Reentrant);
        match release::give_back_unrecorded(&self.core, entry).await? {
            true => Ok(()),
            false => Err(not_held()),
        }
    }
}

impl fmt::Debug for ReentrantLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReentrantLock")
            .field("name", &self.name())
            .finish_non_exhaustive()
    }
}

/// A owner of a lock, as the server has it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holding {
    /// The owner field: `CLIENT:THREAD`.
    pub owner: String,
    /// Its hold count.
    pub count: u64,
}
