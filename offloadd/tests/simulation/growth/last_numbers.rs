//! Tests the last numbers of devices and revisions of definitions: further ones are refused without harm. No real store gets there.

use crate::disks::SimDisks;
use offload_api::fault::FaultKind;
use offloadd::blocks::Blocks;
use offloadd::core::{Call, Moves};
use offloadd::store::definition::Durability;
use offloadd::store::superblock::MeasuredRates;
use offloadd::store::{CATALOG_OFFSETS, recover};
use test_hooks::random::SimRandom;

use super::{DISK_BYTES, expect_all, write_all};
use crate::world::{PEER, World, formatted, job};

/// Makes a store whose numbers are nearly used up.
fn at_the_end(change: impl Fn(&mut recover::RecoveredStore)) -> SimDisks {
    let mut world = World::start(formatted(), SimRandom::new(14));
    let process = world.begin("one", 20, Durability::Committed);
    write_all(&mut world, process, 1, 20);
    let (mut disks, _) = world.crash(true);
    let mut store = recover::read(&mut disks).unwrap();
    change(&mut store);
    let numbers: Vec<u32> = store.devices.iter().map(|d| d.superblock.number).collect();
    let catalog = store.catalog.encode();
    let job = &store.jobs[0];
    let definition = job.table.encode(job.entry.job_id, &numbers);
    for offset in CATALOG_OFFSETS {
        disks.write(0, offset, &catalog).unwrap();
    }
    for offset in job.entry.area.definitions() {
        disks.write(0, offset, &definition).unwrap();
    }
    disks.flush(0).unwrap();
    disks
}

#[test]
fn where_numbers_of_devices_end_a_device_is_refused() {
    let disks = at_the_end(|store| store.catalog.next_number = u32::MAX);
    let mut world = World::start(disks, SimRandom::new(15));
    let call = world.add_disk(DISK_BYTES, MeasuredRates::default());
    let fault = world.answer(call).unwrap_err();
    assert_eq!(fault.kind, FaultKind::TooMany);
    assert!(
        fault.message.contains("a number is never used again"),
        "{fault}"
    );
    let process = world.reopen("one", 1);
    expect_all(&mut world, process, 1, 20);
}

#[test]
fn where_revisions_end_tiles_stay_and_the_job_continues() {
    let disks = at_the_end(|store| store.jobs[0].table.revision = u32::MAX);
    let mut world = World::start(disks, SimRandom::new(16));
    let call = world.drain_call("sim1");
    world.answer(call).unwrap();
    world.move_all();
    assert_eq!(world.core.moves(), Moves::Stopped);
    let why = world.core.device_states()[1].status.stuck.clone();
    assert!(why.unwrap().contains("job one of uid 1000"));
    let process = world.reopen("one", 1);
    write_all(&mut world, process, 2, 20);
    expect_all(&mut world, process, 2, 20);
    world.close(process).unwrap();
    assert!(
        world
            .ask(Call::DropJob {
                uid: PEER.uid,
                job: job("one")
            })
            .is_ok()
    );
    let call = world.drain_call("sim1");
    world.answer(call).unwrap();
    world.move_all();
    assert_eq!(world.left, [1]);
}
