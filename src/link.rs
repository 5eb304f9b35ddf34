//! The link to the server: script calls with four outcomes, and publish/subscribe events.
//!
//! No other module depends on the client library. A [`Call`](crate::wire::Call) lists its keys
//! apart from its arguments, so that a link to a cluster can route it. The link takes a call as a
//! value, so that it can send several calls in one write.

mod client;
mod connection;
mod frames;
mod limit;
mod pubsub;
mod settings;
mod setup;
mod supervisor;
#[cfg(feature = "tls")]
mod tls;

pub(crate) use client::Link;
pub(crate) use limit::Limit;
pub(crate) use pubsub::{Message, PubSub, Subscribed};
pub(crate) use settings::Settings;
