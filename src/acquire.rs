//! The waiting algorithm, once for all kinds of lock: try, subscribe, try again, sleep.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout};

use crate::config::{LeaseTime, WaitTime};
use crate::core::Core;
use crate::error::{Error, LostReason, Step};
use crate::handoff::Handoff;
use crate::holder::TaskId;
use crate::holds::EntryRef;
use crate::lease::{Lease, Mode, Proof};
use crate::link::Failure;
use crate::locks::{Acquired, Ident, Kind};
use crate::release::{Hold, settle};
use crate::retry::{LONGEST, Patience};
use crate::turn::Turn;
use crate::wakeup::{self, InFlight, Outcome, Pace, Place, Standing};

/// What came of waiting for a lock.
pub(crate) enum Acquisition {
    Granted(Hold),
    /// The wait time is over; the holder's lease had that long to go when it was last asked for.
    Contended {
        waited: Duration,
        remaining_ttl: Option<Duration>,
    },
}

/// Acquires one hold for the holder in `ident`.
///
/// Dropping the future leaves nothing behind: a script that is under way is seen through in the background, and a
/// hold that it brings is given back.
pub(crate) async fn acquire(
    core: Arc<Core>,
    kind: &'static dyn Kind,
    ident: Arc<Ident>,
    mode: Mode,
    wait: WaitTime,
) -> Result<Acquisition, Error> {
    core.ensure_open()?;
    let begun = Instant::now();
    let (ends, patience) = match wait {
        WaitTime::Unlimited => (None, core.config.retry_timeout),
        // Contention is waited out for the wait time; trouble with the server at least for one reply's time.
        WaitTime::AtMost(wait) => {
            (begun.checked_add(wait), wait.max(core.config.command_timeout).min(core.config.retry_timeout))
        }
    };
    let entry = core.entry(&ident, kind);
    let mut waiter = Waiter {
        core,
        entry,
        mode,
        begun,
        ends,
        patience,
        place: None,
        remaining_ttl: None,
        asked: false,
        warned: false,
        warned_of_own: false,
    };
    let outcome = waiter.run().await;
    if let Ok(Acquisition::Granted(_)) = &outcome {
        waiter.core.wakeups.holder_granted(&ident.keys.channel, &ident.keys.name, ident.holder.thread_id());
    }
    outcome
}

struct Waiter {
    core: Arc<Core>,
    entry: EntryRef,
    mode: Mode,
    begun: Instant,
    ends: Option<Instant>,
    patience: Duration,
    place: Option<Place>,
    remaining_ttl: Option<Duration>,
    asked: bool,
    warned: bool,
    warned_of_own: bool,
}

/// What a waiter does when its waiting is over.
enum Next {
    /// It tries; a re-entry does so past the queue.
    Try(Option<InFlight>),
    GiveUp,
}

impl Waiter {
    async fn run(&mut self) -> Result<Acquisition, Error> {
        if self.ends == Some(self.begun) {
            // No time to wait: one question, past any queue.
            loop {
                match self.attempt(None, self.patience).await? {
                    Attempt::Granted(hold) => return Ok(Acquisition::Granted(hold)),
                    Attempt::Held(ttl) => {
                        self.remaining_ttl = ttl;
                        return Ok(self.contended());
                    }
                    Attempt::Undone => self.again()?,
                }
            }
        }
        loop {
            let Next::Try(in_flight) = self.wait_for_turn().await? else {
                return Ok(self.contended());
            };
            let patience = in_flight.as_ref().map_or(Ok(self.patience), |in_flight| self.patience_left(in_flight))?;
            self.asked = true;
            match self.attempt(in_flight, patience).await? {
                Attempt::Granted(hold) => return Ok(Acquisition::Granted(hold)),
                Attempt::Held(ttl) => self.remaining_ttl = ttl,
                Attempt::Undone => self.again()?,
            }
        }
    }

    /// Waits until there is a reason to try, or until the wait time is over.
    async fn wait_for_turn(&mut self) -> Result<Next, Error> {
        loop {
            if self.entry.live().is_some() {
                // The holder has the lock: this is a re-entry, which waits for nobody.
                return Ok(Next::Try(None));
            }
            // However short the wait time: who is in front asks once. However many wake-ups: not after its end.
            if self.asked && self.is_over() {
                return Ok(Next::GiveUp);
            }
            let Some(place) = &self.place else {
                let Ident { keys, holder, .. } = &*self.entry.ident;
                self.place = Some(self.core.wakeups.join(&keys.channel, &keys.name, holder.thread_id()));
                // Look again: a grant to the holder that came before the place was taken has notified nobody.
                continue;
            };
            let (until, standing) = match place.turn(self.pace()) {
                wakeup::Turn::Try(in_flight) => return Ok(Next::Try(Some(in_flight))),
                wakeup::Turn::Closed => return Err(Error::Closed),
                wakeup::Turn::Sleep(until, standing) => (until, standing),
            };
            if !std::mem::replace(&mut self.warned, true) {
                warn_of_self(&self.core, &self.entry.ident);
            }
            // Only the one in front: a long hold is no reason for as many warnings as there are waiters.
            let long = self.begun.elapsed() > self.core.config.watchdog_timeout.duration();
            if long && standing == Standing::Front && !self.warned_of_own {
                self.warned_of_own = warn_of_own(&self.core, &self.entry.ident, self.begun);
            }
            let until = match self.ends {
                None => until,
                Some(ends) if Instant::now() < ends => ends.min(until),
                Some(_) if standing != Standing::InTheDark => return Ok(Next::GiveUp),
                // Who has heard nothing of the server does not say that somebody holds the lock.
                Some(_) => {
                    let ends = self.begun + self.patience;
                    if Instant::now() >= ends {
                        return Err(Error::Timeout { step: Step::EarlierOperation, after: self.begun.elapsed() });
                    }
                    if place.wants_answer() {
                        continue;
                    }
                    ends.min(until)
                }
            };
            tokio::select! {
                () = place.notified() => {}
                () = sleep_until(until) => {}
            }
        }
    }

    /// For how much longer trouble with the server is waited out: those in line do not begin anew, one after the other.
    fn patience_left(&self, in_flight: &InFlight) -> Result<Duration, Error> {
        // Where nobody has asked for a while it may well be over.
        let Some(silence) = in_flight.silence().filter(|silence| silence.until.elapsed() < LONGEST) else {
            return Ok(self.patience);
        };
        let lasted = silence.until.saturating_duration_since(silence.since.max(self.begun));
        match (self.patience.saturating_sub(lasted), silence.said) {
            (Duration::ZERO, Some(message)) if !self.patience.is_zero() => {
                Err(Error::Server { lock: Some(self.entry.ident.lock()), message })
            }
            (Duration::ZERO, None) if !self.patience.is_zero() => Err(Error::Connection {
                detail: format!("the server has answered no attempt for {lasted:?} (try again when it is back)"),
            }),
            (left, _) => Ok(left),
        }
    }

    fn is_over(&self) -> bool {
        self.ends.is_some_and(|ends| Instant::now() >= ends)
    }

    fn pace(&self) -> Pace {
        let config = &self.core.config;
        // A call waits for a connection, and then for its reply.
        Pace { recheck: spread(config.recheck_interval), grace: 2 * config.command_timeout + LONGEST }
    }

    /// Asks the server once, and again while it is in trouble that may pass.
    async fn attempt(&self, in_flight: Option<InFlight>, patience: Duration) -> Result<Attempt, Error> {
        let begun = Arc::new(AtomicBool::new(false));
        // Gone with the caller, so that an attempt knows whether it was left behind.
        let caller = Arc::downgrade(&begun);
        let (core, entry, mode) = (Arc::clone(&self.core), self.entry.clone(), self.mode);
        let limit = patience.max(core.config.command_timeout);
        let attempt = async move {
            let Ok(turn) = timeout(limit, entry.turns.take()).await else {
                return Err(Error::Timeout { step: Step::EarlierOperation, after: limit });
            };
            match caller.upgrade() {
                Some(begun) => begun.store(true, Ordering::Release),
                None => return Ok(Attempt::Undone),
            }
            core.ensure_open()?;
            let effort = Effort { patience: Patience::new(patience), caller, in_flight };
            attempt(core, entry, mode, effort, turn).await
        };
        let attempt = Handoff::undoable(&self.core.background, &self.entry.turns, begun, attempt);
        attempt.await.unwrap_or(Ok(Attempt::Undone))
    }

    /// What was granted while the request was not polled has been given back.
    fn again(&self) -> Result<(), Error> {
        self.core.ensure_open()?;
        tracing::warn!(
            lock = %self.entry.ident.lock(),
            owner = %self.entry.ident.owner(),
            "a request for a lock was not polled when its answer came, and asks again: a future that is not awaited any \
             more is best dropped, or spawned",
        );
        Ok(())
    }

    fn contended(&self) -> Acquisition {
        Acquisition::Contended { waited: self.begun.elapsed(), remaining_ttl: self.remaining_ttl }
    }
}

/// Tells if this task is about to wait for itself.
fn warn_of_self(core: &Core, ident: &Ident) {
    let task = TaskId::current();
    let own = core.holds.leases_of(&ident.keys.name);
    if let Some(lease) = own.iter().find(|lease| lease.taken_by(task)) {
        tracing::warn!(
            lock = %ident.lock(),
            held_by = %lease.ident.owner(),
            wanted_by = %ident.owner(),
            "a task waits for a lock that it holds itself, under another holder: run the nested code in the holder's \
             scope (lock.run(..), guard.run(..), Holder::scope(..)), or build the client with HolderPolicy::PerTask; if these \
             are branches of one join! that take turns, all is well",
        );
    }
}

/// Tells if the lock has been held by this client since before the long wait began: perhaps by somebody who waits for
/// this very task.
fn warn_of_own(core: &Core, ident: &Ident, begun: Instant) -> bool {
    let own = core.holds.leases_of(&ident.keys.name);
    let Some(lease) = own.iter().find(|lease| lease.began < begun) else { return false };
    tracing::warn!(
        lock = %ident.lock(),
        held_by = %lease.ident.owner(),
        wanted_by = %ident.owner(),
        waited = ?begun.elapsed(),
        "a long wait for a lock that this client holds itself, under another holder: if that holder waits for this one, \
         neither will go on; carry the holder into spawned tasks with in_current_holder(), and lock again within \
         guard.run(..)",
    );
    true
}

enum Attempt {
    Granted(Hold),
    Held(Option<Duration>),
    /// It has been, but nobody came for its outcome.
    Undone,
}

/// How hard an attempt tries, and who is to know.
struct Effort {
    patience: Patience,
    caller: Weak<AtomicBool>,
    in_flight: Option<InFlight>,
}

impl Effort {
    /// Whether to ask again after trouble that may pass. For a caller who went away nothing more is begun.
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
        if let (Some(in_flight), Failure::Server(message)) = (&mut self.in_flight, failure) {
            in_flight.refused(message.clone());
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
async fn attempt(
    core: Arc<Core>,
    entry: EntryRef,
    mode: Mode,
    mut effort: Effort,
    turn: Turn,
) -> Result<Attempt, Error> {
    let time = match mode {
        Mode::Watchdog => core.config.watchdog_timeout,
        Mode::Fixed(lease) => lease,
    };
    let ident = &entry.ident;
    let mut live = entry.live();
    let record = live.as_ref().and_then(|lease| lease.live_count());
    let mut before = match record {
        Some(count) => count,
        None if !ident.holder.is_private() => count(&core, &entry, &mut effort).await?,
        None => 0,
    };
    let mut target = next(ident, before)?;
    // What is to be left should the outcome stay unknown: what we know to be held besides.
    let mut leave = before;
    let mut unknown = false;
    // Each correction takes in what the server says; more than a few mean that somebody else moves the count.
    let mut corrections = 0;
    let failure = loop {
        let sent = Instant::now();
        let reply = core.link.call(entry.kind.acquire(ident, before, target, time)).await;
        match reply.and_then(|reply| entry.kind.acquired(reply)) {
            Ok(Acquired::Granted) => {
                effort.answered(Outcome::Granted(sent + time.duration()));
                return granted(core, &entry, live, mode, target, sent, time);
            }
            Ok(Acquired::Held(ttl)) => {
                lose(&core, live.take());
                // A little later than the expiry, and never at once: an expiry is no reason to spin.
                const FLOOR: Duration = Duration::from_millis(5);
                let free_at = ttl.map(|ttl| Instant::now() + (ttl + Duration::from_millis(1)).max(FLOOR));
                effort.answered(Outcome::Held(free_at));
                return Ok(Attempt::Held(ttl));
            }
            Ok(Acquired::Other(found)) if corrections < 4 => {
                corrections += 1;
                if found == 0 {
                    // Our record says that we hold it, the server that we do not.
                    lose(&core, live.take());
                    (before, target, leave) = (0, 1, 0);
                } else if !ident.holder.is_private() {
                    (before, target, leave) = (found, next(ident, found)?, found);
                } else {
                    // Nobody else can be this holder, so the record is right, and what is too much came from a
                    // script of ours whose outcome was never known: the target goes over it.
                    before = found;
                }
            }
            Ok(Acquired::Other(found)) => break Failure::Server(format!("the hold count keeps changing, now {found}")),
            Err(failure) => {
                unknown |= matches!(failure, Failure::Unknown(_));
                effort.failed(&failure);
                if !failure.is_passing() || !effort.again().await {
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
    mode: Mode,
    count: i64,
    sent: Instant,
    time: LeaseTime,
) -> Result<Attempt, Error> {
    let id = core.holds.fresh_id();
    // The record may have run out while the reply was under way: then the older guards are lost.
    let live = live.filter(|lease| lease.live_count().is_some());
    let is_new = live.is_none();
    let lease = live.unwrap_or_else(|| {
        let base = if entry.ident.holder.is_private() {
            // What a private holder finds on the server can only be its own.
            0
        } else {
            // So it is with what an earlier possession, that was lost here first, has left there.
            let earlier = entry.latest().filter(|earlier| earlier.may_be_there());
            earlier.map_or(count - 1, |earlier| earlier.base().min(count - 1))
        };
        Arc::new(Lease::new(Arc::clone(&entry.ident), entry.kind, base, sent))
    });
    lease.grant(id, mode, count, Proof { sent, lease: time });
    if is_new {
        entry.set_lease(Some(Arc::clone(&lease)));
        core.holds.insert(&lease);
    }
    // A re-entry with a lease of its own does not extend the others', so it must not put off their renewal.
    if is_new || mode == Mode::Watchdog {
        crate::renewal::plan(&core, &lease, sent);
    }
    let hold = Hold::new(core, entry.clone(), lease, id);
    // A client that has been shut down meanwhile renews nothing; dropping the hold gives it back.
    hold.core.ensure_open()?;
    match hold.lease.lost() {
        None => Ok(Attempt::Granted(hold)),
        // The grant took longer to arrive than it was good for.
        Some(reason) => Err(Error::Lost { lock: entry.ident.lock(), reason }),
    }
}

/// The older guards of a possession that the server does not know are lost.
fn lose(core: &Arc<Core>, lease: Option<Arc<Lease>>) {
    if let Some(lease) = lease {
        let reason = lease.lose(LostReason::Gone);
        crate::renewal::tell_lost(core, &lease, reason, false);
    }
}

/// Asks for the count of a holder that others may be as well.
async fn count(core: &Core, entry: &EntryRef, effort: &mut Effort) -> Result<i64, Error> {
    loop {
        let reply = core.link.call(entry.kind.count(&entry.ident)).await;
        match reply.and_then(|reply| entry.kind.counted(reply)) {
            Ok(count) => return Ok(count),
            Err(failure) if failure.is_passing() && effort.again().await => {}
            Err(failure) => return Err(entry.ident.refused(failure)),
        }
    }
}

fn next(ident: &Ident, count: i64) -> Result<i64, Error> {
    count.checked_add(1).filter(|next| *next > 0).ok_or_else(|| Error::Server {
        lock: Some(ident.lock()),
        message: format!("the hold count is at its limit: {count}"),
    })
}

/// Spreads the re-checks of many processes over a fifth of the interval.
fn spread(interval: Duration) -> Duration {
    interval.mul_f64(rand::random_range(0.8..1.0))
}
