//! Timeouts of ranks that wait for each other.

use std::time::Duration;

/// Timeouts of ranks that wait for each other. All ranks of a run use the same values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Time for all ranks to come to the rendezvous. Ranks may start seconds apart.
    pub connect: Duration,
    /// Time for one operation while all ranks are alive. Longer than any rank works between two operations, its commits
    /// included, and than a swapper waits for a stalled drive, whose own error is more useful. Dead or stopped ranks
    /// are detected by their heartbeats much earlier.
    pub operation: Duration,
    /// Time without a heartbeat after which a rank counts as stopped. A busy machine delays a thread by tenths of a
    /// second, not by seconds.
    pub silence: Duration,
    /// Interval of a rank's heartbeats.
    pub beat: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts {
            connect: Duration::from_secs(60),
            operation: Duration::from_secs(150),
            silence: Duration::from_secs(5),
            beat: Duration::from_millis(500),
        }
    }
}

impl Timeouts {
    /// Time to find the rank responsible for a broken connection: a stopped rank is detected after `silence` and one
    /// more heartbeat of each side.
    pub fn attribute(&self) -> Duration {
        self.silence + 3 * self.beat
    }
}
