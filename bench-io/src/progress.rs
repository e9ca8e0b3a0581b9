//! A status line on a terminal.

use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};
use offload_support::units::ApproxRate;

/// The status line. Dropping it clears the line.
pub(crate) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    pub(crate) fn new() -> Self {
        let style = ProgressStyle::with_template("{spinner} {msg}").expect("a fixed template");
        Self {
            bar: ProgressBar::new_spinner().with_style(style),
        }
    }

    /// Shows an activity without a rate.
    pub(crate) fn say(&self, what: &str) {
        self.bar.set_message(what.to_owned());
        self.bar.tick();
    }

    /// Shows an activity with its rates so far and the remaining time.
    pub(crate) fn show(&self, what: &str, bytes: [u64; 2], start: Instant, end: Option<Instant>) {
        let now = Instant::now();
        let seconds = now.saturating_duration_since(start).as_secs_f64().max(0.1);
        let rate = |bytes: u64| ApproxRate(bytes as f64 / seconds);
        let [read, write] = bytes;
        let rates = match (read, write) {
            (_, 0) => format!("read {}", rate(read)),
            (0, _) => format!("write {}", rate(write)),
            _ => format!("read {}, write {}", rate(read), rate(write)),
        };
        let left = end.map_or_else(String::new, |end| {
            let left = end.saturating_duration_since(now).as_secs_f64();
            format!(", {left:.0} s left")
        });
        self.bar.set_message(format!("{what}: {rates}{left}"));
        self.bar.tick();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
