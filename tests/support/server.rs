//! Real servers for the tests: `redis-server` processes that a test can stop, kill, restart and
//! pause.

// Each test binary includes this module and uses a part of it.
#![allow(dead_code)]

use std::{
    collections::BTreeSet,
    fs::{self, File},
    hash::{BuildHasher, RandomState},
    io,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{self, Child, Command, Stdio},
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::{
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};
use tempfile::TempDir;

/// The limit for a server's first reply after its start.
const START_LIMIT: Duration = Duration::from_secs(10);

/// The time after which a server that does not stop is killed.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// The reply timeout of observing connections. With a paused server a test fails instead of
/// hanging.
const REPLY_LIMIT: Duration = Duration::from_secs(10);

/// The pause between two checks of a condition.
const POLL: Duration = Duration::from_millis(5);

/// A server for tests. Dropping it kills the process and removes its data.
#[derive(Debug)]
pub struct Server {
    url: String,
    port: u16,
    tls_port: Option<u16>,
    /// `None` for the server named by `REDIS_URL`, which the tests do not control.
    own: Option<Own>,
}

/// The process and the data of a private server.
#[derive(Debug)]
struct Own {
    dir: TempDir,
    args: Vec<String>,
    /// For a sentinel, which rewrites it.
    config: Option<String>,
    running: Option<Running>,
}

/// The settings of a private server; see [`Server::builder`].
#[derive(Debug, Default)]
pub struct Builder {
    args: Vec<String>,
    password: Option<String>,
    tls: Option<TlsFiles>,
    sentinel: Option<String>,
}

/// What a server has for TLS, as PEM text.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    pub certificate: String,
    pub key: String,
    /// The authority of the clients' certificates.
    pub ca: String,
    /// Whether clients need a certificate.
    pub asks_clients: bool,
}

impl Builder {
    /// Adds a setting, as in `.arg("--maxmemory", "10mb")`. It overrides the defaults.
    pub fn arg(mut self, name: &str, value: &str) -> Self {
        self.args.extend([name.to_owned(), value.to_owned()]);
        self
    }

    /// Keeps the data over [`Server::restart`] and [`Server::kill`]: each write is on disk before
    /// the server replies.
    pub fn persistent(self) -> Self {
        self.arg("--appendonly", "yes")
            .arg("--appendfsync", "always")
    }

    /// Requires this password. It becomes a part of the URL without encoding, so it should consist
    /// of letters and digits.
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self.arg("--requirepass", password)
    }

    /// Adds a user with these rights, in the syntax of `ACL SETUSER`. The user exists after a
    /// restart, too.
    pub fn user(mut self, name: &str, rights: &[&str]) -> Self {
        self.args.extend(
            ["--user", name]
                .iter()
                .chain(rights)
                .map(|&word| word.to_owned()),
        );
        self
    }

    /// Makes it a sentinel with this configuration.
    pub fn sentinel(mut self, config: String) -> Self {
        self.sentinel = Some(config);
        self
    }

    /// Accepts TLS connections on another port, see [`Server::tls_url`].
    pub fn tls(mut self, files: TlsFiles) -> Self {
        self.tls = Some(files);
        self
    }

    /// Starts the server and waits until it replies.
    pub fn start(self) -> Server {
        let login = self.password.map(|p| format!(":{p}@")).unwrap_or_default();
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let port = free_port();
            let dir = TempDir::with_prefix("redisson-lock-test-").expect("a temporary folder");
            let mut args = self.args.clone();
            let tls_port = self.tls.as_ref().map(|files| {
                let port = free_port();
                args.extend(files.write(port, dir.path()));
                port
            });
            let mut server = Server {
                url: format!("redis://{login}127.0.0.1:{port}"),
                port,
                tls_port,
                own: Some(Own {
                    dir,
                    args,
                    config: self.sentinel.clone(),
                    running: None,
                }),
            };
            match server.launch(deadline) {
                Ok(()) => return server,
                Err(Failure::PortTaken) if Instant::now() < deadline => {}
                Err(failure) => server.panic_with_log("start", failure),
            }
        }
    }
}

impl TlsFiles {
    /// Writes the files, and returns the arguments for the server.
    fn write(&self, port: u16, dir: &Path) -> Vec<String> {
        let file = |name: &str, text: &str| {
            let path = dir.join(name);
            fs::write(&path, text).expect("a file");
            path.to_str().expect("UTF-8").to_owned()
        };
        let asks = if self.asks_clients { "yes" } else { "no" };
        [
            ("--tls-port", port.to_string()),
            ("--tls-cert-file", file("server.pem", &self.certificate)),
            ("--tls-key-file", file("server.key", &self.key)),
            ("--tls-ca-cert-file", file("ca.pem", &self.ca)),
            ("--tls-auth-clients", asks.to_owned()),
        ]
        .into_iter()
        .flat_map(|(name, value)| [name.to_owned(), value])
        .collect()
    }
}

/// Why a server did not start.
#[derive(Debug)]
enum Failure {
    /// Another process used the port.
    PortTaken,
    /// The process ended.
    Ended,
    /// The process did not reply in time.
    NoReply,
}

impl Server {
    /// Starts a private server without persistence.
    pub fn start() -> Self {
        Self::builder().start()
    }

    /// Settings for a private server.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The server named by `REDIS_URL`, or a private one if it is not set.
    ///
    /// For tests that use names of their own only (see [`unique`]) and do not affect other clients.
    /// On a server named by `REDIS_URL`, each method that acts on the process panics.
    pub fn shared_or_start() -> Self {
        let Some(url) = std::env::var("REDIS_URL")
            .ok()
            .filter(|url| !url.is_empty())
        else {
            return Self::start();
        };
        let parsed = url::Url::parse(&url).expect("REDIS_URL is a URL");
        Self {
            port: parsed.port().unwrap_or(6379),
            url,
            tls_port: None,
            own: None,
        }
    }

    /// The URL for clients. It stays the same across restarts.
    pub fn url(&self) -> String {
        self.url.clone()
    }

    /// The URL of the TLS port, with this host.
    #[track_caller]
    pub fn tls_url(&self, host: &str) -> String {
        let port = self.tls_port.expect("a server with TLS");
        format!("rediss://{host}:{port}")
    }

    /// The port, on 127.0.0.1 for a private server. It stays the same across restarts.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// A new connection of an independent client, to observe the effects of the library.
    #[track_caller]
    pub fn connection(&self) -> redis::Connection {
        self.connect()
            .unwrap_or_else(|error| panic!("no connection to {}: {error}", self.url))
    }

    /// Stops the server with SIGTERM, and waits for its end.
    #[track_caller]
    pub fn stop(&mut self) {
        if let Some(running) = self.own_mut("stop").running.take() {
            running.terminate();
        }
    }

    /// Kills the server with SIGKILL, and waits for its end.
    #[track_caller]
    pub fn kill(&mut self) {
        // Dropping `Running` kills the process.
        self.own_mut("kill").running.take();
    }

    /// Stops the server if it runs, starts it on the same port, and waits until it replies. It has
    /// its data again only if it is [persistent](Builder::persistent).
    #[track_caller]
    pub fn restart(&mut self) {
        self.stop();
        let deadline = Instant::now() + START_LIMIT;
        loop {
            match self.launch(deadline) {
                Ok(()) => return,
                // A short-lived connection, or another server that searches for a free port.
                Err(Failure::PortTaken) if Instant::now() < deadline => thread::sleep(POLL),
                Err(failure) => self.panic_with_log("restart", failure),
            }
        }
    }

    /// Stops the process with SIGSTOP, and waits until it has stopped. Its connections stay open;
    /// it sends no replies.
    #[track_caller]
    pub fn pause(&self) {
        let pid = self.running("pause").pid();
        kill(pid, Signal::SIGSTOP).expect("SIGSTOP");
        let status = waitpid(pid, Some(WaitPidFlag::WUNTRACED));
        assert!(
            matches!(status, Ok(WaitStatus::Stopped(..))),
            "the server ended instead of pausing: {status:?}\n{}",
            self.log()
        );
    }

    /// Continues a paused server.
    #[track_caller]
    pub fn resume(&self) {
        kill(self.running("resume").pid(), Signal::SIGCONT).expect("SIGCONT");
    }

    /// The server's log, restarts included.
    #[track_caller]
    pub fn log(&self) -> String {
        let log = log_file(&self.own("log").dir);
        String::from_utf8_lossy(&fs::read(log).unwrap_or_default()).into_owned()
    }

    /// Starts the process and waits until it replies.
    fn launch(&mut self, deadline: Instant) -> Result<(), Failure> {
        let port = self.port.to_string();
        let logged = self.log().len();
        let own = self.own_mut("launch");
        own.running = Some(Running::spawn(&port, own));
        loop {
            if self.replies() {
                return Ok(());
            }
            let failure = if self.own_mut("launch").has_ended() {
                if self.log()[logged..].contains("Address already in use") {
                    Failure::PortTaken
                } else {
                    Failure::Ended
                }
            } else if Instant::now() > deadline {
                Failure::NoReply
            } else {
                thread::sleep(POLL);
                continue;
            };
            self.kill();
            return Err(failure);
        }
    }

    /// Whether the process replies. Its id is checked, since another server may use the port.
    fn replies(&self) -> bool {
        let pid = format!("process_id:{}\r", self.running("replies").pid());
        let ask = || -> redis::RedisResult<String> {
            let mut connection = self.connect()?;
            // While the server loads its data, PING fails; INFO does not.
            redis::cmd("PING").exec(&mut connection)?;
            let info = redis::cmd("INFO").arg("server").query(&mut connection)?;
            // Until the server has closed the connection: a test may count the connections next.
            while redis::cmd("QUIT").exec(&mut connection).is_ok() {}
            Ok(info)
        };
        ask().is_ok_and(|info| info.contains(&pid))
    }

    fn connect(&self) -> redis::RedisResult<redis::Connection> {
        let client = redis::Client::open(self.url.as_str())?;
        // A signal to this process may interrupt the system call.
        let is_interrupted =
            |error: &redis::RedisError| error.to_string().contains("Interrupted system call");
        let connection = loop {
            match client.get_connection_with_timeout(REPLY_LIMIT) {
                Err(error) if is_interrupted(&error) => {}
                connected => break connected?,
            }
        };
        connection.set_read_timeout(Some(REPLY_LIMIT))?;
        connection.set_write_timeout(Some(REPLY_LIMIT))?;
        Ok(connection)
    }

    #[track_caller]
    fn own(&self, what: &str) -> &Own {
        self.own.as_ref().unwrap_or_else(|| not_owned(what))
    }

    #[track_caller]
    fn own_mut(&mut self, what: &str) -> &mut Own {
        self.own.as_mut().unwrap_or_else(|| not_owned(what))
    }

    #[track_caller]
    fn running(&self, what: &str) -> &Running {
        let running = self.own(what).running.as_ref();
        running.unwrap_or_else(|| panic!("{what}: the server is stopped"))
    }

    #[track_caller]
    fn panic_with_log(&self, what: &str, failure: Failure) -> ! {
        panic!(
            "the server on port {} did not {what}: {failure:?}; its log:\n{}",
            self.port,
            self.log()
        )
    }
}

#[track_caller]
fn not_owned(what: &str) -> ! {
    panic!("{what}: not on the server named by REDIS_URL; this test needs Server::start()")
}

impl Own {
    fn has_ended(&mut self) -> bool {
        let Some(running) = &mut self.running else {
            return true;
        };
        running.server.try_wait().expect("the state").is_some()
    }
}

/// The process of a server. Dropping it kills the process and waits for its end.
#[derive(Debug)]
struct Running {
    server: Child,
    watchdog: Child,
}

impl Running {
    fn spawn(port: &str, own: &Own) -> Self {
        let dir = &own.dir;
        let log = File::options()
            .create(true)
            .append(true)
            .open(log_file(dir))
            .expect("a log file");
        let mut command = Command::new(binary());
        let address = ["--bind", "127.0.0.1", "--port", port];
        match &own.config {
            None => command
                .args(address)
                .args(["--save", "", "--appendonly", "no"]),
            Some(config) => {
                let file = dir.path().join("sentinel.conf");
                if !file.exists() {
                    fs::write(&file, config).expect("a file");
                }
                command.arg(file).arg("--sentinel").args(address)
            }
        };
        let server = command
            .arg("--dir")
            .arg(dir.path())
            .args(&own.args)
            .stdin(Stdio::null())
            .stderr(log.try_clone().expect("a second handle of the log file"))
            .stdout(log)
            .spawn()
            .unwrap_or_else(|error| panic!("{} does not start: {error}", binary().display()));
        // Kills the server and removes its data if this process ends without dropping the server:
        // because it is killed, or because the server is in a static. Then the pipe closes, and
        // `read` returns.
        let watchdog = Command::new("sh")
            .arg("-c")
            .arg(r#"trap '' INT TERM HUP; read _; kill -KILL "$0"; rm -rf "$1""#)
            .arg(server.id().to_string())
            .arg(dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("sh starts");
        Self { server, watchdog }
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.server.id().try_into().expect("a process id"))
    }

    /// Sends SIGTERM, and waits for the end of the process for at most [`STOP_LIMIT`].
    fn terminate(mut self) {
        // A paused server does not handle SIGTERM before it is continued.
        for signal in [Signal::SIGTERM, Signal::SIGCONT] {
            kill(self.pid(), signal).expect("a signal");
        }
        let deadline = Instant::now() + STOP_LIMIT;
        while self.server.try_wait().expect("the state").is_none() && Instant::now() < deadline {
            thread::sleep(POLL);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The watchdog first: after the server has been waited for, another process may get its id.
        for child in [&mut self.watchdog, &mut self.server] {
            // An error means that the process has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn log_file(dir: &TempDir) -> PathBuf {
    dir.path().join("log")
}

/// The server's binary: `REDIS_SERVER`, or the one that the project's script finds or installs.
fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(path) = std::env::var_os("REDIS_SERVER") {
            return path.into();
        }
        // Packages in different folders of the workspace use this file.
        let roots = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
        let mut scripts = roots.map(|root| root.join(".ci/redis-server"));
        let script = scripts
            .find(|script| script.is_file())
            .expect("the script .ci/redis-server");
        let output = Command::new("bash")
            .arg(&script)
            .stdin(Stdio::null())
            .output()
            .unwrap_or_else(|error| panic!("bash {}: {error}", script.display()));
        assert!(
            output.status.success(),
            "bash {}: {}",
            script.display(),
            String::from_utf8_lossy(&output.stderr)
        );
        let path = String::from_utf8(output.stdout).expect("a path in UTF-8");
        path.trim_end().into()
    })
}

/// A free port.
///
/// It is below the range from which systems take the ports of outgoing connections. Otherwise a
/// client that reconnects to a stopped server could get the port that the server needs for its
/// restart. A test binary never uses a port twice: the client of another test may still try to
/// reach the server that was there.
fn free_port() -> u16 {
    static USED: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    loop {
        let random = RandomState::new().hash_one(process::id());
        let port = 20_000 + (random % 12_000) as u16;
        if !USED.lock().expect("no panic").insert(port) {
            continue;
        }
        match TcpListener::bind(("127.0.0.1", port)) {
            Ok(_) => return port,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => panic!("no port can be bound on 127.0.0.1: {error}"),
        }
    }
}

/// A name that no other test uses, in this process, another process, or an earlier run.
pub fn unique(prefix: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    static RUN: OnceLock<u64> = OnceLock::new();
    let run = RUN.get_or_init(|| RandomState::new().hash_one(process::id()));
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{prefix}-{run:016x}-{count}")
}

/// Waits until a condition holds. Panics with `what` if it does not hold within `limit`.
#[track_caller]
pub fn wait_until(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    let mut patience = Patience::new(limit);
    while !condition() {
        assert!(patience.is_left(), "not within {limit:?}: {what}");
        thread::sleep(POLL);
    }
}

/// As [`wait_until`], for an async condition, without blocking the runtime. A condition that does
/// not complete counts as one that does not hold.
pub async fn wait_until_async<F>(what: &str, limit: Duration, mut condition: impl FnMut() -> F)
where
    F: Future<Output = bool>,
{
    let mut patience = Patience::new(limit);
    loop {
        match tokio::time::timeout(limit, condition()).await {
            Ok(true) => return,
            Ok(false) if patience.is_left() => tokio::time::sleep(POLL).await,
            _ => panic!("not within {limit:?}: {what}"),
        }
    }
}

/// A limit that counts only time in which this process ran: when a busy or suspended machine stops
/// it, what is waited for has stopped, too.
pub struct Patience {
    left: Duration,
    asked: Instant,
}

impl Patience {
    pub fn new(limit: Duration) -> Self {
        Self {
            left: limit,
            asked: Instant::now(),
        }
    }

    /// Whether there is time left. Time without a call counts as 100 ms at most.
    pub fn is_left(&mut self) -> bool {
        let now = Instant::now();
        let passed = (now - self.asked).min(Duration::from_millis(100));
        self.asked = now;
        self.left = self.left.saturating_sub(passed);
        !self.left.is_zero()
    }
}
