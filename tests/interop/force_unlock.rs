//! Force unlocks between Java and this library: the former owner's unlock leaves the new owner's
//! lock, and the release message wakes the waiters of the other side.

use std::time::Duration;

use crate::support::java::{Options, Peer, PeerClient, VERSIONS};
use crate::support::server::{Server, wait_until};
use redisson_lock::{Error, LockClient};

const SOON: Duration = Duration::from_secs(10);

/// The newest Redisson; `None` where Java or Maven is missing, which is a failure in CI.
async fn java(server: &Server) -> Option<(Peer, PeerClient)> {
    match Peer::start(VERSIONS[0]).await {
        Ok(peer) => {
            let client = peer
                .client("c", &server.url(), Options::default())
                .await
                .unwrap();
            Some((peer, client))
        }
        Err(skip) => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "{}", skip.0);
            eprintln!("{}", skip.0);
            None
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unlock_of_unaware_guard_keeps_javas_lock() {
    let server = Server::start();
    let Some((_peer, client)) = java(&server).await else {
        return;
    };
    let java = client.thread("t");
    let rust = LockClient::connect(&server.url()).await.unwrap();
    let guard = rust.lock("x").lock().await.unwrap();
    assert!(java.force_unlock("x").await.unwrap());
    assert!(java.try_lock("x", Duration::ZERO, None).await.unwrap());
    assert!(!guard.is_lost(), "the next renewal is due only in 10 s");
    let unlocked = guard.unlock().await;
    assert!(
        java.is_held("x").await.unwrap(),
        "the unlock released Java's lock"
    );
    assert!(matches!(unlocked, Err(Error::Lost { .. })), "{unlocked:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn force_unlock_wakes_waiter_of_other_side() {
    let server = Server::start();
    let Some((_peer, client)) = java(&server).await else {
        return;
    };
    let (a, b) = (client.thread("a"), client.thread("b"));
    let rust = LockClient::builder()
        .recheck_interval(Duration::from_secs(3600))
        .connect(&server.url())
        .await
        .unwrap();
    let mut redis = server.connection();
    let mut subscribers = || {
        let (_, subscribers): (String, u64) = redis::cmd("PUBSUB")
            .arg("NUMSUB")
            .arg("redisson_lock__channel:{x}")
            .query(&mut redis)
            .unwrap();
        subscribers
    };
    a.lock("x").await.unwrap();
    let waiting = tokio::spawn(async move { b.lock("x").await });
    wait_until("Java is subscribed", SOON, || subscribers() == 1);
    assert!(rust.lock("x").force_unlock().await.unwrap());
    // The limit is far below the lease of 30 s, so only the message can wake the waiter.
    tokio::time::timeout(SOON, waiting)
        .await
        .expect("the Java waiter was not woken")
        .unwrap()
        .unwrap();
    wait_until("Java is unsubscribed", SOON, || subscribers() == 0);
    let waiting = tokio::spawn({
        let lock = rust.lock("x");
        async move { lock.lock().await }
    });
    wait_until("the Rust waiter is subscribed", SOON, || subscribers() == 1);
    assert!(a.force_unlock("x").await.unwrap());
    let guard = tokio::time::timeout(SOON, waiting)
        .await
        .expect("the Rust waiter was not woken")
        .unwrap()
        .unwrap();
    guard.unlock().await.unwrap();
}
