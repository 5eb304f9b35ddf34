//! Questions about a lock: its state, an owner's hold count. They change nothing.

use std::time::Duration;

use super::backoff::Backoff;
use super::force_unlock::Forcing;
use super::requests::{Outcome, Request};
use super::timers::Timer;
use super::{Engine, Purpose, RequestId, errors};
use crate::error::{Error, Step};
use crate::keys::Keys;
use crate::kind::{Kind, Target};
use crate::owner::{Owner, owner_field};
use crate::time::Time;
use crate::wire::{Failure, Reply};

#[derive(Debug)]
pub(super) struct Query {
    pub(super) keys: Keys,
    pub(super) kind: Kind,
    what: Question,
    pub(super) begun: Time,
    backoff: Backoff,
    /// Whether a copy of the call has no reply.
    is_repeated: bool,
}

#[derive(Debug)]
enum Question {
    State,
    Count(bytes::Bytes),
}

impl Engine {
    /// Asks for the state of a lock, and waits no longer than `limit` for the answer.
    pub(crate) fn inspect(
        &mut self,
        now: Time,
        keys: &Keys,
        kind: Kind,
        limit: Option<Duration>,
    ) -> RequestId {
        let id = self.query(now, keys, kind, Question::State);
        if let (Some(limit), true) = (limit, self.requests.contains_key(id)) {
            self.timers.set(Timer::Request(id), now + limit);
        }
        id
    }

    /// Asks for the hold count of an owner.
    pub(crate) fn count(&mut self, now: Time, keys: &Keys, kind: Kind, owner: Owner) -> RequestId {
        let entry = self.entry_in_use(keys, owner);
        if self.entry_known_as(keys, owner) != entry {
            // Another owner has the lock under its name.
            let id = self.requests.insert(Request::Close);
            self.complete(id, Outcome::Counted(0));
            return id;
        }
        let field = match entry {
            Some(entry) => self.target(entry).field,
            None => owner_field(self.settings.client_id, owner),
        };
        self.query(now, keys, kind, Question::Count(field))
    }

    fn query(&mut self, now: Time, keys: &Keys, kind: Kind, what: Question) -> RequestId {
        let id = self.requests.insert(Request::Query(Query {
            keys: keys.clone(),
            kind,
            what,
            begun: now,
            backoff: Backoff::new(now, self.settings.retry_timeout),
            is_repeated: false,
        }));
        self.repeat_query(id);
        id
    }

    /// Sends a query, for the first time or again.
    pub(super) fn repeat_query(&mut self, id: RequestId) {
        if self.is_closed() {
            self.complete(id, Outcome::Failed(self.closed()));
            return;
        }
        let call = match self.requests.get(id) {
            Some(Request::Query(query)) => match &query.what {
                Question::State => query.kind.inspect(&query.keys),
                Question::Count(field) => query.kind.count(Target {
                    keys: &query.keys,
                    field: field.clone(),
                }),
            },
            Some(Request::Force(forcing)) => forcing.call(),
            _ => return,
        };
        self.send(Purpose::Query(id), call);
    }

    pub(super) fn query_replied(
        &mut self,
        now: Time,
        id: RequestId,
        outcome: Result<Reply, Failure>,
    ) {
        let query = match self.requests.get_mut(id) {
            Some(Request::Query(query)) => query,
            Some(Request::Force(_)) => return self.forcing_replied(now, id, outcome),
            _ => return,
        };
        let reply = match outcome {
            Ok(reply) => reply,
            Err(failure) => {
                query.is_repeated |= matches!(failure, Failure::Unknown(_));
                let (mut backoff, begun) = (query.backoff, query.begun);
                let (is_repeated, name) = (query.is_repeated, query.keys.display());
                if let Some(error) =
                    self.pause_query(now, id, &mut backoff, failure, begun, is_repeated, name)
                {
                    self.complete(id, Outcome::Failed(error));
                } else if let Some(Request::Query(query)) = self.requests.get_mut(id) {
                    query.backoff = backoff;
                }
                return;
            }
        };
        let (kind, keys, name) = (query.kind, query.keys.clone(), query.keys.display());
        let result = match query.what {
            Question::State => kind.inspected(reply).map(|mut inspected| {
                inspected.rename_owner(|field| self.owner_known_as(&keys, field));
                Outcome::Inspected(inspected)
            }),
            Question::Count(_) => kind.counted(reply).map(Outcome::Counted),
        };
        let outcome = match result {
            Ok(outcome) => outcome,
            Err(Failure::Server(error)) => Outcome::Failed(errors::server(name, error)),
            Err(Failure::Unknown(_) | Failure::NotSent(_) | Failure::Closed) => {
                let problem = "a reply of an unknown shape".to_owned();
                Outcome::Failed(self.connection(name, problem.into()))
            }
        };
        self.complete(id, outcome);
    }

    /// Plans the next try of a query. Returns the error if its limit leaves no time for one.
    #[expect(
        clippy::too_many_arguments,
        reason = "one call for two kinds of request"
    )]
    pub(super) fn pause_query(
        &mut self,
        now: Time,
        id: RequestId,
        backoff: &mut Backoff,
        failure: Failure,
        begun: Time,
        is_repeated: bool,
        name: String,
    ) -> Option<Error> {
        self.note_failure(&failure);
        if failure.is_transient() {
            if let Some(at) = backoff.pause(now, &mut self.rng) {
                self.timers.set(Timer::Query(id), at);
                return None;
            }
        }
        Some(match failure {
            // It changes nothing, so its outcome is never unknown.
            Failure::Unknown(_) | Failure::NotSent(_) if is_repeated => {
                self.timeout(name, Step::Inspect, now.since(begun))
            }
            failure => self.refused(name, failure),
        })
    }

    /// The limit of a force unlock that waits for an earlier operation.
    pub(super) fn force_limit_reached(&mut self, id: RequestId) {
        if let Some(Request::Force(forcing)) = self.requests.get(id) {
            let Forcing { keys, op, .. } = forcing;
            let (name, op) = (keys.display(), *op);
            if op
                .and_then(|op| self.ops.get(op))
                .is_some_and(|op| op.is_started())
            {
                return;
            }
            let limit = self.settings.patience();
            let error = self.timeout(name, Step::EarlierOperation, limit);
            self.complete(id, Outcome::Failed(error));
        }
    }
}
