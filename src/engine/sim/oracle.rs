//! Looks at the world after each step, and says what must not be.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::super::HoldId;
use super::callers::State;
use super::server::Key;
use super::world::World;
use crate::keys::Keys;
use crate::lease_cell::LeaseCell;
use crate::owner::{Owner, thread_of};
use crate::script::catalog::{
    ACQUIRE, FENCED_ACQUIRE, FORCE_UNLOCK, RELEASE, RENEW, SIMPLE_ACQUIRE, SIMPLE_RELEASE,
    SIMPLE_RENEW,
};
use crate::time::Time;
use crate::wire::Call;

/// A hold from its claim until its release begins. Its owner is sure of it while it is not lost.
#[derive(Debug)]
pub(super) struct Sure {
    pub(super) client: usize,
    pub(super) lock: usize,
    pub(super) owner: Owner,
    pub(super) field: Bytes,
    pub(super) hold: HoldId,
    pub(super) cell: Arc<LeaseCell>,
    /// The run of the script that granted it.
    pub(super) run: u64,
    /// The key that it made or found.
    pub(super) born: u64,
    pub(super) is_detached: bool,
}

/// A fencing token of a guard, or of an acquisition of Redisson.
#[derive(Debug)]
pub(super) struct Token {
    pub(super) lock: usize,
    /// The run of the script that granted.
    pub(super) run: u64,
    pub(super) token: i64,
    /// The guard's tenure. Redisson raises the token with each acquisition.
    pub(super) tenure: Option<Arc<LeaseCell>>,
}

/// The last run that took a lock from an owner by force.
#[derive(Debug)]
struct Taken {
    name: Bytes,
    field: Bytes,
    run: u64,
}

/// What a run granted.
#[derive(Debug)]
struct Granted {
    name: Bytes,
    field: Bytes,
    born: u64,
}

/// Whether the key is the counter of the tokens of a lock.
pub(super) fn is_counter(name: &[u8]) -> bool {
    name.starts_with(b"redisson_lock_token:")
}

#[derive(Debug, Default)]
pub(super) struct Oracle {
    pub(super) sure: Vec<Sure>,
    /// What was taken from an owner by force.
    taken: Vec<Taken>,
    /// The runs that granted.
    granted: BTreeMap<u64, Vec<Granted>>,
    /// The runs of renewals that found an owner without the lock.
    disproved: Vec<(u64, Bytes, Bytes)>,
    /// The tokens that were given.
    tokens: Vec<Token>,
    /// The run that made the counters of tokens begin again.
    tokens_since: u64,
    /// The clients whose wait queue learned last that another program holds the lock, which
    /// publishes no release.
    foreign: BTreeSet<(usize, Bytes)>,
    /// Where a client may have left something until the lease ends.
    left: BTreeSet<(usize, Bytes)>,
    /// Since when a lock is free whose release was published.
    freed: BTreeMap<Bytes, Time>,
    /// When a renewal or a release of a client found the lock held by that owner last.
    seen: BTreeMap<(usize, Bytes, Bytes), Time>,
}

impl Oracle {
    /// The release of a hold begins.
    pub(super) fn end(&mut self, client: usize, hold: HoldId) {
        self.sure
            .retain(|sure| sure.client != client || sure.hold != hold);
    }

    pub(super) fn detach(&mut self, client: usize, hold: HoldId) {
        for sure in &mut self.sure {
            if sure.client == client && sure.hold == hold {
                sure.is_detached = true;
            }
        }
    }

    /// A detached hold is unlocked, one that is not lost if there is one.
    pub(super) fn unlock(&mut self, now: Time, client: usize, lock: usize, owner: Owner) {
        let is_one = |sure: &Sure| {
            sure.is_detached && sure.client == client && sure.lock == lock && sure.owner == owner
        };
        let at = self
            .sure
            .iter()
            .position(|sure| is_one(sure) && sure.is_sure(now))
            .or_else(|| self.sure.iter().position(is_one));
        if let Some(at) = at {
            self.sure.remove(at);
        }
    }

    /// Whether a renewal or a release of the client has found the lock held by that owner since.
    pub(super) fn was_seen(&self, client: usize, name: &Bytes, field: &Bytes, since: Time) -> bool {
        let key = (client, name.clone(), field.clone());
        self.seen.get(&key).is_some_and(|at| *at >= since)
    }

    pub(super) fn forget_client(&mut self, client: usize) {
        self.sure.retain(|sure| sure.client != client);
    }

    /// The key of the lock that the run granted to that owner.
    pub(super) fn grant(&self, run: u64, name: &Bytes, field: &Bytes) -> Option<u64> {
        self.granted
            .get(&run)?
            .iter()
            .find(|granted| granted.name == name && granted.field == field)
            .map(|granted| granted.born)
    }

    /// The last run that granted the lock to that owner.
    pub(super) fn last_grant(&self, name: &Bytes, field: &Bytes) -> Option<u64> {
        let is_one = |granted: &Granted| granted.name == name && granted.field == field;
        let mut runs = self.granted.iter().rev();
        runs.find(|(_, granted)| granted.iter().any(is_one))
            .map(|(run, _)| *run)
    }

    /// The server lost its data: the tokens begin again.
    pub(super) fn forget_tokens(&mut self, run: u64) {
        self.tokens.clear();
        self.tokens_since = run;
    }

    pub(super) fn leave(&mut self, client: usize, name: Bytes) {
        self.left.insert((client, name));
    }

    pub(super) fn published(&mut self, now: Time, channel: &Bytes, locks: &[Keys]) {
        for keys in locks.iter().filter(|keys| keys.channel == *channel) {
            self.freed.insert(keys.name.clone(), now);
        }
    }

    /// The last run that took the lock from that owner by force.
    fn last_taken(&self, name: &Bytes, field: &Bytes) -> Option<u64> {
        let mut taken = self.taken.iter();
        let taken = taken.find(|taken| taken.field == field && taken.name == name)?;
        Some(taken.run)
    }

    fn take(&mut self, name: Bytes, field: Bytes, run: u64) {
        self.taken
            .retain(|taken| taken.field != field || taken.name != name);
        self.taken.push(Taken { name, field, run });
    }

    fn was_taken(&self, name: &Bytes, field: &Bytes, run: u64) -> bool {
        self.last_taken(name, field)
            .is_some_and(|taken| taken > run)
    }
}

impl Sure {
    fn is_sure(&self, now: Time) -> bool {
        self.cell.proved_until().is_some_and(|until| now < until)
    }
}

impl World {
    /// Takes in what a command did: `before` has the owners before it. Without a call another
    /// program changed the keys.
    pub(super) fn ran(
        &mut self,
        call: Option<(usize, &Call)>,
        before: Vec<(Bytes, Option<Bytes>)>,
        run: u64,
    ) {
        let is = |script: &'static crate::script::Script| {
            call.is_some_and(|(_, call)| call.script == script.source())
        };
        // A simple lock is released and freed by force with the same script.
        let is_renewal = is(&RENEW) || is(&SIMPLE_RENEW);
        let (is_release, is_force) = (is(&RELEASE), is(&FORCE_UNLOCK) || is(&SIMPLE_RELEASE));
        self.touched = u32::MAX;
        // Of what this library frees, waiters are notified, unless the server refuses that.
        let is_published = (is_release || is_force)
            && !self
                .database
                .denied
                .iter()
                .any(|(name, _)| *name == "publish");
        for (at, (name, owner)) in before.into_iter().enumerate() {
            let after = self.database.owner(&name).map(|(field, _)| field.clone());
            if is_published && owner.is_some() && !self.database.keys.contains_key(&name) {
                self.oracle.freed.insert(name.clone(), self.now);
            }
            if let (Some((client, _)), true) = (call, is(&FORCE_UNLOCK)) {
                if owner.is_some() && after.is_none() {
                    self.forced(client, &name, run);
                }
            }
            if let (Some((client, _)), Some(field), true) = (
                call,
                &owner,
                is_renewal || is_release || is(&SIMPLE_RELEASE),
            ) {
                let key = (client, name.clone(), field.clone());
                self.oracle.seen.insert(key, self.now);
            }
            if let Some(field) = owner.filter(|owner| after.as_ref() != Some(owner)) {
                // A client loses its own holds before it frees its own owner by force, unless it
                // frees any owner. Two clients with one id do not know the owners of each other.
                let is_own = call.is_some_and(|(client, call)| {
                    is_force
                        && !(self.plan.is_adopted && client < 2)
                        && !call.args[2 * at].is_empty()
                        && thread_of(&field, self.clients[client].id).is_some()
                });
                let is_taken = call.is_none() || (is_force && !is_own);
                if is_taken && self.plan.has_excuses {
                    self.oracle.take(name.clone(), field, run);
                }
            }
            let row = if is(&ACQUIRE) {
                Some(4)
            } else if is(&FENCED_ACQUIRE) {
                Some(5)
            } else {
                is(&SIMPLE_ACQUIRE).then_some(2)
            };
            if let (true, Some((_, call))) = (is_renewal, call) {
                let field = &call.args[2 * at];
                if after.as_ref() != Some(field) {
                    let disproved = (run, name.clone(), field.clone());
                    self.oracle.disproved.push(disproved);
                }
            }
            if let (Some(row), Some(field), Some((client, call))) = (row, after, call) {
                let owner = &call.args[row * at];
                if self.clients[client].engine.attempting(&name).as_ref() == Some(owner) {
                    let key = (client, name.clone());
                    if self.programs.iter().any(|program| program.token == field) {
                        self.oracle.foreign.insert(key);
                    } else {
                        self.oracle.foreign.remove(&key);
                    }
                }
                if field == owner {
                    // This client's release is published.
                    self.oracle.foreign.remove(&(client, name.clone()));
                    let born = self.database.born(&name).unwrap_or_default();
                    let granted = Granted {
                        name: name.clone(),
                        field,
                        born,
                    };
                    self.oracle.granted.entry(run).or_default().push(granted);
                }
            }
            if self.database.keys.contains_key(&name) {
                self.oracle.freed.remove(&name);
            }
        }
    }

    /// The same for a command that takes nothing from others.
    pub(super) fn changed(&mut self, name: &Bytes) {
        if self.database.keys.contains_key(name) {
            self.oracle.freed.remove(name);
        }
    }

    /// The reply of a run has arrived: an owner of which a renewal found nothing is not sure.
    pub(super) fn replied(&mut self, client: usize, run: u64) {
        let now = self.now;
        let (disproved, others) = std::mem::take(&mut self.oracle.disproved)
            .into_iter()
            .partition(|(other, ..)| *other == run);
        self.oracle.disproved = others;
        let disproved: Vec<(u64, Bytes, Bytes)> = disproved;
        for (_, name, field) in disproved {
            let mut sure = self.oracle.sure.iter();
            let sure = sure.find(|sure| {
                sure.client == client
                    && sure.field == field
                    && self.locks[sure.lock].name == name
                    && sure.run < run
                    && sure.is_sure(now)
            });
            if let Some(sure) = sure {
                let problem = format!("a renewal found no lock, and its owner is sure: {sure:?}");
                self.fail(problem);
                return;
            }
        }
    }

    /// Tokens rise from tenure to tenure, of any owner; all guards of one have the same.
    pub(super) fn token_given(&mut self, given: Token) {
        let is_right = |other: &&Token| match (&other.tenure, &given.tenure) {
            (Some(tenure), Some(this)) if Arc::ptr_eq(tenure, this) => other.token == given.token,
            _ => (other.run < given.run) == (other.token < given.token),
        };
        if given.run < self.oracle.tokens_since {
            return;
        }
        let mut others = self.oracle.tokens.iter();
        let wrong = others.find(|other| other.lock == given.lock && !is_right(other));
        if let Some(other) = wrong {
            let problem = format!("the token of {given:?} does not follow that of {other:?}");
            self.fail(problem);
        }
        self.oracle.tokens.push(given);
    }

    /// What must hold after each step.
    pub(super) fn check(&mut self) {
        if self.violation.is_some() {
            return;
        }
        // What an engine records, or what the server has, has to have changed.
        if self.touched != 0 || self.has_changed {
            if let Some(problem) = self.find_problem() {
                self.fail(problem);
            }
        }
        self.touched = 0;
        self.has_changed = false;
    }

    fn find_problem(&self) -> Option<String> {
        self.check_owners().or_else(|| {
            (0..self.clients.len())
                .filter(|client| {
                    self.touched & (1 << client) != 0 && self.clients[*client].is_running()
                })
                .find_map(|client| self.check_client(client))
        })
    }

    /// No owner is sure of a lock that the server does not have for it.
    fn check_owners(&self) -> Option<String> {
        let now = self.now;
        for (at, sure) in self.oracle.sure.iter().enumerate() {
            if !sure.is_sure(now) {
                continue;
            }
            let name = &self.locks[sure.lock].name;
            if self.oracle.was_taken(name, &sure.field, sure.run) {
                continue;
            }
            let same = self.oracle.sure[..=at].iter().filter(|other| {
                other.lock == sure.lock
                    && other.field == sure.field
                    && other.is_sure(now)
                    && !self.oracle.was_taken(name, &other.field, other.run)
            });
            let holds = same.count() as i64;
            let owner = self.database.owner(name);
            let count = owner.filter(|(field, _)| **field == sure.field);
            if count.is_none_or(|(_, count)| count < holds) {
                return Some(format!(
                    "client {} is sure of {holds} holds of {:?}, the server has {owner:?}: {sure:?}",
                    sure.client, sure.field
                ));
            }
            if self.database.born(name) != Some(sure.born) {
                return Some(format!(
                    "client {} is sure of a tenure that is over, the owner has another: {sure:?}",
                    sure.client
                ));
            }
            let rival = self.oracle.sure[..at].iter().find(|other| {
                other.lock == sure.lock
                    && (other.field != sure.field || other.owner != sure.owner)
                    && other.is_sure(now)
                    && !self.oracle.was_taken(name, &other.field, other.run)
            });
            if let Some(rival) = rival {
                return Some(format!("two owners are sure: {sure:?} and {rival:?}"));
            }
        }
        for (actor, foreign) in self.foreign.iter().enumerate() {
            if foreign.holds == 0 || now >= foreign.proved_until {
                continue;
            }
            let name = &self.locks[foreign.lock].name;
            if self.oracle.was_taken(name, &foreign.field, foreign.run) {
                continue;
            }
            let owner = self.database.owner(name);
            let count = owner.filter(|(field, _)| **field == foreign.field);
            if count.is_none_or(|(_, count)| count < foreign.holds) {
                return Some(format!(
                    "the lock of Redisson {actor} was taken, the server has {owner:?}"
                ));
            }
        }
        for (actor, program) in self.programs.iter().enumerate() {
            let name = &self.locks[program.lock].name;
            let (token, run) = (&program.token, program.run);
            if !program.is_sure(now) || self.oracle.was_taken(name, token, run) {
                continue;
            }
            let owner = self.database.owner(name);
            if owner != Some((token, 1)) {
                return Some(format!(
                    "the lock of program {actor} was taken, the server has {owner:?}"
                ));
            }
        }
        None
    }

    fn check_client(&self, client: usize) -> Option<String> {
        let record = &self.clients[client];
        let engine = &record.engine;
        let problem = engine.inconsistency(|request| {
            record
                .tracked
                .get(&request)
                .is_some_and(|tracked| tracked.state == State::Unclaimed)
        });
        if problem.is_some() {
            return problem.map(|problem| format!("client {client}: {problem}"));
        }
        for queue in engine.queues() {
            if queue.has_attempt {
                continue;
            }
            let key = (client, queue.name.clone());
            let bound = match self.plan.recheck {
                // A late copy of an older attempt may have run last.
                _ if !self.plan.is_unfenced
                    && !queue.is_passed
                    && self.oracle.foreign.contains(&key) =>
                {
                    Duration::from_millis(100)
                }
                Some(recheck) => recheck,
                None if queue.is_confirmed => Duration::from_secs(30),
                None => Duration::from_secs(1),
            };
            if queue.look_at.is_none_or(|at| at > self.now + bound) {
                return Some(format!(
                    "client {client}: a waiter sleeps too long: {queue:?}"
                ));
            }
            let messages = &record.link.messages;
            let channel = self.locks.iter().find(|keys| keys.name == queue.name);
            let since = channel.and_then(|keys| messages.at_server.get(&keys.channel));
            if let (Some(since), Some(freed)) = (since, self.oracle.freed.get(&queue.name)) {
                // Whether the release came before the subscription or after it: the confirmation
                // or the message is the reason for an attempt. After messages were missed the
                // head looks within a second.
                let bound = if messages.trusted_since < *freed {
                    self.now
                } else {
                    messages.trusted_since + Duration::from_secs(1)
                };
                if queue.is_confirmed
                    && !queue.is_passed
                    && *since <= self.now
                    && messages.pending == 0
                    && queue.look_at.is_none_or(|at| at > bound)
                    && !self.database.keys.contains_key(&queue.name)
                {
                    return Some(format!(
                        "client {client}: a wake-up was lost, the lock is free since {freed:?}: \
                         {queue:?}"
                    ));
                }
            }
        }
        if record.link.requests > 0 {
            return None;
        }
        for held in engine.recorded(self.now) {
            let key = (held.name, held.field);
            let is_left = self.oracle.left.contains(&(client, key.0.clone()));
            if is_left || self.oracle.last_taken(&key.0, &key.1).is_some() {
                continue;
            }
            let owner = self.database.owner(&key.0);
            if owner != Some((&key.1, held.count)) {
                return Some(format!(
                    "client {client} has the count {} of {:?}, the server {owner:?}",
                    held.count, key.1
                ));
            }
        }
        // A late copy of an acquire leaves what no owner knows, until its lease ends.
        if record.is_open() && !self.plan.is_adopted && !self.plan.is_unfenced {
            for (keys, name) in self.locks.iter().map(|keys| (keys, &keys.name)) {
                let Some((field, _)) = self.database.owner(name) else {
                    continue;
                };
                let Some(thread) = thread_of(field, record.id) else {
                    continue;
                };
                let is_left = self.oracle.left.contains(&(client, name.clone()));
                let owner = Owner::from_thread_id(thread).unwrap();
                if !is_left && !engine.knows(keys, owner) {
                    return Some(format!(
                        "client {client} left {field:?} on the server, and does not know it"
                    ));
                }
            }
        }
        None
    }

    /// What must hold long after everything has stopped.
    pub(super) fn check_rest(&mut self) {
        self.touched = u32::MAX;
        self.check();
        let is_left = |(name, key): (&Bytes, &Key)| !is_counter(name) || key.expires.is_some();
        if self.database.keys.iter().any(is_left) {
            self.fail(format!("keys are left: {:?}", self.database.keys));
        }
        for client in 0..self.clients.len() {
            let record = &self.clients[client];
            let problem = if record.is_killed {
                None
            } else if record.is_closing {
                (!record.has_ended).then(|| "the client does not end".to_owned())
            } else if !record.engine.is_empty() {
                Some(format!("something is left: {}", record.engine.remains()))
            } else if record.engine.has_timers() {
                Some("a timer is left".to_owned())
            } else if !record.link.messages.at_server.is_empty() {
                Some("a subscription is left".to_owned())
            } else {
                let stats = record.engine.stats();
                (stats.locks_held != 0 || stats.requests_waiting != 0)
                    .then(|| format!("the counters are wrong: {stats:?}"))
            };
            if let Some(problem) = problem {
                self.fail(format!("at rest, client {client}: {problem}"));
            }
        }
    }
}
