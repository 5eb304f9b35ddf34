//! The judge is judged: histories in which a process writes a line down long after its event,
//! because it was stopped (SIGSTOP) in between.

use super::history::{Event, MS, NO_PUBLISH, Nanos, STOPPED};
use super::judge::Rule;
use super::tale::{Tale, owner_of};

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
fn late_grant() -> Tale {
    let tale = Tale::default()
        .invoked(95, 1, 1)
        .fault(110, 1_100, STOPPED, Some(1))
        .line(1_000, 9, 7, Event::Forcing { lock: 0 });
    let forced = Event::Forced {
        outcome: "freed".into(),
    };
    let tale = tale
        .line(1_005, 9, 7, forced)
        .line(1_105, 1, 1, granted(990));
    let tale = tale.line(1_115, 1, 1, Event::Giving { how: "drop".into() });
    tale.server(0, 100, &[])
        .server(100, 1_000, &[(1, 1)])
        .server(1_020, 2_000, &[(2, 1)])
}

#[test]
fn grant_written_after_the_next_owners_grant_is_no_later_grant() {
    late_grant()
        .invoked(90, 2, 1)
        .line(1_010, 2, 1, granted(2_000))
        .gave(2_000, 2, 1, "ok")
        .server(2_010, 5_000, &[])
        .breaks(&[]);
}

#[test]
fn grant_written_late_that_no_look_saw_is_no_later_grant() {
    // The force unlock frees the lock between two looks.
    let mut tale = late_grant()
        .invoked(90, 2, 1)
        .line(1_010, 2, 1, granted(2_000))
        .gave(2_000, 2, 1, "ok");
    for sample in &mut tale.0.samples {
        sample.held.retain(|key| key.owner != owner_of(1));
    }
    tale.breaks(&[]);
}

#[test]
fn run_that_works_after_a_late_line_of_an_earlier_grant_is_not_accused() {
    let run = Event::Invoked {
        lock: 0,
        owner: owner_of(2),
        how: "run".into(),
        lease: 2_000 * MS,
        renewed: false,
    };
    let tale = late_grant()
        .line(90, 2, 1, run)
        .line(1_010, 2, 1, granted(0));
    let tale = (1_015..2_000)
        .step_by(25)
        .fold(tale, |tale, at| tale.line(at, 2, 1, Event::Worked));
    tale.line(2_000, 2, 1, Event::Giving { how: "run".into() })
        .line(
            2_005,
            2,
            1,
            Event::Gave {
                outcome: "ok".into(),
            },
        )
        .server(2_010, 5_000, &[])
        .breaks(&[]);
}

/// Process 2 has the lock from 1010 to 3010, and process 1, which waits since 90, from 3015. It is
/// stopped with the reply unread and writes its grant down at 3600. The loss of process 2 is
/// written down at that time.
fn late_rival(reported: Nanos) -> Tale {
    late_rival_of(
        Tale::default()
            .invoked(1_005, 2, 1)
            .line(1_010, 2, 1, granted(2_000))
            .line(reported, 2, 1, lost("Expired"))
            .gave(reported + 10, 2, 1, "lost"),
    )
}

fn late_rival_of(tale: Tale) -> Tale {
    tale.invoked(90, 1, 1)
        .fault(3_030, 3_590, STOPPED, Some(1))
        .line(3_600, 1, 1, granted(1_300))
        .gave(3_700, 1, 1, "ok")
        .server(0, 1_000, &[])
        .server(1_020, 3_000, &[(2, 1)])
        .server(3_020, 3_690, &[(1, 1)])
        .server(3_710, 5_000, &[])
}

#[test]
fn loss_not_reported_before_a_grant_written_late_is_found() {
    // The server shows the grant at 3021, and half a second is for writing the loss down.
    late_rival(3_500).breaks(&[]);
    late_rival(3_560).breaks(&[Rule::NotTold]);
    // Of two force unlocks, neither explains it.
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
        .breaks(&[Rule::NotTold]);
}

#[test]
fn run_that_works_after_a_grant_written_late_is_found() {
    let run = |steps: &[Nanos]| {
        let run = Event::Invoked {
            lock: 0,
            owner: owner_of(2),
            how: "run".into(),
            lease: 2_000 * MS,
            renewed: false,
        };
        let tale = Tale::default()
            .line(1_005, 2, 1, run)
            .line(1_010, 2, 1, granted(0));
        let tale = steps
            .iter()
            .fold(tale, |tale, at| tale.line(*at, 2, 1, Event::Worked));
        let last = steps.last().unwrap_or(&0);
        let tale = tale.line(last + 1, 2, 1, lost("Expired")).line(
            last + 1,
            2,
            1,
            Event::TakenBack { why: "lost".into() },
        );
        late_rival_of(tale)
    };
    run(&[1_015, 3_010, 3_022]).breaks(&[]);
    run(&[1_015, 3_010, 3_022, 3_060]).breaks(&[Rule::NotStopped]);
}

/// The lease of process 1's first hold ends at 2110; the same owner is granted the lock again at
/// 2140 and keeps it. The process is stopped from 2150 to 5000, and writes the loss of the first
/// hold down at 5010.
fn late_loss(between: &[(u64, u64)]) -> Tale {
    let long = Event::Invoked {
        lock: 0,
        owner: owner_of(1),
        how: "lock".into(),
        lease: 20_000 * MS,
        renewed: false,
    };
    Tale::default()
        .granted(100, 1, 1)
        .line(2_135, 1, 2, long)
        .line(2_140, 1, 2, granted(1_900))
        .fault(2_150, 5_000, STOPPED, Some(1))
        .line(5_010, 1, 1, lost("Gone"))
        .gave(5_020, 1, 1, "lost")
        .gave(5_430, 1, 2, "ok")
        .server(100, 2_110, &[(1, 1)])
        .server(2_110, 2_130, between)
        .server(2_140, 5_430, &[(1, 1)])
}

#[test]
fn loss_written_late_by_an_owner_that_holds_the_lock_again_is_not_accused() {
    late_loss(&[]).breaks(&[]);
    // The server had the lock for the owner all the time.
    late_loss(&[(1, 1)]).breaks(&[Rule::Lie]);
}

#[test]
fn loss_by_a_force_unlock_of_the_own_process_written_late_is_not_accused() {
    let tale = |stop: Nanos| {
        Tale::default()
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
            .gave(stop + 2_010, 1, 1, "lost")
            .server(100, stop + 2_005, &[(1, 1)])
    };
    tale(1_015).breaks(&[]);
    // The process was stopped long after the force unlock.
    tale(2_100).breaks(&[Rule::Lie]);
}

/// Process 1 has the lock until 205 and may not publish from 190 to 300. Process 3, which waits for
/// messages alone, is granted it at 5000.
fn release_without_message() -> Tale {
    Tale::default()
        .granted(100, 1, 1)
        .invoked(150, 3, 1)
        .gave(205, 1, 1, "ok")
        .line(5_000, 3, 1, granted(0))
        .gave(5_005, 3, 1, "ok")
        .server(0, 90, &[])
        .server(100, 200, &[(1, 1)])
}

#[test]
fn release_without_message_seen_late_excuses_the_waiter() {
    // The server answers no look from 200 to 900.
    let tale = || release_without_message().server(900, 5_000, &[]);
    tale().fault(190, 300, NO_PUBLISH, Some(1)).breaks(&[]);
    tale().breaks(&[Rule::LostWakeup]);
    tale()
        .fault(100, 150, NO_PUBLISH, Some(5))
        .breaks(&[Rule::LostWakeup]);
}

#[test]
fn release_without_message_before_a_gap_in_the_looks_excuses_the_waiter() {
    let tale = || {
        release_without_message()
            .server(210, 1_000, &[])
            .server(1_500, 5_000, &[])
    };
    tale().fault(190, 300, NO_PUBLISH, Some(1)).breaks(&[]);
    tale().breaks(&[Rule::LostWakeup]);
}

#[test]
fn failure_while_no_look_is_answered_is_not_accused() {
    // A busy machine or a slow disk, which nobody planned.
    let tale = || {
        let why = "no reply in time".into();
        Tale::default()
            .invoked(4_000, 1, 1)
            .line(4_550, 1, 1, Event::Unknown { why })
            .server(0, 4_000, &[])
    };
    tale().server(4_000, 5_000, &[]).breaks(&[Rule::Lie]);
    tale().server(4_200, 5_000, &[]).breaks(&[Rule::Lie]);
    tale().server(4_500, 5_000, &[]).breaks(&[]);
}

#[test]
fn loss_reported_late_while_no_look_is_answered_is_not_accused() {
    // Process 2 is granted the lock at 2200, so that the loss is due at 2700.
    let tale = Tale::default;
    let looks = |tale: Tale, again: Nanos| {
        tale.granted(100, 1, 1)
            .granted(2_200, 2, 1)
            .line(2_750, 1, 1, lost("Expired"))
            .gave(2_760, 1, 1, "lost")
            .gave(2_900, 2, 1, "ok")
            .server(0, 90, &[])
            .server(100, 2_100, &[(1, 1)])
            .server(2_200, 2_300, &[(2, 1)])
            .server(again, 2_900, &[(2, 1)])
            .server(2_910, 5_000, &[])
    };
    looks(tale(), 2_300).breaks(&[Rule::NotTold]);
    looks(tale(), 2_700).breaks(&[]);
    // A server that is stopped keeps no owner from reporting a loss.
    looks(
        tale().fault(2_290, 2_690, "server stopped (SIGSTOP)", None),
        2_700,
    )
    .breaks(&[Rule::NotTold]);
}
