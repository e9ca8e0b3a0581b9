//! Keeps the inputs of blocks between forward and backward: where they were computed, or in host memory.
//!
//! A block's input is all that forward keeps of a micro-batch for each block. With many blocks or long
//! sequences that is too much for a GPU. With offloading, the GPU holds two micro-batches' inputs at a time:
//! an input is copied to the host while the next block computes, and copied back during the backward pass of
//! the following block. Copies do not change bits.
//!
//! Without a GPU, inputs are in host memory anyway.

use kernels::gpu::{Gpu, HostStash, Stream};

use crate::compute::{Activation, AwayActivation, ComputeError};
use training_run::model::ModelConfig;

/// One block's inputs, by micro-batch.
pub(super) type BlockInputs = Vec<Input>;

/// The input of one micro-batch.
pub(super) enum Input {
    Here(Activation),
    /// Copied to host memory, under this number.
    Away(usize, AwayActivation),
}

/// Storage of block inputs between forward and backward.
pub(super) struct InputPlace {
    host_stash: Option<(HostStash, Stream)>,
    /// Micro-batches whose inputs are kept at the same time.
    micro_batches: usize,
}

impl InputPlace {
    /// Keeps inputs where the block computes.
    pub(super) fn here(micro_batches: usize) -> Self {
        Self {
            host_stash: None,
            micro_batches,
        }
    }

    /// Keeps inputs in host memory, with room for every block's inputs of `micro_batches`, each of
    /// `input_bytes`.
    ///
    /// # Errors
    /// The GPU has too little memory free, or the host too little to pin.
    pub(super) fn away(
        gpu: &Gpu,
        config: &ModelConfig,
        micro_batches: usize,
        input_bytes: usize,
    ) -> Result<Self, ComputeError> {
        let host_stash = HostStash::new(gpu, config.layers * micro_batches, input_bytes)?;
        Ok(Self {
            host_stash: Some((host_stash, gpu.default_stream())),
            micro_batches,
        })
    }

    /// Begins with the next `micro_batches`, no more than there is room for. All inputs of those before have been taken.
    pub(super) fn begin(&mut self, micro_batches: usize) {
        self.micro_batches = micro_batches;
    }

    /// Keeps the inputs of `block`, counted from 0, until they are taken.
    ///
    /// # Errors
    /// The GPU failed.
    pub(super) fn keep(
        &mut self,
        block: usize,
        inputs: Vec<Activation>,
    ) -> Result<BlockInputs, ComputeError> {
        let Some((host_stash, compute)) = &mut self.host_stash else {
            return Ok(inputs.into_iter().map(Input::Here).collect());
        };
        let first = block * self.micro_batches;
        let numbered = (first..).zip(inputs);
        numbered
            .map(|(piece, input)| Ok(Input::Away(piece, input.put(host_stash, piece, compute)?)))
            .collect()
    }

    /// Starts copying back the inputs that backward needs first: those of the last of `blocks`.
    ///
    /// # Errors
    /// The GPU failed.
    pub(super) fn expect(&mut self, blocks: usize) -> Result<(), ComputeError> {
        match &mut self.host_stash {
            Some((host_stash, _)) if blocks > 0 => {
                Ok(host_stash.fetch((blocks - 1) * self.micro_batches)?)
            }
            _ => Ok(()),
        }
    }

    /// Returns an input to compute with, and starts copying the next one back.
    ///
    /// # Errors
    /// The GPU failed.
    pub(super) fn fetch(&mut self, input: Input) -> Result<Activation, ComputeError> {
        let (piece, away) = match input {
            Input::Here(input) => return Ok(input),
            Input::Away(piece, away) => (piece, away),
        };
        let (host_stash, compute) = self
            .host_stash
            .as_mut()
            .expect("an input in host memory has a stash");
        let input = away.bring_back(host_stash, piece, compute)?;
        if let Some(next) = next_piece(piece, self.micro_batches) {
            host_stash.fetch(next)?;
        }
        Ok(input)
    }
}

/// Backward runs through blocks from the last to the first, and through each block's micro-batches in order.
fn next_piece(piece: usize, micro_batches: usize) -> Option<usize> {
    let (block, batch) = (piece / micro_batches, piece % micro_batches);
    if batch + 1 < micro_batches {
        return Some(piece + 1);
    }
    block.checked_sub(1).map(|block| block * micro_batches)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_input_is_expected_in_the_order_of_backward() {
        for (blocks, micro_batches) in [(1, 1), (3, 1), (2, 3)] {
            let order: Vec<usize> = (0..blocks)
                .rev()
                .flat_map(|block| {
                    (0..micro_batches).map(move |batch| block * micro_batches + batch)
                })
                .collect();
            for pair in order.windows(2) {
                assert_eq!(next_piece(pair[0], micro_batches), Some(pair[1]));
            }
            assert_eq!(next_piece(order[order.len() - 1], micro_batches), None);
        }
    }
}
