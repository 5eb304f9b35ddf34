//! Histories made by hand.

use super::history::{Event, Fault, History, Key, Line, MS, Nanos, Sample};
use super::judge::{Rule, judge};

/// What the server tells of each key's expiry, in milliseconds, unless a test says otherwise.
const PTTL: i64 = 2_000;

/// A history in milliseconds, in which the server has what it is told to have.
#[derive(Default)]
pub struct Scenario(pub History);

impl Scenario {
    /// Something that a process says.
    pub fn line(mut self, at: Nanos, process: u64, attempt: u64, event: Event) -> Self {
        self.0.lines.push(Line {
            at: at * MS,
            process,
            attempt,
            event,
        });
        self
    }

    /// An acquire that begins.
    pub fn invoked(self, at: Nanos, process: u64, attempt: u64) -> Self {
        self.line(at, process, attempt, invoked(process))
    }

    /// An acquire that is granted at once, and sure for two seconds.
    pub fn granted(self, at: Nanos, process: u64, attempt: u64) -> Self {
        let granted = Event::Granted {
            remaining: 2_000 * MS,
        };
        self.invoked(at - 5, process, attempt)
            .line(at, process, attempt, granted)
    }

    /// The leases that were asked for until now are renewed.
    pub fn renewed(mut self) -> Self {
        for line in &mut self.0.lines {
            if let Event::Invoked { renewed, .. } = &mut line.event {
                *renewed = true;
            }
        }
        self
    }

    /// An unlock.
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

    /// A fault that was met.
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

    /// The server is asked every 10 ms from one time to the other, and answers that.
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

    /// A guarded section.
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

    /// What the judge has to find.
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
    format!("client:{process}")
}
