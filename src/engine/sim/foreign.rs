//! Programs that lock the same keys without this library: clients of Redisson, and programs with a
//! token lock (a string that is set with `NX`, and compared before it is deleted).

use std::time::Duration;

use bytes::Bytes;
use rand::Rng;

use super::oracle::Token;
use super::server::{Answer, Database};
use super::world::{Event, World};
use crate::keys::Keys;
use crate::time::Time;

/// What a client of Redisson sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ForeignCommand {
    /// By an `RLock` or by an `RFencedLock`.
    Acquire {
        is_fenced: bool,
    },
    Release,
    Renew,
    Force,
}

/// A thread of a Redisson client.
#[derive(Debug)]
pub(super) struct Foreign {
    pub(super) lock: usize,
    pub(super) field: Bytes,
    pub(super) holds: i64,
    /// Until when it may rely on its lease.
    pub(super) proved_until: Time,
    /// The run of its last command that set the expiry.
    pub(super) run: u64,
    is_busy: bool,
    number: usize,
    lives: u32,
}

impl Foreign {
    pub(super) fn new(number: usize) -> Self {
        Self {
            lock: 0,
            field: format!("redisson-{number}:1").into(),
            holds: 0,
            proved_until: Time::default(),
            run: 0,
            is_busy: false,
            number,
            lives: 0,
        }
    }
}

impl World {
    pub(super) fn foreign_step(&mut self, actor: usize) {
        let is_finishing = self.is_finishing;
        if is_finishing && self.foreign[actor].holds == 0 {
            return;
        }
        if !self.foreign[actor].is_busy {
            let roll = self.rng.random_range(0..100);
            let lock = self.rng.random_range(0..self.plan.locks);
            let is_fenced = self.rng.random_bool(self.plan.fenced);
            let acquire = ForeignCommand::Acquire { is_fenced };
            let record = &mut self.foreign[actor];
            let command = match (record.holds, roll) {
                (1.., _) if is_finishing => Some(ForeignCommand::Release),
                (0, 0..3) => Some(ForeignCommand::Force),
                (0, _) => {
                    record.lock = lock;
                    Some(acquire)
                }
                (_, 0..3) => {
                    // The process ends; another one takes its place.
                    record.holds = 0;
                    record.lives += 1;
                    record.field = format!("redisson-{}-{}:1", record.number, record.lives).into();
                    None
                }
                (_, 3..60) => Some(ForeignCommand::Release),
                (1..3, 60..75) => Some(acquire),
                _ => Some(ForeignCommand::Renew),
            };
            if let Some(command) = command {
                self.figures.operations += 1;
                let record = &mut self.foreign[actor];
                if command == ForeignCommand::Release {
                    record.holds -= 1;
                }
                record.is_busy = true;
                let at = self.now + self.delay();
                self.push(at, Event::ForeignRun { actor, command });
                return;
            }
        }
        self.foreign_later(actor);
    }

    fn foreign_later(&mut self, actor: usize) {
        let at = self.now + self.foreign_pause();
        self.push(at, Event::Foreign { actor });
    }

    fn foreign_pause(&mut self) -> Duration {
        let watchdog = self.plan.watchdog;
        self.think().clamp(watchdog / 200, watchdog / 3)
    }

    pub(super) fn foreign_run(&mut self, actor: usize, command: ForeignCommand) {
        let record = &self.foreign[actor];
        let (field, lock) = (record.field.clone(), record.lock);
        let keys = self.locks[lock].clone();
        let lease = self.plan.watchdog.as_millis() as u64;
        let before = self.owners_of(std::slice::from_ref(&keys.name));
        let denied = std::mem::take(&mut self.database.denied);
        let is_hash =
            self.database.is_hash(&keys.name) || !self.database.keys.contains_key(&keys.name);
        let run = self.next_run();
        let database = &mut self.database;
        let mut token = None;
        let is_done = is_hash
            && match command {
                ForeignCommand::Acquire { is_fenced } => {
                    let counter = is_fenced.then(|| keys.token());
                    let acquired = database.redisson_acquire(&keys, &field, lease, counter);
                    token = acquired.flatten();
                    acquired.is_some()
                }
                ForeignCommand::Release => database.redisson_release(&keys, &field, lease),
                ForeignCommand::Renew => database.redisson_renew(&keys, &field, lease),
                ForeignCommand::Force => {
                    database.redisson_force(&keys);
                    true
                }
            };
        self.database.denied = denied;
        if let Some(token) = token {
            self.token_given(Token {
                lock,
                run,
                token,
                tenure: None,
            });
        }
        if is_done {
            self.foreign[actor].run = run;
            if before
                .iter()
                .any(|(_, owner)| owner.as_ref() != Some(&field))
            {
                // Its earlier holds had expired.
                self.foreign[actor].holds = 0;
            }
        }
        if command == ForeignCommand::Force || is_done {
            let is_own_release = command == ForeignCommand::Release
                && before
                    .iter()
                    .all(|(_, owner)| owner.as_ref() == Some(&field));
            if !is_own_release {
                self.ran(None, before, run);
            } else {
                self.changed(&keys.name);
            }
        }
        self.note(|world| {
            format!(
                "Redisson {actor}: {command:?} {is_done}, has {:?}",
                world.database.keys
            )
        });
        self.deliver();
        let sent = self.now;
        let at = self.now + self.delay();
        self.push(
            at,
            Event::ForeignReply {
                actor,
                command,
                is_done,
                sent,
            },
        );
    }

    pub(super) fn foreign_reply(
        &mut self,
        actor: usize,
        command: ForeignCommand,
        is_done: bool,
        sent: Time,
    ) {
        let proof = sent + self.plan.watchdog * 9 / 10;
        self.has_changed = true;
        let record = &mut self.foreign[actor];
        record.is_busy = false;
        match command {
            ForeignCommand::Acquire { .. } if is_done => {
                record.holds += 1;
                record.proved_until = proof;
                self.figures.grants += 1;
            }
            ForeignCommand::Renew | ForeignCommand::Release => {
                if is_done {
                    record.proved_until = proof;
                } else {
                    record.holds = 0;
                }
            }
            _ => {}
        }
        self.foreign_later(actor);
    }
}

/// What a program with a token lock sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProgramCommand {
    /// `SET key token NX PX`, or without an expiry.
    Acquire(Option<Duration>),
    /// Compares, and deletes. It publishes nothing.
    Release,
    /// Compares, and sets the expiry.
    Extend(Duration),
}

/// A program with a token lock. It asks again and again.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) lock: usize,
    /// The value of its latest acquisition.
    pub(super) token: Bytes,
    is_held: bool,
    /// The expiry that it set, and until when it may rely on that.
    expiry: Option<(Duration, Time)>,
    /// The run that acquired.
    pub(super) run: u64,
    is_busy: bool,
    number: usize,
    acquisitions: u32,
}

impl Program {
    pub(super) fn new(number: usize) -> Self {
        Self {
            lock: 0,
            token: Bytes::new(),
            is_held: false,
            expiry: None,
            run: 0,
            is_busy: false,
            number,
            acquisitions: 0,
        }
    }

    pub(super) fn is_sure(&self, now: Time) -> bool {
        self.is_held && self.expiry.is_none_or(|(_, until)| now < until)
    }
}

impl World {
    pub(super) fn program_step(&mut self, actor: usize) {
        if self.is_finishing && !self.programs[actor].is_held {
            return;
        }
        if !self.programs[actor].is_busy {
            let now = self.now;
            let roll = self.rng.random_range(0..100);
            let lock = self.plan.locks + self.rng.random_range(0..self.plan.simple);
            let has_expiry = self.rng.random_bool(0.75);
            let longest = self.plan.longest_lease;
            let expiry = longest.mul_f64(self.rng.random_range(0.05..1.0));
            let expiry = Duration::from_millis(expiry.as_millis().max(1) as u64);
            let is_finishing = self.is_finishing;
            let record = &mut self.programs[actor];
            let command = match (record.is_held, roll) {
                (true, _) if is_finishing => Some(ProgramCommand::Release),
                (false, _) => {
                    record.acquisitions += 1;
                    record.lock = lock;
                    let number = (record.number as u128) << 64 | u128::from(record.acquisitions);
                    record.token = format!("{number:032x}").into();
                    Some(ProgramCommand::Acquire(has_expiry.then_some(expiry)))
                }
                (true, 0..3) if record.expiry.is_some() => {
                    // The process ends; another one takes its place.
                    record.is_held = false;
                    None
                }
                (true, 0..60) => Some(ProgramCommand::Release),
                (true, 60..80) => record.expiry.as_mut().map(|(_, until)| {
                    // The new expiry may be earlier.
                    *until = (*until).min(now + expiry * 9 / 10);
                    ProgramCommand::Extend(expiry)
                }),
                _ => None,
            };
            if let Some(command) = command {
                self.figures.operations += 1;
                let record = &mut self.programs[actor];
                record.is_busy = true;
                if command == ProgramCommand::Release {
                    record.is_held = false;
                }
                let at = now + self.delay();
                let sent = now;
                self.push(
                    at,
                    Event::ProgramRun {
                        actor,
                        command,
                        sent,
                    },
                );
                return;
            }
        }
        self.program_later(actor);
    }

    fn program_later(&mut self, actor: usize) {
        let at = self.now + self.foreign_pause();
        self.push(at, Event::Program { actor });
    }

    pub(super) fn program_run(&mut self, actor: usize, command: ProgramCommand, sent: Time) {
        let record = &self.programs[actor];
        let (token, keys) = (record.token.clone(), self.locks[record.lock].clone());
        let before = self.owners_of(std::slice::from_ref(&keys.name));
        let denied = std::mem::take(&mut self.database.denied);
        let run = self.next_run();
        let database = &mut self.database;
        let is_done = match command {
            ProgramCommand::Acquire(expiry) => database.program_acquire(&keys, &token, expiry),
            ProgramCommand::Release => database.program_release(&keys, &token),
            ProgramCommand::Extend(expiry) => database.program_extend(&keys, &token, expiry),
        };
        self.database.denied = denied;
        if is_done {
            self.ran(None, before, run);
        }
        self.note(|world| {
            format!(
                "program {actor}: {command:?} {is_done}, has {:?}",
                world.database.keys
            )
        });
        let at = self.now + self.delay();
        self.push(
            at,
            Event::ProgramReply {
                actor,
                command,
                is_done,
                sent,
                run,
            },
        );
    }

    pub(super) fn program_reply(
        &mut self,
        actor: usize,
        command: ProgramCommand,
        is_done: bool,
        sent: Time,
        run: u64,
    ) {
        self.has_changed = true;
        let record = &mut self.programs[actor];
        record.is_busy = false;
        match command {
            ProgramCommand::Acquire(expiry) if is_done => {
                record.is_held = true;
                record.run = run;
                record.expiry = expiry.map(|expiry| (expiry, sent + expiry * 9 / 10));
                self.figures.grants += 1;
            }
            ProgramCommand::Extend(expiry) if is_done => {
                record.expiry = Some((expiry, sent + expiry * 9 / 10));
            }
            ProgramCommand::Extend(_) => record.is_held = false,
            _ => {}
        }
        self.program_later(actor);
    }
}

impl Database {
    fn redisson_holds(&mut self, keys: &Keys, field: &[u8]) -> bool {
        let held = self.command(b"hexists", &[&keys.name, field]);
        matches!(held, Ok(Answer::Int(1)))
    }

    fn set_expiry(&mut self, keys: &Keys, millis: u64) {
        let millis = millis.to_string();
        let _ = self.command(b"pexpire", &[&keys.name, millis.as_bytes()]);
    }

    /// Redisson's `tryLock`: `None` if it is not acquired, otherwise the token of an `RFencedLock`.
    fn redisson_acquire(
        &mut self,
        keys: &Keys,
        field: &[u8],
        lease: u64,
        counter: Option<Bytes>,
    ) -> Option<Option<i64>> {
        if self.keys.contains_key(&keys.name) && !self.redisson_holds(keys, field) {
            return None;
        }
        let token = counter.and_then(|counter| match self.command(b"incr", &[&counter]) {
            Ok(Answer::Int(token)) => Some(token),
            _ => None,
        });
        let _ = self.command(b"hincrby", &[&keys.name, field, b"1"]);
        self.set_expiry(keys, lease);
        Some(token)
    }

    /// Redisson's `unlock`: whether the owner held it.
    fn redisson_release(&mut self, keys: &Keys, field: &[u8], lease: u64) -> bool {
        if !self.redisson_holds(keys, field) {
            return false;
        }
        match self.command(b"hincrby", &[&keys.name, field, b"-1"]) {
            Ok(Answer::Int(left)) if left > 0 => self.set_expiry(keys, lease),
            _ => {
                let _ = self.command(b"del", &[&keys.name]);
                let _ = self.command(b"publish", &[&keys.channel, b"0"]);
            }
        }
        true
    }

    /// Redisson's renewal.
    fn redisson_renew(&mut self, keys: &Keys, field: &[u8], lease: u64) -> bool {
        let is_held = self.redisson_holds(keys, field);
        if is_held {
            self.set_expiry(keys, lease);
        }
        is_held
    }

    /// Redisson's `forceUnlock`.
    fn redisson_force(&mut self, keys: &Keys) {
        if matches!(self.command(b"del", &[&keys.name]), Ok(Answer::Int(1))) {
            let _ = self.command(b"publish", &[&keys.channel, b"0"]);
        }
    }

    fn program_acquire(&mut self, keys: &Keys, token: &[u8], expiry: Option<Duration>) -> bool {
        let answer = match expiry {
            Some(expiry) => {
                let millis = expiry.as_millis().to_string();
                self.command(
                    b"set",
                    &[&keys.name, token, b"NX", b"PX", millis.as_bytes()],
                )
            }
            None => self.command(b"set", &[&keys.name, token, b"NX"]),
        };
        matches!(answer, Ok(Answer::Status("OK")))
    }

    fn program_holds(&mut self, keys: &Keys, token: &[u8]) -> bool {
        matches!(self.command(b"get", &[&keys.name]), Ok(Answer::Text(value)) if value == token)
    }

    fn program_release(&mut self, keys: &Keys, token: &[u8]) -> bool {
        self.program_holds(keys, token) && self.command(b"del", &[&keys.name]).is_ok()
    }

    fn program_extend(&mut self, keys: &Keys, token: &[u8], expiry: Duration) -> bool {
        let is_held = self.program_holds(keys, token);
        if is_held {
            self.set_expiry(keys, expiry.as_millis() as u64);
        }
        is_held
    }
}
