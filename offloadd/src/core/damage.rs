//! A process says that a tile is damaged. It counts only if it fits what the job has now, and only once; whether it is true is
//! for the server to find out, by reading the tile itself.

use offload_api::fault::{Fault, FaultKind};

use super::job::{Activity, JobKey, Stored};
use super::{Core, Damage, Reply, Reported};
use crate::io::SessionId;
use crate::store::definition::JobName;
use crate::store::tile_table::Extent;

impl Core {
    pub(super) fn hear_damage(
        &mut self,
        session: SessionId,
        damage: Damage,
    ) -> Result<Option<Reply>, Fault> {
        let key = &self.sessions[&session].key;
        let job = self.jobs.get_mut(key).expect("a session's job");
        let stored = job.stored.as_mut().filter(|stored| fits(stored, &damage));
        let reported = stored.and_then(|stored| {
            let tile = &mut stored.tiles[damage.tile.0 as usize];
            let before = tile.reported.replace(damage.expected);
            (before != Some(damage.expected)).then(|| stored.tile_bytes(damage.tile.0 as usize))
        });
        let Some(tile_bytes) = reported else {
            return Err(Fault::new(
                FaultKind::Invalid,
                format!(
                    "tile {} of job {}: what was reported does not lie there, or was reported before",
                    damage.tile, key.name
                ),
            ));
        };
        let device = &self.devices[damage.device.0 as usize];
        Ok(Some(Reply::ReportDamage(Reported {
            uid: key.uid,
            job: key.name.clone(),
            path: device.path.clone(),
            superblock: device.superblock,
            tile_bytes,
        })))
    }

    /// Whether a tile is still to be found where `damage` says, with the checksum that it expects.
    pub fn still_lies(&self, uid: u32, job: &JobName, damage: &Damage) -> bool {
        let job = self.jobs.get(&JobKey::new(uid, job.clone()));
        let stored = job.and_then(|job| job.stored.as_ref());
        stored.is_some_and(|stored| fits(stored, damage))
    }
}

fn fits(stored: &Stored, damage: &Damage) -> bool {
    let index = damage.tile.0 as usize;
    let tile = stored.tiles.get(index);
    let Some(version) = tile.and_then(|tile| tile.newest()) else {
        return false;
    };
    let reported = Extent {
        device: damage.device,
        offset: damage.offset,
    };
    stored.tiles[index].activity != Activity::Writing
        && stored.table.extents[index][usize::from(version.which)] == reported
        && (version.generation, version.checksum) == (damage.generation, damage.expected)
}
