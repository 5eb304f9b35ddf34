//! Recipe: tests of code that locks. `docs/recipes.md` explains it.
//!
//! ```sh
//! REDIS_SERVER=redis-server cargo test --package redisson-lock-examples testing
//! ```

// region: server
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use redisson_lock::{LockClient, ReentrantLock};
use uuid::Uuid;

/// A server for one test: the one that `REDIS_URL` names, or a private one that ends with the test.
struct TestServer {
    url: String,
    process: Option<Child>,
}

impl TestServer {
    fn start() -> Self {
        if let Ok(url) = std::env::var("REDIS_URL") {
            return Self { url, process: None };
        }
        let program = std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
        // The port is free again when the listener is dropped, at the end of this statement.
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let process = Command::new(program)
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no"])
            .stdout(Stdio::null())
            .spawn()
            .expect("REDIS_SERVER, or redis-server, starts");
        Self {
            url: format!("redis://127.0.0.1:{port}"),
            process: Some(process),
        }
    }

    /// A client of this test's own.
    async fn client(&self) -> LockClient {
        LockClient::builder()
            .connect_retry(Duration::from_secs(10)) // the private server may still be starting
            .connect(&self.url)
            .await
            .expect("a connection to the test's server")
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            // An error means that it has ended by itself.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// A lock name that no other test uses, in no other run either.
fn unique(name: &str) -> String {
    format!("test:{name}:{}", Uuid::new_v4())
}
// endregion

#[tokio::main]
async fn main() -> Result<(), redisson_lock::Error> {
    let server = TestServer::start();
    let client = server.client().await;
    println!("tick worked: {}", tick(&client.lock(unique("tick"))).await?);
    client.shutdown().await
}

// region: tests
/// The code under test: it does nothing if another owner holds the lock.
async fn tick(lock: &ReentrantLock) -> Result<bool, redisson_lock::Error> {
    Ok(lock.try_run(async { /* the work */ }).await?.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn tick_works_while_the_lock_is_free() {
        let server = TestServer::start();
        let client = server.client().await;
        let lock = client.lock(unique("tick"));
        assert!(tick(&lock).await.unwrap());
        assert_eq!(
            lock.inspect().await.unwrap(),
            None,
            "the lock is still held"
        );
        client.shutdown().await.unwrap();
    }

    #[tokio::test]
    async fn tick_does_nothing_while_another_process_holds_the_lock() {
        let server = TestServer::start();
        let (client, other) = (server.client().await, server.client().await);
        let name = unique("tick");
        // A second client is another process as far as locks are concerned.
        let held = other.lock(&name).lock().await.unwrap();
        assert!(!tick(&client.lock(&name)).await.unwrap());
        held.unlock().await.unwrap();
        assert!(tick(&client.lock(&name)).await.unwrap());
        client.shutdown().await.unwrap();
    }
}
// endregion
