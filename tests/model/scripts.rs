//! The scripts alone against a model of their headers; each call is sent once or twice.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use redis::{Connection, Value, cmd};

use crate::check;
use crate::support::server::{Server, unique, wait_until};

const ACQUIRE: &str = include_str!("../../lua/v1/acquire.lua");
const FENCED_ACQUIRE: &str = include_str!("../../lua/v1/fenced_acquire.lua");
const RELEASE: &str = include_str!("../../lua/v1/release.lua");
const RENEW: &str = include_str!("../../lua/v1/renew.lua");
const FORCE_UNLOCK: &str = include_str!("../../lua/v1/force_unlock.lua");
const COUNT: &str = include_str!("../../lua/v1/count.lua");

const OWNERS: [&str; 3] = [
    "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e11:52",
    "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e11:53",
    "0b8d1a57-6f3e-4a61-8a59-6d2f0d3a7c20:52",
];

/// The allowed difference between clocks in ms, rounding included.
const SLACK: i64 = 100;

/// The script of an acquire.
#[derive(Debug, Clone, Copy)]
enum By {
    Reentrant,
    /// Whether it asks for a token.
    Fenced(bool),
}

/// One call, or an expiry of the key.
#[derive(Debug, Clone)]
enum Step {
    Acquire {
        by: By,
        owner: usize,
        lease: i64,
        before: i64,
        target: i64,
    },
    /// An acquire by a client that knows the count.
    Reenter {
        by: By,
        owner: usize,
        lease: i64,
    },
    Release {
        owner: usize,
        lease: i64,
        leave: i64,
    },
    /// A release of one hold by a client that knows the count.
    ReleaseOne {
        owner: usize,
        lease: i64,
    },
    Renew {
        owner: usize,
        lease: i64,
    },
    ForceUnlock,
    Count {
        owner: usize,
    },
    Expire,
}

/// A lock: its owner, the hold count, and the two moments between which it expires (ms since the
/// case began).
type State = Option<(usize, i64, (i64, i64))>;

/// The expected reply to a call.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Is(i64, String),
    /// Code 0 of an acquire: another owner holds the lock. The detail is a time to live.
    Held,
    /// Code 1 of a fenced acquire that asks for no token. The detail means nothing.
    Granted,
}

fn is(code: i64, detail: impl ToString) -> Answer {
    Answer::Is(code, detail.to_string())
}

/// The answer of an acquire that is granted, which may raise the counter.
fn granted(by: By, target: i64, token: &mut i64) -> Answer {
    match by {
        By::Reentrant => is(1, target),
        By::Fenced(false) => Answer::Granted,
        By::Fenced(true) => {
            *token += 1;
            is(1, *token)
        }
    }
}

/// Applies a call to the state and the counter of tokens, as the script's header describes it.
fn apply(state: &mut State, token: &mut i64, step: &Step, ran: (i64, i64)) -> Answer {
    let longer = |expires: (i64, i64), lease: i64| {
        (expires.0.max(ran.0 + lease), expires.1.max(ran.1 + lease))
    };
    match (step, state.as_mut()) {
        (
            Step::Acquire {
                by,
                owner,
                lease,
                before: 0,
                target,
            },
            None,
        ) => {
            *state = Some((*owner, *target, (ran.0 + lease, ran.1 + lease)));
            granted(*by, *target, token)
        }
        (Step::Acquire { .. }, None) => is(2, 0),
        (Step::Acquire { owner, .. }, Some((other, ..))) if owner != other => Answer::Held,
        (
            Step::Acquire {
                by,
                lease,
                before,
                target,
                ..
            },
            Some((_, count, expires)),
        ) => {
            if count != before && count != target {
                return is(2, count);
            }
            *count = *target;
            *expires = longer(*expires, *lease);
            granted(*by, *target, token)
        }
        (Step::Release { .. }, None) => is(2, 0),
        (Step::Release { owner, .. }, Some((other, ..))) if owner != other => is(2, 0),
        (Step::Release { leave: 0, .. }, Some(_)) => {
            *state = None;
            is(1, 0)
        }
        (Step::Release { leave, .. }, Some((_, count, _))) if leave > count => is(2, count),
        (Step::Release { lease, leave, .. }, Some((_, count, expires))) => {
            *count = *leave;
            if *lease > 0 {
                *expires = (ran.0 + lease, ran.1 + lease);
            }
            is(0, leave)
        }
        (Step::Renew { owner, lease }, Some((other, _, expires))) if owner == other => {
            *expires = longer(*expires, *lease);
            is(1, 0)
        }
        (Step::Renew { .. }, _) => is(0, 0),
        (Step::ForceUnlock, held) => {
            let answer = is(held.is_some().into(), 0);
            *state = None;
            answer
        }
        (Step::Count { owner }, Some((other, count, _))) if owner == other => is(1, count),
        (Step::Count { .. }, _) => is(1, 0),
        (Step::Reenter { .. } | Step::ReleaseOne { .. } | Step::Expire, _) => {
            unreachable!("not a call")
        }
    }
}

/// A server, a connection for calls, and one that receives published messages.
struct Fixture {
    caller: Connection,
    listener: Connection,
    _server: Server,
}

fn channel(name: &str) -> String {
    format!("redisson_lock__channel:{{{name}}}")
}

fn counter(name: &str) -> String {
    format!("redisson_lock_token:{{{name}}}")
}

impl Fixture {
    fn new() -> Self {
        let server = Server::start();
        let mut listener = server.connection();
        let subscribe = cmd("PSUBSCRIBE").arg("*").get_packed_command();
        listener.send_packed_command(&subscribe).unwrap();
        listener.recv_response().unwrap();
        Self {
            caller: server.connection(),
            listener,
            _server: server,
        }
    }

    fn call(&mut self, name: &str, step: &Step) -> (i64, String) {
        let channel = channel(name);
        let number = |number: &i64| number.to_string();
        let mut keys = vec![name.to_owned()];
        let (script, row) = match step {
            Step::Acquire {
                by,
                owner,
                lease,
                before,
                target,
            } => {
                let mut row = vec![
                    OWNERS[*owner].to_owned(),
                    number(lease),
                    number(before),
                    number(target),
                ];
                match by {
                    By::Reentrant => (ACQUIRE, row),
                    By::Fenced(raise) => {
                        keys.push(counter(name));
                        row.push(u8::from(*raise).to_string());
                        (FENCED_ACQUIRE, row)
                    }
                }
            }
            Step::Release {
                owner,
                lease,
                leave,
            } => (
                RELEASE,
                vec![
                    OWNERS[*owner].to_owned(),
                    channel,
                    number(lease),
                    number(leave),
                ],
            ),
            Step::Renew { owner, lease } => (RENEW, vec![OWNERS[*owner].to_owned(), number(lease)]),
            Step::ForceUnlock => (FORCE_UNLOCK, vec![String::new(), channel]),
            Step::Count { owner } => (COUNT, vec![OWNERS[*owner].to_owned()]),
            Step::Reenter { .. } | Step::ReleaseOne { .. } | Step::Expire => {
                unreachable!("not a call")
            }
        };
        let mut command = cmd("EVAL");
        command
            .arg(script)
            .arg(keys.len())
            .arg(keys)
            .arg("ticket")
            .arg(row);
        let (ticket, code, detail): (String, i64, Value) =
            command.query(&mut self.caller).expect("a reply");
        assert_eq!(ticket, "ticket");
        (
            code,
            redis::from_redis_value(detail).expect("a text or a number"),
        )
    }

    /// How many release messages were published for the lock.
    fn releases_published(&mut self, name: &str) -> usize {
        const END: &str = "end";
        cmd("PUBLISH")
            .arg(channel(name))
            .arg(END)
            .exec(&mut self.caller)
            .unwrap();
        let mut count = 0;
        loop {
            let message: Vec<String> =
                redis::from_redis_value(self.listener.recv_response().unwrap()).unwrap();
            match (message[2] == channel(name), message[3].as_str()) {
                (true, END) => return count,
                // A failed case leaves its messages unread.
                (mine, payload) => count += usize::from(mine && payload == "0"),
            }
        }
    }

    fn run_case(&mut self, steps: &[(Step, bool)]) -> TestCaseResult {
        let name = &unique("scripts");
        let begun = Instant::now();
        let now = || begun.elapsed().as_millis() as i64;
        let mut state: State = None;
        let mut token = 0;
        let mut freed = 0;
        for (step, twice) in steps {
            let count = |owner: &usize| {
                state
                    .filter(|(other, ..)| owner == other)
                    .map_or(0, |(_, count, _)| count)
            };
            let step = match step {
                Step::Expire => {
                    cmd("PEXPIRE")
                        .arg(name)
                        .arg(1)
                        .exec(&mut self.caller)
                        .unwrap();
                    wait_until("the key does not exist", Duration::from_secs(10), || {
                        !cmd("EXISTS")
                            .arg(name)
                            .query::<bool>(&mut self.caller)
                            .unwrap()
                    });
                    state = None;
                    continue;
                }
                Step::Reenter { by, owner, lease } => {
                    let before = count(owner);
                    let target = before.saturating_add(1);
                    Step::Acquire {
                        by: *by,
                        owner: *owner,
                        lease: *lease,
                        before,
                        target,
                    }
                }
                Step::ReleaseOne { owner, lease } => Step::Release {
                    owner: *owner,
                    lease: *lease,
                    leave: (count(owner) - 1).max(0),
                },
                step => step.clone(),
            };
            for time in 0..=usize::from(*twice) {
                let context = format!("{step:?}, time {time}, with {state:?}");
                let before = state;
                let from = now();
                let (code, detail) = self.call(name, &step);
                let expected = apply(&mut state, &mut token, &step, (from, now() + 1));
                match (&expected, before) {
                    (Answer::Held, Some((_, _, expires))) => {
                        let left: i64 = detail.parse().expect("ms");
                        prop_assert_eq!(code, 0, "{}", &context);
                        prop_assert!(
                            left >= expires.0 - now() - SLACK && left <= expires.1 - from + SLACK,
                            "{context}"
                        );
                    }
                    (Answer::Granted, _) => prop_assert_eq!(code, 1, "{}", &context),
                    _ => prop_assert_eq!(&expected, &Answer::Is(code, detail), "{}", &context),
                }
                freed += usize::from(before.is_some() && state.is_none());
                // The second run changes neither the owner nor the count, and gives a token of its
                // own.
                if time == 1 {
                    let content = |state: State| state.map(|(owner, count, _)| (owner, count));
                    prop_assert_eq!(content(state), content(before), "{}", &context);
                }
                self.check_key(name, state, token, &now)
                    .map_err(|error| TestCaseError::fail(format!("{context}: {error}")))?;
            }
        }
        let published = self.releases_published(name);
        prop_assert_eq!(
            published,
            freed,
            "the release message is published once each time the lock becomes free"
        );
        cmd("DEL")
            .arg(&[name.clone(), counter(name)])
            .exec(&mut self.caller)
            .unwrap();
        Ok(())
    }

    /// Checks the key and the counter: one owner's field with an expiry, and the last token.
    fn check_key(
        &mut self,
        name: &str,
        state: State,
        token: i64,
        now: &dyn Fn() -> i64,
    ) -> TestCaseResult {
        let from = now();
        let mut pipe = redis::pipe();
        pipe.atomic().hgetall(name).pttl(name).get(counter(name));
        let (fields, pttl, counted): (Vec<(String, i64)>, i64, Option<i64>) =
            pipe.query(&mut self.caller).expect("a reply");
        prop_assert_eq!(counted, (token > 0).then_some(token));
        match state {
            None => prop_assert_eq!((fields, pttl), (vec![], -2)),
            Some((owner, count, expires)) => {
                prop_assert_eq!(fields, vec![(OWNERS[owner].to_owned(), count)]);
                let (least, most) = (expires.0 - now() - SLACK, expires.1 - from + SLACK);
                prop_assert!(
                    pttl >= least.max(0) && pttl <= most,
                    "{pttl} ms, not {least} to {most}"
                );
            }
        }
        Ok(())
    }
}

fn step() -> impl Strategy<Value = Step> {
    let owner = || prop_oneof![3 => Just(0_usize), 1 => 1..OWNERS.len()];
    let lease = || prop_oneof![60_000..600_000_i64, Just(315_360_000_000_i64)];
    // Lua's numbers are exact to 2^53 only.
    let large = || {
        prop::sample::select(vec![
            (1_i64 << 53) - 1,
            1 << 53,
            (1 << 53) + 1,
            i64::MAX - 1,
            i64::MAX,
        ])
    };
    let count = || prop_oneof![8 => 0..4_i64, 1 => 8..12_i64, 1 => large()];
    let by = || prop_oneof![Just(By::Reentrant), any::<bool>().prop_map(By::Fenced)];
    prop_oneof![
        4 => (by(), owner(), lease(), count(), count())
            .prop_map(|(by, owner, lease, before, target)| Step::Acquire { by, owner, lease, before, target: target.max(1) }),
        4 => (by(), owner(), lease()).prop_map(|(by, owner, lease)| Step::Reenter { by, owner, lease }),
        4 => (owner(), lease(), count()).prop_map(|(owner, lease, leave)| Step::Release { owner, lease, leave }),
        2 => (owner(), lease()).prop_map(|(owner, lease)| Step::ReleaseOne { owner, lease }),
        2 => (owner(), lease()).prop_map(|(owner, lease)| Step::Renew { owner, lease }),
        1 => Just(Step::ForceUnlock),
        1 => owner().prop_map(|owner| Step::Count { owner }),
        1 => Just(Step::Expire),
    ]
}

#[test]
fn script_sent_once_or_twice_matches_header() {
    let fixture = Mutex::new(Fixture::new());
    check(
        300,
        prop::collection::vec((step(), any::<bool>()), 1..30),
        |steps| {
            fixture
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .run_case(&steps)
        },
    );
}
