//! The waiters of one lock in this process: a queue whose front has the baton, and one attempt in flight.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::sync::{Mutex, Notify};

/// A lane counts the reasons to try (`wakes`) and remembers how far that count was at the last attempt (`tried`).
/// Both belong to the lane, not to a waiter, so a waiter that goes away takes no wake-up with it.
///
/// So does the attempt in flight: a waiter that goes away leaves its attempt behind, and the next one waits for its end
/// rather than sending another.
pub(crate) struct Lane {
    state: Mutex<State>,
}

pub(crate) struct Waiter {
    thread: i64,
    notify: Notify,
}

impl Waiter {
    /// Resolves when [`Lane::step`] may answer differently.
    pub(crate) async fn notified(&self) {
        self.notify.notified().await;
    }
}

/// What a waiter does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Try now, and report to [`Lane::over`] under this number.
    Try(u64),
    /// Sleep until notified, or until then.
    Sleep { until: Instant, place: Standing },
    /// The client is shut down.
    Closed,
}

/// Where in the lane a waiter stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// In front, with nothing to do.
    Front,
    /// In front, after somebody who went away and left an attempt in flight.
    AfterAbandoned,
    /// Further behind.
    Behind,
}

/// How often a lane tries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// The one in front tries again after this time without a reason. Who has not taken its turn after another such
    /// time is not being polled, and gives way.
    pub(crate) recheck: Duration,
    /// The longest that an attempt takes without asking again.
    pub(crate) grace: Duration,
}

struct State {
    queue: VecDeque<Arc<Waiter>>,
    wakes: u64,
    tried: u64,
    /// When the one in front tries again without a reason.
    recheck_at: Instant,
    /// The attempt in flight, and who began it.
    trying: Option<(u64, Arc<Waiter>)>,
    attempts: u64,
    closed: bool,
}

impl Lane {
    pub(crate) fn new(closed: bool) -> Self {
        Self {
            state: Mutex::new(State {
                queue: VecDeque::with_capacity(1),
                // The first of a lane has a reason to try: nobody has yet.
                wakes: 1,
                tried: 0,
                recheck_at: Instant::now(),
                trying: None,
                attempts: 0,
                closed,
            }),
        }
    }

    /// Puts a waiter at the end.
    pub(crate) fn join(&self, thread: i64) -> Arc<Waiter> {
        let waiter = Arc::new(Waiter { thread, notify: Notify::new() });
        self.state.lock().queue.push_back(Arc::clone(&waiter));
        waiter
    }

    /// What this waiter does now. The answer `Try` takes in all reasons so far: a later one is a new reason.
    pub(crate) fn step(&self, waiter: &Arc<Waiter>, pace: Pace) -> Step {
        let mut state = self.state.lock();
        if state.closed {
            return Step::Closed;
        }
        let now = Instant::now();
        if !state.is_front(waiter) {
            if now < state.front_overdue_at(pace) {
                return Step::Sleep { until: state.front_overdue_at(pace), place: Standing::Behind };
            }
            state.pass_over(now);
            if !state.is_front(waiter) {
                state.pass_baton();
                return Step::Sleep { until: state.front_overdue_at(pace), place: Standing::Behind };
            }
        }
        if state.trying.is_some() && now < state.attempt_overdue_at(pace) {
            return Step::Sleep { until: state.attempt_overdue_at(pace), place: Standing::AfterAbandoned };
        }
        if state.wakes == state.tried && now < state.recheck_at {
            return Step::Sleep { until: state.recheck_at, place: Standing::Front };
        }
        state.tried = state.wakes;
        state.recheck_at = now + pace.recheck;
        state.attempts += 1;
        state.trying = Some((state.attempts, Arc::clone(waiter)));
        Step::Try(state.attempts)
    }

    /// One more reason to try.
    pub(crate) fn wake(&self) {
        let mut state = self.state.lock();
        state.wakes += 1;
        state.pass_baton();
    }

    /// Wakes the waiters of one holder.
    pub(crate) fn wake_holder(&self, thread: i64) {
        let state = self.state.lock();
        state.queue.iter().filter(|waiter| waiter.thread == thread).for_each(|waiter| waiter.notify.notify_one());
    }

    /// Ends all waiting.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        state.queue.iter().for_each(|waiter| waiter.notify.notify_one());
    }

    /// Says that an attempt goes on: it is being polled.
    pub(crate) fn goes_on(&self, attempt: u64, pace: Pace) {
        let mut state = self.state.lock();
        if state.is_trying(attempt) {
            state.recheck_at = Instant::now() + pace.recheck;
        }
    }

    /// Ends an attempt. With `held_until` the server said that another holder's lease ends then; without, its outcome
    /// says nothing to those who wait. Tells whether the lane is idle.
    pub(crate) fn over(&self, attempt: u64, held_until: Option<Instant>) -> bool {
        let mut state = self.state.lock();
        if let Some((_, waiter)) = state.trying.take_if(|(number, _)| *number == attempt) {
            match held_until {
                Some(at) => state.recheck_at = state.recheck_at.min(at),
                // Who began it knows how it ended, and either has the lock or goes away. Anybody else has to ask.
                None if !state.is_front(&waiter) => state.wakes += 1,
                None => {}
            }
            if !state.is_front(&waiter) {
                state.pass_baton();
            }
        }
        state.is_idle()
    }

    /// Takes a waiter out and passes the baton on. Tells whether the lane is idle.
    pub(crate) fn leave(&self, waiter: &Arc<Waiter>) -> bool {
        let mut state = self.state.lock();
        if let Some(at) = state.queue.iter().position(|other| Arc::ptr_eq(other, waiter)) {
            state.queue.remove(at);
            if at == 0 {
                state.pass_baton();
            }
        }
        state.is_idle()
    }

    /// Whether nobody waits and nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.state.lock().is_idle()
    }
}

impl State {
    fn is_front(&self, waiter: &Arc<Waiter>) -> bool {
        self.queue.front().is_some_and(|front| Arc::ptr_eq(front, waiter))
    }

    fn is_trying(&self, attempt: u64) -> bool {
        self.trying.as_ref().is_some_and(|(number, _)| *number == attempt)
    }

    fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.trying.is_none()
    }

    /// When the attempt in flight is no reason any more to wait: who began it is not being polled.
    fn attempt_overdue_at(&self, pace: Pace) -> Instant {
        self.recheck_at + pace.grace
    }

    /// When the one in front has had time enough to take its turn.
    fn front_overdue_at(&self, pace: Pace) -> Instant {
        let turn_at = if self.trying.is_some() { self.attempt_overdue_at(pace) } else { self.recheck_at };
        turn_at + pace.recheck
    }

    fn pass_baton(&self) {
        if let Some(front) = self.queue.front() {
            front.notify.notify_one();
        }
    }

    /// Sends the one in front, which does not take its turn, to the end of the line.
    fn pass_over(&mut self, now: Instant) {
        if let Some(front) = self.queue.pop_front() {
            self.queue.push_back(front);
        }
        self.trying = None;
        self.wakes += 1;
        self.recheck_at = now;
    }
}
