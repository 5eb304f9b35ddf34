//! The fixture that the scenarios of one Redisson version share: a server, a Java process, clients
//! of both sides, and an independent connection to the server.

use std::error::Error;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, FromRedisValue};
use redisson_lock::{LockClient, LockClientBuilder};
use tokio::task::JoinHandle;

use crate::party::Party;
use crate::recorder::Snapshot;
use crate::support::java::{Options, Peer, PeerClient, Skip};
use crate::support::server::Server;

/// The limit of a step that should happen at once. It is far below the leases of the locks in
/// question (30 s and more): a handover within it is caused by the message and not by the expiry.
pub const SOON: Duration = Duration::from_secs(5);

/// The limit of a step that may take longer.
pub const LONG: Duration = Duration::from_secs(20);

/// The watchdog timeout of clients that renew or lose their locks during a scenario.
pub const SHORT_WATCHDOG: Duration = Duration::from_secs(3);

/// Why a scenario failed.
#[derive(Debug)]
pub struct Failed(pub String);

impl<E: Error> From<E> for Failed {
    fn from(error: E) -> Self {
        Self(error.to_string())
    }
}

/// Fails the scenario unless the condition holds.
macro_rules! ensure {
    ($holds:expr, $($what:tt)+) => {
        if !$holds {
            return Err($crate::fixture::Failed(format!($($what)+)));
        }
    };
}
pub(crate) use ensure;

/// The side of a scenario's first party, which holds the lock in most scenarios.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Java holds the lock, Rust wants it.
    JavaToRust,
    /// Rust holds the lock, Java wants it.
    RustToJava,
    /// Both sides do the same at once.
    Together,
}

impl Direction {
    pub fn name(self) -> &'static str {
        match self {
            Self::JavaToRust => "Java -> Rust",
            Self::RustToJava => "Rust -> Java",
            Self::Together => "together",
        }
    }
}

/// The server and the clients of the scenarios.
pub struct Fixture {
    pub version: String,
    pub server: Server,
    pub observer: Observer,
    /// The Java process that all scenarios share. A scenario that kills one starts its own.
    pub peer: Peer,
    java: Clients<PeerClient>,
    rust: Clients<LockClient>,
    threads: AtomicU64,
    /// The record of this library, for the table.
    pub record: Mutex<Vec<Snapshot>>,
}

/// The clients of one side.
struct Clients<C> {
    /// With the default watchdog timeout of 30 s.
    plain: C,
    /// With [`SHORT_WATCHDOG`].
    short: C,
}

impl Fixture {
    /// Starts everything; a [`Skip`] where Java is missing.
    pub async fn start(version: &str) -> Result<Self, Skip> {
        let peer = Peer::start(version).await?;
        let server = Server::start();
        let url = server.url();
        let open = |name, options| peer.client(name, &url, options);
        let java = Clients {
            plain: open("plain", Options::default())
                .await
                .expect("a Redisson client"),
            short: open("short", Options::default().watchdog(SHORT_WATCHDOG))
                .await
                .expect("a Redisson client"),
        };
        let rust = Clients {
            plain: rust_client(&url, |builder| builder).await,
            short: rust_client(&url, |builder| builder.watchdog_timeout(SHORT_WATCHDOG)).await,
        };
        let observer = Observer::open(&url).await;
        Ok(Self {
            version: version.to_owned(),
            server,
            observer,
            peer,
            java,
            rust,
            threads: AtomicU64::new(0),
            record: Mutex::default(),
        })
    }

    /// A first and a second party: a new Java thread and a new Rust owner, in the order of the
    /// direction.
    pub fn pair(&self, direction: Direction) -> (Party, Party) {
        self.parties(direction, &self.java.plain, &self.rust.plain)
    }

    /// As [`pair`](Self::pair), where the first party's client has the [`SHORT_WATCHDOG`].
    pub fn pair_with_short_watchdog(&self, direction: Direction) -> (Party, Party) {
        match direction {
            Direction::RustToJava => self.parties(direction, &self.java.plain, &self.rust.short),
            _ => self.parties(direction, &self.java.short, &self.rust.plain),
        }
    }

    /// All Java clients.
    pub fn java_clients(&self) -> [&PeerClient; 2] {
        [&self.java.plain, &self.java.short]
    }

    /// All Rust clients.
    pub fn rust_clients(&self) -> [&LockClient; 2] {
        [&self.rust.plain, &self.rust.short]
    }

    fn parties(
        &self,
        direction: Direction,
        java: &PeerClient,
        rust: &LockClient,
    ) -> (Party, Party) {
        let java = Party::Java(java.thread(&self.unique_name("thread")));
        let rust = Party::of(rust);
        match direction {
            Direction::JavaToRust => (java, rust),
            Direction::RustToJava => (rust, java),
            Direction::Together => unreachable!("there is no first party"),
        }
    }

    /// A name that no other scenario of this server uses.
    pub fn unique_name(&self, what: &str) -> String {
        format!("{what}:{}", self.threads.fetch_add(1, Ordering::Relaxed))
    }
}

/// A client without re-checks, so that only the message or the expiry wakes its waiters.
pub async fn rust_client(
    url: &str,
    settings: impl FnOnce(LockClientBuilder) -> LockClientBuilder,
) -> LockClient {
    let builder = LockClient::builder().recheck_interval(Duration::from_secs(3600));
    settings(builder).connect(url).await.expect("a Rust client")
}

/// An independent connection that reads the server's state.
#[derive(Clone)]
pub struct Observer(MultiplexedConnection);

impl Observer {
    pub async fn open(url: &str) -> Self {
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(Some(LONG))
            .set_connection_timeout(Some(LONG));
        let client = redis::Client::open(url).expect("the server's URL");
        Self(
            client
                .get_multiplexed_async_connection_with_config(&config)
                .await
                .expect("a connection"),
        )
    }

    /// Any command.
    pub async fn ask<T: FromRedisValue>(&self, command: &[&str]) -> Result<T, Failed> {
        let (name, args) = command.split_first().expect("a command");
        Ok(redis::cmd(name)
            .arg(args)
            .query_async(&mut self.0.clone())
            .await?)
    }

    /// A command with a key of any bytes.
    pub async fn ask_of<T: FromRedisValue>(&self, command: &str, key: &[u8]) -> Result<T, Failed> {
        Ok(redis::cmd(command)
            .arg(key)
            .query_async(&mut self.0.clone())
            .await?)
    }

    /// The owners of a lock, with their counts.
    pub async fn owners(&self, name: &str) -> Result<Vec<(String, i64)>, Failed> {
        self.ask(&["HGETALL", name]).await
    }

    pub async fn pttl(&self, name: &str) -> Result<i64, Failed> {
        self.ask(&["PTTL", name]).await
    }

    pub async fn exists(&self, name: &str) -> Result<bool, Failed> {
        self.ask(&["EXISTS", name]).await
    }

    /// How many connections subscribe to the release channel of the lock.
    pub async fn subscribers(&self, name: &str) -> Result<i64, Failed> {
        let (_, subscribers): (String, i64) =
            self.ask(&["PUBSUB", "NUMSUB", &channel(name)]).await?;
        Ok(subscribers)
    }

    /// Waits until so many connections subscribe to the release channel of the lock. Every later
    /// message reaches them all.
    pub async fn until_subscribers(&self, name: &str, wanted: i64) -> Result<(), Failed> {
        let deadline = Instant::now() + LONG;
        loop {
            let subscribers = self.subscribers(name).await?;
            if subscribers == wanted {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "{subscribers} subscribers and not {wanted} on {:?}",
                channel(name)
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Fails unless the lock has only this owner, with this count.
    pub async fn ensure_owner(&self, name: &str, owner: &Party, count: i64) -> Result<(), Failed> {
        let owners = self.owners(name).await?;
        let wanted = vec![(owner.owner().await?, count)];
        ensure!(
            owners == wanted,
            "the lock {name:?} has the owners {owners:?} and not {wanted:?}"
        );
        Ok(())
    }
}

/// The release channel of a lock, by the rule in docs/wire-format.md.
pub fn channel(name: &str) -> String {
    if name.contains('{') {
        format!("redisson_lock__channel:{name}")
    } else {
        format!("redisson_lock__channel:{{{name}}}")
    }
}

/// Work that runs at the same time as the scenario. Dropping the task cancels the work.
pub struct Task<T>(JoinHandle<Result<T, Failed>>);

impl<T: Send + 'static> Task<T> {
    pub fn start(work: impl Future<Output = Result<T, Failed>> + Send + 'static) -> Self {
        Self(tokio::spawn(work))
    }

    pub fn is_finished(&self) -> bool {
        self.0.is_finished()
    }

    /// The result of the work; fails if it does not end within the limit.
    pub async fn within(&mut self, limit: Duration, what: &str) -> Result<T, Failed> {
        match self.ends_within(limit).await {
            Some(result) => result.map_err(|Failed(why)| Failed(format!("{what}: {why}"))),
            None => Err(Failed(format!("not within {limit:?}: {what}"))),
        }
    }

    /// The result of the work, or `None` if it does not end within the limit.
    pub async fn ends_within(&mut self, limit: Duration) -> Option<Result<T, Failed>> {
        let ended = tokio::time::timeout(limit, &mut self.0).await.ok()?;
        Some(ended.unwrap_or_else(|panicked| Err(panicked.into())))
    }

    /// Cancels the work, and waits until it has ended.
    pub async fn cancel(mut self) {
        self.0.abort();
        // Whether the work had ended before does not matter.
        let _ = (&mut self.0).await;
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A task in which the party acquires the lock; its result is the moment of the acquisition.
pub fn locking(party: &Party, name: &str) -> Task<Instant> {
    let (party, name) = (party.clone(), name.to_owned());
    Task::start(async move {
        party.lock(&name).await?;
        Ok(Instant::now())
    })
}
