//! Tiles of one job that move together, and how far the copy of each has come.

use std::collections::VecDeque;

use offload_api::checksum::ChecksumDigest;
use offload_api::fault::Fault;

use crate::core::JobKey;
use crate::core::operations::ScriptId;
use crate::io::IoOp;
use crate::store::tile_table::Extent;

/// Bytes of each copied tile in memory and in flight. As large as a piece of a session's read, so that a copy occupies a drive
/// no longer.
const PIECE_BYTES: u32 = 256 << 10;

/// Tiles that move together.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) key: JobKey,
    pub(super) job_id: u64,
    pub(super) moves: Vec<TileMove>,
    /// Indices in `moves` whose copy has not begun.
    pub(super) waiting: VecDeque<usize>,
    pub(super) inflight_count: usize,
    /// Reason why the batch fails; its copies are discarded.
    pub(super) failed: Option<Fault>,
    /// Slots with torn records, over which voids are written before anything else.
    pub(super) cleared: Vec<usize>,
    pub(super) script: Option<(ScriptId, BatchScript)>,
}

/// Purpose of a batch's script.
#[derive(Clone, Copy, Debug)]
pub(super) enum BatchScript {
    /// Makes copies of tiles durable, and clears what an interrupted commit left.
    Settle,
    /// Writes a new revision of a definition.
    Exchange,
}

/// One extent that moves.
#[derive(Debug)]
pub(super) struct TileMove {
    pub(super) tile: u32,
    pub(super) which: u8,
    pub(super) from: Extent,
    pub(super) to: Extent,
    pub(super) bytes: u32,
    /// `None` for an empty extent.
    pub(super) copy: Option<CopyProgress>,
    /// Reason why the extent stays where it is.
    pub(super) stays: Option<StayReason>,
}

#[derive(Debug)]
pub(super) enum StayReason {
    /// The extent was written during the copy.
    Written,
    /// The extent cannot be read, or its bytes are not those that were committed.
    Lost(Fault),
}

/// Progress of a copy.
#[derive(Debug)]
pub(super) struct CopyProgress {
    /// Expected checksum; `None` if it is unknown.
    pub(super) expected: Option<u32>,
    pub(super) digest: ChecksumDigest,
    pub(super) done_bytes: u32,
}

/// A piece of a copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyIo {
    pub(super) place: usize,
    pub(super) op: IoOp,
    pub(super) bytes: u32,
}

impl TileMove {
    /// Moves an extent with `content`: `None` if it is empty, else the checksum if it is known.
    pub(super) fn new(
        tile: u32,
        which: u8,
        [from, to]: [Extent; 2],
        bytes: u32,
        content: Option<Option<u32>>,
    ) -> Self {
        Self {
            tile,
            which,
            from,
            to,
            bytes,
            copy: content.map(|expected| CopyProgress {
                expected,
                digest: ChecksumDigest::new(),
                done_bytes: 0,
            }),
            stays: None,
        }
    }

    pub(super) fn piece_bytes(&self) -> u32 {
        let done_bytes = self.copy.as_ref().map_or(0, |copy| copy.done_bytes);
        (self.bytes - done_bytes).min(PIECE_BYTES)
    }
}
