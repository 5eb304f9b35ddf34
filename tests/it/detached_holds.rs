//! Detached holds at a shutdown, after a failed force unlock and after a refused unlock.

use std::future::ready;
use std::time::{Duration, Instant};

use crate::support::observe::{exists, hold_count, owner_counts, pttl};
use crate::support::server::{Server, unique, wait_until_async};
use futures::poll;
use redis::cmd;
use redisson_lock::{Error, LockClient, Owner, OwnerExt, OwnerPolicy, Step};
use tokio::time::sleep;
use tracing::Level;

use crate::support::log::Log;

const LIMIT: Duration = Duration::from_secs(20);

const SOON: Duration = Duration::from_secs(10);

fn ms(m: u64) -> Duration {
    Duration::from_millis(m)
}

/// A shutdown leaves the keys of holds that were not released until their leases expire: code that
/// relies on them may still run.
#[tokio::test]
async fn shutdown_keeps_key_of_detached_hold() {
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
    // Other code of the same owner, which the shutdown stops.
    let running = tokio::spawn(
        async move { inner.run(std::future::pending::<()>()).await }.with_owner(owner),
    );
    wait_until_async("the code runs", ms(10_000), || async {
        lock.hold_count_of(owner).await == Ok(2)
    })
    .await;
    // A future that is not polled: the shutdown waits half a second for it.
    let other = client.lock(unique("other"));
    let mut parked = Box::pin(async { other.lock().await });
    assert!(poll!(&mut parked).is_pending());
    client.shutdown().await.unwrap();
    assert!(running.await.unwrap().is_err());
    let got = rival.lock(&name).try_lock().await.unwrap();
    assert!(
        got.is_none(),
        "a rival acquired the lock before the detached hold was unlocked or expired"
    );
}

/// The loss is reported a margin before the lease expires; the lock stays held during the margin.
#[tokio::test]
async fn lock_stays_held_until_lease_of_detached_hold_expires() {
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
        let is_held = exists(&mut redis, &name);
        let after = begun.elapsed();
        assert!(
            is_held || after > ms(9_900),
            "the key was gone {after:?} after a lease of 10 s began"
        );
    })
    .await;
}

/// The holds were reported as lost: the last one that ends removes the key all the same.
async fn check_failed_force_unlock(case: &str) {
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
        if case == "detached before" {
            let _ = guard.take().unwrap().detach();
        }
        // The master has lost its replica for a while (docs/safety.md recommends the setting).
        replicas("1");
        let forced = lock.force_unlock().await;
        assert!(matches!(forced, Err(Error::Server { .. })), "{forced:?}");
        replicas("0");
        if case == "detached after" {
            let _ = guard.take().unwrap().detach();
        }
        let unlocked = match guard {
            Some(guard) => guard.unlock().await,
            None => lock.unlock().await,
        };
        (forced, unlocked, lock.unlock().await)
    })
    .await;
    let outcomes = format!(
        "{forced:?}, then {unlocked:?}, then {again:?}; ttl {} ms",
        pttl(&mut redis, &name)
    );
    wait_until_async(&outcomes, SOON, || ready(!exists(&mut redis, &name))).await;
}

#[tokio::test]
async fn failed_force_unlock_leaves_nothing_of_guard() {
    check_failed_force_unlock("guard").await;
}

#[tokio::test]
async fn failed_force_unlock_leaves_nothing_of_hold_detached_before() {
    check_failed_force_unlock("detached before").await;
}

#[tokio::test]
async fn failed_force_unlock_leaves_nothing_of_hold_detached_after() {
    check_failed_force_unlock("detached after").await;
}

async fn check_repeat_of_refused_unlock(owner: Owner) {
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
            "the server's hold count is {count:?}, and unlock returned {second:?}"
        );
    }
    .with_owner(owner)
    .await;
}

#[tokio::test]
async fn refused_unlock_can_be_repeated_by_private_owner() {
    check_repeat_of_refused_unlock(Owner::new()).await;
}

#[tokio::test]
async fn refused_unlock_can_be_repeated_by_owner_with_thread_id() {
    check_repeat_of_refused_unlock(Owner::from_thread_id(7).unwrap()).await;
}

/// The hold of the refused unlock is renewed no more, but the guard of the same owner is.
#[tokio::test]
async fn refused_unlock_keeps_renewal_of_owners_guard() {
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
        let refused = lock.unlock().await;
        assert!(matches!(refused, Err(Error::Server { .. })), "{refused:?}");
        rights("+hset");
        // Longer than the lease that was valid then: no event shows that nothing is lost.
        sleep(ms(4_000)).await;
        assert!(!guard.is_lost(), "the guard's lease was renewed no more");
        lock.unlock().await.unwrap();
        guard.unlock().await.unwrap();
    })
    .await;
    assert!(!exists(&mut redis, &name));
}

/// A loop that repeats an unlock for as long as its errors are retryable. A release whose reply is
/// missing is repeated by the background: repeating it here would release the outer hold.
#[tokio::test(flavor = "multi_thread")]
async fn unlock_repeated_while_errors_are_retryable_keeps_outer_hold() {
    let server = Server::start();
    let client = LockClient::builder()
        .owner_policy(OwnerPolicy::PerTask)
        .command_timeout(ms(200))
        .retry_timeout(ms(200))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let owner = lock.lock().await.unwrap().detach();
    let _ = lock.lock().await.unwrap().detach();
    server.pause();
    let unlocked = loop {
        match lock.unlock().await {
            Err(error) if error.is_retryable() => continue,
            unlocked => break unlocked,
        }
    };
    server.resume();
    assert!(
        matches!(
            unlocked,
            Err(Error::OutcomeUnknown {
                step: Step::Release,
                ..
            })
        ),
        "{unlocked:?}"
    );
    // It waits for the release, which the background completes.
    let again = lock.lock().await.unwrap();
    assert_eq!(again.hold_count(), 2, "the outer hold was released, too");
    assert_eq!(lock.hold_count_of(owner).await, Ok(2));
    again.unlock().await.unwrap();
    lock.unlock().await.unwrap();
    assert_eq!(lock.inspect().await, Ok(None));
}

/// How many connections have the client's id in their names.
fn named(redis: &mut redis::Connection, client: &LockClient) -> usize {
    let list: String = cmd("CLIENT").arg("LIST").query(redis).unwrap();
    let id = client.client_id().to_string();
    list.lines().filter(|line| line.contains(&id)).count()
}

/// Pairs of `detach` and `unlock` under the policy per task, beside guards and scopes.
#[tokio::test(flavor = "multi_thread")]
async fn detached_holds_and_guards_of_one_task_are_released_each_by_its_own() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .owner_policy(OwnerPolicy::PerTask)
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let owner = lock.lock().await.unwrap().detach();
    assert_eq!(client.current_owner(), Some(owner));
    let guard = lock.lock().await.unwrap();
    let scoped = Owner::scope(async {
        assert!(lock.try_lock().await.unwrap().is_none());
        let error = lock.unlock().await.unwrap_err();
        assert!(matches!(error, Error::NotHeld { .. }), "{error:?}");
        Owner::current()
    })
    .await;
    assert_ne!(scoped, Some(owner));
    let other = lock.clone();
    let theirs = tokio::spawn(async move { other.unlock().await }).await;
    assert!(matches!(theirs, Ok(Err(Error::NotHeld { .. }))));
    lock.unlock().await.unwrap();
    let error = lock.unlock().await.unwrap_err();
    assert!(matches!(error, Error::NotHeld { .. }), "{error:?}");
    assert_eq!(error.lock(), Some(lock.name()));
    assert_eq!(
        owner_counts(&mut redis, lock.name())
            .into_values()
            .sum::<i64>(),
        1
    );
    guard.unlock().await.unwrap();
    assert!(!exists(&mut redis, lock.name()));
    // A hold that a task leaves behind is unlocked by the owner that `inspect` returns.
    let other = lock.clone();
    tokio::spawn(async move {
        let _ = other.lock().await.unwrap().detach();
    })
    .await
    .unwrap();
    let left = lock.inspect().await.unwrap().unwrap().local_owner.unwrap();
    lock.unlock().with_owner(left).await.unwrap();
    assert!(!exists(&mut redis, lock.name()));
}

/// "a lock was lost: ... or the client ended while the lock was held".
#[tokio::test]
async fn detached_hold_of_a_dropped_client_is_logged_as_lost() {
    let server = Server::start();
    let mut redis = server.connection();
    let log = Log::capture();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let _owner = client.lock(&name).lock().await.unwrap().detach();
    assert_eq!(named(&mut redis, &client), 2);
    let id = client.client_id().to_string();
    drop(client);
    wait_until_async("its connections are closed", LIMIT, || {
        let list: String = cmd("CLIENT").arg("LIST").query(&mut redis).unwrap();
        let gone = !list.contains(&id);
        async move { gone }
    })
    .await;
    assert!(pttl(&mut redis, &name) > 0, "the key stays");
    assert_eq!(
        log.with("a lock was lost").len(),
        1,
        "{:?}",
        log.from(Level::DEBUG)
    );
}
