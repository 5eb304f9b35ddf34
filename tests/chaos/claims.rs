//! What owners may rely on: that nobody else has the lock, that the server has it for them, that
//! they hear of its loss.

use super::attempts::{Attempt, Grant, Story};
use super::forced::{Excuse, excuses, in_the_dark};
use super::history::{Fault, Key, MS, Nanos, STALLED};
use super::judge::{Rule, TOLD, Violation, locks, name};

/// What an expiry may be off, in milliseconds: the server tells whole ones.
const ROUNDED: Nanos = 2;

/// How long a time between two looks at the server may be for a renewal to be seen by them.
const UNSEEN: Nanos = 300 * MS;

/// Whether nobody else was sure while somebody was.
pub fn exclusion(story: &Story, found: &mut Vec<Violation>) {
    for lock in 0..locks(story) {
        let mut open: Vec<(Nanos, &Attempt)> = Vec::new();
        for (from, to, attempt) in sure_of(story, lock) {
            open.retain(|(until, _)| *until > from);
            for (until, other) in open
                .iter()
                .filter(|(_, other)| other.owner != attempt.owner)
            {
                let over = to.min(*until);
                let both = (over - from) / MS;
                let forced = [*other, attempt]
                    .into_iter()
                    .flat_map(|attempt| excuses(story, attempt, from, over));
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

/// Whether the server has what its owners are sure of.
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
                let own: Vec<_> = open
                    .iter()
                    .map(|(_, other)| *other)
                    .filter(|other| other.owner == attempt.owner)
                    .collect();
                let has = sample
                    .held
                    .iter()
                    .find(|key| key.lock == lock && key.owner == attempt.owner);
                let expires = has.and_then(|key| Nanos::try_from(key.pttl).ok());
                let expires = expires.map_or(Nanos::MAX, |pttl| sample.to + (pttl + ROUNDED) * MS);
                let has = has.map_or(0, |key| key.count);
                let said = attempt.said.iter().rev().find(|(at, _)| *at <= sample.from);
                // It may have been looked at after a force unlock, whenever it was asked.
                let forced = |attempt: &Attempt| excuses(story, attempt, sample.to, sample.from);
                if let Some((_, until)) = said.filter(|(_, until)| *until > expires) {
                    let ms = (until - expires) / MS;
                    let what = format!(
                        "lock {lock}: {} is sure for {ms} ms more than its lease lasts",
                        name(attempt)
                    );
                    found.push(
                        Violation::new(Rule::Unfounded, sample.from, what).unless(forced(attempt)),
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
                    // The others have what the server has.
                    let enough = holds - gone.len() as u64 <= has;
                    let forced = gone.into_iter().flatten().filter(|_| enough).collect();
                    found.push(Violation::new(Rule::Unfounded, sample.from, what).unless(forced));
                }
            }
        }
    }
}

/// Whether owners heard of their losses: by the time of a rival's grant, and by the end of their
/// leases.
pub fn told(story: &Story, found: &mut Vec<Violation>) {
    for lock in 0..locks(story) {
        let grants = story.grants(lock);
        let granted = story
            .attempts
            .iter()
            .filter(|attempt| attempt.lock == lock && attempt.granted.is_some());
        for owner in granted {
            let taken = owner.sure().and_then(|_| taken(story, &grants, owner));
            if let Some((taken, rival)) = taken {
                if let Some((by, forced)) = unheard(story, owner, taken) {
                    let owner = name(owner);
                    let what = format!("lock {lock}: {owner} did not hear that {rival} has it");
                    found.push(Violation::new(Rule::NotTold, by, what).unless(forced));
                }
            }
            if let Some((by, forced)) = unheard(story, owner, lease_over(story, owner)) {
                let what = format!(
                    "lock {lock}: {} did not hear that its lease was over",
                    name(owner)
                );
                found.push(Violation::new(Rule::NotTold, by, what).unless(forced));
            }
        }
    }
}

/// The earliest time by which another owner certainly has the lock after an owner's grant, and who
/// that is: the server granted it in a time that begins after that grant, or a look after that
/// grant shows it. The order of the lines shows nothing.
fn taken(story: &Story, grants: &[(Grant, &Attempt)], owner: &Attempt) -> Option<(Nanos, String)> {
    let granted = owner.granted?;
    let later = &grants[grants.partition_point(|(grant, _)| grant.to < granted)..];
    let rival = later
        .iter()
        .find(|(grant, rival)| grant.from >= granted && rival.owner != owner.owner);
    let by_grant = rival.map(|(grant, rival)| (grant.to, name(rival)));
    let until = by_grant.iter().map(|(to, _)| *to);
    let until = until.chain(gone(story, owner)).min().unwrap_or(Nanos::MAX);
    let samples = &story.history.samples;
    let looks = samples[samples.partition_point(|look| look.from < granted)..].iter();
    let other = |key: &&Key| key.lock == owner.lock && key.owner != owner.owner;
    let mut seen = looks
        .take_while(|look| look.to < until)
        .filter_map(|look| Some((look.to, look.held.iter().find(other)?.owner.clone())));
    seen.next().or(by_grant)
}

/// When an owner gave its hold back, or can say no more about it.
fn gone(story: &Story, owner: &Attempt) -> Option<Nanos> {
    owner
        .giving
        .or(owner.ended.map(|(at, _)| at))
        .or(story.killed(owner.process))
}

/// When an owner that had lost the lock by that time, and ran, had to know and did not; and what may
/// explain it.
fn unheard(story: &Story, owner: &Attempt, lost: Nanos) -> Option<(Nanos, Vec<Excuse>)> {
    let by = lost.saturating_add(TOLD);
    let stood = |fault: &Fault| {
        let stands = fault.kind.starts_with("worker") || fault.kind == STALLED;
        stands && fault.from < by && fault.to + TOLD > lost
    };
    let gone = gone(story, owner);
    let knew = |by: Nanos| {
        owner.lost.as_ref().is_some_and(|lost| lost.at <= by) || gone.is_some_and(|gone| gone <= by)
    };
    if knew(by) || story.faults_of(owner.process).any(stood) {
        return None;
    }
    let dark = in_the_dark(story, owner).iter();
    let forced = dark.filter(|dark| lost >= dark.from && knew(dark.told_by.saturating_add(TOLD)));
    Some((by, forced.map(|dark| dark.excuse.clone()).collect()))
}

/// When an owner that has nothing more to say has no lease any more, neither by its own word nor by
/// what was seen of the server. While nobody looks it may be renewed.
fn lease_over(story: &Story, owner: &Attempt) -> Nanos {
    let Some(granted) = owner.granted else {
        return Nanos::MAX;
    };
    let looks = &story.history.samples;
    let own = |key: &&Key| key.lock == owner.lock && key.owner == owner.owner;
    let mut over = owner.sure_until.max(granted + owner.lease);
    // It is over no earlier: the looks do not matter to an owner that ended its hold by then.
    if gone(story, owner).is_some_and(|gone| gone <= over) {
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

/// Whether the futures of `run` were stopped. The step in which a rival's grant falls may have been
/// begun before it; none is begun after it, however late the process gets to it, because the clock
/// is asked before each.
pub fn stopped(story: &Story, found: &mut Vec<Violation>) {
    for lock in 0..locks(story) {
        let grants = story.grants(lock);
        for run in story
            .attempts
            .iter()
            .filter(|attempt| attempt.lock == lock && attempt.steps.len() > 1)
        {
            let Some((taken, rival)) = taken(story, &grants, run) else {
                continue;
            };
            if let Some(at) = run.steps.iter().filter(|step| **step >= taken).nth(1) {
                let forced = excuses(story, run, taken, *run.steps.last().unwrap_or(at));
                let (run, ms) = (name(run), (at - taken) / MS);
                let what = format!("lock {lock}: {run} went on {ms} ms after {rival} had it");
                found.push(Violation::new(Rule::NotStopped, *at, what).unless(forced));
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
                    Some((ended, _, true))
                        if !excuses(story, attempt, ended, section.began).is_empty() =>
                    {
                        unsure.push((section.began, ended));
                    }
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
fn sure_of<'s>(story: &'s Story, lock: usize) -> Vec<(Nanos, Nanos, &'s Attempt)> {
    let of = story.attempts.iter().filter(|attempt| attempt.lock == lock);
    let mut sure: Vec<_> = of
        .filter_map(|attempt| attempt.sure().map(|(from, to)| (from, to, attempt)))
        .collect();
    sure.sort_by_key(|(from, ..)| *from);
    sure
}
