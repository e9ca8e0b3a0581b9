//! The eventfds a session waits on.

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
        hush(&self.0);
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

/// Empties an eventfd that poll said is readable.
pub(crate) fn hush(fd: impl AsFd) {
    let mut count = [0; 8];
    while let Err(rustix::io::Errno::INTR) = rustix::io::read(&fd, &mut count) {}
}
