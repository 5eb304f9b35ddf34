//! Hazards that no other file shows: networks that fail one way, servers that are paused, full or
//! gone while others are well, tasks that die, and lock keys that somebody has tampered with.

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

/// Far more than any step takes, far less than the leases of [`quick`].
const SOON: Duration = Duration::from_secs(10);
const HOUR: Duration = Duration::from_secs(3_600);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Settings by which a lost reply is noticed soon, and nothing runs out during a test.
fn quick() -> LockClientBuilder {
    LockClient::builder()
        .watchdog_timeout(ms(60_000))
        .command_timeout(ms(300))
}

fn watchdog(millis: u64) -> LockClientBuilder {
    LockClient::builder().watchdog_timeout(ms(millis))
}

/// The hold count of whoever holds the lock, 0 if nobody does.
fn count(redis: &mut Connection, lock: &str) -> i64 {
    let fields = owner_counts(redis, lock);
    assert!(fields.len() < 2, "two owners: {fields:?}");
    fields.into_values().next().unwrap_or(0)
}

fn subscribed(redis: &mut Connection) -> bool {
    channels(redis) > 0
}

async fn served(rival: JoinHandle<(Instant, LockGuard)>) -> (Instant, LockGuard) {
    timeout(SOON, rival)
        .await
        .expect("the rival never got in")
        .unwrap()
}

/// Takes note of what is traced, and panics at the first event that says so.
#[derive(Clone, Default)]
struct Trap {
    panics_at: Option<&'static str>,
    sprung: Arc<AtomicBool>,
    heard: Arc<Mutex<String>>,
}

impl Trap {
    /// Listens to this thread, for as long as the guard lives.
    fn set(&self) -> tracing::subscriber::DefaultGuard {
        tracing::subscriber::set_default(Registry::default().with(self.clone()))
    }

    fn has_heard(&self, what: &str) -> usize {
        self.heard.lock().unwrap().matches(what).count()
    }
}

impl<S: tracing::Subscriber> Layer<S> for Trap {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{field}={value:?} ");
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.heard.lock().unwrap().push_str(&text.0);
        if self.panics_at.is_some_and(|what| text.0.contains(what))
            && !self.sprung.swap(true, Ordering::AcqRel)
        {
            panic!("on purpose");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_that_is_cut_off_one_way_knows_of_its_loss_before_a_rival_gets_in() {
    for way in [Way::Requests, Way::Replies] {
        let server = Server::start();
        let proxy = Proxy::start(&server).await;
        let client = watchdog(2_000).connect(&proxy.url()).await.unwrap();
        let other = LockClient::connect(&server.url()).await.unwrap();
        let name = unique("stock");
        let guard = client.lock(&name).lock().await.unwrap();
        let lost = watch(&guard);
        let rival = rival(&other, &name);
        proxy.set(way, Flow::Hold);
        let (entered, rivals) = served(rival).await;
        assert!(guard.is_lost());
        let (told, reason) = timeout(SOON, lost)
            .await
            .expect("the loss was never told")
            .unwrap();
        assert!(
            told < entered,
            "{way:?}: told {:?} after the rival got in",
            told - entered
        );
        assert_eq!(reason, LostReason::Expired);

        // What the network brings late takes nothing from the rival.
        proxy.set(way, Flow::Pass);
        timeout(SOON, client.lock(&name).is_locked())
            .await
            .expect("no answer")
            .unwrap();
        assert!(matches!(
            guard.unlock().await,
            Err(Error::Lost {
                reason: LostReason::Expired,
                ..
            })
        ));
        assert_eq!(count(&mut server.connection(), &name), 1);
        assert!(!rivals.is_lost());
        rivals.unlock().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_that_is_cut_off_one_way_for_half_its_lease_keeps_its_lock() {
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
        wait_until_async("half of the lease is over", SOON, || async {
            guard.remaining_lease() < ms(2_500)
        })
        .await;
        proxy.set(way, Flow::Pass);
        wait_until_async("the lease is restored", ms(2_000), || {
            let restored = guard.remaining_lease() > ms(3_000) && pttl(&mut redis, &name) > 3_000;
            async move { restored }
        })
        .await;
        // Beyond the end of what was proved before.
        sleep(ms(2_500)).await;
        assert!(lost.try_recv().is_err() && !guard.is_lost(), "{way:?}");
        guard.unlock().await.unwrap();
        assert_eq!(pttl(&mut redis, &name), -2);
    };
    tokio::join!(cut_off(Way::Requests), cut_off(Way::Replies));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_down_stops_no_renewal_on_another() {
    let (mut down, well) = (Server::start(), Server::start());
    let mut redis = well.connection();
    let unlucky = watchdog(3_000).connect(&down.url()).await.unwrap();
    let lucky = watchdog(3_000).connect(&well.url()).await.unwrap();
    let doomed = unlucky.lock(unique("stock")).lock().await.unwrap();
    let mut guards = Vec::new();
    for _ in 0..20 {
        guards.push(lucky.lock(unique("stock")).lock().await.unwrap());
    }
    block_in_place(|| down.kill());
    assert_eq!(timeout(SOON, doomed.lost()).await, Ok(LostReason::Expired));
    // By now every lease on the other server had to be renewed; and it goes on.
    sleep(ms(2_000)).await;
    assert!(guards.iter().all(|guard| !guard.is_lost()));
    assert_eq!(cmd("DBSIZE").query(&mut redis), Ok(guards.len()));
    for guard in guards {
        timeout(SOON, guard.unlock())
            .await
            .expect("it hangs")
            .unwrap();
    }
}

#[tokio::test]
async fn the_death_of_the_renewal_task_is_told_and_the_other_locks_are_renewed_on() {
    let trap = Trap {
        panics_at: Some("a lock was lost"),
        ..Trap::default()
    };
    let _listening = trap.set();
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
    wait_until_async("the death is told", SOON, || async {
        trap.has_heard("the renewal scheduler panicked") == 1
    })
    .await;
    assert!(trap.sprung.load(Ordering::Acquire));
    sleep(ms(4_500)).await;
    assert!(
        others.iter().all(|guard| !guard.is_lost()),
        "nobody renews any more"
    );
    for guard in others {
        guard.unlock().await.unwrap();
    }
    client.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_dropped_guard_never_blocks_and_its_failure_is_traced_and_counted() {
    const LOCKS: usize = 50;
    let trap = Trap::default();
    let _listening = trap.set();
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
    let all = "a hold could not be released, its lease will expire";
    wait_until_async("each failure is traced", SOON, || async {
        trap.has_heard(all) == LOCKS
    })
    .await;
    assert_eq!(client.stats().failed_releases, LOCKS as u64);
}

/// The background finishes it, and nobody is left whom it could tell that it was refused.
#[tokio::test]
async fn an_unlock_whose_future_was_dropped_and_that_fails_is_counted() {
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
    wait_until_async("it is counted", SOON, || async {
        client.stats().failed_releases == 1
    })
    .await;
    assert!(exists(&mut redis, &lock.name()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_paused_or_busy_for_less_than_the_lease_loses_no_lock() {
    let server = Server::start();
    let mut redis = server.connection();
    cmd("CONFIG")
        .arg(&["SET", "lua-time-limit", "20"])
        .exec(&mut redis)
        .unwrap();
    for busy in [false, true] {
        let client = watchdog(5_000)
            .command_timeout(ms(500))
            .connect(&server.url())
            .await
            .unwrap();
        let name = unique("stock");
        let guard = client.lock(&name).lock().await.unwrap();
        let next = rival(&client, &name);
        wait_until("somebody waits", SOON, || subscribed(&mut redis));
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
                .arg(2_500)
                .exec(&mut redis)
                .unwrap();
        }
        // Begun in the middle of it; longer than a command may take, and than a renewal period.
        let fresh = rival(&client, &unique("stock"));
        sleep(ms(2_500)).await;
        if let Some(script) = script {
            assert!(!fresh.is_finished());
            cmd("SCRIPT").arg("KILL").exec(&mut redis).unwrap();
            assert!(script.join().unwrap().to_string().contains("killed"));
        }
        served(fresh).await.1.unlock().await.unwrap();
        // Beyond the end of what was proved before.
        sleep(ms(2_500)).await;
        assert!(!guard.is_lost() && !next.is_finished());
        assert_eq!(count(&mut redis, &name), 1);
        guard.unlock().await.unwrap();
        served(next).await.1.unlock().await.unwrap();
        assert_eq!(cmd("DBSIZE").query(&mut redis), Ok(0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_memory_refuses_new_locks_and_keeps_those_that_are_held() {
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
    assert!(!guard.is_lost(), "it was not renewed");
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
async fn a_user_who_may_not_publish_frees_its_locks_and_others_go_on_by_rechecks() {
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
        wait_until("somebody waits", SOON, || subscribed(&mut redis));
        if forced {
            assert_eq!(mute.lock(&name).force_unlock().await, Ok(true));
        } else {
            guard.unlock().await.unwrap();
        }
        served(next).await.1.unlock().await.unwrap();
        assert_eq!(pttl(&mut redis, &name), -2);
    }
    let log: String = format!(
        "{:?}",
        cmd("ACL")
            .arg("LOG")
            .query::<redis::Value>(&mut redis)
            .unwrap()
    );
    assert!(log.contains("publish"), "it was allowed to publish: {log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_count_that_is_tampered_with_keeps_no_lock_from_being_renewed_and_freed() {
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
            .expect("it hangs")
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
            "its expiry was not mended"
        );
        guard.unlock().await.unwrap();
        assert_eq!(pttl(&mut redis, &name), -2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_that_is_no_text_is_respected_as_any_other() {
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
async fn a_listener_that_lags_so_far_behind_that_the_server_hangs_up_looks() {
    let server = Server::start();
    let mut redis = server.connection();
    cmd("CONFIG")
        .arg(&["SET", "client-output-buffer-limit", "pubsub 1048576 0 0"])
        .exec(&mut redis)
        .unwrap();
    let client = LockClient::builder()
        .watchdog_timeout(HOUR)
        .recheck_interval(HOUR)
        .connect(&server.url())
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
    wait_until_async("the waiter listens", SOON, || {
        let subscribed = subscribed(&mut redis);
        async move { subscribed }
    })
    .await;
    sleep(ms(200)).await;
    // This thread is the runtime's only one, so nobody reads meanwhile.
    let (channel, noise) = (
        format!("redisson_lock__channel:{{{name}}}"),
        "x".repeat(256 << 10),
    );
    wait_until("the server hangs up", 3 * SOON, || {
        cmd("PUBLISH")
            .arg(&channel)
            .arg(&noise)
            .exec(&mut redis)
            .unwrap();
        !subscribed(&mut redis)
    });
    cmd("DEL").arg(&name).exec(&mut redis).unwrap();
    served(waiter).await.1.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_is_always_about_to_end_is_no_reason_to_spin() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .recheck_interval(HOUR)
        .connect(&server.url())
        .await
        .unwrap();
    let name = unique("stock");
    let (over, mut owner) = (Arc::new(AtomicBool::new(false)), server.connection());
    let renewing = std::thread::spawn({
        let (name, over) = (name.clone(), Arc::clone(&over));
        move || {
            // Back at once, too, should it have run out: by hand, and past any queue.
            let mut hold = redis::pipe();
            hold.hset_nx(&name, "9f3c0b6e-54a9-4c4f-8a53-0d2f5f2f7c11:1", 1)
                .pexpire(&name, 2);
            while !over.load(Ordering::Acquire) {
                hold.exec(&mut owner).unwrap();
            }
        }
    });
    wait_until("it is held", SOON, || pttl(&mut redis, &name) >= 0);
    let (before, begun) = (scripts(&mut redis), Instant::now());
    let mut asked = 0;
    while begun.elapsed() < ms(1_000) {
        // An owner that came too late lets it in; then it waits again.
        drop(client.lock(&name).lock().timeout(ms(200)).await);
        asked += 4;
    }
    // One try in 5 ms, and for each wait its first one, the one after the subscription, and its
    // give-back.
    let (calls, most) = (
        scripts(&mut redis) - before,
        begun.elapsed().as_millis() as u64 / 5 + asked,
    );
    over.store(true, Ordering::Release);
    renewing.join().unwrap();
    assert!(calls > 20, "nobody asked: {calls}");
    assert!(calls <= most, "{calls} scripts, {most} at most");
}
