//! Scripts: their text, their SHA-1, and how their arguments and replies are laid out.
//!
//! Every script in `lua/` has one shape: a key and a fixed row of arguments for each lock, and a
//! pair of values (code, detail) for each lock in the reply. So one file serves a single lock and
//! a batch, and the layout is written down once, here.

use std::sync::OnceLock;

use bytes::Bytes;
use sha1::{Digest, Sha1};

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
        Self { name, text, row, sha1: OnceLock::new() }
    }

    /// A call without locks yet: see [`Batch::row`].
    pub(crate) fn batch(&'static self, locks: usize) -> Batch {
        Batch { script: self, keys: Vec::with_capacity(locks), args: Vec::with_capacity(locks * self.row.len() + 1) }
    }

    /// What a connection needs to run it.
    pub(crate) fn what(&'static self) -> What {
        What { sha1: self.sha1(), text: self.text }
    }

    fn sha1(&'static self) -> &'static str {
        self.sha1.get_or_init(|| hex(&Sha1::digest(self.text.as_bytes())))
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
    pub(crate) fn row<const N: usize>(mut self, key: Bytes, row: [(&'static str, Bytes); N]) -> Self {
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
        Call { what: self.script.what(), keys: self.keys, args: self.args }
    }
}

/// What a script answered for one lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Which of the answers that the script's header lists.
    pub(crate) code: i64,
    /// The number beside it, unless `code` is [`REFUSED`].
    pub(crate) number: i64,
    /// The server's words, where `code` is [`REFUSED`].
    pub(crate) refusal: Option<String>,
}

/// The code by which every script says that the server refused a command for that lock.
pub(crate) const REFUSED: i64 = 3;

/// Reads a reply as one answer for each of `locks` locks.
///
/// A reply of any other shape cannot be ours: then nothing is known of what the script did.
pub(crate) fn answers(reply: Reply, locks: usize) -> Result<Vec<Answer>, Failure> {
    let malformed = |reply: &Reply| Failure::Unknown(format!("a reply of another shape: {reply:?}"));
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
                let refusal = Some(String::from_utf8_lossy(text).into_owned());
                Ok(Answer { code: REFUSED, number: 0, refusal })
            }
            (Reply::Int(code), detail) => match detail.as_int() {
                Some(number) => Ok(Answer { code: *code, number, refusal: None }),
                // A count that is no number, put there by somebody else's hand.
                None => {
                    let refusal = Some(format!("ERR the hold count is not a number: {detail:?}"));
                    Ok(Answer { code: REFUSED, number: 0, refusal })
                }
            },
            _ => Err(malformed(&reply)),
        })
        .collect()
}

/// Reads a reply as the answer for one lock.
pub(crate) fn answer(reply: Reply) -> Result<Answer, Failure> {
    answers(reply, 1)?.pop().ok_or_else(|| Failure::Unknown("an empty reply".into()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each script's text as it landed. A change of text within a wire generation is made here as well,
    /// on purpose: two releases that share locks then differ in a line that a reviewer sees.
    const CHECKSUMS: &str = include_str!("../../lua/v1/CHECKSUMS");

    #[test]
    fn texts_are_the_recorded_ones() {
        let now: String =
            catalog::ALL.iter().map(|script| format!("{}  {}.lua\n", script.sha1(), script.name)).collect();
        assert_eq!(CHECKSUMS, now, "write the new text to lua/v1/CHECKSUMS if the change is meant");
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
            assert!(first.starts_with(&format!("-- {}.lua: ", script.name)), "{first}");
            for part in ["-- KEYS ", "-- ARGV[1]    ticket", "-- Reply: ticket, then two values"] {
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
        let mut names: Vec<String> = catalog::ALL.iter().map(|s| format!("{}.lua", s.name)).collect();
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
        let reply = Reply::List(vec![Reply::Int(2), Reply::Text(Bytes::from_static(b"many"))]);
        assert_eq!(answer(reply).unwrap().code, REFUSED);
    }
}
