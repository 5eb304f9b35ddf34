//! What a re-entry does to the lease.

use std::time::{Duration, Instant};

use crate::support::bench::{Bench, LIMIT};
use crate::support::server::wait_until;
use redisson_lock::{LockClient, Owner, OwnerExt};

#[tokio::test(flavor = "multi_thread")]
async fn a_shorter_lease_on_re_entry_does_not_shorten_the_outer_hold() {
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
async fn the_outer_hold_goes_on_being_renewed_after_a_shorter_re_entry() {
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
    // Six thirds of the lease: it would have run out twice.
    see_renewals(&mut bench, 6);
    assert!(
        !outer.is_lost() && !inner.is_lost(),
        "the owner holds it, so no hold of it is lost"
    );
    inner.unlock().await.unwrap();
    see_renewals(&mut bench, 3);
    assert!(!outer.is_lost());
    outer.unlock().await.unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inner_hold_without_a_lease_is_renewed_although_the_outer_one_has_one() {
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
    see_renewals(&mut bench, 6);
    assert!(!inner.is_lost());
    inner.unlock().await.unwrap();
    // The hold that is left is not renewed: it runs out, and says so.
    tokio::time::timeout(LIMIT, outer.lost())
        .await
        .expect("the outer lease runs out");
    wait_until("the key runs out", LIMIT, || bench.pttl() == -2);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_re_entries_with_short_leases_do_not_starve_the_renewal_of_the_outer_hold() {
    let watchdog = Duration::from_millis(900);
    let mut bench = Bench::shared(LockClient::builder().watchdog_timeout(watchdog)).await;
    let lock = bench.lock.clone();
    let owner = Owner::new();
    let outer = lock.lock().with_owner(owner).await.unwrap();
    // They stay: a release would restore the lease by itself.
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

/// Waits until the lease was prolonged that often, by whoever; the lock must not go away meanwhile.
fn see_renewals(bench: &mut Bench, times: usize) {
    let (mut seen, mut before) = (0, bench.pttl());
    wait_until("renewals", 2 * LIMIT, || {
        let now = bench.pttl();
        assert!(now > 0, "the lock went away after {seen} renewals");
        // A renewal adds a third of the lease; less is noise.
        seen += usize::from(now > before + 100);
        before = now;
        seen >= times
    });
}
