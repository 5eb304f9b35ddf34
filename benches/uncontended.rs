//! Lock and unlock without contention, beside two bare script round trips in the same run.
//!
//! Each sample of a contender is measured in short turns with one of each floor, in changing order,
//! so that what disturbs the machine disturbs them alike. The ratios of such neighbours are printed
//! at the end.

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

/// Into how many turns a sample is cut, between which the neighbours have theirs.
const TURNS: u64 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Contender {
    /// Floor: two trivial scripts through redis-rs.
    Plain,
    /// Floor: two trivial scripts through fred, as the locks use it.
    Fred,
    /// The scripts of a lock and an unlock through fred, with the arguments made in advance.
    Scripts,
    /// `lock().await` and `unlock().await`.
    LockUnlock,
    /// `run(async {})`.
    Run,
    /// `lock().await` and `unlock().await` inside the owner's scope of the same lock.
    Reentry,
}

use Contender::*;

impl Contender {
    fn name(self) -> &'static str {
        match self {
            Plain => "floor: two trivial scripts, redis-rs",
            Fred => "floor: two trivial scripts, fred",
            Scripts => "bare lock scripts, fred",
            LockUnlock => "lock + unlock",
            Run => "run",
            Reentry => "re-entry",
        }
    }
}

/// What all contenders need.
struct Bench {
    plain: support::Plain,
    fred: support::Fred,
    trivial: String,
    acquire: String,
    release: String,
    client: LockClient,
    names: Vec<String>,
}

impl Bench {
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

/// How long it took `tasks` tasks to do `pairs` pairs each, on locks of their own, at the same
/// time.
async fn measure(bench: &Arc<Bench>, contender: Contender, tasks: usize, pairs: u64) -> Duration {
    let gate = Arc::new(Barrier::new(tasks));
    let mut running = JoinSet::new();
    for at in 0..tasks {
        running.spawn(task(
            Arc::clone(bench),
            contender,
            at,
            pairs,
            Arc::clone(&gate),
        ));
    }
    let spans = running.join_all().await;
    let begun = spans.iter().map(|span| span.0).min().expect("a task");
    let ended = spans.iter().map(|span| span.1).max().expect("a task");
    ended - begun
}

/// One task's part: gets ready, waits for the others at the gate, and tells when it began and
/// ended.
async fn task(
    bench: Arc<Bench>,
    contender: Contender,
    at: usize,
    pairs: u64,
    gate: Arc<Barrier>,
) -> (Instant, Instant) {
    let name = bench.names[at].as_str();
    let lock = bench.client.lock(name);
    let begin = async || {
        gate.wait().await;
        Instant::now()
    };
    match contender {
        Plain => {
            let mut plain = bench.plain.clone();
            let begun = begin().await;
            for _ in 0..2 * pairs {
                plain.call(&bench.trivial, name.as_bytes()).await;
            }
            (begun, Instant::now())
        }
        Fred => {
            let key = Bytes::copy_from_slice(name.as_bytes());
            let begun = begin().await;
            for _ in 0..2 * pairs {
                bench.fred.call(&bench.trivial, &key, &[]).await;
            }
            (begun, Instant::now())
        }
        Scripts => {
            let (key, acquire, release) = script_arguments(name);
            let begun = begin().await;
            for _ in 0..pairs {
                assert_done(&bench.fred.call(&bench.acquire, &key, &acquire).await);
                assert_done(&bench.fred.call(&bench.release, &key, &release).await);
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

/// The key and the arguments of both lock scripts, in the order that their headers give.
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

/// Ticket, then the code 1: granted, or freed.
fn assert_done(reply: &Resp3Frame) {
    let done = matches!(reply, Resp3Frame::Array { data, .. } if matches!(data.get(1), Some(Resp3Frame::Number { data: 1, .. })));
    assert!(done, "{reply:?}");
}

/// One sample of a contender with its neighbours, in seconds for a pair of one task.
#[derive(Clone, Copy)]
struct Sample {
    own: f64,
    plain: f64,
    fred: f64,
}

type Samples = Mutex<BTreeMap<(usize, Contender), Vec<Sample>>>;

/// Measures a contender next to both floors, and tells its own time.
async fn sample(
    bench: &Arc<Bench>,
    samples: &Samples,
    contender: Contender,
    tasks: usize,
    pairs: u64,
) -> Duration {
    let mut order = vec![Plain, Fred, contender];
    order.sort();
    order.dedup();
    let mut times: BTreeMap<Contender, Duration> = BTreeMap::new();
    let turns = pairs.min(TURNS);
    for turn in 0..turns {
        let part = pairs / turns + u64::from(turn < pairs % turns);
        for &contender in &order {
            *times.entry(contender).or_default() += measure(bench, contender, tasks, part).await;
        }
        order.rotate_left(1);
    }
    let pair = |contender: Contender| times[&contender].as_secs_f64() / pairs as f64;
    let sample = Sample {
        own: pair(contender),
        plain: pair(Plain),
        fred: pair(Fred),
    };
    samples
        .lock()
        .expect("no panic")
        .entry((tasks, contender))
        .or_default()
        .push(sample);
    times[&contender]
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
    for ((tasks, contender), samples) in &*samples.lock().expect("no panic") {
        // Those before are the warm-up's; a run that only tests has no more than that.
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
            contender.name(),
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
    let bench = Arc::new(runtime.block_on(Bench::new(&server)));
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
        for contender in [Plain, Fred, Scripts, LockUnlock, Run, Reentry] {
            group.bench_function(BenchmarkId::new(contender.name(), tasks), |bencher| {
                bencher.to_async(&runtime).iter_custom(|pairs| {
                    let (bench, samples) = (&bench, &samples);
                    async move { sample(bench, samples, contender, tasks, pairs).await }
                });
            });
        }
        group.finish();
    }
    criterion.final_summary();
    report(&samples);
    runtime
        .block_on(bench.client.shutdown())
        .expect("an orderly end");
}
