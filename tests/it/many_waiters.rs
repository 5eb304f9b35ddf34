//! A crowd: ten processes with fifty waiters each in front of one lock. Everybody is served, and
//! nobody asks without a reason.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::observe::{sha1_of, subscribers};
use crate::support::process::{self, Worker, setting};
use crate::support::server::{Server, unique, wait_until};
use futures::poll;
use redis::{Connection, cmd};
use redisson_lock::LockClient;

/// Far more than a crowd needs to be served, far less than the leases here: who sleeps to the TTL
/// is too late.
const LIMIT: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(600);
const PROCESSES: usize = 10;
const WAITERS: usize = 50;

/// What the server was asked to do, as its MONITOR tells it.
struct Monitor(Arc<Mutex<Heard>>);

#[derive(Default)]
struct Heard {
    /// By the connection that asked.
    acquires: HashMap<String, u64>,
    releases: u64,
}

impl Monitor {
    /// Listens until the server ends.
    fn start(server: &Server) -> Self {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
        stream.write_all(b"MONITOR\r\n").unwrap();
        let mut lines = BufReader::new(stream).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "+OK");
        let heard = Arc::<Mutex<Heard>>::default();
        let noted = Arc::clone(&heard);
        std::thread::spawn(move || {
            // +1700000000.000000 [0 127.0.0.1:40000] "EVALSHA" "sha1" ...
            for line in lines.map_while(Result::ok) {
                let mut heard = noted.lock().unwrap();
                if line.contains(sha1_of("acquire")) {
                    let from = line.split([' ', ']']).nth(2).unwrap().to_owned();
                    *heard.acquires.entry(from).or_default() += 1;
                } else if line.contains(sha1_of("release")) {
                    heard.releases += 1;
                }
            }
        });
        Self(heard)
    }

    fn releases(&self) -> u64 {
        self.0.lock().unwrap().releases
    }

    /// How often each connection has asked for a lock.
    fn acquires(&self) -> Vec<u64> {
        self.0.lock().unwrap().acquires.values().copied().collect()
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

/// A lock that somebody holds by hand, and processes whose waiters all stand in front of it.
struct Crowd {
    redis: Connection,
    lock: String,
    served: String,
    workers: Vec<Worker>,
    size: usize,
}

impl Crowd {
    fn gather(
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
        let (waiters_setting, recheck) = (waiters.to_string(), recheck.as_millis().to_string());
        let settings = [
            ("URL", url),
            ("PLAIN", &*server.url()),
            ("LOCK", &lock),
            ("READY", &ready),
            ("SERVED", &served),
            ("WAITERS", &waiters_setting),
            ("RECHECK", &recheck),
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

    /// Waits until every process listens, and has asked again since.
    fn wait_until_parked(&mut self) {
        let processes = self.workers.len();
        wait_until("every process listens", LIMIT, || {
            subscribers(&mut self.redis, &self.lock) == processes
        });
        let mut last = (scripts(&mut self.redis), Instant::now());
        wait_until("the crowd sleeps", LIMIT, || {
            let now = scripts(&mut self.redis);
            if now != last.0 {
                last = (now, Instant::now());
            }
            last.1.elapsed() > Duration::from_millis(300)
        });
    }

    /// Frees the lock by hand, as an owner in another process does; with or without a message.
    fn free(&mut self, told: bool) {
        let mut free = redis::pipe();
        free.atomic().del(&self.lock);
        if told {
            free.publish(format!("redisson_lock__channel:{{{}}}", self.lock), "0");
        }
        free.exec(&mut self.redis).unwrap();
    }

    fn served(&mut self) -> usize {
        number(&mut self.redis, &self.served)
    }

    /// Waits until everybody was served, and every process ended well.
    fn disperse(mut self) {
        for worker in &mut self.workers {
            assert!(
                worker.ended(LIMIT).success(),
                "a waiter was not served, or was not alone"
            );
        }
        assert_eq!(self.served(), self.size);
        assert_eq!(cmd("EXISTS").arg(&self.lock).query(&mut self.redis), Ok(0));
        assert_eq!(subscribers(&mut self.redis, &self.lock), 0);
    }
}

#[test]
fn ten_processes_ask_once_for_each_unlock() {
    let server = Server::start();
    let mut crowd = Crowd::gather(&server, &server.url(), PROCESSES, WAITERS, LEASE);
    crowd.wait_until_parked();
    let monitor = Monitor::start(&server);
    let begun = Instant::now();
    crowd.free(true);
    wait_until("everybody is served", LIMIT, || {
        monitor.releases() == crowd.size as u64
    });
    let took = begun.elapsed();
    crowd.disperse();
    // One unlock by hand, and one by everybody who was served.
    let unlocks = (PROCESSES * WAITERS) as u64 + 1;
    let asked = monitor.acquires();
    println!(
        "{unlocks} unlocks in {took:?}: {} tries, by process {asked:?}",
        asked.iter().sum::<u64>()
    );
    assert_eq!(asked.len(), PROCESSES);
    for tries in asked {
        assert!(
            tries >= WAITERS as u64,
            "{tries} tries cannot have served {WAITERS}"
        );
        assert!(
            tries <= unlocks,
            "{tries} tries of one process for {unlocks} unlocks"
        );
    }
}

#[test]
fn a_crowd_whose_messages_are_lost_with_their_connections_does_not_sleep_to_the_ttl() {
    let server = Server::start();
    let mut crowd = Crowd::gather(&server, &server.url(), PROCESSES, WAITERS, LEASE);
    crowd.wait_until_parked();
    // The first message reaches nobody, and later ones only some.
    let kill = || -> u64 {
        cmd("CLIENT")
            .arg(&["KILL", "TYPE", "pubsub"])
            .query(&mut server.connection())
            .unwrap()
    };
    assert_eq!(kill(), PROCESSES as u64);
    crowd.free(false);
    let (mut killed, begun, size) = (0, Instant::now(), crowd.size);
    wait_until("everybody is served", LIMIT, || {
        killed += kill();
        std::thread::sleep(Duration::from_millis(50));
        crowd.served() == size
    });
    println!(
        "{size} served in {:?} while {killed} connections were killed",
        begun.elapsed()
    );
    assert!(killed > PROCESSES as u64, "no trouble: {killed}");
    crowd.disperse();
}

#[test]
fn a_crowd_that_may_not_subscribe_does_not_sleep_to_the_ttl() {
    const RECHECK: Duration = Duration::from_millis(50);
    let (processes, waiters) = (5, 20);
    let server = Server::start();
    let rule = [
        "SETUSER",
        "deaf",
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
    let url = server.url().replace("redis://", "redis://deaf:secret@");
    let mut crowd = Crowd::gather(&server, &url, processes, waiters, RECHECK);
    let monitor = Monitor::start(&server);
    let begun = Instant::now();
    crowd.free(true);
    wait_until("everybody is served", LIMIT, || {
        crowd.served() == crowd.size
    });
    let took = begun.elapsed();
    crowd.disperse();
    let asked = monitor.acquires();
    println!(
        "{} served in {took:?}: tries by process {asked:?}",
        processes * waiters
    );
    // A re-check comes after 40 ms at the earliest, and a grant is followed by another try at most.
    let most = took.as_millis() as u64 / 40 + 2 * waiters as u64 + 4;
    assert!(
        asked.iter().all(|tries| *tries <= most),
        "{asked:?} tries, {most} at most"
    );
}

/// Puts all its waiters in line, tells, and lets each hold the lock for a moment.
#[tokio::test(flavor = "multi_thread")]
async fn worker_process() {
    if process::role().is_none() {
        return;
    }
    let redis = redis::Client::open(setting("PLAIN")).unwrap();
    let mut redis = redis.get_multiplexed_async_connection().await.unwrap();
    let recheck = Duration::from_millis(setting("RECHECK").parse().unwrap());
    let builder = LockClient::builder()
        .watchdog_timeout(LEASE)
        .recheck_interval(recheck);
    let client = builder.connect(&setting("URL")).await.unwrap();
    let lock = client.lock(setting("LOCK"));
    let mut requests: Vec<_> = (0..setting("WAITERS").parse().unwrap())
        .map(|_| lock.lock().into_future())
        .collect();
    for request in &mut requests {
        // The first poll takes the place in the line.
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
                let alone: u64 = cmd("INCR")
                    .arg(&occupied)
                    .query_async(&mut redis)
                    .await
                    .unwrap();
                assert_eq!(alone, 1, "two hold it at once");
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
