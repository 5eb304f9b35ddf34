//! What differs between the kinds of lock: their scripts, and how the replies are read.

use std::time::Duration;

use bytes::Bytes;

use crate::config::LeaseTime;
use crate::error::{Error, ServerError};
use crate::keys::Keys;
use crate::owner::Owner;
use crate::script::catalog::{
    ACQUIRE, COUNT, FENCED_ACQUIRE, FORCE_UNLOCK, INSPECT, RELEASE, RENEW, SIMPLE_ACQUIRE,
    SIMPLE_COUNT, SIMPLE_INSPECT, SIMPLE_RELEASE, SIMPLE_RENEW,
};
use crate::script::{Answer, REFUSED, answer, answers};
use crate::wire::{Call, Failure, Reply};

/// A kind of lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Redisson's `RLock`.
    Reentrant,
    /// Redisson's `RFencedLock`: the reentrant lock, on the same hash, whose grants have a token.
    Fenced,
    /// A string with the owner, as `SET key token NX PX` leaves it. Each acquisition has an owner
    /// of its own.
    Simple,
}

/// A lock and an owner, as the scripts take them.
#[derive(Debug, Clone)]
pub(crate) struct Target<'a> {
    pub(crate) keys: &'a Keys,
    /// The field `CLIENT:THREAD`.
    pub(crate) field: Bytes,
}

/// The counts of an acquire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    /// The owner's hold count by our record.
    pub(crate) before: i64,
    /// The hold count to set.
    pub(crate) target: i64,
}

/// The result of an acquire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Acquired {
    /// The owner's hold count is `target`. The token of a fenced lock counts only if the call asked
    /// for one.
    Granted(Option<i64>),
    /// Another owner holds the lock.
    Held(Held),
    /// The owner's hold count is neither `before` nor `target`: nothing was changed.
    Other(i64),
}

/// A lock that another owner holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    /// The time until its expiry; `None` without an expiry.
    pub(crate) ttl: Option<Duration>,
    /// Whether another program holds it, which publishes no release.
    pub(crate) is_foreign: bool,
}

/// The result of a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Released {
    /// The lock is free.
    Freed,
    /// The owner's hold count is `leave`, above 0.
    Left,
    /// The owner's hold count was below `leave` already: nothing was changed.
    Below(i64),
}

/// The result of a renewal, for one lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Renewed {
    /// The lease is restored.
    Yes,
    /// The owner does not hold the lock.
    Gone,
    /// The server refused the renewal of this lock.
    Refused(ServerError),
}

/// What the server knows of a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Inspected {
    pttl: i64,
    /// Why its fields cannot be read.
    refusal: Option<ServerError>,
    /// The first owner with its hold count.
    first: Option<(Bytes, Reply)>,
}

impl Kind {
    /// The keys of the lock of that name.
    pub(crate) fn keys(self, name: &str) -> Result<Keys, Error> {
        match self {
            Self::Reentrant | Self::Fenced => Keys::reentrant(name),
            Self::Simple => Keys::simple(name),
        }
    }

    /// The name of the public type.
    pub(crate) fn type_name(self) -> &'static str {
        match self {
            Self::Reentrant => "ReentrantLock",
            Self::Fenced => "FencedLock",
            Self::Simple => "SimpleLock",
        }
    }

    /// Whether an owner that holds the lock can acquire it again.
    pub(crate) fn is_reentrant(self) -> bool {
        self != Self::Simple
    }

    /// The owner of an acquisition where `current` is the ambient one; `None` for a new owner.
    pub(crate) fn owner(self, current: Option<Owner>) -> Option<Owner> {
        current.filter(|_| self.is_reentrant())
    }

    /// Whether grants have a token.
    pub(crate) fn has_tokens(self) -> bool {
        self == Self::Fenced
    }

    /// Whether one script renews both.
    pub(crate) fn is_renewed_with(self, other: Self) -> bool {
        self.is_reentrant() == other.is_reentrant()
    }

    /// Acquires a hold: sets the owner's hold count from `before` to `target`. `needs_token`: the
    /// token of the tenure is not known.
    pub(crate) fn acquire(
        self,
        target: Target<'_>,
        counts: Counts,
        lease: LeaseTime,
        needs_token: bool,
    ) -> Call {
        let name = target.keys.name.clone();
        let (owner, lease) = (("owner", target.field), ("lease", digits(lease.millis())));
        let before = || ("before", digits(counts.before));
        let count = || ("target", digits(counts.target));
        let batch = match self {
            Self::Reentrant => ACQUIRE
                .batch(1)
                .row([name], [owner, lease, before(), count()]),
            Self::Fenced => {
                let raise = ("raise", digits(u8::from(needs_token)));
                let keys = [name, target.keys.token()];
                let row = [owner, lease, before(), count(), raise];
                FENCED_ACQUIRE.batch(1).row(keys, row)
            }
            Self::Simple => SIMPLE_ACQUIRE.batch(1).row([name], [owner, lease]),
        };
        batch.call()
    }

    pub(crate) fn acquired(self, reply: Reply) -> Result<Acquired, Failure> {
        let answer = accepted(answer(reply)?)?;
        match answer.code {
            1 => Ok(Acquired::Granted(
                self.has_tokens().then_some(answer.number),
            )),
            code @ (0 | 4) if code == 0 || self == Self::Simple => Ok(Acquired::Held(Held {
                ttl: u64::try_from(answer.number).ok().map(Duration::from_millis),
                is_foreign: code == 4,
            })),
            2 if self.is_reentrant() => Ok(Acquired::Other(answer.number)),
            _ => Err(unexpected(&answer)),
        }
    }

    /// Releases holds: sets the owner's hold count to `leave`. `lease` is what the remaining holds
    /// are entitled to; `None` leaves the expiry as it is.
    pub(crate) fn release(self, target: Target<'_>, leave: i64, lease: Option<LeaseTime>) -> Call {
        let name = [target.keys.name.clone()];
        let owner = ("owner", target.field);
        let channel = ("channel", target.keys.channel.clone());
        if self == Self::Simple {
            return SIMPLE_RELEASE.batch(1).row(name, [owner, channel]).call();
        }
        let lease = ("lease", digits(lease.map_or(0, LeaseTime::millis)));
        let row = [owner, channel, lease, ("leave", digits(leave))];
        RELEASE.batch(1).row(name, row).call()
    }

    pub(crate) fn released(self, reply: Reply) -> Result<Released, Failure> {
        let answer = accepted(answer(reply)?)?;
        match answer.code {
            1 => Ok(Released::Freed),
            0 if self.is_reentrant() => Ok(Released::Left),
            2 => Ok(Released::Below(answer.number)),
            _ => Err(unexpected(&answer)),
        }
    }

    /// Renews the leases of several locks.
    pub(crate) fn renew<'a>(
        self,
        targets: impl ExactSizeIterator<Item = Target<'a>>,
        lease: LeaseTime,
    ) -> Call {
        let millis = digits(lease.millis());
        let script = match self {
            Self::Reentrant | Self::Fenced => &RENEW,
            Self::Simple => &SIMPLE_RENEW,
        };
        let batch = script.batch(targets.len());
        targets
            .fold(batch, |batch, target| {
                let row = [("owner", target.field), ("lease", millis.clone())];
                batch.row([target.keys.name.clone()], row)
            })
            .call()
    }

    pub(crate) fn renewed(self, reply: Reply, locks: usize) -> Result<Vec<Renewed>, Failure> {
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

    /// Reads the owner's hold count.
    pub(crate) fn count(self, target: Target<'_>) -> Call {
        let script = match self {
            Self::Reentrant | Self::Fenced => &COUNT,
            Self::Simple => &SIMPLE_COUNT,
        };
        let row = [("owner", target.field)];
        script.batch(1).row([target.keys.name.clone()], row).call()
    }

    pub(crate) fn counted(self, reply: Reply) -> Result<i64, Failure> {
        let answer = accepted(answer(reply)?)?;
        match answer.code {
            1 => Ok(answer.number),
            _ => Err(unexpected(&answer)),
        }
    }

    /// Frees the lock if that owner holds it; an empty owner stands for any.
    pub(crate) fn force_unlock(self, target: Target<'_>) -> Call {
        let script = match self {
            Self::Reentrant | Self::Fenced => &FORCE_UNLOCK,
            // It frees the lock of one owner, or of any, as it is.
            Self::Simple => &SIMPLE_RELEASE,
        };
        let row = [
            ("owner", target.field),
            ("channel", target.keys.channel.clone()),
        ];
        script.batch(1).row([target.keys.name.clone()], row).call()
    }

    /// Whether the call freed the lock.
    pub(crate) fn force_unlocked(self, reply: Reply) -> Result<bool, Failure> {
        accepted(answer(reply)?).map(|answer| answer.code == 1)
    }

    /// Reads the state of the lock.
    pub(crate) fn inspect(self, keys: &Keys) -> Call {
        let script = match self {
            Self::Reentrant | Self::Fenced => &INSPECT,
            Self::Simple => &SIMPLE_INSPECT,
        };
        script.batch(1).row([keys.name.clone()], []).call()
    }

    pub(crate) fn inspected(self, reply: Reply) -> Result<Inspected, Failure> {
        Inspected::read(reply)
            .ok_or_else(|| Failure::Unknown("a reply of an unknown shape".to_owned()))
    }
}

/// An owner, and its hold count unless that is not a number.
type Inspection<'a> = (&'a Bytes, Result<u64, ServerError>);

impl Inspected {
    fn read(reply: Reply) -> Option<Self> {
        let Reply::List(values) = reply else {
            return None;
        };
        let is_paired = values.len() % 2 == 0;
        let mut values = values.into_iter();
        let (Some(Reply::Int(pttl)), Some(Reply::Text(refusal)), true) =
            (values.next(), values.next(), is_paired)
        else {
            return None;
        };
        Some(Self {
            pttl,
            refusal: (!refusal.is_empty())
                .then(|| String::from_utf8_lossy(&refusal).into_owned().into()),
            first: match (values.next(), values.next()) {
                (Some(Reply::Text(owner)), Some(count)) => Some((owner, count)),
                _ => None,
            },
        })
    }

    /// Gives the owner another name, if there is one for it.
    pub(crate) fn rename_owner(&mut self, rename: impl FnOnce(&Bytes) -> Option<Bytes>) {
        if let Some((owner, _)) = &mut self.first {
            if let Some(name) = rename(owner) {
                *owner = name;
            }
        }
    }

    /// Whether there is a key.
    pub(crate) fn exists(&self) -> bool {
        // What `PTTL` answers if there is no key.
        self.pttl != -2
    }

    /// The time to live, unless the key has no expiry.
    pub(crate) fn ttl(&self) -> Option<Duration> {
        u64::try_from(self.pttl).ok().map(Duration::from_millis)
    }

    /// The first owner, and its hold count unless that is not a number; an error if the key is not
    /// a lock.
    pub(crate) fn owner(&self) -> Result<Option<Inspection<'_>>, ServerError> {
        if let Some(error) = &self.refusal {
            return Err(error.clone());
        }
        let Some((owner, count)) = &self.first else {
            return Ok(None);
        };
        let number = count.as_int().and_then(|count| u64::try_from(count).ok());
        let count =
            number.ok_or_else(|| format!("ERR the hold count is not a number: {count:?}").into());
        Ok(Some((owner, count)))
    }
}

/// Turns a refusal inside a reply into a server error.
fn accepted(answer: Answer) -> Result<Answer, Failure> {
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
