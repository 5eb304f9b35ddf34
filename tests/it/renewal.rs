//! Renewals when something is wrong: only what cannot be renewed is lost.

use std::time::{Duration, Instant};

use crate::support::proxy::{Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until_async};
use redisson_lock::{LockClient, LockGuard};
use tokio::time::{sleep, timeout};

const SOON: Duration = Duration::from_secs(10);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// The server refuses a script as a whole, whichever of its keys it may not touch: the others of a
/// batch must not go down with that one.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_whose_rights_are_taken_away_loses_only_itself() {
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
    let spoilt = client.lock(unique("tmp:stock")).lock().await.unwrap();
    redis::cmd("ACL")
        .arg(&["SETUSER", "app", "resetkeys", "~app:*"])
        .exec(&mut redis)
        .unwrap();
    timeout(SOON, spoilt.lost())
        .await
        .expect("nobody renews it");
    // The others are older, and have got beyond the same time.
    let lost = guards.iter().filter(|guard| guard.is_lost()).count();
    assert_eq!(
        lost, 0,
        "locks were lost that the server would have renewed"
    );
}

/// The path of a connection fails, and another takes over: the server answers on any new connection
/// at once. A client that stuck to the old one for as long as a command may take would lose locks
/// that it could renew.
#[tokio::test(flavor = "multi_thread")]
async fn one_connection_that_stands_still_loses_no_lock() {
    const PARTIES: u64 = 24;
    let server = Server::start();
    let mut parties = Vec::new();
    for number in 0..PARTIES {
        let proxy = Proxy::start(&server).await;
        let client = LockClient::builder()
            .watchdog_timeout(ms(3_000))
            .connect(&proxy.url())
            .await
            .unwrap();
        parties.push((number, proxy, client, Instant::now()));
    }
    let stalled = parties.into_iter().map(|(number, proxy, client, born)| {
        tokio::spawn(async move {
            // An idle connection is tried out every second: the time between that and the renewals
            // varies.
            let phase = (born.elapsed().as_millis() % 1_000) as u64;
            sleep(ms(1_000 - phase + 50 + 150 * (number % 6))).await;
            let guard = client.lock(unique("stock")).lock().await.unwrap();
            // Until just before the first renewal.
            sleep(ms(900 - 40 * (number / 6))).await;
            proxy.stall();
            is_renewed(&guard).await
        })
    });
    let renewed: Vec<bool> = futures::future::join_all(stalled)
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    assert!(!renewed.contains(&false), "renewed, not lost: {renewed:?}");
}

/// The attempt to connect stands still, too: something in between accepted it and lost its state.
/// If it were waited for as long as a connection may take, a cut of half a lease would cost the
/// whole of it.
#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_to_connect_that_stands_still_loses_no_lock() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .watchdog_timeout(ms(3_000))
        .connect(&proxy.url())
        .await
        .unwrap();
    let guard = client.lock(unique("stock")).lock().await.unwrap();
    assert!(is_renewed(&guard).await);
    let cut = Instant::now();
    proxy.set(Way::Both, Flow::Hold);
    // Something to be without an answer, so that the connection is given up after a second.
    let probe = client.lock("probe");
    let probing = tokio::spawn(async move { probe.is_locked().await });
    sleep(ms(1_500)).await;
    proxy.stall();
    proxy.set(Way::Both, Flow::Pass);
    // Half of the lease was cut off. Now every new connection works.
    let fresh = LockClient::connect(&proxy.url()).await.unwrap();
    assert_eq!(fresh.lock("probe").is_locked().await, Ok(false));
    let back = cut.elapsed();
    assert!(
        is_renewed(&guard).await,
        "lost, although cut off for {back:?} only of a lease of 3 s"
    );
    assert_eq!(
        timeout(SOON, probing).await.expect("it hangs").unwrap(),
        Ok(false)
    );
}

/// Waits until the lock is renewed or lost.
async fn is_renewed(guard: &LockGuard) -> bool {
    let mut left = guard.remaining_lease();
    wait_until_async("it is renewed or lost", SOON, || {
        let before = std::mem::replace(&mut left, guard.remaining_lease());
        std::future::ready(guard.is_lost() || left > before)
    })
    .await;
    !guard.is_lost()
}
