//! Real Redisson for the tests: a Java process (`tests/interop/redisson-peer`) with any number of
//! Redisson clients, each with named threads. It reads one JSON command per line.
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

// Each test binary includes this module and uses a part of it.
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

/// The limit of a call, unless [`PeerThread::within`] sets another.
const CALL_LIMIT: Duration = Duration::from_secs(30);

/// How many of the last lines of the peer's stderr an error shows.
const LOG_LINES: usize = 40;

/// How often the clocks are compared at the start. The probe with the shortest round trip counts.
const CLOCK_PROBES: usize = 10;

/// The exit code of the scripts in `tests/interop` when a tool is missing.
const EXIT_SKIPPED: i32 = 3;

/// The peer cannot run, since Java or Maven is missing. The text states what to install.
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
    /// `BadCommand` for a wrong command; or a class of this side: [`PeerError::TIMEOUT`],
    /// [`PeerError::GONE`], [`PeerError::BAD_REPLY`].
    pub class: String,
    /// The exception's message.
    pub message: String,
}

impl PeerError {
    /// The class of a call without a reply in time. The Java thread may still execute it.
    pub const TIMEOUT: &str = "PeerTimeout";
    /// The class of a call to which the peer did not reply before its process ended.
    pub const GONE: &str = "PeerGone";
    /// The class of a call of a method that this version of Redisson does not have.
    pub const NO_METHOD: &str = "NoSuchMethodException";
    /// The class of a reply whose type does not fit the call.
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

/// The settings of a Redisson client. Those that are not set have Redisson's own defaults.
#[derive(Clone, Debug, Default)]
pub struct Options {
    fields: Map<String, Value>,
    settings: Map<String, Value>,
}

impl Options {
    /// Connects to a cluster. The client's URL may then be a list, separated by commas.
    pub fn cluster(mut self) -> Self {
        self.fields.insert("mode".to_owned(), "cluster".into());
        self
    }

    /// The lease of a lock that is acquired without one; a third of it is the renewal interval.
    pub fn watchdog(mut self, timeout: Duration) -> Self {
        self.fields
            .insert("watchdogMs".to_owned(), millis(timeout).into());
        self
    }

    /// The reply timeout of a command.
    pub fn timeout(self, timeout: Duration) -> Self {
        self.set("timeout", millis(timeout))
    }

    /// How often a command without a reply is sent again.
    pub fn retry_attempts(self, attempts: u32) -> Self {
        self.set("retryAttempts", attempts)
    }

    /// The number of subscriptions per connection (5 by default).
    pub fn subscriptions_per_connection(self, channels: u32) -> Self {
        self.set("subscriptionsPerConnection", channels)
    }

    /// The number of connections for subscriptions (50 by default).
    pub fn subscription_connections(self, connections: u32) -> Self {
        self.set("subscriptionConnectionPoolSize", connections)
    }

    /// The timeout of a subscription. 3.17.7 and 3.8.1 do not have it: an error.
    pub fn subscription_timeout(self, timeout: Duration) -> Self {
        self.set("subscriptionTimeout", millis(timeout))
    }

    /// `AUTO`, `ON` or `OFF`. For clusters only. Versions up to 3.27.2 do not have it: an error.
    pub fn sharded_subscription_mode(self, mode: &str) -> Self {
        self.set("shardedSubscriptionMode", mode)
    }

    /// Any setting, by Redisson's name, of the server's configuration or the common one: a number,
    /// bool, text or enum. An error if this version of Redisson does not have it.
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
    /// Builds the peer for this Redisson version if necessary, and starts it.
    ///
    /// # Panics
    ///
    /// If the build fails or the process does not reply. Only missing tools are a [`Skip`].
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
        // From here on, a panic drops the peer, which kills the process.
        let peer = Self {
            version: version.to_owned(),
            child: Mutex::new(child),
            wire,
        };
        let running = peer.wire.call("version", Map::new(), CALL_LIMIT).await;
        let running = running.unwrap_or_else(|error| panic!("the peer does not start: {error}"));
        assert_eq!(
            running.value, version,
            "the peer runs another version of Redisson"
        );
        Clock::compare(&peer.wire).await;
        Ok(peer)
    }

    /// The Redisson version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The process id, for signals such as SIGSTOP.
    pub fn pid(&self) -> u32 {
        lock(&self.child).id()
    }

    /// Opens a Redisson client. The name identifies it in the peer; Redisson's own id is
    /// [`PeerClient::id`].
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

    /// Kills the process with SIGKILL and waits for its end. Pending calls fail with
    /// [`PeerError::GONE`]. The locks that its threads hold are not renewed any more.
    pub fn kill(&self) {
        let mut child = lock(&self.child);
        // An error means that the process has ended already.
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
    /// Redisson's id of this client: the part CLIENT of `CLIENT:THREAD`.
    pub id: String,
    name: String,
    wire: Arc<Wire>,
}

impl PeerClient {
    /// A Java thread of this client; its first command creates it. The same name gives the same
    /// thread.
    pub fn thread(&self, name: &str) -> PeerThread {
        PeerThread {
            name: name.to_owned(),
            client: self.clone(),
            limit: CALL_LIMIT,
        }
    }

    /// Shuts the client down. Pending calls of its threads are interrupted; no lock is released.
    pub async fn close(&self) -> Result<(), PeerError> {
        let mut fields = Map::new();
        fields.insert("client".to_owned(), self.name.clone().into());
        self.wire.call("close", fields, CALL_LIMIT).await?;
        Ok(())
    }
}

/// A real Java thread: an owner of Redisson locks.
///
/// Its calls run one after the other, in the order of the first polls of their futures; calls of
/// different threads run concurrently. Dropping a call's future does not stop the call in Java.
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

    /// `RLock.lock()`: waits without limit; the watchdog renews the lease.
    pub async fn lock(&self, name: &str) -> Result<(), PeerError> {
        self.call("lock", json!({ "name": name })).await?;
        Ok(())
    }

    /// `RLock.lock(lease)`: waits without limit; the lease is not renewed.
    pub async fn lock_with_lease(&self, name: &str, lease: Duration) -> Result<(), PeerError> {
        let fields = json!({ "name": name, "leaseMs": millis(lease) });
        self.call("lock", fields).await?;
        Ok(())
    }

    /// `RLock.tryLock(wait)`, or `RLock.tryLock(wait, lease)`, whose lease is not renewed. The
    /// limit of the call is added to `wait`.
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

    /// `RLock.unlock()`: an `IllegalMonitorStateException` if this thread is not the owner. In
    /// 3.8.1 unlocking a free lock succeeds.
    pub async fn unlock(&self, name: &str) -> Result<(), PeerError> {
        self.call("unlock", json!({ "name": name })).await?;
        Ok(())
    }

    /// `RLock.forceUnlock()`: whether the lock was held.
    pub async fn force_unlock(&self, name: &str) -> Result<bool, PeerError> {
        self.ask("forceUnlock", name).await?.typed(Value::as_bool)
    }

    /// `RLock.isLocked()`: whether the lock is held.
    pub async fn is_locked(&self, name: &str) -> Result<bool, PeerError> {
        self.ask("isLocked", name).await?.typed(Value::as_bool)
    }

    /// `RLock.isHeldByCurrentThread()`.
    pub async fn is_held(&self, name: &str) -> Result<bool, PeerError> {
        self.ask("isHeldByCurrentThread", name)
            .await?
            .typed(Value::as_bool)
    }

    /// `RLock.isHeldByThread(id)`: whether that thread of this client holds the lock. 3.8.1 does
    /// not have the method; there the peer reads the lock's field.
    pub async fn is_held_by(&self, name: &str, thread_id: i64) -> Result<bool, PeerError> {
        let fields = json!({ "name": name, "threadId": thread_id });
        self.call("isHeldByThread", fields)
            .await?
            .typed(Value::as_bool)
    }

    /// `RLock.getHoldCount()`: the hold count of this thread.
    pub async fn hold_count(&self, name: &str) -> Result<i64, PeerError> {
        self.ask("getHoldCount", name).await?.typed(Value::as_i64)
    }

    /// `RLock.remainTimeToLive()` in ms: -2 if the lock is free, -1 without an expiry.
    pub async fn remaining_ttl(&self, name: &str) -> Result<i64, PeerError> {
        self.ask("remainTimeToLive", name)
            .await?
            .typed(Value::as_i64)
    }

    /// Increments a counter n times: lock, GET, SET, unlock. The counter is decimal text; without
    /// mutual exclusion increments are lost. Returns the value written last.
    pub async fn increment(&self, name: &str, counter: &str, n: u64) -> Result<i64, PeerError> {
        let fields = json!({ "name": name, "key": counter, "n": n });
        self.call("increment", fields).await?.typed(Value::as_i64)
    }

    /// `RFencedLock.lockAndGetToken()`, or `lockAndGetToken(lease)`. 3.17.7 and 3.8.1 do not have
    /// the lock: an error of the class [`PeerError::NO_METHOD`].
    pub async fn lock_and_get_token(
        &self,
        name: &str,
        lease: Option<Duration>,
    ) -> Result<i64, PeerError> {
        let fields = json!({ "name": name, "kind": "fenced", "leaseMs": lease.map(millis) });
        self.call("lockAndGetToken", fields)
            .await?
            .typed(Value::as_i64)
    }

    /// `RFencedLock.tryLockAndGetToken(wait, -1)`: `None` if another owner still holds the lock
    /// then. The limit of the call is added to `wait`.
    pub async fn try_lock_and_get_token(
        &self,
        name: &str,
        wait: Duration,
    ) -> Result<Option<i64>, PeerError> {
        let fields = json!({ "name": name, "kind": "fenced", "waitMs": millis(wait) });
        let reply = self
            .within(self.limit + wait)
            .call("tryLockAndGetToken", fields)
            .await?;
        match reply.value {
            Value::Null => Ok(None),
            _ => reply.typed(Value::as_i64).map(Some),
        }
    }

    /// `RFencedLock.getToken()`: the counter.
    pub async fn token(&self, name: &str) -> Result<i64, PeerError> {
        let fields = json!({ "name": name, "kind": "fenced" });
        self.call("getToken", fields).await?.typed(Value::as_i64)
    }

    /// `RFencedLock.lock(lease)`, whose token nobody asks for.
    pub async fn fenced_lock_with_lease(
        &self,
        name: &str,
        lease: Duration,
    ) -> Result<(), PeerError> {
        let fields = json!({ "name": name, "kind": "fenced", "leaseMs": millis(lease) });
        self.call("lock", fields).await?;
        Ok(())
    }

    /// `RFencedLock.unlock()`.
    pub async fn fenced_unlock(&self, name: &str) -> Result<(), PeerError> {
        let fields = json!({ "name": name, "kind": "fenced" });
        self.call("unlock", fields).await?;
        Ok(())
    }

    /// Repeats n times: lock, append the token to a list, unlock.
    pub async fn append_tokens(&self, name: &str, list: &str, n: u64) -> Result<(), PeerError> {
        let fields = json!({ "name": name, "kind": "fenced", "key": list, "n": n });
        self.call("appendTokens", fields).await?;
        Ok(())
    }

    /// Interrupts the thread's current call. A `tryLock` then fails with an `InterruptedException`.
    /// A `lock` continues to wait, except in 3.8.1, where it returns without the lock and without
    /// an error. Returns false, without effect, if the thread has no current call.
    pub async fn interrupt(&self) -> Result<bool, PeerError> {
        self.call("interrupt", json!({}))
            .await?
            .typed(Value::as_bool)
    }

    /// The thread's id in Java: the part THREAD of `CLIENT:THREAD`. Available while the thread
    /// waits, too.
    pub async fn thread_id(&self) -> Result<i64, PeerError> {
        self.call("threadId", json!({})).await?.typed(Value::as_i64)
    }

    /// The field `CLIENT:THREAD` of this thread in the hash of a lock.
    pub async fn owner(&self) -> Result<String, PeerError> {
        Ok(format!("{}:{}", self.client.id, self.thread_id().await?))
    }

    /// Any command of the protocol, with the moment at which Java completed it.
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

/// The reply to a command.
#[derive(Clone, Debug)]
pub struct Reply {
    /// The result.
    pub value: Value,
    /// When Java completed the call, before it sent the reply; exact to a fraction of a
    /// millisecond.
    pub at: Instant,
}

impl Reply {
    fn typed<T>(&self, read: impl Fn(&Value) -> Option<T>) -> Result<T, PeerError> {
        read(&self.value).ok_or_else(|| {
            PeerError::new(PeerError::BAD_REPLY, format!("unexpected {}", self.value))
        })
    }
}

/// One moment on both clocks. Both are the machine's monotonic clock, so they run at one speed.
#[derive(Debug)]
struct Clock {
    here: Instant,
    there: i64,
}

impl Clock {
    /// Java reads its clock between the start and the end of a probe. The middle of the shortest
    /// probe is taken, so the error is at most half its length.
    async fn compare(wire: &Wire) {
        let mut shortest = Duration::MAX;
        for _ in 0..CLOCK_PROBES {
            let sent = Instant::now();
            let reply = wire.call("clock", Map::new(), CALL_LIMIT).await;
            let took = sent.elapsed();
            let there = reply
                .and_then(|reply| reply.typed(Value::as_i64))
                .unwrap_or_else(|error| panic!("the peer does not reply: {error}"));
            if took < shortest {
                shortest = took;
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

/// The pipes to and from the process. Replies arrive in any order; an id assigns each to its call.
#[derive(Debug)]
struct Wire {
    version: String,
    stdin: Mutex<ChildStdin>,
    /// The pending calls; `None` after the end of the process.
    waiting: Mutex<Option<HashMap<u64, Answer>>>,
    next_id: AtomicU64,
    clock: Mutex<Clock>,
    /// The last lines of stderr.
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
            // `Clock::compare` sets it right after the start.
            clock: Mutex::new(Clock {
                here: Instant::now(),
                there: 0,
            }),
            log: Mutex::new(VecDeque::new()),
        });
        // Threads rather than tasks: replies must be read while a test blocks its runtime's thread,
        // and neither pipe may fill up. Both threads end with the process.
        let noting = Arc::clone(&wire);
        let log = thread::spawn(move || noting.read_log(stderr));
        let reading = Arc::clone(&wire);
        thread::spawn(move || {
            reading.read_replies(stdout);
            // The log is complete now, so that the errors of pending calls show its last lines.
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
        // A failed write means that the process is ending. Its end closes the channel of the call.
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
                // An error means that the caller has dropped its future.
                Some(answer) => drop(answer.send(self.parse(&reply))),
                // A reply to a call that timed out, or a defect of the peer.
                None => self.note(format!("unexpected reply: {line}")),
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

/// The command that runs the peer. Builds the peer if necessary.
fn java(version: &str) -> Result<Command, Skip> {
    let jar = script("build-peer", &[version])?;
    let home = if version == OLD_JDK_VERSION {
        Some(script("jdk11", &[])?)
    } else {
        env::var("JAVA_HOME").ok()
    };
    let mut command = Command::new(home.map_or("java".into(), |home| format!("{home}/bin/java")));
    // For a short run beside other processes: a fast start and few threads.
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

/// Locks a mutex, poisoned or not: a failed test must not make every later call panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
