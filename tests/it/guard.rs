//! Guards: what becomes of a hold when it is unlocked, dropped, stolen or outlived, and what is
//! told of its loss.

use std::collections::HashMap;
use std::future::pending;
use std::time::{Duration, Instant};

use crate::support::bench::{BRIEF, Bench, LIMIT, assert_lost, why_lost};
use crate::support::observe::exists;
use crate::support::server::{Server, unique, wait_until};
use futures::FutureExt;
use redisson_lock::{ClientId, LockClient, LostReason, Owner, OwnerExt};

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_guard_is_released_in_the_background() {
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
async fn a_dropped_guard_takes_nothing_of_its_owners_next_hold() {
    let mut bench = Bench::new().await;
    let owner = Owner::new();
    for _ in 0..100 {
        drop(bench.lock.lock().with_owner(owner).await.unwrap());
        let next = bench.lock.lock().with_owner(owner).await.unwrap();
        // The give-back may come after the next hold, but it leaves that.
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
async fn a_lock_of_an_adopted_id_is_taken_and_freed_as_any_other() {
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

/// An adopted owner may have a hold from before, so its count is asked for. In the margin between
/// the loss and the end of the lease the lost hold is still on the server: who takes it for
/// somebody else's never gives the lock back.
#[tokio::test(flavor = "multi_thread")]
async fn an_unlock_after_a_loss_frees_the_lock_of_an_adopted_owner() {
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
    // The lost hold would be cleaned up when its lease is over.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_lost(first.unlock().await, LostReason::Expired);
    second.unlock().await.unwrap();
    bench.wait_until_free();
}

/// The same within the margin, and with a lease that would hide for a while that the lock was not
/// given back.
#[tokio::test(flavor = "multi_thread")]
async fn one_unlock_frees_for_a_owner_that_lost_and_locked_again_at_once() {
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
        "the only guard was unlocked, and the lock is free",
        Duration::from_secs(1),
        || bench.count() == 0,
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guard_that_is_dropped_on_a_thread_without_a_runtime_is_released() {
    let mut bench = Bench::new().await;
    let guard = bench.lock.lock().await.unwrap();
    let thread = std::thread::spawn(move || drop(guard));
    wait_until("the thread has ended", LIMIT, || thread.is_finished());
    thread.join().expect("no panic");
    bench.wait_until_free();
}

#[test]
fn what_outlives_its_runtime_does_no_harm() {
    let server = Server::start();
    let mut observer = server.connection();
    let (names, url) = ([unique("runtime"), unique("runtime")], server.url());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let (client, dropped, unlocked) = runtime.block_on(async {
        let builder = LockClient::builder().retry_timeout(Duration::from_millis(500));
        let client = builder.connect(&url).await.unwrap();
        let lease = Duration::from_millis(1_500);
        let [one, other] = names
            .each_ref()
            .map(|name| client.lock(name).lock().lease(lease));
        (client, one.await.unwrap(), other.await.unwrap())
    });
    let lock = client.lock(&names[0]);
    drop(runtime);
    drop(dropped);
    let other = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let calls = async {
        (
            unlocked.unlock().await.is_err(),
            lock.try_lock().await.is_err(),
            lock.is_locked().await.is_err(),
        )
    };
    let answers = other.block_on(async { tokio::time::timeout(LIMIT, calls).await });
    assert_eq!(
        answers.expect("no hang"),
        (true, true, true),
        "nobody can have reached the server"
    );
    drop((client, lock));
    for name in names {
        wait_until("the lease runs out", LIMIT, || {
            !exists(&mut observer, &name)
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unlocking_a_lock_that_was_deleted_says_that_it_was_lost() {
    let mut bench = Bench::new().await;
    let owner = Owner::new();
    let outer = bench.lock.lock().with_owner(owner).await.unwrap();
    let inner = bench.lock.lock().with_owner(owner).await.unwrap();
    bench.delete();
    assert_lost(inner.unlock().await, LostReason::Gone);
    assert!(
        outer.is_lost(),
        "what the inner hold found out the outer one knows"
    );
    assert_lost(outer.unlock().await, LostReason::Gone);
    bench.lock.run(async {}).with_owner(owner).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn unlocking_or_dropping_a_lock_that_was_stolen_leaves_it_to_the_thief() {
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
    // The same owner's next operation comes after the give-back.
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
async fn a_re_entry_into_a_lock_that_was_stolen_is_none_and_tells_the_outer_hold() {
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
async fn a_re_entry_into_a_lock_that_was_deleted_is_a_new_possession() {
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
        "the lost guard takes nothing of the new possession"
    );
    inner.unlock().await.unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn force_unlock_tells_every_hold_of_this_client_at_once() {
    let mut bench = Bench::new().await;
    let other = LockClient::connect(&bench.server.url())
        .await
        .unwrap()
        .lock(&bench.name);
    let owner = Owner::new();
    let unlocked = bench.lock.lock().with_owner(owner).await.unwrap();
    let dropped = bench.lock.lock().with_owner(owner).await.unwrap();
    assert!(bench.lock.force_unlock().await.unwrap());
    // The watchdog timeout has most of its 30 s to go.
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
        "after whatever is given back"
    );
    assert!(!theirs.is_lost());
    assert_eq!(bench.fields().len(), 1);
    theirs.unlock().await.unwrap();
    assert!(!bench.lock.force_unlock().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn force_unlock_by_another_client_is_told_with_the_next_renewal() {
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
async fn the_loss_is_told_before_anybody_else_has_the_lock() {
    let bench = Bench::new().await;
    let other = LockClient::connect(&bench.server.url())
        .await
        .unwrap()
        .lock(&bench.name);
    for _ in 0..5 {
        let guard = bench
            .lock
            .lock()
            .lease(Duration::from_millis(300))
            .await
            .unwrap();
        let told = tokio::spawn({
            let lost = guard.lost();
            async move { (lost.await, Instant::now()) }
        });
        let theirs = tokio::time::timeout(LIMIT, other.lock())
            .await
            .expect("the lease runs out")
            .unwrap();
        assert!(guard.is_lost(), "two owners");
        assert_eq!(told.await.unwrap().0, LostReason::Expired);
        assert_lost(guard.unlock().await, LostReason::Expired);
        assert!(!theirs.is_lost());
        theirs.unlock().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_never_resolves_after_an_unlock() {
    let bench = Bench::new().await;
    let lease = Duration::from_millis(300);
    let guard = bench.lock.lock().lease(lease).await.unwrap();
    let mut lost = Box::pin(guard.lost());
    assert!((&mut lost).now_or_never().is_none());
    guard.unlock().await.unwrap();
    // The same lease, begun later, runs out, and a force-unlock of another hold is not this one's
    // affair.
    let later = bench.lock.lock().lease(lease).await.unwrap();
    assert_eq!(why_lost(&later).await, LostReason::Expired);
    drop(later);
    let guard = bench.lock.lock().await.unwrap();
    assert!(bench.lock.force_unlock().await.unwrap());
    assert!(guard.is_lost());
    assert!(
        (&mut lost).now_or_never().is_none(),
        "it was unlocked, not lost"
    );
}

/// Two holds of one possession: when it is lost, the one that was unlocked before is not concerned.
#[tokio::test(flavor = "multi_thread")]
async fn lost_does_not_resolve_for_a_hold_that_was_unlocked_before_its_owners_other_one_was_lost() {
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
        "it was unlocked, not lost"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_remaining_lease_runs_down_and_is_renewed() {
    let bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    let renewed = bench.lock.lock().await.unwrap();
    let mut before = renewed.remaining_lease();
    assert!(before > Duration::ZERO && before < BRIEF, "{before:?}");
    let (mut fell, mut rose) = (0, 0);
    wait_until("it runs down and is renewed", LIMIT, || {
        let now = renewed.remaining_lease();
        assert!(now > Duration::ZERO && now < BRIEF, "{now:?}");
        fell += usize::from(now < before);
        rose += usize::from(now > before);
        before = now;
        fell > 5 && rose > 3
    });

    let fixed = bench
        .client
        .lock(unique("guard"))
        .lock()
        .lease(BRIEF)
        .await
        .unwrap();
    let mut before = fixed.remaining_lease();
    wait_until("it runs out", LIMIT, || {
        let now = fixed.remaining_lease();
        assert!(
            now <= before,
            "a lease of one's own is not renewed: {before:?}, then {now:?}"
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
async fn the_shortest_lease_is_lost_and_leaves_nothing() {
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
        .expect("it is free")
        .unwrap();
    guard.unlock().await.unwrap();
}
