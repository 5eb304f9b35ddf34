//! The command line.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::shop::Protection;

pub const HELP: &str = "\
Sells stock_01 three times: without a lock, with a lock (one worker is killed while it holds it),
and with nested functions that re-enter the lock. Prints a table of the sales. Fails if a sale with
a lock went wrong.

Usage: make demo ARGS=\"[OPTIONS]\"   or   cargo run --release -p redisson-lock-examples -- [OPTIONS]

Options:
  --stock N        items to sell in each sale (default 2000)
  --workers N      worker processes, at least 2 (default 4)
  --buyers N       buying tasks in each worker (default 8)
  --think MICROS   how long a buyer thinks between reading the stock and writing it back; the timer
                   rounds up to whole milliseconds (default 1000)
  --help           print this text

Environment:
  REDIS_URL        the server to use, redis://[user[:password]@]host[:port][/database]; only keys that
                   begin with flash_sale: and this run's id are used, and they are removed at the end
  REDIS_SERVER     without REDIS_URL: the redis-server or valkey-server to start for this run
                   (default: found in the PATH)
  NO_COLOR         print no colours
";

/// The task of this process.
pub enum Command {
    Sell(Options),
    /// The demo starts worker processes with this command.
    Work(Job),
    Help,
}

pub struct Options {
    pub stock: u64,
    pub workers: u64,
    pub buyers: u64,
    pub think: Duration,
}

/// The options of a worker process. It gets the server's URL in the environment, since the URL may
/// contain a password.
#[derive(Clone)]
pub struct Job {
    pub worker: u64,
    pub protection: Protection,
    pub prefix: String,
    pub buyers: u64,
    pub think: Duration,
    /// The worker to be killed stops, holding the lock, when it reads this much stock or less.
    pub stop_at: Option<u64>,
}

const WORKER: &str = "--be-a-worker";

pub fn parse(args: impl Iterator<Item = String>) -> Result<Command, String> {
    let mut options = Options {
        stock: 2000,
        workers: 4,
        buyers: 8,
        think: Duration::from_millis(1),
    };
    let mut args = args.peekable();
    if args.next_if(|arg| arg == WORKER).is_some() {
        let args: Vec<String> = args.collect();
        return Job::from_args(&args)
            .map(Command::Work)
            .ok_or_else(|| format!("{WORKER} is for the demo itself"));
    }
    while let Some(arg) = args.next() {
        let (name, inline) = match arg.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (arg.as_str(), None),
        };
        let mut number = |allowed: RangeInclusive<u64>| {
            let value = inline
                .clone()
                .or_else(|| args.next())
                .ok_or_else(|| format!("{name} needs a number"))?;
            value
                .parse()
                .ok()
                .filter(|number| allowed.contains(number))
                .ok_or_else(|| {
                    format!(
                        "{name} {value:?} is refused: a number from {} to {}",
                        allowed.start(),
                        allowed.end()
                    )
                })
        };
        match name {
            "--stock" => options.stock = number(1..=1_000_000)?,
            // One worker is killed; at least one other has to finish the sale.
            "--workers" => options.workers = number(2..=64)?,
            "--buyers" => options.buyers = number(1..=1000)?,
            "--think" => options.think = Duration::from_micros(number(0..=10_000_000)?),
            "--help" | "-h" => return Ok(Command::Help),
            _ => return Err(format!("unknown option {arg:?}")),
        }
    }
    Ok(Command::Sell(options))
}

impl Job {
    /// The arguments that [`parse`] reads this job from.
    pub fn to_args(&self) -> Vec<String> {
        vec![
            WORKER.to_owned(),
            self.worker.to_string(),
            self.protection.name().to_owned(),
            self.prefix.clone(),
            self.buyers.to_string(),
            self.think.as_micros().to_string(),
            self.stop_at
                .map(|stock| stock.to_string())
                .unwrap_or_default(),
        ]
    }

    fn from_args(args: &[String]) -> Option<Self> {
        let [worker, protection, prefix, buyers, think, stop_at] = args else {
            return None;
        };
        Some(Self {
            worker: worker.parse().ok()?,
            protection: Protection::ALL
                .into_iter()
                .find(|known| known.name() == protection)?,
            prefix: prefix.clone(),
            buyers: buyers.parse().ok()?,
            think: Duration::from_micros(think.parse().ok()?),
            stop_at: if stop_at.is_empty() {
                None
            } else {
                Some(stop_at.parse().ok()?)
            },
        })
    }
}
