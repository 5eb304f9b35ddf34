//! The calls on their way to the server: few go out one by one, many together.

use std::collections::VecDeque;

use futures::future::{BoxFuture, FutureExt};
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::time::Instant;

use crate::engine::CallId;
use crate::link::Link;
use crate::script::gather::{Answered, Gathered, gather};
use crate::wire::{self, Call, Failure};

/// At most so many are in flight: further ones wait here, where no time limit of a reply counts,
/// since the server runs one after the other.
const MOST: usize = 16;

/// While fewer are in flight, those that wait are gathered and sent. With two, the server works on
/// one while the other is on its way.
const FEW: usize = 2;

/// The most locks in one call. The server does nothing else meanwhile, for about 0.2 ms.
const LOCKS: usize = 64;

/// The calls that wait, and those in flight.
pub(super) struct Calls {
    link: Link,
    waiting: VecDeque<(CallId, Call)>,
    in_flight: FuturesUnordered<BoxFuture<'static, Replied>>,
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
            in_flight: FuturesUnordered::new(),
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
        let busy = self.in_flight.len();
        let waiting = self.waiting.len();
        if busy + waiting <= MOST {
            while let Some((id, call)) = self.waiting.pop_front() {
                self.submit(Gathered::alone(id, call));
            }
        } else if busy < FEW || (waiting >= LOCKS && busy < MOST) {
            let mut left = LOCKS * (MOST - busy);
            let fits = |(_, call): &&(CallId, Call)| {
                let has_space = left > 0;
                left = left.saturating_sub(call.locks.max(1));
                has_space
            };
            let count = self.waiting.iter().take_while(fits).count();
            for gathered in gather(self.waiting.drain(..count), LOCKS) {
                self.submit(gathered);
            }
        }
    }

    /// Waits for replies, and takes those that have come.
    pub(super) async fn replied(&mut self, replies: &mut Vec<Reply>) {
        let Some(replied) = self.in_flight.next().await else {
            return std::future::pending().await;
        };
        self.take(replied, replies);
        // Those that came with it.
        while let Some(Some(replied)) = self.in_flight.next().now_or_never() {
            self.take(replied, replies);
        }
    }

    fn take(&mut self, (gathered, (sent, outcome)): Replied, replies: &mut Vec<Reply>) {
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
        let call = self.link.call(gathered.call());
        self.in_flight
            .push(async move { (gathered, call.await) }.boxed());
    }
}
