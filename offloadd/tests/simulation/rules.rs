//! Tests one rule each: what a process may do, what it is told, and what outlives it.

use crate::disks::{SimFault, SimFaultPlan};
use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{Generation, SlotIndex, TicketId, TileIndex};
use offload_api::ring::entry::{Priority, Request, Verb};
use offloadd::core::{Call, Event, Peer, Reply};
use offloadd::quota::Limits;
use offloadd::store::definition::Durability::{self, Committed};
use offloadd::store::definition::{JobDefinition, TileKind};
use test_hooks::random::SimRandom;

use super::world::{LIMITS, PEER, Process, World, definition, formatted, job, outcome};

const TILES: u32 = 6;

fn world() -> World {
    World::start(formatted(), SimRandom::new(1))
}

fn kind<T: std::fmt::Debug>(result: Result<T, Fault>) -> FaultKind {
    result.unwrap_err().kind
}

/// Opens the only rank of a job again and returns the generations that the store offers.
fn reopen(world: &mut World, name: &str) -> (Process, Vec<u64>, bool) {
    let (process, record) = world.open(&job(name), 0, 1).unwrap();
    let record = record.expect("the job is stored");
    let offered = record.generations.iter().map(|g| g.generation.0);
    (process, offered.collect(), record.clean)
}

fn write_all(world: &mut World, process: Process, generation: u64) {
    for tile in 0..TILES {
        let seed = generation * 100 + u64::from(tile);
        world.write(process, generation, tile, seed).unwrap();
    }
}

fn expect_all(world: &mut World, process: Process, generation: u64) {
    for tile in 0..TILES {
        world.expect_tile(process, tile, generation * 100 + u64::from(tile));
    }
}

/// Makes the next flush fail: the operations before it are counted in a copy of the world.
fn fail_next(world: &mut World, skip: u64, fault: SimFault) {
    world.engine.disks.plan = Some(SimFaultPlan {
        at: world.engine.disks.operation_count() + skip,
        for_good: false,
        fault,
    });
}

#[test]
fn an_acknowledged_generation_survives_power_loss() {
    for seed in 0..20 {
        let mut world = World::start(formatted(), SimRandom::new(seed));
        let process = world.begin("a", TILES, Committed);
        write_all(&mut world, process, 1);
        world.commit(process, 1).unwrap();
        let (disks, random) = world.crash(true);
        let mut world = World::start(disks, random);
        let (process, offered, _) = reopen(&mut world, "a");
        assert_eq!(offered, [1]);
        world.resume(process, 1).unwrap();
        expect_all(&mut world, process, 1);
    }
}

#[test]
fn writes_of_the_next_generation_leave_the_committed_one_alone() {
    let mut world = world();
    let process = world.begin("a", TILES, Committed);
    write_all(&mut world, process, 1);
    world.commit(process, 1).unwrap();
    write_all(&mut world, process, 2);
    write_all(&mut world, process, 2);
    let (disks, random) = world.crash(false);
    let mut world = World::start(disks, random);
    let (process, ..) = reopen(&mut world, "a");
    world.resume(process, 1).unwrap();
    expect_all(&mut world, process, 1);
}

/// Begins a job whose tile 0 is frozen.
fn begin_frozen(world: &mut World) -> Process {
    let (process, _) = world.open(&job("a"), 0, 1).unwrap();
    let plain = definition(TILES, Committed, 1);
    let mut tiles = plain.tiles().to_vec();
    tiles[0].kind = TileKind::Frozen;
    let frozen = JobDefinition::new(plain.layout().to_vec(), tiles, Committed, 1).unwrap();
    world.define(process, frozen).unwrap();
    world.resume(process, 0).unwrap();
    process
}

fn write_trained(world: &mut World, process: Process, generation: u64) {
    for tile in 1..TILES {
        let seed = generation * 100 + u64::from(tile);
        world.write(process, generation, tile, seed).unwrap();
    }
}

fn expect_frozen(world: &mut World, process: Process, generation: u64) {
    world.expect_tile(process, 0, 200);
    for tile in 1..TILES {
        world.expect_tile(process, tile, generation * 100 + u64::from(tile));
    }
}

#[test]
fn a_frozen_tile_is_written_until_it_is_committed_and_never_after() {
    for seed in 0..20 {
        let mut world = World::start(formatted(), SimRandom::new(seed));
        let process = begin_frozen(&mut world);
        world.write(process, 1, 0, 100).unwrap();
        world.write(process, 1, 0, 200).unwrap();
        write_trained(&mut world, process, 1);
        world.commit(process, 1).unwrap();
        for generation in 2..5 {
            assert_eq!(
                world.write(process, generation, 0, 300),
                Err(FaultKind::Invalid)
            );
            write_trained(&mut world, process, generation);
            world.commit(process, generation).unwrap();
        }
        write_trained(&mut world, process, 5);
        let (disks, random) = world.crash(true);
        let mut world = World::start(disks, random);
        let (process, ..) = reopen(&mut world, "a");
        world.resume(process, 4).unwrap();
        expect_frozen(&mut world, process, 4);
        assert_eq!(world.write(process, 5, 0, 300), Err(FaultKind::Invalid));
    }
}

#[test]
fn a_frozen_tile_moves_with_its_only_extent() {
    for seed in 0..20 {
        let mut world = World::start(formatted(), SimRandom::new(seed));
        let process = begin_frozen(&mut world);
        world.write(process, 1, 0, 200).unwrap();
        write_trained(&mut world, process, 1);
        world.commit(process, 1).unwrap();
        world.close(process).unwrap();
        let call = world.drain_call("sim1");
        world.move_all();
        world.answer(call).unwrap();
        let (disks, random) = world.crash(true);
        let mut world = World::start(disks, random);
        let (process, ..) = reopen(&mut world, "a");
        world.resume(process, 1).unwrap();
        expect_frozen(&mut world, process, 1);
        write_trained(&mut world, process, 2);
        world.commit(process, 2).unwrap();
        expect_frozen(&mut world, process, 2);
    }
}

#[test]
fn a_write_of_another_generation_is_refused() {
    let mut world = world();
    let process = world.begin("a", TILES, Committed);
    write_all(&mut world, process, 1);
    world.commit(process, 1).unwrap();
    for generation in [0, 1, 3] {
        assert_eq!(
            world.write(process, generation, 0, 5),
            Err(FaultKind::WrongGeneration)
        );
    }
    assert_eq!(world.write(process, 2, 0, 5), Ok(()));
}

#[test]
fn a_dead_process_keeps_its_arena_until_its_io_has_ended() {
    let mut world = world();
    let process = world.begin("a", TILES, Committed);
    world.submit_write(process, 1, 0, 0, 1);
    world.submit_write(process, 1, 1, 1, 2);
    world.event(Event::PeerGone {
        session: process.session,
    });
    assert_eq!(world.dropped, [], "its writes are still in flight");
    // The process that follows waits: this rank, and the other one of two.
    assert_eq!(kind(world.open(&job("a"), 0, 1)), FaultKind::Ending);
    assert_eq!(kind(world.open(&job("a"), 1, 2)), FaultKind::Ending);
    // Who deletes its job waits too.
    let delete = || Call::DropJob {
        uid: PEER.uid,
        job: job("a"),
    };
    assert_eq!(kind(world.ask(delete())), FaultKind::Ending);
    // So it does where the session that ends is the last that there can be.
    let only_one = Limits {
        sessions_max: 1,
        ..LIMITS
    };
    world.event(Event::Limits(only_one));
    assert_eq!(kind(world.open(&job("a"), 0, 1)), FaultKind::Ending);
    assert_eq!(kind(world.open(&job("b"), 0, 1)), FaultKind::TooMany);
    world.run();
    assert_eq!(world.engine.strays_count, 0);
    assert_eq!(world.dropped, [process.session]);
    let (process, offered, _) = reopen(&mut world, "a");
    assert!(offered.is_empty());
    world.resume(process, 0).unwrap();
    assert_eq!(world.read(process, 0), Err(FaultKind::NeverWritten));
    assert_eq!(kind(world.ask(delete())), FaultKind::Busy);
}

#[test]
fn one_operation_a_slot_and_no_reader_beside_a_writer() {
    let mut world = world();
    let process = world.begin("a", TILES, Committed);
    write_all(&mut world, process, 1);
    let mut refused = |act: &dyn Fn(&mut World), kind| {
        act(&mut world);
        let entry = world.completion(process).expect("refused at once");
        assert_eq!(outcome(&entry), Err(kind));
        assert_eq!(entry.device, u32::MAX);
    };
    refused(
        &|world| {
            world.submit_read(process, 0, 0);
            world.submit_read(process, 1, 0);
        },
        FaultKind::SlotBusy,
    );
    // Several readers of a tile are allowed; a writer beside them is not.
    refused(
        &|world| {
            world.submit_read(process, 0, 1);
            world.submit_write(process, 1, 0, 2, 9);
        },
        FaultKind::TileBusy,
    );
    refused(
        &|world| {
            world.submit_write(process, 1, 3, 3, 9);
            world.submit_read(process, 3, 4);
        },
        FaultKind::TileBusy,
    );
    refused(
        &|world| world.submit_write(process, 1, 3, 4, 9),
        FaultKind::TileBusy,
    );
    refused(
        &|world| world.submit_read(process, TILES, 5),
        FaultKind::UnknownTile,
    );
    refused(
        &|world| world.submit_read(process, 1, 99),
        FaultKind::UnknownSlot,
    );
    refused(
        &|world| {
            let request = Request {
                ticket: TicketId(1),
                verb: Verb::SwapIn,
                priority: Priority::Prefetch,
                tile: TileIndex(1),
                slot: SlotIndex(6),
                generation: Generation(0),
                checksum: 0,
            };
            let mut entry = request.to_sqe(world.epoch);
            entry.epoch ^= 1;
            world.submit_raw(process, entry);
        },
        FaultKind::StaleEpoch,
    );
}

#[test]
fn more_in_flight_than_granted_is_refused() {
    let mut world = world();
    let mut request = world.open_request(&job("a"), 0, 1);
    request.iodepth = 2;
    let token = request.token;
    let Ok(Reply::Open(reply)) = world.ask(Call::Open(request)) else {
        panic!("refused");
    };
    assert_eq!((reply.iodepth, reply.ring_entries), (2, 4));
    let session = offloadd::io::SessionId(2);
    let process = Process { session, token };
    world
        .define(process, definition(TILES, Committed, 1))
        .unwrap();
    world.resume(process, 0).unwrap();
    for slot in 0..3 {
        world.submit_write(process, 1, slot, slot, 1);
    }
    let entry = world.completion(process).unwrap();
    assert_eq!(
        (entry.ticket, outcome(&entry)),
        (2, Err(FaultKind::TooMany))
    );
}

#[test]
fn nonsense_in_the_ring_ends_the_session_and_nobody_elses() {
    let mut world = world();
    let bad = world.begin("bad", TILES, Committed);
    let good = world.begin("good", TILES, Committed);
    world.submit_write(bad, 1, 0, 0, 1);
    let mut entry = Request {
        ticket: TicketId(1),
        verb: Verb::SwapIn,
        priority: Priority::Prefetch,
        tile: TileIndex(0),
        slot: SlotIndex(1),
        generation: Generation(0),
        checksum: 0,
    }
    .to_sqe(world.epoch);
    entry.verb = 77;
    world.submit_raw(bad, entry);
    assert_eq!(world.evicted, [bad.session]);
    // The daemon does not process entries of the session after that.
    world.submit_read(bad, 0, 2);
    world.run();
    assert_eq!(world.dropped, [bad.session]);
    write_all(&mut world, good, 1);
    world.commit(good, 1).unwrap();
}

#[test]
fn a_dead_rank_ends_the_generation_of_the_others() {
    let mut world = world();
    let name = job("a");
    let (first, _) = world.open(&name, 0, 2).unwrap();
    let (second, _) = world.open(&name, 1, 2).unwrap();
    assert_eq!(kind(world.open(&name, 1, 2)), FaultKind::Busy);
    assert_eq!(kind(world.open(&name, 2, 2)), FaultKind::Busy);
    assert_eq!(kind(world.open(&name, 2, 3)), FaultKind::Invalid);
    world
        .define(first, definition(TILES, Committed, 1))
        .unwrap();
    world
        .define(second, definition(TILES, Committed, 1))
        .unwrap();
    let other = world.define(second, definition(TILES + 1, Committed, 1));
    assert_eq!(kind(other), FaultKind::LayoutChanged);
    world.resume(first, 0).unwrap();
    assert_eq!(kind(world.resume(second, 7)), FaultKind::WrongGeneration);
    world.resume(second, 0).unwrap();
    let waits = world.commit_call(first, 1, b"blob");
    world.event(Event::PeerGone {
        session: second.session,
    });
    let fault = world.answer(waits).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Poisoned);
    assert!(fault.message.contains("rank 1 of job a"), "{fault}");
    assert_eq!(world.write(first, 1, 0, 1), Err(FaultKind::Poisoned));
    assert_eq!(kind(world.open(&name, 1, 2)), FaultKind::Busy);
    world.close(first).unwrap();
    let (first, _) = world.open(&name, 0, 2).unwrap();
    world.resume(first, 0).unwrap();
    assert_eq!(world.write(first, 1, 0, 1), Ok(()));
}

#[test]
fn a_job_is_its_users_only() {
    let mut world = world();
    let process = world.begin("a", TILES, Committed);
    let stranger = Peer { uid: 0, pid: 9 };
    let token = process.token;
    let call = world.call_as(stranger, Call::Close { token });
    assert_eq!(kind(world.answer(call)), FaultKind::NotFound);
    let call = world.call_as(stranger, Call::ListJobs);
    assert_eq!(world.answer(call), Ok(Reply::ListJobs(Vec::new())));
    world.close(process).unwrap();
    let call = world.call_as(
        stranger,
        Call::DropJob {
            uid: stranger.uid,
            job: job("a"),
        },
    );
    assert_eq!(kind(world.answer(call)), FaultKind::NotFound);
    let Ok(Reply::ListJobs(mine)) = world.ask(Call::ListJobs) else {
        panic!("refused");
    };
    assert_eq!(
        (mine.len(), mine[0].uid, mine[0].open),
        (1, PEER.uid, false)
    );
}

#[test]
fn space_is_reserved_at_definition_and_freed_by_a_deletion() {
    let mut world = world();
    let free = |world: &mut World| match world.ask(Call::Describe) {
        Ok(Reply::Describe(d)) => d.devices.iter().map(|d| d.free_bytes).sum::<u64>(),
        other => panic!("{other:?}"),
    };
    let before = free(&mut world);
    let process = world.begin("a", TILES, Committed);
    let (other, _) = world.open(&job("b"), 0, 1).unwrap();
    let fault = world
        .define(other, definition(1000, Committed, 1))
        .unwrap_err();
    assert_eq!(fault.kind, FaultKind::NoSpace);
    assert!(fault.message.contains("sim1 has"), "{fault}");
    assert_eq!(
        kind(world.ask(Call::DropJob {
            uid: PEER.uid,
            job: job("a")
        })),
        FaultKind::Busy
    );
    world.close(process).unwrap();
    let reserved = before - free(&mut world);
    let freed_bytes = match world.ask(Call::DropJob {
        uid: PEER.uid,
        job: job("a"),
    }) {
        Ok(Reply::DropJob { freed_bytes }) => freed_bytes,
        other => panic!("{other:?}"),
    };
    assert_eq!((freed_bytes, free(&mut world)), (reserved, before));
    let (disks, random) = world.crash(true);
    let mut world = World::start(disks, random);
    assert_eq!(world.ask(Call::ListJobs), Ok(Reply::ListJobs(Vec::new())));
}

#[test]
fn host_memory_and_sessions_are_bounded() {
    let mut world = world();
    let mut request = world.open_request(&job("a"), 0, 1);
    request.classes[0].slot_count = 1 << 19;
    assert_eq!(kind(world.ask(Call::Open(request))), FaultKind::NoMemory);
    let open: Vec<Process> = (0..8)
        .map(|n| world.open(&job(&format!("j{n}")), 0, 1).unwrap().0)
        .collect();
    assert_eq!(kind(world.open(&job("z"), 0, 1)), FaultKind::TooMany);
    world.close(open[3]).unwrap();
    world.open(&job("z"), 0, 1).unwrap();
}

#[test]
fn a_process_that_goes_while_its_arena_is_made_leaves_nothing_behind() {
    for result in [Ok(()), Err(Fault::new(FaultKind::NoMemory, "no memory"))] {
        let mut world = world();
        world.arenas_take_long = true;
        let request = world.open_request(&job("a"), 0, 1);
        let token = request.token;
        let open = world.call(Call::Open(request));
        let session = world.made[&token];
        world.event(Event::PeerGone { session });
        assert_eq!(world.dropped, [], "the arena is still being made");
        let made = result.is_ok();
        world.event(Event::ArenaMade { session, result });
        assert!(world.answer(open).is_err());
        assert_eq!(world.dropped.len(), usize::from(made));
        world.arenas_take_long = false;
        world.begin("a", TILES, Committed);
    }
}

#[test]
fn a_prepared_generation_keeps_the_one_before_until_it_is_confirmed() {
    let mut world = world();
    let (process, _) = world.open(&job("a"), 0, 1).unwrap();
    world
        .define(process, definition(TILES, Committed, 2))
        .unwrap();
    world.resume(process, 0).unwrap();
    write_all(&mut world, process, 1);
    world.commit(process, 1).unwrap();
    assert_eq!(
        world.write(process, 2, 0, 1),
        Err(FaultKind::WrongGeneration)
    );
    let confirm = |generation| Call::Confirm {
        token: process.token,
        generation: Generation(generation),
    };
    assert_eq!(kind(world.ask(confirm(2))), FaultKind::WrongGeneration);
    assert_eq!(world.ask(confirm(1)), Ok(Reply::Confirm));
    write_all(&mut world, process, 2);
    world.commit(process, 2).unwrap();
    let (disks, random) = world.crash(true);
    let mut world = World::start(disks, random);
    let (process, offered, _) = reopen(&mut world, "a");
    assert_eq!(offered, [1, 2]);
    // Another node does not have generation 2: it is discarded permanently.
    world.resume(process, 1).unwrap();
    expect_all(&mut world, process, 1);
    world.write(process, 2, 0, 77).unwrap();
    let (disks, random) = world.crash(true);
    let mut world = World::start(disks, random);
    let (process, offered, _) = reopen(&mut world, "a");
    assert_eq!(offered, [1]);
    world.resume(process, 1).unwrap();
    expect_all(&mut world, process, 1);
}

#[test]
fn a_job_written_in_place_is_not_trusted_after_a_crash() {
    let mut world = world();
    let process = world.begin("a", TILES, Durability::None);
    write_all(&mut world, process, 1);
    world.commit(process, 1).unwrap();
    world.close(process).unwrap();
    let (process, offered, clean) = reopen(&mut world, "a");
    assert_eq!((offered, clean), (vec![1], true));
    world.resume(process, 1).unwrap();
    expect_all(&mut world, process, 1);
    // Whatever part of it reached the device: one write was accepted.
    world.write(process, 2, 0, 1).unwrap();
    let (disks, random) = world.crash(true);
    let mut world = World::start(disks, random);
    let (process, offered, clean) = reopen(&mut world, "a");
    assert_eq!((offered, clean), (vec![1], false));
    assert_eq!(kind(world.resume(process, 1)), FaultKind::Unclean);
    world.close(process).unwrap();
    world
        .ask(Call::DropJob {
            uid: PEER.uid,
            job: job("a"),
        })
        .unwrap();
    world.begin("a", TILES, Durability::None);
}

#[test]
fn a_failed_tile_write_fails_its_ticket_and_the_commit_until_it_is_written_again() {
    let mut world = world();
    let process = world.begin("a", TILES, Committed);
    write_all(&mut world, process, 1);
    for (fault, kind) in [
        (SimFault::Errno(libc::EIO), FaultKind::Io),
        (SimFault::Errno(libc::ENOSPC), FaultKind::NoSpace),
        (SimFault::Short, FaultKind::Short),
    ] {
        fail_next(&mut world, 0, fault);
        assert_eq!(world.write(process, 1, 2, 5), Err(kind));
        assert_eq!(world.read(process, 2), Err(FaultKind::NeverWritten));
        assert_eq!(self::kind(world.commit(process, 1)), FaultKind::Poisoned);
    }
    world.write(process, 1, 2, 102).unwrap();
    world.commit(process, 1).unwrap();
    expect_all(&mut world, process, 1);
}

#[test]
fn a_failed_flush_ends_the_generation_of_every_job_that_wrote_to_the_device() {
    let mut world = world();
    let one = world.begin("one", TILES, Committed);
    let two = world.begin("two", TILES, Committed);
    for process in [one, two] {
        write_all(&mut world, process, 1);
        world.commit(process, 1).unwrap();
        write_all(&mut world, process, 2);
    }
    fail_next(&mut world, 0, SimFault::Errno(libc::EIO));
    let fault = world.commit(one, 2).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Poisoned);
    assert!(fault.message.contains("flushing sim1"), "{fault}");
    // The next flush would succeed and not report what the first one lost.
    for process in [one, two] {
        assert_eq!(kind(world.commit(process, 2)), FaultKind::Poisoned);
        assert_eq!(world.write(process, 2, 0, 1), Err(FaultKind::Poisoned));
    }
    for (process, name) in [(one, "one"), (two, "two")] {
        world.close(process).unwrap();
        let (process, offered, _) = reopen(&mut world, name);
        assert_eq!(offered, [1]);
        world.resume(process, 1).unwrap();
        expect_all(&mut world, process, 1);
        write_all(&mut world, process, 2);
        world.commit(process, 2).unwrap();
    }
}
