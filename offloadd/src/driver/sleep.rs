//! When the owner thread wakes up.

use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, Event};
use rustix::io::Errno;

use super::session::SessionState;
use super::{Driver, DriverError, system};

impl Driver {
    /// Waits for events, which are returned in `ready`, or until the next deadline.
    pub(super) fn sleep(&mut self, ready: &mut Vec<Event>) -> Result<(), DriverError> {
        ready.clear();
        let left = self.left();
        let left = left.map(|left| Timespec::try_from(left).expect("some seconds"));
        match epoll::wait(&self.epoll, spare_capacity(ready), left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(system("epoll_wait")(errno.into())),
        }
    }

    /// Time until the next deadline; `None` if there is none.
    fn left(&self) -> Option<Duration> {
        if !self.busy.is_empty() || self.engine.has_work() {
            return Some(Duration::ZERO);
        }
        let offers = self.sessions.values().filter_map(|s| match s.state {
            SessionState::Offered { deadline, .. } => Some(deadline),
            _ => None,
        });
        // Operations that the kernel refused: nothing else submits them again.
        let engine_again = (self.engine.again_after()).map(|after| Instant::now() + after);
        let next = self
            .hellos
            .values()
            .map(|hello| hello.deadline)
            .chain(offers)
            .chain(self.stop_deadline)
            .chain(self.report_stop_at)
            .chain(self.ledger.judge_at())
            .chain(self.move_at())
            .chain((!self.metrics_waiters.is_empty()).then_some(self.snapshot_at))
            .chain(self.accept_at)
            .chain(engine_again)
            .min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }
}
