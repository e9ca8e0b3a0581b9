//! What goes into the core and what comes out of it: closed lists, so that a test can make every one of them.
//!
//! Everything here is checked input: the server turns messages into these types and refuses what does not fit.

use offload_api::fault::Fault;
use offload_api::geometry::Geometry;
use offload_api::ids::{DeviceIndex, SessionToken};
use offload_api::ring::entry::{Cqe, Priority, Sqe};

use super::call::{Call, Reply};
use crate::io::{AlignedBytes, Buffer, IoId, IoOp, IoResult, SessionId};
use crate::quota::{Limits, Quotas, Weights};
use crate::store::definition::JobName;

/// The driver's number for a call that waits for its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(pub u64);

/// Who calls, as the kernel says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Owner of the jobs it may see.
    pub uid: u32,
    /// For messages only: a pid alone is no identity.
    pub pid: u32,
}

/// Something happened.
#[derive(Debug)]
pub enum Event {
    /// A checked call. Its answer is one [`Action::Reply`] with the same number, perhaps much later.
    Call {
        /// Given back in the reply.
        call: CallId,
        /// Who calls.
        peer: Peer,
        /// What is wanted.
        request: Call,
    },
    /// The arena, rings and descriptors of `session` exist; or they do not, and the open is refused with the fault.
    ArenaMade {
        /// Of the [`Action::MakeArena`].
        session: SessionId,
        /// Whether they exist.
        result: Result<(), Fault>,
    },
    /// The process has taken its descriptors over the second socket.
    Attached {
        /// Which.
        session: SessionId,
    },
    /// One entry copied out of the submission ring, unchecked.
    Submission {
        /// Whose ring.
        session: SessionId,
        /// The copy.
        entry: Sqe,
    },
    /// An operation has ended. Its buffer is the driver's to free.
    IoDone {
        /// Of the [`Action::Io`].
        io: IoId,
        /// How it ended.
        result: IoResult,
        /// The daemon's own bytes that were read into ([`Buffer::Meta`]).
        read: Option<AlignedBytes>,
    },
    /// The next tiles may move, if some are to: see [`Core::moves`](super::Core::moves).
    RebalanceTick {
        /// Copy also what jobs will perhaps write again soon.
        force: bool,
    },
    /// Tiles that could not be moved are tried again.
    RetryMoves,
    /// The administrator changed what may be handed out. What is handed out already stays.
    Limits(Limits),
    /// The same of what each user and job may have; the first time when the daemon starts.
    Quotas(Quotas),
    /// Everything has come to rest, and sessions will be handed over: what they wrote is flushed first.
    HandOver,
    /// The process died, closed its descriptor socket, did not attach in time, or broke the ring.
    PeerGone {
        /// Which.
        session: SessionId,
    },
}

/// What the driver must do, in the order given.
#[derive(Debug)]
pub enum Action {
    /// Start an operation. It ends in one [`Event::IoDone`], whatever becomes of it.
    Io {
        /// Given back when it ends.
        io: IoId,
        /// In the store's order.
        device: DeviceIndex,
        /// What.
        op: IoOp,
        /// From the device's start; 0 for a flush.
        offset: u64,
        /// A multiple of the block; 0 for a flush.
        bytes: u32,
        /// From or into which memory.
        buffer: Buffer,
        /// What goes before what.
        priority: Priority,
        /// Weights of the session's user and job; `None` for an operation of the daemon itself.
        weights: Option<Weights>,
    },
    /// An operation that has not ended goes before others, or no longer.
    Promote {
        /// Of the [`Action::Io`].
        io: IoId,
        /// From now on.
        priority: Priority,
    },
    /// Put an entry into the session's completion ring.
    Complete {
        /// Whose ring.
        session: SessionId,
        /// The entry.
        entry: Cqe,
    },
    /// Answer a call.
    Reply {
        /// Of the [`Event::Call`].
        call: CallId,
        /// The answer.
        reply: Result<Reply, Fault>,
    },
    /// Make memory, rings, descriptors; then [`Event::ArenaMade`].
    MakeArena {
        /// For later events.
        session: SessionId,
        /// Shown by the process on the descriptor socket.
        token: SessionToken,
        /// Who may take the descriptors.
        peer: Peer,
        /// With the peer's uid it names the job.
        job: JobName,
        /// Where the slots lie.
        geometry: Geometry,
        /// Of each ring, a power of two.
        ring_entries: u32,
        /// Granted.
        iodepth: u32,
    },
    /// The device has left the store, and nothing is in flight on it: close it.
    ForgetDevice {
        /// Which.
        device: DeviceIndex,
    },
    /// All I/O of the session has ended: unmap, unregister, close.
    DropArena {
        /// Which. Forgotten after this.
        session: SessionId,
    },
    /// The peer broke the protocol: close its descriptor socket. [`Action::DropArena`] follows when its I/O has ended.
    Evict {
        /// Which.
        session: SessionId,
        /// For the log.
        why: Fault,
    },
}
