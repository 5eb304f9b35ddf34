//! A deterministic simulation of whole clients: every order of events, and every fault, follows
//! from a seed.
//!
//! | module | content |
//! |---|---|
//! | `world` | the virtual clock, the events, the faults |
//! | `server` | a server in memory that runs the Lua files |
//! | `network` | the two connections of each client |
//! | `callers` | random programs of callers |
//! | `foreign` | clients of Redisson, and programs with a token lock, on the same keys |
//! | `oracle` | what must hold after each step, and at the end |
//! | `liveness` | what has to end within its time, and what must not end without a reason |
//! | `probe` | what the oracle reads of an engine |
//! | `small` | every schedule of small worlds |
//! | `regressions` | defects that the simulation found |
//!
//! `SIM_SEED=n` begins with that seed, and runs for `SIM_SECONDS`. A failure prints the seed of its
//! schedule: that seed with 0 seconds repeats it. `SIM_ALL=1` counts failures rather than stopping.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

mod callers;
mod foreign;
mod liveness;
mod many;
mod network;
mod oracle;
mod probe;
mod regressions;
mod server;
mod small;
mod world;

use world::{Figures, Plan, World};

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs one schedule. On a violation it returns the trace.
fn run(seed: u64, plan: Plan) -> (Figures, Option<String>) {
    let mut world = World::new(seed, plan.clone(), false);
    world.begin();
    world.run();
    let failed = world.violation.is_some().then(|| trace(seed, plan));
    (world.figures, failed)
}

/// The trace of a schedule.
fn trace(seed: u64, plan: Plan) -> String {
    let mut world = World::new(seed, plan.clone(), true);
    world.begin();
    world.run();
    let lines = world.trace.take().unwrap_or_default();
    let problem = world.violation.unwrap_or_default();
    format!(
        "seed {seed}\n{plan:#?}\n{}\nseed {seed}: {problem}",
        lines.join("\n")
    )
}

#[test]
fn random_schedules_keep_every_invariant() {
    let seconds = setting("SIM_SECONDS").unwrap_or(5);
    let first = setting("SIM_SEED").unwrap_or_else(rand::random);
    let threads = std::thread::available_parallelism()
        .map_or(2, usize::from)
        .min(2) as u64;
    let (begun, limit) = (Instant::now(), Duration::from_secs(seconds));
    let is_over = Arc::new(AtomicBool::new(false));
    let runs = (0..threads).map(|thread| {
        let is_over = Arc::clone(&is_over);
        std::thread::spawn(move || {
            let mut figures = Figures::default();
            let mut seed = first.wrapping_add(thread);
            loop {
                let (one, failed) = run(seed, Plan::of_seed(seed));
                figures.add(&one);
                if let Some(trace) = failed {
                    if setting("SIM_ALL").is_none() {
                        is_over.store(true, Ordering::Relaxed);
                        return (figures, Some(trace));
                    }
                    println!("{}", trace.lines().last().unwrap_or_default());
                }
                if begun.elapsed() > limit || is_over.load(Ordering::Relaxed) {
                    return (figures, None);
                }
                seed = seed.wrapping_add(threads);
            }
        })
    });
    let runs: Vec<_> = runs.collect();
    let mut figures = Figures::default();
    let mut failed = None;
    for thread in runs {
        let (one, trace) = thread.join().unwrap();
        figures.add(&one);
        failed = failed.or(trace);
    }
    let elapsed = begun.elapsed().as_secs_f64();
    let used = nix::time::clock_gettime(nix::time::ClockId::CLOCK_PROCESS_CPUTIME_ID);
    let used = Duration::from(used.unwrap()).as_secs_f64();
    println!(
        "sim: seed {first}, {elapsed:.1} s with {threads} threads, {used:.1} s of processor time"
    );
    println!(
        "sim: {} schedules ({:.0} a second, {:.0} a second of processor time)",
        figures.schedules,
        figures.schedules as f64 / elapsed,
        figures.schedules as f64 / used,
    );
    println!(
        "sim: {} operations, {} grants, {} losses, {} script calls, {} steps",
        figures.operations, figures.grants, figures.losses, figures.scripts, figures.steps,
    );
    for (fault, count) in &figures.faults {
        println!("sim: {count:>9}  {fault}");
    }
    println!("sim: {} violations", u32::from(failed.is_some()));
    if let Some(trace) = failed {
        panic!("{trace}");
    }
}

#[test]
fn same_seed_gives_same_trace() {
    for seed in 0..40 {
        assert_eq!(
            trace(seed, Plan::of_seed(seed)),
            trace(seed, Plan::of_seed(seed))
        );
    }
}

/// The positive control: a server that forgets its data breaks exclusion, and the oracle sees it.
#[test]
fn server_that_forgets_is_reported_without_excuses() {
    let failed = (0..200).find_map(|seed| {
        let mut plan = Plan::of_seed(seed);
        plan.clients = 2;
        (plan.foreign, plan.programs) = (0, 0);
        plan.allow(&["server restarts without data"]);
        assert!(run(seed, plan.clone()).1.is_none());
        plan.has_excuses = false;
        run(seed, plan).1
    });
    let trace = failed.expect("a violation");
    assert!(trace.contains("is sure of"), "{trace}");
}
