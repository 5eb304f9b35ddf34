//! The Lua scripts without the client: each one answers as its header says, and a repeated call
//! changes nothing.

use std::collections::BTreeMap;

use crate::support::server::{Server, unique};
use redis::{Connection, Value, cmd};

const ACQUIRE: &str = include_str!("../../lua/v1/acquire.lua");
const RELEASE: &str = include_str!("../../lua/v1/release.lua");
const RENEW: &str = include_str!("../../lua/v1/renew.lua");
const FORCE_UNLOCK: &str = include_str!("../../lua/v1/force_unlock.lua");
const COUNT: &str = include_str!("../../lua/v1/count.lua");

/// The lease in most calls, ms.
pub const LEASE: i64 = 30_000;

/// An expiry that a call has to extend, ms.
pub const SHORT: i64 = 10_000;

/// How much an expiry may deviate: a slow machine takes this long between two commands, ms.
pub const SLACK: i64 = 5_000;

pub const ME: &str = "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e11:52";
pub const OTHER: &str = "0b8d1a57-6f3e-4a61-8a59-6d2f0d3a7c20:7";
const MAX_COUNT: &str = "9223372036854775807";

/// A server and a connection that calls scripts.
pub struct Bench {
    pub server: Server,
    pub connection: Connection,
}

/// The answer of a script for one lock: code and detail.
pub type Answer = (i64, String);

pub fn answer(code: i64, detail: impl ToString) -> Answer {
    (code, detail.to_string())
}

/// The content of a key, without its expiry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    Absent,
    Hash(BTreeMap<String, String>),
    Other(String),
}

pub fn held(owner: &str, count: impl ToString) -> Content {
    Content::Hash(BTreeMap::from([(owner.to_owned(), count.to_string())]))
}

impl Bench {
    pub fn new() -> Self {
        let server = Server::start();
        Self {
            connection: server.connection(),
            server,
        }
    }

    pub fn run<T: redis::FromRedisValue>(&mut self, words: &[&str]) -> T {
        let mut command = redis::Cmd::new();
        command.arg(words);
        command
            .query(&mut self.connection)
            .unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    pub fn execute(&mut self, words: &[&str]) {
        let _: Value = self.run(words);
    }

    /// Runs a script on several names, each with its row of arguments.
    pub fn eval(&mut self, script: &str, rows: &[(&str, &[&str])]) -> Vec<Answer> {
        eval(&mut self.connection, script, rows)
    }

    fn acquire(&mut self, name: &str, owner: &str, before: &str, target: &str) -> Answer {
        self.acquire_for(name, owner, LEASE, before, target)
    }

    fn acquire_for(
        &mut self,
        name: &str,
        owner: &str,
        lease: i64,
        before: &str,
        target: &str,
    ) -> Answer {
        one(self.eval(
            ACQUIRE,
            &[(name, &[owner, &lease.to_string(), before, target])],
        ))
    }

    fn release(&mut self, name: &str, owner: &str, leave: &str) -> Answer {
        self.release_for(name, owner, LEASE, leave)
    }

    fn release_for(&mut self, name: &str, owner: &str, lease: i64, leave: &str) -> Answer {
        one(self.eval(
            RELEASE,
            &[(name, &[owner, &channel(name), &lease.to_string(), leave])],
        ))
    }

    fn renew(&mut self, name: &str, owner: &str, lease: i64) -> Answer {
        one(self.eval(RENEW, &[(name, &[owner, &lease.to_string()])]))
    }

    fn force_unlock(&mut self, name: &str) -> Answer {
        self.force_unlock_owner(name, "")
    }

    fn force_unlock_owner(&mut self, name: &str, owner: &str) -> Answer {
        one(self.eval(FORCE_UNLOCK, &[(name, &[owner, &channel(name)])]))
    }

    fn count(&mut self, name: &str, owner: &str) -> Answer {
        one(self.eval(COUNT, &[(name, &[owner])]))
    }

    /// Writes an owner into the key, with an expiry in ms or without one.
    pub fn put(&mut self, name: &str, owner: &str, count: &str, expiry: Option<i64>) {
        self.execute(&["DEL", name]);
        self.execute(&["HSET", name, owner, count]);
        if let Some(expiry) = expiry {
            self.execute(&["PEXPIRE", name, &expiry.to_string()]);
        }
    }

    pub fn content(&mut self, name: &str) -> Content {
        match self.run::<String>(&["TYPE", name]).as_str() {
            "none" => Content::Absent,
            "hash" => Content::Hash(self.run(&["HGETALL", name])),
            "string" => Content::Other(self.run(&["GET", name])),
            other => panic!("{name} is a {other}"),
        }
    }

    pub fn pttl(&mut self, name: &str) -> i64 {
        self.run(&["PTTL", name])
    }

    #[track_caller]
    pub fn assert_expiry(&mut self, name: &str, expected: i64) {
        let pttl = self.pttl(name);
        assert!(
            pttl > expected - SLACK && pttl <= expected,
            "{name} has {pttl} ms, not {expected}"
        );
    }
}

pub fn eval(connection: &mut Connection, script: &str, rows: &[(&str, &[&str])]) -> Vec<Answer> {
    let rows: Vec<([&str; 1], &[&str])> = rows.iter().map(|(name, row)| ([*name], *row)).collect();
    eval_of_keys(connection, script, &rows)
}

/// Runs a script on several locks, each with its keys and its row of arguments.
pub fn eval_of_keys<const K: usize>(
    connection: &mut Connection,
    script: &str,
    rows: &[([&str; K], &[&str])],
) -> Vec<Answer> {
    let mut command = cmd("EVAL");
    command.arg(script).arg(K * rows.len());
    rows.iter().for_each(|(keys, _)| {
        command.arg(keys);
    });
    command.arg("t");
    rows.iter().for_each(|(_, row)| {
        command.arg(row);
    });
    let Value::Array(values) = command
        .query(connection)
        .expect("a script failed as a whole")
    else {
        panic!("not a list")
    };
    let [ticket, pairs @ ..] = values.as_slice() else {
        panic!("an empty list")
    };
    assert_eq!(text(ticket), "t", "the ticket comes first");
    assert_eq!(
        pairs.len(),
        2 * rows.len(),
        "two values for each name: {pairs:?}"
    );
    pairs
        .chunks_exact(2)
        .map(|pair| match pair {
            [Value::Int(code), detail] => (*code, text(detail)),
            _ => panic!("not a code and a detail: {pair:?}"),
        })
        .collect()
}

pub fn one(answers: Vec<Answer>) -> Answer {
    answers.into_iter().next().expect("one answer")
}

pub fn text(value: &Value) -> String {
    redis::from_redis_value_ref(value).expect("a text or a number")
}

fn channel(name: &str) -> String {
    format!("redisson_lock__channel:{{{name}}}")
}

/// A subscriber that collects the published messages.
pub struct Subscriber {
    connection: Connection,
    channel: String,
}

impl Subscriber {
    fn new(server: &Server, name: &str) -> Self {
        Self::on(server, channel(name))
    }

    pub fn on(server: &Server, channel: String) -> Self {
        let mut connection = server.connection();
        let subscribe = cmd("SUBSCRIBE").arg(&channel).get_packed_command();
        connection.send_packed_command(&subscribe).unwrap();
        connection.recv_response().unwrap();
        Self {
            connection,
            channel,
        }
    }

    /// The messages since the last call.
    pub fn received(&mut self, publisher: &mut Connection) -> Vec<String> {
        // The server delivers all earlier messages before this one.
        const END: &str = "end";
        cmd("PUBLISH")
            .arg(&self.channel)
            .arg(END)
            .exec(publisher)
            .unwrap();
        let mut messages = Vec::new();
        loop {
            let message: Vec<String> =
                redis::from_redis_value(self.connection.recv_response().unwrap()).unwrap();
            assert_eq!(message[..2], ["message".to_owned(), self.channel.clone()]);
            if message[2] == END {
                return messages;
            }
            messages.push(message[2].clone());
        }
    }
}

#[test]
fn acquire_answers_match_its_header() {
    let mut bench = Bench::new();
    let name = &unique("acquire");

    assert_eq!(bench.acquire(name, ME, "0", "1"), answer(1, 1));
    assert_eq!(bench.content(name), held(ME, 1));
    bench.assert_expiry(name, LEASE);
    assert_eq!(bench.acquire(name, ME, "1", "2"), answer(1, 2));
    assert_eq!(bench.content(name), held(ME, 2));

    let (code, pttl) = bench.acquire(name, OTHER, "0", "1");
    assert_eq!(code, 0);
    let pttl: i64 = pttl.parse().unwrap();
    assert!(pttl > LEASE - SLACK && pttl <= LEASE, "{pttl}");
    bench.execute(&["PERSIST", name]);
    assert_eq!(bench.acquire(name, OTHER, "0", "1"), answer(0, -1));
    assert_eq!(bench.content(name), held(ME, 2));
    assert_eq!(bench.pttl(name), -1, "another owner restored the expiry");

    assert_eq!(bench.acquire(name, ME, "3", "4"), answer(2, 2));
    assert_eq!(bench.acquire(name, ME, "0", "1"), answer(2, 2));
    assert_eq!((bench.content(name), bench.pttl(name)), (held(ME, 2), -1));
    bench.execute(&["DEL", name]);
    assert_eq!(bench.acquire(name, ME, "1", "2"), answer(2, 0));
    assert_eq!(bench.content(name), Content::Absent);
}

#[test]
fn acquire_writes_target_only_over_expected_count() {
    let mut bench = Bench::new();
    let name = &unique("acquire");
    for stored in 0..=3 {
        for (before, target) in
            (0..=3).flat_map(|before| (1..=4).map(move |target| (before, target)))
        {
            bench.execute(&["DEL", name]);
            if stored > 0 {
                bench.put(name, ME, &stored.to_string(), Some(LEASE));
            }
            let (expected, left) = if stored == before || (stored > 0 && stored == target) {
                (answer(1, target), target)
            } else {
                (answer(2, stored), stored)
            };
            let case = format!("stored count {stored}, {target} over {before}");
            assert_eq!(
                bench.acquire(name, ME, &before.to_string(), &target.to_string()),
                expected,
                "{case}"
            );
            let content = if left == 0 {
                Content::Absent
            } else {
                held(ME, left)
            };
            assert_eq!(bench.content(name), content, "{case}");
        }
    }
}

#[test]
fn release_answers_match_its_header() {
    let mut bench = Bench::new();
    let name = &unique("release");
    let mut subscriber = Subscriber::new(&bench.server, name);

    bench.put(name, ME, "3", Some(SHORT));
    assert_eq!(bench.release(name, ME, "2"), answer(0, 2));
    assert_eq!(bench.content(name), held(ME, 2));
    bench.assert_expiry(name, LEASE);
    assert_eq!(bench.release(name, ME, "3"), answer(2, 2));
    assert_eq!(bench.release(name, OTHER, "0"), answer(2, 0));
    assert_eq!(bench.release(name, OTHER, "1"), answer(2, 0));
    assert_eq!(bench.content(name), held(ME, 2));
    assert_eq!(
        subscriber.received(&mut bench.connection),
        [""; 0],
        "the lock was not free"
    );

    assert_eq!(bench.release(name, ME, "0"), answer(1, 0));
    assert_eq!(bench.content(name), Content::Absent);
    assert_eq!(subscriber.received(&mut bench.connection), ["0"]);
    assert_eq!(bench.release(name, ME, "0"), answer(2, 0));
    assert_eq!(bench.release(name, ME, "1"), answer(2, 0));
    assert_eq!(subscriber.received(&mut bench.connection), [""; 0]);
}

#[test]
fn release_never_raises_count() {
    let mut bench = Bench::new();
    let name = &unique("release");
    for (stored, leave) in (0..=3).flat_map(|stored| (0..=4).map(move |leave| (stored, leave))) {
        bench.execute(&["DEL", name]);
        if stored > 0 {
            bench.put(name, ME, &stored.to_string(), Some(LEASE));
        }
        let (expected, left) = match leave {
            _ if stored == 0 => (answer(2, 0), 0),
            0 => (answer(1, 0), 0),
            leave if leave > stored => (answer(2, stored), stored),
            leave => (answer(0, leave), leave),
        };
        assert_eq!(
            bench.release(name, ME, &leave.to_string()),
            expected,
            "stored count {stored}, to leave {leave}"
        );
        let content = if left == 0 {
            Content::Absent
        } else {
            held(ME, left)
        };
        assert_eq!(
            bench.content(name),
            content,
            "stored count {stored}, to leave {leave}"
        );
    }
}

#[test]
fn renew_answers_match_its_header() {
    let mut bench = Bench::new();
    let name = &unique("renew");
    assert_eq!(bench.renew(name, ME, LEASE), answer(0, 0));
    assert_eq!(bench.content(name), Content::Absent);
    bench.put(name, OTHER, "1", Some(LEASE));
    assert_eq!(bench.renew(name, ME, 2 * LEASE), answer(0, 0));
    bench.assert_expiry(name, LEASE);
    assert_eq!(bench.renew(name, OTHER, 2 * LEASE), answer(1, 0));
    bench.assert_expiry(name, 2 * LEASE);
    assert_eq!(bench.content(name), held(OTHER, 1));
}

#[test]
fn force_unlock_answers_match_its_header() {
    let mut bench = Bench::new();
    let name = &unique("force");
    let mut subscriber = Subscriber::new(&bench.server, name);
    assert_eq!(bench.force_unlock(name), answer(0, 0));
    assert_eq!(subscriber.received(&mut bench.connection), [""; 0]);
    for expiry in [Some(LEASE), None] {
        bench.put(name, OTHER, "4", expiry);
        assert_eq!(bench.force_unlock(name), answer(1, 0));
        assert_eq!(bench.content(name), Content::Absent);
        assert_eq!(subscriber.received(&mut bench.connection), ["0"]);
        // With an owner given, only that owner's hold is freed.
        bench.put(name, OTHER, "4", expiry);
        assert_eq!(bench.force_unlock_owner(name, ME), answer(0, 0));
        assert_eq!(bench.content(name), held(OTHER, 4));
        assert_eq!(bench.force_unlock_owner(name, OTHER), answer(1, 0));
        assert_eq!(bench.force_unlock_owner(name, OTHER), answer(0, 0));
        assert_eq!(subscriber.received(&mut bench.connection), ["0"]);
    }
    bench.execute(&["SET", name, "text"]);
    assert_eq!(bench.force_unlock(name).0, 3);
    assert_eq!(bench.content(name), Content::Other("text".into()));
    assert_eq!(subscriber.received(&mut bench.connection), [""; 0]);
}

#[test]
fn count_answers_match_its_header_and_change_nothing() {
    let mut bench = Bench::new();
    let name = &unique("count");
    assert_eq!(bench.count(name, ME), answer(1, 0));
    assert_eq!(bench.content(name), Content::Absent);
    for (stored, expiry) in [
        ("1", Some(LEASE)),
        ("7", None),
        (MAX_COUNT, Some(LEASE)),
        ("many", None),
    ] {
        bench.put(name, ME, stored, expiry);
        assert_eq!(bench.count(name, ME), answer(1, stored));
        assert_eq!(bench.count(name, OTHER), answer(1, 0));
        assert_eq!(bench.content(name), held(ME, stored));
        assert_eq!(bench.pttl(name) == -1, expiry.is_none());
    }
}

#[test]
fn repeated_script_call_changes_nothing() {
    let mut bench = Bench::new();
    let name = &unique("twice");
    let mut subscriber = Subscriber::new(&bench.server, name);
    let lease = LEASE.to_string();
    let shorter = (LEASE / 2).to_string();
    let channel = &channel(name);
    let calls: [(&str, &[&str]); 13] = [
        (ACQUIRE, &[ME, &lease, "0", "1"]),
        (ACQUIRE, &[ME, &lease, "1", "2"]),
        (ACQUIRE, &[ME, &shorter, "1", "2"]),
        (ACQUIRE, &[ME, &lease, "2", "3"]),
        (ACQUIRE, &[OTHER, &lease, "0", "1"]),
        (RELEASE, &[ME, channel, &lease, "0"]),
        (RELEASE, &[ME, channel, &lease, "1"]),
        (RELEASE, &[ME, channel, &shorter, "1"]),
        (RELEASE, &[OTHER, channel, &lease, "0"]),
        (RENEW, &[ME, &lease]),
        (COUNT, &[ME]),
        (FORCE_UNLOCK, &["", channel]),
        (FORCE_UNLOCK, &[ME, channel]),
    ];
    for stored in [None, Some("1"), Some("2"), Some("many"), Some(MAX_COUNT)] {
        for expiry in [Some(SHORT), Some(2 * LEASE), None] {
            for (script, row) in calls {
                let case = format!(
                    "{stored:?} with {expiry:?} ms: {} {row:?}",
                    script.lines().next().unwrap()
                );
                bench.execute(&["DEL", name]);
                if let Some(count) = stored {
                    bench.put(name, ME, count, expiry);
                }
                bench.eval(script, &[(name, row)]);
                let (content, pttl) = (bench.content(name), bench.pttl(name));
                bench.eval(script, &[(name, row)]);
                assert_eq!(bench.content(name), content, "{case}");
                let again = bench.pttl(name);
                match pttl {
                    ..0 => assert_eq!(again, pttl, "{case}"),
                    // The expiry runs down between the calls, and the owner's calls restore it.
                    0.. => {
                        assert!(
                            again > pttl - SLACK && again <= pttl.max(LEASE),
                            "{case}: {pttl} ms, then {again} ms"
                        )
                    }
                }
                let freed = stored.is_some() && content == Content::Absent;
                let expected: &[&str] = if freed { &["0"] } else { &[] };
                assert_eq!(
                    subscriber.received(&mut bench.connection),
                    expected,
                    "{case}"
                );
            }
        }
    }
}

#[test]
fn missing_expiry_is_restored_by_owners_calls() {
    let mut bench = Bench::new();
    let name = &unique("mended");
    let calls: [fn(&mut Bench, &str) -> Answer; 4] = [
        |bench, name| bench.acquire(name, ME, "2", "3"),
        |bench, name| bench.acquire(name, ME, "1", "2"),
        |bench, name| bench.release(name, ME, "1"),
        |bench, name| bench.renew(name, ME, LEASE),
    ];
    for (at, call) in calls.into_iter().enumerate() {
        bench.put(name, ME, "2", None);
        assert!(call(&mut bench, name).0 < 2, "call {at}");
        bench.assert_expiry(name, LEASE);
    }
}

#[test]
fn expiry_is_never_shortened() {
    let mut bench = Bench::new();
    let name = &unique("shortened");
    let calls: [fn(&mut Bench, &str) -> Answer; 5] = [
        |bench, name| bench.acquire_for(name, ME, 1, "2", "3"),
        |bench, name| bench.acquire_for(name, ME, 1, "1", "2"),
        |bench, name| bench.release_for(name, ME, 0, "1"),
        |bench, name| bench.release_for(name, ME, 0, "2"),
        |bench, name| bench.renew(name, ME, 1),
    ];
    for (at, call) in calls.into_iter().enumerate() {
        bench.put(name, ME, "2", Some(LEASE));
        assert!(call(&mut bench, name).0 < 2, "call {at}");
        bench.assert_expiry(name, LEASE);
    }
    // Nor by calls that are refused.
    bench.put(name, ME, "2", Some(LEASE));
    assert_eq!(bench.acquire_for(name, OTHER, 1, "0", "1").0, 0);
    assert_eq!(bench.acquire_for(name, ME, 1, "7", "8").0, 2);
    assert_eq!(bench.release_for(name, OTHER, 1, "0").0, 2);
    assert_eq!(bench.release_for(name, ME, 1, "3").0, 2);
    assert_eq!(bench.renew(name, OTHER, 1).0, 0);
    bench.assert_expiry(name, LEASE);
}

#[test]
fn key_of_another_type_is_refused_and_kept() {
    let mut bench = Bench::new();
    let name = &unique("type");
    for expiry in [Some(LEASE), None] {
        bench.execute(&["SET", name, "text"]);
        if let Some(expiry) = expiry {
            bench.execute(&["PEXPIRE", name, &expiry.to_string()]);
        }
        let answers = [
            bench.acquire(name, ME, "0", "1"),
            bench.acquire(name, ME, "1", "2"),
            bench.release(name, ME, "0"),
            bench.release(name, ME, "1"),
            bench.renew(name, ME, 2 * LEASE),
            bench.force_unlock(name),
            bench.count(name, ME),
        ];
        for (code, message) in answers {
            assert_eq!(code, 3, "{message}");
            assert!(message.contains("WRONGTYPE"), "{message}");
        }
        assert_eq!(bench.content(name), Content::Other("text".into()));
        match expiry {
            Some(expiry) => bench.assert_expiry(name, expiry),
            None => assert_eq!(bench.pttl(name), -1),
        }
    }
}

#[test]
fn non_numeric_count_is_kept_until_freed() {
    let mut bench = Bench::new();
    let name = &unique("number");
    for count in ["many", "", "-", "1.5x"] {
        bench.put(name, ME, count, Some(LEASE));
        assert_eq!(bench.acquire(name, ME, "0", "1"), answer(2, count));
        assert_eq!(bench.acquire(name, ME, "1", "2"), answer(2, count));
        assert_eq!(bench.acquire(name, OTHER, "0", "1").0, 0);
        let (code, message) = bench.release(name, ME, "1");
        assert_eq!(code, 3);
        assert!(message.contains("not a number"), "{message}");
        assert_eq!(bench.content(name), held(ME, count));
        assert_eq!(bench.renew(name, ME, LEASE), answer(1, 0));
        assert_eq!(bench.content(name), held(ME, count));
        assert_eq!(bench.release(name, ME, "0"), answer(1, 0));
        assert_eq!(bench.content(name), Content::Absent);
    }
}

#[test]
fn count_at_limit_never_overflows() {
    let mut bench = Bench::new();
    let name = &unique("limit");
    let below = "9223372036854775806";
    bench.put(name, ME, MAX_COUNT, Some(LEASE));
    assert_eq!(bench.acquire(name, ME, "0", "1"), answer(2, MAX_COUNT));
    assert_eq!(bench.acquire(name, ME, "1", "2"), answer(2, MAX_COUNT));
    assert_eq!(bench.content(name), held(ME, MAX_COUNT));
    assert_eq!(bench.release(name, ME, below), answer(0, below));
    assert_eq!(bench.content(name), held(ME, below));
    assert_eq!(
        bench.acquire(name, ME, below, MAX_COUNT),
        answer(1, MAX_COUNT)
    );
    assert_eq!(bench.content(name), held(ME, MAX_COUNT));
    assert_eq!(bench.release(name, ME, "1"), answer(0, 1));
    bench.put(name, ME, MAX_COUNT, Some(LEASE));
    assert_eq!(bench.release(name, ME, "0"), answer(1, 0));
    assert_eq!(bench.content(name), Content::Absent);
}

#[test]
fn count_near_limit_is_not_raised_by_release() {
    let mut bench = Bench::new();
    let name = &unique("limit");
    let below = "9223372036854775806";
    bench.put(name, ME, below, Some(LEASE));
    assert_eq!(bench.release(name, ME, MAX_COUNT), answer(2, below));
    assert_eq!(bench.content(name), held(ME, below));
}

#[test]
fn batch_handles_each_lock_independently() {
    const LOCKS: usize = 100;
    const WRONG_TYPE: usize = 41;
    const OTHER_OWNER: usize = 73;
    let mut bench = Bench::new();
    let names: Vec<String> = (0..LOCKS).map(|_| unique("batch")).collect();
    let channels: Vec<String> = names.iter().map(|name| channel(name)).collect();
    let (lease, longer) = (LEASE.to_string(), (2 * LEASE).to_string());
    let mut subscriber = Subscriber::new(&bench.server, &names[WRONG_TYPE + 1]);
    bench.execute(&["SET", &names[WRONG_TYPE], "text"]);
    bench.put(&names[OTHER_OWNER], OTHER, "1", Some(LEASE));
    let mut check =
        |script: &str, row: &dyn Fn(usize) -> Vec<String>, good: Answer, other_owner: i64| {
            let rows: Vec<Vec<String>> = (0..LOCKS).map(row).collect();
            let rows: Vec<Vec<&str>> = rows
                .iter()
                .map(|row| row.iter().map(String::as_str).collect())
                .collect();
            let rows: Vec<(&str, &[&str])> = names
                .iter()
                .zip(&rows)
                .map(|(name, row)| (name.as_str(), row.as_slice()))
                .collect();
            for (at, answer) in bench.eval(script, &rows).into_iter().enumerate() {
                match at {
                    WRONG_TYPE => assert_eq!(answer.0, 3, "{answer:?}"),
                    OTHER_OWNER => assert_eq!(answer.0, other_owner, "{answer:?}"),
                    _ => assert_eq!(answer, good, "lock {at}"),
                }
            }
        };
    let owned = |row: &[&str]| row.iter().map(|&part| part.to_owned()).collect::<Vec<_>>();
    check(
        ACQUIRE,
        &|_| owned(&[ME, &lease, "0", "1"]),
        answer(1, 1),
        0,
    );
    check(
        ACQUIRE,
        &|_| owned(&[ME, &lease, "1", "2"]),
        answer(1, 2),
        0,
    );
    check(COUNT, &|_| owned(&[ME]), answer(1, 2), 1);
    check(RENEW, &|_| owned(&[ME, &longer]), answer(1, 0), 0);
    check(
        RELEASE,
        &|at| owned(&[ME, &channels[at], "0", "1"]),
        answer(0, 1),
        2,
    );
    for (at, name) in names.iter().enumerate() {
        match at {
            WRONG_TYPE => assert_eq!(bench.content(name), Content::Other("text".into())),
            OTHER_OWNER => assert_eq!(bench.content(name), held(OTHER, 1)),
            _ => {
                assert_eq!(bench.content(name), held(ME, 1));
                bench.assert_expiry(name, 2 * LEASE);
            }
        }
    }
    let mut call = |script: &str, row: &dyn Fn(usize) -> Vec<String>| {
        let rows: Vec<Vec<String>> = (0..LOCKS).map(row).collect();
        let rows: Vec<Vec<&str>> = rows
            .iter()
            .map(|row| row.iter().map(String::as_str).collect())
            .collect();
        let rows: Vec<(&str, &[&str])> = names
            .iter()
            .zip(&rows)
            .map(|(name, row)| (name.as_str(), row.as_slice()))
            .collect();
        bench.eval(script, &rows)
    };
    let freed = call(RELEASE, &|at| owned(&[ME, &channels[at], &lease, "0"]));
    assert_eq!(
        freed.iter().filter(|answer| answer.0 == 1).count(),
        LOCKS - 2
    );
    let freed = call(FORCE_UNLOCK, &|at| owned(&["", &channels[at]]));
    assert_eq!(
        freed.iter().filter(|answer| answer.0 == 1).count(),
        1,
        "only the lock of the other owner"
    );
    assert_eq!((freed[OTHER_OWNER].0, freed[WRONG_TYPE].0), (1, 3));
    assert_eq!(subscriber.received(&mut bench.connection), ["0"]);
    let left: Vec<String> = bench.run(&["KEYS", "*"]);
    assert_eq!(left, [names[WRONG_TYPE].clone()]);
}

/// A connection of a user with all rights but these.
pub fn user(bench: &mut Bench, rules: &[&str]) -> Connection {
    let name = unique("user");
    let mut all = vec![
        "ACL", "SETUSER", &name, "on", ">secret", "~*", "&*", "+@all",
    ];
    all.extend(rules);
    bench.execute(&all);
    let mut connection = bench.server.connection();
    cmd("AUTH")
        .arg(&name)
        .arg("secret")
        .exec(&mut connection)
        .unwrap();
    connection
}

#[test]
fn refused_publish_still_frees_lock() {
    let mut bench = Bench::new();
    for rules in [["resetchannels", "&other"], ["-publish", "-pubsub"]] {
        let mut user = user(&mut bench, &rules);
        let name = &unique("acl");
        let channel = &channel(name);
        let lease = &LEASE.to_string();
        assert_eq!(
            eval(&mut user, ACQUIRE, &[(name, &[ME, lease, "0", "1"])]),
            [answer(1, 1)]
        );
        assert_eq!(
            eval(&mut user, RELEASE, &[(name, &[ME, channel, lease, "0"])]),
            [answer(1, 0)],
            "{rules:?}"
        );
        assert_eq!(bench.content(name), Content::Absent);
        bench.put(name, ME, "2", Some(LEASE));
        assert_eq!(
            eval(&mut user, FORCE_UNLOCK, &[(name, &["", channel])]),
            [answer(1, 0)],
            "{rules:?}"
        );
        assert_eq!(bench.content(name), Content::Absent);
    }
}

#[test]
fn acquire_without_pexpire_right_takes_no_hold() {
    let mut bench = Bench::new();
    let mut user = user(&mut bench, &["-pexpire"]);
    let name = &unique("acl");
    let lease = &LEASE.to_string();
    let refused = |answers: Vec<Answer>| assert_eq!(answers[0].0, 3, "{answers:?}");
    refused(eval(&mut user, ACQUIRE, &[(name, &[ME, lease, "0", "1"])]));
    assert_eq!(
        bench.content(name),
        Content::Absent,
        "the lock would never expire"
    );
    for expiry in [Some(SHORT), None] {
        bench.put(name, ME, "1", expiry);
        refused(eval(&mut user, ACQUIRE, &[(name, &[ME, lease, "1", "2"])]));
        refused(eval(&mut user, RENEW, &[(name, &[ME, lease])]));
        assert_eq!(bench.content(name), held(ME, 1));
        bench.put(name, ME, "2", expiry);
        refused(eval(
            &mut user,
            RELEASE,
            &[(name, &[ME, &channel(name), lease, "1"])],
        ));
        assert_eq!(bench.pttl(name) == -1, expiry.is_none());
    }
}

#[test]
fn calls_without_write_right_change_nothing() {
    let mut bench = Bench::new();
    let mut user = user(&mut bench, &["-@write"]);
    let name = &unique("acl");
    let lease = &LEASE.to_string();
    let channel = &channel(name);
    let refused = |answers: Vec<Answer>| assert_eq!(answers[0].0, 3, "{answers:?}");
    refused(eval(&mut user, ACQUIRE, &[(name, &[ME, lease, "0", "1"])]));
    assert_eq!(bench.content(name), Content::Absent);
    bench.put(name, ME, "2", Some(LEASE));
    refused(eval(&mut user, ACQUIRE, &[(name, &[ME, lease, "2", "3"])]));
    refused(eval(
        &mut user,
        RELEASE,
        &[(name, &[ME, channel, lease, "1"])],
    ));
    refused(eval(
        &mut user,
        RELEASE,
        &[(name, &[ME, channel, lease, "0"])],
    ));
    refused(eval(
        &mut user,
        RENEW,
        &[(name, &[ME, &(2 * LEASE).to_string()])],
    ));
    refused(eval(&mut user, FORCE_UNLOCK, &[(name, &["", channel])]));
    assert_eq!(eval(&mut user, COUNT, &[(name, &[ME])]), [answer(1, 2)]);
    assert_eq!(bench.content(name), held(ME, 2));
    bench.assert_expiry(name, LEASE);
}

#[test]
fn server_without_memory_refuses_acquire_and_keeps_locks() {
    let mut bench = Bench::new();
    let (name, free) = (&unique("oom"), &unique("oom"));
    // Longer than the lease, so that the script sets no expiry before the refusal.
    bench.put(name, ME, "2", Some(2 * LEASE));
    bench.execute(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    bench.execute(&["CONFIG", "SET", "maxmemory", "1"]);
    let refused = |answer: Answer| {
        assert_eq!(answer.0, 3, "{answer:?}");
        assert!(answer.1.contains("OOM"), "{answer:?}");
    };
    refused(bench.acquire(free, ME, "0", "1"));
    assert_eq!(bench.content(free), Content::Absent);
    refused(bench.acquire(name, ME, "2", "3"));
    assert_eq!(bench.content(name), held(ME, 2));
    bench.assert_expiry(name, 2 * LEASE);
    // Calls that need no memory work: renewals and releases.
    assert_eq!(bench.count(name, ME), answer(1, 2));
    assert_eq!(bench.renew(name, ME, 3 * LEASE), answer(1, 0));
    bench.assert_expiry(name, 3 * LEASE);
    // A release that leaves holds frees no memory, but is allowed: it writes the expiry first.
    assert_eq!(bench.release(name, ME, "1"), answer(0, 1));
    assert_eq!(bench.content(name), held(ME, 1));
    // A script that has set the expiry may continue without free memory; then it returns code 1.
    let (code, detail) = bench.acquire_for(name, ME, 4 * LEASE, "1", "2");
    match code {
        1 => assert_eq!((detail.as_str(), bench.content(name)), ("2", held(ME, 2))),
        code => assert_eq!((code, bench.content(name)), (3, held(ME, 1))),
    }
    assert_eq!(bench.acquire(name, OTHER, "0", "1").0, 0);
    assert_eq!(bench.release(name, ME, "0"), answer(1, 0));
    assert_eq!(bench.content(name), Content::Absent);
}

#[test]
fn names_are_used_byte_for_byte() {
    let mut bench = Bench::new();
    for name in [
        " ",
        "a b",
        "a\r\nb",
        "a\0b",
        "\u{202e}x",
        "\"'",
        "{}",
        "käse 🧀",
        "%s%n",
        "]]--",
    ] {
        assert_eq!(bench.acquire(name, ME, "0", "1"), answer(1, 1), "{name:?}");
        assert_eq!(bench.renew(name, ME, LEASE), answer(1, 0), "{name:?}");
        assert_eq!(bench.content(name), held(ME, 1), "{name:?}");
        assert_eq!(bench.release(name, ME, "0"), answer(1, 0), "{name:?}");
    }
    assert_eq!(bench.run::<i64>(&["DBSIZE"]), 0);
}
