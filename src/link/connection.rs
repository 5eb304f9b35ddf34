//! One connection with the task that drives it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fred::clients::Client;
use fred::error::ErrorKind;
use fred::interfaces::ClientLike;
use fred::types::{ClusterHash, ConnectHandle, CustomCommand, Value};
use futures::FutureExt;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::Settings;
use super::settings::Reconnect;
use crate::error::{ConnectionError, Error, ServerError, ServerErrorKind};

/// A connection and its driver; dropping it ends both.
///
/// The client library's own handles do not end their connection when they are dropped, and only the
/// driving task tells that a client has ended for good: calls that come later would hang. So both
/// live here.
pub(super) struct Line {
    client: Client,
    driver: AbortHandle,
    end: Arc<End>,
}

#[derive(Default)]
struct End {
    reached: AtomicBool,
    notify: Notify,
}

impl Line {
    /// Connects, and tells why that failed.
    pub(super) async fn open(settings: &Settings, reconnect: Reconnect) -> Result<Self, Error> {
        let client = settings.client(reconnect, true);
        let limit = settings.connect_timeout();
        let waiting = client.clone();
        let mut waiting = async move { waiting.wait_for_connect().await }.boxed();
        // It listens from its first poll on, so that comes before there is anything to hear.
        let _ = futures::poll!(&mut waiting);
        let line = Self::new(client.clone(), client.connect());
        let connected = async {
            tokio::select! {
                biased;
                outcome = waiting => outcome,
                () = line.ended() => Err(fred::error::Error::new(ErrorKind::IO, "the connection was lost again")),
            }
        };
        let too_late = settings.connect_timed_out();
        match timeout(limit, connected).await {
            Ok(Ok(())) => Ok(line),
            Ok(Err(problem)) if is_server_error(&problem) => Err(Error::Server {
                lock: None,
                error: problem.details().into(),
            }),
            Ok(Err(problem)) if *problem.kind() == ErrorKind::Timeout => Err(too_late),
            Ok(Err(problem)) => {
                let error = ConnectionError::from_debug(problem.details());
                Err(Error::Connection {
                    address: settings.address(),
                    error: match problem.kind() {
                        ErrorKind::Protocol | ErrorKind::Parse => {
                            format!("no Redis or Valkey server answers there: {error}").into()
                        }
                        _ => error,
                    },
                })
            }
            Err(_) => Err(too_late),
        }
    }

    /// Connects in the background, trying for as long as it lives.
    pub(super) fn reopen(settings: &Settings) -> Self {
        let client = settings.client(Reconnect::ByItself, false);
        let driver = client.connect();
        Self::new(client, driver)
    }

    fn new(client: Client, driver: ConnectHandle) -> Self {
        let end = Arc::new(End::default());
        let line = Self {
            client,
            driver: driver.abort_handle(),
            end: Arc::clone(&end),
        };
        // Ends with the driver, which ends with the line.
        tokio::spawn(async move {
            // However it ended.
            let _ = driver.await;
            end.reached.store(true, Ordering::Release);
            end.notify.notify_waiters();
        });
        line
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// Whether its driver is gone: then no call through it will ever be answered.
    pub(super) fn has_ended(&self) -> bool {
        self.end.reached.load(Ordering::Acquire)
    }

    /// Resolves when its driver is gone.
    pub(super) async fn ended(&self) {
        loop {
            let notified = self.end.notify.notified();
            if self.has_ended() {
                return;
            }
            notified.await;
        }
    }

    /// Ends it now: calls that are under way fail.
    pub(super) fn end(&self) {
        self.driver.abort();
    }

    /// Names the connection, so that `CLIENT LIST` shows whose it is.
    pub(super) async fn set_name(&self, name: &str) {
        let command = CustomCommand::new_static("CLIENT", ClusterHash::Random, false);
        let args = vec![Value::from_static_str("SETNAME"), Value::from(name)];
        // A user without the right to it connects all the same.
        tokio::select! {
            _ = self.client.custom_raw(command, args) => {}
            () = self.ended() => {}
        }
    }

    /// Closes the connection, waiting for the server's confirmation for a short time.
    pub(super) async fn quit(&self) {
        // Dropping the line closes the connection of a server that does not answer.
        let _ = timeout(Duration::from_millis(500), self.client.quit()).await;
    }
}

/// Whether the problem is an error that the server answered: its text begins with the error's code.
fn is_server_error(problem: &fred::error::Error) -> bool {
    let details = problem.details();
    *problem.kind() == ErrorKind::Auth
        || details.starts_with("ERR ")
        || ServerError::from(details).kind() != ServerErrorKind::Other
}

impl Drop for Line {
    fn drop(&mut self) {
        self.driver.abort();
    }
}
