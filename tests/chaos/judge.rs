//! The judge: a pure function from a history to what was broken in it.
//!
//! **Exclusion.** What the library says of time is taken at its word. A guard is *sure* from the
//! acquire's return, and at each time `t` before which `remaining_lease()` was asked it is sure
//! until `t` + what that answered; never beyond the invocation of what gives the hold back. An
//! unlock that is confirmed says that the lock was held until its invocation, and a `run` that
//! brings a result says so of all the time that its future ran. None of this depends on how fast a
//! signal is heard, so it holds for a process as well that is killed, starved or stopped (SIGSTOP):
//! such a process may *think* for longer that it has the lock, but every claim in its history was
//! proved when it was made, and nothing is claimed without asking. Two owners' sure times must
//! never overlap, and whenever the server is asked it must have the owner that is sure, with at
//! least as many holds, and a lease that lasts for as long as was said.
//!
//! **Told.** Where a rival was granted the lock, the owner has heard `lost()` by then; where none
//! was, by the end of all that it was sure of and of the lease that the server was last seen to
//! have for it. Half a second is allowed for the writing down, and the process must have run in it.
//!
//! **Stopped.** The future of a `run` begins no step after a rival's grant was returned. The step
//! that is under way then may end, however late; it is told from others by the next one, and no
//! time is allowed for that: a process that stood still looks at the clock first.
//!
//! **Force unlocks.** A force unlock permits all of this for the possession of one owner, of those
//! who may have had the lock while it was under way: from its invocation until the server is seen
//! to have the lock for that owner after all, or until the lease is over by the owner's clock. That
//! the owner is told ends it as well: nobody is sure after that. Where the lease is renewed and
//! nothing was wrong, a third of the lease later it has to be told.
//!
//! **Truth.** The server never has more holds of an owner than attempts of that owner that may be
//! there: not one that was told to have failed, or to be given back, not for a moment; one whose
//! end is not known until its process has been without a fault for a second, or, if its user may
//! not have had the right to run scripts, until its lease is over. No key is without an expiry. The
//! counts that are told are right. No unlock succeeds after the loss was told, and nobody is sure
//! after it. A loss by the owner's clock never comes before the time that was told to be sure, and,
//! where there was no fault, not while the server's lease goes on for long; any other loss never
//! comes while the server has the lock for the owner. A renewed lease does not end, nothing fails
//! and nothing is unknown, where there was no fault. Nobody is told of contention where nobody else
//! is.
//!
//! **Wake-ups.** While a lock is free whenever one looks, nobody waits for it for longer than a
//! second and a half, unless the process met a fault, or did in the second and a half before. The
//! bound is far below the re-check interval of those workers that have a long one, and far above
//! what a wake-up takes. These alone are excused as well where the one who freed the lock may not
//! have had the right to publish, and as long as they wait after they may not have had the right to
//! subscribe.
//!
//! **Register.** A section that was sure of its lock from before its read until after its write
//! finds what the last one before it wrote, unless a section that was not sure may have written in
//! between.
//!
//! **Panic.** Nothing panics, in no process, not where it is caught either.
//!
//! **Conservation.** Every acquire of a process that lives comes to an end, and when all is over
//! there is no key, no subscription and no task.

use std::fmt;

use super::attempts::{Attempt, Story};
use super::claims::{exclusion, register, server, stopped, told};
use super::forced::{Excuse, force_unlocks, unexplained};
use super::history::{History, MS, Nanos, seconds};
use super::wakeups::wakeups;
use super::words::{panics, truth, words};

/// For how long a loss may be on its way to the history.
pub const TOLD: Nanos = 500 * MS;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// Two owners were sure of one lock.
    Exclusion,
    /// An owner was sure of a lock that the server did not have for it.
    Unfounded,
    /// An owner did not hear that it had lost.
    NotTold,
    /// A guarded future went on after a rival had the lock.
    NotStopped,
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
    /// The run itself came to grief, or something in one of its processes.
    Panic,
}

#[derive(Debug, Clone)]
pub struct Violation {
    pub rule: Rule,
    pub at: Nanos,
    pub what: String,
    /// What may have been the reason and is none of the library's fault.
    pub excuses: Vec<Excuse>,
}

impl Violation {
    /// One for which there is no excuse.
    pub fn new(rule: Rule, at: Nanos, what: String) -> Self {
        Self {
            rule,
            at,
            what,
            excuses: Vec::new(),
        }
    }

    /// With what may have been the reason.
    pub fn unless(self, excuses: Vec<Excuse>) -> Self {
        Self { excuses, ..self }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {}: {}", self.rule, seconds(self.at), self.what)
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
    stopped(&story, &mut found);
    words(&story, &mut found);
    force_unlocks(&story, &mut found);
    wakeups(&story, &mut found);
    register(&story, &mut found);
    conservation(&story, &mut found);
    found.extend(panics(history));
    found.sort_by_key(|violation| violation.at);
    unexplained(found)
}

/// How many locks there are.
pub fn locks(story: &Story) -> usize {
    story
        .attempts
        .iter()
        .map(|attempt| attempt.lock + 1)
        .max()
        .unwrap_or(0)
}

fn conservation(story: &Story, found: &mut Vec<Violation>) {
    let end = story.history.samples.last().map_or(0, |sample| sample.to);
    for attempt in &story.attempts {
        if story.killed(attempt.process).is_some() {
            continue;
        }
        let problem = match (
            attempt.answered(),
            attempt.giving.or(attempt.ended.map(|(at, _)| at)),
        ) {
            (None, _) => "never ended",
            (Some(_), None) => "was never given back",
            (Some(_), Some(_)) => continue,
        };
        let what = format!("lock {}: {} {problem}", attempt.lock, name(attempt));
        found.push(Violation::new(Rule::Conservation, end, what));
    }
    for left in &story.history.left {
        found.push(Violation::new(Rule::Conservation, end, left.clone()));
    }
}

/// What an attempt is called in a message.
pub fn name(attempt: &Attempt) -> String {
    let thread = attempt.owner.rsplit(':').next().unwrap_or_default();
    format!(
        "process {}'s {} by {thread} at {}",
        attempt.process,
        attempt.how,
        seconds(attempt.invoked)
    )
}
