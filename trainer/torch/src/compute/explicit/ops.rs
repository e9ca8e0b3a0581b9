//! Elementwise operations: in torch operators, which define them, or in fused kernels, which do the same in
//! one pass over memory and are compared with the definition.

use kernels_torch::fused::{FusedKernels, Turn};
use tch::{Kind, Tensor};

use crate::compute::ComputeError;
use crate::compute::linear::at_least_fp32;
use crate::compute::positions::Rotary;
use training_run::data::IGNORED;

/// Implementation of elementwise operations.
pub(crate) enum Ops {
    /// Torch operators, one after another; on any device and in any kind.
    Plain,
    /// This project's kernels on a GPU, for bf16 and fp32.
    Fused(Box<FusedKernels>),
}

/// A norm's result and the values that its backward pass needs.
pub(super) struct NormOutput {
    /// Result with the weight applied, [rows, hidden_size].
    pub(super) output: Tensor,
    /// 1 / rms of each row, [rows, 1], fp32 at least.
    pub(super) scale: Tensor,
}

impl Ops {
    /// Computes `weight * x / rms(x)` of each row; the quotient is rounded to x's kind before it is
    /// multiplied by the weight.
    pub(super) fn rms_norm(
        &self,
        x: &Tensor,
        weight: &Tensor,
        eps: f64,
    ) -> Result<NormOutput, ComputeError> {
        match self {
            Ops::Plain => plain_norm(x, weight, eps),
            Ops::Fused(fused) => {
                let normed = fused.rms_norm(x, None, weight, eps)?;
                Ok(NormOutput {
                    output: normed.output,
                    scale: normed.scale,
                })
            }
        }
    }

    /// Computes the rounded sum of `x` and `added`, and its norm.
    pub(super) fn add_rms_norm(
        &self,
        x: &Tensor,
        added: &Tensor,
        weight: &Tensor,
        eps: f64,
    ) -> Result<(Tensor, NormOutput), ComputeError> {
        match self {
            Ops::Plain => {
                let sum = x.f_add(added)?;
                let normed = plain_norm(&sum, weight, eps)?;
                Ok((sum, normed))
            }
            Ops::Fused(fused) => {
                let normed = fused.rms_norm(x, Some(added), weight, eps)?;
                let (output, scale) = (normed.output, normed.scale);
                let sum = normed.sum.expect("add_rms_norm returns a sum");
                Ok((sum, NormOutput { output, scale }))
            }
        }
    }

    /// Computes gradients of a norm's input and weight from that of its output. Adds `beside`, the gradient
    /// that bypasses the norm, to the input's.
    pub(super) fn rms_norm_backward(
        &self,
        grad: &Tensor,
        x: &Tensor,
        weight: &Tensor,
        scale: &Tensor,
        beside: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor), ComputeError> {
        match self {
            Ops::Plain => plain_norm_backward(grad, x, weight, scale, beside),
            Ops::Fused(fused) => Ok(fused.rms_norm_backward(grad, x, weight, scale, beside)?),
        }
    }

    /// Rotates the pairs (i, i + head_dim / 2) of `from` into `to`, both [micro_batch, seq_len, heads,
    /// head_dim]; they may be the same memory.
    pub(super) fn rotary(
        &self,
        from: &Tensor,
        to: &Tensor,
        rotary: &Rotary,
        turn: Turn,
    ) -> Result<(), ComputeError> {
        match self {
            Ops::Plain => plain_rotary(from, to, rotary, turn),
            Ops::Fused(fused) if rotary.cos.dim() == 2 => {
                Ok(fused.rotary(from, to, &rotary.cos, &rotary.sin, turn)?)
            }
            // The kernel has one table for all sequences.
            Ops::Fused(fused) => {
                for row in 0..from.size()[0] {
                    let part = |x: &Tensor| x.f_narrow(0, row, 1);
                    let table = |x: &Tensor| x.f_select(0, row);
                    let (cos, sin) = (table(&rotary.cos)?, table(&rotary.sin)?);
                    fused.rotary(&part(from)?, &part(to)?, &cos, &sin, turn)?;
                }
                Ok(())
            }
        }
    }

    /// Computes silu(gate) * up of `gate_up` [rows, 2 * n], with the gate in the first half of each row:
    /// [rows, n].
    pub(super) fn gated(&self, gate_up: &Tensor) -> Result<Tensor, ComputeError> {
        match self {
            Ops::Plain => {
                let [gate, up] = halves(gate_up)?;
                Ok(gate.f_silu()?.f_mul(&up)?)
            }
            Ops::Fused(fused) => Ok(fused.gated(gate_up)?),
        }
    }

    /// Computes the backward pass of [`Ops::gated`] in place: `grad` [rows, n], the gradient of its result,
    /// is replaced by that result (so that forward need not keep it), and `gate_up` [rows, 2 * n] by its
    /// gradient.
    pub(super) fn gated_backward(
        &self,
        grad: &mut Tensor,
        gate_up: &mut Tensor,
    ) -> Result<(), ComputeError> {
        match self {
            Ops::Plain => plain_gated_backward(grad, gate_up),
            Ops::Fused(fused) => Ok(fused.gated_backward(grad, gate_up)?),
        }
    }

    /// Writes each row's loss to `losses`, `[rows]`, in fp32 at least; 0 if the target is ignored. With
    /// `token_weight`, replaces the logits [rows, vocab_size] by the gradient of `token_weight` times the sum
    /// of the losses.
    pub(super) fn cross_entropy(
        &self,
        logits: &mut Tensor,
        targets: &Tensor,
        losses: &mut Tensor,
        token_weight: Option<f64>,
    ) -> Result<(), ComputeError> {
        match self {
            Ops::Plain => plain_cross_entropy(logits, targets, losses, token_weight),
            Ops::Fused(fused) => Ok(fused.cross_entropy(logits, targets, losses, token_weight)?),
        }
    }
}

fn plain_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<NormOutput, ComputeError> {
    let wide_x = x.f_to_kind(at_least_fp32(x.kind()))?;
    let mean_square = wide_x
        .f_square()?
        .f_mean_dim(&[-1i64][..], true, wide_x.kind())?;
    let scale = mean_square.f_add_scalar(eps)?.f_rsqrt()?;
    let output = wide_x.f_mul(&scale)?.f_to_kind(x.kind())?.f_mul(weight)?;
    Ok(NormOutput { output, scale })
}

fn plain_norm_backward(
    grad: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    scale: &Tensor,
    beside: Option<&Tensor>,
) -> Result<(Tensor, Tensor), ComputeError> {
    let kind = x.kind();
    let wide = at_least_fp32(kind);
    let wide_x = x.f_to_kind(wide)?;
    let quotient = wide_x.f_mul(scale)?.f_to_kind(kind)?;
    let grad_weight = grad
        .f_to_kind(wide)?
        .f_mul(&quotient.f_to_kind(wide)?)?
        .f_sum_dim_intlist(&[0i64][..], false, wide)?
        .f_to_kind(kind)?;
    let grad_quotient = grad.f_mul(weight)?.f_to_kind(wide)?;
    let grad_scale = grad_quotient
        .f_mul(&wide_x)?
        .f_sum_dim_intlist(&[-1i64][..], true, wide)?;
    let hidden_size = x.size()[1] as f64;
    let along = scale
        .f_pow_tensor_scalar(3)?
        .f_mul(&grad_scale)?
        .f_div_scalar(hidden_size)?;
    let grad_x = grad_quotient
        .f_mul(scale)?
        .f_sub(&wide_x.f_mul(&along)?)?
        .f_to_kind(kind)?;
    let grad_x = match beside {
        Some(beside) => grad_x.f_add(beside)?,
        None => grad_x,
    };
    Ok((grad_x, grad_weight))
}

fn plain_rotary(
    from: &Tensor,
    to: &Tensor,
    rotary: &Rotary,
    turn: Turn,
) -> Result<(), ComputeError> {
    let mut to = to.shallow_clone();
    if turn == Turn::Not {
        to.f_copy_(from)?;
        return Ok(());
    }
    let seq_len = from.size()[1];
    // [seq_len, 1, head_dim]: the same for every head.
    let rows = |table: &Tensor| table.f_narrow(-2, 0, seq_len)?.f_unsqueeze(-2);
    let (cos, sin) = (rows(&rotary.cos)?, rows(&rotary.sin)?);
    let parts = from.f_chunk(2, -1)?;
    // The transposed rotation has the other half with the opposite sign.
    let crossed = match turn {
        Turn::Forward => [parts[1].f_neg()?, parts[0].shallow_clone()],
        _ => [parts[1].shallow_clone(), parts[0].f_neg()?],
    };
    let crossed = Tensor::f_cat(&crossed, -1)?;
    let rotated = from.f_mul(&cos)?.f_add(&crossed.f_mul(&sin)?)?;
    to.f_copy_(&rotated)?;
    Ok(())
}

fn plain_gated_backward(grad: &mut Tensor, gate_up: &mut Tensor) -> Result<(), ComputeError> {
    let kind = grad.kind();
    let [mut gate, mut up] = halves(gate_up)?;
    let silu = gate.f_silu()?;
    let grad_up = grad.f_mul(&silu)?;
    let grad_silu = grad.f_mul(&up)?;
    let output = silu.f_mul(&up)?;
    let wide_gate = gate.f_to_kind(at_least_fp32(kind))?;
    let sigmoid = wide_gate.f_sigmoid()?;
    // silu'(g) = s (1 + g (1 - s))
    let slope = wide_gate
        .f_mul(&sigmoid.f_neg()?.f_add_scalar(1.0)?)?
        .f_add_scalar(1.0)?
        .f_mul(&sigmoid)?;
    gate.f_copy_(&grad_silu.f_to_kind(at_least_fp32(kind))?.f_mul(&slope)?)?;
    up.f_copy_(&grad_up)?;
    grad.f_copy_(&output)?;
    Ok(())
}

fn plain_cross_entropy(
    logits: &mut Tensor,
    targets: &Tensor,
    losses: &mut Tensor,
    token_weight: Option<f64>,
) -> Result<(), ComputeError> {
    let wide = at_least_fp32(logits.kind());
    let logs = logits.f_log_softmax(-1, wide)?;
    let counted = targets.f_ne(IGNORED)?;
    let index = targets.f_clamp_min(0)?.f_unsqueeze(1)?;
    let mask = counted.f_to_kind(wide)?;
    let picked = logs.f_gather(1, &index, false)?.f_squeeze_dim(1)?;
    // Selected, not multiplied by the mask: an ignored target may have an infinite loss.
    let zeros = picked.f_zeros_like()?;
    losses.f_copy_(&picked.f_neg()?.f_where_self(&counted, &zeros)?)?;
    if let Some(weight) = token_weight {
        let ones = mask.f_unsqueeze(1)?;
        let at_target = Tensor::f_zeros_like(&logs)?.f_scatter(1, &index, &ones)?;
        let grad = logs
            .f_exp()?
            .f_sub(&at_target)?
            .f_mul(&ones)?
            .f_mul_scalar(weight)?;
        logits.f_copy_(&grad)?;
    }
    Ok(())
}

/// Returns the left and the right half of each row as views.
fn halves(x: &Tensor) -> Result<[Tensor; 2], ComputeError> {
    let half = x.size()[1] / 2;
    Ok([x.f_narrow(1, 0, half)?, x.f_narrow(1, half, half)?])
}

/// Allocates an empty tensor on the device of another, with its own shape and kind.
pub(super) fn empty_like(
    other: &Tensor,
    shape: &[i64],
    kind: Kind,
) -> Result<Tensor, ComputeError> {
    Ok(Tensor::f_empty(shape, (kind, other.device()))?)
}
