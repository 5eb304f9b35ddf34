//! What the scenarios of one Redisson version share: a server, a Java process, clients of both
//! sides, and an independent view of the server.

use std::error::Error;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, FromRedisValue};
use redisson_lock::{LockClient, LockClientBuilder};
use tokio::task::JoinHandle;

use crate::party::Party;
use crate::recorder::Moment;
use crate::support::java::{Options, Peer, PeerClient, Skip};
use crate::support::server::Server;

/// What is far more than anything takes that should happen at once, and far less than the 30 s and
/// more for which the locks concerned live: a handover within it came from the message and not from
/// the expiry.
pub const SOON: Duration = Duration::from_secs(5);

/// How long a condition is waited for that may take its time.
pub const LONG: Duration = Duration::from_secs(20);

/// The watchdog timeout of the clients that are to renew or to lose their locks while a scenario
/// looks on.
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
            return Err($crate::world::Failed(format!($($what)+)));
        }
    };
}
pub(crate) use ensure;

/// Which side a scenario's first party is on: the one that holds the lock, in most of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Java holds, Rust comes.
    JavaToRust,
    /// Rust holds, Java comes.
    RustToJava,
    /// All at once.
    Together,
}

impl Way {
    pub fn name(self) -> &'static str {
        match self {
            Self::JavaToRust => "Java -> Rust",
            Self::RustToJava => "Rust -> Java",
            Self::Together => "together",
        }
    }
}

/// The two ends of a scenario.
pub struct World {
    pub version: String,
    pub server: Server,
    pub view: View,
    /// The Java process that all scenarios share. Those that kill it start their own.
    pub peer: Peer,
    java: Side<PeerClient>,
    rust: Side<LockClient>,
    threads: AtomicU64,
    /// What the recorder wrote down of ours, for the table.
    pub record: Mutex<Vec<Moment>>,
}

/// The clients of one side.
struct Side<C> {
    /// With the default watchdog timeout of 30 s.
    plain: C,
    /// With [`SHORT_WATCHDOG`].
    short: C,
}

impl World {
    /// Starts everything; a [`Skip`] where Java is missing.
    pub async fn start(version: &str) -> Result<Self, Skip> {
        let peer = Peer::start(version).await?;
        let server = Server::start();
        let url = server.url();
        let open = |name, options| peer.client(name, &url, options);
        let java = Side {
            plain: open("plain", Options::default())
                .await
                .expect("a Redisson client"),
            short: open("short", Options::default().watchdog(SHORT_WATCHDOG))
                .await
                .expect("a Redisson client"),
        };
        let rust = Side {
            plain: rust_client(&url, |builder| builder).await,
            short: rust_client(&url, |builder| builder.watchdog_timeout(SHORT_WATCHDOG)).await,
        };
        let view = View::open(&url).await;
        Ok(Self {
            version: version.to_owned(),
            server,
            view,
            peer,
            java,
            rust,
            threads: AtomicU64::new(0),
            record: Mutex::default(),
        })
    }

    /// A first party, which holds, and a second, which comes: a new thread of Java, and a new owner
    /// of ours.
    pub fn pair(&self, way: Way) -> (Party, Party) {
        self.parties(way, &self.java.plain, &self.rust.plain)
    }

    /// The same, where the first party's client has the [`SHORT_WATCHDOG`].
    pub fn pair_with_short_watchdog(&self, way: Way) -> (Party, Party) {
        match way {
            Way::RustToJava => self.parties(way, &self.java.plain, &self.rust.short),
            _ => self.parties(way, &self.java.short, &self.rust.plain),
        }
    }

    /// All clients of Java's side.
    pub fn java_clients(&self) -> [&PeerClient; 2] {
        [&self.java.plain, &self.java.short]
    }

    /// All clients of ours.
    pub fn rust_clients(&self) -> [&LockClient; 2] {
        [&self.rust.plain, &self.rust.short]
    }

    fn parties(&self, way: Way, java: &PeerClient, rust: &LockClient) -> (Party, Party) {
        let java = Party::Java(java.thread(&self.fresh("thread")));
        let rust = Party::of(rust);
        match way {
            Way::JavaToRust => (java, rust),
            Way::RustToJava => (rust, java),
            Way::Together => unreachable!("no party comes first"),
        }
    }

    /// A name that no other scenario of this server uses.
    pub fn fresh(&self, what: &str) -> String {
        format!("{what}:{}", self.threads.fetch_add(1, Ordering::Relaxed))
    }
}

/// A client that does not look for lost messages, so that what wakes it is the message or the
/// expiry.
pub async fn rust_client(
    url: &str,
    settings: impl FnOnce(LockClientBuilder) -> LockClientBuilder,
) -> LockClient {
    let builder = LockClient::builder().recheck_interval(Duration::from_secs(3600));
    settings(builder)
        .connect(url)
        .await
        .expect("a client of ours")
}

/// The server as somebody sees it who uses neither library.
#[derive(Clone)]
pub struct View(MultiplexedConnection);

impl View {
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

    /// A question about a key of any bytes.
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

    /// How many clients listen for the lock's release.
    pub async fn listeners(&self, name: &str) -> Result<i64, Failed> {
        let (_, listeners): (String, i64) = self.ask(&["PUBSUB", "NUMSUB", &channel(name)]).await?;
        Ok(listeners)
    }

    /// Waits until so many clients listen for the lock's release. What is published from then on
    /// reaches them all.
    pub async fn until_listeners(&self, name: &str, wanted: i64) -> Result<(), Failed> {
        let deadline = Instant::now() + LONG;
        loop {
            let listeners = self.listeners(name).await?;
            if listeners == wanted {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "{listeners} listeners and not {wanted} on {:?}",
                channel(name)
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Fails unless the lock has just this owner, with this count.
    pub async fn ensure_owner(&self, name: &str, owner: &Party, count: i64) -> Result<(), Failed> {
        let owners = self.owners(name).await?;
        let wanted = vec![(owner.owner().await?, count)];
        ensure!(
            owners == wanted,
            "the lock {name:?} holds {owners:?} and not {wanted:?}"
        );
        Ok(())
    }
}

/// The channel of a lock's release, by the rule in docs/wire-format.md.
pub fn channel(name: &str) -> String {
    if name.contains('{') {
        format!("redisson_lock__channel:{name}")
    } else {
        format!("redisson_lock__channel:{{{name}}}")
    }
}

/// Something under way at the same time as the scenario. Dropping it drops what it does.
pub struct Task<T>(JoinHandle<Result<T, Failed>>);

impl<T: Send + 'static> Task<T> {
    pub fn start(work: impl Future<Output = Result<T, Failed>> + Send + 'static) -> Self {
        Self(tokio::spawn(work))
    }

    pub fn is_finished(&self) -> bool {
        self.0.is_finished()
    }

    /// What comes of it, if it ends within the limit.
    pub async fn within(&mut self, limit: Duration, what: &str) -> Result<T, Failed> {
        match self.ends_within(limit).await {
            Some(result) => result.map_err(|Failed(why)| Failed(format!("{what}: {why}"))),
            None => Err(Failed(format!("not within {limit:?}: {what}"))),
        }
    }

    /// The same, where it is no failure if it goes on.
    pub async fn ends_within(&mut self, limit: Duration) -> Option<Result<T, Failed>> {
        let ended = tokio::time::timeout(limit, &mut self.0).await.ok()?;
        Some(ended.unwrap_or_else(|panicked| Err(panicked.into())))
    }

    /// Stops it where it stands, and waits until it is gone.
    pub async fn cancel(mut self) {
        self.0.abort();
        // It has either ended or been cancelled; both are fine.
        let _ = (&mut self.0).await;
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A party that waits for the lock; when it has it, that moment.
pub fn locking(party: &Party, name: &str) -> Task<Instant> {
    let (party, name) = (party.clone(), name.to_owned());
    Task::start(async move {
        party.lock(&name).await?;
        Ok(Instant::now())
    })
}
