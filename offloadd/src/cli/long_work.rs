//! Work that may take long, told while it goes on: how much of it is done and how long the rest takes.
//!
//! What is over within two seconds says nothing. After that a person sees a bar on a terminal's stderr, or a line there
//! every ten seconds; a service says the lines in its log, and its manager shows the newest as its status.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::binary;
use super::service_manager::say_progress;

/// Nobody wonders before that.
const QUIET: Duration = Duration::from_secs(2);

/// Between two lines, where nobody sees a bar.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

/// Who is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listener {
    /// Who started the program.
    Person,
    /// The log, and systemd.
    Service,
    /// A program reads the result.
    Nobody,
}

/// What is counted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unit {
    Bytes,
    Jobs,
}

/// One piece of work.
pub(crate) struct LongWork {
    what: String,
    unit: Unit,
    listener: Listener,
    started: Instant,
    /// When the next line is due, counted from the start.
    next_line: Duration,
    bar: Option<ProgressBar>,
}

impl LongWork {
    /// `what` is done, as in "verifying".
    pub(crate) fn new(what: impl Into<String>, unit: Unit, listener: Listener) -> Self {
        Self {
            what: what.into(),
            unit,
            listener,
            started: Instant::now(),
            next_line: QUIET,
            bar: None,
        }
    }

    /// So much of it is done.
    pub(crate) fn at(&mut self, done: u64, total: u64) {
        let elapsed = self.started.elapsed();
        if elapsed < QUIET {
            return;
        }
        let terminal = std::io::stderr().is_terminal();
        match self.listener {
            Listener::Nobody => {}
            Listener::Person if terminal => self.show_bar(done, total),
            Listener::Person => {
                if let Some(line) = self.line(elapsed, done, total) {
                    eprintln!("{line}");
                }
            }
            Listener::Service => {
                if let Some(line) = self.line(elapsed, done, total) {
                    tracing::info!("{line}");
                    say_progress(&line);
                }
            }
        }
    }

    /// The line that is due after `elapsed`, if one is.
    fn line(&mut self, elapsed: Duration, done: u64, total: u64) -> Option<String> {
        if elapsed < self.next_line {
            return None;
        }
        self.next_line = elapsed + BETWEEN_LINES;
        let share = (done as f64 / total.max(1) as f64).clamp(1e-6, 1.0);
        let left = elapsed.mul_f64((1.0 - share) / share);
        let total = match self.unit {
            Unit::Bytes => binary(total),
            Unit::Jobs => format!("{total} jobs"),
        };
        Some(format!(
            "{}: {:.0} % of {total}, {} left",
            self.what,
            100.0 * share,
            clock(left)
        ))
    }

    fn show_bar(&mut self, done: u64, total: u64) {
        let (what, unit, since) = (&self.what, self.unit, self.started.elapsed());
        let bar = self.bar.get_or_insert_with(|| {
            let style = match unit {
                Unit::Bytes => "{msg} {bar:30} {bytes}/{total_bytes}, {eta} left",
                Unit::Jobs => "{msg} {bar:30} {pos}/{len} jobs, {eta} left",
            };
            let style = ProgressStyle::with_template(style).expect("the template is right");
            ProgressBar::new(total)
                .with_style(style)
                .with_message(what.clone())
                .with_elapsed(since)
        });
        bar.set_position(done);
    }
}

impl Drop for LongWork {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Days, hours, minutes, seconds: the two that matter.
pub(crate) fn clock(time: Duration) -> String {
    match time.as_secs() {
        s @ 0..60 => format!("{s}s"),
        s @ 60..3600 => format!("{}m{:02}s", s / 60, s % 60),
        s @ 3600..86400 => format!("{}h{:02}m", s / 3600, s / 60 % 60),
        s => format!("{}d{:02}h", s / 86400, s / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_comes_after_two_seconds_and_then_every_ten() {
        let mut work = LongWork::new("verifying", Unit::Bytes, Listener::Nobody);
        let mut line_at =
            |seconds, done| work.line(Duration::from_secs_f64(seconds), done, 4 << 30);
        assert_eq!(line_at(1.9, 1), None);
        let said = line_at(2.5, 1 << 30).unwrap();
        assert_eq!(said, "verifying: 25 % of 4.0 GiB, 7s left");
        assert_eq!(line_at(12.0, 2 << 30), None);
        let said = line_at(12.5, 4 << 30).unwrap();
        assert_eq!(said, "verifying: 100 % of 4.0 GiB, 0s left");
    }

    #[test]
    fn jobs_are_counted_and_nothing_to_do_is_no_special_case() {
        let line = |done, total| {
            let mut work = LongWork::new("recovering", Unit::Jobs, Listener::Nobody);
            work.line(Duration::from_secs(3), done, total).unwrap()
        };
        assert_eq!(line(10, 40), "recovering: 25 % of 40 jobs, 9s left");
        assert!(line(0, 0).contains("of 0 jobs"));
        assert!(line(0, 40).contains("0 %"));
    }

    #[test]
    fn times_show_the_two_parts_that_matter() {
        let text = |seconds| clock(Duration::from_secs(seconds));
        let shown = [text(5), text(65), text(3725), text(90_000)];
        assert_eq!(shown, ["5s", "1m05s", "1h02m", "1d01h"]);
    }
}
