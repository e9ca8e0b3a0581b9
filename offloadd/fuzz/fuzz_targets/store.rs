//! Opens devices whose structures were changed and sealed again, so that a checksum alone does not detect the change: superblocks, catalog,
//! definition, tables, records, marks. A store must open or be refused with a message, and must name only places on its own devices.
//!
//! The store has one job and one generation (the golden store of the simulation). The input is a sequence of: number of the block, offset in it,
//! length, and the new bytes.

#![no_main]

use std::collections::BTreeMap;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use offloadd::api::checksum::checksum;
use offloadd::blocks::{BlockError, BlockErrorCause, Blocks};
use offloadd::io::{AlignedBytes, IoOp};
use offloadd::store::recover;
use offloadd::store::verify::verify;

const BLOCK: usize = 4096;
const SIZES: [u64; 2] = [5 << 19, 2 << 20];
const GOLDEN: &str = include_str!("../../tests/simulation/golden.txt");

/// Two devices; blocks that are not in the map are zero.
#[derive(Clone, Default)]
struct Sparse(BTreeMap<(usize, u64), Vec<u8>>);

impl Sparse {
    /// Reads lines of device, offset and 32 bytes in hexadecimal.
    fn of_lines(lines: &str) -> Self {
        let mut sparse = Self::default();
        for line in lines.lines() {
            let words: Vec<_> = line.split(' ').collect();
            let device = words[0].parse().expect("a number");
            let offset = u64::from_str_radix(words[1], 16).expect("a number");
            let block = sparse.block(device, offset / BLOCK as u64 * BLOCK as u64);
            for (index, byte) in block[offset as usize % BLOCK..][..32]
                .iter_mut()
                .enumerate()
            {
                *byte = u8::from_str_radix(&words[2][2 * index..][..2], 16).expect("a byte");
            }
        }
        sparse
    }

    fn block(&mut self, device: usize, offset: u64) -> &mut Vec<u8> {
        let block = self.0.entry((device, offset));
        block.or_insert_with(|| vec![0; BLOCK])
    }

    /// Seals the structures whose heads have a plausible length.
    fn seal(&mut self) {
        let heads: Vec<_> = (self.0.iter())
            .filter(|(_, block)| block.starts_with(b"OFFL"))
            .map(|(at, block)| {
                (
                    *at,
                    u64::from_le_bytes(block[16..24].try_into().expect("eight")),
                )
            })
            .collect();
        for ((device, offset), bytes) in heads {
            let room = SIZES[device] - offset;
            if bytes == 0 || !bytes.is_multiple_of(BLOCK as u64) || bytes > room.min(1 << 20) {
                continue;
            }
            self.block(device, offset)[12..16].fill(0);
            let mut whole = AlignedBytes::zeroed(bytes as usize);
            self.read(device, offset, &mut whole).expect("it is memory");
            let crc = checksum(whole.as_slice()).to_le_bytes();
            self.block(device, offset)[12..16].copy_from_slice(&crc);
        }
    }

    fn check(&self, op: IoOp, device: usize, offset: u64, bytes: usize) -> Result<(), BlockError> {
        assert!(offset.is_multiple_of(BLOCK as u64), "{op:?} at {offset}");
        let end = offset.checked_add(bytes as u64);
        if end.is_some_and(|end| end <= SIZES[device]) {
            return Ok(());
        }
        Err(BlockError {
            op,
            path: self.path(device).into(),
            offset,
            asked_bytes: bytes as u64,
            cause: BlockErrorCause::Short(0),
        })
    }
}

impl Blocks for Sparse {
    fn count(&self) -> usize {
        SIZES.len()
    }

    fn path(&self, position: usize) -> &str {
        ["sim0", "sim1"][position]
    }

    fn size_bytes(&self, position: usize) -> u64 {
        SIZES[position]
    }

    fn read(
        &mut self,
        position: usize,
        offset: u64,
        into: &mut AlignedBytes,
    ) -> Result<(), BlockError> {
        self.check(IoOp::Read, position, offset, into.len())?;
        for (block, at) in into
            .as_mut_slice()
            .chunks_mut(BLOCK)
            .zip((offset..).step_by(BLOCK))
        {
            match self.0.get(&(position, at)) {
                Some(bytes) => block.copy_from_slice(bytes),
                None => block.fill(0),
            }
        }
        Ok(())
    }

    fn write(
        &mut self,
        position: usize,
        offset: u64,
        from: &AlignedBytes,
    ) -> Result<(), BlockError> {
        self.check(IoOp::Write, position, offset, from.len())?;
        for (block, at) in from.as_slice().chunks(BLOCK).zip((offset..).step_by(BLOCK)) {
            self.block(position, at).copy_from_slice(block);
        }
        Ok(())
    }

    fn flush(&mut self, _: usize) -> Result<(), BlockError> {
        Ok(())
    }
}

/// Applies the changes in `bytes` to a golden store.
fn changed(bytes: &[u8]) -> Sparse {
    static STORE: OnceLock<Sparse> = OnceLock::new();
    let mut rest = bytes;
    let mut store = STORE.get_or_init(|| Sparse::of_lines(GOLDEN)).clone();
    let places: Vec<_> = store.0.keys().copied().collect();
    while let Some((&[place, low, high, count], bytes)) = rest.split_first_chunk() {
        let (device, offset) = places[usize::from(place) % places.len()];
        // Offsets at the beginning of a block come twice as often, because the heads are there.
        let at = usize::from(u16::from_le_bytes([low, high])) % BLOCK;
        let at = if high & 0x80 == 0 { at % 512 } else { at };
        let count = usize::from(count % 64).min(bytes.len()).min(BLOCK - at);
        store.block(device, offset)[at..at + count].copy_from_slice(&bytes[..count]);
        rest = &bytes[count..];
    }
    store.seal();
    store
}

fuzz_target!(|bytes: &[u8]| {
    let mut store = changed(bytes);
    let _ = recover::identify(&mut store);
    let read = verify(&mut store.clone());
    let opened = match recover::open(&mut store) {
        Ok(opened) => opened,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    assert!(
        read.is_ok(),
        "it opens and cannot be verified: {:?}",
        read.err()
    );
    for job in &opened.jobs {
        for (extents, tile) in job.table.extents.iter().zip(job.table.definition.tiles()) {
            for extent in extents
                .iter()
                .take(job.table.definition.extents(tile))
            {
                let device = &opened.devices[extent.device.0 as usize];
                let end = extent.offset + u64::from(tile.tile_bytes);
                assert!(
                    end <= SIZES[device.position],
                    "a tile outside of its device"
                );
            }
        }
    }
    // A second start finds the repaired structures intact.
    let again = recover::open(&mut store).expect("it opened before");
    assert_eq!(again.jobs.len(), opened.jobs.len());
});
