//! A task that waits for a lock that it holds itself, under another owner.

use std::time::{Duration, Instant};

use redisson_lock::{DeadlockDetection, Error, LockClient, LockGuard, Owner, OwnerExt};
use tracing::Level;

use crate::support::log::Log;
use crate::support::server::{Server, unique, wait_until_async};

const LIMIT: Duration = Duration::from_secs(20);

/// Far below the watchdog timeout.
const AT_ONCE: Duration = Duration::from_secs(5);

async fn strict(server: &Server) -> LockClient {
    let builder = LockClient::builder().deadlock_detection(DeadlockDetection::Fail);
    builder.connect(&server.url()).await.unwrap()
}

#[track_caller]
fn assert_would_deadlock(answer: Result<LockGuard, Error>, name: &str, held_by: Owner) {
    let error = answer.unwrap_err();
    let Error::WouldDeadlock { lock, owner, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!((lock.as_str(), *owner), (name, held_by));
    assert_eq!(error.lock(), Some(name));
    assert!(!error.is_timeout() && !error.is_retryable() && !error.is_lost());
    let text = format!(
        "deadlock: the current task holds lock {name:?} as owner {held_by} and waits for it as another owner"
    );
    assert_eq!(error.to_string(), text);
}

#[tokio::test(flavor = "multi_thread")]
async fn second_lock_of_the_same_task_fails_at_once() {
    let server = Server::start();
    let client = strict(&server).await;
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    let begun = Instant::now();
    assert_would_deadlock(lock.lock().await, lock.name(), guard.owner());
    let limited = lock.lock().timeout(Duration::from_secs(600)).await;
    assert_would_deadlock(limited, lock.name(), guard.owner());
    assert!(begun.elapsed() < AT_ONCE);
    // Nothing of it is left: the lock is released with the one hold that there is.
    guard.unlock().await.unwrap();
    assert!(!lock.is_locked().await.unwrap());
    lock.run(async {}).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn detached_hold_of_the_same_task_is_detected() {
    let server = Server::start();
    let client = strict(&server).await;
    let lock = client.lock(unique("stock"));
    let owner = lock.lock().await.unwrap().detach();
    assert_would_deadlock(lock.lock().await, lock.name(), owner);
    lock.unlock().with_owner(owner).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn reentry_and_try_lock_are_no_deadlock() {
    let server = Server::start();
    let client = strict(&server).await;
    let lock = client.lock(unique("stock"));
    lock.run(async { lock.run(async {}).await.unwrap() })
        .await
        .unwrap();
    let guard = lock.lock().await.unwrap();
    assert!(lock.try_lock().await.unwrap().is_none());
    let inner = lock.lock().with_owner(guard.owner()).await.unwrap();
    inner.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_another_task_is_no_deadlock() {
    let server = Server::start();
    let client = strict(&server).await;
    let lock = client.lock(unique("stock"));
    let theirs = lock.clone();
    let (held, release) = (
        tokio::sync::oneshot::channel(),
        tokio::sync::oneshot::channel::<()>(),
    );
    let task = tokio::spawn(async move {
        let guard = theirs.lock().await.unwrap();
        held.0.send(()).unwrap();
        release.1.await.unwrap();
        guard.unlock().await.unwrap();
    });
    held.1.await.unwrap();
    let mut waiting = Box::pin(lock.lock().into_future());
    assert!(futures::poll!(&mut waiting).is_pending());
    release.0.send(()).unwrap();
    waiting.await.unwrap().unlock().await.unwrap();
    task.await.unwrap();
}

#[tokio::test]
async fn by_default_the_task_is_warned_and_waits() {
    let log = Log::capture();
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    let timeout = Duration::from_millis(200);
    let error = lock.lock().timeout(timeout).await.unwrap_err();
    let events = log.from(Level::WARN);
    assert_eq!(events.len(), 1, "{events:?}");
    assert_eq!(
        events[0].text,
        "a task waits for a lock that it holds itself under another owner"
    );
    assert_eq!(events[0].fields["lock"], lock.name());
    assert_eq!(
        events[0].fields["held_by"],
        format!("{}:{}", client.client_id(), guard.owner())
    );
    // The error names the owner, and says that it is one of this client.
    let Error::AcquireTimeout {
        held_by: Some(info),
        ..
    } = &error
    else {
        panic!("{error:?}")
    };
    assert_eq!(info.local_owner, Some(guard.owner()));
    let text = error.to_string();
    let start = format!(
        "timed out after 200ms waiting for lock {:?} (held by {}:{} of this client, ttl ",
        lock.name(),
        client.client_id(),
        guard.owner()
    );
    assert!(text.starts_with(&start), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn timeout_names_the_owner_of_another_client() {
    let server = Server::start();
    let (one, other) = (
        LockClient::connect(&server.url()).await.unwrap(),
        LockClient::connect(&server.url()).await.unwrap(),
    );
    let name = unique("stock");
    let guard = one
        .lock(&name)
        .lock()
        .lease(Duration::from_secs(60))
        .await
        .unwrap();
    let error = other
        .lock(&name)
        .lock()
        .timeout(Duration::ZERO)
        .await
        .unwrap_err();
    let Error::AcquireTimeout {
        held_by: Some(info),
        ..
    } = &error
    else {
        panic!("{error:?}")
    };
    assert_eq!(info.owner, format!("{}:{}", one.client_id(), guard.owner()));
    assert_eq!(info.local_owner, None);
    assert_eq!(info.hold_count, 1);
    assert!(info.ttl.unwrap() <= Duration::from_secs(60));
    assert!(error.is_timeout() && error.is_retryable() && !error.is_lost());
    assert_eq!(error.lock(), Some(&*name));
}

/// "Such a task waits forever, unless ... another branch": not for a hold that ends by itself.
#[tokio::test]
async fn wait_for_own_hold_with_a_fixed_lease_is_no_deadlock() {
    let server = Server::start();
    let client = LockClient::builder()
        .deadlock_detection(DeadlockDetection::Fail)
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("job"));
    // The nightly job of the recipes: the hold ends with its lease.
    let _ = lock
        .lock()
        .lease(Duration::from_millis(500))
        .await
        .unwrap()
        .detach();
    let answer = lock.lock().timeout(LIMIT).await;
    assert!(answer.is_ok(), "{answer:?}");
}

/// The record says that the task holds the lock itself, and the server that another owner does.
#[tokio::test]
async fn wait_after_own_hold_was_force_unlocked_elsewhere_is_no_deadlock() {
    let server = Server::start();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let client = LockClient::builder()
        .deadlock_detection(DeadlockDetection::Fail)
        .connect(&server.url())
        .await
        .unwrap();
    let name = unique("stock");
    let lock = client.lock(&name);
    let _gone = lock.lock().await.unwrap();
    assert!(other.lock(&name).force_unlock().await.unwrap());
    let theirs = other.lock(&name).lock().await.unwrap();
    let mut waiting = Box::pin(lock.lock().into_future());
    let early = tokio::time::timeout(Duration::from_millis(500), &mut waiting).await;
    assert!(early.is_err(), "{early:?}");
    theirs.unlock().await.unwrap();
    waiting.await.unwrap().unlock().await.unwrap();
}

/// `try_lock` and `try_lock_for` without time never report a deadlock; with time they do.
#[tokio::test]
async fn deadlock_is_reported_by_each_request_that_would_wait() {
    let server = Server::start();
    let client = LockClient::builder()
        .deadlock_detection(DeadlockDetection::Fail)
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    assert!(lock.try_lock().await.unwrap().is_none());
    assert!(lock.try_lock_for(Duration::ZERO).await.unwrap().is_none());
    assert_eq!(lock.try_run(async {}).await, Ok(None));
    let zero = lock.lock().timeout(Duration::ZERO).await.unwrap_err();
    assert!(matches!(zero, Error::AcquireTimeout { .. }), "{zero:?}");
    let errors = [
        lock.try_lock_for(LIMIT).await.map(drop).unwrap_err(),
        lock.run(async {}).await.unwrap_err(),
        lock.run_with(async |_| {}).await.unwrap_err(),
        lock.try_lock_for(LIMIT).run(async {}).await.unwrap_err(),
        guard
            .run(Owner::scope(lock.lock().into_future()))
            .await
            .unwrap()
            .map(drop)
            .unwrap_err(),
    ];
    for error in errors {
        let Error::WouldDeadlock { owner, .. } = &error else {
            panic!("{error:?}")
        };
        assert_eq!(*owner, guard.owner());
    }
    assert_eq!(client.stats().requests_waiting, 0);
    assert_eq!(client.stats().grants, 1);
    // Another task beside it waits, and is no deadlock.
    let theirs = lock.clone();
    let waiting = tokio::spawn(async move { theirs.lock().await.map(drop) });
    wait_until_async("it waits", LIMIT, || async {
        client.stats().requests_waiting == 1
    })
    .await;
    guard.unlock().await.unwrap();
    waiting.await.unwrap().unwrap();
}
