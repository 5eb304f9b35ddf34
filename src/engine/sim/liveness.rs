//! Rules about time: what has to end within its time, and what must not end without a reason.

use std::sync::Arc;
use std::time::Duration;

use super::super::{Outcome, Wait};
use super::callers::{Tracked, What};
use super::oracle::Sure;
use super::world::World;
use crate::error::{Error, LostReason};
use crate::lease_cell::LeaseCell;
use crate::time::Time;

/// What kept a client from being served at once.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// When that was last; it may be known beforehand.
    pub(super) troubled: Time,
    /// When the server refused something last.
    refused: Time,
    /// By how much its timers and its process were late, all together.
    late: Duration,
}

impl Health {
    /// The server refused something.
    pub(super) fn refused(&mut self, now: Time) {
        self.refused = now;
        self.troubled = self.troubled.max(now);
    }

    /// The process does something late, until that moment.
    pub(super) fn delay(&mut self, until: Time, late: Duration) {
        self.troubled = self.troubled.max(until);
        self.late += late;
    }

    pub(super) fn late(&self) -> Duration {
        self.late
    }
}

/// How late timers may fire altogether that the plan does not make late.
const TIMERS: Duration = Duration::from_millis(20);

impl World {
    /// Takes in which clients have no connection for calls.
    pub(super) fn look_at_links(&mut self) {
        for client in &mut self.clients {
            if !client.link.is_up {
                client.health.troubled = client.health.troubled.max(self.now);
            }
        }
    }

    /// A tenure is lost. What the server is said not to have, it does not have. A tenure that the
    /// watchdog renews is not lost by its time while the client runs and its calls are answered:
    /// the time from the end of the trouble was enough for a renewal.
    pub(super) fn lost(&mut self, client: usize, cell: &Arc<LeaseCell>) {
        let is_there = |sure: &&Sure| {
            let name = &self.locks[sure.lock].name;
            let owner = self.database.owner(name).map(|(field, _)| field);
            Arc::ptr_eq(&sure.cell, cell)
                && owner == Some(&sure.field)
                && self.database.born(name) == Some(sure.born)
        };
        let reason = cell.lost(self.now);
        let kept = self.oracle.sure.iter().find(is_there);
        if let (Some(LostReason::Gone), Some(sure)) = (reason, kept) {
            let problem = format!("client {client} loses what the server has for it: {sure:?}");
            self.fail(problem);
            return;
        }
        let record = &self.clients[client];
        // The longest pause after a refused renewal, and the reply to the next one.
        let renewal = self.plan.watchdog / 6 + self.plan.command_timeout + TIMERS;
        let troubled = record.health.troubled;
        if self.plan.is_timed
            && reason == Some(LostReason::Expired)
            && record.engine.is_watched(cell)
            && troubled + renewal < self.now
        {
            self.fail(format!(
                "client {client} loses a lock that the watchdog renews, without trouble since \
                 {troubled:?}"
            ));
        }
    }

    /// What is wrong with the end of a request, by its time or without a reason.
    pub(super) fn wrong_end(
        &self,
        client: usize,
        tracked: &Tracked,
        outcome: &Outcome,
    ) -> Option<String> {
        if !self.plan.is_timed {
            return None;
        }
        let record = &self.clients[client];
        let elapsed = self.now.since(tracked.begun);
        let limit = self.limit_of(&tracked.what);
        let late = record.health.late.saturating_sub(tracked.late);
        if limit.is_some_and(|limit| elapsed > limit + late + TIMERS) {
            return Some(format!(
                "{:?} ends after {elapsed:?} rather than {limit:?}: {outcome:?}",
                tracked.what
            ));
        }
        // What got no reply is tried again for the retry timeout, less the last pause.
        let is_tried = matches!(
            tracked.what,
            What::Release { .. }
                | What::Unlock { .. }
                | What::Acquire {
                    wait: Wait::Unlimited,
                    ..
                }
        );
        let is_short = elapsed + Duration::from_millis(250) < self.plan.retry_timeout;
        if let (true, true, Outcome::Failed(error)) = (is_tried, is_short, outcome) {
            let is_silence = matches!(
                error,
                Error::Connection { .. } | Error::OutcomeUnknown { .. }
            );
            // The lock that was passed on was lost, so there is nothing left to confirm it with.
            let is_unconfirmed = matches!(
                error,
                Error::OutcomeUnknown { detail, .. } if detail.contains("was not confirmed")
            );
            let is_excused = tracked.is_resumed
                || is_unconfirmed
                || !record.is_open()
                || record.health.refused >= tracked.begun;
            if is_silence && !is_excused {
                return Some(format!(
                    "{:?} is tried for {elapsed:?} only: {error:?}",
                    tracked.what
                ));
            }
        }
        let What::Acquire { wait, .. } = tracked.what else {
            return None;
        };
        let is_early = match wait {
            Wait::AtMost(wait) => !tracked.is_resumed && elapsed < wait,
            Wait::Unlimited => true,
        };
        if matches!(outcome, Outcome::Contended) && is_early {
            return Some(format!(
                "{:?} ends after {elapsed:?} as contended",
                tracked.what
            ));
        }
        let Outcome::Failed(error) = outcome else {
            return None;
        };
        let is_troubled = record.health.troubled >= tracked.begun || !record.link.is_up;
        let has_reason = match error {
            Error::Closed => !record.is_open(),
            Error::WouldDeadlock { .. } => {
                self.plan.detection == crate::config::DeadlockDetection::Fail
            }
            // Two clients may change the hold count of one owner.
            Error::Server { .. } => is_troubled || self.plan.is_adopted,
            // An earlier operation may wait for a reply that is slow or lost, or pause.
            Error::Timeout { .. } => {
                let pause = self.plan.command_timeout * 2 + Duration::from_millis(500);
                is_troubled || record.health.troubled.max(self.faulted) + pause >= tracked.begun
            }
            Error::Connection { .. } | Error::OutcomeUnknown { .. } => is_troubled,
            _ => false,
        };
        (!has_reason).then(|| format!("{:?} ends without a reason: {error:?}", tracked.what))
    }

    /// How long a request may last.
    fn limit_of(&self, what: &What) -> Option<Duration> {
        let (command, retry) = (self.plan.command_timeout, self.plan.retry_timeout);
        // A call waits for a connection, and then for its reply.
        let call = command * 2;
        match what {
            // What is in flight is completed: an earlier operation of the owner, and the attempt.
            What::Acquire {
                wait: Wait::AtMost(wait),
                ..
            } => Some((*wait).max(command) + call * 2),
            What::Release { .. } | What::Unlock { .. } | What::Close => Some(retry.max(command)),
            What::Query => Some(retry + call),
            What::Acquire { .. } | What::Force { .. } => None,
        }
    }
}
