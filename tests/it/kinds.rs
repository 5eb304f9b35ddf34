//! The kinds of lock beside the reentrant one.

use crate::support::server::{Server, unique};
use redisson_lock::LockClient;

#[tokio::test]
async fn token_of_each_grant_is_greater_than_the_one_before() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.fenced_lock(unique("report"));
    let first = lock.lock().await.unwrap();
    assert_eq!(first.token(), 1);
    let nested = first
        .run(async { lock.lock().await.unwrap().token() })
        .await;
    assert_eq!(nested, Ok(1));
    first.unlock().await.unwrap();
    assert_eq!(lock.run_with(async |guard| guard.token()).await, Ok(2));
}

#[tokio::test]
async fn simple_lock_is_a_string_with_its_owner() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.simple_lock(unique("nightly"));
    let guard = lock.lock().await.unwrap();
    let value: String = redis::cmd("GET")
        .arg(lock.name())
        .query(&mut server.connection())
        .unwrap();
    assert_eq!(value, format!("{}:{}", client.client_id(), guard.owner()));
    assert!(lock.try_lock().await.unwrap().is_none());
    assert!(
        guard
            .run(lock.try_lock().into_future())
            .await
            .unwrap()
            .unwrap()
            .is_none()
    );
    let waiting = tokio::spawn(lock.lock().into_future());
    guard.unlock().await.unwrap();
    waiting.await.unwrap().unwrap().unlock().await.unwrap();
    assert_eq!(lock.is_locked().await, Ok(false));
}
