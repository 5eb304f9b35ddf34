//! Many tasks on a few locks, while the script cache is flushed or connections are killed again and
//! again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::support::observe::{channels, info, scripts};
use crate::support::proxy::Proxy;
use crate::support::server::{Patience, Server, unique, wait_until};
use redisson_lock::LockClient;
use tokio::time::{sleep, timeout};

/// Far longer than any step takes, far shorter than the leases in these tests.
const SOON: Duration = Duration::from_secs(10);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[tokio::test(flavor = "multi_thread")]
async fn flushed_scripts_are_sent_again() {
    let server = Server::start();
    under_load(&server, |redis| {
        redis::cmd("SCRIPT").arg("FLUSH").exec(redis).unwrap();
        std::thread::sleep(ms(2));
    })
    .await;
    let full_scripts = info(
        &mut server.connection(),
        "commandstats",
        "cmdstat_eval:",
        "calls=",
    );
    assert!(full_scripts > 0, "no script was missing");
}

#[tokio::test(flavor = "multi_thread")]
async fn repeatedly_killed_connections_keep_counts_exact() {
    let server = Server::start();
    under_load(&server, |redis| {
        redis::cmd("CLIENT")
            .arg(&["KILL", "TYPE", "normal"])
            .exec(redis)
            .unwrap();
        std::thread::sleep(ms(20));
    })
    .await;
}

/// A busy server accepts a connection and refuses every command on it. The client has to back off
/// between its attempts to connect.
#[tokio::test(flavor = "multi_thread")]
async fn busy_server_receives_few_connections() {
    let server = Server::start();
    let mut redis = server.connection();
    redis::cmd("CONFIG")
        .arg(&["SET", "lua-time-limit", "50"])
        .exec(&mut redis)
        .unwrap();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    let mut stuck = server.connection();
    let script = std::thread::spawn(move || {
        redis::cmd("EVAL")
            .arg("while true do end")
            .arg(0)
            .exec(&mut stuck)
    });
    wait_until("the server is busy", SOON, || {
        redis::cmd("PING")
            .exec(&mut redis)
            .is_err_and(|error| error.code() == Some("BUSY"))
    });
    proxy.close_now();
    sleep(ms(4_000)).await;
    redis::cmd("SCRIPT").arg("KILL").exec(&mut redis).unwrap();
    script.join().unwrap().unwrap_err();
    let received = info(&mut redis, "stats", "total_connections_received:", "");
    assert!(received < 100, "{received} connections in 4 s");
    assert_eq!(client.lock(unique("stock")).is_locked().await, Ok(false));
}

/// 50 tasks lock and unlock 5 locks, 1000 times or more in all, while a thread causes a fault again
/// and again: the next one when something was done since the last one, however long that takes.
async fn under_load(
    server: &Server,
    mut cause_fault: impl FnMut(&mut redis::Connection) + Send + 'static,
) {
    const TASKS: usize = 50;
    const ROUNDS: u64 = 20;
    const FAULTS: u64 = 10;
    let client = LockClient::builder()
        .recheck_interval(ms(200))
        .connect(&server.url())
        .await
        .unwrap();
    let locks: Arc<Vec<_>> = Arc::new(
        (0..5)
            .map(|_| {
                (
                    client.lock(unique("stock")),
                    AtomicBool::new(false),
                    AtomicU64::new(0),
                )
            })
            .collect(),
    );
    let stop = Arc::new(AtomicBool::new(false));
    let (done, faults) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
    let fault_thread = std::thread::spawn({
        let (mut redis, stop) = (server.connection(), Arc::clone(&stop));
        let (done, faults) = (Arc::clone(&done), Arc::clone(&faults));
        move || {
            while !stop.load(Ordering::Acquire) {
                let before = done.load(Ordering::Acquire);
                cause_fault(&mut redis);
                faults.fetch_add(1, Ordering::Release);
                while done.load(Ordering::Acquire) == before && !stop.load(Ordering::Acquire) {
                    std::thread::sleep(ms(1));
                }
            }
        }
    });
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let (locks, done) = (Arc::clone(&locks), Arc::clone(&done));
            let faults = Arc::clone(&faults);
            tokio::spawn(async move {
                let (lock, occupied, count) = &locks[task % locks.len()];
                let mut rounds = 0;
                while rounds < ROUNDS || faults.load(Ordering::Acquire) < FAULTS {
                    rounds += 1;
                    let guard = lock.lock().await.unwrap();
                    assert!(
                        !occupied.swap(true, Ordering::AcqRel),
                        "two tasks hold the lock at once"
                    );
                    let before = count.load(Ordering::Acquire);
                    tokio::task::yield_now().await;
                    count.store(before + 1, Ordering::Release);
                    assert!(occupied.swap(false, Ordering::AcqRel));
                    guard.unlock().await.unwrap();
                    done.fetch_add(1, Ordering::Release);
                }
            })
        })
        .collect();
    for task in tasks {
        timeout(6 * SOON, task)
            .await
            .expect("a task hangs")
            .unwrap();
    }
    stop.store(true, Ordering::Release);
    fault_thread.join().unwrap();
    let counted: u64 = locks
        .iter()
        .map(|(_, _, count)| count.load(Ordering::Acquire))
        .sum();
    assert_eq!(counted, done.load(Ordering::Acquire));
    assert!(counted >= TASKS as u64 * ROUNDS);
    let mut redis = server.connection();
    wait_until("no key is left", SOON, || {
        redis::cmd("DBSIZE").query(&mut redis) == Ok(0)
    });
    wait_until("no subscription is left", SOON, || {
        channels(&mut redis) == 0
    });
}

/// With confirmed subscriptions a message comes, so nothing has to be asked for a while.
#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_idle_waited_for_locks_cost_few_script_calls() {
    const LOCKS: usize = 10_000;
    let server = Server::start();
    let mut redis = server.connection();
    let patient = || {
        let builder = LockClient::builder().watchdog_timeout(Duration::from_secs(120));
        builder.command_timeout(Duration::from_secs(30))
    };
    let owner = patient().connect(&server.url()).await.unwrap();
    let client = patient().connect(&server.url()).await.unwrap();
    let lease = Duration::from_secs(3600);
    let (mut guards, mut waiters) = (Vec::new(), Vec::new());
    // Some at a time: a busy machine answers as many within the command timeout.
    for batch in (0..LOCKS).collect::<Vec<_>>().chunks(500) {
        let names: Vec<_> = batch.iter().map(|n| format!("stock:{n}")).collect();
        let locking = names
            .iter()
            .map(|name| owner.lock(name).lock().lease(lease));
        let locked = futures::future::try_join_all(locking.map(IntoFuture::into_future));
        guards.extend(locked.await.unwrap());
        let requests = names.iter().map(|name| client.lock(name).lock());
        waiters.extend(requests.map(|request| tokio::spawn(request.into_future())));
        let (mut subscribed, mut patience) = (0, Patience::new(SOON));
        while subscribed < waiters.len() {
            let now = channels(&mut redis);
            if now != subscribed {
                (subscribed, patience) = (now, Patience::new(SOON));
            }
            let ended = waiters.iter().filter(|waiter| waiter.is_finished()).count();
            assert!(
                patience.is_left(),
                "{subscribed} of {} are subscribed, {ended} have ended: {:?}",
                waiters.len(),
                client.stats()
            );
            sleep(ms(5)).await;
        }
    }
    // Each confirmation is followed by one attempt, and those that were subscribed while there were
    // few look once more: then it is quiet.
    let mut calls = Vec::new();
    while calls.last().is_none_or(|calls| *calls > 400) {
        assert!(calls.len() < 20, "script calls in 3 s each: {calls:?}");
        let before = scripts(&mut redis);
        sleep(ms(3_000)).await;
        calls.push(scripts(&mut redis) - before);
    }
    // They are no less awake for it.
    drop(guards);
    for waiter in waiters {
        let granted = timeout(6 * SOON, waiter).await;
        drop(granted.expect("a grant").unwrap().unwrap());
    }
}
