//! Keeps the subscriptions as the engine wants them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, MissedTickBehavior};

use super::Driver;
use crate::engine::Subscription;
use crate::link::{Message, Messages, Subscribed, Subscriptions};

/// Runs until it is dropped. Messages go to the engine at once, whatever else is under way.
pub(super) async fn keep_subscriptions(driver: Arc<Driver>, pubsub: impl Subscriptions) {
    let mut keeper = Keeper {
        driver,
        pubsub,
        wanted: BTreeSet::new(),
        changed: BTreeSet::new(),
        refused: BTreeSet::new(),
        reported: None,
    };
    loop {
        keeper.serve().await;
        let _ = keeper
            .driver
            .apply(|engine, now| engine.handle_interruption(now));
        keeper.pubsub.reopen().await;
        keeper.refused.clear();
        keeper.changed.clone_from(&keeper.wanted);
    }
}

struct Keeper<P> {
    driver: Arc<Driver>,
    pubsub: P,
    wanted: BTreeSet<Bytes>,
    /// May differ from what the server knows. All others are as they are wanted, so a change costs
    /// as much with many subscriptions as with few.
    changed: BTreeSet<Bytes>,
    /// Refused for a while, perhaps.
    refused: BTreeSet<Bytes>,
    /// When a refusal was reported last.
    reported: Option<Instant>,
}

impl<P: Subscriptions> Keeper<P> {
    /// Works until the connection is lost.
    async fn serve(&mut self) {
        let driver = Arc::clone(&self.driver);
        let messages = self.pubsub.messages();
        let forwarding = async {
            let mut messages = messages;
            while let Some(message) = messages.next().await {
                let _ = driver.apply(|engine, now| match message {
                    Message::On(channel) => engine.handle_message(now, channel.as_bytes()),
                    Message::Missed => engine.handle_missed_messages(now),
                });
            }
        };
        tokio::select! {
            () = forwarding => {}
            () = self.reconcile() => {}
            () = driver.server_left.notified() => {}
        }
    }

    async fn reconcile(&mut self) {
        let every = self.pubsub.check_interval();
        let mut check = tokio::time::interval_at(Instant::now() + every, every);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            self.take_changes();
            if self.synchronize().await.is_err() {
                return;
            }
            tokio::select! {
                () = self.driver.subscriptions.notified() => {}
                () = self.pubsub.ended() => return,
                _ = check.tick() => {
                    if self.pubsub.check().await.is_err() {
                        return;
                    }
                    self.changed.append(&mut self.refused);
                }
            }
        }
    }

    fn take_changes(&mut self) {
        for (name, is_wanted) in self.driver.take_subscriptions() {
            self.changed.insert(name.clone());
            if !is_wanted {
                self.wanted.remove(&name);
                self.refused.remove(&name);
                continue;
            }
            if self.pubsub.channels().contains(&name) {
                // It was ended and is wanted again before the server knew.
                let _ = self.driver.apply(|engine, now| {
                    engine.handle_subscription(now, &name, Subscription::Confirmed);
                });
            }
            self.wanted.insert(name);
        }
    }

    /// Makes and ends subscriptions. An error means that the connection cannot be trusted any more.
    async fn synchronize(&mut self) -> Result<(), ()> {
        /// One command and one confirmation for so many.
        const BATCH: usize = 256;
        let subscribed = self.pubsub.channels();
        let (mut making, mut ending) = (Vec::new(), Vec::new());
        for name in std::mem::take(&mut self.changed) {
            match (self.wanted.contains(&name), subscribed.contains(&name)) {
                (true, false) if !self.refused.contains(&name) => making.push(name),
                (false, true) => ending.push(name),
                _ => {}
            }
        }
        for batch in ending.chunks(BATCH) {
            self.pubsub.unsubscribe(batch).await?;
        }
        for batch in making.chunks(BATCH) {
            self.subscribe(batch).await?;
        }
        Ok(())
    }

    async fn subscribe(&mut self, batch: &[Bytes]) -> Result<(), ()> {
        match self.pubsub.subscribe(batch).await? {
            Subscribed::Yes => {
                let _ = self.driver.apply(|engine, now| {
                    for name in batch {
                        engine.handle_subscription(now, name, Subscription::Confirmed);
                    }
                });
            }
            // The server refuses all of them if it refuses one.
            Subscribed::Refused if batch.len() > 1 => {
                for name in batch {
                    Box::pin(self.subscribe(std::slice::from_ref(name))).await?;
                }
            }
            Subscribed::Refused => {
                const QUIET: Duration = Duration::from_secs(60);
                let is_news = self.reported.is_none_or(|at| at.elapsed() > QUIET);
                if is_news {
                    self.reported = Some(Instant::now());
                }
                self.refused.extend(batch.iter().cloned());
                let refused = Subscription::Refused { is_news };
                let _ = self.driver.apply(|engine, now| {
                    for name in batch {
                        engine.handle_subscription(now, name, refused);
                    }
                });
            }
        }
        Ok(())
    }
}
