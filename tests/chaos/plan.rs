//! The schedule of a run's faults, which the seed and the seconds determine.
//!
//! None of them may break exclusion. While the server is stopped, or down until it comes back with
//! its data, leases end as usual, and owners notice that by their own clocks. A call on an
//! abandoned connection may arrive late, so the client first has the server close that connection.
//! The leases of a process that is killed, or that may not run scripts, stay until they end. A
//! server that is busy or out of memory refuses calls.
//!
//! The [controls](Kind::is_control) break exclusion or wake-ups. They show that the judge finds it.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::history::{NO_CHANNEL, NO_PUBLISH, NO_SCRIPTS, STOPPED};

/// How long each period with faults lasts, and the period without faults after it, in which unknown
/// outcomes have to be settled and waiters to be woken.
const FAULT_TIME: u64 = 10_000;
const QUIET_TIME: u64 = 5_000;

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
    /// A script that does not end by itself.
    Busy,
    /// `maxmemory` is reached.
    FullMemory,
    /// A worker's user loses some rights for a while: the name of the fault, and the ACL rules.
    TakeRight(&'static str, &'static [&'static str]),
    StopWorker,
    KillWorker,
    /// A control: the server comes back without its data.
    ForgetData,
    /// A control: the keys are deleted.
    DeleteKeys,
    /// A control: a lock of an unknown client is deleted without a message.
    FreeWithoutMessage,
}

/// A planned fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planned {
    /// Milliseconds after the beginning.
    pub at: u64,
    pub lasts: u64,
    pub kind: Kind,
    /// The affected worker, unless it is a fault of the server.
    pub slot: usize,
}

impl Kind {
    /// Its name in histories and tables.
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
            Kind::Busy => "busy script",
            Kind::FullMemory => "memory full",
            Kind::TakeRight(name, _) => name,
            // The judge recognises the faults of workers by the first word of their names.
            Kind::StopWorker => STOPPED,
            Kind::KillWorker => "worker killed, replaced",
            Kind::ForgetData => "server lost its data",
            Kind::DeleteKeys => "keys deleted",
            Kind::FreeWithoutMessage => "freed without a message",
        }
    }

    /// Whether it is a fault of the server, of which there is one at a time.
    pub fn is_servers(self) -> bool {
        use Kind::*;
        matches!(
            self,
            KillClients(_)
                | PauseClients(_)
                | FlushScripts
                | StopServer
                | RestartServer
                | Busy
                | FullMemory
        ) || matches!(self, TakeRight(..))
            || self.is_control()
    }

    /// Whether the judge has to find a violation after it. Such a fault is not recorded.
    pub fn is_control(self) -> bool {
        matches!(
            self,
            Kind::ForgetData | Kind::DeleteKeys | Kind::FreeWithoutMessage
        )
    }
}

/// The faults of a run of that many seconds.
pub fn plan(seed: u64, seconds: u64, slots: usize) -> Vec<Planned> {
    let mut random = StdRng::seed_from_u64(seed);
    let last = (seconds * 1_000).saturating_sub(QUIET_TIME);
    let mut planned = Vec::new();
    let mut at = 300;
    loop {
        at += random.random_range(50..500);
        if at % (FAULT_TIME + QUIET_TIME) > FAULT_TIME {
            at = (at / (FAULT_TIME + QUIET_TIME) + 1) * (FAULT_TIME + QUIET_TIME);
        }
        if at >= last {
            return planned;
        }
        let (kind, longest) = any(&mut random);
        // Half of them are shorter than a lease. Many of the others are longer than a call's
        // timeout.
        let longest = if random.random_bool(0.5) {
            longest / 4
        } else {
            longest
        };
        let over =
            (at / (FAULT_TIME + QUIET_TIME) * (FAULT_TIME + QUIET_TIME) + FAULT_TIME).min(last);
        let lasts = random.random_range(longest / 20..=longest).min(over - at);
        planned.push(Planned {
            at,
            lasts,
            kind,
            slot: random.random_range(0..slots),
        });
    }
}

/// A fault, and how long it lasts at most.
fn any(random: &mut StdRng) -> (Kind, u64) {
    let call = [
        "EVALSHA",
        "EVALSHA",
        "EVALSHA",
        "PING",
        "CLIENT",
        "SUBSCRIBE",
    ][random.random_range(0..6)];
    let rights: [(_, &[_]); 4] = [
        (NO_CHANNEL, &["resetchannels"]),
        (NO_PUBLISH, &["-publish"]),
        (NO_SCRIPTS, &["-evalsha", "-eval"]),
        ("SCRIPT LOAD refused (ACL)", &["-script"]),
    ];
    let (right, words) = rights[random.random_range(0..rights.len())];
    match random.random_range(0..115) {
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
        94..98 => (Kind::Busy, 1_500),
        98..102 => (Kind::FullMemory, 2_000),
        102..109 => (Kind::TakeRight(right, words), 2_000),
        _ => (Kind::KillWorker, 0),
    }
}

#[test]
fn plan_with_the_same_seed_is_the_same() {
    let planned = plan(7, 60, 6);
    assert_eq!(planned, plan(7, 60, 6));
    assert_ne!(planned, plan(8, 60, 6));
    assert!(planned.len() > 50, "{}", planned.len());
    for Planned { at, lasts, .. } in planned {
        assert!(
            at % (FAULT_TIME + QUIET_TIME) <= FAULT_TIME
                && (at + lasts) % (FAULT_TIME + QUIET_TIME) <= FAULT_TIME
                && at + lasts <= 55_000
        );
    }
}
