//! A force unlock in between the operations of an owner of its own client: it finds whoever the
//! server names, also while that one comes or goes, and takes nothing else from it.

use std::time::Duration;

use crate::support::observe::{exists, owner_counts, park, sha1_of};
use crate::support::proxy::{Fate, Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until_async};
use futures::FutureExt;
use redisson_lock::{LockClient, Owner, OwnerExt};
use tokio::time::{sleep, timeout};

const SOON: Duration = Duration::from_secs(20);
/// What no test waits for, and what is not renewed: only the client itself could tell such an owner.
const LEASE: Duration = Duration::from_secs(600);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// The server has granted it, and the client does not know it yet.
#[tokio::test]
async fn an_owner_whose_grant_is_on_its_way_hears_of_a_force_unlock() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    let parked = park(lock.lock().lease(LEASE));
    wait_until_async("it was granted", SOON, || {
        std::future::ready(exists(&mut redis, &name))
    })
    .await;
    assert_eq!(lock.force_unlock().await, Ok(true));
    let _rival = other
        .lock(&name)
        .try_lock()
        .await
        .unwrap()
        .expect("it was freed");
    // It may as well wait for the rival, or be told of an error: only a guard says that it has the
    // lock.
    if let Ok(Ok(guard)) = timeout(ms(1_000), parked).await {
        let lost = timeout(ms(500), guard.lost()).await;
        assert!(
            lost.is_ok(),
            "two are sure of the lock, the server says {:?}",
            owner_counts(&mut redis, &name)
        );
    }
}

/// The same without a parked future: the caller's task is merely busy for a moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_whose_task_is_busy_hears_of_a_force_unlock() {
    const ROUNDS: usize = 200;
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    for round in 1..=ROUNDS {
        let lock = client.lock(unique("stock"));
        let name = lock.name().to_owned();
        let owner = tokio::spawn(lock.lock().lease(LEASE).into_future());
        let forced = tokio::spawn(async move { lock.force_unlock().await });
        let (guard, forced) = (owner.await.unwrap().unwrap(), forced.await.unwrap());
        let rival = other.lock(&name).try_lock().await.unwrap();
        assert!(
            guard.is_lost() || rival.is_none(),
            "two are sure of the lock in round {round}: {forced:?}"
        );
    }
}

/// The owner is seen while it has the lock, and unlocks and locks again while the force unlock is
/// under way, whose connection is lost. To the script its second possession looks like the first.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_force_unlock_of_a_owner_that_is_leaving_takes_no_later_possession() {
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
        wait_until_async("its look is answered", SOON, || {
            std::future::ready(proxy.touched() > before)
        })
        .await;
        let again = tokio::spawn(async move {
            let told = first.unlock().await;
            (told, lock.lock().lease(LEASE).with_owner(owner).await)
        });
        let forced = timeout(SOON, forced).await.expect("it hangs").unwrap();
        proxy.set(Way::Replies, Flow::Pass);
        let (told, second) = timeout(SOON, again).await.expect("it hangs").unwrap();
        // Whether anything is still under way nobody tells; what is, arrives within milliseconds.
        sleep(ms(100)).await;
        proxy.no_more_fates();
        let second = second.unwrap();
        let rival = outside.lock(&name).try_lock().await.unwrap();
        assert!(
            second.is_lost() || rival.is_none(),
            "two are sure of the lock in round {round}: {forced:?}; unlocked: {told:?}"
        );
    }
}

/// The owner was told by the clock, a margin before the server's lease is over, and locks again in
/// that margin.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_force_unlock_of_a_owner_whose_lease_ran_out_takes_no_later_possession() {
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
            // When the force unlock has looked, about.
            sleep(ms(3)).await;
            tokio::spawn(lock.lock().lease(LEASE).with_owner(owner))
                .await
                .unwrap()
                .unwrap()
        });
        // As above.
        sleep(ms(50)).await;
        let rival = outside.lock(&name).try_lock().await.unwrap();
        assert!(
            second.is_lost() || rival.is_none(),
            "two are sure of the lock in round {round}: {forced:?}"
        );
        proxy.no_more_fates();
    }
}

/// It looked while nobody had the lock, and went on only when somebody did: it freed nothing, and
/// may tell nobody of a loss.
#[tokio::test]
async fn a_force_unlock_that_found_nothing_takes_nothing() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    proxy.set(Way::Both, Flow::Hold);
    proxy.close_now();
    // The client has to notice, and shows that to nobody. Then both wait for a connection.
    sleep(ms(200)).await;
    let parked = park(lock.lock());
    sleep(ms(5)).await;
    let mut forced = park(lock.force_unlock());
    proxy.set(Way::Both, Flow::Pass);
    sleep(ms(500)).await;
    assert!((&mut forced).now_or_never().is_none());
    // It looks, and is not polled when it has.
    sleep(ms(100)).await;
    let guard = parked.await.unwrap();
    assert_eq!(forced.await, Ok(false));
    assert!(exists(&mut redis, &name));
    assert!(
        !guard.is_lost(),
        "told of {:?}, and has the lock",
        guard.lost().now_or_never()
    );
}
