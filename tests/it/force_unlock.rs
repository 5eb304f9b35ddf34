//! A force unlock whose reply is lost: its repeat frees the tenure of no other owner, the owner
//! that lost the lock is notified, and the answer is true.

use std::time::Duration;

use crate::support::observe::{exists, sha1_of, subscribers};
use crate::support::proxy::{Fate, Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until};
use redisson_lock::{Error, LockClient, LockGuard, Owner, OwnerExt, Step};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

const SOON: Duration = Duration::from_secs(10);
/// Longer than any test.
const LEASE: Duration = Duration::from_secs(600);
/// The parts of the request that frees the lock: its script publishes the release there.
const FREEING_CALL: [&str; 2] = ["EVALSHA", "redisson_lock__channel"];

/// Spawns a waiter for the lock, and returns when it is subscribed.
fn spawn_next_waiter(
    client: &LockClient,
    name: &str,
    redis: &mut redis::Connection,
) -> JoinHandle<LockGuard> {
    let lock = client.lock(name);
    let next = tokio::spawn(async move { lock.lock().lease(LEASE).await.unwrap() });
    wait_until("the next waiter is subscribed", SOON, || {
        subscribers(redis, name) == 1
    });
    next
}

/// The repeat of a force unlock runs when the next owner holds the lock, and does not notify that
/// owner. If it freed the lock, two owners would be sure of it.
#[tokio::test(flavor = "multi_thread")]
async fn repeated_force_unlock_keeps_next_owner() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let builder = LockClient::builder().command_timeout(Duration::from_millis(500));
    let operator = builder.connect(&proxy.url()).await.unwrap();
    let others = LockClient::connect(&server.url()).await.unwrap();
    let third = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let _stale = others.lock(&name).lock().await.unwrap();
    let next = spawn_next_waiter(&others, &name, &mut redis);
    // The repeat is sent after the command timeout.
    proxy.next_reply_to(&FREEING_CALL, Fate::Swallow);
    let lock = operator.lock(&name);
    let forced = tokio::spawn(async move { lock.force_unlock().await });
    let guard = timeout(SOON, next)
        .await
        .expect("the first call freed the lock")
        .unwrap();
    assert!(exists(&mut redis, &name) && !guard.is_lost());
    let answer = timeout(SOON, forced)
        .await
        .expect("the call hangs")
        .unwrap();
    assert_eq!(proxy.applied(), 1);
    let rival = third.lock(&name).try_lock().await.unwrap();
    assert!(
        guard.is_lost() || rival.is_none(),
        "two owners are sure of the lock after one force unlock: {answer:?}"
    );
}

/// The next waiter belongs to the same client, and holds the lock between the force unlock and its
/// repeat. If the repeat freed that hold, only this client could notify its guard: a hold with a
/// lease is not renewed, so no renewal finds the loss.
#[tokio::test(flavor = "multi_thread")]
async fn force_unlock_notifies_owner_of_same_client_at_once() {
    const ROUNDS: usize = 40;
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    for _ in 0..ROUNDS {
        let name = unique("stock");
        let stale = client.lock(&name).lock().await.unwrap();
        let next = spawn_next_waiter(&client, &name, &mut redis);
        proxy.next_reply_to(&FREEING_CALL, Fate::Close);
        let answer = client.lock(&name).force_unlock().await;
        assert!(stale.is_lost(), "{answer:?}");
        let guard = timeout(SOON, next)
            .await
            .expect("the lock was freed")
            .unwrap();
        wait_until(
            "the guard holds the lock, or was notified",
            Duration::from_secs(1),
            || guard.is_lost() || exists(&mut redis, &name),
        );
    }
    assert_eq!(proxy.applied(), ROUNDS);
}

/// The repeat finds the lock free. The answer is still that the lock was held.
#[tokio::test(flavor = "multi_thread")]
async fn force_unlock_with_lost_reply_reports_that_it_freed() {
    for fate in [Fate::Swallow, Fate::Close] {
        let server = Server::start();
        let proxy = Proxy::start(&server).await;
        let builder = LockClient::builder().command_timeout(Duration::from_millis(300));
        let operator = builder.connect(&proxy.url()).await.unwrap();
        let other = LockClient::connect(&server.url()).await.unwrap();
        let name = unique("stock");
        let _stale = other.lock(&name).lock().await.unwrap();
        proxy.next_reply_to(&FREEING_CALL, fate);
        assert_eq!(
            operator.lock(&name).force_unlock().await,
            Ok(true),
            "the lock was held, and this call freed it"
        );
        assert_eq!(proxy.applied(), 1);
        assert!(!exists(&mut server.connection(), &name));
    }
}

/// The owner belongs to the same client, and locks again as soon as it is notified of the loss,
/// perhaps before the repeat. To the script its second tenure looks like the first.
#[tokio::test(flavor = "multi_thread")]
async fn repeated_force_unlock_keeps_later_tenure() {
    const ROUNDS: usize = 20;
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    let outside = LockClient::connect(&server.url()).await.unwrap();
    for round in 1..=ROUNDS {
        let lock = client.lock(unique("stock"));
        let name = lock.name().to_owned();
        let again = {
            let lock = lock.clone();
            let locks_twice = async move {
                // Each may be lost before its caller has it.
                match lock.lock().await {
                    Ok(first) => {
                        first.lost().await;
                    }
                    Err(error) => assert!(error.is_lost(), "{error:?}"),
                }
                lock.lock().await
            };
            tokio::spawn(locks_twice.with_owner(Owner::new()))
        };
        wait_until("the lock is held", SOON, || exists(&mut redis, &name));
        proxy.next_reply_to(&[sha1_of("force_unlock")], Fate::Close);
        let freed = lock.force_unlock().await;
        assert_eq!(proxy.applied(), round);
        let second = timeout(SOON, again).await.expect("the call hangs").unwrap();
        // No event shows that no request is in transit; one that is arrives within milliseconds.
        sleep(Duration::from_millis(50)).await;
        let rival = outside.lock(&name).try_lock().await.unwrap();
        let is_lost = match &second {
            Ok(second) => second.is_lost(),
            Err(error) => error.is_lost(),
        };
        assert!(
            is_lost || rival.is_none(),
            "two owners are sure of the lock in round {round}: {freed:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn force_unlock_without_inspect_reply_is_inspect_timeout() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let limit = Duration::from_millis(300);
    let client = LockClient::builder()
        .command_timeout(limit)
        .retry_timeout(limit)
        .connect(&proxy.url())
        .await
        .unwrap();
    proxy.set(Way::Both, Flow::Hold);
    let answer = client.lock(unique("stock")).force_unlock().await;
    assert!(
        matches!(
            answer,
            Err(Error::Timeout {
                step: Step::Inspect,
                ..
            })
        ),
        "{answer:?}"
    );
}
