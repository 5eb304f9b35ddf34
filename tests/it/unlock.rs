//! `ReentrantLock::unlock` releases holds without a guard (detached holds, and holds of an earlier
//! client with the same id), and no other ones.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::support::bench::{BRIEF, Bench, LIMIT, assert_lost, assert_not_held, why_lost};
use crate::support::observe::hold_count;
use crate::support::server::{Server, unique, wait_until};
use futures::FutureExt;
use redis::cmd;
use redisson_lock::{ClientId, Error, LockClient, LostReason, Owner, OwnerExt, OwnerPolicy};

fn count(redis: &mut redis::Connection, lock: &str) -> i64 {
    let counts: Vec<i64> = cmd("HVALS").arg(lock).query(redis).unwrap();
    counts.iter().sum()
}

/// One hold is without a guard, one belongs to a guard; two unlocks run at once.
#[tokio::test]
async fn concurrent_unlocks_keep_guards_hold() {
    let server = Server::shared_or_start();
    let name = unique("stock");
    let id = ClientId::random();
    let mut redis = server.connection();
    let () = cmd("HSET")
        .arg(&name)
        .arg(format!("{id}:7"))
        .arg(1)
        .query(&mut redis)
        .unwrap();
    let () = cmd("PEXPIRE")
        .arg(&name)
        .arg(30_000)
        .query(&mut redis)
        .unwrap();
    let client = LockClient::builder()
        .client_id(id)
        .connect(&server.url())
        .await
        .unwrap();
    let rival = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(&name);
    let owner = Owner::from_thread_id(7).unwrap();
    async {
        let guard = lock.lock().await.unwrap();
        assert_eq!(count(&mut redis, &name), 2);
        let (first, second) = tokio::join!(lock.unlock(), lock.unlock());
        let rival = rival.lock(&name).try_lock().await.unwrap();
        assert!(
            guard.is_lost() || rival.is_none(),
            "two owners hold the lock: unlock() released the guard's hold without notifying it"
        );
        assert!(
            first.is_ok() && matches!(second, Err(Error::NotHeld { .. })),
            "{first:?} {second:?}"
        );
    }
    .with_owner(owner)
    .await;
}

/// A caller drops the first unlock after a timeout, which the background finishes, and unlocks
/// again.
#[tokio::test]
async fn repeated_unlock_after_timeout_keeps_guards_hold() {
    let server = Server::shared_or_start();
    let name = unique("stock");
    let id = ClientId::random();
    let mut redis = server.connection();
    let () = cmd("HSET")
        .arg(&name)
        .arg(format!("{id}:7"))
        .arg(1)
        .query(&mut redis)
        .unwrap();
    let () = cmd("PEXPIRE")
        .arg(&name)
        .arg(30_000)
        .query(&mut redis)
        .unwrap();
    let client = LockClient::builder()
        .client_id(id)
        .connect(&server.url())
        .await
        .unwrap();
    let rival = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(&name);
    async {
        let guard = lock.lock().await.unwrap();
        // The first unlock is dropped after it was sent and before its reply.
        let first = lock.unlock().now_or_never();
        assert!(first.is_none());
        let _ = lock.unlock().await;
        let rival = rival.lock(&name).try_lock().await.unwrap();
        assert!(
            guard.is_lost() || rival.is_none(),
            "two owners hold the lock"
        );
    }
    .with_owner(Owner::from_thread_id(7).unwrap())
    .await;
}

/// No hold without a guard exists: an unlock runs while a lock() of the same owner is pending.
#[tokio::test]
async fn unlock_during_lock_keeps_guards_hold() {
    let server = Server::shared_or_start();
    let name = unique("stock");
    let client = LockClient::connect(&server.url()).await.unwrap();
    let rival = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(&name);
    async {
        let (guard, _) = tokio::join!(lock.lock(), lock.unlock());
        let guard = guard.unwrap();
        let rival = rival.lock(&name).try_lock().await.unwrap();
        assert!(
            guard.is_lost() || rival.is_none(),
            "two owners hold the lock"
        );
    }
    .with_owner(Owner::from_thread_id(7).unwrap())
    .await;
}

/// Three holds without guards, three unlocks at once: each releases one.
#[tokio::test]
async fn concurrent_unlocks_of_all_detached_holds_free_lock() {
    let server = Server::shared_or_start();
    let name = unique("stock");
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(&name);
    let mut redis = server.connection();
    Owner::scope(async {
        for _ in 0..3 {
            let _ = lock.lock().await.unwrap().detach();
        }
        let (a, b, c) = tokio::join!(lock.unlock(), lock.unlock(), lock.unlock());
        assert!(
            a.is_ok() && b.is_ok() && c.is_ok(),
            "{a:?} {b:?} {c:?}; still held: {}",
            count(&mut redis, &name)
        );
        assert_eq!(count(&mut redis, &name), 0);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn detached_hold_stays_until_unlock_in_its_scope() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    let owner = Owner::new();
    let _ = bench.lock.lock().with_owner(owner).await.unwrap().detach();
    let begun = Instant::now();
    wait_until("a lease without renewals would expire", LIMIT, || {
        assert_eq!(bench.count(), 1, "the lock was not renewed");
        begun.elapsed() > 2 * BRIEF
    });
    assert_not_held(bench.lock.unlock().await);
    assert_not_held(bench.lock.unlock().with_owner(Owner::new()).await);
    assert_eq!(bench.count(), 1);
    bench.lock.unlock().with_owner(owner).await.unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_unlock_releases_one_detached_hold() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    Owner::scope(async {
        let _ = lock.lock().await.unwrap().detach();
        let _ = lock.lock().lease(LIMIT).await.unwrap().detach();
        let guard = lock.lock().await.unwrap();
        assert_eq!(bench.count(), 3);
        lock.unlock().await.unwrap();
        assert_eq!(bench.count(), 2);
        lock.unlock().await.unwrap();
        assert_eq!(bench.count(), 1);
        assert_not_held(lock.unlock().await);
        assert_eq!(bench.count(), 1, "only the guard releases its hold");
        guard.unlock().await.unwrap();
        assert_eq!(bench.count(), 0);
        assert_not_held(lock.unlock().await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unlock_without_detached_hold_is_refused_unsent() {
    let mut bench = Bench::new().await;
    let owner = Owner::new();
    let guard = bench.lock.lock().with_owner(owner).await.unwrap();
    let before = (bench.scripts(), bench.fields());
    for _ in 0..3 {
        assert_not_held(bench.lock.unlock().await);
        assert_not_held(bench.lock.unlock().with_owner(owner).await);
        assert_not_held(bench.lock.unlock().with_owner(Owner::new()).await);
        assert_not_held(
            bench
                .client
                .lock(unique("guard"))
                .unlock()
                .with_owner(owner)
                .await,
        );
    }
    assert_eq!((bench.scripts(), bench.fields()), before);
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn unlock_of_lost_detached_hold_reports_loss() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    let lock = bench.lock.clone();
    let owner = Owner::new();

    // The unlock itself finds the loss.
    let _ = lock
        .lock()
        .lease(LIMIT)
        .with_owner(owner)
        .await
        .unwrap()
        .detach();
    bench.delete();
    assert_lost(lock.unlock().with_owner(owner).await, LostReason::Gone);

    // This client force-unlocks the lock.
    let _ = lock
        .lock()
        .lease(LIMIT)
        .with_owner(owner)
        .await
        .unwrap()
        .detach();
    assert!(lock.force_unlock().await.unwrap());
    assert_lost(
        lock.unlock().with_owner(owner).await,
        LostReason::ForceUnlocked,
    );

    // A renewal finds the loss.
    let guard = lock.lock().with_owner(owner).await.unwrap();
    let lost = guard.lost();
    let _ = guard.detach();
    bench.delete();
    assert_eq!(
        tokio::time::timeout(LIMIT, lost)
            .await
            .expect("a renewal did not find the loss"),
        LostReason::Gone
    );
    assert_lost(lock.unlock().with_owner(owner).await, LostReason::Gone);
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn unlock_of_expired_detached_hold_reports_loss() {
    let mut bench = Bench::new().await;
    let owner = Owner::new();
    let _ = bench
        .lock
        .lock()
        .lease(Duration::from_millis(200))
        .with_owner(owner)
        .await
        .unwrap()
        .detach();
    bench.wait_until_free();
    assert_lost(
        bench.lock.unlock().with_owner(owner).await,
        LostReason::Expired,
    );
    // The loss is reported once; the next acquire begins a new tenure.
    bench
        .lock
        .lock()
        .with_owner(owner)
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_detached_hold_is_remembered_in_next_tenure() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    let lock = bench.lock.clone();
    let owner = Owner::new();
    let mut lose_one = async || {
        let guard = lock.lock().with_owner(owner).await.unwrap();
        let lost = guard.lost();
        let _ = guard.detach();
        bench.delete();
        assert_eq!(
            tokio::time::timeout(LIMIT, lost)
                .await
                .expect("a renewal did not find the loss"),
            LostReason::Gone
        );
    };
    lose_one().await;
    // A new tenure, of a guard: unlock reports the earlier loss and does not release it.
    let guard = lock.lock().with_owner(owner).await.unwrap();
    assert_lost(lock.unlock().with_owner(owner).await, LostReason::Gone);
    assert_not_held(lock.unlock().with_owner(owner).await);
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();

    // An existing detached hold is released before the loss of an earlier one is reported.
    lose_one().await;
    let _ = lock.lock().with_owner(owner).await.unwrap().detach();
    lock.unlock().with_owner(owner).await.unwrap();
    assert_eq!(bench.count(), 0);
    assert_lost(lock.unlock().with_owner(owner).await, LostReason::Gone);
    assert_not_held(lock.unlock().with_owner(owner).await);
}

/// A client remembers the latest thousand losses, not only the last one of each lock or owner.
#[tokio::test(flavor = "multi_thread")]
async fn each_of_900_expired_detached_holds_is_reported() {
    const HOLDS: usize = 900;
    let mut bench = Bench::new().await;
    let mut detached = Vec::new();
    for _ in 0..HOLDS {
        let (lock, owner) = (bench.client.lock(unique("stock")), Owner::new());
        let _ = lock
            .lock()
            .lease(Duration::from_secs(1))
            .with_owner(owner)
            .await
            .unwrap()
            .detach();
        detached.push((lock, owner));
    }
    wait_until("the leases have expired", LIMIT, || {
        cmd("DBSIZE").query(&mut bench.observer) == Ok(0)
    });
    for (lock, owner) in detached {
        assert_lost(lock.unlock().with_owner(owner).await, LostReason::Expired);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn client_with_reused_id_unlocks_earlier_holds() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    let owner = Owner::from_thread_id(52).unwrap();
    let _ = lock.lock().with_owner(owner).await.unwrap().detach();
    let _ = lock.lock().with_owner(owner).await.unwrap().detach();
    bench.client.shutdown().await.unwrap();
    assert_eq!(bench.count(), 2, "a shutdown releases no detached hold");

    let id = bench.client.client_id();
    let successor = LockClient::builder()
        .client_id(id)
        .connect(&bench.server.url())
        .await
        .unwrap();
    assert_eq!(successor.client_id(), id);
    let lock = successor.lock(&bench.name);
    assert_not_held(lock.unlock().await);
    assert_not_held(
        lock.unlock()
            .with_owner(Owner::from_thread_id(53).unwrap())
            .await,
    );
    assert!(
        lock.try_lock().await.unwrap().is_none(),
        "outside the scope the lock belongs to another owner"
    );
    async {
        assert_eq!(hold_count(&lock).await.unwrap(), 2);
        let guard = lock.lock().await.unwrap();
        assert_eq!(bench.fields(), HashMap::from([(format!("{id}:52"), 3)]));
        guard.unlock().await.unwrap();
        assert_eq!(bench.count(), 2);
        lock.unlock().await.unwrap();
        assert_eq!(bench.count(), 1);
        assert!(
            bench.pttl() > 15_000,
            "a partial release restores the lease"
        );
        lock.run(async { assert_eq!(hold_count(&lock).await.unwrap(), 2) })
            .await
            .unwrap();
        assert_eq!(bench.count(), 1);
        lock.unlock().await.unwrap();
        assert_eq!(bench.count(), 0);
        assert_not_held(lock.unlock().await);
    }
    .with_owner(owner)
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn guard_above_earlier_holds_releases_only_its_own() {
    let mut bench = Bench::new().await;
    let id = ClientId::random();
    let successor = LockClient::builder()
        .client_id(id)
        .watchdog_timeout(BRIEF)
        .connect(&bench.server.url())
        .await
        .unwrap();
    let lock = successor.lock(&bench.name);
    let owner = Owner::from_thread_id(52).unwrap();
    let put_earlier_holds = |bench: &mut Bench, count: i64| {
        bench.delete();
        cmd("HSET")
            .arg(&bench.name)
            .arg(format!("{id}:52"))
            .arg(count)
            .exec(&mut bench.observer)
            .unwrap();
        cmd("PEXPIRE")
            .arg(&bench.name)
            .arg(30_000)
            .exec(&mut bench.observer)
            .unwrap();
    };

    // The guards are dropped one after the other, the older one first.
    put_earlier_holds(&mut bench, 2);
    let one = lock.lock().with_owner(owner).await.unwrap();
    let two = lock.lock().lease(LIMIT).with_owner(owner).await.unwrap();
    assert_eq!(bench.count(), 4);
    drop(one);
    wait_until("one is released", LIMIT, || bench.count() == 3);
    drop(two);
    wait_until("both are released", LIMIT, || bench.count() == 2);

    // An earlier hold is released while a guard exists.
    let guard = lock.lock().with_owner(owner).await.unwrap();
    assert_eq!(bench.count(), 3);
    lock.unlock().with_owner(owner).await.unwrap();
    assert_eq!(bench.count(), 2);
    assert!(!guard.is_lost());
    lock.unlock().with_owner(owner).await.unwrap();
    assert_eq!(bench.count(), 1);
    assert_not_held(lock.unlock().with_owner(owner).await);
    assert_eq!(bench.count(), 1, "the guard's hold is left");
    guard.unlock().await.unwrap();
    assert_eq!(bench.count(), 0);

    // The guard is lost. It must not release holds that the owner gets after the loss.
    put_earlier_holds(&mut bench, 1);
    let guard = lock.lock().with_owner(owner).await.unwrap();
    bench.delete();
    assert_eq!(why_lost(&guard).await, LostReason::Gone);
    put_earlier_holds(&mut bench, 1);
    assert_lost(guard.unlock().await, LostReason::Gone);
    // The owner's operations are serialized, so a release by the lost guard would have ended here.
    lock.lock()
        .with_owner(owner)
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    assert_eq!(bench.count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_unlock_detached_holds_concurrently() {
    const HOLDS: usize = 8;
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("detached"));
    Owner::scope(async {
        for _ in 0..HOLDS {
            let _ = lock.lock().await.unwrap().detach();
        }
        let unlocks: Vec<_> = (0..HOLDS)
            .map(|_| {
                let lock = lock.clone();
                tokio::spawn(async move { lock.unlock().await }.in_current_owner())
            })
            .collect();
        for unlock in unlocks {
            unlock.await.unwrap().unwrap();
        }
        assert!(matches!(lock.unlock().await, Err(Error::NotHeld { .. })));
    })
    .await;
    assert!(!lock.is_locked().await.unwrap());
}

/// The only detached hold is being released, so there is no other one, and no guard either.
#[tokio::test(flavor = "multi_thread")]
async fn unlock_while_release_is_pending_reports_no_detached_hold() {
    let server = Server::start();
    let client = LockClient::builder()
        .command_timeout(Duration::from_millis(200))
        .retry_timeout(Duration::from_millis(200))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    Owner::scope(async {
        let owner = lock.lock().await.unwrap().detach();
        server.pause();
        let unknown = lock.unlock().await;
        assert!(
            matches!(unknown, Err(Error::OutcomeUnknown { .. })),
            "{unknown:?}"
        );
        let error = lock.unlock().await.unwrap_err();
        server.resume();
        let text = format!(
            "cannot unlock lock {:?}: {}:{owner} has no detached hold",
            lock.name(),
            client.client_id()
        );
        assert_eq!(error.to_string(), text);
    })
    .await;
}

/// A detached hold whose fixed lease has ended, while another owner has the lock.
#[tokio::test]
async fn unlock_of_expired_detached_hold_is_lost_once_and_touches_no_other() {
    let server = Server::start();
    let client = LockClient::builder()
        .owner_policy(OwnerPolicy::PerTask)
        .connect(&server.url())
        .await
        .unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let lock = client.lock(&name);
    let _ = lock
        .lock()
        .lease(Duration::from_millis(300))
        .await
        .unwrap()
        .detach();
    let theirs = other.lock(&name).lock().timeout(LIMIT).await.unwrap();
    let first = lock.unlock().await.unwrap_err();
    assert!(
        matches!(
            first,
            Error::Lost {
                reason: LostReason::Expired,
                ..
            }
        ),
        "{first:?}"
    );
    let second = lock.unlock().await.unwrap_err();
    assert!(matches!(second, Error::NotHeld { .. }), "{second:?}");
    let info = lock.inspect().await.unwrap().unwrap();
    assert_eq!(
        info.owner,
        format!("{}:{}", other.client_id(), theirs.owner())
    );
    assert_eq!((info.local_owner, info.hold_count), (None, 1));
    theirs.unlock().await.unwrap();
}
