//! A shutdown while operations of callers are pending, polled or not: the client finishes unlocks
//! and releases grants.

use std::time::Duration;

use crate::support::observe::{exists, owner_counts, park, pttl};
use crate::support::proxy::{Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until, wait_until_async};
use redisson_lock::{LockClient, Owner, OwnerExt};
use tokio::time::{sleep, timeout};

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
