//! Limits that errors state.

/// The length of the longest lock name, in bytes of UTF-8. A longer name is refused with
/// [`Error::InvalidName`](crate::Error::InvalidName). (A key in Redis may be longer.)
///
/// ```
/// assert!("order:42".len() <= redisson_lock::MAX_NAME_LEN);
/// ```
pub const MAX_NAME_LEN: usize = 16 * 1024;
