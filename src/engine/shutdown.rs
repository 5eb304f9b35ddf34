//! The end of a client: requests fail, holds are lost, operations run dry.

use std::time::Duration;

use super::notice::Notice;
use super::requests::{Outcome, Request};
use super::tenure::HoldState;
use super::timers::Timer;
use super::{Engine, Event, RequestId};
use crate::error::{Error, LostReason, Step};
use crate::time::Time;

#[derive(Debug)]
pub(super) struct Closing {
    /// The calls of shutdown that wait.
    waiting: Vec<RequestId>,
    /// How long pending operations are waited for, and the holds of guards that are not dropped.
    limit: Duration,
    /// Whether the limit has been reached, or nothing is pending.
    is_over: bool,
    /// The error of the operations that it ends.
    error: Error,
}

impl Engine {
    /// Ends the client: the request is completed when no operation is pending any more.
    pub(crate) fn close(&mut self, now: Time) -> RequestId {
        let id = self.requests.insert(Request::Close);
        self.begin_closing(now);
        match &mut self.closing {
            Some(closing) if !closing.is_over => {
                closing.waiting.push(id);
                self.note_operation_ended();
            }
            _ => self.complete(id, Outcome::Done),
        }
        id
    }

    /// Every handle of the client was dropped: what is pending is completed.
    pub(crate) fn abandon(&mut self, now: Time) {
        self.begin_closing(now);
        self.note_operation_ended();
    }

    fn begin_closing(&mut self, now: Time) {
        if self.closing.is_some() {
            return;
        }
        let limit = self.settings.patience();
        self.closing = Some(Closing {
            waiting: Vec::new(),
            limit,
            is_over: false,
            error: Error::Closed,
        });
        self.timers.set(Timer::Closing, now + limit);
        // Requests whose call is in flight end with its outcome.
        let ended: Vec<RequestId> = self
            .requests
            .iter()
            .filter_map(|(id, request)| match request {
                Request::Acquire(request) => {
                    let waits = request.offer.is_none() && request.op.is_none();
                    (waits && request.place.is_some()).then_some(id)
                }
                _ => None,
            })
            .collect();
        for id in ended {
            self.complete_acquire(id, Outcome::Failed(self.closed()));
        }
        // An offer that is not claimed is released.
        let offered: Vec<_> = self
            .requests
            .iter_mut()
            .filter_map(|(id, request)| match request {
                Request::Acquire(request) => request.offer.take().map(|hold| (id, hold)),
                _ => None,
            })
            .collect();
        for (id, hold) in offered {
            self.drop_hold(now, hold);
            self.complete_acquire(id, Outcome::Failed(self.closed()));
        }
        let locks: Vec<_> = self.locks.keys().collect();
        for lock in locks {
            self.advance_lock(now, lock);
        }
        let held: Vec<_> = self
            .locks
            .values()
            .flat_map(|lock| lock.tenures.clone())
            .collect();
        for tenure in held {
            if !self.is_leaving(tenure) {
                self.lose_tenure(now, tenure, LostReason::Shutdown);
            }
        }
        let transmits = &mut self.transmits;
        self.channels.retain(|name, channel| {
            let is_idle = channel.is_idle();
            if is_idle {
                transmits.push_back(super::Transmit::Unsubscribe(name.clone()));
            }
            !is_idle
        });
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closing.is_some()
    }

    pub(crate) fn ensure_open(&self) -> Result<(), Error> {
        match &self.closing {
            None => Ok(()),
            Some(closing) => Err(closing.error.clone()),
        }
    }

    /// The error of what comes after the end of the client.
    pub(super) fn closed(&self) -> Error {
        match &self.closing {
            Some(closing) => closing.error.clone(),
            None => Error::Closed,
        }
    }

    /// Completes the shutdown if nothing is pending any more.
    pub(super) fn note_operation_ended(&mut self) {
        let Some(closing) = &mut self.closing else {
            return;
        };
        if self.ops.is_empty() && !closing.is_over {
            closing.is_over = true;
            for id in std::mem::take(&mut closing.waiting) {
                self.complete(id, Outcome::Done);
            }
        }
    }

    /// Pending operations were waited for long enough.
    pub(super) fn closing_limit_reached(&mut self) {
        let Some(closing) = &mut self.closing else {
            return;
        };
        let after = closing.limit;
        closing.is_over = true;
        for id in std::mem::take(&mut closing.waiting) {
            let error = Error::Timeout {
                step: Step::Shutdown,
                after,
                lock: None,
                address: None,
            };
            self.complete(id, Outcome::Failed(error));
        }
        self.end();
    }

    /// Ends everything that is left: the link is about to be closed.
    fn end(&mut self) {
        let failed: Vec<_> = self
            .ops
            .values()
            .filter(|op| op.action.leaves_lease())
            .map(|op| op.entry)
            .collect();
        for entry in failed {
            self.stats.failed_releases += 1;
            let subject = self.subject(entry);
            self.notice(Notice::ReleaseNotSent(subject, LostReason::Shutdown));
        }
        self.clear(LostReason::Shutdown, &Error::Closed);
    }

    /// Whether the client has ended: nothing is pending, and no guard is left whose hold would be
    /// released when it is dropped (for a time).
    pub(crate) fn has_ended(&self) -> bool {
        let Some(closing) = &self.closing else {
            return false;
        };
        if !closing.is_over || !self.ops.is_empty() {
            return false;
        }
        // A question whose call is in flight ends with the reply, or at the limit: without the link
        // its caller would wait for ever.
        let is_question =
            |request: &Request| matches!(request, Request::Query(_) | Request::Force(_));
        if self.requests.values().any(is_question) {
            return false;
        }
        // Past the limit nothing is waited for.
        !self.timers.is_set(Timer::Closing)
            || !self
                .holds
                .values()
                .any(|hold| hold.state == HoldState::Guarded)
    }

    /// A defect of the engine: every request ends with an error, every lock counts as lost.
    ///
    /// It reads and changes as little as possible, because the state may be inconsistent.
    pub(crate) fn fail(&mut self) {
        self.closing = Some(Closing {
            waiting: Vec::new(),
            limit: Duration::ZERO,
            is_over: true,
            error: Error::ClientFailed,
        });
        self.transmits.clear();
        self.clear(LostReason::ClientFailed, &Error::ClientFailed);
    }

    /// Ends each request, marks each tenure lost, and forgets everything.
    fn clear(&mut self, reason: LostReason, error: &Error) {
        for (_, tenure) in self.tenures.drain() {
            // At the end of a shutdown those that are left are being released: nothing is lost.
            let is_news = tenure.cell.lose(reason) == LostReason::ClientFailed;
            self.stats.losses.client_failed += u64::from(is_news);
            self.events.push_back(Event::Lost(tenure.cell));
        }
        for (id, _) in self.requests.drain() {
            let outcome = Outcome::Failed(error.clone());
            self.events.push_back(Event::Completed(id, outcome));
        }
        self.ops.clear();
        self.holds.clear();
        self.calls.clear();
        self.channels.clear();
        self.timers.clear_all();
        self.schedule.clear();
        self.locks.clear();
        self.lock_ids.clear();
        self.entries.clear();
        self.entry_ids.clear();
        self.losses.clear();
        self.stats.locks_held = 0;
        self.stats.requests_waiting = 0;
    }
}
