//! Scripts: their text, their SHA-1, and how their arguments and replies are laid out.
//!
//! Every script in `lua/` has one shape: a key and a fixed row of arguments for each lock, and a
//! pair of values (code, detail) for each lock in the reply. So one file serves a single lock and
//! a batch, and the layout is written down once, here.

use std::sync::OnceLock;

use bytes::Bytes;
use sha1::{Digest, Sha1};

use crate::error::ServerError;
use crate::link::{Call, Failure, Reply, What};

pub(crate) mod catalog;

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

    /// A call without locks yet: see [`Batch::row`].
    pub(crate) fn batch(&'static self, locks: usize) -> Batch {
        Batch {
            script: self,
            keys: Vec::with_capacity(locks),
            args: Vec::with_capacity(locks * self.row.len() + 1),
        }
    }

    /// What a connection needs to run it.
    pub(crate) fn what(&'static self) -> What {
        What {
            sha1: self.sha1(),
            text: self.text,
        }
    }

    fn sha1(&'static self) -> &'static str {
        self.sha1
            .get_or_init(|| hex(&Sha1::digest(self.text.as_bytes())))
    }
}

/// A call in the making, for one lock or for many.
#[derive(Debug)]
pub(crate) struct Batch {
    script: &'static Script,
    keys: Vec<Bytes>,
    args: Vec<Bytes>,
}

impl Batch {
    /// Adds a lock with its row of arguments, each beside its name so that places cannot drift.
    pub(crate) fn row<const N: usize>(
        mut self,
        key: Bytes,
        row: [(&'static str, Bytes); N],
    ) -> Self {
        debug_assert!(
            row.iter().map(|(name, _)| name).eq(self.script.row),
            "{} takes {:?}, not {row:?}",
            self.script.name,
            self.script.row,
        );
        self.keys.push(key);
        self.args.extend(row.into_iter().map(|(_, value)| value));
        self
    }

    /// The finished call.
    pub(crate) fn call(self) -> Call {
        Call {
            what: self.script.what(),
            keys: self.keys,
            args: self.args,
        }
    }
}

/// What a script answered for one lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Which of the answers that the script's header lists.
    pub(crate) code: i64,
    /// The number beside it, unless `code` is [`REFUSED`].
    pub(crate) number: i64,
    /// The server's error, if `code` is [`REFUSED`].
    pub(crate) refusal: Option<ServerError>,
}

/// The code by which every script says that the server refused a command for that lock.
pub(crate) const REFUSED: i64 = 3;

/// Reads a reply as one answer for each of `locks` locks.
///
/// A reply of any other shape cannot be ours: then nothing is known of what the script did.
pub(crate) fn answers(reply: Reply, locks: usize) -> Result<Vec<Answer>, Failure> {
    let malformed =
        |reply: &Reply| Failure::Unknown(format!("a reply of another shape: {reply:?}"));
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
                // A count that is no number, put there by somebody else's hand.
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
        .ok_or_else(|| Failure::Unknown("an empty reply".into()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each script's text as it landed. A change of text within a wire generation is made here as
    /// well, on purpose: two releases that share locks then differ in a line that a reviewer sees.
    const CHECKSUMS: &str = include_str!("../../lua/v1/CHECKSUMS");

    #[test]
    fn texts_are_the_recorded_ones() {
        let now: String = catalog::ALL
            .iter()
            .map(|script| format!("{}  {}.lua\n", script.sha1(), script.name))
            .collect();
        assert_eq!(
            CHECKSUMS, now,
            "write the new text to lua/v1/CHECKSUMS if the change is meant"
        );
    }

    /// The names of the arguments in a header, in their order.
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
    fn headers_name_the_arguments_that_are_bound() {
        for script in catalog::ALL {
            assert_eq!(header_row(script.text), script.row, "{}", script.name);
        }
    }

    #[test]
    fn headers_tell_keys_arguments_and_replies() {
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
    fn every_file_is_in_the_catalog() {
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
    fn a_reply_of_another_shape_is_an_unknown_outcome() {
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
    fn a_count_that_is_no_number_is_a_refusal() {
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
    use crate::locks::reentrant::Reentrant;
    use crate::locks::{Acquired, Kind, Released, Renewed};

    /// Values as scripts answer them, and all others.
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

    /// Mostly of the shape that scripts answer.
    fn pairs() -> impl Strategy<Value = Reply> {
        prop_oneof![
            1 => reply(),
            3 => prop::collection::vec(reply(), 0..7).prop_map(Reply::List),
            3 => (0..5_i64, reply()).prop_map(|(code, detail)| Reply::List(vec![Reply::Int(code), detail])),
        ]
    }

    /// Code and number, if the reply has one pair of them for each lock.
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
        fn any_reply_is_read_whole_or_not_at_all(reply in pairs(), locks in 0..4_usize) {
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
        fn only_a_whole_reply_that_says_so_grants_or_frees(reply in pairs()) {
            let told = numbers(&reply, 1).map(|told| told[0]);
            let says = |wanted: i64| matches!(told, Some((code, Some(_))) if code == wanted);
            match Reentrant.acquired(reply.clone()) {
                Ok(Acquired::Granted) => prop_assert!(says(1)),
                Ok(Acquired::Held(_)) => prop_assert!(says(0)),
                Ok(Acquired::Other(count)) => prop_assert_eq!(told, Some((2, Some(count)))),
                Err(Failure::Server(_)) => prop_assert!(told.is_some()),
                Err(failure) => prop_assert!(matches!(failure, Failure::Unknown(_))),
            }
            match Reentrant.released(reply.clone()) {
                Ok(Released::Freed) => prop_assert!(says(1)),
                Ok(Released::Left) => prop_assert!(says(0)),
                Ok(Released::Below(count)) => prop_assert_eq!(told, Some((2, Some(count)))),
                Err(Failure::Server(_)) => prop_assert!(told.is_some()),
                Err(failure) => prop_assert!(matches!(failure, Failure::Unknown(_))),
            }
            match Reentrant.counted(reply) {
                Ok(count) => prop_assert!(matches!(told, Some((_, Some(number))) if number == count)),
                Err(Failure::Server(_)) => prop_assert!(told.is_some()),
                Err(failure) => prop_assert!(matches!(failure, Failure::Unknown(_))),
            }
        }

        #[test]
        fn a_renewal_is_believed_lock_by_lock(reply in pairs(), locks in 1..4_usize) {
            let told = numbers(&reply, locks);
            if let Ok(renewed) = Reentrant.renewed(reply, locks) {
                let told = told.expect("a pair for each lock");
                for (renewed, (code, number)) in renewed.into_iter().zip(told) {
                    match renewed {
                        Renewed::Yes => prop_assert!(code == 1 && number.is_some()),
                        Renewed::Gone => prop_assert!(code == 0 && number.is_some()),
                        Renewed::Refused(_) => prop_assert!(code == REFUSED || number.is_none()),
                    }
                }
            }
        }
    }

    /// No script answers so: what it did is not known, and a server's refusal would say that it did
    /// nothing.
    #[test]
    fn a_grant_without_its_count_is_an_unknown_outcome() {
        for detail in [Reply::Nil, Reply::List(vec![])] {
            let outcome = Reentrant.acquired(Reply::List(vec![Reply::Int(1), detail]));
            assert!(matches!(outcome, Err(Failure::Unknown(_))), "{outcome:?}");
        }
    }

    /// A refusal, or a code that `count` does not have, is no count.
    #[test]
    fn a_code_that_is_not_listed_is_no_count() {
        for code in [0, 2, REFUSED, 7] {
            let outcome = Reentrant.counted(Reply::List(vec![Reply::Int(code), Reply::Int(5)]));
            assert!(
                matches!(outcome, Err(Failure::Unknown(_))),
                "{code}: {outcome:?}"
            );
        }
    }
}
