//! Errors as callers see them: a table of bad input and server states, with variant and text.

use std::error::Error as _;
use std::time::Duration;

use crate::support::rewrite::rewriting;
use crate::support::server::{Server, unique};
use redis::cmd;
use redisson_lock::{
    ClientId, Error, LockClient, LockClientBuilder, MAX_NAME_LEN, Owner, OwnerExt, ServerErrorKind,
    Step,
};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const URLS: &str = if cfg!(feature = "tls") {
    "(allowed: redis://[user[:password]@]host[:port][/database], or valkey://, rediss://, valkeys://; redis+sentinel:// etc.)"
} else {
    "(allowed: redis://[user[:password]@]host[:port][/database], or valkey://; redis+sentinel:// etc.)"
};

#[track_caller]
fn assert_error<T: std::fmt::Debug>(answer: Result<T, Error>, is: fn(&Error) -> bool, text: &str) {
    let error = answer.expect_err(text);
    assert!(is(&error), "another variant: {error:?}");
    assert_eq!(error.to_string(), text, "{error:?}");
    assert!(!error.to_string().contains('\n'), "one line");
}

#[tokio::test]
async fn invalid_urls_are_refused_with_what_is_wrong() {
    const NO_SCHEME: &str = "it does not begin with redis://, rediss://, valkey:// or valkeys://";
    for (url, problem) in [
        ("127.0.0.1:6379", NO_SCHEME),
        ("localhost", NO_SCHEME),
        ("http://localhost", NO_SCHEME),
        ("", NO_SCHEME),
        (
            "redis-cluster://localhost",
            "clusters are not supported yet",
        ),
        (
            "REDIS+CLUSTER://localhost",
            "clusters are not supported yet",
        ),
        (
            "redis-sentinel://localhost",
            "a URL for sentinels begins with redis+sentinel://",
        ),
        (
            "redis+sentinel://a,b",
            "the name of a master has to follow the sentinels",
        ),
        (
            "unix:///run/redis.sock",
            "unix sockets are not supported yet",
        ),
        (
            "redis+unix:///run/redis.sock",
            "unix sockets are not supported yet",
        ),
        ("redis://a,b", "several hosts need redis+sentinel://"),
        (
            "redis://user:pass@a:6379,b:6380/1",
            "several hosts need redis+sentinel://",
        ),
        (
            "redis://:pa/ss@localhost",
            "a /, ?, # or % in the user or password is not percent-encoded",
        ),
        (
            "redis://:pa?ss@localhost",
            "a /, ?, # or % in the user or password is not percent-encoded",
        ),
        (
            "redis://:pa#ss@localhost",
            "a /, ?, # or % in the user or password is not percent-encoded",
        ),
        (
            "redis://:pa%ss@localhost",
            "a /, ?, # or % in the user or password is not percent-encoded",
        ),
        (
            "redis://us/er:pass@localhost:6379/0",
            "a /, ?, # or % in the user or password is not percent-encoded",
        ),
        ("redis://localhost:99999", "invalid port number"),
        ("redis://localhost:port", "invalid port number"),
        ("redis://", "it has no host"),
        (
            "redis://localhost/abc",
            "the database is not a number from 0 to 255",
        ),
        (
            "redis://localhost/256",
            "the database is not a number from 0 to 255",
        ),
        (
            "redis://localhost/0?timeout=3",
            "something follows the database number",
        ),
        (
            "redis://localhost/0#x",
            "something follows the database number",
        ),
    ] {
        let is = |error: &Error| matches!(error, Error::InvalidConfig { setting: "url", .. });
        let answer = LockClient::connect(url).await;
        assert_error(answer, is, &format!("invalid url: {problem} {URLS}"));
    }
}

#[tokio::test]
async fn encoded_password_with_url_characters_is_accepted() {
    let rights = ["on", ">p/a?s#s%w:o@rd", "~*", "&*", "+@all"];
    let server = Server::builder().user("app", &rights).start();
    let url = format!(
        "redis://app:p%2Fa%3Fs%23s%25w%3Ao%40rd@127.0.0.1:{}",
        server.port()
    );
    LockClient::connect(&url)
        .await
        .unwrap()
        .shutdown()
        .await
        .unwrap();
}

#[tokio::test]
async fn settings_out_of_bounds_are_refused() {
    let ms = Duration::from_millis;
    let builder = LockClient::builder;
    let table: [(LockClientBuilder, &str); 10] = [
        (
            builder().watchdog_timeout(ms(49)),
            "invalid watchdog timeout: 49ms is too short to be renewed in time (allowed: 50 ms to 3650 days)",
        ),
        (
            builder().watchdog_timeout(3651 * DAY),
            "invalid watchdog timeout: 315446400s is too long (allowed: 50 ms to 3650 days)",
        ),
        (
            builder().recheck_interval(ms(9)),
            "invalid recheck interval: 9ms is out of bounds (allowed: 10 ms to 1 h)",
        ),
        (
            builder().retry_timeout(DAY),
            "invalid retry timeout: 86400s is out of bounds (allowed: 0 to 1 h)",
        ),
        (
            builder().connect_timeout(ms(0)),
            "invalid connect timeout: 0ns is out of bounds (allowed: 1 ms to 1 h)",
        ),
        (
            builder().command_timeout(ms(9)),
            "invalid command timeout: 9ms is out of bounds (allowed: 10 ms to 1 h)",
        ),
        (
            builder().renewal_batch_size(0),
            "invalid renewal batch size: 0 is out of bounds (allowed: 1 to 1000)",
        ),
        (
            builder().renewal_batch_size(1001),
            "invalid renewal batch size: 1001 is out of bounds (allowed: 1 to 1000)",
        ),
        (
            builder().connect_retry(3651 * DAY),
            "invalid connect retry limit: 315446400s is out of bounds (allowed: 0 to 3650 days)",
        ),
        (
            builder().client_name("two words"),
            "invalid client name: \"two words\" is empty, too long, or has other characters \
             (allowed: 1 to 64 printable ASCII characters without spaces)",
        ),
    ];
    for (builder, text) in table {
        let answer = builder.connect("redis://127.0.0.1:1").await;
        assert_error(
            answer,
            |error| matches!(error, Error::InvalidConfig { .. }),
            text,
        );
    }
    let is = |error: &Error| matches!(error, Error::InvalidConfig { .. });
    assert_error(
        Owner::from_thread_id(0),
        is,
        "invalid thread id: 0 is not positive (allowed: 1 to 9223372036854775807)",
    );
    let answer = "not-a-uuid".parse::<ClientId>();
    let error = answer.unwrap_err();
    assert!(
        error.to_string().starts_with("invalid client id: "),
        "{error}"
    );
}

#[tokio::test]
async fn invalid_names_leases_and_timeouts_are_refused() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let is_name = |error: &Error| matches!(error, Error::InvalidName { .. });
    let allowed = format!("(allowed: 1 to {MAX_NAME_LEN} bytes of UTF-8)");
    assert_error(
        client.lock("").lock().await,
        is_name,
        &format!("invalid lock name \"\": it is empty {allowed}"),
    );
    let long = "x".repeat(MAX_NAME_LEN + 1);
    let start = format!("{}… ({} bytes)", "x".repeat(64), MAX_NAME_LEN + 1);
    assert_error(
        client.lock(&long).inspect().await,
        is_name,
        &format!("invalid lock name {start:?}: it is too long {allowed}"),
    );
    assert_eq!(
        client.lock("").name(),
        "",
        "a lock tells the name that it was made with"
    );

    let lock = client.lock(unique("stock"));
    let is_lease = |error: &Error| matches!(error, Error::InvalidLease { .. });
    let is_timeout = |error: &Error| matches!(error, Error::InvalidTimeout { .. });
    for (lease, problem) in [
        (Duration::ZERO, "0ns: shorter than 1ms"),
        (Duration::from_micros(999), "999µs: shorter than 1ms"),
        (3651 * DAY, "315446400s: longer than 3650 days"),
        (
            Duration::MAX,
            "18446744073709551615.999999999s: longer than 3650 days",
        ),
    ] {
        let text = format!(
            "invalid lease time {problem} (allowed: 1ms to 3650 days), for lock {:?}",
            lock.name()
        );
        assert_error(lock.lock().lease(lease).await, is_lease, &text);
        assert_error(lock.try_lock().lease(lease).await, is_lease, &text);
        assert_error(
            lock.lock().lease(lease).run(async {}).await,
            is_lease,
            &text,
        );
    }
    let text = format!(
        "invalid timeout 315446400s: longer than 3650 days, for lock {:?}",
        lock.name()
    );
    assert_error(lock.lock().timeout(3651 * DAY).await, is_timeout, &text);
    assert_error(lock.try_lock_for(3651 * DAY).await, is_timeout, &text);
    for error in [
        lock.try_lock().lease(Duration::ZERO).await.unwrap_err(),
        lock.try_lock_for(3651 * DAY).await.unwrap_err(),
    ] {
        assert_eq!(error.lock(), Some(lock.name()));
    }
}

#[tokio::test]
async fn errors_of_connecting_name_the_address() {
    let answer = LockClient::connect("redis://127.0.0.1:1").await;
    let Err(Error::Connection { error, .. }) = &answer else {
        panic!("{answer:?}")
    };
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    let source = answer.as_ref().unwrap_err().source().expect("a source");
    assert_eq!(source.to_string(), "Connection refused");
    let is = |error: &Error| matches!(error, Error::Connection { .. });
    assert_error(
        answer,
        is,
        "no connection to 127.0.0.1:1: Connection refused",
    );

    // A server that accepts and does not answer.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    let limit = Duration::from_millis(300);
    let builder = LockClient::builder().connect_timeout(limit);
    let answer = builder.connect(&format!("redis://{address}")).await;
    let is = |error: &Error| {
        matches!(
            error,
            Error::Timeout {
                step: Step::Connect,
                ..
            }
        )
    };
    assert_error(
        answer,
        is,
        &format!("timed out after 300ms connecting to {address}"),
    );
}

#[tokio::test]
async fn server_errors_have_kind_and_source() {
    let server = Server::builder().password("secret7").start();
    let answer = LockClient::connect(&format!("redis://:wrong@127.0.0.1:{}", server.port())).await;
    let error = answer.unwrap_err();
    let Error::Server {
        lock: None,
        error: inner,
        ..
    } = &error
    else {
        panic!("{error:?}")
    };
    assert_eq!(inner.kind(), ServerErrorKind::Auth);
    assert!(!error.is_retryable());
    assert_eq!(
        error.source().expect("a source").to_string(),
        inner.message()
    );

    let url = format!("redis://:secret7@127.0.0.1:{}", server.port());
    let client = LockClient::connect(&url).await.unwrap();
    let name = unique("stock");
    cmd("SET")
        .arg(&name)
        .arg("text")
        .exec(&mut server.connection())
        .unwrap();
    let text = format!(
        "server error on lock {name:?}: WRONGTYPE Operation against a key holding the wrong kind of value"
    );
    let is = |error: &Error| matches!(error, Error::Server { error, .. } if error.kind() == ServerErrorKind::WrongType);
    let lock = client.lock(&name);
    assert_error(lock.lock().await, is, &text);
    assert_error(lock.try_lock().await, is, &text);
    assert_error(lock.inspect().await, is, &text);
    assert_error(lock.force_unlock().await, is, &text);
    assert_eq!(lock.lock().await.unwrap_err().lock(), Some(&*name));
}

#[tokio::test]
async fn database_that_the_acl_forbids_is_named_as_such() {
    let server = Server::builder()
        .user("app", &["on", "nopass", "~*", "&*", "+@all", "-select"])
        .start();
    let url = |database: &str| format!("redis://app@127.0.0.1:{}{database}", server.port());
    LockClient::connect(&url("")).await.unwrap();
    LockClient::connect(&url("/0")).await.unwrap();
    let error = LockClient::connect(&url("/3")).await.unwrap_err();
    let Error::Server { error: inner, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(inner.kind(), ServerErrorKind::NoPermission, "{error}");
    assert!(inner.message().contains("select"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn server_older_than_6_2_is_refused_with_its_version() {
    let server = Server::start();
    let address = rewriting(server.port(), as_old).await;
    let answer = LockClient::connect(&format!("redis://{address}")).await;
    let is = |error: &Error| matches!(error, Error::UnsupportedServer { .. });
    assert_error(
        answer,
        is,
        &format!(
            "unsupported server {address}: its version is 6.0.16, and 6.2 or later is required"
        ),
    );
}

/// Replaces the version in an INFO reply. The reply keeps its length: a field that the client does
/// not read becomes shorter or longer.
fn as_old(reply: String) -> String {
    let Some((before, rest)) = reply.split_once("redis_version:") else {
        return reply;
    };
    let Some((version, rest)) = rest.split_once("\r\n") else {
        return reply;
    };
    let field = "redis_git_dirty:";
    let old = "6.0.16";
    let resized = match old.len().checked_sub(version.len()) {
        Some(more) => field[more..].to_owned(),
        None => format!("{}{field}", "x".repeat(version.len() - old.len())),
    };
    format!(
        "{before}redis_version:{old}\r\n{}",
        rest.replace(field, &resized)
    )
}

#[tokio::test]
async fn unlock_without_a_hold_says_which_owner_lacks_it() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name();
    let is = |error: &Error| matches!(error, Error::NotHeld { .. });
    assert_error(
        lock.unlock().await,
        is,
        &format!("cannot unlock lock {name:?}: there is no current owner"),
    );
    let owner = Owner::new();
    let field = format!("{}:{owner}", client.client_id());
    assert_error(
        lock.unlock().with_owner(owner).await,
        is,
        &format!("cannot unlock lock {name:?}: {field} does not hold it"),
    );
    let _guard = lock.lock().with_owner(owner).await.unwrap();
    assert_error(
        lock.unlock().with_owner(owner).await,
        is,
        &format!("cannot unlock lock {name:?}: {field} has no detached hold"),
    );
}

#[tokio::test]
async fn lost_lock_says_how_it_was_lost() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name();
    let is = |error: &Error| matches!(error, Error::Lost { .. }) && error.is_lost();
    let guard = lock.lock().await.unwrap();
    assert!(lock.force_unlock().await.unwrap());
    assert_error(
        guard.unlock().await,
        is,
        &format!("lock {name:?} was lost: this client force-unlocked it"),
    );
    let guard = lock.lock().lease(Duration::from_millis(800)).await.unwrap();
    guard.lost().await;
    assert_error(
        guard.unlock().await,
        is,
        &format!("lock {name:?} was lost: its lease expired, or could not be confirmed in time"),
    );
    let guard = lock.lock().await.unwrap();
    client.shutdown().await.unwrap();
    assert_error(
        guard.unlock().await,
        is,
        &format!("lock {name:?} was lost: the client was shut down"),
    );
    assert_error(
        lock.lock().await,
        |error| *error == Error::Closed,
        "the lock client is shut down",
    );
}

/// A finished future that is polled again panics; it never hangs.
#[tokio::test]
async fn finished_request_panics_when_it_is_polled_again() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let mut request = lock.lock().into_future();
    let guard = (&mut request).await.unwrap();
    let again = std::panic::AssertUnwindSafe(async move { (&mut request).await.map(drop) });
    let panicked = futures::FutureExt::catch_unwind(again).await;
    assert!(panicked.is_err(), "{panicked:?}");
    guard.unlock().await.unwrap();
}
