//! Whether anybody waits in front of a free lock.

use super::attempts::{Attempt, Story};
use super::forced::{CLOCK, Force};
use super::history::{Fault, MS, NO_CHANNEL, NO_PUBLISH, Nanos, slot_of};
use super::judge::{Rule, Violation, locks, name};
use super::worker::is_patient;

/// For how long a waiter may stand before a free lock, and for how long there must have been no
/// fault.
const WAKE: Nanos = 1_500 * MS;

/// After how long a subscription that was refused is asked for again: a command timeout, and some
/// for a busy machine.
const REASKED: Nanos = 2_000 * MS;

/// For how long nobody need have looked at the server.
const GAP: Nanos = 300 * MS;

/// Whether anybody waited for a lock that was free.
pub fn wakeups(story: &Story, found: &mut Vec<Violation>) {
    let end = story.history.samples.last().map_or(0, |sample| sample.to);
    for lock in 0..locks(story) {
        let of_lock: Vec<&Attempt> = story
            .attempts
            .iter()
            .filter(|attempt| attempt.lock == lock)
            .collect();
        for time in free(story, lock) {
            let in_silence = silent(story, lock, &time);
            let Free { from, to, .. } = time;
            for waiter in &of_lock {
                let pending_to = waiter
                    .answered()
                    .or(story.killed(waiter.process))
                    .unwrap_or(end);
                let (mut from, to) = (from.max(waiter.invoked), to.min(pending_to));
                if to.saturating_sub(from) < WAKE {
                    continue;
                }
                // One grant in this process is one turn of its line.
                let grants = of_lock
                    .iter()
                    .filter(|other| other.process == waiter.process);
                let turns = grants.filter_map(|other| other.granted).map(|at| (at, at));
                let faults = story
                    .faults_of(waiter.process)
                    .map(|fault| (fault.from, fault.to + WAKE));
                let mut breaks: Vec<(Nanos, Nanos)> = turns.chain(faults).collect();
                if is_patient(slot_of(waiter.process)) {
                    breaks.extend(in_silence.then_some((from, to)));
                    breaks.extend(deaf(story, waiter.process));
                }
                breaks.sort_unstable();
                breaks.push((to, to));
                for (begin, over) in breaks {
                    if begin.min(to).saturating_sub(from) >= WAKE {
                        let ms = (begin.min(to) - from) / MS;
                        let what = format!(
                            "lock {lock}: free for {ms} ms while {} waited",
                            name(waiter)
                        );
                        found.push(Violation::new(Rule::LostWakeup, from, what));
                        break;
                    }
                    from = from.max(over);
                }
            }
        }
    }
}

/// Whether whoever freed the lock then may not have been able to tell.
fn silent(
    story: &Story,
    lock: usize,
    &Free {
        seen, from, after, ..
    }: &Free,
) -> bool {
    // A lease that ended early with a step of the clock says nothing to anybody.
    let by_clock = |force: &&Force| {
        let around = force.from <= from && force.to + GAP >= seen;
        force.process == CLOCK && force.lock == lock && around
    };
    if story.forces.iter().any(|force| by_clock(&force)) {
        return true;
    }
    let mute = |fault: &&Fault| fault.met && [NO_PUBLISH, NO_CHANNEL].contains(&&*fault.kind);
    let then = |fault: &&Fault| fault.from <= from + GAP && fault.to + GAP >= seen;
    let by_slot = |slot| {
        // Who came and went between two looks was woken by the one before, as was whoever waits.
        let passed = |attempt: &Attempt| {
            let (begin, end) = giving_back(story, attempt);
            begin <= from + GAP && end >= seen
        };
        let own = |attempt: &&Attempt| {
            attempt.lock == lock && (Some(&*attempt.owner) == after || passed(attempt))
        };
        let forced = |force: &&Force| {
            force.lock == lock && force.from <= from && force.to.saturating_add(GAP) >= seen
        };
        story
            .attempts
            .iter()
            .filter(own)
            .any(|attempt| slot_of(attempt.process) == slot)
            || story
                .forces
                .iter()
                .filter(forced)
                .any(|force| slot_of(force.process) == slot)
    };
    story
        .history
        .faults
        .iter()
        .filter(mute)
        .filter(then)
        .any(|fault| fault.slot.is_some_and(by_slot))
}

/// From when until when an attempt may have given the lock back.
fn giving_back(story: &Story, attempt: &Attempt) -> (Nanos, Nanos) {
    let ended = attempt.ended.map(|(at, _)| at);
    let begin = match attempt.granted {
        Some(_) => attempt.giving.or(ended).unwrap_or(Nanos::MAX),
        None if attempt.ended.is_some_and(|(_, certain)| !certain) => attempt.invoked,
        None => Nanos::MAX,
    };
    (begin, story.may_hold_until(attempt))
}

/// From when until when those who wait in a process may have no subscription.
fn deaf(story: &Story, process: u64) -> impl Iterator<Item = (Nanos, Nanos)> {
    let refused = story
        .faults_of(process)
        .filter(|fault| fault.kind == NO_CHANNEL);
    refused.map(|fault| (fault.from, fault.to + REASKED + WAKE))
}

/// A time in which a lock was free whenever the server was asked.
struct Free<'s> {
    /// When it was last seen to be held.
    seen: Nanos,
    from: Nanos,
    to: Nanos,
    /// Who had it before.
    after: Option<&'s str>,
}

fn free<'s>(story: &'s Story, lock: usize) -> Vec<Free<'s>> {
    let mut times = Vec::new();
    let mut since: Option<Free> = None;
    let (mut owner, mut seen) = (None, 0);
    for sample in &story.history.samples {
        let held = sample.held.iter().find(|key| key.lock == lock);
        // A server that takes its time to answer may have been held meanwhile.
        let gap = since.as_ref().is_some_and(|free| sample.to - free.to > GAP);
        if held.is_some() || gap {
            times.extend(since.take());
        }
        match held {
            Some(key) => (owner, seen) = (Some(&*key.owner), sample.from),
            None => {
                let free = since.get_or_insert(Free {
                    seen,
                    from: sample.to,
                    to: sample.from,
                    after: owner,
                });
                free.to = sample.from;
            }
        }
    }
    times.extend(since);
    times.retain(|free| free.to.saturating_sub(free.from) >= WAKE);
    times
}
