//! Passing on: a lock goes from one owner of a client to the next one that waits, without the
//! server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures::future::join_all;
use redis::{Connection, cmd};
use redisson_lock::{Error, LockClient, LockGuard, LostReason, Owner, OwnerExt, ReentrantLock};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::support::observe::{exists, owner_counts, owner_field, scripts};
use crate::support::server::{Server, unique, wait_until};

const SOON: Duration = Duration::from_secs(10);

/// Passes a lock on for longer than any of these tests takes.
async fn passing(server: &Server) -> LockClient {
    passing_for(SOON, server).await
}

async fn passing_for(time: Duration, server: &Server) -> LockClient {
    let builder = LockClient::builder().passing_time(time);
    builder.connect(&server.url()).await.unwrap()
}

/// A request that waits.
fn waiting(lock: &ReentrantLock) -> JoinHandle<Result<LockGuard, Error>> {
    tokio::spawn(lock.lock().into_future())
}

/// Waits until so many requests of the client wait, and the server has answered them.
fn wait_for(client: &LockClient, requests: u64) {
    wait_until("the requests wait", SOON, || {
        client.stats().requests_waiting == requests && client.stats().contended_attempts > 0
    });
}

/// A guard that got the lock from another owner, who has unlocked it; and that owner.
async fn passed(
    redis: &mut Connection,
    client: &LockClient,
    lock: &ReentrantLock,
) -> (Owner, LockGuard) {
    loop {
        let first = lock.lock().await.unwrap();
        let (owner, next) = (first.owner(), waiting(lock));
        wait_for(client, 1);
        first.unlock().await.unwrap();
        let guard = next.await.unwrap().unwrap();
        // While an attempt is in flight the lock is not passed on.
        if known_as(redis, lock) == Some(owner_field(client, owner)) {
            return (owner, guard);
        }
        guard.unlock().await.unwrap();
    }
}

fn known_as(redis: &mut Connection, lock: &ReentrantLock) -> Option<String> {
    owner_counts(redis, lock.name()).into_keys().next()
}

#[tokio::test(flavor = "multi_thread")]
async fn many_tasks_share_few_script_calls_and_exclude_each_other() {
    const TASKS: u64 = 64;
    const ROUNDS: u64 = 30;
    let server = Server::start();
    let mut redis = server.connection();
    let client = passing_for(Duration::from_millis(10), &server).await;
    let lock = client.lock(unique("stock"));
    let (inside, sum) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
    let before = scripts(&mut redis);
    let tasks = (0..TASKS).map(|_| {
        let (lock, inside, sum) = (lock.clone(), Arc::clone(&inside), Arc::clone(&sum));
        tokio::spawn(async move {
            for _ in 0..ROUNDS {
                let guard = lock.lock().await.unwrap();
                assert!(!inside.swap(true, Ordering::AcqRel), "two owners");
                let seen = sum.load(Ordering::Relaxed);
                tokio::task::yield_now().await;
                sum.store(seen + 1, Ordering::Relaxed);
                inside.store(false, Ordering::Release);
                guard.unlock().await.unwrap();
            }
        })
    });
    for task in join_all(tasks).await {
        task.unwrap();
    }
    let calls = scripts(&mut redis) - before;
    assert_eq!(sum.load(Ordering::Relaxed), TASKS * ROUNDS);
    assert_eq!(client.stats().grants, TASKS * ROUNDS);
    assert!(calls < TASKS * ROUNDS, "{calls} script calls");
    assert!(!exists(&mut redis, lock.name()));
}

#[tokio::test(flavor = "multi_thread")]
async fn owner_that_got_the_lock_is_the_one_that_has_it() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = passing(&server).await;
    let lock = client.lock(unique("stock"));
    let (first, guard) = passed(&mut redis, &client, &lock).await;
    let known = known_as(&mut redis, &lock).unwrap();

    let info = lock.inspect().await.unwrap().unwrap();
    assert_eq!(info.owner, owner_field(&client, guard.owner()));
    assert_eq!(info.local_owner, Some(guard.owner()));
    assert!(lock.is_held_by(guard.owner()).await.unwrap());
    assert_eq!(lock.hold_count_of(guard.owner()).await, Ok(1));
    assert_eq!(lock.hold_count_of(first).await, Ok(0));
    assert!(lock.try_lock().await.unwrap().is_none());
    let first_again = lock.try_lock().into_future();
    assert!(first_again.with_owner(first).await.unwrap().is_none());

    // It re-enters, and what it releases is its own.
    let inner = guard.run(lock.lock().into_future()).await.unwrap().unwrap();
    assert_eq!(lock.hold_count_of(guard.owner()).await, Ok(2));
    assert_eq!(inner.hold_count(), 2);
    guard.unlock().await.unwrap();
    assert_eq!(owner_counts(&mut redis, lock.name())[&known], 1);
    inner.unlock().await.unwrap();
    assert!(!exists(&mut redis, lock.name()));
    // The first owner is free to acquire again.
    lock.run(async {}).with_owner(first).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn passed_lock_is_renewed_and_detached_and_unlocked() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .passing_time(SOON)
        .watchdog_timeout(Duration::from_secs(2))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let (_, guard) = passed(&mut redis, &client, &lock).await;
    let renewals = client.stats().renewals;
    wait_until("it is renewed", SOON, || {
        let stats = client.stats();
        assert!(!guard.is_lost(), "{stats:?}");
        stats.renewals > renewals + 3
    });
    let owner = guard.detach();
    assert!(exists(&mut redis, lock.name()));
    lock.unlock().with_owner(owner).await.unwrap();
    assert!(!exists(&mut redis, lock.name()));
}

/// The server's word is still what an unlock waits for.
#[tokio::test(flavor = "multi_thread")]
async fn unlock_of_a_lock_that_was_deleted_before_is_lost() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = passing(&server).await;
    let lock = client.lock(unique("stock"));
    let first = lock.lock().await.unwrap();
    let next = waiting(&lock);
    wait_for(&client, 1);
    cmd("DEL").arg(lock.name()).exec(&mut redis).unwrap();
    let error = first.unlock().await.unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Lost {
                reason: LostReason::Gone,
                ..
            }
        ),
        "{error:?}"
    );
    // The next owner is notified, unless the server granted the lock to it anew.
    match timeout(SOON, next).await.unwrap().unwrap() {
        Ok(guard) => {
            let own = owner_field(&client, guard.owner());
            if known_as(&mut redis, &lock) != Some(own) {
                timeout(SOON, guard.lost()).await.expect("it is lost, too");
            }
        }
        Err(error) => assert!(error.is_lost(), "{error:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn force_unlock_by_another_client_frees_a_passed_lock() {
    let server = Server::start();
    let mut redis = server.connection();
    let (client, operator) = (passing(&server).await, passing(&server).await);
    for forcing in [&operator, &client] {
        let lock = client.lock(unique("stock"));
        let (_, guard) = passed(&mut redis, &client, &lock).await;
        assert!(forcing.lock(lock.name()).force_unlock().await.unwrap());
        let other = operator.lock(lock.name()).lock().await.unwrap();
        assert!(guard.unlock().await.unwrap_err().is_lost());
        other.unlock().await.unwrap();
    }
}

/// Tasks that never let a lock rest leave it to others after the passing time.
#[tokio::test(flavor = "multi_thread")]
async fn other_client_gets_a_lock_that_is_passed_on_all_the_time() {
    let server = Server::start();
    let busy = passing_for(Duration::from_millis(10), &server).await;
    let other = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let over = Arc::<AtomicBool>::default();
    let tasks: Vec<_> = (0..16)
        .map(|_| {
            let (lock, over) = (busy.lock(&name), Arc::clone(&over));
            tokio::spawn(async move {
                while !over.load(Ordering::Acquire) {
                    drop(lock.lock().await.unwrap());
                }
            })
        })
        .collect();
    let lock = other.lock(&name);
    for _ in 0..10 {
        let guard = timeout(SOON, lock.lock().into_future()).await;
        drop(guard.expect("the lock is kept from others").unwrap());
    }
    over.store(true, Ordering::Release);
    for task in join_all(tasks).await {
        task.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lock_is_passed_on_by_default_unless_that_is_switched_off() {
    let server = Server::start();
    let mut redis = server.connection();
    let off = LockClient::builder().passing_time(Duration::ZERO);
    for (builder, can_pass) in [(LockClient::builder(), true), (off, false)] {
        let client = builder.connect(&server.url()).await.unwrap();
        let lock = client.lock(unique("stock"));
        let mut is_passed = false;
        // On a busy machine the time may be over before the lock is released.
        for _ in 0..if can_pass { 1_000 } else { 20 } {
            let first = lock.lock().await.unwrap();
            let next = waiting(&lock);
            let contended = client.stats().contended_attempts;
            while client.stats().contended_attempts == contended {
                tokio::task::yield_now().await;
            }
            let earlier = owner_field(&client, first.owner());
            first.unlock().await.unwrap();
            let guard = next.await.unwrap().unwrap();
            let known = known_as(&mut redis, &lock).unwrap();
            is_passed = known == earlier;
            assert!(is_passed || known == owner_field(&client, guard.owner()));
            guard.unlock().await.unwrap();
            if is_passed {
                break;
            }
        }
        assert_eq!(is_passed, can_pass);
    }
}

#[tokio::test]
async fn passing_time_out_of_bounds_is_refused() {
    let error = LockClient::builder()
        .passing_time(Duration::from_secs(11))
        .connect("redis://127.0.0.1:1")
        .await
        .unwrap_err();
    assert!(matches!(error, Error::InvalidConfig { .. }), "{error:?}");
}

/// Requests that are cancelled, offers that are not claimed, and a shutdown leave nothing.
#[tokio::test(flavor = "multi_thread")]
async fn cancelled_requests_and_shutdown_leave_nothing() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = passing(&server).await;
    let lock = client.lock(unique("stock"));
    for round in 0..50_u64 {
        let guard = lock.lock().await.unwrap();
        let requests: Vec<_> = (0..4)
            .map(|_| {
                let lock = lock.clone();
                tokio::spawn(async move { drop(lock.lock().await.unwrap()) })
            })
            .collect();
        if round % 2 == 0 {
            tokio::task::yield_now().await;
        }
        drop(guard);
        requests[1].abort();
        requests[2].abort();
        for request in requests {
            let ended = timeout(SOON, request).await.expect("a request hangs");
            assert!(ended.is_ok() || ended.unwrap_err().is_cancelled());
        }
    }
    let (_, guard) = passed(&mut redis, &client, &lock).await;
    let lost = guard.lost();
    let closing = tokio::spawn(async move { client.shutdown().await });
    assert_eq!(timeout(SOON, lost).await, Ok(LostReason::Shutdown));
    drop(guard);
    closing.await.unwrap().unwrap();
    wait_until("the dropped guard is released", SOON, || {
        !exists(&mut redis, lock.name())
    });
}
