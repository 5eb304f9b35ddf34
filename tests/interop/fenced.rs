//! Scenarios of the fenced lock: `RFencedLock` and ours on one hash and one counter of tokens.

use std::time::Duration;

use redisson_lock::{FencedLock, LockClient};

use crate::fixture::{Direction, Failed, Fixture, LONG, Observer, SOON, Task, ensure};
use crate::scenarios::{Note, Outcome};
use crate::support::java::{PeerError, PeerThread, VERSIONS};

/// A lease that ends within a scenario.
const SHORT: Duration = Duration::from_secs(1);

/// How long all grants may take on a busy machine.
const GRANTING: Duration = Duration::from_secs(120);

fn counter_of(name: &str) -> String {
    format!("redisson_lock_token:{{{name}}}")
}

/// The counter, and its time to live.
async fn counter(observer: &Observer, name: &str) -> Result<(i64, i64), Failed> {
    let key = counter_of(name);
    let token: Option<i64> = observer.ask(&["GET", &key]).await?;
    Ok((token.unwrap_or(0), observer.pttl(&key).await?))
}

/// A Java thread that has acquired the lock once, unless this version has no such lock.
async fn java_with_token(
    fixture: &Fixture,
    name: &str,
) -> Result<Option<(PeerThread, i64)>, Failed> {
    let [client, _] = fixture.java_clients();
    let thread = client.thread(&fixture.unique_name("fenced"));
    match thread.lock_and_get_token(name, None).await {
        Ok(token) => Ok(Some((thread, token))),
        Err(PeerError { class, .. }) if class == PeerError::NO_METHOD => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn rust_lock(fixture: &Fixture, name: &str) -> (LockClient, FencedLock) {
    let [client, _] = fixture.rust_clients();
    (client.clone(), client.fenced_lock(name))
}

/// The fenced lock of one side excludes both kinds of the other side, whose fenced waiter is woken
/// by the unlock.
pub async fn exclusion(fixture: &Fixture, direction: Direction) -> Outcome {
    let name = &fixture.unique_name("fenced exclusion");
    let observer = &fixture.observer;
    let Some((java, first)) = java_with_token(fixture, name).await? else {
        return Ok(vec![Note::NoFencedLock]);
    };
    let (client, lock) = rust_lock(fixture, name);
    ensure!(first == 1, "the first token of Java is {first}");
    if direction == Direction::JavaToRust {
        ensure!(lock.try_lock().await?.is_none(), "a second owner");
        ensure!(
            client.lock(name).try_lock().await?.is_none(),
            "a second owner"
        );
        ensure!(
            counter(observer, name).await? == (1, -1),
            "attempts without a grant raised the counter"
        );
        let mut waiter = Task::start(async move { Ok(lock.lock().await?) });
        observer.until_subscribers(name, 1).await?;
        ensure!(!waiter.is_finished(), "the waiter does not wait");
        java.fenced_unlock(name).await?;
        let guard = waiter.within(SOON, "the woken waiter").await?;
        ensure!(guard.token() == 2, "token {} after 1", guard.token());
        ensure!(java.token(name).await? == 2, "Java sees another token");
        guard.unlock().await?;
    } else {
        java.fenced_unlock(name).await?;
        let guard = lock.lock().await?;
        ensure!(guard.token() == 2, "token {} after 1", guard.token());
        let refused = java.try_lock_and_get_token(name, Duration::ZERO).await?;
        ensure!(refused.is_none(), "a second owner with token {refused:?}");
        ensure!(
            !java.try_lock(name, Duration::ZERO, None).await?,
            "a second owner"
        );
        ensure!(
            counter(observer, name).await? == (2, -1),
            "attempts without a grant raised the counter"
        );
        let (waiting, waited) = (java.clone(), name.clone());
        let mut waiter =
            Task::start(async move { Ok(waiting.lock_and_get_token(&waited, None).await?) });
        observer.until_subscribers(name, 1).await?;
        ensure!(!waiter.is_finished(), "the waiter does not wait");
        guard.unlock().await?;
        let token = waiter.within(SOON, "the woken waiter").await?;
        ensure!(token == 3, "token {token} after 2");
        java.fenced_unlock(name).await?;
    }
    ensure!(!observer.exists(name).await?, "the lock is still held");
    observer.until_subscribers(name, 0).await?;
    Ok(vec![])
}

/// What each side does to the token on re-entry, and that an expiry of the lock keeps the counter.
pub async fn reentry_and_expiry(fixture: &Fixture, _: Direction) -> Outcome {
    let name = &fixture.unique_name("fenced re-entry");
    let observer = &fixture.observer;
    let Some((java, first)) = java_with_token(fixture, name).await? else {
        return Ok(vec![Note::NoFencedLock]);
    };
    let (_, lock) = rust_lock(fixture, name);
    let mut notes = Vec::new();

    let second = java.lock_and_get_token(name, None).await?;
    ensure!(java.hold_count(name).await? == 2, "no re-entry");
    if second == first + 1 {
        notes.push(Note::TokenOnReentry);
    } else {
        ensure!(second == first, "token {second} after {first}");
    }
    java.fenced_unlock(name).await?;
    java.fenced_unlock(name).await?;

    let guard = lock.lock().await?;
    let third = guard.token();
    ensure!(third > second, "token {third} after {second}");
    let inner = guard
        .run(lock.run_with(async |inner| inner.token()))
        .await??;
    ensure!(inner == third, "token {inner} within the tenure of {third}");
    guard.unlock().await?;

    // The lock of one side expires, and the other side acquires it.
    let guard = lock.lock().lease(SHORT).await?;
    let fourth = guard.token();
    let fifth = java
        .try_lock_and_get_token(name, LONG)
        .await?
        .ok_or_else(|| Failed("the lease did not end".to_owned()))?;
    ensure!(fifth == fourth + 1, "token {fifth} after {fourth}");
    ensure!(guard.is_lost(), "the owner was not notified");
    java.fenced_unlock(name).await?;
    java.fenced_lock_with_lease(name, SHORT).await?;
    let guard = lock.try_lock_for(LONG).await?;
    let guard = guard.ok_or_else(|| Failed("the lease did not end".to_owned()))?;
    // Redisson's lock(lease) takes a token, too, which it does not return.
    let sixth = guard.token();
    ensure!(
        sixth == fifth + 2,
        "token {sixth} after {fifth} and one more"
    );
    guard.unlock().await?;
    let (last, ttl) = counter(observer, name).await?;
    ensure!(
        (last, ttl) == (sixth, -1),
        "the counter is {last} and lives for {ttl} ms"
    );

    java.lock_and_get_token(name, Some(SHORT)).await?;
    if observer.pttl(name).await? > 2 * SHORT.as_millis() as i64 {
        notes.push(Note::IgnoredLease);
    }
    java.force_unlock(name).await?;
    Ok(notes)
}

/// Threads and tasks append their tokens to a list while they hold the lock: its order is that of
/// the grants. 1 000 grants with the newest version, and fewer with the others.
pub async fn tokens(fixture: &Fixture, _: Direction) -> Outcome {
    const PARTIES: u64 = 4;
    let name = &fixture.unique_name("fenced tokens");
    let list = &fixture.unique_name("fenced list");
    let Some((java, first)) = java_with_token(fixture, name).await? else {
        return Ok(vec![Note::NoFencedLock]);
    };
    java.fenced_unlock(name).await?;
    let grants = if fixture.version == VERSIONS[0] {
        1_000
    } else {
        100
    };
    let each = grants / PARTIES;
    let mut tasks = Vec::new();
    for client in fixture.java_clients() {
        let thread = client
            .thread(&fixture.unique_name("tokens"))
            .within(GRANTING);
        let (name, list) = (name.clone(), list.clone());
        tasks.push(Task::start(async move {
            Ok(thread.append_tokens(&name, &list, each).await?)
        }));
    }
    for client in fixture.rust_clients() {
        let (lock, list) = (client.fenced_lock(name), list.clone());
        let observer = fixture.observer.clone();
        tasks.push(Task::start(async move {
            for _ in 0..each {
                let guard = lock.lock().await?;
                let token = guard.token().to_string();
                observer.ask::<i64>(&["RPUSH", &list, &token]).await?;
                guard.unlock().await?;
            }
            Ok(())
        }));
    }
    for task in &mut tasks {
        task.within(GRANTING, "the grants").await?;
    }
    let tokens: Vec<i64> = fixture.observer.ask(&["LRANGE", list, "0", "-1"]).await?;
    ensure!(
        tokens.len() as u64 == PARTIES * each,
        "{} tokens of {grants}",
        tokens.len()
    );
    let expected: Vec<i64> = (first + 1..).take(tokens.len()).collect();
    ensure!(
        tokens == expected,
        "the tokens are not the next ones, in the order of the grants: {tokens:?}"
    );
    fixture.observer.ask::<i64>(&["DEL", list]).await?;
    Ok(vec![])
}
