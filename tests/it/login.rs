//! Users, passwords and databases in URLs: characters of any kind, and refusals that say what is
//! wrong.

use redis::cmd;
use redisson_lock::{Error, LockClient};

use crate::support::server::Server;

/// "Characters of the user and the password that have a meaning in URLs are percent-encoded": a
/// password is bytes.
#[tokio::test]
async fn password_of_other_bytes_than_utf8_connects_or_is_refused_as_such() {
    let server = Server::start();
    let mut redis = server.connection();
    cmd("CONFIG")
        .arg("SET")
        .arg("requirepass")
        .arg(&b"caf\xe9"[..])
        .exec(&mut redis)
        .unwrap();
    let url = format!("redis://:caf%E9@127.0.0.1:{}", server.port());
    let outcome = LockClient::connect(&url).await;
    let is_clear = matches!(&outcome, Ok(_) | Err(Error::InvalidConfig { .. }));
    assert!(is_clear, "{outcome:?}");
}

/// "These texts say what is the matter: an unescaped `/?#%` in a password (percent-encode it)".
#[tokio::test]
async fn unescaped_character_after_digits_of_a_password_is_named() {
    let mut wrong = Vec::new();
    for url in [
        "redis://app:12#34@127.0.0.1:1",
        "redis://app:12?34@127.0.0.1:1",
        "redis://app:12/34@127.0.0.1:1",
        "redis://app:12/3#4@127.0.0.1:1",
        "redis://app:1%2@127.0.0.1:1",
        "redis://:12#34@127.0.0.1:1",
    ] {
        let error = LockClient::connect(url).await.unwrap_err().to_string();
        if !error.contains("percent-encoded") {
            wrong.push(format!("{url}: {error}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A database that does not exist, and one that the ACL forbids to select.
#[tokio::test]
async fn refused_database_is_named_in_the_error() {
    let server = Server::builder()
        .user("app", &["on", "nopass", "~*", "&*", "+@all", "-select"])
        .start();
    let url = format!("redis://app@127.0.0.1:{}/3", server.port());
    let error = LockClient::connect(&url).await.unwrap_err();
    assert!(error.to_string().contains("select"), "{error}");
    assert!(!error.is_retryable(), "{error:?}");
    let url = format!("redis://127.0.0.1:{}/200", server.port());
    let error = LockClient::connect(&url).await.unwrap_err();
    assert!(matches!(error, Error::Server { .. }), "{error:?}");
    assert!(!error.is_retryable(), "{error:?}");
    assert!(error.to_string().contains("DB index"), "{error}");
}

/// Passwords and users of odd bytes, percent-encoded.
#[tokio::test]
async fn login_of_odd_characters_connects() {
    let server = Server::start();
    let mut redis = server.connection();
    let encoded =
        |text: &str| -> String { text.bytes().map(|byte| format!("%{byte:02x}")).collect() };
    for (round, secret) in [
        "/?#%@:",
        "a b",
        "\"quoted\"",
        "it's",
        "back\\slash\\x41",
        "tab\there",
        "line\r\nend",
        "é🧀",
        "+plus+",
        "%41",
        "\u{7f}\u{1}",
        " ",
        "$(x)`y`",
        "[::1]",
        "\\",
    ]
    .into_iter()
    .enumerate()
    {
        let user = format!("app{round}é@:/");
        cmd("ACL")
            .arg(&[
                "SETUSER",
                &user,
                "on",
                &format!(">{secret}"),
                "~*",
                "&*",
                "+@all",
            ])
            .exec(&mut redis)
            .unwrap();
        let url = format!(
            "redis://{}:{}@127.0.0.1:{}",
            encoded(&user),
            encoded(secret),
            server.port()
        );
        let client = LockClient::connect(&url)
            .await
            .unwrap_or_else(|error| panic!("{secret:?}: {error}"));
        client.lock("a").run(async {}).await.unwrap();
    }
}
