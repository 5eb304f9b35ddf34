//! Calls to one server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use fred::error::ErrorKind;
use fred::interfaces::ClientLike;
use fred::types::config::Options;
use fred::types::{ClusterHash, CustomCommand, Resp3Frame, Value};
use futures::FutureExt;
use parking_lot::RwLock;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::line::Line;
use super::settings::Reconnect;
use super::{Call, Failure, Reply, Settings, What};
use crate::error::{Error, Step};

/// The connection for calls, replaced when it is lost or cannot be trusted any more.
///
/// Replies are matched to calls by their order alone, so a call that had no reply in time may have left
/// the order shifted. Scripts echo a ticket that proves whose reply it is; and after a time-out or a
/// foreign ticket the connection is given up for a new one.
///
/// What was sent on a connection may still be on its way when the client has given it up, and would be run
/// whenever it arrives: a late copy of a release would take its holder's next hold. So a new connection first has the
/// server close the old one (`CLIENT KILL`, <https://redis.io/docs/latest/commands/client-kill/>); only then
/// are calls made on it, among them the repeats of those whose outcome is unknown.
pub(crate) struct Link {
    shared: Arc<Shared>,
    keeper: JoinHandle<()>,
}

struct Shared {
    settings: Settings,
    /// `None` while there is no connection to be trusted.
    line: RwLock<Option<Arc<Numbered>>>,
    distrusted: AtomicU64,
    mend: Notify,
    /// Signals a new connection, or the end.
    ready: Notify,
    tickets: AtomicU64,
    closed: AtomicBool,
}

struct Numbered {
    number: u64,
    line: Line,
    /// As the server knows it; `None` if it does not say.
    identity: Option<Identity>,
}

/// A connection, as the server names it. Numbers begin anew when a server restarts, so the address goes along.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Identity {
    id: String,
    address: String,
}

impl Link {
    /// Connects, and loads the scripts given so that calling them by their SHA-1 works at once.
    pub(crate) async fn connect(settings: Settings, scripts: &[What]) -> Result<Self, Error> {
        let line = Line::open(&settings, Reconnect::Never).await?;
        let identity = identify(&line, &settings)
            .await
            .map_err(|_| Error::Timeout { step: Step::Connect, after: settings.connect_timeout() })?;
        refuse_cluster(&line).await?;
        for script in scripts {
            let load = CustomCommand::new_static("SCRIPT", ClusterHash::Random, false);
            let args = vec![Value::from_static_str("LOAD"), Value::from_static_str(script.text)];
            if let Err(failure) = say(&line, load, args).await {
                // Not needed for being right: a script that the server does not know is sent whole.
                tracing::debug!(%failure, "scripts could not be loaded in advance");
                break;
            }
        }
        let shared = Arc::new(Shared {
            settings,
            line: RwLock::new(Some(Arc::new(Numbered { number: 1, line, identity }))),
            distrusted: AtomicU64::new(0),
            mend: Notify::new(),
            ready: Notify::new(),
            tickets: AtomicU64::new(1),
            closed: AtomicBool::new(false),
        });
        let keeper = tokio::spawn(keep(Arc::clone(&shared)));
        Ok(Self { shared, keeper })
    }

    /// Makes a call. It is on its way when the future is first polled; dropping the future does not recall it.
    pub(crate) fn call(&self, call: Call) -> impl Future<Output = Result<Reply, Failure>> + Send + use<> {
        let shared = Arc::clone(&self.shared);
        async move { shared.script(call).await }
    }

    /// Whether it was closed on purpose.
    pub(crate) fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
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
    async fn script(&self, Call { what: What { sha1, text }, keys, args }: Call) -> Result<Reply, Failure> {
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
        if matches!(&outcome, Err(Failure::Server(message)) if message.starts_with("NOSCRIPT")) {
            // Nothing ran, so the script may be sent whole; the server keeps it from then on.
            let by_text = CustomCommand::new_static("EVAL", ClusterHash::Random, false);
            outcome = self.send(&line, by_text, arguments(text)).await;
        }
        if let Err(Failure::Server(message)) = outcome {
            return Err(self.proved(&line, ticket, message).await);
        }
        match outcome? {
            Reply::List(mut values) if values.first() == Some(&Reply::Text(ticket)) => {
                values.remove(0);
                Ok(Reply::List(values))
            }
            other => {
                self.distrust(line.number, "a reply belonged to another call");
                Err(Failure::Unknown(format!("the reply belongs to another call: {other:?}")))
            }
        }
    }

    /// An error carries no ticket. So the next reply on the connection is looked at: is that the one that was asked for?
    async fn proved(&self, line: &Numbered, ticket: Bytes, message: String) -> Failure {
        let ping = CustomCommand::new_static("PING", ClusterHash::Random, false);
        match self.send(line, ping, vec![Value::Bytes(ticket.clone())]).await {
            Ok(Reply::Text(echo)) if echo == ticket => Failure::Server(message),
            // The server refuses this, too: it is busy, or gives no right to it.
            Err(Failure::Server(_)) => Failure::Server(message),
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
            (!line.line.has_ended() && self.distrusted.load(Ordering::Acquire) < line.number).then_some(line)
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
        tokio::time::timeout(limit, some)
            .await
            .unwrap_or_else(|_| Err(Failure::NotSent("the connection is lost, and there is no new one yet".into())))
    }

    async fn send(&self, line: &Numbered, command: CustomCommand, args: Vec<Value>) -> Result<Reply, Failure> {
        let outcome = say(&line.line, command, args).await;
        if let Err(Failure::Unknown(detail)) = &outcome {
            self.distrust(line.number, detail);
        }
        outcome
    }

    /// Asks for a new connection in place of that one.
    fn distrust(&self, number: u64, why: &str) {
        if self.distrusted.fetch_max(number, Ordering::AcqRel) < number {
            tracing::warn!(why, "giving up the connection for a new one");
            self.mend.notify_one();
        }
    }
}

const LOST: &str = "the connection was lost before the reply";

/// Makes a call on a line.
async fn say(line: &Line, command: CustomCommand, args: Vec<Value>) -> Result<Reply, Failure> {
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
            ErrorKind::Canceled | ErrorKind::Unknown if problem.details().contains("channel closed") => {
                Failure::Unknown(LOST.into())
            }
            ErrorKind::Backpressure | ErrorKind::Config | ErrorKind::InvalidArgument => {
                Failure::NotSent(problem.to_string())
            }
            _ => Failure::Unknown(problem.to_string()),
        })
        .and_then(read)
}

/// Watches the connection: its end, calls that distrust it, and its silence while nobody calls. Replaces it.
async fn keep(shared: Arc<Shared>) {
    let period = shared.settings.command_timeout().max(Duration::from_millis(100));
    // The connections whose late calls are not ruled out yet.
    let mut unfenced = Vec::new();
    loop {
        let Some(line) = shared.line.read().clone() else { return };
        tokio::select! {
            () = shared.mend.notified() => {}
            () = line.line.ended() => {}
            // What is wrong with the connection is found out by sending; a refusal is an answer, too. Dropped as soon as
            // somebody else finds it out.
            () = async {
                tokio::time::sleep(period).await;
                let ping = CustomCommand::new_static("PING", ClusterHash::Random, false);
                let _ = shared.send(&line, ping, Vec::new()).await;
            } => {}
        }
        if !line.line.has_ended() && shared.distrusted.load(Ordering::Acquire) < line.number {
            continue;
        }
        let number = line.number + 1;
        // From now on calls are not sent; those under way end with the line.
        let old = shared.line.write().take();
        unfenced.extend(line.identity.clone());
        line.line.end();
        drop((old, line));
        let (line, identity) = replacement(&shared.settings, &mut unfenced).await;
        *shared.line.write() = Some(Arc::new(Numbered { number, line, identity }));
        shared.ready.notify_waiters();
    }
}

/// Opens a new connection, and rules out the old ones. Tries for as long as it takes.
async fn replacement(settings: &Settings, unfenced: &mut Vec<Identity>) -> (Line, Option<Identity>) {
    const FIRST_PAUSE: Duration = Duration::from_millis(5);
    let mut pause = FIRST_PAUSE;
    let mut told = false;
    loop {
        match Line::open(settings, Reconnect::Never).await {
            Ok(line) => {
                // One that fails here was asked nothing, so nothing of it has to be ruled out.
                if let Ok(identity) = identify(&line, settings).await {
                    if fence(&line, unfenced).await {
                        return (line, identity);
                    }
                }
                // The server is there.
                pause = FIRST_PAUSE;
            }
            Err(error) if !told => {
                told = true;
                tracing::warn!(%error, "the server cannot be reached; trying again until it can");
            }
            Err(_) => {}
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(crate::retry::LONGEST);
    }
}

/// Has the server close old connections, so that nothing that was sent on them is run from now on. `false` if that is
/// not known and has to be tried again.
async fn fence(line: &Line, unfenced: &mut Vec<Identity>) -> bool {
    while let Some(old) = unfenced.last() {
        let kill = CustomCommand::new_static("CLIENT", ClusterHash::Random, false);
        let args = ["KILL", "ID", &old.id, "ADDR", &old.address].map(Value::from).to_vec();
        match say(line, kill, args).await {
            Ok(_) => {}
            Err(failure) if failure.is_passing() => return false,
            Err(failure) => {
                tracing::debug!(%failure, "an old connection's late calls cannot be ruled out");
            }
        }
        unfenced.pop();
    }
    true
}

/// Asks the server how it names a connection; `None` if it will not say (ACL, Redis before 6.2).
///
/// A part of connecting, so it has as long as that.
async fn identify(line: &Line, settings: &Settings) -> Result<Option<Identity>, Failure> {
    let info = CustomCommand::new_static("CLIENT", ClusterHash::Random, false);
    let options = Options { timeout: Some(settings.connect_timeout()), ..Default::default() };
    let patient = line.client().with_options(&options);
    let call = patient.custom_raw(info, vec![Value::from_static_str("INFO")]);
    let outcome = tokio::select! {
        biased;
        outcome = call => outcome,
        () = line.ended() => return Err(Failure::Unknown(LOST.into())),
    };
    match outcome.map(read) {
        Ok(Ok(Reply::Text(info))) => {
            let info = String::from_utf8_lossy(&info);
            let field = |name: &str| info.split_whitespace().find_map(|field| field.strip_prefix(name));
            Ok(field("id=")
                .zip(field("addr="))
                .map(|(id, address)| Identity { id: id.into(), address: address.into() }))
        }
        Ok(Err(Failure::Server(_))) => Ok(None),
        Ok(Ok(_) | Err(_)) => Err(Failure::Unknown("the answer to CLIENT INFO is none".into())),
        Err(problem) => Err(Failure::Unknown(problem.to_string())),
    }
}

/// Refuses a server that has only a part of the keys, or none. One that will not say (ACL) is taken for a lone one.
async fn refuse_cluster(line: &Line) -> Result<(), Error> {
    let info = CustomCommand::new_static("INFO", ClusterHash::Random, false);
    let Ok(Reply::Text(info)) = say(line, info, vec![Value::from_static_str("server")]).await else {
        return Ok(());
    };
    let info = String::from_utf8_lossy(&info);
    // Valkey has another name for it.
    let mode =
        |field: &str| field.strip_prefix("redis_mode:").or(field.strip_prefix("server_mode:")).map(str::to_owned);
    match info.lines().find_map(mode).as_deref().map(str::trim) {
        None | Some("standalone") => Ok(()),
        Some(mode) => Err(Error::InvalidConfig {
            setting: "url",
            problem: format!("the server runs in the mode {mode}, which is not supported yet"),
            allowed: "a server that stands alone",
        }),
    }
}

/// Turns the client library's frame into a reply.
pub(super) fn read(frame: Resp3Frame) -> Result<Reply, Failure> {
    let text = |data: &[u8]| String::from_utf8_lossy(data).into_owned();
    match frame {
        Resp3Frame::SimpleError { data, .. } => Err(Failure::Server(data.to_string())),
        Resp3Frame::BlobError { data, .. } => Err(Failure::Server(text(&data))),
        frame => Ok(value(frame)),
    }
}

fn value(frame: Resp3Frame) -> Reply {
    match frame {
        Resp3Frame::Number { data, .. } => Reply::Int(data),
        Resp3Frame::Boolean { data, .. } => Reply::Int(i64::from(data)),
        Resp3Frame::BlobString { data, .. }
        | Resp3Frame::SimpleString { data, .. }
        | Resp3Frame::BigNumber { data, .. }
        | Resp3Frame::VerbatimString { data, .. } => Reply::Text(data),
        Resp3Frame::Array { data, .. } | Resp3Frame::Push { data, .. } => {
            Reply::List(data.into_iter().map(value).collect())
        }
        Resp3Frame::Set { data, .. } => Reply::List(data.into_iter().map(value).collect()),
        Resp3Frame::Map { data, .. } => {
            Reply::List(data.into_iter().flat_map(|(key, item)| [value(key), value(item)]).collect())
        }
        // An error inside an array stays readable.
        Resp3Frame::SimpleError { data, .. } => Reply::Text(Bytes::from(data.to_string())),
        Resp3Frame::BlobError { data, .. } => Reply::Text(data),
        Resp3Frame::Double { data, .. } => Reply::Text(Bytes::from(data.to_string())),
        _ => Reply::Nil,
    }
}
