//! Edge cases of runtimes, deadlock detection, counters, shutdown, connecting and requests.

use std::error::Error as _;
use std::io::{Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use futures::executor::block_on;
use redis::cmd;
use redisson_lock::{
    DeadlockDetection, Error, LockClient, LostReason, Owner, OwnerExt, OwnerPolicy,
};
use tokio::runtime::{Builder, Runtime};
use tracing::Level;

use crate::support::log::Log;
use crate::support::observe::{connections, exists, pttl};
use crate::support::proxy::{Fate, Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until, wait_until_async};

const LIMIT: Duration = Duration::from_secs(10);
const AT_ONCE: Duration = Duration::from_secs(1);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn multi_thread() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

async fn strict(url: &str) -> LockClient {
    LockClient::builder()
        .deadlock_detection(DeadlockDetection::Fail)
        .connect(url)
        .await
        .unwrap()
}

// ---- runtimes ----

/// `connect` in a runtime without drivers is an error, not a panic with a line of the inside.
#[test]
fn connect_in_a_runtime_without_drivers_is_no_panic() {
    let server = Server::start();
    let bare = Builder::new_current_thread().build().unwrap();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        bare.block_on(LockClient::connect(&server.url()))
    }));
    assert!(outcome.is_ok(), "connect panicked");
}

fn in_flight_when_runtime_ends(how: &str, polled_in: &str) {
    let server = Server::start();
    let runtime = multi_thread();
    let name = unique("stock");
    let (client, guard) = runtime.block_on(async {
        let client = LockClient::connect(&server.url()).await.unwrap();
        let guard = client.lock(&name).lock().await.unwrap();
        (client, guard)
    });
    server.pause();
    type Op = Box<dyn FnOnce(&LockClient) -> Result<(), Error> + Send>;
    let inside = polled_in == "tokio";
    macro_rules! op {
        ($client:ident, $future:expr) => {
            Box::new(move |$client: &LockClient| {
                let future = async { $future.await.map(|_| ()) };
                match inside {
                    true => multi_thread().block_on(future),
                    false => block_on(future),
                }
            }) as Op
        };
    }
    let ops: Vec<(&str, Op)> = vec![
        ("lock", op!(client, client.lock("b").lock().into_future())),
        (
            "try_lock",
            op!(client, client.lock("c").try_lock().into_future()),
        ),
        ("run", op!(client, client.lock("d").run(async {}))),
        ("inspect", op!(client, client.lock("e").inspect())),
        ("is_locked", op!(client, client.lock("f").is_locked())),
        (
            "hold_count_of",
            op!(client, client.lock("g").hold_count_of(Owner::new())),
        ),
        ("force_unlock", op!(client, client.lock("h").force_unlock())),
        ("unlock guard", op!(_client, guard.unlock())),
    ];
    let threads: Vec<_> = ops
        .into_iter()
        .map(|(what, op)| {
            let client = client.clone();
            let thread = std::thread::spawn(move || {
                let outcome = catch_unwind(AssertUnwindSafe(|| op(&client)));
                (outcome, Instant::now())
            });
            (what, thread)
        })
        .collect();
    std::thread::sleep(ms(300));
    let begun = Instant::now();
    match how {
        "drop" => drop(runtime),
        _ => runtime.shutdown_background(),
    }
    let mut wrong = Vec::new();
    for (what, thread) in threads {
        let (outcome, at) = thread.join().unwrap();
        let took = at.saturating_duration_since(begun);
        let fine = matches!(&outcome, Ok(Err(Error::NoRuntime { .. }))) && took < AT_ONCE;
        if !fine {
            wrong.push(format!("{what}: {outcome:?} after {took:?}"));
        }
    }
    server.resume();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn in_flight_operations_end_at_once_when_runtime_is_dropped() {
    in_flight_when_runtime_ends("drop", "tokio");
}

#[test]
fn in_flight_operations_end_at_once_when_runtime_is_shut_down_in_background() {
    in_flight_when_runtime_ends("background", "tokio");
}

#[test]
fn in_flight_operations_outside_tokio_end_at_once_when_runtime_is_dropped() {
    in_flight_when_runtime_ends("drop", "none");
}

/// The release was pending when the runtime ended: it is not sent. The counters say so.
#[test]
fn guard_dropped_before_runtime_ended_leaves_no_held_lock_in_stats() {
    let server = Server::start();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let client = runtime.block_on(async {
        let client = LockClient::connect(&server.url()).await.unwrap();
        let guard = client.lock(unique("stock")).lock().await.unwrap();
        drop(guard);
        client
    });
    drop(runtime);
    std::thread::sleep(ms(200));
    let stats = client.stats();
    assert_eq!(stats.locks_held, 0, "{stats:?}");
}

#[test]
fn guard_dropped_before_runtime_ended_is_logged() {
    let server = Server::start();
    let log = Log::capture();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let client = runtime.block_on(async {
        let client = LockClient::connect(&server.url()).await.unwrap();
        let guard = client.lock(unique("stock")).lock().await.unwrap();
        drop(guard);
        client
    });
    drop(runtime);
    let stats = client.stats();
    assert!(
        !log.from(Level::WARN).is_empty() || stats.failed_releases > 0,
        "a release was not sent, nothing was logged or counted: {stats:?}"
    );
}

// ---- deadlock detection ----

/// Two guards of one owner are dropped, and the task locks again: no deadlock.
#[tokio::test]
async fn lock_after_two_dropped_guards_is_no_deadlock() {
    let server = Server::start();
    let client = strict(&server.url()).await;
    let mut refused = Vec::new();
    for round in 0..20 {
        let lock = client.lock(unique("stock"));
        Owner::scope(async {
            let _outer = lock.lock().await.unwrap();
            let _inner = lock.lock().await.unwrap();
        })
        .await;
        if let Err(error) = lock.lock().await {
            refused.push(format!("{round}: {error}"));
        }
    }
    assert!(refused.is_empty(), "{refused:#?}");
}

/// By default the warning is as false.
#[tokio::test]
async fn lock_after_two_dropped_guards_warns_of_nothing() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let log = Log::capture();
    let lock = client.lock(unique("stock"));
    Owner::scope(async {
        let _outer = lock.lock().await.unwrap();
        let _inner = lock.lock().await.unwrap();
    })
    .await;
    lock.lock().await.unwrap().unlock().await.unwrap();
    assert!(
        log.from(Level::WARN).is_empty(),
        "{:?}",
        log.from(Level::WARN)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn lock_after_one_dropped_guard_is_no_deadlock() {
    let server = Server::start();
    let client = strict(&server.url()).await;
    let mut refused = Vec::new();
    for round in 0..500 {
        let lock = client.lock("a");
        match lock.lock().await {
            Ok(guard) => drop(guard),
            Err(error) => refused.push(format!("{round}: {error}")),
        }
    }
    assert!(refused.is_empty(), "{refused:#?}");
}

/// Outside any task two threads are two: nobody waits for itself.
#[test]
fn two_threads_outside_tokio_are_no_deadlock() {
    let server = Server::start();
    let runtime = multi_thread();
    let client = runtime.block_on(strict(&server.url()));
    let lock = client.lock(unique("stock"));
    let guard = block_on(lock.lock().into_future()).unwrap();
    let other = lock.clone();
    let waiting = std::thread::spawn(move || block_on(other.lock().into_future()).map(drop));
    wait_until("it waits", LIMIT, || client.stats().requests_waiting == 1);
    std::thread::sleep(ms(100));
    block_on(guard.unlock()).unwrap();
    let answer = waiting.join().unwrap();
    assert!(answer.is_ok(), "{answer:?}");
}

// ---- shutdown and counters ----

/// "Locks that are still held are lost with `LostReason::Shutdown`", and none is held then.
#[tokio::test]
async fn shutdown_after_refused_unlock_of_detached_hold_loses_it() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let owner = lock.lock().await.unwrap().detach();
    cmd("ACL")
        .arg(&["SETUSER", "default", "-del"])
        .exec(&mut redis)
        .unwrap();
    let refused = lock.unlock().with_owner(owner).await;
    assert!(matches!(refused, Err(Error::Server { .. })), "{refused:?}");
    assert_eq!(client.stats().locks_held, 1);
    client.shutdown().await.unwrap();
    let stats = client.stats();
    assert!(pttl(&mut redis, lock.name()) > 0);
    assert_eq!(
        (stats.locks_held, stats.losses.shutdown),
        (0, 1),
        "{stats:?}"
    );
}

/// A dropped guard whose release waits for its turn when the client ends.
#[tokio::test]
async fn shutdown_with_releases_that_cannot_be_sent_leaves_no_held_lock_in_stats() {
    let server = Server::start();
    let client = LockClient::builder()
        .command_timeout(ms(200))
        .retry_timeout(ms(400))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let owner = Owner::new();
    let outer = lock.lock().with_owner(owner).await.unwrap();
    let inner = lock.lock().with_owner(owner).await.unwrap();
    server.pause();
    drop(inner);
    drop(outer);
    let ended = client.shutdown().await;
    server.resume();
    assert!(matches!(ended, Err(Error::Timeout { .. })), "{ended:?}");
    let stats = client.stats();
    assert_eq!(stats.locks_held, 0, "{stats:?}");
}

#[tokio::test]
async fn hundred_times_lock_drop_shutdown_tells_nothing() {
    let server = Server::start();
    let log = Log::capture();
    let mut redis = server.connection();
    for round in 0..100 {
        let client = LockClient::connect(&server.url()).await.unwrap();
        let name = unique("stock");
        let guard = client.lock(&name).lock().await.unwrap();
        let inner = client
            .lock(&name)
            .lock()
            .with_owner(guard.owner())
            .await
            .unwrap();
        drop(guard);
        drop(inner);
        if round % 2 == 0 {
            let (one, two) = tokio::join!(client.shutdown(), client.shutdown());
            one.unwrap();
            two.unwrap();
        } else {
            client.shutdown().await.unwrap();
        }
        let stats = client.stats();
        assert_eq!(
            (
                stats.locks_held,
                stats.losses.total(),
                stats.failed_releases
            ),
            (0, 0, 0)
        );
        assert!(!exists(&mut redis, &name));
    }
    assert!(
        log.from(Level::WARN).is_empty(),
        "{:?}",
        log.from(Level::WARN)
    );
}

/// A grant that arrives after its lease is over.
#[tokio::test(flavor = "multi_thread")]
async fn late_grant_is_counted_once_and_leaves_no_held_lock() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    proxy.set(Way::Replies, Flow::Delay(ms(300)));
    let answer = lock.lock().lease(ms(50)).await;
    assert!(matches!(answer, Err(Error::Lost { .. })), "{answer:?}");
    tokio::time::sleep(ms(1_000)).await;
    let stats = client.stats();
    assert_eq!(
        (stats.locks_held, stats.requests_waiting),
        (0, 0),
        "{stats:?}"
    );
    assert_eq!(stats.losses.total(), 1, "{stats:?}");
}

/// Cancelled anywhere, and beside faults: nothing is held or waits in the end.
#[tokio::test(flavor = "multi_thread")]
async fn counters_return_to_zero_after_cancellations_and_faults() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .command_timeout(ms(150))
        .retry_timeout(ms(300))
        .watchdog_timeout(ms(900))
        .connect(&proxy.url())
        .await
        .unwrap();
    let tasks: Vec<_> = (0..12_u64)
        .map(|task| {
            let client = client.clone();
            tokio::spawn(async move {
                for round in 0..60_u64 {
                    let lock = client.lock(format!("adv:{}", (task + round) % 3));
                    let work = async {
                        let guard = lock.lock().timeout(ms(200)).await?;
                        tokio::time::sleep(ms(round % 7)).await;
                        match round % 4 {
                            0 => drop(guard),
                            1 => guard.unlock().await?,
                            2 => {
                                let owner = guard.detach();
                                lock.unlock().with_owner(owner).await?;
                            }
                            _ => {
                                let _inner = lock.try_lock().with_owner(guard.owner()).await;
                                guard.unlock().await?;
                            }
                        }
                        Ok::<_, Error>(())
                    };
                    let _ =
                        tokio::time::timeout(ms(1 + (task * 31 + round * 17) % 250), work).await;
                }
            })
        })
        .collect();
    for fault in 0..12_u64 {
        tokio::time::sleep(ms(150)).await;
        match fault % 4 {
            0 => proxy.close_now(),
            1 => {
                proxy.set(Way::Replies, Flow::Hold);
                tokio::time::sleep(ms(200)).await;
                proxy.set(Way::Replies, Flow::Pass);
            }
            2 => proxy.next_reply_to(&["EVALSHA"], Fate::Swallow),
            _ => proxy.next_reply_to(&["EVALSHA"], Fate::Close),
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    wait_until("nothing is left", Duration::from_secs(20), || {
        let stats = client.stats();
        (0..3).all(|n| !exists(&mut redis, &format!("adv:{n}")))
            && stats.requests_waiting == 0
            && (stats.locks_held == 0 || stats.losses.total() > 10_000)
    });
    client.shutdown().await.unwrap();
    let stats = client.stats();
    assert_eq!(
        (stats.locks_held, stats.requests_waiting),
        (0, 0),
        "{stats:?}"
    );
}

// ---- outages ----

/// "events at info when the server is reached again (with the address and the length of the
/// outage)".
#[tokio::test]
async fn outage_is_as_long_as_the_server_was_silent() {
    let server = Server::start();
    let log = Log::capture();
    let client = LockClient::builder()
        .command_timeout(ms(1_500))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    lock.is_locked().await.unwrap();
    server.pause();
    let begun = Instant::now();
    let asking = tokio::spawn(async move { lock.is_locked().await });
    tokio::time::sleep(ms(3_000)).await;
    server.resume();
    let silent = begun.elapsed();
    let _ = asking.await;
    wait_until_async("reached again", LIMIT, || async {
        !log.with("the server is connected again").is_empty()
    })
    .await;
    let line = &log.with("the server is connected again")[0];
    assert!(line.fields["address"].contains("127.0.0.1"));
    let text = &line.fields["outage"];
    let seconds: f64 = match text.strip_suffix("ms") {
        Some(millis) => millis.parse::<f64>().unwrap() / 1e3,
        None => text.trim_end_matches('s').parse().unwrap(),
    };
    assert!(
        seconds >= silent.as_secs_f64() * 0.9,
        "the server was silent for {silent:?}, the event says {text}"
    );
}

// ---- connecting ----

/// A server that answers each connection's first bytes with this, and closes it.
fn fake(answer: &'static [u8]) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut buffer = [0; 512];
            let _ = stream.read(&mut buffer);
            let _ = stream.write_all(answer);
        }
    });
    address.to_string()
}

async fn refusal(answer: &'static [u8]) -> (Error, String, Duration) {
    let address = fake(answer);
    let begun = Instant::now();
    let error = LockClient::builder()
        .connect_timeout(ms(1_000))
        .connect(&format!("redis://app:hidden7@{address}"))
        .await
        .unwrap_err();
    let all = format!("{error} {error:?} {:?}", error.source());
    assert!(!all.contains("hidden7"), "{all}");
    assert!(!error.to_string().contains('\n'), "{error}");
    (error, address, begun.elapsed())
}

#[tokio::test]
async fn server_in_protected_mode_is_a_server_error() {
    let (error, _, _) = refusal(
        b"-DENIED Redis is running in protected mode because protected mode is enabled\r\n",
    )
    .await;
    println!("{error:?}");
    assert!(matches!(error, Error::Server { .. }), "{error:?}");
    assert!(!error.is_retryable(), "{error:?}");
}

/// Redis 5 does not know HELLO.
#[tokio::test]
async fn server_without_hello_is_unsupported() {
    let (error, _, _) =
        refusal(b"-ERR unknown command `HELLO`, with args beginning with: `3`, \r\n").await;
    println!("{error:?}");
    assert!(error.to_string().contains("6.2"), "{error}");
}

#[tokio::test]
async fn each_error_of_connecting_names_the_address() {
    let mut wrong = Vec::new();
    for answer in [
        &b"-ERR max number of clients reached\r\n"[..],
        b"-WRONGPASS invalid username-password pair or user is disabled.\r\n",
        b"-NOAUTH Authentication required.\r\n",
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-MASTERDOWN Link with MASTER is down\r\n",
        b"-NOPERM this user has no permissions to run the 'hello' command\r\n",
        b"",
        b"garbage\r\n",
        b"$-1\r\n",
        b"%1\r\n+server\r\n+redis\r\n",
    ] {
        let (error, address, took) = refusal(answer).await;
        println!(
            "{:?} -> {error} | {error:?} {took:?}",
            String::from_utf8_lossy(answer)
        );
        if !error.to_string().contains(&address) {
            wrong.push(format!("{error}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[tokio::test]
async fn odd_urls_show_no_password() {
    for url in [
        "redis://[::1]:1",
        "REDIS://127.0.0.1:1",
        "Valkey://127.0.0.1:1",
        " redis://127.0.0.1:1 ",
        "redis://127.0.0.1:0",
        "redis://user@127.0.0.1:1",
        "redis://:@127.0.0.1:1",
        "redis://user:@127.0.0.1:1",
        "redis://a b:1",
        "redis://us er:pa ss@127.0.0.1:1",
        "redis://127.0.0.1:1//0",
        "redis://127.0.0.1:1/+5",
        "redis://127.0.0.1:1/0?x=a@b",
        "redis-cluster://127.0.0.1:1",
        "redis+cluster://a",
        "redis+unix:///tmp/x",
        "unix:///tmp/x",
        "unix:/tmp/x",
        "/tmp/redis.sock",
        "redis:///tmp/x",
        "redis:/tmp/x",
        "rediss://a",
        "redis-sentinel://a",
        "redis://a:1,b:2",
        "redis://a,b",
        "redis://:hidden7@x@127.0.0.1:1",
        "redis://:hid[den7@127.0.0.1:1",
        "redis://:hid\\den7@127.0.0.1:1",
        "redis://127.0.0.1:1/0/1",
        "redis://127.0.0.1:1/00",
        "redis://::1:1",
        "redis://127.1:1",
        "redis://:hid^den7@127.0.0.1:1",
        "redis://:hid\tden7@127.0.0.1:1",
        "redis://user:hid:den7@127.0.0.1:1",
        "redis://%41pp:x@127.0.0.1:1",
        "redis://127.0.0.1:1?db=3",
        "redis://:hid%ZZden7@127.0.0.1:1",
        "redis://:hid%00den7@127.0.0.1:1",
        "redis://:hid%FFden7@127.0.0.1:1",
        "127.0.0.1:6379",
        "redis-socket:///x",
        "redis://exa%20mple:1",
        "redis://127.0.0.1:-1",
        "redis://[fe80::1%25eth0]:1",
    ] {
        let begun = Instant::now();
        let answer = LockClient::builder()
            .connect_timeout(ms(500))
            .connect(url)
            .await;
        let took = begun.elapsed();
        match answer {
            Ok(_) => println!("{url:40} -> connected"),
            Err(error) => {
                println!(
                    "{url:40} -> {error} | retry={} {took:?}",
                    error.is_retryable()
                );
                let all = format!("{error} {error:?}");
                assert!(!all.contains("hid") && !all.contains("den7"), "{all}");
            }
        }
    }
}

/// Dropped at any point, `connect` closes what was opened.
#[tokio::test]
async fn cancelled_connect_leaves_no_connection() {
    let server = Server::start();
    let mut redis = server.connection();
    let before = connections(&mut redis);
    for millis in 0..25 {
        let _ = tokio::time::timeout(
            Duration::from_micros(millis * 300),
            LockClient::builder()
                .connect_retry(LIMIT)
                .connect(&server.url()),
        )
        .await;
    }
    wait_until_async("they are closed", LIMIT, || {
        let now = connections(&mut redis);
        async move { now == before }
    })
    .await;
}

#[tokio::test]
async fn connect_retry_is_bounded_by_its_limit_when_the_server_is_silent() {
    let server = Server::start();
    server.pause();
    let begun = Instant::now();
    let error = LockClient::builder()
        .connect_timeout(ms(700))
        .connect_retry(ms(1_500))
        .connect(&server.url())
        .await
        .unwrap_err();
    let took = begun.elapsed();
    server.resume();
    assert!(matches!(error, Error::Timeout { .. }), "{error:?}");
    assert!(took < ms(1_500 + 700 + 300), "{took:?}");
}

// ---- timeouts ----

/// The server falls silent while the request sleeps: the timeout holds all the same.
#[tokio::test(flavor = "multi_thread")]
async fn acquire_timeout_is_on_time_although_the_server_is_silent() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let _guard = other.lock(&name).lock().await.unwrap();
    let lock = client.lock(&name);
    let begun = Instant::now();
    let waiting: Vec<_> = (0..5)
        .map(|n| tokio::spawn(lock.lock().timeout(ms(600 + n)).into_future()))
        .collect();
    tokio::time::sleep(ms(300)).await;
    proxy.set(Way::Both, Flow::Hold);
    for task in waiting {
        let error = task.await.unwrap().unwrap_err();
        let took = begun.elapsed();
        println!("{took:?} {error}");
        assert!(
            matches!(error, Error::AcquireTimeout { held_by: None, .. }),
            "{error:?}"
        );
        assert!(took >= ms(600) && took < ms(1_200), "{took:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn try_lock_for_zero_and_max() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.try_lock_for(Duration::ZERO).await.unwrap().unwrap();
    let begun = Instant::now();
    assert!(lock.try_lock_for(Duration::ZERO).await.unwrap().is_none());
    assert!(begun.elapsed() < AT_ONCE);
    let answer = lock.try_lock_for(Duration::MAX).await;
    assert!(
        matches!(answer, Err(Error::InvalidTimeout { .. })),
        "{answer:?}"
    );
    let longest = Duration::from_secs(3650 * 24 * 3600);
    guard.unlock().await.unwrap();
    assert!(lock.try_lock_for(longest).await.unwrap().is_some());
}

// ---- run ----

#[tokio::test(flavor = "multi_thread")]
async fn run_and_run_with_are_send_in_spawn_and_survive_panics() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let text = String::from("a");
    let spawned = lock.clone();
    let got = tokio::spawn(async move {
        spawned
            .run_with(async |guard| {
                let inner = spawned.lock().await.unwrap();
                let count = guard.hold_count();
                inner.unlock().await.unwrap();
                (count, text.len(), guard.remaining_lease() > Duration::ZERO)
            })
            .await
    })
    .await
    .unwrap()
    .unwrap();
    assert_eq!(got, (2, 1, true));
    for kind in 0..3 {
        let lock = lock.clone();
        let panicked = tokio::spawn(async move {
            match kind {
                0 => lock.run(async { panic!("on purpose") }).await,
                1 => lock.run_with(async |_| panic!("on purpose")).await,
                _ => lock
                    .try_lock_for(LIMIT)
                    .run(async { panic!("on purpose") })
                    .await
                    .map(|_: Option<()>| ()),
            }
        })
        .await;
        assert!(panicked.is_err());
    }
    tokio::time::timeout(LIMIT, lock.run(async {}))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(client.stats().locks_held, 0);
}

/// Inside `run`, the code locks again and keeps the guard beyond the end of `run`.
#[tokio::test(flavor = "multi_thread")]
async fn guard_that_escapes_run_keeps_the_lock() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock
        .run(async { lock.lock().await.unwrap() })
        .await
        .unwrap();
    assert!(exists(&mut redis, lock.name()) && !guard.is_lost());
    assert_eq!((guard.hold_count(), client.stats().locks_held), (1, 1));
    guard.unlock().await.unwrap();
    assert!(!exists(&mut redis, lock.name()));
}

#[tokio::test(flavor = "multi_thread")]
async fn lock_deleted_during_run_is_lost_and_counted_once() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let ran = lock
        .run(async {
            cmd("DEL").arg(lock.name()).exec(&mut redis).unwrap();
            7
        })
        .await;
    println!("{ran:?} {:?}", client.stats());
    assert!(matches!(ran, Err(Error::Lost { .. })), "{ran:?}");
    assert_eq!(
        (client.stats().losses.gone, client.stats().locks_held),
        (1, 0)
    );
    let guard = lock.lock().await.unwrap();
    cmd("DEL").arg(lock.name()).exec(&mut redis).unwrap();
    drop(guard);
    wait_until_async("counted", LIMIT, || async {
        client.stats().losses.gone == 2
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn detached_loss_is_reported_once() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .watchdog_timeout(ms(6_000))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let owner = lock.lock().await.unwrap().detach();
    cmd("DEL").arg(lock.name()).exec(&mut redis).unwrap();
    wait_until_async("lost", LIMIT, || async { client.stats().losses.gone == 1 }).await;
    let first = lock.unlock().with_owner(owner).await;
    let second = lock.unlock().with_owner(owner).await;
    assert!(matches!(first, Err(Error::Lost { .. })), "{first:?}");
    assert!(matches!(second, Err(Error::NotHeld { .. })), "{second:?}");
    assert_eq!(
        (client.stats().losses.total(), client.stats().locks_held),
        (1, 0)
    );
}

/// `InvalidTimeout`, `Inspect`: with a silent server the error says which server.
#[tokio::test(flavor = "multi_thread")]
async fn errors_of_a_silent_server_name_the_address() {
    let server = Server::start();
    let client = LockClient::builder()
        .command_timeout(ms(200))
        .retry_timeout(ms(300))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    let address = format!("127.0.0.1:{}", server.port());
    server.pause();
    let mut wrong = Vec::new();
    let mut check = |what: &str, error: Error| {
        println!("{what}: {error} | {error:?}");
        if !error.to_string().contains(&address) {
            wrong.push(format!("{what}: {error}"));
        }
    };
    check("is_locked", lock.is_locked().await.unwrap_err());
    check("inspect", lock.inspect().await.unwrap_err());
    check("lock", client.lock("b").lock().await.unwrap_err());
    check("force_unlock", lock.force_unlock().await.unwrap_err());
    check("unlock", guard.unlock().await.unwrap_err());
    server.resume();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[tokio::test]
async fn per_task_policy_outside_tokio() {
    let server = Server::start();
    let runtime = multi_thread();
    let url = server.url();
    let handle = std::thread::spawn(move || {
        let client = runtime
            .block_on(
                LockClient::builder()
                    .owner_policy(OwnerPolicy::PerTask)
                    .connect(&url),
            )
            .unwrap();
        let lock = client.lock(unique("stock"));
        let _ = block_on(lock.lock().into_future()).unwrap().detach();
        let _ = block_on(lock.lock().into_future()).unwrap().detach();
        assert_eq!(client.stats().locks_held, 1);
        block_on(lock.unlock()).unwrap();
        block_on(lock.unlock()).unwrap();
        assert_eq!(client.stats().locks_held, 0);
        let again = block_on(lock.unlock());
        assert!(matches!(again, Err(Error::NotHeld { .. })), "{again:?}");
        block_on(client.shutdown()).unwrap();
    });
    tokio::task::spawn_blocking(move || handle.join().unwrap())
        .await
        .unwrap();
}

/// The release found that the lock was gone: it is a loss, so the event of each loss is logged.
#[tokio::test]
async fn loss_found_by_a_release_is_logged() {
    let server = Server::start();
    let log = Log::capture();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    cmd("DEL").arg(lock.name()).exec(&mut redis).unwrap();
    drop(guard);
    client.shutdown().await.unwrap();
    let stats = client.stats();
    assert!(
        !log.with("a lock was lost").is_empty(),
        "the guard was dropped, so no caller received an error, no event was logged and nothing was counted: {stats:?}"
    );
}

/// The future of `lost` of a guard that was dropped just before the runtime ended.
#[test]
fn lost_of_a_dropped_guard_does_not_panic_after_the_runtime_ended() {
    let server = Server::start();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let (_client, lost) = runtime.block_on(async {
        let client = LockClient::connect(&server.url()).await.unwrap();
        let guard = client.lock(unique("stock")).lock().await.unwrap();
        let lost = guard.lost();
        drop(guard);
        (client, lost)
    });
    drop(runtime);
    let outcome = std::thread::spawn(move || {
        catch_unwind(AssertUnwindSafe(|| {
            block_on(async {
                futures::pin_mut!(lost);
                futures::poll!(&mut lost)
            })
        }))
        .map_err(|panic| panic.downcast_ref::<String>().cloned())
    })
    .join()
    .unwrap();
    assert!(outcome.is_ok(), "{outcome:?}");
}

/// A permanent refusal is an error at once, `connect_retry` or not.
#[tokio::test]
async fn connect_retry_does_not_wait_for_a_server_in_protected_mode() {
    let address =
        fake(b"-DENIED Redis is running in protected mode because protected mode is enabled\r\n");
    let begun = Instant::now();
    let error = LockClient::builder()
        .connect_retry(ms(4_000))
        .connect(&format!("redis://{address}"))
        .await
        .unwrap_err();
    assert!(
        begun.elapsed() < ms(2_000),
        "{:?}: {error:?}",
        begun.elapsed()
    );
}

#[tokio::test]
async fn connect_retry_does_not_wait_for_another_service() {
    let address = fake(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
    let begun = Instant::now();
    let error = LockClient::builder()
        .connect_retry(ms(4_000))
        .connect(&format!("redis://{address}"))
        .await
        .unwrap_err();
    assert!(
        begun.elapsed() < ms(2_000),
        "{:?}: {error:?}",
        begun.elapsed()
    );
}

/// It waits while the server is full: that passes, like a server that starts.
#[tokio::test]
async fn full_server_is_retryable() {
    let server = Server::builder().arg("--maxclients", "1").start();
    let _redis = server.connection();
    let error = LockClient::connect(&server.url()).await.unwrap_err();
    println!("{error} {error:?}");
    assert!(error.is_retryable(), "{error:?}");
}

/// Shutdown waits for a silent server; then the runtime of the client ends.
#[test]
fn shutdown_in_another_runtime_ends_at_once_with_the_clients_runtime() {
    let server = Server::start();
    let runtime = multi_thread();
    let (client, guard) = runtime.block_on(async {
        let client = LockClient::connect(&server.url()).await.unwrap();
        let guard = client.lock(unique("stock")).lock().await.unwrap();
        (client, guard)
    });
    server.pause();
    drop(guard);
    let closing = {
        let client = client.clone();
        std::thread::spawn(move || (multi_thread().block_on(client.shutdown()), Instant::now()))
    };
    std::thread::sleep(ms(300));
    let begun = Instant::now();
    drop(runtime);
    let (answer, at) = closing.join().unwrap();
    server.resume();
    let took = at.saturating_duration_since(begun);
    println!("{answer:?} {took:?} {:?}", client.stats());
    assert!(took < AT_ONCE, "{answer:?} after {took:?}");
    assert!(matches!(answer, Err(Error::NoRuntime { .. })), "{answer:?}");
}

/// Stats after the end of the runtime with holds of each sort.
#[test]
fn nothing_is_held_after_the_runtime_ended() {
    let server = Server::start();
    let runtime = multi_thread();
    let client = runtime.block_on(async {
        let client = LockClient::connect(&server.url()).await.unwrap();
        let _ = client.lock("a").lock().await.unwrap().detach();
        std::mem::forget(client.lock("b").lock().await.unwrap());
        client
    });
    drop(runtime);
    let stats = client.stats();
    assert_eq!(
        (stats.locks_held, stats.losses.runtime_ended),
        (0, 2),
        "{stats:?}"
    );
}

/// A shutdown that was dropped half-way is called again, from another runtime.
#[test]
fn shutdown_cancelled_anywhere_can_be_repeated() {
    let server = Server::start();
    let mut redis = server.connection();
    let before = connections(&mut redis);
    for polls in 0..6 {
        let runtime = multi_thread();
        let client = runtime.block_on(async {
            let client = LockClient::connect(&server.url()).await.unwrap();
            drop(client.lock("a").lock().await.unwrap());
            client
        });
        multi_thread().block_on(async {
            let mut first = Box::pin(client.shutdown());
            for _ in 0..polls {
                if futures::poll!(&mut first).is_ready() {
                    break;
                }
                tokio::time::sleep(ms(1)).await;
            }
            drop(first);
            let again = tokio::time::timeout(LIMIT, client.shutdown()).await;
            assert_eq!(again, Ok(Ok(())), "{polls}");
        });
        wait_until("closed", LIMIT, || connections(&mut redis) == before);
        assert_eq!(client.stats().locks_held, 0);
        assert_eq!(client.stats().losses.total(), 0);
    }
}

/// An acquisition whose future is dropped at each of its points.
#[tokio::test]
async fn requests_cancelled_anywhere_leave_nothing() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    for polls in 0..8 {
        for kind in 0..4 {
            let lock = client.lock("a");
            let mut future: std::pin::Pin<Box<dyn Future<Output = ()>>> = match kind {
                0 => Box::pin(async move { drop(lock.lock().await) }),
                1 => Box::pin(async move {
                    drop(lock.run(async { tokio::task::yield_now().await }).await)
                }),
                2 => Box::pin(async move { drop(lock.run_with(async |g| g.lost().await).await) }),
                _ => Box::pin(async move { lock.lock().await.unwrap().unlock().await.unwrap() }),
            };
            for _ in 0..polls {
                if futures::poll!(&mut future).is_ready() {
                    break;
                }
                tokio::time::sleep(Duration::from_micros(150)).await;
            }
            drop(future);
        }
    }
    wait_until_async("free", LIMIT, || {
        let free = !exists(&mut redis, "a");
        let stats = client.stats();
        async move { free && stats.locks_held == 0 && stats.requests_waiting == 0 }
    })
    .await;
    assert_eq!(client.stats().losses.total(), 0);
}

/// "Operations that ended with `Error::OutcomeUnknown`": this one ended with `Ok`.
#[tokio::test(flavor = "multi_thread")]
async fn run_that_ends_well_is_no_unknown_outcome() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .command_timeout(ms(200))
        .retry_timeout(ms(300))
        .connect(&proxy.url())
        .await
        .unwrap();
    let ran = client
        .lock(unique("stock"))
        .run(async { proxy.set(Way::Replies, Flow::Hold) })
        .await;
    assert_eq!(ran, Ok(()));
    assert_eq!(client.stats().unknown_outcomes, 0, "{:?}", client.stats());
}

/// The query is wrong, not the password: there is none.
#[tokio::test]
async fn query_with_an_at_sign_is_not_taken_for_a_password() {
    let error = LockClient::connect("redis://127.0.0.1:1/0?mail=a@b")
        .await
        .unwrap_err();
    assert!(!error.to_string().contains("password is not"), "{error}");
}

/// A guard is dropped, and its task locks again: no warning of a deadlock by default either.
#[tokio::test]
async fn relock_after_dropped_guards_in_run_warns_of_nothing() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let log = Log::capture();
    let lock = client.lock("a");
    for _ in 0..300 {
        drop(lock.lock().await.unwrap());
    }
    let seen = log.from(Level::WARN);
    assert!(seen.is_empty(), "{} times: {:?}", seen.len(), seen.first());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn hundred_shutdowns_beside_waiters_lose_nothing_that_was_dropped() {
    let server = Server::start();
    for _ in 0..100 {
        let client = LockClient::connect(&server.url()).await.unwrap();
        let name = unique("stock");
        let guard = client.lock(&name).lock().await.unwrap();
        let waiting = tokio::spawn(client.lock(&name).lock().timeout(LIMIT).into_future());
        let unlocking = Box::pin(client.lock(unique("x")).lock().await.unwrap().unlock());
        drop(guard);
        drop(unlocking);
        client.shutdown().await.unwrap();
        let kept = matches!(
            &*waiting
                .await
                .unwrap()
                .as_ref()
                .map(|_| ())
                .map_err(|e| format!("{e:?}"))
                .map_or_else(|e| e, |()| "guard".into()),
            "guard"
        );
        let stats = client.stats();
        assert_eq!(stats.losses.total(), u64::from(kept), "{stats:?}");
        assert_eq!(
            (stats.locks_held, stats.requests_waiting),
            (0, 0),
            "{stats:?}"
        );
    }
}

/// `lost()` of a guard in an ended runtime, polled in another tokio runtime and in none, at the
/// same moment as the runtime ends.
#[test]
fn lost_at_the_moment_the_runtime_ends_never_panics() {
    let server = Server::start();
    for round in 0..30 {
        let runtime = multi_thread();
        let (_client, guard) = runtime.block_on(async {
            let client = LockClient::connect(&server.url()).await.unwrap();
            let guard = client.lock(unique("stock")).lock().await.unwrap();
            (client, guard)
        });
        let lost = guard.lost();
        let waiting = std::thread::spawn(move || block_on(lost));
        if round % 2 == 0 {
            drop(runtime);
        } else {
            runtime.shutdown_background();
        }
        assert_eq!(waiting.join().unwrap(), LostReason::RuntimeEnded, "{round}");
        drop(guard);
    }
}

/// Each operation that meets the end of the client's runtime says so: not "shut down", no panic.
fn operations_at_the_moment_the_runtime_ends(inside: bool) {
    let server = Server::start();
    let mut wrong = Vec::new();
    for round in 0..40 {
        let runtime = multi_thread();
        let (client, _guard) = runtime.block_on(async {
            let client = LockClient::connect(&server.url()).await.unwrap();
            let guard = client.lock("held").lock().await.unwrap();
            (client, guard)
        });
        let threads: Vec<_> = (0..4)
            .map(|kind| {
                let lock = client.lock("held");
                let free = client.lock(unique("free"));
                std::thread::spawn(move || {
                    let work = async {
                        loop {
                            let answer = match kind {
                                0 => lock.lock().timeout(ms(2)).await.map(drop),
                                1 => lock.lock().timeout(LIMIT).await.map(drop),
                                2 => lock.inspect().await.map(drop),
                                _ => free.run(async {}).await,
                            };
                            match answer {
                                Ok(()) | Err(Error::AcquireTimeout { .. }) => {}
                                Err(error) => return error,
                            }
                        }
                    };
                    catch_unwind(AssertUnwindSafe(|| match inside {
                        true => multi_thread().block_on(work),
                        false => block_on(work),
                    }))
                })
            })
            .collect();
        std::thread::sleep(ms(20));
        drop(runtime);
        for (kind, thread) in threads.into_iter().enumerate() {
            match thread.join().unwrap() {
                Ok(Error::NoRuntime { .. } | Error::Lost { .. }) => {}
                Ok(error) => wrong.push(format!("{round}, {kind}: {error:?}")),
                Err(panic) => wrong.push(format!(
                    "{round}, {kind}: panic {:?}",
                    panic.downcast_ref::<String>()
                )),
            }
        }
        let mut redis = server.connection();
        cmd("FLUSHALL").exec(&mut redis).unwrap();
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn operations_in_another_runtime_meet_the_end_of_the_clients_runtime() {
    operations_at_the_moment_the_runtime_ends(true);
}

#[test]
fn operations_outside_tokio_meet_the_end_of_the_clients_runtime() {
    operations_at_the_moment_the_runtime_ends(false);
}
