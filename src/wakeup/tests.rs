//! The rules of the line, without a server. (A scheduler tries orders of events in
//! `tests/interleavings`.)

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::{InFlight, Outcome, Pace, Place, Turn, Wakeups};

const CHANNEL: Bytes = Bytes::from_static(b"redisson_lock__channel:{stock}");
const PACE: Pace = Pace {
    recheck: Duration::from_secs(60),
    grace: Duration::from_secs(3),
};

fn join(wakeups: &Arc<Wakeups>, thread: i64) -> Place {
    wakeups.join(&CHANNEL, &Bytes::from_static(b"stock"), thread)
}

fn tries(place: &Place) -> Option<InFlight> {
    match place.turn(PACE) {
        Turn::Try(attempt) => Some(attempt),
        Turn::Sleep(..) => None,
        Turn::Closed => panic!("closed"),
    }
}

/// Tries if it may, and finds the lock held for long.
fn asks(place: &Place) -> bool {
    tries(place)
        .map(|attempt| attempt.answered(Outcome::Held(None)))
        .is_some()
}

async fn is_notified(place: &Place) -> bool {
    tokio::time::timeout(Duration::from_millis(1), place.notified())
        .await
        .is_ok()
}

#[tokio::test(start_paused = true)]
async fn only_the_one_in_front_tries() {
    let (wakeups, _changes) = Wakeups::new();
    let (first, second) = (join(&wakeups, 1), join(&wakeups, 2));
    assert!(!asks(&second));
    assert!(asks(&first));
    assert!(!asks(&first));
    wakeups.message(&CHANNEL);
    assert!(!asks(&second));
    assert!(asks(&first));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_leaves_takes_no_wakeup_with_it() {
    let (wakeups, _changes) = Wakeups::new();
    let (first, second) = (join(&wakeups, 1), join(&wakeups, 2));
    assert!(asks(&first));
    wakeups.message(&CHANNEL);
    drop(first);
    assert!(is_notified(&second).await);
    assert!(asks(&second));
}

#[tokio::test(start_paused = true)]
async fn a_wakeup_during_a_try_is_a_reason_for_another() {
    let (wakeups, _changes) = Wakeups::new();
    let place = join(&wakeups, 1);
    let attempt = tries(&place).unwrap();
    wakeups.message(&CHANNEL);
    attempt.answered(Outcome::Held(None));
    assert!(asks(&place));
    assert!(!asks(&place));
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_was_left_behind_keeps_others_from_trying_until_it_ends() {
    let (wakeups, _changes) = Wakeups::new();
    let (first, second) = (join(&wakeups, 1), join(&wakeups, 2));
    let attempt = tries(&first).unwrap();
    drop(first);
    assert!(!asks(&second));
    wakeups.message(&CHANNEL);
    assert!(!asks(&second), "even with a reason to try");
    assert!(is_notified(&second).await);
    drop(attempt);
    assert!(is_notified(&second).await);
    assert!(asks(&second));
}

#[tokio::test(start_paused = true)]
async fn who_comes_after_an_attempt_that_told_nothing_asks_for_itself() {
    let (wakeups, _changes) = Wakeups::new();
    let first = join(&wakeups, 1);
    let attempt = tries(&first).unwrap();
    let second = join(&wakeups, 2);
    drop(first);
    drop(attempt);
    assert!(asks(&second));
    let third = join(&wakeups, 3);
    drop(second);
    assert!(
        !asks(&third),
        "the one before was told that the lock is held"
    );
}

#[tokio::test(start_paused = true)]
async fn a_lane_lives_as_long_as_its_attempt() {
    let (wakeups, _changes) = Wakeups::new();
    let place = join(&wakeups, 1);
    let attempt = tries(&place).unwrap();
    drop(place);
    assert_eq!(wakeups.channels(), 1);
    let next = join(&wakeups, 2);
    assert!(!asks(&next));
    drop(next);
    drop(attempt);
    assert_eq!(wakeups.channels(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_is_not_polled_gives_way() {
    let (wakeups, _changes) = Wakeups::new();
    let (parked, second, third) = (join(&wakeups, 1), join(&wakeups, 2), join(&wakeups, 3));
    assert!(asks(&parked));
    wakeups.message(&CHANNEL);
    assert!(!asks(&third));
    tokio::time::advance(2 * PACE.recheck).await;
    assert!(!asks(&third), "the second comes first");
    assert!(is_notified(&second).await);
    assert!(asks(&second));
    drop(second);
    assert!(!asks(&third));
    assert!(!asks(&parked), "it is last now");
    drop(third);
    wakeups.message(&CHANNEL);
    assert!(asks(&parked));
}

#[tokio::test(start_paused = true)]
async fn who_comes_to_the_front_has_its_own_time_to_take_its_turn() {
    let (wakeups, _changes) = Wakeups::new();
    let (parked, second, third) = (join(&wakeups, 1), join(&wakeups, 2), join(&wakeups, 3));
    assert!(asks(&parked));
    tokio::time::advance(3 * PACE.recheck).await;
    drop(parked);
    assert!(!asks(&third), "the second has only just been notified");
    let attempt = tries(&second).unwrap();
    drop(second);
    tokio::time::advance(2 * PACE.recheck).await;
    let fourth = join(&wakeups, 4);
    drop(attempt);
    assert!(!asks(&fourth), "the third has only just been notified");
    let _attempt = tries(&third).unwrap();
    drop(third);
    drop(fourth);
    tokio::time::advance(3 * PACE.recheck).await;
    let (fifth, sixth) = (join(&wakeups, 5), join(&wakeups, 6));
    assert!(!asks(&sixth), "the fifth has only just come");
    assert!(
        asks(&fifth),
        "who began the attempt in flight is not being polled"
    );
}

#[tokio::test(start_paused = true)]
async fn a_time_of_silence_goes_from_its_first_attempt_to_its_last() {
    let (wakeups, _changes) = Wakeups::new();
    let place = join(&wakeups, 1);
    let (since, time) = (Instant::now(), Duration::from_secs(1));
    for _ in 0..2 {
        let attempt = tries(&place).unwrap();
        tokio::time::advance(time).await;
        drop(attempt);
    }
    let attempt = tries(&place).unwrap();
    let silence = attempt.silence().unwrap();
    assert_eq!((silence.since, silence.until), (since, since + 2 * time));
    attempt.answered(Outcome::Held(None));
    wakeups.message(&CHANNEL);
    assert!(tries(&place).unwrap().silence().is_none());
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_is_not_polled_gives_way_and_one_that_goes_on_does_not() {
    let (wakeups, _changes) = Wakeups::new();
    let (parked, second) = (join(&wakeups, 1), join(&wakeups, 2));
    let attempt = tries(&parked).unwrap();
    tokio::time::advance(PACE.recheck + PACE.grace).await;
    attempt.goes_on();
    tokio::time::advance(PACE.recheck + PACE.grace).await;
    assert!(!asks(&second));
    tokio::time::advance(PACE.recheck).await;
    let other = tries(&second).unwrap();
    drop(attempt);
    assert!(!asks(&second), "the older attempt ends nobody else's");
    drop(other);
    drop(parked);
}

#[tokio::test(start_paused = true)]
async fn the_channel_is_wanted_while_somebody_sleeps_and_not_longer() {
    let (wakeups, mut changes) = Wakeups::new();
    let place = join(&wakeups, 1);
    assert!(asks(&place));
    assert!(!wakeups.wants(&CHANNEL), "nobody sleeps yet");
    assert!(!asks(&place));
    assert!(wakeups.wants(&CHANNEL));
    assert_eq!(changes.try_recv(), Ok(CHANNEL));
    wakeups.confirmed(&CHANNEL);
    assert!(
        asks(&place),
        "a message may have been missed before the confirmation"
    );
    drop(place);
    assert!(!wakeups.wants(&CHANNEL));
    assert_eq!(changes.try_recv(), Ok(CHANNEL));
    assert_eq!(wakeups.channels(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_lost_connection_wakes_everybody_and_asks_again() {
    let (wakeups, mut changes) = Wakeups::new();
    let place = join(&wakeups, 1);
    assert!(asks(&place));
    assert!(!asks(&place));
    wakeups.confirmed(&CHANNEL);
    assert!(asks(&place));
    assert_eq!(changes.try_recv(), Ok(CHANNEL));
    assert!(wakeups.wants(&CHANNEL));
    wakeups.interrupted();
    wakeups.interrupted();
    assert_eq!(changes.try_recv(), Ok(CHANNEL));
    assert!(asks(&place));
    wakeups.missed();
    assert!(asks(&place));
}

#[tokio::test(start_paused = true)]
async fn a_confirmation_that_the_lost_connection_sent_does_not_stand_for_the_next_one() {
    let (wakeups, _changes) = Wakeups::new();
    let place = join(&wakeups, 1);
    assert!(asks(&place));
    assert!(!asks(&place));
    wakeups.interrupted();
    wakeups.confirmed(&CHANNEL);
    assert!(asks(&place));
    wakeups.confirmed(&CHANNEL);
    assert!(
        asks(&place),
        "a message may have been missed before the confirmation"
    );
}

#[tokio::test(start_paused = true)]
async fn waiters_of_one_owner_hear_that_it_was_granted() {
    let (wakeups, _changes) = Wakeups::new();
    let (_first, second, other) = (join(&wakeups, 1), join(&wakeups, 1), join(&wakeups, 2));
    wakeups.owner_granted(&CHANNEL, &Bytes::from_static(b"stock"), 1);
    assert!(is_notified(&second).await);
    assert!(!is_notified(&other).await);
}
