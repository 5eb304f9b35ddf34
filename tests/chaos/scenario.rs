//! Histories for the tests of the judge, made by hand.

use super::history::{Event, Fault, History, Key, Line, MS, Nanos, Sample};
use super::judge::{Rule, judge};

/// The remaining lease of each key in each look, in milliseconds, unless a test sets another one.
const PTTL: i64 = 2_000;

/// A history whose times are given in milliseconds.
#[derive(Default)]
pub struct Scenario(pub History);

impl Scenario {
    /// Adds an event of a process.
    pub fn line(mut self, at: Nanos, process: u64, attempt: u64, event: Event) -> Self {
        self.0.lines.push(Line {
            at: at * MS,
            process,
            attempt,
            event,
        });
        self
    }

    /// Adds the begin of an acquire.
    pub fn invoked(self, at: Nanos, process: u64, attempt: u64) -> Self {
        self.line(at, process, attempt, invoked(process))
    }

    /// Adds an acquire that is granted at once, and whose owner is sure for two seconds.
    pub fn granted(self, at: Nanos, process: u64, attempt: u64) -> Self {
        let granted = Event::Granted {
            remaining: 2_000 * MS,
        };
        self.invoked(at - 5, process, attempt)
            .line(at, process, attempt, granted)
    }

    /// Makes all leases so far renewed ones.
    pub fn renewed(mut self) -> Self {
        for line in &mut self.0.lines {
            if let Event::Invoked { renewed, .. } = &mut line.event {
                *renewed = true;
            }
        }
        self
    }

    /// Adds an unlock.
    pub fn released(self, at: Nanos, process: u64, attempt: u64, outcome: &str) -> Self {
        self.line(
            at,
            process,
            attempt,
            Event::Releasing {
                how: "unlock".into(),
            },
        )
        .line(
            at + 5,
            process,
            attempt,
            Event::Released {
                outcome: outcome.into(),
            },
        )
    }

    /// Adds a fault that affected something.
    pub fn fault(mut self, from: Nanos, to: Nanos, kind: &str, slot: Option<u64>) -> Self {
        self.0.faults.push(Fault {
            from: from * MS,
            to: to * MS,
            kind: kind.into(),
            slot,
            met: true,
        });
        self
    }

    /// Adds a look every 10 ms from one time to the other, each showing these owners and hold
    /// counts.
    pub fn server(mut self, from: Nanos, to: Nanos, held: &[(u64, u64)]) -> Self {
        let key = |(process, count): &(u64, u64)| Key {
            lock: 0,
            owner: owner_of(*process),
            count: *count,
            pttl: PTTL,
        };
        for at in (from..to).step_by(10) {
            let held = held.iter().map(key).collect();
            self.0.samples.push(Sample {
                from: at * MS,
                to: (at + 1) * MS,
                held,
            });
        }
        self
    }

    /// Adds a guarded section.
    pub fn section(
        self,
        from: Nanos,
        to: Nanos,
        process: u64,
        attempt: u64,
        read: u64,
        proven: bool,
    ) -> Self {
        self.line(from, process, attempt, Event::SectionBegan).line(
            to,
            process,
            attempt,
            Event::SectionEnded { read, proven },
        )
    }

    /// Asserts that the judge finds violations of these rules, in this order.
    #[track_caller]
    pub fn breaks(self, rules: &[Rule]) {
        let violations = judge(&self.0);
        let mut found: Vec<_> = violations.iter().map(|violation| violation.rule).collect();
        found.dedup();
        assert_eq!(found, rules, "{violations:#?}");
    }
}

fn invoked(process: u64) -> Event {
    Event::Invoked {
        lock: 0,
        owner: owner_of(process),
        how: "lock".into(),
        lease: 2_000 * MS,
        renewed: false,
    }
}

pub fn owner_of(process: u64) -> String {
    format!("client-{process}:{process}")
}
