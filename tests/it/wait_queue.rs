//! The wait queue of one lock in this process, with waiters that are cancelled, are not polled, or
//! get no reply.

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
async fn waiters_cancelled_without_reply_leave_one_attempt() {
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
    // The next waiter comes after all of them, and its own attempt has a reply.
    assert!(matches!(
        lock.lock().timeout(ms(1)).await,
        Err(Error::AcquireTimeout { .. })
    ));
    let sent = scripts(&mut redis) - before;
    assert!(
        sent <= 4,
        "{sent} scripts for one waiter and one cancelled attempt"
    );
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn waiter_behind_cancelled_attempt_gets_no_acquire_timeout() {
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
    let error = lock.lock().timeout(ms(10)).await.unwrap_err();
    let expected = matches!(
        error,
        Error::Timeout {
            step: Step::EarlierOperation,
            ..
        } | Error::Connection { .. }
            | Error::OutcomeUnknown { .. }
    );
    assert!(expected, "{error:?}");
    proxy.set(Way::Requests, Flow::Pass);
    timeout(LIMIT, lock.lock())
        .await
        .expect("the wait queue is blocked")
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn unpolled_sleeping_waiter_gives_up_its_place() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .recheck_interval(ms(100))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    let mut unpolled = [lock.lock().into_future()];
    poll_to_sleep(&mut redis, lock.name(), &mut unpolled).await;
    let [unpolled] = unpolled;
    guard.unlock().await.unwrap();
    // From here on `unpolled` is not polled.
    let guard = timeout(LIMIT, lock.lock())
        .await
        .expect("an unpolled waiter blocks the wait queue")
        .unwrap();
    guard.unlock().await.unwrap();
    // The waiter has lost its place in the queue, but it still acquires the lock.
    timeout(LIMIT, unpolled)
        .await
        .expect("the waiter did not acquire the lock")
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn unpolled_attempting_waiter_gives_up_its_place() {
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
    let mut unpolled = Box::pin(lock.lock().into_future());
    assert!((&mut unpolled).now_or_never().is_none());
    wait_until("the attempt was answered", LIMIT, || {
        scripts(&mut redis) > before
    });
    guard.unlock().await.unwrap();
    let guard = timeout(LIMIT, lock.lock())
        .await
        .expect("an unpolled waiter blocks the wait queue")
        .unwrap();
    guard.unlock().await.unwrap();
    timeout(LIMIT, unpolled)
        .await
        .expect("the waiter did not acquire the lock")
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

/// The attempt at the head has no reply, so it is unknown whether another owner holds the lock.
#[tokio::test(flavor = "multi_thread")]
async fn waiter_behind_pending_attempt_gets_no_acquire_timeout() {
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
    let locked = lock.lock().timeout(ms(50)).await;
    let tried = lock.try_lock_for(ms(50)).await;
    assert_eq!(
        redis::cmd("EXISTS").arg(lock.name()).query(&mut redis),
        Ok(0),
        "the setup of the test failed: the lock is held"
    );
    second.abort();
    assert!(
        !matches!(locked, Err(Error::AcquireTimeout { .. })),
        "{locked:?}"
    );
    assert!(!matches!(tried, Ok(None)), "{tried:?}");
}

/// Outside any scope each request has an owner of its own, which has no earlier operation: an error
/// that names one would be wrong.
#[tokio::test(flavor = "multi_thread")]
async fn timeout_behind_other_owner_does_not_name_same_owner() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .command_timeout(ms(500))
        .retry_timeout(ms(500))
        .connect(&proxy.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    // The attempt of an owner with a given thread id sends two calls, so it takes 800 ms.
    proxy.set(Way::Requests, Flow::Delay(ms(400)));
    let thread_id_owner = Owner::from_thread_id(7).unwrap();
    assert!(
        timeout(ms(5), lock.lock().with_owner(thread_id_owner))
            .await
            .is_err()
    );
    let error = lock.lock().timeout(ms(10)).await.unwrap_err();
    assert!(
        matches!(error, Error::Timeout { .. }),
        "the setup of the test failed: {error:?}"
    );
    assert!(!error.to_string().contains("same owner"), "{error}");
}

/// The head fails after the retry timeout. If the other waiters tried one after the other, each
/// for the retry timeout, the last one would wait for many retry timeouts.
#[tokio::test(flavor = "multi_thread")]
async fn dead_server_fails_all_waiters_after_retry_timeout() {
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
        "the last waiter failed after {last:?}"
    );
}

/// The client subscribes to the channels of all waiters again after an outage. If every
/// subscription that failed during the outage made all waiters try again, the server would receive
/// many times the usual number of attempts right after its start.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_after_outage_send_few_attempts() {
    const LOCKS: usize = 200;
    let second = ms(1_000);
    let mut server = Server::builder().persistent().start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .command_timeout(ms(300))
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
    wait_until("every waiter has subscribed", LIMIT, || {
        channels(&mut redis) == LOCKS
    });
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
    // Two or three times the usual number is expected: each waiter tries when the connection is
    // new, and again when it has subscribed.
    assert!(
        most <= 3 * LOCKS as u64,
        "{most} attempts in a second, usually {usual}"
    );
}

/// The previous waiter acquires the lock with a fixed lease and does not release it: no message is
/// published when the key expires.
#[tokio::test(flavor = "multi_thread")]
async fn next_waiter_wakes_when_lease_of_previous_expires() {
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
    let previous = tokio::spawn(lock.lock().lease(ms(500)).into_future());
    wait_until("the waiter has subscribed", LIMIT, || {
        subscribers(&mut redis, &name) == 1
    });
    let mut next = lock.lock().into_future();
    assert!(futures::poll!(&mut next).is_pending());
    let next = tokio::spawn(next);
    guard.unlock().await.unwrap();
    let previous = previous.await.unwrap().unwrap();
    let began = Instant::now();
    let acquired = timeout(ms(4_000), next).await;
    let locked = lock.is_locked().await.unwrap();
    drop(previous);
    let waited = began.elapsed();
    assert!(
        acquired.is_ok(),
        "the waiter still sleeps {waited:?} after a lease of 500 ms began; locked: {locked}"
    );
}

/// An owner's re-entry is kept and not polled, and its guard is dropped: a client that renewed the
/// lock for the re-entry would block all other owners without end.
#[tokio::test(flavor = "multi_thread")]
async fn dropped_guard_with_unpolled_reentry_is_not_renewed() {
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
    let unpolled = loop {
        let mut reentry = Box::pin(lock.lock().with_owner(owner));
        // On a busy machine the reply may arrive within the one poll.
        if (&mut reentry).now_or_never().is_none() {
            break reentry;
        }
    };
    drop(guard);
    let other = LockClient::connect(&server.url()).await.unwrap();
    let acquired = timeout(LIMIT, other.lock(lock.name()).lock()).await;
    assert!(
        acquired.is_ok(),
        "the lock is still held after {LIMIT:?}, with a lease of 0.9 s and no guard"
    );
    drop(unpolled);
}

/// Ten unpolled waiters are ahead of a polled one. If each of them delayed it by two re-check
/// intervals, it would wait for ten seconds.
#[tokio::test(flavor = "multi_thread")]
async fn ten_unpolled_waiters_give_way_within_two_intervals() {
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
    let mut unpolled: Vec<_> = (0..10).map(|_| lock.lock().into_future()).collect();
    poll_to_sleep(&mut redis, &name, &mut unpolled).await;
    guard.unlock().await.unwrap();
    let began = Instant::now();
    let acquired = timeout(LIMIT, lock.lock())
        .await
        .expect("the waiter did not acquire the lock")
        .unwrap();
    let free = began.elapsed();
    assert!(
        free < ms(2_000),
        "the lock was free for {free:?}; two intervals are 1 s"
    );
    acquired.unlock().await.unwrap();
}

/// Many unpolled waiters are ahead, at different stages. Only the first newcomer has to wait until
/// they have given way.
#[tokio::test(flavor = "multi_thread")]
async fn unpolled_waiters_delay_only_the_first_newcomer() {
    let server = Server::start();
    let client = LockClient::builder()
        .recheck_interval(ms(100))
        .command_timeout(ms(200))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    let mut unpolled: Vec<_> = (0..30)
        .map(|_| Box::pin(lock.lock().into_future()))
        .collect();
    for waiter in &mut unpolled {
        for _ in 0..3 {
            assert!(waiter.now_or_never().is_none());
            tokio::time::sleep(ms(5)).await;
        }
    }
    guard.unlock().await.unwrap();
    let mut took = Vec::new();
    for _ in 0..4 {
        let begun = Instant::now();
        timeout(LIMIT, tokio::spawn(lock.lock().into_future()))
            .await
            .expect("the waiter did not acquire the lock")
            .unwrap()
            .unwrap()
            .unlock()
            .await
            .unwrap();
        took.push(begun.elapsed());
    }
    // The first newcomer waited until they gave way.
    assert!(
        took[1..].iter().all(|took| *took < ms(1_000)),
        "the lock is free, but each newcomer waits: {took:?}"
    );
}

/// The head of the queue makes an attempt just before the time of another waiter is over. The reply
/// takes its usual time: no error of the server, and no earlier operation to blame.
#[tokio::test(flavor = "multi_thread")]
async fn timeout_during_attempt_of_head_is_acquire_timeout() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let timeout = ms(1_000);
    let client = LockClient::builder()
        // A chunk behind another one is delayed twice.
        .command_timeout(8 * timeout)
        .recheck_interval(ms(60_000))
        .connect(&proxy.url())
        .await
        .unwrap();
    let name = unique("stock");
    let other = LockClient::connect(&server.url()).await.unwrap();
    let guard = other.lock(&name).lock().await.unwrap();
    let lock = client.lock(&name);
    let head = tokio::spawn(lock.lock().into_future());
    wait_until("the head listens", LIMIT, || {
        subscribers(&mut redis, &name) == 1
    });
    for _ in 0..3 {
        let attempts = client.stats().contended_attempts;
        proxy.set(Way::Replies, Flow::Delay(ms(600)));
        let waiting = tokio::spawn(lock.lock().timeout(timeout).into_future());
        wait_until("it waits", LIMIT, || client.stats().requests_waiting == 2);
        // The message arrives after 0.6 s, the reply to the attempt that it causes after 1.2 s.
        redis::cmd("PUBLISH")
            .arg(format!("redisson_lock__channel:{{{name}}}"))
            .arg("0")
            .exec(&mut redis)
            .unwrap();
        let error = waiting.await.unwrap().unwrap_err();
        assert!(matches!(error, Error::AcquireTimeout { .. }), "{error:?}");
        proxy.set(Way::Replies, Flow::Pass);
        wait_until("the attempt has its reply", LIMIT, || {
            client.stats().contended_attempts > attempts
        });
    }
    guard.unlock().await.unwrap();
    drop(head.await.unwrap().unwrap());
}
