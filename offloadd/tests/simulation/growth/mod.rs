//! Tests devices that are added to a store and drained. What could go wrong: tiles that cannot be found any more, a store that opens with a partly
//! added device, extents that are used twice, a device that is never empty. `crashes` has random cuts during these operations.

mod beside_jobs;
mod coming;
mod last_numbers;
mod leaving;
mod measured;

use crate::disks::SimDisks;
use offloadd::blocks::Blocks;
use offloadd::core::Reply;
use offloadd::store::recover;
use offloadd::store::superblock::MeasuredRates;

use super::world::{Process, World};

const DISK_BYTES: u64 = 2 << 20;

fn added(world: &mut World) -> usize {
    let call = world.add_disk(DISK_BYTES, MeasuredRates::default());
    assert!(matches!(world.answer(call), Ok(Reply::AddDevice { .. })));
    world.positions.len() - 1
}

pub(crate) fn write_all(world: &mut World, process: Process, generation: u64, tiles: u32) {
    for tile in 0..tiles {
        let seed = u64::from(tile) + 100 * generation;
        world.write(process, generation, tile, seed).unwrap();
    }
    world.commit(process, generation).unwrap();
}

pub(crate) fn expect_all(world: &mut World, process: Process, generation: u64, tiles: u32) {
    for tile in 0..tiles {
        world.expect_tile(process, tile, u64::from(tile) + 100 * generation);
    }
}

/// Returns the number of extents of all jobs on each device, by position.
fn extents(disks: &mut SimDisks) -> Vec<usize> {
    let store = recover::read(disks).unwrap();
    let mut counts = vec![0; disks.count()];
    for job in &store.jobs {
        for extent in job.table.extents.iter().flatten() {
            counts[store[extent.device].position] += 1;
        }
    }
    counts
}

/// Flips a bit of a tile that the first job committed in generation 1 to the device at `position`. Returns the tile.
pub(crate) fn damage_a_tile(disks: &mut SimDisks, position: usize) -> u32 {
    let store = recover::read(disks).unwrap();
    let record = &store.jobs[0].slots[1].sound().unwrap().record;
    let (tile, extent) = (store.jobs[0].table.extents.iter().enumerate())
        .map(|(tile, extents)| {
            let version = record.versions[tile].unwrap();
            (tile as u32, extents[usize::from(version.which)])
        })
        .find(|(_, extent)| store[extent.device].position == position)
        .unwrap();
    disks.flip(position, extent.offset + 7, 1);
    tile
}
