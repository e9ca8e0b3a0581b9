//! Connections: identified by the kernel, limited per user, and closed when the peer does not make progress.
//!
//! ```text
//!   accepted ─▶ no call within 30 s ───────────────────────────┐
//!   an answer ─▶ the peer reads no part of it for 30 s ─────────┼─▶ close the connection and free its memory
//!   the socket ─▶ accepts no byte for 30 s ─────────────────────┘
//! ```
//!
//! A connection without open answers may stay idle: a process may call once per step or once a day.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::time::Interval;
use tonic::transport::server::Connected;

use crate::core::Peer;

/// Connections of one user beyond those of sessions, for commands and monitoring.
const CONNECTIONS_BESIDE: usize = 64;

/// Connections per session: the session's own, and one for monitoring by its process.
const CONNECTIONS_A_SESSION: usize = 2;

/// Time limit for a peer's first call and for reading the next part of an answer. A process that takes longer is stopped or hostile;
/// it can connect again.
const PATIENCE: Duration = Duration::from_secs(30);

/// A connection that its user may have.
pub(super) struct AdmittedConnection {
    pub(super) stream: std::os::unix::net::UnixStream,
    pub(super) peer: Peer,
    pub(super) place: ConnectionPermit,
}

/// Caller of a connection, and the state of its answers.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    pub(super) peer: Peer,
    pub(super) pending: Arc<Pending>,
}

/// Answers that a connection's peer has not read, and whether the peer has called.
#[derive(Debug, Default)]
pub(super) struct Pending {
    called: AtomicBool,
    answers: Mutex<HashMap<u64, Instant>>,
    answers_made: AtomicU64,
}

/// An answer that the peer has not read completely.
#[derive(Debug)]
pub(super) struct UnreadAnswer {
    pending: Arc<Pending>,
    number: u64,
}

impl Pending {
    pub(super) fn called(&self) {
        self.called.store(true, Ordering::Relaxed);
    }

    fn longest(&self) -> Option<Instant> {
        let answers = self.answers.lock().unwrap_or_else(|e| e.into_inner());
        answers.values().min().copied()
    }
}

impl UnreadAnswer {
    pub(super) fn new(pending: &Arc<Pending>) -> Self {
        let untaken = Self {
            pending: pending.clone(),
            number: pending.answers_made.fetch_add(1, Ordering::Relaxed),
        };
        untaken.peer_has_turn();
        untaken
    }

    /// A part of the answer is ready: the time limit of the peer starts.
    pub(super) fn peer_has_turn(&self) {
        let mut answers = (self.pending.answers.lock()).unwrap_or_else(|e| e.into_inner());
        answers.insert(self.number, Instant::now());
    }

    /// The peer has read all that is ready: its time limit is suspended.
    pub(super) fn we_have_turn(&self) {
        let mut answers = (self.pending.answers.lock()).unwrap_or_else(|e| e.into_inner());
        answers.remove(&self.number);
    }
}

impl Drop for UnreadAnswer {
    fn drop(&mut self) {
        self.we_have_turn();
    }
}

/// A connection with its caller.
#[derive(Debug)]
pub(super) struct PeerStream {
    stream: UnixStream,
    caller: Caller,
    timeouts: Duration,
    accepted: Instant,
    /// Since when the socket accepts no bytes.
    blocked: Option<Instant>,
    clock: Interval,
    _place: ConnectionPermit,
}

/// Counts connections by user.
#[derive(Clone, Debug)]
pub(super) struct ConnectionCounts {
    most: usize,
    counts: Arc<Mutex<HashMap<u32, usize>>>,
}

/// One of a user's permitted connections; released on drop.
#[derive(Debug)]
pub(super) struct ConnectionPermit {
    connections: ConnectionCounts,
    uid: u32,
}

impl ConnectionCounts {
    /// Sized so that all `sessions_max` sessions may belong to one user.
    pub(super) fn new(sessions_max: u32) -> Self {
        Self {
            most: CONNECTIONS_A_SESSION * sessions_max as usize + CONNECTIONS_BESIDE,
            counts: Arc::default(),
        }
    }

    /// Admits a connection of `peer`; `None` if its user has too many.
    pub(super) fn admit(&self, peer: Peer) -> Option<ConnectionPermit> {
        let place = self.count_in(peer.uid);
        if place.is_none() {
            let (uid, pid) = (peer.uid, peer.pid);
            tracing::warn!(
                uid,
                pid,
                "closed a connection: this user already has {}, the limit ({CONNECTIONS_A_SESSION} for each of `sessions_max`, plus \
                 {CONNECTIONS_BESIDE})",
                self.most
            );
        }
        place
    }

    fn count_in(&self, uid: u32) -> Option<ConnectionPermit> {
        let mut counts = self.counts.lock().unwrap_or_else(|e| e.into_inner());
        let count = counts.entry(uid).or_default();
        if *count >= self.most {
            return None;
        }
        *count += 1;
        Some(ConnectionPermit {
            connections: self.clone(),
            uid,
        })
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut counts = self
            .connections
            .counts
            .lock()
            .unwrap_or_else(|e| e.into_inner());
        let count = counts.get_mut(&self.uid).expect("taken");
        *count -= 1;
        if *count == 0 {
            counts.remove(&self.uid);
        }
    }
}

impl PeerStream {
    /// Takes a connection that was admitted. Must be called within the runtime.
    pub(super) fn from_admitted(admitted: AdmittedConnection) -> io::Result<Self> {
        let AdmittedConnection {
            stream,
            peer,
            place,
        } = admitted;
        let stream = UnixStream::from_std(stream)?;
        Ok(Self::new(stream, peer, PATIENCE, place))
    }

    fn new(stream: UnixStream, peer: Peer, timeouts: Duration, place: ConnectionPermit) -> Self {
        Self {
            stream,
            caller: Caller {
                peer,
                pending: Arc::default(),
            },
            timeouts,
            accepted: Instant::now(),
            blocked: None,
            clock: tokio::time::interval(timeouts / 6),
            _place: place,
        }
    }

    /// Returns an error if the peer has exceeded a time limit. Polled wherever the connection's task may wait, so that the clock wakes
    /// the task.
    fn overdue(&mut self, context: &mut Context<'_>) -> Option<io::Error> {
        while self.clock.poll_tick(context).is_ready() {}
        let pending = &self.caller.pending;
        let first_call = (!pending.called.load(Ordering::Relaxed)).then_some(self.accepted);
        let waits = [
            (first_call, "no call was made"),
            (pending.longest(), "an answer is not being read"),
            (self.blocked, "nothing is being read"),
        ];
        let what = waits
            .into_iter()
            .find(|(since, _)| since.is_some_and(|since| since.elapsed() >= self.timeouts));
        let (_, what) = what?;
        let Peer { uid, pid } = self.caller.peer;
        let waited_s = self.timeouts.as_secs();
        tracing::info!(uid, pid, waited_s, "closed a connection: {what}");
        Some(io::Error::new(io::ErrorKind::TimedOut, what))
    }

    fn write(
        &mut self,
        context: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut UnixStream>, &mut Context<'_>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let written = write(Pin::new(&mut self.stream), context);
        match &written {
            Poll::Ready(_) => self.blocked = None,
            Poll::Pending => {
                self.blocked.get_or_insert_with(Instant::now);
                if let Some(error) = self.overdue(context) {
                    return Poll::Ready(Err(error));
                }
            }
        }
        written
    }
}

impl Connected for PeerStream {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller.clone()
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(error) = self.overdue(context) {
            return Poll::Ready(Err(error));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.write(context, |stream, context| stream.poll_write(context, bytes))
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
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[test]
    fn one_users_connections_are_bounded_and_anothers_are_not_its() {
        let places = ConnectionCounts::new(3);
        let mut held: Vec<_> = (0..CONNECTIONS_A_SESSION * 3 + CONNECTIONS_BESIDE)
            .map(|_| places.count_in(7).unwrap())
            .collect();
        assert!(places.count_in(7).is_none());
        assert!(places.count_in(8).is_some());
        held.pop();
        assert!(places.count_in(7).is_some());
        drop(held);
        assert!(places.counts.lock().unwrap().is_empty(), "nothing is kept");
    }

    fn connection(timeouts: Duration) -> (PeerStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let place = ConnectionCounts::new(1).count_in(7).unwrap();
        let peer = Peer { uid: 7, pid: 1 };
        (PeerStream::new(ours, peer, timeouts, place), theirs)
    }

    fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let limit = Duration::from_secs(60);
            tokio::time::timeout(limit, test).await.expect("it ends");
        });
    }

    /// Error with which a connection ends whose peer is idle.
    async fn end_of(mut stream: PeerStream) -> io::Error {
        stream.read_u8().await.unwrap_err()
    }

    #[test]
    fn a_connection_that_never_calls_is_closed() {
        run(async {
            let (ours, _theirs) = connection(Duration::from_millis(50));
            let error = end_of(ours).await;
            assert_eq!(error.to_string(), "no call was made");
        });
    }

    #[test]
    fn a_connection_whose_answer_is_not_taken_is_closed_and_one_that_waits_for_us_is_not() {
        run(async {
            let (ours, _theirs) = connection(Duration::from_millis(50));
            ours.caller.pending.called();
            let answer = UnreadAnswer::new(&ours.caller.pending);
            assert_eq!(
                end_of(ours).await.to_string(),
                "an answer is not being read"
            );
            drop(answer);

            let timeouts = Duration::from_millis(50);
            let (mut ours, mut theirs) = connection(timeouts);
            ours.caller.pending.called();
            let answer = UnreadAnswer::new(&ours.caller.pending);
            answer.we_have_turn();
            let read = tokio::time::timeout(4 * timeouts, ours.read_u8()).await;
            assert!(read.is_err(), "ended: {read:?}");
            theirs.write_u8(3).await.unwrap();
            assert_eq!(ours.read_u8().await.unwrap(), 3);
        });
    }

    #[test]
    fn a_connection_whose_peer_reads_nothing_is_closed() {
        run(async {
            let (mut ours, _theirs) = connection(Duration::from_millis(50));
            ours.caller.pending.called();
            let written = ours.write_all(&vec![0; 16 << 20]).await;
            assert_eq!(written.unwrap_err().to_string(), "nothing is being read");
        });
    }
}
