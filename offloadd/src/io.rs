//! Names for operations of devices: what the core asks for, engines do, and the queue puts in order.

use offload_api::geometry::SlotPlace;
pub use offload_support::aligned::AlignedBytes;

const _: () = assert!(offload_support::aligned::BLOCK_BYTES == offload_api::BLOCK_BYTES as usize);

/// One process's session. Never reused in one life of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// One operation of a device. Never reused in one life of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IoId(pub u64);

/// What a device can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoOp {
    /// Device to memory.
    Read,
    /// Memory to device.
    Write,
    /// Everything written to this device survives power loss.
    Flush,
}

/// The memory of an operation.
#[derive(Debug)]
pub enum Buffer {
    /// The first `bytes` of a slot of a session's arena.
    Slot {
        /// Whose arena.
        session: SessionId,
        /// Where in it.
        place: SlotPlace,
    },
    /// The daemon's own bytes (records, catalog, tiles that move), all of them.
    Meta(AlignedBytes),
    /// Of a flush.
    None,
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoResult {
    /// Bytes moved (a flush: 0), or the errno.
    pub outcome: Result<u32, i32>,
    /// From submission to completion.
    pub device_ns: u64,
}
