//! `connect_retry`: a service that starts before its server, and errors for which waiting is no
//! use.

use std::time::{Duration, Instant};

use redis::cmd;
use redisson_lock::{Error, LockClient, LockClientBuilder, ServerErrorKind};
use tracing::Level;

use crate::support::log::Log;
use crate::support::proxy::Proxy;
use crate::support::server::{Server, wait_until_async};

/// Far below the limits that the tests set, and far above what an answer takes.
const LIMIT: Duration = Duration::from_secs(10);

fn patient() -> LockClientBuilder {
    LockClient::builder()
        .connect_timeout(Duration::from_millis(500))
        .connect_retry(Duration::from_secs(60))
}

#[tokio::test]
async fn connect_retry_waits_for_a_server_that_starts_later() {
    let log = Log::capture();
    let mut server = Server::start();
    server.stop();
    let url = server.url();
    let connecting = tokio::spawn(async move { patient().connect(&url).await });
    // Not before it has failed once.
    wait_until_async("an attempt has failed", LIMIT, || async {
        !log.with("connecting is tried again").is_empty()
    })
    .await;
    assert!(!connecting.is_finished());
    let server = tokio::task::spawn_blocking(move || {
        server.restart();
        server
    })
    .await
    .unwrap();
    let client = tokio::time::timeout(LIMIT, connecting)
        .await
        .expect("it connects")
        .unwrap()
        .unwrap();
    client.lock("a").run(async {}).await.unwrap();
    assert_eq!(
        log.from(Level::WARN).len(),
        1,
        "one event for all attempts: {:?}",
        log.from(Level::WARN)
    );
    client.shutdown().await.unwrap();
    drop(server);
}

#[tokio::test]
async fn connect_retry_ends_with_the_error_of_the_last_attempt() {
    let begun = Instant::now();
    let limit = Duration::from_millis(300);
    let error = LockClient::builder()
        .connect_retry(limit)
        .connect("redis://127.0.0.1:1")
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Connection { .. }), "{error:?}");
    assert!(begun.elapsed() < LIMIT);
}

#[tokio::test]
async fn connect_retry_does_not_wait_for_a_refused_password() {
    let server = Server::builder().password("secret7").start();
    let begun = Instant::now();
    let url = format!("redis://:wrong@127.0.0.1:{}", server.port());
    let error = patient().connect(&url).await.unwrap_err();
    let Error::Server { error, .. } = error else {
        panic!("{error:?}")
    };
    assert_eq!(error.kind(), ServerErrorKind::Auth);
    assert!(begun.elapsed() < LIMIT);
}

#[tokio::test]
async fn connect_without_retry_makes_one_attempt() {
    let log = Log::capture();
    LockClient::connect("redis://127.0.0.1:1")
        .await
        .unwrap_err();
    assert!(log.with("connecting is tried again").is_empty());
}

/// "so that a service can start before its server": behind a proxy that accepts and closes.
#[tokio::test(flavor = "multi_thread")]
async fn connect_retry_waits_behind_a_proxy_whose_server_starts_later() {
    let mut server = Server::start();
    server.stop();
    let proxy = Proxy::start(&server).await;
    let url = proxy.url();
    let refused = LockClient::connect(&url).await.unwrap_err();
    assert!(refused.is_retryable(), "{refused:?}");
    let connecting = tokio::spawn(async move {
        LockClient::builder()
            .connect_retry(Duration::from_secs(60))
            .connect(&url)
            .await
    });
    let server = tokio::task::spawn_blocking(move || {
        server.restart();
        server
    })
    .await
    .unwrap();
    let client = connecting.await.unwrap().unwrap();
    client.lock("a").run(async {}).await.unwrap();
    drop(server);
}

/// "events at info when the server is reached again (with the address and the length of the
/// outage)".
#[tokio::test]
async fn connect_retry_that_succeeds_is_logged_at_info() {
    let mut server = Server::start();
    server.stop();
    let log = Log::capture();
    let url = server.url();
    let connecting = tokio::spawn(async move {
        LockClient::builder()
            .connect_retry(Duration::from_secs(60))
            .connect(&url)
            .await
    });
    wait_until_async("an attempt has failed", LIMIT, || async {
        !log.with("connecting is tried again").is_empty()
    })
    .await;
    let server = tokio::task::spawn_blocking(move || {
        server.restart();
        server
    })
    .await
    .unwrap();
    let _client = connecting.await.unwrap().unwrap();
    let events = log.with("connected");
    assert_eq!(events.len(), 1, "{:?}", log.from(Level::INFO));
    assert!(events[0].fields["address"].contains(&server.port().to_string()));
}

/// A connect that fails half-way closes what it opened, and one that may wait connects later.
#[tokio::test]
async fn connect_retry_waits_until_a_full_server_has_room() {
    let server = Server::builder().arg("--maxclients", "2").start();
    let mut redis = server.connection();
    let error = LockClient::connect(&server.url()).await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    wait_until_async("the first connection is closed", LIMIT, || {
        let list: String = cmd("CLIENT").arg("LIST").query(&mut redis).unwrap();
        async move { list.lines().count() == 1 }
    })
    .await;
    let log = Log::capture();
    let url = server.url();
    let connecting = tokio::spawn(async move {
        LockClient::builder()
            .connect_retry(Duration::from_secs(60))
            .connect(&url)
            .await
    });
    wait_until_async("an attempt has failed", LIMIT, || async {
        !log.with("connecting is tried again").is_empty()
    })
    .await;
    cmd("CONFIG")
        .arg(&["SET", "maxclients", "100"])
        .exec(&mut redis)
        .unwrap();
    let client = connecting.await.unwrap().unwrap();
    assert_eq!(client.stats(), Default::default());
    client.lock("a").run(async {}).await.unwrap();
}
