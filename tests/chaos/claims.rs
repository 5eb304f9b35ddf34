//! The rules about what owners may rely on: no other owner has the lock, the server has it for
//! them, and they report its loss.

use super::attempts::{Analysis, Attempt, Grant};
use super::forced::{Excuse, excuses, forced_losses};
use super::history::{Fault, Key, MS, Nanos, STALLED};
use super::judge::{REPORT_TIME, Rule, Violation, locks, name};

/// How far an expiry may be off, in milliseconds: the server rounds it.
const ROUNDED: Nanos = 2;

/// The longest time between two looks in which a renewal cannot be missed.
const UNSEEN: Nanos = 300 * MS;

/// Checks that no two owners are sure of one lock at the same time.
pub fn exclusion(analysis: &Analysis, found: &mut Vec<Violation>) {
    for lock in 0..locks(analysis) {
        let mut open: Vec<(Nanos, &Attempt)> = Vec::new();
        for (from, to, attempt) in sure_of(analysis, lock) {
            open.retain(|(until, _)| *until > from);
            for (until, other) in open
                .iter()
                .filter(|(_, other)| other.owner != attempt.owner)
            {
                let over = to.min(*until);
                let both = (over - from) / MS;
                let forced = [*other, attempt]
                    .into_iter()
                    .flat_map(|attempt| excuses(analysis, attempt, from, over));
                let what = format!(
                    "lock {lock}: {} and {} were both sure for {both} ms",
                    name(other),
                    name(attempt)
                );
                found.push(Violation::new(Rule::Exclusion, from, what).unless(forced.collect()));
            }
            open.push((to, attempt));
        }
    }
}

/// Checks that the server has what its owners are sure of.
pub fn server_agrees(analysis: &Analysis, found: &mut Vec<Violation>) {
    for lock in 0..locks(analysis) {
        let mut sure = sure_of(analysis, lock).into_iter().peekable();
        let mut open: Vec<(Nanos, &Attempt)> = Vec::new();
        for sample in &analysis.samples {
            while let Some((_, to, attempt)) = sure.next_if(|(from, ..)| *from <= sample.from) {
                open.push((to, attempt));
            }
            open.retain(|(to, _)| *to >= sample.to);
            for (_, attempt) in &open {
                let own: Vec<_> = open
                    .iter()
                    .map(|(_, other)| *other)
                    .filter(|other| other.field == attempt.field)
                    .collect();
                let has = sample
                    .held
                    .iter()
                    .find(|key| key.lock == lock && key.owner == attempt.field);
                let expires = has.and_then(|key| Nanos::try_from(key.pttl).ok());
                let expires = expires.map_or(Nanos::MAX, |pttl| sample.to + (pttl + ROUNDED) * MS);
                let has = has.map_or(0, |key| key.count);
                let claim = attempt
                    .claims
                    .iter()
                    .rev()
                    .find(|(at, _)| *at <= sample.from);
                // The script of the look may have run after a force unlock, whenever it was sent.
                let forced = |attempt: &Attempt| excuses(analysis, attempt, sample.to, sample.from);
                if let Some((_, until)) = claim.filter(|(_, until)| *until > expires) {
                    let ms = (until - expires) / MS;
                    let what = format!(
                        "lock {lock}: {} is sure for {ms} ms more than its lease lasts",
                        name(attempt)
                    );
                    found.push(
                        Violation::new(Rule::NotHeldOnServer, sample.from, what)
                            .unless(forced(attempt)),
                    );
                }
                let holds = own.len() as u64;
                if has < holds {
                    let what = format!(
                        "lock {lock}: {} is sure of {holds}, the server has {has}",
                        name(attempt)
                    );
                    let gone: Vec<_> = own
                        .iter()
                        .map(|own| forced(own))
                        .filter(|forced| !forced.is_empty())
                        .collect();
                    // The holds that no force unlock explains must be there.
                    let enough = holds - gone.len() as u64 <= has;
                    let forced = gone.into_iter().flatten().filter(|_| enough).collect();
                    found.push(
                        Violation::new(Rule::NotHeldOnServer, sample.from, what).unless(forced),
                    );
                }
            }
        }
    }
}

/// Checks that owners report their losses before another owner has the lock, and before the end of
/// their leases.
pub fn losses_reported(analysis: &Analysis, found: &mut Vec<Violation>) {
    for lock in 0..locks(analysis) {
        let grants = analysis.grants(lock);
        let granted = analysis
            .attempts
            .iter()
            .filter(|attempt| attempt.lock == lock && attempt.granted.is_some());
        for owner in granted {
            let taken = owner
                .sure()
                .and_then(|_| taken_over(analysis, &grants, owner));
            if let Some((taken, rival)) = taken {
                if let Some((by, forced)) = unreported_loss(analysis, owner, taken) {
                    let owner = name(owner);
                    let what =
                        format!("lock {lock}: {owner} did not report its loss, and {rival} has it");
                    found.push(Violation::new(Rule::LossNotReported, by, what).unless(forced));
                }
            }
            if let Some((by, forced)) =
                unreported_loss(analysis, owner, lease_over(analysis, owner))
            {
                let what = format!(
                    "lock {lock}: {} did not report the end of its lease",
                    name(owner)
                );
                found.push(Violation::new(Rule::LossNotReported, by, what).unless(forced));
            }
        }
    }
}

/// The earliest time by which another owner certainly has the lock after an owner's grant, and the
/// name of that other owner. Either the interval of its grant begins after the owner's grant, or a
/// look after the owner's grant shows it. The order of the lines proves nothing.
fn taken_over(
    analysis: &Analysis,
    grants: &[(Grant, &Attempt)],
    owner: &Attempt,
) -> Option<(Nanos, String)> {
    let granted = owner.granted?;
    let later = &grants[grants.partition_point(|(grant, _)| grant.to < granted)..];
    let rival = later
        .iter()
        .find(|(grant, rival)| grant.from >= granted && rival.owner != owner.owner);
    let by_grant = rival.map(|(grant, rival)| (grant.to, name(rival)));
    let until = by_grant.iter().map(|(to, _)| *to);
    let until = until
        .chain(hold_ended(analysis, owner))
        .min()
        .unwrap_or(Nanos::MAX);
    let samples = &analysis.samples;
    let looks = samples[samples.partition_point(|look| look.from < granted)..].iter();
    let other = |key: &&Key| key.lock == owner.lock && key.owner != owner.field;
    let mut seen = looks
        .take_while(|look| look.to < until)
        .filter_map(|look| Some((look.to, look.held.iter().find(other)?.owner.clone())));
    seen.next().or(by_grant)
}

/// When an owner began to release its hold, or can no longer report anything about it.
fn hold_ended(analysis: &Analysis, owner: &Attempt) -> Option<Nanos> {
    owner
        .releasing
        .or(owner.ended.map(|(at, _)| at))
        .or(analysis.killed(owner.process))
}

/// When a loss that happened by that time was due to be reported and was not, and which force
/// unlocks may explain that. `None` if it was reported, or if the process was stopped.
fn unreported_loss(
    analysis: &Analysis,
    owner: &Attempt,
    lost: Nanos,
) -> Option<(Nanos, Vec<Excuse>)> {
    let by = lost.saturating_add(REPORT_TIME);
    let stopped = |fault: &Fault| {
        let stops = fault.kind.starts_with("worker") || fault.kind == STALLED;
        stops && fault.from < by && fault.to + REPORT_TIME > lost
    };
    let ended = hold_ended(analysis, owner);
    let reported = |by: Nanos| {
        owner.lost.as_ref().is_some_and(|lost| lost.at <= by)
            || ended.is_some_and(|ended| ended <= by)
    };
    if reported(by) || analysis.faults_of(owner.process).any(stopped) {
        return None;
    }
    let losses = forced_losses(analysis, owner).iter();
    let forced = losses
        .filter(|loss| lost >= loss.from && reported(loss.report_due.saturating_add(REPORT_TIME)));
    Some((by, forced.map(|loss| loss.excuse.clone()).collect()))
}

/// When the lease of an owner that claims nothing more has ended, by its claims and by the looks.
/// In a longer time between two looks it may have been renewed.
fn lease_over(analysis: &Analysis, owner: &Attempt) -> Nanos {
    let Some(granted) = owner.granted else {
        return Nanos::MAX;
    };
    let looks = &analysis.samples;
    let own = |key: &&Key| key.lock == owner.lock && key.owner == owner.field;
    let mut over = owner.sure_until.max(granted + owner.lease);
    // The looks only move the end to a later time: they do not matter once the hold has ended.
    if hold_ended(analysis, owner).is_some_and(|ended| ended <= over) {
        return over;
    }
    let mut seen = granted;
    for look in &looks[looks.partition_point(|look| look.to < granted)..] {
        if look.to.saturating_sub(seen) > UNSEEN {
            over = over.max(look.to + owner.lease);
        }
        if look.from > over {
            break;
        }
        if let Some(key) = look.held.iter().find(own) {
            over = over.max(look.to + (Nanos::try_from(key.pttl).unwrap_or(0) + ROUNDED) * MS);
        }
        seen = look.from;
    }
    over
}

/// Checks that the futures of `run` are stopped. A step may have begun before another owner's
/// grant and end after it. No step begins after the grant, however late the process is scheduled,
/// because `run` checks the clock before each step.
pub fn runs_stopped(analysis: &Analysis, found: &mut Vec<Violation>) {
    for lock in 0..locks(analysis) {
        let grants = analysis.grants(lock);
        for run in analysis
            .attempts
            .iter()
            .filter(|attempt| attempt.lock == lock && attempt.steps.len() > 1)
        {
            let Some((taken, rival)) = taken_over(analysis, &grants, run) else {
                continue;
            };
            if let Some(at) = run.steps.iter().filter(|step| **step >= taken).nth(1) {
                let forced = excuses(analysis, run, taken, *run.steps.last().unwrap_or(at));
                let (run, ms) = (name(run), (at - taken) / MS);
                let what = format!("lock {lock}: {run} continued {ms} ms after {rival} had it");
                found.push(Violation::new(Rule::RunNotStopped, *at, what).unless(forced));
            }
        }
    }
}

/// Checks that each guarded section read what the previous one wrote.
pub fn register(analysis: &Analysis, found: &mut Vec<Violation>) {
    for lock in 0..locks(analysis) {
        let mut proven = Vec::new();
        let mut unsure = Vec::new();
        for attempt in analysis
            .attempts
            .iter()
            .filter(|attempt| attempt.lock == lock)
        {
            for section in &attempt.sections {
                match section.ended {
                    Some((ended, _, true))
                        if !excuses(analysis, attempt, ended, section.began).is_empty() =>
                    {
                        unsure.push((section.began, ended));
                    }
                    Some((ended, read, true)) => proven.push((section.began, ended, read, attempt)),
                    ended => {
                        let until = analysis.may_write_until(attempt, ended.map(|(at, ..)| at));
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
            let [(began, _, before, first), (_, ended, read, second)] = pair else {
                continue;
            };
            while let Some((_, until)) = unsure.next_if(|(from, _)| from <= ended) {
                may_write_until = may_write_until.max(until);
            }
            if may_write_until < *began && *read != before + 1 {
                let (first, second) = (name(first), name(second));
                let wrote = before + 1;
                let what = format!(
                    "lock {lock}: {first} wrote {wrote}, and {second} after it read {read}"
                );
                found.push(Violation::new(Rule::LostUpdate, *ended, what));
            }
        }
    }
}

/// The sure times of one lock, in the order of their beginnings.
fn sure_of<'s>(analysis: &'s Analysis, lock: usize) -> Vec<(Nanos, Nanos, &'s Attempt)> {
    let of = analysis
        .attempts
        .iter()
        .filter(|attempt| attempt.lock == lock);
    let mut sure: Vec<_> = of
        .filter_map(|attempt| attempt.sure().map(|(from, to)| (from, to, attempt)))
        .collect();
    sure.sort_by_key(|(from, ..)| *from);
    sure
}
