//! Duration of a whole run at its bound, and the bytes that it writes to its drives.

use std::fmt;

use offload_support::units::CountOf;
use serde::Serialize;

use super::Plan;
use super::figures::Digits;

const DAY_S: f64 = 86400.0;

/// The whole run with the shortest possible steps. A real run takes longer and writes less in a day.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Outlook {
    pub steps: u64,
    /// Tokens of all steps.
    pub tokens: u64,
    /// Passes over the training data, if its length is known.
    pub epochs: Option<f64>,
    pub run_s: f64,
    /// Bytes written to all devices together in the whole run.
    pub run_written_bytes: f64,
    /// Bytes written to all devices together in a day.
    pub written_bytes_per_day: f64,
    pub drives_count: u64,
    /// Seconds until each drive has reached its rated endurance, if that was given and anything is written.
    pub rating_s: Option<f64>,
}

impl Outlook {
    pub(super) fn new(plan: &Plan) -> Self {
        let steps = plan.steps as f64;
        let written_bytes = plan.node_bytes.all_written_bytes();
        let written_bytes_per_s = written_bytes / plan.bound.s;
        let drives_count = plan.hardware.drives_count;
        let rating = plan.hardware.drive_rating_bytes;
        let rating_s = rating
            .filter(|_| written_bytes_per_s > 0.0)
            .map(|bytes| bytes as f64 * drives_count as f64 / written_bytes_per_s);
        Self {
            steps: plan.steps,
            tokens: plan.steps.saturating_mul(plan.tokens),
            epochs: plan.epochs,
            run_s: steps * plan.bound.s,
            run_written_bytes: steps * written_bytes,
            written_bytes_per_day: written_bytes_per_s * DAY_S,
            drives_count,
            rating_s,
        }
    }
}

impl fmt::Display for Outlook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "time      about {} for {}, {} tokens",
            Span(self.run_s),
            CountOf(self.steps, "step"),
            PrefixedNumber(self.tokens as f64)
        )?;
        if let Some(epochs) = self.epochs {
            write!(f, ", {epochs:.2} epochs")?;
        }
        if self.run_written_bytes == 0.0 {
            return Ok(());
        }
        write!(
            f,
            "\nwear      at most {} TB written in a day, {} TB in total",
            Digits(self.written_bytes_per_day / 1e12),
            Digits(self.run_written_bytes / 1e12)
        )?;
        if self.drives_count > 1 {
            write!(f, ", over {} drives", self.drives_count)?;
        }
        match self.rating_s {
            Some(s) => write!(f, "; their rated endurance lasts {}", Span(s)),
            None => Ok(()),
        }
    }
}

/// Time in its natural unit.
pub(super) struct Span(pub(super) f64);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit_s, unit) = match self.0 {
            s if s < 120.0 => (1.0, "s"),
            s if s < 7200.0 => (60.0, "min"),
            s if s < 2.0 * DAY_S => (3600.0, "h"),
            _ => (DAY_S, "days"),
        };
        write!(f, "{} {unit}", Digits(self.0 / unit_s))
    }
}

/// Large number with a unit prefix.
pub(super) struct PrefixedNumber(pub(super) f64);

impl fmt::Display for PrefixedNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (factor, unit) = match self.0 {
            n if n < 1e4 => return write!(f, "{n:.0}"),
            n if n < 1e6 => (1e3, "K"),
            n if n < 1e9 => (1e6, "M"),
            n if n < 1e12 => (1e9, "G"),
            _ => (1e12, "T"),
        };
        write!(f, "{} {unit}", Digits(self.0 / factor))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_counts_are_shown_in_natural_units() {
        let span = |s: f64| Span(s).to_string();
        assert_eq!(
            [span(90.0), span(600.0), span(36000.0), span(864000.0)],
            ["90.0 s", "10.0 min", "10.0 h", "10.0 days"]
        );
        let count = |n: f64| PrefixedNumber(n).to_string();
        assert_eq!(
            [count(900.0), count(16384.0), count(3e9)],
            ["900", "16.4 K", "3.00 G"]
        );
    }
}
