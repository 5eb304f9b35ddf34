//! Spans and events for operators: acquire, run, and the server that is reached again.

use std::time::Duration;

use redis::cmd;
use redisson_lock::LockClient;
use tracing::Level;

use crate::support::log::Log;
use crate::support::proxy::Proxy;
use crate::support::server::{Server, unique, wait_until_async};

const LIMIT: Duration = Duration::from_secs(10);

#[tokio::test]
async fn acquire_span_has_lock_owner_wait_and_outcome() {
    let log = Log::capture();
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let guard = lock.lock().await.unwrap();
    let timeout = Duration::from_millis(50);
    assert!(lock.try_lock_for(timeout).await.unwrap().is_none());
    let spans = log.with("acquire");
    let [granted, refused] = &spans[..] else {
        panic!("{spans:?}")
    };
    assert_eq!(granted.level, Level::DEBUG);
    assert_eq!(granted.fields["lock"], lock.name());
    assert_eq!(
        granted.fields["owner"],
        format!("{}:{}", client.client_id(), guard.owner())
    );
    assert_eq!(granted.fields["granted"], "true");
    assert_eq!(refused.fields["granted"], "false");
    let waited = &refused.fields["waited"];
    assert!(waited.ends_with("ms") || waited.ends_with('s'), "{waited}");
}

#[tokio::test]
async fn run_span_surrounds_the_work() {
    let log = Log::capture();
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock
        .run(async { tracing::Span::current().metadata().map(|span| span.name()) })
        .await
        .unwrap();
    assert_eq!(name, Some("run"));
    let spans = log.with("run");
    assert_eq!(spans.len(), 1, "{spans:?}");
    assert_eq!(spans[0].fields["lock"], lock.name());
    assert!(spans[0].fields["owner"].starts_with(&client.client_id().to_string()));
}

#[tokio::test]
async fn reconnect_event_has_address_and_length_of_the_outage() {
    let log = Log::capture();
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    cmd("CLIENT")
        .arg(&["KILL", "TYPE", "normal"])
        .exec(&mut redis)
        .unwrap();
    wait_until_async("it is connected again", LIMIT, || async {
        !log.with("the server is connected again").is_empty()
    })
    .await;
    let event = &log.with("the server is connected again")[0];
    assert_eq!(event.level, Level::INFO);
    assert_eq!(
        event.fields["address"],
        format!("127.0.0.1:{}", server.port())
    );
    assert!(event.fields["outage"].ends_with('s'), "{event:?}");
    client.shutdown().await.unwrap();
}

#[tokio::test]
async fn shutdown_after_dropped_guards_reports_no_loss() {
    const ROUNDS: usize = 100;
    let server = Server::start();
    let log = Log::capture();
    for _ in 0..ROUNDS {
        let client = LockClient::connect(&server.url()).await.unwrap();
        let lock = client.lock(unique("stock"));
        drop(lock.lock().await.unwrap());
        client.shutdown().await.unwrap();
        assert_eq!(client.stats().losses.total(), 0);
        assert_eq!(client.stats().failed_releases, 0);
    }
    assert!(
        log.from(Level::WARN).is_empty(),
        "{:?}",
        log.from(Level::WARN)
    );
    let left: usize = cmd("DBSIZE").query(&mut server.connection()).unwrap();
    assert_eq!(left, 0, "each guard was released");
}

#[tokio::test]
async fn replaced_connection_event_has_a_reason_of_this_library() {
    let log = Log::capture();
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    lock.is_locked().await.unwrap();
    proxy.stall();
    let asking = async { lock.is_locked().await };
    let closing = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        proxy.close_now();
        proxy.deliver();
    };
    let (asked, ()) = tokio::join!(asking, closing);
    asked.unwrap();
    let events = log.with("the connection is replaced");
    assert_eq!(events.len(), 1, "{events:?}");
    assert_eq!(
        events[0].fields["reason"],
        "the connection was lost before the reply"
    );
    client.shutdown().await.unwrap();
}

/// "`acquire`: `waited`, `granted`: around each acquisition", also one that is given up.
#[tokio::test]
async fn span_of_a_dropped_acquisition_has_its_fields() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let _guard = lock.lock().await.unwrap();
    let log = Log::capture();
    let waiting = tokio::spawn(lock.lock().into_future());
    wait_until_async("it waits", LIMIT, || async {
        client.stats().contended_attempts >= 1
    })
    .await;
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    let spans = log.with("acquire");
    assert_eq!(spans.len(), 1, "{spans:?}");
    assert_eq!(
        spans[0].fields.get("granted").map(String::as_str),
        Some("false"),
        "{spans:?}"
    );
    assert!(spans[0].fields.contains_key("waited"), "{spans:?}");
}
