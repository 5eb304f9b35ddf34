//! Connecting: what went wrong, in words that help.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::proxy::{Fate, Proxy};
use crate::support::server::{Server, unique, wait_until};
use redisson_lock::{Error, LockClient};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::{TcpListener, TcpStream};

/// `redis://host/99`: the server answers `ERR DB index is out of range`. That is a refusal
/// (Error::Server, "the server's words"), not "the server cannot be reached, and nothing was sent".
#[tokio::test]
async fn a_database_that_the_server_does_not_have_is_a_refusal() {
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

/// Two servers in a service's settings, one is down: which? The message must name host and port
/// (they are no secret).
#[tokio::test]
async fn a_refused_connection_names_the_address() {
    let error = LockClient::connect("redis://user:hidden@127.0.0.1:1")
        .await
        .unwrap_err()
        .to_string();
    assert!(!error.contains("hidden"), "{error}");
    assert!(error.contains("127.0.0.1:1"), "{error}");
    assert!(
        !error.contains("Os {"),
        "Debug output in a message for people: {error}"
    );
}

/// The error for a lease says "allowed: 1 ms to 3650 days", but 1 ms is never granted: its proof is
/// 0 ms.
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

/// In a cluster a script may touch the keys of one slot only: two locks that are renewed together
/// would both be lost. Half a support is worse than none.
#[tokio::test]
async fn a_cluster_is_refused_rather_than_half_supported() {
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

/// Valkey 8 and 9 name the mode `server_mode`. Redis is made to speak so.
#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_of_valkey_is_refused() {
    let server = Server::builder().arg("--cluster-enabled", "yes").start();
    assert!(
        LockClient::connect(&server.url()).await.is_err(),
        "as Redis names it"
    );
    let (url, spoken) = as_valkey(server.port()).await;
    let told = LockClient::connect(&url).await;
    assert!(
        spoken.load(Ordering::Acquire),
        "the client did not ask, or was told otherwise: {told:?}"
    );
    assert!(
        matches!(told, Err(Error::UnsupportedServer { .. })),
        "connected to a cluster: {told:?}; a lock there: {:?}",
        told.as_ref().unwrap().lock("a").lock().await
    );
}

/// A way to the server on which it names its mode as Valkey does, and whether it has done so.
async fn as_valkey(server: u16) -> (String, Arc<AtomicBool>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let spoken = Arc::new(AtomicBool::new(false));
    let speaks = Arc::clone(&spoken);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let spoken = Arc::clone(&speaks);
            tokio::spawn(async move {
                let mut server = TcpStream::connect(("127.0.0.1", server)).await.unwrap();
                let (mut from_client, mut to_client) = client.split();
                let (mut from_server, mut to_server) = server.split();
                let replies = async {
                    let mut buffer = vec![0; 65_536];
                    while let Ok(length @ 1..) = from_server.read(&mut buffer).await {
                        // Of the same length: one letter less in a line that nobody reads.
                        let reply = String::from_utf8_lossy(&buffer[..length])
                            .replace("redis_mode:cluster", "server_mode:cluster")
                            .replace("redis_git_dirty:", "redis_git_dirt:");
                        spoken.fetch_or(reply.contains("server_mode:cluster"), Ordering::AcqRel);
                        if to_client.write_all(reply.as_bytes()).await.is_err() {
                            return;
                        }
                    }
                };
                // However it ends: the client has gone.
                let _ = tokio::join!(copy(&mut from_client, &mut to_server), replies);
            });
        }
    });
    (url, spoken)
}

/// Connecting has many steps, and the limit is for all of them: the reply that is lost is to the
/// loading of a script.
#[tokio::test(flavor = "multi_thread")]
async fn connecting_takes_no_longer_than_its_timeout() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    proxy.next_reply_to(&["SCRIPT", "LOAD"], Fate::Swallow);
    let began = Instant::now();
    let builder = LockClient::builder().command_timeout(Duration::from_secs(60));
    let told = builder
        .connect_timeout(Duration::from_millis(500))
        .connect(&proxy.url())
        .await;
    assert_eq!(proxy.applied(), 1);
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "{:?} instead of 500 ms: {told:?}",
        began.elapsed()
    );
}

/// A server that stops, or a balancer that hangs up. No such time has passed.
#[tokio::test]
async fn a_connection_that_is_closed_while_connecting_is_no_timeout() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    proxy.next_reply_to(&["CLIENT", "INFO"], Fate::Close);
    let begun = Instant::now();
    let error = LockClient::connect(&proxy.url()).await.unwrap_err();
    let took = begun.elapsed();
    let told = match error {
        Error::Timeout { after, .. } => after,
        _ => Duration::ZERO,
    };
    assert!(
        told < took + Duration::from_secs(1),
        "after {took:?}: {error}"
    );
}
