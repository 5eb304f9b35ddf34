//! Unknown outcomes and failed operations: the reported result is true, and no lock is left on the
//! server that no owner can release.

use std::future::ready;
use std::time::{Duration, Instant};

use crate::support::observe::{connections, exists, expired, hold_count};
use crate::support::proxy::{Fate, Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until, wait_until_async};
use redisson_lock::{Error, LockClient, Owner, OwnerExt, Step};
use tokio::task::block_in_place;
use tokio::time::{sleep, timeout};

use crate::support::log::Log;

const LIMIT: Duration = Duration::from_secs(20);

/// Far longer than any step takes, far shorter than the leases that no test waits for.
const SOON: Duration = Duration::from_secs(10);

fn ms(m: u64) -> Duration {
    Duration::from_millis(m)
}

/// The key is deleted, so the client's record is stale, and the next acquire gets no reply: the
/// background releases its grant.
#[tokio::test]
async fn unknown_acquire_over_stale_record_leaves_no_key() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .retry_timeout(ms(0))
        .command_timeout(ms(300))
        .connect(&proxy.url())
        .await
        .unwrap();
    let name = unique("stock");
    let lock = client.lock(&name);
    let mut redis = server.connection();
    Owner::scope(async {
        let guard = lock.lock().await.unwrap();
        let () = redis::cmd("DEL").arg(&name).query(&mut redis).unwrap();
        // The repeated attempt, from count 0 to 1.
        proxy.next_reply_to(&[name.as_str(), "\r\n$1\r\n0\r\n$1\r\n1\r\n"], Fate::Close);
        let again = lock.lock().await;
        assert!(
            matches!(again, Err(Error::OutcomeUnknown { .. })),
            "{again:?}"
        );
        assert_eq!(proxy.applied(), 1);
        assert!(guard.is_lost());
        drop(guard);
    })
    .await;
    wait_until_async("the lock is free", SOON, || {
        ready(!exists(&mut redis, &name))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_acquire_leaves_no_key_1s_after_server_returns() {
    let mut server = Server::builder().persistent().start();
    let proxy = Proxy::start(&server).await;
    for fault in ["stopped", "silent", "killed"] {
        let mut took = Vec::new();
        for _ in 0..3 {
            let mut redis = server.connection();
            let builder = LockClient::builder()
                .watchdog_timeout(ms(60_000))
                .command_timeout(ms(300));
            let client = builder
                .retry_timeout(ms(0))
                .connect(&proxy.url())
                .await
                .unwrap();
            let name = unique("stock");
            let lock = client.lock(&name);
            match fault {
                "stopped" => server.pause(),
                _ => proxy.set(Way::Replies, Flow::Hold),
            }
            let attempt = tokio::spawn(async move { lock.lock().await.map(drop) });
            if fault == "killed" {
                wait_until("the lock is granted", SOON, || exists(&mut redis, &name));
                proxy.set(Way::Both, Flow::Hold);
            }
            let outcome = timeout(SOON, attempt)
                .await
                .expect("the attempt hangs")
                .unwrap();
            assert!(
                matches!(
                    outcome,
                    Err(Error::OutcomeUnknown {
                        step: Step::Acquire,
                        ..
                    })
                ),
                "{fault}: {outcome:?}"
            );
            match fault {
                "stopped" => server.resume(),
                "killed" => {
                    assert!(exists(&mut redis, &name));
                    block_in_place(|| {
                        server.kill();
                        server.restart();
                    });
                }
                _ => {}
            }
            proxy.set(Way::Both, Flow::Pass);
            let (returned, mut redis) = (Instant::now(), server.connection());
            // The reply comes only when every earlier call has arrived, or cannot arrive any more.
            wait_until_async("the client is connected again", SOON, || async {
                client.lock("probe").is_locked().await.is_ok()
            })
            .await;
            wait_until("the key is deleted", SOON, || !exists(&mut redis, &name));
            took.push(returned.elapsed());
            assert_eq!(expired(&mut redis), 0, "the key expired");
        }
        // The median: one round may have met a busy machine.
        took.sort();
        assert!(took[1] < ms(1_000), "{fault}: {took:?}");
    }
}

/// The network is back, but the old connections stay dead, as after the restart of a NAT device or
/// of a load balancer. So does the pending attempt to open a new one.
#[tokio::test(flavor = "multi_thread")]
async fn failed_acquire_is_released_despite_stalled_connect() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let builder = LockClient::builder()
        .watchdog_timeout(ms(60_000))
        .command_timeout(ms(300))
        .retry_timeout(ms(0));
    let client = builder.connect(&proxy.url()).await.unwrap();
    let before = connections(&mut redis);
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    proxy.set(Way::Replies, Flow::Hold);
    let outcome = lock.lock().await;
    assert!(
        matches!(
            outcome,
            Err(Error::OutcomeUnknown {
                step: Step::Acquire,
                ..
            })
        ),
        "{outcome:?}"
    );
    proxy.set(Way::Both, Flow::Hold);
    assert!(exists(&mut redis, &name));
    wait_until("a connection attempt is pending", SOON, || {
        connections(&mut redis) > before
    });
    proxy.stall();
    proxy.set(Way::Both, Flow::Pass);
    let fresh = LockClient::connect(&proxy.url()).await.unwrap();
    assert_eq!(fresh.lock("probe").is_locked().await, Ok(false));
    // Well below the connect timeout of 5 s.
    wait_until("the key is deleted", ms(2_000), || {
        !exists(&mut redis, &name)
    });
}

/// The keys of held locks stay until their leases expire, so that no other owner acquires them
/// while the code of their guards may still run.
///
/// A renewal is pending when the client is shut down, and gets no reply; another guard's pending
/// release keeps the shutdown, and with it the renewal scheduler, running.
#[tokio::test]
async fn shutdown_keeps_key_of_existing_guard() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .watchdog_timeout(ms(12_000))
        .command_timeout(ms(2000))
        .connect(&proxy.url())
        .await
        .unwrap();
    let (kept, dropped) = (unique("stock"), unique("stock"));
    let pending = client
        .lock(&dropped)
        .lock()
        .lease(Duration::from_secs(3600))
        .await
        .unwrap();
    let guard = client.lock(&kept).lock().await.unwrap();
    let began = Instant::now();
    let mut redis = server.connection();
    // The test cannot observe requests that the proxy holds. So it waits until just before the
    // renewal, which is sent a third of the lease after the acquire, and then until just after it.
    sleep(ms(3_600)).await;
    proxy.set(Way::Both, Flow::Hold);
    sleep(ms(800)).await;
    drop(pending);
    let ending = tokio::spawn({
        let client = client.clone();
        async move { client.shutdown().await }
    });
    // Longer than the command timeout: the renewal has failed, which no caller is notified of.
    sleep(ms(2_600)).await;
    proxy.set(Way::Both, Flow::Pass);
    ending.await.unwrap().unwrap();
    assert!(
        began.elapsed() < ms(11_000),
        "the machine is too slow: {:?}",
        began.elapsed()
    );
    assert!(guard.is_lost());
    assert!(
        exists(&mut redis, &kept),
        "the key was deleted after {:?} of a lease of 12 s, while its guard exists",
        began.elapsed()
    );
}

/// The owner is notified of the loss although the force unlock did not reach the server. Its lock
/// is released nevertheless.
#[tokio::test]
async fn failed_force_unlock_leaves_no_stuck_lock() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .retry_timeout(ms(0))
        .command_timeout(ms(200))
        .connect(&proxy.url())
        .await
        .unwrap();
    let name = unique("stock");
    let lock = client.lock(&name);
    let guard = lock.lock().lease(Duration::from_secs(3600)).await.unwrap();
    let mut redis = server.connection();
    proxy.set(Way::Both, Flow::Hold);
    proxy.close_now();
    // The client has to notice the closed connection, so that it sends nothing. The test cannot
    // observe that.
    sleep(ms(100)).await;
    let forced = lock.force_unlock().await;
    assert!(
        matches!(forced, Err(Error::Connection { .. })),
        "{forced:?}"
    );
    proxy.set(Way::Both, Flow::Pass);
    wait_until_async("the client is connected again", SOON, || async {
        lock.is_locked().await.is_ok()
    })
    .await;
    let unlocked = guard.unlock().await;
    let what = format!("the lock is free: {forced:?}, then {unlocked:?}");
    wait_until_async(&what, SOON, || ready(!exists(&mut redis, &name))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unlock_outside_runtime_does_not_leak_hold() {
    let server = Server::start();
    let client = LockClient::builder()
        .watchdog_timeout(ms(1000))
        .connect(&server.url())
        .await
        .unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    // tokio may panic there because no runtime exists; the hold is released nevertheless.
    let _ = std::thread::spawn(move || futures::executor::block_on(guard.unlock())).join();
    let mut redis = server.connection();
    wait_until("the lock is not renewed any more", SOON, || {
        !exists(&mut redis, &name)
    });
}

/// A new connection first has the server close the old one, so that no late copy of a call is run
/// after its repetition. Here the reply to CLIENT INFO, which names the connection, was slightly
/// late.
#[tokio::test(flavor = "multi_thread")]
async fn late_unlock_on_initially_slow_connection_keeps_next_hold() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    proxy.set(Way::Replies, Flow::Delay(ms(450)));
    let connecting = LockClient::builder()
        .watchdog_timeout(ms(60_000))
        .command_timeout(ms(400));
    let connecting = tokio::spawn({
        let url = proxy.url();
        async move { connecting.connect(&url).await.unwrap() }
    });
    // Once both connections are open, the replies are fast.
    wait_until("both connections are open", SOON, || {
        connections(&mut redis) == 3
    });
    proxy.set(Way::Replies, Flow::Pass);
    let client = connecting.await.unwrap();
    assert_late_unlock_keeps_next_hold(&server, &proxy, &client).await;
}

/// A busy server does not name the new connection, so the client could not have it closed later.
#[tokio::test(flavor = "multi_thread")]
async fn late_unlock_on_connection_to_busy_server_keeps_next_hold() {
    let server = Server::start();
    let mut redis = server.connection();
    redis::cmd("CONFIG")
        .arg(&["SET", "lua-time-limit", "50"])
        .exec(&mut redis)
        .unwrap();
    let proxy = Proxy::start(&server).await;
    let mut stuck = server.connection();
    let script = std::thread::spawn(move || {
        redis::cmd("EVAL")
            .arg("while true do end")
            .arg(0)
            .exec(&mut stuck)
    });
    wait_until("the server is busy", SOON, || {
        redis::cmd("PING")
            .exec(&mut redis)
            .is_err_and(|error| error.code() == Some("BUSY"))
    });
    let connecting = LockClient::builder()
        .watchdog_timeout(ms(60_000))
        .command_timeout(ms(400));
    let client = connecting.connect(&proxy.url()).await;
    redis::cmd("SCRIPT").arg("KILL").exec(&mut redis).unwrap();
    script.join().unwrap().unwrap_err();
    let client = client.expect("the client does not connect to a busy server");
    assert_late_unlock_keeps_next_hold(&server, &proxy, &client).await;
}

/// The proxy stalls an unlock and its connection, which the client replaces. The repeated unlock
/// frees the lock, and the same owner acquires it again. Then the proxy delivers the first unlock.
async fn assert_late_unlock_keeps_next_hold(server: &Server, proxy: &Proxy, client: &LockClient) {
    let mut redis = server.connection();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    let other = LockClient::connect(&server.url()).await.unwrap();
    Owner::scope(async {
        let first = lock.lock().await.unwrap();
        proxy.stall();
        timeout(ms(10_000), first.unlock())
            .await
            .expect("the unlock hangs")
            .unwrap();
        let second = lock.lock().await.unwrap();
        assert!(exists(&mut redis, &name));
        proxy.deliver();
        // A delivered request arrives within milliseconds.
        let begun = Instant::now();
        while begun.elapsed() < ms(500) {
            if !exists(&mut redis, &name) {
                let other = other.lock(&name).try_lock().await.unwrap();
                panic!(
                    "the late unlock released the next hold; reported as lost: {}; acquired by another client: {}",
                    second.is_lost(),
                    other.is_some()
                );
            }
            sleep(ms(5)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn is_locked_never_returns_reply_for_another_lock() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .command_timeout(ms(500))
        .connect(&proxy.url())
        .await
        .unwrap();
    let (free, held) = (unique("free"), unique("held"));
    let guard = client.lock(&held).lock().await.unwrap();
    proxy.next_reply_to(&[&free], Fate::Swallow);
    let (f, h) = (client.lock(&free), client.lock(&held));
    let (free, held) = tokio::join!(f.is_locked(), h.is_locked());
    assert_eq!(proxy.applied(), 1);
    assert_eq!((free, held), (Ok(false), Ok(true)));
    drop(guard);
}

#[tokio::test]
async fn release_of_reentry_works_without_server_memory() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("full"));
    let mut redis = server.connection();
    Owner::scope(async {
        let outer = lock.lock().await.unwrap();
        let inner = lock.lock().await.unwrap();
        let () = redis::cmd("CONFIG")
            .arg("SET")
            .arg("maxmemory")
            .arg("1")
            .query(&mut redis)
            .unwrap();
        assert_eq!(inner.unlock().await, Ok(()));
        assert_eq!(hold_count(&lock).await, Ok(1));
        assert_eq!(outer.unlock().await, Ok(()));
    })
    .await;
}

async fn hasty(url: &str) -> LockClient {
    LockClient::builder()
        .command_timeout(ms(300))
        .retry_timeout(ms(500))
        .connect(url)
        .await
        .unwrap()
}

/// "After an unlock there is nothing to do", and `is_retryable`: "the same call may succeed later".
/// Repeating the call releases a second hold.
#[tokio::test]
async fn unlock_repeated_while_retryable_releases_one_hold() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = hasty(&proxy.url()).await;
    let lock = client.lock(unique("stock"));
    let lease = Duration::from_secs(3600);
    let owner = Owner::new();
    async {
        let _ = lock.lock().lease(lease).await.unwrap().detach();
        let _ = lock.lock().lease(lease).await.unwrap().detach();
        proxy.set(Way::Replies, Flow::Hold);
        let error = lock.unlock().await.unwrap_err();
        let is_release = matches!(
            error,
            Error::OutcomeUnknown {
                step: Step::Release,
                ..
            }
        );
        assert!(is_release, "{error:?}");
        proxy.set(Way::Replies, Flow::Pass);
        if error.is_retryable() {
            lock.unlock().await.unwrap();
        }
    }
    .with_owner(owner)
    .await;
    wait_until_async("the first release is settled", LIMIT, || async {
        lock.hold_count_of(owner).await.is_ok_and(|count| count < 2)
    })
    .await;
    assert_eq!(lock.hold_count_of(owner).await, Ok(1));
}

/// The release is repeated until the server is back, so its outcome is not known yet; the error
/// says why the server cannot be reached.
#[tokio::test]
async fn unlock_while_server_is_down_says_why_and_is_completed_later() {
    let mut server = Server::builder().persistent().start();
    let log = Log::capture();
    // Also on a busy machine a call without a connection fails before its caller stops waiting.
    let builder = LockClient::builder().command_timeout(ms(300));
    let builder = builder.retry_timeout(ms(3_000));
    let client = builder.connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let lease = Duration::from_secs(3600);
    let guard = lock.lock().lease(lease).await.unwrap();
    server.stop();
    wait_until_async("the client has noticed", LIMIT, || async {
        !log.with("connecting is tried again").is_empty()
    })
    .await;
    let error = guard.unlock().await.unwrap_err();
    let Error::OutcomeUnknown { step, detail, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(*step, Step::Release);
    let address = format!("127.0.0.1:{}", server.port());
    assert!(
        detail.contains(&address) && detail.contains("Connection refused"),
        "{error}"
    );
    assert!(!error.is_retryable());
    let server = tokio::task::spawn_blocking(move || {
        server.restart();
        server
    })
    .await
    .unwrap();
    let mut redis = server.connection();
    wait_until_async("it is released", LIMIT, || {
        let held = exists(&mut redis, lock.name());
        async move { !held }
    })
    .await;
    assert_eq!(client.stats().failed_releases, 0);
}
