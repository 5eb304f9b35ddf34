//! Leases: the client renews them while the lock is held and no longer, and it reports a loss
//! before another owner can acquire the lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::observe::{exists, expired, patient_connection, pttl, rival, scripts, watch};
use crate::support::process::{self, Worker};
use crate::support::proxy::{Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until};
use redisson_lock::{Error, LockClient, LockClientBuilder, LostReason, Owner, OwnerExt};
use tokio::time::{sleep, timeout};

const LIMIT: Duration = Duration::from_secs(20);

/// Far longer than any step takes.
const SOON: Duration = Duration::from_secs(30);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn watchdog(millis: u64) -> LockClientBuilder {
    LockClient::builder().watchdog_timeout(ms(millis))
}

#[tokio::test(flavor = "multi_thread")]
async fn hold_without_lease_is_renewed_beyond_watchdog_timeout() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchdog(3_000).connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let mut lost = watch(&guard);
    let begun = Instant::now();
    let mut renewed = 0;
    let mut last = pttl(&mut redis, &name);
    while begun.elapsed() < ms(9_000) {
        let left = pttl(&mut redis, &name);
        // A renewal is due at 2000 ms left; the rest allows for a busy machine.
        assert!(
            (100..=3_000).contains(&left),
            "{left} ms left after {:?}",
            begun.elapsed()
        );
        renewed += u32::from(left > last);
        last = left;
        sleep(ms(5)).await;
    }
    assert!(renewed >= 5, "{renewed} renewals");
    assert!(lost.try_recv().is_err() && !guard.is_lost());
    assert!(guard.remaining_lease() > Duration::ZERO);
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn fixed_lease_is_not_renewed_and_loss_precedes_next_grant() {
    let server = Server::start();
    let mut redis = server.connection();
    // A watchdog timeout of 300 ms would renew the lease many times in this test.
    let client = watchdog(300).connect(&server.url()).await.unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().lease(ms(8_000)).await.unwrap();
    // The margin is a twentieth of the lease: 400 ms for the notification on a busy machine.
    let lost = watch(&guard);
    let waiter = rival(&other, &name);
    let mut last = i64::MAX;
    while !waiter.is_finished() && pttl(&mut redis, &name) > 200 {
        let left = pttl(&mut redis, &name);
        assert!(left <= last, "renewed from {last} to {left} ms");
        last = left;
        sleep(ms(5)).await;
    }
    let (granted_at, next_guard) = timeout(SOON, waiter)
        .await
        .expect("the waiter did not acquire the lock")
        .unwrap();
    assert!(guard.is_lost());
    let (notified_at, reason) = timeout(SOON, lost)
        .await
        .expect("the loss was not reported")
        .unwrap();
    assert!(
        notified_at < granted_at,
        "the loss was reported {:?} after the next grant",
        notified_at - granted_at
    );
    assert_eq!(reason, LostReason::Expired);
    let refused = guard.unlock().await;
    assert!(
        matches!(
            refused,
            Err(Error::Lost {
                reason: LostReason::Expired,
                ..
            })
        ),
        "{refused:?}"
    );
    // The unlock of the lost hold releases no hold of the next owner.
    next_guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_key_is_reported_at_next_renewal() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchdog(9_000).connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let lost = watch(&guard);
    redis::cmd("DEL").arg(&name).exec(&mut redis).unwrap();
    let begun = Instant::now();
    let (notified_at, reason) = timeout(SOON, lost)
        .await
        .expect("the loss was not reported")
        .unwrap();
    assert_eq!(reason, LostReason::Gone);
    // The next renewal is due after 3 s. Without it the loss would be reported after 8.5 s.
    assert!(notified_at - begun < ms(7_000), "{:?}", notified_at - begun);
    assert!(guard.is_lost());
    assert_eq!(guard.remaining_lease(), Duration::ZERO);
    assert!(matches!(
        guard.unlock().await,
        Err(Error::Lost {
            reason: LostReason::Gone,
            ..
        })
    ));
}

/// Sets a flag when it is dropped.
struct Dropped(Arc<AtomicBool>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn run_stops_its_future_when_lock_is_lost() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchdog(3_000).connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let (steps, dropped) = (
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let flag = Dropped(Arc::clone(&dropped));
    let count = Arc::clone(&steps);
    let lock = client.lock(&name);
    let run = tokio::spawn(async move {
        lock.run(async move {
            let _flag = flag;
            loop {
                count.fetch_add(1, Ordering::AcqRel);
                sleep(ms(1)).await;
            }
        })
        .await
    });
    wait_until("the future runs", SOON, || {
        steps.load(Ordering::Acquire) > 10
    });
    assert!(!dropped.load(Ordering::Acquire));
    redis::cmd("DEL").arg(&name).exec(&mut redis).unwrap();
    let outcome: Result<(), Error> = timeout(SOON, run)
        .await
        .expect("the future was not stopped")
        .unwrap();
    assert!(
        dropped.load(Ordering::Acquire),
        "the future was not dropped"
    );
    assert!(
        matches!(&outcome, Err(Error::Lost { lock, reason: LostReason::Gone, .. }) if *lock == name),
        "{outcome:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn owner_cut_off_is_notified_before_next_grant() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = watchdog(8_000).connect(&proxy.url()).await.unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    // The margin is a twentieth of the lease: 400 ms for the notification on a busy machine.
    let lost = watch(&guard);
    let waiter = rival(&other, &name);
    proxy.set(Way::Both, Flow::Hold);
    let (granted_at, next_guard) = timeout(SOON, waiter)
        .await
        .expect("the waiter did not acquire the lock")
        .unwrap();
    assert!(guard.is_lost());
    let (notified_at, reason) = timeout(SOON, lost)
        .await
        .expect("the loss was not reported")
        .unwrap();
    assert!(
        notified_at < granted_at,
        "the loss was reported {:?} after the next grant",
        notified_at - granted_at
    );
    assert_eq!(reason, LostReason::Expired);
    assert_eq!(guard.remaining_lease(), Duration::ZERO);

    // Calls that arrive late release no hold of the next owner.
    proxy.set(Way::Both, Flow::Pass);
    wait_until_connected(&client).await;
    let refused = guard.unlock().await;
    assert!(
        matches!(
            refused,
            Err(Error::Lost {
                reason: LostReason::Expired,
                ..
            })
        ),
        "{refused:?}"
    );
    assert!(!next_guard.is_lost());
    next_guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn unlock_after_loss_reports_it_without_server() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = watchdog(600).connect(&proxy.url()).await.unwrap();
    let guard = client.lock(unique("stock")).lock().await.unwrap();
    proxy.set(Way::Both, Flow::Hold);
    assert_eq!(timeout(SOON, guard.lost()).await, Ok(LostReason::Expired));
    // By now the background tries to release the lost hold, and it keeps trying.
    sleep(ms(300)).await;
    let begun = Instant::now();
    let refused = guard.unlock().await;
    assert!(
        matches!(
            refused,
            Err(Error::Lost {
                reason: LostReason::Expired,
                ..
            })
        ),
        "{refused:?}"
    );
    assert!(begun.elapsed() < ms(2_000), "{:?}", begun.elapsed());
}

/// Waits until the client has a connection on which the server replies.
async fn wait_until_connected(client: &LockClient) {
    timeout(SOON, client.lock(unique("probe")).is_locked())
        .await
        .expect("no reply")
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn owner_cut_off_for_half_its_lease_keeps_lock() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = watchdog(4_000)
        .command_timeout(ms(300))
        .connect(&proxy.url())
        .await
        .unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let mut lost = watch(&guard);
    proxy.set(Way::Both, Flow::Hold);
    wait_until("half of the lease has passed", SOON, || {
        pttl(&mut redis, &name) < 2_000
    });
    proxy.set(Way::Both, Flow::Pass);
    wait_until("the lease is restored", ms(1_500), || {
        pttl(&mut redis, &name) > 2_600
    });
    // Beyond the end of the lease that was last confirmed before.
    sleep(ms(2_500)).await;
    assert!(lost.try_recv().is_err() && !guard.is_lost());
    guard.unlock().await.unwrap();
    assert_eq!(pttl(&mut redis, &name), -2);
}

#[tokio::test(flavor = "multi_thread")]
async fn batched_renewal_loses_only_lock_with_replaced_key() {
    const LOCKS: usize = 500;
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchdog(3_000).connect(&server.url()).await.unwrap();
    let mut guards = Vec::new();
    for _ in 0..LOCKS {
        guards.push(client.lock(unique("stock")).lock().await.unwrap());
    }
    let names: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut redis).unwrap();
    assert_eq!(names.len(), LOCKS);
    redis::pipe()
        .del(&names[0])
        .set(&names[0], "something else")
        .exec(&mut redis)
        .unwrap();
    let (before, begun) = (scripts(&mut redis), Instant::now());
    // Every lease has to be renewed in this time.
    sleep(ms(4_500)).await;
    let (calls, periods) = (
        scripts(&mut redis) - before,
        begun.elapsed().as_millis() as u64 / 1_000 + 1,
    );
    // Five batches of 100 locks in a period. The first periods may need more batches, because the
    // locks were acquired one after the other.
    assert!(
        calls >= 4 * 5,
        "{calls} scripts are too few to renew every lock"
    );
    assert!(
        calls <= periods * 20,
        "{calls} scripts in {periods} periods"
    );
    let lost: Vec<_> = guards.iter().filter(|guard| guard.is_lost()).collect();
    assert_eq!(lost.len(), 1);
    assert_eq!(timeout(SOON, lost[0].lost()).await, Ok(LostReason::Gone));
    for name in &names[1..] {
        assert!(pttl(&mut redis, name) > 0);
    }
    assert_eq!(
        redis::cmd("GET").arg(&names[0]).query(&mut redis),
        Ok("something else".to_owned())
    );
    drop(guards);
    wait_until("every other lock is released", SOON, || {
        redis::cmd("DBSIZE").query(&mut redis) == Ok(1)
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn released_hold_is_not_renewed() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchdog(300).connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let owner = format!("{}:{}", client.client_id(), guard.owner());
    guard.unlock().await.unwrap();
    // The same hold, which a renewal would keep.
    redis::pipe()
        .hset(&name, owner, 1)
        .pexpire(&name, 1_000)
        .exec(&mut redis)
        .unwrap();
    let mut last = i64::MAX;
    wait_until("the key expires", SOON, || {
        let left = pttl(&mut redis, &name);
        assert!(left <= last, "renewed from {last} to {left} ms");
        last = left;
        left == -2
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn detached_hold_is_renewed_until_unlock() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchdog(1_500).connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let lock = client.lock(&name);
    Owner::scope(async {
        let _ = lock.lock().await.unwrap().detach();
        let begun = Instant::now();
        while begun.elapsed() < ms(4_000) {
            assert!(
                pttl(&mut redis, &name) > 0,
                "the key was gone after {:?}",
                begun.elapsed()
            );
            sleep(ms(5)).await;
        }
        lock.unlock().await.unwrap();
        assert_eq!(pttl(&mut redis, &name), -2);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_hold_is_released_after_reconnect() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = watchdog(6_000)
        .command_timeout(ms(2_000))
        .connect(&proxy.url())
        .await
        .unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    // Renewals reach the server, but their replies do not reach the client: the server has a hold
    // that the client reports as lost.
    proxy.set(Way::Replies, Flow::Hold);
    assert_eq!(timeout(SOON, guard.lost()).await, Ok(LostReason::Expired));
    assert!(
        pttl(&mut redis, &name) > 1_000,
        "the renewal did not reach the server"
    );
    proxy.set(Way::Both, Flow::Pass);
    wait_until("the lost hold is released", SOON, || {
        pttl(&mut redis, &name) == -2
    });
    assert_eq!(expired(&mut redis), 0, "the lease expired instead");
    assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn grant_received_after_lease_end_is_reported_lost() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder().connect(&proxy.url()).await.unwrap();
    let name = unique("stock");
    proxy.set(Way::Replies, Flow::Delay(ms(600)));
    let outcome = client.lock(&name).lock().lease(ms(200)).await;
    assert!(
        matches!(
            outcome,
            Err(Error::Lost {
                reason: LostReason::Expired,
                ..
            })
        ),
        "{outcome:?}"
    );
    wait_until("no key is left", SOON, || pttl(&mut redis, &name) == -2);
    // The next acquire is not blocked either.
    proxy.set(Way::Replies, Flow::Pass);
    client
        .lock(&name)
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn process_resumed_after_loss_stops_guarded_work() {
    let server = Server::start();
    let mut redis = server.connection();
    let other = LockClient::connect(&server.url()).await.unwrap();
    for _ in 0..3 {
        let (name, work, done) = (unique("stock"), unique("work"), unique("done"));
        let settings = [
            ("URL", &*server.url()),
            ("LOCK", &name),
            ("WORK", &work),
            ("DONE", &done),
        ];
        let mut worker = Worker::start("lease::worker_process", "guarded work", &settings);
        let steps = |redis: &mut redis::Connection| -> u64 {
            redis::cmd("GET")
                .arg(&work)
                .query::<Option<u64>>(redis)
                .unwrap()
                .unwrap_or(0)
        };
        wait_until("the worker works", 3 * SOON, || steps(&mut redis) > 20);
        worker.pause();
        let next_guard = timeout(SOON, rival(&other, &name))
            .await
            .expect("the lock of the paused worker is not freed")
            .unwrap()
            .1;
        let before = steps(&mut redis);
        worker.resume();
        wait_until("the worker has recorded its result", SOON, || {
            redis::cmd("EXISTS").arg(&done).query(&mut redis) == Ok(1)
        });
        let outcome: String = redis::cmd("GET").arg(&done).query(&mut redis).unwrap();
        assert!(outcome.contains("was lost"), "{outcome}");
        // One step may have passed the check of the lease before the pause.
        let after = steps(&mut redis);
        assert!(
            after <= before + 1,
            "{} steps of work after the loss",
            after - before
        );
        assert!(worker.ended(SOON).success());
        assert!(!next_guard.is_lost());
        next_guard.unlock().await.unwrap();
    }
}

/// Counts steps of work under the lock until `run` stops it, then records the error.
#[tokio::test]
async fn worker_process() {
    let Some(_) = process::role() else { return };
    let mut redis = patient_connection(&process::setting("URL")).await;
    let mut counter = redis.clone();
    let client = watchdog(1_500)
        .connect(&process::setting("URL"))
        .await
        .unwrap();
    let outcome = client
        .lock(process::setting("LOCK"))
        .run(async move {
            loop {
                redis::cmd("INCR")
                    .arg(process::setting("WORK"))
                    .exec_async(&mut counter)
                    .await
                    .unwrap();
                sleep(ms(2)).await;
            }
        })
        .await;
    let Err(error): Result<(), Error> = outcome else {
        return;
    };
    redis::cmd("SET")
        .arg(process::setting("DONE"))
        .arg(error.to_string())
        .exec_async(&mut redis)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_guard_keeps_lock_until_lease_expires() {
    let server = Server::start();
    let client = watchdog(3_000).connect(&server.url()).await.unwrap();
    let name = unique("stock");
    // Before the acquire, so that the lease ends no earlier than 4 s after it.
    let begun = Instant::now();
    let guard = client.lock(&name).lock().lease(ms(4_000)).await.unwrap();
    let mut redis = server.connection();
    assert_eq!(timeout(SOON, guard.lost()).await, Ok(LostReason::Expired));
    // While the guard exists, its code may still run: no other owner may acquire the lock before
    // the lease has expired.
    loop {
        let left = pttl(&mut redis, &name);
        // The clock is read after PTTL, so that a stall of this process fails no check.
        if begun.elapsed() > ms(3_900) {
            break;
        }
        assert!(left > 0, "free after {:?}", begun.elapsed());
        sleep(ms(5)).await;
    }
    wait_until("the lease expires", SOON, || pttl(&mut redis, &name) == -2);

    // Without a guard the client releases the hold at once.
    let guard = client.lock(&name).lock().lease(ms(4_000)).await.unwrap();
    assert_eq!(timeout(SOON, guard.lost()).await, Ok(LostReason::Expired));
    drop(guard);
    wait_until("the hold is released", SOON, || {
        pttl(&mut redis, &name) == -2
    });
}

#[tokio::test]
async fn lease_at_its_limits_is_granted_or_refused() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let longest = Duration::from_secs(3650 * 24 * 3600);
    let lock = client.lock(unique("stock"));
    for lease in [
        Duration::ZERO,
        Duration::from_nanos(999_999),
        longest + Duration::from_nanos(1),
        Duration::MAX,
    ] {
        let error = lock.try_lock().lease(lease).await.unwrap_err();
        let Error::InvalidLease { lease: named, .. } = &error else {
            panic!("{error:?}")
        };
        assert_eq!(*named, lease);
        assert!(!error.is_retryable() && !error.is_timeout() && !error.is_lost());
    }
    assert!(!exists(&mut redis, lock.name()));
    let guard = lock.lock().timeout(longest).lease(longest).await.unwrap();
    assert!(pttl(&mut redis, lock.name()) > 3649 * 24 * 3600 * 1000);
    // Less the margin of a tenth.
    assert!(guard.remaining_lease() > longest * 9 / 10 - Duration::from_secs(60));
    let (mut lost, inner) = (
        Box::pin(guard.lost()),
        lock.lock().lease(ms(1)).with_owner(guard.owner()).await,
    );
    assert!(futures::poll!(&mut lost).is_pending());
    assert_eq!(inner.unwrap().hold_count(), 2);
    assert!(pttl(&mut redis, lock.name()) > 3649 * 24 * 3600 * 1000);
    guard.unlock().await.unwrap();
    wait_until("it is free", LIMIT, || !exists(&mut redis, lock.name()));
}
