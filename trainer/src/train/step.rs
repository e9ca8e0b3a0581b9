//! One optimizer step, top to bottom.
//!
//! Vertical over micro-batches: a unit is gathered once and serves all of them, so weights move twice a step (forward and
//! backward) however many micro-batches there are. What is kept from forward to backward is each block's input.
//!
//! ```text
//!   gather 0   embed      gather 1..L   blocks       gather L+1   head: loss and gradients      scatter L+1
//!   gather L..1           blocks again, backward     scatter L..1                    scatter 0  finish
//! ```
//!
//! Each kind of unit has a buffer; it holds the unit's weights until they are done with, then the unit's gradients. The
//! embedding's weights stay in theirs, so a tied head finds them there.

use std::time::Instant;

use kernels::adamw::{Hyper, Master};
use kernels::reduce::{GradType, sum_squares};
use swapper::{Op, StepIo, StepProgram, Swapper};

use super::TrainError;
use crate::compute::{Activation, ComputeError, Engine, GradSink, Tokens, UnitWeights};
use crate::config::{Batch, OptimizerSettings};
use crate::data::{Data, Windows};

/// The embedding's number among the units.
const EMBEDDING: usize = 0;

/// Everything a step needs but the weights, which the swapper has.
pub(super) struct Stepper {
    engine: Engine,
    batch: Batch,
    grad_type: GradType,
    elem_bytes: usize,
    embedding: UnitWeights,
    block: UnitWeights,
    head: UnitWeights,
    program: StepProgram,
    /// Of each unit's gradients, in this step.
    sum_squares: Vec<f64>,
}

/// A micro-batch as the engine takes it.
struct MicroBatch {
    inputs: Tokens,
    targets: Tokens,
}

/// What forward and backward of a step gave. Its gradients are with the swapper and wait for [`Stepper::finish`].
pub(super) struct Gradients {
    /// Mean over the step's tokens.
    pub(super) loss: f64,
    /// Global, before clipping.
    pub(super) norm: f64,
    /// Seconds of computing, without waiting for weights.
    pub(super) forward_s: f64,
    pub(super) backward_s: f64,
}

impl Stepper {
    pub(super) fn new(engine: Engine, batch: Batch, master: Master) -> Result<Self, ComputeError> {
        let head = engine.units().len() - 1;
        Ok(Self {
            embedding: engine.new_weights(EMBEDDING)?,
            block: engine.new_weights(1)?,
            head: engine.new_weights(head)?,
            program: program(engine.units().len()),
            sum_squares: vec![0.0; engine.units().len()],
            grad_type: match master {
                Master::SplitBf16 => GradType::Bf16,
                Master::Fp32 => GradType::Fp32,
                Master::Fp16WholeMaster => GradType::Fp16,
            },
            elem_bytes: master.param_bytes(),
            engine,
            batch,
        })
    }

    /// Forward and backward over the samples from `first_sample` on; every unit's gradients are scattered.
    pub(super) fn forward_backward(
        &mut self,
        swapper: &mut Swapper<Hyper>,
        data: &Data,
        first_sample: u64,
    ) -> Result<Gradients, TrainError> {
        let batches = self.micro_batches(data, first_sample)?;
        let head = self.engine.units().len() - 1;
        let (mut forward, mut backward) = (Clock::default(), Clock::default());
        swapper.begin_step(self.program.clone())?;

        self.gather(swapper, EMBEDDING)?;
        let mut activations = forward.of(|| {
            each(&batches, |batch| {
                self.engine.embed_forward(&self.embedding, &batch.inputs)
            })
        })?;
        let mut block_inputs = Vec::with_capacity(head);
        for block in 1..head {
            self.gather(swapper, block)?;
            let outputs = forward.of(|| {
                each(&activations, |input| {
                    self.engine.block_forward(&self.block, input)
                })
            })?;
            block_inputs.push(std::mem::replace(&mut activations, outputs));
        }

        self.gather(swapper, head)?;
        let mut head_grads = self.engine.new_grads(head);
        let mut embedding_grads = self.engine.new_grads(EMBEDDING);
        let (loss, mut grads) = backward
            .of(|| self.head(&batches, activations, &mut head_grads, &mut embedding_grads))?;
        self.scatter(swapper, head, head_grads)?;

        for block in (1..head).rev() {
            self.gather(swapper, block)?;
            let inputs = block_inputs.pop().expect("one for each block");
            let mut block_grads = self.engine.new_grads(block);
            grads = backward.of(|| {
                let pairs: Vec<_> = inputs.iter().zip(&grads).collect();
                each(&pairs, |(input, grad)| {
                    self.engine
                        .block_backward(&self.block, input, grad, &mut block_grads)
                })
            })?;
            self.scatter(swapper, block, block_grads)?;
        }

        backward.of(|| {
            let mut pairs = batches.iter().zip(&grads);
            pairs.try_for_each(|(batch, grad)| {
                self.engine
                    .embed_backward(&batch.inputs, grad, &mut embedding_grads)
            })
        })?;
        self.scatter(swapper, EMBEDDING, embedding_grads)?;

        // In the units' order, whatever order their gradients came in.
        let norm = self.sum_squares.iter().sum::<f64>().sqrt();
        Ok(Gradients {
            loss,
            norm,
            forward_s: forward.seconds,
            backward_s: backward.seconds,
        })
    }

    /// Mean loss over `batches` micro-batches of held-out text. Nothing must be pending.
    pub(super) fn evaluate(
        &mut self,
        swapper: &mut Swapper<Hyper>,
        data: &Data,
        batches: u64,
    ) -> Result<f64, TrainError> {
        let head = self.engine.units().len() - 1;
        let rows = self.batch.micro_batch;
        let batches: Vec<MicroBatch> = (0..batches)
            .map(|batch| self.tokens(&data.holdout(batch * rows as u64, rows)))
            .collect::<Result<_, _>>()?;
        swapper.begin_step(StepProgram::reading(0..=head))?;
        self.gather(swapper, EMBEDDING)?;
        let mut activations = each(&batches, |batch| {
            self.engine.embed_forward(&self.embedding, &batch.inputs)
        })?;
        for block in 1..head {
            self.gather(swapper, block)?;
            activations = each(&activations, |input| {
                self.engine.block_forward(&self.block, input)
            })?;
        }
        self.gather(swapper, head)?;
        let tied = self.engine.config().tied.then_some(&self.embedding);
        let mut loss = 0.0;
        for (batch, input) in batches.iter().zip(&activations) {
            loss += self
                .engine
                .head_loss(&self.head, tied, input, &batch.targets)?;
        }
        Ok(loss / batches.len() as f64)
    }

    /// Loss and the gradients that flow into the last block, each micro-batch weighted with its share of the step.
    fn head(
        &self,
        batches: &[MicroBatch],
        inputs: Vec<Activation>,
        head_grads: &mut GradSink,
        embedding_grads: &mut GradSink,
    ) -> Result<(f64, Vec<Activation>), ComputeError> {
        let share = 1.0 / batches.len() as f64;
        let mut loss = 0.0;
        let mut grads = Vec::with_capacity(batches.len());
        for (batch, input) in batches.iter().zip(inputs) {
            let tied = self
                .engine
                .config()
                .tied
                .then_some((&self.embedding, &mut *embedding_grads));
            let (batch_loss, grad) = self.engine.head_loss_backward(
                &self.head,
                tied,
                &input,
                &batch.targets,
                share,
                head_grads,
            )?;
            loss += batch_loss * share;
            grads.push(grad);
        }
        Ok((loss, grads))
    }

    /// Brings a unit's weights into its buffer.
    fn gather(&mut self, swapper: &mut Swapper<Hyper>, unit: usize) -> Result<(), TrainError> {
        let elem_bytes = self.elem_bytes;
        let buffer = self.buffer(unit).bytes_mut();
        swapper.gather(unit, &mut |elems, bytes| {
            buffer[elems.start as usize * elem_bytes..elems.end as usize * elem_bytes]
                .copy_from_slice(bytes);
        })?;
        Ok(())
    }

    /// Hands a unit's gradients over. Its weights are gone from the buffer after.
    fn scatter(
        &mut self,
        swapper: &mut Swapper<Hyper>,
        unit: usize,
        mut grads: GradSink,
    ) -> Result<(), TrainError> {
        let (elem_bytes, grad_type) = (self.elem_bytes, self.grad_type);
        let buffer = &mut self.buffer(unit).bytes_mut()[..grads.size_bytes()];
        grads.finish(buffer)?;
        // Over the whole unit, not tile by tile: the norm's bits then do not depend on how units are cut.
        let squares = sum_squares(grad_type, buffer);
        swapper.scatter(unit, &mut |elems, slot| {
            slot.copy_from_slice(
                &buffer[elems.start as usize * elem_bytes..elems.end as usize * elem_bytes],
            );
        })?;
        self.sum_squares[unit] = squares;
        Ok(())
    }

    fn buffer(&mut self, unit: usize) -> &mut UnitWeights {
        match unit {
            EMBEDDING => &mut self.embedding,
            unit if unit == self.engine.units().len() - 1 => &mut self.head,
            _ => &mut self.block,
        }
    }

    fn micro_batches(
        &self,
        data: &Data,
        first_sample: u64,
    ) -> Result<Vec<MicroBatch>, ComputeError> {
        let rows = self.batch.micro_batch;
        let firsts =
            (0..self.batch.micro_batches).map(|batch| first_sample + (batch * rows) as u64);
        firsts
            .map(|first| self.tokens(&data.samples(first, rows)))
            .collect()
    }

    fn tokens(&self, windows: &Windows) -> Result<MicroBatch, ComputeError> {
        let (rows, seq_len) = (self.batch.micro_batch, self.batch.seq_len);
        let vocab_size = self.engine.config().vocab_size;
        Ok(MicroBatch {
            inputs: Tokens::inputs(&windows.inputs, rows, seq_len, vocab_size)?,
            targets: Tokens::targets(&windows.targets, rows, seq_len, vocab_size)?,
        })
    }
}

/// Ends a step: the update, clipped, with everything that follows from the step's number.
pub(super) fn finish(
    swapper: &mut Swapper<Hyper>,
    optimizer: &OptimizerSettings,
    clipping: f64,
    step: u64,
    lr: f64,
    norm: f64,
    blob: Vec<u8>,
) -> Result<StepIo, TrainError> {
    let hyper = Hyper {
        lr: lr as f32,
        beta1: optimizer.betas[0] as f32,
        beta2: optimizer.betas[1] as f32,
        eps: optimizer.eps as f32,
        weight_decay: optimizer.weight_decay as f32,
        step,
        grad_scale: clip_factor(clipping, norm) as f32,
    };
    Ok(swapper.finish_step(hyper, blob)?)
}

/// What gradients of global norm `norm` are multiplied with, so that it is at most `clipping` (0: any).
fn clip_factor(clipping: f64, norm: f64) -> f64 {
    if clipping == 0.0 {
        1.0
    } else {
        (clipping / (norm + 1e-6)).min(1.0)
    }
}

/// The uses of a step, in the order of [`Stepper::forward_backward`].
fn program(units: usize) -> StepProgram {
    let head = units - 1;
    let forward = (0..units).map(|unit| Op::Gather { unit });
    let blocks = (1..head)
        .rev()
        .flat_map(|unit| [Op::Gather { unit }, Op::Scatter { unit }]);
    let ops = forward
        .chain([Op::Scatter { unit: head }])
        .chain(blocks)
        .chain([Op::Scatter { unit: EMBEDDING }]);
    StepProgram::new(ops.collect()).expect("gathers, and one scatter a unit")
}

/// `f` of each, in order, up to the first error.
fn each<T, R>(
    items: &[T],
    f: impl FnMut(&T) -> Result<R, ComputeError>,
) -> Result<Vec<R>, ComputeError> {
    items.iter().map(f).collect()
}

/// Seconds spent in what it was asked to time.
#[derive(Default)]
struct Clock {
    seconds: f64,
}

impl Clock {
    fn of<R>(&mut self, f: impl FnOnce() -> R) -> R {
        let started = Instant::now();
        let result = f();
        self.seconds += started.elapsed().as_secs_f64();
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_are_clipped_to_the_norm_and_never_enlarged() {
        assert_eq!(clip_factor(1.0, 0.5), 1.0);
        assert!((clip_factor(1.0, 4.0) - 0.25).abs() < 1e-6);
        assert_eq!(clip_factor(0.0, 1e9), 1.0);
        assert_eq!(clip_factor(1.0, 0.0), 1.0);
    }
}
