//! The progress line: rewritten in place on a terminal; elsewhere printed once a second.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

pub struct Progress {
    terminal: bool,
    drawn: Option<Instant>,
}

impl Progress {
    pub fn new() -> Self {
        Self {
            terminal: std::io::stdout().is_terminal(),
            drawn: None,
        }
    }

    pub fn has_color(&self) -> bool {
        self.terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
    }

    /// Prints the title of a sale.
    pub fn title(&mut self, text: &str) {
        let (bold, plain) = if self.has_color() {
            ("\x1b[1m", "\x1b[0m")
        } else {
            ("", "")
        };
        self.print(&format!("\n{bold}{text}{plain}"));
        self.drawn = None;
    }

    /// Shows the state, at most 10 times a second on a terminal and once a second elsewhere.
    pub fn draw(&mut self, state: impl FnOnce() -> String) {
        let every = Duration::from_millis(if self.terminal { 100 } else { 1000 });
        if self.drawn.is_some_and(|drawn| drawn.elapsed() < every) {
            return;
        }
        self.drawn = Some(Instant::now());
        if self.terminal {
            // Without line wrap, since a wrapped line cannot be rewritten.
            self.write(&format!("\r\x1b[K\x1b[?7l  {}\x1b[?7h", state()));
        } else {
            self.write(&format!("  {}\n", state()));
        }
    }

    /// Prints a permanent line.
    pub fn print(&mut self, text: &str) {
        self.clear();
        self.write(&format!("{text}\n"));
    }

    /// Prints a permanent, indented line about the sale.
    pub fn note(&mut self, text: &str) {
        self.print(&format!("  {text}"));
        // On a terminal the progress line is drawn again below the note at once.
        if self.terminal {
            self.drawn = None;
        }
    }

    /// Removes the progress line.
    pub fn clear(&mut self) {
        if self.terminal && self.drawn.take().is_some() {
            self.write("\r\x1b[K");
        }
    }

    fn write(&self, text: &str) {
        // An error means that the reader has closed the output; the exit status still counts.
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }
}

/// A bar that is full when `part` is `whole`.
pub fn bar(part: u64, whole: u64) -> String {
    const WIDTH: u64 = 24;
    let full = (part.min(whole) * WIDTH / whole.max(1)) as usize;
    format!(
        "[{}{}]",
        "#".repeat(full),
        ".".repeat(WIDTH as usize - full)
    )
}

/// A number with a comma before each group of three digits.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            text.push(',');
        }
        let _ = write!(text, "{digit}");
    }
    text
}

/// A number and a noun, in the plural if necessary.
pub fn plural(number: u64, one: &str) -> String {
    format!(
        "{} {one}{}",
        count(number),
        if number == 1 { "" } else { "s" }
    )
}

/// A duration in ms or s.
pub fn time(duration: Duration) -> String {
    let millis = duration.as_secs_f64() * 1e3;
    match millis {
        0.0..10.0 => format!("{millis:.1} ms"),
        10.0..1000.0 => format!("{millis:.0} ms"),
        _ => format!("{:.2} s", duration.as_secs_f64()),
    }
}
