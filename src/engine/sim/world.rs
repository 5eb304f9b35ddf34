//! A world in one thread: clients, a server, networks, callers, and a virtual clock. Everything
//! follows from one seed.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::super::{CallId, Engine, Event as EngineEvent, RequestId, Settings, Transmit};
use super::callers::{Caller, Tracked};
use super::foreign::{Foreign, ForeignCommand, Program, ProgramCommand};
use super::liveness::Health;
use super::network::Link;
use super::oracle::{Oracle, is_counter};
use super::server::{Database, Scripts, Value};
use crate::config::{DeadlockDetection, LeaseTime};
use crate::error::ServerError;
use crate::keys::Keys;
use crate::owner::ClientId;
use crate::script::gather::Gathered;
use crate::time::Time;
use crate::wire::{Call, Failure, Reply};

/// Each kind of fault that a world may have.
pub(super) const FAULTS: [&str; 25] = [
    "slow call",
    "lost request",
    "lost reply",
    "long outage",
    "connection replaced",
    "requests cut",
    "replies cut",
    "late subscription",
    "subscription refused",
    "missed messages",
    "messages interrupted",
    "server restarts with data",
    "server restarts without data",
    "server refuses writes",
    "server is busy",
    "server refuses a key",
    "server refuses a command",
    "server pauses",
    "process stops",
    "client is shut down",
    "client is dropped",
    "process is killed",
    "key is deleted",
    "key of another type",
    "late timers",
];

/// What a seed decides before the run.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) clients: usize,
    /// Locks that are hashes: reentrant and fenced ones.
    pub(super) locks: usize,
    /// Simple locks.
    pub(super) simple: usize,
    /// How often a hash is locked as a fenced lock.
    pub(super) fenced: f64,
    pub(super) callers: usize,
    /// Threads of Redisson clients.
    pub(super) foreign: usize,
    /// Programs with a token lock.
    pub(super) programs: usize,
    /// The speed of the server's clock.
    pub(super) server_rate: f64,
    pub(super) watchdog: Duration,
    pub(super) command_timeout: Duration,
    pub(super) retry_timeout: Duration,
    pub(super) recheck: Option<Duration>,
    pub(super) renewal_batch: usize,
    pub(super) detection: DeadlockDetection,
    /// For how long a lock is passed on.
    pub(super) passing_time: Duration,
    pub(super) latency: Duration,
    /// Whether calls of one connection keep their order.
    pub(super) is_fifo: bool,
    /// Whether calls are made together.
    pub(super) gathers: bool,
    pub(super) think: Duration,
    pub(super) longest_lease: Duration,
    pub(super) actions: u32,
    faults: u32,
    pub(super) fault_interval: Duration,
    /// Whether two clients share an id, and use one owner in turn.
    pub(super) is_adopted: bool,
    /// Whether the server may not end old connections, so that late copies of calls run. Then each
    /// acquisition has an owner of its own.
    pub(super) is_unfenced: bool,
    /// Whether the rules about time hold: events come when they are due.
    pub(super) is_timed: bool,
    /// Whether a server that forgot its data, a deletion or a force unlock explains a loss that was
    /// not reported.
    pub(super) has_excuses: bool,
}

impl Plan {
    fn random(rng: &mut StdRng) -> Self {
        let watchdog = *[300, 1_000, 3_000, 30_000].choose(rng).unwrap();
        let watchdog = Duration::from_millis(watchdog);
        let latency = *[100, 1_000, 5_000, 20_000].choose(rng).unwrap();
        let latency = Duration::from_micros(latency).min(watchdog / 50);
        let faults = match rng.random_range(0..4) {
            0 => 0,
            1 => 1 << rng.random_range(0..FAULTS.len()),
            2 => rng.random::<u32>() & rng.random::<u32>(),
            _ => rng.random(),
        };
        let (locks, simple): (usize, usize) = match rng.random_range(0..10) {
            0..5 => (*[1, 1, 1, 2, 3].choose(rng).unwrap(), 0),
            5..8 => (rng.random_range(1..3), rng.random_range(1..3)),
            _ => (0, *[1, 1, 2].choose(rng).unwrap()),
        };
        let is_unfenced = rng.random_bool(0.1);
        // Many that want one lock, so that it is passed on often.
        let is_crowded = rng.random_bool(0.2);
        let (locks, simple) = match simple {
            _ if !is_crowded => (locks, simple),
            0 => (1, 0),
            _ => (0, 1),
        };
        let callers: &[usize] = if is_crowded {
            &[6, 10]
        } else {
            &[1, 2, 2, 3, 4]
        };
        let passing = [0, 10, 1_000].map(Duration::from_millis);
        // One after the other, they have to end within the time of a world.
        let thinks = match is_crowded {
            true => [latency, latency * 5].to_vec(),
            false => [latency, latency * 5, watchdog / 10, watchdog / 2].to_vec(),
        };
        let fenced: &[f64] = if is_crowded {
            &[0.0]
        } else {
            &[0.0, 0.3, 0.5, 1.0]
        };
        Self {
            clients: *[1, 2, 2, 2, 3, 4].choose(rng).unwrap(),
            locks,
            simple,
            fenced: *fenced.choose(rng).unwrap(),
            callers: *callers.choose(rng).unwrap(),
            foreign: *[0, 0, 1, 2].choose(rng).unwrap() * locks.min(1),
            programs: *[0, 1, 1, 2].choose(rng).unwrap() * simple.min(1),
            server_rate: *[1.0, 1.0, 0.95, 1.02, 1.08].choose(rng).unwrap(),
            watchdog,
            command_timeout: (watchdog / *[3, 5, 10].choose(rng).unwrap())
                .clamp(Duration::from_millis(10), Duration::from_secs(3)),
            retry_timeout: Duration::from_millis(*[0, 100, 1_000, 10_000].choose(rng).unwrap()),
            recheck: *[
                None,
                None,
                Some(Duration::from_millis(200)),
                Some(Duration::from_secs(2)),
            ]
            .choose(rng)
            .unwrap(),
            renewal_batch: *[1, 2, 100].choose(rng).unwrap(),
            detection: if rng.random_bool(0.2) {
                DeadlockDetection::Fail
            } else {
                DeadlockDetection::Warn
            },
            latency,
            is_fifo: rng.random_bool(0.7),
            gathers: rng.random_bool(0.5),
            passing_time: *passing.choose(rng).unwrap(),
            think: *thinks.choose(rng).unwrap(),
            longest_lease: *[watchdog / 10, watchdog, watchdog * 3].choose(rng).unwrap(),
            actions: rng.random_range(10..40),
            faults: faults & ((1 << FAULTS.len()) - 1),
            fault_interval: *[latency * 10, watchdog / 5, watchdog].choose(rng).unwrap(),
            is_adopted: rng.random_bool(0.15) && locks > 0 && !is_unfenced,
            is_unfenced,
            is_timed: true,
            has_excuses: true,
        }
    }

    pub(super) fn has(&self, fault: &str) -> bool {
        FAULTS
            .iter()
            .position(|name| *name == fault)
            .is_some_and(|at| self.faults & (1 << at) != 0)
    }

    pub(super) fn allow(&mut self, faults: &[&str]) {
        self.faults = 0;
        for fault in faults {
            let at = FAULTS.iter().position(|name| name == fault).unwrap();
            self.faults |= 1 << at;
        }
    }

    pub(super) fn of_seed(seed: u64) -> Self {
        Self::random(&mut StdRng::seed_from_u64(seed ^ 0x5eed))
    }
}

/// Something that happens at a moment.
#[derive(Debug)]
pub(super) enum Event {
    /// The calls that were gathered are sent.
    Send {
        client: usize,
    },
    Request {
        client: usize,
        connection: u32,
        gathered: Gathered<CallId>,
        content: Call,
    },
    Reply {
        client: usize,
        connection: u32,
        gathered: Gathered<CallId>,
        outcome: Result<Reply, ServerError>,
        run: u64,
    },
    Timeout {
        client: usize,
        call: CallId,
    },
    NotSent {
        client: usize,
        call: CallId,
    },
    Replace {
        client: usize,
    },
    Connected {
        client: usize,
    },
    Synchronize {
        client: usize,
    },
    Subscribe {
        client: usize,
        generation: u32,
        names: Vec<Bytes>,
        is_end: bool,
    },
    Subscribed {
        client: usize,
        generation: u32,
        names: Vec<Bytes>,
        is_end: bool,
        is_refused: bool,
    },
    SubscribeAgain {
        client: usize,
    },
    Message {
        client: usize,
        generation: u32,
        channel: Bytes,
    },
    Missed {
        client: usize,
        generation: u32,
    },
    Interrupted {
        client: usize,
    },
    Reopened {
        client: usize,
    },
    Alarm {
        client: usize,
    },
    Caller {
        client: usize,
        caller: usize,
    },
    Poll {
        client: usize,
        request: RequestId,
    },
    Cancel {
        client: usize,
        request: RequestId,
    },
    Resume {
        client: usize,
    },
    Fault,
    Foreign {
        actor: usize,
    },
    ForeignRun {
        actor: usize,
        command: ForeignCommand,
    },
    ForeignReply {
        actor: usize,
        command: ForeignCommand,
        is_done: bool,
        sent: Time,
    },
    Program {
        actor: usize,
    },
    ProgramRun {
        actor: usize,
        command: ProgramCommand,
        sent: Time,
    },
    ProgramReply {
        actor: usize,
        command: ProgramCommand,
        is_done: bool,
        sent: Time,
        run: u64,
    },
    /// The callers have acted long enough.
    Calm,
    Sweep,
    Finish,
    End,
}

impl Event {
    /// The client that takes the event in, if its process has to run for that.
    fn of_client(&self) -> Option<usize> {
        Some(match self {
            Self::Send { client }
            | Self::Reply { client, .. }
            | Self::Timeout { client, .. }
            | Self::NotSent { client, .. }
            | Self::Replace { client }
            | Self::Connected { client }
            | Self::Synchronize { client }
            | Self::Subscribed { client, .. }
            | Self::SubscribeAgain { client }
            | Self::Message { client, .. }
            | Self::Missed { client, .. }
            | Self::Interrupted { client }
            | Self::Reopened { client }
            | Self::Alarm { client }
            | Self::Caller { client, .. }
            | Self::Poll { client, .. }
            | Self::Cancel { client, .. } => *client,
            _ => return None,
        })
    }
}

/// A process with one client.
pub(super) struct Client {
    pub(super) id: ClientId,
    pub(super) engine: Engine,
    pub(super) link: Link,
    pub(super) callers: Vec<Caller>,
    pub(super) tracked: BTreeMap<RequestId, Tracked>,
    /// The locks of its force unlocks whose callers have gone: some may still run.
    pub(super) forced: BTreeSet<Bytes>,
    alarm: Option<(Time, u64)>,
    stopped: bool,
    backlog: Vec<Event>,
    /// Shut down or dropped.
    pub(super) is_closing: bool,
    pub(super) has_ended: bool,
    pub(super) is_killed: bool,
    pub(super) health: Health,
}

impl Client {
    pub(super) fn is_running(&self) -> bool {
        !self.stopped && !self.has_ended && !self.is_killed
    }

    pub(super) fn is_open(&self) -> bool {
        !self.is_closing && !self.has_ended && !self.is_killed
    }
}

/// What a run did.
#[derive(Debug, Default, Clone)]
pub(super) struct Figures {
    pub(super) schedules: u64,
    pub(super) operations: u64,
    pub(super) grants: u64,
    pub(super) losses: u64,
    pub(super) scripts: u64,
    pub(super) steps: u64,
    pub(super) faults: BTreeMap<&'static str, u64>,
}

impl Figures {
    pub(super) fn add(&mut self, other: &Self) {
        self.schedules += other.schedules;
        self.operations += other.operations;
        self.grants += other.grants;
        self.losses += other.losses;
        self.scripts += other.scripts;
        self.steps += other.steps;
        for (fault, count) in &other.faults {
            *self.faults.entry(fault).or_default() += count;
        }
    }
}

pub(super) struct World {
    pub(super) plan: Plan,
    pub(super) rng: StdRng,
    pub(super) now: Time,
    next_event: u64,
    pub(super) queue: BTreeMap<(Time, u64), Event>,
    pub(super) clients: Vec<Client>,
    pub(super) foreign: Vec<Foreign>,
    pub(super) programs: Vec<Program>,
    /// The hashes, then the simple locks.
    pub(super) locks: Vec<Keys>,
    pub(super) database: Database,
    scripts: Rc<Scripts>,
    pub(super) paused_until: Time,
    busy_until: Time,
    refused_key: Option<(Bytes, Time)>,
    /// The keys that were refused so far.
    pub(super) refused_keys: BTreeSet<Bytes>,
    denied_until: Time,
    inflicted: u32,
    /// Whether the engine wanted to leave the server.
    has_left: bool,
    /// When the last fault had an effect.
    pub(super) faulted: Time,
    /// The clients whose state has changed since the last look, one bit for each.
    pub(super) touched: u32,
    /// Whether a key has expired since then, or another program relies on a lock.
    pub(super) has_changed: bool,
    pub(super) faults_on: bool,
    pub(super) is_finishing: bool,
    pub(super) actions_left: u32,
    pub(super) next_owner: i64,
    /// Which client uses the adopted owner.
    pub(super) adopted_by: usize,
    pub(super) current_run: u64,
    runs: u64,
    pub(super) oracle: Oracle,
    pub(super) figures: Figures,
    pub(super) trace: Option<Vec<String>>,
    pub(super) violation: Option<String>,
    is_over: bool,
}

impl World {
    pub(super) fn new(seed: u64, plan: Plan, is_traced: bool) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let hashes = (0..plan.locks).map(|at| Keys::reentrant(&format!("lock{at}")).unwrap());
        let simple = (0..plan.simple).map(|at| Keys::simple(&format!("simple{at}")).unwrap());
        let locks: Vec<_> = hashes.chain(simple).collect();
        let clients = (0..plan.clients)
            .map(|at| {
                let number = if plan.is_adopted && at == 1 { 0 } else { at };
                let id = ClientId::from(uuid::Uuid::from_u128(0x1_0000 + number as u128));
                let settings = Settings {
                    client_id: id,
                    address: "server:6379".into(),
                    watchdog: LeaseTime::new(plan.watchdog).unwrap(),
                    recheck: plan.recheck,
                    retry_timeout: plan.retry_timeout,
                    command_timeout: plan.command_timeout,
                    renewal_batch: plan.renewal_batch,
                    detection: plan.detection,
                    passing_time: plan.passing_time,
                };
                Client {
                    id,
                    engine: Engine::new(settings, rng.random()),
                    link: Link::new(),
                    callers: (0..plan.callers)
                        .map(|caller| Caller::new(at, caller))
                        .collect(),
                    tracked: BTreeMap::new(),
                    forced: BTreeSet::new(),
                    alarm: None,
                    stopped: false,
                    backlog: Vec::new(),
                    is_closing: false,
                    has_ended: false,
                    is_killed: false,
                    health: Health::default(),
                }
            })
            .collect();
        let foreign = (0..plan.foreign).map(Foreign::new).collect();
        let programs = (0..plan.programs).map(Program::new).collect();
        let mut world = Self {
            rng,
            now: Time::default() + Duration::from_secs(1),
            next_event: 0,
            queue: BTreeMap::new(),
            clients,
            foreign,
            programs,
            locks,
            database: Database::default(),
            scripts: Scripts::of_thread(),
            paused_until: Time::default(),
            busy_until: Time::default(),
            refused_key: None,
            refused_keys: BTreeSet::new(),
            denied_until: Time::default(),
            inflicted: 0,
            has_left: false,
            faulted: Time::default(),
            touched: 0,
            has_changed: false,
            faults_on: true,
            is_finishing: false,
            actions_left: plan.actions,
            next_owner: 1_000,
            adopted_by: 0,
            current_run: 0,
            runs: 0,
            oracle: Oracle::default(),
            figures: Figures {
                schedules: 1,
                ..Figures::default()
            },
            trace: is_traced.then(Vec::new),
            violation: None,
            is_over: false,
            plan,
        };
        world.tick_server();
        world
    }

    /// Has the callers and the faults begin.
    pub(super) fn begin(&mut self) {
        for client in 0..self.clients.len() {
            for caller in 0..self.clients[client].callers.len() {
                let at = self.now + self.think();
                self.push(at, Event::Caller { client, caller });
            }
        }
        for actor in 0..self.foreign.len() {
            let at = self.now + self.think();
            self.push(at, Event::Foreign { actor });
        }
        for actor in 0..self.programs.len() {
            let at = self.now + self.think();
            self.push(at, Event::Program { actor });
        }
        let longest = self.plan.think * self.plan.actions + self.plan.watchdog * 5;
        self.push(self.now + longest, Event::Calm);
        if self.plan.faults != 0 {
            let at = self.now + self.fault_pause();
            self.push(at, Event::Fault);
        }
    }

    pub(super) fn think(&mut self) -> Duration {
        let think = self.plan.think;
        think.mul_f64(self.rng.random_range(0.0..2.0))
    }

    fn fault_pause(&mut self) -> Duration {
        let interval = self.plan.fault_interval;
        interval.mul_f64(self.rng.random_range(0.0..2.0))
    }

    pub(super) fn push(&mut self, at: Time, event: Event) -> (Time, u64) {
        let key = (at.max(self.now), self.next_event);
        self.next_event += 1;
        self.queue.insert(key, event);
        key
    }

    pub(super) fn cancel_event(&mut self, key: (Time, u64)) {
        self.queue.remove(&key);
    }

    /// Whether a fault happens here, if the world has it.
    pub(super) fn chance(&mut self, fault: &str, probability: f64) -> bool {
        self.faults_on && self.plan.has(fault) && self.rng.random_bool(probability)
    }

    pub(super) fn met(&mut self, fault: &'static str) {
        *self.figures.faults.entry(fault).or_default() += 1;
        self.faulted = self.now;
        self.note(|_| format!("fault: {fault}"));
    }

    pub(super) fn note(&mut self, text: impl FnOnce(&Self) -> String) {
        if self.trace.is_some() {
            let line = format!("{:?} {}", self.now, text(self));
            if let Some(trace) = &mut self.trace {
                trace.push(line);
            }
        }
    }

    pub(super) fn fail(&mut self, problem: String) {
        self.note(|_| format!("VIOLATION: {problem}"));
        self.violation.get_or_insert(problem);
    }

    /// Runs to the end, or to the first violation.
    pub(super) fn run(&mut self) {
        let ran = catch_unwind(AssertUnwindSafe(|| while self.step() {}));
        if let Err(panic) = ran {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
            self.fail(format!("panicked: {}", text.unwrap_or_default()));
        }
    }

    /// Takes in the next event. `false` at the end.
    pub(super) fn step(&mut self) -> bool {
        if self.is_over || self.violation.is_some() {
            return false;
        }
        let Some(((at, _), event)) = self.queue.pop_first() else {
            return false;
        };
        self.now = self.now.max(at);
        self.take(event);
        if self.actions_left == 0 && !self.is_finishing {
            self.finish();
        }
        true
    }

    /// Takes in one event, and has the oracle look.
    pub(super) fn take(&mut self, event: Event) {
        self.figures.steps += 1;
        self.tick_server();
        if let Some(client) = event.of_client() {
            let client = &mut self.clients[client];
            if client.stopped {
                client.backlog.push(event);
                return;
            }
            if client.is_killed {
                return;
            }
        }
        self.look_at_links();
        self.dispatch(event);
        self.look_at_links();
        if self.figures.steps > 200_000 {
            self.fail("the run does not end".to_owned());
        }
        self.check();
    }

    fn dispatch(&mut self, event: Event) {
        self.note_event(&event);
        match event {
            Event::Send { client } => self.send_gathered(client),
            Event::Request {
                client,
                connection,
                gathered,
                content,
            } => {
                self.request_arrived(client, connection, gathered, content);
            }
            Event::Reply {
                client,
                connection,
                gathered,
                outcome,
                run,
            } => {
                if refuses(&outcome) {
                    self.clients[client].health.refused(self.now);
                }
                // A server that is no master is left.
                let record = &self.clients[client];
                let is_awaited = record.link.is_up
                    && record.link.connection == connection
                    && gathered.ids().any(|call| record.engine.is_awaited(*call));
                let must_leave = is_awaited && names_replica(&outcome);
                self.has_left = false;
                let outcome = outcome.map_err(Failure::Server);
                self.reply_arrived(client, connection, gathered, outcome, run);
                if is_awaited {
                    self.replied(client, run);
                }
                if must_leave && !self.has_left {
                    self.fail(format!(
                        "client {client} stays on a server that is no master"
                    ));
                }
            }
            Event::Timeout { client, call } => self.call_timed_out(client, call),
            Event::NotSent { client, call } => self.not_sent(client, call),
            Event::Replace { client } => self.replace_connection(client),
            Event::Connected { client } => self.connected(client),
            Event::Synchronize { client } => self.synchronize(client),
            Event::Subscribe {
                client,
                generation,
                names,
                is_end,
            } => {
                self.subscribe_arrived(client, generation, names, is_end);
            }
            Event::Subscribed {
                client,
                generation,
                names,
                is_end,
                is_refused,
            } => {
                self.subscribed(client, generation, names, is_end, is_refused);
            }
            Event::SubscribeAgain { client } => self.subscribe_again(client),
            Event::Message {
                client,
                generation,
                channel,
            } => {
                self.message_arrived(client, generation, &channel);
            }
            Event::Missed { client, generation } => self.messages_missed(client, generation),
            Event::Interrupted { client } => self.interrupted(client),
            Event::Reopened { client } => self.reopened(client),
            Event::Alarm { client } => {
                self.clients[client].alarm = None;
                self.input(client, Engine::handle_timeout);
            }
            Event::Caller { client, caller } => self.caller_step(client, caller),
            Event::Poll { client, request } => self.poll_request(client, request),
            Event::Cancel { client, request } => self.cancel_request(client, request),
            Event::Resume { client } => self.resume_process(client),
            Event::Fault => self.fault(),
            Event::Foreign { actor } => self.foreign_step(actor),
            Event::ForeignRun { actor, command } => self.foreign_run(actor, command),
            Event::ForeignReply {
                actor,
                command,
                is_done,
                sent,
            } => {
                self.foreign_reply(actor, command, is_done, sent);
            }
            Event::Program { actor } => self.program_step(actor),
            Event::ProgramRun {
                actor,
                command,
                sent,
            } => self.program_run(actor, command, sent),
            Event::ProgramReply {
                actor,
                command,
                is_done,
                sent,
                run,
            } => self.program_reply(actor, command, is_done, sent, run),
            Event::Calm => self.actions_left = 0,
            Event::Sweep => self.sweep(),
            Event::Finish => self.callers_are_over(),
            Event::End => self.end(),
        }
    }

    fn note_event(&mut self, event: &Event) {
        match event {
            Event::Caller { .. } | Event::Fault | Event::Alarm { .. } => {}
            Event::Request {
                client,
                connection,
                gathered,
                ..
            } => {
                self.note(|_| {
                    let calls: Vec<_> = gathered.ids().collect();
                    format!("{calls:?} of client {client}, connection {connection}, arrive")
                });
            }
            _ => self.note(|_| format!("{event:?}")),
        }
    }

    /// Changes an engine, and takes its outputs.
    pub(super) fn input<T>(
        &mut self,
        client: usize,
        change: impl FnOnce(&mut Engine, Time) -> T,
    ) -> T {
        let now = self.now;
        let output = change(&mut self.clients[client].engine, now);
        self.touched |= 1 << client;
        self.drain(client);
        output
    }

    fn drain(&mut self, client: usize) {
        while let Some(transmit) = self.clients[client].engine.poll_transmit() {
            self.note(|_| format!("client {client} sends {}", shown(&transmit)));
            match transmit {
                Transmit::Call(call, content) => self.submit(client, call, content),
                Transmit::Subscribe(name) => self.change_subscription(client, name, true),
                Transmit::Unsubscribe(name) => self.change_subscription(client, name, false),
                Transmit::Reconnect => {
                    self.has_left = true;
                    self.leave_server(client);
                }
            }
        }
        while let Some(event) = self.clients[client].engine.poll_event() {
            self.note(|_| format!("client {client} reports {event:?}"));
            match event {
                EngineEvent::Completed(request, outcome) => {
                    self.completed(client, request, outcome);
                }
                EngineEvent::Lost(cell) => {
                    self.figures.losses += 1;
                    self.lost(client, &cell);
                }
                EngineEvent::Notice(notice) => self.noticed(client, &notice),
            }
        }
        let is_over = self.clients[client].engine.has_ended();
        if is_over && !self.clients[client].has_ended {
            self.clients[client].has_ended = true;
            self.close_link(client);
            self.client_ended(client);
        }
        self.set_alarm(client);
    }

    fn set_alarm(&mut self, client: usize) {
        let due = self.clients[client]
            .engine
            .poll_timeout()
            .filter(|_| !self.clients[client].has_ended);
        let due = due.map(|at| at.max(self.now));
        let set = self.clients[client].alarm;
        match (due, set) {
            (Some(due), Some((at, _)))
                if at >= due && at.since(due) <= Duration::from_millis(1) => {}
            (None, None) => {}
            _ => {
                if let Some(key) = self.clients[client].alarm.take() {
                    self.cancel_event(key);
                }
                if let Some(mut at) = due {
                    // A timer of the runtime fires up to a millisecond late, a busy one later.
                    at = at + Duration::from_micros(self.rng.random_range(0..1000));
                    if self.chance("late timers", 0.05) {
                        let late = self.plan.watchdog.mul_f64(self.rng.random_range(0.0..0.2));
                        at = at + late;
                        self.clients[client].health.delay(at, late);
                        self.met("late timers");
                    }
                    self.clients[client].alarm = Some(self.push(at, Event::Alarm { client }));
                }
            }
        }
    }

    /// Sets the server's clock, and has keys expire.
    fn tick_server(&mut self) {
        let millis = self.now.nanos() as f64 * self.plan.server_rate / 1e6;
        self.database.now = millis as u64;
        self.has_changed |= self.database.expire();
    }

    /// Runs a call on the server. The number tells it from other runs.
    pub(super) fn run_script(
        &mut self,
        client: usize,
        call: &Call,
    ) -> (Result<Reply, ServerError>, u64) {
        let now = self.now;
        if now < self.busy_until {
            self.met("server is busy");
            self.clients[client].health.refused(now);
            let error = "BUSY Redis is busy running a script.".to_owned();
            return (Err(error.into()), 0);
        }
        if let Some((name, until)) = &self.refused_key {
            if now < *until && call.keys.contains(name) {
                self.met("server refuses a key");
                self.clients[client].health.refused(now);
                let error = "NOPERM No permissions to access a key".to_owned();
                return (Err(error.into()), 0);
            }
        }
        if now >= self.denied_until && !self.database.denied.is_empty() {
            self.database.denied.clear();
        }
        self.runs += 1;
        self.figures.scripts += 1;
        let run = self.runs;
        let before = self.owners_of(&call.keys);
        let reply = self.scripts.run(&mut self.database, call);
        if refuses(&reply) {
            self.clients[client].health.refused(now);
        }
        if std::mem::take(&mut self.database.denials) > 0 {
            self.met(if self.database.denied.len() == 1 {
                "server refuses a command"
            } else {
                "server refuses writes"
            });
        }
        self.note(|world| format!("server replies {reply:?}, has {:?}", world.database.keys));
        self.ran(Some((client, call)), before, run);
        self.deliver();
        (reply, run)
    }

    pub(super) fn next_run(&mut self) -> u64 {
        self.runs += 1;
        self.runs
    }

    pub(super) fn owners_of(&self, names: &[Bytes]) -> Vec<(Bytes, Option<Bytes>)> {
        names
            .iter()
            .filter(|name| !is_counter(name))
            .map(|name| {
                let owner = self.database.owner(name).map(|(field, _)| field.clone());
                (name.clone(), owner)
            })
            .collect()
    }

    /// Sends the messages that the server has published.
    pub(super) fn deliver(&mut self) {
        for channel in std::mem::take(&mut self.database.published) {
            self.oracle.published(self.now, &channel, &self.locks);
            self.publish(&channel);
        }
    }

    /// One fault, of those that happen at a moment.
    fn fault(&mut self) {
        /// A world with more of them does nothing else.
        const MOST: u32 = 60;
        if !self.faults_on || self.inflicted == MOST {
            return;
        }
        self.inflicted += 1;
        let at = self.now + self.fault_pause();
        self.push(at, Event::Fault);
        let enabled: Vec<_> = FAULTS
            .into_iter()
            .filter(|fault| self.plan.has(fault))
            .collect();
        let fault = *enabled.choose(&mut self.rng).unwrap();
        let client = self.rng.random_range(0..self.clients.len());
        self.inflict(fault, client);
    }

    pub(super) fn inflict(&mut self, fault: &'static str, client: usize) {
        let until = self.now
            + self
                .plan
                .command_timeout
                .mul_f64(self.rng.random_range(0.1..2.0));
        let lock = self.rng.random_range(0..self.locks.len());
        let name = self.locks[lock].name.clone();
        match fault {
            "connection replaced" => self.replace_connection(client),
            "requests cut" => self.clients[client].link.requests_cut = until,
            "replies cut" => self.clients[client].link.replies_cut = until,
            "subscription refused" => {
                let messages = &mut self.clients[client].link.messages;
                messages.refused_until = until + Duration::from_secs(1);
            }
            "messages interrupted" => self.interrupt(client),
            "server restarts with data" => self.restart(false),
            "server restarts without data" => self.restart(true),
            "server refuses writes" => {
                let error = [
                    "READONLY You can't write against a read only replica.",
                    "NOREPLICAS Not enough good replicas to write.",
                    "MISCONF Errors writing to the AOF file: No space left on device",
                ];
                let error = error.choose(&mut self.rng).unwrap();
                self.deny(&["hset", "pexpire", "del", "hdel", "incr", "set"], error);
                self.denied_until = until;
            }
            "server is busy" => self.busy_until = until,
            "server refuses a key" => {
                // Long enough for renewals, which may be of several locks.
                let pause = self.plan.watchdog.mul_f64(self.rng.random_range(0.1..1.0));
                self.refused_keys.insert(name.clone());
                self.refused_key = Some((name, self.now + pause));
            }
            "server refuses a command" => {
                let (command, error) = *[
                    (
                        "hset",
                        "OOM command not allowed when used memory > 'maxmemory'.",
                    ),
                    (
                        "set",
                        "OOM command not allowed when used memory > 'maxmemory'.",
                    ),
                    (
                        "incr",
                        "NOPERM this user has no permissions to run the 'incr' command",
                    ),
                    (
                        "pexpire",
                        "ERR ACL failure in script: no right to run 'pexpire'",
                    ),
                    (
                        "del",
                        "NOPERM this user has no permissions to run the 'del' command",
                    ),
                    (
                        "publish",
                        "NOPERM this user has no permissions to run 'publish'",
                    ),
                ]
                .choose(&mut self.rng)
                .unwrap();
                self.deny(&[command], error);
                self.denied_until = until;
            }
            "server pauses" => self.paused_until = until,
            "process stops" => self.stop_process(client),
            "client is shut down" => self.shut_down(client),
            "client is dropped" => self.drop_client(client),
            "process is killed" => self.kill(client),
            "key is deleted" if self.database.keys.contains_key(&name) => {
                self.met(fault);
                let before = self.owners_of(std::slice::from_ref(&name));
                self.database.keys.remove(&name);
                let run = self.next_run();
                self.ran(None, before, run);
            }
            "key of another type" => {
                self.met(fault);
                let before = self.owners_of(std::slice::from_ref(&name));
                let value = if lock < self.plan.locks {
                    Value::Text("garbage".into())
                } else {
                    Value::Hash(vec![("garbage".into(), "1".into())])
                };
                let expires = self.database.now + self.plan.watchdog.as_millis() as u64 / 3;
                self.database.insert(&name, value, Some(expires));
                let run = self.next_run();
                self.ran(None, before, run);
            }
            _ => {}
        }
    }

    fn deny(&mut self, commands: &[&'static str], error: &str) {
        self.database.denied = commands
            .iter()
            .map(|command| (*command, error.to_owned()))
            .collect();
    }

    fn restart(&mut self, without_data: bool) {
        let is_used = |client: &Client| client.link.requests > 0;
        if without_data && !self.database.keys.is_empty() {
            self.met("server restarts without data");
        } else if self.clients.iter().any(is_used) {
            self.met("server restarts with data");
        }
        if without_data {
            let names: Vec<_> = self.database.keys.keys().cloned().collect();
            let before = self.owners_of(&names);
            self.database.keys.clear();
            let run = self.next_run();
            self.ran(None, before, run);
            self.oracle.forget_tokens(run);
        }
        for client in 0..self.clients.len() {
            if self.clients[client].link.is_closed {
                continue;
            }
            // Nothing that was sent before arrives any more.
            let link = &mut self.clients[client].link;
            link.fenced = link.connection + 1;
            let at = self.now + self.delay();
            self.push(at, Event::Replace { client });
            self.interrupt(client);
        }
    }

    fn stop_process(&mut self, client: usize) {
        if !self.clients[client].is_running() {
            return;
        }
        self.met("process stops");
        self.clients[client].stopped = true;
        let now = self.now;
        let pause = self.plan.watchdog.mul_f64(self.rng.random_range(0.1..2.5));
        let at = now + pause;
        self.clients[client].health.delay(at, pause);
        self.push(at, Event::Resume { client });
    }

    fn resume_process(&mut self, client: usize) {
        if !std::mem::replace(&mut self.clients[client].stopped, false) {
            return;
        }
        let now = self.now;
        self.clients[client].health.delay(now, Duration::ZERO);
        let mut backlog = std::mem::take(&mut self.clients[client].backlog);
        if self.rng.random_bool(0.5) {
            // The timers are looked at first, or last.
            backlog
                .sort_by_key(|event| !matches!(event, Event::Alarm { .. } | Event::Timeout { .. }));
        }
        for event in backlog {
            if self.violation.is_some() {
                return;
            }
            self.take(event);
        }
    }

    fn kill(&mut self, client: usize) {
        if self.clients.len() == 1 || !self.clients[client].is_running() {
            return;
        }
        self.met("process is killed");
        self.clients[client].is_killed = true;
        if let Some(key) = self.clients[client].alarm.take() {
            self.cancel_event(key);
        }
        self.close_link(client);
        self.oracle.forget_client(client);
        self.clients[client].tracked.clear();
        for caller in &mut self.clients[client].callers {
            *caller = Caller::new(client, caller.number);
        }
    }

    /// No more faults; the callers release what they have.
    fn finish(&mut self) {
        self.is_finishing = true;
        self.faults_on = false;
        self.note(|_| "the faults end, the callers finish".to_owned());
        let now = self.now;
        self.paused_until = now;
        self.busy_until = now;
        self.refused_key = None;
        self.denied_until = now;
        self.database.denied.clear();
        for client in 0..self.clients.len() {
            let link = &mut self.clients[client].link;
            link.requests_cut = now;
            link.replies_cut = now;
            link.messages.refused_until = now;
            self.resume_process(client);
            self.hurry(client);
        }
        let pause = self.plan.watchdog.max(self.plan.longest_lease) * 3
            + self.plan.retry_timeout * 3
            + Duration::from_secs(120);
        for part in 1..12 {
            self.push(now + pause / 12 * part, Event::Sweep);
        }
        self.push(now + pause, Event::Finish);
        self.push(now + pause * 2, Event::End);
    }

    fn end(&mut self) {
        self.is_over = true;
        self.check_rest();
    }
}

fn shown(transmit: &Transmit) -> String {
    match transmit {
        Transmit::Call(id, call) => {
            format!("{id:?} {:?} {:?} {:?}", call.script, call.keys, call.args)
        }
        other => format!("{other:?}"),
    }
}

/// Whether the server says that it is no master.
fn names_replica(reply: &Result<Reply, ServerError>) -> bool {
    let Ok(Reply::List(values)) = reply else {
        return false;
    };
    let mut texts = values.iter();
    texts.any(|value| matches!(value, Reply::Text(text) if text.starts_with(b"READONLY")))
}

/// Whether the server refused something, in the reply or with it.
fn refuses(reply: &Result<Reply, ServerError>) -> bool {
    match reply {
        Err(_) => true,
        Ok(Reply::List(values)) => values.windows(2).any(|pair| {
            matches!(pair, [Reply::Int(code), Reply::Text(_)] if *code == crate::script::REFUSED)
        }),
        Ok(_) => false,
    }
}
