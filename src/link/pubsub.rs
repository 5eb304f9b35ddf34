//! The connection that listens.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use fred::interfaces::{ClientLike, EventInterface, PubsubInterface};
use fred::types::{ClusterHash, CustomCommand, Value};
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinHandle;

use super::frames::read;
use super::line::Line;
use super::settings::Reconnect;
use super::{Failure, Reply, Settings};
use crate::error::Error;

/// What the listening connection tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event<'a> {
    /// A message on this channel.
    Message(&'a str),
    /// Messages on any channel may have been missed.
    Missed,
    /// The connection is new: nothing is subscribed any more, and messages may have been missed.
    Interrupted,
}

/// Who is told. It is called from the connection's own task, so it must be quick.
pub(crate) type Events = Arc<dyn Fn(Event<'_>) + Send + Sync>;

/// What came of a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subscribed {
    /// The server has confirmed it: every later message comes.
    Yes,
    /// The server has refused it.
    Refused,
    /// Not known; ask again later.
    Unknown,
}

/// A connection of its own for subscriptions, used for one operation at a time.
///
/// The client library answers SUBSCRIBE before the server has, and a refusal is handed to whichever
/// call comes next. So each subscription is confirmed by the number of channels that the server
/// counts for this connection (`CLIENT INFO`,
/// <https://redis.io/docs/latest/commands/client-info/>).
pub(crate) struct PubSub {
    settings: Settings,
    line: Line,
    forwarder: JoinHandle<()>,
    events: Events,
    /// Counts the connections that this line has had.
    epoch: Arc<AtomicU64>,
    seen: u64,
    /// The connection that has its name.
    named: Option<u64>,
    channels: BTreeSet<Bytes>,
    nonce: u64,
}

impl PubSub {
    pub(crate) async fn open(settings: Settings, events: Events) -> Result<Self, Error> {
        let line = Line::open(&settings, Reconnect::ByItself).await?;
        let epoch = Arc::new(AtomicU64::new(0));
        let forwarder = forward(&line, Arc::clone(&epoch), Arc::clone(&events));
        let mut pubsub = Self {
            settings,
            line,
            forwarder,
            events,
            epoch,
            seen: 0,
            named: None,
            channels: BTreeSet::new(),
            nonce: 0,
        };
        pubsub.set_name().await;
        Ok(pubsub)
    }

    /// Subscribes, and waits until the server has confirmed it.
    pub(crate) async fn subscribe(&mut self, channel: &Bytes) -> Subscribed {
        self.notice_interruption();
        self.set_name().await;
        if self.channels.contains(channel) {
            return Subscribed::Yes;
        }
        let before = self.channels.len();
        // After an unknown outcome the connection goes: it may be subscribed to what nobody would
        // unsubscribe.
        if self.line.client().subscribe(text(channel)).await.is_err() {
            self.reopen();
            return Subscribed::Unknown;
        }
        let mut count = self.count().await;
        if count != Ok(Some(before + 1)) {
            if self.settle().await.is_err() {
                self.reopen();
                return Subscribed::Unknown;
            }
            count = self.count().await;
        }
        if self.epoch.load(Ordering::Acquire) != self.seen {
            self.reopen();
            return Subscribed::Unknown;
        }
        match count {
            Ok(Some(now)) if now == before + 1 => {
                self.channels.insert(channel.clone());
                Subscribed::Yes
            }
            Ok(Some(now)) if now == before => Subscribed::Refused,
            // The server may not say (ACL, Redis before 6.2). It has answered calls that came
            // later, so a subscription that it allows is in force; one that it refused is made up
            // for by re-checks.
            Ok(None) => {
                self.channels.insert(channel.clone());
                Subscribed::Yes
            }
            Ok(Some(_)) | Err(()) => {
                self.reopen();
                Subscribed::Unknown
            }
        }
    }

    /// Unsubscribes. What cannot be unsubscribed ends with its connection.
    pub(crate) async fn unsubscribe(&mut self, channel: &Bytes) {
        self.notice_interruption();
        if self.channels.remove(channel)
            && self.line.client().unsubscribe(text(channel)).await.is_err()
        {
            self.reopen();
        }
    }

    /// Finds out whether the connection still answers; gives it up for a new one if it does not.
    pub(crate) async fn check(&mut self) {
        if self.line.has_ended() || self.settle().await.is_err() {
            self.reopen();
        } else {
            self.set_name().await;
        }
    }

    /// Closes the connection and ends its tasks.
    pub(crate) async fn close(&mut self) {
        self.forwarder.abort();
        self.line.quit().await;
    }

    fn notice_interruption(&mut self) {
        let epoch = self.epoch.load(Ordering::Acquire);
        if epoch != self.seen {
            self.seen = epoch;
            self.channels.clear();
        }
    }

    /// Names each new connection once.
    async fn set_name(&mut self) {
        let epoch = self.epoch.load(Ordering::Acquire);
        if self.named.replace(epoch) != Some(epoch) {
            self.line.set_name(self.settings.connection_name()).await;
        }
    }

    fn reopen(&mut self) {
        tracing::warn!(address = %self.settings.address(), "the connection for wake-ups is replaced");
        self.forwarder.abort();
        self.line = Line::reopen(&self.settings);
        self.epoch = Arc::new(AtomicU64::new(0));
        self.seen = 0;
        self.named = None;
        self.channels.clear();
        self.forwarder = forward(
            &self.line,
            Arc::clone(&self.epoch),
            Arc::clone(&self.events),
        );
        (self.events)(Event::Interrupted);
    }

    /// How many channels the server counts for this connection; `None` if it will not say.
    async fn count(&self) -> Result<Option<usize>, ()> {
        let info = CustomCommand::new_static("CLIENT", ClusterHash::Random, false);
        match self
            .line
            .client()
            .custom_raw(info, vec![Value::from_static_str("INFO")])
            .await
            .map(read)
        {
            Ok(Ok(Reply::Text(line))) => Ok(subscriptions(&line)),
            Ok(Err(Failure::Server(_))) => Ok(None),
            Ok(_) | Err(_) => Err(()),
        }
    }

    /// Sends until it hears its own echo: then every earlier reply has been taken off the line. A
    /// server that is busy with a script refuses even that, and is waited for.
    async fn settle(&mut self) -> Result<(), ()> {
        const TRIES: usize = 4;
        const PAUSE: Duration = Duration::from_millis(100);
        let mut tries = 0;
        while tries < TRIES {
            self.nonce += 1;
            let nonce = format!("redisson-lock:{}", self.nonce);
            let ping = CustomCommand::new_static("PING", ClusterHash::Random, false);
            let echo = self
                .line
                .client()
                .custom_raw(ping, vec![Value::from(nonce.clone())])
                .await;
            match echo.map(read) {
                Ok(Ok(Reply::Text(text))) if text == nonce => return Ok(()),
                Ok(Err(failure)) if failure.is_transient() => tokio::time::sleep(PAUSE).await,
                Ok(_) => tries += 1,
                Err(_) => return Err(()),
            }
        }
        Err(())
    }
}

impl Drop for PubSub {
    fn drop(&mut self) {
        self.forwarder.abort();
    }
}

/// Passes on what comes in on a line, for as long as the line lives.
fn forward(line: &Line, epoch: Arc<AtomicU64>, events: Events) -> JoinHandle<()> {
    let mut messages = line.client().message_rx();
    let mut reconnects = line.client().reconnect_rx();
    tokio::spawn(async move {
        loop {
            tokio::select! {
                biased;
                reconnect = reconnects.recv() => match reconnect {
                    Ok(_) | Err(RecvError::Lagged(_)) => {
                        epoch.fetch_add(1, Ordering::AcqRel);
                        events(Event::Interrupted);
                    }
                    Err(RecvError::Closed) => return,
                },
                message = messages.recv() => match message {
                    Ok(message) => events(Event::Message(&message.channel)),
                    Err(RecvError::Lagged(_)) => events(Event::Missed),
                    Err(RecvError::Closed) => return,
                },
            }
        }
    })
}

/// Reads `sub=` from a line of `CLIENT INFO`.
fn subscriptions(line: &[u8]) -> Option<usize> {
    let line = std::str::from_utf8(line).ok()?;
    line.split_whitespace()
        .find_map(|field| field.strip_prefix("sub="))
        .and_then(|count| count.parse().ok())
}

fn text(channel: &Bytes) -> String {
    String::from_utf8_lossy(channel).into_owned()
}

#[cfg(test)]
mod tests {
    use super::subscriptions;

    #[test]
    fn the_number_of_channels_is_read_from_client_info() {
        assert_eq!(
            subscriptions(b"id=3 addr=127.0.0.1:1 sub=12 psub=0 ssub=4"),
            Some(12)
        );
        assert_eq!(subscriptions(b"id=3 psub=7"), None);
        assert_eq!(subscriptions(b""), None);
    }
}
