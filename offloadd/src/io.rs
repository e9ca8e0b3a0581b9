//! Names of device operations, shared by the core that requests them, the queue that orders them and the engines that run them.

use offload_api::geometry::SlotPlace;
pub use offload_support::aligned::AlignedBytes;

const _: () = assert!(offload_support::aligned::BLOCK_BYTES == offload_api::BLOCK_BYTES as usize);

/// One process's session. Never reused in one incarnation of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// One operation of a device. Never reused in one incarnation of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IoId(pub u64);

/// Kind of device operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoOp {
    /// Moves bytes from the device to memory.
    Read,
    /// Moves bytes from memory to the device.
    Write,
    /// Makes everything written to this device survive a power loss.
    Flush,
}

/// Describes a failed operation on the device at `path`: what was asked, where, and the device's answer.
pub fn failure(
    op: IoOp,
    path: &str,
    [offset, bytes]: [u64; 2],
    outcome: Result<u32, i32>,
) -> String {
    let why = match outcome {
        Err(errno) => std::io::Error::from_raw_os_error(errno).to_string(),
        Ok(moved) => format!("only {moved} bytes were moved: the drive may have been removed"),
    };
    match op {
        IoOp::Flush => format!("flushing {path}: {why}"),
        IoOp::Read => format!("reading {bytes} bytes at byte {offset} of {path}: {why}"),
        IoOp::Write => format!("writing {bytes} bytes at byte {offset} of {path}: {why}"),
    }
}

/// Memory of an operation.
#[derive(Debug)]
pub enum Buffer {
    /// The first `bytes` of a slot of a session's arena.
    Slot {
        /// Session that owns the arena.
        session: SessionId,
        /// Slot in the arena.
        place: SlotPlace,
    },
    /// Bytes of the daemon itself (records, catalog, tiles that move), used whole.
    Meta(AlignedBytes),
    /// No memory: the operation is a flush.
    None,
}

/// Result of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoResult {
    /// Bytes moved (0 for a flush), or the errno.
    pub outcome: Result<u32, i32>,
    /// Nanoseconds from submission to completion.
    pub device_ns: u64,
}
