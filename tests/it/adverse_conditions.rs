//! Adverse conditions that no other file covers: networks that fail in one direction, servers that
//! are paused, out of memory or down, a renewal task that panics, and lock keys that another
//! program has changed.

use crate::support::observe::{channels, exists, owner_counts, park, pttl, rival, scripts, watch};
use crate::support::proxy::{Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until, wait_until_async};
use redis::{Connection, cmd};
use redisson_lock::{Error, LockClient, LockClientBuilder, LockGuard, LostReason, Owner, OwnerExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::task::{JoinHandle, block_in_place};
use tokio::time::{sleep, timeout};
use tracing::field::{Field, Visit};
use tracing_subscriber::Registry;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

/// Far longer than any step takes, far shorter than the leases of [`quick`].
const SOON: Duration = Duration::from_secs(30);
const HOUR: Duration = Duration::from_secs(3_600);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Settings by which a lost reply is noticed soon, and no lease expires during a test.
fn quick() -> LockClientBuilder {
    LockClient::builder()
        .watchdog_timeout(ms(60_000))
        .command_timeout(ms(300))
}

fn watchdog(millis: u64) -> LockClientBuilder {
    LockClient::builder().watchdog_timeout(ms(millis))
}

/// The hold count of the lock's owner, 0 if the lock has none.
fn count(redis: &mut Connection, lock: &str) -> i64 {
    let fields = owner_counts(redis, lock);
    assert!(fields.len() < 2, "two owners: {fields:?}");
    fields.into_values().next().unwrap_or(0)
}

fn subscribed(redis: &mut Connection) -> bool {
    channels(redis) > 0
}

async fn granted(waiter: JoinHandle<(Instant, LockGuard)>) -> (Instant, LockGuard) {
    timeout(SOON, waiter)
        .await
        .expect("the waiter did not acquire the lock")
        .unwrap()
}

/// Records the log events of a thread, and panics once, at the first event with a given text.
#[derive(Clone, Default)]
struct LogRecorder {
    panics_at: Option<&'static str>,
    panicked: Arc<AtomicBool>,
    log: Arc<Mutex<String>>,
}

impl LogRecorder {
    /// Records the events of this thread until the guard is dropped.
    fn install(&self) -> tracing::subscriber::DefaultGuard {
        tracing::subscriber::set_default(Registry::default().with(self.clone()))
    }

    fn occurrences(&self, text: &str) -> usize {
        self.log.lock().unwrap().matches(text).count()
    }
}

impl<S: tracing::Subscriber> Layer<S> for LogRecorder {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{field}={value:?} ");
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.log.lock().unwrap().push_str(&text.0);
        if self.panics_at.is_some_and(|event| text.0.contains(event))
            && !self.panicked.swap(true, Ordering::AcqRel)
        {
            panic!("a panic that the test provokes");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn owner_cut_off_one_way_is_notified_before_next_grant() {
    for way in [Way::Requests, Way::Replies] {
        let server = Server::start();
        let proxy = Proxy::start(&server).await;
        let client = watchdog(8_000).connect(&proxy.url()).await.unwrap();
        let other = LockClient::connect(&server.url()).await.unwrap();
        let name = unique("stock");
        let guard = client.lock(&name).lock().await.unwrap();
        // The margin is a twentieth of the lease: 400 ms for the notification on a busy machine.
        let lost = watch(&guard);
        let waiter = rival(&other, &name);
        proxy.set(way, Flow::Hold);
        let (granted_at, next_guard) = granted(waiter).await;
        assert!(guard.is_lost());
        let (notified_at, reason) = timeout(SOON, lost)
            .await
            .expect("the loss was not reported")
            .unwrap();
        assert!(
            notified_at < granted_at,
            "{way:?}: the loss was reported {:?} after the next grant",
            notified_at - granted_at
        );
        assert_eq!(reason, LostReason::Expired);

        // Calls that arrive late release no hold of the next owner.
        proxy.set(way, Flow::Pass);
        timeout(SOON, client.lock(&name).is_locked())
            .await
            .expect("no reply")
            .unwrap();
        assert!(matches!(
            guard.unlock().await,
            Err(Error::Lost {
                reason: LostReason::Expired,
                ..
            })
        ));
        assert_eq!(count(&mut server.connection(), &name), 1);
        assert!(!next_guard.is_lost());
        next_guard.unlock().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn owner_cut_off_one_way_for_half_its_lease_keeps_lock() {
    let cut_off = async |way| {
        let server = Server::start();
        let mut redis = server.connection();
        let proxy = Proxy::start(&server).await;
        let client = watchdog(5_000)
            .command_timeout(ms(300))
            .connect(&proxy.url())
            .await
            .unwrap();
        let name = unique("stock");
        let guard = client.lock(&name).lock().await.unwrap();
        let mut lost = watch(&guard);
        proxy.set(way, Flow::Hold);
        wait_until_async("half of the lease has passed", SOON, || async {
            guard.remaining_lease() < ms(2_500)
        })
        .await;
        proxy.set(way, Flow::Pass);
        wait_until_async("the lease is restored", ms(2_000), || {
            let restored = guard.remaining_lease() > ms(3_000) && pttl(&mut redis, &name) > 3_000;
            async move { restored }
        })
        .await;
        // Beyond the end of the lease that was last confirmed before.
        sleep(ms(2_500)).await;
        assert!(lost.try_recv().is_err() && !guard.is_lost(), "{way:?}");
        guard.unlock().await.unwrap();
        assert_eq!(pttl(&mut redis, &name), -2);
    };
    tokio::join!(cut_off(Way::Requests), cut_off(Way::Replies));
}

#[tokio::test(flavor = "multi_thread")]
async fn server_outage_stops_no_renewal_on_other_server() {
    let (mut down, running) = (Server::start(), Server::start());
    let mut redis = running.connection();
    let client_of_down = watchdog(3_000).connect(&down.url()).await.unwrap();
    let client_of_running = watchdog(3_000).connect(&running.url()).await.unwrap();
    let lost_guard = client_of_down.lock(unique("stock")).lock().await.unwrap();
    let mut guards = Vec::new();
    for _ in 0..20 {
        guards.push(
            client_of_running
                .lock(unique("stock"))
                .lock()
                .await
                .unwrap(),
        );
    }
    block_in_place(|| down.kill());
    assert_eq!(
        timeout(SOON, lost_guard.lost()).await,
        Ok(LostReason::Expired)
    );
    // Every lease on the other server needs a renewal by now, and another one later.
    sleep(ms(2_000)).await;
    assert!(guards.iter().all(|guard| !guard.is_lost()));
    assert_eq!(cmd("DBSIZE").query(&mut redis), Ok(guards.len()));
    for guard in guards {
        timeout(SOON, guard.unlock())
            .await
            .expect("the unlock hangs")
            .unwrap();
    }
}

#[tokio::test]
async fn panic_of_log_subscriber_is_logged_and_renewal_continues() {
    let log = LogRecorder {
        panics_at: Some("a lock was lost"),
        ..LogRecorder::default()
    };
    let _recording = log.install();
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchdog(2_000).connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let gone = client.lock(&name).lock().await.unwrap();
    let others = [
        client.lock(unique("stock")).lock().await.unwrap(),
        client.lock(unique("stock")).lock().await.unwrap(),
    ];
    cmd("DEL").arg(&name).exec(&mut redis).unwrap();
    assert_eq!(timeout(SOON, gone.lost()).await, Ok(LostReason::Gone));
    wait_until_async("the panic is logged", SOON, || async {
        log.occurrences("a subscriber of the log panicked") == 1
    })
    .await;
    assert!(log.panicked.load(Ordering::Acquire));
    sleep(ms(4_500)).await;
    assert!(
        others.iter().all(|guard| !guard.is_lost()),
        "the renewals have stopped"
    );
    for guard in others {
        guard.unlock().await.unwrap();
    }
    client.shutdown().await.unwrap();
}

#[tokio::test]
async fn dropped_guard_never_blocks_and_failure_is_logged_and_counted() {
    const LOCKS: usize = 50;
    let log = LogRecorder::default();
    let _recording = log.install();
    let mut server = Server::start();
    let client = quick()
        .retry_timeout(ms(500))
        .connect(&server.url())
        .await
        .unwrap();
    let mut guards = Vec::new();
    for _ in 0..LOCKS {
        guards.push(
            client
                .lock(unique("stock"))
                .lock()
                .lease(ms(2_000))
                .await
                .unwrap(),
        );
    }
    server.pause();
    let begun = Instant::now();
    drop(guards);
    assert!(begun.elapsed() < ms(1_000), "{:?}", begun.elapsed());
    server.kill();
    let failure = "a hold could not be released, its lease will expire";
    wait_until_async("each failure is logged", SOON, || async {
        log.occurrences(failure) == LOCKS
    })
    .await;
    assert_eq!(client.stats().failed_releases, LOCKS as u64);
}

/// The background finishes the unlock. No caller is left to return the error to.
#[tokio::test]
async fn failed_unlock_with_dropped_future_is_counted() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    cmd("ACL")
        .arg(&["SETUSER", "default", "-evalsha", "-eval"])
        .exec(&mut redis)
        .unwrap();
    drop(park(guard.unlock()));
    wait_until_async("the failure is counted", SOON, || async {
        client.stats().failed_releases == 1
    })
    .await;
    assert!(exists(&mut redis, lock.name()));
}

#[tokio::test(flavor = "multi_thread")]
async fn server_paused_or_busy_within_lease_loses_no_lock() {
    let server = Server::start();
    let mut redis = server.connection();
    cmd("CONFIG")
        .arg(&["SET", "lua-time-limit", "20"])
        .exec(&mut redis)
        .unwrap();
    for busy in [false, true] {
        let client = watchdog(12_000)
            .command_timeout(ms(500))
            .connect(&server.url())
            .await
            .unwrap();
        let name = unique("stock");
        let guard = client.lock(&name).lock().await.unwrap();
        let next = rival(&client, &name);
        wait_until("a waiter has subscribed", SOON, || subscribed(&mut redis));
        let script = busy.then(|| {
            let mut stuck = server.connection();
            std::thread::spawn(move || {
                cmd("EVAL")
                    .arg("while true do end")
                    .arg(0)
                    .exec(&mut stuck)
                    .unwrap_err()
            })
        });
        if busy {
            wait_until("the server is busy", SOON, || {
                cmd("PING")
                    .exec(&mut redis)
                    .is_err_and(|error| error.code() == Some("BUSY"))
            });
        } else {
            cmd("CLIENT")
                .arg("PAUSE")
                .arg(6_000)
                .exec(&mut redis)
                .unwrap();
        }
        // The attempt begins during the pause, which lasts longer than the command timeout and a
        // renewal period.
        let fresh = rival(&client, &unique("stock"));
        sleep(ms(6_000)).await;
        if let Some(script) = script {
            assert!(!fresh.is_finished());
            cmd("SCRIPT").arg("KILL").exec(&mut redis).unwrap();
            assert!(script.join().unwrap().to_string().contains("killed"));
        }
        granted(fresh).await.1.unlock().await.unwrap();
        // Beyond the end of the lease that was last confirmed before.
        sleep(ms(6_000)).await;
        assert!(!guard.is_lost() && !next.is_finished());
        assert_eq!(count(&mut redis, &name), 1);
        guard.unlock().await.unwrap();
        granted(next).await.1.unlock().await.unwrap();
        assert_eq!(cmd("DBSIZE").query(&mut redis), Ok(0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn server_out_of_memory_refuses_new_and_keeps_held_locks() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchdog(2_000).connect(&server.url()).await.unwrap();
    let (held, free) = (unique("stock"), unique("stock"));
    let guard = client.lock(&held).lock().await.unwrap();
    let mut memory = |limit| {
        cmd("CONFIG")
            .arg(&["SET", "maxmemory", limit])
            .exec(&mut redis)
            .unwrap()
    };
    memory("1");
    for answer in [
        client.lock(&free).lock().await.map(Some),
        client.lock(&free).try_lock().await,
    ] {
        let Err(Error::Server {
            lock: Some(lock),
            error,
            ..
        }) = &answer
        else {
            panic!("{answer:?}")
        };
        assert!(
            *lock == free && error.message().contains("OOM"),
            "{lock}: {error}"
        );
    }
    sleep(ms(3_000)).await;
    assert!(!guard.is_lost(), "the lock was not renewed");
    guard.unlock().await.unwrap();
    memory("0");
    client
        .lock(&free)
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    assert_eq!(cmd("DBSIZE").query(&mut redis), Ok(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn user_without_publish_frees_lock_and_recheck_finds_it() {
    let server = Server::start();
    let mut redis = server.connection();
    let rule = [
        "SETUSER", "mute", "on", ">secret", "~*", "&*", "+@all", "-publish",
    ];
    cmd("ACL").arg(&rule).exec(&mut redis).unwrap();
    let mute = LockClient::connect(&server.url().replace("redis://", "redis://mute:secret@"))
        .await
        .unwrap();
    let other = LockClient::builder()
        .recheck_interval(ms(200))
        .connect(&server.url())
        .await
        .unwrap();
    let name = unique("stock");
    for forced in [false, true] {
        let guard = mute.lock(&name).lock().await.unwrap();
        let next = rival(&other, &name);
        wait_until("a waiter has subscribed", SOON, || subscribed(&mut redis));
        if forced {
            assert_eq!(mute.lock(&name).force_unlock().await, Ok(true));
        } else {
            guard.unlock().await.unwrap();
        }
        granted(next).await.1.unlock().await.unwrap();
        assert_eq!(pttl(&mut redis, &name), -2);
    }
    let log: String = format!(
        "{:?}",
        cmd("ACL")
            .arg("LOG")
            .query::<redis::Value>(&mut redis)
            .unwrap()
    );
    assert!(
        log.contains("publish"),
        "the user was allowed to publish: {log}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn lock_with_overwritten_count_is_renewed_and_freed() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchdog(2_000).connect(&server.url()).await.unwrap();
    let owner = Owner::new();
    let mut held = Vec::new();
    for count in [
        "many",
        "",
        "-1",
        "1.5",
        "7",
        "9223372036854775807",
        "9223372036854775808",
    ] {
        let lock = client.lock(unique("stock"));
        let name = lock.name().to_owned();
        let guard = lock.lock().with_owner(owner).await.unwrap();
        let field = format!("{}:{owner}", client.client_id());
        redis::pipe()
            .hset(&name, field, count)
            .persist(&name)
            .exec(&mut redis)
            .unwrap();
        match timeout(SOON, lock.lock().with_owner(owner))
            .await
            .expect("the re-entry hangs")
        {
            Ok(inner) => inner.unlock().await.unwrap(),
            Err(Error::Server { error, .. }) => {
                assert!(error.message().contains("number"), "{count:?}: {error}")
            }
            Err(error) => panic!("{count:?}: {error}"),
        }
        redis::pipe().persist(&name).exec(&mut redis).unwrap();
        held.push((name, guard));
    }
    sleep(ms(3_000)).await;
    for (name, guard) in held {
        assert!(!guard.is_lost());
        assert!(
            (1..=2_000).contains(&pttl(&mut redis, &name)),
            "the renewal did not restore the expiry"
        );
        guard.unlock().await.unwrap();
        assert_eq!(pttl(&mut redis, &name), -2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn owner_field_that_is_not_utf8_is_respected() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    cmd("HSET")
        .arg(lock.name())
        .arg(b"\xff\xfe\0\r\n")
        .arg(1)
        .exec(&mut redis)
        .unwrap();
    assert!(lock.try_lock().await.unwrap().is_none());
    let info = lock.inspect().await.unwrap().expect("an owner");
    assert_eq!((info.hold_count, info.local_owner), (1, None));
    assert_eq!(lock.force_unlock().await, Ok(true));
    lock.lock().await.unwrap().unlock().await.unwrap();
}

#[tokio::test]
async fn subscriber_disconnected_by_server_rechecks_lock() {
    let server = Server::start();
    let mut redis = server.connection();
    cmd("CONFIG")
        .arg(&["SET", "client-output-buffer-limit", "pubsub 1048576 0 0"])
        .exec(&mut redis)
        .unwrap();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .watchdog_timeout(HOUR)
        .recheck_interval(HOUR)
        .connect(&proxy.url())
        .await
        .unwrap();
    let name = unique("stock");
    cmd("HSET")
        .arg(&name)
        .arg("9f3c0b6e-54a9-4c4f-8a53-0d2f5f2f7c11:1")
        .arg(1)
        .exec(&mut redis)
        .unwrap();
    let waiter = rival(&client, &name);
    wait_until_async("the waiter has subscribed", SOON, || {
        let subscribed = subscribed(&mut redis);
        async move { subscribed }
    })
    .await;
    sleep(ms(200)).await;
    // This thread is the proxy's only one, so nothing is read from the server meanwhile.
    let (channel, noise) = (
        format!("redisson_lock__channel:{{{name}}}"),
        "x".repeat(256 << 10),
    );
    wait_until("the server closes the connection", 3 * SOON, || {
        cmd("PUBLISH")
            .arg(&channel)
            .arg(&noise)
            .exec(&mut redis)
            .unwrap();
        !subscribed(&mut redis)
    });
    cmd("DEL").arg(&name).exec(&mut redis).unwrap();
    granted(waiter).await.1.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn waiter_behind_expiring_lease_does_not_spin() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .recheck_interval(HOUR)
        .connect(&server.url())
        .await
        .unwrap();
    let name = unique("stock");
    let (stop, mut connection) = (Arc::new(AtomicBool::new(false)), server.connection());
    let renewer = std::thread::spawn({
        let (name, stop) = (name.clone(), Arc::clone(&stop));
        move || {
            // The pipeline also recreates a key that has expired, outside the wait queue.
            let mut hold = redis::pipe();
            hold.hset_nx(&name, "9f3c0b6e-54a9-4c4f-8a53-0d2f5f2f7c11:1", 1)
                .pexpire(&name, 2);
            while !stop.load(Ordering::Acquire) {
                hold.exec(&mut connection).unwrap();
            }
        }
    });
    wait_until("the lock is held", SOON, || pttl(&mut redis, &name) >= 0);
    let (before, begun) = (scripts(&mut redis), Instant::now());
    let mut allowed_for_waits = 0;
    while begun.elapsed() < ms(1_000) {
        // A renewal that comes late lets the request acquire the lock; the next one waits again.
        drop(client.lock(&name).lock().timeout(ms(200)).await);
        allowed_for_waits += 4;
    }
    // One attempt in 5 ms, and for each wait its first attempt, the one after the subscription, and
    // the release.
    let (calls, allowed) = (
        scripts(&mut redis) - before,
        begun.elapsed().as_millis() as u64 / 5 + allowed_for_waits,
    );
    stop.store(true, Ordering::Release);
    renewer.join().unwrap();
    assert!(calls > 20, "the waiters sent {calls} scripts only");
    assert!(calls <= allowed, "{calls} scripts, {allowed} allowed");
}
