//! A test bench: a server, a client with one lock, and the operations of tests on that lock.

// Each test binary includes this module and uses a part of it.
#![allow(dead_code)]

use std::collections::HashMap;
use std::fmt::Debug;
use std::time::Duration;

use redis::{Connection, cmd};
use redisson_lock::{
    Error, LockClient, LockClientBuilder, LockGuard, LockKind, LostReason, ReentrantLock,
};

use super::observe;
use super::server::{Server, unique, wait_until};

/// The limit for events that do not wait for a lease to expire; far below the leases that tests do
/// not set.
pub const LIMIT: Duration = Duration::from_secs(30);

/// The lease of locks that are renewed, or expire, during a test.
pub const BRIEF: Duration = Duration::from_millis(3_000);

/// The owner to which [`Bench::steal`] gives the lock.
pub const THIEF: &str = "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e11:52";

/// A server, a client with one lock, and an independent connection that observes the server.
pub struct Bench {
    pub server: Server,
    pub client: LockClient,
    pub lock: ReentrantLock,
    pub observer: Connection,
    pub name: String,
}

impl Bench {
    pub async fn new() -> Self {
        Self::with(LockClient::builder()).await
    }

    pub async fn with(builder: LockClientBuilder) -> Self {
        Self::on(Server::start(), builder).await
    }

    /// Uses the server named by `REDIS_URL`, if it is set. For tests that other programs on the
    /// server do not disturb.
    pub async fn shared(builder: LockClientBuilder) -> Self {
        Self::on(Server::shared_or_start(), builder).await
    }

    async fn on(server: Server, builder: LockClientBuilder) -> Self {
        let client = builder.connect(&server.url()).await.unwrap();
        let name = unique("stock");
        Self {
            lock: client.lock(&name),
            observer: server.connection(),
            server,
            client,
            name,
        }
    }

    pub fn fields(&mut self) -> HashMap<String, i64> {
        observe::owner_counts(&mut self.observer, &self.name)
    }

    /// The hold count of the lock's owner, 0 if the lock is free.
    pub fn count(&mut self) -> i64 {
        let fields = self.fields();
        assert!(fields.len() < 2, "two owners: {fields:?}");
        fields.values().copied().next().unwrap_or(0)
    }

    pub fn pttl(&mut self) -> i64 {
        observe::pttl(&mut self.observer, &self.name)
    }

    /// Whether a waiter has subscribed to the lock's release channel.
    pub fn is_waited_for(&mut self) -> bool {
        observe::subscribers(&mut self.observer, &self.name) > 0
    }

    pub fn wait_until_free(&mut self) {
        wait_until("the lock is free", LIMIT, || self.pttl() == -2);
    }

    pub fn delete(&mut self) {
        cmd("DEL").arg(&self.name).exec(&mut self.observer).unwrap();
    }

    /// Deletes the lock and gives it to another owner, [`THIEF`].
    pub fn steal(&mut self) {
        self.delete();
        cmd("HSET")
            .arg(&self.name)
            .arg(THIEF)
            .arg(1)
            .exec(&mut self.observer)
            .unwrap();
        cmd("PEXPIRE")
            .arg(&self.name)
            .arg(30_000)
            .exec(&mut self.observer)
            .unwrap();
    }

    #[track_caller]
    pub fn assert_the_thief_keeps_it(&mut self) {
        assert_eq!(self.fields(), HashMap::from([(THIEF.to_owned(), 1)]));
    }

    pub fn scripts(&mut self) -> u64 {
        observe::scripts(&mut self.observer)
    }
}

#[track_caller]
pub fn assert_lost<T: Debug>(answer: Result<T, Error>, expected: LostReason) {
    match answer {
        Err(Error::Lost { reason, .. }) => assert_eq!(reason, expected),
        other => panic!("not lost: {other:?}"),
    }
}

#[track_caller]
pub fn assert_not_held(answer: Result<(), Error>) {
    assert!(matches!(&answer, Err(Error::NotHeld { .. })), "{answer:?}");
}

pub async fn why_lost<K: LockKind>(guard: &LockGuard<K>) -> LostReason {
    tokio::time::timeout(LIMIT, guard.lost())
        .await
        .expect("the loss is reported")
}
