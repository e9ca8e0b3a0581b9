//! Events and actions of the core: closed lists, so that a test can make every one of them.

use offload_api::fault::Fault;
use offload_api::geometry::Geometry;
use offload_api::ids::{DeviceIndex, SessionToken};
use offload_api::ring::entry::{Cqe, Priority, Sqe};

use super::call::{Call, Reply};
use crate::io::{AlignedBytes, Buffer, IoId, IoOp, IoResult, SessionId};
use crate::quota::{Limits, Quotas, Weights};
use crate::store::definition::JobName;

/// Number that the driver gives to a call that waits for its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(pub u64);

/// Caller, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// User ID.
    pub uid: u32,
    /// Process ID, for messages only: it may be reused.
    pub pid: u32,
}

/// An event for the core to decide about.
#[derive(Debug)]
pub enum Event {
    /// A checked call. It is answered by one [`Action::Reply`] with the same number, perhaps much later.
    Call {
        /// Number of the call, repeated in the reply.
        call: CallId,
        /// Caller.
        peer: Peer,
        request: Call,
    },
    /// The arena, rings and descriptors of a session were made, or could not be made, and the open is refused.
    ArenaMade {
        /// Session of the [`Action::MakeArena`].
        session: SessionId,
        /// The fault if they could not be made.
        result: Result<(), Fault>,
    },
    /// The process has taken its descriptors over the second socket.
    Attached { session: SessionId },
    /// One unchecked entry, copied out of the submission ring.
    Submission {
        /// Session of the ring.
        session: SessionId,
        /// Copy of the entry.
        entry: Sqe,
    },
    /// An operation has ended; the driver frees its buffer.
    IoDone {
        /// Operation of the [`Action::Io`].
        io: IoId,
        /// How it ended.
        result: IoResult,
        /// Bytes of the daemon's own buffer ([`Buffer::Meta`]).
        read: Option<AlignedBytes>,
    },
    /// The next tiles may move, if [`Core::moves`](super::Core::moves) says that some are to.
    RebalanceTick {
        /// Copy also tiles that their job may write again soon.
        force: bool,
    },
    /// Tiles that could not be moved are to be tried again.
    RetryMoves,
    /// The administrator changed the limits. What is already granted stays.
    Limits(Limits),
    /// Quotas of users and jobs, when the daemon starts and when the administrator changes them.
    Quotas(Quotas),
    /// No operation is in flight any more, and sessions will be handed over: flush what they wrote.
    HandOver,
    /// The process died, closed its descriptor socket, did not attach in time, or broke the ring.
    PeerGone { session: SessionId },
}

/// An action for the driver. Actions are performed in order.
#[derive(Debug)]
pub enum Action {
    /// Start an operation. It ends with one [`Event::IoDone`] in any case.
    Io {
        /// Number of the operation, repeated when it ends.
        io: IoId,
        /// Device to use.
        device: DeviceIndex,
        /// Kind of operation.
        op: IoOp,
        /// First byte on the device; 0 for a flush.
        offset: u64,
        /// Length, a multiple of the block; 0 for a flush.
        bytes: u32,
        /// Memory to read into or write from.
        buffer: Buffer,
        /// Priority in the device's queue.
        priority: Priority,
        /// Weights of the session's user and job; `None` for an operation of the daemon itself.
        weights: Option<Weights>,
    },
    /// Change the priority of an operation that has not ended.
    Promote {
        /// Operation of the [`Action::Io`].
        io: IoId,
        /// Priority from now on.
        priority: Priority,
    },
    /// Put an entry into the session's completion ring.
    Complete {
        /// Session of the ring.
        session: SessionId,
        /// Entry to put.
        entry: Cqe,
    },
    /// Answer a call.
    Reply {
        /// Number of the [`Event::Call`].
        call: CallId,
        /// Reply or refusal.
        reply: Result<Reply, Fault>,
    },
    /// Make memory, rings and descriptors; then [`Event::ArenaMade`].
    MakeArena {
        /// The session, for later events.
        session: SessionId,
        /// Token that the process shows on the descriptor socket.
        token: SessionToken,
        /// Process that may take the descriptors.
        peer: Peer,
        /// Name of the job among the peer's jobs.
        job: JobName,
        /// Places of the slots.
        geometry: Geometry,
        /// Entries of each ring, a power of two.
        ring_entries: u32,
        /// Operations in flight that are granted.
        iodepth: u32,
    },
    /// Close a device that has left the store; nothing is in flight on it.
    ForgetDevice { device: DeviceIndex },
    /// Unmap, unregister and close the arena of a session whose I/O has ended.
    DropArena {
        /// The session, which does not exist after this.
        session: SessionId,
    },
    /// Close the descriptor socket of a peer that broke the protocol. [`Action::DropArena`] follows when its I/O has ended.
    Evict {
        session: SessionId,
        /// Reason, for the log.
        why: Fault,
    },
}
