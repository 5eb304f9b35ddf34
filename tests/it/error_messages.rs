//! Error variants and messages for common mistakes and for failures while connecting.

use std::error::Error as _;
use std::io::{Read, Write};
use std::time::Duration;

use crate::support::server::{Server, unique, wait_until_async};
use redis::cmd;
use redisson_lock::{ClientId, Error, LockClient};

use crate::support::log::Log;

const LIMIT: Duration = Duration::from_secs(20);

/// [`Error::Connection`] states that the server cannot be reached. Here it may have run the call.
#[tokio::test]
async fn sent_inspect_without_reply_is_no_connection_error() {
    let server = Server::start();
    let client = LockClient::builder()
        .command_timeout(Duration::from_millis(300))
        .retry_timeout(Duration::from_millis(500))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    lock.is_locked().await.unwrap();
    server.pause();
    let error = lock.is_locked().await.unwrap_err();
    server.resume();
    assert!(
        !matches!(error, Error::Connection { .. }),
        "the call was sent, and the error states that it was not: {error:?}"
    );
}

/// A host that does not exist. The message contains no Debug output of an I/O error.
#[tokio::test]
async fn unknown_host_error_contains_no_debug_output() {
    let error = LockClient::connect("redis://no.such.host.invalid:6379")
        .await
        .unwrap_err();
    assert!(!error.to_string().contains("Custom {"), "{error}");
}

/// Wrong port: another service answers there.
#[tokio::test]
async fn wrong_port_error_mentions_redis() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut s = stream.unwrap();
            let mut buf = [0; 512];
            let _ = s.read(&mut buf);
            let _ = s.write_all(
                b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
            );
        }
    });
    let error = LockClient::connect(&format!("redis://127.0.0.1:{port}"))
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("Redis") || text.contains("redis"), "{text}");
}

#[tokio::test]
async fn paused_server_at_connect_is_timeout() {
    let server = Server::start();
    server.pause();
    let begun = std::time::Instant::now();
    let error = LockClient::builder()
        .connect_timeout(Duration::from_secs(1))
        .connect(&server.url())
        .await
        .unwrap_err();
    server.resume();
    assert!(matches!(error, Error::Timeout { .. }));
    assert!(begun.elapsed() < Duration::from_secs(10));
}

async fn hasty(url: &str) -> LockClient {
    LockClient::builder()
        .command_timeout(Duration::from_millis(300))
        .retry_timeout(Duration::from_millis(500))
        .connect(url)
        .await
        .unwrap()
}

/// "`Display` states what happened in one line".
#[tokio::test]
async fn error_about_owner_with_line_end_is_one_line() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    cmd("HSET")
        .arg(&[lock.name(), "other\nERROR forged line", "1"])
        .exec(&mut redis)
        .unwrap();
    let error = lock.lock().timeout(Duration::ZERO).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("held by"), "{text}");
    assert!(!text.chars().any(char::is_control), "{text:?}");
}

/// "`Display` states what happened in one line".
#[test]
fn error_about_client_id_with_line_end_is_one_line() {
    for text in [
        "a\nb",
        "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e\n1",
        "\u{1b}[31m",
    ] {
        let error = text.parse::<ClientId>().unwrap_err().to_string();
        assert!(!error.chars().any(char::is_control), "{error:?}");
    }
}

/// "The name of the lock that is concerned, if one is."
#[tokio::test]
async fn connection_error_of_a_lock_names_the_lock() {
    let mut server = Server::start();
    let log = Log::capture();
    let client = hasty(&server.url()).await;
    let lock = client.lock(unique("stock"));
    server.stop();
    wait_until_async("the client has noticed", LIMIT, || async {
        !log.with("connecting is tried again").is_empty()
    })
    .await;
    let error = lock.lock().await.unwrap_err();
    assert!(matches!(error, Error::Connection { .. }), "{error:?}");
    assert!(error.source().is_some());
    assert!(error.to_string().contains(&server.port().to_string()));
    assert_eq!(error.lock(), Some(lock.name()), "{error}");
}

/// "Host and port": with brackets, or the port cannot be distinguished from the address.
#[tokio::test]
async fn address_of_an_ipv6_host_has_brackets() {
    let error = LockClient::connect("redis://[::1]:1").await.unwrap_err();
    assert!(error.to_string().contains("[::1]:1"), "{error}");
}
