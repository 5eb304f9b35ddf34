//! The line of waiters when the server is silent, when somebody stands still, and when a lease ends without a message.

mod support;

use std::time::{Duration, Instant};

use futures::FutureExt;
use redisson_lock::{Error, LockClient};
use support::observe::scripts;
use support::proxy::{Fate, Flow, Proxy, Way};
use support::server::{Server, unique, wait_until};
use tokio::time::{sleep, timeout};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// an abandoned attempt of long ago ends without an answer: a healthy waiter, answered since, fails.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_whom_the_server_answers_is_not_told_that_it_answers_nobody() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .recheck_interval(ms(100))
        .command_timeout(ms(300))
        .retry_timeout(ms(1000))
        .connect(&proxy.url())
        .await
        .unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = other.lock(lock.name().unwrap()).lock().await.unwrap();
    // A asks; its reply is lost with its connection; nobody polls A any more.
    proxy.next_reply_to(&["EVALSHA"], Fate::Close);
    let mut parked = Box::pin(lock.lock());
    assert!((&mut parked).now_or_never().is_none());
    wait_until("lost", ms(3000), || proxy.applied() == 1);
    let waiting = tokio::spawn({
        let lock = lock.clone();
        async move { lock.lock().await.map(drop) }
    });
    sleep(ms(3000)).await; // B passes A by, and asks with answers every 100 ms
    let before = scripts(&mut redis);
    sleep(ms(500)).await;
    assert!(scripts(&mut redis) > before, "B asks and is answered");
    assert!(!waiting.is_finished());
    drop(parked);
    sleep(ms(1000)).await;
    if waiting.is_finished() {
        panic!(
            "the server is well, the lock is held by somebody else, and the waiter got {:?}",
            waiting.await.unwrap()
        );
    }
    guard.unlock().await.unwrap();
    waiting.await.unwrap().unwrap();
}

/// next in line behind a local holder with a fixed lease that runs out.
#[tokio::test(flavor = "multi_thread")]
async fn the_next_in_line_sleeps_no_longer_than_the_lease_of_the_one_before() {
    let server = Server::start();
    let client = LockClient::builder().recheck_interval(ms(20_000)).connect(&server.url()).await.unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = other.lock(lock.name().unwrap()).lock().await.unwrap();
    let a = tokio::spawn({
        let lock = lock.clone();
        async move { lock.lock().lease(ms(500)).await }
    });
    sleep(ms(100)).await;
    let b = tokio::spawn({
        let lock = lock.clone();
        async move { lock.lock().await.map(|_g| ()) }
    });
    sleep(ms(100)).await;
    guard.unlock().await.unwrap();
    let a = a.await.unwrap().unwrap();
    let began = Instant::now();
    // A overruns its lease: 500 ms later the key is gone.
    let got = timeout(ms(4000), b).await;
    let locked = lock.is_locked().await.unwrap();
    drop(a);
    assert!(
        got.is_ok(),
        "{:?} after a lease of 500 ms began the waiter still sleeps; locked: {locked}",
        began.elapsed()
    );
}

/// nobody has heard anything of the server, yet "held by another holder".
#[tokio::test(flavor = "multi_thread")]
async fn contention_is_not_told_before_the_server_has_said_anything() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client =
        LockClient::builder().command_timeout(ms(400)).retry_timeout(ms(400)).connect(&proxy.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    proxy.set(Way::Both, Flow::Hold);
    let a = tokio::spawn({
        let lock = lock.clone();
        async move { lock.lock().await.map(drop) }
    });
    sleep(ms(50)).await;
    let mut b = Box::pin(lock.lock());
    assert!((&mut b).now_or_never().is_none());
    let c = tokio::spawn({
        let lock = lock.clone();
        async move { lock.lock().wait(ms(900)).await.map(drop) }
    });
    let _ = a.await.unwrap();
    let c = c.await.unwrap();
    assert!(!matches!(c, Err(Error::Contended { .. })), "the lock is free and no question was answered: {c:?}");
    drop(b);
}

/// a waiter that was not polled for a while, long after the server is back.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_that_was_not_polled_asks_before_it_fails() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client =
        LockClient::builder().command_timeout(ms(300)).retry_timeout(ms(500)).connect(&proxy.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    proxy.set(Way::Both, Flow::Hold);
    let first = tokio::spawn({
        let lock = lock.clone();
        async move { lock.lock().await.map(drop) }
    });
    sleep(ms(50)).await;
    let mut b = Box::pin(lock.lock());
    assert!((&mut b).now_or_never().is_none());
    first.await.unwrap().expect_err("the server is silent");
    proxy.set(Way::Both, Flow::Pass);
    sleep(ms(3000)).await; // the server is back for long
    client.lock(unique("x")).lock().await.unwrap().unlock().await.unwrap();
    let before = scripts(&mut redis);
    let got = timeout(ms(5000), b).await.unwrap();
    assert!(
        got.is_ok(),
        "the server is back for 3 s, the lock is free, {} scripts were sent: {:?}",
        scripts(&mut redis) - before,
        got.err()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_in_the_dark_hears_of_the_answer_also_before_one_that_was_absent() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client =
        LockClient::builder().recheck_interval(ms(300)).command_timeout(ms(5000)).connect(&proxy.url()).await.unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = other.lock(lock.name().unwrap()).lock().await.unwrap();
    let mut parked = Box::pin(lock.lock());
    for _ in 0..10 {
        assert!((&mut parked).now_or_never().is_none());
        sleep(ms(10)).await;
    }
    let front = tokio::spawn({
        let lock = lock.clone();
        async move { lock.lock().await.map(drop) }
    });
    sleep(ms(1500)).await; // `parked` is absent
    proxy.set(Way::Replies, Flow::Hold);
    sleep(ms(400)).await; // the front asks, and hears nothing
    let began = Instant::now();
    let dark = tokio::spawn({
        let lock = lock.clone();
        async move { lock.try_lock().wait(ms(10)).await.map(|g| g.is_some()) }
    });
    sleep(ms(50)).await;
    assert!((&mut parked).now_or_never().is_none()); // stands in line again
    let parked = tokio::spawn(parked);
    proxy.set(Way::Replies, Flow::Pass); // the answer comes
    let told = dark.await.unwrap();
    let took = began.elapsed();
    guard.unlock().await.unwrap();
    let _ = front.await;
    let _ = parked.await;
    assert!(took < ms(200), "a wait of 10 ms, answered after 50 ms, took {took:?}: {told:?}");
}
/// several that are not polled.
#[tokio::test(flavor = "multi_thread")]
async fn many_that_are_not_polled_give_way_within_two_intervals() {
    let server = Server::start();
    let client = LockClient::builder().recheck_interval(ms(500)).connect(&server.url()).await.unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = other.lock(lock.name().unwrap()).lock().await.unwrap();
    let mut parked: Vec<_> = (0..10).map(|_| Box::pin(lock.lock())).collect();
    for _ in 0..10 {
        for p in &mut parked {
            assert!(p.now_or_never().is_none());
        }
        sleep(ms(10)).await;
    }
    guard.unlock().await.unwrap();
    let began = Instant::now();
    let got = timeout(ms(20_000), lock.lock()).await.unwrap().unwrap();
    assert!(began.elapsed() < ms(2000), "the lock was free for {:?}; two intervals are 1 s", began.elapsed());
    got.unlock().await.unwrap();
}
