//! What a worker tells the demo: one line each on its standard output.

use std::io::Write;
use std::time::Duration;

/// One line.
pub enum Report {
    /// Connected, with this client id; waits for the start.
    Ready(String),
    /// A buyer got the lock after this time.
    Waited(Duration),
    /// A buyer has this hold count inside a function that locked again, by the server's word.
    Depth(u64),
    /// The victim holds the lock and stands still.
    Holding,
    /// A buyer failed and tries again.
    Trouble(String),
    /// All buyers are done.
    Done,
}

impl Report {
    /// Written at once, so that nothing is missing when the worker is killed. Ends the process when
    /// nobody reads.
    pub fn send(self) {
        let line = match self {
            Self::Ready(client) => format!("ready {client}\n"),
            Self::Waited(wait) => format!("waited {}\n", wait.as_micros()),
            Self::Depth(count) => format!("depth {count}\n"),
            Self::Holding => "holding\n".to_owned(),
            Self::Trouble(text) => format!("trouble {}\n", text.replace('\n', " ")),
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
            "depth" => Self::Depth(rest.parse().ok()?),
            "holding" => Self::Holding,
            "trouble" => Self::Trouble(rest.to_owned()),
            "done" => Self::Done,
            _ => return None,
        })
    }
}
