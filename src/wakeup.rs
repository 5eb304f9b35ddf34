//! Wake-ups: who waits in this process for which lock, in which order, and the channels that this needs.
//!
//! The waiters of one lock stand in a queue, the lane. Only the one in front tries: it has the baton.
//! A lane counts the reasons to try (`wakes`) and remembers how far that count was when it last tried
//! (`tried`). Both belong to the lane, not to a waiter, so a waiter that goes away takes no wake-up with it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use crate::link::{Event, PubSub, Subscribed};
use crate::locks::Ident;

/// All lanes of a client.
pub(crate) struct Wakeups {
    table: Mutex<Table>,
    /// Channels whose subscription may have to change.
    changes: mpsc::UnboundedSender<Bytes>,
}

#[derive(Default)]
struct Table {
    channels: HashMap<Bytes, Channel>,
    closed: bool,
}

#[derive(Default)]
struct Channel {
    subscription: Subscription,
    /// By lock name: names in and without braces share a channel.
    lanes: HashMap<Bytes, Lane>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Subscription {
    /// Nobody has had to sleep yet.
    #[default]
    NotAsked,
    Asked,
    Confirmed,
}

/// The waiters of one lock in this process.
struct Lane {
    queue: VecDeque<Arc<Waiter>>,
    wakes: u64,
    tried: u64,
    /// When the one in front tries again without a reason.
    recheck_at: Instant,
}

struct Waiter {
    thread: i64,
    notify: Notify,
}

/// What a waiter does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Try now.
    Try,
    /// Sleep until notified, or until then.
    Sleep(Option<Instant>),
    /// The client is shut down.
    Closed,
}

impl Wakeups {
    pub(crate) fn new() -> (Arc<Self>, mpsc::UnboundedReceiver<Bytes>) {
        let (changes, changed) = mpsc::unbounded_channel();
        (Arc::new(Self { table: Mutex::default(), changes }), changed)
    }

    /// Puts a waiter at the end of the lock's lane.
    pub(crate) fn join(self: &Arc<Self>, ident: &Arc<Ident>) -> Place {
        let waiter = Arc::new(Waiter { thread: ident.holder.thread_id(), notify: Notify::new() });
        let mut table = self.table.lock();
        let channel = table.channels.entry(ident.keys.channel.clone()).or_default();
        let lane = channel.lanes.entry(ident.keys.name.clone()).or_insert_with(Lane::new);
        lane.queue.push_back(Arc::clone(&waiter));
        drop(table);
        Place { wakeups: Arc::clone(self), ident: Arc::clone(ident), waiter }
    }

    /// Takes in what the listening connection tells.
    pub(crate) fn event(&self, event: Event<'_>) {
        let mut table = self.table.lock();
        match event {
            Event::Message(name) => {
                if let Some(channel) = table.channels.get_mut(name.as_bytes()) {
                    channel.wake();
                }
            }
            Event::Missed => table.channels.values_mut().for_each(Channel::wake),
            Event::Interrupted => {
                for (name, channel) in &mut table.channels {
                    if channel.subscription == Subscription::Confirmed {
                        channel.subscription = Subscription::Asked;
                    }
                    let _ = self.changes.send(name.clone());
                    channel.wake();
                }
            }
        }
    }

    /// Wakes the waiters of a holder that has just been granted the lock: they re-enter.
    pub(crate) fn holder_granted(&self, ident: &Ident) {
        let table = self.table.lock();
        let lane = table.channels.get(&ident.keys.channel).and_then(|channel| channel.lanes.get(&ident.keys.name));
        for waiter in lane.iter().flat_map(|lane| &lane.queue) {
            if waiter.thread == ident.holder.thread_id() {
                waiter.notify.notify_one();
            }
        }
    }

    /// Ends all waiting.
    pub(crate) fn close(&self) {
        let mut table = self.table.lock();
        table.closed = true;
        for lane in table.channels.values().flat_map(|channel| channel.lanes.values()) {
            lane.queue.iter().for_each(|waiter| waiter.notify.notify_one());
        }
    }

    /// How many channels are wanted, for the test that none is left behind.
    #[cfg(test)]
    fn channels(&self) -> usize {
        self.table.lock().channels.len()
    }

    fn wants(&self, name: &Bytes) -> bool {
        let table = self.table.lock();
        table.channels.get(name).is_some_and(|channel| channel.subscription != Subscription::NotAsked)
    }

    /// Takes in the server's answer to a subscription, which is a reason to try again.
    fn answered(&self, name: &Bytes, answer: Subscribed) {
        if let Some(channel) = self.table.lock().channels.get_mut(name) {
            if answer == Subscribed::Yes {
                channel.subscription = Subscription::Confirmed;
                channel.wake();
            }
        }
    }
}

/// Keeps the subscriptions as the lanes need them: a channel is subscribed while somebody waits, and not longer.
///
/// One operation at a time, in the order of `changed`; each looks at what is wanted *now*.
pub(crate) async fn reconcile(
    wakeups: Arc<Wakeups>,
    mut changed: mpsc::UnboundedReceiver<Bytes>,
    mut pubsub: PubSub,
    check_every: Duration,
    stop: impl Future<Output = ()>,
) {
    const RETRY: Duration = Duration::from_millis(100);
    let mut stop = std::pin::pin!(stop);
    let mut refused = Refusals::default();
    loop {
        let name = tokio::select! {
            biased;
            () = &mut stop => break,
            name = changed.recv() => name,
            () = tokio::time::sleep(check_every) => {
                pubsub.check().await;
                continue;
            }
        };
        let Some(name) = name else { break };
        if !wakeups.wants(&name) {
            pubsub.unsubscribe(&name).await;
            continue;
        }
        let answer = tokio::select! {
            biased;
            () = &mut stop => break,
            answer = pubsub.subscribe(&name) => answer,
        };
        wakeups.answered(&name, answer);
        match answer {
            Subscribed::Yes => {}
            // Waiters go on by re-checks, so this is slow, not wrong.
            Subscribed::Refused => refused.tell(&name),
            Subscribed::Unknown => {
                let again = wakeups.changes.clone();
                tokio::select! {
                    biased;
                    () = &mut stop => break,
                    () = tokio::time::sleep(RETRY) => {}
                }
                let _ = again.send(name);
            }
        }
    }
    pubsub.close().await;
}

/// Tells of a refused subscription, but not for every waiter.
#[derive(Default)]
struct Refusals {
    told: Option<Instant>,
}

impl Refusals {
    fn tell(&mut self, name: &Bytes) {
        const QUIET: Duration = Duration::from_secs(60);
        if self.told.is_none_or(|told| told.elapsed() > QUIET) {
            self.told = Some(Instant::now());
            let channel = String::from_utf8_lossy(name);
            tracing::warn!(%channel, "the server refuses the subscription (ACL?): waiters go on by re-checks alone");
        }
    }
}

impl Channel {
    fn wake(&mut self) {
        self.lanes.values_mut().for_each(Lane::wake);
    }
}

impl Lane {
    fn new() -> Self {
        // The first of a lane has a reason to try: nobody has yet.
        Self { queue: VecDeque::new(), wakes: 1, tried: 0, recheck_at: Instant::now() }
    }

    /// One more reason to try.
    fn wake(&mut self) {
        self.wakes += 1;
        self.pass_baton();
    }

    fn pass_baton(&self) {
        if let Some(front) = self.queue.front() {
            front.notify.notify_one();
        }
    }
}

/// A waiter's place in a lane. Dropping it leaves the lane and passes the baton on.
pub(crate) struct Place {
    wakeups: Arc<Wakeups>,
    ident: Arc<Ident>,
    waiter: Arc<Waiter>,
}

impl Place {
    /// Whether to try now. The answer `Try` takes in all reasons so far: a later one is a new reason.
    ///
    /// Who is to sleep in front of the lane has the channel subscribed; the confirmation is a reason to try.
    pub(crate) fn turn(&self, recheck: Duration) -> Turn {
        let mut table = self.wakeups.table.lock();
        if table.closed {
            return Turn::Closed;
        }
        let Some(channel) = table.channels.get_mut(&self.ident.keys.channel) else {
            return Turn::Sleep(None);
        };
        let Some(lane) = channel.lanes.get_mut(&self.ident.keys.name) else {
            return Turn::Sleep(None);
        };
        if !lane.queue.front().is_some_and(|front| Arc::ptr_eq(front, &self.waiter)) {
            return Turn::Sleep(None);
        }
        let now = Instant::now();
        if lane.wakes != lane.tried || now >= lane.recheck_at {
            lane.tried = lane.wakes;
            lane.recheck_at = now + recheck;
            return Turn::Try;
        }
        if channel.subscription == Subscription::NotAsked {
            channel.subscription = Subscription::Asked;
            let _ = self.wakeups.changes.send(self.ident.keys.channel.clone());
        }
        Turn::Sleep(Some(lane.recheck_at))
    }

    /// Brings the next try forward: the holder's lease is over by then.
    pub(crate) fn try_again_by(&self, at: Instant) {
        let mut table = self.wakeups.table.lock();
        let lane = table
            .channels
            .get_mut(&self.ident.keys.channel)
            .and_then(|channel| channel.lanes.get_mut(&self.ident.keys.name));
        if let Some(lane) = lane {
            lane.recheck_at = lane.recheck_at.min(at);
        }
    }

    /// Resolves when [`Place::turn`] may answer differently.
    pub(crate) async fn notified(&self) {
        self.waiter.notify.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut guard = self.wakeups.table.lock();
        let table = &mut *guard;
        let Some(channel) = table.channels.get_mut(&self.ident.keys.channel) else { return };
        let Some(lane) = channel.lanes.get_mut(&self.ident.keys.name) else { return };
        let Some(at) = lane.queue.iter().position(|waiter| Arc::ptr_eq(waiter, &self.waiter)) else { return };
        lane.queue.remove(at);
        if at == 0 {
            lane.pass_baton();
        }
        if lane.queue.is_empty() {
            channel.lanes.remove(&self.ident.keys.name);
        }
        if channel.lanes.is_empty() {
            let asked = channel.subscription != Subscription::NotAsked;
            table.channels.remove(&self.ident.keys.channel);
            if asked {
                let _ = self.wakeups.changes.send(self.ident.keys.channel.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::holder::{ClientId, Holder};
    use crate::keys::Keys;

    const RECHECK: Duration = Duration::from_secs(60);

    fn ident(holder: Holder) -> Arc<Ident> {
        Arc::new(Ident::new(Keys::reentrant("stock").unwrap(), ClientId::random(), holder))
    }

    fn wakeups() -> (Arc<Wakeups>, mpsc::UnboundedReceiver<Bytes>) {
        Wakeups::new()
    }

    fn sleeps(place: &Place) -> bool {
        matches!(place.turn(RECHECK), Turn::Sleep(_))
    }

    #[tokio::test]
    async fn only_the_one_in_front_tries() {
        let (wakeups, _changes) = wakeups();
        let (first, second) = (wakeups.join(&ident(Holder::new())), wakeups.join(&ident(Holder::new())));
        assert!(sleeps(&second));
        assert_eq!(first.turn(RECHECK), Turn::Try);
        assert!(sleeps(&first));
        wakeups.event(Event::Message("redisson_lock__channel:{stock}"));
        assert!(sleeps(&second));
        assert_eq!(first.turn(RECHECK), Turn::Try);
    }

    #[tokio::test]
    async fn a_waiter_that_leaves_takes_no_wakeup_with_it() {
        let (wakeups, _changes) = wakeups();
        let (first, second) = (wakeups.join(&ident(Holder::new())), wakeups.join(&ident(Holder::new())));
        assert_eq!(first.turn(RECHECK), Turn::Try);
        wakeups.event(Event::Message("redisson_lock__channel:{stock}"));
        drop(first);
        second.notified().await;
        assert_eq!(second.turn(RECHECK), Turn::Try);
    }

    #[tokio::test]
    async fn a_wakeup_during_a_try_is_a_reason_for_another() {
        let (wakeups, _changes) = wakeups();
        let place = wakeups.join(&ident(Holder::new()));
        assert_eq!(place.turn(RECHECK), Turn::Try);
        wakeups.event(Event::Message("redisson_lock__channel:{stock}"));
        assert_eq!(place.turn(RECHECK), Turn::Try);
        assert!(sleeps(&place));
    }

    #[tokio::test]
    async fn the_channel_is_wanted_while_somebody_sleeps_and_not_longer() {
        let (wakeups, mut changes) = wakeups();
        let channel = Bytes::from_static(b"redisson_lock__channel:{stock}");
        let place = wakeups.join(&ident(Holder::new()));
        assert_eq!(place.turn(RECHECK), Turn::Try);
        assert!(!wakeups.wants(&channel), "nobody sleeps yet");
        assert!(sleeps(&place));
        assert!(wakeups.wants(&channel));
        assert_eq!(changes.try_recv(), Ok(channel.clone()));
        wakeups.answered(&channel, Subscribed::Yes);
        assert_eq!(place.turn(RECHECK), Turn::Try, "a message may have been missed before the confirmation");
        drop(place);
        assert!(!wakeups.wants(&channel));
        assert_eq!(changes.try_recv(), Ok(channel));
        assert_eq!(wakeups.channels(), 0);
    }

    #[tokio::test]
    async fn a_lost_connection_wakes_everybody_and_asks_again() {
        let (wakeups, mut changes) = wakeups();
        let channel = Bytes::from_static(b"redisson_lock__channel:{stock}");
        let place = wakeups.join(&ident(Holder::new()));
        assert_eq!(place.turn(RECHECK), Turn::Try);
        assert!(sleeps(&place));
        wakeups.answered(&channel, Subscribed::Yes);
        assert_eq!(place.turn(RECHECK), Turn::Try);
        changes.try_recv().unwrap();
        wakeups.event(Event::Interrupted);
        assert_eq!(changes.try_recv(), Ok(channel));
        assert_eq!(place.turn(RECHECK), Turn::Try);
        wakeups.event(Event::Missed);
        assert_eq!(place.turn(RECHECK), Turn::Try);
    }

    #[tokio::test]
    async fn waiters_of_one_holder_hear_that_it_was_granted() {
        let (wakeups, _changes) = wakeups();
        let ident = ident(Holder::new());
        let (_first, second) = (wakeups.join(&ident), wakeups.join(&ident));
        wakeups.holder_granted(&ident);
        second.notified().await;
    }
}
