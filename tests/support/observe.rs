//! Observation of a lock and its server by an independent connection, and of guards by their
//! losses.

// Each test binary includes this module and uses a part of it.
#![allow(dead_code)]

use std::collections::HashMap;
use std::fmt::Debug;
use std::pin::Pin;
use std::time::{Duration, Instant};

use futures::{FutureExt, poll};
use redis::{Connection, cmd};
use redisson_lock::{Error, LockClient, LockGuard, LockKind, LostReason, Owner, ReentrantLock};
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// The owner fields of the lock with their hold counts.
pub fn owner_counts(redis: &mut Connection, lock: &str) -> HashMap<String, i64> {
    cmd("HGETALL").arg(lock).query(redis).unwrap()
}

/// The field of an owner in the hash of a lock.
pub fn owner_field(client: &LockClient, owner: Owner) -> String {
    format!("{}:{owner}", client.client_id())
}

pub fn exists(redis: &mut Connection, lock: &str) -> bool {
    cmd("EXISTS").arg(lock).query(redis).unwrap()
}

/// The reply to `PTTL`, in ms: -2 without a key, -1 without an expiry.
pub fn pttl(redis: &mut Connection, lock: &str) -> i64 {
    cmd("PTTL").arg(lock).query(redis).unwrap()
}

/// The number of channels with a subscription.
pub fn channels(redis: &mut Connection) -> usize {
    cmd("PUBSUB")
        .arg("CHANNELS")
        .query::<Vec<String>>(redis)
        .unwrap()
        .len()
}

/// The number of connections that have subscribed to the lock's release channel.
pub fn subscribers(redis: &mut Connection, lock: &str) -> usize {
    let channel = format!("redisson_lock__channel:{{{lock}}}");
    cmd("PUBSUB")
        .arg("NUMSUB")
        .arg(channel)
        .query::<(String, usize)>(redis)
        .unwrap()
        .1
}

/// The number of connections to the server, including this one.
pub fn connections(redis: &mut Connection) -> usize {
    cmd("CLIENT")
        .arg("LIST")
        .query::<String>(redis)
        .unwrap()
        .lines()
        .count()
}

/// A number from `INFO`: the field with this name in the line with this prefix; 0 if it is missing.
pub fn info(redis: &mut Connection, section: &str, prefix: &str, field: &str) -> u64 {
    let info: String = cmd("INFO").arg(section).query(redis).unwrap();
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix(prefix))
        .unwrap_or_default();
    let number = line
        .split(',')
        .find_map(|pair| pair.strip_prefix(field))
        .unwrap_or("0");
    number.trim().parse().unwrap()
}

/// The number of scripts that the server has run by their SHA-1.
pub fn scripts(redis: &mut Connection) -> u64 {
    info(redis, "commandstats", "cmdstat_evalsha:", "calls=")
}

/// The number of keys that have expired.
pub fn expired(redis: &mut Connection) -> u64 {
    info(redis, "stats", "expired_keys:", "")
}

/// The SHA-1 of a script.
pub fn sha1_of(script: &str) -> &'static str {
    let mut lines = include_str!("../../lua/v1/CHECKSUMS").lines();
    let line = lines.find(|line| line.ends_with(&format!("  {script}.lua")));
    line.and_then(|line| line.split(' ').next())
        .unwrap_or_else(|| panic!("no script {script}"))
}

/// Records when and why the lock is lost. Runs on a thread of its own, so that a busy runtime does
/// not delay it.
pub fn watch<K: LockKind>(guard: &LockGuard<K>) -> oneshot::Receiver<(Instant, LostReason)> {
    let lost = guard.lost();
    let (report, reported) = oneshot::channel();
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    std::thread::spawn(move || {
        let reason = runtime.block_on(lost);
        // The test may have dropped the receiver.
        let _ = report.send((Instant::now(), reason));
    });
    reported
}

/// Polls a future once, and returns it pending. For tests on one thread, where no reply arrives
/// during the poll.
#[track_caller]
pub fn park<F: IntoFuture<Output: Debug>>(future: F) -> Pin<Box<F::IntoFuture>> {
    let mut parked = Box::pin(future.into_future());
    let output = (&mut parked).now_or_never();
    assert!(
        output.is_none(),
        "the future completed at its first poll: {output:?}"
    );
    parked
}

/// Polls the waiters until one of them has subscribed to the lock's release channel. Does not poll
/// them after that.
pub async fn poll_to_sleep<W: Future + Unpin>(
    redis: &mut Connection,
    lock: &str,
    waiters: &mut [W],
) {
    let begun = Instant::now();
    while subscribers(redis, lock) == 0 {
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "no waiter has subscribed"
        );
        for waiter in &mut *waiters {
            assert!(poll!(waiter).is_pending());
        }
        sleep(Duration::from_millis(5)).await;
    }
}

/// Spawns a task that waits for the lock and returns when the lock was granted, with the guard.
pub fn rival(client: &LockClient, lock: &str) -> JoinHandle<(Instant, LockGuard)> {
    let lock = client.lock(lock);
    tokio::spawn(async move {
        let guard = lock.lock().await.unwrap();
        (Instant::now(), guard)
    })
}

/// The hold count of the surrounding scope's owner on the server; 0 outside any scope.
pub async fn hold_count(lock: &ReentrantLock) -> Result<u64, Error> {
    match Owner::current() {
        Some(owner) => lock.hold_count_of(owner).await,
        None => Ok(0),
    }
}

/// The time to live of the lock; `None` if it is free.
pub async fn ttl(lock: &ReentrantLock) -> Result<Option<Duration>, Error> {
    let info = lock.inspect().await?;
    Ok(info.map(|info| info.ttl.unwrap_or(Duration::MAX)))
}

/// A connection that waits long for its replies: the machine may be busy. (The default is 500 ms.)
pub async fn patient_connection(url: &str) -> redis::aio::MultiplexedConnection {
    const LIMIT: Duration = Duration::from_secs(60);
    let config = redis::AsyncConnectionConfig::new()
        .set_connection_timeout(Some(LIMIT))
        .set_response_timeout(Some(LIMIT));
    let client = redis::Client::open(url).unwrap();
    let connected = client.get_multiplexed_async_connection_with_config(&config);
    connected.await.unwrap()
}
