//! Cancellation: a future that is dropped at any point leaves nothing behind.

use std::collections::BTreeMap;
use std::env;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::support::observe::{channels, connections, hold_count, ttl};
use crate::support::server::{Server, unique, wait_until};
use futures::future::BoxFuture;
use futures::{FutureExt, poll};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use redis::{Connection, cmd};
use redisson_lock::{
    Error, LockClient, LockClientBuilder, LockGuard, Owner, OwnerExt, ReentrantLock,
};
use tokio::runtime::{Builder, Runtime};
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};

/// Far longer than a release takes, far shorter than the leases of [`quiet`].
const SOON: Duration = Duration::from_secs(20);
const LEASE: Duration = Duration::from_secs(600);
/// The shortest watchdog timeout within which a busy machine renews reliably.
const WATCHDOG: Duration = Duration::from_secs(6);
/// How many futures a test drops before they are finished, and how many tasks drop them.
const DROPS: usize = 20_000;
const TASKS: usize = 64;

/// Settings with which the client sends nothing on its own during a test.
fn quiet() -> LockClientBuilder {
    LockClient::builder()
        .watchdog_timeout(3 * LEASE)
        .command_timeout(LEASE)
        .recheck_interval(LEASE)
}

/// How often each command was called, without the commands by which the test observes the server.
fn calls(redis: &mut Connection) -> BTreeMap<String, i64> {
    let info: String = cmd("INFO").arg("commandstats").query(redis).unwrap();
    let calls = info.lines().filter_map(|line| {
        let (command, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        Some((command.to_owned(), rest.split(',').next()?.parse().ok()?))
    });
    calls
        .filter(|(command, _)| !["info", "client|list", "client", "dbsize"].contains(&&**command))
        .collect()
}

fn scripts(redis: &mut Connection) -> i64 {
    calls(redis).get("evalsha").copied().unwrap_or(0)
}

fn keys(redis: &mut Connection) -> usize {
    cmd("DBSIZE").query(redis).unwrap()
}

/// Asserts that no lock was freed by its expiry: each one has to be released.
fn assert_no_key_expired(redis: &mut Connection) {
    let info: String = cmd("INFO").arg("stats").query(redis).unwrap();
    assert!(
        info.contains("expired_keys:0\r"),
        "a lock expired instead of being released"
    );
}

/// Waits until no script has run for 300 ms: the background has finished its work.
fn wait_until_idle(redis: &mut Connection) {
    let mut last = (scripts(redis), Instant::now());
    wait_until("the background is idle", SOON, || {
        let now = scripts(redis);
        if now != last.0 {
            last = (now, Instant::now());
        }
        last.1.elapsed() > Duration::from_millis(300)
    });
}

/// Where a future is dropped.
#[derive(Debug, Clone, Copy)]
enum DropPoint {
    /// After so many polls, or after 8 ms if it is polled less often.
    Polls(usize),
    /// By a timeout.
    Time(Duration),
    /// Its task is aborted after so many yields of the task that spawned it.
    Abort(usize),
}

/// Drops futures at points that a seed decides, and counts the drops.
struct Dropper {
    random: StdRng,
    dropped: usize,
    finished: Arc<AtomicUsize>,
}

impl Dropper {
    fn next(&mut self) -> DropPoint {
        match self.random.random_range(0..3) {
            0 => DropPoint::Polls(self.random.random_range(0..8)),
            1 => DropPoint::Time(Duration::from_micros(self.random.random_range(0..8_000))),
            _ => DropPoint::Abort(self.random.random_range(0..24)),
        }
    }

    /// Drops the future at a random point. Returns its output if it was done before.
    async fn run<F>(&mut self, future: F) -> Option<F::Output>
    where
        F: IntoFuture<Output: Send, IntoFuture: Send> + 'static,
        F::IntoFuture: 'static,
    {
        let future = future.into_future();
        let output = match self.next() {
            DropPoint::Polls(polls) => {
                let limited = Limited {
                    future: future.boxed(),
                    polls,
                };
                timeout(Duration::from_millis(8), limited)
                    .await
                    .ok()
                    .flatten()
            }
            DropPoint::Time(limit) => timeout(limit, future).await.ok(),
            DropPoint::Abort(steps) => {
                let task = tokio::spawn(future.in_current_owner());
                for _ in 0..steps {
                    yield_now().await;
                }
                task.abort();
                match task.await {
                    Ok(output) => Some(output),
                    Err(end) if end.is_cancelled() => None,
                    Err(end) => std::panic::resume_unwind(end.into_panic()),
                }
            }
        };
        match output {
            Some(_) => {
                self.finished.fetch_add(1, Ordering::Relaxed);
            }
            None => self.dropped += 1,
        }
        output
    }
}

/// Polls a future at most so many times.
struct Limited<T> {
    future: BoxFuture<'static, T>,
    polls: usize,
}

impl<T> Future for Limited<T> {
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let Some(left) = self.polls.checked_sub(1) else {
            return Poll::Ready(None);
        };
        self.polls = left;
        match self.future.poll_unpin(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    }
}

/// The value of an answer. Panics on an error that concurrent operations do not explain.
#[track_caller]
fn expected<T>(answer: Result<T, Error>) -> Option<T> {
    match answer {
        Ok(value) => Some(value),
        Err(Error::Lost { .. } | Error::AcquireTimeout { .. } | Error::NotHeld { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

/// One operation of a random kind, dropped at a random point.
async fn operate(dropper: &mut Dropper, lock: &ReentrantLock) {
    let brief = Duration::from_micros(dropper.random.random_range(0..3_000));
    let work = move || async move {
        yield_now().await;
        sleep(brief / 8).await;
    };
    match dropper.random.random_range(0..32) {
        0..4 => drop(dropper.run(lock.lock()).await.and_then(expected)),
        4..7 => drop(
            dropper
                .run(lock.lock().timeout(brief))
                .await
                .and_then(expected),
        ),
        7..9 => drop(
            dropper
                .run(lock.lock().lease(LEASE))
                .await
                .and_then(expected),
        ),
        9..11 => drop(dropper.run(lock.try_lock()).await.and_then(expected)),
        11..13 => drop(
            dropper
                .run(lock.try_lock_for(brief).lease(LEASE))
                .await
                .and_then(expected),
        ),
        13..16 => drop(dropper.run(lock.run(work())).await.and_then(expected)),
        16..21 => {
            // Only the unlock is dropped.
            let guard = expected(lock.try_lock_for(brief).await).flatten();
            if let Some(guard) = guard {
                dropper.run(guard.unlock()).await.and_then(expected);
            }
        }
        21..25 => Owner::scope(detach_and_unlock(dropper, lock, brief)).await,
        25..29 => Owner::scope(reenter(dropper, lock)).await,
        29..31 => {
            if let Some(guard) = expected(lock.try_lock_for(brief).await).flatten() {
                let guard = Arc::new(guard);
                let running = Arc::clone(&guard);
                dropper
                    .run(async move { running.run(work()).await })
                    .await
                    .and_then(expected);
                dropper.run(guard.lost()).await;
            }
        }
        _ => {
            let lock = lock.clone();
            dropper
                .run(async move { lock.force_unlock().await })
                .await
                .and_then(expected);
        }
    }
}

async fn detach_and_unlock(dropper: &mut Dropper, lock: &ReentrantLock, wait: Duration) {
    let Some(guard) = expected(lock.try_lock_for(wait).await).flatten() else {
        return;
    };
    let _ = guard.detach();
    let again = lock.clone();
    if dropper
        .run(async move { again.unlock().await })
        .await
        .and_then(expected)
        .is_none()
    {
        // An unlock that was dropped before its first poll did nothing; the background finishes any
        // other.
        expected(lock.unlock().await);
    }
}

async fn reenter(dropper: &mut Dropper, lock: &ReentrantLock) {
    let outer = dropper.run(lock.lock()).await.and_then(expected);
    let inner = dropper
        .run(lock.try_lock())
        .await
        .and_then(expected)
        .flatten();
    let mut guards: Vec<LockGuard> = outer.into_iter().chain(inner).collect();
    if dropper.random.random() {
        guards.reverse();
    }
    for guard in guards {
        dropper.run(guard.unlock()).await.and_then(expected);
    }
}

fn runtime() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

/// Drops so many futures on that many locks, and checks that they leave nothing.
fn drop_futures(drops: usize, locks: usize, mut inject_faults: impl FnMut(&mut Connection)) {
    let seed: u64 =
        env::var("CANCELLATION_SEED").map_or_else(|_| rand::random(), |seed| seed.parse().unwrap());
    println!("CANCELLATION_SEED={seed}");
    let server = Server::start();
    let mut redis = server.connection();
    // The client has a runtime of its own, so that its tasks can be counted.
    let (client_runtime, other_runtime) = (runtime(), runtime());
    let alive = || client_runtime.metrics().num_alive_tasks();
    // The retries last longer than the faults, so that no operation fails.
    let builder = LockClient::builder()
        .watchdog_timeout(WATCHDOG)
        .retry_timeout(6 * SOON);
    let client = client_runtime
        .block_on(builder.connect(&server.url()))
        .unwrap();
    let names: Vec<_> = (0..locks).map(|_| unique("stock")).collect();
    client_runtime
        .block_on(client.lock(&names[0]).run(async {}))
        .unwrap();
    let idle_tasks = alive();

    let begun = Instant::now();
    let finished = Arc::new(AtomicUsize::new(0));
    let all: Arc<Vec<_>> = Arc::new(names.iter().map(|name| client.lock(name)).collect());
    let tasks: Vec<_> = (0..TASKS as u64)
        .map(|task| {
            let random = StdRng::seed_from_u64(seed.wrapping_add(task));
            let mut dropper = Dropper {
                random,
                dropped: 0,
                finished: Arc::clone(&finished),
            };
            let locks = Arc::clone(&all);
            client_runtime.spawn(async move {
                while dropper.dropped <= drops / TASKS {
                    let lock = &locks[dropper.random.random_range(0..locks.len())];
                    operate(&mut dropper, lock).await;
                }
            })
        })
        .collect();
    while tasks.iter().any(|task| !task.is_finished()) {
        assert!(begun.elapsed() < 6 * SOON, "a task hangs");
        inject_faults(&mut redis);
        std::thread::sleep(Duration::from_millis(10));
    }
    tasks
        .into_iter()
        .for_each(|task| client_runtime.block_on(task).unwrap());
    let finished = finished.load(Ordering::Relaxed);
    println!(
        "{drops} dropped and {finished} finished on {locks} locks in {:?}",
        begun.elapsed()
    );
    assert!(
        finished > drops / 100,
        "too few futures finished: {finished}"
    );

    wait_until_idle(&mut redis);
    wait_until("no key is left", SOON, || keys(&mut redis) == 0);
    wait_until("no subscription is left", SOON, || {
        channels(&mut redis) == 0
    });
    wait_until("no task is left", SOON, || alive() == idle_tasks);
    assert_no_key_expired(&mut redis);
    // A lock that is still renewed would be renewed within this time.
    let (before, begun) = (scripts(&mut redis), Instant::now());
    while begun.elapsed() < WATCHDOG / 3 + Duration::from_millis(500) {
        assert_eq!(
            scripts(&mut redis),
            before,
            "the client still sends scripts"
        );
        assert_eq!(alive(), idle_tasks);
        std::thread::sleep(Duration::from_millis(20));
    }
    other_runtime.block_on(async {
        let other = LockClient::connect(&server.url()).await.unwrap();
        for name in &names {
            let guard = other
                .lock(name)
                .try_lock()
                .await
                .unwrap()
                .expect("the lock is free");
            guard.unlock().await.unwrap();
        }
    });
    client_runtime.block_on(client.shutdown()).unwrap();
    wait_until("no task outlives the client", SOON, || alive() == 0);
}

#[test]
fn dropped_futures_on_one_lock_leave_nothing() {
    drop_futures(DROPS, 1, |_| {});
}

#[test]
fn dropped_futures_on_many_locks_leave_nothing() {
    drop_futures(DROPS, 128, |_| {});
}

#[test]
fn dropped_futures_during_connection_losses_leave_nothing() {
    let mut times = 0;
    drop_futures(DROPS / 2, 16, |redis| {
        times += 1;
        // Seldom enough for a busy machine to connect again in between.
        match times % 48 {
            8 => cmd("CLIENT")
                .arg(&["KILL", "TYPE", "normal"])
                .exec(redis)
                .unwrap(),
            16 | 32 => cmd("CLIENT")
                .arg(&["KILL", "TYPE", "pubsub"])
                .exec(redis)
                .unwrap(),
            24 | 40 => cmd("SCRIPT").arg("FLUSH").exec(redis).unwrap(),
            _ => {}
        }
    });
    assert!(times > 24, "too few faults: {times}");
}

#[tokio::test(flavor = "multi_thread")]
async fn future_dropped_before_first_poll_sends_nothing() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = quiet().connect(&server.url()).await.unwrap();
    let (lock, held) = (client.lock(unique("free")), client.lock(unique("held")));
    let guard = held.lock().await.unwrap();
    let owner = Owner::new();
    let detached = client.lock(unique("detached"));
    let _ = detached.lock().with_owner(owner).await.unwrap().detach();

    // The server runs the calls of one connection in order: after the reply to this one, all
    // earlier calls have run.
    let probe = client.lock(unique("probe"));
    let start = calls(&mut redis);
    assert!(!probe.is_locked().await.unwrap());
    let one = calls(&mut redis);
    let connected = connections(&mut redis);
    for lock in [&lock, &held] {
        drop((
            lock.lock(),
            lock.lock().timeout(SOON),
            lock.lock().lease(SOON),
        ));
        drop((
            lock.try_lock(),
            lock.try_lock_for(SOON),
            lock.try_lock().lease(SOON),
        ));
        drop((
            lock.run(async { panic!("it ran") }),
            lock.lock().timeout(SOON).run(async { panic!("it ran") }),
        ));
        drop((
            lock.is_locked(),
            hold_count(lock),
            hold_count(lock),
            ttl(lock),
            lock.inspect(),
        ));
        drop((
            lock.force_unlock(),
            lock.unlock(),
            lock.lock().with_owner(guard.owner()),
        ));
    }
    drop(detached.unlock().with_owner(owner));
    drop((guard.lost(), guard.run(async { panic!("it ran") })));
    drop(Owner::scope(lock.run(async { panic!("it ran") })));
    drop((
        client.shutdown(),
        LockClient::connect(&server.url()),
        quiet().connect(&server.url()),
    ));
    assert!(!probe.is_locked().await.unwrap());
    // Time for the background to send something.
    sleep(Duration::from_millis(200)).await;
    let two = calls(&mut redis);
    for (command, count) in &two {
        let before = |calls: &BTreeMap<String, i64>| calls.get(command).copied().unwrap_or(0);
        assert_eq!(
            count - before(&one),
            before(&one) - before(&start),
            "{command}"
        );
    }
    assert_eq!(connections(&mut redis), connected);
    assert!(!guard.is_lost());
    detached.unlock().with_owner(owner).await.unwrap();
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn future_dropped_after_one_poll_leaves_nothing() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = quiet().connect(&server.url()).await.unwrap();
    let other = quiet().connect(&server.url()).await.unwrap();
    let probe = client.lock(unique("probe"));
    type Begin = fn(ReentrantLock) -> BoxFuture<'static, ()>;
    let kinds: [(&str, Begin); 12] = [
        ("lock", |lock| lock.lock().into_future().map(drop).boxed()),
        ("wait", |lock| {
            lock.lock().timeout(SOON).into_future().map(drop).boxed()
        }),
        ("lease", |lock| {
            lock.lock().lease(LEASE).into_future().map(drop).boxed()
        }),
        ("try_lock", |lock| {
            lock.try_lock().into_future().map(drop).boxed()
        }),
        ("try_lock and wait", |lock| {
            lock.try_lock_for(SOON).into_future().map(drop).boxed()
        }),
        ("run", |lock| lock.run(async {}).map(drop).boxed()),
        ("scope", |lock| {
            Owner::scope(lock.lock().into_future()).map(drop).boxed()
        }),
        ("is_locked", |lock| {
            async move { drop(lock.is_locked().await) }.boxed()
        }),
        ("ttl", |lock| async move { drop(ttl(&lock).await) }.boxed()),
        ("inspect", |lock| {
            async move { drop(lock.inspect().await) }.boxed()
        }),
        ("hold_count", |lock| {
            Owner::scope(async move { drop(hold_count(&lock).await) }).boxed()
        }),
        ("unlock", |lock| {
            Owner::scope(async move { drop(lock.unlock().await) }).boxed()
        }),
    ];
    for (kind, begin) in kinds {
        for held in [false, true] {
            let lock = client.lock(unique("stock"));
            let theirs = other.lock(lock.name());
            let guard = if held {
                Some(theirs.lock().await.unwrap())
            } else {
                None
            };
            let mut future = begin(lock);
            let _ = poll!(&mut future);
            drop(future);
            // The server answers this call after it has run those of the dropped future.
            assert!(!probe.is_locked().await.unwrap());
            wait_until(kind, SOON, || {
                channels(&mut redis) == 0 && keys(&mut redis) == usize::from(held)
            });
            match guard {
                None => theirs
                    .try_lock()
                    .await
                    .unwrap()
                    .expect("the lock is free")
                    .unlock()
                    .await
                    .unwrap(),
                Some(guard) => guard.unlock().await.unwrap(),
            }
            // A waiter that replaced the dropped one would hold the lock by now.
            wait_until(kind, SOON, || keys(&mut redis) == 0);
        }
    }
    assert_no_key_expired(&mut redis);
}

#[tokio::test(flavor = "multi_thread")]
async fn release_dropped_after_one_poll_is_finished() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = quiet().connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    for _ in 0..50 {
        let mut unlock = Box::pin(lock.lock().await.unwrap().unlock());
        let _ = poll!(&mut unlock);
        drop(unlock);
        wait_until("the guard's hold is released", SOON, || {
            keys(&mut redis) == 0
        });

        Owner::scope(async {
            let _ = lock.lock().await.unwrap().detach();
            let mut unlock = Box::pin(lock.unlock());
            let _ = poll!(&mut unlock);
            drop(unlock);
            wait_until("the detached hold is released", SOON, || {
                keys(&mut redis) == 0
            });
            assert!(matches!(lock.unlock().await, Err(Error::NotHeld { .. })));
        })
        .await;

        let guard = lock.lock().await.unwrap();
        let mut forced = Box::pin(lock.force_unlock());
        let _ = poll!(&mut forced);
        drop(forced);
        // A force unlock reads the owner, then notifies it, then frees the lock.
        assert!(
            guard.is_lost() || keys(&mut redis) == 1,
            "the owner is notified before another owner can acquire"
        );
        // If the force unlock is not finished, the release of the guard frees the lock.
        drop(guard);
        wait_until("the lock is freed, by force or by the guard", SOON, || {
            keys(&mut redis) == 0
        });
    }
    let mut shutdown = Box::pin(client.shutdown());
    let _ = poll!(&mut shutdown);
    drop(shutdown);
    assert!(matches!(lock.lock().await, Err(Error::Closed)));
    timeout(SOON, client.shutdown())
        .await
        .expect("the shutdown hangs")
        .unwrap();
    wait_until("no connection is left", SOON, || {
        connections(&mut redis) == 1
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_connect_closes_its_connections() {
    let server = Server::start();
    let mut redis = server.connection();
    let url = server.url();
    let tasks = tokio::runtime::Handle::current().metrics();
    let tasks_before = tasks.num_alive_tasks();
    for round in 0..300 {
        let mut connecting = Box::pin(LockClient::connect(&url));
        // On a busy machine the other threads may finish everything within one poll.
        let Poll::Pending = poll!(&mut connecting) else {
            continue;
        };
        // Dropped before, between and after its connections are open.
        let _ = timeout(Duration::from_micros(30) * round, connecting).await;
    }
    // Both at the same time: without a task no connection is opened later.
    wait_until("no task and no connection is left", SOON, || {
        tasks.num_alive_tasks() == tasks_before && connections(&mut redis) == 1
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn release_of_dropped_grant_keeps_owners_next_hold() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = quiet().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let lock = client.lock(&name);
    for round in 0..200 {
        Owner::scope(async {
            let mut pending = lock.lock().into_future();
            let _ = poll!(&mut pending);
            for _ in 0..round % 8 {
                yield_now().await;
            }
            drop(pending);
            let guard = timeout(SOON, lock.lock())
                .await
                .expect("the acquire hangs")
                .unwrap();
            let holds = |redis: &mut Connection| -> Vec<i64> {
                cmd("HVALS").arg(&name).query(redis).unwrap()
            };
            // The release of the dropped grant runs before or after this, and keeps this hold.
            wait_until("one hold is left", SOON, || {
                let now = holds(&mut redis);
                assert!(now == [1] || now == [2], "{now:?}");
                now == [1]
            });
            guard.unlock().await.unwrap();
            assert_eq!(keys(&mut redis), 0);
        })
        .await;
    }
}
