//! The waiting algorithm, once for all kinds of lock: try, subscribe, try again, sleep.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout};

use crate::attempt::{Attempt, Effort, Wanted, attempt};
use crate::config::{DeadlockDetection, WaitTime};
use crate::core::Core;
use crate::error::{Error, Step};
use crate::handoff::Handoff;
use crate::holds::EntryRef;
use crate::lease::Mode;
use crate::locks::{Ident, Kind};
use crate::owner::TaskId;
use crate::release::Hold;
use crate::retry::{LONGEST, Patience};
use crate::wakeup::{self, InFlight, Pace, Place, Standing};

/// What came of waiting for a lock.
pub(crate) enum Acquisition {
    Granted(Hold),
    /// The timeout passed while another owner held the lock.
    Contended,
}

/// Acquires one hold for the owner in `ident`.
///
/// Dropping the future leaves nothing behind: a script that is under way is seen through in the
/// background, and a hold that it brings is given back.
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
        // Contention is waited out for the wait time; trouble with the server at least for one
        // reply's time.
        WaitTime::AtMost(wait) => (
            begun.checked_add(wait),
            wait.max(core.config.command_timeout)
                .min(core.config.retry_timeout),
        ),
    };
    let entry = core.entry(&ident, kind);
    let waiting = core.counters.waiting();
    let mut waiter = Waiter {
        core,
        entry,
        wanted: Wanted {
            mode,
            task: TaskId::current(),
        },
        begun,
        ends,
        patience,
        place: None,
        asked: false,
        dark_until: None,
        warned: false,
        warned_of_own: false,
    };
    let outcome = waiter.run().await;
    drop(waiting);
    if let Ok(Acquisition::Granted(_)) = &outcome {
        waiter.core.wakeups.owner_granted(
            &ident.keys.channel,
            &ident.keys.name,
            ident.owner.thread_id(),
        );
    }
    outcome
}

struct Waiter {
    core: Arc<Core>,
    entry: EntryRef,
    wanted: Wanted,
    begun: Instant,
    ends: Option<Instant>,
    patience: Duration,
    place: Option<Place>,
    asked: bool,
    /// Until when an answer is waited for after the end of the wait time.
    dark_until: Option<Instant>,
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
        // No time to wait: one question, past any queue.
        let mut at_once = self.ends == Some(self.begun);
        loop {
            let next = if at_once {
                Next::Try(None)
            } else {
                self.wait_for_turn().await?
            };
            let Next::Try(in_flight) = next else {
                return Ok(Acquisition::Contended);
            };
            let patience = in_flight
                .as_ref()
                .map_or(Ok(self.patience), |in_flight| self.patience_left(in_flight))?;
            self.asked = true;
            at_once = match self.attempt(in_flight, patience).await? {
                Attempt::Granted(hold) => return Ok(Acquisition::Granted(hold)),
                Attempt::Held => false,
                // However long ago its wait time was over: that somebody else holds the lock is not
                // known.
                Attempt::Undone => {
                    self.undone()?;
                    true
                }
            };
        }
    }

    /// Waits until there is a reason to try, or until the wait time is over.
    async fn wait_for_turn(&mut self) -> Result<Next, Error> {
        loop {
            if self.entry.live().is_some() {
                // The owner has the lock: this is a re-entry, which waits for nobody.
                return Ok(Next::Try(None));
            }
            // However short the wait time: who is in front asks once. However many wake-ups: not
            // after its end.
            if self.asked && self.is_over() {
                return Ok(Next::GiveUp);
            }
            let Some(place) = &self.place else {
                let Ident { keys, owner, .. } = &*self.entry.ident;
                self.place = Some(self.core.wakeups.join(
                    &keys.channel,
                    &keys.name,
                    owner.thread_id(),
                ));
                // Look again: a grant to the owner that came before the place was taken has
                // notified nobody.
                continue;
            };
            let (until, standing) = match place.turn(self.pace()) {
                wakeup::Turn::Try(in_flight) => return Ok(Next::Try(Some(in_flight))),
                wakeup::Turn::Closed => return Err(Error::Closed),
                wakeup::Turn::Sleep(until, standing) => (until, standing),
            };
            if !std::mem::replace(&mut self.warned, true) {
                detect_deadlock(&self.core, &self.entry.ident)?;
            }
            // Only the one in front: a long hold is no reason for as many warnings as there are
            // waiters.
            let long = self.begun.elapsed() > self.core.config.watchdog_timeout.duration();
            if long && standing == Standing::Front && !self.warned_of_own {
                self.warned_of_own = warn_of_own(&self.core, &self.entry.ident, self.begun);
            }
            let until = match (self.ends, standing) {
                (None, _) => until,
                (Some(ends), _) if Instant::now() < ends => ends.min(until),
                // Who has heard nothing of the server does not say that somebody holds the lock:
                // what was asked last has the time of a reply.
                (Some(_), Standing::InTheDark { asked }) => {
                    let reply = asked + self.core.config.command_timeout;
                    let ends = *self
                        .dark_until
                        .get_or_insert(reply.max(self.begun + self.patience));
                    if Instant::now() >= ends {
                        let waited = self.begun.elapsed();
                        return Err(self.entry.ident.timeout(Step::EarlierOperation, waited));
                    }
                    if place.wants_answer() {
                        continue;
                    }
                    ends.min(until)
                }
                (Some(_), _) => return Ok(Next::GiveUp),
            };
            tokio::select! {
                () = place.notified() => {}
                () = sleep_until(until) => {}
            }
        }
    }

    /// For how much longer trouble with the server is waited out: those in line do not begin anew,
    /// one after the other.
    fn patience_left(&self, in_flight: &InFlight) -> Result<Duration, Error> {
        // Where nobody has asked for a while it may well be over.
        let Some(silence) = in_flight
            .silence()
            .filter(|silence| silence.until.elapsed() < LONGEST)
        else {
            return Ok(self.patience);
        };
        let lasted = silence
            .until
            .saturating_duration_since(silence.since.max(self.begun));
        match (self.patience.saturating_sub(lasted), silence.said) {
            (Duration::ZERO, Some(message)) if !self.patience.is_zero() => Err(Error::Server {
                lock: Some(self.entry.ident.lock()),
                address: None,
                database: None,
                error: message.into(),
            }),
            (Duration::ZERO, None) if !self.patience.is_zero() => Err(Error::Connection {
                address: self.entry.ident.address.to_string(),
                error: format!("no attempt got a reply for {lasted:?}").into(),
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
        Pace {
            recheck: spread(config.recheck_interval),
            grace: 2 * config.command_timeout + LONGEST,
        }
    }

    /// Asks the server once, and again while it is in trouble that may pass.
    async fn attempt(
        &self,
        in_flight: Option<InFlight>,
        patience: Duration,
    ) -> Result<Attempt, Error> {
        let begun = Arc::new(AtomicBool::new(false));
        // Gone with the caller, so that an attempt knows whether it was left behind.
        let caller = Arc::downgrade(&begun);
        let (core, entry, wanted) = (Arc::clone(&self.core), self.entry.clone(), self.wanted);
        let limit = patience.max(core.config.command_timeout);
        let attempt = async move {
            let Ok(turn) = timeout(limit, entry.turns.take()).await else {
                return Err(entry.ident.timeout(Step::EarlierOperation, limit));
            };
            match caller.upgrade() {
                Some(begun) => begun.store(true, Ordering::Release),
                None => return Ok(Attempt::Undone),
            }
            core.ensure_open()?;
            let effort = Effort {
                patience: Patience::new(patience),
                caller,
                in_flight,
            };
            attempt(core, entry, wanted, effort, turn).await
        };
        let attempt = Handoff::undoable(&self.core.background, &self.entry.turns, begun, attempt);
        attempt.await.unwrap_or(Ok(Attempt::Undone))
    }

    /// Tells that what was granted while the request was not polled has been given back.
    fn undone(&self) -> Result<(), Error> {
        self.core.ensure_open()?;
        tracing::warn!(
            lock = %self.entry.ident.lock(),
            owner = %self.entry.ident.owner_field(),
            "a request was not polled when it was granted, the grant was released and the request is repeated",
        );
        Ok(())
    }
}

/// Detects that this task is about to wait for a lock that it holds itself.
fn detect_deadlock(core: &Core, ident: &Ident) -> Result<(), Error> {
    let task = TaskId::current();
    let own = core.holds.leases_of(&ident.keys.name);
    let Some(lease) = own.iter().find(|lease| lease.taken_by(task)) else {
        return Ok(());
    };
    match core.config.deadlock_detection {
        DeadlockDetection::Warn => {
            tracing::warn!(
                lock = %ident.lock(),
                owner = %ident.owner_field(),
                held_by = %lease.ident.owner_field(),
                "a task waits for a lock that it holds itself under another owner",
            );
            Ok(())
        }
        DeadlockDetection::Fail => Err(Error::WouldDeadlock {
            lock: ident.lock(),
            owner: lease.ident.owner,
        }),
    }
}

/// Tells if the lock has been held by this client since before the long wait began: perhaps by
/// somebody who waits for this very task.
fn warn_of_own(core: &Core, ident: &Ident, begun: Instant) -> bool {
    let own = core.holds.leases_of(&ident.keys.name);
    let Some(lease) = own.iter().find(|lease| lease.began < begun) else {
        return false;
    };
    tracing::warn!(
        lock = %ident.lock(),
        owner = %ident.owner_field(),
        held_by = %lease.ident.owner_field(),
        waited = ?begun.elapsed(),
        "a request waits long for a lock that another owner of the same client holds",
    );
    true
}

/// Spreads the re-checks of many processes over a fifth of the interval.
fn spread(interval: Duration) -> Duration {
    interval.mul_f64(rand::random_range(0.8..1.0))
}
