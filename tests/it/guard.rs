//! Guards: unlocking and dropping them, before and after the hold is lost, and how a loss is
//! reported.

use std::collections::HashMap;
use std::future::pending;
use std::time::{Duration, Instant};

use crate::support::bench::{BRIEF, Bench, LIMIT, assert_lost, why_lost};
use crate::support::server::{unique, wait_until};
use futures::FutureExt;
use redisson_lock::{ClientId, LockClient, LostReason, Owner, OwnerExt};

#[tokio::test(flavor = "multi_thread")]
async fn dropped_guard_is_released_in_background() {
    let mut bench = Bench::new().await;
    drop(bench.lock.lock().await.unwrap());
    bench.wait_until_free();
    // One of two holds.
    let owner = Owner::new();
    let outer = bench.lock.lock().with_owner(owner).await.unwrap();
    drop(bench.lock.lock().with_owner(owner).await.unwrap());
    wait_until("the inner hold is released", LIMIT, || bench.count() == 1);
    assert!(!outer.is_lost());
    drop(outer);
    bench.wait_until_free();
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_guard_keeps_next_hold_of_its_owner() {
    let mut bench = Bench::new().await;
    let owner = Owner::new();
    for _ in 0..100 {
        drop(bench.lock.lock().with_owner(owner).await.unwrap());
        let next = bench.lock.lock().with_owner(owner).await.unwrap();
        // The release may run after the next acquire, but it leaves that hold.
        wait_until("one hold is left", LIMIT, || {
            let count = bench.count();
            assert!((1..=2).contains(&count), "{count} holds");
            count == 1
        });
        assert!(!next.is_lost());
        next.unlock().await.unwrap();
        assert_eq!(bench.count(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn given_client_id_and_thread_id_lock_and_unlock() {
    let mut bench = Bench::new().await;
    let id = ClientId::random();
    let client = LockClient::builder()
        .client_id(id)
        .connect(&bench.server.url())
        .await
        .unwrap();
    let lock = client.lock(&bench.name);
    for owner in [Owner::from_thread_id(1).unwrap(), Owner::new()] {
        let guards = async { [lock.lock().await.unwrap(), lock.lock().await.unwrap()] }
            .with_owner(owner)
            .await;
        assert_eq!(
            bench.fields(),
            HashMap::from([(format!("{id}:{owner}"), 2)])
        );
        for guard in guards {
            guard.unlock().await.unwrap();
        }
        assert_eq!(bench.count(), 0);
    }
}

/// An owner with a given thread id may have holds of an earlier process, so the client reads its
/// count. Between the loss and the end of the lease the server still has the lost hold. A client
/// that counted it as a hold of another process would never release it.
#[tokio::test(flavor = "multi_thread")]
async fn relock_after_loss_is_freed_by_one_unlock() {
    let mut bench = Bench::new().await;
    let owner = Owner::from_thread_id(42).unwrap();
    let first = bench
        .lock
        .lock()
        .lease(Duration::from_secs(2))
        .with_owner(owner)
        .await
        .unwrap();
    // A twentieth of the lease before the server's expiry.
    assert_eq!(why_lost(&first).await, LostReason::Expired);
    let second = bench.lock.lock().with_owner(owner).await.unwrap();
    // The client removes the lost hold when its lease has expired.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_lost(first.unlock().await, LostReason::Expired);
    second.unlock().await.unwrap();
    bench.wait_until_free();
}

/// The same, with a relock before the key expires. Its lease of 5 s keeps the key if the unlock
/// does not release the lock.
#[tokio::test(flavor = "multi_thread")]
async fn relock_with_lease_after_loss_is_freed_by_one_unlock() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(LIMIT)).await;
    let lock = bench.lock.clone();
    async {
        let first = lock.lock().lease(Duration::from_secs(4)).await.unwrap();
        // 200 ms before the key expires.
        first.lost().await;
        assert_lost(first.unlock().await, LostReason::Expired);
        lock.lock()
            .lease(Duration::from_secs(5))
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
    .with_owner(Owner::from_thread_id(7).unwrap())
    .await;
    wait_until(
        "the lock is free after the only guard was unlocked",
        Duration::from_secs(1),
        || bench.count() == 0,
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn guard_dropped_on_thread_without_runtime_is_released() {
    let mut bench = Bench::new().await;
    let guard = bench.lock.lock().await.unwrap();
    let thread = std::thread::spawn(move || drop(guard));
    wait_until("the thread has ended", LIMIT, || thread.is_finished());
    thread.join().expect("no panic");
    bench.wait_until_free();
}

#[tokio::test(flavor = "multi_thread")]
async fn unlock_after_key_deleted_reports_loss() {
    let mut bench = Bench::new().await;
    let owner = Owner::new();
    let outer = bench.lock.lock().with_owner(owner).await.unwrap();
    let inner = bench.lock.lock().with_owner(owner).await.unwrap();
    bench.delete();
    assert_lost(inner.unlock().await, LostReason::Gone);
    assert!(
        outer.is_lost(),
        "the outer hold does not report the loss that the inner one found"
    );
    assert_lost(outer.unlock().await, LostReason::Gone);
    bench.lock.run(async {}).with_owner(owner).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn release_after_takeover_keeps_new_owner() {
    let mut bench = Bench::new().await;
    let guard = bench.lock.lock().await.unwrap();
    bench.steal();
    assert_lost(guard.unlock().await, LostReason::Gone);
    bench.assert_the_thief_keeps_it();
    bench.delete();

    let owner = Owner::new();
    let guard = bench.lock.lock().with_owner(owner).await.unwrap();
    bench.steal();
    drop(guard);
    // The next operation of the same owner runs after the release.
    assert!(
        bench
            .lock
            .try_lock()
            .with_owner(owner)
            .await
            .unwrap()
            .is_none()
    );
    bench.assert_the_thief_keeps_it();
    bench.delete();

    let answer = bench.lock.run(async {}).await;
    assert!(answer.is_ok(), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn reentry_after_takeover_is_none_and_reports_loss() {
    let mut bench = Bench::new().await;
    let owner = Owner::new();
    let outer = bench.lock.lock().with_owner(owner).await.unwrap();
    bench.steal();
    assert!(
        bench
            .lock
            .try_lock()
            .with_owner(owner)
            .await
            .unwrap()
            .is_none()
    );
    assert_eq!(why_lost(&outer).await, LostReason::Gone);
    assert_lost(outer.unlock().await, LostReason::Gone);
    bench.assert_the_thief_keeps_it();
}

#[tokio::test(flavor = "multi_thread")]
async fn reentry_after_key_deleted_begins_new_tenure() {
    let mut bench = Bench::new().await;
    let owner = Owner::new();
    let outer = bench.lock.lock().with_owner(owner).await.unwrap();
    bench.delete();
    let inner = bench.lock.lock().with_owner(owner).await.unwrap();
    assert_eq!(bench.count(), 1);
    assert_eq!(why_lost(&outer).await, LostReason::Gone);
    assert!(!inner.is_lost());
    assert_lost(outer.unlock().await, LostReason::Gone);
    assert_eq!(
        bench.count(),
        1,
        "the lost guard released a hold of the new tenure"
    );
    inner.unlock().await.unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn force_unlock_notifies_every_hold_of_client_at_once() {
    let mut bench = Bench::new().await;
    let other = LockClient::connect(&bench.server.url())
        .await
        .unwrap()
        .lock(&bench.name);
    let owner = Owner::new();
    let unlocked = bench.lock.lock().with_owner(owner).await.unwrap();
    let dropped = bench.lock.lock().with_owner(owner).await.unwrap();
    assert!(bench.lock.force_unlock().await.unwrap());
    // Most of the watchdog timeout of 30 s is left.
    assert_eq!(why_lost(&unlocked).await, LostReason::ForceUnlocked);
    assert_eq!(why_lost(&dropped).await, LostReason::ForceUnlocked);
    assert!(unlocked.is_lost() && dropped.is_lost());
    assert_eq!(unlocked.remaining_lease(), Duration::ZERO);

    let theirs = other.lock().await.unwrap();
    assert_lost(unlocked.unlock().await, LostReason::ForceUnlocked);
    drop(dropped);
    assert!(
        bench
            .lock
            .try_lock()
            .with_owner(owner)
            .await
            .unwrap()
            .is_none(),
        "a release freed the lock of the other client"
    );
    assert!(!theirs.is_lost());
    assert_eq!(bench.fields().len(), 1);
    theirs.unlock().await.unwrap();
    assert!(!bench.lock.force_unlock().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn force_unlock_by_other_client_is_reported_at_renewal() {
    let bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    let other = LockClient::connect(&bench.server.url())
        .await
        .unwrap()
        .lock(&bench.name);
    let guard = bench.lock.lock().await.unwrap();
    assert!(other.force_unlock().await.unwrap());
    assert_eq!(why_lost(&guard).await, LostReason::Gone);
    assert_lost(guard.unlock().await, LostReason::Gone);
}

#[tokio::test(flavor = "multi_thread")]
async fn loss_is_reported_before_next_owner_acquires() {
    let bench = Bench::new().await;
    let other = LockClient::connect(&bench.server.url())
        .await
        .unwrap()
        .lock(&bench.name);
    for _ in 0..3 {
        let guard = bench
            .lock
            .lock()
            .lease(Duration::from_millis(3_000))
            .await
            .unwrap();
        let notified = tokio::spawn({
            let lost = guard.lost();
            async move { (lost.await, Instant::now()) }
        });
        let theirs = tokio::time::timeout(LIMIT, other.lock())
            .await
            .expect("the lease did not expire")
            .unwrap();
        assert!(guard.is_lost(), "two owners");
        assert_eq!(notified.await.unwrap().0, LostReason::Expired);
        assert_lost(guard.unlock().await, LostReason::Expired);
        assert!(!theirs.is_lost());
        theirs.unlock().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_after_unlock_never_resolves() {
    let bench = Bench::new().await;
    let lease = Duration::from_millis(300);
    let guard = bench.lock.lock().lease(lease).await.unwrap();
    let mut lost = Box::pin(guard.lost());
    assert!((&mut lost).now_or_never().is_none());
    guard.unlock().await.unwrap();
    // A later hold with the same lease expires, and a later hold is force-unlocked.
    let later = bench.lock.lock().lease(lease).await.unwrap();
    assert_eq!(why_lost(&later).await, LostReason::Expired);
    drop(later);
    let guard = bench.lock.lock().await.unwrap();
    assert!(bench.lock.force_unlock().await.unwrap());
    assert!(guard.is_lost());
    assert!(
        (&mut lost).now_or_never().is_none(),
        "the hold was unlocked, not lost"
    );
}

/// Two holds of one tenure, of which one is unlocked before the tenure is lost.
#[tokio::test(flavor = "multi_thread")]
async fn lost_of_unlocked_hold_ignores_loss_of_other_hold() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    let outer = bench.lock.lock().await.unwrap();
    let inner = bench.lock.lock().with_owner(outer.owner()).await.unwrap();
    let mut lost = Box::pin(inner.lost());
    assert!((&mut lost).now_or_never().is_none());
    inner.unlock().await.unwrap();
    bench.delete();
    assert_eq!(why_lost(&outer).await, LostReason::Gone);
    assert!(
        (&mut lost).now_or_never().is_none(),
        "the hold was unlocked, not lost"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn remaining_lease_decreases_and_is_renewed() {
    let bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    let renewed = bench.lock.lock().await.unwrap();
    let mut before = renewed.remaining_lease();
    assert!(before > Duration::ZERO && before < BRIEF, "{before:?}");
    let (mut decreases, mut increases) = (0, 0);
    wait_until(
        "the remaining lease decreases and is renewed",
        LIMIT,
        || {
            let now = renewed.remaining_lease();
            assert!(now > Duration::ZERO && now < BRIEF, "{now:?}");
            decreases += usize::from(now < before);
            increases += usize::from(now > before);
            before = now;
            decreases > 5 && increases > 3
        },
    );

    let fixed = bench
        .client
        .lock(unique("guard"))
        .lock()
        .lease(BRIEF)
        .await
        .unwrap();
    let mut before = fixed.remaining_lease();
    wait_until("the fixed lease expires", LIMIT, || {
        let now = fixed.remaining_lease();
        assert!(
            now <= before,
            "a fixed lease was renewed: {before:?}, then {now:?}"
        );
        before = now;
        now == Duration::ZERO
    });
    assert!(fixed.is_lost());
    assert_eq!(why_lost(&fixed).await, LostReason::Expired);
    assert_eq!(fixed.remaining_lease(), Duration::ZERO);
    assert!(!renewed.is_lost());
}

#[tokio::test(flavor = "multi_thread")]
async fn shortest_lease_expires_and_leaves_nothing() {
    let mut bench = Bench::new().await;
    let lease = Duration::from_millis(1);
    for _ in 0..30 {
        match bench.lock.lock().lease(lease).await {
            Ok(guard) => {
                assert!(guard.remaining_lease() <= lease);
                assert_eq!(why_lost(&guard).await, LostReason::Expired);
                assert_lost(guard.unlock().await, LostReason::Expired);
            }
            lost => assert_lost(lost, LostReason::Expired),
        }
        assert_lost(
            bench.lock.lock().lease(lease).run(pending::<()>()).await,
            LostReason::Expired,
        );
    }
    bench.wait_until_free();
    let guard = tokio::time::timeout(LIMIT, bench.lock.lock())
        .await
        .expect("the lock is not free")
        .unwrap();
    guard.unlock().await.unwrap();
}
