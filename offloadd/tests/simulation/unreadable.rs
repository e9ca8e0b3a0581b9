//! Tests a record that its device cannot read when the daemon starts. It may be the newest, acknowledged one, so neither it nor the tiles that it
//! names may be overwritten before an administrator has decided. The record and its job's tiles stay, and callers are told what to do.

use crate::disks::{SimDisks, SimFault};
use offload_api::fault::FaultKind;
use offload_api::ids::Generation;
use offloadd::core::{Call, Event, Moves, Reply, Viewer};
use offloadd::store::definition::Durability;
use offloadd::store::dual_copy::Consequence;
use offloadd::store::recover;
use offloadd::store::superblock::MeasuredRates;
use offloadd::store::tile_table::Extent;
use offloadd::store::verify::verify;
use test_hooks::random::SimRandom;

use super::world::{PEER, World, formatted, job};

const TILES: u32 = 6;

fn seed(generation: u64, tile: u32) -> u64 {
    100 * generation + u64::from(tile)
}

/// Makes a store with two generations of a job, where the newer record can no longer be read.
fn worn_out() -> SimDisks {
    worn_out_while(Durability::Committed, 0)
}

/// The same, while `written_count` tiles of the third generation are written.
fn worn_out_while(durability: Durability, written_count: u32) -> SimDisks {
    let mut world = World::start(formatted(), SimRandom::new(1));
    let process = world.begin("one", TILES, durability);
    for generation in 1..=2 {
        for tile in 0..TILES {
            world
                .write(process, generation, tile, seed(generation, tile))
                .unwrap();
        }
        world.commit(process, generation).unwrap();
    }
    for tile in 0..written_count {
        world.write(process, 3, tile, seed(3, tile)).unwrap();
    }
    let (mut disks, _) = world.crash(false);
    let store = recover::read(&mut disks).unwrap();
    let metadata = store[store.metadata_device].position;
    for offset in store.jobs[0].entry.area.records(0) {
        disks.wear_out(metadata, offset..offset + 4096);
    }
    disks
}

#[test]
fn what_was_written_over_beside_it_is_counted_and_not_called_damaged() {
    for written_count in [0, 2] {
        let mut disks = worn_out_while(Durability::Committed, written_count);
        let report = verify(&mut disks).unwrap();
        assert_eq!(report.damaged_tiles, []);
        assert_eq!(report.tile_count, TILES as usize);
        let [job] = &report.undecided_jobs[..] else {
            panic!("{:?}", report.undecided_jobs);
        };
        assert_eq!(job.generation, Generation(1));
        assert_eq!(job.differing_count, u64::from(written_count));
        assert!(!report.is_sound());
        // Once the device returns it again, everything is as committed.
        disks.repair();
        let report = verify(&mut disks).unwrap();
        assert!(report.is_sound());
    }
}

#[test]
fn given_up_what_was_written_in_place_is_of_no_generation() {
    let mut world = World::start(worn_out_while(Durability::None, 2), SimRandom::new(6));
    let newest_generation = Generation(0);
    assert_eq!(
        discard_unreadable(&mut world, PEER.uid),
        Ok(Reply::DiscardUnreadable { newest_generation })
    );
    assert_eq!(resume(&mut world, 1), Err(FaultKind::Unclean));
}

#[test]
fn a_mark_that_is_withheld_may_say_that_tiles_were_written_over() {
    let mut world = World::start(formatted(), SimRandom::new(7));
    let process = world.begin("one", TILES, Durability::None);
    for tile in 0..TILES {
        world.write(process, 1, tile, seed(1, tile)).unwrap();
    }
    world.commit(process, 1).unwrap();
    world.write(process, 2, 0, seed(2, 0)).unwrap();
    let (mut disks, random) = world.crash(false);
    let store = recover::read(&mut disks).unwrap();
    let metadata = store[store.metadata_device].position;
    for offset in store.jobs[0].entry.area.marks(1) {
        disks.wear_out(metadata, offset..offset + 4096);
    }
    let report = verify(&mut disks).unwrap();
    assert_eq!(report.damaged_tiles, []);
    assert_eq!(report.unclean_jobs.len(), 1);
    let mut world = World::start(disks, random);
    assert_eq!(resume(&mut world, 1), Err(FaultKind::Unclean));
}

fn extents(disks: &mut SimDisks) -> Vec<[Extent; 2]> {
    let store = recover::read(disks).unwrap();
    store.jobs[0].table.extents.clone()
}

/// Opens the job and resumes it from `generation`, whose tiles must be intact; or returns the kind of the refusal.
fn resume(world: &mut World, generation: u64) -> Result<(), FaultKind> {
    let (process, _) = world.open(&job("one"), 0, 1).unwrap();
    let resumed = world.resume(process, generation);
    if resumed.is_ok() {
        for tile in 0..TILES {
            world.expect_tile(process, tile, seed(generation, tile));
        }
    }
    world.close(process).unwrap();
    resumed.map(|_| ()).map_err(|fault| fault.kind)
}

fn discard_unreadable(world: &mut World, uid: u32) -> Result<Reply, offload_api::fault::Fault> {
    let job = job("one");
    world.ask(Call::DiscardUnreadable { uid, job })
}

#[test]
fn its_job_is_not_resumed_until_the_device_returns_it() {
    let mut disks = worn_out();
    let store = recover::read(&mut disks).unwrap();
    let consequences: Vec<_> = store.notes.iter().map(|note| note.consequence).collect();
    assert_eq!(consequences, [Consequence::Undecided; 2]);
    let mut world = World::start(disks, SimRandom::new(2));
    let (process, record) = world.open(&job("one"), 0, 1).unwrap();
    assert_eq!(record.unwrap().generations.len(), 1);
    for generation in [0, 1, 2] {
        let fault = world.resume(process, generation).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Damaged);
        for word in [
            "job one",
            "slot 0",
            "sim0",
            "offloadd job discard-unreadable one",
            "delete the job",
        ] {
            assert!(fault.message.contains(word), "{word}: {fault}");
        }
    }
    // A process that has the job open must not be surprised.
    assert_eq!(
        discard_unreadable(&mut world, PEER.uid).unwrap_err().kind,
        FaultKind::Busy
    );
    let seen = world.core.contents(Viewer::All);
    assert_eq!(seen[0].unreadable.len(), 1, "{:?}", seen[0].unreadable);
    let (mut disks, random) = world.crash(true);
    disks.repair();
    let mut world = World::start(disks, random);
    assert_eq!(resume(&mut world, 2), Ok(()));
}

#[test]
fn its_jobs_tiles_stay_while_others_move() {
    let mut disks = worn_out();
    let before = extents(&mut disks);
    let mut world = World::start(disks, SimRandom::new(3));
    let other = world.begin("two", TILES, Durability::Committed);
    for tile in 0..TILES {
        world.write(other, 1, tile, seed(1, tile)).unwrap();
    }
    world.commit(other, 1).unwrap();
    world.close(other).unwrap();
    let call = world.add_disk(2 << 20, MeasuredRates::default());
    world.answer(call).unwrap();
    world.move_all();
    assert_eq!(world.core.moves(), Moves::None);
    let call = world.drain_call("sim1");
    world.answer(call).unwrap();
    world.move_all();
    // Named in the reason, and the daemon does not spin.
    assert_eq!(world.core.moves(), Moves::Stopped);
    let states = world.core.device_states();
    let why = states[1].status.stuck.clone().unwrap();
    assert!(why.contains("job one of uid 1000"), "{why}");
    assert!(why.contains("offloadd job discard-unreadable one"), "{why}");
    assert!(states[1].status.left_bytes > 0);
    let (mut disks, random) = world.crash(true);
    assert_eq!(extents(&mut disks), before);
    disks.repair();
    let mut world = World::start(disks, random);
    assert_eq!(resume(&mut world, 2), Ok(()));
}

#[test]
fn given_up_it_is_gone_for_good_and_its_tiles_move_again() {
    let mut world = World::start(worn_out(), SimRandom::new(4));
    let call = world.drain_call("sim1");
    world.answer(call).unwrap();
    world.move_all();
    assert_eq!(world.core.moves(), Moves::Stopped);
    // Another user has no job of this name.
    assert_eq!(
        discard_unreadable(&mut world, 1001).unwrap_err().kind,
        FaultKind::NotFound
    );
    let newest_generation = Generation(1);
    assert_eq!(
        discard_unreadable(&mut world, PEER.uid),
        Ok(Reply::DiscardUnreadable { newest_generation })
    );
    // Discarding once is enough.
    assert_eq!(
        discard_unreadable(&mut world, PEER.uid).unwrap_err().kind,
        FaultKind::Invalid
    );
    world.event(Event::RebalanceTick { force: true });
    world.move_all();
    assert_eq!(world.left, [1]);
    assert_eq!(resume(&mut world, 1), Ok(()));
    let (disks, random) = world.crash(true);
    let mut world = World::start(disks.pick(&[0]), random);
    assert_eq!(resume(&mut world, 2), Err(FaultKind::WrongGeneration));
    assert_eq!(resume(&mut world, 1), Ok(()));
}

#[test]
fn it_stays_where_even_writing_over_it_fails() {
    let mut world = World::start(worn_out(), SimRandom::new(5));
    let broken = SimFault::Errno(libc::EIO);
    world.engine.disks.break_for_good(0, broken);
    let fault = discard_unreadable(&mut world, PEER.uid).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Io);
    assert!(fault.message.contains("it stays as it is"), "{fault}");
    assert_eq!(resume(&mut world, 1), Err(FaultKind::Damaged));
    world.engine.disks.repair();
    let job = job("one");
    assert!(world.ask(Call::DropJob { uid: PEER.uid, job }).is_ok());
}
