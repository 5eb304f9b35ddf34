//! Real Redisson for the tests: a Java process (`tests/interop/redisson-peer`) that holds any
//! number of Redisson clients, each with named threads, and takes one JSON command per line.
//!
//! ```ignore
//! let peer = match Peer::start("4.7.0").await {
//!     Ok(peer) => peer,
//!     Err(skip) => return eprintln!("{skip}"),
//! };
//! let client = peer.client("c1", "redis://127.0.0.1:6379", Options::default()).await?;
//! let thread = client.thread("t1");
//! thread.lock("order:42").await?;
//! ```

// Every test binary includes this module and uses a part of it.
#![allow(dead_code)]

use std::{
    collections::{HashMap, VecDeque},
    env,
    error::Error,
    fmt,
    io::{BufRead, BufReader, Read, Write},
    path::Path,
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Output, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::{Map, Value, json};
use tokio::{sync::oneshot, task, time};

/// The Redisson versions that the tests run against, newest first.
pub const VERSIONS: [&str; 6] = ["4.7.0", "3.52.0", "3.45.1", "3.27.2", "3.17.7", "3.8.1"];

/// The version that needs a JDK of at most 11.
const OLD_JDK_VERSION: &str = "3.8.1";

/// How long a call may take unless [`PeerThread::within`] says otherwise.
const CALL_LIMIT: Duration = Duration::from_secs(30);

/// How many of the peer's last lines on stderr an error shows.
const LOG_LINES: usize = 40;

/// How often the clocks are compared at the start; the quickest answer wins.
const CLOCK_PROBES: usize = 10;

/// The exit code of the scripts in `tests/interop` when a tool is missing.
const EXIT_SKIPPED: i32 = 3;

/// The peer cannot be had on this machine, as Java or Maven is missing; says what to install.
#[derive(Clone, Debug)]
pub struct Skip(pub String);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A call that failed.
#[derive(Clone, Debug)]
pub struct PeerError {
    /// The simple name of the Java exception's class, such as `IllegalMonitorStateException`;
    /// `BadCommand` for a wrong command; or of this side: [`PeerError::TIMEOUT`],
    /// [`PeerError::GONE`], [`PeerError::BAD_REPLY`].
    pub class: String,
    /// The exception's message.
    pub message: String,
}

impl PeerError {
    /// The class of a call without an answer in time. The Java thread may still be at it.
    pub const TIMEOUT: &str = "PeerTimeout";
    /// The class of a call that the peer's process did not live to answer.
    pub const GONE: &str = "PeerGone";
    /// The class of an answer of another type than the call's.
    pub const BAD_REPLY: &str = "PeerBadReply";

    fn new(class: &str, message: String) -> Self {
        Self {
            class: class.to_owned(),
            message,
        }
    }
}

impl fmt::Display for PeerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.class, self.message)
    }
}

impl Error for PeerError {}

/// How a Redisson client is set up. What is not set has Redisson's own default.
#[derive(Clone, Debug, Default)]
pub struct Options {
    fields: Map<String, Value>,
    settings: Map<String, Value>,
}

impl Options {
    /// Connects to a Cluster; the client's URL may then be several, with commas between them.
    pub fn cluster(mut self) -> Self {
        self.fields.insert("mode".to_owned(), "cluster".into());
        self
    }

    /// The lease of a lock taken without one; it is renewed every third of this.
    pub fn watchdog(mut self, timeout: Duration) -> Self {
        self.fields
            .insert("watchdogMs".to_owned(), millis(timeout).into());
        self
    }

    /// How long a command may wait for its reply.
    pub fn timeout(self, timeout: Duration) -> Self {
        self.set("timeout", millis(timeout))
    }

    /// How often a command without a reply is sent again.
    pub fn retry_attempts(self, attempts: u32) -> Self {
        self.set("retryAttempts", attempts)
    }

    /// How many channels one connection may carry (5 by default).
    pub fn subscriptions_per_connection(self, channels: u32) -> Self {
        self.set("subscriptionsPerConnection", channels)
    }

    /// How many connections may carry channels (50 by default).
    pub fn subscription_connections(self, connections: u32) -> Self {
        self.set("subscriptionConnectionPoolSize", connections)
    }

    /// How long a subscribe may take. Not in 3.17.7 and 3.8.1, where it is an error.
    pub fn subscription_timeout(self, timeout: Duration) -> Self {
        self.set("subscriptionTimeout", millis(timeout))
    }

    /// `AUTO`, `ON` or `OFF`. Only for a Cluster, and an error up to 3.27.2, which decides itself.
    pub fn sharded_subscription_mode(self, mode: &str) -> Self {
        self.set("shardedSubscriptionMode", mode)
    }

    /// Any setting by Redisson's name for it, of the server's configuration or the common one.
    /// A number, bool, text or enum; an error where this Redisson does not have it.
    pub fn set(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.settings.insert(name.to_owned(), value.into());
        self
    }
}

/// A running Java process. Dropping it kills the process and waits for its end.
#[derive(Debug)]
pub struct Peer {
    version: String,
    child: Mutex<Child>,
    wire: Arc<Wire>,
}

impl Peer {
    /// Builds the peer for this Redisson version where that was not done yet, and starts it.
    ///
    /// # Panics
    ///
    /// When the build fails, or the process does not answer: only missing tools are a [`Skip`].
    pub async fn start(version: &str) -> Result<Self, Skip> {
        let wanted = version.to_owned();
        let mut command = task::spawn_blocking(move || java(&wanted))
            .await
            .expect("the preparation of the peer panicked")?;
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("java does not start: {error}"));
        let wire = Wire::new(
            version,
            child.stdin.take().expect("stdin is piped"),
            child.stdout.take().expect("stdout is piped"),
            child.stderr.take().expect("stderr is piped"),
        );
        // From here on a panic drops the peer, which ends the process.
        let peer = Self {
            version: version.to_owned(),
            child: Mutex::new(child),
            wire,
        };
        let running = peer.wire.call("version", Map::new(), CALL_LIMIT).await;
        let running = running.unwrap_or_else(|error| panic!("the peer does not start: {error}"));
        assert_eq!(
            running.value, version,
            "the peer runs another Redisson than asked for"
        );
        Clock::compare(&peer.wire).await;
        Ok(peer)
    }

    /// The Redisson version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The process, for signals such as SIGSTOP.
    pub fn pid(&self) -> u32 {
        lock(&self.child).id()
    }

    /// Opens a Redisson client. Its name is the peer's own; Redisson's is [`PeerClient::id`].
    pub async fn client(
        &self,
        name: &str,
        url: &str,
        options: Options,
    ) -> Result<PeerClient, PeerError> {
        let mut fields = options.fields;
        fields.insert("client".to_owned(), name.into());
        fields.insert("url".to_owned(), url.into());
        fields.insert("settings".to_owned(), options.settings.into());
        let reply = self.wire.call("open", fields, CALL_LIMIT).await?;
        Ok(PeerClient {
            id: reply.typed(|value| value.as_str().map(str::to_owned))?,
            name: name.to_owned(),
            wire: Arc::clone(&self.wire),
        })
    }

    /// Kills the process with SIGKILL and waits for its end. Calls under way fail with
    /// [`PeerError::GONE`]; what its threads hold is renewed no more.
    pub fn kill(&self) {
        let mut child = lock(&self.child);
        // An error means that it has ended already.
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// One Redisson client (one UUID, one set of connections) in a [`Peer`].
#[derive(Clone, Debug)]
pub struct PeerClient {
    /// Redisson's id of this client: the first half of `OWNER`.
    pub id: String,
    name: String,
    wire: Arc<Wire>,
}

impl PeerClient {
    /// A Java thread of this client, made at its first command. The same name is the same thread.
    pub fn thread(&self, name: &str) -> PeerThread {
        PeerThread {
            name: name.to_owned(),
            client: self.clone(),
            limit: CALL_LIMIT,
        }
    }

    /// Shuts the client down. Waiting calls of its threads are interrupted; nothing is unlocked.
    pub async fn close(&self) -> Result<(), PeerError> {
        let mut fields = Map::new();
        fields.insert("client".to_owned(), self.name.clone().into());
        self.wire.call("close", fields, CALL_LIMIT).await?;
        Ok(())
    }
}

/// A real Java thread, which is what owns a Redisson lock.
///
/// Its calls run one after the other, in the order in which their futures are first polled; calls
/// on different threads run at the same time. Dropping a call's future does not stop Java.
#[derive(Clone, Debug)]
pub struct PeerThread {
    name: String,
    client: PeerClient,
    limit: Duration,
}

impl PeerThread {
    /// The same thread with another limit for each call.
    pub fn within(&self, limit: Duration) -> Self {
        Self {
            limit,
            ..self.clone()
        }
    }

    /// `RLock.lock()`: waits for ever, renewed by the watchdog.
    pub async fn lock(&self, name: &str) -> Result<(), PeerError> {
        self.call("lock", json!({ "name": name })).await?;
        Ok(())
    }

    /// `RLock.lock(lease)`: waits for ever, not renewed.
    pub async fn lock_with_lease(&self, name: &str, lease: Duration) -> Result<(), PeerError> {
        let fields = json!({ "name": name, "leaseMs": millis(lease) });
        self.call("lock", fields).await?;
        Ok(())
    }

    /// `RLock.tryLock(wait)`, or `RLock.tryLock(wait, lease)`, which is not renewed. The limit for
    /// the call counts from the end of the wait.
    pub async fn try_lock(
        &self,
        name: &str,
        wait: Duration,
        lease: Option<Duration>,
    ) -> Result<bool, PeerError> {
        let fields = json!({ "name": name, "waitMs": millis(wait), "leaseMs": lease.map(millis) });
        self.within(self.limit + wait)
            .call("tryLock", fields)
            .await?
            .typed(Value::as_bool)
    }

    /// `RLock.unlock()`: an `IllegalMonitorStateException` where this thread is not the owner,
    /// though 3.8.1 takes the unlock of a free lock as done.
    pub async fn unlock(&self, name: &str) -> Result<(), PeerError> {
        self.call("unlock", json!({ "name": name })).await?;
        Ok(())
    }

    /// `RLock.forceUnlock()`: whether it was locked.
    pub async fn force_unlock(&self, name: &str) -> Result<bool, PeerError> {
        self.ask("forceUnlock", name).await?.typed(Value::as_bool)
    }

    /// `RLock.isLocked()`: whether anyone holds it.
    pub async fn is_locked(&self, name: &str) -> Result<bool, PeerError> {
        self.ask("isLocked", name).await?.typed(Value::as_bool)
    }

    /// `RLock.isHeldByCurrentThread()`.
    pub async fn is_held(&self, name: &str) -> Result<bool, PeerError> {
        self.ask("isHeldByCurrentThread", name)
            .await?
            .typed(Value::as_bool)
    }

    /// `RLock.isHeldByThread(id)`: whether that thread id holds it through this client. 3.8.1 has
    /// no such method; there the peer looks at the lock's field itself.
    pub async fn is_held_by(&self, name: &str, thread_id: i64) -> Result<bool, PeerError> {
        let fields = json!({ "name": name, "threadId": thread_id });
        self.call("isHeldByThread", fields)
            .await?
            .typed(Value::as_bool)
    }

    /// `RLock.getHoldCount()`: how often this thread holds it.
    pub async fn hold_count(&self, name: &str) -> Result<i64, PeerError> {
        self.ask("getHoldCount", name).await?.typed(Value::as_i64)
    }

    /// `RLock.remainTimeToLive()` in milliseconds: -2 where it is free, -1 without an expiry.
    pub async fn remaining_ttl(&self, name: &str) -> Result<i64, PeerError> {
        self.ask("remainTimeToLive", name)
            .await?
            .typed(Value::as_i64)
    }

    /// Does n times: lock, GET the counter, SET it to one more, unlock. The counter is decimal
    /// text, and only the lock makes this correct. Returns the last value that was written.
    pub async fn increment(&self, name: &str, counter: &str, n: u64) -> Result<i64, PeerError> {
        let fields = json!({ "name": name, "key": counter, "n": n });
        self.call("increment", fields).await?.typed(Value::as_i64)
    }

    /// Interrupts the call that this thread is in. A `tryLock` then fails with an
    /// `InterruptedException`; a `lock` goes on waiting, except in 3.8.1, where it returns without
    /// the lock and without an error. False, without effect, where the thread is in no call.
    pub async fn interrupt(&self) -> Result<bool, PeerError> {
        self.call("interrupt", json!({}))
            .await?
            .typed(Value::as_bool)
    }

    /// The thread's id in Java: the second half of `OWNER`. Answered while the thread waits, too.
    pub async fn thread_id(&self) -> Result<i64, PeerError> {
        self.call("threadId", json!({})).await?.typed(Value::as_i64)
    }

    /// `OWNER`, the field that this thread has in a lock's hash.
    pub async fn owner(&self) -> Result<String, PeerError> {
        Ok(format!("{}:{}", self.client.id, self.thread_id().await?))
    }

    /// Any command of the protocol, with the moment at which Java came back from it.
    pub async fn call(&self, op: &str, fields: Value) -> Result<Reply, PeerError> {
        let Value::Object(mut fields) = fields else {
            panic!("the fields of a command are an object")
        };
        fields.insert("client".to_owned(), self.client.name.clone().into());
        fields.insert("thread".to_owned(), self.name.clone().into());
        self.client.wire.call(op, fields, self.limit).await
    }

    async fn ask(&self, op: &str, name: &str) -> Result<Reply, PeerError> {
        self.call(op, json!({ "name": name })).await
    }
}

/// What a command came back with.
#[derive(Clone, Debug)]
pub struct Reply {
    /// The result.
    pub value: Value,
    /// When Java came back from the call: before the reply travelled, and exact to a fraction of
    /// a millisecond.
    pub at: Instant,
}

impl Reply {
    fn typed<T>(&self, read: impl Fn(&Value) -> Option<T>) -> Result<T, PeerError> {
        read(&self.value).ok_or_else(|| {
            PeerError::new(PeerError::BAD_REPLY, format!("unexpected {}", self.value))
        })
    }
}

/// One moment on both clocks. They run alike: both are the machine's monotonic clock.
#[derive(Debug)]
struct Clock {
    here: Instant,
    there: i64,
}

impl Clock {
    /// Java's reading was taken somewhere between a probe's start and its end: the middle is off
    /// by half of the quickest probe at most.
    async fn compare(wire: &Wire) {
        let mut quickest = Duration::MAX;
        for _ in 0..CLOCK_PROBES {
            let sent = Instant::now();
            let reply = wire.call("clock", Map::new(), CALL_LIMIT).await;
            let took = sent.elapsed();
            let there = reply
                .and_then(|reply| reply.typed(Value::as_i64))
                .unwrap_or_else(|error| panic!("the peer does not answer: {error}"));
            if took < quickest {
                quickest = took;
                *lock(&wire.clock) = Self {
                    here: sent + took / 2,
                    there,
                };
            }
        }
    }

    fn instant(&self, ns: i64) -> Instant {
        let apart = Duration::from_nanos(ns.abs_diff(self.there));
        if ns >= self.there {
            self.here + apart
        } else {
            self.here - apart
        }
    }
}

type Answer = oneshot::Sender<Result<Reply, PeerError>>;

/// The lines to and from the process. Replies come in any order and find their call by its id.
#[derive(Debug)]
struct Wire {
    version: String,
    stdin: Mutex<ChildStdin>,
    /// None once the process is gone.
    waiting: Mutex<Option<HashMap<u64, Answer>>>,
    next_id: AtomicU64,
    clock: Mutex<Clock>,
    /// The last lines on stderr.
    log: Mutex<VecDeque<String>>,
}

impl Wire {
    fn new(
        version: &str,
        stdin: ChildStdin,
        stdout: ChildStdout,
        stderr: ChildStderr,
    ) -> Arc<Self> {
        let wire = Arc::new(Self {
            version: version.to_owned(),
            stdin: Mutex::new(stdin),
            waiting: Mutex::new(Some(HashMap::new())),
            next_id: AtomicU64::new(1),
            // Compared right after the start.
            clock: Mutex::new(Clock {
                here: Instant::now(),
                there: 0,
            }),
            log: Mutex::new(VecDeque::new()),
        });
        // Threads and not tasks: a reply must be read while a test blocks its runtime's thread,
        // and neither pipe may fill up. Both end with the process.
        let noting = Arc::clone(&wire);
        let log = thread::spawn(move || noting.read_log(stderr));
        let reading = Arc::clone(&wire);
        thread::spawn(move || {
            reading.read_replies(stdout);
            // The calls that fail now show the last words of the process.
            let _ = log.join();
            *lock(&reading.waiting) = None;
        });
        wire
    }

    async fn call(
        &self,
        op: &str,
        mut fields: Map<String, Value>,
        limit: Duration,
    ) -> Result<Reply, PeerError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        fields.insert("id".to_owned(), id.into());
        fields.insert("op".to_owned(), op.into());
        let command = Value::Object(fields);
        let line = format!("{command}\n");

        let (answer, reply) = oneshot::channel();
        match lock(&self.waiting).as_mut() {
            Some(waiting) => waiting.insert(id, answer),
            None => return Err(self.gone(&command)),
        };
        // A failed write means that the process is ending: its end closes the channel, below.
        let _ = lock(&self.stdin).write_all(line.as_bytes());

        match time::timeout(limit, reply).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(self.gone(&command)),
            Err(_) => {
                if let Some(waiting) = lock(&self.waiting).as_mut() {
                    waiting.remove(&id);
                }
                let what = format!("no reply within {limit:?}");
                Err(PeerError::new(
                    PeerError::TIMEOUT,
                    self.report(&what, &command),
                ))
            }
        }
    }

    fn read_replies(&self, stdout: impl Read) {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let reply = serde_json::from_str(&line).unwrap_or(Value::Null);
            let answer = reply["id"]
                .as_u64()
                .and_then(|id| lock(&self.waiting).as_mut()?.remove(&id));
            match answer {
                // Nobody may be waiting any more: that is the caller's choice.
                Some(answer) => drop(answer.send(self.parse(&reply))),
                // The reply to a call that timed out; or a fault of the peer, worth seeing.
                None => self.note(format!("not waited for: {line}")),
            }
        }
    }

    fn parse(&self, reply: &Value) -> Result<Reply, PeerError> {
        let text = |name: &str| reply[name].as_str().unwrap_or_default().to_owned();
        match (reply["ok"].as_bool(), reply["ns"].as_i64()) {
            (Some(true), Some(ns)) => Ok(Reply {
                value: reply["value"].clone(),
                at: lock(&self.clock).instant(ns),
            }),
            (Some(false), _) => Err(PeerError::new(&text("error"), text("message"))),
            _ => Err(PeerError::new(PeerError::BAD_REPLY, reply.to_string())),
        }
    }

    fn read_log(&self, stderr: impl Read) {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            self.note(line);
        }
    }

    fn note(&self, line: String) {
        let mut log = lock(&self.log);
        if log.len() == LOG_LINES {
            log.pop_front();
        }
        log.push_back(line);
    }

    fn gone(&self, command: &Value) -> PeerError {
        PeerError::new(
            PeerError::GONE,
            self.report("the process has ended", command),
        )
    }

    fn report(&self, what: &str, command: &Value) -> String {
        let mut report = format!("Redisson {}: {what}, at {command}", self.version);
        for line in lock(&self.log).iter() {
            report.push_str("\n  stderr: ");
            report.push_str(line);
        }
        report
    }
}

/// The command that runs the peer, built first where needed.
fn java(version: &str) -> Result<Command, Skip> {
    let jar = script("build-peer", &[version])?;
    let home = if version == OLD_JDK_VERSION {
        Some(script("jdk11", &[])?)
    } else {
        env::var("JAVA_HOME").ok()
    };
    let mut command = Command::new(home.map_or("java".into(), |home| format!("{home}/bin/java")));
    // For a short life next to others: a quick start and few threads.
    command.args([
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-Xshare:auto",
        "-Xmx256m",
        "-jar",
        &jar,
    ]);
    Ok(command)
}

/// Runs a script of `tests/interop` and returns the line that it prints.
fn script(name: &str, args: &[&str]) -> Result<String, Skip> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/interop")
        .join(name);
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new(&path)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{} does not run: {error}", path.display()));
    let stderr = String::from_utf8_lossy(&stderr);
    match status.code() {
        Some(0) => Ok(String::from_utf8_lossy(&stdout).trim().to_owned()),
        Some(EXIT_SKIPPED) => {
            let reason = stderr.trim().lines().last().unwrap_or_default();
            Err(Skip(reason.to_owned()))
        }
        _ => panic!("{name} failed ({status}):\n{stderr}"),
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).expect("a duration of this many milliseconds")
}

/// A failed test must not turn every later call into a second panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
