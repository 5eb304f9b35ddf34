//! Recipe: a job that many machines start at the same time and that one of them runs.
//! `docs/recipes.md` explains it.
//!
//! ```sh
//! cargo run --package redisson-lock-examples --example nightly_job
//! ```

use std::time::Duration;

use redisson_lock::{Error, LockClient, ReentrantLock};

// region: job
/// How long one run may take, and how far the clocks of the machines may differ.
#[derive(Clone, Copy)]
pub struct Schedule {
    pub longest_run: Duration,
    pub clock_skew: Duration,
}

/// What became of the job on this machine.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome<T> {
    /// It ran here, and no other machine runs it for the clock skew.
    Done(T),
    /// It took longer than the longest run and was stopped. Another machine may run it.
    TimedOut,
    /// Another machine runs it, or has run it just now.
    Elsewhere,
}

/// Runs the job unless another machine runs it, or has finished it less than the clock skew ago.
pub async fn run_once<F: Future>(
    lock: &ReentrantLock,
    schedule: Schedule,
    job: F,
) -> Result<Outcome<F::Output>, Error> {
    // Long enough for the longest run and, after it, for the machine whose clock is behind. The
    // second more is for the client's margin at the end of a lease, and for the calls.
    let lease = schedule.longest_run + schedule.clock_skew + Duration::from_secs(1);
    let Some(guard) = lock.try_lock().lease(lease).await? else {
        return Ok(Outcome::Elsewhere);
    };
    match guard
        .run(tokio::time::timeout(schedule.longest_run, job))
        .await?
    {
        Ok(output) => {
            // Not unlocked: without a guard the lock stays until its lease expires, also when this
            // process ends. The owner is not needed.
            let _owner = guard.detach();
            Ok(Outcome::Done(output))
        }
        Err(_) => {
            guard.unlock().await?;
            Ok(Outcome::TimedOut)
        }
    }
}
// endregion

#[tokio::main]
async fn main() -> Result<(), Error> {
    let url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let client = LockClient::builder()
        .client_name("nightly")
        .connect_retry(Duration::from_secs(60))
        .connect(&url)
        .await?;
    let schedule = Schedule {
        longest_run: Duration::from_secs(600),
        clock_skew: Duration::from_secs(60),
    };
    let lock = client.lock("job:nightly-report");
    match run_once(&lock, schedule, async { "the report" }).await? {
        Outcome::Done(report) => println!("{report} was written here"),
        Outcome::TimedOut => println!("the report took too long"),
        Outcome::Elsewhere => println!("another machine writes the report"),
    }
    client.shutdown().await
}
