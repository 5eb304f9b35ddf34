//! The state that the parts of one client share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::watch;
use tokio::time::Instant;

use crate::background::Background;
use crate::config::Config;
use crate::error::{Error, LostReason, Step};
use crate::holds::{EntryRef, Holds};
use crate::keys::Keys;
use crate::link::{Call, Failure, Link, Reply};
use crate::locks::{self, Ident, Kind};
use crate::owner::{ClientId, Owner};
use crate::renewal;
use crate::retry::Patience;
use crate::runtime::Runtime;
use crate::stats::{Counters, add};
use crate::wakeup::Wakeups;

/// The parts of a client. Its tasks hold weak references: they end when the last lock, guard and
/// client are dropped.
pub(crate) struct Core {
    pub(crate) client_id: ClientId,
    pub(crate) config: Config,
    pub(crate) link: Arc<Link>,
    pub(crate) holds: Arc<Holds>,
    pub(crate) wakeups: Arc<Wakeups>,
    pub(crate) background: Background,
    pub(crate) closed: AtomicBool,
    pub(crate) counters: Arc<Counters>,
    pub(crate) runtime: Runtime,
    /// Host and port of the server, for errors.
    pub(crate) address: Arc<str>,
    /// Dropping it with the core stops the tasks.
    pub(crate) stop: watch::Sender<bool>,
}

impl Core {
    pub(crate) fn ensure_open(&self) -> Result<(), Error> {
        self.runtime.ensure_alive()?;
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::Closed);
        }
        Ok(())
    }

    /// Closes the client for callers. Locks that are held become lost, except those whose release
    /// is pending.
    pub(crate) fn close(self: &Arc<Self>, reason: LostReason) {
        self.closed.store(true, Ordering::Release);
        self.wakeups.close();
        for lease in self.holds.leases() {
            if lease.is_leaving() {
                continue;
            }
            let reason = lease.lose(reason);
            renewal::tell_lost(self, &lease, reason, false);
        }
    }

    /// Lets go of the locks whose release was not sent, and never will be.
    pub(crate) fn abandon(&self, reason: LostReason) {
        for lease in self.holds.leases() {
            if self.holds.remove(&lease) {
                add(&self.counters.failed_releases);
                tracing::warn!(
                    lock = %lease.ident.lock(),
                    owner = %lease.ident.owner_field(),
                    %reason,
                    "a release was not sent, the lease will expire",
                );
            }
        }
    }

    /// Runs an operation of a caller. It works outside a runtime, too, and fails when the client's
    /// runtime ends.
    pub(crate) async fn drive<T>(
        self: Arc<Self>,
        operation: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let outcome = self.drive_uncounted(operation).await;
        if matches!(outcome, Err(Error::OutcomeUnknown { .. })) {
            add(&self.counters.unknown_outcomes);
        }
        outcome
    }

    /// The same for a part of an operation, whose unknown outcome its caller does not receive.
    pub(crate) async fn drive_uncounted<T>(
        &self,
        operation: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        match self.runtime.clone().drive(operation).await {
            // It was closed because its runtime has ended.
            Err(Error::Closed) => Err(self.runtime.ensure_alive().err().unwrap_or(Error::Closed)),
            outcome => outcome,
        }
    }

    pub(crate) fn ident(&self, keys: &Keys, owner: Owner) -> Arc<Ident> {
        let address = Arc::clone(&self.address);
        Arc::new(Ident::new(keys.clone(), self.client_id, owner, address))
    }

    pub(crate) fn entry(&self, ident: &Arc<Ident>, kind: &'static dyn Kind) -> EntryRef {
        self.holds.entry(ident, kind)
    }

    /// Sends an idempotent call, and repeats it after transient errors until the retry timeout.
    pub(crate) async fn ask(&self, call: Call, lock: &str, step: Step) -> Result<Asked, Error> {
        self.ensure_open()?;
        let begun = Instant::now();
        let mut patience = Patience::new(self.config.retry_timeout);
        let mut repeated = false;
        loop {
            let failure = match self.link.call(call.clone()).await {
                Ok(reply) => return Ok(Asked { reply, repeated }),
                Err(failure) => failure,
            };
            repeated |= matches!(failure, Failure::Unknown(_));
            if failure.is_transient() && patience.pause().await {
                self.ensure_open()?;
                continue;
            }
            return Err(match failure {
                // An inspection changes nothing, so its outcome is never unknown.
                Failure::Unknown(_) | Failure::NotSent(_) if repeated && step == Step::Inspect => {
                    Error::Timeout {
                        step,
                        after: begun.elapsed(),
                        lock: Some(lock.to_owned()),
                        address: Some(self.address.to_string()),
                    }
                }
                failure => locks::error(
                    failure,
                    lock,
                    &self.address,
                    (repeated && step != Step::Inspect).then_some(step),
                ),
            });
        }
    }
}

/// A reply, and whether an earlier copy of the same call may have run.
pub(crate) struct Asked {
    pub(crate) reply: Reply,
    pub(crate) repeated: bool,
}

impl Drop for Core {
    fn drop(&mut self) {
        self.holds.clear();
    }
}
