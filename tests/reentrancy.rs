//! Who re-enters and who is kept out: holders, scopes and policies, and what a re-entry does to the lease.

mod support;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use redisson_lock::{Error, Holder, HolderExt, HolderPolicy, LockClient, LockClientBuilder, ReentrantLock};
use support::server::{Server, unique, wait_until, wait_until_async};
use tokio::runtime::Handle;
use tokio::task::{JoinSet, yield_now};

/// How long anything may take that needs no lease to run out; far below the leases that the tests leave alone.
const LIMIT: Duration = Duration::from_secs(10);

/// Longer than any test: what depends on it has failed.
const NEVER: Duration = Duration::from_secs(3600);

/// A server, a client with one lock, and an independent connection that sees what is there.
struct Bench {
    server: Server,
    client: LockClient,
    lock: ReentrantLock,
    observer: redis::Connection,
    name: String,
}

impl Bench {
    async fn new() -> Self {
        Self::with(LockClient::builder()).await
    }

    async fn with(builder: LockClientBuilder) -> Self {
        let server = Server::shared_or_start();
        let client = builder.connect(&server.url()).await.unwrap();
        let name = unique("reentrancy");
        Self { lock: client.lock(&name), observer: server.connection(), server, client, name }
    }

    /// The owner fields and their counts, as they are on the server.
    fn fields(&mut self) -> HashMap<String, i64> {
        redis::cmd("HGETALL").arg(&self.name).query(&mut self.observer).unwrap()
    }

    fn pttl(&mut self) -> i64 {
        redis::cmd("PTTL").arg(&self.name).query(&mut self.observer).unwrap()
    }

    /// The hold count of whoever holds the lock, 0 if nobody does.
    fn count(&mut self) -> i64 {
        let fields = self.fields();
        assert!(fields.len() < 2, "two owners: {fields:?}");
        fields.values().copied().next().unwrap_or(0)
    }

    /// Whether somebody waits for the lock, with a subscription.
    fn is_waited_for(&mut self) -> bool {
        let channel = format!("redisson_lock__channel:{{{}}}", self.name);
        let counts: HashMap<String, i64> =
            redis::cmd("PUBSUB").arg("NUMSUB").arg(channel).query(&mut self.observer).unwrap();
        counts.values().sum::<i64>() > 0
    }

    fn scripts(&mut self) -> u64 {
        let info: String = redis::cmd("INFO").arg("commandstats").query(&mut self.observer).unwrap();
        let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        line.and_then(|line| line.split(',').next()?.parse().ok()).unwrap_or(0)
    }

    /// Waits until the lease was prolonged that often, by whoever; the lock must not go away meanwhile.
    fn see_renewals(&mut self, times: usize) {
        let (mut seen, mut before) = (0, self.pttl());
        wait_until("renewals", 2 * LIMIT, || {
            let now = self.pttl();
            assert!(now > 0, "the lock went away after {seen} renewals");
            // A renewal adds a third of the lease; less is noise.
            seen += usize::from(now > before + 100);
            before = now;
            seen >= times
        });
    }
}

/// Counts who is inside at the same time.
#[derive(Default)]
struct Room {
    inside: AtomicUsize,
    most: AtomicUsize,
}

impl Room {
    /// Stays long enough for everybody else to come in who can.
    async fn stay(&self) {
        let inside = self.inside.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(inside, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(20)).await;
        self.inside.fetch_sub(1, Ordering::SeqCst);
    }

    fn most(&self) -> usize {
        self.most.load(Ordering::SeqCst)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_nested_run_re_enters() {
    let mut bench = Bench::new().await;
    let lock = &bench.lock;
    let counts = lock
        .run(async {
            let one = lock.hold_count().await.unwrap();
            let (two, three) = lock
                .run(async {
                    let two = lock.hold_count().await.unwrap();
                    (two, lock.run(async { lock.hold_count().await.unwrap() }).await.unwrap())
                })
                .await
                .unwrap();
            [one, two, three, lock.hold_count().await.unwrap()]
        })
        .await
        .unwrap();
    assert_eq!(counts, [1, 2, 3, 1]);
    assert_eq!(bench.fields(), HashMap::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_way_to_lock_re_enters_in_a_scope() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    let (holder, guards) = Holder::scope(async {
        let guards = [
            lock.lock().await.unwrap(),
            lock.lock().wait(Duration::ZERO).await.unwrap(),
            lock.lock().lease(LIMIT).await.unwrap(),
            lock.try_lock().await.unwrap().expect("a re-entry"),
            lock.try_lock().wait(LIMIT).lease(LIMIT).await.unwrap().expect("a re-entry"),
        ];
        assert_eq!(lock.hold_count().await.unwrap(), 5);
        assert!(lock.is_held().await.unwrap());
        (Holder::current().unwrap(), guards)
    })
    .await;
    assert_eq!(bench.fields(), HashMap::from([(format!("{}:{holder}", bench.client.client_id()), 5)]));
    assert!(guards.iter().all(|guard| guard.holder() == holder));
    assert_eq!(lock.hold_count().await.unwrap(), 0, "outside the scope nobody is the holder");
    assert!(lock.try_lock().await.unwrap().is_none(), "outside the scope it is a lock that somebody holds");
    for (left, guard) in (0..5).rev().zip(guards) {
        guard.unlock().await.unwrap();
        assert_eq!(bench.count(), left);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_is_the_same_holder_in_every_task() {
    let mut bench = Bench::new().await;
    let holder = Holder::new();
    let lock = bench.lock.clone();
    let first = lock.lock().with_holder(holder).await.unwrap();
    let task = tokio::spawn(async move { lock.lock().await }.with_holder(holder));
    let second = task.await.unwrap().unwrap();
    assert_eq!((first.holder(), second.holder()), (holder, holder));
    assert_eq!(bench.count(), 2);
    let stranger = bench.lock.try_lock().with_holder(Holder::new()).await.unwrap();
    assert!(stranger.is_none(), "{stranger:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spawned_child_re_enters_only_if_the_holder_is_carried() {
    let bench = Bench::new().await;
    let lock = bench.lock.clone();
    let outer = lock.clone();
    outer
        .run(async move {
            let (carried, plain) = (lock.clone(), lock.clone());
            let child = tokio::spawn(
                async move { carried.run(async { carried.hold_count().await.unwrap() }).await }.in_current_holder(),
            );
            assert_eq!(child.await.unwrap().unwrap(), 2);
            let child = tokio::spawn(async move { plain.try_lock().await });
            assert!(child.await.unwrap().unwrap().is_none(), "the holder leaked into a spawned task");
        })
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_join_set_re_enters_with_the_holder_carried() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    let outer = lock.clone();
    let (carried, plain) = outer
        .run(async move {
            let (mut carried, mut plain) = (JoinSet::new(), JoinSet::new());
            for _ in 0..8 {
                let lock = lock.clone();
                carried.spawn(async move { lock.lock().await.unwrap().forget() }.in_current_holder());
            }
            let all = carried.join_all().await.len();
            assert_eq!(lock.hold_count().await.unwrap(), 9);
            for _ in 0..8 {
                let lock = lock.clone();
                plain.spawn(async move { lock.try_lock().await.unwrap().is_some() });
            }
            for _ in 0..8 {
                lock.unlock().await.unwrap();
            }
            (all, plain.join_all().await)
        })
        .await
        .unwrap();
    assert_eq!(carried, 8);
    assert_eq!(plain, [false; 8]);
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scope_ends_with_its_future() {
    let bench = Bench::new().await;
    let guard = Holder::scope(async { bench.lock.lock().await.unwrap() }).await;
    assert_eq!(bench.client.current_holder(), None);
    assert!(bench.lock.try_lock().await.unwrap().is_none());
    // The guard is the way back into the scope.
    let count = guard.run(async { bench.lock.run(async { bench.lock.hold_count().await }).await }).await;
    assert_eq!(count.unwrap().unwrap().unwrap(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn under_the_per_task_policy_a_task_re_enters_and_others_are_kept_out() {
    let mut bench = Bench::with(LockClient::builder().holder_policy(HolderPolicy::PerTask)).await;
    let lock = bench.lock.clone();
    let client = bench.client.clone();
    let task = tokio::spawn(async move {
        let holder = client.current_holder().unwrap();
        let first = lock.lock().await.unwrap();
        yield_now().await;
        let second = lock.try_lock().await.unwrap().expect("the same task");
        assert_eq!((first.holder(), second.holder()), (holder, holder));
        assert_eq!(lock.hold_count().await.unwrap(), 2);
        (lock.run(async { lock.hold_count().await.unwrap() }).await.unwrap(), first, second)
    });
    let (count, first, second) = task.await.unwrap();
    assert_eq!(count, 3);
    assert_eq!(bench.count(), 2);

    let lock = bench.lock.clone();
    let other = tokio::spawn(async move { lock.try_lock().await.unwrap().is_none() });
    assert!(other.await.unwrap(), "another task got in");
    assert!(bench.lock.try_lock().await.unwrap().is_none(), "the thread outside any task got in");
    first.unlock().await.unwrap();
    second.unlock().await.unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn under_the_per_task_policy_a_thread_re_enters_and_other_threads_are_kept_out() {
    let mut bench = Bench::with(LockClient::builder().holder_policy(HolderPolicy::PerTask)).await;
    let on_a_thread = |lock: ReentrantLock| {
        let runtime = Handle::current();
        // Each `block_on` is another future of the same thread.
        let thread = std::thread::spawn(move || {
            let first = runtime.block_on(lock.try_lock()).unwrap()?;
            let second = runtime.block_on(lock.try_lock()).unwrap().expect("the same thread");
            assert_eq!(runtime.block_on(lock.hold_count()).unwrap(), 2);
            Some((first, second))
        });
        tokio::task::spawn_blocking(|| thread.join().unwrap())
    };
    let (first, second) = on_a_thread(bench.lock.clone()).await.unwrap().expect("a free lock");
    assert_eq!(first.holder(), second.holder());
    assert_eq!(bench.count(), 2);
    assert!(on_a_thread(bench.lock.clone()).await.unwrap().is_none(), "another thread got in");
    let lock = bench.lock.clone();
    let task = tokio::spawn(async move { lock.try_lock().await.unwrap().is_none() });
    assert!(task.await.unwrap(), "a task got in");
    first.unlock().await.unwrap();
    second.unlock().await.unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn under_the_per_task_policy_a_task_gives_back_what_it_forgot() {
    let mut bench = Bench::with(LockClient::builder().holder_policy(HolderPolicy::PerTask)).await;
    let lock = bench.lock.clone();
    tokio::spawn(async move {
        lock.lock().await.unwrap().forget();
        lock.lock().await.unwrap().forget();
        let other = lock.clone();
        let stranger = tokio::spawn(async move { other.unlock().await }).await.unwrap();
        assert!(matches!(stranger, Err(Error::NotHeld { .. })), "{stranger:?}");
        lock.unlock().await.unwrap();
        assert_eq!(lock.hold_count().await.unwrap(), 1);
        lock.unlock().await.unwrap();
    })
    .await
    .unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_branches_of_one_join_exclude_each_other_outside_a_holder() {
    let bench = Bench::new().await;
    let room = Room::default();
    let branch = || async {
        for _ in 0..3 {
            let guard = bench.lock.lock().await.unwrap();
            room.stay().await;
            guard.unlock().await.unwrap();
        }
    };
    tokio::join!(branch(), branch(), branch());
    assert_eq!(room.most(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_siblings_that_run_exclude_each_other() {
    let bench = Bench::new().await;
    let room = Room::default();
    let branch = || async {
        for _ in 0..3 {
            bench.lock.run(room.stay()).await.unwrap();
        }
    };
    tokio::join!(branch(), branch(), branch());
    assert_eq!(room.most(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_branches_in_one_scope_share_the_lock() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    let (one, other) = Holder::scope(async { tokio::join!(lock.lock(), lock.lock()) }).await;
    let guards = (one.unwrap(), other.unwrap());
    assert_eq!(guards.0.holder(), guards.1.holder());
    assert_eq!(bench.count(), 2);
    drop(guards);
    wait_until_async("both are released", LIMIT, || {
        let lock = lock.clone();
        async move { !lock.is_locked().await.unwrap() }
    })
    .await;

    // Both together, which would never end if they excluded each other.
    let meet = tokio::sync::Barrier::new(2);
    let branch = || async { lock.run(meet.wait()).await.unwrap() };
    tokio::time::timeout(LIMIT, Holder::scope(async { tokio::join!(branch(), branch()) }))
        .await
        .expect("both in at the same time");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_branches_in_one_scope_that_wait_for_another_client_both_get_in() {
    let mut bench = Bench::with(LockClient::builder().recheck_interval(NEVER)).await;
    let other = LockClient::connect(&bench.server.url()).await.unwrap();
    let theirs = other.lock(&bench.name).lock().await.unwrap();
    let lock = bench.lock.clone();
    let waiting = tokio::spawn(Holder::scope(async move {
        let (one, other, third) = tokio::join!(lock.lock(), lock.lock(), lock.try_lock().wait(NEVER));
        (one.unwrap(), other.unwrap(), third.unwrap().unwrap())
    }));
    wait_until("they wait", LIMIT, || bench.is_waited_for());
    assert!(!waiting.is_finished());
    theirs.unlock().await.unwrap();
    let guards = tokio::time::timeout(LIMIT, waiting).await.expect("all get in").unwrap();
    assert_eq!(bench.count(), 3);
    drop(guards);
    wait_until("all are released", LIMIT, || bench.count() == 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_re_entry_does_not_queue_behind_those_who_wait() {
    let mut bench = Bench::with(LockClient::builder().recheck_interval(NEVER)).await;
    let lock = bench.lock.clone();
    let holder = Holder::new();
    let outer = lock.lock().with_holder(holder).await.unwrap();
    let waiting = tokio::spawn(bench.lock.lock());
    wait_until("somebody waits", LIMIT, || bench.is_waited_for());
    let inner = tokio::time::timeout(LIMIT, lock.lock().with_holder(holder)).await.expect("at once").unwrap();
    assert_eq!(bench.count(), 2);
    assert!(!waiting.is_finished());
    outer.unlock().await.unwrap();
    assert_eq!(bench.count(), 1);
    assert!(!waiting.is_finished());
    inner.unlock().await.unwrap();
    let theirs = tokio::time::timeout(LIMIT, waiting).await.expect("the waiter gets in").unwrap().unwrap();
    assert_ne!(theirs.holder(), holder);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_keeps_its_lock_exactly_as_long_as_its_last_hold() {
    let mut bench = Bench::new().await;
    for outer_first in [true, false] {
        let lock = &bench.lock;
        let (outer, inner) = Holder::scope(async { (lock.lock().await.unwrap(), lock.lock().await.unwrap()) }).await;
        let (first, second) = if outer_first { (outer, inner) } else { (inner, outer) };
        first.unlock().await.unwrap();
        assert_eq!(bench.count(), 1, "outer first: {outer_first}");
        assert!(!second.is_lost());
        assert!(bench.lock.try_lock().await.unwrap().is_none());
        second.unlock().await.unwrap();
        assert_eq!(bench.count(), 0, "outer first: {outer_first}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shorter_lease_on_re_entry_does_not_shorten_the_outer_hold() {
    let mut bench = Bench::new().await;
    for outer_lease in [None, Some(Duration::from_secs(30))] {
        let lock = bench.lock.clone();
        let holder = Holder::new();
        let outer = match outer_lease {
            None => lock.lock().with_holder(holder).await.unwrap(),
            Some(lease) => lock.lock().lease(lease).with_holder(holder).await.unwrap(),
        };
        let inner = lock.lock().lease(Duration::from_secs(1)).with_holder(holder).await.unwrap();
        assert!(bench.pttl() > 15_000, "re-entry left {} ms", bench.pttl());
        assert!(outer.remaining_lease() > Duration::from_secs(15));
        inner.unlock().await.unwrap();
        assert!(bench.pttl() > 15_000, "the inner unlock left {} ms", bench.pttl());
        assert!(outer.remaining_lease() > Duration::from_secs(15));
        outer.unlock().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_outer_hold_goes_on_being_renewed_after_a_shorter_re_entry() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(Duration::from_millis(900))).await;
    let lock = bench.lock.clone();
    let holder = Holder::new();
    let outer = lock.lock().with_holder(holder).await.unwrap();
    let inner = lock.lock().lease(Duration::from_millis(50)).with_holder(holder).await.unwrap();
    // Six thirds of the lease: it would have run out twice.
    bench.see_renewals(6);
    assert!(!outer.is_lost() && !inner.is_lost(), "the holder holds it, so no hold of it is lost");
    inner.unlock().await.unwrap();
    bench.see_renewals(3);
    assert!(!outer.is_lost());
    outer.unlock().await.unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inner_hold_without_a_lease_is_renewed_although_the_outer_one_has_one() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(Duration::from_millis(900))).await;
    let lock = bench.lock.clone();
    let holder = Holder::new();
    let outer = lock.lock().lease(Duration::from_millis(900)).with_holder(holder).await.unwrap();
    let inner = lock.lock().with_holder(holder).await.unwrap();
    bench.see_renewals(6);
    assert!(!inner.is_lost());
    inner.unlock().await.unwrap();
    // The hold that is left is not renewed: it runs out, and says so.
    tokio::time::timeout(LIMIT, outer.lost()).await.expect("the outer lease runs out");
    wait_until("the key runs out", LIMIT, || bench.pttl() == -2);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_re_entries_with_short_leases_do_not_starve_the_renewal_of_the_outer_hold() {
    let watchdog = Duration::from_millis(900);
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(watchdog)).await;
    let lock = bench.lock.clone();
    let holder = Holder::new();
    let outer = lock.lock().with_holder(holder).await.unwrap();
    // They stay: a release would restore the lease by itself.
    let mut inner = Vec::new();
    let begun = Instant::now();
    let mut tick = tokio::time::interval(Duration::from_millis(10));
    while begun.elapsed() < 3 * watchdog {
        tick.tick().await;
        inner.push(lock.lock().lease(Duration::from_millis(20)).with_holder(holder).await.unwrap());
        assert!(!outer.is_lost(), "after {:?} and {} re-entries", begun.elapsed(), inner.len());
    }
    assert_eq!(bench.count(), 1 + inner.len() as i64);
    assert!(inner.len() > 10, "only {} re-entries", inner.len());
    drop(inner);
    wait_until("the inner holds are released", LIMIT, || bench.count() == 1);
    outer.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_clients_are_two_holders_even_in_one_scope() {
    let bench = Bench::new().await;
    let other = LockClient::connect(&bench.server.url()).await.unwrap();
    Holder::scope(async {
        let _guard = bench.lock.lock().await.unwrap();
        assert!(other.lock(&bench.name).try_lock().await.unwrap().is_none());
        assert_eq!(other.lock(&bench.name).hold_count().await.unwrap(), 0);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_holds_each_lock_on_its_own() {
    let bench = Bench::new().await;
    let second = bench.client.lock(unique("reentrancy"));
    Holder::scope(async {
        let one = bench.lock.lock().await.unwrap();
        let other = second.lock().await.unwrap();
        assert_eq!((bench.lock.hold_count().await.unwrap(), second.hold_count().await.unwrap()), (1, 1));
        one.unlock().await.unwrap();
        assert!(second.is_held().await.unwrap());
        other.unlock().await.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_waits_for_itself_is_warned_once_as_soon_as_it_parks() {
    let warnings = Warnings::capture();
    let mut bench = Bench::with(LockClient::builder().recheck_interval(Duration::from_millis(10))).await;
    let lock = bench.lock.clone();
    let task = tokio::spawn(async move {
        let _outer = lock.lock().await.unwrap();
        lock.lock().await.unwrap()
    });
    wait_until("a warning", LIMIT, || !warnings.about(&bench.name).is_empty());
    // Many re-checks later it is still one.
    let scripts = bench.scripts();
    wait_until("re-checks", LIMIT, || bench.scripts() > scripts + 20);
    let told = warnings.about(&bench.name);
    assert_eq!(told.len(), 1, "{told:#?}");
    for mend in ["run", "scope", "PerTask"] {
        assert!(told[0].contains(mend), "{mend} is not named: {}", told[0]);
    }
    let owner = bench.fields().into_keys().next().unwrap();
    assert!(told[0].contains(&owner), "the holder {owner} is not named: {}", told[0]);
    task.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_waits_for_itself_without_a_recheck_is_warned_too() {
    let warnings = Warnings::capture();
    let bench = Bench::with(LockClient::builder().recheck_interval(NEVER).watchdog_timeout(NEVER)).await;
    let lock = bench.lock.clone();
    let task = tokio::spawn(async move { lock.run(async { tokio::spawn(lock.clone().lock()).await }).await.is_ok() });
    let lock = bench.client.lock(format!("{}-own", bench.name));
    let own = tokio::spawn(async move {
        let _outer = lock.lock().await.unwrap();
        lock.run(async {}).await
    });
    wait_until("a warning", LIMIT, || !warnings.about(&format!("{}-own", bench.name)).is_empty());
    task.abort();
    own.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_another_task_or_thread_is_no_reason_to_warn() {
    let warnings = Warnings::capture();
    let mut bench = Bench::with(LockClient::builder().recheck_interval(Duration::from_millis(10))).await;
    let (lock, name) = (bench.lock.clone(), bench.name.clone());
    let runtime = Handle::current();
    // A thread that is no task holds it; a task and another thread wait.
    let holding = {
        let (runtime, lock) = (runtime.clone(), lock.clone());
        tokio::task::spawn_blocking(move || std::thread::spawn(move || runtime.block_on(lock.lock()).unwrap()).join())
    };
    let guard = holding.await.unwrap().unwrap();
    let task = tokio::spawn(lock.clone().lock());
    wait_until("the task waits", LIMIT, || bench.is_waited_for());
    let scripts = bench.scripts();
    wait_until("the task asks again", LIMIT, || bench.scripts() > scripts + 5);
    assert_eq!(warnings.about(&name), Vec::<String>::new(), "a task that waits for a thread");
    task.abort();
    wait_until("the task has gone", LIMIT, || !bench.is_waited_for());

    let thread = std::thread::spawn(move || runtime.block_on(lock.lock()).map(drop));
    wait_until("the thread waits", LIMIT, || bench.is_waited_for());
    let scripts = bench.scripts();
    wait_until("the thread asks again", LIMIT, || bench.scripts() > scripts + 5);
    let told = warnings.about(&name);
    guard.unlock().await.unwrap();
    tokio::task::spawn_blocking(|| thread.join().unwrap().unwrap()).await.unwrap();
    assert_eq!(told, Vec::<String>::new(), "a thread that waits for another thread");
}

/// The lines that the library has traced, of all tests in this process; a lock's name tells whose they are.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<u8>>>);

impl Warnings {
    fn capture() -> Self {
        static LINES: OnceLock<Warnings> = OnceLock::new();
        let capture = || {
            let lines = Warnings::default();
            let writer = lines.clone();
            tracing_subscriber::fmt()
                .with_ansi(false)
                .with_max_level(tracing::Level::WARN)
                .with_writer(move || writer.clone())
                .init();
            lines
        };
        LINES.get_or_init(capture).clone()
    }

    /// The warnings of waiting for oneself that name this lock.
    fn about(&self, lock: &str) -> Vec<String> {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all = String::from_utf8_lossy(&lines).into_owned();
        let named = |line: &&str| line.contains(&format!("lock={lock} ")) && line.contains("that it holds itself");
        all.lines().filter(named).map(str::to_owned).collect()
    }
}

impl std::io::Write for Warnings {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
