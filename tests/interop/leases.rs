//! Scenarios of time: waking up, wait times, lease times, the watchdog, the death of an owner.

use std::time::{Duration, Instant};

use crate::party::{Party, Unlocked};
use crate::scenarios::{Note, Outcome};
use crate::support::java::{Options, Peer};
use crate::support::process::Worker;
use crate::world::{Failed, LONG, SHORT_WATCHDOG, SOON, Task, Way, World, ensure, locking};

/// The clocks of two processes and of the server run alike, but are read at slightly different
/// times.
const SLACK: Duration = Duration::from_millis(50);

/// A blocked waiter is woken by the unlock, long before the lock would have expired.
pub async fn wake_up(world: &World, way: Way) -> Outcome {
    let (first, second) = world.pair(way);
    let name = world.fresh("wake-up");
    // Twice: the second round finds scripts and connections warm, and a channel that was left
    // before.
    for _ in 0..2 {
        first.lock(&name).await?;
        let mut waiting = locking(&second, &name);
        world.view.until_listeners(&name, 1).await?;
        let left = world.view.pttl(&name).await?;
        ensure!(
            left > 15_000,
            "only {left} ms are left: a wake-up by the expiry would not stand out"
        );
        ensure!(
            first.unlock(&name).await? == Unlocked::Done,
            "the owner cannot unlock"
        );
        waiting.within(SOON, "the wake-up by the unlock").await?;
        world.view.ensure_owner(&name, &second, 1).await?;
        ensure!(
            second.unlock(&name).await? == Unlocked::Done,
            "the woken waiter cannot unlock"
        );
        world.view.until_listeners(&name, 0).await?;
    }
    Ok(vec![])
}

/// A wait time ends without the lock, or with it if it is freed in time.
pub async fn wait_time(world: &World, way: Way) -> Outcome {
    const WAIT: Duration = Duration::from_millis(500);
    let (first, second) = world.pair(way);
    let name = world.fresh("wait time");
    first.lock(&name).await?;
    let begun = Instant::now();
    ensure!(
        !second.try_lock(&name, WAIT, None).await?,
        "both have the lock"
    );
    let waited = begun.elapsed();
    ensure!(
        waited >= WAIT && waited < WAIT + SOON,
        "a wait time of {WAIT:?} took {waited:?}"
    );
    world.view.ensure_owner(&name, &first, 1).await?;
    if !second.is_java() {
        // Redisson's own subscription stays if its wait time ends before it was confirmed.
        world.view.until_listeners(&name, 0).await?;
    }
    ensure!(
        first.unlock(&name).await? == Unlocked::Done,
        "the owner cannot unlock"
    );

    let name = world.fresh("wait time");
    first.lock(&name).await?;
    let (trying, tried) = (second.clone(), name.clone());
    let mut waiting = Task::start(async move {
        trying
            .try_lock(&tried, LONG, Some(Duration::from_secs(60)))
            .await
    });
    world.view.until_listeners(&name, 1).await?;
    ensure!(
        first.unlock(&name).await? == Unlocked::Done,
        "the owner cannot unlock"
    );
    ensure!(
        waiting
            .within(SOON, "the wake-up within the wait time")
            .await?,
        "woken, but without the lock"
    );
    let left = world.view.pttl(&name).await?;
    ensure!(
        (50_000..=60_000).contains(&left),
        "{left} ms are left of a lease of 60 s"
    );
    ensure!(
        second.unlock(&name).await? == Unlocked::Done,
        "the woken waiter cannot unlock"
    );
    world.view.until_listeners(&name, 0).await?;
    Ok(vec![])
}

/// A lease that was asked for ends, unrenewed, and lets the other in: neither before its time nor
/// much later.
pub async fn lease_time(world: &World, way: Way) -> Outcome {
    const LEASE: Duration = Duration::from_secs(4);
    // Its watchdog would renew the lock before the lease is over, if it had anything to do with it.
    let (first, second) = world.pair_with_short_watchdog(way);
    let name = world.fresh("lease time");
    let begun = Instant::now();
    first.lock_with_lease(&name, LEASE).await?;
    let left = world.view.pttl(&name).await?;
    ensure!(
        (1..=4000).contains(&left),
        "{left} ms are left of a lease of {LEASE:?}"
    );
    let got = locking(&second, &name)
        .within(LEASE + SOON, "the take-over after the lease")
        .await?;
    ensure!(
        got >= begun + LEASE - SLACK,
        "the lease of {LEASE:?} was over after {:?}",
        got - begun
    );
    world.view.ensure_owner(&name, &second, 1).await?;
    ensure!(
        first.unlock(&name).await?.is_refused(),
        "a lock can be unlocked after its lease"
    );
    world.view.ensure_owner(&name, &second, 1).await?;
    ensure!(
        second.unlock(&name).await? == Unlocked::Done,
        "the second owner cannot unlock"
    );
    Ok(vec![])
}

/// The watchdog keeps the lock from the other for longer than its timeout.
pub async fn watchdog(world: &World, way: Way) -> Outcome {
    let (first, second) = world.pair_with_short_watchdog(way);
    let name = world.fresh("watchdog");
    first.lock(&name).await?;
    let left = world.view.pttl(&name).await?;
    ensure!(
        (1..=3000).contains(&left),
        "{left} ms are left under a watchdog timeout of {SHORT_WATCHDOG:?}"
    );
    let wait = SHORT_WATCHDOG * 7 / 3;
    ensure!(
        !second.try_lock(&name, wait, None).await?,
        "the other has the lock within {wait:?}"
    );
    world.view.ensure_owner(&name, &first, 1).await?;
    let left = world.view.pttl(&name).await?;
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
        "the lock is free, but cannot be had"
    );
    ensure!(
        second.unlock(&name).await? == Unlocked::Done,
        "the second owner cannot unlock"
    );
    Ok(vec![])
}

/// The owner's process is killed: a waiter takes over when the lease has run out, not before.
pub async fn killed_owner(world: &World, way: Way) -> Outcome {
    let name = world.fresh("killed");
    let url = world.server.url();
    let (peer, worker);
    match way {
        Way::JavaToRust => {
            let started = Peer::start(&world.version)
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
            while !world.view.exists(&name).await? {
                ensure!(
                    Instant::now() < deadline,
                    "the worker does not take the lock"
                );
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
    let (_, heir) = world.pair(way);
    let owner = world.view.owners(&name).await?;
    let mut waiting = locking(&heir, &name);
    world.view.until_listeners(&name, 1).await?;
    // Past the timeout: what is taken over is a lock that was renewed.
    tokio::time::sleep(SHORT_WATCHDOG).await;
    ensure!(
        !waiting.is_finished(),
        "the waiter has the lock of a living owner"
    );
    ensure!(
        world.view.owners(&name).await? == owner,
        "the lock changed hands"
    );
    match (peer, worker) {
        (Some(peer), None) => peer.kill(),
        (None, Some(worker)) => worker.kill(),
        _ => unreachable!("one of them"),
    }
    let killed = Instant::now();
    let left = world.view.pttl(&name).await?;
    ensure!(
        (1..=3000).contains(&left),
        "{left} ms are left under a watchdog timeout of {SHORT_WATCHDOG:?}"
    );
    let got = waiting
        .within(LONG, "the take-over from a killed owner")
        .await?;
    let lease = Duration::from_millis(left.unsigned_abs());
    ensure!(
        got >= killed + lease - SLACK,
        "taken over {:?} after the kill, {lease:?} of the lease left",
        got - killed
    );
    world.view.ensure_owner(&name, &heir, 1).await?;
    ensure!(
        heir.unlock(&name).await? == Unlocked::Done,
        "the heir cannot unlock"
    );
    Ok(vec![])
}

/// An owner locks again with a shorter lease. Redisson then forgets the longer hold; ours must not.
pub async fn shorter_reentry(world: &World, way: Way) -> Outcome {
    const SHORT: Duration = Duration::from_secs(1);
    let (first, second) = world.pair(way);
    let name = world.fresh("shorter");
    first.lock(&name).await?;
    first.lock_with_lease(&name, SHORT).await?;
    world.view.ensure_owner(&name, &first, 2).await?;
    let left = world.view.pttl(&name).await?;
    let second_has_it = second.try_lock(&name, SHORT * 3, None).await?;
    match &first {
        Party::Rust(_) => {
            ensure!(
                left > 15_000,
                "the shorter lease left {left} ms of the longer one"
            );
            ensure!(
                !second_has_it,
                "the other has the lock while the outer hold lives"
            );
            for _ in 0..2 {
                ensure!(
                    first.unlock(&name).await? == Unlocked::Done,
                    "a hold cannot be given back"
                );
            }
            Ok(vec![])
        }
        Party::Java(_) if left <= 1000 => {
            // It is gone on the server, so that ours rightly has it; nobody else may think so.
            ensure!(second_has_it, "the lock is over, but cannot be had");
            world.view.ensure_owner(&name, &second, 1).await?;
            ensure!(!first.is_held(&name).await?, "two hold the lock");
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
            ensure!(!second_has_it, "both have the lock");
            Ok(vec![])
        }
    }
}
