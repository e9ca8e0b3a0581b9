//! Who calls: connections with the kernel's word on their user, a bounded number a user.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::Connected;

use crate::core::Peer;

/// Connections of one user beside those of its sessions: commands, and whoever looks.
const CONNECTIONS_BESIDE: usize = 64;

/// A session has one, and its process may have another to look at the daemon.
const CONNECTIONS_A_SESSION: usize = 2;

/// A connection and whose it is.
#[derive(Debug)]
pub(super) struct PeerStream {
    stream: UnixStream,
    peer: Peer,
    _place: Place,
}

/// Connections by user.
#[derive(Clone, Debug)]
pub(super) struct Places {
    most: usize,
    counts: Arc<Mutex<HashMap<u32, usize>>>,
}

/// One connection's share of its user's bound; given back when dropped.
#[derive(Debug)]
struct Place {
    places: Places,
    uid: u32,
}

impl Places {
    /// All `sessions_max` sessions may be one user's.
    pub(super) fn new(sessions_max: u32) -> Self {
        Self {
            most: CONNECTIONS_A_SESSION * sessions_max as usize + CONNECTIONS_BESIDE,
            counts: Arc::default(),
        }
    }

    /// The connection, unless its user has too many already: then it is closed.
    pub(super) fn admit(&self, accepted: io::Result<UnixStream>) -> Option<io::Result<PeerStream>> {
        let admitted = accepted.and_then(|stream| {
            let cred = stream.peer_cred()?;
            let peer = Peer {
                uid: cred.uid(),
                // Absent for a process of another pid namespace.
                pid: cred.pid().map_or(0, i32::unsigned_abs),
            };
            Ok((stream, peer))
        });
        match admitted {
            Ok((stream, peer)) => match self.take(peer.uid) {
                Some(place) => Some(Ok(PeerStream {
                    stream,
                    peer,
                    _place: place,
                })),
                None => {
                    let (uid, pid) = (peer.uid, peer.pid);
                    tracing::warn!(
                        uid,
                        pid,
                        "closed a connection: this user has {} already, which is {CONNECTIONS_A_SESSION} for each of `sessions_max` \
                         and {CONNECTIONS_BESIDE} more",
                        self.most
                    );
                    None
                }
            },
            Err(error) => {
                // Out of descriptors, mostly. Handed on it would end the server; at once again it would burn a CPU.
                tracing::error!(%error, "cannot accept a connection");
                std::thread::sleep(std::time::Duration::from_millis(10));
                None
            }
        }
    }

    fn take(&self, uid: u32) -> Option<Place> {
        let mut counts = self.counts.lock().unwrap_or_else(|e| e.into_inner());
        let count = counts.entry(uid).or_default();
        if *count >= self.most {
            return None;
        }
        *count += 1;
        Some(Place {
            places: self.clone(),
            uid,
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.places.counts.lock().unwrap_or_else(|e| e.into_inner());
        let count = counts.get_mut(&self.uid).expect("taken");
        *count -= 1;
        if *count == 0 {
            counts.remove(&self.uid);
        }
    }
}

impl Connected for PeerStream {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_users_connections_are_bounded_and_anothers_are_not_its() {
        let places = Places::new(3);
        let mut held: Vec<_> = (0..CONNECTIONS_A_SESSION * 3 + CONNECTIONS_BESIDE)
            .map(|_| places.take(7).unwrap())
            .collect();
        assert!(places.take(7).is_none());
        assert!(places.take(8).is_some());
        held.pop();
        assert!(places.take(7).is_some());
        drop(held);
        assert!(places.counts.lock().unwrap().is_empty(), "nothing is kept");
    }
}
