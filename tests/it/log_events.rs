//! Log events: warnings about waits for a lock of the same client, and about refused renewals.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::server::{Server, unique, wait_until_async};
use redisson_lock::{LockClient, Owner, ReentrantLock};
use tracing_subscriber::fmt::format::FmtSpan;

const BRIEF: Duration = Duration::from_millis(1_000);

const OWN_LOCK: &str = "a task waits for a lock that it holds itself under another owner";
const LONG_WAIT: &str =
    "a request waits long for a lock that another owner of the same client holds";

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
    /// Records the events of this thread, and of clients that it connects, while the guard exists.
    fn record(&self) -> tracing::subscriber::DefaultGuard {
        let writer = self.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_max_level(tracing::Level::DEBUG)
            .with_span_events(FmtSpan::CLOSE)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::set_default(subscriber)
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    fn warnings(&self) -> String {
        self.text()
            .lines()
            .filter(|line| line.contains("WARN"))
            .map(|line| format!("{line}\n"))
            .collect()
    }
}

/// The warnings in this thread while the work runs.
async fn warnings_during(work: impl AsyncFnOnce(ReentrantLock)) -> String {
    let log = Log::default();
    let _recording = log.record();
    let server = Server::start();
    let client = LockClient::builder()
        .watchdog_timeout(2 * BRIEF)
        .recheck_interval(BRIEF)
        .connect(&server.url())
        .await
        .unwrap();
    work(client.lock(unique("stock"))).await;
    client.shutdown().await.unwrap();
    log.warnings()
}

/// Two branches of one `join!` exclude each other, by design. This is no deadlock: the first branch
/// releases the lock by itself. Advice such as `Owner::scope` or `PerTask` would end the exclusion.
#[tokio::test]
async fn warning_for_join_branches_gives_no_advice() {
    let warnings = warnings_during(async |lock| {
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
    for advice in ["scope", "PerTask", "in_current_owner"] {
        assert!(!warnings.contains(advice), "{warnings}");
    }
}

#[tokio::test]
async fn wait_in_new_scope_inside_run_is_warned() {
    let warnings = warnings_during(async |lock| {
        let nested = Owner::scope(async { lock.lock().timeout(BRIEF).await.map(drop) });
        lock.run(nested).await.unwrap().unwrap_err();
    })
    .await;
    assert!(warnings.contains(OWN_LOCK), "{warnings}");
}

#[tokio::test]
async fn wait_inside_run_of_received_guard_is_warned() {
    let warnings = warnings_during(async |lock| {
        let guard = tokio::spawn(lock.lock().into_future())
            .await
            .unwrap()
            .unwrap();
        let nested = Owner::scope(async { lock.lock().timeout(BRIEF).await.map(drop) });
        guard.run(nested).await.unwrap().unwrap_err();
        guard.unlock().await.unwrap();
    })
    .await;
    assert!(warnings.contains(OWN_LOCK), "{warnings}");
}

/// The client cannot detect at once that these requests wait for a lock of their own task, only
/// that they wait long.
#[tokio::test]
async fn long_wait_for_lock_of_same_client_is_warned() {
    let handed_over = warnings_during(async |lock| {
        let guard = tokio::spawn(lock.lock().into_future())
            .await
            .unwrap()
            .unwrap();
        lock.lock().timeout(5 * BRIEF).await.unwrap_err();
        guard.unlock().await.unwrap();
    })
    .await;
    let child_without_the_owner = warnings_during(async |lock| {
        let inner = lock.clone();
        let child = async move { inner.lock().timeout(5 * BRIEF).await.map(drop) };
        lock.run(async { tokio::spawn(child).await.unwrap() })
            .await
            .unwrap()
            .unwrap_err();
    })
    .await;
    for warnings in [handed_over, child_without_the_owner] {
        assert_eq!(warnings.matches(LONG_WAIT).count(), 1, "{warnings}");
    }
}

/// A lock belongs to the task that requested it, even if the background completed the attempt: it
/// does so after a while without a reply.
#[tokio::test]
async fn wait_for_own_late_granted_lock_is_warned() {
    let log = Log::default();
    let _recording = log.record();
    let server = Server::start();
    let client = LockClient::builder()
        .command_timeout(BRIEF)
        .connect(&server.url())
        .await
        .unwrap();
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
        let warnings = log.warnings();
        let warned = |line: &str| line.contains(OWN_LOCK) && line.contains(&name);
        assert!(warnings.lines().any(warned), "late: {late}; {warnings}");
    }
}

#[tokio::test]
async fn wait_for_many_short_holds_is_not_warned() {
    let warnings = warnings_during(async |lock| {
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
    assert!(!warnings.contains(LONG_WAIT), "{warnings}");
}

/// Each renewal is a call of its own here, and one lock's renewals are refused between the others'
/// successes. The log must not report an outage for each refusal: that would hide the refusal.
#[tokio::test]
async fn refused_renewal_is_not_reported_as_outage() {
    let log = Log::default();
    let _recording = log.record();
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
    let mut guards = Vec::new();
    for _ in 0..20 {
        guards.push(client.lock(unique("app:stock")).lock().await.unwrap());
        // Spreads the renewals, so that refusals come between them.
        tokio::time::sleep(BRIEF / 15).await;
    }
    let refused = client.lock(unique("tmp:stock")).lock().await.unwrap();
    redis::cmd("ACL")
        .arg(&["SETUSER", "app", "resetkeys", "~app:*"])
        .exec(&mut redis)
        .unwrap();
    tokio::time::timeout(20 * BRIEF, refused.lost())
        .await
        .expect("the refused lock was not lost");
    assert!(guards.iter().all(|guard| !guard.is_lost()));
    let text = log.warnings();
    let outages = text.matches("renewals get no reply").count();
    assert!(outages <= 1, "{outages} outages reported without an outage");
    assert_eq!(
        text.matches("the server refused a renewal").count(),
        1,
        "{text}"
    );
    client.shutdown().await.unwrap();
}

/// The field `lock` is written in one way, so that one filter finds each event about a lock.
#[tokio::test]
async fn lock_is_printed_without_quotes_in_events_and_spans() {
    let log = Log::default();
    let _recording = log.record();
    let server = Server::start();
    let client = LockClient::builder()
        .command_timeout(BRIEF / 5)
        .retry_timeout(BRIEF / 5)
        .connect(&server.url())
        .await
        .unwrap();
    let name = unique("stock");
    let lock = client.lock(&name);
    lock.run(async {}).await.unwrap();
    // A release that the server refuses, of a guard and of `run`.
    let mut redis = server.connection();
    let mut rights = |right: &str| {
        redis::cmd("ACL")
            .arg(&["SETUSER", "default", right])
            .exec(&mut redis)
            .unwrap()
    };
    let guard = lock.lock().await.unwrap();
    rights("-del");
    drop(guard);
    wait_until_async("the release is refused", 10 * BRIEF, || async {
        client.stats().failed_releases == 1
    })
    .await;
    rights("+del");
    lock.force_unlock().await.unwrap();
    lock.run(async { rights("-del") }).await.unwrap();
    rights("+del");
    client.shutdown().await.unwrap();
    let text = log.text();
    for event in [
        "a hold could not be released",
        "a release was not confirmed",
        "acquire{",
        "run{",
    ] {
        let mut lines = text.lines().filter(|line| line.contains(event));
        assert!(
            lines.any(|line| line.contains(&format!("lock={name}"))),
            "{event}: {text}"
        );
    }
    assert!(!text.contains("lock=\""), "{text}");
}
