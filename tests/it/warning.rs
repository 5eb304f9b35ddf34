//! Warnings: to tasks that wait for themselves, and of renewals that are refused.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::server::{Server, unique};
use redisson_lock::{LockClient, Owner, ReentrantLock};

const BRIEF: Duration = Duration::from_millis(300);

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Listens to this thread, for as long as the guard lives.
    fn listen(&self) -> tracing::subscriber::DefaultGuard {
        let writer = self.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::set_default(subscriber)
    }

    fn warnings(&self) -> String {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines()
            .filter(|line| line.contains("WARN"))
            .map(|line| format!("{line}\n"))
            .collect()
    }
}

/// What is traced in this thread while that runs.
async fn heard(work: impl AsyncFnOnce(ReentrantLock)) -> String {
    let server = Server::start();
    let client = LockClient::builder()
        .watchdog_timeout(2 * BRIEF)
        .recheck_interval(BRIEF)
        .connect(&server.url())
        .await
        .unwrap();
    let log = Log::default();
    let _listening = log.listen();
    work(client.lock(unique("stock"))).await;
    client.shutdown().await.unwrap();
    log.warnings()
}

/// "Two branches of one `join!` exclude each other", by design. No deadlock here: branch one lets
/// go by itself, and whoever follows the warning's mend (Owner::scope, PerTask) loses the
/// exclusion.
#[tokio::test]
async fn branches_of_a_join_that_take_turns_get_no_advice_that_ends_their_exclusion() {
    let told = heard(async |lock| {
        let branch = || lock.run(tokio::time::sleep(BRIEF));
        let later = async {
            tokio::time::sleep(BRIEF / 2).await;
            branch().await
        };
        let (one, other) = tokio::join!(branch(), later);
        one.unwrap();
        other.unwrap();
    })
    .await;
    // Either no warning, or one that tells of this case as well.
    assert!(
        !told.contains("holds itself") || told.contains("join!"),
        "{told}"
    );
}

#[tokio::test]
async fn a_fresh_scope_inside_run_is_warned() {
    let told = heard(async |lock| {
        let nested = Owner::scope(async { lock.lock().timeout(BRIEF).await.map(drop) });
        lock.run(nested).await.unwrap().unwrap_err();
    })
    .await;
    assert!(
        told.contains("waits for a lock that it holds itself"),
        "{told}"
    );
}

#[tokio::test]
async fn a_task_that_uses_a_guard_from_another_task_is_warned() {
    let told = heard(async |lock| {
        let guard = tokio::spawn(lock.lock().into_future())
            .await
            .unwrap()
            .unwrap();
        let nested = Owner::scope(async { lock.lock().timeout(BRIEF).await.map(drop) });
        guard.run(nested).await.unwrap().unwrap_err();
        guard.unlock().await.unwrap();
    })
    .await;
    assert!(
        told.contains("waits for a lock that it holds itself"),
        "{told}"
    );
}

/// Nobody can tell at once that these wait for themselves: only that it takes long.
#[tokio::test]
async fn a_long_wait_for_a_lock_of_the_same_client_is_warned() {
    let handed_over = heard(async |lock| {
        let guard = tokio::spawn(lock.lock().into_future())
            .await
            .unwrap()
            .unwrap();
        lock.lock().timeout(5 * BRIEF).await.unwrap_err();
        guard.unlock().await.unwrap();
    })
    .await;
    let child_without_the_owner = heard(async |lock| {
        let inner = lock.clone();
        let child = async move { inner.lock().timeout(5 * BRIEF).await.map(drop) };
        lock.run(async { tokio::spawn(child).await.unwrap() })
            .await
            .unwrap()
            .unwrap_err();
    })
    .await;
    for told in [handed_over, child_without_the_owner] {
        assert_eq!(told.matches("in_current_owner").count(), 1, "{told}");
    }
}

/// Whose lock it is goes by the task that asked, not by who drove its attempt to the end: after a
/// while without an answer that is the background.
#[tokio::test]
async fn a_task_whose_lock_was_granted_late_is_warned_of_itself() {
    let server = Server::start();
    let client = LockClient::builder()
        .command_timeout(BRIEF)
        .connect(&server.url())
        .await
        .unwrap();
    let log = Log::default();
    let _listening = log.listen();
    for late in [false, true] {
        let lock = client.lock(unique("stock"));
        let name = lock.name().to_owned();
        if late {
            server.pause();
        }
        let resume = async {
            if late {
                tokio::time::sleep(5 * BRIEF).await;
                server.resume();
            }
        };
        let (outer, ()) = tokio::join!(lock.lock(), resume);
        let _outer = outer.unwrap();
        assert!(lock.try_lock_for(BRIEF).await.unwrap().is_none());
        let told = log.warnings();
        let warned = |line: &str| {
            line.contains("waits for a lock that it holds itself") && line.contains(&name)
        };
        assert!(told.lines().any(warned), "late: {late}; {told}");
    }
}

#[tokio::test]
async fn a_wait_for_many_short_holds_is_not_warned() {
    let told = heard(async |lock| {
        let busy = lock.clone();
        let others: Vec<_> = (0..2)
            .map(|_| {
                let busy = busy.clone();
                tokio::spawn(async move {
                    for _ in 0..8 {
                        busy.run(tokio::time::sleep(BRIEF / 2)).await.unwrap();
                    }
                })
            })
            .collect();
        for other in others {
            other.await.unwrap();
        }
    })
    .await;
    assert!(!told.contains("in_current_owner"), "{told}");
}

/// A refused renewal between others that are granted, each in a call of its own, is no outage that
/// begins and ends with every one of them: a log full of that would hide the refusal.
#[tokio::test]
async fn a_refused_renewal_is_not_told_as_an_outage_again_and_again() {
    let server = Server::start();
    let mut redis = server.connection();
    let user = [
        "SETUSER", "app", "on", ">secret", "~app:*", "~tmp:*", "&*", "+@all",
    ];
    redis::cmd("ACL").arg(&user).exec(&mut redis).unwrap();
    let url = server.url().replace("redis://", "redis://app:secret@");
    let client = LockClient::builder()
        .watchdog_timeout(5 * BRIEF)
        .renewal_batch_size(1)
        .connect(&url)
        .await
        .unwrap();
    let log = Log::default();
    let _listening = log.listen();
    let mut guards = Vec::new();
    for _ in 0..20 {
        guards.push(client.lock(unique("app:stock")).lock().await.unwrap());
        // So that their renewals come one after the other, each between two refusals.
        tokio::time::sleep(BRIEF / 15).await;
    }
    let spoilt = client.lock(unique("tmp:stock")).lock().await.unwrap();
    redis::cmd("ACL")
        .arg(&["SETUSER", "app", "resetkeys", "~app:*"])
        .exec(&mut redis)
        .unwrap();
    tokio::time::timeout(20 * BRIEF, spoilt.lost())
        .await
        .expect("nobody renews it");
    assert!(guards.iter().all(|guard| !guard.is_lost()));
    let text = log.warnings();
    let told = text.matches("renewals are not answered").count();
    assert!(told <= 1, "an outage that there was not, told {told} times");
    assert_eq!(
        text.matches("the server refuses a renewal").count(),
        1,
        "{text}"
    );
    client.shutdown().await.unwrap();
}
