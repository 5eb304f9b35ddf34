//! Giving back: what a release does, and what is finished in the background when its caller goes away.

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures::future::{BoxFuture, Either};
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use tokio::sync::{Notify, OwnedMutexGuard, mpsc, watch};
use tokio::time::Instant;

use crate::config::LeaseTime;
use crate::core::Core;
use crate::error::{Error, LostReason, Step};
use crate::holds::EntryRef;
use crate::lease::{Lease, Mode, Proof};
use crate::link::Failure;
use crate::locks::Released;
use crate::retry::Patience;

type Job = BoxFuture<'static, ()>;

/// The way to the one task that finishes what callers left unfinished.
#[derive(Clone)]
pub(crate) struct Background {
    jobs: mpsc::UnboundedSender<Job>,
    pending: Arc<Pending>,
    with_callers: Arc<Pending>,
}

/// Counts what is not finished.
#[derive(Default)]
struct Pending {
    count: AtomicUsize,
    none: Notify,
}

/// Counts for as long as it lives.
struct Busy(Arc<Pending>);

impl Background {
    /// The sending side, and the worker to spawn. The worker ends when every sender is gone and its jobs are done, or
    /// at once when it is told to stop.
    pub(crate) fn new(mut stop: watch::Receiver<bool>) -> (Self, impl Future<Output = ()> + Send + 'static) {
        let (jobs, queue) = mpsc::unbounded_channel();
        let background = Self { jobs, pending: Arc::default(), with_callers: Arc::default() };
        let worker = async move {
            let stopped = async move {
                if stop.wait_for(|stop| *stop).await.is_err() {
                    // The client is gone; what it left is still to be done.
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                () = work(queue) => {}
                () = stopped => {}
            }
        };
        (background, worker)
    }

    /// Hands a job over. Works from any thread, inside a runtime or not.
    pub(crate) fn spawn(&self, job: impl Future<Output = ()> + Send + 'static) {
        let busy = Busy::new(&self.pending);
        let job = async move {
            let _busy = busy;
            job.await;
        };
        if self.jobs.send(job.boxed()).is_err() {
            tracing::warn!("a release could not be finished: the client's runtime has ended; the lease will run out");
        }
    }

    /// Resolves when nothing is pending. What callers have in their hands is waited for that long: a caller may have
    /// stopped to poll.
    pub(crate) async fn drained(&self, callers: Duration) {
        // An error means that somebody is not polled.
        let _ = tokio::time::timeout(callers, self.with_callers.none()).await;
        // What they left unfinished has come here.
        self.pending.none().await;
    }
}

impl Pending {
    async fn none(&self) {
        loop {
            let none = self.none.notified();
            if self.count.load(Ordering::Acquire) == 0 {
                return;
            }
            none.await;
        }
    }
}

impl Busy {
    fn new(pending: &Arc<Pending>) -> Self {
        pending.count.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(pending))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.none.notify_waiters();
        }
    }
}

async fn work(mut queue: mpsc::UnboundedReceiver<Job>) {
    let mut running = FuturesUnordered::new();
    let mut open = true;
    while open || !running.is_empty() {
        tokio::select! {
            job = queue.recv(), if open => match job {
                Some(job) => running.push(AssertUnwindSafe(job).catch_unwind()),
                None => open = false,
            },
            Some(outcome) = running.next() => {
                if outcome.is_err() {
                    tracing::error!("a background release panicked; its lease will run out");
                }
            }
        }
    }
}

/// A future that, once begun, is finished in the background if its caller drops it.
///
/// What it resolves to must undo itself when it is dropped.
pub(crate) struct Handoff<T: Send + 'static> {
    future: Option<BoxFuture<'static, T>>,
    background: Background,
    begun: bool,
    _busy: Busy,
}

impl<T: Send + 'static> Handoff<T> {
    pub(crate) fn new(background: &Background, future: impl Future<Output = T> + Send + 'static) -> Self {
        Self {
            future: Some(future.boxed()),
            background: background.clone(),
            begun: false,
            _busy: Busy::new(&background.with_callers),
        }
    }
}

impl<T: Send + 'static> Handoff<T> {
    /// To be finished even if it is never polled.
    pub(crate) fn begun(mut self) -> Self {
        self.begun = true;
        self
    }
}

impl<T: Send + 'static> Future for Handoff<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        self.begun = true;
        let Some(future) = self.future.as_mut() else { return Poll::Pending };
        let output = std::task::ready!(future.poll_unpin(cx));
        self.future = None;
        Poll::Ready(output)
    }
}

impl<T: Send + 'static> Drop for Handoff<T> {
    fn drop(&mut self) {
        if let Some(future) = self.future.take().filter(|_| self.begun) {
            self.background.spawn(async move { drop(future.await) });
        }
    }
}

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
        Self { core, entry, lease, id, settled: false }
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

    /// Keeps it without a guard.
    pub(crate) fn forget(mut self) {
        self.settled = true;
        let latest = self.entry.latest().is_some_and(|latest| Arc::ptr_eq(&latest, &self.lease));
        match self.lease.lost() {
            // Nobody will ask.
            Some(_) if self.entry.ident.fresh => {}
            // Its holder has locked again since: this possession is asked for nothing any more.
            Some(reason) if !latest => self.entry.owe(reason, self.entry.clone()),
            _ => self.lease.forget(self.id, self.entry.clone()),
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.settled || (self.core.link.is_closed() && self.lease.lost().is_some()) {
            // Given back already; or the client was shut down, which has told its holders that they lost.
            return;
        }
        self.lease.leaves(self.id);
        // In line from now on, so that the holder's next acquire comes after it.
        let mut turn = Box::pin(Arc::clone(&self.entry.turn).lock_owned());
        let queued = match turn.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(turn) => Either::Left(std::future::ready(turn)),
            Poll::Pending => Either::Right(turn),
        };
        let release = release(Arc::clone(&self.core), self.entry.clone(), Arc::clone(&self.lease), self.id, queued);
        let (core, ident) = (Arc::clone(&self.core), Arc::clone(&self.entry.ident));
        self.core.background.spawn(async move {
            match release.await {
                Ok(()) | Err(Error::Lost { .. }) => {}
                Err(error) => {
                    core.failed_releases.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(lock = %ident.lock(), %error, "a dropped guard could not be released; its lease will run out");
                }
            }
        });
    }
}

/// Releases a hold for a caller who waits, as long as the client is ready to try.
pub(crate) async fn give_back(core: &Arc<Core>, entry: EntryRef, lease: Arc<Lease>, id: u64) -> Result<(), Error> {
    let ident = Arc::clone(&entry.ident);
    let turn = Arc::clone(&entry.turn).lock_owned();
    // Its guard is gone, so whatever happens here it has to be finished.
    let release = Handoff::new(&core.background, release(Arc::clone(core), entry, lease, id, turn)).begun();
    let patience = core.config.patience();
    match tokio::time::timeout(patience, release).await {
        Ok(outcome) => outcome,
        Err(_) => Err(Error::Unknown {
            lock: ident.lock(),
            step: Step::Release,
            detail: format!("no answer in {patience:?}"),
        }),
    }
}

/// Releases a hold: takes it out of the renewal table, then off the server, trying until the server answers or
/// until its lease is over anyway.
async fn release(
    core: Arc<Core>,
    entry: EntryRef,
    lease: Arc<Lease>,
    id: u64,
    turn: impl Future<Output = OwnedMutexGuard<()>> + Send,
) -> Result<(), Error> {
    // What is lost needs no turn to be told: an earlier operation may wait for the server for long.
    if let Some(reason) = lease.lost() {
        return Err(lost(&core, &entry, &lease, id, reason));
    }
    let turn = turn.await;
    let ident = &entry.ident;
    let leaving = match lease.begin_release(id) {
        Some(Ok(leaving)) => leaving,
        Some(Err(reason)) => return Err(lost(&core, &entry, &lease, id, reason)),
        None => {
            return Err(Error::NotHeld { lock: ident.lock(), problem: "this hold was given back already".into() });
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
        Ok(Told { released: Released::Freed, .. }) => {
            if !last {
                // The count that was told to stay cannot have freed it; but then nothing stays.
                return Err(gone(LostReason::Gone));
            }
        }
        Ok(Told { released: Released::Left, sent, .. }) => {
            lease.confirmed(Some(leaving.leave), Some(Proof { sent, lease: time }));
            if !last {
                crate::renewal::plan(&core, &lease, sent);
            }
        }
        // A repeat of our own unlock finds nothing left.
        Ok(Told { released: Released::Below(0), repeated: true, .. }) if leaving.leave == 0 => {}
        Ok(Told { released: Released::Below(0), .. }) => return Err(gone(LostReason::Gone)),
        Ok(Told { released: Released::Below(count), .. }) => {
            lease.confirmed(Some(count), None);
        }
        Err(Failure::Server(message)) if message.starts_with("WRONGTYPE") => return Err(gone(LostReason::Gone)),
        Err(failure @ Failure::Unknown(_)) => return Err(ident.unknown(failure, Step::Release)),
        Err(failure) => {
            if last && !ident.holder.is_private() {
                lease.keep(entry.clone());
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
fn lost(core: &Arc<Core>, entry: &EntryRef, lease: &Arc<Lease>, id: u64, reason: LostReason) -> Error {
    lease.drop_hold(id);
    crate::renewal::tell_lost(core, lease, reason, lease.claim_cleaning());
    Error::Lost { lock: entry.ident.lock(), reason }
}

struct Told {
    released: Released,
    /// Whether an earlier sending of the same may have run.
    repeated: bool,
    sent: Instant,
}

/// Sends a release until the server has answered it, or until `moot` has passed: then the lease has run out by itself.
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
    loop {
        let sent = Instant::now();
        let reply = core.link.call(entry.kind.release(&entry.ident, leave, lease)).await;
        let failure = match reply.and_then(|reply| entry.kind.released(reply)) {
            Ok(released) => return Ok(Told { released, repeated, sent }),
            Err(failure) => failure,
        };
        repeated |= matches!(failure, Failure::Unknown(_));
        if !failure.is_passing() || !patience.pause().await {
            return Err(match failure {
                Failure::NotSent(detail) if repeated => Failure::Unknown(detail),
                Failure::Server(message) if repeated && !message.starts_with("WRONGTYPE") => {
                    Failure::Unknown(format!("a repeat was refused: {message}"))
                }
                failure => failure,
            });
        }
    }
}

/// Makes sure, in the background, that a lost lease leaves nothing on the server, before its holder's next operation.
pub(crate) fn clean_up(core: &Arc<Core>, entry: &EntryRef, lease: &Arc<Lease>, turn: OwnedMutexGuard<()>) {
    let live = entry.live();
    if live.is_some_and(|live| !Arc::ptr_eq(&live, lease)) {
        // The holder has the lock again: what is on the server is not ours to take.
        return;
    }
    settle(core, entry.clone(), lease.base(), core.config.watchdog_timeout, turn);
}

/// Has the server left with `leave`, whatever an unanswered script with that lease did. Keeps the entry's turn until
/// that is known.
pub(crate) fn settle(core: &Arc<Core>, entry: EntryRef, leave: i64, lease: LeaseTime, turn: OwnedMutexGuard<()>) {
    let worker = Arc::clone(core);
    core.background.spawn(async move {
        let moot = Instant::now() + lease.duration();
        // The holds that stay are entitled to nothing new, and an expiry is never shortened.
        if let Err(failure) = told_to_leave(&worker, &entry, leave, LeaseTime::SHORTEST, moot).await {
            worker.failed_releases.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(lock = %entry.ident.lock(), %failure, "an unknown outcome could not be settled; its lease will run out");
        }
        drop(turn);
    });
}

/// Gives back one hold that only the server knows of; `false` if there is none.
pub(crate) async fn give_back_unrecorded(core: &Core, entry: EntryRef) -> Result<bool, Failure> {
    let _turn = Arc::clone(&entry.turn).lock_owned().await;
    let lease = core.config.watchdog_timeout;
    let mut patience = Patience::new(core.config.retry_timeout);
    let count = loop {
        let reply = core.link.call(entry.kind.count(&entry.ident)).await;
        match reply.and_then(|reply| entry.kind.counted(reply)) {
            Ok(count) => break count,
            Err(failure) if failure.is_passing() && patience.pause().await => {}
            Err(failure) => return Err(failure),
        }
    };
    // What guards stand for, and what is about to be given back elsewhere, is not there to be taken.
    let recorded = entry.live().map_or(0, |live| live.held());
    if count <= recorded {
        return Ok(false);
    }
    let moot = Instant::now() + lease.duration();
    let told = told_to_leave(core, &entry, count - 1, lease, moot).await?;
    if let Some(live) = entry.live() {
        live.lower_base(count - 1);
    }
    Ok(told.repeated || told.released != Released::Below(0))
}
