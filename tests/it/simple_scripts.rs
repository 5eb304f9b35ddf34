//! The scripts of the simple lock without the client: each one answers as its header says, and a
//! repeated call changes nothing.

use redis::cmd;

use crate::scripts::{
    Answer, Bench, Content, LEASE, ME, OTHER, SHORT, SLACK, Subscriber, answer, eval, one, user,
};
use crate::support::server::unique;

const ACQUIRE: &str = include_str!("../../lua/v1/simple_acquire.lua");
const RELEASE: &str = include_str!("../../lua/v1/simple_release.lua");
const RENEW: &str = include_str!("../../lua/v1/simple_renew.lua");
const COUNT: &str = include_str!("../../lua/v1/simple_count.lua");
const INSPECT: &str = include_str!("../../lua/v1/simple_inspect.lua");

/// What another program may write into the lock.
const FOREIGN: [&str; 5] = [
    "token",
    "",
    "6f1b5cd07c404f0a9e0d2b7a3c1d9e11",
    "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e11",
    "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e11:52:1",
];

fn channel(name: &str) -> String {
    format!("simple_lock__channel:{{{name}}}")
}

fn call(bench: &mut Bench, script: &str, name: &str, row: &[&str]) -> Answer {
    one(bench.eval(script, &[(name, row)]))
}

fn acquire(bench: &mut Bench, name: &str, owner: &str, lease: i64) -> Answer {
    call(bench, ACQUIRE, name, &[owner, &lease.to_string()])
}

fn release(bench: &mut Bench, name: &str, owner: &str) -> Answer {
    call(bench, RELEASE, name, &[owner, &channel(name)])
}

fn renew(bench: &mut Bench, name: &str, owner: &str, lease: i64) -> Answer {
    call(bench, RENEW, name, &[owner, &lease.to_string()])
}

fn count(bench: &mut Bench, name: &str, owner: &str) -> Answer {
    call(bench, COUNT, name, &[owner])
}

fn set(bench: &mut Bench, name: &str, value: &str, expiry: Option<i64>) {
    bench.execute(&["SET", name, value]);
    if let Some(expiry) = expiry {
        bench.execute(&["PEXPIRE", name, &expiry.to_string()]);
    }
}

fn string(value: &str) -> Content {
    Content::Other(value.to_owned())
}

#[test]
fn simple_acquire_answers_match_its_header() {
    let mut bench = Bench::new();
    let name = &unique("simple");
    assert_eq!(acquire(&mut bench, name, ME, LEASE), answer(1, 1));
    assert_eq!(bench.content(name), string(ME));
    bench.assert_expiry(name, LEASE);
    let (code, pttl) = acquire(&mut bench, name, OTHER, 2 * LEASE);
    let pttl: i64 = pttl.parse().unwrap();
    assert!(code == 0 && pttl > LEASE - SLACK && pttl <= LEASE, "{pttl}");
    bench.execute(&["PERSIST", name]);
    assert_eq!(acquire(&mut bench, name, OTHER, LEASE), answer(0, -1));
    assert_eq!((bench.content(name), bench.pttl(name)), (string(ME), -1));
    for value in FOREIGN {
        set(&mut bench, name, value, Some(SHORT));
        let (code, pttl) = acquire(&mut bench, name, ME, LEASE);
        let pttl: i64 = pttl.parse().unwrap();
        assert!(code == 4 && pttl > SHORT - SLACK && pttl <= SHORT, "{pttl}");
        assert_eq!(bench.content(name), string(value));
        bench.assert_expiry(name, SHORT);
        set(&mut bench, name, value, None);
        assert_eq!(acquire(&mut bench, name, ME, LEASE), answer(4, -1));
        assert_eq!(bench.pttl(name), -1);
    }
}

#[test]
fn simple_release_answers_match_its_header() {
    let mut bench = Bench::new();
    let name = &unique("simple");
    let mut subscriber = Subscriber::on(&bench.server, channel(name));
    assert_eq!(release(&mut bench, name, ME), answer(2, 0));
    assert_eq!(release(&mut bench, name, ""), answer(2, 0));
    for value in FOREIGN.into_iter().chain([OTHER]) {
        set(&mut bench, name, value, Some(LEASE));
        assert_eq!(release(&mut bench, name, ME), answer(2, 0));
        assert_eq!(bench.content(name), string(value));
        bench.assert_expiry(name, LEASE);
        assert_eq!(subscriber.received(&mut bench.connection), [""; 0]);
        assert_eq!(release(&mut bench, name, ""), answer(1, 0), "any owner");
        assert_eq!(bench.content(name), Content::Absent);
        assert_eq!(subscriber.received(&mut bench.connection), ["0"]);
    }
    set(&mut bench, name, ME, None);
    assert_eq!(release(&mut bench, name, ME), answer(1, 0));
    assert_eq!(release(&mut bench, name, ME), answer(2, 0));
    assert_eq!(subscriber.received(&mut bench.connection), ["0"]);
    assert_eq!(bench.content(name), Content::Absent);
}

#[test]
fn simple_renew_and_count_answers_match_their_headers() {
    let mut bench = Bench::new();
    let name = &unique("simple");
    assert_eq!(renew(&mut bench, name, ME, LEASE), answer(0, 0));
    assert_eq!(count(&mut bench, name, ME), answer(1, 0));
    assert_eq!(bench.content(name), Content::Absent);
    for value in FOREIGN.into_iter().chain([OTHER]) {
        set(&mut bench, name, value, Some(SHORT));
        assert_eq!(renew(&mut bench, name, ME, LEASE), answer(0, 0));
        assert_eq!(count(&mut bench, name, ME), answer(1, 0));
        assert_eq!(bench.content(name), string(value));
        bench.assert_expiry(name, SHORT);
    }
    for expiry in [Some(SHORT), None] {
        set(&mut bench, name, ME, expiry);
        assert_eq!(renew(&mut bench, name, ME, LEASE), answer(1, 0));
        assert_eq!(count(&mut bench, name, ME), answer(1, 1));
        assert_eq!(bench.content(name), string(ME));
        bench.assert_expiry(name, LEASE);
    }
}

#[test]
fn simple_inspect_answers_match_its_header() {
    let mut bench = Bench::new();
    let name = &unique("simple");
    let inspect = |bench: &mut Bench| -> Vec<Option<String>> {
        let mut command = cmd("EVAL");
        command.arg(INSPECT).arg(1).arg(name).arg("t");
        command.query(&mut bench.connection).unwrap()
    };
    let some = |values: &[&str]| -> Vec<Option<String>> {
        values
            .iter()
            .map(|value| Some((*value).to_owned()))
            .collect()
    };
    assert_eq!(inspect(&mut bench), some(&["t", "-2", ""]));
    for value in FOREIGN.into_iter().chain([ME]) {
        set(&mut bench, name, value, None);
        assert_eq!(inspect(&mut bench), some(&["t", "-1", "", value, "1"]));
        set(&mut bench, name, value, Some(LEASE));
        let found = inspect(&mut bench);
        let pttl: i64 = found[1].as_deref().unwrap().parse().unwrap();
        assert!(pttl > LEASE - SLACK && pttl <= LEASE, "{pttl}");
        assert_eq!(found[3..], some(&[value, "1"]));
    }
    bench.execute(&["DEL", name]);
    bench.execute(&["HSET", name, "a", "1"]);
    let found = inspect(&mut bench);
    assert_eq!(found.len(), 3);
    assert!(found[2].as_deref().unwrap().contains("WRONGTYPE"));
}

#[test]
fn repeated_simple_script_call_changes_nothing() {
    let mut bench = Bench::new();
    let name = &unique("simple");
    let channel = &channel(name);
    let mut subscriber = Subscriber::on(&bench.server, channel.clone());
    let (lease, shorter) = (LEASE.to_string(), (LEASE / 2).to_string());
    let calls: [(&str, &[&str]); 6] = [
        (ACQUIRE, &[ME, &lease]),
        (ACQUIRE, &[ME, &shorter]),
        (RELEASE, &[ME, channel]),
        (RELEASE, &["", channel]),
        (RENEW, &[ME, &lease]),
        (COUNT, &[ME]),
    ];
    for stored in [None, Some(ME), Some(OTHER), Some("token"), Some("")] {
        for expiry in [Some(SHORT), Some(2 * LEASE), None] {
            for (script, row) in calls {
                let title = script.lines().next().unwrap();
                let case = format!("{stored:?} with {expiry:?} ms: {title} {row:?}");
                bench.execute(&["DEL", name]);
                if let Some(value) = stored {
                    set(&mut bench, name, value, expiry);
                }
                call(&mut bench, script, name, row);
                let (content, pttl) = (bench.content(name), bench.pttl(name));
                call(&mut bench, script, name, row);
                assert_eq!(bench.content(name), content, "{case}");
                let again = bench.pttl(name);
                match pttl {
                    ..0 => assert_eq!(again, pttl, "{case}"),
                    0.. => assert!(
                        again > pttl - SLACK && again <= pttl.max(LEASE),
                        "{case}: {pttl} ms, then {again} ms"
                    ),
                }
                // An expiry is never shortened.
                if let (Some(expiry), 0..) = (expiry.filter(|_| stored.is_some()), pttl) {
                    assert!(pttl > expiry - SLACK, "{case}: {pttl} ms");
                }
                let freed = stored.is_some() && content == Content::Absent;
                let expected: &[&str] = if freed { &["0"] } else { &[] };
                let published = subscriber.received(&mut bench.connection);
                assert_eq!(published, expected, "{case}");
            }
        }
    }
}

#[test]
fn key_of_another_type_is_refused_by_each_simple_script() {
    let mut bench = Bench::new();
    let name = &unique("simple");
    for (command, content) in [
        (
            &["HSET", name, ME, "1"][..],
            Some(crate::scripts::held(ME, 1)),
        ),
        (&["RPUSH", name, "1"], None),
        (&["SADD", name, "1"], None),
    ] {
        bench.execute(&["DEL", name]);
        bench.execute(command);
        let answers = [
            acquire(&mut bench, name, ME, LEASE),
            release(&mut bench, name, ME),
            release(&mut bench, name, ""),
            renew(&mut bench, name, ME, LEASE),
            count(&mut bench, name, ME),
        ];
        for (code, message) in answers {
            assert!(code == 3 && message.contains("WRONGTYPE"), "{message}");
        }
        assert_eq!(bench.pttl(name), -1);
        if let Some(content) = content {
            assert_eq!(bench.content(name), content);
        }
    }
}

#[test]
fn batch_handles_each_simple_lock_independently() {
    const LOCKS: usize = 50;
    const WRONG_TYPE: usize = 11;
    const OTHER_OWNER: usize = 23;
    const OTHER_PROGRAM: usize = 37;
    let mut bench = Bench::new();
    let names: Vec<String> = (0..LOCKS).map(|_| unique("batch")).collect();
    let channels: Vec<String> = names.iter().map(|name| channel(name)).collect();
    bench.execute(&["RPUSH", &names[WRONG_TYPE], "1"]);
    set(&mut bench, &names[OTHER_OWNER], OTHER, Some(LEASE));
    set(&mut bench, &names[OTHER_PROGRAM], "token", None);
    let (lease, longer) = (LEASE.to_string(), (2 * LEASE).to_string());
    let mut check = |script: &str, second: Option<&str>, good: Answer, codes: [i64; 2]| {
        let rows: Vec<Vec<&str>> = channels
            .iter()
            .map(|channel| match script {
                COUNT => vec![ME],
                _ => vec![ME, second.unwrap_or(channel)],
            })
            .collect();
        let rows: Vec<(&str, &[&str])> = names
            .iter()
            .zip(&rows)
            .map(|(name, row)| (name.as_str(), row.as_slice()))
            .collect();
        for (at, found) in bench.eval(script, &rows).into_iter().enumerate() {
            match at {
                WRONG_TYPE => assert_eq!(found.0, 3, "{found:?}"),
                OTHER_OWNER => assert_eq!(found.0, codes[0], "{found:?}"),
                OTHER_PROGRAM => assert_eq!(found.0, codes[1], "{found:?}"),
                _ => assert_eq!(found, good, "lock {at}"),
            }
        }
    };
    check(ACQUIRE, Some(&lease), answer(1, 1), [0, 4]);
    check(COUNT, None, answer(1, 1), [1, 1]);
    check(RENEW, Some(&longer), answer(1, 0), [0, 0]);
    check(RELEASE, None, answer(1, 0), [2, 2]);
    check(RELEASE, None, answer(2, 0), [2, 2]);
    let mut left: Vec<String> = bench.run(&["KEYS", "*"]);
    left.sort();
    let mut kept = [WRONG_TYPE, OTHER_OWNER, OTHER_PROGRAM].map(|at| names[at].clone());
    kept.sort();
    assert_eq!(left, kept);
}

/// Each right that a script needs is taken away in turn.
#[test]
fn missing_right_is_reported_and_changes_nothing() {
    let mut bench = Bench::new();
    let lease = &(2 * LEASE).to_string();
    let refused = |answers: Vec<Answer>| assert_eq!(answers[0].0, 3, "{answers:?}");
    for right in ["-get", "-set", "-pexpire", "-del", "-publish"] {
        let mut user = user(&mut bench, &[right]);
        let (name, free) = (&unique("acl"), &unique("acl"));
        set(&mut bench, name, ME, Some(LEASE));
        let acquired = eval(&mut user, ACQUIRE, &[(free, &[ME, lease])]);
        let again = eval(&mut user, ACQUIRE, &[(name, &[ME, lease])]);
        let renewed = eval(&mut user, RENEW, &[(name, &[ME, lease])]);
        let counted = eval(&mut user, COUNT, &[(name, &[ME])]);
        match right {
            "-get" => [acquired, again, renewed, counted]
                .into_iter()
                .for_each(refused),
            "-set" => {
                refused(acquired);
                assert_eq!([again, renewed], [[answer(1, 1)], [answer(1, 0)]]);
            }
            "-pexpire" => {
                assert_eq!(acquired, [answer(1, 1)], "SET brings its expiry");
                bench.assert_expiry(free, 2 * LEASE);
                refused(again);
                refused(renewed);
            }
            _ => assert_eq!([acquired, again], [[answer(1, 1)], [answer(1, 1)]]),
        }
        if matches!(right, "-get" | "-set") {
            assert_eq!(bench.content(free), Content::Absent);
        }
        assert_eq!(bench.content(name), string(ME));
        let released = eval(&mut user, RELEASE, &[(name, &[ME, &channel(name)])]);
        if matches!(right, "-get" | "-del") {
            refused(released);
            assert_eq!(bench.content(name), string(ME), "{right}");
        } else {
            assert_eq!(released, [answer(1, 0)], "{right}");
            assert_eq!(bench.content(name), Content::Absent);
        }
    }
}

#[test]
fn server_without_memory_refuses_only_what_takes_memory() {
    let mut bench = Bench::new();
    let (mine, theirs, free) = (&unique("oom"), &unique("oom"), &unique("oom"));
    set(&mut bench, mine, ME, Some(SHORT));
    set(&mut bench, theirs, OTHER, Some(LEASE));
    bench.execute(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    bench.execute(&["CONFIG", "SET", "maxmemory", "1"]);
    let (code, message) = acquire(&mut bench, free, ME, LEASE);
    assert!(code == 3 && message.contains("OOM"), "{code} {message}");
    assert_eq!(bench.content(free), Content::Absent);
    assert_eq!(acquire(&mut bench, theirs, ME, LEASE).0, 0);
    // The repetition of a call that was granted.
    assert_eq!(acquire(&mut bench, mine, ME, LEASE), answer(1, 1));
    assert_eq!(renew(&mut bench, mine, ME, 2 * LEASE), answer(1, 0));
    bench.assert_expiry(mine, 2 * LEASE);
    assert_eq!(release(&mut bench, mine, ME), answer(1, 0));
    assert_eq!(release(&mut bench, theirs, ""), answer(1, 0));
}

#[test]
fn names_and_values_are_used_byte_for_byte() {
    let mut bench = Bench::new();
    for name in [
        " ",
        "a\r\nb",
        "a\0b",
        "\"'",
        "{}",
        "käse 🧀",
        "%s%n",
        "]]--",
    ] {
        assert_eq!(
            acquire(&mut bench, name, ME, LEASE),
            answer(1, 1),
            "{name:?}"
        );
        assert_eq!(renew(&mut bench, name, ME, LEASE), answer(1, 0), "{name:?}");
        assert_eq!(bench.content(name), string(ME), "{name:?}");
        assert_eq!(release(&mut bench, name, ME), answer(1, 0), "{name:?}");
        set(&mut bench, name, name, None);
        assert_eq!(count(&mut bench, name, name), answer(1, 1), "{name:?}");
        assert_eq!(release(&mut bench, name, name), answer(1, 0), "{name:?}");
    }
    assert_eq!(bench.run::<i64>(&["DBSIZE"]), 0);
}
