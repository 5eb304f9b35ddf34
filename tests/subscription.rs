//! "A channel is subscribed while somebody waits and not longer." (issue, 4)

mod support;

use std::time::Duration;

use redisson_lock::LockClient;
use support::server::{Server, unique};
use tokio::time::{sleep, timeout};

fn ms(m: u64) -> Duration {
    Duration::from_millis(m)
}

/// The listening connection is killed just before somebody begins to wait, for a short while.
#[tokio::test(flavor = "multi_thread")]
async fn no_subscription_stays_when_the_listening_connection_was_killed_just_before() {
    let server = Server::start();
    let mut redis = server.connection();
    let holder = LockClient::connect(&server.url()).await.unwrap();
    let client_list = |redis: &mut redis::Connection| -> Vec<String> {
        let list: String = redis::cmd("CLIENT").arg("LIST").query(redis).unwrap();
        list.lines().map(|line| line.split(' ').next().unwrap()[3..].to_owned()).collect()
    };
    let mut left = Vec::new();
    for round in 0..6 {
        let before = client_list(&mut redis);
        let client = LockClient::connect(&server.url()).await.unwrap();
        let listening = client_list(&mut redis).into_iter().rfind(|id| !before.contains(id)).unwrap();
        let lock = unique("adv");
        let guard = holder.lock(&lock).lock().await.unwrap();
        // Loaded scripts, warm connection.
        assert!(client.lock(&lock).try_lock().await.unwrap().is_none());
        let _: i64 = redis::cmd("CLIENT").arg("KILL").arg("ID").arg(listening).query(&mut redis).unwrap();
        let _ = timeout(ms(40 + 5 * (round % 4)), client.lock(&lock).lock()).await;
        guard.unlock().await.unwrap();
        sleep(ms(1500)).await;
        let channels: Vec<String> = redis::cmd("PUBSUB").arg("CHANNELS").query(&mut redis).unwrap();
        if !channels.is_empty() {
            sleep(ms(5000)).await;
            let channels: Vec<String> = redis::cmd("PUBSUB").arg("CHANNELS").query(&mut redis).unwrap();
            left.push((round, channels));
            break;
        }
        client.shutdown().await.unwrap();
    }
    assert!(left.is_empty(), "nobody waits; subscribed 6 s later: {left:?}");
}
