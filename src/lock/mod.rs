//! The public types of locks, one file each, with their requests and guards.

pub(crate) mod guard;
pub(crate) mod reentrant;
pub(crate) mod request;
