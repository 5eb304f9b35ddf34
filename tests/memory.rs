//! What a client and its locks cost, in bytes that are allocated.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use redisson_lock::{Error, Holder, HolderExt, HolderPolicy, LockClient, LockGuard, ReentrantLock};
use support::server::{Server, unique, wait_until};
use tokio::sync::Mutex;

const LIMIT: Duration = Duration::from_secs(20);

/// The system's allocator, which counts.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: everything is passed on to the system's allocator, as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are the same.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// One test at a time: they count the bytes of the whole process.
static ALONE: Mutex<()> = Mutex::const_new(());

/// How much more is allocated than it was.
fn grown(before: usize) -> usize {
    ALLOCATED.load(Ordering::Relaxed).saturating_sub(before)
}

/// One client for a process is enough, but a program that has one for each of many servers should not feel it.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_costs_less_than_a_megabyte() {
    const CLIENTS: usize = 20;
    let _alone = ALONE.lock().await;
    let server = Server::start();
    // What the first one allocates for all is not counted.
    let _first = LockClient::connect(&server.url()).await.unwrap();
    let before = ALLOCATED.load(Ordering::Relaxed);
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(LockClient::connect(&server.url()).await.unwrap());
    }
    let each = grown(before) / CLIENTS;
    assert!(each < 1 << 20, "a client costs {} KiB", each / 1024);
}

/// A hold that was forgotten waits for its unlock. Where no scope has its holder that unlock cannot come, and when its
/// lease is over nothing may be left of it: a service would grow with each lock that it takes for a fixed time.
#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_hold_whose_lease_is_over_costs_no_memory() {
    const HOLDS: usize = 1_000;
    let _alone = ALONE.lock().await;
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let take = async |count: usize| -> Vec<LockGuard> {
        let mut guards = Vec::new();
        for _ in 0..count {
            guards.push(client.lock(unique("stock")).lock().lease(Duration::from_secs(1)).await.unwrap());
        }
        guards
    };
    // More at once than later: tables keep the room that they have been given.
    let guards = take(2 * HOLDS).await;
    wait_until("the leases are over", LIMIT, || guards.iter().all(LockGuard::is_lost));
    drop(guards);
    wait_until("the server has forgotten them", LIMIT, || keys(&server) == 0);
    let before = ALLOCATED.load(Ordering::Relaxed);
    take(HOLDS).await.into_iter().for_each(|guard| {
        guard.forget();
    });
    wait_until("forgotten holds leave less than 100 bytes each", LIMIT, || grown(before) < 100 * HOLDS);
}

/// Under a holder for each task an unlock may still come, and is told; but not for ever: the tasks may have ended.
#[tokio::test(flavor = "multi_thread")]
async fn lost_holds_that_tasks_have_forgotten_are_remembered_up_to_a_limit() {
    const REMEMBERED: usize = 1_000;
    let _alone = ALONE.lock().await;
    let server = Server::start();
    let client = LockClient::builder().holder_policy(HolderPolicy::PerTask).connect(&server.url()).await.unwrap();
    let forget = async |count: usize| {
        for _ in 0..count {
            let lock = client.lock(unique("stock"));
            let locked = async move { lock.lock().lease(Duration::from_millis(500)).await.unwrap().forget() };
            tokio::spawn(locked).await.unwrap();
        }
        wait_until("the server has forgotten them", LIMIT, || keys(&server) == 0);
    };
    forget(2 * REMEMBERED).await;
    let before = ALLOCATED.load(Ordering::Relaxed);
    forget(2 * REMEMBERED).await;
    wait_until("as many are remembered as before", LIMIT, || grown(before) < 100 * REMEMBERED);
    // This very task is among the latest.
    let lock = client.lock(unique("stock"));
    lock.lock().lease(Duration::from_millis(100)).await.unwrap().forget();
    wait_until("its lease is over", LIMIT, || keys(&server) == 0);
    assert!(matches!(lock.unlock().await, Err(Error::Lost { .. })));
    assert!(matches!(lock.unlock().await, Err(Error::NotHeld { .. })));
}

/// The same where a task locks again before it ends: the hold that was lost first is remembered, too, and within the same
/// limit.
#[tokio::test(flavor = "multi_thread")]
async fn lost_holds_of_tasks_that_locked_again_are_remembered_up_to_a_limit() {
    const TASKS: usize = 2_000;
    let _alone = ALONE.lock().await;
    let server = Server::start();
    let client = LockClient::builder().holder_policy(HolderPolicy::PerTask).connect(&server.url()).await.unwrap();
    let forget = async |count: usize| {
        for _ in 0..count / 500 {
            let tasks = (0..500).map(|_| {
                let lock = client.lock(unique("stock"));
                tokio::spawn(async move {
                    let take = || lock.lock().lease(Duration::from_millis(500));
                    let first = take().await.unwrap();
                    let lost = first.lost();
                    first.forget();
                    lost.await;
                    // The server forgets it a margin later.
                    take().await.unwrap().forget();
                })
            });
            for task in futures::future::join_all(tasks).await {
                task.unwrap();
            }
        }
        wait_until("the server has forgotten them", LIMIT, || keys(&server) == 0);
    };
    forget(TASKS).await;
    let before = ALLOCATED.load(Ordering::Relaxed);
    forget(TASKS).await;
    wait_until("as many are remembered as before", LIMIT, || grown(before) < 100 * TASKS);
}

/// What came of a release that was refused is not known, so its holder's entry stays: until the server can have nothing of
/// it any more, whoever the holder is.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_release_whose_lease_is_over_costs_no_memory() {
    const HOLDS: usize = 500;
    let _alone = ALONE.lock().await;
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let mut refuse = async |count: usize| {
        let locks: Vec<_> = (0..count).map(|_| client.lock(unique("stock"))).collect();
        let holder = Holder::from_thread_id(7).unwrap();
        let take = |lock: &ReentrantLock| lock.lock().lease(Duration::from_secs(3)).with_holder(holder).into_future();
        let guards = futures::future::try_join_all(locks.iter().map(take)).await.unwrap();
        redis::cmd("ACL").arg(&["SETUSER", "default", "-evalsha", "-eval"]).exec(&mut redis).unwrap();
        for guard in guards {
            let told = guard.unlock().await;
            assert!(matches!(told, Err(Error::Server { .. })), "{told:?}");
        }
        redis::cmd("ACL").arg(&["SETUSER", "default", "+evalsha", "+eval"]).exec(&mut redis).unwrap();
        wait_until("the leases are over", LIMIT, || keys(&server) == 0);
    };
    // More at once than later: tables keep the room that they have been given.
    refuse(2 * HOLDS).await;
    let before = ALLOCATED.load(Ordering::Relaxed);
    refuse(HOLDS).await;
    wait_until("refused releases leave less than 100 bytes each", LIMIT, || grown(before) < 100 * HOLDS);
}

fn keys(server: &Server) -> usize {
    redis::cmd("DBSIZE").query(&mut server.connection()).unwrap()
}
