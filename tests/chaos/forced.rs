//! What a force unlock permits: that one owner's possession ends without its owner's doing, who may
//! not know until a renewal tells, or until the lease is over by its own clock.
//!
//! Whom it took is not told. So what is wrong with the time that follows is noted with those whose
//! possession explains it, and each force unlock is taken to have met one of them, as leaves the
//! least unexplained.

use std::collections::HashMap;

use super::attempts::{Attempt, Story};
use super::history::{Fault, Key, MS, Nanos, Sample};
use super::judge::{Rule, TOLD, Violation, locks, name};

/// For how long after a fault a process may still be busy with it: what is lost is asked for again.
pub const FELT: Nanos = 3_000 * MS;

/// The process of a force unlock that stands for a step of the wall clock.
pub const CLOCK: u64 = u64::MAX;

/// A force unlock.
#[derive(Debug, Clone)]
pub struct Force {
    pub process: u64,
    pub attempt: u64,
    pub lock: usize,
    pub from: Nanos,
    /// When it returned, or until when its script may have run.
    pub to: Nanos,
    /// Whether it may have freed the lock.
    pub freed: bool,
    /// Whether it was told to have done so; `None` if that is not known.
    pub told: Option<bool>,
}

/// A force unlock, by its place in the story, and the owner whom it took.
pub type Excuse = (usize, String);

/// A time in which an owner may not know that it was forced out.
#[derive(Debug, Clone)]
pub struct InTheDark {
    pub from: Nanos,
    /// Until when what it was told before may be wrong.
    pub to: Nanos,
    /// When it has to know: a renewal tells, if nothing keeps it from the server.
    pub told_by: Nanos,
    pub excuse: Excuse,
}

/// When an attempt's owner may not have known that it was forced out.
pub fn in_the_dark<'s>(story: &Story, attempt: &'s Attempt) -> &'s [InTheDark] {
    attempt.dark.get_or_init(|| find_dark(story, attempt))
}

fn find_dark(story: &Story, attempt: &Attempt) -> Vec<InTheDark> {
    let may_have_met = |force: &Force| {
        let asked = force.freed && force.lock == attempt.lock && attempt.invoked <= force.to;
        asked && story.may_hold_until(attempt) >= force.from
    };
    let met = story
        .forces
        .iter()
        .enumerate()
        .filter(|(_, force)| may_have_met(force));
    met.map(|(number, force)| {
        let to = lease_over(story, attempt, force).min(seen_again(story, attempt, force));
        let told_by = to.min(next_renewal(story, attempt, force));
        InTheDark {
            from: force.from,
            to,
            told_by,
            excuse: (number, attempt.owner.clone()),
        }
    })
    .collect()
}

/// What may explain that somebody was wrong from then until then.
pub fn excuses(story: &Story, attempt: &Attempt, from: Nanos, to: Nanos) -> Vec<Excuse> {
    let all = in_the_dark(story, attempt).iter();
    all.filter(|dark| dark.from <= from && to <= dark.to)
        .map(|dark| dark.excuse.clone())
        .collect()
}

/// Whether the force unlocks did what they were told to have done.
pub fn force_unlocks(story: &Story, found: &mut Vec<Violation>) {
    let of_locks = (0..locks(story)).map(|lock| {
        let of_lock = story.attempts.iter().filter(|attempt| attempt.lock == lock);
        let granted = of_lock.filter_map(|attempt| Some((attempt.granted?, attempt)));
        let mut granted: Vec<_> = granted.collect();
        granted.sort_by_key(|(at, _)| *at);
        granted
    });
    let of_locks: Vec<_> = of_locks.collect();
    for force in &story.forces {
        let granted = of_locks.get(force.lock).map_or(&[][..], Vec::as_slice);
        let before = granted.partition_point(|(at, _)| *at < force.from);
        let mut before = granted[..before].iter().map(|(_, attempt)| *attempt);
        let problem = match force.told {
            Some(true) => before
                .find(|owner| stayed(story, owner, force))
                .map(|owner| ("freed", owner, vec![])),
            Some(false) => {
                let sure = |owner: &&Attempt| owner.sure().is_some_and(|(_, to)| force.to < to);
                let owner = before.find(sure);
                // Another force unlock that began later may have come before it.
                owner.map(|owner| ("free", owner, excuses(story, owner, force.to, force.to)))
            }
            None => None,
        };
        if let Some((told, owner, excuses)) = problem {
            let (lock, process, owner) = (force.lock, force.process, name(owner));
            let what = format!(
                "lock {lock}: process {process}'s force unlock said {told:?}, and {owner} kept it"
            );
            found.push(Violation::new(Rule::Lie, force.to, what).unless(excuses));
        }
    }
}

/// Whether an attempt had the lock from the last look before a force unlock until the first one
/// after it, and nobody else may have given its owner the lock again in between.
fn stayed(story: &Story, attempt: &Attempt, force: &Force) -> bool {
    if story.may_hold_until(attempt) < force.to {
        return false;
    }
    let samples = &story.history.samples;
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
            .any(|key| key.lock == attempt.lock && key.owner == attempt.owner)
    };
    let held = attempt.granted.is_some_and(|at| at < before.from)
        && story.may_hold_until(attempt) > after.to;
    let others = || {
        story
            .same_owner(attempt)
            .filter(|other| !std::ptr::eq(*other, attempt))
    };
    let comes_back = |other: &Attempt| {
        other.invoked <= after.to
            && other.granted.unwrap_or_else(|| story.may_hold_until(other)) >= before.from
    };
    held && has(before) && has(after) && !others().any(comes_back)
}

/// Leaves what no force unlock explains.
pub fn unexplained(found: Vec<Violation>) -> Vec<Violation> {
    let mut open: Vec<&[Excuse]> = found.iter().map(|violation| &*violation.excuses).collect();
    let mut met: HashMap<usize, String> = HashMap::new();
    loop {
        let left = |excuse: &&Excuse| !met.contains_key(&excuse.0);
        open.retain(|excuses| {
            !is_explained(excuses, &met) && excuses.iter().any(|excuse| left(&excuse))
        });
        // What has only one explanation decides first.
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

/// When the owner's lease is over by its own clock: it holds as long as the longest that it took,
/// since it last had none.
fn lease_over(story: &Story, attempt: &Attempt, force: &Force) -> Nanos {
    let own = story
        .same_owner(attempt)
        .filter(|other| other.invoked <= force.to);
    let mut own: Vec<_> = own
        .map(|other| (story.may_hold_until(other), other.invoked, other.lease))
        .collect();
    // The one that may have lasted for longest is first.
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

/// When a renewal was due after a force unlock, of an owner whose process met no fault.
fn next_renewal(story: &Story, attempt: &Attempt, force: &Force) -> Nanos {
    let due = attempt
        .granted
        .unwrap_or(Nanos::MAX)
        .max(force.to)
        .saturating_add(attempt.lease / 3);
    let fault =
        |fault: &Fault| fault.from <= due.saturating_add(TOLD) && fault.to + FELT >= force.from;
    let disturbed = !attempt.renewed || story.faults_of(attempt.process).any(fault);
    if disturbed { Nanos::MAX } else { due }
}

/// When the server was seen to have the lock for the owner after all, who cannot have come back in
/// between.
fn seen_again(story: &Story, attempt: &Attempt, force: &Force) -> Nanos {
    let samples = &story.history.samples;
    let mut later = samples[samples.partition_point(|sample| sample.from <= force.to)..].iter();
    let has = |key: &Key| key.lock == attempt.lock && key.owner == attempt.owner;
    let Some(seen) = later.find(|sample| sample.held.iter().any(has)) else {
        return Nanos::MAX;
    };
    let mut others = story
        .same_owner(attempt)
        .filter(|other| !std::ptr::eq(*other, attempt));
    let comes_back = others.any(|other| {
        other.invoked <= seen.to
            && other
                .answered()
                .is_none_or(|answered| answered >= force.from)
    });
    if comes_back { Nanos::MAX } else { seen.from }
}
