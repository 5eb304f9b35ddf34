//! The waiters of one lock in this process: a queue whose front has the baton, and one attempt in
//! flight.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::sync::{Instant, Mutex, Notify};

/// A lane counts the reasons to try (`wakes`) and remembers how far that count was at the last
/// attempt (`tried`). Both belong to the lane, not to a waiter, so a waiter that goes away takes no
/// wake-up with it.
///
/// So does the attempt in flight: a waiter that goes away leaves its attempt behind, and the next
/// one waits for its end rather than sending another.
pub(crate) struct Lane {
    state: Mutex<State>,
}

pub(crate) struct Waiter {
    thread: i64,
    notify: Notify,
    /// How many answers the lane had had when it joined.
    answers: u64,
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
    /// Further behind, or after somebody who went away and left an attempt in flight.
    Behind,
    /// The same, and since it joined the server has told this lane nothing: whether anybody holds
    /// the lock is not known. The lane asked last at that time.
    InTheDark { asked: Instant },
}

/// How an attempt ended.
#[derive(Debug, Clone)]
pub(crate) enum Outcome {
    /// Until then if nobody renews it.
    Granted(Instant),
    /// Somebody else holds the lock, until then if nobody renews it.
    Held(Option<Instant>),
    /// It tells nothing of the lock; perhaps the server said why.
    Silent(Option<String>),
}

/// A time in which no attempt told anything of the lock.
#[derive(Debug, Clone)]
pub(crate) struct Silence {
    /// When the first of these attempts began.
    pub(crate) since: Instant,
    /// When the last of them ended.
    pub(crate) until: Instant,
    /// What the server said to that one.
    pub(crate) said: Option<String>,
}

/// How often a lane tries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// The one in front tries again after this time without a reason. Who has not taken its turn
    /// after another such time is not being polled, and gives way.
    pub(crate) recheck: Duration,
    /// The longest that an attempt takes without asking again.
    pub(crate) grace: Duration,
}

struct State {
    queue: VecDeque<Arc<Waiter>>,
    /// Those that were passed over. They stand in line again as soon as they are polled.
    absent: Vec<Arc<Waiter>>,
    wakes: u64,
    tried: u64,
    /// When the one in front tries again without a reason.
    recheck_at: Instant,
    /// Since when the one in front can take its turn, if that is later than the turn itself.
    turn_since: Instant,
    /// The attempt in flight, and who began it.
    trying: Option<(u64, Arc<Waiter>)>,
    /// When an attempt asked the server last.
    asked_at: Instant,
    attempts: u64,
    /// How many attempts the server has answered.
    answers: u64,
    answered_at: Option<Instant>,
    silence: Option<Silence>,
    /// Those that wait for no more than the next answer.
    wanting: Vec<Arc<Waiter>>,
    /// Whether somebody was passed over since the last attempt: then others that stand still may be
    /// behind.
    in_a_hurry: bool,
    closed: bool,
}

impl Lane {
    pub(crate) fn new(closed: bool) -> Self {
        Self {
            state: Mutex::new(State {
                queue: VecDeque::with_capacity(1),
                absent: Vec::new(),
                // The first of a lane has a reason to try: nobody has yet.
                wakes: 1,
                tried: 0,
                recheck_at: Instant::now(),
                turn_since: Instant::now(),
                trying: None,
                asked_at: Instant::now(),
                attempts: 0,
                answers: 0,
                answered_at: None,
                silence: None,
                wanting: Vec::new(),
                in_a_hurry: false,
                closed,
            }),
        }
    }

    /// Puts a waiter at the end.
    pub(crate) fn join(&self, thread: i64) -> Arc<Waiter> {
        let mut state = self.state.lock();
        let waiter = Arc::new(Waiter {
            thread,
            notify: Notify::new(),
            answers: state.answers,
        });
        if state.queue.is_empty() {
            state.turn_since = Instant::now();
        }
        state.queue.push_back(Arc::clone(&waiter));
        waiter
    }

    /// What this waiter does now. The answer `Try` takes in all reasons so far: a later one is a
    /// new reason.
    pub(crate) fn step(&self, waiter: &Arc<Waiter>, pace: Pace) -> Step {
        let mut state = self.state.lock();
        if state.closed {
            return Step::Closed;
        }
        let now = Instant::now();
        state.take_back(waiter);
        // What the last attempt was told still stands; one in flight, or one that was told nothing,
        // leaves it open.
        let open = state.trying.is_some() || state.silence.is_some();
        let behind = if open && state.answers == waiter.answers {
            Standing::InTheDark {
                asked: state.asked_at,
            }
        } else {
            Standing::Behind
        };
        if !state.is_front(waiter) {
            if now < state.front_overdue_at(pace) {
                return Step::Sleep {
                    until: state.front_overdue_at(pace),
                    place: behind,
                };
            }
            state.pass_over(now);
            if !state.is_front(waiter) {
                state.pass_baton();
                return Step::Sleep {
                    until: state.front_overdue_at(pace),
                    place: behind,
                };
            }
        }
        if state.trying.is_some() && now < state.attempt_overdue_at(pace) {
            return Step::Sleep {
                until: state.attempt_overdue_at(pace),
                place: behind,
            };
        }
        if state.wakes == state.tried && now < state.recheck_at {
            return Step::Sleep {
                until: state.recheck_at,
                place: Standing::Front,
            };
        }
        state.tried = state.wakes;
        state.recheck_at = now + pace.recheck;
        state.asked_at = now;
        state.attempts += 1;
        state.in_a_hurry = false;
        state.trying = Some((state.attempts, Arc::clone(waiter)));
        Step::Try(state.attempts)
    }

    /// One more reason to try.
    pub(crate) fn wake(&self) {
        let mut state = self.state.lock();
        state.wakes += 1;
        state.pass_baton();
    }

    /// Wakes the waiters of one owner.
    pub(crate) fn wake_owner(&self, thread: i64) {
        let state = self.state.lock();
        state
            .everybody()
            .filter(|waiter| waiter.thread == thread)
            .for_each(|waiter| waiter.notify.notify_one());
    }

    /// Ends all waiting.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        state
            .everybody()
            .for_each(|waiter| waiter.notify.notify_one());
    }

    /// Says that an attempt goes on: it is being polled.
    pub(crate) fn goes_on(&self, attempt: u64, pace: Pace) {
        let mut state = self.state.lock();
        if state.is_trying(attempt) {
            state.asked_at = Instant::now();
            state.recheck_at = state.asked_at + pace.recheck;
        }
    }

    /// The time up to now in which no attempt told anything.
    pub(crate) fn silence(&self) -> Option<Silence> {
        self.state.lock().silence.clone()
    }

    /// Has a waiter notified of the next answer of the server, whatever that says. `true` if that
    /// is new: then an answer may have come just before.
    pub(crate) fn wants_answer(&self, waiter: &Arc<Waiter>) -> bool {
        let mut state = self.state.lock();
        let is_new = !state.wanting.iter().any(|other| Arc::ptr_eq(other, waiter));
        if is_new {
            state.wanting.push(Arc::clone(waiter));
        }
        is_new
    }

    /// Ends an attempt that began then. Tells whether the lane is idle.
    pub(crate) fn over(&self, attempt: u64, began: Instant, outcome: &Outcome) -> bool {
        let mut state = self.state.lock();
        let now = Instant::now();
        match outcome {
            // An answer that came since is worth more.
            Outcome::Silent(_) if state.answered_at.is_some_and(|at| at >= began) => {}
            Outcome::Silent(said) => {
                let (since, before) = state
                    .silence
                    .take()
                    .map_or((began, None), |silence| (silence.since, silence.said));
                state.silence = Some(Silence {
                    since,
                    until: now,
                    said: said.clone().or(before),
                });
            }
            Outcome::Granted(_) | Outcome::Held(_) => {
                state.silence = None;
                state.answered_at = Some(now);
                state.answers += 1;
                state
                    .wanting
                    .drain(..)
                    .for_each(|waiter| waiter.notify.notify_one());
            }
        }
        if let Some((_, waiter)) = state.trying.take_if(|(number, _)| *number == attempt) {
            let goes_away = !state.is_front(&waiter);
            match outcome {
                Outcome::Held(Some(at)) => state.recheck_at = state.recheck_at.min(*at),
                Outcome::Held(None) => {}
                // Who began it has the lock; but who went away gives it back.
                Outcome::Granted(at) if !goes_away => state.recheck_at = state.recheck_at.min(*at),
                // Who comes next has to ask for itself.
                Outcome::Granted(_) | Outcome::Silent(_) => state.wakes += 1,
            }
            if goes_away {
                state.turn_since = now;
                state.pass_baton();
            }
        }
        state.is_idle()
    }

    /// Takes a waiter out and passes the baton on. Tells whether the lane is idle.
    pub(crate) fn leave(&self, waiter: &Arc<Waiter>) -> bool {
        let mut state = self.state.lock();
        if let Some(at) = state
            .queue
            .iter()
            .position(|other| Arc::ptr_eq(other, waiter))
        {
            state.queue.remove(at);
            if at == 0 {
                state.turn_since = Instant::now();
                state.pass_baton();
            }
        } else {
            state.absent.retain(|other| !Arc::ptr_eq(other, waiter));
        }
        state.wanting.retain(|other| !Arc::ptr_eq(other, waiter));
        state.is_idle()
    }

    /// Whether nobody waits and nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.state.lock().is_idle()
    }
}

impl State {
    fn is_front(&self, waiter: &Arc<Waiter>) -> bool {
        self.queue
            .front()
            .is_some_and(|front| Arc::ptr_eq(front, waiter))
    }

    fn is_trying(&self, attempt: u64) -> bool {
        self.trying
            .as_ref()
            .is_some_and(|(number, _)| *number == attempt)
    }

    fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.absent.is_empty() && self.trying.is_none()
    }

    /// When the attempt in flight is no reason any more to wait: who began it is not being polled.
    fn attempt_overdue_at(&self, pace: Pace) -> Instant {
        self.recheck_at + pace.grace
    }

    /// When the one in front has had time enough to take its turn.
    fn front_overdue_at(&self, pace: Pace) -> Instant {
        let turn_at = if self.trying.is_some() {
            self.attempt_overdue_at(pace)
        } else {
            self.recheck_at
        };
        // Who is polled at all comes at once when it is notified.
        turn_at.max(self.turn_since)
            + if self.in_a_hurry {
                pace.recheck / 10
            } else {
                pace.recheck
            }
    }

    fn everybody(&self) -> impl Iterator<Item = &Arc<Waiter>> {
        self.queue.iter().chain(&self.absent)
    }

    fn pass_baton(&self) {
        match self.queue.front() {
            Some(front) => front.notify.notify_one(),
            None => self
                .absent
                .iter()
                .for_each(|waiter| waiter.notify.notify_one()),
        }
    }

    /// Lets one that was passed over stand in line again.
    fn take_back(&mut self, waiter: &Arc<Waiter>) {
        if let Some(at) = self
            .absent
            .iter()
            .position(|other| Arc::ptr_eq(other, waiter))
        {
            let waiter = self.absent.swap_remove(at);
            self.queue.push_back(waiter);
        }
    }

    /// Takes the one in front, which does not take its turn, out of the line.
    fn pass_over(&mut self, now: Instant) {
        self.absent.extend(self.queue.pop_front());
        self.trying = None;
        self.in_a_hurry = true;
        self.wakes += 1;
        self.turn_since = now;
    }
}
