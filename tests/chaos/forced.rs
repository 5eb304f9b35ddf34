//! What a force unlock excuses: it ends the tenure of one owner, who may not know that until the
//! reply to a renewal, or until the lease has ended by its own clock.
//!
//! The history does not say which owner that is. Each violation that such a loss may explain
//! therefore carries excuses: pairs of a force unlock and an owner. At the end, each force unlock
//! is assigned the owner that leaves the fewest violations unexplained.

use std::collections::HashMap;

use super::attempts::{Analysis, Attempt};
use super::history::{Fault, Key, MS, Nanos, Sample};
use super::judge::{REPORT_TIME, Rule, Violation, locks, name};

/// How long a process may still recover from a fault after its end: it sends lost calls again.
pub const FELT: Nanos = 3_000 * MS;

/// The process of a force unlock that is in fact a step of the wall clock.
pub const CLOCK: u64 = u64::MAX;

/// A force unlock.
#[derive(Debug, Clone)]
pub struct Force {
    pub process: u64,
    pub attempt: u64,
    pub lock: usize,
    pub from: Nanos,
    /// When it returned or, if the outcome is unknown, until when its script may have run.
    pub to: Nanos,
    /// Whether it may have freed the lock.
    pub freed: bool,
    /// Whether it reported that it freed the lock; `None` if the outcome is unknown.
    pub answer: Option<bool>,
}

/// A force unlock, by its index in the analysis, and the [field](Attempt::field) of the owner whose
/// tenure it ended.
pub type Excuse = (usize, String);

/// A time in which an owner may not know that a force unlock ended its tenure.
#[derive(Debug, Clone)]
pub struct ForcedLoss {
    pub from: Nanos,
    /// Until when its earlier claims may be wrong.
    pub to: Nanos,
    /// When it has to report the loss: after the next renewal, if no fault delays that.
    pub report_due: Nanos,
    pub excuse: Excuse,
}

/// The times in which an attempt's owner may not know that a force unlock ended its tenure.
pub fn forced_losses<'s>(analysis: &Analysis, attempt: &'s Attempt) -> &'s [ForcedLoss] {
    attempt
        .forced_losses
        .get_or_init(|| find_forced_losses(analysis, attempt))
}

fn find_forced_losses(analysis: &Analysis, attempt: &Attempt) -> Vec<ForcedLoss> {
    let may_have_met = |force: &Force| {
        let asked = force.freed && force.lock == attempt.lock && attempt.invoked <= force.to;
        asked && analysis.may_hold_until(attempt) >= force.from
    };
    let met = analysis
        .forces
        .iter()
        .enumerate()
        .filter(|(_, force)| may_have_met(force));
    met.map(|(number, force)| {
        let to = lease_over(analysis, attempt, force).min(seen_again(analysis, attempt, force));
        let report_due = to.min(next_renewal(analysis, attempt, force));
        ForcedLoss {
            from: force.from,
            to,
            report_due,
            excuse: (number, attempt.field.clone()),
        }
    })
    .collect()
}

/// The force unlocks that may explain why an attempt was wrong in all of that time.
pub fn excuses(analysis: &Analysis, attempt: &Attempt, from: Nanos, to: Nanos) -> Vec<Excuse> {
    let all = forced_losses(analysis, attempt).iter();
    all.filter(|loss| loss.from <= from && to <= loss.to)
        .map(|loss| loss.excuse.clone())
        .collect()
}

/// Checks that force unlocks did what they reported.
pub fn force_unlocks(analysis: &Analysis, found: &mut Vec<Violation>) {
    let of_locks = (0..locks(analysis)).map(|lock| {
        let of_lock = analysis
            .attempts
            .iter()
            .filter(|attempt| attempt.lock == lock);
        let granted = of_lock.filter_map(|attempt| Some((attempt.granted?, attempt)));
        let mut granted: Vec<_> = granted.collect();
        granted.sort_by_key(|(at, _)| *at);
        granted
    });
    let of_locks: Vec<_> = of_locks.collect();
    for force in &analysis.forces {
        let granted = of_locks.get(force.lock).map_or(&[][..], Vec::as_slice);
        let before = granted.partition_point(|(at, _)| *at < force.from);
        let mut before = granted[..before].iter().map(|(_, attempt)| *attempt);
        let problem = match force.answer {
            Some(true) => before
                .find(|owner| stayed(analysis, owner, force))
                .map(|owner| ("freed", owner, vec![])),
            Some(false) => {
                let sure = |owner: &&Attempt| owner.sure().is_some_and(|(_, to)| force.to < to);
                let owner = before.find(sure);
                // A force unlock that began later may have reached the server before this one.
                owner.map(|owner| ("free", owner, excuses(analysis, owner, force.to, force.to)))
            }
            None => None,
        };
        if let Some((answer, owner, excuses)) = problem {
            let (lock, process, owner) = (force.lock, force.process, name(owner));
            let what = format!(
                "lock {lock}: process {process}'s force unlock reported {answer:?}, and {owner} kept it"
            );
            found.push(Violation::new(Rule::FalseReport, force.to, what).unless(excuses));
        }
    }
}

/// Whether an attempt had the lock from the last look before a force unlock until the first one
/// after it, and no other attempt of its owner may have been granted the lock in between.
fn stayed(analysis: &Analysis, attempt: &Attempt, force: &Force) -> bool {
    if analysis.may_hold_until(attempt) < force.to {
        return false;
    }
    let samples = &analysis.samples;
    let Some(before) = samples[..samples.partition_point(|look| look.to <= force.from)].last()
    else {
        return false;
    };
    let Some(after) = samples[samples.partition_point(|look| look.from < force.to)..].first()
    else {
        return false;
    };
    let has = |look: &Sample| {
        look.held
            .iter()
            .any(|key| key.lock == attempt.lock && key.owner == attempt.field)
    };
    let held = attempt.granted.is_some_and(|at| at < before.from)
        && analysis.may_hold_until(attempt) > after.to;
    let others = || {
        analysis
            .same_field(attempt)
            .filter(|other| !std::ptr::eq(*other, attempt))
    };
    let comes_back = |other: &Attempt| {
        other.invoked <= after.to
            && other
                .granted
                .unwrap_or_else(|| analysis.may_hold_until(other))
                >= before.from
    };
    held && has(before) && has(after) && !others().any(comes_back)
}

/// Removes the violations that force unlocks explain.
pub fn unexplained(found: Vec<Violation>) -> Vec<Violation> {
    let mut open: Vec<&[Excuse]> = found.iter().map(|violation| &*violation.excuses).collect();
    let mut met: HashMap<usize, String> = HashMap::new();
    loop {
        let left = |excuse: &&Excuse| !met.contains_key(&excuse.0);
        open.retain(|excuses| {
            !is_explained(excuses, &met) && excuses.iter().any(|excuse| left(&excuse))
        });
        // Violations with a single explanation decide first.
        let Some(least) = open
            .iter()
            .min_by_key(|excuses| excuses.iter().filter(left).count())
        else {
            break;
        };
        let explains = |excuse: &&Excuse| {
            open.iter()
                .filter(|excuses| excuses.contains(excuse))
                .count()
        };
        let Some((force, owner)) = least.iter().filter(left).max_by_key(explains) else {
            break;
        };
        met.insert(*force, owner.clone());
    }
    found
        .into_iter()
        .filter(|violation| !is_explained(&violation.excuses, &met))
        .collect()
}

fn is_explained(excuses: &[Excuse], met: &HashMap<usize, String>) -> bool {
    excuses
        .iter()
        .any(|(force, owner)| met.get(force) == Some(owner))
}

/// When the owner's lease has ended by its own clock. It lasts as long as the longest one that the
/// owner took in this tenure.
fn lease_over(analysis: &Analysis, attempt: &Attempt, force: &Force) -> Nanos {
    let own = analysis
        .same_field(attempt)
        .filter(|other| other.invoked <= force.to);
    let mut own: Vec<_> = own
        .map(|other| (analysis.may_hold_until(other), other.invoked, other.lease))
        .collect();
    // The attempt that may have lasted for longest is first.
    own.sort_unstable_by(|one, other| other.cmp(one));
    let (mut since, mut longest) = (force.from, 0);
    for (until, invoked, lease) in own {
        if until < since {
            break;
        }
        (since, longest) = (since.min(invoked), longest.max(lease));
    }
    force.to.saturating_add(longest)
}

/// When the next renewal was due after a force unlock; never if a fault may have delayed it.
fn next_renewal(analysis: &Analysis, attempt: &Attempt, force: &Force) -> Nanos {
    let due = attempt
        .granted
        .unwrap_or(Nanos::MAX)
        .max(force.to)
        .saturating_add(attempt.lease / 3);
    let fault = |fault: &Fault| {
        fault.from <= due.saturating_add(REPORT_TIME) && fault.to + FELT >= force.from
    };
    let disturbed = !attempt.renewed || analysis.faults_of(attempt.process).any(fault);
    if disturbed { Nanos::MAX } else { due }
}

/// When a look shows that the owner still had the lock after a force unlock; never if another
/// attempt of the owner may have acquired it again.
fn seen_again(analysis: &Analysis, attempt: &Attempt, force: &Force) -> Nanos {
    let samples = &analysis.samples;
    let mut later = samples[samples.partition_point(|sample| sample.from <= force.to)..].iter();
    let has = |key: &Key| key.lock == attempt.lock && key.owner == attempt.field;
    let Some(seen) = later.find(|sample| sample.held.iter().any(has)) else {
        return Nanos::MAX;
    };
    let mut others = analysis
        .same_field(attempt)
        .filter(|other| !std::ptr::eq(*other, attempt));
    let comes_back = others.any(|other| {
        other.invoked <= seen.to
            && other
                .answered()
                .is_none_or(|answered| answered >= force.from)
    });
    if comes_back { Nanos::MAX } else { seen.from }
}
