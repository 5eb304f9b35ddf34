//! Script calls to one server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use fred::error::ErrorKind;
use fred::interfaces::ClientLike;
use fred::types::{ClusterHash, CustomCommand, Value};
use futures::FutureExt;
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::connection::Connection;
use super::frames::read;
use super::setup::{Identity, Unusable, set_up};
use super::supervisor::supervise;
use super::{Link, Settings};
use crate::error::{ConnectionError, Error, ServerError, ServerErrorKind};
use crate::wire::{Call, Failure, Reply, Source};

/// The connection for calls. The link replaces it when it is lost or not trusted any more.
///
/// The protocol matches replies to calls by their order only, so after a missing reply each later
/// reply may belong to another call. Therefore each script echoes a ticket that proves to which
/// call its reply belongs, and the link replaces the connection after a timeout or a wrong ticket.
///
/// A call that was sent on the old connection may still be on its way, and would run when it
/// arrives: a late copy of a release would release the owner's next hold. So the link fences the
/// old connection: on the new one it first has the server close the old one (`CLIENT KILL`,
/// <https://redis.io/docs/latest/commands/client-kill/>). Only then it sends calls, including
/// repeats of calls with an unknown outcome.
pub(crate) struct CallLink {
    shared: Arc<Shared>,
    supervisor: JoinHandle<()>,
}

pub(super) struct Shared {
    pub(super) settings: Settings,
    /// `None` while the connection is being replaced.
    pub(super) current: RwLock<Option<Arc<Current>>>,
    /// The highest number of a connection that is not trusted any more.
    pub(super) distrusted: AtomicU64,
    /// Notifies the supervisor that the current connection is not trusted any more.
    pub(super) distrust_signal: Notify,
    /// Notifies the driver that the sentinels name another server.
    pub(super) moved: Notify,
    /// Notifies callers of a new connection, or of the end of the link.
    pub(super) ready: Notify,
    /// Counts the connections that replaced a lost one.
    pub(super) reconnects: Arc<AtomicU64>,
    /// Why the last attempt to replace the connection failed; `None` while there is a connection.
    pub(super) unreachable: Mutex<Option<ConnectionError>>,
    /// When a call got its last reply.
    pub(super) replied: Mutex<Instant>,
    /// The next ticket.
    tickets: AtomicU64,
    closed: AtomicBool,
    /// Whether it was reported that old connections cannot be closed on the server.
    warned_of_unfenced: AtomicBool,
}

/// The current connection.
pub(super) struct Current {
    /// Counts the connections of the link, from 1.
    pub(super) number: u64,
    pub(super) connection: Connection,
    /// `None` if the server does not state it.
    pub(super) identity: Option<Identity>,
    pub(super) opened: Instant,
    /// Whether it is replaced because the server was busy when it was opened: nothing was lost.
    pub(super) is_provisional: bool,
}

impl CallLink {
    /// Connects, and loads the scripts, so that their first calls by SHA-1 succeed.
    pub(crate) async fn connect(
        settings: Settings,
        scripts: &[Source],
        reconnects: Arc<AtomicU64>,
    ) -> Result<Self, Error> {
        let connection = Connection::open(&settings).await?;
        let asked = Instant::now();
        // A server that cannot be used is left at once.
        let loading = async {
            load(&connection, scripts).await;
            Ok(())
        };
        let ready = futures::try_join!(set_up(&connection, &settings), loading);
        // A connection without an identity cannot be fenced. If the server is too busy to state the
        // identity, the connection is replaced at once.
        let (identity, server_is_busy) = match ready {
            Ok((identity, ())) => (identity, false),
            Err(Unusable::Busy) => (None, true),
            Err(Unusable::Lost) if asked.elapsed() >= settings.connect_timeout() => {
                return Err(settings.connect_timed_out());
            }
            Err(Unusable::Lost) => {
                return Err(Error::Connection {
                    lock: None,
                    address: settings.address(),
                    error: "the connection was lost while connecting".to_owned().into(),
                });
            }
            Err(Unusable::NotMaster) => {
                return Err(Error::Connection {
                    lock: None,
                    address: settings.address(),
                    error: "the sentinels name a server that is no master"
                        .to_owned()
                        .into(),
                });
            }
            Err(Unusable::Unsupported(error)) => return Err(error),
        };
        let shared = Arc::new(Shared {
            settings,
            current: RwLock::new(Some(Arc::new(Current {
                number: 1,
                connection,
                identity,
                opened: Instant::now(),
                is_provisional: server_is_busy,
            }))),
            distrusted: AtomicU64::new(0),
            distrust_signal: Notify::new(),
            moved: Notify::new(),
            ready: Notify::new(),
            reconnects,
            unreachable: Mutex::new(None),
            replied: Mutex::new(Instant::now()),
            tickets: AtomicU64::new(1),
            closed: AtomicBool::new(false),
            warned_of_unfenced: AtomicBool::new(false),
        });
        if server_is_busy {
            shared.distrust(1, "the server is busy with a script");
        }
        let supervisor = tokio::spawn(supervise(Arc::clone(&shared)));
        Ok(Self { shared, supervisor })
    }
}

impl Link for CallLink {
    fn call(
        &self,
        call: Call,
    ) -> impl Future<Output = (Instant, Result<Reply, Failure>)> + Send + 'static {
        let shared = Arc::clone(&self.shared);
        async move {
            match shared.trusted().await {
                Ok(current) => (Instant::now(), shared.script(&current, call).await),
                Err(failure) => (Instant::now(), Err(failure)),
            }
        }
    }

    fn leave_server(&self) -> bool {
        /// A server that stays what it is is not asked more often.
        const PAUSE: Duration = Duration::from_millis(500);
        let current = self.shared.current.read().clone();
        match current.filter(|current| current.opened.elapsed() >= PAUSE) {
            Some(current) => self
                .shared
                .distrust(current.number, "the server is not the master"),
            None => false,
        }
    }

    fn moved(&self) -> impl Future<Output = ()> + Send + 'static {
        let shared = Arc::clone(&self.shared);
        async move { shared.moved.notified().await }
    }

    async fn close(&self) {
        if self.shared.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.supervisor.abort();
        self.shared.ready.notify_waiters();
        let current = self.shared.current.write().take();
        if let Some(current) = current {
            current.connection.quit().await;
        }
    }
}

impl Drop for CallLink {
    fn drop(&mut self) {
        self.supervisor.abort();
    }
}

impl Shared {
    /// Runs a script, and checks that the reply belongs to this call.
    async fn script(
        &self,
        current: &Current,
        Call {
            script: Source { sha1, text },
            keys,
            args,
            locks: _,
        }: Call,
    ) -> Result<Reply, Failure> {
        let ticket = Bytes::from(self.tickets.fetch_add(1, Ordering::Relaxed).to_string());
        let arguments = |first: &'static str| {
            let mut all = Vec::with_capacity(keys.len() + args.len() + 3);
            all.push(Value::from_static_str(first));
            all.push(Value::Integer(keys.len() as i64));
            all.extend(keys.iter().cloned().map(Value::Bytes));
            all.push(Value::Bytes(ticket.clone()));
            all.extend(args.iter().cloned().map(Value::Bytes));
            all
        };
        let by_sha1 = CustomCommand::new_static("EVALSHA", ClusterHash::Random, false);
        let mut outcome = self.send(current, by_sha1, arguments(sha1)).await;
        if matches!(&outcome, Err(Failure::Server(error)) if error.kind() == ServerErrorKind::NoScript)
        {
            // Nothing ran, so the text can be sent instead. The server then keeps the script.
            let by_text = CustomCommand::new_static("EVAL", ClusterHash::Random, false);
            outcome = self.send(current, by_text, arguments(text)).await;
        }
        if let Err(Failure::Server(error)) = outcome {
            return Err(self.confirm_error(current, ticket, error).await);
        }
        match outcome? {
            Reply::List(mut values) if values.first() == Some(&Reply::Text(ticket)) => {
                values.remove(0);
                Ok(Reply::List(values))
            }
            other => {
                self.distrust(current.number, "a reply belonged to another call");
                Err(Failure::Unknown(format!(
                    "the reply belongs to another call: {other:?}"
                )))
            }
        }
    }

    /// Checks that an error reply belongs to this call. It carries no ticket, so a PING with the
    /// ticket follows: if its reply is right, the order of replies is right.
    async fn confirm_error(&self, current: &Current, ticket: Bytes, error: ServerError) -> Failure {
        let ping = CustomCommand::new_static("PING", ClusterHash::Random, false);
        match self
            .send(current, ping, vec![Value::Bytes(ticket.clone())])
            .await
        {
            Ok(Reply::Text(echo)) if echo == ticket => Failure::Server(error),
            // The server refuses PING, too: it is busy, or the user lacks the right.
            Err(Failure::Server(_)) => Failure::Server(error),
            Err(failure) => failure,
            Ok(_) => {
                self.distrust(current.number, "an error reply belonged to another call");
                Failure::Unknown("the error reply belongs to another call".into())
            }
        }
    }

    /// The current connection. While it is being replaced, this waits for the new one for at most
    /// the command timeout.
    async fn trusted(&self) -> Result<Arc<Current>, Failure> {
        let trusted = || {
            let current = self.current.read().clone()?;
            let ended = current.connection.has_ended();
            (!ended && self.distrusted.load(Ordering::Acquire) < current.number).then_some(current)
        };
        if let Some(current) = trusted() {
            return Ok(current);
        }
        let limit = self.settings.command_timeout();
        let replaced = async {
            loop {
                let ready = self.ready.notified();
                if self.closed.load(Ordering::Acquire) {
                    return Err(Failure::Closed);
                }
                if let Some(current) = trusted() {
                    return Ok(current);
                }
                ready.await;
            }
        };
        tokio::time::timeout(limit, replaced)
            .await
            .unwrap_or_else(|_| {
                let error = self.unreachable.lock().clone();
                Err(Failure::NotSent(error.unwrap_or_else(|| {
                    "the connection is lost and not replaced yet"
                        .to_owned()
                        .into()
                })))
            })
    }

    pub(super) async fn send(
        &self,
        current: &Current,
        command: CustomCommand,
        args: Vec<Value>,
    ) -> Result<Reply, Failure> {
        let sent = Instant::now();
        let outcome = send_on(&current.connection, command, args).await;
        match &outcome {
            Ok(_) | Err(Failure::Server(_)) => {
                let now = Instant::now();
                *self.replied.lock() = now;
                if self.settings.limit().replied(now - sent) {
                    current.connection.limit_replies(&self.settings);
                }
            }
            Err(Failure::Unknown(detail)) => {
                if self.distrust(current.number, detail) && detail == NO_REPLY {
                    self.settings.limit().missed();
                }
            }
            Err(_) => {}
        }
        outcome
    }

    /// Reports, once, that an old connection cannot be closed on the server.
    pub(super) fn report_unfenced(&self, reason: &str) {
        if !self.warned_of_unfenced.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                address = %self.settings.address(),
                reason,
                "a replaced connection cannot be closed on the server",
            );
        }
    }

    /// Has the supervisor replace the connection with this number. `false` if it does already.
    pub(super) fn distrust(&self, number: u64, reason: &str) -> bool {
        let is_news = self.distrusted.fetch_max(number, Ordering::AcqRel) < number;
        if is_news {
            tracing::warn!(address = %self.settings.address(), reason, "the connection is replaced");
            self.distrust_signal.notify_one();
        }
        is_news
    }
}

pub(super) const LOST: &str = "the connection was lost before the reply";
const NO_REPLY: &str = "no reply within the command timeout";

/// Sends a command on a connection, and waits for its reply.
pub(super) async fn send_on(
    connection: &Connection,
    command: CustomCommand,
    args: Vec<Value>,
) -> Result<Reply, Failure> {
    // Boxed, because it is large and would be a part of every future around it.
    let call = connection.client().custom_raw(command, args).boxed();
    let outcome = tokio::select! {
        biased;
        outcome = call => outcome,
        // The driver may end without having seen the call, which then never completes.
        () = connection.ended() => return Err(Failure::Unknown(LOST.into())),
    };
    outcome
        .map_err(|problem| match problem.kind() {
            ErrorKind::Timeout => Failure::Unknown(NO_REPLY.into()),
            // This is how the client library reports that the connection was closed, or that the
            // driver has ended.
            ErrorKind::Canceled => Failure::Unknown(LOST.into()),
            ErrorKind::Unknown if problem.details().contains("channel closed") => {
                Failure::Unknown(LOST.into())
            }
            ErrorKind::IO => {
                let error = ConnectionError::from_debug(problem.details());
                Failure::Unknown(match error.kind() {
                    std::io::ErrorKind::Other => LOST.into(),
                    _ => format!("{LOST}: {error}"),
                })
            }
            ErrorKind::Backpressure | ErrorKind::Config | ErrorKind::InvalidArgument => {
                Failure::NotSent(problem.to_string().into())
            }
            _ => Failure::Unknown(problem.to_string()),
        })
        .and_then(read)
}

/// Makes the server know the scripts. Loading is an optimization: a script that the server does not
/// have is sent as text.
async fn load(connection: &Connection, scripts: &[Source]) {
    let loads = scripts.iter().map(|script| {
        let load = CustomCommand::new_static("SCRIPT", ClusterHash::Random, false);
        let text = Value::from_static_str(script.text);
        send_on(connection, load, vec![Value::from_static_str("LOAD"), text])
    });
    if let Err(failure) = futures::future::try_join_all(loads).await {
        tracing::debug!(error = %failure, "the scripts could not be loaded in advance");
    }
}
