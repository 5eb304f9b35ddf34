//! The key and channel names of a lock, and the check of lock names.

use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

use bytes::Bytes;

use crate::error::Error;
use crate::limits::MAX_NAME_LEN;

/// The keys of one lock. Locks of one name whose channels differ are different locks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Keys(Arc<Names>);

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Names {
    /// The key of the lock: a hash with the field `CLIENT:THREAD` and its hold count, or, for a
    /// simple lock, a string with `CLIENT:THREAD`.
    pub(crate) name: Bytes,
    /// The release channel.
    pub(crate) channel: Bytes,
}

impl Keys {
    /// The keys of a reentrant or fenced lock (Redisson 3.2.0 and later).
    pub(crate) fn reentrant(name: &str) -> Result<Self, Error> {
        Self::new(name, "redisson_lock__channel:")
    }

    /// The keys of a simple lock. The channel is this library's own.
    pub(crate) fn simple(name: &str) -> Result<Self, Error> {
        Self::new(name, "simple_lock__channel:")
    }

    fn new(name: &str, channel: &str) -> Result<Self, Error> {
        let problem = if name.is_empty() {
            "it is empty"
        } else if name.len() > MAX_NAME_LEN {
            "it is too long"
        } else {
            // The name is a part of the channel's name, so one allocation has both.
            let (tag, end) = tag(name);
            let channel = Bytes::from([channel, tag, name, end].concat());
            let at = channel.len() - end.len() - name.len();
            let name = channel.slice(at..at + name.len());
            return Ok(Self(Arc::new(Names { name, channel })));
        };
        Err(Error::InvalidName {
            name: shortened(name),
            problem,
        })
    }

    /// The counter of the tokens of a fenced lock (Redisson 3.19.0 and later).
    pub(crate) fn token(&self) -> Bytes {
        let (tag, end) = tag(self.name());
        ["redisson_lock_token:", tag, self.name(), end]
            .concat()
            .into()
    }

    /// The name as the caller passed it.
    pub(crate) fn name(&self) -> &str {
        // The bytes come from a `str`, so they are valid UTF-8.
        std::str::from_utf8(&self.name).unwrap_or_default()
    }

    /// The name as the caller passed it, as an owned string.
    pub(crate) fn display(&self) -> String {
        self.name().to_owned()
    }
}

impl Deref for Keys {
    type Target = Names;

    fn deref(&self) -> &Names {
        &self.0
    }
}

impl Hash for Keys {
    /// Few names have two kinds of lock, so the name is enough.
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

/// What makes a name a hash tag by Redisson's rule: a name with an opening brace stays unchanged,
/// any other is put in braces.
fn tag(name: &str) -> (&'static str, &'static str) {
    if name.contains('{') {
        ("", "")
    } else {
        ("{", "}")
    }
}

fn shortened(name: &str) -> String {
    const SHOWN: usize = 64;
    match name.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}… ({} bytes)", &name[..end], name.len()),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channel_name_follows_redisson_brace_rule() {
        for (name, channel) in [
            ("order:42", "redisson_lock__channel:{order:42}"),
            ("order:{42}", "redisson_lock__channel:order:{42}"),
            ("a{", "redisson_lock__channel:a{"),
            ("a}b", "redisson_lock__channel:{a}b}"),
            ("käse 🧀", "redisson_lock__channel:{käse 🧀}"),
        ] {
            assert_eq!(Keys::reentrant(name).unwrap().channel, channel.as_bytes());
        }
    }

    #[test]
    fn odd_name_is_used_unchanged() {
        for name in [
            " ",
            "a b",
            "a\r\nb",
            "a\0b",
            "\u{202e}x",
            "\"'",
            "{}",
            "{}x",
            "a{b}c",
        ] {
            assert_eq!(Keys::reentrant(name).unwrap().name, name.as_bytes());
        }
    }

    #[test]
    fn empty_or_too_long_name_is_refused() {
        assert!(matches!(
            Keys::reentrant(""),
            Err(Error::InvalidName { .. })
        ));
        assert!(Keys::reentrant(&"é".repeat(MAX_NAME_LEN / 2)).is_ok());
        let Err(Error::InvalidName { name, .. }) = Keys::reentrant(&"é".repeat(1 << 20)) else {
            panic!("a name of 2 MiB was accepted");
        };
        assert!(name.len() < 200, "{name}");
    }
}

#[cfg(test)]
mod properties {
    use proptest::prelude::*;

    use super::*;

    fn name() -> impl Strategy<Value = String> {
        let odd = prop::sample::select("{}\0\r\n :\u{202e}\u{10ffff}é".chars().collect::<Vec<_>>());
        let text = prop::collection::vec(prop_oneof![odd, any::<char>()], 0..20)
            .prop_map(String::from_iter);
        (text, prop_oneof![4 => Just(1), 1 => 1..2 * MAX_NAME_LEN])
            .prop_map(|(text, times)| text.repeat(times))
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn any_name_is_refused_or_used_unchanged(name in name()) {
            match Keys::reentrant(&name) {
                Ok(keys) => {
                    prop_assert!((1..=MAX_NAME_LEN).contains(&name.len()));
                    prop_assert_eq!(&keys.name, name.as_bytes());
                    prop_assert_eq!(keys.display(), name.as_str());
                    let tag = keys.channel.strip_prefix(b"redisson_lock__channel:").expect("the prefix");
                    let inner = if name.contains('{') { Some(tag) } else { tag.strip_prefix(b"{") };
                    let inner = if name.contains('{') { inner } else { inner.and_then(|tag| tag.strip_suffix(b"}")) };
                    prop_assert_eq!(inner, Some(name.as_bytes()));
                }
                Err(error) => {
                    prop_assert!(!(1..=MAX_NAME_LEN).contains(&name.len()));
                    let Error::InvalidName { name: shown, .. } = &error else { panic!("{error:?}") };
                    prop_assert!(shown.len() < 300 && error.to_string().len() < 1_000);
                }
            }
        }
    }
}
