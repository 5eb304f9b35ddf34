//! Faults of the server and of the way to it: waited out, settled afterwards, or told; never a wrong hold.

mod support;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use redisson_lock::{Error, Holder, LockClient, LockClientBuilder, LockGuard, LostReason, Step};
use support::observe::{exists, info, owners, sha1_of};
use support::proxy::{Fate, Flow, Proxy, Way};
use support::server::{Server, unique, wait_until};
use tokio::task::{JoinHandle, block_in_place};
use tokio::time::{sleep, timeout};

/// Far more than any step takes, far less than the leases in these tests.
const SOON: Duration = Duration::from_secs(10);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Settings by which a lost reply is noticed soon, and nothing runs out during a test.
fn quick() -> LockClientBuilder {
    LockClient::builder().watchdog_timeout(ms(60_000)).command_timeout(ms(300))
}

fn owner(client: &LockClient, holder: Holder) -> String {
    format!("{}:{holder}", client.client_id())
}

/// Waits until the lock's key is gone because somebody took it away, not because its lease was over.
fn wait_until_given_back(redis: &mut redis::Connection, lock: &str) {
    wait_until("what was taken is given back", SOON, || !exists(redis, lock));
    assert_eq!(info(redis, "stats", "expired_keys:", ""), 0, "it ran out instead");
}

fn waiting(client: &LockClient, lock: &str) -> JoinHandle<LockGuard> {
    let lock = client.lock(lock);
    tokio::spawn(async move { lock.lock().await.unwrap() })
}

async fn served(waiter: JoinHandle<LockGuard>) -> LockGuard {
    timeout(SOON, waiter).await.expect("the waiter did not get in").unwrap()
}

/// Fifty tasks lock and unlock five locks, a thousand times in all, while something goes wrong again and again.
async fn under_load(server: &Server, mut trouble: impl FnMut(&mut redis::Connection) + Send + 'static) {
    const TASKS: usize = 50;
    const ROUNDS: u64 = 20;
    let client = LockClient::builder().recheck_interval(ms(200)).connect(&server.url()).await.unwrap();
    let locks: Arc<Vec<_>> =
        Arc::new((0..5).map(|_| (client.lock(unique("stock")), AtomicBool::new(false), AtomicU64::new(0))).collect());
    let over = Arc::new(AtomicBool::new(false));
    let troublemaker = std::thread::spawn({
        let (mut redis, over) = (server.connection(), Arc::clone(&over));
        move || {
            let mut times = 0;
            while !over.load(Ordering::Acquire) {
                trouble(&mut redis);
                times += 1;
            }
            times
        }
    });
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let locks = Arc::clone(&locks);
            tokio::spawn(async move {
                let (lock, occupied, count) = &locks[task % locks.len()];
                for _ in 0..ROUNDS {
                    let guard = lock.lock().await.unwrap();
                    assert!(!occupied.swap(true, Ordering::AcqRel), "two hold it at once");
                    let before = count.load(Ordering::Acquire);
                    tokio::task::yield_now().await;
                    count.store(before + 1, Ordering::Release);
                    assert!(occupied.swap(false, Ordering::AcqRel));
                    guard.unlock().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        timeout(6 * SOON, task).await.expect("a task hangs").unwrap();
    }
    over.store(true, Ordering::Release);
    let times: u64 = troublemaker.join().unwrap();
    assert!(times >= 3, "no trouble: {times} times");
    let counted: u64 = locks.iter().map(|(_, _, count)| count.load(Ordering::Acquire)).sum();
    assert_eq!(counted, TASKS as u64 * ROUNDS);
    let mut redis = server.connection();
    wait_until("no key is left", SOON, || redis::cmd("DBSIZE").query(&mut redis) == Ok(0));
    wait_until("no subscription is left", SOON, || {
        redis::cmd("PUBSUB").arg("CHANNELS").query::<Vec<String>>(&mut redis).unwrap().is_empty()
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_that_the_server_forgets_are_sent_again() {
    let server = Server::start();
    under_load(&server, |redis| {
        redis::cmd("SCRIPT").arg("FLUSH").exec(redis).unwrap();
        std::thread::sleep(ms(2));
    })
    .await;
    let whole = info(&mut server.connection(), "commandstats", "cmdstat_eval:", "calls=");
    assert!(whole > 0, "no script was ever missing");
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_are_killed_again_and_again_spoil_no_count() {
    let server = Server::start();
    under_load(&server, |redis| {
        redis::cmd("CLIENT").arg(&["KILL", "TYPE", "normal"]).exec(redis).unwrap();
        std::thread::sleep(ms(20));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_back_without_its_data_serves_waiters_and_tells_holders() {
    let mut server = Server::start();
    let client = LockClient::builder().watchdog_timeout(ms(9_000)).connect(&server.url()).await.unwrap();
    let other = LockClient::builder().recheck_interval(ms(60_000)).connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let lost = tokio::spawn(guard.lost());
    let waiter = waiting(&other, &name);
    let mut redis = server.connection();
    wait_until("the waiter listens", SOON, || {
        !redis::cmd("PUBSUB").arg("CHANNELS").query::<Vec<String>>(&mut redis).unwrap().is_empty()
    });
    block_in_place(|| {
        server.kill();
        server.restart();
    });
    let rivals = served(waiter).await;
    assert_eq!(timeout(SOON, lost).await.expect("the loss was never told").unwrap(), LostReason::Gone);
    assert!(matches!(guard.unlock().await, Err(Error::Lost { reason: LostReason::Gone, .. })));
    // The one that was lost took nothing with it.
    let mut redis = server.connection();
    assert_eq!(owners(&mut redis, &name), HashMap::from([(owner(&other, rivals.holder()), 1)]));
    rivals.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_back_with_its_data_finds_holders_and_waiters_as_they_were() {
    let mut server = Server::builder().persistent().start();
    let client = LockClient::builder().watchdog_timeout(ms(6_000)).connect(&server.url()).await.unwrap();
    let other = LockClient::builder().connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let waiter = waiting(&other, &name);
    let mut redis = server.connection();
    wait_until("the waiter listens", SOON, || {
        !redis::cmd("PUBSUB").arg("CHANNELS").query::<Vec<String>>(&mut redis).unwrap().is_empty()
    });
    block_in_place(|| {
        server.kill();
        server.restart();
    });
    let mut redis = server.connection();
    // Renewed by the new connection.
    let left = |redis: &mut redis::Connection| redis::cmd("PTTL").arg(&name).query::<i64>(redis).unwrap();
    let mut last = left(&mut redis);
    wait_until("the lease is renewed", SOON, || {
        let now = left(&mut redis);
        now > std::mem::replace(&mut last, now)
    });
    assert!(!guard.is_lost());
    assert!(!waiter.is_finished(), "two hold it at once");
    guard.unlock().await.unwrap();
    served(waiter).await.unlock().await.unwrap();
    assert!(!exists(&mut redis, &name));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_to_an_acquire_leaves_one_hold() {
    for fate in [Fate::Swallow, Fate::Close] {
        let server = Server::start();
        let mut redis = server.connection();
        let proxy = Proxy::start(&server).await;
        let client = quick().connect(&proxy.url()).await.unwrap();
        let name = unique("stock");
        proxy.next_reply_to(&[sha1_of("acquire"), &name], fate);
        let guard = client.lock(&name).lock().await.unwrap();
        assert_eq!(proxy.applied(), 1);
        assert_eq!(owners(&mut redis, &name), HashMap::from([(owner(&client, guard.holder()), 1)]));
        guard.unlock().await.unwrap();
        assert!(!exists(&mut redis, &name));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_to_a_reentry_leaves_two_holds() {
    for fate in [Fate::Swallow, Fate::Close] {
        let server = Server::start();
        let mut redis = server.connection();
        let proxy = Proxy::start(&server).await;
        let client = quick().connect(&proxy.url()).await.unwrap();
        let lock = client.lock(unique("stock"));
        let name = lock.name().unwrap();
        let outer = lock.lock().await.unwrap();
        let field = owner(&client, outer.holder());
        proxy.next_reply_to(&[sha1_of("acquire"), &name], fate);
        let inner = outer.run(async { lock.lock().await.unwrap() }).await.unwrap();
        assert_eq!(proxy.applied(), 1);
        assert_eq!(owners(&mut redis, &name), HashMap::from([(field.clone(), 2)]));
        inner.unlock().await.unwrap();
        assert_eq!(owners(&mut redis, &name), HashMap::from([(field, 1)]));
        outer.unlock().await.unwrap();
        assert!(!exists(&mut redis, &name));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_to_an_unlock_is_no_error() {
    for fate in [Fate::Swallow, Fate::Close] {
        let server = Server::start();
        let mut redis = server.connection();
        let proxy = Proxy::start(&server).await;
        let client = quick().connect(&proxy.url()).await.unwrap();
        let lock = client.lock(unique("stock"));
        let name = lock.name().unwrap();
        let outer = lock.lock().await.unwrap();
        let inner = outer.run(async { lock.lock().await.unwrap() }).await.unwrap();
        proxy.next_reply_to(&[sha1_of("release"), &name], fate);
        inner.unlock().await.unwrap();
        assert_eq!(owners(&mut redis, &name), HashMap::from([(owner(&client, outer.holder()), 1)]));
        proxy.next_reply_to(&[sha1_of("release"), &name], fate);
        outer.unlock().await.unwrap();
        assert_eq!(proxy.applied(), 2);
        assert!(!exists(&mut redis, &name));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_repeat_of_an_unlock_takes_nothing_from_the_next_holder() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick().connect(&proxy.url()).await.unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let waiter = waiting(&other, &name);
    proxy.next_reply_to(&[sha1_of("release"), &name], Fate::Swallow);
    guard.unlock().await.unwrap();
    assert_eq!(proxy.applied(), 1);
    let rivals = served(waiter).await;
    assert_eq!(owners(&mut redis, &name), HashMap::from([(owner(&other, rivals.holder()), 1)]));
    assert!(!rivals.is_lost());
    rivals.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_to_a_renewal_loses_no_lock() {
    for fate in [Fate::Swallow, Fate::Close] {
        let server = Server::start();
        let mut redis = server.connection();
        let proxy = Proxy::start(&server).await;
        let client = LockClient::builder()
            .watchdog_timeout(ms(3_000))
            .command_timeout(ms(300))
            .connect(&proxy.url())
            .await
            .unwrap();
        let name = unique("stock");
        let begun = Instant::now();
        let guard = client.lock(&name).lock().await.unwrap();
        proxy.next_reply_to(&[sha1_of("renew"), &name], fate);
        wait_until("the reply is lost", SOON, || proxy.applied() == 1);
        // Beyond the end of what the acquire proved.
        wait_until("the first lease is over", SOON, || begun.elapsed() > ms(3_300));
        assert!(!guard.is_lost());
        assert_eq!(owners(&mut redis, &name), HashMap::from([(owner(&client, guard.holder()), 1)]));
        guard.unlock().await.unwrap();
        assert!(!exists(&mut redis, &name));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_that_failed_in_front_of_a_paused_server_leaves_nothing() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = quick().retry_timeout(ms(1_000)).connect(&server.url()).await.unwrap();
    for _ in 0..3 {
        let name = unique("stock");
        server.pause();
        let outcome = client.lock(&name).lock().await;
        assert!(matches!(outcome, Err(Error::Unknown { step: Step::Acquire, .. })), "{outcome:?}");
        server.resume();
        // The lease would be a minute.
        wait_until_settled(&client, &mut redis, &name).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_that_failed_in_a_network_without_replies_leaves_nothing() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick().retry_timeout(ms(1_000)).connect(&proxy.url()).await.unwrap();
    let name = unique("stock");
    proxy.set(Way::Replies, Flow::Hold);
    let outcome = client.lock(&name).lock().await;
    assert!(matches!(outcome, Err(Error::Unknown { step: Step::Acquire, .. })), "{outcome:?}");
    proxy.set(Way::Replies, Flow::Pass);
    wait_until_settled(&client, &mut redis, &name).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_that_the_network_brings_late_leaves_nothing() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick().retry_timeout(ms(1_000)).connect(&proxy.url()).await.unwrap();
    for _ in 0..5 {
        let name = unique("stock");
        proxy.set(Way::Both, Flow::Hold);
        let outcome = client.lock(&name).lock().await;
        assert!(matches!(outcome, Err(Error::Unknown { step: Step::Acquire, .. })), "{outcome:?}");
        // Now all that was sent arrives, in whatever order.
        proxy.set(Way::Both, Flow::Pass);
        wait_until_settled(&client, &mut redis, &name).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_that_was_sent_twice_and_arrives_after_its_unlock_leaves_nothing() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick().connect(&proxy.url()).await.unwrap();
    let name = unique("stock");
    proxy.stall();
    // By the second connection: the first one's request is still on its way.
    let guard = timeout(SOON, client.lock(&name).lock()).await.expect("it hangs").unwrap();
    guard.unlock().await.unwrap();
    assert!(!exists(&mut redis, &name));
    proxy.deliver();
    wait_until_settled(&client, &mut redis, &name).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unlock_that_was_sent_twice_and_arrives_late_takes_nothing_from_its_holders_next_hold() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick().connect(&proxy.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().unwrap();
    Holder::scope(async {
        let first = lock.lock().await.unwrap();
        proxy.stall();
        timeout(SOON, first.unlock()).await.expect("it hangs").unwrap();
        let second = lock.lock().await.unwrap();
        let holds = HashMap::from([(owner(&client, second.holder()), 1)]);
        assert_eq!(owners(&mut redis, &name), holds);
        proxy.deliver();
        // What is delivered, arrives within milliseconds.
        let begun = Instant::now();
        while begun.elapsed() < ms(500) {
            assert_eq!(owners(&mut redis, &name), holds, "the late unlock took the next hold");
            sleep(ms(5)).await;
        }
        second.unlock().await.unwrap();
    })
    .await;
}

/// Waits until nothing is left of a failed acquire, with everything that was under way having arrived.
async fn wait_until_settled(client: &LockClient, redis: &mut redis::Connection, name: &str) {
    timeout(SOON, client.lock(unique("probe")).is_locked()).await.expect("no answer").unwrap();
    // What arrives, arrives within milliseconds of the server's return; it has to stay away, too.
    let mut free_since = None;
    wait_until("nothing is left of it", SOON, || {
        if exists(redis, name) {
            free_since = None;
            return false;
        }
        free_since.get_or_insert_with(Instant::now).elapsed() > ms(500)
    });
    assert_eq!(info(redis, "stats", "expired_keys:", ""), 0, "it ran out instead");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_waits_out_a_server_that_stands_still() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = quick().connect(&server.url()).await.unwrap();
    for _ in 0..3 {
        let name = unique("stock");
        server.pause();
        let waiter = waiting(&client, &name);
        // Long enough for the first connection to be given up.
        sleep(ms(700)).await;
        assert!(!waiter.is_finished());
        server.resume();
        let guard = served(waiter).await;
        assert_eq!(owners(&mut redis, &name), HashMap::from([(owner(&client, guard.holder()), 1)]));
        guard.unlock().await.unwrap();
        assert!(!exists(&mut redis, &name));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_belongs_to_another_call_grants_no_lock() {
    const LOCKS: usize = 20;
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick().connect(&proxy.url()).await.unwrap();
    let names: Vec<_> = (0..LOCKS).map(|_| unique("stock")).collect();
    // Somebody else has every second lock: a shifted reply would grant what is held, or refuse what is free.
    for name in names.iter().step_by(2) {
        redis::cmd("HSET").arg(name).arg("9f3c0b6e-54a9-4c4f-8a53-0d2f5f2f7c11:1").arg(1).exec(&mut redis).unwrap();
    }
    for round in 1..=5 {
        proxy.next_reply_to(&[sha1_of("acquire"), &names[(3 * round) % LOCKS]], Fate::Swallow);
        let tries: Vec<_> = names
            .iter()
            .map(|name| {
                let lock = client.lock(name);
                tokio::spawn(async move { lock.try_lock().wait(ms(1_500)).await })
            })
            .collect();
        let mut guards = Vec::new();
        for (at, attempt) in tries.into_iter().enumerate() {
            let guard = timeout(SOON, attempt).await.expect("a try hangs").unwrap().unwrap();
            assert_eq!(guard.is_some(), at % 2 == 1, "lock {at} in round {round}");
            if let Some(guard) = guard {
                assert_eq!(owners(&mut redis, &names[at]), HashMap::from([(owner(&client, guard.holder()), 1)]));
                guards.push(guard);
            }
        }
        assert_eq!(proxy.applied(), round);
        for guard in guards {
            guard.unlock().await.unwrap();
        }
        assert_eq!(redis::cmd("DBSIZE").query(&mut redis), Ok(LOCKS / 2));
    }
}

/// An error carries no proof of whose it is. One that was meant for another call must not hide that the server has
/// granted this one.
#[tokio::test(flavor = "multi_thread")]
async fn an_error_that_belongs_to_another_call_is_not_believed() {
    let server = Server::start();
    let mut redis = server.connection();
    redis::cmd("ACL").arg(&["SETUSER", "app", "on", ">secret", "~app:*", "&*", "+@all"]).exec(&mut redis).unwrap();
    let proxy = Proxy::start(&server).await;
    let url = proxy.url().replace("redis://", "redis://app:secret@");
    let client = LockClient::connect(&url).await.unwrap();
    let name = unique("app:stock");
    let forbidden = client.lock(unique("stock"));
    // The next reply on the connection takes the place of the one that is lost.
    proxy.next_reply_to(&["EVALSHA", &name], Fate::Swallow);
    let acquire = tokio::spawn(client.lock(&name).lock());
    wait_until("its reply is lost", SOON, || proxy.applied() == 1);
    let refused = tokio::spawn(forbidden.try_lock());
    let told = timeout(SOON, acquire).await.expect("it hangs").unwrap();
    let refused = timeout(SOON, refused).await.expect("it hangs").unwrap();
    assert!(refused.is_err(), "the test's own condition: {refused:?}");
    match told {
        Ok(guard) => guard.unlock().await.unwrap(),
        Err(_) => wait_until_given_back(&mut redis, &name),
    }
}

/// An acquire runs, its reply is lost with its connection, and the server refuses its repeats for as long as the client
/// tries. Nothing is known of the first one: "refused" would not be the whole truth.
#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_of_the_repeats_does_not_hide_that_the_outcome_is_unknown() {
    let server = Server::start();
    let mut redis = server.connection();
    let replicas_needed = |redis: &mut redis::Connection, number: u64| {
        redis::cmd("CONFIG").arg("SET").arg("min-replicas-to-write").arg(number).exec(redis).unwrap();
    };
    let proxy = Proxy::start(&server).await;
    let client =
        LockClient::builder().command_timeout(ms(2_000)).retry_timeout(ms(2_000)).connect(&proxy.url()).await.unwrap();
    let name = unique("stock");
    proxy.set(Way::Replies, Flow::Hold);
    let acquire = tokio::spawn(client.lock(&name).try_lock());
    wait_until("the acquire has run", SOON, || exists(&mut redis, &name));
    // From now on the server refuses whatever writes.
    replicas_needed(&mut redis, 1);
    proxy.close_now();
    proxy.set(Way::Replies, Flow::Pass);
    let outcome = timeout(SOON, acquire).await.expect("it hangs").unwrap();
    replicas_needed(&mut redis, 0);
    assert!(matches!(outcome, Err(Error::Unknown { step: Step::Acquire, .. })), "{outcome:?}");
    wait_until_given_back(&mut redis, &name);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unlock_of_unknown_outcome_is_settled_later() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick().retry_timeout(ms(1_000)).connect(&proxy.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    proxy.set(Way::Both, Flow::Hold);
    let outcome = guard.unlock().await;
    assert!(matches!(outcome, Err(Error::Unknown { step: Step::Release, .. })), "{outcome:?}");
    assert!(exists(&mut redis, &name));
    proxy.set(Way::Both, Flow::Pass);
    wait_until_given_back(&mut redis, &name);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guard_that_is_dropped_while_the_server_is_out_of_reach_is_given_back_later() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = quick().connect(&proxy.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    proxy.set(Way::Both, Flow::Hold);
    drop(guard);
    // Long enough for the first connection to be given up.
    sleep(ms(700)).await;
    proxy.set(Way::Both, Flow::Pass);
    wait_until_given_back(&mut redis, &name);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_without_a_network_disturbs_no_other() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let cut_off = quick().retry_timeout(ms(1_000)).connect(&proxy.url()).await.unwrap();
    let healthy = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = cut_off.lock(unique("other")).lock().await.unwrap();
    proxy.set(Way::Both, Flow::Hold);
    let stuck = {
        let lock = cut_off.lock(&name);
        tokio::spawn(async move { lock.lock().await })
    };
    for _ in 0..100 {
        timeout(SOON, healthy.lock(&name).lock()).await.expect("it hangs").unwrap().unlock().await.unwrap();
    }
    let outcome = timeout(SOON, stuck).await.expect("it hangs").unwrap();
    assert!(matches!(outcome, Err(Error::Unknown { step: Step::Acquire, .. })), "{outcome:?}");
    proxy.close_now();
    proxy.set(Way::Both, Flow::Pass);
    timeout(SOON, guard.unlock()).await.expect("it hangs").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_busy_with_a_script_is_waited_out() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    redis::cmd("CONFIG").arg(&["SET", "lua-time-limit", "20"]).exec(&mut redis).unwrap();
    let mut stuck = server.connection();
    let script = std::thread::spawn(move || {
        redis::cmd("EVAL").arg("while true do end").arg(0).exec(&mut stuck).unwrap_err().to_string()
    });
    wait_until("the server is busy", SOON, || {
        redis::cmd("PING").exec(&mut redis).is_err_and(|error| error.code() == Some("BUSY"))
    });
    let waiter = waiting(&client, &name);
    sleep(ms(300)).await;
    assert!(!waiter.is_finished());
    redis::cmd("SCRIPT").arg("KILL").exec(&mut redis).unwrap();
    let guard = served(waiter).await;
    assert!(info(&mut redis, "errorstats", "errorstat_BUSY:", "count=") > 1, "it was never told BUSY");
    assert_eq!(owners(&mut redis, &name), HashMap::from([(owner(&client, guard.holder()), 1)]));
    guard.unlock().await.unwrap();
    assert!(script.join().unwrap().contains("killed"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_loading_its_data_is_waited_out() {
    // Slow enough to be met while it loads: so many microseconds for each key, and it answers now and then in between.
    let mut server = Server::builder().persistent().arg("--key-load-delay", "300").start();
    let client = LockClient::builder().recheck_interval(ms(100)).connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let waiter = waiting(&client, &name);
    let mut fill = redis::pipe();
    for key in 0..10_000 {
        fill.set(format!("filler-{key}"), key).ignore();
    }
    fill.exec(&mut server.connection()).unwrap();
    block_in_place(|| {
        server.kill();
        server.restart();
    });
    guard.unlock().await.unwrap();
    served(waiter).await.unlock().await.unwrap();
    let mut redis = server.connection();
    let refused = info(&mut redis, "commandstats", "cmdstat_evalsha:", "rejected_calls=");
    assert!(refused > 0, "it was never told LOADING");
    assert!(!exists(&mut redis, &name));
}
