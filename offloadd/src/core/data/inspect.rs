//! Lists the jobs of the store, and the extents of committed tiles with their checksums. Changes nothing. Each call takes a
//! bounded time, however large the store is.

use std::sync::Arc;

use offload_api::ids::{DeviceIndex, Generation, TileIndex};

use super::jobs::JobTable;
use super::{JobKey, Viewer};
use crate::store::content::JobContent;
use crate::store::definition::{JobDefinition, JobName};
use crate::store::manifest::{Mark, Version, resumable};
use crate::store::tile_table::Extent;

/// Tiles in one answer.
const TILES_AN_ANSWER: usize = 256;

/// A position in the committed tiles of the store, ordered by owner, job and tile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TilePosition {
    /// Owner.
    pub uid: u32,
    pub name: JobName,
    /// First tile that was not returned yet.
    pub tile: usize,
}

/// A committed version of a tile, and its extent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommittedTile {
    pub tile: TileIndex,
    /// Generation of the newest record that names the version.
    pub generation: Generation,
    /// Version with its checksum.
    pub version: Version,
    /// Extent that holds the version.
    pub extent: Extent,
    /// Path of the device.
    pub path: Arc<str>,
}

/// Committed tiles of one job, and the position of the next ones.
#[derive(Clone, Debug)]
pub struct CommittedTiles {
    /// Definition of the job, with the names of the tiles.
    pub definition: Arc<JobDefinition>,
    /// Tiles in the order of their indices.
    pub tiles: Vec<CommittedTile>,
    /// First tile of the next answer; `None` after the job's last tile.
    pub next: Option<usize>,
}

impl JobTable {
    /// Returns the jobs in the store that `viewer` may see, by owner and name.
    pub(in crate::core) fn contents(&self, viewer: Viewer) -> Vec<JobContent> {
        let jobs = self.iter().filter(|job| viewer.sees(&job.key));
        jobs.filter_map(|job| {
            let stored = job.stored.as_ref()?;
            let definition = &stored.table.definition;
            Some(JobContent {
                pids: job.pids(),
                ..JobContent::new(&stored.entry, definition, &stored.slots)
            })
        })
        .collect()
    }

    /// Returns committed tiles of a job from a position on; `None` if the job does not exist (any more).
    pub(in crate::core) fn committed_tiles(
        &self,
        at: &TilePosition,
        paths: &[&str],
    ) -> Option<CommittedTiles> {
        let key = JobKey::new(at.uid, at.name.clone());
        let stored = self.get(&key)?.stored.as_ref()?;
        let table = &stored.table;
        let end = (at.tile + TILES_AN_ANSWER).min(table.extents.len());
        let tiles = (at.tile..end).flat_map(|index| {
            let mut found: Vec<CommittedTile> = Vec::new();
            // The newest first: it names versions that both records have.
            for marked in resumable(&stored.slots).into_iter().rev() {
                let Some(version) = marked.record.versions[index] else {
                    continue;
                };
                let known = found.iter().any(|other| other.version == version);
                if known || marked.mark == Some(Mark::Overwriting) {
                    continue;
                }
                let extent = table.extents[index][usize::from(version.which)];
                let DeviceIndex(device) = extent.device;
                found.push(CommittedTile {
                    tile: TileIndex(index as u32),
                    generation: marked.record.generation,
                    version,
                    extent,
                    path: paths[device as usize].into(),
                });
            }
            found
        });
        Some(CommittedTiles {
            definition: table.definition.clone(),
            tiles: tiles.collect(),
            next: (end < table.extents.len()).then_some(end),
        })
    }
}
