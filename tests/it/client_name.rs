//! The name that a client's connections have in `CLIENT LIST`.

use std::time::Duration;

use redis::{Connection, cmd};
use redisson_lock::{Error, LockClient};

use crate::support::server::{Server, wait_until, wait_until_async};

const LIMIT: Duration = Duration::from_secs(10);

/// How many connections have that name.
fn named(redis: &mut Connection, name: &str) -> usize {
    let list: String = cmd("CLIENT").arg("LIST").query(redis).unwrap();
    let field = format!(" name={name} ");
    list.lines().filter(|line| line.contains(&field)).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_carry_name_and_client_id() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::connect(&server.url()).await.unwrap();
    assert_eq!(
        named(&mut redis, &format!("redisson-lock:{}", client.client_id())),
        2
    );
    let other = LockClient::builder()
        .client_name("checkout")
        .connect(&server.url())
        .await
        .unwrap();
    assert_eq!(
        named(&mut redis, &format!("checkout:{}", other.client_id())),
        2
    );
}

/// The owner in a lock's hash leads to the process that holds it.
#[tokio::test(flavor = "multi_thread")]
async fn owner_of_a_lock_is_found_among_the_connections() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .client_name("checkout")
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock("order:42");
    let _guard = lock.lock().await.unwrap();
    let info = lock.inspect().await.unwrap().expect("an owner");
    let client_id = info.owner.split(':').next().unwrap();
    assert_eq!(named(&mut redis, &format!("checkout:{client_id}")), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_were_replaced_are_named_again() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder()
        .command_timeout(Duration::from_millis(200))
        .connect(&server.url())
        .await
        .unwrap();
    let name = format!("redisson-lock:{}", client.client_id());
    for kind in ["normal", "pubsub"] {
        // The connection of this test is skipped.
        cmd("CLIENT")
            .arg(&["KILL", "TYPE", kind])
            .exec(&mut redis)
            .unwrap();
    }
    wait_until_async("both are named", LIMIT, || {
        let count = named(&mut redis, &name);
        async move { count == 2 }
    })
    .await;
}

#[tokio::test]
async fn invalid_client_names_are_refused() {
    let long = "x".repeat(65);
    for name in ["", "two words", "tab\t", "naïve", "line\n", &long] {
        let builder = LockClient::builder().client_name(name);
        let error = builder.connect("redis://127.0.0.1:1").await.unwrap_err();
        let Error::InvalidConfig { setting, .. } = &error else {
            panic!("{name:?}: {error:?}")
        };
        assert_eq!(*setting, "client name");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn user_without_the_right_to_set_a_name_connects() {
    let server = Server::builder()
        .user(
            "app",
            &["on", "nopass", "~*", "&*", "+@all", "-client|setname"],
        )
        .start();
    let url = format!("redis://app@127.0.0.1:{}", server.port());
    let client = LockClient::connect(&url).await.unwrap();
    client.lock("a").run(async {}).await.unwrap();
    client.shutdown().await.unwrap();
}

/// "Each connection of a client carries CLIENT in its name", and "reconnects: connections for calls
/// that replaced a lost one".
#[tokio::test(flavor = "multi_thread")]
async fn connections_to_a_busy_server_are_named_once_it_is_idle() {
    let server = Server::builder().arg("--lua-time-limit", "50").start();
    let mut redis = server.connection();
    let mut stuck = server.connection();
    let script =
        std::thread::spawn(move || cmd("EVAL").arg("while true do end").arg(0).exec(&mut stuck));
    wait_until("the server is busy", LIMIT, || {
        cmd("PING")
            .exec(&mut redis)
            .is_err_and(|error| error.code() == Some("BUSY"))
    });
    let client = LockClient::builder()
        .command_timeout(Duration::from_millis(300))
        .connect(&server.url())
        .await;
    cmd("SCRIPT").arg("KILL").exec(&mut redis).unwrap();
    script.join().unwrap().unwrap_err();
    let client = client.unwrap();
    client.lock("a").run(async {}).await.unwrap();
    wait_until_async("both connections are named", LIMIT, || {
        let name = format!("redisson-lock:{}", client.client_id());
        let count = named(&mut redis, &name);
        async move { count == 2 }
    })
    .await;
}
