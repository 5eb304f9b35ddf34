//! What the rooms of one client share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::sync::watch;
use tokio::time::Instant;

use crate::background::Background;
use crate::config::Config;
use crate::error::{Error, Step};
use crate::holds::{EntryRef, Holds};
use crate::keys::Keys;
use crate::link::{Call, Failure, Link, Reply};
use crate::locks::{self, Ident, Kind};
use crate::owner::{ClientId, Owner};
use crate::retry::Patience;
use crate::wakeup::Wakeups;

/// The rooms of a client. Its tasks hold it weakly: when the last lock, guard and client are gone,
/// they end.
pub(crate) struct Core {
    pub(crate) client_id: ClientId,
    pub(crate) config: Config,
    pub(crate) link: Arc<Link>,
    pub(crate) holds: Arc<Holds>,
    pub(crate) wakeups: Arc<Wakeups>,
    pub(crate) background: Background,
    pub(crate) closed: AtomicBool,
    /// How many releases in the background were given up.
    pub(crate) failed_releases: AtomicU64,
    /// Dropped with the core, which stops the tasks.
    pub(crate) stop: watch::Sender<bool>,
}

impl Core {
    pub(crate) fn ensure_open(&self) -> Result<(), Error> {
        if self.closed.load(Ordering::Acquire) {
            Err(Error::Closed)
        } else {
            Ok(())
        }
    }

    pub(crate) fn ident(&self, keys: &Keys, owner: Owner) -> Arc<Ident> {
        Arc::new(Ident::new(keys.clone(), self.client_id, owner))
    }

    pub(crate) fn fresh_ident(&self, keys: &Keys) -> Arc<Ident> {
        Arc::new(Ident {
            fresh: true,
            ..Ident::new(keys.clone(), self.client_id, Owner::new())
        })
    }

    pub(crate) fn entry(&self, ident: &Arc<Ident>, kind: &'static dyn Kind) -> EntryRef {
        self.holds.entry(ident, kind)
    }

    /// Makes a call that may be made any number of times, and asks again while the trouble may
    /// pass.
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
            if failure.is_passing() && patience.pause().await {
                self.ensure_open()?;
                continue;
            }
            return Err(match failure {
                // A question leaves nothing behind.
                Failure::Unknown(_) | Failure::NotSent(_) if repeated && step == Step::Inspect => {
                    Error::Timeout {
                        step,
                        after: begun.elapsed(),
                    }
                }
                failure => locks::error(
                    failure,
                    lock,
                    (repeated && step != Step::Inspect).then_some(step),
                ),
            });
        }
    }
}

/// A reply, and whether an earlier sending of the same call may have run.
pub(crate) struct Asked {
    pub(crate) reply: Reply,
    pub(crate) repeated: bool,
}

impl Drop for Core {
    fn drop(&mut self) {
        self.holds.clear();
    }
}
