//! Reads all values once, before a fresh run makes anything: what cannot be trained is found while nothing is there to remove.
//!
//! The files are read twice so. Their bytes are some 2 a parameter, where the run writes 12 to 16: the second reading comes from
//! the page cache or takes a small part of the start.

use std::sync::Mutex;

use rayon::prelude::*;

use super::read::BLOCK_BYTES;
use super::source::Stored;
use super::{Weights, WeightsError};
use offload_support::progress::{Audience, Progress, Unit};

/// Elements that are read at a time, of any type at most a block.
const BLOCK_ELEMS: usize = BLOCK_BYTES / 4;

impl Weights {
    /// Checks that all weights are finite, and that a tied model's projection is its embedding, on `threads` threads.
    ///
    /// # Errors
    /// A weight that cannot be trained; a projection of its own; a file cannot be read.
    pub(crate) fn check(&self, threads: usize) -> Result<(), WeightsError> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .map_err(|error| WeightsError::Threads {
                count: threads,
                message: error.to_string(),
            })?;
        let tensors = self.tensors();
        let bytes = |(stored, elems): &(&Stored, usize)| elems * stored.element.size_bytes();
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

    /// Each tensor that is read, once, and its elements.
    fn tensors(&self) -> Vec<(&Stored, usize)> {
        let mut found = Vec::new();
        for (layout, stored) in self.units.iter().zip(&self.stored) {
            for (param, stored) in layout.params.iter().zip(stored) {
                // The first of several that lie in one tensor stands for it.
                if stored.place.part.index == 0 {
                    found.push((stored, param.elems() * stored.place.part.count));
                }
            }
        }
        found
    }

    fn check_block(&self, stored: &Stored, start: usize, elems: usize) -> Result<(), WeightsError> {
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
        // As bits are compared -0 would differ from 0, which no product tells apart.
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
