//! The script of the fenced lock without the client: its answers match its header, it moves the
//! hash as `acquire.lua` does, and a repeated call gives a greater token.

use crate::scripts::{
    Answer, Bench, Content, LEASE, ME, OTHER, SHORT, SLACK, answer, eval, eval_of_keys, held, one,
    user,
};
use crate::support::server::unique;

const FENCED_ACQUIRE: &str = include_str!("../../lua/v1/fenced_acquire.lua");
const ACQUIRE: &str = include_str!("../../lua/v1/acquire.lua");

/// The greatest integer to which Lua's numbers are exact.
const EXACT: i64 = 1 << 53;

fn counter_of(name: &str) -> String {
    format!("redisson_lock_token:{{{name}}}")
}

/// Acquires by one call.
fn acquire(bench: &mut Bench, name: &str, owner: &str, counts: [&str; 2], raise: &str) -> Answer {
    acquire_for(bench, name, owner, LEASE, counts, raise)
}

fn acquire_for(
    bench: &mut Bench,
    name: &str,
    owner: &str,
    lease: i64,
    [before, target]: [&str; 2],
    raise: &str,
) -> Answer {
    let row = [owner, &lease.to_string(), before, target, raise];
    let rows = [([name, &counter_of(name)], &row[..])];
    one(eval_of_keys(&mut bench.connection, FENCED_ACQUIRE, &rows))
}

fn counter(bench: &mut Bench, name: &str) -> Option<String> {
    bench.run(&["GET", &counter_of(name)])
}

#[test]
fn fenced_acquire_answers_match_its_header() {
    let mut bench = Bench::new();
    let name = &unique("fenced");

    assert_eq!(acquire(&mut bench, name, ME, ["0", "1"], "1"), answer(1, 1));
    assert_eq!(bench.content(name), held(ME, 1));
    bench.assert_expiry(name, LEASE);
    assert_eq!(acquire(&mut bench, name, ME, ["1", "2"], "0").0, 1);
    assert_eq!(bench.content(name), held(ME, 2));
    assert_eq!(counter(&mut bench, name).as_deref(), Some("1"));
    assert_eq!(acquire(&mut bench, name, ME, ["2", "3"], "1"), answer(1, 2));

    let (code, pttl) = acquire(&mut bench, name, OTHER, ["0", "1"], "1");
    assert_eq!(code, 0);
    let pttl: i64 = pttl.parse().unwrap();
    assert!(pttl > LEASE - SLACK && pttl <= LEASE, "{pttl}");
    bench.execute(&["PERSIST", name]);
    assert_eq!(
        acquire(&mut bench, name, OTHER, ["0", "1"], "1"),
        answer(0, -1)
    );
    for counts in [["4", "5"], ["0", "1"]] {
        assert_eq!(acquire(&mut bench, name, ME, counts, "1"), answer(2, 3));
    }
    assert_eq!((bench.content(name), bench.pttl(name)), (held(ME, 3), -1));
    bench.execute(&["DEL", name]);
    assert_eq!(acquire(&mut bench, name, ME, ["3", "4"], "1"), answer(2, 0));
    assert_eq!(bench.content(name), Content::Absent);
    assert_eq!(
        counter(&mut bench, name).as_deref(),
        Some("2"),
        "a call that was not granted raised it"
    );
    assert_eq!(bench.pttl(&counter_of(name)), -1);
}

/// For every state of the hash and every row of arguments, both scripts leave the same and reply
/// with the same code.
#[test]
fn fenced_acquire_moves_the_hash_as_acquire_does() {
    let mut bench = Bench::new();
    let (fenced, reentrant) = (&unique("fenced"), &unique("reentrant"));
    let counts = [
        "1",
        "2",
        "3",
        "9223372036854775806",
        "9223372036854775807",
        "many",
    ];
    for stored in [None].into_iter().chain(counts.map(Some)) {
        for expiry in [None, Some(SHORT), Some(2 * LEASE)] {
            for owner in [ME, OTHER] {
                for before in ["0", "1", "2", "9223372036854775806"] {
                    for target in ["1", "2", "3", "9223372036854775807"] {
                        let case = format!("{stored:?} {expiry:?} {owner} {before} {target}");
                        for name in [fenced, reentrant] {
                            bench.execute(&["DEL", name]);
                            if let Some(count) = stored {
                                bench.put(name, ME, count, expiry);
                            }
                        }
                        let lease = LEASE.to_string();
                        let row = [owner, &lease, before, target];
                        let rows = [(reentrant.as_str(), &row[..])];
                        let expected = one(eval(&mut bench.connection, ACQUIRE, &rows));
                        let found = acquire(&mut bench, fenced, owner, [before, target], "1");
                        assert_eq!(found.0, expected.0, "{case}");
                        if expected.0 == 2 {
                            assert_eq!(found.1, expected.1, "{case}");
                        }
                        assert_eq!(bench.content(fenced), bench.content(reentrant), "{case}");
                        let (left, other) = (bench.pttl(fenced), bench.pttl(reentrant));
                        assert!((left - other).abs() < SLACK, "{case}: {left}, {other}");
                    }
                }
            }
        }
    }
}

#[test]
fn repeated_fenced_acquire_changes_only_the_counter() {
    let mut bench = Bench::new();
    let name = &unique("fenced");
    for (stored, counts) in [(None, ["0", "1"]), (Some("1"), ["1", "2"])] {
        for raise in [0, 1] {
            bench.execute(&["DEL", name, &counter_of(name)]);
            if let Some(count) = stored {
                bench.put(name, ME, count, Some(SHORT));
            }
            let raise = &raise.to_string();
            for token in 1..=3 {
                let found = acquire(&mut bench, name, ME, counts, raise);
                assert_eq!(found.0, 1);
                if raise == "1" {
                    assert_eq!(found.1, token.to_string(), "no token is given twice");
                }
                assert_eq!(bench.content(name), held(ME, counts[1]));
                bench.assert_expiry(name, LEASE);
            }
            let expected = (raise == "1").then(|| "3".to_owned());
            assert_eq!(counter(&mut bench, name), expected);
        }
    }
}

#[test]
fn fenced_acquire_never_shortens_an_expiry() {
    let mut bench = Bench::new();
    let name = &unique("fenced");
    for counts in [["2", "3"], ["1", "2"]] {
        bench.put(name, ME, "2", Some(LEASE));
        let found = acquire_for(&mut bench, name, ME, 1, counts, "1");
        assert_eq!(found.0, 1);
        bench.assert_expiry(name, LEASE);
        bench.put(name, ME, "2", None);
        assert_eq!(acquire(&mut bench, name, ME, counts, "1").0, 1);
        bench.assert_expiry(name, LEASE);
    }
}

#[test]
fn tokens_are_exact_in_the_whole_range() {
    let mut bench = Bench::new();
    let name = &unique("fenced");
    for before in [
        i64::MIN,
        -EXACT - 2,
        -EXACT - 1,
        -EXACT,
        -1,
        0,
        EXACT - 2,
        EXACT - 1,
        EXACT,
        EXACT + 1,
        i64::MAX - 1,
    ] {
        bench.execute(&["DEL", name]);
        bench.execute(&["SET", &counter_of(name), &before.to_string()]);
        let found = acquire(&mut bench, name, ME, ["0", "1"], "1");
        assert_eq!(found, answer(1, before + 1));
    }
    bench.execute(&["DEL", name]);
    let (code, message) = acquire(&mut bench, name, ME, ["0", "1"], "1");
    assert!(code == 3 && message.contains("overflow"), "{message}");
    assert_eq!(bench.content(name), Content::Absent);
    assert_eq!(counter(&mut bench, name), Some(i64::MAX.to_string()));
}

#[test]
fn refused_counter_or_key_changes_nothing() {
    let mut bench = Bench::new();
    let name = &unique("fenced");
    let counter = &counter_of(name);
    for command in [
        &["HSET", counter, "a", "1"][..],
        &["SET", counter, "many"],
        &["SET", counter, " 1"],
    ] {
        bench.execute(&["DEL", counter, name]);
        bench.execute(command);
        assert_eq!(acquire(&mut bench, name, ME, ["0", "1"], "1").0, 3);
        assert_eq!(bench.content(name), Content::Absent);
        bench.put(name, ME, "1", Some(SHORT));
        assert_eq!(acquire(&mut bench, name, ME, ["1", "2"], "1").0, 3);
        assert_eq!(bench.content(name), held(ME, 1));
        bench.assert_expiry(name, SHORT);
        // Calls that need no token do not look at it.
        assert_eq!(acquire(&mut bench, name, ME, ["1", "2"], "0").0, 1);
        assert_eq!(acquire(&mut bench, name, OTHER, ["0", "1"], "1").0, 0);
    }
    bench.execute(&["DEL", counter]);
    bench.execute(&["SET", name, "text"]);
    let (code, message) = acquire(&mut bench, name, ME, ["0", "1"], "1");
    assert!(code == 3 && message.contains("WRONGTYPE"), "{message}");
    assert_eq!(bench.content(counter), Content::Absent);
}

#[test]
fn batch_handles_each_fenced_lock_independently() {
    const LOCKS: usize = 20;
    let mut bench = Bench::new();
    let names: Vec<String> = (0..LOCKS).map(|_| unique("fenced")).collect();
    let counters: Vec<String> = names.iter().map(|name| counter_of(name)).collect();
    bench.execute(&["SET", &names[3], "text"]);
    bench.put(&names[5], OTHER, "1", Some(LEASE));
    bench.execute(&["SET", &counters[7], "many"]);
    bench.execute(&["SET", &counters[9], "41"]);
    let lease = LEASE.to_string();
    let row = [ME, &lease, "0", "1", "1"];
    let rows: Vec<_> = names
        .iter()
        .zip(&counters)
        .map(|(name, counter)| ([name.as_str(), counter.as_str()], &row[..]))
        .collect();
    let answers = eval_of_keys(&mut bench.connection, FENCED_ACQUIRE, &rows);
    for (at, found) in answers.into_iter().enumerate() {
        match at {
            3 | 7 => assert_eq!(found.0, 3, "{found:?}"),
            5 => assert_eq!(found.0, 0, "{found:?}"),
            9 => assert_eq!(found, answer(1, 42)),
            _ => assert_eq!(found, answer(1, 1), "lock {at}"),
        }
    }
    assert_eq!(bench.content(&names[7]), Content::Absent);
}

/// Each right that the script needs is taken away in turn.
#[test]
fn missing_right_refuses_the_hold_and_keeps_the_hash() {
    let mut bench = Bench::new();
    for right in ["-incr", "-hset", "-pexpire", "-hget"] {
        let mut user = user(&mut bench, &[right]);
        for stored in [None, Some("1")] {
            let name = &unique("acl");
            if let Some(count) = stored {
                bench.put(name, ME, count, Some(SHORT));
            }
            let counts = stored.map_or(["0", "1"], |_| ["1", "2"]);
            let lease = LEASE.to_string();
            let row = [ME, &lease, counts[0], counts[1], "1"];
            let rows = [([name.as_str(), &counter_of(name)], &row[..])];
            let found = one(eval_of_keys(&mut user, FENCED_ACQUIRE, &rows));
            if (right, stored) == ("-hget", None) {
                // A key that does not exist has no fields to read.
                assert_eq!(found, answer(1, 1));
                continue;
            }
            assert_eq!(found.0, 3, "{right}: {found:?}");
            let kept = stored.map_or(Content::Absent, |count| held(ME, count));
            assert_eq!(bench.content(name), kept, "{right}");
        }
    }
    // A counter outside the user's keys.
    let name = &unique("acl");
    let mut user = user(&mut bench, &["resetkeys", &format!("~{name}")]);
    let lease = LEASE.to_string();
    let row = [ME, &lease, "0", "1", "1"];
    let mut command = redis::cmd("EVAL");
    command
        .arg(FENCED_ACQUIRE)
        .arg(2)
        .arg(name)
        .arg(counter_of(name));
    let refused = command.arg("t").arg(&row).exec(&mut user).unwrap_err();
    assert_eq!(refused.code(), Some("NOPERM"), "{refused}");
    assert_eq!(bench.content(name), Content::Absent);
}

#[test]
fn server_without_memory_refuses_the_token_and_keeps_the_hash() {
    let mut bench = Bench::new();
    let (name, free) = (&unique("oom"), &unique("oom"));
    bench.put(name, ME, "2", Some(2 * LEASE));
    bench.execute(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    bench.execute(&["CONFIG", "SET", "maxmemory", "1"]);
    for (name, counts) in [(free, ["0", "1"]), (name, ["2", "3"])] {
        for raise in ["0", "1"] {
            let (code, message) = acquire(&mut bench, name, ME, counts, raise);
            assert!(code == 3 && message.contains("OOM"), "{code} {message}");
        }
        assert_eq!(counter(&mut bench, name), None);
    }
    assert_eq!(bench.content(free), Content::Absent);
    assert_eq!(bench.content(name), held(ME, 2));
    assert_eq!(acquire(&mut bench, name, OTHER, ["0", "1"], "1").0, 0);
}
