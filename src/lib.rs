//! Locks that several processes share through Redis or Valkey, wire-compatible with Java's
//! Redisson.
//!
//! ```no_run
//! # #[tokio::main] async fn main() -> Result<(), redisson_lock::Error> {
//! use redisson_lock::LockClient;
//!
//! let client = LockClient::connect("redis://127.0.0.1:6379").await?;
//! let total = client.lock("order:42").run(async { 40 + 2 }).await?;
//! # assert_eq!(total, 42);
//! # client.shutdown().await
//! # }
//! ```
//!
//! # Which lock?
//!
//! | you want | take |
//! |---|---|
//! | one at a time, across processes; nested code may lock again | [`LockClient::lock`]: [`ReentrantLock`] |
//!
//! And which way of locking:
//!
//! | you want | take |
//! |---|---|
//! | to run something under the lock, and have it stopped if the lock is lost | [`ReentrantLock::run`] |
//! | a lock that is held across several steps of your own | [`ReentrantLock::lock`], and watch [`LockGuard::lost`] |
//! | to do something else if the lock is taken | [`ReentrantLock::try_lock`] |
//! | to port code that locks and unlocks by hand | [`LockGuard::forget`], [`ReentrantLock::unlock`], [`OwnerPolicy::PerTask`] |
//! | to clear a lock away | [`ReentrantLock::force_unlock`] |
//!
//! # What is promised
//!
//! While a guard is not lost, nobody else has the lock, as long as the server keeps what it has
//! confirmed; and an owner hears of a loss before anybody else can have the lock, as long as nobody
//! takes it away on the server. What can go wrong all the same is told in `docs/safety.md`: read it
//! before money hangs on a lock.
//!
//! Every acquisition has a lease. Without one of its own ([`LockRequest::lease`]) it is the
//! watchdog timeout ([`LockClientBuilder::watchdog_timeout`], 30 s), and it is renewed every third
//! of that until the hold is given back.
//!
//! # Runtime
//!
//! A client works on the tokio runtime that it was connected on (with timers and I/O), of either
//! flavour. A guard may be dropped anywhere.
//!
//! # The rooms
//!
//! For readers of the source: `client` is the way in and owns the tasks; `locks` has a file for
//! each kind of lock; `acquire` is the waiting algorithm, `wakeup` the queues and channels, `holds`
//! and `lease` the table of what is held, `renewal` the scheduler that keeps it alive, `release`
//! what is given back, in the background if need be; `script` knows the Lua files, and `link` is
//! the only room that knows the client library. `docs/architecture.md` tells how they work
//! together.

#![forbid(unsafe_code)]
#![warn(missing_docs, unreachable_pub, elided_lifetimes_in_paths)]
#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::print_stderr
)]

mod acquire;
mod attempt;
mod background;
mod client;
mod config;
mod core;
mod error;
mod handoff;
mod holds;
mod info;
mod keys;
mod lease;
mod link;
mod locks;
mod losses;
mod owner;
mod release;
mod renewal;
mod retry;
mod runtime;
mod script;
mod stats;
mod turn;
mod wakeup;

pub use client::{LockClient, LockClientBuilder};
pub use config::DeadlockDetection;
pub use error::{ConnectionError, Error, LostReason, ServerError, ServerErrorKind, Step};
pub use info::LockInfo;
pub use keys::MAX_NAME_LEN;
pub use locks::guard::LockGuard;
pub use locks::reentrant::ReentrantLock;
pub use locks::requests::{LockRequest, TryLockRequest};
pub use owner::{ClientId, Owner, OwnerExt, OwnerPolicy, WithOwner};
pub use stats::{Losses, Stats};

/// The README's programs, so that they compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
