//! The judge: a pure function from a history to the violations in it.
//!
//! # Times
//!
//! A process writes a line when it notices an event. It may have been stopped in between (SIGSTOP),
//! so a line only says that the event happened by then. Each rule therefore compares intervals:
//!
//! * A grant lies between the invocation of its attempt and its line. The looks at the server
//!   narrow that interval ([`Analysis::grant`]).
//! * A loss lies between the last stop of its process and its line ([`Analysis::written_since`]).
//! * A release lies between the last look that finds the lock held and the first one that finds it
//!   free.
//! * A claim ("the lock is not lost for another 300 ms") counts from a time that was taken before
//!   the library was asked, so it is correct however late its line is.
//!
//! # Rules
//!
//! **Exclusion.** The judge takes every claim of the library literally. An owner is *sure* of its
//! lock from the return of the acquire. At each time `t` at which it asked `remaining_lease()`, it
//! is sure until `t` plus the answer, and never beyond the invocation of the release. A confirmed
//! unlock says that the owner held the lock until the invocation of the unlock. A `run` that
//! returns a result says so for all the time of its future. No claim depends on how fast a signal
//! arrives, so the rule also covers a process that is killed, starved or stopped: such a process
//! may *believe* for longer that it holds the lock, but it claims nothing without asking. The sure
//! times of two owners must never overlap. Each look at the server must show the owner that is
//! sure, with at least as many holds, and a lease that lasts for as long as the library claimed.
//!
//! **Loss reports.** When another owner has the lock, `lost()` of the previous owner has completed.
//! When no other owner takes the lock, `lost()` completes by the end of all claims and of the last
//! lease that a look shows. A process has half a second to write the loss down, and must have been
//! running during it.
//!
//! **Stopped runs.** The future of a `run` begins no step after another owner was granted the lock.
//! The step that runs at that time may end, however late. The judge recognises it by the step after
//! it, and allows no time for that: a process that was stopped checks the clock first.
//!
//! **Force unlocks.** A force unlock excuses one owner, of those that may have held the lock while
//! it ran: from its invocation until a look shows that owner with the lock again, or until the
//! lease has ended by the owner's clock. The excuse also ends when the owner reports the loss,
//! because no owner is sure after that. If the lease is renewed and no fault happened, the owner
//! reports the loss a third of the lease later.
//!
//! **Clock steps.** A step of the wall clock ends leases on the server early. It excuses one owner
//! of each lock, as a force unlock does, until the leases of that time have ended.
//!
//! **Holds on the server.** The server never has more holds of an owner than attempts of that owner
//! that may have one. An attempt that reported a failure, or whose release was confirmed, has none.
//! An attempt with an unknown outcome may have one until its process has had no fault for a second
//! or, if its user could not run scripts, until its lease has ended. Every key has an expiry.
//!
//! **Outcomes.** Reported hold counts are correct. No unlock succeeds after the owner reported a
//! loss, and no owner is sure after it. A loss by the owner's clock never comes before the end of a
//! claim and, without a fault, not long before the end of the lease on the server. Any other loss
//! never comes while the server has the lock for the owner. Without a fault, no renewed lease ends,
//! no operation fails, and no outcome is unknown. An acquire reports contention only if another
//! owner may hold the lock.
//!
//! **Wake-ups.** While every look finds a lock free, no waiter waits for it for longer than 1.5 s,
//! unless its process met a fault then or in the 1.5 s before. The bound is far below the long
//! re-check interval that some workers have, and far above the time of a wake-up. Workers with the
//! long interval are also excused if the process that released the lock could not publish, and
//! while they could not subscribe.
//!
//! **Register.** A section that was sure of its lock from before its read until after its write
//! reads what the previous one wrote, unless a section that was not sure may have written between
//! the two.
//!
//! **Panic.** No process panics, not even where the panic is caught.
//!
//! **Ends.** Every acquire of a process that was not killed ends. At the end of the run there is no
//! key, no subscription and no task.
//!
//! # Faults that were not planned
//!
//! The server answers a look within milliseconds. If it answers none for 300 ms and no fault of the
//! server was planned, the machine was busy or its disk slow: that counts as a fault of all
//! processes.

use std::fmt;

use super::attempts::{Analysis, Attempt};
use super::claims::{exclusion, losses_reported, register, runs_stopped, server_agrees};
use super::forced::{Excuse, force_unlocks, unexplained};
use super::history::{History, MS, Nanos, seconds};
use super::outcomes::{outcomes, panics, server_holds};
use super::wakeups::wakeups;

/// How long a process may take to write a loss down.
pub const REPORT_TIME: Nanos = 500 * MS;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// Two owners were sure of one lock.
    Exclusion,
    /// An owner was sure of a lock that the server did not have for it.
    NotHeldOnServer,
    /// An owner did not report its loss in time.
    LossNotReported,
    /// A guarded future began a step after another owner had the lock.
    RunNotStopped,
    /// The server has a hold, or more holds, than any attempt can have.
    Leak,
    /// A key has no expiry.
    NoExpiry,
    /// A reported hold count is wrong.
    WrongCount,
    /// A reported outcome contradicts the rest of the history.
    FalseReport,
    /// A waiter waited for a free lock.
    LostWakeup,
    /// A guarded update of the register was lost.
    LostUpdate,
    /// An operation did not end, or something is left on the server or in a process.
    LeftBehind,
    /// The run itself or one of its processes panicked.
    Panic,
}

#[derive(Debug, Clone)]
pub struct Violation {
    pub rule: Rule,
    pub at: Nanos,
    pub what: String,
    /// Force unlocks that may be the reason; the library is not wrong then.
    pub excuses: Vec<Excuse>,
}

impl Violation {
    /// A violation without an excuse.
    pub fn new(rule: Rule, at: Nanos, what: String) -> Self {
        Self {
            rule,
            at,
            what,
            excuses: Vec::new(),
        }
    }

    /// The same, with force unlocks that may be the reason.
    pub fn unless(self, excuses: Vec<Excuse>) -> Self {
        Self { excuses, ..self }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {}: {}", self.rule, seconds(self.at), self.what)
    }
}

/// Finds all violations, in the order of their times.
pub fn judge(history: &History) -> Vec<Violation> {
    let analysis = Analysis::new(history);
    let mut found = Vec::new();
    exclusion(&analysis, &mut found);
    server_agrees(&analysis, &mut found);
    server_holds(&analysis, &mut found);
    losses_reported(&analysis, &mut found);
    runs_stopped(&analysis, &mut found);
    outcomes(&analysis, &mut found);
    force_unlocks(&analysis, &mut found);
    wakeups(&analysis, &mut found);
    register(&analysis, &mut found);
    left_behind(&analysis, &mut found);
    found.extend(panics(history));
    found.sort_by_key(|violation| violation.at);
    unexplained(found)
}

/// The number of locks.
pub fn locks(analysis: &Analysis) -> usize {
    analysis
        .attempts
        .iter()
        .map(|attempt| attempt.lock + 1)
        .max()
        .unwrap_or(0)
}

fn left_behind(analysis: &Analysis, found: &mut Vec<Violation>) {
    let end = analysis
        .history
        .samples
        .last()
        .map_or(0, |sample| sample.to);
    for attempt in &analysis.attempts {
        if analysis.killed(attempt.process).is_some() {
            continue;
        }
        let problem = match (
            attempt.answered(),
            attempt.releasing.or(attempt.ended.map(|(at, _)| at)),
        ) {
            (None, _) => "never ended",
            (Some(_), None) => "was never released",
            (Some(_), Some(_)) => continue,
        };
        let what = format!("lock {}: {} {problem}", attempt.lock, name(attempt));
        found.push(Violation::new(Rule::LeftBehind, end, what));
    }
    for left in &analysis.history.left {
        found.push(Violation::new(Rule::LeftBehind, end, left.clone()));
    }
}

/// The name of an attempt in a message.
pub fn name(attempt: &Attempt) -> String {
    let thread = attempt.owner.rsplit(':').next().unwrap_or_default();
    format!(
        "process {}'s {} by {thread} at {}",
        attempt.process,
        attempt.how,
        seconds(attempt.invoked)
    )
}
