//! Worker processes: the test binary, started again to run one of its tests.
//!
//! A test file that starts workers has a test for them, which does nothing in an ordinary run:
//!
//! ```ignore
//! #[tokio::test]
//! async fn worker_process() {
//!     let Some(role) = process::role() else { return };
//!     // ... process::setting("URL") ...
//! }
//! ```

// Each test binary includes this module and uses a part of it.
#![allow(dead_code)]

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

const ROLE: &str = "TEST_WORKER_ROLE";
const SETTING: &str = "TEST_WORKER_";

/// A process that runs one test of this binary. Dropping it kills it.
#[derive(Debug)]
pub struct Worker(Child);

impl Worker {
    /// Starts a worker that runs this test with these settings, which [`setting`] returns.
    pub fn start(test: &str, role: &str, settings: &[(&str, &str)]) -> Self {
        Self::start_with(test, role, settings, &[])
    }

    /// The same, with variables of the environment.
    pub fn start_with(
        test: &str,
        role: &str,
        settings: &[(&str, &str)],
        variables: &[(&str, &str)],
    ) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this binary"));
        command
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .envs(variables.iter().copied());
        for (name, value) in settings {
            command.env(format!("{SETTING}{name}"), value);
        }
        // The pipe closes when this process ends for any reason: see `role`.
        Self(
            command
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .spawn()
                .expect("a worker process"),
        )
    }

    /// Stops the process with SIGSTOP, and waits until it has stopped.
    pub fn pause(&self) {
        kill(self.pid(), Signal::SIGSTOP).expect("SIGSTOP");
        let status = waitpid(self.pid(), Some(WaitPidFlag::WUNTRACED));
        assert!(
            matches!(status, Ok(WaitStatus::Stopped(..))),
            "the worker ended instead of stopping: {status:?}"
        );
    }

    /// Continues a stopped process.
    pub fn resume(&self) {
        kill(self.pid(), Signal::SIGCONT).expect("SIGCONT");
    }

    /// Kills the process with SIGKILL, and waits for its end.
    pub fn kill(mut self) {
        self.0.kill().expect("SIGKILL");
        self.0.wait().expect("the worker's end");
    }

    /// The exit status; `None` while the process runs.
    pub fn status(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().expect("the worker's state")
    }

    /// Waits until the process has ended without being killed.
    #[track_caller]
    pub fn ended(&mut self, limit: Duration) -> ExitStatus {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.0.try_wait().expect("the worker's state") {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "the worker did not end within {limit:?}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The process id.
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.0.id().try_into().expect("a process id"))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // An error means that the process has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The role of this process; `None` if it is not a worker. From this call on, a worker ends when
/// the process that started it ends.
pub fn role() -> Option<String> {
    let role = std::env::var(ROLE).ok()?;
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(1);
    });
    Some(role)
}

/// A setting with which this worker was started.
#[track_caller]
pub fn setting(name: &str) -> String {
    std::env::var(format!("{SETTING}{name}")).unwrap_or_else(|_| panic!("no setting {name}"))
}

/// Runs one test of this binary with that role in a process of its own, and expects that it passes:
/// for what concerns the whole process, such as its allocator or its log.
#[track_caller]
pub fn run_alone(test: &str, role: &str) {
    let status = Worker::start(test, role, &[]).ended(Duration::from_secs(120));
    assert!(status.success(), "{role}: {status} (see the panic above)");
}
