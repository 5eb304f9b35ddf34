//! The events of a history, put together again: what became of each attempt to hold a lock.

use std::collections::HashMap;
use std::sync::OnceLock;

use super::forced::{CLOCK, Force, InTheDark};
use super::history::{
    CLOCK_SET, Event, Fault, History, Line, MS, NO_SCRIPTS, Nanos, STALLED, STOPPED, Sample,
    slot_of,
};

/// For how long a process must have had no fault until all that was unclear is settled in its
/// background.
pub const SETTLED: Nanos = 1_000 * MS;

/// For how long a process may take, after it was stopped, to write down what happened before.
const WRITTEN: Nanos = 1_000 * MS;

/// For how long the server may answer no look until that is a fault of its own.
const STALL: Nanos = 300 * MS;

/// One attempt to hold a lock, and what became of it.
#[derive(Debug, Clone, Default)]
pub struct Attempt {
    /// Found once: many rules ask for it.
    may_hold_until: OnceLock<Nanos>,
    grant: OnceLock<Option<Grant>>,
    pub dark: OnceLock<Vec<InTheDark>>,
    pub process: u64,
    pub lock: usize,
    pub owner: String,
    pub how: String,
    pub lease: Nanos,
    /// Whether the lease is renewed.
    pub renewed: bool,
    pub invoked: Nanos,
    pub granted: Option<Nanos>,
    /// Until when its owner has said to be sure.
    pub sure_until: Nanos,
    /// When it said so, and until when each time.
    pub said: Vec<(Nanos, Nanos)>,
    /// When the acquire ended without a grant, and whether it is certain that it left nothing.
    pub ended: Option<(Nanos, bool)>,
    /// Whether it was told that somebody else holds the lock.
    pub contended: bool,
    /// When the acquire failed or was left unclear for another reason than that, and what was told.
    pub error: Option<(Nanos, String)>,
    pub lost: Option<Loss>,
    pub giving: Option<Nanos>,
    pub gave: Option<(Nanos, String)>,
    pub sections: Vec<Section>,
    /// When the future of a `run` took a step.
    pub steps: Vec<Nanos>,
}

/// The time in which the server granted an attempt. The line of the history is no time of the
/// grant: the reply may be read long after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// The server did not grant it before.
    pub from: Nanos,
    /// The server had granted it by then.
    pub to: Nanos,
}

/// A loss that its owner was told.
#[derive(Debug, Clone)]
pub struct Loss {
    pub at: Nanos,
    /// Whether by the owner's clock: no renewal was confirmed in time, or its lease was fixed.
    /// Otherwise the server said so.
    pub expired: bool,
}

/// A guarded read and write of the lock's register.
#[derive(Debug, Clone, Default)]
pub struct Section {
    pub began: Nanos,
    /// When it was over, the number that it read, and whether the lock was held all the time.
    pub ended: Option<(Nanos, u64, bool)>,
}

impl Attempt {
    /// From when until when its owner was sure to have the lock, all by the library's word: from
    /// the grant's return to the invocation of what gave it back, if that was confirmed; otherwise
    /// no longer than it was said to last.
    pub fn sure(&self) -> Option<(Nanos, Nanos)> {
        let from = self.granted?;
        let to = match (&self.gave, self.giving) {
            (Some((_, outcome)), Some(giving)) if outcome == "ok" => giving,
            (_, Some(giving)) => giving.min(self.sure_until),
            (_, None) => self.sure_until,
        };
        (from < to).then_some((from, to))
    }

    /// When the caller heard the end of the acquire.
    pub fn answered(&self) -> Option<Nanos> {
        self.granted.or(self.ended.map(|(at, _)| at))
    }
}

/// A history that has been read with understanding.
pub struct Story<'a> {
    pub attempts: Vec<Attempt>,
    pub forces: Vec<Force>,
    places: HashMap<(u64, u64), usize>,
    of_owner: HashMap<(usize, String), Vec<usize>>,
    pub history: &'a History,
    killed: HashMap<u64, Nanos>,
    longest_lease: Nanos,
    /// The faults that each slot met, in the order of their beginnings.
    faults: HashMap<u64, Vec<Fault>>,
}

impl<'a> Story<'a> {
    pub fn new(history: &'a History) -> Self {
        let mut lines: Vec<&Line> = history.lines.iter().collect();
        lines.sort_by_key(|line| line.at);
        let mut attempts: Vec<Attempt> = Vec::new();
        let mut places: HashMap<(u64, u64), usize> = HashMap::new();
        let mut of_owner: HashMap<(usize, String), Vec<usize>> = HashMap::new();
        let mut longest_lease = 0;
        // The beginnings first: an event may bear the time of the one before it.
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
                let same = of_owner.entry((*lock, owner.clone())).or_default();
                same.push(attempts.len());
                attempts.push(Attempt {
                    process: line.process,
                    lock: *lock,
                    owner: owner.clone(),
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
        let mut story = Self {
            attempts,
            forces: Vec::new(),
            places,
            of_owner,
            history,
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
                    // Until its end is known.
                    let to = story
                        .killed(*process)
                        .map_or(Nanos::MAX, |killed| story.settled(*process, killed));
                    let (process, attempt) = (*process, *attempt);
                    let force = Force {
                        process,
                        attempt,
                        lock: *lock,
                        from: *at,
                        to,
                        freed: true,
                        told: None,
                    };
                    story.forces.push(force);
                }
                Event::Forced { outcome } => {
                    let unknown = outcome == "unknown";
                    let to = if unknown {
                        story.settled(*process, *at)
                    } else {
                        *at
                    };
                    let mut forces = story.forces.iter_mut();
                    if let Some(force) =
                        forces.rfind(|force| (force.process, force.attempt) == (*process, *attempt))
                    {
                        let freed = outcome == "freed";
                        (force.to, force.freed) = (to, unknown || freed);
                        force.told = (freed || outcome == "free").then_some(freed);
                    }
                }
                _ => {}
            }
        }
        story.forces.extend(story.clock_steps());
        story
    }

    /// What a step of the wall clock does: as a force unlock of each lock, it may end one tenure,
    /// until the leases of that time are over.
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
                    told: None,
                })
            })
            .collect()
    }

    /// What a process calls its attempt of that number.
    pub fn attempt(&self, process: u64, attempt: u64) -> Option<&Attempt> {
        self.places
            .get(&(process, attempt))
            .map(|place| &self.attempts[*place])
    }

    /// All attempts of an attempt's owner to hold its lock, itself among them.
    pub fn same_owner(&self, attempt: &Attempt) -> impl Iterator<Item = &Attempt> {
        let same = self.of_owner.get(&(attempt.lock, attempt.owner.clone()));
        let same = same.map_or(&[][..], Vec::as_slice).iter();
        same.map(|place| &self.attempts[*place])
    }

    /// When a process was killed, if it was.
    pub fn killed(&self, process: u64) -> Option<Nanos> {
        self.killed.get(&process).copied()
    }

    /// Until when an attempt may have a hold on the server. Never is `Nanos::MAX`.
    pub fn may_hold_until(&self, attempt: &Attempt) -> Nanos {
        *attempt
            .may_hold_until
            .get_or_init(|| self.find_may_hold_until(attempt))
    }

    fn find_may_hold_until(&self, attempt: &Attempt) -> Nanos {
        let unclear_since = match (attempt.ended, &attempt.gave, attempt.giving) {
            (Some((at, true)), ..) => return at,
            // A `run` brings its result even where its release is still on its way.
            (_, Some((at, outcome)), _) if outcome == "ok" && attempt.how != "run" => return *at,
            (Some((at, false)), ..) => Some(at),
            (None, gave, giving) => gave.as_ref().map(|(at, _)| *at).or(giving),
        };
        let settled = unclear_since.map(|since| {
            let since = since.max(attempt.lost.as_ref().map_or(0, |lost| lost.at));
            let settled = self.settled(attempt.process, since);
            // What the server refuses to take back stays until its lease is over.
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

    /// When the server granted an attempt: between its invocation and the line, and where looks at
    /// the server say more, between two of them.
    pub fn grant(&self, attempt: &Attempt) -> Option<Grant> {
        *attempt.grant.get_or_init(|| self.find_grant(attempt))
    }

    fn find_grant(&self, attempt: &Attempt) -> Option<Grant> {
        let line = attempt.granted?;
        let samples = &self.history.samples;
        let first = samples.partition_point(|look| look.from < attempt.invoked);
        let looks = samples[first..].iter().take_while(|look| look.to <= line);
        let has = |look: &Sample| {
            let mut keys = look.held.iter();
            keys.any(|key| key.lock == attempt.lock && key.owner == attempt.owner)
        };
        let forces: Vec<&Force> = self
            .forces
            .iter()
            .filter(|force| force.freed && force.lock == attempt.lock)
            .filter(|force| force.from <= line && force.to >= attempt.invoked)
            .collect();
        // Between two looks that do not find it, it may have been granted and have ended.
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
        let seen = looks.clone().find(|look| look.from >= from && has(look));
        let to = seen.map_or(line, |look| look.to);
        Some(Grant { from, to })
    }

    /// The grants of a lock to owners that were sure of it, in the order in which the server had
    /// made them at the latest.
    pub fn grants(&self, lock: usize) -> Vec<(Grant, &Attempt)> {
        let of_lock = self.attempts.iter().filter(|attempt| attempt.lock == lock);
        let sure = of_lock.filter(|attempt| attempt.sure().is_some());
        let mut grants: Vec<_> = sure
            .filter_map(|attempt| self.grant(attempt).map(|grant| (grant, attempt)))
            .collect();
        grants.sort_by_key(|(grant, _)| grant.to);
        grants
    }

    /// The earliest time of what a process wrote down at that time, if it was stopped in between.
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

    /// Until when a write that was begun by then may still reach the server.
    pub fn may_write_until(&self, attempt: &Attempt, since: Option<Nanos>) -> Nanos {
        let since = since
            .or(attempt.ended.map(|(at, _)| at))
            .or(attempt.gave.as_ref().map(|(at, _)| *at));
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

    /// When all leases of a process that was killed then have run out, also those that were still
    /// on their way.
    fn expired(&self, process: u64, killed: Nanos) -> Nanos {
        let mut arrived = killed;
        for fault in self.faults_of(process) {
            if fault.from <= arrived {
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

/// The times in which the server answered no look, although no fault of the server was planned
/// then: the machine was busy, or its disk slow. All processes met that.
pub fn stalls(history: &History) -> impl Iterator<Item = Fault> {
    let pairs = history.samples.windows(2);
    let late = pairs.filter(|looks| looks[1].to - looks[0].to > STALL);
    let planned = |from: Nanos, to: Nanos| {
        let all = history.faults.iter().filter(|fault| fault.slot.is_none());
        all.into_iter()
            .any(|fault| fault.from <= to && fault.to + STALL >= from)
    };
    late.map(|looks| (looks[0].to, looks[1].to))
        .filter(move |(from, to)| !planned(*from, *to))
        .map(|(from, to)| Fault {
            from,
            to,
            kind: STALLED.into(),
            slot: None,
            met: true,
        })
}

impl Attempt {
    fn say(&mut self, at: Nanos, remaining: Nanos) {
        self.sure_until = self.sure_until.max(at + remaining);
        self.said.push((at, at + remaining));
    }

    fn take(&mut self, at: Nanos, event: &Event) {
        match event {
            Event::Granted { remaining } => {
                self.granted = Some(at);
                self.say(at, *remaining);
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
            Event::Sure { remaining } => self.say(at, *remaining),
            Event::Lost { reason } => {
                // It is told once, but a `run` has several who hear.
                self.lost.get_or_insert_with(|| Loss {
                    at,
                    expired: reason == "Expired",
                });
            }
            Event::Giving { .. } => self.giving = Some(at),
            Event::Gave { outcome } => self.gave = Some((at, outcome.clone())),
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
