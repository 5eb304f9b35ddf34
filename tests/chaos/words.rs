//! Whether what the library says is so, and whether the server has only what its owners can have.

use std::collections::HashMap;

use super::attempts::{Attempt, Loss, Story};
use super::forced::{FELT, excuses};
use super::history::{Event, History, MS, Nanos};
use super::judge::{Rule, Violation, name};

/// For how long there must have been no fault, beside one lease, if every renewal is to have had
/// its reply.
const CALM: Nanos = 1_000 * MS;

/// What a lease that was not renewed in time has left on the server at most: its margin, and what a
/// busy machine takes.
const UNPROVED: Nanos = 1_000 * MS;

/// How near to each other two things may be for one to be taken as the reason for the other.
const AROUND: Nanos = 1_000 * MS;

/// How old a look at the server may be.
const RECENT: Nanos = 100 * MS;

/// Whether the server has more than its owners can have.
pub fn truth(story: &Story, found: &mut Vec<Violation>) {
    let mut may_hold: HashMap<(usize, &str), Vec<(Nanos, Nanos)>> = HashMap::new();
    for attempt in &story.attempts {
        let times = may_hold.entry((attempt.lock, &attempt.owner)).or_default();
        times.push((attempt.invoked, story.may_hold_until(attempt)));
    }
    let mut open: HashMap<(usize, &str), Vec<Nanos>> = HashMap::new();
    may_hold
        .values_mut()
        .for_each(|times| times.sort_unstable_by(|one, other| other.cmp(one)));
    for sample in &story.history.samples {
        for key in &sample.held {
            if key.pttl == -1 {
                let what = format!("lock {}: the key of {} has no expiry", key.lock, key.owner);
                found.push(Violation::new(Rule::NoExpiry, sample.from, what));
            }
            let place = (key.lock, &*key.owner);
            let open = open.entry(place).or_default();
            if let Some(times) = may_hold.get_mut(&place) {
                // The earliest is last.
                while let Some((_, to)) = times.last().filter(|(from, _)| *from <= sample.to) {
                    open.push(*to);
                    times.pop();
                }
            }
            open.retain(|to| *to >= sample.from);
            let holds = open.len() as u64;
            if key.count > holds {
                let (lock, owner, count, pttl) = (key.lock, &key.owner, key.count, key.pttl);
                let what = format!(
                    "lock {lock}: the server has {count} holds of {owner} ({pttl} ms), who can have {holds}"
                );
                found.push(Violation::new(Rule::Leak, sample.from, what));
            }
        }
    }
}

/// Whether what was told is so.
pub fn words(story: &Story, found: &mut Vec<Violation>) {
    for attempt in &story.attempts {
        if let Some(at) = false_loss(story, attempt).filter(|at| !freed_here(story, attempt, *at)) {
            let what = format!(
                "lock {}: {} was told to be lost, and the server had it",
                attempt.lock,
                name(attempt)
            );
            found.push(Violation::new(Rule::Lie, at, what).unless(excuses(story, attempt, at, at)));
        }
        for (at, why) in without_cause(story, attempt) {
            let what = format!(
                "lock {}: {} met no fault, and was told: {why}",
                attempt.lock,
                name(attempt)
            );
            let mut violation = Violation::new(Rule::Lie, at, what);
            // A force unlock takes what was granted. It makes no acquire fail.
            if attempt.granted.is_some() {
                violation = violation.unless(excuses(story, attempt, at, at));
            }
            found.push(violation);
        }
        if let Some(at) = contended_by_nobody(story, attempt) {
            let what = format!(
                "lock {}: {} was told of contention, and nobody was there",
                attempt.lock,
                name(attempt)
            );
            found.push(Violation::new(Rule::Lie, at, what));
        }
        let sure_after = |lost: &Loss| {
            attempt
                .said
                .iter()
                .find(|(at, until)| *at > lost.at && until > at)
                .map(|said| said.0)
        };
        if let Some(at) = attempt.lost.as_ref().and_then(sure_after) {
            let what = format!(
                "lock {}: {} was sure after it was told to have lost",
                attempt.lock,
                name(attempt)
            );
            found.push(Violation::new(Rule::Lie, at, what));
        }
        let confirmed = attempt.gave.as_ref().filter(|(_, outcome)| outcome == "ok");
        if let (Some((at, _)), Some(lost), Some(giving)) =
            (confirmed, &attempt.lost, attempt.giving)
        {
            if lost.at < giving {
                let what = format!(
                    "lock {}: {} was lost, and its unlock succeeded",
                    attempt.lock,
                    name(attempt)
                );
                found.push(Violation::new(Rule::Lie, *at, what));
            }
        }
    }
    for line in &story.history.lines {
        match &line.event {
            Event::Count {
                expected,
                found: count,
            } if expected != count => {
                let what = format!(
                    "process {}: {expected} holds, and the count told is {count}",
                    line.process
                );
                let forced = story.attempt(line.process, line.attempt);
                let forced = forced
                    .map(|attempt| excuses(story, attempt, line.at, line.at))
                    .unwrap_or_default();
                found.push(Violation::new(Rule::Count, line.at, what).unless(forced));
            }
            Event::Ended { tasks, shutdown } if *tasks > 0 || shutdown != "ok" => {
                let what = format!(
                    "process {} ended with {tasks} tasks (shutdown: {shutdown})",
                    line.process
                );
                found.push(Violation::new(Rule::Conservation, line.at, what));
            }
            _ => {}
        }
    }
}

/// What panicked in the processes.
pub fn panics(history: &History) -> impl Iterator<Item = Violation> {
    history.lines.iter().filter_map(|line| {
        let Event::Panicked { why } = &line.event else {
            return None;
        };
        Some(Violation::new(
            Rule::Panic,
            line.at,
            format!("process {}: {why}", line.process),
        ))
    })
}

/// When somebody was told of a loss that was none.
fn false_loss(story: &Story, attempt: &Attempt) -> Option<Nanos> {
    let unlock = attempt
        .gave
        .as_ref()
        .filter(|(_, outcome)| outcome == "lost");
    let (asked, at, by_clock) = match (&attempt.lost, unlock) {
        (Some(lost), _) => (lost.at, lost.at, Some(lost.expired)),
        (None, Some((at, _))) => (attempt.giving?, *at, None),
        (None, None) => return None,
    };
    // The clock takes back no time that was told, whatever the network does.
    let claimed = attempt.sure_until > at;
    let goes_on_until = server_has_it_until(story, attempt, asked, at);
    let had = goes_on_until.is_some_and(|until| until > at);
    let false_loss = match by_clock {
        // Nothing kept the renewals from the server, nor their replies from the owner.
        Some(true) if attempt.renewed => claimed || calm(story, attempt, at),
        Some(true) => {
            claimed
                || (calm(story, attempt, at)
                    && goes_on_until.is_some_and(|until| until > at + UNPROVED))
        }
        Some(false) => had,
        None => claimed && had,
    };
    false_loss.then_some(at)
}

/// Whether its own process was about to free the lock by force: it tells its owners first, and may
/// fail then.
fn freed_here(story: &Story, attempt: &Attempt, told: Nanos) -> bool {
    let mut here = story
        .forces
        .iter()
        .filter(|force| (force.process, force.lock) == (attempt.process, attempt.lock));
    let since = story.written_since(attempt.process, told);
    here.any(|force| force.from <= told && since < force.to.saturating_add(AROUND))
}

/// Until when the server had promised the hold when it was last looked at, shortly before a loss
/// was told. `None` if it did not have it, or if the owner may have lost it and come back by then.
fn server_has_it_until(
    story: &Story,
    attempt: &Attempt,
    asked: Nanos,
    told: Nanos,
) -> Option<Nanos> {
    let samples = &story.history.samples;
    let look = samples[..samples.partition_point(|sample| sample.to <= asked)].last()?;
    let key = look
        .held
        .iter()
        .find(|key| key.lock == attempt.lock && key.owner == attempt.owner)?;
    let recent = look.from >= attempt.granted? && asked - look.to < RECENT;
    let mut same = story.same_owner(attempt);
    let since = story.written_since(attempt.process, asked);
    let came_back = same.any(|other| {
        let until = other.granted.unwrap_or_else(|| story.may_hold_until(other));
        !std::ptr::eq(other, attempt)
            && other.invoked <= told
            && until.saturating_add(AROUND) > since
    });
    let came_back = came_back && may_have_been_gone(story, attempt, told);
    (recent && !came_back).then(|| look.from + Nanos::try_from(key.pttl).unwrap_or(0) * MS)
}

/// Whether the looks at the server leave a time in which it may not have had the hold, from its
/// grant until it was told to be lost: one of them did not find it, or its lease may have ended
/// between two.
fn may_have_been_gone(story: &Story, attempt: &Attempt, told: Nanos) -> bool {
    let Some(granted) = attempt.granted else {
        return true;
    };
    let samples = &story.history.samples;
    let looks = samples[samples.partition_point(|look| look.from < granted)..].iter();
    let mut alive_until = granted + attempt.lease;
    for look in looks.take_while(|look| look.to <= told) {
        let has = look
            .held
            .iter()
            .find(|key| key.lock == attempt.lock && key.owner == attempt.owner);
        let pttl = has.and_then(|key| Nanos::try_from(key.pttl).ok());
        let Some(pttl) = pttl.filter(|_| look.to < alive_until) else {
            return true;
        };
        alive_until = look.from + pttl * MS;
    }
    alive_until <= told
}

fn calm(story: &Story, attempt: &Attempt, at: Nanos) -> bool {
    let since = if attempt.renewed {
        at.saturating_sub(attempt.lease)
    } else {
        attempt.invoked
    };
    !story
        .faults_of(attempt.process)
        .any(|fault| fault.from <= at && fault.to + CALM >= since)
}

/// When something was told to have failed, or not to be known, although nothing was wrong.
fn without_cause<'s>(
    story: &'s Story,
    attempt: &'s Attempt,
) -> impl Iterator<Item = (Nanos, &'s str)> {
    let acquire = attempt
        .error
        .as_ref()
        .map(|(at, why)| (attempt.invoked, *at, why));
    let release = attempt
        .gave
        .as_ref()
        .map(|(at, outcome)| (attempt.giving.unwrap_or(*at), *at, outcome));
    let release = release.filter(|(.., outcome)| *outcome != "ok" && *outcome != "lost");
    let calm = |since: Nanos, at: Nanos| {
        !story
            .faults_of(attempt.process)
            .any(|fault| fault.from <= at && fault.to + FELT >= since)
    };
    let all = acquire.into_iter().chain(release);
    all.filter(move |(since, at, _)| attempt.lost.is_none() && calm(*since, *at))
        .map(|(_, at, why)| (at, &**why))
}

/// When an acquire was told that somebody else holds the lock, although nobody else had to do with
/// it.
fn contended_by_nobody(story: &Story, attempt: &Attempt) -> Option<Nanos> {
    let (at, _) = attempt.ended.filter(|_| attempt.contended)?;
    let samples = &story.history.samples;
    let first = samples.partition_point(|look| look.from < attempt.invoked);
    let mut looks = samples[first..].iter().take_while(|look| look.to <= at);
    let free = looks.clone().next().is_some()
        && looks.all(|look| look.held.iter().all(|key| key.lock != attempt.lock));
    if !free {
        return None;
    }
    let mut others = story
        .attempts
        .iter()
        .filter(|other| other.lock == attempt.lock && !std::ptr::eq(*other, attempt));
    let alone = others.all(|other| {
        other.invoked > at || story.may_hold_until(other).saturating_add(AROUND) < attempt.invoked
    });
    alone.then_some(at)
}
