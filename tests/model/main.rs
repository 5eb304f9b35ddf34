//! A model of a reentrant lease lock beside the real thing: random sequences of steps, and every
//! answer compared.
//!
//! `PROPTEST_CASES` makes more of them, and `PROPTEST_RNG_SEED` repeats a run. A failure prints the
//! shortest sequence found.

mod interleavings;
mod questions;
mod reference;
mod scripts;
#[path = "../support/mod.rs"]
mod support;
mod world;

use std::fmt::Debug;

use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};
use redisson_lock::{Error, LockClient, Owner, OwnerExt};
use support::server::{Server, unique};
use world::{Bench, World};

/// How many locks there are in a case.
const LOCKS: usize = 2;

/// A lease to ask for.
#[derive(Debug, Clone, Copy)]
enum Lease {
    Watchdog,
    HalfAnHour,
    TwoHours,
    Short,
}

/// One step. Indices wrap around.
#[derive(Debug, Clone)]
enum Op {
    TryLock {
        who: usize,
        lock: usize,
        lease: Lease,
        wait: bool,
    },
    TryLockAsNobody {
        client: usize,
        lock: usize,
    },
    Race {
        one: usize,
        other: usize,
        lock: usize,
    },
    Run {
        who: usize,
        lock: usize,
    },
    UnlockGuard {
        guard: usize,
    },
    DropGuard {
        guard: usize,
    },
    Forget {
        guard: usize,
    },
    Unlock {
        who: usize,
        lock: usize,
    },
    ForceUnlock {
        client: usize,
        lock: usize,
    },
    Vanish {
        lock: usize,
        expire: bool,
    },
    Plant {
        client: usize,
        lock: usize,
        count: u8,
    },
}

fn op() -> impl Strategy<Value = Op> {
    // The first six owners are always there: two that only this process knows, and one that others
    // know, a client.
    let who = || prop_oneof![4 => 0..6_usize, 1 => 6..12_usize];
    let lock = || prop_oneof![3 => Just(0), 1 => 1..LOCKS];
    let client = || 0..2_usize;
    let guard = || 0..8_usize;
    let lease = prop_oneof![
        6 => Just(Lease::Watchdog),
        3 => Just(Lease::HalfAnHour),
        2 => Just(Lease::TwoHours),
        1 => Just(Lease::Short),
    ];
    prop_oneof![
        12 => (who(), lock(), lease, any::<bool>())
            .prop_map(|(who, lock, lease, wait)| Op::TryLock { who, lock, lease, wait }),
        2 => (client(), lock()).prop_map(|(client, lock)| Op::TryLockAsNobody { client, lock }),
        2 => (who(), who(), lock()).prop_map(|(one, other, lock)| Op::Race { one, other, lock }),
        2 => (who(), lock()).prop_map(|(who, lock)| Op::Run { who, lock }),
        4 => guard().prop_map(|guard| Op::UnlockGuard { guard }),
        4 => guard().prop_map(|guard| Op::DropGuard { guard }),
        3 => guard().prop_map(|guard| Op::Forget { guard }),
        4 => (who(), lock()).prop_map(|(who, lock)| Op::Unlock { who, lock }),
        1 => (client(), lock()).prop_map(|(client, lock)| Op::ForceUnlock { client, lock }),
        2 => (lock(), any::<bool>()).prop_map(|(lock, expire)| Op::Vanish { lock, expire }),
        2 => (client(), lock(), 1..4_u8).prop_map(|(client, lock, count)| Op::Plant { client, lock, count }),
    ]
}

/// Tries a property; nothing is written to disk.
fn check<S: Strategy>(cases: u32, strategy: S, property: impl Fn(S::Value) -> TestCaseResult)
where
    S::Value: Debug,
{
    let mut config = ProptestConfig {
        failure_persistence: None,
        max_shrink_time: 30_000,
        ..Default::default()
    };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = cases;
    }
    if let Err(failure) = TestRunner::new(config).run(&strategy, property) {
        panic!("{failure}");
    }
}

/// Makes the steps, on locks of their own.
async fn follow(bench: &Bench, ops: &[Op]) -> TestCaseResult {
    let mut world = World::new(bench);
    for (at, op) in ops.iter().enumerate() {
        world
            .step(op)
            .await
            .map_err(|error| TestCaseError::fail(format!("step {at}, {op:?}: {error}")))?;
    }
    world
        .end()
        .await
        .map_err(|error| TestCaseError::fail(format!("the end: {error}")))
}

#[test]
fn every_answer_is_the_models() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let bench = runtime.block_on(Bench::new());
    check(250, prop::collection::vec(op(), 1..25), |ops| {
        runtime.block_on(follow(&bench, &ops))
    });
}

/// Found here: a loss that is owed from an earlier possession was never told where the latest was
/// lost as well.
#[tokio::test]
async fn a_loss_is_told_once_for_each_hold_that_was_lost() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("told"));
    let delete = || {
        redis::cmd("DEL")
            .arg(lock.name())
            .exec(&mut server.connection())
            .unwrap()
    };
    let told = async {
        let _ = lock.lock().await.unwrap().detach();
        delete();
        let guard = lock.lock().await.unwrap();
        delete();
        assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
        // One forgotten hold was lost; the guard was told for itself.
        let mut told = 0;
        while told < 10 && matches!(lock.unlock().await, Err(Error::Lost { .. })) {
            told += 1;
        }
        told
    };
    assert_eq!(told.with_owner(Owner::new()).await, 1);
}
