//! The parties of a scenario: a Java thread with Redisson, or an owner with this library. Both have
//! the same methods, so that each scenario is written once and runs in both directions.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use redisson_lock::{Error, LockClient, LockGuard, LostReason, Owner, OwnerExt};

use crate::fixture::Failed;
use crate::support::java::{PeerError, PeerThread};

/// One logical thread, in Java or in Rust.
#[derive(Clone, Debug)]
pub enum Party {
    /// A thread of a Redisson client.
    Java(PeerThread),
    /// An owner of a client of this library.
    Rust(Actor),
}

/// An owner and its guards.
#[derive(Clone, Debug)]
pub struct Actor {
    client: LockClient,
    owner: Owner,
    guards: Arc<Mutex<Vec<LockGuard>>>,
}

/// The result of an unlock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unlocked {
    Done,
    /// Refused: an `IllegalMonitorStateException`, or `Error::NotHeld`.
    NotOwner,
    /// The lock was held and lost. Redisson does not distinguish this.
    Lost,
}

impl Unlocked {
    /// Whether the result reports that the caller does not hold the lock.
    pub fn is_refused(self) -> bool {
        self != Self::Done
    }
}

impl Party {
    pub fn of(client: &LockClient) -> Self {
        Self::Rust(Actor {
            client: client.clone(),
            owner: Owner::new(),
            guards: Arc::default(),
        })
    }

    pub fn is_java(&self) -> bool {
        matches!(self, Self::Java(_))
    }

    /// Acquires the lock, waiting without limit; it is renewed.
    pub async fn lock(&self, name: &str) -> Result<(), Failed> {
        match self {
            Self::Java(thread) => thread.lock(name).await?,
            Self::Rust(actor) => actor.keep(
                actor
                    .client
                    .lock(name)
                    .lock()
                    .with_owner(actor.owner)
                    .await?,
            ),
        }
        Ok(())
    }

    /// Acquires the lock, waiting without limit; it is not renewed.
    pub async fn lock_with_lease(&self, name: &str, lease: Duration) -> Result<(), Failed> {
        match self {
            Self::Java(thread) => thread.lock_with_lease(name, lease).await?,
            Self::Rust(actor) => {
                actor.keep(
                    actor
                        .client
                        .lock(name)
                        .lock()
                        .lease(lease)
                        .with_owner(actor.owner)
                        .await?,
                );
            }
        }
        Ok(())
    }

    /// Acquires the lock if it is free within the wait time.
    pub async fn try_lock(
        &self,
        name: &str,
        wait: Duration,
        lease: Option<Duration>,
    ) -> Result<bool, Failed> {
        match self {
            Self::Java(thread) => Ok(thread.try_lock(name, wait, lease).await?),
            Self::Rust(actor) => {
                let request = actor.client.lock(name).try_lock_for(wait);
                let request = match lease {
                    Some(lease) => request.lease(lease),
                    None => request,
                };
                let guard = request.with_owner(actor.owner).await?;
                Ok(guard.map(|guard| actor.keep(guard)).is_some())
            }
        }
    }

    /// Releases one hold.
    pub async fn unlock(&self, name: &str) -> Result<Unlocked, Failed> {
        match self {
            Self::Java(thread) => match thread.unlock(name).await {
                Err(PeerError { class, .. }) if class == "IllegalMonitorStateException" => {
                    Ok(Unlocked::NotOwner)
                }
                result => Ok(result.map(|()| Unlocked::Done)?),
            },
            Self::Rust(actor) => {
                let newest = actor.guards.lock().unwrap().pop();
                let result = match newest {
                    Some(guard) => guard.unlock().await,
                    None => {
                        actor
                            .client
                            .lock(name)
                            .unlock()
                            .with_owner(actor.owner)
                            .await
                    }
                };
                match result {
                    Err(Error::NotHeld { .. }) => Ok(Unlocked::NotOwner),
                    Err(Error::Lost { .. }) => Ok(Unlocked::Lost),
                    result => Ok(result.map(|()| Unlocked::Done)?),
                }
            }
        }
    }

    /// Frees the lock, whichever owner holds it.
    pub async fn force_unlock(&self, name: &str) -> Result<bool, Failed> {
        match self {
            Self::Java(thread) => Ok(thread.force_unlock(name).await?),
            Self::Rust(actor) => Ok(actor.client.lock(name).force_unlock().await?),
        }
    }

    pub async fn is_locked(&self, name: &str) -> Result<bool, Failed> {
        match self {
            Self::Java(thread) => Ok(thread.is_locked(name).await?),
            Self::Rust(actor) => Ok(actor.client.lock(name).is_locked().await?),
        }
    }

    pub async fn is_held(&self, name: &str) -> Result<bool, Failed> {
        match self {
            Self::Java(thread) => Ok(thread.is_held(name).await?),
            Self::Rust(actor) => Ok(actor.client.lock(name).is_held_by(actor.owner).await?),
        }
    }

    pub async fn hold_count(&self, name: &str) -> Result<i64, Failed> {
        match self {
            Self::Java(thread) => Ok(thread.hold_count(name).await?),
            Self::Rust(actor) => {
                let count = actor.client.lock(name).hold_count_of(actor.owner).await?;
                Ok(i64::try_from(count)?)
            }
        }
    }

    /// In Redisson's terms: milliseconds, -2 where the lock is free, -1 where it has no expiry.
    pub async fn remaining_ttl(&self, name: &str) -> Result<i64, Failed> {
        match self {
            Self::Java(thread) => Ok(thread.remaining_ttl(name).await?),
            Self::Rust(actor) => match actor
                .client
                .lock(name)
                .inspect()
                .await?
                .map(|info| info.ttl)
            {
                None => Ok(-2),
                Some(None) => Ok(-1),
                Some(Some(left)) => Ok(i64::try_from(left.as_millis())?),
            },
        }
    }

    /// Its field `CLIENT:THREAD` in a lock's hash.
    pub async fn owner(&self) -> Result<String, Failed> {
        match self {
            Self::Java(thread) => Ok(thread.owner().await?),
            Self::Rust(actor) => Ok(format!("{}:{}", actor.client.client_id(), actor.owner)),
        }
    }

    /// Waits until the newest guard reports that its lock is lost. Redisson reports no losses, so
    /// for Java the answer is `None` at once.
    pub async fn loss_reason(&self) -> Option<LostReason> {
        let Self::Rust(actor) = self else { return None };
        let lost = actor.guards.lock().unwrap().last()?.lost();
        Some(lost.await)
    }
}

impl Actor {
    /// The owner of the lock, in any process, with its hold count.
    pub async fn owners(&self, name: &str) -> Result<Vec<(String, u64)>, Failed> {
        let info = self.client.lock(name).inspect().await?;
        Ok(info
            .into_iter()
            .map(|info| (info.owner, info.hold_count))
            .collect())
    }

    fn keep(&self, guard: LockGuard) {
        self.guards.lock().unwrap().push(guard);
    }
}
