//! Code that was ported line by line from Java: it locks and unlocks by hand, and its helpers lock
//! again.

use std::time::Duration;

use redisson_lock::{DeadlockDetection, Error, LockClient, Owner, OwnerExt, OwnerPolicy};

use crate::support::observe::{channels, exists};
use crate::support::server::{Server, unique};

/// `lock.lock(); try { helper(); } finally { lock.unlock(); }`. Returns the helper's hold count.
async fn literal_port(client: &LockClient, name: &str) -> Result<u64, Error> {
    let lock = client.lock(name);
    let _owner = lock.lock().await?.detach();
    let outcome = helper(client, name).await;
    lock.unlock().await?;
    outcome
}

/// Locks again what its caller holds.
async fn helper(client: &LockClient, name: &str) -> Result<u64, Error> {
    let lock = client.lock(name);
    let owner = lock.lock().await?.detach();
    let holds = lock.hold_count_of(owner).await;
    lock.unlock().await?;
    holds
}

#[tokio::test]
async fn literal_port_per_task_reenters_and_leaves_nothing() {
    let server = Server::start();
    let builder = LockClient::builder().owner_policy(OwnerPolicy::PerTask);
    let client = builder.connect(&server.url()).await.unwrap();
    let name = unique("order");
    assert_eq!(literal_port(&client, &name).await, Ok(2));
    let mut redis = server.connection();
    assert!(!exists(&mut redis, &name));
    assert_eq!(channels(&mut redis), 0);
    assert_eq!(client.stats().locks_held, 0);
}

#[tokio::test]
async fn literal_port_in_a_scope_reenters_and_leaves_nothing() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("order");
    let holds = Owner::scope(literal_port(&client, &name)).await;
    assert_eq!(holds, Ok(2));
    let mut redis = server.connection();
    assert!(!exists(&mut redis, &name));
    assert_eq!(channels(&mut redis), 0);
    assert_eq!(client.stats().locks_held, 0);
}

#[tokio::test]
async fn detach_under_the_default_policy_returns_the_owner_that_unlocks() {
    let server = Server::shared_or_start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("order"));
    let owner = lock.lock().await.unwrap().detach();
    let outside = lock.unlock().await;
    assert!(matches!(outside, Err(Error::NotHeld { .. })), "{outside:?}");
    assert_eq!(lock.is_held_by(owner).await, Ok(true));
    lock.unlock().with_owner(owner).await.unwrap();
    assert_eq!(lock.inspect().await, Ok(None));
}

#[tokio::test]
async fn second_lock_outside_any_scope_fails_with_would_deadlock() {
    let server = Server::shared_or_start();
    let client = LockClient::builder()
        .deadlock_detection(DeadlockDetection::Fail)
        .connect(&server.url())
        .await
        .unwrap();
    let name = unique("order");
    let lock = client.lock(&name);
    let owner = lock.lock().await.unwrap().detach();
    let ported = tokio::time::timeout(Duration::from_secs(10), helper(&client, &name));
    match ported.await.expect("it waits for itself") {
        Err(Error::WouldDeadlock { owner: held_by, .. }) => assert_eq!(held_by, owner),
        other => panic!("{other:?}"),
    }
    lock.unlock().with_owner(owner).await.unwrap();
    assert_eq!(lock.inspect().await, Ok(None));
}

#[tokio::test]
async fn owner_that_was_dropped_is_found_by_inspect_and_unlocks() {
    let server = Server::shared_or_start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("order"));
    let _ = lock.lock().await.unwrap().detach();
    let info = lock.inspect().await.unwrap().expect("the lock is held");
    let owner = info.local_owner.expect("by an owner of this client");
    lock.unlock().with_owner(owner).await.unwrap();
    assert_eq!(lock.inspect().await, Ok(None));
}

/// A hold that is lost before it is detached is reported to the unlock as well, once.
#[tokio::test(flavor = "multi_thread")]
async fn detached_hold_that_was_lost_before_is_reported() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().lease(Duration::from_millis(800)).await.unwrap();
    guard.lost().await;
    let owner = guard.detach();
    let lost = lock.unlock().with_owner(owner).await;
    assert!(matches!(lost, Err(Error::Lost { .. })), "{lost:?}");
    let again = lock.unlock().with_owner(owner).await;
    assert!(matches!(again, Err(Error::NotHeld { .. })), "{again:?}");
}
