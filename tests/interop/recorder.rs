//! The comparison byte for byte: one sequence of calls is made with Redisson on one empty server
//! and with this library on another. After each call all keys, published messages and subscribed
//! channels are recorded, and the two records are compared.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::StreamExt;
use redis::aio::PubSubStream;

use crate::fixture::{Direction, Failed, Fixture, LONG, Observer, ensure, locking, rust_client};
use crate::party::Party;
use crate::scenarios::{Note, Outcome};
use crate::support::java::Options;
use crate::support::server::Server;

/// How much expiries may differ. The leases in the sequence differ by 15 s; a step on a busy
/// machine takes less than this.
const TOLERANCE_MS: i64 = 6_000;

/// The prefix of a key that Redisson creates at an unlock; see [`Note::UnlockLatch`].
const UNLOCK_LATCH: &[u8] = b"redisson_unlock_latch:";

/// The channel of the recorder's own messages, which separate the steps.
const SEPARATOR: &str = "recorder:separator";

/// The state of the server after one call.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub call: &'static str,
    allowed: AllowedDifference,
    pub keys: BTreeMap<Vec<u8>, KeyState>,
    /// Channel and payload, in order.
    pub published: Vec<(Vec<u8>, Vec<u8>)>,
    /// The subscribed channels.
    pub subscribed: Vec<Vec<u8>>,
}

/// A difference between the two sides that is allowed after a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AllowedDifference {
    None,
    /// A release left holds: this library keeps what they are entitled to.
    LongerExpiryInRust,
    /// A free lock was unlocked: Redisson before 3.10.6 publishes a release nevertheless.
    MessageInJava,
}

/// One key: its type, its content, its expiry.
#[derive(Clone, Debug)]
pub struct KeyState {
    pub kind: String,
    /// Field and value; for other types than a hash, the value alone.
    pub content: Vec<(Vec<u8>, Vec<u8>)>,
    pub pttl: i64,
}

/// The scenario.
pub async fn byte_for_byte(fixture: &Fixture, _: Direction) -> Outcome {
    let servers = [Server::start(), Server::start()];
    let java = fixture
        .peer
        .client("recorded", &servers[0].url(), Options::default())
        .await?;
    let java = [java.thread("a"), java.thread("b")].map(Party::Java);
    let rust = rust_client(&servers[1].url(), |builder| builder).await;
    let rust = [Party::of(&rust), Party::of(&rust)];
    let (java, rust) = tokio::join!(record(&servers[0], java), record(&servers[1], rust));
    let (java, rust) = (java?, rust?);
    let mut notes = Vec::new();
    ensure!(java.len() == rust.len(), "the records differ in length");
    for (java, rust) in java.iter().zip(&rust) {
        notes.extend(compare(java, rust)?);
    }
    *fixture.record.lock().unwrap() = rust;
    Ok(notes)
}

/// Makes the sequence of calls, by two threads of one client, and records the state after each.
async fn record(server: &Server, [a, b]: [Party; 2]) -> Result<Vec<Snapshot>, Failed> {
    let seconds = Duration::from_secs;
    let name = "recorded";
    let mut recorder = Recorder::open(
        server,
        &[
            ("CLIENT:A", a.owner().await?),
            ("CLIENT:B", b.owner().await?),
        ],
    )
    .await?;

    recorder.snapshot("nothing yet").await?;
    a.lock(name).await?;
    recorder.snapshot("A: lock()").await?;
    a.lock_with_lease(name, seconds(45)).await?;
    recorder.snapshot("A: lock(45 s)").await?;
    a.try_lock(name, Duration::ZERO, Some(seconds(60))).await?;
    recorder.snapshot("A: tryLock(0, 60 s)").await?;
    b.try_lock(name, Duration::ZERO, None).await?;
    recorder.snapshot("B: tryLock()").await?;
    // Long enough to confirm a subscription: otherwise Redisson does not end it.
    b.try_lock(name, seconds(2), None).await?;
    recorder.until_unsubscribed(name).await?;
    recorder.snapshot("B: tryLock(2 s)").await?;
    b.unlock(name).await?;
    recorder.snapshot("B: unlock(), refused").await?;
    a.unlock(name).await?;
    recorder
        .snapshot_allowing(
            "A: unlock(), 2 holds left",
            AllowedDifference::LongerExpiryInRust,
        )
        .await?;
    let mut waiting = locking(&b, name);
    recorder.observer.until_subscribers(name, 1).await?;
    recorder
        .snapshot_allowing("B: lock(), waiting", AllowedDifference::LongerExpiryInRust)
        .await?;
    a.unlock(name).await?;
    recorder
        .snapshot_allowing(
            "A: unlock(), 1 hold left",
            AllowedDifference::LongerExpiryInRust,
        )
        .await?;
    a.unlock(name).await?;
    waiting.within(LONG, "the wake-up").await?;
    recorder.until_unsubscribed(name).await?;
    recorder.snapshot("A: unlock(); B has it").await?;
    a.force_unlock(name).await?;
    recorder.snapshot("A: forceUnlock()").await?;
    a.force_unlock(name).await?;
    recorder.snapshot("A: forceUnlock(), free").await?;
    a.unlock(name).await?;
    recorder
        .snapshot_allowing("A: unlock(), free", AllowedDifference::MessageInJava)
        .await?;
    b.lock_with_lease(name, seconds(60)).await?;
    recorder.snapshot("B: lock(60 s)").await?;
    b.unlock(name).await?;
    recorder.snapshot("B: unlock()").await?;
    for name in ["order:{42}", "käse \"🧀\" \u{7f}"] {
        a.lock(name).await?;
        recorder.snapshot("A: lock(), another name").await?;
        a.unlock(name).await?;
        recorder.snapshot("A: unlock(), another name").await?;
    }
    Ok(recorder.snapshots)
}

/// The known differences between two snapshots; an error for any other difference.
fn compare(java: &Snapshot, rust: &Snapshot) -> Outcome {
    let call = java.call;
    let mut notes = Vec::new();
    let keys: Vec<_> = java
        .keys
        .keys()
        .filter(|key| !key.starts_with(UNLOCK_LATCH))
        .collect();
    if keys.len() < java.keys.len() {
        notes.push(Note::UnlockLatch);
    }
    let fail = |what: &str| {
        Err(Failed(format!(
            "after {call}: {what} differ:\nJava {java:?}\nRust {rust:?}"
        )))
    };
    if keys != rust.keys.keys().collect::<Vec<_>>() {
        return fail("the keys");
    }
    for (key, java_key) in keys.into_iter().map(|key| (key, &java.keys[key])) {
        let rust_key = &rust.keys[key];
        if java_key.kind != rust_key.kind || java_key.content != rust_key.content {
            return fail("the contents");
        }
        if rust_key.pttl > java_key.pttl + TOLERANCE_MS
            && rust.allowed == AllowedDifference::LongerExpiryInRust
        {
            notes.push(Note::PartialRelease);
        } else if (rust_key.pttl - java_key.pttl).abs() > TOLERANCE_MS
            || java_key.pttl < 0
            || rust_key.pttl < 0
        {
            return fail("the expiries");
        }
    }
    if java.published != rust.published {
        if rust.allowed == AllowedDifference::MessageInJava && rust.published.is_empty() {
            notes.push(Note::SilentUnlock);
        } else {
            return fail("the messages");
        }
    }
    if java.subscribed != rust.subscribed {
        return fail("the subscriptions");
    }
    Ok(notes)
}

struct Recorder {
    observer: Observer,
    messages: PubSubStream,
    separators: u64,
    /// Owners and their placeholders in the record.
    owners: Vec<(String, &'static str)>,
    snapshots: Vec<Snapshot>,
}

impl Recorder {
    async fn open(server: &Server, owners: &[(&'static str, String)]) -> Result<Self, Failed> {
        let mut pubsub = redis::Client::open(server.url())?
            .get_async_pubsub()
            .await?;
        pubsub.psubscribe("*").await?;
        Ok(Self {
            observer: Observer::open(&server.url()).await,
            messages: pubsub.into_on_message(),
            separators: 0,
            owners: owners
                .iter()
                .map(|(name, owner)| (owner.clone(), *name))
                .collect(),
            snapshots: Vec::new(),
        })
    }

    /// Waits until the channel has no subscriber: both sides unsubscribe after the call returns.
    async fn until_unsubscribed(&self, name: &str) -> Result<(), Failed> {
        self.observer.until_subscribers(name, 0).await
    }

    async fn snapshot(&mut self, call: &'static str) -> Result<(), Failed> {
        self.snapshot_allowing(call, AllowedDifference::None).await
    }

    async fn snapshot_allowing(
        &mut self,
        call: &'static str,
        allowed: AllowedDifference,
    ) -> Result<(), Failed> {
        let published = self.published().await?;
        let mut keys = BTreeMap::new();
        let mut names: Vec<Vec<u8>> = self.observer.ask(&["KEYS", "*"]).await?;
        names.sort();
        for name in names {
            keys.insert(self.with_placeholders(&name), self.key_state(&name).await?);
        }
        let mut subscribed: Vec<Vec<u8>> = self.observer.ask(&["PUBSUB", "CHANNELS"]).await?;
        subscribed.sort();
        self.snapshots.push(Snapshot {
            call,
            allowed,
            keys,
            published,
            subscribed,
        });
        Ok(())
    }

    async fn key_state(&self, key: &[u8]) -> Result<KeyState, Failed> {
        let (kind, pttl): (String, i64) = (
            self.observer.ask_of("TYPE", key).await?,
            self.observer.ask_of("PTTL", key).await?,
        );
        let content: Vec<(Vec<u8>, Vec<u8>)> = match kind.as_str() {
            "hash" => self.observer.ask_of("HGETALL", key).await?,
            "string" => vec![(vec![], self.observer.ask_of("GET", key).await?)],
            // The key has expired meanwhile, or is of a type that neither side should leave.
            _ => vec![],
        };
        let mut content: Vec<_> = content
            .iter()
            .map(|(field, value)| (self.with_placeholders(field), self.with_placeholders(value)))
            .collect();
        content.sort();
        Ok(KeyState {
            kind,
            content,
            pttl,
        })
    }

    /// The messages since the last call. The server keeps their order, so all have arrived when the
    /// recorder's own message arrives.
    async fn published(&mut self) -> Result<Vec<(Vec<u8>, Vec<u8>)>, Failed> {
        self.separators += 1;
        let separator = self.separators.to_string();
        self.observer
            .ask::<i64>(&["PUBLISH", SEPARATOR, &separator])
            .await?;
        let mut published = Vec::new();
        loop {
            let Some(message) = tokio::time::timeout(LONG, self.messages.next()).await? else {
                return Err(Failed("the recorder's connection is lost".to_owned()));
            };
            let channel: Vec<u8> = message.get_channel()?;
            let payload: Vec<u8> = message.get_payload()?;
            if channel == SEPARATOR.as_bytes() {
                ensure!(
                    payload == separator.as_bytes(),
                    "the recorder's messages are out of order"
                );
                return Ok(published);
            }
            published.push((
                self.with_placeholders(&channel),
                self.with_placeholders(&payload),
            ));
        }
    }

    /// The bytes, or the placeholder if they are an owner's field. The replacement proves the form
    /// of the field.
    fn with_placeholders(&self, bytes: &[u8]) -> Vec<u8> {
        let owner = self
            .owners
            .iter()
            .find(|(owner, _)| owner.as_bytes() == bytes);
        owner.map_or(bytes.to_vec(), |(_, name)| name.as_bytes().to_vec())
    }
}

/// The comparison finds a difference in each field of a snapshot.
#[test]
fn comparison_of_records_finds_each_difference() {
    let state = KeyState {
        kind: "hash".to_owned(),
        content: vec![(b"CLIENT:A".to_vec(), b"1".to_vec())],
        pttl: 30_000,
    };
    let same = Snapshot {
        call: "A: lock()",
        allowed: AllowedDifference::None,
        keys: BTreeMap::from([(b"recorded".to_vec(), state)]),
        published: vec![(b"channel".to_vec(), b"0".to_vec())],
        subscribed: vec![],
    };
    assert!(compare(&same, &same).is_ok_and(|notes| notes.is_empty()));
    let changes: [fn(&mut Snapshot); 8] = [
        |snapshot| snapshot.keys.clear(),
        |snapshot| {
            drop(
                snapshot
                    .keys
                    .insert(b"more".to_vec(), snapshot.keys[&b"recorded"[..]].clone()),
            )
        },
        |snapshot| {
            snapshot
                .keys
                .values_mut()
                .for_each(|state| state.kind = "string".to_owned())
        },
        |snapshot| {
            snapshot
                .keys
                .values_mut()
                .for_each(|state| state.content[0].1 = b"2".to_vec())
        },
        |snapshot| {
            snapshot
                .keys
                .values_mut()
                .for_each(|state| state.pttl = 45_000)
        },
        |snapshot| snapshot.keys.values_mut().for_each(|state| state.pttl = -1),
        |snapshot| snapshot.published.clear(),
        |snapshot| snapshot.subscribed.push(b"channel".to_vec()),
    ];
    for (at, change) in changes.iter().enumerate() {
        let mut other = same.clone();
        change(&mut other);
        assert!(
            compare(&same, &other).is_err(),
            "change {at} is not found in the record of this library"
        );
        assert!(
            compare(&other, &same).is_err(),
            "change {at} is not found in the record of Redisson"
        );
    }
}
