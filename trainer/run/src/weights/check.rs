//! Reads all initial weights once before a fresh run creates anything, so that values that cannot be trained
//! are found in time.
//!
//! This reads the files twice. They have about 2 bytes a parameter, while the run writes 12 to 16: the second
//! reading comes from the page cache or takes a small part of the start.

use std::sync::Mutex;

use rayon::prelude::*;

use super::read::BLOCK_BYTES;
use super::source::StoredParam;
use super::{Weights, WeightsError};
use offload_support::progress::{Audience, Progress, Unit};

/// Elements read at a time; a block's worth of the widest type.
const BLOCK_ELEMS: usize = BLOCK_BYTES / 4;

impl Weights {
    /// Checks on `threads` threads that all weights are finite and that a tied model's projection equals its
    /// embedding.
    ///
    /// # Errors
    /// A weight is not finite; the projection differs; a file cannot be read.
    pub(crate) fn check(&self, threads: usize) -> Result<(), WeightsError> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .map_err(|error| WeightsError::Threads {
                count: threads,
                message: error.to_string(),
            })?;
        let tensors = self.tensors();
        let bytes = |(stored, elems): &(&StoredParam, usize)| elems * stored.element.size_bytes();
        let total_bytes: usize = tensors.iter().map(bytes).sum();
        let work = Progress::new("checking the weights", Unit::Bytes, Audience::Person)
            .with_total(total_bytes as u64);
        let work = Mutex::new(work);
        let blocks = tensors.iter().flat_map(|&(stored, elems)| {
            let starts = (0..elems).step_by(BLOCK_ELEMS);
            starts.map(move |start| (stored, start, BLOCK_ELEMS.min(elems - start)))
        });
        let blocks: Vec<_> = blocks.collect();
        pool.install(|| {
            blocks.par_iter().try_for_each(|&(stored, start, elems)| {
                self.check_block(stored, start, elems)?;
                let bytes = elems * stored.element.size_bytes();
                work.lock()
                    .expect("no thread panics while it holds the lock")
                    .add(bytes as u64);
                Ok(())
            })
        })
    }

    /// Returns each tensor that is read, once, with its number of elements.
    fn tensors(&self) -> Vec<(&StoredParam, usize)> {
        let mut found = Vec::new();
        for (layout, stored) in self.units.iter().zip(&self.stored) {
            for (param, stored) in layout.params.iter().zip(stored) {
                // The first of several parameters in a tensor represents it.
                if stored.place.part.index == 0 {
                    found.push((stored, param.elems() * stored.place.part.count));
                }
            }
        }
        found
    }

    fn check_block(
        &self,
        stored: &StoredParam,
        start: usize,
        elems: usize,
    ) -> Result<(), WeightsError> {
        let mut values = vec![0f32; elems];
        self.read(stored, start, &mut values)?;
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Err(self.not_finite(stored, start + at, values[at]));
        }
        let embedding = &self.stored[0][0];
        let Some(repeated) = (self.repeated.as_ref()).filter(|_| std::ptr::eq(stored, embedding))
        else {
            return Ok(());
        };
        let mut own = vec![0f32; elems];
        self.read(repeated, start, &mut own)?;
        // Compared as numbers: -0 and 0 differ in bits but not in any product.
        match (0..elems).find(|&at| own[at] != values[at]) {
            None => Ok(()),
            Some(at) => Err(WeightsError::NotTied {
                path: self.files[repeated.file].path.clone(),
                tensor: embedding.place.name.clone(),
                at_elem: start + at,
                value: own[at],
                embedding: values[at],
            }),
        }
    }
}
