//! Byte for byte: one sequence of calls is made with Redisson on one empty server and with ours on
//! another. After each call all that is left in the server, all that was published and all that is
//! listened for is written down, and the two records are compared.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::StreamExt;
use redis::aio::PubSubStream;

use crate::party::Party;
use crate::scenarios::{Note, Outcome};
use crate::support::java::Options;
use crate::support::server::Server;
use crate::world::{Failed, LONG, View, Way, World, ensure, locking, rust_client};

/// The leases in use differ by 15 s; what a step takes on a busy machine is less than this.
const TOLERANCE_MS: i64 = 6_000;

/// A key that Redisson makes for itself at an unlock; see [`Note::UnlockLatch`].
const UNLOCK_LATCH: &[u8] = b"redisson_unlock_latch:";

/// The channel whose messages part the steps. The observer's own.
const FENCE: &str = "recorder:fence";

/// What there is after one call.
#[derive(Clone, Debug)]
pub struct Moment {
    pub call: &'static str,
    may: May,
    pub keys: BTreeMap<Vec<u8>, Left>,
    /// Channel and payload, in order.
    pub published: Vec<(Vec<u8>, Vec<u8>)>,
    /// The channels that are listened to.
    pub listened: Vec<Vec<u8>>,
}

/// In what the two sides may differ after a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum May {
    BeEqualOnly,
    /// Holds are left after a release: ours keeps what the expiry was.
    KeepLongerExpiry,
    /// A free lock was unlocked: Redisson before 3.10.6 takes that for the unlock of a held one.
    PublishInJava,
}

/// One key: its type, its content, its expiry.
#[derive(Clone, Debug)]
pub struct Left {
    pub kind: String,
    /// Field and value; for other types than a hash, the value alone.
    pub content: Vec<(Vec<u8>, Vec<u8>)>,
    pub pttl: i64,
}

/// The scenario.
pub async fn byte_for_byte(world: &World, _: Way) -> Outcome {
    let servers = [Server::start(), Server::start()];
    let java = world
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
    *world.record.lock().unwrap() = rust;
    Ok(notes)
}

/// The sequence of calls, by two threads of one client.
async fn record(server: &Server, [a, b]: [Party; 2]) -> Result<Vec<Moment>, Failed> {
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

    recorder.note("nothing yet").await?;
    a.lock(name).await?;
    recorder.note("A: lock()").await?;
    a.lock_with_lease(name, seconds(45)).await?;
    recorder.note("A: lock(45 s)").await?;
    a.try_lock(name, Duration::ZERO, Some(seconds(60))).await?;
    recorder.note("A: tryLock(0, 60 s)").await?;
    b.try_lock(name, Duration::ZERO, None).await?;
    recorder.note("B: tryLock()").await?;
    // Long enough for a subscription to be confirmed, which Redisson otherwise leaves behind.
    b.try_lock(name, seconds(2), None).await?;
    recorder.until_silent(name).await?;
    recorder.note("B: tryLock(2 s)").await?;
    b.unlock(name).await?;
    recorder.note("B: unlock(), refused").await?;
    a.unlock(name).await?;
    recorder
        .note_but("A: unlock(), 2 holds left", May::KeepLongerExpiry)
        .await?;
    let mut waiting = locking(&b, name);
    recorder.view.until_listeners(name, 1).await?;
    recorder
        .note_but("B: lock(), waiting", May::KeepLongerExpiry)
        .await?;
    a.unlock(name).await?;
    recorder
        .note_but("A: unlock(), 1 hold left", May::KeepLongerExpiry)
        .await?;
    a.unlock(name).await?;
    waiting.within(LONG, "the wake-up").await?;
    recorder.until_silent(name).await?;
    recorder.note("A: unlock(); B has it").await?;
    a.force_unlock(name).await?;
    recorder.note("A: forceUnlock()").await?;
    a.force_unlock(name).await?;
    recorder.note("A: forceUnlock(), free").await?;
    a.unlock(name).await?;
    recorder
        .note_but("A: unlock(), free", May::PublishInJava)
        .await?;
    b.lock_with_lease(name, seconds(60)).await?;
    recorder.note("B: lock(60 s)").await?;
    b.unlock(name).await?;
    recorder.note("B: unlock()").await?;
    for name in ["order:{42}", "käse \"🧀\" \u{7f}"] {
        a.lock(name).await?;
        recorder.note("A: lock(), another name").await?;
        a.unlock(name).await?;
        recorder.note("A: unlock(), another name").await?;
    }
    Ok(recorder.moments)
}

/// The differences that are known, or what is different otherwise.
fn compare(java: &Moment, rust: &Moment) -> Outcome {
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
    let differ = |what: &str| {
        Err(Failed(format!(
            "after {call}: {what} differ:\nJava {java:?}\nRust {rust:?}"
        )))
    };
    if keys != rust.keys.keys().collect::<Vec<_>>() {
        return differ("the keys");
    }
    for (key, theirs) in keys.into_iter().map(|key| (key, &java.keys[key])) {
        let ours = &rust.keys[key];
        if theirs.kind != ours.kind || theirs.content != ours.content {
            return differ("the contents");
        }
        if ours.pttl > theirs.pttl + TOLERANCE_MS && rust.may == May::KeepLongerExpiry {
            notes.push(Note::PartialRelease);
        } else if (ours.pttl - theirs.pttl).abs() > TOLERANCE_MS || theirs.pttl < 0 || ours.pttl < 0
        {
            return differ("the expiries");
        }
    }
    if java.published != rust.published {
        if rust.may == May::PublishInJava && rust.published.is_empty() {
            notes.push(Note::SilentUnlock);
        } else {
            return differ("the messages");
        }
    }
    if java.listened != rust.listened {
        return differ("the subscriptions");
    }
    Ok(notes)
}

struct Recorder {
    view: View,
    messages: PubSubStream,
    fences: u64,
    /// Owners and what stands for them in the record.
    owners: Vec<(String, &'static str)>,
    moments: Vec<Moment>,
}

impl Recorder {
    async fn open(server: &Server, owners: &[(&'static str, String)]) -> Result<Self, Failed> {
        let mut pubsub = redis::Client::open(server.url())?
            .get_async_pubsub()
            .await?;
        pubsub.psubscribe("*").await?;
        Ok(Self {
            view: View::open(&server.url()).await,
            messages: pubsub.into_on_message(),
            fences: 0,
            owners: owners
                .iter()
                .map(|(name, owner)| (owner.clone(), *name))
                .collect(),
            moments: Vec::new(),
        })
    }

    /// Waits until nobody listens: both sides unsubscribe after the call has come back.
    async fn until_silent(&self, name: &str) -> Result<(), Failed> {
        self.view.until_listeners(name, 0).await
    }

    async fn note(&mut self, call: &'static str) -> Result<(), Failed> {
        self.note_but(call, May::BeEqualOnly).await
    }

    async fn note_but(&mut self, call: &'static str, may: May) -> Result<(), Failed> {
        let published = self.published().await?;
        let mut keys = BTreeMap::new();
        let mut names: Vec<Vec<u8>> = self.view.ask(&["KEYS", "*"]).await?;
        names.sort();
        for name in names {
            keys.insert(self.plain(&name), self.left(&name).await?);
        }
        let mut listened: Vec<Vec<u8>> = self.view.ask(&["PUBSUB", "CHANNELS"]).await?;
        listened.sort();
        self.moments.push(Moment {
            call,
            may,
            keys,
            published,
            listened,
        });
        Ok(())
    }

    async fn left(&self, key: &[u8]) -> Result<Left, Failed> {
        let (kind, pttl): (String, i64) = (
            self.view.ask_of("TYPE", key).await?,
            self.view.ask_of("PTTL", key).await?,
        );
        let content: Vec<(Vec<u8>, Vec<u8>)> = match kind.as_str() {
            "hash" => self.view.ask_of("HGETALL", key).await?,
            "string" => vec![(vec![], self.view.ask_of("GET", key).await?)],
            // It is gone meanwhile, or nothing that either side should leave.
            _ => vec![],
        };
        let mut content: Vec<_> = content
            .iter()
            .map(|(field, value)| (self.plain(field), self.plain(value)))
            .collect();
        content.sort();
        Ok(Left {
            kind,
            content,
            pttl,
        })
    }

    /// What was published since the last time. The server keeps the order of messages, so all are
    /// there when ours is.
    async fn published(&mut self) -> Result<Vec<(Vec<u8>, Vec<u8>)>, Failed> {
        self.fences += 1;
        let fence = self.fences.to_string();
        self.view.ask::<i64>(&["PUBLISH", FENCE, &fence]).await?;
        let mut published = Vec::new();
        loop {
            let Some(message) = tokio::time::timeout(LONG, self.messages.next()).await? else {
                return Err(Failed("the recorder's connection is lost".to_owned()));
            };
            let channel: Vec<u8> = message.get_channel()?;
            let payload: Vec<u8> = message.get_payload()?;
            if channel == FENCE.as_bytes() {
                ensure!(
                    payload == fence.as_bytes(),
                    "the recorder's messages are out of order"
                );
                return Ok(published);
            }
            published.push((self.plain(&channel), self.plain(&payload)));
        }
    }

    /// The bytes with owners replaced by what stands for them; that they are replaced proves their
    /// form.
    fn plain(&self, bytes: &[u8]) -> Vec<u8> {
        let owner = self
            .owners
            .iter()
            .find(|(owner, _)| owner.as_bytes() == bytes);
        owner.map_or(bytes.to_vec(), |(_, name)| name.as_bytes().to_vec())
    }
}

/// The comparison sees what it is there to see.
#[test]
fn a_difference_in_a_record_is_found() {
    let left = Left {
        kind: "hash".to_owned(),
        content: vec![(b"CLIENT:A".to_vec(), b"1".to_vec())],
        pttl: 30_000,
    };
    let same = Moment {
        call: "A: lock()",
        may: May::BeEqualOnly,
        keys: BTreeMap::from([(b"recorded".to_vec(), left)]),
        published: vec![(b"channel".to_vec(), b"0".to_vec())],
        listened: vec![],
    };
    assert!(compare(&same, &same).is_ok_and(|notes| notes.is_empty()));
    let changes: [fn(&mut Moment); 8] = [
        |moment| moment.keys.clear(),
        |moment| {
            drop(
                moment
                    .keys
                    .insert(b"more".to_vec(), moment.keys[&b"recorded"[..]].clone()),
            )
        },
        |moment| {
            moment
                .keys
                .values_mut()
                .for_each(|left| left.kind = "string".to_owned())
        },
        |moment| {
            moment
                .keys
                .values_mut()
                .for_each(|left| left.content[0].1 = b"2".to_vec())
        },
        |moment| moment.keys.values_mut().for_each(|left| left.pttl = 45_000),
        |moment| moment.keys.values_mut().for_each(|left| left.pttl = -1),
        |moment| moment.published.clear(),
        |moment| moment.listened.push(b"channel".to_vec()),
    ];
    for (at, change) in changes.iter().enumerate() {
        let mut other = same.clone();
        change(&mut other);
        assert!(
            compare(&same, &other).is_err(),
            "change {at} is not found in ours"
        );
        assert!(
            compare(&other, &same).is_err(),
            "change {at} is not found in Redisson's"
        );
    }
}
