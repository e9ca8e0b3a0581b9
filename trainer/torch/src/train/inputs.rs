//! Keeps the inputs of blocks between forward and backward: where they were computed, in host memory, or on devices.
//!
//! A block's input is all that forward keeps of a micro-batch for each block. With many blocks or long
//! sequences that is too much for a GPU, or for host memory too. Elsewhere, the computing device holds two inputs at a
//! time: an input leaves while the next block computes, and comes back during the backward pass of
//! the following block. Copies do not change bits.
//!
//! Without a GPU, inputs that are not on devices are in host memory anyway.

use kernels::gpu::{Gpu, HostStash, Stream};
use swapper::Scratch;

use super::TrainError;
use crate::compute::{Activation, AwayActivation, ComputeError};
use training_run::plan::{InputsIn, Plan};
use training_state::tile_stash::{StashBuffer, TileStash};

/// One block's inputs, by micro-batch.
pub(super) type BlockInputs = Vec<Input>;

/// The input of one micro-batch.
pub(super) enum Input {
    Here(Activation),
    /// Copied elsewhere, under this number.
    Away(usize, AwayActivation),
}

/// Storage of block inputs between forward and backward.
pub(super) struct InputPlace {
    /// `None` keeps them where the block computes.
    stash: Option<Stash>,
    /// Micro-batches whose inputs are kept at the same time.
    micro_batches: usize,
}

/// Numbered inputs elsewhere.
enum Stash {
    /// In host memory, from and to a GPU that computes on this stream.
    Host(HostStash, Stream),
    Drives(TileStash),
}

impl Stash {
    fn put<T>(
        &mut self,
        piece: usize,
        fill: impl FnOnce(StashBuffer<'_>) -> Result<T, ComputeError>,
    ) -> Result<T, TrainError> {
        match self {
            Self::Host(stash, compute) => {
                let filled = fill(StashBuffer::Gpu(stash.room(compute)?))?;
                stash.put(piece, compute)?;
                Ok(filled)
            }
            Self::Drives(stash) => stash.put(piece, |buffer| Ok(fill(buffer)?)),
        }
    }

    fn fetch(&mut self, piece: usize) -> Result<(), TrainError> {
        match self {
            Self::Host(stash, _) => Ok(stash.fetch(piece)?),
            Self::Drives(stash) => Ok(stash.fetch(piece)?),
        }
    }

    fn take_input<T>(
        &mut self,
        piece: usize,
        take: impl FnOnce(StashBuffer<'_>) -> Result<T, ComputeError>,
    ) -> Result<T, TrainError> {
        match self {
            Self::Host(stash, compute) => {
                let taken = take(StashBuffer::Gpu(stash.buffer_of(piece, compute)?))?;
                stash.taken(piece, compute)?;
                Ok(taken)
            }
            Self::Drives(stash) => stash.take_piece(piece, |buffer| Ok(take(buffer)?)),
        }
    }
}

impl InputPlace {
    /// Makes the storage that `plan` chose, for as many micro-batches as are processed together. [`InputPlace::attach`] completes it.
    ///
    /// # Errors
    /// The GPU has too little memory free, or the host too little to pin.
    pub(super) fn from_plan(plan: &Plan, gpu: Option<&Gpu>) -> Result<Self, ComputeError> {
        let (micro_batches, bytes) = (plan.micro_batch_group, plan.input_bytes as usize);
        let inputs = (plan.units.len() - 2) * micro_batches;
        let stash = match (plan.inputs_in, gpu) {
            (InputsIn::Host, Some(gpu)) => {
                let stash = HostStash::new(gpu, inputs, bytes)?;
                Some(Stash::Host(stash, gpu.default_stream()))
            }
            (InputsIn::Drives, gpu) => Some(Stash::Drives(TileStash::new(gpu, bytes)?)),
            (InputsIn::Place, _) | (InputsIn::Host, None) => None,
        };
        Ok(Self {
            stash,
            micro_batches,
        })
    }

    /// Gives the storage the run's `scratch` tiles, if it keeps inputs on devices.
    ///
    /// # Errors
    /// The GPU fails; the system has no thread left.
    pub(super) fn attach(
        &mut self,
        scratch: Option<Scratch>,
        gpu: Option<&Gpu>,
    ) -> Result<(), TrainError> {
        match (&mut self.stash, scratch) {
            (Some(Stash::Drives(stash)), Some(scratch)) => Ok(stash.attach(scratch, gpu)?),
            (Some(Stash::Drives(_)), None) => panic!("the plan has an area for inputs"),
            (Some(Stash::Host(..)) | None, _) => Ok(()),
        }
    }

    /// Begins with the next `micro_batches`, no more than there is room for. All inputs of those before have been taken.
    pub(super) fn begin(&mut self, micro_batches: usize) {
        self.micro_batches = micro_batches;
    }

    /// Keeps the inputs of `block`, counted from 0, until they are taken.
    ///
    /// # Errors
    /// The GPU or the store failed.
    pub(super) fn keep(
        &mut self,
        block: usize,
        inputs: Vec<Activation>,
    ) -> Result<BlockInputs, TrainError> {
        let Some(stash) = &mut self.stash else {
            return Ok(inputs.into_iter().map(Input::Here).collect());
        };
        let first = block * self.micro_batches;
        let numbered = (first..).zip(inputs);
        numbered
            .map(|(piece, input)| {
                let away = stash.put(piece, |buffer| input.leave(buffer))?;
                Ok(Input::Away(piece, away))
            })
            .collect()
    }

    /// Starts bringing back the inputs that backward needs first: those of the last of `blocks`.
    ///
    /// # Errors
    /// The GPU or the store failed.
    pub(super) fn expect(&mut self, blocks: usize) -> Result<(), TrainError> {
        match &mut self.stash {
            Some(stash) if blocks > 0 => stash.fetch((blocks - 1) * self.micro_batches),
            _ => Ok(()),
        }
    }

    /// Returns an input to compute with, and starts bringing the next one back.
    ///
    /// # Errors
    /// The GPU or the store failed, or a device returned other bytes.
    pub(super) fn fetch(&mut self, input: Input) -> Result<Activation, TrainError> {
        let (piece, away) = match input {
            Input::Here(input) => return Ok(input),
            Input::Away(piece, away) => (piece, away),
        };
        let stash = self.stash.as_mut().expect("an input elsewhere has a stash");
        let input = stash.take_input(piece, |buffer| away.bring_back(buffer))?;
        if let Some(next) = next_piece(piece, self.micro_batches) {
            stash.fetch(next)?;
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
