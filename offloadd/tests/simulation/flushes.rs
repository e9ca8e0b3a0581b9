//! Tests failed flushes, which lose unflushed bytes while the next flush succeeds. What could go wrong: two flushes of one device at a time, of which
//! the successful one hides the loss of the other; a loss that is not reported to a job, a copy or the next daemon; a record whose commit failed and
//! that is found again.

use crate::disks::{SimDisks, SimFault, SimFaultPlan};
use offload_api::fault::FaultKind;
use offloadd::blocks::Blocks;
use offloadd::core::{Call, Event};
use offloadd::store::definition::Durability::Committed;
use offloadd::store::format::format;
use offloadd::store::superblock::MeasuredRates;
use offloadd::store::superblock::StoreId;
use offloadd::store::verify::verify;
use offloadd::store::{CATALOG_OFFSETS, recover};
use test_hooks::random::SimRandom;

use super::growth::{expect_all, write_all};
use super::world::{Process, World, formatted, job};

const TILES: u32 = 6;

/// Losses of a failed flush: everything, or a random part.
const FAULTS: [SimFault; 2] = [SimFault::FlushLost, SimFault::Errno(libc::EIO)];

/// Makes a store with more space than [`formatted`] has.
fn roomy() -> SimDisks {
    let mut disks = SimDisks::new(&[8 << 20, 8 << 20]);
    let rates = [MeasuredRates::default(); 2];
    format(&mut disks, StoreId(*b"a store's id 16b"), &rates, 7, false).unwrap();
    disks
}

fn write(world: &mut World, process: Process, generation: u64) {
    for tile in 0..TILES {
        let seed = u64::from(tile) + 100 * generation;
        world.write(process, generation, tile, seed).unwrap();
    }
}

/// Gives the `skip`th operation from now on this fault.
fn plan(world: &mut World, skip: u64, fault: SimFault) {
    let disks = &mut world.engine.disks;
    disks.happened.clear();
    disks.plan = Some(SimFaultPlan {
        at: disks.operation_count() + skip,
        for_good: false,
        fault,
    });
}

/// Kills the daemon, with `power` also cuts the power, and starts the next daemon on working devices.
fn restart(world: World, power: bool) -> World {
    let (mut disks, random) = world.crash(power);
    disks.repair();
    World::start(disks, random)
}

/// Opens a job in the next daemon and asserts that the newest offered generation is intact. Returns its number.
fn newest_is_whole(world: &mut World, name: &str) -> u64 {
    let (process, record) = world.open(&job(name), 0, 1).unwrap();
    let newest = record.unwrap().generations.pop().unwrap().generation.0;
    world.resume(process, newest).unwrap();
    expect_all(world, process, newest, TILES);
    newest
}

#[test]
fn jobs_that_commit_at_once_lose_nothing_acknowledged_when_a_flush_fails() {
    let (mut failed_count, mut both_failed_count) = (0, 0);
    for (seed, fault) in (0..40).flat_map(|seed| FAULTS.map(|fault| (seed, fault))) {
        for skip in 0..10 {
            let mut world = World::start(formatted(), SimRandom::new(seed));
            let names = ["one", "two"];
            let processes = names.map(|name| world.begin(name, TILES, Committed));
            for process in processes {
                write_all(&mut world, process, 1, TILES);
                write(&mut world, process, 2);
            }
            let calls = processes.map(|process| world.commit_call(process, 2, b"2"));
            plan(&mut world, skip, fault);
            let answers = calls.map(|call| world.answer(call));
            let failures = answers.iter().filter(|answer| answer.is_err()).count();
            failed_count += usize::from(failures > 0);
            both_failed_count += usize::from(failures == 2);
            // Only the daemon is killed: executed writes stay.
            let mut world = restart(world, false);
            for (name, answer) in names.into_iter().zip(&answers) {
                let newest = newest_is_whole(&mut world, name);
                let expected = if answer.is_ok() { 2 } else { 1 };
                assert_eq!(
                    newest, expected,
                    "seed {seed}, operation {skip}: {answer:?}"
                );
            }
        }
    }
    assert!(failed_count > 100, "{failed_count}");
    assert!(both_failed_count > 50, "{both_failed_count}");
}

#[test]
fn jobs_that_wait_for_a_device_share_its_flush() {
    const JOBS: usize = 4;
    let mut world = World::start(formatted(), SimRandom::new(1));
    let processes: Vec<Process> = (0..JOBS)
        .map(|index| world.begin(&format!("job-{index}"), TILES, Committed))
        .collect();
    for process in &processes {
        write(&mut world, *process, 1);
    }
    world.flush_count = 0;
    let calls: Vec<_> = (processes.iter())
        .map(|process| world.commit_call(*process, 1, b"1"))
        .collect();
    for call in calls {
        world.answer(call).unwrap();
    }
    // Committing alone, each job takes a flush of both devices and one of its record.
    let alone = 3 * JOBS;
    assert!(world.flush_count <= 2 * alone / 3, "{}", world.flush_count);
}

#[test]
fn a_commit_that_fails_after_its_record_was_written_is_not_found_by_a_restart() {
    let mut failed_count = 0;
    for (seed, fault) in (0..40).flat_map(|seed| FAULTS.map(|fault| (seed, fault))) {
        for skip in 0..8 {
            let mut world = World::start(formatted(), SimRandom::new(seed));
            let process = world.begin("one", TILES, Committed);
            write_all(&mut world, process, 1, TILES);
            write(&mut world, process, 2);
            let call = world.commit_call(process, 2, b"2");
            plan(&mut world, skip, fault);
            let answer = world.answer(call);
            let mut world = restart(world, seed % 2 == 0);
            let newest = newest_is_whole(&mut world, "one");
            assert_eq!(newest, if answer.is_ok() { 2 } else { 1 }, "{answer:?}");
            failed_count += usize::from(answer.is_err());
        }
    }
    assert!(failed_count > 50, "{failed_count}");
}

#[test]
fn what_a_failed_flush_may_have_lost_is_not_read() {
    let mut world = World::start(formatted(), SimRandom::new(4));
    let process = world.begin("one", TILES, Committed);
    write_all(&mut world, process, 1, TILES);
    // Since its commit, the first job has written only scratch tiles, on both devices.
    let token = process.token;
    let tile_bytes = [4096, 8192].repeat(10);
    let last = TILES + tile_bytes.len() as u32;
    world
        .ask(Call::ReserveScratch { token, tile_bytes })
        .unwrap();
    for tile in TILES..last {
        world.write(process, 2, tile, 7).unwrap();
    }
    let other = world.begin("other", TILES, Committed);
    write(&mut world, other, 1);
    plan(&mut world, 0, SimFault::FlushLost);
    world.commit(other, 1).unwrap_err();
    for tile in TILES..last {
        assert_eq!(world.read(process, tile), Err(FaultKind::Poisoned));
    }
    for tile in 0..TILES {
        assert_eq!(world.read(other, tile), Err(FaultKind::Poisoned));
    }
    // The committed state was flushed.
    expect_all(&mut world, process, 1, TILES);
}

#[test]
fn tiles_that_move_are_whole_whichever_flush_fails() {
    let (mut failed_count, mut operations) = (0, 0);
    for (seed, fault) in (0..12).flat_map(|seed| FAULTS.map(|fault| (seed, fault))) {
        for skip in 0..60 {
            let mut world = World::start(formatted(), SimRandom::new(seed));
            let moving = world.begin("moving", TILES, Committed);
            write_all(&mut world, moving, 1, TILES);
            world.close(moving).unwrap();
            let other = world.begin("other", TILES, Committed);
            write(&mut world, other, 1);
            let drained = world.drain_call("sim1");
            world.answer(drained).unwrap();
            world.event(Event::RebalanceTick { force: true });
            // Another job flushes the device to which tiles are copied.
            let call = world.commit_call(other, 1, b"1");
            plan(&mut world, skip, fault);
            let answer = world.answer(call);
            world.run();
            failed_count += usize::from(answer.is_err());
            operations += usize::from(!world.engine.disks.happened.is_empty());
            let mut world = restart(world, seed % 2 == 0);
            assert_eq!(newest_is_whole(&mut world, "moving"), 1);
            if answer.is_ok() {
                assert_eq!(newest_is_whole(&mut world, "other"), 1);
            }
            let (mut disks, _) = world.crash(true);
            let damaged = verify(&mut disks).unwrap().damaged_tiles;
            assert_eq!(damaged, [], "seed {seed}, operation {skip}");
        }
    }
    assert!(
        failed_count > 20 && operations > 60,
        "{failed_count}, {operations}"
    );
}

#[test]
fn a_start_whose_flush_fails_leaves_one_copy_of_the_catalog() {
    let mut world = World::start(roomy(), SimRandom::new(1));
    let process = world.begin("one", TILES, Committed);
    write_all(&mut world, process, 1, TILES);
    // Enough jobs for a catalog of several sectors.
    for index in 0..4 {
        let filler = world.begin(&format!("a-filler-with-a-long-name-{index}"), 1, Committed);
        world.close(filler).unwrap();
    }
    let (mut disks, _) = world.crash(true);
    // A daemon deleted a job and was killed after writing one copy: the next one reads it from the drive's cache.
    let store = recover::read(&mut disks).unwrap();
    let mut catalog = store.catalog.clone();
    catalog.sequence += 1;
    catalog.entries.remove(1);
    let metadata = store[store.metadata_device].position;
    (disks.write(metadata, CATALOG_OFFSETS[0], &catalog.encode())).unwrap();
    let mut refused_count = 0;
    for (seed, at) in (0..40).flat_map(|seed| (0..4).map(move |before_end| (seed, before_end))) {
        let mut disks = disks.clone();
        // The loss of a flush is drawn from its number.
        for _ in 0..seed {
            disks.flush(1 - metadata).unwrap();
        }
        let flushes = first_flushes(&disks);
        disks.plan = Some(SimFaultPlan {
            at: flushes + at,
            for_good: false,
            fault: SimFault::Errno(libc::EIO),
        });
        let random = SimRandom::new(seed);
        let Err(failed) = World::try_start(disks, random.clone()) else {
            continue;
        };
        refused_count += 1;
        let mut disks = failed.1;
        disks.repair();
        let mut world = World::start(disks, random);
        assert_eq!(newest_is_whole(&mut world, "one"), 1);
    }
    assert!(refused_count > 40, "{refused_count}");
}

/// Returns the number of the first operation of a start that is not a read.
fn first_flushes(disks: &SimDisks) -> u64 {
    let mut disks = disks.clone();
    recover::read(&mut disks).unwrap();
    disks.operation_count()
}
