//! Holds that no guard stands for, in trouble.

use std::future::ready;
use std::time::{Duration, Instant};

use crate::support::observe::{exists, hold_count, pttl};
use crate::support::server::{Server, unique, wait_until_async};
use futures::poll;
use redisson_lock::{Error, LockClient, Owner, OwnerExt};
use tokio::time::sleep;

const SOON: Duration = Duration::from_secs(10);

fn ms(m: u64) -> Duration {
    Duration::from_millis(m)
}

/// `LockClient::shutdown`: "holds that are still there are lost with Shutdown (their keys stay
/// until their leases run out, so that nobody else gets in while their code may still run)"
#[tokio::test]
async fn a_shutdown_leaves_the_key_of_a_forgotten_hold() {
    let server = Server::start();
    let client = LockClient::builder()
        .command_timeout(ms(500))
        .connect(&server.url())
        .await
        .unwrap();
    let rival = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let (lock, inner) = (client.lock(&name), client.lock(&name));
    let owner = Owner::new();
    async { lock.lock().await.unwrap().detach() }
        .with_owner(owner)
        .await;
    // Another piece of the same owner's code, which the shutdown stops.
    let running = tokio::spawn(
        async move { inner.run(std::future::pending::<()>()).await }.with_owner(owner),
    );
    wait_until_async("it runs", ms(10_000), || async {
        lock.hold_count_of(owner).await == Ok(2)
    })
    .await;
    // So that the shutdown takes half a second: a future that nobody polls.
    let other = client.lock(unique("other"));
    let mut parked = Box::pin(async { other.lock().await });
    assert!(poll!(&mut parked).is_pending());
    client.shutdown().await.unwrap();
    assert!(running.await.unwrap().is_err());
    let got = rival.lock(&name).try_lock().await.unwrap();
    assert!(
        got.is_none(),
        "a rival has the lock, whose forgotten hold was neither unlocked nor is its lease over"
    );
}

/// docs/safety.md: "the margin is the owner's: nobody gets in before the lease itself is over"
#[tokio::test]
async fn nobody_gets_in_before_the_lease_of_a_forgotten_hold_is_over() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let lock = client.lock(&name);
    let mut redis = server.connection();
    Owner::scope(async {
        let _ = lock.lock().lease(ms(10_000)).await.unwrap().detach();
        let begun = Instant::now();
        let guard = lock.lock().lease(ms(10_000)).await.unwrap();
        guard.lost().await;
        sleep(ms(20)).await;
        drop(guard);
        sleep(ms(100)).await;
        let is_there = exists(&mut redis, &name);
        let after = begun.elapsed();
        assert!(
            is_there || after > ms(9_900),
            "the key was gone {after:?} after a lease of 10 s began"
        );
    })
    .await;
}

/// Its owners have been told: whoever of them comes last sees to it that nothing stays.
async fn a_failed_force_unlock(what: &str) {
    let server = Server::start();
    let client = LockClient::builder()
        .retry_timeout(Duration::from_millis(300))
        .connect(&server.url())
        .await
        .unwrap();
    let name = unique("stock");
    let lock = client.lock(&name);
    let mut redis = server.connection();
    let mut replicas = |min: &str| {
        redis::cmd("CONFIG")
            .arg(&["SET", "min-replicas-to-write", min])
            .query::<()>(&mut redis)
            .unwrap();
    };
    let (forced, unlocked, again) = Owner::scope(async {
        let mut guard = Some(lock.lock().lease(Duration::from_secs(3600)).await.unwrap());
        if what == "forgotten before" {
            let _ = guard.take().unwrap().detach();
        }
        // The master has lost its replica for a while (the setting is what docs/safety.md advises).
        replicas("1");
        let forced = lock.force_unlock().await;
        assert!(matches!(forced, Err(Error::Server { .. })), "{forced:?}");
        replicas("0");
        if what == "forgotten after" {
            let _ = guard.take().unwrap().detach();
        }
        let unlocked = match guard {
            Some(guard) => guard.unlock().await,
            None => lock.unlock().await,
        };
        (forced, unlocked, lock.unlock().await)
    })
    .await;
    let told = format!(
        "{forced:?}, then {unlocked:?}, then {again:?}; {} ms to go",
        pttl(&mut redis, &name)
    );
    wait_until_async(&told, SOON, || ready(!exists(&mut redis, &name))).await;
}

#[tokio::test]
async fn a_force_unlock_that_failed_leaves_nothing_of_a_guard() {
    a_failed_force_unlock("guard").await;
}

#[tokio::test]
async fn a_force_unlock_that_failed_leaves_nothing_of_a_hold_that_was_forgotten_before() {
    a_failed_force_unlock("forgotten before").await;
}

#[tokio::test]
async fn a_force_unlock_that_failed_leaves_nothing_of_a_hold_that_was_forgotten_after() {
    a_failed_force_unlock("forgotten after").await;
}

async fn repeated(owner: Owner) {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let mut redis = server.connection();
    let mut rights = |del: &str| {
        redis::cmd("ACL")
            .arg(&["SETUSER", "default", del])
            .query::<()>(&mut redis)
            .unwrap()
    };
    async {
        let _ = lock
            .lock()
            .lease(Duration::from_secs(3600))
            .await
            .unwrap()
            .detach();
        rights("-del");
        let first = lock.unlock().await;
        assert!(matches!(first, Err(Error::Server { .. })), "{first:?}");
        rights("+del");
        let second = lock.unlock().await;
        let count = hold_count(&lock).await;
        assert!(
            second.is_ok() || count == Ok(0),
            "the server's word is a hold count of {count:?}, and unlock says {second:?}"
        );
    }
    .with_owner(owner)
    .await;
}

#[tokio::test]
async fn an_unlock_that_was_refused_can_be_repeated_by_a_private_owner() {
    repeated(Owner::new()).await;
}

#[tokio::test]
async fn an_unlock_that_was_refused_can_be_repeated_by_a_owner_with_a_given_id() {
    repeated(Owner::from_thread_id(7).unwrap()).await;
}

/// What the refused unlock leaves is not renewed, but the guard beside it is.
#[tokio::test]
async fn an_unlock_that_was_refused_stops_no_renewal_of_the_guard_beside_it() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .watchdog_timeout(ms(1_500))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    Owner::scope(async {
        let guard = lock.lock().await.unwrap();
        let _ = lock.lock().await.unwrap().detach();
        let mut rights = |hset: &str| {
            redis::cmd("ACL")
                .arg(&["SETUSER", "default", hset])
                .query::<()>(&mut redis)
                .unwrap()
        };
        rights("-hset");
        let told = lock.unlock().await;
        assert!(matches!(told, Err(Error::Server { .. })), "{told:?}");
        rights("+hset");
        // Well beyond the end of what was proved then: that nothing is lost is no event.
        sleep(ms(4_000)).await;
        assert!(
            !guard.is_lost(),
            "the guard's lease was not renewed any more"
        );
        lock.unlock().await.unwrap();
        guard.unlock().await.unwrap();
    })
    .await;
    assert!(!exists(&mut redis, &name));
}
