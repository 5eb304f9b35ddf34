//! One attempt to acquire, seen through to an outcome that is known, or settled in the background.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

use crate::config::LeaseTime;
use crate::core::Core;
use crate::error::{Error, LostReason, Step};
use crate::holds::EntryRef;
use crate::lease::{Lease, Mode, Proof};
use crate::link::Failure;
use crate::locks::{Acquired, Ident};
use crate::owner::TaskId;
use crate::release::{Hold, settle};
use crate::retry::Patience;
use crate::stats::add;
use crate::turn::Turn;
use crate::wakeup::{InFlight, Outcome};

/// What an attempt asks for, and for whom.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) mode: Mode,
    /// The caller's, whoever drives the attempt in the end.
    pub(crate) task: TaskId,
}

pub(crate) enum Attempt {
    Granted(Hold),
    Held,
    /// It has been, but nobody came for its outcome.
    Undone,
}

/// How hard an attempt tries, and who is to know.
pub(crate) struct Effort {
    pub(crate) patience: Patience,
    pub(crate) caller: Weak<AtomicBool>,
    pub(crate) in_flight: Option<InFlight>,
}

impl Effort {
    /// Whether to ask again after trouble that may pass. For a caller who went away nothing more is
    /// begun.
    async fn again(&mut self) -> bool {
        if self.caller.strong_count() == 0 || !self.patience.pause().await {
            return false;
        }
        if let Some(in_flight) = &self.in_flight {
            in_flight.goes_on();
        }
        true
    }

    /// Takes in why the server told nothing of the lock.
    fn failed(&mut self, failure: &Failure) {
        if let (Some(in_flight), Failure::Server(error)) = (&mut self.in_flight, failure) {
            in_flight.refused(error.message().to_owned());
        }
    }

    /// Tells those in line what the server said.
    fn answered(self, outcome: Outcome) {
        if let Some(in_flight) = self.in_flight {
            in_flight.answered(outcome);
        }
    }
}

/// One attempt, seen through to an outcome that is known, or settled in the background.
pub(crate) async fn attempt(
    core: Arc<Core>,
    entry: EntryRef,
    wanted: Wanted,
    mut effort: Effort,
    turn: Turn,
) -> Result<Attempt, Error> {
    let time = match wanted.mode {
        Mode::Watchdog => core.config.watchdog_timeout,
        Mode::Fixed(lease) => lease,
    };
    let ident = &entry.ident;
    let mut live = entry.live();
    let record = live.as_ref().and_then(|lease| lease.live_count());
    let mut before = match record {
        Some(count) => count,
        None if !ident.owner.is_private() => count(&core, &entry, &mut effort).await?,
        None => 0,
    };
    let mut target = next(ident, before)?;
    // What is to be left should the outcome stay unknown: what we know to be held besides.
    let mut leave = before;
    let mut unknown = false;
    // Each correction takes in what the server says; more than a few mean that somebody else moves
    // the count.
    let mut corrections = 0;
    let failure = loop {
        let sent = Instant::now();
        let reply = core
            .link
            .call(entry.kind.acquire(ident, before, target, time))
            .await;
        match reply.and_then(|reply| entry.kind.acquired(reply)) {
            Ok(Acquired::Granted) => {
                effort.answered(Outcome::Granted(sent + time.duration()));
                add(&core.counters.grants);
                return granted(core, &entry, live, wanted, target, sent, time);
            }
            Ok(Acquired::Held(ttl)) => {
                add(&core.counters.contended_attempts);
                lose(&core, live.take());
                // A little later than the expiry, and never at once: an expiry is no reason to
                // spin.
                const FLOOR: Duration = Duration::from_millis(5);
                let free_at =
                    ttl.map(|ttl| Instant::now() + (ttl + Duration::from_millis(1)).max(FLOOR));
                effort.answered(Outcome::Held(free_at));
                return Ok(Attempt::Held);
            }
            Ok(Acquired::Other(found)) if corrections < 4 => {
                corrections += 1;
                if found == 0 {
                    // Our record says that we hold it, the server that we do not.
                    lose(&core, live.take());
                    (before, target, leave) = (0, 1, 0);
                } else if !ident.owner.is_private() {
                    (before, target, leave) = (found, next(ident, found)?, found);
                } else {
                    // Nobody else can be this owner, so the record is right, and what is too much
                    // came from a script of ours whose outcome was never known: the target goes
                    // over it.
                    before = found;
                }
            }
            Ok(Acquired::Other(found)) => {
                break Failure::Server(
                    format!("ERR the hold count keeps changing, now {found}").into(),
                );
            }
            Err(failure) => {
                unknown |= matches!(failure, Failure::Unknown(_));
                effort.failed(&failure);
                if !failure.is_transient() || !effort.again().await {
                    break failure;
                }
                if core.ensure_open().is_err() {
                    break Failure::Closed;
                }
            }
        }
    };
    if !unknown {
        return Err(ident.refused(failure));
    }
    let error = ident.unknown(failure, Step::Acquire);
    settle(&core, entry.clone(), leave, time, turn);
    Err(error)
}

/// Records what the server granted.
fn granted(
    core: Arc<Core>,
    entry: &EntryRef,
    live: Option<Arc<Lease>>,
    Wanted { mode, task }: Wanted,
    count: i64,
    sent: Instant,
    time: LeaseTime,
) -> Result<Attempt, Error> {
    let id = core.holds.fresh_id();
    // The record may have run out while the reply was under way: then the older guards are lost.
    let live = live.filter(|lease| lease.live_count().is_some());
    let is_new = live.is_none();
    let lease = live.unwrap_or_else(|| {
        let base = if entry.ident.owner.is_private() {
            // What a private owner finds on the server can only be its own.
            0
        } else {
            // So it is with what an earlier possession, that was lost here first, has left there.
            let earlier = entry.latest().filter(|earlier| earlier.may_be_there());
            earlier.map_or(count - 1, |earlier| earlier.base().min(count - 1))
        };
        Arc::new(Lease::new(Arc::clone(&entry.ident), entry.kind, base, sent))
    });
    lease.grant(id, mode, task, count, Proof { sent, lease: time });
    if is_new {
        entry.set_lease(Some(Arc::clone(&lease)));
        core.holds.insert(&lease);
    }
    // A re-entry with a lease of its own does not extend the others', so it must not put off their
    // renewal.
    if is_new || mode == Mode::Watchdog {
        crate::renewal::plan(&core, &lease, sent);
    }
    let hold = Hold::new(core, entry.clone(), lease, id);
    // A client that has been shut down meanwhile renews nothing; dropping the hold gives it back.
    hold.core.ensure_open()?;
    match hold.lease.lost() {
        None => Ok(Attempt::Granted(hold)),
        // The grant took longer to arrive than it was good for.
        Some(reason) => Err(Error::Lost {
            lock: entry.ident.lock(),
            reason,
        }),
    }
}

/// The older guards of a possession that the server does not know are lost.
fn lose(core: &Arc<Core>, lease: Option<Arc<Lease>>) {
    if let Some(lease) = lease {
        let reason = lease.lose(LostReason::Gone);
        crate::renewal::tell_lost(core, &lease, reason, false);
    }
}

/// Asks for the count of an owner that others may be as well.
async fn count(core: &Core, entry: &EntryRef, effort: &mut Effort) -> Result<i64, Error> {
    loop {
        let reply = core.link.call(entry.kind.count(&entry.ident)).await;
        match reply.and_then(|reply| entry.kind.counted(reply)) {
            Ok(count) => return Ok(count),
            Err(failure) if failure.is_transient() && effort.again().await => {}
            Err(failure) => return Err(entry.ident.refused(failure)),
        }
    }
}

fn next(ident: &Ident, count: i64) -> Result<i64, Error> {
    count
        .checked_add(1)
        .filter(|next| *next > 0)
        .ok_or_else(|| Error::Server {
            lock: Some(ident.lock()),
            address: None,
            database: None,
            error: format!("ERR the hold count is at its limit: {count}").into(),
        })
}
