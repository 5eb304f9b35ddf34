//! The guides. The same pages are in the repository's folder `docs/`.
//!
//! | page | answers |
//! |---|---|
//! | [`safety`] | what the lock promises, what happens under which fault, and what no lock can promise |
//! | [`operations`] | log events, counters, who holds a lock, how to free it, settings |
//! | [`recipes`] | a web handler, a nightly job, a write that checks tokens, code ported from Java, tests |
//! | [`compatibility`] | which Redisson versions were tested, what to know when Java and Rust share a lock, and redis-py |
//! | [`wire_format`] | keys, fields, messages, scripts, commands and the ACL rule |
//! | [`performance`] | what a lock costs, with the commands that measure it |
//! | [`architecture`] | the modules of the source |

/// A page for each file. The pages link to each other by reference, as in `[safety]`. At its end a
/// file defines the references as files, for readers of the repository; here they are defined as
/// items before it, and the first definition of a reference counts. `tests/it/docs.rs` compares the
/// definitions.
macro_rules! pages {
    ($($page:ident $file:literal)+) => {$(
        #[doc = "[acl]: crate::docs::wire_format#the-smallest-acl-rule"]
        #[doc = "[compatibility]: crate::docs::compatibility"]
        #[doc = "[operations]: crate::docs::operations"]
        #[doc = "[passing]: crate::docs::architecture#passing-on"]
        #[doc = "[safety]: crate::docs::safety"]
        #[doc = "[wire-format]: crate::docs::wire_format"]
        #[doc = ""]
        #[doc = include_str!(concat!("../docs/", $file))]
        pub mod $page {}
    )+};
}

pages! {
    architecture "architecture.md"
    compatibility "compatibility.md"
    operations "operations.md"
    performance "performance.md"
    safety "safety.md"
    wire_format "wire-format.md"
}

// Its code is compiled and run as programs of the examples, not as doctests.
#[cfg_attr(doctest, doc = "Recipes.")]
#[cfg_attr(not(doctest), doc = "[safety]: crate::docs::safety")]
#[cfg_attr(not(doctest), doc = "")]
#[cfg_attr(not(doctest), doc = include_str!("../docs/recipes.md"))]
pub mod recipes {}
