//! Tests of the judge: what a step of the machine's wall clock excuses. The server measures leases
//! by that clock, the library by the steady one.

use super::history::{CLOCK_SET, Event, MS};
use super::judge::Rule;
use super::scenario::Scenario;

/// Process 1 has the lock from 100 for two seconds. At 505 the server does not have it any more;
/// process 2 is granted it at 520; process 1 reports its loss at 1400.
fn expired_early() -> Scenario {
    let lost = Event::Lost {
        reason: "Gone".into(),
    };
    Scenario::default()
        .granted(100, 1, 1)
        .line(1_400, 1, 1, lost)
        .released(1_500, 1, 1, "lost")
        .granted(520, 2, 1)
        .released(1_100, 2, 1, "ok")
        .server(100, 500, &[(1, 1)])
        .server(520, 1_100, &[(2, 1)])
        .server(1_110, 5_000, &[])
}

#[test]
fn lease_that_ends_early_after_a_clock_step_is_not_accused() {
    let wrong = [
        Rule::Exclusion,
        Rule::NotHeldOnServer,
        Rule::LossNotReported,
        Rule::NotHeldOnServer,
    ];
    expired_early().breaks(&wrong);
    expired_early().fault(490, 505, CLOCK_SET, None).breaks(&[]);
    // The clock was set after the loss.
    expired_early()
        .fault(1_200, 1_210, CLOCK_SET, None)
        .breaks(&wrong);
}

#[test]
fn lease_shortened_by_a_clock_step_is_not_accused() {
    let scenario = || {
        let mut scenario = Scenario::default()
            .granted(100, 1, 1)
            .released(1_000, 1, 1, "ok")
            .server(100, 1_000, &[(1, 1)]);
        let later = scenario
            .0
            .samples
            .iter_mut()
            .filter(|look| look.from > 500 * MS);
        later
            .flat_map(|look| &mut look.held)
            .for_each(|key| key.pttl = 600);
        scenario
    };
    scenario().breaks(&[Rule::NotHeldOnServer]);
    scenario().fault(495, 505, CLOCK_SET, None).breaks(&[]);
}

#[test]
fn clock_step_excuses_one_owner_of_a_lock() {
    // Process 3 loses the lock as well, which it was granted after the step.
    let lost = Event::Lost {
        reason: "Gone".into(),
    };
    Scenario::default()
        .granted(100, 1, 1)
        .line(1_400, 1, 1, lost.clone())
        .released(1_500, 1, 1, "lost")
        .granted(520, 3, 1)
        .line(1_400, 3, 1, lost)
        .released(1_500, 3, 1, "lost")
        .granted(820, 2, 1)
        .released(1_100, 2, 1, "ok")
        .fault(490, 505, CLOCK_SET, None)
        .breaks(&[Rule::Exclusion, Rule::LossNotReported]);
}

#[test]
fn waiter_without_rechecks_behind_a_lease_that_ended_early_is_not_accused() {
    // The waiter knows the old end of the lease, and no message says that the lock is free.
    let scenario = || {
        let mut scenario = Scenario::default()
            .invoked(95, 1, 1)
            .line(100, 1, 1, Event::Granted { remaining: 0 })
            .invoked(150, 3, 1)
            .line(4_000, 3, 1, Event::Granted { remaining: 0 })
            .released(4_005, 3, 1, "ok")
            .server(0, 90, &[])
            .server(100, 500, &[(1, 1)])
            .server(510, 4_000, &[]);
        scenario.0.killed.push((1, 200 * MS));
        scenario
    };
    scenario().breaks(&[Rule::LostWakeup]);
    scenario().fault(490, 505, CLOCK_SET, None).breaks(&[]);
}
