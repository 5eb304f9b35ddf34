//! A channel is subscribed while somebody waits, and not longer.

mod support;

use std::time::Duration;

use redisson_lock::LockClient;
use support::observe::channels;
use support::server::{Server, unique, wait_until};
use tokio::time::{sleep, timeout};

fn ms(m: u64) -> Duration {
    Duration::from_millis(m)
}

/// The ids of all connections, in the order in which they were made.
fn connections(redis: &mut redis::Connection) -> Vec<String> {
    let list: String = redis::cmd("CLIENT").arg("LIST").query(redis).unwrap();
    list.lines().map(|line| line.split(' ').next().unwrap()["id=".len()..].to_owned()).collect()
}

/// The listening connection is killed just before somebody begins to wait, for a short while: about as long as it takes
/// to connect again, so that the waiter comes and goes before, while and after the new connection is made.
#[tokio::test(flavor = "multi_thread")]
async fn no_subscription_stays_when_the_listening_connection_was_killed_just_before() {
    let server = Server::start();
    let mut redis = server.connection();
    let holder = LockClient::connect(&server.url()).await.unwrap();
    for round in 0..6 {
        let before = connections(&mut redis);
        let client = LockClient::connect(&server.url()).await.unwrap();
        let listening = connections(&mut redis).into_iter().rfind(|id| !before.contains(id)).unwrap();
        let lock = unique("stock");
        let guard = holder.lock(&lock).lock().await.unwrap();
        assert!(client.lock(&lock).try_lock().await.unwrap().is_none(), "the test's own condition");
        let killed: u64 = redis::cmd("CLIENT").arg("KILL").arg("ID").arg(listening).query(&mut redis).unwrap();
        assert_eq!(killed, 1);
        let _ = timeout(ms(40 + 5 * (round % 4)), client.lock(&lock).lock()).await;
        guard.unlock().await.unwrap();
        // What is looked for is a subscription that comes late, and that none comes is no event: only time tells.
        sleep(ms(1_500)).await;
        wait_until("nobody waits, and nothing is subscribed", ms(5_000), || channels(&mut redis) == 0);
        client.shutdown().await.unwrap();
    }
}
