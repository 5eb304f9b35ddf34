//! The client: the only way in, its builder and its end.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use crate::config::{Config, DeadlockDetection, LeaseTime, bounded};
use crate::driver::{self, Driver, Ended, Work};
use crate::engine::{self, Engine, Outcome};
use crate::error::Error;
use crate::handle::{Handle, failed};
use crate::link::{CallLink, Limit, Login, PubSub, Settings};
use crate::lock::handle::{FencedLock, ReentrantLock, SimpleLock};
use crate::owner::{ClientId, Owner, OwnerPolicy};
use crate::script::catalog;
use crate::stats::Stats;

const HOUR: Duration = Duration::from_secs(3600);

/// A connection to the server that keeps the locks, and the identity under which they are held.
///
/// Cheap to clone; all clones are one client. One client per process is enough: it has two
/// connections, one for calls and one for wake-ups, whatever the number of locks and requests.
///
/// ```no_run
/// # #[tokio::main] async fn main() -> Result<(), redisson_lock::Error> {
/// use redisson_lock::LockClient;
///
/// let client = LockClient::connect("redis://127.0.0.1:6379").await?;
/// client.lock("order:42").run(async { /* no other owner is here */ }).await?;
/// client.shutdown().await
/// # }
/// ```
///
/// # Runtime
///
/// The connections and the watchdog run on a thread of the client. Locks, requests and guards can
/// be used from any runtime, thread or executor, and code that blocks a thread of a runtime delays
/// no renewal. A client in a `static` serves several runtimes, as `#[tokio::test]` makes them.
///
/// When the last clone, lock and guard are dropped, the client completes its pending releases and
/// ends; [`shutdown`](Self::shutdown) does that at a moment of your choice, and waits. Call it
/// before the process ends: a release that is pending then is not sent, and the lock stays held
/// until its lease expires.
#[derive(Clone)]
pub struct LockClient {
    handle: Arc<Handle>,
    ended: Ended,
}

impl LockClient {
    /// Connects with the default settings to `redis://[user[:password]@]host[:port][/database]`.
    /// `valkey://` means the same. The default port is 6379, the default database 0.
    ///
    /// Characters of the user and the password that have a meaning in URLs (`/ ? # % @ :`) are
    /// percent-encoded.
    ///
    /// # Errors
    /// * [`Error::InvalidConfig`]: the URL is invalid. No message repeats it, since it may contain
    ///   a password.
    /// * [`Error::Connection`], [`Error::Timeout`] with [`Step::Connect`](crate::Step::Connect):
    ///   the server cannot be reached. [`LockClientBuilder::connect_retry`] waits for it.
    /// * [`Error::Server`]: the server refused the user, the password or the database. With a
    ///   number other than 0 the user needs the right to `SELECT`.
    /// * [`Error::UnsupportedServer`]: the server is a cluster or a sentinel, or too old.
    ///
    /// # Cancel safety
    /// Dropping it closes what was opened.
    pub async fn connect(url: &str) -> Result<Self, Error> {
        Self::builder().connect(url).await
    }

    /// Settings to change before connecting.
    pub fn builder() -> LockClientBuilder {
        LockClientBuilder::default()
    }

    /// The reentrant lock of that name: 1 to [`MAX_NAME_LEN`](crate::MAX_NAME_LEN) bytes.
    ///
    /// It sends nothing, and nothing has to be cleaned up. An invalid name is refused by the lock's
    /// first operation.
    #[must_use]
    pub fn lock(&self, name: impl AsRef<str>) -> ReentrantLock {
        ReentrantLock::new(Arc::clone(&self.handle), name.as_ref())
    }

    /// The fenced lock of that name, whose guards have a token: 1 to
    /// [`MAX_NAME_LEN`](crate::MAX_NAME_LEN) bytes. As [`lock`](Self::lock), it sends nothing.
    ///
    /// ```no_run
    /// # async fn example(client: redisson_lock::LockClient) -> Result<(), redisson_lock::Error> {
    /// let guard = client.fenced_lock("report:7").lock().await?;
    /// println!("token {}", guard.token());
    /// guard.unlock().await
    /// # }
    /// ```
    #[must_use]
    pub fn fenced_lock(&self, name: impl AsRef<str>) -> FencedLock {
        FencedLock::new(Arc::clone(&self.handle), name.as_ref())
    }

    /// The simple lock under that key, which is not reentrant: 1 to
    /// [`MAX_NAME_LEN`](crate::MAX_NAME_LEN) bytes. As [`lock`](Self::lock), it sends nothing.
    ///
    /// ```no_run
    /// # async fn example(client: redisson_lock::LockClient) -> Result<(), redisson_lock::Error> {
    /// client.simple_lock("nightly").try_run(async { /* the job */ }).await?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn simple_lock(&self, name: impl AsRef<str>) -> SimpleLock {
        SimpleLock::new(Arc::clone(&self.handle), name.as_ref())
    }

    /// The id that is CLIENT in the field `CLIENT:THREAD` on the wire.
    #[must_use]
    pub fn client_id(&self) -> ClientId {
        self.handle.client_id
    }

    /// The owner under which an acquisition here and now would hold the lock: the one of the
    /// surrounding scope, or the task's own under [`OwnerPolicy::PerTask`]. `None`: each
    /// acquisition gets an owner of its own.
    ///
    /// ```no_run
    /// # async fn example(client: redisson_lock::LockClient) -> Result<(), redisson_lock::Error> {
    /// let lock = client.lock("order:42");
    /// lock.run(async {
    ///     let owner = client.current_owner().expect("inside run there is one");
    ///     lock.is_held_by(owner).await
    /// })
    /// .await??;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn current_owner(&self) -> Option<Owner> {
        self.handle.owner_policy.current()
    }

    /// What the client holds now and has done since it connected. It reads counters only, so it is
    /// cheap, and it works after [`shutdown`](Self::shutdown) too.
    ///
    /// ```no_run
    /// # fn example(client: &redisson_lock::LockClient) {
    /// let stats = client.stats();
    /// println!("locks_held {}", stats.locks_held);
    /// println!("losses_expired_total {}", stats.losses.expired);
    /// # }
    /// ```
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.handle.driver.stats()
    }

    /// Ends the client. Waiting requests fail with [`Error::Closed`], pending releases are
    /// completed, tasks end and connections are closed.
    ///
    /// Locks that are still held are lost with
    /// [`LostReason::Shutdown`](crate::LostReason::Shutdown). Their keys stay, so that no other
    /// owner gets the lock while code under it may still run, until their guards are dropped
    /// (within the retry timeout) or their leases expire: drop guards before shutting down.
    ///
    /// Calling it again does nothing.
    ///
    /// # Errors
    /// [`Error::Timeout`] with [`Step::Shutdown`](crate::Step::Shutdown): releases still had no
    /// reply after the retry timeout. The client has ended all the same, and what was not released
    /// expires with its lease.
    ///
    /// # Cancel safety
    /// Dropped half-way, the client ends all the same. It can be called again.
    pub async fn shutdown(&self) -> Result<(), Error> {
        let driver = &self.handle.driver;
        let outcome = driver
            .submit(|engine, now| engine.close(now))
            .outcome()
            .await;
        if driver.apply(|engine, _| engine.has_ended()) != Some(false) {
            // The thread closes the connections, with limits of its own.
            let mut ended = self.ended.clone();
            let _ = ended.wait_for(|ended| *ended).await;
        }
        match outcome {
            Outcome::Done => Ok(()),
            outcome => Err(failed(outcome)),
        }
    }
}

impl fmt::Debug for LockClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockClient")
            .field("client_id", &self.handle.client_id)
            .finish_non_exhaustive()
    }
}

/// Settings of a [`LockClient`]. Each states its default; [`connect`](Self::connect) refuses a
/// value out of bounds before anything is sent.
///
/// ```no_run
/// # async fn example() -> Result<(), redisson_lock::Error> {
/// use redisson_lock::{DeadlockDetection, LockClient};
/// use std::time::Duration;
///
/// let client = LockClient::builder()
///     .client_name("checkout")
///     .watchdog_timeout(Duration::from_secs(15))
///     .deadlock_detection(DeadlockDetection::Fail)
///     .connect_retry(Duration::from_secs(60))
///     .connect("redis://127.0.0.1:6379")
///     .await?;
/// # drop(client);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default)]
#[must_use = "settings do nothing until connect is called"]
pub struct LockClientBuilder {
    client_id: Option<ClientId>,
    client_name: Option<String>,
    owner_policy: OwnerPolicy,
    deadlock_detection: DeadlockDetection,
    passing_time: Option<Duration>,
    watchdog_timeout: Option<Duration>,
    recheck_interval: Option<Duration>,
    retry_timeout: Option<Duration>,
    #[cfg(feature = "tls")]
    tls: Option<crate::tls::Tls>,
    sentinel_login: Option<Login>,
    connect_timeout: Option<Duration>,
    connect_retry: Duration,
    command_timeout: Option<Duration>,
    renewal_batch_size: Option<usize>,
}

impl LockClientBuilder {
    /// The lease of a lock that is acquired without one; it is renewed every third of it. Default
    /// 30 s; 50 ms to 3650 days.
    ///
    /// It is how long others wait when this process dies, and how long this process may be cut off
    /// from the server before its locks are lost (Redisson's `lockWatchdogTimeout`).
    pub fn watchdog_timeout(mut self, timeout: Duration) -> Self {
        self.watchdog_timeout = Some(timeout);
        self
    }

    /// The id under which locks are held. Default: a random one.
    ///
    /// With the id of another client, this one can release and re-enter that client's locks, with
    /// [`Owner::from_thread_id`]. It is for handing locks over: never give one id to two clients
    /// that work at the same time. Neither of them follows the hold counts of the other, so a
    /// release by one may release the other's hold.
    ///
    /// The client that hands a lock over acquires it by [`Owner::from_thread_id`], too: by another
    /// owner the lock may have been [passed on](Self::passing_time), and then the server has it in
    /// the name of an earlier owner.
    pub fn client_id(mut self, id: ClientId) -> Self {
        self.client_id = Some(id);
        self
    }

    /// The name that the connections have in `CLIENT LIST`, followed by `:` and the client id.
    /// Default `redisson-lock`; 1 to 64 printable ASCII characters without spaces
    /// (<https://redis.io/docs/latest/commands/client-setname/>).
    ///
    /// The owner in a lock's key begins with the client id, so `CLIENT LIST` shows which process
    /// holds a lock, and at which address it runs.
    pub fn client_name(mut self, name: impl Into<String>) -> Self {
        self.client_name = Some(name.into());
        self
    }

    /// The owner of an acquisition outside any [`Owner`] scope. Default
    /// [`OwnerPolicy::PerAcquisition`].
    pub fn owner_policy(mut self, policy: OwnerPolicy) -> Self {
        self.owner_policy = policy;
        self
    }

    /// What happens when a task waits for a lock that it holds itself under another owner. Default
    /// [`DeadlockDetection::Warn`].
    pub fn deadlock_detection(mut self, detection: DeadlockDetection) -> Self {
        self.deadlock_detection = detection;
        self
    }

    /// For how long a lock is passed on inside this client before it is released on the server.
    /// Default 10 ms; at most 10 s, and 0 means never.
    ///
    /// A lock that is released while another request of this client waits for it goes to that
    /// request at once, under the lease that is already proved. The server still names the first
    /// owner. So many tasks of one process that want one lock need few script calls. Other clients
    /// wait for the lock for so much longer. Only holds that the watchdog renews are passed on,
    /// between owners of this client alone, and no fenced locks.
    pub fn passing_time(mut self, longest: Duration) -> Self {
        self.passing_time = Some(longest);
        self
    }

    /// How long a waiter sleeps at most before it makes another attempt, should a wake-up be lost.
    /// 10 ms to 1 h. Default: 1 s while the subscription to the lock's channel is not confirmed, 15
    /// to 30 s while it is (longer while this process waits for more than 2000 locks), and in any
    /// case when the lease of the present owner ends.
    ///
    /// It costs one attempt per interval for each lock that is waited for in this process, however
    /// many requests wait for it.
    pub fn recheck_interval(mut self, interval: Duration) -> Self {
        self.recheck_interval = Some(interval);
        self
    }

    /// How long an operation tries while the server cannot be reached, does not answer, or refuses
    /// with a [transient](crate::ServerError::is_transient) error: it is starting, busy with a
    /// script, or not the master. Default 10 s; 0 to 1 h.
    ///
    /// The limit is the larger of this timeout and [`command_timeout`](Self::command_timeout): the
    /// first reply is always waited for, so 0 means one attempt. A request with a timeout of its
    /// own that is shorter tries for that time, but for at least the command timeout. A release
    /// that is not done by then is continued in the background.
    ///
    /// It does not limit the waiting for a lock that another owner holds.
    pub fn retry_timeout(mut self, timeout: Duration) -> Self {
        self.retry_timeout = Some(timeout);
        self
    }

    /// How long one attempt to connect may take. Default 5 s; 1 ms to 1 h.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = Some(timeout);
        self
    }

    /// How long [`connect`](Self::connect) tries again while the server cannot be reached or is
    /// starting, so that a service can start before its server. Default 0: one attempt; at most
    /// 3650 days.
    ///
    /// A server that refuses the user, or that is not supported, is an error at once.
    pub fn connect_retry(mut self, limit: Duration) -> Self {
        self.connect_retry = limit;
        self
    }

    /// How long a reply may take before the connection is replaced. Default 3 s, or a third of the
    /// watchdog timeout if that is less; 10 ms to 1 h, and at most a third of the watchdog timeout:
    /// a longer one would let one silent connection cost every lock.
    ///
    /// The default grows while replies are late, up to two thirds of the watchdog timeout and 3 s,
    /// until a reply takes less than half of it: otherwise each connection would be given up before
    /// its first reply. A timeout that is set stays as it is.
    pub fn command_timeout(mut self, timeout: Duration) -> Self {
        self.command_timeout = Some(timeout);
        self
    }

    /// How many locks one renewal script renews at most. Default 100 (Redisson's
    /// `lockWatchdogBatchSize`); 1 to 1000.
    pub fn renewal_batch_size(mut self, locks: usize) -> Self {
        self.renewal_batch_size = Some(locks);
        self
    }

    /// How TLS connections are made. Default: with the system's root certificates. Needs the
    /// feature `tls`, and a URL that begins with `rediss://` or `valkeys://`.
    #[cfg(feature = "tls")]
    pub fn tls(mut self, tls: crate::tls::Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// User and password at the sentinels; the user is `default` where only a password was set.
    /// Default: none. Those of the URL are for the servers.
    pub fn sentinel_login(mut self, user: impl Into<String>, password: impl Into<String>) -> Self {
        let (user, password) = (user.into(), password.into());
        self.sentinel_login = Some(Login { user, password });
        self
    }

    /// Connects to `redis://[user[:password]@]host[:port][/database]`; `valkey://` means the same,
    /// and `rediss://` and `valkeys://` mean the same with TLS (feature `tls`).
    ///
    /// # Errors
    /// As [`LockClient::connect`]; [`Error::InvalidConfig`] also for a setting out of bounds.
    ///
    /// # Cancel safety
    /// Dropping it closes what was opened.
    pub async fn connect(self, url: &str) -> Result<LockClient, Error> {
        let config = self.config()?;
        let client_id = self.client_id.unwrap_or_else(ClientId::random);
        let name = self.client_name.as_deref().unwrap_or("redisson-lock");
        let settings = Settings::parse(
            url,
            format!("{name}:{client_id}"),
            config.connect_timeout,
            Limit::new(config.command_timeout, config.longest_reply).into(),
        )?
        .with_sentinel_login(self.sentinel_login.as_ref())?;
        let (owner_policy, retry) = (self.owner_policy, self.connect_retry);
        #[cfg(feature = "tls")]
        let tls = self.tls;
        let open = async move || {
            #[cfg(feature = "tls")]
            let settings = settings.secured(tls)?;
            let (driver, work) = open_in_time(config, settings, client_id, retry).await?;
            let handle = Handle {
                driver,
                client_id,
                owner_policy,
            };
            Ok((Arc::new(handle), work))
        };
        let (handle, ended) = driver::start(open).await?;
        Ok(LockClient { handle, ended })
    }

    fn config(&self) -> Result<Config, Error> {
        if let Some(name) = &self.client_name {
            let printable = name.bytes().all(|byte| byte.is_ascii_graphic());
            if !printable || !(1..=64).contains(&name.len()) {
                return Err(Error::InvalidConfig {
                    setting: "client name",
                    problem: format!("{name:?} is empty, too long, or has other characters"),
                    allowed: "1 to 64 printable ASCII characters without spaces",
                });
            }
        }
        let _ = bounded(
            "connect retry limit",
            self.connect_retry,
            Duration::ZERO..=Duration::from_secs(3650 * 24 * 3600),
            "0 to 3650 days",
        )?;
        let default = Config::default();
        let watchdog = self
            .watchdog_timeout
            .unwrap_or(default.watchdog_timeout.duration());
        if watchdog < Duration::from_millis(50) {
            return Err(Error::InvalidConfig {
                setting: "watchdog timeout",
                problem: format!("{watchdog:?} is too short to be renewed in time"),
                allowed: "50 ms to 3650 days",
            });
        }
        let watchdog_timeout = LeaseTime::new(watchdog).map_err(|_| Error::InvalidConfig {
            setting: "watchdog timeout",
            problem: format!("{watchdog:?} is too long"),
            allowed: "50 ms to 3650 days",
        })?;
        let renewal_batch = self.renewal_batch_size.unwrap_or(default.renewal_batch);
        if !(1..=1000).contains(&renewal_batch) {
            return Err(Error::InvalidConfig {
                setting: "renewal batch size",
                problem: format!("{renewal_batch} is out of bounds"),
                allowed: "1 to 1000",
            });
        }
        let ms = Duration::from_millis;
        Ok(Config {
            watchdog_timeout,
            recheck_interval: self
                .recheck_interval
                .map(|interval| {
                    bounded("recheck interval", interval, ms(10)..=HOUR, "10 ms to 1 h")
                })
                .transpose()?,
            retry_timeout: bounded(
                "retry timeout",
                self.retry_timeout.unwrap_or(default.retry_timeout),
                Duration::ZERO..=HOUR,
                "0 to 1 h",
            )?,
            connect_timeout: bounded(
                "connect timeout",
                self.connect_timeout.unwrap_or(default.connect_timeout),
                ms(1)..=HOUR,
                "1 ms to 1 h",
            )?,
            command_timeout: self.checked_command_timeout(watchdog)?,
            longest_reply: self.longest_reply(watchdog),
            renewal_batch,
            deadlock_detection: self.deadlock_detection,
            passing_time: bounded(
                "passing time",
                self.passing_time.unwrap_or(default.passing_time),
                Duration::ZERO..=Duration::from_secs(10),
                "0 to 10 s",
            )?,
        })
    }
}

impl LockClientBuilder {
    /// A limit that follows from a short watchdog timeout grows where replies take longer, up to
    /// what is left of a lease when it is renewed.
    fn longest_reply(&self, watchdog: Duration) -> Duration {
        let left = watchdog * 2 / 3;
        let longest = left.min(Config::default().command_timeout);
        self.command_timeout.unwrap_or(longest)
    }

    /// A reply may take no longer than a renewal is due before the lease ends: otherwise one silent
    /// connection costs every lock.
    fn checked_command_timeout(&self, watchdog: Duration) -> Result<Duration, Error> {
        let shortest = Duration::from_millis(10);
        let third = (watchdog / 3).max(shortest);
        let Some(timeout) = self.command_timeout else {
            return Ok(Config::default().command_timeout.min(third));
        };
        let timeout = bounded("command timeout", timeout, shortest..=HOUR, "10 ms to 1 h")?;
        if timeout > third {
            return Err(Error::InvalidConfig {
                setting: "command timeout",
                problem: format!(
                    "{timeout:?} is more than a third of the watchdog timeout, {watchdog:?}"
                ),
                allowed: "10 ms to 1 h, and at most a third of the watchdog timeout",
            });
        }
        Ok(timeout)
    }
}

/// Opens the connections, and tries for so long while the server cannot be reached or is starting.
async fn open_in_time(
    config: Config,
    settings: Settings,
    client_id: ClientId,
    retry: Duration,
) -> Result<(Arc<Driver>, Work<CallLink, PubSub>), Error> {
    const LONGEST: Duration = Duration::from_millis(250);
    let begun = Instant::now();
    let mut pause = Duration::from_millis(10);
    let mut is_logged = false;
    loop {
        let opening = open(&config, &settings, client_id);
        let error = match tokio::time::timeout(config.connect_timeout, opening).await {
            Ok(Ok(opened)) => {
                if is_logged {
                    let (address, outage) = (settings.address(), begun.elapsed());
                    tracing::info!(%address, ?outage, "the server is connected");
                }
                return Ok(opened);
            }
            Ok(Err(error)) => error,
            Err(_) => settings.connect_timed_out(),
        };
        if !error.is_retryable() || begun.elapsed() + pause > retry {
            return Err(error);
        }
        if !std::mem::replace(&mut is_logged, true) {
            tracing::warn!(%error, "the server cannot be reached, connecting is tried again");
        }
        // Random, so that clients that failed at the same time do not retry at the same time.
        tokio::time::sleep(pause.mul_f64(rand::random_range(0.5..1.0))).await;
        pause = (pause * 2).min(LONGEST);
    }
}

async fn open(
    config: &Config,
    settings: &Settings,
    client_id: ClientId,
) -> Result<(Arc<Driver>, Work<CallLink, PubSub>), Error> {
    let scripts = catalog::ALL.map(|script| script.source());
    let reconnects = Arc::<AtomicU64>::default();
    let link = CallLink::connect(settings.clone(), &scripts, Arc::clone(&reconnects)).await?;
    let pubsub = PubSub::open(settings.clone()).await?;
    let settings = engine::Settings {
        client_id,
        address: settings.address().into(),
        watchdog: config.watchdog_timeout,
        recheck: config.recheck_interval,
        retry_timeout: config.retry_timeout,
        command_timeout: config.command_timeout,
        renewal_batch: config.renewal_batch,
        detection: config.deadlock_detection,
        passing_time: config.passing_time,
    };
    let (driver, calls) = Driver::new(Engine::new(settings, rand::random()), reconnects);
    let work = Work {
        driver: Arc::clone(&driver),
        calls,
        link,
        pubsub,
    };
    Ok((driver, work))
}
