//! Code that blocks the threads of the caller's runtime: renewals and releases need none of them.

use std::time::{Duration, Instant};

use redisson_lock::LockClient;
use tokio::runtime::Builder;

use crate::support::observe::{exists, pttl};
use crate::support::server::{Server, unique, wait_until};

const WATCHDOG: Duration = Duration::from_millis(1_500);
const WORKERS: usize = 4;

#[test]
fn workers_blocked_for_three_watchdog_timeouts_lose_no_lock() {
    let server = Server::start();
    let mut redis = server.connection();
    let runtime = Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build()
        .unwrap();
    let (client, guards, dropped) = runtime.block_on(async {
        let client = LockClient::builder()
            .watchdog_timeout(WATCHDOG)
            .connect(&server.url())
            .await
            .unwrap();
        let mut guards = Vec::new();
        for _ in 0..20 {
            guards.push(client.lock(unique("stock")).lock().await.unwrap());
        }
        let dropped = client.lock(unique("dropped")).lock().await.unwrap();
        (client, guards, dropped)
    });
    let (blocked, are_blocked) = std::sync::mpsc::channel();
    for _ in 0..WORKERS {
        let (blocked, lock) = (blocked.clone(), client.lock(unique("blocker")));
        runtime.spawn(async move {
            // One of those that block holds a lock itself.
            let guard = lock.lock().await.unwrap();
            blocked.send(()).unwrap();
            std::thread::sleep(3 * WATCHDOG);
            assert!(!guard.is_lost());
            guard.unlock().await.unwrap();
        });
    }
    for _ in 0..WORKERS {
        are_blocked.recv().unwrap();
    }
    let begun = Instant::now();
    // From a plain thread, this one.
    let name = dropped.name().to_owned();
    drop(dropped);
    wait_until("the guard is released", Duration::from_secs(1), || {
        !exists(&mut redis, &name)
    });
    while begun.elapsed() < 3 * WATCHDOG {
        for guard in &guards {
            assert!(!guard.is_lost(), "after {:?}", begun.elapsed());
            assert!(pttl(&mut redis, guard.name()) > 0);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(client.stats().losses.total(), 0);
    runtime.block_on(async {
        for guard in guards {
            guard.unlock().await.unwrap();
        }
        client.shutdown().await.unwrap();
    });
    assert_eq!(client.stats().losses.total(), 0);
}
