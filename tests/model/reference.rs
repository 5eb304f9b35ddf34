//! What a reentrant lease lock is: the server's state, and what each client believes it has.
//!
//! Nothing here knows the library. Times are ranges, since a caller knows only between which two
//! moments a script ran.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use redisson_lock::LostReason;

/// The lease of holds without one of their own; so long that no renewal falls into a case.
pub const WATCHDOG: Duration = Duration::from_secs(3600);

/// Between which two moments something happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub from: Instant,
    pub to: Instant,
}

impl Span {
    /// What follows that much later: `least` to `most`.
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

/// A lock, as the server has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub owner: usize,
    pub count: u64,
    pub expires: Span,
}

/// One hold of a possession: a guard stands for it, or it was forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hold {
    pub possession: usize,
    pub id: usize,
}

/// From a hold count of 0 until it is 0 again or the lock is lost, as a client records it.
#[derive(Debug)]
struct Possession {
    owner: usize,
    lock: usize,
    /// Holds in their order, and whether a guard stands for each.
    holds: Vec<(usize, bool)>,
    /// What was on the server before: holds that were handed over.
    base: u64,
    /// The leases of all holds that it ever had.
    leases: Vec<Duration>,
    lost: Option<LostReason>,
}

impl Possession {
    fn is_live(&self) -> bool {
        self.lost.is_none() && !self.holds.is_empty()
    }
}

/// How giving back by hand ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unlocked {
    Freed,
    NotHeld,
    Lost(LostReason),
    /// It was lost and nobody has a hold of it any more: whether that is still remembered is a
    /// matter of luck.
    NotHeldOrLost,
}

#[derive(Debug, Default)]
pub struct Model {
    pub locks: Vec<Option<Held>>,
    /// For each owner its client, and whether others may act under its id.
    pub owners: Vec<(usize, bool)>,
    possessions: Vec<Possession>,
    /// The latest possession of an owner and a lock.
    latest: HashMap<(usize, usize), usize>,
    /// Forgotten holds of earlier possessions that were lost, of which nobody has been told.
    owed: HashMap<(usize, usize), Vec<LostReason>>,
    /// Whose losses may have been told or not.
    pub vague: HashSet<(usize, usize)>,
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
        self.possessions[hold.possession].lost
    }

    /// The other holds of its possession: with a guard, and forgotten.
    pub fn siblings(&self, hold: Hold) -> (Vec<Hold>, usize) {
        let possession = &self.possessions[hold.possession];
        let others = possession.holds.iter().filter(|(id, _)| *id != hold.id);
        let (guarded, forgotten): (Vec<_>, Vec<_>) = others.partition(|(_, guarded)| *guarded);
        let with_id = |(id, _): &(usize, bool)| Hold {
            possession: hold.possession,
            id: *id,
        };
        (guarded.into_iter().map(with_id).collect(), forgotten.len())
    }

    /// Whether the server has the hold that the client believes in.
    pub fn is_stale(&self, hold: Hold) -> bool {
        let possession = &self.possessions[hold.possession];
        possession.lost.is_none() && self.count(possession.owner, possession.lock) == 0
    }

    /// Whether this owner ever had to do with this lock.
    pub fn is_untouched(&self, owner: usize, lock: usize) -> bool {
        !self
            .possessions
            .iter()
            .any(|possession| (possession.owner, possession.lock) == (owner, lock))
    }

    /// Takes a hold; `None` if somebody else has the lock.
    pub fn acquire(
        &mut self,
        owner: usize,
        lock: usize,
        lease: Option<Duration>,
        ran: Span,
    ) -> Option<Hold> {
        let lease = lease.unwrap_or(WATCHDOG);
        let live = self
            .latest
            .get(&(owner, lock))
            .copied()
            .filter(|at| self.possessions[*at].is_live());
        let expires = ran.plus(lease, lease);
        let (possession, base) = match &mut self.locks[lock] {
            Some(held) if held.owner == owner => {
                held.count += 1;
                held.expires = held.expires.max(expires);
                (live, held.count - 1)
            }
            held => {
                // The client learns that what it believed to have is gone.
                if let Some(live) = live {
                    self.possessions[live].lost = Some(LostReason::Gone);
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
        let possession = possession.unwrap_or_else(|| self.begin(owner, lock, base));
        let id = self.ids;
        self.ids += 1;
        self.possessions[possession].holds.push((id, true));
        self.possessions[possession].leases.push(lease);
        Some(Hold { possession, id })
    }

    fn begin(&mut self, owner: usize, lock: usize, base: u64) -> usize {
        // Forgotten holds that were lost are remembered until somebody asks.
        for older in self
            .possessions
            .iter_mut()
            .filter(|older| (older.owner, older.lock) == (owner, lock))
        {
            let before = older.holds.len();
            older.holds.retain(|(_, guarded)| *guarded);
            let untold = before - older.holds.len();
            self.owed
                .entry((owner, lock))
                .or_default()
                .extend(std::iter::repeat_n(older.lost, untold).flatten());
        }
        self.possessions.push(Possession {
            owner,
            lock,
            holds: vec![],
            base,
            leases: vec![],
            lost: None,
        });
        let begun = self.possessions.len() - 1;
        self.latest.insert((owner, lock), begun);
        begun
    }

    /// Gives a hold back.
    pub fn give_back(&mut self, hold: Hold, ran: Span) -> Result<(), LostReason> {
        let possession = &mut self.possessions[hold.possession];
        possession.holds.retain(|(id, _)| *id != hold.id);
        if let Some(reason) = possession.lost {
            return Err(reason);
        }
        let entry = (possession.owner, possession.lock);
        let leave = possession.base + possession.holds.len() as u64;
        let Some(held) = self.locks[entry.1]
            .as_mut()
            .filter(|held| held.owner == entry.0)
        else {
            possession.lost = Some(LostReason::Gone);
            return Err(LostReason::Gone);
        };
        if leave == 0 {
            self.locks[entry.1] = None;
        } else {
            held.count = leave;
            // Of the holds that stay, whichever they are; nothing is ever shortened.
            let least = possession.leases.iter().min().copied().unwrap_or(WATCHDOG);
            let most = possession
                .leases
                .iter()
                .max()
                .copied()
                .unwrap_or(WATCHDOG)
                .max(WATCHDOG);
            held.expires = held.expires.max(ran.plus(least.min(WATCHDOG), most));
        }
        if possession.holds.is_empty() {
            self.latest.remove(&entry);
        }
        Ok(())
    }

    /// Lets a hold live without its guard.
    pub fn forget(&mut self, hold: Hold) {
        let possession = &mut self.possessions[hold.possession];
        let is_latest =
            self.latest.get(&(possession.owner, possession.lock)) == Some(&hold.possession);
        match possession.holds.iter().position(|(id, _)| *id == hold.id) {
            Some(at) if is_latest => possession.holds[at].1 = false,
            Some(at) => {
                // It was lost when it was forgotten, and another possession has begun.
                possession.holds.remove(at);
                self.vague.insert((possession.owner, possession.lock));
            }
            None => {}
        }
    }

    /// Gives back a hold that no guard stands for; where there is none, tells of one that was lost.
    pub fn unlock(&mut self, owner: usize, lock: usize, ran: Span) -> Unlocked {
        let entry = (owner, lock);
        let owes = self.owed.get(&entry).is_some_and(|owed| !owed.is_empty());
        match self.unlock_latest(owner, lock, ran) {
            Unlocked::NotHeld | Unlocked::Lost(_) | Unlocked::NotHeldOrLost
                if self.vague.contains(&entry) =>
            {
                Unlocked::NotHeldOrLost
            }
            Unlocked::NotHeld => match self.owed.get_mut(&entry).and_then(Vec::pop) {
                Some(reason) => Unlocked::Lost(reason),
                None => Unlocked::NotHeld,
            },
            Unlocked::NotHeldOrLost if owes => {
                self.vague.insert(entry);
                Unlocked::NotHeldOrLost
            }
            unlocked => unlocked,
        }
    }

    fn unlock_latest(&mut self, owner: usize, lock: usize, ran: Span) -> Unlocked {
        let Some(&latest) = self.latest.get(&(owner, lock)) else {
            return self.unlock_unrecorded(owner, lock, ran);
        };
        let possession = &self.possessions[latest];
        if let Some((id, _)) = possession.holds.iter().rev().find(|(_, guarded)| !guarded) {
            let hold = Hold {
                possession: latest,
                id: *id,
            };
            return self
                .give_back(hold, ran)
                .map_or_else(Unlocked::Lost, |()| Unlocked::Freed);
        }
        let mut entry = self
            .possessions
            .iter()
            .filter(|other| (other.owner, other.lock) == (owner, lock));
        match possession.lost {
            _ if possession.base > 0 => self.unlock_unrecorded(owner, lock, ran),
            Some(reason) if entry.any(|other| !other.holds.is_empty()) => Unlocked::Lost(reason),
            Some(_) => Unlocked::NotHeldOrLost,
            None => Unlocked::NotHeld,
        }
    }

    fn unlock_unrecorded(&mut self, owner: usize, lock: usize, ran: Span) -> Unlocked {
        let live = self
            .latest
            .get(&(owner, lock))
            .copied()
            .filter(|at| self.possessions[*at].is_live());
        let recorded = live.map_or(0, |live| self.possessions[live].holds.len() as u64);
        if !self.owners[owner].1 || self.count(owner, lock) <= recorded {
            return Unlocked::NotHeld;
        }
        if let Some(live) = live {
            self.possessions[live].base -= 1;
        }
        if let Some(held) = &mut self.locks[lock] {
            held.count -= 1;
            held.expires = held.expires.max(ran.plus(WATCHDOG, WATCHDOG));
            if held.count == 0 {
                self.locks[lock] = None;
            }
        }
        Unlocked::Freed
    }

    /// Frees the lock whoever has it; the owners in that client hear of it.
    pub fn force_unlock(&mut self, client: usize, lock: usize) -> bool {
        for possession in self
            .possessions
            .iter_mut()
            .filter(|possession| possession.lock == lock)
        {
            if self.owners[possession.owner].0 == client && possession.is_live() {
                possession.lost = Some(LostReason::ForceUnlocked);
            }
        }
        self.locks[lock].take().is_some()
    }

    /// The server loses the key, and tells nobody.
    pub fn vanish(&mut self, lock: usize) {
        self.locks[lock] = None;
    }

    /// The lease of a possession has run out by its client's own clock.
    pub fn run_out(&mut self, hold: Hold) {
        let possession = &mut self.possessions[hold.possession];
        possession.lost = Some(LostReason::Expired);
        self.locks[possession.lock] = None;
    }

    /// Another process hands a hold over.
    pub fn plant(&mut self, owner: usize, lock: usize, count: u64, lease: Duration, ran: Span) {
        self.locks[lock] = Some(Held {
            owner,
            count,
            expires: ran.plus(lease, lease),
        });
    }

    /// Who had to do with which lock.
    pub fn entries(&self) -> HashSet<(usize, usize)> {
        self.possessions
            .iter()
            .map(|possession| (possession.owner, possession.lock))
            .collect()
    }
}
