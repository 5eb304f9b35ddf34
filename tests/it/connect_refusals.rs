//! Servers and addresses that refuse a client, and what the errors say.

use std::error::Error as _;
use std::io::{Read, Write};
use std::time::{Duration, Instant};

use redisson_lock::{Error, LockClient, ServerErrorKind};

use crate::support::log::Log;
use crate::support::observe::connections;
use crate::support::server::{Server, unique, wait_until_async};

const LIMIT: Duration = Duration::from_secs(10);
fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// "events at info when the server is reached again (with the address and the length of the
/// outage)".
#[tokio::test]
async fn outage_is_as_long_as_the_server_was_silent() {
    let server = Server::start();
    let log = Log::capture();
    let client = LockClient::builder()
        .command_timeout(ms(1_500))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    lock.is_locked().await.unwrap();
    server.pause();
    let begun = Instant::now();
    let asking = tokio::spawn(async move { lock.is_locked().await });
    tokio::time::sleep(ms(3_000)).await;
    server.resume();
    let silent = begun.elapsed();
    let _ = asking.await;
    wait_until_async("reached again", LIMIT, || async {
        !log.with("the server is connected again").is_empty()
    })
    .await;
    let line = &log.with("the server is connected again")[0];
    assert!(line.fields["address"].contains("127.0.0.1"));
    let text = &line.fields["outage"];
    let seconds: f64 = match text.strip_suffix("ms") {
        Some(millis) => millis.parse::<f64>().unwrap() / 1e3,
        None => text.trim_end_matches('s').parse().unwrap(),
    };
    assert!(
        seconds >= silent.as_secs_f64() * 0.9,
        "the server was silent for {silent:?}, the event says {text}"
    );
}

/// A server that answers each connection's first bytes with this, and closes it.
fn fake(answer: &'static [u8]) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut buffer = [0; 512];
            let _ = stream.read(&mut buffer);
            let _ = stream.write_all(answer);
        }
    });
    address.to_string()
}

async fn refusal(answer: &'static [u8]) -> (Error, String, Duration) {
    let address = fake(answer);
    let begun = Instant::now();
    let error = LockClient::builder()
        .connect_timeout(ms(1_000))
        .connect(&format!("redis://app:hidden7@{address}"))
        .await
        .unwrap_err();
    let all = format!("{error} {error:?} {:?}", error.source());
    assert!(!all.contains("hidden7"), "{all}");
    assert!(!error.to_string().contains('\n'), "{error}");
    (error, address, begun.elapsed())
}

#[tokio::test]
async fn server_in_protected_mode_is_a_server_error() {
    let (error, _, _) = refusal(
        b"-DENIED Redis is running in protected mode because protected mode is enabled\r\n",
    )
    .await;
    println!("{error:?}");
    assert!(matches!(error, Error::Server { .. }), "{error:?}");
    assert!(!error.is_retryable(), "{error:?}");
}

/// Redis 5 does not know HELLO.
#[tokio::test]
async fn server_without_hello_is_unsupported() {
    let (error, _, _) =
        refusal(b"-ERR unknown command `HELLO`, with args beginning with: `3`, \r\n").await;
    println!("{error:?}");
    assert!(error.to_string().contains("6.2"), "{error}");
}

#[tokio::test]
async fn each_error_of_connecting_names_the_address() {
    let mut wrong = Vec::new();
    for answer in [
        &b"-ERR max number of clients reached\r\n"[..],
        b"-WRONGPASS invalid username-password pair or user is disabled.\r\n",
        b"-NOAUTH Authentication required.\r\n",
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-MASTERDOWN Link with MASTER is down\r\n",
        b"-NOPERM this user has no permissions to run the 'hello' command\r\n",
        b"",
        b"garbage\r\n",
        b"$-1\r\n",
        b"%1\r\n+server\r\n+redis\r\n",
    ] {
        let (error, address, took) = refusal(answer).await;
        println!(
            "{:?} -> {error} | {error:?} {took:?}",
            String::from_utf8_lossy(answer)
        );
        if !error.to_string().contains(&address) {
            wrong.push(format!("{error}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[tokio::test]
async fn error_of_odd_url_shows_no_password() {
    for url in [
        "redis://[::1]:1",
        "REDIS://127.0.0.1:1",
        "Valkey://127.0.0.1:1",
        " redis://127.0.0.1:1 ",
        "redis://127.0.0.1:0",
        "redis://user@127.0.0.1:1",
        "redis://:@127.0.0.1:1",
        "redis://user:@127.0.0.1:1",
        "redis://a b:1",
        "redis://us er:pa ss@127.0.0.1:1",
        "redis://127.0.0.1:1//0",
        "redis://127.0.0.1:1/+5",
        "redis://127.0.0.1:1/0?x=a@b",
        "redis-cluster://127.0.0.1:1",
        "redis+cluster://a",
        "redis+unix:///tmp/x",
        "unix:///tmp/x",
        "unix:/tmp/x",
        "/tmp/redis.sock",
        "redis:///tmp/x",
        "redis:/tmp/x",
        "rediss://a",
        "redis-sentinel://a",
        "redis://a:1,b:2",
        "redis://a,b",
        "redis://:hidden7@x@127.0.0.1:1",
        "redis://:hid[den7@127.0.0.1:1",
        "redis://:hid\\den7@127.0.0.1:1",
        "redis://127.0.0.1:1/0/1",
        "redis://127.0.0.1:1/00",
        "redis://::1:1",
        "redis://127.1:1",
        "redis://:hid^den7@127.0.0.1:1",
        "redis://:hid\tden7@127.0.0.1:1",
        "redis://user:hid:den7@127.0.0.1:1",
        "redis://%41pp:x@127.0.0.1:1",
        "redis://127.0.0.1:1?db=3",
        "redis://:hid%ZZden7@127.0.0.1:1",
        "redis://:hid%00den7@127.0.0.1:1",
        "redis://:hid%FFden7@127.0.0.1:1",
        "127.0.0.1:6379",
        "redis-socket:///x",
        "redis://exa%20mple:1",
        "redis://127.0.0.1:-1",
        "redis://[fe80::1%25eth0]:1",
    ] {
        let begun = Instant::now();
        let answer = LockClient::builder()
            .connect_timeout(ms(500))
            .connect(url)
            .await;
        let took = begun.elapsed();
        match answer {
            Ok(_) => println!("{url:40} -> connected"),
            Err(error) => {
                println!(
                    "{url:40} -> {error} | retry={} {took:?}",
                    error.is_retryable()
                );
                let all = format!("{error} {error:?}");
                assert!(!all.contains("hid") && !all.contains("den7"), "{all}");
            }
        }
    }
}

/// Dropped at any point, `connect` closes what was opened.
#[tokio::test]
async fn cancelled_connect_leaves_no_connection() {
    let server = Server::start();
    let mut redis = server.connection();
    let before = connections(&mut redis);
    for millis in 0..25 {
        let _ = tokio::time::timeout(
            Duration::from_micros(millis * 300),
            LockClient::builder()
                .connect_retry(LIMIT)
                .connect(&server.url()),
        )
        .await;
    }
    wait_until_async("they are closed", LIMIT, || {
        let now = connections(&mut redis);
        async move { now == before }
    })
    .await;
}

#[tokio::test]
async fn connect_retry_is_bounded_by_its_limit_when_the_server_is_silent() {
    let server = Server::start();
    server.pause();
    let begun = Instant::now();
    let error = LockClient::builder()
        .connect_timeout(ms(700))
        .connect_retry(ms(1_500))
        .connect(&server.url())
        .await
        .unwrap_err();
    let took = begun.elapsed();
    server.resume();
    assert!(matches!(error, Error::Timeout { .. }), "{error:?}");
    assert!(took < ms(1_500 + 700 + 300), "{took:?}");
}

/// `InvalidTimeout`, `Inspect`: with a silent server the error says which server.
#[tokio::test(flavor = "multi_thread")]
async fn errors_of_a_silent_server_name_the_address() {
    let server = Server::start();
    let client = LockClient::builder()
        .command_timeout(ms(200))
        .retry_timeout(ms(300))
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    let address = format!("127.0.0.1:{}", server.port());
    server.pause();
    let mut wrong = Vec::new();
    let mut check = |what: &str, error: Error| {
        println!("{what}: {error} | {error:?}");
        if !error.to_string().contains(&address) {
            wrong.push(format!("{what}: {error}"));
        }
    };
    check("is_locked", lock.is_locked().await.unwrap_err());
    check("inspect", lock.inspect().await.unwrap_err());
    check("lock", client.lock("b").lock().await.unwrap_err());
    check("force_unlock", lock.force_unlock().await.unwrap_err());
    check("unlock", guard.unlock().await.unwrap_err());
    server.resume();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A permanent refusal is an error at once, `connect_retry` or not.
#[tokio::test]
async fn connect_retry_does_not_wait_for_a_server_in_protected_mode() {
    let address =
        fake(b"-DENIED Redis is running in protected mode because protected mode is enabled\r\n");
    let begun = Instant::now();
    let error = LockClient::builder()
        .connect_retry(ms(4_000))
        .connect(&format!("redis://{address}"))
        .await
        .unwrap_err();
    assert!(
        begun.elapsed() < ms(2_000),
        "{:?}: {error:?}",
        begun.elapsed()
    );
}

#[tokio::test]
async fn connect_retry_does_not_wait_for_another_service() {
    let address = fake(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
    let begun = Instant::now();
    let error = LockClient::builder()
        .connect_retry(ms(4_000))
        .connect(&format!("redis://{address}"))
        .await
        .unwrap_err();
    assert!(
        begun.elapsed() < ms(2_000),
        "{:?}: {error:?}",
        begun.elapsed()
    );
}

/// It waits while the server is full: that passes, like a server that starts.
#[tokio::test]
async fn full_server_is_retryable() {
    let server = Server::builder().arg("--maxclients", "1").start();
    let _redis = server.connection();
    let error = LockClient::connect(&server.url()).await.unwrap_err();
    println!("{error} {error:?}");
    assert!(error.is_retryable(), "{error:?}");
}

/// The query is wrong, not the password: there is none.
#[tokio::test]
async fn query_with_an_at_sign_is_not_taken_for_a_password() {
    let error = LockClient::connect("redis://127.0.0.1:1/0?mail=a@b")
        .await
        .unwrap_err();
    assert!(!error.to_string().contains("password is not"), "{error}");
}

/// A database that the server does not have, or that the user may not select, is named.
#[tokio::test]
async fn refused_database_is_named() {
    let server = Server::start();
    let address = format!("127.0.0.1:{}", server.port());
    let user = [
        "SETUSER", "app", "on", ">hidden7", "~*", "&*", "+@all", "-select",
    ];
    redis::cmd("ACL")
        .arg(&user)
        .exec(&mut server.connection())
        .unwrap();
    for (url, kind, start) in [
        (
            format!("redis://{address}/99"),
            ServerErrorKind::Other,
            format!("server error from {address}, database 99: ERR"),
        ),
        (
            format!("redis://app:hidden7@{address}/1"),
            ServerErrorKind::NoPermission,
            format!("server error from {address}, database 1: NOPERM"),
        ),
    ] {
        let error = LockClient::connect(&url).await.unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with(&start), "{text}");
        let Error::Server { error, .. } = &error else {
            panic!("{error:?}")
        };
        assert_eq!(error.kind(), kind);
    }
    // A refusal of the user does not name the database.
    let url = format!("redis://app:wrong@{address}/1");
    let text = LockClient::connect(&url).await.unwrap_err().to_string();
    assert!(!text.contains("database"), "{text}");
}

/// "`io::ErrorKind::InvalidData` if another service than Redis or Valkey answers", which is not
/// worth a retry.
#[tokio::test]
async fn connect_to_other_service_is_refused_as_such() {
    use std::io::{ErrorKind, Read, Write};
    let mut wrong = Vec::new();
    for answer in [
        &b"HTTP/1.1 400 Bad Request\r\n\r\n"[..],
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"220 mail.example ESMTP\r\n",
        b"ERROR\r\n",
        b"\x15\x03\x03\x00\x02\x02\x28",
        b"\x4a\x00\x00\x00\x0a8.0.36\x00",
    ] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut buffer = [0; 512];
                let _ = stream.read(&mut buffer);
                let _ = stream.write_all(answer);
            }
        });
        let error = LockClient::builder()
            .connect_timeout(ms(2_000))
            .connect(&format!("redis://{address}"))
            .await
            .unwrap_err();
        let is_foreign = matches!(
            &error,
            Error::Connection { error, .. } if error.kind() == ErrorKind::InvalidData
        );
        if !is_foreign || error.is_retryable() {
            wrong.push(format!("{:?}: {error:?}", String::from_utf8_lossy(answer)));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
