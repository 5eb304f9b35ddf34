//! What clients, locks, requests and guards share. Dropping the last one ends the client.

use std::sync::Arc;

use crate::driver::Driver;
use crate::engine::Outcome;
use crate::error::Error;
use crate::info::LockInfo;
use crate::keys::Keys;
use crate::kind::Inspected;
use crate::owner::{ClientId, Owner, OwnerPolicy, owner_field, thread_of};

/// The caller's side of a client.
pub(crate) struct Handle {
    pub(crate) driver: Arc<Driver>,
    pub(crate) client_id: ClientId,
    pub(crate) owner_policy: OwnerPolicy,
}

impl Handle {
    /// The owner as the server has it.
    pub(crate) fn field(&self, owner: Owner) -> String {
        String::from_utf8_lossy(&owner_field(self.client_id, owner)).into_owned()
    }

    /// The lock's state for a caller; `None` if no owner holds it.
    pub(crate) fn info(
        &self,
        keys: &Keys,
        inspected: &Inspected,
    ) -> Result<Option<LockInfo>, Error> {
        let server = |error| Error::Server {
            lock: Some(keys.display()),
            address: None,
            database: None,
            error,
        };
        let Some((owner, count)) = inspected.owner().map_err(server)? else {
            return Ok(None);
        };
        let thread = thread_of(owner, self.client_id);
        Ok(Some(LockInfo {
            owner: String::from_utf8_lossy(owner).into_owned(),
            local_owner: thread.and_then(|thread| Owner::from_thread_id(thread).ok()),
            hold_count: count.map_err(server)?,
            ttl: inspected.ttl(),
        }))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let _ = self.driver.apply(|engine, now| engine.abandon(now));
    }
}

/// The error of a request that has another outcome than its kind can have.
pub(crate) fn failed(outcome: Outcome) -> Error {
    match outcome {
        Outcome::Failed(error) | Outcome::NotReleased(error) => error,
        other => unreachable!("no outcome of this request: {other:?}"),
    }
}
