//! Reads values by unit and range of elements from any layout in the files.

use std::ops::Range;
use std::os::unix::fs::FileExt;

use super::source::StoredParam;
use super::{Weights, WeightsError};
use crate::model::ParamLayout;

/// Bytes read at a time: enough for the full speed of any drive, little compared with a tile.
pub(super) const BLOCK_BYTES: usize = 1 << 20;

impl Weights {
    /// Reads the weights of elements `range_elems` of unit number `unit`; padding is zero. `out` must be as
    /// long as the range, which must be in the unit.
    ///
    /// # Errors
    /// A file cannot be read; a weight is not finite.
    pub fn fill(
        &self,
        unit: usize,
        range_elems: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), WeightsError> {
        let layout = &self.units[unit];
        assert!(range_elems.end <= layout.elems, "within the unit");
        assert_eq!(
            out.len(),
            range_elems.len(),
            "the output has one place for each element"
        );
        out.fill(0.0);
        for (param, stored) in layout.params.iter().zip(&self.stored[unit]) {
            let own = param.range_elems();
            let start = own.start.max(range_elems.start);
            let end = own.end.min(range_elems.end);
            if start >= end {
                continue;
            }
            let within = start - own.start..end - own.start;
            let out = &mut out[start - range_elems.start..end - range_elems.start];
            if stored.place.transposed {
                self.fill_turned(param, stored, within.clone(), out)?;
            } else {
                let first = stored.place.stored_elem(&param.shape, within.start);
                self.read(stored, first, out)?;
            }
            if let Some(at) = out.iter().position(|weight| !weight.is_finite()) {
                let elem = stored.place.stored_elem(&param.shape, within.start + at);
                return Err(self.not_finite(stored, elem, out[at]));
            }
        }
        Ok(())
    }

    /// Reads a part of a matrix that is stored as [inputs, outputs] and used as [outputs, inputs]: a strip of
    /// columns in the file, read row by row, or several rows at a time if the strip is a large part of them.
    fn fill_turned(
        &self,
        param: &ParamLayout,
        stored: &StoredParam,
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), WeightsError> {
        let inputs: usize = param.shape[1..].iter().product();
        let outputs = range.start / inputs..(range.end - 1) / inputs + 1;
        let width = param.shape[0] * stored.place.part.count;
        let strip = outputs.len();
        let rows_most = if strip * 4 >= width {
            (BLOCK_BYTES / stored.element.size_bytes() / width).max(1)
        } else {
            1
        };
        let mut block = Vec::new();
        for row in (0..inputs).step_by(rows_most) {
            let rows = rows_most.min(inputs - row);
            block.resize((rows - 1) * width + strip, 0.0);
            let first = stored
                .place
                .stored_elem(&param.shape, outputs.start * inputs + row);
            self.read(stored, first, &mut block)?;
            for (number, strip_of_row) in block.chunks(width).enumerate() {
                for (output, value) in outputs.clone().zip(&strip_of_row[..strip]) {
                    // The first and the last output may be partial.
                    let elem = output * inputs + row + number;
                    if range.contains(&elem) {
                        out[elem - range.start] = *value;
                    }
                }
            }
        }
        Ok(())
    }

    /// Error for a value that cannot be trained.
    pub(super) fn not_finite(&self, stored: &StoredParam, elem: usize, value: f32) -> WeightsError {
        WeightsError::Tensor {
            path: self.files[stored.file].path.clone(),
            tensor: stored.place.name.clone(),
            what: format!("element {elem} is {value}: a model with it cannot be trained"),
        }
    }

    /// Reads the numbers of a tensor from its element `first` on, in the file's order.
    pub(super) fn read(
        &self,
        stored: &StoredParam,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), WeightsError> {
        let file = &self.files[stored.file];
        let size = stored.element.size_bytes();
        let mut bytes = vec![0; BLOCK_BYTES.min(out.len() * size)];
        let mut at = stored.start + (first * size) as u64;
        for out in out.chunks_mut(BLOCK_BYTES / size) {
            let bytes = &mut bytes[..out.len() * size];
            file.file
                .read_exact_at(bytes, at)
                .map_err(WeightsError::io("read", &file.path))?;
            stored.element.decode(bytes, out);
            at += bytes.len() as u64;
        }
        Ok(())
    }
}
