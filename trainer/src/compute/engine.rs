//! Forward and backward of each unit.

use kernels::gpu::DeviceBuffer;
use kernels_torch::fused::Fused;
use kernels_torch::{use_gpu, vjp};
use tch::{Device, Kind, Tensor};

use super::block;
use super::dropout::Masks;
use super::embedding;
use super::explicit::{self, BlockWeights, HeadWeights, Ops};
use super::head::{self, LOGITS_ELEMS_MAX};
use super::norm::NormWeights;
use super::params::Params;
use super::positions::Rotary;
use super::values::kind_of;
use super::{
    Activation, ActivationCheckpointing, ComputeDevice, ComputeError, GradSink, LossHandle, Tokens,
    UnitWeights,
};
use crate::model::{Dropout, Dtype, ModelConfig, ParamRole, Positions, UnitLayout, unit_layouts};

/// Sets torch up for the process: `threads` for its operators, and only algorithms that give the same bits each time.
///
/// # Errors
/// What torch throws.
pub fn set_up(threads: usize) -> Result<(), ComputeError> {
    kernels_torch::set_threads(threads)?;
    Ok(kernels_torch::set_deterministic(true)?)
}

/// A model's arithmetic, without its weights.
pub struct Engine {
    config: ModelConfig,
    units: Vec<UnitLayout>,
    kind: Kind,
    seq_len: usize,
    on: ComputeDevice,
    /// The same as torch names it.
    device: Device,
    arithmetic: Arithmetic,
    /// Of models whose positions are turned in.
    rotary: Option<Rotary>,
    logits_elems_max: usize,
    checkpointing: ActivationCheckpointing,
    /// Slices of a block's feed-forward half.
    tiles: usize,
    dropout: Dropout,
    dropout_seed: u64,
}

/// How blocks and the head are computed.
enum Arithmetic {
    /// In torch's operators, back by its autograd.
    Autograd,
    /// Both ways written out, where the model's form is (`explicit/mod.rs`); as above where it is not.
    Explicit(Ops),
}

impl Engine {
    /// The arithmetic of `config` in `dtype`, for sequences of up to `seq_len` tokens.
    ///
    /// # Errors
    /// A configuration that describes no model; out of memory.
    pub fn new(config: &ModelConfig, dtype: Dtype, seq_len: usize) -> Result<Self, ComputeError> {
        Self::of_kind(config, kind_of(dtype), seq_len)
    }

    /// As [`Engine::new`], computing on `device`. What is given to the engine afterwards comes from it (weights, gradient
    /// sinks), and the thread that calls this is the one that computes.
    ///
    /// # Errors
    /// As [`Engine::new`]; no GPU half of torch, or one that does not see the GPU.
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
                // The fused kernels know bf16 and fp32.
                Dtype::Fp16 => Ops::Plain,
                Dtype::Bf16 | Dtype::Fp32 => {
                    Ops::Fused(Box::new(Fused::compile(gpu, torch_device)?))
                }
            }),
            rotary: rotary.transpose()?,
            logits_elems_max: if explicit::head_is_written_out(config) {
                explicit::LOGITS_ELEMS_MAX
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
            rotary,
            logits_elems_max: LOGITS_ELEMS_MAX,
            checkpointing: ActivationCheckpointing::Full,
            tiles: 1,
            dropout: Dropout::NONE,
            dropout_seed: 0,
        })
    }

    #[cfg(test)]
    pub(super) fn with_logits_elems_max(mut self, logits_elems_max: usize) -> Self {
        self.logits_elems_max = logits_elems_max;
        self
    }

    /// Leaves out at random, as `seed` and the samples' numbers choose, what `dropout` says. Only for tokens that are numbered.
    pub fn leaving_out(mut self, dropout: Dropout, seed: u64) -> Self {
        self.dropout = dropout;
        self.dropout_seed = seed;
        self
    }

    /// Keeps more of a block from forward to backward. No effect where a block is not written out, as on the CPU.
    pub fn with_checkpointing(mut self, checkpointing: ActivationCheckpointing) -> Self {
        self.checkpointing = checkpointing;
        self
    }

    /// Computes blocks' feed-forward halves in `tiles` slices of their intermediate size, one after the other, from two on: less
    /// memory, the same numbers within the rounding of sums. Such blocks are not written out.
    pub fn in_tiles(mut self, tiles: usize) -> Self {
        assert!((1..=self.config.intermediate_size).contains(&tiles));
        self.tiles = tiles;
        self
    }

    /// Changes what blocks keep from now on, and says what they kept so far.
    pub fn set_checkpointing(
        &mut self,
        checkpointing: ActivationCheckpointing,
    ) -> ActivationCheckpointing {
        std::mem::replace(&mut self.checkpointing, checkpointing)
    }

    /// The same arithmetic in torch's operators alone, without fused kernels: what those are held against.
    pub fn without_fused_kernels(mut self) -> Self {
        if let Arithmetic::Explicit(ops) = &mut self.arithmetic {
            *ops = Ops::Plain;
        }
        self
    }

    /// The GPU's way of computing, in torch's operators on the CPU.
    #[cfg(test)]
    pub(crate) fn written_out(mut self) -> Self {
        self.arithmetic = Arithmetic::Explicit(Ops::Plain);
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

    /// Room for unit number `unit`'s weights.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new_weights(&self, unit: usize) -> Result<UnitWeights, ComputeError> {
        self.new_padded_weights(unit, self.units[unit].elems)
    }

    /// As [`Engine::new_weights`], the buffer `padded_elems` long: so that each of several ranks owns an equal part.
    ///
    /// Panics if that is less than the unit's.
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

    /// Unit number `unit`'s weights where they lie in a GPU's `buffer`, from its start on.
    ///
    /// Panics if this engine computes on the CPU, or the buffer is shorter than the unit.
    ///
    /// # Errors
    /// What torch throws.
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

    /// The same tokens where this engine computes. Tokens elsewhere are taken too, but copied at each use.
    ///
    /// # Errors
    /// Out of memory.
    pub fn take_tokens(&self, tokens: Tokens) -> Result<Tokens, ComputeError> {
        tokens.moved(self.device)
    }

    /// An empty sum of unit number `unit`'s gradients.
    pub fn new_grads(&self, unit: usize) -> GradSink {
        GradSink::on(self.device, &self.units[unit], self.kind)
    }

    /// The tokens' rows of the embedding, [micro_batch, seq_len, hidden_size], with their positions' where those are learned.
    ///
    /// # Errors
    /// Sequences that are too long; out of memory.
    pub fn embed_forward(
        &self,
        weights: &UnitWeights,
        tokens: &Tokens,
    ) -> Result<Activation, ComputeError> {
        self.check_tokens(tokens)?;
        let params = Params::new(&self.units[0], weights, false)?;
        let ids = tokens.ids_on(self.device)?;
        let masks = self.masks(0, tokens.first_sample());
        let rows = embedding::forward(&params, &ids, &masks)?;
        Ok(Activation::new(rows, tokens.first_sample()))
    }

    /// The output of the block that is unit number `unit`. What is kept for a backward pass lies with `input`.
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
                let block = self.block(unit, weights, input.first_sample, false)?;
                match self.tiles {
                    1 => block.forward(&input.tensor)?,
                    tiles => block.forward_tiled(&input.tensor, tiles)?,
                }
            }
            Some(ops) => {
                let (output, kept) = self
                    .explicit_block(ops, weights)?
                    .forward(&input.tensor, self.checkpointing)?;
                input.kept.replace(kept);
                output
            }
        };
        Ok(Activation::new(output, input.first_sample))
    }

    /// Computes a block again from its input, but for what was kept, and goes back through it: adds the gradients of its
    /// weights to `grads`, returns the gradient of its input.
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
            let grad_input = self.explicit_block(ops, weights)?.backward(
                &input.tensor,
                kept,
                &grad_output.tensor,
                grads,
            )?;
            return Ok(Activation::new(grad_input, input.first_sample));
        }
        let block = self.block(unit, weights, input.first_sample, true)?;
        if self.tiles > 1 {
            let (x, grad) = (&input.tensor, &grad_output.tensor);
            let grad_input = block.backward_tiled(x, grad, self.tiles, grads)?;
            return Ok(Activation::new(grad_input, input.first_sample));
        }
        let leaf = input.tensor.f_detach()?.set_requires_grad(true);
        let output = block.forward(&leaf)?;
        let inputs: Vec<&Tensor> = block.params.all().iter().chain([&leaf]).collect();
        let mut found = vjp(&[&output], &[&grad_output.tensor], &inputs)?;
        let grad_input = found.pop().expect("each input has a gradient");
        for (param, grad) in found.into_iter().enumerate() {
            grads.add(param, grad)?;
        }
        Ok(Activation::new(grad_input, input.first_sample))
    }

    /// The loss (mean over the counted targets, in nats), and the gradients of `loss_scale` times it: the head's go to
    /// `grads`, the gradient of the input comes back. `loss_scale` is this micro-batch's share of the step.
    /// A tied model's projection is the embedding: give its weights and its sink in `tied`.
    ///
    /// # Errors
    /// Out of memory.
    pub fn head_loss_backward(
        &self,
        weights: &UnitWeights,
        tied: Option<(&UnitWeights, &mut GradSink)>,
        input: &Activation,
        targets: &Tokens,
        loss_scale: f64,
        grads: &mut GradSink,
    ) -> Result<(LossHandle, Activation), ComputeError> {
        let (tied_weights, tied_grads) = tied.unzip();
        let (rows, targets_flat) = self.head_rows(input, targets)?;
        let counted = targets.counted().max(1) as f64;
        let (eps, logits_elems_max) = (self.config.norm_eps, self.logits_elems_max);
        let (loss, grad_norm, grad_projection, grad_rows) = match self.head_ops() {
            None => {
                let (norm, projection) = self.head_params(weights, tied_weights, true)?;
                let found = head::loss_and_grads(
                    &self.config,
                    &rows,
                    &norm,
                    &projection,
                    &targets_flat,
                    loss_scale / counted,
                    logits_elems_max,
                )?;
                let loss = LossHandle::known(found.loss_sum / counted);
                (loss, found.norm, found.projection, found.rows)
            }
            Some(ops) => {
                let _no_grad = tch::no_grad_guard();
                let (norm, projection) = self.head_params(weights, tied_weights, false)?;
                let found = explicit::head_backward(
                    ops,
                    &HeadWeights {
                        norm: norm.weight,
                        projection,
                    },
                    &rows,
                    &targets_flat,
                    loss_scale / counted,
                    eps,
                    logits_elems_max,
                )?;
                let loss = LossHandle::pending(found.loss_sum, counted);
                (loss, vec![found.norm], found.projection, found.rows)
            }
        };
        let layout = self.units.last().expect("a model has a head");
        // The norm's parameters come first.
        for (param, grad) in grad_norm.into_iter().enumerate() {
            grads.add(param, grad)?;
        }
        match (tied_grads, layout.find(ParamRole::Projection)) {
            (Some(embedding), _) => embedding.add(0, grad_projection)?,
            (None, projection) => {
                let projection = projection.expect("an untied head has a projection");
                grads.add(projection, grad_projection)?;
            }
        }
        let grad_input = grad_rows.f_view_as(&input.tensor)?;
        Ok((loss, Activation::new(grad_input, input.first_sample)))
    }

    /// The loss (mean over the counted targets, in nats), for evaluation.
    ///
    /// # Errors
    /// Out of memory.
    pub fn head_loss(
        &self,
        weights: &UnitWeights,
        tied: Option<&UnitWeights>,
        input: &Activation,
        targets: &Tokens,
    ) -> Result<LossHandle, ComputeError> {
        let (norm, projection) = self.head_params(weights, tied, false)?;
        let (rows, targets_flat) = self.head_rows(input, targets)?;
        let _no_grad = tch::no_grad_guard();
        let (eps, logits_elems_max) = (self.config.norm_eps, self.logits_elems_max);
        let counted = targets.counted().max(1) as f64;
        Ok(match self.head_ops() {
            None => {
                let sum = head::loss_sum(
                    &self.config,
                    &rows,
                    &norm,
                    &projection,
                    &targets_flat,
                    logits_elems_max,
                )?;
                LossHandle::known(sum / counted)
            }
            Some(ops) => {
                let weights = HeadWeights {
                    norm: norm.weight,
                    projection,
                };
                let sum = explicit::head_loss(
                    ops,
                    &weights,
                    &rows,
                    &targets_flat,
                    eps,
                    logits_elems_max,
                )?;
                LossHandle::pending(sum, counted)
            }
        })
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
        let masks = self.masks(0, tokens.first_sample());
        embedding::backward(&self.units[0], &ids, &masks, &grad_output.tensor, grads)
    }

    /// What writes blocks out, if it does.
    fn block_ops(&self) -> Option<&Ops> {
        match &self.arithmetic {
            Arithmetic::Explicit(ops)
                if self.tiles == 1
                    && explicit::block_is_written_out(
                        &self.config,
                        &self.dropout,
                        self.seq_len,
                    ) =>
            {
                Some(ops)
            }
            _ => None,
        }
    }

    /// What writes the head out, if it does.
    fn head_ops(&self) -> Option<&Ops> {
        match &self.arithmetic {
            Arithmetic::Explicit(ops) if explicit::head_is_written_out(&self.config) => Some(ops),
            _ => None,
        }
    }

    fn block<'a>(
        &'a self,
        unit: usize,
        weights: &UnitWeights,
        first_sample: Option<u64>,
        grad: bool,
    ) -> Result<block::Block<'a>, ComputeError> {
        Ok(block::Block {
            config: &self.config,
            rotary: self.rotary.as_ref(),
            params: Params::new(&self.units[unit], weights, grad)?,
            window: self.config.window(unit - 1),
            masks: self.masks(unit, first_sample),
        })
    }

    fn explicit_block<'a>(
        &'a self,
        ops: &'a Ops,
        weights: &UnitWeights,
    ) -> Result<explicit::Block<'a>, ComputeError> {
        check_unit(&self.units[1], weights);
        Ok(explicit::Block {
            ops,
            config: &self.config,
            rotary: self
                .rotary
                .as_ref()
                .expect("an explicit block has rotary positions"),
            weights: BlockWeights::new(&self.units[1], weights)?,
        })
    }

    /// Of samples without a number nothing is left out.
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
        let (_, seq_len) = tokens.shape();
        if seq_len > self.seq_len {
            return Err(ComputeError::SequenceTooLong {
                seq_len,
                max: self.seq_len,
            });
        }
        Ok(())
    }

    /// The final norm and the projection.
    fn head_params(
        &self,
        weights: &UnitWeights,
        tied: Option<&UnitWeights>,
        grad: bool,
    ) -> Result<(NormWeights, Tensor), ComputeError> {
        assert_eq!(
            tied.is_some(),
            self.config.tied,
            "the embedding's weights are given if and only if they are tied"
        );
        let layout = self.units.last().expect("a model has a head");
        let params = Params::new(layout, weights, grad)?;
        let norm = NormWeights::new(&params, ParamRole::FinalNorm, ParamRole::FinalNormBias);
        let projection = match tied {
            Some(embedding) => Params::new(&self.units[0], embedding, grad)?
                .get(ParamRole::Embedding)
                .shallow_clone(),
            None => params.get(ParamRole::Projection).shallow_clone(),
        };
        Ok((norm, projection))
    }

    /// The input as [rows, hidden_size] and the targets as `[rows]`.
    fn head_rows(
        &self,
        input: &Activation,
        targets: &Tokens,
    ) -> Result<(Tensor, Tensor), ComputeError> {
        assert!(
            targets.vocab_size() <= self.config.vocab_size,
            "targets were checked against this model's vocabulary"
        );
        let (micro_batch, seq_len) = targets.shape();
        let rows = input.tensor.f_view([
            (micro_batch * seq_len) as i64,
            self.config.hidden_size as i64,
        ])?;
        Ok((rows, targets.ids_on(self.device)?.f_view([-1])?))
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
