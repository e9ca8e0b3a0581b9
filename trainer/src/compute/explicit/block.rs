//! A block from its input: forward, and computed again, as far as nothing was kept, to go back. Parameters in the order of the layout.

use tch::Tensor;

use super::attention::{Attention, Shape, attention};
use super::ops::{Normed, Ops};
use super::product::{times, times_transposed, weight_grad};
use crate::compute::positions::Rotary;
use crate::compute::values::size_bytes;
use crate::compute::{ComputeError, GradSink, Keep, UnitWeights};
use crate::model::{ModelConfig, UnitLayout};

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

/// What a forward pass may leave for the backward pass, which computes what is missing again.
#[derive(Default)]
pub(crate) struct Kept {
    attended: Option<Attention>,
    /// Input and attention's output, summed.
    sum: Option<Tensor>,
    gate_up: Option<Tensor>,
}

impl Kept {
    /// Bytes it takes.
    pub(crate) fn size_bytes(&self) -> usize {
        let tensors = [&self.sum, &self.gate_up].into_iter().flatten();
        let attended = self.attended.as_ref().map_or(0, Attention::size_bytes);
        tensors.map(size_bytes).sum::<usize>() + attended
    }
}

/// A block computed up to gate and up: all that its backward pass needs.
struct Passed {
    first: Normed,
    attended: Attention,
    sum: Tensor,
    second: Normed,
    gate_up: Tensor,
}

/// A block's arithmetic with its weights.
pub(crate) struct Block<'a> {
    pub(crate) ops: &'a Ops,
    pub(crate) config: &'a ModelConfig,
    pub(crate) rotary: &'a Rotary,
    pub(crate) weights: BlockWeights,
}

impl Block<'_> {
    /// The block's output for `input`, both [micro_batch, seq_len, hidden_size], and what is to be kept.
    pub(crate) fn forward(
        &self,
        input: &Tensor,
        keep: Keep,
    ) -> Result<(Tensor, Kept), ComputeError> {
        let (shape, x) = rows(self.config, input)?;
        let passed = self.pass(shape, &x, keep != Keep::Nothing, Kept::default())?;
        let gated = self.ops.gated(&passed.gate_up)?;
        let mut output = times_transposed(&gated, &self.weights.down)?;
        let _ = output.f_add_(&passed.sum)?;
        let products = keep == Keep::Products;
        let kept = Kept {
            attended: (keep != Keep::Nothing).then_some(passed.attended),
            sum: products.then_some(passed.sum),
            gate_up: products.then_some(passed.gate_up),
        };
        Ok((output.f_view_as(input)?, kept))
    }

    /// The gradient of `input`; those of the weights are added to `grads`. What `kept` does not have is computed again, up
    /// to gate and up: the down projection's output is not needed.
    pub(crate) fn backward(
        &self,
        input: &Tensor,
        kept: Kept,
        grad_output: &Tensor,
        grads: &mut GradSink,
    ) -> Result<Tensor, ComputeError> {
        let (ops, weights) = (self.ops, &self.weights);
        let (shape, x) = rows(self.config, input)?;
        let grad_output = grad_output.f_view_as(&x)?;
        let Passed {
            first,
            attended,
            sum,
            second,
            mut gate_up,
        } = self.pass(shape, &x, true, kept)?;

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
        let grad_qkv = attended.backward(ops, self.rotary, &grad_mixed)?;
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

    /// Computes what `kept` does not have. With `graph` attention's graph is recorded. Norms are always computed again:
    /// they cost less than keeping them.
    fn pass(
        &self,
        shape: Shape,
        x: &Tensor,
        graph: bool,
        kept: Kept,
    ) -> Result<Passed, ComputeError> {
        let (ops, weights, eps) = (self.ops, &self.weights, self.config.norm_eps);
        let first = ops.rms_norm(x, &weights.input_norm, eps)?;
        let attended = match kept.attended {
            Some(attended) => attended,
            None => {
                let qkv = times_transposed(&first.output, &weights.qkv)?;
                attention(ops, self.rotary, shape, &qkv, graph)?
            }
        };
        let (sum, second) = match kept.sum {
            Some(sum) => {
                let second = ops.rms_norm(&sum, &weights.post_norm, eps)?;
                (sum, second)
            }
            None => {
                let added = times_transposed(&attended.mixed, &weights.out)?;
                ops.add_rms_norm(x, &added, &weights.post_norm, eps)?
            }
        };
        let gate_up = match kept.gate_up {
            Some(gate_up) => gate_up,
            None => times_transposed(&second.output, &weights.gate_up)?,
        };
        Ok(Passed {
            first,
            attended,
            sum,
            second,
            gate_up,
        })
    }
}

/// The batch's sizes, and the input as [rows, hidden_size].
fn rows(config: &ModelConfig, input: &Tensor) -> Result<(Shape, Tensor), ComputeError> {
    let (micro_batch, seq_len, hidden_size) = input.size3()?;
    let shape = Shape::new(config, micro_batch, seq_len);
    Ok((shape, input.f_view([shape.rows(), hidden_size])?))
}
