//! Requests that are polled once, kept, and not polled any more, as by a `select!` that is busy
//! with another branch: the background finishes what they began, and no other operation waits for
//! them.
//!
//! The tests run on one thread, so that no reply can arrive within the one poll.

use std::time::{Duration, Instant};

use crate::support::observe::{exists, owner_counts, park, pttl, scripts};
use crate::support::proxy::{Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until_async};
use futures::FutureExt;
use redisson_lock::{Error, LockClient, LockGuard, Owner, OwnerExt, ReentrantLock};
use tokio::time::{sleep, timeout};

const LIMIT: Duration = Duration::from_secs(20);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    wait_until_async(what, LIMIT, || std::future::ready(condition())).await;
}

async fn locked_by(lock: &ReentrantLock, owner: Owner) -> LockGuard {
    lock.lock().with_owner(owner).await.unwrap()
}

#[tokio::test]
async fn unlock_does_not_wait_for_unpolled_reentry() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .retry_timeout(ms(3000))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let owner = Owner::new();
    let guard = locked_by(&lock, owner).await;
    let unpolled = park(lock.lock().with_owner(owner));
    guard.unlock().await.expect("the server replies");
    // The background releases the hold that the re-entry was granted.
    let name = lock.name().to_owned();
    until("the lock is free", || !exists(&mut redis, &name)).await;
    // The request asks again when it is polled again.
    let late = timeout(LIMIT, unpolled)
        .await
        .expect("the request hangs")
        .unwrap();
    assert_eq!(
        owner_counts(&mut redis, &name)
            .into_values()
            .collect::<Vec<_>>(),
        [1]
    );
    late.unlock().await.unwrap();
    assert!(!exists(&mut redis, &name));
}

#[tokio::test]
async fn shutdown_does_not_wait_for_unpolled_reentry() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .command_timeout(ms(300))
        .retry_timeout(ms(30_000))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let owner = Owner::new();
    let guard = locked_by(&lock, owner).await;
    let unpolled = park(lock.lock().with_owner(owner));
    drop(guard);
    let began = Instant::now();
    client.shutdown().await.expect("the server replies");
    assert!(began.elapsed() < ms(10_000), "{:?}", began.elapsed());
    assert!(!exists(&mut redis, lock.name()));
    let result = timeout(LIMIT, unpolled).await.expect("the request hangs");
    assert!(
        matches!(result, Err(Error::Closed | Error::Lost { .. })),
        "{result:?}"
    );
}

#[tokio::test]
async fn grant_to_unpolled_request_is_released() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .command_timeout(ms(500))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    let mut unpolled = park(lock.lock());
    until("the request was granted", || exists(&mut redis, &name)).await;
    // Well before the lease of 30 s expires, and without another waiter in this process.
    let other = LockClient::connect(&server.url()).await.unwrap();
    let began = Instant::now();
    let guard = timeout(LIMIT, other.lock(&name).lock())
        .await
        .expect("an unpolled request kept the lock")
        .unwrap();
    assert!(began.elapsed() < ms(10_000), "{:?}", began.elapsed());
    assert!((&mut unpolled).now_or_never().is_none());
    guard.unlock().await.unwrap();
    timeout(LIMIT, unpolled)
        .await
        .expect("the request hangs")
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

/// The timeout of the request has passed, but the lock has no other owner. After its grant was
/// released the request asks again without a place in the wait queue: with a place it would wait
/// for the next re-check, long after its timeout.
#[tokio::test]
async fn unpolled_try_lock_on_free_lock_acquires_when_polled() {
    let server = Server::start();
    let mut redis = server.connection();
    let builder = LockClient::builder()
        .command_timeout(ms(200))
        .recheck_interval(ms(10_000));
    let client = builder.connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    for wait in [Duration::ZERO, ms(100)] {
        let unpolled = park(lock.try_lock_for(wait));
        until("the request was granted", || exists(&mut redis, &name)).await;
        until("the grant was released", || !exists(&mut redis, &name)).await;
        let result = timeout(LIMIT, unpolled)
            .await
            .expect("the request hangs")
            .unwrap();
        result
            .expect("the lock has no owner")
            .unlock()
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn dropped_unpolled_request_leaves_no_key() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .command_timeout(ms(200))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    for wait in [0, 150, 300, 450, 600, 1200] {
        let unpolled = park(lock.lock());
        until("the request was granted", || exists(&mut redis, &name)).await;
        // Dropped at different stages: before the background takes the request over, and before
        // and after it releases the grant.
        sleep(ms(wait)).await;
        drop(unpolled);
        until("the lock is free", || !exists(&mut redis, &name)).await;
    }
    client.shutdown().await.unwrap();
}

#[tokio::test]
async fn unpolled_unlock_blocks_no_other_operation() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .retry_timeout(ms(3000))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let owner = Owner::new();
    let guards = [
        locked_by(&lock, owner).await,
        locked_by(&lock, owner).await,
        locked_by(&lock, owner).await,
    ];
    let [first, second, third] = guards;
    let unpolled = park(first.unlock());
    second.unlock().await.expect("the server replies");
    let again = timeout(LIMIT, locked_by(&lock, owner))
        .await
        .expect("the acquire waits for an unpolled unlock");
    let name = lock.name().to_owned();
    assert_eq!(
        owner_counts(&mut redis, &name)
            .into_values()
            .collect::<Vec<_>>(),
        [2]
    );
    // The unlock returns its outcome whenever it is polled.
    unpolled.await.unwrap();
    again.unlock().await.unwrap();
    third.unlock().await.unwrap();
    assert!(!exists(&mut redis, &name));
}

#[tokio::test]
async fn unpolled_force_unlock_blocks_no_other_operation() {
    let server = Server::start();
    let client = LockClient::builder()
        .retry_timeout(ms(3000))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let owner = Owner::new();
    let guard = locked_by(&lock, owner).await;
    let mut forced = Box::pin(lock.force_unlock());
    // Polled only until it reports the loss: from then on the owner's operations are serialized
    // behind it.
    let lost = guard.lost();
    tokio::select! {
        biased;
        _ = lost => {}
        _ = &mut forced => panic!("the force unlock did not wait for a reply"),
    }
    assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
    let again = timeout(LIMIT, locked_by(&lock, owner))
        .await
        .expect("the acquire waits for an unpolled force unlock");
    assert!(forced.await.unwrap());
    assert!(!again.is_lost(), "its tenure began after the force unlock");
    again.unlock().await.unwrap();
}

/// A polled operation that takes long because of the network is neither released nor repeated.
#[tokio::test]
async fn slow_polled_reentry_runs_once_and_is_kept() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .command_timeout(ms(5000))
        .connect(&proxy.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    let owner = Owner::new();
    let guard = locked_by(&lock, owner).await;
    let before = scripts(&mut redis);
    proxy.set(Way::Replies, Flow::Delay(ms(400)));
    let reentries = (0..4).map(|_| tokio::spawn(lock.lock().with_owner(owner)));
    let guards: Vec<_> = futures::future::join_all(reentries).await;
    assert_eq!(
        owner_counts(&mut redis, &name)
            .into_values()
            .collect::<Vec<_>>(),
        [5]
    );
    proxy.set(Way::Replies, Flow::Pass);
    // Reading the count is no script.
    assert_eq!(
        scripts(&mut redis) - before,
        4,
        "each re-entry is one script"
    );
    assert!(pttl(&mut redis, &name) > 0);
    for reentry in guards {
        reentry.unwrap().unwrap().unlock().await.unwrap();
    }
    guard.unlock().await.unwrap();
    assert!(!exists(&mut redis, &name));
}
