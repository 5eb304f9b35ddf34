//! What the server knows of a lock.

use std::time::Duration;

use bytes::Bytes;

use crate::core::{Asked, Core};
use crate::error::{Error, ServerError, Step};
use crate::info::LockInfo;
use crate::keys::Keys;
use crate::link::Reply;
use crate::owner::{Owner, thread_of};
use crate::script::catalog::INSPECT;

/// What `PTTL` answers if there is no key.
const NO_KEY: i64 = -2;

/// What the server knows of a lock.
pub(crate) struct Inspected {
    pttl: i64,
    /// Why its fields cannot be read.
    refusal: Option<ServerError>,
    fields: Vec<Reply>,
}

impl Inspected {
    /// Asks the server.
    pub(crate) async fn of(core: &Core, keys: &Keys) -> Result<Self, Error> {
        let call = INSPECT.batch(1).row(keys.name.clone(), []).call();
        let Asked { reply, .. } = core.ask(call, keys.name(), Step::Inspect).await?;
        let malformed = || Error::Connection {
            address: core.address.to_string(),
            error: "a reply of an unknown shape".to_owned().into(),
        };
        let Reply::List(mut values) = reply else {
            return Err(malformed());
        };
        if values.len() < 2 || values.len() % 2 != 0 {
            return Err(malformed());
        }
        let fields = values.split_off(2);
        match (&values[0], &values[1]) {
            (Reply::Int(pttl), Reply::Text(refusal)) => Ok(Self {
                pttl: *pttl,
                refusal: (!refusal.is_empty())
                    .then(|| String::from_utf8_lossy(refusal).into_owned().into()),
                fields,
            }),
            _ => Err(malformed()),
        }
    }

    /// Whether there is a key.
    pub(super) fn exists(&self) -> bool {
        self.pttl != NO_KEY
    }

    /// The first of the owners, byte by byte.
    pub(super) fn first_owner(self, keys: &Keys) -> Result<Option<Bytes>, Error> {
        Ok(self.first(keys)?.map(|(owner, _)| owner))
    }

    /// The lock's state for a caller; `None` if no owner holds it.
    pub(crate) fn info(self, core: &Core, keys: &Keys) -> Result<Option<LockInfo>, Error> {
        let ttl = u64::try_from(self.pttl).ok().map(Duration::from_millis);
        let Some((owner, count)) = self.first(keys)? else {
            return Ok(None);
        };
        let hold_count = count
            .as_int()
            .and_then(|count| u64::try_from(count).ok())
            .ok_or_else(|| Error::Server {
                lock: Some(keys.display()),
                address: None,
                database: None,
                error: format!("ERR the hold count is not a number: {count:?}").into(),
            })?;
        let thread = thread_of(&owner, core.client_id);
        Ok(Some(LockInfo {
            owner: String::from_utf8_lossy(&owner).into_owned(),
            local_owner: thread.and_then(|thread| Owner::from_thread_id(thread).ok()),
            hold_count,
            ttl,
        }))
    }

    fn first(self, keys: &Keys) -> Result<Option<(Bytes, Reply)>, Error> {
        if let Some(error) = self.refusal {
            return Err(Error::Server {
                lock: Some(keys.display()),
                address: None,
                database: None,
                error,
            });
        }
        let mut fields = self.fields.into_iter();
        Ok(match (fields.next(), fields.next()) {
            (Some(Reply::Text(owner)), Some(count)) => Some((owner, count)),
            _ => None,
        })
    }
}
