//! The final norm, the output projection and the loss. A slice of logits is overwritten by its gradient, so
//! that the logits of a batch never exist all at once, and never in fp32 for a bf16 model.

use tch::{Kind, Tensor};

use super::ops::{Ops, empty_like};
use super::product::{times_transposed, weight_grad_added};
use crate::compute::ComputeError;
use crate::compute::head::slices;
use crate::compute::linear::{at_least_fp32, product_input};

/// The head's weights; a tied model's projection is the embedding's table.
pub(crate) struct HeadWeights {
    /// Weight of the final norm.
    pub(crate) norm: Tensor,
    /// [vocab_size, hidden_size]
    pub(crate) projection: Tensor,
}

/// Results of the head's backward pass.
pub(crate) struct HeadGrads {
    /// Sum of the losses of counted tokens, an fp64 number on the device, which may still be computed.
    pub(crate) loss_sum: Tensor,
    /// Gradient of the rows, [rows, hidden_size].
    pub(crate) rows: Tensor,
    /// Gradient of the final norm's weight.
    pub(crate) norm: Tensor,
    /// Gradient of the projection, fp32 at least.
    pub(crate) projection: Tensor,
}

/// Computes the sum of the losses, an fp64 number on the device, for `rows` [rows, hidden_size] and
/// `targets`, `[rows]`.
pub(crate) fn head_loss(
    ops: &Ops,
    weights: &HeadWeights,
    rows: &Tensor,
    targets: &Tensor,
    eps: f64,
    logits_elems_max: usize,
) -> Result<Tensor, ComputeError> {
    let normed = ops.rms_norm(rows, &weights.norm, eps)?.output;
    let losses = empty_like(rows, &[rows.size()[0]], at_least_fp32(rows.kind()))?;
    for (start, length) in slices(rows.size()[0], vocab_size(weights), logits_elems_max) {
        let mut logits =
            times_transposed(&normed.f_narrow(0, start, length)?, &weights.projection)?;
        let mut slice_losses = losses.f_narrow(0, start, length)?;
        let targets = targets.f_narrow(0, start, length)?;
        ops.cross_entropy(&mut logits, &targets, &mut slice_losses, None)?;
    }
    Ok(losses.f_sum(Kind::Double)?)
}

/// Computes the sum of the losses, and the gradients of `token_weight` times the sum.
pub(crate) fn head_backward(
    ops: &Ops,
    weights: &HeadWeights,
    rows: &Tensor,
    targets: &Tensor,
    token_weight: f64,
    eps: f64,
    logits_elems_max: usize,
) -> Result<HeadGrads, ComputeError> {
    let normed = ops.rms_norm(rows, &weights.norm, eps)?;
    let wide = at_least_fp32(rows.kind());
    let losses = empty_like(rows, &[rows.size()[0]], wide)?;
    let grad_normed = rows.f_empty_like()?;
    let projection = Tensor::f_zeros(
        weights.projection.size(),
        (wide, weights.projection.device()),
    )?;
    for (start, length) in slices(rows.size()[0], vocab_size(weights), logits_elems_max) {
        let input = normed.output.f_narrow(0, start, length)?;
        let mut logits = times_transposed(&input, &weights.projection)?;
        ops.cross_entropy(
            &mut logits,
            &targets.f_narrow(0, start, length)?,
            &mut losses.f_narrow(0, start, length)?,
            Some(token_weight),
        )?;
        weight_grad_added(&projection, &logits, &input)?;
        let place = grad_normed.f_narrow(0, start, length)?;
        product_over(&place, &logits, &weights.projection)?;
    }
    let (grad_rows, norm) =
        ops.rms_norm_backward(&grad_normed, rows, &weights.norm, &normed.scale, None)?;
    Ok(HeadGrads {
        loss_sum: losses.f_sum(Kind::Double)?,
        rows: grad_rows,
        norm,
        projection,
    })
}

/// Writes the product of `a` [n, k] and `b` [k, m] to `out` [n, m].
fn product_over(out: &Tensor, a: &Tensor, b: &Tensor) -> Result<(), ComputeError> {
    let (wide_a, wide_b) = (product_input(a)?, product_input(b)?);
    if wide_a.kind() == out.kind() {
        let _ = wide_a.f_mm_out(out, &wide_b)?;
    } else {
        out.shallow_clone().f_copy_(&wide_a.f_mm(&wide_b)?)?;
    }
    Ok(())
}

fn vocab_size(weights: &HeadWeights) -> i64 {
    weights.projection.size()[0]
}
