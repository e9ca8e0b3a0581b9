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
//! An index counts entries since the start and wraps at 2^32; entry `index % entries` holds it (`entries` is a power of
//! two). Head to tail is what is ready. The side that writes an index keeps its own copy and never reads it back, so a
//! peer cannot move it. The other side's index is refused when it is impossible, and no index is used unmasked.
//!
//! The peer may write any byte at any time. An entry is therefore copied out once, word by word, and everything is
//! checked on the copy. Both rings have `entries` entries, at least twice the session's iodepth. A process has at most an iodepth of
//! operations in flight or not yet reaped, and how far a read has come is told only while half of the completion ring stays
//! free for their ends; so the completion ring never overflows unless the peer cheats.
//!
//! What it takes: some thousands of entries a second; a page fault or the doorbell's system call costs more than all of
//! this, so nothing here is batched.

pub mod entry;
pub mod index;
#[allow(unsafe_code)]
mod map;
mod sides;

pub use map::{RING_ENTRIES_MAX, RingMap, ring_bytes};
pub use sides::{DaemonRings, ProcessRings, Reached};

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
    /// Of each ring; a power of two.
    pub entries: u32,
    /// The daemon's life, which every submission names.
    pub epoch: u64,
    /// Zero.
    pub reserved: u64,
}

const _: () = assert!(size_of::<RingHeader>() == 32);

// Shared bytes are little endian; words are copied as they are.
const _: () = assert!(cfg!(target_endian = "little"));

/// Why a ring cannot be used, or not any more.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The other side's index lies where no honest one can: the rings are not to be used any more.
    #[error(
        "the peer's {ring} index is {index}, ours {ours}: they differ by more than {entries} entries"
    )]
    Index {
        /// "submission" or "completion".
        ring: &'static str,
        /// As the peer wrote it.
        index: u32,
        /// Of this side.
        ours: u32,
        /// Of the ring.
        entries: u32,
    },
    /// No room for a completion: the peer has not reaped, and was granted less than it has in flight.
    #[error("the {ring} ring is full")]
    Full {
        /// "submission" or "completion".
        ring: &'static str,
    },
    /// Not a ring's memory, or of another version.
    #[error("the ring's memory file: {what}")]
    Form {
        /// What is wrong with it.
        what: String,
    },
    /// The kernel refused.
    #[error("the ring's memory file: {op}: {source}")]
    Os {
        /// The system call.
        op: &'static str,
        /// Its errno.
        source: std::io::Error,
    },
}
