//! Work that may take long, told while it goes on: how much of it is done and how long the rest takes.
//!
//! What is over within two seconds says nothing. After that a line comes on stderr every ten seconds, on a terminal a bar:
//! stdout is for results.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::say_beside;
use crate::store::Gib;

/// Nobody wonders before that.
const QUIET: Duration = Duration::from_secs(2);

/// Between two lines, where nobody sees a bar.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

/// A piece of work whose bytes are known.
pub(crate) struct LongWork {
    what: String,
    total_bytes: u64,
    done_bytes: u64,
    started: Instant,
    /// When the next line is due, counted from the start.
    next_line: Duration,
    bar: Option<ProgressBar>,
    /// Whether there is somebody to tell.
    told: bool,
}

impl LongWork {
    /// `what` is done to `total_bytes`, as in "reading the checkpoint". Nothing is said unless `told`: of several ranks one speaks.
    pub(crate) fn new(what: &str, total_bytes: u64, told: bool) -> Self {
        Self {
            what: what.to_owned(),
            total_bytes,
            done_bytes: 0,
            started: Instant::now(),
            next_line: QUIET,
            bar: None,
            told,
        }
    }

    /// So many bytes more are done.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.done_bytes += bytes;
        let elapsed = self.started.elapsed();
        if !self.told || elapsed < QUIET {
            return;
        }
        if std::io::stderr().is_terminal() {
            self.show_bar();
        } else if let Some(line) = self.line(elapsed) {
            say_beside!("{line}");
        }
    }

    /// The line that is due after `elapsed`, if one is.
    fn line(&mut self, elapsed: Duration) -> Option<String> {
        if elapsed < self.next_line {
            return None;
        }
        self.next_line = elapsed + BETWEEN_LINES;
        let share = self.done_bytes as f64 / self.total_bytes.max(1) as f64;
        let share = share.clamp(1e-6, 1.0);
        let left = elapsed.mul_f64((1.0 - share) / share);
        Some(format!(
            "{}: {:.0} % of {}, {} left",
            self.what,
            100.0 * share,
            Gib(self.total_bytes),
            clock(left)
        ))
    }

    fn show_bar(&mut self) {
        let (what, total_bytes, since) = (&self.what, self.total_bytes, self.started.elapsed());
        let bar = self.bar.get_or_insert_with(|| {
            let style =
                ProgressStyle::with_template("{msg} {bar:30} {bytes}/{total_bytes}, {eta} left");
            ProgressBar::new(total_bytes)
                .with_style(style.expect("the template is right"))
                .with_message(what.clone())
                .with_elapsed(since)
        });
        bar.set_position(self.done_bytes);
    }
}

impl Drop for LongWork {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Hours, minutes, seconds, without leading zeros.
pub(crate) fn clock(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..60 => format!("{seconds}s"),
        seconds @ 60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        seconds => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_read_as_people_say_them() {
        let text = |seconds| clock(Duration::from_secs(seconds));
        assert_eq!([text(5), text(65), text(3725)], ["5s", "1m05s", "1h02m"]);
    }

    #[test]
    fn a_line_comes_after_two_seconds_and_then_every_ten() {
        let mut work = LongWork::new("reading the checkpoint", 4 << 30, false);
        let mut line_at = |seconds: f64, done_bytes| {
            work.done_bytes = done_bytes;
            work.line(Duration::from_secs_f64(seconds))
        };
        assert_eq!(line_at(1.9, 1), None);
        let said = line_at(2.5, 1 << 30).unwrap();
        assert_eq!(said, "reading the checkpoint: 25 % of 4.0 GiB, 7s left");
        assert_eq!(line_at(12.0, 2 << 30), None);
        let said = line_at(12.5, 4 << 30).unwrap();
        assert_eq!(said, "reading the checkpoint: 100 % of 4.0 GiB, 0s left");
    }

    #[test]
    fn nothing_done_and_nothing_to_do_are_no_special_cases() {
        let mut none_yet = LongWork::new("x", 100, false);
        assert!(
            none_yet
                .line(Duration::from_secs(5))
                .unwrap()
                .contains("0 %")
        );
        let mut nothing = LongWork::new("x", 0, false);
        assert!(nothing.line(Duration::from_secs(5)).is_some());
    }
}
