//! What the store holds, and where tiles lie that can be compared with what was committed. Changes nothing; each question takes a
//! bounded time, however large the store is.

use std::sync::Arc;

use offload_api::ids::{DeviceIndex, Generation, TileIndex};

use super::{Data, JobKey, Viewer};
use crate::store::content::JobContent;
use crate::store::definition::{JobDefinition, JobName};
use crate::store::manifest::{Mark, Version, resumable};
use crate::store::tile_table::Extent;

/// Tiles looked at for one answer.
const TILES_A_LOOK: usize = 256;

/// A job that may be gone on from, in the order of owners and names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct At {
    /// Owner.
    pub uid: u32,
    /// The job.
    pub name: JobName,
    /// The first tile that was not told yet.
    pub tile: usize,
}

/// A committed version of a tile and where it lies, now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommittedTile {
    /// Which.
    pub tile: TileIndex,
    /// By the newest record that names it.
    pub generation: Generation,
    /// What it must be.
    pub version: Version,
    /// Where it lies.
    pub extent: Extent,
    /// Device.
    pub path: Arc<str>,
}

/// Committed tiles of one job, and where to go on.
#[derive(Clone, Debug)]
pub struct CommittedTiles {
    /// What the job calls them.
    pub definition: Arc<JobDefinition>,
    /// In the order of their indices.
    pub tiles: Vec<CommittedTile>,
    /// `None`: these were the job's last.
    pub next: Option<usize>,
}

impl Data {
    /// The jobs in the store that `viewer` may see, by owner and name.
    pub(in crate::core) fn contents(&self, viewer: Viewer) -> Vec<JobContent> {
        let seen = |key: &JobKey| viewer == Viewer::All || viewer == Viewer::Uid(key.uid);
        let jobs = self.jobs.iter().filter(|(key, _)| seen(key));
        jobs.filter_map(|(_, job)| {
            let stored = job.stored.as_ref()?;
            let definition = &stored.table.definition;
            Some(JobContent::new(&stored.entry, definition, &stored.slots))
        })
        .collect()
    }

    /// Committed tiles of a job from a place on; `None`: there is no such job (any more).
    pub(in crate::core) fn committed_tiles(
        &self,
        at: &At,
        paths: &[&str],
    ) -> Option<CommittedTiles> {
        let key = JobKey::new(at.uid, at.name.clone());
        let stored = self.jobs.get(&key)?.stored.as_ref()?;
        let table = &stored.table;
        let end = (at.tile + TILES_A_LOOK).min(table.extents.len());
        let tiles = (at.tile..end).flat_map(|index| {
            let mut found: Vec<CommittedTile> = Vec::new();
            // The newest first, so that it names what both have.
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
