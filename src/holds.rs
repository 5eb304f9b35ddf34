//! The table of what this client holds, keyed by lock entry, and the schedule of its upkeep.

use std::collections::{BTreeMap, HashMap};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::error::LostReason;
use crate::lease::Lease;
use crate::locks::{Ident, Kind};
use crate::losses::{Loss, Losses, Numbers};
use crate::stats::{Counters, add};
use crate::turn::{InHand, Turns};

/// A lock and an owner: what the renewal table is keyed by.
type EntryKey = (Bytes, i64);

/// One owner's dealings with one lock.
pub(crate) struct Entry {
    pub(crate) ident: Arc<Ident>,
    pub(crate) kind: &'static dyn Kind,
    pub(crate) turns: Arc<Turns>,
    lease: Mutex<Option<Arc<Lease>>>,
    /// Forgotten holds that were lost, of which nobody has been told.
    pub(crate) losses: Numbers,
}

impl Entry {
    /// The possession that is alive and held.
    pub(crate) fn live(&self) -> Option<Arc<Lease>> {
        self.lease
            .lock()
            .clone()
            .filter(|lease| lease.live_count().is_some())
    }

    /// The latest possession, whatever became of it.
    pub(crate) fn latest(&self) -> Option<Arc<Lease>> {
        self.lease.lock().clone()
    }

    /// Lets go of what keeps it: nobody will ask any more.
    fn let_go(&self) {
        let latest = self.latest();
        latest.iter().for_each(|lease| lease.let_go());
        let kept: Vec<_> = latest
            .into_iter()
            .flat_map(|lease| lease.take_detached())
            .collect();
        drop(kept);
    }
}

/// All entries that are in use, and which leases need a look when.
pub(crate) struct Holds {
    table: Mutex<Table>,
    schedule: Mutex<Schedule>,
    in_hand: Arc<InHand>,
    pub(crate) losses: Losses,
    /// Signals that something is due earlier than the scheduler expects.
    pub(crate) earlier: Notify,
    ids: AtomicU64,
    counters: Arc<Counters>,
}

#[derive(Default)]
struct Table {
    entries: HashMap<EntryKey, Arc<Entry>>,
    /// The leases of each lock that is held, for questions about a lock rather than an entry.
    held: HashMap<Bytes, Vec<Arc<Lease>>>,
}

#[derive(Default)]
struct Schedule {
    queue: BTreeMap<(Instant, u64), Arc<Lease>>,
    /// When the scheduler looks next; `None` while it sleeps without a timer.
    next_look: Option<Instant>,
}

impl Holds {
    pub(crate) fn new(in_hand: Arc<InHand>, counters: Arc<Counters>) -> Arc<Self> {
        Arc::new(Self {
            in_hand,
            counters,
            losses: Losses::default(),
            table: Mutex::default(),
            schedule: Mutex::default(),
            earlier: Notify::new(),
            ids: AtomicU64::new(0),
        })
    }

    /// A number for a hold or a place in the schedule.
    pub(crate) fn fresh_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    /// The entry, made if need be.
    pub(crate) fn entry(self: &Arc<Self>, ident: &Arc<Ident>, kind: &'static dyn Kind) -> EntryRef {
        let key = (ident.keys.name.clone(), ident.owner.thread_id());
        let entry = Arc::clone(self.table.lock().entries.entry(key).or_insert_with(|| {
            Arc::new(Entry {
                ident: Arc::clone(ident),
                kind,
                turns: Turns::new(&self.in_hand),
                lease: Mutex::default(),
                losses: Mutex::default(),
            })
        }));
        EntryRef {
            entry: Some(entry),
            holds: Arc::clone(self),
        }
    }

    /// The entry of a lock and an owner, if it is in use.
    pub(crate) fn entry_in_use(self: &Arc<Self>, name: &Bytes, thread: i64) -> Option<EntryRef> {
        let entry = self
            .table
            .lock()
            .entries
            .get(&(name.clone(), thread))
            .cloned()?;
        Some(EntryRef {
            entry: Some(entry),
            holds: Arc::clone(self),
        })
    }

    /// Enters a new possession.
    pub(crate) fn insert(&self, lease: &Arc<Lease>) {
        add(&self.counters.locks_held);
        self.table
            .lock()
            .held
            .entry(lease.ident.keys.name.clone())
            .or_default()
            .push(Arc::clone(lease));
    }

    /// Takes out a possession that has ended or is lost, so that nothing renews it any more. Tells
    /// whether it was in.
    pub(crate) fn remove(&self, lease: &Arc<Lease>) -> bool {
        let mut removed = None;
        {
            let mut table = self.table.lock();
            if let Some(leases) = table.held.get_mut(&lease.ident.keys.name) {
                if let Some(at) = leases.iter().position(|other| Arc::ptr_eq(other, lease)) {
                    removed = Some(leases.swap_remove(at));
                }
                if leases.is_empty() {
                    table.held.remove(&lease.ident.keys.name);
                }
            }
        }
        let unscheduled = {
            let mut schedule = self.schedule.lock();
            let place = lease.place.lock().take();
            place.and_then(|place| schedule.queue.remove(&place))
        };
        drop(unscheduled);
        if removed.is_some() {
            self.counters.locks_held.fetch_sub(1, Ordering::Relaxed);
        }
        removed.is_some()
    }

    /// Remembers the detached holds of a tenure that is lost, for the unlocks that will ask.
    pub(crate) fn lost(&self, lease: &Arc<Lease>, reason: LostReason) {
        for (id, entry) in lease.take_detached() {
            self.losses.add(Loss {
                reason,
                entry,
                lease: Arc::clone(lease),
                id,
            });
        }
    }

    /// The possessions of a lock by any owner of this client.
    pub(crate) fn leases_of(&self, name: &Bytes) -> Vec<Arc<Lease>> {
        self.table
            .lock()
            .held
            .get(name)
            .cloned()
            .unwrap_or_default()
    }

    /// All possessions.
    pub(crate) fn leases(&self) -> Vec<Arc<Lease>> {
        self.table.lock().held.values().flatten().cloned().collect()
    }

    /// Lets go of everything: the client is gone.
    pub(crate) fn clear(&self) {
        let entries: Vec<_> = self.table.lock().entries.values().cloned().collect();
        // A detached hold and its entry keep each other.
        entries.iter().for_each(|entry| entry.let_go());
        self.losses.clear();
    }

    /// Sets when the scheduler looks at a lease.
    pub(crate) fn schedule(&self, lease: &Arc<Lease>, at: Instant) {
        let place = (at, self.fresh_id());
        let mut schedule = self.schedule.lock();
        if let Some(old) = lease.place.lock().replace(place) {
            schedule.queue.remove(&old);
        }
        schedule.queue.insert(place, Arc::clone(lease));
        if schedule.next_look.is_none_or(|look| at < look) {
            // Once is enough: the scheduler will set its own next look.
            schedule.next_look = Some(at);
            drop(schedule);
            self.earlier.notify_one();
        }
    }

    /// Takes out the leases that are due by then.
    pub(crate) fn take_due(&self, by: Instant) -> Vec<Arc<Lease>> {
        let mut schedule = self.schedule.lock();
        let later = schedule.queue.split_off(&(by, u64::MAX));
        let due = std::mem::replace(&mut schedule.queue, later);
        due.into_values()
            .inspect(|lease| *lease.place.lock() = None)
            .collect()
    }

    /// When the scheduler has to look next.
    pub(crate) fn next_look(&self) -> Option<Instant> {
        let mut schedule = self.schedule.lock();
        let earliest = schedule.queue.first_key_value().map(|((at, _), _)| *at);
        // With nothing to look at an old look stays: locks that come and go do not wake the
        // scheduler each time.
        schedule.next_look =
            earliest.or_else(|| schedule.next_look.filter(|look| *look > Instant::now()));
        schedule.next_look
    }
}

/// A reference that keeps an entry in the table; the last one takes it out.
pub(crate) struct EntryRef {
    /// `None` only while it is being dropped.
    entry: Option<Arc<Entry>>,
    holds: Arc<Holds>,
}

impl EntryRef {
    /// Sets the possession that counts from now on.
    pub(crate) fn set_lease(&self, lease: Option<Arc<Lease>>) {
        // The old one is dropped outside the lock.
        let old = std::mem::replace(&mut *self.lease.lock(), lease);
        if let Some(old) = &old {
            old.let_go();
            if let Some(reason) = old.lost() {
                self.holds.lost(old, reason);
            }
        }
    }
}

impl Clone for EntryRef {
    fn clone(&self) -> Self {
        Self {
            entry: self.entry.clone(),
            holds: Arc::clone(&self.holds),
        }
    }
}

impl Deref for EntryRef {
    type Target = Arc<Entry>;

    fn deref(&self) -> &Arc<Entry> {
        match &self.entry {
            Some(entry) => entry,
            None => {
                unreachable!("an entry is taken out of its reference only while that is dropped")
            }
        }
    }
}

impl Drop for EntryRef {
    fn drop(&mut self) {
        let Some(entry) = self.entry.take() else {
            return;
        };
        let key = (entry.ident.keys.name.clone(), entry.ident.owner.thread_id());
        let removed = {
            let mut table = self.holds.table.lock();
            // Given up under the table's lock, so that of two last references one sees that it is
            // the last.
            drop(entry);
            match table.entries.get(&key) {
                Some(only) if Arc::strong_count(only) == 1 => table.entries.remove(&key),
                _ => None,
            }
        };
        drop(removed);
    }
}
