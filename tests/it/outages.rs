//! Servers and networks that are out of reach for a while: operations wait for them, or fail with
//! an unknown outcome that is settled later.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::support::observe::{channels, exists, expired, info, owner_counts, owner_field, pttl};
use crate::support::proxy::{Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until, wait_until_async};
use redisson_lock::{Error, LockClient, LockClientBuilder, LockGuard, LostReason, Owner, Step};
use tokio::task::{JoinHandle, block_in_place};
use tokio::time::{sleep, timeout};

/// Far longer than any step takes, far shorter than the leases in these tests.
const SOON: Duration = Duration::from_secs(10);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Settings with which a lost reply is noticed soon, and no lease expires during a test.
fn quick() -> LockClientBuilder {
    LockClient::builder()
        .watchdog_timeout(ms(60_000))
        .command_timeout(ms(300))
}

/// Waits until the lock's key is deleted, and asserts that it did not expire.
fn wait_until_released(redis: &mut redis::Connection, lock: &str) {
    wait_until("the lock is released", SOON, || !exists(redis, lock));
    assert_eq!(expired(redis), 0, "the lock expired instead");
}

fn spawn_waiter(client: &LockClient, lock: &str) -> JoinHandle<LockGuard> {
    let lock = client.lock(lock);
    tokio::spawn(async move { lock.lock().await.unwrap() })
}

async fn granted(waiter: JoinHandle<LockGuard>) -> LockGuard {
    timeout(SOON, waiter)
        .await
        .expect("the waiter was not granted the lock")
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn restart_without_data_grants_waiter_and_notifies_owner() {
    let mut server = Server::start();
    let client = LockClient::builder()
        .watchdog_timeout(ms(9_000))
        .connect(&server.url())
        .await
        .unwrap();
    let other = LockClient::builder()
        .recheck_interval(ms(60_000))
        .connect(&server.url())
        .await
        .unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let lost = tokio::spawn(guard.lost());
    let waiter = spawn_waiter(&other, &name);
    let mut redis = server.connection();
    wait_until("the waiter is subscribed", SOON, || {
        channels(&mut redis) == 1
    });
    block_in_place(|| {
        server.kill();
        server.restart();
    });
    let rival = granted(waiter).await;
    assert_eq!(
        timeout(SOON, lost)
            .await
            .expect("the loss was not reported")
            .unwrap(),
        LostReason::Gone
    );
    assert!(matches!(
        guard.unlock().await,
        Err(Error::Lost {
            reason: LostReason::Gone,
            ..
        })
    ));
    // The unlock of the lost guard kept the hold of the new owner.
    let mut redis = server.connection();
    assert_eq!(
        owner_counts(&mut redis, &name),
        HashMap::from([(owner_field(&other, rival.owner()), 1)])
    );
    rival.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn restart_with_data_keeps_owner_and_waiter() {
    let mut server = Server::builder().persistent().start();
    let client = LockClient::builder()
        .watchdog_timeout(ms(6_000))
        .connect(&server.url())
        .await
        .unwrap();
    let other = LockClient::builder().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let waiter = spawn_waiter(&other, &name);
    let mut redis = server.connection();
    wait_until("the waiter is subscribed", SOON, || {
        channels(&mut redis) == 1
    });
    block_in_place(|| {
        server.kill();
        server.restart();
    });
    let mut redis = server.connection();
    // The new connection renews the lease.
    let mut last = pttl(&mut redis, &name);
    wait_until("the lease is renewed", SOON, || {
        let now = pttl(&mut redis, &name);
        now > std::mem::replace(&mut last, now)
    });
    assert!(!guard.is_lost());
    assert!(!waiter.is_finished(), "two owners hold the lock");
    guard.unlock().await.unwrap();
    granted(waiter).await.unlock().await.unwrap();
    assert!(!exists(&mut redis, &name));
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_acquire_on_paused_server_leaves_nothing() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = quick()
        .retry_timeout(ms(1_000))
        .connect(&server.url())
        .await
        .unwrap();
    for _ in 0..3 {
        let name = unique("stock");
        server.pause();
        let outcome = client.lock(&name).lock().await;
        assert!(
            matches!(
                outcome,
                Err(Error::OutcomeUnknown {
                    step: Step::Acquire,
                    ..
                })
            ),
            "{outcome:?}"
        );
        server.resume();
        // The lease would be a minute.
        wait_until_settled(&client, &mut redis, &name).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_acquire_without_replies_leaves_nothing() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick()
        .retry_timeout(ms(1_000))
        .connect(&proxy.url())
        .await
        .unwrap();
    let name = unique("stock");
    proxy.set(Way::Replies, Flow::Hold);
    let outcome = client.lock(&name).lock().await;
    assert!(
        matches!(
            outcome,
            Err(Error::OutcomeUnknown {
                step: Step::Acquire,
                ..
            })
        ),
        "{outcome:?}"
    );
    proxy.set(Way::Replies, Flow::Pass);
    wait_until_settled(&client, &mut redis, &name).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acquire_delivered_late_leaves_nothing() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick()
        .retry_timeout(ms(1_000))
        .connect(&proxy.url())
        .await
        .unwrap();
    for _ in 0..5 {
        let name = unique("stock");
        proxy.set(Way::Both, Flow::Hold);
        let outcome = client.lock(&name).lock().await;
        assert!(
            matches!(
                outcome,
                Err(Error::OutcomeUnknown {
                    step: Step::Acquire,
                    ..
                })
            ),
            "{outcome:?}"
        );
        // Now every request that was sent arrives, in any order.
        proxy.set(Way::Both, Flow::Pass);
        wait_until_settled(&client, &mut redis, &name).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_acquire_delivered_after_unlock_leaves_nothing() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick().connect(&proxy.url()).await.unwrap();
    let name = unique("stock");
    proxy.stall();
    // Over the second connection: the request on the first one is still in transit.
    let guard = timeout(SOON, client.lock(&name).lock())
        .await
        .expect("the call hangs")
        .unwrap();
    guard.unlock().await.unwrap();
    assert!(!exists(&mut redis, &name));
    proxy.deliver();
    wait_until_settled(&client, &mut redis, &name).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_unlock_delivered_late_keeps_owners_next_hold() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick().connect(&proxy.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    Owner::scope(async {
        let first = lock.lock().await.unwrap();
        proxy.stall();
        timeout(SOON, first.unlock())
            .await
            .expect("the call hangs")
            .unwrap();
        let second = lock.lock().await.unwrap();
        let holds = HashMap::from([(owner_field(&client, second.owner()), 1)]);
        assert_eq!(owner_counts(&mut redis, &name), holds);
        proxy.deliver();
        // The delivered request arrives within milliseconds.
        let begun = Instant::now();
        while begun.elapsed() < ms(500) {
            assert_eq!(
                owner_counts(&mut redis, &name),
                holds,
                "the late unlock released the next hold"
            );
            sleep(ms(5)).await;
        }
        second.unlock().await.unwrap();
    })
    .await;
}

/// Waits until all requests in transit have arrived, and nothing of a failed acquire is left.
async fn wait_until_settled(client: &LockClient, redis: &mut redis::Connection, name: &str) {
    timeout(SOON, client.lock(unique("probe")).is_locked())
        .await
        .expect("no answer")
        .unwrap();
    // Requests arrive within milliseconds of the server's return, so the key has to stay away for
    // longer.
    let mut free_since = None;
    wait_until("nothing of the acquire is left", SOON, || {
        if exists(redis, name) {
            free_since = None;
            return false;
        }
        free_since.get_or_insert_with(Instant::now).elapsed() > ms(500)
    });
    assert_eq!(expired(redis), 0, "the lock expired instead");
}

#[tokio::test(flavor = "multi_thread")]
async fn acquire_waits_until_paused_server_resumes() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = quick().connect(&server.url()).await.unwrap();
    for _ in 0..3 {
        let name = unique("stock");
        server.pause();
        let waiter = spawn_waiter(&client, &name);
        // Long enough for the client to give up its first connection.
        sleep(ms(700)).await;
        assert!(!waiter.is_finished());
        server.resume();
        let guard = granted(waiter).await;
        assert_eq!(
            owner_counts(&mut redis, &name),
            HashMap::from([(owner_field(&client, guard.owner()), 1)])
        );
        guard.unlock().await.unwrap();
        assert!(!exists(&mut redis, &name));
    }
}

/// An acquire runs, its reply is lost with its connection, and the server refuses each repeat until
/// the retry timeout passes. The first call may have run, so a server error would be wrong.
#[tokio::test(flavor = "multi_thread")]
async fn refused_repeats_of_unanswered_acquire_are_unknown_outcome() {
    let server = Server::start();
    let mut redis = server.connection();
    let replicas_needed = |redis: &mut redis::Connection, number: u64| {
        redis::cmd("CONFIG")
            .arg("SET")
            .arg("min-replicas-to-write")
            .arg(number)
            .exec(redis)
            .unwrap();
    };
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .command_timeout(ms(2_000))
        .retry_timeout(ms(2_000))
        .connect(&proxy.url())
        .await
        .unwrap();
    let name = unique("stock");
    proxy.set(Way::Replies, Flow::Hold);
    let acquire = tokio::spawn(client.lock(&name).try_lock().into_future());
    wait_until("the acquire has run", SOON, || exists(&mut redis, &name));
    // From now on the server refuses writes.
    replicas_needed(&mut redis, 1);
    proxy.close_now();
    proxy.set(Way::Replies, Flow::Pass);
    let outcome = timeout(SOON, acquire)
        .await
        .expect("the call hangs")
        .unwrap();
    replicas_needed(&mut redis, 0);
    assert!(
        matches!(
            outcome,
            Err(Error::OutcomeUnknown {
                step: Step::Acquire,
                ..
            })
        ),
        "{outcome:?}"
    );
    wait_until_released(&mut redis, &name);
}

#[tokio::test(flavor = "multi_thread")]
async fn unlock_of_unknown_outcome_is_settled_later() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick()
        .retry_timeout(ms(1_000))
        .connect(&proxy.url())
        .await
        .unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    proxy.set(Way::Both, Flow::Hold);
    let outcome = guard.unlock().await;
    assert!(
        matches!(
            outcome,
            Err(Error::OutcomeUnknown {
                step: Step::Release,
                ..
            })
        ),
        "{outcome:?}"
    );
    assert!(exists(&mut redis, &name));
    proxy.set(Way::Both, Flow::Pass);
    wait_until_released(&mut redis, &name);
}

#[tokio::test(flavor = "multi_thread")]
async fn guard_dropped_while_server_unreachable_is_released_later() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick().connect(&proxy.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    proxy.set(Way::Both, Flow::Hold);
    drop(guard);
    // Long enough for the client to give up its first connection.
    sleep(ms(700)).await;
    proxy.set(Way::Both, Flow::Pass);
    wait_until_released(&mut redis, &name);
}

#[tokio::test(flavor = "multi_thread")]
async fn client_without_network_blocks_no_other_client() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let disconnected = quick()
        .retry_timeout(ms(1_000))
        .connect(&proxy.url())
        .await
        .unwrap();
    let connected = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = disconnected.lock(unique("other")).lock().await.unwrap();
    proxy.set(Way::Both, Flow::Hold);
    let stuck = {
        let lock = disconnected.lock(&name);
        tokio::spawn(async move { lock.lock().await })
    };
    for _ in 0..100 {
        timeout(SOON, connected.lock(&name).lock())
            .await
            .expect("the call hangs")
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
    let outcome = timeout(SOON, stuck).await.expect("the call hangs").unwrap();
    assert!(
        matches!(
            outcome,
            Err(Error::OutcomeUnknown {
                step: Step::Acquire,
                ..
            })
        ),
        "{outcome:?}"
    );
    proxy.close_now();
    proxy.set(Way::Both, Flow::Pass);
    timeout(SOON, guard.unlock())
        .await
        .expect("the call hangs")
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn acquire_waits_until_busy_server_answers() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    redis::cmd("CONFIG")
        .arg(&["SET", "lua-time-limit", "20"])
        .exec(&mut redis)
        .unwrap();
    let mut stuck = server.connection();
    let script = std::thread::spawn(move || {
        redis::cmd("EVAL")
            .arg("while true do end")
            .arg(0)
            .exec(&mut stuck)
            .unwrap_err()
            .to_string()
    });
    wait_until("the server is busy", SOON, || {
        redis::cmd("PING")
            .exec(&mut redis)
            .is_err_and(|error| error.code() == Some("BUSY"))
    });
    let waiter = spawn_waiter(&client, &name);
    sleep(ms(300)).await;
    assert!(!waiter.is_finished());
    redis::cmd("SCRIPT").arg("KILL").exec(&mut redis).unwrap();
    let guard = granted(waiter).await;
    assert!(
        info(&mut redis, "errorstats", "errorstat_BUSY:", "count=") > 1,
        "the server never answered BUSY"
    );
    assert_eq!(
        owner_counts(&mut redis, &name),
        HashMap::from([(owner_field(&client, guard.owner()), 1)])
    );
    guard.unlock().await.unwrap();
    assert!(script.join().unwrap().contains("killed"));
}

#[tokio::test(flavor = "multi_thread")]
async fn operations_wait_until_server_has_loaded_its_data() {
    // Loading takes 300 us for each key, so that the client meets the server while it loads. The
    // server answers now and then in between.
    let mut server = Server::builder()
        .persistent()
        .arg("--key-load-delay", "300")
        .start();
    let client = LockClient::builder()
        .recheck_interval(ms(100))
        .connect(&server.url())
        .await
        .unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let waiter = spawn_waiter(&client, &name);
    let mut fill = redis::pipe();
    for key in 0..10_000 {
        fill.set(format!("filler-{key}"), key).ignore();
    }
    fill.exec(&mut server.connection()).unwrap();
    block_in_place(|| {
        server.kill();
        server.restart();
    });
    guard.unlock().await.unwrap();
    granted(waiter).await.unlock().await.unwrap();
    let mut redis = server.connection();
    let refused = info(
        &mut redis,
        "commandstats",
        "cmdstat_evalsha:",
        "rejected_calls=",
    );
    assert!(refused > 0, "the server never answered LOADING");
    assert!(!exists(&mut redis, &name));
}

/// After the first failed attempt to connect again, an operation reports why it failed.
#[tokio::test(flavor = "multi_thread")]
async fn operation_during_outage_reports_why_connecting_fails() {
    let mut server = Server::start();
    let client = quick()
        .retry_timeout(ms(600))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    lock.run(async {}).await.unwrap();
    server.kill();
    // The first one may have been sent on the connection that was lost.
    let _ = lock.try_lock().await;
    let error = lock.try_lock().await.unwrap_err();
    let Error::Connection { error: source, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(source.kind(), std::io::ErrorKind::ConnectionRefused);
    let address = format!("127.0.0.1:{}", server.port());
    let name = lock.name();
    let text = format!("no connection to {address}, for lock {name:?}: Connection refused");
    assert_eq!(error.to_string(), text);
    server.restart();
    wait_until_async("the server answers", SOON, || async {
        lock.is_locked().await.is_ok()
    })
    .await;
    lock.run(async {}).await.unwrap();
}
