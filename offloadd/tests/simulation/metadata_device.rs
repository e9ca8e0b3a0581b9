//! Tests that the metadata device can be drained: its tiles leave it like any other's, catalog and records at a start. What could go wrong: a cut
//! leaves no catalog or two, a record is left behind, an old catalog replaces a damaged newer one.

use crate::disks::{SimDisks, SimFault, SimFaultPlan};
use offload_api::fault::FaultKind;
use offloadd::core::{Event, Moves, Reply};
use offloadd::store::definition::Durability;
use offloadd::store::metadata_device::{MetadataMove, settle, settle_watched};
use offloadd::store::verify::verify;
use offloadd::store::{CATALOG_BYTES_MAX, CATALOG_OFFSETS, StoreError, recover};
use test_hooks::random::SimRandom;

use super::growth::{damage_a_tile, expect_all, write_all};
use super::world::{World, formatted};

const JOBS: [(&str, u32); 2] = [("one", 20), ("two", 7)];

/// Makes two jobs, and a metadata device that all tiles have left.
fn emptied() -> (SimDisks, SimRandom) {
    let mut world = World::start(formatted(), SimRandom::new(1));
    for (name, tiles) in JOBS {
        let process = world.begin(name, tiles, Durability::Committed);
        write_all(&mut world, process, 1, tiles);
        write_all(&mut world, process, 2, tiles);
        world.close(process).unwrap();
    }
    let call = world.drain_call("sim0");
    assert!(matches!(world.answer(call), Ok(Reply::DrainDevice { left_bytes }) if left_bytes > 0));
    world.move_all();
    world.crash(true)
}

fn opened(disks: &mut SimDisks) -> Result<MetadataMove, StoreError> {
    let mut store = recover::open(disks)?;
    settle(disks, &mut store)
}

fn moved() -> MetadataMove {
    MetadataMove::Moved {
        from: "sim0".into(),
        to: "sim1".into(),
    }
}

fn has_catalog(disks: &SimDisks, position: usize) -> [bool; 2] {
    CATALOG_OFFSETS.map(|offset| {
        let start = offset as usize;
        let catalog = &disks.bytes(position)[start..start + CATALOG_BYTES_MAX as usize];
        catalog[..4096].iter().any(|byte| *byte != 0)
    })
}

/// Returns the reason why the metadata device stays.
fn why_it_stays(world: &World) -> String {
    let metadata = world.core.device_states().swap_remove(0);
    metadata.status.stuck.unwrap()
}

/// Asserts that everything is there, before and after the old metadata device has left.
fn expect_whole(mut disks: SimDisks, random: SimRandom) {
    assert_eq!(verify(&mut disks).unwrap().damaged_tiles, []);
    let mut world = World::start(disks, random);
    world.move_all();
    assert_eq!(world.left, [0]);
    for (name, tiles) in JOBS {
        let process = world.reopen(name, 2);
        expect_all(&mut world, process, 2, tiles);
        write_all(&mut world, process, 3, tiles);
    }
    let (disks, random) = world.crash(true);
    let mut alone = disks.pick(&[1]);
    assert_eq!(verify(&mut alone).unwrap().damaged_tiles, []);
    let mut world = World::start(alone, random);
    for (name, tiles) in JOBS {
        let process = world.reopen(name, 3);
        expect_all(&mut world, process, 3, tiles);
    }
}

#[test]
fn tiles_leave_the_metadata_device_at_once_and_the_catalog_at_the_next_start() {
    let mut world = World::start(formatted(), SimRandom::new(1));
    let process = world.begin("one", 20, Durability::Committed);
    write_all(&mut world, process, 1, 20);
    let call = world.drain_call("sim0");
    world.answer(call).unwrap();
    world.move_all();
    write_all(&mut world, process, 2, 20);
    world.move_all();
    write_all(&mut world, process, 3, 20);
    world.move_all();
    assert_eq!(world.core.moves(), Moves::None);
    let metadata = world.core.device_states().swap_remove(0).status;
    assert_eq!(metadata.left_bytes, 0);
    let told = why_it_stays(&world);
    assert!(told.contains("when offloadd is started next"), "{told}");
    assert!(world.left.is_empty());
    // Jobs are created and commit as before.
    let late = world.begin("two", 7, Durability::Committed);
    write_all(&mut world, late, 1, 7);
    write_all(&mut world, late, 2, 7);
    write_all(&mut world, process, 4, 20);
    let (mut disks, random) = world.crash(true);
    assert_eq!(opened(&mut disks), Ok(moved()));
    assert_eq!(has_catalog(&disks, 0), [false; 2]);
    assert_eq!(opened(&mut disks), Ok(MetadataMove::NotDue));
    let mut world = World::start(disks, random);
    world.move_all();
    assert_eq!(world.left, [0]);
    let process = world.reopen("one", 4);
    expect_all(&mut world, process, 4, 20);
}

#[test]
fn a_store_without_jobs_keeps_a_catalog() {
    let mut world = World::start(formatted(), SimRandom::new(1));
    let call = world.drain_call("sim0");
    world.answer(call).unwrap();
    world.move_all();
    assert!(world.left.is_empty());
    let (mut disks, random) = world.crash(true);
    assert_eq!(opened(&mut disks), Ok(moved()));
    let mut world = World::start(disks, random);
    world.move_all();
    assert_eq!(world.left, [0]);
    let (disks, _) = world.crash(true);
    assert!(
        recover::read(&mut disks.pick(&[1]))
            .unwrap()
            .jobs
            .is_empty()
    );
}

#[test]
fn who_watches_sees_every_byte_be_copied_and_read_again() {
    let (mut disks, _) = emptied();
    let mut store = recover::open(&mut disks).unwrap();
    let areas = store.catalog.entries.iter().map(|entry| entry.area);
    let copied = areas.map(|area| area.bytes() - area.gap_bytes);
    let total_bytes = 2 * copied.sum::<u64>();
    let mut seen = Vec::new();
    let outcome = settle_watched(&mut disks, &mut store, &mut |done, total| {
        assert_eq!(total, total_bytes);
        seen.push(done);
    });
    assert_eq!(outcome, Ok(moved()));
    assert!(seen.is_sorted(), "{seen:?}");
    assert!(seen.contains(&(total_bytes / 2)), "all is copied: {seen:?}");
    assert_eq!(seen.last(), Some(&total_bytes));
    // Nothing is left to be moved.
    let again = settle_watched(&mut disks, &mut store, &mut |_, _| {
        panic!("nothing is done")
    });
    assert_eq!(again, Ok(MetadataMove::NotDue));
}

#[test]
fn a_cut_at_any_operation_leaves_one_whole_store() {
    let (disks, _) = emptied();
    let mut outcomes = [0; 2];
    for at in 0.. {
        let mut cut = disks.clone();
        cut.plan = Some(SimFaultPlan {
            at: cut.operation_count() + at,
            for_good: true,
            fault: SimFault::Gone,
        });
        let ended = opened(&mut cut) == Ok(moved());
        cut.repair();
        for seed in 0..6 {
            let mut after = cut.clone();
            // The power goes, or only the daemon is killed.
            if seed > 0 {
                after.crash(seed, Vec::new());
            }
            let again = opened(&mut after).unwrap_or_else(|error| panic!("cut at {at}: {error}"));
            outcomes[usize::from(again == moved())] += 1;
            assert_eq!(has_catalog(&after, 0), [false; 2], "cut at {at}");
            assert_eq!(has_catalog(&after, 1), [true; 2], "cut at {at}");
            expect_whole(after, SimRandom::new(seed));
        }
        if ended {
            break;
        }
    }
    assert!(outcomes.iter().all(|count| *count > 20), "{outcomes:?}");
}

#[test]
fn a_failed_operation_refuses_no_start() {
    let (disks, random) = emptied();
    let mut stayed = 0;
    for at in 0.. {
        let mut failing = disks.clone();
        let mut store = recover::open(&mut failing).unwrap();
        let first = failing.operation_count();
        failing.plan = Some(SimFaultPlan {
            at: first + at,
            for_good: false,
            fault: [SimFault::Errno(libc::EIO), SimFault::Full][at as usize % 2],
        });
        let outcome = settle(&mut failing, &mut store);
        let beyond = failing.operation_count() <= first + at;
        failing.repair();
        match outcome {
            // A copy that the device did not return is written twice.
            Ok(MetadataMove::Moved { .. }) => {}
            Ok(MetadataMove::Failed(why)) => {
                stayed += 1;
                assert!(why.contains("sim"), "{why}");
                assert_eq!(has_catalog(&failing, 0), [true; 2], "{why}");
            }
            Ok(MetadataMove::NotDue) => panic!("it was due"),
            Err(error) => panic!("one failure refuses the start: {error}"),
        }
        opened(&mut failing).unwrap();
        expect_whole(failing, random.clone());
        if beyond {
            break;
        }
    }
    assert!(stayed > 10, "{stayed}");
}

#[test]
fn an_old_catalog_never_stands_in_for_a_damaged_one() {
    let (disks, _) = emptied();
    let mut settled = disks.clone();
    assert_eq!(opened(&mut settled), Ok(moved()));
    for offset in CATALOG_OFFSETS {
        settled.flip(1, offset + 100, 3);
    }
    let error = recover::read(&mut settled).unwrap_err();
    assert!(error.to_string().contains("catalog of sim1"), "{error}");
}

#[test]
fn what_the_device_does_not_give_is_taken_from_its_twin() {
    let (mut disks, random) = emptied();
    let mut store = recover::open(&mut disks).unwrap();
    let area = store.catalog.entries[0].area;
    for [first, _] in [area.definitions(), area.records(0)] {
        disks.wear_out(0, first..first + 1);
    }
    let mut both = disks.clone();
    for offset in area.definitions() {
        both.wear_out(0, offset..offset + 1);
    }
    let mut as_read = store.clone();
    let outcome = settle(&mut both, &mut as_read).unwrap();
    assert!(matches!(outcome, MetadataMove::Failed(why) if why.contains("sim0")));
    assert_eq!(has_catalog(&both, 0), [true; 2]);
    assert_eq!(settle(&mut disks, &mut store), Ok(moved()));
    expect_whole(disks, random);
}

#[test]
fn a_withheld_record_keeps_the_metadata_device() {
    let (mut disks, random) = emptied();
    let area = recover::read(&mut disks).unwrap().catalog.entries[0].area;
    for offset in area.records(0) {
        disks.wear_out(0, offset..offset + 1);
    }
    let outcome = opened(&mut disks).unwrap();
    assert!(
        matches!(&outcome, MetadataMove::Failed(why) if why.contains("discard-unreadable one")),
        "{outcome:?}"
    );
    // The device returns it again.
    disks.repair();
    assert_eq!(opened(&mut disks), Ok(moved()));
    expect_whole(disks, random);
}

#[test]
fn a_metadata_device_whose_records_find_no_room_stays_and_is_refused_before() {
    let mut world = World::start(formatted(), SimRandom::new(5));
    let process = world.begin("one", 100, Durability::Committed);
    write_all(&mut world, process, 1, 100);
    world.close(process).unwrap();
    let (disks, random) = world.crash(true);
    let mut alone = World::start(disks, random);
    let call = alone.drain_call("sim1");
    alone.answer(call).unwrap();
    // The only other device is drained already.
    let call = alone.drain_call("sim0");
    let fault = alone.answer(call).unwrap_err();
    assert_eq!(fault.kind, FaultKind::NoSpace);
    assert!(
        fault.message.contains("holds the store's catalog"),
        "{fault}"
    );
}

#[test]
fn what_a_lying_drive_lost_keeps_the_old_metadata_device() {
    let (disks, random) = emptied();
    let mut outcomes = [0; 2];
    for for_good in [false, true] {
        for at in 0.. {
            let mut lying = disks.clone();
            let mut store = recover::open(&mut lying).unwrap();
            let first = lying.operation_count();
            lying.plan = Some(SimFaultPlan {
                at: first + at,
                for_good,
                fault: SimFault::Lost,
            });
            let outcome = settle(&mut lying, &mut store).unwrap();
            outcomes[usize::from(outcome == moved())] += 1;
            let beyond = lying.operation_count() <= first + at;
            lying.repair();
            opened(&mut lying).unwrap_or_else(|error| panic!("{error}: lost at {at}"));
            expect_whole(lying, random.clone());
            if beyond {
                break;
            }
        }
    }
    assert!(outcomes.iter().all(|count| *count > 10), "{outcomes:?}");
}

#[test]
fn a_drive_that_takes_no_writes_any_more_can_go() {
    let (mut disks, random) = emptied();
    let mut store = recover::open(&mut disks).unwrap();
    disks.break_for_good(0, SimFault::Full);
    assert_eq!(settle(&mut disks, &mut store), Ok(moved()));
    assert_eq!(has_catalog(&disks, 0), [true; 2]);
    let again = recover::open(&mut disks).unwrap();
    let told = again
        .notes
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>();
    assert!(
        told[0].contains("an old catalog at") && told[0].contains("sim0"),
        "{told:?}"
    );
    let mut world = World::start(disks, random);
    world.move_all();
    let process = world.reopen("one", 2);
    write_all(&mut world, process, 3, 20);
    let (disks, random) = world.crash(true);
    let mut world = World::start(disks.pick(&[1]), random);
    let process = world.reopen("one", 3);
    expect_all(&mut world, process, 3, 20);
}

#[test]
fn the_device_with_the_catalog_is_asked_for_by_its_absence() {
    let (mut disks, _) = emptied();
    assert_eq!(opened(&mut disks), Ok(moved()));
    let error = recover::read(&mut disks.pick(&[0])).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("none of sim0 has the store's catalog"),
        "{error}"
    );
}

#[test]
fn a_damaged_tile_on_the_metadata_device_is_told_and_leaves_when_it_is_written_again() {
    let mut world = World::start(formatted(), SimRandom::new(6));
    let process = world.begin("one", 10, Durability::Committed);
    write_all(&mut world, process, 1, 10);
    world.close(process).unwrap();
    let (mut disks, random) = world.crash(false);
    damage_a_tile(&mut disks, 0);
    let mut world = World::start(disks, random);
    let call = world.drain_call("sim0");
    world.answer(call).unwrap();
    world.move_all();
    assert_eq!(world.core.moves(), Moves::Stopped);
    let told = why_it_stays(&world);
    assert!(told.contains("1 extents cannot be moved"), "{told}");
    let process = world.reopen("one", 1);
    write_all(&mut world, process, 2, 10);
    write_all(&mut world, process, 3, 10);
    world.event(Event::RetryMoves);
    world.move_all();
    write_all(&mut world, process, 4, 10);
    world.move_all();
    assert_eq!(world.core.moves(), Moves::None);
    let told = why_it_stays(&world);
    assert!(told.contains("when offloadd is started next"), "{told}");
}
