//! One unbroken possession of a lock: from a hold count of 0 until it is 0 again, or until it is
//! lost.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::config::LeaseTime;
use crate::error::LostReason;
use crate::holds::EntryRef;
use crate::locks::{Ident, Kind};
use crate::owner::TaskId;

/// How long a hold lasts if nobody gives it back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// As long as the client lives: renewed to the watchdog timeout.
    Watchdog,
    /// This long, without renewal.
    Fixed(LeaseTime),
}

/// The state that the guards of one possession share.
///
/// | state    | `lost` | `holds`   | left by |
/// |----------|--------|-----------|---------|
/// | held     | `None` | not empty | the last release (ended), or a loss (lost) |
/// | ended    | `None` | empty     | never: the next acquire makes a new lease |
/// | lost     | `Some` | any       | never |
pub(crate) struct Lease {
    pub(crate) ident: Arc<Ident>,
    pub(crate) kind: &'static dyn Kind,
    state: Mutex<State>,
    changed: Notify,
    /// When the script that began it was sent.
    pub(crate) began: Instant,
    /// Its place in the schedule, which only the schedule moves.
    pub(crate) place: Mutex<Option<(Instant, u64)>>,
}

struct State {
    holds: Vec<Held>,
    /// The hold count on the server.
    count: i64,
    /// The part of it that was there before us (an owner that was handed over).
    base: i64,
    /// Until when the server cannot have let the lock expire, by our clock.
    proved_until: Instant,
    /// When the last confirmed script's lease is over, with no margin.
    ends: Instant,
    lost: Option<LostReason>,
    /// The holds that were there when it was lost.
    lost_holds: Vec<u64>,
    renewing: bool,
    /// Whether a refused renewal was told.
    refused: bool,
    /// Keeps the entry, so that its owner's next acquire knows what was left.
    kept: Option<EntryRef>,
    /// Whether somebody sees to it that a lost lease leaves nothing on the server.
    cleaned: bool,
    /// Whether its loss has been counted and logged.
    reported: bool,
    due: Option<Instant>,
}

/// The server's clock began to run when the script arrived, a little later than ours.
const LATER: Duration = Duration::from_secs(1);

/// A hold, as it is recorded.
pub(crate) struct Held {
    id: u64,
    mode: Mode,
    task: TaskId,
    /// Whether it is a guard's, and has not been detached.
    pub(crate) guarded: bool,
    /// Keeps the entry of a hold that no guard stands for.
    detached: Option<EntryRef>,
    /// Whether it is being given back: it is a reason to renew no more.
    leaving: bool,
}

/// A script that the server confirmed: when it was sent, and the lease that it set at least.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Proof {
    pub(crate) sent: Instant,
    pub(crate) lease: LeaseTime,
}

/// What a release has to do.
pub(crate) struct Leaving {
    /// The count to leave on the server.
    pub(crate) leave: i64,
    /// The lease that the remaining holds are entitled to, if there are any.
    pub(crate) stay: Option<Mode>,
    /// What leaves.
    pub(crate) hold: Held,
}

/// What the scheduler has to do about a lease.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Upkeep {
    /// Nothing ever again.
    None,
    /// Renew it now.
    Renew,
    /// Look again then.
    At(Instant),
    /// It is lost; the flag says whether the server has to be cleaned up.
    Lost { reason: LostReason, clean: bool },
}

impl Lease {
    /// A possession that is about to begin, over `base` holds that were there before us.
    pub(crate) fn new(
        ident: Arc<Ident>,
        kind: &'static dyn Kind,
        base: i64,
        began: Instant,
    ) -> Self {
        Self {
            began,
            ident,
            kind,
            state: Mutex::new(State {
                holds: Vec::with_capacity(1),
                count: base,
                base,
                proved_until: Instant::now(),
                ends: Instant::now(),
                lost: None,
                lost_holds: Vec::new(),
                kept: None,
                renewing: false,
                refused: false,
                cleaned: false,
                reported: false,
                due: None,
            }),
            changed: Notify::new(),
            place: Mutex::new(None),
        }
    }

    /// Records a hold that the server granted, which left `count` there.
    pub(crate) fn grant(&self, id: u64, mode: Mode, task: TaskId, count: i64, proof: Proof) {
        let mut state = self.state.lock();
        state.holds.push(Held {
            id,
            mode,
            task,
            guarded: true,
            detached: None,
            leaving: false,
        });
        state.count = count;
        state.extend(proof);
    }

    /// The hold count on the server, while the lease is alive and held.
    pub(crate) fn live_count(&self) -> Option<i64> {
        let mut state = self.state.lock();
        (state.check().is_none() && !state.holds.is_empty()).then_some(state.count)
    }

    /// Whether it was lost, and how. Looks at the clock, so it is never late.
    pub(crate) fn lost(&self) -> Option<LostReason> {
        self.state.lock().check()
    }

    /// Resolves when it is lost while that hold is there; never after the hold was given back.
    pub(crate) async fn wait_lost(&self, id: u64) -> LostReason {
        loop {
            let changed = self.changed.notified();
            let proved_until = {
                let mut state = self.state.lock();
                match state.check() {
                    Some(reason) if state.lost_holds.contains(&id) => return reason,
                    None if state.holds.iter().any(|hold| hold.id == id) => {
                        Some(state.proved_until)
                    }
                    // It was given back before.
                    _ => None,
                }
            };
            match proved_until {
                // An extension needs no signal: a timer that fires early only looks again.
                Some(until) => tokio::select! {
                    () = changed => {}
                    () = tokio::time::sleep_until(until) => {}
                },
                None => std::future::pending().await,
            }
        }
    }

    /// Until when it is proved, by our clock.
    pub(crate) fn proved_until(&self) -> Instant {
        self.state.lock().proved_until
    }

    /// For how much longer it is proved; zero once it is lost.
    pub(crate) fn remaining(&self) -> Duration {
        let mut state = self.state.lock();
        match state.check() {
            Some(_) => Duration::ZERO,
            None => state.proved_until.saturating_duration_since(Instant::now()),
        }
    }

    /// Marks it lost. A lease is lost once, and the first reason stays.
    pub(crate) fn lose(&self, reason: LostReason) -> LostReason {
        let reason = {
            let mut state = self.state.lock();
            // By the clock it may be lost already.
            state.check().unwrap_or_else(|| state.lose(reason))
        };
        self.changed.notify_waiters();
        reason
    }

    /// Takes in that a hold is about to be given back, which may have to wait for its turn.
    pub(crate) fn leaves(&self, id: u64) {
        if let Some(hold) = self
            .state
            .lock()
            .holds
            .iter_mut()
            .find(|hold| hold.id == id)
        {
            hold.leaving = true;
        }
    }

    /// Takes a hold out, before its release is sent: from then on it is not renewed. `None` if it
    /// is out already.
    pub(crate) fn begin_release(&self, id: u64) -> Option<Result<Leaving, LostReason>> {
        if let Some(reason) = self.lost() {
            return Some(Err(reason));
        }
        let mut state = self.state.lock();
        let at = state.holds.iter().position(|hold| hold.id == id)?;
        let hold = state.holds.swap_remove(at);
        // By our record of the holds, not by the server's count: that may hold what a lost reply
        // left.
        Some(Ok(Leaving {
            leave: state.base + state.holds.len() as i64,
            stay: state.longest(),
            hold,
        }))
    }

    /// Takes back a hold that no guard stands for and that the server would not release: it can be
    /// unlocked again, and is not renewed. Tells when its lease ends.
    pub(crate) fn put_back(&self, hold: Held, entry: EntryRef) -> Instant {
        let mut state = self.state.lock();
        state.holds.push(Held {
            detached: Some(entry),
            leaving: true,
            ..hold
        });
        state.proved_until
    }

    /// Takes a hold out of the record. Tells whether it was in.
    pub(crate) fn drop_hold(&self, id: u64) -> bool {
        let mut state = self.state.lock();
        let hold = state
            .holds
            .iter()
            .position(|hold| hold.id == id)
            .map(|at| state.holds.swap_remove(at));
        // The entry's last reference takes the table's lock, so it goes outside this one.
        drop(state);
        hold.is_some()
    }

    /// Records what a release or a renewal left on the server.
    pub(crate) fn confirmed(&self, count: Option<i64>, proof: Option<Proof>) {
        let mut state = self.state.lock();
        if let Some(count) = count {
            state.count = count;
        }
        if let Some(proof) = proof {
            state.extend(proof);
        }
    }

    /// Whether the caller is to count and log its loss; answers yes once.
    pub(crate) fn claim_report(&self) -> bool {
        !std::mem::replace(&mut self.state.lock().reported, true)
    }

    /// Whether a task took a hold of it, and keeps it.
    pub(crate) fn taken_by(&self, task: TaskId) -> bool {
        let mut state = self.state.lock();
        state.check().is_none()
            && state
                .holds
                .iter()
                .any(|hold| hold.task == task && !hold.leaving)
    }

    /// Takes in that a hold's guard is in another task now.
    pub(crate) fn used_by(&self, id: u64, task: TaskId) {
        if let Some(hold) = self
            .state
            .lock()
            .holds
            .iter_mut()
            .find(|hold| hold.id == id)
        {
            hold.task = task;
        }
    }

    /// Lets a hold live without its guard.
    pub(crate) fn detach(&self, id: u64, entry: EntryRef) {
        let mut state = self.state.lock();
        let spare = match state.holds.iter_mut().find(|hold| hold.id == id) {
            Some(hold) => {
                hold.guarded = false;
                hold.detached.replace(entry)
            }
            None => Some(entry),
        };
        drop(state);
        drop(spare);
    }

    /// Keeps the entry of what could not be given back, and tells when to look whether that is
    /// over.
    pub(crate) fn keep(&self, entry: EntryRef) -> Instant {
        let mut state = self.state.lock();
        let (old, over) = (state.kept.replace(entry), state.ends + LATER);
        drop(state);
        drop(old);
        over
    }

    /// Lets go of the entry that is kept if the server can have nothing of it any more. Otherwise
    /// tells when to look again.
    pub(crate) fn let_go_in_time(&self) -> Option<Instant> {
        let over = {
            let state = self.state.lock();
            state.kept.as_ref()?;
            state.ends + LATER
        };
        if Instant::now() < over {
            return Some(over);
        }
        self.let_go();
        None
    }

    /// Lets go of the entry that is kept.
    pub(crate) fn let_go(&self) {
        let kept = self.state.lock().kept.take();
        drop(kept);
    }

    /// Takes the entries that detached holds keep. The holds stay: the code that took them may
    /// still run.
    pub(crate) fn take_detached(&self) -> Vec<(u64, EntryRef)> {
        let mut state = self.state.lock();
        state
            .holds
            .iter_mut()
            .filter_map(|hold| Some((hold.id, hold.detached.take()?)))
            .collect()
    }

    /// Whether each of its holds is being released. One whose release the server refused is not.
    pub(crate) fn is_leaving(&self) -> bool {
        let state = self.state.lock();
        let mut holds = state.holds.iter();
        holds.all(|hold| hold.leaving && hold.detached.is_none())
    }

    /// Whether a guard stands for one of its holds.
    pub(crate) fn is_guarded(&self) -> bool {
        self.state.lock().holds.iter().any(|hold| hold.guarded)
    }

    /// Takes the newest hold that no guard stands for, so that nobody else can: it belongs to the
    /// caller, who releases it.
    pub(crate) fn claim_detached(&self) -> Option<u64> {
        let mut state = self.state.lock();
        let hold = state
            .holds
            .iter_mut()
            .rev()
            .find(|hold| hold.detached.is_some())?;
        let (id, kept) = (hold.id, hold.detached.take());
        drop(state);
        drop(kept);
        Some(id)
    }

    /// How many holds are recorded.
    pub(crate) fn held(&self) -> i64 {
        self.state.lock().holds.len() as i64
    }

    /// What was on the server before us.
    pub(crate) fn base(&self) -> i64 {
        self.state.lock().base
    }

    /// Takes in that one of the holds that were there before us was given back, which left `count`.
    pub(crate) fn lower_base(&self, count: i64) {
        let mut state = self.state.lock();
        state.base = (state.base - 1).max(0);
        state.count = count;
    }

    /// What the scheduler has to do about it now, `soon` being how early a renewal may be.
    pub(crate) fn upkeep(&self, period: Duration, soon: Duration) -> Upkeep {
        let now = Instant::now();
        let upkeep = {
            let mut state = self.state.lock();
            if let Some(reason) = state.check() {
                Upkeep::Lost {
                    reason,
                    clean: state.claim_cleaning(),
                }
            } else if state.holds.is_empty() {
                Upkeep::None
            } else if state.renewing || !state.renews() {
                Upkeep::At(state.proved_until)
            } else if state.due.is_some_and(|due| due > now + soon) {
                Upkeep::At(state.proved_until.min(state.due.unwrap_or(now + period)))
            } else {
                state.renewing = true;
                Upkeep::Renew
            }
        };
        if matches!(upkeep, Upkeep::Lost { .. }) {
            self.changed.notify_waiters();
        }
        upkeep
    }

    /// Whether the caller has to see to it that a lost lease leaves nothing behind; answers yes
    /// once.
    pub(crate) fn claim_cleaning(&self) -> bool {
        self.state.lock().claim_cleaning()
    }

    /// Whether the server may still have what is lost or given back here: a release that succeeded
    /// leaves no lease.
    pub(crate) fn may_be_there(&self) -> bool {
        let state = self.state.lock();
        let ended = state.lost.is_some() || state.holds.is_empty();
        ended && state.lost != Some(LostReason::Gone) && Instant::now() < state.ends + LATER
    }

    /// When a lost lease has to be looked at once more, because its owners still have time to go.
    pub(crate) fn cleaning_due(&self) -> Option<Instant> {
        let state = self.state.lock();
        (state.lost == Some(LostReason::Expired) && !state.cleaned).then_some(state.ends)
    }

    /// Takes in whether the server refused a renewal. Tells whether it had refused one before.
    pub(crate) fn refused(&self, refused: bool) -> bool {
        std::mem::replace(&mut self.state.lock().refused, refused)
    }

    /// Whether the server refused the last renewal.
    pub(crate) fn is_refused(&self) -> bool {
        self.state.lock().refused
    }

    /// Says that a renewal is over, so that the next may begin.
    pub(crate) fn renewal_over(&self) {
        self.state.lock().renewing = false;
    }

    /// Sets when the scheduler looks next: `at` for a renewal, and never later than the proof
    /// lasts.
    pub(crate) fn plan(&self, at: Instant) -> Instant {
        let mut state = self.state.lock();
        state.due = Some(at);
        if state.renews() {
            at.min(state.proved_until)
        } else {
            state.proved_until
        }
    }
}

impl State {
    /// Whether it is lost, by what is known or by the clock.
    fn check(&mut self) -> Option<LostReason> {
        if self.lost.is_none() && !self.holds.is_empty() && Instant::now() >= self.proved_until {
            self.lose(LostReason::Expired);
        }
        self.lost
    }

    fn lose(&mut self, reason: LostReason) -> LostReason {
        if self.lost.is_none() {
            self.lost_holds = self.holds.iter().map(|hold| hold.id).collect();
        }
        *self.lost.get_or_insert(reason)
    }

    fn extend(&mut self, Proof { sent, lease }: Proof) {
        self.proved_until = self.proved_until.max(sent + lease.provable());
        self.ends = self.ends.max(sent + lease.duration());
    }

    fn claim_cleaning(&mut self) -> bool {
        let due = match self.lost {
            // The margin is its owners': they were told, and may still be on their way out.
            Some(LostReason::Expired) => self.holds.is_empty() || Instant::now() >= self.ends,
            // The code of other holds may still run: the last one says yes.
            // A force unlock may have failed after its owners were told.
            Some(LostReason::Shutdown | LostReason::RuntimeEnded | LostReason::ForceUnlocked) => {
                self.holds.is_empty()
            }
            // Nothing of it is there.
            Some(LostReason::Gone) | None => false,
        };
        due && !std::mem::replace(&mut self.cleaned, true)
    }

    fn renews(&self) -> bool {
        self.holds
            .iter()
            .any(|hold| hold.mode == Mode::Watchdog && !hold.leaving)
    }

    fn longest(&self) -> Option<Mode> {
        if self.holds.iter().any(|hold| hold.mode == Mode::Watchdog) {
            return Some(Mode::Watchdog);
        }
        self.holds
            .iter()
            .filter_map(|hold| match hold.mode {
                Mode::Fixed(lease) => Some(lease),
                Mode::Watchdog => None,
            })
            .max()
            .map(Mode::Fixed)
    }
}
