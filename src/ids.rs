//! Ids that callers pass, checked before anything else.

use std::str::FromStr;

use uuid::Uuid;

use crate::error::Error;
use crate::owner::{ClientId, Owner};

impl FromStr for ClientId {
    type Err = Error;

    /// Parses a UUID: with or without hyphens, in upper or lower case.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`]: the text is not a UUID.
    fn from_str(text: &str) -> Result<Self, Error> {
        let uuid = Uuid::try_parse(text).map_err(|problem| Error::InvalidConfig {
            setting: "client id",
            problem: problem.to_string(),
            allowed: "a UUID",
        })?;
        Ok(uuid.into())
    }
}

impl Owner {
    /// The owner with this thread id.
    ///
    /// A process that takes over the locks of another one needs it, together with
    /// [`LockClientBuilder::client_id`](crate::LockClientBuilder::client_id); so do tests. The
    /// client does not assume that it knows all holds of such an owner: before its first
    /// acquisition it asks the server for the hold count.
    ///
    /// ```
    /// use redisson_lock::Owner;
    ///
    /// let owner = Owner::from_thread_id(17)?;
    /// assert_eq!(owner.thread_id(), 17);
    /// assert!(Owner::from_thread_id(0).is_err());
    /// # Ok::<(), redisson_lock::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidConfig`]: the id is not above 0.
    pub fn from_thread_id(thread_id: i64) -> Result<Self, Error> {
        if thread_id < 1 {
            return Err(Error::InvalidConfig {
                setting: "thread id",
                problem: format!("{thread_id} is not positive"),
                allowed: "1 to 9223372036854775807",
            });
        }
        Ok(Self::shared(thread_id))
    }
}
