//! Sleeping until something happens. Every sleep watches the life line, so that a dead daemon ends it at once.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use offload_api::proto;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::commit::Commit;
use super::restart::{TRY_EVERY, is_lost};
use super::{Session, broken_ring};
use crate::ClientError;
use crate::control::{Client, Pending};
use crate::signal::{self, Waker};

impl Session {
    /// Waits until something can be polled, the waker is woken, a commit ends, or `timeout` is over. May return early. Returns
    /// [`ClientError::DaemonGone`] as soon as the daemon hangs up; completions from before can still be polled.
    pub fn wait(&mut self, timeout: Duration) -> Result<(), ClientError> {
        // `None`: later than the clock can express.
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let ready = self.rings.ready().map_err(broken_ring)? > 0;
            let commit_ended = self.advance_commit();
            let left = match deadline {
                _ if ready || commit_ended => Duration::ZERO,
                Some(deadline) => deadline.saturating_duration_since(Instant::now()),
                None => Duration::MAX,
            };
            let over = left.is_zero();
            let left = match self.commit {
                // The next daemon is looked for from time to time.
                Commit::Lost(_) => left.min(TRY_EVERY),
                _ => left,
            };
            if self.sleep(left)? || over {
                return Ok(());
            }
        }
    }

    /// Whether a signal came within `left`. An interrupted system call counts as none.
    fn sleep(&self, left: Duration) -> Result<bool, ClientError> {
        let (waker, ended) = (&self.waker, self.control.ended());
        let hang_up = PollFlags::IN | PollFlags::RDHUP;
        let mut fds = [
            PollFd::new(&self.life_line, hang_up),
            PollFd::new(&self.completion_doorbell, PollFlags::IN),
            PollFd::new(waker, PollFlags::IN),
            PollFd::new(ended, PollFlags::IN),
        ];
        // A time too long for a Timespec means for ever.
        let limit = Timespec::try_from(left).ok();
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(ClientError::os("poll")(errno)),
        }
        let [line, completion, woken, ended_now] = fds.map(|fd| !fd.revents().is_empty());
        if completion {
            signal::drain(&self.completion_doorbell);
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

    /// Whether the daemon has hung up. It writes nothing to the life line after the handoff, so anything readable means its end.
    pub(super) fn hung_up(&self) -> bool {
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

    /// Returns a waker that ends [`Session::wait`] from other threads.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Makes a call that may be repeated, and repeats it on the next daemon if the connection is lost.
    pub(super) fn call<R, M, F>(
        &self,
        call: &'static str,
        limit: Duration,
        make: impl Fn() -> M,
    ) -> Result<R, ClientError>
    where
        R: Send + 'static,
        M: FnOnce(Client) -> F,
        F: Future<Output = Result<tonic::Response<R>, tonic::Status>> + Send + 'static,
    {
        self.call_once(call, limit, make, |_| None)
    }

    /// Makes a call that must not be repeated once the daemon received it: `answer` finds the lost answer in what the next
    /// daemon knows.
    pub(super) fn call_once<R, M, F>(
        &self,
        call: &'static str,
        limit: Duration,
        make: impl Fn() -> M,
        answer: impl Fn(&proto::ReattachReply) -> Option<R>,
    ) -> Result<R, ClientError>
    where
        R: Send + 'static,
        M: FnOnce(Client) -> F,
        F: Future<Output = Result<tonic::Response<R>, tonic::Status>> + Send + 'static,
    {
        let begin = Instant::now();
        loop {
            match self.wait_for(&self.control.begin(call, limit, make())) {
                Err(lost) if is_lost(&lost) && begin.elapsed() < limit => {
                    let found = self.reattach(lost)?;
                    if let Some(answer) = answer(&found) {
                        return Ok(answer);
                    }
                }
                result => return result,
            }
        }
    }

    fn wait_for<R>(&self, pending: &Pending<R>) -> Result<R, ClientError> {
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

    /// Sleeps until a call ends or the daemon is gone. Leaves the waker and the doorbell to [`Session::wait`].
    pub(super) fn pause(&self) -> Result<(), ClientError> {
        // A call ends by itself at its limit; the second only bounds the harm of a lost signal.
        self.pause_for(Duration::from_secs(1))
    }

    pub(super) fn pause_for(&self, limit: Duration) -> Result<(), ClientError> {
        let ended = self.control.ended();
        let hang_up = PollFlags::IN | PollFlags::RDHUP;
        let mut fds = [
            PollFd::new(&self.life_line, hang_up),
            PollFd::new(ended, PollFlags::IN),
        ];
        let limit = Timespec::try_from(limit).expect("a second at most");
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
