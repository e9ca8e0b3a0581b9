//! Projections: one matrix product for adjacent parameters, including their biases.

use std::ops::Range;

use kernels_torch::fp8::Fp8Layout;
use tch::Tensor;

use super::products::{Factor, LargestValues, Products};
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
    pub(super) fn forward(
        &self,
        products: &Products,
        x: &Tensor,
        largest: &LargestValues,
    ) -> Result<Tensor, ComputeError> {
        let x = products.input(x, Fp8Layout::Straight, largest)?;
        let weight = products.weight(&self.weight, Fp8Layout::Straight, largest)?;
        products.times_transposed_plus(&x, &weight, self.bias.as_ref())
    }

    /// Computes the gradient of the input from that of the output.
    pub(super) fn back(
        &self,
        products: &Products,
        grad: &Factor,
        largest: &LargestValues,
    ) -> Result<Tensor, ComputeError> {
        let weight = products.weight(&self.weight, Fp8Layout::Transposed, largest)?;
        products.times(grad, &weight)
    }

    /// Adds the parameters' gradients to `grads`, computed from the output's gradient and the input `x`.
    pub(super) fn add_grads(
        &self,
        products: &Products,
        grads: &mut GradSink,
        grad: &Factor,
        x: &Tensor,
        largest: &LargestValues,
    ) -> Result<(), ComputeError> {
        let x = products.input(x, Fp8Layout::Transposed, largest)?;
        grads.add_product(self.weights_at.clone(), |out, mode| {
            products.weight_grad(out, mode, grad, &x)
        })?;
        let Some(biases) = self.biases_at.clone() else {
            return Ok(());
        };
        let grad = grad.own;
        let sum = grad.f_sum_dim_intlist(&[0i64][..], false, at_least_fp32(grad.kind()))?;
        grads.add_parts(biases, &sum)
    }
}
