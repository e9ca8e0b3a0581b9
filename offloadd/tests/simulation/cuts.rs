//! Cuts the power and kills the daemon at chosen moments that random crashes meet too seldom.

use crate::disks::{SimDisks, SimFault, SimFaultPlan};
use offload_api::fault::FaultKind;
use offload_api::ids::Generation;
use offloadd::core::Call;
use offloadd::store::definition::Durability;
use test_hooks::random::SimRandom;

use super::world::{Process, World, definition, formatted, job};

const TILES: u32 = 6;

fn seed_of(generation: u64, tile: u32) -> u64 {
    generation * 100 + u64::from(tile)
}

fn write_all(world: &mut World, process: Process, generation: u64) {
    for tile in 0..TILES {
        let seed = seed_of(generation, tile);
        world.write(process, generation, tile, seed).unwrap();
    }
}

/// Starts a daemon and resumes the job from its newest generation, whose tiles must be intact.
fn resume_newest(disks: SimDisks, random: SimRandom) -> (World, Process, u64) {
    let mut world = World::start(disks, random);
    let (process, record) = world.open(&job("a"), 0, 1).unwrap();
    let record = record.unwrap();
    let newest = record.generations.last().unwrap().generation.0;
    world.resume(process, newest).unwrap();
    for tile in 0..TILES {
        world.expect_tile(process, tile, seed_of(newest, tile));
    }
    (world, process, newest)
}

#[test]
fn a_record_read_out_of_a_drives_cache_does_not_vanish_later() {
    for seed in 0..20 {
        for steps in 0..8 {
            let mut world = World::start(formatted(), SimRandom::new(seed));
            let process = world.begin("a", TILES, Durability::Committed);
            write_all(&mut world, process, 1);
            world.commit(process, 1).unwrap();
            write_all(&mut world, process, 2);
            world.commit_call(process, 2, b"");
            for _ in 0..steps {
                world.step();
            }
            // Killed only: the drives keep their caches, and the next daemon reads them.
            let (disks, random) = world.crash(false);
            let (mut world, process, newest) = resume_newest(disks, random);
            write_all(&mut world, process, newest + 1);
            let (disks, random) = world.crash(true);
            let (.., found) = resume_newest(disks, random);
            assert_eq!(found, newest);
        }
    }
}

#[test]
fn a_job_is_defined_whole_or_not_at_all() {
    for seed in 0..40 {
        for steps in 0..14 {
            let mut world = World::start(formatted(), SimRandom::new(seed));
            let (process, _) = world.open(&job("a"), 0, 1).unwrap();
            let definition = definition(TILES, Durability::Committed, 1);
            let token = process.token;
            let call = world.call(Call::Define { token, definition });
            for _ in 0..steps {
                world.step();
            }
            let acknowledged = world.replies.contains_key(&call);
            let (disks, random) = world.crash(true);
            let mut world = World::start(disks, random);
            let (_, record) = world.open(&job("a"), 0, 1).unwrap();
            assert!(record.is_some() || !acknowledged);
        }
    }
}

#[test]
fn a_commit_whose_last_flush_failed_never_comes_back() {
    let mut world = World::start(formatted(), SimRandom::new(1));
    let process = world.begin("a", TILES, Durability::Committed);
    write_all(&mut world, process, 1);
    world.commit(process, 1).unwrap();
    write_all(&mut world, process, 2);
    // Two flushes, the record twice, then this one: the record is on the device and may still be lost.
    world.engine.disks.plan = Some(SimFaultPlan {
        at: world.engine.disks.operation_count() + 4,
        for_good: false,
        fault: SimFault::Errno(libc::EIO),
    });
    let fault = world.commit(process, 2).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Poisoned);
    world.close(process).unwrap();
    let (process, record) = world.open(&job("a"), 0, 1).unwrap();
    assert_eq!(record.unwrap().generations.len(), 1);
    world.resume(process, 1).unwrap();
    // Overwrites a tile of the failed attempt.
    world.write(process, 2, 0, 77).unwrap();
    let (disks, random) = world.crash(false);
    let (.., newest) = resume_newest(disks, random);
    assert_eq!(newest, 1);
}

#[test]
fn the_confirmation_of_an_attempt_given_up_says_nothing_about_the_next() {
    for seed in 0..200 {
        let mut world = World::start(formatted(), SimRandom::new(seed));
        let (process, _) = world.open(&job("a"), 0, 1).unwrap();
        let two_nodes = definition(TILES, Durability::Committed, 2);
        world.define(process, two_nodes).unwrap();
        world.resume(process, 0).unwrap();
        write_all(&mut world, process, 1);
        world.commit(process, 1).unwrap();
        // The mark is written; its flush fails.
        world.engine.disks.plan = Some(SimFaultPlan {
            at: world.engine.disks.operation_count() + 2,
            for_good: false,
            fault: SimFault::Errno(libc::EIO),
        });
        let confirm = Call::Confirm {
            token: process.token,
            generation: Generation(1),
        };
        assert_eq!(world.ask(confirm).unwrap_err().kind, FaultKind::Poisoned);
        world.close(process).unwrap();
        // Discarded in memory; the power cut keeps any part of what the daemon writes for that.
        let (process, _) = world.open(&job("a"), 0, 1).unwrap();
        world.call(Call::Resume {
            token: process.token,
            generation: Generation(0),
        });
        for _ in 0..4 {
            world.step();
        }
        let (disks, random) = world.crash(true);
        let mut world = World::start(disks, random);
        let (process, record) = world.open(&job("a"), 0, 1).unwrap();
        if !record.unwrap().generations.is_empty() {
            // The record is still there: nothing was discarded.
            continue;
        }
        world.resume(process, 0).unwrap();
        write_all(&mut world, process, 1);
        world.commit(process, 1).unwrap();
        let (disks, random) = world.crash(true);
        let mut world = World::start(disks, random);
        let (_, record) = world.open(&job("a"), 0, 1).unwrap();
        let generations = record.unwrap().generations;
        assert!(!generations[0].confirmed, "seed {seed}");
    }
}
