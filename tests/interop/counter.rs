//! Scenarios with many owners: a counter that only the lock keeps exact, and several Redisson
//! versions at once.

use std::time::Duration;

use redisson_lock::{LockClient, ReentrantLock};

use crate::fixture::{
    Direction, Failed, Fixture, LONG, Observer, SOON, Task, ensure, locking, rust_client,
};
use crate::party::{Party, Unlocked};
use crate::scenarios::Outcome;
use crate::support::java::{Options, Peer, PeerClient, Skip};
use crate::support::process::Worker;
use crate::support::server::Server;

/// How long all increments may take on a busy machine.
const COUNTING: Duration = Duration::from_secs(300);

/// How many tasks of the separate process increment the counter.
pub const WORKER_TASKS: u64 = 2;

/// Repeats n times: lock, read the counter, write it plus one, unlock.
pub async fn increment(
    lock: &ReentrantLock,
    observer: &Observer,
    counter: &str,
    n: u64,
) -> Result<(), Failed> {
    for _ in 0..n {
        let guard = lock.lock().await?;
        let count: Option<i64> = observer.ask(&["GET", counter]).await?;
        observer
            .ask::<()>(&["SET", counter, &(count.unwrap_or(0) + 1).to_string()])
            .await?;
        guard.unlock().await?;
    }
    Ok(())
}

/// Four Java threads (of two clients) and four tasks (of three clients in two processes), each with
/// 2 000 increments.
pub async fn counter(fixture: &Fixture, _: Direction) -> Outcome {
    let [one, other] = fixture.java_clients();
    let java = [one, one, other, other]
        .into_iter()
        .enumerate()
        .map(|(n, client)| (client.clone(), format!("counts {n}")));
    let rust = fixture.rust_clients().map(Clone::clone);
    count_together(
        &fixture.server.url(),
        &fixture.observer,
        java.collect(),
        &rust,
        2000,
    )
    .await?;
    Ok(vec![])
}

/// All clients and two tasks of a separate process increment the counter at once; the sum has to be
/// exact.
async fn count_together(
    url: &str,
    observer: &Observer,
    java: Vec<(PeerClient, String)>,
    rust: &[LockClient],
    n: u64,
) -> Result<(), Failed> {
    let (name, counter) = ("counted under", "count");
    let mut worker = Worker::start(
        "worker_process",
        "increment",
        &[
            ("URL", url),
            ("NAME", name),
            ("COUNTER", counter),
            ("TIMES", &n.to_string()),
        ],
    );
    let mut tasks = Vec::new();
    for (client, thread) in &java {
        let thread = client.thread(thread).within(COUNTING);
        tasks.push(Task::start(async move {
            Ok(thread.increment(name, counter, n).await.map(drop)?)
        }));
    }
    for client in rust {
        let (lock, observer) = (client.lock(name), observer.clone());
        tasks.push(Task::start(async move {
            increment(&lock, &observer, counter, n).await
        }));
    }
    for task in &mut tasks {
        task.within(COUNTING, "counting").await?;
    }
    let status = tokio::task::spawn_blocking(move || worker.ended(COUNTING)).await?;
    ensure!(status.success(), "the counting process failed: {status}");
    let wanted = (java.len() as u64 + rust.len() as u64 + WORKER_TASKS) * n;
    let count: u64 = observer.ask(&["GET", counter]).await?;
    ensure!(
        count == wanted,
        "after {wanted} increments under the lock the counter is {count}"
    );
    ensure!(!observer.exists(name).await?, "the lock is still held");
    observer.until_subscribers(name, 0).await
}

/// Several Redisson versions and this library on one lock at once. The outer error is a missing
/// tool.
pub async fn mixed_versions(versions: &[String]) -> Result<Outcome, Skip> {
    let mut peers = Vec::new();
    for version in versions {
        peers.push(Peer::start(version).await?);
    }
    Ok(run_mixed_versions(&peers).await.map(|()| vec![]))
}

async fn run_mixed_versions(peers: &[Peer]) -> Result<(), Failed> {
    let server = Server::start();
    let observer = Observer::open(&server.url()).await;
    let mut java = Vec::new();
    for peer in peers {
        java.push(
            peer.client("mixed", &server.url(), Options::default())
                .await?,
        );
    }
    let rust = [rust_client(&server.url(), |builder| builder).await];
    hold_one_after_another(&observer, &java, &rust[0]).await?;
    let threads = java
        .iter()
        .flat_map(|client| ["counts 1", "counts 2"].map(|name| (client.clone(), name.to_owned())));
    count_together(&server.url(), &observer, threads.collect(), &rust, 250).await
}

/// Each party holds the lock once while all others wait. Then wake-ups let the others acquire it,
/// one after the other.
async fn hold_one_after_another(
    observer: &Observer,
    java: &[PeerClient],
    rust: &LockClient,
) -> Result<(), Failed> {
    let name = "rotation";
    let mut parties: Vec<Party> = java
        .iter()
        .map(|client| Party::Java(client.thread("rotation")))
        .collect();
    parties.push(Party::of(rust));
    for (at, first) in parties.iter().enumerate() {
        first.lock(name).await?;
        let mut waiting = Vec::new();
        for (_, other) in parties.iter().enumerate().filter(|(other, _)| *other != at) {
            let (party, observer) = (other.clone(), observer.clone());
            waiting.push(Task::start(async move {
                locking(&party, name).within(LONG, "the lock").await?;
                observer.ensure_owner(name, &party, 1).await?;
                ensure!(
                    party.unlock(name).await? == Unlocked::Done,
                    "the woken waiter cannot unlock"
                );
                Ok(())
            }));
        }
        observer
            .until_subscribers(name, waiting.len() as i64)
            .await?;
        ensure!(
            first.unlock(name).await? == Unlocked::Done,
            "the owner cannot unlock"
        );
        for waiter in &mut waiting {
            waiter
                .within(SOON, "the lock for each of the waiters")
                .await?;
        }
        ensure!(!observer.exists(name).await?, "the lock is still held");
        observer.until_subscribers(name, 0).await?;
    }
    Ok(())
}
