//! The connection for publish/subscribe.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use fred::error::ErrorKind;
use fred::interfaces::{ClientLike, EventInterface, PubsubInterface};
use fred::types::{ClusterHash, CustomCommand, Value};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

use super::connection::Connection;
use super::frames::read;
use super::{Message, Messages, Settings, Subscribed, Subscriptions};
use crate::error::{Error, ServerErrorKind};
use crate::wire::{Failure, Reply};

/// A connection for subscriptions only. It runs one operation at a time.
///
/// The client library completes SUBSCRIBE before the server replies, and hands a refusal to the
/// next call. So subscriptions are confirmed by the number of channels that the server counts for
/// this connection (`CLIENT INFO`, <https://redis.io/docs/latest/commands/client-info/>).
pub(crate) struct PubSub {
    settings: Settings,
    connection: Connection,
    channels: BTreeSet<Bytes>,
    nonce: u64,
}

/// What one connection receives.
pub(crate) struct Published(Receiver<fred::types::Message>);

impl Messages for Published {
    async fn next(&mut self) -> Option<Message> {
        match self.0.recv().await {
            Ok(message) => Some(Message::On(message.channel.to_string())),
            Err(RecvError::Lagged(_)) => Some(Message::Missed),
            Err(RecvError::Closed) => None,
        }
    }
}

impl PubSub {
    pub(crate) async fn open(settings: Settings) -> Result<Self, Error> {
        let connection = Connection::open(&settings).await?;
        connection.set_name(settings.connection_name()).await;
        Ok(Self {
            settings,
            connection,
            channels: BTreeSet::new(),
            nonce: 0,
        })
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
            Err(problem) => {
                self.failed(&problem);
                Err(())
            }
            Ok(_) => Err(()),
        }
    }

    /// Sends PINGs until the reply to one of them arrives: then every earlier reply has been read.
    /// A server that is busy with a script refuses PING; this waits until it is idle. One that
    /// cannot save its data refuses PING, too, and no other command that is sent here, so its
    /// refusals are replies to PINGs.
    async fn drain_replies(&mut self) -> Result<(), ()> {
        const TRIES: usize = 4;
        const PAUSE: Duration = Duration::from_millis(100);
        let (mut tries, mut refusals) = (0, 0);
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
                Ok(Err(Failure::Server(error)))
                    if error.kind() == ServerErrorKind::Misconfigured =>
                {
                    refusals += 1;
                    if refusals == TRIES {
                        return Ok(());
                    }
                }
                Ok(Err(failure)) if failure.is_transient() => tokio::time::sleep(PAUSE).await,
                Ok(_) => tries += 1,
                Err(problem) => {
                    self.failed(&problem);
                    return Err(());
                }
            }
        }
        Err(())
    }

    /// The connection cannot be trusted any more.
    fn failed(&self, problem: &fred::error::Error) {
        if *problem.kind() == ErrorKind::Timeout {
            self.settings.limit().missed();
        }
    }
}

impl Subscriptions for PubSub {
    type Messages = Published;

    fn messages(&self) -> Published {
        Published(self.connection.client().message_rx())
    }

    fn check_interval(&self) -> Duration {
        self.settings
            .command_timeout()
            .max(Duration::from_millis(250))
    }

    fn channels(&self) -> &BTreeSet<Bytes> {
        &self.channels
    }

    async fn ended(&self) {
        self.connection.ended().await;
    }

    async fn subscribe(&mut self, channels: &[Bytes]) -> Result<Subscribed, ()> {
        let before = self.channels.len();
        let after = before + channels.len();
        let names: Vec<_> = channels.iter().map(text).collect();
        self.connection
            .client()
            .subscribe(names)
            .await
            .map_err(drop)?;
        let mut count = self.count().await;
        if count != Ok(Some(after)) {
            self.drain_replies().await?;
            count = self.count().await;
        }
        match count? {
            Some(now) if now == before => return Ok(Subscribed::Refused),
            Some(now) if now != after => return Err(()),
            // The server does not state the number (ACL, Redis before 6.2). It has replied to later
            // calls, so the subscription is active unless the server refused it; in that case
            // re-checks replace the wake-ups.
            Some(_) | None => {}
        }
        self.channels.extend(channels.iter().cloned());
        Ok(Subscribed::Yes)
    }

    async fn unsubscribe(&mut self, channels: &[Bytes]) -> Result<(), ()> {
        let names: Vec<_> = channels.iter().map(text).collect();
        for channel in channels {
            self.channels.remove(channel);
        }
        let unsubscribing = self.connection.client().unsubscribe(names);
        unsubscribing.await.map_err(drop)
    }

    async fn check(&mut self) -> Result<(), ()> {
        self.drain_replies().await?;
        self.connection
            .set_name(self.settings.connection_name())
            .await;
        Ok(())
    }

    async fn reopen(&mut self) {
        const LONGEST: Duration = Duration::from_millis(250);
        let mut pause = Duration::from_millis(5);
        tracing::warn!(address = %self.settings.address(), "the connection for wake-ups is replaced");
        self.connection.end();
        self.channels.clear();
        loop {
            if let Ok(connection) = Connection::open(&self.settings).await {
                self.connection = connection;
                self.connection
                    .set_name(self.settings.connection_name())
                    .await;
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST);
        }
    }
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
