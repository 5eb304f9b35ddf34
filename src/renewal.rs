//! The one scheduler that keeps leases alive, and that tells when one is lost.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::core::Core;
use crate::error::{LostReason, ServerError, ServerErrorKind};
use crate::holds::Holds;
use crate::lease::{Lease, Proof, Upkeep};
use crate::link::Failure;
use crate::locks::{Kind, Renewed};
use crate::stats::add;

/// Sets a lease's next look after a confirmed script that was sent at `sent`.
pub(crate) fn plan(core: &Core, lease: &Arc<Lease>, sent: Instant) {
    let at = lease.plan(sent + core.config.watchdog_timeout.duration() / 3);
    core.holds.schedule(lease, at);
}

/// Runs until the client ends. A panic is reported and survived: leases must not die in silence.
pub(crate) async fn supervise(
    core: Weak<Core>,
    holds: Arc<Holds>,
    mut stop: watch::Receiver<bool>,
) {
    loop {
        let run = AssertUnwindSafe(run(&core, &holds));
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return,
            outcome = run.catch_unwind() => match outcome {
                Ok(()) => return,
                Err(_) => {
                    tracing::error!("the renewal scheduler panicked and was restarted");
                    let now = Instant::now();
                    for lease in holds.leases() {
                        lease.renewal_over();
                        holds.schedule(&lease, now);
                    }
                }
            },
        }
    }
}

async fn run(core: &Weak<Core>, holds: &Holds) {
    let outage = Outage::default();
    let mut renewals = FuturesUnordered::new();
    loop {
        let Some(strong) = core.upgrade() else { return };
        for batch in look(&strong) {
            renewals.push(renew(Arc::clone(&strong), batch, &outage));
        }
        drop(strong);
        let next = holds.next_look();
        tokio::select! {
            () = holds.earlier.notified() => {}
            () = tokio::time::sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
            Some(()) = renewals.next() => {}
        }
    }
}

/// Looks at everything that is due, and gathers what has to be renewed into batches of one kind.
fn look(core: &Arc<Core>) -> Vec<Vec<Arc<Lease>>> {
    let period = core.config.watchdog_timeout.duration() / 3;
    // What is due a little later goes along, so that batches fill.
    let soon = period / 20;
    let mut due: Vec<Arc<Lease>> = Vec::new();
    for lease in core.holds.take_due(Instant::now() + soon) {
        match lease.upkeep(period, soon) {
            Upkeep::None => {
                if let Some(at) = lease.let_go_in_time() {
                    core.holds.schedule(&lease, at);
                }
            }
            Upkeep::At(at) => core.holds.schedule(&lease, at),
            Upkeep::Lost { reason, clean } => tell_lost(core, &lease, reason, clean),
            Upkeep::Renew => {
                // Whatever becomes of the renewal, the end of the proof is looked at.
                core.holds.schedule(&lease, lease.proved_until());
                due.push(lease);
            }
        }
    }
    let mut batches: Vec<Vec<Arc<Lease>>> = Vec::new();
    for lease in due {
        // One that was refused would have the others of its batch refused, too.
        let room = |batch: &&mut Vec<Arc<Lease>>| {
            let spoilt = lease.is_refused() || batch[0].is_refused();
            !spoilt
                && batch.len() < core.config.renewal_batch
                && same_kind(batch[0].kind, lease.kind)
        };
        match batches.iter_mut().rev().find(room) {
            Some(batch) => batch.push(lease),
            None => batches.push(vec![lease]),
        }
    }
    batches
}

fn same_kind(one: &'static dyn Kind, other: &'static dyn Kind) -> bool {
    std::ptr::addr_eq(one, other)
}

/// Boxed, because a batch that is refused for one of its keys is renewed key by key through this
/// again.
fn renew(core: Arc<Core>, batch: Vec<Arc<Lease>>, outage: &Outage) -> BoxFuture<'_, ()> {
    async move { renew_batch(core, batch, outage).await }.boxed()
}

async fn renew_batch(core: Arc<Core>, batch: Vec<Arc<Lease>>, outage: &Outage) {
    let time = core.config.watchdog_timeout;
    let kind = batch[0].kind;
    let idents: Vec<_> = batch.iter().map(|lease| Arc::clone(&lease.ident)).collect();
    let sent = Instant::now();
    let reply = core.link.call(kind.renew(&idents, time)).await;
    let answers = reply.and_then(|reply| kind.renewed(reply, batch.len()));
    let answers = match answers {
        Ok(answers) => {
            outage.over();
            answers
        }
        // The server refused the script for one of its keys (ACL): renew each on its own.
        Err(Failure::Server(error)) if concerns_a_key(&error) && batch.len() > 1 => {
            let alone = batch
                .into_iter()
                .map(|lease| renew(Arc::clone(&core), vec![lease], outage));
            futures::future::join_all(alone).await;
            return;
        }
        Err(Failure::Server(error)) if concerns_a_key(&error) => {
            vec![Renewed::Refused(error)]
        }
        Err(failure) => {
            outage.goes_on(&failure);
            batch.iter().for_each(|lease| again(&core, lease));
            return;
        }
    };
    for (lease, answer) in batch.iter().zip(answers) {
        lease.renewal_over();
        match answer {
            Renewed::Yes => {
                lease.refused(false);
                add(&core.counters.renewals);
                lease.confirmed(None, Some(Proof { sent, lease: time }));
                if lease.live_count().is_some() {
                    plan(&core, lease, sent);
                }
            }
            // A release that overtook the renewal has ended the lease, and nothing is lost.
            Renewed::Gone if lease.live_count().is_none() && lease.lost().is_none() => {}
            Renewed::Gone => tell_lost(&core, lease, lease.lose(LostReason::Gone), false),
            Renewed::Refused(error) if error.kind() == ServerErrorKind::WrongType => {
                tell_lost(&core, lease, lease.lose(LostReason::Gone), false);
            }
            Renewed::Refused(error) => {
                if !lease.refused(true) {
                    tracing::warn!(lock = %lease.ident.lock(), owner = %lease.ident.owner_field(), %error, "the server refused a renewal, it will be tried again");
                }
                again(&core, lease);
            }
        }
    }
}

/// Whether a refusal is of one of the keys named, rather than of the script.
fn concerns_a_key(error: &ServerError) -> bool {
    match error.kind() {
        ServerErrorKind::Cluster => true,
        ServerErrorKind::NoPermission => error.message().contains("key"),
        _ => false,
    }
}

/// Tells of an outage once, not with each renewal.
#[derive(Default)]
struct Outage(AtomicBool);

impl Outage {
    fn goes_on(&self, failure: &Failure) {
        if !self.0.swap(true, Ordering::Relaxed) {
            tracing::warn!(error = %failure, "renewals get no reply, they are tried again until the leases expire");
        }
    }

    fn over(&self) {
        if self.0.swap(false, Ordering::Relaxed) {
            tracing::info!("renewals get replies again");
        }
    }
}

/// Plans another renewal soon.
fn again(core: &Core, lease: &Arc<Lease>) {
    let watchdog = core.config.watchdog_timeout.duration();
    let pause = if lease.is_refused() {
        // Each such is a call of its own.
        watchdog / 6
    } else {
        (watchdog / 30).clamp(Duration::from_millis(5), Duration::from_millis(500))
    };
    lease.renewal_over();
    if lease.live_count().is_some() || lease.lost().is_some() {
        let at = lease.plan(Instant::now() + pause);
        core.holds.schedule(lease, at);
    }
}

/// Takes a lost lease out of the table, tells, and leaves nothing of it on the server.
pub(crate) fn tell_lost(core: &Arc<Core>, lease: &Arc<Lease>, reason: LostReason, clean: bool) {
    core.holds.remove(lease);
    if lease.claim_report() {
        core.counters.lost(reason);
        tracing::warn!(lock = %lease.ident.lock(), owner = %lease.ident.owner_field(), %reason, "a lock was lost");
    }
    core.holds.lost(lease, reason);
    if clean {
        let entry = core.entry(&lease.ident, lease.kind);
        let (worker, lease) = (Arc::clone(core), Arc::clone(lease));
        core.background.spawn(async move {
            let turn = entry.turns.take().await;
            crate::release::clean_up(&worker, &entry, &lease, turn);
        });
    } else if let Some(at) = lease.cleaning_due() {
        core.holds.schedule(lease, at);
    }
}
