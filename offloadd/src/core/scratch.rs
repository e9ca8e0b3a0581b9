//! Scratch: tiles of one session alone, in one extent each, written at any time and part of no generation.
//!
//! For what a crash may lose because it can be made again, such as gradients of a step that is repeated. Nothing of it is on
//! record: after a crash its room is simply free. It is given back after the session's last operation has ended, because a
//! device may still be writing there.

use offload_api::TILES_MAX;
use offload_api::fault::{Fault, FaultKind};
use offload_api::geometry::SlotPlace;
use offload_api::ring::entry::{Request, Verb};

use super::io::TileIo;
use super::job::Activity;
use super::{Core, Reply};
use crate::io::{IoOp, SessionId};
use crate::store::definition::check_tile_bytes;
use crate::store::manifest::Version;
use crate::store::tile_table::Extent;

/// One of a session's own tiles.
#[derive(Debug)]
pub(super) struct ScratchTile {
    pub(super) extent: Extent,
    bytes: u32,
    /// `None`: never written, or the last write failed.
    pub(super) content: Option<Version>,
    activity: Activity,
}

impl ScratchTile {
    pub(super) fn new(extent: Extent, bytes: u32, content: Option<Version>) -> Self {
        Self {
            extent,
            bytes,
            content,
            activity: Activity::Idle,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.bytes)
    }

    /// It holds something, or is about to.
    pub(super) fn is_written(&self) -> bool {
        self.content.is_some() || self.activity == Activity::Writing
    }
}

impl Core {
    pub(super) fn reserve_scratch(
        &mut self,
        id: SessionId,
        tile_bytes: &[u32],
    ) -> Result<Option<Reply>, Fault> {
        let session = &self.sessions[&id];
        let (key, rank) = (session.key.clone(), session.rank);
        let invalid = |why: &str| {
            Err(Fault::new(
                FaultKind::Invalid,
                format!("scratch of rank {rank} of job {}: {why}", key.name),
            ))
        };
        let tile_count = self.tile_count(&key);
        if tile_count == 0 {
            return invalid("the job has no tiles yet: define them first");
        }
        if !session.scratch.is_empty() {
            return invalid("it has some already: ask once for all of it");
        }
        if tile_bytes.is_empty() || tile_bytes.len() > TILES_MAX - tile_count {
            return invalid(&format!(
                "{} tiles beside the job's {tile_count}: 1 to {TILES_MAX} in all",
                tile_bytes.len()
            ));
        }
        check_tile_bytes(tile_bytes.iter().copied())?;
        let asked_bytes = tile_bytes.iter().map(|&bytes| u64::from(bytes)).sum();
        self.admit_device_bytes(&key, asked_bytes)?;
        let extents = self.space.reserve_tiles(tile_bytes).map_err(|no_room| {
            Fault::new(
                FaultKind::NoSpace,
                format!(
                    "scratch of rank {rank} of job {} needs {} bytes; free: {}; keep it in host memory, drop a job or add a device",
                    key.name,
                    no_room.needed_bytes,
                    self.free_room(&no_room.free_bytes)
                ),
            )
        })?;
        let tiles = extents.into_iter().zip(tile_bytes);
        let session = self.sessions.get_mut(&id).expect("a live session");
        session.scratch = tiles
            .map(|(extent, &bytes)| ScratchTile::new(extent, bytes, None))
            .collect();
        Ok(Some(Reply::ReserveScratch {
            reserved_bytes: asked_bytes,
        }))
    }

    /// Marks one of a session's own tiles as being read or written.
    pub(super) fn start_scratch(
        &mut self,
        id: SessionId,
        index: usize,
        request: Request,
        place: SlotPlace,
    ) -> Result<(TileIo, IoOp), FaultKind> {
        self.leave_closed(id, index, request.verb, place.bytes);
        let reading_only = self.reading_only.is_some();
        let session = self.sessions.get_mut(&id).expect("its submission is taken");
        let job = &self.jobs[&session.key];
        let tile = &mut session.scratch[index];
        if place.bytes < u64::from(tile.bytes) {
            return Err(FaultKind::SlotTooSmall);
        }
        let (version, activity, op) = match (request.verb, tile.activity) {
            (_, Activity::Writing) | (Verb::SwapOut, Activity::Reading { .. }) => {
                return Err(FaultKind::TileBusy);
            }
            (Verb::SwapIn, reading) => {
                let count = match reading {
                    Activity::Reading { count } => count + 1,
                    _ => 1,
                };
                let version = tile.content.ok_or(FaultKind::NeverWritten)?;
                // A flush that failed may have lost it.
                if job.poison.is_some() {
                    return Err(FaultKind::Poisoned);
                }
                (version, Activity::Reading { count }, IoOp::Read)
            }
            (Verb::SwapOut, Activity::Idle) => {
                if reading_only || job.unusable().is_some() {
                    return Err(FaultKind::Poisoned);
                }
                // Of no generation: the number only says when it was written.
                let version = Version {
                    generation: job.working,
                    checksum: request.checksum,
                    which: 0,
                };
                (version, Activity::Writing, IoOp::Write)
            }
        };
        tile.activity = activity;
        let io = TileIo {
            session: id,
            key: session.key.clone(),
            request,
            extent: tile.extent,
            bytes: tile.bytes,
            version,
            scratch: Some(index),
        };
        Ok((io, op))
    }

    /// A tile that is to be written anyway leaves a device that is drained, if another has room.
    fn leave_closed(&mut self, id: SessionId, index: usize, verb: Verb, slot_bytes: u64) {
        let session = self.sessions.get_mut(&id).expect("its submission is taken");
        let refused = self.jobs[&session.key].unusable().is_some();
        let tile = &mut session.scratch[index];
        let idle = tile.activity == Activity::Idle && verb == Verb::SwapOut;
        // A write that is refused changes nothing.
        if refused
            || slot_bytes < u64::from(tile.bytes)
            || !idle
            || !self.space.is_closed(tile.extent.device)
        {
            return;
        }
        if let Ok(places) = self.space.reserve_tiles(&[tile.bytes]) {
            self.space.give(tile.extent, u64::from(tile.bytes));
            tile.extent = places[0];
            tile.content = None;
        }
    }

    pub(super) fn end_scratch(&mut self, io: &TileIo, index: usize, moved: bool) {
        let session = self.sessions.get_mut(&io.session);
        let tile = &mut session.expect("it waits for its operations").scratch[index];
        tile.activity = match tile.activity {
            Activity::Reading { count } if count > 1 => Activity::Reading { count: count - 1 },
            Activity::Writing => {
                tile.content = moved.then_some(io.version);
                Activity::Idle
            }
            _ => Activity::Idle,
        };
    }

    pub(super) fn release_scratch(&mut self, tiles: &[ScratchTile]) {
        for tile in tiles {
            self.space.give(tile.extent, u64::from(tile.bytes));
        }
    }
}
