//! Random faults against several processes, and a judge of their histories.
//!
//! `make chaos CHAOS_SECONDS=600 CHAOS_SEED=7` runs for 600 s with that seed. The same seed and
//! seconds plan the same faults at the same times. `chaos/judge.rs` explains the rules.

mod actor;
mod attempts;
mod claims;
mod faults;
mod forced;
mod held;
mod history;
mod judge;
mod judged;
mod judged_clock;
mod judged_forced;
mod judged_late;
mod outcomes;
mod plan;
mod report;
mod run;
mod scenario;
mod server_faults;
#[path = "../support/mod.rs"]
mod support;
mod wakeups;
mod worker;

use std::ops::RangeInclusive;
use std::time::Duration;

use history::History;
use judge::{Rule, Violation, judge};
use plan::{Kind, Planned, plan};
use report::Figures;
use run::Run;
use server_faults::with_users;
use support::process;
use support::server::Server;

/// The allowed duration of a run, in seconds. The last five seconds have no faults.
const SECONDS: RangeInclusive<u64> = 6..=86_400;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_faults_break_no_promise() {
    let given = |name: &str, allowed: RangeInclusive<u64>| {
        let value = std::env::var(name).ok().filter(|value| !value.is_empty());
        value.map(|value| setting(name, &value, allowed).unwrap_or_else(|wrong| panic!("{wrong}")))
    };
    let seconds = given("CHAOS_SECONDS", SECONDS).unwrap_or(10);
    let seed =
        given("CHAOS_SEED", 0..=u64::MAX).unwrap_or_else(|| rand::random_range(0..1_000_000));
    println!("seed {seed}, {seconds} s");
    // A short run has no time to wait for long leases of killed processes.
    let (workers, long_lease) = if seconds < 30 { (4, 6) } else { (6, 20) };
    let long_lease = Duration::from_secs(long_lease);
    let planned = plan(seed, seconds, workers as usize);
    let server = with_users(Server::builder().persistent(), workers).start();
    let verdict = Run {
        seed,
        seconds,
        workers,
        tasks: 8,
        long_lease,
        planned,
        server,
    }
    .run()
    .await;
    let figures = Figures::new(seed, seconds, &verdict);
    figures.print(seed, seconds);
    let found = verdict.violations.len();
    if found > 0 {
        verdict
            .violations
            .iter()
            .take(20)
            .for_each(|violation| eprintln!("{violation}"));
        let what = format!(
            "{found} violations in {seconds} s with seed {seed}, which repeat the fault schedule"
        );
        panic!("{}", report::failure(&what, seed, &verdict));
    }
    let few = figures.counts.too_few(seconds);
    if !few.is_empty() {
        let what = format!(
            "the run with seed {seed} showed too little: {}",
            few.join("; ")
        );
        panic!("{}", report::failure(&what, seed, &verdict));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_without_its_data_breaks_exclusion() {
    assert_found(Rule::Exclusion, Kind::ForgetData, 1_000, 100, 5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleted_keys_break_exclusion() {
    assert_found(Rule::Exclusion, Kind::DeleteKeys, 100, 0, 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_freed_without_message_is_a_lost_wakeup() {
    assert_found(Rule::LostWakeup, Kind::FreeWithoutMessage, 5_000, 2_600, 6).await;
}

/// Asserts that the judge finds a violation of a rule in a short run with faults of that kind. On a
/// busy machine the looks may be so far apart that one run shows too little.
async fn assert_found(rule: Rule, kind: Kind, every: u64, lasts: u64, seconds: u64) {
    for _ in 0..3 {
        if found_after(kind, every, lasts, seconds)
            .await
            .contains(&rule)
        {
            return;
        }
    }
    panic!("three runs with {kind:?} show no violation of {rule:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_that_panics_keeps_its_history() {
    // There is no worker in that slot.
    let planned = vec![Planned {
        at: 1_000,
        lasts: 0,
        kind: Kind::KillWorker,
        slot: 99,
    }];
    let long_lease = Duration::from_secs(6);
    let server = with_users(Server::builder(), 1).start();
    let run = Run {
        seed: 1,
        seconds: 2,
        workers: 1,
        tasks: 2,
        long_lease,
        planned,
        server,
    };
    let verdict = run.run().await;
    let rules: Vec<_> = verdict
        .violations
        .iter()
        .map(|violation| violation.rule)
        .collect();
    assert_eq!(rules, [Rule::Panic]);
    assert!(
        verdict.violations[0]
            .to_string()
            .contains("index out of bounds"),
        "{}",
        verdict.violations[0]
    );
    assert!(!verdict.history.lines.is_empty() && !verdict.history.samples.is_empty());
    let left = || report::keep(1, &verdict);
    let (first, second) = (left(), left());
    assert_ne!(first.history, second.history);
    for file in [first, second]
        .iter()
        .flat_map(|left| [&left.history, &left.violations])
    {
        assert!(std::fs::metadata(file).unwrap().len() > 0);
        std::fs::remove_file(file).unwrap();
    }
}

#[test]
fn setting_out_of_range_is_refused_with_the_range() {
    let seconds = |text| setting("CHAOS_SECONDS", text, SECONDS);
    assert_eq!(
        ["6", "600", "86400"].map(seconds),
        [Ok(6), Ok(600), Ok(86_400)]
    );
    for text in [
        "abc",
        "",
        "0",
        "5",
        "-7",
        "7.5",
        "86401",
        "18446744073709551",
        "18446744073709551616",
    ] {
        let refused = format!("CHAOS_SECONDS must be a whole number from 6 to 86400, not {text:?}");
        assert_eq!(seconds(text), Err(refused));
    }
}

/// The value of a setting, or an error with the allowed values.
fn setting(name: &str, text: &str, allowed: RangeInclusive<u64>) -> Result<u64, String> {
    let (from, to) = (allowed.start(), allowed.end());
    let number = text.parse().ok().filter(|number| allowed.contains(number));
    number.ok_or_else(|| format!("{name} must be a whole number from {from} to {to}, not {text:?}"))
}

/// The rules that are violated in a short run whose only faults are of this kind.
async fn found_after(kind: Kind, every: u64, lasts: u64, seconds: u64) -> Vec<Rule> {
    let times = (1_500..seconds * 1_000).step_by(every as usize);
    let planned = times.map(|at| Planned {
        at,
        lasts,
        kind,
        slot: 0,
    });
    let (long_lease, planned) = (Duration::from_secs(6), planned.collect());
    let server = with_users(Server::builder(), 4).start();
    let run = Run {
        seed: 1,
        seconds,
        workers: 4,
        tasks: 3,
        long_lease,
        planned,
        server,
    };
    let verdict = run.run().await;
    let left = report::keep(1, &verdict);
    let again = judge(&History::reread(&left.history).unwrap());
    let texts = |violations: &[Violation]| {
        violations
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        texts(&again),
        texts(&verdict.violations),
        "the judge finds something else in {}",
        left.history.display()
    );
    [left.history, left.violations]
        .iter()
        .for_each(|file| std::fs::remove_file(file).unwrap());
    let mut rules: Vec<_> = verdict
        .violations
        .iter()
        .map(|violation| violation.rule)
        .collect();
    rules.sort_unstable();
    println!(
        "{kind:?}: {:?}",
        rules
            .chunk_by(|a, b| a == b)
            .map(|same| (same[0], same.len()))
            .collect::<Vec<_>>()
    );
    rules.dedup();
    assert!(
        !rules.contains(&Rule::Panic),
        "{}",
        report::failure("a panic", 1, &verdict)
    );
    rules
}

/// A worker of a run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_process() {
    if process::role().is_some() {
        worker::work().await;
    }
}
