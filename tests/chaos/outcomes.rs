//! The rules about reported outcomes, and about holds on the server that no attempt can have.

use std::collections::HashMap;

use super::attempts::{Analysis, Attempt, Loss, SETTLEMENT};
use super::forced::{FELT, excuses};
use super::history::{Event, History, MS, Nanos};
use super::judge::{Rule, Violation, name};

/// How long there must have been no fault, in addition to one lease, for every renewal to have had
/// its reply.
const AFTER_FAULT: Nanos = 1_000 * MS;

/// What is left on the server at most of a lease that ended by the owner's clock: the margin, and
/// the delays of a busy machine.
const UNPROVED: Nanos = 1_000 * MS;

/// The time between two events within which one may be the reason for the other.
const AROUND: Nanos = 1_000 * MS;

/// How old a look at the server may be to count as recent.
const RECENT: Nanos = 100 * MS;

/// Checks that the server has no hold that no attempt can have.
pub fn server_holds(analysis: &Analysis, found: &mut Vec<Violation>) {
    let mut may_hold: HashMap<(usize, &str), Vec<(Nanos, Nanos)>> = HashMap::new();
    for attempt in &analysis.attempts {
        let times = may_hold.entry((attempt.lock, &attempt.field)).or_default();
        times.push((attempt.invoked, analysis.may_hold_until(attempt)));
    }
    let mut open: HashMap<(usize, &str), Vec<Nanos>> = HashMap::new();
    may_hold
        .values_mut()
        .for_each(|times| times.sort_unstable_by(|one, other| other.cmp(one)));
    for sample in &analysis.samples {
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
                    "lock {lock}: the server has {count} holds of {owner} ({pttl} ms), and {holds} are possible"
                );
                found.push(Violation::new(Rule::Leak, sample.from, what));
            }
        }
    }
}

/// Checks that reported outcomes are correct.
pub fn outcomes(analysis: &Analysis, found: &mut Vec<Violation>) {
    for attempt in &analysis.attempts {
        if let Some(at) =
            false_loss(analysis, attempt).filter(|at| !force_unlocked_here(analysis, attempt, *at))
        {
            let what = format!(
                "lock {}: {} was reported lost, and the server had it",
                attempt.lock,
                name(attempt)
            );
            found.push(
                Violation::new(Rule::FalseReport, at, what)
                    .unless(excuses(analysis, attempt, at, at)),
            );
        }
        for (at, why) in failures_without_fault(analysis, attempt) {
            let what = format!(
                "lock {}: {} met no fault and reported: {why}",
                attempt.lock,
                name(attempt)
            );
            let mut violation = Violation::new(Rule::FalseReport, at, what);
            // A force unlock ends what was granted. It makes no acquire fail.
            if attempt.granted.is_some() {
                violation = violation.unless(excuses(analysis, attempt, at, at));
            }
            found.push(violation);
        }
        if let Some(at) = contended_without_owner(analysis, attempt) {
            let what = format!(
                "lock {}: {} reported contention, and no other owner had the lock",
                attempt.lock,
                name(attempt)
            );
            found.push(Violation::new(Rule::FalseReport, at, what));
        }
        let sure_after = |lost: &Loss| {
            attempt
                .claims
                .iter()
                .find(|(at, until)| *at > lost.at && until > at)
                .map(|claims| claims.0)
        };
        if let Some(at) = attempt.lost.as_ref().and_then(sure_after) {
            let what = format!(
                "lock {}: {} was sure after it had reported its loss",
                attempt.lock,
                name(attempt)
            );
            found.push(Violation::new(Rule::FalseReport, at, what));
        }
        let confirmed = attempt
            .released
            .as_ref()
            .filter(|(_, outcome)| outcome == "ok");
        if let (Some((at, _)), Some(lost), Some(releasing)) =
            (confirmed, &attempt.lost, attempt.releasing)
        {
            if lost.at < releasing {
                let what = format!(
                    "lock {}: {} was lost, and its unlock succeeded",
                    attempt.lock,
                    name(attempt)
                );
                found.push(Violation::new(Rule::FalseReport, *at, what));
            }
        }
    }
    for line in &analysis.history.lines {
        match &line.event {
            Event::Count {
                expected,
                found: count,
            } if expected != count => {
                let what = format!(
                    "process {}: {expected} holds, and the reported count is {count}",
                    line.process
                );
                let forced = analysis.attempt(line.process, line.attempt);
                let forced = forced
                    .map(|attempt| excuses(analysis, attempt, line.at, line.at))
                    .unwrap_or_default();
                found.push(Violation::new(Rule::WrongCount, line.at, what).unless(forced));
            }
            Event::Ended { tasks, shutdown } if *tasks > 0 || shutdown != "ok" => {
                let what = format!(
                    "process {} ended with {tasks} tasks (shutdown: {shutdown})",
                    line.process
                );
                found.push(Violation::new(Rule::LeftBehind, line.at, what));
            }
            _ => {}
        }
    }
}

/// The panics of the processes.
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

/// When an owner reported a loss that had not happened.
fn false_loss(analysis: &Analysis, attempt: &Attempt) -> Option<Nanos> {
    let unlock = attempt
        .released
        .as_ref()
        .filter(|(_, outcome)| outcome == "lost");
    let (asked, at, by_clock) = match (&attempt.lost, unlock) {
        (Some(lost), _) => (lost.at, lost.at, Some(lost.expired)),
        (None, Some((at, _))) => (attempt.releasing?, *at, None),
        (None, None) => return None,
    };
    // No claim ends early by the clock, whatever the network does.
    let claimed = attempt.sure_until > at;
    let goes_on_until = server_has_it_until(analysis, attempt, asked, at);
    let had = goes_on_until.is_some_and(|until| until > at);
    let false_loss = match by_clock {
        // No fault delayed the renewals or their replies.
        Some(true) if attempt.renewed => claimed || undisturbed(analysis, attempt, at),
        Some(true) => {
            claimed
                || (undisturbed(analysis, attempt, at)
                    && goes_on_until.is_some_and(|until| until > at + UNPROVED))
        }
        Some(false) => had,
        None => claimed && had,
    };
    false_loss.then_some(at)
}

/// Whether its own process was about to free the lock by force: a force unlock reports the loss to
/// the owners of its process first, and may then fail.
fn force_unlocked_here(analysis: &Analysis, attempt: &Attempt, reported: Nanos) -> bool {
    let mut here = analysis
        .forces
        .iter()
        .filter(|force| (force.process, force.lock) == (attempt.process, attempt.lock));
    let since = analysis.written_since(attempt.process, reported);
    here.any(|force| force.from <= reported && since < force.to.saturating_add(AROUND))
}

/// The end of the lease that the last look before the report of a loss shows. `None` if it shows no
/// hold, or if the owner may have lost the lock and acquired it again by then.
fn server_has_it_until(
    analysis: &Analysis,
    attempt: &Attempt,
    asked: Nanos,
    reported: Nanos,
) -> Option<Nanos> {
    let samples = &analysis.samples;
    let look = samples[..samples.partition_point(|sample| sample.to <= asked)].last()?;
    let key = look
        .held
        .iter()
        .find(|key| key.lock == attempt.lock && key.owner == attempt.field)?;
    let recent = look.from >= attempt.granted? && asked - look.to < RECENT;
    let mut same = analysis.same_field(attempt);
    let since = analysis.written_since(attempt.process, asked);
    let came_back = same.any(|other| {
        let until = other
            .granted
            .unwrap_or_else(|| analysis.may_hold_until(other));
        !std::ptr::eq(other, attempt)
            && other.invoked <= reported
            && until.saturating_add(AROUND) > since
    });
    let came_back = came_back && may_have_been_gone(analysis, attempt, reported);
    // The release of another hold of the owner sets the expiry to what the remaining ones are
    // entitled to, which may be less than the look shows.
    let is_lowered = analysis.same_field(attempt).any(|other| {
        let (from, to) = match (other.releasing, other.ended) {
            (Some(from), _) => (from, other.released.as_ref().map(|(at, _)| *at)),
            (None, Some((from, _))) => (from, Some(from.saturating_add(SETTLEMENT))),
            (None, None) => return false,
        };
        !std::ptr::eq(other, attempt)
            && from <= reported
            && to.is_none_or(|to| to.saturating_add(AROUND) >= look.from)
    });
    if is_lowered {
        return None;
    }
    (recent && !came_back).then(|| look.from + Nanos::try_from(key.pttl).unwrap_or(0) * MS)
}

/// Whether the server may not have had the hold at some time between its grant and the report of
/// its loss: a look does not show it, or its lease may have ended between two looks.
fn may_have_been_gone(analysis: &Analysis, attempt: &Attempt, reported: Nanos) -> bool {
    let Some(granted) = attempt.granted else {
        return true;
    };
    let samples = &analysis.samples;
    let looks = samples[samples.partition_point(|look| look.from < granted)..].iter();
    let mut alive_until = granted + attempt.lease;
    for look in looks.take_while(|look| look.to <= reported) {
        let has = look
            .held
            .iter()
            .find(|key| key.lock == attempt.lock && key.owner == attempt.field);
        let pttl = has.and_then(|key| Nanos::try_from(key.pttl).ok());
        let Some(pttl) = pttl.filter(|_| look.to < alive_until) else {
            return true;
        };
        alive_until = look.from + pttl * MS;
    }
    alive_until <= reported
}

fn undisturbed(analysis: &Analysis, attempt: &Attempt, at: Nanos) -> bool {
    let since = if attempt.renewed {
        at.saturating_sub(attempt.lease)
    } else {
        attempt.invoked
    };
    !analysis
        .faults_of(attempt.process)
        .any(|fault| fault.from <= at && fault.to + AFTER_FAULT >= since)
}

/// The operations that failed, or whose outcome was unknown, although no fault happened.
fn failures_without_fault<'s>(
    analysis: &'s Analysis,
    attempt: &'s Attempt,
) -> impl Iterator<Item = (Nanos, &'s str)> {
    let acquire = attempt
        .error
        .as_ref()
        .map(|(at, why)| (attempt.invoked, *at, why));
    let release = attempt
        .released
        .as_ref()
        .map(|(at, outcome)| (attempt.releasing.unwrap_or(*at), *at, outcome));
    let release = release.filter(|(.., outcome)| *outcome != "ok" && *outcome != "lost");
    let undisturbed = |since: Nanos, at: Nanos| {
        !analysis
            .faults_of(attempt.process)
            .any(|fault| fault.from <= at && fault.to + FELT >= since)
    };
    let all = acquire.into_iter().chain(release);
    all.filter(move |(since, at, _)| attempt.lost.is_none() && undisturbed(*since, *at))
        .map(|(_, at, why)| (at, &**why))
}

/// When an acquire reported that another owner holds the lock, although no other attempt may have
/// held it.
fn contended_without_owner(analysis: &Analysis, attempt: &Attempt) -> Option<Nanos> {
    let (at, _) = attempt.ended.filter(|_| attempt.contended)?;
    let samples = &analysis.samples;
    let first = samples.partition_point(|look| look.from < attempt.invoked);
    let mut looks = samples[first..].iter().take_while(|look| look.to <= at);
    let free = looks.clone().next().is_some()
        && looks.all(|look| look.held.iter().all(|key| key.lock != attempt.lock));
    if !free {
        return None;
    }
    let mut others = analysis
        .attempts
        .iter()
        .filter(|other| other.lock == attempt.lock && !std::ptr::eq(*other, attempt));
    let alone = others.all(|other| {
        other.invoked > at
            || analysis.may_hold_until(other).saturating_add(AROUND) < attempt.invoked
    });
    alone.then_some(at)
}
