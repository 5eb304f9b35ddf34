//! What holders may rely on: that nobody else has the lock, that the server has it for them, that they hear of its loss.

use super::attempts::{Attempt, Story};
use super::history::{Fault, MS, Nanos};
use super::judge::{Rule, TOLD, Violation, locks, name};

/// What an expiry may be off, in milliseconds: the server tells whole ones.
const ROUNDED: Nanos = 2;

/// Whether nobody else was sure while somebody was.
pub fn exclusion(story: &Story, found: &mut Vec<Violation>) {
    for lock in 0..locks(story) {
        let mut open: Vec<(Nanos, &Attempt)> = Vec::new();
        for (from, to, attempt) in sure_of(story, lock) {
            open.retain(|(until, _)| *until > from);
            for (until, other) in open.iter().filter(|(_, other)| other.owner != attempt.owner) {
                let both = (to.min(*until) - from) / MS;
                let what = format!("lock {lock}: {} and {} were both sure for {both} ms", name(other), name(attempt));
                found.push(Violation { rule: Rule::Exclusion, at: from, what });
            }
            open.push((to, attempt));
        }
    }
}

/// Whether the server has what its holders are sure of.
pub fn server(story: &Story, found: &mut Vec<Violation>) {
    for lock in 0..locks(story) {
        let mut sure = sure_of(story, lock).into_iter().peekable();
        let mut open: Vec<(Nanos, &Attempt)> = Vec::new();
        for sample in &story.history.samples {
            while let Some((_, to, attempt)) = sure.next_if(|(from, ..)| *from <= sample.from) {
                open.push((to, attempt));
            }
            open.retain(|(to, _)| *to >= sample.to);
            for (_, attempt) in &open {
                let holds = open.iter().filter(|(_, other)| other.owner == attempt.owner).count() as u64;
                let has = sample.held.iter().find(|key| key.lock == lock && key.owner == attempt.owner);
                let expires = has.and_then(|key| Nanos::try_from(key.pttl).ok());
                let expires = expires.map_or(Nanos::MAX, |pttl| sample.to + (pttl + ROUNDED) * MS);
                let has = has.map_or(0, |key| key.count);
                let said = attempt.said.iter().rev().find(|(at, _)| *at <= sample.from);
                if let Some((_, until)) = said.filter(|(_, until)| *until > expires) {
                    let ms = (until - expires) / MS;
                    let what = format!("lock {lock}: {} is sure for {ms} ms more than its lease lasts", name(attempt));
                    found.push(Violation { rule: Rule::Unfounded, at: sample.from, what });
                }
                if has < holds {
                    let what = format!("lock {lock}: {} is sure of {holds}, the server has {has}", name(attempt));
                    found.push(Violation { rule: Rule::Unfounded, at: sample.from, what });
                }
            }
        }
    }
}

/// Whether holders heard of their losses.
pub fn told(story: &Story, found: &mut Vec<Violation>) {
    for lock in 0..locks(story) {
        let mut grants: Vec<&Attempt> =
            story.attempts.iter().filter(|attempt| attempt.lock == lock && attempt.sure().is_some()).collect();
        grants.sort_by_key(|attempt| attempt.granted);
        for (at, holder) in grants.iter().enumerate() {
            let Some(granted) = holder.granted else { continue };
            let gone = holder.giving.or(holder.ended.map(|(at, _)| at)).or(story.killed(holder.process));
            let Some(rival) = grants[at..].iter().find(|rival| rival.owner != holder.owner) else { continue };
            let Some(by) = rival.granted.map(|rival| rival + TOLD) else { continue };
            let stood = |fault: &&Fault| fault.kind.starts_with("worker") && fault.from < by && fault.to > granted;
            let ran = story.faults_of(holder.process).find(stood).is_none();
            let heard = holder.lost.as_ref().is_some_and(|lost| lost.at <= by);
            if ran && !heard && gone.is_none_or(|gone| gone > by) {
                let what = format!("lock {lock}: {} did not hear that {} was granted it", name(holder), name(rival));
                found.push(Violation { rule: Rule::NotTold, at: by, what });
            }
        }
    }
}

/// Whether the futures of `run` were stopped. The step in which a rival's grant falls may have been begun before it; none is
/// begun after it, however late the process gets to it, because the clock is asked before each.
pub fn stopped(story: &Story, found: &mut Vec<Violation>) {
    for lock in 0..locks(story) {
        let grants = sure_of(story, lock);
        for run in story.attempts.iter().filter(|attempt| attempt.lock == lock && attempt.steps.len() > 1) {
            let Some(granted) = run.granted else { continue };
            let mut later = grants[grants.partition_point(|(from, ..)| *from <= granted)..].iter();
            let Some((taken, _, rival)) = later.find(|(.., other)| other.owner != run.owner) else { continue };
            if let Some(at) = run.steps.iter().filter(|step| *step >= taken).nth(1) {
                let (run, rival, ms) = (name(run), name(rival), (at - taken) / MS);
                let what = format!("lock {lock}: {run} went on {ms} ms after {rival} was granted it");
                found.push(Violation { rule: Rule::NotStopped, at: *at, what });
            }
        }
    }
}

/// Whether each guarded section found what the one before it wrote.
pub fn register(story: &Story, found: &mut Vec<Violation>) {
    for lock in 0..locks(story) {
        let mut proven = Vec::new();
        let mut unsure = Vec::new();
        for attempt in story.attempts.iter().filter(|attempt| attempt.lock == lock) {
            for section in &attempt.sections {
                match section.ended {
                    Some((ended, read, true)) => proven.push((section.began, ended, read, attempt)),
                    ended => {
                        let until = story.may_write_until(attempt, ended.map(|(at, ..)| at));
                        unsure.push((section.began, until));
                    }
                }
            }
        }
        proven.sort_by_key(|(began, ..)| *began);
        unsure.sort_unstable();
        let mut unsure = unsure.into_iter().peekable();
        let mut may_write_until = 0;
        for pair in proven.windows(2) {
            let [(began, _, before, first), (_, ended, read, second)] = pair else { continue };
            while let Some((_, until)) = unsure.next_if(|(from, _)| from <= ended) {
                may_write_until = may_write_until.max(until);
            }
            if may_write_until < *began && *read != before + 1 {
                let (first, second) = (name(first), name(second));
                let wrote = before + 1;
                let what = format!("lock {lock}: {first} wrote {wrote}, and {second} after it read {read}");
                found.push(Violation { rule: Rule::LostUpdate, at: *ended, what });
            }
        }
    }
}

/// The sure times of one lock, in the order of their beginnings.
fn sure_of<'s>(story: &'s Story, lock: usize) -> Vec<(Nanos, Nanos, &'s Attempt)> {
    let of = story.attempts.iter().filter(|attempt| attempt.lock == lock);
    let mut sure: Vec<_> = of.filter_map(|attempt| attempt.sure().map(|(from, to)| (from, to, attempt))).collect();
    sure.sort_by_key(|(from, ..)| *from);
    sure
}
