//! A task of a worker: random operations on a few locks, each of them recorded.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;
use redis::aio::MultiplexedConnection;
use redisson_lock::{Error, LockClient, Owner, OwnerExt, ReentrantLock};
use tokio::task::yield_now;
use tokio::time::sleep;

use super::held::{Held, PendingAcquire, refused, unless_cancelled};
use super::history::{Event, Nanos, Recorder, now};
use super::worker::{BUSY_LOCKS, WATCHDOG, lock_name, register_name};

/// One task of a worker.
pub struct Actor {
    pub client: LockClient,
    pub recorder: Arc<Recorder>,
    pub direct: redis::Client,
    pub connection: Option<MultiplexedConnection>,
    pub random: StdRng,
    /// The owner of about half of its operations. The others have an owner of their own.
    pub usual: Owner,
    /// Whether another task of the process has the same usual owner.
    pub shares: bool,
    /// Much longer than the bounds for wake-ups and for settling unknown outcomes.
    pub long_lease: Duration,
}

/// The parameters of an acquire.
#[derive(Clone, Copy)]
struct Want {
    lock: usize,
    owner: Owner,
    lease: Option<Duration>,
    /// `None` waits without limit.
    wait: Option<Duration>,
    /// After how many polls or how much time the caller drops the future.
    cancel_after: Option<(usize, Duration)>,
}

impl Actor {
    /// Runs random operations.
    pub async fn act(mut self, end: Nanos) {
        while now() < end {
            let want = self.want();
            if self.random.random_bool(0.02) {
                self.force(want.lock).await;
            } else if self.random.random_bool(0.25) {
                self.run(want, end).await;
            } else if let Some(held) = self.acquire(want).await {
                self.hold(want, held, end).await;
            }
            sleep(self.up_to(15)).await;
        }
    }

    /// Acquires one lock in turn with other tasks, so that a missing wake-up shows.
    pub async fn take_turns(mut self, end: Nanos) {
        while now() < end {
            // Some futures are dropped in the moment of their wake-up.
            let cancel_after = self.random.random_bool(0.4);
            let cancel_after =
                cancel_after.then(|| (self.random.random_range(1..8), self.up_to(1_000)));
            let (owner, lease) = (Owner::new(), Some(self.long_lease));
            let want = Want {
                lock: BUSY_LOCKS,
                owner,
                lease,
                wait: None,
                cancel_after,
            };
            if let Some(held) = self.acquire(want).await {
                sleep(Duration::from_millis(100) + self.up_to(500)).await;
                held.sure();
                self.release(want.owner, held).await;
            }
            sleep(self.up_to(2_500)).await;
        }
    }

    fn want(&mut self) -> Want {
        let random = &mut self.random;
        let lease = match random.random_range(0..20) {
            0..8 => None,
            8..12 => Some(Duration::from_millis(random.random_range(150..1_500))),
            // A hold that is left by mistake stays long enough for a look to show it.
            _ => Some(self.long_lease),
        };
        let wait = match random.random_range(0..10) {
            0..5 => None,
            5..7 => Some(Duration::ZERO),
            _ => Some(Duration::from_millis(random.random_range(1..1_000))),
        };
        let cancel_after = random.random_bool(0.2);
        let cancel_after = cancel_after.then(|| {
            (
                random.random_range(0..12),
                Duration::from_millis(random.random_range(1..60)),
            )
        });
        let owner = if random.random_bool(0.5) {
            self.usual
        } else {
            Owner::new()
        };
        Want {
            lock: random.random_range(0..BUSY_LOCKS),
            owner,
            lease,
            wait,
            cancel_after,
        }
    }

    /// Whether all holds of that owner belong to this task. Otherwise the lock does not exclude the
    /// other task, and either of them may release a detached hold.
    fn is_alone(&self, owner: Owner) -> bool {
        !self.shares || owner != self.usual
    }

    fn up_to(&mut self, ms: u64) -> Duration {
        Duration::from_millis(self.random.random_range(0..=ms))
    }

    fn lock(&self, lock: usize) -> ReentrantLock {
        self.client.lock(lock_name(lock))
    }

    fn invoked(&self, want: Want, how: &str) -> PendingAcquire {
        let attempt = self.recorder.attempt();
        let owner = format!("{}:{}", self.client.client_id(), want.owner.thread_id());
        let lease = want.lease.unwrap_or(WATCHDOG).as_nanos() as Nanos;
        let how = if want.cancel_after.is_some() {
            format!("{how} that may be cancelled")
        } else {
            how.to_owned()
        };
        self.recorder.record(
            now(),
            attempt,
            Event::Invoked {
                lock: want.lock,
                owner,
                how,
                lease,
                renewed: want.lease.is_none(),
            },
        );
        PendingAcquire {
            attempt,
            recorder: Arc::clone(&self.recorder),
            answered: false,
        }
    }

    async fn acquire(&mut self, want: Want) -> Option<Held> {
        let tries = self.random.random_bool(0.5);
        let mut asked = self.invoked(want, if tries { "try_lock" } else { "lock" });
        let lock = self.lock(want.lock);
        let acquire = async {
            match want.wait {
                Some(wait) if tries => {
                    let request = lock.try_lock_for(wait);
                    if let Some(lease) = want.lease {
                        request.lease(lease).await
                    } else {
                        request.await
                    }
                }
                wait => {
                    let request = lock.lock();
                    let request = if let Some(wait) = wait {
                        request.timeout(wait)
                    } else {
                        request
                    };
                    let request = if let Some(lease) = want.lease {
                        request.lease(lease)
                    } else {
                        request
                    };
                    request.await.map(Some)
                }
            }
        };
        let outcome = unless_cancelled(want.cancel_after, acquire.with_owner(want.owner)).await;
        let guard = match outcome {
            Some(Ok(Some(guard))) => guard,
            other => {
                asked.answer(match other {
                    None => Event::Cancelled,
                    Some(Ok(_)) => Event::Failed {
                        why: "contended".into(),
                    },
                    Some(Err(error)) => refused(&error),
                });
                return None;
            }
        };
        asked.answered = true;
        let (at, attempt) = (now(), asked.attempt);
        let remaining = guard.remaining_lease().as_nanos() as Nanos;
        self.recorder
            .record(at, attempt, Event::Granted { remaining });
        let (recorder, lost) = (Arc::clone(&self.recorder), guard.lost());
        let watch = tokio::spawn(async move {
            let reason = format!("{:?}", lost.await);
            recorder.record(now(), attempt, Event::Lost { reason });
        });
        let recorder = Arc::clone(&self.recorder);
        Some(Held {
            attempt,
            lock: want.lock,
            recorder,
            guard: Some(guard),
            watch: watch.abort_handle(),
        })
    }

    /// Keeps a hold for a while, with inner holds of the same owner, and releases all of them.
    async fn hold(&mut self, want: Want, held: Held, end: Nanos) {
        let mut holds = vec![held];
        while holds.len() < 4 && self.random.random_bool(0.25) {
            let inner = Want {
                lock: want.lock,
                owner: want.owner,
                ..self.want()
            };
            let Some(held) = self.acquire(inner).await else {
                break;
            };
            holds.push(held);
            if !self.is_alone(want.owner) {
                continue;
            }
            self.count(want, &holds).await;
        }
        if self.random.random_bool(0.6) && self.is_alone(want.owner) {
            self.section(&holds[0]).await;
        }
        let mut time = match self.random.random_range(0..40) {
            0..32 => self.up_to(6),
            // Renewed holds are long more often: force unlocks have to meet some of them.
            32..34 => self.up_to(60),
            34..38 if want.lease.is_some() => self.up_to(60),
            _ => Duration::from_millis(300) + self.up_to(2_200),
        };
        if now() >= end {
            time = Duration::ZERO;
        }
        let until = now() + time.as_nanos() as Nanos;
        while now() < until && !holds[0].is_lost() {
            holds[0].sure();
            let pause = Duration::from_nanos(until.saturating_sub(now()));
            sleep(pause.min(Duration::from_millis(25))).await;
        }
        while !holds.is_empty() {
            let at = self.random.random_range(0..holds.len());
            let held = holds.swap_remove(at);
            held.sure();
            self.release(want.owner, held).await;
        }
    }

    /// Compares the reported hold count with the holds, right after an acquire, when no release is
    /// pending.
    async fn count(&self, want: Want, holds: &[Held]) {
        let asked = self.lock(want.lock);
        let Ok(found) = asked.hold_count_of(want.owner).await else {
            return;
        };
        let at = now();
        if holds.iter().all(|held| !held.is_lost()) {
            self.recorder.record(
                at,
                holds[0].attempt,
                Event::Count {
                    expected: holds.len() as u64,
                    found,
                },
            );
        }
    }

    async fn section(&mut self, held: &Held) {
        self.recorder
            .record(now(), held.attempt, Event::SectionBegan);
        let read = self.raise(held.lock).await;
        let (at, sure) = (now(), held.sure());
        let (read, proven) = (read.unwrap_or(0), read.is_some() && sure);
        self.recorder
            .record(at, held.attempt, Event::SectionEnded { read, proven });
    }

    /// Reads the lock's register and writes the next number. `None` if the outcome is unknown.
    async fn raise(&mut self, lock: usize) -> Option<u64> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.direct.get_multiplexed_async_connection().await.ok()?,
        };
        let register = register_name(lock);
        let read: Option<u64> = redis::cmd("GET")
            .arg(&register)
            .query_async(&mut connection)
            .await
            .ok()?;
        let read = read.unwrap_or(0);
        redis::cmd("SET")
            .arg(&register)
            .arg(read + 1)
            .exec_async(&mut connection)
            .await
            .ok()?;
        // Not kept after an error: a late reply would be taken for the reply to the next call.
        self.connection = Some(connection);
        Some(read)
    }

    async fn release(&mut self, owner: Owner, mut held: Held) {
        let how = ["unlock", "unlock", "unlock", "drop", "cancel", "detach"][self
            .random
            .random_range(0..if self.is_alone(owner) { 6 } else { 5 })];
        let Some(guard) = held.releasing(how) else {
            return;
        };
        let outcome = match how {
            "unlock" => Some(guard.unlock().await),
            "drop" => {
                drop(guard);
                None
            }
            "cancel" => {
                let cancel_after = (self.random.random_range(0..4), Duration::from_millis(20));
                unless_cancelled(Some(cancel_after), guard.unlock()).await
            }
            _ => {
                let _ = guard.detach();
                Some(self.lock(held.lock).unlock().with_owner(owner).await)
            }
        };
        if let Some(outcome) = outcome {
            let outcome = match outcome {
                Ok(()) => "ok".to_owned(),
                Err(Error::Lost { .. }) => "lost".to_owned(),
                Err(Error::OutcomeUnknown { .. }) => "unknown".to_owned(),
                Err(error) => error.to_string(),
            };
            self.recorder
                .record(now(), held.attempt, Event::Released { outcome });
        }
    }

    /// Frees a lock as an operator does, whatever owner has it.
    async fn force(&self, lock: usize) {
        let attempt = self.recorder.attempt();
        self.recorder
            .record(now(), attempt, Event::Forcing { lock });
        let outcome = match self.lock(lock).force_unlock().await {
            Ok(true) => "freed".to_owned(),
            Ok(false) => "free".to_owned(),
            Err(Error::OutcomeUnknown { .. }) => "unknown".to_owned(),
            Err(error) => error.to_string(),
        };
        self.recorder
            .record(now(), attempt, Event::Forced { outcome });
    }

    /// Runs guarded work in `run`, sometimes with an inner hold.
    async fn run(&mut self, want: Want, end: Nanos) {
        let mut asked = self.invoked(
            Want {
                cancel_after: None,
                ..want
            },
            "run",
        );
        let attempt = asked.attempt;
        let recorder = Arc::clone(&self.recorder);
        let lock = self.lock(want.lock);
        let time = match self.random.random_range(0..25) {
            _ if now() >= end => Duration::ZERO,
            0 => self.up_to(1_800),
            // Some work takes longer than its lease, which is not renewed.
            1..5 if want.lease.is_some_and(|lease| lease < self.long_lease) => {
                want.lease.unwrap_or_default() + self.up_to(500)
            }
            _ => self.up_to(10),
        };
        let (works, nests) = (
            self.random.random_bool(0.6) && self.is_alone(want.owner),
            self.random.random_bool(0.3),
        );
        let mut began = false;
        let guarded = async {
            began = true;
            recorder.record(now(), attempt, Event::Granted { remaining: 0 });
            if nests {
                let inner = Want {
                    cancel_after: None,
                    lease: None,
                    wait: None,
                    ..want
                };
                if let Some(held) = self.acquire(inner).await {
                    self.release(want.owner, held).await;
                }
            }
            let mut read = None;
            if works {
                recorder.record(now(), attempt, Event::SectionBegan);
                read = self.raise(want.lock).await.map(|read| (now(), read));
            }
            let until = now() + time.as_nanos() as Nanos;
            loop {
                recorder.record(now(), attempt, Event::Worked);
                // The next step is a poll of its own, even if its time has come already.
                yield_now().await;
                let left = Duration::from_nanos(until.saturating_sub(now()));
                if left.is_zero() {
                    break (now(), read);
                }
                sleep(left.min(Duration::from_millis(25))).await;
            }
        };
        let request = lock.lock();
        let request = if let Some(wait) = want.wait {
            request.timeout(wait)
        } else {
            request
        };
        let request = if let Some(lease) = want.lease {
            request.lease(lease)
        } else {
            request
        };
        let outcome = unless_cancelled(
            want.cancel_after,
            request.run(guarded).with_owner(want.owner),
        )
        .await;
        let at = now();
        match outcome {
            None => asked.answer(Event::Cancelled),
            Some(Ok((ended, read))) => {
                asked.answered = true;
                if let Some((at, read)) = read {
                    self.recorder
                        .record(at, attempt, Event::SectionEnded { read, proven: true });
                }
                self.recorder
                    .record(ended, attempt, Event::Releasing { how: "run".into() });
                self.recorder.record(
                    at,
                    attempt,
                    Event::Released {
                        outcome: "ok".into(),
                    },
                );
            }
            Some(Err(error)) if began => {
                let why = error.to_string();
                asked.answer(match error {
                    Error::Lost { reason, .. } => {
                        self.recorder.record(
                            at,
                            attempt,
                            Event::Lost {
                                reason: format!("{reason:?}"),
                            },
                        );
                        Event::TakenBack { why }
                    }
                    _ => Event::Unknown { why },
                });
            }
            Some(Err(error)) => asked.answer(refused(&error)),
        }
    }
}
