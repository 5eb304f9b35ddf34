//! One attempt to acquire, repeated until its outcome is known.

use std::sync::Arc;
use std::time::Duration;

use super::backoff::Backoff;
use super::entry::{Action, Op};
use super::requests::{Outcome, Request};
use super::tenure::{Hold, HoldState, Mode, Tenure};
use super::timers::Timer;
use super::{Engine, EntryId, HoldId, OpId, RequestId, TenureId, errors};
use crate::config::LeaseTime;
use crate::error::{Error, LostReason, Step};
use crate::kind::{Acquired, Counts, Held};
use crate::lease_cell::HoldCell;
use crate::owner::TaskKey;
use crate::time::Time;
use crate::wire::{Failure, Reply};

#[derive(Debug)]
pub(super) struct Acquire {
    mode: Mode,
    task: TaskKey,
    patience: Duration,
    /// When it is not retried any more, if the request has a wait time.
    ends: Option<Time>,
    /// Whether the owner's hold count is being read.
    is_counting: bool,
    counts: Counts,
    /// Whether the token of the tenure is not known: then a fenced lock is asked for a new one.
    needs_token: bool,
    /// What to leave on the server should the outcome stay unknown: what is known to be held
    /// besides.
    leave: i64,
    corrections: u8,
}

/// Each correction takes in what the server says; more than a few mean that another client changes
/// the count.
const CORRECTIONS: u8 = 4;

impl Acquire {
    /// How long transient errors are retried if it starts now: an attempt that starts at the end of
    /// a wait does not wait as long once more.
    fn patience_at(&self, now: Time) -> Duration {
        match self.ends {
            Some(ends) => self.patience.min(ends.since(now)),
            None => self.patience,
        }
    }
}

impl Engine {
    /// Begins an attempt for a request. `queued` is the patience of an attempt for the head of the
    /// wait queue; other attempts pass the queue.
    pub(super) fn begin_attempt(&mut self, now: Time, id: RequestId, queued: Option<Duration>) {
        let Some(Request::Acquire(request)) = self.requests.get_mut(id) else {
            return;
        };
        request.asked = true;
        let ends = request
            .ends
            .map(|ends| ends.max(request.begun + self.settings.command_timeout));
        let patience = queued.unwrap_or(request.patience);
        let entry = request.entry;
        let acquire = Acquire {
            mode: request.mode,
            task: request.task,
            patience,
            ends,
            is_counting: false,
            counts: Counts {
                before: 0,
                target: 0,
            },
            needs_token: true,
            leave: 0,
            corrections: 0,
        };
        // From now on the attempt has a limit of its own.
        let limit = acquire.patience_at(now).max(self.settings.command_timeout);
        let limit = now + limit;
        let op = Op::new(entry, request.kind, Some(id), Action::Acquire(acquire));
        let waits = self.entries[entry].has_operations() || self.is_replaced(entry);
        if waits {
            self.timers.set(Timer::Request(id), limit);
        } else {
            self.timers.clear(Timer::Request(id));
        }
        let lock = self.entries[entry].lock;
        // Its number is known only when it is in the queue, where it may end at once.
        let op = self.ops.insert(op);
        if let Some(Request::Acquire(request)) = self.requests.get_mut(id) {
            request.op = Some(op);
        }
        if queued.is_some() {
            self.locks[lock].wait.attempt = Some(op);
        }
        self.enqueue_op(now, op);
    }

    pub(super) fn start_acquire(&mut self, now: Time, id: OpId) {
        let op = &mut self.ops[id];
        let (entry, request) = (op.entry, op.request);
        let Action::Acquire(acquire) = &mut op.action else {
            return;
        };
        op.backoff = Backoff::new(now, acquire.patience_at(now));
        if let Some(request) = request {
            self.timers.clear(Timer::Request(request));
        }
        if self.is_closed() {
            self.acquire_failed(now, id, Failure::Closed);
            return;
        }
        let live = self.live_tenure(now, entry);
        let before = match live {
            Some(tenure) => self.tenures[tenure].count,
            None if !self.entries[entry].owner.is_private() => {
                self.acquiring(id).is_counting = true;
                self.send_acquire(now, id);
                return;
            }
            None => 0,
        };
        self.set_counts(now, id, before);
    }

    fn acquiring(&mut self, id: OpId) -> &mut Acquire {
        match &mut self.ops[id].action {
            Action::Acquire(acquire) => acquire,
            action => unreachable!("the operation acquires: {action:?}"),
        }
    }

    /// Acquires over that hold count.
    fn set_counts(&mut self, now: Time, id: OpId, before: i64) {
        match before.checked_add(1).filter(|target| *target > 0) {
            Some(target) => {
                let acquire = self.acquiring(id);
                (acquire.counts, acquire.leave) = (Counts { before, target }, before);
                acquire.is_counting = false;
                self.send_acquire(now, id);
            }
            None => {
                let error = format!("ERR the hold count is at its limit: {before}");
                self.acquire_failed(now, id, Failure::Server(error.into()));
            }
        }
    }

    fn send_acquire(&mut self, now: Time, id: OpId) {
        let tenure = self.entries[self.ops[id].entry].tenure;
        self.acquiring(id).needs_token =
            tenure.is_none_or(|tenure| self.tenures[tenure].token.is_none());
        let op = &self.ops[id];
        let Action::Acquire(acquire) = &op.action else {
            return;
        };
        let target = self.target(op.entry);
        let call = if acquire.is_counting {
            op.kind.count(target)
        } else {
            let lease = self.lease_of(acquire.mode);
            op.kind
                .acquire(target, acquire.counts, lease, acquire.needs_token)
        };
        self.send_op(now, id, call);
    }

    pub(super) fn lease_of(&self, mode: Mode) -> LeaseTime {
        match mode {
            Mode::Watchdog => self.settings.watchdog,
            Mode::Fixed(lease) => lease,
        }
    }

    pub(super) fn repeat_acquire(&mut self, now: Time, id: OpId) {
        if self.is_closed() {
            self.acquire_failed(now, id, Failure::Closed);
            return;
        }
        let lock = self.entries[self.ops[id].entry].lock;
        self.attempt_is_repeated(now, lock, id);
        self.send_acquire(now, id);
    }

    pub(super) fn acquire_replied(&mut self, now: Time, id: OpId, outcome: Result<Reply, Failure>) {
        let (kind, is_counting) = (self.ops[id].kind, self.acquiring(id).is_counting);
        if is_counting {
            match outcome.and_then(|reply| kind.counted(reply)) {
                Ok(count) => self.set_counts(now, id, count),
                Err(failure) => self.acquire_was_refused(now, id, failure),
            }
            return;
        }
        match outcome.and_then(|reply| kind.acquired(reply)) {
            Ok(Acquired::Granted(token)) => self.granted(now, id, token),
            Ok(Acquired::Held(held)) => self.contended(now, id, held),
            Ok(Acquired::Other(found)) => self.correct(now, id, found),
            Err(failure) => self.acquire_was_refused(now, id, failure),
        }
    }

    /// The call failed: it is repeated if that may help.
    fn acquire_was_refused(&mut self, now: Time, id: OpId, failure: Failure) {
        self.note_failure(&failure);
        let op = &mut self.ops[id];
        let is_counting = matches!(&op.action, Action::Acquire(acquire) if acquire.is_counting);
        op.is_repeated |= !is_counting && matches!(failure, Failure::Unknown(_));
        if let Failure::Server(error) = &failure {
            op.refusal = Some(error.message().to_owned());
        }
        let waits = op.request.is_some() && failure.is_transient();
        if !waits || !self.pause_op(now, id) {
            self.acquire_failed(now, id, failure);
        }
    }

    /// The server has another hold count than our record.
    fn correct(&mut self, now: Time, id: OpId, found: i64) {
        let entry = self.ops[id].entry;
        let is_private = self.entries[entry].owner.is_private();
        let acquire = self.acquiring(id);
        acquire.corrections += 1;
        if acquire.corrections > CORRECTIONS {
            let error = format!("ERR the hold count keeps changing, now {found}");
            self.acquire_failed(now, id, Failure::Server(error.into()));
        } else if found == 0 {
            // Our record says that we hold it, the server that we do not.
            self.lose_live(now, entry, LostReason::Gone);
            self.set_counts(now, id, 0);
        } else if is_private {
            // No other client can be this owner, so the record is right, and what is too much came
            // from a script of ours whose outcome was never known: the target goes over it.
            self.acquiring(id).counts.before = found;
            self.send_acquire(now, id);
        } else {
            self.set_counts(now, id, found);
        }
    }

    /// Another owner holds the lock.
    fn contended(&mut self, now: Time, id: OpId, held: Held) {
        self.stats.contended_attempts += 1;
        let (entry, request) = (self.ops[id].entry, self.ops[id].request);
        let lock = self.entries[entry].lock;
        self.lose_live(now, entry, LostReason::Gone);
        if self.locks[lock].wait.attempt == Some(id) {
            self.attempt_was_contended(now, lock, id, held);
            self.lock_was_answered(now, lock, request);
        } else {
            self.server_was_reached(now, lock);
        }
        if let Some(Request::Acquire(request)) =
            request.and_then(|request| self.requests.get_mut(request))
        {
            request.op = None;
        }
        self.finish_op(now, id);
        if let Some(request) = request {
            self.wait_on(now, request);
        }
        self.advance_lock(now, lock);
    }

    /// After an attempt that found the lock held: the request waits, or its time is over.
    fn wait_on(&mut self, now: Time, id: RequestId) {
        let Some(Request::Acquire(request)) = self.requests.get(id) else {
            return;
        };
        if self.is_closed() {
            self.complete_acquire(id, Outcome::Failed(self.closed()));
        } else if request.is_over(now) {
            self.complete_acquire(id, Outcome::Contended);
        } else if request.place.is_none() {
            self.route(now, id);
        } else {
            if let Some(ends) = request.ends {
                self.timers.set(Timer::Request(id), ends);
            }
            self.check_deadlock(now, id);
        }
    }

    /// Records what the server granted.
    fn granted(&mut self, now: Time, id: OpId, token: Option<i64>) {
        let op = &self.ops[id];
        let (entry, kind, sent, request) = (op.entry, op.kind, op.sent, op.request);
        let acquire = self.acquiring(id);
        let (mode, task, count) = (acquire.mode, acquire.task, acquire.counts.target);
        let token = token.filter(|_| acquire.needs_token);
        let lease = self.lease_of(mode);
        let proof = sent + lease.provable();
        // The record may have run out while the reply was under way: then the older guards are
        // lost.
        let live = self.live_tenure(now, entry);
        let is_open = request.is_some() && !self.is_closed();
        if live.is_none() && token.is_none() && kind.has_tokens() && is_open {
            // The tenure whose token was known is lost. The new one asks for a token of its own;
            // should that fail, what was granted is released.
            self.ops[id].is_repeated = true;
            self.send_acquire(now, id);
            return;
        }
        self.stats.grants += 1;
        self.lose_passed(now, entry);
        let tenure = live.unwrap_or_else(|| {
            let base = self.base_of(now, entry, count);
            let id = self
                .tenures
                .insert(Tenure::new(entry, kind, base, sent, proof));
            self.entries[entry].tenure = Some(id);
            if self.entries[entry].past().left_behind.is_some() {
                self.entries[entry].change_past(|past| past.left_behind = None);
            }
            self.timers.clear(Timer::Entry(entry));
            self.list_tenure(id);
            id
        });
        let record = &mut self.tenures[tenure];
        record.count = count;
        record.token = record.token.or(token);
        record.cell.extend(proof);
        record.ends = record.ends.max(sent + lease.duration());
        let until = sent + lease.duration();
        let hold = self.add_hold(tenure, mode, until, task);
        // A re-entry with a lease of its own does not extend the others', so it must not put off
        // their renewal.
        if live.is_none() || mode == Mode::Watchdog {
            self.plan_renewal(tenure, sent);
        }
        let lock = self.entries[entry].lock;
        let closed = self.is_closed();
        let open = request.filter(|_| !closed);
        if self.locks[lock].wait.attempt == Some(id) {
            self.attempt_was_granted(lock, id, open.map(|_| until));
            self.lock_was_answered(now, lock, request);
        } else {
            self.server_was_reached(now, lock);
        }
        match (request, open) {
            (_, Some(request)) => self.offer(now, request, hold),
            (Some(request), None) => {
                self.complete_acquire(request, Outcome::Failed(self.closed()));
                self.drop_hold(now, hold);
            }
            (None, None) => self.drop_hold(now, hold),
        }
        self.finish_op(now, id);
        self.re_enter_waiting(now, entry);
        self.advance_lock(now, lock);
    }

    /// Adds a hold to a tenure.
    pub(super) fn add_hold(
        &mut self,
        tenure: TenureId,
        mode: Mode,
        until: Time,
        task: TaskKey,
    ) -> HoldId {
        let record = &mut self.tenures[tenure];
        let hold = self.holds.insert(Hold {
            tenure,
            mode,
            until,
            task,
            state: HoldState::Guarded,
            cell: HoldCell::new(Arc::clone(&record.cell)),
        });
        record.holds.push(hold);
        hold
    }

    /// Requests of an owner that has the lock do not wait any more: they re-enter.
    pub(super) fn re_enter_waiting(&mut self, now: Time, entry: EntryId) {
        let entry = self.entries.get(entry);
        for waiting in entry.map(|entry| entry.waiting.clone()).unwrap_or_default() {
            self.re_enter(now, waiting);
        }
    }

    fn re_enter(&mut self, now: Time, id: RequestId) {
        let Some(Request::Acquire(request)) = self.requests.get(id) else {
            return;
        };
        if request.op.is_none() {
            self.leave_queue(id);
            self.begin_attempt(now, id, None);
        }
    }

    /// The attempt has ended without an answer about the lock.
    pub(super) fn acquire_failed(&mut self, now: Time, id: OpId, failure: Failure) {
        let op = &mut self.ops[id];
        let (entry, request, said) = (op.entry, op.request.take(), op.refusal.take());
        let is_unknown = op.is_repeated;
        let lock = self.entries[entry].lock;
        let name = self.locks[lock].keys.display();
        self.attempt_was_silent(now, id, said);
        let error = if is_unknown {
            self.unknown(name, Step::Acquire, failure)
        } else {
            self.refused(name, failure)
        };
        // First, because the end of the operation starts the next one: if that fails at once, the
        // head of the queue makes an attempt, and must not be this request.
        if let Some(request) = request {
            if matches!(error, Error::OutcomeUnknown { .. }) {
                self.stats.unknown_outcomes += 1;
            }
            self.complete_acquire(request, Outcome::Failed(error));
        }
        if is_unknown {
            let acquire = self.acquiring(id);
            let (leave, mode) = (acquire.leave, acquire.mode);
            let lease = self.lease_of(mode);
            self.begin_settlement(now, id, leave, lease);
        } else {
            self.finish_op(now, id);
        }
        self.advance_lock(now, lock);
    }

    /// How many holds were on the server before a tenure that begins with that count.
    fn base_of(&self, now: Time, entry: super::EntryId, count: i64) -> i64 {
        let entry = &self.entries[entry];
        if entry.owner.is_private() {
            // What a private owner finds on the server can only be its own.
            return 0;
        }
        // So it is with what an earlier tenure, that was lost here first, has left there.
        let past = entry.past();
        let lost = past.lost.last().map(|tenure| &self.tenures[*tenure]);
        let lost = lost.and_then(|tenure| tenure.left_behind(now));
        let left = lost.or(past.left_behind.filter(|left| now < left.until));
        left.map_or(count - 1, |left| left.base.min(count - 1))
    }

    pub(super) fn lost_error(&self, entry: super::EntryId, reason: LostReason) -> Error {
        errors::lost(self.lock_name(entry), reason)
    }
}
