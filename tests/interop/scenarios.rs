//! The list of scenarios, the differences of Redisson that each one may note, and the runner.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, join_all};

use crate::fixture::{Direction, Failed, Fixture};
use crate::support::java::VERSIONS;
use crate::{counter, fenced, leases, ownership, recorder};

/// The result of a scenario: the noted differences of this Redisson version, or the failure.
pub type Outcome = Result<Vec<Note>, Failed>;

/// A difference between a Redisson version and this library, whose locks stay exclusive in each of
/// them. The run fails if a difference appears in a version that is not listed here, or does not
/// appear in a listed one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Note {
    SilentUnlock,
    InterruptedLock,
    ShorterReentry,
    PartialRelease,
    UnlockLatch,
    NoFencedLock,
    TokenOnReentry,
    IgnoredLease,
}

/// One scenario: a function, and the directions in which it runs.
pub struct Scenario {
    pub title: &'static str,
    pub directions: &'static [Direction],
    /// The differences to note, by direction.
    notes: &'static [(Direction, Note)],
    run: fn(Arc<Fixture>, Direction) -> BoxFuture<'static, Outcome>,
}

/// One scenario in one direction with one version.
pub struct Ran {
    pub title: &'static str,
    pub direction: Direction,
    pub outcome: Outcome,
}

/// The title of the scenario that needs several versions.
pub const MIXED_VERSIONS: &str = "three Redisson versions and ours on one lock at once";

/// A scenario that takes longer than this fails.
const LIMIT: Duration = Duration::from_secs(400);

macro_rules! scenario {
    ($title:literal, [$($direction:ident)+], $function:path $(, $noted:ident: $note:ident)*) => {
        Scenario {
            title: $title,
            directions: &[$(Direction::$direction),+],
            notes: &[$((Direction::$noted, Note::$note)),*],
            run: |fixture, direction| Box::pin(async move { $function(&fixture, direction).await }),
        }
    };
}

/// All scenarios, in the order of the table.
pub const ALL: [Scenario; 17] = [
    scenario!("exclusion", [JavaToRust RustToJava], ownership::exclusion),
    scenario!("a blocked waiter is woken by the unlock", [JavaToRust RustToJava], leases::wake_up),
    scenario!("re-entry is counted", [JavaToRust RustToJava], ownership::reentry),
    scenario!("wait time", [JavaToRust RustToJava], leases::wait_time),
    scenario!("lease time", [JavaToRust RustToJava], leases::lease_time),
    scenario!("the watchdog outlasts its timeout", [JavaToRust RustToJava], leases::watchdog),
    scenario!("the owner is killed (SIGKILL)", [JavaToRust RustToJava], leases::killed_owner),
    scenario!("force unlock", [JavaToRust RustToJava], ownership::force_unlock),
    scenario!("unlock by others", [JavaToRust RustToJava], ownership::unlock_by_other_owner, RustToJava: SilentUnlock),
    scenario!("both answer alike about one key", [JavaToRust RustToJava], ownership::inspection),
    scenario!("names with spaces, unicode, braces, colons", [JavaToRust RustToJava], ownership::names),
    scenario!(
        "a waiter is interrupted, or dropped",
        [JavaToRust RustToJava],
        ownership::waiter_ends_early,
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
    scenario!(
        "fenced lock: exclusion and wake-ups",
        [JavaToRust RustToJava],
        fenced::exclusion,
        JavaToRust: NoFencedLock,
        RustToJava: NoFencedLock
    ),
    scenario!(
        "fenced lock: tokens on re-entry and expiry",
        [Together],
        fenced::reentry_and_expiry,
        Together: NoFencedLock,
        Together: TokenOnReentry,
        Together: IgnoredLease
    ),
    scenario!(
        "fenced lock: tokens of both sides grow strictly",
        [Together],
        fenced::tokens,
        Together: NoFencedLock
    ),
];

/// Runs after the other scenarios, because it uses all processors.
pub const COUNTER: Scenario = scenario!(
    "4 Java threads and 4 Rust tasks count to 16 000",
    [Together],
    counter::counter
);

impl Scenario {
    async fn run(&self, fixture: Arc<Fixture>, direction: Direction) -> Ran {
        let version = fixture.version.clone();
        // A separate task, so that the scenarios share the processors, and a panic ends only one.
        let running = tokio::spawn((self.run)(fixture, direction));
        let outcome = match tokio::time::timeout(LIMIT, running).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(panicked)) => Err(Failed(panicked.to_string())),
            Err(_) => Err(Failed(format!("not finished within {LIMIT:?}"))),
        };
        let outcome = outcome.and_then(|notes| self.checked(&version, direction, notes));
        Ran {
            title: self.title,
            direction,
            outcome,
        }
    }

    /// Returns the listed differences; fails unless they are the noted ones.
    fn checked(&self, version: &str, direction: Direction, noted: Vec<Note>) -> Outcome {
        let listed = self
            .notes
            .iter()
            .filter(|(noted, note)| *noted == direction && note.versions().contains(&version));
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

/// Runs all scenarios with one version, the independent ones at the same time.
pub async fn run_all(fixture: &Arc<Fixture>) -> Vec<Ran> {
    let each = ALL.iter().flat_map(|scenario| {
        scenario
            .directions
            .iter()
            .map(move |direction| (scenario, *direction))
    });
    let mut ran =
        join_all(each.map(|(scenario, direction)| scenario.run(Arc::clone(fixture), direction)))
            .await;
    ran.push(COUNTER.run(Arc::clone(fixture), Direction::Together).await);
    ran
}

impl Note {
    pub const ALL: [Self; 8] = [
        Self::SilentUnlock,
        Self::InterruptedLock,
        Self::ShorterReentry,
        Self::PartialRelease,
        Self::UnlockLatch,
        Self::NoFencedLock,
        Self::TokenOnReentry,
        Self::IgnoredLease,
    ];

    /// The versions with this difference.
    fn versions(self) -> &'static [&'static str] {
        match self {
            Self::SilentUnlock | Self::InterruptedLock => &["3.8.1"],
            Self::ShorterReentry | Self::PartialRelease => &VERSIONS,
            Self::UnlockLatch | Self::TokenOnReentry | Self::IgnoredLease => {
                &["4.7.0", "3.52.0", "3.45.1", "3.27.2"]
            }
            Self::NoFencedLock => &["3.17.7", "3.8.1"],
        }
    }

    /// Whether it appears only in some runs.
    fn is_rare(self) -> bool {
        self == Self::UnlockLatch
    }

    /// Whether the scenario does not run with these versions.
    pub fn is_skipped(self) -> bool {
        self == Self::NoFencedLock
    }

    /// The letter in the table.
    pub fn mark(self) -> char {
        match self {
            Self::SilentUnlock => 'a',
            Self::InterruptedLock => 'b',
            Self::ShorterReentry => 'c',
            Self::PartialRelease => 'd',
            Self::UnlockLatch => 'e',
            Self::NoFencedLock => 'f',
            Self::TokenOnReentry => 'g',
            Self::IgnoredLease => 'h',
        }
    }

    /// The footnote below the table.
    pub fn text(self) -> &'static str {
        match self {
            Self::SilentUnlock => {
                "Redisson's `unlock()` of a free lock reports success and publishes a release. Later versions throw \
                 `IllegalMonitorStateException`; this library returns `Error::NotHeld`. The message costs a waiter one \
                 attempt."
            }
            Self::InterruptedLock => {
                "An interrupted `lock()` of Redisson returns as if it had acquired the lock. It has not: the owner \
                 keeps the lock, and the Java code continues without protection."
            }
            Self::ShorterReentry => {
                "`lock()` and then `lock(1 s)` by one Java thread sets the expiry to 1 s, and both holds end with it: \
                 then another owner can acquire the lock. This library keeps the longer expiry."
            }
            Self::PartialRelease => {
                "An unlock that leaves holds sets the expiry to Redisson's watchdog timeout (from 60 s to 30 s in this \
                 sequence). This library sets it to what the holds that stay are entitled to (45 s, then 30 s). \
                 Everything else is the same, byte for byte."
            }
            Self::UnlockLatch => {
                "After an unlock the key `redisson_unlock_latch:{NAME}:REQUEST` may exist, which only the Redisson \
                 client reads that created it; up to 3.52.0 at times until it expires."
            }
            Self::NoFencedLock => "Not run: `RFencedLock` exists since 3.19.0.",
            Self::TokenOnReentry => {
                "Each re-entry of Redisson raises the token. Here all holds of a tenure have one token."
            }
            Self::IgnoredLease => {
                "`lockAndGetToken(1 s)` holds the lock with the watchdog timeout, and renews it."
            }
        }
    }
}
