//! The warning to a task that waits for itself.

mod support;
use redisson_lock::LockClient;
use std::time::Duration;
use support::server::{Server, unique};

use std::io::Write;
use std::sync::{Arc, Mutex};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);
impl Write for Log {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(buf);
        Ok(buf.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// README: "two branches of one `join!` exclude each other", by design. No deadlock here: branch one lets go by itself,
/// and whoever follows the warning's mend (Holder::scope, PerTask) loses the exclusion.
#[tokio::test]
async fn branches_of_a_join_that_take_turns_get_no_advice_that_ends_their_exclusion() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).init();
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("join"));
    let branch = || lock.run(tokio::time::sleep(Duration::from_millis(200)));
    let later = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        branch().await
    };
    let (a, b) = tokio::join!(branch(), later);
    a.unwrap();
    b.unwrap();
    client.shutdown().await.unwrap();
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    // Either no warning, or one that tells of this case as well.
    assert!(!log.contains("holds itself") || log.contains("join!"), "{log}");
}
