//! What the server knows of a lock.

use bytes::Bytes;

use super::Holding;
use crate::core::{Asked, Core};
use crate::error::{Error, Step};
use crate::keys::Keys;
use crate::link::Reply;
use crate::script::catalog::INSPECT;

/// What `PTTL` answers where there is no key.
pub(super) const NO_KEY: i64 = -2;

/// What the server knows of a lock.
pub(super) struct Inspected {
    pub(super) pttl: i64,
    /// Why its fields cannot be told.
    refusal: Option<String>,
    fields: Vec<Reply>,
}

impl Inspected {
    /// Asks the server.
    pub(super) async fn of(core: &Core, keys: &Keys) -> Result<Self, Error> {
        let call = INSPECT.batch(1).row(keys.name.clone(), []).call();
        let Asked { reply, .. } = core.ask(call, &keys.display(), Step::Inspect).await?;
        let malformed = || Error::Connection {
            detail: "a reply of another shape (is it Redis or Valkey?)".into(),
        };
        let Reply::List(mut values) = reply else {
            return Err(malformed());
        };
        if values.len() < 2 || values.len() % 2 != 0 {
            return Err(malformed());
        }
        let fields = values.split_off(2);
        match (&values[0], &values[1]) {
            (Reply::Int(pttl), Reply::Text(refusal)) => {
                let refusal =
                    (!refusal.is_empty()).then(|| String::from_utf8_lossy(refusal).into_owned());
                Ok(Self {
                    pttl: *pttl,
                    refusal,
                    fields,
                })
            }
            _ => Err(malformed()),
        }
    }

    /// The first of the owners, byte by byte.
    pub(super) fn first_owner(self, keys: &Keys) -> Result<Option<Bytes>, Error> {
        if let Some(message) = self.refusal {
            return Err(Error::Server {
                lock: Some(keys.display()),
                message,
            });
        }
        Ok(self
            .fields
            .into_iter()
            .next()
            .and_then(|owner| match owner {
                Reply::Text(owner) => Some(owner),
                _ => None,
            }))
    }

    pub(super) fn owners(self, keys: &Keys) -> Result<Vec<Holding>, Error> {
        if let Some(message) = self.refusal {
            return Err(Error::Server {
                lock: Some(keys.display()),
                message,
            });
        }
        self.fields
            .chunks_exact(2)
            .map(|pair| {
                let owner = match &pair[0] {
                    Reply::Text(text) => String::from_utf8_lossy(text).into_owned(),
                    other => format!("{other:?}"),
                };
                Ok(Holding {
                    owner,
                    count: number(&pair[1], keys)?,
                })
            })
            .collect()
    }
}

fn number(count: &Reply, keys: &Keys) -> Result<u64, Error> {
    count
        .as_int()
        .and_then(|count| u64::try_from(count).ok())
        .ok_or_else(|| Error::Server {
            lock: Some(keys.display()),
            message: format!("the hold count is not a number: {count:?}"),
        })
}
