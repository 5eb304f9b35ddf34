//! Holds that were lost and that no guard stands for, until an unlock asks for them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::LostReason;
use crate::holds::EntryRef;
use crate::lease::Lease;

/// How many a client remembers, the latest. Of a task that has ended nobody will ask, and it cannot
/// be seen that it has.
const REMEMBERED: usize = 1_000;

/// The losses of one client, by age. Each keeps its entry, which knows it by its number.
#[derive(Default)]
pub(crate) struct Losses {
    table: Mutex<Table>,
}

/// The numbers of one entry's losses. Some may be detached by now.
pub(crate) type Numbers = Mutex<VecDeque<u64>>;

#[derive(Default)]
struct Table {
    losses: BTreeMap<u64, Loss>,
    next: u64,
}

/// A hold that was lost.
pub(crate) struct Loss {
    pub(crate) reason: LostReason,
    pub(crate) entry: EntryRef,
    pub(crate) lease: Arc<Lease>,
    pub(crate) id: u64,
}

impl Losses {
    /// Remembers one, and forgets the oldest if there are too many.
    pub(crate) fn add(&self, loss: Loss) {
        let entry = loss.entry.clone();
        let oldest = {
            let table = &mut *self.table.lock();
            let number = table.next;
            table.next += 1;
            table.losses.insert(number, loss);
            let mut numbers = entry.losses.lock();
            numbers.push_back(number);
            if numbers.len() > REMEMBERED {
                numbers.pop_front();
            }
            if table.losses.len() > REMEMBERED {
                table.losses.pop_first()
            } else {
                None
            }
        };
        // Outside the lock: the last reference to an entry takes another one.
        if let Some((_, oldest)) = oldest {
            oldest.lease.drop_hold(oldest.id);
        }
    }

    /// Takes the entry's latest.
    pub(crate) fn take(&self, numbers: &Numbers) -> Option<Loss> {
        loop {
            let number = numbers.lock().pop_back()?;
            let loss = self.table.lock().losses.remove(&number);
            if loss.is_some() {
                return loss;
            }
        }
    }

    /// Forgets all.
    pub(crate) fn clear(&self) {
        let losses = std::mem::take(&mut self.table.lock().losses);
        drop(losses);
    }
}
