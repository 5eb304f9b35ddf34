//! Tests of the judge: what a force unlock excuses, and what it does not.

use super::history::{Event, MS, Nanos};
use super::judge::Rule;
use super::scenario::{Scenario, owner_of};

impl Scenario {
    /// Adds a force unlock of lock 0 by process 9.
    fn forced(self, from: Nanos, to: Nanos, outcome: &str) -> Self {
        let scenario = self.line(from, 9, 7, Event::Forcing { lock: 0 });
        scenario.line(
            to,
            9,
            7,
            Event::Forced {
                outcome: outcome.into(),
            },
        )
    }

    fn sure(self, at: Nanos, process: u64, until: Nanos) -> Self {
        self.line(
            at,
            process,
            1,
            Event::Sure {
                remaining: (until - at) * MS,
            },
        )
    }

    fn lost(self, at: Nanos, process: u64) -> Self {
        self.line(
            at,
            process,
            1,
            Event::Lost {
                reason: "Gone".into(),
            },
        )
    }
}

/// Process 1 has the lock from 100 for two seconds. Process 2 has it from 1020. Process 1 reports
/// its loss at 1400.
fn taken_over() -> Scenario {
    let scenario = Scenario::default()
        .granted(100, 1, 1)
        .lost(1_400, 1)
        .released(1_500, 1, 1, "lost");
    scenario.granted(1_020, 2, 1).released(1_100, 2, 1, "ok")
}

#[test]
fn two_owners_sure_after_a_force_unlock_are_not_accused() {
    taken_over().breaks(&[Rule::Exclusion]);
    taken_over().forced(1_000, 1_010, "freed").breaks(&[]);
    taken_over().forced(1_000, 1_010, "unknown").breaks(&[]);
    taken_over()
        .forced(1_000, 1_010, "free")
        .breaks(&[Rule::FalseReport, Rule::Exclusion]);
    // A force unlock of another lock, or after the second grant.
    let other = taken_over().line(1_000, 9, 7, Event::Forcing { lock: 1 });
    other
        .line(
            1_010,
            9,
            7,
            Event::Forced {
                outcome: "freed".into(),
            },
        )
        .breaks(&[Rule::Exclusion]);
    taken_over()
        .forced(1_030, 1_040, "freed")
        .breaks(&[Rule::Exclusion]);
}

#[test]
fn claim_after_a_reported_force_unlock_is_accused() {
    taken_over()
        .forced(1_000, 1_010, "freed")
        .sure(1_390, 1, 2_090)
        .breaks(&[]);
    taken_over()
        .forced(1_000, 1_010, "freed")
        .sure(1_410, 1, 2_090)
        .breaks(&[Rule::FalseReport]);
}

#[test]
fn loss_by_force_unlock_not_reported_is_accused() {
    // The lease ends at 3010, and half a second is for writing the loss down.
    let scenario = |reported| {
        Scenario::default()
            .granted(100, 1, 1)
            .lost(reported, 1)
            .released(9_000, 1, 1, "lost")
    };
    let scenario = |reported| {
        scenario(reported)
            .forced(1_000, 1_010, "freed")
            .granted(2_200, 2, 1)
            .released(2_300, 2, 1, "ok")
    };
    scenario(3_400).breaks(&[]);
    scenario(3_600).breaks(&[Rule::LossNotReported]);
    // The owner makes another claim.
    scenario(3_400)
        .sure(3_300, 1, 3_800)
        .granted(3_500, 3, 1)
        .released(3_600, 3, 1, "ok")
        .breaks(&[Rule::Exclusion]);
}

#[test]
fn force_unlock_excuses_one_owner() {
    // Two more owners have the lock at once.
    let scenario = || {
        taken_over()
            .forced(1_000, 1_010, "freed")
            .granted(1_050, 3, 1)
            .released(1_090, 3, 1, "ok")
    };
    scenario().breaks(&[Rule::Exclusion]);
    // All three waited before, so each of them may be the excused one, but not two of them.
    let three = |granted: [Nanos; 3]| {
        let scenario = Scenario::default().forced(1_000, 1_010, "freed");
        granted
            .into_iter()
            .zip(1..)
            .fold(scenario, |scenario, (at, process)| {
                let granted = Event::Granted {
                    remaining: 2_000 * MS,
                };
                scenario
                    .invoked(90, process, 1)
                    .line(at, process, 1, granted)
                    .released(1_500, process, 1, "ok")
            })
    };
    three([1_020, 1_030, 1_040]).breaks(&[Rule::Exclusion]);
    three([1_020, 1_030, 1_600])
        .released(1_700, 3, 1, "ok")
        .breaks(&[]);
}

#[test]
fn two_force_unlocks_excuse_one_owner_each() {
    // Process 3 waited before both force unlocks, so either may have ended its tenure. Only the
    // second one can have.
    let scenario = |second: &str| {
        let scenario = taken_over().forced(1_000, 1_010, "freed").line(
            1_600,
            8,
            7,
            Event::Forcing { lock: 0 },
        );
        let scenario = scenario
            .line(
                1_610,
                8,
                7,
                Event::Forced {
                    outcome: second.into(),
                },
            )
            .invoked(90, 3, 1);
        let scenario = scenario
            .line(
                1_550,
                3,
                1,
                Event::Granted {
                    remaining: 1_000 * MS,
                },
            )
            .lost(2_100, 3);
        let scenario = scenario
            .released(2_300, 3, 1, "lost")
            .granted(1_620, 4, 1)
            .granted(1_650, 4, 2)
            .granted(1_660, 4, 3);
        scenario
            .released(1_700, 4, 1, "ok")
            .released(1_710, 4, 2, "ok")
            .released(1_720, 4, 3, "ok")
    };
    scenario("freed").breaks(&[]);
    scenario("free").breaks(&[Rule::FalseReport, Rule::Exclusion]);
}

#[test]
fn owner_in_a_look_after_the_force_unlock_is_not_excused() {
    let scenario = |process| {
        let scenario = Scenario::default().forced(1_000, 1_010, "freed");
        let scenario = scenario
            .server(1_050, 1_060, &[(process, 1)])
            .granted(100, 1, 1)
            .released(1_500, 1, 1, "ok");
        scenario.granted(1_030, 2, 1).released(1_500, 2, 1, "ok")
    };
    scenario(2).breaks(&[]);
    scenario(1).breaks(&[Rule::Exclusion, Rule::NotHeldOnServer]);
}

#[test]
fn steps_counts_and_updates_after_a_force_unlock_are_excused_for_a_while() {
    let run = |last: Nanos| {
        let run = Event::Invoked {
            lock: 0,
            owner: owner_of(1),
            how: "run".into(),
            lease: 2_000 * MS,
            renewed: false,
        };
        let scenario = Scenario::default().line(95, 1, 1, run).line(
            100,
            1,
            1,
            Event::Granted { remaining: 0 },
        );
        let scenario = [150, 1_030, last]
            .into_iter()
            .fold(scenario, |scenario, at| {
                scenario.line(at, 1, 1, Event::Worked)
            });
        let scenario = scenario.lost(last + 1, 1).line(
            last + 1,
            1,
            1,
            Event::TakenBack { why: "lost".into() },
        );
        scenario.granted(1_020, 2, 1).released(1_100, 2, 1, "ok")
    };
    run(1_400).breaks(&[Rule::RunNotStopped]);
    run(1_400).forced(1_000, 1_010, "freed").breaks(&[]);
    run(3_100)
        .forced(1_000, 1_010, "freed")
        .breaks(&[Rule::RunNotStopped]);

    let count = || {
        taken_over().line(
            1_200,
            1,
            1,
            Event::Count {
                expected: 1,
                found: 0,
            },
        )
    };
    count().forced(1_000, 1_010, "freed").breaks(&[]);
    count().breaks(&[Rule::Exclusion, Rule::WrongCount]);

    let update = || {
        taken_over()
            .section(1_030, 1_040, 2, 1, 0, true)
            .section(1_035, 1_045, 1, 1, 0, true)
    };
    update().forced(1_000, 1_010, "freed").breaks(&[]);
    update().breaks(&[Rule::Exclusion, Rule::LostUpdate]);
}

#[test]
fn loss_reported_around_a_force_unlock_is_not_accused() {
    let reported = |at| {
        Scenario::default()
            .granted(100, 1, 1)
            .lost(at, 1)
            .released(at + 5, 1, 1, "lost")
            .server(100, at, &[(1, 1)])
    };
    reported(1_020).breaks(&[Rule::FalseReport]);
    reported(1_005).forced(1_000, 1_010, "freed").breaks(&[]);
    // The report came before the force unlock.
    reported(990)
        .forced(1_000, 1_010, "freed")
        .breaks(&[Rule::FalseReport]);
    // A force unlock reports the loss to the owners of its process first, and may then fail.
    let lost_here = |process| {
        let scenario = reported(1_005).line(1_000, process, 7, Event::Forcing { lock: 0 });
        scenario.line(
            1_010,
            process,
            7,
            Event::Forced {
                outcome: "the server refused".into(),
            },
        )
    };
    lost_here(1).breaks(&[]);
    lost_here(9).breaks(&[Rule::FalseReport]);
}

#[test]
fn lease_of_an_earlier_tenure_does_not_extend_the_excuse() {
    // The owner had a lease of 20 s once and released it. Then it has a lease of two seconds, which
    // it claims again and again.
    let scenario = |released: Nanos| {
        let long = Event::Invoked {
            lock: 0,
            owner: owner_of(1),
            how: "lock".into(),
            lease: 20_000 * MS,
            renewed: false,
        };
        let scenario = Scenario::default().line(10, 1, 9, long).line(
            15,
            1,
            9,
            Event::Granted {
                remaining: 19_000 * MS,
            },
        );
        let scenario = scenario
            .released(released, 1, 9, "ok")
            .granted(100, 1, 1)
            .forced(1_000, 1_010, "freed");
        let scenario = (500..8_000)
            .step_by(500)
            .fold(scenario, |scenario, at| scenario.sure(at, 1, at + 1_500));
        let scenario = scenario
            .granted(1_020, 2, 1)
            .sure(3_000, 2, 4_900)
            .released(4_000, 2, 1, "ok");
        scenario.lost(9_000, 1).released(9_010, 1, 1, "lost")
    };
    scenario(30).breaks(&[Rule::Exclusion, Rule::LossNotReported]);
    // The second acquire was a re-entry, and the longer lease still counts.
    scenario(200).breaks(&[]);
}

#[test]
fn force_unlock_with_a_wrong_outcome_is_accused() {
    let scenario = |outcome| {
        let scenario = Scenario::default()
            .granted(100, 1, 1)
            .forced(1_000, 1_010, outcome)
            .released(1_900, 1, 1, "ok");
        scenario.server(0, 90, &[])
    };
    let held = |outcome| {
        scenario(outcome)
            .server(100, 1_900, &[(1, 1)])
            .server(1_910, 4_000, &[])
    };
    held("freed").breaks(&[Rule::FalseReport]);
    held("free").breaks(&[Rule::FalseReport]);
    held("unknown").breaks(&[]);
    // The owner may have acquired the lock again.
    let again = held("freed").invoked(990, 1, 2).line(
        1_008,
        1,
        2,
        Event::Granted {
            remaining: 2_000 * MS,
        },
    );
    again.released(1_200, 1, 2, "ok").breaks(&[]);
    // Another force unlock had freed the lock before.
    let before = scenario("free").line(500, 8, 7, Event::Forcing { lock: 0 });
    before
        .line(
            510,
            8,
            7,
            Event::Forced {
                outcome: "freed".into(),
            },
        )
        .server(100, 490, &[(1, 1)])
        .breaks(&[]);
    // Another force unlock freed the lock at the same time, or after it.
    let both = |from| {
        let both = scenario("free").line(from, 8, 7, Event::Forcing { lock: 0 });
        both.line(
            from + 2,
            8,
            7,
            Event::Forced {
                outcome: "freed".into(),
            },
        )
        .server(100, 990, &[(1, 1)])
    };
    both(1_005).breaks(&[]);
    both(1_015).breaks(&[Rule::FalseReport]);
    // The force unlock freed the lock; or the lock had no owner.
    let freed = Scenario::default()
        .granted(100, 1, 1)
        .lost(1_005, 1)
        .released(1_015, 1, 1, "lost")
        .server(0, 90, &[]);
    freed
        .server(100, 1_000, &[(1, 1)])
        .server(1_010, 4_000, &[])
        .forced(1_000, 1_010, "freed")
        .breaks(&[]);
    Scenario::default()
        .forced(1_000, 1_010, "free")
        .server(0, 4_000, &[])
        .breaks(&[]);
}

#[test]
fn loss_by_force_unlock_not_reported_by_the_next_renewal_is_accused() {
    // A third of the lease after the force unlock is 1677.
    let scenario = |reported| {
        let scenario = Scenario::default()
            .granted(100, 1, 1)
            .renewed()
            .forced(1_000, 1_010, "freed");
        let scenario = scenario
            .granted(1_020, 2, 1)
            .released(2_900, 2, 1, "ok")
            .server(1_030, 2_890, &[(2, 1)]);
        scenario
            .lost(reported, 1)
            .released(reported + 10, 1, 1, "lost")
    };
    scenario(2_150).breaks(&[]);
    scenario(2_250).breaks(&[Rule::LossNotReported]);
    scenario(2_250)
        .fault(1_200, 1_700, "replies held", Some(1))
        .breaks(&[]);
    scenario(2_250)
        .fault(1_200, 1_700, "replies held", Some(2))
        .breaks(&[Rule::LossNotReported]);
}

#[test]
fn acquire_that_fails_beside_a_force_unlock_is_accused() {
    // A force unlock ends the tenure of process 1, whose run continues for a while. The acquire of
    // process 3 fails meanwhile. A force unlock is no reason for that.
    let run = Event::Invoked {
        lock: 0,
        owner: owner_of(1),
        how: "run".into(),
        lease: 2_000 * MS,
        renewed: false,
    };
    let scenario =
        Scenario::default()
            .line(95, 1, 1, run)
            .line(100, 1, 1, Event::Granted { remaining: 0 });
    let scenario = [150, 1_030, 1_100, 1_400]
        .into_iter()
        .fold(scenario, |scenario, at| {
            scenario.line(at, 1, 1, Event::Worked)
        });
    let scenario =
        scenario
            .lost(1_401, 1)
            .line(1_401, 1, 1, Event::TakenBack { why: "lost".into() });
    let scenario = scenario
        .granted(1_020, 2, 1)
        .released(1_100, 2, 1, "ok")
        .forced(1_000, 1_010, "freed");
    let timed_out = Event::Failed {
        why: "timed out".into(),
    };
    scenario
        .invoked(200, 3, 1)
        .line(1_005, 3, 1, timed_out)
        .breaks(&[Rule::FalseReport]);
}
