//! Counters, log events and deadlock detection after faults, cancellation, panics and shutdowns.

use std::time::{Duration, Instant};

use redis::cmd;
use redisson_lock::{DeadlockDetection, Error, LockClient, LostReason, Owner, OwnerExt};
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
async fn lock_after_two_dropped_guards_is_not_warned() {
    let log = Log::capture();
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
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
async fn shutdown_after_hundred_dropped_guards_reports_nothing() {
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
async fn try_lock_for_accepts_zero_and_refuses_max() {
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
async fn run_with_unconfirmed_release_is_no_unknown_outcome() {
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

/// A guard is dropped, and its task locks again: no warning of a deadlock by default either.
#[tokio::test]
async fn lock_after_dropped_guards_in_run_is_not_warned() {
    let log = Log::capture();
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock("a");
    for _ in 0..300 {
        drop(lock.lock().await.unwrap());
    }
    let seen = log.from(Level::WARN);
    assert!(seen.is_empty(), "{} times: {:?}", seen.len(), seen.first());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn shutdown_beside_waiters_loses_no_dropped_guard() {
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

/// A loss is reported once by each means: the event, the counter, `lost`, `run`, `unlock`.
#[tokio::test]
async fn loss_of_three_holds_is_one_event_and_one_count() {
    let server = Server::start();
    let mut redis = server.connection();
    let log = Log::capture();
    let client = LockClient::builder()
        .watchdog_timeout(ms(3_000))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let owner = Owner::new();
    let guard = lock.lock().with_owner(owner).await.unwrap();
    let _ = lock.lock().with_owner(owner).await.unwrap().detach();
    let other = lock.clone();
    let running = tokio::spawn(
        async move { other.run(std::future::pending::<()>()).await }.with_owner(owner),
    );
    wait_until_async("three holds", LIMIT, || async {
        lock.hold_count_of(owner).await == Ok(3)
    })
    .await;
    cmd("DEL").arg(lock.name()).exec(&mut redis).unwrap();
    assert_eq!(guard.lost().await, LostReason::Gone);
    assert_eq!(guard.hold_count(), 0);
    assert_eq!(guard.remaining_lease(), Duration::ZERO);
    let ran = running.await.unwrap().unwrap_err();
    assert!(ran.is_lost() && ran.lock() == Some(lock.name()), "{ran:?}");
    assert!(guard.unlock().await.unwrap_err().is_lost());
    let first = lock.unlock().with_owner(owner).await.unwrap_err();
    assert!(first.is_lost(), "{first:?}");
    let second = lock.unlock().with_owner(owner).await.unwrap_err();
    assert!(matches!(second, Error::NotHeld { .. }), "{second:?}");
    client.shutdown().await.unwrap();
    let stats = client.stats();
    assert_eq!(
        (
            log.with("a lock was lost").len(),
            stats.losses.gone,
            stats.losses.total()
        ),
        (1, 1, 1),
        "{stats:?}"
    );
    assert_eq!((stats.locks_held, stats.failed_releases), (0, 0));
}

/// The lock stays until its lease expires: a counter shows it, also if `run` makes the release.
#[tokio::test]
async fn run_whose_release_is_refused_is_counted() {
    let server = Server::start();
    let mut redis = server.connection();
    let log = Log::capture();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let ran = lock
        .run(async {
            cmd("ACL")
                .arg(&["SETUSER", "default", "-del"])
                .exec(&mut redis)
                .unwrap();
            7
        })
        .await;
    assert_eq!(ran, Ok(7));
    assert!(exists(&mut redis, lock.name()));
    assert_eq!(log.with("a release was not confirmed").len(), 1);
    assert_eq!(client.stats().failed_releases, 1, "{:?}", client.stats());
}
