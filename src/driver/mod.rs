//! Between the engine and everything around it: callers, the link, the clock, the log.
//!
//! Each input goes through [`Driver::apply`]: it takes the lock, then the time (so inputs are
//! monotone), changes the engine, drains its outputs, releases the lock, and only then sends, wakes
//! and logs. Nothing that calls back is dropped or called under the lock.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};

use crate::engine::{CallId, Engine, Event, Notice, Outcome, RequestId, Transmit};
use crate::lease_cell::LeaseCell;
use crate::stats::Stats;
use crate::time::Time;
use crate::wire::Call;

mod calls;
mod clock;
mod notices;
mod request;
mod subscriptions;
mod thread;

pub(crate) use clock::Clock;
pub(crate) use request::{Acquisition, Pending};
pub(crate) use thread::{Ended, Work, start};

/// What the link is asked to do.
#[derive(Debug)]
pub(crate) enum Outgoing {
    Call(CallId, Call),
    /// The server is not the master any more.
    Reconnect,
}

/// See the [module](self).
pub(crate) struct Driver {
    state: Mutex<State>,
    pub(crate) clock: Clock,
    outgoing: mpsc::UnboundedSender<Outgoing>,
    /// Signals the thread that a timer is due earlier than it expects, or that the client has
    /// ended.
    alarm: Notify,
    /// Signals changed subscriptions.
    subscriptions: Notify,
    /// Signals that the server is not the master any more.
    server_left: Notify,
    /// Counts the connections for calls that replaced a lost one.
    reconnects: Arc<AtomicU64>,
}

struct State {
    engine: Engine,
    /// By request; one stays until its caller has taken the outcome, longer than the engine knows
    /// it.
    slots: HashMap<RequestId, Slot>,
    /// When the thread wakes up; `None` while it sleeps without a timer.
    armed: Option<Time>,
    /// Subscriptions to make (`true`) and to end, in order.
    subscriptions: Vec<(Bytes, bool)>,
}

/// What a caller waits for.
enum Slot {
    Waiting(Waker),
    Ready(Outcome),
}

/// What is to be done after the lock is released.
#[derive(Default)]
struct Effects {
    calls: Vec<Outgoing>,
    wakers: Vec<Waker>,
    lost: Vec<Arc<LeaseCell>>,
    notices: Vec<Notice>,
    has_alarm: bool,
    has_subscriptions: bool,
    /// Dropped outside the lock.
    replaced: Vec<Slot>,
}

impl Driver {
    pub(crate) fn new(
        engine: Engine,
        reconnects: Arc<AtomicU64>,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<Outgoing>) {
        let (outgoing, calls) = mpsc::unbounded_channel();
        let driver = Arc::new(Self {
            state: Mutex::new(State {
                engine,
                slots: HashMap::new(),
                armed: None,
                subscriptions: Vec::new(),
            }),
            clock: Clock::new(),
            outgoing,
            alarm: Notify::new(),
            subscriptions: Notify::new(),
            server_left: Notify::new(),
            reconnects,
        });
        (driver, calls)
    }

    /// Changes the engine. `None` if the engine failed over it: then each request has ended with an
    /// error, and each lock is lost.
    pub(crate) fn apply<T>(&self, change: impl FnOnce(&mut Engine, Time) -> T) -> Option<T> {
        self.change(|state, now, _| change(&mut state.engine, now))
    }

    /// A request that begins when it is first polled.
    pub(crate) fn submit<B>(self: &Arc<Self>, begin: B) -> Pending<B>
    where
        B: FnOnce(&mut Engine, Time) -> RequestId,
    {
        Pending::new(Arc::clone(self), begin)
    }

    pub(crate) fn stats(&self) -> Stats {
        let stats = self.state.lock().engine.stats();
        Stats {
            reconnects: self.reconnects.load(Ordering::Relaxed),
            ..stats
        }
    }

    /// Begins a request, and takes its outcome if it has one at once. Otherwise the waker is kept
    /// before anything is sent.
    fn begin(
        &self,
        begin: impl FnOnce(&mut Engine, Time) -> RequestId,
        waker: Waker,
    ) -> Option<(RequestId, Poll<Outcome>)> {
        self.change_then(
            |state, now, _| begin(&mut state.engine, now),
            |state, id| match state.slots.remove(&id) {
                Some(Slot::Ready(outcome)) => (id, Poll::Ready(outcome)),
                _ => {
                    state.slots.insert(id, Slot::Waiting(waker));
                    (id, Poll::Pending)
                }
            },
        )
    }

    /// Takes the outcome of a request if there is one, and keeps the waker otherwise.
    fn poll(&self, id: RequestId, cx: &mut Context<'_>) -> Poll<Outcome> {
        let mut replaced = None;
        let polled = {
            let slots = &mut self.state.lock().slots;
            match slots.remove(&id) {
                Some(Slot::Ready(outcome)) => Poll::Ready(outcome),
                Some(Slot::Waiting(waker)) if waker.will_wake(cx.waker()) => {
                    slots.insert(id, Slot::Waiting(waker));
                    Poll::Pending
                }
                slot => {
                    replaced = slot;
                    slots.insert(id, Slot::Waiting(cx.waker().clone()));
                    Poll::Pending
                }
            }
        };
        drop(replaced);
        polled
    }

    /// The caller of a request has gone.
    fn cancel(&self, id: RequestId) {
        let _ = self.change(|state, now, effects| {
            match state.slots.remove(&id) {
                Some(Slot::Ready(outcome)) => state.engine.discard(outcome),
                slot => effects.replaced.extend(slot),
            }
            state.engine.cancel(now, id);
        });
    }

    fn change<T>(&self, change: impl FnOnce(&mut State, Time, &mut Effects) -> T) -> Option<T> {
        self.change_then(change, |_, output| output)
    }

    /// Changes the state, drains the outputs, and does the rest under the same lock.
    fn change_then<T, U>(
        &self,
        change: impl FnOnce(&mut State, Time, &mut Effects) -> T,
        rest: impl FnOnce(&mut State, T) -> U,
    ) -> Option<U> {
        let mut effects = Effects::default();
        let output = {
            let state = &mut *self.state.lock();
            let now = self.clock.now();
            let changed = catch_unwind(AssertUnwindSafe(|| change(state, now, &mut effects)));
            if changed.is_err() {
                state.engine.fail();
            }
            state.drain(&mut effects);
            changed.map(|output| rest(state, output))
        };
        if output.is_err() {
            tracing::error!("the lock client has failed, each of its locks is lost");
        }
        self.perform(effects);
        output.ok()
    }

    /// What the outputs of the engine ask for, outside the lock.
    fn perform(&self, effects: Effects) {
        for call in effects.calls {
            // An error means that the client has ended, and with it each request.
            let _ = self.outgoing.send(call);
        }
        if effects.has_alarm {
            self.alarm.notify_one();
        }
        if effects.has_subscriptions {
            self.subscriptions.notify_one();
        }
        for cell in effects.lost {
            contain(|| cell.wake());
        }
        for waker in effects.wakers {
            contain(|| waker.wake());
        }
        for notice in effects.notices {
            contain(|| notices::log(notice));
        }
    }

    /// When the thread has to call [`Engine::handle_timeout`]. It wakes up then, unless the
    /// alarm says that this is too late.
    fn arm(&self) -> Option<Time> {
        let state = &mut *self.state.lock();
        let next = state.engine.poll_timeout();
        // With nothing to do an old setting stays: locks that come and go do not wake the thread
        // each time.
        if next.is_some() || state.armed.is_some_and(|at| at <= self.clock.now()) {
            state.armed = next;
        }
        state.armed
    }

    fn has_ended(&self) -> bool {
        self.state.lock().engine.has_ended()
    }

    /// The changes of subscriptions since the last call.
    fn take_subscriptions(&self) -> Vec<(Bytes, bool)> {
        std::mem::take(&mut self.state.lock().subscriptions)
    }
}

/// Runs foreign code, a waker or a subscriber of the log. A panic does not end the client.
fn contain(run: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(run)).is_err() {
        let _ = catch_unwind(|| {
            tracing::error!("a waker or a subscriber of the log panicked");
        });
    }
}

impl State {
    fn drain(&mut self, effects: &mut Effects) {
        while let Some(transmit) = self.engine.poll_transmit() {
            match transmit {
                Transmit::Call(id, call) => effects.calls.push(Outgoing::Call(id, call)),
                Transmit::Reconnect => effects.calls.push(Outgoing::Reconnect),
                Transmit::Subscribe(name) => self.subscriptions.push((name, true)),
                Transmit::Unsubscribe(name) => self.subscriptions.push((name, false)),
            }
        }
        effects.has_subscriptions = !self.subscriptions.is_empty();
        while let Some(event) = self.engine.poll_event() {
            match event {
                Event::Completed(id, outcome) => {
                    match self.slots.insert(id, Slot::Ready(outcome)) {
                        Some(Slot::Waiting(waker)) => effects.wakers.push(waker),
                        slot => effects.replaced.extend(slot),
                    }
                }
                Event::Lost(cell) => effects.lost.push(cell),
                Event::Notice(notice) => effects.notices.push(notice),
            }
        }
        let next = self.engine.poll_timeout();
        let is_earlier = match (next, self.armed) {
            (Some(next), Some(armed)) => next < armed,
            (Some(_), None) => true,
            (None, _) => false,
        };
        if is_earlier {
            self.armed = next;
        }
        effects.has_alarm = is_earlier || self.engine.has_ended();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::FutureExt;
    use futures::task::noop_waker;

    use super::*;
    use crate::config::{DeadlockDetection, LeaseTime};
    use crate::engine::{AcquireRequest, Settings, Wait};
    use crate::error::{Error, LostReason};
    use crate::keys::Keys;
    use crate::kind::Kind;
    use crate::lease_cell::LossWaiter;
    use crate::owner::{ClientId, Owner, TaskKey};
    use crate::wire::{Failure, Reply};

    fn driver() -> (Arc<Driver>, mpsc::UnboundedReceiver<Outgoing>) {
        let settings = Settings {
            client_id: ClientId::random(),
            address: "localhost:6379".into(),
            watchdog: LeaseTime::at_least(Duration::from_secs(30)),
            recheck: None,
            retry_timeout: Duration::from_secs(10),
            command_timeout: Duration::from_secs(3),
            renewal_batch: 100,
            detection: DeadlockDetection::Warn,
            passing_time: std::time::Duration::ZERO,
        };
        Driver::new(Engine::new(settings, 7), Arc::default())
    }

    /// A request to acquire, polled once.
    fn acquire(
        driver: &Arc<Driver>,
        name: &str,
    ) -> impl Future<Output = Result<Acquisition, Error>> + Unpin + use<> {
        let request = AcquireRequest {
            keys: Keys::reentrant(name).expect("a valid name"),
            kind: Kind::Reentrant,
            owner: Owner::new(),
            lease: None,
            wait: Wait::Unlimited,
            task: TaskKey::current(),
        };
        let begin = |engine: &mut Engine, now| engine.acquire(now, request);
        let pending = driver.submit(begin);
        let mut acquiring = Box::pin(pending.acquired());
        let polled = acquiring.poll_unpin(&mut Context::from_waker(&noop_waker()));
        let early = match polled {
            Poll::Ready(outcome) => Some(outcome),
            Poll::Pending => None,
        };
        Box::pin(async move {
            match early {
                Some(outcome) => outcome,
                None => acquiring.await,
            }
        })
    }

    /// The reply comes after the last poll, and nobody looks at the outcome.
    #[test]
    fn release_that_failed_before_its_caller_went_is_counted() {
        let (driver, mut calls) = driver();
        let mut reply = |reply| {
            let Ok(Outgoing::Call(id, _)) = calls.try_recv() else {
                panic!("no call");
            };
            driver.apply(|engine, now| engine.handle_reply(now, id, reply));
        };
        let granting = acquire(&driver, "held");
        reply(Ok(Reply::List(vec![
            Reply::Int(1),
            Reply::Text("1".into()),
        ])));
        let Some(Ok(Acquisition::Granted(grant))) = granting.now_or_never() else {
            panic!("not granted");
        };
        let releasing = driver.submit(|engine, now| engine.release(now, grant.hold, true));
        let mut releasing = Box::pin(releasing.outcome());
        let mut cx = Context::from_waker(Waker::noop());
        assert!(releasing.poll_unpin(&mut cx).is_pending());
        let refusal = "NOPERM this user has no permissions to run the 'evalsha' command";
        reply(Err(Failure::Server(refusal.to_owned().into())));
        assert_eq!(driver.stats().failed_releases, 0);
        drop(releasing);
        assert_eq!(driver.stats().failed_releases, 1);
    }

    #[test]
    fn panic_in_the_engine_ends_each_request_and_loses_each_lock() {
        let (driver, mut calls) = driver();
        // A lock that is granted, and requests that are in flight, that wait, and that are offered.
        let granting = acquire(&driver, "held");
        let offering = acquire(&driver, "offered");
        for _ in 0..2 {
            let Ok(Outgoing::Call(id, _)) = calls.try_recv() else {
                panic!("no call");
            };
            let reply = Reply::List(vec![Reply::Int(1), Reply::Text("1".into())]);
            driver.apply(|engine, now| engine.handle_reply(now, id, Ok(reply)));
        }
        let Some(Ok(Acquisition::Granted(grant))) = granting.now_or_never() else {
            panic!("not granted");
        };
        let mut lost = LossWaiter::new(Arc::clone(&grant.cell));
        let waker = noop_waker();
        let mut cx = Context::from_waker(&waker);
        assert!(lost.poll(driver.clock.now(), &mut cx).is_pending());
        let in_flight = acquire(&driver, "free");
        let keys = Keys::reentrant("held").expect("a valid name");
        let asking = driver.submit(|engine, now| engine.inspect(now, &keys, Kind::Reentrant, None));
        let mut asking = Box::pin(asking.outcome());
        assert!(asking.poll_unpin(&mut cx).is_pending());

        assert!(driver.apply(|_, _| panic!("a defect")).is_none());

        let failed = |outcome| matches!(outcome, Some(Err(Error::ClientFailed)));
        assert!(failed(in_flight.now_or_never()));
        assert!(failed(offering.now_or_never()));
        let answer = asking.now_or_never();
        assert!(
            matches!(answer, Some(Outcome::Failed(Error::ClientFailed))),
            "{answer:?}"
        );
        let reason = lost.poll(driver.clock.now(), &mut cx);
        assert_eq!(reason, Poll::Ready(LostReason::ClientFailed));
        // What comes later fails, too, and does not panic.
        assert!(failed(acquire(&driver, "late").now_or_never()));
        let released = driver.submit(|engine, now| engine.release(now, grant.hold, true));
        assert!(matches!(
            released.outcome().now_or_never(),
            Some(Outcome::Failed(Error::ClientFailed))
        ));
        driver.apply(|engine, now| engine.drop_hold(now, grant.hold));
        driver.apply(|engine, now| engine.handle_timeout(now));
        driver.apply(|engine, now| engine.abandon(now));
        assert!(driver.has_ended());
        let stats = driver.stats();
        assert_eq!(
            (
                stats.losses.client_failed,
                stats.locks_held,
                stats.requests_waiting
            ),
            (2, 0, 0)
        );
    }
}
