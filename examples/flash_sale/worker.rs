//! A worker process: connects, waits for the start, and runs its buyers until the stock is 0.

use std::io::BufRead;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::Failure;
use crate::options::Job;
use crate::reports::Report;
use crate::server;
use crate::shop::{Keys, Protection, Shop, lock_client};

/// The number of consecutive failures after which a buyer gives up.
const MAX_FAILURES: u32 = 20;

pub async fn work(job: Job) -> ExitCode {
    match sell(job).await {
        Ok(()) => {
            Report::Done.send();
            ExitCode::SUCCESS
        }
        Err(failure) => {
            Report::Error(failure.to_string()).send();
            ExitCode::FAILURE
        }
    }
}

async fn sell(job: Job) -> Result<(), Failure> {
    let start = start_signal();
    let url = std::env::var("REDIS_URL")?;
    let client = lock_client(&url).await?;
    let keys = Keys::new(&job.prefix);
    let shop = Arc::new(Shop {
        redis: server::connect(&redis::Client::open(url)?).await?,
        lock: client.lock(&keys.lock),
        keys,
        think: job.think,
        stop_at: job.stop_at,
        hold_count_reported: AtomicBool::new(false),
    });
    Report::Ready(client.client_id().to_string()).send();
    start.await?;

    let mut buyers = JoinSet::new();
    for buyer in 1..=job.buyers {
        buyers.spawn(buy(
            Arc::clone(&shop),
            job.protection,
            format!("worker-{}/buyer-{buyer}", job.worker),
        ));
    }
    while let Some(bought) = buyers.join_next().await {
        bought??;
    }
    client.shutdown().await?;
    Ok(())
}

/// Runs one buyer until the stock is 0.
async fn buy(shop: Arc<Shop>, protection: Protection, buyer: String) -> Result<(), Failure> {
    let mut failed = 0;
    loop {
        match shop.place_order(protection, &buyer).await {
            Ok(true) => failed = 0,
            Ok(false) => return Ok(()),
            Err(failure) => {
                failed += 1;
                if failed == MAX_FAILURES {
                    return Err(failure);
                }
                Report::Error(failure.to_string()).send();
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Completes at the first line on the standard input. The end of the input means that the demo has
/// ended; then this process ends, too.
fn start_signal() -> oneshot::Receiver<()> {
    let (start, started) = oneshot::channel();
    // On a thread, since a runtime does not shut down during a blocking read.
    std::thread::spawn(move || {
        let mut start = Some(start);
        for line in std::io::stdin().lock().lines() {
            if line.is_err() {
                break;
            }
            // An error means that this worker has already failed.
            let _ = start.take().map(|start| start.send(()));
        }
        std::process::exit(1);
    });
    started
}
