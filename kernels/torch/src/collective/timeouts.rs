//! How long ranks wait for each other.

use std::time::Duration;

/// How long ranks wait for each other. All ranks of a run use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// For all ranks to come to the rendezvous. Ranks may start seconds apart.
    pub connect: Duration,
    /// For one operation, while all ranks are alive. Longer than any rank works between two operations, its commits included, and than
    /// a swapper waits for a drive that stalls (two minutes): what the drive's rank says of it is worth more than that it did not come.
    /// Ranks that are dead or stopped are known by their heartbeats long before.
    pub operation: Duration,
    /// Without a heartbeat after which a rank counts as stopped. A busy machine delays a thread by tenths of a second, not by seconds.
    pub silence: Duration,
    /// Between two heartbeats of a rank.
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
    /// For finding out which rank is to blame for a broken connection: a stopped one is known after `silence`, seen by one more beat
    /// of each side.
    pub(super) fn attribute(&self) -> Duration {
        self.silence + 3 * self.beat
    }
}
