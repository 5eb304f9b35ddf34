//! Runtimes: a client whose runtime has ended, and operations that are polled outside a runtime.

use std::future::pending;
use std::time::{Duration, Instant};

use futures::executor::block_on;
use redisson_lock::{Error, LockClient, LockGuard, LostReason, Owner, OwnerExt};
use tokio::runtime::{Builder, Runtime};

use crate::support::observe::{exists, pttl};
use crate::support::server::{Server, unique, wait_until};

/// Far below each time limit of a client.
const AT_ONCE: Duration = Duration::from_secs(1);

const LIMIT: Duration = Duration::from_secs(10);

fn multi_thread() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

/// A client whose runtime has ended, and a guard of it.
fn orphaned(server: &Server, name: &str) -> (LockClient, LockGuard) {
    let runtime = multi_thread();
    runtime.block_on(async {
        let client = LockClient::connect(&server.url()).await.unwrap();
        let guard = client.lock(name).lock().await.unwrap();
        (client, guard)
    })
}

#[track_caller]
fn assert_no_runtime<T: std::fmt::Debug>(answer: Result<T, Error>, begun: Instant) {
    let error = answer.unwrap_err();
    assert!(matches!(error, Error::NoRuntime { .. }), "{error:?}");
    assert!(error.to_string().contains("has ended"), "{error}");
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
}

async fn assert_each_operation_is_refused(client: &LockClient, name: &str) {
    let (lock, owner) = (client.lock(name), Owner::new());
    let begun = Instant::now();
    assert_no_runtime(lock.lock().await, begun);
    assert_no_runtime(lock.lock().timeout(LIMIT).await, begun);
    assert_no_runtime(lock.try_lock().await, begun);
    assert_no_runtime(lock.try_lock_for(LIMIT).await, begun);
    assert_no_runtime(lock.run(async {}).await, begun);
    assert_no_runtime(lock.try_run(async {}).await, begun);
    assert_no_runtime(lock.unlock().with_owner(owner).await, begun);
    assert_no_runtime(lock.inspect().await, begun);
    assert_no_runtime(lock.is_locked().await, begun);
    assert_no_runtime(lock.is_held_by(owner).await, begun);
    assert_no_runtime(lock.force_unlock().await, begun);
    assert_no_runtime(client.shutdown().await, begun);
}

#[test]
fn client_of_ended_runtime_refuses_each_operation_at_once() {
    let server = Server::start();
    let name = unique("stock");
    let (client, guard) = orphaned(&server, &name);
    // In another runtime, as a static is in the second test of a program, and in none.
    multi_thread().block_on(assert_each_operation_is_refused(&client, &name));
    block_on(assert_each_operation_is_refused(&client, &name));
    let begun = Instant::now();
    assert_no_runtime(block_on(guard.unlock()), begun);
    assert!(
        pttl(&mut server.connection(), &name) > 0,
        "the key stays until its lease expires"
    );
}

#[test]
fn guard_of_ended_runtime_is_lost_at_once() {
    let server = Server::start();
    let (client, guard) = orphaned(&server, &unique("stock"));
    let begun = Instant::now();
    assert_eq!(block_on(guard.lost()), LostReason::RuntimeEnded);
    assert!(begun.elapsed() < AT_ONCE);
    assert!(guard.is_lost());
    assert_eq!(guard.remaining_lease(), Duration::ZERO);
    let ran = block_on(guard.run(pending::<()>()));
    assert!(matches!(ran, Err(Error::Lost { .. })), "{ran:?}");
    let losses = client.stats().losses;
    assert_eq!((losses.runtime_ended, losses.total()), (1, 1));
    drop(guard);
}

#[test]
fn waiter_in_another_runtime_fails_when_the_clients_runtime_ends() {
    let server = Server::start();
    let name = unique("stock");
    let runtime = multi_thread();
    let (client, _guard) = runtime.block_on(async {
        let client = LockClient::connect(&server.url()).await.unwrap();
        let guard = client.lock(&name).lock().await.unwrap();
        (client, guard)
    });
    let lock = client.lock(&name);
    let waiting = std::thread::spawn(move || multi_thread().block_on(lock.lock().into_future()));
    wait_until("it waits", LIMIT, || client.stats().requests_waiting == 1);
    let begun = Instant::now();
    drop(runtime);
    assert_no_runtime(waiting.join().unwrap(), begun);
}

#[test]
fn operations_outside_a_runtime_work_while_the_clients_runtime_runs() {
    let server = Server::start();
    let mut redis = server.connection();
    let name = unique("stock");
    let runtime = multi_thread();
    let client = runtime
        .block_on(LockClient::connect(&server.url()))
        .unwrap();
    let lock = client.lock(&name);

    let guard = block_on(lock.lock().into_future()).unwrap();
    // Waiting, its time limit and the look for its error use timers.
    let refused = block_on(lock.lock().timeout(Duration::from_millis(50)).into_future());
    assert!(
        matches!(refused, Err(Error::AcquireTimeout { .. })),
        "{refused:?}"
    );
    assert!(
        block_on(lock.try_lock_for(Duration::from_millis(50)).into_future())
            .unwrap()
            .is_none()
    );
    assert!(block_on(lock.inspect()).unwrap().is_some());
    block_on(guard.unlock()).unwrap();

    let sum = block_on(lock.run(async { lock.run(async { 1 }).await.unwrap() + 1 })).unwrap();
    assert_eq!(sum, 2);
    let guard = block_on(
        lock.lock()
            .lease(Duration::from_millis(1_000))
            .into_future(),
    )
    .unwrap();
    assert_eq!(block_on(guard.lost()), LostReason::Expired);
    drop(guard);
    drop(block_on(lock.lock().into_future()).unwrap());
    wait_until("the dropped guard is released", LIMIT, || {
        !exists(&mut redis, &name)
    });
    block_on(client.shutdown()).unwrap();
}

#[test]
fn connect_outside_a_runtime_is_refused() {
    let answer = block_on(LockClient::connect("redis://127.0.0.1:1"));
    let error = answer.unwrap_err();
    assert!(matches!(error, Error::NoRuntime { .. }), "{error:?}");
    assert_eq!(
        error.to_string(),
        "no tokio runtime: connect was called outside a tokio runtime"
    );
}

#[test]
fn shut_down_client_of_ended_runtime_says_that_it_is_shut_down() {
    let server = Server::start();
    let runtime = multi_thread();
    let client = runtime.block_on(async {
        let client = LockClient::connect(&server.url()).await.unwrap();
        client.shutdown().await.unwrap();
        client
    });
    drop(runtime);
    assert_eq!(block_on(client.lock("a").is_locked()), Err(Error::Closed));
    assert_eq!(block_on(client.shutdown()), Ok(()));
}
