//! Servers and networks that are out of reach for a while: waited out, settled afterwards, or told.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::support::observe::{channels, exists, expired, info, owner_counts, owner_field, pttl};
use crate::support::proxy::{Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until};
use redisson_lock::{Error, LockClient, LockClientBuilder, LockGuard, LostReason, Owner, Step};
use tokio::task::{JoinHandle, block_in_place};
use tokio::time::{sleep, timeout};

/// Far more than any step takes, far less than the leases in these tests.
const SOON: Duration = Duration::from_secs(10);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Settings by which a lost reply is noticed soon, and nothing runs out during a test.
fn quick() -> LockClientBuilder {
    LockClient::builder()
        .watchdog_timeout(ms(60_000))
        .command_timeout(ms(300))
}

/// Waits until the lock's key is gone because somebody took it away, not because its lease was
/// over.
fn wait_until_given_back(redis: &mut redis::Connection, lock: &str) {
    wait_until("what was taken is given back", SOON, || {
        !exists(redis, lock)
    });
    assert_eq!(expired(redis), 0, "it ran out instead");
}

fn waiting(client: &LockClient, lock: &str) -> JoinHandle<LockGuard> {
    let lock = client.lock(lock);
    tokio::spawn(async move { lock.lock().await.unwrap() })
}

async fn served(waiter: JoinHandle<LockGuard>) -> LockGuard {
    timeout(SOON, waiter)
        .await
        .expect("the waiter did not get in")
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_back_without_its_data_serves_waiters_and_tells_owners() {
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
    let waiter = waiting(&other, &name);
    let mut redis = server.connection();
    wait_until("the waiter listens", SOON, || channels(&mut redis) == 1);
    block_in_place(|| {
        server.kill();
        server.restart();
    });
    let rivals = served(waiter).await;
    assert_eq!(
        timeout(SOON, lost)
            .await
            .expect("the loss was never told")
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
    // The one that was lost took nothing with it.
    let mut redis = server.connection();
    assert_eq!(
        owner_counts(&mut redis, &name),
        HashMap::from([(owner_field(&other, rivals.owner()), 1)])
    );
    rivals.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_back_with_its_data_finds_owners_and_waiters_as_they_were() {
    let mut server = Server::builder().persistent().start();
    let client = LockClient::builder()
        .watchdog_timeout(ms(6_000))
        .connect(&server.url())
        .await
        .unwrap();
    let other = LockClient::builder().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let waiter = waiting(&other, &name);
    let mut redis = server.connection();
    wait_until("the waiter listens", SOON, || channels(&mut redis) == 1);
    block_in_place(|| {
        server.kill();
        server.restart();
    });
    let mut redis = server.connection();
    // Renewed by the new connection.
    let mut last = pttl(&mut redis, &name);
    wait_until("the lease is renewed", SOON, || {
        let now = pttl(&mut redis, &name);
        now > std::mem::replace(&mut last, now)
    });
    assert!(!guard.is_lost());
    assert!(!waiter.is_finished(), "two hold it at once");
    guard.unlock().await.unwrap();
    served(waiter).await.unlock().await.unwrap();
    assert!(!exists(&mut redis, &name));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_that_failed_in_front_of_a_paused_server_leaves_nothing() {
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
async fn an_acquire_that_failed_in_a_network_without_replies_leaves_nothing() {
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
async fn an_acquire_that_the_network_brings_late_leaves_nothing() {
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
        // Now all that was sent arrives, in whatever order.
        proxy.set(Way::Both, Flow::Pass);
        wait_until_settled(&client, &mut redis, &name).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_that_was_sent_twice_and_arrives_after_its_unlock_leaves_nothing() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick().connect(&proxy.url()).await.unwrap();
    let name = unique("stock");
    proxy.stall();
    // By the second connection: the first one's request is still on its way.
    let guard = timeout(SOON, client.lock(&name).lock())
        .await
        .expect("it hangs")
        .unwrap();
    guard.unlock().await.unwrap();
    assert!(!exists(&mut redis, &name));
    proxy.deliver();
    wait_until_settled(&client, &mut redis, &name).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unlock_that_was_sent_twice_and_arrives_late_takes_nothing_from_its_owners_next_hold() {
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
            .expect("it hangs")
            .unwrap();
        let second = lock.lock().await.unwrap();
        let holds = HashMap::from([(owner_field(&client, second.owner()), 1)]);
        assert_eq!(owner_counts(&mut redis, &name), holds);
        proxy.deliver();
        // What is delivered, arrives within milliseconds.
        let begun = Instant::now();
        while begun.elapsed() < ms(500) {
            assert_eq!(
                owner_counts(&mut redis, &name),
                holds,
                "the late unlock took the next hold"
            );
            sleep(ms(5)).await;
        }
        second.unlock().await.unwrap();
    })
    .await;
}

/// Waits until nothing is left of a failed acquire, with everything that was under way having
/// arrived.
async fn wait_until_settled(client: &LockClient, redis: &mut redis::Connection, name: &str) {
    timeout(SOON, client.lock(unique("probe")).is_locked())
        .await
        .expect("no answer")
        .unwrap();
    // What arrives, arrives within milliseconds of the server's return; it has to stay away, too.
    let mut free_since = None;
    wait_until("nothing is left of it", SOON, || {
        if exists(redis, name) {
            free_since = None;
            return false;
        }
        free_since.get_or_insert_with(Instant::now).elapsed() > ms(500)
    });
    assert_eq!(expired(redis), 0, "it ran out instead");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_waits_out_a_server_that_stands_still() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = quick().connect(&server.url()).await.unwrap();
    for _ in 0..3 {
        let name = unique("stock");
        server.pause();
        let waiter = waiting(&client, &name);
        // Long enough for the first connection to be given up.
        sleep(ms(700)).await;
        assert!(!waiter.is_finished());
        server.resume();
        let guard = served(waiter).await;
        assert_eq!(
            owner_counts(&mut redis, &name),
            HashMap::from([(owner_field(&client, guard.owner()), 1)])
        );
        guard.unlock().await.unwrap();
        assert!(!exists(&mut redis, &name));
    }
}

/// An acquire runs, its reply is lost with its connection, and the server refuses its repeats for
/// as long as the client tries. Nothing is known of the first one: "refused" would not be the whole
/// truth.
#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_of_the_repeats_does_not_hide_that_the_outcome_is_unknown() {
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
    // From now on the server refuses whatever writes.
    replicas_needed(&mut redis, 1);
    proxy.close_now();
    proxy.set(Way::Replies, Flow::Pass);
    let outcome = timeout(SOON, acquire).await.expect("it hangs").unwrap();
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
    wait_until_given_back(&mut redis, &name);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unlock_of_unknown_outcome_is_settled_later() {
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
    wait_until_given_back(&mut redis, &name);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guard_that_is_dropped_while_the_server_is_out_of_reach_is_given_back_later() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick().connect(&proxy.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    proxy.set(Way::Both, Flow::Hold);
    drop(guard);
    // Long enough for the first connection to be given up.
    sleep(ms(700)).await;
    proxy.set(Way::Both, Flow::Pass);
    wait_until_given_back(&mut redis, &name);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_without_a_network_disturbs_no_other() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let cut_off = quick()
        .retry_timeout(ms(1_000))
        .connect(&proxy.url())
        .await
        .unwrap();
    let healthy = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = cut_off.lock(unique("other")).lock().await.unwrap();
    proxy.set(Way::Both, Flow::Hold);
    let stuck = {
        let lock = cut_off.lock(&name);
        tokio::spawn(async move { lock.lock().await })
    };
    for _ in 0..100 {
        timeout(SOON, healthy.lock(&name).lock())
            .await
            .expect("it hangs")
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
    let outcome = timeout(SOON, stuck).await.expect("it hangs").unwrap();
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
        .expect("it hangs")
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_busy_with_a_script_is_waited_out() {
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
    let waiter = waiting(&client, &name);
    sleep(ms(300)).await;
    assert!(!waiter.is_finished());
    redis::cmd("SCRIPT").arg("KILL").exec(&mut redis).unwrap();
    let guard = served(waiter).await;
    assert!(
        info(&mut redis, "errorstats", "errorstat_BUSY:", "count=") > 1,
        "it was never told BUSY"
    );
    assert_eq!(
        owner_counts(&mut redis, &name),
        HashMap::from([(owner_field(&client, guard.owner()), 1)])
    );
    guard.unlock().await.unwrap();
    assert!(script.join().unwrap().contains("killed"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_loading_its_data_is_waited_out() {
    // Slow enough to be met while it loads: so many microseconds for each key, and it answers now
    // and then in between.
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
    let waiter = waiting(&client, &name);
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
    served(waiter).await.unlock().await.unwrap();
    let mut redis = server.connection();
    let refused = info(
        &mut redis,
        "commandstats",
        "cmdstat_evalsha:",
        "rejected_calls=",
    );
    assert!(refused > 0, "it was never told LOADING");
    assert!(!exists(&mut redis, &name));
}
