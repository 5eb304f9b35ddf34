//! What may cross threads: checked by the compiler, so the tests are done when this file is built.

use std::fmt::{Debug, Display};
use std::future::Ready;
use std::hash::Hash;
use std::rc::Rc;
use std::time::Duration;

use redisson_lock::{
    ClientId, Error, LockClient, LockClientBuilder, LockGuard, LockInfo, LockRequest, LostReason,
    Owner, OwnerExt, OwnerPolicy, ReentrantLock, ServerError, Stats, Step, TryLockRequest,
    WithOwner,
};

fn is_send<T: Send + ?Sized>() {}
fn is_sync<T: Sync + ?Sized>() {}
fn is_static<T: 'static + ?Sized>() {}
fn is_value<T: Clone + Debug + Eq + Send + Sync + 'static>() {}

fn sends<T: Send>(_: T) {}
fn sends_forever<T: Send + 'static>(_: T) {}
fn resolves_to<T>(_: impl Future<Output = T>) {}

/// Never called: it is enough that it compiles.
#[expect(dead_code, reason = "checked by the compiler")]
mod checked {
    use super::*;

    fn handles_cross_threads_and_are_shared() {
        is_send::<LockClient>();
        is_sync::<LockClient>();
        is_static::<LockClient>();
        is_send::<ReentrantLock>();
        is_sync::<ReentrantLock>();
        is_static::<ReentrantLock>();
        is_send::<LockGuard>();
        is_sync::<LockGuard>();
        is_static::<LockGuard>();
        is_send::<LockClientBuilder>();
        is_sync::<LockClientBuilder>();
    }

    fn requests_cross_threads_with_what_they_run() {
        is_send::<LockRequest>();
        is_static::<LockRequest>();
        is_send::<TryLockRequest>();
        is_static::<TryLockRequest>();
        is_send::<WithOwner<Ready<u8>>>();
        is_sync::<WithOwner<Ready<u8>>>();
        is_static::<WithOwner<Ready<u8>>>();
    }

    fn every_future_of_a_client_is_send(client: LockClient) {
        sends_forever(LockClient::connect("redis://localhost"));
        sends_forever(LockClient::builder().connect("redis://localhost"));
        sends(client.shutdown());
    }

    fn every_future_of_a_lock_is_send(lock: ReentrantLock) {
        sends_forever(lock.lock().into_future());
        sends_forever(
            lock.lock()
                .timeout(Duration::ZERO)
                .lease(Duration::ZERO)
                .into_future(),
        );
        sends_forever(
            lock.try_lock_for(Duration::ZERO)
                .lease(Duration::ZERO)
                .into_future(),
        );
        sends_forever(lock.run(async { String::new() }));
        sends_forever(lock.try_run(async { String::new() }));
        sends_forever(lock.run_with(async |guard| guard.remaining_lease()));
        sends_forever(lock.run_with(async move |guard| {
            tokio::task::yield_now().await;
            guard.name().to_owned()
        }));
        sends_forever(
            lock.lock()
                .timeout(Duration::ZERO)
                .run(async { String::new() }),
        );
        sends_forever(lock.try_lock().run(async { String::new() }));
        sends_forever(lock.lock().with_owner(Owner::new()));
        sends_forever(lock.lock().in_current_owner());
        sends_forever(Owner::scope(lock.lock().into_future()));
        sends(lock.unlock());
        sends(lock.force_unlock());
        sends(lock.is_locked());
        sends(lock.is_held_by(Owner::new()));
        sends(lock.hold_count_of(Owner::new()));
        sends(lock.inspect());
    }

    /// The lock may be gone by the time that a request is awaited, and the guard by the time that
    /// its loss is.
    fn requests_borrow_nothing(lock: ReentrantLock, guard: LockGuard) {
        let (locking, trying, running) = (lock.lock(), lock.try_lock(), lock.run(async {}));
        drop(lock);
        let lost = guard.lost();
        sends_forever(guard.unlock());
        sends_forever((locking, trying, running, lost));
    }

    fn a_guards_run_is_send_if_its_future_is(guard: LockGuard) {
        sends(guard.run(async { String::new() }));
        resolves_to::<Result<u8, Error>>(guard.run(async { 1 }));
        resolves_to::<LostReason>(guard.lost());
    }

    /// Futures that stay on their thread may run under a lock, too, and need not live forever.
    fn what_runs_need_not_be_send(lock: ReentrantLock, guard: LockGuard) {
        let local = Rc::new(1);
        resolves_to::<Result<i32, Error>>(lock.run(async { *local }));
        resolves_to::<Result<i32, Error>>(guard.run(async { *local }));
        resolves_to::<i32>(Owner::scope(async { *local }));
    }

    fn values_are_values() {
        is_value::<Error>();
        is_value::<Step>();
        is_value::<LostReason>();
        is_value::<ClientId>();
        is_value::<Owner>();
        is_value::<OwnerPolicy>();
        is_value::<LockInfo>();
        is_value::<ServerError>();
        is_value::<Stats>();
        fn is_copy<T: Copy>() {}
        is_copy::<Owner>();
        is_copy::<ClientId>();
        fn is_key<T: Hash + Eq>() {}
        is_key::<Owner>();
        is_key::<ClientId>();
    }

    fn errors_are_errors() {
        fn is_error<T: std::error::Error + Display + Send + Sync + Clone + 'static>() {}
        is_error::<Error>();
        drop(Box::<dyn std::error::Error + Send + Sync>::from(
            Error::Closed,
        ));
    }

    fn everything_can_be_shown_in_a_log() {
        fn is_debug<T: Debug>() {}
        is_debug::<LockClient>();
        is_debug::<LockClientBuilder>();
        is_debug::<ReentrantLock>();
        is_debug::<LockGuard>();
        is_debug::<LockRequest>();
        is_debug::<TryLockRequest>();
        is_debug::<WithOwner<Ready<u8>>>();
    }
}

/// What no compiler sees: that the futures do work on another thread, and after a move in between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guards_and_requests_work_on_another_thread_than_they_were_made_on() {
    let server = crate::support::server::Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(crate::support::server::unique("traits"));
    let request = lock.lock().into_future();
    let guard = tokio::spawn(request).await.unwrap().unwrap();
    let runtime = tokio::runtime::Handle::current();
    let unlocked = std::thread::spawn(move || runtime.block_on(guard.unlock()));
    tokio::task::spawn_blocking(|| unlocked.join().unwrap())
        .await
        .unwrap()
        .unwrap();
    assert!(!lock.is_locked().await.unwrap());
}
