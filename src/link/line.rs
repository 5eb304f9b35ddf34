//! One connection with the task that drives it.

use std::time::Duration;

use fred::clients::Client;
use fred::error::ErrorKind;
use fred::interfaces::ClientLike;
use fred::types::ConnectHandle;
use tokio::time::timeout;

use super::Settings;
use crate::error::{Error, Step};

/// A connection that reconnects by itself for as long as it lives; dropping it ends it.
///
/// The client library's own handles do not end their connection when they are dropped, and only the
/// handle of the driving task tells that a client has ended for good. So both live here.
pub(super) struct Line {
    client: Client,
    driver: ConnectHandle,
}

impl Line {
    /// Connects, and tells why that failed.
    pub(super) async fn open(settings: &Settings) -> Result<Self, Error> {
        let client = settings.client(true);
        let limit = settings.connect_timeout();
        match timeout(limit, client.init()).await {
            Ok(Ok(driver)) => Ok(Self { client, driver }),
            Ok(Err(problem)) if *problem.kind() == ErrorKind::Auth => {
                Err(Error::Server { lock: None, message: problem.details().to_owned() })
            }
            Ok(Err(problem)) if *problem.kind() != ErrorKind::Timeout => {
                Err(Error::Connection { detail: problem.to_string() })
            }
            Ok(Err(_)) | Err(_) => Err(Error::Timeout { step: Step::Connect, after: limit }),
        }
    }

    /// Connects in the background, trying for as long as it lives.
    pub(super) fn reopen(settings: &Settings) -> Self {
        let client = settings.client(false);
        let driver = client.connect();
        Self { client, driver }
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// Whether its driver is gone: then no call through it will ever be answered.
    pub(super) fn has_ended(&self) -> bool {
        self.driver.is_finished()
    }

    /// Says goodbye to the server, for a short while.
    pub(super) async fn quit(&self) {
        // A server that does not answer is left without ceremony: dropping the line closes it.
        let _ = timeout(Duration::from_millis(500), self.client.quit()).await;
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.driver.abort();
    }
}
