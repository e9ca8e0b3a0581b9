//! Detects a stall: operations are in flight, and none completed for longer than a limit.
//!
//! Time in which the process was suspended (Ctrl-Z, a frozen container, a sleeping machine) does not count ([`WaitTimer`]), and
//! completions are polled before a stall is judged.

use std::time::{Duration, Instant};

use offload_client::{RESTART_WAIT, WaitTimer};

use crate::SwapperError;

/// Default limit. Drives retry for half a minute before they give up, and a planned restart of the daemon takes at most
/// [`RESTART_WAIT`].
const LIMIT_DEFAULT: Duration = Duration::from_secs(240);

/// Time without a completion after which the drives are named, once: the daemon calls a device hanging after 10 s.
const WARN_AFTER: Duration = Duration::from_secs(20);

const _: () = assert!(LIMIT_DEFAULT.as_secs() > RESTART_WAIT.as_secs());

/// Measures for how long no operation has completed.
pub(crate) struct Stall {
    limit: Duration,
    waiting: WaitTimer,
    waited: Duration,
    is_told: bool,
}

impl Default for Stall {
    fn default() -> Self {
        Self::new(LIMIT_DEFAULT)
    }
}

impl Stall {
    pub(crate) fn new(limit: Duration) -> Self {
        Self {
            limit,
            waiting: WaitTimer::start(Instant::now()),
            waited: Duration::ZERO,
            is_told: false,
        }
    }

    /// Returns how long one round waits. The owner thread checks the limit once a round.
    pub(crate) fn round(&self) -> Duration {
        WaitTimer::STEP_MAX.min(self.limit)
    }

    /// Restarts the timer: an operation completed, or the first one was started.
    pub(crate) fn moved(&mut self, now: Instant) {
        *self = Self {
            waiting: WaitTimer::start(now),
            ..Self::new(self.limit)
        };
    }

    /// Returns how long nothing has completed, once a stall, when it is worth a line.
    pub(crate) fn news(&mut self) -> Option<Duration> {
        let due = self.waited >= WARN_AFTER && !self.is_told;
        self.is_told |= due;
        due.then_some(self.waited)
    }

    /// Judges `inflight` operations, after completions were polled. A commit is not counted: it waits for other ranks
    /// and its call has its own deadline.
    ///
    /// # Errors
    /// [`SwapperError::Stalled`].
    pub(crate) fn check(&mut self, inflight: usize, now: Instant) -> Result<(), SwapperError> {
        self.waited = self.waiting.waited(now);
        if self.waited >= self.limit && inflight > 0 {
            return Err(SwapperError::Stalled {
                seconds: self.limit.as_secs(),
                inflight,
                log: "the daemon's log".into(),
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
        let mut now = Instant::now();
        stall.moved(now);
        now += Duration::from_secs(3600);
        stall.check(1, now).unwrap();
        now += Duration::from_secs(1);
        stall.check(1, now).unwrap();
        stall.moved(now);
        for _ in 0..2 {
            now += Duration::from_secs(1);
            stall.check(1, now).unwrap();
        }
        now += Duration::from_secs(1);
        stall.check(0, now).unwrap();
        assert!(matches!(
            stall.check(1, now),
            Err(SwapperError::Stalled {
                seconds: 3,
                inflight: 1,
                ..
            })
        ));
        stall.moved(now);
        stall.check(1, now).unwrap();
    }
}
