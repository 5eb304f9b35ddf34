//! A task that waits for a lock that it holds itself is told so, and nobody else is.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::support::bench::{Bench, LIMIT};
use crate::support::server::wait_until;
use redisson_lock::LockClient;
use tokio::runtime::Handle;

/// Longer than any test: what depends on it has failed.
const NEVER: Duration = Duration::from_secs(3600);

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_waits_for_itself_is_warned_once_as_soon_as_it_parks() {
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
    // Many re-checks later it is still one.
    let scripts = bench.scripts();
    wait_until("re-checks", LIMIT, || bench.scripts() > scripts + 20);
    let told = warnings.about(&bench.name);
    assert_eq!(told.len(), 1, "{told:#?}");
    for mend in ["run", "scope", "PerTask"] {
        assert!(told[0].contains(mend), "{mend} is not named: {}", told[0]);
    }
    let owner = bench.fields().into_keys().next().unwrap();
    assert!(
        told[0].contains(&owner),
        "the owner {owner} is not named: {}",
        told[0]
    );
    task.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_waits_for_itself_without_a_recheck_is_warned_too() {
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
async fn waiting_for_another_task_or_thread_is_no_reason_to_warn() {
    let warnings = Warnings::capture();
    let mut bench =
        Bench::shared(LockClient::builder().recheck_interval(Duration::from_millis(10))).await;
    let (lock, name) = (bench.lock.clone(), bench.name.clone());
    let runtime = Handle::current();
    // A thread that is no task holds it; a task and another thread wait.
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
    wait_until("the task asks again", LIMIT, || {
        bench.scripts() > scripts + 5
    });
    assert_eq!(
        warnings.about(&name),
        Vec::<String>::new(),
        "a task that waits for a thread"
    );
    task.abort();
    wait_until("the task has gone", LIMIT, || !bench.is_waited_for());

    let thread = std::thread::spawn(move || runtime.block_on(lock.lock().into_future()).map(drop));
    wait_until("the thread waits", LIMIT, || bench.is_waited_for());
    let scripts = bench.scripts();
    wait_until("the thread asks again", LIMIT, || {
        bench.scripts() > scripts + 5
    });
    let told = warnings.about(&name);
    guard.unlock().await.unwrap();
    tokio::task::spawn_blocking(|| thread.join().unwrap().unwrap())
        .await
        .unwrap();
    assert_eq!(
        told,
        Vec::<String>::new(),
        "a thread that waits for another thread"
    );
}

/// The lines that the library has traced, of all tests in this process; a lock's name tells whose
/// they are.
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

    /// The warnings of waiting for oneself that name this lock.
    fn about(&self, lock: &str) -> Vec<String> {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all = String::from_utf8_lossy(&lines).into_owned();
        let named = |line: &&str| {
            line.contains(&format!("lock={lock} ")) && line.contains("that it holds itself")
        };
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
