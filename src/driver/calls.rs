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
pub(super) struct Calls<L> {
    link: L,
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

impl<L: Link> Calls<L> {
    pub(super) fn new(link: L) -> Self {
        Self {
            link,
            waiting: VecDeque::new(),
            overdue: None,
            in_flight: FuturesUnordered::new(),
            locks_in_flight: 0,
        }
    }

    pub(super) fn link(&self) -> &L {
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use parking_lot::Mutex;
    use slotmap::KeyData;
    use tokio::sync::oneshot;

    use super::*;
    use crate::script::catalog::ACQUIRE;
    use crate::wire::Reply as Value;

    type Outcome = Result<Value, Failure>;

    /// A link that records the calls, and has the test answer them.
    #[derive(Clone, Default)]
    struct Recorder(Arc<Mutex<Vec<Made>>>);

    /// A call, and where its answer goes.
    type Made = (Call, oneshot::Sender<Outcome>);

    impl Link for Recorder {
        fn call(&self, call: Call) -> impl Future<Output = (Instant, Outcome)> + Send + 'static {
            let (answer, answered) = oneshot::channel();
            self.0.lock().push((call, answer));
            async move {
                let outcome = answered.await.unwrap_or(Err(Failure::Closed));
                (Instant::now(), outcome)
            }
        }

        fn leave_server(&self) -> bool {
            false
        }

        fn moved(&self) -> impl Future<Output = ()> + Send + 'static {
            std::future::pending()
        }

        async fn close(&self) {}
    }

    impl Recorder {
        /// How many locks each call since is for.
        fn sizes(&self) -> Vec<usize> {
            self.0.lock().iter().map(|(call, _)| call.locks).collect()
        }

        /// Answers the first so many.
        fn answer(&self, count: usize, outcome: impl Fn(&Call) -> Outcome) {
            for (call, answer) in self.0.lock().drain(..count) {
                let _ = answer.send(outcome(&call));
            }
        }
    }

    fn granted(call: &Call) -> Outcome {
        let pairs = (0..call.locks).flat_map(|_| [Value::Int(1), Value::Nil]);
        Ok(Value::List(pairs.collect()))
    }

    /// Calls of one lock each, with the numbers from `first` on.
    fn push(calls: &mut Calls<Recorder>, first: u64, count: u64) {
        for number in first..first + count {
            let call = Call {
                script: ACQUIRE.source(),
                locks: 1,
                keys: vec![Bytes::from(number.to_string())],
                args: vec![Bytes::new()],
            };
            calls.push(CallId::from(KeyData::from_ffi(1 << 32 | number)), call);
        }
        calls.send();
    }

    fn recorded() -> (Calls<Recorder>, Recorder) {
        let link = Recorder::default();
        (Calls::new(link.clone()), link)
    }

    #[tokio::test(start_paused = true)]
    async fn few_calls_go_out_by_themselves() {
        let (mut calls, link) = recorded();
        for number in 0..ALONE as u64 {
            push(&mut calls, number + 1, 1);
        }
        assert_eq!(link.sizes(), [1; ALONE]);
    }

    #[tokio::test(start_paused = true)]
    async fn calls_beyond_a_few_are_gathered_when_replies_come() {
        let (mut calls, link) = recorded();
        push(&mut calls, 1, ALONE as u64);
        push(&mut calls, 101, 10);
        assert_eq!(link.sizes(), [1; ALONE]);
        link.answer(ALONE, granted);
        let mut replies = Vec::new();
        while replies.len() < ALONE {
            calls.replied(&mut replies).await;
        }
        // Few again.
        calls.send();
        assert_eq!(link.sizes(), [1; 10]);
        push(&mut calls, 201, 20);
        link.answer(9, granted);
        replies.clear();
        while replies.len() < 9 {
            calls.replied(&mut replies).await;
        }
        push(&mut calls, 301, 5);
        assert_eq!(link.sizes(), [1, 25]);
        link.answer(2, granted);
        replies.clear();
        while replies.len() < 26 {
            calls.replied(&mut replies).await;
        }
        assert!(replies.iter().all(|reply| reply.outcome.is_ok()));
    }

    #[tokio::test(start_paused = true)]
    async fn calls_wait_no_longer_than_a_millisecond() {
        let (mut calls, link) = recorded();
        push(&mut calls, 1, ALONE as u64);
        push(&mut calls, 101, 10);
        let begun = Instant::now();
        let mut replies = Vec::new();
        let waited = tokio::time::timeout(10 * LONGEST, calls.replied(&mut replies));
        assert!(waited.await.is_err());
        assert_eq!(link.sizes()[ALONE..], [10]);
        assert!(begun.elapsed() >= LONGEST);
    }

    #[tokio::test(start_paused = true)]
    async fn full_calls_go_out_at_once_and_no_more_than_the_window() {
        let (mut calls, link) = recorded();
        push(&mut calls, 1, ALONE as u64);
        push(&mut calls, 101, 2 * WINDOW as u64);
        let sizes = link.sizes();
        assert!(sizes[ALONE..].iter().all(|size| (1..=LOCKS).contains(size)));
        assert_eq!(sizes.iter().sum::<usize>(), WINDOW);
    }

    #[tokio::test(start_paused = true)]
    async fn refused_gathered_call_is_made_one_by_one() {
        let (mut calls, link) = recorded();
        push(&mut calls, 1, ALONE as u64);
        push(&mut calls, 101, LOCKS as u64);
        assert_eq!(link.sizes()[ALONE..], [LOCKS]);
        let refusal = |_: &Call| {
            Err(Failure::Server(
                "NOPERM no access to a key".to_owned().into(),
            ))
        };
        link.answer(ALONE, granted);
        link.answer(1, refusal);
        let mut replies = Vec::new();
        while link.sizes().is_empty() {
            calls.replied(&mut replies).now_or_never();
        }
        assert_eq!(link.sizes(), [1; LOCKS]);
        link.answer(LOCKS, refusal);
        replies.clear();
        while replies.len() < LOCKS {
            calls.replied(&mut replies).await;
        }
        assert!(replies.iter().all(|reply| reply.outcome.is_err()));
    }
}
