//! Tests jobs that run, commit, are deleted or are created while tiles move: none loses its acknowledged state or its space.

use offload_api::ids::{DeviceIndex, Generation};
use offloadd::core::{Call, Event, Moves, Reply};
use offloadd::store::definition::Durability;
use offloadd::store::verify::verify;
use offloadd::store::{BLOCK, DATA_OFFSET, recover};
use test_hooks::random::SimRandom;

use super::{added, expect_all, extents, write_all};
use crate::world::{PEER, SLOTS, World, formatted, job};

#[test]
fn a_running_job_moves_by_what_it_writes() {
    let mut world = World::start(formatted(), SimRandom::new(2));
    let process = world.begin("one", 30, Durability::Committed);
    write_all(&mut world, process, 1, 30);
    added(&mut world);
    for generation in 2..6 {
        world.event(Event::RebalanceTick { force: false });
        write_all(&mut world, process, generation, 30);
        expect_all(&mut world, process, generation, 30);
    }
    world.move_all();
    expect_all(&mut world, process, 5, 30);
    // Nothing was read except by the test: no copy was needed.
    assert_eq!(world.core.moves(), Moves::None);
    let (mut disks, _) = world.crash(true);
    let counts = extents(&mut disks);
    assert!(counts[2] >= 18, "{counts:?}");
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
        world.event(Event::RebalanceTick { force: false });
        for _ in 0..2 * steps {
            world.step();
        }
        let dropped = world.ask(Call::DropJob {
            uid: PEER.uid,
            job: job("one"),
        });
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

/// The space that a tile has left must not be reused while a cut may still restore the old definition.
#[test]
fn what_a_tile_has_left_is_not_used_before_its_new_place_is_durable() {
    for seed in 0..1500 {
        let mut world = World::start(formatted(), SimRandom::new(seed));
        let process = world.begin("one", 20, Durability::Committed);
        write_all(&mut world, process, 1, 20);
        world.close(process).unwrap();
        added(&mut world);
        let other = world.begin("other", 1, Durability::Committed);
        world.event(Event::RebalanceTick { force: true });
        for _ in 0..seed % 150 {
            world.step();
        }
        // All free space, as far as it is contiguous.
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
            // The tiles of 4 KiB: in this world, tiles with odd numbers have another size.
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
    // The first copy of the first job's definition lies where the data area begins.
    let definition = DATA_OFFSET..DATA_OFFSET + BLOCK;
    world.engine.blocked = Some((DeviceIndex(0), definition));
    world.event(Event::RebalanceTick { force: false });
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
    world.engine.blocked = None;
    world.answer(call).unwrap();
    expect_second_after_a_cut(world);
}

/// Cuts the power, and asserts that generation 2 of job `one` is there and can be resumed.
fn expect_second_after_a_cut(world: World) {
    let (disks, random) = world.crash(true);
    let mut world = World::start(disks, random);
    let process = world.reopen("one", 2);
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
    // Some tiles of the first move; the second move waits in the plan.
    world.event(Event::RebalanceTick { force: false });
    let dropped = world.ask(Call::DropJob {
        uid: PEER.uid,
        job: job("two"),
    });
    assert!(matches!(dropped, Ok(Reply::DropJob { .. })), "{dropped:?}");
    let process = world.begin("two", 2, Durability::Committed);
    write_all(&mut world, process, 1, 2);
    assert_eq!(world.core.device_states().len(), 3);
    world.move_all();
    expect_all(&mut world, process, 1, 2);
    let (mut disks, _) = world.crash(true);
    assert_eq!(verify(&mut disks).unwrap().damaged_tiles, []);
}

/// Torn records are cleared before tiles move; the commit of a rank that came meanwhile is not one of them.
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
    // The newer record is torn. The older one names a tile on the drained device.
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
    world.engine.blocked = Some((DeviceIndex(1), copied.offset..copied.offset + BLOCK));
    world.event(Event::RebalanceTick { force: true });
    world.run();
    let process = world.reopen("one", 1);
    write_all(&mut world, process, 2, SLOTS);
    world.engine.blocked = None;
    world.run();
    expect_second_after_a_cut(world);
}
