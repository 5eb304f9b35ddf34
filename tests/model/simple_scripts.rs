//! The scripts of the simple lock against a model of their headers; each call is sent once or
//! twice.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use redis::{Connection, cmd};

use crate::check;
use crate::support::server::{Server, unique};

const ACQUIRE: &str = include_str!("../../lua/v1/simple_acquire.lua");
const RELEASE: &str = include_str!("../../lua/v1/simple_release.lua");
const RENEW: &str = include_str!("../../lua/v1/simple_renew.lua");
const COUNT: &str = include_str!("../../lua/v1/simple_count.lua");

/// The values of three owners of this library, and of two other programs.
const OWNERS: [&str; 5] = [
    "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e11:52",
    "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e11:53",
    "0b8d1a57-6f3e-4a61-8a59-6d2f0d3a7c20:52",
    "6f1b5cd07c404f0a9e0d2b7a3c1d9e11",
    "",
];

/// How many of them are owners of this library.
const OURS: usize = 3;

/// The allowed difference between clocks in ms, rounding included.
const SLACK: i64 = 100;

#[derive(Debug, Clone)]
enum Step {
    Acquire {
        owner: usize,
        lease: i64,
    },
    Release {
        owner: usize,
    },
    /// A release that names no owner.
    ForceUnlock,
    Renew {
        owner: usize,
        lease: i64,
    },
    Count {
        owner: usize,
    },
    /// Another program sets the lock, with a lease or without one.
    Set {
        owner: usize,
        lease: Option<i64>,
    },
    /// Another program deletes it, or it expires.
    Delete,
}

/// A lock: its owner, and the two moments between which it expires (ms since the case began), if it
/// does.
type State = Option<(usize, Option<(i64, i64)>)>;

/// The expected code, and the detail unless that is a time to live.
type Answer = (i64, Option<i64>);

/// Applies a call to the state, as the script's header describes it. Whether it published.
fn apply(state: &mut State, step: &Step, ran: (i64, i64)) -> (Answer, bool) {
    let longer = |expires: Option<(i64, i64)>, lease: i64| {
        let own = (ran.0 + lease, ran.1 + lease);
        Some(expires.map_or(own, |old| (old.0.max(own.0), old.1.max(own.1))))
    };
    let quiet = |code, detail| ((code, detail), false);
    match (step, *state) {
        (Step::Acquire { owner, lease }, None) => {
            *state = Some((*owner, longer(None, *lease)));
            quiet(1, Some(1))
        }
        (Step::Acquire { owner, lease }, Some((other, expires))) if *owner == other => {
            *state = Some((other, longer(expires, *lease)));
            quiet(1, Some(1))
        }
        (Step::Acquire { .. }, Some((other, _))) => quiet(if other < OURS { 0 } else { 4 }, None),
        (Step::Release { owner }, Some((other, _))) if *owner == other => {
            *state = None;
            ((1, Some(0)), true)
        }
        (Step::ForceUnlock, Some(_)) => {
            *state = None;
            ((1, Some(0)), true)
        }
        (Step::Release { .. } | Step::ForceUnlock, _) => quiet(2, Some(0)),
        (Step::Renew { owner, lease }, Some((other, expires))) if *owner == other => {
            *state = Some((other, longer(expires, *lease)));
            quiet(1, Some(0))
        }
        (Step::Renew { .. }, _) => quiet(0, Some(0)),
        (Step::Count { owner }, held) => {
            let holds = held.is_some_and(|(other, _)| *owner == other);
            quiet(1, Some(holds.into()))
        }
        (Step::Set { .. } | Step::Delete, _) => unreachable!("not a call"),
    }
}

struct Fixture {
    caller: Connection,
    listener: Connection,
    _server: Server,
}

fn channel(name: &str) -> String {
    format!("simple_lock__channel:{{{name}}}")
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

    fn call(&mut self, name: &str, step: &Step) -> (i64, i64) {
        let (script, row) = match step {
            Step::Acquire { owner, lease } => {
                (ACQUIRE, vec![OWNERS[*owner].to_owned(), lease.to_string()])
            }
            Step::Release { owner } => (RELEASE, vec![OWNERS[*owner].to_owned(), channel(name)]),
            Step::ForceUnlock => (RELEASE, vec![String::new(), channel(name)]),
            Step::Renew { owner, lease } => {
                (RENEW, vec![OWNERS[*owner].to_owned(), lease.to_string()])
            }
            Step::Count { owner } => (COUNT, vec![OWNERS[*owner].to_owned()]),
            Step::Set { .. } | Step::Delete => unreachable!("not a call"),
        };
        let mut command = cmd("EVAL");
        command.arg(script).arg(1).arg(name).arg("ticket").arg(row);
        let (ticket, code, detail): (String, i64, i64) =
            command.query(&mut self.caller).expect("a reply");
        assert_eq!(ticket, "ticket");
        (code, detail)
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

    /// Makes another program's step, and returns the state that it leaves.
    fn set(&mut self, name: &str, step: &Step, now: &dyn Fn() -> i64) -> State {
        let Step::Set { owner, lease } = step else {
            cmd("DEL").arg(name).exec(&mut self.caller).unwrap();
            return None;
        };
        let mut command = cmd("SET");
        command.arg(name).arg(OWNERS[*owner]);
        let from = now();
        if let Some(lease) = lease {
            command.arg("PX").arg(lease);
        }
        command.exec(&mut self.caller).unwrap();
        let until = now() + 1;
        Some((*owner, lease.map(|lease| (from + lease, until + lease))))
    }

    fn run_case(&mut self, steps: &[(Step, bool)]) -> TestCaseResult {
        let name = &unique("scripts");
        let begun = Instant::now();
        let now = || begun.elapsed().as_millis() as i64;
        let mut state: State = None;
        let mut expected_messages = 0;
        for (step, twice) in steps {
            if matches!(step, Step::Set { .. } | Step::Delete) {
                state = self.set(name, step, &now);
                continue;
            }
            for time in 0..=usize::from(*twice) {
                let context = format!("{step:?}, time {time}, with {state:?}");
                let before = state;
                let from = now();
                let (code, detail) = self.call(name, step);
                let (expected, publishes) = apply(&mut state, step, (from, now() + 1));
                prop_assert_eq!(code, expected.0, "{}", &context);
                match (expected.1, before) {
                    (Some(expected), _) => prop_assert_eq!(detail, expected, "{}", &context),
                    (None, Some((_, Some(expires)))) => prop_assert!(
                        detail >= expires.0 - now() - SLACK && detail <= expires.1 - from + SLACK,
                        "{context}"
                    ),
                    (None, _) => prop_assert_eq!(detail, -1, "{}", &context),
                }
                expected_messages += usize::from(publishes);
                if time == 1 {
                    let owner = |state: State| state.map(|(owner, _)| owner);
                    prop_assert_eq!(owner(state), owner(before), "{}", &context);
                }
                self.check_key(name, state, &now)
                    .map_err(|error| TestCaseError::fail(format!("{context}: {error}")))?;
            }
        }
        let published = self.releases_published(name);
        cmd("DEL").arg(name).exec(&mut self.caller).unwrap();
        prop_assert_eq!(
            published,
            expected_messages,
            "the release message is published once each time a release frees the lock"
        );
        Ok(())
    }

    fn check_key(&mut self, name: &str, state: State, now: &dyn Fn() -> i64) -> TestCaseResult {
        let from = now();
        let mut pipe = redis::pipe();
        pipe.atomic().get(name).pttl(name);
        let (value, pttl): (Option<String>, i64) = pipe.query(&mut self.caller).expect("a reply");
        let owner = state.map(|(owner, _)| OWNERS[owner].to_owned());
        prop_assert_eq!(value, owner);
        match state {
            None => prop_assert_eq!(pttl, -2),
            Some((_, None)) => prop_assert_eq!(pttl, -1),
            Some((_, Some(expires))) => {
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
    let owner = || prop_oneof![3 => Just(0_usize), 1 => 1..OURS];
    let lease = || prop_oneof![60_000..600_000_i64, Just(315_360_000_000_i64)];
    prop_oneof![
        6 => (owner(), lease()).prop_map(|(owner, lease)| Step::Acquire { owner, lease }),
        3 => owner().prop_map(|owner| Step::Release { owner }),
        1 => Just(Step::ForceUnlock),
        3 => (owner(), lease()).prop_map(|(owner, lease)| Step::Renew { owner, lease }),
        1 => owner().prop_map(|owner| Step::Count { owner }),
        2 => (0..OWNERS.len(), prop::option::of(lease()))
            .prop_map(|(owner, lease)| Step::Set { owner, lease }),
        1 => Just(Step::Delete),
    ]
}

#[test]
fn simple_script_sent_once_or_twice_matches_header() {
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
