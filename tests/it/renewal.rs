//! Renewals with a revoked permission or a stalled connection: only a lock that cannot be renewed
//! is lost.

use std::time::{Duration, Instant};

use crate::support::log::Log;
use crate::support::observe::scripts;
use crate::support::proxy::{Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until_async};
use redisson_lock::{LockClient, LockGuard};
use tokio::time::{sleep, timeout};
use tracing::Level;

const SOON: Duration = Duration::from_secs(10);

/// The watchdog timeout of the tests that stall a connection. The time that they leave for a new
/// one is a fixed part of it, and far longer than the delays of a busy machine.
const STALL_WATCHDOG: Duration = ms(9_000);

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// The server refuses a script if the user may not access one of its keys. The other locks of the
/// batch must not be lost with that one.
#[tokio::test(flavor = "multi_thread")]
async fn revoked_key_permission_loses_only_that_lock() {
    let server = Server::start();
    let mut redis = server.connection();
    let user = [
        "SETUSER", "app", "on", ">secret", "~app:*", "~tmp:*", "&*", "+@all",
    ];
    redis::cmd("ACL").arg(&user).exec(&mut redis).unwrap();
    let url = server.url().replace("redis://", "redis://app:secret@");
    let client = LockClient::builder()
        .watchdog_timeout(ms(1_500))
        .connect(&url)
        .await
        .unwrap();
    let mut guards = Vec::new();
    for _ in 0..5 {
        guards.push(client.lock(unique("app:stock")).lock().await.unwrap());
    }
    let revoked = client.lock(unique("tmp:stock")).lock().await.unwrap();
    redis::cmd("ACL")
        .arg(&["SETUSER", "app", "resetkeys", "~app:*"])
        .exec(&mut redis)
        .unwrap();
    timeout(SOON, revoked.lost())
        .await
        .expect("the lock is still renewed");
    // The other locks are older, so their leases would have expired by now.
    let lost = guards.iter().filter(|guard| guard.is_lost()).count();
    assert_eq!(lost, 0, "locks that the user may access were lost");
}

/// The network path of a connection fails, and another path replaces it: the server answers on any
/// new connection at once. A client that kept the old connection for the command timeout would lose
/// locks that it could renew.
#[tokio::test(flavor = "multi_thread")]
async fn stalled_connection_loses_no_lock() {
    const CLIENTS: u64 = 24;
    let server = Server::start();
    let mut clients = Vec::new();
    for number in 0..CLIENTS {
        let proxy = Proxy::start(&server).await;
        let client = LockClient::builder()
            .watchdog_timeout(STALL_WATCHDOG)
            .connect(&proxy.url())
            .await
            .unwrap();
        clients.push((number, proxy, client, Instant::now()));
    }
    let stalled = clients
        .into_iter()
        .map(|(number, proxy, client, connected)| {
            tokio::spawn(async move {
                // The client probes an idle connection every third of the watchdog timeout. Each
                // client has another time between the probe and the renewal.
                let phase = (connected.elapsed().as_millis() % 3_000) as u64;
                sleep(ms(3_000 - phase + 150 + 450 * (number % 6))).await;
                let guard = client.lock(unique("stock")).lock().await.unwrap();
                // The stall begins just before the first renewal.
                sleep(ms(2_700 - 120 * (number / 6))).await;
                proxy.stall();
                is_renewed(&guard).await
            })
        });
    let renewed: Vec<bool> = futures::future::join_all(stalled)
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    assert!(!renewed.contains(&false), "locks were lost: {renewed:?}");
}

/// The attempt to connect stalls, too: a middlebox accepted it and lost its state. A client that
/// waited for the connect timeout would lose the lock, although the network was cut for half a
/// lease only.
#[tokio::test(flavor = "multi_thread")]
async fn stalled_reconnect_loses_no_lock() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .watchdog_timeout(STALL_WATCHDOG)
        .connect(&proxy.url())
        .await
        .unwrap();
    let guard = client.lock(unique("stock")).lock().await.unwrap();
    assert!(is_renewed(&guard).await);
    let cut = Instant::now();
    proxy.set(Way::Both, Flow::Hold);
    // A call without a reply, so that the client closes the connection after three seconds.
    let probe = client.lock("probe");
    let probing = tokio::spawn(async move { probe.is_locked().await });
    sleep(STALL_WATCHDOG / 2).await;
    proxy.stall();
    proxy.set(Way::Both, Flow::Pass);
    // The network was cut for half of the lease. Now every new connection works.
    let fresh = LockClient::connect(&proxy.url()).await.unwrap();
    assert_eq!(fresh.lock("probe").is_locked().await, Ok(false));
    let cut_for = cut.elapsed();
    assert!(
        is_renewed(&guard).await,
        "the lock was lost after a cut of {cut_for:?}, with a lease of {STALL_WATCHDOG:?}"
    );
    assert_eq!(
        timeout(SOON, probing)
            .await
            .expect("the probe hangs")
            .unwrap(),
        Ok(false)
    );
}

/// Waits until the lock is renewed or lost.
async fn is_renewed(guard: &LockGuard) -> bool {
    let mut left = guard.remaining_lease();
    wait_until_async("the lock is renewed or lost", 2 * SOON, || {
        let before = std::mem::replace(&mut left, guard.remaining_lease());
        std::future::ready(guard.is_lost() || left > before)
    })
    .await;
    !guard.is_lost()
}

/// A server that lacks replicas, or that cannot save its data, refuses each write. That concerns no
/// single lock: batches stay batches, and one warning is enough.
async fn assert_one_outage(
    server: &Server,
    begin: impl FnOnce(&mut redis::Connection),
    end: &[&str],
) {
    const LOCKS: usize = 300;
    let mut redis = server.connection();
    let log = Log::capture();
    let client = LockClient::builder()
        .watchdog_timeout(STALL_WATCHDOG)
        .connect(&server.url())
        .await
        .unwrap();
    let mut guards = Vec::new();
    for _ in 0..LOCKS {
        guards.push(client.lock(unique("stock")).lock().await.unwrap());
    }
    begin(&mut redis);
    let outages = || log.with("renewals get no reply").len();
    wait_until_async("the outage is reported", SOON, || async { outages() > 0 }).await;
    let before = scripts(&mut redis);
    sleep(ms(1_000)).await;
    let calls = scripts(&mut redis) - before;
    redis::cmd("CONFIG")
        .arg("SET")
        .arg(end)
        .exec(&mut redis)
        .unwrap();
    wait_until_async("the end of the outage is reported", SOON, || async {
        !log.with("renewals get replies again").is_empty()
    })
    .await;
    // Three batches each 300 ms; one call for each lock would be 100 times as many.
    assert!(calls < 60, "{calls} script calls in a second");
    assert_eq!(outages(), 1);
    assert_eq!(
        log.from(Level::WARN).len(),
        1,
        "{:?}",
        log.from(Level::WARN)
    );
    let lost = guards.iter().filter(|guard| guard.is_lost()).count();
    assert_eq!(lost, 0);
    drop(guards);
    client.shutdown().await.unwrap();
}

#[tokio::test]
async fn missing_replicas_are_one_outage() {
    let server = Server::start();
    let begin = |redis: &mut redis::Connection| {
        let setting = ["SET", "min-replicas-to-write", "1"];
        redis::cmd("CONFIG").arg(&setting).exec(redis).unwrap();
    };
    assert_one_outage(&server, begin, &["min-replicas-to-write", "0"]).await;
}

#[tokio::test]
async fn failed_snapshot_is_one_outage() {
    let server = Server::start();
    let begin = |redis: &mut redis::Connection| {
        let mut setting = |name: &str| -> String {
            let (_, value): (String, String) = redis::cmd("CONFIG")
                .arg(&["GET", name])
                .query(redis)
                .unwrap();
            value
        };
        // A folder of its name is in the way of the snapshot.
        let path = format!("{}/{}", setting("dir"), setting("dbfilename"));
        std::fs::create_dir(path).unwrap();
        let settings = [
            "SET",
            "save",
            "3600 100000",
            "stop-writes-on-bgsave-error",
            "yes",
        ];
        redis::cmd("CONFIG").arg(&settings).exec(redis).unwrap();
        redis::cmd("BGSAVE").exec(redis).unwrap();
    };
    assert_one_outage(&server, begin, &["stop-writes-on-bgsave-error", "no"]).await;
}
