//! The calls of a reentrant lock's scripts, and how their replies are read.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::config::LeaseTime;
use crate::link::{Call, Failure, Reply};
use crate::locks::{Acquired, Ident, Kind, Released, Renewed};
use crate::script::catalog::{ACQUIRE, COUNT, RELEASE, RENEW};
use crate::script::{Answer, REFUSED, answer, answers};

/// The reentrant kind of lock.
pub(crate) struct Reentrant;

impl Kind for Reentrant {
    fn acquire(&self, ident: &Ident, before: i64, target: i64, lease: LeaseTime) -> Call {
        ACQUIRE
            .batch(1)
            .row(
                ident.keys.name.clone(),
                [
                    ("owner", ident.field.clone()),
                    ("lease", digits(lease.millis())),
                    ("before", digits(before)),
                    ("target", digits(target)),
                ],
            )
            .call()
    }

    fn acquired(&self, reply: Reply) -> Result<Acquired, Failure> {
        let answer = accepted(answer(reply)?)?;
        match answer.code {
            1 => Ok(Acquired::Granted),
            0 => Ok(Acquired::Held(
                u64::try_from(answer.number).ok().map(Duration::from_millis),
            )),
            2 => Ok(Acquired::Other(answer.number)),
            _ => Err(unexpected(&answer)),
        }
    }

    fn release(&self, ident: &Ident, leave: i64, lease: LeaseTime) -> Call {
        RELEASE
            .batch(1)
            .row(
                ident.keys.name.clone(),
                [
                    ("owner", ident.field.clone()),
                    ("channel", ident.keys.channel.clone()),
                    ("lease", digits(lease.millis())),
                    ("leave", digits(leave)),
                ],
            )
            .call()
    }

    fn released(&self, reply: Reply) -> Result<Released, Failure> {
        let answer = accepted(answer(reply)?)?;
        match answer.code {
            1 => Ok(Released::Freed),
            0 => Ok(Released::Left),
            2 => Ok(Released::Below(answer.number)),
            _ => Err(unexpected(&answer)),
        }
    }

    fn renew(&self, idents: &[Arc<Ident>], lease: LeaseTime) -> Call {
        let millis = digits(lease.millis());
        idents
            .iter()
            .fold(RENEW.batch(idents.len()), |batch, ident| {
                let row = [("owner", ident.field.clone()), ("lease", millis.clone())];
                batch.row(ident.keys.name.clone(), row)
            })
            .call()
    }

    fn renewed(&self, reply: Reply, locks: usize) -> Result<Vec<Renewed>, Failure> {
        let answers = answers(reply, locks)?;
        answers
            .into_iter()
            .map(|answer| match (answer.code, answer.refusal) {
                (1, _) => Ok(Renewed::Yes),
                (0, _) => Ok(Renewed::Gone),
                (_, Some(error)) => Ok(Renewed::Refused(error)),
                (code, None) => Err(Failure::Unknown(format!("unexpected reply code {code}"))),
            })
            .collect()
    }

    fn count(&self, ident: &Ident) -> Call {
        COUNT
            .batch(1)
            .row(ident.keys.name.clone(), [("owner", ident.field.clone())])
            .call()
    }

    fn counted(&self, reply: Reply) -> Result<i64, Failure> {
        let answer = accepted(answer(reply)?)?;
        if answer.code == 1 {
            Ok(answer.number)
        } else {
            Err(unexpected(&answer))
        }
    }
}

/// Turns a refusal inside a reply into a server error.
pub(super) fn accepted(answer: Answer) -> Result<Answer, Failure> {
    match answer {
        Answer {
            code: REFUSED,
            refusal: Some(error),
            ..
        } => Err(Failure::Server(error)),
        answer => Ok(answer),
    }
}

fn unexpected(answer: &Answer) -> Failure {
    Failure::Unknown(format!("unexpected reply: {answer:?}"))
}

fn digits(number: impl ToString) -> Bytes {
    number.to_string().into()
}
