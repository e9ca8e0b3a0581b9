//! A stop in order: sessions end, what is in flight ends, wear is kept, and only then the owner thread does.

use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::{Driver, DriverError, STOP_WAIT};

/// Nobody wonders before that why a stop lasts; and between two words about it.
const STOP_QUIET: Duration = Duration::from_secs(2);
const STOP_TOLD_EVERY: Duration = Duration::from_secs(10);

impl Driver {
    pub(super) fn stop(&mut self) {
        if self.stop_deadline.is_some() {
            return;
        }
        self.stop_deadline = Some(Instant::now() + STOP_WAIT);
        self.tell_stop_at = Some(Instant::now() + STOP_QUIET);
        let _ = epoll::delete(&self.epoll, &self.listener);
        let _ = std::fs::remove_file(&self.descriptor_socket);
        let sessions: Vec<_> = self.sessions.keys().copied().collect();
        for id in sessions {
            self.gone(id, "offloadd stops");
        }
    }

    /// Whether a stop was asked for and everything has ended. Calls that still wait are told by closing their channels.
    pub(super) fn ended_in_order(&mut self) -> Result<bool, DriverError> {
        let Some(deadline) = self.stop_deadline else {
            return Ok(false);
        };
        // Made after the stop began.
        let sessions: Vec<_> = self.sessions.keys().copied().collect();
        for id in sessions {
            self.gone(id, "offloadd stops");
        }
        self.decide();
        self.hand_over()?;
        let inflight_count = self.queue.count();
        if self.sessions.is_empty() && inflight_count == 0 {
            if std::mem::replace(&mut self.wear_kept, true) {
                return Ok(true);
            }
            self.keep_wear(true);
            self.hand_over()?;
            return Ok(self.queue.count() == 0);
        }
        let now = Instant::now();
        if now >= deadline {
            return Err(DriverError::Hanging { inflight_count });
        }
        if self.tell_stop_at.is_some_and(|at| at <= now) {
            self.tell_stop_at = Some(now + STOP_TOLD_EVERY);
            let left = deadline.saturating_duration_since(now);
            tracing::info!(
                "the stop waits for {inflight_count} operations of devices to end, {} s more at most",
                left.as_secs()
            );
        }
        Ok(false)
    }
}
