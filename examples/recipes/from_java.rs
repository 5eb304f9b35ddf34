//! Recipe: code that was written for Redisson, line by line and as Rust would have it.
//! `docs/recipes.md` explains it.
//!
//! ```sh
//! cargo run --package redisson-lock-examples --example from_java
//! ```

// region: use
use redisson_lock::{Error, LockClient, Owner, OwnerPolicy};
// endregion

// region: literal
/// Line by line. The owner has to be the same in both functions: the task's, or a scope's.
pub mod literal {
    use super::*;

    pub async fn place_order(redisson: &LockClient, id: u64) -> Result<u64, Error> {
        // RLock lock = redisson.getLock("order:" + id);
        let lock = redisson.lock(format!("order:{id}"));
        let _owner = lock.lock().await?.detach(); //        lock.lock();
        let placed = reserve(redisson, id).await; //        try { placed = reserve(id); }
        let unlocked = lock.unlock().await; //              finally { lock.unlock(); }
        let placed = placed?; // An error of the work comes first.
        unlocked?;
        Ok(placed) //                                       return placed;
    }

    /// Locks again: the same owner re-enters.
    async fn reserve(redisson: &LockClient, id: u64) -> Result<u64, Error> {
        let lock = redisson.lock(format!("order:{id}"));
        let owner = lock.lock().await?.detach();
        let holds = lock.hold_count_of(owner).await; //     lock.getHoldCount()
        let unlocked = lock.unlock().await;
        let holds = holds?;
        unlocked?;
        Ok(holds)
    }
}
// endregion

// region: idiomatic
/// As Rust would have it: the lock is released however the future ends.
pub mod idiomatic {
    use super::*;

    pub async fn place_order(client: &LockClient, id: u64) -> Result<u64, Error> {
        let lock = client.lock(format!("order:{id}"));
        lock.run(reserve(client, id)).await?
    }

    /// Locks again: `run` has made its owner current, so this one re-enters.
    async fn reserve(client: &LockClient, id: u64) -> Result<u64, Error> {
        let lock = client.lock(format!("order:{id}"));
        lock.run_with(async |guard| guard.hold_count()).await
    }
}
// endregion

// region: owners
/// The owner is the task, for the whole client: Redisson's rule.
pub async fn per_task(url: &str) -> Result<u64, Error> {
    let client = LockClient::builder()
        .owner_policy(OwnerPolicy::PerTask)
        .connect(url)
        .await?;
    let holds = literal::place_order(&client, 42).await;
    client.shutdown().await?;
    holds
}

/// The owner is made for this call, whatever the client's policy.
pub async fn in_a_scope(url: &str) -> Result<u64, Error> {
    let client = LockClient::connect(url).await?;
    let holds = Owner::scope(literal::place_order(&client, 42)).await;
    client.shutdown().await?;
    holds
}
// endregion

#[tokio::main]
async fn main() -> Result<(), Error> {
    let url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    println!("holds in the helper, per task: {}", per_task(&url).await?);
    println!(
        "holds in the helper, in a scope: {}",
        in_a_scope(&url).await?
    );
    let client = LockClient::connect(&url).await?;
    println!(
        "holds in the helper, with run: {}",
        idiomatic::place_order(&client, 42).await?
    );
    client.shutdown().await
}
