//! The reference model of a reentrant lock with leases: the server's state and each client's
//! record.
//!
//! The model does not use the library. Times are ranges, since a caller knows only two moments
//! between which a script ran.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use redisson_lock::LostReason;

/// The watchdog timeout: so long that no case has a renewal.
pub const WATCHDOG: Duration = Duration::from_secs(3600);

/// Two moments between which an event happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub from: Instant,
    pub to: Instant,
}

impl Span {
    /// An event that follows this one by `least` to `most`.
    fn plus(self, least: Duration, most: Duration) -> Self {
        Self {
            from: self.from + least,
            to: self.to + most,
        }
    }

    fn max(self, other: Self) -> Self {
        Self {
            from: self.from.max(other.from),
            to: self.to.max(other.to),
        }
    }
}

/// A held lock in the server's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub owner: usize,
    pub count: u64,
    pub expires: Span,
}

/// One hold of a tenure: it has a guard, or is detached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hold {
    pub tenure: usize,
    pub id: usize,
}

/// A tenure in a client's record: from hold count 0 until it is 0 again or the lock is lost.
#[derive(Debug)]
struct Tenure {
    owner: usize,
    lock: usize,
    /// The holds in order of acquisition: id, and whether it has a guard.
    holds: Vec<(usize, bool)>,
    /// The hold count before the first acquisition: holds that were handed over.
    base: u64,
    /// What each of its holds is entitled to: a renewed lease (`None`), or one of its own that ends
    /// then.
    leases: HashMap<usize, Option<Span>>,
    lost: Option<LostReason>,
}

impl Tenure {
    fn is_live(&self) -> bool {
        self.lost.is_none() && !self.holds.is_empty()
    }
}

/// The result of `unlock` without a guard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unlocked {
    Freed,
    NotHeld,
    Lost(LostReason),
    /// The tenure was lost and has no holds any more: the client may remember the loss or not.
    NotHeldOrLost,
}

#[derive(Debug, Default)]
pub struct Model {
    pub locks: Vec<Option<Held>>,
    /// For each owner its client, and whether other processes may use its thread id.
    pub owners: Vec<(usize, bool)>,
    tenures: Vec<Tenure>,
    /// The latest tenure of an owner and a lock.
    latest: HashMap<(usize, usize), usize>,
    /// Lost detached holds of earlier tenures whose loss has not been reported.
    unreported: HashMap<(usize, usize), Vec<LostReason>>,
    /// Owners and locks whose losses may have been reported or not.
    pub uncertain: HashSet<(usize, usize)>,
    ids: usize,
}

impl Model {
    pub fn new(locks: usize, owners: &[(usize, bool)]) -> Self {
        Self {
            locks: vec![None; locks],
            owners: owners.to_vec(),
            ..Default::default()
        }
    }

    pub fn count(&self, owner: usize, lock: usize) -> u64 {
        self.locks[lock]
            .as_ref()
            .filter(|held| held.owner == owner)
            .map_or(0, |held| held.count)
    }

    pub fn lost(&self, hold: Hold) -> Option<LostReason> {
        self.tenures[hold.tenure].lost
    }

    /// The other holds of its tenure: those with a guard, and the number of detached ones.
    pub fn siblings(&self, hold: Hold) -> (Vec<Hold>, usize) {
        let tenure = &self.tenures[hold.tenure];
        let others = tenure.holds.iter().filter(|(id, _)| *id != hold.id);
        let (guarded, detached): (Vec<_>, Vec<_>) = others.partition(|(_, guarded)| *guarded);
        let with_id = |(id, _): &(usize, bool)| Hold {
            tenure: hold.tenure,
            id: *id,
        };
        (guarded.into_iter().map(with_id).collect(), detached.len())
    }

    /// Whether the client's record has a hold that the server does not have.
    pub fn is_stale(&self, hold: Hold) -> bool {
        let tenure = &self.tenures[hold.tenure];
        tenure.lost.is_none() && self.count(tenure.owner, tenure.lock) == 0
    }

    /// Whether this owner has never held this lock.
    pub fn is_untouched(&self, owner: usize, lock: usize) -> bool {
        !self
            .tenures
            .iter()
            .any(|tenure| (tenure.owner, tenure.lock) == (owner, lock))
    }

    /// Acquires a hold; `None` if another owner holds the lock.
    pub fn acquire(
        &mut self,
        owner: usize,
        lock: usize,
        lease: Option<Duration>,
        ran: Span,
    ) -> Option<Hold> {
        let own = lease.map(|lease| ran.plus(lease, lease));
        let lease = lease.unwrap_or(WATCHDOG);
        let live = self
            .latest
            .get(&(owner, lock))
            .copied()
            .filter(|at| self.tenures[*at].is_live());
        let expires = ran.plus(lease, lease);
        let (tenure, base) = match &mut self.locks[lock] {
            Some(held) if held.owner == owner => {
                held.count += 1;
                held.expires = held.expires.max(expires);
                (live, held.count - 1)
            }
            held => {
                // The reply shows the client that its recorded tenure is lost.
                if let Some(live) = live {
                    self.tenures[live].lost = Some(LostReason::Gone);
                }
                if held.is_some() {
                    return None;
                }
                *held = Some(Held {
                    owner,
                    count: 1,
                    expires,
                });
                (None, 0)
            }
        };
        let tenure = tenure.unwrap_or_else(|| self.begin(owner, lock, base));
        let id = self.ids;
        self.ids += 1;
        self.tenures[tenure].holds.push((id, true));
        self.tenures[tenure].leases.insert(id, own);
        Some(Hold { tenure, id })
    }

    fn begin(&mut self, owner: usize, lock: usize, base: u64) -> usize {
        // Lost detached holds stay recorded until `unlock` reports them.
        for older in self
            .tenures
            .iter_mut()
            .filter(|older| (older.owner, older.lock) == (owner, lock))
        {
            let before = older.holds.len();
            older.holds.retain(|(_, guarded)| *guarded);
            let lost = before - older.holds.len();
            self.unreported
                .entry((owner, lock))
                .or_default()
                .extend(std::iter::repeat_n(older.lost, lost).flatten());
        }
        self.tenures.push(Tenure {
            owner,
            lock,
            holds: vec![],
            base,
            leases: HashMap::new(),
            lost: None,
        });
        let begun = self.tenures.len() - 1;
        self.latest.insert((owner, lock), begun);
        begun
    }

    /// Releases a hold.
    pub fn release(&mut self, hold: Hold, ran: Span) -> Result<(), LostReason> {
        let tenure = &mut self.tenures[hold.tenure];
        tenure.holds.retain(|(id, _)| *id != hold.id);
        if let Some(reason) = tenure.lost {
            return Err(reason);
        }
        let entry = (tenure.owner, tenure.lock);
        let leave = tenure.base + tenure.holds.len() as u64;
        let Some(held) = self.locks[entry.1]
            .as_mut()
            .filter(|held| held.owner == entry.0)
        else {
            tenure.lost = Some(LostReason::Gone);
            return Err(LostReason::Gone);
        };
        if leave == 0 {
            self.locks[entry.1] = None;
        } else {
            held.count = leave;
            // The release sets the expiry to what the remaining holds are entitled to. Of holds
            // that were handed over nothing is known.
            let leases = tenure.holds.iter().map(|(id, _)| tenure.leases[id]);
            let entitled = leases.map(|own| own.unwrap_or(ran.plus(WATCHDOG, WATCHDOG)));
            match entitled.reduce(Span::max) {
                Some(entitled) if tenure.base == 0 => held.expires = entitled,
                _ => {}
            }
        }
        if tenure.holds.is_empty() {
            self.latest.remove(&entry);
        }
        Ok(())
    }

    /// Detaches a hold from its guard.
    pub fn detach(&mut self, hold: Hold) {
        let tenure = &mut self.tenures[hold.tenure];
        let is_latest = self.latest.get(&(tenure.owner, tenure.lock)) == Some(&hold.tenure);
        match tenure.holds.iter().position(|(id, _)| *id == hold.id) {
            Some(at) if is_latest => tenure.holds[at].1 = false,
            Some(at) => {
                // It was lost before it was detached, and another tenure has begun.
                tenure.holds.remove(at);
                self.uncertain.insert((tenure.owner, tenure.lock));
            }
            None => {}
        }
    }

    /// Releases a detached hold; if there is none, reports a lost one.
    pub fn unlock(&mut self, owner: usize, lock: usize, ran: Span) -> Unlocked {
        let entry = (owner, lock);
        let has_unreported = self
            .unreported
            .get(&entry)
            .is_some_and(|lost| !lost.is_empty());
        match self.unlock_latest(owner, lock, ran) {
            Unlocked::NotHeld | Unlocked::Lost(_) | Unlocked::NotHeldOrLost
                if self.uncertain.contains(&entry) =>
            {
                Unlocked::NotHeldOrLost
            }
            Unlocked::NotHeld => {
                let unreported = self.unreported.get_mut(&entry).and_then(Vec::pop);
                let lost = unreported.or_else(|| self.lost_guard(owner, lock));
                lost.map_or(Unlocked::NotHeld, Unlocked::Lost)
            }
            Unlocked::NotHeldOrLost if has_unreported => {
                self.uncertain.insert(entry);
                Unlocked::NotHeldOrLost
            }
            unlocked => unlocked,
        }
    }

    fn unlock_latest(&mut self, owner: usize, lock: usize, ran: Span) -> Unlocked {
        let Some(&latest) = self.latest.get(&(owner, lock)) else {
            return self.unlock_unrecorded(owner, lock);
        };
        let tenure = &self.tenures[latest];
        if let Some((id, _)) = tenure.holds.iter().rev().find(|(_, guarded)| !guarded) {
            let hold = Hold {
                tenure: latest,
                id: *id,
            };
            return self
                .release(hold, ran)
                .map_or_else(Unlocked::Lost, |()| Unlocked::Freed);
        }
        // The latest tenure that still has a guard.
        let guarded = self
            .tenures
            .iter()
            .rfind(|other| (other.owner, other.lock) == (owner, lock) && !other.holds.is_empty());
        let lost = match tenure.lost {
            None if tenure.base > 0 => return self.unlock_unrecorded(owner, lock),
            None => return Unlocked::NotHeld,
            Some(_) => guarded.and_then(|guarded| guarded.lost),
        };
        // Holds that were handed over since come first, then the lost detached holds of earlier
        // tenures, each of which is reported once, then the guard.
        if self.unlock_unrecorded(owner, lock) == Unlocked::Freed {
            return Unlocked::Freed;
        }
        let Some(lost) = lost else {
            return Unlocked::NotHeldOrLost;
        };
        let unreported = self.unreported.get_mut(&(owner, lock));
        Unlocked::Lost(unreported.and_then(Vec::pop).unwrap_or(lost))
    }

    /// The loss of an earlier tenure that still has a guard, while the owner has no later one.
    fn lost_guard(&self, owner: usize, lock: usize) -> Option<LostReason> {
        if self.latest.contains_key(&(owner, lock)) {
            return None;
        }
        let guarded = self.tenures.iter().rfind(|tenure| {
            (tenure.owner, tenure.lock) == (owner, lock) && !tenure.holds.is_empty()
        });
        guarded.and_then(|tenure| tenure.lost)
    }

    fn unlock_unrecorded(&mut self, owner: usize, lock: usize) -> Unlocked {
        let live = self
            .latest
            .get(&(owner, lock))
            .copied()
            .filter(|at| self.tenures[*at].is_live());
        let recorded = live.map_or(0, |live| self.tenures[live].holds.len() as u64);
        if !self.owners[owner].1 || self.count(owner, lock) <= recorded {
            return Unlocked::NotHeld;
        }
        if let Some(live) = live {
            self.tenures[live].base -= 1;
        }
        if let Some(held) = &mut self.locks[lock] {
            held.count -= 1;
            if held.count == 0 {
                self.locks[lock] = None;
            }
        }
        Unlocked::Freed
    }

    /// Frees the lock for any owner. Owners of that client are notified of the loss.
    pub fn force_unlock(&mut self, client: usize, lock: usize) -> bool {
        for tenure in self.tenures.iter_mut().filter(|tenure| tenure.lock == lock) {
            if self.owners[tenure.owner].0 == client && tenure.is_live() {
                tenure.lost = Some(LostReason::ForceUnlocked);
            }
        }
        self.locks[lock].take().is_some()
    }

    /// The server loses the key without a message.
    pub fn lose_key(&mut self, lock: usize) {
        self.locks[lock] = None;
    }

    /// The lease of a tenure expires by the clock of its client.
    pub fn expire(&mut self, hold: Hold) {
        let tenure = &mut self.tenures[hold.tenure];
        tenure.lost = Some(LostReason::Expired);
        self.locks[tenure.lock] = None;
    }

    /// Another process hands holds over to this owner.
    pub fn hand_over(&mut self, owner: usize, lock: usize, count: u64, lease: Duration, ran: Span) {
        self.locks[lock] = Some(Held {
            owner,
            count,
            expires: ran.plus(lease, lease),
        });
    }

    /// The owners and locks of all tenures.
    pub fn entries(&self) -> HashSet<(usize, usize)> {
        self.tenures
            .iter()
            .map(|tenure| (tenure.owner, tenure.lock))
            .collect()
    }
}
