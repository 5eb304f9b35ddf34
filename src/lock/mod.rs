//! The public types of locks, their requests and guards.

pub(crate) mod guard;
pub(crate) mod handle;
pub(crate) mod kinds;
pub(crate) mod request;
