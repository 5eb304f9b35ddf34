//! Lock and unlock without contention, compared with two bare script round trips in the same run.
//!
//! Each sample of a subject is measured in short slices that alternate with slices of both
//! baselines, so that other load on the machine affects them equally. The ratios are printed at the
//! end.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};
use fred::types::Resp3Frame;
use redisson_lock::LockClient;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use support::server::{Server, unique};
use support::{TRIVIAL, load, median, runtime, version};

const TASKS: [usize; 3] = [1, 16, 256];
const SAMPLES: usize = 30;

/// The number of slices of a sample.
const SLICES: u64 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    /// Baseline: two trivial scripts through redis-rs.
    Plain,
    /// Baseline: two trivial scripts through fred, configured as in the library.
    Fred,
    /// The scripts of a lock and an unlock through fred, with prepared arguments.
    Scripts,
    /// `lock().await` and `unlock().await`.
    LockUnlock,
    /// `run(async {})`.
    Run,
    /// `lock().await` and `unlock().await` inside `run` on the same lock.
    Reentry,
}

use Subject::*;

impl Subject {
    fn name(self) -> &'static str {
        match self {
            Plain => "baseline: two trivial scripts, redis-rs",
            Fred => "baseline: two trivial scripts, fred",
            Scripts => "bare lock scripts, fred",
            LockUnlock => "lock + unlock",
            Run => "run",
            Reentry => "re-entry",
        }
    }
}

/// What all subjects need.
struct Fixture {
    plain: support::Plain,
    fred: support::Fred,
    trivial: String,
    acquire: String,
    release: String,
    client: LockClient,
    names: Vec<String>,
}

impl Fixture {
    async fn new(server: &Server) -> Self {
        let mut connection = server.connection();
        Self {
            plain: support::Plain::connect(&server.url()).await,
            fred: support::Fred::connect(&server.url()).await,
            trivial: load(&mut connection, TRIVIAL),
            acquire: load(&mut connection, include_str!("../lua/v1/acquire.lua")),
            release: load(&mut connection, include_str!("../lua/v1/release.lua")),
            client: LockClient::connect(&server.url())
                .await
                .expect("a lock client"),
            names: (0..TASKS[TASKS.len() - 1])
                .map(|_| unique("bench"))
                .collect(),
        }
    }
}

/// Measures how long `tasks` concurrent tasks take for `pairs` pairs each, on a lock per task.
async fn measure(fixture: &Arc<Fixture>, subject: Subject, tasks: usize, pairs: u64) -> Duration {
    let barrier = Arc::new(Barrier::new(tasks));
    let mut running = JoinSet::new();
    for at in 0..tasks {
        running.spawn(task(
            Arc::clone(fixture),
            subject,
            at,
            pairs,
            Arc::clone(&barrier),
        ));
    }
    let spans = running.join_all().await;
    let begun = spans.iter().map(|span| span.0).min().expect("a task");
    let ended = spans.iter().map(|span| span.1).max().expect("a task");
    ended - begun
}

/// One task: prepares, waits for the others at the barrier, and returns when it began and ended.
async fn task(
    fixture: Arc<Fixture>,
    subject: Subject,
    at: usize,
    pairs: u64,
    barrier: Arc<Barrier>,
) -> (Instant, Instant) {
    let name = fixture.names[at].as_str();
    let lock = fixture.client.lock(name);
    let begin = async || {
        barrier.wait().await;
        Instant::now()
    };
    match subject {
        Plain => {
            let mut plain = fixture.plain.clone();
            let begun = begin().await;
            for _ in 0..2 * pairs {
                plain.call(&fixture.trivial, name.as_bytes()).await;
            }
            (begun, Instant::now())
        }
        Fred => {
            let key = Bytes::copy_from_slice(name.as_bytes());
            let begun = begin().await;
            for _ in 0..2 * pairs {
                fixture.fred.call(&fixture.trivial, &key, &[]).await;
            }
            (begun, Instant::now())
        }
        Scripts => {
            let (key, acquire, release) = script_arguments(name);
            let begun = begin().await;
            for _ in 0..pairs {
                assert_done(&fixture.fred.call(&fixture.acquire, &key, &acquire).await);
                assert_done(&fixture.fred.call(&fixture.release, &key, &release).await);
            }
            (begun, Instant::now())
        }
        LockUnlock => {
            let begun = begin().await;
            for _ in 0..pairs {
                lock.lock()
                    .await
                    .expect("granted")
                    .unlock()
                    .await
                    .expect("released");
            }
            (begun, Instant::now())
        }
        Run => {
            let begun = begin().await;
            for _ in 0..pairs {
                lock.run(async {}).await.expect("granted and released");
            }
            (begun, Instant::now())
        }
        Reentry => {
            let work = lock.run(async {
                let begun = begin().await;
                for _ in 0..pairs {
                    lock.lock()
                        .await
                        .expect("granted")
                        .unlock()
                        .await
                        .expect("released");
                }
                (begun, Instant::now())
            });
            work.await.expect("granted and released")
        }
    }
}

/// The key and the arguments of both lock scripts, in the order of their headers.
fn script_arguments(name: &str) -> (Bytes, Vec<Bytes>, Vec<Bytes>) {
    let [ticket, owner, lease] =
        ["1", "6fa459ea-ee8a-4ca4-894e-db77e160355e:4", "30000"].map(Bytes::from);
    let channel = Bytes::from(format!("redisson_lock__channel:{{{name}}}"));
    let [none, one] = ["0", "1"].map(Bytes::from);
    let acquire = vec![
        ticket.clone(),
        owner.clone(),
        lease.clone(),
        none.clone(),
        one,
    ];
    let release = vec![ticket, owner, channel, lease, none];
    (Bytes::copy_from_slice(name.as_bytes()), acquire, release)
}

/// Checks the reply: the ticket, then code 1 (granted or freed).
fn assert_done(reply: &Resp3Frame) {
    let done = matches!(reply, Resp3Frame::Array { data, .. } if matches!(data.get(1), Some(Resp3Frame::Number { data: 1, .. })));
    assert!(done, "{reply:?}");
}

/// One sample of a subject and both baselines, in seconds per pair of one task.
#[derive(Clone, Copy)]
struct Sample {
    own: f64,
    plain: f64,
    fred: f64,
}

type Samples = Mutex<BTreeMap<(usize, Subject), Vec<Sample>>>;

/// Measures a subject together with both baselines, and returns the subject's time.
async fn sample(
    fixture: &Arc<Fixture>,
    samples: &Samples,
    subject: Subject,
    tasks: usize,
    pairs: u64,
) -> Duration {
    let mut order = vec![Plain, Fred, subject];
    order.sort();
    order.dedup();
    let mut times: BTreeMap<Subject, Duration> = BTreeMap::new();
    let slices = pairs.min(SLICES);
    for slice in 0..slices {
        let part = pairs / slices + u64::from(slice < pairs % slices);
        for &subject in &order {
            *times.entry(subject).or_default() += measure(fixture, subject, tasks, part).await;
        }
        order.rotate_left(1);
    }
    let pair = |subject: Subject| times[&subject].as_secs_f64() / pairs as f64;
    let sample = Sample {
        own: pair(subject),
        plain: pair(Plain),
        fred: pair(Fred),
    };
    samples
        .lock()
        .expect("no panic")
        .entry((tasks, subject))
        .or_default()
        .push(sample);
    times[&subject]
}

fn report(samples: &Samples) {
    if samples
        .lock()
        .expect("no panic")
        .values()
        .all(|samples| samples.len() < SAMPLES)
    {
        return;
    }
    println!(
        "\n{:<40} {:>5} {:>12} {:>12} {:>12} {:>12}",
        "medians", "tasks", "us a pair", "pairs/s", "/ redis-rs", "/ fred"
    );
    for ((tasks, subject), samples) in &*samples.lock().expect("no panic") {
        // The first samples are those of the warm-up; a test run has no others.
        let Some(samples) = samples
            .len()
            .checked_sub(SAMPLES)
            .map(|warm_up| &samples[warm_up..])
        else {
            continue;
        };
        let of = |figure: fn(&Sample) -> f64| {
            median(&mut samples.iter().map(figure).collect::<Vec<_>>())
        };
        let own = of(|sample| sample.own);
        println!(
            "{:<40} {tasks:>5} {:>12.1} {:>12.0} {:>12.2} {:>12.2}",
            subject.name(),
            own * 1e6,
            *tasks as f64 / own,
            of(|sample| sample.own / sample.plain),
            of(|sample| sample.own / sample.fred),
        );
    }
}

fn main() {
    let server = Server::shared_or_start();
    println!("{}", version(&mut server.connection()));
    let runtime = runtime();
    let fixture = Arc::new(runtime.block_on(Fixture::new(&server)));
    let samples = Samples::default();
    let mut criterion = Criterion::default().configure_from_args();
    for tasks in TASKS {
        let mut group = criterion.benchmark_group("uncontended");
        group
            .sampling_mode(SamplingMode::Flat)
            .nresamples(10_000)
            .sample_size(SAMPLES)
            .warm_up_time(Duration::from_millis(500))
            .measurement_time(Duration::from_secs(4))
            .throughput(Throughput::Elements(tasks as u64));
        for subject in [Plain, Fred, Scripts, LockUnlock, Run, Reentry] {
            group.bench_function(BenchmarkId::new(subject.name(), tasks), |bencher| {
                bencher.to_async(&runtime).iter_custom(|pairs| {
                    let (fixture, samples) = (&fixture, &samples);
                    async move { sample(fixture, samples, subject, tasks, pairs).await }
                });
            });
        }
        group.finish();
    }
    criterion.final_summary();
    report(&samples);
    runtime
        .block_on(fixture.client.shutdown())
        .expect("shut down");
}
