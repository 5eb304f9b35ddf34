//! Re-entry: which requests re-enter a held lock, and which are excluded, by owner, scope and
//! owner policy.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::bench::{Bench, LIMIT};
use crate::support::observe::hold_count;
use crate::support::server::{Server, unique, wait_until, wait_until_async};
use redisson_lock::{
    DeadlockDetection, Error, LockClient, Owner, OwnerExt, OwnerPolicy, ReentrantLock,
};
use tokio::runtime::Handle;
use tokio::task::{JoinSet, yield_now};

/// Longer than any test, so that a step that waits for it fails.
const NEVER: Duration = Duration::from_secs(3600);

/// Counts the tasks that are in the critical section at the same time.
#[derive(Default)]
struct CriticalSection {
    inside: AtomicUsize,
    most: AtomicUsize,
}

impl CriticalSection {
    /// Stays in the section long enough for every other task to enter that can.
    async fn enter(&self) {
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
async fn nested_run_reenters() {
    let mut bench = Bench::shared(LockClient::builder()).await;
    let lock = &bench.lock;
    let counts = lock
        .run(async {
            let one = hold_count(lock).await.unwrap();
            let (two, three) = lock
                .run(async {
                    let two = hold_count(lock).await.unwrap();
                    (
                        two,
                        lock.run(async { hold_count(lock).await.unwrap() })
                            .await
                            .unwrap(),
                    )
                })
                .await
                .unwrap();
            [one, two, three, hold_count(lock).await.unwrap()]
        })
        .await
        .unwrap();
    assert_eq!(counts, [1, 2, 3, 1]);
    assert_eq!(bench.fields(), HashMap::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_of_request_in_a_scope_reenters() {
    let mut bench = Bench::shared(LockClient::builder()).await;
    let lock = bench.lock.clone();
    let (owner, guards) = Owner::scope(async {
        let guards = [
            lock.lock().await.unwrap(),
            lock.lock().timeout(Duration::ZERO).await.unwrap(),
            lock.lock().lease(LIMIT).await.unwrap(),
            lock.try_lock().await.unwrap().expect("a re-entry"),
            lock.try_lock_for(LIMIT)
                .lease(LIMIT)
                .await
                .unwrap()
                .expect("a re-entry"),
        ];
        assert_eq!(hold_count(&lock).await.unwrap(), 5);
        (Owner::current().unwrap(), guards)
    })
    .await;
    assert_eq!(
        bench.fields(),
        HashMap::from([(format!("{}:{owner}", bench.client.client_id()), 5)])
    );
    assert!(guards.iter().all(|guard| guard.owner() == owner));
    assert_eq!(
        hold_count(&lock).await.unwrap(),
        0,
        "a task outside the scope has holds"
    );
    assert!(
        lock.try_lock().await.unwrap().is_none(),
        "a request outside the scope acquired the lock"
    );
    for (left, guard) in (0..5).rev().zip(guards) {
        guard.unlock().await.unwrap();
        assert_eq!(bench.count(), left);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn owner_in_another_task_reenters() {
    let mut bench = Bench::shared(LockClient::builder()).await;
    let owner = Owner::new();
    let lock = bench.lock.clone();
    let first = lock.lock().with_owner(owner).await.unwrap();
    let task = tokio::spawn(async move { lock.lock().await }.with_owner(owner));
    let second = task.await.unwrap().unwrap();
    assert_eq!((first.owner(), second.owner()), (owner, owner));
    assert_eq!(bench.count(), 2);
    let other = bench
        .lock
        .try_lock()
        .with_owner(Owner::new())
        .await
        .unwrap();
    assert!(other.is_none(), "{other:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn spawned_task_reenters_only_in_current_owner() {
    let bench = Bench::shared(LockClient::builder()).await;
    let lock = bench.lock.clone();
    let outer = lock.clone();
    outer
        .run(async move {
            let (same_owner, other_owner) = (lock.clone(), lock.clone());
            let child = tokio::spawn(
                async move {
                    same_owner
                        .run(async { hold_count(&same_owner).await.unwrap() })
                        .await
                }
                .in_current_owner(),
            );
            assert_eq!(child.await.unwrap().unwrap(), 2);
            let child = tokio::spawn(async move { other_owner.try_lock().await });
            assert!(
                child.await.unwrap().unwrap().is_none(),
                "a spawned task has the owner"
            );
        })
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn join_set_tasks_reenter_only_in_current_owner() {
    let mut bench = Bench::shared(LockClient::builder()).await;
    let lock = bench.lock.clone();
    let outer = lock.clone();
    let (same_owner, other_owner) = outer
        .run(async move {
            let (mut same_owner, mut other_owner) = (JoinSet::new(), JoinSet::new());
            for _ in 0..8 {
                let lock = lock.clone();
                same_owner
                    .spawn(async move { lock.lock().await.unwrap().detach() }.in_current_owner());
            }
            let all = same_owner.join_all().await.len();
            assert_eq!(hold_count(&lock).await.unwrap(), 9);
            for _ in 0..8 {
                let lock = lock.clone();
                other_owner.spawn(async move { lock.try_lock().await.unwrap().is_some() });
            }
            for _ in 0..8 {
                lock.unlock().await.unwrap();
            }
            (all, other_owner.join_all().await)
        })
        .await
        .unwrap();
    assert_eq!(same_owner, 8);
    assert_eq!(other_owner, [false; 8]);
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn scope_ends_with_its_future() {
    let bench = Bench::shared(LockClient::builder()).await;
    let guard = Owner::scope(async { bench.lock.lock().await.unwrap() }).await;
    assert_eq!(bench.client.current_owner(), None);
    assert!(bench.lock.try_lock().await.unwrap().is_none());
    // `run` of the guard runs a future in the guard's owner.
    let count = guard
        .run(async {
            bench
                .lock
                .run(async { hold_count(&bench.lock).await })
                .await
        })
        .await;
    assert_eq!(count.unwrap().unwrap().unwrap(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn per_task_policy_task_reenters_and_excludes_others() {
    let mut bench = Bench::shared(LockClient::builder().owner_policy(OwnerPolicy::PerTask)).await;
    let lock = bench.lock.clone();
    let client = bench.client.clone();
    let task = tokio::spawn(async move {
        let owner = client.current_owner().unwrap();
        let first = lock.lock().await.unwrap();
        yield_now().await;
        let second = lock.try_lock().await.unwrap().expect("the same task");
        assert_eq!((first.owner(), second.owner()), (owner, owner));
        assert_eq!(lock.hold_count_of(owner).await.unwrap(), 2);
        (
            lock.run(async { hold_count(&lock).await.unwrap() })
                .await
                .unwrap(),
            first,
            second,
        )
    });
    let (count, first, second) = task.await.unwrap();
    assert_eq!(count, 3);
    assert_eq!(bench.count(), 2);

    let lock = bench.lock.clone();
    let other = tokio::spawn(async move { lock.try_lock().await.unwrap().is_none() });
    assert!(other.await.unwrap(), "another task acquired the lock");
    assert!(
        bench.lock.try_lock().await.unwrap().is_none(),
        "the thread outside any task acquired the lock"
    );
    first.unlock().await.unwrap();
    second.unlock().await.unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn per_task_policy_thread_reenters_and_excludes_others() {
    let mut bench = Bench::shared(LockClient::builder().owner_policy(OwnerPolicy::PerTask)).await;
    let on_a_thread = |lock: ReentrantLock| {
        let runtime = Handle::current();
        // Each `block_on` is another future of the same thread.
        let thread = std::thread::spawn(move || {
            let first = runtime.block_on(lock.try_lock().into_future()).unwrap()?;
            let second = runtime
                .block_on(lock.try_lock().into_future())
                .unwrap()
                .expect("the same thread");
            let count = runtime.block_on(lock.hold_count_of(first.owner()));
            assert_eq!(count.unwrap(), 2);
            Some((first, second))
        });
        tokio::task::spawn_blocking(|| thread.join().unwrap())
    };
    let (first, second) = on_a_thread(bench.lock.clone())
        .await
        .unwrap()
        .expect("a free lock");
    assert_eq!(first.owner(), second.owner());
    assert_eq!(bench.count(), 2);
    assert!(
        on_a_thread(bench.lock.clone()).await.unwrap().is_none(),
        "another thread acquired the lock"
    );
    let lock = bench.lock.clone();
    let task = tokio::spawn(async move { lock.try_lock().await.unwrap().is_none() });
    assert!(task.await.unwrap(), "a task acquired the lock");
    first.unlock().await.unwrap();
    second.unlock().await.unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn per_task_policy_task_unlocks_its_detached_holds() {
    let mut bench = Bench::shared(LockClient::builder().owner_policy(OwnerPolicy::PerTask)).await;
    let (client, lock) = (bench.client.clone(), bench.lock.clone());
    tokio::spawn(async move {
        let _ = lock.lock().await.unwrap().detach();
        let _ = lock.lock().await.unwrap().detach();
        let other = lock.clone();
        let refused = tokio::spawn(async move { other.unlock().await })
            .await
            .unwrap();
        assert!(matches!(refused, Err(Error::NotHeld { .. })), "{refused:?}");
        lock.unlock().await.unwrap();
        let owner = client.current_owner().unwrap();
        assert_eq!(lock.hold_count_of(owner).await.unwrap(), 1);
        lock.unlock().await.unwrap();
    })
    .await
    .unwrap();
    assert_eq!(bench.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn joined_locks_outside_a_scope_exclude_each_other() {
    let bench = Bench::shared(LockClient::builder()).await;
    let section = CriticalSection::default();
    let branch = || async {
        for _ in 0..3 {
            let guard = bench.lock.lock().await.unwrap();
            section.enter().await;
            guard.unlock().await.unwrap();
        }
    };
    tokio::join!(branch(), branch(), branch());
    assert_eq!(section.most(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn joined_runs_outside_a_scope_exclude_each_other() {
    let bench = Bench::shared(LockClient::builder()).await;
    let section = CriticalSection::default();
    let branch = || async {
        for _ in 0..3 {
            bench.lock.run(section.enter()).await.unwrap();
        }
    };
    tokio::join!(branch(), branch(), branch());
    assert_eq!(section.most(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn joined_branches_in_one_scope_share_the_lock() {
    let mut bench = Bench::shared(LockClient::builder()).await;
    let lock = bench.lock.clone();
    let (one, other) = Owner::scope(async { tokio::join!(lock.lock(), lock.lock()) }).await;
    let guards = (one.unwrap(), other.unwrap());
    assert_eq!(guards.0.owner(), guards.1.owner());
    assert_eq!(bench.count(), 2);
    drop(guards);
    wait_until_async("both are released", LIMIT, || {
        let lock = lock.clone();
        async move { !lock.is_locked().await.unwrap() }
    })
    .await;

    // Both branches have to be in the section at once: if they excluded each other, none would end.
    let barrier = tokio::sync::Barrier::new(2);
    let branch = || async { lock.run(barrier.wait()).await.unwrap() };
    tokio::time::timeout(
        LIMIT,
        Owner::scope(async { tokio::join!(branch(), branch()) }),
    )
    .await
    .expect("the branches exclude each other");
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_branches_in_one_scope_all_acquire() {
    let mut bench = Bench::shared(LockClient::builder().recheck_interval(NEVER)).await;
    let other = LockClient::connect(&bench.server.url()).await.unwrap();
    let theirs = other.lock(&bench.name).lock().await.unwrap();
    let lock = bench.lock.clone();
    let waiting = tokio::spawn(Owner::scope(async move {
        let (one, other, third) = tokio::join!(lock.lock(), lock.lock(), lock.try_lock_for(NEVER));
        (one.unwrap(), other.unwrap(), third.unwrap().unwrap())
    }));
    wait_until("the branches have subscribed", LIMIT, || {
        bench.is_waited_for()
    });
    assert!(!waiting.is_finished());
    theirs.unlock().await.unwrap();
    let guards = tokio::time::timeout(LIMIT, waiting)
        .await
        .expect("not every branch acquired the lock")
        .unwrap();
    assert_eq!(bench.count(), 3);
    drop(guards);
    wait_until("all are released", LIMIT, || bench.count() == 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn reentry_does_not_wait_in_the_queue() {
    let mut bench = Bench::shared(LockClient::builder().recheck_interval(NEVER)).await;
    let lock = bench.lock.clone();
    let owner = Owner::new();
    let outer = lock.lock().with_owner(owner).await.unwrap();
    let waiting = tokio::spawn(bench.lock.lock().into_future());
    wait_until("the waiter has subscribed", LIMIT, || bench.is_waited_for());
    let inner = tokio::time::timeout(LIMIT, lock.lock().with_owner(owner))
        .await
        .expect("the re-entry waits")
        .unwrap();
    assert_eq!(bench.count(), 2);
    assert!(!waiting.is_finished());
    outer.unlock().await.unwrap();
    assert_eq!(bench.count(), 1);
    assert!(!waiting.is_finished());
    inner.unlock().await.unwrap();
    let theirs = tokio::time::timeout(LIMIT, waiting)
        .await
        .expect("the waiter did not acquire the lock")
        .unwrap()
        .unwrap();
    assert_ne!(theirs.owner(), owner);
}

#[tokio::test(flavor = "multi_thread")]
async fn lock_stays_held_until_last_hold_is_released() {
    let mut bench = Bench::shared(LockClient::builder()).await;
    for outer_first in [true, false] {
        let lock = &bench.lock;
        let (outer, inner) =
            Owner::scope(async { (lock.lock().await.unwrap(), lock.lock().await.unwrap()) }).await;
        let (first, second) = if outer_first {
            (outer, inner)
        } else {
            (inner, outer)
        };
        first.unlock().await.unwrap();
        assert_eq!(bench.count(), 1, "outer first: {outer_first}");
        assert!(!second.is_lost());
        assert!(bench.lock.try_lock().await.unwrap().is_none());
        second.unlock().await.unwrap();
        assert_eq!(bench.count(), 0, "outer first: {outer_first}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_clients_in_one_scope_are_two_owners() {
    let bench = Bench::shared(LockClient::builder()).await;
    let other = LockClient::connect(&bench.server.url()).await.unwrap();
    Owner::scope(async {
        let _guard = bench.lock.lock().await.unwrap();
        assert!(other.lock(&bench.name).try_lock().await.unwrap().is_none());
        assert_eq!(hold_count(&other.lock(&bench.name)).await.unwrap(), 0);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn holds_of_two_locks_are_counted_separately() {
    let bench = Bench::shared(LockClient::builder()).await;
    let second = bench.client.lock(unique("reentrancy"));
    Owner::scope(async {
        let one = bench.lock.lock().await.unwrap();
        let other = second.lock().await.unwrap();
        assert_eq!(
            (
                hold_count(&bench.lock).await.unwrap(),
                hold_count(&second).await.unwrap()
            ),
            (1, 1)
        );
        one.unlock().await.unwrap();
        assert_eq!(hold_count(&second).await.unwrap(), 1);
        other.unlock().await.unwrap();
    })
    .await;
}

/// Two requests of one owner wait, and both get the lock: the second one re-enters.
#[tokio::test]
async fn two_waiting_requests_of_one_owner_are_both_granted() {
    let server = Server::start();
    let client = LockClient::builder()
        .deadlock_detection(DeadlockDetection::Fail)
        .connect(&server.url())
        .await
        .unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let lock = client.lock(&name);
    let theirs = other.lock(&name).lock().await.unwrap();
    let owner = Owner::new();
    let release = async {
        wait_until_async("both wait", LIMIT, || async {
            client.stats().requests_waiting == 2
        })
        .await;
        theirs.unlock().await.unwrap();
    };
    let (one, two, ()) = tokio::join!(
        lock.lock().timeout(LIMIT).with_owner(owner),
        lock.lock().timeout(LIMIT).with_owner(owner),
        release,
    );
    let (one, two) = (one.unwrap(), two.unwrap());
    assert_eq!((one.hold_count(), two.hold_count()), (2, 2));
    one.unlock().await.unwrap();
    two.unlock().await.unwrap();
    assert!(!lock.is_locked().await.unwrap());
}
