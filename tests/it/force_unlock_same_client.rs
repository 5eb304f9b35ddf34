//! A force unlock between the operations of an owner of the same client: it frees the tenure that
//! the server reports, also while the owner acquires or releases, and no other tenure.

use std::time::Duration;

use crate::support::observe::{exists, owner_counts, park, sha1_of};
use crate::support::proxy::{Fate, Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until_async};
use redisson_lock::{LockClient, Owner, OwnerExt};
use tokio::time::{sleep, timeout};

const SOON: Duration = Duration::from_secs(20);
/// Longer than any test, and not renewed: only the client itself can notify such an owner.
const LEASE: Duration = Duration::from_secs(600);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// The server has granted the lock, and the client has not read the reply yet.
#[tokio::test]
async fn force_unlock_notifies_owner_with_grant_in_transit() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    let parked = park(lock.lock().lease(LEASE));
    wait_until_async("the lock is granted", SOON, || {
        std::future::ready(exists(&mut redis, &name))
    })
    .await;
    assert_eq!(lock.force_unlock().await, Ok(true));
    let _rival = other
        .lock(&name)
        .try_lock()
        .await
        .unwrap()
        .expect("the lock was freed");
    // The acquire may also wait for the rival, or fail: only a guard claims to hold the lock.
    if let Ok(Ok(guard)) = timeout(ms(1_000), parked).await {
        let lost = timeout(ms(500), guard.lost()).await;
        assert!(
            lost.is_ok(),
            "two owners are sure of the lock, the server reports {:?}",
            owner_counts(&mut redis, &name)
        );
    }
}

/// The same without a parked future: the caller's task is busy for a moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn force_unlock_notifies_owner_with_busy_task() {
    const ROUNDS: usize = 200;
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    for round in 1..=ROUNDS {
        let lock = client.lock(unique("stock"));
        let name = lock.name().to_owned();
        let owner = tokio::spawn(lock.lock().lease(LEASE).into_future());
        let forced = tokio::spawn(async move { lock.force_unlock().await });
        let (guard, forced) = (owner.await.unwrap(), forced.await.unwrap());
        let guard = match guard {
            Ok(guard) => guard,
            // It was freed before its owner had the guard.
            Err(error) => {
                assert!(error.is_lost(), "{error:?}");
                continue;
            }
        };
        let rival = other.lock(&name).try_lock().await.unwrap();
        assert!(
            guard.is_lost() || rival.is_none(),
            "two owners are sure of the lock in round {round}: {forced:?}"
        );
    }
}

/// The force unlock reads the owner while it holds the lock. The reply to the script is lost with
/// its connection, and the owner unlocks and locks again before the repeat. To the script its
/// second tenure looks like the first.
#[tokio::test(flavor = "multi_thread")]
async fn repeated_force_unlock_of_releasing_owner_keeps_later_tenure() {
    const ROUNDS: usize = 6;
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    let outside = LockClient::connect(&server.url()).await.unwrap();
    for round in 1..=ROUNDS {
        let lock = client.lock(unique("stock"));
        let name = lock.name().to_owned();
        let owner = Owner::new();
        let first = lock.lock().with_owner(owner).await.unwrap();
        proxy.next_reply_to(&[sha1_of("force_unlock")], Fate::Close);
        proxy.set(Way::Replies, Flow::Delay(ms(60)));
        let before = proxy.touched();
        let forced = tokio::spawn({
            let lock = lock.clone();
            async move { lock.force_unlock().await }
        });
        wait_until_async("the server answers the read of the owner", SOON, || {
            std::future::ready(proxy.touched() > before)
        })
        .await;
        let again = tokio::spawn(async move {
            let unlocked = first.unlock().await;
            (unlocked, lock.lock().lease(LEASE).with_owner(owner).await)
        });
        let forced = timeout(SOON, forced)
            .await
            .expect("the call hangs")
            .unwrap();
        proxy.set(Way::Replies, Flow::Pass);
        let (unlocked, second) = timeout(SOON, again).await.expect("the call hangs").unwrap();
        // No event shows that no request is in transit; one that is arrives within milliseconds.
        sleep(ms(100)).await;
        proxy.no_more_fates();
        let second = second.unwrap();
        let rival = outside.lock(&name).try_lock().await.unwrap();
        assert!(
            second.is_lost() || rival.is_none(),
            "two owners are sure of the lock in round {round}: {forced:?}; unlocked: {unlocked:?}"
        );
    }
}

/// The loss is reported a margin before the lease expires on the server, and the owner locks again
/// within that margin.
#[tokio::test(flavor = "multi_thread")]
async fn repeated_force_unlock_of_expired_owner_keeps_later_tenure() {
    const ROUNDS: usize = 3;
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    let outside = LockClient::connect(&server.url()).await.unwrap();
    for round in 1..=ROUNDS {
        let lock = client.lock(unique("stock"));
        let name = lock.name().to_owned();
        let owner = Owner::new();
        let first = lock
            .lock()
            .lease(ms(2_000))
            .with_owner(owner)
            .await
            .unwrap();
        first.lost().await;
        proxy.next_reply_to(&[sha1_of("force_unlock")], Fate::Close);
        let (forced, second) = tokio::join!(lock.force_unlock(), async {
            // About when the force unlock has read the owner.
            sleep(ms(3)).await;
            tokio::spawn(lock.lock().lease(LEASE).with_owner(owner))
                .await
                .unwrap()
        });
        // A request that is still in transit arrives within milliseconds.
        sleep(ms(50)).await;
        let rival = outside.lock(&name).try_lock().await.unwrap();
        // It may be lost before its caller has it.
        let is_lost = match &second {
            Ok(second) => second.is_lost(),
            Err(error) => error.is_lost(),
        };
        assert!(
            is_lost || rival.is_none(),
            "two owners are sure of the lock in round {round}: {forced:?}"
        );
        proxy.no_more_fates();
    }
}
