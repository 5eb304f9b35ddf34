//! One case: each step is made with the library and on the reference model, and the results are
//! compared.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use proptest::test_runner::TestCaseError;
use proptest::{prop_assert, prop_assert_eq};
use redis::{Connection, cmd};
use redisson_lock::{Error, LockClient, LockGuard, LostReason, Owner, OwnerExt, ReentrantLock};

use crate::reference::{Held, Hold, Model, Span, Unlocked, WATCHDOG};
use crate::support::server::{Server, unique, wait_until_async};
use crate::{LOCKS, Lease, Op};

pub type Outcome<T = ()> = Result<T, TestCaseError>;

/// The limit for events that need no further step.
pub const LIMIT: Duration = Duration::from_secs(20);

/// A lease that expires within a case.
const SHORT: Duration = Duration::from_millis(40);

/// From this age on a client may report the short lease as expired: its margin is 2 ms, and 1 ms is
/// for rounding.
const SHORT_MAY_BE_LOST: Duration = Duration::from_millis(37);

/// What all cases share: a server, two clients, and an independent connection.
pub struct Fixture {
    observer: Mutex<Connection>,
    pub clients: [LockClient; 2],
    _server: Server,
}

impl Fixture {
    pub async fn new() -> Self {
        let server = Server::start();
        // No renewal and no reconnect within a case: a client learns of changes by its calls only.
        let builder = LockClient::builder()
            .watchdog_timeout(WATCHDOG)
            .command_timeout(LIMIT);
        let (one, other) = (
            builder.clone().connect(&server.url()).await,
            builder.connect(&server.url()).await,
        );
        Self {
            observer: Mutex::new(server.connection()),
            clients: [one.expect("a client"), other.expect("a client")],
            _server: server,
        }
    }

    pub fn observer(&self) -> MutexGuard<'_, Connection> {
        self.observer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A hold and its guard.
pub struct Guarded {
    pub hold: Hold,
    pub guard: LockGuard,
}

/// One case, with locks of its own.
pub struct Case<'a> {
    pub fixture: &'a Fixture,
    pub names: Vec<String>,
    pub owners: Vec<Owner>,
    pub guards: Vec<Guarded>,
    pub model: Model,
    steps: usize,
}

impl<'a> Case<'a> {
    pub fn new(fixture: &'a Fixture) -> Self {
        let mut owners = Vec::new();
        let mut known = Vec::new();
        for client in 0..2 {
            owners.extend([
                Owner::new(),
                Owner::new(),
                Owner::from_thread_id(7).expect("an owner"),
            ]);
            known.extend([(client, false), (client, false), (client, true)]);
        }
        let names = (0..LOCKS).map(|_| unique("model")).collect();
        Self {
            fixture,
            names,
            owners,
            guards: vec![],
            model: Model::new(LOCKS, &known),
            steps: 0,
        }
    }

    pub fn lock(&self, client: usize, lock: usize) -> ReentrantLock {
        self.fixture.clients[client].lock(&self.names[lock])
    }

    /// A lock of the owner's client, and the owner.
    pub fn lock_of(&self, at: usize, lock: usize) -> (ReentrantLock, Owner) {
        (self.lock(self.model.owners[at].0, lock), self.owners[at])
    }

    pub fn owner_field(&self, at: usize) -> String {
        format!(
            "{}:{}",
            self.fixture.clients[self.model.owners[at].0].client_id(),
            self.owners[at]
        )
    }

    /// Makes one step, and checks the resulting state.
    pub async fn step(&mut self, op: &Op) -> Outcome {
        match *op {
            Op::TryLock {
                owner: at,
                lock,
                lease,
                wait,
            } => {
                self.try_lock(at % self.owners.len(), lock, lease, wait)
                    .await
            }
            Op::TryLockOutsideScope { client, lock } => {
                self.try_lock_outside_scope(client, lock).await
            }
            Op::Race { one, other, lock } => {
                self.race(one % self.owners.len(), other % self.owners.len(), lock)
                    .await
            }
            Op::Run { owner: at, lock } => self.run(at % self.owners.len(), lock).await,
            Op::UnlockGuard { guard } if !self.guards.is_empty() => {
                self.unlock_guard(guard % self.guards.len()).await
            }
            Op::DropGuard { guard } if !self.guards.is_empty() => {
                self.drop_guard(guard % self.guards.len()).await
            }
            Op::Detach { guard } if !self.guards.is_empty() => {
                let Guarded { hold, guard } = self.guards.remove(guard % self.guards.len());
                let _ = guard.detach();
                self.model.detach(hold);
                Ok(())
            }
            Op::UnlockGuard { .. } | Op::DropGuard { .. } | Op::Detach { .. } => Ok(()),
            Op::Unlock { owner: at, lock } => {
                self.unlock(at % self.owners.len(), lock).await.map(drop)
            }
            Op::ForceUnlock { client, lock } => {
                let freed = self.lock(client, lock).force_unlock().await;
                prop_assert_eq!(freed, Ok(self.model.force_unlock(client, lock)));
                Ok(())
            }
            Op::LoseKey { lock, expire } => self.lose_key(lock, expire),
            Op::HandOver {
                client,
                lock,
                count,
            } => self.hand_over(3 * client + 2, lock, count.into()),
        }?;
        for lock in 0..LOCKS {
            self.check_server(lock)?;
        }
        self.steps += 1;
        // One lock, client and owner for each step, since every call takes time.
        self.check_answers(
            self.steps % LOCKS,
            self.steps / 2 % 2,
            self.steps / 4 % self.owners.len(),
        )
        .await?;
        self.check_guards()
    }

    /// Releases all holds, and checks that the locks are free.
    pub async fn end(mut self) -> Outcome {
        while !self.guards.is_empty() {
            self.unlock_guard(0).await?;
        }
        let public = (0..LOCKS).flat_map(|lock| [(2, lock), (5, lock)]);
        let entries: BTreeSet<_> = self.model.entries().into_iter().chain(public).collect();
        for (at, lock) in entries {
            // Until there is no hold to release and no loss to report.
            while !matches!(
                self.unlock(at, lock).await?,
                Unlocked::NotHeld | Unlocked::NotHeldOrLost
            ) {}
        }
        for lock in 0..LOCKS {
            prop_assert_eq!(&self.model.locks[lock], &None, "the model's lock is held");
            self.check_server(lock)?;
        }
        Ok(())
    }

    async fn try_lock(&mut self, at: usize, lock: usize, lease: Lease, wait: bool) -> Outcome {
        let free = self.model.locks[lock].is_none();
        let lease = match lease {
            Lease::Watchdog => None,
            Lease::HalfAnHour => Some(WATCHDOG / 2),
            Lease::TwoHours => Some(2 * WATCHDOG),
            Lease::Short if free => return self.try_lock_short(at, lock).await,
            // Beside a longer lease it changes nothing until the other holds are released. Then the
            // lock would expire at any time.
            Lease::Short => None,
        };
        let (real, owner) = self.lock_of(at, lock);
        let from = Instant::now();
        let answer = if wait {
            let request = real.lock().timeout(Duration::ZERO);
            let request = if let Some(lease) = lease {
                request.lease(lease)
            } else {
                request
            };
            match request.with_owner(owner).await {
                Err(error @ Error::AcquireTimeout { .. }) => {
                    self.assert_contended(error, self.model.owners[at].0, lock, from)?;
                    Ok(None)
                }
                answer => answer.map(Some),
            }
        } else {
            let request = real.try_lock();
            let request = if let Some(lease) = lease {
                request.lease(lease)
            } else {
                request
            };
            request.with_owner(owner).await
        };
        let ran = Span {
            from,
            to: Instant::now(),
        };
        let hold = self.model.acquire(at, lock, lease, ran);
        self.keep_guard(at, answer, hold)
    }

    /// Compares the result of an acquisition with the model's, and keeps the guard.
    fn keep_guard(
        &mut self,
        at: usize,
        answer: Result<Option<LockGuard>, Error>,
        hold: Option<Hold>,
    ) -> Outcome {
        match (answer, hold) {
            (Ok(Some(guard)), Some(hold)) => {
                prop_assert_eq!(guard.owner(), self.owners[at]);
                self.guards.push(Guarded { hold, guard });
            }
            (Ok(None), None) => {}
            (answer, hold) => prop_assert!(false, "{answer:?}, and the model has {hold:?}"),
        }
        Ok(())
    }

    fn assert_contended(&self, error: Error, client: usize, lock: usize, from: Instant) -> Outcome {
        let Error::AcquireTimeout {
            lock: name,
            timeout,
            held_by,
            ..
        } = error
        else {
            unreachable!("the caller has checked the variant")
        };
        prop_assert_eq!(&name, &self.names[lock]);
        let read = Span {
            from,
            to: Instant::now(),
        };
        prop_assert_eq!(timeout, Duration::ZERO);
        match (&self.model.locks[lock], held_by) {
            (Some(held), Some(info)) => self.assert_info(held, &info, client, read),
            other => {
                prop_assert!(false, "contended: {other:?}");
                Ok(())
            }
        }
    }

    /// Acquires a free lock with the short lease, and waits until it has expired.
    async fn try_lock_short(&mut self, at: usize, lock: usize) -> Outcome {
        let (real, owner) = self.lock_of(at, lock);
        let from = Instant::now();
        let answer = real.try_lock().lease(SHORT).with_owner(owner).await;
        let ran = Span {
            from,
            to: Instant::now(),
        };
        let hold = self
            .model
            .acquire(at, lock, Some(SHORT), ran)
            .expect("it is free");
        match answer {
            Ok(Some(guard)) => self.guards.push(Guarded { hold, guard }),
            Err(Error::Lost {
                reason: LostReason::Expired,
                ..
            }) if from.elapsed() >= SHORT_MAY_BE_LOST => {
                let Span { from, to } = ran;
                self.model.expire(hold);
                let _lost = self.model.release(hold, Span { from, to });
            }
            answer => prop_assert!(false, "{answer:?}"),
        }
        self.wait_for(lock, "the short lease has expired", |count| count.is_none());
        prop_assert!(
            from.elapsed() + Duration::from_millis(3) >= SHORT,
            "expired after {:?}",
            from.elapsed()
        );
        self.model.expire(hold);
        Ok(())
    }

    async fn try_lock_outside_scope(&mut self, client: usize, lock: usize) -> Outcome {
        let from = Instant::now();
        let answer = self.lock(client, lock).try_lock().await;
        let ran = Span {
            from,
            to: Instant::now(),
        };
        self.model.owners.push((client, false));
        let at = self.model.owners.len() - 1;
        // No scope has this owner, so the client need not remember its lost detached holds.
        self.model.uncertain.insert((at, lock));
        self.owners.push(
            answer
                .as_ref()
                .ok()
                .and_then(Option::as_ref)
                .map_or_else(Owner::new, LockGuard::owner),
        );
        prop_assert!(
            self.owners
                .iter()
                .filter(|owner| **owner == self.owners[at])
                .count()
                == 1,
            "the owner is not new"
        );
        let hold = self.model.acquire(at, lock, None, ran);
        self.keep_guard(at, answer, hold)
    }

    /// Two acquisitions at the same time: the results fit one of the two orders.
    async fn race(&mut self, one: usize, other: usize, lock: usize) -> Outcome {
        let ((first, owner), (second, second_owner)) =
            (self.lock_of(one, lock), self.lock_of(other, lock));
        let from = Instant::now();
        let requests = (
            first.try_lock().with_owner(owner),
            second.try_lock().with_owner(second_owner),
        );
        let (first, second) = futures::join!(requests.0, requests.1);
        let ran = Span {
            from,
            to: Instant::now(),
        };
        let mut answers = [(one, first), (other, second)];
        if matches!(answers[1].1, Ok(Some(_))) {
            answers.reverse();
        }
        for (at, answer) in answers {
            let hold = self.model.acquire(at, lock, None, ran);
            self.keep_guard(at, answer, hold)?;
        }
        Ok(())
    }

    /// `run` inside `run`.
    async fn run(&mut self, at: usize, lock: usize) -> Outcome {
        let (real, owner) = self.lock_of(at, lock);
        let before = self.model.count(at, lock);
        let at_once = || real.lock().timeout(Duration::ZERO);
        let nested = at_once().run(async { real.hold_count_of(owner).await });
        let from = Instant::now();
        let answer = at_once().run(nested).with_owner(owner).await;
        let ran = Span {
            from,
            to: Instant::now(),
        };
        let Some(hold) = self.model.acquire(at, lock, None, ran) else {
            let error = answer.err();
            prop_assert!(
                matches!(error, Some(Error::AcquireTimeout { .. })),
                "{error:?}"
            );
            let client = self.model.owners[at].0;
            return error.map_or(Ok(()), |error| {
                self.assert_contended(error, client, lock, from)
            });
        };
        prop_assert_eq!(answer, Ok(Ok(Ok(before + 2))));
        prop_assert_eq!(self.model.release(hold, ran), Ok(()));
        Ok(())
    }

    async fn unlock_guard(&mut self, at: usize) -> Outcome {
        let Guarded { hold, guard } = self.guards.remove(at);
        let from = Instant::now();
        let answer = guard.unlock().await;
        let expected = self.model.release(
            hold,
            Span {
                from,
                to: Instant::now(),
            },
        );
        self.assert_unlocked(answer, expected)
    }

    fn assert_unlocked(
        &self,
        answer: Result<(), Error>,
        expected: Result<(), LostReason>,
    ) -> Outcome {
        match answer {
            Ok(()) => prop_assert_eq!(expected, Ok(())),
            Err(Error::Lost { lock, reason, .. }) => {
                prop_assert!(self.names.contains(&lock));
                prop_assert_eq!(expected, Err(reason));
            }
            Err(error) => prop_assert!(false, "{error:?}, not {expected:?}"),
        }
        Ok(())
    }

    async fn drop_guard(&mut self, at: usize) -> Outcome {
        let hold = self.guards[at].hold;
        let (guarded, detached) = self.model.siblings(hold);
        let stale = self.model.is_stale(hold);
        if stale && guarded.is_empty() && detached > 0 {
            // No answer shows when the background has noticed the loss.
            return self.unlock_guard(at).await;
        }
        let from = Instant::now();
        drop(self.guards.remove(at).guard);
        let locks = self.model.locks.clone();
        let _lost = self.model.release(hold, Span { from, to: from });
        if let Some(sibling) = guarded.first().filter(|_| stale) {
            let sibling = &self
                .guards
                .iter()
                .find(|other| other.hold == *sibling)
                .expect("its guard")
                .guard;
            wait_until_async("the guard is lost", LIMIT, || async { sibling.is_lost() }).await;
        }
        for (lock, before) in locks.into_iter().enumerate() {
            if let Some(before) = before {
                self.wait_for_release(lock, before).await;
            }
        }
        Ok(())
    }

    /// Waits until a release in the background has changed the hold count. The release may set the
    /// expiry at any time until then.
    async fn wait_for_release(&mut self, lock: usize, before: Held) {
        let expected = self.model.locks[lock].as_ref().map(|held| held.count);
        if expected == Some(before.count) {
            return;
        }
        self.wait_for(lock, "the dropped guard is released", |count| {
            count == expected
        });
        let now = Instant::now();
        if let Some(held) = &mut self.model.locks[lock] {
            held.expires.to = held.expires.to.max(now + 2 * WATCHDOG);
        }
    }

    async fn unlock(&mut self, at: usize, lock: usize) -> Outcome<Unlocked> {
        let (real, owner) = self.lock_of(at, lock);
        let from = Instant::now();
        let answer = real.unlock().with_owner(owner).await;
        let expected = self.model.unlock(
            at,
            lock,
            Span {
                from,
                to: Instant::now(),
            },
        );
        let expected_loss = match expected {
            Unlocked::Freed => Ok(()),
            Unlocked::Lost(reason) => Err(Some(reason)),
            Unlocked::NotHeld | Unlocked::NotHeldOrLost => Err(None),
        };
        match &answer {
            Ok(()) => prop_assert_eq!(expected, Unlocked::Freed),
            Err(Error::Lost { .. } | Error::NotHeld { .. })
                if expected == Unlocked::NotHeldOrLost => {}
            Err(Error::Lost { reason, .. }) => {
                prop_assert_eq!(expected_loss, Err(Some(*reason)));
            }
            Err(Error::NotHeld { lock: name, .. }) => {
                prop_assert_eq!(expected, Unlocked::NotHeld);
                prop_assert_eq!(name, &self.names[lock]);
            }
            Err(error) => prop_assert!(false, "{error:?}, not {expected:?}"),
        }
        Ok(expected)
    }

    fn lose_key(&mut self, lock: usize, expire: bool) -> Outcome {
        let name = &self.names[lock];
        let mut command = if expire { cmd("PEXPIRE") } else { cmd("DEL") };
        command.arg(name);
        if expire {
            command.arg(1);
        }
        command
            .exec(&mut *self.fixture.observer())
            .expect("a reply");
        self.wait_for(lock, "the key does not exist", |count| count.is_none());
        self.model.lose_key(lock);
        Ok(())
    }

    /// Another process hands holds over to an owner that has never held the lock.
    fn hand_over(&mut self, at: usize, lock: usize, count: u64) -> Outcome {
        if self.model.locks[lock].is_some() || !self.model.is_untouched(at, lock) {
            return Ok(());
        }
        let lease = WATCHDOG / 4;
        let from = Instant::now();
        let mut pipe = redis::pipe();
        pipe.atomic()
            .hset(&self.names[lock], self.owner_field(at), count);
        pipe.pexpire(&self.names[lock], lease.as_millis() as i64);
        pipe.exec(&mut *self.fixture.observer()).expect("a reply");
        self.model.hand_over(
            at,
            lock,
            count,
            lease,
            Span {
                from,
                to: Instant::now(),
            },
        );
        Ok(())
    }
}
