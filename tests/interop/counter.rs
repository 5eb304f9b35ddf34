//! Scenarios of many: a counter that only the lock makes exact, and a fleet of several Redisson
//! versions.

use std::time::Duration;

use redisson_lock::{LockClient, ReentrantLock};

use crate::party::{Party, Unlocked};
use crate::scenarios::Outcome;
use crate::support::java::{Options, Peer, PeerClient, Skip};
use crate::support::process::Worker;
use crate::support::server::Server;
use crate::world::{Failed, LONG, SOON, Task, View, Way, World, ensure, locking, rust_client};

/// How long a round of counting may take, on a machine with better things to do.
const COUNTING: Duration = Duration::from_secs(300);

/// How many tasks count in the process that is started for it.
pub const TASKS_OF_WORKER: u64 = 2;

/// Does n times: lock, read the counter, write it plus one, unlock.
pub async fn increment(
    lock: &ReentrantLock,
    view: &View,
    counter: &str,
    n: u64,
) -> Result<(), Failed> {
    for _ in 0..n {
        let guard = lock.lock().await?;
        let count: Option<i64> = view.ask(&["GET", counter]).await?;
        view.ask::<()>(&["SET", counter, &(count.unwrap_or(0) + 1).to_string()])
            .await?;
        guard.unlock().await?;
    }
    Ok(())
}

/// Four Java threads (of two clients) and four tasks (of three clients in two processes), 2 000
/// times each.
pub async fn counter(world: &World, _: Way) -> Outcome {
    let [one, other] = world.java_clients();
    let java = [one, one, other, other]
        .into_iter()
        .enumerate()
        .map(|(n, client)| (client.clone(), format!("counts {n}")));
    let rust = world.rust_clients().map(Clone::clone);
    count_together(
        &world.server.url(),
        &world.view,
        java.collect(),
        &rust,
        2000,
    )
    .await?;
    Ok(vec![])
}

/// Counts with all of them at once, and two tasks in a process of their own; the sum has to be
/// exact.
async fn count_together(
    url: &str,
    view: &View,
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
        let (lock, view) = (client.lock(name), view.clone());
        tasks.push(Task::start(async move {
            increment(&lock, &view, counter, n).await
        }));
    }
    for task in &mut tasks {
        task.within(COUNTING, "counting").await?;
    }
    let status = tokio::task::spawn_blocking(move || worker.ended(COUNTING)).await?;
    ensure!(status.success(), "the counting process failed: {status}");
    let wanted = (java.len() as u64 + rust.len() as u64 + TASKS_OF_WORKER) * n;
    let count: u64 = view.ask(&["GET", counter]).await?;
    ensure!(
        count == wanted,
        "{wanted} increments under the lock came to {count}"
    );
    ensure!(!view.exists(name).await?, "the lock is left");
    view.until_listeners(name, 0).await
}

/// Several Redisson versions and ours on one lock at once. The outer error is a missing tool.
pub async fn fleet(versions: &[String]) -> Result<Outcome, Skip> {
    let mut peers = Vec::new();
    for version in versions {
        peers.push(Peer::start(version).await?);
    }
    Ok(run_fleet(&peers).await.map(|()| vec![]))
}

async fn run_fleet(peers: &[Peer]) -> Result<(), Failed> {
    let server = Server::start();
    let view = View::open(&server.url()).await;
    let mut java = Vec::new();
    for peer in peers {
        java.push(
            peer.client("fleet", &server.url(), Options::default())
                .await?,
        );
    }
    let rust = [rust_client(&server.url(), |builder| builder).await];
    take_turns(&view, &java, &rust[0]).await?;
    let threads = java
        .iter()
        .flat_map(|client| ["counts 1", "counts 2"].map(|name| (client.clone(), name.to_owned())));
    count_together(&server.url(), &view, threads.collect(), &rust, 250).await
}

/// Each in turn holds while all others wait; then all of them get it, one after the other, by
/// wake-ups.
async fn take_turns(view: &View, java: &[PeerClient], rust: &LockClient) -> Result<(), Failed> {
    let name = "turns";
    let mut parties: Vec<Party> = java
        .iter()
        .map(|client| Party::Java(client.thread("turns")))
        .collect();
    parties.push(Party::of(rust));
    for (at, first) in parties.iter().enumerate() {
        first.lock(name).await?;
        let mut waiting = Vec::new();
        for (_, other) in parties.iter().enumerate().filter(|(other, _)| *other != at) {
            let (party, view) = (other.clone(), view.clone());
            waiting.push(Task::start(async move {
                locking(&party, name).within(LONG, "the turn").await?;
                view.ensure_owner(name, &party, 1).await?;
                ensure!(
                    party.unlock(name).await? == Unlocked::Done,
                    "whose turn it is cannot unlock"
                );
                Ok(())
            }));
        }
        view.until_listeners(name, waiting.len() as i64).await?;
        ensure!(
            first.unlock(name).await? == Unlocked::Done,
            "the owner cannot unlock"
        );
        for waiter in &mut waiting {
            waiter.within(SOON, "a turn of all that wait").await?;
        }
        ensure!(!view.exists(name).await?, "the lock is left");
        view.until_listeners(name, 0).await?;
    }
    Ok(())
}
