//! The judge is judged: histories made by hand, each with one thing wrong, and clean ones that look
//! suspicious.

use super::history::{Event, MS, NO_CHANNEL, NO_PUBLISH, NO_SCRIPTS, Nanos};
use super::judge::Rule;
use super::tale::{Tale, owner_of};

#[test]
fn a_clean_history_is_not_accused() {
    Tale::default()
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
        .gave(150, 1, 2, "ok")
        .gave(170, 1, 1, "ok")
        .granted(190, 2, 1)
        .section(191, 195, 2, 1, 1, true)
        .gave(200, 2, 1, "ok")
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
fn two_that_are_sure_at_once_are_found() {
    // The first gave nothing back, and was said to be sure until 2100.
    Tale::default()
        .granted(100, 1, 1)
        .granted(1_000, 2, 1)
        .gave(1_100, 2, 1, "ok")
        .gave(1_200, 1, 1, "lost")
        .breaks(&[Rule::Exclusion]);
}

#[test]
fn a_confirmed_unlock_says_that_the_lock_was_held_until_then() {
    let tale = |outcome| {
        Tale::default()
            .granted(100, 1, 1)
            .granted(2_200, 2, 1)
            .gave(2_300, 2, 1, "ok")
            .gave(2_400, 1, 1, outcome)
    };
    tale("ok").breaks(&[Rule::Exclusion]);
    tale("lost").breaks(&[]);
}

#[test]
fn a_lease_that_has_run_out_is_no_claim() {
    // Killed, stopped, or lost: nobody is sure without having asked.
    let mut tale = Tale::default()
        .granted(100, 1, 1)
        .granted(2_200, 2, 1)
        .gave(2_300, 2, 1, "ok");
    tale.0.killed.push((1, 300 * MS));
    tale.breaks(&[]);
    Tale::default()
        .granted(100, 1, 1)
        .fault(200, 2_500, "worker stopped (SIGSTOP)", Some(1))
        .granted(2_200, 2, 1)
        .gave(2_300, 2, 1, "ok")
        .line(
            2_600,
            1,
            1,
            Event::Lost {
                reason: "Expired".into(),
            },
        )
        .gave(2_700, 1, 1, "lost")
        .breaks(&[]);
}

#[test]
fn an_owner_that_the_server_does_not_know_is_found() {
    Tale::default()
        .granted(100, 1, 1)
        .gave(500, 1, 1, "ok")
        .server(110, 200, &[])
        .breaks(&[Rule::Unfounded]);
    // It is there, but not for the two seconds that were said.
    let mut tale = Tale::default()
        .granted(100, 1, 1)
        .gave(500, 1, 1, "ok")
        .server(110, 120, &[(1, 1)]);
    tale.0.samples[0].held[0].pttl = 1_900;
    tale.breaks(&[Rule::Unfounded]);
    // Before, and after it was about to be given back, the server may say what it likes.
    Tale::default()
        .granted(100, 1, 1)
        .gave(500, 1, 1, "ok")
        .server(0, 100, &[])
        .server(500, 600, &[])
        .breaks(&[]);
}

#[test]
fn an_owner_that_did_not_hear_of_its_loss_is_found() {
    let tale = || {
        Tale::default()
            .granted(100, 1, 1)
            .granted(2_200, 2, 1)
            .gave(2_300, 2, 1, "ok")
            .gave(9_000, 1, 1, "lost")
    };
    tale().breaks(&[Rule::NotTold]);
    tale()
        .line(
            2_150,
            1,
            1,
            Event::Lost {
                reason: "Expired".into(),
            },
        )
        .breaks(&[]);
    // Being cut off is no excuse, standing still is.
    tale()
        .fault(200, 8_000, "both ways held", Some(1))
        .breaks(&[Rule::NotTold]);
    tale()
        .fault(200, 8_000, "worker stopped (SIGSTOP)", Some(1))
        .breaks(&[]);
}

#[test]
fn a_run_that_goes_on_after_a_rivals_grant_is_found() {
    let tale = |steps: &[Nanos]| {
        let run = Event::Invoked {
            lock: 0,
            owner: owner_of(1),
            how: "run".into(),
            lease: 2_000 * MS,
            renewed: false,
        };
        let tale =
            Tale::default()
                .line(95, 1, 1, run)
                .line(100, 1, 1, Event::Granted { remaining: 0 });
        let tale = steps
            .iter()
            .fold(tale, |tale, at| tale.line(*at, 1, 1, Event::Worked));
        let lost = Event::Lost {
            reason: "Expired".into(),
        };
        let told = steps.last().map_or(0, |last| last + 20);
        let tale =
            tale.line(told, 1, 1, lost)
                .line(told, 1, 1, Event::TakenBack { why: "lost".into() });
        tale.granted(2_200, 2, 1).gave(2_300, 2, 1, "ok")
    };
    // The step at 2201 was begun before the grant.
    tale(&[150, 2_150, 2_201]).breaks(&[]);
    tale(&[150, 2_150, 2_201, 2_230]).breaks(&[Rule::NotStopped]);
    // Not even a process that stood still begins another.
    tale(&[150, 2_601, 2_602])
        .fault(160, 2_600, "worker stopped (SIGSTOP)", Some(1))
        .breaks(&[Rule::NotStopped]);
    tale(&[150, 2_601])
        .fault(160, 2_600, "worker stopped (SIGSTOP)", Some(1))
        .breaks(&[]);
}

#[test]
fn a_hold_that_nobody_has_is_found() {
    let tale = || Tale::default().granted(100, 1, 1).gave(200, 1, 1, "ok");
    tale().server(300, 310, &[(1, 1)]).breaks(&[Rule::Leak]);
    // One too many.
    tale().server(110, 120, &[(1, 2)]).breaks(&[Rule::Leak]);
    // Of somebody who never was.
    tale().server(300, 310, &[(7, 1)]).breaks(&[Rule::Leak]);
}

#[test]
fn an_acquire_that_is_said_to_have_failed_and_left_a_hold_is_found() {
    let failed = Event::Failed {
        why: "contended".into(),
    };
    Tale::default()
        .invoked(100, 1, 1)
        .line(200, 1, 1, failed)
        .server(250, 260, &[(1, 1)])
        .breaks(&[Rule::Leak]);
}

#[test]
fn what_is_not_known_has_time_to_settle_after_the_faults() {
    let unknown = Event::Unknown {
        why: "no answer".into(),
    };
    let tale = || {
        Tale::default()
            .invoked(100, 1, 1)
            .line(200, 1, 1, unknown.clone())
            .fault(50, 4_000, "requests held", Some(1))
    };
    tale().server(4_900, 4_910, &[(1, 1)]).breaks(&[]);
    tale().server(5_100, 5_110, &[(1, 1)]).breaks(&[Rule::Leak]);
    // A caller that went away, with no fault.
    let left = || {
        Tale::default()
            .invoked(100, 1, 1)
            .line(200, 1, 1, Event::Cancelled)
    };
    left().server(2_300, 2_310, &[(1, 1)]).breaks(&[Rule::Leak]);
    // Another process' faults are none of its own.
    left()
        .fault(50, 4_000, "requests held", Some(2))
        .server(2_300, 2_310, &[(1, 1)])
        .breaks(&[Rule::Leak]);
}

#[test]
fn the_leases_of_the_killed_run_out() {
    let killed = || {
        let mut tale = Tale::default().granted(100, 1, 1);
        tale.0.killed.push((1, 500 * MS));
        tale
    };
    killed().server(2_300, 2_310, &[(1, 1)]).breaks(&[]);
    killed()
        .server(3_600, 3_610, &[(1, 1)])
        .breaks(&[Rule::Leak]);
}

#[test]
fn a_key_without_an_expiry_is_found() {
    let mut tale = Tale::default()
        .granted(100, 1, 1)
        .gave(200, 1, 1, "ok")
        .server(110, 120, &[(1, 1)]);
    tale.0.samples[0].held[0].pttl = -1;
    tale.breaks(&[Rule::NoExpiry]);
}

#[test]
fn a_wrong_count_is_found() {
    let count = Event::Count {
        expected: 2,
        found: 1,
    };
    Tale::default()
        .granted(100, 1, 1)
        .line(110, 1, 1, count)
        .gave(200, 1, 1, "ok")
        .breaks(&[Rule::Count]);
}

#[test]
fn an_unlock_that_succeeds_after_the_loss_was_told_is_found() {
    let lost = Event::Lost {
        reason: "Gone".into(),
    };
    let tale = |told| {
        Tale::default()
            .granted(100, 1, 1)
            .line(told, 1, 1, lost.clone())
            .gave(400, 1, 1, "ok")
    };
    tale(300).breaks(&[Rule::Lie]);
    tale(401).breaks(&[]);
}

#[test]
fn a_waiter_before_a_free_lock_is_found() {
    let tale = |granted| {
        let tale = Tale::default()
            .granted(100, 1, 1)
            .invoked(150, 2, 1)
            .gave(200, 1, 1, "ok");
        let tale = tale
            .line(granted, 2, 1, Event::Granted { remaining: 0 })
            .gave(granted + 5, 2, 1, "ok");
        tale.server(0, 90, &[])
            .server(100, 200, &[(1, 1)])
            .server(210, granted, &[])
    };
    tale(400).breaks(&[]);
    tale(2_500).breaks(&[Rule::LostWakeup]);
    // A fault excuses it, for a while, and only where it was.
    tale(2_500)
        .fault(190, 300, "replies held", Some(2))
        .breaks(&[]);
    tale(2_500)
        .fault(190, 300, "replies held", Some(1))
        .breaks(&[Rule::LostWakeup]);
    tale(4_000)
        .fault(190, 300, "CLIENT KILL", None)
        .breaks(&[Rule::LostWakeup]);
    // One that met nothing is none.
    let mut idle = tale(2_500).fault(190, 300, "reply swallowed", Some(2));
    idle.0.faults[0].met = false;
    idle.breaks(&[Rule::LostWakeup]);
    // The line in its process moves.
    tale(2_500)
        .granted(1_303, 2, 2)
        .gave(1_307, 2, 2, "ok")
        .breaks(&[]);
}

#[test]
fn a_release_that_nobody_could_hear_excuses_those_without_rechecks() {
    let long = |waiter, to: u64| {
        let tale = Tale::default()
            .granted(100, 1, 1)
            .invoked(150, waiter, 1)
            .gave(200, 1, 1, "ok");
        let tale = tale
            .line(to, waiter, 1, Event::Granted { remaining: 0 })
            .gave(to + 5, waiter, 1, "ok");
        tale.server(0, 90, &[])
            .server(100, 200, &[(1, 1)])
            .server(210, to, &[])
    };
    let tale = |waiter| long(waiter, 4_000);
    tale(3).breaks(&[Rule::LostWakeup]);
    tale(3).fault(190, 300, NO_PUBLISH, Some(1)).breaks(&[]);
    // It was not the releasing process that could not publish, or not then.
    tale(3)
        .fault(190, 300, NO_PUBLISH, Some(5))
        .breaks(&[Rule::LostWakeup]);
    tale(3)
        .fault(600, 700, NO_PUBLISH, Some(1))
        .breaks(&[Rule::LostWakeup]);
    // Who was refused the subscription is deaf, who asks again by itself is not.
    tale(3).fault(140, 160, NO_CHANNEL, Some(3)).breaks(&[]);
    // It asks again for the subscription.
    long(3, 8_000)
        .fault(140, 160, NO_CHANNEL, Some(3))
        .breaks(&[Rule::LostWakeup]);
    for kind in [NO_PUBLISH, NO_CHANNEL] {
        tale(2)
            .fault(190, 300, kind, Some(1))
            .breaks(&[Rule::LostWakeup]);
        tale(2)
            .fault(140, 160, kind, Some(2))
            .breaks(&[Rule::LostWakeup]);
    }
}

#[test]
fn a_mute_owner_between_two_looks_excuses_those_without_rechecks() {
    // Whoever waits was woken by the release at 199 and came too late; the next one has nothing to
    // say.
    let tale = |begins: Nanos| {
        let tale = Tale::default()
            .granted(100, 1, 1)
            .invoked(150, 3, 1)
            .gave(199, 1, 1, "ok");
        let tale = tale.granted(begins, 5, 1).gave(begins + 2, 5, 1, "ok");
        let tale = tale
            .line(4_000, 3, 1, Event::Granted { remaining: 0 })
            .gave(4_005, 3, 1, "ok");
        tale.server(0, 90, &[])
            .server(100, 200, &[(1, 1)])
            .server(212, 4_000, &[])
    };
    tale(204).fault(190, 300, NO_PUBLISH, Some(5)).breaks(&[]);
    tale(215).fault(190, 300, NO_PUBLISH, Some(5)).breaks(&[]);
    tale(204).breaks(&[Rule::LostWakeup]);
    tale(204)
        .fault(190, 300, NO_PUBLISH, Some(7))
        .breaks(&[Rule::LostWakeup]);
    tale(130).fault(100, 300, NO_PUBLISH, Some(5)).breaks(&[
        Rule::Exclusion,
        Rule::Unfounded,
        Rule::LostWakeup,
    ]);
}

#[test]
fn a_release_that_is_refused_leaves_the_lease() {
    let refused = || {
        Tale::default()
            .granted(100, 1, 1)
            .gave(200, 1, 1, "the server refused it")
    };
    let taken = || refused().fault(150, 400, NO_SCRIPTS, Some(1));
    taken().server(3_300, 3_310, &[(1, 1)]).breaks(&[]);
    taken()
        .server(3_500, 3_510, &[(1, 1)])
        .breaks(&[Rule::Leak]);
    let other = refused()
        .fault(150, 400, NO_SCRIPTS, Some(2))
        .server(3_300, 3_310, &[(1, 1)]);
    other.breaks(&[Rule::Lie, Rule::Leak]);
    refused()
        .fault(150, 400, NO_PUBLISH, Some(1))
        .server(3_300, 3_310, &[(1, 1)])
        .breaks(&[Rule::Leak]);
}

#[test]
fn a_lost_update_is_found() {
    let tale = |read| {
        let tale = Tale::default()
            .granted(100, 1, 1)
            .section(110, 120, 1, 1, 4, true)
            .gave(130, 1, 1, "ok");
        tale.granted(200, 2, 1)
            .section(210, 220, 2, 1, read, true)
            .gave(230, 2, 1, "ok")
    };
    tale(5).breaks(&[]);
    tale(4).breaks(&[Rule::LostUpdate]);
    // Somebody who was not sure may have written in between.
    let unsure = tale(4).granted(50, 3, 1).section(60, 140, 3, 1, 4, false);
    unsure.gave(95, 3, 1, "ok").breaks(&[]);
}

#[test]
fn what_never_ends_is_found() {
    Tale::default()
        .invoked(100, 1, 1)
        .breaks(&[Rule::Conservation]);
    let lost = Event::Lost {
        reason: "Expired".into(),
    };
    Tale::default()
        .granted(100, 1, 1)
        .line(2_200, 1, 1, lost)
        .breaks(&[Rule::Conservation]);
    Tale::default()
        .line(
            1,
            1,
            0,
            Event::Ended {
                tasks: 1,
                shutdown: "ok".into(),
            },
        )
        .breaks(&[Rule::Conservation]);
    let panicked = Event::Panicked {
        why: "at a line".into(),
    };
    Tale::default()
        .line(1, 1, 0, panicked)
        .breaks(&[Rule::Panic]);
    let timed_out = Event::Ended {
        tasks: 0,
        shutdown: "timed out".into(),
    };
    Tale::default()
        .line(1, 1, 0, timed_out)
        .breaks(&[Rule::Conservation]);
    let mut tale = Tale::default();
    tale.0.left.push("a channel".into());
    tale.breaks(&[Rule::Conservation]);
}

#[test]
fn an_unlock_that_says_lost_and_was_not_is_a_lie() {
    let tale = |outcome| {
        Tale::default()
            .granted(100, 1, 1)
            .server(0, 90, &[])
            .server(100, 400, &[(1, 1)])
            .gave(400, 1, 1, outcome)
            .server(406, 5_000, &[])
    };
    tale("lost").breaks(&[Rule::Lie]);
    // No fault makes it one.
    tale("lost")
        .fault(350, 360, "CLIENT KILL", None)
        .breaks(&[Rule::Lie]);
    tale("ok").breaks(&[]);
}

/// A loss that is told at 400 or later, and a server that has the lock for its owner until then.
fn told_at(at: Nanos, reason: &str) -> Tale {
    let lost = Event::Lost {
        reason: reason.into(),
    };
    let tale = Tale::default()
        .granted(100, 1, 1)
        .line(at, 1, 1, lost)
        .gave(at + 100, 1, 1, "lost");
    tale.server(0, 90, &[]).server(100, at, &[(1, 1)])
}

#[test]
fn a_loss_that_was_none_is_a_lie() {
    told_at(400, "Gone").breaks(&[Rule::Lie]);
    told_at(400, "ForceUnlocked").breaks(&[Rule::Lie]);
    // It was said to be sure until 2100.
    told_at(400, "Expired").breaks(&[Rule::Lie]);
    told_at(400, "Expired")
        .fault(200, 390, "both ways held", Some(1))
        .breaks(&[Rule::Lie]);
    // The server's lease goes on for two seconds more, as after a renewal.
    told_at(6_500, "Expired").breaks(&[Rule::Lie]);
    told_at(6_500, "Gone").breaks(&[Rule::Lie]);
}

#[test]
fn a_loss_that_may_be_one_is_none_of_a_lie() {
    // The reply to the renewal may have been lost.
    told_at(6_500, "Expired")
        .fault(2_000, 2_010, "both ways held", Some(1))
        .breaks(&[]);
    // The lease that the server has is about to end.
    let mut tale = told_at(2_150, "Expired");
    tale.0
        .samples
        .iter_mut()
        .flat_map(|sample| &mut sample.held)
        .for_each(|key| key.pttl = 900);
    tale.0.samples.retain(|sample| sample.from > 2_000 * MS);
    tale.breaks(&[]);
    // The server did not have it.
    let lost = Event::Lost {
        reason: "Gone".into(),
    };
    let gone = |tale: Tale| {
        tale.granted(100, 1, 1)
            .line(400, 1, 1, lost.clone())
            .gave(405, 1, 1, "lost")
    };
    let tale = Tale::default().server(100, 390, &[(1, 1)]);
    gone(tale.server(390, 400, &[])).breaks(&[Rule::Unfounded]);
    // It was last looked at long ago.
    gone(Tale::default().server(100, 200, &[(1, 1)])).breaks(&[]);
}

#[test]
fn who_came_back_had_been_gone() {
    let lost = |reason: &str| Event::Lost {
        reason: reason.into(),
    };
    let granted = Event::Granted {
        remaining: 2_000 * MS,
    };
    // Its lease was over, and a moment later it got the lock again.
    let tale = |between: &[(u64, u64)]| {
        let tale = Tale::default()
            .granted(100, 1, 1)
            .invoked(2_135, 1, 2)
            .line(2_140, 1, 2, granted.clone());
        let tale = tale
            .line(2_200, 1, 1, lost("Gone"))
            .gave(2_210, 1, 1, "lost")
            .gave(2_430, 1, 2, "ok");
        tale.server(100, 2_110, &[(1, 1)])
            .server(2_110, 2_130, between)
            .server(2_140, 2_430, &[(1, 1)])
    };
    tale(&[]).breaks(&[]);
    tale(&[(1, 1)]).breaks(&[Rule::Lie]);
    // Nobody looked for so long that the lease may have been over.
    let mut unseen = tale(&[]);
    unseen.0.samples.retain(|look| look.from >= 2_140 * MS);
    unseen.breaks(&[]);
    // Two holds of one owner, both there all the time.
    let tale = Tale::default().granted(100, 1, 1).granted(150, 1, 2);
    let tale = tale
        .line(700, 1, 1, lost("Gone"))
        .line(700, 1, 2, lost("Gone"));
    let tale = tale.gave(800, 1, 2, "lost").gave(810, 1, 1, "lost");
    tale.server(100, 145, &[(1, 1)])
        .server(151, 1_300, &[(1, 2)])
        .breaks(&[Rule::Lie]);
}

/// An owner that is sure until 2100, of a lock that the server has for it until 2150, and that is
/// told at that time.
fn run_out(told: Nanos) -> Tale {
    let lost = Event::Lost {
        reason: "Expired".into(),
    };
    let mut tale = Tale::default()
        .granted(100, 1, 1)
        .line(told, 1, 1, lost)
        .gave(9_000, 1, 1, "lost");
    tale = tale.server(100, 2_150, &[(1, 1)]).server(2_160, 9_500, &[]);
    for sample in &mut tale.0.samples {
        let left = (2_150 * MS).saturating_sub(sample.from) / MS;
        sample
            .held
            .iter_mut()
            .for_each(|key| key.pttl = left as i64);
    }
    tale
}

#[test]
fn a_loss_is_told_where_no_rival_comes() {
    run_out(2_600).breaks(&[]);
    run_out(2_700).breaks(&[Rule::NotTold]);
    run_out(8_900).breaks(&[Rule::NotTold]);
    run_out(8_900)
        .fault(2_000, 8_500, "both ways held", Some(1))
        .breaks(&[Rule::NotTold]);
    run_out(8_900)
        .fault(2_000, 8_500, "worker stopped (SIGSTOP)", Some(1))
        .breaks(&[]);
    // It stood still, but had gone on in time.
    run_out(8_900)
        .fault(500, 1_500, "worker stopped (SIGSTOP)", Some(1))
        .breaks(&[Rule::NotTold]);
    // It was given back, or the server was seen to have it for longer.
    Tale::default()
        .granted(100, 1, 1)
        .gave(2_500, 1, 1, "lost")
        .breaks(&[]);
    let renewed = Tale::default()
        .granted(100, 1, 1)
        .gave(4_500, 1, 1, "ok")
        .server(100, 4_500, &[(1, 1)]);
    renewed.breaks(&[]);
    // Nobody looked when it may have been renewed.
    let mut unseen = run_out(4_400);
    unseen
        .0
        .samples
        .retain(|look| !(1_900 * MS..2_500 * MS).contains(&look.from));
    unseen.breaks(&[]);
    // A rival was granted the lock.
    let tale = |told| {
        let lost = Event::Lost {
            reason: "Expired".into(),
        };
        let tale = Tale::default()
            .granted(100, 1, 1)
            .granted(2_200, 2, 1)
            .gave(3_500, 2, 1, "ok");
        tale.line(told, 1, 1, lost).gave(3_200, 1, 1, "lost")
    };
    tale(2_300).breaks(&[]);
    tale(3_150).breaks(&[Rule::NotTold]);
}

#[test]
fn an_owner_that_is_sure_after_its_loss_is_found() {
    let tale = |at| {
        let lost = Event::Lost {
            reason: "Expired".into(),
        };
        let tale = Tale::default()
            .granted(100, 1, 1)
            .line(2_150, 1, 1, lost)
            .line(at, 1, 1, Event::Sure { remaining: 50 * MS });
        tale.gave(2_300, 1, 1, "lost")
    };
    tale(2_200).breaks(&[Rule::Lie]);
    tale(2_050).breaks(&[]);
}

#[test]
fn contention_with_nobody_is_a_lie() {
    let tale = |free_from| {
        let contended = Event::Failed {
            why: "contended".into(),
        };
        Tale::default()
            .server(free_from, 2_000, &[])
            .invoked(500, 1, 1)
            .line(1_000, 1, 1, contended)
    };
    tale(0).breaks(&[Rule::Lie]);
    tale(1_500).breaks(&[]);
    tale(0)
        .invoked(700, 2, 2)
        .line(800, 2, 2, Event::Cancelled)
        .breaks(&[]);
}

#[test]
fn a_renewed_lease_that_ends_without_a_fault_is_found() {
    run_out(2_105).breaks(&[]);
    run_out(2_105).renewed().breaks(&[Rule::Lie]);
    run_out(2_105)
        .renewed()
        .fault(90, 100, "both ways held", Some(2))
        .breaks(&[Rule::Lie]);
    // The last renewals may not have come through; long before they did.
    run_out(2_105)
        .renewed()
        .fault(300, 1_500, "both ways held", Some(1))
        .breaks(&[]);
    let late = |from, to| {
        let lost = Event::Lost {
            reason: "Expired".into(),
        };
        let tale = Tale::default()
            .granted(100, 1, 1)
            .renewed()
            .line(9_000, 1, 1, lost)
            .gave(9_010, 1, 1, "lost");
        tale.server(100, 8_900, &[(1, 1)])
            .fault(from, to, "both ways held", Some(1))
    };
    late(3_000, 5_900).breaks(&[Rule::Lie]);
    late(3_000, 6_100).breaks(&[]);
}

#[test]
fn what_fails_or_is_not_known_without_a_fault_is_a_lie() {
    let unknown = || {
        let tale = Tale::default().invoked(4_000, 1, 1);
        tale.line(
            4_100,
            1,
            1,
            Event::Unknown {
                why: "no answer".into(),
            },
        )
    };
    let failed = || {
        let tale = Tale::default().invoked(4_000, 1, 1);
        tale.line(
            4_100,
            1,
            1,
            Event::Failed {
                why: "no connection".into(),
            },
        )
    };
    let unlock = |outcome| {
        Tale::default()
            .granted(3_000, 1, 1)
            .gave(4_000, 1, 1, outcome)
    };
    let all: [&dyn Fn() -> Tale; 4] = [&unknown, &failed, &|| unlock("unknown"), &|| {
        unlock("the server refused")
    }];
    for tale in all {
        tale().breaks(&[Rule::Lie]);
        tale()
            .fault(3_900, 4_050, "replies held", Some(2))
            .breaks(&[Rule::Lie]);
        tale()
            .fault(4_200, 4_250, "replies held", Some(1))
            .breaks(&[Rule::Lie]);
        tale()
            .fault(100, 900, "replies held", Some(1))
            .breaks(&[Rule::Lie]);
        tale()
            .fault(3_900, 4_050, "replies held", Some(1))
            .breaks(&[]);
        tale().fault(100, 1_100, "CLIENT KILL", None).breaks(&[]);
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
