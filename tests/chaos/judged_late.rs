//! Tests of the judge: histories in which a process writes a line long after the event, because it
//! was stopped (SIGSTOP) in between, and histories with long times between two looks.

use super::history::{Event, MS, NO_PUBLISH, Nanos, STOPPED};
use super::judge::Rule;
use super::scenario::{Scenario, owner_of};

fn granted(remaining: Nanos) -> Event {
    Event::Granted {
        remaining: remaining * MS,
    }
}

fn lost(reason: &str) -> Event {
    Event::Lost {
        reason: reason.into(),
    }
}

/// Process 1 has the lock from 100 on the server. It is stopped from 110 to 1100 with the reply
/// unread. A force unlock frees the lock at 1000, and process 2 has it from 1010. Process 1 writes
/// its grant down at 1105 and drops it at 1115.
fn late_grant() -> Scenario {
    let scenario = Scenario::default()
        .invoked(95, 1, 1)
        .fault(110, 1_100, STOPPED, Some(1))
        .line(1_000, 9, 7, Event::Forcing { lock: 0 });
    let forced = Event::Forced {
        outcome: "freed".into(),
    };
    let scenario = scenario
        .line(1_005, 9, 7, forced)
        .line(1_105, 1, 1, granted(990));
    let scenario = scenario.line(1_115, 1, 1, Event::Releasing { how: "drop".into() });
    scenario
        .server(0, 100, &[])
        .server(100, 1_000, &[(1, 1)])
        .server(1_020, 2_000, &[(2, 1)])
}

#[test]
fn grant_written_after_the_next_grant_accuses_no_owner() {
    late_grant()
        .invoked(90, 2, 1)
        .line(1_010, 2, 1, granted(2_000))
        .released(2_000, 2, 1, "ok")
        .server(2_010, 5_000, &[])
        .breaks(&[]);
}

#[test]
fn grant_written_late_and_in_no_look_accuses_no_owner() {
    // The force unlock frees the lock between two looks.
    let mut scenario = late_grant()
        .invoked(90, 2, 1)
        .line(1_010, 2, 1, granted(2_000))
        .released(2_000, 2, 1, "ok");
    for sample in &mut scenario.0.samples {
        sample.held.retain(|key| key.owner != owner_of(1));
    }
    scenario.breaks(&[]);
}

#[test]
fn run_that_continues_after_an_earlier_grant_written_late_is_not_accused() {
    let run = Event::Invoked {
        lock: 0,
        owner: owner_of(2),
        how: "run".into(),
        lease: 2_000 * MS,
        renewed: false,
    };
    let scenario = late_grant()
        .line(90, 2, 1, run)
        .line(1_010, 2, 1, granted(0));
    let scenario = (1_015..2_000).step_by(25).fold(scenario, |scenario, at| {
        scenario.line(at, 2, 1, Event::Worked)
    });
    scenario
        .line(2_000, 2, 1, Event::Releasing { how: "run".into() })
        .line(
            2_005,
            2,
            1,
            Event::Released {
                outcome: "ok".into(),
            },
        )
        .server(2_010, 5_000, &[])
        .breaks(&[]);
}

/// Process 2 has the lock from 1010 to 3010, and process 1, which waits since 90, from 3015. It is
/// stopped with the reply unread and writes its grant down at 3600. The loss of process 2 is
/// written down at that time.
fn late_rival(reported: Nanos) -> Scenario {
    late_rival_of(
        Scenario::default()
            .invoked(1_005, 2, 1)
            .line(1_010, 2, 1, granted(2_000))
            .line(reported, 2, 1, lost("Expired"))
            .released(reported + 10, 2, 1, "lost"),
    )
}

fn late_rival_of(scenario: Scenario) -> Scenario {
    scenario
        .invoked(90, 1, 1)
        .fault(3_030, 3_590, STOPPED, Some(1))
        .line(3_600, 1, 1, granted(1_300))
        .released(3_700, 1, 1, "ok")
        .server(0, 1_000, &[])
        .server(1_020, 3_000, &[(2, 1)])
        .server(3_020, 3_690, &[(1, 1)])
        .server(3_710, 5_000, &[])
}

#[test]
fn loss_not_reported_after_a_grant_written_late_is_accused() {
    // The server shows the grant at 3021, and half a second is for writing the loss down.
    late_rival(3_500).breaks(&[]);
    late_rival(3_560).breaks(&[Rule::LossNotReported]);
    // Neither of two force unlocks explains it.
    late_rival(3_560)
        .line(500, 9, 7, Event::Forcing { lock: 0 })
        .line(
            510,
            9,
            7,
            Event::Forced {
                outcome: "freed".into(),
            },
        )
        .line(1_002, 9, 8, Event::Forcing { lock: 0 })
        .line(
            1_008,
            9,
            8,
            Event::Forced {
                outcome: "freed".into(),
            },
        )
        .breaks(&[Rule::LossNotReported]);
}

#[test]
fn run_that_continues_after_a_grant_written_late_is_accused() {
    let run = |steps: &[Nanos]| {
        let run = Event::Invoked {
            lock: 0,
            owner: owner_of(2),
            how: "run".into(),
            lease: 2_000 * MS,
            renewed: false,
        };
        let scenario = Scenario::default()
            .line(1_005, 2, 1, run)
            .line(1_010, 2, 1, granted(0));
        let scenario = steps.iter().fold(scenario, |scenario, at| {
            scenario.line(*at, 2, 1, Event::Worked)
        });
        let last = steps.last().unwrap_or(&0);
        let scenario = scenario.line(last + 1, 2, 1, lost("Expired")).line(
            last + 1,
            2,
            1,
            Event::TakenBack { why: "lost".into() },
        );
        late_rival_of(scenario)
    };
    run(&[1_015, 3_010, 3_022]).breaks(&[]);
    run(&[1_015, 3_010, 3_022, 3_060]).breaks(&[Rule::RunNotStopped]);
}

/// The lease of process 1's first hold ends at 2110; the same owner is granted the lock again at
/// 2140 and keeps it. The process is stopped from 2150 to 5000, and writes the loss of the first
/// hold down at 5010.
fn late_loss(between: &[(u64, u64)]) -> Scenario {
    let long = Event::Invoked {
        lock: 0,
        owner: owner_of(1),
        how: "lock".into(),
        lease: 20_000 * MS,
        renewed: false,
    };
    Scenario::default()
        .granted(100, 1, 1)
        .line(2_135, 1, 2, long)
        .line(2_140, 1, 2, granted(1_900))
        .fault(2_150, 5_000, STOPPED, Some(1))
        .line(5_010, 1, 1, lost("Gone"))
        .released(5_020, 1, 1, "lost")
        .released(5_430, 1, 2, "ok")
        .server(100, 2_110, &[(1, 1)])
        .server(2_110, 2_130, between)
        .server(2_140, 5_430, &[(1, 1)])
}

#[test]
fn loss_written_late_by_an_owner_that_holds_the_lock_again_is_not_accused() {
    late_loss(&[]).breaks(&[]);
    // The server had the lock for the owner all the time.
    late_loss(&[(1, 1)]).breaks(&[Rule::FalseReport]);
}

#[test]
fn loss_by_a_force_unlock_of_the_own_process_written_late_is_not_accused() {
    let scenario = |stop: Nanos| {
        Scenario::default()
            .granted(100, 1, 1)
            .line(1_000, 1, 7, Event::Forcing { lock: 0 })
            .line(
                1_010,
                1,
                7,
                Event::Forced {
                    outcome: "the server refused".into(),
                },
            )
            .fault(990, 1_005, "memory full", None)
            .fault(stop, stop + 2_000, STOPPED, Some(1))
            .line(stop + 2_005, 1, 1, lost("ForceUnlocked"))
            .released(stop + 2_010, 1, 1, "lost")
            .server(100, stop + 2_005, &[(1, 1)])
    };
    scenario(1_015).breaks(&[]);
    // The process was stopped long after the force unlock.
    scenario(2_100).breaks(&[Rule::FalseReport]);
}

/// Process 1 has the lock until 205. Process 3, which relies on messages, is granted it at 5000.
fn release_without_message() -> Scenario {
    Scenario::default()
        .granted(100, 1, 1)
        .invoked(150, 3, 1)
        .released(205, 1, 1, "ok")
        .line(5_000, 3, 1, granted(0))
        .released(5_005, 3, 1, "ok")
        .server(0, 90, &[])
        .server(100, 200, &[(1, 1)])
}

#[test]
fn release_without_message_seen_late_excuses_the_waiter() {
    // The server answers no look from 200 to 900.
    let scenario = || release_without_message().server(900, 5_000, &[]);
    scenario().fault(190, 300, NO_PUBLISH, Some(1)).breaks(&[]);
    scenario().breaks(&[Rule::LostWakeup]);
    scenario()
        .fault(100, 150, NO_PUBLISH, Some(5))
        .breaks(&[Rule::LostWakeup]);
}

#[test]
fn release_without_message_before_a_gap_in_the_looks_excuses_the_waiter() {
    let scenario = || {
        release_without_message()
            .server(210, 1_000, &[])
            .server(1_500, 5_000, &[])
    };
    scenario().fault(190, 300, NO_PUBLISH, Some(1)).breaks(&[]);
    scenario().breaks(&[Rule::LostWakeup]);
}

#[test]
fn failure_while_no_look_is_answered_is_not_accused() {
    // The machine was busy or its disk slow; no fault was planned.
    let scenario = || {
        let why = "no reply in time".into();
        Scenario::default()
            .invoked(4_000, 1, 1)
            .line(4_550, 1, 1, Event::Unknown { why })
            .server(0, 4_000, &[])
    };
    scenario()
        .server(4_000, 5_000, &[])
        .breaks(&[Rule::FalseReport]);
    scenario()
        .server(4_200, 5_000, &[])
        .breaks(&[Rule::FalseReport]);
    scenario().server(4_500, 5_000, &[]).breaks(&[]);
}

#[test]
fn loss_reported_late_while_no_look_is_answered_is_not_accused() {
    // Process 2 is granted the lock at 2200, so that the loss is due at 2700.
    let scenario = Scenario::default;
    let looks = |scenario: Scenario, again: Nanos| {
        scenario
            .granted(100, 1, 1)
            .granted(2_200, 2, 1)
            .line(2_750, 1, 1, lost("Expired"))
            .released(2_760, 1, 1, "lost")
            .released(2_900, 2, 1, "ok")
            .server(0, 90, &[])
            .server(100, 2_100, &[(1, 1)])
            .server(2_200, 2_300, &[(2, 1)])
            .server(again, 2_900, &[(2, 1)])
            .server(2_910, 5_000, &[])
    };
    looks(scenario(), 2_300).breaks(&[Rule::LossNotReported]);
    looks(scenario(), 2_700).breaks(&[]);
    // A server that is stopped keeps no owner from reporting a loss.
    looks(
        scenario().fault(2_290, 2_690, "server stopped (SIGSTOP)", None),
        2_700,
    )
    .breaks(&[Rule::LossNotReported]);
}

#[test]
fn hold_of_an_unknown_outcome_after_a_fault_that_lasted_longer_is_not_accused() {
    let scenario = |again: Nanos, left: Nanos| {
        let why = "no reply in time".into();
        Scenario::default()
            .invoked(2_400, 1, 1)
            .line(3_850, 1, 1, Event::Unknown { why })
            .fault(2_900, 3_800, "CLIENT PAUSE", None)
            .server(0, 2_400, &[])
            .server(2_400, 2_900, &[(1, 1)])
            .server(again, left, &[(1, 1)])
            .server(left, 8_000, &[])
    };
    // The looks show that the server paused its clients until 4740.
    scenario(4_740, 5_000).breaks(&[]);
    scenario(4_740, 5_800).breaks(&[Rule::Leak]);
    scenario(3_810, 5_000).breaks(&[Rule::Leak]);
}
