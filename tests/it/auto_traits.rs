//! Which public types and futures are `Send`, `Sync` and `'static`. The compiler checks most of it;
//! one test moves values between threads.

use std::fmt::{Debug, Display};
use std::future::Ready;
use std::hash::Hash;
use std::rc::Rc;
use std::time::Duration;

use redisson_lock::{
    ClientId, Error, Fenced, FencedLock, Lock, LockClient, LockClientBuilder, LockGuard, LockInfo,
    LockKind, LockRequest, LostReason, Owner, OwnerExt, OwnerPolicy, Reentrant, ReentrantKind,
    ReentrantLock, ServerError, Simple, SimpleLock, Stats, Step, TryLockRequest, WithOwner,
};

fn is_send<T: Send + ?Sized>() {}
fn is_sync<T: Sync + ?Sized>() {}
fn is_static<T: 'static + ?Sized>() {}
fn is_value<T: Clone + Debug + Eq + Send + Sync + 'static>() {}

fn assert_send<T: Send>(_: T) {}
fn assert_send_static<T: Send + 'static>(_: T) {}
fn resolves_to<T>(_: impl Future<Output = T>) {}

/// Never called: it is enough that it compiles.
#[expect(dead_code, reason = "checked by the compiler")]
mod checked {
    use super::*;

    fn handles_are_send_and_sync() {
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

    /// The kind adds nothing: it has no values.
    fn each_kind_is_send_and_sync<K: LockKind>(lock: Lock<K>, guard: LockGuard<K>) {
        is_send::<Lock<K>>();
        is_sync::<Lock<K>>();
        is_static::<Lock<K>>();
        is_send::<LockGuard<K>>();
        is_sync::<LockGuard<K>>();
        is_static::<LockGuard<K>>();
        is_send::<LockRequest<K>>();
        is_send::<TryLockRequest<K>>();
        fn is_clone<T: Clone>() {}
        is_clone::<Lock<K>>();
        fn is_debug<T: Debug>() {}
        is_debug::<Lock<K>>();
        is_debug::<LockGuard<K>>();
        is_debug::<LockRequest<K>>();
        is_debug::<TryLockRequest<K>>();
        fn is_unpin<T: Unpin>() {}
        is_unpin::<Lock<K>>();
        is_unpin::<LockGuard<K>>();
        assert_send_static(lock.lock().into_future());
        assert_send_static(lock.try_lock().lease(Duration::ZERO).into_future());
        assert_send_static(lock.run(async { String::new() }));
        assert_send(lock.inspect());
        assert_send(lock.is_locked());
        assert_send(lock.force_unlock());
        assert_send_static(guard.lost());
        assert_send(guard.run(async { String::new() }));
        assert_send_static(guard.unlock());
    }

    fn reentrant_kinds_unlock_and_detach<K: ReentrantKind>(lock: Lock<K>, guard: LockGuard<K>) {
        assert_send(lock.unlock());
        assert_send(lock.is_held_by(guard.owner()));
        let _: (u64, Owner) = (guard.hold_count(), guard.detach());
    }

    fn kinds_of_lock_are_aliases(fenced: FencedLock, simple: SimpleLock, lock: ReentrantLock) {
        let _: (Lock<Fenced>, Lock<Simple>, Lock<Reentrant>) = (fenced, simple, lock);
        let _: fn(&LockGuard<Fenced>) -> i64 = LockGuard::token;
        fn is_reentrant<K: ReentrantKind>() {}
        is_reentrant::<Fenced>();
        is_reentrant::<Reentrant>();
    }

    fn requests_are_send() {
        is_send::<LockRequest>();
        is_static::<LockRequest>();
        is_send::<TryLockRequest>();
        is_static::<TryLockRequest>();
        is_send::<WithOwner<Ready<u8>>>();
        is_sync::<WithOwner<Ready<u8>>>();
        is_static::<WithOwner<Ready<u8>>>();
    }

    fn client_futures_are_send(client: LockClient) {
        assert_send_static(LockClient::connect("redis://localhost"));
        assert_send_static(LockClient::builder().connect("redis://localhost"));
        assert_send(client.shutdown());
    }

    fn lock_futures_are_send(lock: ReentrantLock) {
        assert_send_static(lock.lock().into_future());
        assert_send_static(
            lock.lock()
                .timeout(Duration::ZERO)
                .lease(Duration::ZERO)
                .into_future(),
        );
        assert_send_static(
            lock.try_lock_for(Duration::ZERO)
                .lease(Duration::ZERO)
                .into_future(),
        );
        assert_send_static(lock.run(async { String::new() }));
        assert_send_static(lock.try_run(async { String::new() }));
        assert_send_static(lock.run_with(async |guard| guard.remaining_lease()));
        assert_send_static(lock.run_with(async move |guard| {
            tokio::task::yield_now().await;
            guard.name().to_owned()
        }));
        assert_send_static(
            lock.lock()
                .timeout(Duration::ZERO)
                .run(async { String::new() }),
        );
        assert_send_static(lock.try_lock().run(async { String::new() }));
        assert_send_static(
            lock.try_lock()
                .run_with(async |guard| guard.remaining_lease()),
        );
        assert_send_static(lock.lock().with_owner(Owner::new()));
        assert_send_static(lock.lock().in_current_owner());
        assert_send_static(Owner::scope(lock.lock().into_future()));
        assert_send(lock.unlock());
        assert_send(lock.force_unlock());
        assert_send(lock.is_locked());
        assert_send(lock.is_held_by(Owner::new()));
        assert_send(lock.hold_count_of(Owner::new()));
        assert_send(lock.inspect());
    }

    /// A request may outlive its lock, and the future of `lost` its guard.
    fn requests_borrow_nothing(lock: ReentrantLock, guard: LockGuard) {
        let (locking, trying, running) = (lock.lock(), lock.try_lock(), lock.run(async {}));
        drop(lock);
        let lost = guard.lost();
        assert_send_static(guard.unlock());
        assert_send_static((locking, trying, running, lost));
    }

    fn guard_run_is_send_if_its_future_is(guard: LockGuard) {
        assert_send(guard.run(async { String::new() }));
        resolves_to::<Result<u8, Error>>(guard.run(async { 1 }));
        resolves_to::<LostReason>(guard.lost());
    }

    /// A future that is neither `Send` nor `'static` may run under a lock.
    fn guarded_future_need_not_be_send(lock: ReentrantLock, guard: LockGuard) {
        let local = Rc::new(1);
        resolves_to::<Result<i32, Error>>(lock.run(async { *local }));
        resolves_to::<Result<i32, Error>>(guard.run(async { *local }));
        resolves_to::<i32>(Owner::scope(async { *local }));
    }

    fn values_are_clone_debug_and_eq() {
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

    fn error_implements_std_error() {
        fn is_error<T: std::error::Error + Display + Send + Sync + Clone + 'static>() {}
        is_error::<Error>();
        drop(Box::<dyn std::error::Error + Send + Sync>::from(
            Error::Closed,
        ));
    }

    fn public_types_are_debug() {
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

/// The compiler cannot check that a value works on another thread, and after a move in between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guard_and_request_work_on_another_thread() {
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
