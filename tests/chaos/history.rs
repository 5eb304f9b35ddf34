//! The history of a run: events with their times on a clock that all processes of the machine
//! share.
//!
//! Each process appends its events to a file of its own, each as one line in one write, so a
//! process that is killed loses no line that it has written. The line for the begin of an operation
//! is written before it, the line for its end after it. A time is always taken *before* the library
//! is asked whether a lock is held, so the answer is about that time or a later one.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

/// Nanoseconds of CLOCK_MONOTONIC; in a complete [`History`], since the beginning of the run.
pub type Nanos = u64;

pub const MS: Nanos = 1_000_000;

/// The names of faults that the judge treats specially.
pub const NO_CHANNEL: &str = "channels refused (ACL)";
pub const NO_PUBLISH: &str = "PUBLISH refused (ACL)";
pub const NO_SCRIPTS: &str = "scripts refused (ACL)";
pub const STOPPED: &str = "worker stopped (SIGSTOP)";

/// Faults that were not planned. The judge finds the first in the looks; the run writes the second.
pub const STALLED: &str = "no look answered";
pub const CLOCK_SET: &str = "wall clock set";

/// The time of the clock that tokio and the library use for deadlines, too.
pub fn now() -> Nanos {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("the clock");
    time.tv_sec() as Nanos * 1_000 * MS + time.tv_nsec() as Nanos
}

/// The difference between the wall clock and [`now`].
pub fn wall_clock_offset() -> i128 {
    let wall = || clock_gettime(ClockId::CLOCK_REALTIME).expect("the wall clock");
    // The shortest of some readings: the thread may be descheduled in between.
    let readings = (0..5).map(|_| {
        let (from, wall, to) = (now(), wall(), now());
        let wall = i128::from(wall.tv_sec()) * 1_000 * i128::from(MS) + i128::from(wall.tv_nsec());
        (to - from, wall - i128::from(from))
    });
    let shortest = readings.min_by_key(|(took, _)| *took);
    shortest.map_or(0, |(_, offset)| offset)
}

/// A time in seconds, for messages.
pub fn seconds(at: Nanos) -> String {
    format!("{}.{:03} s", at / (1_000 * MS), at / MS % 1_000)
}

/// What a process writes about one attempt to acquire a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// An acquire begins, for that owner.
    Invoked {
        lock: usize,
        owner: String,
        how: String,
        lease: Nanos,
        renewed: bool,
    },
    /// The acquire was granted. The lock is not lost for another `remaining` nanoseconds (0: no
    /// claim).
    Granted { remaining: Nanos },
    /// The acquire has ended, and it is certain that it left nothing on the server.
    Failed { why: String },
    /// The acquire has ended; it may have left a hold, which the background releases.
    Unknown { why: String },
    /// The acquire or the `run` reported a loss; the background releases what is left of the hold.
    TakenBack { why: String },
    /// The caller dropped the future.
    Cancelled,
    /// The lock is not lost for another `remaining` nanoseconds.
    Sure { remaining: Nanos },
    /// The library reported a loss to the owner.
    Lost { reason: String },
    /// The release of the hold begins.
    Releasing { how: String },
    /// The outcome of the release: "ok", "lost", "unknown", or the text of another error.
    Released { outcome: String },
    /// The hold count that the library reports for the owner, and the number of its guards.
    Count { expected: u64, found: u64 },
    /// A guarded section begins to use the lock's register.
    SectionBegan,
    /// It has read that number and written the next one; `proven` if the lock was held until now.
    SectionEnded { read: u64, proven: bool },
    /// The future of a `run` makes a step that other processes could observe.
    Worked,
    /// A force unlock begins.
    Forcing { lock: usize },
    /// The outcome of the force unlock: "freed", "free", "unknown", or the text of another error.
    Forced { outcome: String },
    /// A thread or task of the process panicked.
    Panicked { why: String },
    /// The process has finished all its operations, and has that many tasks more than before it
    /// made its client.
    Ended { tasks: u64, shutdown: String },
}

/// An event, with its time, process and attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub at: Nanos,
    pub process: u64,
    pub attempt: u64,
    pub event: Event,
}

/// A fault, from its beginning to its end. It affects the processes of one slot, or all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub from: Nanos,
    pub to: Nanos,
    pub kind: String,
    pub slot: Option<u64>,
    /// Whether it affected anything, such as a call whose reply was dropped. If not, it excuses
    /// nothing.
    pub met: bool,
}

/// A look at the server: the keys that it had at some time between `from` and `to`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    pub from: Nanos,
    pub to: Nanos,
    pub held: Vec<Key>,
}

/// A lock's key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    pub lock: usize,
    pub owner: String,
    pub count: u64,
    pub pttl: i64,
}

/// Everything that was written in a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct History {
    pub lines: Vec<Line>,
    pub faults: Vec<Fault>,
    pub samples: Vec<Sample>,
    /// Processes that were killed, and the times after their ends.
    pub killed: Vec<(u64, Nanos)>,
    /// What was left at the end of the run and should not be.
    pub left: Vec<String>,
}

/// The slot of a process. The process that replaces a killed one has the same slot.
pub fn slot_of(process: u64) -> u64 {
    process % 100
}

/// The process in a slot after that many kills.
pub fn process_of(slot: u64, incarnation: u64) -> u64 {
    incarnation * 100 + slot
}

/// Writes the events of a process into its file.
pub struct Recorder {
    file: File,
    process: u64,
    attempts: AtomicU64,
}

impl Recorder {
    pub fn open(path: &Path, process: u64) -> Self {
        let file = File::options()
            .create(true)
            .append(true)
            .open(path)
            .expect("a file for the history");
        Self {
            file,
            process,
            attempts: AtomicU64::new(1),
        }
    }

    /// A number for a new attempt.
    pub fn attempt(&self) -> u64 {
        self.attempts.fetch_add(1, Ordering::Relaxed)
    }

    /// Writes an event of that time.
    pub fn record(&self, at: Nanos, attempt: u64, event: Event) {
        let mut line = Line {
            at,
            process: self.process,
            attempt,
            event,
        }
        .to_json()
        .to_string();
        line.push('\n');
        (&self.file)
            .write_all(line.as_bytes())
            .expect("a line of the history");
    }
}

impl Line {
    fn to_json(&self) -> Value {
        let (name, mut fields) = match &self.event {
            Event::Invoked {
                lock,
                owner,
                how,
                lease,
                renewed,
            } => (
                "invoked",
                json!({ "lock": lock, "owner": owner, "how": how, "lease": lease, "renewed": renewed }),
            ),
            Event::Granted { remaining } => ("granted", json!({ "remaining": remaining })),
            Event::Failed { why } => ("failed", json!({ "why": why })),
            Event::Unknown { why } => ("unknown", json!({ "why": why })),
            Event::TakenBack { why } => ("taken back", json!({ "why": why })),
            Event::Cancelled => ("cancelled", json!({})),
            Event::Sure { remaining } => ("sure", json!({ "remaining": remaining })),
            Event::Lost { reason } => ("lost", json!({ "why": reason })),
            Event::Releasing { how } => ("releasing", json!({ "how": how })),
            Event::Released { outcome } => ("released", json!({ "why": outcome })),
            Event::Count { expected, found } => {
                ("count", json!({ "expected": expected, "found": found }))
            }
            Event::SectionBegan => ("section", json!({})),
            Event::SectionEnded { read, proven } => {
                ("section ended", json!({ "read": read, "proven": proven }))
            }
            Event::Worked => ("worked", json!({})),
            Event::Forcing { lock } => ("forcing", json!({ "lock": lock })),
            Event::Forced { outcome } => ("forced", json!({ "why": outcome })),
            Event::Panicked { why } => ("panicked", json!({ "why": why })),
            Event::Ended { tasks, shutdown } => {
                ("ended", json!({ "tasks": tasks, "why": shutdown }))
            }
        };
        fields["at"] = self.at.into();
        fields["process"] = self.process.into();
        fields["attempt"] = self.attempt.into();
        fields["event"] = name.into();
        fields
    }

    /// Reads a line; `None` if it is incomplete.
    fn from_json(text: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(text).ok()?;
        let number = |name: &str| value[name].as_u64();
        let word = |name: &str| value[name].as_str().map(str::to_owned);
        let event = match value["event"].as_str()? {
            "invoked" => Event::Invoked {
                lock: number("lock")? as usize,
                owner: word("owner")?,
                how: word("how")?,
                lease: number("lease")?,
                renewed: value["renewed"].as_bool()?,
            },
            "granted" => Event::Granted {
                remaining: number("remaining")?,
            },
            "failed" => Event::Failed { why: word("why")? },
            "unknown" => Event::Unknown { why: word("why")? },
            "taken back" => Event::TakenBack { why: word("why")? },
            "cancelled" => Event::Cancelled,
            "sure" => Event::Sure {
                remaining: number("remaining")?,
            },
            "lost" => Event::Lost {
                reason: word("why")?,
            },
            "releasing" => Event::Releasing { how: word("how")? },
            "released" => Event::Released {
                outcome: word("why")?,
            },
            "count" => Event::Count {
                expected: number("expected")?,
                found: number("found")?,
            },
            "section" => Event::SectionBegan,
            "section ended" => Event::SectionEnded {
                read: number("read")?,
                proven: value["proven"].as_bool()?,
            },
            "worked" => Event::Worked,
            "forcing" => Event::Forcing {
                lock: number("lock")? as usize,
            },
            "forced" => Event::Forced {
                outcome: word("why")?,
            },
            "panicked" => Event::Panicked { why: word("why")? },
            "ended" => Event::Ended {
                tasks: number("tasks")?,
                shutdown: word("why")?,
            },
            _ => return None,
        };
        Some(Self {
            at: number("at")?,
            process: number("process")?,
            attempt: number("attempt")?,
            event,
        })
    }
}

impl History {
    /// Adds the events of one process.
    pub fn read(&mut self, path: &Path) -> io::Result<()> {
        for line in BufReader::new(File::open(path)?).lines() {
            self.lines.extend(Line::from_json(&line?));
        }
        Ok(())
    }

    /// Makes all times relative to that one.
    pub fn since(mut self, begun: Nanos) -> Self {
        let since = |at: &mut Nanos| *at = at.saturating_sub(begun);
        self.lines.iter_mut().for_each(|line| since(&mut line.at));
        self.faults
            .iter_mut()
            .flat_map(|fault| [&mut fault.from, &mut fault.to])
            .for_each(since);
        self.samples
            .iter_mut()
            .flat_map(|sample| [&mut sample.from, &mut sample.to])
            .for_each(since);
        self.killed.iter_mut().for_each(|(_, at)| since(at));
        self
    }

    /// Writes everything into one file.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let mut all: Vec<(Nanos, Value)> = self
            .lines
            .iter()
            .map(|line| (line.at, line.to_json()))
            .collect();
        all.extend(self.faults.iter().map(|fault| {
            let Fault { from, to, kind, slot, met } = fault;
            (*from, json!({ "at": from, "to": to, "event": "fault", "kind": kind, "slot": slot, "met": met }))
        }));
        all.extend(self.samples.iter().map(|sample| {
            let held = sample
                .held
                .iter()
                .map(|key| json!([key.lock, key.owner, key.count, key.pttl]));
            let held: Vec<_> = held.collect();
            (
                sample.from,
                json!({ "at": sample.from, "to": sample.to, "event": "server", "held": held }),
            )
        }));
        all.extend(self.killed.iter().map(|(process, at)| {
            (
                *at,
                json!({ "at": at, "event": "killed", "process": process }),
            )
        }));
        all.sort_by_key(|(at, _)| *at);
        all.extend(
            self.left
                .iter()
                .map(|left| (Nanos::MAX, json!({ "event": "left", "why": left }))),
        );
        let mut file = io::BufWriter::new(File::create(path)?);
        for (_, value) in all {
            writeln!(file, "{value}")?;
        }
        file.flush()
    }

    /// Reads what [`write`](Self::write) has written.
    pub fn reread(path: &Path) -> io::Result<Self> {
        let mut history = Self::default();
        for line in BufReader::new(File::open(path)?).lines() {
            let (line, wrong) = (line?, || io::Error::from(io::ErrorKind::InvalidData));
            let value: Value = serde_json::from_str(&line)?;
            match value["event"].as_str() {
                Some("fault") => history.faults.push(fault(&value).ok_or_else(wrong)?),
                Some("server") => history.samples.push(sample(&value).ok_or_else(wrong)?),
                Some("killed") => history.killed.push(killed(&value).ok_or_else(wrong)?),
                Some("left") => history
                    .left
                    .push(value["why"].as_str().ok_or_else(wrong)?.to_owned()),
                _ => history
                    .lines
                    .push(Line::from_json(&line).ok_or_else(wrong)?),
            }
        }
        Ok(history)
    }
}

fn fault(value: &Value) -> Option<Fault> {
    Some(Fault {
        from: value["at"].as_u64()?,
        to: value["to"].as_u64()?,
        kind: value["kind"].as_str()?.to_owned(),
        slot: value["slot"].as_u64(),
        met: value["met"].as_bool()?,
    })
}

fn sample(value: &Value) -> Option<Sample> {
    let key = |key: &Value| {
        let (lock, owner) = (key[0].as_u64()? as usize, key[1].as_str()?.to_owned());
        Some(Key {
            lock,
            owner,
            count: key[2].as_u64()?,
            pttl: key[3].as_i64()?,
        })
    };
    let held = value["held"]
        .as_array()?
        .iter()
        .map(key)
        .collect::<Option<_>>()?;
    Some(Sample {
        from: value["at"].as_u64()?,
        to: value["to"].as_u64()?,
        held,
    })
}

fn killed(value: &Value) -> Option<(u64, Nanos)> {
    Some((value["process"].as_u64()?, value["at"].as_u64()?))
}

#[test]
fn recorder_killed_while_writing_leaves_readable_events() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("history");
    let events = [
        Event::Invoked {
            lock: 1,
            owner: "a:1".into(),
            how: "lock".into(),
            lease: 5,
            renewed: true,
        },
        Event::Granted { remaining: 4 },
        Event::Failed {
            why: "contended".into(),
        },
        Event::Unknown {
            why: "no \"answer\"".into(),
        },
        Event::TakenBack {
            why: "expired".into(),
        },
        Event::Cancelled,
        Event::Sure { remaining: 3 },
        Event::Lost {
            reason: "expired".into(),
        },
        Event::Releasing { how: "drop".into() },
        Event::Released {
            outcome: "ok".into(),
        },
        Event::Count {
            expected: 2,
            found: 1,
        },
        Event::SectionBegan,
        Event::SectionEnded {
            read: 7,
            proven: true,
        },
        Event::Worked,
        Event::Forcing { lock: 1 },
        Event::Forced {
            outcome: "freed".into(),
        },
        Event::Panicked {
            why: "at a line".into(),
        },
        Event::Ended {
            tasks: 0,
            shutdown: "ok".into(),
        },
    ];
    let recorder = Recorder::open(&path, 102);
    let attempt = recorder.attempt();
    for (at, event) in events.iter().enumerate() {
        recorder.record(at as Nanos, attempt, event.clone());
    }
    // A process that is killed while it writes leaves an incomplete line.
    (&recorder.file).write_all(b"{\"at\":1").unwrap();
    let mut history = History::default();
    history.read(&path).unwrap();
    let read: Vec<_> = history
        .lines
        .iter()
        .map(|line| line.event.clone())
        .collect();
    assert_eq!(read, events);
    assert!(
        history
            .lines
            .iter()
            .all(|line| line.process == 102 && line.attempt == attempt)
    );
}

#[test]
fn history_written_and_reread_is_the_same() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("history");
    let key = Key {
        lock: 2,
        owner: "a:1".into(),
        count: 3,
        pttl: -1,
    };
    let history = History {
        lines: vec![Line {
            at: 5,
            process: 102,
            attempt: 1,
            event: Event::Granted { remaining: 4 },
        }],
        faults: vec![
            Fault {
                from: 1,
                to: 2,
                kind: NO_PUBLISH.into(),
                slot: Some(2),
                met: true,
            },
            Fault {
                from: 3,
                to: 4,
                kind: "CLIENT PAUSE".into(),
                slot: None,
                met: false,
            },
        ],
        samples: vec![
            Sample {
                from: 6,
                to: 7,
                held: Vec::new(),
            },
            Sample {
                from: 8,
                to: 9,
                held: vec![key],
            },
        ],
        killed: vec![(102, 10)],
        left: vec!["a \"key\"".into()],
    };
    history.write(&path).unwrap();
    assert_eq!(History::reread(&path).unwrap(), history);
}
