//! What `Debug` shows of the types of the library.

use std::time::Duration;

use redisson_lock::{LockClient, Owner};

use crate::support::server::Server;

#[tokio::test]
async fn debug_of_types_shows_values_and_no_inside() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock("stock");
    let texts = [
        format!("{:?}", lock.lock().timeout(Duration::from_millis(5))),
        format!("{:?}", lock.try_lock()),
        format!("{lock:?}"),
        format!("{client:?}"),
    ];
    for text in &texts {
        assert!(!text.contains("Ok("), "{text}");
    }
    let owner = Owner::from_thread_id(7).unwrap();
    assert!(!format!("{owner:?}").contains("private"), "{owner:?}");
}
