//! The kinds of lock, as types.

use crate::kind::Kind;

/// The kind of a [`Lock`](crate::Lock): [`Reentrant`], [`Fenced`] or [`Simple`]. For code that
/// works with each of them:
///
/// ```
/// use redisson_lock::{Lock, LockKind};
///
/// fn name_of<K: LockKind>(lock: &Lock<K>) -> &str {
///     lock.name()
/// }
/// ```
pub trait LockKind: sealed::Sealed {}

/// A kind of lock that its owner can acquire again: [`Reentrant`] or [`Fenced`].
///
/// ```
/// use redisson_lock::{LockGuard, ReentrantKind};
///
/// fn holds<K: ReentrantKind>(guard: &LockGuard<K>) -> u64 {
///     guard.hold_count()
/// }
/// ```
pub trait ReentrantKind: LockKind {}

/// The kind of a [`ReentrantLock`](crate::ReentrantLock): `LockGuard` without a parameter is
/// `LockGuard<Reentrant>`. It has no values.
#[derive(Debug)]
#[non_exhaustive]
pub struct Reentrant;

/// The kind of a [`FencedLock`](crate::FencedLock), as in `LockGuard<Fenced>`. It has no values.
#[derive(Debug)]
#[non_exhaustive]
pub struct Fenced;

/// The kind of a [`SimpleLock`](crate::SimpleLock), as in `LockGuard<Simple>`. It has no values.
#[derive(Debug)]
#[non_exhaustive]
pub struct Simple;

impl LockKind for Reentrant {}
impl LockKind for Fenced {}
impl LockKind for Simple {}
impl ReentrantKind for Reentrant {}
impl ReentrantKind for Fenced {}

mod sealed {
    use super::Kind;

    /// Only this library makes kinds of lock.
    pub trait Sealed: 'static {
        const KIND: Kind;
    }

    impl Sealed for super::Reentrant {
        const KIND: Kind = Kind::Reentrant;
    }

    impl Sealed for super::Fenced {
        const KIND: Kind = Kind::Fenced;
    }

    impl Sealed for super::Simple {
        const KIND: Kind = Kind::Simple;
    }
}
