//! Projections: one matrix product for adjacent parameters, including their biases.

use std::ops::Range;

use tch::Tensor;

use super::product::{times, times_transposed_plus, weight_grad};
use crate::compute::linear::at_least_fp32;
use crate::compute::{ComputeError, GradSink, UnitWeights};
use training_run::model::{ParamRole, UnitLayout};

/// Matrix [outputs, inputs] of one or several parameters.
pub(super) struct Projection {
    weight: Tensor,
    bias: Option<Tensor>,
    /// Indices of the parameters in their layout.
    weights_at: Range<usize>,
    biases_at: Option<Range<usize>>,
}

impl Projection {
    /// Joins `members`, which are consecutive in `layout`, and their biases.
    pub(super) fn new(
        layout: &UnitLayout,
        weights: &UnitWeights,
        members: &[(ParamRole, ParamRole)],
    ) -> Result<Self, ComputeError> {
        let (first, first_bias) = members[0];
        let at = |first: usize| first..first + members.len();
        let weights_at = at(layout.find(first).expect("every block has its matrices"));
        let biases_at = layout.find(first_bias).map(at);
        let bias = biases_at
            .clone()
            .map(|at| weights.joined(&layout.params[at]));
        Ok(Projection {
            weight: weights.joined(&layout.params[weights_at.clone()])?,
            bias: bias.transpose()?,
            weights_at,
            biases_at,
        })
    }

    /// Projects `x` [rows, inputs] to [rows, outputs].
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor, ComputeError> {
        times_transposed_plus(x, &self.weight, self.bias.as_ref())
    }

    /// Computes the gradient of the input from that of the output.
    pub(super) fn back(&self, grad: &Tensor) -> Result<Tensor, ComputeError> {
        times(grad, &self.weight)
    }

    /// Adds the parameters' gradients to `grads`, computed from the output's gradient and the input `x`.
    pub(super) fn add_grads(
        &self,
        grads: &mut GradSink,
        grad: &Tensor,
        x: &Tensor,
    ) -> Result<(), ComputeError> {
        grads.add_product(self.weights_at.clone(), |out| weight_grad(out, grad, x))?;
        let Some(biases) = self.biases_at.clone() else {
            return Ok(());
        };
        let sum = grad.f_sum_dim_intlist(&[0i64][..], false, at_least_fp32(grad.kind()))?;
        grads.add_parts(biases, &sum)
    }
}
