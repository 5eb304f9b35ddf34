//! Scenarios of wake-ups, wait times, lease times, renewals, and killed owners.

use std::time::{Duration, Instant};

use crate::fixture::{
    Direction, Failed, Fixture, LONG, SHORT_WATCHDOG, SOON, Task, ensure, locking,
};
use crate::party::{Party, Unlocked};
use crate::scenarios::{Note, Outcome};
use crate::support::java::{Options, Peer};
use crate::support::process::Worker;

/// The clocks of the processes and of the server are read at slightly different times.
const SLACK: Duration = Duration::from_millis(50);

/// A blocked waiter is woken by the unlock, long before the lock would have expired.
pub async fn wake_up(fixture: &Fixture, direction: Direction) -> Outcome {
    let (first, second) = fixture.pair(direction);
    let name = fixture.unique_name("wake-up");
    // Twice: in the second round the scripts are loaded, and the channel was subscribed before.
    for _ in 0..2 {
        first.lock(&name).await?;
        let mut waiting = locking(&second, &name);
        fixture.observer.until_subscribers(&name, 1).await?;
        let left = fixture.observer.pttl(&name).await?;
        ensure!(
            left > 15_000,
            "only {left} ms are left: the test cannot distinguish a wake-up from the expiry"
        );
        ensure!(
            first.unlock(&name).await? == Unlocked::Done,
            "the owner cannot unlock"
        );
        waiting.within(SOON, "the wake-up by the unlock").await?;
        fixture.observer.ensure_owner(&name, &second, 1).await?;
        ensure!(
            second.unlock(&name).await? == Unlocked::Done,
            "the woken waiter cannot unlock"
        );
        fixture.observer.until_subscribers(&name, 0).await?;
    }
    Ok(vec![])
}

/// A wait time passes without the lock, or ends with it if the lock is freed in time.
pub async fn wait_time(fixture: &Fixture, direction: Direction) -> Outcome {
    const WAIT: Duration = Duration::from_millis(500);
    let (first, second) = fixture.pair(direction);
    let name = fixture.unique_name("wait time");
    first.lock(&name).await?;
    let begun = Instant::now();
    ensure!(
        !second.try_lock(&name, WAIT, None).await?,
        "both parties hold the lock"
    );
    let waited = begun.elapsed();
    ensure!(
        waited >= WAIT && waited < WAIT + SOON,
        "a wait time of {WAIT:?} took {waited:?}"
    );
    fixture.observer.ensure_owner(&name, &first, 1).await?;
    if !second.is_java() {
        // Redisson's subscription stays if the wait time passes before its confirmation.
        fixture.observer.until_subscribers(&name, 0).await?;
    }
    ensure!(
        first.unlock(&name).await? == Unlocked::Done,
        "the owner cannot unlock"
    );

    let name = fixture.unique_name("wait time");
    first.lock(&name).await?;
    let (trying, tried) = (second.clone(), name.clone());
    let mut waiting = Task::start(async move {
        trying
            .try_lock(&tried, LONG, Some(Duration::from_secs(60)))
            .await
    });
    fixture.observer.until_subscribers(&name, 1).await?;
    ensure!(
        first.unlock(&name).await? == Unlocked::Done,
        "the owner cannot unlock"
    );
    ensure!(
        waiting
            .within(SOON, "the wake-up within the wait time")
            .await?,
        "the woken waiter does not have the lock"
    );
    let left = fixture.observer.pttl(&name).await?;
    ensure!(
        (50_000..=60_000).contains(&left),
        "{left} ms are left of a lease of 60 s"
    );
    ensure!(
        second.unlock(&name).await? == Unlocked::Done,
        "the woken waiter cannot unlock"
    );
    fixture.observer.until_subscribers(&name, 0).await?;
    Ok(vec![])
}

/// A requested lease is not renewed, and the other party acquires the lock when it expires: not
/// earlier, and not much later.
pub async fn lease_time(fixture: &Fixture, direction: Direction) -> Outcome {
    const LEASE: Duration = Duration::from_secs(4);
    // If the watchdog applied to this lock, it would renew it before the lease expires.
    let (first, second) = fixture.pair_with_short_watchdog(direction);
    let name = fixture.unique_name("lease time");
    let begun = Instant::now();
    first.lock_with_lease(&name, LEASE).await?;
    let left = fixture.observer.pttl(&name).await?;
    ensure!(
        (1..=4000).contains(&left),
        "{left} ms are left of a lease of {LEASE:?}"
    );
    let got = locking(&second, &name)
        .within(LEASE + SOON, "the acquisition after the lease")
        .await?;
    ensure!(
        got >= begun + LEASE - SLACK,
        "the lease of {LEASE:?} expired after {:?}",
        got - begun
    );
    fixture.observer.ensure_owner(&name, &second, 1).await?;
    ensure!(
        first.unlock(&name).await?.is_refused(),
        "a lock can be unlocked after its lease"
    );
    fixture.observer.ensure_owner(&name, &second, 1).await?;
    ensure!(
        second.unlock(&name).await? == Unlocked::Done,
        "the second owner cannot unlock"
    );
    Ok(vec![])
}

/// The watchdog keeps the lock for longer than its timeout.
pub async fn watchdog(fixture: &Fixture, direction: Direction) -> Outcome {
    let (first, second) = fixture.pair_with_short_watchdog(direction);
    let name = fixture.unique_name("watchdog");
    first.lock(&name).await?;
    let left = fixture.observer.pttl(&name).await?;
    ensure!(
        (1..=3000).contains(&left),
        "{left} ms are left under a watchdog timeout of {SHORT_WATCHDOG:?}"
    );
    let wait = SHORT_WATCHDOG * 7 / 3;
    ensure!(
        !second.try_lock(&name, wait, None).await?,
        "the second party acquired the lock within {wait:?}"
    );
    fixture.observer.ensure_owner(&name, &first, 1).await?;
    let left = fixture.observer.pttl(&name).await?;
    ensure!(
        (1..=3000).contains(&left),
        "{left} ms are left under a watchdog timeout of {SHORT_WATCHDOG:?}"
    );
    ensure!(
        first.unlock(&name).await? == Unlocked::Done,
        "the owner cannot unlock"
    );
    ensure!(
        second.try_lock(&name, Duration::ZERO, None).await?,
        "the lock is free, but cannot be acquired"
    );
    ensure!(
        second.unlock(&name).await? == Unlocked::Done,
        "the second owner cannot unlock"
    );
    Ok(vec![])
}

/// The owner's process is killed: a waiter acquires the lock when the lease has expired, not
/// before.
pub async fn killed_owner(fixture: &Fixture, direction: Direction) -> Outcome {
    let name = fixture.unique_name("killed");
    let url = fixture.server.url();
    let (peer, worker);
    match direction {
        Direction::JavaToRust => {
            let started = Peer::start(&fixture.version)
                .await
                .map_err(|skip| Failed(skip.to_string()))?;
            let client = started
                .client("killed", &url, Options::default().watchdog(SHORT_WATCHDOG))
                .await?;
            client.thread("owner").lock(&name).await?;
            (peer, worker) = (Some(started), None);
        }
        _ => {
            worker = Some(Worker::start(
                "worker_process",
                "hold",
                &[("URL", &url), ("NAME", &name)],
            ));
            peer = None;
            let deadline = Instant::now() + LONG;
            while !fixture.observer.exists(&name).await? {
                ensure!(
                    Instant::now() < deadline,
                    "the worker does not acquire the lock"
                );
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
    let (_, successor) = fixture.pair(direction);
    let owner = fixture.observer.owners(&name).await?;
    let mut waiting = locking(&successor, &name);
    fixture.observer.until_subscribers(&name, 1).await?;
    // Longer than the watchdog timeout: the lock was renewed before the kill.
    tokio::time::sleep(SHORT_WATCHDOG).await;
    ensure!(
        !waiting.is_finished(),
        "the waiter acquired the lock of a running owner"
    );
    ensure!(
        fixture.observer.owners(&name).await? == owner,
        "the lock changed hands"
    );
    match (peer, worker) {
        (Some(peer), None) => peer.kill(),
        (None, Some(worker)) => worker.kill(),
        _ => unreachable!("one of them"),
    }
    let killed = Instant::now();
    let left = fixture.observer.pttl(&name).await?;
    ensure!(
        (1..=3000).contains(&left),
        "{left} ms are left under a watchdog timeout of {SHORT_WATCHDOG:?}"
    );
    let got = waiting
        .within(LONG, "the acquisition after the owner was killed")
        .await?;
    let lease = Duration::from_millis(left.unsigned_abs());
    ensure!(
        got >= killed + lease - SLACK,
        "acquired {:?} after the kill, with {lease:?} of the lease left",
        got - killed
    );
    fixture.observer.ensure_owner(&name, &successor, 1).await?;
    ensure!(
        successor.unlock(&name).await? == Unlocked::Done,
        "the successor cannot unlock"
    );
    Ok(vec![])
}

/// An owner locks again with a shorter lease. Redisson then shortens the expiry; this library must
/// not.
pub async fn shorter_reentry(fixture: &Fixture, direction: Direction) -> Outcome {
    const SHORT: Duration = Duration::from_secs(1);
    let (first, second) = fixture.pair(direction);
    let name = fixture.unique_name("shorter");
    first.lock(&name).await?;
    first.lock_with_lease(&name, SHORT).await?;
    fixture.observer.ensure_owner(&name, &first, 2).await?;
    let left = fixture.observer.pttl(&name).await?;
    let second_acquired = second.try_lock(&name, SHORT * 3, None).await?;
    match &first {
        Party::Rust(_) => {
            ensure!(
                left > 15_000,
                "the shorter lease left {left} ms of the longer one"
            );
            ensure!(
                !second_acquired,
                "the second party acquired the lock during the outer hold"
            );
            for _ in 0..2 {
                ensure!(
                    first.unlock(&name).await? == Unlocked::Done,
                    "a hold cannot be released"
                );
            }
            Ok(vec![])
        }
        Party::Java(_) if left <= 1000 => {
            // The lock has expired on the server, so only the second party may hold it.
            ensure!(
                second_acquired,
                "the lock has expired, but cannot be acquired"
            );
            fixture.observer.ensure_owner(&name, &second, 1).await?;
            ensure!(!first.is_held(&name).await?, "two parties hold the lock");
            ensure!(
                first.unlock(&name).await?.is_refused(),
                "a lock can be unlocked after its lease"
            );
            ensure!(
                second.unlock(&name).await? == Unlocked::Done,
                "the second owner cannot unlock"
            );
            Ok(vec![Note::ShorterReentry])
        }
        Party::Java(_) => {
            ensure!(!second_acquired, "both parties hold the lock");
            Ok(vec![])
        }
    }
}
