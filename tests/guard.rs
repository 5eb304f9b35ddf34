//! Guards: what becomes of a hold when it is unlocked, dropped, forgotten, handed over, stolen or outlived.

mod support;

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::FutureExt;
use redis::{Connection, cmd};
use redisson_lock::{
    ClientId, Error, Holder, HolderExt, LockClient, LockClientBuilder, LockGuard, LostReason, ReentrantLock,
};
use support::server::{Server, unique, wait_until};
use tokio::sync::oneshot;

/// How long anything may take that needs no lease to run out; far below the leases that the tests leave alone.
const LIMIT: Duration = Duration::from_secs(10);

/// The lease of locks that are to be renewed, or to run out, while a test looks on.
const BRIEF: Duration = Duration::from_millis(900);

const THIEF: &str = "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e11:52";

/// A server, a client with one lock, and an independent connection that sees what is there.
struct Bench {
    server: Server,
    client: LockClient,
    lock: ReentrantLock,
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
        let name = unique("guard");
        Self { lock: client.lock(&name), observer: server.connection(), server, client, name }
    }

    fn fields(&mut self) -> BTreeMap<String, i64> {
        cmd("HGETALL").arg(&self.name).query(&mut self.observer).unwrap()
    }

    /// The hold count of whoever holds the lock, 0 if nobody does.
    fn count(&mut self) -> i64 {
        let fields = self.fields();
        assert!(fields.len() < 2, "two owners: {fields:?}");
        fields.values().copied().next().unwrap_or(0)
    }

    fn pttl(&mut self) -> i64 {
        cmd("PTTL").arg(&self.name).query(&mut self.observer).unwrap()
    }

    fn wait_until_free(&mut self) {
        wait_until("the lock is free", LIMIT, || self.pttl() == -2);
    }

    fn delete(&mut self) {
        cmd("DEL").arg(&self.name).exec(&mut self.observer).unwrap();
    }

    /// Takes the lock away for another owner.
    fn steal(&mut self) {
        self.delete();
        cmd("HSET").arg(&self.name).arg(THIEF).arg(1).exec(&mut self.observer).unwrap();
        cmd("PEXPIRE").arg(&self.name).arg(30_000).exec(&mut self.observer).unwrap();
    }

    #[track_caller]
    fn assert_the_thief_keeps_it(&mut self) {
        assert_eq!(self.fields(), BTreeMap::from([(THIEF.to_owned(), 1)]));
    }

    fn scripts(&mut self) -> String {
        let info: String = cmd("INFO").arg("commandstats").query(&mut self.observer).unwrap();
        let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        line.and_then(|line| line.split(',').next()).unwrap_or("0").to_owned()
    }
}

/// Tells that it was dropped.
struct Flag(Arc<AtomicBool>);

impl Flag {
    fn new() -> (Self, Arc<AtomicBool>) {
        let dropped = Arc::new(AtomicBool::new(false));
        (Self(Arc::clone(&dropped)), dropped)
    }
}

impl Drop for Flag {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[track_caller]
fn assert_lost<T: std::fmt::Debug>(answer: Result<T, Error>, expected: LostReason) {
    match answer {
        Err(Error::Lost { reason, .. }) => assert_eq!(reason, expected),
        other => panic!("not lost: {other:?}"),
    }
}

#[track_caller]
fn assert_not_held(answer: Result<(), Error>) {
    assert!(matches!(&answer, Err(Error::NotHeld { .. })), "{answer:?}");
}

async fn why_lost(guard: &LockGuard) -> LostReason {
    tokio::time::timeout(LIMIT, guard.lost()).await.expect("the loss is told")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_guard_is_released_in_the_background() {
    let mut bench = Bench::new().await;
    drop(bench.lock.lock().await.unwrap());
    bench.wait_until_free();
    // One of two holds.
    let holder = Holder::new();
    let outer = bench.lock.lock().with_holder(holder).await.unwrap();
    drop(bench.lock.lock().with_holder(holder).await.unwrap());
    wait_until("the inner hold is released", LIMIT, || bench.count() == 1);
    assert!(!outer.is_lost());
    drop(outer);
    bench.wait_until_free();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_guard_takes_nothing_of_its_holders_next_hold() {
    let mut bench = Bench::new().await;
    let holder = Holder::new();
    for _ in 0..100 {
        drop(bench.lock.lock().with_holder(holder).await.unwrap());
        let next = bench.lock.lock().with_holder(holder).await.unwrap();
        // The give-back may come after the next hold, but it leaves that.
        wait_until("one hold is left", LIMIT, || {
            let count = bench.count();
            assert!((1..=2).contains(&count), "{count} holds");
            count == 1
        });
        assert!(!next.is_lost());
        next.unlock().await.unwrap();
        assert_eq!(bench.count(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_hold_stays_until_the_lock_is_unlocked_in_its_scope() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    let holder = Holder::new();
    bench.lock.lock().with_holder(holder).await.unwrap().forget();
    let begun = Instant::now();
    wait_until("the lease would be over", LIMIT, || {
        assert_eq!(bench.count(), 1, "it is not renewed");
        begun.elapsed() > 2 * BRIEF
    });
    assert_not_held(bench.lock.unlock().await);
    assert_not_held(bench.lock.unlock().with_holder(Holder::new()).await);
    assert_eq!(bench.count(), 1);
    bench.lock.unlock().with_holder(holder).await.unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn forgotten_holds_are_unlocked_one_by_one_and_not_once_more() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    Holder::scope(async {
        lock.lock().await.unwrap().forget();
        lock.lock().lease(LIMIT).await.unwrap().forget();
        let guard = lock.lock().await.unwrap();
        assert_eq!(bench.count(), 3);
        lock.unlock().await.unwrap();
        assert_eq!(bench.count(), 2);
        lock.unlock().await.unwrap();
        assert_eq!(bench.count(), 1);
        assert_not_held(lock.unlock().await);
        assert_eq!(bench.count(), 1, "the guard's hold is the guard's");
        guard.unlock().await.unwrap();
        assert_eq!(bench.count(), 0);
        assert_not_held(lock.unlock().await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unlocking_without_a_hold_to_give_back_is_refused_before_anything_is_sent() {
    let mut bench = Bench::new().await;
    let holder = Holder::new();
    let guard = bench.lock.lock().with_holder(holder).await.unwrap();
    let before = (bench.scripts(), bench.fields());
    for _ in 0..3 {
        assert_not_held(bench.lock.unlock().await);
        assert_not_held(bench.lock.unlock().with_holder(holder).await);
        assert_not_held(bench.lock.unlock().with_holder(Holder::new()).await);
        assert_not_held(bench.client.lock(unique("guard")).unlock().with_holder(holder).await);
    }
    assert_eq!((bench.scripts(), bench.fields()), before);
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_hold_that_was_lost_is_told_by_its_unlock() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    let lock = bench.lock.clone();
    let holder = Holder::new();

    // Found by the unlock itself.
    lock.lock().lease(LIMIT).with_holder(holder).await.unwrap().forget();
    bench.delete();
    assert_lost(lock.unlock().with_holder(holder).await, LostReason::Gone);

    // Force-unlocked by this client.
    lock.lock().lease(LIMIT).with_holder(holder).await.unwrap().forget();
    assert!(lock.force_unlock().await.unwrap());
    assert_lost(lock.unlock().with_holder(holder).await, LostReason::ForceUnlocked);

    // Found by a renewal.
    let guard = lock.lock().with_holder(holder).await.unwrap();
    let lost = guard.lost();
    guard.forget();
    bench.delete();
    assert_eq!(tokio::time::timeout(LIMIT, lost).await.expect("a renewal finds out"), LostReason::Gone);
    assert_lost(lock.unlock().with_holder(holder).await, LostReason::Gone);
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_hold_that_ran_out_is_told_by_its_unlock() {
    let mut bench = Bench::new().await;
    let holder = Holder::new();
    bench.lock.lock().lease(Duration::from_millis(200)).with_holder(holder).await.unwrap().forget();
    bench.wait_until_free();
    assert_lost(bench.lock.unlock().with_holder(holder).await, LostReason::Expired);
    // After that there is nothing more to tell, and the next lock is a new one.
    bench.lock.lock().with_holder(holder).await.unwrap().unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_hold_that_was_lost_is_remembered_while_its_holder_locks_again() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    let lock = bench.lock.clone();
    let holder = Holder::new();
    let mut lose_one = async || {
        let guard = lock.lock().with_holder(holder).await.unwrap();
        let lost = guard.lost();
        guard.forget();
        bench.delete();
        assert_eq!(tokio::time::timeout(LIMIT, lost).await.expect("a renewal finds out"), LostReason::Gone);
    };
    lose_one().await;
    // Another possession, of a guard: it is not touched, and what was lost is told.
    let guard = lock.lock().with_holder(holder).await.unwrap();
    assert_lost(lock.unlock().with_holder(holder).await, LostReason::Gone);
    assert_not_held(lock.unlock().with_holder(holder).await);
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();

    // One that is there is given back first, so that nothing stays behind.
    lose_one().await;
    lock.lock().with_holder(holder).await.unwrap().forget();
    lock.unlock().with_holder(holder).await.unwrap();
    assert_eq!(bench.count(), 0);
    assert_lost(lock.unlock().with_holder(holder).await, LostReason::Gone);
    assert_not_held(lock.unlock().with_holder(holder).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_adopts_another_ones_id_gives_back_what_that_one_left() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    let holder = Holder::from_thread_id(52).unwrap();
    lock.lock().with_holder(holder).await.unwrap().forget();
    lock.lock().with_holder(holder).await.unwrap().forget();
    bench.client.shutdown().await.unwrap();
    assert_eq!(bench.count(), 2, "a shutdown leaves what it cannot prove to be over");

    let id = bench.client.client_id();
    let heir = LockClient::builder().client_id(id).connect(&bench.server.url()).await.unwrap();
    assert_eq!(heir.client_id(), id);
    let lock = heir.lock(&bench.name);
    assert_not_held(lock.unlock().await);
    assert_not_held(lock.unlock().with_holder(Holder::from_thread_id(53).unwrap()).await);
    assert!(lock.try_lock().await.unwrap().is_none(), "outside the scope it is somebody else's");
    async {
        assert_eq!(lock.hold_count().await.unwrap(), 2);
        let guard = lock.lock().await.unwrap();
        assert_eq!(bench.fields(), BTreeMap::from([(format!("{id}:52"), 3)]));
        guard.unlock().await.unwrap();
        assert_eq!(bench.count(), 2);
        lock.unlock().await.unwrap();
        assert_eq!(bench.count(), 1);
        assert!(bench.pttl() > 15_000, "what is left gets the lease again");
        lock.run(async { assert_eq!(lock.hold_count().await.unwrap(), 2) }).await.unwrap();
        assert_eq!(bench.count(), 1);
        lock.unlock().await.unwrap();
        assert_eq!(bench.count(), 0);
        assert_not_held(lock.unlock().await);
    }
    .with_holder(holder)
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guard_over_inherited_holds_never_takes_what_it_did_not_bring() {
    let mut bench = Bench::new().await;
    let id = ClientId::random();
    let heir = LockClient::builder().client_id(id).watchdog_timeout(BRIEF).connect(&bench.server.url()).await.unwrap();
    let lock = heir.lock(&bench.name);
    let holder = Holder::from_thread_id(52).unwrap();
    let inherit = |bench: &mut Bench, count: i64| {
        bench.delete();
        cmd("HSET").arg(&bench.name).arg(format!("{id}:52")).arg(count).exec(&mut bench.observer).unwrap();
        cmd("PEXPIRE").arg(&bench.name).arg(30_000).exec(&mut bench.observer).unwrap();
    };

    // Dropped, one after the other and the older one first.
    inherit(&mut bench, 2);
    let one = lock.lock().with_holder(holder).await.unwrap();
    let two = lock.lock().lease(LIMIT).with_holder(holder).await.unwrap();
    assert_eq!(bench.count(), 4);
    drop(one);
    wait_until("one is released", LIMIT, || bench.count() == 3);
    drop(two);
    wait_until("both are released", LIMIT, || bench.count() == 2);

    // An inherited hold is given back under a living guard.
    let guard = lock.lock().with_holder(holder).await.unwrap();
    assert_eq!(bench.count(), 3);
    lock.unlock().with_holder(holder).await.unwrap();
    assert_eq!(bench.count(), 2);
    assert!(!guard.is_lost());
    lock.unlock().with_holder(holder).await.unwrap();
    assert_eq!(bench.count(), 1);
    assert_not_held(lock.unlock().with_holder(holder).await);
    assert_eq!(bench.count(), 1, "what is left is the guard's");
    guard.unlock().await.unwrap();
    assert_eq!(bench.count(), 0);

    // The guard is lost; what the holder inherits after that is not its affair.
    inherit(&mut bench, 1);
    let guard = lock.lock().with_holder(holder).await.unwrap();
    bench.delete();
    assert_eq!(why_lost(&guard).await, LostReason::Gone);
    inherit(&mut bench, 1);
    assert_lost(guard.unlock().await, LostReason::Gone);
    // The order of the holder's operations makes sure that a give-back of the lost guard would be over.
    lock.lock().with_holder(holder).await.unwrap().unlock().await.unwrap();
    assert_eq!(bench.count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_of_an_adopted_id_is_taken_and_freed_as_any_other() {
    let mut bench = Bench::new().await;
    let id = ClientId::random();
    let client = LockClient::builder().client_id(id).connect(&bench.server.url()).await.unwrap();
    let lock = client.lock(&bench.name);
    for holder in [Holder::from_thread_id(1).unwrap(), Holder::new()] {
        let guards = async { [lock.lock().await.unwrap(), lock.lock().await.unwrap()] }.with_holder(holder).await;
        assert_eq!(bench.fields(), BTreeMap::from([(format!("{id}:{holder}"), 2)]));
        for guard in guards {
            guard.unlock().await.unwrap();
        }
        assert_eq!(bench.count(), 0);
    }
}

/// An adopted holder may have a hold from before, so its count is asked for. In the margin between the loss and the end
/// of the lease the lost hold is still on the server: who takes it for somebody else's never gives the lock back.
#[tokio::test(flavor = "multi_thread")]
async fn an_unlock_after_a_loss_frees_the_lock_of_an_adopted_holder() {
    let mut bench = Bench::new().await;
    let holder = Holder::from_thread_id(42).unwrap();
    let first = bench.lock.lock().lease(Duration::from_secs(2)).with_holder(holder).await.unwrap();
    // A twentieth of the lease before the server's expiry.
    assert_eq!(why_lost(&first).await, LostReason::Expired);
    let second = bench.lock.lock().with_holder(holder).await.unwrap();
    // The lost hold would be cleaned up when its lease is over.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_lost(first.unlock().await, LostReason::Expired);
    second.unlock().await.unwrap();
    bench.wait_until_free();
}

/// The same within the margin, and with a lease that would hide for a while that the lock was not given back.
#[tokio::test(flavor = "multi_thread")]
async fn one_unlock_frees_for_a_holder_that_lost_and_locked_again_at_once() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(LIMIT)).await;
    let lock = bench.lock.clone();
    async {
        let first = lock.lock().lease(Duration::from_secs(4)).await.unwrap();
        // 200 ms before the key expires.
        first.lost().await;
        assert_lost(first.unlock().await, LostReason::Expired);
        lock.lock().lease(Duration::from_secs(5)).await.unwrap().unlock().await.unwrap();
    }
    .with_holder(Holder::from_thread_id(7).unwrap())
    .await;
    wait_until("the only guard was unlocked, and the lock is free", Duration::from_secs(1), || bench.count() == 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guards_run_re_enters_and_keeps_the_guard() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    let guard = lock.lock().await.unwrap();
    let count = guard.run(async { lock.run(async { lock.hold_count().await.unwrap() }).await.unwrap() }).await.unwrap();
    assert_eq!(count, 2);
    assert_eq!(bench.count(), 1);
    assert_eq!(guard.run(async { Holder::current() }).await.unwrap(), Some(guard.holder()));
    guard.unlock().await.unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guards_run_stops_when_the_lock_is_lost() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    let guard = bench.lock.lock().await.unwrap();
    let (flag, dropped) = Flag::new();
    let work = guard.run(async move {
        let _flag = flag;
        pending::<()>().await;
    });
    bench.delete();
    let answer = tokio::time::timeout(LIMIT, work).await.expect("it is stopped");
    assert_lost(answer, LostReason::Gone);
    assert!(dropped.load(Ordering::SeqCst));
    // Nothing runs under a lock that is lost already.
    let never = guard.run(async { panic!("it runs without the lock") }).await;
    assert_lost::<()>(never, LostReason::Gone);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_stopped_and_its_future_dropped_when_the_lock_is_lost() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    for lease in [None, Some(Duration::from_millis(300))] {
        let (flag, dropped) = Flag::new();
        let (begun, running) = oneshot::channel();
        let run = bench.lock.run(async move {
            let _flag = flag;
            begun.send(()).unwrap();
            pending::<()>().await;
        });
        let run = match lease {
            None => run,
            Some(lease) => run.lease(lease),
        };
        let task = tokio::spawn(run);
        running.await.unwrap();
        let expected = match lease {
            None => {
                bench.delete();
                LostReason::Gone
            }
            Some(_) => LostReason::Expired,
        };
        let answer = tokio::time::timeout(LIMIT, task).await.expect("it is stopped").unwrap();
        assert_lost(answer, expected);
        assert!(dropped.load(Ordering::SeqCst));
        bench.wait_until_free();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_its_caller_drops_drops_its_future_and_releases() {
    let mut bench = Bench::new().await;
    let (flag, dropped) = Flag::new();
    let (begun, running) = oneshot::channel();
    let task = tokio::spawn(bench.lock.run(async move {
        let _flag = flag;
        begun.send(()).unwrap();
        pending::<()>().await;
    }));
    running.await.unwrap();
    assert_eq!(bench.count(), 1);
    assert!(!dropped.load(Ordering::SeqCst));
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    assert!(dropped.load(Ordering::SeqCst));
    bench.wait_until_free();

    // One that never got the lock drops its future, too.
    let guard = bench.lock.lock().await.unwrap();
    let (flag, dropped) = Flag::new();
    let mut waiting = Box::pin(bench.lock.run(async move {
        let _flag = flag;
    }));
    assert!((&mut waiting).now_or_never().is_none());
    assert!(!dropped.load(Ordering::SeqCst));
    drop(waiting);
    assert!(dropped.load(Ordering::SeqCst));
    guard.unlock().await.unwrap();
    bench.wait_until_free();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guards_run_that_its_caller_drops_keeps_the_guard() {
    let mut bench = Bench::new().await;
    let guard = bench.lock.lock().await.unwrap();
    let (flag, dropped) = Flag::new();
    let mut run = Box::pin(guard.run(async move {
        let _flag = flag;
        pending::<()>().await;
    }));
    assert!((&mut run).now_or_never().is_none());
    drop(run);
    assert!(dropped.load(Ordering::SeqCst));
    assert!(!guard.is_lost());
    assert_eq!(bench.count(), 1);
    guard.unlock().await.unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_inside_a_run_releases_the_lock() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    let nested = tokio::spawn(async move { lock.run(lock.run(async { panic!("on purpose") })).await.map(drop) });
    assert!(nested.await.unwrap_err().is_panic());
    bench.wait_until_free();
    let lock = bench.lock.clone();
    let guarded = tokio::spawn(async move {
        let guard = lock.lock().await.unwrap();
        guard.run(async { panic!("on purpose") }).await.map(|()| guard)
    });
    assert!(guarded.await.unwrap_err().is_panic());
    bench.wait_until_free();
    bench.lock.run(async {}).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guard_that_is_dropped_on_a_thread_without_a_runtime_is_released() {
    let mut bench = Bench::new().await;
    let guard = bench.lock.lock().await.unwrap();
    let thread = std::thread::spawn(move || drop(guard));
    wait_until("the thread has ended", LIMIT, || thread.is_finished());
    thread.join().expect("no panic");
    bench.wait_until_free();
}

#[test]
fn what_outlives_its_runtime_does_no_harm() {
    let server = Server::start();
    let mut observer = server.connection();
    let (names, url) = ([unique("runtime"), unique("runtime")], server.url());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (client, dropped, unlocked) = runtime.block_on(async {
        let builder = LockClient::builder().retry_timeout(Duration::from_millis(500));
        let client = builder.connect(&url).await.unwrap();
        let lease = Duration::from_millis(1_500);
        let [one, other] = names.each_ref().map(|name| client.lock(name).lock().lease(lease));
        (client, one.await.unwrap(), other.await.unwrap())
    });
    let lock = client.lock(&names[0]);
    drop(runtime);
    drop(dropped);
    let other = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let calls =
        async { (unlocked.unlock().await.is_err(), lock.try_lock().await.is_err(), lock.is_locked().await.is_err()) };
    let answers = other.block_on(async { tokio::time::timeout(LIMIT, calls).await });
    assert_eq!(answers.expect("no hang"), (true, true, true), "nobody can have reached the server");
    drop((client, lock));
    for name in names {
        wait_until("the lease runs out", LIMIT, || cmd("EXISTS").arg(&name).query::<i64>(&mut observer).unwrap() == 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unlocking_a_lock_that_was_deleted_says_that_it_was_lost() {
    let mut bench = Bench::new().await;
    let holder = Holder::new();
    let outer = bench.lock.lock().with_holder(holder).await.unwrap();
    let inner = bench.lock.lock().with_holder(holder).await.unwrap();
    bench.delete();
    assert_lost(inner.unlock().await, LostReason::Gone);
    assert!(outer.is_lost(), "what the inner hold found out the outer one knows");
    assert_lost(outer.unlock().await, LostReason::Gone);
    bench.lock.run(async {}).with_holder(holder).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn unlocking_or_dropping_a_lock_that_was_stolen_leaves_it_to_the_thief() {
    let mut bench = Bench::new().await;
    let guard = bench.lock.lock().await.unwrap();
    bench.steal();
    assert_lost(guard.unlock().await, LostReason::Gone);
    bench.assert_the_thief_keeps_it();
    bench.delete();

    let holder = Holder::new();
    let guard = bench.lock.lock().with_holder(holder).await.unwrap();
    bench.steal();
    drop(guard);
    // The same holder's next operation comes after the give-back.
    assert!(bench.lock.try_lock().with_holder(holder).await.unwrap().is_none());
    bench.assert_the_thief_keeps_it();
    bench.delete();

    let answer = bench.lock.run(async {}).await;
    assert!(answer.is_ok(), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_whose_lock_was_stolen_meanwhile_gives_no_result() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    let answer = lock
        .run(async {
            bench.steal();
            "a result"
        })
        .await;
    assert_lost(answer, LostReason::Gone);
    bench.assert_the_thief_keeps_it();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_re_entry_into_a_lock_that_was_stolen_is_none_and_tells_the_outer_hold() {
    let mut bench = Bench::new().await;
    let holder = Holder::new();
    let outer = bench.lock.lock().with_holder(holder).await.unwrap();
    bench.steal();
    assert!(bench.lock.try_lock().with_holder(holder).await.unwrap().is_none());
    assert_eq!(why_lost(&outer).await, LostReason::Gone);
    assert_lost(outer.unlock().await, LostReason::Gone);
    bench.assert_the_thief_keeps_it();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_re_entry_into_a_lock_that_was_deleted_is_a_new_possession() {
    let mut bench = Bench::new().await;
    let holder = Holder::new();
    let outer = bench.lock.lock().with_holder(holder).await.unwrap();
    bench.delete();
    let inner = bench.lock.lock().with_holder(holder).await.unwrap();
    assert_eq!(bench.count(), 1);
    assert_eq!(why_lost(&outer).await, LostReason::Gone);
    assert!(!inner.is_lost());
    assert_lost(outer.unlock().await, LostReason::Gone);
    assert_eq!(bench.count(), 1, "the lost guard takes nothing of the new possession");
    inner.unlock().await.unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn force_unlock_tells_every_hold_of_this_client_at_once() {
    let mut bench = Bench::new().await;
    let other = LockClient::connect(&bench.server.url()).await.unwrap().lock(&bench.name);
    let holder = Holder::new();
    let unlocked = bench.lock.lock().with_holder(holder).await.unwrap();
    let dropped = bench.lock.lock().with_holder(holder).await.unwrap();
    assert!(bench.lock.force_unlock().await.unwrap());
    // The watchdog timeout has most of its 30 s to go.
    assert_eq!(why_lost(&unlocked).await, LostReason::ForceUnlocked);
    assert_eq!(why_lost(&dropped).await, LostReason::ForceUnlocked);
    assert!(unlocked.is_lost() && dropped.is_lost());
    assert_eq!(unlocked.remaining_lease(), Duration::ZERO);

    let theirs = other.lock().await.unwrap();
    assert_lost(unlocked.unlock().await, LostReason::ForceUnlocked);
    drop(dropped);
    assert!(bench.lock.try_lock().with_holder(holder).await.unwrap().is_none(), "after whatever is given back");
    assert!(!theirs.is_lost());
    assert_eq!(bench.fields().len(), 1);
    theirs.unlock().await.unwrap();
    assert!(!bench.lock.force_unlock().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn force_unlock_by_another_client_is_told_with_the_next_renewal() {
    let bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    let other = LockClient::connect(&bench.server.url()).await.unwrap().lock(&bench.name);
    let guard = bench.lock.lock().await.unwrap();
    assert!(other.force_unlock().await.unwrap());
    assert_eq!(why_lost(&guard).await, LostReason::Gone);
    assert_lost(guard.unlock().await, LostReason::Gone);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_loss_is_told_before_anybody_else_has_the_lock() {
    let bench = Bench::new().await;
    let other = LockClient::connect(&bench.server.url()).await.unwrap().lock(&bench.name);
    for _ in 0..5 {
        let guard = bench.lock.lock().lease(Duration::from_millis(300)).await.unwrap();
        let told = tokio::spawn({
            let lost = guard.lost();
            async move { (lost.await, Instant::now()) }
        });
        let theirs = tokio::time::timeout(LIMIT, other.lock()).await.expect("the lease runs out").unwrap();
        assert!(guard.is_lost(), "two holders");
        assert_eq!(told.await.unwrap().0, LostReason::Expired);
        assert_lost(guard.unlock().await, LostReason::Expired);
        assert!(!theirs.is_lost());
        theirs.unlock().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_never_resolves_after_an_unlock() {
    let bench = Bench::new().await;
    let lease = Duration::from_millis(300);
    let guard = bench.lock.lock().lease(lease).await.unwrap();
    let mut lost = Box::pin(guard.lost());
    assert!((&mut lost).now_or_never().is_none());
    guard.unlock().await.unwrap();
    // The same lease, begun later, runs out, and a force-unlock of another hold is not this one's affair.
    let later = bench.lock.lock().lease(lease).await.unwrap();
    assert_eq!(why_lost(&later).await, LostReason::Expired);
    drop(later);
    let guard = bench.lock.lock().await.unwrap();
    assert!(bench.lock.force_unlock().await.unwrap());
    assert!(guard.is_lost());
    assert!((&mut lost).now_or_never().is_none(), "it was unlocked, not lost");
}

/// Two holds of one possession: when it is lost, the one that was unlocked before is not concerned.
#[tokio::test(flavor = "multi_thread")]
async fn lost_does_not_resolve_for_a_hold_that_was_unlocked_before_its_holders_other_one_was_lost() {
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    let outer = bench.lock.lock().await.unwrap();
    let inner = bench.lock.lock().with_holder(outer.holder()).await.unwrap();
    let mut lost = Box::pin(inner.lost());
    assert!((&mut lost).now_or_never().is_none());
    inner.unlock().await.unwrap();
    bench.delete();
    assert_eq!(why_lost(&outer).await, LostReason::Gone);
    assert!((&mut lost).now_or_never().is_none(), "it was unlocked, not lost");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_remaining_lease_runs_down_and_is_renewed() {
    let bench = Bench::with(LockClient::builder().watchdog_timeout(BRIEF)).await;
    let renewed = bench.lock.lock().await.unwrap();
    let mut before = renewed.remaining_lease();
    assert!(before > Duration::ZERO && before < BRIEF, "{before:?}");
    let (mut fell, mut rose) = (0, 0);
    wait_until("it runs down and is renewed", LIMIT, || {
        let now = renewed.remaining_lease();
        assert!(now > Duration::ZERO && now < BRIEF, "{now:?}");
        fell += usize::from(now < before);
        rose += usize::from(now > before);
        before = now;
        fell > 5 && rose > 3
    });

    let fixed = bench.client.lock(unique("guard")).lock().lease(BRIEF).await.unwrap();
    let mut before = fixed.remaining_lease();
    wait_until("it runs out", LIMIT, || {
        let now = fixed.remaining_lease();
        assert!(now <= before, "a lease of one's own is not renewed: {before:?}, then {now:?}");
        before = now;
        now == Duration::ZERO
    });
    assert!(fixed.is_lost());
    assert_eq!(why_lost(&fixed).await, LostReason::Expired);
    assert_eq!(fixed.remaining_lease(), Duration::ZERO);
    assert!(!renewed.is_lost());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_shortest_lease_is_lost_and_leaves_nothing() {
    let mut bench = Bench::new().await;
    let lease = Duration::from_millis(1);
    for _ in 0..30 {
        match bench.lock.lock().lease(lease).await {
            Ok(guard) => {
                assert!(guard.remaining_lease() <= lease);
                assert_eq!(why_lost(&guard).await, LostReason::Expired);
                assert_lost(guard.unlock().await, LostReason::Expired);
            }
            lost => assert_lost(lost, LostReason::Expired),
        }
        assert_lost(bench.lock.run(pending::<()>()).lease(lease).await, LostReason::Expired);
    }
    bench.wait_until_free();
    let guard = tokio::time::timeout(LIMIT, bench.lock.lock()).await.expect("it is free").unwrap();
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn forgotten_holds_that_are_unlocked_at_once_are_each_given_back() {
    const HOLDS: usize = 8;
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("forgotten"));
    Holder::scope(async {
        for _ in 0..HOLDS {
            lock.lock().await.unwrap().forget();
        }
        let unlocks: Vec<_> = (0..HOLDS)
            .map(|_| {
                let lock = lock.clone();
                tokio::spawn(async move { lock.unlock().await }.in_current_holder())
            })
            .collect();
        for unlock in unlocks {
            unlock.await.unwrap().unwrap();
        }
        assert!(matches!(lock.unlock().await, Err(Error::NotHeld { .. })));
    })
    .await;
    assert!(!lock.is_locked().await.unwrap());
}
