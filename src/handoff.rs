//! Operations that their callers drive as long as they do, and the background from then on.

use std::mem::replace;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;

use crate::background::{Background, Busy};
use crate::turn::{TakeOver, Ticket, Turns};

/// For how long a result that can be undone waits for a caller that has been woken for it.
const UNCLAIMED: Duration = Duration::from_millis(500);

/// An operation of an owner on a lock. If its caller drops it, it is finished in the background,
/// and so it is if the caller takes long over it: it may have stopped to poll it.
///
/// What it resolves to must undo itself when it is dropped. It resolves to nothing if that has
/// happened, because the caller did not come for it, or if the client has ended meanwhile.
pub(crate) struct Handoff<T: Send + 'static> {
    slot: Arc<Slot<T>>,
    /// Whether there is anything to be finished.
    begun: Arc<AtomicBool>,
    _ticket: Ticket,
}

impl<T: Send + 'static> Handoff<T> {
    /// An operation that is begun, and finished whatever happens.
    pub(crate) fn new(
        background: &Background,
        turns: &Arc<Turns>,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Self {
        Self::enter(
            background,
            turns,
            Arc::new(AtomicBool::new(true)),
            false,
            future.boxed(),
        )
    }

    /// An operation that is given up without its caller as long as `begun` does not say that it has
    /// begun, and whose result is undone if nobody comes for it.
    pub(crate) fn undoable(
        background: &Background,
        turns: &Arc<Turns>,
        begun: Arc<AtomicBool>,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Self {
        Self::enter(background, turns, begun, true, future.boxed())
    }

    fn enter(
        background: &Background,
        turns: &Arc<Turns>,
        begun: Arc<AtomicBool>,
        undoable: bool,
        future: BoxFuture<'static, T>,
    ) -> Self {
        let work = Work::Mine {
            future,
            caller: None,
            busy: background.with_caller(),
        };
        let slot = Arc::new(Slot {
            work: Mutex::new(work),
            background: background.clone(),
            undoable,
        });
        let weak: Weak<Slot<T>> = Arc::downgrade(&slot);
        Self {
            slot,
            begun,
            _ticket: turns.enter(weak),
        }
    }
}

impl<T: Send + 'static> Future for Handoff<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // Held while the future is polled: nobody else waits for it.
        let mut work = self.slot.work.lock();
        let output = match &mut *work {
            Work::Mine { future, caller, .. } => match future.poll_unpin(cx) {
                Poll::Ready(output) => Some(output),
                Poll::Pending => {
                    remember(caller, cx);
                    return Poll::Pending;
                }
            },
            Work::Away { caller } => {
                remember(caller, cx);
                return Poll::Pending;
            }
            Work::Done(_) | Work::Over => None,
        };
        let work = replace(&mut *work, Work::Over);
        Poll::Ready(match work {
            Work::Done(output) => Some(output),
            Work::Mine { .. } | Work::Away { .. } | Work::Over => output,
        })
    }
}

impl<T: Send + 'static> Drop for Handoff<T> {
    fn drop(&mut self) {
        let work = replace(&mut *self.slot.work.lock(), Work::Over);
        if let Work::Mine { future, busy, .. } = work {
            if self.begun.load(Ordering::Acquire) {
                self.slot
                    .background
                    .spawn(async move { drop(future.await) });
            }
            // Counted all the time, here or there.
            drop(busy);
        }
    }
}

struct Slot<T> {
    work: Mutex<Work<T>>,
    background: Background,
    undoable: bool,
}

enum Work<T> {
    /// The caller drives it.
    Mine {
        future: BoxFuture<'static, T>,
        caller: Option<Waker>,
        busy: Busy,
    },
    /// The background drives it.
    Away { caller: Option<Waker> },
    /// The background has done it.
    Done(T),
    /// There is nothing (any more).
    Over,
}

impl<T: Send + 'static> Slot<T> {
    /// Ends the work of the background, and wakes the caller. What a caller who has gone away
    /// leaves is dropped.
    fn end(&self, result: Work<T>) {
        let mut work = self.work.lock();
        if let Work::Away { caller } = &mut *work {
            let caller = caller.take();
            *work = result;
            drop(work);
            if let Some(caller) = caller {
                caller.wake();
            }
        }
    }

    /// Undoes what the caller has not come for.
    fn expire(&self) {
        let mut work = self.work.lock();
        if matches!(*work, Work::Done(_)) {
            let unclaimed = replace(&mut *work, Work::Over);
            drop(work);
            drop(unclaimed);
        }
    }
}

impl<T: Send + 'static> TakeOver for Slot<T> {
    fn take_over(self: Arc<Self>) {
        if self.background.has_ended() {
            // Its caller may poll it yet.
            return;
        }
        // Whoever is polled needs no help.
        let Some(mut work) = self.work.try_lock() else {
            return;
        };
        let (future, busy) = match replace(&mut *work, Work::Over) {
            Work::Mine {
                future,
                caller,
                busy,
            } => {
                *work = Work::Away { caller };
                (future, busy)
            }
            other => {
                *work = other;
                return;
            }
        };
        drop(work);
        let ends = Ends(Arc::clone(&self));
        self.background.spawn(async move {
            let output = future.await;
            ends.0.end(Work::Done(output));
            if ends.0.undoable {
                tokio::time::sleep(UNCLAIMED).await;
                ends.0.expire();
            }
        });
        // Counted all the time, here or there.
        drop(busy);
    }
}

/// Tells the caller if the background ends before the work does.
struct Ends<T: Send + 'static>(Arc<Slot<T>>);

impl<T: Send + 'static> Drop for Ends<T> {
    fn drop(&mut self) {
        self.0.end(Work::Over);
    }
}

fn remember(caller: &mut Option<Waker>, cx: &Context<'_>) {
    match caller {
        Some(waker) => waker.clone_from(cx.waker()),
        None => *caller = Some(cx.waker().clone()),
    }
}
