//! Scripts that the server refuses: which error the caller gets, and what the client repeats.

use std::future::ready;
use std::time::Duration;

use crate::support::observe::{exists, info, owner_counts, sha1_of};
use crate::support::proxy::{Fate, Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until, wait_until_async};
use redisson_lock::{Error, LockClient, Owner, OwnerExt};
use tokio::time::sleep;

/// Far shorter than the leases that no test waits for.
const SOON: Duration = Duration::from_secs(10);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Changes the permissions of the user.
fn acl(redis: &mut redis::Connection, rules: &[&str]) {
    redis::cmd("ACL")
        .arg("SETUSER")
        .arg("app")
        .arg(rules)
        .exec(redis)
        .unwrap();
}

/// The URL for a user that may run every command on these keys only.
fn url_of_user(redis: &mut redis::Connection, url: &str, keys: &str) -> String {
    acl(redis, &["on", ">secret", keys, "&*", "+@all"]);
    url.replace("redis://", "redis://app:secret@")
}

/// The reply to an acquire is lost. The error reply to a second call and the reply to a third one
/// follow, before the reply to the PING that shows to which call the error belongs. The client's
/// runtime has one thread, which sleeps until both replies have arrived; the proxy has a runtime of
/// its own.
#[test]
fn error_of_other_call_is_not_confirmed_by_later_reply() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy_runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let proxy = proxy_runtime.block_on(Proxy::start(&server));
    let url = url_of_user(&mut redis, &proxy.url(), "~app:*");
    let client_runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let name = unique("app:stock");
    let result = client_runtime.block_on(async {
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
        wait_until_async("the reply to the acquire is lost", SOON, || async {
            proxy.applied() == 1
        })
        .await;
        assert!(exists(&mut redis, &name));
        proxy.set(Way::Replies, Flow::Hold);
        let lock = client.lock(unique("stock"));
        let refused = tokio::spawn(async move { lock.try_lock().await.map(drop) });
        wait_until_async("the second call is refused", SOON, || {
            ready(info(&mut redis, "errorstats", "errorstat_NOPERM:", "count=") == 1)
        })
        .await;
        // The proxy holds the refusal. When it passes it, the acquire sends its PING, and the third
        // call follows. The proxy holds both requests, where the test cannot see them, so it sleeps
        // instead of waiting for a condition.
        proxy.set(Way::Requests, Flow::Hold);
        proxy.set(Way::Replies, Flow::Pass);
        sleep(ms(50)).await;
        let lock = client.lock(unique("app:stock"));
        let third = tokio::spawn(async move { lock.try_lock().await.map(drop) });
        sleep(ms(20)).await;
        proxy.set(Way::Requests, Flow::Pass);
        // Blocks the runtime, so that the client reads nothing until both replies have arrived.
        std::thread::sleep(ms(100));
        let result = acquire.await.unwrap();
        let _ = (refused.await, third.await);
        result
    });
    assert!(
        !matches!(result, Err(Error::Server { .. })),
        "the acquire ran, and it returned {result:?}; the server has {:?}",
        owner_counts(&mut redis, &name)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_behind_refused_one_get_no_connection_error() {
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
    let mut results = Vec::new();
    for waiter in waiters {
        results.push(waiter.await.unwrap().map(drop));
    }
    redis::cmd("SCRIPT").arg("KILL").exec(&mut redis).unwrap();
    assert!(script.join().unwrap().to_string().contains("killed"));
    let wrong: Vec<_> = results
        .iter()
        .filter(|result| matches!(result, Err(Error::Connection { .. })))
        .collect();
    assert!(
        wrong.is_empty(),
        "the server replied BUSY to every call; {} of {WAITERS} got {:?}, the first one {:?}",
        wrong.len(),
        wrong[0],
        results[0]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_renewals_are_repeated_with_backoff() {
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
    // In 5 s each lease of 6 s is due for two renewals.
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
async fn one_unlock_after_refused_unlock_frees_lock() {
    one_unlock_frees_after_a_refused(Release::Unlock).await;
}

#[tokio::test]
async fn one_unlock_after_refused_force_unlock_frees_lock() {
    one_unlock_frees_after_a_refused(Release::ForceUnlock).await;
}

enum Release {
    Unlock,
    ForceUnlock,
}

/// An owner with a given thread id, whose count the client reads, locks again after a release that
/// the server refused.
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
    wait_until_async("no key is left after the last unlock", ms(1_000), || {
        ready(!exists(&mut redis, &name))
    })
    .await;
}

/// The server answered each time, so the error must name its refusal, not a fault of the network.
#[tokio::test]
async fn unlock_refused_until_timeout_reports_server_error() {
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
        "the acquire reports {acquire}; the unlock reports {unlock}"
    );
}
