//! Cuts the power at every moment while a daemon runs in the guest. What could go wrong: a record that names tiles of a drive that was not flushed,
//! an acknowledged generation that is gone, a torn one that is offered.
//!
//! The log of both drives gives the images: at each moment, the flushed bytes and any subset of the unflushed sectors. Each image is recovered as a
//! daemon does at its start, and all tiles of the generations it offers are read and compared with what the writer wrote.
//! `OFFLOADD_POWER_IMAGES=1000000` tries this many images.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use offloadd::blocks::{BlockError, Blocks};
use offloadd::io::AlignedBytes;
use offloadd::store::manifest::resumable;
use offloadd::store::recover;
use test_hooks::random::{SECTOR_BYTES, SimRandom};

use crate::drives::{Drives, Entry};
use crate::machine::Parts;
use crate::store::Store;
use crate::writer::{self, TILE_BYTES, TILES, content};

const BLOCK: usize = 4096;
const GENERATIONS: u64 = 25;
const IMAGES: u64 = 20_000;

/// Drives after a power cut: the durable bytes, and above them blocks that were in transit.
struct Image<'a> {
    durable: &'a [Vec<u8>],
    over: HashMap<(usize, usize), [u8; BLOCK]>,
}

impl Image<'_> {
    fn block(&self, drive: usize, block: usize) -> &[u8] {
        match self.over.get(&(drive, block)) {
            Some(bytes) => bytes,
            None => &self.durable[drive][block * BLOCK..][..BLOCK],
        }
    }

    /// Records that this part of a write reached the drive.
    fn keep(&mut self, drive: usize, offset: usize, bytes: &[u8]) {
        let durable = &self.durable[drive];
        let block = offset / BLOCK;
        let whole = self.over.entry((drive, block)).or_insert_with(|| {
            durable[block * BLOCK..][..BLOCK]
                .try_into()
                .expect("a block")
        });
        whole[offset % BLOCK..][..bytes.len()].copy_from_slice(bytes);
    }
}

fn blocks_of(offset: u64, bytes: usize) -> Range<usize> {
    let first = offset as usize / BLOCK;
    first..first + bytes / BLOCK
}

impl Blocks for Image<'_> {
    fn count(&self) -> usize {
        self.durable.len()
    }

    fn path(&self, position: usize) -> &str {
        ["drive 0", "drive 1"][position]
    }

    fn size_bytes(&self, position: usize) -> u64 {
        self.durable[position].len() as u64
    }

    fn read(
        &mut self,
        position: usize,
        offset: u64,
        into: &mut AlignedBytes,
    ) -> Result<(), BlockError> {
        let blocks = blocks_of(offset, into.len());
        for (at, block) in into.as_mut_slice().chunks_mut(BLOCK).zip(blocks) {
            at.copy_from_slice(self.block(position, block));
        }
        Ok(())
    }

    fn write(
        &mut self,
        position: usize,
        offset: u64,
        from: &AlignedBytes,
    ) -> Result<(), BlockError> {
        for (bytes, block) in from
            .as_slice()
            .chunks(BLOCK)
            .zip(blocks_of(offset, from.len()))
        {
            self.keep(position, block * BLOCK, bytes);
        }
        Ok(())
    }

    fn flush(&mut self, _: usize) -> Result<(), BlockError> {
        Ok(())
    }
}

/// Returns what is wrong with an image, if anything is.
fn violation(mut image: Image, acknowledged: u64, contents: &mut Contents) -> Option<String> {
    let store = match recover::open(&mut image) {
        Ok(store) => store,
        Err(error) => return Some(format!("it does not open: {error}")),
    };
    let Some(job) = store.jobs.first() else {
        return (acknowledged > 0).then(|| "the job is gone".into());
    };
    let newest = resumable(&job.slots).last().copied().cloned();
    let number = newest.as_ref().map_or(0, |n| n.record.generation.0);
    // The guest's messages take longer than its writes, so later generations may be present already.
    if number < acknowledged {
        return Some(format!(
            "{number} is offered, {acknowledged} was acknowledged"
        ));
    }
    let record = newest?.record;
    if record.blobs[0].1 != number.to_le_bytes() {
        return Some(format!("the blob of {number} is another's"));
    }
    for tile in 0..TILES {
        let version = record.versions[tile as usize].expect("all were written");
        let extent = job.table.extents[tile as usize][usize::from(version.which)];
        let position = store.devices[extent.device.0 as usize].position;
        let mut bytes = AlignedBytes::zeroed(TILE_BYTES as usize);
        image
            .read(position, extent.offset, &mut bytes)
            .expect("it is memory");
        if bytes.as_slice() != contents.tile_bytes(number, tile) {
            return Some(format!("tile {tile} is not that of generation {number}"));
        }
    }
    None
}

/// Contents of tiles, computed once.
#[derive(Default)]
struct Contents(HashMap<(u64, u32), Vec<u8>>);

impl Contents {
    fn tile_bytes(&mut self, generation: u64, tile: u32) -> &[u8] {
        let made = self.0.entry((generation, tile));
        made.or_insert_with(|| content(generation, tile))
    }
}

/// Cuts the power `images` times over the log. Returns the number of wrong images, and a description of the first.
fn cut(base: &[Vec<u8>], log: &[Entry], images: u64, seed: u64) -> (u64, Option<String>) {
    let mut random = SimRandom::new(seed);
    let mut contents = Contents::default();
    let mut durable = base.to_vec();
    let mut pending: Vec<Vec<(u64, &[u8])>> = vec![Vec::new(); base.len()];
    let (mut acknowledged, mut wrong, mut first) = (0, 0, None);
    for (at, entry) in log.iter().enumerate() {
        match entry {
            Entry::Write {
                drive,
                offset,
                bytes,
            } => pending[*drive].push((*offset, bytes)),
            Entry::Flush { drive } => {
                for (offset, bytes) in pending[*drive].drain(..) {
                    durable[*drive][offset as usize..][..bytes.len()].copy_from_slice(bytes);
                }
            }
            Entry::Acknowledged(generation) => acknowledged = *generation,
        }
        // Equally many at each moment, to the last one.
        let here =
            images * (at as u64 + 1) / log.len() as u64 - images * at as u64 / log.len() as u64;
        for _ in 0..here {
            let mut image = Image {
                durable: &durable,
                over: HashMap::new(),
            };
            // From "nothing survives" through "half" to "nearly all", for each drive separately.
            for (drive, pending) in pending.iter().enumerate() {
                let kept_in_16 = [0, 1, 8, 15, 16][random.below(5)];
                for (offset, bytes) in pending {
                    for (index, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
                        if random.below(16) < kept_in_16 {
                            image.keep(drive, *offset as usize + index * SECTOR_BYTES, sector);
                        }
                    }
                }
            }
            if let Some(why) = violation(image, acknowledged, &mut contents) {
                wrong += 1;
                first.get_or_insert(format!("entry {at} of {}: {why}", log.len()));
            }
        }
    }
    (wrong, first)
}

/// Returns the drives of a store, formatted here because formatting measures them, which the log need not contain.
fn formatted() -> Vec<Vec<u8>> {
    let store = Store::new(2, "psync");
    let devices = store.devices.iter();
    devices.map(|path| std::fs::read(path).unwrap()).collect()
}

/// Runs a daemon in the guest, with a safeguard disabled or none.
fn life(parts: &Parts, removed: &str) -> (Vec<Vec<u8>>, Vec<Entry>) {
    let dir = tempfile::tempdir().unwrap();
    let drives = Drives::serve(dir.path(), formatted());
    let script = writer::script("power::the_power_may_go_at_any_moment", removed);
    let mut machine = parts.boot(dir.path(), &drives, &script);
    let mut acknowledged = 0;
    while let Some(line) = machine.line() {
        if let Some((_, number)) = line.split_once("ACK ") {
            acknowledged = number.parse().unwrap();
            let mut log = drives.log.lock().unwrap();
            log.push(Entry::Acknowledged(acknowledged));
        }
        if acknowledged == GENERATIONS {
            break;
        }
    }
    let printed = machine.printed().join("\n");
    drop(machine);
    assert_eq!(acknowledged, GENERATIONS, "{printed}");
    let log = std::mem::take(&mut *drives.log.lock().unwrap());
    (drives.base, log)
}

#[test]
fn the_power_may_go_at_any_moment() {
    if let Some(socket) = std::env::var_os(writer::SOCKET) {
        return writer::commit_generations(Path::new(&socket), GENERATIONS);
    }
    let Some(parts) = Parts::find() else { return };
    let images = std::env::var("OFFLOADD_POWER_IMAGES")
        .map_or(IMAGES, |images| images.parse().expect("a number of images"));
    let (base, log) = life(&parts, "");
    let flushed = |drive| {
        let flushes = log
            .iter()
            .filter(|e| matches!(e, Entry::Flush { drive: d } if *d == drive));
        flushes.count() as u64
    };
    assert!(flushed(0) > GENERATIONS && flushed(1) > GENERATIONS / 2);
    let threads = 2;
    let results: Vec<_> = std::thread::scope(|scope| {
        let part = |seed| {
            let (base, log) = (&base, &log);
            scope.spawn(move || cut(base, log, images / threads, seed))
        };
        let parts: Vec<_> = (0..threads).map(part).collect();
        parts.into_iter().map(|part| part.join().unwrap()).collect()
    });
    println!("{images} images of {} entries: {results:?}", log.len());
    for (wrong, first) in results {
        assert_eq!(wrong, 0, "{first:?}");
    }
    // Finds a drive whose flush does nothing.
    let lying: Vec<Entry> = (log.into_iter())
        .filter(|entry| !matches!(entry, Entry::Flush { drive: 1 }))
        .collect();
    let (wrong, first) = cut(&base, &lying, 2000, 7);
    println!("without the flushes of one drive: {wrong} of 2000, {first:?}");
    assert!(wrong > 20, "{wrong} of 2000 images are wrong");
}

#[test]
fn without_the_first_flush_power_cuts_mix_generations() {
    let Some(parts) = Parts::find() else { return };
    let (base, log) = life(&parts, "first-flush");
    let (wrong, first) = cut(&base, &log, 2000, 7);
    println!("without the first flush: {wrong} of 2000, {first:?}");
    assert!(wrong > 20, "{wrong} of 2000 images are wrong");
}
