//! The shop: how a buyer places an order, without a lock and with a lock.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use redis::AsyncCommands;
use redis::aio::MultiplexedConnection;
use redisson_lock::{LockClient, Owner, ReentrantLock};

use crate::Failure;
use crate::reports::Report;

/// How long a lock stays held after its process was killed. The default of 30 s would make the demo
/// long.
pub const WATCHDOG_TIMEOUT: Duration = Duration::from_secs(2);

/// Connects a lock client. One client per process is enough for any number of locks and buyers.
pub async fn lock_client(url: &str) -> Result<LockClient, Failure> {
    // The default is 5 s. With 10 s the demo also connects on a very busy machine.
    let timeout = Duration::from_secs(10);
    let client = LockClient::builder().watchdog_timeout(WATCHDOG_TIMEOUT);
    Ok(client.connect_timeout(timeout).connect(url).await?)
}

/// How a sale prevents that two buyers sell the same item.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Protection {
    None,
    Lock,
    /// A lock, and nested functions that re-enter it.
    Reentrant,
}

/// The shop in one worker process.
pub struct Shop {
    pub redis: MultiplexedConnection,
    pub lock: ReentrantLock,
    pub keys: Keys,
    pub think: Duration,
    /// See [`Job::stop_at`](crate::options::Job::stop_at).
    pub stop_at: Option<u64>,
    /// Whether a buyer has sent [`Report::HoldCount`].
    pub hold_count_reported: AtomicBool,
}

impl Shop {
    /// Sells one item; returns `false` if the stock is 0.
    pub async fn place_order(&self, protection: Protection, buyer: &str) -> Result<bool, Failure> {
        match protection {
            Protection::None => self.place_order_unlocked(buyer).await,
            Protection::Lock => self.place_order_locked(buyer).await,
            Protection::Reentrant => self.place_order_reentrant(buyer).await,
        }
    }

    /// Reads, thinks, writes back. A buyer that reads while another one thinks sells the same item.
    async fn place_order_unlocked(&self, buyer: &str) -> Result<bool, Failure> {
        let Some(item) = self.next_item().await? else {
            return Ok(false);
        };
        tokio::time::sleep(self.think).await;
        self.write_back(item, buyer).await?;
        Ok(true)
    }

    /// The same under the lock: while one buyer thinks, all other buyers in all processes wait.
    async fn place_order_locked(&self, buyer: &str) -> Result<bool, Failure> {
        let asked = Instant::now();
        self.lock
            .run(async {
                Report::Waited(asked.elapsed()).send();
                let item = self.next_item().await?;
                self.stop_if_to_be_killed(item).await;
                let Some(item) = item else { return Ok(false) };
                tokio::time::sleep(self.think).await;
                self.write_back(item, buyer).await?;
                Ok(true)
            })
            .await?
    }

    /// The same with functions that acquire the lock themselves, since other code calls them, too.
    /// Inside this lock they re-enter: they do not wait, and their release does not free the lock.
    async fn place_order_reentrant(&self, buyer: &str) -> Result<bool, Failure> {
        let asked = Instant::now();
        self.lock
            .run(async {
                Report::Waited(asked.elapsed()).send();
                let Some(item) = self.reserve_stock().await? else {
                    return Ok(false);
                };
                self.write_invoice(item, buyer).await?;
                Ok(true)
            })
            .await?
    }

    async fn reserve_stock(&self) -> Result<Option<u64>, Failure> {
        self.lock
            .run(async {
                if !self.hold_count_reported.swap(true, Ordering::Relaxed) {
                    let owner = Owner::current().expect("run opens a scope");
                    Report::HoldCount(self.lock.hold_count_of(owner).await?).send();
                }
                let item = self.next_item().await?;
                tokio::time::sleep(self.think).await;
                Ok(item)
            })
            .await?
    }

    async fn write_invoice(&self, item: u64, buyer: &str) -> Result<(), Failure> {
        self.lock.run(self.write_back(item, buyer)).await?
    }

    /// The number of the next item. The stock counts down, so it is the stock itself.
    async fn next_item(&self) -> Result<Option<u64>, Failure> {
        let left: i64 = self.redis.clone().get(&self.keys.stock).await?;
        Ok(u64::try_from(left).ok().filter(|item| *item > 0))
    }

    /// Writes the stock and the order in one transaction: a worker that is killed writes both or
    /// neither.
    async fn write_back(&self, item: u64, buyer: &str) -> Result<(), Failure> {
        redis::pipe()
            .atomic()
            .set(&self.keys.stock, item - 1)
            .rpush(&self.keys.orders, format!("{item} {buyer}"))
            .exec_async(&mut self.redis.clone())
            .await?;
        Ok(())
    }

    /// Half-way through the sale, the worker to be killed reports that it holds the lock, and
    /// stops.
    async fn stop_if_to_be_killed(&self, item: Option<u64>) {
        if self
            .stop_at
            .is_some_and(|stop_at| item.unwrap_or(0) <= stop_at)
        {
            Report::Holding.send();
            std::future::pending::<()>().await;
        }
    }
}

impl Protection {
    pub const ALL: [Self; 3] = [Self::None, Self::Lock, Self::Reentrant];

    pub fn name(self) -> &'static str {
        match self {
            Self::None => "no lock",
            Self::Lock => "lock",
            Self::Reentrant => "re-entrant lock",
        }
    }

    pub fn locks(self) -> bool {
        self != Self::None
    }
}

/// The keys on the server.
#[derive(Clone)]
pub struct Keys {
    /// The stock, a number.
    pub stock: String,
    /// The orders, a list of `ITEM BUYER`.
    pub orders: String,
    pub lock: String,
}

impl Keys {
    pub fn new(prefix: &str) -> Self {
        Self {
            stock: format!("{prefix}stock_01"),
            orders: format!("{prefix}orders"),
            lock: format!("{prefix}lock:stock_01"),
        }
    }

    pub fn all(&self) -> [&str; 3] {
        [&self.stock, &self.orders, &self.lock]
    }
}
