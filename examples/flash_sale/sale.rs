//! One sale: starts the workers, watches, kills one of them if that is planned, and counts.

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

/// Which worker is killed. Not the first, for no other reason than that it is as good as any.
const VICTIM: u64 = 2;

/// How often the server is asked how the sale goes.
const LOOK: Duration = Duration::from_millis(20);

/// A sale in which nothing happens for so long has failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// What came of a sale, by what the server has at its end.
pub struct Outcome {
    pub protection: Protection,
    pub stock: u64,
    /// The number of orders.
    pub sold: u64,
    pub left: u64,
    /// How many different items were sold.
    items: u64,
    pub most_for_one_item: u64,
    pub took: Duration,
    pub waits: Vec<Duration>,
    pub depth: Option<u64>,
    pub killed: Option<Killed>,
}

/// A worker that was killed while it held the lock.
pub struct Killed {
    /// How long the lock was out of reach after that.
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
        Protection::Lock => "2. With a lock, and one worker will be killed while it holds it",
        Protection::Reentrant => "3. With a lock, and functions that lock again inside it",
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
        depth: None,
        victim: None,
    };
    let took = sale.hold(options).await?;
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
    depth: Option<u64>,
    victim: Option<Victim>,
}

struct Worker {
    number: u64,
    /// Killed if the sale is dropped.
    process: Child,
    stdin: ChildStdin,
    /// Its id as a client of the lock, once it is connected.
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

/// What has been sold and what is left, by the server's word.
#[derive(Clone, Copy, PartialEq, Eq)]
struct State {
    sold: u64,
    left: u64,
}

/// From a worker: a report, or the end of its output.
type Line = (usize, Option<String>);

impl Sale<'_> {
    /// Holds the sale, and tells how long it took.
    async fn hold(&mut self, options: &Options) -> Result<Duration, Failure> {
        let (lines, mut incoming) = mpsc::unbounded_channel();
        for number in 1..=options.workers {
            let worker = self.start_worker(number, options, &lines)?;
            self.workers.push(worker);
        }
        let mut begun = Instant::now();
        let mut seen = None;
        let mut changed = Instant::now();
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while self.workers.iter().any(|worker| !worker.ended) {
            tokio::select! {
                Some((worker, line)) = incoming.recv() => {
                    changed = Instant::now();
                    let ready = matches!(self.take(worker, line).await?, Some(Report::Ready(_)));
                    if ready && self.workers.iter().all(|worker| worker.client.is_some()) {
                        begun = Instant::now();
                        for worker in &mut self.workers {
                            // An error means that it has ended; the end of its output tells so.
                            let _ = worker.stdin.write_all(b"start\n").await;
                        }
                    }
                }
                _ = look.tick() => {
                    let state = self.state().await?;
                    if seen.replace(state) != Some(state) {
                        changed = Instant::now();
                    }
                    let pausing = self.watch_pause().await?;
                    let (protection, stock) = (self.protection, self.stock);
                    self.progress.draw(|| pausing.unwrap_or_else(|| state.describe(protection, stock, begun.elapsed())));
                }
            }
            if changed.elapsed() > PATIENCE {
                return Err(format!("nothing has happened for {PATIENCE:?}").into());
            }
        }
        let took = begun.elapsed();
        if let Some(victim) = &mut self.victim {
            victim.pause.get_or_insert_with(|| victim.killed.elapsed());
        }
        Ok(took)
    }

    fn start_worker(
        &self,
        number: u64,
        options: &Options,
        lines: &mpsc::UnboundedSender<Line>,
    ) -> Result<Worker, Failure> {
        let dies = self.protection == Protection::Lock && number == VICTIM;
        let job = Job {
            worker: number,
            protection: self.protection,
            prefix: self.server.prefix().to_owned(),
            buyers: options.buyers,
            think: options.think,
            stop_at: dies.then_some(options.stock / 2),
        };
        let mut process = Command::new(std::env::current_exe()?)
            .args(job.to_args())
            .env("REDIS_URL", self.server.url())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            // Ctrl-C is for the demo, which then stops the workers.
            .process_group(0)
            .spawn()?;
        let (Some(stdin), Some(stdout)) = (process.stdin.take(), process.stdout.take()) else {
            return Err("a worker without pipes".into());
        };
        let index = self.workers.len();
        let lines = lines.clone();
        tokio::spawn(async move {
            let mut output = BufReader::new(stdout).lines();
            // An error of the channel means that the sale is over.
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

    /// Takes in what a worker says.
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
            .ok_or_else(|| format!("worker {} said {line:?}", worker.number))?;
        match &report {
            Report::Ready(client) => worker.client = Some(client.clone()),
            Report::Waited(wait) => self.waits.push(*wait),
            Report::Depth(depth) => self.depth = self.depth.max(Some(*depth)),
            Report::Holding if self.victim.is_none() => self.kill(index).await?,
            Report::Holding => {}
            Report::Trouble(text) => {
                let text = format!("worker {}: {text}", worker.number);
                self.progress.note(&text);
            }
            // The end of its output follows when its process has ended.
            Report::Done => {}
        }
        Ok(Some(report))
    }

    /// Kills a worker that holds the lock, if the server says so, too.
    async fn kill(&mut self, index: usize) -> Result<(), Failure> {
        let info = self.lock.inspect().await?;
        let worker = &mut self.workers[index];
        let owner = info.map(|info| info.owner).unwrap_or_default();
        if !worker
            .client
            .as_ref()
            .is_some_and(|client| owner.starts_with(client.as_str()))
        {
            // On a machine that stood still: the worker sees the loss, and tries again.
            let text = format!(
                "Worker {} has lost the lock before it could be killed.",
                worker.number
            );
            self.progress.note(&text);
            return Ok(());
        }
        // SIGKILL: it has no chance to release anything.
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
            "Nobody renews its lease any more, which frees the lock in at most {} s.",
            WATCHDOG_TIMEOUT.as_secs()
        ));
        self.victim = Some(Victim {
            owner,
            killed,
            pause: None,
        });
        Ok(())
    }

    /// While the dead worker's lease lasts: how long that will be.
    async fn watch_pause(&mut self) -> Result<Option<String>, Failure> {
        let Some(victim) = self.victim.as_mut().filter(|victim| victim.pause.is_none()) else {
            return Ok(None);
        };
        let info = self.lock.inspect().await?;
        if let Some(info) = info.filter(|info| info.owner == victim.owner) {
            let ttl = info.ttl.unwrap_or_default();
            return Ok(Some(format!(
                "Waiting for the dead worker's lease: {} to go.",
                time(ttl)
            )));
        }
        let pause = *victim.pause.insert(victim.killed.elapsed());
        self.progress
            .note(&format!("The others continued after {}.", time(pause)));
        Ok(None)
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

    /// Counts what the server has at the end.
    async fn count(&mut self, took: Duration) -> Result<Outcome, Failure> {
        const AT_ONCE: isize = 10_000;
        let State { sold, left } = self.state().await?;
        let orders = self.server.keys().orders;
        let mut per_item: HashMap<String, u64> = HashMap::new();
        for from in (0..sold as isize).step_by(AT_ONCE as usize) {
            let part: Vec<String> = self
                .server
                .connection()
                .lrange(&orders, from, from + AT_ONCE - 1)
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
            depth: self.depth,
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
            "left, says the stock"
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
    /// How many more were sold than there were.
    pub fn oversold(&self) -> u64 {
        self.sold.saturating_sub(self.stock)
    }

    /// How often the lock passed to another owner. Each acquisition is an owner of its own; the
    /// first one's lock came from nobody, and an inner acquisition is no handover, as it re-enters.
    pub fn handovers(&self) -> u64 {
        (self.waits.len() as u64).saturating_sub(1)
    }

    /// The rate over the time of the sale, without the pause after a kill.
    pub fn per_second(&self, number: u64) -> u64 {
        let pause = self
            .killed
            .as_ref()
            .map(|killed| killed.pause)
            .unwrap_or_default();
        (number as f64 / self.took.saturating_sub(pause).as_secs_f64().max(1e-3)) as u64
    }

    /// What a sale under the lock must not show.
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
        if self.protection == Protection::Reentrant && self.depth.is_none_or(|depth| depth < 2) {
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
