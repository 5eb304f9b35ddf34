//! A tenure: one unbroken possession of a lock, from a hold count of 0 until it is 0 again or until
//! the lock is lost.
//!
//! | state | `cell` | `holds` | left by |
//! |---|---|---|---|
//! | held | not lost | not empty | the last release, or a loss |
//! | ending | not lost | empty | the reply to the last release |
//! | lost | lost | any | the end of its last hold, and the clean-up of what it may have left |

use std::sync::Arc;

use smallvec::SmallVec;

use super::entry::{Action, LeftBehind, Op};
use super::notice::Notice;
use super::release::LATER;
use super::timers::Timer;
use super::{Engine, EntryId, Event, HoldId, TenureId};
use crate::config::LeaseTime;
use crate::error::LostReason;
use crate::kind::Kind;
use crate::lease_cell::{HoldCell, LeaseCell};
use crate::owner::TaskKey;
use crate::time::Time;

/// How long a hold lasts if it is not released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// As long as the client lives: renewed to the watchdog timeout.
    Watchdog,
    /// This long, without renewal.
    Fixed(LeaseTime),
}

#[derive(Debug)]
pub(super) struct Tenure {
    pub(super) entry: EntryId,
    pub(super) kind: Kind,
    pub(super) cell: Arc<LeaseCell>,
    pub(super) holds: SmallVec<[HoldId; 2]>,
    /// The hold count on the server.
    pub(super) count: i64,
    /// The part of it that was there before us (an owner that was handed over).
    pub(super) base: i64,
    /// The fencing token, once a hold asked for it.
    pub(super) token: Option<i64>,
    /// When the script that began it was sent.
    pub(super) began: Time,
    /// When the last confirmed script's lease is over, with no margin.
    pub(super) ends: Time,
    /// When the next renewal is due.
    pub(super) due: Time,
    /// Its place in the schedule.
    scheduled: Option<Time>,
    pub(super) is_renewing: bool,
    /// Whether the server refused the last renewal.
    pub(super) is_refused: bool,
    /// Counts the releases that may shorten the expiry, at their sending and at their reply: a
    /// renewal proves nothing if one of them ran beside it.
    pub(super) lowering: u32,
    /// Whether the lock counts it as held.
    is_listed: bool,
    is_reported: bool,
    is_cleaned: bool,
}

#[derive(Debug)]
pub(super) struct Hold {
    pub(super) tenure: TenureId,
    pub(super) mode: Mode,
    /// When a lease of its own ends.
    pub(super) until: Time,
    pub(super) task: TaskKey,
    pub(super) state: HoldState,
    pub(super) cell: Arc<HoldCell>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HoldState {
    /// A guard stands for it, or an offer that its caller has not claimed.
    Guarded,
    /// No guard stands for it, and it is kept.
    Detached,
    /// Its release is pending.
    Leaving,
    /// The server refused its release. It is not renewed, and can be unlocked again.
    Refused,
}

impl HoldState {
    pub(super) fn is_detached(self) -> bool {
        matches!(self, Self::Detached | Self::Refused)
    }

    fn is_kept(self) -> bool {
        matches!(self, Self::Guarded | Self::Detached)
    }
}

impl Tenure {
    pub(super) fn new(entry: EntryId, kind: Kind, base: i64, began: Time, proof: Time) -> Self {
        Self {
            entry,
            kind,
            cell: Arc::new(LeaseCell::new(proof)),
            holds: SmallVec::new(),
            count: base,
            base,
            token: None,
            began,
            ends: began,
            due: Time::MAX,
            scheduled: None,
            is_renewing: false,
            is_refused: false,
            lowering: 0,
            is_listed: false,
            is_reported: false,
            is_cleaned: false,
        }
    }

    /// Whether something of it may have to be released that is not there any more for its holds.
    pub(super) fn may_be_left(&self, now: Time) -> bool {
        !self.is_cleaned && self.cell.lost(now) != Some(LostReason::Gone)
    }

    /// What the server may still have of it.
    pub(super) fn left_behind(&self, now: Time) -> Option<LeftBehind> {
        let until = self.ends + LATER;
        let base = self.base;
        let is_gone = self.cell.lost(now) == Some(LostReason::Gone);
        (!is_gone && now < until).then_some(LeftBehind { base, until })
    }
}

impl Engine {
    /// The tenure of an entry that is held and not lost.
    pub(super) fn live_tenure(&mut self, now: Time, entry: EntryId) -> Option<TenureId> {
        let id = self.entries[entry].tenure?;
        if self.tenures[id].holds.is_empty() {
            return None;
        }
        match self.tenure_lost(now, id) {
            None => Some(id),
            Some(_) => None,
        }
    }

    /// Whether a tenure is lost. A loss by the clock is taken in at once.
    pub(super) fn tenure_lost(&mut self, now: Time, id: TenureId) -> Option<LostReason> {
        let reason = self.tenures.get(id)?.cell.lost(now)?;
        Some(self.lose_tenure(now, id, reason))
    }

    /// Enters a tenure into the lock's table.
    pub(super) fn list_tenure(&mut self, id: TenureId) {
        let tenure = &mut self.tenures[id];
        tenure.is_listed = true;
        let lock = self.entries[tenure.entry].lock;
        self.locks[lock].tenures.push(id);
        self.stats.locks_held += 1;
    }

    /// Takes a tenure out of the table and out of the schedule: nothing renews it any more.
    pub(super) fn unlist_tenure(&mut self, id: TenureId) -> bool {
        self.unschedule(id);
        let tenure = &mut self.tenures[id];
        if !std::mem::replace(&mut tenure.is_listed, false) {
            return false;
        }
        let lock = self.entries[tenure.entry].lock;
        self.locks[lock].tenures.retain(|other| *other != id);
        self.stats.locks_held -= 1;
        true
    }

    pub(super) fn schedule(&mut self, id: TenureId, at: Time) {
        let tenure = &mut self.tenures[id];
        match tenure.scheduled.replace(at) {
            Some(old) if old == at => return,
            Some(old) => {
                self.schedule.remove(&(old, id));
            }
            None => {}
        }
        self.schedule.insert((at, id));
    }

    pub(super) fn unschedule(&mut self, id: TenureId) {
        if let Some(at) = self.tenures[id].scheduled.take() {
            self.schedule.remove(&(at, id));
        }
    }

    /// Marks the entry's tenure lost, if it has one.
    pub(super) fn lose_live(&mut self, now: Time, entry: EntryId, reason: LostReason) {
        if let Some(tenure) = self.entries[entry].tenure {
            self.lose_tenure(now, tenure, reason);
        }
    }

    /// Marks a tenure lost, and reports that once. The first reason stays.
    pub(super) fn lose_tenure(
        &mut self,
        now: Time,
        id: TenureId,
        reason: LostReason,
    ) -> LostReason {
        let Some(tenure) = self.tenures.get_mut(id) else {
            return reason;
        };
        let reason = tenure.cell.lose(reason);
        let entry = tenure.entry;
        if std::mem::replace(&mut tenure.is_reported, true) {
            return reason;
        }
        let cell = Arc::clone(&tenure.cell);
        self.unlist_tenure(id);
        if self.entries[entry].tenure == Some(id) {
            self.entries[entry].tenure = None;
        }
        self.entries[entry].change_past(|past| past.lost.push(id));
        self.stats.losses.add(reason);
        self.events.push_back(Event::Lost(cell));
        self.notice(Notice::Lost(self.subject(entry), reason));
        for hold in self.tenures[id].holds.clone() {
            if self.holds[hold].state.is_detached() {
                self.remember_loss(now, entry, hold, reason);
            }
        }
        if matches!(reason, LostReason::Gone | LostReason::ForceUnlocked) {
            self.fail_unconfirmed(entry, reason);
        }
        self.clean_up(now, id);
        // It may be free, and no message said so.
        if let Some(lock) = self.entries.get(entry).map(|entry| entry.lock) {
            self.wake_lock(now, lock);
        }
        self.end_passing(now, entry);
        reason
    }

    /// Keeps the loss of a detached hold for the unlock that will ask.
    fn remember_loss(&mut self, now: Time, entry: EntryId, hold: HoldId, reason: LostReason) {
        /// How many a client remembers, the latest: of a task that has ended nobody will ask.
        const REMEMBERED: usize = 1_000;
        self.entries[entry].change_past(|past| past.losses.push((hold, reason)));
        self.losses.push_back((entry, hold));
        if self.losses.len() > REMEMBERED {
            if let Some((entry, oldest)) = self.losses.pop_front() {
                self.entries[entry]
                    .change_past(|past| past.losses.retain(|(hold, _)| *hold != oldest));
                self.end_lost_hold(now, oldest);
            }
        }
    }

    /// Ends a hold of a lost tenure.
    pub(super) fn end_lost_hold(&mut self, now: Time, hold: HoldId) {
        if let Some(record) = self.holds.remove(hold) {
            self.tenures[record.tenure]
                .holds
                .retain(|other| *other != hold);
            self.clean_up(now, record.tenure);
        }
        self.note_operation_ended();
    }

    /// Has the background make sure that a lost tenure leaves nothing on the server, once its
    /// owners had the time to stop.
    pub(super) fn clean_up(&mut self, now: Time, id: TenureId) {
        let tenure = &self.tenures[id];
        let (entry, base, kind) = (tenure.entry, tenure.base, tenure.kind);
        let is_due = match tenure.cell.lost(now) {
            // The margin is its owners': they were notified, and may still be stopping.
            Some(LostReason::Expired) => tenure.holds.is_empty() || now >= tenure.ends,
            // The code of other holds may still run. A force unlock may have failed after the
            // owners were notified.
            Some(LostReason::Shutdown | LostReason::ForceUnlocked | LostReason::ClientFailed) => {
                tenure.holds.is_empty()
            }
            // Nothing of it is there.
            Some(LostReason::Gone) | None => false,
        };
        if is_due && !tenure.is_cleaned {
            self.unschedule(id);
            self.tenures[id].is_cleaned = true;
            let op = Op::new(entry, kind, None, Action::CleanUp(base));
            self.push_op(now, op);
        } else if tenure.cell.lost(now) == Some(LostReason::Expired) && !tenure.is_cleaned {
            let ends = tenure.ends;
            self.schedule(id, ends);
        }
        self.remove_tenure_if_over(now, id);
    }

    /// Removes a lost tenure that has no holds, and leaves nothing.
    pub(super) fn remove_tenure_if_over(&mut self, now: Time, id: TenureId) {
        let Some(tenure) = self.tenures.get(id) else {
            return;
        };
        let Some(reason) = tenure.cell.lost(now).filter(|_| tenure.is_reported) else {
            return;
        };
        if !tenure.holds.is_empty() || !(tenure.is_cleaned || reason == LostReason::Gone) {
            return;
        }
        let entry = tenure.entry;
        self.leave_tenure_behind(now, id);
        self.unschedule(id);
        self.tenures.remove(id);
        self.entries[entry].change_past(|past| past.lost.retain(|other| *other != id));
        self.end_passing(now, entry);
        self.remove_if_idle(entry);
    }

    /// Remembers what a tenure may have left on the server, for an owner that others may be as
    /// well.
    pub(super) fn leave_tenure_behind(&mut self, now: Time, id: TenureId) {
        // It may have been lost, and removed, while its last release was in flight.
        let Some(tenure) = self.tenures.get(id) else {
            return;
        };
        let (entry, left) = (tenure.entry, tenure.left_behind(now));
        if let (false, Some(left)) = (self.entries[entry].owner.is_private(), left) {
            self.entries[entry].change_past(|past| past.left_behind = Some(left));
            self.timers.set(Timer::Entry(entry), left.until);
        }
    }

    /// Removes a tenure whose last hold was released.
    pub(super) fn end_tenure(&mut self, id: TenureId) {
        let Some(tenure) = self.tenures.get(id) else {
            return;
        };
        if tenure.is_reported {
            return;
        }
        let entry = tenure.entry;
        self.unlist_tenure(id);
        self.tenures.remove(id);
        if self.entries[entry].tenure == Some(id) {
            self.entries[entry].tenure = None;
        }
    }

    /// The same for a tenure whose last release failed: it may have a hold again.
    pub(super) fn end_tenure_without_holds(&mut self, id: TenureId) {
        if self
            .tenures
            .get(id)
            .is_some_and(|tenure| tenure.holds.is_empty())
        {
            self.end_tenure(id);
        }
    }

    /// Takes back a hold without a guard that the server would not release: it can be unlocked
    /// again, and is not renewed.
    pub(super) fn put_back(&mut self, now: Time, id: TenureId, hold: Hold) {
        // It may have been lost while the release was in flight, and removed.
        let Some(tenure) = self.tenures.get_mut(id) else {
            return;
        };
        let (entry, was_reported) = (tenure.entry, tenure.is_reported);
        let hold = self.holds.insert(Hold {
            state: HoldState::Refused,
            ..hold
        });
        tenure.holds.push(hold);
        match self.tenure_lost(now, id) {
            Some(reason) if was_reported => self.remember_loss(now, entry, hold, reason),
            Some(_) => {}
            None => {
                if !self.tenures[id].is_listed {
                    self.list_tenure(id);
                }
                self.plan_look(id);
            }
        }
    }

    /// Lets a hold live without its guard.
    pub(crate) fn detach(&mut self, now: Time, hold: HoldId) {
        let Some(record) = self.holds.get_mut(hold) else {
            return;
        };
        record.state = HoldState::Detached;
        let tenure = record.tenure;
        let entry = self.tenures[tenure].entry;
        let was_reported = self.tenures[tenure].is_reported;
        if let Some(reason) = self.tenure_lost(now, tenure).filter(|_| was_reported) {
            self.remember_loss(now, entry, hold, reason);
        }
    }

    /// Takes in that a hold's guard is in another task now.
    pub(crate) fn use_hold(&mut self, hold: HoldId, task: TaskKey) {
        if let Some(hold) = self.holds.get_mut(hold) {
            hold.task = task;
        }
    }

    /// The owner's hold count by our record; 0 once the lock is lost.
    pub(crate) fn hold_count(&mut self, now: Time, hold: HoldId) -> u64 {
        let Some(tenure) = self.holds.get(hold).map(|hold| hold.tenure) else {
            return 0;
        };
        match self.tenure_lost(now, tenure) {
            None => u64::try_from(self.tenures[tenure].count).unwrap_or_default(),
            Some(_) => 0,
        }
    }

    /// Whether a task acquired a hold of the tenure, and keeps it for as long as it likes: a hold
    /// with a lease of its own ends by itself.
    pub(super) fn is_held_by_task(&self, now: Time, id: TenureId, task: TaskKey) -> bool {
        let tenure = &self.tenures[id];
        tenure.cell.lost(now).is_none()
            && tenure
                .holds
                .iter()
                .map(|hold| &self.holds[*hold])
                .any(|hold| {
                    hold.task == task && hold.state.is_kept() && hold.mode == Mode::Watchdog
                })
    }

    /// Whether the watchdog renews the tenure.
    pub(super) fn is_renewed(&self, id: TenureId) -> bool {
        let holds = self.tenures[id].holds.iter();
        holds
            .map(|hold| &self.holds[*hold])
            .any(|hold| hold.mode == Mode::Watchdog && hold.state.is_kept())
    }

    /// Whether the release of each hold is pending.
    pub(super) fn is_leaving(&self, id: TenureId) -> bool {
        let mut holds = self.tenures[id].holds.iter();
        holds.all(|hold| self.holds[*hold].state == HoldState::Leaving)
    }
}
