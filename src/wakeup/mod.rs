//! Wake-ups: who waits in this process for which lock, in which order, and the channels that this
//! needs.
//!
//! The waiters of one lock stand in a queue, the [`lane`]. The [`table`] has all lanes, and knows
//! which channels they need; [`reconcile`] subscribes these.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior};

use crate::link::{Event, PubSub, Subscribed};

mod lane;
mod sync;
mod table;
#[cfg(test)]
mod tests;

pub(crate) use lane::{Outcome, Pace, Standing};
pub(crate) use table::{InFlight, Place, Turn, Wakeups};

/// Takes in what the listening connection tells.
pub(crate) fn event(wakeups: &Wakeups, event: Event<'_>) {
    match event {
        Event::Message(channel) => wakeups.message(channel.as_bytes()),
        Event::Missed => wakeups.missed(),
        Event::Interrupted => wakeups.interrupted(),
    }
}

/// Keeps the subscriptions as the lanes need them: a channel is subscribed while somebody waits,
/// and not longer.
///
/// One operation at a time, in the order of `changed`; each looks at what is wanted *now*.
pub(crate) async fn reconcile(
    wakeups: Arc<Wakeups>,
    mut changed: mpsc::UnboundedReceiver<Bytes>,
    mut pubsub: PubSub,
    check_every: Duration,
    stop: impl Future<Output = ()>,
) {
    const RETRY: Duration = Duration::from_millis(100);
    let mut stop = std::pin::pin!(stop);
    let mut refusals = Refusals::default();
    let mut check = tokio::time::interval_at(Instant::now() + check_every, check_every);
    check.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let name = tokio::select! {
            biased;
            () = &mut stop => break,
            _ = check.tick() => {
                tokio::select! {
                    biased;
                    () = &mut stop => break,
                    () = pubsub.check() => {}
                }
                refusals.take().iter().for_each(|name| wakeups.changed(name));
                continue;
            }
            name = changed.recv() => name,
        };
        let Some(name) = name else { break };
        if !wakeups.wants(&name) {
            pubsub.unsubscribe(&name).await;
            continue;
        }
        let answer = tokio::select! {
            biased;
            () = &mut stop => break,
            answer = pubsub.subscribe(&name) => answer,
        };
        match answer {
            Subscribed::Yes => wakeups.confirmed(&name),
            // Waiters go on by re-checks, so this is slow, not wrong.
            Subscribed::Refused => refusals.add(name),
            Subscribed::Unknown => {
                tokio::select! {
                    biased;
                    () = &mut stop => break,
                    () = tokio::time::sleep(RETRY) => {}
                }
                wakeups.changed(&name);
            }
        }
    }
    pubsub.close().await;
}

/// Subscriptions that the server has refused, perhaps for a while only. Tells of one, but not for
/// every waiter.
#[derive(Default)]
struct Refusals {
    names: HashSet<Bytes>,
    told: Option<Instant>,
}

impl Refusals {
    /// What is to be asked for again.
    fn take(&mut self) -> HashSet<Bytes> {
        std::mem::take(&mut self.names)
    }

    fn add(&mut self, name: Bytes) {
        const QUIET: Duration = Duration::from_secs(60);
        if self.told.is_none_or(|told| told.elapsed() > QUIET) {
            self.told = Some(Instant::now());
            let channel = String::from_utf8_lossy(&name);
            tracing::warn!(%channel, "the server refused a subscription, its waiters rely on re-checks");
        }
        self.names.insert(name);
    }
}
