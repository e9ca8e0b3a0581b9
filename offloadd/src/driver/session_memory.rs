//! Memory and descriptors of one session.

use std::io::{PipeReader, PipeWriter};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use offload_api::fault::{Fault, FaultKind};
use offload_api::geometry::Geometry;
use offload_api::ids::Epoch;
use offload_api::ring::{DaemonRings, RingMap, RingPositions};
use rustix::fs::OFlags;

use crate::arena::{Arena, LockPolicy};
use crate::handover::Descriptors;

/// Memory and descriptors that a session shares with its process.
#[derive(Debug)]
pub(super) struct SessionMemory {
    pub(super) arena: Arc<Arena>,
    pub(super) rings: DaemonRings,
    pub(super) ring_fd: OwnedFd,
    /// Eventfd that the process writes. The daemon watches it for edges and never reads it, because the process could make a read
    /// block.
    pub(super) submission_doorbell: OwnedFd,
    /// Pipe that the daemon writes. Not an eventfd: only the daemon's end decides whether a write blocks.
    pub(super) completion_doorbell: PipeWriter,
    /// The process's end of the pipe.
    pub(super) completion_reader: PipeReader,
}

impl SessionMemory {
    /// Adopts what a previous daemon made.
    pub(super) fn adopt(
        descriptors: Descriptors,
        geometry: &Geometry,
        ring_entries: u32,
        reached: RingPositions,
        epoch: Epoch,
        policy: LockPolicy,
    ) -> Result<(Self, OwnedFd, Option<OwnedFd>), Fault> {
        let broken = |what: String| Fault::new(FaultKind::Protocol, what);
        let arena = Arc::new(Arena::adopt(descriptors.arena, geometry, policy)?);
        let map = RingMap::adopt(&descriptors.ring, ring_entries, epoch)
            .map_err(|error| broken(error.to_string()))?;
        let completion_doorbell = PipeWriter::from(descriptors.completion_doorbell);
        rustix::fs::fcntl_setfl(&completion_doorbell, OFlags::NONBLOCK)
            .map_err(|errno| broken(format!("setting O_NONBLOCK on its doorbell: {errno}")))?;
        let made = Self {
            arena,
            rings: DaemonRings::resume(map, reached),
            ring_fd: descriptors.ring,
            submission_doorbell: descriptors.submission_doorbell,
            completion_doorbell,
            completion_reader: PipeReader::from(descriptors.completion_reader),
        };
        Ok((made, descriptors.life_line, descriptors.process))
    }
}
