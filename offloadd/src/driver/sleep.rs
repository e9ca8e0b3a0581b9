//! How long the owner thread sleeps.

use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, Event};
use rustix::io::Errno;

use super::session::State;
use super::{Driver, DriverError, system};

impl Driver {
    /// Waits until something has happened or is to be done; what happened is in `ready`.
    pub(super) fn sleep(&mut self, ready: &mut Vec<Event>) -> Result<(), DriverError> {
        ready.clear();
        let left = self.left();
        let left = left.map(|left| Timespec::try_from(left).expect("some seconds"));
        match epoll::wait(&self.epoll, spare_capacity(ready), left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(system("epoll_wait")(errno.into())),
        }
    }

    /// How long nothing needs to be done; `None` for ever.
    fn left(&self) -> Option<Duration> {
        if !self.busy.is_empty() || self.engine.has_work() {
            return Some(Duration::ZERO);
        }
        let offers = self.sessions.values().filter_map(|s| match s.state {
            State::Offered { deadline, .. } => Some(deadline),
            _ => None,
        });
        // What the kernel did not take, and nothing else comes back to.
        let engine_again = (self.engine.again_after()).map(|after| Instant::now() + after);
        let next = self
            .hellos
            .values()
            .map(|hello| hello.deadline)
            .chain(offers)
            .chain(self.stop_deadline)
            .chain(self.tell_stop_at)
            .chain(self.ledger.judge_at())
            .chain(self.ledger.keep_wear_at())
            .chain(self.move_at())
            .chain((!self.metrics_waiters.is_empty()).then_some(self.look_at))
            .chain(self.accept_at)
            .chain(engine_again)
            .min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }
}
