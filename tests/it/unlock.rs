//! `ReentrantLock::unlock` takes what no guard stands for (holds that were forgotten, or that
//! another client left), and nothing else.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::support::bench::{BRIEF, Bench, LIMIT, assert_lost, assert_not_held, why_lost};
use crate::support::observe::hold_count;
use crate::support::server::{Server, unique, wait_until};
use futures::FutureExt;
use redis::cmd;
use redisson_lock::{ClientId, Error, LockClient, LostReason, Owner, OwnerExt};

fn count(redis: &mut redis::Connection, lock: &str) -> i64 {
    let counts: Vec<i64> = cmd("HVALS").arg(lock).query(redis).unwrap();
    counts.iter().sum()
}

/// "Holds that belong to a guard are not touched": one hold was handed over, one is a guard's; two
/// unlocks at once.
#[tokio::test]
async fn unlocks_at_once_leave_the_guards_hold_alone() {
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
            "two hold the lock: unlock() took the guard's hold, and the guard knows nothing of it"
        );
        assert!(
            first.is_ok() && matches!(second, Err(Error::NotHeld { .. })),
            "{first:?} {second:?}"
        );
    }
    .with_owner(owner)
    .await;
}

/// The same by a careful caller: the first unlock was given up by a time-out ("once begun it is
/// finished in the background"), so it is asked again.
#[tokio::test]
async fn an_unlock_that_is_asked_again_after_a_timeout_leaves_the_guards_hold_alone() {
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
        // Given up by the caller: begun, and dropped before its answer.
        let first = lock.unlock().now_or_never();
        assert!(first.is_none());
        let _ = lock.unlock().await;
        let rival = rival.lock(&name).try_lock().await.unwrap();
        assert!(guard.is_lost() || rival.is_none(), "two hold the lock");
    }
    .with_owner(Owner::from_thread_id(7).unwrap())
    .await;
}

/// Nothing was handed over at all: an unlock that meets a lock() of the same owner under way.
#[tokio::test]
async fn an_unlock_beside_a_lock_leaves_the_guards_hold_alone() {
    let server = Server::shared_or_start();
    let name = unique("stock");
    let client = LockClient::connect(&server.url()).await.unwrap();
    let rival = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(&name);
    async {
        let (guard, _) = tokio::join!(lock.lock(), lock.unlock());
        let guard = guard.unwrap();
        let rival = rival.lock(&name).try_lock().await.unwrap();
        assert!(guard.is_lost() || rival.is_none(), "two hold the lock");
    }
    .with_owner(Owner::from_thread_id(7).unwrap())
    .await;
}

/// Three holds without guards, three unlocks at once: each gives one back.
#[tokio::test]
async fn as_many_unlocks_at_once_as_forgotten_holds_free_the_lock() {
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
async fn a_forgotten_hold_stays_until_the_lock_is_unlocked_in_its_scope() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    let owner = Owner::new();
    let _ = bench.lock.lock().with_owner(owner).await.unwrap().detach();
    let begun = Instant::now();
    wait_until("the lease would be over", LIMIT, || {
        assert_eq!(bench.count(), 1, "it is not renewed");
        begun.elapsed() > 2 * BRIEF
    });
    assert_not_held(bench.lock.unlock().await);
    assert_not_held(bench.lock.unlock().with_owner(Owner::new()).await);
    assert_eq!(bench.count(), 1);
    bench.lock.unlock().with_owner(owner).await.unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn forgotten_holds_are_unlocked_one_by_one_and_not_once_more() {
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
        assert_eq!(bench.count(), 1, "the guard's hold is the guard's");
        guard.unlock().await.unwrap();
        assert_eq!(bench.count(), 0);
        assert_not_held(lock.unlock().await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unlocking_without_a_hold_to_give_back_is_refused_before_anything_is_sent() {
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
async fn a_forgotten_hold_that_was_lost_is_told_by_its_unlock() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    let lock = bench.lock.clone();
    let owner = Owner::new();

    // Found by the unlock itself.
    let _ = lock
        .lock()
        .lease(LIMIT)
        .with_owner(owner)
        .await
        .unwrap()
        .detach();
    bench.delete();
    assert_lost(lock.unlock().with_owner(owner).await, LostReason::Gone);

    // Force-unlocked by this client.
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

    // Found by a renewal.
    let guard = lock.lock().with_owner(owner).await.unwrap();
    let lost = guard.lost();
    let _ = guard.detach();
    bench.delete();
    assert_eq!(
        tokio::time::timeout(LIMIT, lost)
            .await
            .expect("a renewal finds out"),
        LostReason::Gone
    );
    assert_lost(lock.unlock().with_owner(owner).await, LostReason::Gone);
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_hold_that_ran_out_is_told_by_its_unlock() {
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
    // After that there is nothing more to tell, and the next lock is a new one.
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
async fn a_forgotten_hold_that_was_lost_is_remembered_while_its_owner_locks_again() {
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
                .expect("a renewal finds out"),
            LostReason::Gone
        );
    };
    lose_one().await;
    // Another possession, of a guard: it is not touched, and what was lost is told.
    let guard = lock.lock().with_owner(owner).await.unwrap();
    assert_lost(lock.unlock().with_owner(owner).await, LostReason::Gone);
    assert_not_held(lock.unlock().with_owner(owner).await);
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();

    // One that is there is given back first, so that nothing stays behind.
    lose_one().await;
    let _ = lock.lock().with_owner(owner).await.unwrap().detach();
    lock.unlock().with_owner(owner).await.unwrap();
    assert_eq!(bench.count(), 0);
    assert_lost(lock.unlock().with_owner(owner).await, LostReason::Gone);
    assert_not_held(lock.unlock().with_owner(owner).await);
}

/// A client remembers the latest thousand: each of them, not only the last of each lock or owner.
#[tokio::test(flavor = "multi_thread")]
async fn forgotten_holds_that_ran_out_are_each_told_within_the_latest_thousand() {
    const HOLDS: usize = 900;
    let mut bench = Bench::new().await;
    let mut forgotten = Vec::new();
    for _ in 0..HOLDS {
        let (lock, owner) = (bench.client.lock(unique("stock")), Owner::new());
        let _ = lock
            .lock()
            .lease(Duration::from_secs(1))
            .with_owner(owner)
            .await
            .unwrap()
            .detach();
        forgotten.push((lock, owner));
    }
    wait_until("the leases are over", LIMIT, || {
        cmd("DBSIZE").query(&mut bench.observer) == Ok(0)
    });
    for (lock, owner) in forgotten {
        assert_lost(lock.unlock().with_owner(owner).await, LostReason::Expired);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_adopts_another_ones_id_gives_back_what_that_one_left() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    let owner = Owner::from_thread_id(52).unwrap();
    let _ = lock.lock().with_owner(owner).await.unwrap().detach();
    let _ = lock.lock().with_owner(owner).await.unwrap().detach();
    bench.client.shutdown().await.unwrap();
    assert_eq!(
        bench.count(),
        2,
        "a shutdown leaves what it cannot prove to be over"
    );

    let id = bench.client.client_id();
    let heir = LockClient::builder()
        .client_id(id)
        .connect(&bench.server.url())
        .await
        .unwrap();
    assert_eq!(heir.client_id(), id);
    let lock = heir.lock(&bench.name);
    assert_not_held(lock.unlock().await);
    assert_not_held(
        lock.unlock()
            .with_owner(Owner::from_thread_id(53).unwrap())
            .await,
    );
    assert!(
        lock.try_lock().await.unwrap().is_none(),
        "outside the scope it is somebody else's"
    );
    async {
        assert_eq!(hold_count(&lock).await.unwrap(), 2);
        let guard = lock.lock().await.unwrap();
        assert_eq!(bench.fields(), HashMap::from([(format!("{id}:52"), 3)]));
        guard.unlock().await.unwrap();
        assert_eq!(bench.count(), 2);
        lock.unlock().await.unwrap();
        assert_eq!(bench.count(), 1);
        assert!(bench.pttl() > 15_000, "what is left gets the lease again");
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
async fn a_guard_over_inherited_holds_never_takes_what_it_did_not_bring() {
    let mut bench = Bench::new().await;
    let id = ClientId::random();
    let heir = LockClient::builder()
        .client_id(id)
        .watchdog_timeout(BRIEF)
        .connect(&bench.server.url())
        .await
        .unwrap();
    let lock = heir.lock(&bench.name);
    let owner = Owner::from_thread_id(52).unwrap();
    let inherit = |bench: &mut Bench, count: i64| {
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

    // Dropped, one after the other and the older one first.
    inherit(&mut bench, 2);
    let one = lock.lock().with_owner(owner).await.unwrap();
    let two = lock.lock().lease(LIMIT).with_owner(owner).await.unwrap();
    assert_eq!(bench.count(), 4);
    drop(one);
    wait_until("one is released", LIMIT, || bench.count() == 3);
    drop(two);
    wait_until("both are released", LIMIT, || bench.count() == 2);

    // An inherited hold is given back under a living guard.
    let guard = lock.lock().with_owner(owner).await.unwrap();
    assert_eq!(bench.count(), 3);
    lock.unlock().with_owner(owner).await.unwrap();
    assert_eq!(bench.count(), 2);
    assert!(!guard.is_lost());
    lock.unlock().with_owner(owner).await.unwrap();
    assert_eq!(bench.count(), 1);
    assert_not_held(lock.unlock().with_owner(owner).await);
    assert_eq!(bench.count(), 1, "what is left is the guard's");
    guard.unlock().await.unwrap();
    assert_eq!(bench.count(), 0);

    // The guard is lost; what the owner inherits after that is not its affair.
    inherit(&mut bench, 1);
    let guard = lock.lock().with_owner(owner).await.unwrap();
    bench.delete();
    assert_eq!(why_lost(&guard).await, LostReason::Gone);
    inherit(&mut bench, 1);
    assert_lost(guard.unlock().await, LostReason::Gone);
    // The order of the owner's operations makes sure that a give-back of the lost guard would be
    // over.
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
async fn forgotten_holds_that_are_unlocked_at_once_are_each_given_back() {
    const HOLDS: usize = 8;
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("forgotten"));
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
