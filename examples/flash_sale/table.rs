//! The table that the demo prints at the end.

use std::fmt::Write;
use std::time::Duration;

use crate::progress::{count, time};
use crate::sale::Outcome;

const NONE: &str = "-";

/// The table: a row for each figure, a column for each sale, and notes below.
pub fn render(outcomes: &[Outcome], color: bool) -> String {
    let row = |name: &str, cell: &dyn Fn(&Outcome) -> String| {
        let mut cells = vec![name.to_owned()];
        cells.extend(outcomes.iter().map(cell));
        cells
    };
    let rows = [
        row("", &|o| o.protection.name().to_owned()),
        row("stock", &|o| count(o.stock)),
        row("sold", &|o| count(o.sold)),
        row("left", &|o| count(o.left)),
        row("oversold", &|o| count(o.oversold())),
        row("most orders for one item", &|o| count(o.most_for_one_item)),
        row("hold count, nested", &|o| {
            o.hold_count.map_or(NONE.to_owned(), count)
        }),
        row("workers killed", &|o| count(u64::from(o.killed.is_some()))),
        row("time", &|o| time(o.took)),
        row("orders/s", &|o| count(o.per_second(o.sold))),
        row("handovers/s", &|o| {
            if o.protection.locks() {
                count(o.per_second(o.handovers()))
            } else {
                NONE.into()
            }
        }),
        row("lock wait p50", &|o| {
            percentile(&o.waits, 50).map_or(NONE.to_owned(), time)
        }),
        row("lock wait p99", &|o| {
            percentile(&o.waits, 99).map_or(NONE.to_owned(), time)
        }),
    ];
    let columns = outcomes.len() + 1;
    let widths: Vec<usize> = (0..columns)
        .map(|at| rows.iter().map(|row| row[at].len()).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for (number, row) in rows.iter().enumerate() {
        let mut line = format!("  {:<width$}", row[0], width = widths[0]);
        for at in 1..columns {
            let cell = format!("{:>width$}", row[at], width = widths[at]);
            let cell = match (color, row[0].as_str(), row[at].as_str()) {
                (true, "oversold", "0") => format!("\x1b[32m{cell}\x1b[0m"),
                (true, "oversold", _) => format!("\x1b[31m{cell}\x1b[0m"),
                _ => cell,
            };
            let _ = write!(line, "   {cell}");
        }
        let _ = writeln!(text, "{line}");
        if number == 0 {
            let _ = writeln!(
                text,
                "  {}",
                "-".repeat(widths.iter().sum::<usize>() + 3 * (columns - 1))
            );
        }
    }
    for killed in outcomes
        .iter()
        .filter_map(|outcome| outcome.killed.as_ref())
    {
        let pause = time(killed.pause);
        let _ = writeln!(
            text,
            "\n  In the sale with the kill, time and waits include the pause of {pause} until the killed"
        );
        let _ = writeln!(
            text,
            "  worker's lease expired; orders/s and handovers/s do not include it."
        );
    }
    text
}

/// The time that this percentage of the waits does not exceed.
fn percentile(waits: &[Duration], percent: usize) -> Option<Duration> {
    let mut waits = waits.to_vec();
    waits.sort_unstable();
    waits
        .get((waits.len() * percent).div_ceil(100).checked_sub(1)?)
        .copied()
}
