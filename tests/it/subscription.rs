//! A channel is subscribed while somebody waits, and not longer.

use std::time::Duration;

use crate::support::observe::{channels, rival, scripts, subscribers};
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

/// The listening connection is killed just before somebody begins to wait, for a short while: about
/// as long as it takes to connect again, so that the waiter comes and goes before, while and after
/// the new connection is made.
#[tokio::test(flavor = "multi_thread")]
async fn no_subscription_stays_when_the_listening_connection_was_killed_just_before() {
    let server = Server::start();
    let mut redis = server.connection();
    let owner = LockClient::connect(&server.url()).await.unwrap();
    for round in 0..6 {
        let before = connections(&mut redis);
        let client = LockClient::connect(&server.url()).await.unwrap();
        let listening = connections(&mut redis)
            .into_iter()
            .rfind(|id| !before.contains(id))
            .unwrap();
        let lock = unique("stock");
        let guard = owner.lock(&lock).lock().await.unwrap();
        assert!(
            client.lock(&lock).try_lock().await.unwrap().is_none(),
            "the test's own condition"
        );
        let killed: u64 = redis::cmd("CLIENT")
            .arg("KILL")
            .arg("ID")
            .arg(listening)
            .query(&mut redis)
            .unwrap();
        assert_eq!(killed, 1);
        let _ = timeout(ms(40 + 5 * (round % 4)), client.lock(&lock).lock()).await;
        guard.unlock().await.unwrap();
        // What is looked for is a subscription that comes late, and that none comes is no event:
        // only time tells.
        sleep(ms(1_500)).await;
        wait_until("nobody waits, and nothing is subscribed", ms(5_000), || {
            channels(&mut redis) == 0
        });
        client.shutdown().await.unwrap();
    }
}

/// While a script runs for long the server refuses SUBSCRIBE, and also to say what is subscribed.
#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_that_a_busy_server_refused_is_made_later() {
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
    // The waiter is told that the lock is held, and its subscription is on its way, when the server
    // becomes busy.
    let before = scripts(&mut redis);
    proxy.set(Way::Replies, Flow::Hold);
    let waiter = rival(&client, &lock);
    wait_until("it has asked", SOON, || scripts(&mut redis) > before);
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
    let told = proxy.refused();
    proxy.set(Way::Requests, Flow::Pass);
    wait_until("something of the client's was refused", SOON, || {
        proxy.refused() > told
    });
    redis::cmd("SCRIPT").arg("KILL").exec(&mut redis).unwrap();
    script.join().unwrap().unwrap_err();
    wait_until("it listens", SOON, || subscribers(&mut redis, &lock) == 1);
    guard.unlock().await.unwrap();
    timeout(SOON, waiter)
        .await
        .expect("it sleeps to its re-check")
        .unwrap()
        .1
        .unlock()
        .await
        .unwrap();
}

/// A right that comes back is found out while somebody waits.
#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_that_was_refused_is_made_when_the_right_to_it_is_given() {
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
    wait_until("it was refused", SOON, || {
        let log: Vec<redis::Value> = redis::cmd("ACL").arg("LOG").query(&mut other).unwrap();
        !log.is_empty()
    });
    user(&["allchannels"]);
    wait_until("it listens", SOON, || subscribers(&mut other, &lock) == 1);
    guard.unlock().await.unwrap();
    timeout(SOON, waiter)
        .await
        .expect("it sleeps to its re-check")
        .unwrap()
        .1
        .unlock()
        .await
        .unwrap();
}
