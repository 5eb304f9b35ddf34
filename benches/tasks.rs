//! Lock and unlock by one task and by many, each with a lock of its own, beside bare scripts with
//! Redisson's steps through redis-rs' multiplexed connection, on the same runtime.
//!
//! Prints the medians of ROUNDS (7) rounds, in which the subjects alternate. TASKS (1 4 16 64 256)
//! are the numbers of tasks.

use std::time::{Duration, Instant};

use bytes::Bytes;
use redisson_lock::LockClient;
use tokio::runtime::Runtime;

use support::server::{Server, unique};
use support::{info, load, median, runtime, version};

/// How long a subject runs in a round.
const SLICE: Duration = Duration::from_millis(400);

/// What Redisson's lock script does for a free lock: the floor that others pay, too.
const LOCK: &str = "if redis.call('exists', KEYS[1]) == 0 \
    or redis.call('hexists', KEYS[1], ARGV[2]) == 1 then \
    redis.call('hincrby', KEYS[1], ARGV[2], 1) \
    redis.call('pexpire', KEYS[1], ARGV[1]) return nil end \
    return redis.call('pttl', KEYS[1])";

/// And what its unlock script does.
const UNLOCK: &str = "if redis.call('hexists', KEYS[1], ARGV[2]) == 0 then return nil end \
    if redis.call('hincrby', KEYS[1], ARGV[2], -1) > 0 then \
    redis.call('pexpire', KEYS[1], ARGV[1]) return 0 end \
    redis.call('del', KEYS[1]) redis.call('publish', ARGV[3], '0') return 1";

/// What a pair of calls costs.
#[derive(Clone, Copy)]
struct Cost {
    pairs_per_second: f64,
    /// Microseconds of processor time of this process.
    processor: f64,
    /// Script calls.
    calls: f64,
}

fn processor_time() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_PROCESS_CPUTIME_ID)
        .expect("a clock")
        .into()
}

/// Runs the pairs of each task until the time is over.
fn measure<F: Future<Output = ()> + Send + 'static>(
    runtime: &Runtime,
    server: &Server,
    tasks: usize,
    pair: impl Fn(usize) -> F + Clone + Send + 'static,
) -> Cost {
    let mut redis = server.connection();
    let mut calls = || info(&mut redis, "commandstats", "cmdstat_evalsha:calls=");
    let (calls_before, processor) = (calls(), processor_time());
    let begun = Instant::now();
    let running: Vec<_> = (0..tasks)
        .map(|number| {
            let pair = pair.clone();
            runtime.spawn(async move {
                let mut pairs = 0_u64;
                while begun.elapsed() < SLICE {
                    pair(number).await;
                    pairs += 1;
                }
                pairs
            })
        })
        .collect();
    let pairs = runtime.block_on(async {
        let mut pairs = 0;
        for task in running {
            pairs += task.await.expect("no panic");
        }
        pairs as f64
    });
    Cost {
        pairs_per_second: pairs / begun.elapsed().as_secs_f64(),
        processor: (processor_time() - processor).as_secs_f64() * 1e6 / pairs,
        calls: (calls() - calls_before) as f64 / pairs,
    }
}

fn main() {
    let rounds = std::env::var("ROUNDS").map_or(7, |rounds| rounds.parse().expect("a number"));
    let tasks: Vec<usize> = std::env::var("TASKS")
        .unwrap_or_else(|_| "1 4 16 64 256".to_owned())
        .split_whitespace()
        .map(|tasks| tasks.parse().expect("a number"))
        .collect();
    let server = Server::shared_or_start();
    let runtime = runtime();
    let mut redis = server.connection();
    let (lock, unlock) = (load(&mut redis, LOCK), load(&mut redis, UNLOCK));
    let plain = runtime.block_on(support::Plain::connect(&server.url()));
    let client = runtime
        .block_on(LockClient::connect(&server.url()))
        .expect("a lock client");
    let most = tasks.iter().copied().max().expect("a number");
    let names: Vec<_> = (0..most).map(|_| unique("bench")).collect();
    let locks: Vec<_> = names.iter().map(|name| client.lock(name)).collect();
    let owner = Bytes::from_static(b"6fa459ea-ee8a-4ca4-894e-db77e160355e:4");
    let bare = move |number: usize| {
        let (mut plain, lock, unlock) = (plain.clone(), lock.clone(), unlock.clone());
        let (key, owner) = (names[number].clone(), owner.clone());
        async move {
            let lease = Bytes::from_static(b"30000");
            let channel = Bytes::from(format!("redisson_lock__channel:{{{key}}}"));
            plain.script(&lock, key.as_bytes(), &[&lease, &owner]).await;
            plain
                .script(&unlock, key.as_bytes(), &[&lease, &owner, &channel])
                .await;
        }
    };
    let pair = move |number: usize| {
        let lock = locks[number].clone();
        async move {
            let guard = lock.lock().await.expect("granted");
            guard.unlock().await.expect("released");
        }
    };
    let mut figures = vec![(Vec::new(), Vec::new()); tasks.len()];
    // The first round warms up.
    for round in 0..=rounds {
        for (tasks, (bares, pairs)) in tasks.iter().zip(&mut figures) {
            let one = measure(&runtime, &server, *tasks, bare.clone());
            let other = measure(&runtime, &server, *tasks, pair.clone());
            if round > 0 {
                bares.push(one);
                pairs.push(other);
            }
        }
    }
    println!(
        "{}, {rounds} rounds; processor time of this process per pair in us",
        version(&mut redis)
    );
    println!(
        "{:>5} | {:>12} {:>9} | {:>12} {:>9} {:>8} | {:>6}",
        "tasks", "bare pairs/s", "processor", "ours pairs/s", "processor", "calls", "ratio"
    );
    for (tasks, (bares, pairs)) in tasks.iter().zip(&figures) {
        let of = |costs: &[Cost], figure: fn(&Cost) -> f64| {
            median(&mut costs.iter().map(figure).collect::<Vec<_>>())
        };
        let mut ratios: Vec<_> = bares
            .iter()
            .zip(pairs)
            .map(|(bare, ours)| ours.pairs_per_second / bare.pairs_per_second)
            .collect();
        println!(
            "{tasks:>5} | {:>12.0} {:>9.1} | {:>12.0} {:>9.1} {:>8.2} | {:>6.2}",
            of(bares, |cost| cost.pairs_per_second),
            of(bares, |cost| cost.processor),
            of(pairs, |cost| cost.pairs_per_second),
            of(pairs, |cost| cost.processor),
            of(pairs, |cost| cost.calls),
            median(&mut ratios),
        );
    }
    runtime.block_on(client.shutdown()).expect("shut down");
}
