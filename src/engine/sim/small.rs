//! Every schedule of a small world, to a bounded depth: two clients, two owners, one lock of any
//! kind.

use super::super::{RequestId, Wait};
use super::callers::Guard;
use super::world::{Event, Plan, World};
use crate::kind::Kind;
use crate::owner::Owner;
use crate::time::Time;
use std::collections::BTreeSet;
use std::time::Duration;

/// One thing that may happen next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice {
    /// An event of the network, by its place in the queue.
    Deliver((Time, u64)),
    /// The clock moves to the next timer.
    Tick((Time, u64)),
    /// The caller of a client does the next step of its program.
    Act(usize),
    /// The caller of a client gives up what it waits for.
    Cancel(usize),
    /// The connection of a client is replaced.
    Replace(usize),
}

/// What is gone through.
struct Small {
    kind: Kind,
    wait: [Wait; 2],
    has_cancel: bool,
    faults: u32,
    depth: usize,
}

/// What a caller has done: 0 nothing, 1 it acquires, 2 it released.
struct Progress {
    steps: [u32; 2],
    requests: [Option<RequestId>; 2],
    faults: u32,
}

impl Small {
    fn world(&self) -> World {
        let mut plan = Plan::of_seed(1);
        plan.allow(&[]);
        plan.clients = 2;
        plan.callers = 1;
        plan.locks = usize::from(self.kind != Kind::Simple);
        plan.simple = 1 - plan.locks;
        plan.foreign = 0;
        plan.programs = 0;
        plan.fenced = f64::from(u8::from(self.kind == Kind::Fenced));
        plan.server_rate = 1.0;
        plan.watchdog = Duration::from_secs(3);
        plan.command_timeout = Duration::from_secs(1);
        plan.retry_timeout = Duration::from_secs(2);
        plan.recheck = None;
        plan.latency = Duration::from_millis(1);
        plan.is_fifo = true;
        plan.gathers = false;
        plan.passing_time = Duration::from_secs(1);
        plan.think = Duration::ZERO;
        plan.is_adopted = false;
        plan.is_unfenced = false;
        plan.is_timed = false;
        World::new(1, plan, false)
    }

    /// What may happen next. Events of one direction of a connection keep their order.
    fn choices(&self, world: &World, progress: &Progress) -> Vec<Choice> {
        let mut choices = Vec::new();
        let mut streams = BTreeSet::new();
        let mut timer = None;
        for (key, event) in &world.queue {
            let stream = match event {
                Event::Request { client, .. } => (0, *client),
                Event::Reply { client, .. } => (1, *client),
                Event::Synchronize { client } | Event::Subscribe { client, .. } => (2, *client),
                Event::Message { client, .. } | Event::Subscribed { client, .. } => (3, *client),
                Event::Connected { client } | Event::Poll { client, .. } => (4, *client),
                Event::Alarm { .. } | Event::Timeout { .. } | Event::NotSent { .. } => {
                    timer.get_or_insert(*key);
                    continue;
                }
                // The callers are driven by choices.
                _ => continue,
            };
            if streams.insert(stream) {
                choices.push(Choice::Deliver(*key));
            }
        }
        for client in 0..2 {
            let has_guard = !world.clients[client].callers[0].guards.is_empty();
            match progress.steps[client] {
                0 => choices.push(Choice::Act(client)),
                1 if has_guard => choices.push(Choice::Act(client)),
                1 if self.has_cancel && world.clients[client].callers[0].waiting.is_some() => {
                    choices.push(Choice::Cancel(client));
                }
                _ => {}
            }
            if progress.faults < self.faults && world.clients[client].link.is_up {
                choices.push(Choice::Replace(client));
            }
        }
        if let Some(key) = timer {
            choices.push(Choice::Tick(key));
        }
        choices
    }

    fn perform(&self, world: &mut World, progress: &mut Progress, choice: Choice) {
        match choice {
            Choice::Deliver(key) => {
                let event = world.queue.remove(&key).unwrap();
                world.take(event);
            }
            Choice::Tick(key) => {
                let event = world.queue.remove(&key).unwrap();
                world.now = world.now.max(key.0);
                world.take(event);
            }
            Choice::Act(client) => {
                progress.steps[client] += 1;
                if progress.steps[client] == 1 {
                    let owner = Owner::numbered(client as i64 + 1);
                    let wait = self.wait[client];
                    let request = world.acquire(client, 0, 0, owner, None, wait);
                    progress.requests[client] = Some(request);
                } else {
                    let guard: Guard = world.clients[client].callers[0].guards.remove(0);
                    world.drop_guard(client, &guard);
                }
                world.check();
            }
            Choice::Cancel(client) => {
                progress.steps[client] = 2;
                let request = progress.requests[client].take().unwrap();
                world.cancel_request(client, request);
                world.check();
            }
            Choice::Replace(client) => {
                progress.faults += 1;
                world.take(Event::Replace { client });
            }
        }
    }

    /// Goes through every schedule, depth first. Each begins anew: an engine has no copy.
    fn explore(&self) -> u64 {
        let mut path: Vec<(usize, usize)> = Vec::new();
        let mut schedules = 0;
        loop {
            let mut world = self.world();
            let mut progress = Progress {
                steps: [0; 2],
                requests: [None; 2],
                faults: 0,
            };
            let mut at = 0;
            while at < self.depth {
                let choices = self.choices(&world, &progress);
                if choices.is_empty() {
                    break;
                }
                if at == path.len() {
                    path.push((0, choices.len()));
                }
                let choice = choices[path[at].0];
                self.perform(&mut world, &mut progress, choice);
                at += 1;
            }
            path.truncate(at);
            schedules += 1;
            assert!(
                world.violation.is_none(),
                "{:?} after {path:?}",
                world.violation
            );
            // Whatever came before, the world comes to rest without faults.
            world.actions_left = 0;
            world.run();
            assert!(
                world.violation.is_none(),
                "{:?} after {path:?}, then in order",
                world.violation
            );
            while let Some((choice, of)) = path.pop() {
                if choice + 1 < of {
                    path.push((choice + 1, of));
                    break;
                }
            }
            if path.is_empty() {
                return schedules;
            }
        }
    }
}

fn explore(name: &str, small: &Small) {
    let schedules = small.explore();
    println!(
        "sim: {schedules:>7} schedules, all to depth {}: {name}",
        small.depth
    );
}

/// How much deeper `make sim` goes than `make test`.
fn deeper() -> usize {
    super::setting("SIM_DEEPER").map_or(0, |more| more as usize)
}

#[test]
fn two_waiters_without_faults() {
    let small = Small {
        kind: Kind::Reentrant,
        wait: [Wait::Unlimited; 2],
        has_cancel: false,
        faults: 0,
        depth: 7 + deeper(),
    };
    explore("two that wait", &small);
}

#[test]
fn waiter_that_is_cancelled() {
    let small = Small {
        kind: Kind::Reentrant,
        wait: [Wait::Unlimited; 2],
        has_cancel: true,
        faults: 0,
        depth: 6 + deeper(),
    };
    explore("two that wait, cancelled anywhere", &small);
}

#[test]
fn one_connection_is_replaced() {
    let small = Small {
        kind: Kind::Reentrant,
        wait: [Wait::Unlimited, Wait::AtMost(Duration::ZERO)],
        has_cancel: false,
        faults: 1,
        depth: 5 + deeper(),
    };
    explore(
        "one waits, one tries, a connection replaced anywhere",
        &small,
    );
}

#[test]
fn fenced_waiter_that_is_cancelled() {
    let small = Small {
        kind: Kind::Fenced,
        wait: [Wait::Unlimited; 2],
        has_cancel: true,
        faults: 0,
        depth: 6 + deeper().min(1),
    };
    explore("a fenced lock, two that wait, cancelled anywhere", &small);
}

#[test]
fn connection_of_fenced_owner_is_replaced() {
    let small = Small {
        kind: Kind::Fenced,
        wait: [Wait::Unlimited, Wait::AtMost(Duration::ZERO)],
        has_cancel: false,
        faults: 1,
        depth: 5 + deeper().min(1),
    };
    explore(
        "a fenced lock, one waits, one tries, a connection replaced anywhere",
        &small,
    );
}

#[test]
fn simple_waiter_that_is_cancelled() {
    let small = Small {
        kind: Kind::Simple,
        wait: [Wait::Unlimited; 2],
        has_cancel: true,
        faults: 0,
        depth: 6 + deeper().min(1),
    };
    explore("a simple lock, two that wait, cancelled anywhere", &small);
}

#[test]
fn connection_of_simple_owner_is_replaced() {
    let small = Small {
        kind: Kind::Simple,
        wait: [Wait::Unlimited, Wait::AtMost(Duration::ZERO)],
        has_cancel: false,
        faults: 1,
        depth: 5 + deeper().min(1),
    };
    explore(
        "a simple lock, one waits, one tries, a connection replaced anywhere",
        &small,
    );
}
