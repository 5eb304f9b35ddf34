//! A force unlock that gets no reply: its repeat frees nobody else, whoever it took the lock from
//! hears of it, and what it tells is true.

use std::time::Duration;

use crate::support::observe::{exists, sha1_of, subscribers};
use crate::support::proxy::{Fate, Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until};
use redisson_lock::{Error, LockClient, LockGuard, Owner, OwnerExt, Step};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

const SOON: Duration = Duration::from_secs(10);
/// What no test waits for.
const LEASE: Duration = Duration::from_secs(600);
/// What a request contains that is the first to free the lock: the script publishes there.
const FREES: [&str; 2] = ["EVALSHA", "redisson_lock__channel"];

/// Waits for the lock in a task of its own, and is in line for it by now.
fn next_in_line(
    client: &LockClient,
    name: &str,
    redis: &mut redis::Connection,
) -> JoinHandle<LockGuard> {
    let lock = client.lock(name);
    let next = tokio::spawn(async move { lock.lock().lease(LEASE).await.unwrap() });
    wait_until("the next one listens", SOON, || {
        subscribers(redis, name) == 1
    });
    next
}

/// The repeat of a force unlock comes when the lock is another's: that one was not meant, and does
/// not hear of it. If it were freed, two would be sure of the lock.
#[tokio::test(flavor = "multi_thread")]
async fn the_repeat_of_a_force_unlock_frees_no_second_owner() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let builder = LockClient::builder().command_timeout(Duration::from_millis(500));
    let operator = builder.connect(&proxy.url()).await.unwrap();
    let others = LockClient::connect(&server.url()).await.unwrap();
    let third = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let _stale = others.lock(&name).lock().await.unwrap();
    let next = next_in_line(&others, &name, &mut redis);
    // The repeat comes when the command timeout is over.
    proxy.next_reply_to(&FREES, Fate::Swallow);
    let lock = operator.lock(&name);
    let forced = tokio::spawn(async move { lock.force_unlock().await });
    let guard = timeout(SOON, next)
        .await
        .expect("the first sending freed it")
        .unwrap();
    assert!(exists(&mut redis, &name) && !guard.is_lost());
    let answer = timeout(SOON, forced).await.expect("it hangs").unwrap();
    assert_eq!(proxy.applied(), 1);
    let rival = third.lock(&name).try_lock().await.unwrap();
    assert!(
        guard.is_lost() || rival.is_none(),
        "two are sure of the lock after one force unlock: {answer:?}"
    );
}

/// The next in line is of the same client, and has the lock between the force unlock and its
/// repeat. If the repeat took it, nothing but this client could tell its guard: a lease of one's
/// own is not renewed, so nobody asks.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_a_force_unlock_took_the_lock_from_in_its_own_client_hears_of_it_at_once() {
    const ROUNDS: usize = 40;
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    for _ in 0..ROUNDS {
        let name = unique("stock");
        let stale = client.lock(&name).lock().await.unwrap();
        let next = next_in_line(&client, &name, &mut redis);
        proxy.next_reply_to(&FREES, Fate::Close);
        let answer = client.lock(&name).force_unlock().await;
        assert!(stale.is_lost(), "{answer:?}");
        let guard = timeout(SOON, next).await.expect("it was freed").unwrap();
        wait_until(
            "it has the lock, or was told",
            Duration::from_secs(1),
            || guard.is_lost() || exists(&mut redis, &name),
        );
    }
    assert_eq!(proxy.applied(), ROUNDS);
}

/// The repeat finds the lock free. That is no reason to tell the operator that nothing was held.
#[tokio::test(flavor = "multi_thread")]
async fn a_force_unlock_that_freed_a_lock_says_so_also_when_its_first_reply_was_lost() {
    for fate in [Fate::Swallow, Fate::Close] {
        let server = Server::start();
        let proxy = Proxy::start(&server).await;
        let builder = LockClient::builder().command_timeout(Duration::from_millis(300));
        let operator = builder.connect(&proxy.url()).await.unwrap();
        let other = LockClient::connect(&server.url()).await.unwrap();
        let name = unique("stock");
        let _stale = other.lock(&name).lock().await.unwrap();
        proxy.next_reply_to(&FREES, fate);
        assert_eq!(
            operator.lock(&name).force_unlock().await,
            Ok(true),
            "it was held, and this call freed it"
        );
        assert_eq!(proxy.applied(), 1);
        assert!(!exists(&mut server.connection(), &name));
    }
}

/// The owner is of the same client, and locks again as soon as it hears of the loss, perhaps before
/// the repeat. To the script its second possession looks like the first.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_force_unlock_takes_no_later_possession() {
    const ROUNDS: usize = 20;
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    let outside = LockClient::connect(&server.url()).await.unwrap();
    for round in 1..=ROUNDS {
        let lock = client.lock(unique("stock"));
        let name = lock.name().to_owned();
        let again = {
            let lock = lock.clone();
            let locks_twice = async move {
                let first = lock.lock().await.unwrap();
                first.lost().await;
                drop(first);
                lock.lock().await.unwrap()
            };
            tokio::spawn(locks_twice.with_owner(Owner::new()))
        };
        wait_until("it is held", SOON, || exists(&mut redis, &name));
        proxy.next_reply_to(&[sha1_of("force_unlock")], Fate::Close);
        let freed = lock.force_unlock().await;
        assert_eq!(proxy.applied(), round);
        let second = timeout(SOON, again).await.expect("it hangs").unwrap();
        // Whether anything is still under way nobody tells; what is, arrives within milliseconds.
        sleep(Duration::from_millis(50)).await;
        let rival = outside.lock(&name).try_lock().await.unwrap();
        assert!(
            second.is_lost() || rival.is_none(),
            "two are sure of the lock in round {round}: {freed:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_force_unlock_whose_look_gets_no_answer_tells_that_nothing_was_freed() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let limit = Duration::from_millis(300);
    let client = LockClient::builder()
        .command_timeout(limit)
        .retry_timeout(limit)
        .connect(&proxy.url())
        .await
        .unwrap();
    proxy.set(Way::Both, Flow::Hold);
    let told = client.lock(unique("stock")).force_unlock().await;
    assert!(
        matches!(
            told,
            Err(Error::Timeout {
                step: Step::Inspect,
                ..
            })
        ),
        "{told:?}"
    );
}
