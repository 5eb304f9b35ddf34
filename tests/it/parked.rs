//! Futures that are polled once, kept, and not polled any more: a `select!` that is busy with
//! another branch does that. What they have begun is finished without them, and nobody waits for
//! them.
//!
//! On one thread, so that no answer can come within the one poll.

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
async fn an_unlock_does_not_wait_for_a_parked_reentry() {
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
    let parked = park(lock.lock().with_owner(owner));
    guard.unlock().await.expect("the server is well");
    // What the re-entry was granted is given back, because nobody comes for it.
    let name = lock.name().to_owned();
    until("the lock is free", || !exists(&mut redis, &name)).await;
    // It asks again when it is polled again.
    let late = timeout(LIMIT, parked)
        .await
        .expect("it was forgotten")
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
async fn a_shutdown_does_not_wait_for_a_parked_reentry() {
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
    let parked = park(lock.lock().with_owner(owner));
    drop(guard);
    let began = Instant::now();
    client.shutdown().await.expect("the server is well");
    assert!(began.elapsed() < ms(10_000), "{:?}", began.elapsed());
    assert!(!exists(&mut redis, &lock.name()));
    let told = timeout(LIMIT, parked).await.expect("it was forgotten");
    assert!(
        matches!(told, Err(Error::Closed | Error::Lost { .. })),
        "{told:?}"
    );
}

#[tokio::test]
async fn a_lock_that_a_parked_request_was_granted_is_given_back() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .command_timeout(ms(500))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    let mut parked = park(lock.lock());
    until("it was granted", || exists(&mut redis, &name)).await;
    // Well before its lease of 30 s is over, and without anybody in this process who waits.
    let other = LockClient::connect(&server.url()).await.unwrap();
    let began = Instant::now();
    let guard = timeout(LIMIT, other.lock(&name).lock())
        .await
        .expect("a parked request kept the lock")
        .unwrap();
    assert!(began.elapsed() < ms(10_000), "{:?}", began.elapsed());
    assert!((&mut parked).now_or_never().is_none());
    guard.unlock().await.unwrap();
    timeout(LIMIT, parked)
        .await
        .expect("it was forgotten")
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

/// Its wait time is over, but nobody else has the lock. What was granted and given back is asked
/// for past the line: a place in it would not be served before the next re-check, which is long
/// after the wait time.
#[tokio::test]
async fn a_parked_request_is_not_told_of_others_that_are_not_there() {
    let server = Server::start();
    let mut redis = server.connection();
    let builder = LockClient::builder()
        .command_timeout(ms(200))
        .recheck_interval(ms(10_000));
    let client = builder.connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    for wait in [Duration::ZERO, ms(100)] {
        let parked = park(lock.try_lock_for(wait));
        until("it was granted", || exists(&mut redis, &name)).await;
        until("it was given back", || !exists(&mut redis, &name)).await;
        let told = timeout(LIMIT, parked)
            .await
            .expect("it was forgotten")
            .unwrap();
        told.expect("nobody has the lock").unlock().await.unwrap();
    }
}

#[tokio::test]
async fn a_parked_request_that_is_dropped_leaves_nothing() {
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
        let parked = park(lock.lock());
        until("it was granted", || exists(&mut redis, &name)).await;
        // Dropped at different stages: before it is taken over, and before and after it is undone.
        sleep(ms(wait)).await;
        drop(parked);
        until("the lock is free", || !exists(&mut redis, &name)).await;
    }
    client.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_parked_unlock_holds_nobody_up() {
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
    let parked = park(first.unlock());
    second.unlock().await.expect("the server is well");
    let again = timeout(LIMIT, locked_by(&lock, owner))
        .await
        .expect("it waits for an unlock that nobody polls");
    let name = lock.name().to_owned();
    assert_eq!(
        owner_counts(&mut redis, &name)
            .into_values()
            .collect::<Vec<_>>(),
        [2]
    );
    // However late it is asked, it tells what came of it.
    parked.await.unwrap();
    again.unlock().await.unwrap();
    third.unlock().await.unwrap();
    assert!(!exists(&mut redis, &name));
}

#[tokio::test]
async fn a_parked_force_unlock_holds_nobody_up() {
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
    // Polled until it has its owner's turn, which it takes when it tells the loss, and no longer.
    let lost = guard.lost();
    tokio::select! {
        biased;
        _ = lost => {}
        _ = &mut forced => panic!("it was done at once"),
    }
    assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
    let again = timeout(LIMIT, locked_by(&lock, owner))
        .await
        .expect("it waits for a force unlock that nobody polls");
    assert!(forced.await.unwrap());
    assert!(!again.is_lost(), "its possession is a later one");
    again.unlock().await.unwrap();
}

/// Slow is not parked: an operation that takes long because of the network is neither undone nor
/// done twice.
#[tokio::test]
async fn what_is_slow_and_polled_is_not_undone() {
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
