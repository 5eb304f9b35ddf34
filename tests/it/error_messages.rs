//! Error variants and messages for common mistakes and for failures while connecting.

use std::io::{Read, Write};
use std::time::Duration;

use crate::support::server::{Server, unique};
use redisson_lock::{Error, LockClient};

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
