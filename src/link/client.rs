//! Calls to one server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use fred::error::ErrorKind;
use fred::interfaces::ClientLike;
use fred::types::{ClusterHash, CustomCommand, Value};
use futures::FutureExt;
use parking_lot::RwLock;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::frames::read;
use super::keeper::{Identity, identify, keep};
use super::line::Line;
use super::settings::Reconnect;
use super::{Call, Failure, Reply, Settings, What};
use crate::error::{Error, ServerError, ServerErrorKind};
use crate::stats::Counters;

/// The connection for calls, replaced when it is lost or cannot be trusted any more.
///
/// Replies are matched to calls by their order alone, so a call that had no reply in time may have
/// left the order shifted. Scripts echo a ticket that proves whose reply it is; and after a
/// time-out or a foreign ticket the connection is given up for a new one.
///
/// What was sent on a connection may still be on its way when the client has given it up, and would
/// be run whenever it arrives: a late copy of a release would take its owner's next hold. So a new
/// connection first has the server close the old one (`CLIENT KILL`,
/// <https://redis.io/docs/latest/commands/client-kill/>); only then are calls made on it, among
/// them the repeats of those whose outcome is unknown.
pub(crate) struct Link {
    shared: Arc<Shared>,
    keeper: JoinHandle<()>,
}

pub(super) struct Shared {
    pub(super) settings: Settings,
    /// `None` while there is no connection to be trusted.
    pub(super) line: RwLock<Option<Arc<Numbered>>>,
    pub(super) distrusted: AtomicU64,
    pub(super) mend: Notify,
    /// Signals a new connection, or the end.
    pub(super) ready: Notify,
    pub(super) counters: Arc<Counters>,
    tickets: AtomicU64,
    closed: AtomicBool,
}

pub(super) struct Numbered {
    pub(super) number: u64,
    pub(super) line: Line,
    /// As the server knows it; `None` if it does not say.
    pub(super) identity: Option<Identity>,
}

impl Link {
    /// Connects, and loads the scripts given so that calling them by their SHA-1 works at once.
    pub(crate) async fn connect(
        settings: Settings,
        scripts: &[What],
        counters: Arc<Counters>,
    ) -> Result<Self, Error> {
        let line = Line::open(&settings, Reconnect::Never).await?;
        // Without its name nothing that was sent on it could be ruled out: one of a server that is
        // too busy to tell it is given up for another at once.
        let asked = Instant::now();
        // Sent at once: each costs a round trip otherwise.
        let (identified, (), supported, ()) = futures::join!(
            identify(&line, &settings),
            line.set_name(settings.connection_name()),
            ensure_supported(&line, &settings),
            load(&line, scripts),
        );
        let (identity, nameless) = match identified {
            Ok(identity) => (identity, false),
            Err(Failure::Server(_)) => (None, true),
            Err(_) if asked.elapsed() >= settings.connect_timeout() => {
                return Err(settings.connect_timed_out());
            }
            Err(_) => {
                return Err(Error::Connection {
                    address: settings.address(),
                    error: "the connection was lost while connecting".to_owned().into(),
                });
            }
        };
        supported?;
        let shared = Arc::new(Shared {
            settings,
            line: RwLock::new(Some(Arc::new(Numbered {
                number: 1,
                line,
                identity,
            }))),
            distrusted: AtomicU64::new(0),
            mend: Notify::new(),
            ready: Notify::new(),
            counters,
            tickets: AtomicU64::new(1),
            closed: AtomicBool::new(false),
        });
        if nameless {
            shared.distrust(1, "the server is busy with a script");
        }
        let keeper = tokio::spawn(keep(Arc::clone(&shared)));
        Ok(Self { shared, keeper })
    }

    /// Makes a call. It is on its way when the future is first polled; dropping the future does not
    /// recall it.
    pub(crate) fn call(
        &self,
        call: Call,
    ) -> impl Future<Output = Result<Reply, Failure>> + Send + use<> {
        let shared = Arc::clone(&self.shared);
        async move { shared.script(call).await }
    }

    /// Whether it was closed on purpose.
    pub(crate) fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
    }

    /// Marks it closed: calls are refused from now on.
    pub(crate) fn refuse(&self) {
        self.shared.closed.store(true, Ordering::Release);
        self.shared.ready.notify_waiters();
    }

    /// Closes the connection and ends its tasks. Once is enough.
    pub(crate) async fn close(&self) {
        if self.shared.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.keeper.abort();
        self.shared.ready.notify_waiters();
        let line = self.shared.line.write().take();
        if let Some(line) = line {
            line.line.quit().await;
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl Shared {
    /// Runs a script, and proves that the reply is its own.
    async fn script(
        &self,
        Call {
            what: What { sha1, text },
            keys,
            args,
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
        let line = self.line().await?;
        let by_sha1 = CustomCommand::new_static("EVALSHA", ClusterHash::Random, false);
        let mut outcome = self.send(&line, by_sha1, arguments(sha1)).await;
        if matches!(&outcome, Err(Failure::Server(error)) if error.kind() == ServerErrorKind::NoScript)
        {
            // Nothing ran, so the script may be sent whole; the server keeps it from then on.
            let by_text = CustomCommand::new_static("EVAL", ClusterHash::Random, false);
            outcome = self.send(&line, by_text, arguments(text)).await;
        }
        if let Err(Failure::Server(error)) = outcome {
            return Err(self.proved(&line, ticket, error).await);
        }
        match outcome? {
            Reply::List(mut values) if values.first() == Some(&Reply::Text(ticket)) => {
                values.remove(0);
                Ok(Reply::List(values))
            }
            other => {
                self.distrust(line.number, "a reply belonged to another call");
                Err(Failure::Unknown(format!(
                    "the reply belongs to another call: {other:?}"
                )))
            }
        }
    }

    /// An error carries no ticket. So the next reply on the connection is looked at: is that the
    /// one that was asked for?
    async fn proved(&self, line: &Numbered, ticket: Bytes, error: ServerError) -> Failure {
        let ping = CustomCommand::new_static("PING", ClusterHash::Random, false);
        match self
            .send(line, ping, vec![Value::Bytes(ticket.clone())])
            .await
        {
            Ok(Reply::Text(echo)) if echo == ticket => Failure::Server(error),
            // The server refuses this, too: it is busy, or gives no right to it.
            Err(Failure::Server(_)) => Failure::Server(error),
            Err(failure) => failure,
            Ok(_) => {
                self.distrust(line.number, "an error belonged to another call");
                Failure::Unknown("an error reply belonged to another call".into())
            }
        }
    }

    /// The connection, as soon as there is one to be trusted.
    async fn line(&self) -> Result<Arc<Numbered>, Failure> {
        let trusted = || {
            let line = self.line.read().clone()?;
            (!line.line.has_ended() && self.distrusted.load(Ordering::Acquire) < line.number)
                .then_some(line)
        };
        if let Some(line) = trusted() {
            return Ok(line);
        }
        let limit = self.settings.command_timeout();
        let some = async {
            loop {
                let ready = self.ready.notified();
                if self.closed.load(Ordering::Acquire) {
                    return Err(Failure::Closed);
                }
                if let Some(line) = trusted() {
                    return Ok(line);
                }
                ready.await;
            }
        };
        tokio::time::timeout(limit, some).await.unwrap_or_else(|_| {
            Err(Failure::NotSent(
                "the connection is lost, and there is no new one yet".into(),
            ))
        })
    }

    pub(super) async fn send(
        &self,
        line: &Numbered,
        command: CustomCommand,
        args: Vec<Value>,
    ) -> Result<Reply, Failure> {
        let outcome = say(&line.line, command, args).await;
        if let Err(Failure::Unknown(detail)) = &outcome {
            self.distrust(line.number, detail);
        }
        outcome
    }

    /// Asks for a new connection in place of that one.
    fn distrust(&self, number: u64, why: &str) {
        if self.distrusted.fetch_max(number, Ordering::AcqRel) < number {
            tracing::warn!(address = %self.settings.address(), reason = why, "the connection is replaced");
            self.mend.notify_one();
        }
    }
}

pub(super) const LOST: &str = "the connection was lost before the reply";

/// Makes a call on a line.
pub(super) async fn say(
    line: &Line,
    command: CustomCommand,
    args: Vec<Value>,
) -> Result<Reply, Failure> {
    // Boxed, because it is large and every future around it would carry it along.
    let call = line.client().custom_raw(command, args).boxed();
    let outcome = tokio::select! {
        biased;
        outcome = call => outcome,
        // Should the call have come in between the driver's last look and its end.
        () = line.ended() => return Err(Failure::Unknown(LOST.into())),
    };
    outcome
        .map_err(|problem| match problem.kind() {
            ErrorKind::Timeout => Failure::Unknown("no reply in time".into()),
            // So it says when the task that drives the connection has ended.
            ErrorKind::Canceled | ErrorKind::Unknown
                if problem.details().contains("channel closed") =>
            {
                Failure::Unknown(LOST.into())
            }
            ErrorKind::Backpressure | ErrorKind::Config | ErrorKind::InvalidArgument => {
                Failure::NotSent(problem.to_string())
            }
            _ => Failure::Unknown(problem.to_string()),
        })
        .and_then(read)
}

/// Makes the server know the scripts. One that it does not know is sent whole when it is called.
async fn load(line: &Line, scripts: &[What]) {
    let loads = scripts.iter().map(|script| {
        let load = CustomCommand::new_static("SCRIPT", ClusterHash::Random, false);
        let text = Value::from_static_str(script.text);
        say(line, load, vec![Value::from_static_str("LOAD"), text])
    });
    if let Err(failure) = futures::future::try_join_all(loads).await {
        tracing::debug!(error = %failure, "the scripts could not be loaded in advance");
    }
}

/// Refuses a server that has only a part of the keys or none, and one that is too old. A server that
/// does not say (ACL) is taken for a single one of a supported version.
async fn ensure_supported(line: &Line, settings: &Settings) -> Result<(), Error> {
    let info = CustomCommand::new_static("INFO", ClusterHash::Random, false);
    let Ok(Reply::Text(info)) = say(line, info, vec![Value::from_static_str("server")]).await
    else {
        return Ok(());
    };
    let info = String::from_utf8_lossy(&info);
    let unsupported = |problem| Error::UnsupportedServer {
        address: settings.address(),
        problem,
    };
    let field = |names: &[&str]| {
        let fields = || info.lines().filter_map(|line| line.trim().split_once(':'));
        names
            .iter()
            .find_map(|name| fields().find_map(|(field, value)| (field == *name).then_some(value)))
    };
    // Valkey has another name for the mode, and states the Redis version that it is compatible with.
    match field(&["redis_mode", "server_mode"]) {
        None | Some("standalone") => {}
        Some("cluster") => return Err(unsupported("it is part of a cluster".into())),
        Some("sentinel") => return Err(unsupported("it is a sentinel".into())),
        Some(mode) => return Err(unsupported(format!("it runs in the mode {mode}"))),
    }
    match field(&["redis_version"]) {
        Some(version) if is_too_old(version) => Err(unsupported(format!(
            "it is version {version}, and 6.2 or later is needed"
        ))),
        _ => Ok(()),
    }
}

/// Whether the version is below 6.2. One that cannot be read is not.
fn is_too_old(version: &str) -> bool {
    let mut numbers = version.split('.').map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) < (6, 2),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::is_too_old;

    #[test]
    fn versions_below_6_2_are_too_old() {
        for version in ["2.8.24", "5.0.14", "6.0.16", "6.1.240"] {
            assert!(is_too_old(version), "{version}");
        }
        for version in ["6.2.0", "7.0.15", "8.0.0", "255.255.255", "", "unstable"] {
            assert!(!is_too_old(version), "{version}");
        }
    }
}
