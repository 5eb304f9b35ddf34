//! What held locks cost while nothing else happens: allocated bytes, time of the processor and
//! script calls. `LOCKS=100000` sets their number.

#![expect(unsafe_code, reason = "an allocator that counts is an unsafe trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use redisson_lock::LockClient;
use support::server::Server;

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

/// The time of the processor that this process has used.
fn used() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("the usage of this process");
    let micros = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Duration::from_micros(micros.unsigned_abs())
}

const WATCHDOG: Duration = Duration::from_secs(9);
const MEASURED: Duration = Duration::from_secs(27);

fn main() {
    let server = Server::shared_or_start();
    let locks = std::env::var("LOCKS")
        .ok()
        .and_then(|locks| locks.parse().ok())
        .unwrap_or(100_000_usize);
    support::runtime().block_on(async {
        let client = LockClient::builder()
            .watchdog_timeout(WATCHDOG)
            .connect(&server.url())
            .await
            .expect("a connection");
        // Its tables, buffers and scripts are there before.
        drop(client.lock("warm").lock().await.expect("a grant"));
        let before = ALLOCATED.load(Ordering::Relaxed);
        let begun = Instant::now();
        let guards: Vec<_> = futures::stream::iter(0..locks)
            .map(|lock| client.lock(format!("stock:{lock:09}")).lock().into_future())
            .buffer_unordered(256)
            .map(|guard| guard.expect("a grant"))
            .collect()
            .await;
        println!("{locks} locks acquired in {:?}", begun.elapsed());
        let mut redis = server.connection();
        let calls = |redis: &mut redis::Connection| {
            support::info(redis, "commandstats", "cmdstat_evalsha:calls=")
        };
        // What the acquisitions left in flight is over.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let bytes = ALLOCATED.load(Ordering::Relaxed).saturating_sub(before) / locks;
        let (cpu, scripts, begun) = (used(), calls(&mut redis), Instant::now());
        tokio::time::sleep(MEASURED).await;
        let seconds = begun.elapsed().as_secs_f64();
        let cpu = (used() - cpu).as_secs_f64() / seconds;
        let scripts = (calls(&mut redis) - scripts) as f64 / seconds;
        let lost = guards.iter().filter(|guard| guard.is_lost()).count();
        println!("held locks                        {locks:>10}");
        println!("allocated, with the guard         {bytes:>10} bytes per lock");
        println!("processor, of one core            {:>10.1} %", cpu * 100.0);
        println!("script calls                      {scripts:>10.1} per second");
        println!("lost                              {lost:>10}");
        drop(guards);
        client.shutdown().await.expect("an orderly end");
    });
}
