//! Whether what the library says is so, and whether the server has only what its holders can have.

use std::collections::HashMap;

use super::attempts::{Attempt, Story};
use super::history::{Event, MS, Nanos};
use super::judge::{Rule, TOLD, Violation, name};

/// For how long there must have been no fault, if a loss is to have no reason.
const CALM: Nanos = 5_000 * MS;

/// Whether the server has more than its holders can have.
pub fn truth(story: &Story, found: &mut Vec<Violation>) {
    let mut may_hold: HashMap<(usize, &str), Vec<(Nanos, Nanos)>> = HashMap::new();
    for attempt in &story.attempts {
        let times = may_hold.entry((attempt.lock, &attempt.owner)).or_default();
        times.push((attempt.invoked, story.may_hold_until(attempt)));
    }
    let mut open: HashMap<(usize, &str), Vec<Nanos>> = HashMap::new();
    may_hold.values_mut().for_each(|times| times.sort_unstable_by(|one, other| other.cmp(one)));
    for sample in &story.history.samples {
        for key in &sample.held {
            if key.pttl == -1 {
                let what = format!("lock {}: the key of {} has no expiry", key.lock, key.owner);
                found.push(Violation { rule: Rule::NoExpiry, at: sample.from, what });
            }
            let place = (key.lock, &*key.owner);
            let open = open.entry(place).or_default();
            if let Some(times) = may_hold.get_mut(&place) {
                // The earliest is last.
                while let Some((_, to)) = times.pop_if(|(from, _)| *from <= sample.to) {
                    open.push(to);
                }
            }
            open.retain(|to| *to >= sample.from);
            let holds = open.len() as u64;
            if key.count > holds {
                let (lock, owner, count, pttl) = (key.lock, &key.owner, key.count, key.pttl);
                let what =
                    format!("lock {lock}: the server has {count} holds of {owner} ({pttl} ms), who can have {holds}");
                found.push(Violation { rule: Rule::Leak, at: sample.from, what });
            }
        }
    }
}

/// Whether what was told is so.
pub fn words(story: &Story, found: &mut Vec<Violation>) {
    for attempt in &story.attempts {
        if let Some(at) = lost_without_reason(story, attempt) {
            let what = format!("lock {}: {} was told to be lost, and the server had it", attempt.lock, name(attempt));
            found.push(Violation { rule: Rule::Lie, at, what });
        }
        if let Some(at) = contended_by_nobody(story, attempt) {
            let what = format!("lock {}: {} was told of contention, and nobody was there", attempt.lock, name(attempt));
            found.push(Violation { rule: Rule::Lie, at, what });
        }
        let confirmed = attempt.gave.as_ref().filter(|(_, outcome)| outcome == "ok");
        if let (Some((at, _)), Some(lost), Some(giving)) = (confirmed, attempt.lost, attempt.giving) {
            if lost < giving {
                let what = format!("lock {}: {} was lost, and its unlock succeeded", attempt.lock, name(attempt));
                found.push(Violation { rule: Rule::Lie, at: *at, what });
            }
        }
    }
    for line in &story.history.lines {
        match &line.event {
            Event::Count { expected, found: count } if expected != count => {
                let what = format!("process {}: {expected} holds, and the count told is {count}", line.process);
                found.push(Violation { rule: Rule::Count, at: line.at, what });
            }
            Event::Ended { tasks, shutdown } if *tasks > 0 || shutdown != "ok" => {
                let what = format!("process {} ended with {tasks} tasks (shutdown: {shutdown})", line.process);
                found.push(Violation { rule: Rule::Conservation, at: line.at, what });
            }
            _ => {}
        }
    }
}

/// When an unlock said that the lock was lost, although its own claim went on, the server had it just before, and there had
/// been no fault for long.
fn lost_without_reason(story: &Story, attempt: &Attempt) -> Option<Nanos> {
    let (at, giving) = (attempt.gave.as_ref().filter(|(_, outcome)| outcome == "lost")?.0, attempt.giving?);
    let calm = giving.saturating_sub(CALM);
    let faulty = story.faults_of(attempt.process).any(|fault| fault.from <= at && fault.to >= calm);
    let last = story.history.samples.iter().rev().find(|sample| sample.to <= giving)?;
    let recent = giving - last.to < 100 * MS;
    let had = last.held.iter().any(|key| key.lock == attempt.lock && key.owner == attempt.owner);
    (!faulty && recent && had && attempt.sure_until > at).then_some(at)
}

/// When an acquire was told that somebody else holds the lock, although nobody else had to do with it.
fn contended_by_nobody(story: &Story, attempt: &Attempt) -> Option<Nanos> {
    let (at, _) = attempt.ended.filter(|_| attempt.contended)?;
    let mut looks = story.history.samples.iter().filter(|sample| sample.from >= attempt.invoked && sample.to <= at);
    let free =
        looks.clone().next().is_some() && looks.all(|sample| sample.held.iter().all(|key| key.lock != attempt.lock));
    let mut others = story.attempts.iter().filter(|other| other.lock == attempt.lock && !std::ptr::eq(*other, attempt));
    let alone =
        others.all(|other| other.invoked > at || story.may_hold_until(other).saturating_add(TOLD) < attempt.invoked);
    (free && alone).then_some(at)
}
