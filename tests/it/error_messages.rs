//! Error messages and their documented meaning, as a newcomer meets them.

use std::io::{Read, Write};
use std::time::Duration;

use crate::support::server::{Server, unique};
use redisson_lock::{Error, LockClient};

/// `Error::Connection` is documented: "The server cannot be reached, and nothing was changed."
#[tokio::test]
async fn a_question_that_was_sent_is_not_told_as_unsent() {
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
        "the question was sent, and the error says nothing was: {error:?}"
    );
}

/// A host that does not exist: the message is for people, not Rust's Debug.
#[tokio::test]
async fn unknown_host_is_told_without_debug_noise() {
    let error = LockClient::connect("redis://no.such.host.invalid:6379")
        .await
        .unwrap_err();
    assert!(!error.to_string().contains("Custom {"), "{error}");
}

/// Wrong port: something else than Redis answers there.
#[tokio::test]
async fn wrong_port_with_another_service_says_that_it_is_no_redis() {
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

/// A database number out of bounds names what is wrong.
#[tokio::test]
async fn database_number_is_named() {
    let error = LockClient::connect("redis://127.0.0.1:6379/abc")
        .await
        .unwrap_err();
    let Error::InvalidConfig { problem, .. } = &error else {
        panic!("{error:?}")
    };
    assert!(problem.contains("database"), "{error}");
}

/// A URL without a scheme, the commonest mistake.
#[tokio::test]
async fn missing_scheme_is_named() {
    let error = LockClient::connect("127.0.0.1:6379").await.unwrap_err();
    assert!(
        !error.to_string().contains("relative URL without a base"),
        "{error}"
    );
}

/// README: "each says what the caller does next".
#[tokio::test]
async fn a_server_that_is_not_there_says_what_to_do() {
    let error = LockClient::connect("redis://127.0.0.1:1")
        .await
        .unwrap_err();
    let t = error.to_string();
    assert!(
        t.contains("is ") || t.contains("start") || t.contains("check"),
        "no advice in: {t}"
    );
}

/// Password missing and wrong.
#[tokio::test]
async fn passwords() {
    let server = Server::builder().password("secret7").start();
    for url in [
        format!("redis://127.0.0.1:{}", server.port()),
        format!("redis://:wrong@127.0.0.1:{}", server.port()),
        format!("redis://bob@127.0.0.1:{}", server.port()),
    ] {
        let error = LockClient::connect(&url).await.unwrap_err();
        assert!(matches!(error, Error::Server { .. }));
    }
}

/// A server that stands still.
#[tokio::test]
async fn silent_server_at_connect() {
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
    assert!(begun.elapsed() < Duration::from_millis(1800));
}
