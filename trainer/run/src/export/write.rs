//! Writes tiles to the positions of their tensors, in any order.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use kernels::adamw::read_masters;
use offload_support::aligned::AlignedBytes;
use rustix::fs::FallocateFlags;
use swapper::TileRange;
use training_state::update::TileFormats;

use super::ExportError;
use super::shards::{Shards, Target};
use crate::model::ParamLayout;

/// Bytes written at a time.
const BLOCK_BYTES: usize = 1 << 20;

/// Open files of their final length.
pub(super) struct ShardWriter<'a> {
    shards: &'a Shards,
    formats: TileFormats,
    files: Vec<(PathBuf, File)>,
    masters: Vec<f32>,
    bytes: Vec<u8>,
}

impl<'a> ShardWriter<'a> {
    /// Creates the files with their headers and reserves space for the rest.
    pub(super) fn make(
        dir: &Path,
        shards: &'a Shards,
        formats: TileFormats,
    ) -> Result<Self, ExportError> {
        let mut files = Vec::with_capacity(shards.files.len());
        for shard in &shards.files {
            let path = dir.join(&shard.name);
            let file = File::create_new(&path).map_err(ExportError::io("make", &path))?;
            let length = shard.header.len() as u64 + shard.data_bytes;
            reserve(&file, length)
                .and_then(|()| file.write_all_at(&shard.header, 0))
                .map_err(ExportError::io("write", &path))?;
            files.push((path, file));
        }
        Ok(Self {
            shards,
            formats,
            files,
            masters: Vec::new(),
            bytes: Vec::new(),
        })
    }

    /// Writes a tile's part of each tensor.
    pub(super) fn tile(
        &mut self,
        range: &TileRange,
        param: &[u8],
        state: &[u8],
    ) -> Result<(), ExportError> {
        let elems = range.elems.start as usize..range.elems.end as usize;
        let mut masters = std::mem::take(&mut self.masters);
        masters.resize(elems.len(), 0.0);
        // Tiles may be unaligned, but reading them as masters needs alignment.
        let [param, state] = [param, state].map(AlignedBytes::from_slice);
        read_masters(
            self.formats.of_tile(range),
            param.as_slice(),
            state.as_slice(),
            &mut masters,
        );
        let shards = self.shards;
        let params = shards.units[range.unit].params.iter();
        for (param, target) in params.zip(&shards.targets[range.unit]) {
            let own = param.range_elems();
            let (start, end) = (own.start.max(elems.start), own.end.min(elems.end));
            if start >= end {
                continue;
            }
            let within = start - own.start..end - own.start;
            let values = &masters[start - elems.start..end - elems.start];
            if target.place.transposed {
                self.write_turned(param, target, within, values)?;
            } else {
                let first = target.place.stored_elem(&param.shape, within.start);
                self.write(target, first, values)?;
            }
        }
        self.masters = masters;
        Ok(())
    }

    /// Syncs all files to the drive.
    pub(super) fn finish(self) -> Result<(), ExportError> {
        for (path, file) in self.files {
            file.sync_all().map_err(ExportError::io("flush", &path))?;
        }
        Ok(())
    }

    /// Writes a part of a matrix that is stored as [inputs, outputs] in its file: a strip of columns, row by
    /// row.
    fn write_turned(
        &mut self,
        param: &ParamLayout,
        target: &Target,
        range: Range<usize>,
        values: &[f32],
    ) -> Result<(), ExportError> {
        let inputs: usize = param.shape[1..].iter().product();
        let outputs = range.start / inputs..(range.end - 1) / inputs + 1;
        let mut strip = Vec::with_capacity(outputs.len());
        for input in 0..inputs {
            strip.clear();
            // The first and the last output may be partial.
            let elems = outputs.clone().map(|output| output * inputs + input);
            let mut there = elems.filter(|elem| range.contains(elem)).peekable();
            let Some(&first) = there.peek() else { continue };
            strip.extend(there.map(|elem| values[elem - range.start]));
            let first = target.place.stored_elem(&param.shape, first);
            self.write(target, first, &strip)?;
        }
        Ok(())
    }

    /// Writes numbers of a tensor from its element `first` on, in the file's order.
    fn write(&mut self, target: &Target, first: usize, values: &[f32]) -> Result<(), ExportError> {
        let element = self.shards.element;
        let size = element.size_bytes();
        let (path, file) = &self.files[target.file];
        let mut at = target.start + (first * size) as u64;
        for values in values.chunks(BLOCK_BYTES / size) {
            self.bytes.clear();
            if let Err(value) = element.encode(values, &mut self.bytes) {
                return Err(ExportError::Overflow {
                    tensor: target.place.name.clone(),
                    value,
                    numbers: element.word(),
                });
            }
            file.write_all_at(&self.bytes, at)
                .map_err(ExportError::io("write", path))?;
            at += self.bytes.len() as u64;
        }
        Ok(())
    }
}

/// Sets the file's length and allocates its blocks if the file system can, so that a lack of space is known
/// before the first tile.
fn reserve(file: &File, bytes: u64) -> std::io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => file.set_len(bytes),
        result => Ok(result?),
    }
}
