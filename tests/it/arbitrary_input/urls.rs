//! URLs: none panics, no connection is opened for a refused one, and no password is shown.

use std::net::TcpListener;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use redis::cmd;
use redisson_lock::{Error, LockClient};
use url::Url;

use super::{LIMIT, check, odd_text, quiet, runtime};
use crate::support::server::{Server, unique};

/// A part of every password.
const SECRET: &str = "Tr0ub4dor3";

#[track_caller]
fn assert_no_secret(shown: &str, secret: &str) -> TestCaseResult {
    prop_assert!(!shown.contains(secret), "a secret is shown: {shown}");
    Ok(())
}

/// Whether a URL names a server, in the documented form.
fn is_valid(url: &Url) -> bool {
    let decodes = |text: &str| percent_decoded(text).is_some();
    let database = url.path().strip_prefix('/').unwrap_or(url.path());
    let is_secure = cfg!(feature = "tls") && matches!(url.scheme(), "rediss" | "valkeys");
    (is_secure || matches!(url.scheme(), "redis" | "valkey"))
        && url.host_str().is_some_and(|host| !host.is_empty())
        && (database.is_empty() || database.parse::<u8>().is_ok())
        && url.query().is_none()
        && url.fragment().is_none()
        && decodes(url.username())
        && decodes(url.password().unwrap_or_default())
}

fn percent_decoded(text: &str) -> Option<String> {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let [first, tail @ ..] = rest {
        let hex = tail
            .get(..2)
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .filter(|_| *first == b'%');
        // `from_str_radix` accepts a sign.
        let hex = hex.filter(|digits| digits.chars().all(|digit| digit.is_ascii_hexdigit()));
        match hex.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => (bytes.push(byte), rest = &tail[2..]),
            None if *first == b'%' => return None,
            None => (bytes.push(*first), rest = tail),
        };
    }
    String::from_utf8(bytes).ok()
}

fn percent_encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

/// A change at one place: whether to remove a character, and which one to insert.
type Edit = (prop::sample::Index, bool, Option<char>);

fn edited(url: &str, edits: &[Edit]) -> String {
    let mut chars: Vec<char> = url.chars().collect();
    for (at, remove, insert) in edits {
        let at = at.index(chars.len() + 1);
        if *remove && at < chars.len() {
            chars.remove(at);
        }
        if let Some(new) = insert {
            chars.insert(at, *new);
        }
    }
    chars.into_iter().collect()
}

/// Tries to connect to a listener that never answers.
async fn connect(text: &str, listener: &TcpListener) -> TestCaseResult {
    let port = listener.local_addr().unwrap().port();
    let url = Url::parse(text).ok();
    if let Some(url) = &url {
        // Other servers are not connected to.
        let ours = url
            .host_str()
            .is_none_or(|host| host.is_empty() || host == "127.0.0.1")
            && url.port() == Some(port);
        if is_valid(url) && !ours {
            return Ok(());
        }
    }
    let builder = quiet().connect_timeout(Duration::from_millis(10));
    let answer = tokio::time::timeout(LIMIT, builder.connect(text))
        .await
        .expect("connecting ends");
    let error = answer.expect_err("the listener never answers");
    if url.as_ref().is_some_and(is_valid) {
        prop_assert!(
            matches!(
                error,
                // The last one on a machine without root certificates.
                Error::Timeout { .. }
                    | Error::Connection { .. }
                    | Error::InvalidConfig { setting: "tls", .. }
            ),
            "{error:?}"
        );
    } else {
        prop_assert!(
            matches!(error, Error::InvalidConfig { setting: "url", .. }),
            "{error:?}"
        );
        let opened = listener
            .accept()
            .map(drop)
            .map_err(|problem| problem.kind());
        prop_assert_eq!(
            opened,
            Err(std::io::ErrorKind::WouldBlock),
            "a connection was opened"
        );
    }
    // An edit may have changed the password, or made a part of it the host.
    let host = url.as_ref().and_then(Url::host_str).unwrap_or_default();
    for secret in [&SECRET[..6], &SECRET[4..]]
        .into_iter()
        .filter(|part| !host.contains(part))
    {
        assert_no_secret(&format!("{error} {error:?} {error:#?}"), secret)?;
    }
    Ok(())
}

#[test]
fn any_url_is_refused_or_connected_without_showing_password() {
    let runtime = runtime();
    let schemes = prop_oneof![
        6 => Just("redis"),
        2 => Just("valkey"),
        1 => Just("REDIS"),
        1 => prop::sample::select(vec!["rediss", "valkeys", "redis-cluster", "redis-sentinel", "http", "unix", "file"]),
    ];
    let users = prop_oneof![Just(String::new()), Just("me".to_owned()), odd_text(6)];
    let passwords =
        (odd_text(6), any::<bool>(), odd_text(6)).prop_map(|(before, escaped, after)| {
            let password = format!("{before}{SECRET}{after}");
            if escaped {
                percent_encoded(&password)
            } else {
                password
            }
        });
    let ends = prop_oneof![
        3 => Just(String::new()),
        2 => Just("/".to_owned()),
        2 => (0..300).prop_map(|database| format!("/{database}")),
        1 => Just("/0?timeout=1".to_owned()),
        1 => Just("/0#part".to_owned()),
        1 => odd_text(6).prop_map(|text| format!("/{text}")),
    ];
    let odd = || odd_text(2).prop_map(|text| text.chars().next());
    let edits = prop::collection::vec((any::<prop::sample::Index>(), any::<bool>(), odd()), 0..4);
    check(
        300,
        (schemes, users, passwords, ends, edits),
        |(scheme, user, password, end, edits)| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            listener.set_nonblocking(true).unwrap();
            let address = listener.local_addr().unwrap();
            let url = edited(
                &format!("{scheme}://{user}:{password}@{address}{end}"),
                &edits,
            );
            runtime
                .block_on(connect(&url, &listener))
                .map_err(|error| TestCaseError::fail(format!("{url:?}: {error}")))
        },
    );
}

#[test]
fn any_text_is_refused_as_url() {
    let runtime = runtime();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let texts = prop_oneof![
        odd_text(20),
        any::<String>(),
        odd_text(20).prop_map(|text| format!("redis://{text}@"))
    ];
    check(1_000, texts, |text| {
        runtime.block_on(connect(&text, &listener))
    });
}

#[test]
fn any_login_is_sent_unchanged() {
    let server = Server::builder().password(SECRET).start();
    let runtime = runtime();
    // The server refuses user names with spaces.
    check(
        60,
        (
            "[a-zA-Z0-9@:/%\"'\\\\é🧀]{1,12}",
            odd_text(16),
            any::<bool>(),
        ),
        |(user, password, right)| {
            let password = format!("{password}{SECRET}");
            let mut observer = server.connection();
            let rules = [
                "SETUSER",
                &user,
                "reset",
                "on",
                &format!(">{password}"),
                "~*",
                "&*",
                "+@all",
            ];
            cmd("ACL").arg(&rules).exec(&mut observer).unwrap();
            let sent = if right {
                password.clone()
            } else {
                format!("{password}x")
            };
            let login = format!("{}:{}", percent_encoded(&user), percent_encoded(&sent));
            let url = format!("redis://{login}@127.0.0.1:{}", server.port());
            let outcome = runtime.block_on(async {
                let client = quiet().connect(&url).await?;
                let guard = client
                    .lock(unique("login"))
                    .try_lock()
                    .await?
                    .expect("the lock is free");
                let shown = format!("{client:?} {guard:?}");
                guard.unlock().await?;
                client.shutdown().await?;
                Ok::<_, Error>(shown)
            });
            match outcome {
                Ok(shown) => {
                    prop_assert!(right, "a wrong password was accepted");
                    assert_no_secret(&shown, SECRET)?;
                }
                Err(error) => {
                    prop_assert!(!right, "{error}");
                    prop_assert!(
                        matches!(&error, Error::Server { error, .. } if error.message().contains("WRONGPASS")),
                        "{error:?}"
                    );
                    assert_no_secret(&format!("{error} {error:?}"), SECRET)?;
                }
            }
            cmd("ACL")
                .arg("DELUSER")
                .arg(&user)
                .exec(&mut observer)
                .unwrap();
            Ok(())
        },
    );
}

/// The users as which the server lists a client of that URL.
async fn logged_in_as(url: &str, server: &Server) -> Result<Vec<String>, Error> {
    let client = LockClient::connect(url).await?;
    let list: String = cmd("CLIENT")
        .arg("LIST")
        .query(&mut server.connection())
        .unwrap();
    let theirs = list.lines().filter(|line| !line.contains("cmd=client"));
    let mut users: Vec<_> = theirs
        .filter_map(|line| {
            line.split(' ')
                .find_map(|field| field.strip_prefix("user="))
        })
        .map(String::from)
        .collect();
    users.dedup();
    client.shutdown().await?;
    Ok(users)
}

#[tokio::test]
async fn url_user_without_password_is_not_ignored() {
    let server = Server::start();
    let rules = ["SETUSER", "me", "on", "nopass", "~app:*", "&*", "+@all"];
    cmd("ACL")
        .arg(&rules)
        .exec(&mut server.connection())
        .unwrap();
    for login in ["me@", "me:@"] {
        match logged_in_as(
            &format!("redis://{login}127.0.0.1:{}", server.port()),
            &server,
        )
        .await
        {
            Ok(users) => assert_eq!(users, ["me"], "the user in {login:?} was ignored"),
            Err(error) => assert!(matches!(error, Error::InvalidConfig { .. }), "{error}"),
        }
    }
}

#[tokio::test]
async fn ipv6_address_is_connected() {
    // Not every machine has IPv6.
    let Ok(listener) = TcpListener::bind("[::1]:0") else {
        return;
    };
    listener.set_nonblocking(true).unwrap();
    let url = format!("redis://[::1]:{}", listener.local_addr().unwrap().port());
    let answer = LockClient::builder()
        .connect_timeout(Duration::from_secs(1))
        .connect(&url)
        .await;
    assert!(
        listener.accept().is_ok(),
        "no connection was opened: {answer:?}"
    );
}
