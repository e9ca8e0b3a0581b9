//! Forward and backward of each unit.

mod head;

use std::rc::Rc;
use std::sync::Arc;

use kernels::gpu::DeviceBuffer;
use kernels_torch::collective::TensorExchange;
use kernels_torch::fp8::Fp8Kernels;
use kernels_torch::fused::FusedKernels;
use kernels_torch::{CudnnAttention, use_gpu, vjp};
use tch::{Device, Kind, Tensor};

use super::block;
use super::documents::Batch;
use super::dropout::Masks;
use super::embedding;
use super::explicit::{self, BlockWeights, Ops, Products};
use super::params::Params;
use super::positions::Rotary;
use super::sequence::Sequence;
use super::values::kind_of;
use super::{Activation, ComputeDevice, ComputeError, GradSink, GradSums, Tokens, UnitWeights};
use training_run::computation::{AttentionKernel, Checkpointing, Matmuls};
use training_run::computation::{
    DEVICE_LOGITS_ELEMS_MAX, LOGITS_ELEMS_MAX, block_is_written_out, head_is_written_out,
};
use training_run::model::{Dropout, Dtype, ModelConfig, Positions, UnitLayout, unit_layouts};

/// Sets up torch for the process: `threads` for its operators, and only deterministic algorithms.
///
/// # Errors
/// Torch fails.
pub fn set_up(threads: usize) -> Result<(), ComputeError> {
    kernels_torch::set_threads(threads)?;
    Ok(kernels_torch::set_deterministic(true)?)
}

/// A model's computation without its weights.
pub struct Engine {
    config: ModelConfig,
    units: Vec<UnitLayout>,
    kind: Kind,
    seq_len: usize,
    on: ComputeDevice,
    /// Torch's name of the device.
    device: Device,
    arithmetic: Arithmetic,
    /// How an explicit block computes its products.
    products: Products,
    /// Tables of rotary positions, if the model uses them.
    rotary: Option<Rotary>,
    /// cuDNN's attention; `None`: torch's.
    cudnn: Option<CudnnAttention>,
    logits_elems_max: usize,
    checkpointing: Checkpointing,
    /// Chunks of a block's MLP.
    tiles: usize,
    dropout: Dropout,
    dropout_seed: u64,
    /// The ranks that divide each sequence; `None` if this one has whole sequences.
    sequence: Option<Sequence>,
}

/// How blocks and the head are computed.
enum Arithmetic {
    /// In torch operators, with autograd.
    Autograd,
    /// With an explicit backward if the model's form has one (`explicit/mod.rs`), otherwise with autograd.
    Explicit(Ops),
}

impl Engine {
    /// Makes the engine for `config` in `dtype`, for sequences of up to `seq_len` tokens.
    ///
    /// # Errors
    /// The configuration is invalid; out of memory.
    pub fn new(config: &ModelConfig, dtype: Dtype, seq_len: usize) -> Result<Self, ComputeError> {
        Self::of_kind(config, kind_of(dtype), seq_len)
    }

    /// Like [`Engine::new`], computing on `device`. Weights and gradient sinks passed to the engine must come
    /// from it, and the calling thread must be the one that computes.
    ///
    /// # Errors
    /// Same as [`Engine::new`]; torch has no GPU support or does not see the GPU.
    pub fn on(
        device: &ComputeDevice,
        config: &ModelConfig,
        dtype: Dtype,
        seq_len: usize,
    ) -> Result<Self, ComputeError> {
        let engine = Self::new(config, dtype, seq_len)?;
        let ComputeDevice::Gpu(gpu) = device else {
            return Ok(engine);
        };
        let torch_device = use_gpu(gpu)?;
        let rotary = engine.rotary.as_ref().map(|r| r.on(torch_device));
        Ok(Engine {
            on: device.clone(),
            device: torch_device,
            arithmetic: Arithmetic::Explicit(match dtype {
                // The fused kernels support bf16 and fp32 only.
                Dtype::Fp16 => Ops::Plain,
                Dtype::Bf16 | Dtype::Fp32 => {
                    Ops::Fused(Box::new(FusedKernels::compile(gpu, torch_device)?))
                }
            }),
            rotary: rotary.transpose()?,
            logits_elems_max: if head_is_written_out(config) {
                DEVICE_LOGITS_ELEMS_MAX
            } else {
                LOGITS_ELEMS_MAX
            },
            ..engine
        })
    }

    pub(super) fn of_kind(
        config: &ModelConfig,
        kind: Kind,
        seq_len: usize,
    ) -> Result<Self, ComputeError> {
        config.validate()?;
        let rotary = match config.architecture.form().positions {
            Positions::Rotary => Some(Rotary::new(config, seq_len, kind)?),
            Positions::Learned => None,
        };
        Ok(Engine {
            config: config.clone(),
            units: unit_layouts(config),
            kind,
            seq_len,
            on: ComputeDevice::Cpu,
            device: Device::Cpu,
            arithmetic: Arithmetic::Autograd,
            products: Products::InKind,
            rotary,
            cudnn: None,
            logits_elems_max: LOGITS_ELEMS_MAX,
            checkpointing: Checkpointing::default(),
            tiles: 1,
            dropout: Dropout::NONE,
            dropout_seed: 0,
            sequence: None,
        })
    }

    #[cfg(test)]
    pub(super) fn with_logits_elems_max(mut self, logits_elems_max: usize) -> Self {
        self.logits_elems_max = logits_elems_max;
        self
    }

    /// Enables dropout with the rates in `dropout`, determined by `seed` and sample numbers. Applies only to
    /// numbered tokens.
    pub fn leaving_out(mut self, dropout: Dropout, seed: u64) -> Self {
        self.dropout = dropout;
        self.dropout_seed = seed;
        self
    }

    /// Computes attention with `kernel` where blocks have an explicit backward. With `deterministic`, results repeat in bits.
    ///
    /// # Errors
    /// The kernels cannot be used on this device.
    pub fn with_attention(
        mut self,
        kernel: AttentionKernel,
        deterministic: bool,
    ) -> Result<Self, ComputeError> {
        if !deterministic && self.device != Device::Cpu {
            kernels_torch::set_deterministic(false)?;
        }
        self.cudnn = match (kernel, &self.on) {
            (AttentionKernel::Cudnn, ComputeDevice::Gpu(gpu)) => {
                Some(CudnnAttention::open(gpu, deterministic)?)
            }
            (AttentionKernel::Cudnn, ComputeDevice::Cpu) => {
                panic!("the plan chooses cuDNN's attention for a GPU only")
            }
            (AttentionKernel::Torch, _) => None,
        };
        Ok(self)
    }

    /// Computes the products of blocks in `matmuls`, which needs blocks with an explicit backward.
    ///
    /// # Errors
    /// The kernels cannot be compiled for this device.
    pub fn with_matmuls(mut self, matmuls: Matmuls) -> Result<Self, ComputeError> {
        self.products = match (matmuls, &self.on) {
            (Matmuls::InDtype, _) => Products::InKind,
            (Matmuls::Fp8, ComputeDevice::Gpu(gpu)) => {
                Products::Fp8(Box::new(Fp8Kernels::compile(gpu, self.device)?))
            }
            (Matmuls::Fp8, ComputeDevice::Cpu) => panic!("the plan refuses 8-bit products there"),
        };
        Ok(self)
    }

    /// Sets what a block keeps from forward to backward. Has no effect on blocks without an explicit
    /// backward, as on the CPU.
    pub fn with_checkpointing(mut self, checkpointing: impl Into<Checkpointing>) -> Self {
        self.checkpointing = checkpointing.into();
        self
    }

    /// Computes the MLP of blocks in `tiles` chunks of its intermediate size, one after the other, if `tiles`
    /// is at least 2. This needs less memory and gives the same numbers within the rounding of sums. Such
    /// blocks have no explicit backward.
    pub fn in_tiles(mut self, tiles: usize) -> Self {
        assert!((1..=self.config.intermediate_size).contains(&tiles));
        self.tiles = tiles;
        self
    }

    /// Divides each sequence among the ranks of `exchange`. This rank's tokens are an equal part of each, in the order of the ranks
    /// ([`Tokens::part_of`]).
    ///
    /// Panics if the model's heads cannot be divided.
    pub fn in_sequence(mut self, exchange: Option<Arc<TensorExchange>>) -> Self {
        self.sequence = exchange.map(|exchange| Sequence::new(exchange, &self.config));
        self
    }

    /// Checks that all exchanges with the other ranks of a sequence succeeded. Called after waiting for a GPU and before its results are
    /// used.
    ///
    /// # Errors
    /// A rank is gone.
    pub fn check(&self) -> Result<(), ComputeError> {
        match &self.sequence {
            Some(sequence) => Ok(sequence.exchange().check()?),
            None => Ok(()),
        }
    }

    /// Sets what blocks keep from now on, and returns the previous setting.
    pub fn set_checkpointing(&mut self, checkpointing: Checkpointing) -> Checkpointing {
        std::mem::replace(&mut self.checkpointing, checkpointing)
    }

    /// Uses torch operators instead of fused kernels; tests compare the kernels with them.
    pub fn without_fused_kernels(mut self) -> Self {
        if let Arithmetic::Explicit(ops) = &mut self.arithmetic {
            *ops = Ops::Plain;
        }
        self
    }

    /// Uses the explicit backward of GPUs in torch operators on the CPU.
    #[cfg(test)]
    pub(crate) fn written_out(mut self) -> Self {
        self.arithmetic = Arithmetic::Explicit(Ops::Plain);
        self
    }

    /// Computes products in 8 bits with torch operators, on any device; tests compare the matrix units with them.
    pub fn with_plain_fp8(mut self) -> Self {
        self.products = Products::Fp8Plain;
        self
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The units in forward order: embedding, blocks, head.
    pub fn units(&self) -> &[UnitLayout] {
        &self.units
    }

    /// Allocates memory for the weights of unit number `unit`.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new_weights(&self, unit: usize) -> Result<UnitWeights, ComputeError> {
        self.new_padded_weights(unit, self.units[unit].elems)
    }

    /// Like [`Engine::new_weights`], with a buffer of `padded_elems`, so that each of several ranks owns an
    /// equal part.
    ///
    /// Panics if `padded_elems` is less than the unit's length.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new_padded_weights(
        &self,
        unit: usize,
        padded_elems: usize,
    ) -> Result<UnitWeights, ComputeError> {
        UnitWeights::on(&self.on, &self.units[unit], self.kind, padded_elems)
    }

    /// Makes a view of the weights of unit number `unit` at the start of a GPU's `buffer`.
    ///
    /// Panics if this engine computes on the CPU, or the buffer is shorter than the unit.
    ///
    /// # Errors
    /// Torch fails.
    pub fn weights_in(
        &self,
        unit: usize,
        buffer: &DeviceBuffer,
    ) -> Result<UnitWeights, ComputeError> {
        assert_ne!(
            self.device,
            Device::Cpu,
            "an engine on the CPU cannot use GPU memory"
        );
        UnitWeights::over(buffer, &self.units[unit], self.kind)
    }

    /// Numbers of weights and gradients.
    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// Moves tokens to the device of this engine. Tokens on another device also work, but are copied at each
    /// use.
    ///
    /// # Errors
    /// Out of memory.
    pub fn take_tokens(&self, tokens: Tokens) -> Result<Tokens, ComputeError> {
        tokens.moved(self.device)
    }

    /// Makes an empty sum of the gradients of unit number `unit`.
    pub fn new_grads(&self, unit: usize) -> GradSink {
        GradSink::on(self.device, &self.units[unit], self.kind)
    }

    /// Allocates memory in which the gradients of unit number `unit` are summed over groups of micro-batches.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new_sums(&self, unit: usize) -> Result<GradSums, ComputeError> {
        GradSums::on(self.device, &self.units[unit], self.kind)
    }

    /// Computes the embedding of the tokens, [micro_batch, seq_len, hidden_size], including learned
    /// positions.
    ///
    /// # Errors
    /// A sequence is too long; out of memory.
    pub fn embed_forward(
        &self,
        weights: &UnitWeights,
        tokens: &Tokens,
    ) -> Result<Activation, ComputeError> {
        self.check_tokens(tokens)?;
        let params = Params::new(&self.units[0], weights, false)?;
        let ids = tokens.ids_on(self.device)?;
        let batch = self.batch(tokens)?;
        let masks = self.masks(0, batch.first_sample);
        let rows = embedding::forward(&params, &ids, &batch, &masks)?;
        Ok(Activation::new(rows, &batch))
    }

    /// Computes the output of the block that is unit number `unit`. Stores what is kept for backward in
    /// `input`.
    ///
    /// # Errors
    /// Out of memory.
    pub fn block_forward(
        &self,
        unit: usize,
        weights: &UnitWeights,
        input: &Activation,
    ) -> Result<Activation, ComputeError> {
        let output = match self.block_ops() {
            None => {
                let _no_grad = tch::no_grad_guard();
                let block = self.block(unit, weights, &input.batch, false)?;
                match self.tiles {
                    1 => block.forward(&input.tensor)?,
                    tiles => block.forward_tiled(&input.tensor, tiles)?,
                }
            }
            Some(ops) => {
                let level = (self.checkpointing).of_block(unit - 1, self.units.len() - 2);
                let (output, kept) = self
                    .explicit_block(unit, ops, weights, &input.batch)?
                    .forward(&input.tensor, level)?;
                input.kept.replace(kept);
                output
            }
        };
        Ok(Activation::new(output, &input.batch))
    }

    /// Recomputes what a block did not keep and computes its backward pass: adds the gradients of its weights
    /// to `grads`, returns the gradient of its input.
    ///
    /// # Errors
    /// Out of memory.
    pub fn block_backward(
        &self,
        unit: usize,
        weights: &UnitWeights,
        input: &Activation,
        grad_output: &Activation,
        grads: &mut GradSink,
    ) -> Result<Activation, ComputeError> {
        if let Some(ops) = self.block_ops() {
            let kept = input.kept.take();
            let block = self.explicit_block(unit, ops, weights, &input.batch)?;
            let grad_input = block.backward(&input.tensor, kept, &grad_output.tensor, grads)?;
            return Ok(Activation::new(grad_input, &input.batch));
        }
        let block = self.block(unit, weights, &input.batch, true)?;
        if self.tiles > 1 {
            let (x, grad) = (&input.tensor, &grad_output.tensor);
            let grad_input = block.backward_tiled(x, grad, self.tiles, grads)?;
            return Ok(Activation::new(grad_input, &input.batch));
        }
        if self.sequence.is_some() {
            let (x, grad) = (&input.tensor, &grad_output.tensor);
            let grad_input = block.backward_in_halves(x, grad, grads)?;
            return Ok(Activation::new(grad_input, &input.batch));
        }
        let leaf = input.tensor.f_detach()?.set_requires_grad(true);
        let output = block.forward(&leaf)?;
        let inputs: Vec<&Tensor> = block.params.all().iter().chain([&leaf]).collect();
        let mut found = vjp(&[&output], &[&grad_output.tensor], &inputs)?;
        let grad_input = found.pop().expect("each input has a gradient");
        for (param, grad) in found.into_iter().enumerate() {
            grads.add(param, grad)?;
        }
        Ok(Activation::new(grad_input, &input.batch))
    }

    /// Adds the embedding's gradients to `grads`.
    ///
    /// # Errors
    /// Out of memory.
    pub fn embed_backward(
        &self,
        tokens: &Tokens,
        grad_output: &Activation,
        grads: &mut GradSink,
    ) -> Result<(), ComputeError> {
        self.check_tokens(tokens)?;
        let ids = tokens.ids_on(self.device)?;
        let batch = self.batch(tokens)?;
        let masks = self.masks(0, batch.first_sample);
        let (unit, grad) = (&self.units[0], &grad_output.tensor);
        let untrained = self.config.pad_token_id;
        embedding::backward(unit, &ids, &batch, &masks, grad, untrained, grads)
    }

    /// Returns the operators of explicit blocks, if blocks have an explicit backward.
    fn block_ops(&self) -> Option<&Ops> {
        match &self.arithmetic {
            Arithmetic::Explicit(ops)
                if self.tiles == 1 && block_is_written_out(&self.config, &self.dropout) =>
            {
                Some(ops)
            }
            _ => None,
        }
    }

    fn block<'a>(
        &'a self,
        unit: usize,
        weights: &UnitWeights,
        batch: &Batch,
        grad: bool,
    ) -> Result<block::AutogradBlock<'a>, ComputeError> {
        Ok(block::AutogradBlock {
            config: &self.config,
            rotary: self.rotary(batch)?,
            params: Params::new(&self.units[unit], weights, grad)?,
            window: self.config.window(unit - 1),
            documents: batch.documents.clone(),
            masks: self.masks(unit, batch.first_sample),
            sequence: self.sequence.as_ref(),
        })
    }

    fn explicit_block<'a>(
        &'a self,
        unit: usize,
        ops: &'a Ops,
        weights: &UnitWeights,
        batch: &Batch,
    ) -> Result<explicit::Block<'a>, ComputeError> {
        check_unit(&self.units[1], weights);
        Ok(explicit::Block {
            ops,
            products: &self.products,
            config: &self.config,
            rotary: self
                .rotary(batch)?
                .expect("an explicit block has rotary positions"),
            documents: batch.documents.clone(),
            window: self.config.window(unit - 1),
            cudnn: self.cudnn.as_ref(),
            sequence: self.sequence.as_ref(),
            weights: BlockWeights::new(&self.units[1], weights)?,
        })
    }

    /// Returns what blocks need of `tokens`, on the device of this engine.
    fn batch(&self, tokens: &Tokens) -> Result<Batch, ComputeError> {
        let mut batch = tokens.batch().clone();
        if let Some(documents) = &batch.documents
            && documents.positions.device() != self.device
        {
            batch.documents = Some(Rc::new(documents.on(self.device)?));
        }
        Ok(batch)
    }

    /// Returns the angles of a micro-batch's tokens, if positions are rotary.
    fn rotary(&self, batch: &Batch) -> Result<Option<Rotary>, ComputeError> {
        let of = |tables: &Rotary| match &batch.documents {
            Some(documents) => tables.at(&documents.positions),
            None => Ok(tables.shallow_clone()),
        };
        self.rotary.as_ref().map(of).transpose()
    }

    /// Returns the dropout masks; samples without a number have no dropout.
    pub(super) fn masks(&self, unit: usize, first_sample: Option<u64>) -> Masks {
        match first_sample {
            Some(first) => Masks::new(self.dropout, self.dropout_seed, unit, first),
            None => Masks::NONE,
        }
    }

    fn check_tokens(&self, tokens: &Tokens) -> Result<(), ComputeError> {
        assert!(
            tokens.vocab_size() <= self.config.vocab_size,
            "tokens were checked against this model's vocabulary"
        );
        assert_eq!(
            tokens.counted(),
            tokens.ids.numel(),
            "inputs have no ignored tokens"
        );
        let seq_len = tokens.seq_len();
        if seq_len > self.seq_len {
            return Err(ComputeError::SequenceTooLong {
                seq_len,
                max: self.seq_len,
            });
        }
        Ok(())
    }
}

fn check_unit(layout: &UnitLayout, weights: &UnitWeights) {
    assert_eq!(
        weights.elems(),
        layout.elems,
        "the weights belong to a unit like {}",
        layout.name
    );
}
