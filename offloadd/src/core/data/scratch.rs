//! Scratch tiles: tiles of one session, with one extent each, that can be written at any time and belong to no generation.
//!
//! They hold what can be computed again, such as gradients. No record names them, so after a crash their space is free.
//! Otherwise it is freed after the session's last operation has ended, because a device may still be writing there.

use offload_api::TILES_MAX;
use offload_api::fault::{Fault, FaultKind};
use offload_api::geometry::SlotPlace;
use offload_api::ring::entry::{Request, Sqe, Verb};
use offload_support::units::ApproxBytes;

use super::job::Job;
use super::members::Member;
use super::session::{ScratchTile, Session, Stage};
use super::stored::Activity;
use super::tile_io::TileIo;
use super::{Data, Incarnation};
use crate::core::Reply;
use crate::io::SessionId;
use crate::store::definition::check_tile_bytes;
use crate::store::manifest::Version;
use crate::store::tile_table::Extent;

/// Space that a session asks for.
pub(in crate::core) struct ScratchRequest {
    session: SessionId,
    /// Name of the session in messages.
    who: String,
    tile_bytes: Vec<u32>,
}

/// A scratch tile that is about to be written.
pub(in crate::core) struct ScratchWrite {
    session: SessionId,
    index: usize,
    pub(in crate::core) extent: Extent,
    pub(in crate::core) bytes: u32,
}

impl ScratchRequest {
    pub(in crate::core) fn tile_bytes(&self) -> &[u32] {
        &self.tile_bytes
    }

    /// Fault for a request that exceeds the free space.
    pub(in crate::core) fn no_room(&self, needed_bytes: u64, free: &str) -> Fault {
        Fault::new(
            FaultKind::NoSpace,
            format!(
                "{} needs {}; free: {free}; keep it in host memory, delete a job or add a device",
                self.who,
                ApproxBytes(needed_bytes)
            ),
        )
    }
}

impl Data {
    /// # Errors
    /// The session may not have such tiles, or not as many bytes.
    pub(in crate::core) fn check_scratch(
        &mut self,
        id: SessionId,
        tile_bytes: Vec<u32>,
    ) -> Result<ScratchRequest, Fault> {
        let Member { session, job, .. } = self.member(id);
        let key = session.key.clone();
        let who = format!("scratch of rank {} of job {}", session.rank, key.name);
        let invalid = |why: &str| Err(Fault::new(FaultKind::Invalid, format!("{who}: {why}")));
        let tile_count = job.tile_count();
        if tile_count == 0 {
            return invalid("the job has no tiles yet: define them first");
        }
        if !session.scratch.is_empty() {
            return invalid("it exists already: ask for all of it at once");
        }
        if tile_bytes.is_empty() || tile_bytes.len() > TILES_MAX - tile_count {
            return invalid(&format!(
                "{} tiles in addition to the job's {tile_count}: expected 1 or more, and at most {TILES_MAX} in all",
                tile_bytes.len()
            ));
        }
        check_tile_bytes(tile_bytes.iter().copied())?;
        let asked_bytes = tile_bytes.iter().map(|&bytes| u64::from(bytes)).sum();
        self.admission().admit_device_bytes(&key, asked_bytes)?;
        Ok(ScratchRequest {
            session: id,
            who,
            tile_bytes,
        })
    }

    /// Gives a session its scratch tiles.
    pub(in crate::core) fn give_scratch(
        &mut self,
        asked: ScratchRequest,
        extents: Vec<Extent>,
    ) -> Reply {
        let ScratchRequest {
            session,
            tile_bytes,
            ..
        } = asked;
        let reserved_bytes = tile_bytes.iter().map(|&bytes| u64::from(bytes)).sum();
        self.member(session).session.scratch = (extents.into_iter().zip(tile_bytes))
            .map(|(extent, bytes)| ScratchTile::new(extent, bytes, None))
            .collect();
        Reply::ReserveScratch { reserved_bytes }
    }

    /// Returns the scratch tile that `entry` overwrites, if the entry is valid: the tile may move to another extent.
    pub(in crate::core) fn scratch_write(
        &mut self,
        id: SessionId,
        entry: &Sqe,
    ) -> Option<ScratchWrite> {
        let session = self.sessions.get(id)?;
        if session.scratch.is_empty() || session.stage != Stage::Live {
            return None;
        }
        let request = Request::check(entry, self.incarnation.epoch).ok()?;
        let Member {
            session,
            job,
            incarnation,
        } = self.member(id);
        let (index, place) = session.check_slot(job, &request).ok()?;
        let index = index.checked_sub(job.tile_count())?;
        let tile = &session.scratch[index];
        let writes = request.verb == Verb::SwapOut && tile.activity == Activity::Idle;
        let refused = job.unwritable(incarnation).is_some();
        let fits = place.bytes >= u64::from(tile.bytes);
        (writes && fits && !refused).then_some(ScratchWrite {
            session: id,
            index,
            extent: tile.extent,
            bytes: tile.bytes,
        })
    }

    /// Moves the tile to `extent` without its content.
    pub(in crate::core) fn replace_scratch(&mut self, write: &ScratchWrite, extent: Extent) {
        let tile = &mut self.member(write.session).session.scratch[write.index];
        tile.extent = extent;
        tile.content = None;
    }
}

impl Session {
    /// Marks a scratch tile as being read or written, if that is allowed now.
    pub(super) fn start_scratch(
        &mut self,
        job: &Job,
        incarnation: &Incarnation,
        index: usize,
        request: Request,
        place: SlotPlace,
    ) -> Result<TileIo, FaultKind> {
        let tile = &mut self.scratch[index];
        if place.bytes < u64::from(tile.bytes) {
            return Err(FaultKind::SlotTooSmall);
        }
        let (version, activity) = match (request.verb, tile.activity) {
            (_, Activity::Writing) | (Verb::SwapOut, Activity::Reading { .. }) => {
                return Err(FaultKind::TileBusy);
            }
            (Verb::SwapIn, reading) => {
                let count = match reading {
                    Activity::Reading { count } => count + 1,
                    _ => 1,
                };
                let version = tile.content.ok_or(FaultKind::NeverWritten)?;
                // A failed flush may have lost it.
                if job.poison.is_some() {
                    return Err(FaultKind::Poisoned);
                }
                (version, Activity::Reading { count })
            }
            (Verb::SwapOut, Activity::Idle) => {
                if job.unwritable(incarnation).is_some() {
                    return Err(FaultKind::Poisoned);
                }
                // It belongs to no generation: the number only tells when it was written.
                let version = Version {
                    generation: job.working,
                    checksum: request.checksum,
                    which: 0,
                };
                (version, Activity::Writing)
            }
        };
        tile.activity = activity;
        Ok(TileIo {
            session: self.id,
            key: self.key.clone(),
            request,
            extent: tile.extent,
            bytes: tile.bytes,
            version,
            scratch: Some(index),
        })
    }

    /// Marks a scratch tile as read, or as written with `version`.
    pub(super) fn end_scratch(&mut self, index: usize, version: Version, moved: bool) {
        let tile = &mut self.scratch[index];
        tile.activity = match tile.activity {
            Activity::Reading { count } if count > 1 => Activity::Reading { count: count - 1 },
            Activity::Writing => {
                tile.content = moved.then_some(version);
                Activity::Idle
            }
            _ => Activity::Idle,
        };
    }
}
