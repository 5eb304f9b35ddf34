//! The end of the runtime that connected a client, or that polled its operations, with operations,
//! guards and losses in flight: it costs nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::executor::block_on;
use redis::cmd;
use redisson_lock::{DeadlockDetection, Error, LockClient, LostReason, Owner, OwnerPolicy};
use tokio::runtime::{Builder, Runtime};
use tracing::Level;

use crate::support::log::Log;
use crate::support::observe::{exists, park};
use crate::support::proxy::{Fate, Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until, wait_until_async};

const LIMIT: Duration = Duration::from_secs(20);

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

fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// A client that another runtime connects, behind a proxy that runs on one of its own.
fn client_on_own_runtime(server: &Server) -> (Runtime, Proxy, Runtime, LockClient) {
    let (net, own) = (multi_thread(), multi_thread());
    let proxy = net.block_on(Proxy::start(server));
    let client = own.block_on(LockClient::connect(&proxy.url())).unwrap();
    (net, proxy, own, client)
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
            let thread = std::thread::spawn(move || catch_unwind(AssertUnwindSafe(|| op(&client))));
            (what, thread)
        })
        .collect();
    std::thread::sleep(ms(300));
    match how {
        "drop" => drop(runtime),
        _ => runtime.shutdown_background(),
    }
    std::thread::sleep(ms(100));
    server.resume();
    let mut wrong = Vec::new();
    for (what, thread) in threads {
        let outcome = thread.join().unwrap();
        if !matches!(outcome, Ok(Ok(()))) {
            wrong.push(format!("{what}: {outcome:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn in_flight_operations_are_completed_when_runtime_is_dropped() {
    in_flight_when_runtime_ends("drop", "tokio");
}

#[test]
fn in_flight_operations_are_completed_when_runtime_is_shut_down_in_background() {
    in_flight_when_runtime_ends("background", "tokio");
}

#[test]
fn in_flight_operations_outside_tokio_are_completed_when_runtime_is_dropped() {
    in_flight_when_runtime_ends("drop", "none");
}

/// The release is sent, whatever becomes of the runtime.
#[test]
fn guard_dropped_before_runtime_ended_is_released() {
    let server = Server::start();
    let mut redis = server.connection();
    let log = Log::capture();
    let runtime = current_thread();
    let name = unique("stock");
    let client = runtime.block_on(async {
        let client = LockClient::connect(&server.url()).await.unwrap();
        let guard = client.lock(&name).lock().await.unwrap();
        drop(guard);
        client
    });
    drop(runtime);
    wait_until("it is released", LIMIT, || !exists(&mut redis, &name));
    let stats = client.stats();
    assert_eq!((stats.locks_held, stats.failed_releases), (0, 0));
    let warnings = log.from(Level::WARN);
    assert!(warnings.is_empty(), "{warnings:?}");
}

/// Outside any task two threads are two: none waits for itself.
#[test]
fn two_threads_outside_tokio_are_no_deadlock() {
    let server = Server::start();
    let runtime = multi_thread();
    let strict = LockClient::builder().deadlock_detection(DeadlockDetection::Fail);
    let client = runtime.block_on(strict.connect(&server.url())).unwrap();
    let lock = client.lock(unique("stock"));
    let guard = block_on(lock.lock().into_future()).unwrap();
    let other = lock.clone();
    let waiting = std::thread::spawn(move || block_on(other.lock().into_future()).map(drop));
    wait_until("it waits", LIMIT, || client.stats().requests_waiting == 1);
    drop(runtime);
    std::thread::sleep(ms(100));
    block_on(guard.unlock()).unwrap();
    let answer = waiting.join().unwrap();
    assert!(answer.is_ok(), "{answer:?}");
}

#[test]
fn per_task_policy_outside_tokio_uses_the_thread() {
    let server = Server::start();
    let per_task = LockClient::builder().owner_policy(OwnerPolicy::PerTask);
    let client = multi_thread()
        .block_on(per_task.connect(&server.url()))
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
}

/// The future of `lost` of a guard that was dropped just before the runtime ended.
#[test]
fn lost_of_a_dropped_guard_does_not_panic_after_the_runtime_ended() {
    let server = Server::start();
    let runtime = current_thread();
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
    assert!(
        matches!(outcome, Ok(std::task::Poll::Pending)),
        "{outcome:?}"
    );
}

/// Shutdown waits for a silent server; then the runtime that connected ends.
#[test]
fn shutdown_in_another_runtime_is_completed_after_the_clients_runtime_ended() {
    let server = Server::start();
    let mut redis = server.connection();
    let runtime = multi_thread();
    let name = unique("stock");
    let (client, guard) = runtime.block_on(async {
        let client = LockClient::connect(&server.url()).await.unwrap();
        let guard = client.lock(&name).lock().await.unwrap();
        (client, guard)
    });
    server.pause();
    drop(guard);
    let closing = {
        let client = client.clone();
        std::thread::spawn(move || multi_thread().block_on(client.shutdown()))
    };
    std::thread::sleep(ms(300));
    drop(runtime);
    std::thread::sleep(ms(100));
    server.resume();
    assert_eq!(closing.join().unwrap(), Ok(()));
    assert!(!exists(&mut redis, &name));
    let stats = client.stats();
    assert_eq!((stats.locks_held, stats.failed_releases), (0, 0));
}

/// Holds of each sort outlive the runtime.
#[test]
fn holds_without_a_guard_are_kept_after_the_runtime_ended() {
    let server = Server::start();
    let mut redis = server.connection();
    let runtime = multi_thread();
    let (client, owner) = runtime.block_on(async {
        let client = LockClient::connect(&server.url()).await.unwrap();
        let owner = client.lock("a").lock().await.unwrap().detach();
        std::mem::forget(client.lock("b").lock().await.unwrap());
        (client, owner)
    });
    drop(runtime);
    let stats = client.stats();
    assert_eq!((stats.locks_held, stats.losses.total()), (2, 0));
    use redisson_lock::OwnerExt;
    block_on(client.lock("a").unlock().with_owner(owner)).unwrap();
    assert!(!exists(&mut redis, "a"));
    assert!(exists(&mut redis, "b"));
}

/// `lost()`, polled in no runtime at the moment at which the runtime ends: neither a panic nor a
/// loss.
#[test]
fn lost_at_the_moment_the_runtime_ends_never_panics() {
    let server = Server::start();
    let mut redis = server.connection();
    for round in 0..30 {
        let runtime = multi_thread();
        let (client, guard) = runtime.block_on(async {
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
        assert!(!guard.is_lost(), "{round}");
        assert!(exists(&mut redis, guard.name()));
        block_on(client.shutdown()).unwrap();
        assert_eq!(waiting.join().unwrap(), LostReason::Shutdown, "{round}");
        drop(guard);
    }
}

/// No operation notices that the client's runtime ends.
fn operations_at_the_moment_the_runtime_ends(inside: bool) {
    let server = Server::start();
    let mut wrong = Vec::new();
    for round in 0..20 {
        let runtime = multi_thread();
        let (client, guard) = runtime.block_on(async {
            let client = LockClient::connect(&server.url()).await.unwrap();
            let guard = client.lock("held").lock().await.unwrap();
            (client, guard)
        });
        let is_over = std::sync::Arc::new(AtomicBool::new(false));
        let threads: Vec<_> = (0..4)
            .map(|kind| {
                let lock = client.lock("held");
                let free = client.lock(unique("free"));
                let is_over = std::sync::Arc::clone(&is_over);
                std::thread::spawn(move || {
                    let work = async {
                        while !is_over.load(Ordering::Relaxed) {
                            let answer = match kind {
                                0 => lock.lock().timeout(ms(2)).await.map(drop),
                                1 => lock.lock().timeout(ms(30)).await.map(drop),
                                2 => lock.inspect().await.map(drop),
                                _ => free.run(async {}).await,
                            };
                            match answer {
                                Ok(()) | Err(Error::AcquireTimeout { .. }) => {}
                                Err(error) => return Some(error),
                            }
                        }
                        None
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
        std::thread::sleep(ms(20));
        is_over.store(true, Ordering::Relaxed);
        for (kind, thread) in threads.into_iter().enumerate() {
            match thread.join().unwrap() {
                Ok(None) => {}
                Ok(Some(error)) => wrong.push(format!("{round}, {kind}: {error:?}")),
                Err(panic) => wrong.push(format!(
                    "{round}, {kind}: panic {:?}",
                    panic.downcast_ref::<String>()
                )),
            }
        }
        block_on(guard.unlock()).unwrap();
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn operations_in_another_runtime_continue_after_the_clients_runtime_ended() {
    operations_at_the_moment_the_runtime_ends(true);
}

#[test]
fn operations_outside_tokio_continue_after_the_clients_runtime_ended() {
    operations_at_the_moment_the_runtime_ends(false);
}

/// A release that is in flight, and whose connection is lost, is repeated.
#[test]
fn runtime_that_ends_with_a_release_in_flight_leaves_no_lock() {
    let server = Server::start();
    let mut redis = server.connection();
    let log = Log::capture();
    let net = multi_thread();
    let proxy = net.block_on(Proxy::start(&server));
    let runtime = current_thread();
    let name = unique("stock");
    let client = runtime.block_on(async {
        let client = LockClient::connect(&proxy.url()).await.unwrap();
        let lock = client.lock(&name);
        let guard = lock.lock().lease(Duration::from_secs(3600)).await.unwrap();
        proxy.set(Way::Requests, Flow::Hold);
        let touched = proxy.touched();
        drop(guard);
        wait_until_async("the release is under way", LIMIT, || async {
            proxy.touched() > touched
        })
        .await;
        client
    });
    drop(runtime);
    assert!(exists(&mut redis, &name));
    net.block_on(async { proxy.close_now() });
    proxy.set(Way::Requests, Flow::Pass);
    wait_until("it is released", LIMIT, || !exists(&mut redis, &name));
    let stats = client.stats();
    assert_eq!(
        stats.failed_releases,
        0,
        "{stats:?} {:?}",
        log.from(Level::WARN)
    );
}

/// Calling it again does nothing.
#[test]
fn shutdown_repeated_after_its_runtime_ended_does_nothing() {
    let server = Server::start();
    let runtime = current_thread();
    let client = runtime.block_on(async {
        let client = LockClient::connect(&server.url()).await.unwrap();
        client.shutdown().await.unwrap();
        client.shutdown().await.unwrap();
        client
    });
    drop(runtime);
    assert_eq!(block_on(client.shutdown()), Ok(()));
    let other = current_thread();
    assert_eq!(other.block_on(client.shutdown()), Ok(()));
    let lock = client.lock("a");
    for outcome in [
        other.block_on(async { lock.lock().await.map(drop) }),
        other.block_on(async { lock.try_lock().await.map(drop) }),
        other.block_on(async { lock.run(async {}).await }),
        other.block_on(async { lock.inspect().await.map(drop) }),
        other.block_on(async { lock.force_unlock().await.map(drop) }),
        block_on(async { lock.lock().await.map(drop) }),
    ] {
        assert_eq!(outcome, Err(Error::Closed));
    }
}

#[test]
fn acquire_in_flight_when_runtime_ends_is_granted() {
    let server = Server::start();
    let mut redis = server.connection();
    let (net, proxy, own, client) = client_on_own_runtime(&server);
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    proxy.set(Way::Replies, Flow::Hold);
    let acquiring = net.spawn(lock.lock().into_future());
    wait_until("it is granted", LIMIT, || exists(&mut redis, &name));
    drop(own);
    proxy.set(Way::Replies, Flow::Pass);
    let guard = net.block_on(acquiring).unwrap().unwrap();
    net.block_on(guard.unlock()).unwrap();
    assert!(!exists(&mut redis, &name));
}

#[test]
fn unlock_in_flight_when_runtime_ends_is_confirmed() {
    let server = Server::start();
    let mut redis = server.connection();
    let (net, proxy, own, client) = client_on_own_runtime(&server);
    let lock = client.lock(unique("stock"));
    let guard = net.block_on(lock.lock().into_future()).unwrap();
    proxy.set(Way::Replies, Flow::Hold);
    let unlocking = net.spawn(guard.unlock());
    wait_until("it is released", LIMIT, || !exists(&mut redis, lock.name()));
    drop(own);
    proxy.set(Way::Replies, Flow::Pass);
    net.block_on(unlocking).unwrap().unwrap();
}

/// Its reply is lost: the lock is free, and the answer does not deny that.
#[test]
fn force_unlock_in_flight_when_runtime_ends_reports_that_it_freed() {
    let server = Server::start();
    let mut redis = server.connection();
    let (net, proxy, own, client) = client_on_own_runtime(&server);
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    cmd("HSET")
        .arg(&[&*name, "other:1", "1"])
        .exec(&mut redis)
        .unwrap();
    // The reply to the inspection passes, and the one to the second call does not.
    proxy.next_reply_to(&["EVALSHA", "redisson_lock__channel"], Fate::Swallow);
    let freeing = net.spawn(async move { lock.force_unlock().await });
    wait_until("it is freed", LIMIT, || !exists(&mut redis, &name));
    drop(own);
    let outcome = net.block_on(freeing).unwrap();
    assert!(
        matches!(outcome, Ok(true) | Err(Error::OutcomeUnknown { .. })),
        "{outcome:?}, and the lock is free"
    );
}

/// An operation that its caller drops because the caller's runtime ends is completed, too.
fn dropped_with_its_runtime(begin_unlock: bool, close: bool) {
    let server = Server::start();
    let mut redis = server.connection();
    let (net, proxy, _own, client) = client_on_own_runtime(&server);
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    let lease = Duration::from_secs(3600);
    let mut guard = None;
    if begin_unlock {
        guard = Some(
            net.block_on(lock.lock().lease(lease).into_future())
                .unwrap(),
        );
        proxy.set(Way::Requests, Flow::Hold);
    } else {
        proxy.set(Way::Replies, Flow::Hold);
    }
    let touched = proxy.touched();
    let callers = current_thread();
    let mut begun = Box::pin(async {
        match guard.take() {
            Some(guard) => drop(guard.unlock().await),
            None => drop(lock.lock().lease(lease).await),
        }
    });
    callers.block_on(async {
        assert!(futures::poll!(&mut begun).is_pending());
        wait_until_async("it is under way", LIMIT, || {
            let ready = proxy.touched() > touched && exists(&mut redis, &name);
            async move { ready }
        })
        .await;
    });
    drop(callers);
    drop(begun);
    if close {
        net.block_on(async { proxy.close_now() });
    }
    proxy.set(Way::Both, Flow::Pass);
    wait_until("the lock is free", LIMIT, || !exists(&mut redis, &name));
    assert_eq!(client.stats().failed_releases, 0);
}

#[test]
fn unlock_dropped_with_its_runtime_is_completed() {
    dropped_with_its_runtime(true, true);
}

#[test]
fn acquire_dropped_with_its_runtime_leaves_nothing() {
    dropped_with_its_runtime(false, true);
}

#[test]
fn acquire_with_slow_reply_dropped_with_its_runtime_leaves_nothing() {
    dropped_with_its_runtime(false, false);
}

/// The same with a task of the caller's runtime that waits: its place in the queue is free again.
#[test]
fn waiter_dropped_with_its_runtime_delays_no_other() {
    let server = Server::start();
    let (net, _proxy, _own, client) = client_on_own_runtime(&server);
    let lock = client.lock(unique("stock"));
    let guard = net.block_on(lock.lock().into_future()).unwrap();
    let callers = multi_thread();
    let _waiting: Vec<_> = (0..5)
        .map(|_| callers.spawn(lock.lock().into_future()))
        .collect();
    wait_until("they wait", LIMIT, || client.stats().requests_waiting == 5);
    let next = net.spawn(lock.lock().into_future());
    wait_until("the next one waits", LIMIT, || {
        client.stats().requests_waiting == 6
    });
    drop(callers);
    wait_until("they are gone", LIMIT, || {
        client.stats().requests_waiting == 1
    });
    net.block_on(async {
        guard.unlock().await.unwrap();
        let next = tokio::time::timeout(LIMIT, next)
            .await
            .expect("it is granted");
        next.unwrap().unwrap().unlock().await.unwrap();
    });
    assert_eq!(client.stats().locks_held, 0);
}

/// `lost()` that was polled outside tokio, and again in another runtime after the client's ended.
#[test]
fn lost_polled_outside_tokio_and_then_in_another_runtime_resolves() {
    let server = Server::start();
    let mut redis = server.connection();
    let net = multi_thread();
    let own = multi_thread();
    let brief = LockClient::builder().watchdog_timeout(ms(1_500));
    let client = own.block_on(brief.connect(&server.url())).unwrap();
    let guards: Vec<_> = (0..20)
        .map(|n| {
            let lock = client.lock(unique(&format!("stock{n}")));
            net.block_on(lock.lock().into_future()).unwrap()
        })
        .collect();
    let losses: Vec<_> = guards.iter().map(|guard| park(guard.lost())).collect();
    drop(own);
    assert!(guards.iter().all(|guard| !guard.is_lost()));
    cmd("FLUSHALL").exec(&mut redis).unwrap();
    let mut panics = 0;
    for lost in losses {
        let resolved = catch_unwind(AssertUnwindSafe(|| net.block_on(lost)));
        match resolved {
            Ok(reason) => assert_eq!(reason, LostReason::Gone),
            Err(_) => panics += 1,
        }
    }
    assert_eq!(panics, 0, "of 20 panicked");
}
