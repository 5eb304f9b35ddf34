//! One lock between two clients: how long a handover takes, and what a crowd gets.
//!
//! Each round of the handover measures one bare script round trip, too, so that a handover can be
//! told in trips of the same run. The clients live in one process, and then in two.

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
const CROWD: usize = 64;
const CROWD_FOR: Duration = Duration::from_secs(4);
const LIMIT: Duration = Duration::from_secs(30);

/// What makes a child of this program a peer.
const PEER: &str = "--peer";

fn main() {
    let args: Vec<String> = std::env::args().collect();
    match args.as_slice() {
        [_, peer, url, name, trivial] if peer == PEER => return be_peer(url, name, trivial),
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
    // A run that only tests is over.
    if measured {
        println!(
            "\n{CROWD} tasks in each of two clients on one lock, empty section, {CROWD_FOR:?}"
        );
        for place in [Place::OneProcess, Place::TwoProcesses] {
            crowd(&server, place);
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

/// One handover from the first of the pair to the second, who change places for the next.
///
/// From the call of unlock to the return of the other's lock: it waits already, and all is quiet.
fn handover(pair: &mut Pair, handovers: &Handovers) -> Duration {
    let [owner, waiter] = &pair.peers;
    if !pair.held {
        owner.tell("lock");
        owner.hear("locked");
        pair.held = true;
    }
    let calls = script_calls(&mut pair.watch);
    waiter.tell("lock");
    quiet(&mut pair.watch, calls);
    owner.tell("trip");
    let trip = owner.hear("trip");
    quiet(&mut pair.watch, calls);
    owner.tell("unlock");
    let unlocking = owner.hear("unlocking");
    let locked = waiter.hear("locked");
    owner.hear("unlocked");
    pair.peers.reverse();
    // One clock serves all processes of a machine; a step back between the two readings is no
    // measurement.
    let took = Duration::from_nanos(locked.saturating_sub(unlocking));
    handovers.add(pair.place, trip as f64, took.as_nanos() as f64);
    took
}

/// Waits until nobody has sent anything for a while: a waiter that is still getting ready would be
/// caught between two steps. Since `calls`, one script at least has to have come.
fn quiet(watch: &mut redis::Connection, calls: u64) {
    const FOR: Duration = Duration::from_millis(2);
    let limit = Instant::now() + LIMIT;
    let commands = |watch: &mut _| info(watch, "stats", "total_commands_processed:");
    let mut last = commands(watch);
    let mut since = Instant::now();
    while since.elapsed() < FOR || script_calls(watch) <= calls {
        assert!(
            Instant::now() < limit,
            "the server is never quiet: do others use it?"
        );
        thread::sleep(FOR / 8);
        let now = commands(watch);
        // Each look is a command itself, as is the one at the scripts' calls.
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

/// The time of a trip and of the handover after it, in ns.
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

    /// Prints what was measured; `false` if that was too little.
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

/// Lets the tasks of both peers compete for one lock, and tells what they got.
fn crowd(server: &Server, place: Place) {
    let mut pair = Pair::new(server, place);
    let before = script_calls(&mut pair.watch);
    pair.peers.iter().for_each(|peer| peer.tell("crowd"));
    let mut grants: Vec<u64> = Vec::new();
    for peer in &pair.peers {
        grants.extend((0..CROWD).map(|_| peer.hear("grants")));
    }
    let calls = script_calls(&mut pair.watch) - before;
    let total: u64 = grants.iter().sum();
    let poorest = grants.iter().min().expect("a task");
    let sides: Vec<u64> = grants.chunks(CROWD).map(|side| side.iter().sum()).collect();
    println!(
        "{:<28} {:>8.0} grants/s   {:.2} script calls a grant   poorest task {:.2} of an equal part   sides {:?}",
        place.name(),
        total as f64 / CROWD_FOR.as_secs_f64(),
        calls as f64 / total as f64,
        *poorest as f64 * grants.len() as f64 / total as f64,
        sides,
    );
    pair.end();
}

/// Two peers on one lock, and a connection that watches them.
struct Pair {
    place: Place,
    peers: [Peer; 2],
    watch: redis::Connection,
    /// Whether the first holds the lock.
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
                // One runtime for both, as in a service with two clients.
                let runtime = Arc::new(runtime());
                [0; 2].map(|_| Peer::local(&runtime, &url, &name, &trivial))
            }
            Place::TwoProcesses => [0; 2].map(|_| Peer::process(&url, &name, &trivial)),
        };
        peers.iter().for_each(|peer| {
            peer.hear("ready");
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
            peer.tell("end");
            peer.hear("ended");
            if let Some(child) = &mut peer.child {
                child.wait().expect("the peer's end");
            }
        }
    }
}

/// One client of the lock, here or in a process of its own. It obeys words, and answers with a word
/// and a number.
struct Peer {
    words: UnboundedSender<String>,
    answers: mpsc::Receiver<(String, u64)>,
    child: Option<Child>,
    _runtime: Option<Arc<tokio::runtime::Runtime>>,
}

impl Peer {
    fn local(runtime: &Arc<tokio::runtime::Runtime>, url: &str, name: &str, trivial: &str) -> Self {
        let (words, heard) = unbounded_channel();
        let (answer, answers) = mpsc::channel();
        let (url, name, trivial) = (url.to_owned(), name.to_owned(), trivial.to_owned());
        runtime.spawn(async move {
            // The receiver may be gone.
            obey(&url, &name, &trivial, heard, move |word, number| {
                drop(answer.send((word.to_owned(), number)))
            })
            .await;
        });
        Self {
            words,
            answers,
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
        let (words, mut heard) = unbounded_channel::<String>();
        thread::spawn(move || {
            while let Some(word) = heard.blocking_recv() {
                if writeln!(stdin, "{word}").is_err() {
                    return;
                }
            }
        });
        let (answer, answers) = mpsc::channel();
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let (word, number) = line.split_once(' ').expect("a word and a number");
                if answer
                    .send((word.to_owned(), number.parse().expect("a number")))
                    .is_err()
                {
                    return;
                }
            }
        });
        Self {
            words,
            answers,
            child: Some(child),
            _runtime: None,
        }
    }

    fn tell(&self, word: &str) {
        self.words.send(word.to_owned()).expect("the peer lives");
    }

    fn hear(&self, expected: &str) -> u64 {
        let (word, number) = self
            .answers
            .recv_timeout(LIMIT)
            .unwrap_or_else(|_| panic!("no answer: {expected}"));
        assert_eq!(word, expected);
        number
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // An error means that it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A peer in a process of its own: words come in on stdin, answers go out on stdout.
fn be_peer(url: &str, name: &str, trivial: &str) {
    let (words, heard) = unbounded_channel();
    thread::spawn(move || {
        for word in std::io::stdin().lines().map_while(Result::ok) {
            if words.send(word).is_err() {
                return;
            }
        }
    });
    let answer = |word: &str, number: u64| println!("{word} {number}");
    runtime().block_on(obey(url, name, trivial, heard, answer));
}

async fn obey(
    url: &str,
    name: &str,
    trivial: &str,
    mut words: UnboundedReceiver<String>,
    answer: impl Fn(&str, u64) + Send + Sync,
) {
    let client = LockClient::connect(url).await.expect("a lock client");
    let bare = Fred::connect(url).await;
    let key = Bytes::copy_from_slice(name.as_bytes());
    let lock = client.lock(name);
    let mut guard = None;
    answer("ready", 0);
    while let Some(word) = words.recv().await {
        match word.as_str() {
            "lock" => {
                let granted = lock.lock().await.expect("granted");
                answer("locked", now());
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
                // Told afterwards, so that telling costs the release nothing.
                answer("unlocking", unlocking);
                answer("unlocked", 0);
            }
            "trip" => {
                let begun = Instant::now();
                bare.call(trivial, &key, &[]).await;
                answer("trip", begun.elapsed().as_nanos() as u64);
            }
            "crowd" => {
                for grants in compete(&lock).await {
                    answer("grants", grants);
                }
            }
            _ => break,
        }
    }
    drop(guard);
    client.shutdown().await.expect("an orderly end");
    answer("ended", 0);
}

/// What each task of a crowd got.
async fn compete(lock: &ReentrantLock) -> Vec<u64> {
    let over = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    for _ in 0..CROWD {
        let (lock, over) = (lock.clone(), Arc::clone(&over));
        tasks.spawn(async move {
            let mut grants = 0;
            while !over.load(Ordering::Relaxed) {
                let guard = lock.lock().await.expect("granted");
                grants += 1;
                guard.unlock().await.expect("released");
            }
            grants
        });
    }
    tokio::time::sleep(CROWD_FOR).await;
    over.store(true, Ordering::Relaxed);
    tasks.join_all().await
}

/// The machine's clock, in ns.
fn now() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("a clock that is set");
    since
        .as_nanos()
        .try_into()
        .expect("a clock before the year 2500")
}
