//! One connection, with the task that drives it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fred::clients::Client;
use fred::error::ErrorKind;
use fred::interfaces::ClientLike;
use fred::types::config::Server;
use fred::types::{ClusterHash, ConnectHandle, CustomCommand, Value};
use futures::FutureExt;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::Settings;
use crate::error::{ConnectionError, Error, ServerError, ServerErrorKind};

/// A connection and its driver task. Dropping it ends both.
///
/// Dropping the client library's handle does not end the connection, and a call on a client whose
/// driver has ended never completes. So this type owns both and watches the driver.
pub(super) struct Connection {
    client: Client,
    driver: AbortHandle,
    end: Arc<End>,
    server: Option<Server>,
    is_named: AtomicBool,
}

#[derive(Default)]
struct End {
    reached: AtomicBool,
    notify: Notify,
}

impl Connection {
    /// Connects once.
    pub(super) async fn open(settings: &Settings) -> Result<Self, Error> {
        let settings = &*settings.resolved().await?;
        let client = settings.client();
        let limit = settings.connect_timeout();
        let waiting = client.clone();
        let mut waiting = async move { waiting.wait_for_connect().await }.boxed();
        // The first poll subscribes to the outcome, so it has to come before `connect`.
        let _ = futures::poll!(&mut waiting);
        let connection = Self::new(client.clone(), client.connect(), settings.server());
        let connected = async {
            tokio::select! {
                biased;
                outcome = waiting => outcome,
                () = connection.ended() => {
                    Err(fred::error::Error::new(ErrorKind::IO, "the connection was lost again"))
                }
                () = settings.answers_in_plain_text() => {
                    Err(fred::error::Error::new(ErrorKind::IO, ConnectionError::PLAIN_TEXT))
                }
            }
        };
        let timed_out = settings.connect_timed_out();
        match timeout(limit, connected).await {
            Ok(Ok(())) => Ok(connection),
            Ok(Err(problem)) if is_unknown_hello(&problem) => Err(Error::UnsupportedServer {
                address: settings.address(),
                problem: "it does not know HELLO, and version 6.2 or later is required".into(),
            }),
            Ok(Err(problem)) if is_server_error(&problem) => Err(Error::Server {
                lock: None,
                address: Some(settings.address()),
                database: refused_database(settings, &problem),
                error: problem.details().into(),
            }),
            Ok(Err(problem)) if *problem.kind() == ErrorKind::Timeout => Err(timed_out),
            Ok(Err(problem)) => {
                let error = ConnectionError::from_debug(problem.details());
                Err(Error::Connection {
                    lock: None,
                    address: settings.address(),
                    error: match problem.kind() {
                        ErrorKind::Protocol | ErrorKind::Parse => ConnectionError::foreign(
                            format!("no Redis or Valkey server answers there: {error}"),
                        ),
                        _ => error,
                    },
                })
            }
            Err(_) => Err(timed_out),
        }
    }

    fn new(client: Client, driver: ConnectHandle, server: Option<Server>) -> Self {
        let end = Arc::new(End::default());
        let connection = Self {
            client,
            driver: driver.abort_handle(),
            end: Arc::clone(&end),
            server,
            is_named: AtomicBool::new(false),
        };
        // This task ends with the driver, which ends with the connection.
        tokio::spawn(async move {
            // An error is an end, too.
            let _ = driver.await;
            end.reached.store(true, Ordering::Release);
            end.notify.notify_waiters();
        });
        connection
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// Where it leads to.
    pub(super) fn server(&self) -> Option<&Server> {
        self.server.as_ref()
    }

    /// Whether the driver has ended. Then no call on the connection completes.
    pub(super) fn has_ended(&self) -> bool {
        self.end.reached.load(Ordering::Acquire)
    }

    /// Resolves when the driver has ended.
    pub(super) async fn ended(&self) {
        loop {
            let notified = self.end.notify.notified();
            if self.has_ended() {
                return;
            }
            notified.await;
        }
    }

    /// Later calls have the limit of now.
    pub(super) fn limit_replies(&self, settings: &Settings) {
        self.client.update_perf_config(settings.performance());
    }

    /// Ends the connection at once. Pending calls fail.
    pub(super) fn end(&self) {
        self.driver.abort();
    }

    /// Sets the name that `CLIENT LIST` shows, unless the connection has it already. A server that
    /// is busy refuses it: then it has to be called again.
    pub(super) async fn set_name(&self, name: &str) {
        if self.is_named.load(Ordering::Acquire) {
            return;
        }
        let command = CustomCommand::new_static("CLIENT", ClusterHash::Random, false);
        let args = vec![Value::from_static_str("SETNAME"), Value::from(name)];
        tokio::select! {
            reply = self.client.custom_raw(command, args) => {
                // A user may lack the right to set it: then there is no name.
                let is_final = match reply.map(super::frames::read) {
                    Ok(Err(failure)) => !failure.is_transient(),
                    Ok(Ok(_)) => true,
                    Err(_) => false,
                };
                self.is_named.store(is_final, Ordering::Release);
            }
            () = self.ended() => {}
        }
    }

    /// Closes the connection, and waits at most 500 ms for the server's confirmation.
    pub(super) async fn quit(&self) {
        // If the server does not confirm it, dropping the connection closes it.
        let _ = timeout(Duration::from_millis(500), self.client.quit()).await;
    }
}

/// The database, if the problem is that the server refused to select it.
fn refused_database(settings: &Settings, problem: &fred::error::Error) -> Option<u8> {
    let details = problem.details().to_ascii_lowercase();
    let is_about_select = details.contains("db index") || details.contains("'select'");
    settings.database().filter(|_| is_about_select)
}

/// Whether the server is older than 6.0, which does not know the command.
fn is_unknown_hello(problem: &fred::error::Error) -> bool {
    let details = problem.details();
    details.starts_with("ERR unknown command") && details.contains("HELLO")
}

/// Whether the problem is an error reply of the server: its text begins with the error's code.
fn is_server_error(problem: &fred::error::Error) -> bool {
    let details = problem.details();
    *problem.kind() == ErrorKind::Auth
        || details.starts_with("ERR ")
        || ServerError::from(details).kind() != ServerErrorKind::Other
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}
