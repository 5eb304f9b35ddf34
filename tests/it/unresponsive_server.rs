//! Waiters while the server sends no replies: which result they get, and when, if other waiters in
//! the queue are not polled.

use std::time::Duration;

use crate::support::observe::{channels, rival, scripts};
use crate::support::proxy::{Fate, Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until};
use futures::FutureExt;
use redisson_lock::{Error, LockClient};
use tokio::time::timeout;

const LIMIT: Duration = Duration::from_secs(20);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// An old attempt of a dropped request ends without a reply. A waiter that has got replies since
/// must not report an unreachable server.
#[tokio::test(flavor = "multi_thread")]
async fn answered_waiter_ignores_older_unanswered_attempt() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .recheck_interval(ms(100))
        .command_timeout(ms(300))
        .retry_timeout(ms(1_000))
        .connect(&proxy.url())
        .await
        .unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = other.lock(lock.name()).lock().await.unwrap();
    // The reply to its attempt is lost with the connection, and it is not polled any more.
    proxy.next_reply_to(&["EVALSHA"], Fate::Close);
    let mut unpolled = Box::pin(lock.lock().into_future());
    assert!((&mut unpolled).now_or_never().is_none());
    wait_until("the reply is lost", LIMIT, || proxy.applied() == 1);
    let waiting = tokio::spawn(lock.lock().into_future());
    let lost = scripts(&mut redis);
    // One attempt in 100 ms: by then the attempt without a reply is older than the retry timeout.
    wait_until(
        "the other request overtakes it and gets replies",
        LIMIT,
        || scripts(&mut redis) > lost + 20,
    );
    assert!(!waiting.is_finished());
    drop(unpolled);
    let dropped = scripts(&mut redis);
    wait_until("it tries again, or has failed", LIMIT, || {
        waiting.is_finished() || scripts(&mut redis) > dropped + 5
    });
    if waiting.is_finished() {
        let outcome = waiting.await.unwrap();
        panic!("the server replies, another owner holds the lock, and the waiter got {outcome:?}");
    }
    guard.unlock().await.unwrap();
    timeout(LIMIT, waiting)
        .await
        .expect("the waiter hangs")
        .unwrap()
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

/// Without any reply of the server the client does not know whether another owner holds the lock,
/// so it must not report contention.
#[tokio::test(flavor = "multi_thread")]
async fn wait_without_any_reply_reports_no_contention() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .command_timeout(ms(400))
        .retry_timeout(ms(400))
        .connect(&proxy.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    proxy.set(Way::Both, Flow::Hold);
    let mut first = lock.lock().into_future();
    assert!(futures::poll!(&mut first).is_pending());
    let first = tokio::spawn(first);
    let mut unpolled = lock.lock().into_future();
    assert!(futures::poll!(&mut unpolled).is_pending());
    let third = tokio::spawn(lock.lock().timeout(ms(900)).into_future());
    first
        .await
        .unwrap()
        .expect_err("the server sends no replies");
    let outcome = third.await.unwrap();
    assert!(
        !matches!(outcome, Err(Error::AcquireTimeout { .. })),
        "the lock is free and no attempt got a reply: {outcome:?}"
    );
    drop(unpolled);
}

/// A third of a short watchdog timeout is the default limit of a reply. Where a round trip takes
/// longer, each connection would be given up before its first reply.
#[tokio::test(flavor = "multi_thread")]
async fn short_watchdog_works_where_round_trips_take_longer_than_its_third() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let builder = LockClient::builder().watchdog_timeout(ms(2_000));
    let client = builder.connect(&proxy.url()).await.unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    proxy.set(Way::Both, Flow::Delay(ms(350)));
    let name = unique("stock");
    let guard = timeout(LIMIT, client.lock(&name).lock().into_future()).await;
    let guard = guard.expect("a grant").unwrap();
    let lost = timeout(ms(6_000), guard.lost()).await;
    assert!(lost.is_err(), "{lost:?}");
    guard.unlock().await.unwrap();
    // A waiter gets the lock, too.
    let held = other.lock(&name).lock().await.unwrap();
    let waiter = rival(&client, &name);
    wait_until("the waiter is subscribed", LIMIT, || {
        channels(&mut server.connection()) == 1
    });
    held.unlock().await.unwrap();
    let (_, guard) = timeout(LIMIT, waiter).await.expect("a grant").unwrap();
    guard.unlock().await.unwrap();
    let stats = client.stats();
    assert!(stats.reconnects < 10, "{stats:?}");
}
