//! The one task that finishes what callers left unfinished.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use tokio::sync::{Notify, mpsc, watch};

use crate::turn::InHand;

type Job = BoxFuture<'static, ()>;

/// The way to that task.
#[derive(Clone)]
pub(crate) struct Background {
    jobs: mpsc::UnboundedSender<Job>,
    pending: Arc<Pending>,
    with_callers: Arc<Pending>,
    in_hand: Arc<InHand>,
    stopped: watch::Receiver<bool>,
}

/// Counts what is not finished.
#[derive(Default)]
struct Pending {
    count: AtomicUsize,
    none: Notify,
}

/// Counts for as long as it lives.
pub(crate) struct Busy(Arc<Pending>);

impl Background {
    /// The sending side, and the worker to spawn. The worker ends when every sender is gone and its
    /// jobs are done, or at once when it is told to stop.
    ///
    /// What callers keep in their hands for longer than `round` it takes over.
    pub(crate) fn new(
        mut stop: watch::Receiver<bool>,
        in_hand: Arc<InHand>,
        round: Duration,
    ) -> (Self, impl Future<Output = ()> + Send + 'static) {
        let (jobs, queue) = mpsc::unbounded_channel();
        let background = Self {
            jobs,
            pending: Arc::default(),
            with_callers: Arc::default(),
            in_hand: Arc::clone(&in_hand),
            stopped: stop.clone(),
        };
        let worker = async move {
            let stopped = async move {
                if stop.wait_for(|stop| *stop).await.is_err() {
                    // The client is gone; what it left is still to be done.
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                () = work(queue) => {}
                () = take_over(&in_hand, round) => {}
                () = stopped => {}
            }
        };
        (background, worker)
    }

    /// Hands a job over. Works from any thread, inside a runtime or not.
    pub(crate) fn spawn(&self, job: impl Future<Output = ()> + Send + 'static) {
        let busy = Busy::new(&self.pending);
        let job = async move {
            let _busy = busy;
            job.await;
        };
        if self.jobs.send(job.boxed()).is_err() {
            // The lock that it would have released is lost, or was abandoned: that is reported
            // there.
            tracing::debug!(
                shut_down = *self.stopped.borrow(),
                "an operation in the background was dropped",
            );
        }
    }

    /// Whether its task has gone: then nothing is finished any more.
    pub(crate) fn has_ended(&self) -> bool {
        self.jobs.is_closed()
    }

    /// Counts an operation that its caller drives, for as long as what this answers lives.
    pub(crate) fn with_caller(&self) -> Busy {
        Busy::new(&self.with_callers)
    }

    /// Resolves when nothing is pending. What callers have in their hands is waited for that long:
    /// a caller may have stopped to poll.
    pub(crate) async fn drained(&self, callers: Duration) {
        while tokio::time::timeout(callers, self.with_callers.none())
            .await
            .is_err()
        {
            // Somebody is not polled, or the server does not answer.
            self.in_hand.take_over_all();
        }
        // What they left unfinished has come here.
        self.pending.none().await;
    }
}

impl Pending {
    async fn none(&self) {
        loop {
            let none = self.none.notified();
            if self.count.load(Ordering::Acquire) == 0 {
                return;
            }
            none.await;
        }
    }
}

impl Busy {
    fn new(pending: &Arc<Pending>) -> Self {
        pending.count.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(pending))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.none.notify_waiters();
        }
    }
}

/// Never ends.
async fn take_over(in_hand: &InHand, round: Duration) {
    loop {
        tokio::time::sleep(round).await;
        in_hand.take_over_old();
    }
}

async fn work(mut queue: mpsc::UnboundedReceiver<Job>) {
    let mut running = FuturesUnordered::new();
    let mut open = true;
    while open || !running.is_empty() {
        tokio::select! {
            job = queue.recv(), if open => match job {
                Some(job) => running.push(AssertUnwindSafe(job).catch_unwind()),
                None => open = false,
            },
            Some(outcome) = running.next() => {
                if outcome.is_err() {
                    tracing::error!("a release in the background panicked, the lease will expire");
                }
            }
        }
    }
}
