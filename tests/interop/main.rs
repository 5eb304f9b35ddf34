//! Side by side with real Java Redisson: each scenario in both directions, and byte for byte.
//!
//! Runs with the newest version; `REDISSON_VERSIONS="4.7.0 3.8.1"`, or `all`, says otherwise. With
//! at least three versions a fleet of three runs too. Without Java or Maven it says so and passes,
//! unless `CI=true`.

mod beside_java;
mod counter;
mod leases;
mod ownership;
mod party;
mod recorder;
mod scenarios;
#[path = "../support/mod.rs"]
mod support;
mod table;
mod world;

use std::env;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use redisson_lock::LockClient;
use support::java::{Skip, VERSIONS};
use support::process;
use table::Report;
use world::{SHORT_WATCHDOG, View, World, rust_client};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn side_by_side_with_redisson() {
    let wanted = wanted_versions();
    let mut report = Report::default();
    for version in &wanted {
        let begun = Instant::now();
        // On a task of its own: a version that cannot be built takes no other version's results
        // with it.
        let started = tokio::spawn({
            let version = version.clone();
            async move { World::start(&version).await }
        });
        match started.await {
            Ok(Ok(world)) => {
                let info: String = world.view.ask(&["INFO", "server"]).await.expect("INFO");
                report.server = server_version(&info);
                let world = Arc::new(world);
                let ran = scenarios::run_all(&world).await;
                if report.record.is_empty() {
                    report.record = std::mem::take(&mut world.record.lock().unwrap());
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
                "Redisson {version}: its peer cannot be built or started (see above)"
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
        // The newest, one from between, and the oldest.
        let fleet = [0, ran.len() / 2, ran.len() - 1]
            .map(|at| ran[at].clone())
            .to_vec();
        match counter::fleet(&fleet).await {
            Ok(outcome) => report.fleet = Some((fleet, outcome)),
            Err(skip) => skipped(&mut report, "fleet", skip),
        }
        println!("the fleet: {:.1?}", begun.elapsed());
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

/// The table in the documentation was made by these scenarios, for these versions, and nothing
/// failed.
#[test]
fn the_documented_table_is_of_these_scenarios() {
    let tables = table::documented();
    let heads = format!("| scenario | directions | {} |", VERSIONS.join(" | "));
    assert!(
        tables.contains(&heads),
        "another list of versions than {heads:?}"
    );
    let titles = scenarios::ALL
        .iter()
        .chain([&scenarios::COUNTER])
        .map(|scenario| scenario.title);
    for title in titles.chain([scenarios::FLEET]) {
        assert!(
            tables.contains(&format!("\n| {title} | ")),
            "no row of {title:?}: run `INTEROP_WRITE_DOC=1 make interop`"
        );
    }
    for note in scenarios::Note::ALL {
        let line = format!("\n* ({}) {}\n", note.mark(), note.text());
        assert!(
            tables.contains(&line),
            "not as in the code: footnote {}",
            note.mark()
        );
    }
    assert!(!tables.contains("FAILED"), "a table with failures");
}

/// What a process of its own does for a scenario; nothing in an ordinary run.
#[tokio::test]
async fn worker_process() {
    let Some(role) = process::role() else { return };
    let url = process::setting("URL");
    let name = process::setting("NAME");
    match role.as_str() {
        // Until it is killed.
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
            let view = View::open(&url).await;
            let tasks = (0..counter::TASKS_OF_WORKER).map(|_| {
                let (lock, view, counter) = (client.lock(&name), view.clone(), counter.clone());
                tokio::spawn(async move { counter::increment(&lock, &view, &counter, times).await })
            });
            for task in tasks.collect::<Vec<_>>() {
                task.await
                    .expect("a task that ends")
                    .expect("the increments");
            }
        }
        other => panic!("no such role: {other}"),
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

/// A missing tool is a failure in CI, and a line that says how to get it elsewhere.
fn skipped(report: &mut Report, version: &str, Skip(why): Skip) {
    let line = format!("Redisson {version} {why}");
    if env::var("CI").as_deref() == Ok("true") {
        report.broken.push(line);
        return;
    }
    // Past the capture of what tests print: this is to be seen where the test passes, too.
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
