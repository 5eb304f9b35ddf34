//! A worker process: a client, some tasks, and an orderly end.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::StdRng;
use redisson_lock::{LockClient, Owner};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::actor::Actor;
use super::history::{Event, Recorder, now, slot_of};
use super::support::process::setting;

/// The lease that is renewed. Short, so that some are lost.
pub const WATCHDOG: Duration = Duration::from_millis(1_500);

/// Shorter than the longer faults, so that many outcomes are unknown.
const RETRY_TIMEOUT: Duration = Duration::from_millis(1_000);

/// For how long locks are passed on, by clients that do so. Long, so that much happens meanwhile.
const PASSING_TIME: Duration = Duration::from_millis(500);

/// The number of locks that all workers use. The lock after them is used only by workers that rely
/// on messages.
pub const BUSY_LOCKS: usize = 12;

/// How many tasks of a worker often share one owner.
const SHARING: u64 = 2;

/// Whether the worker of a slot relies on messages: every second worker has a re-check interval of
/// a minute.
pub fn relies_on_messages(slot: u64) -> bool {
    slot % 2 == 1
}

/// Whether the client of a slot passes locks on.
pub fn passes_on(slot: u64) -> bool {
    slot % 3 == 0
}

/// The name of a lock.
pub fn lock_name(lock: usize) -> String {
    format!("chaos:{lock}")
}

/// The register that a lock guards.
pub fn register_name(lock: usize) -> String {
    format!("register:{lock}")
}

/// Works until the time in the settings, and then waits for the request to exit.
pub async fn work() {
    let number = |name: &str| setting(name).parse::<u64>().expect("a number");
    let (process, end, messages_only) = (
        number("PROCESS"),
        number("END"),
        number("MESSAGES_ONLY") == 1,
    );
    let recorder = Arc::new(Recorder::open(Path::new(&setting("LOG")), process));
    write_down_panics(&recorder);
    let direct = redis::Client::open(setting("DIRECT")).expect("the server's URL");
    let tasks_before = tokio::runtime::Handle::current()
        .metrics()
        .num_alive_tasks();
    let url = setting("URL");
    let client = loop {
        let recheck = if messages_only {
            Duration::from_secs(60)
        } else {
            Duration::from_millis(500)
        };
        let connecting = LockClient::builder()
            .watchdog_timeout(WATCHDOG)
            .recheck_interval(recheck)
            .retry_timeout(RETRY_TIMEOUT)
            .passing_time(if passes_on(slot_of(process)) {
                PASSING_TIME
            } else {
                Duration::ZERO
            })
            .connect_timeout(Duration::from_secs(1))
            .connect(&url);
        match connecting.await {
            Ok(client) => break client,
            // The process was started during a fault.
            Err(_) if now() < end => sleep(Duration::from_millis(50)).await,
            Err(error) => panic!("no connection, without any fault: {error}"),
        }
    };
    let long_lease = Duration::from_millis(number("LONG_LEASE"));
    let shared = Owner::new();
    let actor = |seed, shares: bool| Actor {
        client: client.clone(),
        recorder: Arc::clone(&recorder),
        direct: direct.clone(),
        connection: None,
        random: StdRng::seed_from_u64(seed),
        usual: if shares { shared } else { Owner::new() },
        shares,
        long_lease,
    };
    let mut tasks = JoinSet::new();
    for task in 0..number("TASKS") {
        tasks.spawn(
            actor(
                number("SEED") ^ (process << 32) ^ (task << 16),
                task < SHARING,
            )
            .act(end),
        );
    }
    for task in 0..if messages_only { 2 } else { 0 } {
        tasks.spawn(
            actor(
                number("SEED") ^ (process << 32) ^ (task << 16) ^ (1 << 60),
                false,
            )
            .take_turns(end),
        );
    }
    while let Some(outcome) = tasks.join_next().await {
        outcome.expect("no actor panics");
    }
    idle(&direct).await;
    let shutdown = match client.shutdown().await {
        Ok(()) => "ok".to_owned(),
        Err(error) => error.to_string(),
    };
    drop(client);
    let left = || {
        tokio::runtime::Handle::current()
            .metrics()
            .num_alive_tasks()
            .saturating_sub(tasks_before)
    };
    // Aborted tasks and the connections of `idle` need a moment to end.
    let _ = timeout(Duration::from_secs(3), async {
        while left() > 0 {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    recorder.record(
        now(),
        0,
        Event::Ended {
            tasks: left() as u64,
            shutdown,
        },
    );
}

/// Records every panic in this process, including panics of the library's background, which the
/// process survives.
fn write_down_panics(recorder: &Arc<Recorder>) {
    let (recorder, usual) = (Arc::clone(recorder), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |panic| {
        recorder.record(
            now(),
            0,
            Event::Panicked {
                why: panic.to_string(),
            },
        );
        usual(panic);
    }));
}

/// Reports that all operations have ended, and waits for the request to exit, with the client
/// alive.
async fn idle(direct: &redis::Client) {
    let mut announced = false;
    // The run waits for less than this, and kills its workers when it ends.
    for _ in 0..2_000 {
        if let Ok(mut connection) = direct.get_multiplexed_async_connection().await {
            if !announced {
                announced = redis::cmd("INCR")
                    .arg("idle")
                    .exec_async(&mut connection)
                    .await
                    .is_ok();
            }
            if redis::cmd("EXISTS")
                .arg("exit")
                .query_async(&mut connection)
                .await
                == Ok(1)
            {
                return;
            }
        }
        sleep(Duration::from_millis(50)).await;
    }
}
