//! Tests the bytes on the devices: they never change by accident, damage to any of them is named or harmless, and devices that are not a whole store
//! are refused by name and not changed.

use crate::disks::SimDisks;
use offload_api::checksum::checksum;
use offload_api::ids::Generation;
use offloadd::blocks::{BlockError, BlockErrorCause, Blocks};
use offloadd::core::Call;
use offloadd::io::{AlignedBytes, IoOp};
use offloadd::store::definition::Durability;
use offloadd::store::format::format;
use offloadd::store::superblock::MeasuredRates;
use offloadd::store::superblock::StoreId;
use offloadd::store::verify::{Damage, verify, verify_watched};
use offloadd::store::{SUPERBLOCK_OFFSETS, StoreError, recover};
use test_hooks::random::SimRandom;

use super::world::{Process, World, content, definition, formatted, job};

const GOLDEN: &str = include_str!("golden.txt");
const TILE_SEED: u64 = 5;

/// Makes one job of one tile and two nodes, with one confirmed generation. Everything is fixed.
fn tiny() -> SimDisks {
    let mut world = World::start(formatted(), SimRandom::new(9));
    let (process, _) = world.open(&job("golden"), 0, 1).unwrap();
    world
        .define(process, definition(1, Durability::Committed, 2))
        .unwrap();
    world.resume(process, 0).unwrap();
    commit(&mut world, process, 1);
    world.run();
    world.crash(false).0
}

fn commit(world: &mut World, process: Process, generation: u64) {
    world.write(process, generation, 0, TILE_SEED).unwrap();
    world.commit(process, generation).unwrap();
    let confirm = Call::Confirm {
        token: process.token,
        generation: Generation(generation),
    };
    world.ask(confirm).unwrap();
}

/// Returns blocks that are not zero and not the tile: `(device, offset)`.
fn own_blocks(disks: &SimDisks) -> Vec<(usize, usize)> {
    let tile = content(TILE_SEED, 4096);
    let mut found = Vec::new();
    for device in 0..disks.count() {
        for (index, block) in disks.bytes(device).chunks(4096).enumerate() {
            if *block != tile[..] && block.iter().any(|&byte| byte != 0) {
                found.push((device, index * 4096));
            }
        }
    }
    found
}

/// Returns a line for each 32 bytes that are not zero: device, offset, bytes.
fn dump(disks: &SimDisks) -> String {
    let mut lines = String::new();
    for (device, offset) in own_blocks(disks) {
        let block = &disks.bytes(device)[offset..offset + 4096];
        for (index, bytes) in block.chunks(32).enumerate() {
            if bytes.iter().any(|&byte| byte != 0) {
                let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                lines += &format!("{device} {:08x} {hex}\n", offset + index * 32);
            }
        }
    }
    lines
}

#[test]
fn the_bytes_of_a_store_never_change() {
    let found = dump(&tiny());
    if found != GOLDEN {
        let path = std::env::temp_dir().join("offloadd-golden.txt");
        std::fs::write(&path, found).unwrap();
        panic!(
            "the stored bytes have changed: an old store would not be read. If that is meant, raise FORMAT_VERSION and take {}",
            path.display()
        );
    }
}

#[test]
fn the_golden_store_still_opens() {
    opens(&mut of_lines(GOLDEN));
}

fn of_lines(lines: &str) -> SimDisks {
    let mut disks = SimDisks::new(&[5 << 19, 2 << 20]);
    let mut blocks = std::collections::BTreeMap::new();
    for line in lines.lines() {
        let mut words = line.split(' ');
        let device: usize = words.next().unwrap().parse().unwrap();
        let offset = usize::from_str_radix(words.next().unwrap(), 16).unwrap();
        let hex = words.next().unwrap();
        let block: &mut Vec<u8> = blocks
            .entry((device, offset / 4096 * 4096))
            .or_insert_with(|| vec![0; 4096]);
        for (index, byte) in block[offset % 4096..][..32].iter_mut().enumerate() {
            *byte = u8::from_str_radix(&hex[2 * index..2 * index + 2], 16).unwrap();
        }
    }
    for ((device, offset), block) in blocks {
        let block = AlignedBytes::from_slice(&block);
        disks.write(device, offset as u64, &block).unwrap();
    }
    disks
}

fn opens(disks: &mut SimDisks) {
    let store = recover::read(disks).unwrap();
    assert_eq!((store.notes.len(), store.jobs.len()), (0, 1));
    let marked = store.jobs[0].slots[1].sound().unwrap();
    assert!(marked.confirmed());
    assert_eq!(marked.record.generation, Generation(1));
    assert_eq!(
        marked.record.versions[0].unwrap().checksum,
        checksum(&content(TILE_SEED, 4096))
    );
}

#[test]
fn a_flipped_bit_in_our_own_structures_is_named_and_harmless() {
    let mut disks = tiny();
    let whole = recover::read(&mut disks).unwrap();
    let blocks = own_blocks(&disks);
    // Superblocks of two devices, catalog, definition, void, record, mark: twice each.
    assert_eq!(blocks.len(), 14);
    for (device, offset) in blocks {
        for byte in 0..4096 {
            // Every bit of the fields, and one bit per byte of the rest.
            let bits = if byte < 256 {
                0..8
            } else {
                byte % 8..byte % 8 + 1
            };
            for bit in bits {
                let at = (offset + byte) as u64;
                disks.flip(device, at, bit as u32);
                let store = recover::read(&mut disks).unwrap();
                let named = (store.notes.iter())
                    .any(|n| n.path == disks.path(device) && n.offset == offset as u64);
                assert!(named, "bit {bit} of byte {byte} of the block at {offset}");
                assert_eq!(store.catalog, whole.catalog);
                assert_eq!(store.jobs[0].slots, whole.jobs[0].slots);
                assert_eq!(store.jobs[0].table, whole.jobs[0].table);
                disks.flip(device, at, bit as u32);
            }
        }
    }
}

#[test]
fn who_watches_sees_every_byte_and_every_job_go_by() {
    let mut world = World::start(formatted(), SimRandom::new(9));
    for name in ["first", "second"] {
        let (process, _) = world.open(&job(name), 0, 1).unwrap();
        let tiles = definition(3, Durability::Committed, 2);
        world.define(process, tiles).unwrap();
        world.resume(process, 0).unwrap();
        commit(&mut world, process, 1);
        world.run();
    }
    let (mut disks, ..) = world.crash(false);
    let mut seen = Vec::new();
    let report = verify_watched(&mut disks, &mut |done, total| seen.push((done, total))).unwrap();
    // Each generation wrote one of three tiles.
    assert_eq!(report.tile_bytes, 2 * 4096);
    assert_eq!(seen, [(4096, 8192), (8192, 8192)]);
    let mut seen = Vec::new();
    recover::open_watched(&mut disks, &mut |done, total| seen.push((done, total))).unwrap();
    assert_eq!(seen, [(1, 2), (2, 2)]);
}

#[test]
fn opening_mends_a_damaged_copy() {
    let mut disks = tiny();
    for (device, offset) in own_blocks(&tiny()) {
        disks.flip(device, offset as u64 + 40, 3);
        assert_eq!(recover::open(&mut disks).unwrap().notes.len(), 1);
        assert!(recover::open(&mut disks).unwrap().notes.is_empty());
    }
    assert!(verify(&mut disks).unwrap().is_sound());
    assert_eq!(dump(&disks), dump(&tiny()));
}

#[test]
fn a_structure_with_both_copies_damaged_is_refused_by_name_or_its_generation_is() {
    let blocks = own_blocks(&tiny());
    let mut messages = Vec::new();
    for pair in [[0, 1], [2, 3], [4, 8], [5, 9], [6, 10], [7, 11], [12, 13]] {
        let mut disks = tiny();
        // In this order: superblocks of device 0, catalogs, both copies of the job's area, superblocks of device 1.
        for (device, offset) in pair.map(|index| blocks[index]) {
            disks.flip(device, offset as u64 + 50, 0);
        }
        messages.push(match recover::read(&mut disks) {
            Err(error) => error.to_string(),
            Ok(store) => {
                let notes: Vec<String> = store.notes.iter().map(ToString::to_string).collect();
                notes.join("\n")
            }
        });
    }
    let expected = [
        "superblock of sim0: both copies are damaged",
        "catalog of sim0: both copies are damaged",
        "definition of job golden of uid 1000 of sim0: both copies are damaged",
        "record of job golden of uid 1000, slot 0 at",
        "record of job golden of uid 1000, slot 1 at",
        "mark of generation 1 of job golden of uid 1000 at",
        "superblock of sim1: both copies are damaged",
    ];
    for (message, expected) in messages.iter().zip(expected) {
        assert!(message.starts_with(expected), "{message}");
    }
}

#[test]
fn a_structure_that_a_misdirected_write_covers_whole_is_named_too() {
    let blocks = own_blocks(&tiny());
    let tile = AlignedBytes::from_slice(&content(TILE_SEED, 4096));
    // The void of slot 0, the record of slot 1, then its mark.
    for (pair, named) in [
        ([5, 9], "record of job golden of uid 1000, slot 0"),
        ([6, 10], "record of job golden of uid 1000, slot 1"),
        ([7, 11], "mark of generation 1"),
    ] {
        let mut disks = tiny();
        for (device, offset) in pair.map(|index| blocks[index]) {
            disks.write(device, offset as u64, &tile).unwrap();
        }
        let store = recover::read(&mut disks).unwrap();
        let notes: Vec<_> = store.notes.iter().map(ToString::to_string).collect();
        assert_eq!(notes.len(), 2, "{notes:?}");
        for note in notes {
            assert!(
                note.contains(named) && note.contains("other content"),
                "{note}"
            );
        }
    }
}

#[test]
fn a_job_in_space_that_was_anothers_starts_from_nothing_and_nothing_is_named() {
    // Tiles of a deleted job lie where the next one has its records.
    let mut disks = formatted();
    for device in 0..disks.count() {
        let noise = AlignedBytes::from_slice(&content(3, 1 << 20));
        disks.write(device, 1 << 20, &noise).unwrap();
    }
    let mut world = World::start(disks, SimRandom::new(9));
    world.begin("new", 3, Durability::Committed);
    let (mut disks, _) = world.crash(true);
    let report = verify(&mut disks).unwrap();
    assert!(report.is_sound(), "{:?}", report.notes);
}

#[test]
fn another_version_is_refused_untouched() {
    for ((device, offset), other) in own_blocks(&tiny())
        .into_iter()
        .flat_map(|at| [(at, 2), (at, 4)])
    {
        let mut disks = tiny();
        let mut block = AlignedBytes::zeroed(4096);
        disks.read(device, offset as u64, &mut block).unwrap();
        let bytes = block.as_mut_slice();
        bytes[8] = other;
        bytes[12..16].fill(0);
        let crc = checksum(bytes);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        disks.write(device, offset as u64, &block).unwrap();
        let before = dump(&disks);
        let error = recover::open(&mut disks).unwrap_err();
        assert!(
            matches!(error, StoreError::OtherVersion { version, .. } if version == u32::from(other)),
            "a block of version {other} at {offset} of device {device}: {error}"
        );
        assert_eq!(dump(&disks), before);
    }
}

/// Fails permanently after this many writes and flushes.
struct CutOffDisks<'a> {
    disks: &'a mut SimDisks,
    left_count: usize,
}

impl CutOffDisks<'_> {
    fn pass(&mut self, op: IoOp) -> Result<(), BlockError> {
        let Some(left) = self.left_count.checked_sub(1) else {
            return Err(BlockError {
                op,
                path: "sim".into(),
                offset: 0,
                asked_bytes: 0,
                cause: BlockErrorCause::Short(0),
            });
        };
        self.left_count = left;
        Ok(())
    }
}

impl Blocks for CutOffDisks<'_> {
    fn count(&self) -> usize {
        self.disks.count()
    }

    fn path(&self, position: usize) -> &str {
        self.disks.path(position)
    }

    fn size_bytes(&self, position: usize) -> u64 {
        self.disks.size_bytes(position)
    }

    fn read(&mut self, at: usize, offset: u64, into: &mut AlignedBytes) -> Result<(), BlockError> {
        self.disks.read(at, offset, into)
    }

    fn write(&mut self, at: usize, offset: u64, from: &AlignedBytes) -> Result<(), BlockError> {
        self.pass(IoOp::Write)?;
        self.disks.write(at, offset, from)
    }

    fn flush(&mut self, position: usize) -> Result<(), BlockError> {
        self.pass(IoOp::Flush)?;
        self.disks.flush(position)
    }
}

#[test]
fn whoever_follows_what_is_said_after_a_format_was_cut_off_has_a_store() {
    let rates = [MeasuredRates::default(); 2];
    let blank = SimDisks::new(&[5 << 19, 2 << 20]);
    for (before, force) in [(blank, false), (tiny(), true)] {
        let mut advised = std::collections::BTreeSet::new();
        for left_count in 0.. {
            let mut disks = before.clone();
            let mut cut = CutOffDisks {
                disks: &mut disks,
                left_count,
            };
            if format(&mut cut, StoreId([4; 16]), &rates, 0, force).is_ok() {
                break;
            }
            let Err(error) = recover::read(&mut disks) else {
                continue;
            };
            let message = error.to_string();
            let advice = match message.contains("`offloadd format --force` on all devices") {
                true => true,
                false => {
                    assert!(
                        message.contains("run `offloadd format` on all devices"),
                        "{message}"
                    );
                    false
                }
            };
            format(&mut disks, StoreId([5; 16]), &rates, 0, advice).unwrap();
            assert!(recover::read(&mut disks).unwrap().jobs.is_empty());
            advised.insert(advice);
        }
        // Both occurred: before the first superblock is written again, and between the devices.
        assert_eq!(advised.len(), 2);
    }
}

#[test]
fn devices_that_are_not_one_whole_store_are_refused_by_name() {
    let whole = tiny();
    let refused = |mut disks: SimDisks| recover::read(&mut disks).unwrap_err();
    let missing = refused(whole.pick(&[0]));
    let path = Some("sim1".to_owned());
    assert_eq!(missing, StoreError::Missing { number: 1, path });
    let missing = refused(whole.pick(&[1]));
    let paths = "sim1".to_owned();
    assert_eq!(missing, StoreError::NoCatalog { paths });
    assert!(matches!(
        refused(whole.pick(&[0, 1, 1])),
        StoreError::Duplicate { number: 1, .. }
    ));
    assert!(matches!(
        refused(SimDisks::new(&[4 << 20])),
        StoreError::NoStore { .. }
    ));
    // In another order it is the same store.
    let store = recover::read(&mut whole.pick(&[1, 0])).unwrap();
    assert_eq!(
        [store.devices[0].position, store.devices[1].position],
        [1, 0]
    );
    assert_eq!(store.jobs.len(), 1);
    let rates = [MeasuredRates::default()];
    let mut small = SimDisks::new(&[1 << 20]);
    let error = format(&mut small, StoreId([1; 16]), &rates, 0, false).unwrap_err();
    assert!(matches!(error, StoreError::TooSmall { .. }));
}

#[test]
fn a_device_of_another_store_or_cut_short_is_refused() {
    let mut disks = tiny();
    let mut other = SimDisks::new(&[5 << 19, 2 << 20]);
    let rates = [MeasuredRates::default(); 2];
    format(&mut other, StoreId([2; 16]), &rates, 0, false).unwrap();
    let mut block = AlignedBytes::zeroed(4096);
    for offset in SUPERBLOCK_OFFSETS {
        other.read(1, offset, &mut block).unwrap();
        disks.write(1, offset, &block).unwrap();
    }
    let error = recover::read(&mut disks).unwrap_err();
    assert!(matches!(&error, StoreError::Foreign { path, .. } if path == "sim1"));
    let mut short = SimDisks::new(&[2 << 20]);
    for offset in SUPERBLOCK_OFFSETS {
        tiny().read(0, offset, &mut block).unwrap();
        short.write(0, offset, &block).unwrap();
    }
    let error = recover::read(&mut short).unwrap_err();
    assert!(matches!(error, StoreError::Shrunk { .. }), "{error}");
}

#[test]
fn format_never_destroys_a_store_unasked() {
    let mut disks = tiny();
    let rates = [MeasuredRates::default(); 2];
    // Even a damaged superblock belonged to a store.
    disks.flip(0, 60, 1);
    disks.flip(0, (64 << 10) + 60, 1);
    let before = dump(&disks);
    let error = format(&mut disks, StoreId([3; 16]), &rates, 0, false).unwrap_err();
    assert!(matches!(error, StoreError::HoldsStore { .. }));
    assert_eq!(dump(&disks), before);
    format(&mut disks, StoreId([3; 16]), &rates, 0, true).unwrap();
    assert!(recover::read(&mut disks).unwrap().jobs.is_empty());
}

#[test]
fn a_flipped_bit_in_a_tile_is_named() {
    let mut disks = tiny();
    assert!(verify(&mut disks).unwrap().is_sound());
    let store = recover::read(&mut disks).unwrap();
    let extent = store.jobs[0].table.extents[0][0];
    let device = extent.device.0 as usize;
    disks.flip(device, extent.offset + 1234, 5);
    let report = verify(&mut disks).unwrap();
    let [damaged] = &report.damaged_tiles[..] else {
        panic!("{report:?}");
    };
    assert_eq!(damaged.path, disks.path(device));
    assert_eq!((damaged.offset, damaged.tile.0), (extent.offset, 0));
    assert_eq!(damaged.generation, Generation(1));
    assert_eq!(damaged.job.as_str(), "golden");
    let expected = checksum(&content(TILE_SEED, 4096));
    assert!(
        matches!(damaged.damage, Damage::Checksum { expected: e, found } if e == expected && found != e)
    );
    let message = damaged.to_string();
    for word in ["sim", "tile 0", "unit 0", "job golden", "generation 1"] {
        assert!(message.contains(word), "{message}");
    }
}
