//! The reports of a worker to the demo: one line each on the worker's standard output.

use std::io::Write;
use std::time::Duration;

/// One report.
pub enum Report {
    /// The worker is connected with this client id, and waits for the start.
    Ready(String),
    /// A buyer acquired the lock after this time.
    Waited(Duration),
    /// A buyer's hold count on the server, inside a function that has re-entered the lock.
    HoldCount(u64),
    /// The worker to be killed holds the lock and has stopped.
    Holding,
    /// A buyer failed and tries again, or the worker failed.
    Error(String),
    /// All buyers have finished.
    Done,
}

impl Report {
    /// Writes the report unbuffered, so that no report is missing when the worker is killed. Ends
    /// the process if the demo does not read any more.
    pub fn send(self) {
        let line = match self {
            Self::Ready(client) => format!("ready {client}\n"),
            Self::Waited(wait) => format!("waited {}\n", wait.as_micros()),
            Self::HoldCount(count) => format!("hold-count {count}\n"),
            Self::Holding => "holding\n".to_owned(),
            Self::Error(text) => format!("error {}\n", text.replace('\n', " ")),
            Self::Done => "done\n".to_owned(),
        };
        let mut out = std::io::stdout().lock();
        if out
            .write_all(line.as_bytes())
            .and_then(|()| out.flush())
            .is_err()
        {
            std::process::exit(1);
        }
    }

    pub fn parse(line: &str) -> Option<Self> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        Some(match word {
            "ready" => Self::Ready(rest.to_owned()),
            "waited" => Self::Waited(Duration::from_micros(rest.parse().ok()?)),
            "hold-count" => Self::HoldCount(rest.parse().ok()?),
            "holding" => Self::Holding,
            "error" => Self::Error(rest.to_owned()),
            "done" => Self::Done,
            _ => return None,
        })
    }
}
