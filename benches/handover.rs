//! One lock between two clients: the time of a handover, and the throughput and fairness under
//! contention.
//!
//! Each handover is measured together with one bare script round trip, so that it can be stated in
//! round trips of the same run. The clients run in one process first, then in two. PASSING (10)
//! is their passing time in milliseconds.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use criterion::Criterion;
use redisson_lock::{LockClient, ReentrantLock};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;

use support::server::{Server, unique};
use support::{Fred, TRIVIAL, info, load, median, percentile, runtime, version};

const SAMPLES: usize = 20;
/// Tasks of each client under contention.
const TASKS: usize = 64;
const CONTENTION_TIME: Duration = Duration::from_secs(4);
/// The limit for any reply of a peer.
const LIMIT: Duration = Duration::from_secs(30);

/// The argument with which this program starts itself as a peer.
const PEER: &str = "--peer";

fn main() {
    let args: Vec<String> = std::env::args().collect();
    match args.as_slice() {
        [_, peer, url, name, trivial] if peer == PEER => return run_peer(url, name, trivial),
        _ => {}
    }
    let server = Server::shared_or_start();
    println!("{}", version(&mut server.connection()));
    let handovers = Handovers::default();
    let mut criterion = Criterion::default().configure_from_args();
    {
        let mut group = criterion.benchmark_group("handover");
        group
            .sample_size(SAMPLES)
            .warm_up_time(Duration::from_secs(1))
            .measurement_time(Duration::from_secs(10));
        for place in [Place::OneProcess, Place::TwoProcesses] {
            let mut pair = Pair::new(&server, place);
            group.bench_function(place.name(), |bencher| {
                bencher.iter_custom(|rounds| {
                    (0..rounds).map(|_| handover(&mut pair, &handovers)).sum()
                });
            });
            pair.end();
        }
        group.finish();
    }
    criterion.final_summary();
    let measured = handovers.report();
    // Without measurements this is a test run, which ends here.
    if measured {
        println!(
            "\n{TASKS} tasks in each of two clients on one lock, empty section, {CONTENTION_TIME:?}"
        );
        for place in [Place::OneProcess, Place::TwoProcesses] {
            contention(&server, place);
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    OneProcess,
    TwoProcesses,
}

impl Place {
    fn name(self) -> &'static str {
        match self {
            Place::OneProcess => "two clients in one process",
            Place::TwoProcesses => "two processes",
        }
    }
}

/// Measures one handover from the first peer of the pair to the second, and swaps the peers.
///
/// The time runs from the first peer's call of `unlock` until the second peer's `lock` returns. The
/// second peer waits for the lock before, and the server is idle.
fn handover(pair: &mut Pair, handovers: &Handovers) -> Duration {
    let [owner, waiter] = &pair.peers;
    if !pair.held {
        owner.command("lock");
        owner.receive("locked");
        pair.held = true;
    }
    let calls = script_calls(&mut pair.watch);
    waiter.command("lock");
    wait_until_idle(&mut pair.watch, calls);
    owner.command("trip");
    let trip = owner.receive("trip");
    wait_until_idle(&mut pair.watch, calls);
    owner.command("unlock");
    let unlocking = owner.receive("unlocking");
    let locked = waiter.receive("locked");
    owner.receive("unlocked");
    pair.peers.reverse();
    // Both processes read the clock of the machine. If it is set back between the two readings, the
    // sample is 0.
    let took = Duration::from_nanos(locked.saturating_sub(unlocking));
    handovers.add(pair.place, trip as f64, took.as_nanos() as f64);
    took
}

/// Waits until the server has run at least one script since `calls`, and has received no command
/// for 2 ms: then the waiter has subscribed and sleeps.
fn wait_until_idle(watch: &mut redis::Connection, calls: u64) {
    const FOR: Duration = Duration::from_millis(2);
    let limit = Instant::now() + LIMIT;
    let commands = |watch: &mut _| info(watch, "stats", "total_commands_processed:");
    let mut last = commands(watch);
    let mut since = Instant::now();
    while since.elapsed() < FOR || script_calls(watch) <= calls {
        assert!(
            Instant::now() < limit,
            "the server is not idle: other clients may use it"
        );
        thread::sleep(FOR / 8);
        let now = commands(watch);
        // Each check sends two commands itself: this one, and the one in `script_calls`.
        if now > last + 2 {
            since = Instant::now();
        }
        last = now;
    }
}

fn script_calls(watch: &mut redis::Connection) -> u64 {
    ["cmdstat_evalsha:calls=", "cmdstat_eval:calls="]
        .iter()
        .map(|name| info(watch, "commandstats", name))
        .sum()
}

/// The times of a round trip and of the handover after it, in ns.
#[derive(Default)]
struct Handovers(Mutex<BTreeMap<Place, Vec<(f64, f64)>>>);

impl Handovers {
    fn add(&self, place: Place, trip: f64, took: f64) {
        self.0
            .lock()
            .expect("no panic")
            .entry(place)
            .or_default()
            .push((trip, took));
    }

    /// Prints the measurements; returns `false` if there are too few.
    fn report(&self) -> bool {
        let measured = self.0.lock().expect("no panic");
        if measured.values().all(|rounds| rounds.len() < SAMPLES) {
            return false;
        }
        println!(
            "\n{:<28} {:>6} {:>12} {:>12} {:>12} {:>12} {:>12}",
            "handover", "rounds", "trip p50 us", "p50 us", "p99 us", "p50 / trip", "p99 / trip"
        );
        for (place, rounds) in &*measured {
            let mut trips: Vec<f64> = rounds.iter().map(|round| round.0 / 1e3).collect();
            let mut took: Vec<f64> = rounds.iter().map(|round| round.1 / 1e3).collect();
            let (trip, p50, p99) = (
                median(&mut trips),
                median(&mut took),
                percentile(&mut took, 0.99),
            );
            println!(
                "{:<28} {:>6} {trip:>12.1} {p50:>12.1} {p99:>12.1} {:>12.2} {:>12.2}",
                place.name(),
                rounds.len(),
                p50 / trip,
                p99 / trip
            );
        }
        true
    }
}

/// Lets the tasks of both peers compete for one lock, and prints their grants.
fn contention(server: &Server, place: Place) {
    let mut pair = Pair::new(server, place);
    let before = script_calls(&mut pair.watch);
    pair.peers.iter().for_each(|peer| peer.command("compete"));
    let mut grants: Vec<u64> = Vec::new();
    for peer in &pair.peers {
        grants.extend((0..TASKS).map(|_| peer.receive("grants")));
    }
    let calls = script_calls(&mut pair.watch) - before;
    let total: u64 = grants.iter().sum();
    let fewest = grants.iter().min().expect("a task");
    let clients: Vec<u64> = grants
        .chunks(TASKS)
        .map(|client| client.iter().sum())
        .collect();
    println!(
        "{:<28} {:>8.0} grants/s   {:.2} script calls per grant   fewest grants of a task {:.2} of an equal share   grants per client {:?}",
        place.name(),
        total as f64 / CONTENTION_TIME.as_secs_f64(),
        calls as f64 / total as f64,
        *fewest as f64 * grants.len() as f64 / total as f64,
        clients,
    );
    pair.end();
}

/// Two peers on one lock, and a connection that observes the server.
struct Pair {
    place: Place,
    peers: [Peer; 2],
    watch: redis::Connection,
    /// Whether the first peer holds the lock.
    held: bool,
}

impl Pair {
    fn new(server: &Server, place: Place) -> Self {
        let mut watch = server.connection();
        let trivial = load(&mut watch, TRIVIAL);
        let name = unique("handover");
        let url = server.url();
        let peers = match place {
            Place::OneProcess => {
                // Both clients share a runtime, as in a service with two clients.
                let runtime = Arc::new(runtime());
                [0; 2].map(|_| Peer::local(&runtime, &url, &name, &trivial))
            }
            Place::TwoProcesses => [0; 2].map(|_| Peer::process(&url, &name, &trivial)),
        };
        peers.iter().for_each(|peer| {
            peer.receive("ready");
        });
        Self {
            place,
            peers,
            watch,
            held: false,
        }
    }

    fn end(self) {
        for mut peer in self.peers {
            peer.command("end");
            peer.receive("ended");
            if let Some(child) = &mut peer.child {
                child.wait().expect("the peer's end");
            }
        }
    }
}

/// One client of the lock, in this process or another. It executes commands of one word, and
/// replies with a word and a number.
struct Peer {
    commands: UnboundedSender<String>,
    replies: mpsc::Receiver<(String, u64)>,
    child: Option<Child>,
    _runtime: Option<Arc<tokio::runtime::Runtime>>,
}

impl Peer {
    fn local(runtime: &Arc<tokio::runtime::Runtime>, url: &str, name: &str, trivial: &str) -> Self {
        let (commands, received) = unbounded_channel();
        let (reply, replies) = mpsc::channel();
        let (url, name, trivial) = (url.to_owned(), name.to_owned(), trivial.to_owned());
        runtime.spawn(async move {
            // An error means that the benchmark has dropped the peer.
            execute(&url, &name, &trivial, received, move |word, number| {
                drop(reply.send((word.to_owned(), number)))
            })
            .await;
        });
        Self {
            commands,
            replies,
            child: None,
            _runtime: Some(Arc::clone(runtime)),
        }
    }

    fn process(url: &str, name: &str, trivial: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args([PEER, url, name, trivial])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a peer");
        let mut stdin = child.stdin.take().expect("a pipe");
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        let (commands, mut received) = unbounded_channel::<String>();
        thread::spawn(move || {
            while let Some(word) = received.blocking_recv() {
                if writeln!(stdin, "{word}").is_err() {
                    return;
                }
            }
        });
        let (reply, replies) = mpsc::channel();
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let (word, number) = line.split_once(' ').expect("a word and a number");
                if reply
                    .send((word.to_owned(), number.parse().expect("a number")))
                    .is_err()
                {
                    return;
                }
            }
        });
        Self {
            commands,
            replies,
            child: Some(child),
            _runtime: None,
        }
    }

    fn command(&self, word: &str) {
        self.commands.send(word.to_owned()).expect("the peer runs");
    }

    /// Waits for the reply with this word, and returns its number.
    fn receive(&self, expected: &str) -> u64 {
        let (word, number) = self
            .replies
            .recv_timeout(LIMIT)
            .unwrap_or_else(|_| panic!("no reply {expected:?} within {LIMIT:?}"));
        assert_eq!(word, expected);
        number
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // An error means that the process has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Runs a peer in a process of its own: it reads commands from stdin, and writes replies to stdout.
fn run_peer(url: &str, name: &str, trivial: &str) {
    let (commands, received) = unbounded_channel();
    thread::spawn(move || {
        for word in std::io::stdin().lines().map_while(Result::ok) {
            if commands.send(word).is_err() {
                return;
            }
        }
    });
    let reply = |word: &str, number: u64| println!("{word} {number}");
    runtime().block_on(execute(url, name, trivial, received, reply));
}

/// Executes a peer's commands.
async fn execute(
    url: &str,
    name: &str,
    trivial: &str,
    mut commands: UnboundedReceiver<String>,
    reply: impl Fn(&str, u64) + Send + Sync,
) {
    let passing = std::env::var("PASSING").map_or(10, |ms| ms.parse().expect("milliseconds"));
    let client = LockClient::builder()
        .passing_time(Duration::from_millis(passing))
        .connect(url)
        .await
        .expect("a lock client");
    let bare = Fred::connect(url).await;
    let key = Bytes::copy_from_slice(name.as_bytes());
    let lock = client.lock(name);
    let mut guard = None;
    reply("ready", 0);
    while let Some(word) = commands.recv().await {
        match word.as_str() {
            "lock" => {
                let granted = lock.lock().await.expect("granted");
                reply("locked", now());
                guard = Some(granted);
            }
            "unlock" => {
                let unlocking = now();
                guard
                    .take()
                    .expect("held")
                    .unlock()
                    .await
                    .expect("released");
                // Reported afterwards, so that the report does not delay the release.
                reply("unlocking", unlocking);
                reply("unlocked", 0);
            }
            "trip" => {
                let begun = Instant::now();
                bare.call(trivial, &key, &[]).await;
                reply("trip", begun.elapsed().as_nanos() as u64);
            }
            "compete" => {
                for grants in compete(&lock).await {
                    reply("grants", grants);
                }
            }
            _ => break,
        }
    }
    drop(guard);
    client.shutdown().await.expect("shut down");
    reply("ended", 0);
}

/// Lets tasks compete for the lock, and returns the number of grants of each.
async fn compete(lock: &ReentrantLock) -> Vec<u64> {
    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let (lock, stop) = (lock.clone(), Arc::clone(&stop));
        tasks.spawn(async move {
            let mut grants = 0;
            while !stop.load(Ordering::Relaxed) {
                let guard = lock.lock().await.expect("granted");
                grants += 1;
                guard.unlock().await.expect("released");
            }
            grants
        });
    }
    tokio::time::sleep(CONTENTION_TIME).await;
    stop.store(true, Ordering::Relaxed);
    tasks.join_all().await
}

/// The machine's clock, in ns.
fn now() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("a clock after 1970");
    since
        .as_nanos()
        .try_into()
        .expect("a clock before the year 2500")
}
