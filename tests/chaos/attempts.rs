//! The attempts of a history: all events of each of them, and when each may have happened.

use std::collections::{HashMap, HashSet};
use std::sync::OnceLock;

use super::forced::{CLOCK, Force, ForcedLoss};
use super::history::{
    CLOCK_SET, Event, Fault, History, Line, MS, NO_SCRIPTS, Nanos, STALLED, STOPPED, Sample,
    slot_of,
};
use super::worker::passes_on;

/// How long a process must have had no fault until its background has settled every unknown
/// outcome.
pub const SETTLED: Nanos = 1_000 * MS;

/// How long a process may take, after a stop, to write down what happened before the stop.
const WRITTEN: Nanos = 1_000 * MS;

/// How long the release of a grant may take whose caller has gone.
pub const SETTLEMENT: Nanos = 20_000 * MS;

/// How long the server may answer no look until that counts as a fault.
const STALL: Nanos = 300 * MS;

/// One attempt to acquire a lock, with all that followed. (An attempt of the history is one call of
/// the library, which may run the acquire script several times.)
#[derive(Debug, Clone, Default)]
pub struct Attempt {
    /// Computed once: many rules use it.
    may_hold_until: OnceLock<Nanos>,
    grant: OnceLock<Option<Grant>>,
    pub forced_losses: OnceLock<Vec<ForcedLoss>>,
    pub process: u64,
    pub lock: usize,
    pub owner: String,
    /// What the server has for the owner: its name or, if its client passes locks on, that of the
    /// client, since the server may know the owner by the name of an earlier one.
    pub field: String,
    pub how: String,
    pub lease: Nanos,
    /// Whether the lease is renewed.
    pub renewed: bool,
    pub invoked: Nanos,
    pub granted: Option<Nanos>,
    /// The end of its last claim.
    pub sure_until: Nanos,
    /// Its claims that the lock is not lost: when each was made, and when it ends.
    pub claims: Vec<(Nanos, Nanos)>,
    /// When the acquire ended without a grant, and whether it is certain that it left nothing.
    pub ended: Option<(Nanos, bool)>,
    /// Whether the acquire reported that another owner holds the lock.
    pub contended: bool,
    /// When the acquire failed for another reason, or its outcome was unknown; and the message.
    pub error: Option<(Nanos, String)>,
    pub lost: Option<Loss>,
    pub releasing: Option<Nanos>,
    pub released: Option<(Nanos, String)>,
    pub sections: Vec<Section>,
    /// When the future of a `run` took a step.
    pub steps: Vec<Nanos>,
}

/// The interval in which the server granted an attempt. The line of the history says little about
/// it: the process may read the reply long after the grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// The server did not grant it before.
    pub from: Nanos,
    /// The server had granted it by then.
    pub to: Nanos,
}

/// A loss that its owner reported.
#[derive(Debug, Clone)]
pub struct Loss {
    pub at: Nanos,
    /// Whether the owner's clock ended the tenure: no renewal was confirmed in time, or the lease
    /// was not renewed. Otherwise a reply of the server reported the loss.
    pub expired: bool,
}

/// A guarded read and write of the lock's register.
#[derive(Debug, Clone, Default)]
pub struct Section {
    pub began: Nanos,
    /// When it ended, the number that it read, and whether the lock was held all the time.
    pub ended: Option<(Nanos, u64, bool)>,
}

impl Attempt {
    /// The time in which its owner was sure of the lock: from the return of the acquire until the
    /// invocation of the release, if that was confirmed; otherwise no longer than the last claim.
    pub fn sure(&self) -> Option<(Nanos, Nanos)> {
        let from = self.granted?;
        let to = match (&self.released, self.releasing) {
            (Some((_, outcome)), Some(releasing)) if outcome == "ok" => releasing,
            (_, Some(releasing)) => releasing.min(self.sure_until),
            (_, None) => self.sure_until,
        };
        (from < to).then_some((from, to))
    }

    /// When the acquire returned.
    pub fn answered(&self) -> Option<Nanos> {
        self.granted.or(self.ended.map(|(at, _)| at))
    }
}

/// What the rules need to know about a history.
pub struct Analysis<'a> {
    pub attempts: Vec<Attempt>,
    pub forces: Vec<Force>,
    places: HashMap<(u64, u64), usize>,
    of_field: HashMap<(usize, String), Vec<usize>>,
    pub history: &'a History,
    /// The looks of the history, with [fields](Attempt::field) for owners.
    pub samples: Vec<Sample>,
    killed: HashMap<u64, Nanos>,
    longest_lease: Nanos,
    /// The faults that each slot met, in the order of their beginnings.
    faults: HashMap<u64, Vec<Fault>>,
}

impl<'a> Analysis<'a> {
    pub fn new(history: &'a History) -> Self {
        let mut lines: Vec<&Line> = history.lines.iter().collect();
        lines.sort_by_key(|line| line.at);
        let mut attempts: Vec<Attempt> = Vec::new();
        let mut places: HashMap<(u64, u64), usize> = HashMap::new();
        let mut of_owner: HashMap<(usize, String), Vec<usize>> = HashMap::new();
        let mut of_field: HashMap<(usize, String), Vec<usize>> = HashMap::new();
        let mut passing: HashSet<&str> = HashSet::new();
        let mut longest_lease = 0;
        // The invocations first: an event may have the same time as the one before it.
        for line in &lines {
            if let Event::Invoked {
                lock,
                owner,
                how,
                lease,
                renewed,
            } = &line.event
            {
                longest_lease = longest_lease.max(*lease);
                places.insert((line.process, line.attempt), attempts.len());
                let field = if passes_on(slot_of(line.process)) {
                    passing.insert(client(owner));
                    client(owner)
                } else {
                    owner
                };
                let same = of_owner.entry((*lock, owner.clone())).or_default();
                same.push(attempts.len());
                let same = of_field.entry((*lock, field.to_owned())).or_default();
                same.push(attempts.len());
                attempts.push(Attempt {
                    process: line.process,
                    lock: *lock,
                    owner: owner.clone(),
                    field: field.to_owned(),
                    how: how.clone(),
                    lease: *lease,
                    renewed: *renewed,
                    invoked: line.at,
                    ..Attempt::default()
                });
            }
        }
        for Line {
            at,
            process,
            attempt,
            event,
        } in &lines
        {
            if let Some(place) = places.get(&(*process, *attempt)) {
                attempts[*place].take(*at, event);
            }
        }
        for same in of_owner.values() {
            for other in same {
                let Attempt {
                    invoked,
                    releasing,
                    ended,
                    ..
                } = attempts[*other];
                let until = ended.map_or(Nanos::MAX, |(at, _)| at.saturating_add(SETTLEMENT));
                for own in same.iter().filter(|own| *own != other) {
                    if !attempts[*own].claims.is_empty() && (releasing.is_some() || ended.is_some())
                    {
                        attempts[*own].lower_claims((invoked, until), releasing);
                    }
                }
            }
        }
        let mut samples = history.samples.clone();
        for key in samples.iter_mut().flat_map(|look| &mut look.held) {
            if passing.contains(client(&key.owner)) {
                key.owner = client(&key.owner).to_owned();
            }
        }
        let killed = history.killed.iter().copied().collect();
        let mut met: Vec<_> = history
            .faults
            .iter()
            .filter(|fault| fault.met)
            .cloned()
            .collect();
        met.extend(stalls(history));
        met.sort_by_key(|fault| fault.from);
        let mut faults: HashMap<u64, Vec<Fault>> = HashMap::new();
        for line in &lines {
            let slot = slot_of(line.process);
            faults.entry(slot).or_insert_with(|| {
                let own = |fault: &&Fault| fault.slot.is_none_or(|of| of == slot);
                met.iter().filter(own).cloned().collect()
            });
        }
        let mut analysis = Self {
            attempts,
            forces: Vec::new(),
            places,
            of_field,
            history,
            samples,
            killed,
            longest_lease,
            faults,
        };
        for Line {
            at,
            process,
            attempt,
            event,
        } in lines
        {
            match event {
                Event::Forcing { lock } => {
                    // Unless a later line says when it ended.
                    let to = analysis
                        .killed(*process)
                        .map_or(Nanos::MAX, |killed| analysis.settled(*process, killed));
                    let (process, attempt) = (*process, *attempt);
                    let force = Force {
                        process,
                        attempt,
                        lock: *lock,
                        from: *at,
                        to,
                        freed: true,
                        answer: None,
                    };
                    analysis.forces.push(force);
                }
                Event::Forced { outcome } => {
                    let unknown = outcome == "unknown";
                    let to = if unknown {
                        analysis.settled(*process, *at)
                    } else {
                        *at
                    };
                    let mut forces = analysis.forces.iter_mut();
                    if let Some(force) =
                        forces.rfind(|force| (force.process, force.attempt) == (*process, *attempt))
                    {
                        let freed = outcome == "freed";
                        (force.to, force.freed) = (to, unknown || freed);
                        force.answer = (freed || outcome == "free").then_some(freed);
                    }
                }
                _ => {}
            }
        }
        analysis.forces.extend(analysis.clock_steps());
        analysis
    }

    /// The steps of the wall clock. Like a force unlock, each may end one tenure of each lock,
    /// until the leases of that time have ended.
    fn clock_steps(&self) -> Vec<Force> {
        let locks = self.attempts.iter().map(|attempt| attempt.lock + 1).max();
        let faults = self.history.faults.iter();
        let steps = faults.filter(|fault| fault.kind == CLOCK_SET);
        steps
            .flat_map(|step| {
                (0..locks.unwrap_or(0)).map(|lock| Force {
                    process: CLOCK,
                    attempt: 0,
                    lock,
                    from: step.from,
                    to: step.to + self.longest_lease,
                    freed: true,
                    answer: None,
                })
            })
            .collect()
    }

    /// The attempt to which a process gave that number.
    pub fn attempt(&self, process: u64, attempt: u64) -> Option<&Attempt> {
        self.places
            .get(&(process, attempt))
            .map(|place| &self.attempts[*place])
    }

    /// All attempts to acquire the same lock for what is one owner to the server, including this
    /// one.
    pub fn same_field(&self, attempt: &Attempt) -> impl Iterator<Item = &Attempt> {
        let same = self.of_field.get(&(attempt.lock, attempt.field.clone()));
        let same = same.map_or(&[][..], Vec::as_slice).iter();
        same.map(|place| &self.attempts[*place])
    }

    /// When a process was killed, if it was.
    pub fn killed(&self, process: u64) -> Option<Nanos> {
        self.killed.get(&process).copied()
    }

    /// Until when an attempt may have a hold on the server; `Nanos::MAX` if that never ends.
    pub fn may_hold_until(&self, attempt: &Attempt) -> Nanos {
        *attempt
            .may_hold_until
            .get_or_init(|| self.find_may_hold_until(attempt))
    }

    fn find_may_hold_until(&self, attempt: &Attempt) -> Nanos {
        let unclear_since = match (attempt.ended, &attempt.released, attempt.releasing) {
            (Some((at, true)), ..) => return at,
            // A `run` may return its result before its release has reached the server.
            (_, Some((at, outcome)), _) if outcome == "ok" && attempt.how != "run" => return *at,
            (Some((at, false)), ..) => Some(at),
            (None, released, releasing) => released.as_ref().map(|(at, _)| *at).or(releasing),
        };
        let settled = unclear_since.map(|since| {
            let since = since.max(attempt.lost.as_ref().map_or(0, |lost| lost.at));
            let settled = self.settled(attempt.process, since);
            // A hold whose release the server refuses stays until its lease ends.
            let mut refusals = self
                .faults_of(attempt.process)
                .filter(|fault| fault.kind == NO_SCRIPTS);
            let refused = refusals.rfind(|fault| fault.from <= settled && fault.to >= since);
            refused.map_or(settled, |fault| {
                settled.max(fault.to + self.longest_lease + 1_000 * MS)
            })
        });
        match (settled, self.killed(attempt.process)) {
            (Some(settled), Some(killed)) if settled <= killed => settled,
            (_, Some(killed)) => self.expired(attempt.process, killed),
            (Some(settled), None) => settled,
            (None, None) => Nanos::MAX,
        }
    }

    /// When the server granted an attempt: between its invocation and its line or, if the looks
    /// show more, between two of them.
    pub fn grant(&self, attempt: &Attempt) -> Option<Grant> {
        *attempt.grant.get_or_init(|| self.find_grant(attempt))
    }

    fn find_grant(&self, attempt: &Attempt) -> Option<Grant> {
        let line = attempt.granted?;
        let samples = &self.samples;
        let first = samples.partition_point(|look| look.from < attempt.invoked);
        let looks = samples[first..].iter().take_while(|look| look.to <= line);
        let has = |look: &Sample| {
            let mut keys = look.held.iter();
            keys.any(|key| key.lock == attempt.lock && key.owner == attempt.field)
        };
        let forces: Vec<&Force> = self
            .forces
            .iter()
            .filter(|force| force.freed && force.lock == attempt.lock)
            .filter(|force| force.from <= line && force.to >= attempt.invoked)
            .collect();
        // The hold may have begun and ended between two looks that do not show it.
        let unseen = |from: Nanos, to: Nanos| {
            to - from >= attempt.lease
                || forces
                    .iter()
                    .any(|force| force.from <= to && force.to >= from)
        };
        let mut from = attempt.invoked;
        for look in looks.clone() {
            if has(look) || unseen(from, look.to) {
                break;
            }
            from = look.from;
        }
        // A look may show another owner of a client that passes locks on.
        let is_own = attempt.field == attempt.owner;
        let mut seen = looks.filter(|look| look.from >= from && has(look));
        let seen = seen.next().filter(|_| is_own);
        let to = seen.map_or(line, |look| look.to);
        Some(Grant { from, to })
    }

    /// The grants of a lock to owners that were sure of it, in the order of the ends of their
    /// intervals.
    pub fn grants(&self, lock: usize) -> Vec<(Grant, &Attempt)> {
        let of_lock = self.attempts.iter().filter(|attempt| attempt.lock == lock);
        let sure = of_lock.filter(|attempt| attempt.sure().is_some());
        let mut grants: Vec<_> = sure
            .filter_map(|attempt| self.grant(attempt).map(|grant| (grant, attempt)))
            .collect();
        grants.sort_by_key(|(grant, _)| grant.to);
        grants
    }

    /// The earliest time of an event that a process wrote down at that time: the process may have
    /// been stopped between the two.
    pub fn written_since(&self, process: u64, at: Nanos) -> Nanos {
        let stops = self
            .faults_of(process)
            .filter(|fault| fault.kind == STOPPED);
        stops.rev().fold(at, |since, stop| {
            if stop.from < since && stop.to + WRITTEN > since {
                stop.from
            } else {
                since
            }
        })
    }

    /// Until when a write that began by then may still reach the server.
    pub fn may_write_until(&self, attempt: &Attempt, since: Option<Nanos>) -> Nanos {
        let since = since
            .or(attempt.ended.map(|(at, _)| at))
            .or(attempt.released.as_ref().map(|(at, _)| *at));
        match (since, self.killed(attempt.process)) {
            (Some(since), _) => self.settled(attempt.process, since),
            (None, Some(killed)) => self.expired(attempt.process, killed),
            (None, None) => Nanos::MAX,
        }
    }

    /// The first time after `since` at which the process has been without a fault for long enough.
    fn settled(&self, process: u64, since: Nanos) -> Nanos {
        let mut settled = since + SETTLED;
        // One pass is enough: the faults are in the order of their beginnings.
        for fault in self.faults_of(process) {
            if fault.to + SETTLED > settled && fault.from < settled {
                settled = fault.to + SETTLED;
            }
        }
        settled
    }

    /// When all leases of a process that was killed then have ended, including those of calls that
    /// were still on their way to the server.
    fn expired(&self, process: u64, killed: Nanos) -> Nanos {
        /// What a fault lets go may meet the next one on its way.
        const ON_ITS_WAY: Nanos = 500 * MS;
        let mut arrived = killed;
        for fault in self.faults_of(process) {
            if fault.from <= arrived + ON_ITS_WAY {
                arrived = arrived.max(fault.to);
            }
        }
        arrived + self.longest_lease + 1_000 * MS
    }

    /// The faults that a process has met, in the order of their beginnings.
    pub fn faults_of(&self, process: u64) -> impl DoubleEndedIterator<Item = &Fault> {
        let faults = self.faults.get(&slot_of(process));
        faults.map_or(&[][..], Vec::as_slice).iter()
    }
}

/// The client of an owner.
fn client(owner: &str) -> &str {
    owner.split_once(':').map_or(owner, |(client, _)| client)
}

/// The times in which the server answered no look although no fault of the server explains that:
/// the machine was busy, or its disk slow. They are faults of all processes.
pub fn stalls(history: &History) -> Vec<Fault> {
    let of_server = |fault: &&Fault| fault.met && fault.slot.is_none();
    let mut faults: Vec<_> = history.faults.iter().filter(of_server).collect();
    faults.sort_by_key(|fault| fault.from);
    let mut stalls = Vec::new();
    for looks in history.samples.windows(2) {
        let (mut from, end) = (looks[0].to, looks[1].to);
        if end - from <= STALL {
            continue;
        }
        let within = faults
            .iter()
            .filter(|fault| fault.from < end && fault.to > looks[0].to);
        // What is left of the time between the two looks, without the faults in it.
        for (fault_from, fault_to) in within
            .map(|fault| (fault.from, fault.to))
            .chain([(end, end)])
        {
            if fault_from.saturating_sub(from) > STALL {
                stalls.push(Fault {
                    from,
                    to: fault_from,
                    kind: STALLED.into(),
                    slot: None,
                    met: true,
                });
            }
            from = from.max(fault_to);
        }
    }
    stalls
}

impl Attempt {
    fn claim(&mut self, at: Nanos, remaining: Nanos) {
        self.sure_until = self.sure_until.max(at + remaining);
        self.claims.push((at, at + remaining));
    }

    /// Takes in that another hold of the owner, from then until then, may have added to its claims:
    /// what that hold added ends with its release, which may follow at any time.
    fn lower_claims(&mut self, added: (Nanos, Nanos), released: Option<Nanos>) {
        for (at, until) in &mut self.claims {
            match released {
                Some(released) if (added.0..released).contains(at) => {
                    *until = (*until).min(released);
                }
                // Its release is in no line: the claim counts no further than the own lease.
                None if (added.0..added.1).contains(at) => {
                    let from = if self.renewed { *at } else { self.invoked };
                    *until = (*until).min((from + self.lease).max(*at));
                }
                _ => {}
            }
        }
        self.sure_until = self
            .claims
            .iter()
            .map(|(_, until)| *until)
            .max()
            .unwrap_or(0);
    }

    fn take(&mut self, at: Nanos, event: &Event) {
        match event {
            Event::Granted { remaining } => {
                self.granted = Some(at);
                self.claim(at, *remaining);
            }
            Event::Failed { why } => {
                self.ended = Some((at, true));
                self.contended = why == "contended";
                self.error = (!self.contended).then(|| (at, why.clone()));
            }
            Event::Unknown { why, .. } => {
                self.ended = Some((at, false));
                self.error = Some((at, why.clone()));
            }
            Event::TakenBack { .. } | Event::Cancelled => self.ended = Some((at, false)),
            Event::Sure { remaining } => self.claim(at, *remaining),
            Event::Lost { reason } => {
                // A loss happens once, but a `run` may write several lines about it.
                self.lost.get_or_insert_with(|| Loss {
                    at,
                    expired: reason == "Expired",
                });
            }
            Event::Releasing { .. } => self.releasing = Some(at),
            Event::Released { outcome } => self.released = Some((at, outcome.clone())),
            Event::Worked => self.steps.push(at),
            Event::SectionBegan => self.sections.push(Section {
                began: at,
                ended: None,
            }),
            Event::SectionEnded { read, proven } => {
                if let Some(section) = self.sections.last_mut() {
                    section.ended = Some((at, *read, *proven));
                }
            }
            Event::Invoked { .. }
            | Event::Count { .. }
            | Event::Forcing { .. }
            | Event::Forced { .. } => {}
            Event::Panicked { .. } | Event::Ended { .. } => {}
        }
    }
}
