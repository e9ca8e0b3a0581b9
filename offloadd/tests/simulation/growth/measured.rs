//! Tests that a device is calibrated while no daemon serves. What could go wrong: a cut between its superblock and the catalog leaves a store
//! that does not open, or rates that are not used; bytes of a job or of a session are overwritten; no tiles move, or tiles that need not.

use crate::disks::{SimDisks, SimFault, SimFaultPlan};
use offloadd::blocks::Blocks;
use offloadd::calibrate::{self, CalibrateError};
use offloadd::core::{Call, Event, Moves};
use offloadd::io::AlignedBytes;
use offloadd::store::catalog::Phase;
use offloadd::store::definition::Durability;
use offloadd::store::format::format;
use offloadd::store::recover;
use offloadd::store::superblock::MeasuredRates;
use offloadd::store::superblock::StoreId;
use offloadd::store::verify::verify;
use test_hooks::random::SimRandom;

use super::{expect_all, write_all};
use crate::world::{Process, World, definition, formatted, job};

const TILES: u32 = 40;

fn rates(bytes_per_s: u64) -> MeasuredRates {
    MeasuredRates {
        read_bytes_per_s: bytes_per_s,
        write_bytes_per_s: bytes_per_s,
    }
}

/// Two disks with free space for measurements.
fn disks() -> SimDisks {
    let mut disks = SimDisks::new(&[4 << 20, 4 << 20]);
    let measured = [rates(900), rates(300)];
    format(
        &mut disks,
        StoreId(*b"a store's id 16b"),
        &measured,
        7,
        false,
    )
    .unwrap();
    disks
}

/// Calibrates as the program does: overwrites all free space that it may overwrite.
fn calibrate(disks: &mut SimDisks, path: &str, bytes_per_s: u64) -> Result<(), CalibrateError> {
    let mut store = recover::open(disks)?;
    let (device, area) = calibrate::begin(disks, &mut store, path)?;
    let mut noise = AlignedBytes::zeroed(area.bytes as usize);
    noise.as_mut_slice().fill(0xa5);
    disks.write(store[device].position, area.offset, &noise)?;
    calibrate::finish(disks, &store, device, &rates(bytes_per_s))?;
    Ok(())
}

/// The daemon ends, the device is calibrated, and a daemon starts.
fn recalibrate(world: World, path: &str, bytes_per_s: u64) -> World {
    let (mut disks, random) = world.crash(false);
    calibrate(&mut disks, path, bytes_per_s).unwrap();
    World::start(disks, random)
}

fn kept(world: &World) -> Vec<u64> {
    let states = world.core.device_states().into_iter();
    states.map(|state| state.write_bytes_per_s).collect()
}

/// A store with one job, whose tiles lie as the rates say.
fn job_at_rest(seed: u64) -> World {
    let mut world = World::start(disks(), SimRandom::new(seed));
    let process = world.begin("one", TILES, Durability::Committed);
    write_all(&mut world, process, 1, TILES);
    world.close(process).unwrap();
    world
}

/// Returns the bytes of all extents on each disk.
fn bytes_on(world: &World) -> [u64; 2] {
    let store = recover::read(&mut world.engine.disks.clone()).unwrap();
    let mut bytes = [0; 2];
    for job in &store.jobs {
        let tiles = job.table.definition.tiles().iter();
        for (tile, extents) in tiles.zip(&job.table.extents) {
            for extent in extents {
                bytes[store[extent.device].position] += u64::from(tile.tile_bytes);
            }
        }
    }
    bytes
}

/// Moves all tiles that should move, and asserts that the second disk has this fraction of the bytes.
fn expect_on_second(world: &mut World, part: f64) {
    world.move_all();
    assert_eq!(world.core.moves(), Moves::None);
    let settled = |phase| phase == Some(Phase::Settled);
    let states = world.core.device_states();
    assert!(states.iter().all(|state| settled(state.status.phase)));
    expect_part(bytes_on(world), part);
}

/// Compares with a tolerance: whole tiles of two sizes move.
fn expect_part(bytes: [u64; 2], part: f64) {
    let due = (bytes[0] + bytes[1]) as f64 * part;
    assert!((bytes[1] as f64 - due).abs() <= 24e3, "{bytes:?}: {due}");
}

fn resumed(world: &mut World) -> Process {
    let (process, _) = world.open(&job("one"), 0, 1).unwrap();
    world.resume(process, 1).unwrap();
    expect_all(world, process, 1, TILES);
    process
}

#[test]
fn tiles_of_jobs_go_by_the_new_rates_and_so_do_those_that_come() {
    let mut world = job_at_rest(31);
    expect_on_second(&mut world, 0.25);
    let mut world = recalibrate(world, "sim1", 900);
    assert_eq!(kept(&world), [900, 900]);
    expect_on_second(&mut world, 0.5);
    // A slower device also gives tiles away, although no device was added.
    let mut world = recalibrate(world, "sim1", 100);
    expect_on_second(&mut world, 0.1);
    // The same rates again move nothing.
    let world = recalibrate(world, "sim1", 100);
    assert_eq!(world.core.moves(), Moves::None);
    let mut world = recalibrate(world, "sim0", 300);
    expect_on_second(&mut world, 0.25);

    let (mut disks, random) = world.crash(true);
    assert_eq!(verify(&mut disks).unwrap().damaged_tiles, []);
    let mut world = World::start(disks, random);
    assert_eq!(kept(&world), [300, 100]);
    let process = resumed(&mut world);
    world.close(process).unwrap();
    let mut world = recalibrate(world, "sim1", 300);
    let before = bytes_on(&world);
    world.begin("two", TILES, Durability::Committed);
    let after = bytes_on(&world);
    expect_part([0, 1].map(|disk| after[disk] - before[disk]), 0.5);
}

#[test]
fn a_running_job_moves_by_what_it_writes() {
    let mut world = recalibrate(job_at_rest(32), "sim1", 900);
    let process = resumed(&mut world);
    assert_eq!(world.core.moves(), Moves::Waiting);
    for generation in 2..6 {
        world.event(Event::RebalanceTick { force: false });
        write_all(&mut world, process, generation, TILES);
        expect_all(&mut world, process, generation, TILES);
    }
    expect_on_second(&mut world, 0.5);
    assert_eq!(world.core.copied_bytes(), 0, "it moved by itself");
    expect_all(&mut world, process, 5, TILES);
}

#[test]
fn a_cut_at_any_operation_keeps_the_rates_of_before_or_the_new_ones() {
    let (disks, _) = job_at_rest(33).crash(true);
    let mut seen = [0; 3];
    for at in 0.. {
        let mut cut = disks.clone();
        cut.plan = Some(SimFaultPlan {
            at: cut.operation_count() + at,
            for_good: true,
            fault: SimFault::Gone,
        });
        let ended = calibrate(&mut cut, "sim1", 900).is_ok();
        cut.repair();
        // The program is killed, or the power goes.
        for seed in 0..4 {
            let mut after = cut.clone();
            if seed > 0 {
                after.crash(seed, Vec::new());
            }
            let world = World::start(after, SimRandom::new(seed));
            let new = kept(&world) == [900, 900];
            assert!(new || kept(&world) == [900, 300], "{:?}", kept(&world));
            assert!(new || !ended, "a calibration that ended is kept");
            let moves = world.core.moves() != Moves::None;
            assert!(moves || !ended);
            seen[usize::from(new) + usize::from(moves)] += 1;
            // Whatever failed, calibrating again completes it.
            let mut world = recalibrate(world, "sim1", 900);
            expect_on_second(&mut world, 0.5);
            resumed(&mut world);
        }
        if ended {
            break;
        }
    }
    assert!(seen.iter().all(|count| *count > 0), "{seen:?}");
}

#[test]
fn a_failed_operation_is_told_and_can_be_repeated() {
    let (disks, random) = job_at_rest(34).crash(true);
    let mut failed = 0;
    for at in 0.. {
        let mut failing = disks.clone();
        failing.plan = Some(SimFaultPlan {
            at: failing.operation_count() + at,
            for_good: false,
            fault: SimFault::Errno(libc::EIO),
        });
        let ended = calibrate(&mut failing, "sim1", 900);
        let beyond = failing
            .plan
            .is_some_and(|plan| plan.at >= failing.operation_count());
        failed += usize::from(ended.is_err());
        failing.repair();
        calibrate(&mut failing, "sim1", 900).unwrap();
        let mut world = World::start(failing, random.clone());
        expect_on_second(&mut world, 0.5);
        resumed(&mut world);
        if beyond {
            assert!(ended.is_ok(), "{ended:?}");
            break;
        }
    }
    // A flush and a write of two copies each: the catalog, the superblock, the catalog again. A copy that is not read is repaired.
    assert!(failed >= 12, "{failed}");
}

#[test]
fn sessions_handed_over_before_are_not_adopted_after_their_tiles_were_written_over() {
    let mut world = World::start(disks(), SimRandom::new(35));
    let process = world.begin("one", TILES, Durability::Committed);
    write_all(&mut world, process, 1, TILES);
    let token = process.token;
    let tile_bytes = vec![4096; 100];
    (world.ask(Call::ReserveScratch { token, tile_bytes })).unwrap();
    world.event(Event::HandOver);
    world.run();
    let state = world.core.hand_over();
    let (disks, random) = world.crash(false);
    let (_, adopted) = World::start_after(disks.clone(), random.clone(), &state);
    assert_eq!(adopted.unwrap().len(), 1, "without a calibration they are");
    // The program is killed before it has measured anything.
    let mut begun = disks;
    let mut store = recover::open(&mut begun).unwrap();
    calibrate::begin(&mut begun, &mut store, "sim1").unwrap();
    let (_, adopted) = World::start_after(begun, random, &state);
    let why = adopted.unwrap_err();
    assert!(why.contains("another daemon has served"), "{why}");
}

#[test]
fn what_cannot_be_calibrated_is_refused_and_nothing_changes() {
    let (mut disks, random) = job_at_rest(36).crash(true);
    let before = disks.bytes(0).to_vec();
    let unknown = calibrate(&mut disks, "nobody", 900).unwrap_err();
    assert!(
        unknown.to_string().contains("it has sim0, sim1"),
        "{unknown}"
    );
    assert!(disks.bytes(0) == before);

    let mut world = World::start(disks, random);
    let process = resumed(&mut world);
    let tile_bytes = vec![4096; 10];
    let token = process.token;
    (world.ask(Call::ReserveScratch { token, tile_bytes })).unwrap();
    let call = world.drain_call("sim1");
    assert!(world.answer(call).is_ok());
    let (mut disks, _) = world.crash(true);
    let leaving = calibrate(&mut disks, "sim1", 900).unwrap_err();
    assert!(
        leaving.to_string().contains("sim1 is being drained"),
        "{leaving}"
    );

    // The free space is in too small pieces.
    let mut world = World::start(formatted(), SimRandom::new(37));
    let (process, _) = world.open(&job("one"), 0, 1).unwrap();
    (world.define(process, definition(TILES, Durability::Committed, 1))).unwrap();
    let (mut disks, _) = world.crash(true);
    let full = calibrate(&mut disks, "sim1", 900).unwrap_err();
    assert!(
        full.to_string()
            .contains("at least 1048576 bytes in one piece"),
        "{full}"
    );
}
