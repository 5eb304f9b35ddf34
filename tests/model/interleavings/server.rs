//! The lock and its channel, as a server has them, and what goes wrong on the way there and back.

use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::channel::oneshot;
use parking_lot::{Mutex, MutexGuard};
use shuttle::rand::{Rng, thread_rng};
use tokio::sync::mpsc;

use super::clock::{Instant, sleep, spawn};
use super::lane::Outcome;
use super::table::Wakeups;
use super::{CHANNEL, Rules, ms};

/// The longest way there, and the longest way back.
const WAY: u64 = 3;
/// How long a question waits for its reply.
const TIMEOUT: Duration = ms(20);

pub struct Server {
    state: Mutex<State>,
    rules: Rules,
}

#[derive(Default)]
struct State {
    /// Until then if nobody releases it.
    owner: Option<(usize, Instant)>,
    free_since: Instant,
    subscribed: bool,
    to_lose: usize,
    to_swallow: usize,
    /// Those that wait and are polled, and since when there is any.
    wanted_by: HashSet<usize>,
    wanted_since: Instant,
    questions: usize,
}

impl State {
    fn expire(&mut self) {
        if let Some((_, at)) = self.owner.take_if(|(_, until)| *until <= Instant::now()) {
            self.free_since = at;
        }
    }
}

pub async fn some_time(longest: u64) {
    sleep(ms(thread_rng().gen_range(0..=longest))).await;
}

impl Server {
    pub fn new(rules: Rules) -> Arc<Self> {
        let (to_lose, to_swallow) = (rules.messages_lost, rules.questions_swallowed);
        let owner = Some((usize::MAX, rules.held_until));
        let state = State {
            owner,
            to_lose,
            to_swallow,
            ..State::default()
        };
        Arc::new(Self {
            state: Mutex::new(state),
            rules,
        })
    }

    /// Asks for the lock. The question is under way from the first poll on, whether or not anybody
    /// waits for its reply; `None` says that none came.
    pub async fn ask(self: &Arc<Self>, owner: usize) -> Option<Outcome> {
        let (tell, told) = oneshot::channel();
        let server = Arc::clone(self);
        spawn(async move {
            let swallowed = server.swallows();
            let arrives = !swallowed || thread_rng().gen_bool(0.5);
            some_time(WAY).await;
            let reply = arrives.then(|| server.acquire(owner));
            if swallowed {
                return sleep(TIMEOUT).await;
            }
            some_time(WAY).await;
            let _ = reply.map(|reply| tell.send(reply));
        });
        told.map(Result::ok).await
    }

    fn swallows(&self) -> bool {
        let mut state = self.state();
        state.questions += 1;
        if Instant::now() < self.rules.deaf_until {
            return true;
        }
        let swallows = state.to_swallow > 0 && thread_rng().gen_bool(0.5);
        state.to_swallow -= usize::from(swallows);
        swallows
    }

    /// What the script answers.
    fn acquire(&self, owner: usize) -> Outcome {
        let now = Instant::now();
        let mut state = self.state();
        state.expire();
        if state.owner.is_none() {
            let free = now.saturating_duration_since(state.free_since.max(state.wanted_since));
            let neglected = !state.wanted_by.is_empty() && free > self.rules.free_at_most;
            assert!(
                !neglected,
                "the lock was free for {free:?} while somebody waited"
            );
        }
        match *state.owner.get_or_insert((owner, now + self.rules.lease)) {
            (held_by, until) if held_by == owner => Outcome::Granted(until),
            (_, until) => Outcome::Held(Some(until)),
        }
    }

    /// Releases it if it is still held, and publishes that.
    pub async fn release(&self, owner: usize, wakeups: Arc<Wakeups>) {
        some_time(WAY).await;
        let (published, lost) = {
            let mut state = self.state();
            state.expire();
            if state
                .owner
                .take_if(|(held_by, _)| *held_by == owner)
                .is_none()
            {
                return;
            }
            state.free_since = Instant::now();
            let lost = state.subscribed && state.to_lose > 0;
            if lost {
                state.to_lose -= 1;
                state.subscribed = false;
            }
            (state.subscribed, lost)
        };
        some_time(WAY).await;
        if lost {
            wakeups.interrupted();
        } else if published {
            wakeups.message(&CHANNEL);
        }
    }

    /// Somebody who is polled waits from now on.
    pub fn wanted(&self, owner: usize) {
        let mut state = self.state();
        if state.wanted_by.is_empty() {
            state.wanted_since = Instant::now();
        }
        state.wanted_by.insert(owner);
    }

    /// Somebody waits no more, or is not polled.
    pub fn unwanted(&self, owner: usize) {
        self.state().wanted_by.remove(&owner);
    }

    /// How often it was asked.
    pub fn questions(&self) -> usize {
        self.state().questions
    }

    /// Whether nobody holds the lock or listens.
    pub fn is_idle(&self) -> bool {
        let mut state = self.state();
        state.expire();
        state.owner.is_none() && !state.subscribed
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// Keeps the subscription as `wakeup::reconcile` does.
pub async fn listen(
    server: Arc<Server>,
    wakeups: Weak<Wakeups>,
    mut changes: mpsc::UnboundedReceiver<Bytes>,
) {
    while let Some(channel) = changes.recv().await {
        let Some(wakeups) = wakeups.upgrade() else {
            return;
        };
        let wanted = wakeups.wants(&channel);
        some_time(WAY).await;
        server.state().subscribed = wanted;
        some_time(WAY).await;
        if wanted {
            wakeups.confirmed(&channel);
        }
    }
}
