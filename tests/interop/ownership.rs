//! Scenarios of ownership: exclusion, re-entry, names, force unlock, unlock by other owners,
//! inspection, and waiters that end early.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::fixture::{
    Direction, Failed, Fixture, LONG, SHORT_WATCHDOG, SOON, Task, ensure, locking,
};
use crate::party::{Party, Unlocked};
use crate::scenarios::{Note, Outcome};
use crate::support::java::PeerThread;

/// Names that a client might change: by encoding, by quoting, by the brace rule of the channel.
const NAMES: [&str; 12] = [
    "order 42",
    " ",
    "käse 🧀 日本語",
    "\u{202e}right to left",
    "{tag}",
    "order:{42}",
    "a{b}c{d}",
    "a}b",
    "a:b::c",
    "quotes \" and ' and \\",
    "line\r\nbreak",
    "%s $1 *?[a]",
];

/// While one party holds the lock, the other cannot acquire it.
pub async fn exclusion(fixture: &Fixture, direction: Direction) -> Outcome {
    let (first, second) = fixture.pair(direction);
    let name = fixture.unique_name("exclusion");
    first.lock(&name).await?;
    fixture.observer.ensure_owner(&name, &first, 1).await?;
    for wait in [Duration::ZERO, Duration::from_millis(200)] {
        ensure!(
            !second.try_lock(&name, wait, None).await?,
            "both parties hold the lock"
        );
    }
    fixture.observer.ensure_owner(&name, &first, 1).await?;
    ensure!(
        first.unlock(&name).await? == Unlocked::Done,
        "the owner cannot unlock"
    );
    ensure!(
        !fixture.observer.exists(&name).await?,
        "the key exists after the unlock"
    );
    ensure!(
        second.try_lock(&name, Duration::ZERO, None).await?,
        "the lock is free, but cannot be acquired"
    );
    fixture.observer.ensure_owner(&name, &second, 1).await?;
    ensure!(
        !first.try_lock(&name, Duration::ZERO, None).await?,
        "both parties hold the lock"
    );
    ensure!(
        second.unlock(&name).await? == Unlocked::Done,
        "the second owner cannot unlock"
    );
    ensure!(
        !fixture.observer.exists(&name).await?,
        "the key exists after the unlock"
    );
    Ok(vec![])
}

/// Holds are counted, and only the last unlock frees the lock.
pub async fn reentry(fixture: &Fixture, direction: Direction) -> Outcome {
    const HOLDS: i64 = 3;
    let (first, second) = fixture.pair(direction);
    let name = fixture.unique_name("re-entry");
    for count in 1..=HOLDS {
        ensure!(
            first.try_lock(&name, Duration::ZERO, None).await?,
            "hold {count} is refused"
        );
        fixture.observer.ensure_owner(&name, &first, count).await?;
        ensure!(
            first.hold_count(&name).await? == count,
            "the owner's hold count is not {count}"
        );
        ensure!(
            second.hold_count(&name).await? == 0,
            "the other party has a hold count"
        );
    }
    for left in (0..HOLDS).rev() {
        ensure!(
            !second.try_lock(&name, Duration::ZERO, None).await?,
            "the other party acquired the lock despite {} holds",
            left + 1
        );
        ensure!(
            first.unlock(&name).await? == Unlocked::Done,
            "hold {} cannot be released",
            left + 1
        );
        ensure!(
            first.hold_count(&name).await? == left,
            "the hold count after an unlock is not {left}"
        );
    }
    ensure!(
        !fixture.observer.exists(&name).await?,
        "the key exists after the last unlock"
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

/// A name stands for the same key and the same channel on both sides.
pub async fn names(fixture: &Fixture, direction: Direction) -> Outcome {
    for name in NAMES {
        // The directions run at the same time, so each needs its own names.
        let name = &format!(
            "{name}{}",
            if direction == Direction::JavaToRust {
                ""
            } else {
                "2"
            }
        );
        let (first, second) = fixture.pair(direction);
        first.lock(name).await?;
        fixture.observer.ensure_owner(name, &first, 1).await?;
        let mut waiting = locking(&second, name);
        fixture.observer.until_subscribers(name, 1).await?;
        ensure!(
            first.unlock(name).await? == Unlocked::Done,
            "the owner cannot unlock {name:?}"
        );
        waiting
            .within(SOON, &format!("the wake-up on {name:?}"))
            .await?;
        fixture.observer.ensure_owner(name, &second, 1).await?;
        ensure!(
            second.unlock(name).await? == Unlocked::Done,
            "the second owner cannot unlock {name:?}"
        );
        ensure!(
            !fixture.observer.exists(name).await?,
            "{name:?} is still held"
        );
    }
    Ok(vec![])
}

/// A force unlock frees both holds of the owner and wakes the waiter, and the former owner does not
/// disturb the new one.
pub async fn force_unlock(fixture: &Fixture, direction: Direction) -> Outcome {
    let (owner, other) = fixture.pair_with_short_watchdog(direction);
    let (_, waiter) = fixture.pair(direction);
    let name = fixture.unique_name("force unlock");
    owner.lock(&name).await?;
    owner.lock(&name).await?;
    let mut waiting = locking(&waiter, &name);
    fixture.observer.until_subscribers(&name, 1).await?;
    ensure!(other.force_unlock(&name).await?, "a held lock is not freed");
    waiting
        .within(SOON, "the wake-up by the force unlock")
        .await?;
    fixture.observer.ensure_owner(&name, &waiter, 1).await?;
    if !owner.is_java() {
        let reason = tokio::time::timeout(LONG, owner.loss_reason()).await?;
        ensure!(reason.is_some(), "the owner is not notified of the loss");
    }
    // Two renewal intervals of the former owner.
    tokio::time::sleep(SHORT_WATCHDOG * 2 / 3).await;
    fixture.observer.ensure_owner(&name, &waiter, 1).await?;
    ensure!(
        !owner.is_held(&name).await?,
        "the lock is reported as held by the former owner"
    );
    for _ in 0..2 {
        ensure!(
            owner.unlock(&name).await?.is_refused(),
            "the former owner can unlock"
        );
    }
    fixture.observer.ensure_owner(&name, &waiter, 1).await?;
    ensure!(
        waiter.unlock(&name).await? == Unlocked::Done,
        "the woken waiter cannot unlock"
    );
    ensure!(
        !other.force_unlock(&name).await?,
        "a force unlock of a free lock reports success"
    );
    Ok(vec![])
}

/// The second party unlocks a lock that the first one holds, and then a free lock.
pub async fn unlock_by_other_owner(fixture: &Fixture, direction: Direction) -> Outcome {
    let (first, second) = fixture.pair(direction);
    let name = fixture.unique_name("unlock by other owner");
    first.lock(&name).await?;
    ensure!(
        second.unlock(&name).await? == Unlocked::NotOwner,
        "a lock of another owner can be unlocked"
    );
    fixture.observer.ensure_owner(&name, &first, 1).await?;
    ensure!(first.is_held(&name).await?, "the owner lost its lock");
    ensure!(
        first.unlock(&name).await? == Unlocked::Done,
        "the owner cannot unlock"
    );

    let unlocked = second.unlock(&name).await?;
    ensure!(
        !fixture.observer.exists(&name).await?,
        "the unlock of a free lock leaves a key"
    );
    match (unlocked, &second) {
        (Unlocked::NotOwner, _) => Ok(vec![]),
        (Unlocked::Done, Party::Java(_)) => Ok(vec![Note::SilentUnlock]),
        (other, _) => Err(Failed(format!("the unlock of a free lock: {other:?}"))),
    }
}

/// Both parties report the same state of one key.
pub async fn inspection(fixture: &Fixture, direction: Direction) -> Outcome {
    let (first, second) = fixture.pair(direction);
    let name = fixture.unique_name("inspection");
    ensure_state(&name, &first, &second, false, -2..=-2).await?;
    first
        .lock_with_lease(&name, Duration::from_secs(60))
        .await?;
    ensure_state(&name, &first, &second, true, 50_000..=60_000).await?;
    first
        .lock_with_lease(&name, Duration::from_secs(90))
        .await?;
    ensure_state(&name, &first, &second, true, 80_000..=90_000).await?;
    let counts = (
        first.hold_count(&name).await?,
        second.hold_count(&name).await?,
    );
    ensure!(
        counts == (2, 0),
        "the hold counts are {counts:?} and not (2, 0)"
    );
    let held = (first.is_held(&name).await?, second.is_held(&name).await?);
    ensure!(
        held == (true, false),
        "the parties hold the lock: {held:?} and not (true, false)"
    );
    for party in [&first, &second] {
        if let (Party::Java(thread), Party::Java(owner)) = (party, &first) {
            let id = owner.thread_id().await?;
            ensure!(
                thread.is_held_by(&name, id).await?,
                "Java does not report its thread {id} as the owner"
            );
        }
    }
    // A key without an expiry, which neither side leaves.
    fixture.observer.ask::<i64>(&["PERSIST", &name]).await?;
    ensure_state(&name, &first, &second, true, -1..=-1).await?;
    ensure!(
        second.force_unlock(&name).await?,
        "a held lock is not freed"
    );
    ensure_state(&name, &first, &second, false, -2..=-2).await?;
    // This library reports the owner field, too.
    let (java, rust) = if first.is_java() {
        (&first, &second)
    } else {
        (&second, &first)
    };
    java.lock(&name).await?;
    let Party::Rust(actor) = rust else {
        unreachable!("one party of each pair is in Rust")
    };
    let owners = actor.owners(&name).await?;
    ensure!(
        owners == [(java.owner().await?, 1)],
        "the owners are {owners:?}"
    );
    ensure!(
        java.unlock(&name).await? == Unlocked::Done,
        "Java cannot unlock"
    );
    Ok(vec![])
}

async fn ensure_state(
    name: &str,
    first: &Party,
    second: &Party,
    locked: bool,
    ttl: RangeInclusive<i64>,
) -> Result<(), Failed> {
    for party in [first, second] {
        ensure!(
            party.is_locked(name).await? == locked,
            "locked is not {locked} for {party:?}"
        );
        let left = party.remaining_ttl(name).await?;
        ensure!(
            ttl.contains(&left),
            "{left} ms are left and not {ttl:?} for {party:?}"
        );
    }
    Ok(())
}

/// A waiter ends early: in Java by an interrupt, in Rust by a drop. It leaves no key and no
/// subscription, and no wake-up is lost.
pub async fn waiter_ends_early(fixture: &Fixture, direction: Direction) -> Outcome {
    let (owner, waiter) = fixture.pair(direction);
    match &waiter {
        Party::Java(thread) => {
            interrupted_try(fixture, &owner, &waiter, thread).await?;
            Ok(interrupted_lock(fixture, &owner, &waiter, thread)
                .await?
                .into_iter()
                .collect())
        }
        Party::Rust(_) => {
            let (_, remaining_waiter) = fixture.pair(direction);
            dropped_waiter(fixture, &owner, &waiter, &remaining_waiter).await?;
            Ok(vec![])
        }
    }
}

/// A Rust waiter is dropped while it is the head and another one waits behind it.
async fn dropped_waiter(
    fixture: &Fixture,
    owner: &Party,
    waiter: &Party,
    remaining_waiter: &Party,
) -> Result<(), Failed> {
    let name = &fixture.unique_name("dropped");
    owner.lock(name).await?;
    let waiting = locking(waiter, name);
    fixture.observer.until_subscribers(name, 1).await?;
    waiting.cancel().await;
    fixture.observer.until_subscribers(name, 0).await?;

    let waiting = locking(waiter, name);
    fixture.observer.until_subscribers(name, 1).await?;
    let mut remaining = locking(remaining_waiter, name);
    waiting.cancel().await;
    fixture.observer.ensure_owner(name, owner, 1).await?;
    fixture.observer.until_subscribers(name, 1).await?;
    ensure!(
        owner.unlock(name).await? == Unlocked::Done,
        "the owner cannot unlock"
    );
    remaining
        .within(SOON, "the wake-up of the remaining waiter")
        .await?;
    fixture
        .observer
        .ensure_owner(name, remaining_waiter, 1)
        .await?;
    ensure!(
        remaining_waiter.unlock(name).await? == Unlocked::Done,
        "the remaining waiter cannot unlock"
    );
    fixture.observer.until_subscribers(name, 0).await?;
    ensure!(
        !fixture.observer.exists(name).await?,
        "the dropped waiter holds the lock"
    );
    Ok(())
}

/// Interrupts a `tryLock` that waits: it fails, and the Rust owner is not disturbed.
async fn interrupted_try(
    fixture: &Fixture,
    owner: &Party,
    waiter: &Party,
    thread: &PeerThread,
) -> Result<(), Failed> {
    let name = fixture.unique_name("interrupted try");
    owner.lock(&name).await?;
    let (trying, tried) = (waiter.clone(), name.clone());
    let mut trying = Task::start(async move { trying.try_lock(&tried, LONG, None).await });
    fixture.observer.until_subscribers(&name, 1).await?;
    ensure!(thread.interrupt().await?, "the thread is not in a call");
    let ended = trying.ends_within(SOON).await;
    ensure!(
        matches!(ended, Some(Err(_))),
        "an interrupted tryLock ends with {ended:?}"
    );
    fixture.observer.ensure_owner(&name, owner, 1).await?;
    ensure!(
        owner.unlock(&name).await? == Unlocked::Done,
        "the owner cannot unlock"
    );
    ensure!(
        !fixture.observer.exists(&name).await?,
        "the lock is still held"
    );
    Ok(())
}

/// Interrupts a `lock()` that sleeps. It should continue to wait until the Rust owner unlocks.
async fn interrupted_lock(
    fixture: &Fixture,
    owner: &Party,
    waiter: &Party,
    thread: &PeerThread,
) -> Result<Option<Note>, Failed> {
    const ATTEMPTS: u64 = 10;
    for attempt in 1..=ATTEMPTS {
        let name = &fixture.unique_name("interrupted");
        owner.lock(name).await?;
        let mut waiting = locking(waiter, name);
        fixture.observer.until_subscribers(name, 1).await?;
        // The test cannot observe whether the thread sleeps already. An earlier interrupt hits a
        // call to the server and may make it fail. Such an attempt is repeated with a longer pause.
        tokio::time::sleep(Duration::from_millis(100 * attempt)).await;
        ensure!(thread.interrupt().await?, "the thread is not in a call");
        let ended = waiting.ends_within(Duration::from_secs(1)).await;
        fixture.observer.ensure_owner(name, owner, 1).await?;
        // A thread that is in a call cannot run `isHeldByCurrentThread`.
        if ended.is_some() {
            ensure!(!waiter.is_held(name).await?, "two parties hold the lock");
        }
        ensure!(
            owner.unlock(name).await? == Unlocked::Done,
            "the owner cannot unlock"
        );
        match ended {
            None => {
                waiting
                    .within(SOON, "the wake-up of the interrupted waiter")
                    .await?;
                fixture.observer.ensure_owner(name, waiter, 1).await?;
                ensure!(
                    waiter.unlock(name).await? == Unlocked::Done,
                    "the interrupted waiter cannot unlock"
                );
                return Ok(None);
            }
            Some(Ok(_)) => return Ok(Some(Note::InterruptedLock)),
            Some(Err(_)) => {}
        }
    }
    Err(Failed(format!(
        "{ATTEMPTS} calls of lock() failed when interrupted"
    )))
}
