//! The line of waiters of one lock in this process, when some of them go away or stand still.

use std::time::{Duration, Instant};

use crate::support::observe::{channels, poll_to_sleep, scripts, subscribers};
use crate::support::proxy::{Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until};
use futures::FutureExt;
use redisson_lock::{Error, LockClient, Owner, OwnerExt, Step};
use tokio::time::timeout;

const LIMIT: Duration = Duration::from_secs(20);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_that_went_away_from_a_silent_server_leave_one_attempt_behind() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let other = LockClient::connect(&server.url()).await.unwrap();
    let guard = other.lock(lock.name()).lock().await.unwrap();
    let before = scripts(&mut redis);
    proxy.set(Way::Requests, Flow::Hold);
    for _ in 0..100 {
        assert!(timeout(ms(5), lock.lock()).await.is_err());
    }
    proxy.set(Way::Requests, Flow::Pass);
    // The next one in line comes after all of them, and has an answer of its own.
    assert!(matches!(
        lock.lock().timeout(ms(1)).await,
        Err(Error::AcquireTimeout { .. })
    ));
    let asked = scripts(&mut redis) - before;
    assert!(
        asked <= 4,
        "{asked} scripts for one waiter and one that went away"
    );
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_an_abandoned_attempt_nobody_is_told_that_others_hold_the_lock() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .command_timeout(ms(500))
        .retry_timeout(ms(500))
        .connect(&proxy.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    proxy.set(Way::Requests, Flow::Hold);
    assert!(timeout(ms(5), lock.lock()).await.is_err());
    let told = lock.lock().timeout(ms(10)).await.unwrap_err();
    let honest = matches!(
        told,
        Error::Timeout {
            step: Step::EarlierOperation,
            ..
        } | Error::Connection { .. }
            | Error::OutcomeUnknown { .. }
    );
    assert!(honest, "{told:?}");
    proxy.set(Way::Requests, Flow::Pass);
    timeout(LIMIT, lock.lock())
        .await
        .expect("the line stands still")
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_that_is_not_polled_while_it_sleeps_gives_way() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .recheck_interval(ms(100))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    let mut parked = [lock.lock().into_future()];
    poll_to_sleep(&mut redis, &lock.name(), &mut parked).await;
    let [parked] = parked;
    guard.unlock().await.unwrap();
    // From here on nobody polls `parked`.
    let guard = timeout(LIMIT, lock.lock())
        .await
        .expect("a waiter that stands still blocks the line")
        .unwrap();
    guard.unlock().await.unwrap();
    // It has lost its place, not its turn.
    timeout(LIMIT, parked)
        .await
        .expect("it never got in")
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_that_is_not_polled_while_it_asks_gives_way() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .recheck_interval(ms(100))
        .command_timeout(ms(500))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    let before = scripts(&mut redis);
    let mut parked = Box::pin(lock.lock().into_future());
    assert!((&mut parked).now_or_never().is_none());
    wait_until("its question was answered", LIMIT, || {
        scripts(&mut redis) > before
    });
    guard.unlock().await.unwrap();
    let guard = timeout(LIMIT, lock.lock())
        .await
        .expect("a waiter that stands still blocks the line")
        .unwrap();
    guard.unlock().await.unwrap();
    timeout(LIMIT, parked)
        .await
        .expect("it never got in")
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

/// The question in front of the line has no answer, so nothing is known: "others hold it" would be
/// made up.
#[tokio::test(flavor = "multi_thread")]
async fn behind_a_question_without_an_answer_nobody_is_told_that_others_hold_the_lock() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .command_timeout(ms(500))
        .retry_timeout(ms(500))
        .connect(&proxy.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    proxy.set(Way::Requests, Flow::Hold);
    assert!(timeout(ms(5), lock.lock()).await.is_err());
    let mut second = lock.lock().into_future();
    assert!(futures::poll!(&mut second).is_pending());
    let second = tokio::spawn(second);
    let told = lock.lock().timeout(ms(50)).await;
    let tried = lock.try_lock_for(ms(50)).await;
    assert_eq!(
        redis::cmd("EXISTS").arg(lock.name()).query(&mut redis),
        Ok(0),
        "the test's own condition"
    );
    second.abort();
    assert!(
        !matches!(told, Err(Error::AcquireTimeout { .. })),
        "{told:?}"
    );
    assert!(!matches!(tried, Ok(None)), "{tried:?}");
}

/// Outside any scope each acquisition has an owner of its own, which has done nothing before:
/// whoever looked for its earlier operation would not find one.
#[tokio::test(flavor = "multi_thread")]
async fn a_timeout_behind_another_owners_attempt_does_not_blame_the_same_owner() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .command_timeout(ms(500))
        .retry_timeout(ms(500))
        .connect(&proxy.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    // An adopted owner asks twice, so that its attempt takes 800 ms.
    proxy.set(Way::Requests, Flow::Delay(ms(400)));
    let adopted = Owner::from_thread_id(7).unwrap();
    assert!(
        timeout(ms(5), lock.lock().with_owner(adopted))
            .await
            .is_err()
    );
    let told = lock.lock().timeout(ms(10)).await.unwrap_err();
    assert!(
        matches!(told, Error::Timeout { .. }),
        "the test's own condition: {told:?}"
    );
    assert!(!told.to_string().contains("same owner"), "{told}");
}

/// The server is gone, and the first in line hears of it after the retry timeout. If each of the
/// others had to find that out for itself, one after the other, the last would wait for many retry
/// timeouts.
#[tokio::test(flavor = "multi_thread")]
async fn all_in_line_hear_of_a_dead_server_after_the_retry_timeout() {
    const WAITERS: u32 = 40;
    let retry_timeout = ms(500);
    let mut server = Server::start();
    let client = LockClient::builder()
        .command_timeout(ms(200))
        .retry_timeout(retry_timeout)
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    server.kill();
    let begun = Instant::now();
    let waiters: Vec<_> = (0..WAITERS)
        .map(|_| tokio::spawn(lock.lock().into_future()))
        .collect();
    for waiter in waiters {
        timeout(2 * LIMIT, waiter)
            .await
            .expect("a waiter hangs")
            .unwrap()
            .unwrap_err();
    }
    let last = begun.elapsed();
    assert!(
        last < retry_timeout * WAITERS / 4,
        "the last one heard after {last:?}"
    );
}

/// The channels of all waiters are subscribed anew after an outage. If every failed subscription
/// during the outage asked for all of them again, the server would meet many times as many
/// questions as ever, at the moment it is back.
#[tokio::test(flavor = "multi_thread")]
async fn after_an_outage_the_waiters_do_not_storm() {
    const LOCKS: usize = 200;
    let second = ms(1_000);
    let mut server = Server::builder().persistent().start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .command_timeout(ms(50))
        .connect_timeout(ms(1_000))
        .retry_timeout(Duration::from_secs(3_600))
        .connect(&server.url())
        .await
        .unwrap();
    let names: Vec<_> = (0..LOCKS).map(|_| unique("stock")).collect();
    for name in &names {
        redis::cmd("HSET")
            .arg(name)
            .arg("9f3c0b6e-54a9-4c4f-8a53-0d2f5f2f7c11:1")
            .arg(1)
            .exec(&mut redis)
            .unwrap();
    }
    let waiters: Vec<_> = names
        .iter()
        .map(|name| tokio::spawn(client.lock(name).lock().into_future()))
        .collect();
    wait_until("they wait", LIMIT, || channels(&mut redis) == LOCKS);
    let before = scripts(&mut redis);
    tokio::time::sleep(2 * second).await;
    let usual = (scripts(&mut redis) - before) / 2;
    server.stop();
    tokio::time::sleep(4 * second).await;
    server.restart();
    let mut redis = server.connection();
    let (mut last, mut most) = (scripts(&mut redis), 0);
    for _ in 0..4 {
        tokio::time::sleep(second).await;
        let now = scripts(&mut redis);
        most = most.max(now - last);
        last = now;
    }
    assert!(waiters.iter().all(|waiter| !waiter.is_finished()));
    waiters.iter().for_each(|waiter| waiter.abort());
    // Twice or three times as many are usual: each waiter asks when the connection is new, and when
    // it is subscribed.
    assert!(
        most < 6 * usual,
        "{most} questions in a second, usually {usual}"
    );
}

/// The one before has a lease of its own and overruns it: nobody unlocks, and no message comes when
/// the key is gone.
#[tokio::test(flavor = "multi_thread")]
async fn the_next_in_line_sleeps_no_longer_than_the_lease_of_the_one_before() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .recheck_interval(LIMIT)
        .connect(&server.url())
        .await
        .unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    let guard = other.lock(&name).lock().await.unwrap();
    let before = tokio::spawn(lock.lock().lease(ms(500)).into_future());
    wait_until("it waits", LIMIT, || subscribers(&mut redis, &name) == 1);
    let mut next = lock.lock().into_future();
    assert!(futures::poll!(&mut next).is_pending());
    let next = tokio::spawn(next);
    guard.unlock().await.unwrap();
    let before = before.await.unwrap().unwrap();
    let began = Instant::now();
    let got = timeout(ms(4_000), next).await;
    let locked = lock.is_locked().await.unwrap();
    drop(before);
    let slept = began.elapsed();
    assert!(
        got.is_ok(),
        "{slept:?} after a lease of 500 ms began the waiter still sleeps; locked: {locked}"
    );
}

/// An owner's re-entry is kept and not polled, and its guard is dropped: nobody has the lock, and a
/// renewal for the sake of the re-entry would keep all others out for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_guard_is_not_renewed_for_ever_behind_a_reentry_that_is_not_polled() {
    let server = Server::start();
    let client = LockClient::builder()
        .watchdog_timeout(ms(900))
        .recheck_interval(ms(100))
        .retry_timeout(ms(300))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let owner = Owner::new();
    let guard = lock.lock().with_owner(owner).await.unwrap();
    let parked = loop {
        let mut reentry = Box::pin(lock.lock().with_owner(owner));
        // On a busy machine everything may be done by the end of one poll.
        if (&mut reentry).now_or_never().is_none() {
            break reentry;
        }
    };
    drop(guard);
    let rival = LockClient::connect(&server.url()).await.unwrap();
    let got = timeout(LIMIT, rival.lock(lock.name()).lock()).await;
    assert!(
        got.is_ok(),
        "still taken after {LIMIT:?}, with a lease of 0.9 s and no guard"
    );
    drop(parked);
}

/// Ten that are not polled stand in front of one that is. If each of them cost it two intervals,
/// that were ten seconds.
#[tokio::test(flavor = "multi_thread")]
async fn many_that_are_not_polled_give_way_within_two_intervals() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .recheck_interval(ms(500))
        .connect(&server.url())
        .await
        .unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().to_owned();
    let guard = other.lock(&name).lock().await.unwrap();
    let mut parked: Vec<_> = (0..10).map(|_| lock.lock().into_future()).collect();
    poll_to_sleep(&mut redis, &name, &mut parked).await;
    guard.unlock().await.unwrap();
    let began = Instant::now();
    let got = timeout(LIMIT, lock.lock())
        .await
        .expect("nobody gets in")
        .unwrap();
    let free = began.elapsed();
    assert!(
        free < ms(2_000),
        "the lock was free for {free:?}; two intervals are 1 s"
    );
    got.unlock().await.unwrap();
}

/// Many that are not polled are in front, at different stages. Each newcomer passes them once, not
/// again and again.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_that_are_not_polled_have_given_way_after_two_intervals() {
    let server = Server::start();
    let client = LockClient::builder()
        .recheck_interval(ms(100))
        .command_timeout(ms(200))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    let mut parked: Vec<_> = (0..30)
        .map(|_| Box::pin(lock.lock().into_future()))
        .collect();
    for one in &mut parked {
        for _ in 0..3 {
            assert!(one.now_or_never().is_none());
            tokio::time::sleep(ms(5)).await;
        }
    }
    guard.unlock().await.unwrap();
    let mut took = Vec::new();
    for _ in 0..4 {
        let begun = Instant::now();
        timeout(LIMIT, tokio::spawn(lock.lock().into_future()))
            .await
            .expect("nobody gets in")
            .unwrap()
            .unwrap()
            .unlock()
            .await
            .unwrap();
        took.push(begun.elapsed());
    }
    // The first one has waited until they gave way.
    assert!(
        took[1..].iter().all(|took| *took < ms(1_000)),
        "the lock is free, and each one waits: {took:?}"
    );
}
