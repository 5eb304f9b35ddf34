//! An entry: a lock and an owner. Its operations run one after the other, because a script names
//! the hold count that it expects.

use std::collections::VecDeque;

use smallvec::SmallVec;

use super::attempt::Acquire;
use super::backoff::Backoff;
use super::force_unlock::Force;
use super::release::{Release, Settle};
use super::requests::Request;
use super::timers::Timer;
use super::{Engine, EntryId, HoldId, LockId, OpId, Purpose, RequestId, TenureId};
use crate::error::LostReason;
use crate::kind::{Kind, Target};
use crate::owner::{Owner, owner_field};
use crate::time::Time;
use crate::wire::{Call, Failure, Reply};

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) lock: LockId,
    pub(super) owner: Owner,
    ops: Operations,
    /// Whether the queue is being worked off, further up the stack.
    is_advancing: bool,
    /// The tenure that is not lost.
    pub(super) tenure: Option<TenureId>,
    /// The owner that the server knows for it, if the lock was passed on to it.
    pub(super) acts_as: Option<Owner>,
    /// The requests in the wait queue.
    pub(super) waiting: SmallVec<[RequestId; 2]>,
    /// How many requests to acquire there are.
    pub(super) requests: usize,
    /// Few entries have one.
    past: Option<Box<Past>>,
}

/// What earlier tenures of an entry have left.
#[derive(Debug, Default)]
pub(super) struct Past {
    /// Lost tenures that still have holds, or that may have left something on the server.
    pub(super) lost: Vec<TenureId>,
    /// Lost detached holds that no unlock has reported.
    pub(super) losses: Vec<(HoldId, LostReason)>,
    pub(super) left_behind: Option<LeftBehind>,
}

/// Operations in order. Most entries have one at a time, which needs no allocation.
#[derive(Debug, Default)]
struct Operations {
    first: Option<OpId>,
    others: VecDeque<OpId>,
}

impl Operations {
    fn push(&mut self, op: OpId) {
        match self.first {
            None => self.first = Some(op),
            Some(_) => self.others.push_back(op),
        }
    }

    fn pop(&mut self) {
        self.first = self.others.pop_front();
        if self.others.is_empty() {
            self.others = VecDeque::new();
        }
    }

    fn remove(&mut self, op: OpId) {
        if self.first == Some(op) {
            self.pop();
        } else {
            self.others.retain(|other| *other != op);
        }
    }
}

/// What a tenure of an owner that others may be as well may have left on the server.
#[derive(Debug, Clone, Copy)]
pub(super) struct LeftBehind {
    /// The holds that were there before the tenure.
    pub(super) base: i64,
    /// When the server cannot have it any more.
    pub(super) until: Time,
}

/// An operation of an entry.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) entry: EntryId,
    pub(super) kind: Kind,
    /// The request that waits for it, unless its caller has gone.
    pub(super) request: Option<RequestId>,
    started: bool,
    /// When it was started, and when its last call was sent.
    pub(super) began: Time,
    pub(super) sent: Time,
    pub(super) backoff: Backoff,
    /// Whether a copy of its call has an unknown outcome.
    pub(super) is_repeated: bool,
    /// What the server refused last.
    pub(super) refusal: Option<String>,
    /// Why its last call could not be sent.
    pub(super) unsent: Option<String>,
    pub(super) action: Action,
}

#[derive(Debug)]
pub(super) enum Action {
    Acquire(Acquire),
    Release(Release),
    Settle(Settle),
    /// Makes sure that a lost tenure over that many earlier holds leaves nothing.
    CleanUp(i64),
    /// Releases a hold that only the server knows of; the count that the server answered.
    Unrecorded(Option<i64>),
    Force(Force),
}

impl Action {
    /// Whether a lease stays on the server if the operation is not completed.
    pub(super) fn leaves_lease(&self) -> bool {
        match self {
            Self::Release(_) | Self::Settle(_) | Self::CleanUp(_) | Self::Acquire(_) => true,
            Self::Unrecorded(_) | Self::Force(_) => false,
        }
    }
}

impl Entry {
    pub(super) fn new(lock: LockId, owner: Owner) -> Self {
        Self {
            lock,
            owner,
            ops: Operations::default(),
            is_advancing: false,
            tenure: None,
            acts_as: None,
            waiting: SmallVec::new(),
            requests: 0,
            past: None,
        }
    }

    /// What earlier tenures have left.
    pub(super) fn past(&self) -> &Past {
        static NONE: Past = Past {
            lost: Vec::new(),
            losses: Vec::new(),
            left_behind: None,
        };
        self.past.as_deref().unwrap_or(&NONE)
    }

    /// Changes what earlier tenures have left.
    pub(super) fn change_past<T>(&mut self, change: impl FnOnce(&mut Past) -> T) -> T {
        let past = self.past.get_or_insert_default();
        let output = change(past);
        if past.lost.is_empty() && past.losses.is_empty() && past.left_behind.is_none() {
            self.past = None;
        }
        output
    }

    pub(super) fn is_idle(&self) -> bool {
        self.ops.first.is_none()
            && !self.is_advancing
            && self.tenure.is_none()
            && self.acts_as.is_none()
            && self.requests == 0
            && self.past.is_none()
    }

    /// Whether nothing is pending but what its tenure says, and no other client can be its owner.
    pub(super) fn is_quiet(&self) -> bool {
        self.ops.first.is_none() && self.past.is_none() && self.owner.is_private()
    }

    pub(super) fn has_operations(&self) -> bool {
        self.ops.first.is_some()
    }
}

impl Op {
    pub(super) fn new(
        entry: EntryId,
        kind: Kind,
        request: Option<RequestId>,
        action: Action,
    ) -> Self {
        Self {
            entry,
            kind,
            request,
            started: false,
            began: Time::default(),
            sent: Time::default(),
            backoff: Backoff::new(Time::default(), std::time::Duration::ZERO),
            is_repeated: false,
            refusal: None,
            unsent: None,
            action,
        }
    }

    pub(super) fn is_started(&self) -> bool {
        self.started
    }
}

impl Engine {
    /// Puts an operation at the end of its entry's queue, and starts it if it is the first.
    pub(super) fn push_op(&mut self, now: Time, op: Op) {
        let request = op.request;
        let id = self.ops.insert(op);
        if let Some(Request::Release { op, .. }) =
            request.and_then(|request| self.requests.get_mut(request))
        {
            *op = Some(id);
        }
        self.enqueue_op(now, id);
    }

    /// The same for an operation that has its number already.
    pub(super) fn enqueue_op(&mut self, now: Time, id: OpId) {
        let entry = self.ops[id].entry;
        self.entries[entry].ops.push(id);
        self.advance_entry(now, entry);
    }

    /// Starts the first operation of an entry.
    pub(super) fn advance_entry(&mut self, now: Time, id: EntryId) {
        if std::mem::replace(&mut self.entries[id].is_advancing, true) {
            return;
        }
        while let Some(op) = self.entries[id].ops.first.filter(|_| !self.is_replaced(id)) {
            if std::mem::replace(&mut self.ops[op].started, true) {
                break;
            }
            self.ops[op].began = now;
            self.start_op(now, op);
        }
        self.entries[id].is_advancing = false;
        self.end_passing(now, id);
        self.remove_if_idle(id);
    }

    fn start_op(&mut self, now: Time, id: OpId) {
        match &self.ops[id].action {
            Action::Acquire(_) => self.start_acquire(now, id),
            Action::Release(_) => self.start_release(now, id),
            Action::Settle(_) => self.send_settle(now, id),
            Action::CleanUp(base) => {
                let base = *base;
                self.start_clean_up(now, id, base);
            }
            Action::Unrecorded(_) => self.start_unrecorded(now, id),
            Action::Force(_) => self.start_force(now, id),
        }
    }

    /// The outcome of an operation's call.
    pub(super) fn op_replied(&mut self, now: Time, id: OpId, outcome: Result<Reply, Failure>) {
        let Some(op) = self.ops.get(id) else { return };
        match &op.action {
            Action::Acquire(_) => self.acquire_replied(now, id, outcome),
            Action::Release(_) => self.release_replied(now, id, outcome),
            Action::Settle(_) => self.settle_replied(now, id, outcome),
            Action::Unrecorded(_) => self.unrecorded_replied(now, id, outcome),
            Action::Force(_) => self.force_replied(now, id, outcome),
            Action::CleanUp(_) => {}
        }
    }

    /// The pause of an operation is over.
    pub(super) fn repeat_op(&mut self, now: Time, id: OpId) {
        let Some(op) = self.ops.get(id) else { return };
        match &op.action {
            Action::Acquire(_) => self.repeat_acquire(now, id),
            Action::Release(_) => self.send_release(now, id),
            Action::Settle(_) => self.send_settle(now, id),
            Action::Unrecorded(_) => self.send_unrecorded(now, id),
            Action::Force(_) => self.send_force(now, id),
            Action::CleanUp(_) => {}
        }
    }

    /// Plans the next try of an operation. `false` if its limit leaves no time for one.
    pub(super) fn pause_op(&mut self, now: Time, id: OpId) -> bool {
        let Some(at) = self.ops[id].backoff.pause(now, &mut self.rng) else {
            return false;
        };
        self.timers.set(Timer::Op(id), at);
        true
    }

    /// Sends a call for an operation.
    pub(super) fn send_op(&mut self, now: Time, id: OpId, call: Call) {
        self.ops[id].sent = now;
        self.send(Purpose::Op(id), call);
    }

    /// The operation is over; the entry's next one begins.
    pub(super) fn finish_op(&mut self, now: Time, id: OpId) {
        self.timers.clear(Timer::Op(id));
        let Some(op) = self.ops.remove(id) else {
            return;
        };
        let entry = &mut self.entries[op.entry];
        debug_assert_eq!(entry.ops.first, Some(id), "only the first operation runs");
        entry.ops.pop();
        self.advance_entry(now, op.entry);
        self.note_operation_ended();
    }

    /// Takes out an operation that was not started.
    pub(super) fn remove_op(&mut self, id: OpId) {
        let Some(op) = self.ops.remove(id) else {
            return;
        };
        debug_assert!(
            !op.started,
            "an operation that was started has to be finished"
        );
        let entry = &mut self.entries[op.entry];
        entry.ops.remove(id);
        let wait = &mut self.locks[entry.lock].wait;
        if wait.attempt == Some(id) {
            wait.attempt = None;
            wait.has_reason = true;
        }
        self.remove_if_idle(op.entry);
        self.note_operation_ended();
    }

    /// The caller of an operation has gone.
    pub(super) fn abandon_op(&mut self, now: Time, id: OpId) {
        let Some(op) = self.ops.get_mut(id) else {
            return;
        };
        op.request = None;
        let entry = op.entry;
        if !op.started {
            self.remove_op(id);
            self.end_passing(now, entry);
        } else if matches!(op.action, Action::Acquire(_)) && self.timers.is_set(Timer::Op(id)) {
            // For a caller who has gone nothing more is begun.
            self.timers.clear(Timer::Op(id));
            self.acquire_failed(
                now,
                id,
                Failure::NotSent("the request was cancelled".to_owned().into()),
            );
        }
    }

    /// A lock and an owner, as the scripts take them.
    pub(super) fn target(&self, entry: EntryId) -> Target<'_> {
        let entry = &self.entries[entry];
        Target {
            keys: &self.locks[entry.lock].keys,
            field: owner_field(
                self.settings.client_id,
                entry.acts_as.unwrap_or(entry.owner),
            ),
        }
    }
}
