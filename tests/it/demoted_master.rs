//! A planned fail-over behind one address: the demoted master answers READONLY, and is left.

use std::time::{Duration, Instant};

use redis::{Connection, cmd};
use redisson_lock::LockClient;

use crate::support::observe::{exists, pttl, rival, subscribers};
use crate::support::proxy::Proxy;
use crate::support::server::{Server, unique, wait_until};

const SOON: Duration = Duration::from_secs(20);
const WATCHDOG: Duration = Duration::from_secs(3);

fn replicate(replica: &mut Connection, master: Option<&Server>) {
    let (host, port) = match master {
        Some(server) => ("127.0.0.1".to_owned(), server.port().to_string()),
        None => ("NO".to_owned(), "ONE".to_owned()),
    };
    cmd("REPLICAOF").arg(host).arg(port).exec(replica).unwrap();
}

fn has_link(replica: &mut Connection) -> bool {
    let info: String = cmd("INFO").arg("replication").query(replica).unwrap();
    info.contains("master_link_status:up")
}

#[tokio::test(flavor = "multi_thread")]
async fn demoted_master_behind_one_address_is_left_and_locks_are_kept() {
    let (old, new) = (Server::start(), Server::start());
    let (mut at_old, mut at_new) = (old.connection(), new.connection());
    replicate(&mut at_new, Some(&old));
    wait_until("the replica is in sync", 3 * SOON, || has_link(&mut at_new));
    let proxy = Proxy::start(&old).await;
    let builder = LockClient::builder().watchdog_timeout(WATCHDOG);
    let client = builder.connect(&proxy.url()).await.unwrap();
    let held = client.lock(unique("held")).lock().await.unwrap();
    let waited = client.lock(unique("waited")).lock().await.unwrap();
    let waiter = rival(&client, waited.name());
    wait_until("the locks are replicated", SOON, || {
        exists(&mut at_new, held.name())
            && exists(&mut at_new, waited.name())
            && subscribers(&mut at_old, waited.name()) == 1
    });

    replicate(&mut at_new, None);
    replicate(&mut at_old, Some(&new));
    proxy.retarget(&new);

    let free = client.lock(unique("free"));
    free.run(async {}).await.unwrap();
    wait_until("the waiter has subscribed at the new master", SOON, || {
        subscribers(&mut at_new, waited.name()) == 1
    });
    let begun = Instant::now();
    while begun.elapsed() < 2 * WATCHDOG {
        assert!(!held.is_lost() && !waited.is_lost());
        assert!(pttl(&mut at_new, held.name()) > 0);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    waited.unlock().await.unwrap();
    let (_, granted) = tokio::time::timeout(SOON, waiter)
        .await
        .expect("the waiter is granted")
        .unwrap();
    granted.unlock().await.unwrap();
    held.unlock().await.unwrap();
    assert_eq!(client.stats().losses.total(), 0);
}
