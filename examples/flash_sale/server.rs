//! The server: the one named by `REDIS_URL`, or a private one for this run.

use std::ffi::OsString;
use std::fs::File;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, RedisResult};
use tempfile::TempDir;

use crate::Failure;
use crate::shop::Keys;

/// The limit for connecting to a server.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

const NO_SERVER: &str = "\
no Redis or Valkey server was found.

    make demo                      finds or installs a server, and starts it for this run
    REDIS_URL=redis://host:port    uses a running server
    REDIS_SERVER=/path/to/binary   starts that redis-server or valkey-server for this run";

/// A connection for the sale's data.
pub async fn connect(client: &Client) -> RedisResult<MultiplexedConnection> {
    // The timeout is long for busy machines: the lock stops a buyer whose lease has expired.
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(CONNECT_LIMIT))
        .set_response_timeout(Some(Duration::from_secs(30)));
    client
        .get_multiplexed_async_connection_with_config(&config)
        .await
}

pub struct Server {
    url: String,
    prefix: String,
    description: String,
    connection: MultiplexedConnection,
    /// Dropping it stops the process.
    _private: Option<Process>,
}

impl Server {
    pub async fn from_environment() -> Result<Self, Failure> {
        match std::env::var("REDIS_URL") {
            Ok(url) if !url.is_empty() => Self::named(url).await,
            Ok(_) | Err(std::env::VarError::NotPresent) => Self::private().await,
            Err(problem) => Err(format!("REDIS_URL: {problem}").into()),
        }
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// The prefix of every key.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    pub fn keys(&self) -> Keys {
        Keys::new(&self.prefix)
    }

    pub fn connection(&self) -> MultiplexedConnection {
        self.connection.clone()
    }

    /// The server's address and version, without a password.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Removes the keys of a sale.
    pub async fn clear(&self) -> Result<(), Failure> {
        let mut connection = self.connection();
        // Repeated, since the last command of a killed worker may arrive late.
        for _ in 0..50 {
            let removed: u64 = redis::cmd("DEL")
                .arg(&self.keys().all())
                .query_async(&mut connection)
                .await?;
            if removed == 0 {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Err(format!("{} is still being written", self.keys().stock).into())
    }

    /// Connects to the server at this URL. The keys of the run have a unique prefix.
    async fn named(url: String) -> Result<Self, Failure> {
        let client =
            Client::open(url.as_str()).map_err(|problem| format!("REDIS_URL: {problem}"))?;
        let address = client.get_connection_info().addr().to_string();
        let mut connection = connect(&client)
            .await
            .map_err(|problem| format!("REDIS_URL: no connection to {address}: {problem}"))?;
        let version = Info::of(&mut connection)
            .await
            .map(|info| info.version)
            .unwrap_or_default();
        let run = uuid::Uuid::new_v4().simple().to_string();
        // The braces are a hash tag, which puts all keys of a run into one slot.
        let prefix = format!("flash_sale:{{{}}}:", &run[..8]);
        let description = format!("{address} (REDIS_URL){version}; keys {prefix}*");
        Ok(Self {
            url,
            prefix,
            description,
            connection,
            _private: None,
        })
    }

    async fn private() -> Result<Self, Failure> {
        let binary = binary().ok_or(NO_SERVER)?;
        let begun = Instant::now();
        loop {
            let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
            let mut process = Process::start(&binary, port)?;
            let url = format!("redis://127.0.0.1:{port}");
            match process.connected(&url, begun).await {
                Ok((connection, info)) => {
                    let pid = process.server.id();
                    let description =
                        format!("private, 127.0.0.1:{port}{}, pid {pid}", info.version);
                    return Ok(Self {
                        url,
                        prefix: String::new(),
                        description,
                        connection,
                        _private: Some(process),
                    });
                }
                // Another process has taken the port meanwhile.
                Err(log)
                    if log.contains("Address already in use")
                        && begun.elapsed() < CONNECT_LIMIT => {}
                Err(log) => {
                    return Err(format!("{} does not start:\n{log}", binary.display()).into());
                }
            }
        }
    }
}

/// A private server process. Dropping it kills the server and removes its folder.
struct Process {
    server: Child,
    /// Kills the server and removes its folder if this process is killed.
    watchdog: Child,
    folder: TempDir,
}

impl Process {
    fn start(binary: &Path, port: u16) -> Result<Self, Failure> {
        let folder = TempDir::with_prefix("flash_sale-")?;
        let log = File::create(folder.path().join("log"))?;
        let mut server = Command::new(binary)
            .args([
                "--bind",
                "127.0.0.1",
                "--port",
                &port.to_string(),
                "--save",
                "",
                "--appendonly",
                "no",
            ])
            .arg("--dir")
            .arg(folder.path())
            .stdin(Stdio::null())
            .stderr(log.try_clone()?)
            .stdout(log)
            // In a group of its own, since Ctrl-C must end the demo only, which stops the server.
            .process_group(0)
            .spawn()
            .map_err(|problem| format!("{} does not start: {problem}", binary.display()))?;
        // When this process ends for any reason, the pipe closes and `read` returns.
        let watchdog = Command::new("sh")
            .args([
                "-c",
                r#"trap '' INT TERM HUP; read _; kill -KILL "$0"; rm -rf "$1""#,
            ])
            .arg(server.id().to_string())
            .arg(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        match watchdog {
            Ok(watchdog) => Ok(Self {
                server,
                watchdog,
                folder,
            }),
            Err(problem) => {
                server.kill()?;
                server.wait()?;
                Err(problem.into())
            }
        }
    }

    /// Waits until the server replies, and returns a connection; or the server's log if it does
    /// not.
    async fn connected(
        &mut self,
        url: &str,
        begun: Instant,
    ) -> Result<(MultiplexedConnection, Info), String> {
        let client = Client::open(url).map_err(|problem| problem.to_string())?;
        while begun.elapsed() < CONNECT_LIMIT && matches!(self.server.try_wait(), Ok(None)) {
            if let Ok(mut connection) = connect(&client).await {
                // Another server may use this port: the process id is checked.
                if let Some(info) = Info::of(&mut connection)
                    .await
                    .filter(|info| info.pid == self.server.id())
                {
                    return Ok((connection, info));
                }
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Err(std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The watchdog first: after the server has been waited for, another process may get its id.
        for child in [&mut self.watchdog, &mut self.server] {
            // An error means that the process has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Facts from `INFO server`.
struct Info {
    /// As in `, Redis 7.0.15`.
    version: String,
    pid: u32,
}

impl Info {
    async fn of(connection: &mut MultiplexedConnection) -> Option<Self> {
        let info: String = redis::cmd("INFO")
            .arg("server")
            .query_async(connection)
            .await
            .ok()?;
        let field = |name: &str| {
            info.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        };
        let version = match (field("valkey_version"), field("redis_version")) {
            (Some(version), _) => format!(", Valkey {version}"),
            (None, Some(version)) => format!(", Redis {version}"),
            (None, None) => String::new(),
        };
        Some(Self {
            version,
            pid: field("process_id")?.parse().ok()?,
        })
    }
}

/// The server's binary: `REDIS_SERVER`, or one found in the PATH.
fn binary() -> Option<PathBuf> {
    if let Some(binary) = std::env::var_os("REDIS_SERVER").filter(|binary| !binary.is_empty()) {
        return Some(binary.into());
    }
    let path: OsString = std::env::var_os("PATH")?;
    let names = ["redis-server", "valkey-server"];
    names
        .iter()
        .flat_map(|name| std::env::split_paths(&path).map(move |folder| folder.join(name)))
        .find(|f| f.is_file())
}
