//! Tests against models: random sequences of steps on the library and on a reference model of a
//! reentrant lock with leases, with all answers compared.
//!
//! `PROPTEST_CASES` sets the number of sequences, and `PROPTEST_RNG_SEED` repeats a run. A failure
//! prints the shortest sequence found.

mod case;
mod checks;
mod reference;
mod scripts;
mod simple_scripts;
#[path = "../support/mod.rs"]
mod support;

use std::fmt::Debug;

use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};
use redisson_lock::{Error, LockClient, Owner, OwnerExt};

use case::{Case, Fixture};
use support::server::{Server, unique};

/// The number of locks in a case.
const LOCKS: usize = 2;

/// The lease of an acquisition.
#[derive(Debug, Clone, Copy)]
enum Lease {
    Watchdog,
    HalfAnHour,
    TwoHours,
    Short,
}

/// One step. Indices of owners and guards wrap around.
#[derive(Debug, Clone)]
enum Op {
    TryLock {
        owner: usize,
        lock: usize,
        lease: Lease,
        wait: bool,
    },
    /// Outside any scope.
    TryLockOutsideScope {
        client: usize,
        lock: usize,
    },
    /// Two acquisitions at the same time.
    Race {
        one: usize,
        other: usize,
        lock: usize,
    },
    /// `run` inside `run`.
    Run {
        owner: usize,
        lock: usize,
    },
    UnlockGuard {
        guard: usize,
    },
    DropGuard {
        guard: usize,
    },
    Detach {
        guard: usize,
    },
    Unlock {
        owner: usize,
        lock: usize,
    },
    ForceUnlock {
        client: usize,
        lock: usize,
    },
    /// The server loses the key.
    LoseKey {
        lock: usize,
        expire: bool,
    },
    /// Another process hands holds over to an owner of this client.
    HandOver {
        client: usize,
        lock: usize,
        count: u8,
    },
}

fn op() -> impl Strategy<Value = Op> {
    // Each case begins with six owners: for each of the two clients two private ones and one made
    // from a thread id.
    let owner = || prop_oneof![4 => 0..6_usize, 1 => 6..12_usize];
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
        12 => (owner(), lock(), lease, any::<bool>())
            .prop_map(|(owner, lock, lease, wait)| Op::TryLock { owner, lock, lease, wait }),
        2 => (client(), lock()).prop_map(|(client, lock)| Op::TryLockOutsideScope { client, lock }),
        2 => (owner(), owner(), lock()).prop_map(|(one, other, lock)| Op::Race { one, other, lock }),
        2 => (owner(), lock()).prop_map(|(owner, lock)| Op::Run { owner, lock }),
        4 => guard().prop_map(|guard| Op::UnlockGuard { guard }),
        4 => guard().prop_map(|guard| Op::DropGuard { guard }),
        3 => guard().prop_map(|guard| Op::Detach { guard }),
        4 => (owner(), lock()).prop_map(|(owner, lock)| Op::Unlock { owner, lock }),
        1 => (client(), lock()).prop_map(|(client, lock)| Op::ForceUnlock { client, lock }),
        2 => (lock(), any::<bool>()).prop_map(|(lock, expire)| Op::LoseKey { lock, expire }),
        2 => (client(), lock(), 1..4_u8).prop_map(|(client, lock, count)| Op::HandOver { client, lock, count }),
    ]
}

/// Checks a property with random values. Nothing is written to disk.
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

/// Runs one case, on locks of its own.
async fn run_case(fixture: &Fixture, ops: &[Op]) -> TestCaseResult {
    let mut case = Case::new(fixture);
    for (at, op) in ops.iter().enumerate() {
        case.step(op)
            .await
            .map_err(|error| TestCaseError::fail(format!("step {at}, {op:?}: {error}")))?;
    }
    case.end()
        .await
        .map_err(|error| TestCaseError::fail(format!("final releases: {error}")))
}

#[test]
fn random_steps_match_reference_model() {
    check_cases(250, prop::collection::vec(op(), 1..25));
}

/// The guard of a tenure that began with holds that were handed over is lost with them.
#[test]
fn unlock_after_loss_of_handed_over_holds_matches_reference_model() {
    let (lock, wait, lease) = (0, false, Lease::Watchdog);
    let try_lock = |owner| Op::TryLock {
        owner,
        lock,
        lease,
        wait,
    };
    let hand_over = Op::HandOver {
        client: 1,
        lock,
        count: 1,
    };
    let steps = vec![
        hand_over.clone(),
        try_lock(5),
        Op::ForceUnlock { client: 0, lock },
        try_lock(0),
        try_lock(5),
        Op::Unlock { owner: 5, lock },
    ];
    let handed_over_again = [
        vec![hand_over.clone(), try_lock(5)],
        vec![Op::LoseKey {
            lock,
            expire: false,
        }],
        vec![try_lock(0), try_lock(5), Op::UnlockGuard { guard: 1 }],
        vec![hand_over, Op::Unlock { owner: 5, lock }],
    ];
    check_cases(1, Just(steps));
    check_cases(1, Just(handed_over_again.concat()));
}

/// A detached hold was lost with one tenure, and a guard is lost with the next.
#[test]
fn unlock_after_losses_of_two_tenures_matches_reference_model() {
    let (lock, wait) = (0, false);
    let try_lock = |lease| Op::TryLock {
        owner: 4,
        lock,
        lease,
        wait,
    };
    let unlock = Op::Unlock { owner: 4, lock };
    let steps = vec![
        try_lock(Lease::Watchdog),
        Op::Detach { guard: 0 },
        Op::ForceUnlock { client: 0, lock },
        try_lock(Lease::Short),
        unlock.clone(),
        unlock,
    ];
    check_cases(1, Just(steps));
}

fn check_cases(cases: u32, steps: impl Strategy<Value = Vec<Op>>) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let fixture = runtime.block_on(Fixture::new());
    check(cases, steps, |ops| {
        runtime.block_on(run_case(&fixture, &ops))
    });
}

/// A detached hold is lost with one tenure and a guard with the next: both losses are reported.
#[tokio::test]
async fn lost_detached_hold_is_reported_once() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("detached"));
    let delete = || {
        redis::cmd("DEL")
            .arg(lock.name())
            .exec(&mut server.connection())
            .unwrap()
    };
    let reports = async {
        let _ = lock.lock().await.unwrap().detach();
        delete();
        let guard = lock.lock().await.unwrap();
        delete();
        assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
        // One detached hold was lost; the guard has reported its own loss.
        let mut reports = 0;
        while reports < 10 && matches!(lock.unlock().await, Err(Error::Lost { .. })) {
            reports += 1;
        }
        reports
    };
    assert_eq!(reports.with_owner(Owner::new()).await, 1);
}
