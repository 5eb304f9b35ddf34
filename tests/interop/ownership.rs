//! Scenarios of who has the lock: exclusion, re-entry, names, force unlock, unlock by others,
//! questions.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::party::{Party, Unlocked};
use crate::scenarios::{Note, Outcome};
use crate::support::java::PeerThread;
use crate::world::{Failed, LONG, SHORT_WATCHDOG, SOON, Task, Way, World, ensure, locking};

/// Names that a client might bend: by encoding, by quoting, by the rule for the channel's braces.
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

/// What one holds the other cannot have.
pub async fn exclusion(world: &World, way: Way) -> Outcome {
    let (first, second) = world.pair(way);
    let name = world.fresh("exclusion");
    first.lock(&name).await?;
    world.view.ensure_owner(&name, &first, 1).await?;
    for wait in [Duration::ZERO, Duration::from_millis(200)] {
        ensure!(
            !second.try_lock(&name, wait, None).await?,
            "both have the lock"
        );
    }
    world.view.ensure_owner(&name, &first, 1).await?;
    ensure!(
        first.unlock(&name).await? == Unlocked::Done,
        "the owner cannot unlock"
    );
    ensure!(
        !world.view.exists(&name).await?,
        "an unlocked lock is there still"
    );
    ensure!(
        second.try_lock(&name, Duration::ZERO, None).await?,
        "the lock is free, but cannot be had"
    );
    world.view.ensure_owner(&name, &second, 1).await?;
    ensure!(
        !first.try_lock(&name, Duration::ZERO, None).await?,
        "both have the lock, the other way round"
    );
    ensure!(
        second.unlock(&name).await? == Unlocked::Done,
        "the second owner cannot unlock"
    );
    ensure!(
        !world.view.exists(&name).await?,
        "an unlocked lock is there still"
    );
    Ok(vec![])
}

/// Holds are counted, and only the last unlock lets the other in.
pub async fn reentry(world: &World, way: Way) -> Outcome {
    const HOLDS: i64 = 3;
    let (first, second) = world.pair(way);
    let name = world.fresh("re-entry");
    for count in 1..=HOLDS {
        ensure!(
            first.try_lock(&name, Duration::ZERO, None).await?,
            "hold {count} is refused"
        );
        world.view.ensure_owner(&name, &first, count).await?;
        ensure!(
            first.hold_count(&name).await? == count,
            "the owner does not count {count}"
        );
        ensure!(
            second.hold_count(&name).await? == 0,
            "the other side counts holds of its own"
        );
    }
    for left in (0..HOLDS).rev() {
        ensure!(
            !second.try_lock(&name, Duration::ZERO, None).await?,
            "{} holds let the other in",
            left + 1
        );
        ensure!(
            first.unlock(&name).await? == Unlocked::Done,
            "hold {} cannot be given back",
            left + 1
        );
        ensure!(
            first.hold_count(&name).await? == left,
            "an unlock leaves another count than {left}"
        );
    }
    ensure!(
        !world.view.exists(&name).await?,
        "the last unlock left the lock"
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

/// Both sides mean the same key and the same channel by a name.
pub async fn names(world: &World, way: Way) -> Outcome {
    for name in NAMES {
        // The name as it is, and the scenario's own: names of both directions must not meet.
        let name = &format!("{name}{}", if way == Way::JavaToRust { "" } else { "2" });
        let (first, second) = world.pair(way);
        first.lock(name).await?;
        world.view.ensure_owner(name, &first, 1).await?;
        let mut waiting = locking(&second, name);
        world.view.until_listeners(name, 1).await?;
        ensure!(
            first.unlock(name).await? == Unlocked::Done,
            "the owner cannot unlock {name:?}"
        );
        waiting
            .within(SOON, &format!("the wake-up on {name:?}"))
            .await?;
        world.view.ensure_owner(name, &second, 1).await?;
        ensure!(
            second.unlock(name).await? == Unlocked::Done,
            "the second owner cannot unlock {name:?}"
        );
        ensure!(!world.view.exists(name).await?, "{name:?} is left");
    }
    Ok(vec![])
}

/// Frees what the other holds twice, wakes the waiter, and the former owner does not come back.
pub async fn force_unlock(world: &World, way: Way) -> Outcome {
    let (owner, other) = world.pair_with_short_watchdog(way);
    let (_, waiter) = world.pair(way);
    let name = world.fresh("force unlock");
    owner.lock(&name).await?;
    owner.lock(&name).await?;
    let mut waiting = locking(&waiter, &name);
    world.view.until_listeners(&name, 1).await?;
    ensure!(other.force_unlock(&name).await?, "a held lock is not freed");
    waiting
        .within(SOON, "the wake-up by the force unlock")
        .await?;
    world.view.ensure_owner(&name, &waiter, 1).await?;
    if !owner.is_java() {
        let told = tokio::time::timeout(LONG, owner.told_of_loss()).await?;
        ensure!(
            told.is_some(),
            "the owner is not told that its lock is gone"
        );
    }
    // Two periods of the former owner's renewal.
    tokio::time::sleep(SHORT_WATCHDOG * 2 / 3).await;
    world.view.ensure_owner(&name, &waiter, 1).await?;
    ensure!(
        !owner.is_held(&name).await?,
        "the former owner believes that it holds the lock"
    );
    for _ in 0..2 {
        ensure!(
            owner.unlock(&name).await?.is_refused(),
            "the former owner can unlock"
        );
    }
    world.view.ensure_owner(&name, &waiter, 1).await?;
    ensure!(
        waiter.unlock(&name).await? == Unlocked::Done,
        "the woken waiter cannot unlock"
    );
    ensure!(!other.force_unlock(&name).await?, "a free lock is freed");
    Ok(vec![])
}

/// The second party unlocks what the first holds, and then what nobody holds.
pub async fn not_the_owner(world: &World, way: Way) -> Outcome {
    let (first, second) = world.pair(way);
    let name = world.fresh("not the owner");
    first.lock(&name).await?;
    ensure!(
        second.unlock(&name).await? == Unlocked::NotOwner,
        "somebody else's lock can be unlocked"
    );
    world.view.ensure_owner(&name, &first, 1).await?;
    ensure!(first.is_held(&name).await?, "the owner lost its lock");
    ensure!(
        first.unlock(&name).await? == Unlocked::Done,
        "the owner cannot unlock"
    );

    let unlocked = second.unlock(&name).await?;
    ensure!(
        !world.view.exists(&name).await?,
        "the unlock of a free lock leaves a key"
    );
    match (unlocked, &second) {
        (Unlocked::NotOwner, _) => Ok(vec![]),
        (Unlocked::Done, Party::Java(_)) => Ok(vec![Note::SilentUnlock]),
        (other, _) => Err(Failed(format!("the unlock of a free lock: {other:?}"))),
    }
}

/// Each question about one key has one answer, whoever asks.
pub async fn questions(world: &World, way: Way) -> Outcome {
    let (first, second) = world.pair(way);
    let name = world.fresh("questions");
    agree(&name, &first, &second, false, -2..=-2).await?;
    first
        .lock_with_lease(&name, Duration::from_secs(60))
        .await?;
    agree(&name, &first, &second, true, 50_000..=60_000).await?;
    first
        .lock_with_lease(&name, Duration::from_secs(90))
        .await?;
    agree(&name, &first, &second, true, 80_000..=90_000).await?;
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
        "held by: {held:?} and not (true, false)"
    );
    for party in [&first, &second] {
        if let (Party::Java(thread), Party::Java(owner)) = (party, &first) {
            let id = owner.thread_id().await?;
            ensure!(
                thread.is_held_by(&name, id).await?,
                "Java does not find its own thread {id}"
            );
        }
    }
    // A key that lost its expiry, which neither side would leave.
    world.view.ask::<i64>(&["PERSIST", &name]).await?;
    agree(&name, &first, &second, true, -1..=-1).await?;
    ensure!(
        second.force_unlock(&name).await?,
        "a held lock is not freed"
    );
    agree(&name, &first, &second, false, -2..=-2).await?;
    // Ours lists the owners by name as well.
    let (java, rust) = if first.is_java() {
        (&first, &second)
    } else {
        (&second, &first)
    };
    java.lock(&name).await?;
    let Party::Rust(actor) = rust else {
        unreachable!("one of a pair is ours")
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

async fn agree(
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

/// A waiter goes away: Java's is interrupted, ours is dropped. It leaves nothing, and takes no
/// wake-up with it.
pub async fn waiter_gives_up(world: &World, way: Way) -> Outcome {
    let (owner, leaver) = world.pair(way);
    match &leaver {
        Party::Java(thread) => {
            interrupted_try(world, &owner, &leaver, thread).await?;
            Ok(interrupted_lock(world, &owner, &leaver, thread)
                .await?
                .into_iter()
                .collect())
        }
        Party::Rust(_) => {
            let (_, stayer) = world.pair(way);
            dropped_waiter(world, &owner, &leaver, &stayer).await?;
            Ok(vec![])
        }
    }
}

/// One waiter of ours is dropped while it is in front of another.
async fn dropped_waiter(
    world: &World,
    owner: &Party,
    leaver: &Party,
    stayer: &Party,
) -> Result<(), Failed> {
    let name = &world.fresh("dropped");
    owner.lock(name).await?;
    let leaving = locking(leaver, name);
    world.view.until_listeners(name, 1).await?;
    leaving.cancel().await;
    world.view.until_listeners(name, 0).await?;

    let leaving = locking(leaver, name);
    world.view.until_listeners(name, 1).await?;
    let mut staying = locking(stayer, name);
    leaving.cancel().await;
    world.view.ensure_owner(name, owner, 1).await?;
    world.view.until_listeners(name, 1).await?;
    ensure!(
        owner.unlock(name).await? == Unlocked::Done,
        "the owner cannot unlock"
    );
    staying
        .within(SOON, "the wake-up of the waiter that stayed")
        .await?;
    world.view.ensure_owner(name, stayer, 1).await?;
    ensure!(
        stayer.unlock(name).await? == Unlocked::Done,
        "the waiter that stayed cannot unlock"
    );
    world.view.until_listeners(name, 0).await?;
    ensure!(
        !world.view.exists(name).await?,
        "who went away has the lock"
    );
    Ok(())
}

/// Interrupts a `tryLock` that waits: it fails, and our owner is not disturbed.
async fn interrupted_try(
    world: &World,
    owner: &Party,
    leaver: &Party,
    thread: &PeerThread,
) -> Result<(), Failed> {
    let name = world.fresh("interrupted try");
    owner.lock(&name).await?;
    let (trying, tried) = (leaver.clone(), name.clone());
    let mut trying = Task::start(async move { trying.try_lock(&tried, LONG, None).await });
    world.view.until_listeners(&name, 1).await?;
    ensure!(
        thread.interrupt().await?,
        "the waiting thread is in no call"
    );
    let ended = trying.ends_within(SOON).await;
    ensure!(
        matches!(ended, Some(Err(_))),
        "an interrupted tryLock ends with {ended:?}"
    );
    world.view.ensure_owner(&name, owner, 1).await?;
    ensure!(
        owner.unlock(&name).await? == Unlocked::Done,
        "the owner cannot unlock"
    );
    ensure!(!world.view.exists(&name).await?, "the lock is left");
    Ok(())
}

/// Interrupts a `lock()` that is parked. It is to go on waiting, until our owner unlocks.
async fn interrupted_lock(
    world: &World,
    owner: &Party,
    leaver: &Party,
    thread: &PeerThread,
) -> Result<Option<Note>, Failed> {
    const ATTEMPTS: u64 = 10;
    for attempt in 1..=ATTEMPTS {
        let name = &world.fresh("interrupted");
        owner.lock(name).await?;
        let mut waiting = locking(leaver, name);
        world.view.until_listeners(name, 1).await?;
        // From outside one does not see whether the thread is parked already. Before, the interrupt
        // hits a question to the server, and the call fails, as it may: that is no answer to what
        // is asked here.
        tokio::time::sleep(Duration::from_millis(100 * attempt)).await;
        ensure!(
            thread.interrupt().await?,
            "the waiting thread is in no call"
        );
        let ended = waiting.ends_within(Duration::from_secs(1)).await;
        world.view.ensure_owner(name, owner, 1).await?;
        // A thread that is in a call cannot be asked.
        if ended.is_some() {
            ensure!(!leaver.is_held(name).await?, "two hold the lock");
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
                world.view.ensure_owner(name, leaver, 1).await?;
                ensure!(
                    leaver.unlock(name).await? == Unlocked::Done,
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
