//! Tests devices that are added: which tiles move to them, what is reported, and what a cut leaves.

use offloadd::core::{Event, Moves};
use offloadd::store::catalog::Phase;
use offloadd::store::definition::Durability;
use offloadd::store::superblock::MeasuredRates;
use offloadd::store::verify::verify;
use offloadd::store::{BLOCK, DATA_OFFSET, StoreError, recover};
use test_hooks::random::SimRandom;

use super::{DISK_BYTES, added, expect_all, extents, write_all};
use crate::world::{World, formatted};

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
    // Equal rates: a third of 120 extents on each device.
    assert!(
        counts.iter().all(|count| (36..=44).contains(count)),
        "{counts:?}"
    );
    let mut world = World::start(disks, random);
    assert_eq!(world.core.moves(), Moves::None);
    for name in ["one", "two"] {
        let process = world.reopen(name, 1);
        expect_all(&mut world, process, 1, 30);
        write_all(&mut world, process, 2, 30);
        expect_all(&mut world, process, 2, 30);
    }
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

    // Cut off after each step: it is a store with the old list or the new one.
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
                assert_eq!((store.devices.len(), store.foreign_devices.len()), (2, 1));
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
                // When repeated, the add succeeds.
                let mut world = World::start(disks.pick(&[0, 1]), random);
                added(&mut world);
            }
        }
    }
    assert!(seen.iter().all(|count| *count > 2), "{seen:?}");
}

#[test]
fn what_is_left_to_come_is_told_and_ends_at_nothing() {
    let mut world = World::start(formatted(), SimRandom::new(12));
    let process = world.begin("one", 60, Durability::Committed);
    write_all(&mut world, process, 1, 60);
    world.close(process).unwrap();
    added(&mut world);
    let left = |world: &World| world.core.device_states()[2].status.left_bytes;
    world.event(Event::RebalanceTick { force: false });
    let mut before = left(&world);
    // A third of 60 tiles of 6 KiB on average, twice.
    let expected = 60 / 3 * 6144 * 2;
    assert!(
        (expected * 3 / 4..expected * 5 / 4).contains(&before),
        "{before} of about {expected}"
    );
    while world.core.moves() != Moves::None {
        world.run();
        world.event(Event::RebalanceTick { force: true });
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
    world.event(Event::RebalanceTick { force: false });
    // Another job takes the space that was meant for it.
    let states = world.core.device_states();
    assert!(states[2].free_bytes < 4 * BLOCK, "{states:?}");
    world.move_all();
    for generation in 2..5 {
        write_all(&mut world, process, generation, 60);
        world.move_all();
    }
    assert_eq!(world.core.moves(), Moves::None);
    let settled = &world.core.device_states()[2];
    assert_eq!(settled.status.phase, Some(Phase::Settled));
    assert_eq!(settled.status.left_bytes, 0);
    expect_all(&mut world, process, 4, 60);
}
