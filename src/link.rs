//! The link to the server: script calls with four outcomes, and publish/subscribe events.
//!
//! The driver knows two traits. Behind them is fred; no other module depends on it. A
//! [`Call`] lists its keys apart from its arguments, so that a link to a cluster can route it. The
//! link takes a call as a value, so that it can send several calls in one write.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use crate::wire::{Call, Failure, Reply};

mod client;
mod connection;
mod frames;
mod limit;
mod pubsub;
mod sentinel;
mod settings;
mod setup;
mod supervisor;
#[cfg(feature = "tls")]
mod tls;

pub(crate) use client::CallLink;
pub(crate) use limit::Limit;
pub(crate) use pubsub::PubSub;
pub(crate) use settings::{Login, Settings};

/// Makes script calls. It replaces its connections when they are lost.
pub(crate) trait Link: Send + Sync + 'static {
    /// Makes a call. The first poll of the future sends it, or waits for a connection to send it
    /// on; dropping the future does not recall it. Returns also a moment before which it was not
    /// sent.
    fn call(
        &self,
        call: Call,
    ) -> impl Future<Output = (Instant, Result<Reply, Failure>)> + Send + 'static;

    /// The server is not the master any more: connects anew, where the address may lead to another
    /// server. `false` if the connection is too new for that, or is being replaced already.
    fn leave_server(&self) -> bool;

    /// Resolves when it has left its server by itself: the connection for messages is to be
    /// replaced, too.
    fn moved(&self) -> impl Future<Output = ()> + Send + 'static;

    /// Closes the connections and ends its tasks. A second call has no effect.
    fn close(&self) -> impl Future<Output = ()> + Send;
}

/// A connection for subscriptions. An error of an operation says that it cannot be trusted any
/// more: a subscription without a record could stay. [`reopen`](Self::reopen) replaces it.
pub(crate) trait Subscriptions: Send + Sync + 'static {
    /// Those of one connection.
    type Messages: Messages;

    /// The messages from now on, until the connection is lost.
    fn messages(&self) -> Self::Messages;

    /// How often [`check`](Self::check) is to be called.
    fn check_interval(&self) -> Duration;

    /// The channels that the server has confirmed.
    fn channels(&self) -> &BTreeSet<Bytes>;

    /// Resolves when the connection is lost.
    fn ended(&self) -> impl Future<Output = ()> + Send;

    /// Subscribes to all of them, and waits until the server has confirmed it. The server refuses
    /// all if it refuses one.
    fn subscribe(
        &mut self,
        channels: &[Bytes],
    ) -> impl Future<Output = Result<Subscribed, ()>> + Send;

    fn unsubscribe(&mut self, channels: &[Bytes]) -> impl Future<Output = Result<(), ()>> + Send;

    /// Checks that the server replies on the connection.
    fn check(&mut self) -> impl Future<Output = Result<(), ()>> + Send;

    /// Replaces the connection. Tries until that succeeds.
    fn reopen(&mut self) -> impl Future<Output = ()> + Send;
}

/// The messages of one connection.
pub(crate) trait Messages: Send {
    /// The next one; `None` once the connection is lost.
    fn next(&mut self) -> impl Future<Output = Option<Message>> + Send;
}

/// What the server published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// A message on this channel.
    On(String),
    /// Messages on any channel may have been missed.
    Missed,
}

/// The outcome of a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subscribed {
    /// The server has confirmed it: every later message arrives.
    Yes,
    /// The server has refused it.
    Refused,
}
