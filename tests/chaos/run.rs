//! A run: workers behind proxies, faults, an observer that looks at the server all the time, and
//! the judge at the end.

use std::any::Any;
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use futures::FutureExt;
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until};

use super::faults::{Incarnation, Slot, Targets};
use super::history::{
    CLOCK_SET, Fault, History, Key, MS, Nanos, Sample, now, process_of, seconds, wall_clock_offset,
};
use super::judge::{Rule, Violation, judge};
use super::outcomes::panics;
use super::plan::Planned;
use super::server_faults::login;
use super::support::process::Worker;
use super::support::proxy::Proxy;
use super::support::server::Server;
use super::worker::{BUSY_LOCKS, lock_name, relies_on_messages};

/// How long operations may take to end when there are no faults and no leases of killed processes
/// any more.
const DRAIN: Duration = Duration::from_secs(15);

/// The pause between two looks at the server.
const LOOK: Duration = Duration::from_millis(15);

/// By how much the wall clock has to change between two looks for that to be a fault.
const CLOCK_STEP: u128 = 20 * MS as u128;

/// How often a run prints its progress.
const PROGRESS: Duration = Duration::from_secs(5);

pub struct Run {
    pub seed: u64,
    pub seconds: u64,
    pub workers: u64,
    /// Tasks in each worker.
    pub tasks: u64,
    /// The longest lease of any acquire.
    pub long_lease: Duration,
    pub planned: Vec<Planned>,
    pub server: Server,
}

pub struct Verdict {
    pub history: History,
    pub violations: Vec<Violation>,
}

impl Run {
    pub async fn run(self) -> Verdict {
        let (begun, folder) = (
            now(),
            TempDir::with_prefix("redisson-lock-chaos-").expect("a temporary folder"),
        );
        let records = Records::default();
        let outcome = AssertUnwindSafe(self.drive(begun, folder.path(), &records))
            .catch_unwind()
            .await;
        let Records {
            faults,
            killed,
            samples,
        } = &records;
        let (faults, killed, samples) = (take(faults), take(killed), take(samples));
        let mut history = History {
            faults,
            samples,
            killed,
            ..History::default()
        };
        for file in files(folder.path()) {
            // A part of a file is better than none of it.
            let _ = history.read(&file);
        }
        history.faults.sort_by_key(|fault| fault.from);
        let mut history = history.since(begun);
        // The history of a run that panicked is incomplete and cannot be judged. A panic of a
        // process may have been the reason.
        let judged = outcome.and_then(|left| {
            history.left = left;
            catch_unwind(|| judge(&history))
        });
        let mut violations: Vec<_> = judged.unwrap_or_else(|panic| {
            panics(&history)
                .chain([broke_off(&*panic, now() - begun)])
                .collect()
        });
        violations.sort_by_key(|violation| violation.at);
        Verdict {
            history,
            violations,
        }
    }

    /// Runs workers and faults, and returns what is left at the end.
    async fn drive(self, begun: Nanos, folder: &Path, records: &Records) -> Vec<String> {
        let begins = tokio::time::Instant::now() + Duration::from_millis(200);
        let url = self.server.url();
        let end = begun + 200 * MS + self.seconds * 1_000 * MS;
        let mut slots = Vec::new();
        for number in 0..self.workers {
            let proxy = Proxy::start(&self.server).await;
            let start = self.starter(number, login(&proxy.url(), number), folder, end);
            let worker = Some(start(process_of(number, 0)));
            slots.push(Slot {
                number,
                proxy,
                flow: tokio::sync::Mutex::default(),
                worker: tokio::sync::Mutex::new(Incarnation { number: 0, worker }),
                start,
            });
        }
        let server = tokio::sync::Mutex::new(self.server);
        let targets = Arc::new(Targets {
            server,
            slots,
            records: records.clone(),
        });
        let observer = Observer::start(&url, records.clone());
        let mut acts = JoinSet::new();
        for planned in self.planned {
            let targets = Arc::clone(&targets);
            acts.spawn(async move {
                sleep_until(begins + Duration::from_millis(planned.at)).await;
                targets.act(planned).await;
            });
        }
        let mut progress = Progress::default();
        while now() < end {
            let pause = Duration::from_nanos(end.saturating_sub(now())).min(PROGRESS);
            sleep(pause).await;
            progress.look(folder);
            let (faults, grants) = (records.faults.lock().unwrap().len(), progress.grants);
            println!(
                "{:>10}: {grants} grants, {faults} faults",
                seconds(now() - begun)
            );
        }
        while let Some(act) = acts.join_next().await {
            act.expect("a fault is done as planned");
        }
        let left = drain(&targets, &url, self.long_lease).await;
        observer.stop();
        left
    }

    fn starter(
        &self,
        number: u64,
        url: String,
        folder: &Path,
        end: u64,
    ) -> Box<dyn Fn(u64) -> Worker + Send + Sync> {
        let (seed, tasks, direct) = (
            self.seed.to_string(),
            self.tasks.to_string(),
            self.server.url(),
        );
        let (folder, end, long_lease) = (
            folder.to_owned(),
            end.to_string(),
            self.long_lease.as_millis().to_string(),
        );
        let messages_only = u8::from(relies_on_messages(number)).to_string();
        Box::new(move |process| {
            let (log, process) = (folder.join(process.to_string()), process.to_string());
            let log = log.to_str().expect("a path in UTF-8");
            Worker::start(
                "worker_process",
                "chaos",
                &[
                    ("URL", &*url),
                    ("DIRECT", &*direct),
                    ("LOG", log),
                    ("PROCESS", &*process),
                    ("MESSAGES_ONLY", &*messages_only),
                    ("SEED", &*seed),
                    ("TASKS", &*tasks),
                    ("LONG_LEASE", &*long_lease),
                    ("END", &*end),
                ],
            )
        })
    }
}

/// What the run itself records. It outlives a panic of the run.
#[derive(Clone, Default)]
pub struct Records {
    /// The faults that have happened.
    pub faults: Arc<Mutex<Vec<Fault>>>,
    pub killed: Arc<Mutex<Vec<(u64, Nanos)>>>,
    pub samples: Arc<Mutex<Vec<Sample>>>,
}

fn take<T>(written: &Mutex<Vec<T>>) -> Vec<T> {
    std::mem::take(&mut written.lock().unwrap_or_else(PoisonError::into_inner))
}

/// A panic of the run or of the judge.
fn broke_off(panic: &(dyn Any + Send), at: Nanos) -> Violation {
    let message = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or(panic.downcast_ref::<&str>().copied());
    let what = format!(
        "the run panicked: {}",
        message.unwrap_or("a panic without a message")
    );
    Violation::new(Rule::Panic, at, what)
}

/// Waits until everything has ended. Returns what has not.
async fn drain(targets: &Targets, url: &str, long_lease: Duration) -> Vec<String> {
    let client = redis::Client::open(url).expect("the server's URL");
    let mut redis = client
        .get_multiplexed_async_connection()
        .await
        .expect("a connection");
    let mut left = Vec::new();
    let workers = targets.slots.len();
    let mut idle = 0;
    let limit = Instant::now() + long_lease + DRAIN;
    while idle < workers && Instant::now() < limit {
        sleep(Duration::from_millis(20)).await;
        idle = redis::cmd("GET")
            .arg("idle")
            .query_async(&mut redis)
            .await
            .ok()
            .flatten()
            .unwrap_or(0);
    }
    if idle < workers {
        left.push(format!(
            "{} of {workers} workers did not end",
            workers - idle
        ));
    }
    // The clients are alive and have nothing to do. Whatever is on the server now should not be
    // there, except for leases of killed processes.
    let limit = Instant::now() + long_lease + Duration::from_secs(2);
    loop {
        let locks = (0..=BUSY_LOCKS).map(lock_name);
        let keys = redis::cmd("EXISTS")
            .arg(locks.collect::<Vec<_>>())
            .query_async(&mut redis)
            .await;
        let channels = redis::cmd("PUBSUB")
            .arg("CHANNELS")
            .query_async(&mut redis)
            .await;
        match (keys, channels) {
            (Ok(0), Ok(channels)) if Vec::is_empty(&channels) => break,
            (keys, channels) if Instant::now() > limit => {
                let channels: redis::RedisResult<Vec<String>> = channels;
                left.push(format!(
                    "without any operation: keys: {keys:?}, channels: {channels:?}"
                ));
                break;
            }
            _ => sleep(Duration::from_millis(20)).await,
        }
    }
    redis::cmd("SET")
        .arg("exit")
        .arg(1)
        .exec_async(&mut redis)
        .await
        .expect("SET");
    let limit = Instant::now() + DRAIN;
    for slot in &targets.slots {
        let mut incarnation = slot.worker.lock().await;
        let Some(worker) = &mut incarnation.worker else {
            continue;
        };
        let status = loop {
            match worker.status() {
                None if Instant::now() < limit => sleep(Duration::from_millis(5)).await,
                status => break status,
            }
        };
        if !status.is_some_and(|status| status.success()) {
            left.push(format!("worker {} ended with {status:?}", slot.number));
        }
    }
    left
}

/// Looks at the locks on the server, on a thread of its own.
struct Observer {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Observer {
    fn start(url: &str, records: Records) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let client = redis::Client::open(url).expect("the server's URL");
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut connection = None;
            let (mut at, mut offset) = (now(), wall_clock_offset());
            while !stopped.load(Ordering::Acquire) {
                let limit = Duration::from_secs(10);
                let looked = match connection
                    .take()
                    .or_else(|| client.get_connection_with_timeout(limit).ok())
                {
                    Some(mut open) => {
                        let _ = open.set_read_timeout(Some(limit));
                        look(&mut open).map(|sample| (open, sample))
                    }
                    None => None,
                };
                if let Some((open, sample)) = looked {
                    connection = Some(open);
                    records.samples.lock().unwrap().push(sample);
                }
                let (before, offset_before) = (at, offset);
                (at, offset) = (now(), wall_clock_offset());
                if offset.abs_diff(offset_before) > CLOCK_STEP {
                    records.faults.lock().unwrap().push(Fault {
                        from: before,
                        to: at,
                        kind: CLOCK_SET.into(),
                        slot: None,
                        met: true,
                    });
                }
                thread::sleep(LOOK);
            }
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }

    fn stop(mut self) {
        self.stop.store(true, Ordering::Release);
        self.thread
            .take()
            .expect("it is stopped once")
            .join()
            .expect("the observer");
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
    }
}

/// Reads all locks at one moment: no time passes inside a script.
fn look(connection: &mut redis::Connection) -> Option<Sample> {
    const LOOK: &str = "local all = {} for i, name in ipairs(KEYS) do \
                        all[i] = {redis.call('pttl', name), redis.call('hgetall', name)} end return all";
    type Found = Vec<(i64, Vec<(String, u64)>)>;
    let names: Vec<_> = (0..=BUSY_LOCKS).map(lock_name).collect();
    let from = now();
    let found: Found = redis::cmd("EVAL")
        .arg(LOOK)
        .arg(names.len())
        .arg(names)
        .query(connection)
        .ok()?;
    let to = now();
    let keys = found
        .into_iter()
        .enumerate()
        .flat_map(|(lock, (pttl, fields))| {
            fields.into_iter().map(move |(owner, count)| Key {
                lock,
                owner,
                count,
                pttl,
            })
        });
    Some(Sample {
        from,
        to,
        held: keys.collect(),
    })
}

/// Counts grants while the workers write.
#[derive(Default)]
struct Progress {
    grants: usize,
    seen: std::collections::HashMap<PathBuf, u64>,
}

impl Progress {
    fn look(&mut self, folder: &Path) {
        for path in files(folder) {
            let seen = self.seen.entry(path.clone()).or_default();
            let mut text = Vec::new();
            let Ok(mut file) = fs::File::open(path) else {
                continue;
            };
            if file
                .seek(SeekFrom::Start(*seen))
                .and_then(|_| file.read_to_end(&mut text))
                .is_err()
            {
                continue;
            }
            let whole = text
                .iter()
                .rposition(|byte| *byte == b'\n')
                .map_or(0, |at| at + 1);
            *seen += whole as u64;
            let lines = text[..whole].split(|byte| *byte == b'\n');
            const GRANTED: &[u8] = br#""granted""#;
            self.grants += lines
                .filter(|line| line.windows(GRANTED.len()).any(|part| part == GRANTED))
                .count();
        }
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder)
        .expect("the folder")
        .map(|entry| entry.expect("an entry").path())
        .collect()
}
