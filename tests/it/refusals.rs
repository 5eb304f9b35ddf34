//! What the server refuses, and what is left of it.

use std::future::ready;
use std::time::Duration;

use crate::support::observe::{exists, info, owner_counts, sha1_of};
use crate::support::proxy::{Fate, Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until, wait_until_async};
use redisson_lock::{Error, LockClient, Owner, OwnerExt};
use tokio::time::sleep;

/// Far less than the leases that are left alone.
const SOON: Duration = Duration::from_secs(10);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Changes what the user may do.
fn acl(redis: &mut redis::Connection, rules: &[&str]) {
    redis::cmd("ACL")
        .arg("SETUSER")
        .arg("app")
        .arg(rules)
        .exec(redis)
        .unwrap();
}

/// The URL for a user with these keys, who may do all else.
fn url_of_user(redis: &mut redis::Connection, url: &str, keys: &str) -> String {
    acl(redis, &["on", ">secret", keys, "&*", "+@all"]);
    url.replace("redis://", "redis://app:secret@")
}

/// An error reply for another call, and the reply to a third, come right behind an acquire whose
/// own reply is lost, and before the PING that is to show whose the error was. The client's runtime
/// has one thread, which stands still until both are there; the proxy has a runtime of its own.
#[test]
fn an_error_of_another_call_is_not_proved_by_the_reply_to_a_third() {
    let server = Server::start();
    let mut redis = server.connection();
    let outside = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let proxy = outside.block_on(Proxy::start(&server));
    let url = url_of_user(&mut redis, &proxy.url(), "~app:*");
    let inside = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let name = unique("app:stock");
    let told = inside.block_on(async {
        let client = LockClient::builder()
            .command_timeout(ms(3_000))
            .connect(&url)
            .await
            .unwrap();
        proxy.next_reply_to(&[sha1_of("acquire"), &name], Fate::Swallow);
        let lock = client.lock(&name);
        let acquire = tokio::spawn(async move {
            lock.try_lock()
                .await
                .map(|g| g.map(|g| g.detach()).is_some())
        });
        wait_until_async("its reply is lost", SOON, || async { proxy.applied() == 1 }).await;
        assert!(exists(&mut redis, &name));
        proxy.set(Way::Replies, Flow::Hold);
        let lock = client.lock(unique("stock"));
        let refused = tokio::spawn(async move { lock.try_lock().await.map(drop) });
        wait_until_async("it is refused", SOON, || {
            ready(info(&mut redis, "errorstats", "errorstat_NOPERM:", "count=") == 1)
        })
        .await;
        // The refusal waits in the proxy. Let go, it reaches the acquire, which sends its PING; the
        // third call comes behind that. Both are held in the proxy, where nobody sees them, so time
        // has to do.
        proxy.set(Way::Requests, Flow::Hold);
        proxy.set(Way::Replies, Flow::Pass);
        sleep(ms(50)).await;
        let lock = client.lock(unique("app:stock"));
        let third = tokio::spawn(async move { lock.try_lock().await.map(drop) });
        sleep(ms(20)).await;
        proxy.set(Way::Requests, Flow::Pass);
        // On purpose the client reads nothing until both replies are there.
        std::thread::sleep(ms(100));
        let told = acquire.await.unwrap();
        let _ = (refused.await, third.await);
        told
    });
    assert!(
        !matches!(told, Err(Error::Server { .. })),
        "the acquire ran, and its caller is told {told:?}; the server has {:?}",
        owner_counts(&mut redis, &name)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn who_stands_behind_a_refused_waiter_is_not_told_that_the_server_is_silent() {
    const WAITERS: usize = 120;
    let server = Server::builder().arg("--lua-time-limit", "50").start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .retry_timeout(ms(700))
        .command_timeout(ms(500))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let mut stuck = server.connection();
    let script = std::thread::spawn(move || {
        redis::cmd("EVAL")
            .arg("while true do end")
            .arg(0)
            .exec(&mut stuck)
            .unwrap_err()
    });
    wait_until("the server is busy", SOON, || {
        redis::cmd("PING")
            .exec(&mut redis)
            .is_err_and(|error| error.code() == Some("BUSY"))
    });
    let waiters: Vec<_> = (0..WAITERS)
        .map(|_| tokio::spawn(lock.lock().into_future()))
        .collect();
    let mut told = Vec::new();
    for waiter in waiters {
        told.push(waiter.await.unwrap().map(drop));
    }
    redis::cmd("SCRIPT").arg("KILL").exec(&mut redis).unwrap();
    assert!(script.join().unwrap().to_string().contains("killed"));
    let wrong: Vec<_> = told
        .iter()
        .filter(|told| matches!(told, Err(Error::Connection { .. })))
        .collect();
    assert!(
        wrong.is_empty(),
        "the server said BUSY to every question; {} of {WAITERS} were told {:?}, the first one {:?}",
        wrong.len(),
        wrong[0],
        told[0]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_renewals_are_no_storm() {
    const LOCKS: u64 = 500;
    let server = Server::start();
    let mut redis = server.connection();
    let url = url_of_user(&mut redis, &server.url(), "~*");
    let client = LockClient::builder()
        .watchdog_timeout(ms(6_000))
        .connect(&url)
        .await
        .unwrap();
    let mut guards = Vec::new();
    for _ in 0..LOCKS {
        guards.push(client.lock(unique("stock")).lock().await.unwrap());
    }
    acl(&mut redis, &["-evalsha", "-eval"]);
    let mut count = || {
        let refused = info(
            &mut redis,
            "commandstats",
            "cmdstat_evalsha:",
            "rejected_calls=",
        );
        (
            refused,
            info(&mut redis, "stats", "total_commands_processed:", ""),
        )
    };
    let before = count();
    // Storms are counted over a time: two of the three renewals in a lease.
    sleep(ms(5_000)).await;
    let after = count();
    let (refused, all) = (after.0 - before.0, after.1 - before.1);
    assert!(refused > 0, "no renewal was refused");
    assert!(
        refused < 4 * LOCKS,
        "{LOCKS} locks in 5 s: {refused} scripts were refused, {all} commands were run"
    );
}

#[tokio::test]
async fn after_a_refused_unlock_one_unlock_frees() {
    one_unlock_frees_after_a_refused(Release::Unlock).await;
}

#[tokio::test]
async fn after_a_refused_force_unlock_one_unlock_frees() {
    one_unlock_frees_after_a_refused(Release::ForceUnlock).await;
}

enum Release {
    Unlock,
    ForceUnlock,
}

/// An adopted owner, whose count is asked for, locks again after a release that the server refused.
async fn one_unlock_frees_after_a_refused(release: Release) {
    let server = Server::start();
    let mut redis = server.connection();
    let url = url_of_user(&mut redis, &server.url(), "~*");
    let client = LockClient::connect(&url).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    async {
        let first = lock.lock().await.unwrap();
        acl(&mut redis, &["-del", "-hdel"]);
        let (refused, left) = match release {
            Release::Unlock => (first.unlock().await, None),
            Release::ForceUnlock => (lock.force_unlock().await.map(drop), Some(first)),
        };
        assert!(matches!(refused, Err(Error::Server { .. })), "{refused:?}");
        acl(&mut redis, &["+@all"]);
        if let Some(first) = left {
            assert!(matches!(first.unlock().await, Err(Error::Lost { .. })));
        }
        lock.lock().await.unwrap().unlock().await.unwrap();
    }
    .with_owner(Owner::from_thread_id(7).unwrap())
    .await;
    wait_until_async(
        "no guard is left, and nothing on the server",
        ms(1_000),
        || ready(!exists(&mut redis, &name)),
    )
    .await;
}

/// The server has answered each time: who reads the error is not to look for a fault of the
/// network.
#[tokio::test]
async fn an_unlock_that_is_refused_for_long_is_not_told_as_unanswered() {
    let server = Server::start();
    let builder = LockClient::builder().command_timeout(Duration::from_millis(500));
    let client = builder
        .retry_timeout(Duration::from_millis(500))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let mut redis = server.connection();
    let guard = lock.lock().await.unwrap();
    redis::cmd("CONFIG")
        .arg(&["SET", "min-replicas-to-write", "1"])
        .query::<()>(&mut redis)
        .unwrap();
    let acquire = client
        .lock(unique("other"))
        .lock()
        .await
        .unwrap_err()
        .to_string();
    let unlock = guard.unlock().await.unwrap_err().to_string();
    assert!(acquire.contains("NOREPLICAS"), "{acquire}");
    assert!(
        unlock.contains("NOREPLICAS"),
        "the acquire says: {acquire}; the unlock: {unlock}"
    );
}
