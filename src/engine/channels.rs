//! Which channels are subscribed: while a request waits for messages, and a moment longer.

use std::time::Duration;

use bytes::Bytes;
use rand::Rng;

use super::notice::Notice;
use super::timers::Timer;
use super::{Engine, LockId, Transmit};
use crate::time::Time;

/// A release channel. Names in and without braces share one, so several locks may.
#[derive(Debug)]
pub(super) struct Channel {
    /// The locks with waiting requests.
    locks: Vec<LockId>,
    /// Whether the server has confirmed the subscription.
    is_confirmed: bool,
    /// Counts the messages, and the moments at which one may have been missed.
    epoch: u64,
    /// When the subscription ends, if no request waits until then.
    idle_until: Option<Time>,
}

/// How long a subscription outlives the last waiting request: the next one often comes soon.
const IDLE: Duration = Duration::from_millis(500);

/// The outcome of a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subscription {
    /// The server has confirmed it: every later message arrives.
    Confirmed,
    /// The server has refused it.
    Refused {
        /// Whether it is to be reported.
        is_news: bool,
    },
}

impl Channel {
    pub(super) fn is_idle(&self) -> bool {
        self.locks.is_empty()
    }
}

impl Engine {
    /// A message on a channel.
    pub(crate) fn handle_message(&mut self, now: Time, channel: &[u8]) {
        let Some(channel) = self.channels.get_mut(channel) else {
            return;
        };
        channel.epoch += 1;
        for lock in channel.locks.clone() {
            self.wake_lock(now, lock);
        }
    }

    /// The outcome of a subscription. A confirmation is a reason for an attempt: a message may have
    /// been missed before.
    pub(crate) fn handle_subscription(&mut self, now: Time, name: &Bytes, outcome: Subscription) {
        let Some(channel) = self.channels.get_mut(name) else {
            return;
        };
        match outcome {
            Subscription::Confirmed => {
                channel.is_confirmed = true;
                channel.epoch += 1;
                for lock in channel.locks.clone() {
                    self.wake_lock(now, lock);
                }
            }
            Subscription::Refused { is_news } => {
                channel.is_confirmed = false;
                if is_news {
                    self.notice(Notice::SubscriptionRefused(name.clone()));
                }
            }
        }
    }

    /// The connection for messages was lost: nothing is confirmed until the link has subscribed
    /// again. Until then requests look by themselves.
    pub(crate) fn handle_interruption(&mut self, now: Time) {
        let mut locks = Vec::new();
        for channel in self.channels.values_mut() {
            channel.is_confirmed = false;
            channel.epoch += 1;
            locks.extend(channel.locks.iter().copied());
        }
        self.look_within(now, locks, Duration::from_secs(1));
    }

    /// Messages may have been missed.
    pub(crate) fn handle_missed_messages(&mut self, now: Time) {
        let mut locks = Vec::new();
        for channel in self.channels.values_mut() {
            channel.epoch += 1;
            locks.extend(channel.locks.iter().copied());
        }
        // Spread, so that the attempts do not come at once.
        let spread = Duration::from_micros(100) * u32::try_from(locks.len()).unwrap_or(u32::MAX);
        self.look_within(now, locks, spread.min(Duration::from_secs(1)));
    }

    /// Has each of the locks looked at within that time.
    fn look_within(&mut self, now: Time, locks: Vec<LockId>, spread: Duration) {
        for id in locks {
            let at = now + spread.mul_f64(self.rng.random_range(0.0..1.0));
            if let Some(lock) = self.locks.get_mut(id) {
                lock.wait.recheck_at = lock.wait.recheck_at.min(at);
                self.advance_lock(now, id);
            }
        }
    }

    /// Has the lock's channel subscribed: its requests sleep.
    pub(super) fn listen(&mut self, id: LockId) {
        let lock = &mut self.locks[id];
        if std::mem::replace(&mut lock.wait.listens, true) {
            return;
        }
        let name = lock.keys.channel.clone();
        match self.channels.get_mut(&name) {
            Some(channel) => {
                channel.idle_until = None;
                channel.locks.push(id);
            }
            None => {
                let channel = Channel {
                    locks: vec![id],
                    is_confirmed: false,
                    epoch: 0,
                    idle_until: None,
                };
                self.channels.insert(name.clone(), channel);
                self.transmits.push_back(Transmit::Subscribe(name));
            }
        }
        // With a subscription that was kept no confirmation follows: a message that came after the
        // last attempt was sent is a reason for another one.
        let seen = self.locks[id].wait.seen;
        if self.epoch_of(id).is_some_and(|epoch| seen != Some(epoch)) {
            self.locks[id].wait.has_reason = true;
            self.timers.set(Timer::Lock(id), Time::default());
        }
    }

    /// No request of the lock waits any more.
    pub(super) fn stop_listening(&mut self, now: Time, id: LockId) {
        let Some(lock) = self.locks.get_mut(id) else {
            return;
        };
        if !lock.wait.listens {
            return;
        }
        lock.wait.listens = false;
        let name = lock.keys.channel.clone();
        let Some(channel) = self.channels.get_mut(&name) else {
            return;
        };
        channel.locks.retain(|other| *other != id);
        if channel.locks.is_empty() {
            if self.closing.is_some() {
                self.channels.remove(&name);
                self.transmits.push_back(Transmit::Unsubscribe(name));
            } else {
                let until = now + IDLE;
                channel.idle_until = Some(until);
                if !self.timers.is_set(Timer::Channels) {
                    self.timers.set(Timer::Channels, until);
                }
            }
        }
    }

    /// A lock is removed. Its subscription is looked at with the next timeout, which is now.
    pub(super) fn forget_listener(&mut self, id: LockId) {
        if let Some(lock) = self.locks.get(id).filter(|lock| lock.wait.listens) {
            if let Some(channel) = self.channels.get_mut(&lock.keys.channel) {
                channel.locks.retain(|other| *other != id);
                self.timers.set(Timer::Channels, Time::default());
            }
        }
    }

    pub(super) fn end_idle_subscriptions(&mut self, now: Time) {
        let mut next: Option<Time> = None;
        let is_closing = self.closing.is_some();
        let transmits = &mut self.transmits;
        self.channels.retain(|name, channel| {
            if !channel.is_idle() {
                return true;
            }
            let until = *channel.idle_until.get_or_insert(now + IDLE);
            if until <= now || is_closing {
                transmits.push_back(Transmit::Unsubscribe(name.clone()));
                return false;
            }
            next = Some(next.map_or(until, |next| next.min(until)));
            true
        });
        if let Some(at) = next {
            self.timers.set(Timer::Channels, at);
        }
    }

    /// The messages so far on the lock's channel, while they are certain to arrive.
    pub(super) fn epoch_of(&self, id: LockId) -> Option<u64> {
        let channel = self.channels.get(&self.locks[id].keys.channel)?;
        channel.is_confirmed.then_some(channel.epoch)
    }

    /// Whether messages for the lock are certain to arrive.
    pub(super) fn is_confirmed(&self, id: LockId) -> bool {
        let channel = self.channels.get(&self.locks[id].keys.channel);
        self.locks[id].wait.listens && channel.is_some_and(|channel| channel.is_confirmed)
    }
}
