//! Flips every bit of a store, one after the other: the damage is named, or nothing that a store is read for depends on the bit.
//!
//! Blocks that are never read have no meaning; the test watches which blocks are read while a store is verified, and flips every bit of these once. A
//! larger store, whose structures take several blocks, has random bytes of each changed.
//!
//! A push flips some bits of every byte; `OFFLOADD_ALL_CASES=1 cargo test -p offloadd --test simulation damage` flips every bit.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::disks::SimDisks;
use offload_api::fault::FaultKind;
use offload_api::ids::{DeviceNumber, Generation, TileIndex};
use offloadd::blocks::{BlockError, Blocks};
use offloadd::core::{Call, TileDamage};
use offloadd::io::AlignedBytes;
use offloadd::store::definition::Durability;
use offloadd::store::dual_copy::Consequence;
use offloadd::store::format::format;
use offloadd::store::manifest::voiding;
use offloadd::store::recover;
use offloadd::store::superblock::MeasuredRates;
use offloadd::store::superblock::StoreId;
use offloadd::store::verify::{Report, verify};
use offloadd::store::{CATALOG_BYTES_MAX, CATALOG_OFFSETS, DATA_OFFSET, StoreError};
use test_hooks::random::SimRandom;

use super::world::{Process, World, definition, formatted, job};

const BLOCK: u64 = 4096;

/// Records which blocks are read.
struct WatchedDisks<'a> {
    disks: &'a mut SimDisks,
    read: BTreeSet<(usize, u64)>,
}

impl Blocks for WatchedDisks<'_> {
    fn count(&self) -> usize {
        self.disks.count()
    }

    fn path(&self, position: usize) -> &str {
        self.disks.path(position)
    }

    fn size_bytes(&self, position: usize) -> u64 {
        self.disks.size_bytes(position)
    }

    fn read(
        &mut self,
        position: usize,
        offset: u64,
        into: &mut AlignedBytes,
    ) -> Result<(), BlockError> {
        let blocks = (offset..offset + into.len() as u64).step_by(BLOCK as usize);
        self.read.extend(blocks.map(|at| (position, at)));
        self.disks.read(position, offset, into)
    }

    fn write(&mut self, _: usize, _: u64, _: &AlignedBytes) -> Result<(), BlockError> {
        panic!("verify changes nothing");
    }

    fn flush(&mut self, _: usize) -> Result<(), BlockError> {
        panic!("verify changes nothing");
    }
}

fn read_blocks(disks: &mut SimDisks) -> Vec<(usize, u64)> {
    let mut watched = WatchedDisks {
        disks,
        read: BTreeSet::new(),
    };
    assert!(verify(&mut watched).unwrap().is_sound());
    watched.read.into_iter().collect()
}

/// Adds a job of two nodes with `generations` generations, the newest confirmed.
fn add_job(world: &mut World, name: &str, tiles: u32, generations: u64) -> Process {
    let (process, _) = world.open(&job(name), 0, 1).unwrap();
    let tiles_of = definition(tiles, Durability::Committed, 2);
    world.define(process, tiles_of).unwrap();
    world.resume(process, 0).unwrap();
    for generation in 1..=generations {
        for tile in 0..tiles {
            let seed = generation * 1000 + u64::from(tile);
            world.write(process, generation, tile, seed).unwrap();
        }
        world.commit(process, generation).unwrap();
        let confirm = Call::Confirm {
            token: process.token,
            generation: Generation(generation),
        };
        world.ask(confirm).unwrap();
    }
    process
}

/// Asserts that the change at `offset` of `device` was noticed, and that everything not reported as damaged is unchanged.
fn assert_named(
    found: Result<Report, StoreError>,
    whole: &Report,
    (path, device_offset): (&str, u64),
    bit: u64,
) {
    let at = format!("bit {bit} of the block at {device_offset} of {path}");
    let report = match found {
        Ok(report) => report,
        Err(error) => {
            let message = error.to_string();
            assert!(message.contains(path), "{at}: {message}");
            return;
        }
    };
    // Place of the catalog if this device were the metadata device.
    let nothing = path == "sim1" && CATALOG_OFFSETS.contains(&device_offset);
    if nothing {
        assert!(report.is_sound(), "{at}");
        return;
    }
    let named = report
        .notes
        .iter()
        .any(|note| note.path == path && note.offset == device_offset)
        || (report.damaged_tiles.iter()).any(|tile| {
            let range = tile.offset..tile.offset + u64::from(tile.spec.tile_bytes);
            tile.path == path && range.contains(&device_offset)
        });
    assert!(named, "{at}: {report:?}");
    assert_eq!(report.job_count, whole.job_count, "{at}");
    assert_eq!(report.tile_count, whole.tile_count, "{at}");
}

/// Distance of the bits that a push flips: less than a byte, and no part of one, so that each bit of a byte has its turn.
const STEP_OF_A_PUSH: usize = 7;

#[test]
fn every_single_bit_of_a_small_store_is_named_or_means_nothing() {
    let mut world = World::start(formatted(), SimRandom::new(9));
    add_job(&mut world, "small", 2, 2);
    world.run();
    let mut disks = world.crash(false).0;
    let blocks = read_blocks(&mut disks);
    let whole = verify(&mut disks).unwrap();
    // Superblocks of two devices, catalog, definition, records and marks of both slots: twice each; two tiles.
    assert!(blocks.len() >= 4 + 2 + 2 + 4 + 4 + 2, "{blocks:?}");
    let all_cases = std::env::var_os("OFFLOADD_ALL_CASES").is_some();
    let step = if all_cases { 1 } else { STEP_OF_A_PUSH };
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut disks = disks.clone();
                while let Some(&(device, offset)) = blocks.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    let path = disks.path(device).to_owned();
                    for bit in (0..8 * BLOCK).step_by(step) {
                        disks.flip(device, offset + bit / 8, (bit % 8) as u32);
                        assert_named(verify(&mut disks), &whole, (&path, offset), bit);
                        disks.flip(device, offset + bit / 8, (bit % 8) as u32);
                    }
                }
            });
        }
    });
    assert!(verify(&mut disks).unwrap().is_sound());
}

/// Programs before 2026-11-29 kept counters between the catalogs and the data.
#[test]
fn bytes_between_catalogs_and_data_mean_nothing() {
    let mut world = World::start(formatted(), SimRandom::new(9));
    add_job(&mut world, "small", 2, 2);
    world.run();
    let mut disks = world.crash(false).0;
    let whole = verify(&mut disks).unwrap();
    let end = CATALOG_OFFSETS[1] + CATALOG_BYTES_MAX;
    let counters = AlignedBytes::from_slice(&vec![0xa5; (DATA_OFFSET - end) as usize]);
    for device in 0..2 {
        disks.write(device, end, &counters).unwrap();
    }
    let report = verify(&mut disks).unwrap();
    assert!(report.is_sound());
    assert_eq!(report.tile_count, whole.tile_count);
    recover::open(&mut disks).expect("it opens");
}

#[test]
fn changed_bytes_of_each_structure_of_a_large_store_are_named() {
    let mut disks = SimDisks::new(&[32 << 20, 16 << 20]);
    let rates = [MeasuredRates::default(); 2];
    format(&mut disks, StoreId([9; 16]), &rates, 7, false).unwrap();
    let mut world = World::start(disks, SimRandom::new(9));
    // Definition and record of several blocks, and enough jobs for a catalog of several blocks.
    let large = add_job(&mut world, "large", 600, 2);
    world.close(large).unwrap();
    for index in 0..30 {
        let process = add_job(&mut world, &format!("small-{index}"), 1, 1);
        world.close(process).unwrap();
    }
    world.run();
    let (mut disks, mut random) = world.crash(false);
    let blocks = read_blocks(&mut disks);
    let whole = verify(&mut disks).unwrap();
    let random = &mut random;
    let (mut named_by_tile, mut named_by_note) = (0, 0);
    for _ in 0..400 {
        let (device, offset) = blocks[random.below(blocks.len())];
        let path = disks.path(device).to_owned();
        let bit = random.below(8 * BLOCK as usize) as u64;
        disks.flip(device, offset + bit / 8, (bit % 8) as u32);
        let report = verify(&mut disks).expect("the other copy is used");
        // A structure of several blocks is named by its start.
        let tiles: Vec<_> = report.damaged_tiles.iter().map(|t| &t.path).collect();
        let notes: Vec<_> = report.notes.iter().map(|note| &note.path).collect();
        // Place of the catalog if this device were the metadata device.
        let nothing = path == "sim1" && CATALOG_OFFSETS.contains(&offset);
        let count = usize::from(!nothing);
        assert_eq!(
            tiles.len() + notes.len(),
            count,
            "{path} at {offset}: {report:?}"
        );
        assert!(tiles.iter().chain(&notes).all(|named| **named == path));
        assert_eq!(report.tile_count, whole.tile_count);
        named_by_tile += tiles.len();
        named_by_note += notes.len();
        disks.flip(device, offset + bit / 8, (bit % 8) as u32);
    }
    assert!(
        named_by_tile > 10 && named_by_note > 10,
        "{named_by_tile} {named_by_note}"
    );
}

/// Makes two jobs with two committed generations.
fn two_jobs() -> SimDisks {
    let mut world = World::start(formatted(), SimRandom::new(9));
    for name in ["one", "two"] {
        let process = world.begin(name, 3, Durability::Committed);
        for generation in 1..=2 {
            for tile in 0..3 {
                let seed = generation * 100 + u64::from(tile);
                world.write(process, generation, tile, seed).unwrap();
            }
            world.commit(process, generation).unwrap();
        }
        // Overwrites extents of the first generation.
        world.write(process, 3, 0, 300).unwrap();
    }
    world.crash(false).0
}

#[test]
fn an_acknowledged_record_that_became_zeros_or_anothers_is_named_and_its_job_waits() {
    let whole = two_jobs();
    let store = recover::read(&mut whole.clone()).unwrap();
    let metadata = store[store.metadata_device].position;
    let [one, two] = ["one", "two"].map(|name| {
        let found = |job: &&recover::RecoveredJob| job.entry.name.as_str() == name;
        store.jobs.iter().find(found).unwrap().entry.area
    });
    for others in [false, true] {
        let mut disks = whole.clone();
        let mut block = AlignedBytes::zeroed(BLOCK as usize);
        if others {
            disks.read(metadata, two.records(0)[0], &mut block).unwrap();
        }
        // Generation 2 is in slot 0.
        for offset in one.records(0) {
            disks.write(metadata, offset, &block).unwrap();
        }
        let report = verify(&mut disks).unwrap();
        assert!(!report.is_sound());
        assert_eq!(report.damaged_tiles, [], "no tile was touched");
        let [note, other_copy] = &report.notes[..] else {
            panic!("{:?}", report.notes);
        };
        assert_eq!(note.consequence, Consequence::Undecided);
        assert_eq!([note.offset, other_copy.offset], one.records(0));
        let why = ["it was overwritten with zeros", "it is another job's"][usize::from(others)];
        assert_eq!((note.why.as_str(), other_copy.why.as_str()), (why, why));
        assert_eq!(report.undecided_jobs.len(), 1);
        assert_eq!(report.undecided_jobs[0].differing_count, 1);
        // The job is not resumed from the generation before by accident, and the other job is intact.
        let mut world = World::start(disks, SimRandom::new(1));
        let (process, _) = world.open(&job("one"), 0, 1).unwrap();
        for generation in [0, 1, 2] {
            let fault = world.resume(process, generation).unwrap_err();
            assert_eq!(fault.kind, FaultKind::Damaged);
            assert!(fault.message.contains(why), "{fault}");
        }
        let process = world.reopen("two", 2);
        world.expect_tile(process, 0, 200);
    }
}

#[test]
fn one_copy_of_a_record_that_became_zeros_is_repaired_from_the_other() {
    let mut disks = two_jobs();
    let store = recover::read(&mut disks).unwrap();
    let metadata = store[store.metadata_device].position;
    for copy in [0, 1] {
        let offset = store.jobs[0].entry.area.records(0)[copy];
        let zeros = AlignedBytes::zeroed(BLOCK as usize);
        disks.write(metadata, offset, &zeros).unwrap();
        assert!(!verify(&mut disks).unwrap().is_sound());
        let opened = recover::open(&mut disks).unwrap();
        assert_eq!(opened.jobs[0].slots, store.jobs[0].slots);
        assert!(verify(&mut disks).unwrap().is_sound());
    }
}

/// The void with the higher sequence is valid. One that was written to the wrong slot must not hide an acknowledged record.
#[test]
fn a_void_of_the_other_slot_does_not_take_a_record_away() {
    let mut disks = two_jobs();
    let store = recover::read(&mut disks).unwrap();
    let metadata = store[store.metadata_device].position;
    let entry = &store.jobs[0].entry;
    // Generation 2 is in slot 0, generation 1 in slot 1.
    for (slot, other) in [(0, 1), (1, 0)] {
        for offset in entry.area.records(slot) {
            let (_, void) = voiding(&entry.area, entry.job_id, other, 1 << 40)
                .next()
                .unwrap();
            disks.write(metadata, offset, &void).unwrap();
            let report = verify(&mut disks).unwrap();
            assert_eq!(report.notes.len(), 1, "{:?}", report.notes);
            assert_eq!(report.notes[0].why, "it belongs to the other slot");
            let opened = recover::open(&mut disks).unwrap();
            assert_eq!(opened.jobs[0].slots, store.jobs[0].slots);
            assert!(verify(&mut disks).unwrap().is_sound());
        }
    }
}

#[test]
fn no_misdirected_write_of_a_tile_hits_both_copies_of_a_jobs_structures() {
    let store = recover::read(&mut two_jobs()).unwrap();
    for job in &store.jobs {
        let area = job.entry.area;
        let tiles = job.table.definition.tiles().iter();
        let largest = tiles.map(|tile| u64::from(tile.tile_bytes)).max().unwrap();
        let [first, second] = area.definitions();
        let first_end = area.marks(1)[0] + BLOCK;
        assert!(first < first_end && first_end + largest <= second);
        for [one, other] in [0, 1].map(|slot| area.records(slot)) {
            assert!((first..first_end).contains(&one) && other >= second);
        }
        assert_eq!(area.offset + area.bytes(), area.marks(1)[1] + BLOCK);
    }
}

#[test]
fn a_damaged_version_counts_once_until_its_extent_is_written_again() {
    let mut world = World::start(formatted(), SimRandom::new(9));
    let process = world.begin("one", 1, Durability::Committed);
    world.write(process, 1, 0, 7).unwrap();
    world.commit(process, 1).unwrap();
    let of_first = report_of(&mut world, process);
    let ask = |world: &mut World, process: Process, damage: TileDamage<DeviceNumber>| {
        let token = process.token;
        let answer = world.ask(Call::ReportDamage { token, damage });
        answer.map(drop).map_err(|fault| fault.kind)
    };
    ask(&mut world, process, of_first).unwrap();
    assert_eq!(ask(&mut world, process, of_first), Err(FaultKind::Invalid));
    // The job's next session is not told again either.
    world.close(process).unwrap();
    world.run();
    let process = world.reopen("one", 1);
    assert_eq!(report_of(&mut world, process), of_first);
    assert_eq!(ask(&mut world, process, of_first), Err(FaultKind::Invalid));

    world.write(process, 2, 0, 8).unwrap();
    let of_second = report_of(&mut world, process);
    let old = ask(&mut world, process, of_first);
    assert_eq!(old, Err(FaultKind::Invalid), "it is the newest no longer");
    ask(&mut world, process, of_second).unwrap();
    // The same bytes at the same place once more may be damaged too.
    world.write(process, 2, 0, 8).unwrap();
    assert_eq!(report_of(&mut world, process), of_second);
    ask(&mut world, process, of_second).unwrap();
    assert_eq!(ask(&mut world, process, of_second), Err(FaultKind::Invalid));
}

/// Returns the report of a process that read tile 0 and found other bytes.
fn report_of(world: &mut World, process: Process) -> TileDamage<DeviceNumber> {
    world.submit_read(process, 0, 0);
    world.run();
    let entry = world.completion(process).unwrap();
    TileDamage {
        device: DeviceNumber(entry.device),
        offset: entry.offset,
        tile: TileIndex(0),
        generation: Generation(entry.generation),
        expected: entry.checksum,
        found: !entry.checksum,
    }
}
