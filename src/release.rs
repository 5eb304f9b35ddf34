//! Giving back: what a release does.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use futures::FutureExt;
use futures::future::Either;
use tokio::time::{Instant, timeout};

use crate::config::LeaseTime;
use crate::core::Core;
use crate::error::{Error, LostReason, ServerErrorKind, Step};
use crate::handoff::Handoff;
use crate::holds::EntryRef;
use crate::lease::{Lease, Mode, Proof};
use crate::link::Failure;
use crate::locks::{Ident, Released};
use crate::losses::Loss;
use crate::retry::Patience;
use crate::stats::add;
use crate::turn::{Turn, Turns};

/// One hold on the server. Dropping it gives it back in the background.
pub(crate) struct Hold {
    pub(crate) core: Arc<Core>,
    pub(crate) entry: EntryRef,
    pub(crate) lease: Arc<Lease>,
    pub(crate) id: u64,
    /// Whether giving it back is somebody else's affair by now.
    settled: bool,
}

impl Hold {
    pub(crate) fn new(core: Arc<Core>, entry: EntryRef, lease: Arc<Lease>, id: u64) -> Self {
        Self {
            core,
            entry,
            lease,
            id,
            settled: false,
        }
    }

    /// Gives it back and waits for the server's word.
    ///
    /// Dropping the future leaves the rest to the background.
    pub(crate) async fn release(mut self) -> Result<(), Error> {
        self.settled = true;
        self.lease.leaves(self.id);
        let (core, entry) = (Arc::clone(&self.core), self.entry.clone());
        give_back(&core, entry, Arc::clone(&self.lease), self.id).await
    }

    /// Resolves when the lock is lost while the hold is there.
    pub(crate) fn lost(&self) -> impl Future<Output = LostReason> + Send + use<> {
        let (lease, id) = (Arc::clone(&self.lease), self.id);
        let runtime = self.core.runtime.clone();
        async move {
            let mut lost = pin!(lease.wait_lost(id));
            // Its timer works outside a runtime, too.
            poll_fn(|cx| {
                let polled = runtime.within(|| lost.as_mut().poll(cx));
                polled.unwrap_or(Poll::Ready(LostReason::RuntimeEnded))
            })
            .await
        }
    }

    /// Keeps it without a guard.
    pub(crate) fn detach(mut self) {
        self.settled = true;
        self.lease.detach(self.id, self.entry.clone());
        if let Some(reason) = self.lease.lost() {
            self.core.holds.lost(&self.lease, reason);
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.settled || (self.core.link.is_closed() && self.lease.lost().is_some()) {
            // Given back already; or the client was shut down, which has told its owners that they
            // lost.
            return;
        }
        self.lease.leaves(self.id);
        // In line from now on, so that the owner's next acquire comes after it.
        let mut turn = Box::pin(self.entry.turns.line_up());
        let queued = match turn.as_mut().now_or_never() {
            Some(turn) => Either::Left(std::future::ready(turn)),
            None => Either::Right(turn),
        };
        let release = release(
            Arc::clone(&self.core),
            self.entry.clone(),
            Arc::clone(&self.lease),
            self.id,
            queued,
        );
        let release = answering(
            Arc::clone(&self.core),
            Arc::clone(&self.entry.ident),
            release,
        );
        self.core
            .background
            .spawn(async move { drop(release.await) });
    }
}

/// What came of a release. A failure that no caller takes is counted and traced.
pub(crate) struct Answer<T> {
    core: Arc<Core>,
    ident: Arc<Ident>,
    result: Option<Result<T, Error>>,
}

impl<T> Answer<T> {
    /// What a caller is told.
    fn take(mut self) -> Option<Result<T, Error>> {
        self.result.take()
    }
}

impl<T> Drop for Answer<T> {
    fn drop(&mut self) {
        match &self.result {
            None | Some(Ok(_) | Err(Error::Lost { .. })) => {}
            Some(Err(error)) => {
                add(&self.core.counters.failed_releases);
                let lock = self.ident.lock();
                tracing::warn!(%lock, %error, "a hold could not be released, its lease will expire");
            }
        }
    }
}

/// Has somebody hear of a release's failure.
async fn answering<T>(
    core: Arc<Core>,
    ident: Arc<Ident>,
    release: impl Future<Output = Result<T, Error>>,
) -> Answer<T> {
    let result = Some(release.await);
    Answer {
        core,
        ident,
        result,
    }
}

/// Releases a hold for a caller who waits, as long as the client is ready to try.
pub(crate) async fn give_back(
    core: &Arc<Core>,
    entry: EntryRef,
    lease: Arc<Lease>,
    id: u64,
) -> Result<(), Error> {
    let ident = Arc::clone(&entry.ident);
    let turns = Arc::clone(&entry.turns);
    let turn = turns.line_up();
    // Its guard is gone, so whatever happens here it has to be finished.
    in_time(
        core,
        &ident,
        &turns,
        release(Arc::clone(core), entry, lease, id, turn),
    )
    .await
}

/// Releases as long as the client is ready to try. The background goes on where that ends.
async fn in_time<T: Send + 'static>(
    core: &Arc<Core>,
    ident: &Arc<Ident>,
    turns: &Arc<Turns>,
    release: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, Error> {
    let patience = core.config.patience();
    let release = answering(Arc::clone(core), Arc::clone(ident), release);
    let release = Handoff::new(&core.background, turns, release);
    let answer = timeout(patience, release).await.ok().flatten();
    // Nothing came of it: the client has ended.
    answer.and_then(Answer::take).unwrap_or_else(|| {
        let detail = match turns.refusal.lock().take() {
            Some(message) => {
                format!("not done within {patience:?}, the server refused it: {message}")
            }
            None => format!("{}: no reply within {patience:?}", ident.address),
        };
        Err(Error::OutcomeUnknown {
            lock: ident.lock(),
            step: Step::Release,
            detail,
        })
    })
}

/// Releases a hold: takes it out of the renewal table, then off the server, trying until the server
/// answers or until its lease is over anyway.
async fn release(
    core: Arc<Core>,
    entry: EntryRef,
    lease: Arc<Lease>,
    id: u64,
    turn: impl Future<Output = Turn> + Send,
) -> Result<(), Error> {
    // What is lost needs no turn to be told: an earlier operation may wait for the server for long.
    if let Some(reason) = lease.lost() {
        return Err(lost(&core, &entry, &lease, id, reason));
    }
    let turn = entry.turns.insist(turn).await;
    let ident = &entry.ident;
    let leaving = match lease.begin_release(id) {
        Some(Ok(leaving)) => leaving,
        Some(Err(reason)) => return Err(lost(&core, &entry, &lease, id, reason)),
        None => {
            return Err(Error::NotHeld {
                lock: ident.lock(),
                problem: "this hold was given back already".into(),
            });
        }
    };
    let proved = lease.remaining();
    let last = leaving.stay.is_none();
    if last {
        core.holds.remove(&lease);
    }
    let time = match leaving.stay.unwrap_or(Mode::Watchdog) {
        Mode::Watchdog => core.config.watchdog_timeout,
        Mode::Fixed(lease) => lease,
    };
    let gone = |reason| lost(&core, &entry, &lease, id, lease.lose(reason));
    let outcome = told_to_leave(&core, &entry, leaving.leave, time, Instant::now() + proved).await;
    match outcome {
        Ok(Told {
            released: Released::Freed,
            ..
        }) => {
            if !last {
                // The count that was told to stay cannot have freed it; but then nothing stays.
                return Err(gone(LostReason::Gone));
            }
        }
        Ok(Told {
            released: Released::Left,
            sent,
            ..
        }) => {
            lease.confirmed(Some(leaving.leave), Some(Proof { sent, lease: time }));
            if !last {
                crate::renewal::plan(&core, &lease, sent);
            }
        }
        // A repeat of our own unlock finds nothing left.
        Ok(Told {
            released: Released::Below(0),
            repeated: true,
            ..
        }) if leaving.leave == 0 => {}
        Ok(Told {
            released: Released::Below(0),
            ..
        }) => return Err(gone(LostReason::Gone)),
        Ok(Told {
            released: Released::Below(count),
            ..
        }) => {
            lease.confirmed(Some(count), None);
        }
        Err(Failure::Server(error)) if error.kind() == ServerErrorKind::WrongType => {
            return Err(gone(LostReason::Gone));
        }
        Err(failure @ Failure::Unknown(_)) => return Err(ident.unknown(failure, Step::Release)),
        Err(failure) => {
            if !leaving.hold.guarded {
                let ends = lease.put_back(leaving.hold, entry.clone());
                if last {
                    core.holds.insert(&lease);
                    core.holds.schedule(&lease, ends);
                }
            } else if last && !ident.owner.is_private() {
                core.holds.schedule(&lease, lease.keep(entry.clone()));
            }
            return Err(ident.refused(failure));
        }
    }
    if last {
        entry.set_lease(None);
    }
    drop(turn);
    Ok(())
}

/// Ends a hold of a lease that is lost.
fn lost(
    core: &Arc<Core>,
    entry: &EntryRef,
    lease: &Arc<Lease>,
    id: u64,
    reason: LostReason,
) -> Error {
    lease.drop_hold(id);
    crate::renewal::tell_lost(core, lease, reason, lease.claim_cleaning());
    Error::Lost {
        lock: entry.ident.lock(),
        reason,
    }
}

/// What an unlock has to tell that found nothing to give back: a detached hold that was lost is
/// told of once, a guard's for as long as the guard is there.
pub(crate) fn claim_loss(core: &Arc<Core>, entry: &EntryRef) -> Option<Error> {
    if let Some(Loss {
        reason,
        entry,
        lease,
        id,
    }) = core.holds.losses.take(&entry.losses)
    {
        return Some(lost(core, &entry, &lease, id, reason));
    }
    let reason = entry.latest().filter(|lease| lease.is_guarded())?.lost()?;
    Some(Error::Lost {
        lock: entry.ident.lock(),
        reason,
    })
}

struct Told {
    released: Released,
    /// Whether an earlier sending of the same may have run.
    repeated: bool,
    sent: Instant,
}

/// Sends a release until the server has answered it, or until `moot` has passed: then the lease has
/// run out by itself.
async fn told_to_leave(
    core: &Core,
    entry: &EntryRef,
    leave: i64,
    lease: LeaseTime,
    moot: Instant,
) -> Result<Told, Failure> {
    let mut repeated = false;
    let grace = core.config.retry_timeout;
    let mut patience = Patience::new(moot.saturating_duration_since(Instant::now()) + grace);
    let outcome = loop {
        let sent = Instant::now();
        let reply = core
            .link
            .call(entry.kind.release(&entry.ident, leave, lease))
            .await;
        let failure = match reply.and_then(|reply| entry.kind.released(reply)) {
            Ok(released) => {
                break Ok(Told {
                    released,
                    repeated,
                    sent,
                });
            }
            Err(failure) => failure,
        };
        repeated |= matches!(failure, Failure::Unknown(_));
        if let Failure::Server(error) = &failure {
            *entry.turns.refusal.lock() = Some(error.message().to_owned());
        }
        if !failure.is_transient() || !patience.pause().await {
            break Err(match failure {
                Failure::NotSent(error) if repeated => Failure::Unknown(error.to_string()),
                Failure::Server(error)
                    if repeated && error.kind() != ServerErrorKind::WrongType =>
                {
                    Failure::Unknown(format!("the server refused the repetition: {error}"))
                }
                failure => failure,
            });
        }
    };
    // It is no answer to the next one.
    *entry.turns.refusal.lock() = None;
    outcome
}

/// Makes sure, in the background, that a lost lease leaves nothing on the server, before its
/// owner's next operation.
pub(crate) fn clean_up(core: &Arc<Core>, entry: &EntryRef, lease: &Arc<Lease>, turn: Turn) {
    let live = entry.live();
    if live.is_some_and(|live| !Arc::ptr_eq(&live, lease)) {
        // The owner has the lock again: what is on the server is not ours to take.
        return;
    }
    settle(
        core,
        entry.clone(),
        lease.base(),
        core.config.watchdog_timeout,
        turn,
    );
}

/// Has the server left with `leave`, whatever an unanswered script with that lease did. Keeps the
/// entry's turn until that is known.
pub(crate) fn settle(core: &Arc<Core>, entry: EntryRef, leave: i64, lease: LeaseTime, turn: Turn) {
    let worker = Arc::clone(core);
    core.background.spawn(async move {
        let moot = Instant::now() + lease.duration();
        // The holds that stay are entitled to nothing new, and an expiry is never shortened.
        if let Err(failure) = told_to_leave(&worker, &entry, leave, LeaseTime::SHORTEST, moot).await {
            add(&worker.counters.failed_releases);
            tracing::warn!(lock = %entry.ident.lock(), error = %failure, "an unknown outcome could not be settled, the lease will expire");
        }
        drop(turn);
    });
}

/// Gives back one hold that only the server knows of; `false` if there is none.
pub(crate) async fn give_back_unrecorded(core: &Arc<Core>, entry: EntryRef) -> Result<bool, Error> {
    let (ident, turns) = (Arc::clone(&entry.ident), Arc::clone(&entry.turns));
    in_time(
        core,
        &ident,
        &turns,
        release_unrecorded(Arc::clone(core), entry),
    )
    .await
}

async fn release_unrecorded(core: Arc<Core>, entry: EntryRef) -> Result<bool, Error> {
    let ident = &entry.ident;
    let _turn = entry.turns.take().await;
    let lease = core.config.watchdog_timeout;
    let mut patience = Patience::new(core.config.retry_timeout);
    let count = loop {
        let reply = core.link.call(entry.kind.count(&entry.ident)).await;
        match reply.and_then(|reply| entry.kind.counted(reply)) {
            Ok(count) => break count,
            Err(failure) if failure.is_transient() && patience.pause().await => {}
            Err(failure) => return Err(ident.refused(failure)),
        }
    };
    // What guards stand for, and what is about to be given back elsewhere, is not there to be
    // taken.
    let recorded = entry.live().map_or(0, |live| live.held());
    if count <= recorded {
        return Ok(false);
    }
    let moot = Instant::now() + lease.duration();
    let told = told_to_leave(&core, &entry, count - 1, lease, moot)
        .await
        .map_err(|failure| match failure {
            Failure::Unknown(_) => ident.unknown(failure, Step::Release),
            failure => ident.refused(failure),
        })?;
    if let Some(live) = entry.live() {
        live.lower_base(count - 1);
    }
    Ok(told.repeated || told.released != Released::Below(0))
}
