//! Whether anybody waits in front of a free lock.

use super::attempts::{Attempt, Story};
use super::history::{MS, Nanos};
use super::judge::{Rule, Violation, locks, name};

/// For how long a waiter may stand before a free lock, and for how long there must have been no fault.
const WAKE: Nanos = 1_500 * MS;

/// Whether anybody waited for a lock that was free.
pub fn wakeups(story: &Story, found: &mut Vec<Violation>) {
    let end = story.history.samples.last().map_or(0, |sample| sample.to);
    for lock in 0..locks(story) {
        let of_lock: Vec<&Attempt> = story.attempts.iter().filter(|attempt| attempt.lock == lock).collect();
        for (from, to) in free(story, lock) {
            for waiter in &of_lock {
                let pending_to = waiter.answered().or(story.killed(waiter.process)).unwrap_or(end);
                let (mut from, to) = (from.max(waiter.invoked), to.min(pending_to));
                if to.saturating_sub(from) < WAKE {
                    continue;
                }
                // One grant in this process is one turn of its line.
                let grants = of_lock.iter().filter(|other| other.process == waiter.process);
                let turns = grants.filter_map(|other| other.granted).map(|at| (at, at));
                let faults = story.faults_of(waiter.process).map(|fault| (fault.from, fault.to + WAKE));
                let mut breaks: Vec<(Nanos, Nanos)> = turns.chain(faults).collect();
                breaks.sort_unstable();
                breaks.push((to, to));
                for (begin, over) in breaks {
                    if begin.min(to).saturating_sub(from) >= WAKE {
                        let ms = (begin.min(to) - from) / MS;
                        let what = format!("lock {lock}: free for {ms} ms while {} waited", name(waiter));
                        found.push(Violation { rule: Rule::LostWakeup, at: from, what });
                        break;
                    }
                    from = from.max(over);
                }
            }
        }
    }
}

/// From when until when a lock was free whenever the server was asked.
fn free(story: &Story, lock: usize) -> Vec<(Nanos, Nanos)> {
    let mut times = Vec::new();
    let mut since: Option<(Nanos, Nanos)> = None;
    for sample in &story.history.samples {
        let held = sample.held.iter().any(|key| key.lock == lock);
        // A server that takes its time to answer may have been held meanwhile.
        let gap = since.is_some_and(|(_, last)| sample.to - last > 300 * MS);
        if held || gap {
            times.extend(since.take());
        }
        if !held {
            since = Some((since.map_or(sample.to, |(from, _)| from), sample.from));
        }
    }
    times.extend(since);
    times.retain(|(from, to)| to.saturating_sub(*from) >= WAKE);
    times
}
