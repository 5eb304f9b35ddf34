//! Timers: at most one for each thing that needs one.

use std::collections::{BTreeSet, HashMap};

use super::{Engine, EntryId, LockId, OpId, RequestId};
use crate::time::Time;

/// What a timer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Timer {
    /// The re-check of a lock that is waited for, or the end of an idle subscription.
    Lock(LockId),
    /// The limit of a request, or of an offer that its caller does not claim.
    Request(RequestId),
    /// The pause before an operation is repeated.
    Op(OpId),
    /// The pause before a query is repeated.
    Query(RequestId),
    /// What an owner left behind has expired.
    Entry(EntryId),
    /// The pause before a confirmation is repeated.
    Confirmation(LockId),
    /// Idle subscriptions.
    Channels,
    /// The limit of a shutdown.
    Closing,
}

#[derive(Debug, Default)]
pub(super) struct Timers {
    queue: BTreeSet<(Time, Timer)>,
    set: HashMap<Timer, Time>,
}

impl Timers {
    /// Sets the timer, in place of an earlier setting.
    pub(super) fn set(&mut self, timer: Timer, at: Time) {
        if let Some(old) = self.set.insert(timer, at) {
            if old == at {
                return;
            }
            self.queue.remove(&(old, timer));
        }
        self.queue.insert((at, timer));
    }

    pub(super) fn clear(&mut self, timer: Timer) {
        if let Some(at) = self.set.remove(&timer) {
            self.queue.remove(&(at, timer));
        }
    }

    pub(super) fn clear_all(&mut self) {
        self.queue.clear();
        self.set.clear();
    }

    pub(super) fn is_set(&self, timer: Timer) -> bool {
        self.set.contains_key(&timer)
    }

    /// When the timer is due.
    #[cfg(test)]
    pub(super) fn when(&self, timer: Timer) -> Option<Time> {
        self.set.get(&timer).copied()
    }

    pub(super) fn first(&self) -> Option<Time> {
        self.queue.first().map(|(at, _)| *at)
    }

    /// Takes out one that is due.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<Timer> {
        let (at, timer) = *self.queue.first()?;
        if at > now {
            return None;
        }
        self.queue.pop_first();
        self.set.remove(&timer);
        Some(timer)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

impl Engine {
    pub(super) fn handle_timer(&mut self, now: Time, timer: Timer) {
        match timer {
            Timer::Lock(lock) => self.advance_lock(now, lock),
            Timer::Request(request) => self.request_limit_reached(now, request),
            Timer::Op(op) => self.repeat_op(now, op),
            Timer::Query(request) => self.repeat_query(request),
            Timer::Entry(entry) => {
                if let Some(entry) = self.entries.get_mut(entry) {
                    entry.change_past(|past| past.left_behind = None);
                }
                self.remove_if_idle(entry);
            }
            Timer::Confirmation(lock) => self.confirmation_is_due(now, lock),
            Timer::Channels => self.end_idle_subscriptions(now),
            Timer::Closing => self.closing_limit_reached(),
        }
    }
}
