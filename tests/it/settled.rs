//! Unknown outcomes at bad moments: what is told is true, and nothing is left behind.

use std::future::ready;
use std::time::{Duration, Instant};

use crate::support::observe::{connections, exists, expired, hold_count};
use crate::support::proxy::{Fate, Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until, wait_until_async};
use redisson_lock::{Error, LockClient, Owner, Step};
use tokio::task::block_in_place;
use tokio::time::{sleep, timeout};

/// Far more than any step takes, far less than the leases that no test waits for.
const SOON: Duration = Duration::from_secs(10);

fn ms(m: u64) -> Duration {
    Duration::from_millis(m)
}

/// The record is found stale (key deleted), the acquire that follows stays without a reply: "the
/// background gives it back".
#[tokio::test]
async fn an_unknown_acquire_over_a_stale_record_leaves_nothing() {
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
        // From 0 to 1: the correction.
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
    wait_until_async("nobody holds it, and it is free", SOON, || {
        ready(!exists(&mut redis, &name))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_acquire_leaves_no_key_within_a_second_of_the_servers_return() {
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
                wait_until("it is granted", SOON, || exists(&mut redis, &name));
                proxy.set(Way::Both, Flow::Hold);
            }
            let outcome = timeout(SOON, attempt).await.expect("it hangs").unwrap();
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
            // Answered only after what was under way has arrived, or cannot arrive any more.
            wait_until_async("the client is back", SOON, || async {
                client.lock("probe").is_locked().await.is_ok()
            })
            .await;
            wait_until("nothing is left of it", SOON, || !exists(&mut redis, &name));
            took.push(returned.elapsed());
            assert_eq!(expired(&mut redis), 0, "it ran out instead");
        }
        // One of them may have met a busy machine.
        took.sort();
        assert!(took[1] < ms(1_000), "{fault}: {took:?}");
    }
}

/// The network is back, and the connections of before are dead for good, as after the restart of a
/// NAT or of a balancer: so is the attempt to make a new one, which was under way.
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_acquire_is_taken_back_soon_though_an_attempt_to_connect_stands_still() {
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
    let told = lock.lock().await;
    assert!(
        matches!(
            told,
            Err(Error::OutcomeUnknown {
                step: Step::Acquire,
                ..
            })
        ),
        "{told:?}"
    );
    proxy.set(Way::Both, Flow::Hold);
    assert!(exists(&mut redis, &name));
    wait_until("an attempt to connect is under way", SOON, || {
        connections(&mut redis) > before
    });
    proxy.stall();
    proxy.set(Way::Both, Flow::Pass);
    let fresh = LockClient::connect(&proxy.url()).await.unwrap();
    assert_eq!(fresh.lock("probe").is_locked().await, Ok(false));
    // Once the connect timeout, which is 5 s, was waited for.
    wait_until("nothing is left of it", ms(2_000), || {
        !exists(&mut redis, &name)
    });
}

/// "their keys stay until their leases run out, so that nobody else gets in while their code may
/// still run".
///
/// A renewal is under way when the client is shut down, and stays without an answer; another
/// guard's pending release keeps the shutdown (and with it the scheduler) going.
#[tokio::test]
async fn a_shutdown_leaves_the_key_of_a_hold_that_is_still_there() {
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
    // What is held in the proxy nobody sees: until just before the renewal, a third of the lease
    // after the acquire, and until just after it.
    sleep(ms(3_600)).await;
    proxy.set(Way::Both, Flow::Hold);
    sleep(ms(800)).await;
    drop(pending);
    let ending = tokio::spawn({
        let client = client.clone();
        async move { client.shutdown().await }
    });
    // Beyond the command timeout: the renewal has failed, which is told to nobody.
    sleep(ms(2_600)).await;
    proxy.set(Way::Both, Flow::Pass);
    ending.await.unwrap().unwrap();
    assert!(
        began.elapsed() < ms(11_000),
        "too slow a machine: {:?}",
        began.elapsed()
    );
    assert!(guard.is_lost());
    assert!(
        exists(&mut redis, &kept),
        "the key was deleted after {:?} of a lease of 12 s, while its guard lives",
        began.elapsed()
    );
}

/// A force unlock that did not reach the server has told the owner of its loss; the lock is given
/// back all the same.
#[tokio::test]
async fn a_force_unlock_that_failed_leaves_no_lock_that_nobody_can_free() {
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
    // The client has to notice, so that nothing is sent; it shows that to nobody.
    sleep(ms(100)).await;
    let forced = lock.force_unlock().await;
    assert!(
        matches!(forced, Err(Error::Connection { .. })),
        "{forced:?}"
    );
    proxy.set(Way::Both, Flow::Pass);
    wait_until_async("the client is back", SOON, || async {
        lock.is_locked().await.is_ok()
    })
    .await;
    let unlocked = guard.unlock().await;
    let what = format!("it is free: {forced:?}, then {unlocked:?}");
    wait_until_async(&what, SOON, || ready(!exists(&mut redis, &name))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unlock_outside_a_runtime_does_not_leak_the_hold() {
    let server = Server::start();
    let client = LockClient::builder()
        .watchdog_timeout(ms(1000))
        .connect(&server.url())
        .await
        .unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    // A panic there is tokio's word that there is no runtime; the hold is given back all the same.
    let _ = std::thread::spawn(move || futures::executor::block_on(guard.unlock())).join();
    let mut redis = server.connection();
    wait_until("no guard is left, and it is renewed no more", SOON, || {
        !exists(&mut redis, &name)
    });
}

#[test]
fn a_client_whose_runtime_has_ended_answers_with_errors_and_does_not_hang() {
    let server = Server::start();
    let name = unique("stock");
    let (a, b) = (
        tokio::runtime::Runtime::new().unwrap(),
        tokio::runtime::Runtime::new().unwrap(),
    );
    let client = a
        .block_on(
            LockClient::builder()
                .retry_timeout(ms(500))
                .command_timeout(ms(300))
                .connect(&server.url()),
        )
        .unwrap();
    let other = b.block_on(LockClient::connect(&server.url())).unwrap();
    let _guard = a
        .block_on(async { client.lock(unique("mine")).lock().await })
        .unwrap();
    let _held = b
        .block_on(async { other.lock(&name).lock().await })
        .unwrap();
    drop(a);
    b.block_on(async {
        // Whatever it says: nobody can have reached the server.
        let _ = timeout(SOON, client.shutdown()).await.expect("it hangs");
    });
}

/// As a static client in tests, each of which has a runtime of its own. Each branch waits for the
/// other's turn.
#[test]
fn two_branches_of_one_owner_of_a_client_whose_runtime_has_ended_do_not_hang() {
    let server = Server::start();
    let (a, b) = (
        tokio::runtime::Runtime::new().unwrap(),
        tokio::runtime::Runtime::new().unwrap(),
    );
    let builder = LockClient::builder()
        .retry_timeout(ms(500))
        .command_timeout(ms(300));
    let client = a.block_on(builder.connect(&server.url())).unwrap();
    drop(a);
    b.block_on(Owner::scope(async {
        let lock = client.lock(unique("stock"));
        // One alone is answered within a second.
        assert!(
            timeout(ms(10_000), lock.try_lock())
                .await
                .expect("one hangs")
                .is_err()
        );
        let two = timeout(ms(15_000), async {
            tokio::join!(lock.try_lock(), lock.try_lock())
        })
        .await;
        let (one, other) = two.expect("two hang");
        assert!(one.is_err() && other.is_err());
    }));
}

/// "The new one begins by having the server close the old one, so that no late copy of a call is
/// run after its repeat." The answer to CLIENT INFO came a little too late when the connection was
/// made, on a slow network.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_unlock_on_a_connection_that_was_slow_at_first_takes_nothing_from_the_next_hold() {
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
    // When the listening connection appears, the one for calls is made; its replies are quick from
    // now on.
    wait_until("both connections are there", SOON, || {
        connections(&mut redis) == 3
    });
    proxy.set(Way::Replies, Flow::Pass);
    let client = connecting.await.unwrap();
    the_late_unlock_takes_nothing(&server, &proxy, &client).await;
}

/// A busy server does not say which connection it is that was made, so nobody could have it closed
/// later on.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_unlock_on_a_connection_to_a_server_that_was_busy_takes_nothing_from_the_next_hold()
{
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
    the_late_unlock_takes_nothing(&server, &proxy, &client.expect("it connects, busy or not"))
        .await;
}

/// An unlock is stalled with its connection, which the client gives up; its repeat frees the lock,
/// and the same owner takes it again. Then the first sending is let go.
async fn the_late_unlock_takes_nothing(server: &Server, proxy: &Proxy, client: &LockClient) {
    let mut redis = server.connection();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    let rival = LockClient::connect(&server.url()).await.unwrap();
    Owner::scope(async {
        let first = lock.lock().await.unwrap();
        proxy.stall();
        timeout(ms(10_000), first.unlock())
            .await
            .expect("it hangs")
            .unwrap();
        let second = lock.lock().await.unwrap();
        assert!(exists(&mut redis, &name));
        proxy.deliver();
        // What is delivered, arrives within milliseconds.
        let begun = Instant::now();
        while begun.elapsed() < ms(500) {
            if !exists(&mut redis, &name) {
                let rival = rival.lock(&name).try_lock().await.unwrap();
                panic!(
                    "the late unlock took the next hold; it is lost: {}; a rival has the lock: {}",
                    second.is_lost(),
                    rival.is_some()
                );
            }
            sleep(ms(5)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_question_is_not_answered_with_another_locks_answer() {
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
async fn a_release_of_a_reentry_works_without_memory() {
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
