//! The simple lock: a string with the owner, shared with programs that write such locks themselves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::bench::{LIMIT, assert_lost, why_lost};
use crate::support::observe::{channels, exists, owner_field, pttl, scripts, sha1_of, watch};
use crate::support::proxy::{Fate, Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until, wait_until_async};
use redis::{Connection, cmd};
use redisson_lock::{
    DeadlockDetection, Error, LockClient, LockClientBuilder, LostReason, MAX_NAME_LEN, Owner,
    OwnerPolicy, ServerErrorKind, SimpleLock,
};
use tokio::time::{sleep, timeout};

/// Far longer than any step takes, far shorter than the leases that no test waits for.
const SOON: Duration = Duration::from_secs(10);
const HOUR: Duration = Duration::from_secs(3_600);

/// Far longer than the 0.1 s in which a waiter sees that another program has released the lock, far
/// shorter than all other reasons for an attempt.
const SEEN: Duration = Duration::from_secs(3);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A server, a client with one simple lock, and an independent connection.
struct Bench {
    server: Server,
    client: LockClient,
    lock: SimpleLock,
    observer: Connection,
    name: String,
}

impl Bench {
    async fn new() -> Self {
        Self::with(LockClient::builder()).await
    }

    async fn with(builder: LockClientBuilder) -> Self {
        let server = Server::start();
        let client = builder.connect(&server.url()).await.unwrap();
        let name = unique("nightly");
        Self {
            lock: client.simple_lock(&name),
            observer: server.connection(),
            server,
            client,
            name,
        }
    }

    async fn other(&self, builder: LockClientBuilder) -> SimpleLock {
        let client = builder.connect(&self.server.url()).await.unwrap();
        client.simple_lock(&self.name)
    }

    fn run(&mut self, words: &[&str]) {
        let mut command = redis::Cmd::new();
        command.arg(words);
        command
            .exec(&mut self.observer)
            .unwrap_or_else(|error| panic!("{words:?}: {error}"));
    }

    /// Sets the lock as another program does, with an expiry or without one.
    fn set(&mut self, value: impl redis::ToRedisArgs, expiry: Option<u64>) {
        let mut command = cmd("SET");
        command.arg(&self.name).arg(value);
        if let Some(expiry) = expiry {
            command.arg("PX").arg(expiry);
        }
        command.exec(&mut self.observer).unwrap();
    }

    fn delete(&mut self) {
        self.run(&["DEL", &self.name.clone()]);
    }

    fn value(&mut self) -> Option<Vec<u8>> {
        cmd("GET")
            .arg(&self.name)
            .query(&mut self.observer)
            .unwrap()
    }

    fn text(&mut self) -> Option<String> {
        self.value().map(|value| String::from_utf8(value).unwrap())
    }

    fn pttl(&mut self) -> i64 {
        pttl(&mut self.observer, &self.name)
    }

    /// Waits until a waiter has subscribed to the release channel.
    fn until_waited_for(&mut self) {
        let channel = format!("simple_lock__channel:{{{}}}", self.name);
        wait_until("the waiter is subscribed", SOON, || {
            let (_, subscribers): (String, usize) = cmd("PUBSUB")
                .arg(&["NUMSUB", &channel])
                .query(&mut self.observer)
                .unwrap();
            subscribers > 0
        });
    }

    fn assert_nothing_left(&mut self) {
        let channels = || channels(&mut self.observer) == 0;
        wait_until("no channel is subscribed", SOON, channels);
        let keys: Vec<String> = cmd("KEYS").arg("*").query(&mut self.observer).unwrap();
        assert_eq!(keys, [""; 0]);
        let stats = self.client.stats();
        assert_eq!((stats.locks_held, stats.requests_waiting), (0, 0));
    }
}

/// The waiters of this client learn of a release by its message only.
fn by_message_only() -> LockClientBuilder {
    LockClient::builder().recheck_interval(HOUR)
}

#[track_caller]
fn assert_refused<T: std::fmt::Debug>(answer: Result<T, Error>, kind: ServerErrorKind, name: &str) {
    let error = answer.unwrap_err();
    let Error::Server {
        lock: Some(lock),
        error: server,
        ..
    } = &error
    else {
        panic!("{error:?}")
    };
    assert_eq!((lock.as_str(), server.kind()), (name, kind), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn held_lock_is_a_string_with_its_owner_and_an_expiry() {
    let mut bench = Bench::new().await;
    let guard = bench.lock.lock().await.unwrap();
    let owner = owner_field(&bench.client, guard.owner());
    assert_eq!(bench.text(), Some(owner));
    assert!((20_000..=30_000).contains(&bench.pttl()));
    assert_eq!(guard.name(), bench.name);
    assert!(!guard.is_lost() && guard.remaining_lease() > ms(20_000));
    // What another program does to acquire it.
    let set: Option<String> = cmd("SET")
        .arg(&[&bench.name, "token", "NX", "PX", "60000"])
        .query(&mut bench.observer)
        .unwrap();
    assert_eq!(set, None);
    guard.unlock().await.unwrap();
    bench.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn each_way_of_locking_holds_the_lock_and_frees_it() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    assert_eq!(lock.run(lock.is_locked()).await, Ok(Ok(true)));
    assert_eq!(lock.try_run(lock.is_locked()).await, Ok(Some(Ok(true))));
    let left = lock.run_with(async |guard| guard.remaining_lease()).await;
    assert!(left.unwrap() > ms(20_000));
    let guard = lock.try_lock_for(SOON).await.unwrap().unwrap();
    assert_eq!(lock.try_run(async {}).await, Ok(None));
    let late = lock.lock().timeout(ms(30)).await;
    let Err(Error::AcquireTimeout { held_by, .. }) = late else {
        panic!("{late:?}")
    };
    assert_eq!(held_by.unwrap().local_owner, Some(guard.owner()));
    drop(guard);
    let free = || !exists(&mut bench.observer, &bench.name);
    wait_until("the dropped guard is released", SOON, free);
    bench.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn each_acquisition_has_an_owner_of_its_own() {
    let mut bench = Bench::new().await;
    let mut owners = Vec::new();
    Owner::scope(async {
        for _ in 0..3 {
            let guard = bench.lock.lock().await.unwrap();
            assert_ne!(Owner::current(), Some(guard.owner()));
            owners.push(guard.owner());
            guard.unlock().await.unwrap();
        }
    })
    .await;
    assert!(owners[0] != owners[1] && owners[1] != owners[2] && owners[0] != owners[2]);
    bench.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn held_lock_is_not_reentered() {
    for policy in [OwnerPolicy::PerAcquisition, OwnerPolicy::PerTask] {
        let bench = Bench::with(LockClient::builder().owner_policy(policy)).await;
        let lock = &bench.lock;
        Owner::scope(async {
            let guard = lock.lock().await.unwrap();
            assert!(lock.try_lock().await.unwrap().is_none());
            let inside = guard.run(lock.try_lock().into_future()).await.unwrap();
            assert!(inside.unwrap().is_none(), "{policy:?}");
            guard.unlock().await.unwrap();
        })
        .await;
        let guard = lock.lock().await.unwrap();
        assert!(lock.try_lock_for(ms(50)).await.unwrap().is_none());
        guard.unlock().await.unwrap();
        let inside = lock.run(async { lock.try_run(async {}).await }).await;
        assert_eq!(inside, Ok(Ok(None)), "{policy:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn second_lock_of_the_same_task_is_reported_as_deadlock() {
    for policy in [OwnerPolicy::PerAcquisition, OwnerPolicy::PerTask] {
        let builder = LockClient::builder()
            .deadlock_detection(DeadlockDetection::Fail)
            .owner_policy(policy);
        let mut bench = Bench::with(builder).await;
        let guard = bench.lock.lock().await.unwrap();
        let answers = [
            timeout(SOON, bench.lock.lock().into_future())
                .await
                .unwrap(),
            guard.run(bench.lock.lock().into_future()).await.unwrap(),
        ];
        for answer in answers {
            let Err(Error::WouldDeadlock { lock, owner, .. }) = answer else {
                panic!("{answer:?}")
            };
            assert_eq!((lock, owner), (bench.name.clone(), guard.owner()));
        }
        // Another task waits, and is granted the lock in its turn.
        let waiting = tokio::spawn(bench.lock.lock().into_future());
        bench.until_waited_for();
        guard.unlock().await.unwrap();
        let guard = timeout(SOON, waiting).await.unwrap().unwrap().unwrap();
        guard.unlock().await.unwrap();
        bench.assert_nothing_left();
    }
}

/// The lock has no owner that code inside `run` could be, so the surrounding one stays.
#[tokio::test(flavor = "multi_thread")]
async fn code_inside_keeps_the_owner_of_the_surrounding_scope() {
    let mut bench = Bench::new().await;
    let (simple, reentrant) = (bench.lock.clone(), bench.client.lock(unique("outer")));
    let holds = reentrant
        .run_with(async |outer| {
            simple
                .run(async {
                    assert_eq!(Owner::current(), Some(outer.owner()));
                    reentrant
                        .run_with(async |inner| inner.hold_count())
                        .await
                        .unwrap()
                })
                .await
                .unwrap()
        })
        .await;
    assert_eq!(holds, Ok(2));
    assert_eq!(simple.run(async { Owner::current() }).await, Ok(None));
    bench.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn code_inside_keeps_the_owner_of_its_task() {
    let builder = LockClient::builder().owner_policy(OwnerPolicy::PerTask);
    let mut bench = Bench::with(builder).await;
    let (simple, reentrant) = (bench.lock.clone(), bench.client.lock(unique("outer")));
    let outer = reentrant.lock().await.unwrap();
    let holds = simple
        .run(reentrant.run_with(async |inner| inner.hold_count()))
        .await;
    assert_eq!(holds, Ok(Ok(2)));
    outer.unlock().await.unwrap();
    bench.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn lock_without_lease_is_renewed() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(ms(900))).await;
    let others: Vec<SimpleLock> = (0..3)
        .map(|_| bench.client.simple_lock(unique("nightly")))
        .collect();
    let guard = bench.lock.lock().await.unwrap();
    let mut guards = Vec::new();
    for other in &others {
        guards.push(other.lock().await.unwrap());
    }
    // The reentrant locks of the client are renewed by another script.
    let reentrant = bench.client.lock(unique("stock")).lock().await.unwrap();
    let value = bench.text();
    sleep(ms(2_500)).await;
    assert_eq!(bench.text(), value);
    assert!((1..=900).contains(&bench.pttl()));
    assert!(!guard.is_lost() && !reentrant.is_lost());
    assert!(guards.iter().all(|guard| !guard.is_lost()));
    assert!(bench.client.stats().renewals >= 10);
    guard.unlock().await.unwrap();
    reentrant.unlock().await.unwrap();
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    bench.assert_nothing_left();
}

/// Only one key among those of a batch is refused.
#[tokio::test(flavor = "multi_thread")]
async fn renewal_loses_only_the_lock_with_a_replaced_key() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(ms(900))).await;
    let other = bench.client.simple_lock(unique("nightly"));
    let kept = other.lock().await.unwrap();
    let guard = bench.lock.lock().await.unwrap();
    let name = bench.name.clone();
    bench.delete();
    bench.run(&["HSET", &name, "a", "1"]);
    assert_eq!(why_lost(&guard).await, LostReason::Gone);
    sleep(ms(900)).await;
    assert!(!kept.is_lost());
    kept.unlock().await.unwrap();
    drop(guard);
    let content: Vec<String> = cmd("HGETALL")
        .arg(&name)
        .query(&mut bench.observer)
        .unwrap();
    assert_eq!(content, ["a", "1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn lock_with_a_lease_is_not_renewed_and_expires_after_its_owner_is_notified() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(ms(300))).await;
    let guard = bench.lock.lock().lease(ms(1_500)).await.unwrap();
    let lost = watch(&guard);
    assert!((500..=1_500).contains(&bench.pttl()));
    let other = bench.other(by_message_only()).await;
    let rival = tokio::spawn(async move {
        let guard = other.lock().await.unwrap();
        (Instant::now(), guard)
    });
    let (lost_at, reason) = lost.await.unwrap();
    let (granted_at, rival) = timeout(SOON, rival).await.unwrap().unwrap();
    assert_eq!(reason, LostReason::Expired);
    assert!(lost_at < granted_at);
    assert_lost(guard.unlock().await, LostReason::Expired);
    let owner = bench.lock.inspect().await.unwrap().unwrap().owner;
    assert!(owner.ends_with(&format!(":{}", rival.owner())), "{owner}");
    rival.unlock().await.unwrap();
    bench.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn owner_cut_off_is_notified_before_the_next_grant() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .watchdog_timeout(ms(1_200))
        .connect(&proxy.url())
        .await
        .unwrap();
    let name = unique("nightly");
    let guard = client.simple_lock(&name).lock().await.unwrap();
    let lost = watch(&guard);
    let other = LockClient::connect(&server.url()).await.unwrap();
    let other = other.simple_lock(&name);
    proxy.set(Way::Both, Flow::Hold);
    let rival = timeout(SOON, other.lock().into_future())
        .await
        .unwrap()
        .unwrap();
    let granted_at = Instant::now();
    let (lost_at, reason) = lost.await.unwrap();
    assert_eq!(reason, LostReason::Expired);
    assert!(lost_at < granted_at);
    // The release of the owner that lost the lock arrives now, and frees nothing.
    drop(guard);
    proxy.set(Way::Both, Flow::Pass);
    wait_until_async("the client is connected again", SOON, || async {
        client.simple_lock("probe").is_locked().await.is_ok()
    })
    .await;
    sleep(ms(300)).await;
    assert!(!rival.is_lost());
    assert!(exists(&mut server.connection(), &name));
    rival.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn loss_is_reported_and_the_value_of_another_owner_stays() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(ms(900))).await;
    let lock = bench.lock.clone();
    for has_new_owner in [false, true] {
        let guard = lock.lock().await.unwrap();
        let ran = guard.run(std::future::pending::<()>());
        let took = async {
            bench.delete();
            if has_new_owner {
                bench.set("token", Some(60_000));
            }
        };
        let (ran, ()) = tokio::join!(ran, took);
        assert_lost(ran, LostReason::Gone);
        assert!(guard.is_lost());
        assert_lost(guard.unlock().await, LostReason::Gone);
        // A release that nothing renews finds it out.
        if has_new_owner {
            assert_eq!(bench.text().as_deref(), Some("token"));
            bench.delete();
        }
        let guard = lock.lock().lease(HOUR).await.unwrap();
        bench.set("token", Some(60_000));
        assert_lost(guard.unlock().await, LostReason::Gone);
        assert_eq!(bench.text().as_deref(), Some("token"));
        bench.delete();
    }
    bench.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_of_one_and_of_another_client_are_woken_by_the_message() {
    let mut bench = Bench::with(by_message_only()).await;
    let other = bench.other(by_message_only()).await;
    for waiting in [bench.lock.clone(), other] {
        for is_dropped in [false, true] {
            let guard = bench.lock.lock().await.unwrap();
            let waiter = tokio::spawn(waiting.lock().into_future());
            bench.until_waited_for();
            let begun = Instant::now();
            if is_dropped {
                drop(guard);
            } else {
                guard.unlock().await.unwrap();
            }
            let guard = timeout(SOON, waiter).await.expect("woken");
            assert!(begun.elapsed() < SOON);
            guard.unwrap().unwrap().unlock().await.unwrap();
        }
    }
    bench.assert_nothing_left();
}

/// While an owner of this library holds the lock, its waiters do not look again and again.
#[tokio::test(flavor = "multi_thread")]
async fn waiter_for_an_owner_of_this_library_sends_no_more_attempts() {
    let mut bench = Bench::new().await;
    let other = bench.other(LockClient::builder()).await;
    let guard = bench.lock.lock().await.unwrap();
    let waiter = tokio::spawn(other.lock().into_future());
    bench.until_waited_for();
    // The one after the subscription was confirmed.
    sleep(ms(500)).await;
    let before = scripts(&mut bench.observer);
    sleep(ms(1_500)).await;
    assert_eq!(scripts(&mut bench.observer), before);
    guard.unlock().await.unwrap();
    let guard = timeout(SOON, waiter).await.unwrap().unwrap().unwrap();
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn release_of_another_program_is_seen_without_a_message() {
    let mut bench = Bench::with(by_message_only()).await;
    for (value, expiry) in [
        ("token", Some(60_000)),
        ("token", None),
        ("", Some(60_000)),
        ("6f1b5cd07c404f0a9e0d2b7a3c1d9e11", Some(60_000)),
    ] {
        bench.set(value, expiry);
        assert!(bench.lock.try_lock().await.unwrap().is_none());
        let waiter = tokio::spawn(bench.lock.lock().into_future());
        bench.until_waited_for();
        sleep(ms(350)).await;
        assert_eq!(bench.text().as_deref(), Some(value));
        assert_eq!(bench.pttl() == -1, expiry.is_none());
        bench.delete();
        let begun = Instant::now();
        let guard = timeout(SOON, waiter).await.expect("the release is seen");
        assert!(begun.elapsed() < SEEN, "{:?}", begun.elapsed());
        guard.unwrap().unwrap().unlock().await.unwrap();
    }
    bench.assert_nothing_left();
}

/// The more locks of other programs a process waits for, the more rarely it looks.
#[tokio::test(flavor = "multi_thread")]
async fn many_locks_of_other_programs_cost_a_bounded_number_of_attempts() {
    const LOCKS: usize = 300;
    let mut bench = Bench::with(by_message_only()).await;
    let names: Vec<String> = (0..LOCKS).map(|_| unique("nightly")).collect();
    let mut waiters = Vec::new();
    for name in &names {
        bench.run(&["SET", name, "token"]);
        let lock = bench.client.simple_lock(name);
        waiters.push(tokio::spawn(async move { lock.lock().await.map(drop) }));
    }
    wait_until("all are waited for", SOON, || {
        channels(&mut bench.observer) == LOCKS
    });
    sleep(ms(500)).await;
    let (before, begun) = (scripts(&mut bench.observer), Instant::now());
    sleep(ms(2_000)).await;
    let calls = (scripts(&mut bench.observer) - before) as f64 / begun.elapsed().as_secs_f64();
    // One look at each lock in 0.24 to 0.3 s.
    assert!(calls > 100.0 && calls < 1_500.0, "{calls} calls a second");
    for name in &names {
        bench.run(&["DEL", name]);
    }
    for waiter in waiters {
        timeout(SOON, waiter).await.unwrap().unwrap().unwrap();
    }
    let free = || !names.iter().any(|name| exists(&mut bench.observer, name));
    wait_until("all are released", SOON, free);
    bench.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn expiry_of_another_programs_lock_is_seen() {
    let mut bench = Bench::with(by_message_only()).await;
    bench.set("token", Some(700));
    let begun = Instant::now();
    let guard = timeout(SOON, bench.lock.lock().into_future()).await;
    let took = begun.elapsed();
    assert!(took > ms(500) && took < ms(700) + SEEN, "{took:?}");
    guard.unwrap().unwrap().unlock().await.unwrap();
    bench.assert_nothing_left();
}

/// A waiter looks again and again only while another program holds the lock.
#[tokio::test(flavor = "multi_thread")]
async fn waiter_follows_changes_between_own_and_other_owners() {
    // Otherwise the waiter may get the lock before the server says that another one has it.
    let builder = by_message_only().passing_time(Duration::ZERO);
    let mut bench = Bench::with(builder).await;
    let channel = format!("simple_lock__channel:{{{}}}", bench.name);
    bench.set("token", Some(60_000));
    let waiter = tokio::spawn(bench.lock.lock().into_future());
    bench.until_waited_for();
    // An owner of this library follows the other program: it will publish its release.
    bench.set("6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e11:52", Some(60_000));
    sleep(ms(500)).await;
    let before = scripts(&mut bench.observer);
    sleep(ms(700)).await;
    assert_eq!(scripts(&mut bench.observer), before);
    bench.delete();
    bench.run(&["PUBLISH", &channel, "0"]);
    let guard = timeout(SOON, waiter).await.expect("the message wakes it");
    let guard = guard.unwrap().unwrap();

    // Another program takes the lock away from an owner of this library.
    let waiter = tokio::spawn(bench.lock.lock().into_future());
    bench.until_waited_for();
    bench.set("token", Some(60_000));
    assert_lost(guard.unlock().await, LostReason::Gone);
    bench.run(&["PUBLISH", &channel, "0"]);
    sleep(ms(300)).await;
    assert!(!waiter.is_finished());
    bench.delete();
    let begun = Instant::now();
    let guard = timeout(SOON, waiter).await.expect("the release is seen");
    assert!(begun.elapsed() < SEEN, "{:?}", begun.elapsed());
    guard.unwrap().unwrap().unlock().await.unwrap();
    bench.assert_nothing_left();
}

/// The other side acquires by `SET NX PX` and releases by compare-and-delete, as redis-py does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn critical_sections_of_both_sides_never_overlap() {
    const ROUNDS: usize = 30;
    const RELEASE: &str = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0";
    let bench = Bench::new().await;
    let busy = Arc::new(AtomicBool::new(false));
    let mut tasks = Vec::new();
    for client in 0..2 {
        let lock = match client {
            0 => bench.lock.clone(),
            _ => bench.other(LockClient::builder()).await,
        };
        for _ in 0..2 {
            let (lock, busy) = (lock.clone(), Arc::clone(&busy));
            tasks.push(tokio::spawn(async move {
                for _ in 0..ROUNDS {
                    lock.run(async {
                        assert!(!busy.swap(true, Ordering::AcqRel), "two are inside");
                        tokio::task::yield_now().await;
                        busy.store(false, Ordering::Release);
                    })
                    .await
                    .unwrap();
                }
            }));
        }
    }
    for token in ["one", "two"] {
        let (mut redis, name) = (bench.server.connection(), bench.name.clone());
        let busy = Arc::clone(&busy);
        tasks.push(tokio::task::spawn_blocking(move || {
            for _ in 0..ROUNDS / 3 {
                wait_until("the token is set", LIMIT, || {
                    cmd("SET")
                        .arg(&[&name, token, "NX", "PX", "60000"])
                        .query::<Option<String>>(&mut redis)
                        .unwrap()
                        .is_some()
                });
                assert!(!busy.swap(true, Ordering::AcqRel), "two are inside");
                std::thread::yield_now();
                busy.store(false, Ordering::Release);
                let released: i64 = cmd("EVAL")
                    .arg(&[RELEASE, "1", &name, token])
                    .query(&mut redis)
                    .unwrap();
                assert_eq!(released, 1);
            }
        }));
    }
    for task in tasks {
        timeout(2 * LIMIT, task)
            .await
            .expect("the task ends")
            .unwrap();
    }
    assert_eq!(bench.lock.is_locked().await, Ok(false));
}

#[tokio::test(flavor = "multi_thread")]
async fn key_of_another_type_is_refused_and_stays() {
    let mut bench = Bench::new().await;
    let (lock, name) = (bench.lock.clone(), bench.name.clone());
    for command in [
        &["HSET", &name, "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e11:7", "1"][..],
        &["RPUSH", &name, "1"],
        &["ZADD", &name, "1", "a"],
    ] {
        bench.run(command);
        let dump =
            |redis: &mut Connection| -> Vec<u8> { cmd("DUMP").arg(&name).query(redis).unwrap() };
        let before = dump(&mut bench.observer);
        let answer = timeout(SOON, lock.lock().into_future()).await.unwrap();
        assert_refused(answer, ServerErrorKind::WrongType, &name);
        assert_refused(lock.try_lock().await, ServerErrorKind::WrongType, &name);
        let answer = lock.try_lock_for(HOUR).await;
        assert_refused(answer, ServerErrorKind::WrongType, &name);
        assert_refused(lock.inspect().await, ServerErrorKind::WrongType, &name);
        assert_refused(lock.force_unlock().await, ServerErrorKind::WrongType, &name);
        assert_eq!(lock.is_locked().await, Ok(true));
        assert_eq!(dump(&mut bench.observer), before);
        bench.delete();
    }
    lock.run(async {}).await.unwrap();
    bench.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn reentrant_and_simple_lock_of_one_name_refuse_each_other() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(ms(900))).await;
    let (simple, name) = (bench.lock.clone(), bench.name.clone());
    let (reentrant, fenced) = (bench.client.lock(&name), bench.client.fenced_lock(&name));
    let wrong = ServerErrorKind::WrongType;
    let guard = simple.lock().await.unwrap();
    assert_refused(reentrant.lock().await, wrong, &name);
    assert_refused(fenced.lock().await, wrong, &name);
    assert_refused(reentrant.force_unlock().await, wrong, &name);
    sleep(ms(1_200)).await;
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();

    let guard = reentrant.lock().await.unwrap();
    assert_refused(simple.lock().await, wrong, &name);
    assert_refused(simple.force_unlock().await, wrong, &name);
    sleep(ms(1_200)).await;
    assert!(!guard.is_lost());
    // A waiter of the other kind does not take part in the queue.
    let waiter = tokio::spawn(reentrant.lock().into_future());
    assert_refused(simple.lock().await, wrong, &name);
    guard.unlock().await.unwrap();
    let guard = timeout(SOON, waiter).await.unwrap().unwrap().unwrap();
    guard.unlock().await.unwrap();
    simple.run(async {}).await.unwrap();
    bench.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn inspection_shows_own_and_other_owners() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    assert_eq!(
        (lock.inspect().await, lock.is_locked().await),
        (Ok(None), Ok(false))
    );
    let guard = lock.lock().await.unwrap();
    let info = lock.inspect().await.unwrap().unwrap();
    assert_eq!(info.owner, owner_field(&bench.client, guard.owner()));
    assert_eq!(
        (info.local_owner, info.hold_count),
        (Some(guard.owner()), 1)
    );
    assert!(info.ttl.unwrap() > ms(20_000));
    let theirs = bench.other(LockClient::builder()).await;
    let info = theirs.inspect().await.unwrap().unwrap();
    assert_eq!(info.local_owner, None, "an owner of another client");
    guard.unlock().await.unwrap();
    for (value, shown) in [
        (&b"token"[..], "token"),
        (b"", ""),
        (b"\xff\x00\r\n", "\u{fffd}\0\r\n"),
    ] {
        bench.set(value, None);
        let info = lock.inspect().await.unwrap().unwrap();
        assert_eq!((info.owner.as_str(), info.hold_count), (shown, 1));
        assert_eq!((info.local_owner, info.ttl), (None, None));
        assert!(!info.to_string().contains('\n'));
        assert_eq!(lock.is_locked().await, Ok(true));
        assert_eq!(bench.value().as_deref(), Some(value), "it was only read");
        assert_eq!(lock.force_unlock().await, Ok(true));
        assert_eq!(lock.force_unlock().await, Ok(false));
        assert_eq!(bench.value(), None);
    }
    bench.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn force_unlock_notifies_the_owner_and_wakes_a_waiter() {
    let mut bench = Bench::with(by_message_only().watchdog_timeout(ms(3_000))).await;
    let lock = bench.lock.clone();
    let other = bench.other(by_message_only()).await;
    for freeing in [lock.clone(), other] {
        let guard = lock.lock().await.unwrap();
        let waiter = tokio::spawn(lock.lock().into_future());
        bench.until_waited_for();
        assert_eq!(freeing.force_unlock().await, Ok(true));
        let next = timeout(SOON, waiter).await.unwrap().unwrap().unwrap();
        let reason = why_lost(&guard).await;
        assert!(
            matches!(reason, LostReason::ForceUnlocked | LostReason::Gone),
            "{reason:?}"
        );
        assert_lost(guard.unlock().await, reason);
        assert!(!next.is_lost());
        next.unlock().await.unwrap();
    }
    // Another program's lock, for which a waiter of ours waits.
    bench.set("token", None);
    let waiter = tokio::spawn(lock.lock().into_future());
    bench.until_waited_for();
    assert_eq!(lock.force_unlock().await, Ok(true));
    let guard = timeout(SOON, waiter).await.unwrap().unwrap().unwrap();
    guard.unlock().await.unwrap();
    bench.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_replies_leave_one_owner_and_free_the_lock() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .watchdog_timeout(HOUR)
        .command_timeout(ms(200))
        .connect(&proxy.url())
        .await
        .unwrap();
    let name = unique("nightly");
    let lock = client.simple_lock(&name);
    for fate in [Fate::Swallow, Fate::Close, Fate::CloseAt(5)] {
        let applied = proxy.applied();
        proxy.next_reply_to(&[sha1_of("simple_acquire"), &name], fate);
        let guard = lock.lock().await.unwrap();
        assert_eq!(proxy.applied(), applied + 1);
        let value: String = cmd("GET").arg(&name).query(&mut redis).unwrap();
        assert_eq!(value, owner_field(&client, guard.owner()));
        assert!(lock.try_lock().await.unwrap().is_none());
        proxy.next_reply_to(&[sha1_of("simple_release"), &name], fate);
        guard.unlock().await.unwrap();
        assert_eq!(proxy.applied(), applied + 2);
        assert!(!exists(&mut redis, &name), "{fate:?}");
        proxy.next_reply_to(&[sha1_of("simple_inspect"), &name], fate);
        assert_eq!(lock.inspect().await, Ok(None));
        // Each call of a force unlock in turn: the look, and the one that frees the lock.
        for script in ["simple_inspect", "simple_release"] {
            let guard = lock.lock().await.unwrap();
            proxy.next_reply_to(&[sha1_of(script), &name], fate);
            assert_eq!(lock.force_unlock().await, Ok(true));
            assert!(guard.is_lost());
        }
        assert!(!exists(&mut redis, &name), "{fate:?}");
    }
}

/// A reply to the release is lost, and another owner acquires the lock before the repeat.
#[tokio::test(flavor = "multi_thread")]
async fn repeated_release_keeps_the_next_owner() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let builder = LockClient::builder().command_timeout(ms(500));
    let client = builder.connect(&proxy.url()).await.unwrap();
    let name = unique("nightly");
    let guard = client.simple_lock(&name).lock().await.unwrap();
    proxy.next_reply_to(&[sha1_of("simple_release"), &name], Fate::Swallow);
    let unlocked = tokio::spawn(guard.unlock());
    wait_until("the lock is free", SOON, || !exists(&mut redis, &name));
    cmd("SET").arg(&[&name, "token"]).exec(&mut redis).unwrap();
    assert_eq!(timeout(SOON, unlocked).await.unwrap().unwrap(), Ok(()));
    assert_eq!(
        cmd("GET").arg(&name).query(&mut redis),
        Ok("token".to_owned())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn acquire_with_unknown_outcome_leaves_nothing() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .command_timeout(ms(200))
        .retry_timeout(ms(0))
        .connect(&proxy.url())
        .await
        .unwrap();
    let lock = client.simple_lock(unique("nightly"));
    proxy.next_reply_to(&[sha1_of("simple_acquire"), lock.name()], Fate::Close);
    let answer = lock.lock().await;
    assert!(
        matches!(answer, Err(Error::OutcomeUnknown { .. })),
        "{answer:?}"
    );
    wait_until("the lock is released", SOON, || {
        !exists(&mut redis, lock.name())
    });
    lock.run(async {}).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_requests_and_waiters_leave_nothing() {
    let mut bench = Bench::with(by_message_only()).await;
    let lock = bench.lock.clone();
    for polls in 0..40_u32 {
        let mut request = Box::pin(lock.lock().into_future());
        for _ in 0..polls % 5 {
            if futures::poll!(&mut request).is_ready() {
                break;
            }
            sleep(Duration::from_micros(u64::from(polls) * 25)).await;
        }
        drop(request);
    }
    let free = || !exists(&mut bench.observer, &bench.name);
    wait_until("the lock is free", SOON, free);
    // The waiter that the message would wake is dropped, and the next one gets the lock.
    let guard = lock.lock().await.unwrap();
    let waiters: Vec<_> = (0..3)
        .map(|_| tokio::spawn(lock.run(tokio::task::yield_now())))
        .collect();
    bench.until_waited_for();
    let mut waiters = waiters.into_iter();
    guard.unlock().await.unwrap();
    waiters.next().unwrap().abort();
    for waiter in waiters {
        timeout(SOON, waiter).await.unwrap().unwrap().unwrap();
    }
    let free = || !exists(&mut bench.observer, &bench.name);
    wait_until("the lock is free", SOON, free);
    bench.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_loses_guards_and_ends_waiters() {
    let mut bench = Bench::new().await;
    let guard = bench.lock.lock().await.unwrap();
    let waiter = tokio::spawn(bench.lock.lock().into_future());
    bench.until_waited_for();
    let client = bench.client.clone();
    let shutdown = tokio::spawn(async move { client.shutdown().await });
    assert_eq!(why_lost(&guard).await, LostReason::Shutdown);
    let waited = timeout(SOON, waiter).await.unwrap().unwrap();
    assert!(matches!(waited, Err(Error::Closed)), "{waited:?}");
    drop(guard);
    timeout(LIMIT, shutdown).await.unwrap().unwrap().unwrap();
    let free = || !exists(&mut bench.observer, &bench.name);
    wait_until("the dropped guard is released", SOON, free);
    let answer = bench.lock.try_lock().await;
    assert!(matches!(answer, Err(Error::Closed)), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_used_unchanged_and_the_channel_follows_the_brace_rule() {
    let mut bench = Bench::with(by_message_only()).await;
    for (name, channel) in [
        ("job", "simple_lock__channel:{job}"),
        ("job:{7}", "simple_lock__channel:job:{7}"),
        ("a\r\nb\0 🧀", "simple_lock__channel:{a\r\nb\0 🧀}"),
    ] {
        let lock = bench.client.simple_lock(name);
        let guard = lock.lock().await.unwrap();
        assert!(exists(&mut bench.observer, name));
        let waiter = tokio::spawn(lock.lock().into_future());
        wait_until("the waiter is subscribed", SOON, || {
            let channels: Vec<String> = cmd("PUBSUB")
                .arg("CHANNELS")
                .query(&mut bench.observer)
                .unwrap();
            channels == [channel]
        });
        guard.unlock().await.unwrap();
        let guard = timeout(SOON, waiter).await.unwrap().unwrap().unwrap();
        guard.unlock().await.unwrap();
        wait_until("no channel is subscribed", SOON, || {
            channels(&mut bench.observer) == 0
        });
    }
    let long = "x".repeat(MAX_NAME_LEN + 1);
    for name in ["", &long] {
        let lock = bench.client.simple_lock(name);
        let answers = [
            lock.lock().await.map(drop),
            lock.try_lock().await.map(drop),
            lock.force_unlock().await.map(drop),
            lock.inspect().await.map(drop),
            lock.run(async {}).await,
        ];
        for answer in answers {
            assert!(
                matches!(answer, Err(Error::InvalidName { .. })),
                "{answer:?}"
            );
        }
    }
    bench.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn server_without_memory_refuses_a_free_lock_and_answers_about_a_held_one() {
    let builder = LockClient::builder().retry_timeout(ms(100));
    let mut bench = Bench::with(builder).await;
    let (lock, name) = (bench.lock.clone(), bench.name.clone());
    let held = bench.client.simple_lock(unique("nightly"));
    let guard = held.lock().await.unwrap();
    bench.run(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_refused(lock.lock().await, ServerErrorKind::OutOfMemory, &name);
    assert_refused(lock.try_lock().await, ServerErrorKind::OutOfMemory, &name);
    // As the reentrant lock: another owner holds it, which needs no memory to say.
    assert!(held.try_lock().await.unwrap().is_none());
    assert!(held.try_lock_for(ms(300)).await.unwrap().is_none());
    guard.unlock().await.unwrap();
    assert_eq!(held.is_locked().await, Ok(false));
    bench.run(&["CONFIG", "SET", "maxmemory", "0"]);
    lock.run(async {}).await.unwrap();
    bench.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_publish_still_frees_the_lock() {
    let mut bench = Bench::new().await;
    let rules = [
        "SETUSER", "mute", "on", ">secret", "~*", "&*", "+@all", "-publish",
    ];
    cmd("ACL").arg(&rules).exec(&mut bench.observer).unwrap();
    let url = bench
        .server
        .url()
        .replace("redis://", "redis://mute:secret@");
    let mute = LockClient::connect(&url).await.unwrap();
    let lock = mute.simple_lock(&bench.name);
    lock.lock().await.unwrap().unlock().await.unwrap();
    assert_eq!(bench.value(), None);
    bench.set("token", None);
    assert_eq!(lock.force_unlock().await, Ok(true));
    bench.assert_nothing_left();
}
