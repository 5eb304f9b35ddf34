//! The lanes of waiters under a scheduler that tries thousands of orders of events: nobody may sleep for ever, at most one
//! attempt is in flight, and nothing is left behind.
//!
//! The files under test are those of the library, with the scheduler's own mutex and notification in place of the real ones.
//! A lost wake-up shows as a deadlock, because here nothing is ever due by the clock.

use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::channel::oneshot;
use shuttle::future::{block_on, spawn, yield_now};
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::Mutex;
use tokio::sync::mpsc;
use tokio::time::Instant;

#[allow(dead_code)]
#[path = "../../src/wakeup/lane.rs"]
mod lane;
mod sync;
#[allow(dead_code)]
#[path = "../../src/wakeup/table.rs"]
mod table;

use lane::{Outcome, Pace};
use table::{InFlight, Turn, Wakeups};

const CHANNEL: Bytes = Bytes::from_static(b"redisson_lock__channel:{stock}");
const NAME: Bytes = Bytes::from_static(b"stock");
const NEVER: Duration = Duration::from_secs(1_000_000);
const PACE: Pace = Pace { recheck: NEVER, grace: NEVER };
const ORDERS: usize = 1_500;

/// The lock and the channel, as a server has them.
#[derive(Default)]
struct Server {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    holder: Option<usize>,
    subscribed: bool,
    in_flight: usize,
    /// Messages that do not arrive, because the listening connection breaks.
    to_lose: usize,
}

impl Server {
    /// What the script answers.
    fn acquire(&self, owner: usize) -> bool {
        let mut state = self.state.lock().unwrap();
        if state.holder.is_none() {
            state.holder = Some(owner);
        }
        state.holder == Some(owner)
    }

    fn release(&self, owner: usize, wakeups: &Wakeups) {
        let (published, lost) = {
            let mut state = self.state.lock().unwrap();
            assert_eq!(state.holder.take(), Some(owner), "somebody else released it");
            let lost = state.subscribed && state.to_lose > 0;
            if lost {
                state.to_lose -= 1;
                state.subscribed = false;
            }
            (state.subscribed, lost)
        };
        if lost {
            wakeups.interrupted();
        } else if published {
            wakeups.message(&CHANNEL);
        }
    }

    fn now_in_flight(&self, change: isize) {
        let mut state = self.state.lock().unwrap();
        state.in_flight = state.in_flight.checked_add_signed(change).unwrap();
        assert!(state.in_flight <= 1, "two attempts in flight");
    }
}

/// Keeps the subscription as `wakeup::reconcile` does.
async fn listen(server: Arc<Server>, wakeups: Weak<Wakeups>, mut changes: mpsc::UnboundedReceiver<Bytes>) {
    while let Some(channel) = changes.recv().await {
        let Some(wakeups) = wakeups.upgrade() else { return };
        let wanted = wakeups.wants(&channel);
        yield_now().await;
        server.state.lock().unwrap().subscribed = wanted;
        yield_now().await;
        if wanted {
            wakeups.confirmed(&channel);
        }
    }
}

/// An attempt, which goes on if nobody waits for its outcome any more: then what it brings is given back.
async fn attempt(
    server: Arc<Server>,
    wakeups: Arc<Wakeups>,
    owner: usize,
    in_flight: InFlight,
    told: oneshot::Sender<bool>,
) {
    server.now_in_flight(1);
    yield_now().await;
    let granted = server.acquire(owner);
    yield_now().await;
    server.now_in_flight(-1);
    in_flight.answered(if granted { Outcome::Granted(Instant::now() + NEVER) } else { Outcome::Held(None) });
    if told.send(granted).is_err() && granted {
        yield_now().await;
        server.release(owner, &wakeups);
    }
}

/// Waits as `acquire::Waiter` does.
async fn lock(server: Arc<Server>, wakeups: Arc<Wakeups>, owner: usize) -> Grant {
    let place = wakeups.join(&CHANNEL, &NAME, owner as i64);
    loop {
        match place.turn(PACE) {
            Turn::Try(in_flight) => {
                let (tell, told) = oneshot::channel();
                spawn(attempt(Arc::clone(&server), Arc::clone(&wakeups), owner, in_flight, tell));
                let grant = Grant { server: Arc::clone(&server), wakeups: Arc::clone(&wakeups), owner, granted: false };
                if let Some(grant) = Told(told, Some(grant)).await {
                    return grant;
                }
            }
            Turn::Sleep(..) => place.notified().await,
            Turn::Closed => unreachable!("nobody closes it"),
        }
    }
}

/// A hold. Dropping it releases the lock.
struct Grant {
    server: Arc<Server>,
    wakeups: Arc<Wakeups>,
    owner: usize,
    /// Whether it is real, and to be given back here.
    granted: bool,
}

impl Drop for Grant {
    fn drop(&mut self) {
        if self.granted {
            self.server.release(self.owner, &self.wakeups);
        }
    }
}

/// What an attempt tells. Where nobody asks any more, a grant that has arrived is given back here.
struct Told(oneshot::Receiver<bool>, Option<Grant>);

impl Future for Told {
    type Output = Option<Grant>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let granted = std::task::ready!(self.0.poll_unpin(cx)).unwrap_or(false);
        let mut grant = self.1.take().filter(|_| granted);
        grant.iter_mut().for_each(|grant| grant.granted = true);
        Poll::Ready(grant)
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        self.0.close();
        if let Some(grant) = &mut self.1 {
            grant.granted = matches!(self.0.try_recv(), Ok(Some(true)));
        }
    }
}

/// A future that is dropped after so many polls.
struct UpTo<F>(usize, Pin<Box<F>>);

impl<F: Future> Future for UpTo<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Poll::Ready(output) = self.1.poll_unpin(cx) {
            return Poll::Ready(Some(output));
        }
        if self.0 == 0 {
            return Poll::Ready(None);
        }
        self.0 -= 1;
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

/// Lets waiters wait, some of which go away, and looks at what is left.
fn crowd(stay: usize, go: usize, messages_lost: usize) {
    block_on(async move {
        let server = Arc::new(Server::default());
        server.state.lock().unwrap().to_lose = messages_lost;
        let (wakeups, changes) = Wakeups::new();
        let listening = spawn(listen(Arc::clone(&server), Arc::downgrade(&wakeups), changes));
        let waiters: Vec<_> = (0..stay + go)
            .map(|owner| {
                let waiter = lock(Arc::clone(&server), Arc::clone(&wakeups), owner);
                let polls = thread_rng().gen_range(0..8);
                spawn(async move {
                    let granted = if owner < stay { Some(waiter.await) } else { UpTo(polls, Box::pin(waiter)).await };
                    yield_now().await;
                    drop(granted);
                })
            })
            .collect();
        for waiter in waiters {
            waiter.await.unwrap();
        }
        // What was left behind ends by itself: the scheduler reports a loop without an end.
        let left = || {
            let state = server.state.lock().unwrap();
            wakeups.channels() > 0 || state.holder.is_some() || state.subscribed
        };
        while left() {
            yield_now().await;
        }
        drop(wakeups);
        listening.await.unwrap();
    });
}

#[test]
fn everybody_gets_in_and_nothing_is_left() {
    shuttle::check_random(|| crowd(3, 0, 0), ORDERS);
}

#[test]
fn waiters_that_go_away_take_nothing_with_them() {
    shuttle::check_random(|| crowd(2, 2, 0), ORDERS);
    shuttle::check_pct(|| crowd(2, 2, 0), ORDERS, 3);
}

#[test]
fn messages_that_are_lost_with_the_listening_connection_are_made_up_for() {
    shuttle::check_random(|| crowd(3, 1, 2), ORDERS);
}
