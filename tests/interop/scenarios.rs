//! The list of scenarios, what each may note about Redisson, and how they are run.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, join_all};

use crate::support::java::VERSIONS;
use crate::world::{Failed, Way, World};
use crate::{counter, leases, ownership, recorder};

/// What came of a scenario: facts about this Redisson that a reader of the table has to know, or
/// why it failed.
pub type Outcome = Result<Vec<Note>, Failed>;

/// A thing that a Redisson version does otherwise than ours; in none of them ours loses its
/// exclusion. The run fails if one appears in a version that is not listed here, or does not appear
/// in one that is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Note {
    SilentUnlock,
    InterruptedLock,
    ShorterReentry,
    PartialRelease,
    UnlockLatch,
}

/// One scenario: a function, and the ways in which it runs.
pub struct Scenario {
    pub title: &'static str,
    pub ways: &'static [Way],
    /// What it is to note, in which way.
    notes: &'static [(Way, Note)],
    run: fn(Arc<World>, Way) -> BoxFuture<'static, Outcome>,
}

/// One scenario in one way with one version.
pub struct Ran {
    pub title: &'static str,
    pub way: Way,
    pub outcome: Outcome,
}

/// The title of the scenario that needs several versions.
pub const FLEET: &str = "three Redisson versions and ours on one lock at once";

/// A scenario that takes longer than this hangs.
const LIMIT: Duration = Duration::from_secs(400);

macro_rules! scenario {
    ($title:literal, [$($way:ident)+], $function:path $(, $noted:ident: $note:ident)*) => {
        Scenario {
            title: $title,
            ways: &[$(Way::$way),+],
            notes: &[$((Way::$noted, Note::$note)),*],
            run: |world, way| Box::pin(async move { $function(&world, way).await }),
        }
    };
}

/// All scenarios, in the order of the table.
pub const ALL: [Scenario; 14] = [
    scenario!("exclusion", [JavaToRust RustToJava], ownership::exclusion),
    scenario!("a blocked waiter is woken by the unlock", [JavaToRust RustToJava], leases::wake_up),
    scenario!("re-entry is counted", [JavaToRust RustToJava], ownership::reentry),
    scenario!("wait time", [JavaToRust RustToJava], leases::wait_time),
    scenario!("lease time", [JavaToRust RustToJava], leases::lease_time),
    scenario!("the watchdog outlasts its timeout", [JavaToRust RustToJava], leases::watchdog),
    scenario!("the owner is killed (SIGKILL)", [JavaToRust RustToJava], leases::killed_owner),
    scenario!("force unlock", [JavaToRust RustToJava], ownership::force_unlock),
    scenario!("unlock by others", [JavaToRust RustToJava], ownership::not_the_owner, RustToJava: SilentUnlock),
    scenario!("both answer alike about one key", [JavaToRust RustToJava], ownership::questions),
    scenario!("names with spaces, unicode, braces, colons", [JavaToRust RustToJava], ownership::names),
    scenario!(
        "a waiter is interrupted, or dropped",
        [JavaToRust RustToJava],
        ownership::waiter_gives_up,
        RustToJava: InterruptedLock
    ),
    scenario!(
        "re-entry with a shorter lease",
        [JavaToRust RustToJava],
        leases::shorter_reentry,
        JavaToRust: ShorterReentry
    ),
    scenario!(
        "byte for byte: what is left and published",
        [Together],
        recorder::byte_for_byte,
        Together: SilentUnlock,
        Together: PartialRelease,
        Together: UnlockLatch
    ),
];

/// Runs after the others, as it leaves no processor for them.
pub const COUNTER: Scenario = scenario!(
    "4 Java threads and 4 Rust tasks count to 16 000",
    [Together],
    counter::counter
);

impl Scenario {
    async fn run(&self, world: Arc<World>, way: Way) -> Ran {
        let version = world.version.clone();
        // A task of its own, so that the scenarios share the processors, and a panic ends just one.
        let running = tokio::spawn((self.run)(world, way));
        let outcome = match tokio::time::timeout(LIMIT, running).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(panicked)) => Err(Failed(panicked.to_string())),
            Err(_) => Err(Failed(format!("not done within {LIMIT:?}"))),
        };
        let outcome = outcome.and_then(|notes| self.as_listed(&version, way, notes));
        Ran {
            title: self.title,
            way,
            outcome,
        }
    }

    /// Fails unless what was noted is what is listed; returns what is listed.
    fn as_listed(&self, version: &str, way: Way, noted: Vec<Note>) -> Outcome {
        let listed = self
            .notes
            .iter()
            .filter(|(noted, note)| *noted == way && note.versions().contains(&version));
        let listed: BTreeSet<Note> = listed.map(|(_, note)| *note).collect();
        let as_listed = noted.iter().all(|note| listed.contains(note))
            && listed
                .iter()
                .all(|note| noted.contains(note) || note.is_rare());
        if as_listed {
            Ok(listed.into_iter().collect())
        } else {
            Err(Failed(format!(
                "noted of Redisson {version}: {noted:?}, but listed: {listed:?}"
            )))
        }
    }
}

/// Runs all scenarios with one version: those that leave each other alone at the same time.
pub async fn run_all(world: &Arc<World>) -> Vec<Ran> {
    let each = ALL
        .iter()
        .flat_map(|scenario| scenario.ways.iter().map(move |way| (scenario, *way)));
    let mut ran = join_all(each.map(|(scenario, way)| scenario.run(Arc::clone(world), way))).await;
    ran.push(COUNTER.run(Arc::clone(world), Way::Together).await);
    ran
}

impl Note {
    pub const ALL: [Self; 5] = [
        Self::SilentUnlock,
        Self::InterruptedLock,
        Self::ShorterReentry,
        Self::PartialRelease,
        Self::UnlockLatch,
    ];

    /// The versions that do this.
    fn versions(self) -> &'static [&'static str] {
        match self {
            Self::SilentUnlock | Self::InterruptedLock => &["3.8.1"],
            Self::ShorterReentry | Self::PartialRelease => &VERSIONS,
            Self::UnlockLatch => &["4.7.0", "3.52.0", "3.45.1", "3.27.2"],
        }
    }

    /// Whether it is a matter of luck if it appears.
    fn is_rare(self) -> bool {
        self == Self::UnlockLatch
    }

    /// The letter in the table.
    pub fn mark(self) -> char {
        match self {
            Self::SilentUnlock => 'a',
            Self::InterruptedLock => 'b',
            Self::ShorterReentry => 'c',
            Self::PartialRelease => 'd',
            Self::UnlockLatch => 'e',
        }
    }

    /// What this is, for the table's foot.
    pub fn text(self) -> &'static str {
        match self {
            Self::SilentUnlock => {
                "Redisson's `unlock()` of a lock that nobody holds reports success and publishes a release. Later \
                 versions throw `IllegalMonitorStateException`; here it is `Error::NotHeld`. The message costs a waiter \
                 one question."
            }
            Self::InterruptedLock => {
                "An interrupted `lock()` of Redisson returns as if it had the lock. It has not: the owner keeps it, \
                 and the Java code goes on without protection."
            }
            Self::ShorterReentry => {
                "`lock()` and then `lock(1 s)` by one Java thread sets the expiry to 1 s, and both holds end with it: \
                 then anybody can have the lock, as the server says. An owner of ours keeps the longer expiry."
            }
            Self::PartialRelease => {
                "An unlock that leaves holds sets the expiry to Redisson's watchdog timeout (from 60 s to 30 s in this \
                 sequence). Ours never shortens it. All else is the same, byte for byte."
            }
            Self::UnlockLatch => {
                "After an unlock there may still be `redisson_unlock_latch:{NAME}:REQUEST`, a key that only the \
                 Redisson client reads that made it; up to 3.52.0 at times until it expires."
            }
        }
    }
}
