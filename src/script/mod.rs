//! Scripts: their text, their SHA-1, and the layout of their arguments and replies.
//!
//! Every script in `lua/` has the same layout: the keys and a fixed row of arguments for each lock,
//! and a pair of values (code, detail) for each lock in the reply. So one script serves a single
//! lock as well as a batch.

use std::sync::OnceLock;

use bytes::Bytes;
use sha1::{Digest, Sha1};

use crate::error::ServerError;
use crate::wire::{Call, Failure, Reply, Source};

pub(crate) mod catalog;
pub(crate) mod gather;

/// A script of the wire generation `v1`.
#[derive(Debug)]
pub(crate) struct Script {
    name: &'static str,
    text: &'static str,
    row: &'static [&'static str],
    sha1: OnceLock<String>,
}

impl Script {
    const fn new(name: &'static str, text: &'static str, row: &'static [&'static str]) -> Self {
        Self {
            name,
            text,
            row,
            sha1: OnceLock::new(),
        }
    }

    /// Begins a call. [`Batch::row`] adds its locks.
    pub(crate) fn batch(&'static self, locks: usize) -> Batch {
        Batch {
            script: self,
            locks: 0,
            keys: Vec::with_capacity(locks),
            args: Vec::with_capacity(locks * self.row.len() + 1),
        }
    }

    /// The text and SHA-1 by which the link calls the script.
    pub(crate) fn source(&'static self) -> Source {
        Source {
            sha1: self.sha1(),
            text: self.text,
        }
    }

    fn sha1(&'static self) -> &'static str {
        self.sha1
            .get_or_init(|| hex(&Sha1::digest(self.text.as_bytes())))
    }
}

/// A call that is being built, for one lock or several.
#[derive(Debug)]
pub(crate) struct Batch {
    script: &'static Script,
    locks: usize,
    keys: Vec<Bytes>,
    args: Vec<Bytes>,
}

impl Batch {
    /// Adds a lock: its keys, and its row of arguments. Each has its name beside it, which debug
    /// builds compare with the script's row.
    pub(crate) fn row<const K: usize, const N: usize>(
        mut self,
        keys: [Bytes; K],
        row: [(&'static str, Bytes); N],
    ) -> Self {
        debug_assert!(
            row.iter().map(|(name, _)| name).eq(self.script.row),
            "{} takes {:?}, not {row:?}",
            self.script.name,
            self.script.row,
        );
        self.locks += usize::from(N > 0);
        self.keys.extend(keys);
        self.args.extend(row.into_iter().map(|(_, value)| value));
        self
    }

    /// The finished call.
    pub(crate) fn call(self) -> Call {
        Call {
            script: self.script.source(),
            locks: self.locks,
            keys: self.keys,
            args: self.args,
        }
    }
}

/// The answer of a script for one lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    /// One of the codes that the script's header lists.
    pub(crate) code: i64,
    /// The number that follows the code; 0 if `code` is [`REFUSED`].
    pub(crate) number: i64,
    /// The server's error, if `code` is [`REFUSED`].
    pub(crate) refusal: Option<ServerError>,
}

/// The code with which every script reports that the server refused a command for that lock.
pub(crate) const REFUSED: i64 = 3;

/// Reads a reply as one answer for each of `locks` locks.
///
/// A reply of any other layout does not come from the script, so the outcome is unknown.
pub(crate) fn answers(reply: Reply, locks: usize) -> Result<Vec<Answer>, Failure> {
    let malformed = |reply: &Reply| Failure::Unknown(format!("malformed reply: {reply:?}"));
    let Reply::List(values) = &reply else {
        return Err(malformed(&reply));
    };
    if values.len() != 2 * locks {
        return Err(malformed(&reply));
    }
    values
        .chunks_exact(2)
        .map(|pair| match (&pair[0], &pair[1]) {
            (Reply::Int(REFUSED), Reply::Text(text)) => {
                let refusal = Some(String::from_utf8_lossy(text).into_owned().into());
                Ok(Answer {
                    code: REFUSED,
                    number: 0,
                    refusal,
                })
            }
            (Reply::Int(code), detail) => match detail.as_int() {
                Some(number) => Ok(Answer {
                    code: *code,
                    number,
                    refusal: None,
                }),
                // Another program has written a hold count that is not a number.
                None if matches!(detail, Reply::Text(_)) => {
                    let refusal =
                        Some(format!("ERR the hold count is not a number: {detail:?}").into());
                    Ok(Answer {
                        code: REFUSED,
                        number: 0,
                        refusal,
                    })
                }
                None => Err(malformed(&reply)),
            },
            _ => Err(malformed(&reply)),
        })
        .collect()
}

/// Reads a reply as the answer for one lock.
pub(crate) fn answer(reply: Reply) -> Result<Answer, Failure> {
    answers(reply, 1)?
        .pop()
        .ok_or_else(|| Failure::Unknown("empty reply".into()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The recorded checksum of each script. A change of a script within a wire generation has to
    /// change this file as well, so that a reviewer sees that two releases that share locks differ.
    const CHECKSUMS: &str = include_str!("../../lua/v1/CHECKSUMS");

    #[test]
    fn script_texts_match_recorded_checksums() {
        let now: String = catalog::ALL
            .iter()
            .map(|script| format!("{}  {}.lua\n", script.sha1(), script.name))
            .collect();
        assert_eq!(
            CHECKSUMS, now,
            "if the change is intended, write the new checksums to lua/v1/CHECKSUMS"
        );
    }

    /// The names of the arguments in a header, in order.
    fn header_row(text: &str) -> Vec<&str> {
        text.lines()
            .take_while(|line| line.starts_with("--"))
            .skip_while(|line| !line.contains("ARGV[2...]"))
            .skip(1)
            .take_while(|line| line.trim() != "--")
            .filter_map(|line| line.strip_prefix("--            "))
            .filter(|line| !line.starts_with(' '))
            .filter_map(|line| line.split_whitespace().next())
            .collect()
    }

    #[test]
    fn header_lists_arguments_in_bound_order() {
        for script in catalog::ALL {
            assert_eq!(header_row(script.text), script.row, "{}", script.name);
        }
    }

    #[test]
    fn header_describes_keys_arguments_and_reply() {
        for script in catalog::ALL {
            let first = script.text.lines().next().unwrap();
            assert!(
                first.starts_with(&format!("-- {}.lua: ", script.name)),
                "{first}"
            );
            for part in [
                "-- KEYS ",
                "-- ARGV[1]    ticket",
                "-- Reply: ticket, then two values",
            ] {
                assert!(script.text.contains(part), "{}: {part}", script.name);
            }
        }
    }

    #[test]
    fn every_lua_file_is_in_catalog() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/lua/v1");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.ends_with(".lua"))
            .collect();
        files.sort();
        let mut names: Vec<String> = catalog::ALL
            .iter()
            .map(|s| format!("{}.lua", s.name))
            .collect();
        names.sort();
        assert_eq!(files, names);
    }

    #[test]
    fn malformed_reply_is_unknown_outcome() {
        for reply in [
            Reply::Nil,
            Reply::Int(1),
            Reply::List(vec![]),
            Reply::List(vec![Reply::Int(1)]),
            Reply::List(vec![Reply::Nil, Reply::Nil]),
        ] {
            assert!(matches!(answer(reply), Err(Failure::Unknown(_))));
        }
    }

    #[test]
    fn non_numeric_count_is_refusal() {
        let reply = Reply::List(vec![
            Reply::Int(2),
            Reply::Text(Bytes::from_static(b"many")),
        ]);
        assert_eq!(answer(reply).unwrap().code, REFUSED);
    }
}

#[cfg(test)]
mod properties {
    use proptest::prelude::*;

    use super::*;
    use crate::kind::{Acquired, Kind, Released, Renewed};

    /// Any reply: values that scripts return, and others.
    fn reply() -> impl Strategy<Value = Reply> {
        let text = prop_oneof![
            "-?[0-9]{0,20}".prop_map(String::into_bytes),
            prop::collection::vec(any::<u8>(), 0..12),
            Just(b"WRONGTYPE Operation".to_vec()),
        ];
        let one = prop_oneof![
            1 => Just(Reply::Nil),
            3 => (-1..5_i64).prop_map(Reply::Int),
            1 => any::<i64>().prop_map(Reply::Int),
            3 => text.prop_map(|text| Reply::Text(text.into())),
        ];
        one.prop_recursive(3, 24, 7, |one| {
            prop::collection::vec(one, 0..7).prop_map(Reply::List)
        })
    }

    /// Any reply, mostly with the layout of a script's reply.
    fn pairs() -> impl Strategy<Value = Reply> {
        prop_oneof![
            1 => reply(),
            3 => prop::collection::vec(reply(), 0..7).prop_map(Reply::List),
            3 => (0..5_i64, reply()).prop_map(|(code, detail)| Reply::List(vec![Reply::Int(code), detail])),
        ]
    }

    fn kind() -> impl Strategy<Value = Kind> {
        prop::sample::select(vec![Kind::Reentrant, Kind::Fenced, Kind::Simple])
    }

    /// The codes and numbers, if the reply has one pair for each lock.
    fn numbers(reply: &Reply, locks: usize) -> Option<Vec<(i64, Option<i64>)>> {
        let Reply::List(values) = reply else {
            return None;
        };
        let pairs = values.chunks(2).map(|pair| match pair {
            [Reply::Int(code), detail @ (Reply::Int(_) | Reply::Text(_))] => {
                Some((*code, detail.as_int()))
            }
            _ => None,
        });
        pairs
            .collect::<Option<Vec<_>>>()
            .filter(|pairs| pairs.len() == locks)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 2_000, ..Default::default() })]

        #[test]
        fn any_reply_is_read_completely_or_refused(reply in pairs(), locks in 0..4_usize) {
            let expected = numbers(&reply, locks);
            match answers(reply, locks) {
                Ok(answers) => {
                    let expected = expected.expect("a pair for each lock");
                    prop_assert_eq!(answers.len(), locks);
                    for (answer, (code, number)) in answers.into_iter().zip(expected) {
                        prop_assert!(answer.refusal.is_some() || (answer.code, Some(answer.number)) == (code, number));
                        prop_assert!(answer.refusal.is_none() || answer.code == REFUSED);
                    }
                }
                Err(failure) => {
                    prop_assert!(matches!(failure, Failure::Unknown(_)));
                    prop_assert_eq!(expected, None);
                }
            }
        }

        #[test]
        fn only_complete_reply_with_code_grants_or_frees(kind in kind(), reply in pairs()) {
            let answered = numbers(&reply, 1).map(|answered| answered[0]);
            let has_code = |wanted: i64| matches!(answered, Some((code, Some(_))) if code == wanted);
            let is_simple = kind == Kind::Simple;
            match kind.acquired(reply.clone()) {
                Ok(Acquired::Granted(token)) => {
                    prop_assert!(has_code(1));
                    prop_assert_eq!(token.is_some(), kind == Kind::Fenced);
                    prop_assert!(token.is_none() || answered == Some((1, token)));
                }
                Ok(Acquired::Held(held)) => {
                    let code = if held.is_foreign { 4 } else { 0 };
                    prop_assert!(has_code(code) && (is_simple || !held.is_foreign));
                }
                Ok(Acquired::Other(count)) => {
                    prop_assert_eq!(answered, Some((2, Some(count))));
                    prop_assert!(!is_simple);
                }
                Err(Failure::Server(_)) => prop_assert!(answered.is_some()),
                Err(failure) => prop_assert!(matches!(failure, Failure::Unknown(_))),
            }
            match kind.released(reply.clone()) {
                Ok(Released::Freed) => prop_assert!(has_code(1)),
                Ok(Released::Left) => prop_assert!(has_code(0) && !is_simple),
                Ok(Released::Below(count)) => prop_assert_eq!(answered, Some((2, Some(count)))),
                Err(Failure::Server(_)) => prop_assert!(answered.is_some()),
                Err(failure) => prop_assert!(matches!(failure, Failure::Unknown(_))),
            }
            match kind.counted(reply) {
                Ok(count) => prop_assert!(matches!(answered, Some((_, Some(number))) if number == count)),
                Err(Failure::Server(_)) => prop_assert!(answered.is_some()),
                Err(failure) => prop_assert!(matches!(failure, Failure::Unknown(_))),
            }
        }

        #[test]
        fn renewal_reply_is_read_per_lock(kind in kind(), reply in pairs(), locks in 1..4_usize) {
            let answered = numbers(&reply, locks);
            if let Ok(renewed) = kind.renewed(reply, locks) {
                let answered = answered.expect("a pair for each lock");
                for (renewed, (code, number)) in renewed.into_iter().zip(answered) {
                    match renewed {
                        Renewed::Yes => prop_assert!(code == 1 && number.is_some()),
                        Renewed::Gone => prop_assert!(code == 0 && number.is_some()),
                        Renewed::Refused(_) => prop_assert!(code == REFUSED || number.is_none()),
                    }
                }
            }
        }
    }

    /// No script returns this reply. A server error would state that nothing was changed.
    #[test]
    fn grant_without_count_is_unknown_outcome() {
        for detail in [Reply::Nil, Reply::List(vec![])] {
            let outcome = Kind::Reentrant.acquired(Reply::List(vec![Reply::Int(1), detail]));
            assert!(matches!(outcome, Err(Failure::Unknown(_))), "{outcome:?}");
        }
    }

    /// Only code 1 of `count` carries a hold count.
    #[test]
    fn unlisted_code_of_count_is_unknown_outcome() {
        for code in [0, 2, REFUSED, 7] {
            let outcome =
                Kind::Reentrant.counted(Reply::List(vec![Reply::Int(code), Reply::Int(5)]));
            assert!(
                matches!(outcome, Err(Failure::Unknown(_))),
                "{code}: {outcome:?}"
            );
        }
    }
}
