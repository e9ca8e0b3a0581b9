//! The log of a program whose output people read: warnings and errors as lines like its others, `warning: ...` and `error: ...`. With `RUST_LOG`
//! set, all events with their times, for who looks for a fault.
//!
//! Equal lines are counted: the first is written, then the second, the fourth, the eighth and so on, with their number. A full disk can cause one at
//! every checkpoint of a long run.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Mutex;

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::{console, errln};

/// Limit of different lines that are counted; with more, counting begins anew.
const LINES_MAX: usize = 256;

/// Installs the log, once.
pub fn install() {
    if let Ok(filter) = EnvFilter::try_from_default_env() {
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(console::in_colour(&std::io::stderr()))
            // Logging an internal error would panic when the reader of standard error is gone.
            .log_internal_errors(false)
            .init();
    } else {
        let lines = Lines::default().with_filter(LevelFilter::WARN);
        tracing_subscriber::registry().with(lines).init();
    }
}

/// Number of times that each line was asked for.
#[derive(Default)]
struct Lines(Mutex<HashMap<String, u64>>);

impl Lines {
    /// Returns what to write for a line: it, with its number from the second on, or nothing.
    fn next(&self, line: String) -> Option<String> {
        let mut counts = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if counts.len() >= LINES_MAX && !counts.contains_key(&line) {
            counts.clear();
        }
        let count = counts.entry(line.clone()).or_default();
        *count += 1;
        match *count {
            1 => Some(line),
            count if count.is_power_of_two() => Some(format!("{line} ({count} times so far)")),
            _ => None,
        }
    }
}

impl<S: Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut line = match *event.metadata().level() {
            Level::ERROR => String::from("error:"),
            _ => String::from("warning:"),
        };
        event.record(&mut Text(&mut line));
        if let Some(line) = self.next(line) {
            errln!("{line}");
        }
    }
}

/// Appends fields to a line.
struct Text<'a>(&'a mut String);

impl Visit for Text<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a String cannot fail.
        let _ = match field.name() {
            "message" => write!(self.0, " {value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thirty_eight_equal_lines_are_six_and_others_are_not_held_back() {
        let lines = Lines::default();
        let written: Vec<String> = (0..38)
            .filter_map(|_| lines.next("error: full".into()))
            .collect();
        assert_eq!(
            written[..2],
            ["error: full", "error: full (2 times so far)"].map(String::from)
        );
        assert_eq!(written.len(), 6, "{written:?}");
        for number in 0..2 * LINES_MAX {
            assert!(lines.next(format!("error: {number}")).is_some());
        }
        assert!(lines.0.lock().unwrap().len() <= LINES_MAX);
    }
}
