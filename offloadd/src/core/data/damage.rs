//! Counts damaged tiles that processes report. A report must fit the current state of the job. It counts if the server has read
//! the tile and found it damaged too, and once for each version of the tile.

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::TileIndex;

use super::job::{Activity, Stored};
use super::{Data, JobKey};
use crate::core::Damage;
use crate::io::SessionId;
use crate::store::definition::JobName;
use crate::store::tile_table::Extent;

/// A tile that a process reports as damaged.
pub(in crate::core) struct ReportedTile {
    pub(in crate::core) uid: u32,
    pub(in crate::core) job: JobName,
    pub(in crate::core) tile_bytes: u64,
}

impl Data {
    pub(in crate::core) fn hear_damage(
        &self,
        session: SessionId,
        damage: Damage,
    ) -> Result<ReportedTile, Fault> {
        let key = &self.sessions[&session].key;
        let job = self.jobs.get(key).expect("a session's job");
        let stored = job.stored.as_ref().filter(|stored| {
            extent_of(stored, &damage).is_some_and(|extent| !stored.damaged.contains(&extent))
        });
        let Some(stored) = stored else {
            return Err(Fault::new(
                FaultKind::Invalid,
                format!(
                    "tile {} of job {}: the report of damage does not match where the tile is stored now, or this damage was \
                     counted before",
                    damage.tile, key.name
                ),
            ));
        };
        Ok(ReportedTile {
            uid: key.uid,
            job: key.name.clone(),
            tile_bytes: stored.tile_bytes(damage.tile.0 as usize),
        })
    }

    /// Records damage that a process reported and the server found too. Returns whether it counts: the version is still there,
    /// and its damage was not counted before.
    pub(in crate::core) fn confirm_damage(
        &mut self,
        uid: u32,
        job: &JobName,
        damage: &Damage,
    ) -> bool {
        let job = self.jobs.get_mut(&JobKey::new(uid, job.clone()));
        let Some(stored) = job.and_then(|job| job.stored.as_mut()) else {
            return false;
        };
        extent_of(stored, damage).is_some_and(|extent| stored.damaged.insert(extent))
    }
}

/// Returns the tile's extent that holds the version `damage` names, if that is the newest one.
fn extent_of(stored: &Stored, damage: &Damage) -> Option<(TileIndex, u8)> {
    let index = damage.tile.0 as usize;
    let tile = stored.tiles.get(index)?;
    let version = tile.newest()?;
    let reported = Extent {
        device: damage.device,
        offset: damage.offset,
    };
    let fits = tile.activity != Activity::Writing
        && stored.table.extents[index][usize::from(version.which)] == reported
        && (version.generation, version.checksum) == (damage.generation, damage.expected);
    fits.then_some((damage.tile, version.which))
}
