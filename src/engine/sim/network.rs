//! The network of each client: two connections, their delays and their faults.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use rand::Rng;

use super::super::{CallId, Subscription};
use super::world::{Event, World};
use crate::script::gather::{Answered, Gathered, gather};
use crate::time::Time;
use crate::wire::{Call, Failure, Reply};

/// A call that is in flight: of the engine, or several that are made together.
#[derive(Debug)]
pub(super) struct InFlight {
    calls: Vec<CallId>,
    sent: Time,
    timeout: (Time, u64),
}

/// The connections of a client.
#[derive(Debug, Default)]
pub(super) struct Link {
    /// Counts the connections for calls.
    pub(super) connection: u32,
    pub(super) is_up: bool,
    opened: Time,
    pub(super) is_closed: bool,
    pub(super) in_flight: Vec<InFlight>,
    /// Calls that are gathered.
    gathered: Vec<(CallId, Call)>,
    /// Calls that wait for a connection.
    waiting: Vec<(Gathered<CallId>, (Time, u64))>,
    /// Older connections than this run nothing any more.
    pub(super) fenced: u32,
    /// How many requests are on their way, those of old connections included.
    pub(super) requests: u32,
    pub(super) requests_cut: Time,
    pub(super) replies_cut: Time,
    last_request: Time,
    last_reply: Time,
    pub(super) messages: Messages,
}

/// The connection for messages.
#[derive(Debug, Default)]
pub(super) struct Messages {
    pub(super) generation: u32,
    is_up: bool,
    /// What the engine wants.
    pub(super) wanted: BTreeSet<Bytes>,
    changes: Vec<(Bytes, bool)>,
    /// What the server has confirmed to the client.
    subscribed: BTreeSet<Bytes>,
    refused: BTreeSet<Bytes>,
    /// A command that has no reply.
    is_busy: bool,
    /// What the server delivers to.
    pub(super) at_server: BTreeMap<Bytes, Time>,
    last: Time,
    /// How many are on their way.
    pub(super) pending: u32,
    /// When messages were lost last, and the client did not know.
    pub(super) trusted_since: Time,
    pub(super) refused_until: Time,
}

impl Link {
    pub(super) fn new() -> Self {
        Self {
            connection: 1,
            is_up: true,
            messages: Messages {
                is_up: true,
                ..Messages::default()
            },
            ..Self::default()
        }
    }
}

impl World {
    /// One delay of the network.
    pub(super) fn delay(&mut self) -> Duration {
        let latency = self.plan.latency;
        let mut delay = latency.mul_f64(self.rng.random_range(0.5..1.5));
        if self.faults_on && self.plan.has("slow call") && self.rng.random_bool(0.02) {
            delay += self
                .plan
                .command_timeout
                .mul_f64(self.rng.random_range(0.1..3.0));
            self.met("slow call");
        }
        delay
    }

    pub(super) fn submit(&mut self, client: usize, call: CallId, content: Call) {
        if !self.plan.gathers {
            return self.send(client, Gathered::alone(call, content));
        }
        let link = &mut self.clients[client].link;
        if link.gathered.is_empty() && !link.is_closed {
            // They wait for others, not for the network: 1 ms at the longest.
            let longest = self.plan.latency.min(Duration::from_millis(1));
            let pause = longest.mul_f64(self.rng.random_range(0.0..1.0));
            self.push(self.now + pause, Event::Send { client });
        }
        self.clients[client].link.gathered.push((call, content));
    }

    /// Sends what was gathered.
    pub(super) fn send_gathered(&mut self, client: usize) {
        /// Few, so that many calls are more than one.
        const MOST: usize = 4;
        let calls = std::mem::take(&mut self.clients[client].link.gathered);
        for gathered in gather(calls, MOST) {
            if gathered.ids().nth(1).is_some() {
                self.met("calls gathered");
            }
            self.send(client, gathered);
        }
    }

    fn send(&mut self, client: usize, gathered: Gathered<CallId>) {
        let now = self.now;
        let link = &self.clients[client].link;
        if link.is_closed {
            // Nothing is sent, and nothing replies.
        } else if link.is_up {
            self.transmit(client, gathered);
        } else {
            let limit = now + self.plan.command_timeout;
            let call = gathered.first();
            let key = self.push(limit, Event::NotSent { client, call });
            self.clients[client].link.waiting.push((gathered, key));
        }
    }

    fn transmit(&mut self, client: usize, mut gathered: Gathered<CallId>) {
        let now = self.now;
        let call = gathered.first();
        let calls = gathered.ids().copied().collect();
        let content = gathered.call();
        let delay = self.delay();
        let timeout = self.push(
            now + self.plan.command_timeout,
            Event::Timeout { client, call },
        );
        let is_fifo = self.plan.is_fifo;
        let link = &mut self.clients[client].link;
        link.in_flight.push(InFlight {
            calls,
            sent: now,
            timeout,
        });
        let connection = link.connection;
        let mut at = now + delay;
        if is_fifo {
            at = at.max(link.last_request);
            link.last_request = at;
        }
        if now < link.requests_cut {
            self.met("requests cut");
            return;
        }
        if self.chance("lost request", 0.02) {
            self.met("lost request");
            return;
        }
        self.clients[client].link.requests += 1;
        self.push(
            at,
            Event::Request {
                client,
                connection,
                gathered,
                content,
            },
        );
    }

    /// A call arrives at the server.
    pub(super) fn request_arrived(
        &mut self,
        client: usize,
        connection: u32,
        gathered: Gathered<CallId>,
        content: Call,
    ) {
        let now = self.now;
        if now < self.paused_until {
            self.met("server pauses");
            let at = self.paused_until;
            self.push(
                at,
                Event::Request {
                    client,
                    connection,
                    gathered,
                    content,
                },
            );
            return;
        }
        let link = &mut self.clients[client].link;
        link.requests -= 1;
        if connection < link.fenced {
            self.met("late copy fenced");
            return;
        }
        if connection < link.connection {
            self.met("late copy runs");
        }
        if !self.plan.is_unfenced {
            self.clients[client].link.fenced = connection;
        }
        let (outcome, run) = self.run_script(client, &content);
        let delay = self.delay();
        let is_fifo = self.plan.is_fifo;
        let link = &mut self.clients[client].link;
        let mut at = now + delay;
        if is_fifo {
            at = at.max(link.last_reply);
            link.last_reply = at;
        }
        if now < link.replies_cut {
            self.met("replies cut");
            return;
        }
        if self.chance("lost reply", 0.02) {
            self.met("lost reply");
            return;
        }
        self.push(
            at,
            Event::Reply {
                client,
                connection,
                gathered,
                outcome,
                run,
            },
        );
    }

    pub(super) fn reply_arrived(
        &mut self,
        client: usize,
        connection: u32,
        gathered: Gathered<CallId>,
        outcome: Result<Reply, Failure>,
        run: u64,
    ) {
        let link = &mut self.clients[client].link;
        if !link.is_up || link.connection != connection {
            return;
        }
        let call = gathered.first();
        let Some(at) = link
            .in_flight
            .iter()
            .position(|other| other.calls[0] == call)
        else {
            return;
        };
        let record = link.in_flight.remove(at);
        self.cancel_event(record.timeout);
        self.current_run = run;
        match gathered.answered(outcome) {
            Answered::Each(each) => self.input(client, |engine, now| {
                for (call, outcome) in each {
                    engine.handle_sending(call, record.sent);
                    engine.handle_reply(now, call, outcome);
                }
            }),
            Answered::Refused(calls) => {
                self.met("gathered calls refused");
                for (call, content) in calls {
                    self.transmit(client, Gathered::alone(call, content));
                }
            }
        }
        self.current_run = 0;
    }

    pub(super) fn call_timed_out(&mut self, client: usize, call: CallId) {
        let link = &self.clients[client].link;
        if link.in_flight.iter().any(|other| other.calls[0] == call) {
            self.replace_connection(client);
        }
    }

    /// The connection for calls is not trusted any more.
    pub(super) fn replace_connection(&mut self, client: usize) {
        let link = &mut self.clients[client].link;
        if !link.is_up || link.is_closed {
            return;
        }
        link.is_up = false;
        let lost = std::mem::take(&mut link.in_flight);
        if !lost.is_empty() {
            self.met("connection replaced");
        }
        for record in lost {
            self.cancel_event(record.timeout);
            self.input(client, |engine, now| {
                for call in record.calls {
                    let failure = Failure::Unknown("lost".to_owned());
                    engine.handle_reply(now, call, Err(failure));
                }
            });
        }
        let mut pause = self.delay() * 3;
        if self.chance("long outage", 0.1) {
            pause += self
                .plan
                .retry_timeout
                .mul_f64(self.rng.random_range(0.0..2.0));
            self.met("long outage");
        }
        let at = self.now + pause;
        self.push(at, Event::Connected { client });
    }

    pub(super) fn connected(&mut self, client: usize) {
        let now = self.now;
        let link = &mut self.clients[client].link;
        if link.is_closed || link.is_up {
            return;
        }
        link.is_up = true;
        link.connection += 1;
        link.opened = now;
        link.last_request = now;
        link.last_reply = now;
        for (gathered, key) in std::mem::take(&mut link.waiting) {
            self.cancel_event(key);
            self.transmit(client, gathered);
        }
    }

    pub(super) fn not_sent(&mut self, client: usize, call: CallId) {
        let link = &mut self.clients[client].link;
        let Some(at) = link
            .waiting
            .iter()
            .position(|(other, _)| other.first() == call)
        else {
            return;
        };
        let (gathered, _) = link.waiting.remove(at);
        self.met("not sent");
        self.input(client, |engine, now| {
            for call in gathered.ids() {
                let failure = Failure::NotSent("no connection".to_owned().into());
                engine.handle_reply(now, *call, Err(failure));
            }
        });
    }

    /// The engine found that the server is not the master.
    pub(super) fn leave_server(&mut self, client: usize) {
        let link = &self.clients[client].link;
        if link.is_up && self.now.since(link.opened) >= Duration::from_millis(500) {
            self.later_replacement(client);
            self.interrupt(client);
        }
    }

    fn later_replacement(&mut self, client: usize) {
        let at = self.now;
        self.push(at, Event::Replace { client });
    }

    pub(super) fn close_link(&mut self, client: usize) {
        let link = &mut self.clients[client].link;
        link.is_closed = true;
        link.is_up = false;
        link.messages.generation += 1;
        link.messages.at_server.clear();
        let in_flight = std::mem::take(&mut link.in_flight);
        let waiting = std::mem::take(&mut link.waiting);
        link.gathered.clear();
        for record in in_flight {
            self.cancel_event(record.timeout);
        }
        for (_, key) in waiting {
            self.cancel_event(key);
        }
    }

    pub(super) fn change_subscription(&mut self, client: usize, name: Bytes, is_wanted: bool) {
        self.clients[client]
            .link
            .messages
            .changes
            .push((name, is_wanted));
        let at = self.now;
        self.push(at, Event::Synchronize { client });
    }

    /// Makes and ends subscriptions as the driver does: one command after the other.
    pub(super) fn synchronize(&mut self, client: usize) {
        let is_closed = self.clients[client].link.is_closed;
        let messages = &mut self.clients[client].link.messages;
        if messages.is_busy || !messages.is_up || is_closed {
            return;
        }
        for (name, is_wanted) in std::mem::take(&mut messages.changes) {
            let messages = &mut self.clients[client].link.messages;
            if !is_wanted {
                messages.wanted.remove(&name);
                messages.refused.remove(&name);
                continue;
            }
            messages.wanted.insert(name.clone());
            if messages.subscribed.contains(&name) {
                self.input(client, |engine, now| {
                    engine.handle_subscription(now, &name, Subscription::Confirmed);
                });
            }
        }
        let messages = &mut self.clients[client].link.messages;
        let ending: Vec<_> = messages
            .subscribed
            .difference(&messages.wanted)
            .cloned()
            .collect();
        let making: Vec<_> = messages
            .wanted
            .iter()
            .filter(|name| {
                !messages.subscribed.contains(*name) && !messages.refused.contains(*name)
            })
            .cloned()
            .collect();
        let (names, is_end) = if ending.is_empty() {
            (making, false)
        } else {
            (ending, true)
        };
        if names.is_empty() {
            return;
        }
        messages.is_busy = true;
        let generation = messages.generation;
        let mut at = self.now + self.delay();
        if self.chance("late subscription", 0.1) {
            at = at
                + self
                    .plan
                    .command_timeout
                    .mul_f64(self.rng.random_range(0.0..1.0));
            self.met("late subscription");
        }
        self.push(
            at,
            Event::Subscribe {
                client,
                generation,
                names,
                is_end,
            },
        );
    }

    pub(super) fn subscribe_arrived(
        &mut self,
        client: usize,
        generation: u32,
        names: Vec<Bytes>,
        is_end: bool,
    ) {
        if generation != self.clients[client].link.messages.generation {
            return;
        }
        let now = self.now;
        let is_refused = !is_end && now < self.clients[client].link.messages.refused_until;
        let messages = &mut self.clients[client].link.messages;
        for name in &names {
            if is_end {
                messages.at_server.remove(name);
            } else if !is_refused {
                messages.at_server.insert(name.clone(), now);
            }
        }
        if is_refused {
            self.met("subscription refused");
        }
        let at = self.message_time(client);
        self.push(
            at,
            Event::Subscribed {
                client,
                generation,
                names,
                is_end,
                is_refused,
            },
        );
    }

    fn message_time(&mut self, client: usize) -> Time {
        let at = self.now + self.delay();
        let messages = &mut self.clients[client].link.messages;
        messages.last = messages.last.max(at);
        messages.last
    }

    pub(super) fn subscribed(
        &mut self,
        client: usize,
        generation: u32,
        names: Vec<Bytes>,
        is_end: bool,
        is_refused: bool,
    ) {
        let messages = &mut self.clients[client].link.messages;
        if generation != messages.generation {
            return;
        }
        messages.is_busy = false;
        for name in names {
            let messages = &mut self.clients[client].link.messages;
            if is_end {
                messages.subscribed.remove(&name);
                continue;
            }
            let outcome = if is_refused {
                messages.refused.insert(name.clone());
                Subscription::Refused { is_news: true }
            } else {
                messages.subscribed.insert(name.clone());
                Subscription::Confirmed
            };
            self.input(client, |engine, now| {
                engine.handle_subscription(now, &name, outcome);
            });
        }
        if is_refused {
            let at = self.now + Duration::from_secs(5);
            self.push(at, Event::SubscribeAgain { client });
        }
        self.synchronize(client);
    }

    pub(super) fn subscribe_again(&mut self, client: usize) {
        self.clients[client].link.messages.refused.clear();
        self.synchronize(client);
    }

    /// The server publishes on a channel.
    pub(super) fn publish(&mut self, channel: &Bytes) {
        for client in 0..self.clients.len() {
            if !self.clients[client]
                .link
                .messages
                .at_server
                .contains_key(channel)
            {
                continue;
            }
            let at = self.message_time(client);
            if self.chance("missed messages", 0.05) {
                self.met("missed messages");
                let pause = self.delay();
                let messages = &mut self.clients[client].link.messages;
                messages.trusted_since = Time::MAX;
                messages.pending += 1;
                let generation = messages.generation;
                self.push(at + pause, Event::Missed { client, generation });
                continue;
            }
            let messages = &mut self.clients[client].link.messages;
            messages.pending += 1;
            let (generation, channel) = (messages.generation, channel.clone());
            self.push(
                at,
                Event::Message {
                    client,
                    generation,
                    channel,
                },
            );
        }
    }

    pub(super) fn message_arrived(&mut self, client: usize, generation: u32, channel: &Bytes) {
        let messages = &mut self.clients[client].link.messages;
        if generation == messages.generation {
            messages.pending -= 1;
            self.input(client, |engine, now| engine.handle_message(now, channel));
        }
    }

    pub(super) fn messages_missed(&mut self, client: usize, generation: u32) {
        let now = self.now;
        let messages = &mut self.clients[client].link.messages;
        if generation == messages.generation {
            messages.pending -= 1;
            messages.trusted_since = now;
            self.input(client, |engine, now| engine.handle_missed_messages(now));
        }
    }

    /// The connection for messages is lost; the client sees it a little later.
    pub(super) fn interrupt(&mut self, client: usize) {
        let messages = &mut self.clients[client].link.messages;
        if !messages.is_up {
            return;
        }
        let met = messages.pending > 0 || !messages.at_server.is_empty();
        messages.generation += 1;
        messages.at_server.clear();
        messages.pending = 0;
        messages.trusted_since = Time::MAX;
        messages.is_up = false;
        messages.is_busy = false;
        if met {
            self.met("messages interrupted");
        }
        let at = self.now + self.delay();
        self.push(at, Event::Interrupted { client });
    }

    pub(super) fn interrupted(&mut self, client: usize) {
        if self.clients[client].link.is_closed {
            return;
        }
        self.input(client, |engine, now| engine.handle_interruption(now));
        let at = self.now + self.delay() * 2;
        self.push(at, Event::Reopened { client });
    }

    pub(super) fn reopened(&mut self, client: usize) {
        let now = self.now;
        let messages = &mut self.clients[client].link.messages;
        messages.is_up = true;
        messages.subscribed.clear();
        messages.refused.clear();
        messages.trusted_since = now;
        messages.last = now;
        self.synchronize(client);
    }
}
