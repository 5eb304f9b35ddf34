//! The lanes of waiters under a scheduler that tries thousands of orders of events: nobody may
//! sleep for ever, at most one attempt is in flight, and nothing is left behind.
//!
//! The files under test are those of the library, with the scheduler's own mutex and notification
//! and the model's clock in place of the real ones. Where nothing is ever due by the clock, a lost
//! wake-up shows as a wait without an end.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use shuttle::rand::{Rng, thread_rng};

mod clock;
#[allow(dead_code)]
#[path = "../../../src/wakeup/lane.rs"]
mod lane;
mod server;
mod sync;
#[allow(dead_code)]
#[path = "../../../src/wakeup/table.rs"]
mod table;
mod waiter;

use self::clock::{Instant, NEVER, sleep, spawn};
use self::server::{Server, listen, some_time};
use self::table::Wakeups;
use self::waiter::{Waited, World, goes_away, lock, parks, pauses};

const CHANNEL: Bytes = Bytes::from_static(b"redisson_lock__channel:{stock}");
const NAME: Bytes = Bytes::from_static(b"stock");
const START: Instant = Instant(Duration::ZERO);
/// Longer than a question, its reply and the pause after it.
const GRACE: Duration = ms(60);
const ORDERS: usize = 600;

const fn ms(time: u64) -> Duration {
    Duration::from_millis(time)
}

fn random(range: Range<u64>) -> u64 {
    thread_rng().gen_range(range)
}

/// What a scenario is about.
#[derive(Clone, Copy)]
struct Rules {
    recheck: Duration,
    grace: Duration,
    lease: Duration,
    /// Messages that do not arrive, because the listening connection breaks.
    messages_lost: usize,
    /// Questions to which no reply comes.
    questions_swallowed: usize,
    /// Until then no reply comes at all.
    deaf_until: Instant,
    /// Until then somebody else has the lock.
    held_until: Instant,
    /// The longest that somebody keeps the lock, in milliseconds.
    keep: u64,
    /// For how long the lock may be free while somebody waits who is polled.
    free_at_most: Duration,
}

/// Nothing is due by the clock.
fn timeless() -> Rules {
    Rules {
        recheck: NEVER,
        grace: NEVER,
        lease: NEVER,
        messages_lost: 0,
        questions_swallowed: 0,
        deaf_until: START,
        held_until: START,
        keep: 50,
        free_at_most: NEVER,
    }
}

/// A waiter of a scenario.
#[derive(Clone, Copy)]
enum Who {
    Stays,
    /// Comes that much later.
    Comes(Duration),
    GoesAway,
    /// Is not polled for that time, which is short.
    Pauses(Duration),
    /// Never releases the lock.
    Dies,
    /// Waits for no longer than that, and comes that much later.
    Until {
        wait: Duration,
        comes: Duration,
    },
    /// Is not polled for that time, and then dropped unless it comes back.
    Parks {
        time: Duration,
        comes_back: bool,
    },
}

/// Lets waiters wait, and looks at what is left.
fn crowd(rules: Rules, who: impl IntoIterator<Item = Who>) {
    let who: Vec<_> = who.into_iter().collect();
    let few = 4 * who.len();
    clock::run(async move {
        let server = Server::new(rules);
        let (wakeups, changes) = Wakeups::new();
        let listening = spawn(listen(
            Arc::clone(&server),
            Arc::downgrade(&wakeups),
            changes,
        ));
        let world = World::new(rules, Arc::clone(&server), Arc::clone(&wakeups));
        let waiters = who
            .into_iter()
            .enumerate()
            .map(|(owner, who)| spawn(waits(Arc::clone(&world), owner, who)));
        let mut failed = 0;
        for waiter in waiters.collect::<Vec<_>>() {
            failed += usize::from(waiter.await.unwrap());
        }
        let trouble = rules.questions_swallowed > 0 || rules.deaf_until > START;
        assert!(failed == 0 || trouble, "nothing was in the way");
        world.settled().await;
        assert_eq!(wakeups.channels(), 0, "a lane was left behind");
        assert!(
            trouble || server.questions() <= few,
            "asked {} times",
            server.questions()
        );
        while !server.is_idle() {
            sleep(ms(1)).await;
        }
        drop((world, wakeups));
        listening.await.unwrap();
    });
}

/// Waits, and holds the lock for a while. Tells whether the server told it nothing.
async fn waits(world: Arc<World>, owner: usize, who: Who) -> bool {
    let keep = world.rules.keep;
    let waited = match who {
        Who::Stays | Who::Dies => Some(lock(world, owner, None).await),
        Who::Comes(after) => {
            sleep(after).await;
            Some(lock(world, owner, None).await)
        }
        Who::Pauses(time) => Some(pauses(world, owner, time).await),
        Who::GoesAway => goes_away(world, owner).await,
        Who::Until { wait, comes } => {
            sleep(comes).await;
            Some(lock(world, owner, Some(wait)).await)
        }
        Who::Parks { time, comes_back } => parks(world, owner, time, comes_back).await,
    };
    match waited {
        Some(Waited::Granted(grant)) if matches!(who, Who::Dies) => grant.forget(),
        Some(Waited::Granted(_grant)) => some_time(keep).await,
        Some(Waited::GaveUp) => assert!(matches!(who, Who::Until { .. }), "it had time"),
        Some(Waited::Failed) => return true,
        None => {}
    }
    false
}

#[test]
fn everybody_gets_in_and_nothing_is_left() {
    shuttle::check_random(|| crowd(timeless(), [Who::Stays; 3]), ORDERS);
}

#[test]
fn waiters_that_go_away_take_nothing_with_them() {
    let scenario = || {
        let late = Who::Comes(ms(random(0..10)));
        crowd(timeless(), [Who::Stays, Who::GoesAway, Who::GoesAway, late]);
    };
    shuttle::check_random(scenario, ORDERS);
    shuttle::check_pct(scenario, ORDERS, 3);
}

#[test]
fn messages_that_are_lost_with_the_listening_connection_are_made_up_for() {
    let rules = Rules {
        messages_lost: 2,
        keep: 10,
        ..timeless()
    };
    shuttle::check_random(
        move || crowd(rules, [Who::Stays, Who::Stays, Who::Stays, Who::GoesAway]),
        ORDERS,
    );
}

#[test]
fn a_lease_that_ends_by_itself_is_a_reason_to_try() {
    let rules = Rules {
        lease: ms(40),
        keep: 10,
        free_at_most: ms(30),
        ..timeless()
    };
    shuttle::check_random(
        move || crowd(rules, [Who::Dies, Who::Stays, Who::Dies, Who::Stays]),
        ORDERS,
    );
}

#[test]
fn after_an_attempt_that_told_nothing_the_next_one_asks() {
    let rules = Rules {
        questions_swallowed: 6,
        ..timeless()
    };
    shuttle::check_random(
        move || crowd(rules, [Who::Stays, Who::Stays, Who::Stays, Who::GoesAway]),
        ORDERS,
    );
}

#[test]
fn an_attempt_that_goes_on_is_the_only_one() {
    let scenario = || {
        let deaf_until = START + ms(random(0..400));
        let rules = Rules {
            recheck: ms(20),
            grace: GRACE,
            deaf_until,
            ..timeless()
        };
        crowd(
            rules,
            [Who::Stays, Who::GoesAway, Who::GoesAway, Who::Stays],
        );
    };
    shuttle::check_random(scenario, ORDERS);
}

#[test]
fn who_waits_in_the_dark_hears_of_the_next_answer() {
    let scenario = || {
        let deaf_until = START + ms([0, 1, 50][random(0..3) as usize]);
        // Longer than anybody waits for an answer.
        let rules = Rules {
            deaf_until,
            keep: 400,
            ..timeless()
        };
        let until = |_| Who::Until {
            wait: ms(random(5..30)),
            comes: ms(random(0..20)),
        };
        crowd(
            rules,
            [Who::GoesAway, Who::Stays]
                .into_iter()
                .chain((0..4).map(until)),
        );
    };
    shuttle::check_random(scenario, 2 * ORDERS);
}

/// Somebody who is not polled has the time of a re-check, of an attempt, and of another re-check.
fn parked() -> Rules {
    Rules {
        recheck: ms(100),
        grace: GRACE,
        lease: ms(40),
        held_until: START + ms(random(0..40)),
        keep: 10,
        free_at_most: ms(290),
        ..timeless()
    }
}

#[test]
fn who_pauses_for_less_than_a_recheck_keeps_its_place() {
    let scenario = || {
        let pauses = |_| Who::Pauses(ms(random(0..75)));
        crowd(
            parked(),
            (0..2)
                .map(pauses)
                .chain([Who::Stays, Who::Comes(ms(random(0..100)))]),
        );
    };
    shuttle::check_random(scenario, ORDERS);
}

#[test]
fn who_is_not_polled_is_passed_over_and_stands_in_line_again() {
    let scenario = || {
        let parks = |_| Who::Parks {
            time: ms(random(400..500)),
            comes_back: random(0..2) == 0,
        };
        let late = Who::Comes(ms(random(0..600)));
        crowd(parked(), (0..2).map(parks).chain([Who::Stays, late, late]));
    };
    shuttle::check_random(scenario, 2 * ORDERS);
}

#[test]
fn who_is_not_polled_may_come_back_or_be_dropped_at_any_time() {
    let scenario = |questions_swallowed, free_at_most| {
        let time = random(0..300);
        let parks = |time| Who::Parks {
            time: ms(time),
            comes_back: random(0..2) == 0,
        };
        let late = Who::Comes(ms(time + random(0..8)));
        let rules = Rules {
            questions_swallowed,
            free_at_most,
            ..parked()
        };
        crowd(
            rules,
            [
                parks(time),
                parks(random(0..400)),
                Who::GoesAway,
                Who::Stays,
                late,
            ],
        );
    };
    // One that is dropped at the last moment leaves the other all of a re-check's time.
    shuttle::check_random(move || scenario(0, ms(400)), 2 * ORDERS);
    shuttle::check_random(move || scenario(4, NEVER), ORDERS);
}
