//! Many requests at once share script calls. Each is answered as if it had a call of its own.

use std::time::Duration;

use futures::future::{join_all, try_join_all};
use redis::cmd;
use redisson_lock::{Error, LockClient, ServerErrorKind};

use crate::support::observe::scripts;
use crate::support::proxy::{Flow, Proxy, Way};
use crate::support::server::{Server, wait_until};

const SOON: Duration = Duration::from_secs(10);
const LOCKS: usize = 1_000;

fn names() -> Vec<String> {
    (0..LOCKS).map(|number| format!("stock:{number}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_at_once_share_script_calls() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let locks: Vec<_> = names().iter().map(|name| client.lock(name)).collect();
    let fewest = LOCKS as u64 / 64;

    let before = scripts(&mut redis);
    let requests = locks.iter().map(|lock| lock.lock().into_future());
    let guards = try_join_all(requests).await.unwrap();
    let calls = scripts(&mut redis) - before;
    assert!((fewest..LOCKS as u64 / 4).contains(&calls), "{calls} calls");
    assert_eq!(cmd("DBSIZE").query(&mut redis), Ok(LOCKS));

    let before = scripts(&mut redis);
    try_join_all(guards.into_iter().map(|guard| guard.unlock()))
        .await
        .unwrap();
    let calls = scripts(&mut redis) - before;
    assert!((fewest..LOCKS as u64 / 4).contains(&calls), "{calls} calls");
    assert_eq!(cmd("DBSIZE").query(&mut redis), Ok(0));
}

/// A refusal of the whole call, for a right to one key, and one in the answer for one lock.
#[tokio::test(flavor = "multi_thread")]
async fn refusal_of_one_lock_leaves_others_of_its_call_alone() {
    let server = Server::start();
    let mut redis = server.connection();
    let rule = [
        "SETUSER", "shop", "on", ">secret", "~stock:*", "&*", "+@all",
    ];
    cmd("ACL").arg(&rule).exec(&mut redis).unwrap();
    let url = server.url().replace("redis://", "redis://shop:secret@");
    let client = LockClient::connect(&url).await.unwrap();
    let names: Vec<_> = names()
        .into_iter()
        .enumerate()
        .map(|(at, name)| match at % 100 {
            50 => format!("private:{at}"),
            _ => name,
        })
        .collect();
    for name in names.iter().skip(70).step_by(100) {
        cmd("SET")
            .arg(name)
            .arg("a string")
            .exec(&mut redis)
            .unwrap();
    }

    let requests = names
        .iter()
        .map(|name| client.lock(name).lock().into_future());
    let answers = join_all(requests).await;

    let mut guards = Vec::new();
    for (at, answer) in answers.into_iter().enumerate() {
        let expected = match at % 100 {
            50 => Some(ServerErrorKind::NoPermission),
            70 => Some(ServerErrorKind::WrongType),
            _ => None,
        };
        match (answer, expected) {
            (Ok(guard), None) => guards.push(guard),
            (Err(Error::Server { lock, error, .. }), Some(kind)) => {
                assert_eq!(lock.as_deref(), Some(names[at].as_str()));
                assert_eq!(error.kind(), kind);
            }
            (answer, expected) => panic!("{at}: {answer:?}, not {expected:?}"),
        }
    }
    assert_eq!(guards.len(), LOCKS - LOCKS / 50);
    try_join_all(guards.into_iter().map(|guard| guard.unlock()))
        .await
        .unwrap();
    // The strings are left.
    assert_eq!(cmd("DBSIZE").query(&mut redis), Ok(LOCKS / 100));
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_lost_with_shared_calls_in_flight_grants_each_once() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let locks: Vec<_> = names().iter().map(|name| client.lock(name)).collect();
    let mut kill = server.connection();
    for _ in 0..10 {
        // Some calls have run, some are in flight, some wait.
        let requests: Vec<_> = locks
            .iter()
            .map(|lock| tokio::spawn(lock.lock().into_future()))
            .collect();
        let before = scripts(&mut redis);
        wait_until("some have run", SOON, || scripts(&mut redis) > before);
        cmd("CLIENT")
            .arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"])
            .exec(&mut kill)
            .unwrap();
        redis = server.connection();
        let mut guards = Vec::new();
        for request in requests {
            guards.push(request.await.unwrap().unwrap());
        }
        assert_eq!(cmd("DBSIZE").query(&mut redis), Ok(LOCKS));
        for guard in &guards {
            assert_eq!(guard.hold_count(), 1);
        }
        try_join_all(guards.into_iter().map(|guard| guard.unlock()))
            .await
            .unwrap();
        assert_eq!(cmd("DBSIZE").query(&mut redis), Ok(0));
    }
    assert!(client.stats().reconnects > 0, "no connection was replaced");
}

/// Where replies take long, no call waits for the replies to others.
#[tokio::test(flavor = "multi_thread")]
async fn requests_over_a_slow_link_are_sent_before_any_reply() {
    const ALONE: usize = 16;
    const REQUESTS: usize = 40;
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    proxy.set(Way::Replies, Flow::Hold);
    let locks: Vec<_> = names().iter().map(|name| client.lock(name)).collect();
    // As many as are sent by themselves, and then those that would wait for company.
    let mut granted = Vec::new();
    for (from, to) in [(0, ALONE), (ALONE, REQUESTS)] {
        let requests = locks[from..to].iter().map(|lock| lock.lock().into_future());
        granted.push(tokio::spawn(try_join_all(requests.collect::<Vec<_>>())));
        wait_until(
            "all have reached the server",
            Duration::from_secs(2),
            || cmd("DBSIZE").query(&mut redis) == Ok(to),
        );
    }
    assert!(granted.iter().all(|requests| !requests.is_finished()));
    proxy.set(Way::Replies, Flow::Pass);
    for requests in granted {
        let guards = requests.await.unwrap().unwrap();
        try_join_all(guards.into_iter().map(|guard| guard.unlock()))
            .await
            .unwrap();
    }
}

/// The release of a dropped guard, and the next request for the lock, are made in that order.
#[tokio::test(flavor = "multi_thread")]
async fn shared_calls_keep_order_for_each_lock() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let locks: Vec<_> = names().iter().map(|name| client.lock(name)).collect();
    for _ in 0..5 {
        let requests = locks.iter().map(|lock| lock.lock().into_future());
        let guards = try_join_all(requests).await.unwrap();
        drop(guards);
    }
    let stats = client.stats();
    assert_eq!(stats.contended_attempts, 0, "{stats:?}");
    client.shutdown().await.unwrap();
    assert_eq!(
        cmd("DBSIZE").query(&mut server.connection()),
        Ok(0),
        "each dropped guard is released"
    );
}
