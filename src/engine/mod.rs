//! All lock state of a client, as plain data with one owner.
//!
//! The engine is a state machine without I/O, tasks, a clock or randomness of its own: the time is
//! an argument, random numbers come from a seed, and what is to be done is drained by the driver
//! after each mutation. So a simulation can run whole clients under any order of events.
//!
//! An operation belongs to the engine, not to its caller. What a caller does (submit, cancel, drop
//! a guard) is an event, like a reply or a message.
//!
//! | input | methods |
//! |---|---|
//! | callers | [`acquire`](Engine::acquire), [`claim`](Engine::claim), [`resume`](Engine::resume), [`release`](Engine::release), [`drop_hold`](Engine::drop_hold), [`detach`](Engine::detach), [`unlock`](Engine::unlock), [`inspect`](Engine::inspect), [`count`](Engine::count), [`force_unlock`](Engine::force_unlock), [`cancel`](Engine::cancel), [`close`](Engine::close) |
//! | the link | [`handle_reply`](Engine::handle_reply), [`handle_message`](Engine::handle_message), [`handle_subscription`](Engine::handle_subscription), [`handle_interruption`](Engine::handle_interruption), [`handle_missed_messages`](Engine::handle_missed_messages) |
//! | the clock | [`handle_timeout`](Engine::handle_timeout) |
//!
//! | output, drained after each input | meaning |
//! |---|---|
//! | [`poll_transmit`](Engine::poll_transmit) | a call to send, a subscription to make or to end |
//! | [`poll_event`](Engine::poll_event) | a request is completed, a lock is lost, something is to be logged |
//! | [`poll_timeout`](Engine::poll_timeout) | when `handle_timeout` is due |
//!
//! The parts: a [`lock`] has a wait queue and one attempt in flight; an [`entry`] is a lock and an
//! owner, with a queue of operations of which one runs; a [`tenure`] is one unbroken possession
//! with its holds. A [`requests`] entry is what a caller waits for.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rand::SeedableRng;
use rand::rngs::StdRng;
use slotmap::{SlotMap, new_key_type};

use crate::config::{DeadlockDetection, LeaseTime};
use crate::keys::Keys;
use crate::owner::{ClientId, Owner};
use crate::stats::Stats;
use crate::time::Time;
use crate::wire::{Call, Failure, Reply};

mod attempt;
mod backoff;
mod channels;
mod entry;
mod errors;
mod force_unlock;
mod lock;
mod notice;
mod passing;
mod queries;
mod release;
mod renewal;
mod requests;
mod shutdown;
#[cfg(test)]
mod sim;
mod tenure;
mod timers;

use channels::Channel;
use entry::{Entry, Op};
use lock::Lock;
use passing::Confirmation;
use renewal::RenewalBatch;
use requests::Request;
use shutdown::Closing;
use tenure::{Hold, Tenure};
use timers::Timers;

pub(crate) use channels::Subscription;
pub(crate) use notice::Notice;
pub(crate) use requests::{AcquireRequest, Grant, Outcome, Wait};

new_key_type! {
    /// What a caller waits for.
    pub(crate) struct RequestId;
    /// A call in flight.
    pub(crate) struct CallId;
    /// One hold.
    pub(crate) struct HoldId;
    pub(super) struct LockId;
    pub(super) struct EntryId;
    pub(super) struct OpId;
    pub(super) struct TenureId;
}

/// The settings that the engine needs.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) client_id: ClientId,
    /// Host and port of the server, for errors.
    pub(crate) address: Arc<str>,
    pub(crate) watchdog: LeaseTime,
    /// The re-check interval that was set; `None` for the default.
    pub(crate) recheck: Option<Duration>,
    pub(crate) retry_timeout: Duration,
    pub(crate) command_timeout: Duration,
    pub(crate) renewal_batch: usize,
    pub(crate) detection: DeadlockDetection,
    /// For how long a lock is passed on before it is released on the server.
    pub(crate) passing_time: Duration,
}

impl Settings {
    /// How long a caller waits for the result of a release: the retry timeout, but at least the
    /// time that one reply may take.
    fn patience(&self) -> Duration {
        self.retry_timeout.max(self.command_timeout)
    }
}

/// What the driver sends.
#[derive(Debug)]
pub(crate) enum Transmit {
    /// Send this call, and pass its outcome to [`Engine::handle_reply`].
    Call(CallId, Call),
    /// Subscribe to the channel, and report to [`Engine::handle_subscription`].
    Subscribe(Bytes),
    /// End the subscription.
    Unsubscribe(Bytes),
    /// The server is not the master any more: connect anew.
    Reconnect,
}

/// What the driver reports.
#[derive(Debug)]
pub(crate) enum Event {
    /// The request is completed.
    Completed(RequestId, Outcome),
    /// The lock of a tenure is lost: wake those that wait for it.
    Lost(Arc<crate::lease_cell::LeaseCell>),
    /// Something is to be logged.
    Notice(Notice),
}

/// What a call was made for.
#[derive(Debug)]
enum Purpose {
    Op(OpId),
    Query(RequestId),
    Renewal(RenewalBatch),
    Confirmation(Confirmation),
    /// Whether the task of the request holds the lock itself, by that tenure.
    Deadlock(RequestId, TenureId),
}

/// See the [module](self).
pub(crate) struct Engine {
    settings: Settings,
    rng: StdRng,
    closing: Option<Closing>,
    locks: SlotMap<LockId, Lock>,
    lock_ids: HashMap<Keys, LockId>,
    entries: SlotMap<EntryId, Entry>,
    entry_ids: HashMap<(LockId, i64), EntryId>,
    ops: SlotMap<OpId, Op>,
    tenures: SlotMap<TenureId, Tenure>,
    holds: SlotMap<HoldId, Hold>,
    requests: SlotMap<RequestId, Request>,
    calls: SlotMap<CallId, Purpose>,
    /// Ordered, so that the same inputs have the same outputs.
    channels: BTreeMap<Bytes, Channel>,
    timers: Timers,
    /// When each tenure is looked at: for its renewal, at the end of its proof, for cleaning up.
    schedule: BTreeSet<(Time, TenureId)>,
    /// Lost detached holds, the oldest first.
    losses: VecDeque<(EntryId, HoldId)>,
    /// Whether the last renewal got no reply.
    outage: bool,
    transmits: VecDeque<Transmit>,
    events: VecDeque<Event>,
    stats: Stats,
    next_place: u64,
}

impl Engine {
    pub(crate) fn new(settings: Settings, seed: u64) -> Self {
        Self {
            settings,
            rng: StdRng::seed_from_u64(seed),
            closing: None,
            locks: SlotMap::with_key(),
            lock_ids: HashMap::new(),
            entries: SlotMap::with_key(),
            entry_ids: HashMap::new(),
            ops: SlotMap::with_key(),
            tenures: SlotMap::with_key(),
            holds: SlotMap::with_key(),
            requests: SlotMap::with_key(),
            calls: SlotMap::with_key(),
            channels: BTreeMap::new(),
            timers: Timers::default(),
            schedule: BTreeSet::new(),
            losses: VecDeque::new(),
            outage: false,
            transmits: VecDeque::new(),
            events: VecDeque::new(),
            stats: Stats::default(),
            next_place: 0,
        }
    }

    /// The next thing to send.
    pub(crate) fn poll_transmit(&mut self) -> Option<Transmit> {
        self.transmits.pop_front()
    }

    /// The next thing to report.
    pub(crate) fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// When [`handle_timeout`](Self::handle_timeout) is due.
    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        let tenure = self.schedule.first().map(|(at, _)| *at);
        match (self.timers.first(), tenure) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        }
    }

    /// Does what is due.
    pub(crate) fn handle_timeout(&mut self, now: Time) {
        self.look_at_tenures(now);
        while let Some(timer) = self.timers.pop_due(now) {
            self.handle_timer(now, timer);
        }
    }

    /// The outcome of a call.
    pub(crate) fn handle_reply(
        &mut self,
        now: Time,
        call: CallId,
        outcome: Result<Reply, Failure>,
    ) {
        match self.calls.remove(call) {
            Some(Purpose::Op(op)) => self.op_replied(now, op, outcome),
            Some(Purpose::Query(request)) => self.query_replied(now, request, outcome),
            Some(Purpose::Renewal(batch)) => self.renewal_replied(now, batch, outcome),
            Some(Purpose::Confirmation(confirmation)) => {
                self.confirmation_replied(now, confirmation, outcome);
            }
            Some(Purpose::Deadlock(request, tenure)) => {
                self.deadlock_replied(now, request, tenure, outcome);
            }
            None => {}
        }
    }

    /// A call was not sent before that moment: it waited, for others or for a connection. What it
    /// acquires or renews is proved from then on.
    pub(crate) fn handle_sending(&mut self, call: CallId, sent: Time) {
        match self.calls.get_mut(call) {
            Some(Purpose::Op(op)) => {
                if let Some(op) = self.ops.get_mut(*op) {
                    op.sent = op.sent.max(sent);
                }
            }
            Some(Purpose::Renewal(batch)) => batch.sent = batch.sent.max(sent),
            Some(Purpose::Confirmation(call)) => call.sent = call.sent.max(sent),
            Some(Purpose::Query(_) | Purpose::Deadlock(..)) | None => {}
        }
    }

    /// The counters.
    pub(crate) fn stats(&self) -> Stats {
        self.stats
    }

    fn send(&mut self, purpose: Purpose, call: Call) {
        let id = self.calls.insert(purpose);
        self.transmits.push_back(Transmit::Call(id, call));
    }

    fn notice(&mut self, notice: Notice) {
        self.events.push_back(Event::Notice(notice));
    }

    /// Takes in what the server refused: one that is no master any more is left.
    fn note_failure(&mut self, failure: &Failure) {
        if let Failure::Server(error) = failure {
            self.note_refusal(error);
        }
    }

    fn note_refusal(&mut self, error: &crate::error::ServerError) {
        use crate::error::ServerErrorKind as Refusal;
        if matches!(error.kind(), Refusal::ReadOnly | Refusal::MasterDown) {
            self.transmits.push_back(Transmit::Reconnect);
        }
    }

    /// The lock of that name, made if need be.
    fn lock_id(&mut self, keys: &Keys) -> LockId {
        if let Some(id) = self.lock_ids.get(keys) {
            return *id;
        }
        let id = self.locks.insert(Lock::new(keys.clone()));
        self.lock_ids.insert(keys.clone(), id);
        id
    }

    /// The entry of a lock and an owner, made if need be.
    fn entry_id(&mut self, keys: &Keys, owner: Owner) -> EntryId {
        let lock = self.lock_id(keys);
        if let Some(id) = self.entry_ids.get(&(lock, owner.thread_id())) {
            return *id;
        }
        let id = self.entries.insert(Entry::new(lock, owner));
        self.entry_ids.insert((lock, owner.thread_id()), id);
        self.locks[lock].entries += 1;
        id
    }

    /// The entry of a lock and an owner, if it is in use.
    fn entry_in_use(&self, keys: &Keys, owner: Owner) -> Option<EntryId> {
        let lock = self.lock_ids.get(keys)?;
        self.entry_ids.get(&(*lock, owner.thread_id())).copied()
    }

    /// Removes an entry, and then its lock, if nothing needs it any more.
    fn remove_if_idle(&mut self, id: EntryId) {
        let Some(entry) = self.entries.get(id) else {
            return;
        };
        if !entry.is_idle() {
            return;
        }
        let (lock, thread) = (entry.lock, entry.owner.thread_id());
        self.timers.clear(timers::Timer::Entry(id));
        self.entries.remove(id);
        self.entry_ids.remove(&(lock, thread));
        self.locks[lock].entries -= 1;
        self.remove_lock_if_idle(lock);
    }

    /// Whether nothing is left: for tests and the simulation.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.locks.is_empty()
            && self.entries.is_empty()
            && self.ops.is_empty()
            && self.tenures.is_empty()
            && self.holds.is_empty()
            && self.requests.is_empty()
            && self.calls.is_empty()
            && self.channels.is_empty()
            && self.schedule.is_empty()
            && self.losses.is_empty()
    }
}
