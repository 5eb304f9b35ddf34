//! The simple lock and the `Lock` of Python's redis-py take turns on one key.
//!
//! redis-py sets a random token with `SET NX PX`, looks every 0.1 s while it waits, and releases by
//! compare-and-delete without a message.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use redisson_lock::{Error, LockClient, LostReason, SimpleLock};
use serde_json::{Value, json};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep, timeout};

use crate::fixture::{Observer, SOON, rust_client};
use crate::support::server::Server;

/// Far longer than the 0.1 s after which either side looks while the other one holds the lock.
const TURN: Duration = Duration::from_secs(3);

/// How long all increments may take on a busy machine.
const COUNTING: Duration = Duration::from_secs(120);

const EXIT_SKIPPED: i32 = 3;

/// A Python process. Dropping it kills the process and waits for its end.
struct Python {
    child: Child,
    commands: ChildStdin,
    replies: BufReader<ChildStdout>,
}

/// The interpreter and its `PYTHONPATH`, or why there is none.
fn interpreter() -> Result<(String, String), String> {
    let output = Command::new("bash")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop/redis-py"))
        .stdin(Stdio::null())
        .output()
        .expect("bash starts");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.code() == Some(EXIT_SKIPPED) {
        return Err(errors.lines().last().unwrap_or_default().to_owned());
    }
    assert!(output.status.success(), "tests/interop/redis-py: {errors}");
    let answer = String::from_utf8(output.stdout).expect("paths in UTF-8");
    let mut lines = answer.lines().map(str::to_owned);
    let python = lines.next().expect("an interpreter");
    Ok((python, lines.next().unwrap_or_default()))
}

impl Python {
    fn start((python, path): &(String, String), url: &str) -> Self {
        let mut child = Command::new(python)
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop/redis_py_peer.py"))
            .arg(url)
            .env("PYTHONPATH", path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python starts");
        Self {
            commands: child.stdin.take().expect("stdin is piped"),
            replies: BufReader::new(child.stdout.take().expect("stdout is piped")),
            child,
        }
    }

    /// The result of a command, or the class of its exception.
    fn call(&mut self, command: &Value) -> Result<Value, String> {
        writeln!(self.commands, "{command}").expect("python reads");
        let mut line = String::new();
        self.replies.read_line(&mut line).expect("python replies");
        let mut reply: Value = serde_json::from_str(&line)
            .unwrap_or_else(|_| panic!("python ended at {command}: {line:?}"));
        match reply["error"].as_str() {
            Some(class) => Err(class.to_owned()),
            None => Ok(reply["value"].take()),
        }
    }

    fn ask(&mut self, op: &str, name: &str) -> Result<Value, String> {
        self.call(&json!({ "op": op, "name": name }))
    }

    /// Acquires the lock with a lease in seconds, or without one; waits for at most `wait` seconds.
    fn acquire(&mut self, name: &str, lease: Option<f64>, wait: f64) -> bool {
        let command = json!({ "op": "acquire", "name": name, "timeout": lease, "wait": wait });
        self.call(&command).expect("an answer") == Value::Bool(true)
    }

    /// Begins to wait for the lock. The task ends with the moment of the acquisition.
    fn waiting(mut self, name: &str, lease: Option<f64>) -> JoinHandle<(Self, Instant)> {
        let name = name.to_owned();
        spawn_blocking(move || {
            assert!(self.acquire(&name, lease, 20.0), "python got no lock");
            (self, Instant::now())
        })
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        // An error means that the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Fixture {
    server: Server,
    observer: Observer,
    client: LockClient,
    interpreter: (String, String),
}

impl Fixture {
    fn python(&self) -> Python {
        Python::start(&self.interpreter, &self.server.url())
    }

    async fn value(&self, name: &str) -> Option<String> {
        self.observer.ask(&["GET", name]).await.expect("GET")
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn side_by_side_with_redis_py() {
    let interpreter = match spawn_blocking(interpreter).await.expect("no panic") {
        Ok(interpreter) => interpreter,
        Err(why) if env::var("CI").as_deref() == Ok("true") => panic!("redis-py {why}"),
        Err(why) => {
            // Not captured by the test harness, so that it is shown for a passing test, too.
            let _ = writeln!(std::io::stderr(), "redis-py {why}");
            return;
        }
    };
    let server = Server::start();
    let fixture = Fixture {
        observer: Observer::open(&server.url()).await,
        // Without re-checks: only the look at a lock of another program finds its release.
        client: rust_client(&server.url(), |builder| builder).await,
        server,
        interpreter,
    };
    let begun = Instant::now();
    let version = fixture.python().ask("version", "").expect("a version");
    let lock = |name| fixture.client.simple_lock(name);
    python_waits_for_ours(&fixture, lock("python waits")).await;
    ours_waits_for_python(&fixture, lock("ours waits")).await;
    neither_releases_the_others(&fixture, lock("foreign")).await;
    leases_of_both_sides_end(&fixture, lock("leases")).await;
    critical_sections_never_overlap(&fixture, lock("counted under")).await;
    let keys: Vec<String> = fixture.observer.ask(&["KEYS", "*"]).await.expect("KEYS");
    assert_eq!(keys, ["count"]);
    println!(
        "redis-py {}: 5 scenarios in {:.1?}",
        version.as_str().unwrap_or_default(),
        begun.elapsed()
    );
}

async fn python_waits_for_ours(fixture: &Fixture, lock: SimpleLock) {
    let mut python = fixture.python();
    let guard = lock.lock().await.unwrap();
    assert!(!python.acquire(lock.name(), Some(60.0), 0.0));
    assert_eq!(python.ask("locked", lock.name()), Ok(Value::Bool(true)));
    let waiting = python.waiting(lock.name(), Some(60.0));
    sleep(Duration::from_millis(400)).await;
    assert!(!waiting.is_finished(), "two owners");
    guard.unlock().await.unwrap();
    let released = Instant::now();
    let (mut python, at) = timeout(SOON, waiting).await.expect("it waits").unwrap();
    assert!(at < released + TURN, "{:?}", at - released);
    assert!(lock.try_lock().await.unwrap().is_none());
    let info = lock.inspect().await.unwrap().unwrap();
    assert_eq!(python.ask("token", lock.name()), Ok(info.owner.into()));
    assert_eq!(python.ask("release", lock.name()), Ok(Value::Null));
    assert_eq!(lock.is_locked().await, Ok(false));
}

async fn ours_waits_for_python(fixture: &Fixture, lock: SimpleLock) {
    for lease in [Some(60.0), None] {
        let mut python = fixture.python();
        assert!(python.acquire(lock.name(), lease, 0.0));
        assert!(lock.try_lock().await.unwrap().is_none());
        let waiting = tokio::spawn(lock.lock().into_future());
        sleep(Duration::from_millis(400)).await;
        assert!(!waiting.is_finished(), "two owners");
        if lease.is_some() {
            let extend = json!({ "op": "extend", "name": lock.name(), "by": 30 });
            assert_eq!(python.call(&extend), Ok(Value::Bool(true)));
        }
        assert_eq!(python.ask("release", lock.name()), Ok(Value::Null));
        let released = Instant::now();
        let guard = timeout(SOON, waiting).await.expect("it waits").unwrap();
        assert!(released.elapsed() < TURN, "{:?}", released.elapsed());
        assert!(!python.acquire(lock.name(), lease, 0.0));
        guard.unwrap().unlock().await.unwrap();
    }
}

/// An owner whose lock is gone releases and extends nothing of the other side.
async fn neither_releases_the_others(fixture: &Fixture, lock: SimpleLock) {
    let name = lock.name();
    let mut python = fixture.python();
    assert!(python.acquire(name, Some(0.2), 0.0));
    let guard = timeout(SOON, lock.lock().into_future())
        .await
        .expect("the lease ends")
        .unwrap();
    let value = fixture.value(name).await;
    assert_eq!(python.ask("owned", name), Ok(Value::Bool(false)));
    let refused = Err("LockNotOwnedError".to_owned());
    assert_eq!(python.ask("release", name), refused);
    assert_eq!(fixture.value(name).await, value);
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();

    let guard = lock.lock().lease(Duration::from_millis(300)).await.unwrap();
    assert!(python.acquire(name, Some(60.0), 10.0));
    let token = fixture.value(name).await;
    let unlocked = guard.unlock().await;
    assert!(
        matches!(
            unlocked,
            Err(Error::Lost {
                reason: LostReason::Expired,
                ..
            })
        ),
        "{unlocked:?}"
    );
    // What the client does in the background has ended by then.
    sleep(Duration::from_millis(300)).await;
    assert_eq!(fixture.value(name).await, token);
    assert_eq!(python.ask("owned", name), Ok(Value::Bool(true)));
    // An operator frees it.
    assert_eq!(lock.force_unlock().await, Ok(true));
    let refused = Err("LockNotOwnedError".to_owned());
    assert_eq!(python.ask("release", name), refused);
}

/// The side that waits acquires the lock when the other side's lease is over.
async fn leases_of_both_sides_end(fixture: &Fixture, lock: SimpleLock) {
    let lease = Duration::from_millis(800);
    let guard = lock.lock().lease(lease).await.unwrap();
    let begun = Instant::now();
    let waiting = fixture.python().waiting(lock.name(), Some(0.8));
    let (mut python, at) = timeout(SOON, waiting).await.expect("it waits").unwrap();
    assert!(at > begun + lease / 2 && at < begun + lease + TURN);
    assert!(guard.is_lost(), "notified before the other side had it");
    let begun = Instant::now();
    let guard = timeout(SOON, lock.lock().into_future())
        .await
        .expect("the lease ends")
        .unwrap();
    assert!(begun.elapsed() < lease + TURN, "{:?}", begun.elapsed());
    assert_eq!(python.ask("owned", lock.name()), Ok(Value::Bool(false)));
    guard.unlock().await.unwrap();
}

/// Two Python processes and two tasks increment a counter that only the lock keeps exact.
async fn critical_sections_never_overlap(fixture: &Fixture, lock: SimpleLock) {
    const EACH: u64 = 100;
    let mut pythons = Vec::new();
    for _ in 0..2 {
        let (mut python, name) = (fixture.python(), lock.name().to_owned());
        pythons.push(spawn_blocking(move || {
            let command = json!({ "op": "increment", "name": name, "key": "count", "n": EACH });
            assert_eq!(python.call(&command), Ok(Value::Null));
        }));
    }
    let mut tasks = Vec::new();
    for _ in 0..2 {
        let (lock, observer) = (lock.clone(), fixture.observer.clone());
        tasks.push(tokio::spawn(async move {
            for _ in 0..EACH {
                let guard = lock.lock().await.unwrap();
                let count: Option<u64> = observer.ask(&["GET", "count"]).await.expect("GET");
                let count = count.unwrap_or(0) + 1;
                let set: Result<(), _> = observer.ask(&["SET", "count", &count.to_string()]).await;
                set.expect("SET");
                guard.unlock().await.unwrap();
                // redis-py does not queue: it would find the lock held at nearly each look.
                sleep(Duration::from_millis(2)).await;
            }
        }));
    }
    for task in tasks.into_iter().chain(pythons) {
        timeout(COUNTING, task).await.expect("it counts").unwrap();
    }
    assert_eq!(fixture.value("count").await, Some((4 * EACH).to_string()));
}
