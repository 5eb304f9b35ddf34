//! Connecting: error types, error messages and the connect timeout.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::proxy::{Fate, Proxy};
use crate::support::rewrite::rewriting;
use crate::support::server::{Server, unique, wait_until};
use redisson_lock::{Error, LockClient};

/// `redis://host/99`: the server answers `ERR DB index is out of range`. It was reached, so this is
/// not [`Error::Connection`].
#[tokio::test]
async fn unknown_database_is_server_error() {
    let server = Server::start();
    let url = format!(
        "{}/99",
        server.url().trim_end_matches("/0").trim_end_matches('/')
    );
    let error = LockClient::builder()
        .connect_timeout(Duration::from_secs(5))
        .connect(&url)
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Server { .. }), "{error:?}");
}

/// A service with two servers needs to know which of them is down. Host and port are no secret.
#[tokio::test]
async fn refused_connection_error_names_address() {
    let error = LockClient::connect("redis://user:hidden@127.0.0.1:1")
        .await
        .unwrap_err()
        .to_string();
    assert!(!error.contains("hidden"), "{error}");
    assert!(error.contains("127.0.0.1:1"), "{error}");
    assert!(
        !error.contains("Os {"),
        "the message contains Debug output: {error}"
    );
}

/// [`Error::InvalidLease`] states that 1 ms is allowed, so such a lease can be granted.
#[tokio::test]
async fn shortest_allowed_lease_is_granted() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("shortest"));
    for _ in 0..50 {
        // On a busy machine it is over before its caller has it.
        match lock.lock().lease(Duration::from_millis(1)).await {
            Ok(_) => {}
            Err(error) => assert!(error.is_lost(), "{error:?}"),
        }
    }
    assert!(client.stats().grants >= 50, "{:?}", client.stats());
}

/// In a cluster a script may touch the keys of one slot only: two locks that are renewed together
/// would both be lost.
#[tokio::test]
async fn cluster_is_refused() {
    let server = Server::builder().arg("--cluster-enabled", "yes").start();
    let mut redis = server.connection();
    redis::cmd("CLUSTER")
        .arg("ADDSLOTS")
        .arg((0..16_384).collect::<Vec<_>>())
        .exec(&mut redis)
        .unwrap();
    wait_until("the cluster serves", Duration::from_secs(20), || {
        redis::cmd("CLUSTER")
            .arg("INFO")
            .query::<String>(&mut redis)
            .unwrap()
            .contains("cluster_state:ok")
    });
    let error = LockClient::connect(&server.url()).await.unwrap_err();
    assert!(
        matches!(error, Error::UnsupportedServer { .. }),
        "{error:?}"
    );
    assert!(error.to_string().contains("cluster"), "{error}");
}

/// The address leads to a server of a cluster from now on.
#[tokio::test]
async fn cluster_is_refused_as_replacement() {
    let server = Server::start();
    let cluster = Server::builder().arg("--cluster-enabled", "yes").start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder()
        .retry_timeout(Duration::from_secs(1))
        .command_timeout(Duration::from_secs(1))
        .connect(&proxy.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    lock.run(async {}).await.unwrap();
    proxy.retarget(&cluster);
    proxy.close_now();
    let error = lock.lock().await.unwrap_err();
    assert!(error.to_string().contains("a part of a cluster"), "{error}");
    proxy.retarget(&server);
    proxy.close_now();
    lock.run(async {}).await.unwrap();
}

/// A server that does not state its mode is accepted, a reply to another call is not.
#[tokio::test(flavor = "multi_thread")]
async fn mode_is_taken_from_the_right_reply_only() {
    let server = Server::builder().arg("--cluster-enabled", "yes").start();
    let hidden = rewriting(server.port(), |reply| {
        reply.replace("redis_mode:", "hidden_mod:")
    })
    .await;
    let url = format!("redis://{hidden}");
    assert!(
        LockClient::connect(&url).await.is_ok(),
        "the mode is not stated"
    );
    let other = rewriting(server.port(), |reply| {
        reply
            .replace("redis_mode:", "hidden_mod:")
            .replace("# Server", "# Client")
    });
    let url = format!("redis://{}", other.await);
    let error = LockClient::connect(&url).await.unwrap_err();
    assert!(matches!(error, Error::Connection { .. }), "{error:?}");
}

/// Valkey 8 and 9 name the mode `server_mode`. A proxy renames it in the replies of Redis.
#[tokio::test(flavor = "multi_thread")]
async fn valkey_cluster_is_refused() {
    let server = Server::builder().arg("--cluster-enabled", "yes").start();
    assert!(
        LockClient::connect(&server.url()).await.is_err(),
        "the cluster is refused as Redis names its mode"
    );
    let (url, renamed) = valkey_proxy(server.port()).await;
    let outcome = LockClient::connect(&url).await;
    assert!(
        renamed.load(Ordering::Acquire),
        "no reply named `server_mode`: {outcome:?}"
    );
    assert!(
        matches!(outcome, Err(Error::UnsupportedServer { .. })),
        "connected to a cluster: {outcome:?}; a lock there: {:?}",
        outcome.as_ref().unwrap().lock("a").lock().await
    );
}

/// The URL of a proxy that names the server's mode as Valkey does, and whether a reply named it.
async fn valkey_proxy(server: u16) -> (String, Arc<AtomicBool>) {
    let renamed = Arc::new(AtomicBool::new(false));
    let is_renamed = Arc::clone(&renamed);
    let address = rewriting(server, move |reply| {
        // Keep the length: shorten a field that the client does not read.
        let reply = reply
            .replace("redis_mode:cluster", "server_mode:cluster")
            .replace("redis_git_dirty:", "redis_git_dirt:");
        is_renamed.fetch_or(reply.contains("server_mode:cluster"), Ordering::AcqRel);
        reply
    })
    .await;
    (format!("redis://{address}"), renamed)
}

/// The timeout limits all steps of connecting. Here the reply to the loading of a script is lost.
#[tokio::test(flavor = "multi_thread")]
async fn connect_timeout_limits_all_steps() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    proxy.next_reply_to(&["SCRIPT", "LOAD"], Fate::Swallow);
    let began = Instant::now();
    let builder = LockClient::builder()
        .watchdog_timeout(Duration::from_secs(180))
        .command_timeout(Duration::from_secs(60));
    let outcome = builder
        .connect_timeout(Duration::from_secs(2))
        .connect(&proxy.url())
        .await;
    assert_eq!(proxy.applied(), 1);
    assert!(
        began.elapsed() < Duration::from_secs(20),
        "{:?} instead of 2 s: {outcome:?}",
        began.elapsed()
    );
}

/// A server stops, or a load balancer closes the connection. The error reports no time that has not
/// passed.
#[tokio::test]
async fn connection_closed_while_connecting_is_no_timeout() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    proxy.next_reply_to(&["CLIENT", "INFO"], Fate::Close);
    let begun = Instant::now();
    let error = LockClient::connect(&proxy.url()).await.unwrap_err();
    let took = begun.elapsed();
    let reported = match error {
        Error::Timeout { after, .. } => after,
        _ => Duration::ZERO,
    };
    assert!(
        reported < took + Duration::from_secs(1),
        "after {took:?}: {error}"
    );
}

/// Both schemes are documented.
#[tokio::test]
async fn valkey_url_connects() {
    let server = Server::start();
    let url = server.url().replace("redis://", "valkey://");
    let client = LockClient::connect(&url).await.unwrap();
    client.lock(unique("stock")).run(async {}).await.unwrap();
    client.shutdown().await.unwrap();
}
