//! Reads and writes of tiles that a process has asked for.

use offload_api::geometry::SlotPlace;
use offload_api::ring::entry::Request;

use super::JobKey;
use crate::io::SessionId;
use crate::store::manifest::Version;
use crate::store::tile_table::Extent;

/// One tile in flight.
#[derive(Clone, Debug)]
pub(super) struct TileIo {
    pub(super) session: SessionId,
    pub(super) key: JobKey,
    pub(super) request: Request,
    pub(super) extent: Extent,
    pub(super) bytes: u32,
    /// Swap in: version that is expected. Swap out: version that is written.
    pub(super) version: Version,
    /// Index of a scratch tile; `None` for a tile of the job.
    pub(super) scratch: Option<usize>,
}

/// A write that waits until its job is marked as being overwritten.
#[derive(Clone, Debug)]
pub(super) struct ParkedWrite {
    pub(super) tile: TileIo,
    pub(super) place: SlotPlace,
}
