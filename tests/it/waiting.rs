//! Waiting: who waits is woken, in its turn, and leaves nothing behind when it goes away.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::observe::{channels, scripts, subscribers};
use crate::support::server::{Server, unique, wait_until};
use futures::poll;
use rand::Rng;
use redisson_lock::{Error, LockClient, LockClientBuilder, LockGuard, LockInfo};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

/// Far more than a handover takes, far less than the leases and re-check intervals in [`patient`].
const SOON: Duration = Duration::from_secs(10);
const MINUTE: Duration = Duration::from_secs(60);

/// Settings by which nobody gets a lock in time but by a wake-up.
fn patient() -> LockClientBuilder {
    LockClient::builder()
        .watchdog_timeout(3 * MINUTE)
        .recheck_interval(2 * MINUTE)
}

/// Settings by which a lost wake-up is made up for every fifth of a second.
fn watchful() -> LockClientBuilder {
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

/// Locks by hand, as an owner in another process does.
fn hold_by_hand(redis: &mut redis::Connection, lock: &str) {
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

/// A task that waits for the lock, holds it for a moment and gives it back.
fn waiter(client: &LockClient, lock: &str) -> JoinHandle<()> {
    let lock = client.lock(lock);
    tokio::spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() })
}

/// A task that waits for the lock.
fn waiting(client: &LockClient, lock: &str) -> JoinHandle<LockGuard> {
    let lock = client.lock(lock);
    tokio::spawn(async move { lock.lock().await.unwrap() })
}

/// Waits until somebody sleeps in front of the lock: subscribed, and tried again since.
fn wait_until_parked(redis: &mut redis::Connection, lock: &str) {
    wait_until("the channel is subscribed", SOON, || {
        subscribers(redis, lock) == 1
    });
    // The try after the confirmation; once the count rests, it is over.
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
async fn a_waiter_in_another_client_is_woken_by_the_unlocks_message() {
    let server = Server::start();
    let mut redis = server.connection();
    let clients = [
        patient().connect(&server.url()).await.unwrap(),
        patient().connect(&server.url()).await.unwrap(),
    ];
    let name = unique("stock");
    let mut guard = clients[0].lock(&name).lock().await.unwrap();
    for round in 1..=20 {
        let next = waiting(&clients[round % 2], &name);
        wait_until_parked(&mut redis, &name);
        guard.unlock().await.unwrap();
        guard = timeout(SOON, next)
            .await
            .expect("the waiter was not woken")
            .unwrap();
    }
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_local_waiters_ask_as_one() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchful().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    hold_by_hand(&mut redis, &name);
    let before = scripts(&mut redis);
    let begun = Instant::now();
    let waiters: Vec<_> = (0..200).map(|_| waiter(&client, &name)).collect();
    wait_until("a few re-checks", SOON, || {
        scripts(&mut redis) >= before + 8
    });
    // A re-check comes every 160 ms at the earliest, plus the first try and the one after the
    // subscription.
    let asked = scripts(&mut redis) - before;
    let most = begun.elapsed().as_millis() as u64 / 160 + 4;
    assert!(asked <= most, "{asked} questions in {:?}", begun.elapsed());
    delete(&mut redis, &name);
    for waiter in waiters {
        timeout(SOON, waiter)
            .await
            .expect("a waiter was forgotten")
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handover_between_local_waiters_costs_a_release_and_a_try() {
    const WAITERS: u64 = 200;
    let server = Server::start();
    let mut redis = server.connection();
    let client = patient().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let waiters: Vec<_> = (0..WAITERS).map(|_| waiter(&client, &name)).collect();
    wait_until_parked(&mut redis, &name);
    let before = scripts(&mut redis);
    guard.unlock().await.unwrap();
    for waiter in waiters {
        timeout(SOON, waiter)
            .await
            .expect("a waiter was forgotten")
            .unwrap();
    }
    let calls = scripts(&mut redis) - before;
    assert!(calls > 2 * WAITERS, "{calls} scripts cannot have done it");
    assert!(
        calls <= 3 * WAITERS,
        "{calls} scripts for {WAITERS} handovers"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_of_one_process_are_served_in_their_order() {
    let server = Server::start();
    let client = patient().connect(&server.url()).await.unwrap();
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
            .expect("a waiter was forgotten")
            .unwrap();
    }
    assert_eq!(*served.lock().unwrap(), (0..50).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_front_waiter_that_leaves_before_any_wakeup_passes_its_place_on() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchful().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let lock = client.lock(&name);
    hold_by_hand(&mut redis, &name);
    let (mut front, mut second) = (lock.lock().into_future(), lock.lock().into_future());
    assert!(poll!(&mut front).is_pending());
    assert!(poll!(&mut second).is_pending());
    let (front, second) = (tokio::spawn(front), tokio::spawn(second));
    wait_until("the front waiter asks again and again", SOON, || {
        scripts(&mut redis) >= 4
    });
    front.abort();
    assert!(front.await.unwrap_err().is_cancelled());
    // No message: the second has to ask in its stead.
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
async fn a_wakeup_survives_the_waiter_that_it_was_for() {
    let server = Server::start();
    let client = patient().connect(&server.url()).await.unwrap();
    let other = patient().connect(&server.url()).await.unwrap();
    for round in 0..300 {
        let name = unique("stock");
        // The unlock's message comes from this client or from another one.
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
        // Before the wake-up, with it, in the middle of its try, or with the lock in its hands.
        sleep(pauses[1]).await;
        for gone in waiters.drain(..1 + round % 3) {
            gone.abort();
        }
        unlock.await.unwrap();
        for waiter in waiters {
            timeout(SOON, waiter)
                .await
                .expect("the wake-up was lost with a waiter that left")
                .unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_ends_in_time_and_says_how_long_and_for_what() {
    const WAIT: Duration = Duration::from_millis(200);
    let server = Server::start();
    let mut redis = server.connection();
    let client = patient().connect(&server.url()).await.unwrap();
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

    // Who gave up is not served.
    guard.unlock().await.unwrap();
    wait_until("nobody is subscribed", SOON, || channels(&mut redis) == 0);
    assert!(!lock.is_locked().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_of_zero_asks_once() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = patient().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let lock = client.lock(&name);
    hold_by_hand(&mut redis, &name);
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
    // One attempt, and one look at who holds the lock for the error.
    assert_eq!(scripts(&mut redis), before + 4);
    assert_eq!(commandstat(&mut redis, "subscribe", "calls"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_is_free_costs_no_subscription() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = patient().connect(&server.url()).await.unwrap();
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
async fn channels_are_subscribed_while_somebody_waits_and_by_one_connection() {
    const LOCKS: usize = 50;
    let server = Server::start();
    let mut redis = server.connection();
    let client = patient().connect(&server.url()).await.unwrap();
    assert_eq!(
        connections(&mut redis, "normal"),
        3,
        "two of the client, one that counts"
    );
    let names: Vec<_> = (0..LOCKS).map(|_| unique("stock")).collect();
    names.iter().for_each(|name| hold_by_hand(&mut redis, name));
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

    // Half of them get in, half give up.
    let (served, gone) = waiters.split_at(LOCKS);
    gone.iter().for_each(JoinHandle::abort);
    wait_until("nobody listens who has gone", SOON, || {
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
    wait_until("everybody is served", SOON, || {
        served.iter().all(JoinHandle::is_finished)
    });
    wait_until("nobody is subscribed", SOON, || channels(&mut redis) == 0);
    assert_eq!(connections(&mut redis, "pubsub"), 0);
    assert_eq!(connections(&mut redis, "normal"), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_lost_with_the_listening_connection_is_looked_for() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = patient().connect(&server.url()).await.unwrap();
    for _ in 0..10 {
        let name = unique("stock");
        hold_by_hand(&mut redis, &name);
        let waiter = waiter(&client, &name);
        wait_until_parked(&mut redis, &name);
        // In one breath: nobody hears of it, and the new connection is the only reason to ask.
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
            .expect("the waiter slept in front of a free lock")
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_listen_again_after_the_listening_connection_was_lost() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = patient().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let mut guard = client.lock(&name).lock().await.unwrap();
    for _ in 0..10 {
        let next = waiting(&client, &name);
        wait_until_parked(&mut redis, &name);
        redis::cmd("CLIENT")
            .arg(&["KILL", "TYPE", "pubsub"])
            .exec(&mut redis)
            .unwrap();
        wait_until_parked(&mut redis, &name);
        guard.unlock().await.unwrap();
        guard = timeout(SOON, next)
            .await
            .expect("the waiter was not woken")
            .unwrap();
    }
    guard.unlock().await.unwrap();
    wait_until("nobody is subscribed", SOON, || channels(&mut redis) == 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unlock_without_a_message_is_found_by_a_recheck() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchful().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    hold_by_hand(&mut redis, &name);
    let waiter = waiter(&client, &name);
    wait_until("the channel is subscribed", SOON, || {
        subscribers(&mut redis, &name) == 1
    });
    delete(&mut redis, &name);
    timeout(SOON, waiter).await.expect("nobody looked").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_subscription_is_made_up_for_by_rechecks() {
    let server = Server::start();
    let mut redis = server.connection();
    redis::cmd("ACL")
        .arg(&["SETUSER", "default", "resetchannels"])
        .exec(&mut redis)
        .unwrap();
    let client = watchful().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let waiters: Vec<_> = (0..3).map(|_| waiter(&client, &name)).collect();
    wait_until("the subscription is refused", SOON, || {
        commandstat(&mut redis, "subscribe", "rejected_calls") > 0
    });
    assert_eq!(channels(&mut redis), 0);
    // Its PUBLISH is refused as well, and keeps nothing.
    guard.unlock().await.unwrap();
    for waiter in waiters {
        timeout(SOON, waiter).await.expect("nobody looked").unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_owners_lock_is_taken_over_when_its_lease_is_over() {
    const LEASE: Duration = Duration::from_millis(500);
    let server = Server::start();
    let mut redis = server.connection();
    let client = patient().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    hold_by_hand(&mut redis, &name);
    let begun = Instant::now();
    redis::cmd("PEXPIRE")
        .arg(&name)
        .arg(LEASE.as_millis() as u64)
        .exec(&mut redis)
        .unwrap();
    timeout(SOON, waiter(&client, &name))
        .await
        .expect("nobody looked when the lease was over")
        .unwrap();
    assert!(begun.elapsed() >= LEASE, "{:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_without_an_expiry_is_waited_for_as_any_other() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchful().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    hold_by_hand(&mut redis, &name);
    let before = scripts(&mut redis);
    let waiter = waiter(&client, &name);
    wait_until("it is asked for again and again", SOON, || {
        scripts(&mut redis) >= before + 5
    });
    assert!(!waiter.is_finished());
    assert_eq!(
        redis::cmd("PTTL").arg(&name).query(&mut redis),
        Ok(-1),
        "the wait gave it an expiry"
    );
    delete(&mut redis, &name);
    timeout(SOON, waiter).await.expect("nobody looked").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_thousand_locks_are_waited_for_at_once() {
    const LOCKS: usize = 2_000;
    let server = Server::start();
    let mut redis = server.connection();
    let client = patient().connect(&server.url()).await.unwrap();
    let names: Vec<_> = (0..LOCKS).map(|_| unique("stock")).collect();
    names.iter().for_each(|name| hold_by_hand(&mut redis, name));
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
                .expect("a waiter was forgotten")
                .unwrap(),
        );
    }
    assert_eq!(redis::cmd("DBSIZE").query(&mut redis), Ok(LOCKS));
    drop(guards);
    wait_until("all is given back", 3 * SOON, || {
        redis::cmd("DBSIZE").query(&mut redis) == Ok(0)
    });
    wait_until("nobody is subscribed", 3 * SOON, || {
        channels(&mut redis) == 0
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn futures_that_are_dropped_anywhere_leave_nothing() {
    const TASKS: usize = 32;
    const FUTURES: usize = 2_000;
    let server = Server::start();
    let mut redis = server.connection();
    let client = patient().connect(&server.url()).await.unwrap();
    let names: Arc<Vec<_>> = Arc::new((0..4).map(|_| unique("stock")).collect());
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let (client, names) = (client.clone(), Arc::clone(&names));
            tokio::spawn(async move {
                for _ in 0..FUTURES / TASKS {
                    let (way, at, pause) = rand::rng().random::<(u8, u8, u16)>();
                    let mut request = client
                        .lock(&names[at as usize % names.len()])
                        .lock()
                        .into_future();
                    match way % 4 {
                        0 => drop(request),
                        1 => drop(poll!(&mut request)),
                        _ => {
                            // In the queue, with a script under way, or with a guard.
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
    let other = patient().connect(&server.url()).await.unwrap();
    for name in names.iter() {
        let guard = other
            .lock(name)
            .try_lock()
            .await
            .unwrap()
            .expect("the lock is free");
        guard.unlock().await.unwrap();
    }
}
