//! The time of the model. It passes while everybody sleeps, up to the next alarm; and now and then
//! a little while somebody is about to run, for who is polled at all comes soon, but not at once.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Add;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use shuttle::future::JoinHandle;
use shuttle::rand::{Rng, thread_rng};

/// The longest that a task takes from being woken to sleeping again.
pub const LAG: Duration = Duration::from_millis(2);
/// What waits for longer waits for ever.
pub const NEVER: Duration = Duration::from_secs(1_000_000);
const END: Instant = Instant(Duration::from_secs(100));

/// As `tokio::time::Instant`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Instant(pub Duration);

impl Instant {
    pub fn now() -> Self {
        CLOCK.with_borrow(|clock| clock.now)
    }

    pub fn saturating_duration_since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, time: Duration) -> Self {
        Self(self.0 + time)
    }
}

thread_local! {
    /// No primitive of the scheduler: to look at the clock is no point at which others may run.
    static CLOCK: RefCell<Clock> = RefCell::default();
}

#[derive(Default)]
struct Clock {
    now: Instant,
    alarms: BTreeMap<(Instant, u64), Waker>,
    /// The tasks that are about to run, and since when.
    awake: BTreeMap<u64, Instant>,
    last_id: u64,
}

impl Clock {
    fn id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }
}

/// Runs a scenario from the beginning of time.
pub fn run(scenario: impl Future<Output = ()> + Send + 'static) {
    CLOCK.take();
    shuttle::future::block_on(Task::new(scenario));
}

pub fn spawn<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    shuttle::future::spawn(Task::new(future))
}

pub fn sleep_until(at: Instant) -> Sleep {
    Sleep(at, CLOCK.with_borrow_mut(Clock::id))
}

pub fn sleep(time: Duration) -> Sleep {
    sleep_until(Instant::now() + time)
}

pub struct Sleep(Instant, u64);

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        CLOCK.with_borrow_mut(|clock| {
            if clock.now >= self.0 {
                return Poll::Ready(());
            }
            clock.alarms.insert((self.0, self.1), cx.waker().clone());
            Poll::Pending
        })
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        CLOCK.with_borrow_mut(|clock| clock.alarms.remove(&(self.0, self.1)));
    }
}

/// A task, of which the clock knows whether it is about to run.
struct Task<T> {
    future: BoxFuture<'static, T>,
    alarm: Arc<Alarm>,
}

struct Alarm {
    id: u64,
    /// Woken since the last poll began.
    woken: AtomicBool,
    done: AtomicBool,
    waker: Mutex<Waker>,
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        if !self.done.load(Ordering::Relaxed) {
            self.woken.store(true, Ordering::Relaxed);
            self.is_awake();
            self.waker.lock().wake_by_ref();
        }
    }
}

impl Alarm {
    fn is_awake(&self) {
        CLOCK.with_borrow_mut(|clock| {
            let now = clock.now;
            clock.awake.entry(self.id).or_insert(now);
        });
    }

    fn sleeps(&self) {
        CLOCK.with_borrow_mut(|clock| clock.awake.remove(&self.id));
    }
}

impl<T> Task<T> {
    fn new(future: impl Future<Output = T> + Send + 'static) -> Self {
        let id = CLOCK.with_borrow_mut(Clock::id);
        let (woken, done, waker) = (
            AtomicBool::default(),
            AtomicBool::default(),
            Mutex::new(Waker::noop().clone()),
        );
        let alarm = Arc::new(Alarm {
            id,
            woken,
            done,
            waker,
        });
        alarm.is_awake();
        Self {
            future: future.boxed(),
            alarm,
        }
    }
}

impl<T> Future for Task<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let alarm = Arc::clone(&self.alarm);
        alarm.waker.lock().clone_from(cx.waker());
        alarm.woken.store(false, Ordering::Relaxed);
        let output = self
            .future
            .poll_unpin(&mut Context::from_waker(&Arc::clone(&alarm).into()));
        alarm.done.store(output.is_ready(), Ordering::Relaxed);
        if output.is_ready() || !alarm.woken.load(Ordering::Relaxed) {
            alarm.sleeps();
        }
        pass();
        output
    }
}

/// Lets time pass as far as it may.
fn pass() {
    let step = Duration::from_millis(thread_rng().gen_range(0..8_u64).saturating_sub(5));
    let due = CLOCK.with_borrow_mut(|clock| {
        let next = clock.alarms.keys().next().map(|(at, _)| *at);
        let to = match clock.awake.values().min() {
            Some(since) => (clock.now + step)
                .min(*since + LAG)
                .min(next.unwrap_or(END)),
            None => next.unwrap_or(clock.now),
        };
        assert!(to < END, "nobody goes on");
        clock.now = to.max(clock.now);
        let later = clock.alarms.split_off(&(clock.now, u64::MAX));
        std::mem::replace(&mut clock.alarms, later)
    });
    due.into_values().for_each(Waker::wake);
}
