//! `run`, of the lock and of a guard: the future runs only while the lock is held, and the lock is
//! released when the future ends, panics or is dropped.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::support::bench::{BRIEF, Bench, LIMIT, assert_lost};
use crate::support::observe::hold_count;
use futures::FutureExt;
use redisson_lock::{Error, LockClient, LockGuard, LostReason, Owner};
use tokio::sync::oneshot;

use crate::support::server::{Server, unique};

/// Records that it was dropped.
struct DropFlag(Arc<AtomicBool>);

impl DropFlag {
    fn new() -> (Self, Arc<AtomicBool>) {
        let dropped = Arc::new(AtomicBool::new(false));
        (Self(Arc::clone(&dropped)), dropped)
    }
}

impl Drop for DropFlag {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn guard_run_reenters_and_keeps_guard() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    let guard = lock.lock().await.unwrap();
    let count = guard
        .run(async {
            lock.run(async { hold_count(&lock).await.unwrap() })
                .await
                .unwrap()
        })
        .await
        .unwrap();
    assert_eq!(count, 2);
    assert_eq!(bench.count(), 1);
    assert_eq!(
        guard.run(async { Owner::current() }).await.unwrap(),
        Some(guard.owner())
    );
    guard.unlock().await.unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn guard_run_stops_when_lock_is_lost() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    let guard = bench.lock.lock().await.unwrap();
    let (flag, dropped) = DropFlag::new();
    let work = guard.run(async move {
        let _flag = flag;
        pending::<()>().await;
    });
    bench.delete();
    let result = tokio::time::timeout(LIMIT, work)
        .await
        .expect("the run did not stop");
    assert_lost(result, LostReason::Gone);
    assert!(dropped.load(Ordering::SeqCst));
    // A future does not start under a lock that is already lost.
    let never = guard
        .run(async { panic!("the future ran without the lock") })
        .await;
    assert_lost::<()>(never, LostReason::Gone);
}

#[tokio::test(flavor = "multi_thread")]
async fn run_drops_future_when_lock_is_lost() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    for lease in [None, Some(Duration::from_millis(300))] {
        let (flag, dropped) = DropFlag::new();
        let (begun, running) = oneshot::channel();
        let request = match lease {
            None => bench.lock.lock(),
            Some(lease) => bench.lock.lock().lease(lease),
        };
        let run = request.run(async move {
            let _flag = flag;
            begun.send(()).unwrap();
            pending::<()>().await;
        });
        let task = tokio::spawn(run);
        running.await.unwrap();
        let expected = match lease {
            None => {
                bench.delete();
                LostReason::Gone
            }
            Some(_) => LostReason::Expired,
        };
        let result = tokio::time::timeout(LIMIT, task)
            .await
            .expect("the run did not stop")
            .unwrap();
        assert_lost(result, expected);
        assert!(dropped.load(Ordering::SeqCst));
        bench.wait_until_free();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_run_drops_future_and_releases_lock() {
    let mut bench = Bench::new().await;
    let (flag, dropped) = DropFlag::new();
    let (begun, running) = oneshot::channel();
    let task = tokio::spawn(bench.lock.run(async move {
        let _flag = flag;
        begun.send(()).unwrap();
        pending::<()>().await;
    }));
    running.await.unwrap();
    assert_eq!(bench.count(), 1);
    assert!(!dropped.load(Ordering::SeqCst));
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    assert!(dropped.load(Ordering::SeqCst));
    bench.wait_until_free();

    // A run that never acquired the lock drops its future, too.
    let guard = bench.lock.lock().await.unwrap();
    let (flag, dropped) = DropFlag::new();
    let mut waiting = Box::pin(bench.lock.run(async move {
        let _flag = flag;
    }));
    assert!((&mut waiting).now_or_never().is_none());
    assert!(!dropped.load(Ordering::SeqCst));
    drop(waiting);
    assert!(dropped.load(Ordering::SeqCst));
    guard.unlock().await.unwrap();
    bench.wait_until_free();
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_guard_run_keeps_guard() {
    let mut bench = Bench::new().await;
    let guard = bench.lock.lock().await.unwrap();
    let (flag, dropped) = DropFlag::new();
    let mut run = Box::pin(guard.run(async move {
        let _flag = flag;
        pending::<()>().await;
    }));
    assert!((&mut run).now_or_never().is_none());
    drop(run);
    assert!(dropped.load(Ordering::SeqCst));
    assert!(!guard.is_lost());
    assert_eq!(bench.count(), 1);
    guard.unlock().await.unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn panic_inside_run_releases_lock() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    let nested = tokio::spawn(async move {
        lock.run(lock.run(async { panic!("on purpose") }))
            .await
            .map(drop)
    });
    assert!(nested.await.unwrap_err().is_panic());
    bench.wait_until_free();
    let lock = bench.lock.clone();
    let guarded = tokio::spawn(async move {
        let guard = lock.lock().await.unwrap();
        guard
            .run(async { panic!("on purpose") })
            .await
            .map(|()| guard)
    });
    assert!(guarded.await.unwrap_err().is_panic());
    bench.wait_until_free();
    bench.lock.run(async {}).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn run_after_takeover_returns_lost() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    let result = lock
        .run(async {
            bench.steal();
            "a result"
        })
        .await;
    assert_lost(result, LostReason::Gone);
    bench.assert_the_thief_keeps_it();
}

/// The future blocks its thread beyond the lease and then completes in the same poll: what it did
/// at the end was not guarded.
#[tokio::test(flavor = "multi_thread")]
async fn run_of_future_that_completes_after_lease_is_lost() {
    let bench = Bench::new().await;
    let lease = Duration::from_millis(800);
    let outcome = bench
        .lock
        .lock()
        .lease(lease)
        .run(async { std::thread::sleep(lease) })
        .await;
    assert!(matches!(&outcome, Err(Error::Lost { .. })), "{outcome:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn run_with_of_try_lock_passes_guard_or_does_not_run() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    let request = || lock.try_lock().lease(BRIEF);
    let left = request()
        .run_with(async |guard| {
            assert_eq!(
                hold_count(&lock).await,
                Ok(1),
                "the guard's owner is current"
            );
            guard.remaining_lease()
        })
        .await
        .unwrap()
        .expect("the lock is free");
    assert!(left <= BRIEF, "{left:?}");
    assert_eq!(bench.count(), 0);
    let held = lock.lock().await.unwrap();
    let ran = request().run_with(async |_| unreachable!("the lock is held"));
    assert_eq!(ran.await, Ok(None::<()>));
    held.unlock().await.unwrap();
}

/// "The code that is awaited is the owner": also the part of a closure before its future.
#[tokio::test]
async fn closure_of_run_with_has_a_current_owner() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let (here, of_guard) = lock
        .run_with(|guard: &LockGuard| {
            let pair = (Owner::current(), guard.owner());
            async move { pair }
        })
        .await
        .unwrap();
    assert_eq!(here, Some(of_guard));
}
