//! Positions and attention.

use kernels::gpu::fused::Turn;
use kernels::torch::vjp;
use tch::Tensor;

use super::ops::Ops;
use crate::compute::ComputeError;
use crate::compute::attention::causal_attention;
use crate::compute::dropout::Masks;
use crate::compute::positions::Rotary;
use crate::compute::values::size_bytes;
use crate::model::ModelConfig;

/// Sizes of a batch's attention.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) micro_batch: i64,
    pub(super) seq_len: i64,
    pub(super) heads: i64,
    pub(super) kv_heads: i64,
    pub(super) head_dim: i64,
}

impl Shape {
    pub(super) fn new(config: &ModelConfig, micro_batch: i64, seq_len: i64) -> Self {
        Shape {
            micro_batch,
            seq_len,
            heads: config.heads as i64,
            kv_heads: config.kv_heads as i64,
            head_dim: config.head_dim() as i64,
        }
    }

    pub(super) fn rows(&self) -> i64 {
        self.micro_batch * self.seq_len
    }

    /// Columns of query, key and value side by side.
    pub(super) fn columns(&self) -> i64 {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Heads `start` to `start + count` of `qkv` [rows, columns], as [micro_batch, seq_len, count, head_dim].
    fn of(&self, qkv: &Tensor, start: i64, count: i64) -> Result<Tensor, ComputeError> {
        let all = qkv.f_view([self.micro_batch, self.seq_len, -1, self.head_dim])?;
        Ok(all.f_narrow(2, start, count)?)
    }
}

/// What attention's backward pass needs.
pub(super) struct Attention {
    shape: Shape,
    /// Leaves, [micro_batch, heads, seq_len, head_dim] over the turned query, key and value.
    leaves: [Tensor; 3],
    /// The graph's end.
    output: Tensor,
    /// [rows, heads * head_dim]
    pub(super) mixed: Tensor,
}

/// Causal attention of `qkv` [rows, columns], whose query and key are turned in place first. With `keep` a graph is kept.
pub(super) fn attention(
    ops: &Ops,
    rotary: &Rotary,
    shape: Shape,
    qkv: &Tensor,
    keep: bool,
) -> Result<Attention, ComputeError> {
    let turned = shape.of(qkv, 0, shape.heads + shape.kv_heads)?;
    ops.rotary(&turned, &turned, rotary, Turn::Forward)?;
    let leaf = |start: i64, count: i64| -> Result<Tensor, ComputeError> {
        let heads = shape.of(qkv, start, count)?.f_transpose(1, 2)?;
        Ok(heads.f_detach()?.set_requires_grad(keep))
    };
    let leaves = [
        leaf(0, shape.heads)?,
        leaf(shape.heads, shape.kv_heads)?,
        leaf(shape.heads + shape.kv_heads, shape.kv_heads)?,
    ];
    let output = mix(&leaves, shape)?;
    let mixed = output
        .f_detach()?
        .f_transpose(1, 2)?
        .f_reshape([shape.rows(), -1])?;
    Ok(Attention {
        shape,
        leaves,
        output,
        mixed,
    })
}

/// Attention in whatever kernel torch chooses; rounded to the kind of the query.
fn mix([query, key, value]: &[Tensor; 3], shape: Shape) -> Result<Tensor, ComputeError> {
    let share = shape.heads / shape.kv_heads;
    let mixed = causal_attention([query, key, value], share, None, &Masks::NONE)?;
    Ok(mixed.f_to_kind(query.kind())?)
}

impl Attention {
    /// Bytes it takes: query, key and value, the result, and a number for each row and head. Repeated heads too.
    pub(super) fn size_bytes(&self) -> usize {
        let leaves: usize = self.leaves.iter().map(size_bytes).sum();
        let repeated = if self.shape.heads == self.shape.kv_heads {
            0
        } else {
            2 * size_bytes(&self.mixed)
        };
        let sums = (self.shape.rows() * self.shape.heads) as usize * size_of::<f32>();
        leaves + repeated + size_bytes(&self.mixed) + sums
    }

    /// The gradient of `qkv` as it was before it was turned, [rows, columns], from that of `mixed`.
    pub(super) fn backward(
        self,
        ops: &Ops,
        rotary: &Rotary,
        grad_mixed: &Tensor,
    ) -> Result<Tensor, ComputeError> {
        let shape = self.shape;
        let grad = grad_mixed
            .f_view([
                shape.micro_batch,
                shape.seq_len,
                shape.heads,
                shape.head_dim,
            ])?
            .f_transpose(1, 2)?;
        let leaves: Vec<&Tensor> = self.leaves.iter().collect();
        let grads = vjp(&[&self.output], &[&grad], &leaves)?;
        let kind = (grad_mixed.kind(), grad_mixed.device());
        let packed = Tensor::f_empty([shape.rows(), shape.columns()], kind)?;
        let turns = [Turn::Backward, Turn::Backward, Turn::Not];
        let mut start = 0;
        for (grad, turn) in grads.iter().zip(turns) {
            let count = grad.size()[1];
            let from = grad.f_transpose(1, 2)?;
            ops.rotary(&from, &shape.of(&packed, start, count)?, rotary, turn)?;
            start += count;
        }
        Ok(packed)
    }
}
