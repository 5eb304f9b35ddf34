//! The turns that one owner's operations on one lock take, and the operations that depend on their
//! callers.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::FutureExt;
use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;
use tokio::time::timeout;

/// For how long an operation waits for its turn before it has those ahead of it taken over.
const STANDS_STILL: Duration = Duration::from_millis(100);

/// Each script names the count that it expects, so the next may only be sent when the outcome of
/// the one before is known.
pub(crate) struct Turns {
    line: Arc<tokio::sync::Mutex<()>>,
    in_hand: Arc<InHand>,
    /// What the server last said to the release whose turn it is, if it refused it.
    pub(crate) refusal: Mutex<Option<String>>,
}

/// Whoever has it is the only one that asks the server.
pub(crate) type Turn = OwnedMutexGuard<()>;

impl Turns {
    pub(crate) fn new(in_hand: &Arc<InHand>) -> Arc<Self> {
        Arc::new(Self {
            line: Arc::default(),
            in_hand: Arc::clone(in_hand),
            refusal: Mutex::default(),
        })
    }

    /// Stands in line from the first poll on.
    pub(crate) fn line_up(&self) -> impl Future<Output = Turn> + Send + use<> {
        Arc::clone(&self.line).lock_owned()
    }

    /// Stands in line, and sees to it that the line moves.
    pub(crate) async fn take(&self) -> Turn {
        self.insist(self.line_up()).await
    }

    /// Waits in the line, and sees to it that it moves: a caller that has stopped to poll may have
    /// its turn.
    pub(crate) async fn insist(&self, turn: impl Future<Output = Turn>) -> Turn {
        let mut turn = pin!(turn);
        if let Some(turn) = turn.as_mut().now_or_never() {
            return turn;
        }
        let mut patience = STANDS_STILL;
        loop {
            if let Ok(turn) = timeout(patience, &mut turn).await {
                return turn;
            }
            // Who was being polled may have stopped since, but a server out of reach is no reason
            // to look all the time.
            patience *= 2;
            self.in_hand.take_over_of(self.number());
        }
    }

    /// Enters an operation that its caller drives.
    pub(crate) fn enter(self: &Arc<Self>, operation: Weak<dyn TakeOver>) -> Ticket {
        let key = self.in_hand.enter(self.number(), operation);
        Ticket {
            key,
            turns: Arc::clone(self),
        }
    }

    /// Tells it from others.
    fn number(&self) -> usize {
        Arc::as_ptr(&self.line) as usize
    }
}

/// An operation that can go on without its caller.
pub(crate) trait TakeOver: Send + Sync {
    /// Has the background drive it, unless it is being polled right now.
    fn take_over(self: Arc<Self>);
}

/// The operations of one client that go on only as long as their callers poll them.
#[derive(Default)]
pub(crate) struct InHand {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// By line, then by age.
    operations: BTreeMap<Key, Weak<dyn TakeOver>>,
    next: u64,
    /// What was entered before has been there for a whole round.
    round: u64,
}

type Key = (usize, u64);

impl InHand {
    /// Takes over what has been in its caller's hands since before the last call of this.
    pub(crate) fn take_over_old(&self) {
        let old: Vec<_> = {
            let table = &mut *self.table.lock();
            let before = std::mem::replace(&mut table.round, table.next);
            let old = table
                .operations
                .iter()
                .filter(|((_, age), _)| *age < before);
            old.filter_map(|(_, operation)| operation.upgrade())
                .collect()
        };
        old.into_iter().for_each(TakeOver::take_over);
    }

    /// Takes over everything.
    pub(crate) fn take_over_all(&self) {
        let all: Vec<_> = self
            .table
            .lock()
            .operations
            .values()
            .filter_map(Weak::upgrade)
            .collect();
        all.into_iter().for_each(TakeOver::take_over);
    }

    fn take_over_of(&self, line: usize) {
        let all: Vec<_> = {
            let table = self.table.lock();
            let all = table.operations.range((line, 0)..=(line, u64::MAX));
            all.filter_map(|(_, operation)| operation.upgrade())
                .collect()
        };
        all.into_iter().for_each(TakeOver::take_over);
    }

    fn enter(&self, line: usize, operation: Weak<dyn TakeOver>) -> Key {
        let mut table = self.table.lock();
        let key = (line, table.next);
        table.next += 1;
        table.operations.insert(key, operation);
        key
    }
}

/// Keeps an operation among those in callers' hands.
pub(crate) struct Ticket {
    key: Key,
    turns: Arc<Turns>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let removed = self.turns.in_hand.table.lock().operations.remove(&self.key);
        drop(removed);
    }
}
