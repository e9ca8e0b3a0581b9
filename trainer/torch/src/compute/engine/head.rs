//! Loss, and forward and backward of the head.

use tch::Tensor;

use super::{Arithmetic, Engine};
use crate::compute::explicit::{self, HeadWeights, Ops};
use crate::compute::norm::NormWeights;
use crate::compute::params::Params;
use crate::compute::{Activation, ComputeError, GradSink, LossHandle, Tokens, UnitWeights, head};
use training_run::computation::head_is_written_out;
use training_run::model::ParamRole;

impl Engine {
    /// Computes the loss (mean over the counted targets, in nats) and the gradients of `loss_scale` times the
    /// loss. The head's gradients are added to `grads`; the gradient of the input is returned. `loss_scale`
    /// is this micro-batch's weight in the step. A tied model's projection is the embedding, whose weights
    /// and sink are in `tied`.
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
        // The norm's parameters are first in the layout.
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
        Ok((loss, Activation::new(grad_input, &input.batch)))
    }

    /// Computes the loss (mean over the counted targets, in nats) for evaluation.
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

    /// Returns the operators of an explicit head, if the head has an explicit backward.
    fn head_ops(&self) -> Option<&Ops> {
        match &self.arithmetic {
            Arithmetic::Explicit(ops) if head_is_written_out(&self.config) => Some(ops),
            _ => None,
        }
    }

    /// Returns the parameters of the final norm and the projection.
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

    /// Reshapes the input to [rows, hidden_size] and the targets to `[rows]`.
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
