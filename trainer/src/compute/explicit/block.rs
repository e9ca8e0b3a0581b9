//! A block from its input: forward, and computed again to go back. Parameters in the order of the layout.

use tch::Tensor;

use super::attention::{Shape, attention};
use super::ops::Ops;
use super::product::{times, times_transposed, weight_grad};
use crate::compute::block::Rotary;
use crate::compute::{ComputeError, GradSink, UnitWeights};
use crate::model::{LlamaConfig, UnitLayout};

/// A block's weights as this module takes them: query, key and value are one matrix, and so are gate and up.
pub(crate) struct BlockWeights {
    input_norm: Tensor,
    qkv: Tensor,
    out: Tensor,
    post_norm: Tensor,
    gate_up: Tensor,
    down: Tensor,
}

impl BlockWeights {
    pub(crate) fn new(layout: &UnitLayout, weights: &UnitWeights) -> Result<Self, ComputeError> {
        let one = |param: usize| weights.param(&layout.params[param], false);
        Ok(BlockWeights {
            input_norm: one(0)?,
            qkv: weights.matrix(&layout.params[1..4])?,
            out: one(4)?,
            post_norm: one(5)?,
            gate_up: weights.matrix(&layout.params[6..8])?,
            down: one(8)?,
        })
    }
}

/// The block's output for `input`, both [micro_batch, seq_len, hidden_size].
pub(crate) fn block_forward(
    ops: &Ops,
    config: &LlamaConfig,
    rotary: &Rotary,
    weights: &BlockWeights,
    input: &Tensor,
) -> Result<Tensor, ComputeError> {
    let (shape, x) = rows(config, input)?;
    let eps = config.rms_norm_eps;
    let mixed = {
        let normed = ops.rms_norm(&x, &weights.input_norm, eps)?;
        let qkv = times_transposed(&normed.output, &weights.qkv)?;
        drop(normed);
        attention(ops, rotary, shape, &qkv, false)?.mixed
    };
    let added = times_transposed(&mixed, &weights.out)?;
    drop(mixed);
    let (mut sum, normed) = ops.add_rms_norm(&x, &added, &weights.post_norm, eps)?;
    drop(added);
    let gate_up = times_transposed(&normed.output, &weights.gate_up)?;
    drop(normed);
    let gated = ops.gated(&gate_up)?;
    drop(gate_up);
    let _ = sum.f_add_(&times_transposed(&gated, &weights.down)?)?;
    Ok(sum.f_view_as(input)?)
}

/// The gradient of `input`; those of the weights are added to `grads`. Everything up to gate and up is computed again; the
/// down projection's output is not needed.
pub(crate) fn block_backward(
    ops: &Ops,
    config: &LlamaConfig,
    rotary: &Rotary,
    weights: &BlockWeights,
    input: &Tensor,
    grad_output: &Tensor,
    grads: &mut GradSink,
) -> Result<Tensor, ComputeError> {
    let (shape, x) = rows(config, input)?;
    let grad_output = grad_output.f_view_as(&x)?;
    let eps = config.rms_norm_eps;

    let first = ops.rms_norm(&x, &weights.input_norm, eps)?;
    let qkv = times_transposed(&first.output, &weights.qkv)?;
    let attended = attention(ops, rotary, shape, &qkv, true)?;
    drop(qkv);
    let added = times_transposed(&attended.mixed, &weights.out)?;
    let (sum, second) = ops.add_rms_norm(&x, &added, &weights.post_norm, eps)?;
    drop(added);
    let mut gate_up = times_transposed(&second.output, &weights.gate_up)?;

    // Down, and the product of silu(gate) and up.
    let mut gated = times(&grad_output, &weights.down)?;
    ops.gated_backward(&mut gated, &mut gate_up)?;
    grads.add_product(8..9, |out| weight_grad(out, &grad_output, &gated))?;
    drop(gated);

    // Gate and up, and the second norm.
    grads.add_product(6..8, |out| weight_grad(out, &gate_up, &second.output))?;
    let grad_normed = times(&gate_up, &weights.gate_up)?;
    drop(gate_up);
    let (grad_sum, grad_norm) = ops.rms_norm_backward(
        &grad_normed,
        &sum,
        &weights.post_norm,
        &second.scale,
        Some(&grad_output),
    )?;
    grads.add(5, grad_norm)?;
    drop((grad_normed, sum, second));

    // The output projection and attention.
    grads.add_product(4..5, |out| weight_grad(out, &grad_sum, &attended.mixed))?;
    let grad_mixed = times(&grad_sum, &weights.out)?;
    let grad_qkv = attended.backward(ops, rotary, &grad_mixed)?;
    drop(grad_mixed);

    // Query, key and value, and the first norm.
    grads.add_product(1..4, |out| weight_grad(out, &grad_qkv, &first.output))?;
    let grad_normed = times(&grad_qkv, &weights.qkv)?;
    drop(grad_qkv);
    let (grad_input, grad_norm) = ops.rms_norm_backward(
        &grad_normed,
        &x,
        &weights.input_norm,
        &first.scale,
        Some(&grad_sum),
    )?;
    grads.add(0, grad_norm)?;
    Ok(grad_input.f_view_as(input)?)
}

/// The batch's sizes, and the input as [rows, hidden_size].
fn rows(config: &LlamaConfig, input: &Tensor) -> Result<(Shape, Tensor), ComputeError> {
    let (micro_batch, seq_len, hidden_size) = input.size3()?;
    let shape = Shape::new(config, micro_batch, seq_len);
    Ok((shape, input.f_view([shape.rows(), hidden_size])?))
}
