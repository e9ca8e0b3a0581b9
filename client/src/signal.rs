//! Signals a session waits for and sends: eventfds, and the pipe that the daemon writes to.

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
        let fd = eventfd(0, flags).map_err(ClientError::os("create an eventfd"))?;
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

/// Adds one to an eventfd. A full counter also wakes its reader.
pub(crate) fn ring(fd: impl AsFd) {
    while let Err(rustix::io::Errno::INTR) = rustix::io::write(&fd, &1u64.to_ne_bytes()) {}
}

/// Empties an eventfd or a pipe that poll reported as readable. Bytes left in a very full pipe only end one more wait early.
pub(crate) fn drain(fd: impl AsFd) {
    let mut count = [0; 4096];
    while let Err(rustix::io::Errno::INTR) = rustix::io::read(&fd, &mut count) {}
}
