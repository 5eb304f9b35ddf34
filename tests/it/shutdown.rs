//! The end of a client, by `shutdown` or with its last handle: pending releases are finished, and
//! no task, connection or subscription is left.

use std::future::Future;
use std::time::{Duration, Instant};

use crate::support::observe::{channels, exists, park, pttl, ttl};
use crate::support::proxy::{Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until, wait_until_async};
use futures::{FutureExt, poll};
use redis::cmd;
use redisson_lock::{Error, LockClient, LockGuard, LostReason, Owner, OwnerExt, Step};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::task::block_in_place;
use tokio::time::timeout;
use tracing::Level;

use crate::support::log::Log;

const LIMIT: Duration = Duration::from_secs(20);

const SOON: Duration = Duration::from_secs(10);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Connections to the server, except the observer's own.
fn connections(redis: &mut redis::Connection) -> usize {
    let list: String = redis::cmd("CLIENT").arg("LIST").query(redis).unwrap();
    list.lines().count() - 1
}

/// A separate runtime, so that its tasks can be counted.
fn runtime() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

/// Runs the future on a separate runtime, and waits until no task and no connection of it is left.
fn assert_leaves_nothing<F: Future>(server: &Server, future: F) -> F::Output {
    let runtime = runtime();
    let output = runtime.block_on(future);
    let mut redis = server.connection();
    wait_until("no task is alive", SOON, || {
        runtime.metrics().num_alive_tasks() == 0
    });
    wait_until("no connection is open", SOON, || {
        connections(&mut redis) == 0
    });
    assert_eq!(channels(&mut redis), 0);
    output
}

#[test]
fn shutdown_leaves_no_task_connection_or_subscription() {
    let server = Server::start();
    let kept = assert_leaves_nothing(&server, async {
        // For so long the connection is kept for a guard that is not dropped.
        let builder = LockClient::builder()
            .command_timeout(ms(300))
            .retry_timeout(ms(300));
        let client = builder.connect(&server.url()).await.unwrap();
        let lock = client.lock(unique("stock"));
        let guard = lock.lock().await.unwrap();
        let waiter = tokio::spawn(lock.lock().into_future());
        let mut redis = server.connection();
        wait_until("the waiter is subscribed", SOON, || {
            channels(&mut redis) == 1
        });
        assert_eq!(connections(&mut redis), 2);
        timeout(SOON, client.shutdown())
            .await
            .expect("the shutdown hangs")
            .unwrap();
        // They are closed although handles of the client exist.
        wait_until("the connections are closed", SOON, || {
            connections(&mut redis) == 0
        });
        assert_eq!(
            timeout(SOON, waiter)
                .await
                .expect("the waiter hangs")
                .unwrap()
                .unwrap_err(),
            Error::Closed
        );
        // Handles that still exist keep nothing alive.
        (client, lock, guard)
    });
    drop(kept);
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_ends_all_waits() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let held = client.lock(unique("stock"));
    let _guard = held.lock().await.unwrap();
    let waiters: Vec<_> = (0..20)
        .map(|number| {
            let lock = held.clone();
            tokio::spawn(async move {
                match number % 3 {
                    0 => lock.lock().await.map(drop),
                    1 => lock.try_lock_for(10 * SOON).await.map(drop),
                    _ => lock.run(async { panic!("the lock was not free") }).await,
                }
            })
        })
        .collect();
    wait_until("a waiter is subscribed", SOON, || channels(&mut redis) == 1);
    client.shutdown().await.unwrap();
    for waiter in waiters {
        assert_eq!(
            timeout(SOON, waiter)
                .await
                .expect("a waiter hangs")
                .unwrap(),
            Err(Error::Closed)
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_finishes_pending_releases() {
    const LOCKS: usize = 200;
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let mut guards = Vec::new();
    for _ in 0..LOCKS {
        guards.push(client.lock(unique("stock")).lock().await.unwrap());
    }
    assert_eq!(redis::cmd("DBSIZE").query(&mut redis), Ok(LOCKS));
    // Some guards are dropped, some unlocks are dropped after one poll, some are awaited.
    let mut unlocks = Vec::new();
    for (number, guard) in guards.into_iter().enumerate() {
        match number % 3 {
            0 => drop(guard),
            1 => drop(poll!(Box::pin(guard.unlock()))),
            _ => {
                // It begins before the shutdown, however late its task runs.
                let mut unlock = Box::pin(guard.unlock());
                assert!(poll!(&mut unlock).is_pending());
                unlocks.push(tokio::spawn(unlock));
            }
        }
    }
    client.shutdown().await.unwrap();
    assert_eq!(redis::cmd("DBSIZE").query(&mut redis), Ok(0));
    for unlock in unlocks {
        let outcome = timeout(SOON, unlock)
            .await
            .expect("an unlock hangs")
            .unwrap();
        assert!(outcome.is_ok(), "{outcome:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_loses_guards_and_leaves_keys_for_their_lease() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .watchdog_timeout(ms(2_000))
        .connect(&server.url())
        .await
        .unwrap();
    let (name, other) = (unique("stock"), unique("other"));
    let guard = client.lock(&name).lock().await.unwrap();
    let (begin, begun) = oneshot::channel();
    let work = async move {
        begin.send(()).unwrap();
        std::future::pending::<()>().await;
    };
    let stopped = tokio::spawn(client.lock(&other).run(work).into_future());
    timeout(SOON, begun)
        .await
        .expect("the work has not begun")
        .unwrap();
    let lost = tokio::spawn(guard.lost());
    client.shutdown().await.unwrap();
    assert_eq!(
        timeout(SOON, lost)
            .await
            .expect("the loss was not reported")
            .unwrap(),
        LostReason::Shutdown
    );
    assert!(guard.is_lost());
    assert_eq!(guard.remaining_lease(), Duration::ZERO);
    let outcome = timeout(SOON, stopped)
        .await
        .expect("the work was not stopped")
        .unwrap();
    assert!(
        matches!(&outcome, Err(Error::Lost { lock, reason: LostReason::Shutdown, .. }) if *lock == other),
        "{outcome:?}"
    );
    assert!(
        pttl(&mut redis, &name) > 0,
        "the key was deleted while the code of its guard may still run"
    );
    // The shutdown ends the renewal.
    wait_until("its lease has expired", SOON, || {
        pttl(&mut redis, &name) == -2
    });
    assert!(matches!(
        guard.unlock().await,
        Err(Error::Lost {
            reason: LostReason::Shutdown,
            ..
        })
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn operations_after_shutdown_return_closed() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    client.shutdown().await.unwrap();
    timeout(SOON, client.shutdown())
        .await
        .expect("the second shutdown hangs")
        .unwrap();
    let lock2 = client.clone().lock(unique("stock"));
    for lock in [&lock, &lock2] {
        assert_eq!(lock.lock().await.unwrap_err(), Error::Closed);
        assert_eq!(lock.try_lock().await.unwrap_err(), Error::Closed);
        assert_eq!(
            lock.run(async { panic!("ran after the shutdown") }).await,
            Err::<(), _>(Error::Closed)
        );
        assert_eq!(
            lock.unlock().with_owner(Owner::new()).await,
            Err(Error::Closed)
        );
        assert_eq!(lock.is_locked().await, Err(Error::Closed));
        assert_eq!(lock.hold_count_of(Owner::new()).await, Err(Error::Closed));
        assert_eq!(ttl(lock).await, Err(Error::Closed));
        assert_eq!(lock.inspect().await, Err(Error::Closed));
        assert_eq!(lock.force_unlock().await, Err(Error::Closed));
    }
}

#[test]
fn client_ends_with_last_handle() {
    let server = Server::start();
    assert_leaves_nothing(&server, async {
        let client = LockClient::connect(&server.url()).await.unwrap();
        let lock = client.lock(unique("stock"));
        lock.lock().await.unwrap().unlock().await.unwrap();
        let again = client.clone();
        drop(client);
        drop(again);
        // A lock is a handle, too.
        lock.lock().await.unwrap().unlock().await.unwrap();
    });
}

#[test]
fn client_ends_with_last_guard_after_its_release() {
    let server = Server::start();
    let mut redis = server.connection();
    let name = unique("stock");
    let guard = {
        let runtime = runtime();
        let guard = runtime.block_on(async {
            let client = LockClient::builder()
                .watchdog_timeout(ms(2_000))
                .connect(&server.url())
                .await
                .unwrap();
            client.lock(&name).lock().await.unwrap()
        });
        // The guard alone keeps the renewal running.
        let begun = Instant::now();
        while begun.elapsed() < ms(3_000) {
            assert!(
                pttl(&mut redis, &name) > 0,
                "the key expired after {:?}",
                begun.elapsed()
            );
            std::thread::sleep(ms(5));
        }
        // Outside any runtime.
        drop(guard);
        wait_until("no task is alive", SOON, || {
            runtime.metrics().num_alive_tasks() == 0
        });
        wait_until("the lock is released", ms(1_000), || {
            pttl(&mut redis, &name) == -2
        });
        wait_until("no connection is open", SOON, || {
            connections(&mut redis) == 0
        });
        runtime.block_on(async {
            let client = LockClient::connect(&server.url()).await.unwrap();
            client.lock(&name).lock().await.unwrap()
        })
    };
    // Its runtime has ended: the drop releases nothing, and does not panic or hang.
    drop(guard);
    wait_until("no connection is open", SOON, || {
        connections(&mut redis) == 0
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_with_dead_server_ends() {
    let mut server = Server::start();
    let client = LockClient::builder()
        .retry_timeout(ms(1_000))
        .connect(&server.url())
        .await
        .unwrap();
    let guard = client.lock(unique("stock")).lock().await.unwrap();
    let _held = client.lock(unique("stock")).lock().await.unwrap();
    block_in_place(|| server.kill());
    drop(guard);
    let begun = Instant::now();
    let outcome = timeout(2 * SOON, client.shutdown())
        .await
        .expect("the shutdown hangs");
    assert!(
        matches!(
            outcome,
            Err(Error::Timeout {
                step: Step::Shutdown,
                ..
            })
        ),
        "{outcome:?}"
    );
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}

#[test]
fn shutdown_with_silent_network_ends() {
    let server = Server::start();
    let runtime = runtime();
    let proxy = runtime.block_on(Proxy::start(&server));
    let alone = runtime.metrics().num_alive_tasks();
    runtime.block_on(async {
        let client = LockClient::builder()
            .retry_timeout(ms(1_000))
            .connect(&proxy.url())
            .await
            .unwrap();
        let lock = client.lock(unique("stock"));
        let guard = lock.lock().await.unwrap();
        proxy.set(Way::Both, Flow::Hold);
        drop(guard);
        let waiter = tokio::spawn(lock.lock().into_future());
        let begun = Instant::now();
        let outcome = timeout(2 * SOON, client.shutdown())
            .await
            .expect("the shutdown hangs");
        assert!(
            matches!(
                outcome,
                Err(Error::Timeout {
                    step: Step::Shutdown,
                    ..
                })
            ),
            "{outcome:?}"
        );
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        let waited = timeout(SOON, waiter)
            .await
            .expect("a waiter hangs")
            .unwrap();
        assert!(
            matches!(
                waited,
                Err(Error::Closed
                    | Error::OutcomeUnknown {
                        step: Step::Acquire,
                        ..
                    })
            ),
            "{waited:?}"
        );
    });
    proxy.close_now();
    proxy.set(Way::Both, Flow::Pass);
    wait_until("no task is alive", SOON, || {
        runtime.metrics().num_alive_tasks() <= alone
    });
}

/// A request that is not polled never ends. A shutdown waits for it no longer than for a reply, and
/// does not report it as an unfinished release.
#[tokio::test(flavor = "multi_thread")]
async fn shutdown_with_unpolled_request_succeeds() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let (name, unpolled) = loop {
        let name = unique("stock");
        let mut unpolled = Box::pin(client.lock(&name).lock().into_future());
        // On a busy machine one poll may complete the request.
        if (&mut unpolled).now_or_never().is_none() {
            break (name, unpolled);
        }
    };
    wait_until("the lock is granted", SOON, || pttl(&mut redis, &name) > 0);
    assert_eq!(
        timeout(2 * SOON, client.shutdown())
            .await
            .expect("the shutdown hangs"),
        Ok(())
    );
    drop(unpolled);
}

/// At the shutdown the client has closed its connections, and the server does not reply on the new
/// ones. None of them may be left open after the server continues.
#[test]
fn shutdown_with_paused_server_leaves_no_connection() {
    const CLIENTS: usize = 10;
    let server = Server::start();
    let kept = assert_leaves_nothing(&server, async {
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            let builder = LockClient::builder()
                .command_timeout(ms(200))
                .retry_timeout(ms(200));
            clients.push(builder.connect(&server.url()).await.unwrap());
        }
        server.pause();
        // Longer than the second after which the client probes an idle connection. The test cannot
        // observe the probe.
        tokio::time::sleep(ms(1_500)).await;
        for client in &clients {
            // No release is pending. Another test checks the result.
            let _ = timeout(SOON, client.shutdown())
                .await
                .expect("the shutdown hangs");
        }
        server.resume();
        clients
    });
    drop(kept);
}

/// The client is shut down at any stage of the replacement of its connection for calls.
#[test]
fn shutdown_during_reconnect_leaves_no_connection() {
    const ROUNDS: u64 = 150;
    let server = Server::start();
    let kept = assert_leaves_nothing(&server, async {
        let mut redis = server.connection();
        let mut clients = Vec::new();
        for round in 0..ROUNDS {
            let client = LockClient::connect(&server.url()).await.unwrap();
            redis::cmd("CLIENT")
                .arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"])
                .exec(&mut redis)
                .unwrap();
            tokio::time::sleep(Duration::from_micros(100 * (round % 75))).await;
            timeout(SOON, client.shutdown())
                .await
                .expect("the shutdown hangs")
                .unwrap();
            clients.push(client);
        }
        clients
    });
    drop(kept);
}

#[tokio::test(flavor = "multi_thread")]
async fn clone_opens_no_connection() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let clones: Vec<_> = (0..100).map(|_| client.clone()).collect();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    for clone in &clones {
        assert_eq!(clone.client_id(), client.client_id());
        assert!(clone.lock(&name).try_lock().await.unwrap().is_none());
    }
    assert_eq!(connections(&mut redis), 2);
    guard.unlock().await.unwrap();
    clones[0].shutdown().await.unwrap();
    assert_eq!(client.lock(&name).lock().await.unwrap_err(), Error::Closed);
}

/// "The client is shut down": a client that is shut down fails with `Closed`.
#[tokio::test]
async fn unlock_of_a_closed_client_outside_a_scope_is_closed() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(client.lock("a").unlock().await, Err(Error::Closed));
}

/// "Requests of this client that wait for a lock now": none after a shutdown.
#[tokio::test]
async fn parked_request_of_a_closed_client_does_not_wait() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    let parked = park(lock.lock());
    drop(guard);
    client.shutdown().await.unwrap();
    assert_eq!(client.stats().requests_waiting, 0);
    assert!(matches!(parked.await, Err(Error::Closed)));
    assert_eq!(client.stats().requests_waiting, 0);
}

#[tokio::test]
async fn shutdown_after_cancelled_runs_loses_nothing() {
    let server = Server::start();
    let log = Log::capture();
    let mut redis = server.connection();
    for round in 0..100 {
        let client = LockClient::connect(&server.url()).await.unwrap();
        let lock = client.lock(unique("stock"));
        let (entered, inside) = tokio::sync::oneshot::channel();
        let running = tokio::spawn(lock.run(async move {
            entered.send(()).unwrap();
            std::future::pending::<()>().await;
        }));
        inside.await.unwrap();
        running.abort();
        assert!(running.await.unwrap_err().is_cancelled());
        if round % 2 == 0 {
            let owner = Owner::new();
            let other = client.lock(unique("other"));
            let _ = other.lock().with_owner(owner).await.unwrap().detach();
            let mut unlocking = Box::pin(other.unlock().with_owner(owner));
            let _ = futures::poll!(&mut unlocking);
            drop(unlocking);
        }
        client.shutdown().await.unwrap();
        let stats = client.stats();
        let ended = (
            stats.locks_held,
            stats.losses.total(),
            stats.failed_releases,
        );
        assert_eq!(ended, (0, 0, 0), "{stats:?}");
        assert!(!exists(&mut redis, lock.name()));
    }
    let events = log.from(Level::INFO);
    assert!(events.is_empty(), "{events:?}");
}

/// "Locks that are still held are lost with `LostReason::Shutdown`. Their keys stay": no other key
/// does, and each caller receives `Closed` or `Lost`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_beside_busy_tasks_accounts_for_each_key() {
    let server = Server::start();
    let mut redis = server.connection();
    for round in 0..60_u64 {
        let client = LockClient::connect(&server.url()).await.unwrap();
        let tasks: Vec<_> = (0..8)
            .map(|task| {
                let lock = client.lock(format!("race:{round}:{task}"));
                tokio::spawn(async move {
                    loop {
                        let outcome = match task % 4 {
                            0 => lock.run(tokio::task::yield_now()).await,
                            1 => match lock.lock().await {
                                Ok(guard) => guard.unlock().await,
                                Err(error) => Err(error),
                            },
                            2 => lock.lock().await.map(drop),
                            _ => match lock.lock().await {
                                Ok(guard) => {
                                    let owner = guard.detach();
                                    lock.unlock().with_owner(owner).await
                                }
                                Err(error) => Err(error),
                            },
                        };
                        if let Err(error) = outcome {
                            return error;
                        }
                    }
                })
            })
            .collect();
        wait_until_async("they work", LIMIT, || async {
            client.stats().grants > round
        })
        .await;
        client.shutdown().await.unwrap();
        for task in tasks {
            let error = task.await.unwrap();
            let expected = matches!(
                error,
                Error::Closed
                    | Error::Lost {
                        reason: LostReason::Shutdown,
                        ..
                    }
            );
            assert!(expected, "{error:?}");
        }
        let stats = client.stats();
        let keys: Vec<String> = cmd("KEYS")
            .arg(format!("race:{round}:*"))
            .query(&mut redis)
            .unwrap();
        assert_eq!((stats.locks_held, stats.requests_waiting), (0, 0));
        assert!(
            keys.len() as u64 <= stats.losses.shutdown + stats.failed_releases,
            "{keys:?} {stats:?}"
        );
    }
}

/// A guard that is dropped after the shutdown: nothing is reported twice, and the lock is released.
#[tokio::test]
async fn guard_dropped_after_shutdown_is_one_loss_and_is_released() {
    let server = Server::start();
    let log = Log::capture();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    let other = lock.lock().with_owner(guard.owner()).await.unwrap();
    client.shutdown().await.unwrap();
    assert!(guard.is_lost());
    assert_eq!(guard.lost().await, LostReason::Shutdown);
    drop(guard);
    assert!(other.unlock().await.unwrap_err().is_lost());
    let stats = client.stats();
    assert_eq!(
        (
            stats.losses.shutdown,
            stats.losses.total(),
            stats.failed_releases
        ),
        (1, 1, 0)
    );
    assert_eq!(
        log.from(Level::WARN).len(),
        1,
        "{:?}",
        log.from(Level::WARN)
    );
    wait_until("the lock is released", SOON, || {
        !exists(&mut redis, lock.name())
    });
}

/// Their work ends after the shutdown: the keys do not stay for their leases.
#[tokio::test]
async fn guards_dropped_right_after_shutdown_are_released() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lease = Duration::from_secs(3600);
    let mut guards = Vec::new();
    for number in 0..10 {
        let lock = client.lock(format!("stock:{number}"));
        guards.push(lock.lock().lease(lease).await.unwrap());
    }
    client.shutdown().await.unwrap();
    let keys = |redis: &mut redis::Connection| cmd("DBSIZE").query::<usize>(redis).unwrap();
    assert_eq!(keys(&mut redis), 10, "the work may still run");
    assert!(guards.iter().all(LockGuard::is_lost));
    drop(guards);
    wait_until("the locks are released", Duration::from_secs(2), || {
        keys(&mut redis) == 0
    });
    wait_until("the connections are closed", SOON, || {
        connections(&mut redis) == 0
    });
    assert_eq!(client.stats().failed_releases, 0);
}
