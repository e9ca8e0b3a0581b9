//! The shared pages of a session: two rings with one producer and one consumer each, in one sealed memory file.
//!
//! ```text
//!   byte   0  magic | version | entries | epoch | reserved         header, written once by the daemon
//!        128  submission tail      written by the process          each index on a pair of cache lines of its own:
//!        256  submission head      written by the daemon           CPUs fetch lines two at a time
//!        384  completion tail      written by the daemon
//!        512  completion head      written by the process
//!       4096  Sqe 0 | Sqe 1 | ... | Sqe entries-1                  64 bytes each, up to a whole page
//!          +  Cqe 0 | Cqe 1 | ... | Cqe entries-1
//! ```
//!
//! An index counts entries since the start and wraps at 2^32; entry `index % entries` holds it (`entries` is a power of two).
//! The entries from head to tail are ready. The side that writes an index keeps its own copy and never reads the shared one, so
//! that the peer cannot move it. The other side's index is refused when it is impossible, and no index is used unmasked.
//!
//! The peer may write any byte at any time. An entry is therefore copied out once, word by word, and only the copy is checked
//! and used. Both rings have `entries` entries, at least twice the session's iodepth. A process has at most an iodepth of
//! operations in flight or unreaped, so an honest one never overflows the completion ring.
//!
//! A session has some thousands of entries a second. A page fault or the doorbell's system call costs more than all of this, so
//! nothing here is batched.

pub mod entry;
pub mod index;
#[allow(unsafe_code)]
mod map;
mod sides;

pub use map::{RING_ENTRIES_MAX, RingMap, ring_bytes};
pub use sides::{DaemonRings, ProcessRings, RingPositions};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// "OFFLRING" as little endian bytes.
pub const RING_MAGIC: u64 = u64::from_le_bytes(*b"OFFLRING");

/// The first bytes of the memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RingHeader {
    /// [`RING_MAGIC`].
    pub magic: u64,
    /// [`crate::PROTOCOL_VERSION`] of the daemon.
    pub version: u32,
    /// Entries of each ring; a power of two.
    pub entries: u32,
    /// Epoch of the daemon, which every submission repeats.
    pub epoch: u64,
    /// Zero.
    pub reserved: u64,
}

const _: () = assert!(size_of::<RingHeader>() == 32);

// Shared bytes are little endian; words are copied unchanged.
const _: () = assert!(cfg!(target_endian = "little"));

/// Why a ring cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The other side's index is impossible. The rings are not used any more.
    #[error(
        "the peer's {ring} index {index} and ours, {ours}, differ by more than {entries} entries"
    )]
    Index {
        /// "submission" or "completion".
        ring: &'static str,
        /// Index that the peer wrote.
        index: u32,
        /// Index of this side.
        ours: u32,
        /// Entries of the ring.
        entries: u32,
    },
    /// No room for a completion: the peer has more in flight than it was granted, and has not reaped.
    #[error("the {ring} ring is full")]
    Full {
        /// "submission" or "completion".
        ring: &'static str,
    },
    /// The file is not a ring, or of another version.
    #[error("the ring's memory file: {what}")]
    Form {
        /// Defect of the file.
        what: String,
    },
    /// A system call failed.
    #[error("the ring's memory file: {op}: {source}")]
    Os {
        /// The system call.
        op: &'static str,
        /// errno of the system call.
        source: std::io::Error,
    },
}
