//! Progress of work that takes long: how much is done, and how long the rest will take.
//!
//! Work that ends within two seconds shows nothing. After that a person sees a bar on a terminal's stderr, or a line there
//! every ten seconds. A service gets the lines for its log.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::errln;
use crate::units::{ApproxBytes, ApproxTime};

/// Work that ends earlier shows nothing.
const QUIET: Duration = Duration::from_secs(2);

const BETWEEN_LINES: Duration = Duration::from_secs(10);

/// Reader of the progress messages.
#[derive(Clone, Copy, Debug)]
pub enum Audience {
    /// The person who started the program: a bar or lines on stderr.
    Person,
    /// A service: lines, each passed to this function.
    Service(fn(&str)),
    /// Nobody: a program reads the result.
    Nobody,
}

/// Unit of the counted work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, shown as a size.
    Bytes,
    /// Jobs.
    Jobs,
}

/// One piece of work. Dropping it removes the bar.
#[derive(Debug)]
pub struct Progress {
    what: String,
    unit: Unit,
    audience: Audience,
    done: u64,
    total: u64,
    started: Instant,
    /// When the next line is due, counted from the start.
    next_line: Duration,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Begins work called `what`, such as "verifying".
    pub fn new(what: impl Into<String>, unit: Unit, audience: Audience) -> Self {
        Self {
            what: what.into(),
            unit,
            audience,
            done: 0,
            total: 0,
            started: Instant::now(),
            next_line: QUIET,
            bar: None,
        }
    }

    /// Sets the total, for work that counts with [`Progress::add`].
    pub fn with_total(mut self, total: u64) -> Self {
        self.total = total;
        self
    }

    /// Counts `more` as done.
    pub fn add(&mut self, more: u64) {
        self.set(self.done + more, self.total);
    }

    /// Sets what is done, and the total where it has changed.
    pub fn set(&mut self, done: u64, total: u64) {
        (self.done, self.total) = (done, total);
        let elapsed = self.started.elapsed();
        if elapsed < QUIET {
            return;
        }
        match self.audience {
            Audience::Nobody => {}
            Audience::Person if std::io::stderr().is_terminal() => self.show_bar(),
            Audience::Person => {
                if let Some(line) = self.line(elapsed) {
                    errln!("{line}");
                }
            }
            Audience::Service(tell) => {
                if let Some(line) = self.line(elapsed) {
                    tell(&line);
                }
            }
        }
    }

    /// The line that is due after `elapsed`, if one is.
    fn line(&mut self, elapsed: Duration) -> Option<String> {
        if elapsed < self.next_line {
            return None;
        }
        self.next_line = elapsed + BETWEEN_LINES;
        let fraction = (self.done as f64 / self.total.max(1) as f64).clamp(1e-6, 1.0);
        let left = elapsed.mul_f64((1.0 - fraction) / fraction);
        let total = match self.unit {
            Unit::Bytes => ApproxBytes(self.total).to_string(),
            Unit::Jobs => format!("{} jobs", self.total),
        };
        Some(format!(
            "{}: {:.0} % of {total}, {} left",
            self.what,
            100.0 * fraction,
            ApproxTime(left)
        ))
    }

    fn show_bar(&mut self) {
        let (what, unit, total, since) =
            (&self.what, self.unit, self.total, self.started.elapsed());
        let bar = self.bar.get_or_insert_with(|| {
            let style = match unit {
                Unit::Bytes => "{msg} {bar:30} {bytes}/{total_bytes}, {eta} left",
                Unit::Jobs => "{msg} {bar:30} {pos}/{len} jobs, {eta} left",
            };
            let style = ProgressStyle::with_template(style).expect("the template is valid");
            ProgressBar::new(total)
                .with_style(style)
                .with_message(what.clone())
                .with_elapsed(since)
        });
        bar.set_length(total);
        bar.set_position(self.done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line_at(work: &mut Progress, seconds: f64, done: u64) -> Option<String> {
        work.done = done;
        work.line(Duration::from_secs_f64(seconds))
    }

    #[test]
    fn a_line_comes_after_two_seconds_and_then_every_ten() {
        let work =
            &mut Progress::new("verifying", Unit::Bytes, Audience::Nobody).with_total(4 << 30);
        assert_eq!(line_at(work, 1.9, 1), None);
        let line = line_at(work, 2.5, 1 << 30).unwrap();
        assert_eq!(line, "verifying: 25 % of 4.0 GiB, 7s left");
        assert_eq!(line_at(work, 12.0, 2 << 30), None);
        let line = line_at(work, 12.5, 4 << 30).unwrap();
        assert_eq!(line, "verifying: 100 % of 4.0 GiB, 0s left");
    }

    #[test]
    fn jobs_are_counted_and_an_empty_total_is_no_special_case() {
        let line = |done, total| {
            let mut work =
                Progress::new("recovering", Unit::Jobs, Audience::Nobody).with_total(total);
            line_at(&mut work, 3.0, done).unwrap()
        };
        assert_eq!(line(10, 40), "recovering: 25 % of 40 jobs, 9s left");
        assert!(line(0, 0).contains("of 0 jobs"));
        assert!(line(0, 40).contains("0 %"));
    }

    #[test]
    fn adding_counts_up_to_the_total() {
        let mut work = Progress::new("reading", Unit::Bytes, Audience::Nobody).with_total(100);
        work.add(30);
        work.add(20);
        assert_eq!((work.done, work.total), (50, 100));
    }
}
