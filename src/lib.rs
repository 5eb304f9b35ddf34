//! Distributed locks on Redis and Valkey, wire-compatible with Java Redisson.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod acquire;
mod client;
mod config;
mod core;
mod error;
mod holder;
mod holds;
mod keys;
mod lease;
mod link;
mod locks;
mod release;
mod renewal;
mod retry;
mod script;
mod wakeup;

pub use client::{LockClient, LockClientBuilder};
pub use error::{Error, LostReason, Step};
pub use holder::{ClientId, Holder, HolderExt, HolderPolicy, WithHolder};
pub use keys::MAX_NAME_LEN;
pub use locks::guard::LockGuard;
pub use locks::reentrant::{Holding, ReentrantLock};
pub use locks::requests::{LockRequest, RunRequest, TryLockRequest};
