//! `inspect` of keys that other programs have written.

use redis::cmd;
use redisson_lock::{Error, LockClient};

use crate::support::observe::exists;
use crate::support::server::{Server, unique};

/// `LockInfo::local_owner`: "In its scope a detached hold can be unlocked".
#[tokio::test]
async fn inspection_of_odd_fields_names_no_local_owner() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let id = client.client_id();
    let lock = client.lock(unique("stock"));
    for thread in [
        "007",
        "+7",
        "0",
        "-1",
        " 7",
        "7 ",
        "",
        "7:7",
        "9223372036854775808",
    ] {
        let field = format!("{id}:{thread}");
        cmd("HSET")
            .arg(&[lock.name(), &field, "1"])
            .exec(&mut redis)
            .unwrap();
        let info = lock.inspect().await.unwrap().unwrap();
        assert_eq!((info.owner.as_str(), info.local_owner), (&*field, None));
        assert_eq!((info.hold_count, info.ttl), (1, None));
        assert!(lock.force_unlock().await.unwrap());
    }
    for count in ["", "x", "-1", "1.5", "+1", " 1", "99999999999999999999"] {
        cmd("HSET")
            .arg(&[lock.name(), "other:1", count])
            .exec(&mut redis)
            .unwrap();
        let error = lock.inspect().await.unwrap_err();
        assert!(
            matches!(error, Error::Server { .. }),
            "{count:?}: {error:?}"
        );
        assert!(!error.is_retryable() && error.lock() == Some(lock.name()));
        assert_eq!(lock.is_locked().await, Ok(true));
        assert!(lock.try_lock().await.unwrap().is_none());
        assert!(lock.force_unlock().await.unwrap());
        assert_eq!(lock.inspect().await, Ok(None));
    }
    cmd("HSET")
        .arg(lock.name())
        .arg(&b"\xff\xfe:1"[..])
        .arg(1)
        .exec(&mut redis)
        .unwrap();
    assert_eq!(lock.inspect().await.unwrap().unwrap().local_owner, None);
    assert!(lock.force_unlock().await.unwrap());
    assert!(!exists(&mut redis, lock.name()));
}
