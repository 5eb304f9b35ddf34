//! Waiting for a lock: waiters are woken in the order of the queue, and a dropped request leaves
//! nothing behind.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::observe::{channels, scripts, subscribers};
use crate::support::server::{Server, unique, wait_until};
use futures::poll;
use rand::Rng;
use redisson_lock::{Error, LockClient, LockClientBuilder, LockGuard, LockInfo, OwnerExt};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

/// Far longer than a handover takes, far shorter than the leases and re-check intervals of
/// [`rare_rechecks`].
const SOON: Duration = Duration::from_secs(10);
const MINUTE: Duration = Duration::from_secs(60);

/// Settings by which only a wake-up lets a waiter acquire within [`SOON`].
fn rare_rechecks() -> LockClientBuilder {
    LockClient::builder()
        .watchdog_timeout(3 * MINUTE)
        .recheck_interval(2 * MINUTE)
}

/// Settings by which a re-check follows a lost wake-up within 200 ms.
fn frequent_rechecks() -> LockClientBuilder {
    LockClient::builder().recheck_interval(Duration::from_millis(200))
}

/// A number from `INFO commandstats`; 0 for a command that was never called.
fn commandstat(redis: &mut redis::Connection, command: &str, field: &str) -> u64 {
    let info: String = redis::cmd("INFO").arg("commandstats").query(redis).unwrap();
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:")));
    let number = line.and_then(|line| {
        line.split(',')
            .find_map(|pair| pair.strip_prefix(&format!("{field}=")))
    });
    number.map_or(0, |number| number.parse().unwrap())
}

fn connections(redis: &mut redis::Connection, kind: &str) -> usize {
    let list: String = redis::cmd("CLIENT")
        .arg("LIST")
        .arg("TYPE")
        .arg(kind)
        .query(redis)
        .unwrap();
    list.lines().count()
}

/// Acquires the lock for an owner in another process, without an expiry.
fn hold_for_foreign_owner(redis: &mut redis::Connection, lock: &str) {
    redis::cmd("HSET")
        .arg(lock)
        .arg("9f3c0b6e-54a9-4c4f-8a53-0d2f5f2f7c11:1")
        .arg(1)
        .exec(redis)
        .unwrap();
}

fn delete(redis: &mut redis::Connection, lock: &str) {
    assert_eq!(redis::cmd("DEL").arg(lock).query::<u64>(redis), Ok(1));
}

/// A task that waits for the lock, acquires it and releases it at once.
fn waiter(client: &LockClient, lock: &str) -> JoinHandle<()> {
    let lock = client.lock(lock);
    tokio::spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() })
}

/// A task that waits for the lock and returns its guard.
fn waiting(client: &LockClient, lock: &str) -> JoinHandle<LockGuard> {
    let lock = client.lock(lock);
    tokio::spawn(async move { lock.lock().await.unwrap() })
}

/// Waits until a request sleeps: it is subscribed, and has made its attempt after that.
fn wait_until_asleep(redis: &mut redis::Connection, lock: &str) {
    wait_until("the channel is subscribed", SOON, || {
        subscribers(redis, lock) == 1
    });
    // The attempt follows the confirmed subscription; it has ended when the number of scripts does
    // not change any more.
    let mut last = (scripts(redis), Instant::now());
    wait_until("the waiter sleeps", SOON, || {
        let now = scripts(redis);
        if now != last.0 {
            last = (now, Instant::now());
        }
        last.1.elapsed() > Duration::from_millis(50)
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn unlock_wakes_waiter_of_another_client() {
    let server = Server::start();
    let mut redis = server.connection();
    let clients = [
        rare_rechecks().connect(&server.url()).await.unwrap(),
        rare_rechecks().connect(&server.url()).await.unwrap(),
    ];
    let name = unique("stock");
    let mut guard = clients[0].lock(&name).lock().await.unwrap();
    for round in 1..=20 {
        let next = waiting(&clients[round % 2], &name);
        wait_until_asleep(&mut redis, &name);
        guard.unlock().await.unwrap();
        guard = timeout(SOON, next)
            .await
            .expect("the waiter was not woken")
            .unwrap();
    }
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn local_waiters_share_rechecks() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = frequent_rechecks().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    hold_for_foreign_owner(&mut redis, &name);
    let before = scripts(&mut redis);
    let begun = Instant::now();
    let waiters: Vec<_> = (0..200).map(|_| waiter(&client, &name)).collect();
    wait_until("a few re-checks", SOON, || {
        scripts(&mut redis) >= before + 8
    });
    // At most one re-check in 160 ms, the first attempt, and the one after the subscription.
    let sent = scripts(&mut redis) - before;
    let most = begun.elapsed().as_millis() as u64 / 160 + 4;
    assert!(sent <= most, "{sent} attempts in {:?}", begun.elapsed());
    delete(&mut redis, &name);
    for waiter in waiters {
        timeout(SOON, waiter)
            .await
            .expect("a waiter was not woken")
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn local_handover_costs_one_release_and_one_attempt() {
    const WAITERS: u64 = 200;
    let server = Server::start();
    let mut redis = server.connection();
    let builder = rare_rechecks().passing_time(Duration::ZERO);
    let client = builder.connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let waiters: Vec<_> = (0..WAITERS).map(|_| waiter(&client, &name)).collect();
    wait_until_asleep(&mut redis, &name);
    let before = scripts(&mut redis);
    guard.unlock().await.unwrap();
    for waiter in waiters {
        timeout(SOON, waiter)
            .await
            .expect("a waiter was not woken")
            .unwrap();
    }
    let calls = scripts(&mut redis) - before;
    assert!(calls > 2 * WAITERS, "{calls} scripts are too few");
    assert!(
        calls <= 3 * WAITERS,
        "{calls} scripts for {WAITERS} handovers"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn local_waiters_are_served_in_queue_order() {
    let server = Server::start();
    let client = rare_rechecks().connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut waiters = Vec::new();
    for number in 0..50 {
        let mut request = lock.lock().into_future();
        // The first poll takes the place in the queue.
        assert!(poll!(&mut request).is_pending());
        let served = Arc::clone(&served);
        waiters.push(tokio::spawn(async move {
            let guard = request.await.unwrap();
            served.lock().unwrap().push(number);
            guard.unlock().await.unwrap();
        }));
    }
    guard.unlock().await.unwrap();
    for waiter in waiters {
        timeout(SOON, waiter)
            .await
            .expect("a waiter was not woken")
            .unwrap();
    }
    assert_eq!(*served.lock().unwrap(), (0..50).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_head_passes_its_place_on() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = frequent_rechecks().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let lock = client.lock(&name);
    hold_for_foreign_owner(&mut redis, &name);
    let (mut head, mut second) = (lock.lock().into_future(), lock.lock().into_future());
    assert!(poll!(&mut head).is_pending());
    assert!(poll!(&mut second).is_pending());
    let (head, second) = (tokio::spawn(head), tokio::spawn(second));
    wait_until("the head makes re-checks", SOON, || {
        scripts(&mut redis) >= 4
    });
    head.abort();
    assert!(head.await.unwrap_err().is_cancelled());
    // Without a message, only re-checks of the second request find the free lock.
    delete(&mut redis, &name);
    timeout(SOON, second)
        .await
        .expect("the place was not passed on")
        .unwrap()
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_waiter_passes_wakeup_on() {
    let server = Server::start();
    let client = rare_rechecks().connect(&server.url()).await.unwrap();
    let other = rare_rechecks().connect(&server.url()).await.unwrap();
    for round in 0..300 {
        let name = unique("stock");
        // The client that waits, or another one, publishes the release.
        let owner = if round % 2 == 0 { &client } else { &other };
        let guard = owner.lock(&name).lock().await.unwrap();
        let mut requests: Vec<_> = (0..4)
            .map(|_| client.lock(&name).lock().into_future())
            .collect();
        for request in &mut requests {
            assert!(poll!(request).is_pending());
        }
        let mut waiters: Vec<_> = requests
            .into_iter()
            .map(|request| {
                tokio::spawn(async move { request.await.unwrap().unlock().await.unwrap() })
            })
            .collect();
        let pauses = rand::rng()
            .random::<[u16; 2]>()
            .map(|number| Duration::from_micros(number as u64 / 32));
        let unlock = tokio::spawn(async move {
            sleep(pauses[0]).await;
            guard.unlock().await.unwrap();
        });
        // The waiters are dropped before the wake-up, with it, during the attempt, or as owners.
        sleep(pauses[1]).await;
        for dropped in waiters.drain(..1 + round % 3) {
            dropped.abort();
        }
        unlock.await.unwrap();
        for waiter in waiters {
            timeout(SOON, waiter)
                .await
                .expect("the wake-up was lost with a dropped waiter")
                .unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wait_with_timeout_ends_in_time_and_reports_owner() {
    const WAIT: Duration = Duration::from_millis(200);
    let server = Server::start();
    let mut redis = server.connection();
    let client = rare_rechecks().connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().lease(MINUTE).await.unwrap();

    let begun = Instant::now();
    let refused = lock.lock().timeout(WAIT).await.unwrap_err();
    assert!(
        (WAIT..10 * WAIT).contains(&begun.elapsed()),
        "{:?}",
        begun.elapsed()
    );
    let Error::AcquireTimeout {
        lock: name,
        timeout,
        held_by: Some(info),
        ..
    } = refused
    else {
        panic!("{refused:?}")
    };
    assert_eq!(name, lock.name());
    assert_eq!(timeout, WAIT);
    assert_eq!(info.local_owner, Some(guard.owner()));
    let left = info.ttl.unwrap();
    assert!(left <= MINUTE && left > MINUTE / 2, "{left:?}");

    let begun = Instant::now();
    assert!(lock.try_lock_for(WAIT).await.unwrap().is_none());
    assert!(
        (WAIT..10 * WAIT).contains(&begun.elapsed()),
        "{:?}",
        begun.elapsed()
    );

    // The requests that timed out acquire nothing later.
    guard.unlock().await.unwrap();
    wait_until("no channel is subscribed", SOON, || {
        channels(&mut redis) == 0
    });
    assert!(!lock.is_locked().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn zero_timeout_makes_one_attempt() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = rare_rechecks().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let lock = client.lock(&name);
    hold_for_foreign_owner(&mut redis, &name);
    let before = scripts(&mut redis);
    assert!(lock.try_lock().await.unwrap().is_none());
    assert_eq!(scripts(&mut redis), before + 1);
    assert!(lock.try_lock_for(Duration::ZERO).await.unwrap().is_none());
    assert_eq!(scripts(&mut redis), before + 2);
    let refused = lock.lock().timeout(Duration::ZERO).await;
    assert!(
        matches!(
            refused,
            Err(Error::AcquireTimeout {
                held_by: Some(LockInfo { ttl: None, .. }),
                ..
            })
        ),
        "{refused:?}"
    );
    // One attempt, and one inspection for the error.
    assert_eq!(scripts(&mut redis), before + 4);
    assert_eq!(commandstat(&mut redis, "subscribe", "calls"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn free_lock_is_acquired_without_subscription() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = rare_rechecks().connect(&server.url()).await.unwrap();
    let before = scripts(&mut redis);
    for _ in 0..50 {
        client
            .lock(unique("stock"))
            .lock()
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
    assert_eq!(scripts(&mut redis), before + 100);
    assert_eq!(commandstat(&mut redis, "subscribe", "calls"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_connection_subscribes_channels_of_current_waiters() {
    const LOCKS: usize = 50;
    let server = Server::start();
    let mut redis = server.connection();
    let client = rare_rechecks().connect(&server.url()).await.unwrap();
    assert_eq!(
        connections(&mut redis, "normal"),
        3,
        "two of the client, one of the observer"
    );
    let names: Vec<_> = (0..LOCKS).map(|_| unique("stock")).collect();
    names
        .iter()
        .for_each(|name| hold_for_foreign_owner(&mut redis, name));
    let waiters: Vec<_> = names
        .iter()
        .flat_map(|name| [waiter(&client, name), waiter(&client, name)])
        .collect();
    wait_until("every channel is subscribed", SOON, || {
        channels(&mut redis) == LOCKS
    });
    for name in &names {
        assert_eq!(subscribers(&mut redis, name), 1);
    }
    assert_eq!(connections(&mut redis, "pubsub"), 1);
    assert_eq!(connections(&mut redis, "normal"), 2);

    // Half of them acquire their locks, half are dropped.
    let (served, dropped) = waiters.split_at(LOCKS);
    dropped.iter().for_each(JoinHandle::abort);
    wait_until("the dropped requests are unsubscribed", SOON, || {
        channels(&mut redis) == LOCKS / 2
    });
    for name in &names[..LOCKS / 2] {
        redis::pipe()
            .del(name)
            .cmd("PUBLISH")
            .arg(format!("redisson_lock__channel:{{{name}}}"))
            .arg("0")
            .exec(&mut redis)
            .unwrap();
    }
    wait_until("the other waiters acquire their locks", SOON, || {
        served.iter().all(JoinHandle::is_finished)
    });
    wait_until("no channel is subscribed", SOON, || {
        channels(&mut redis) == 0
    });
    assert_eq!(connections(&mut redis, "pubsub"), 0);
    assert_eq!(connections(&mut redis, "normal"), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn reconnect_of_pubsub_rechecks_for_lost_message() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = rare_rechecks().connect(&server.url()).await.unwrap();
    for _ in 0..10 {
        let name = unique("stock");
        hold_for_foreign_owner(&mut redis, &name);
        let waiter = waiter(&client, &name);
        wait_until_asleep(&mut redis, &name);
        // In one transaction: no message arrives, so only the new connection causes a re-check.
        redis::pipe()
            .atomic()
            .cmd("CLIENT")
            .arg(&["KILL", "TYPE", "pubsub"])
            .cmd("DEL")
            .arg(&name)
            .exec(&mut redis)
            .unwrap();
        timeout(SOON, waiter)
            .await
            .expect("the waiter slept while the lock was free")
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_resubscribe_after_pubsub_connection_is_lost() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = rare_rechecks().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let mut guard = client.lock(&name).lock().await.unwrap();
    for _ in 0..10 {
        let next = waiting(&client, &name);
        wait_until_asleep(&mut redis, &name);
        redis::cmd("CLIENT")
            .arg(&["KILL", "TYPE", "pubsub"])
            .exec(&mut redis)
            .unwrap();
        wait_until_asleep(&mut redis, &name);
        guard.unlock().await.unwrap();
        guard = timeout(SOON, next)
            .await
            .expect("the waiter was not woken")
            .unwrap();
    }
    guard.unlock().await.unwrap();
    wait_until("no channel is subscribed", SOON, || {
        channels(&mut redis) == 0
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn recheck_finds_unlock_without_message() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = frequent_rechecks().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    hold_for_foreign_owner(&mut redis, &name);
    let waiter = waiter(&client, &name);
    wait_until("the channel is subscribed", SOON, || {
        subscribers(&mut redis, &name) == 1
    });
    delete(&mut redis, &name);
    timeout(SOON, waiter).await.expect("no re-check").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn rechecks_replace_refused_subscription() {
    let server = Server::start();
    let mut redis = server.connection();
    redis::cmd("ACL")
        .arg(&["SETUSER", "default", "resetchannels"])
        .exec(&mut redis)
        .unwrap();
    let client = frequent_rechecks().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let waiters: Vec<_> = (0..3).map(|_| waiter(&client, &name)).collect();
    wait_until("the subscription is refused", SOON, || {
        commandstat(&mut redis, "subscribe", "rejected_calls") > 0
    });
    assert_eq!(channels(&mut redis), 0);
    // The server refuses PUBLISH as well; the release works nevertheless.
    guard.unlock().await.unwrap();
    for waiter in waiters {
        timeout(SOON, waiter).await.expect("no re-check").unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn waiter_acquires_when_lease_of_dead_owner_expires() {
    const LEASE: Duration = Duration::from_millis(500);
    let server = Server::start();
    let mut redis = server.connection();
    let client = rare_rechecks().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    hold_for_foreign_owner(&mut redis, &name);
    let begun = Instant::now();
    redis::cmd("PEXPIRE")
        .arg(&name)
        .arg(LEASE.as_millis() as u64)
        .exec(&mut redis)
        .unwrap();
    timeout(SOON, waiter(&client, &name))
        .await
        .expect("no re-check after the lease expired")
        .unwrap();
    assert!(begun.elapsed() >= LEASE, "{:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn lock_without_expiry_is_rechecked_until_free() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = frequent_rechecks().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    hold_for_foreign_owner(&mut redis, &name);
    let before = scripts(&mut redis);
    let waiter = waiter(&client, &name);
    wait_until("re-checks are made", SOON, || {
        scripts(&mut redis) >= before + 5
    });
    assert!(!waiter.is_finished());
    assert_eq!(
        redis::cmd("PTTL").arg(&name).query(&mut redis),
        Ok(-1),
        "the wait has set an expiry"
    );
    delete(&mut redis, &name);
    timeout(SOON, waiter).await.expect("no re-check").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_of_2000_locks_are_all_woken() {
    const LOCKS: usize = 2_000;
    let server = Server::start();
    let mut redis = server.connection();
    let client = rare_rechecks().connect(&server.url()).await.unwrap();
    let names: Vec<_> = (0..LOCKS).map(|_| unique("stock")).collect();
    names
        .iter()
        .for_each(|name| hold_for_foreign_owner(&mut redis, name));
    let waiters: Vec<_> = names.iter().map(|name| waiting(&client, name)).collect();
    wait_until("every channel is subscribed", 3 * SOON, || {
        channels(&mut redis) == LOCKS
    });
    let mut release = redis::pipe();
    for name in &names {
        release
            .del(name)
            .cmd("PUBLISH")
            .arg(format!("redisson_lock__channel:{{{name}}}"))
            .arg("0");
    }
    release.exec(&mut redis).unwrap();
    let mut guards = Vec::new();
    for waiter in waiters {
        guards.push(
            timeout(3 * SOON, waiter)
                .await
                .expect("a waiter was not woken")
                .unwrap(),
        );
    }
    assert_eq!(redis::cmd("DBSIZE").query(&mut redis), Ok(LOCKS));
    drop(guards);
    wait_until("all locks are released", 3 * SOON, || {
        redis::cmd("DBSIZE").query(&mut redis) == Ok(0)
    });
    wait_until("no channel is subscribed", 3 * SOON, || {
        channels(&mut redis) == 0
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_dropped_anywhere_leave_nothing() {
    const TASKS: usize = 32;
    const FUTURES: usize = 2_000;
    let server = Server::start();
    let mut redis = server.connection();
    let client = rare_rechecks().connect(&server.url()).await.unwrap();
    let names: Arc<Vec<_>> = Arc::new((0..4).map(|_| unique("stock")).collect());
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let (client, names) = (client.clone(), Arc::clone(&names));
            tokio::spawn(async move {
                for _ in 0..FUTURES / TASKS {
                    let (kind, at, pause) = rand::rng().random::<(u8, u8, u16)>();
                    let mut request = client
                        .lock(&names[at as usize % names.len()])
                        .lock()
                        .into_future();
                    match kind % 4 {
                        0 => drop(request),
                        1 => drop(poll!(&mut request)),
                        _ => {
                            // Dropped in the queue, with a pending script, or with a guard.
                            let limit = Duration::from_micros(pause as u64 / 16);
                            tokio::select! {
                                guard = request => drop(guard.unwrap()),
                                () = sleep(limit) => {}
                            }
                        }
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        timeout(3 * SOON, task)
            .await
            .expect("a task hangs")
            .unwrap();
    }
    wait_until("no key is left", SOON, || {
        redis::cmd("DBSIZE").query(&mut redis) == Ok(0)
    });
    wait_until("no subscription is left", SOON, || {
        channels(&mut redis) == 0
    });
    let other = rare_rechecks().connect(&server.url()).await.unwrap();
    for name in names.iter() {
        let guard = other
            .lock(name)
            .try_lock()
            .await
            .unwrap()
            .expect("the lock is not free");
        guard.unlock().await.unwrap();
    }
}

/// Cut off while waiting: `held_by` names the owner as of the timeout, or nobody.
#[tokio::test]
async fn timeout_after_the_owner_left_names_no_owner_that_left() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    let error = lock
        .lock()
        .timeout(Duration::from_millis(50))
        .await
        .unwrap_err();
    let Error::AcquireTimeout {
        held_by: Some(info),
        timeout,
        ..
    } = &error
    else {
        panic!("{error:?}")
    };
    assert_eq!(*timeout, Duration::from_millis(50));
    assert_eq!(info.local_owner, Some(guard.owner()));
    guard.unlock().await.unwrap();
    // The owner that the error names can be used, long after it has left.
    let left = info.local_owner.unwrap();
    let error = lock.unlock().with_owner(left).await.unwrap_err();
    assert!(matches!(error, Error::NotHeld { .. }), "{error:?}");
    assert_eq!(lock.hold_count_of(left).await, Ok(0));
}
