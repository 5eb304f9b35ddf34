//! One engine with many requests or many locks: what each event costs.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::super::{AcquireRequest, Engine, Event, RequestId, Subscription, Transmit, Wait};
use super::regressions::{Bench, granted};
use crate::keys::Keys;
use crate::kind::Kind;
use crate::owner::{Owner, TaskKey};
use crate::time::Time;
use crate::wire::Reply;

fn request(keys: &Keys, thread: i64) -> AcquireRequest {
    AcquireRequest {
        keys: keys.clone(),
        kind: Kind::Reentrant,
        owner: Owner::numbered(thread),
        lease: None,
        wait: Wait::Unlimited,
        task: TaskKey(thread),
    }
}

fn held(millis: i64) -> Reply {
    Reply::List(vec![Reply::Int(0), Reply::Int(millis)])
}

/// Lets each call have that reply, and confirms each subscription. Returns the number of calls.
fn answer(engine: &mut Engine, now: Time, reply: &Reply) -> usize {
    let mut calls = 0;
    while let Some(transmit) = engine.poll_transmit() {
        match transmit {
            Transmit::Call(call, _) => {
                calls += 1;
                engine.handle_reply(now, call, Ok(reply.clone()));
            }
            Transmit::Subscribe(name) => {
                engine.handle_subscription(now, &name, Subscription::Confirmed);
            }
            Transmit::Unsubscribe(_) | Transmit::Reconnect => {}
        }
    }
    calls
}

#[test]
fn missed_messages_have_waiters_look_one_after_another() {
    const LOCKS: usize = 1_000;
    let mut bench = Bench::new();
    let (engine, now) = (&mut bench.engine, bench.now);
    for number in 0..LOCKS {
        let keys = Keys::reentrant(&format!("lock:{number}")).unwrap();
        engine.acquire(now, request(&keys, number as i64 + 1));
    }
    answer(engine, now, &held(3_600_000));
    engine.handle_missed_messages(now);
    let mut looks = BTreeMap::<u64, usize>::new();
    while let Some(at) = engine
        .poll_timeout()
        .filter(|at| *at <= now + Duration::from_millis(200))
    {
        engine.handle_timeout(at);
        let calls = answer(engine, at, &held(3_600_000));
        *looks.entry(at.since(now).as_millis() as u64).or_default() += calls;
    }
    assert_eq!(looks.values().sum::<usize>(), LOCKS, "{looks:?}");
    // Spread over 100 ms: about 10 in each.
    let most = looks.values().max().copied();
    assert!(most.is_some_and(|most| most < LOCKS / 10), "{looks:?}");
}

/// How long the engine takes for a grant and a release, the median of 1 000, while so many requests
/// wait.
fn time_of_a_handover(waiters: i64) -> Duration {
    let mut bench = Bench::new();
    let (engine, now, keys) = (&mut bench.engine, bench.now, bench.keys.clone());
    for thread in 1..=waiters {
        engine.acquire(now, request(&keys, thread));
    }
    let mut times = Vec::new();
    for _ in 0..1_000 {
        let begun = Instant::now();
        let mut offered = None::<RequestId>;
        while let Some(transmit) = engine.poll_transmit() {
            if let Transmit::Call(call, _) = transmit {
                engine.handle_reply(now, call, granted());
            }
        }
        while let Some(event) = engine.poll_event() {
            if let Event::Completed(id, _) = event {
                offered = Some(id);
            }
        }
        let grant = engine
            .claim(now, offered.expect("an offer"))
            .expect("a grant");
        engine.drop_hold(now, grant.hold);
        // The release is answered, and its message comes.
        while let Some(transmit) = engine.poll_transmit() {
            if let Transmit::Call(call, _) = transmit {
                engine.handle_reply(now, call, granted());
            }
        }
        engine.handle_message(now, &keys.channel);
        times.push(begun.elapsed());
    }
    times.sort();
    times[times.len() / 2]
}

#[test]
fn handover_costs_the_same_for_any_number_of_waiters() {
    let (few, many) = (time_of_a_handover(2_000), time_of_a_handover(40_000));
    assert!(
        many < few * 5,
        "{few:?} with 2000 waiters, {many:?} with 40000"
    );
}

#[test]
fn kinds_of_one_name_are_different_locks_if_their_channels_differ() {
    let name = "stock";
    let kinds = [Kind::Reentrant, Kind::Fenced, Kind::Simple];
    let keys: HashSet<Keys> = kinds.map(|kind| kind.keys(name).unwrap()).into();
    assert_eq!(keys.len(), 2);
    let names: HashSet<Bytes> = keys.into_iter().map(|keys| keys.name.clone()).collect();
    assert_eq!(names.len(), 1);
}
