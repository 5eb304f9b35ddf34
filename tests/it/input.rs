//! Input: a typed error refuses invalid input before anything is sent, unusual input works, and no
//! output shows a password.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::support::observe::{hold_count, ttl};
use crate::support::process::{self, run_alone};
use crate::support::server::{Server, unique, wait_until};
use redis::{Connection, cmd};
use redisson_lock::{
    ClientId, Error, LockClient, LockClientBuilder, MAX_NAME_LEN, Owner, OwnerExt, ReentrantLock,
    Step,
};

/// The limit of a step that waits for no lease to expire; far shorter than the leases that no test
/// waits for.
const LIMIT: Duration = Duration::from_secs(10);

/// Longer than any test, so that a step that waits for it fails.
const NEVER: Duration = Duration::from_secs(3600);

const LONGEST: Duration = Duration::from_secs(3650 * 24 * 3600);

const PASSWORD: &str = "correcthorsebatterystaple";

/// A client that sends nothing by itself: no reply is late, and no re-check is due.
fn quiet() -> LockClientBuilder {
    LockClient::builder()
        .command_timeout(Duration::from_secs(10))
        .recheck_interval(NEVER)
}

/// What clients did on the server: the calls of each command, and the connections with their
/// subscriptions.
#[derive(Debug, PartialEq, Eq)]
struct Activity {
    commands: BTreeMap<String, String>,
    connections: BTreeSet<String>,
}

impl Activity {
    fn read(observer: &mut Connection) -> Self {
        let info: String = cmd("INFO").arg("commandstats").query(observer).unwrap();
        let commands = info.lines().filter_map(|line| {
            let (command, rest) = line.strip_prefix("cmdstat_")?.split_once(':')?;
            let counts = rest
                .split(',')
                .filter(|pair| pair.contains("calls"))
                .collect::<Vec<_>>()
                .join(",");
            // The observer's own. Redis before 7.0 counts the subcommands of CLIENT as one.
            (!["info", "client|list", "client"].contains(&command))
                .then(|| (command.to_owned(), counts))
        });
        let commands = commands.collect();
        let list: String = cmd("CLIENT").arg("LIST").query(observer).unwrap();
        let kept = ["id=", "sub=", "psub=", "ssub=", "multi=", "db="];
        let connections = list.lines().map(|line| {
            let kept = line
                .split(' ')
                .filter(|field| kept.iter().any(|name| field.starts_with(name)));
            kept.collect::<Vec<_>>().join(" ")
        });
        Self {
            commands,
            connections: connections.collect(),
        }
    }
}

/// The result of each kind of request with these options.
async fn every_request(lock: &ReentrantLock, options: Options) -> Vec<Result<(), Error>> {
    let never = async { panic!("the future ran although the request was refused") };
    let (mut locking, mut running) = (lock.lock(), lock.lock());
    let mut trying = options
        .timeout
        .map_or(lock.try_lock(), |timeout| lock.try_lock_for(timeout));
    if let Some(lease) = options.lease {
        (locking, trying, running) = (
            locking.lease(lease),
            trying.lease(lease),
            running.lease(lease),
        );
    }
    if let Some(timeout) = options.timeout {
        (locking, running) = (locking.timeout(timeout), running.timeout(timeout));
    }
    vec![
        locking.await.map(drop),
        trying.await.map(drop),
        running.run(never).await,
    ]
}

#[derive(Clone, Copy, Default)]
struct Options {
    lease: Option<Duration>,
    timeout: Option<Duration>,
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_name_is_refused_before_sending() {
    let server = Server::start();
    let client = quiet().connect(&server.url()).await.unwrap();
    let mut observer = server.connection();
    let before = Activity::read(&mut observer);
    let owner = Owner::from_thread_id(1).unwrap();
    for name in [
        String::new(),
        "x".repeat(MAX_NAME_LEN + 1),
        "é".repeat(MAX_NAME_LEN / 2 + 1),
        "x".repeat(1 << 20),
    ] {
        let lock = client.lock(&name);
        let mut answers = every_request(&lock, Options::default()).await;
        answers.push(lock.unlock().await);
        answers.push(lock.unlock().with_owner(owner).await);
        answers.push(lock.force_unlock().await.map(drop));
        answers.push(lock.is_locked().await.map(drop));
        answers.push(lock.is_held_by(owner).await.map(drop));
        answers.push(lock.hold_count_of(owner).await.map(drop));
        answers.push(ttl(&lock).await.map(drop));
        answers.push(lock.inspect().await.map(drop));
        for answer in answers {
            let Err(error @ Error::InvalidName { .. }) = answer else {
                panic!("{answer:?}")
            };
            assert!(
                error.to_string().len() < 1_000,
                "the message contains a name of {} bytes in full",
                name.len()
            );
            assert!(
                error.to_string().contains(&MAX_NAME_LEN.to_string()),
                "{error}"
            );
        }
    }
    assert_eq!(Activity::read(&mut observer), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn unusual_names_work_in_every_operation() {
    let server = Server::start();
    let url = server.url();
    // No re-check is due: only a message on the right channel wakes the waiter.
    let (one, other) = (
        quiet().connect(&url).await.unwrap(),
        quiet().connect(&url).await.unwrap(),
    );
    let mut observer = server.connection();
    let longest = "n".repeat(MAX_NAME_LEN);
    let names = [
        " ",
        "  ",
        "a b",
        "a\tb",
        "a\r\nb",
        "\r\n",
        "\n",
        "a\0b",
        "\0",
        "\u{202e}x",
        "\u{feff}",
        "\"",
        "'",
        "\"'\\",
        "{}",
        "{}x",
        "a{",
        "a}b",
        "a{b}c",
        "{",
        "}",
        "}{",
        "{{a}}",
        "käse 🧀",
        "e\u{301}",
        "*",
        "?",
        "[a]",
        "$6\r\nfoobar\r\n",
        "0",
        "-1",
        "redisson_lock__channel:{x}",
        "%00",
        "'; return 1 --",
        &longest,
    ];
    for name in names {
        let shown: String = name.chars().take(40).collect();
        let (mine, theirs) = (one.lock(name), other.lock(name));
        assert_eq!(mine.name(), name);
        let guard = mine
            .lock()
            .await
            .unwrap_or_else(|error| panic!("{shown:?}: {error}"));
        assert_eq!(
            cmd("KEYS")
                .arg("*")
                .query::<Vec<String>>(&mut observer)
                .unwrap(),
            [name],
            "{shown:?}"
        );
        assert!(theirs.is_locked().await.unwrap());
        assert!(theirs.try_lock().await.unwrap().is_none(), "{shown:?}");
        let waiting = tokio::spawn(theirs.lock().into_future());
        wait_until("the waiter has subscribed", LIMIT, || {
            cmd("PUBSUB")
                .arg("CHANNELS")
                .query::<Vec<String>>(&mut observer)
                .unwrap()
                .len()
                == 1
        });
        guard
            .unlock()
            .await
            .unwrap_or_else(|error| panic!("{shown:?}: {error}"));
        let woken = tokio::time::timeout(LIMIT, waiting).await;
        let guard = woken
            .unwrap_or_else(|_| panic!("{shown:?}: the waiter was not woken"))
            .unwrap()
            .unwrap();
        let count = guard
            .run(async { theirs.run(hold_count(&theirs)).await })
            .await;
        assert_eq!(count.unwrap().unwrap().unwrap(), 2, "{shown:?}");
        assert!(mine.force_unlock().await.unwrap(), "{shown:?}");
        assert!(
            matches!(guard.unlock().await, Err(Error::Lost { .. })),
            "{shown:?}"
        );
        wait_until("no channel and no key is left", LIMIT, || {
            cmd("PUBSUB")
                .arg("CHANNELS")
                .query::<Vec<String>>(&mut observer)
                .unwrap()
                .is_empty()
                && cmd("DBSIZE").query::<i64>(&mut observer).unwrap() == 0
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_lease_is_refused_before_sending() {
    let server = Server::start();
    let client = quiet().connect(&server.url()).await.unwrap();
    let mut observer = server.connection();
    let lock = client.lock(unique("lease"));
    let before = Activity::read(&mut observer);
    for bad in [
        Duration::ZERO,
        Duration::from_nanos(1),
        Duration::from_micros(999),
        Duration::from_nanos(999_999),
        LONGEST + Duration::from_millis(1),
        Duration::from_millis(i64::MAX as u64),
        Duration::from_millis(u64::MAX),
        Duration::MAX,
    ] {
        for timeout in [None, Some(Duration::ZERO), Some(NEVER)] {
            for answer in every_request(
                &lock,
                Options {
                    lease: Some(bad),
                    timeout,
                },
            )
            .await
            {
                let Err(Error::InvalidLease { lease, .. }) = &answer else {
                    panic!("{bad:?}: {answer:?}")
                };
                assert_eq!(*lease, bad);
            }
        }
    }
    assert_eq!(Activity::read(&mut observer), before);
    drop(client);
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_timeout_is_refused_before_sending() {
    let server = Server::start();
    let client = quiet().connect(&server.url()).await.unwrap();
    let mut observer = server.connection();
    let lock = client.lock(unique("timeout"));
    let before = Activity::read(&mut observer);
    for bad in [
        Duration::MAX,
        Duration::from_millis(u64::MAX),
        LONGEST + Duration::from_nanos(1),
    ] {
        for answer in every_request(
            &lock,
            Options {
                timeout: Some(bad),
                lease: None,
            },
        )
        .await
        {
            let Err(Error::InvalidTimeout { timeout, .. }) = &answer else {
                panic!("{bad:?}: {answer:?}")
            };
            assert_eq!(*timeout, bad);
        }
    }
    assert_eq!(Activity::read(&mut observer), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn timeout_of_zero_tries_once_and_longest_timeout_waits() {
    let server = Server::start();
    let client = quiet().connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("timeout"));
    lock.lock()
        .timeout(Duration::ZERO)
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    lock.lock()
        .timeout(Duration::ZERO)
        .run(async {})
        .await
        .unwrap();
    let guard = lock.lock().timeout(LONGEST).await.unwrap();
    let begun = Instant::now();
    let refused = lock.lock().timeout(Duration::ZERO).await;
    assert!(
        matches!(&refused, Err(Error::AcquireTimeout { .. })),
        "{refused:?}"
    );
    let refused = lock.lock().timeout(Duration::ZERO).run(async {}).await;
    assert!(
        matches!(&refused, Err(Error::AcquireTimeout { .. })),
        "{refused:?}"
    );
    assert!(lock.try_lock_for(Duration::ZERO).await.unwrap().is_none());
    assert!(begun.elapsed() < LIMIT);
    let waiting = tokio::spawn(lock.try_lock_for(LONGEST).into_future());
    guard.unlock().await.unwrap();
    let guard = tokio::time::timeout(LIMIT, waiting)
        .await
        .expect("the waiter was not woken")
        .unwrap()
        .unwrap();
    guard.expect("a grant").unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn lease_is_sent_in_whole_milliseconds() {
    let server = Server::start();
    let client = quiet().connect(&server.url()).await.unwrap();
    let mut observer = server.connection();
    cmd("CONFIG")
        .arg("SET")
        .arg("slowlog-log-slower-than")
        .arg(0)
        .exec(&mut observer)
        .unwrap();
    for (lease, sent) in [
        (Duration::from_millis(1), "1"),
        (Duration::from_micros(1_900), "1"),
        (Duration::from_nanos(60_000_999_999), "60000"),
        (LONGEST, "315360000000"),
    ] {
        let name = unique("lease");
        cmd("SLOWLOG").arg("RESET").exec(&mut observer).unwrap();
        // A lease of 1 ms may expire before its grant arrives.
        let answer = client.lock(&name).try_lock().lease(lease).await;
        assert!(
            matches!(&answer, Ok(Some(_)) | Err(Error::Lost { .. })),
            "{answer:?}"
        );
        type Entry = (i64, i64, i64, Vec<String>, String, String);
        let log: Vec<Entry> = cmd("SLOWLOG")
            .arg("GET")
            .arg(100)
            .query(&mut observer)
            .unwrap();
        // EVALSHA sha1 keys name ticket owner lease before target; a release has its channel where
        // an acquire has the lease.
        let acquire = log
            .into_iter()
            .map(|entry| entry.3)
            .find(|words| words.len() == 9 && words[3] == name && words[6].parse::<u64>().is_ok());
        assert_eq!(acquire.expect("an acquire script")[6], sent, "{lease:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn setting_out_of_bounds_is_refused_before_sending() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let url = format!(
        "redis://127.0.0.1:{}",
        listener.local_addr().unwrap().port()
    );
    let ms = Duration::from_millis;
    let too_long = NEVER + Duration::from_nanos(1);
    let builder = LockClient::builder;
    for (setting, wrong) in [
        (
            "watchdog timeout",
            builder().watchdog_timeout(Duration::ZERO),
        ),
        (
            "watchdog timeout",
            builder().watchdog_timeout(ms(50) - Duration::from_nanos(1)),
        ),
        (
            "watchdog timeout",
            builder().watchdog_timeout(LONGEST + ms(1)),
        ),
        (
            "watchdog timeout",
            builder().watchdog_timeout(Duration::MAX),
        ),
        (
            "recheck interval",
            builder().recheck_interval(Duration::ZERO),
        ),
        ("recheck interval", builder().recheck_interval(ms(9))),
        ("recheck interval", builder().recheck_interval(too_long)),
        (
            "recheck interval",
            builder().recheck_interval(Duration::MAX),
        ),
        ("retry timeout", builder().retry_timeout(too_long)),
        ("retry timeout", builder().retry_timeout(Duration::MAX)),
        ("connect timeout", builder().connect_timeout(Duration::ZERO)),
        (
            "connect timeout",
            builder().connect_timeout(Duration::from_micros(999)),
        ),
        ("connect timeout", builder().connect_timeout(too_long)),
        ("connect timeout", builder().connect_timeout(Duration::MAX)),
        ("command timeout", builder().command_timeout(Duration::ZERO)),
        ("command timeout", builder().command_timeout(ms(9))),
        ("command timeout", builder().command_timeout(too_long)),
        ("command timeout", builder().command_timeout(Duration::MAX)),
        ("renewal batch size", builder().renewal_batch_size(0)),
        ("renewal batch size", builder().renewal_batch_size(1001)),
        (
            "renewal batch size",
            builder().renewal_batch_size(usize::MAX),
        ),
    ] {
        match wrong.clone().connect(&url).await {
            Err(Error::InvalidConfig {
                setting: named,
                allowed,
                ..
            }) => {
                assert_eq!(named, setting);
                assert!(allowed.contains("to"), "{allowed}");
            }
            other => panic!("{wrong:?}: {other:?}"),
        }
    }
    let error = listener.accept().expect_err("a connection was opened");
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
}

#[tokio::test(flavor = "multi_thread")]
async fn setting_at_its_bound_is_accepted() {
    let server = Server::start();
    let ms = Duration::from_millis;
    let builder = LockClient::builder;
    for right in [
        builder().watchdog_timeout(LONGEST),
        builder().recheck_interval(ms(10)),
        builder()
            .recheck_interval(NEVER)
            .retry_timeout(NEVER)
            .connect_timeout(NEVER)
            .watchdog_timeout(3 * NEVER)
            .command_timeout(NEVER),
        builder().renewal_batch_size(1),
        builder().renewal_batch_size(1000),
    ] {
        let client = right
            .clone()
            .connect(&server.url())
            .await
            .unwrap_or_else(|error| panic!("{right:?}: {error}"));
        client
            .lock(unique("bounds"))
            .run(async {})
            .await
            .unwrap_or_else(|error| panic!("{right:?}: {error}"));
        client
            .shutdown()
            .await
            .unwrap_or_else(|error| panic!("{right:?}: {error}"));
    }
    // With these the server may not reply in time, but they are valid.
    for right in [
        builder().watchdog_timeout(ms(50)),
        builder().command_timeout(ms(10)),
        builder().connect_timeout(ms(1)),
    ] {
        let refused = right.clone().connect(&server.url()).await.err();
        assert!(
            !matches!(refused, Some(Error::InvalidConfig { .. })),
            "{right:?}: {refused:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn retry_timeout_of_zero_waits_for_first_reply() {
    let server = Server::start();
    let client = LockClient::builder()
        .retry_timeout(Duration::ZERO)
        .connect(&server.url())
        .await
        .unwrap();
    let mut observer = server.connection();
    let lock = client.lock(unique("retry"));
    // The server replies late, but far within the command timeout.
    let mut pause = || {
        cmd("CLIENT")
            .arg("PAUSE")
            .arg(300)
            .exec(&mut observer)
            .unwrap()
    };
    pause();
    let guard = lock.lock().await.unwrap();
    pause();
    guard.unlock().await.unwrap();
    let guard = lock.lock().await.unwrap();
    pause();
    drop(guard);
    client.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_url_is_refused_without_showing_password() {
    let secret = format!("me:{PASSWORD}@127.0.0.1:1");
    let urls = [
        "".into(),
        " ".into(),
        "garbage".into(),
        "redis".into(),
        "redis:".into(),
        "redis://".into(),
        "redis:///0".into(),
        "redis://:6379".into(),
        "127.0.0.1:6379".into(),
        "//127.0.0.1".into(),
        "\0".into(),
        format!("redis://me:{PASSWORD}@"),
        format!("redis://me:{PASSWORD}@/0"),
        format!("redis://me:{PASSWORD}@:6379"),
        format!("redis://me:{PASSWORD}@127.0.0.1:port"),
        format!("redis://me:{PASSWORD}@127.0.0.1:65536"),
        format!("redis://me:{PASSWORD}@127.0.0.1:-1"),
        format!("redis://me:{PASSWORD}@[::1"),
        format!("redis://me:{PASSWORD}@a b"),
        format!("redis://{secret}/x"),
        format!("redis://{secret}/-1"),
        format!("redis://{secret}/1/2"),
        format!("redis://{secret}/99999999999999999999"),
        format!("redis://{secret}?timeout=1"),
        format!("redis://{secret}/0?timeout=1"),
        format!("redis://{secret}#fragment"),
        format!("http://{secret}"),
        format!("https://{secret}"),
        format!("unix://{secret}"),
        format!("redis+unix://{secret}"),
        format!("redis-socket://{secret}"),
        format!("redis-cluster://{secret}"),
        format!("redis-sentinel://{secret}?sentinelServiceName=x"),
        format!("rediss-cluster://{secret}"),
        format!("valkey-cluster://{secret}"),
        format!("tcp://{secret}"),
    ];
    for url in urls {
        match tokio::time::timeout(LIMIT, LockClient::connect(&url))
            .await
            .expect("no answer in time")
        {
            Err(error @ Error::InvalidConfig { setting: "url", .. }) => {
                assert_no_secret(&error);
                assert!(
                    error.to_string().contains("redis://"),
                    "the error does not name the valid form: {error}"
                );
            }
            other => panic!("{url:?}: {other:?}"),
        }
    }
    for scheme in ["rediss", "valkeys"] {
        let url = format!("{scheme}://{secret}");
        let error = LockClient::connect(&url).await.unwrap_err();
        assert_no_secret(&error);
        if cfg!(feature = "tls") {
            let is_tried = matches!(
                error,
                // Of a machine without root certificates.
                Error::Connection { .. } | Error::InvalidConfig { setting: "tls", .. }
            );
            assert!(is_tried, "{error:?}");
        } else {
            assert!(error.to_string().contains("feature `tls`"), "{error}");
        }
    }
}

#[track_caller]
fn assert_no_secret(shown: &(impl Debug + ToString)) {
    for text in [
        format!("{shown:?}"),
        format!("{shown:#?}"),
        shown.to_string(),
    ] {
        assert!(
            !text.contains(PASSWORD),
            "the text contains the password: {text}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn alternative_url_forms_connect() {
    let server = Server::start();
    let port = server.port();
    for url in [
        format!("redis://127.0.0.1:{port}/"),
        format!("redis://127.0.0.1:{port}/0"),
        format!("redis://localhost:{port}"),
        format!("valkey://127.0.0.1:{port}"),
        format!("REDIS://127.0.0.1:{port}"),
    ] {
        let client = LockClient::connect(&url)
            .await
            .unwrap_or_else(|error| panic!("{url}: {error}"));
        client
            .lock(unique("url"))
            .run(async {})
            .await
            .unwrap_or_else(|error| panic!("{url}: {error}"));
    }
}

/// In a process of its own, whose log is all that its threads log.
#[test]
fn password_appears_in_no_output() {
    run_alone("input::worker_process", "password");
}

#[tokio::test(flavor = "multi_thread")]
async fn worker_process() {
    if process::role().is_none() {
        return;
    }
    let log = Log::capture();
    let server = Server::builder().password(PASSWORD).start();
    let url = server.url();
    assert!(url.contains(PASSWORD));
    let builder = quiet();
    let client = builder.clone().connect(&url).await.unwrap();
    let lock = client.lock(unique("secret"));
    let guard = lock.lock().await.unwrap();
    let shown = format!(
        "{builder:?} {client:?} {lock:?} {guard:?} {:?} {:?}",
        lock.lock(),
        lock.try_lock()
    );
    assert!(!shown.contains(PASSWORD), "{shown}");
    guard.unlock().await.unwrap();
    client.shutdown().await.unwrap();

    let wrong_password = format!("redis://:{PASSWORD}x@127.0.0.1:{}", server.port());
    let closed_port = format!("redis://:{PASSWORD}@127.0.0.1:{}", unused_port());
    let unknown_host = format!("redis://me:{PASSWORD}@no-such-host.invalid:6379");
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent_server = format!("redis://:{PASSWORD}@{}", silent.local_addr().unwrap());
    for url in [wrong_password, closed_port, unknown_host, silent_server] {
        let builder = quiet().connect_timeout(Duration::from_millis(500));
        let error = tokio::time::timeout(LIMIT, builder.connect(&url))
            .await
            .expect("no answer in time")
            .unwrap_err();
        assert_no_secret(&error);
    }
    let log = log.text();
    assert!(!log.contains(PASSWORD), "the log contains the password");
}

/// Connects with a percent-encoded password, as the default user and as another one.
async fn connect_with_password(password: &str, encoded: &str) {
    let server = Server::start();
    let mut observer = server.connection();
    cmd("ACL")
        .arg(&[
            "SETUSER",
            "me",
            "on",
            &format!(">{password}"),
            "~*",
            "&*",
            "+@all",
        ])
        .exec(&mut observer)
        .unwrap();
    cmd("CONFIG")
        .arg("SET")
        .arg("requirepass")
        .arg(password)
        .exec(&mut observer)
        .unwrap();
    for user in ["", "me"] {
        let url = format!("redis://{user}:{encoded}@127.0.0.1:{}", server.port());
        let client = LockClient::connect(&url)
            .await
            .unwrap_or_else(|error| panic!("{user:?}: {password:?}: {error}"));
        client.lock(unique("encoded")).run(async {}).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn percent_encoded_password_logs_in() {
    connect_with_password("a@b:c/d?e#f%25+\u{e9}", "a%40b%3Ac%2Fd%3Fe%23f%2525+%C3%A9").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn password_with_space_logs_in() {
    connect_with_password("two words", "two%20words").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn password_with_quotes_logs_in() {
    connect_with_password("a\"b'c", "a%22b'c").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn password_with_line_break_injects_no_command() {
    // The server has a password: without one it accepts every login.
    let server = Server::builder().password(PASSWORD).start();
    let mut observer = server.connection();
    cmd("SET")
        .arg("unrelated")
        .arg("x")
        .exec(&mut observer)
        .unwrap();
    // The client may refuse the password or send it; the server must not run it as a command.
    let url = format!(
        "redis://:x%0D%0ADEL%20unrelated%0D%0A@127.0.0.1:{}",
        server.port()
    );
    let builder = LockClient::builder().connect_timeout(Duration::from_secs(1));
    let answer = tokio::time::timeout(LIMIT, builder.connect(&url))
        .await
        .expect("no answer in time");
    let kept: bool = cmd("EXISTS").arg("unrelated").query(&mut observer).unwrap();
    assert!(kept, "a command in the password was run");
    assert!(answer.is_err(), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_login_is_a_server_error_at_once() {
    let server = Server::builder().password(PASSWORD).start();
    let port = server.port();
    for url in [
        format!("redis://:wrong@127.0.0.1:{port}"),
        format!("redis://unknown:{PASSWORD}@127.0.0.1:{port}"),
        format!("redis://127.0.0.1:{port}"),
    ] {
        let begun = Instant::now();
        let answer = LockClient::builder()
            .connect_timeout(3 * LIMIT)
            .connect(&url)
            .await;
        let Err(Error::Server {
            lock: None, error, ..
        }) = &answer
        else {
            panic!("{url}: {answer:?}")
        };
        assert!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());
        assert!(
            error.message().contains("WRONGPASS") || error.message().contains("NOAUTH"),
            "{url}: {error}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_database_is_an_error_at_once() {
    let server = Server::start();
    let mut observer = server.connection();
    let url = format!("{}/99", server.url());
    let answer = LockClient::builder()
        .connect_timeout(3 * LIMIT)
        .connect(&url);
    match tokio::time::timeout(LIMIT, answer)
        .await
        .expect("no answer in time")
    {
        Err(Error::Server { .. } | Error::Connection { .. }) => {}
        Err(error) => panic!("{error}"),
        Ok(client) => {
            let locked = client.lock("in-which-database").lock().await;
            let keys: Vec<String> = cmd("KEYS").arg("*").query(&mut observer).unwrap();
            panic!("connected; locking gives {locked:?}, and database 0 has {keys:?}");
        }
    }
}

fn unused_port() -> u16 {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

#[tokio::test(flavor = "multi_thread")]
async fn unreachable_server_is_a_typed_error_at_once() {
    let begun = Instant::now();
    let url = format!("redis://127.0.0.1:{}", unused_port());
    let answer = LockClient::builder()
        .connect_timeout(3 * LIMIT)
        .connect(&url)
        .await;
    assert!(
        matches!(&answer, Err(Error::Connection { .. })),
        "{answer:?}"
    );
    assert!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());

    // This server accepts the connection and never replies.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let begun = Instant::now();
    let after = Duration::from_millis(300);
    let url = format!("redis://{}", silent.local_addr().unwrap());
    let answer = LockClient::builder()
        .connect_timeout(after)
        .connect(&url)
        .await;
    match &answer {
        Err(Error::Timeout {
            step: Step::Connect,
            after: reported,
            ..
        }) => assert_eq!(*reported, after),
        Err(Error::Connection { .. }) => {}
        other => panic!("{other:?}"),
    }
    assert!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());
}

#[test]
fn thread_id_that_is_not_positive_is_refused() {
    for id in [0, -1, i64::MIN] {
        let answer = Owner::from_thread_id(id);
        let Err(Error::InvalidConfig {
            setting: "thread id",
            problem,
            ..
        }) = &answer
        else {
            panic!("{answer:?}")
        };
        assert!(problem.contains(&id.to_string()), "{problem}");
    }
    for id in [1, 52, i64::MAX] {
        assert_eq!(Owner::from_thread_id(id).unwrap().thread_id(), id);
    }
}

#[test]
fn client_id_that_is_not_a_uuid_is_refused() {
    for text in [
        "",
        " ",
        "52",
        "not-a-uuid",
        "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e1",
        "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e111",
    ]
    .into_iter()
    .chain([
        "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e1g",
        "6f1b5cd0:7c40:4f0a:9e0d:2b7a3c1d9e11",
        "\u{202e}",
    ]) {
        let answer = text.parse::<ClientId>();
        assert!(
            matches!(
                &answer,
                Err(Error::InvalidConfig {
                    setting: "client id",
                    ..
                })
            ),
            "{text:?}: {answer:?}"
        );
    }
    // A valid id is printed as Redisson prints it.
    let id: ClientId = "6F1B5CD0-7C40-4F0A-9E0D-2B7A3C1D9E11".parse().unwrap();
    assert_eq!(id.to_string(), "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e11");
    assert_eq!(id.to_string().parse::<ClientId>().unwrap(), id);
    assert_ne!(ClientId::random(), ClientId::random());
}

#[tokio::test(flavor = "multi_thread")]
async fn key_of_other_type_is_a_server_error_and_is_kept() {
    let server = Server::start();
    let client = quiet().connect(&server.url()).await.unwrap();
    let mut observer = server.connection();
    let name = unique("type");
    let lock = client.lock(&name);
    let owner = Owner::from_thread_id(52).unwrap();
    for make in [
        vec!["SET", &name, "x"],
        vec!["RPUSH", &name, "x"],
        vec!["SADD", &name, "x"],
    ] {
        redis::Cmd::new().arg(&make).exec(&mut observer).unwrap();
        let dump = |observer: &mut Connection| -> Vec<u8> {
            cmd("DUMP").arg(&name).query(observer).unwrap()
        };
        let before = dump(&mut observer);
        let mut answers = every_request(&lock, Options::default()).await;
        answers.extend(
            every_request(
                &lock,
                Options {
                    timeout: Some(NEVER),
                    lease: Some(LIMIT),
                },
            )
            .await,
        );
        answers.extend(
            every_request(&lock, Options::default())
                .with_owner(owner)
                .await,
        );
        answers.push(lock.unlock().with_owner(owner).await);
        answers.push(lock.force_unlock().await.map(drop));
        for (at, answer) in answers.into_iter().enumerate() {
            let Err(Error::Server {
                lock: Some(lock),
                error,
                ..
            }) = &answer
            else {
                panic!("answer {at}: {answer:?}")
            };
            assert_eq!(*lock, name);
            assert!(error.message().contains("WRONGTYPE"), "{error}");
        }
        assert_eq!(dump(&mut observer), before);
        assert_eq!(
            cmd("PTTL").arg(&name).query::<i64>(&mut observer).unwrap(),
            -1
        );
        cmd("DEL").arg(&name).exec(&mut observer).unwrap();
    }

    // A key that changes its type under a hold: the lock is lost, and the unlock keeps the key.
    let guard = lock.lock().await.unwrap();
    cmd("SET").arg(&name).arg("x").exec(&mut observer).unwrap();
    let answer = guard.unlock().await;
    assert!(matches!(&answer, Err(Error::Lost { .. })), "{answer:?}");
    drop(client);
    assert_eq!(
        cmd("GET")
            .arg(&name)
            .query::<String>(&mut observer)
            .unwrap(),
        "x"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn key_changed_to_other_type_ends_wait() {
    let server = Server::start();
    let client = LockClient::builder()
        .recheck_interval(Duration::from_millis(20))
        .connect(&server.url())
        .await
        .unwrap();
    let mut observer = server.connection();
    let name = unique("type");
    cmd("HSET")
        .arg(&name)
        .arg("another-owner")
        .arg(1)
        .exec(&mut observer)
        .unwrap();
    let waiting = tokio::spawn(client.lock(&name).lock().into_future());
    wait_until("the waiter has subscribed", LIMIT, || {
        cmd("PUBSUB")
            .arg("CHANNELS")
            .query::<Vec<String>>(&mut observer)
            .unwrap()
            .len()
            == 1
    });
    cmd("SET").arg(&name).arg("x").exec(&mut observer).unwrap();
    let answer = tokio::time::timeout(LIMIT, waiting)
        .await
        .expect("no answer in time")
        .unwrap();
    assert!(matches!(&answer, Err(Error::Server { .. })), "{answer:?}");
    assert_eq!(
        cmd("GET")
            .arg(&name)
            .query::<String>(&mut observer)
            .unwrap(),
        "x"
    );
}

/// All log events of this process, from every crate.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn capture() -> Self {
        static LOG: OnceLock<Log> = OnceLock::new();
        let capture = || {
            let log = Log::default();
            let writer = log.clone();
            tracing_subscriber::fmt()
                .with_ansi(false)
                .with_max_level(tracing::Level::TRACE)
                .with_writer(move || writer.clone())
                .init();
            log
        };
        LOG.get_or_init(capture).clone()
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}

impl std::io::Write for Log {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend_from_slice(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The settings are refused before anything is sent, in each combination.
#[tokio::test]
async fn settings_out_of_bounds_are_refused_by_name() {
    let day = Duration::from_secs(24 * 3600);
    let builder = LockClient::builder;
    for (builder, setting) in [
        (
            builder().connect_retry(Duration::MAX),
            "connect retry limit",
        ),
        (
            builder().connect_retry(3650 * day + Duration::from_millis(1)),
            "connect retry limit",
        ),
        (
            builder().watchdog_timeout(Duration::from_millis(49)),
            "watchdog timeout",
        ),
        (
            builder().watchdog_timeout(Duration::MAX),
            "watchdog timeout",
        ),
        (builder().command_timeout(Duration::ZERO), "command timeout"),
        (builder().connect_timeout(Duration::ZERO), "connect timeout"),
        (builder().retry_timeout(Duration::MAX), "retry timeout"),
        (
            builder().recheck_interval(Duration::MAX),
            "recheck interval",
        ),
        (builder().renewal_batch_size(0), "renewal batch size"),
        (builder().client_name("a\u{7f}"), "client name"),
    ] {
        let shown = format!("{builder:?}");
        let error = builder.connect("redis://127.0.0.1:1").await.unwrap_err();
        let Error::InvalidConfig { setting: named, .. } = &error else {
            panic!("{shown}: {error:?}")
        };
        assert_eq!(*named, setting, "{shown}");
        assert!(!error.is_retryable() && error.lock().is_none());
    }
    let longest = builder()
        .connect_retry(3650 * day)
        .connect("redis://x:1/y")
        .await;
    assert!(matches!(
        longest,
        Err(Error::InvalidConfig { setting: "url", .. })
    ));
}

/// Settings that defeat each other: one silent connection would cost every lock.
#[tokio::test]
async fn command_timeout_above_a_third_of_the_watchdog_timeout_is_refused() {
    let secs = Duration::from_secs;
    let builder = LockClient::builder;
    for (builder, values) in [
        (
            builder().command_timeout(secs(4)).watchdog_timeout(secs(9)),
            ["4s", "9s"],
        ),
        (builder().command_timeout(secs(11)), ["11s", "30s"]),
    ] {
        let error = builder.connect("redis://127.0.0.1:1").await.unwrap_err();
        let Error::InvalidConfig { setting, .. } = &error else {
            panic!("{error:?}")
        };
        assert_eq!(*setting, "command timeout");
        let text = error.to_string();
        assert!(values.iter().all(|value| text.contains(value)), "{text}");
    }
    for allowed in [
        builder().command_timeout(secs(3)).watchdog_timeout(secs(9)),
        builder().command_timeout(secs(10)),
        builder().watchdog_timeout(Duration::from_millis(50)),
    ] {
        let error = allowed.connect("redis://127.0.0.1:1").await.unwrap_err();
        assert!(matches!(error, Error::Connection { .. }), "{error:?}");
    }
}
