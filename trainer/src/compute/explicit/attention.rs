//! Rotary positions and attention.

use kernels_torch::fused::Turn;
use kernels_torch::vjp;
use tch::Tensor;

use super::ops::Ops;
use crate::compute::ComputeError;
use crate::compute::attention::{self, causal_attention};
use crate::compute::documents::Documents;
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

    /// Number of columns of query, key and value together.
    pub(super) fn columns(&self) -> i64 {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Returns heads `start` to `start + count` of `qkv` [rows, columns], as [micro_batch, seq_len, count,
    /// head_dim].
    fn of(&self, qkv: &Tensor, start: i64, count: i64) -> Result<Tensor, ComputeError> {
        let all = qkv.f_view([self.micro_batch, self.seq_len, -1, self.head_dim])?;
        Ok(all.f_narrow(2, start, count)?)
    }
}

/// Values that attention's backward pass needs.
pub(super) struct Attention {
    shape: Shape,
    leaves: Leaves,
    /// Result of attention's graph.
    output: Tensor,
    /// [rows, heads * head_dim]
    pub(super) attn_out: Tensor,
}

/// Inputs of attention's graph.
enum Leaves {
    /// The rotated query, key and value, [micro_batch, heads, seq_len, head_dim].
    Rotated([Tensor; 3]),
    /// Query, key and value as projected, [micro_batch, seq_len, columns], and the weights of the norms of
    /// query and key heads.
    Projected([Tensor; 3], [Tensor; 2]),
}

/// Computes causal attention of `qkv` [rows, columns]; rotates its query and key in place first. With `keep`
/// the graph is kept.
pub(super) fn attention(
    ops: &Ops,
    rotary: &Rotary,
    shape: Shape,
    documents: Option<&Documents>,
    qkv: &Tensor,
    keep: bool,
) -> Result<Attention, ComputeError> {
    let rotated = shape.of(qkv, 0, shape.heads + shape.kv_heads)?;
    ops.rotary(&rotated, &rotated, rotary, Turn::Forward)?;
    let leaf = |start: i64, count: i64| -> Result<Tensor, ComputeError> {
        let heads = shape.of(qkv, start, count)?.f_transpose(1, 2)?;
        Ok(heads.f_detach()?.set_requires_grad(keep))
    };
    let leaves = [
        leaf(0, shape.heads)?,
        leaf(shape.heads, shape.kv_heads)?,
        leaf(shape.heads + shape.kv_heads, shape.kv_heads)?,
    ];
    let output = mix(&leaves, shape, documents)?;
    let attn_out = output
        .f_detach()?
        .f_transpose(1, 2)?
        .f_reshape([shape.rows(), -1])?;
    Ok(Attention {
        shape,
        leaves: Leaves::Rotated(leaves),
        output,
        attn_out,
    })
}

/// Like [`attention()`], with query and key heads normalized by the weights `norms` before rotation, all in one
/// graph. Does not change `qkv`.
pub(super) fn normed_attention(
    config: &ModelConfig,
    rotary: &Rotary,
    norms: [&Tensor; 2],
    shape: Shape,
    documents: Option<&Documents>,
    qkv: &Tensor,
    keep: bool,
) -> Result<Attention, ComputeError> {
    let all = qkv.f_view([shape.micro_batch, shape.seq_len, -1])?;
    let leaf = |x: &Tensor| Ok::<_, ComputeError>(x.f_detach()?.set_requires_grad(keep));
    let part = |start: i64, heads: i64| {
        leaf(&all.f_narrow(2, start * shape.head_dim, heads * shape.head_dim)?)
    };
    let leaves = [
        part(0, shape.heads)?,
        part(shape.heads, shape.kv_heads)?,
        part(shape.heads + shape.kv_heads, shape.kv_heads)?,
    ];
    // The graph owns these values: when backward runs, the unit's buffer may hold another unit.
    let copy = |x: &Tensor| Ok::<_, ComputeError>(x.f_detach_copy()?.set_requires_grad(keep));
    let norms = [copy(norms[0])?, copy(norms[1])?];
    let form = attention::Attention {
        config,
        rotary: Some(rotary),
        head_norms: Some([&norms[0], &norms[1]]),
        window: None,
        documents,
        masks: Masks::NONE,
    };
    let [query, key, value] = &leaves;
    let output = form.of([query, key, value])?;
    let attn_out = output.f_detach()?.f_to_kind(qkv.kind())?;
    Ok(Attention {
        shape,
        attn_out: attn_out.f_view([shape.rows(), -1])?,
        leaves: Leaves::Projected(leaves, norms),
        output,
    })
}

/// Computes attention with the kernel that torch chooses; rounded to the query's kind.
fn mix(
    [query, key, value]: &[Tensor; 3],
    shape: Shape,
    documents: Option<&Documents>,
) -> Result<Tensor, ComputeError> {
    let share = shape.heads / shape.kv_heads;
    let attn_out = causal_attention([query, key, value], share, None, documents, &Masks::NONE)?;
    Ok(attn_out.f_to_kind(query.kind())?)
}

impl Attention {
    /// Most bytes kept: query, key and value, the result, and a number for each row and head; repeated heads
    /// (of which attention within documents needs none on a GPU), and what the norms of heads keep for each row. Weights of these norms, some hundred bytes, are not
    /// counted.
    pub(super) fn size_bytes(&self) -> usize {
        let (leaves, normed) = match &self.leaves {
            Leaves::Rotated(leaves) => (leaves, 0),
            Leaves::Projected(leaves, _) => {
                let elem_bytes = self.attn_out.kind().elt_size_in_bytes();
                let elems = leaves[0].numel() + leaves[1].numel();
                (leaves, elems * normed_elem_bytes(elem_bytes))
            }
        };
        let leaves: usize = leaves.iter().map(size_bytes).sum();
        let repeated = if self.shape.heads == self.shape.kv_heads {
            0
        } else {
            2 * size_bytes(&self.attn_out)
        };
        let sums = (self.shape.rows() * self.shape.heads) as usize * size_of::<f32>();
        leaves + normed + repeated + size_bytes(&self.attn_out) + sums
    }

    /// Computes the gradient of `qkv` before rotation, [rows, columns], from that of `attn_out`; also the
    /// gradients of the norms of heads.
    pub(super) fn backward(
        self,
        ops: &Ops,
        rotary: &Rotary,
        grad_mixed: &Tensor,
    ) -> Result<(Tensor, Vec<Tensor>), ComputeError> {
        let shape = self.shape;
        let kind = (grad_mixed.kind(), grad_mixed.device());
        let packed = Tensor::f_empty([shape.rows(), shape.columns()], kind)?;
        let leaves = match &self.leaves {
            Leaves::Rotated(leaves) => leaves,
            Leaves::Projected(leaves, norms) => {
                let grad = grad_mixed.f_to_kind(self.output.kind())?;
                let inputs: Vec<&Tensor> = leaves.iter().chain(norms).collect();
                let mut grads = vjp(&[&self.output], &[&grad.f_view_as(&self.output)?], &inputs)?;
                let of_norms = grads.split_off(leaves.len());
                let mut start = 0;
                for grad in grads {
                    let columns = grad.size()[2];
                    let grad = grad.f_reshape([shape.rows(), columns])?;
                    packed.f_narrow(1, start, columns)?.f_copy_(&grad)?;
                    start += columns;
                }
                return Ok((packed, of_norms));
            }
        };
        let grad = grad_mixed
            .f_view([
                shape.micro_batch,
                shape.seq_len,
                shape.heads,
                shape.head_dim,
            ])?
            .f_transpose(1, 2)?;
        let leaves: Vec<&Tensor> = leaves.iter().collect();
        let grads = vjp(&[&self.output], &[&grad], &leaves)?;
        let turns = [Turn::Backward, Turn::Backward, Turn::Not];
        let mut start = 0;
        for (grad, turn) in grads.iter().zip(turns) {
            let count = grad.size()[1];
            let from = grad.f_transpose(1, 2)?;
            ops.rotary(&from, &shape.of(&packed, start, count)?, rotary, turn)?;
            start += count;
        }
        Ok((packed, Vec::new()))
    }
}

/// Bytes that the norm of a query or key head keeps for each element of `elem_bytes`: the widened element if
/// it is narrower than fp32, the quotient, the rotated result.
pub(crate) fn normed_elem_bytes(elem_bytes: usize) -> usize {
    let widened = if elem_bytes < size_of::<f32>() {
        size_of::<f32>()
    } else {
        0
    };
    widened + 2 * elem_bytes
}
