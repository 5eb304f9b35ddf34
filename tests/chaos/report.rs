//! The figures of a run, and the files that it leaves.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::attempts::{Analysis, Attempt, stalls};
use super::history::{Event, History, Line, Nanos};
use super::run::Verdict;

/// A run's figures.
pub struct Figures {
    pub counts: Counts,
    rows: Vec<(String, String)>,
}

/// How often the events happened that the rules are about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    pub grants: usize,
    /// Operations with an unknown outcome.
    pub unknown: usize,
    /// Guarded sections that were sure of their lock.
    pub sections: usize,
    /// Looks at the server.
    pub looks: usize,
}

impl Counts {
    /// How often these have to happen in a minute for the run to show anything.
    const A_MINUTE: Self = Self {
        grants: 300,
        unknown: 6,
        sections: 60,
        looks: 600,
    };

    /// The events of which there were too few in that many seconds. In a short run only grants
    /// count: faults may take most of its time.
    pub fn too_few(self, seconds: u64) -> Vec<String> {
        let Self {
            grants,
            unknown,
            sections,
            looks,
        } = Self::A_MINUTE;
        let rows = [
            ("grants", self.grants, grants),
            ("unknown outcomes", self.unknown, unknown),
            ("guarded sections", self.sections, sections),
            ("looks at the server", self.looks, looks),
        ];
        let asked = if seconds < 60 { 1 } else { rows.len() };
        let few = rows
            .into_iter()
            .take(asked)
            .filter(|(_, is, minute)| is * 60 < minute * seconds as usize);
        few.map(|(name, is, minute)| {
            format!("only {is} {name} in {seconds} s, and {minute} a minute are required")
        })
        .collect()
    }
}

impl Figures {
    pub fn new(seed: u64, seconds: u64, verdict: &Verdict) -> Self {
        let Verdict {
            history,
            violations,
            ..
        } = verdict;
        let analysis = Analysis::new(history);
        let count = |wanted: fn(&Event) -> bool| {
            history
                .lines
                .iter()
                .filter(|line| wanted(&line.event))
                .count()
        };
        let grants = count(|event| matches!(event, Event::Granted { .. }));
        let processes = analysis
            .attempts
            .iter()
            .map(|attempt| attempt.process)
            .collect::<HashSet<_>>();
        let mut rows = Vec::new();
        let mut row = |name: &str, value: String| rows.push((name.to_owned(), value));
        row("seed", seed.to_string());
        row("seconds", seconds.to_string());
        row(
            "processes",
            format!("{} ({} killed)", processes.len(), history.killed.len()),
        );
        row("grants", grants.to_string());
        row("grants/s", (grants as u64 / seconds.max(1)).to_string());
        row("re-entries", reentries(&analysis).to_string());
        row(
            "futures dropped by their callers",
            count(|event| matches!(event, Event::Cancelled)).to_string(),
        );
        let forced =
            count(|event| matches!(event, Event::Forced { outcome } if outcome == "freed"));
        row("locks freed by force", forced.to_string());
        row(
            "losses reported",
            analysis
                .attempts
                .iter()
                .filter(|attempt| attempt.lost.is_some())
                .count()
                .to_string(),
        );
        let by_server =
            |attempt: &&Attempt| attempt.lost.as_ref().is_some_and(|lost| !lost.expired);
        row(
            "of them by a reply of the server",
            analysis
                .attempts
                .iter()
                .filter(by_server)
                .count()
                .to_string(),
        );
        let acquires = count(|event| matches!(event, Event::Unknown { .. }));
        let unlocks =
            count(|event| matches!(event, Event::Released { outcome } if outcome == "unknown"));
        let forces =
            count(|event| matches!(event, Event::Forced { outcome } if outcome == "unknown"));
        let unknown = acquires + unlocks + forces;
        row("unknown outcomes", unknown.to_string());
        row(
            "of acquires, unlocks, by force",
            format!("{acquires}, {unlocks}, {forces}"),
        );
        let sections = count(|event| matches!(event, Event::SectionEnded { proven: true, .. }));
        let looks = history.samples.len();
        row("guarded sections", sections.to_string());
        row("looks at the server", looks.to_string());
        row(
            "of them at a lock passed on",
            passed_on(&analysis).to_string(),
        );
        for (kind, number) in kinds(history) {
            row(&kind, number.to_string());
        }
        let stalls = stalls(history).len();
        row("unplanned: no look answered", stalls.to_string());
        row("violations", violations.len().to_string());
        Self {
            counts: Counts {
                grants,
                unknown,
                sections,
                looks,
            },
            rows,
        }
    }

    pub fn print(&self, seed: u64, seconds: u64) {
        println!();
        for (name, value) in &self.rows {
            println!("{name:<34} {value:>16}");
        }
        println!(
            "the same seed and seconds reproduce the fault schedule: make chaos CHAOS_SECONDS={seconds} CHAOS_SEED={seed}"
        );
    }
}

fn kinds(history: &History) -> BTreeMap<String, usize> {
    let mut kinds = BTreeMap::new();
    for fault in &history.faults {
        let met = if fault.met { "" } else { ": without effect" };
        *kinds
            .entry(format!("fault: {}{met}", fault.kind))
            .or_default() += 1;
    }
    kinds
}

/// Looks that show another owner of the client than the one that was sure of the lock.
fn passed_on(analysis: &Analysis) -> usize {
    let shows = |attempt: &Attempt| {
        let (from, to) = attempt.sure().unwrap_or_default();
        let looks = &analysis.history.samples;
        let first = looks.partition_point(|look| look.from < from);
        let during = looks[first..].iter().take_while(move |look| look.to <= to);
        let (lock, owner) = (attempt.lock, attempt.owner.clone());
        let client = attempt.field.clone();
        during
            .filter(move |look| {
                let mut keys = look.held.iter().filter(|key| key.lock == lock);
                keys.any(|key| key.owner != owner && key.owner.starts_with(&client))
            })
            .count()
    };
    let passing = analysis
        .attempts
        .iter()
        .filter(|attempt| attempt.field != attempt.owner);
    passing.map(shows).sum()
}

/// Grants to an owner that had the lock already.
fn reentries(analysis: &Analysis) -> usize {
    let mut held_until: HashMap<(usize, &str), Nanos> = HashMap::new();
    let mut attempts: Vec<_> = analysis
        .attempts
        .iter()
        .filter(|attempt| attempt.granted.is_some())
        .collect();
    attempts.sort_by_key(|attempt| attempt.granted);
    let mut number = 0;
    for attempt in attempts {
        let ended = attempt
            .releasing
            .or(attempt.ended.map(|(at, _)| at))
            .unwrap_or(Nanos::MAX);
        let until = held_until
            .entry((attempt.lock, &attempt.owner))
            .or_default();
        number += usize::from(attempt.granted.is_some_and(|at| at < *until));
        *until = ended.max(*until);
    }
    number
}

/// The files that a run leaves.
pub struct Left {
    pub history: PathBuf,
    pub violations: PathBuf,
}

/// The message of a failed run, with the files that it leaves.
pub fn failure(what: &str, seed: u64, verdict: &Verdict) -> String {
    let Left {
        history,
        violations,
    } = keep(seed, verdict);
    format!(
        "{what}; the history is in {}, the violations are in {}",
        history.display(),
        violations.display()
    )
}

/// Writes the history and its violations into files of their own. They replace no files of an
/// earlier run with the same seed.
pub fn keep(seed: u64, verdict: &Verdict) -> Left {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("chaos");
    fs::create_dir_all(&folder).expect("a folder for histories");
    let mut numbers = (1..).map(|number| folder.join(format!("seed-{seed}.{number}.jsonl")));
    // The file is created at once: tests with the same seed may end at the same time.
    let created = |path: &PathBuf| match fs::File::create_new(path) {
        Ok(_) => true,
        Err(error) if error.kind() == ErrorKind::AlreadyExists => false,
        Err(error) => panic!("{}: {error}", path.display()),
    };
    let history = numbers.find(created).expect("a free number");
    verdict.history.write(&history).expect("the history");
    let list: String = verdict
        .violations
        .iter()
        .map(|violation| format!("{violation}\n"))
        .collect();
    let violations = history.with_extension("violations");
    fs::write(&violations, list).expect("the violations");
    Left {
        history,
        violations,
    }
}

#[test]
fn run_with_too_few_events_is_reported() {
    let enough = Counts {
        grants: 50,
        unknown: 0,
        sections: 0,
        looks: 0,
    };
    assert!(enough.too_few(10).is_empty());
    assert_eq!(
        enough.too_few(11),
        ["only 50 grants in 11 s, and 300 a minute are required"]
    );
    let enough = Counts {
        grants: 300,
        unknown: 6,
        sections: 60,
        looks: 600,
    };
    assert!(enough.too_few(60).is_empty());
    let few = [
        (
            Counts {
                grants: 299,
                ..enough
            },
            "only 299 grants in 60 s, and 300 a minute are required",
        ),
        (
            Counts {
                unknown: 5,
                ..enough
            },
            "only 5 unknown outcomes in 60 s, and 6 a minute are required",
        ),
        (
            Counts {
                sections: 0,
                ..enough
            },
            "only 0 guarded sections in 60 s, and 60 a minute are required",
        ),
        (
            Counts { looks: 0, ..enough },
            "only 0 looks at the server in 60 s, and 600 a minute are required",
        ),
    ];
    for (counts, why) in few {
        assert_eq!(counts.too_few(60), [why]);
    }
    assert_eq!(enough.too_few(61).len(), 4);
}

#[test]
fn histories_kept_at_once_have_files_of_their_own() {
    let line = Line {
        at: 0,
        process: 1,
        attempt: 1,
        event: Event::Worked,
    };
    // Long enough that the threads write at the same time.
    let verdict = Verdict {
        history: History {
            lines: vec![line; 1_000],
            ..History::default()
        },
        violations: Vec::new(),
    };
    let together = std::sync::Barrier::new(16);
    let keep = || {
        together.wait();
        keep(u64::MAX, &verdict)
    };
    let kept: Vec<Left> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..16).map(|_| scope.spawn(keep)).collect();
        let kept = threads.into_iter().map(std::thread::ScopedJoinHandle::join);
        kept.map(|left| left.expect("the files are written"))
            .collect()
    });
    let paths: HashSet<_> = kept.iter().map(|left| &left.history).collect();
    assert_eq!(paths.len(), 16);
    for left in &kept {
        fs::remove_file(&left.history).expect("the history");
        fs::remove_file(&left.violations).expect("the violations");
    }
}
