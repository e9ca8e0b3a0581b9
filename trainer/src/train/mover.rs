//! Brings units' weights from the swapper to where they are computed with, and their gradients back.
//!
//! Each kind of unit has buffers of its own: one for the embedding (a tied head finds it there), one for the head, and
//! one or more that blocks take in turn. On the host a buffer holds the unit's weights until they are done with, then the
//! unit's gradients.

use kernels::adamw::{Hyper, Master};
use kernels::reduce::{GradType, sum_squares};
use swapper::Swapper;

use super::TrainError;
use super::turns::{BLOCK_BUFFERS_AHEAD, EMBEDDING};
use crate::compute::{ComputeError, Engine, GradSink, UnitWeights};

/// Units in host memory, computed with by the processor.
pub(super) struct Mover {
    elem_bytes: usize,
    grad_type: GradType,
    head: usize,
    embedding: UnitWeights,
    blocks: Vec<UnitWeights>,
    last: UnitWeights,
    /// Which block is in each of `blocks`; the next one takes the oldest's place.
    held: Vec<usize>,
    next: usize,
    /// Of each unit's gradients, in this step.
    sum_squares: Vec<f64>,
}

impl Mover {
    /// Buffers for `engine`'s units; `ahead` as in [`super::turns`].
    ///
    /// # Errors
    /// Out of memory.
    pub(super) fn new(engine: &Engine, master: Master, ahead: bool) -> Result<Self, ComputeError> {
        let head = engine.units().len() - 1;
        let buffers = if ahead { BLOCK_BUFFERS_AHEAD } else { 1 };
        Ok(Self {
            elem_bytes: master.param_bytes(),
            grad_type: match master {
                Master::SplitBf16 => GradType::Bf16,
                Master::Fp32 => GradType::Fp32,
                Master::Fp16WholeMaster => GradType::Fp16,
            },
            head,
            embedding: engine.new_weights(EMBEDDING)?,
            blocks: (0..buffers)
                .map(|_| engine.new_weights(1))
                .collect::<Result<_, _>>()?,
            last: engine.new_weights(head)?,
            held: vec![usize::MAX; buffers],
            next: 0,
            sum_squares: vec![0.0; head + 1],
        })
    }

    /// Brings a unit's weights into a buffer.
    pub(super) fn gather(
        &mut self,
        swapper: &mut Swapper<Hyper>,
        unit: usize,
    ) -> Result<(), TrainError> {
        if unit != EMBEDDING && unit != self.head {
            self.held[self.next] = unit;
            self.next = (self.next + 1) % self.held.len();
        }
        let elem_bytes = self.elem_bytes;
        let buffer = self.buffer(unit).bytes_mut();
        swapper.gather(unit, |parts| {
            for (elems, bytes) in parts {
                buffer[elems.start as usize * elem_bytes..elems.end as usize * elem_bytes]
                    .copy_from_slice(bytes);
            }
            Ok(())
        })
    }

    /// A unit's weights, which were gathered.
    pub(super) fn weights(&self, unit: usize) -> &UnitWeights {
        match unit {
            EMBEDDING => &self.embedding,
            unit if unit == self.head => &self.last,
            unit => &self.blocks[self.block_at(unit)],
        }
    }

    /// Takes a unit's complete gradients. Its weights are gone from the buffer after.
    pub(super) fn reduce(&mut self, unit: usize, mut grads: GradSink) -> Result<(), TrainError> {
        let grad_type = self.grad_type;
        let buffer = &mut self.buffer(unit).bytes_mut()[..grads.size_bytes()];
        grads.finish(buffer)?;
        // Over the whole unit, not tile by tile: the norm's bits then do not depend on how units are cut.
        self.sum_squares[unit] = sum_squares(grad_type, buffer);
        Ok(())
    }

    /// Hands a unit's gradients to the swapper.
    pub(super) fn scatter(
        &mut self,
        swapper: &mut Swapper<Hyper>,
        unit: usize,
    ) -> Result<(), TrainError> {
        let elem_bytes = self.elem_bytes;
        let buffer = self.buffer(unit).bytes_mut();
        swapper.scatter(unit, |parts| {
            for (elems, grad) in parts {
                grad.copy_from_slice(
                    &buffer[elems.start as usize * elem_bytes..elems.end as usize * elem_bytes],
                );
            }
            Ok(())
        })
    }

    /// The norm of all gradients of the step, before clipping.
    pub(super) fn norm(&self) -> f64 {
        // In the units' order, whatever order their gradients came in.
        self.sum_squares.iter().sum::<f64>().sqrt()
    }

    fn block_at(&self, unit: usize) -> usize {
        let at = self.held.iter().position(|&held| held == unit);
        at.expect("a unit is gathered before it is used")
    }

    fn buffer(&mut self, unit: usize) -> &mut UnitWeights {
        match unit {
            EMBEDDING => &mut self.embedding,
            unit if unit == self.head => &mut self.last,
            unit => {
                let at = self.block_at(unit);
                &mut self.blocks[at]
            }
        }
    }
}
