//! Tests that a store whose metadata device takes no writes is served read-only. What could go wrong: it is not served at all, a write counts as
//! done, or the incarnation before or after loses state.

use crate::disks::{SimDisks, SimFault, SimFaultPlan};
use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::Generation;
use offloadd::core::{Call, Event, Moves, Reply};
use offloadd::handover::message::HandoverState;
use offloadd::store::catalog::Phase;
use offloadd::store::definition::Durability;
use offloadd::store::superblock::MeasuredRates;
use offloadd::store::verify::verify;
use offloadd::store::{SUPERBLOCK_OFFSETS, recover};
use test_hooks::random::SimRandom;

use super::growth::{expect_all, write_all};
use super::world::{PEER, Process, World, definition, formatted, job};

const TILES: u32 = 12;

/// Hands over a job that committed two generations and has written since.
fn handed_over(seed: u64) -> (HandoverState, SimDisks, SimRandom) {
    let mut world = World::start(formatted(), SimRandom::new(seed));
    prepare(&mut world);
    let process = world.begin("one", TILES, Durability::Committed);
    write_all(&mut world, process, 1, TILES);
    write_all(&mut world, process, 2, TILES);
    world.write(process, 3, 0, 300).unwrap();
    world.run();
    let state = world.core.hand_over();
    let (disks, random) = world.crash(false);
    (state, disks, random)
}

fn told(fault: &Fault) {
    assert_eq!(fault.kind, FaultKind::Poisoned, "{fault}");
    let is_explained = fault.message.contains("read-only") && fault.message.contains(" of sim");
    assert!(is_explained, "{fault}");
}

/// Prepares the second generation of a job of two nodes on this node alone.
fn prepare(world: &mut World) {
    let (process, _) = world.open(&job("two"), 0, 1).unwrap();
    let two = definition(TILES, Durability::Committed, 2);
    world.define(process, two).unwrap();
    world.resume(process, 0).unwrap();
    write_all(world, process, 1, TILES);
    let token = process.token;
    let generation = Generation(1);
    world.ask(Call::Confirm { token, generation }).unwrap();
    write_all(world, process, 2, TILES);
    world.close(process).unwrap();
}

fn cannot_write(world: &mut World, process: Process, working: u64) {
    let refused = world.write(process, working, 0, 7).unwrap_err();
    assert_eq!(refused, FaultKind::Poisoned);
    told(&world.commit(process, working).unwrap_err());
    let token = process.token;
    let tile_bytes = vec![4096];
    (world.ask(Call::ReserveScratch { token, tile_bytes })).unwrap();
    let scratch = world.write(process, working, TILES, 7).unwrap_err();
    assert_eq!(scratch, FaultKind::Poisoned);
}

/// Asserts that both generations of that job are unchanged.
fn expect_both(world: &mut World) -> Process {
    let (process, record) = world.open(&job("two"), 0, 1).unwrap();
    let generations = record.unwrap().generations;
    let found: Vec<_> = (generations.iter())
        .map(|found| (found.generation.0, found.confirmed))
        .collect();
    assert_eq!(found, [(1, true), (2, false)]);
    process
}

/// Asserts that everything can be read, and nothing written.
fn only_reads(world: &mut World) {
    let reason = world.core.read_only().expect("nothing is written");
    let reason = reason.clone();
    told(&reason);
    // Resuming an older generation discards nothing, and resuming a newer one confirms nothing.
    for generation in [1, 2, 1] {
        let process = expect_both(world);
        world.resume(process, generation).unwrap();
        expect_all(world, process, generation, TILES);
        cannot_write(world, process, generation + 1);
        let token = process.token;
        let generation = Generation(2);
        told(&world.ask(Call::Confirm { token, generation }).unwrap_err());
        world.close(process).unwrap();
    }
    let (process, _) = world.open(&job("one"), 0, 1).unwrap();
    world.resume(process, 2).unwrap();
    expect_all(world, process, 2, TILES);
    cannot_write(world, process, 3);
    world.close(process).unwrap();
    let (other, _) = world.open(&job("other"), 0, 1).unwrap();
    let defined = world.define(other, definition(2, Durability::Committed, 1));
    told(&defined.unwrap_err());
    let name = || job("one");
    told(
        &world
            .ask(Call::DropJob {
                uid: PEER.uid,
                job: name(),
            })
            .unwrap_err(),
    );
    let uid = super::world::PEER.uid;
    told(
        &world
            .ask(Call::DiscardUnreadable { uid, job: name() })
            .unwrap_err(),
    );
    let drained = world.drain_call("sim1");
    told(&world.answer(drained).unwrap_err());
    world.event(Event::RebalanceTick { force: true });
    world.event(Event::RetryMoves);
    world.event(Event::RebalanceTick { force: true });
    world.run();
    assert_eq!(world.core.moves(), Moves::None);
    let stuck = world.core.device_states()[0].status.stuck.clone();
    assert_eq!(stuck, Some(reason.message));
}

#[test]
fn what_is_committed_is_read_and_incarnations_before_and_after_lose_nothing() {
    let mut seen = 0;
    // Writes alone fail, or flushes too: one flush of each device, then one copy of the catalog, then the other.
    for (fault, at) in (0..8).flat_map(|at| [(SimFault::Full, at), (SimFault::Gone, at)]) {
        let (state, mut disks, random) = handed_over(at);
        let first = disks.operation_count();
        let (reads, repairs) = {
            let mut disks = disks.clone();
            let mut store = recover::read(&mut disks).unwrap();
            let reads = disks.operation_count() - first;
            recover::repair(&mut disks, &mut store).unwrap();
            (reads, disks.operation_count() - first - reads)
        };
        disks.plan = Some(SimFaultPlan {
            at: first + reads + at,
            for_good: false,
            fault,
        });
        let mut world = World::start_perhaps_read_only(disks, random);
        world.engine.disks.repair();
        if world.core.read_only().is_none() {
            // The failed operation was not part of a start, or cannot fail like this.
            continue;
        }
        seen += 1;
        only_reads(&mut world);
        let (mut disks, random) = world.crash(false);
        assert_eq!(verify(&mut disks).unwrap().damaged_tiles, []);
        // The handed-over sessions continue, unless a catalog with a newer number reached the device.
        let (mut world, adopted) = World::start_after(disks, random, &state);
        let process = expect_both(&mut world);
        world.close(process).unwrap();
        match adopted {
            Ok(processes) => {
                let process = processes[0];
                world.expect_tile(process, 0, 300);
                write_all(&mut world, process, 3, TILES);
                expect_all(&mut world, process, 3, TILES);
            }
            Err(why) => {
                assert!(at > repairs, "no copy was written: {why}");
                let (process, _) = world.open(&job("one"), 0, 1).unwrap();
                world.resume(process, 2).unwrap();
                expect_all(&mut world, process, 2, TILES);
                write_all(&mut world, process, 3, TILES);
            }
        }
    }
    // All six operations fail on a drive that is gone, two on a full one.
    assert_eq!(seen, 6 + 2);
}

#[test]
fn a_drive_that_takes_no_writes_is_read_in_every_incarnation() {
    let (_, mut disks, mut random) = handed_over(20);
    // A copy that cannot be repaired does not prevent it either.
    disks.flip(0, SUPERBLOCK_OFFSETS[1] + 40, 3);
    disks.break_for_good(0, SimFault::Full);
    for _ in 0..3 {
        let mut world = World::start_perhaps_read_only(disks, random);
        only_reads(&mut world);
        (disks, random) = world.crash(true);
    }
    disks.repair();
    let mut world = World::start(disks, random);
    let (process, _) = world.open(&job("one"), 0, 1).unwrap();
    world.resume(process, 2).unwrap();
    expect_all(&mut world, process, 2, TILES);
    write_all(&mut world, process, 3, TILES);
}

#[test]
fn tiles_that_were_to_move_stay_until_they_can() {
    let mut world = World::start(formatted(), SimRandom::new(21));
    prepare(&mut world);
    let process = world.begin("one", TILES, Durability::Committed);
    write_all(&mut world, process, 1, TILES);
    write_all(&mut world, process, 2, TILES);
    world.close(process).unwrap();
    let come = world.add_disk(2 << 20, MeasuredRates::default());
    assert!(matches!(world.answer(come), Ok(Reply::AddDevice { .. })));
    let (mut disks, random) = world.crash(true);
    disks.break_for_good(0, SimFault::Full);
    let mut world = World::start_perhaps_read_only(disks, random);
    let phase = |world: &World| world.core.device_states()[2].status.phase;
    assert_eq!(phase(&world), Some(Phase::Filling));
    only_reads(&mut world);
    let (mut disks, random) = world.crash(true);
    disks.repair();
    let mut world = World::start(disks, random);
    assert_eq!(world.core.moves(), Moves::Waiting);
    let process = expect_both(&mut world);
    world.close(process).unwrap();
    world.move_all();
    assert_eq!(phase(&world), Some(Phase::Settled));
}
