//! The faults of a run: a schedule that a seed determines, and how each of them is done.
//!
//! None of them may break exclusion. A server that stands still, or is down and comes back with its data, lets
//! leases run out as if it had been there, and holders are told by their own clocks. What a client sent on a connection
//! that it has given up may arrive late: the client has the server close that connection first. A process that is
//! killed leaves its leases behind.
//!
//! The [controls](Kind::is_control) must break it, or the judge is blind.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::time::sleep;

use super::history::{Fault, Nanos, now, process_of};
use super::run::Records;
use super::support::process::Worker;
use super::support::proxy::{Fate, Flow, Proxy, Way};
use super::support::server::Server;
use super::worker::{BUSY_LOCKS, lock_name};

/// For how long each storm lasts, and the calm after it, in which what is left has to settle and waiters to wake.
const STORM: u64 = 10_000;
const CALM: u64 = 5_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    HoldRequests,
    HoldReplies,
    HoldBoth,
    Delay(u64),
    SwallowReply(&'static str),
    CloseOnReply(&'static str),
    CutReply(usize),
    CloseConnections,
    Stall,
    KillClients(&'static str),
    PauseClients(&'static str),
    FlushScripts,
    StopServer,
    RestartServer,
    StopWorker,
    KillWorker,
    /// A control: the server comes back without its data.
    ForgetData,
    /// A control: the keys are deleted.
    DeleteKeys,
    /// A control: a lock of somebody else goes away without a message.
    FreeInSilence,
}

/// A fault to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planned {
    /// Milliseconds after the beginning.
    pub at: u64,
    pub lasts: u64,
    pub kind: Kind,
    /// Of which worker, where it is not the server's.
    pub slot: usize,
}

impl Kind {
    /// What it is called in tables.
    pub fn name(self) -> &'static str {
        match self {
            Kind::HoldRequests => "requests held",
            Kind::HoldReplies => "replies held",
            Kind::HoldBoth => "both ways held",
            Kind::Delay(_) => "slow network",
            Kind::SwallowReply(_) => "reply swallowed",
            Kind::CloseOnReply(_) => "closed on a reply",
            Kind::CutReply(_) => "closed inside a reply",
            Kind::CloseConnections => "connections closed",
            Kind::Stall => "old connections stalled",
            Kind::KillClients(_) => "CLIENT KILL",
            Kind::PauseClients(_) => "CLIENT PAUSE",
            Kind::FlushScripts => "SCRIPT FLUSH",
            Kind::StopServer => "server stopped (SIGSTOP)",
            Kind::RestartServer => "server killed, restarted",
            // The judge knows by this beginning which processes stood still.
            Kind::StopWorker => "worker stopped (SIGSTOP)",
            Kind::KillWorker => "worker killed, replaced",
            Kind::ForgetData => "server lost its data",
            Kind::DeleteKeys => "keys deleted",
            Kind::FreeInSilence => "freed in silence",
        }
    }

    fn is_servers(self) -> bool {
        use Kind::*;
        matches!(self, KillClients(_) | PauseClients(_) | FlushScripts | StopServer | RestartServer)
            || self.is_control()
    }

    /// Whether the judge has to find something after it. He is not told of such a fault.
    pub fn is_control(self) -> bool {
        matches!(self, Kind::ForgetData | Kind::DeleteKeys | Kind::FreeInSilence)
    }
}

/// The faults of a run of that many seconds.
pub fn plan(seed: u64, seconds: u64, slots: usize) -> Vec<Planned> {
    let mut random = StdRng::seed_from_u64(seed);
    let last = (seconds * 1_000).saturating_sub(CALM);
    let mut planned = Vec::new();
    let mut at = 300;
    loop {
        at += random.random_range(50..500);
        if at % (STORM + CALM) > STORM {
            at = (at / (STORM + CALM) + 1) * (STORM + CALM);
        }
        if at >= last {
            return planned;
        }
        let (kind, longest) = any(&mut random);
        // Most are over before a lease is.
        let longest = if random.random_bool(0.7) { longest / 4 } else { longest };
        let over = (at / (STORM + CALM) * (STORM + CALM) + STORM).min(last);
        let lasts = random.random_range(longest / 20..=longest).min(over - at);
        planned.push(Planned { at, lasts, kind, slot: random.random_range(0..slots) });
    }
}

/// A fault, and how long it lasts at most.
fn any(random: &mut StdRng) -> (Kind, u64) {
    let call = ["EVALSHA", "EVALSHA", "EVALSHA", "PING", "CLIENT", "SUBSCRIBE"][random.random_range(0..6)];
    match random.random_range(0..100) {
        0..6 => (Kind::HoldRequests, 4_000),
        6..12 => (Kind::HoldReplies, 4_000),
        12..18 => (Kind::HoldBoth, 4_000),
        18..26 => (Kind::Delay(random.random_range(10..400)), 6_000),
        26..37 => (Kind::SwallowReply(call), 1_000),
        37..43 => (Kind::CloseOnReply(call), 1_000),
        43..46 => (Kind::CutReply(random.random_range(0..40)), 1_000),
        46..52 => (Kind::CloseConnections, 0),
        52..60 => (Kind::Stall, 5_000),
        60..64 => (Kind::KillClients("pubsub"), 0),
        64..68 => (Kind::KillClients("normal"), 0),
        68..71 => (Kind::PauseClients("ALL"), 1_500),
        71..74 => (Kind::PauseClients("WRITE"), 1_500),
        74..79 => (Kind::FlushScripts, 0),
        79..83 => (Kind::StopServer, 3_000),
        83..86 => (Kind::RestartServer, 1_000),
        86..94 => (Kind::StopWorker, 4_000),
        _ => (Kind::KillWorker, 0),
    }
}

/// What the faults act on.
pub struct Stage {
    pub server: tokio::sync::Mutex<Server>,
    pub slots: Vec<Slot>,
    pub records: Records,
}

/// A worker with its way to the server.
pub struct Slot {
    pub number: u64,
    pub proxy: Proxy,
    /// Kept by a fault that changes how bytes travel, for as long as it lasts.
    pub flow: tokio::sync::Mutex<()>,
    pub worker: tokio::sync::Mutex<Incarnation>,
    /// Starts the process of that number.
    pub start: Box<dyn Fn(u64) -> Worker + Send + Sync>,
}

/// A slot's process.
pub struct Incarnation {
    /// How many were there before it.
    pub number: u64,
    /// `None` only where starting another failed.
    pub worker: Option<Worker>,
}

impl Stage {
    /// Does what was planned, and writes it down.
    pub async fn act(&self, planned: Planned) {
        let Planned { lasts, kind, slot, .. } = planned;
        if kind.is_servers() {
            let mut server = self.server.lock().await;
            let from = now();
            let met = act_on_server(&mut server, kind, lasts).await;
            self.record(from, kind, None, met);
            return;
        }
        let slot = &self.slots[slot];
        let lasting = Duration::from_millis(lasts);
        match kind {
            Kind::StopWorker => {
                let incarnation = slot.worker.lock().await;
                let Some(worker) = &incarnation.worker else { return };
                let from = now();
                let _guard = KilledWithUs::new(worker);
                worker.pause();
                sleep(lasting).await;
                worker.resume();
                self.record(from, kind, Some(slot.number), true);
            }
            Kind::KillWorker => {
                let mut incarnation = slot.worker.lock().await;
                let Some(worker) = incarnation.worker.take() else { return };
                let from = now();
                worker.kill();
                self.records.killed.lock().unwrap().push((process_of(slot.number, incarnation.number), now()));
                incarnation.number += 1;
                incarnation.worker = Some((slot.start)(process_of(slot.number, incarnation.number)));
                self.record(from, kind, Some(slot.number), true);
            }
            _ => {
                let _flow = slot.flow.lock().await;
                let (from, proxy) = (now(), &slot.proxy);
                let touched = proxy.touched();
                match kind {
                    Kind::HoldRequests => proxy.set(Way::Requests, Flow::Hold),
                    Kind::HoldReplies => proxy.set(Way::Replies, Flow::Hold),
                    Kind::HoldBoth => proxy.set(Way::Both, Flow::Hold),
                    Kind::Delay(ms) => proxy.set(Way::Both, Flow::Delay(Duration::from_millis(ms))),
                    Kind::SwallowReply(call) => proxy.next_reply_to(&[call], Fate::Swallow),
                    Kind::CloseOnReply(call) => proxy.next_reply_to(&[call], Fate::Close),
                    Kind::CutReply(bytes) => proxy.next_reply_to(&["EVALSHA"], Fate::CloseAt(bytes)),
                    Kind::Stall => proxy.stall(),
                    _ => proxy.close_now(),
                }
                sleep(lasting).await;
                proxy.set(Way::Both, Flow::Pass);
                proxy.no_more_fates();
                proxy.deliver();
                // There may have been no such call meanwhile, or none at all.
                self.record(from, kind, Some(slot.number), proxy.touched() > touched);
            }
        }
    }

    fn record(&self, from: Nanos, kind: Kind, slot: Option<u64>, met: bool) {
        if kind.is_control() {
            return;
        }
        let fault = Fault { from, to: now(), kind: kind.name().into(), slot, met };
        self.records.faults.lock().unwrap().push(fault);
    }
}

/// Tells whether there was anything to do it to.
async fn act_on_server(server: &mut Server, kind: Kind, lasts: u64) -> bool {
    let lasting = sleep(Duration::from_millis(lasts));
    match kind {
        // An error is a kill, of the connection that asks.
        Kind::KillClients(which) => return ask(server, &["CLIENT", "KILL", "TYPE", which]) != Ok(0),
        Kind::PauseClients(what) => {
            let _ = ask(server, &["CLIENT", "PAUSE", &lasts.to_string(), what]);
            lasting.await;
        }
        Kind::FlushScripts => drop(ask(server, &["SCRIPT", "FLUSH"])),
        Kind::StopServer => {
            server.pause();
            lasting.await;
            server.resume();
        }
        Kind::RestartServer | Kind::ForgetData => {
            server.kill();
            lasting.await;
            tokio::task::block_in_place(|| server.restart());
        }
        Kind::DeleteKeys => {
            for lock in 0..BUSY_LOCKS {
                let _ = ask(server, &["DEL", &lock_name(lock)]);
            }
        }
        _ => {
            // Only where it is free: then it is nobody's loss.
            let foreign = "if redis.call('exists', KEYS[1]) == 1 then return 0 end \
                           redis.call('hset', KEYS[1], 'foreign:1', 1) return redis.call('pexpire', KEYS[1], 7000)";
            let lock = lock_name(BUSY_LOCKS);
            for _ in 0..200 {
                if ask(server, &["EVAL", foreign, "1", &lock]) == Ok(1) {
                    break;
                }
                sleep(Duration::from_millis(5)).await;
            }
            sleep(Duration::from_millis(lasts)).await;
            let _ = ask(server, &["DEL", &lock]);
        }
    }
    true
}

fn ask(server: &Server, words: &[&str]) -> redis::RedisResult<i64> {
    tokio::task::block_in_place(|| redis::Cmd::new().arg(words).query(&mut server.connection()))
}

/// Kills a worker that stands still should this process end meanwhile: it could not notice that by itself.
struct KilledWithUs(Child);

impl KilledWithUs {
    fn new(worker: &Worker) -> Self {
        let mut command = Command::new("sh");
        command.arg("-c").arg(r#"trap '' INT TERM HUP; read _; kill -KILL "$0""#).arg(worker.pid().to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().expect("sh starts"))
    }
}

impl Drop for KilledWithUs {
    fn drop(&mut self) {
        // An error means that it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_seed_determines_the_faults() {
    let planned = plan(7, 60, 6);
    assert_eq!(planned, plan(7, 60, 6));
    assert_ne!(planned, plan(8, 60, 6));
    assert!(planned.len() > 50, "{}", planned.len());
    for Planned { at, lasts, .. } in planned {
        assert!(at % (STORM + CALM) <= STORM && (at + lasts) % (STORM + CALM) <= STORM && at + lasts <= 55_000);
    }
}
