//! A shutdown while callers have operations in their hands, polled or not: what was begun is
//! finished.

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

/// Nobody polls it, so nobody but the client can give back what it was granted; and after the
/// shutdown it is too late.
#[tokio::test]
async fn a_shutdown_gives_back_what_a_parked_acquire_was_granted() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .command_timeout(ms(500))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    let parked = park(lock.lock());
    wait_until_async("it was granted", SOON, || {
        std::future::ready(exists(&mut redis, &name))
    })
    .await;
    client.shutdown().await.expect("the server is well");
    assert!(
        !exists(&mut redis, &name),
        "left for {} ms",
        pttl(&mut redis, &name)
    );
    drop(parked);
    // Nothing may come of it any more. What did would arrive within milliseconds.
    sleep(ms(500)).await;
    assert!(
        !exists(&mut redis, &name),
        "taken for {} ms",
        pttl(&mut redis, &name)
    );
}

/// Two of one owner: the second is behind the first, and not sent yet.
#[tokio::test]
async fn a_shutdown_finishes_parked_unlocks() {
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
    let parked = (park(one.unlock()), park(two.unlock()));
    client.shutdown().await.expect("the server is well");
    assert_eq!(owner_counts(&mut redis, &name), Default::default());
    drop(parked);
    // As above.
    sleep(ms(500)).await;
    assert_eq!(owner_counts(&mut redis, &name), Default::default());
}

/// Its caller's task polls it all the time, and it is under way when the client is shut down. Then
/// the network is away for longer than a reply may take.
#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_finishes_an_unlock_that_its_caller_awaits() {
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
    wait_until("it is under way", SOON, || proxy.touched() > before);
    // Nothing of what was held arrives, as if the packets were lost.
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
    let what = format!("it is free, after {ended:?} and {unlocked:?}");
    wait_until(&what, ms(1_000), || !exists(&mut redis, &name));
}

/// Its reply is held until the client is shut down: nobody has the guard, and nobody else can know
/// of the grant.
#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_gives_back_what_an_acquire_that_its_caller_awaits_was_granted() {
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
    wait_until("it is granted", SOON, || exists(&mut redis, &name));
    let ending = tokio::spawn(async move { client.shutdown().await });
    sleep(ms(1_500)).await;
    proxy.set(Way::Both, Flow::Pass);
    let ended = timeout(SOON, ending)
        .await
        .expect("the shutdown hangs")
        .unwrap();
    let told = timeout(SOON, locking)
        .await
        .expect("the acquire hangs")
        .unwrap();
    let what = format!("it is free, after {ended:?} and {told:?}");
    wait_until(&what, ms(1_000), || !exists(&mut redis, &name));
}
