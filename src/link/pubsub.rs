//! The connection for publish/subscribe.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use fred::interfaces::{ClientLike, EventInterface, PubsubInterface};
use fred::types::{ClusterHash, CustomCommand, Value};
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinHandle;

use super::connection::Connection;
use super::frames::read;
use super::settings::Reconnect;
use super::{Failure, Reply, Settings};
use crate::error::Error;

/// An event of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event<'a> {
    /// A message on this channel.
    Message(&'a str),
    /// Messages on any channel may have been missed.
    Missed,
    /// The connection was replaced: all subscriptions have ended, and messages may have been
    /// missed.
    Interrupted,
}

/// The callback for events. The connection's own task calls it, so it must not block.
pub(crate) type Events = Arc<dyn Fn(Event<'_>) + Send + Sync>;

/// The outcome of a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subscribed {
    /// The server has confirmed it: every later message arrives.
    Yes,
    /// The server has refused it.
    Refused,
    /// The outcome is unknown. Try again later.
    Unknown,
}

/// A connection for subscriptions only. It runs one operation at a time.
///
/// The client library completes SUBSCRIBE before the server replies, and hands a refusal to the
/// next call. So each subscription is confirmed by the number of channels that the server counts
/// for this connection (`CLIENT INFO`, <https://redis.io/docs/latest/commands/client-info/>).
pub(crate) struct PubSub {
    settings: Settings,
    connection: Connection,
    forwarder: JoinHandle<()>,
    events: Events,
    /// Counts the reconnects of the connection.
    epoch: Arc<AtomicU64>,
    /// The epoch to which `channels` belongs.
    seen: u64,
    /// The epoch in which the connection's name was set.
    named: Option<u64>,
    channels: BTreeSet<Bytes>,
    nonce: u64,
}

impl PubSub {
    pub(crate) async fn open(settings: Settings, events: Events) -> Result<Self, Error> {
        let connection = Connection::open(&settings, Reconnect::ByItself).await?;
        let epoch = Arc::new(AtomicU64::new(0));
        let forwarder = forward(&connection, Arc::clone(&epoch), Arc::clone(&events));
        let mut pubsub = Self {
            settings,
            connection,
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
        // After an unknown outcome the connection is replaced: otherwise a subscription without a
        // record could stay.
        let subscribing = self.connection.client().subscribe(text(channel));
        if subscribing.await.is_err() {
            self.reopen();
            return Subscribed::Unknown;
        }
        let mut count = self.count().await;
        if count != Ok(Some(before + 1)) {
            if self.drain_replies().await.is_err() {
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
            // The server does not state the number (ACL, Redis before 6.2). It has replied to later
            // calls, so the subscription is active unless the server refused it; in that case
            // re-checks replace the wake-ups.
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

    /// Unsubscribes. If that fails, the connection is replaced, which ends the subscription.
    pub(crate) async fn unsubscribe(&mut self, channel: &Bytes) {
        self.notice_interruption();
        if !self.channels.remove(channel) {
            return;
        }
        let unsubscribing = self.connection.client().unsubscribe(text(channel));
        if unsubscribing.await.is_err() {
            self.reopen();
        }
    }

    /// Checks that the server replies on the connection; replaces the connection if it does not.
    pub(crate) async fn check(&mut self) {
        if self.connection.has_ended() || self.drain_replies().await.is_err() {
            self.reopen();
        } else {
            self.set_name().await;
        }
    }

    /// Closes the connection and ends its tasks.
    pub(crate) async fn close(&mut self) {
        self.forwarder.abort();
        self.connection.quit().await;
    }

    fn notice_interruption(&mut self) {
        let epoch = self.epoch.load(Ordering::Acquire);
        if epoch != self.seen {
            self.seen = epoch;
            self.channels.clear();
        }
    }

    /// Sets the name of the connection, once after each connect.
    async fn set_name(&mut self) {
        let epoch = self.epoch.load(Ordering::Acquire);
        if self.named.replace(epoch) != Some(epoch) {
            let name = self.settings.connection_name();
            self.connection.set_name(name).await;
        }
    }

    fn reopen(&mut self) {
        tracing::warn!(address = %self.settings.address(), "the connection for wake-ups is replaced");
        self.forwarder.abort();
        self.connection = Connection::reopen(&self.settings);
        self.epoch = Arc::new(AtomicU64::new(0));
        self.seen = 0;
        self.named = None;
        self.channels.clear();
        self.forwarder = forward(
            &self.connection,
            Arc::clone(&self.epoch),
            Arc::clone(&self.events),
        );
        (self.events)(Event::Interrupted);
    }

    /// The number of channels that the server counts for this connection; `None` if the server does
    /// not state it.
    async fn count(&self) -> Result<Option<usize>, ()> {
        let info = CustomCommand::new_static("CLIENT", ClusterHash::Random, false);
        match self
            .connection
            .client()
            .custom_raw(info, vec![Value::from_static_str("INFO")])
            .await
            .map(read)
        {
            Ok(Ok(Reply::Text(info))) => Ok(subscriptions(&info)),
            Ok(Err(Failure::Server(_))) => Ok(None),
            Ok(_) | Err(_) => Err(()),
        }
    }

    /// Sends PINGs until the reply to one of them arrives: then every earlier reply has been read.
    /// A server that is busy with a script refuses PING; this waits until it is idle.
    async fn drain_replies(&mut self) -> Result<(), ()> {
        const TRIES: usize = 4;
        const PAUSE: Duration = Duration::from_millis(100);
        let mut tries = 0;
        while tries < TRIES {
            self.nonce += 1;
            let nonce = format!("redisson-lock:{}", self.nonce);
            let ping = CustomCommand::new_static("PING", ClusterHash::Random, false);
            let echo = self
                .connection
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

/// Reports the events of a connection, until the connection ends.
fn forward(connection: &Connection, epoch: Arc<AtomicU64>, events: Events) -> JoinHandle<()> {
    let mut messages = connection.client().message_rx();
    let mut reconnects = connection.client().reconnect_rx();
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

/// Reads `sub=` from the reply to `CLIENT INFO`.
fn subscriptions(info: &[u8]) -> Option<usize> {
    let info = std::str::from_utf8(info).ok()?;
    info.split_whitespace()
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
    fn channel_count_is_read_from_client_info() {
        assert_eq!(
            subscriptions(b"id=3 addr=127.0.0.1:1 sub=12 psub=0 ssub=4"),
            Some(12)
        );
        assert_eq!(subscriptions(b"id=3 psub=7"), None);
        assert_eq!(subscriptions(b""), None);
    }
}
