//! What callers wait for: requests to acquire, with their limits, offers and cancellation.

use std::sync::Arc;
use std::time::Duration;

use super::errors;
use super::force_unlock::Forcing;
use super::notice::Notice;
use super::queries::Query;
use super::tenure::{Hold, Mode};
use super::timers::Timer;
use super::{Engine, EntryId, Event, HoldId, OpId, RequestId};
use crate::config::LeaseTime;
use crate::error::{Error, Step};
use crate::keys::Keys;
use crate::kind::{Inspected, Kind};
use crate::lease_cell::HoldCell;
use crate::owner::{Owner, TaskKey};
use crate::time::Time;

/// A wish to acquire one hold.
#[derive(Debug, Clone)]
pub(crate) struct AcquireRequest {
    pub(crate) keys: Keys,
    pub(crate) kind: Kind,
    pub(crate) owner: Owner,
    /// The lease; `None` for the watchdog timeout, renewed.
    pub(crate) lease: Option<LeaseTime>,
    pub(crate) wait: Wait,
    /// The task or thread that asks, for deadlock detection.
    pub(crate) task: TaskKey,
}

/// How long a request waits for a lock that another owner holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    Unlimited,
    /// At most this long; zero makes one attempt.
    AtMost(Duration),
}

/// A hold that was granted.
#[derive(Debug, Clone)]
pub(crate) struct Grant {
    pub(crate) hold: HoldId,
    pub(crate) cell: Arc<HoldCell>,
    /// The fencing token of the tenure, if the request asked for one.
    pub(crate) token: Option<i64>,
}

/// What came of a request.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Offered: the caller has to [`claim`](Engine::claim) it.
    Granted,
    /// Another owner holds the lock.
    Contended,
    /// The offer was not claimed in time, and was released. The caller has to
    /// [`resume`](Engine::resume) the request.
    Unclaimed,
    /// A release or a shutdown is done.
    Done,
    Inspected(Inspected),
    Counted(i64),
    /// A force unlock: whether the lock was held.
    Freed(bool),
    /// The server did not release the hold. It is counted if its caller does not see it.
    NotReleased(Error),
    Failed(Error),
}

#[derive(Debug)]
pub(super) enum Request {
    Acquire(Acquiring),
    /// A release; the operation knows the request.
    Release {
        keys: Keys,
        entry: EntryId,
        op: Option<OpId>,
        /// Whether its caller gets to see an unknown outcome.
        is_reported: bool,
    },
    Query(Query),
    Force(Forcing),
    Close,
}

/// A request to acquire, until its caller has the hold.
#[derive(Debug)]
pub(super) struct Acquiring {
    pub(super) entry: EntryId,
    pub(super) kind: Kind,
    pub(super) mode: Mode,
    pub(super) task: TaskKey,
    pub(super) begun: Time,
    pub(super) ends: Option<Time>,
    /// How long transient errors are retried.
    pub(super) patience: Duration,
    /// Whether the server was asked for it.
    pub(super) asked: bool,
    /// Its place in the wait queue.
    pub(super) place: Option<u64>,
    /// Its operation, from the queueing to the end.
    pub(super) op: Option<OpId>,
    /// A grant that the caller has not claimed yet.
    pub(super) offer: Option<HoldId>,
    /// How many answers the lock had had when it joined the wait queue.
    pub(super) answers: u64,
    /// When it stops waiting for an answer after the end of its wait.
    pub(super) limit: Option<Time>,
    /// Whether it was checked for a deadlock.
    pub(super) checked: bool,
    pub(super) warned_of_own: bool,
}

/// How long a grant waits for its caller.
const OFFER: Duration = Duration::from_millis(500);

impl Engine {
    /// Begins to acquire a hold.
    pub(crate) fn acquire(&mut self, now: Time, request: AcquireRequest) -> RequestId {
        let entry = self.entry_id(&request.keys, request.owner);
        let (ends, patience) = match request.wait {
            Wait::Unlimited => (None, self.settings.retry_timeout),
            // Another owner is waited for as long as the wait allows; transient errors are retried
            // at least for the time of one reply.
            Wait::AtMost(wait) => (
                Some(now + wait),
                wait.max(self.settings.command_timeout)
                    .min(self.settings.retry_timeout),
            ),
        };
        let mode = match request.lease {
            None => Mode::Watchdog,
            Some(lease) => Mode::Fixed(lease),
        };
        let id = self.requests.insert(Request::Acquire(Acquiring {
            entry,
            kind: request.kind,
            mode,
            task: request.task,
            begun: now,
            ends,
            patience,
            asked: false,
            place: None,
            op: None,
            offer: None,
            answers: 0,
            limit: None,
            checked: false,
            warned_of_own: false,
        }));
        self.entries[entry].requests += 1;
        if self.is_closed() {
            self.complete_acquire(id, Outcome::Failed(self.closed()));
        } else if ends == Some(now) && !self.is_held_by_other(entry) {
            // No time to wait: one attempt, past any queue.
            self.begin_attempt(now, id, None);
        } else if ends == Some(now) {
            self.complete_acquire(id, Outcome::Contended);
        } else {
            self.route(now, id);
        }
        id
    }

    /// The caller takes the hold that it was offered.
    pub(crate) fn claim(&mut self, now: Time, id: RequestId) -> Result<Grant, Error> {
        let Some(Request::Acquire(request)) = self.requests.get(id) else {
            return Err(self.closed());
        };
        let (entry, offer) = (request.entry, request.offer);
        self.timers.clear(Timer::Request(id));
        let Some(hold) = offer.filter(|hold| self.holds.contains_key(*hold)) else {
            self.forget_acquire(id);
            return Err(self.closed());
        };
        let Hold { cell, tenure, .. } = &self.holds[hold];
        let (cell, token) = (Arc::clone(cell), self.tenures[*tenure].token);
        let lock = self.entries[entry].lock;
        if self.locks[lock].wait.has_unclaimed {
            self.locks[lock].wait.has_unclaimed = false;
        }
        // The grant may have taken longer to arrive than it was good for.
        if let Some(reason) = cell.lost(now) {
            let error = errors::lost(self.lock_name(entry), reason);
            self.drop_hold(now, hold);
            self.forget_acquire(id);
            return Err(error);
        }
        self.forget_acquire(id);
        Ok(Grant { hold, cell, token })
    }

    /// The caller of an unclaimed request polls again: the request is repeated, by one attempt past
    /// the queue, whatever its wait time: whether another owner holds the lock is not known.
    pub(crate) fn resume(&mut self, now: Time, id: RequestId) {
        let Some(Request::Acquire(request)) = self.requests.get_mut(id) else {
            return;
        };
        request.offer = None;
        let entry = request.entry;
        if self.is_closed() {
            self.complete_acquire(id, Outcome::Failed(self.closed()));
        } else if self.is_held_by_other(entry) {
            self.route(now, id);
        } else {
            self.begin_attempt(now, id, None);
        }
    }

    /// The caller does not wait any more. Nothing of the request stays: a grant that arrives later
    /// is released.
    pub(crate) fn cancel(&mut self, now: Time, id: RequestId) {
        self.timers.clear(Timer::Request(id));
        self.timers.clear(Timer::Query(id));
        match self.requests.get_mut(id) {
            Some(Request::Acquire(request)) => {
                let (offer, op) = (request.offer.take(), request.op.take());
                let lock = self.entries[request.entry].lock;
                self.leave_queue(id);
                if let Some(op) = op {
                    self.abandon_op(now, op);
                }
                if let Some(hold) = offer {
                    self.drop_hold(now, hold);
                }
                self.forget_acquire(id);
                self.advance_lock(now, lock);
            }
            Some(Request::Release { entry, op, .. }) => {
                let entry = *entry;
                if let Some(op) = op.and_then(|op| self.ops.get_mut(op)) {
                    op.request = None;
                }
                self.requests.remove(id);
                self.remove_if_idle(entry);
            }
            Some(Request::Query(_) | Request::Force(_) | Request::Close) => {
                self.requests.remove(id);
            }
            None => {}
        }
    }

    /// Decides what a request does that has no attempt under way.
    pub(super) fn route(&mut self, now: Time, id: RequestId) {
        let Some(Request::Acquire(request)) = self.requests.get(id) else {
            return;
        };
        let (entry, is_over) = (request.entry, request.asked && request.is_over(now));
        if self.live_tenure(now, entry).is_some() {
            // The owner has the lock: this is a re-entry, which waits for nobody.
            self.leave_queue(id);
            self.begin_attempt(now, id, None);
        } else if is_over {
            self.complete_acquire(id, Outcome::Contended);
        } else {
            self.join_queue(now, id);
        }
    }

    /// Offers a grant to its caller.
    pub(super) fn offer(&mut self, now: Time, id: RequestId, hold: HoldId) {
        self.leave_queue(id);
        if let Some(Request::Acquire(request)) = self.requests.get_mut(id) {
            request.op = None;
            request.offer = Some(hold);
        }
        let lock = &self.locks[self.entries[self.tenures[self.holds[hold].tenure].entry].lock];
        let limit = if lock.wait.has_unclaimed {
            OFFER / 10
        } else {
            OFFER
        };
        self.timers.set(Timer::Request(id), now + limit);
        self.events
            .push_back(Event::Completed(id, Outcome::Granted));
    }

    /// Completes a request to acquire without a hold.
    pub(super) fn complete_acquire(&mut self, id: RequestId, outcome: Outcome) {
        self.timers.clear(Timer::Request(id));
        self.leave_queue(id);
        self.forget_acquire(id);
        self.events.push_back(Event::Completed(id, outcome));
    }

    /// Completes any other request.
    pub(super) fn complete(&mut self, id: RequestId, outcome: Outcome) {
        self.timers.clear(Timer::Request(id));
        self.timers.clear(Timer::Query(id));
        if let Some(request) = self.requests.remove(id) {
            let is_reported = !matches!(
                request,
                Request::Release {
                    is_reported: false,
                    ..
                }
            );
            if let (
                true,
                Outcome::Failed(Error::OutcomeUnknown { .. })
                | Outcome::NotReleased(Error::OutcomeUnknown { .. }),
            ) = (is_reported, &outcome)
            {
                self.stats.unknown_outcomes += 1;
            }
            self.events.push_back(Event::Completed(id, outcome));
            if let Request::Release { entry, .. } = request {
                self.remove_if_idle(entry);
            }
        }
    }

    fn forget_acquire(&mut self, id: RequestId) {
        if let Some(Request::Acquire(request)) = self.requests.remove(id) {
            self.entries[request.entry].requests -= 1;
            self.remove_if_idle(request.entry);
        }
    }

    /// The limit of a request has been reached.
    pub(super) fn request_limit_reached(&mut self, now: Time, id: RequestId) {
        match self.requests.get_mut(id) {
            Some(Request::Acquire(request)) => {
                let entry = request.entry;
                if let Some(hold) = request.offer.take() {
                    let lock = self.entries[entry].lock;
                    self.locks[lock].wait.has_unclaimed = true;
                    self.notice(Notice::Unclaimed(self.subject(entry)));
                    self.drop_hold(now, hold);
                    self.events
                        .push_back(Event::Completed(id, Outcome::Unclaimed));
                } else if let Some(op) = request.op {
                    self.waiting_op_limit_reached(now, id, op);
                } else {
                    self.wait_is_over(now, id);
                }
            }
            Some(Request::Release { keys, op, .. }) => {
                let (name, op) = (keys.display(), op.take());
                self.release_limit_reached(id, name, op);
            }
            Some(Request::Force(_)) => self.force_limit_reached(id),
            Some(Request::Query(query)) => {
                let (name, after) = (query.keys.display(), now.since(query.begun));
                let error = self.timeout(name, Step::Inspect, after);
                self.complete(id, Outcome::Failed(error));
            }
            Some(Request::Close) | None => {}
        }
    }

    /// A request has waited for its owner's earlier operations as long as it may.
    fn waiting_op_limit_reached(&mut self, now: Time, id: RequestId, op: OpId) {
        if self.ops.get(op).is_some_and(|op| !op.is_started()) {
            let Some(Request::Acquire(request)) = self.requests.get(id) else {
                return;
            };
            let limit = request.patience.max(self.settings.command_timeout);
            let (entry, lock) = (request.entry, self.entries[request.entry].lock);
            let waited = self.timeout(self.lock_name(entry), Step::EarlierOperation, limit);
            self.remove_op(op);
            self.complete_acquire(id, Outcome::Failed(waited));
            self.end_passing(now, entry);
            self.advance_lock(now, lock);
        }
    }

    /// The wait time of a request in the queue is over.
    fn wait_is_over(&mut self, now: Time, id: RequestId) {
        let Some(Request::Acquire(request)) = self.requests.get_mut(id) else {
            return;
        };
        let lock = self.entries[request.entry].lock;
        if self.locks[lock].wait.is_known(request.answers) {
            self.complete_acquire(id, Outcome::Contended);
            self.advance_lock(now, lock);
            return;
        }
        // The server has answered nothing since it joined. What was asked last has the time of a
        // reply.
        let asked = self.locks[lock].wait.asked_at;
        let limit = *request.limit.get_or_insert_with(|| {
            (asked + self.settings.command_timeout).max(request.begun + request.patience)
        });
        if now >= limit {
            let waited = now.since(request.begun);
            let name = self.locks[lock].keys.display();
            let error = self.timeout(name, Step::EarlierOperation, waited);
            self.complete_acquire(id, Outcome::Failed(error));
            self.advance_lock(now, lock);
        } else {
            self.locks[lock].wait.over.push(id);
            self.timers.set(Timer::Request(id), limit);
        }
    }
}

impl Acquiring {
    pub(super) fn is_over(&self, now: Time) -> bool {
        self.ends.is_some_and(|ends| now >= ends)
    }
}
