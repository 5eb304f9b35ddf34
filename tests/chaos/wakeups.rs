//! The rule about wake-ups: no waiter waits for a free lock.

use super::attempts::{Analysis, Attempt};
use super::forced::{CLOCK, Force};
use super::history::{Fault, MS, NO_CHANNEL, NO_PUBLISH, Nanos, slot_of};
use super::judge::{Rule, Violation, locks, name};
use super::worker::relies_on_messages;

/// How long a waiter may wait for a free lock, and how long there must have been no fault.
const WAKE: Nanos = 1_500 * MS;

/// How long a client takes to repeat a subscription that was refused: a command timeout, and some
/// more on a busy machine.
const REASKED: Nanos = 2_000 * MS;

/// The longest time between two looks at the server in which the lock counts as free.
const GAP: Nanos = 300 * MS;

/// Checks that no waiter waits for a free lock.
pub fn wakeups(analysis: &Analysis, found: &mut Vec<Violation>) {
    let end = analysis
        .history
        .samples
        .last()
        .map_or(0, |sample| sample.to);
    for lock in 0..locks(analysis) {
        let of_lock: Vec<&Attempt> = analysis
            .attempts
            .iter()
            .filter(|attempt| attempt.lock == lock)
            .collect();
        for time in free(analysis, lock) {
            let without_message = released_without_message(analysis, lock, &time);
            let Free { from, to, .. } = time;
            for waiter in &of_lock {
                let pending_to = waiter
                    .answered()
                    .or(analysis.killed(waiter.process))
                    .unwrap_or(end);
                let (mut from, to) = (from.max(waiter.invoked), to.min(pending_to));
                if to.saturating_sub(from) < WAKE {
                    continue;
                }
                // A grant to another waiter of the process moves its wait queue.
                let grants = of_lock
                    .iter()
                    .filter(|other| other.process == waiter.process);
                let turns = grants.filter_map(|other| other.granted).map(|at| (at, at));
                let faults = analysis
                    .faults_of(waiter.process)
                    .map(|fault| (fault.from, fault.to + WAKE));
                let mut breaks: Vec<(Nanos, Nanos)> = turns.chain(faults).collect();
                if relies_on_messages(slot_of(waiter.process)) {
                    breaks.extend(without_message.then_some((from, to)));
                    breaks.extend(without_subscription(analysis, waiter.process));
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

/// Whether the lock may have become free without a message.
fn released_without_message(
    analysis: &Analysis,
    lock: usize,
    &Free {
        seen, from, after, ..
    }: &Free,
) -> bool {
    // No message says that a step of the clock ended a lease.
    let by_clock = |force: &&Force| {
        let around = force.from <= from && force.to + GAP >= seen;
        force.process == CLOCK && force.lock == lock && around
    };
    if analysis.forces.iter().any(|force| by_clock(&force)) {
        return true;
    }
    let refused = |fault: &&Fault| fault.met && [NO_PUBLISH, NO_CHANNEL].contains(&&*fault.kind);
    let then = |fault: &&Fault| fault.from <= from + GAP && fault.to + GAP >= seen;
    let by_slot = |slot| {
        // The release of an owner between two looks may have woken the waiters, and the next
        // owner, which no look shows, may not have been able to publish.
        let passed = |attempt: &Attempt| {
            let (begin, end) = release_times(analysis, attempt);
            begin <= from + GAP && end >= seen
        };
        let own = |attempt: &&Attempt| {
            attempt.lock == lock && (Some(&*attempt.field) == after || passed(attempt))
        };
        let forced = |force: &&Force| {
            force.lock == lock && force.from <= from && force.to.saturating_add(GAP) >= seen
        };
        analysis
            .attempts
            .iter()
            .filter(own)
            .any(|attempt| slot_of(attempt.process) == slot)
            || analysis
                .forces
                .iter()
                .filter(forced)
                .any(|force| slot_of(force.process) == slot)
    };
    analysis
        .history
        .faults
        .iter()
        .filter(refused)
        .filter(then)
        .any(|fault| fault.slot.is_some_and(by_slot))
}

/// The time in which an attempt may have released the lock.
fn release_times(analysis: &Analysis, attempt: &Attempt) -> (Nanos, Nanos) {
    let ended = attempt.ended.map(|(at, _)| at);
    let begin = match attempt.granted {
        Some(_) => attempt.releasing.or(ended).unwrap_or(Nanos::MAX),
        None if attempt.ended.is_some_and(|(_, certain)| !certain) => attempt.invoked,
        None => Nanos::MAX,
    };
    (begin, analysis.may_hold_until(attempt))
}

/// The times in which the waiters of a process may have no subscription.
fn without_subscription(analysis: &Analysis, process: u64) -> impl Iterator<Item = (Nanos, Nanos)> {
    let refused = analysis
        .faults_of(process)
        .filter(|fault| fault.kind == NO_CHANNEL);
    refused.map(|fault| (fault.from, fault.to + REASKED + WAKE))
}

/// A time in which every look finds a lock free.
struct Free<'s> {
    /// The last look that finds it held.
    seen: Nanos,
    from: Nanos,
    to: Nanos,
    /// The owner in that look.
    after: Option<&'s str>,
}

fn free<'s>(analysis: &'s Analysis, lock: usize) -> Vec<Free<'s>> {
    let mut times = Vec::new();
    let mut since: Option<Free> = None;
    let (mut owner, mut seen) = (None, 0);
    for sample in &analysis.samples {
        let held = sample.held.iter().find(|key| key.lock == lock);
        // The lock may have been held in a long time between two looks.
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
