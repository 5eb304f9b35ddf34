//! Deadlock detection: a task that waits for a lock that it holds itself under another owner is
//! reported in the log, and no other wait is.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::support::bench::{Bench, LIMIT};
use crate::support::server::wait_until;
use redisson_lock::LockClient;
use tokio::runtime::Handle;

/// Longer than any test: a step that needs this time to pass fails.
const NEVER: Duration = Duration::from_secs(3600);

#[tokio::test(flavor = "multi_thread")]
async fn wait_for_own_lock_is_warned_once() {
    let warnings = Warnings::capture();
    let mut bench =
        Bench::shared(LockClient::builder().recheck_interval(Duration::from_millis(10))).await;
    let lock = bench.lock.clone();
    let task = tokio::spawn(async move {
        let _outer = lock.lock().await.unwrap();
        lock.lock().await.unwrap()
    });
    wait_until("a warning", LIMIT, || {
        !warnings.about(&bench.name).is_empty()
    });
    // Re-checks repeat no warning.
    let scripts = bench.scripts();
    wait_until("re-checks", LIMIT, || bench.scripts() > scripts + 20);
    let warned = warnings.about(&bench.name);
    assert_eq!(warned.len(), 1, "{warned:#?}");
    let held_by = format!("held_by={}", bench.fields().into_keys().next().unwrap());
    assert!(
        warned[0].contains(&held_by),
        "no {held_by} in: {}",
        warned[0]
    );
    task.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn wait_for_own_lock_without_recheck_is_warned() {
    let warnings = Warnings::capture();
    let bench = Bench::shared(
        LockClient::builder()
            .recheck_interval(NEVER)
            .watchdog_timeout(NEVER),
    )
    .await;
    let lock = bench.lock.clone();
    let task = tokio::spawn(async move {
        lock.run(async { tokio::spawn(lock.clone().lock().into_future()).await })
            .await
            .is_ok()
    });
    let lock = bench.client.lock(format!("{}-own", bench.name));
    let own = tokio::spawn(async move {
        let _outer = lock.lock().await.unwrap();
        lock.run(async {}).await
    });
    wait_until("a warning", LIMIT, || {
        !warnings.about(&format!("{}-own", bench.name)).is_empty()
    });
    task.abort();
    own.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn wait_for_another_task_or_thread_is_not_warned() {
    let warnings = Warnings::capture();
    let mut bench =
        Bench::shared(LockClient::builder().recheck_interval(Duration::from_millis(10))).await;
    let (lock, name) = (bench.lock.clone(), bench.name.clone());
    let runtime = Handle::current();
    // A thread outside any task holds the lock; a task and another thread wait.
    let holding = {
        let (runtime, lock) = (runtime.clone(), lock.clone());
        tokio::task::spawn_blocking(move || {
            std::thread::spawn(move || runtime.block_on(lock.lock().into_future()).unwrap()).join()
        })
    };
    let guard = holding.await.unwrap().unwrap();
    let task = tokio::spawn(lock.clone().lock().into_future());
    wait_until("the task waits", LIMIT, || bench.is_waited_for());
    let scripts = bench.scripts();
    wait_until("the task makes re-checks", LIMIT, || {
        bench.scripts() > scripts + 5
    });
    assert_eq!(
        warnings.about(&name),
        Vec::<String>::new(),
        "the task waits for a thread"
    );
    task.abort();
    wait_until("the task has ended", LIMIT, || !bench.is_waited_for());

    let thread = std::thread::spawn(move || runtime.block_on(lock.lock().into_future()).map(drop));
    wait_until("the thread waits", LIMIT, || bench.is_waited_for());
    let scripts = bench.scripts();
    wait_until("the thread makes re-checks", LIMIT, || {
        bench.scripts() > scripts + 5
    });
    let warned = warnings.about(&name);
    guard.unlock().await.unwrap();
    tokio::task::spawn_blocking(|| thread.join().unwrap().unwrap())
        .await
        .unwrap();
    assert_eq!(
        warned,
        Vec::<String>::new(),
        "the thread waits for another thread"
    );
}

/// The log lines of all tests in this process. The lock names distinguish the tests.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<u8>>>);

impl Warnings {
    fn capture() -> Self {
        static LINES: OnceLock<Warnings> = OnceLock::new();
        let capture = || {
            let lines = Warnings::default();
            let writer = lines.clone();
            tracing_subscriber::fmt()
                .with_ansi(false)
                .with_max_level(tracing::Level::WARN)
                .with_writer(move || writer.clone())
                .init();
            lines
        };
        LINES.get_or_init(capture).clone()
    }

    /// The deadlock warnings with this lock.
    fn about(&self, lock: &str) -> Vec<String> {
        const MESSAGE: &str = "a task waits for a lock that it holds itself under another owner";
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all = String::from_utf8_lossy(&lines).into_owned();
        let named = |line: &&str| line.contains(&format!("lock={lock} ")) && line.contains(MESSAGE);
        all.lines().filter(named).map(str::to_owned).collect()
    }
}

impl std::io::Write for Warnings {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend_from_slice(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
