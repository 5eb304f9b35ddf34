//! The live line: rewritten in place on a terminal, a plain line now and then elsewhere.

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

    /// Begins a sale.
    pub fn title(&mut self, text: &str) {
        let (bold, plain) = if self.has_color() {
            ("\x1b[1m", "\x1b[0m")
        } else {
            ("", "")
        };
        self.say(&format!("\n{bold}{text}{plain}"));
        self.drawn = None;
    }

    /// Shows the state, if the last one has been there for long enough.
    pub fn draw(&mut self, state: impl FnOnce() -> String) {
        let every = Duration::from_millis(if self.terminal { 100 } else { 1000 });
        if self.drawn.is_some_and(|drawn| drawn.elapsed() < every) {
            return;
        }
        self.drawn = Some(Instant::now());
        if self.terminal {
            // Without line wrap: a wrapped line could not be rewritten.
            self.write(&format!("\r\x1b[K\x1b[?7l  {}\x1b[?7h", state()));
        } else {
            self.write(&format!("  {}\n", state()));
        }
    }

    /// Prints text that stays, and ends the line.
    pub fn say(&mut self, text: &str) {
        self.clear();
        self.write(&format!("{text}\n"));
    }

    /// Prints a line about the sale that stays.
    pub fn note(&mut self, text: &str) {
        self.say(&format!("  {text}"));
        // On a terminal the state is shown again below the note at once.
        if self.terminal {
            self.drawn = None;
        }
    }

    /// Takes the live line away.
    pub fn clear(&mut self) {
        if self.terminal && self.drawn.take().is_some() {
            self.write("\r\x1b[K");
        }
    }

    fn write(&self, text: &str) {
        // An error means that nobody reads any more: the exit status still tells.
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

/// With a comma before each three digits.
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

/// A count of something.
pub fn plural(number: u64, one: &str) -> String {
    format!(
        "{} {one}{}",
        count(number),
        if number == 1 { "" } else { "s" }
    )
}

/// A time with a unit that suits it.
pub fn time(duration: Duration) -> String {
    let millis = duration.as_secs_f64() * 1e3;
    match millis {
        0.0..10.0 => format!("{millis:.1} ms"),
        10.0..1000.0 => format!("{millis:.0} ms"),
        _ => format!("{:.2} s", duration.as_secs_f64()),
    }
}
