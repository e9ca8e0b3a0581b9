//! Tests consecutive incarnations of the daemon. What could go wrong: handed-over sessions continue although another daemon has written their tiles
//! since, or end although none has; a start that is cut off makes the store unusable.

use crate::disks::{SimDisks, SimFault, SimFaultPlan};
use offload_api::fault::FaultKind;
use offload_api::ids::Generation;
use offloadd::core::{Call, Event};
use offloadd::handover::message::HandoverState;
use offloadd::store::definition::Durability;
use test_hooks::random::SimRandom;

use super::world::{Process, World, definition, formatted, job};

const TILES: u32 = 4;

/// Operations with which an incarnation begins: one copy of the catalog, flush, the other, flush.
const BEGINS_WITH: u64 = 4;

fn write_all(world: &mut World, process: Process, generation: u64, seed: u64) {
    for tile in 0..TILES {
        let seed = seed + u64::from(tile);
        world.write(process, generation, tile, seed).unwrap();
    }
}

fn expect_all(world: &mut World, process: Process, seed: u64) {
    for tile in 0..TILES {
        world.expect_tile(process, tile, seed + u64::from(tile));
    }
}

/// Ends an incarnation in order.
fn hand_over(mut world: World) -> (HandoverState, SimDisks, SimRandom) {
    world.run();
    world.event(Event::HandOver);
    world.run();
    let state = world.core.hand_over();
    let (disks, random) = world.crash(false);
    (state, disks, random)
}

/// Hands over a job of one rank: generation 1 (10) is committed, and all tiles are written since (20).
fn handed_over(seed: u64) -> (HandoverState, SimDisks, SimRandom) {
    let mut world = World::start(formatted(), SimRandom::new(seed));
    let process = world.begin("a", TILES, Durability::Committed);
    write_all(&mut world, process, 1, 10);
    world.commit(process, 1).unwrap();
    write_all(&mut world, process, 2, 20);
    hand_over(world)
}

/// Returns the number of operations of a start.
fn start_operations(disks: &SimDisks) -> u64 {
    let world = World::start(disks.clone(), SimRandom::new(0));
    world.engine.disks.operation_count() - disks.operation_count()
}

/// Resumes the job from its committed state.
fn expect_committed(world: &mut World) {
    let (process, record) = world.open(&job("a"), 0, 1).unwrap();
    let newest = record.unwrap().generations.pop().unwrap();
    assert_eq!(newest.generation, Generation(1));
    world.resume(process, 1).unwrap();
    expect_all(world, process, 10);
}

#[test]
fn sessions_continue_over_many_incarnations() {
    let (mut state, mut disks, mut random) = handed_over(1);
    for generation in 2..6 {
        let (mut world, adopted) = World::start_after(disks, random, &state);
        let process = adopted.unwrap()[0];
        expect_all(&mut world, process, 10 * generation);
        world.commit(process, generation).unwrap();
        write_all(&mut world, process, generation + 1, 10 * (generation + 1));
        (state, disks, random) = hand_over(world);
    }
}

#[test]
fn a_catalog_that_could_not_be_written_ends_no_session() {
    let mut unsure_count = 0;
    // The job's definition and the places of its records are written and flushed, then one copy of the catalog, then the other.
    for at in 0..16 {
        let (state, disks, random) = handed_over(at);
        let (mut world, adopted) = World::start_after(disks, random, &state);
        let process = adopted.unwrap()[0];
        let (other, _) = world.open(&job("b"), 0, 1).unwrap();
        world.engine.disks.plan = Some(SimFaultPlan {
            at: world.engine.disks.operation_count() + at,
            for_good: false,
            // Writes only: a failed flush would poison the first job too.
            fault: SimFault::Full,
        });
        let definition = definition(TILES, Durability::Committed, 1);
        let token = other.token;
        let defined = world.ask(Call::Define { token, definition });
        expect_all(&mut world, process, 20);
        let (state, disks, random) = hand_over(world);
        unsure_count += u32::from(state.catalog_unsure);
        let (mut world, adopted) = World::start_after(disks, random, &state);
        // The state of the other job's tiles is unknown; that of the first job's is known.
        let processes = adopted.or_else(|why| match defined.is_err() && why.contains("job b") {
            true => Ok(vec![process]),
            false => Err(why),
        });
        assert!(
            processes
                .unwrap()
                .iter()
                .any(|one| one.token == process.token)
        );
        let process = Process {
            session: world.made[&process.token],
            ..process
        };
        expect_all(&mut world, process, 20);
        world.commit(process, 2).unwrap();
    }
    assert_eq!(unsure_count, 2, "once for each copy");
}

#[test]
fn a_daemon_that_served_without_the_sessions_ends_them() {
    for seed in 0..100 {
        let (state, mut disks, mut random) = handed_over(seed);
        // One of the two writes of the catalog's number may be lost as well.
        let operations = start_operations(&disks);
        let lost = [None, Some(BEGINS_WITH), Some(BEGINS_WITH - 2)][random.below(3)];
        disks.plan = lost.map(|before_end| SimFaultPlan {
            at: disks.operation_count() + operations - before_end,
            for_good: false,
            fault: SimFault::Lost,
        });
        let mut world = World::start(disks, random);
        let process = world.reopen("a", 1);
        for tile in 0..world.random.below(TILES as usize + 1) as u32 {
            world.submit_write(process, 2, tile, tile, 77);
        }
        for _ in 0..world.random.below(8) {
            world.step();
        }
        // Killed before it has committed.
        let (disks, random) = world.crash(false);
        let (mut world, adopted) = World::start_after(disks, random, &state);
        let why = adopted.map(|processes| processes.len()).unwrap_err();
        assert!(why.contains("another daemon has served"), "{why}");
        expect_committed(&mut world);
    }
}

#[test]
fn an_incarnation_that_is_cut_off_at_its_start_leaves_the_store_as_it_was() {
    let (state, disks, _) = handed_over(3);
    let (mut refused, mut went_on) = (0, 0);
    for at in 0..start_operations(&disks) {
        for fault in [SimFault::Errno(libc::EIO), SimFault::Short] {
            let mut disks = disks.clone();
            disks.plan = Some(SimFaultPlan {
                at: disks.operation_count() + at,
                for_good: true,
                fault,
            });
            let failed = World::try_start(disks, SimRandom::new(at)).err();
            let mut disks = failed.expect("an operation failed").1;
            disks.repair();
            // Killed there: the hand-over is still kept.
            let (mut world, adopted) =
                World::start_after(disks.clone(), SimRandom::new(at), &state);
            match adopted {
                Ok(processes) => {
                    expect_all(&mut world, processes[0], 20);
                    went_on += 1;
                }
                Err(why) => {
                    assert!(why.contains("another daemon has served"), "{why}");
                    expect_committed(&mut world);
                    refused += 1;
                }
            }
            // The power goes there.
            for seed in 0..20 {
                let mut disks = disks.clone();
                disks.crash(seed, Vec::new());
                expect_committed(&mut World::start(disks, SimRandom::new(seed)));
            }
        }
    }
    assert!(refused > 0 && went_on > 0, "{refused}, {went_on}");
}

/// A service manager starts the daemon again when its first start fails.
#[test]
fn a_start_whose_flush_fails_loses_nothing_that_the_next_one_commits() {
    let (mut went_on, mut refused) = (0, 0);
    for seed in 0..20 {
        let (state, disks, _) = handed_over(seed);
        for at in 0..start_operations(&disks) {
            let mut disks = disks.clone();
            disks.plan = Some(SimFaultPlan {
                at: disks.operation_count() + at,
                for_good: false,
                fault: SimFault::FlushLost,
            });
            let Err(failed) = World::try_start(disks, SimRandom::new(at)) else {
                continue;
            };
            let mut disks = failed.1;
            disks.repair();
            let (mut world, adopted) = World::start_after(disks, SimRandom::new(at), &state);
            let newest = match adopted {
                Ok(processes) => {
                    expect_all(&mut world, processes[0], 20);
                    world.commit(processes[0], 2).unwrap();
                    went_on += 1;
                    2
                }
                Err(why) => {
                    assert!(why.contains("another daemon has served"), "{why}");
                    refused += 1;
                    1
                }
            };
            let (disks, random) = world.crash(seed % 2 == 0);
            let mut world = World::start(disks, random);
            let process = world.reopen("a", newest);
            expect_all(&mut world, process, 10 * newest);
        }
    }
    assert!(went_on > 0 && refused > 0, "{went_on}, {refused}");
}

#[test]
fn a_flush_that_fails_as_sessions_are_handed_over_is_handed_over_with_them() {
    for (seed, device) in (0..20).flat_map(|seed| [(seed, 0), (seed, 1)]) {
        let mut world = World::start(formatted(), SimRandom::new(seed));
        let process = world.begin("a", TILES, Durability::Committed);
        write_all(&mut world, process, 1, 10);
        world.commit(process, 1).unwrap();
        write_all(&mut world, process, 2, 20);
        world.run();
        world
            .engine
            .disks
            .break_for_good(device, SimFault::FlushLost);
        let (state, mut disks, random) = hand_over(world);
        disks.repair();
        let (mut world, adopted) = World::start_after(disks, random, &state);
        let process = adopted.unwrap()[0];
        let fault = world.commit(process, 2).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Poisoned);
        world.close(process).unwrap();
        expect_committed(&mut world);
    }
}
