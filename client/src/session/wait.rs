//! Sleeping until something has happened. Every sleep watches the life line, so that a dead daemon ends it at once.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use offload_api::awake::AWAKE_MAX;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Session, broken_ring};
use crate::ClientError;
use crate::control::Client;
use crate::signal::{self, Waker};

impl Session {
    /// Waits until something can be polled, the waker is rung, a commit ends, or `timeout` is over; may also return for
    /// nothing. [`ClientError::DaemonGone`] as soon as the daemon hangs up; what it completed before can still be polled.
    pub fn wait(&mut self, timeout: Duration) -> Result<(), ClientError> {
        // `None`: later than a clock can say.
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let ready = self.rings.ready().map_err(broken_ring)? > 0;
            let commit_ended = self.advance_commit();
            let left = match deadline {
                _ if ready || commit_ended => Duration::ZERO,
                Some(deadline) => deadline.saturating_duration_since(Instant::now()),
                None => Duration::MAX,
            };
            // Somebody waits for it, and has nothing else to do.
            let lone = !left.is_zero() && self.flights.is_a_lone_read();
            if lone && self.flights.sum_what_came() {
                continue;
            }
            let came = || self.rings.ready().map(|count| count > 0);
            if lone && (self.awake.watch(left.min(AWAKE_MAX), came)).map_err(broken_ring)? {
                return Ok(());
            }
            if self.sleep(left)? || left.is_zero() {
                return Ok(());
            }
        }
    }

    /// Whether a signal came within `left`. A system call that was interrupted counts as none.
    fn sleep(&self, left: Duration) -> Result<bool, ClientError> {
        let (waker, ended) = (&self.waker, self.control.ended());
        let hang_up = PollFlags::IN | PollFlags::RDHUP;
        let mut fds = [
            PollFd::new(&self.life_line, hang_up),
            PollFd::new(&self.completion_doorbell, PollFlags::IN),
            PollFd::new(waker, PollFlags::IN),
            PollFd::new(ended, PollFlags::IN),
        ];
        // Longer than a Timespec can say is for ever.
        let limit = Timespec::try_from(left).ok();
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(ClientError::os("poll")(errno)),
        }
        let [line, completion, woken, ended_now] = fds.map(|fd| !fd.revents().is_empty());
        if completion {
            signal::hush(&self.completion_doorbell);
        }
        if woken {
            waker.clear();
        }
        if ended_now {
            ended.clear();
        }
        if line && self.hung_up() {
            return Err(self.gone());
        }
        Ok(completion || woken || ended_now)
    }

    /// The daemon never writes to the line after the handoff, so that anything readable is its end.
    fn hung_up(&self) -> bool {
        let mut byte = [0];
        !matches!(
            rustix::net::recv(
                self.life_line.as_fd(),
                &mut byte,
                rustix::net::RecvFlags::DONTWAIT
            ),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR)
        )
    }

    /// Ends [`Session::wait`] from other threads.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// A call, waited for as long as the daemon lives.
    pub(super) fn call<R, F>(
        &self,
        call: &'static str,
        limit: Duration,
        make: impl FnOnce(Client) -> F,
    ) -> Result<R, ClientError>
    where
        R: Send + 'static,
        F: Future<Output = Result<tonic::Response<R>, tonic::Status>> + Send + 'static,
    {
        let pending = self.control.begin(call, limit, make);
        loop {
            if let Some(result) = pending.poll() {
                return result;
            }
            match self.pause() {
                Err(ClientError::DaemonGone { .. }) => return pending.last_words(),
                other => other?,
            }
        }
    }

    /// Sleeps until a call ends or the daemon is gone. Leaves the waker and the doorbell for [`Session::wait`].
    pub(super) fn pause(&self) -> Result<(), ClientError> {
        let ended = self.control.ended();
        let hang_up = PollFlags::IN | PollFlags::RDHUP;
        let mut fds = [
            PollFd::new(&self.life_line, hang_up),
            PollFd::new(ended, PollFlags::IN),
        ];
        // A call ends by itself at its limit; the second only bounds the harm of a lost signal.
        let limit = Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        match poll(&mut fds, Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(ClientError::os("poll")(errno)),
        }
        let [line, ended_now] = fds.map(|fd| !fd.revents().is_empty());
        if ended_now {
            ended.clear();
        } else if line && self.hung_up() {
            return Err(self.gone());
        }
        Ok(())
    }

    pub(super) fn gone(&self) -> ClientError {
        ClientError::DaemonGone {
            socket: self.control.socket().to_owned(),
        }
    }
}
