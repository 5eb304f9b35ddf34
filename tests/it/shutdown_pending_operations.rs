//! A shutdown while operations of callers are pending, polled or not: the client finishes unlocks
//! and releases grants.

use std::time::Duration;

use crate::support::observe::{exists, owner_counts, park, pttl};
use crate::support::proxy::{Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until, wait_until_async};
use redisson_lock::{Error, LockClient, Owner, OwnerExt};
use tokio::time::{sleep, timeout};
use tracing::Level;

use crate::support::log::Log;

const LIMIT: Duration = Duration::from_secs(20);

const SOON: Duration = Duration::from_secs(20);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// The acquire is not polled, so only the client can release its grant, and only before the end of
/// the shutdown.
#[tokio::test]
async fn shutdown_releases_grant_of_unpolled_acquire() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .command_timeout(ms(500))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    let unpolled = park(lock.lock());
    wait_until_async("the lock is granted", SOON, || {
        std::future::ready(exists(&mut redis, &name))
    })
    .await;
    client.shutdown().await.expect("the shutdown failed");
    assert!(
        !exists(&mut redis, &name),
        "the key stays for {} ms",
        pttl(&mut redis, &name)
    );
    drop(unpolled);
    // No further call may be made. It would arrive within milliseconds.
    sleep(ms(500)).await;
    assert!(
        !exists(&mut redis, &name),
        "acquired for {} ms",
        pttl(&mut redis, &name)
    );
}

/// Two unlocks of one owner are serialized: the second is not sent yet.
#[tokio::test]
async fn shutdown_finishes_unpolled_unlocks() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .command_timeout(ms(500))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    let owner = Owner::new();
    let one = lock.lock().with_owner(owner).await.unwrap();
    let two = lock.lock().with_owner(owner).await.unwrap();
    let unpolled = (park(one.unlock()), park(two.unlock()));
    client.shutdown().await.expect("the shutdown failed");
    assert_eq!(owner_counts(&mut redis, &name), Default::default());
    drop(unpolled);
    // As above.
    sleep(ms(500)).await;
    assert_eq!(owner_counts(&mut redis, &name), Default::default());
}

/// The unlock is polled all the time, and its call is pending at the shutdown. Then the network is
/// down for longer than the command timeout.
#[tokio::test(flavor = "multi_thread")]
async fn shutdown_finishes_awaited_unlock() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let builder = LockClient::builder()
        .command_timeout(ms(300))
        .retry_timeout(ms(10_000));
    let client = builder.connect(&proxy.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    let guard = lock.lock().await.unwrap();
    proxy.set(Way::Both, Flow::Hold);
    let before = proxy.touched();
    let unlocking = tokio::spawn(guard.unlock());
    wait_until("the unlock is sent", SOON, || proxy.touched() > before);
    // Nothing that the proxy holds arrives, as if the packets were lost.
    proxy.stall();
    let ending = tokio::spawn(async move { client.shutdown().await });
    sleep(ms(1_500)).await;
    proxy.set(Way::Both, Flow::Pass);
    let ended = timeout(SOON, ending)
        .await
        .expect("the shutdown hangs")
        .unwrap();
    let unlocked = timeout(SOON, unlocking)
        .await
        .expect("the unlock hangs")
        .unwrap();
    let what = format!("the lock is free, after {ended:?} and {unlocked:?}");
    wait_until(&what, ms(1_000), || !exists(&mut redis, &name));
}

/// The reply is held until the client is shut down: no guard exists, and only the client can know
/// of the grant.
#[tokio::test(flavor = "multi_thread")]
async fn shutdown_releases_grant_of_awaited_acquire() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let builder = LockClient::builder()
        .command_timeout(ms(300))
        .retry_timeout(ms(10_000));
    let client = builder.connect(&proxy.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    proxy.set(Way::Replies, Flow::Hold);
    let locking = tokio::spawn(lock.lock().into_future());
    wait_until("the lock is granted", SOON, || exists(&mut redis, &name));
    let ending = tokio::spawn(async move { client.shutdown().await });
    sleep(ms(1_500)).await;
    proxy.set(Way::Both, Flow::Pass);
    let ended = timeout(SOON, ending)
        .await
        .expect("the shutdown hangs")
        .unwrap();
    let locked = timeout(SOON, locking)
        .await
        .expect("the acquire hangs")
        .unwrap();
    let what = format!("the lock is free, after {ended:?} and {locked:?}");
    wait_until(&what, ms(1_000), || !exists(&mut redis, &name));
}

async fn hasty(url: &str) -> LockClient {
    LockClient::builder()
        .command_timeout(ms(300))
        .retry_timeout(ms(500))
        .connect(url)
        .await
        .unwrap()
}

/// "`failed_releases`: releases in the background that failed: of dropped guards", "each is logged
/// as a warning". Here the release is sent, and the shutdown gives up before the reply.
#[tokio::test]
async fn shutdown_that_gives_up_a_release_in_flight_counts_and_logs_it() {
    let server = Server::start();
    let log = Log::capture();
    let proxy = Proxy::start(&server).await;
    let mut redis = server.connection();
    let client = hasty(&proxy.url()).await;
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().lease(Duration::from_secs(3600)).await.unwrap();
    proxy.set(Way::Requests, Flow::Hold);
    let touched = proxy.touched();
    drop(guard);
    wait_until_async("the release is under way", LIMIT, || async {
        proxy.touched() > touched
    })
    .await;
    let ended = client.shutdown().await;
    assert!(matches!(ended, Err(Error::Timeout { .. })), "{ended:?}");
    drop(proxy);
    assert!(exists(&mut redis, lock.name()));
    let stats = client.stats();
    let events: Vec<_> = log.from(Level::WARN);
    let named = events.iter().filter(|event| {
        event
            .fields
            .get("lock")
            .is_some_and(|name| name == lock.name())
    });
    assert_eq!(
        (stats.failed_releases, named.count()),
        (1, 1),
        "{stats:?} {events:#?}"
    );
}

/// "`Closed`: Nothing was sent." Here the server has granted the lock, and the shutdown gives up.
#[tokio::test]
async fn acquire_in_flight_at_shutdown_does_not_claim_that_nothing_was_sent() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let mut redis = server.connection();
    let client = hasty(&proxy.url()).await;
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    proxy.set(Way::Replies, Flow::Hold);
    let acquiring = tokio::spawn(async move { lock.lock().await.map(drop) });
    wait_until_async("it is granted", LIMIT, || {
        let granted = exists(&mut redis, &name);
        async move { granted }
    })
    .await;
    let ended = client.shutdown().await;
    let error = acquiring.await.unwrap().unwrap_err();
    let left = exists(&mut redis, &name);
    assert!(
        !left || matches!(error, Error::OutcomeUnknown { .. }),
        "{error:?} after {ended:?}, and the key exists"
    );
    let stats = client.stats();
    assert!(!left || stats.failed_releases == 1, "{stats:?}");
}
