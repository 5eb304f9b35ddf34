//! Passing on: a request that waits here gets the lock from an owner that releases it, without the
//! server, under the lease that is already proved.
//!
//! The server keeps the first owner. The owner that has the lock later acts as that one: its
//! operations name the first owner's field, and are the only ones that do until the lock is
//! released. So passing on needs no script of its own, and other clients see one owner that holds
//! the lock.
//!
//! A release whose caller waits is confirmed by the server: by a renewal that is sent later and
//! finds the field, or by the release that frees the lock.

use std::time::Duration;

use bytes::Bytes;

use super::requests::{Outcome, Request};
use super::tenure::{Mode, Tenure};
use super::timers::Timer;
use super::{Engine, EntryId, HoldId, LockId, Purpose, RequestId, TenureId};
use crate::error::{LostReason, ServerErrorKind, Step};
use crate::keys::Keys;
use crate::kind::{Kind, Renewed};
use crate::owner::{Owner, owner_field, thread_of};
use crate::time::Time;
use crate::wire::{Failure, Reply};

/// A lock that was passed on, until it is released on the server.
#[derive(Debug)]
pub(super) struct Passed {
    /// Tells it from later ones of the lock.
    number: u64,
    /// The owner that the server knows.
    pub(super) known: Owner,
    /// The entry that acts as that owner.
    pub(super) entry: EntryId,
    /// When the server granted the lock.
    since: Time,
    /// Releases that are to be confirmed.
    unconfirmed: Vec<RequestId>,
    /// Those that the confirmation in flight confirms.
    confirming: Option<Vec<RequestId>>,
}

/// A renewal that confirms releases.
#[derive(Debug)]
pub(super) struct Confirmation {
    lock: LockId,
    number: u64,
    kind: Kind,
    /// It was not sent before.
    pub(super) sent: Time,
}

/// The pause before a confirmation is repeated.
const PAUSE: Duration = Duration::from_millis(50);

impl Engine {
    /// The request that gets the lock from a hold that is released, if it may be passed on.
    pub(super) fn successor(&self, now: Time, hold: HoldId) -> Option<RequestId> {
        let tenure = &self.tenures[self.holds[hold].tenure];
        let entry = &self.entries[tenure.entry];
        let lock = &self.locks[entry.lock];
        let since = lock
            .passed
            .as_ref()
            .map_or(tenure.began, |passed| passed.since);
        let is_ours = tenure.holds[..] == [hold]
            && (tenure.count, tenure.base) == (1, 0)
            && !tenure.kind.has_tokens()
            && !tenure.is_refused
            && !tenure.is_renewing
            && self.is_renewed(self.holds[hold].tenure)
            && entry.is_quiet()
            // Until then a confirmation has its time, and a renewal after it.
            && tenure.cell.proved_until()? >= now + self.settings.watchdog.duration() / 3
            && now < since + self.settings.passing_time
            && !self.is_closed();
        // What is left of an earlier one has to end first.
        let is_other = |passed: &Passed| passed.entry != tenure.entry;
        if !is_ours || lock.wait.attempt.is_some() || lock.passed.as_deref().is_some_and(is_other) {
            return None;
        }
        let head = lock.wait.head()?;
        let Some(Request::Acquire(next)) = self.requests.get(head) else {
            return None;
        };
        let theirs = &self.entries[next.entry];
        let is_right = (next.kind, next.mode) == (tenure.kind, Mode::Watchdog)
            && next.op.is_none()
            && !next.is_over(now)
            && theirs.is_quiet()
            && theirs.tenure.is_none();
        is_right.then_some(head)
    }

    /// Passes a lock on to a request. The release of its hold is confirmed to `request`.
    pub(super) fn pass_on(
        &mut self,
        now: Time,
        hold: HoldId,
        next: RequestId,
        request: Option<RequestId>,
    ) {
        let (Some(left), Some(Request::Acquire(acquiring))) =
            (self.holds.remove(hold), self.requests.get(next))
        else {
            return;
        };
        let (to, task) = (acquiring.entry, acquiring.task);
        left.cell.release();
        self.unlist_tenure(left.tenure);
        let Some(old) = self.tenures.remove(left.tenure) else {
            return;
        };
        let from = old.entry;
        self.entries[from].tenure = None;
        let lock = self.entries[from].lock;
        let mut passed = self.locks[lock].passed.take().unwrap_or_else(|| {
            self.next_place += 1;
            Box::new(Passed {
                number: self.next_place,
                known: self.entries[from].owner,
                entry: from,
                since: old.began,
                unconfirmed: Vec::new(),
                confirming: None,
            })
        });
        passed.entry = to;
        if let Some(request) = request {
            self.limit_release(now, request);
            passed.unconfirmed.push(request);
        }
        self.entries[from].acts_as = None;
        self.entries[to].acts_as = Some(passed.known);
        self.locks[lock].passed = Some(passed);
        let proof = old.cell.proved_until().unwrap_or(now);
        let mut tenure = Tenure::new(to, old.kind, 0, now, proof);
        (tenure.count, tenure.ends, tenure.due) = (1, old.ends, old.due);
        let tenure = self.tenures.insert(tenure);
        self.entries[to].tenure = Some(tenure);
        self.list_tenure(tenure);
        let until = now + self.settings.watchdog.duration();
        let hold = self.add_hold(tenure, Mode::Watchdog, until, task);
        self.plan_look(tenure);
        self.stats.grants += 1;
        self.offer(now, next, hold);
        self.re_enter_waiting(now, to);
        self.confirm(now, lock);
        self.remove_if_idle(from);
        self.advance_lock(now, lock);
    }

    /// Whether the lock was passed on, and is held by the owner that got it.
    pub(super) fn is_passed(&self, lock: LockId) -> bool {
        let passed = self.locks[lock].passed.as_ref();
        let tenure = passed.and_then(|passed| self.entries[passed.entry].tenure);
        tenure.is_some_and(|tenure| !self.tenures[tenure].holds.is_empty())
    }

    /// The server has granted the lock to an entry: one to which it was passed on before, and that
    /// has not released it, does not have it any more.
    pub(super) fn lose_passed(&mut self, now: Time, granted: EntryId) {
        let lock = self.entries[granted].lock;
        let passed = self.locks[lock].passed.as_ref().map(|passed| passed.entry);
        if let Some(entry) = passed.filter(|entry| *entry != granted && self.is_passed(lock)) {
            self.lose_live(now, entry, LostReason::Gone);
        }
    }

    /// Whether the lock was passed on to another entry, so that an attempt would be in vain.
    pub(super) fn is_held_by_other(&self, id: EntryId) -> bool {
        let entry = &self.entries[id];
        (self.is_passed(entry.lock) && entry.acts_as.is_none()) || self.is_replaced(id)
    }

    /// The entry that has the lock under the name of that owner, or else the owner's own.
    pub(super) fn entry_known_as(&self, keys: &Keys, owner: Owner) -> Option<EntryId> {
        let passed = self.locks[*self.lock_ids.get(keys)?].passed.as_ref();
        match passed.filter(|passed| passed.known == owner) {
            Some(passed) => Some(passed.entry),
            None => self.entry_in_use(keys, owner),
        }
    }

    /// The owner that has the lock where the server knows this one, if that is another one.
    pub(super) fn owner_known_as(&self, keys: &Keys, field: &[u8]) -> Option<Bytes> {
        let id = self.settings.client_id;
        let known = Owner::from_thread_id(thread_of(field, id)?).ok()?;
        let entry = &self.entries[self.entry_known_as(keys, known)?];
        Some(owner_field(id, entry.owner))
    }

    /// What was passed on under that number.
    fn passed(&mut self, lock: LockId, number: u64) -> Option<&mut Passed> {
        let passed = self.locks.get_mut(lock)?.passed.as_deref_mut();
        passed.filter(|passed| passed.number == number)
    }

    /// Whether a release waits for its confirmation.
    #[cfg(test)]
    pub(super) fn is_unconfirmed(&self, id: RequestId) -> bool {
        let mut passed = self.locks.values().filter_map(|lock| lock.passed.as_ref());
        passed.any(|passed| {
            let confirming = passed.confirming.iter().flatten();
            confirming
                .chain(&passed.unconfirmed)
                .any(|other| *other == id)
        })
    }

    /// Whether another entry acts as the owner of this one.
    pub(super) fn is_replaced(&self, id: EntryId) -> bool {
        let entry = &self.entries[id];
        let passed = self.locks[entry.lock].passed.as_ref();
        passed.is_some_and(|passed| passed.known == entry.owner && passed.entry != id)
    }

    /// Has the server confirm releases, unless that is under way.
    fn confirm(&mut self, now: Time, lock: LockId) {
        let Some(passed) = &mut self.locks[lock].passed else {
            return;
        };
        let tenure = self.entries[passed.entry].tenure;
        // Without holds its release is in flight, which confirms them, too.
        let Some(tenure) = tenure.filter(|tenure| !self.tenures[*tenure].holds.is_empty()) else {
            return;
        };
        if passed.confirming.is_some() || passed.unconfirmed.is_empty() {
            return;
        }
        passed.confirming = Some(std::mem::take(&mut passed.unconfirmed));
        let (entry, number) = (passed.entry, passed.number);
        let kind = self.tenures[tenure].kind;
        let targets = std::iter::once(self.target(entry));
        let call = kind.renew(targets, self.settings.watchdog);
        let confirmation = Confirmation {
            lock,
            number,
            kind,
            sent: now,
        };
        self.send(Purpose::Confirmation(confirmation), call);
    }

    pub(super) fn confirmation_replied(
        &mut self,
        now: Time,
        confirmation: Confirmation,
        outcome: Result<Reply, Failure>,
    ) {
        let Confirmation {
            lock,
            number,
            kind,
            sent,
        } = confirmation;
        let Some(entry) = self.passed(lock, number).map(|passed| passed.entry) else {
            return;
        };
        // If it is lost by now, the unlocks have been completed.
        let live = self.live_tenure(now, entry);
        let Some(passed) = self.passed(lock, number) else {
            return;
        };
        let confirming = passed.confirming.take().unwrap_or_default();
        match outcome.and_then(|reply| kind.renewed(reply, 1)).as_deref() {
            Ok([Renewed::Yes]) => {
                // A release that may shorten the expiry may have come later.
                if let Some(live) = live.filter(|live| self.tenures[*live].lowering == 0) {
                    let lease = self.settings.watchdog;
                    let tenure = &mut self.tenures[live];
                    tenure.cell.extend(sent + lease.provable());
                    tenure.ends = tenure.ends.max(sent + lease.duration());
                    self.plan_renewal(live, sent);
                }
                self.confirm(now, lock);
                for request in confirming {
                    self.complete(request, Outcome::Done);
                }
                return;
            }
            Ok([Renewed::Gone]) => return self.confirmation_failed(now, lock, confirming, live),
            Ok([Renewed::Refused(error)]) | Err(Failure::Server(error))
                if error.kind() == ServerErrorKind::WrongType =>
            {
                return self.confirmation_failed(now, lock, confirming, live);
            }
            Ok([Renewed::Refused(error)]) => self.note_refusal(error),
            Ok(_) => {}
            Err(failure) => self.note_failure(failure),
        }
        self.keep_unconfirmed(lock, confirming);
        self.timers.set(Timer::Confirmation(lock), now + PAUSE);
    }

    /// The server does not have the lock any more. Without a tenure its release is in flight, and
    /// the reply to that tells.
    fn confirmation_failed(
        &mut self,
        now: Time,
        lock: LockId,
        confirming: Vec<RequestId>,
        live: Option<TenureId>,
    ) {
        self.keep_unconfirmed(lock, confirming);
        if let Some(live) = live {
            self.lose_tenure(now, live, LostReason::Gone);
        }
    }

    fn keep_unconfirmed(&mut self, lock: LockId, confirming: Vec<RequestId>) {
        if let Some(passed) = &mut self.locks[lock].passed {
            passed.unconfirmed.splice(0..0, confirming);
        }
    }

    /// The pause after a confirmation without an answer is over.
    pub(super) fn confirmation_is_due(&mut self, now: Time, lock: LockId) {
        if self.locks.contains_key(lock) {
            self.confirm(now, lock);
        }
    }

    /// The server has freed a lock that an entry held: that confirms each release before.
    pub(super) fn confirm_released(&mut self, entry: EntryId) {
        for request in self.unconfirmed(entry) {
            self.complete(request, Outcome::Done);
        }
    }

    /// The entry has lost the lock: the releases that were not confirmed may have been too late.
    pub(super) fn fail_unconfirmed(&mut self, entry: EntryId, reason: LostReason) {
        for request in self.unconfirmed(entry) {
            let error = self.lost_error(entry, reason);
            self.complete(request, Outcome::Failed(error));
        }
    }

    fn unconfirmed(&mut self, entry: EntryId) -> Vec<RequestId> {
        let lock = self.entries[entry].lock;
        let Some(passed) = &mut self.locks[lock].passed else {
            return Vec::new();
        };
        if passed.entry != entry {
            return Vec::new();
        }
        let mut all = passed.confirming.take().unwrap_or_default();
        all.append(&mut passed.unconfirmed);
        all
    }

    /// An operation of an entry, or its tenure, has ended: once nothing of it is left, the owner
    /// that it acts as is free.
    pub(super) fn end_passing(&mut self, now: Time, id: EntryId) {
        let Some(entry) = self.entries.get(id) else {
            return;
        };
        let lock = entry.lock;
        let Some(passed) = &self.locks[lock].passed else {
            return;
        };
        let may_act = |tenure: &TenureId| self.tenures[*tenure].may_be_left(now);
        if passed.entry != id
            || entry.tenure.is_some()
            || entry.has_operations()
            || entry.past().lost.iter().any(may_act)
        {
            return;
        }
        let known = passed.known;
        self.entries[id].acts_as = None;
        let name = self.lock_name(id);
        for request in self.unconfirmed(id) {
            let failure = Failure::Unknown("the release was not confirmed".to_owned());
            let error = self.unknown(name.clone(), Step::Release, failure);
            self.complete(request, Outcome::Failed(error));
        }
        self.timers.clear(Timer::Confirmation(lock));
        self.locks[lock].passed = None;
        if let Some(entry) = self.entry_ids.get(&(lock, known.thread_id())) {
            self.advance_entry(now, *entry);
        }
        self.advance_lock(now, lock);
    }
}
