//! The wait queue of a lock: the requests of this process in order, and one attempt in flight.
//!
//! A reason for an attempt (a message, a confirmed subscription, an expired lease) belongs to the
//! lock, not to a request, so a request that is cancelled takes none with it. So does the attempt
//! in flight: the next request waits for its outcome.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use rand::Rng;
use smallvec::SmallVec;

use super::backoff::Backoff;
use super::notice::Notice;
use super::passing::Passed;
use super::requests::{Outcome, Request};
use super::timers::Timer;
use super::{Engine, EntryId, LockId, OpId, Purpose, RequestId, TenureId};
use crate::config::DeadlockDetection;
use crate::error::{Error, LostReason};
use crate::keys::Keys;
use crate::kind::Held;
use crate::time::Time;
use crate::wire::{Failure, Reply};

#[derive(Debug)]
pub(super) struct Lock {
    pub(super) keys: Keys,
    /// How many entries there are.
    pub(super) entries: usize,
    /// The tenures of owners of this client.
    pub(super) tenures: SmallVec<[TenureId; 2]>,
    pub(super) wait: WaitQueue,
    /// Since it was passed on.
    pub(super) passed: Option<Box<Passed>>,
}

/// The wait queue of a lock. A lock that is held and not waited for has none.
#[derive(Debug, Default)]
pub(super) struct WaitQueue(Option<Box<Waiting>>);

#[derive(Debug)]
pub(super) struct Waiting {
    /// The requests that wait, by the order in which they came.
    pub(super) queue: BTreeMap<u64, RequestId>,
    /// The attempt in flight for the head of the queue. Its request may be gone.
    pub(super) attempt: Option<OpId>,
    /// Whether there is a reason for an attempt that none has taken up.
    pub(super) has_reason: bool,
    /// When the head makes an attempt without another reason.
    pub(super) recheck_at: Time,
    /// When an attempt asked the server last.
    pub(super) asked_at: Time,
    /// How many attempts the server has answered.
    answers: u64,
    answered_at: Option<Time>,
    silence: Option<Silence>,
    /// The requests whose wait time is over, and that wait for the next answer only.
    pub(super) over: Vec<RequestId>,
    /// Whether a request waits for messages.
    pub(super) listens: bool,
    /// The messages on the channel when the last attempt was begun, if none could be missed.
    pub(super) seen: Option<u64>,
    /// Whether the last offer was not claimed: then others may not be claimed either, and the next
    /// one waits a shorter time.
    pub(super) has_unclaimed: bool,
}

/// A time in which no attempt got an answer.
#[derive(Debug, Clone)]
struct Silence {
    /// When the first of these attempts began.
    since: Time,
    /// When the last of them ended.
    until: Time,
    /// What the server said to that one.
    said: Option<String>,
}

/// The shortest pause after which an expiry of the present owner's lease is looked at: an expiry is
/// no reason to spin.
const FLOOR: Duration = Duration::from_millis(5);

impl Lock {
    pub(super) fn new(keys: Keys) -> Self {
        Self {
            keys,
            entries: 0,
            tenures: SmallVec::new(),
            wait: WaitQueue::default(),
            passed: None,
        }
    }
}

impl Waiting {
    const EMPTY: Self = Self {
        queue: BTreeMap::new(),
        attempt: None,
        // The first request has a reason: nobody has asked yet.
        has_reason: true,
        recheck_at: Time::ZERO,
        asked_at: Time::ZERO,
        answers: 0,
        answered_at: None,
        silence: None,
        over: Vec::new(),
        listens: false,
        seen: None,
        has_unclaimed: false,
    };

    /// Whether a request that joined after so many answers knows that another owner holds the lock:
    /// an answer came since, or the last one still stands.
    pub(super) fn is_known(&self, answers: u64) -> bool {
        self.answers != answers || (self.attempt.is_none() && self.silence.is_none())
    }

    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.attempt.is_none()
    }

    pub(super) fn head(&self) -> Option<RequestId> {
        self.queue.first_key_value().map(|(_, id)| *id)
    }
}

impl WaitQueue {
    /// Frees the queue if it holds nothing that a later request needs.
    fn tidy(&mut self) {
        let is_needed =
            |queue: &Waiting| !queue.is_idle() || queue.silence.is_some() || queue.has_unclaimed;
        if !self.0.as_deref().is_some_and(is_needed) {
            self.0 = None;
        }
    }
}

impl Deref for WaitQueue {
    type Target = Waiting;

    fn deref(&self) -> &Waiting {
        static EMPTY: Waiting = Waiting::EMPTY;
        self.0.as_deref().unwrap_or(&EMPTY)
    }
}

impl DerefMut for WaitQueue {
    fn deref_mut(&mut self) -> &mut Waiting {
        self.0.get_or_insert_with(|| Box::new(Waiting::EMPTY))
    }
}

impl Engine {
    /// Puts a request at the end of its lock's queue.
    pub(super) fn join_queue(&mut self, now: Time, id: RequestId) {
        let Some(Request::Acquire(request)) = self.requests.get(id) else {
            return;
        };
        let lock_id = self.entries[request.entry].lock;
        let is_passed = self.is_passed(lock_id);
        let (recheck_at, seen) = (now + self.recheck_interval(lock_id), self.epoch_of(lock_id));
        let Some(Request::Acquire(request)) = self.requests.get_mut(id) else {
            return;
        };
        let lock = &mut self.locks[lock_id];
        if request.place.is_none() {
            if lock.wait.queue.is_empty() && lock.wait.attempt.is_none() {
                lock.wait.has_reason = !is_passed;
                if is_passed {
                    // The owner that has the lock passes it on.
                    (lock.wait.recheck_at, lock.wait.seen) = (recheck_at, seen);
                }
            }
            let place = self.next_place;
            self.next_place += 1;
            request.place = Some(place);
            request.answers = lock.wait.answers;
            lock.wait.queue.insert(place, id);
            self.stats.requests_waiting += 1;
            let entry = request.entry;
            self.entries[entry].waiting.push(id);
            if let Some(ends) = request.ends {
                self.timers.set(Timer::Request(id), ends);
            }
        }
        self.advance_lock(now, lock_id);
        self.check_deadlock(now, id);
    }

    pub(super) fn leave_queue(&mut self, id: RequestId) {
        let Some(Request::Acquire(request)) = self.requests.get_mut(id) else {
            return;
        };
        let Some(place) = request.place.take() else {
            return;
        };
        self.stats.requests_waiting -= 1;
        let entry = &mut self.entries[request.entry];
        entry.waiting.retain(|other| *other != id);
        let lock = &mut self.locks[entry.lock];
        lock.wait.queue.remove(&place);
        lock.wait.over.retain(|other| *other != id);
    }

    /// Has the head of the queue make an attempt if there is a reason, or sleep until there is one.
    pub(super) fn advance_lock(&mut self, now: Time, id: LockId) {
        loop {
            let Some(lock) = self.locks.get_mut(id) else {
                return;
            };
            if lock.wait.attempt.is_some() {
                return;
            }
            let Some(head) = lock.wait.head() else {
                self.timers.clear(Timer::Lock(id));
                self.stop_listening(now, id);
                self.locks[id].wait.tidy();
                self.remove_lock_if_idle(id);
                return;
            };
            let (has_reason, recheck_at) = (lock.wait.has_reason, lock.wait.recheck_at);
            // What another entry left in the name of this owner has to end first.
            let is_replaced = self.is_of_replaced(head);
            if is_replaced || (!has_reason && now < recheck_at) {
                let at = if is_replaced {
                    now + FLOOR * 20
                } else {
                    recheck_at
                };
                self.timers.set(Timer::Lock(id), at);
                self.listen(id);
                return;
            }
            match self.patience_left(now, id, head) {
                Ok(patience) => {
                    self.warn_of_long_wait(now, id, head);
                    let recheck_at = now + self.recheck_interval(id);
                    let seen = self.epoch_of(id);
                    let lock = &mut self.locks[id];
                    lock.wait.seen = seen;
                    lock.wait.has_reason = false;
                    lock.wait.recheck_at = recheck_at;
                    lock.wait.asked_at = now;
                    self.timers.clear(Timer::Lock(id));
                    self.begin_attempt(now, head, Some(patience));
                    return;
                }
                Err(error) => self.complete_acquire(head, Outcome::Failed(error)),
            }
        }
    }

    pub(super) fn is_of_replaced(&self, id: RequestId) -> bool {
        match self.requests.get(id) {
            Some(Request::Acquire(request)) => self.is_replaced(request.entry),
            _ => false,
        }
    }

    /// One more reason for an attempt.
    pub(super) fn wake_lock(&mut self, now: Time, id: LockId) {
        if let Some(lock) = self.locks.get_mut(id) {
            lock.wait.has_reason = true;
            self.advance_lock(now, id);
        }
    }

    /// The attempt in flight is made again: it asks the server now.
    pub(super) fn attempt_is_repeated(&mut self, now: Time, id: LockId, op: OpId) {
        let recheck_at = now + self.recheck_interval(id);
        let lock = &mut self.locks[id];
        if lock.wait.attempt == Some(op) {
            lock.wait.asked_at = now;
            lock.wait.recheck_at = recheck_at;
        }
    }

    /// The attempt in flight was granted to a request, or to none if that is gone.
    pub(super) fn attempt_was_granted(&mut self, id: LockId, op: OpId, lease_ends: Option<Time>) {
        let lock = &mut self.locks[id];
        if lock.wait.attempt == Some(op) {
            lock.wait.attempt = None;
            match lease_ends {
                Some(at) => lock.wait.recheck_at = lock.wait.recheck_at.min(at),
                None => lock.wait.has_reason = true,
            }
        }
    }

    /// The attempt in flight found the lock held by another owner.
    pub(super) fn attempt_was_contended(&mut self, now: Time, id: LockId, op: OpId, held: Held) {
        if self.locks[id].wait.attempt != Some(op) {
            return;
        }
        // A little later than the expiry.
        let expiry = held
            .ttl
            .map(|ttl| now + (ttl + Duration::from_millis(1)).max(FLOOR));
        let release = held.is_foreign.then(|| now + self.foreign_interval());
        let lock = &mut self.locks[id];
        lock.wait.attempt = None;
        for at in expiry.into_iter().chain(release) {
            lock.wait.recheck_at = lock.wait.recheck_at.min(at);
        }
    }

    /// The attempt in flight got no answer; perhaps the server said why. The next request has to
    /// ask for itself.
    pub(super) fn attempt_was_silent(&mut self, now: Time, op: OpId, said: Option<String>) {
        let Some(operation) = self.ops.get(op) else {
            return;
        };
        let began = operation.began;
        let lock = &mut self.locks[self.entries[operation.entry].lock];
        if lock.wait.attempt != Some(op) {
            return;
        }
        lock.wait.attempt = None;
        lock.wait.has_reason = true;
        // An answer that came since is worth more.
        if lock.wait.answered_at.is_some_and(|at| at >= began) {
            return;
        }
        let (since, before) = lock
            .wait
            .silence
            .take()
            .map_or((began, None), |silence| (silence.since, silence.said));
        lock.wait.silence = Some(Silence {
            since,
            until: now,
            said: said.or(before),
        });
    }

    /// The server has answered an attempt that passed the queue, so it can be reached.
    pub(super) fn server_was_reached(&mut self, now: Time, id: LockId) {
        let wait = &mut self.locks[id].wait;
        if !wait.is_idle() || wait.silence.is_some() {
            wait.silence = None;
            wait.answered_at = Some(now);
        }
    }

    /// The server has answered an attempt: those whose wait time is over know that they did not get
    /// the lock.
    pub(super) fn lock_was_answered(&mut self, now: Time, id: LockId, by: Option<RequestId>) {
        let lock = &mut self.locks[id];
        lock.wait.silence = None;
        lock.wait.answered_at = Some(now);
        lock.wait.answers += 1;
        for request in std::mem::take(&mut lock.wait.over) {
            if Some(request) != by {
                self.complete_acquire(request, Outcome::Contended);
            }
        }
    }

    /// For how much longer an attempt retries transient errors: the requests of a queue do not
    /// begin anew, one after the other.
    fn patience_left(&self, now: Time, id: LockId, request: RequestId) -> Result<Duration, Error> {
        let (lock, Some(Request::Acquire(request))) = (&self.locks[id], self.requests.get(request))
        else {
            return Ok(Duration::ZERO);
        };
        // After a time without an attempt the server may be reachable again.
        let recent = |silence: &&Silence| now.since(silence.until) < Backoff::LONGEST;
        let Some(silence) = lock.wait.silence.as_ref().filter(recent) else {
            return Ok(request.patience);
        };
        let lasted = silence.until.since(silence.since.max(request.begun));
        let left = request.patience.saturating_sub(lasted);
        if !left.is_zero() || request.patience.is_zero() {
            return Ok(left);
        }
        Err(match &silence.said {
            Some(message) => super::errors::server(lock.keys.display(), message.as_str().into()),
            None => {
                let problem = format!("no attempt got a reply for {lasted:?}");
                self.connection(lock.keys.display(), problem.into())
            }
        })
    }

    /// How long the head of a queue sleeps without a reason. With a confirmed subscription a
    /// message comes, so it only looks for what messages do not tell: the more rarely, the more
    /// locks are waited for, so that all of them together do not keep the server busy.
    fn recheck_interval(&mut self, id: LockId) -> Duration {
        const CONFIRMED: Duration = Duration::from_secs(30);
        const UNCONFIRMED: Duration = Duration::from_secs(1);
        /// So long for each lock that is waited for: from 2000 on it counts.
        const EACH: Duration = Duration::from_millis(15);
        let confirmed = self.is_confirmed(id);
        let all = EACH * u32::try_from(self.channels.len()).unwrap_or(u32::MAX);
        match self.settings.recheck {
            // Spread, so that the re-checks of many processes do not come at once.
            Some(interval) => interval.mul_f64(self.rng.random_range(0.8..1.0)),
            None if confirmed => {
                let interval = CONFIRMED.max(all);
                interval.mul_f64(self.rng.random_range(0.5..1.0))
            }
            None => UNCONFIRMED.mul_f64(self.rng.random_range(0.8..1.0)),
        }
    }

    /// How long the head of a queue sleeps while another program holds the lock, which publishes no
    /// release: the longer, the more locks are waited for.
    fn foreign_interval(&mut self) -> Duration {
        const INTERVAL: Duration = Duration::from_millis(100);
        const EACH: Duration = Duration::from_millis(1);
        let all = EACH * u32::try_from(self.channels.len()).unwrap_or(u32::MAX);
        INTERVAL.max(all).mul_f64(self.rng.random_range(0.8..1.0))
    }

    /// Looks, once for each request that has to wait, whether its task holds the lock itself. If so
    /// by our record, the server is asked: the lock may have been taken away.
    pub(super) fn check_deadlock(&mut self, now: Time, id: RequestId) {
        let Some(Request::Acquire(request)) = self.requests.get_mut(id) else {
            return;
        };
        if request.op.is_some() || request.place.is_none() || request.checked {
            return;
        }
        request.checked = true;
        let (entry, task) = (request.entry, request.task);
        let own = self.locks[self.entries[entry].lock].tenures.iter();
        let Some(tenure) = own
            .copied()
            .find(|tenure| self.is_held_by_task(now, *tenure, task))
        else {
            return;
        };
        // The answer to the attempt says that another owner holds the lock, but not which one.
        let found = &self.tenures[tenure];
        let call = found.kind.count(self.target(found.entry));
        self.send(Purpose::Deadlock(id, tenure), call);
    }

    /// The server's hold count for the owner under which the task of a request holds the lock.
    pub(super) fn deadlock_replied(
        &mut self,
        now: Time,
        id: RequestId,
        tenure: TenureId,
        outcome: Result<Reply, Failure>,
    ) {
        let Some(kind) = self.tenures.get(tenure).map(|tenure| tenure.kind) else {
            return;
        };
        let waiting = match self.requests.get(id) {
            Some(Request::Acquire(request)) if request.place.is_some() => {
                Some((request.entry, request.task, request.op.is_some()))
            }
            _ => None,
        };
        let count = match outcome.and_then(|reply| kind.counted(reply)) {
            Ok(count) => count,
            Err(failure) => {
                // Not known: it is looked at again after the next attempt.
                self.note_failure(&failure);
                self.look_for_deadlock_again(id);
                return;
            }
        };
        if count == 0 {
            // A release that overtook the answer has ended the tenure, and nothing is lost.
            if !self.tenures[tenure].holds.is_empty() {
                self.lose_tenure(now, tenure, LostReason::Gone);
            }
            return;
        }
        let Some((entry, task, is_asking)) = waiting else {
            return;
        };
        if is_asking {
            // Its attempt may be granted.
            self.look_for_deadlock_again(id);
        } else if self.is_held_by_task(now, tenure, task) {
            self.report_deadlock(now, id, entry, tenure);
        }
    }

    fn look_for_deadlock_again(&mut self, id: RequestId) {
        if let Some(Request::Acquire(request)) = self.requests.get_mut(id) {
            request.checked = false;
        }
    }

    fn report_deadlock(&mut self, now: Time, id: RequestId, entry: EntryId, tenure: TenureId) {
        let found = self.tenures[tenure].entry;
        match self.settings.detection {
            DeadlockDetection::Warn => self.notice(Notice::Deadlock {
                subject: self.subject(entry),
                held_by: self.owner_name(found),
            }),
            DeadlockDetection::Fail => {
                let error = Error::WouldDeadlock {
                    lock: self.lock_name(entry),
                    owner: self.entries[found].owner,
                };
                let lock = self.entries[entry].lock;
                self.complete_acquire(id, Outcome::Failed(error));
                self.advance_lock(now, lock);
            }
        }
    }

    /// Reports, once, that the lock has been held by this client since before a long wait began:
    /// perhaps by code that waits for this very task.
    fn warn_of_long_wait(&mut self, now: Time, lock: LockId, id: RequestId) {
        let Some(Request::Acquire(request)) = self.requests.get(id) else {
            return;
        };
        let waited = now.since(request.begun);
        if waited <= self.settings.watchdog.duration() || request.warned_of_own {
            return;
        }
        let (entry, begun) = (request.entry, request.begun);
        let own = self.locks[lock].tenures.iter();
        let Some(found) = own
            .map(|tenure| &self.tenures[*tenure])
            .find(|tenure| tenure.began < begun)
        else {
            return;
        };
        let notice = Notice::LongWait {
            subject: self.subject(entry),
            held_by: self.owner_name(found.entry),
            waited,
        };
        self.notice(notice);
        if let Some(Request::Acquire(request)) = self.requests.get_mut(id) {
            request.warned_of_own = true;
        }
    }

    pub(super) fn remove_lock_if_idle(&mut self, id: LockId) {
        let Some(lock) = self.locks.get(id) else {
            return;
        };
        if lock.entries == 0 && lock.wait.is_idle() {
            debug_assert!(lock.tenures.is_empty());
            self.timers.clear(Timer::Lock(id));
            self.forget_listener(id);
            if let Some(lock) = self.locks.remove(id) {
                self.lock_ids.remove(&lock.keys);
            }
        }
    }
}
