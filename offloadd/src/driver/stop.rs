//! An orderly stop: sessions end, I/O in flight ends, the writes of sessions to hand over are flushed, and then the owner
//! thread ends.

use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::session::{DriverSession, SessionState};
use super::{Driver, DriverError, STOP_WAIT};
use crate::core::Event;

/// A stop that takes longer than this is logged.
const STOP_QUIET: Duration = Duration::from_secs(2);

/// Interval of the log lines about a stop that takes long.
const STOP_LOG_INTERVAL: Duration = Duration::from_secs(10);

impl Driver {
    pub(super) fn stop(&mut self) {
        // A second signal ends the daemon without a hand-over.
        self.handing = false;
        self.begin_to_end();
    }

    /// Takes no more entries from the rings: they stay for the next daemon.
    pub(super) fn begin_to_hand_over(&mut self) {
        if self.stop_deadline.is_none() {
            self.handing = true;
            self.busy.clear();
            self.begin_to_end();
        }
    }

    fn begin_to_end(&mut self) {
        if self.stop_deadline.is_some() {
            return;
        }
        self.stop_deadline = Some(Instant::now() + STOP_WAIT);
        self.report_stop_at = Some(Instant::now() + STOP_QUIET);
        let _ = epoll::delete(&self.epoll, &self.listener);
        let _ = std::fs::remove_file(&self.descriptor_socket);
        self.end_sessions();
    }

    /// Ends the sessions that are not handed over.
    fn end_sessions(&mut self) {
        let handing = self.handing;
        let ending = (self.sessions.iter())
            .filter(|(_, s)| !(handing && matches!(s.state, SessionState::Attached { .. })));
        let ending: Vec<_> = ending.map(|(id, _)| *id).collect();
        for id in ending {
            self.gone(id, "offloadd stops");
        }
    }

    /// Whether no I/O is left, and no sessions except those to hand over.
    fn is_at_rest(&self) -> bool {
        // A session whose memory is still being made is not handed over, so do not wait for it.
        let settled = |session: &DriverSession| {
            !matches!(
                session.state,
                SessionState::Offered { .. } | SessionState::Gone { .. }
            )
        };
        let sessions = if self.handing {
            self.sessions.values().all(settled) && self.core.is_quiet()
        } else {
            self.sessions.is_empty()
        };
        sessions && self.queue.count() == 0
    }

    /// Whether a stop was requested and everything has ended. Pending calls fail when their channels are dropped.
    pub(super) fn ended_in_order(&mut self) -> Result<bool, DriverError> {
        let Some(deadline) = self.stop_deadline else {
            return Ok(false);
        };
        // Sessions that were opened after the stop began.
        self.end_sessions();
        self.decide();
        self.submit_queued()?;
        let inflight_count = self.queue.count();
        if self.is_at_rest() {
            if self.handing && !std::mem::replace(&mut self.handing_flushed, true) {
                self.events.push_back(Event::HandOver);
                self.decide();
                self.submit_queued()?;
                if !self.is_at_rest() {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
        let now = Instant::now();
        if now >= deadline {
            return Err(DriverError::Hanging { inflight_count });
        }
        if self.report_stop_at.is_some_and(|at| at <= now) {
            self.report_stop_at = Some(now + STOP_LOG_INTERVAL);
            let left = deadline.saturating_duration_since(now);
            tracing::info!(
                "the stop waits for {inflight_count} operations on devices, for at most {} s more",
                left.as_secs()
            );
        }
        Ok(false)
    }
}
