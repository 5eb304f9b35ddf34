//! Scenarios with Java Redisson and this library on one server: each runs in both directions, and
//! one compares all data and messages byte for byte.
//!
//! The newest Redisson version is used. `REDISSON_VERSIONS="4.7.0 3.8.1"`, or `all`, selects
//! others; with at least three versions, one more scenario uses three at once. Without Java or
//! Maven the tests print what is missing and pass, unless `CI=true`.

mod counter;
mod fenced;
mod fixture;
mod force_unlock;
mod leases;
mod ownership;
mod party;
mod recorder;
mod redis_py;
mod scenarios;
#[path = "../support/mod.rs"]
mod support;
mod table;

use std::env;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use fixture::{Fixture, Observer, SHORT_WATCHDOG, rust_client};
use redisson_lock::LockClient;
use support::java::{Skip, VERSIONS};
use support::process;
use table::Report;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn side_by_side_with_redisson() {
    let wanted = wanted_versions();
    let mut report = Report::default();
    for version in &wanted {
        let begun = Instant::now();
        // On a separate task: a version that cannot be built does not end the others' scenarios.
        let started = tokio::spawn({
            let version = version.clone();
            async move { Fixture::start(&version).await }
        });
        match started.await {
            Ok(Ok(fixture)) => {
                let info: String = fixture
                    .observer
                    .ask(&["INFO", "server"])
                    .await
                    .expect("INFO");
                report.server = server_version(&info);
                let fixture = Arc::new(fixture);
                let ran = scenarios::run_all(&fixture).await;
                if report.record.is_empty() {
                    report.record = std::mem::take(&mut fixture.record.lock().unwrap());
                }
                println!(
                    "Redisson {version}: {} scenarios in {:.1?}",
                    ran.len(),
                    begun.elapsed()
                );
                report.versions.push((version.clone(), ran));
            }
            Ok(Err(skip)) => skipped(&mut report, version, skip),
            Err(_) => report.broken.push(format!(
                "Redisson {version}: the peer cannot be built or started (see above)"
            )),
        }
    }
    let ran: Vec<String> = report
        .versions
        .iter()
        .map(|(version, _)| version.clone())
        .collect();
    if ran.len() >= 3 {
        let begun = Instant::now();
        // The newest, one in the middle, and the oldest.
        let mixed = [0, ran.len() / 2, ran.len() - 1]
            .map(|at| ran[at].clone())
            .to_vec();
        match counter::mixed_versions(&mixed).await {
            Ok(outcome) => report.mixed = Some((mixed, outcome)),
            Err(skip) => skipped(&mut report, "versions at once", skip),
        }
        println!("three versions at once: {:.1?}", begun.elapsed());
    }
    report.write();
    if env::var("INTEROP_WRITE_DOC").is_ok_and(|write| write == "1") {
        assert_eq!(
            ran, VERSIONS,
            "the documentation's table needs all versions"
        );
        report.write_doc();
    }
    let failures = report.failures();
    assert!(
        failures.is_empty(),
        "{}\n\n{}",
        failures.join("\n\n"),
        report.sum()
    );
}

/// The table in the documentation has these scenarios and these versions, and no failure.
#[test]
fn documented_table_matches_scenarios() {
    let tables = table::documented();
    let head = format!("| scenario | directions | {} |", VERSIONS.join(" | "));
    assert!(tables.contains(&head), "no table head {head:?}");
    let titles = scenarios::ALL
        .iter()
        .chain([&scenarios::COUNTER])
        .map(|scenario| scenario.title);
    for title in titles.chain([scenarios::MIXED_VERSIONS]) {
        assert!(
            tables.contains(&format!("\n| {title} | ")),
            "no row of {title:?}: run `INTEROP_WRITE_DOC=1 make interop`"
        );
    }
    for note in scenarios::Note::ALL {
        let line = format!("\n* ({}) {}\n", note.mark(), note.text());
        assert!(
            tables.contains(&line),
            "the footnote differs from the code: {}",
            note.mark()
        );
    }
    assert!(!tables.contains("FAILED"), "a table with failures");
}

/// The part of a scenario that runs in a separate process; an ordinary test run does nothing here.
#[tokio::test]
async fn worker_process() {
    let Some(role) = process::role() else { return };
    let url = process::setting("URL");
    let name = process::setting("NAME");
    match role.as_str() {
        // The scenario kills this process.
        "hold" => {
            let client =
                rust_client(&url, |builder| builder.watchdog_timeout(SHORT_WATCHDOG)).await;
            let guard = client.lock(&name).lock().await.expect("the lock");
            panic!("lost: {}", guard.lost().await);
        }
        "increment" => {
            let counter = process::setting("COUNTER");
            let times = process::setting("TIMES").parse().expect("a number");
            let client: LockClient = rust_client(&url, |builder| builder).await;
            let observer = Observer::open(&url).await;
            let tasks = (0..counter::WORKER_TASKS).map(|_| {
                let (lock, observer, counter) =
                    (client.lock(&name), observer.clone(), counter.clone());
                tokio::spawn(
                    async move { counter::increment(&lock, &observer, &counter, times).await },
                )
            });
            for task in tasks.collect::<Vec<_>>() {
                task.await
                    .expect("a task panicked")
                    .expect("an increment failed");
            }
        }
        other => panic!("unknown role: {other}"),
    }
}

fn wanted_versions() -> Vec<String> {
    let wanted = env::var("REDISSON_VERSIONS").unwrap_or_default();
    match wanted.trim() {
        "" => vec![VERSIONS[0].to_owned()],
        "all" => VERSIONS.map(str::to_owned).to_vec(),
        some => some.split_whitespace().map(str::to_owned).collect(),
    }
}

/// A missing tool is a failure in CI; elsewhere, a line states how to install it.
fn skipped(report: &mut Report, version: &str, Skip(why): Skip) {
    let line = format!("Redisson {version} {why}");
    if env::var("CI").as_deref() == Ok("true") {
        report.broken.push(line);
        return;
    }
    // Not captured by the test harness, so that it is shown for a passing test, too.
    let _ = writeln!(std::io::stderr(), "{line}");
    report.skipped.push(line);
}

fn server_version(info: &str) -> String {
    let value = |name: &str| {
        info.lines()
            .find_map(|line| line.strip_prefix(name).map(str::to_owned))
    };
    match (value("valkey_version:"), value("redis_version:")) {
        (Some(valkey), _) => format!("Valkey {valkey}"),
        (None, redis) => format!("Redis {}", redis.unwrap_or_default()),
    }
}
