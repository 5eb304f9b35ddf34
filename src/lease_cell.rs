//! What guards read without asking the engine: until when a tenure is proved, and how it was lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;

use crate::error::LostReason;
use crate::time::Time;

/// The state that all guards of one tenure share.
///
/// One word holds it: the moment at which the proof ends, or, with the highest bit set, the reason
/// of the loss. A loss is final, and the first reader of the clock decides: one that finds the
/// proof over marks the loss, and a renewal that is confirmed later does not take it back.
#[derive(Debug)]
pub(crate) struct LeaseCell {
    word: AtomicU64,
    waiters: Mutex<Waiters>,
}

#[derive(Debug, Default)]
struct Waiters {
    wakers: Vec<(u64, Waker)>,
    next: u64,
}

const LOST: u64 = 1 << 63;

const REASONS: [LostReason; 5] = [
    LostReason::Expired,
    LostReason::Gone,
    LostReason::ForceUnlocked,
    LostReason::Shutdown,
    LostReason::ClientFailed,
];

fn lost_word(reason: LostReason) -> u64 {
    let index = REASONS.iter().position(|other| *other == reason);
    LOST | index.unwrap_or_default() as u64
}

fn reason_of(word: u64) -> Option<LostReason> {
    (word & LOST != 0).then(|| REASONS[(word & !LOST) as usize % REASONS.len()])
}

impl LeaseCell {
    pub(crate) fn new(proved_until: Time) -> Self {
        Self {
            word: AtomicU64::new(proved_until.nanos()),
            waiters: Mutex::default(),
        }
    }

    /// Whether the tenure is lost at this moment, and how.
    pub(crate) fn lost(&self, now: Time) -> Option<LostReason> {
        let word = self.word.load(Ordering::Acquire);
        if word & LOST == 0 && now.nanos() >= word {
            // A renewal may extend it at the same moment: the first change of the word decides.
            return reason_of(self.update(|until| {
                if now.nanos() >= until {
                    lost_word(LostReason::Expired)
                } else {
                    until
                }
            }));
        }
        reason_of(word)
    }

    /// Until when it is proved; `None` if it is lost.
    pub(crate) fn proved_until(&self) -> Option<Time> {
        let word = self.word.load(Ordering::Acquire);
        (word & LOST == 0).then(|| Time::from_nanos(word))
    }

    /// For how much longer it is proved; zero if it is lost.
    pub(crate) fn remaining(&self, now: Time) -> Duration {
        match (self.lost(now), self.proved_until()) {
            (None, Some(until)) => until.since(now),
            _ => Duration::ZERO,
        }
    }

    /// Takes in that it is proved until then, unless it is lost.
    pub(crate) fn extend(&self, until: Time) {
        self.update(|current| current.max(until.nanos()));
    }

    /// Takes in that it is not proved for longer than that.
    pub(crate) fn lower(&self, until: Time) {
        self.update(|current| current.min(until.nanos()));
    }

    /// Marks it lost. The first reason stays and is returned.
    pub(crate) fn lose(&self, reason: LostReason) -> LostReason {
        reason_of(self.update(|_| lost_word(reason))).unwrap_or(reason)
    }

    /// Changes the word unless it says that the tenure is lost; returns what it is then.
    fn update(&self, change: impl Fn(u64) -> u64) -> u64 {
        let mut word = self.word.load(Ordering::Acquire);
        while word & LOST == 0 {
            let new = change(word);
            match self
                .word
                .compare_exchange_weak(word, new, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return new,
                Err(current) => word = current,
            }
        }
        word
    }

    /// Wakes everything that waits for the loss.
    pub(crate) fn wake(&self) {
        let wakers = std::mem::take(&mut self.waiters.lock().wakers);
        for (_, waker) in wakers {
            waker.wake();
        }
    }
}

/// One hold of a tenure, as its guard and its `lost()` futures see it.
#[derive(Debug)]
pub(crate) struct HoldCell {
    pub(crate) lease: Arc<LeaseCell>,
    /// Set when the release of this hold begins: what happens to the tenure later does not concern
    /// it.
    released: AtomicBool,
}

impl HoldCell {
    pub(crate) fn new(lease: Arc<LeaseCell>) -> Arc<Self> {
        Arc::new(Self {
            lease,
            released: AtomicBool::new(false),
        })
    }

    pub(crate) fn release(&self) {
        self.released.store(true, Ordering::Release);
    }

    /// Whether the lock is lost while the hold is there.
    pub(crate) fn lost(&self, now: Time) -> Option<LostReason> {
        if self.released.load(Ordering::Acquire) {
            return None;
        }
        self.lease.lost(now)
    }
}

/// A place among those that wait for the loss of a hold.
#[derive(Debug)]
pub(crate) struct LossWaiter {
    cell: Arc<HoldCell>,
    id: Option<u64>,
}

impl LossWaiter {
    pub(crate) fn new(cell: Arc<HoldCell>) -> Self {
        Self { cell, id: None }
    }

    /// Ready when the hold is lost; the waker is kept otherwise.
    pub(crate) fn poll(&mut self, now: Time, cx: &mut Context<'_>) -> Poll<LostReason> {
        if let Some(reason) = self.cell.lost(now) {
            return Poll::Ready(reason);
        }
        let replaced = {
            let mut waiters = self.cell.lease.waiters.lock();
            let known = self
                .id
                .and_then(|id| waiters.wakers.iter_mut().find(|(other, _)| *other == id));
            match known {
                Some((_, waker)) if waker.will_wake(cx.waker()) => None,
                Some((_, waker)) => Some(std::mem::replace(waker, cx.waker().clone())),
                None => {
                    let id = waiters.next;
                    waiters.next += 1;
                    waiters.wakers.push((id, cx.waker().clone()));
                    self.id = Some(id);
                    None
                }
            }
        };
        // A waker runs foreign code when it is dropped.
        drop(replaced);
        // It may have been lost before the waker was there.
        self.cell.lost(now).map_or(Poll::Pending, Poll::Ready)
    }
}

impl Drop for LossWaiter {
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        let removed = {
            let mut waiters = self.cell.lease.waiters.lock();
            let at = waiters.wakers.iter().position(|(other, _)| *other == id);
            at.map(|at| waiters.wakers.swap_remove(at))
        };
        drop(removed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> Time {
        Time::default() + Duration::from_secs(secs)
    }

    #[test]
    fn loss_is_final_and_keeps_first_reason() {
        let cell = LeaseCell::new(at(10));
        assert_eq!(cell.lost(at(9)), None);
        cell.extend(at(20));
        assert_eq!(cell.remaining(at(15)), Duration::from_secs(5));
        assert_eq!(cell.lost(at(20)), Some(LostReason::Expired));
        cell.extend(at(40));
        assert_eq!(cell.lost(at(1)), Some(LostReason::Expired));
        assert_eq!(cell.lose(LostReason::Gone), LostReason::Expired);
        assert_eq!(cell.remaining(at(1)), Duration::ZERO);
    }

    #[test]
    fn each_reason_is_read_back() {
        for reason in REASONS {
            let cell = LeaseCell::new(at(10));
            assert_eq!(cell.lose(reason), reason);
            assert_eq!(cell.lost(at(0)), Some(reason));
        }
    }

    #[test]
    fn lowered_proof_ends_earlier() {
        let cell = LeaseCell::new(at(10));
        cell.lower(at(5));
        cell.extend(at(3));
        assert_eq!(cell.proved_until(), Some(at(5)));
    }

    #[test]
    fn released_hold_is_not_lost_later() {
        let lease = Arc::new(LeaseCell::new(at(10)));
        let hold = HoldCell::new(Arc::clone(&lease));
        hold.release();
        lease.lose(LostReason::Gone);
        assert_eq!(hold.lost(at(0)), None);
    }
}
