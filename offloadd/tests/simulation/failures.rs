//! Fails every operation of a whole scenario (format, start, definition, writes, commits, confirmations, resume, reads) once, and then permanently:
//! EIO, ENOSPC, ETIMEDOUT, a short transfer, a full or removed drive; and loses or misdirects a write that the device reports as done. Each time a
//! call ends with a typed error or success, and after a power cut nothing acknowledged is missing; checksums find silent faults of tiles.

use crate::disks::{SimDisks, SimFault, SimFaultPlan};
use offload_api::fault::FaultKind;
use offload_api::ids::Generation;
use offloadd::core::Call;
use offloadd::store::StoreError;
use offloadd::store::definition::Durability;
use offloadd::store::format::format;
use offloadd::store::superblock::MeasuredRates;
use offloadd::store::superblock::StoreId;
use offloadd::store::verify::verify;
use test_hooks::random::SimRandom;

use super::world::{Process, World, content, definition, formatted, job};

const TILES: u32 = 3;

/// The acknowledged state.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct AcknowledgedState {
    defined: bool,
    generation: u64,
}

fn seed(generation: u64, tile: u32) -> u64 {
    generation * 10 + u64::from(tile)
}

/// Starts, defines, commits three generations over two "nodes", and closes. Ends at the first refusal.
fn story(disks: SimDisks, acknowledged: &mut AcknowledgedState) -> (SimDisks, SimRandom) {
    let mut world = match World::try_start(disks, SimRandom::new(3)) {
        Ok(world) => world,
        Err(failed) => {
            let (error, disks) = *failed;
            assert!(!error.to_string().is_empty());
            return (disks, SimRandom::new(3));
        }
    };
    let (process, _) = world.open(&job("a"), 0, 1).unwrap();
    let told = outcome_of(&mut world, process, acknowledged);
    if let Err(kind) = told {
        let typed = [
            FaultKind::Io,
            FaultKind::NoSpace,
            FaultKind::Short,
            FaultKind::Poisoned,
        ];
        assert!(typed.contains(&kind), "{kind:?} for a failed device");
    }
    world.crash(true)
}

fn outcome_of(
    world: &mut World,
    process: Process,
    acknowledged: &mut AcknowledgedState,
) -> Result<(), FaultKind> {
    world
        .define(process, definition(TILES, Durability::Committed, 2))
        .map_err(|fault| fault.kind)?;
    acknowledged.defined = true;
    world.resume(process, 0).map_err(|fault| fault.kind)?;
    for generation in 1..=3 {
        for tile in 0..TILES {
            world.write(process, generation, tile, seed(generation, tile))?;
        }
        world
            .commit(process, generation)
            .map_err(|fault| fault.kind)?;
        acknowledged.generation = generation;
        let confirm = Call::Confirm {
            token: process.token,
            generation: Generation(generation),
        };
        world.ask(confirm).map_err(|fault| fault.kind)?;
    }
    Ok(())
}

/// Restarts on working devices and compares with the acknowledged state.
fn check(disks: SimDisks, random: SimRandom, acknowledged: AcknowledgedState, silent: bool) {
    let mut disks = disks;
    disks.plan = None;
    let damaged = verify(&mut disks).unwrap().damaged_tiles;
    assert!(silent || damaged.is_empty(), "{damaged:?}");
    let mut world = World::start(disks, random);
    let (process, record) = world.open(&job("a"), 0, 1).unwrap();
    assert!(record.is_some() || !acknowledged.defined);
    let Some(record) = record else { return };
    let newest = record.generations.last().map_or(0, |g| g.generation.0);
    assert!(newest >= acknowledged.generation, "{record:?}");
    world.resume(process, newest).unwrap();
    for tile in 0..TILES {
        match world.read(process, tile) {
            Err(FaultKind::NeverWritten) => assert_eq!(newest, 0),
            Err(FaultKind::Damaged) => {
                let named = damaged.iter().any(|d| {
                    d.tile.0 == tile && d.generation.0 == newest && d.path.starts_with("sim")
                });
                assert!(named, "tile {tile} is damaged and verify did not say so");
            }
            Err(kind) => panic!("{kind:?}"),
            Ok(bytes) => assert!(bytes == content(seed(newest, tile), bytes.len())),
        }
    }
}

fn every_operation(faults: &[SimFault], silent: bool) {
    let mut whole = AcknowledgedState::default();
    let (disks, _) = story(formatted(), &mut whole);
    assert_eq!(whole.generation, 3);
    let first = formatted().operation_count();
    let operations = disks.operation_count();
    assert!(operations - first > 40, "the story is shorter than it was");
    for &fault in faults {
        for at in first..operations {
            for for_good in [false, true] {
                if for_good && silent {
                    continue;
                }
                let mut disks = formatted();
                disks.plan = Some(SimFaultPlan {
                    at,
                    for_good,
                    fault,
                });
                let mut acknowledged = AcknowledgedState::default();
                let (disks, random) = story(disks, &mut acknowledged);
                check(disks, random, acknowledged, silent);
            }
        }
    }
}

/// Errors that a device may report.
const TOLD: [SimFault; 6] = [
    SimFault::Errno(libc::EIO),
    SimFault::Errno(libc::ENOSPC),
    SimFault::Errno(libc::ETIMEDOUT),
    SimFault::Short,
    SimFault::Full,
    SimFault::Gone,
];

fn format_blank(disks: &mut SimDisks) -> Result<(), StoreError> {
    let rates = [MeasuredRates::default(); 2];
    format(disks, StoreId([7; 16]), &rates, 7, false).map(|_| ())
}

#[test]
fn a_store_whose_making_failed_anywhere_is_none_or_whole_and_can_be_made_again() {
    let blank = SimDisks::new(&[5 << 19, 2 << 20]);
    let mut whole = blank.clone();
    format_blank(&mut whole).unwrap();
    assert!(whole.operation_count() > 8);
    for fault in TOLD {
        for at in 0..whole.operation_count() {
            for for_good in [false, true] {
                let mut disks = blank.clone();
                disks.plan = Some(SimFaultPlan {
                    at,
                    for_good,
                    fault,
                });
                let made = format_blank(&mut disks);
                let met = !disks.happened.is_empty();
                assert_eq!(made.is_err(), met, "{fault:?} at {at}: {made:?}");
                disks.crash(at, Vec::new());
                disks.repair();
                if let Err(error) = made {
                    assert!(error.to_string().contains("sim"), "{error}");
                    // An interrupted format does not prevent one with --force.
                    let rates = [MeasuredRates::default(); 2];
                    format(&mut disks, StoreId([8; 16]), &rates, 7, true).unwrap();
                }
                assert!(verify(&mut disks).unwrap().is_sound());
            }
        }
    }
}

/// Starts, resumes from generation 3 and reads all of it.
fn resume_newest(disks: SimDisks) -> (SimDisks, Result<(), FaultKind>) {
    let mut world = match World::try_start(disks, SimRandom::new(4)) {
        Ok(world) => world,
        Err(failed) => return (failed.1, Err(FaultKind::Io)),
    };
    let (process, record) = world.open(&job("a"), 0, 1).unwrap();
    let newest = record.unwrap().generations.last().unwrap().generation;
    assert_eq!(newest, Generation(3), "what was read is what was committed");
    let mut read = || {
        world.resume(process, 3).map_err(|fault| fault.kind)?;
        for tile in 0..TILES {
            let bytes = world.read(process, tile)?;
            assert!(bytes == content(seed(3, tile), bytes.len()));
        }
        Ok(())
    };
    let read = read();
    (world.crash(true).0, read)
}

#[test]
fn a_start_a_resume_and_reads_that_fail_anywhere_lose_nothing() {
    let mut whole = AcknowledgedState::default();
    let (disks, _) = story(formatted(), &mut whole);
    let first = disks.operation_count();
    let (after, read) = resume_newest(disks.clone());
    assert_eq!(read, Ok(()));
    let mut refused = 0;
    for fault in TOLD {
        for at in first..after.operation_count() {
            for for_good in [false, true] {
                let mut disks = disks.clone();
                disks.plan = Some(SimFaultPlan {
                    at,
                    for_good,
                    fault,
                });
                let (mut disks, read) = resume_newest(disks);
                let told = [
                    FaultKind::Io,
                    FaultKind::NoSpace,
                    FaultKind::Short,
                    FaultKind::Poisoned,
                ];
                assert!(
                    read.is_ok() || told.contains(&read.unwrap_err()),
                    "{read:?}"
                );
                refused += usize::from(read.is_err());
                disks.repair();
                assert_eq!(resume_newest(disks).1, Ok(()), "{fault:?} at {at}");
            }
        }
    }
    assert!(refused > 50, "{refused} of them were told");
}

#[test]
fn a_failing_operation_is_told_and_loses_nothing_acknowledged() {
    every_operation(&TOLD, false);
}

#[test]
fn a_lost_or_misdirected_write_is_named_or_harmless() {
    every_operation(&[SimFault::Lost, SimFault::Misdirected(8192)], true);
}
