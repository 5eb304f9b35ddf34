//! Memory: how many bytes a client and its holds allocate, and that they are freed.

#![expect(unsafe_code, reason = "an allocator that counts is an unsafe trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use redisson_lock::{Error, LockClient, LockGuard, Owner, OwnerExt, OwnerPolicy, ReentrantLock};

use crate::support::process::{self, run_alone};
use crate::support::server::{Server, unique, wait_until};

const LIMIT: Duration = Duration::from_secs(20);

/// The system's allocator with a count of the allocated bytes.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn worker_process() {
    match process::role().as_deref() {
        None => {}
        Some("client") => client().await,
        Some("detached_hold") => detached_hold().await,
        Some("lost_holds_of_tasks") => lost_holds_of_tasks().await,
        Some("lost_holds_of_relocking_tasks") => lost_holds_of_relocking_tasks().await,
        Some("refused_release") => refused_release().await,
        Some(other) => panic!("no measurement {other:?}"),
    }
}

/// Repeats `work` until one round leaves less than `limit` bytes more than there were before it.
///
/// Tables double their capacity now and then, so a single round may grow. A leak grows with each
/// round.
async fn stops_growing(what: &str, limit: usize, mut work: impl AsyncFnMut()) {
    const ROUNDS: usize = 6;
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        let before = ALLOCATED.load(Ordering::Relaxed);
        work().await;
        // The client's tasks deallocate a moment after the release.
        for _ in 0..200 {
            if grown(before) < limit {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        rounds.push(grown(before));
    }
    panic!("{what}: each of {ROUNDS} rounds left {limit} bytes or more: {rounds:?}");
}

/// How much more is allocated than it was.
fn grown(before: usize) -> usize {
    ALLOCATED.load(Ordering::Relaxed).saturating_sub(before)
}

#[test]
fn client_allocates_less_than_a_megabyte() {
    run_alone("memory::worker_process", "client");
}

#[test]
fn detached_hold_with_expired_lease_keeps_no_memory() {
    run_alone("memory::worker_process", "detached_hold");
}

#[test]
fn lost_detached_holds_of_tasks_are_kept_up_to_a_limit() {
    run_alone("memory::worker_process", "lost_holds_of_tasks");
}

#[test]
fn lost_detached_holds_of_relocking_tasks_are_kept_up_to_a_limit() {
    run_alone("memory::worker_process", "lost_holds_of_relocking_tasks");
}

#[test]
fn refused_release_with_expired_lease_keeps_no_memory() {
    run_alone("memory::worker_process", "refused_release");
}

/// One client for a process is enough, but a program may have one for each of many servers.
async fn client() {
    const CLIENTS: usize = 20;
    let server = Server::start();
    // The first client allocates what all of them share; that is not counted.
    let _first = LockClient::connect(&server.url()).await.unwrap();
    let before = ALLOCATED.load(Ordering::Relaxed);
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(LockClient::connect(&server.url()).await.unwrap());
    }
    let each = grown(before) / CLIENTS;
    assert!(each < 1 << 20, "a client costs {} KiB", each / 1024);
}

/// A detached hold waits for its unlock. Without a scope of its owner no unlock can come, so the
/// client must keep nothing of it after its lease has expired. Otherwise a service would grow with
/// each lock that it acquires with a fixed lease and detaches.
async fn detached_hold() {
    const HOLDS: usize = 1_000;
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let take = async |count: usize| -> Vec<LockGuard> {
        let mut guards = Vec::new();
        for _ in 0..count {
            let lock = client.lock(unique("stock"));
            guards.push(granted(&lock, Duration::from_secs(1)).await);
        }
        guards
    };
    stops_growing("detached holds", 100 * HOLDS, async || {
        take(HOLDS).await.into_iter().for_each(|guard| {
            let _ = guard.detach();
        });
        wait_until("the leases have expired", LIMIT, || keys(&server) == 0);
    })
    .await;
}

/// Acquires the lock for a short lease. On a busy machine the lease can expire before the reply
/// arrives: then once more.
async fn granted(lock: &ReentrantLock, lease: Duration) -> LockGuard {
    loop {
        match lock.lock().lease(lease).await {
            Ok(guard) => return guard,
            Err(Error::Lost { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// With an owner for each task an unlock may still come, and it reports the loss. The client
/// remembers a limited number of lost holds only, because the tasks may have ended.
async fn lost_holds_of_tasks() {
    const REMEMBERED: usize = 1_000;
    let server = Server::start();
    let client = LockClient::builder()
        .owner_policy(OwnerPolicy::PerTask)
        .connect(&server.url())
        .await
        .unwrap();
    let detach_all = async |count: usize| {
        for _ in 0..count {
            let lock = client.lock(unique("stock"));
            let locked = async move { granted(&lock, Duration::from_millis(500)).await.detach() };
            tokio::spawn(locked).await.unwrap();
        }
        wait_until("the leases have expired", LIMIT, || keys(&server) == 0);
    };
    stops_growing("lost holds", 100 * REMEMBERED, async || {
        detach_all(2 * REMEMBERED).await
    })
    .await;
    // The hold of this task is one of the latest.
    let lock = client.lock(unique("stock"));
    let _ = granted(&lock, Duration::from_millis(100)).await.detach();
    wait_until("its lease has expired", LIMIT, || keys(&server) == 0);
    assert!(matches!(lock.unlock().await, Err(Error::Lost { .. })));
    assert!(matches!(lock.unlock().await, Err(Error::NotHeld { .. })));
}

/// The same with tasks that lock again before they end: the client remembers the hold that was lost
/// first, too, within the same limit.
async fn lost_holds_of_relocking_tasks() {
    const TASKS: usize = 2_000;
    let server = Server::start();
    let client = LockClient::builder()
        .owner_policy(OwnerPolicy::PerTask)
        .connect(&server.url())
        .await
        .unwrap();
    let detach_all = async |count: usize| {
        for _ in 0..count / 500 {
            let tasks = (0..500).map(|_| {
                let lock = client.lock(unique("stock"));
                tokio::spawn(async move {
                    let take = || granted(&lock, Duration::from_millis(500));
                    let first = take().await;
                    let lost = first.lost();
                    let _ = first.detach();
                    lost.await;
                    // The key expires a margin later.
                    let _ = take().await.detach();
                })
            });
            for task in futures::future::join_all(tasks).await {
                task.unwrap();
            }
        }
        wait_until("the leases have expired", LIMIT, || keys(&server) == 0);
    };
    stops_growing("lost holds", 100 * TASKS, async || detach_all(TASKS).await).await;
}

/// The outcome of a refused release is unknown, so the client keeps the owner's entry until the
/// lease on the server must have expired. This holds for every kind of owner.
async fn refused_release() {
    const HOLDS: usize = 500;
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let mut refuse = async |count: usize| {
        let locks: Vec<_> = (0..count).map(|_| client.lock(unique("stock"))).collect();
        let owner = Owner::from_thread_id(7).unwrap();
        let take = |lock: &ReentrantLock| {
            lock.lock()
                .lease(Duration::from_secs(3))
                .with_owner(owner)
                .into_future()
        };
        let guards = futures::future::try_join_all(locks.iter().map(take))
            .await
            .unwrap();
        redis::cmd("ACL")
            .arg(&["SETUSER", "default", "-evalsha", "-eval"])
            .exec(&mut redis)
            .unwrap();
        for guard in guards {
            let told = guard.unlock().await;
            // On a busy machine some leases expire before their unlocks are refused.
            let is_refused = matches!(told, Err(Error::Server { .. } | Error::Lost { .. }));
            assert!(is_refused, "{told:?}");
        }
        redis::cmd("ACL")
            .arg(&["SETUSER", "default", "+evalsha", "+eval"])
            .exec(&mut redis)
            .unwrap();
        wait_until("the leases have expired", LIMIT, || keys(&server) == 0);
    };
    stops_growing("refused releases", 100 * HOLDS, async || {
        refuse(HOLDS).await
    })
    .await;
}

fn keys(server: &Server) -> usize {
    redis::cmd("DBSIZE")
        .query(&mut server.connection())
        .unwrap()
}
