//! The judge is judged: what a force unlock permits, and what it does not.

use super::history::{Event, MS, Nanos};
use super::judge::Rule;
use super::tale::{Tale, owner_of};

impl Tale {
    /// An operator's force unlock of lock 0, in process 9.
    fn forced(self, from: Nanos, to: Nanos, outcome: &str) -> Self {
        let tale = self.line(from, 9, 7, Event::Forcing { lock: 0 });
        tale.line(
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

/// Process 1 has the lock from 100, for two seconds; process 2 has it from 1020; and the first is
/// told at 1400.
fn taken_over() -> Tale {
    let tale = Tale::default()
        .granted(100, 1, 1)
        .lost(1_400, 1)
        .gave(1_500, 1, 1, "lost");
    tale.granted(1_020, 2, 1).gave(1_100, 2, 1, "ok")
}

#[test]
fn what_was_forced_may_be_had_twice_until_it_is_told() {
    taken_over().breaks(&[Rule::Exclusion]);
    taken_over().forced(1_000, 1_010, "freed").breaks(&[]);
    taken_over().forced(1_000, 1_010, "unknown").breaks(&[]);
    taken_over()
        .forced(1_000, 1_010, "free")
        .breaks(&[Rule::Lie, Rule::Exclusion]);
    // Another lock, or too late.
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
fn a_force_unlock_is_no_excuse_for_being_sure_after_it_was_told() {
    taken_over()
        .forced(1_000, 1_010, "freed")
        .sure(1_390, 1, 2_090)
        .breaks(&[]);
    taken_over()
        .forced(1_000, 1_010, "freed")
        .sure(1_410, 1, 2_090)
        .breaks(&[Rule::Lie]);
}

#[test]
fn an_owner_that_never_hears_of_a_force_unlock_is_found() {
    // Its lease is over at 3010, and half a second is for the writing down.
    let tale = |told| {
        Tale::default()
            .granted(100, 1, 1)
            .lost(told, 1)
            .gave(9_000, 1, 1, "lost")
    };
    let tale = |told| {
        tale(told)
            .forced(1_000, 1_010, "freed")
            .granted(2_200, 2, 1)
            .gave(2_300, 2, 1, "ok")
    };
    tale(3_400).breaks(&[]);
    tale(3_600).breaks(&[Rule::NotTold]);
    // It goes on being sure.
    tale(3_400)
        .sure(3_300, 1, 3_800)
        .granted(3_500, 3, 1)
        .gave(3_600, 3, 1, "ok")
        .breaks(&[Rule::Exclusion]);
}

#[test]
fn a_force_unlock_takes_one_owner() {
    // Two more have it at once.
    let tale = || {
        taken_over()
            .forced(1_000, 1_010, "freed")
            .granted(1_050, 3, 1)
            .gave(1_090, 3, 1, "ok")
    };
    tale().breaks(&[Rule::Exclusion]);
    // They had all asked before, so each of them may be the one; not two of them.
    let three = |granted: [Nanos; 3]| {
        let tale = Tale::default().forced(1_000, 1_010, "freed");
        granted
            .into_iter()
            .zip(1..)
            .fold(tale, |tale, (at, process)| {
                let granted = Event::Granted {
                    remaining: 2_000 * MS,
                };
                tale.invoked(90, process, 1)
                    .line(at, process, 1, granted)
                    .gave(1_500, process, 1, "ok")
            })
    };
    three([1_020, 1_030, 1_040]).breaks(&[Rule::Exclusion]);
    three([1_020, 1_030, 1_600])
        .gave(1_700, 3, 1, "ok")
        .breaks(&[]);
}

#[test]
fn each_force_unlock_takes_an_owner_of_its_own() {
    // The third asked before both, and may have been taken by either; the second of them did.
    let tale = |second: &str| {
        let tale = taken_over().forced(1_000, 1_010, "freed").line(
            1_600,
            8,
            7,
            Event::Forcing { lock: 0 },
        );
        let tale = tale
            .line(
                1_610,
                8,
                7,
                Event::Forced {
                    outcome: second.into(),
                },
            )
            .invoked(90, 3, 1);
        let tale = tale
            .line(
                1_550,
                3,
                1,
                Event::Granted {
                    remaining: 1_000 * MS,
                },
            )
            .lost(2_100, 3);
        let tale = tale
            .gave(2_300, 3, 1, "lost")
            .granted(1_620, 4, 1)
            .granted(1_650, 4, 2)
            .granted(1_660, 4, 3);
        tale.gave(1_700, 4, 1, "ok")
            .gave(1_710, 4, 2, "ok")
            .gave(1_720, 4, 3, "ok")
    };
    tale("freed").breaks(&[]);
    tale("free").breaks(&[Rule::Lie, Rule::Exclusion]);
}

#[test]
fn who_is_seen_to_have_the_lock_after_a_force_unlock_was_not_its_victim() {
    let tale = |process| {
        let tale = Tale::default().forced(1_000, 1_010, "freed");
        let tale = tale
            .server(1_050, 1_060, &[(process, 1)])
            .granted(100, 1, 1)
            .gave(1_500, 1, 1, "ok");
        tale.granted(1_030, 2, 1).gave(1_500, 2, 1, "ok")
    };
    tale(2).breaks(&[]);
    tale(1).breaks(&[Rule::Exclusion, Rule::Unfounded]);
}

#[test]
fn what_was_forced_may_run_on_count_wrongly_and_write_too_much_for_a_while() {
    let run = |last: Nanos| {
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
        let tale = [150, 1_030, last]
            .into_iter()
            .fold(tale, |tale, at| tale.line(at, 1, 1, Event::Worked));
        let tale =
            tale.lost(last + 1, 1)
                .line(last + 1, 1, 1, Event::TakenBack { why: "lost".into() });
        tale.granted(1_020, 2, 1).gave(1_100, 2, 1, "ok")
    };
    run(1_400).breaks(&[Rule::NotStopped]);
    run(1_400).forced(1_000, 1_010, "freed").breaks(&[]);
    run(3_100)
        .forced(1_000, 1_010, "freed")
        .breaks(&[Rule::NotStopped]);

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
    count().breaks(&[Rule::Exclusion, Rule::Count]);

    let update = || {
        taken_over()
            .section(1_030, 1_040, 2, 1, 0, true)
            .section(1_035, 1_045, 1, 1, 0, true)
    };
    update().forced(1_000, 1_010, "freed").breaks(&[]);
    update().breaks(&[Rule::Exclusion, Rule::LostUpdate]);
}

#[test]
fn a_force_unlock_is_a_reason_to_lose() {
    let told = |at| {
        Tale::default()
            .granted(100, 1, 1)
            .lost(at, 1)
            .gave(at + 5, 1, 1, "lost")
            .server(100, at, &[(1, 1)])
    };
    told(1_020).breaks(&[Rule::Lie]);
    told(1_005).forced(1_000, 1_010, "freed").breaks(&[]);
    // Told before it was asked for.
    told(990).forced(1_000, 1_010, "freed").breaks(&[Rule::Lie]);
    // An owner in the same process is told first, and the lock may then not be freed.
    let told_here = |process| {
        let tale = told(1_005).line(1_000, process, 7, Event::Forcing { lock: 0 });
        tale.line(
            1_010,
            process,
            7,
            Event::Forced {
                outcome: "the server refused".into(),
            },
        )
    };
    told_here(1).breaks(&[]);
    told_here(9).breaks(&[Rule::Lie]);
}

#[test]
fn an_old_lease_is_no_reason_not_to_know() {
    // The owner had the lock for 20 s once, and gave it back; then for two seconds, again and
    // again.
    let tale = |gave: Nanos| {
        let long = Event::Invoked {
            lock: 0,
            owner: owner_of(1),
            how: "lock".into(),
            lease: 20_000 * MS,
            renewed: false,
        };
        let tale = Tale::default().line(10, 1, 9, long).line(
            15,
            1,
            9,
            Event::Granted {
                remaining: 19_000 * MS,
            },
        );
        let tale = tale
            .gave(gave, 1, 9, "ok")
            .granted(100, 1, 1)
            .forced(1_000, 1_010, "freed");
        let tale = (500..8_000)
            .step_by(500)
            .fold(tale, |tale, at| tale.sure(at, 1, at + 1_500));
        let tale = tale
            .granted(1_020, 2, 1)
            .sure(3_000, 2, 4_900)
            .gave(4_000, 2, 1, "ok");
        tale.lost(9_000, 1).gave(9_010, 1, 1, "lost")
    };
    tale(30).breaks(&[Rule::Exclusion, Rule::NotTold]);
    // What was there when it took the lock anew lasts on.
    tale(200).breaks(&[]);
}

#[test]
fn a_force_unlock_says_what_it_did() {
    let tale = |outcome| {
        let tale = Tale::default()
            .granted(100, 1, 1)
            .forced(1_000, 1_010, outcome)
            .gave(1_900, 1, 1, "ok");
        tale.server(0, 90, &[])
    };
    let held = |outcome| {
        tale(outcome)
            .server(100, 1_900, &[(1, 1)])
            .server(1_910, 4_000, &[])
    };
    held("freed").breaks(&[Rule::Lie]);
    held("free").breaks(&[Rule::Lie]);
    held("unknown").breaks(&[]);
    // The owner may have taken it again.
    let again = held("freed").invoked(990, 1, 2).line(
        1_008,
        1,
        2,
        Event::Granted {
            remaining: 2_000 * MS,
        },
    );
    again.gave(1_200, 1, 2, "ok").breaks(&[]);
    // It had been freed before, by another.
    let before = tale("free").line(500, 8, 7, Event::Forcing { lock: 0 });
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
    // Or at the same time, and after it.
    let both = |from| {
        let both = tale("free").line(from, 8, 7, Event::Forcing { lock: 0 });
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
    both(1_015).breaks(&[Rule::Lie]);
    // Somebody was there before, and was freed; nobody was there.
    let freed = Tale::default()
        .granted(100, 1, 1)
        .lost(1_005, 1)
        .gave(1_015, 1, 1, "lost")
        .server(0, 90, &[]);
    freed
        .server(100, 1_000, &[(1, 1)])
        .server(1_010, 4_000, &[])
        .forced(1_000, 1_010, "freed")
        .breaks(&[]);
    Tale::default()
        .forced(1_000, 1_010, "free")
        .server(0, 4_000, &[])
        .breaks(&[]);
}

#[test]
fn a_force_unlock_is_told_with_the_next_renewal() {
    // A third of the lease after the force unlock is 1677.
    let tale = |told| {
        let tale = Tale::default()
            .granted(100, 1, 1)
            .renewed()
            .forced(1_000, 1_010, "freed");
        let tale =
            tale.granted(1_020, 2, 1)
                .gave(2_900, 2, 1, "ok")
                .server(1_030, 2_890, &[(2, 1)]);
        tale.lost(told, 1).gave(told + 10, 1, 1, "lost")
    };
    tale(2_150).breaks(&[]);
    tale(2_250).breaks(&[Rule::NotTold]);
    tale(2_250)
        .fault(1_200, 1_700, "replies held", Some(1))
        .breaks(&[]);
    tale(2_250)
        .fault(1_200, 1_700, "replies held", Some(2))
        .breaks(&[Rule::NotTold]);
}

#[test]
fn acquire_that_fails_beside_a_force_unlock_is_a_lie() {
    // Process 1 has the lock, loses it to a force unlock, and its run works on for a while. The
    // acquire of process 3 fails meanwhile, which no force unlock is a reason for.
    let run = Event::Invoked {
        lock: 0,
        owner: owner_of(1),
        how: "run".into(),
        lease: 2_000 * MS,
        renewed: false,
    };
    let tale = Tale::default()
        .line(95, 1, 1, run)
        .line(100, 1, 1, Event::Granted { remaining: 0 });
    let tale = [150, 1_030, 1_100, 1_400]
        .into_iter()
        .fold(tale, |tale, at| tale.line(at, 1, 1, Event::Worked));
    let tale = tale
        .lost(1_401, 1)
        .line(1_401, 1, 1, Event::TakenBack { why: "lost".into() });
    let tale = tale
        .granted(1_020, 2, 1)
        .gave(1_100, 2, 1, "ok")
        .forced(1_000, 1_010, "freed");
    let timed_out = Event::Failed {
        why: "timed out".into(),
    };
    tale.invoked(200, 3, 1)
        .line(1_005, 3, 1, timed_out)
        .breaks(&[Rule::Lie]);
}
