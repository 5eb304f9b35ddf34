//! `ReentrantLock::unlock` takes what no guard stands for, and nothing else.

mod support;

use futures::FutureExt;
use redisson_lock::{ClientId, Error, Holder, HolderExt, LockClient};
use support::server::{Server, unique};

fn count(redis: &mut redis::Connection, lock: &str) -> i64 {
    let counts: Vec<i64> = redis::cmd("HVALS").arg(lock).query(redis).unwrap();
    counts.iter().sum()
}

/// "Holds that belong to a guard are not touched": one hold was handed over, one is a guard's; two unlocks at once.
#[tokio::test]
async fn unlocks_at_once_leave_the_guards_hold_alone() {
    let server = Server::shared_or_start();
    let name = unique("stock");
    let id = ClientId::random();
    let mut redis = server.connection();
    let () = redis::cmd("HSET").arg(&name).arg(format!("{id}:7")).arg(1).query(&mut redis).unwrap();
    let () = redis::cmd("PEXPIRE").arg(&name).arg(30_000).query(&mut redis).unwrap();
    let client = LockClient::builder().client_id(id).connect(&server.url()).await.unwrap();
    let rival = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(&name);
    let holder = Holder::from_thread_id(7).unwrap();
    async {
        let guard = lock.lock().await.unwrap();
        assert_eq!(count(&mut redis, &name), 2);
        let (first, second) = tokio::join!(lock.unlock(), lock.unlock());
        let rival = rival.lock(&name).try_lock().await.unwrap();
        assert!(
            guard.is_lost() || rival.is_none(),
            "two hold the lock: unlock() took the guard's hold, and the guard knows nothing of it"
        );
        assert!(first.is_ok() && matches!(second, Err(Error::NotHeld { .. })), "{first:?} {second:?}");
    }
    .with_holder(holder)
    .await;
}

/// The same by a careful caller: the first unlock was given up by a time-out ("once begun it is finished in the
/// background"), so it is asked again.
#[tokio::test]
async fn an_unlock_that_is_asked_again_after_a_timeout_leaves_the_guards_hold_alone() {
    let server = Server::shared_or_start();
    let name = unique("stock");
    let id = ClientId::random();
    let mut redis = server.connection();
    let () = redis::cmd("HSET").arg(&name).arg(format!("{id}:7")).arg(1).query(&mut redis).unwrap();
    let () = redis::cmd("PEXPIRE").arg(&name).arg(30_000).query(&mut redis).unwrap();
    let client = LockClient::builder().client_id(id).connect(&server.url()).await.unwrap();
    let rival = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(&name);
    async {
        let guard = lock.lock().await.unwrap();
        // Given up by the caller: begun, and dropped before its answer.
        let first = lock.unlock().now_or_never();
        assert!(first.is_none());
        let _ = lock.unlock().await;
        let rival = rival.lock(&name).try_lock().await.unwrap();
        assert!(guard.is_lost() || rival.is_none(), "two hold the lock");
    }
    .with_holder(Holder::from_thread_id(7).unwrap())
    .await;
}

/// Nothing was handed over at all: an unlock that meets a lock() of the same holder under way.
#[tokio::test]
async fn an_unlock_beside_a_lock_leaves_the_guards_hold_alone() {
    let server = Server::shared_or_start();
    let name = unique("stock");
    let client = LockClient::connect(&server.url()).await.unwrap();
    let rival = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(&name);
    async {
        let (guard, _) = tokio::join!(lock.lock(), lock.unlock());
        let guard = guard.unwrap();
        let rival = rival.lock(&name).try_lock().await.unwrap();
        assert!(guard.is_lost() || rival.is_none(), "two hold the lock");
    }
    .with_holder(Holder::from_thread_id(7).unwrap())
    .await;
}

/// Three holds without guards, three unlocks at once: each gives one back.
#[tokio::test]
async fn as_many_unlocks_at_once_as_forgotten_holds_free_the_lock() {
    let server = Server::shared_or_start();
    let name = unique("stock");
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(&name);
    let mut redis = server.connection();
    Holder::scope(async {
        for _ in 0..3 {
            lock.lock().await.unwrap().forget();
        }
        let (a, b, c) = tokio::join!(lock.unlock(), lock.unlock(), lock.unlock());
        assert!(a.is_ok() && b.is_ok() && c.is_ok(), "{a:?} {b:?} {c:?}; still held: {}", count(&mut redis, &name));
        assert_eq!(count(&mut redis, &name), 0);
    })
    .await;
}
