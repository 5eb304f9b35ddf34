//! Many waiters in several processes wait for one lock: each one is served, and no process sends
//! more than one attempt per unlock.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::observe::{patient_connection, sha1_of, subscribers};
use crate::support::process::{self, Worker, setting};
use crate::support::server::{Server, unique, wait_until};
use futures::poll;
use redis::{Connection, cmd};
use redisson_lock::LockClient;

/// Far longer than all waiters need, far shorter than the leases here: a waiter that sleeps until
/// the TTL has passed exceeds it.
const LIMIT: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(600);
const PROCESSES: usize = 10;
const WAITERS: usize = 50;

/// Counts the scripts in the output of the server's MONITOR.
struct Monitor(Arc<Mutex<Counts>>);

#[derive(Default)]
struct Counts {
    /// By connection.
    attempts: HashMap<String, u64>,
    releases: u64,
}

impl Monitor {
    /// Reads until the server stops.
    fn start(server: &Server) -> Self {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
        stream.write_all(b"MONITOR\r\n").unwrap();
        let mut lines = BufReader::new(stream).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "+OK");
        let counts = Arc::<Mutex<Counts>>::default();
        let counted = Arc::clone(&counts);
        std::thread::spawn(move || {
            // +1700000000.000000 [0 127.0.0.1:40000] "EVALSHA" "sha1" ...
            for line in lines.map_while(Result::ok) {
                let mut counts = counted.lock().unwrap();
                if line.contains(sha1_of("acquire")) {
                    let from = line.split([' ', ']']).nth(2).unwrap().to_owned();
                    *counts.attempts.entry(from).or_default() += 1;
                } else if line.contains(sha1_of("release")) {
                    counts.releases += 1;
                }
            }
        });
        Self(counts)
    }

    fn releases(&self) -> u64 {
        self.0.lock().unwrap().releases
    }

    /// How many attempts each connection has sent.
    fn attempts(&self) -> Vec<u64> {
        self.0.lock().unwrap().attempts.values().copied().collect()
    }
}

fn number(redis: &mut Connection, key: &str) -> usize {
    cmd("GET")
        .arg(key)
        .query::<Option<usize>>(redis)
        .unwrap()
        .unwrap_or(0)
}

fn scripts(redis: &mut Connection) -> String {
    let info: String = cmd("INFO").arg("commandstats").query(redis).unwrap();
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    line.and_then(|line| line.split(',').next())
        .unwrap_or("0")
        .to_owned()
}

/// A lock that is held by a raw write, and processes whose waiters all wait for it.
struct Contenders {
    redis: Connection,
    lock: String,
    served: String,
    workers: Vec<Worker>,
    size: usize,
}

impl Contenders {
    fn start(
        server: &Server,
        url: &str,
        processes: usize,
        waiters: usize,
        recheck: Duration,
    ) -> Self {
        let mut redis = server.connection();
        let (lock, ready, served) = (unique("stock"), unique("ready"), unique("served"));
        cmd("HSET")
            .arg(&lock)
            .arg("9f3c0b6e-54a9-4c4f-8a53-0d2f5f2f7c11:1")
            .arg(1)
            .exec(&mut redis)
            .unwrap();
        cmd("PEXPIRE")
            .arg(&lock)
            .arg(LEASE.as_millis() as u64)
            .exec(&mut redis)
            .unwrap();
        // Where each release is counted, each has to be made on the server.
        let passing = if recheck == LEASE { "0" } else { "10" };
        let (waiters_setting, recheck) = (waiters.to_string(), recheck.as_millis().to_string());
        let settings = [
            ("URL", url),
            ("PLAIN", &*server.url()),
            ("LOCK", &lock),
            ("READY", &ready),
            ("SERVED", &served),
            ("WAITERS", &waiters_setting),
            ("RECHECK", &recheck),
            ("PASSING", passing),
        ];
        let workers = (0..processes)
            .map(|_| Worker::start("many_waiters::worker_process", "wait", &settings))
            .collect();
        wait_until("every process waits", LIMIT, || {
            number(&mut redis, &ready) == processes
        });
        Self {
            redis,
            lock,
            served,
            workers,
            size: processes * waiters,
        }
    }

    /// Waits until every process is subscribed, and has sent its attempt after that.
    fn wait_until_idle(&mut self) {
        let processes = self.workers.len();
        wait_until("every process is subscribed", LIMIT, || {
            subscribers(&mut self.redis, &self.lock) == processes
        });
        let mut last = (scripts(&mut self.redis), Instant::now());
        wait_until("no process sends an attempt", LIMIT, || {
            let now = scripts(&mut self.redis);
            if now != last.0 {
                last = (now, Instant::now());
            }
            last.1.elapsed() > Duration::from_millis(300)
        });
    }

    /// Frees the lock by a raw write, as another process would, with or without a message.
    fn free(&mut self, publish: bool) {
        let mut free = redis::pipe();
        free.atomic().del(&self.lock);
        if publish {
            free.publish(format!("redisson_lock__channel:{{{}}}", self.lock), "0");
        }
        free.exec(&mut self.redis).unwrap();
    }

    fn served(&mut self) -> usize {
        number(&mut self.redis, &self.served)
    }

    /// Waits until every waiter is served and every process has exited with success.
    fn finish(mut self) {
        for worker in &mut self.workers {
            assert!(
                worker.ended(LIMIT).success(),
                "a waiter was not served, or two owners held the lock"
            );
        }
        assert_eq!(self.served(), self.size);
        assert_eq!(cmd("EXISTS").arg(&self.lock).query(&mut self.redis), Ok(0));
        assert_eq!(subscribers(&mut self.redis, &self.lock), 0);
    }
}

#[test]
fn ten_processes_attempt_once_per_unlock() {
    let server = Server::start();
    let mut contenders = Contenders::start(&server, &server.url(), PROCESSES, WAITERS, LEASE);
    contenders.wait_until_idle();
    let monitor = Monitor::start(&server);
    let begun = Instant::now();
    contenders.free(true);
    wait_until("every waiter is served", LIMIT, || {
        monitor.releases() == contenders.size as u64
    });
    let took = begun.elapsed();
    contenders.finish();
    // One raw unlock, and one by each waiter.
    let unlocks = (PROCESSES * WAITERS) as u64 + 1;
    let attempts = monitor.attempts();
    println!(
        "{unlocks} unlocks in {took:?}: {} attempts, by process {attempts:?}",
        attempts.iter().sum::<u64>()
    );
    assert_eq!(attempts.len(), PROCESSES);
    for count in attempts {
        assert!(
            count >= WAITERS as u64,
            "{count} attempts cannot have served {WAITERS}"
        );
        assert!(
            count <= unlocks,
            "{count} attempts of one process for {unlocks} unlocks"
        );
    }
}

#[test]
fn waiters_with_lost_wakeups_do_not_sleep_until_ttl() {
    let server = Server::start();
    let mut contenders = Contenders::start(&server, &server.url(), PROCESSES, WAITERS, LEASE);
    contenders.wait_until_idle();
    // The first message reaches no process, and later ones only some.
    let kill = || -> u64 {
        cmd("CLIENT")
            .arg(&["KILL", "TYPE", "pubsub"])
            .query(&mut server.connection())
            .unwrap()
    };
    assert_eq!(kill(), PROCESSES as u64);
    contenders.free(false);
    let (mut killed, begun, size) = (0, Instant::now(), contenders.size);
    wait_until("every waiter is served", LIMIT, || {
        killed += kill();
        std::thread::sleep(Duration::from_millis(50));
        contenders.served() == size
    });
    println!(
        "{size} served in {:?} while {killed} connections were killed",
        begun.elapsed()
    );
    assert!(
        killed > PROCESSES as u64,
        "too few connections were killed: {killed}"
    );
    contenders.finish();
}

#[test]
fn waiters_without_subscribe_right_do_not_sleep_until_ttl() {
    const RECHECK: Duration = Duration::from_millis(50);
    let (processes, waiters) = (5, 20);
    let server = Server::start();
    let rule = [
        "SETUSER",
        "nosubscribe",
        "on",
        ">secret",
        "~*",
        "resetchannels",
        "+@all",
        "-subscribe",
    ];
    cmd("ACL")
        .arg(&rule)
        .exec(&mut server.connection())
        .unwrap();
    let url = server
        .url()
        .replace("redis://", "redis://nosubscribe:secret@");
    let mut contenders = Contenders::start(&server, &url, processes, waiters, RECHECK);
    let monitor = Monitor::start(&server);
    let begun = Instant::now();
    contenders.free(true);
    wait_until("every waiter is served", LIMIT, || {
        contenders.served() == contenders.size
    });
    let took = begun.elapsed();
    contenders.finish();
    let attempts = monitor.attempts();
    println!(
        "{} served in {took:?}: attempts by process {attempts:?}",
        processes * waiters
    );
    // A re-check comes after 40 ms at the earliest, and at most one more attempt follows a grant.
    let most = took.as_millis() as u64 / 40 + 2 * waiters as u64 + 4;
    assert!(
        attempts.iter().all(|count| *count <= most),
        "{attempts:?} attempts, {most} at most"
    );
}

/// Queues all its waiters, counts itself as ready, and lets each waiter hold the lock for a moment.
#[tokio::test(flavor = "multi_thread")]
async fn worker_process() {
    if process::role().is_none() {
        return;
    }
    let mut redis = patient_connection(&setting("PLAIN")).await;
    let recheck = Duration::from_millis(setting("RECHECK").parse().unwrap());
    let passing = Duration::from_millis(setting("PASSING").parse().unwrap());
    let builder = LockClient::builder()
        .watchdog_timeout(LEASE)
        .passing_time(passing)
        .recheck_interval(recheck);
    let client = builder.connect(&setting("URL")).await.unwrap();
    let lock = client.lock(setting("LOCK"));
    let mut requests: Vec<_> = (0..setting("WAITERS").parse().unwrap())
        .map(|_| lock.lock().into_future())
        .collect();
    for request in &mut requests {
        // The first poll takes the place in the wait queue.
        assert!(poll!(request).is_pending());
    }
    cmd("INCR")
        .arg(setting("READY"))
        .exec_async(&mut redis)
        .await
        .unwrap();
    let waiters: Vec<_> = requests
        .into_iter()
        .map(|request| {
            let mut redis = redis.clone();
            tokio::spawn(async move {
                let guard = request.await.unwrap();
                let (served, occupied) = (setting("SERVED"), setting("LOCK") + ":occupied");
                let owners: u64 = cmd("INCR")
                    .arg(&occupied)
                    .query_async(&mut redis)
                    .await
                    .unwrap();
                assert_eq!(owners, 1, "two owners hold the lock");
                redis::pipe()
                    .incr(&served, 1)
                    .decr(&occupied, 1)
                    .exec_async(&mut redis)
                    .await
                    .unwrap();
                guard.unlock().await.unwrap();
            })
        })
        .collect();
    for waiter in waiters {
        waiter.await.unwrap();
    }
    client.shutdown().await.unwrap();
}
