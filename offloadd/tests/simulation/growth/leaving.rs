//! Tests devices that leave: they are empty then, whatever failed meanwhile, and the store opens without them.

use crate::disks::{SimDisks, SimFault, SimFaultPlan};
use offload_api::fault::FaultKind;
use offloadd::core::{Call, Event, Moves, Reply};
use offloadd::quota::Limits;
use offloadd::store::catalog::Phase;
use offloadd::store::definition::Durability;
use offloadd::store::verify::verify;
use offloadd::store::{BLOCK, SUPERBLOCK_OFFSETS, StoreError, recover};
use test_hooks::random::SimRandom;

use super::{damage_a_tile, expect_all, extents, write_all};
use crate::world::{LIMITS, World, formatted};

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
    // Listed or not, it is not part of the store.
    let mut both = disks.clone();
    let store = recover::read(&mut both).unwrap();
    assert_eq!(store.devices.len(), 1);
    assert_eq!(store.foreign_devices.len(), 1);
    assert!(store.foreign_devices[0].drained);
    assert!(
        store.foreign_devices[0]
            .to_string()
            .contains("remove it from the list")
    );
    assert!(matches!(
        recover::read(&mut disks.pick(&[1])),
        Err(StoreError::Drained { .. })
    ));
    let mut alone = disks.pick(&[0]);
    assert_eq!(verify(&mut alone).unwrap().damaged_tiles, []);
    let mut world = World::start(alone, random);
    let process = world.reopen("one", 4);
    expect_all(&mut world, process, 4, 20);
    let idle = world.reopen("idle", 1);
    expect_all(&mut world, idle, 1, 20);
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
            .map(|d| d.status.phase)
            .collect();
        if phases == [Some(Phase::Settled); 2] {
            let call = world.drain_call("sim1");
            world.answer(call).unwrap();
        }
        world.move_all();
        let process = world.reopen("one", 1);
        expect_all(&mut world, process, 1, 10);
        let (disks, _) = world.crash(true);
        let store = recover::read(&mut disks.pick(&[0])).unwrap();
        assert_eq!(store.devices.len(), 1, "fault {fault:?} at {at}");
        if beyond {
            tried = Some(at);
            break;
        }
    }
    // Some faults end a drain early; every operation of a complete drain was reached nevertheless.
    assert!(tried.is_some_and(|at| at > 20), "{tried:?}");
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
    let stuck = world.core.device_states()[1].status.stuck.clone().unwrap();
    assert!(
        stuck.contains(&format!("tile {tile} of job one")),
        "{stuck}"
    );
    let process = world.reopen("one", 1);
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
    // A tile may wait for hours; meanwhile the tiles of all jobs are not searched again and again.
    let plans = world.core.plans_made();
    for _ in 0..50 {
        world.event(Event::RebalanceTick { force: true });
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
            world.event(Event::RebalanceTick { force: true });
        }
        let after = copy(&world.engine.disks, 1);
        if after == before {
            continue;
        }
        // The second generation is being written: the first survives every power cut.
        for seed in 0..20 {
            let mut disks = world.engine.disks.clone();
            disks.crash(seed, Vec::new());
            assert!(copy(&disks, 0) == after, "seed {seed}");
        }
        seen += 1;
    }
    assert!(seen > 0);
}

#[test]
fn the_rate_limit_of_the_settings_holds_for_moves_without_their_own() {
    let mut world = World::start(formatted(), SimRandom::new(21));
    let process = world.begin("one", 60, Durability::Committed);
    write_all(&mut world, process, 1, 60);
    world.close(process).unwrap();
    let settings = |rebalance_bytes_per_s_max| Limits {
        rebalance_bytes_per_s_max,
        ..LIMITS
    };
    world.event(Event::Limits(settings(Some(1))));
    assert_eq!(
        world.core.rebalance_bytes_per_s_max(),
        None,
        "nothing moves"
    );
    let call = world.drain_call("sim1");
    assert!(world.answer(call).is_ok());
    assert_eq!(world.core.rebalance_bytes_per_s_max(), Some(1));
    world.event(Event::RebalanceTick { force: true });
    world.run();
    // Sixteen times the definition, and the last tile.
    let copied = world.core.copied_bytes();
    assert!((1..=16 * BLOCK + 8192).contains(&copied), "{copied}");
    // The limit can be changed while tiles move, for one move and for all.
    world.event(Event::Limits(settings(Some(2))));
    assert_eq!(world.core.rebalance_bytes_per_s_max(), Some(2));
    let call = world.call(Call::LimitMoves { bytes_per_s_max: 9 });
    assert_eq!(world.answer(call), Ok(Reply::LimitMoves));
    assert_eq!(world.core.rebalance_bytes_per_s_max(), Some(9));
    world.event(Event::Limits(settings(None)));
    assert_eq!(world.core.rebalance_bytes_per_s_max(), Some(9));
    world.move_all();
    assert_eq!(world.left, [1]);
    assert_eq!(world.core.rebalance_bytes_per_s_max(), None);
}

/// The driver pauses between batches, so batches must be small enough for that.
#[test]
fn with_a_rate_limit_smaller_batches_are_copied_and_all_of_them() {
    let limit = |world: &mut World, bytes_per_s_max| {
        let call = world.call(Call::LimitMoves { bytes_per_s_max });
        world.answer(call)
    };
    let copied = |rate_limiter: Option<u64>| {
        let mut world = World::start(formatted(), SimRandom::new(21));
        let process = world.begin("one", 60, Durability::Committed);
        write_all(&mut world, process, 1, 60);
        world.close(process).unwrap();
        let refused = limit(&mut world, 5).unwrap_err();
        assert_eq!(refused.kind, FaultKind::Invalid, "{refused}");
        // A limit for a device that does not exist.
        let nobody = world.drain_call_under("nobody", Some(7));
        assert!(world.answer(nobody).is_err());
        let call = world.drain_call_under("sim1", rate_limiter);
        assert!(world.answer(call).is_ok());
        assert_eq!(world.core.rebalance_bytes_per_s_max(), rate_limiter);
        if let Some(rate_limiter) = rate_limiter {
            assert_eq!(limit(&mut world, 9), Ok(Reply::LimitMoves));
            // A repeated request without a limit keeps the first one's.
            let again = world.drain_call("sim1");
            assert!(world.answer(again).is_ok());
            assert_eq!(world.core.rebalance_bytes_per_s_max(), Some(9));
            assert_eq!(limit(&mut world, rate_limiter), Ok(Reply::LimitMoves));
        }
        let mut batches = Vec::new();
        for _ in 0..100 {
            let before = world.core.copied_bytes();
            world.event(Event::RebalanceTick { force: true });
            world.run();
            batches.push(world.core.copied_bytes() - before);
        }
        assert_eq!(world.core.moves(), Moves::None);
        assert_eq!(
            world.core.rebalance_bytes_per_s_max(),
            None,
            "it went with them"
        );
        let (disks, _) = world.crash(true);
        assert_eq!(extents(&mut disks.pick(&[0])), [120]);
        batches.retain(|bytes| *bytes > 0);
        batches
    };
    let whole = copied(None);
    assert_eq!(whole.len(), 1, "{whole:?}");
    let parts = copied(Some(1));
    // Sixteen times the definition, however low the limit is, and the last tile.
    let bytes_max = 16 * BLOCK + 8192;
    assert!(parts.iter().all(|bytes| *bytes <= bytes_max), "{parts:?}");
    assert!(
        parts.len() > 1 && parts.iter().sum::<u64>() == whole[0],
        "{parts:?}"
    );
}
