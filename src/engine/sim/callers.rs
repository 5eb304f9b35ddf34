//! What callers do: random programs.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rand::Rng;

use super::super::{AcquireRequest, HoldId, Notice, Outcome, RequestId, Wait};
use super::oracle::{Sure, Token};
use super::world::{Event, World};
use crate::config::LeaseTime;
use crate::error::Error;
use crate::kind::Kind;
use crate::lease_cell::HoldCell;
use crate::owner::{Owner, TaskKey, owner_field};
use crate::time::Time;

/// The thread id of the owner that two clients use in turn.
const ADOPTED: i64 = 17;

/// One task of a process.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) number: usize,
    task: TaskKey,
    /// The owner of its scope.
    owner: Option<Owner>,
    pub(super) guards: Vec<Guard>,
    pub(super) detached: Vec<(usize, Owner)>,
    pub(super) waiting: Option<RequestId>,
    /// How often an unlock was refused.
    refusals: u32,
}

#[derive(Debug, Clone)]
pub(super) struct Guard {
    pub(super) hold: HoldId,
    pub(super) lock: usize,
    pub(super) owner: Owner,
    cell: Arc<HoldCell>,
}

impl Caller {
    pub(super) fn new(client: usize, number: usize) -> Self {
        Self {
            number,
            task: TaskKey((client * 100 + number) as i64),
            owner: None,
            guards: Vec::new(),
            detached: Vec::new(),
            waiting: None,
            refusals: 0,
        }
    }
}

/// A request that is not completed.
#[derive(Debug)]
pub(super) struct Tracked {
    pub(super) caller: Option<usize>,
    pub(super) what: What,
    pub(super) state: State,
    pub(super) begun: Time,
    /// By how much the client was late until then.
    pub(super) late: Duration,
    pub(super) is_resumed: bool,
    /// The run of the script that granted it, or that freed the lock by force.
    run: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    Acquire {
        lock: usize,
        owner: Owner,
        kind: Kind,
        wait: Wait,
    },
    Release {
        lock: usize,
        /// The owner as the server knew it when the release began.
        known: Owner,
    },
    Unlock {
        lock: usize,
        owner: Owner,
    },
    Query,
    Force {
        lock: usize,
    },
    Close,
}

impl What {
    fn lock(self) -> Option<usize> {
        match self {
            Self::Acquire { lock, .. }
            | Self::Release { lock, .. }
            | Self::Unlock { lock, .. }
            | Self::Force { lock } => Some(lock),
            Self::Query | Self::Close => None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Pending,
    Granted,
    Unclaimed,
}

impl World {
    fn wake_caller(&mut self, client: usize, caller: usize) {
        let mut at = self.now + self.think();
        if !self.is_finishing && self.rng.random_bool(0.03) {
            // Long enough for renewals, of what was acquired at nearly the same time in one batch.
            at = at + self.plan.watchdog.mul_f64(self.rng.random_range(0.3..1.5));
        }
        self.push(at, Event::Caller { client, caller });
    }

    pub(super) fn track(
        &mut self,
        client: usize,
        caller: Option<usize>,
        what: What,
        begin: impl FnOnce(&mut super::super::Engine, Time) -> RequestId,
    ) -> RequestId {
        self.figures.operations += 1;
        let now = self.now;
        let request = begin(&mut self.clients[client].engine, now);
        self.note(|_| format!("client {client} caller {caller:?} begins {what:?} as {request:?}"));
        let tracked = Tracked {
            caller,
            what,
            state: State::Pending,
            begun: now,
            late: self.clients[client].health.late(),
            is_resumed: false,
            run: 0,
        };
        self.clients[client].tracked.insert(request, tracked);
        if let Some(caller) = caller {
            self.clients[client].callers[caller].waiting = Some(request);
        }
        self.input(client, |_, _| ());
        request
    }

    pub(super) fn acquire(
        &mut self,
        client: usize,
        caller: usize,
        lock: usize,
        owner: Owner,
        lease: Option<Duration>,
        wait: Wait,
    ) -> RequestId {
        let kind = self.kind_of(lock);
        let request = AcquireRequest {
            keys: self.locks[lock].clone(),
            kind,
            owner,
            lease: lease.map(|lease| LeaseTime::new(lease).unwrap()),
            wait,
            task: self.clients[client].callers[caller].task,
        };
        self.note(|_| format!("acquire {kind:?} with lease {lease:?} and {wait:?}"));
        let what = What::Acquire {
            lock,
            owner,
            kind,
            wait,
        };
        self.track(client, Some(caller), what, |engine, now| {
            engine.acquire(now, request)
        })
    }

    pub(super) fn new_owner(&mut self) -> Owner {
        self.next_owner += 1;
        Owner::numbered(self.next_owner)
    }

    /// The kind by which a lock is used this time: one hash may be a reentrant and a fenced lock.
    fn kind_of(&mut self, lock: usize) -> Kind {
        if lock >= self.plan.locks {
            Kind::Simple
        } else if self.rng.random_bool(self.plan.fenced) {
            Kind::Fenced
        } else {
            Kind::Reentrant
        }
    }

    /// The next step of a caller's program.
    pub(super) fn caller_step(&mut self, client: usize, caller: usize) {
        if self.clients[client].callers[caller].waiting.is_some() {
            return;
        }
        if self.is_finishing || !self.clients[client].is_open() {
            self.release_one(client, caller);
            return;
        }
        if self.actions_left == 0 {
            return;
        }
        self.actions_left -= 1;
        self.note(|_| format!("client {client} caller {caller} acts"));
        let (guards, detached) = {
            let caller = &self.clients[client].callers[caller];
            (caller.guards.len(), caller.detached.len())
        };
        if guards > 0 && self.rng.random_bool(0.3) {
            let at = self.rng.random_range(0..guards);
            let cell = Arc::clone(&self.clients[client].callers[caller].guards[at].cell);
            // A guard looks at its lease.
            let _ = cell.lost(self.now);
        }
        match self.rng.random_range(0..100) {
            0..4 => {
                let lock = self.random_lock();
                let limit = self
                    .rng
                    .random_bool(0.3)
                    .then_some(self.plan.command_timeout);
                let (keys, kind) = (self.locks[lock].clone(), self.kind_of(lock));
                self.track(client, Some(caller), What::Query, |engine, now| {
                    engine.inspect(now, &keys, kind, limit)
                });
                self.perhaps_cancel(client, caller, 0.2);
            }
            4..6 => {
                let lock = self.random_lock();
                let (keys, kind) = (self.locks[lock].clone(), self.kind_of(lock));
                let owner = self.pick_owner(client, caller, lock);
                self.track(client, Some(caller), What::Query, |engine, now| {
                    engine.count(now, &keys, kind, owner)
                });
            }
            6..9 => {
                let lock = self.random_lock();
                let (keys, kind) = (self.locks[lock].clone(), self.kind_of(lock));
                self.track(client, Some(caller), What::Force { lock }, |engine, now| {
                    engine.force_unlock(now, &keys, kind)
                });
                self.perhaps_cancel(client, caller, 0.2);
            }
            9..11 => {
                // Perhaps there is nothing to unlock.
                let lock = self.random_lock();
                let owner = self.pick_owner(client, caller, lock);
                self.unlock(client, Some(caller), lock, owner);
            }
            _ if detached > 0 && self.rng.random_bool(0.5) => {
                let at = self.rng.random_range(0..detached);
                let (lock, owner) = self.clients[client].callers[caller].detached.remove(at);
                self.unlock(client, Some(caller), lock, owner);
                self.perhaps_cancel(client, caller, 0.1);
            }
            _ if guards > 0 && self.rng.random_bool(0.6) => {
                let at = self.rng.random_range(0..guards);
                let guard = self.clients[client].callers[caller].guards.remove(at);
                match self.rng.random_range(0..10) {
                    0..4 => {
                        self.release(client, caller, &guard);
                        self.perhaps_cancel(client, caller, 0.1);
                    }
                    4..8 => self.drop_guard(client, &guard),
                    8 => {
                        let task = self.clients[client].callers[caller].task;
                        self.input(client, |engine, now| {
                            engine.use_hold(guard.hold, task);
                            engine.hold_count(now, guard.hold)
                        });
                        self.clients[client].callers[caller].guards.push(guard);
                    }
                    _ => self.detach(client, caller, guard),
                }
            }
            _ if guards < 4 => {
                let lock = self.random_lock();
                let owner = self.pick_owner(client, caller, lock);
                let longest = self.plan.longest_lease;
                let lease = self.rng.random_bool(0.4).then(|| {
                    let lease = longest.mul_f64(self.rng.random_range(0.01..1.0));
                    Duration::from_millis(lease.as_millis().max(1) as u64)
                });
                let wait = match self.rng.random_range(0..10) {
                    0..3 => Wait::AtMost(Duration::ZERO),
                    3..6 => {
                        let wait = self.plan.watchdog.mul_f64(self.rng.random_range(0.0..1.5));
                        Wait::AtMost(wait)
                    }
                    _ => Wait::Unlimited,
                };
                self.acquire(client, caller, lock, owner, lease, wait);
                self.perhaps_cancel(client, caller, 0.2);
            }
            _ => {}
        }
        if self.clients[client].callers[caller].waiting.is_none() {
            self.wake_caller(client, caller);
        }
    }

    fn random_lock(&mut self) -> usize {
        self.rng.random_range(0..self.locks.len())
    }

    fn pick_owner(&mut self, client: usize, caller: usize, lock: usize) -> Owner {
        if self.plan.is_adopted && caller == 0 && client < 2 && lock == 0 {
            let adopted = Owner::from_thread_id(ADOPTED).unwrap();
            if self.may_adopt(client, adopted) {
                self.adopted_by = client;
                return adopted;
            }
        }
        let kind = self.kind_of(lock);
        let kept = match self.rng.random_range(0..10) {
            0..2 => {
                // An owner that two callers share.
                let other = self.rng.random_range(0..self.clients[client].callers.len());
                self.clients[client].callers[other].owner
            }
            2..7 => self.clients[client].callers[caller].owner,
            _ => None,
        };
        if let Some(owner) = kind.owner(kept) {
            return owner;
        }
        let owner = self.new_owner();
        if !self.plan.is_unfenced && self.rng.random_bool(0.6) {
            self.clients[client].callers[caller].owner = Some(owner);
        }
        owner
    }

    /// Whether no other client has anything to do with the adopted owner any more.
    fn may_adopt(&self, client: usize, owner: Owner) -> bool {
        let other = &self.clients[self.adopted_by];
        if self.adopted_by == client {
            return true;
        }
        if other.is_killed {
            // What it sent has to be over: nothing fences the connection of another process.
            return other.link.requests == 0;
        }
        let keys = &self.locks[0];
        let pending = other.tracked.values().any(
            |tracked| matches!(tracked.what, What::Acquire { owner: used, .. } if used == owner),
        );
        other.link.requests == 0
            && !pending
            && !other.engine.knows(keys, owner)
            && self.database.owner(&keys.name).is_none()
    }

    fn perhaps_cancel(&mut self, client: usize, caller: usize, probability: f64) {
        if !self.rng.random_bool(probability) {
            return;
        }
        if let Some(request) = self.clients[client].callers[caller].waiting {
            let after = match self.rng.random_range(0..3) {
                0 => self.plan.latency.mul_f64(self.rng.random_range(0.0..4.0)),
                1 => self
                    .plan
                    .command_timeout
                    .mul_f64(self.rng.random_range(0.0..2.0)),
                _ => Duration::ZERO,
            };
            let at = self.now + after;
            self.push(at, Event::Cancel { client, request });
        }
    }

    pub(super) fn release(&mut self, client: usize, caller: usize, guard: &Guard) {
        self.oracle.end(client, guard.hold);
        let (hold, lock) = (guard.hold, guard.lock);
        let keys = &self.locks[lock];
        let known = self.clients[client].engine.known_owner(keys, guard.owner);
        let is_reported = self.rng.random_bool(0.7);
        self.track(
            client,
            Some(caller),
            What::Release { lock, known },
            |engine, now| engine.release(now, hold, is_reported),
        );
    }

    pub(super) fn drop_guard(&mut self, client: usize, guard: &Guard) {
        self.figures.operations += 1;
        self.note(|_| format!("client {client} drops {:?}", guard.hold));
        self.oracle.end(client, guard.hold);
        self.input(client, |engine, now| engine.drop_hold(now, guard.hold));
    }

    fn detach(&mut self, client: usize, caller: usize, guard: Guard) {
        self.figures.operations += 1;
        self.note(|_| format!("client {client} detaches {:?}", guard.hold));
        self.oracle.detach(client, guard.hold);
        self.input(client, |engine, now| engine.detach(now, guard.hold));
        self.clients[client].callers[caller]
            .detached
            .push((guard.lock, guard.owner));
    }

    /// Unlocks the detached holds that no caller knows of any more: a release that was cancelled,
    /// or took too long, may have been refused later.
    pub(super) fn sweep(&mut self) {
        for client in 0..self.clients.len() {
            if !self.clients[client].is_open() || !self.clients[client].is_running() {
                continue;
            }
            for (name, owner) in self.clients[client].engine.unlockable() {
                let lock = self.locks.iter().position(|keys| keys.name == name);
                self.unlock(client, None, lock.unwrap(), owner);
            }
        }
    }

    fn unlock(&mut self, client: usize, caller: Option<usize>, lock: usize, owner: Owner) {
        if !owner.is_private() && !self.may_adopt(client, owner) {
            return;
        }
        let now = self.now;
        let (keys, kind) = (self.locks[lock].clone(), self.kind_of(lock));
        self.oracle.unlock(now, client, lock, owner);
        self.track(
            client,
            caller,
            What::Unlock { lock, owner },
            |engine, now| engine.unlock(now, &keys, kind, owner),
        );
    }

    /// A caller that has nothing else to do releases what it has, one after the other.
    fn release_one(&mut self, client: usize, caller: usize) {
        if self.clients[client].is_killed {
            return;
        }
        let record = &mut self.clients[client].callers[caller];
        if let Some(guard) = record.guards.pop() {
            if self.rng.random_bool(0.5) {
                self.release(client, caller, &guard);
                return;
            }
            self.drop_guard(client, &guard);
        } else if let Some((lock, owner)) = record.detached.pop() {
            self.unlock(client, Some(caller), lock, owner);
        } else {
            return;
        }
        if self.clients[client].callers[caller].waiting.is_none() {
            self.wake_caller(client, caller);
        }
    }

    /// A request is completed by its engine.
    pub(super) fn completed(&mut self, client: usize, request: RequestId, outcome: Outcome) {
        let outcome = match outcome {
            Outcome::NotReleased(error) => Outcome::Failed(error),
            outcome => outcome,
        };
        let run = self.current_run;
        let tracked = self.clients[client].tracked.get(&request);
        let pending = tracked.filter(|tracked| tracked.state == State::Pending);
        let wrong = pending.and_then(|tracked| self.wrong_end(client, tracked, &outcome));
        if let Some(problem) = wrong {
            self.fail(problem);
        }
        let Some(tracked) = self.clients[client].tracked.get_mut(&request) else {
            // The engine may complete it while it is being submitted; `track` drains afterwards.
            self.fail(format!(
                "{request:?} is completed without being pending: {outcome:?}"
            ));
            return;
        };
        match (tracked.state, &outcome) {
            (State::Pending, Outcome::Granted) => {
                tracked.state = State::Granted;
                tracked.run = run;
                let What::Acquire { lock, owner, .. } = tracked.what else {
                    self.fail(format!("{request:?} acquires nothing and is granted"));
                    return;
                };
                self.figures.grants += 1;
                let id = self.clients[client].id;
                let name = self.locks[lock].name.clone();
                let keys = &self.locks[lock];
                let field = self.clients[client].engine.known_field(keys, owner);
                let is_passed = field != owner_field(id, owner)
                    || self.oracle.grant(run, &name, &field).is_none();
                if is_passed && !self.plan.passing_time.is_zero() {
                    // Under the last grant of the server.
                    if let Some(run) = self.oracle.last_grant(&name, &field) {
                        self.met("passed on");
                        if let Some(tracked) = self.clients[client].tracked.get_mut(&request) {
                            tracked.run = run;
                        }
                    }
                }
                let run = self.clients[client].tracked[&request].run;
                if self.oracle.grant(run, &name, &field).is_none() {
                    self.fail(format!(
                        "{request:?} is granted, and the server did not grant it"
                    ));
                }
                let after = match self.rng.random_range(0..100) {
                    0..85 => Duration::ZERO,
                    85..95 => Duration::from_millis(self.rng.random_range(0..100)),
                    _ => Duration::from_millis(self.rng.random_range(0..3_000)),
                };
                let at = self.now + after;
                self.push(at, Event::Poll { client, request });
                return;
            }
            (State::Granted, Outcome::Unclaimed) => {
                self.met("offer not claimed");
                if let Some(tracked) = self.clients[client].tracked.get_mut(&request) {
                    tracked.state = State::Unclaimed;
                }
                return;
            }
            (State::Granted | State::Unclaimed, Outcome::Failed(Error::Closed))
            | (State::Pending, Outcome::Contended | Outcome::Done | Outcome::Failed(_))
            | (State::Pending, Outcome::Inspected(_) | Outcome::Counted(_) | Outcome::Freed(_)) => {
            }
            (state, outcome) => {
                let problem = format!("{request:?} is {state:?} and completed: {outcome:?}");
                self.fail(problem);
                return;
            }
        }
        let tracked = self.clients[client].tracked.remove(&request).unwrap();
        let is_right = match tracked.what {
            What::Acquire { .. } => matches!(outcome, Outcome::Contended | Outcome::Failed(_)),
            What::Release { .. } | What::Unlock { .. } | What::Close => {
                matches!(outcome, Outcome::Done | Outcome::Failed(_))
            }
            What::Query => {
                matches!(
                    outcome,
                    Outcome::Inspected(_) | Outcome::Counted(_) | Outcome::Failed(_)
                )
            }
            What::Force { .. } => matches!(outcome, Outcome::Freed(_) | Outcome::Failed(_)),
        };
        if !is_right {
            self.fail(format!("{:?} has the outcome {outcome:?}", tracked.what));
        }
        let is_refused = matches!(
            outcome,
            Outcome::Failed(
                Error::Server { .. } | Error::Connection { .. } | Error::OutcomeUnknown { .. }
            )
        );
        if let What::Force { lock } = tracked.what {
            let name = self.locks[lock].name.clone();
            self.clients[client].forced.insert(name);
        }
        if let (Some(lock), Outcome::Failed(Error::Server { error, .. })) =
            (tracked.what.lock(), &outcome)
        {
            let is_of_key = error.message().contains("to access a key");
            if is_of_key && !self.refused_keys.contains(&self.locks[lock].name) {
                self.fail(format!(
                    "{request:?} fails over another lock's key: {error}"
                ));
            }
        }
        let is_not_done = matches!(
            outcome,
            Outcome::Failed(
                Error::Server { .. } | Error::Connection { .. } | Error::Timeout { .. }
            )
        );
        if matches!(tracked.what, What::Force { .. }) && tracked.run != 0 && is_not_done {
            self.fail(format!(
                "{request:?} freed the lock by force, and ends with {outcome:?}"
            ));
        }
        if let (What::Release { lock, known }, Outcome::Done) = (tracked.what, &outcome) {
            let name = &self.locks[lock].name;
            let field = owner_field(self.clients[client].id, known);
            let record = &self.clients[client];
            // A repeated release that finds nothing was done by a copy of it, or is too late.
            let is_repeated = record.health.troubled >= tracked.begun || !record.link.is_up;
            if !is_repeated && !self.oracle.was_seen(client, name, &field, tracked.begun) {
                self.fail(format!(
                    "{request:?} is done, and the server has not seen the hold since"
                ));
            }
        }
        if let What::Release { lock, .. } | What::Unlock { lock, .. } = tracked.what {
            if is_refused {
                let name = self.locks[lock].name.clone();
                self.oracle.leave(client, name);
            }
        }
        if let Some(caller) = tracked.caller {
            let record = &mut self.clients[client].callers[caller];
            record.waiting = None;
            if let What::Unlock { lock, owner } = tracked.what {
                // The hold is there again.
                let is_kept = matches!(
                    outcome,
                    Outcome::Failed(Error::Server { .. } | Error::Connection { .. })
                );
                if is_kept && record.refusals < 20 {
                    record.refusals += 1;
                    record.detached.push((lock, owner));
                }
            }
            self.wake_caller(client, caller);
        }
    }

    /// A run of the client freed a lock by force: for its only request to do so, if there is one.
    pub(super) fn forced(&mut self, client: usize, name: &Bytes, run: u64) {
        let locks = &self.locks;
        if self.clients[client].forced.contains(name) {
            return;
        }
        let mut requests = self.clients[client].tracked.values_mut().filter(
            |tracked| matches!(tracked.what, What::Force { lock } if locks[lock].name == *name),
        );
        if let (Some(tracked), None) = (requests.next(), requests.next()) {
            tracked.run = run;
        }
    }

    /// The caller of a request polls it.
    pub(super) fn poll_request(&mut self, client: usize, request: RequestId) {
        let Some(tracked) = self.clients[client].tracked.get_mut(&request) else {
            return;
        };
        let (run, caller) = (tracked.run, tracked.caller);
        let What::Acquire {
            lock, owner, kind, ..
        } = tracked.what
        else {
            return;
        };
        match tracked.state {
            State::Pending => {}
            State::Unclaimed => {
                tracked.state = State::Pending;
                (tracked.begun, tracked.is_resumed) = (self.now, true);
                // Resumed, it acquires by the same owner once more.
                if self.plan.is_unfenced || self.rng.random_bool(0.2) {
                    self.cancel_request(client, request);
                } else {
                    self.note(|_| format!("client {client} resumes {request:?}"));
                    self.input(client, |engine, now| engine.resume(now, request));
                }
            }
            State::Granted => {
                self.clients[client].tracked.remove(&request);
                let now = self.now;
                let claimed = self.clients[client].engine.claim(now, request);
                self.note(|_| format!("client {client} claims {request:?}: {claimed:?}"));
                match claimed {
                    Ok(grant) => {
                        let tenure = &grant.cell.lease;
                        if kind.has_tokens() {
                            let given = grant.token.map(|token| Token {
                                lock,
                                run,
                                token,
                                tenure: Some(Arc::clone(tenure)),
                            });
                            match given {
                                Some(token) => self.token_given(token),
                                None => self.fail("a guard has no token".to_owned()),
                            }
                        }
                        let keys = &self.locks[lock];
                        let name = &keys.name;
                        let field = self.clients[client].engine.known_field(keys, owner);
                        let born = self.oracle.grant(run, name, &field).unwrap_or_default();
                        self.oracle.sure.push(Sure {
                            client,
                            lock,
                            owner,
                            field,
                            hold: grant.hold,
                            cell: Arc::clone(&grant.cell.lease),
                            run,
                            born,
                            is_detached: false,
                        });
                        let guard = Guard {
                            hold: grant.hold,
                            lock,
                            owner,
                            cell: grant.cell,
                        };
                        match caller {
                            Some(caller) => self.clients[client].callers[caller].guards.push(guard),
                            None => self.drop_guard(client, &guard),
                        }
                    }
                    Err(Error::Lost { .. } | Error::Closed) => {}
                    Err(error) => self.fail(format!("a claim fails: {error:?}")),
                }
                self.input(client, |_, _| ());
                if let Some(caller) = caller {
                    self.clients[client].callers[caller].waiting = None;
                    self.wake_caller(client, caller);
                }
            }
        }
    }

    /// The caller of a request drops it.
    pub(super) fn cancel_request(&mut self, client: usize, request: RequestId) {
        let Some(tracked) = self.clients[client].tracked.remove(&request) else {
            return;
        };
        self.met("request cancelled");
        self.note(|_| format!("client {client} cancels {request:?}"));
        self.input(client, |engine, now| engine.cancel(now, request));
        if let What::Release { lock, .. } | What::Unlock { lock, .. } = tracked.what {
            // Nobody sees how it ends.
            let name = self.locks[lock].name.clone();
            self.oracle.leave(client, name);
        }
        if let What::Force { lock } = tracked.what {
            let name = self.locks[lock].name.clone();
            self.clients[client].forced.insert(name);
        }
        if let Some(caller) = tracked.caller {
            self.clients[client].callers[caller].waiting = None;
            self.wake_caller(client, caller);
        }
    }

    pub(super) fn noticed(&mut self, client: usize, notice: &Notice) {
        if let Notice::RenewalRefused(_, error) = notice {
            let code = error.message().split(' ').next();
            if matches!(code, Some("READONLY" | "NOREPLICAS" | "MISCONF" | "OOM")) {
                let problem = format!("an outage is taken for a refusal of one lock: {error}");
                self.fail(problem);
            }
        }
        let lock = match notice {
            Notice::ReleaseFailed(lock, _) | Notice::NotSettled(lock, _) => lock,
            Notice::ReleaseNotSent(subject, _) => &subject.lock,
            _ => return,
        };
        self.oracle
            .leave(client, Bytes::copy_from_slice(lock.as_bytes()));
    }

    /// The callers of a client begin to release what they have.
    pub(super) fn hurry(&mut self, client: usize) {
        for caller in 0..self.clients[client].callers.len() {
            let record = &self.clients[client].callers[caller];
            let has_holds = !record.guards.is_empty() || !record.detached.is_empty();
            if let (true, Some(request)) = (has_holds, record.waiting) {
                self.cancel_request(client, request);
            }
            self.wake_caller(client, caller);
        }
    }

    pub(super) fn shut_down(&mut self, client: usize) {
        if !self.clients[client].is_running() || !self.clients[client].is_open() {
            return;
        }
        self.met("client is shut down");
        self.clients[client].is_closing = true;
        self.track(client, None, What::Close, |engine, now| engine.close(now));
        for caller in 0..self.clients[client].callers.len() {
            self.wake_caller(client, caller);
        }
    }

    /// Every handle of the client is dropped: those of requests and guards are, too.
    pub(super) fn drop_client(&mut self, client: usize) {
        if !self.clients[client].is_running() || !self.clients[client].is_open() {
            return;
        }
        self.met("client is dropped");
        let requests: Vec<_> = self.clients[client].tracked.keys().copied().collect();
        for request in requests {
            self.cancel_request(client, request);
        }
        for caller in 0..self.clients[client].callers.len() {
            for guard in std::mem::take(&mut self.clients[client].callers[caller].guards) {
                self.drop_guard(client, &guard);
            }
            self.clients[client].callers[caller].detached.clear();
        }
        self.clients[client].is_closing = true;
        self.input(client, |engine, now| engine.abandon(now));
    }

    /// The client's thread has ended: nothing replies any more.
    pub(super) fn client_ended(&mut self, client: usize) {
        let pending: Vec<_> = self.clients[client]
            .tracked
            .iter()
            .filter(|(_, tracked)| tracked.state == State::Pending)
            .map(|(id, tracked)| format!("{id:?} {:?}", tracked.what))
            .collect();
        if !pending.is_empty() {
            self.fail(format!(
                "client {client} has ended, and these never end: {pending:?}"
            ));
        }
    }

    /// Long after the faults have ended.
    pub(super) fn callers_are_over(&mut self) {
        for client in 0..self.clients.len() {
            if self.clients[client].is_killed {
                continue;
            }
            let pending: Vec<_> = self.clients[client].tracked.values().collect();
            if !pending.is_empty() {
                let problem = format!("client {client}: requests never end: {pending:?}");
                self.fail(problem);
            }
        }
    }
}
