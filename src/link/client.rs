//! Calls to one server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use fred::error::ErrorKind;
use fred::interfaces::ClientLike;
use fred::types::{ClusterHash, CustomCommand, Resp3Frame, Value};
use parking_lot::RwLock;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::line::Line;
use super::{Call, Failure, Reply, Settings, What};
use crate::error::Error;

/// The connection for calls, replaced when it cannot be trusted any more.
///
/// Replies are matched to calls by their order alone, so a call that had no reply in time may have left
/// the order shifted. Scripts echo a ticket that proves whose reply it is; and after a time-out or a
/// foreign ticket the connection is given up for a new one.
pub(crate) struct Link {
    shared: Arc<Shared>,
    keeper: JoinHandle<()>,
}

struct Shared {
    settings: Settings,
    line: RwLock<Arc<Numbered>>,
    distrusted: AtomicU64,
    mend: Notify,
    tickets: AtomicU64,
    closed: AtomicBool,
}

struct Numbered {
    number: u64,
    line: Line,
}

impl Link {
    /// Connects, and loads the scripts given so that calling them by their SHA-1 works at once.
    pub(crate) async fn connect(settings: Settings, scripts: &[What]) -> Result<Self, Error> {
        let line = Line::open(&settings).await?;
        let shared = Arc::new(Shared {
            settings,
            line: RwLock::new(Arc::new(Numbered { number: 1, line })),
            distrusted: AtomicU64::new(0),
            mend: Notify::new(),
            tickets: AtomicU64::new(1),
            closed: AtomicBool::new(false),
        });
        for script in scripts {
            if let What::Script { text, .. } = script {
                let load = CustomCommand::new_static("SCRIPT", ClusterHash::Random, false);
                let args = vec![Value::from_static_str("LOAD"), Value::from_static_str(text)];
                if let Err(failure) = shared.send(load, args).await {
                    // Not needed for being right: a script that the server does not know is sent whole.
                    tracing::debug!(?failure, "scripts could not be loaded in advance");
                    break;
                }
            }
        }
        let keeper = tokio::spawn(keep(Arc::clone(&shared)));
        Ok(Self { shared, keeper })
    }

    /// Makes a call. It is on its way when the future is first polled; dropping the future does not recall it.
    pub(crate) fn call(&self, call: Call) -> impl Future<Output = Result<Reply, Failure>> + Send + use<> {
        let shared = Arc::clone(&self.shared);
        async move {
            match call.what {
                What::Script { sha1, text } => shared.script(sha1, text, call.keys, call.args).await,
                What::Command(name) => {
                    let args = call.keys.into_iter().chain(call.args).map(Value::Bytes).collect();
                    shared.send(CustomCommand::new_static(name, ClusterHash::FirstKey, false), args).await
                }
            }
        }
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
        let line = Arc::clone(&self.shared.line.read());
        line.line.quit().await;
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
        sha1: &'static str,
        text: &'static str,
        keys: Vec<Bytes>,
        args: Vec<Bytes>,
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
        let number = self.line.read().number;
        let mut outcome = self.send(by_sha1, arguments(sha1)).await;
        if matches!(&outcome, Err(Failure::Server(message)) if message.starts_with("NOSCRIPT")) {
            // Nothing ran, so the script may be sent whole; the server keeps it from then on.
            let by_text = CustomCommand::new_static("EVAL", ClusterHash::Random, false);
            outcome = self.send(by_text, arguments(text)).await;
        }
        match outcome? {
            Reply::List(mut values) if values.first() == Some(&Reply::Text(ticket)) => {
                values.remove(0);
                Ok(Reply::List(values))
            }
            other => {
                self.distrust(number, "a reply belonged to another call");
                Err(Failure::Unknown(format!("the reply belongs to another call: {other:?}")))
            }
        }
    }

    async fn send(&self, command: CustomCommand, args: Vec<Value>) -> Result<Reply, Failure> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Failure::Closed);
        }
        let line = Arc::clone(&self.line.read());
        match line.line.client().custom_raw(command, args).await {
            Ok(frame) => read(frame),
            Err(problem) => {
                if line.line.has_ended() {
                    self.distrust(line.number, "the connection's driver has ended");
                }
                match problem.kind() {
                    ErrorKind::Timeout => {
                        self.distrust(line.number, "a reply did not come in time");
                        Err(Failure::Unknown("no reply in time".into()))
                    }
                    ErrorKind::Backpressure | ErrorKind::Config | ErrorKind::InvalidArgument => {
                        Err(Failure::NotSent(problem.to_string()))
                    }
                    ErrorKind::Unknown if problem.details().contains("Failed to send command to router") => {
                        Err(Failure::NotSent(problem.to_string()))
                    }
                    _ => Err(Failure::Unknown(problem.to_string())),
                }
            }
        }
    }

    /// Asks for a new connection in place of that one.
    fn distrust(&self, number: u64, why: &str) {
        if self.distrusted.fetch_max(number, Ordering::Relaxed) < number {
            tracing::warn!(why, "giving up the connection for a new one");
            self.mend.notify_one();
        }
    }

    fn replace(&self, number: u64) {
        let mut line = self.line.write();
        if line.number == number {
            *line = Arc::new(Numbered { number: number + 1, line: Line::reopen(&self.settings) });
        }
    }
}

/// Watches the connection: its end, calls that distrust it, and its silence while nobody calls.
async fn keep(shared: Arc<Shared>) {
    let period = shared.settings.command_timeout().max(Duration::from_millis(100));
    loop {
        tokio::select! {
            () = shared.mend.notified() => {}
            () = tokio::time::sleep(period) => {
                let ping = CustomCommand::new_static("PING", ClusterHash::Random, false);
                // What is wrong with the connection is found out by sending; a refusal is an answer, too.
                let _ = shared.send(ping, Vec::new()).await;
            }
        }
        let number = shared.line.read().number;
        let ended = shared.line.read().line.has_ended();
        if ended || shared.distrusted.load(Ordering::Relaxed) >= number {
            shared.replace(number);
        }
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
