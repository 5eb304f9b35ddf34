//! Several processes that share one lock, and one that is killed while it holds the lock.

use std::time::{Duration, Instant};

use crate::support::observe::patient_connection;
use crate::support::process::{self, Worker, setting};
use crate::support::server::{Server, unique, wait_until};
use redisson_lock::LockClient;
use tokio::time::timeout;

const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn counter_of_eight_processes_under_lock_is_exact() {
    const PROCESSES: usize = 8;
    const TOTAL: usize = 4_000;
    let server = Server::shared_or_start();
    let mut redis = server.connection();
    let (lock, counter, rounds) = (
        unique("stock"),
        unique("counter"),
        (TOTAL / PROCESSES).to_string(),
    );
    let settings = [
        ("URL", &*server.url()),
        ("LOCK", &lock),
        ("COUNTER", &counter),
        ("ROUNDS", &rounds),
    ];
    let mut workers: Vec<_> = (0..PROCESSES)
        .map(|_| Worker::start("processes::worker_process", "count", &settings))
        .collect();
    // However long it takes, as long as it is counted.
    let mut counted = (None, Instant::now());
    while !workers.is_empty() {
        workers.retain_mut(|worker| match worker.status() {
            None => true,
            Some(status) => {
                assert!(status.success());
                false
            }
        });
        let count: Option<usize> = redis::cmd("GET").arg(&counter).query(&mut redis).unwrap();
        if count != counted.0 {
            counted = (count, Instant::now());
        }
        assert!(counted.1.elapsed() < LIMIT, "nothing is counted any more");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(
        redis::cmd("GETDEL").arg(&counter).query(&mut redis),
        Ok(TOTAL)
    );
    assert_eq!(redis::cmd("EXISTS").arg(&lock).query(&mut redis), Ok(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn lock_of_killed_owner_is_free_within_its_lease() {
    const LEASE: Duration = Duration::from_millis(2_000);
    let server = Server::shared_or_start();
    let mut redis = server.connection();
    let (lock, counter) = (unique("stock"), unique("counter"));
    let lease = LEASE.as_millis().to_string();
    let settings = [
        ("URL", &*server.url()),
        ("LOCK", &lock),
        ("COUNTER", &counter),
        ("LEASE", &lease),
    ];
    let owner = Worker::start("processes::worker_process", "hold", &settings);
    wait_until("the worker holds the lock", LIMIT, || {
        redis::cmd("EXISTS").arg(&counter).query(&mut redis) == Ok(1)
    });
    // No re-check is due: the waiter has to wake when the lease expires.
    let client = LockClient::builder()
        .recheck_interval(10 * LIMIT)
        .connect(&server.url())
        .await
        .unwrap();
    let waiter = tokio::spawn({
        let lock = client.lock(&lock);
        async move { lock.lock().await.unwrap() }
    });
    wait_until("the waiter has subscribed", LIMIT, || {
        let channel = format!("redisson_lock__channel:{{{lock}}}");
        redis::cmd("PUBSUB")
            .arg("NUMSUB")
            .arg(&channel)
            .query(&mut redis)
            == Ok((channel, 1))
    });
    // A renewed lock is held beyond its first lease.
    let begun = Instant::now();
    wait_until("the first lease has passed", LIMIT, || {
        begun.elapsed() > LEASE
    });
    assert!(!waiter.is_finished(), "two owners hold the lock at once");
    let killed = Instant::now();
    owner.kill();
    let guard = timeout(LIMIT, waiter)
        .await
        .expect("the waiter did not acquire the lock")
        .unwrap();
    assert!(
        killed.elapsed() < LEASE + Duration::from_secs(5),
        "{:?}",
        killed.elapsed()
    );
    guard.unlock().await.unwrap();
    redis::cmd("DEL").arg(&counter).exec(&mut redis).unwrap();
}

/// Increments a counter by a read and a write, which only the lock makes atomic, or holds the lock
/// until it is killed.
#[tokio::test]
async fn worker_process() {
    let Some(role) = process::role() else { return };
    let mut redis = patient_connection(&setting("URL")).await;
    let counter = setting("COUNTER");
    match &*role {
        "count" => {
            let client = LockClient::connect(&setting("URL")).await.unwrap();
            let lock = client.lock(setting("LOCK"));
            for _ in 0..setting("ROUNDS").parse().unwrap() {
                let guard = lock.lock().await.unwrap();
                let before: Option<u64> = redis::cmd("GET")
                    .arg(&counter)
                    .query_async(&mut redis)
                    .await
                    .unwrap();
                let after = before.unwrap_or(0) + 1;
                redis::cmd("SET")
                    .arg(&counter)
                    .arg(after)
                    .exec_async(&mut redis)
                    .await
                    .unwrap();
                guard.unlock().await.unwrap();
            }
            client.shutdown().await.unwrap();
        }
        "hold" => {
            let lease = Duration::from_millis(setting("LEASE").parse().unwrap());
            let client = LockClient::builder()
                .watchdog_timeout(lease)
                .connect(&setting("URL"))
                .await
                .unwrap();
            let guard = client.lock(setting("LOCK")).lock().await.unwrap();
            redis::cmd("SET")
                .arg(&counter)
                .arg(1)
                .exec_async(&mut redis)
                .await
                .unwrap();
            let reason = guard.lost().await;
            panic!("the lock was lost: {reason}");
        }
        other => panic!("no such role: {other}"),
    }
}
