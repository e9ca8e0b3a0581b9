//! Measures how long this process has waited, without the time in which it was suspended (Ctrl-Z, a frozen container, a sleeping
//! machine). The other side of the wait may have been suspended too, and so could not make progress.

use std::time::{Duration, Instant};

/// Adds up the time between calls of [`Self::waited`]. A running process calls it at least once a second. A longer time between
/// two calls counts as [`Self::STEP_MAX`].
#[derive(Clone, Copy, Debug)]
pub struct WaitTimer {
    called_at: Instant,
    waited: Duration,
}

impl WaitTimer {
    /// Longest time that one call adds.
    pub const STEP_MAX: Duration = Duration::from_secs(1);

    /// Starts a timer at `now`.
    pub fn start(now: Instant) -> Self {
        Self {
            called_at: now,
            waited: Duration::ZERO,
        }
    }

    /// Returns the time waited until `now`.
    pub fn waited(&mut self, now: Instant) -> Duration {
        let step = now.saturating_duration_since(self.called_at);
        self.called_at = now;
        self.waited += step.min(Self::STEP_MAX);
        self.waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suspension_of_any_length_counts_as_one_step() {
        let mut now = Instant::now();
        let mut timer = WaitTimer::start(now);
        now += Duration::from_millis(300);
        assert_eq!(timer.waited(now), Duration::from_millis(300));
        now += Duration::from_secs(3600);
        assert_eq!(timer.waited(now), Duration::from_millis(1300));
        now += Duration::from_millis(20);
        assert_eq!(timer.waited(now), Duration::from_millis(1320));
        assert_eq!(timer.waited(now), Duration::from_millis(1320));
    }
}
