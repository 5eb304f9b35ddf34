//! The judge: a pure function from a history to what was broken in it.
//!
//! **Exclusion.** What the library says of time is taken at its word. A guard is *sure* from the acquire's return, and at
//! each time `t` before which `remaining_lease()` was asked it is sure until `t` + what that answered; never beyond the
//! invocation of what gives the hold back. An unlock that is confirmed says that the lock was held until its
//! invocation, and a `run` that brings a result says so of all the time that its future ran. None of this depends on how
//! fast a signal is heard, so it holds for a process as well that is killed, starved or stopped (SIGSTOP): such a
//! process may *think* for longer that it has the lock, but every claim in its history was proved when it was made, and
//! nothing is claimed without asking. Two owners' sure times must never overlap, and whenever the server is asked it
//! must have the owner that is sure, with at least as many holds, and a lease that lasts for as long as was said.
//!
//! **Told.** Where a rival was granted the lock, the holder has heard `lost()` by then; a second is allowed for the
//! writing down, and the process must have run in it.
//!
//! **Truth.** The server never has more holds of an owner than attempts of that owner that may be there: not one that was
//! told to have failed, or to be given back, not for a moment; one whose end is not known until its process has been
//! without a fault for two seconds. No key is without an expiry. The counts that are told are right. No unlock
//! succeeds after the loss was told; none is told to be lost that the server has, without a fault; and nobody is told of
//! contention where nobody else is.
//!
//! **Wake-ups.** While a lock is free whenever one looks, nobody waits for it for longer than a second and a half, unless
//! there is a fault, or was in the second and a half before. The bound is far below the re-check interval of those
//! workers that have a long one, and far above what a wake-up takes.
//!
//! **Register.** A section that was sure of its lock from before its read until after its write finds what the last one
//! before it wrote, unless a section that was not sure may have written in between.
//!
//! **Conservation.** Every acquire of a process that lives comes to an end, and when all is over there is no key, no
//! subscription and no task.

use std::collections::HashMap;
use std::fmt;

use super::attempts::{Attempt, Story};
use super::history::{Event, Fault, History, MS, Nanos};

/// For how long a waiter may stand before a free lock, and for how long there must have been no fault.
const WAKE: Nanos = 1_500 * MS;

/// For how long there must have been no fault, if a loss is to have no reason.
const CALM: Nanos = 5_000 * MS;

/// For how long a loss may be on its way to the history.
const TOLD: Nanos = 1_000 * MS;

/// What an expiry may be off, in milliseconds: the server tells whole ones.
const ROUNDED: Nanos = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// Two owners were sure of one lock.
    Exclusion,
    /// An owner was sure of a lock that the server did not have for it.
    Unfounded,
    /// A holder did not hear that it had lost.
    NotTold,
    /// The server has a hold that nobody can have, or too many.
    Leak,
    /// A key has no expiry.
    NoExpiry,
    /// A hold count was told wrongly.
    Count,
    /// An outcome says what is not so.
    Lie,
    /// A waiter stood before a free lock.
    LostWakeup,
    /// A guarded update was lost.
    LostUpdate,
    /// Something never ended or was left behind.
    Conservation,
}

#[derive(Debug, Clone)]
pub struct Violation {
    pub rule: Rule,
    pub at: Nanos,
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {}: {}", self.rule, self.at, self.what)
    }
}

/// Finds all that was broken, in the order of time.
pub fn judge(history: &History) -> Vec<Violation> {
    let story = Story::new(history);
    let mut found = Vec::new();
    exclusion(&story, &mut found);
    server(&story, &mut found);
    truth(&story, &mut found);
    told(&story, &mut found);
    words(&story, &mut found);
    wakeups(&story, &mut found);
    register(&story, &mut found);
    conservation(&story, &mut found);
    found.sort_by_key(|violation| violation.at);
    found
}

fn locks(story: &Story) -> usize {
    story.attempts.iter().map(|attempt| attempt.lock + 1).max().unwrap_or(0)
}

/// The sure times of one lock, in the order of their beginnings.
fn sure_of<'s>(story: &'s Story, lock: usize) -> Vec<(Nanos, Nanos, &'s Attempt)> {
    let of = story.attempts.iter().filter(|attempt| attempt.lock == lock);
    let mut sure: Vec<_> = of.filter_map(|attempt| attempt.sure().map(|(from, to)| (from, to, attempt))).collect();
    sure.sort_by_key(|(from, ..)| *from);
    sure
}

fn exclusion(story: &Story, found: &mut Vec<Violation>) {
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
fn server(story: &Story, found: &mut Vec<Violation>) {
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

/// Whether the server has more than its holders can have.
fn truth(story: &Story, found: &mut Vec<Violation>) {
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

/// Whether holders heard of their losses.
fn told(story: &Story, found: &mut Vec<Violation>) {
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
            let heard = holder.lost.is_some_and(|lost| lost <= by);
            if ran && !heard && gone.is_none_or(|gone| gone > by) {
                let what = format!("lock {lock}: {} did not hear that {} was granted it", name(holder), name(rival));
                found.push(Violation { rule: Rule::NotTold, at: by, what });
            }
        }
    }
}

/// Whether what was told is so.
fn words(story: &Story, found: &mut Vec<Violation>) {
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

/// Whether anybody waited for a lock that was free.
fn wakeups(story: &Story, found: &mut Vec<Violation>) {
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

/// Whether each guarded section found what the one before it wrote.
fn register(story: &Story, found: &mut Vec<Violation>) {
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

fn conservation(story: &Story, found: &mut Vec<Violation>) {
    let end = story.history.samples.last().map_or(0, |sample| sample.to);
    for attempt in &story.attempts {
        if story.killed(attempt.process).is_some() {
            continue;
        }
        let problem = match (attempt.answered(), attempt.giving.or(attempt.ended.map(|(at, _)| at))) {
            (None, _) => "never ended",
            (Some(_), None) => "was never given back",
            (Some(_), Some(_)) => continue,
        };
        let what = format!("lock {}: {} {problem}", attempt.lock, name(attempt));
        found.push(Violation { rule: Rule::Conservation, at: end, what });
    }
    for left in &story.history.left {
        found.push(Violation { rule: Rule::Conservation, at: end, what: left.clone() });
    }
}

/// What an attempt is called in a message.
fn name(attempt: &Attempt) -> String {
    let thread = attempt.owner.rsplit(':').next().unwrap_or_default();
    format!("process {}'s {} by {thread} at {}", attempt.process, attempt.how, attempt.invoked)
}
