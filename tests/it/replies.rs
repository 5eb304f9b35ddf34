//! Replies that are lost, truncated or delivered to another call, and connections that are lost
//! between two calls: the hold counts stay exact.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::support::observe::{exists, expired, owner_counts, owner_field, rival, sha1_of};
use crate::support::proxy::{Fate, Proxy};
use crate::support::server::{Server, unique, wait_until};
use redis::{Connection, cmd};
use redisson_lock::{ClientId, Error, LockClient, LockClientBuilder, Owner, OwnerExt};
use tokio::time::timeout;

/// Far longer than any step takes, far shorter than the leases in these tests.
const SOON: Duration = Duration::from_secs(10);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Settings by which a lost reply is noticed soon, and no lease expires during a test.
fn quick() -> LockClientBuilder {
    LockClient::builder()
        .watchdog_timeout(ms(60_000))
        .command_timeout(ms(300))
}

/// The hold count of the lock's owner, 0 if the lock has none.
fn count(redis: &mut Connection, lock: &str) -> i64 {
    let fields = owner_counts(redis, lock);
    assert!(fields.len() < 2, "two owners: {fields:?}");
    fields.into_values().next().unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn acquire_with_lost_reply_leaves_one_hold() {
    for fate in [Fate::Swallow, Fate::Close] {
        let server = Server::start();
        let mut redis = server.connection();
        let proxy = Proxy::start(&server).await;
        let client = quick().connect(&proxy.url()).await.unwrap();
        let name = unique("stock");
        proxy.next_reply_to(&[sha1_of("acquire"), &name], fate);
        let guard = client.lock(&name).lock().await.unwrap();
        assert_eq!(proxy.applied(), 1);
        assert_eq!(
            owner_counts(&mut redis, &name),
            HashMap::from([(owner_field(&client, guard.owner()), 1)])
        );
        guard.unlock().await.unwrap();
        assert!(!exists(&mut redis, &name));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reentry_with_lost_reply_leaves_two_holds() {
    for fate in [Fate::Swallow, Fate::Close] {
        let server = Server::start();
        let mut redis = server.connection();
        let proxy = Proxy::start(&server).await;
        let client = quick().connect(&proxy.url()).await.unwrap();
        let lock = client.lock(unique("stock"));
        let name = lock.name().to_owned();
        let outer = lock.lock().await.unwrap();
        let field = owner_field(&client, outer.owner());
        proxy.next_reply_to(&[sha1_of("acquire"), &name], fate);
        let inner = outer
            .run(async { lock.lock().await.unwrap() })
            .await
            .unwrap();
        assert_eq!(proxy.applied(), 1);
        assert_eq!(
            owner_counts(&mut redis, &name),
            HashMap::from([(field.clone(), 2)])
        );
        inner.unlock().await.unwrap();
        assert_eq!(owner_counts(&mut redis, &name), HashMap::from([(field, 1)]));
        outer.unlock().await.unwrap();
        assert!(!exists(&mut redis, &name));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unlock_with_lost_reply_succeeds() {
    for fate in [Fate::Swallow, Fate::Close] {
        let server = Server::start();
        let mut redis = server.connection();
        let proxy = Proxy::start(&server).await;
        let client = quick().connect(&proxy.url()).await.unwrap();
        let lock = client.lock(unique("stock"));
        let name = lock.name().to_owned();
        let outer = lock.lock().await.unwrap();
        let inner = outer
            .run(async { lock.lock().await.unwrap() })
            .await
            .unwrap();
        proxy.next_reply_to(&[sha1_of("release"), &name], fate);
        inner.unlock().await.unwrap();
        assert_eq!(
            owner_counts(&mut redis, &name),
            HashMap::from([(owner_field(&client, outer.owner()), 1)])
        );
        proxy.next_reply_to(&[sha1_of("release"), &name], fate);
        outer.unlock().await.unwrap();
        assert_eq!(proxy.applied(), 2);
        assert!(!exists(&mut redis, &name));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_unlock_keeps_next_owner() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick().connect(&proxy.url()).await.unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let waiter = rival(&other, &name);
    proxy.next_reply_to(&[sha1_of("release"), &name], Fate::Swallow);
    guard.unlock().await.unwrap();
    assert_eq!(proxy.applied(), 1);
    let (_, next_guard) = timeout(SOON, waiter)
        .await
        .expect("the waiter did not acquire the lock")
        .unwrap();
    assert_eq!(
        owner_counts(&mut redis, &name),
        HashMap::from([(owner_field(&other, next_guard.owner()), 1)])
    );
    assert!(!next_guard.is_lost());
    next_guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn renewal_with_lost_reply_loses_no_lock() {
    for fate in [Fate::Swallow, Fate::Close] {
        let server = Server::start();
        let mut redis = server.connection();
        let proxy = Proxy::start(&server).await;
        let client = LockClient::builder()
            .watchdog_timeout(ms(3_000))
            .command_timeout(ms(300))
            .connect(&proxy.url())
            .await
            .unwrap();
        let name = unique("stock");
        let begun = Instant::now();
        let guard = client.lock(&name).lock().await.unwrap();
        proxy.next_reply_to(&[sha1_of("renew"), &name], fate);
        wait_until("the reply is lost", SOON, || proxy.applied() == 1);
        // Beyond the end of the lease that the acquire confirmed.
        wait_until("the first lease has passed", SOON, || {
            begun.elapsed() > ms(3_300)
        });
        assert!(!guard.is_lost());
        assert_eq!(
            owner_counts(&mut redis, &name),
            HashMap::from([(owner_field(&client, guard.owner()), 1)])
        );
        guard.unlock().await.unwrap();
        assert!(!exists(&mut redis, &name));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_closed_within_reply_keeps_counts_exact() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick().connect(&proxy.url()).await.unwrap();
    let name = unique("stock");
    let lock = client.lock(&name);
    let mut closed = 0;
    // Before, within and right after the reply, which has 20 to 30 bytes.
    for bytes in [0, 1, 2, 3, 4, 6, 8, 11, 14, 17, 20, 23, usize::MAX] {
        let mut close_at = |what| {
            proxy.next_reply_to(&[sha1_of(what), &name], Fate::CloseAt(bytes));
            closed += 1;
        };
        Owner::scope(async {
            close_at("acquire");
            let outer = lock.lock().await.unwrap();
            assert_eq!(count(&mut redis, &name), 1, "{bytes}");
            close_at("acquire");
            let inner = lock.lock().await.unwrap();
            assert_eq!(count(&mut redis, &name), 2, "{bytes}");
            close_at("acquire");
            let _ = lock.try_lock().await.unwrap().expect("a re-entry").detach();
            assert_eq!(count(&mut redis, &name), 3, "{bytes}");
            close_at("release");
            lock.unlock().await.unwrap();
            assert_eq!(count(&mut redis, &name), 2, "{bytes}");
            close_at("release");
            inner.unlock().await.unwrap();
            assert_eq!(count(&mut redis, &name), 1, "{bytes}");
            close_at("release");
            outer.unlock().await.unwrap();
            assert_eq!(count(&mut redis, &name), 0, "{bytes}");
        })
        .await;
        assert_eq!(proxy.applied(), closed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn renewal_with_truncated_reply_is_repeated() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .watchdog_timeout(ms(3_000))
        .connect(&proxy.url())
        .await
        .unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    for (closed, bytes) in [0, 5, 12, usize::MAX].into_iter().enumerate() {
        proxy.next_reply_to(&[sha1_of("renew"), &name], Fate::CloseAt(bytes));
        wait_until("the reply is truncated", SOON, || {
            proxy.applied() == closed + 1
        });
    }
    assert!(!guard.is_lost());
    wait_until("the lease is confirmed again", SOON, || {
        guard.remaining_lease() > ms(2_000)
    });
    assert_eq!(count(&mut redis, &name), 1);
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_closed_before_each_step_keeps_counts_exact() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick().connect(&proxy.url()).await.unwrap();
    let name = unique("stock");
    let lock = client.lock(&name);
    for _ in 0..10 {
        Owner::scope(async {
            proxy.close_now();
            let outer = lock.lock().await.unwrap();
            assert_eq!(count(&mut redis, &name), 1);
            proxy.close_now();
            let inner = lock.lock().await.unwrap();
            assert_eq!(count(&mut redis, &name), 2);
            proxy.close_now();
            outer.unlock().await.unwrap();
            assert_eq!(count(&mut redis, &name), 1);
            proxy.close_now();
            inner.unlock().await.unwrap();
            assert_eq!(count(&mut redis, &name), 0);
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_lost_during_setup_is_replaced_soon() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    // The commands that the client sends on every new connection.
    for part in ["ID", "INFO", "KILL"] {
        for fate in [Fate::Close, Fate::CloseAt(3), Fate::CloseAt(usize::MAX)] {
            let applied = proxy.applied();
            proxy.next_reply_to(&["CLIENT", part], fate);
            let begun = Instant::now();
            proxy.close_now();
            lock.run(async {}).await.unwrap();
            assert_eq!(proxy.applied(), applied + 1);
            let took = begun.elapsed();
            assert!(
                took < ms(3_000),
                "{took:?} for a new connection, after one was lost at CLIENT {part}, {fate:?}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reply_to_other_call_grants_no_lock() {
    const LOCKS: usize = 20;
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick().connect(&proxy.url()).await.unwrap();
    let names: Vec<_> = (0..LOCKS).map(|_| unique("stock")).collect();
    // Another owner holds every second lock: a shifted reply would grant a held lock, or refuse a
    // free one.
    for name in names.iter().step_by(2) {
        cmd("HSET")
            .arg(name)
            .arg("9f3c0b6e-54a9-4c4f-8a53-0d2f5f2f7c11:1")
            .arg(1)
            .exec(&mut redis)
            .unwrap();
    }
    for round in 1..=5 {
        proxy.next_reply_to(
            &[sha1_of("acquire"), &names[(3 * round) % LOCKS]],
            Fate::Swallow,
        );
        let attempts: Vec<_> = names
            .iter()
            .map(|name| {
                let lock = client.lock(name);
                tokio::spawn(async move { lock.try_lock_for(ms(1_500)).await })
            })
            .collect();
        let mut guards = Vec::new();
        for (at, attempt) in attempts.into_iter().enumerate() {
            let guard = timeout(SOON, attempt)
                .await
                .expect("an attempt hangs")
                .unwrap()
                .unwrap();
            assert_eq!(guard.is_some(), at % 2 == 1, "lock {at} in round {round}");
            if let Some(guard) = guard {
                assert_eq!(
                    owner_counts(&mut redis, &names[at]),
                    HashMap::from([(owner_field(&client, guard.owner()), 1)])
                );
                guards.push(guard);
            }
        }
        assert_eq!(proxy.applied(), round);
        for guard in guards {
            guard.unlock().await.unwrap();
        }
        assert_eq!(cmd("DBSIZE").query(&mut redis), Ok(LOCKS / 2));
    }
}

/// An error reply does not show to which call it belongs. The error of another call must not hide
/// the grant of this one.
#[tokio::test(flavor = "multi_thread")]
async fn error_reply_to_other_call_hides_no_grant() {
    let server = Server::start();
    let mut redis = server.connection();
    cmd("ACL")
        .arg(&["SETUSER", "app", "on", ">secret", "~app:*", "&*", "+@all"])
        .exec(&mut redis)
        .unwrap();
    let proxy = Proxy::start(&server).await;
    let url = proxy.url().replace("redis://", "redis://app:secret@");
    let client = LockClient::connect(&url).await.unwrap();
    let name = unique("app:stock");
    let forbidden = client.lock(unique("stock"));
    // The next reply on the connection takes the place of the one that is lost.
    proxy.next_reply_to(&["EVALSHA", &name], Fate::Swallow);
    let acquire = tokio::spawn(client.lock(&name).lock().into_future());
    wait_until("the reply to the acquire is lost", SOON, || {
        proxy.applied() == 1
    });
    let refused = tokio::spawn(forbidden.try_lock().into_future());
    let acquired = timeout(SOON, acquire)
        .await
        .expect("the acquire hangs")
        .unwrap();
    let refused = timeout(SOON, refused)
        .await
        .expect("the second call hangs")
        .unwrap();
    assert!(
        refused.is_err(),
        "the setup of the test failed: {refused:?}"
    );
    match acquired {
        Ok(guard) => guard.unlock().await.unwrap(),
        Err(_) => {
            wait_until("the hold is released", SOON, || !exists(&mut redis, &name));
            assert_eq!(expired(&mut redis), 0, "the lease expired instead");
        }
    }
}

/// The client has no record of the hold, which an earlier client with the same id acquired. The
/// release runs, and its repeat is refused: `Error::Connection` ("nothing was changed") would be
/// false.
#[tokio::test(flavor = "multi_thread")]
async fn unlock_that_freed_but_is_refused_is_no_connection_error() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let (id, name, owner) = (
        ClientId::random(),
        unique("stock"),
        Owner::from_thread_id(7).unwrap(),
    );
    cmd("HSET")
        .arg(&name)
        .arg(format!("{id}:{owner}"))
        .arg(1)
        .exec(&mut redis)
        .unwrap();
    cmd("PEXPIRE")
        .arg(&name)
        .arg(600_000)
        .exec(&mut redis)
        .unwrap();
    let client = LockClient::builder()
        .client_id(id)
        .command_timeout(ms(500))
        .connect(&proxy.url())
        .await
        .unwrap();
    let lock = client.lock(&name);
    proxy.next_reply_to(&[sha1_of("release")], Fate::Swallow);
    let unlocking = tokio::spawn(async move { lock.unlock().with_owner(owner).await });
    wait_until("the lock is free", SOON, || !exists(&mut redis, &name));
    cmd("ACL")
        .arg(&["SETUSER", "default", "-evalsha", "-eval"])
        .exec(&mut redis)
        .unwrap();
    let result = timeout(SOON, unlocking)
        .await
        .expect("the unlock hangs")
        .unwrap();
    assert!(
        !matches!(result, Err(Error::Connection { .. })),
        "{result:?}"
    );
}
