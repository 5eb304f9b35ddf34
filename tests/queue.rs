//! The line of waiters of one lock in this process, when some of them go away or stand still.

mod support;

use std::time::{Duration, Instant};

use futures::FutureExt;
use redisson_lock::{Error, LockClient, Step};
use support::proxy::{Flow, Proxy, Way};
use support::server::{Server, unique, wait_until};
use tokio::time::timeout;

const LIMIT: Duration = Duration::from_secs(20);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// How many calls of scripts this server has had.
fn calls(redis: &mut redis::Connection) -> u64 {
    let info: String = redis::cmd("INFO").arg("commandstats").query(redis).unwrap();
    let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    line.and_then(|line| line.split(',').next()?.parse().ok()).unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_that_went_away_from_a_silent_server_leave_one_attempt_behind() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let other = LockClient::connect(&server.url()).await.unwrap();
    let guard = other.lock(lock.name().unwrap()).lock().await.unwrap();
    let before = calls(&mut redis);
    proxy.set(Way::Requests, Flow::Hold);
    for _ in 0..100 {
        assert!(timeout(ms(5), lock.lock()).await.is_err());
    }
    proxy.set(Way::Requests, Flow::Pass);
    // The next one in line comes after all of them, and has an answer of its own.
    assert!(matches!(lock.lock().wait(ms(1)).await, Err(Error::Contended { .. })));
    let asked = calls(&mut redis) - before;
    assert!(asked <= 4, "{asked} scripts for one waiter and one that went away");
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_an_abandoned_attempt_nobody_is_told_that_others_hold_the_lock() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client =
        LockClient::builder().command_timeout(ms(500)).retry_timeout(ms(500)).connect(&proxy.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    proxy.set(Way::Requests, Flow::Hold);
    assert!(timeout(ms(5), lock.lock()).await.is_err());
    let told = lock.lock().wait(ms(10)).await.unwrap_err();
    let honest = matches!(
        told,
        Error::Timeout { step: Step::EarlierOperation, .. } | Error::Connection { .. } | Error::Unknown { .. }
    );
    assert!(honest, "{told:?}");
    proxy.set(Way::Requests, Flow::Pass);
    timeout(LIMIT, lock.lock()).await.expect("the line stands still").unwrap().unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_that_is_not_polled_while_it_sleeps_gives_way() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder().recheck_interval(ms(100)).connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    let mut parked = Box::pin(lock.lock());
    let channel = format!("redisson_lock__channel:{{{}}}", lock.name().unwrap());
    let asleep = Instant::now();
    loop {
        assert!((&mut parked).now_or_never().is_none());
        let listeners: (String, u64) =
            redis::cmd("PUBSUB").arg("NUMSUB").arg(&channel).query(&mut redis).expect("NUMSUB");
        if listeners.1 == 1 {
            break;
        }
        assert!(asleep.elapsed() < LIMIT, "the waiter never slept");
        tokio::time::sleep(ms(5)).await;
    }
    guard.unlock().await.unwrap();
    // From here on nobody polls `parked`.
    let guard = timeout(LIMIT, lock.lock()).await.expect("a waiter that stands still blocks the line").unwrap();
    guard.unlock().await.unwrap();
    // It has lost its place, not its turn.
    timeout(LIMIT, parked).await.expect("it never got in").unwrap().unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_that_is_not_polled_while_it_asks_gives_way() {
    let server = Server::start();
    let mut redis = server.connection();
    let client =
        LockClient::builder().recheck_interval(ms(100)).command_timeout(ms(500)).connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    let before = calls(&mut redis);
    let mut parked = Box::pin(lock.lock());
    assert!((&mut parked).now_or_never().is_none());
    wait_until("its question was answered", LIMIT, || calls(&mut redis) > before);
    guard.unlock().await.unwrap();
    let guard = timeout(LIMIT, lock.lock()).await.expect("a waiter that stands still blocks the line").unwrap();
    guard.unlock().await.unwrap();
    timeout(LIMIT, parked).await.expect("it never got in").unwrap().unlock().await.unwrap();
}
