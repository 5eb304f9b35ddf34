//! Masters that sentinels name: fail-overs of each kind, and sentinels that are wrong.

use std::time::{Duration, Instant};

use redis::cmd;
use redisson_lock::{Error, LockClient, LockClientBuilder, ServerErrorKind};
use tokio::time::timeout;

use crate::support::observe::{exists, info, pttl, rival, subscribers};
use crate::support::sentinel::{Deployment, MASTER};
use crate::support::server::{Server, unique, wait_until};

const LIMIT: Duration = Duration::from_secs(90);

/// Longer than a fail-over takes on a busy machine.
const WATCHDOG: Duration = Duration::from_secs(60);

fn builder() -> LockClientBuilder {
    LockClient::builder()
        .watchdog_timeout(WATCHDOG)
        .command_timeout(Duration::from_secs(1))
        .retry_timeout(LIMIT)
}

/// Locks are kept, and waiters get theirs, over a fail-over that `fault` causes.
async fn locks_are_kept(mut deployment: Deployment, fault: impl FnOnce(&mut Deployment)) {
    let client = builder().connect(&deployment.url()).await.unwrap();
    let held = client.lock(unique("held")).lock().await.unwrap();
    let waited = client.lock(unique("waited")).lock().await.unwrap();
    let waiter = rival(&client, waited.name());
    let mut at_master = deployment.servers[0].connection();
    wait_until("it waits", LIMIT, || {
        subscribers(&mut at_master, waited.name()) == 1
    });
    for replica in &deployment.servers[1..] {
        let mut redis = replica.connection();
        wait_until("the locks are replicated", LIMIT, || {
            exists(&mut redis, held.name()) && exists(&mut redis, waited.name())
        });
    }
    fault(&mut deployment);
    let now = deployment.failed_over();
    let mut at_new = deployment.servers[now].connection();
    // A lock that is free is acquired at the new master, soon.
    let mut lost = 0;
    timeout(LIMIT, async {
        loop {
            let free = client.lock(unique("free")).lock().await.unwrap();
            let is_new = pttl(&mut at_new, free.name()) > 0;
            // Granted by the old one, that is.
            lost += u64::from(free.unlock().await.is_err());
            if is_new {
                break;
            }
        }
    })
    .await
    .expect("the client follows");
    wait_until("the waiter has subscribed there", LIMIT, || {
        subscribers(&mut at_new, waited.name()) == 1
    });
    waited.unlock().await.unwrap();
    let (_, granted) = timeout(LIMIT, waiter).await.expect("a grant").unwrap();
    assert!(pttl(&mut at_new, granted.name()) > 0);
    granted.unlock().await.unwrap();
    assert!(!held.is_lost());
    held.unlock().await.unwrap();
    assert_eq!(client.stats().losses.total(), lost);
    client.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_are_kept_when_the_master_is_killed() {
    locks_are_kept(Deployment::start(), |deployment| {
        deployment.servers[0].kill();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_are_kept_when_the_master_stops() {
    locks_are_kept(Deployment::start(), |deployment| {
        deployment.servers[0].pause();
    })
    .await;
}

/// "follows `+switch-master` at once".
#[tokio::test(flavor = "multi_thread")]
async fn locks_are_kept_over_a_planned_fail_over() {
    locks_are_kept(Deployment::start(), |deployment| deployment.fail_over()).await;
}

/// The old master answers as if nothing had happened, until a sentinel tells it.
#[tokio::test(flavor = "multi_thread")]
async fn master_that_comes_back_is_not_used() {
    let deployment = Deployment::start();
    let client = builder().connect(&deployment.url()).await.unwrap();
    deployment.servers[0].pause();
    let now = deployment.failed_over();
    client.lock(unique("one")).run(async {}).await.unwrap();
    deployment.servers[0].resume();
    let guard = client.lock(unique("two")).lock().await.unwrap();
    assert!(pttl(&mut deployment.servers[now].connection(), guard.name()) > 0);
    guard.unlock().await.unwrap();
}

/// A sentinel that missed the fail-over names the old master, with an older configuration.
#[tokio::test(flavor = "multi_thread")]
async fn latest_configuration_is_believed() {
    let deployment = Deployment::start();
    deployment.fail_over();
    let now = deployment.failed_over();
    // One that was never part of the deployment's agreement.
    let stale = Server::builder()
        .sentinel(format!(
            "sentinel monitor {MASTER} 127.0.0.1 {} 3\n",
            deployment.servers[0].port()
        ))
        .start();
    let nodes = [&stale, &deployment.sentinels[1], &deployment.sentinels[2]];
    let nodes = nodes.map(|node| format!("127.0.0.1:{}", node.port()));
    let url = format!("redis+sentinel://{}/{MASTER}", nodes.join(","));
    let client = builder().connect(&url).await.unwrap();
    let guard = client.lock(unique("stock")).lock().await.unwrap();
    assert!(pttl(&mut deployment.servers[now].connection(), guard.name()) > 0);
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn sentinels_that_do_not_answer_are_done_without() {
    let mut deployment = Deployment::start();
    deployment.sentinels[0].kill();
    deployment.sentinels[1].pause();
    let begun = Instant::now();
    let client = builder().connect(&deployment.url()).await.unwrap();
    assert!(begun.elapsed() < LIMIT / 6, "{:?}", begun.elapsed());
    client.lock(unique("stock")).run(async {}).await.unwrap();
    // What is there works on without any.
    deployment.sentinels[2].kill();
    client.lock(unique("stock")).run(async {}).await.unwrap();
    let refused = LockClient::builder()
        .connect_timeout(Duration::from_secs(2))
        .connect(&deployment.url())
        .await
        .unwrap_err();
    let text = refused.to_string();
    assert!(refused.is_retryable(), "{refused:?}");
    for sentinel in &deployment.sentinels {
        assert!(text.contains(&sentinel.port().to_string()), "{text}");
    }
    deployment.sentinels[1].resume();
}

#[tokio::test]
async fn unknown_master_is_named() {
    let sentinel = Server::builder()
        .sentinel("sentinel monitor other 127.0.0.1 1 1\n".to_owned())
        .start();
    let url = format!("redis+sentinel://127.0.0.1:{}/nobody", sentinel.port());
    let refused = LockClient::connect(&url).await.unwrap_err();
    let text = refused.to_string();
    assert!(matches!(refused, Error::Connection { .. }), "{refused:?}");
    assert!(
        text.contains("nobody") && text.contains("No such master"),
        "{text}"
    );
    // The name is percent-decoded.
    let url = format!("redis+sentinel://127.0.0.1:{}/no%20body", sentinel.port());
    let text = LockClient::connect(&url).await.unwrap_err().to_string();
    assert!(text.contains("no body"), "{text}");
}

#[tokio::test]
async fn sentinels_have_a_login_of_their_own() {
    let server = Server::builder().password("abcdef").start();
    let mut sentinel = Server::builder()
        .sentinel(format!(
            "sentinel monitor {MASTER} 127.0.0.1 {} 1\nsentinel auth-pass {MASTER} abcdef\n",
            server.port()
        ))
        .password("uvwxyz")
        .start();
    let url = format!(
        "redis+sentinel://:abcdef@127.0.0.1:{}/{MASTER}",
        sentinel.port()
    );
    let refused = LockClient::connect(&url).await.unwrap_err();
    assert!(
        matches!(&refused, Error::Server { error, .. } if error.kind() == ServerErrorKind::Auth),
        "{refused:?}"
    );
    let builder = LockClient::builder().sentinel_login("default", "uvwxyz");
    assert!(!format!("{builder:?}").contains("uvwxyz"));
    let client = builder.clone().connect(&url).await.unwrap();
    client.lock(unique("stock")).run(async {}).await.unwrap();
    // It says nothing about a URL without sentinels.
    let refused = builder.connect(&server.url()).await.unwrap_err();
    assert!(
        refused.to_string().contains("redis+sentinel://"),
        "{refused}"
    );
    sentinel.kill();
}

/// The rule of `docs/operations.md` is enough, and each right in it is needed.
#[tokio::test(flavor = "multi_thread")]
async fn documented_rights_at_the_sentinels_are_enough() {
    let page = include_str!("../../docs/operations.md");
    let rule = page.split("the smallest rule is").nth(1).unwrap();
    let rule = rule.split('`').nth(1).unwrap();
    let server = Server::start();
    let config = format!("sentinel monitor {MASTER} 127.0.0.1 {} 2\n", server.port());
    let sentinel = Server::builder().sentinel(config).start();
    let mut redis = sentinel.connection();
    let url = format!("redis+sentinel://127.0.0.1:{}/{MASTER}", sentinel.port());
    let mut connect = async |rule: &str| {
        let rights = rule.split_whitespace();
        cmd("ACL")
            .arg(&["SETUSER", "app", "reset", "on", ">secret"])
            .arg(rights.collect::<Vec<_>>())
            .exec(&mut redis)
            .unwrap();
        let builder = LockClient::builder().sentinel_login("app", "secret");
        let client = builder.connect(&url).await?;
        client.lock(unique("stock")).run(async {}).await?;
        // The messages are subscribed to as well.
        wait_until("the sentinel is watched", LIMIT, || {
            let all: String = cmd("CLIENT").arg("LIST").query(&mut redis).unwrap();
            let mut all = all.lines();
            all.any(|one| one.contains("user=app") && one.contains(" sub=1 "))
        });
        client.shutdown().await
    };
    connect(rule).await.unwrap();
    let refused = connect(&rule.replace("+sentinel|master", "")).await;
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("sentinel|master"), "{text}");
}

/// Without messages a sentinel is asked, on one connection.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_that_refuses_the_subscription_is_asked() {
    let (server, other) = (Server::start(), Server::start());
    let config =
        |server: &Server| format!("sentinel monitor {MASTER} 127.0.0.1 {} 2\n", server.port());
    let rights = ["on", "nopass", "allchannels", "+@all", "-subscribe"];
    let sentinel = Server::builder()
        .sentinel(config(&server))
        .user("app", &rights)
        .start();
    let url = format!("redis+sentinel://127.0.0.1:{}/{MASTER}", sentinel.port());
    let builder = LockClient::builder().sentinel_login("app", "");
    let client = builder.connect(&url).await.unwrap();
    let mut redis = sentinel.connection();
    let mut received = || info(&mut redis, "stats", "total_connections_received:", "");
    let before = received();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let opened = received() - before;
    assert!(opened < 6, "{opened} connections in 3 s");
    let mut redis = sentinel.connection();
    for command in [
        vec!["REMOVE".to_owned(), MASTER.into()],
        vec![
            "MONITOR".into(),
            MASTER.into(),
            "127.0.0.1".into(),
            other.port().to_string(),
            "2".into(),
        ],
    ] {
        cmd("SENTINEL").arg(command).exec(&mut redis).unwrap();
    }
    timeout(LIMIT, async {
        loop {
            let guard = client.lock(unique("stock")).lock().await.unwrap();
            let is_new = pttl(&mut other.connection(), guard.name()) > 0;
            let _ = guard.unlock().await;
            if is_new {
                break;
            }
        }
    })
    .await
    .expect("the client follows");
}

#[tokio::test]
async fn invalid_sentinel_urls_are_refused() {
    for (url, problem) in [
        ("redis+sentinel://localhost", "the name of a master"),
        ("redis+sentinel://localhost/", "the name of a master"),
        ("redis+sentinel://a,b//0", "the name of a master"),
        ("redis+sentinel://a,,b/main", "it has no host"),
        ("redis+sentinel:///main", "it has no host"),
        ("redis+sentinel://a/main/x", "not a number"),
        ("redis+sentinel://a/main/0/1", "not a number"),
        ("redis+sentinel://a/main?x=1", "something follows"),
        ("redis+sentinel://a:99999/main", "port"),
        ("redis+sentinel://u:p%zz@a/main", "percent-encoded"),
        ("redis-sentinel://a/main", "redis+sentinel://"),
        ("redis://a,b/0", "redis+sentinel://"),
    ] {
        let refused = LockClient::connect(url).await.unwrap_err();
        assert!(
            matches!(refused, Error::InvalidConfig { setting: "url", .. }),
            "{url}: {refused:?}"
        );
        assert!(refused.to_string().contains(problem), "{url}: {refused}");
    }
}

/// Sentinels may be late.
#[tokio::test(flavor = "multi_thread")]
async fn server_that_is_no_master_is_not_used() {
    let (server, other) = (Server::start(), Server::start());
    let mut redis = server.connection();
    let sentinel = Server::builder()
        .sentinel(format!(
            "sentinel monitor {MASTER} 127.0.0.1 {} 2\n",
            server.port()
        ))
        .start();
    cmd("REPLICAOF")
        .arg("127.0.0.1")
        .arg(other.port())
        .exec(&mut redis)
        .unwrap();
    let url = format!("redis+sentinel://127.0.0.1:{}/{MASTER}", sentinel.port());
    let refused = LockClient::connect(&url).await.unwrap_err();
    assert!(refused.to_string().contains("no master"), "{refused}");
    assert!(refused.is_retryable());
}
