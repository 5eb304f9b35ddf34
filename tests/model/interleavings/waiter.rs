//! Those who wait, and what they must find.

use std::collections::{HashMap, HashSet};
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, select};
use parking_lot::{Mutex, MutexGuard};
use shuttle::future::{JoinHandle, yield_now};

use super::clock::{Instant, LAG, sleep, sleep_until, spawn};
use super::lane::{Outcome, Pace, Standing};
use super::server::{Server, some_time};
use super::table::{InFlight, Turn, Wakeups};
use super::{CHANNEL, NAME, Rules, ms, random};

/// For how long trouble with the server is waited out.
const PATIENCE: Duration = ms(200);

pub struct World {
    pub server: Arc<Server>,
    pub wakeups: Arc<Wakeups>,
    pub rules: Rules,
    seen: Mutex<Seen>,
    background: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct Seen {
    /// The attempts of those who have been polled all the while.
    in_flight: HashSet<usize>,
    /// When the server's answers were taken in, if not later.
    answers: Vec<Instant>,
    /// Those that may have been taken in.
    answers_begun: usize,
    /// Those who have always been polled, with what `events` was before and after they stood in
    /// line.
    line: HashMap<usize, (u64, u64)>,
    /// The same of those who have not.
    parked: HashMap<usize, (u64, u64)>,
    passed_over: HashSet<usize>,
    events: u64,
}

/// What came of waiting.
pub enum Waited {
    Granted(Grant),
    /// The wait time is over.
    GaveUp,
    /// The server told nothing.
    Failed,
}

/// A hold, or what may be one. Dropping it releases the lock.
pub struct Grant {
    world: Arc<World>,
    owner: usize,
    forgotten: bool,
}

impl Grant {
    pub fn forget(mut self) {
        self.forgotten = true;
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        if self.forgotten {
            return;
        }
        let (server, wakeups, owner) = (
            Arc::clone(&self.world.server),
            Arc::clone(&self.world.wakeups),
            self.owner,
        );
        self.world
            .in_background(async move { server.release(owner, wakeups).await });
    }
}

impl World {
    pub fn new(rules: Rules, server: Arc<Server>, wakeups: Arc<Wakeups>) -> Arc<Self> {
        Arc::new(Self {
            server,
            wakeups,
            rules,
            seen: Mutex::default(),
            background: Mutex::default(),
        })
    }

    fn in_background(&self, future: impl Future<Output = ()> + Send + 'static) {
        // A point at which others may run, so not under the mutex.
        let task = spawn(future);
        self.background.lock().push(task);
    }

    /// Resolves when nothing is left to do for those who went away.
    pub async fn settled(&self) {
        loop {
            let Some(task) = self.background.lock().pop() else {
                return;
            };
            task.await.unwrap();
        }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock()
    }

    fn joined(&self, owner: usize, events: u64) {
        let seen = &mut *self.seen();
        seen.events += 1;
        seen.line.insert(owner, (events, seen.events));
    }

    /// From now on this waiter is not polled: others may go on without it.
    fn parks(&self, owner: usize) {
        let mut seen = self.seen();
        seen.in_flight.remove(&owner);
        if let Some(place) = seen.line.remove(&owner) {
            seen.parked.insert(owner, place);
        }
        drop(seen);
        self.server.unwanted(owner);
    }

    /// It is polled again: where it stood, or behind all others if one of them has gone past it.
    fn comes_back(&self, owner: usize) {
        let seen = &mut *self.seen();
        if let Some(place) = seen.parked.get_mut(&owner) {
            self.server.wanted(owner);
            if seen.passed_over.contains(&owner) {
                *place = (seen.events, seen.events + 1);
                seen.events += 1;
            }
        }
    }

    fn begins(&self, owner: usize) {
        let seen = &mut *self.seen();
        seen.in_flight.insert(owner);
        assert!(seen.in_flight.len() <= 1, "two attempts in flight");
        if let Some((began, _)) = seen.line.get(&owner) {
            let before = seen.parked.iter().filter(|(_, (_, joined))| joined < began);
            seen.passed_over.extend(before.map(|(owner, _)| owner));
        }
    }

    /// Ends an attempt. Who was polled all the while has come past nobody who always is.
    fn ends(&self, owner: usize, granted: bool) {
        let seen = &mut *self.seen();
        if !seen.in_flight.remove(&owner) || !granted {
            return;
        }
        if let Some((began, _)) = seen.line.get(&owner).or(seen.parked.get(&owner)) {
            let earlier = seen.line.iter().find(|(_, (_, joined))| joined < began);
            assert_eq!(earlier, None, "{owner} came past somebody");
        }
    }

    /// Takes in an answer.
    fn answered(&self, in_flight: InFlight, outcome: Outcome) {
        let at = Instant::now();
        self.seen().answers_begun += 1;
        in_flight.answered(outcome);
        self.seen().answers.push(at);
    }
}

/// An attempt. What it brings is given back if nobody takes it.
async fn attempt(
    world: Arc<World>,
    owner: usize,
    caller: Weak<()>,
    in_flight: InFlight,
) -> Result<Option<Grant>, ()> {
    world.begins(owner);
    let gives_up_at = Instant::now() + PATIENCE;
    let mut grant = None;
    let result = loop {
        match world.server.ask(owner).await {
            Some(outcome) => {
                if let Outcome::Granted(_) = outcome {
                    grant = Some(Grant {
                        world: Arc::clone(&world),
                        owner,
                        forgotten: false,
                    });
                }
                world.ends(owner, grant.is_some());
                world.answered(in_flight, outcome);
                return Ok(grant);
            }
            None if caller.strong_count() == 0 || Instant::now() >= gives_up_at => break Err(()),
            None => {
                some_time(10).await;
                in_flight.goes_on();
            }
        }
    };
    // Its outcome is not known, so it is given back.
    drop(Grant {
        world: Arc::clone(&world),
        owner,
        forgotten: false,
    });
    world.ends(owner, false);
    result
}

/// As the library's: finished in the background if its caller drops it.
struct Handoff(
    Arc<World>,
    Option<BoxFuture<'static, Result<Option<Grant>, ()>>>,
);

impl Future for Handoff {
    type Output = Result<Option<Grant>, ()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let output = std::task::ready!(self.1.as_mut().unwrap().poll_unpin(cx));
        self.1 = None;
        Poll::Ready(output)
    }
}

impl Drop for Handoff {
    fn drop(&mut self) {
        if let Some(attempt) = self.1.take() {
            self.0.in_background(async move { drop(attempt.await) });
        }
    }
}

/// In line from here to its end.
struct InLine<'a>(&'a World, usize);

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        let mut seen = self.0.seen();
        seen.line.remove(&self.1);
        seen.parked.remove(&self.1);
        drop(seen);
        self.0.server.unwanted(self.1);
    }
}

/// Waits as `acquire::Waiter` does.
pub async fn lock(world: Arc<World>, owner: usize, wait: Option<Duration>) -> Waited {
    let begun = Instant::now();
    let ends = wait.map(|wait| begun + wait);
    let _in_line = InLine(&world, owner);
    world.server.wanted(owner);
    let events = world.seen().events;
    let place = world.wakeups.join(&CHANNEL, &NAME, owner as i64);
    let joined = Instant::now();
    world.joined(owner, events);
    let alive = Arc::new(());
    let mut asked = false;
    let mut dark_until = None;
    loop {
        if asked && ends.is_some_and(|ends| Instant::now() >= ends) {
            return Waited::GaveUp;
        }
        let told = world.seen().answers.last().copied();
        let recheck = world.rules.recheck / 10 * random(8..11) as u32;
        let (until, standing) = match place.turn(Pace {
            recheck,
            grace: world.rules.grace,
        }) {
            Turn::Try(in_flight) => {
                if let Some(silence) = in_flight.silence() {
                    assert!(
                        told.is_none_or(|told| told < silence.since),
                        "an answer in a time of silence"
                    );
                }
                asked = true;
                let attempt = attempt(Arc::clone(&world), owner, Arc::downgrade(&alive), in_flight);
                match Handoff(Arc::clone(&world), Some(attempt.boxed())).await {
                    Ok(Some(grant)) => return Waited::Granted(grant),
                    Ok(None) => continue,
                    Err(()) => return Waited::Failed,
                }
            }
            Turn::Sleep(until, standing) => (until, standing),
            Turn::Closed => unreachable!("nobody closes it"),
        };
        let now = Instant::now();
        let until = match ends {
            None => until,
            Some(ends) if now < ends => ends.min(until),
            Some(ends) => {
                let answer = world
                    .seen()
                    .answers
                    .iter()
                    .find(|at| **at > joined)
                    .map(|at| ends.max(*at));
                assert!(
                    answer.is_none_or(|at| now <= at + 3 * LAG),
                    "an answer that was not heard: {answer:?} {now:?}"
                );
                let Standing::InTheDark { asked: asked_at } = standing else {
                    assert!(
                        world.seen().answers_begun > 0,
                        "nobody has said that the lock is held"
                    );
                    return Waited::GaveUp;
                };
                let reply = asked_at + world.rules.grace;
                let ends = *dark_until.get_or_insert(reply.max(begun + PATIENCE));
                if now >= ends {
                    return Waited::Failed;
                }
                if place.wants_answer() {
                    continue;
                }
                ends.min(until)
            }
        };
        select(pin!(place.notified()), sleep_until(until)).await;
    }
}

/// A future that is polled so many times.
struct UpTo<'a, F>(u64, Pin<&'a mut F>);

impl<F: Future> Future for UpTo<'_, F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.0 == 0 {
            return Poll::Ready(None);
        }
        self.0 -= 1;
        match self.1.as_mut().poll(cx) {
            Poll::Pending if self.0 == 0 => Poll::Ready(None),
            output => output.map(Some),
        }
    }
}

/// A waiter that is dropped after some polls.
pub async fn goes_away(world: Arc<World>, owner: usize) -> Option<Waited> {
    let mut waiter = pin!(lock(world, owner, None));
    let waited = UpTo(random(0..8), waiter.as_mut()).await;
    // Not in the same breath: a wake-up may be in its hands by then.
    yield_now().await;
    waited
}

/// A waiter that is not polled for that time after some polls, which is no reason to go past it.
pub async fn pauses(world: Arc<World>, owner: usize, time: Duration) -> Waited {
    let mut waiter = pin!(lock(world, owner, None));
    if let Some(waited) = UpTo(random(0..8), waiter.as_mut()).await {
        return waited;
    }
    sleep(time).await;
    waiter.await
}

/// A waiter that is not polled for that time after some polls, or until others have gone past it;
/// then it is polled again or dropped.
pub async fn parks(
    world: Arc<World>,
    owner: usize,
    time: Duration,
    comes_back: bool,
) -> Option<Waited> {
    let mut waiter = pin!(lock(Arc::clone(&world), owner, None));
    if let Some(waited) = UpTo(random(0..8), waiter.as_mut()).await {
        return Some(waited);
    }
    world.parks(owner);
    let (until, whole) = (Instant::now() + time, random(0..2) == 0);
    while Instant::now() < until && (whole || !world.seen().passed_over.contains(&owner)) {
        sleep(ms(2)).await;
    }
    if !comes_back {
        return None;
    }
    world.comes_back(owner);
    Some(waiter.await)
}
