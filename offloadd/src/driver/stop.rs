//! A stop in order: sessions end, what is in flight ends, what sessions wrote that are handed over is flushed, wear is kept, and
//! only then the owner thread ends.

use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::session::{Session, State};
use super::{Driver, DriverError, STOP_WAIT};
use crate::core::Event;

/// Nobody wonders before that why a stop lasts; and between two words about it.
const STOP_QUIET: Duration = Duration::from_secs(2);
const STOP_TOLD_EVERY: Duration = Duration::from_secs(10);

impl Driver {
    pub(super) fn stop(&mut self) {
        // Whoever ends it in a hurry waits for no handover.
        self.handing = false;
        self.begin_to_end();
    }

    /// No new work: what is in the rings stays there for the next daemon.
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
        self.tell_stop_at = Some(Instant::now() + STOP_QUIET);
        let _ = epoll::delete(&self.epoll, &self.listener);
        let _ = std::fs::remove_file(&self.descriptor_socket);
        self.end_sessions();
    }

    /// Those that the next daemon will not have.
    fn end_sessions(&mut self) {
        let handing = self.handing;
        let ending = (self.sessions.iter())
            .filter(|(_, s)| !(handing && matches!(s.state, State::Attached { .. })));
        let ending: Vec<_> = ending.map(|(id, _)| *id).collect();
        for id in ending {
            self.gone(id, "offloadd stops");
        }
    }

    /// Nothing is left, or nothing but what the next daemon will have.
    fn is_at_rest(&self) -> bool {
        // One whose memory is still being made is not handed over: the others need not wait for that.
        let settled = |session: &Session| {
            !matches!(session.state, State::Offered { .. } | State::Gone { .. })
        };
        let sessions = if self.handing {
            self.sessions.values().all(settled) && self.core.is_quiet()
        } else {
            self.sessions.is_empty()
        };
        sessions && self.queue.count() == 0
    }

    /// Whether a stop was asked for and everything has ended. Calls that still wait are told by closing their channels.
    pub(super) fn ended_in_order(&mut self) -> Result<bool, DriverError> {
        let Some(deadline) = self.stop_deadline else {
            return Ok(false);
        };
        // Made after the stop began.
        self.end_sessions();
        self.decide();
        self.hand_over()?;
        let inflight_count = self.queue.count();
        if self.is_at_rest() {
            if self.handing && !std::mem::replace(&mut self.handing_flushed, true) {
                self.events.push_back(Event::HandOver);
                self.decide();
                self.hand_over()?;
                if !self.is_at_rest() {
                    return Ok(false);
                }
            }
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
