//! The recipes, each against a real server.

#[allow(dead_code, reason = "its main is for the example")]
#[path = "../recipes/axum_handler.rs"]
mod axum_handler;
#[allow(dead_code, reason = "its main is for the example")]
#[path = "../recipes/fenced_write.rs"]
mod fenced_write;
#[allow(dead_code, reason = "its main is for the example")]
#[path = "../recipes/from_java.rs"]
mod from_java;
#[allow(dead_code, reason = "its main is for the example")]
#[path = "../recipes/nightly_job.rs"]
mod nightly_job;
#[allow(dead_code, reason = "its main is for the example")]
#[path = "../recipes/testing.rs"]
mod testing;

use std::time::Duration;

use nightly_job::{Outcome, Schedule, run_once};
use redisson_lock::{DeadlockDetection, Error, LockClient};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;

use crate::server::{Server, unique};

/// POSTs over a connection of its own. Returns the status and the whole response.
async fn post(address: &str, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    let status = response.split(' ').nth(1).unwrap().parse().unwrap();
    (status, response)
}

#[tokio::test(flavor = "multi_thread")]
async fn axum_handler_answers_200_409_and_503() {
    let mut server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let app = axum_handler::app(client.clone());
    let service = tokio::spawn(async move { axum::serve(listener, app).await });

    let (status, response) = post(&address, "/orders/42/confirm").await;
    assert_eq!(status, 200, "{response}");
    assert!(response.ends_with("order 42 confirmed"), "{response}");

    let other = LockClient::connect(&server.url()).await.unwrap();
    let held = other.lock("order:42").lock().await.unwrap();
    let (status, response) = post(&address, "/orders/42/confirm").await;
    assert_eq!(status, 409, "{response}");
    let (status, response) = post(&address, "/orders/43/confirm").await;
    assert_eq!(status, 200, "another order is free: {response}");
    held.unlock().await.unwrap();

    server.kill();
    let (status, response) = post(&address, "/orders/42/confirm").await;
    assert_eq!(status, 503, "{response}");
    service.abort();
}

fn schedule(longest_run: Duration) -> Schedule {
    Schedule {
        longest_run,
        clock_skew: Duration::from_secs(60),
    }
}

#[tokio::test]
async fn nightly_job_that_is_done_runs_nowhere_else_after_the_process_has_ended() {
    let server = Server::shared_or_start();
    let name = unique("nightly");
    let late = LockClient::connect(&server.url()).await.unwrap();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let ten_minutes = schedule(Duration::from_secs(600));
    let outcome = run_once(&client.lock(&name), ten_minutes, async { 7 }).await;
    assert_eq!(outcome, Ok(Outcome::Done(7)));
    client.shutdown().await.unwrap();
    drop(client);

    let lock = late.lock(&name);
    let outcome = run_once(&lock, ten_minutes, async { unreachable!("it ran twice") }).await;
    assert_eq!(outcome, Ok(Outcome::<()>::Elsewhere));
    let left = lock.inspect().await.unwrap().unwrap().ttl.unwrap();
    assert!(left > Duration::from_secs(600), "{left:?}");
    assert!(lock.force_unlock().await.unwrap());
}

#[tokio::test]
async fn nightly_job_that_takes_too_long_is_stopped_and_left_to_others() {
    let server = Server::shared_or_start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("nightly"));
    let short = schedule(Duration::from_millis(50));
    let outcome = run_once(&lock, short, std::future::pending::<()>()).await;
    assert_eq!(outcome, Ok(Outcome::TimedOut));
    assert_eq!(lock.inspect().await, Ok(None));
}

/// An owner is stopped after it has taken its token, and writes when the next owner has the lock.
#[tokio::test]
async fn fenced_write_of_an_owner_that_lost_the_lock_is_refused() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let reports = redis::Client::open(server.url()).unwrap();
    let mut reports = reports.get_multiplexed_async_connection().await.unwrap();
    let (lock, key) = (client.fenced_lock("lock:report:7"), "report:7");
    let late = lock.lock().lease(Duration::from_millis(50)).await.unwrap();
    late.lost().await;
    let written = fenced_write::renew_report(&lock, &mut reports, key).await;
    assert!(written.unwrap().unwrap());
    let text = "made under the lock that is lost";
    let written = fenced_write::write_report(&mut reports, key, late.token(), text).await;
    assert!(!written.unwrap());
    let written = fenced_write::renew_report(&lock, &mut reports, key).await;
    assert!(written.unwrap().unwrap());
    let text: String = redis::cmd("HGET")
        .arg(&[key, "text"])
        .query_async(&mut reports)
        .await
        .unwrap();
    assert_eq!(text, "made under token 3");
}

#[tokio::test]
async fn ports_from_java_reenter_and_leave_nothing() {
    let server = Server::start();
    assert_eq!(from_java::per_task(&server.url()).await, Ok(2));
    assert_eq!(from_java::in_a_scope(&server.url()).await, Ok(2));
    let client = LockClient::connect(&server.url()).await.unwrap();
    assert_eq!(from_java::idiomatic::place_order(&client, 42).await, Ok(2));
    assert_eq!(client.lock("order:42").inspect().await, Ok(None));
}

/// Without a common owner the second lock fails, and so does the unlock: the owner of the outer
/// hold is not current. The error of the work says what is wrong.
#[tokio::test]
async fn port_from_java_returns_the_error_of_the_work() {
    let server = Server::start();
    let client = LockClient::builder()
        .deadlock_detection(DeadlockDetection::Fail)
        .connect(&server.url())
        .await
        .unwrap();
    let placed = from_java::literal::place_order(&client, 42).await;
    assert!(
        matches!(placed, Err(Error::WouldDeadlock { .. })),
        "{placed:?}"
    );
}

#[test]
fn client_of_a_runtime_that_ended_works_in_the_next() {
    let server = Server::shared_or_start();
    let first = Runtime::new().unwrap();
    let client = first.block_on(LockClient::connect(&server.url())).unwrap();
    let lock = client.lock(unique("static"));
    drop(first);
    let second = Runtime::new().unwrap();
    let outcome = second.block_on(async { lock.lock().await.map(drop) });
    assert_eq!(outcome, Ok(()));
}
