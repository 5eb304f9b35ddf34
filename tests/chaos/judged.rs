//! Tests of the judge: histories made by hand that violate one rule each, and correct ones that
//! look similar.

use std::collections::BTreeSet;

use super::history::{Event, MS, NO_CHANNEL, NO_PUBLISH, NO_SCRIPTS, Nanos};
use super::judge::{Rule, judge};
use super::scenario::{Scenario, owner_of};

#[test]
fn history_without_violation_is_not_accused() {
    Scenario::default()
        .granted(100, 1, 1)
        .invoked(120, 1, 2)
        .line(
            125,
            1,
            2,
            Event::Granted {
                remaining: 2_000 * MS,
            },
        )
        .line(
            126,
            1,
            2,
            Event::Count {
                expected: 2,
                found: 2,
            },
        )
        .section(130, 140, 1, 1, 0, true)
        .released(150, 1, 2, "ok")
        .released(170, 1, 1, "ok")
        .granted(190, 2, 1)
        .section(191, 195, 2, 1, 1, true)
        .released(200, 2, 1, "ok")
        .invoked(210, 1, 3)
        .line(
            220,
            1,
            3,
            Event::Failed {
                why: "contended".into(),
            },
        )
        .line(
            900,
            1,
            0,
            Event::Ended {
                tasks: 0,
                shutdown: "ok".into(),
            },
        )
        .server(0, 90, &[])
        .server(100, 120, &[(1, 1)])
        .server(130, 150, &[(1, 2)])
        .server(160, 170, &[(1, 1)])
        .server(190, 200, &[(2, 1)])
        .server(210, 5_000, &[])
        .breaks(&[]);
}

#[test]
fn two_owners_sure_at_once_are_accused() {
    // The claim of the first owner lasts until 2100, and its release was not confirmed.
    Scenario::default()
        .granted(100, 1, 1)
        .granted(1_000, 2, 1)
        .released(1_100, 2, 1, "ok")
        .released(1_200, 1, 1, "lost")
        .breaks(&[Rule::Exclusion]);
}

#[test]
fn unlock_confirmed_after_another_grant_is_accused() {
    let scenario = |outcome| {
        Scenario::default()
            .granted(100, 1, 1)
            .granted(2_200, 2, 1)
            .released(2_300, 2, 1, "ok")
            .released(2_400, 1, 1, outcome)
    };
    scenario("ok").breaks(&[Rule::Exclusion]);
    scenario("lost").breaks(&[]);
}

#[test]
fn grant_after_the_end_of_a_lease_is_not_accused() {
    // A process that was killed or stopped claims nothing.
    let mut scenario = Scenario::default()
        .granted(100, 1, 1)
        .granted(2_200, 2, 1)
        .released(2_300, 2, 1, "ok");
    scenario.0.killed.push((1, 300 * MS));
    scenario.breaks(&[]);
    Scenario::default()
        .granted(100, 1, 1)
        .fault(200, 2_500, "worker stopped (SIGSTOP)", Some(1))
        .granted(2_200, 2, 1)
        .released(2_300, 2, 1, "ok")
        .line(
            2_600,
            1,
            1,
            Event::Lost {
                reason: "Expired".into(),
            },
        )
        .released(2_700, 1, 1, "lost")
        .breaks(&[]);
}

#[test]
fn owner_without_hold_on_the_server_is_accused() {
    Scenario::default()
        .granted(100, 1, 1)
        .released(500, 1, 1, "ok")
        .server(110, 200, &[])
        .breaks(&[Rule::NotHeldOnServer]);
    // The server has the hold, but with a shorter lease than the owner claims.
    let mut scenario = Scenario::default()
        .granted(100, 1, 1)
        .released(500, 1, 1, "ok")
        .server(110, 120, &[(1, 1)]);
    scenario.0.samples[0].held[0].pttl = 1_900;
    scenario.breaks(&[Rule::NotHeldOnServer]);
    // Looks before the grant and after the begin of the release do not matter.
    Scenario::default()
        .granted(100, 1, 1)
        .released(500, 1, 1, "ok")
        .server(0, 100, &[])
        .server(500, 600, &[])
        .breaks(&[]);
}

#[test]
fn loss_not_reported_after_another_grant_is_accused() {
    let scenario = || {
        Scenario::default()
            .granted(100, 1, 1)
            .granted(2_200, 2, 1)
            .released(2_300, 2, 1, "ok")
            .released(9_000, 1, 1, "lost")
    };
    scenario().breaks(&[Rule::LossNotReported]);
    scenario()
        .line(
            2_150,
            1,
            1,
            Event::Lost {
                reason: "Expired".into(),
            },
        )
        .breaks(&[]);
    // A broken connection is no excuse. A stopped process is one.
    scenario()
        .fault(200, 8_000, "both ways held", Some(1))
        .breaks(&[Rule::LossNotReported]);
    scenario()
        .fault(200, 8_000, "worker stopped (SIGSTOP)", Some(1))
        .breaks(&[]);
}

#[test]
fn run_that_continues_after_another_grant_is_accused() {
    let scenario = |steps: &[Nanos]| {
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
        let scenario = steps.iter().fold(scenario, |scenario, at| {
            scenario.line(*at, 1, 1, Event::Worked)
        });
        let lost = Event::Lost {
            reason: "Expired".into(),
        };
        let reported = steps.last().map_or(0, |last| last + 20);
        let scenario = scenario.line(reported, 1, 1, lost).line(
            reported,
            1,
            1,
            Event::TakenBack { why: "lost".into() },
        );
        scenario.granted(2_200, 2, 1).released(2_300, 2, 1, "ok")
    };
    // The step at 2201 began before the grant.
    scenario(&[150, 2_150, 2_201]).breaks(&[]);
    scenario(&[150, 2_150, 2_201, 2_230]).breaks(&[Rule::RunNotStopped]);
    // A process that was stopped begins no further step either.
    scenario(&[150, 2_601, 2_602])
        .fault(160, 2_600, "worker stopped (SIGSTOP)", Some(1))
        .breaks(&[Rule::RunNotStopped]);
    scenario(&[150, 2_601])
        .fault(160, 2_600, "worker stopped (SIGSTOP)", Some(1))
        .breaks(&[]);
}

#[test]
fn hold_without_attempt_is_accused() {
    let scenario = || {
        Scenario::default()
            .granted(100, 1, 1)
            .released(200, 1, 1, "ok")
    };
    scenario().server(300, 310, &[(1, 1)]).breaks(&[Rule::Leak]);
    // One hold too many.
    scenario().server(110, 120, &[(1, 2)]).breaks(&[Rule::Leak]);
    // An owner without any attempt.
    scenario().server(300, 310, &[(7, 1)]).breaks(&[Rule::Leak]);
}

#[test]
fn failed_acquire_that_left_a_hold_is_accused() {
    let failed = Event::Failed {
        why: "contended".into(),
    };
    Scenario::default()
        .invoked(100, 1, 1)
        .line(200, 1, 1, failed)
        .server(250, 260, &[(1, 1)])
        .breaks(&[Rule::Leak]);
}

#[test]
fn unknown_outcome_not_settled_after_the_faults_is_accused() {
    let unknown = Event::Unknown {
        why: "no answer".into(),
    };
    let scenario = || {
        Scenario::default()
            .invoked(100, 1, 1)
            .line(200, 1, 1, unknown.clone())
            .fault(50, 4_000, "requests held", Some(1))
    };
    scenario().server(4_900, 4_910, &[(1, 1)]).breaks(&[]);
    scenario()
        .server(5_100, 5_110, &[(1, 1)])
        .breaks(&[Rule::Leak]);
    // The caller dropped the future, and no fault happened.
    let left = || {
        Scenario::default()
            .invoked(100, 1, 1)
            .line(200, 1, 1, Event::Cancelled)
    };
    left().server(2_300, 2_310, &[(1, 1)]).breaks(&[Rule::Leak]);
    // A fault of another process excuses nothing.
    left()
        .fault(50, 4_000, "requests held", Some(2))
        .server(2_300, 2_310, &[(1, 1)])
        .breaks(&[Rule::Leak]);
}

#[test]
fn lease_of_a_killed_process_that_does_not_end_is_accused() {
    let killed = || {
        let mut scenario = Scenario::default().granted(100, 1, 1);
        scenario.0.killed.push((1, 500 * MS));
        scenario
    };
    killed().server(2_300, 2_310, &[(1, 1)]).breaks(&[]);
    killed()
        .server(3_600, 3_610, &[(1, 1)])
        .breaks(&[Rule::Leak]);
    // Its call is held by one fault, and then by another one.
    let held = |next| {
        killed()
            .fault(400, 1_000, "both ways held", Some(1))
            .fault(next, 4_000, "old connections stalled", Some(1))
            .server(6_900, 6_910, &[(1, 1)])
    };
    held(1_001).breaks(&[]);
    held(1_600).breaks(&[Rule::Leak]);
    held(1_001)
        .server(7_100, 7_110, &[(1, 1)])
        .breaks(&[Rule::Leak]);
}

#[test]
fn key_without_expiry_is_accused() {
    let mut scenario = Scenario::default()
        .granted(100, 1, 1)
        .released(200, 1, 1, "ok")
        .server(110, 120, &[(1, 1)]);
    scenario.0.samples[0].held[0].pttl = -1;
    scenario.breaks(&[Rule::NoExpiry]);
}

#[test]
fn wrong_hold_count_is_accused() {
    let count = Event::Count {
        expected: 2,
        found: 1,
    };
    Scenario::default()
        .granted(100, 1, 1)
        .line(110, 1, 1, count)
        .released(200, 1, 1, "ok")
        .breaks(&[Rule::WrongCount]);
}

#[test]
fn unlock_after_a_reported_loss_that_succeeds_is_accused() {
    let lost = Event::Lost {
        reason: "Gone".into(),
    };
    let scenario = |reported| {
        Scenario::default()
            .granted(100, 1, 1)
            .line(reported, 1, 1, lost.clone())
            .released(400, 1, 1, "ok")
    };
    scenario(300).breaks(&[Rule::FalseReport]);
    scenario(401).breaks(&[]);
}

#[test]
fn waiter_for_a_free_lock_is_accused() {
    let scenario = |granted| {
        let scenario = Scenario::default()
            .granted(100, 1, 1)
            .invoked(150, 2, 1)
            .released(200, 1, 1, "ok");
        let scenario = scenario
            .line(granted, 2, 1, Event::Granted { remaining: 0 })
            .released(granted + 5, 2, 1, "ok");
        scenario
            .server(0, 90, &[])
            .server(100, 200, &[(1, 1)])
            .server(210, granted, &[])
    };
    scenario(400).breaks(&[]);
    scenario(2_500).breaks(&[Rule::LostWakeup]);
    // A fault of the waiter's process excuses it, for a while.
    scenario(2_500)
        .fault(190, 300, "replies held", Some(2))
        .breaks(&[]);
    scenario(2_500)
        .fault(190, 300, "replies held", Some(1))
        .breaks(&[Rule::LostWakeup]);
    scenario(4_000)
        .fault(190, 300, "CLIENT KILL", None)
        .breaks(&[Rule::LostWakeup]);
    // A fault without effect excuses nothing.
    let mut idle = scenario(2_500).fault(190, 300, "reply swallowed", Some(2));
    idle.0.faults[0].met = false;
    idle.breaks(&[Rule::LostWakeup]);
    // The wait queue in its process moves.
    scenario(2_500)
        .granted(1_303, 2, 2)
        .released(1_307, 2, 2, "ok")
        .breaks(&[]);
}

#[test]
fn release_without_message_excuses_waiters_without_rechecks() {
    let long = |waiter, to: u64| {
        let scenario = Scenario::default()
            .granted(100, 1, 1)
            .invoked(150, waiter, 1)
            .released(200, 1, 1, "ok");
        let scenario = scenario
            .line(to, waiter, 1, Event::Granted { remaining: 0 })
            .released(to + 5, waiter, 1, "ok");
        scenario
            .server(0, 90, &[])
            .server(100, 200, &[(1, 1)])
            .server(210, to, &[])
    };
    let scenario = |waiter| long(waiter, 4_000);
    scenario(3).breaks(&[Rule::LostWakeup]);
    scenario(3).fault(190, 300, NO_PUBLISH, Some(1)).breaks(&[]);
    // Another process could not publish, or the process could not publish at another time.
    scenario(3)
        .fault(190, 300, NO_PUBLISH, Some(5))
        .breaks(&[Rule::LostWakeup]);
    scenario(3)
        .fault(600, 700, NO_PUBLISH, Some(1))
        .breaks(&[Rule::LostWakeup]);
    // A waiter without a subscription is excused only if it relies on messages.
    scenario(3).fault(140, 160, NO_CHANNEL, Some(3)).breaks(&[]);
    // The client subscribes again after a while.
    long(3, 8_000)
        .fault(140, 160, NO_CHANNEL, Some(3))
        .breaks(&[Rule::LostWakeup]);
    for kind in [NO_PUBLISH, NO_CHANNEL] {
        scenario(2)
            .fault(190, 300, kind, Some(1))
            .breaks(&[Rule::LostWakeup]);
        scenario(2)
            .fault(140, 160, kind, Some(2))
            .breaks(&[Rule::LostWakeup]);
    }
}

#[test]
fn unseen_release_without_message_excuses_waiters_without_rechecks() {
    // The release at 199 woke the waiter, which came too late. Process 5 had the lock then and
    // could not publish.
    let scenario = |begins: Nanos| {
        let scenario = Scenario::default()
            .granted(100, 1, 1)
            .invoked(150, 3, 1)
            .released(199, 1, 1, "ok");
        let scenario = scenario
            .granted(begins, 5, 1)
            .released(begins + 2, 5, 1, "ok");
        let scenario = scenario
            .line(4_000, 3, 1, Event::Granted { remaining: 0 })
            .released(4_005, 3, 1, "ok");
        scenario
            .server(0, 90, &[])
            .server(100, 200, &[(1, 1)])
            .server(212, 4_000, &[])
    };
    scenario(204)
        .fault(190, 300, NO_PUBLISH, Some(5))
        .breaks(&[]);
    scenario(215)
        .fault(190, 300, NO_PUBLISH, Some(5))
        .breaks(&[]);
    scenario(204).breaks(&[Rule::LostWakeup]);
    scenario(204)
        .fault(190, 300, NO_PUBLISH, Some(7))
        .breaks(&[Rule::LostWakeup]);
    scenario(130).fault(100, 300, NO_PUBLISH, Some(5)).breaks(&[
        Rule::Exclusion,
        Rule::NotHeldOnServer,
        Rule::LostWakeup,
    ]);
}

#[test]
fn hold_of_a_refused_release_is_excused_until_its_lease_ends() {
    let refused = || {
        Scenario::default()
            .granted(100, 1, 1)
            .released(200, 1, 1, "the server refused it")
    };
    let taken = || refused().fault(150, 400, NO_SCRIPTS, Some(1));
    taken().server(3_300, 3_310, &[(1, 1)]).breaks(&[]);
    taken()
        .server(3_500, 3_510, &[(1, 1)])
        .breaks(&[Rule::Leak]);
    let other = refused()
        .fault(150, 400, NO_SCRIPTS, Some(2))
        .server(3_300, 3_310, &[(1, 1)]);
    other.breaks(&[Rule::FalseReport, Rule::Leak]);
    refused()
        .fault(150, 400, NO_PUBLISH, Some(1))
        .server(3_300, 3_310, &[(1, 1)])
        .breaks(&[Rule::Leak]);
}

#[test]
fn lost_update_is_accused() {
    let scenario = |read| {
        let scenario = Scenario::default()
            .granted(100, 1, 1)
            .section(110, 120, 1, 1, 4, true)
            .released(130, 1, 1, "ok");
        scenario
            .granted(200, 2, 1)
            .section(210, 220, 2, 1, read, true)
            .released(230, 2, 1, "ok")
    };
    scenario(5).breaks(&[]);
    scenario(4).breaks(&[Rule::LostUpdate]);
    // A section that was not sure may have written in between.
    let unsure = scenario(4)
        .granted(50, 3, 1)
        .section(60, 140, 3, 1, 4, false);
    unsure.released(95, 3, 1, "ok").breaks(&[]);
}

#[test]
fn operation_or_process_that_does_not_end_is_accused() {
    Scenario::default()
        .invoked(100, 1, 1)
        .breaks(&[Rule::LeftBehind]);
    let lost = Event::Lost {
        reason: "Expired".into(),
    };
    Scenario::default()
        .granted(100, 1, 1)
        .line(2_200, 1, 1, lost)
        .breaks(&[Rule::LeftBehind]);
    Scenario::default()
        .line(
            1,
            1,
            0,
            Event::Ended {
                tasks: 1,
                shutdown: "ok".into(),
            },
        )
        .breaks(&[Rule::LeftBehind]);
    let panicked = Event::Panicked {
        why: "at a line".into(),
    };
    Scenario::default()
        .line(1, 1, 0, panicked)
        .breaks(&[Rule::Panic]);
    let timed_out = Event::Ended {
        tasks: 0,
        shutdown: "timed out".into(),
    };
    Scenario::default()
        .line(1, 1, 0, timed_out)
        .breaks(&[Rule::LeftBehind]);
    let mut scenario = Scenario::default();
    scenario.0.left.push("a channel".into());
    scenario.breaks(&[Rule::LeftBehind]);
}

#[test]
fn unlock_that_reports_a_false_loss_is_accused() {
    let scenario = |outcome| {
        Scenario::default()
            .granted(100, 1, 1)
            .server(0, 90, &[])
            .server(100, 400, &[(1, 1)])
            .released(400, 1, 1, outcome)
            .server(406, 5_000, &[])
    };
    scenario("lost").breaks(&[Rule::FalseReport]);
    // A fault does not excuse it.
    scenario("lost")
        .fault(350, 360, "CLIENT KILL", None)
        .breaks(&[Rule::FalseReport]);
    scenario("ok").breaks(&[]);
}

/// A loss that is reported at that time, while the server has the lock for its owner until then.
fn lost_at(at: Nanos, reason: &str) -> Scenario {
    let lost = Event::Lost {
        reason: reason.into(),
    };
    let scenario = Scenario::default()
        .granted(100, 1, 1)
        .line(at, 1, 1, lost)
        .released(at + 100, 1, 1, "lost");
    scenario.server(0, 90, &[]).server(100, at, &[(1, 1)])
}

#[test]
fn false_loss_is_accused() {
    lost_at(400, "Gone").breaks(&[Rule::FalseReport]);
    lost_at(400, "ForceUnlocked").breaks(&[Rule::FalseReport]);
    // The owner claims the lock until 2100.
    lost_at(400, "Expired").breaks(&[Rule::FalseReport]);
    lost_at(400, "Expired")
        .fault(200, 390, "both ways held", Some(1))
        .breaks(&[Rule::FalseReport]);
    // The lease on the server lasts for another two seconds, as after a renewal.
    lost_at(6_500, "Expired").breaks(&[Rule::FalseReport]);
    lost_at(6_500, "Gone").breaks(&[Rule::FalseReport]);
}

#[test]
fn possible_loss_is_not_accused() {
    // The reply to the renewal may have been lost.
    lost_at(6_500, "Expired")
        .fault(2_000, 2_010, "both ways held", Some(1))
        .breaks(&[]);
    // The lease on the server is about to end.
    let mut scenario = lost_at(2_150, "Expired");
    scenario
        .0
        .samples
        .iter_mut()
        .flat_map(|sample| &mut sample.held)
        .for_each(|key| key.pttl = 900);
    scenario.0.samples.retain(|sample| sample.from > 2_000 * MS);
    scenario.breaks(&[]);
    // The server did not have it.
    let lost = Event::Lost {
        reason: "Gone".into(),
    };
    let gone = |scenario: Scenario| {
        scenario
            .granted(100, 1, 1)
            .line(400, 1, 1, lost.clone())
            .released(405, 1, 1, "lost")
    };
    let scenario = Scenario::default().server(100, 390, &[(1, 1)]);
    gone(scenario.server(390, 400, &[])).breaks(&[Rule::NotHeldOnServer]);
    // The last look was long before.
    gone(Scenario::default().server(100, 200, &[(1, 1)])).breaks(&[]);
}

#[test]
fn loss_of_an_owner_that_holds_the_lock_again_is_not_accused() {
    let lost = |reason: &str| Event::Lost {
        reason: reason.into(),
    };
    let granted = Event::Granted {
        remaining: 2_000 * MS,
    };
    // The lease ended, and a moment later the owner was granted the lock again.
    let scenario = |between: &[(u64, u64)]| {
        let scenario = Scenario::default()
            .granted(100, 1, 1)
            .invoked(2_135, 1, 2)
            .line(2_140, 1, 2, granted.clone());
        let scenario = scenario
            .line(2_200, 1, 1, lost("Gone"))
            .released(2_210, 1, 1, "lost")
            .released(2_430, 1, 2, "ok");
        scenario
            .server(100, 2_110, &[(1, 1)])
            .server(2_110, 2_130, between)
            .server(2_140, 2_430, &[(1, 1)])
    };
    scenario(&[]).breaks(&[]);
    scenario(&[(1, 1)]).breaks(&[Rule::FalseReport]);
    // There was no look for so long that the lease may have ended.
    let mut unseen = scenario(&[]);
    unseen.0.samples.retain(|look| look.from >= 2_140 * MS);
    unseen.breaks(&[]);
    // The server has two holds of one owner all the time.
    let scenario = Scenario::default().granted(100, 1, 1).granted(150, 1, 2);
    let scenario = scenario
        .line(700, 1, 1, lost("Gone"))
        .line(700, 1, 2, lost("Gone"));
    let scenario = scenario
        .released(800, 1, 2, "lost")
        .released(810, 1, 1, "lost");
    scenario
        .server(100, 145, &[(1, 1)])
        .server(151, 1_300, &[(1, 2)])
        .breaks(&[Rule::FalseReport]);
}

/// An owner that is sure until 2100 of a lock that the server has for it until 2150, and that
/// reports its loss at that time.
fn run_out(reported: Nanos) -> Scenario {
    let lost = Event::Lost {
        reason: "Expired".into(),
    };
    let mut scenario = Scenario::default()
        .granted(100, 1, 1)
        .line(reported, 1, 1, lost)
        .released(9_000, 1, 1, "lost");
    scenario = scenario
        .server(100, 2_150, &[(1, 1)])
        .server(2_160, 9_500, &[]);
    for sample in &mut scenario.0.samples {
        let left = (2_150 * MS).saturating_sub(sample.from) / MS;
        sample
            .held
            .iter_mut()
            .for_each(|key| key.pttl = left as i64);
    }
    scenario
}

#[test]
fn loss_not_reported_after_the_end_of_the_lease_is_accused() {
    run_out(2_600).breaks(&[]);
    run_out(2_700).breaks(&[Rule::LossNotReported]);
    run_out(8_900).breaks(&[Rule::LossNotReported]);
    run_out(8_900)
        .fault(2_000, 8_500, "both ways held", Some(1))
        .breaks(&[Rule::LossNotReported]);
    run_out(8_900)
        .fault(2_000, 8_500, "worker stopped (SIGSTOP)", Some(1))
        .breaks(&[]);
    // The process was stopped, but continued in time.
    run_out(8_900)
        .fault(500, 1_500, "worker stopped (SIGSTOP)", Some(1))
        .breaks(&[Rule::LossNotReported]);
    // The hold was released, or the looks show a longer lease.
    Scenario::default()
        .granted(100, 1, 1)
        .released(2_500, 1, 1, "lost")
        .breaks(&[]);
    let renewed = Scenario::default()
        .granted(100, 1, 1)
        .released(4_500, 1, 1, "ok")
        .server(100, 4_500, &[(1, 1)]);
    renewed.breaks(&[]);
    // There was no look when the lease may have been renewed.
    let mut unseen = run_out(4_400);
    unseen
        .0
        .samples
        .retain(|look| !(1_900 * MS..2_500 * MS).contains(&look.from));
    unseen.breaks(&[]);
    // Another owner was granted the lock.
    let scenario = |reported| {
        let lost = Event::Lost {
            reason: "Expired".into(),
        };
        let scenario = Scenario::default()
            .granted(100, 1, 1)
            .granted(2_200, 2, 1)
            .released(3_500, 2, 1, "ok");
        scenario
            .line(reported, 1, 1, lost)
            .released(3_200, 1, 1, "lost")
    };
    scenario(2_300).breaks(&[]);
    scenario(3_150).breaks(&[Rule::LossNotReported]);
}

#[test]
fn claim_after_a_reported_loss_is_accused() {
    let scenario = |at| {
        let lost = Event::Lost {
            reason: "Expired".into(),
        };
        let scenario = Scenario::default()
            .granted(100, 1, 1)
            .line(2_150, 1, 1, lost)
            .line(at, 1, 1, Event::Sure { remaining: 50 * MS });
        scenario.released(2_300, 1, 1, "lost")
    };
    scenario(2_200).breaks(&[Rule::FalseReport]);
    scenario(2_050).breaks(&[]);
}

#[test]
fn contention_without_other_owner_is_accused() {
    let scenario = |free_from| {
        let contended = Event::Failed {
            why: "contended".into(),
        };
        Scenario::default()
            .server(free_from, 2_000, &[])
            .invoked(500, 1, 1)
            .line(1_000, 1, 1, contended)
    };
    scenario(0).breaks(&[Rule::FalseReport]);
    scenario(1_500).breaks(&[]);
    scenario(0)
        .invoked(700, 2, 2)
        .line(800, 2, 2, Event::Cancelled)
        .breaks(&[]);
}

#[test]
fn renewed_lease_that_ends_without_fault_is_accused() {
    run_out(2_105).breaks(&[]);
    run_out(2_105).renewed().breaks(&[Rule::FalseReport]);
    run_out(2_105)
        .renewed()
        .fault(90, 100, "both ways held", Some(2))
        .breaks(&[Rule::FalseReport]);
    // The fault may have prevented the last renewals.
    run_out(2_105)
        .renewed()
        .fault(300, 1_500, "both ways held", Some(1))
        .breaks(&[]);
    let late = |from, to| {
        let lost = Event::Lost {
            reason: "Expired".into(),
        };
        let scenario = Scenario::default()
            .granted(100, 1, 1)
            .renewed()
            .line(9_000, 1, 1, lost)
            .released(9_010, 1, 1, "lost");
        scenario
            .server(100, 8_900, &[(1, 1)])
            .fault(from, to, "both ways held", Some(1))
    };
    late(3_000, 5_900).breaks(&[Rule::FalseReport]);
    late(3_000, 6_100).breaks(&[]);
}

#[test]
fn failure_or_unknown_outcome_without_fault_is_accused() {
    let unknown = || {
        let scenario = Scenario::default().invoked(4_000, 1, 1);
        scenario.line(
            4_100,
            1,
            1,
            Event::Unknown {
                why: "no answer".into(),
            },
        )
    };
    let failed = || {
        let scenario = Scenario::default().invoked(4_000, 1, 1);
        scenario.line(
            4_100,
            1,
            1,
            Event::Failed {
                why: "no connection".into(),
            },
        )
    };
    let unlock = |outcome| {
        Scenario::default()
            .granted(3_000, 1, 1)
            .released(4_000, 1, 1, outcome)
    };
    let all: [&dyn Fn() -> Scenario; 4] = [&unknown, &failed, &|| unlock("unknown"), &|| {
        unlock("the server refused")
    }];
    for scenario in all {
        scenario().breaks(&[Rule::FalseReport]);
        scenario()
            .fault(3_900, 4_050, "replies held", Some(2))
            .breaks(&[Rule::FalseReport]);
        scenario()
            .fault(4_200, 4_250, "replies held", Some(1))
            .breaks(&[Rule::FalseReport]);
        scenario()
            .fault(100, 900, "replies held", Some(1))
            .breaks(&[Rule::FalseReport]);
        scenario()
            .fault(3_900, 4_050, "replies held", Some(1))
            .breaks(&[]);
        scenario()
            .fault(100, 1_100, "CLIENT KILL", None)
            .breaks(&[]);
    }
    // The future of a `run` was stopped because of the loss.
    unknown()
        .line(
            4_050,
            1,
            1,
            Event::Lost {
                reason: "Gone".into(),
            },
        )
        .breaks(&[]);
}

/// The server knows a lock that was passed on by the name of the first owner. Only the clients of
/// some processes pass locks on.
#[test]
fn lock_that_was_passed_on_is_known_by_an_earlier_owner() {
    let scenario = |process| {
        let mut scenario = Scenario::default()
            .granted(100, process, 1)
            .invoked(150, process, 2)
            .released(200, process, 1, "ok")
            .line(
                201,
                process,
                2,
                Event::Granted {
                    remaining: 2_000 * MS,
                },
            )
            .released(400, process, 2, "ok")
            .server(0, 90, &[])
            .server(100, 400, &[(process, 1)])
            .server(410, 600, &[]);
        for line in scenario.0.lines.iter_mut().filter(|line| line.attempt == 2) {
            if let Event::Invoked { owner, .. } = &mut line.event {
                *owner = format!("client-{process}:another");
            }
        }
        scenario
    };
    scenario(3).breaks(&[]);
    let found: BTreeSet<_> = judge(&scenario(1).0).iter().map(|one| one.rule).collect();
    assert_eq!(found, [Rule::NotHeldOnServer, Rule::Leak].into());
    // A field that stays is accused, too.
    scenario(3)
        .server(600, 1_600, &[(3, 1)])
        .breaks(&[Rule::Leak]);
}
