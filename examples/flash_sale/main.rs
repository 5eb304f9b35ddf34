//! A flash sale: the stock `stock_01` must never be oversold.
//!
//! Worker processes run many buyers. Each buyer reads the stock, thinks, and writes it back less
//! one. There are three sales: without a lock, with a lock, and with a lock that nested functions
//! re-enter. In the second sale one worker is killed while it holds the lock. At the end the demo
//! prints a table; its exit status is not 0 if a sale with a lock failed.
//!
//! `make demo` starts it with a private server, unless `REDIS_URL` names one; `make demo
//! ARGS=--help` lists the options. `shop.rs` shows how a buyer locks; the other files start,
//! observe and report the sales.

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

/// An error, as text for the terminal.
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

/// Runs the demo. However it ends, it stops its processes and removes its keys.
async fn demo(options: &Options) -> Result<ExitCode, Failure> {
    // The handlers are installed first, so that a signal never ends the demo without cleanup.
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
    // The workers have ended: dropping the sale killed them.
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
                .print("Interrupted. The workers are stopped, and nothing is left on the server.");
            Ok(ExitCode::from(128 + signal))
        }
    }
}

async fn sell(
    options: &Options,
    server: &Server,
    progress: &mut Progress,
) -> Result<Vec<Outcome>, Failure> {
    progress.print(&format!(
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

/// Prints the table and the conclusion.
fn conclude(outcomes: &[Outcome], progress: &mut Progress) -> ExitCode {
    let table = table::render(outcomes, progress.has_color());
    progress.print(&format!("\n{table}"));
    let faults: Vec<String> = outcomes
        .iter()
        .filter(|o| o.protection.locks())
        .flat_map(Outcome::faults)
        .collect();
    if !faults.is_empty() {
        progress.print(&format!("FAILED: {}.", faults.join("; ")));
        return ExitCode::FAILURE;
    }
    let oversold: u64 = outcomes
        .iter()
        .filter(|o| !o.protection.locks())
        .map(Outcome::oversold)
        .sum();
    if oversold == 0 {
        progress.print(
            "Without a lock nothing was oversold this time, by chance: try more buyers or a longer --think.\n\
             With the lock nothing was oversold, although a worker was killed while it held the lock.",
        );
    } else {
        let (items, were) = if oversold == 1 {
            ("item that does not exist", "was")
        } else {
            ("items that do not exist", "were")
        };
        progress.print(&format!(
            "Without a lock {} {items} {were} sold. With it: 0,\n\
             although a worker was killed while it held the lock.",
            count(oversold)
        ));
    }
    ExitCode::SUCCESS
}

/// The signals that end the demo.
struct Interrupted([(u8, tokio::signal::unix::Signal); 3]);

impl Interrupted {
    fn listen() -> Result<Self, Failure> {
        Ok(Self([
            (2, signal(SignalKind::interrupt())?),
            (15, signal(SignalKind::terminate())?),
            (1, signal(SignalKind::hangup())?),
        ]))
    }

    /// The number of the next signal.
    async fn next(&mut self) -> u8 {
        let [(int, interrupt), (term, terminate), (hup, hangup)] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => *int,
            _ = terminate.recv() => *term,
            _ = hangup.recv() => *hup,
        }
    }
}
