//! What an independent connection sees of a lock and of its server, and what a guard's owner hears.

// Every test binary includes this module and uses a part of it.
#![allow(dead_code)]

use std::collections::HashMap;
use std::fmt::Debug;
use std::pin::Pin;
use std::time::{Duration, Instant};

use futures::{FutureExt, poll};
use redis::{Connection, cmd};
use redisson_lock::{Error, LockClient, LockGuard, LostReason, Owner, ReentrantLock};
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// Who holds the lock: owner fields and hold counts.
pub fn owner_counts(redis: &mut Connection, lock: &str) -> HashMap<String, i64> {
    cmd("HGETALL").arg(lock).query(redis).unwrap()
}

/// The field of this owner.
pub fn owner_field(client: &LockClient, owner: Owner) -> String {
    format!("{}:{owner}", client.client_id())
}

pub fn exists(redis: &mut Connection, lock: &str) -> bool {
    cmd("EXISTS").arg(lock).query(redis).unwrap()
}

/// As Redis tells it: -2 without a key, -1 without an expiry.
pub fn pttl(redis: &mut Connection, lock: &str) -> i64 {
    cmd("PTTL").arg(lock).query(redis).unwrap()
}

/// How many channels are subscribed.
pub fn channels(redis: &mut Connection) -> usize {
    cmd("PUBSUB")
        .arg("CHANNELS")
        .query::<Vec<String>>(redis)
        .unwrap()
        .len()
}

/// How many connections listen for the lock.
pub fn subscribers(redis: &mut Connection, lock: &str) -> usize {
    let channel = format!("redisson_lock__channel:{{{lock}}}");
    cmd("PUBSUB")
        .arg("NUMSUB")
        .arg(channel)
        .query::<(String, usize)>(redis)
        .unwrap()
        .1
}

/// Connections to the server, the one that asks among them.
pub fn connections(redis: &mut Connection) -> usize {
    cmd("CLIENT")
        .arg("LIST")
        .query::<String>(redis)
        .unwrap()
        .lines()
        .count()
}

/// A number from `INFO`: the field of the line that begins so. 0 where it is not told.
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

/// How many scripts have been run.
pub fn scripts(redis: &mut Connection) -> u64 {
    info(redis, "commandstats", "cmdstat_evalsha:", "calls=")
}

/// How many keys have been removed by their expiry.
pub fn expired(redis: &mut Connection) -> u64 {
    info(redis, "stats", "expired_keys:", "")
}

/// The SHA-1 by which a script is called.
pub fn sha1_of(script: &str) -> &'static str {
    let mut lines = include_str!("../../lua/v1/CHECKSUMS").lines();
    let line = lines.find(|line| line.ends_with(&format!("  {script}.lua")));
    line.and_then(|line| line.split(' ').next())
        .unwrap_or_else(|| panic!("no script {script}"))
}

/// Notes when and how the lock is lost. On a thread of its own, which a busy runtime does not hold
/// up.
pub fn watch(guard: &LockGuard) -> oneshot::Receiver<(Instant, LostReason)> {
    let lost = guard.lost();
    let (tell, told) = oneshot::channel();
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    std::thread::spawn(move || {
        let reason = runtime.block_on(lost);
        // Who asked may have gone away.
        let _ = tell.send((Instant::now(), reason));
    });
    told
}

/// Begins a future, and leaves it where it stands. For tests on one thread, where no answer can
/// come within the one poll.
#[track_caller]
pub fn park<F: IntoFuture<Output: Debug>>(future: F) -> Pin<Box<F::IntoFuture>> {
    let mut parked = Box::pin(future.into_future());
    let told = (&mut parked).now_or_never();
    assert!(told.is_none(), "it had nothing to wait for: {told:?}");
    parked
}

/// Polls the waiters until one of them sleeps, listening for the lock; then it leaves them alone.
pub async fn poll_to_sleep<W: Future + Unpin>(
    redis: &mut Connection,
    lock: &str,
    waiters: &mut [W],
) {
    let begun = Instant::now();
    while subscribers(redis, lock) == 0 {
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "nobody ever slept"
        );
        for waiter in &mut *waiters {
            assert!(poll!(waiter).is_pending());
        }
        sleep(Duration::from_millis(5)).await;
    }
}

/// Waits for the lock, and notes when it got it.
pub fn rival(client: &LockClient, lock: &str) -> JoinHandle<(Instant, LockGuard)> {
    let lock = client.lock(lock);
    tokio::spawn(async move {
        let guard = lock.lock().await.unwrap();
        (Instant::now(), guard)
    })
}

/// How many holds the owner of the surrounding scope has, by the server's record; 0 outside a scope.
pub async fn hold_count(lock: &ReentrantLock) -> Result<u64, Error> {
    match Owner::current() {
        Some(owner) => lock.hold_count_of(owner).await,
        None => Ok(0),
    }
}

/// How long the server keeps the lock.
pub async fn ttl(lock: &ReentrantLock) -> Result<Option<Duration>, Error> {
    let info = lock.inspect().await?;
    Ok(info.map(|info| info.ttl.unwrap_or(Duration::MAX)))
}
