//! Sentinels: they know which server is the master
//! (<https://redis.io/docs/latest/develop/reference/sentinel-clients/>).

use std::cmp::Reverse;
use std::time::Duration;

use fred::interfaces::{EventInterface, PubsubInterface};
use fred::types::config::Server;
use fred::types::{ClusterHash, CustomCommand, Value};
use futures::future::{BoxFuture, FutureExt};
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::sync::broadcast::error::RecvError;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout, timeout_at};

use super::Settings;
use super::client::send_on;
use super::connection::Connection;
use crate::error::{ConnectionError, Error};
use crate::wire::{Failure, Reply};

/// The sentinels of a master.
#[derive(Clone)]
pub(super) struct Sentinels {
    master: String,
    /// The settings of a connection to each of them.
    nodes: Vec<Settings>,
}

/// What a sentinel says.
struct Known {
    server: Server,
    /// It grows with each fail-over, so a sentinel that was cut off has a lower one.
    epoch: u64,
}

/// How the watching of a sentinel ended.
enum Watched {
    /// They name another server.
    NamesAnother,
    /// It refuses the subscription, perhaps.
    NoMessages,
    /// It cannot be watched any more.
    Lost,
}

/// How often a sentinel is asked while everything works: a message may be lost.
const INTERVAL: Duration = Duration::from_secs(1);

/// How long the others are waited for after the first answer.
const PATIENCE: Duration = Duration::from_millis(500);

impl Sentinels {
    pub(super) fn new(master: String, nodes: Vec<Settings>) -> Self {
        Self { master, nodes }
    }

    pub(super) fn nodes_mut(&mut self) -> &mut [Settings] {
        &mut self.nodes
    }

    /// For errors and logs.
    pub(super) fn address(&self) -> String {
        let nodes: Vec<_> = self.nodes.iter().map(Settings::address).collect();
        format!("{} by sentinels {}", self.master, nodes.join(", "))
    }

    /// The master: of the answers of a majority, the one with the latest configuration. Of fewer
    /// answers, if the others have none.
    pub(super) async fn server(&self, limit: Duration) -> Result<Server, Error> {
        let mut asking: FuturesUnordered<_> = self
            .nodes
            .iter()
            .map(|node| self.ask_anew(node, limit))
            .collect();
        let mut known = Vec::new();
        let mut error = None;
        let mut until = Instant::now() + limit;
        while let Ok(Some(answer)) = timeout_at(until, asking.next()).await {
            match answer {
                Ok(answer) => known.push(answer),
                // A refusal says more than a sentinel that is not there.
                Err(problem @ (Error::Connection { .. } | Error::Timeout { .. })) => {
                    error.get_or_insert(problem);
                }
                Err(problem) => error = Some(problem),
            }
            if known.len() > self.nodes.len() / 2 {
                break;
            }
            if known.len() == 1 {
                until = until.min(Instant::now() + PATIENCE);
            }
        }
        // Of different answers with one epoch every client has to take the same one.
        let named = known.iter().max_by_key(|named| {
            let same = known
                .iter()
                .filter(|other| !is_other(&other.server, &named.server));
            let name = Reverse((&named.server.host, named.server.port));
            (named.epoch, same.count(), name)
        });
        match (named, error) {
            (Some(named), _) => Ok(named.server.clone()),
            (None, Some(error @ (Error::Connection { .. } | Error::Timeout { .. }))) => {
                Err(self.unreachable(error.into()))
            }
            (None, Some(error)) => Err(error),
            (None, None) => Err(self.unknown("no sentinel answers in time")),
        }
    }

    /// Resolves when the sentinels name another server than this one.
    pub(super) async fn named_another(&self, server: &Server) {
        let (mut at, mut subscribes) = (0, true);
        loop {
            let node = &self.nodes[at % self.nodes.len()];
            match self.watch(node, server, subscribes).await {
                Watched::NamesAnother => return,
                // Asking has to do.
                Watched::NoMessages => subscribes = false,
                Watched::Lost => (at, subscribes) = (at + 1, true),
            }
            tokio::time::sleep(INTERVAL / 4).await;
        }
    }

    async fn watch(&self, node: &Settings, server: &Server, subscribes: bool) -> Watched {
        let limit = node.connect_timeout();
        let Ok(connection) = connect(node, limit).await else {
            return Watched::Lost;
        };
        let mut messages = connection.client().message_rx();
        if subscribes {
            let subscribing = connection.client().subscribe("+switch-master");
            // A refusal is the reply to the next call, as the client library sees it.
            let is_subscribed = timeout(limit, subscribing)
                .await
                .is_ok_and(|done| done.is_ok())
                && self.ask_within(&connection, limit).await.is_ok();
            if !is_subscribed {
                return Watched::NoMessages;
            }
        }
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                message = messages.recv() => if matches!(message, Err(RecvError::Closed)) {
                    return Watched::Lost;
                },
                () = connection.ended() => return Watched::Lost,
            }
            let Ok(known) = self.ask_within(&connection, limit).await else {
                return Watched::Lost;
            };
            // This one alone may be wrong.
            if is_other(&known.server, server)
                && self
                    .server(limit)
                    .await
                    .is_ok_and(|named| is_other(&named, server))
            {
                return Watched::NamesAnother;
            }
        }
    }

    async fn ask_anew(&self, node: &Settings, limit: Duration) -> Result<Known, Error> {
        let connection = connect(node, limit).await?;
        self.ask_within(&connection, limit).await
    }

    async fn ask_within(&self, connection: &Connection, limit: Duration) -> Result<Known, Error> {
        match timeout(limit, self.ask(connection)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(self.unknown("a sentinel does not answer")),
        }
    }

    async fn ask(&self, connection: &Connection) -> Result<Known, Error> {
        let command = CustomCommand::new_static("SENTINEL", ClusterHash::Random, false);
        let args = ["MASTER", &self.master].map(Value::from).to_vec();
        let fields = match send_on(connection, command, args).await {
            Ok(Reply::List(fields)) => fields,
            Ok(other) => return Err(self.unknown(&format!("a sentinel answers {other:?}"))),
            Err(Failure::Server(error)) => {
                return Err(self.unknown(&format!("a sentinel answers {error}")));
            }
            Err(failure) => return Err(self.unknown(&failure.to_string())),
        };
        let field = |name: &str| {
            let mut pairs = fields.chunks_exact(2);
            let text = |reply: &Reply| match reply {
                Reply::Text(text) => Some(String::from_utf8_lossy(text).into_owned()),
                _ => None,
            };
            pairs.find_map(|pair| (text(&pair[0])? == name).then(|| text(&pair[1]))?)
        };
        let number = |name: &str| field(name)?.parse().ok();
        match (
            field("ip"),
            field("port").and_then(|port| port.parse().ok()),
        ) {
            (Some(host), Some(port)) => Ok(Known {
                server: Server::new(host, port),
                epoch: number("config-epoch").unwrap_or(0),
            }),
            _ => Err(self.unknown("a sentinel answers without an address")),
        }
    }

    fn unknown(&self, problem: &str) -> Error {
        self.unreachable(problem.to_owned().into())
    }

    fn unreachable(&self, error: ConnectionError) -> Error {
        Error::Connection {
            lock: None,
            address: self.address(),
            error,
        }
    }
}

/// Boxed, because a connection asks the sentinels first.
fn connect(node: &Settings, limit: Duration) -> BoxFuture<'static, Result<Connection, Error>> {
    let node = node.within(limit);
    async move { Connection::open(&node).await }.boxed()
}

fn is_other(one: &Server, other: &Server) -> bool {
    (&one.host, one.port) != (&other.host, other.port)
}
