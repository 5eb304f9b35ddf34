//! What the oracle reads of an engine.

use std::sync::Arc;

use bytes::Bytes;

use super::super::entry::Action;
use super::super::requests::Request;
use super::super::timers::Timer;
use super::super::{CallId, Engine, Purpose, RequestId};
use crate::keys::Keys;
use crate::lease_cell::LeaseCell;
use crate::owner::{Owner, owner_field};
use crate::time::Time;

/// The wait queue of a lock.
#[derive(Debug)]
pub(super) struct QueueState {
    pub(super) name: Bytes,
    pub(super) has_attempt: bool,
    /// When the head looks again.
    pub(super) look_at: Option<Time>,
    pub(super) is_confirmed: bool,
    /// Whether the lock was passed on, and the release of the owner that has it has not ended.
    pub(super) is_passed: bool,
}

/// A tenure that is held by the engine's record while none of the owner's operations is pending.
#[derive(Debug)]
pub(super) struct Recorded {
    pub(super) name: Bytes,
    pub(super) field: Bytes,
    pub(super) count: i64,
}

impl Engine {
    /// Whether there is an entry that the server knows as that owner.
    pub(super) fn knows(&self, keys: &Keys, owner: Owner) -> bool {
        self.entry_known_as(keys, owner).is_some()
    }

    /// The owner as the server knows it.
    pub(super) fn known_owner(&self, keys: &Keys, owner: Owner) -> Owner {
        let entry = self.entry_in_use(keys, owner);
        let acts_as = entry.and_then(|entry| self.entries[entry].acts_as);
        acts_as.unwrap_or(owner)
    }

    /// The name of an owner on the server.
    pub(super) fn known_field(&self, keys: &Keys, owner: Owner) -> Bytes {
        owner_field(self.settings.client_id, self.known_owner(keys, owner))
    }

    /// The owner for which the head of a wait queue makes an attempt.
    pub(super) fn attempting(&self, name: &Bytes) -> Option<Bytes> {
        let mut locks = self.locks.values();
        let lock = locks.find(|lock| lock.keys.name == *name)?;
        let op = self.ops.get(lock.wait.attempt?)?;
        Some(self.target(op.entry).field)
    }

    /// Whether the watchdog renews the tenure of that cell.
    pub(super) fn is_watched(&self, cell: &Arc<LeaseCell>) -> bool {
        self.tenures
            .iter()
            .any(|(id, tenure)| Arc::ptr_eq(&tenure.cell, cell) && self.is_renewed(id))
    }

    /// Whether something is done with the refusal of a call that writes.
    pub(super) fn is_awaited(&self, call: CallId) -> bool {
        match self.calls.get(call) {
            Some(Purpose::Op(op)) => self.ops.contains_key(*op),
            Some(Purpose::Renewal(_) | Purpose::Confirmation(_)) => true,
            _ => false,
        }
    }

    /// The locks with detached holds, or with losses of those, that an unlock would take; and their
    /// owners.
    pub(super) fn unlockable(&self) -> Vec<(Bytes, Owner)> {
        self.entries
            .values()
            .filter(|entry| {
                let tenure = entry.tenure.and_then(|tenure| self.tenures.get(tenure));
                let mut holds = tenure.iter().flat_map(|tenure| &tenure.holds);
                !entry.past().losses.is_empty()
                    || holds.any(|hold| self.holds[*hold].state.is_detached())
            })
            .map(|entry| (self.locks[entry.lock].keys.name.clone(), entry.owner))
            .collect()
    }

    pub(super) fn queues(&self) -> impl Iterator<Item = QueueState> + '_ {
        self.locks
            .iter()
            .filter(|(_, lock)| !lock.wait.queue.is_empty())
            .map(|(id, lock)| QueueState {
                name: lock.keys.name.clone(),
                has_attempt: lock.wait.attempt.is_some(),
                look_at: self.timers.when(Timer::Lock(id)),
                is_confirmed: self.is_confirmed(id),
                is_passed: lock.passed.is_some(),
            })
    }

    /// The tenures of private owners with nothing pending that may change their hold count.
    pub(super) fn recorded(&self, now: Time) -> impl Iterator<Item = Recorded> + '_ {
        self.tenures.values().filter_map(move |tenure| {
            let entry = &self.entries[tenure.entry];
            let is_held = tenure.cell.proved_until().is_some_and(|until| until > now);
            (is_held && entry.owner.is_private() && !entry.has_operations()).then(|| Recorded {
                name: self.locks[entry.lock].keys.name.clone(),
                field: self.target(tenure.entry).field,
                count: tenure.count,
            })
        })
    }

    /// What is inconsistent inside; requests that were offered and not claimed are known outside.
    pub(super) fn inconsistency(&self, is_unclaimed: impl Fn(RequestId) -> bool) -> Option<String> {
        let mut busy: Vec<_> = Vec::new();
        for purpose in self.calls.values() {
            if let Purpose::Op(op) = purpose {
                let entry = self.ops.get(*op)?.entry;
                if busy.contains(&entry) {
                    return Some("two calls of one entry are in flight".to_owned());
                }
                busy.push(entry);
            }
        }
        for (id, op) in &self.ops {
            let has_call = self
                .calls
                .values()
                .any(|purpose| matches!(purpose, Purpose::Op(other) if *other == id));
            if op.is_started() && !has_call && !self.timers.is_set(Timer::Op(id)) {
                return Some(format!(
                    "an operation that was started waits for nothing: {op:?}"
                ));
            }
            if has_call && self.timers.is_set(Timer::Op(id)) {
                return Some("an operation has a call in flight and pauses".to_owned());
            }
        }
        for (id, lock) in &self.locks {
            let attempts = self
                .ops
                .values()
                .filter(|op| {
                    matches!(op.action, Action::Acquire(_)) && self.entries[op.entry].lock == id
                })
                .filter(|op| {
                    let request = op.request.and_then(|request| self.requests.get(request));
                    matches!(request, Some(Request::Acquire(request)) if request.place.is_some())
                })
                .count();
            if attempts > 1 {
                return Some(format!("{attempts} attempts of one wait queue"));
            }
            let entries = self
                .entries
                .values()
                .filter(|entry| entry.lock == id)
                .count();
            if entries != lock.entries {
                return Some("a lock counts its entries wrong".to_owned());
            }
            if let Some(op) = lock.wait.attempt {
                if !self.ops.contains_key(op) {
                    return Some("the attempt of a wait queue is gone".to_owned());
                }
            }
        }
        for (id, request) in &self.requests {
            let is_lost = match request {
                Request::Acquire(request) => {
                    let op = request.op.is_some_and(|op| self.ops.contains_key(op));
                    request.place.is_none() && !op && request.offer.is_none() && !is_unclaimed(id)
                }
                Request::Query(_) | Request::Force(_) => {
                    let has_call = self
                        .calls
                        .values()
                        .any(|purpose| matches!(purpose, Purpose::Query(other) if *other == id));
                    let has_op = matches!(request, Request::Force(forcing) if forcing.op.is_some());
                    !has_call && !has_op && !self.timers.is_set(Timer::Query(id))
                }
                Request::Release { op, .. } => {
                    !op.is_some_and(|op| self.ops.contains_key(op)) && !self.is_unconfirmed(id)
                }
                Request::Close => false,
            };
            if is_lost {
                return Some(format!("nothing completes the request {request:?}"));
            }
        }
        for tenure in self.tenures.values() {
            if !self.entries.contains_key(tenure.entry) {
                return Some("a tenure outlives its entry".to_owned());
            }
            if tenure
                .holds
                .iter()
                .any(|hold| !self.holds.contains_key(*hold))
            {
                return Some("a tenure lists a hold that is gone".to_owned());
            }
        }
        None
    }

    pub(super) fn has_timers(&self) -> bool {
        !self.timers.is_empty()
    }

    /// What is left where nothing should be.
    pub(super) fn remains(&self) -> String {
        format!(
            "locks {:?} entries {:?} ops {:?} tenures {:?} holds {:?} requests {:?} calls {:?} \
             channels {:?} schedule {:?} losses {:?}",
            self.locks
                .values()
                .map(|lock| &lock.wait.queue)
                .collect::<Vec<_>>(),
            self.entries.values().collect::<Vec<_>>(),
            self.ops.values().collect::<Vec<_>>(),
            self.tenures.values().collect::<Vec<_>>(),
            self.holds.values().collect::<Vec<_>>(),
            self.requests.values().collect::<Vec<_>>(),
            self.calls.len(),
            self.channels,
            self.schedule,
            self.losses,
        )
    }
}
