//! Accepts connections on a thread of its own, as fast as they come, and closes at once what exceeds its user's limit.
//!
//! The kernel keeps a few thousand connections that wait to be accepted, of all users together. If they were taken only as fast as the
//! threads serve them, one user's connects in a loop would keep the queue full, and connects of all others would fail.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::peer::{AdmittedConnection, ConnectionCounts};
use crate::core::Peer;

/// When to try again after a connection could not be accepted, usually because the process has too many open files.
const AGAIN: Duration = Duration::from_millis(10);

/// Connections accepted before the thread looks whether it is to stop.
const ACCEPTS_A_TURN: usize = 256;

/// The thread. Dropping it closes the listener.
pub(super) struct Acceptor {
    stop: Arc<OwnedFd>,
}

impl Acceptor {
    /// Starts the thread. It sends what it admits; [`ConnectionCounts`] bounds how many wait there.
    pub(super) fn start(
        listener: UnixListener,
        connections: ConnectionCounts,
    ) -> io::Result<(Self, UnboundedReceiver<AdmittedConnection>)> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = Arc::new(eventfd(0, flags)?);
        let (admitted, receiver) = unbounded_channel();
        let stopped = stop.clone();
        std::thread::Builder::new()
            .name("accept".into())
            .spawn(move || accept_all(&listener, &stopped, &connections, &admitted))?;
        Ok((Self { stop }, receiver))
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        // A full eventfd would be readable too.
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
    }
}

fn accept_all(
    listener: &UnixListener,
    stop: &OwnedFd,
    connections: &ConnectionCounts,
    admitted: &UnboundedSender<AdmittedConnection>,
) {
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
            PollFd::new(stop, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => std::thread::sleep(AGAIN),
        }
        if !fds[1].revents().is_empty() || admitted.is_closed() {
            return;
        }
        for _ in 0..ACCEPTS_A_TURN {
            match accept(listener) {
                Ok(Some((stream, peer))) => {
                    if let Some(place) = connections.admit(peer) {
                        let one = AdmittedConnection {
                            stream,
                            peer,
                            place,
                        };
                        // Fails only if the server has stopped.
                        let _ = admitted.send(one);
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    tracing::error!(%error, "cannot accept a connection");
                    std::thread::sleep(AGAIN);
                    break;
                }
            }
        }
    }
}

/// Accepts a connection, if one waits.
fn accept(listener: &UnixListener) -> io::Result<Option<(UnixStream, Peer)>> {
    let stream = match listener.accept() {
        Ok((stream, _)) => stream,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
        Err(error) => return Err(error),
    };
    stream.set_nonblocking(true)?;
    let cred = rustix::net::sockopt::socket_peercred(&stream)?;
    let peer = Peer {
        uid: cred.uid.as_raw(),
        // Absent for a process of another PID namespace.
        pid: cred.pid.as_raw_pid().unsigned_abs(),
    };
    Ok(Some((stream, peer)))
}
