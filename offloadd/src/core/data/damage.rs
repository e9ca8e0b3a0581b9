//! Damaged tiles that processes report and scrubs find. A process's report counts if it fits the current state of the job. Each version
//! of a tile counts once.

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{DeviceNumber, TileIndex};

use super::JobKey;
use super::jobs::JobTable;
use super::members::Member;
use super::stored::{Activity, StoredJob};
use crate::core::operations::Operations;
use crate::core::{Reply, TileDamage};
use crate::store::tile_table::Extent;

impl Member<'_> {
    pub(in crate::core) fn report_damage(
        self,
        damage: TileDamage<DeviceNumber>,
        ops: &Operations,
    ) -> Result<Reply, Fault> {
        let job = self.job;
        let tile = damage.tile;
        let located = ops.device_of(damage.device).map(|device| damage.on(device));
        let counted = located.filter(|damage| {
            job.stored.as_mut().is_some_and(|stored| {
                extent_of(stored, damage).is_some_and(|extent| stored.damaged.insert(extent))
            })
        });
        match counted {
            Some(damage) => Ok(Reply::ReportDamage {
                uid: job.key.uid,
                job: job.key.name.clone(),
                damage,
            }),
            None => Err(Fault::new(
                FaultKind::Invalid,
                format!(
                    "tile {} of job {}: the report of damage does not match where the tile is stored now, or this damage was \
                     counted before",
                    tile, job.key.name
                ),
            )),
        }
    }
}

impl JobTable {
    /// Whether damage that a scrub has confirmed was not counted before; false if its job or its extent has gone.
    pub(in crate::core) fn is_new_damage(&mut self, key: &JobKey, damage: &TileDamage) -> bool {
        let stored = self.get_mut(key).and_then(|job| job.stored.as_mut());
        stored.is_some_and(|stored| {
            let extents = stored.table.extents.get(damage.tile.0 as usize);
            let found = Extent {
                device: damage.device,
                offset: damage.offset,
            };
            let which = extents.and_then(|two| two.iter().position(|extent| *extent == found));
            which.is_some_and(|which| stored.damaged.insert((damage.tile, which as u8)))
        })
    }
}

/// Returns the tile's extent that holds the version `damage` names, if that is the newest one.
fn extent_of(stored: &StoredJob, damage: &TileDamage) -> Option<(TileIndex, u8)> {
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
