//! Tests scratch tiles. What could go wrong: a commit waits for them or contains them, they overwrite committed extents, their space is lost or freed
//! while a device still writes to it, a session reaches another's.

use crate::disks::{SimFault, SimFaultPlan};
use offload_api::fault::{Fault, FaultKind};
use offloadd::core::{Call, Event, Peer, Reply};
use offloadd::store::definition::Durability::{self, Committed};
use test_hooks::random::SimRandom;

use super::world::{PEER, Process, World, definition, formatted, job, outcome};

const TILES: u32 = 6;

/// Six tiles whose indices follow the job's, with the sizes that [`World::write`] uses.
const SCRATCH: [u32; 6] = [4096, 8192, 4096, 8192, 4096, 8192];

fn reserve(world: &mut World, process: Process, tile_bytes: &[u32]) -> Result<Reply, Fault> {
    world.ask(Call::ReserveScratch {
        token: process.token,
        tile_bytes: tile_bytes.to_vec(),
    })
}

fn begin(seed: u64, durability: Durability) -> (World, Process) {
    let mut world = World::start(formatted(), SimRandom::new(seed));
    let process = world.begin("a", TILES, durability);
    let reserved = reserve(&mut world, process, &SCRATCH).unwrap();
    let reserved_bytes = u64::from(SCRATCH.iter().sum::<u32>());
    assert_eq!(reserved, Reply::ReserveScratch { reserved_bytes });
    (world, process)
}

fn free_bytes(world: &mut World) -> u64 {
    let Ok(Reply::Describe(about)) = world.ask(Call::Describe) else {
        panic!("a daemon describes itself");
    };
    about.devices.iter().map(|device| device.free_bytes).sum()
}

#[test]
fn it_is_written_and_read_while_a_commit_runs_and_before_anything_is_committed() {
    for (seed, durability) in (0..20).flat_map(|s| [(s, Committed), (s, Durability::None)]) {
        let (mut world, process) = begin(seed, durability);
        for round in 1..4 {
            for tile in 0..TILES {
                world
                    .write(process, round, tile, round * 100 + u64::from(tile))
                    .unwrap();
            }
            let before = TILES + (round as u32) % 6;
            world.write(process, round, before, 7000 + round).unwrap();
            let commit = world.commit_call(process, round, b"");
            for (slot, tile) in (TILES..2 * TILES).enumerate() {
                let seed = round * 1000 + u64::from(tile);
                world.submit_write(process, 99, tile, slot as u32, seed);
            }
            world.answer(commit).unwrap();
            world.run();
            while let Some(entry) = world.completion(process) {
                assert_eq!(outcome(&entry), Ok(()));
            }
            for tile in TILES..2 * TILES {
                world.expect_tile(process, tile, round * 1000 + u64::from(tile));
            }
            for tile in 0..TILES {
                world.expect_tile(process, tile, round * 100 + u64::from(tile));
            }
        }
        // A generation does not contain them, and none survives a crash.
        let left = TILES;
        let (disks, random) = world.crash(durability == Committed);
        if durability == Durability::None {
            continue;
        }
        let mut world = World::start(disks, random);
        let (process, record) = world.open(&job("a"), 0, 1).unwrap();
        assert_eq!(
            record.unwrap().definition.as_ref(),
            &definition(TILES, Committed, 1)
        );
        world.resume(process, 3).unwrap();
        for tile in 0..TILES {
            world.expect_tile(process, tile, 300 + u64::from(tile));
        }
        assert_eq!(world.read(process, left), Err(FaultKind::UnknownTile));
        reserve(&mut world, process, &SCRATCH).unwrap();
        assert_eq!(world.read(process, left), Err(FaultKind::NeverWritten));
    }
}

#[test]
fn its_room_comes_back_when_the_last_operation_has_ended_and_not_before() {
    let (mut world, process) = begin(3, Committed);
    let reserved = u64::from(SCRATCH.iter().sum::<u32>());
    let with = free_bytes(&mut world);
    world.submit_write(process, 1, TILES, 0, 1);
    world.submit_write(process, 1, TILES + 1, 1, 2);
    world.event(Event::PeerGone {
        session: process.session,
    });
    assert_eq!(
        free_bytes(&mut world),
        with,
        "a device may still write there"
    );
    world.run();
    assert_eq!(world.engine.strays_count, 0);
    assert_eq!(free_bytes(&mut world), with + reserved);
    // The same for a session that closes in order, whose job is deleted afterwards.
    let (process, _) = world.open(&job("a"), 0, 1).unwrap();
    reserve(&mut world, process, &SCRATCH).unwrap();
    assert_eq!(free_bytes(&mut world), with);
    world.close(process).unwrap();
    assert_eq!(free_bytes(&mut world), with + reserved);
}

#[test]
fn what_it_cannot_be_is_refused_and_takes_nothing() {
    let mut world = World::start(formatted(), SimRandom::new(1));
    let (process, _) = world.open(&job("a"), 0, 1).unwrap();
    let refused = |world: &mut World, tile_bytes: &[u32], kind| {
        let before = free_bytes(world);
        let fault = reserve(world, process, tile_bytes).unwrap_err();
        assert_eq!(fault.kind, kind, "{fault}");
        assert_eq!(free_bytes(world), before);
        fault.message
    };
    refused(&mut world, &SCRATCH, FaultKind::Invalid);
    world
        .define(process, definition(TILES, Committed, 1))
        .unwrap();
    world.resume(process, 0).unwrap();
    for tile_bytes in [&[][..], &[0], &[4095], &[4096, 512 << 20]] {
        refused(&mut world, tile_bytes, FaultKind::Invalid);
    }
    refused(&mut world, &[4096; 1 << 20], FaultKind::Invalid);
    let no_room = refused(&mut world, &[1 << 20; 5], FaultKind::NoSpace);
    assert!(no_room.contains("5.0 MiB"), "{no_room}");
    // Another user cannot reach them.
    let stranger = Peer { uid: 1001, ..PEER };
    let call = world.call_as(
        stranger,
        Call::ReserveScratch {
            token: process.token,
            tile_bytes: vec![4096],
        },
    );
    assert_eq!(world.answer(call).unwrap_err().kind, FaultKind::NotFound);
    reserve(&mut world, process, &SCRATCH).unwrap();
    refused(&mut world, &SCRATCH, FaultKind::Invalid);
    assert_eq!(
        world.read(process, 2 * TILES),
        Err(FaultKind::UnknownTile),
        "one after the last"
    );
}

#[test]
fn a_failed_write_leaves_nothing_to_read_and_no_commit_in_trouble() {
    let (mut world, process) = begin(1, Committed);
    for tile in 0..TILES {
        world.write(process, 1, tile, 1).unwrap();
    }
    world.write(process, 1, TILES, 5).unwrap();
    world.engine.disks.plan = Some(SimFaultPlan {
        at: world.engine.disks.operation_count(),
        for_good: false,
        fault: SimFault::Errno(libc::EIO),
    });
    assert_eq!(world.write(process, 1, TILES, 6), Err(FaultKind::Io));
    assert_eq!(world.read(process, TILES), Err(FaultKind::NeverWritten));
    world.commit(process, 1).unwrap();
    world.write(process, 2, TILES, 7).unwrap();
    world.expect_tile(process, TILES, 7);
}

#[test]
fn no_reader_beside_a_writer() {
    let (mut world, process) = begin(1, Committed);
    world.write(process, 1, TILES, 5).unwrap();
    world.submit_read(process, TILES, 0);
    world.submit_read(process, TILES, 1);
    world.submit_write(process, 1, TILES, 2, 6);
    let refused = world.completion(process).expect("refused at once");
    assert_eq!(outcome(&refused), Err(FaultKind::TileBusy));
    world.run();
    for _ in 0..2 {
        assert_eq!(outcome(&world.completion(process).unwrap()), Ok(()));
    }
    world.submit_write(process, 1, TILES, 2, 6);
    world.submit_read(process, TILES, 0);
    let refused = world.completion(process).expect("refused at once");
    assert_eq!(outcome(&refused), Err(FaultKind::TileBusy));
    world.run();
    world.completion(process).unwrap();
    world.expect_tile(process, TILES, 6);
}
