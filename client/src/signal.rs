//! What a session waits on, and rings: eventfds, and the pipe the daemon rings.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use crate::ClientError;

/// Makes [`crate::Session::wait`] return, from any thread. A wake before the wait counts.
#[derive(Clone, Debug)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    pub(crate) fn new() -> Result<Self, ClientError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let fd = eventfd(0, flags).map_err(ClientError::os("making an eventfd"))?;
        Ok(Self(Arc::new(fd)))
    }

    /// Wakes the session's thread, now or when it next waits.
    pub fn wake(&self) {
        ring(&self.0);
    }

    pub(crate) fn clear(&self) {
        drain(&self.0);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Adds one to an eventfd. A full counter is as good as one more.
pub(crate) fn ring(fd: impl AsFd) {
    while let Err(rustix::io::Errno::INTR) = rustix::io::write(&fd, &1u64.to_ne_bytes()) {}
}

/// Empties an eventfd, or a pipe that is used as one, that poll said is readable. What is left of a very full pipe only
/// ends one more wait for nothing.
pub(crate) fn drain(fd: impl AsFd) {
    let mut count = [0; 4096];
    while let Err(rustix::io::Errno::INTR) = rustix::io::read(&fd, &mut count) {}
}
