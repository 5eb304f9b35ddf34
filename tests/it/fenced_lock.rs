//! The fenced lock: its tokens, the counter that they come from, and what it shares with the
//! reentrant lock of the same name.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::bench::{LIMIT, assert_lost, why_lost};
use crate::support::observe::{exists, owner_counts, owner_field, pttl, sha1_of, subscribers};
use crate::support::proxy::{Fate, Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until};
use redis::{Connection, cmd};
use redisson_lock::{
    ClientId, Error, Fenced, FencedLock, LockClient, LockClientBuilder, LockGuard, LostReason,
    Owner, OwnerExt, OwnerPolicy, ServerErrorKind,
};
use tokio::time::timeout;

/// Far longer than any step takes, far shorter than the leases that no test waits for.
const SOON: Duration = Duration::from_secs(10);
const HOUR: Duration = Duration::from_secs(3_600);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A server, a client with one fenced lock, and an independent connection.
struct Bench {
    server: Server,
    client: LockClient,
    lock: FencedLock,
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
        let name = unique("report");
        Self {
            lock: client.fenced_lock(&name),
            observer: server.connection(),
            server,
            client,
            name,
        }
    }

    async fn other_client(&self) -> LockClient {
        LockClient::connect(&self.server.url()).await.unwrap()
    }

    fn run(&mut self, words: &[&str]) {
        let mut command = redis::Cmd::new();
        command.arg(words);
        command
            .exec(&mut self.observer)
            .unwrap_or_else(|error| panic!("{words:?}: {error}"));
    }

    fn counter(&mut self) -> Option<String> {
        counter(&mut self.observer, &self.name)
    }

    fn set_counter(&mut self, value: impl ToString) {
        let key = counter_of(&self.name);
        self.run(&["SET", &key, &value.to_string()]);
    }

    fn owners(&mut self) -> HashMap<String, i64> {
        owner_counts(&mut self.observer, &self.name)
    }

    fn keys(&mut self) -> Vec<String> {
        cmd("KEYS").arg("*").query(&mut self.observer).unwrap()
    }
}

fn counter_of(name: &str) -> String {
    format!("redisson_lock_token:{{{name}}}")
}

fn counter(redis: &mut Connection, name: &str) -> Option<String> {
    cmd("GET").arg(counter_of(name)).query(redis).unwrap()
}

/// Acquires the lock, releases it, and returns the token.
async fn next_token(lock: &FencedLock) -> i64 {
    lock.run_with(async |guard| guard.token()).await.unwrap()
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
async fn each_tenure_has_the_next_token() {
    let mut bench = Bench::new().await;
    let other = bench.other_client().await.fenced_lock(&bench.name);
    for token in 1..=6 {
        let lock = if token % 3 == 0 { &other } else { &bench.lock };
        let guard = lock.lock().await.unwrap();
        assert_eq!(guard.token(), token);
        assert_eq!(bench.counter(), Some(token.to_string()));
        guard.unlock().await.unwrap();
    }
    assert_eq!(bench.keys(), [counter_of(&bench.name)]);
    let key = counter_of(&bench.name);
    assert_eq!(
        pttl(&mut bench.observer, &key),
        -1,
        "the counter has an expiry"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn each_way_of_locking_has_a_token() {
    let bench = Bench::new().await;
    let lock = &bench.lock;
    assert_eq!(lock.run(async { 7 }).await, Ok(7));
    assert_eq!(lock.run_with(async |guard| guard.token()).await, Ok(2));
    assert_eq!(lock.try_run(async {}).await, Ok(Some(())));
    let guard = lock.try_lock().await.unwrap().unwrap();
    assert_eq!(guard.token(), 4);
    assert!(lock.try_lock_for(ms(10)).await.unwrap().is_none());
    guard.unlock().await.unwrap();
    let guard = lock.try_lock_for(SOON).lease(HOUR).await.unwrap().unwrap();
    assert_eq!(guard.token(), 5, "an attempt without a grant raised it");
    guard.unlock().await.unwrap();
    let token = lock.try_lock().run_with(async |guard| guard.token()).await;
    assert_eq!(token, Ok(Some(6)));
}

#[tokio::test(flavor = "multi_thread")]
async fn reentry_has_the_token_of_its_tenure() {
    let mut bench = Bench::new().await;
    let (lock, client) = (bench.lock.clone(), bench.client.clone());
    let outer = lock.lock().await.unwrap();
    let inner = outer.run(async { lock.lock().await.unwrap() }).await;
    let inner = inner.unwrap();
    assert_eq!((outer.token(), inner.token()), (1, 1));
    assert_eq!(bench.counter().as_deref(), Some("1"));
    let field = owner_field(&client, outer.owner());
    assert_eq!(bench.owners(), HashMap::from([(field, 2)]));
    // The tenure continues with the inner hold.
    outer.unlock().await.unwrap();
    let again = inner.run(async { lock.lock().await.unwrap() }).await;
    let again = again.unwrap();
    assert_eq!((again.token(), again.hold_count()), (1, 2));
    again.unlock().await.unwrap();
    inner.unlock().await.unwrap();
    assert_eq!(next_token(&lock).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn first_fenced_reentry_under_reentrant_hold_takes_a_token() {
    let mut bench = Bench::new().await;
    let (lock, reentrant) = (bench.lock.clone(), bench.client.lock(&bench.name));
    assert_eq!(next_token(&lock).await, 1);
    let outer = reentrant.lock().await.unwrap();
    assert_eq!(bench.counter().as_deref(), Some("1"));
    let tokens = outer
        .run(async {
            let first = lock.lock().await.unwrap();
            let second = lock.lock().await.unwrap();
            let tokens = (first.token(), second.token());
            second.unlock().await.unwrap();
            first.unlock().await.unwrap();
            (tokens, next_token(&lock).await)
        })
        .await;
    assert_eq!(tokens, Ok(((2, 2), 2)), "one tenure");
    outer.unlock().await.unwrap();
    assert_eq!(next_token(&lock).await, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn reentrant_reentry_under_fenced_hold_keeps_the_token() {
    let mut bench = Bench::new().await;
    let (lock, reentrant) = (bench.lock.clone(), bench.client.lock(&bench.name));
    let outer = lock.lock().await.unwrap();
    let token = outer
        .run(reentrant.run_with(async |inner| {
            assert_eq!(inner.hold_count(), 2);
            lock.run_with(async |innermost| innermost.token()).await
        }))
        .await;
    assert_eq!(token, Ok(Ok(Ok(1))));
    assert_eq!((outer.token(), bench.counter().as_deref()), (1, Some("1")));
    outer.unlock().await.unwrap();
    assert!(!exists(&mut bench.observer, &bench.name));
}

/// The reentrant hold outlives the fenced one, and is released by the lock of the other kind.
#[tokio::test(flavor = "multi_thread")]
async fn detached_hold_is_released_by_either_kind() {
    let bench = Bench::new().await;
    let (lock, reentrant) = (&bench.lock, bench.client.lock(&bench.name));
    let owner = lock.lock().await.unwrap().detach();
    assert_eq!(lock.hold_count_of(owner).await, Ok(1));
    assert_eq!(reentrant.is_held_by(owner).await, Ok(true));
    reentrant.unlock().with_owner(owner).await.unwrap();
    assert_eq!(lock.is_locked().await, Ok(false));
    let owner = reentrant.lock().await.unwrap().detach();
    lock.unlock().with_owner(owner).await.unwrap();
    let again = lock.unlock().with_owner(owner).await;
    assert!(matches!(again, Err(Error::NotHeld { .. })), "{again:?}");
    assert_eq!(next_token(lock).await, 2);
}

/// The waiters do not re-check: only messages wake them.
#[tokio::test(flavor = "multi_thread")]
async fn fenced_and_reentrant_lock_of_one_name_exclude_and_wake_each_other() {
    let mut bench = Bench::with(LockClient::builder().recheck_interval(HOUR)).await;
    let builder = LockClient::builder().recheck_interval(HOUR);
    let other = builder.connect(&bench.server.url()).await.unwrap();
    for waiting in [bench.client.clone(), other] {
        let (fenced, reentrant) = (waiting.fenced_lock(&bench.name), waiting.lock(&bench.name));
        let guard = bench.lock.lock().await.unwrap();
        assert!(reentrant.try_lock().await.unwrap().is_none());
        let waiter = tokio::spawn(reentrant.lock().into_future());
        wait_until("the waiter is subscribed", SOON, || {
            subscribers(&mut bench.observer, &bench.name) > 0
        });
        guard.unlock().await.unwrap();
        let guard = timeout(SOON, waiter)
            .await
            .expect("woken")
            .unwrap()
            .unwrap();

        assert!(bench.lock.try_lock().await.unwrap().is_none());
        let waiter = tokio::spawn(fenced.lock().into_future());
        wait_until("the waiter is subscribed", SOON, || {
            subscribers(&mut bench.observer, &bench.name) > 0
        });
        guard.unlock().await.unwrap();
        let guard = timeout(SOON, waiter)
            .await
            .expect("woken")
            .unwrap()
            .unwrap();
        assert!(guard.token() > 1);
        guard.unlock().await.unwrap();
    }
}

/// How a tenure ends.
#[derive(Debug, Clone, Copy)]
enum End {
    Unlocked,
    Dropped,
    Expired,
    ForceUnlocked,
    ForceUnlockedElsewhere,
    Deleted,
    Stolen,
}

#[tokio::test(flavor = "multi_thread")]
async fn token_after_each_end_of_a_tenure_is_greater() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(ms(600))).await;
    let other = bench.other_client().await.fenced_lock(&bench.name);
    let mut last = 0;
    for end in [
        End::Unlocked,
        End::Dropped,
        End::Expired,
        End::ForceUnlocked,
        End::ForceUnlockedElsewhere,
        End::Deleted,
        End::Stolen,
    ] {
        let lock = bench.lock.clone();
        let request = match end {
            End::Expired => lock.lock().lease(ms(100)),
            _ => lock.lock(),
        };
        let guard = request.await.unwrap();
        assert!(guard.token() > last, "{end:?}");
        last = guard.token();
        let mut kept = None;
        match end {
            End::Unlocked => guard.unlock().await.unwrap(),
            End::Dropped => drop(guard),
            End::Expired => {
                assert_eq!(why_lost(&guard).await, LostReason::Expired);
                kept = Some(guard);
            }
            End::ForceUnlocked => {
                assert_eq!(lock.force_unlock().await, Ok(true));
                assert_lost(guard.unlock().await, LostReason::ForceUnlocked);
            }
            End::ForceUnlockedElsewhere => {
                assert_eq!(other.force_unlock().await, Ok(true));
                kept = Some(guard);
            }
            End::Deleted => {
                bench.run(&["DEL", &bench.name.clone()]);
                kept = Some(guard);
            }
            End::Stolen => {
                bench.run(&["DEL", &bench.name.clone()]);
                assert_eq!(next_token(&other).await, last + 1);
                kept = Some(guard);
            }
        }
        let token = next_token(&other).await;
        assert!(token > last, "{end:?}: {token} after {last}");
        if let Some(guard) = kept {
            why_lost(&guard).await;
            assert_eq!(guard.token(), last, "{end:?}: a lost guard keeps its token");
        }
        last = token;
    }
}

/// The client does not know yet that its lock is gone when it locks again.
#[tokio::test(flavor = "multi_thread")]
async fn reentry_after_unseen_loss_has_a_new_token() {
    let mut bench = Bench::new().await;
    let other = bench.other_client().await.fenced_lock(&bench.name);
    let (lock, name) = (bench.lock.clone(), bench.name.clone());
    for is_granted_elsewhere in [false, true] {
        let outer = lock.lock().await.unwrap();
        bench.run(&["DEL", &name]);
        let mut last = outer.token();
        if is_granted_elsewhere {
            last = next_token(&other).await;
        }
        assert!(!outer.is_lost(), "this test has been slower than a renewal");
        let inner = lock.lock().with_owner(outer.owner()).await.unwrap();
        assert!(outer.is_lost());
        assert_eq!(inner.token(), last + 1);
        assert_eq!(inner.hold_count(), 1);
        assert_lost(outer.unlock().await, LostReason::Gone);
        inner.unlock().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn counter_that_cannot_be_raised_refuses_the_lock_and_stays() {
    let mut bench = Bench::new().await;
    let (lock, name, key) = (
        bench.lock.clone(),
        bench.name.clone(),
        counter_of(&bench.name),
    );
    let limit = i64::MAX.to_string();
    let cases: [(&[&str], ServerErrorKind); 6] = [
        (&["HSET", &key, "a", "1"], ServerErrorKind::WrongType),
        (&["RPUSH", &key, "1"], ServerErrorKind::WrongType),
        (&["SET", &key, "many"], ServerErrorKind::Other),
        (&["SET", &key, ""], ServerErrorKind::Other),
        (&["SET", &key, "1.5"], ServerErrorKind::Other),
        (&["SET", &key, &limit], ServerErrorKind::Other),
    ];
    for (command, kind) in cases {
        bench.run(&["DEL", &key]);
        bench.run(command);
        let dump =
            |redis: &mut Connection| -> Vec<u8> { cmd("DUMP").arg(&key).query(redis).unwrap() };
        let before = dump(&mut bench.observer);
        assert_refused(lock.lock().await, kind, &name);
        assert_refused(lock.try_lock().await, kind, &name);
        assert!(!exists(&mut bench.observer, &name), "{command:?}");
        assert_eq!(dump(&mut bench.observer), before, "{command:?}");
        // The reentrant lock of that name does not need the counter, nor does what it holds suffer.
        let guard = bench.client.lock(&name).lock().await.unwrap();
        assert_refused(
            guard.run(lock.lock().into_future()).await.unwrap(),
            kind,
            &name,
        );
        assert_eq!(guard.hold_count(), 1);
        assert!(lock.try_lock().await.unwrap().is_none(), "{command:?}");
        guard.unlock().await.unwrap();
    }
    bench.run(&["DEL", &key]);
    assert_eq!(next_token(&lock).await, 1);
    assert_eq!(bench.client.stats().locks_held, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_exact_to_the_limit() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    for before in [
        (1_i64 << 53) - 3,
        (1 << 53) - 1,
        1 << 53,
        (1 << 53) + 1,
        i64::MAX - 2,
    ] {
        bench.set_counter(before);
        for token in [before + 1, before + 2] {
            let guard = lock.lock().await.unwrap();
            assert_eq!(guard.token(), token);
            let inner = guard.run(lock.run_with(async |inner| inner.token())).await;
            assert_eq!(inner, Ok(Ok(token)));
            guard.unlock().await.unwrap();
            assert_eq!(bench.counter(), Some(token.to_string()));
        }
    }
    assert_refused(lock.lock().await, ServerErrorKind::Other, &bench.name);
}

/// No client leaves such a counter, but an operator may set one.
#[tokio::test(flavor = "multi_thread")]
async fn negative_tokens_are_exact_and_grow() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    for before in [i64::MIN, -(1_i64 << 53) - 2, -(1 << 53), -3, -2, -1, 0] {
        bench.set_counter(before);
        let guard = lock.lock().await.unwrap();
        assert_eq!(guard.token(), before + 1);
        let inner = guard.run(lock.run_with(async |inner| inner.token())).await;
        assert_eq!(inner, Ok(Ok(before + 1)), "one tenure has one token");
        guard.unlock().await.unwrap();
        assert_eq!(bench.counter(), Some((before + 1).to_string()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn counter_deleted_while_held_begins_again_with_the_next_tenure() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    assert_eq!(next_token(&lock).await, 1);
    let guard = lock.lock().await.unwrap();
    let key = counter_of(&bench.name);
    bench.run(&["DEL", &key]);
    let inner = guard.run(lock.run_with(async |inner| inner.token())).await;
    assert_eq!((guard.token(), inner), (2, Ok(Ok(2))));
    guard.unlock().await.unwrap();
    assert_eq!(bench.counter(), None, "re-entry and release do not make it");
    assert_eq!(next_token(&lock).await, 1);
}

/// A reply that is lost costs a token at most: none is granted twice, and none is smaller.
#[tokio::test(flavor = "multi_thread")]
async fn lost_replies_never_repeat_a_token() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let builder = LockClient::builder()
        .watchdog_timeout(HOUR)
        .command_timeout(ms(200));
    let client = builder.connect(&proxy.url()).await.unwrap();
    let name = unique("report");
    let lock = client.fenced_lock(&name);
    let other = LockClient::connect(&server.url()).await.unwrap();
    let other = other.fenced_lock(&name);
    let acquire = [sha1_of("fenced_acquire"), name.as_str()];
    let mut last = 0;
    for fate in [
        Fate::Swallow,
        Fate::Close,
        Fate::CloseAt(1),
        Fate::CloseAt(9),
    ] {
        let applied = proxy.applied();
        proxy.next_reply_to(&acquire, fate);
        let guard = lock.lock().await.unwrap();
        assert_eq!(proxy.applied(), applied + 1);
        assert!(guard.token() > last, "{fate:?}");
        assert_eq!(counter(&mut redis, &name), Some(guard.token().to_string()));
        proxy.next_reply_to(&acquire, fate);
        let inner = lock.lock().with_owner(guard.owner()).await.unwrap();
        assert_eq!(proxy.applied(), applied + 2);
        assert_eq!((inner.token(), inner.hold_count()), (guard.token(), 2));
        inner.unlock().await.unwrap();
        last = guard.token();
        guard.unlock().await.unwrap();
        assert!(!exists(&mut redis, &name));
        let token = next_token(&other).await;
        assert_eq!(token, last + 1, "{fate:?}");
        last = token;
        // The first fenced hold of a tenure that a reentrant hold has begun.
        let outer = client.lock(&name).lock().await.unwrap();
        proxy.next_reply_to(&acquire, fate);
        let inner = lock.lock().with_owner(outer.owner()).await.unwrap();
        assert!(inner.token() > last, "{fate:?}");
        last = inner.token();
        inner.unlock().await.unwrap();
        outer.unlock().await.unwrap();
        assert!(!exists(&mut redis, &name));
    }
}

/// The reply to a re-entry arrives after the tenure is lost by the client's clock: the hold begins
/// another tenure, although the server has never freed the lock.
#[tokio::test(flavor = "multi_thread")]
async fn reentry_granted_after_its_tenure_was_lost_has_a_new_token() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let builder = LockClient::builder().watchdog_timeout(HOUR);
    let client = builder.connect(&proxy.url()).await.unwrap();
    let lock = client.fenced_lock(unique("report"));
    let name = lock.name();
    let reentrant = client.lock(name);
    let mut last = 0;
    for is_fenced in [true, false] {
        let outer = lock.lock().lease(ms(1_500)).await.unwrap();
        let owner = outer.owner();
        assert_eq!(outer.token(), last + 1);
        proxy.set(Way::Replies, Flow::Hold);
        let (fenced, reentrant) = (lock.clone(), reentrant.clone());
        let inner = tokio::spawn(async move {
            if is_fenced {
                return (None, fenced.lock().with_owner(owner).await.unwrap());
            }
            let guard = reentrant.lock().with_owner(owner).await.unwrap();
            (Some(guard), fenced.lock().with_owner(owner).await.unwrap())
        });
        wait_until("the re-entry has run", SOON, || {
            owner_counts(&mut redis, name).into_values().eq([2])
        });
        assert_eq!(why_lost(&outer).await, LostReason::Expired);
        proxy.set(Way::Replies, Flow::Pass);
        let (between, inner) = timeout(SOON, inner).await.unwrap().unwrap();
        assert!(outer.is_lost() && !inner.is_lost());
        assert_eq!(inner.token(), last + 2, "fenced: {is_fenced}");
        last = inner.token();
        assert_lost(outer.unlock().await, LostReason::Expired);
        inner.unlock().await.unwrap();
        if let Some(between) = between {
            between.unlock().await.unwrap();
        }
        wait_until("the lock is free", SOON, || !exists(&mut redis, name));
    }
}

/// An acquire whose outcome stays unknown raises the counter and leaves no lock.
#[tokio::test(flavor = "multi_thread")]
async fn acquire_with_unknown_outcome_leaves_a_gap_only() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let builder = LockClient::builder()
        .command_timeout(ms(200))
        .retry_timeout(ms(0));
    let client = builder.connect(&proxy.url()).await.unwrap();
    let lock = client.fenced_lock(unique("report"));
    let name = lock.name();
    proxy.next_reply_to(&[sha1_of("fenced_acquire"), name], Fate::Close);
    let answer = lock.lock().await;
    assert!(
        matches!(answer, Err(Error::OutcomeUnknown { .. })),
        "{answer:?}"
    );
    wait_until("the lock is released", SOON, || !exists(&mut redis, name));
    assert_eq!(counter(&mut redis, name).as_deref(), Some("1"));
    assert_eq!(next_token(&lock).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_of_many_tasks_grow_in_the_order_of_the_grants() {
    const TASKS: usize = 8;
    const GRANTS: usize = 25;
    let server = Server::start();
    let name = unique("report");
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for _ in 0..2 {
        let client = LockClient::connect(&server.url()).await.unwrap();
        for task in 0..TASKS {
            let (fenced, reentrant) = (client.fenced_lock(&name), client.lock(&name));
            let order = Arc::clone(&order);
            tasks.push(tokio::spawn(async move {
                for round in 0..GRANTS {
                    if (task + round) % 5 == 0 {
                        reentrant.run(tokio::task::yield_now()).await.unwrap();
                    }
                    let guard = fenced.lock().await.unwrap();
                    order.lock().unwrap().push(guard.token());
                    if round % 4 == 0 {
                        let inner = guard.run(fenced.run_with(async |inner| inner.token()));
                        assert_eq!(inner.await, Ok(Ok(guard.token())));
                    }
                    guard.unlock().await.unwrap();
                }
            }));
        }
    }
    for task in tasks {
        timeout(Duration::from_secs(120), task)
            .await
            .expect("the task ends")
            .unwrap();
    }
    let order = order.lock().unwrap();
    assert_eq!(order.len(), 2 * TASKS * GRANTS);
    assert!(order.is_sorted_by(|one, next| one < next), "{order:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn server_without_memory_refuses_the_lock_and_keeps_nothing() {
    let builder = LockClient::builder().retry_timeout(ms(100));
    let mut bench = Bench::with(builder).await;
    let (lock, name) = (bench.lock.clone(), bench.name.clone());
    let held = bench.client.fenced_lock(unique("report"));
    let guard = held.lock().await.unwrap();
    bench.run(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_refused(lock.lock().await, ServerErrorKind::OutOfMemory, &name);
    assert_refused(lock.try_lock().await, ServerErrorKind::OutOfMemory, &name);
    assert!(held.try_lock().await.unwrap().is_none());
    assert_eq!((bench.owners(), bench.counter()), (HashMap::new(), None));
    guard.unlock().await.unwrap();
    bench.run(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!((next_token(&lock).await, next_token(&held).await), (1, 2));
}

/// Another process has acquired the lock as that owner, and hands it over.
#[tokio::test(flavor = "multi_thread")]
async fn adopted_owner_has_a_token_of_its_own_tenure() {
    let id = ClientId::random();
    let mut bench = Bench::with(LockClient::builder().client_id(id)).await;
    let (lock, name) = (bench.lock.clone(), bench.name.clone());
    let owner = Owner::from_thread_id(7).unwrap();
    let field = format!("{id}:7");
    bench.set_counter(40);
    bench.run(&["HSET", &name, &field, "1"]);
    bench.run(&["PEXPIRE", &name, "60000"]);
    assert!(lock.try_lock().await.unwrap().is_none(), "another owner");
    let guard = lock.lock().with_owner(owner).await.unwrap();
    let inner = lock.lock().with_owner(owner).await.unwrap();
    assert_eq!((guard.token(), inner.token()), (41, 41));
    assert_eq!(bench.owners(), HashMap::from([(field.clone(), 3)]));
    inner.unlock().await.unwrap();
    guard.unlock().await.unwrap();
    assert_eq!(bench.owners(), HashMap::from([(field, 1)]));
    let guard = lock.lock().with_owner(owner).await.unwrap();
    assert_eq!(guard.token(), 42);
    guard.unlock().await.unwrap();
    lock.unlock().with_owner(owner).await.unwrap();
    assert_eq!(next_token(&lock).await, 43);
}

#[tokio::test(flavor = "multi_thread")]
async fn owner_of_the_task_reenters_with_its_token() {
    let builder = LockClient::builder().owner_policy(OwnerPolicy::PerTask);
    let bench = Bench::with(builder).await;
    let (lock, reentrant) = (&bench.lock, bench.client.lock(&bench.name));
    let owner = reentrant.lock().await.unwrap().detach();
    let guard = lock.lock().await.unwrap();
    let inner = lock.lock().await.unwrap();
    assert_eq!((guard.token(), inner.token()), (1, 1));
    assert_eq!((guard.owner(), inner.hold_count()), (owner, 3));
    drop((guard, inner));
    lock.unlock().await.unwrap();
    assert_eq!(next_token(lock).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_requests_leave_a_gap_at_most() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    let mut last = 0;
    for polls in 0..60_u32 {
        let mut request = Box::pin(lock.lock().into_future());
        for _ in 0..polls % 6 {
            if futures::poll!(&mut request).is_ready() {
                break;
            }
            tokio::time::sleep(Duration::from_micros(u64::from(polls) * 20)).await;
        }
        drop(request);
        if polls % 10 == 9 {
            let token = next_token(&lock).await;
            assert!(token > last);
            last = token;
        }
    }
    wait_until("the lock is free", SOON, || {
        !exists(&mut bench.observer, &bench.name)
    });
    assert_eq!(bench.keys(), [counter_of(&bench.name)]);
    assert_eq!(bench.client.stats().requests_waiting, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn counter_has_the_lock_name_by_redissons_brace_rule() {
    let mut bench = Bench::new().await;
    let client = bench.client.clone();
    for (name, key) in [
        ("order:42", "redisson_lock_token:{order:42}"),
        ("order:{42}", "redisson_lock_token:order:{42}"),
        ("a{", "redisson_lock_token:a{"),
        ("a}b", "redisson_lock_token:{a}b}"),
        ("käse 🧀\r\n", "redisson_lock_token:{käse 🧀\r\n}"),
    ] {
        assert_eq!(next_token(&client.fenced_lock(name)).await, 1);
        assert_eq!(bench.keys(), [key]);
        bench.run(&["DEL", key]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_names_leases_and_timeouts_are_refused_before_anything_is_sent() {
    let mut bench = Bench::new().await;
    let client = bench.client.clone();
    let long = "x".repeat(redisson_lock::MAX_NAME_LEN + 1);
    for name in ["", &long] {
        let lock = client.fenced_lock(name);
        let answers = [
            lock.lock().await.map(drop),
            lock.try_lock().await.map(drop),
            lock.unlock().await,
            lock.force_unlock().await.map(drop),
            lock.inspect().await.map(drop),
        ];
        for answer in answers {
            assert!(
                matches!(answer, Err(Error::InvalidName { .. })),
                "{answer:?}"
            );
        }
    }
    let answer = bench.lock.lock().lease(Duration::ZERO).await;
    assert!(
        matches!(answer, Err(Error::InvalidLease { .. })),
        "{answer:?}"
    );
    let answer = bench.lock.try_lock_for(Duration::MAX).await;
    assert!(
        matches!(answer, Err(Error::InvalidTimeout { .. })),
        "{answer:?}"
    );
    assert_eq!(bench.keys(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn fenced_lock_is_renewed_with_reentrant_locks() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(ms(900))).await;
    let fenced = bench.lock.lock().await.unwrap();
    let other = bench.client.lock(unique("report")).lock().await.unwrap();
    tokio::time::sleep(ms(2_000)).await;
    assert!(!fenced.is_lost() && !other.is_lost());
    assert!(pttl(&mut bench.observer, &bench.name) > 0);
    fenced.unlock().await.unwrap();
    other.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn key_of_another_type_refuses_the_lock_and_raises_nothing() {
    let mut bench = Bench::new().await;
    let (lock, name) = (bench.lock.clone(), bench.name.clone());
    bench.run(&["SET", &name, "text"]);
    assert_refused(lock.lock().await, ServerErrorKind::WrongType, &name);
    assert_refused(lock.force_unlock().await, ServerErrorKind::WrongType, &name);
    assert_eq!(bench.counter(), None);
    assert_eq!(
        cmd("GET").arg(&name).query(&mut bench.observer),
        Ok("text".to_owned())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_loses_fenced_guards_and_frees_their_locks() {
    let mut bench = Bench::new().await;
    let guard: LockGuard<Fenced> = bench.lock.lock().await.unwrap();
    let (client, name) = (bench.client.clone(), bench.name.clone());
    let shutdown = tokio::spawn(async move { client.shutdown().await });
    assert_eq!(why_lost(&guard).await, LostReason::Shutdown);
    drop(guard);
    timeout(LIMIT, shutdown).await.unwrap().unwrap().unwrap();
    wait_until("the lock is free", SOON, || {
        !exists(&mut bench.observer, &name)
    });
    let other = bench.other_client().await.fenced_lock(&name);
    assert_eq!(next_token(&other).await, 2);
}
