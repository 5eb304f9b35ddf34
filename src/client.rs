//! The client: the only way in, and the owner of every task and connection.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::background::Background;
use crate::config::{Config, LeaseTime, bounded};
use crate::core::Core;
use crate::error::{Error, LostReason, Step};
use crate::holds::Holds;
use crate::link::{Event, Link, PubSub, Settings};
use crate::locks::reentrant::ReentrantLock;
use crate::owner::{ClientId, Owner, OwnerPolicy};
use crate::script::catalog;
use crate::turn::InHand;
use crate::wakeup::{self, Wakeups, reconcile};
use crate::{renewal, retry};

/// A connection to the server whose locks are shared, and the identity under which they are held.
///
/// Cheap to clone; all clones are one client. One client for a process is enough: it has two
/// connections, one for calls and one that listens for wake-ups, whatever the number of locks and
/// waiters.
///
/// ```no_run
/// # #[tokio::main] async fn main() -> Result<(), redisson_lock::Error> {
/// use redisson_lock::LockClient;
///
/// let client = LockClient::connect("redis://127.0.0.1:6379").await?;
/// let lock = client.lock("order:42");
/// lock.run(async { /* nobody else is here */ }).await?;
/// client.shutdown().await?;
/// # Ok(()) }
/// ```
///
/// When the last clone, lock and guard are gone, the client finishes its pending releases and ends
/// by itself; [`shutdown`](Self::shutdown) does that at a moment of your choice, and waits. Call it
/// before the runtime ends: what is in the background then is not finished, and stays until its
/// lease is over.
#[derive(Clone)]
pub struct LockClient {
    core: Arc<Core>,
    tasks: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl LockClient {
    /// Connects with the default settings to `redis://[user[:password]@]host[:port][/database]`.
    ///
    /// # Errors
    /// * [`Error::InvalidConfig`]: the URL cannot be used. No message repeats it, as it may carry a
    ///   password.
    /// * [`Error::Connection`], [`Error::Timeout`] with [`Step::Connect`]: the server cannot be
    ///   reached.
    /// * [`Error::Server`]: the server refused the user or the password.
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
    /// Nothing is sent, and nothing has to be cleaned up. A name that cannot be used is refused by
    /// the lock's first operation.
    #[must_use]
    pub fn lock(&self, name: impl AsRef<str>) -> ReentrantLock {
        ReentrantLock::new(Arc::clone(&self.core), name.as_ref())
    }

    /// The id that is CLIENT in the field `CLIENT:THREAD` on the wire.
    #[must_use]
    pub fn client_id(&self) -> ClientId {
        self.core.client_id
    }

    /// The owner that an acquisition here and now would be by: the ambient one, or the task's own
    /// under [`OwnerPolicy::PerTask`]. `None` means a fresh one for each acquisition.
    #[must_use]
    pub fn current_owner(&self) -> Option<Owner> {
        self.core.config.owner_policy.current()
    }

    /// How many releases in the background were given up: of guards that were dropped, or of
    /// acquires whose outcome stayed unknown. Each is traced as a warning, too, and its lease runs
    /// out by itself.
    #[must_use]
    pub fn failed_releases(&self) -> u64 {
        self.core.failed_releases.load(Ordering::Relaxed)
    }

    /// Ends the client: waiters fail with [`Error::Closed`], pending releases are finished, holds
    /// that are still there are lost with [`LostReason::Shutdown`] (their keys stay until their
    /// leases run out, so that nobody else gets in while their code may still run), tasks end and
    /// connections are closed.
    ///
    /// Calling it again does nothing. Futures of this client that nobody polls are waited for no
    /// longer than a reply may take; what they have begun is finished without them.
    ///
    /// # Errors
    /// [`Error::Timeout`] with [`Step::Shutdown`]: releases were still unanswered after the retry
    /// timeout. Everything is ended all the same; what was not released runs out with its lease.
    ///
    /// # Cancel safety
    /// Dropped half-way, the client is closed for callers, and its tasks end when the last handle
    /// to it is gone; it may be called again.
    pub async fn shutdown(&self) -> Result<(), Error> {
        let core = &self.core;
        core.closed.store(true, Ordering::Release);
        core.wakeups.close();
        for lease in core.holds.leases() {
            let reason = lease.lose(LostReason::Shutdown);
            renewal::tell_lost(core, &lease, reason, false);
        }
        let limit = core.config.patience();
        let drained =
            tokio::time::timeout(limit, core.background.drained(core.config.command_timeout)).await;
        core.stop.send_replace(true);
        let tasks = std::mem::take(&mut *self.tasks.lock());
        for mut task in tasks {
            // They end by themselves when told to; a task that is stuck in a dead connection is cut
            // off.
            if tokio::time::timeout(Duration::from_secs(2), &mut task)
                .await
                .is_err()
            {
                task.abort();
            }
        }
        core.link.close().await;
        drained.map_err(|_| Error::Timeout {
            step: Step::Shutdown,
            after: limit,
        })
    }
}

impl fmt::Debug for LockClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockClient")
            .field("client_id", &self.core.client_id)
            .finish_non_exhaustive()
    }
}

/// Settings of a [`LockClient`]. Each states its default; a value out of bounds is refused by
/// [`connect`](Self::connect), before anything is sent.
#[derive(Debug, Clone, Default)]
#[must_use = "settings do nothing until connect is called"]
pub struct LockClientBuilder {
    client_id: Option<ClientId>,
    owner_policy: OwnerPolicy,
    watchdog_timeout: Option<Duration>,
    recheck_interval: Option<Duration>,
    retry_timeout: Option<Duration>,
    connect_timeout: Option<Duration>,
    command_timeout: Option<Duration>,
    renewal_batch_size: Option<usize>,
}

impl LockClientBuilder {
    /// The lease of a lock that is taken without one; it is renewed every third of it. Default 30
    /// s; 50 ms to 3650 days.
    ///
    /// It is how long others wait when this process dies, and how long this process may be cut off
    /// from the server before its locks are lost (Redisson's `lockWatchdogTimeout`).
    pub fn watchdog_timeout(mut self, timeout: Duration) -> Self {
        self.watchdog_timeout = Some(timeout);
        self
    }

    /// Under whose id locks are held. Default: a fresh random one.
    ///
    /// Handing over another client's id lets this one give back and re-enter that client's locks,
    /// with [`Owner::from_thread_id`]. It is for handing over: never give one id to two clients
    /// that work at the same time. Neither follows what the other does to a owner's count, so a
    /// release of one may take the other's hold.
    pub fn client_id(mut self, id: ClientId) -> Self {
        self.client_id = Some(id);
        self
    }

    /// Whose hold an acquisition is outside any [`Owner`] scope. Default
    /// [`OwnerPolicy::PerAcquisition`].
    pub fn owner_policy(mut self, policy: OwnerPolicy) -> Self {
        self.owner_policy = policy;
        self
    }

    /// How long a waiter sleeps at most before it asks again, should a wake-up be lost. Default 1
    /// s; 10 ms to 1 h.
    ///
    /// One question for each lock that is waited for in this process, however many wait for it.
    pub fn recheck_interval(mut self, interval: Duration) -> Self {
        self.recheck_interval = Some(interval);
        self
    }

    /// For how long an operation goes on trying while the server is in trouble. Default 10 s; 0 to
    /// 1 h.
    ///
    /// The first answer is always waited for, as long as [`command_timeout`](Self::command_timeout)
    /// says.
    pub fn retry_timeout(mut self, timeout: Duration) -> Self {
        self.retry_timeout = Some(timeout);
        self
    }

    /// For how long connecting may take. Default 5 s; 1 ms to 1 h.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = Some(timeout);
        self
    }

    /// For how long a reply may take before the connection is given up for a new one. Default 3 s,
    /// or a third of the watchdog timeout if that is less; 10 ms to 1 h.
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

    /// Connects to `redis://[user[:password]@]host[:port][/database]`, within a tokio runtime.
    ///
    /// # Errors
    /// As [`LockClient::connect`]; [`Error::InvalidConfig`] also for a setting out of bounds.
    ///
    /// # Cancel safety
    /// Dropping it closes what was opened.
    pub async fn connect(self, url: &str) -> Result<LockClient, Error> {
        let config = self.config()?;
        let settings = Settings::parse(url, config.connect_timeout, config.command_timeout)?;
        let client_id = self.client_id.unwrap_or_else(ClientId::random);
        let scripts = catalog::ALL.map(|script| script.what());
        let (wakeups, changed) = Wakeups::new();
        let listener = Arc::clone(&wakeups);
        let limit = config.connect_timeout;
        let connecting = async {
            let link = Arc::new(Link::connect(settings.clone(), &scripts).await?);
            let events = Arc::new(move |event: Event<'_>| wakeup::event(&listener, event));
            Ok((link, PubSub::open(settings, events).await?))
        };
        let connected = tokio::time::timeout(limit, connecting).await;
        let (link, pubsub) = connected.unwrap_or(Err(Error::Timeout {
            step: Step::Connect,
            after: limit,
        }))?;

        let (stop, stopped) = watch::channel(false);
        let in_hand = Arc::<InHand>::default();
        // In a shorter time no caller is suspected: a reply may take as long.
        let round = config.command_timeout.max(retry::LONGEST);
        let (background, worker) = Background::new(stopped.clone(), Arc::clone(&in_hand), round);
        let holds = Holds::new(in_hand);
        let core = Arc::new(Core {
            client_id,
            config,
            link: Arc::clone(&link),
            holds: Arc::clone(&holds),
            wakeups: Arc::clone(&wakeups),
            background,
            closed: AtomicBool::new(false),
            failed_releases: AtomicU64::new(0),
            stop,
        });
        let mut ends = stopped.clone();
        let listening = reconcile(wakeups, changed, pubsub, round, async move {
            // An error means that the client is gone.
            let _ = ends.wait_for(|stop| *stop).await;
        });
        let tasks = vec![
            tokio::spawn(listening),
            tokio::spawn(renewal::supervise(Arc::downgrade(&core), holds, stopped)),
            tokio::spawn(async move {
                worker.await;
                // Every handle is gone and every release is done: the connection has served.
                link.close().await;
            }),
        ];
        Ok(LockClient {
            core,
            tasks: Arc::new(Mutex::new(tasks)),
        })
    }

    fn config(&self) -> Result<Config, Error> {
        const HOUR: Duration = Duration::from_secs(3600);
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
            owner_policy: self.owner_policy,
            recheck_interval: bounded(
                "recheck interval",
                self.recheck_interval.unwrap_or(default.recheck_interval),
                ms(10)..=HOUR,
                "10 ms to 1 h",
            )?,
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
            command_timeout: bounded(
                "command timeout",
                self.command_timeout
                    .unwrap_or(default.command_timeout.min((watchdog / 3).max(ms(10)))),
                ms(10)..=HOUR,
                "10 ms to 1 h",
            )?,
            renewal_batch,
        })
    }
}
