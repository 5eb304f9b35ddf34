//! Waiters in front of a server that answers nothing for a while: what they are told, and when, if
//! some of them stand still.

use std::time::{Duration, Instant};

use crate::support::observe::{poll_to_sleep, scripts};
use crate::support::proxy::{Fate, Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until};
use futures::FutureExt;
use redisson_lock::{Error, LockClient};
use tokio::time::{sleep, timeout};

const LIMIT: Duration = Duration::from_secs(20);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// An abandoned attempt of long ago ends without an answer. Whoever has been answered since knows
/// better.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_whom_the_server_answers_is_not_told_that_it_answers_nobody() {
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
    // The reply to its question is lost with its connection, and from then on nobody polls it.
    proxy.next_reply_to(&["EVALSHA"], Fate::Close);
    let mut parked = Box::pin(lock.lock().into_future());
    assert!((&mut parked).now_or_never().is_none());
    wait_until("the reply is lost", LIMIT, || proxy.applied() == 1);
    let waiting = tokio::spawn(lock.lock().into_future());
    let lost = scripts(&mut redis);
    // One question in 100 ms: the attempt without an answer is older than the retry timeout then.
    wait_until(
        "the other one passes it by, asks and is answered",
        LIMIT,
        || scripts(&mut redis) > lost + 20,
    );
    assert!(!waiting.is_finished());
    drop(parked);
    let dropped = scripts(&mut redis);
    wait_until("it asks on, or has failed", LIMIT, || {
        waiting.is_finished() || scripts(&mut redis) > dropped + 5
    });
    if waiting.is_finished() {
        let told = waiting.await.unwrap();
        panic!(
            "the server is well, the lock is held by somebody else, and the waiter got {told:?}"
        );
    }
    guard.unlock().await.unwrap();
    timeout(LIMIT, waiting)
        .await
        .expect("it hangs")
        .unwrap()
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

/// "Held by another owner" would be made up as long as nobody has heard anything of the server.
#[tokio::test(flavor = "multi_thread")]
async fn contention_is_not_told_before_the_server_has_said_anything() {
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
    let mut parked = lock.lock().into_future();
    assert!(futures::poll!(&mut parked).is_pending());
    let third = tokio::spawn(lock.lock().timeout(ms(900)).into_future());
    first.await.unwrap().expect_err("the server is silent");
    let told = third.await.unwrap();
    assert!(
        !matches!(told, Err(Error::AcquireTimeout { .. })),
        "the lock is free and no question was answered: {told:?}"
    );
    drop(parked);
}

/// It was not polled for a while, and the server is back for long.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_that_was_not_polled_asks_before_it_fails() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .command_timeout(ms(300))
        .retry_timeout(ms(500))
        .connect(&proxy.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    proxy.set(Way::Both, Flow::Hold);
    let mut first = lock.lock().into_future();
    assert!(futures::poll!(&mut first).is_pending());
    let first = tokio::spawn(first);
    let mut parked = lock.lock().into_future();
    assert!(futures::poll!(&mut parked).is_pending());
    first.await.unwrap().expect_err("the server is silent");
    proxy.set(Way::Both, Flow::Pass);
    // Only time tells the two apart: by the clock it has waited for several retry timeouts, by what
    // it knows for none.
    sleep(ms(3_000)).await;
    client
        .lock(unique("stock"))
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    let before = scripts(&mut redis);
    let got = timeout(LIMIT, parked).await.expect("it hangs");
    let asked = scripts(&mut redis) - before;
    assert!(
        got.is_ok(),
        "the server is back for 3 s, the lock is free, {asked} scripts were sent: {:?}",
        got.err()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_in_the_dark_hears_of_the_answer_also_before_one_that_was_absent() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .recheck_interval(ms(300))
        .command_timeout(ms(5_000))
        .connect(&proxy.url())
        .await
        .unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    let guard = other.lock(&name).lock().await.unwrap();
    let mut parked = [lock.lock().into_future()];
    poll_to_sleep(&mut redis, &name, &mut parked).await;
    let [mut parked] = parked;
    let front = tokio::spawn(lock.lock().into_future());
    // The one that is not polled may have sent one more.
    let before = scripts(&mut redis);
    wait_until("it is passed by, and the next one asks", LIMIT, || {
        scripts(&mut redis) > before + 1
    });
    let before = scripts(&mut redis);
    proxy.set(Way::Replies, Flow::Hold);
    wait_until("the front asks, and hears nothing", LIMIT, || {
        scripts(&mut redis) > before
    });
    let began = Instant::now();
    let mut dark = lock.try_lock_for(ms(10)).into_future();
    assert!(futures::poll!(&mut dark).is_pending());
    let dark = tokio::spawn(dark);
    // Its wait is over by then.
    sleep(ms(50)).await;
    // Stands in line again, behind it.
    assert!(futures::poll!(&mut parked).is_pending());
    let parked = tokio::spawn(parked);
    proxy.set(Way::Replies, Flow::Pass);
    let told = dark.await.unwrap();
    let took = began.elapsed();
    guard.unlock().await.unwrap();
    for waiter in [front, parked] {
        drop(timeout(LIMIT, waiter).await.expect("it hangs"));
    }
    assert!(
        took < ms(1_000),
        "a wait of 10 ms, answered after 50 ms, took {took:?}: {told:?}"
    );
}
