//! `LockClient::stats`: each number counts what its documentation says.

use std::time::Duration;

use redis::cmd;
use redisson_lock::{Error, LockClient, LostReason, Owner, OwnerExt};

use crate::support::observe::park;
use crate::support::proxy::{Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until, wait_until_async};

const LIMIT: Duration = Duration::from_secs(20);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[tokio::test(flavor = "multi_thread")]
async fn stats_count_holds_waiters_grants_and_contention() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    assert_eq!(client.stats(), Default::default());
    let lock = client.lock(unique("stock"));
    let owner = Owner::new();
    let outer = lock.lock().with_owner(owner).await.unwrap();
    let inner = lock.lock().with_owner(owner).await.unwrap();
    let other = client.lock(unique("stock")).lock().await.unwrap();
    let stats = client.stats();
    assert_eq!((stats.locks_held, stats.grants), (2, 3));

    assert!(lock.try_lock().await.unwrap().is_none());
    assert_eq!(client.stats().contended_attempts, 1);
    let waiting = tokio::spawn(lock.lock().into_future());
    wait_until_async("a request waits", LIMIT, || async {
        client.stats().requests_waiting == 1
    })
    .await;
    waiting.abort();
    wait_until_async("no request waits", LIMIT, || async {
        client.stats().requests_waiting == 0
    })
    .await;

    inner.unlock().await.unwrap();
    assert_eq!(client.stats().locks_held, 2);
    outer.unlock().await.unwrap();
    other.unlock().await.unwrap();
    assert_eq!(client.stats().locks_held, 0);
    assert_eq!(client.stats().losses.total(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn stats_count_losses_by_reason_and_renewals() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .watchdog_timeout(ms(4_500))
        .connect(&server.url())
        .await
        .unwrap();
    let take = async |lease: Option<Duration>| {
        let lock = client.lock(unique("stock"));
        let request = lock.lock();
        (
            lease
                .map_or(lock.lock(), |lease| request.lease(lease))
                .await
                .unwrap(),
            lock,
        )
    };
    let (expired, _) = take(Some(ms(1_000))).await;
    assert_eq!(expired.lost().await, LostReason::Expired);
    let (gone, lock) = take(None).await;
    cmd("DEL").arg(lock.name()).exec(&mut redis).unwrap();
    assert_eq!(gone.lost().await, LostReason::Gone);
    let (forced, lock) = take(None).await;
    assert!(lock.force_unlock().await.unwrap());
    assert_eq!(forced.lost().await, LostReason::ForceUnlocked);
    let (renewed, _) = take(None).await;
    let before = client.stats().renewals;
    wait_until_async("it was renewed twice", LIMIT, || async {
        client.stats().renewals >= before + 2
    })
    .await;
    client.shutdown().await.unwrap();
    assert!(renewed.is_lost());
    let losses = client.stats().losses;
    assert_eq!(
        (
            losses.expired,
            losses.gone,
            losses.force_unlocked,
            losses.shutdown,
            losses.client_failed
        ),
        (1, 1, 1, 1, 0)
    );
    assert_eq!((losses.total(), client.stats().locks_held), (4, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn stats_count_reconnects_and_unknown_outcomes() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .command_timeout(ms(200))
        .retry_timeout(ms(400))
        .connect(&proxy.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    proxy.set(Way::Replies, Flow::Hold);
    let answer = lock.lock().await;
    assert!(
        matches!(answer, Err(Error::OutcomeUnknown { .. })),
        "{answer:?}"
    );
    assert_eq!(client.stats().unknown_outcomes, 1);
    proxy.set(Way::Replies, Flow::Pass);
    lock.run(async {}).await.unwrap();
    let before = client.stats().reconnects;
    assert!(before >= 1);
    cmd("CLIENT")
        .arg(&["KILL", "TYPE", "normal"])
        .exec(&mut redis)
        .unwrap();
    wait_until("it is connected again", LIMIT, || {
        client.stats().reconnects > before
    });
    lock.run(async {}).await.unwrap();
}

/// Requests that do not wait for a lock: `try_lock` never does.
#[tokio::test]
async fn try_lock_in_flight_is_no_waiting_request() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let parked = park(lock.try_lock());
    assert_eq!(client.stats().requests_waiting, 0);
    drop(parked);
}

/// "Connections for calls that replaced a lost one": none was lost here.
#[tokio::test(flavor = "multi_thread")]
async fn connecting_to_a_busy_server_is_no_reconnect() {
    let server = Server::builder().arg("--lua-time-limit", "50").start();
    let mut redis = server.connection();
    let mut stuck = server.connection();
    let script =
        std::thread::spawn(move || cmd("EVAL").arg("while true do end").arg(0).exec(&mut stuck));
    wait_until("the server is busy", LIMIT, || {
        cmd("PING")
            .exec(&mut redis)
            .is_err_and(|error| error.code() == Some("BUSY"))
    });
    let client = LockClient::connect(&server.url()).await;
    cmd("SCRIPT").arg("KILL").exec(&mut redis).unwrap();
    script.join().unwrap().unwrap_err();
    let client = client.unwrap();
    client.lock("a").run(async {}).await.unwrap();
    assert_eq!(client.stats().reconnects, 0);
}
