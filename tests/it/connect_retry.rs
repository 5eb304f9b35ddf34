//! `connect_retry`: a service that starts before its server, and errors for which waiting is no
//! use.

use std::time::{Duration, Instant};

use redisson_lock::{Error, LockClient, LockClientBuilder, ServerErrorKind};
use tracing::Level;

use crate::support::log::Log;
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
