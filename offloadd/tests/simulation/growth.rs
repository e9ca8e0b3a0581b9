//! Devices come to a store and leave it. What could go wrong: tiles that nobody finds any more, a store that opens with half
//! of a device, extents that are used twice, a device that is never empty. Random cuts in the midst of it are in `crashes`.

use offload_api::fault::FaultKind;
use offload_api::ids::{DeviceIndex, Generation};
use offloadd::blocks::Blocks;
use offloadd::core::{Call, Event, Moves, Reply};
use offloadd::engine::sim::{SimDisks, SimFault, SimFaultPlan, SimRandom};
use offloadd::store::catalog::Phase;
use offloadd::store::definition::Durability;
use offloadd::store::format::MeasuredRates;
use offloadd::store::verify::verify;
use offloadd::store::{
    BLOCK, CATALOG_OFFSETS, DATA_OFFSET, SUPERBLOCK_OFFSETS, StoreError, recover,
};

use super::world::{Process, SLOTS, World, formatted, job};

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

/// Extents of all jobs on each device, by position.
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

#[test]
fn a_device_that_comes_takes_its_share_of_jobs_that_nobody_runs() {
    // In one of five cuts a device loses nothing, flushed or not.
    for seed in 1..5 {
        its_share_comes(seed);
    }
}

fn its_share_comes(seed: u64) {
    let mut world = World::start(formatted(), SimRandom::new(seed));
    for (name, durability) in [("one", Durability::Committed), ("two", Durability::None)] {
        let process = world.begin(name, 30, durability);
        write_all(&mut world, process, 1, 30);
        world.close(process).unwrap();
    }
    added(&mut world);
    world.move_all();
    assert_eq!(world.core.moves(), Moves::None);
    let (mut disks, random) = world.crash(true);
    assert_eq!(verify(&mut disks).unwrap().damaged_tiles, []);
    let counts = extents(&mut disks);
    // Equal rates: a third of 120 extents each.
    assert!(
        counts.iter().all(|count| (36..=44).contains(count)),
        "{counts:?}"
    );
    let mut world = World::start(disks, random);
    assert_eq!(world.core.moves(), Moves::None);
    for name in ["one", "two"] {
        let (process, _) = world.open(&job(name), 0, 1).unwrap();
        world.resume(process, 1).unwrap();
        expect_all(&mut world, process, 1, 30);
        write_all(&mut world, process, 2, 30);
        expect_all(&mut world, process, 2, 30);
    }
}

#[test]
fn a_running_job_moves_by_what_it_writes() {
    let mut world = World::start(formatted(), SimRandom::new(2));
    let process = world.begin("one", 30, Durability::Committed);
    write_all(&mut world, process, 1, 30);
    added(&mut world);
    for generation in 2..6 {
        world.event(Event::MoveOn { hurry: false });
        write_all(&mut world, process, generation, 30);
        expect_all(&mut world, process, generation, 30);
    }
    world.move_all();
    expect_all(&mut world, process, 5, 30);
    // Nothing was read but what the test did: no copy was needed.
    assert_eq!(world.core.moves(), Moves::None);
    let (mut disks, _) = world.crash(true);
    let counts = extents(&mut disks);
    assert!(counts[2] >= 18, "{counts:?}");
}

#[test]
fn a_drained_device_is_empty_and_the_store_opens_without_it() {
    let mut world = World::start(formatted(), SimRandom::new(3));
    let process = world.begin("one", 20, Durability::Committed);
    write_all(&mut world, process, 1, 20);
    let idle = world.begin("idle", 20, Durability::Committed);
    write_all(&mut world, idle, 1, 20);
    world.close(idle).unwrap();
    let in_place = world.begin("place", 10, Durability::None);
    write_all(&mut world, in_place, 1, 10);
    let call = world.drain_call("sim1");
    assert!(matches!(world.answer(call), Ok(Reply::DrainDevice { left_bytes }) if left_bytes > 0));
    world.move_all();
    for generation in 2..5 {
        write_all(&mut world, process, generation, 20);
        write_all(&mut world, in_place, generation, 10);
        world.move_all();
    }
    assert_eq!(world.left, [1]);
    expect_all(&mut world, process, 4, 20);
    let (disks, random) = world.crash(true);
    // Listed or not, it is no part of the store.
    let mut both = disks.clone();
    let store = recover::read(&mut both).unwrap();
    assert_eq!(store.devices.len(), 1);
    assert_eq!(store.outsiders.len(), 1);
    assert!(store.outsiders[0].drained);
    assert!(
        store.outsiders[0]
            .to_string()
            .contains("take it from the list")
    );
    assert!(matches!(
        recover::read(&mut disks.pick(&[1])),
        Err(StoreError::Drained { .. })
    ));
    let mut alone = disks.pick(&[0]);
    assert_eq!(verify(&mut alone).unwrap().damaged_tiles, []);
    let mut world = World::start(alone, random);
    let (process, _) = world.open(&job("one"), 0, 1).unwrap();
    world.resume(process, 4).unwrap();
    expect_all(&mut world, process, 4, 20);
    let (idle, _) = world.open(&job("idle"), 0, 1).unwrap();
    world.resume(idle, 1).unwrap();
    expect_all(&mut world, idle, 1, 20);
}

#[test]
fn the_old_list_names_the_device_that_came_and_a_cut_off_one_is_left_alone() {
    let mut world = World::start(formatted(), SimRandom::new(4));
    added(&mut world);
    world.run();
    let (disks, _) = world.crash(true);
    let error = recover::read(&mut disks.pick(&[0, 1])).unwrap_err();
    let path = Some("sim2".to_owned());
    assert_eq!(error, StoreError::Missing { number: 2, path });
    assert!(error.to_string().contains("sim2"), "{error}");

    // Cut off after each step: with the old list or the new one, it is a store.
    let mut seen = [0; 2];
    for steps in 0..40 {
        let mut world = World::start(formatted(), SimRandom::new(steps));
        world.add_disk(DISK_BYTES, MeasuredRates::default());
        for _ in 0..steps / 4 {
            world.step();
        }
        let (disks, random) = world.crash(true);
        let old = recover::read(&mut disks.pick(&[0, 1]));
        match recover::read(&mut disks.clone()) {
            Ok(store) if store.devices.len() == 3 => {
                assert!(matches!(old, Err(StoreError::Missing { number: 2, .. })));
                seen[0] += 1;
            }
            Ok(store) => {
                assert_eq!((store.devices.len(), store.outsiders.len()), (2, 1));
                assert!(old.is_ok());
                seen[1] += 1;
            }
            Err(error) => {
                assert!(
                    matches!(
                        error,
                        StoreError::NotAdded { .. } | StoreError::Damaged { .. }
                    ),
                    "{error}"
                );
                // Run again, it comes.
                let mut world = World::start(disks.pick(&[0, 1]), random);
                added(&mut world);
            }
        }
    }
    assert!(seen.iter().all(|count| *count > 2), "{seen:?}");
}

#[test]
fn a_drain_without_room_is_refused_with_the_numbers() {
    let mut world = World::start(formatted(), SimRandom::new(5));
    let process = world.begin("one", 180, Durability::Committed);
    let call = world.drain_call("sim1");
    let fault = world.answer(call).unwrap_err();
    assert_eq!(fault.kind, FaultKind::NoSpace);
    assert!(fault.message.contains("sim0 has"), "{fault}");
    let call = world.drain_call("sim0");
    let fault = world.answer(call).unwrap_err();
    assert_eq!(fault.kind, FaultKind::NoSpace);
    let call = world.drain_call("sim9");
    let fault = world.answer(call).unwrap_err();
    assert!(fault.message.contains("sim0, sim1"), "{fault}");
    write_all(&mut world, process, 1, 180);
}

#[test]
fn a_failed_copy_leaves_everything_and_can_be_asked_again() {
    let mut tried = None;
    for at in 0..200 {
        let mut world = World::start(formatted(), SimRandom::new(at));
        let process = world.begin("one", 10, Durability::Committed);
        write_all(&mut world, process, 1, 10);
        world.close(process).unwrap();
        let fault = [SimFault::Errno(libc::EIO), SimFault::Short][at as usize % 2];
        let first = world.engine.disks.operation_count();
        world.engine.disks.plan = Some(SimFaultPlan {
            at: first + at,
            for_good: false,
            fault,
        });
        let call = world.drain_call("sim1");
        let answer = world.answer(call);
        if answer.is_ok() {
            world.move_all();
        }
        let beyond = world.engine.disks.operation_count() <= first + at;
        world.engine.disks.plan = None;
        let (mut disks, random) = world.crash(false);
        assert_eq!(verify(&mut disks).unwrap().damaged_tiles, []);
        let mut world = World::start(disks, random);
        let phases: Vec<_> = world
            .core
            .device_states()
            .iter()
            .map(|d| d.standing.phase)
            .collect();
        if phases == [Some(Phase::Settled); 2] {
            let call = world.drain_call("sim1");
            world.answer(call).unwrap();
        }
        world.move_all();
        let (process, _) = world.open(&job("one"), 0, 1).unwrap();
        world.resume(process, 1).unwrap();
        expect_all(&mut world, process, 1, 10);
        let (disks, _) = world.crash(true);
        let store = recover::read(&mut disks.pick(&[0])).unwrap();
        assert_eq!(store.devices.len(), 1, "fault {fault:?} at {at}");
        if beyond {
            tried = Some(at);
            break;
        }
    }
    // Some faults end a drain early; every operation of a whole one was reached all the same.
    assert!(tried.is_some_and(|at| at > 20), "{tried:?}");
}

/// One bit of a tile that the first job committed in generation 1 to the device at `position`; which tile.
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

#[test]
fn a_damaged_tile_stays_is_told_and_leaves_when_it_is_written_again() {
    let mut world = World::start(formatted(), SimRandom::new(6));
    let process = world.begin("one", 10, Durability::Committed);
    write_all(&mut world, process, 1, 10);
    world.close(process).unwrap();
    let (mut disks, random) = world.crash(false);
    let tile = damage_a_tile(&mut disks, 1);
    let mut world = World::start(disks, random);
    let call = world.drain_call("sim1");
    world.answer(call).unwrap();
    world.move_all();
    assert_eq!(world.core.moves(), Moves::Stopped);
    let stuck = world.core.device_states()[1]
        .standing
        .stuck
        .clone()
        .unwrap();
    assert!(
        stuck.contains(&format!("tile {tile} of job one")),
        "{stuck}"
    );
    let (process, _) = world.open(&job("one"), 0, 1).unwrap();
    world.resume(process, 1).unwrap();
    assert_eq!(world.read(process, tile), Err(FaultKind::Damaged));
    write_all(&mut world, process, 2, 10);
    write_all(&mut world, process, 3, 10);
    world.event(Event::RetryMoves);
    world.move_all();
    write_all(&mut world, process, 4, 10);
    world.move_all();
    write_all(&mut world, process, 5, 10);
    world.move_all();
    assert_eq!(world.left, [1]);
    expect_all(&mut world, process, 5, 10);
}

#[test]
fn scratch_leaves_a_drained_device_when_it_is_written_or_ends() {
    let mut world = World::start(formatted(), SimRandom::new(7));
    let process = world.begin("one", 2, Durability::Committed);
    world
        .ask(Call::ReserveScratch {
            token: process.token,
            tile_bytes: vec![4096, 8192, 4096, 8192],
        })
        .unwrap();
    for tile in 2..6 {
        world.write(process, 1, tile, u64::from(tile)).unwrap();
    }
    let call = world.drain_call("sim1");
    world.answer(call).unwrap();
    world.move_all();
    assert!(world.left.is_empty(), "scratch is still there");
    // It may lie there for hours; the tiles of all jobs are not gone through again and again meanwhile.
    let plans = world.core.plans_made();
    for _ in 0..50 {
        world.event(Event::MoveOn { hurry: true });
        world.run();
    }
    assert_eq!(world.core.plans_made(), plans);
    for tile in 2..6 {
        world.expect_tile(process, tile, u64::from(tile));
        world.write(process, 1, tile, 10 + u64::from(tile)).unwrap();
        world.expect_tile(process, tile, 10 + u64::from(tile));
    }
    world.move_all();
    assert_eq!(world.left, [1]);
    world.commit(process, 1).unwrap();
}

#[test]
fn a_job_can_be_dropped_while_its_tiles_move() {
    for steps in 0..30 {
        let mut world = World::start(formatted(), SimRandom::new(steps));
        let process = world.begin("one", 20, Durability::Committed);
        write_all(&mut world, process, 1, 20);
        world.close(process).unwrap();
        let call = world.drain_call("sim1");
        world.answer(call).unwrap();
        world.event(Event::MoveOn { hurry: false });
        for _ in 0..2 * steps {
            world.step();
        }
        let dropped = world.ask(Call::DropJob { job: job("one") });
        assert!(matches!(dropped, Ok(Reply::DropJob { .. })), "{dropped:?}");
        world.move_all();
        assert_eq!(world.left, [1]);
        let process = world.begin("two", 20, Durability::Committed);
        write_all(&mut world, process, 1, 20);
        let generation = Generation(1);
        let (mut disks, _) = world.crash(true);
        let store = recover::read(&mut disks).unwrap();
        let newest = store.jobs[0].slots[1].sound().unwrap();
        assert_eq!(newest.record.generation, generation);
        assert_eq!(verify(&mut disks).unwrap().damaged_tiles, []);
    }
}

/// Space that tiles have left must not be written again while a cut may still bring the old definition back.
#[test]
fn what_a_tile_has_left_is_not_used_before_its_new_place_is_durable() {
    for seed in 0..1500 {
        let mut world = World::start(formatted(), SimRandom::new(seed));
        let process = world.begin("one", 20, Durability::Committed);
        write_all(&mut world, process, 1, 20);
        world.close(process).unwrap();
        added(&mut world);
        let other = world.begin("other", 1, Durability::Committed);
        world.event(Event::MoveOn { hurry: true });
        for _ in 0..seed % 150 {
            world.step();
        }
        // All that is free, as far as it is in one piece.
        let mut tile_bytes = vec![4096; 600];
        let token = other.token;
        while world
            .ask(Call::ReserveScratch {
                token,
                tile_bytes: tile_bytes.clone(),
            })
            .is_err()
        {
            tile_bytes.pop();
        }
        for slot in 0..SLOTS.min(tile_bytes.len() as u32 / 2) {
            // Those of 4 KiB: a tile of another number has another size in this world.
            world.submit_write(other, 1, 2 * slot + 2, slot, 7);
        }
        for _ in 0..6 {
            world.step();
        }
        let (mut disks, _) = world.crash(true);
        assert_eq!(verify(&mut disks).unwrap().damaged_tiles, [], "seed {seed}");
    }
}

#[test]
fn a_commit_waits_for_the_definition_that_says_where_its_tiles_lie() {
    let mut world = World::start(formatted(), SimRandom::new(8));
    let process = world.begin("one", SLOTS, Durability::Committed);
    write_all(&mut world, process, 1, SLOTS);
    added(&mut world);
    // The first job's definition lies where data begins.
    let definition = DATA_OFFSET..DATA_OFFSET + 2 * BLOCK;
    world.engine.held = Some((DeviceIndex(0), definition));
    world.event(Event::MoveOn { hurry: false });
    for tile in 0..SLOTS {
        world.submit_write(process, 2, tile, tile, 200 + u64::from(tile));
    }
    let call = world.commit_call(process, 2, b"");
    world.run();
    let early = world.replies.contains_key(&call);
    assert!(
        !early,
        "a cut would bring a definition back that does not know its tiles"
    );
    world.engine.held = None;
    world.answer(call).unwrap();
    expect_second_after_a_cut(world);
}

/// The power goes; generation 2 of job `one` is there and can be gone on from.
fn expect_second_after_a_cut(world: World) {
    let (disks, random) = world.crash(true);
    let mut world = World::start(disks, random);
    let (process, _) = world.open(&job("one"), 0, 1).unwrap();
    world.resume(process, 2).unwrap();
    expect_all(&mut world, process, 2, SLOTS);
}

#[test]
fn a_job_that_takes_a_planned_ones_name_is_another_job() {
    let mut world = World::start(formatted(), SimRandom::new(11));
    for name in ["one", "two"] {
        let process = world.begin(name, 30, Durability::Committed);
        write_all(&mut world, process, 1, 30);
        world.close(process).unwrap();
    }
    added(&mut world);
    // Some tiles of the first move, the second waits in the plan.
    world.event(Event::MoveOn { hurry: false });
    let dropped = world.ask(Call::DropJob { job: job("two") });
    assert!(matches!(dropped, Ok(Reply::DropJob { .. })), "{dropped:?}");
    let process = world.begin("two", 2, Durability::Committed);
    write_all(&mut world, process, 1, 2);
    assert_eq!(world.core.device_states().len(), 3);
    world.move_all();
    expect_all(&mut world, process, 1, 2);
    let (mut disks, _) = world.crash(true);
    assert_eq!(verify(&mut disks).unwrap().damaged_tiles, []);
}

/// Records that were cut off are cleared away before tiles move; what a rank that came meanwhile commits there is none of them.
#[test]
fn a_commit_beside_tiles_that_move_is_not_cleared_away() {
    let mut world = World::start(formatted(), SimRandom::new(12));
    let process = world.begin("one", SLOTS, Durability::Committed);
    write_all(&mut world, process, 1, SLOTS);
    write_all(&mut world, process, 2, SLOTS);
    let call = world.drain_call("sim1");
    world.answer(call).unwrap();
    let (mut disks, random) = world.crash(true);
    let store = recover::read(&mut disks).unwrap();
    let stored = &store.jobs[0];
    // The newer record was cut off. A tile of the older one, on the device that is drained.
    let damaged: Vec<u64> = stored.entry.area.records(0).into_iter().collect();
    let record = &stored.slots[1].sound().unwrap().record;
    let placed = (record.versions.iter().zip(&stored.table.extents))
        .map(|(version, extents)| extents[usize::from(version.unwrap().which)]);
    let copied = placed.into_iter().find(|extent| extent.device.0 == 1);
    let copied = copied.expect("some lie there");
    for offset in damaged {
        disks.flip(0, offset + 64, 0);
    }
    let mut world = World::start(disks, random);
    world.engine.held = Some((DeviceIndex(1), copied.offset..copied.offset + BLOCK));
    world.event(Event::MoveOn { hurry: true });
    world.run();
    let (process, _) = world.open(&job("one"), 0, 1).unwrap();
    world.resume(process, 1).unwrap();
    write_all(&mut world, process, 2, SLOTS);
    world.engine.held = None;
    world.run();
    expect_second_after_a_cut(world);
}

#[test]
fn what_is_left_to_come_is_told_and_ends_at_nothing() {
    let mut world = World::start(formatted(), SimRandom::new(12));
    let process = world.begin("one", 60, Durability::Committed);
    write_all(&mut world, process, 1, 60);
    world.close(process).unwrap();
    added(&mut world);
    let left = |world: &World| world.core.device_states()[2].standing.left_bytes;
    world.event(Event::MoveOn { hurry: false });
    let mut before = left(&world);
    // A third of 60 tiles of 6 KiB on average, twice.
    let expected = 60 / 3 * 6144 * 2;
    assert!(
        (expected * 3 / 4..expected * 5 / 4).contains(&before),
        "{before} of about {expected}"
    );
    while world.core.moves() != Moves::None {
        world.run();
        world.event(Event::MoveOn { hurry: true });
        assert!(left(&world) <= before);
        before = left(&world);
    }
    assert_eq!(left(&world), 0);
}

#[test]
fn a_device_without_room_for_its_share_takes_what_it_can_and_is_settled() {
    let mut world = World::start(formatted(), SimRandom::new(13));
    let process = world.begin("one", 60, Durability::Committed);
    write_all(&mut world, process, 1, 60);
    world.add_disk(DATA_OFFSET + 4 * BLOCK, MeasuredRates::default());
    world.run();
    world.event(Event::MoveOn { hurry: false });
    // Somebody takes what was meant for it.
    let states = world.core.device_states();
    assert!(states[2].free_bytes < 4 * BLOCK, "{states:?}");
    world.move_all();
    for generation in 2..5 {
        write_all(&mut world, process, generation, 60);
        world.move_all();
    }
    assert_eq!(world.core.moves(), Moves::None);
    let settled = &world.core.device_states()[2];
    assert_eq!(settled.standing.phase, Some(Phase::Settled));
    assert_eq!(settled.standing.left_bytes, 0);
    expect_all(&mut world, process, 4, 60);
}

#[test]
fn a_device_that_leaves_is_told_so_one_copy_after_the_other() {
    let mut world = World::start(formatted(), SimRandom::new(17));
    world.drain_call("sim1");
    let copy = |disks: &SimDisks, which: usize| {
        let at = SUPERBLOCK_OFFSETS[which] as usize;
        disks.bytes(1)[at..at + BLOCK as usize].to_vec()
    };
    let before = copy(&world.engine.disks, 1);
    let mut seen = 0;
    while world.left.is_empty() {
        if !world.step() {
            world.event(Event::MoveOn { hurry: true });
        }
        let after = copy(&world.engine.disks, 1);
        if after == before {
            continue;
        }
        // The second is being written: the first survives every power cut.
        for seed in 0..20 {
            let mut disks = world.engine.disks.clone();
            disks.crash(seed, Vec::new());
            assert!(copy(&disks, 0) == after, "seed {seed}");
        }
        seen += 1;
    }
    assert!(seen > 0);
}

/// A store whose numbers are nearly at their end, as nobody will see it.
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
    assert!(fault.message.contains("none is given twice"), "{fault}");
    let (process, _) = world.open(&job("one"), 0, 1).unwrap();
    world.resume(process, 1).unwrap();
    expect_all(&mut world, process, 1, 20);
}

#[test]
fn where_revisions_end_tiles_stay_and_the_job_goes_on() {
    let disks = at_the_end(|store| store.jobs[0].table.revision = u32::MAX);
    let mut world = World::start(disks, SimRandom::new(16));
    let call = world.drain_call("sim1");
    world.answer(call).unwrap();
    world.move_all();
    assert_eq!(world.core.moves(), Moves::Stopped);
    let why = world.core.device_states()[1].standing.stuck.clone();
    assert!(why.unwrap().contains("job one of uid 1000"));
    let (process, _) = world.open(&job("one"), 0, 1).unwrap();
    world.resume(process, 1).unwrap();
    write_all(&mut world, process, 2, 20);
    expect_all(&mut world, process, 2, 20);
    world.close(process).unwrap();
    assert!(world.ask(Call::DropJob { job: job("one") }).is_ok());
    let call = world.drain_call("sim1");
    world.answer(call).unwrap();
    world.move_all();
    assert_eq!(world.left, [1]);
}

/// Whoever drives pauses between batches: they must be small enough for that.
#[test]
fn under_a_ceiling_less_is_copied_at_a_time_and_all_of_it() {
    let limit = |world: &mut World, bytes_per_s_max| {
        let call = world.call(Call::LimitMoves { bytes_per_s_max });
        world.answer(call)
    };
    let copied = |ceiling: Option<u64>| {
        let mut world = World::start(formatted(), SimRandom::new(21));
        let process = world.begin("one", 60, Durability::Committed);
        write_all(&mut world, process, 1, 60);
        world.close(process).unwrap();
        let refused = limit(&mut world, 5).unwrap_err();
        assert_eq!(refused.kind, FaultKind::Invalid, "{refused}");
        // What was to be had by a device that nobody has.
        let nobody = world.drain_call_under("nobody", Some(7));
        assert!(world.answer(nobody).is_err());
        let call = world.drain_call_under("sim1", ceiling);
        assert!(world.answer(call).is_ok());
        assert_eq!(world.core.move_bytes_per_s_max(), ceiling);
        if let Some(ceiling) = ceiling {
            assert_eq!(limit(&mut world, 9), Ok(Reply::LimitMoves));
            // Asked again without one it stays.
            let again = world.drain_call("sim1");
            assert!(world.answer(again).is_ok());
            assert_eq!(world.core.move_bytes_per_s_max(), Some(9));
            assert_eq!(limit(&mut world, ceiling), Ok(Reply::LimitMoves));
        }
        let mut batches = Vec::new();
        for _ in 0..100 {
            let before = world.core.copied_bytes();
            world.event(Event::MoveOn { hurry: true });
            world.run();
            batches.push(world.core.copied_bytes() - before);
        }
        assert_eq!(world.core.moves(), Moves::None);
        assert_eq!(world.core.move_bytes_per_s_max(), None, "it went with them");
        let (disks, _) = world.crash(true);
        assert_eq!(extents(&mut disks.pick(&[0])), [120]);
        batches.retain(|bytes| *bytes > 0);
        batches
    };
    let whole = copied(None);
    assert_eq!(whole.len(), 1, "{whole:?}");
    let parts = copied(Some(1));
    // Sixteen times the definition, however low the ceiling is, and the last tile.
    let bytes_max = 16 * BLOCK + 8192;
    assert!(parts.iter().all(|bytes| *bytes <= bytes_max), "{parts:?}");
    assert!(
        parts.len() > 1 && parts.iter().sum::<u64>() == whole[0],
        "{parts:?}"
    );
}
