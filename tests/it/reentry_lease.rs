//! Re-entries with and without a lease: which lease the lock has, and whether it is renewed.

use std::time::{Duration, Instant};

use crate::support::bench::{BRIEF, Bench, LIMIT};
use crate::support::server::wait_until;
use redis::cmd;
use redisson_lock::{ClientId, LockClient, Owner, OwnerExt};

#[tokio::test(flavor = "multi_thread")]
async fn reentry_with_shorter_lease_keeps_outer_lease() {
    let mut bench = Bench::shared(LockClient::builder()).await;
    for outer_lease in [None, Some(Duration::from_secs(30))] {
        let lock = bench.lock.clone();
        let owner = Owner::new();
        let outer = match outer_lease {
            None => lock.lock().with_owner(owner).await.unwrap(),
            Some(lease) => lock.lock().lease(lease).with_owner(owner).await.unwrap(),
        };
        let inner = lock
            .lock()
            .lease(Duration::from_secs(1))
            .with_owner(owner)
            .await
            .unwrap();
        assert!(bench.pttl() > 15_000, "re-entry left {} ms", bench.pttl());
        assert!(outer.remaining_lease() > Duration::from_secs(15));
        inner.unlock().await.unwrap();
        assert!(
            bench.pttl() > 15_000,
            "the inner unlock left {} ms",
            bench.pttl()
        );
        assert!(outer.remaining_lease() > Duration::from_secs(15));
        outer.unlock().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn outer_hold_is_renewed_after_shorter_reentry() {
    let mut bench =
        Bench::shared(LockClient::builder().watchdog_timeout(Duration::from_millis(900))).await;
    let lock = bench.lock.clone();
    let owner = Owner::new();
    let outer = lock.lock().with_owner(owner).await.unwrap();
    let inner = lock
        .lock()
        .lease(Duration::from_millis(50))
        .with_owner(owner)
        .await
        .unwrap();
    // Six renewals take six thirds of the lease, in which it would have expired twice.
    wait_for_renewals(&mut bench, 6);
    assert!(
        !outer.is_lost() && !inner.is_lost(),
        "a hold is lost although the owner holds the lock"
    );
    inner.unlock().await.unwrap();
    wait_for_renewals(&mut bench, 3);
    assert!(!outer.is_lost());
    outer.unlock().await.unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn inner_hold_without_lease_is_renewed_despite_outer_lease() {
    let mut bench =
        Bench::shared(LockClient::builder().watchdog_timeout(Duration::from_millis(900))).await;
    let lock = bench.lock.clone();
    let owner = Owner::new();
    let outer = lock
        .lock()
        .lease(Duration::from_millis(900))
        .with_owner(owner)
        .await
        .unwrap();
    let inner = lock.lock().with_owner(owner).await.unwrap();
    wait_for_renewals(&mut bench, 6);
    assert!(!inner.is_lost());
    inner.unlock().await.unwrap();
    // The outer hold is not renewed: its lease expires, and the loss is reported.
    tokio::time::timeout(LIMIT, outer.lost())
        .await
        .expect("the outer lease did not expire");
    wait_until("the key expires", LIMIT, || bench.pttl() == -2);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_short_reentries_do_not_delay_outer_renewal() {
    let watchdog = Duration::from_millis(900);
    let mut bench = Bench::shared(LockClient::builder().watchdog_timeout(watchdog)).await;
    let lock = bench.lock.clone();
    let owner = Owner::new();
    let outer = lock.lock().with_owner(owner).await.unwrap();
    // The guards are kept: a release would restore the lease.
    let mut inner = Vec::new();
    let begun = Instant::now();
    let mut tick = tokio::time::interval(Duration::from_millis(10));
    while begun.elapsed() < 3 * watchdog {
        tick.tick().await;
        inner.push(
            lock.lock()
                .lease(Duration::from_millis(20))
                .with_owner(owner)
                .await
                .unwrap(),
        );
        assert!(
            !outer.is_lost(),
            "after {:?} and {} re-entries",
            begun.elapsed(),
            inner.len()
        );
    }
    assert_eq!(bench.count(), 1 + inner.len() as i64);
    assert!(inner.len() > 10, "only {} re-entries", inner.len());
    drop(inner);
    wait_until("the inner holds are released", LIMIT, || bench.count() == 1);
    outer.unlock().await.unwrap();
}

/// Waits until the lease was prolonged that often, by any call. The key must exist all the time.
fn wait_for_renewals(bench: &mut Bench, times: usize) {
    let (mut seen, mut before) = (0, bench.pttl());
    wait_until("renewals", 2 * LIMIT, || {
        let now = bench.pttl();
        assert!(now > 0, "the key is gone after {seen} renewals");
        // A renewal adds a third of the lease, 300 ms; less is no renewal.
        seen += usize::from(now > before + 100);
        before = now;
        seen >= times
    });
}

/// A process that dies after the inner release leaves the lock to the outer holds' lease, not to
/// the longer one of a hold that was released.
#[tokio::test(flavor = "multi_thread")]
async fn inner_release_lowers_expiry_to_what_outer_holds_are_entitled_to() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    let (lock, owner) = (bench.lock.clone(), Owner::new());
    let outer = lock.lock().with_owner(owner).await.unwrap();
    let inner = lock.lock().lease(Duration::from_secs(60));
    let inner = inner.with_owner(owner).await.unwrap();
    assert!(bench.pttl() > 50_000);
    assert!(outer.remaining_lease() > Duration::from_secs(50));
    inner.unlock().await.unwrap();
    let left = bench.pttl();
    assert!((1..=3_000).contains(&left), "{left} ms");
    assert!(outer.remaining_lease() <= BRIEF);
    // It is renewed on.
    let begun = Instant::now();
    while begun.elapsed() < BRIEF * 2 {
        let left = bench.pttl();
        assert!((1..=3_000).contains(&left), "{left} ms");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(!outer.is_lost());
    outer.unlock().await.unwrap();
    assert_eq!(bench.pttl(), -2);

    // With a lease of its own the outer hold keeps the rest of that.
    let outer = lock.lock().lease(Duration::from_secs(20));
    let outer = outer.with_owner(owner).await.unwrap();
    let inner = lock.lock().lease(Duration::from_secs(60));
    let inner = inner.with_owner(owner).await.unwrap();
    inner.unlock().await.unwrap();
    let left = bench.pttl();
    assert!((15_000..=20_000).contains(&left), "{left} ms");
    outer.unlock().await.unwrap();
}

/// The holds of an earlier client, of which this one knows nothing, have no expiry: a release keeps
/// it so.
#[tokio::test(flavor = "multi_thread")]
async fn release_makes_no_expiry_where_there_was_none() {
    let id = ClientId::random();
    let mut bench = Bench::with(LockClient::builder().client_id(id)).await;
    let owner = Owner::from_thread_id(17).unwrap();
    let (lock, name) = (bench.lock.clone(), bench.name.clone());
    cmd("HSET")
        .arg(&[&*name, &format!("{id}:17"), "2"])
        .exec(&mut bench.observer)
        .unwrap();
    lock.unlock().with_owner(owner).await.unwrap();
    assert_eq!((bench.pttl(), bench.count()), (-1, 1));
    let guard = lock.lock().with_owner(owner).await.unwrap();
    cmd("PERSIST").arg(&name).exec(&mut bench.observer).unwrap();
    guard.unlock().await.unwrap();
    assert_eq!((bench.pttl(), bench.count()), (-1, 1));
    drop(lock.lock().with_owner(owner).await.unwrap());
    wait_until("the dropped guard is released", LIMIT, || {
        bench.count() == 1
    });
    lock.unlock().with_owner(owner).await.unwrap();
    assert_eq!(bench.pttl(), -2);
}
