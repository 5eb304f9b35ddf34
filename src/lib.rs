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
//! | purpose | type |
//! |---|---|
//! | mutual exclusion across processes; nested code may lock again | [`ReentrantLock`], from [`LockClient::lock`] |
//! | the same, for a resource that refuses late writes by their token | [`FencedLock`], from [`LockClient::fenced_lock`] |
//! | mutual exclusion with programs that use `SET key token NX PX` | [`SimpleLock`], from [`LockClient::simple_lock`] |
//!
//! # Which way of locking?
//!
//! | purpose | method |
//! |---|---|
//! | run a future under the lock, and stop it if the lock is lost | [`Lock::run`] |
//! | the same, but only if the lock is free | [`Lock::try_run`] |
//! | hold the lock across several steps | [`Lock::lock`], with [`LockGuard::lost`] |
//! | do something else if the lock is held | [`Lock::try_lock`], [`Lock::try_lock_for`] |
//! | port code that locks and unlocks by hand | [`LockGuard::detach`], [`Lock::unlock`], [`OwnerPolicy::PerTask`] |
//! | see who holds the lock | [`Lock::inspect`] |
//! | free a lock that any owner holds | [`Lock::force_unlock`] |
//!
//! Inside [`run`](Lock::run) the code that is awaited is the owner of the lock, and locks
//! it again without waiting. Outside, each acquisition has an [`Owner`] of its own, so two branches
//! of one `join!` exclude each other. A [`SimpleLock`] is never re-entered.
//!
//! # What is promised
//!
//! While a guard is not lost, no other owner holds the lock, as long as the server keeps what it
//! has confirmed. An owner that loses its lock is notified before another owner can acquire it, as
//! long as nobody takes the lock away on the server. A write that the owner has sent before may
//! still arrive later: a resource that checks the token of a [`FencedLock`] refuses it. What can go
//! wrong all the same is on the page [`docs::safety`]. Read it before money depends on a lock.
//!
//! Each acquisition has a lease. Without one of its own ([`LockRequest::lease`]) it is the watchdog
//! timeout ([`LockClientBuilder::watchdog_timeout`], 30 s), and it is renewed after each third of
//! that until the hold is released.
//!
//! # Runtime
//!
//! A client has a thread of its own, for its connections, renewals and releases in the background.
//! Locks, requests and guards can be used from any runtime, thread or executor, and code that
//! blocks its thread costs no lock. Call [`LockClient::shutdown`] before the process ends: what is
//! released in the background is not sent afterwards.
//!
//! # Guides
//!
//! [`docs`] has pages about safety, operations, recipes, compatibility with Redisson, the wire
//! format, performance and the architecture.

#![forbid(unsafe_code)]
#![warn(missing_docs, unreachable_pub, elided_lifetimes_in_paths)]
#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::print_stderr
)]

mod client;
mod config;
pub mod docs;
mod driver;
mod engine;
mod error;
mod handle;
mod ids;
mod info;
mod keys;
mod kind;
mod lease_cell;
mod limits;
mod link;
mod lock;
mod owner;
mod script;
mod stats;
mod time;
#[cfg(feature = "tls")]
mod tls;
mod wire;

pub use client::{LockClient, LockClientBuilder};
pub use config::DeadlockDetection;
pub use error::{ConnectionError, Error, LostReason, ServerError, ServerErrorKind, Step};
pub use info::LockInfo;
pub use limits::MAX_NAME_LEN;
pub use lock::guard::LockGuard;
pub use lock::handle::{FencedLock, Lock, ReentrantLock, SimpleLock};
pub use lock::kinds::{Fenced, LockKind, Reentrant, ReentrantKind, Simple};
pub use lock::request::{LockRequest, TryLockRequest};
pub use owner::{ClientId, Owner, OwnerExt, OwnerPolicy, WithOwner};
pub use stats::{Losses, Stats};
#[cfg(feature = "tls")]
pub use {error::TlsProblem, tls::Tls};

/// The README's programs, so that they compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
