//! Defects that the simulation found, each as the shortest sequence that shows it.

use std::time::Duration;

use super::super::{
    AcquireRequest, CallId, Engine, Event, HoldId, Outcome, RequestId, Settings, Transmit, Wait,
};
use crate::config::{DeadlockDetection, LeaseTime};
use crate::error::{Error, Step};
use crate::keys::Keys;
use crate::kind::Kind;
use crate::owner::{ClientId, Owner, TaskKey};
use crate::time::Time;
use crate::wire::{Failure, Reply};

/// How long the watchdog's lease counts as proved.
const PROOF: Duration = Duration::from_millis(2_700);

/// An engine without a server: the test replies to each call.
pub(super) struct Bench {
    pub(super) engine: Engine,
    pub(super) now: Time,
    pub(super) keys: Keys,
    events: Vec<Event>,
}

pub(super) fn granted() -> Result<Reply, Failure> {
    answered(1, 1)
}

fn answered(code: i64, number: i64) -> Result<Reply, Failure> {
    Ok(Reply::List(vec![Reply::Int(code), Reply::Int(number)]))
}

fn no_connection() -> Failure {
    Failure::NotSent("no connection".to_owned().into())
}

impl Bench {
    pub(super) fn new() -> Self {
        let settings = Settings {
            client_id: ClientId::from(uuid::Uuid::from_u128(7)),
            address: "server:6379".into(),
            watchdog: LeaseTime::new(Duration::from_secs(3)).unwrap(),
            recheck: None,
            retry_timeout: Duration::from_secs(1),
            command_timeout: Duration::from_secs(1),
            renewal_batch: 100,
            detection: DeadlockDetection::Warn,
            passing_time: std::time::Duration::ZERO,
        };
        Self {
            engine: Engine::new(settings, 1),
            now: Time::default() + Duration::from_secs(1),
            keys: Keys::reentrant("lock").unwrap(),
            events: Vec::new(),
        }
    }

    /// The calls that were sent since the last look.
    fn calls(&mut self) -> Vec<CallId> {
        while let Some(event) = self.engine.poll_event() {
            self.events.push(event);
        }
        std::iter::from_fn(|| self.engine.poll_transmit())
            .filter_map(|transmit| match transmit {
                Transmit::Call(call, _) => Some(call),
                _ => None,
            })
            .collect()
    }

    fn call(&mut self) -> CallId {
        let calls = self.calls();
        assert_eq!(calls.len(), 1, "one call");
        calls[0]
    }

    fn reply(&mut self, call: CallId, outcome: Result<Reply, Failure>) {
        self.engine.handle_reply(self.now, call, outcome);
    }

    fn wait(&mut self, pause: Duration) {
        self.now = self.now + pause;
        self.engine.handle_timeout(self.now);
    }

    fn acquire(&mut self, kind: Kind, wait: Wait, lease: Option<Duration>) -> RequestId {
        let request = AcquireRequest {
            keys: self.keys.clone(),
            kind,
            owner: Owner::numbered(5),
            lease: lease.map(|lease| LeaseTime::new(lease).unwrap()),
            wait,
            task: TaskKey(1),
        };
        self.engine.acquire(self.now, request)
    }

    fn hold(&mut self, lease: Option<Duration>) -> HoldId {
        let request = self.acquire(Kind::Reentrant, Wait::Unlimited, lease);
        let call = self.call();
        self.reply(call, granted());
        self.engine.claim(self.now, request).unwrap().hold
    }

    fn outcome(&mut self, request: RequestId) -> Option<&Outcome> {
        assert!(self.calls().is_empty());
        self.events.iter().rev().find_map(|event| match event {
            Event::Completed(id, outcome) if *id == request => Some(outcome),
            _ => None,
        })
    }
}

/// A force unlock that the server refuses is repeated. The owner, of whom the client knew nothing
/// when it was found, must not acquire meanwhile: the repetition would free its new tenure.
#[test]
fn owner_does_not_acquire_while_it_is_freed_by_force() {
    let mut bench = Bench::new();
    let (now, keys) = (bench.now, bench.keys.clone());
    let request = bench.engine.force_unlock(now, &keys, Kind::Reentrant);
    let inspection = bench.call();
    let text = |text: &'static str| Reply::Text(bytes::Bytes::from_static(text.as_bytes()));
    let owner = "00000000-0000-0000-0000-000000000007:5";
    let held = vec![Reply::Int(900), text(""), text(owner), text("1")];
    bench.reply(inspection, Ok(Reply::List(held)));
    let forced = bench.call();
    let refusal = "READONLY You can't write against a read only replica.";
    bench.reply(forced, Err(Failure::Server(refusal.to_owned().into())));
    let acquiring = bench.acquire(Kind::Reentrant, Wait::Unlimited, None);
    assert!(bench.calls().is_empty(), "it acquires");
    bench.wait(Duration::from_millis(100));
    let forced = bench.call();
    bench.reply(forced, answered(1, 0));
    // The owner may be that of another process with the same client id, so it is counted first.
    let count = bench.call();
    bench.reply(count, answered(1, 0));
    let acquire = bench.call();
    bench.reply(acquire, granted());
    assert!(bench.engine.claim(bench.now, acquiring).is_ok());
    let outcome = bench.outcome(request);
    assert!(matches!(outcome, Some(Outcome::Freed(true))), "{outcome:?}");
}

/// The connection was lost with the call of a force unlock, and not replaced in time. The error
/// said that nothing had been sent.
#[test]
fn force_unlock_without_a_reply_is_unknown_whatever_follows() {
    let malformed = || Ok(Reply::Int(1));
    let broken = Reply::Text(bytes::Bytes::from_static(b"WRONGTYPE no hash"));
    let refused = Ok(Reply::List(vec![Reply::Int(9), broken]));
    for later in [Err(no_connection()), malformed(), refused] {
        let mut bench = Bench::new();
        let (now, keys) = (bench.now, bench.keys.clone());
        let request = bench.engine.force_unlock(now, &keys, Kind::Reentrant);
        let inspection = bench.call();
        let text = |text: &'static str| Reply::Text(bytes::Bytes::from_static(text.as_bytes()));
        let held = vec![Reply::Int(900), text(""), text("other:1"), text("1")];
        bench.reply(inspection, Ok(Reply::List(held)));
        let forced = bench.call();
        bench.reply(forced, Err(Failure::Unknown("lost".to_owned())));
        for _ in 0..100 {
            for call in bench.calls() {
                bench.reply(call, later.clone());
            }
            bench.wait(Duration::from_millis(100));
        }
        let outcome = bench.outcome(request);
        let is_unknown = matches!(
            outcome,
            Some(Outcome::Failed(Error::OutcomeUnknown {
                step: Step::ForceUnlock,
                ..
            }))
        );
        assert!(is_unknown, "{outcome:?}");
    }
}

/// The thread ended with the question in flight, and its caller waited for ever.
#[test]
fn client_ends_after_questions_in_flight() {
    for force in [false, true] {
        let mut bench = Bench::new();
        let (now, keys) = (bench.now, bench.keys.clone());
        let request = if force {
            bench.engine.force_unlock(now, &keys, Kind::Reentrant)
        } else {
            bench.engine.inspect(now, &keys, Kind::Reentrant, None)
        };
        let call = bench.call();
        bench.engine.close(now);
        assert!(!bench.engine.has_ended(), "the question has no outcome");
        let nothing = Reply::List(vec![Reply::Int(-2), Reply::Text(bytes::Bytes::new())]);
        bench.reply(call, Ok(nothing));
        assert!(bench.outcome(request).is_some());
        assert!(bench.engine.has_ended());
    }
}

#[test]
fn question_without_reply_ends_at_limit_of_shutdown() {
    let mut bench = Bench::new();
    let (now, keys) = (bench.now, bench.keys.clone());
    let request = bench.engine.inspect(now, &keys, Kind::Reentrant, None);
    bench.call();
    bench.engine.close(now);
    bench.wait(Duration::from_secs(2));
    assert!(bench.engine.has_ended());
    assert!(matches!(
        bench.outcome(request),
        Some(Outcome::Failed(Error::Closed))
    ));
}

/// The entry still listed the operations that the end of the client had removed.
#[test]
fn guard_is_dropped_after_limit_of_shutdown() {
    let mut bench = Bench::new();
    let outer = bench.hold(None);
    bench.acquire(Kind::Reentrant, Wait::Unlimited, None);
    bench.call();
    bench.engine.close(bench.now);
    bench.wait(Duration::from_secs(2));
    bench.engine.drop_hold(bench.now, outer);
    bench.calls();
}

/// The end of the attempt started the owner's next one, which failed at once because the client was
/// shut down, and had the head of the queue make an attempt: the request that was just ending.
#[test]
fn request_that_fails_at_shutdown_completes_once() {
    let mut bench = Bench::new();
    let waiter = bench.acquire(Kind::Reentrant, Wait::Unlimited, None);
    let call = bench.call();
    let other = bench.acquire(Kind::Reentrant, Wait::AtMost(Duration::ZERO), None);
    bench.engine.close(bench.now);
    bench.reply(call, Err(no_connection()));
    bench.wait(Duration::from_millis(50));
    bench.calls();
    for request in [waiter, other] {
        let completed = bench
            .events
            .iter()
            .filter(|event| matches!(event, Event::Completed(id, _) if *id == request));
        assert_eq!(completed.count(), 1);
    }
}

/// A renewal that was in flight beside the last release found that the lease had run out, and
/// removed the tenure; then the release failed for good.
#[test]
fn last_release_fails_after_loss() {
    for is_detached in [false, true] {
        let mut bench = Bench::new();
        let hold = bench.hold(None);
        bench.wait(Duration::from_secs(1));
        let renewal = bench.call();
        let (keys, owner) = (bench.keys.clone(), Owner::numbered(5));
        if is_detached {
            bench.engine.detach(bench.now, hold);
            bench
                .engine
                .unlock(bench.now, &keys, Kind::Reentrant, owner);
        } else {
            bench.engine.drop_hold(bench.now, hold);
        }
        for step in 0..200 {
            for call in bench.calls() {
                bench.reply(call, Err(no_connection()));
            }
            if step == 20 {
                bench.reply(renewal, Err(no_connection()));
            }
            bench.wait(Duration::from_millis(100));
        }
        let request = bench
            .engine
            .unlock(bench.now, &keys, Kind::Reentrant, owner);
        assert!(bench.outcome(request).is_some());
        assert!(bench.engine.is_empty(), "{}", bench.engine.remains());
    }
}

/// The guard of the new tenure had the token of the lost guards, which may still be in use.
#[test]
fn tenure_after_loss_during_reentry_has_token_of_its_own() {
    let mut bench = Bench::new();
    let outer = bench.acquire(Kind::Fenced, Wait::Unlimited, None);
    let call = bench.call();
    bench.reply(call, answered(1, 5));
    let outer = bench.engine.claim(bench.now, outer).unwrap();
    assert_eq!(outer.token, Some(5));
    let inner = bench.acquire(Kind::Fenced, Wait::Unlimited, None);
    let call = bench.call();
    bench.now = bench.now + PROOF;
    bench.reply(call, answered(1, 0));
    let call = bench.call();
    bench.reply(call, answered(1, 6));
    let inner = bench.engine.claim(bench.now, inner).unwrap();
    assert!(outer.cell.lost(bench.now).is_some());
    assert_eq!(inner.token, Some(6));
}

/// Its reply carried the token of the lost tenure into a new one, which the next guard joined.
#[test]
fn cancelled_reentry_after_loss_passes_no_token_on() {
    let mut bench = Bench::new();
    let outer = bench.acquire(Kind::Fenced, Wait::Unlimited, None);
    let call = bench.call();
    bench.reply(call, answered(1, 5));
    bench.engine.claim(bench.now, outer).unwrap();
    bench.now = bench.now + PROOF * 3 / 4;
    let inner = bench.acquire(Kind::Fenced, Wait::Unlimited, None);
    let call = bench.call();
    bench.engine.cancel(bench.now, inner);
    bench.now = bench.now + PROOF / 4;
    let next = bench.acquire(Kind::Fenced, Wait::Unlimited, None);
    bench.reply(call, answered(1, 0));
    let call = bench.call();
    bench.reply(call, answered(1, 6));
    let next = bench.engine.claim(bench.now, next).unwrap();
    assert_eq!(next.token, Some(6));
}

/// The attempt was retried for as long as the wait, once more.
#[test]
fn attempt_at_end_of_wait_ends_with_wait() {
    let mut bench = Bench::new();
    let wait = Duration::from_secs(1);
    let begun = bench.now;
    let request = bench.acquire(Kind::Reentrant, Wait::AtMost(wait), None);
    let call = bench.call();
    bench.reply(call, answered(0, 60_000));
    bench.wait(wait * 9 / 10);
    let channel = bench.keys.channel.clone();
    bench.engine.handle_message(bench.now, &channel);
    let is_completed = |bench: &Bench| {
        let mut events = bench.events.iter();
        events.any(|event| matches!(event, Event::Completed(id, _) if *id == request))
    };
    while !is_completed(&bench) {
        assert!(bench.now.since(begun) <= wait, "the wait is over");
        for call in bench.calls() {
            bench.reply(call, Err(no_connection()));
        }
        bench.calls();
        bench.wait(Duration::from_millis(5));
    }
}

/// The request joined the queue after its own attempt had been answered, and failed because earlier
/// attempts had not been.
#[test]
fn request_that_was_answered_does_not_fail_for_earlier_silence() {
    let mut bench = Bench::new();
    let request = bench.acquire(Kind::Reentrant, Wait::Unlimited, None);
    let call = bench.call();
    bench.reply(call, granted());
    bench.wait(Duration::from_millis(600));
    let call = bench.call();
    bench.reply(call, granted());
    assert!(matches!(bench.outcome(request), Some(Outcome::Unclaimed)));
    for number in [6, 7] {
        let other = AcquireRequest {
            keys: bench.keys.clone(),
            kind: Kind::Reentrant,
            owner: Owner::numbered(number),
            lease: None,
            wait: Wait::Unlimited,
            task: TaskKey(2),
        };
        let other = bench.engine.acquire(bench.now, other);
        while !matches!(bench.events.last(), Some(Event::Completed(id, _)) if *id == other) {
            for call in bench.calls() {
                bench.reply(call, Err(no_connection()));
            }
            bench.calls();
            bench.wait(Duration::from_millis(5));
        }
    }
    bench.engine.resume(bench.now, request);
    let call = bench.call();
    bench.reply(call, answered(0, 60_000));
    bench.calls();
    assert!(matches!(bench.outcome(request), Some(Outcome::Unclaimed)));
}

/// A batch of renewals that is refused for one of its keys rarely comes up at random.
#[test]
fn batch_that_is_refused_for_one_key_is_renewed_one_by_one() {
    let mut bench = Bench::new();
    bench.hold(None);
    bench.keys = Keys::reentrant("other").unwrap();
    bench.hold(None);
    bench.wait(Duration::from_secs(1));
    let batch = bench.call();
    let refusal = "NOPERM No permissions to access a key";
    bench.reply(batch, Err(Failure::Server(refusal.into())));
    assert_eq!(bench.calls().len(), 2);
}
