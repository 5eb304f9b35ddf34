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
    let (fenced, simple) = (client.fenced_lock("report"), client.simple_lock("nightly"));
    assert!(format!("{lock:?}").starts_with("ReentrantLock { name: \"stock\""));
    assert!(format!("{fenced:?}").starts_with("FencedLock { name: \"report\""));
    assert!(format!("{simple:?}").starts_with("SimpleLock { name: \"nightly\""));
    let guard = simple.lock().await.unwrap();
    let text = format!("{guard:?} {:?}", simple.lock());
    assert!(
        text.contains("lock: \"nightly\"") && text.contains("lost: None"),
        "{text}"
    );
    assert!(!text.contains("PhantomData"), "{text}");
    guard.unlock().await.unwrap();
    let owner = Owner::from_thread_id(7).unwrap();
    assert!(!format!("{owner:?}").contains("private"), "{owner:?}");
}
