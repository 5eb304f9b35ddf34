//! The end of a client's runtime with operations, guards and losses in flight; use outside tokio.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use futures::executor::block_on;
use redis::cmd;
use redisson_lock::{DeadlockDetection, Error, LockClient, LostReason, Owner, OwnerPolicy};
use tokio::runtime::{Builder, Runtime};
use tracing::Level;

use crate::support::log::Log;
use crate::support::server::{Server, unique, wait_until};

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

#[tokio::test]
async fn per_task_policy_outside_tokio_uses_the_thread() {
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
fn operations_in_another_runtime_end_with_the_clients_runtime() {
    operations_at_the_moment_the_runtime_ends(true);
}

#[test]
fn operations_outside_tokio_end_with_the_clients_runtime() {
    operations_at_the_moment_the_runtime_ends(false);
}
