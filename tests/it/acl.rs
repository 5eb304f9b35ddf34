//! An ACL user with few rights: which rights are needed, and what a missing right changes.

use std::time::Duration;

use crate::support::log::Log;
use crate::support::observe::{hold_count, ttl};
use crate::support::server::{Server, wait_until_async};
use redisson_lock::{Error, LockClient};
use tracing::Level;

/// The rule of docs/wire-format.md, so that the tests cover the documentation.
fn documented_rule() -> String {
    let text = include_str!("../../docs/wire-format.md");
    let rule = text
        .split("```text\nresetkeys")
        .nth(1)
        .expect("docs/wire-format.md has a rule");
    format!(
        "resetkeys{}",
        rule.split("```").next().expect("the rule ends")
    )
}

/// What docs/wire-format.md adds to the rule for the kind of lock that needs this key or channel.
fn documented_addition(pattern: &str) -> &'static str {
    let text = include_str!("../../docs/wire-format.md");
    let mut blocks = text.split("```text\n").skip(1);
    let block = blocks.find(|block| block.starts_with(pattern));
    let block = block.unwrap_or_else(|| panic!("docs/wire-format.md has no rule for {pattern}"));
    block.split("```").next().expect("the rule ends")
}

const COUNTERS: &str = "~redisson_lock_token:";
const SIMPLE_CHANNELS: &str = "&simple_lock__channel:";

/// Adds a user with that rule, and returns the URL that connects as that user.
fn user(server: &Server, name: &str, rule: &str) -> String {
    let mut command = redis::cmd("ACL");
    command.arg("SETUSER").arg(name).arg("on").arg(">secret");
    rule.split_whitespace().for_each(|word| {
        command.arg(word);
    });
    let _: () = command
        .query(&mut server.connection())
        .expect("the server accepts the rule");
    server
        .url()
        .replace("redis://", &format!("redis://{name}:secret@"))
}

async fn refusals(server: &Server) -> i64 {
    let log: Vec<redis::Value> = redis::cmd("ACL")
        .arg("LOG")
        .query(&mut server.connection())
        .expect("the server returns its ACL log");
    log.len() as i64
}

#[tokio::test]
async fn documented_acl_rule_allows_every_command() {
    let server = Server::start();
    let url = user(&server, "app", &documented_rule());
    let owner = LockClient::connect(&url).await.unwrap();
    let waiter = LockClient::builder()
        .recheck_interval(Duration::from_secs(60))
        .connect(&url)
        .await
        .unwrap();
    let (held, wanted) = (owner.lock("app:order"), waiter.lock("app:order"));

    let guard = held.lock().await.unwrap();
    assert_eq!(
        guard.run(async { hold_count(&held).await }).await.unwrap(),
        Ok(1)
    );
    guard
        .run(async { held.run(async {}).await })
        .await
        .unwrap()
        .unwrap();
    assert!(held.inspect().await.unwrap().is_some());
    assert!(held.is_locked().await.unwrap() && ttl(&held).await.unwrap().is_some());

    let waiting = tokio::spawn(async move { wanted.lock().await.unwrap().unlock().await });
    let mut plain = server.connection();
    crate::support::server::wait_until_async(
        "the waiter is subscribed",
        Duration::from_secs(10),
        || {
            let channels: Vec<String> = redis::cmd("PUBSUB")
                .arg("CHANNELS")
                .query(&mut plain)
                .unwrap();
            async move { channels == ["redisson_lock__channel:{app:order}"] }
        },
    )
    .await;
    guard.unlock().await.unwrap();
    // Far below the re-check interval: the message woke the waiter.
    tokio::time::timeout(Duration::from_secs(20), waiting)
        .await
        .unwrap()
        .unwrap()
        .unwrap();

    assert!(!held.force_unlock().await.unwrap());
    assert_eq!(refusals(&server).await, 0, "every command was allowed");

    assert!(matches!(
        owner.lock("other:order").try_lock().await,
        Err(Error::Server { .. })
    ));
    owner.shutdown().await.unwrap();
    waiter.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn documented_additions_allow_every_command_of_the_other_kinds() {
    let server = Server::start();
    let rule = [
        &documented_rule(),
        documented_addition(COUNTERS),
        documented_addition(SIMPLE_CHANNELS),
    ];
    let url = user(&server, "app", &rule.join("\n"));
    let builder = LockClient::builder().recheck_interval(Duration::from_secs(3_600));
    let client = builder.connect(&url).await.unwrap();
    let (fenced, simple) = (
        client.fenced_lock("app:report"),
        client.simple_lock("app:job"),
    );
    // Beyond 2^53 the token is read by a command of its own.
    let _: () = redis::cmd("SET")
        .arg(&["redisson_lock_token:{app:report}", "9007199254740992"])
        .query(&mut server.connection())
        .unwrap();
    let guard = fenced.lock().await.unwrap();
    assert_eq!(guard.token(), 9_007_199_254_740_993);
    guard.run(fenced.run(async {})).await.unwrap().unwrap();
    guard.unlock().await.unwrap();

    let guard = simple.lock().await.unwrap();
    let waiting = tokio::spawn(simple.lock().into_future());
    let mut plain = server.connection();
    crate::support::server::wait_until("the waiter is subscribed", Duration::from_secs(10), || {
        crate::support::observe::channels(&mut plain) == 1
    });
    guard.unlock().await.unwrap();
    let guard = tokio::time::timeout(Duration::from_secs(20), waiting).await;
    let guard = guard.expect("the message wakes it").unwrap().unwrap();
    assert!(simple.inspect().await.unwrap().is_some());
    assert!(simple.force_unlock().await.unwrap());
    assert!(guard.unlock().await.unwrap_err().is_lost());
    assert_eq!(refusals(&server).await, 0, "every command was allowed");
}

#[tokio::test]
async fn other_kinds_without_their_rights_are_refused_and_leave_nothing() {
    let server = Server::start();
    let url = user(&server, "app", &documented_rule());
    let client = LockClient::connect(&url).await.unwrap();
    let answers = [
        client.fenced_lock("app:report").lock().await.map(drop),
        client.simple_lock("app:report").lock().await.map(drop),
        client.fenced_lock("app:report").try_lock().await.map(drop),
    ];
    for answer in answers {
        assert!(matches!(answer, Err(Error::Server { .. })), "{answer:?}");
    }
    let keys: i64 = redis::cmd("DBSIZE")
        .query(&mut server.connection())
        .unwrap();
    assert_eq!(keys, 0);
    client.lock("app:report").run(async {}).await.unwrap();
}

#[tokio::test]
async fn waiter_without_channel_right_acquires_by_recheck() {
    let server = Server::start();
    let rule = documented_rule().replace("&redisson_lock__channel:{app:*}*", "");
    let url = user(&server, "nochannel", &rule);
    let client = LockClient::builder()
        .recheck_interval(Duration::from_millis(50))
        .connect(&url)
        .await
        .unwrap();
    let lock = client.lock("app:order");

    let guard = lock.lock().await.unwrap();
    let waiting = {
        let lock = lock.clone();
        tokio::spawn(async move { lock.lock().await })
    };
    guard.unlock().await.unwrap();
    let guard = tokio::time::timeout(Duration::from_secs(20), waiting)
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    guard.unlock().await.unwrap();
    assert!(!lock.is_locked().await.unwrap());
}

#[tokio::test]
async fn missing_script_load_and_client_info_rights_break_nothing() {
    let server = Server::start();
    let rule = documented_rule()
        .replace("+script|load", "")
        .replace("+client|info", "")
        .replace("+info", "");
    let url = user(&server, "noload", &rule);
    let client = LockClient::builder()
        .recheck_interval(Duration::from_millis(50))
        .connect(&url)
        .await
        .unwrap();
    let lock = client.lock("app:order");
    let guard = lock.lock().await.unwrap();
    let waiting = {
        let lock = lock.clone();
        tokio::spawn(async move { lock.run(async {}).await })
    };
    guard.unlock().await.unwrap();
    tokio::time::timeout(Duration::from_secs(20), waiting)
        .await
        .unwrap()
        .unwrap()
        .unwrap();
}

/// Without fencing a late call may run after its repetition. That is said once, and the client
/// works.
#[tokio::test]
async fn missing_right_to_close_old_connections_is_reported_once() {
    for missing in ["+client|kill", "+client|info"] {
        let server = Server::start();
        let log = Log::capture();
        let rule = documented_rule().replace(missing, "");
        let url = user(&server, "nofence", &rule);
        let client = LockClient::connect(&url).await.unwrap();
        let lock = client.lock("app:order");
        for replaced in 1..=3 {
            redis::cmd("CLIENT")
                .arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"])
                .exec(&mut server.connection())
                .unwrap();
            wait_until_async("a new connection", Duration::from_secs(10), || async {
                client.stats().reconnects == replaced
            })
            .await;
            lock.run(async {}).await.unwrap();
        }
        let events = log.with("a replaced connection cannot be closed on the server");
        assert_eq!(events.len(), 1, "{missing}: {events:?}");
        assert_eq!(events[0].level, Level::WARN);
        assert!(events[0].fields["address"].contains("127.0.0.1"));
    }
}

#[tokio::test]
async fn missing_pexpire_right_is_server_error_and_leaves_no_key() {
    let server = Server::start();
    let rule = documented_rule().replace("+pexpire", "");
    let url = user(&server, "nopexpire", &rule);
    let client = LockClient::connect(&url).await.unwrap();
    let Err(Error::Server { error, .. }) = client.lock("app:order").lock().await else {
        panic!("the lock was acquired without an expiry");
    };
    assert!(
        error.message().contains("can't run this command"),
        "{error}"
    );
    let keys: i64 = redis::cmd("DBSIZE")
        .query(&mut server.connection())
        .unwrap();
    assert_eq!(keys, 0);
}
