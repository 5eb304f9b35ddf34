//! Warnings to tasks that wait for themselves.

mod support;

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redisson_lock::{Holder, LockClient, ReentrantLock};
use support::server::{Server, unique};

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

/// What is traced in this thread while that runs.
async fn heard(work: impl AsyncFnOnce(ReentrantLock)) -> String {
    let server = Server::start();
    let client =
        LockClient::builder().watchdog_timeout(2 * BRIEF).recheck_interval(BRIEF).connect(&server.url()).await.unwrap();
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let _listening = tracing::subscriber::set_default(subscriber);
    work(client.lock(unique("stock"))).await;
    client.shutdown().await.unwrap();
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    text.lines().filter(|line| line.contains("WARN")).map(|line| format!("{line}\n")).collect()
}

/// "Two branches of one `join!` exclude each other", by design. No deadlock here: branch one lets go by itself,
/// and whoever follows the warning's mend (Holder::scope, PerTask) loses the exclusion.
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
    assert!(!told.contains("holds itself") || told.contains("join!"), "{told}");
}

#[tokio::test]
async fn a_fresh_scope_inside_run_is_warned() {
    let told = heard(async |lock| {
        let nested = Holder::scope(async { lock.lock().wait(BRIEF).await.map(drop) });
        lock.run(nested).await.unwrap().unwrap_err();
    })
    .await;
    assert!(told.contains("waits for a lock that it holds itself"), "{told}");
}

#[tokio::test]
async fn a_task_that_uses_a_guard_from_another_task_is_warned() {
    let told = heard(async |lock| {
        let guard = tokio::spawn(lock.lock()).await.unwrap().unwrap();
        let nested = Holder::scope(async { lock.lock().wait(BRIEF).await.map(drop) });
        guard.run(nested).await.unwrap().unwrap_err();
        guard.unlock().await.unwrap();
    })
    .await;
    assert!(told.contains("waits for a lock that it holds itself"), "{told}");
}

/// Nobody can tell at once that these wait for themselves: only that it takes long.
#[tokio::test]
async fn a_long_wait_for_a_lock_of_the_same_client_is_warned() {
    let handed_over = heard(async |lock| {
        let guard = tokio::spawn(lock.lock()).await.unwrap().unwrap();
        lock.lock().wait(5 * BRIEF).await.unwrap_err();
        guard.unlock().await.unwrap();
    })
    .await;
    let child_without_the_holder = heard(async |lock| {
        let inner = lock.clone();
        let child = async move { inner.lock().wait(5 * BRIEF).await.map(drop) };
        lock.run(async { tokio::spawn(child).await.unwrap() }).await.unwrap().unwrap_err();
    })
    .await;
    for told in [handed_over, child_without_the_holder] {
        assert_eq!(told.matches("in_current_holder").count(), 1, "{told}");
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
    assert!(!told.contains("in_current_holder"), "{told}");
}
