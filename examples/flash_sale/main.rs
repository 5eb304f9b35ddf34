//! A flash sale: the stock `stock_01` must never be oversold.
//!
//! Worker processes with many buyers each read the stock, think, and write back one less. They do
//! so three times: without a lock, under a lock, and under a lock with functions that lock again.
//! In the second sale one worker is killed while it holds the lock. At the end a table tells what
//! was sold, and the exit status is not 0 if a sale under the lock went wrong.
//!
//! `make demo` starts it, with a server of its own unless `REDIS_URL` names one; `make demo
//! ARGS=--help` lists the options. How a buyer locks is in `shop.rs`; the rest is the stage for it.

mod options;
mod progress;
mod reports;
mod sale;
mod server;
mod shop;
mod table;
mod worker;

use std::error::Error;
use std::process::ExitCode;

use tokio::signal::unix::{SignalKind, signal};

use options::{Command, Options};
use progress::{Progress, count, plural};
use sale::Outcome;
use server::Server;
use shop::Protection;

/// What went wrong, in words for the person at the terminal.
type Failure = Box<dyn Error + Send + Sync>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let options = match options::parse(std::env::args().skip(1)) {
        Ok(Command::Sell(options)) => options,
        Ok(Command::Work(job)) => return worker::work(job).await,
        Ok(Command::Help) => {
            print!("{}", options::HELP);
            return ExitCode::SUCCESS;
        }
        Err(problem) => {
            eprintln!("flash_sale: {problem}\nTry --help.");
            return ExitCode::from(2);
        }
    };
    match demo(&options).await {
        Ok(status) => status,
        Err(failure) => {
            eprintln!("flash_sale: {failure}");
            ExitCode::FAILURE
        }
    }
}

/// The whole demo; whatever ends it, what it started and what it stored is gone afterwards.
async fn demo(options: &Options) -> Result<ExitCode, Failure> {
    // Listened for from the start, so that nothing is ever left behind.
    let mut interrupted = Interrupted::listen()?;
    let mut progress = Progress::new();
    let server = tokio::select! {
        server = Server::from_environment() => server?,
        signal = interrupted.next() => return Ok(ExitCode::from(128 + signal)),
    };
    let ended = tokio::select! {
        outcomes = sell(options, &server, &mut progress) => Ok(outcomes),
        signal = interrupted.next() => Err(signal),
    };
    // The workers are gone by now: dropping the sale killed them.
    let cleared = tokio::select! {
        cleared = server.clear() => cleared,
        _ = interrupted.next() => Err("interrupted before its keys were removed".into()),
    };
    match ended {
        Ok(outcomes) => {
            let outcomes = outcomes?;
            cleared?;
            Ok(conclude(&outcomes, &mut progress))
        }
        Err(signal) => {
            cleared?;
            progress
                .say("Interrupted. The workers are stopped, and nothing is left on the server.");
            Ok(ExitCode::from(128 + signal))
        }
    }
}

async fn sell(
    options: &Options,
    server: &Server,
    progress: &mut Progress,
) -> Result<Vec<Outcome>, Failure> {
    progress.say(&format!(
        "Flash sale: {} of stock_01",
        plural(options.stock, "item")
    ));
    progress.note(&format!(
        "Buyers: {} in {} worker processes",
        count(options.workers * options.buyers),
        options.workers
    ));
    progress.note(&format!("Server: {}", server.description()));
    progress.note(&format!(
        "Each buyer reads the stock, thinks ({:?}) and writes back one less, until it is 0.",
        options.think
    ));
    let mut outcomes = Vec::new();
    for protection in Protection::ALL {
        outcomes.push(sale::run(protection, options, server, progress).await?);
    }
    Ok(outcomes)
}

/// Prints the table and what it means.
fn conclude(outcomes: &[Outcome], progress: &mut Progress) -> ExitCode {
    let table = table::render(outcomes, progress.has_color());
    progress.say(&format!("\n{table}"));
    let faults: Vec<String> = outcomes
        .iter()
        .filter(|o| o.protection.locks())
        .flat_map(Outcome::faults)
        .collect();
    if !faults.is_empty() {
        progress.say(&format!("FAILED: {}.", faults.join("; ")));
        return ExitCode::FAILURE;
    }
    let oversold: u64 = outcomes
        .iter()
        .filter(|o| !o.protection.locks())
        .map(Outcome::oversold)
        .sum();
    if oversold == 0 {
        progress.say(
            "Without a lock nothing was oversold this time, by chance: try more buyers or a longer --think.\n\
             With the lock nothing was either, although a worker died while it held it.",
        );
    } else {
        let (items, were) = if oversold == 1 {
            ("item that does not exist", "was")
        } else {
            ("items that do not exist", "were")
        };
        progress.say(&format!(
            "Without a lock {} {items} {were} sold. With it: 0,\n\
             although a worker died while it held the lock.",
            count(oversold)
        ));
    }
    ExitCode::SUCCESS
}

/// The signals that ask the demo to end.
struct Interrupted([(u8, tokio::signal::unix::Signal); 3]);

impl Interrupted {
    fn listen() -> Result<Self, Failure> {
        Ok(Self([
            (2, signal(SignalKind::interrupt())?),
            (15, signal(SignalKind::terminate())?),
            (1, signal(SignalKind::hangup())?),
        ]))
    }

    /// The number of the next one.
    async fn next(&mut self) -> u8 {
        let [(int, interrupt), (term, terminate), (hup, hangup)] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => *int,
            _ = terminate.recv() => *term,
            _ = hangup.recv() => *hup,
        }
    }
}
