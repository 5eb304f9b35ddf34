//! Runtimes: a client needs none of its caller. It connects and works from any runtime, from plain
//! threads, and after the runtime that connected it has ended.

use std::future::pending;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::executor::block_on;
use redis::cmd;
use redisson_lock::{Error, LockClient, LockGuard, LostReason, Owner, OwnerExt};
use tokio::runtime::{Builder, Runtime};

use crate::support::observe::{exists, park, pttl, subscribers};
use crate::support::process::{self, run_alone};
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

/// Without timers and without I/O.
fn bare() -> Runtime {
    Builder::new_current_thread().build().unwrap()
}

/// A client whose runtime has ended, and a guard of it.
fn orphaned(server: &Server, name: &str) -> (LockClient, LockGuard) {
    multi_thread().block_on(async {
        let client = LockClient::builder()
            .watchdog_timeout(ms(1_500))
            .connect(&server.url())
            .await
            .unwrap();
        let guard = client.lock(name).lock().await.unwrap();
        (client, guard)
    })
}

/// Each operation on a lock that another owner holds, and on a free one.
async fn assert_each_operation_works(client: &LockClient, held: &str) {
    let (lock, free) = (client.lock(held), client.lock(unique("free")));
    let owner = Owner::new();
    let timed_out = lock.lock().timeout(ms(20)).await.unwrap_err();
    assert!(
        matches!(timed_out, Error::AcquireTimeout { .. }),
        "{timed_out:?}"
    );
    assert!(lock.try_lock().await.unwrap().is_none());
    assert!(lock.try_lock_for(ms(20)).await.unwrap().is_none());
    assert_eq!(lock.try_run(async {}).await, Ok(None));
    let not_held = lock.unlock().with_owner(owner).await.unwrap_err();
    assert!(matches!(not_held, Error::NotHeld { .. }), "{not_held:?}");
    assert!(lock.inspect().await.unwrap().is_some());
    assert_eq!(lock.is_locked().await, Ok(true));
    assert_eq!(lock.is_held_by(owner).await, Ok(false));

    free.lock().await.unwrap().unlock().await.unwrap();
    assert_eq!(free.run(async { 7 }).await, Ok(7));
    let _ = free.lock().with_owner(owner).await.unwrap().detach();
    free.unlock().with_owner(owner).await.unwrap();
    let _kept = free.lock().await.unwrap();
    assert_eq!(free.force_unlock().await, Ok(true));
    assert_eq!(free.is_locked().await, Ok(false));
}

#[test]
fn client_of_ended_runtime_works_everywhere() {
    let server = Server::start();
    let name = unique("stock");
    let (client, guard) = orphaned(&server, &name);
    // In another runtime, as a static is in the second test of a program, in a bare one, in none.
    multi_thread().block_on(assert_each_operation_works(&client, &name));
    bare().block_on(assert_each_operation_works(&client, &name));
    block_on(assert_each_operation_works(&client, &name));
    block_on(guard.unlock()).unwrap();
    assert!(!exists(&mut server.connection(), &name));
    block_on(client.shutdown()).unwrap();
}

#[test]
fn guard_of_ended_runtime_stays_held_and_renewed() {
    let server = Server::start();
    let mut redis = server.connection();
    let name = unique("stock");
    let (client, guard) = orphaned(&server, &name);
    let mut lost = park(guard.lost());
    // Three watchdog timeouts.
    let begun = Instant::now();
    while begun.elapsed() < ms(4_500) {
        assert!(pttl(&mut redis, &name) > 0);
        assert!(!guard.is_lost());
        std::thread::sleep(ms(50));
    }
    assert!(futures::FutureExt::now_or_never(&mut lost).is_none());
    assert!(guard.remaining_lease() > Duration::ZERO);
    assert_eq!(block_on(guard.run(async { 7 })), Ok(7));
    let stats = client.stats();
    assert_eq!(stats.losses.total(), 0, "{stats:?}");
    assert!(stats.renewals >= 3, "{stats:?}");
    // A loss is reported all the same.
    cmd("DEL").arg(&name).exec(&mut redis).unwrap();
    assert_eq!(block_on(lost), LostReason::Gone);
    let ran = block_on(guard.run(pending::<()>()));
    assert!(matches!(ran, Err(Error::Lost { .. })), "{ran:?}");
    drop(guard);
}

#[test]
fn guard_dropped_after_its_runtime_ended_is_released() {
    let server = Server::start();
    let mut redis = server.connection();
    let name = unique("stock");
    let (client, guard) = orphaned(&server, &name);
    drop(guard);
    wait_until("it is released", LIMIT, || !exists(&mut redis, &name));
    wait_until("the release is confirmed", LIMIT, || {
        client.stats().locks_held == 0
    });
    assert_eq!(client.stats().failed_releases, 0);
}

#[test]
fn waiter_in_another_runtime_is_granted_after_the_clients_runtime_ended() {
    let server = Server::start();
    let name = unique("stock");
    let runtime = multi_thread();
    let (client, guard) = runtime.block_on(async {
        let client = LockClient::connect(&server.url()).await.unwrap();
        let guard = client.lock(&name).lock().await.unwrap();
        (client, guard)
    });
    let lock = client.lock(&name);
    let waiting = std::thread::spawn(move || {
        multi_thread().block_on(async { lock.lock().await?.unlock().await })
    });
    wait_until("it waits", LIMIT, || client.stats().requests_waiting == 1);
    drop(runtime);
    block_on(guard.unlock()).unwrap();
    waiting.join().unwrap().unwrap();
}

#[test]
fn operations_outside_a_runtime_work() {
    let server = Server::start();
    let mut redis = server.connection();
    let name = unique("stock");
    let client = block_on(LockClient::connect(&server.url())).unwrap();
    let lock = client.lock(&name);

    let guard = block_on(lock.lock().into_future()).unwrap();
    // Waiting, its time limit and the look for its error use timers.
    let refused = block_on(lock.lock().timeout(ms(50)).into_future());
    assert!(
        matches!(refused, Err(Error::AcquireTimeout { .. })),
        "{refused:?}"
    );
    let tried = block_on(lock.try_lock_for(ms(50)).into_future());
    assert!(tried.unwrap().is_none());
    assert!(block_on(lock.inspect()).unwrap().is_some());
    block_on(guard.unlock()).unwrap();

    let sum = block_on(lock.run(async { lock.run(async { 1 }).await.unwrap() + 1 })).unwrap();
    assert_eq!(sum, 2);
    let guard = block_on(lock.lock().lease(ms(1_000)).into_future()).unwrap();
    assert_eq!(block_on(guard.lost()), LostReason::Expired);
    drop(guard);
    drop(block_on(lock.lock().into_future()).unwrap());
    wait_until("the dropped guard is released", LIMIT, || {
        !exists(&mut redis, &name)
    });
    block_on(client.shutdown()).unwrap();
}

#[test]
fn connect_outside_a_runtime_reports_why_it_fails() {
    let error = block_on(LockClient::connect("redis://127.0.0.1:1")).unwrap_err();
    assert!(matches!(error, Error::Connection { .. }), "{error:?}");
}

#[test]
fn connect_in_a_runtime_without_io_works() {
    let server = Server::start();
    let timers = Builder::new_current_thread().enable_time().build().unwrap();
    let client = timers.block_on(LockClient::connect(&server.url())).unwrap();
    timers.block_on(client.lock("a").run(async {})).unwrap();
}

/// No panic is printed either.
#[test]
fn connect_in_a_runtime_without_drivers_works_and_prints_no_panic() {
    let server = Server::start();
    let panics = Arc::new(AtomicUsize::new(0));
    let (count, here) = (Arc::clone(&panics), std::thread::current().id());
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let thread = std::thread::current();
        if thread.id() == here || thread.name() == Some("redisson-lock") {
            count.fetch_add(1, Ordering::SeqCst);
        }
        before(info);
    }));
    let refused = bare().block_on(LockClient::connect("redis://127.0.0.1:1"));
    assert!(
        matches!(refused, Err(Error::Connection { .. })),
        "{refused:?}"
    );
    let client = bare().block_on(LockClient::connect(&server.url())).unwrap();
    bare().block_on(client.shutdown()).unwrap();
    assert_eq!(panics.load(Ordering::SeqCst), 0, "panics were printed");
}

#[test]
fn operation_in_a_runtime_without_timers_works() {
    let server = Server::start();
    let client = multi_thread()
        .block_on(LockClient::connect(&server.url()))
        .unwrap();
    let lock = client.lock(unique("stock"));
    bare()
        .block_on(async { lock.lock().await?.unlock().await })
        .unwrap();
}

/// A request that was begun in a runtime that has ended is continued in another one.
#[test]
fn request_begun_in_a_runtime_that_ended_is_continued_in_another() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = multi_thread()
        .block_on(LockClient::connect(&server.url()))
        .unwrap();
    let lock = client.lock(unique("stock"));
    let guard = block_on(lock.lock().into_future()).unwrap();
    let mut lost = Box::pin(guard.lost());
    let mut waiting = Box::pin(lock.lock().into_future());
    let first = multi_thread();
    first.block_on(async {
        assert!(futures::poll!(&mut lost).is_pending());
        wait_until_async("it sleeps", LIMIT, || {
            let polled = futures::FutureExt::now_or_never(&mut waiting);
            assert!(polled.is_none());
            let subscribed = subscribers(&mut redis, lock.name()) == 1;
            async move { subscribed }
        })
        .await;
    });
    drop(first);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        multi_thread().block_on(async {
            assert!(futures::poll!(&mut lost).is_pending());
            drop(lost);
            guard.unlock().await.unwrap();
            waiting.await.unwrap().unlock().await
        })
    }));
    assert!(
        matches!(outcome, Ok(Ok(()))),
        "{:?}",
        outcome.map_err(|_| "it panicked")
    );
}

/// The same for requests that were polled outside tokio, and of each kind.
#[test]
fn request_polled_outside_tokio_is_continued_in_another_runtime() {
    let server = Server::start();
    let own = multi_thread();
    let client = own.block_on(LockClient::connect(&server.url())).unwrap();
    let lock = client.lock(unique("stock"));
    let guard = block_on(lock.lock().into_future()).unwrap();
    let waiting = park(lock.lock());
    let acquiring = Box::pin(client.lock(unique("other")).lock().into_future());
    let mut acquiring = acquiring;
    let polled = futures::FutureExt::now_or_never(&mut acquiring);
    drop(own);
    let net = multi_thread();
    if polled.is_none() {
        net.block_on(async { acquiring.await.unwrap().unlock().await })
            .unwrap();
    }
    assert!(!guard.is_lost());
    net.block_on(guard.unlock()).unwrap();
    net.block_on(async { waiting.await.unwrap().unlock().await })
        .unwrap();
    let stats = client.stats();
    assert_eq!((stats.requests_waiting, stats.locks_held), (0, 0));
}

#[test]
fn shut_down_client_of_ended_runtime_says_that_it_is_shut_down() {
    let server = Server::start();
    let runtime = multi_thread();
    let client = runtime.block_on(async {
        let client = LockClient::connect(&server.url()).await.unwrap();
        client.shutdown().await.unwrap();
        client
    });
    drop(runtime);
    assert_eq!(block_on(client.lock("a").is_locked()), Err(Error::Closed));
    assert_eq!(block_on(client.shutdown()), Ok(()));
}

#[test]
fn client_leaves_no_thread_and_no_connection_after_its_last_handle() {
    run_alone("runtime::worker_process", "last_handle");
}

#[test]
fn worker_process() {
    if process::role().is_some() {
        last_handle();
    }
}

/// How many threads of this process are a client's.
fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|name| name.trim() == "redisson-lock")
        .count()
}

fn last_handle() {
    let server = Server::start();
    let mut redis = server.connection();
    let name = unique("stock");
    let (client, guard) = orphaned(&server, &name);
    let other = block_on(LockClient::connect(&server.url())).unwrap();
    let id = client.client_id().to_string();
    let mut connections = || {
        let list: String = cmd("CLIENT").arg("LIST").query(&mut redis).unwrap();
        list.lines().filter(|line| line.contains(&id)).count()
    };
    assert_eq!((connections(), threads()), (2, 2));
    drop(client);
    std::thread::sleep(ms(200));
    assert_eq!(
        (connections(), threads()),
        (2, 2),
        "the guard keeps the client"
    );
    drop(guard);
    wait_until("the client has ended", LIMIT, || {
        connections() == 0 && threads() == 1
    });
    block_on(other.shutdown()).unwrap();
    wait_until("the other client has ended", LIMIT, || threads() == 0);
    assert!(!exists(&mut server.connection(), &name));
    // A connect that fails, or that is given up, leaves none either.
    block_on(LockClient::connect("redis://127.0.0.1:1")).unwrap_err();
    server.pause();
    let url = server.url();
    let connecting = park(LockClient::connect(&url));
    wait_until("it connects", LIMIT, || threads() == 1);
    drop(connecting);
    wait_until("it has ended", LIMIT, || threads() == 0);
    server.resume();
}
