//! Subscriptions to the release channel: one exists while a request waits, and not longer.

use std::time::Duration;

use crate::support::observe::{channels, info, rival, scripts, subscribers};
use crate::support::proxy::{Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until};
use redisson_lock::LockClient;
use tokio::time::{sleep, timeout};

const SOON: Duration = Duration::from_secs(20);

fn ms(m: u64) -> Duration {
    Duration::from_millis(m)
}

/// The ids of all connections, in the order in which they were made.
fn connections(redis: &mut redis::Connection) -> Vec<String> {
    let list: String = redis::cmd("CLIENT").arg("LIST").query(redis).unwrap();
    list.lines()
        .map(|line| line.split(' ').next().unwrap()["id=".len()..].to_owned())
        .collect()
}

/// The lock stays known to the client, because another owner of it holds the lock.
#[tokio::test]
async fn timed_out_request_behind_own_client_leaves_no_subscription() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    let waited = lock.try_lock_for(ms(1_000)).await.unwrap();
    assert!(waited.is_none());
    wait_until("no channel is subscribed", SOON, || {
        channels(&mut redis) == 0
    });
    guard.unlock().await.unwrap();
}

/// The connection for wake-ups is killed just before a request begins to wait. The wait is about as
/// short as the time to connect again, so that it ends before, while or after the new connection is
/// opened.
#[tokio::test(flavor = "multi_thread")]
async fn wait_after_killed_pubsub_connection_leaves_no_subscription() {
    let server = Server::start();
    let mut redis = server.connection();
    let owner = LockClient::connect(&server.url()).await.unwrap();
    for round in 0..6 {
        let before = connections(&mut redis);
        let client = LockClient::connect(&server.url()).await.unwrap();
        let pubsub = connections(&mut redis)
            .into_iter()
            .rfind(|id| !before.contains(id))
            .unwrap();
        let lock = unique("stock");
        let guard = owner.lock(&lock).lock().await.unwrap();
        assert!(
            client.lock(&lock).try_lock().await.unwrap().is_none(),
            "the test needs a held lock"
        );
        let killed: u64 = redis::cmd("CLIENT")
            .arg("KILL")
            .arg("ID")
            .arg(pubsub)
            .query(&mut redis)
            .unwrap();
        assert_eq!(killed, 1);
        let _ = timeout(ms(40 + 5 * (round % 4)), client.lock(&lock).lock()).await;
        guard.unlock().await.unwrap();
        // A late subscription would be the error. That none arrives is no event, so the test can
        // only let time pass.
        sleep(ms(1_500)).await;
        wait_until("no channel is subscribed", ms(5_000), || {
            channels(&mut redis) == 0
        });
        client.shutdown().await.unwrap();
    }
}

/// While a script runs for long, the server refuses SUBSCRIBE and PUBSUB.
#[tokio::test(flavor = "multi_thread")]
async fn subscription_refused_by_busy_server_is_made_later() {
    let server = Server::start();
    let mut redis = server.connection();
    redis::cmd("CONFIG")
        .arg(&["SET", "lua-time-limit", "20"])
        .exec(&mut redis)
        .unwrap();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .recheck_interval(ms(60_000))
        .connect(&proxy.url())
        .await
        .unwrap();
    let lock = unique("stock");
    let guard = LockClient::connect(&server.url())
        .await
        .unwrap()
        .lock(&lock)
        .lock()
        .await
        .unwrap();
    // When the server becomes busy, the waiter knows that the lock is held, and its subscription is
    // still on its way.
    let before = scripts(&mut redis);
    proxy.set(Way::Replies, Flow::Hold);
    let waiter = rival(&client, &lock);
    wait_until("the first attempt has run", SOON, || {
        scripts(&mut redis) > before
    });
    proxy.set(Way::Requests, Flow::Hold);
    proxy.set(Way::Replies, Flow::Pass);
    let mut stuck = server.connection();
    let script = std::thread::spawn(move || {
        redis::cmd("EVAL")
            .arg("while true do end")
            .arg(0)
            .exec(&mut stuck)
    });
    wait_until("the server is busy", SOON, || {
        redis::cmd("PING")
            .exec(&mut redis)
            .is_err_and(|error| error.code() == Some("BUSY"))
    });
    let refused = proxy.refused();
    proxy.set(Way::Requests, Flow::Pass);
    wait_until("a command of the client is refused", SOON, || {
        proxy.refused() > refused
    });
    redis::cmd("SCRIPT").arg("KILL").exec(&mut redis).unwrap();
    script.join().unwrap().unwrap_err();
    wait_until("the waiter is subscribed", SOON, || {
        subscribers(&mut redis, &lock) == 1
    });
    guard.unlock().await.unwrap();
    timeout(SOON, waiter)
        .await
        .expect("no wake-up before the re-check")
        .unwrap()
        .1
        .unlock()
        .await
        .unwrap();
}

/// The user gets the permission to subscribe while the request waits.
#[tokio::test(flavor = "multi_thread")]
async fn refused_subscription_is_made_once_permitted() {
    let server = Server::start();
    let mut redis = server.connection();
    let mut user = |rules: &[&str]| {
        redis::cmd("ACL")
            .arg("SETUSER")
            .arg("worker")
            .arg(rules)
            .exec(&mut redis)
            .unwrap()
    };
    user(&["on", ">secret", "allkeys", "+@all", "resetchannels"]);
    let url = server.url().replace("redis://", "redis://worker:secret@");
    let client = LockClient::builder()
        .recheck_interval(ms(60_000))
        .command_timeout(ms(500))
        .connect(&url)
        .await
        .unwrap();
    let lock = unique("stock");
    let guard = LockClient::connect(&server.url())
        .await
        .unwrap()
        .lock(&lock)
        .lock()
        .await
        .unwrap();
    let waiter = rival(&client, &lock);
    let mut other = server.connection();
    wait_until("the subscription is refused", SOON, || {
        let log: Vec<redis::Value> = redis::cmd("ACL").arg("LOG").query(&mut other).unwrap();
        !log.is_empty()
    });
    user(&["allchannels"]);
    wait_until("the waiter is subscribed", SOON, || {
        subscribers(&mut other, &lock) == 1
    });
    guard.unlock().await.unwrap();
    timeout(SOON, waiter)
        .await
        .expect("no wake-up before the re-check")
        .unwrap()
        .1
        .unlock()
        .await
        .unwrap();
}

/// One command and one confirmation for all that wait for one.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_over_slow_link_are_subscribed_with_few_commands() {
    const LOCKS: usize = 200;
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let owner = LockClient::connect(&server.url()).await.unwrap();
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    let names: Vec<_> = (0..LOCKS).map(|_| unique("stock")).collect();
    let mut guards = Vec::new();
    for name in &names {
        guards.push(owner.lock(name).lock().lease(SOON * 10).await.unwrap());
    }
    proxy.set(Way::Both, Flow::Delay(ms(20)));
    let begun = std::time::Instant::now();
    let waiters: Vec<_> = names.iter().map(|name| rival(&client, name)).collect();
    wait_until("all are subscribed", SOON, || channels(&mut redis) == LOCKS);
    let took = begun.elapsed();
    assert!(took < ms(3_000), "{took:?}");
    let commands = info(&mut redis, "commandstats", "cmdstat_subscribe:", "calls=");
    assert!(commands <= 10, "{commands} SUBSCRIBE");
    // Each confirmed subscription is followed by one attempt; none of them sleeps before it.
    sleep(ms(1_000)).await;
    let released = std::time::Instant::now();
    drop(guards);
    for waiter in waiters {
        let (_, guard) = timeout(SOON, waiter).await.expect("a grant").unwrap();
        drop(guard);
    }
    let took = released.elapsed();
    assert!(took < ms(5_000), "{took:?}");
}

/// Each connection that is given up while it is slow would be one more, and one more wake-up of
/// each waiter.
#[tokio::test(flavor = "multi_thread")]
async fn lost_connection_for_messages_is_replaced_once_over_slow_link() {
    const LOCKS: usize = 20;
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let owner = LockClient::connect(&server.url()).await.unwrap();
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    let names: Vec<_> = (0..LOCKS).map(|_| unique("stock")).collect();
    let mut guards = Vec::new();
    for name in &names {
        guards.push(owner.lock(name).lock().lease(SOON * 10).await.unwrap());
    }
    let waiters: Vec<_> = names.iter().map(|name| rival(&client, name)).collect();
    wait_until("all are subscribed", SOON, || channels(&mut redis) == LOCKS);
    proxy.set(Way::Both, Flow::Delay(ms(40)));
    // What the confirmations caused is over.
    sleep(ms(1_000)).await;
    let connected =
        |redis: &mut redis::Connection| info(redis, "stats", "total_connections_received:", "");
    let (connections, calls) = (connected(&mut redis), scripts(&mut redis));
    redis::cmd("CLIENT")
        .arg(&["KILL", "TYPE", "pubsub"])
        .exec(&mut redis)
        .unwrap();
    wait_until("all are subscribed again", SOON, || {
        channels(&mut redis) == LOCKS
    });
    sleep(ms(1_500)).await;
    let connections = connected(&mut redis) - connections;
    assert!(connections <= 2, "{connections} new connections");
    let calls = scripts(&mut redis) - calls;
    // One for the interruption, one for the confirmation.
    assert!(
        calls <= 3 * LOCKS as u64,
        "{calls} script calls for {LOCKS} waiters"
    );
    drop(guards);
    for waiter in waiters {
        drop(timeout(SOON, waiter).await.expect("a grant").unwrap());
    }
}

/// The next waiter often comes soon, so a subscription is kept for a moment.
#[tokio::test(flavor = "multi_thread")]
async fn channel_is_kept_between_waiters() {
    const ROUNDS: u64 = 40;
    let server = Server::start();
    let mut redis = server.connection();
    let one = LockClient::connect(&server.url()).await.unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let mut guard = one.lock(&name).lock().await.unwrap();
    for round in 0..ROUNDS {
        let client = if round % 2 == 0 { &other } else { &one };
        let before = scripts(&mut redis);
        let waiter = rival(client, &name);
        wait_until("the rival has asked", SOON, || scripts(&mut redis) > before);
        guard.unlock().await.unwrap();
        guard = timeout(SOON, waiter).await.expect("a grant").unwrap().1;
    }
    guard.unlock().await.unwrap();
    let commands = info(&mut redis, "commandstats", "cmdstat_subscribe:", "calls=");
    // On a busy machine a round may take longer than the channel is kept.
    assert!(
        commands < ROUNDS / 2,
        "{commands} SUBSCRIBE in {ROUNDS} rounds"
    );
    wait_until("no channel is subscribed", SOON, || {
        channels(&mut redis) == 0
    });
}
