//! The calls on their way to the server: few go out one by one, many together.

use std::collections::VecDeque;
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt};
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Instant, sleep_until};

use crate::engine::CallId;
use crate::link::Link;
use crate::script::gather::{Answered, Gathered, gather};
use crate::wire::{self, Call, Failure};

/// Up to so many calls in flight go out by themselves.
const ALONE: usize = 16;

/// While fewer are in flight, those that wait are gathered and sent. With two, the server works on
/// one while the other is on its way.
const FEW: usize = 2;

/// A call waits no longer for others: where a round trip takes longer, waiting for replies would
/// cost more than gathering saves.
const LONGEST: Duration = Duration::from_millis(1);

/// The most locks in one call. The server does nothing else meanwhile, for about 0.3 ms.
const LOCKS: usize = 64;

/// The most locks in flight: the server runs one call after the other, and further calls wait here,
/// where no time limit of a reply counts.
const WINDOW: usize = 1024;

/// The calls that wait, and those in flight.
pub(super) struct Calls {
    link: Link,
    waiting: VecDeque<(CallId, Call)>,
    /// When those that wait are sent at the latest.
    overdue: Option<Instant>,
    in_flight: FuturesUnordered<BoxFuture<'static, Replied>>,
    locks_in_flight: usize,
}

type Replied = (Gathered<CallId>, (Instant, Result<wire::Reply, Failure>));

/// The outcome of a call, and a moment before which it was not sent.
pub(super) struct Reply {
    pub(super) call: CallId,
    pub(super) sent: Instant,
    pub(super) outcome: Result<wire::Reply, Failure>,
}

impl Calls {
    pub(super) fn new(link: Link) -> Self {
        Self {
            link,
            waiting: VecDeque::new(),
            overdue: None,
            in_flight: FuturesUnordered::new(),
            locks_in_flight: 0,
        }
    }

    pub(super) fn link(&self) -> &Link {
        &self.link
    }

    /// [`send`](Self::send) sends it.
    pub(super) fn push(&mut self, id: CallId, call: Call) {
        self.waiting.push_back((id, call));
    }

    /// Sends what is not to wait for company: each call by itself while there are few, since that
    /// is fastest then, and a full gathered call at once.
    pub(super) fn send(&mut self) {
        let (busy, waiting) = (self.in_flight.len(), self.waiting.len());
        if busy + waiting <= ALONE {
            while let Some((id, call)) = self.waiting.pop_front() {
                self.submit(Gathered::alone(id, call));
            }
        } else if busy < FEW || waiting >= LOCKS {
            self.send_gathered();
        }
        if self.waiting.is_empty() {
            self.overdue = None;
        } else if self.overdue.is_none() {
            self.overdue = Some(Instant::now() + LONGEST);
        }
    }

    fn send_gathered(&mut self) {
        let mut left = WINDOW.saturating_sub(self.locks_in_flight);
        let fits = |(_, call): &&(CallId, Call)| {
            let has_space = left > 0;
            left = left.saturating_sub(call.locks.max(1));
            has_space
        };
        let count = self.waiting.iter().take_while(fits).count();
        for gathered in gather(self.waiting.drain(..count), LOCKS) {
            self.submit(gathered);
        }
        self.overdue = None;
    }

    /// Waits for replies, and takes those that have come.
    pub(super) async fn replied(&mut self, replies: &mut Vec<Reply>) {
        let replied = loop {
            let overdue = self.overdue;
            tokio::select! {
                Some(replied) = self.in_flight.next() => break replied,
                () = sleep_until(overdue.unwrap_or_else(Instant::now)), if overdue.is_some() => {
                    self.send_gathered();
                }
                else => std::future::pending().await,
            }
        };
        self.take(replied, replies);
        // Those that came with it.
        while let Some(Some(replied)) = self.in_flight.next().now_or_never() {
            self.take(replied, replies);
        }
    }

    fn take(&mut self, (gathered, (sent, outcome)): Replied, replies: &mut Vec<Reply>) {
        self.locks_in_flight -= gathered.locks();
        match gathered.answered(outcome) {
            Answered::Each(each) => {
                replies.extend(each.into_iter().map(|(call, outcome)| Reply {
                    call,
                    sent,
                    outcome,
                }));
            }
            Answered::Refused(calls) => {
                for (id, call) in calls {
                    self.submit(Gathered::alone(id, call));
                }
            }
        }
    }

    fn submit(&mut self, mut gathered: Gathered<CallId>) {
        self.locks_in_flight += gathered.locks();
        let call = self.link.call(gathered.call());
        self.in_flight
            .push(async move { (gathered, call.await) }.boxed());
    }
}
