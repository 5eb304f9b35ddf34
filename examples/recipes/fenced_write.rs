//! Recipe: a write that an owner cannot make after it has lost the lock. `docs/recipes.md` explains
//! it.
//!
//! ```sh
//! cargo run --package redisson-lock-examples --example fenced_write
//! ```

use redis::RedisResult;
use redis::aio::MultiplexedConnection;
use redisson_lock::{Error, FencedLock, LockClient};

// region: resource
/// Writes a report unless a greater token has written it. Returns whether it was written.
pub async fn write_report(
    reports: &mut MultiplexedConnection,
    key: &str,
    token: i64,
    text: &str,
) -> RedisResult<bool> {
    // Comparison and write are one step. Lua compares numbers exactly up to 2^53.
    const SCRIPT: &str = "
        local seen = redis.call('hget', KEYS[1], 'token') or '0'
        if tonumber(ARGV[1]) < tonumber(seen) then
            return 0
        end
        redis.call('hset', KEYS[1], 'token', ARGV[1], 'text', ARGV[2])
        return 1";
    let mut call = redis::cmd("EVAL");
    call.arg(SCRIPT).arg(1).arg(key).arg(token).arg(text);
    call.query_async(reports).await
}
// endregion

// region: owner
/// Makes the report and writes it under the lock, with the token of the guard. Returns whether it
/// was written; if not, a later owner has written it.
pub async fn renew_report(
    lock: &FencedLock,
    reports: &mut MultiplexedConnection,
    key: &str,
) -> Result<RedisResult<bool>, Error> {
    lock.run_with(async |guard| {
        let text = format!("made under token {}", guard.token());
        write_report(reports, key, guard.token(), &text).await
    })
    .await
}
// endregion

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let mut reports = redis::Client::open(url.as_str())?
        .get_multiplexed_async_connection()
        .await?;
    let client = LockClient::connect(&url).await?;
    let lock = client.fenced_lock("lock:report:7");
    let written = renew_report(&lock, &mut reports, "report:7").await??;
    println!("{}", if written { "written" } else { "too late" });
    client.shutdown().await?;
    Ok(())
}
