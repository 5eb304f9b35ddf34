//! Arbitrary names, leases, URLs, counts and ids: each is refused with a typed error, or it works.
//!
//! `PROPTEST_CASES` sets the number of cases, and `PROPTEST_RNG_SEED` repeats a run.

mod arguments;
mod urls;

use std::fmt::Debug;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};
use redisson_lock::{LockClient, LockClientBuilder};

/// The limit for every step that is waited for.
const LIMIT: Duration = Duration::from_secs(20);

/// Longer than any test.
const NEVER: Duration = Duration::from_secs(3600);

const LONGEST: Duration = Duration::from_secs(3650 * 24 * 3600);

/// A client that sends nothing on its own: no reply is late, no renewal and no re-check is due.
fn quiet() -> LockClientBuilder {
    LockClient::builder()
        .watchdog_timeout(NEVER)
        .command_timeout(3 * LIMIT)
        .recheck_interval(NEVER)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
}

/// Checks a property. Nothing is written to disk.
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

/// Text with characters that parsers and formatters often mishandle.
fn odd_text(longest: usize) -> impl Strategy<Value = String> {
    let odd = prop::sample::select(
        "{}\0\r\n\t \"'\\:/@?#%*[]$+-0\u{7f}\u{85}\u{a0}\u{202e}\u{2028}\u{feff}\u{301}\u{10ffff}é🧀"
            .chars()
            .collect::<Vec<_>>(),
    );
    let one = prop_oneof![3 => odd, 2 => any::<char>(), 2 => prop::char::range('a', 'f')];
    prop::collection::vec(one, 0..longest).prop_map(|text| text.into_iter().collect())
}

/// A duration: at the bounds, short, or far beyond them.
fn any_duration() -> impl Strategy<Value = Duration> {
    let at = |bound: Duration| {
        (0..3_u64).prop_map(move |nanos| {
            (bound + Duration::from_nanos(nanos)).saturating_sub(Duration::from_nanos(1))
        })
    };
    prop_oneof![
        2 => at(Duration::ZERO),
        2 => at(Duration::from_millis(1)),
        2 => at(LONGEST),
        1 => Just(Duration::MAX),
        2 => any::<u64>().prop_map(Duration::from_nanos),
        1 => any::<u64>().prop_map(Duration::from_millis),
        2 => (any::<u64>(), 0..1_000_000_000_u32).prop_map(|(secs, nanos)| Duration::new(secs, nanos)),
        4 => (0..5_000_000_u64).prop_map(Duration::from_nanos),
        4 => (1_000_000..100_000_000_000_u64).prop_map(Duration::from_micros),
    ]
}
