//! Force unlock: frees a lock that any owner holds.
//!
//! The call names the owner that an inspection found. For an owner of this client it is one of the
//! owner's operations: a pending acquire has ended by then, and the next one starts after this call
//! has an outcome, so the call can be repeated. For an owner of another client it is sent once: a
//! repetition could free the next tenure of the same owner.

use bytes::Bytes;

use super::backoff::Backoff;
use super::entry::{Action, Op};
use super::requests::{Outcome, Request};
use super::timers::Timer;
use super::{Engine, OpId, RequestId, TenureId, errors};
use crate::error::{Error, LostReason, Step};
use crate::keys::Keys;
use crate::kind::{Kind, Target};
use crate::owner::{Owner, thread_of};
use crate::time::Time;
use crate::wire::{Call, Failure, Reply};

/// A request to free a lock.
#[derive(Debug)]
pub(super) struct Forcing {
    pub(super) keys: Keys,
    kind: Kind,
    begun: Time,
    backoff: Backoff,
    inspections: u8,
    /// Whether a copy of the inspection has no reply.
    is_repeated: bool,
    /// The tenures that began before the inspection: those that the server does not have are lost.
    earlier: Vec<TenureId>,
    /// The owner to free; `None` while inspecting. Empty for any owner.
    victim: Option<Bytes>,
    /// The owner that a call without a reply was to free, and how the call failed.
    sent: Option<(Bytes, Failure)>,
    /// The operation that frees an owner of this client.
    pub(super) op: Option<OpId>,
}

/// The operation that frees an owner of this client.
#[derive(Debug)]
pub(super) struct Force {
    request: RequestId,
    earlier: Vec<TenureId>,
}

/// How often the owner is looked up before the lock is freed whatever its owner.
const INSPECTIONS: u8 = 5;

impl Forcing {
    pub(super) fn call(&self) -> Call {
        match &self.victim {
            None => self.kind.inspect(&self.keys),
            Some(field) => self.kind.force_unlock(Target {
                keys: &self.keys,
                field: field.clone(),
            }),
        }
    }
}

impl Engine {
    /// Frees a lock, whichever owner holds it.
    pub(crate) fn force_unlock(&mut self, now: Time, keys: &Keys, kind: Kind) -> RequestId {
        let id = self.requests.insert(Request::Force(Forcing {
            keys: keys.clone(),
            kind,
            begun: now,
            backoff: Backoff::new(now, self.settings.retry_timeout),
            inspections: 0,
            is_repeated: false,
            earlier: Vec::new(),
            victim: None,
            sent: None,
            op: None,
        }));
        self.inspect_for_force(now, id);
        id
    }

    fn forcing(&mut self, id: RequestId) -> Option<&mut Forcing> {
        match self.requests.get_mut(id) {
            Some(Request::Force(forcing)) => Some(forcing),
            _ => None,
        }
    }

    fn inspect_for_force(&mut self, now: Time, id: RequestId) {
        let Some(forcing) = self.forcing(id) else {
            return;
        };
        forcing.inspections += 1;
        forcing.victim = None;
        forcing.op = None;
        let keys = forcing.keys.clone();
        if forcing.inspections > INSPECTIONS {
            // Another owner held the lock at each inspection. A call that names no owner must not
            // run twice.
            forcing.victim = Some(Bytes::new());
            self.lose_selected(now, &keys, |_, _| true);
        } else {
            let lock = self.lock_ids.get(&keys).map(|lock| &self.locks[*lock]);
            let earlier = lock.map_or_else(Vec::new, |lock| lock.tenures.to_vec());
            if let Some(forcing) = self.forcing(id) {
                forcing.earlier = earlier;
            }
        }
        self.repeat_query(id);
    }

    /// The outcome of an inspection, or of a call that frees an owner of another client.
    pub(super) fn forcing_replied(
        &mut self,
        now: Time,
        id: RequestId,
        outcome: Result<Reply, Failure>,
    ) {
        let Some(forcing) = self.forcing(id) else {
            return;
        };
        let (kind, victim) = (forcing.kind, forcing.victim.clone());
        let name = forcing.keys.display();
        let Some(victim) = victim else {
            return self.force_inspected(now, id, outcome);
        };
        match outcome.and_then(|reply| kind.force_unlocked(reply)) {
            Ok(true) => self.complete(id, Outcome::Freed(true)),
            Ok(false) if victim.is_empty() => self.complete(id, Outcome::Freed(false)),
            Ok(false) => self.inspect_for_force(now, id),
            // Whether it ran shows when the owner is looked up again: the call is not repeated.
            Err(failure @ Failure::Unknown(_)) if !victim.is_empty() => {
                forcing.sent = Some((victim, failure));
                self.inspect_for_force(now, id);
            }
            Err(failure @ Failure::Unknown(_)) => {
                let error = self.unknown(name, Step::ForceUnlock, failure);
                self.complete(id, Outcome::Failed(error));
            }
            Err(failure) => self.pause_forcing(now, id, failure),
        }
    }

    fn force_inspected(&mut self, now: Time, id: RequestId, outcome: Result<Reply, Failure>) {
        let Some(forcing) = self.forcing(id) else {
            return;
        };
        let (kind, name) = (forcing.kind, forcing.keys.display());
        let inspected = match outcome.map(|reply| kind.inspected(reply)) {
            Ok(Ok(inspected)) => inspected,
            Ok(Err(_)) => {
                let problem = "a reply of an unknown shape".to_owned();
                let error = self.connection(name, problem.into());
                return self.fail_forcing(id, error);
            }
            Err(failure) => {
                forcing.is_repeated |= matches!(failure, Failure::Unknown(_));
                return self.pause_forcing(now, id, failure);
            }
        };
        let earlier = std::mem::take(&mut forcing.earlier);
        let keys = forcing.keys.clone();
        let owner = match inspected.owner() {
            Ok(owner) => owner.map(|(owner, _)| owner.clone()),
            Err(error) => return self.fail_forcing(id, errors::server(name, error)),
        };
        if let Some((victim, failure)) = self.forcing(id).and_then(|forcing| forcing.sent.take()) {
            let outcome = if owner.as_ref() == Some(&victim) {
                Outcome::Failed(self.unknown(name, Step::ForceUnlock, failure))
            } else {
                Outcome::Freed(true)
            };
            return self.complete(id, outcome);
        }
        let Some(owner) = owner else {
            // A tenure that began before the inspection and that the server does not have is lost.
            self.lose_selected(now, &keys, |tenure, _| earlier.contains(&tenure));
            return self.complete(id, Outcome::Freed(false));
        };
        let own = thread_of(&owner, self.settings.client_id)
            .and_then(|thread| Owner::from_thread_id(thread).ok())
            .map(|owner| {
                let known = self.entry_known_as(&keys, owner);
                known.unwrap_or_else(|| self.entry_id(&keys, owner))
            });
        match own {
            Some(entry) => {
                let force = Force {
                    request: id,
                    earlier,
                };
                let mut op = Op::new(entry, kind, None, Action::Force(force));
                op.backoff = Backoff::new(now, self.settings.retry_timeout);
                let limit = now + self.settings.patience();
                let op = self.ops.insert(op);
                if let Some(forcing) = self.forcing(id) {
                    forcing.op = Some(op);
                }
                self.timers.set(Timer::Request(id), limit);
                self.enqueue_op(now, op);
            }
            None => {
                // The call cannot name an owner without a name (a string of another program), so it
                // frees whichever is there.
                self.lose_selected(now, &keys, |tenure, field| {
                    owner.is_empty() || field == &owner || earlier.contains(&tenure)
                });
                if let Some(forcing) = self.forcing(id) {
                    forcing.victim = Some(owner);
                }
                self.repeat_query(id);
            }
        }
    }

    /// The call failed and had no effect, or it only reads: it is repeated while that may help.
    fn pause_forcing(&mut self, now: Time, id: RequestId, failure: Failure) {
        let Some(forcing) = self.forcing(id) else {
            return;
        };
        let (mut backoff, begun) = (forcing.backoff, forcing.begun);
        let (is_repeated, name) = (forcing.is_repeated, forcing.keys.display());
        let error = self.pause_query(now, id, &mut backoff, failure, begun, is_repeated, name);
        match error {
            Some(error) => self.fail_forcing(id, error),
            None => {
                if let Some(forcing) = self.forcing(id) {
                    forcing.backoff = backoff;
                }
            }
        }
    }

    /// Nothing more can be found out. A call without a reply before that may have freed the lock.
    fn fail_forcing(&mut self, id: RequestId, error: Error) {
        let sent = self.forcing(id).and_then(|forcing| {
            let (_, failure) = forcing.sent.take()?;
            Some((forcing.keys.display(), failure))
        });
        let error = match sent {
            Some((name, failure)) => self.unknown(name, Step::ForceUnlock, failure),
            None => error,
        };
        self.complete(id, Outcome::Failed(error));
    }

    pub(super) fn start_force(&mut self, now: Time, id: OpId) {
        let op = &self.ops[id];
        let Action::Force(force) = &op.action else {
            return;
        };
        let (request, earlier) = (force.request, force.earlier.clone());
        if !self.requests.contains_key(request) {
            // The caller has gone, and nothing was sent.
            self.finish_op(now, id);
            return;
        }
        self.timers.clear(Timer::Request(request));
        let target = self.target(op.entry);
        let (keys, owner) = (target.keys.clone(), target.field);
        // The owners are notified before another owner can acquire the lock.
        self.lose_selected(now, &keys, |tenure, field| {
            field == &owner || earlier.contains(&tenure)
        });
        self.ops[id].backoff = Backoff::new(now, self.settings.retry_timeout);
        self.send_force(now, id);
    }

    pub(super) fn send_force(&mut self, now: Time, id: OpId) {
        let op = &self.ops[id];
        let call = op.kind.force_unlock(self.target(op.entry));
        self.send_op(now, id, call);
    }

    pub(super) fn force_replied(&mut self, now: Time, id: OpId, outcome: Result<Reply, Failure>) {
        let op = &self.ops[id];
        let (kind, entry) = (op.kind, op.entry);
        let Action::Force(force) = &op.action else {
            return;
        };
        let request = force.request;
        let name = self.lock_name(entry);
        let result: Result<bool, Error> = match outcome.and_then(|reply| kind.force_unlocked(reply))
        {
            // If a repeated call does not find the owner, the first copy freed the lock.
            Ok(is_freed) => Ok(is_freed || self.ops[id].is_repeated),
            Err(failure) => {
                self.note_failure(&failure);
                self.ops[id].is_repeated |= matches!(failure, Failure::Unknown(_));
                if failure.is_transient() && self.pause_op(now, id) {
                    return;
                }
                Err(if self.ops[id].is_repeated {
                    self.unknown(name, Step::ForceUnlock, failure)
                } else {
                    self.refused(name, failure)
                })
            }
        };
        match result {
            Ok(true) => self.complete(request, Outcome::Freed(true)),
            Ok(false) => self.inspect_for_force(now, request),
            Err(error) => self.complete(request, Outcome::Failed(error)),
        }
        self.finish_op(now, id);
    }

    /// Marks the selected tenures of a lock as force-unlocked.
    fn lose_selected(
        &mut self,
        now: Time,
        keys: &Keys,
        is_selected: impl Fn(TenureId, &Bytes) -> bool,
    ) {
        let Some(lock) = self.lock_ids.get(keys) else {
            return;
        };
        for id in self.locks[*lock].tenures.clone() {
            let entry = self.tenures[id].entry;
            if is_selected(id, &self.target(entry).field) {
                self.lose_tenure(now, id, LostReason::ForceUnlocked);
            }
        }
    }
}
