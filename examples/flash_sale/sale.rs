//! One sale: starts the workers, observes the sale, kills one worker if planned, and counts.

use std::collections::HashMap;
use std::process::Stdio;
use std::time::{Duration, Instant};

use redis::AsyncCommands;
use redisson_lock::ReentrantLock;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::mpsc;

use crate::Failure;
use crate::options::{Job, Options};
use crate::progress::{Progress, bar, count, plural, time};
use crate::reports::Report;
use crate::server::Server;
use crate::shop::{Protection, WATCHDOG_TIMEOUT, lock_client};

/// The number of the worker that is killed.
const VICTIM: u64 = 2;

/// How often the state of the sale is read from the server.
const POLL: Duration = Duration::from_millis(20);

/// A sale without any change for this time has failed.
const STALL_LIMIT: Duration = Duration::from_secs(30);

/// The result of a sale, by the state of the server at its end.
pub struct Outcome {
    pub protection: Protection,
    pub stock: u64,
    /// The number of orders.
    pub sold: u64,
    pub left: u64,
    /// The number of different items that were sold.
    items: u64,
    pub most_for_one_item: u64,
    pub took: Duration,
    pub waits: Vec<Duration>,
    /// The hold count inside a nested function.
    pub hold_count: Option<u64>,
    pub killed: Option<Killed>,
}

/// A worker that was killed while it held the lock.
pub struct Killed {
    /// How long the lock stayed held after that.
    pub pause: Duration,
}

pub async fn run(
    protection: Protection,
    options: &Options,
    server: &Server,
    progress: &mut Progress,
) -> Result<Outcome, Failure> {
    progress.title(match protection {
        Protection::None => "1. Without a lock",
        Protection::Lock => "2. With a lock; one worker will be killed while it holds the lock",
        Protection::Reentrant => "3. With a lock, and nested functions that re-enter it",
    });
    server.clear().await?;
    let keys = server.keys();
    server
        .connection()
        .set::<_, _, ()>(&keys.stock, options.stock)
        .await?;
    let observer = lock_client(server.url()).await?;
    let mut sale = Sale {
        protection,
        stock: options.stock,
        server,
        lock: observer.lock(&keys.lock),
        progress,
        workers: Vec::new(),
        waits: Vec::new(),
        hold_count: None,
        victim: None,
    };
    let took = sale.run(options).await?;
    let outcome = sale.count(took).await?;
    observer.shutdown().await?;
    Ok(outcome)
}

struct Sale<'a> {
    protection: Protection,
    stock: u64,
    server: &'a Server,
    lock: ReentrantLock,
    progress: &'a mut Progress,
    workers: Vec<Worker>,
    waits: Vec<Duration>,
    hold_count: Option<u64>,
    victim: Option<Victim>,
}

struct Worker {
    number: u64,
    /// Killed if the sale is dropped.
    process: Child,
    stdin: ChildStdin,
    /// The id of its lock client, once it is connected.
    client: Option<String>,
    ended: bool,
}

/// The worker that was killed.
struct Victim {
    /// Its owner field in the lock.
    owner: String,
    killed: Instant,
    pause: Option<Duration>,
}

/// The number of orders and the stock on the server.
#[derive(Clone, Copy, PartialEq, Eq)]
struct State {
    sold: u64,
    left: u64,
}

/// A worker's index, and a line of its output, or `None` at its end.
type Line = (usize, Option<String>);

impl Sale<'_> {
    /// Runs the sale, and returns how long it took.
    async fn run(&mut self, options: &Options) -> Result<Duration, Failure> {
        let (lines, mut incoming) = mpsc::unbounded_channel();
        for number in 1..=options.workers {
            let worker = self.start_worker(number, options, &lines)?;
            self.workers.push(worker);
        }
        let mut begun = Instant::now();
        let mut seen = None;
        let mut changed = Instant::now();
        let mut poll = tokio::time::interval(POLL);
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while self.workers.iter().any(|worker| !worker.ended) {
            tokio::select! {
                Some((worker, line)) = incoming.recv() => {
                    changed = Instant::now();
                    let ready = matches!(self.take(worker, line).await?, Some(Report::Ready(_)));
                    if ready && self.workers.iter().all(|worker| worker.client.is_some()) {
                        begun = Instant::now();
                        for worker in &mut self.workers {
                            // An error means that the worker has ended, which the end of its output
                            // reports.
                            let _ = worker.stdin.write_all(b"start\n").await;
                        }
                    }
                }
                _ = poll.tick() => {
                    let state = self.state().await?;
                    if seen.replace(state) != Some(state) {
                        changed = Instant::now();
                    }
                    let pausing = self.watch_pause().await?;
                    let (protection, stock) = (self.protection, self.stock);
                    self.progress.draw(|| pausing.unwrap_or_else(|| state.describe(protection, stock, begun.elapsed())));
                }
            }
            if changed.elapsed() > STALL_LIMIT {
                return Err(format!("nothing has changed for {STALL_LIMIT:?}").into());
            }
        }
        let took = begun.elapsed();
        // The sale may have ended before the end of the lease was seen.
        self.end_pause();
        Ok(took)
    }

    fn start_worker(
        &self,
        number: u64,
        options: &Options,
        lines: &mpsc::UnboundedSender<Line>,
    ) -> Result<Worker, Failure> {
        let is_victim = self.protection == Protection::Lock && number == VICTIM;
        let job = Job {
            worker: number,
            protection: self.protection,
            prefix: self.server.prefix().to_owned(),
            buyers: options.buyers,
            think: options.think,
            stop_at: is_victim.then_some(options.stock / 2),
        };
        let mut process = Command::new(std::env::current_exe()?)
            .args(job.to_args())
            .env("REDIS_URL", self.server.url())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            // In a group of its own, since Ctrl-C must end the demo only, which stops the workers.
            .process_group(0)
            .spawn()?;
        let (Some(stdin), Some(stdout)) = (process.stdin.take(), process.stdout.take()) else {
            return Err("a worker without pipes".into());
        };
        let index = self.workers.len();
        let lines = lines.clone();
        tokio::spawn(async move {
            let mut output = BufReader::new(stdout).lines();
            // An error of the channel means that the sale has ended.
            while let Ok(Some(line)) = output.next_line().await {
                let _ = lines.send((index, Some(line)));
            }
            let _ = lines.send((index, None));
        });
        Ok(Worker {
            number,
            process,
            stdin,
            client: None,
            ended: false,
        })
    }

    /// Processes a line of a worker's output.
    async fn take(
        &mut self,
        index: usize,
        line: Option<String>,
    ) -> Result<Option<Report>, Failure> {
        let worker = &mut self.workers[index];
        let Some(line) = line else {
            let status = worker.process.wait().await?;
            if !worker.ended && !status.success() {
                return Err(format!("worker {} has failed ({status})", worker.number).into());
            }
            worker.ended = true;
            return Ok(None);
        };
        let report = Report::parse(&line)
            .ok_or_else(|| format!("worker {} printed {line:?}", worker.number))?;
        match &report {
            Report::Ready(client) => worker.client = Some(client.clone()),
            Report::Waited(wait) => self.waits.push(*wait),
            Report::HoldCount(count) => self.hold_count = self.hold_count.max(Some(*count)),
            Report::Holding if self.victim.is_none() => self.kill(index).await?,
            Report::Holding => {}
            Report::Error(text) => {
                let text = format!("worker {}: {text}", worker.number);
                self.progress.note(&text);
            }
            // The end of the output follows when the process has ended.
            Report::Done => {}
        }
        Ok(Some(report))
    }

    /// Kills a worker that has reported that it holds the lock, if the server confirms it.
    async fn kill(&mut self, index: usize) -> Result<(), Failure> {
        let info = self.lock.inspect().await?;
        let worker = &mut self.workers[index];
        let owner = info.map(|info| info.owner).unwrap_or_default();
        if !worker
            .client
            .as_ref()
            .is_some_and(|client| owner.starts_with(client.as_str()))
        {
            // The machine was suspended or overloaded. The worker notices the loss and tries again.
            let text = format!(
                "Worker {} lost the lock before it could be killed.",
                worker.number
            );
            self.progress.note(&text);
            return Ok(());
        }
        // With SIGKILL the worker cannot release the lock.
        worker.process.start_kill()?;
        let killed = Instant::now();
        worker.process.wait().await?;
        worker.ended = true;
        let number = worker.number;
        let state = self.state().await?;
        self.progress.note(&format!(
            "Worker {number} was killed while it held the lock, with {} left.",
            count(state.left)
        ));
        self.progress.note(&format!(
            "Its lease is not renewed any more, so the lock becomes free in at most {} s.",
            WATCHDOG_TIMEOUT.as_secs()
        ));
        self.victim = Some(Victim {
            owner,
            killed,
            pause: None,
        });
        Ok(())
    }

    /// The progress text while the killed worker's lease lasts; `None` at any other time.
    async fn watch_pause(&mut self) -> Result<Option<String>, Failure> {
        let Some(victim) = self.victim.as_mut().filter(|victim| victim.pause.is_none()) else {
            return Ok(None);
        };
        let info = self.lock.inspect().await?;
        if let Some(info) = info.filter(|info| info.owner == victim.owner) {
            let ttl = info.ttl.unwrap_or_default();
            return Ok(Some(format!(
                "Waiting for the killed worker's lease: it expires in {}.",
                time(ttl)
            )));
        }
        self.end_pause();
        Ok(None)
    }

    /// The killed worker's lease has ended.
    fn end_pause(&mut self) {
        if let Some(victim) = self.victim.as_mut().filter(|victim| victim.pause.is_none()) {
            let pause = *victim.pause.insert(victim.killed.elapsed());
            self.progress
                .note(&format!("The others continued after {}.", time(pause)));
        }
    }

    async fn state(&self) -> Result<State, Failure> {
        let keys = self.server.keys();
        let (left, sold) = redis::pipe()
            .get(keys.stock)
            .llen(keys.orders)
            .query_async(&mut self.server.connection())
            .await?;
        Ok(State { sold, left })
    }

    /// Counts the orders on the server at the end.
    async fn count(&mut self, took: Duration) -> Result<Outcome, Failure> {
        const CHUNK: isize = 10_000;
        let State { sold, left } = self.state().await?;
        let orders = self.server.keys().orders;
        let mut per_item: HashMap<String, u64> = HashMap::new();
        for from in (0..sold as isize).step_by(CHUNK as usize) {
            let part: Vec<String> = self
                .server
                .connection()
                .lrange(&orders, from, from + CHUNK - 1)
                .await?;
            for order in part {
                let item = order.split(' ').next().unwrap_or_default();
                *per_item.entry(item.to_owned()).or_default() += 1;
            }
        }
        let outcome = Outcome {
            protection: self.protection,
            stock: self.stock,
            sold,
            left,
            items: per_item.len() as u64,
            most_for_one_item: per_item.values().copied().max().unwrap_or(0),
            took,
            waits: std::mem::take(&mut self.waits),
            hold_count: self.hold_count,
            killed: self.victim.take().map(|victim| Killed {
                pause: victim.pause.unwrap_or_default(),
            }),
        };
        self.progress.note(&outcome.describe());
        Ok(outcome)
    }
}

impl State {
    fn describe(self, protection: Protection, stock: u64, elapsed: Duration) -> String {
        let bar = bar(stock.saturating_sub(self.left), stock);
        let warning = if self.sold > stock { "  OVERSOLD" } else { "" };
        let left = if protection.locks() {
            "left"
        } else {
            "left by the stock"
        };
        format!(
            "{bar} {} sold, {} {left}, {:.1} s{warning}",
            count(self.sold),
            count(self.left),
            elapsed.as_secs_f64()
        )
    }
}

impl Outcome {
    /// How many more items were sold than the stock had.
    pub fn oversold(&self) -> u64 {
        self.sold.saturating_sub(self.stock)
    }

    /// How often the lock passed from one owner to another. Each outer acquisition has a new owner;
    /// the first one found the lock free, and a nested acquisition re-enters.
    pub fn handovers(&self) -> u64 {
        (self.waits.len() as u64).saturating_sub(1)
    }

    /// The rate during the sale, without the pause after a kill.
    pub fn per_second(&self, number: u64) -> u64 {
        let pause = self
            .killed
            .as_ref()
            .map(|killed| killed.pause)
            .unwrap_or_default();
        (number as f64 / self.took.saturating_sub(pause).as_secs_f64().max(1e-3)) as u64
    }

    /// What went wrong in a sale with a lock.
    pub fn faults(&self) -> Vec<String> {
        let name = self.protection.name();
        let mut faults = Vec::new();
        if self.sold != self.stock || self.left != 0 {
            faults.push(format!(
                "{name}: {} sold and {} left of {}",
                self.sold, self.left, self.stock
            ));
        }
        if self.items != self.sold {
            faults.push(format!(
                "{name}: one item was sold {} times",
                self.most_for_one_item
            ));
        }
        if self.protection == Protection::Lock && self.killed.is_none() {
            faults.push(format!("{name}: no worker was killed"));
        }
        if self.protection == Protection::Reentrant && self.hold_count.is_none_or(|count| count < 2)
        {
            faults.push(format!("{name}: nothing re-entered"));
        }
        faults
    }

    fn describe(&self) -> String {
        let sold = format!(
            "{} for {} in {}",
            plural(self.sold, "order"),
            plural(self.stock, "item"),
            time(self.took)
        );
        match (self.oversold(), self.faults().is_empty()) {
            (0, true) => format!("{sold}: each sold exactly once."),
            (0, false) => format!("{sold}."),
            (oversold, _) => format!("{sold}: {} too many.", count(oversold)),
        }
    }
}
