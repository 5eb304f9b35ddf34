//! The implementation of each fault.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tokio::time::sleep;

use super::history::{Fault, Nanos, now, process_of};
use super::plan::{Kind, Planned};
use super::run::Records;
use super::server_faults;
use super::support::process::Worker;
use super::support::proxy::{Fate, Flow, Proxy, Way};
use super::support::server::Server;

/// What the faults act on.
pub struct Targets {
    pub server: tokio::sync::Mutex<Server>,
    pub slots: Vec<Slot>,
    pub records: Records,
}

/// A worker with its way to the server.
pub struct Slot {
    pub number: u64,
    pub proxy: Proxy,
    /// Locked by a fault that changes how bytes travel, for as long as it lasts.
    pub flow: tokio::sync::Mutex<()>,
    pub worker: tokio::sync::Mutex<Incarnation>,
    /// Starts the process of that number.
    pub start: Box<dyn Fn(u64) -> Worker + Send + Sync>,
}

/// A slot's process.
pub struct Incarnation {
    /// The number of processes before it in its slot.
    pub number: u64,
    /// `None` only if the start of another one failed.
    pub worker: Option<Worker>,
}

impl Targets {
    /// Carries out a planned fault, and records it.
    pub async fn act(&self, planned: Planned) {
        let Planned {
            lasts,
            kind,
            slot: index,
            ..
        } = planned;
        if kind.is_servers() {
            let mut server = self.server.lock().await;
            let from = now();
            let met = server_faults::act(&mut server, &self.slots, planned).await;
            let slot = matches!(kind, Kind::TakeRight(..)).then(|| self.slots[index].number);
            self.record(from, kind, slot, met);
            return;
        }
        let slot = &self.slots[index];
        let lasting = Duration::from_millis(lasts);
        match kind {
            Kind::StopWorker => {
                let incarnation = slot.worker.lock().await;
                let Some(worker) = &incarnation.worker else {
                    return;
                };
                let from = now();
                let _guard = KilledOnExit::new(worker);
                worker.pause();
                sleep(lasting).await;
                worker.resume();
                self.record(from, kind, Some(slot.number), true);
            }
            Kind::KillWorker => {
                let mut incarnation = slot.worker.lock().await;
                let Some(worker) = incarnation.worker.take() else {
                    return;
                };
                let from = now();
                worker.kill();
                self.records
                    .killed
                    .lock()
                    .unwrap()
                    .push((process_of(slot.number, incarnation.number), now()));
                incarnation.number += 1;
                incarnation.worker =
                    Some((slot.start)(process_of(slot.number, incarnation.number)));
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
                    Kind::CutReply(bytes) => {
                        proxy.next_reply_to(&["EVALSHA"], Fate::CloseAt(bytes))
                    }
                    Kind::Stall => proxy.stall(),
                    _ => proxy.close_now(),
                }
                sleep(lasting).await;
                proxy.set(Way::Both, Flow::Pass);
                proxy.no_more_fates();
                proxy.deliver();
                // There may have been no such call in this time, or no call at all.
                self.record(from, kind, Some(slot.number), proxy.touched() > touched);
            }
        }
    }

    fn record(&self, from: Nanos, kind: Kind, slot: Option<u64>, met: bool) {
        if kind.is_control() {
            return;
        }
        let fault = Fault {
            from,
            to: now(),
            kind: kind.name().into(),
            slot,
            met,
        };
        self.records.faults.lock().unwrap().push(fault);
    }
}

/// Kills a stopped worker if this process ends: a stopped process cannot notice that by itself.
struct KilledOnExit(Child);

impl KilledOnExit {
    fn new(worker: &Worker) -> Self {
        let mut command = Command::new("sh");
        command
            .arg("-c")
            .arg(r#"trap '' INT TERM HUP; read _; kill -KILL "$0""#)
            .arg(worker.pid().to_string());
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Self(command.spawn().expect("sh starts"))
    }
}

impl Drop for KilledOnExit {
    fn drop(&mut self) {
        // An error means that it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
