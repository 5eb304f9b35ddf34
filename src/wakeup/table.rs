//! All lanes of a client, the channels that they need, and the places that waiters have in them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::mpsc;

use super::lane::{Lane, Outcome, Pace, Silence, Standing, Step, Waiter};
use super::sync::{Instant, Mutex};

/// All lanes of a client.
pub(crate) struct Wakeups {
    table: Mutex<Table>,
    /// Channels whose subscription may have to change.
    changes: mpsc::UnboundedSender<Bytes>,
}

#[derive(Default)]
struct Table {
    channels: HashMap<Bytes, Channel>,
    /// The channels that a look is to be taken at, so that each is asked for once.
    changed: HashSet<Bytes>,
    closed: bool,
}

#[derive(Default)]
struct Channel {
    /// Somebody has had to sleep.
    asked: bool,
    /// By lock name: names in and without braces share a channel.
    lanes: HashMap<Bytes, Arc<Lane>>,
}

/// What a waiter does next.
pub(crate) enum Turn {
    /// Try now.
    Try(InFlight),
    /// Sleep until notified, or until then.
    Sleep(Instant, Standing),
    /// The client is shut down.
    Closed,
}

impl Wakeups {
    pub(crate) fn new() -> (Arc<Self>, mpsc::UnboundedReceiver<Bytes>) {
        let (changes, changed) = mpsc::unbounded_channel();
        (
            Arc::new(Self {
                table: Mutex::new(Table::default()),
                changes,
            }),
            changed,
        )
    }

    /// Puts a waiter at the end of the lock's lane.
    pub(crate) fn join(self: &Arc<Self>, channel: &Bytes, name: &Bytes, thread: i64) -> Place {
        let mut table = self.table.lock();
        let closed = table.closed;
        let lanes = &mut table.channels.entry(channel.clone()).or_default().lanes;
        let lane = Arc::clone(
            lanes
                .entry(name.clone())
                .or_insert_with(|| Arc::new(Lane::new(closed))),
        );
        // Under the table's lock, so that nobody takes the lane out in between.
        let waiter = lane.join(thread);
        drop(table);
        let lane = LaneRef {
            wakeups: Arc::clone(self),
            channel: channel.clone(),
            name: name.clone(),
            lane,
        };
        Place { lane, waiter }
    }

    /// A message on a channel.
    pub(crate) fn message(&self, channel: &[u8]) {
        if let Some(channel) = self.table.lock().channels.get(channel) {
            channel.wake();
        }
    }

    /// Messages may have been missed.
    pub(crate) fn missed(&self) {
        self.table.lock().channels.values().for_each(Channel::wake);
    }

    /// The subscriptions are gone, and messages may have been missed.
    pub(crate) fn interrupted(&self) {
        let table = &mut *self.table.lock();
        for (name, channel) in &table.channels {
            self.change(&mut table.changed, name);
            channel.wake();
        }
    }

    /// Wakes the waiters of an owner that has just been granted the lock: they re-enter.
    pub(crate) fn owner_granted(&self, channel: &Bytes, name: &Bytes, thread: i64) {
        if let Some(lane) = self
            .table
            .lock()
            .channels
            .get(channel)
            .and_then(|channel| channel.lanes.get(name))
        {
            lane.wake_owner(thread);
        }
    }

    /// Ends all waiting.
    pub(crate) fn close(&self) {
        let mut table = self.table.lock();
        table.closed = true;
        table
            .channels
            .values()
            .flat_map(|channel| channel.lanes.values())
            .for_each(|lane| lane.close());
    }

    /// Takes the look at a channel that was asked for: whether it is to be subscribed.
    pub(crate) fn wants(&self, channel: &Bytes) -> bool {
        let mut table = self.table.lock();
        table.changed.remove(channel);
        table
            .channels
            .get(channel)
            .is_some_and(|channel| channel.asked)
    }

    /// The server has confirmed a subscription, which is a reason to try again: a message may have
    /// been missed before.
    ///
    /// Each time, for the connection may have been lost since an earlier confirmation was sent.
    pub(crate) fn confirmed(&self, channel: &Bytes) {
        self.message(channel);
    }

    /// Has a look taken at a channel's subscription (again).
    pub(crate) fn changed(&self, channel: &Bytes) {
        self.change(&mut self.table.lock().changed, channel);
    }

    /// How many channels are in use, for the test that none is left behind.
    #[cfg(test)]
    pub(crate) fn channels(&self) -> usize {
        self.table.lock().channels.len()
    }

    /// Asks for a channel's subscription, once.
    fn subscribe(&self, name: &Bytes) {
        let table = &mut *self.table.lock();
        if let Some(channel) = table.channels.get_mut(name) {
            if !std::mem::replace(&mut channel.asked, true) {
                self.change(&mut table.changed, name);
            }
        }
    }

    fn change(&self, changed: &mut HashSet<Bytes>, channel: &Bytes) {
        if changed.insert(channel.clone()) {
            let _ = self.changes.send(channel.clone());
        }
    }
}

impl Channel {
    fn wake(&self) {
        self.lanes.values().for_each(|lane| lane.wake());
    }
}

/// A lane, and how to take it out of the table when it is idle.
#[derive(Clone)]
struct LaneRef {
    wakeups: Arc<Wakeups>,
    channel: Bytes,
    name: Bytes,
    lane: Arc<Lane>,
}

impl LaneRef {
    fn remove_if_idle(&self) {
        let table = &mut *self.wakeups.table.lock();
        let Some(channel) = table.channels.get_mut(&self.channel) else {
            return;
        };
        // Somebody may have joined meanwhile, or another lane may be in its place.
        if channel
            .lanes
            .get(&self.name)
            .is_some_and(|lane| Arc::ptr_eq(lane, &self.lane) && lane.is_idle())
        {
            channel.lanes.remove(&self.name);
        }
        if channel.lanes.is_empty() {
            let asked = channel.asked;
            table.channels.remove(&self.channel);
            if asked {
                self.wakeups.change(&mut table.changed, &self.channel);
            }
        }
    }
}

/// A waiter's place in a lane. Dropping it leaves the lane and passes the baton on.
pub(crate) struct Place {
    lane: LaneRef,
    waiter: Arc<Waiter>,
}

impl Place {
    /// What to do now.
    ///
    /// Who is to sleep in front of the lane has the channel subscribed; the confirmation is a
    /// reason to try.
    pub(crate) fn turn(&self, pace: Pace) -> Turn {
        match self.lane.lane.step(&self.waiter, pace) {
            Step::Try(attempt) => {
                let lane = self.lane.clone();
                Turn::Try(InFlight {
                    lane,
                    attempt,
                    began: Instant::now(),
                    pace,
                    outcome: Outcome::Silent(None),
                })
            }
            Step::Sleep { until, place } => {
                if place == Standing::Front {
                    self.lane.wakeups.subscribe(&self.lane.channel);
                }
                Turn::Sleep(until, place)
            }
            Step::Closed => Turn::Closed,
        }
    }

    /// Resolves when [`Place::turn`] may answer differently.
    pub(crate) async fn notified(&self) {
        self.waiter.notified().await;
    }

    /// Has it notified as soon as the server has told the lane anything. `true` if that is new:
    /// then look again.
    pub(crate) fn wants_answer(&self) -> bool {
        self.lane.lane.wants_answer(&self.waiter)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.lane.lane.leave(&self.waiter) {
            self.lane.remove_if_idle();
        }
    }
}

/// The mark of an attempt in flight. It goes with the attempt, also where the waiter that began it
/// goes away; dropping it lets the next one try.
pub(crate) struct InFlight {
    lane: LaneRef,
    attempt: u64,
    began: Instant,
    pace: Pace,
    outcome: Outcome,
}

impl InFlight {
    /// Says that the attempt is about to ask the server (again).
    pub(crate) fn goes_on(&self) {
        self.lane.lane.goes_on(self.attempt, self.pace);
    }

    /// The time up to now in which none of the lane's attempts told anything.
    pub(crate) fn silence(&self) -> Option<Silence> {
        self.lane.lane.silence()
    }

    /// Takes in why the server told nothing of the lock.
    pub(crate) fn refused(&mut self, said: String) {
        self.outcome = Outcome::Silent(Some(said));
    }

    /// Ends it with what the server told.
    pub(crate) fn answered(mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.lane.lane.over(self.attempt, self.began, &self.outcome) {
            self.lane.remove_if_idle();
        }
    }
}
