//! Forward and backward of each unit.

use kernels::torch::vjp;
use tch::{Kind, Tensor};

use super::block::{self, BLOCK_PARAMS, Rotary, at_least_fp32};
use super::head::{self, LOGITS_ELEMS_MAX};
use super::{Activation, ComputeError, Dtype, GradSink, Tokens, UnitWeights};
use crate::model::{LlamaConfig, UnitLayout, unit_layouts};

/// Sets torch up for the process: `threads` for its operators, and only algorithms that give the same bits each time.
///
/// # Errors
/// What torch throws.
pub fn set_up(threads: usize) -> Result<(), ComputeError> {
    kernels::torch::set_threads(threads)?;
    Ok(kernels::torch::set_deterministic(true)?)
}

/// A model's arithmetic, without its weights.
pub struct Engine {
    config: LlamaConfig,
    units: Vec<UnitLayout>,
    kind: Kind,
    seq_len: usize,
    rotary: Rotary,
    logits_elems_max: usize,
}

impl Engine {
    /// The arithmetic of `config` in `dtype`, for sequences of up to `seq_len` tokens.
    ///
    /// # Errors
    /// A configuration that describes no model; out of memory.
    pub fn new(config: &LlamaConfig, dtype: Dtype, seq_len: usize) -> Result<Self, ComputeError> {
        Self::of_kind(config, dtype.kind(), seq_len)
    }

    pub(super) fn of_kind(
        config: &LlamaConfig,
        kind: Kind,
        seq_len: usize,
    ) -> Result<Self, ComputeError> {
        config.validate()?;
        Ok(Engine {
            config: config.clone(),
            units: unit_layouts(config),
            kind,
            seq_len,
            rotary: Rotary::new(config, seq_len, kind)?,
            logits_elems_max: LOGITS_ELEMS_MAX,
        })
    }

    #[cfg(test)]
    pub(super) fn with_logits_elems_max(mut self, logits_elems_max: usize) -> Self {
        self.logits_elems_max = logits_elems_max;
        self
    }

    /// The model's configuration.
    pub fn config(&self) -> &LlamaConfig {
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
        UnitWeights::of_kind(&self.units[unit], self.kind)
    }

    /// An empty sum of unit number `unit`'s gradients.
    pub fn new_grads(&self, unit: usize) -> GradSink {
        GradSink::of_kind(&self.units[unit], self.kind)
    }

    /// The tokens' rows of the embedding, [micro_batch, seq_len, hidden_size].
    ///
    /// # Errors
    /// Sequences that are too long; out of memory.
    pub fn embed_forward(
        &self,
        weights: &UnitWeights,
        tokens: &Tokens,
    ) -> Result<Activation, ComputeError> {
        self.check_tokens(tokens)?;
        let [table] = params(&self.units[0], weights, false)?;
        Ok(Activation(Tensor::f_embedding(
            &table,
            &tokens.ids,
            -1,
            false,
            false,
        )?))
    }

    /// A block's output. Keeps nothing for a backward pass.
    ///
    /// # Errors
    /// Out of memory.
    pub fn block_forward(
        &self,
        weights: &UnitWeights,
        input: &Activation,
    ) -> Result<Activation, ComputeError> {
        let params: [Tensor; BLOCK_PARAMS] = params(&self.units[1], weights, false)?;
        let _no_grad = tch::no_grad_guard();
        Ok(Activation(block::forward(
            &self.config,
            &self.rotary,
            &params,
            &input.0,
        )?))
    }

    /// Computes a block again from its input and goes back through it: adds the gradients of its weights to `grads`,
    /// returns the gradient of its input.
    ///
    /// # Errors
    /// Out of memory.
    pub fn block_backward(
        &self,
        weights: &UnitWeights,
        input: &Activation,
        grad_output: &Activation,
        grads: &mut GradSink,
    ) -> Result<Activation, ComputeError> {
        let params: [Tensor; BLOCK_PARAMS] = params(&self.units[1], weights, true)?;
        let input = input.0.f_detach()?.set_requires_grad(true);
        let output = block::forward(&self.config, &self.rotary, &params, &input)?;
        let inputs: Vec<&Tensor> = params.iter().chain([&input]).collect();
        let mut found = vjp(&[&output], &[&grad_output.0], &inputs)?;
        let grad_input = found.pop().expect("one gradient an input");
        for (param, grad) in found.into_iter().enumerate() {
            grads.add(param, grad)?;
        }
        Ok(Activation(grad_input))
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
    ) -> Result<(f64, Activation), ComputeError> {
        let (tied_weights, tied_grads) = tied.unzip();
        let (norm, projection) = self.head_params(weights, tied_weights, true)?;
        let (rows, targets_flat) = self.head_rows(input, targets)?;
        let counted = targets.counted().max(1) as f64;
        let found = head::loss_and_grads(
            &rows,
            &norm,
            &projection,
            self.config.rms_norm_eps,
            &targets_flat,
            loss_scale / counted,
            self.logits_elems_max,
        )?;
        grads.add(0, found.norm)?;
        match tied_grads {
            Some(embedding) => embedding.add(0, found.projection)?,
            None => grads.add(1, found.projection)?,
        }
        Ok((
            found.loss_sum / counted,
            Activation(found.rows.f_view_as(&input.0)?),
        ))
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
    ) -> Result<f64, ComputeError> {
        let (norm, projection) = self.head_params(weights, tied, false)?;
        let (rows, targets_flat) = self.head_rows(input, targets)?;
        let _no_grad = tch::no_grad_guard();
        let eps = self.config.rms_norm_eps;
        let sum = head::loss_sum(
            &rows,
            &norm,
            &projection,
            eps,
            &targets_flat,
            self.logits_elems_max,
        )?;
        Ok(sum / targets.counted().max(1) as f64)
    }

    /// Adds the embedding's gradient to `grads`: each token's row of `grad_output`, summed in fp32, since a frequent
    /// token's sum in bf16 would stop growing.
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
        let wide = grad_output.0.f_to_kind(at_least_fp32(self.kind))?;
        let grad = Tensor::f_embedding_dense_backward(
            &wide,
            &tokens.ids,
            self.config.vocab_size as i64,
            -1,
            false,
        )?;
        grads.add(0, grad)
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
    ) -> Result<(Tensor, Tensor), ComputeError> {
        assert_eq!(
            tied.is_some(),
            self.config.tied,
            "the embedding's weights are given if and only if they are tied"
        );
        let layout = self.units.last().expect("a model has a head");
        Ok(match tied {
            Some(embedding) => {
                let [norm] = params(layout, weights, grad)?;
                let [table] = params(&self.units[0], embedding, grad)?;
                (norm, table)
            }
            None => params::<2>(layout, weights, grad)?.into(),
        })
    }

    /// The input as [rows, hidden_size] and the targets as [rows].
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
        let rows = input.0.f_view([
            (micro_batch * seq_len) as i64,
            self.config.hidden_size as i64,
        ])?;
        Ok((rows, targets.ids.f_view([-1])?))
    }
}

/// A unit's parameters as tensors, in the order of its layout.
fn params<const N: usize>(
    layout: &UnitLayout,
    weights: &UnitWeights,
    grad: bool,
) -> Result<[Tensor; N], ComputeError> {
    assert_eq!(
        weights.elems(),
        layout.elems,
        "the weights are of a unit like {}",
        layout.name
    );
    let tensors: Vec<Tensor> = layout
        .params
        .iter()
        .map(|param| weights.param(param, grad))
        .collect::<Result<_, _>>()?;
    Ok(tensors
        .try_into()
        .unwrap_or_else(|_| panic!("{} has {N} parameters", layout.name)))
}
