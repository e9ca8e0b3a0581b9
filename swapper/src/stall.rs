//! Detects a stall: operations are in flight, and for a number of consecutive waiting rounds none completed.
//!
//! Rounds are counted instead of time: a process that was suspended for an hour (Ctrl-Z, a frozen container, a
//! sleeping machine) has waited one round when it resumes, and completions are polled before a stall is judged.

use std::time::Duration;

use offload_client::RESTART_WAIT;

use crate::SwapperError;

/// Longest round. The owner thread checks the limit once a round.
const ROUND_MAX: Duration = Duration::from_secs(1);

/// Default limit. Drives retry for half a minute before they give up, and a planned restart of the daemon takes at most
/// [`RESTART_WAIT`].
const LIMIT_DEFAULT: Duration = Duration::from_secs(240);

const _: () = assert!(LIMIT_DEFAULT.as_secs() > RESTART_WAIT.as_secs());

/// Counts rounds of waiting in which nothing completed.
pub(crate) struct Stall {
    limit: Duration,
    rounds: u32,
}

impl Default for Stall {
    fn default() -> Self {
        Self::new(LIMIT_DEFAULT)
    }
}

impl Stall {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, rounds: 0 }
    }

    /// How long one round waits.
    pub(crate) fn round(&self) -> Duration {
        ROUND_MAX.min(self.limit)
    }

    /// Restarts the count: an operation completed, or the first one was started.
    pub(crate) fn moved(&mut self) {
        self.rounds = 0;
    }

    /// Counts one round, however long it took.
    pub(crate) fn round_is_over(&mut self) {
        self.rounds = self.rounds.saturating_add(1);
    }

    /// Judges `inflight` operations, after completions were polled. A commit is not counted: it waits for other ranks
    /// and its call has its own deadline.
    ///
    /// # Errors
    /// [`SwapperError::Stalled`].
    pub(crate) fn check(&self, inflight: usize) -> Result<(), SwapperError> {
        if inflight > 0 && self.rounds > 0 && self.round() * self.rounds >= self.limit {
            return Err(SwapperError::Stalled {
                seconds: self.limit.as_secs(),
                inflight,
                devices: Vec::new(),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_was_suspended_has_waited_one_round() {
        let mut stall = Stall::new(Duration::from_secs(3));
        // One round, however long the process was suspended in it.
        stall.round_is_over();
        stall.check(1).unwrap();
        stall.moved();
        for _ in 0..2 {
            stall.round_is_over();
            stall.check(1).unwrap();
        }
        stall.round_is_over();
        stall.check(0).unwrap();
        assert!(matches!(
            stall.check(1),
            Err(SwapperError::Stalled {
                seconds: 3,
                inflight: 1,
                ..
            })
        ));
        stall.moved();
        stall.check(1).unwrap();
    }
}
