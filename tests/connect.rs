//! Connecting: what went wrong, in words that help.

mod support;

use std::time::Duration;

use redisson_lock::{Error, LockClient};
use support::server::{Server, unique, wait_until};

/// `redis://host/99`: the server answers `ERR DB index is out of range`. That is a refusal (Error::Server, "the
/// server's words"), not "the server cannot be reached, and nothing was sent".
#[tokio::test]
async fn a_database_that_the_server_does_not_have_is_a_refusal() {
    let server = Server::start();
    let url = format!("{}/99", server.url().trim_end_matches("/0").trim_end_matches('/'));
    let error = LockClient::builder().connect_timeout(Duration::from_secs(5)).connect(&url).await.unwrap_err();
    assert!(matches!(error, Error::Server { .. }), "{error:?}");
}

/// Two servers in a service's settings, one is down: which? The message must name host and port (they are no secret).
#[tokio::test]
async fn a_refused_connection_names_the_address() {
    let error = LockClient::connect("redis://user:hidden@127.0.0.1:1").await.unwrap_err().to_string();
    assert!(!error.contains("hidden"), "{error}");
    assert!(error.contains("127.0.0.1:1"), "{error}");
    assert!(!error.contains("Os {"), "Debug output in a message for people: {error}");
}

/// The error for a lease says "allowed: 1 ms to 3650 days", but 1 ms is never granted: its proof is 0 ms.
#[tokio::test]
async fn the_shortest_allowed_lease_can_be_had() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("shortest"));
    let mut had = 0;
    for _ in 0..50 {
        had += u32::from(lock.lock().lease(Duration::from_millis(1)).await.is_ok());
    }
    assert!(had > 0, "1 ms was refused 50 times, with Error::Lost");
}

/// In a cluster a script may touch the keys of one slot only: two locks that are renewed together would both be lost.
/// Half a support is worse than none.
#[tokio::test]
async fn a_cluster_is_refused_rather_than_half_supported() {
    let server = Server::builder().arg("--cluster-enabled", "yes").start();
    let mut redis = server.connection();
    redis::cmd("CLUSTER").arg("ADDSLOTS").arg((0..16_384).collect::<Vec<_>>()).exec(&mut redis).unwrap();
    wait_until("the cluster serves", Duration::from_secs(20), || {
        redis::cmd("CLUSTER").arg("INFO").query::<String>(&mut redis).unwrap().contains("cluster_state:ok")
    });
    let error = LockClient::connect(&server.url()).await.unwrap_err();
    assert!(matches!(error, Error::InvalidConfig { setting: "url", .. }), "{error:?}");
    assert!(error.to_string().contains("cluster"), "{error}");
}
