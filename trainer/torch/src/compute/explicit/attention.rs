//! Rotary positions and attention.

use kernels_torch::fused::Turn;
use kernels_torch::{CudnnAttention, PackedDocuments, vjp};
use tch::Tensor;

use super::ops::Ops;
use crate::compute::ComputeError;
use crate::compute::attention::{self, causal_attention};
use crate::compute::documents::Documents;
use crate::compute::dropout::Masks;
use crate::compute::positions::Rotary;
use crate::compute::values::size_bytes;
use training_run::computation::normed_elem_bytes;
use training_run::model::ModelConfig;

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
    fn narrow_heads(&self, qkv: &Tensor, start: i64, count: i64) -> Result<Tensor, ComputeError> {
        let all = qkv.f_view([self.micro_batch, self.seq_len, -1, self.head_dim])?;
        Ok(all.f_narrow(2, start, count)?)
    }

    /// Returns query, key and value of `qkv` [rows, columns], each [micro_batch, heads, seq_len, head_dim].
    fn parts(&self, qkv: &Tensor) -> Result<[Tensor; 3], ComputeError> {
        let part = |start, count| {
            Ok::<_, ComputeError>(self.narrow_heads(qkv, start, count)?.f_transpose(1, 2)?)
        };
        let (heads, kv_heads) = (self.heads, self.kv_heads);
        Ok([
            part(0, heads)?,
            part(heads, kv_heads)?,
            part(heads + kv_heads, kv_heads)?,
        ])
    }

    /// Returns query, key and value of `qkv` [rows, columns], each [micro_batch, seq_len, width].
    pub(super) fn projected(&self, qkv: &Tensor) -> Result<[Tensor; 3], ComputeError> {
        let all = qkv.f_view([self.micro_batch, self.seq_len, -1])?;
        let part =
            |start: i64, heads: i64| all.f_narrow(2, start * self.head_dim, heads * self.head_dim);
        Ok([
            part(0, self.heads)?,
            part(self.heads, self.kv_heads)?,
            part(self.heads + self.kv_heads, self.kv_heads)?,
        ])
    }

    /// Returns `x` [rows, heads * head_dim] as [micro_batch, heads, seq_len, head_dim].
    fn by_head(&self, x: &Tensor) -> Result<Tensor, ComputeError> {
        let shape = [self.micro_batch, self.seq_len, self.heads, self.head_dim];
        Ok(x.f_view(shape)?.f_transpose(1, 2)?)
    }

    /// Copies `grads`, each [micro_batch, seq_len, columns], side by side to the first columns of `packed`.
    fn pack(&self, packed: &Tensor, grads: &[Tensor]) -> Result<(), ComputeError> {
        let mut start = 0;
        for grad in grads {
            let columns = grad.size()[2];
            let grad = grad.f_reshape([self.rows(), columns])?;
            packed.f_narrow(1, start, columns)?.f_copy_(&grad)?;
            start += columns;
        }
        Ok(())
    }
}

/// How attention is computed, besides its shape.
pub(super) struct Means<'a> {
    /// Number of tokens that a query sees, including its own; `None`: all.
    pub(super) window: Option<usize>,
    pub(super) documents: Option<&'a Documents>,
    /// cuDNN's kernels; `None`: those that torch chooses.
    pub(super) cudnn: Option<&'a CudnnAttention>,
}

impl Means<'_> {
    fn window(&self) -> Option<i64> {
        self.window.map(|tokens| tokens as i64)
    }

    /// What cuDNN's attention needs of the documents.
    fn packed(&self, shape: Shape) -> Result<Option<&PackedDocuments>, ComputeError> {
        let packed = self
            .documents
            .map(|documents| documents.packed(shape.heads));
        packed.transpose()
    }
}

/// Values that attention's backward pass needs.
pub(super) struct Attention {
    shape: Shape,
    leaves: Leaves,
    mixed: AttentionTape,
    /// [rows, heads * head_dim]
    pub(super) attn_out: Tensor,
}

/// Inputs of attention.
enum Leaves {
    /// The rotated query, key and value, [micro_batch, heads, seq_len, head_dim].
    Rotated([Tensor; 3]),
    /// Query, key and value as projected, [micro_batch, seq_len, columns], and the weights of the norms of
    /// query and key heads.
    Projected([Tensor; 3], [Tensor; 2]),
}

/// What the kernel leaves for backward.
enum AttentionTape {
    /// Result of a graph of torch operators over the leaves.
    Graph(Tensor),
    /// cuDNN's statistics of each call, and its inputs if they are not the leaves: rotated query and key with the graph of their
    /// norms and rotation, and the value.
    Cudnn(Vec<Tensor>, Option<[Tensor; 3]>),
}

/// Computes causal attention of `qkv` [rows, columns]; rotates its query and key in place first. With `keep`
/// the graph is kept.
pub(super) fn attention(
    ops: &Ops,
    rotary: &Rotary,
    shape: Shape,
    means: &Means,
    qkv: &Tensor,
    keep: bool,
) -> Result<Attention, ComputeError> {
    let rotated = shape.narrow_heads(qkv, 0, shape.heads + shape.kv_heads)?;
    ops.rotary(&rotated, &rotated, rotary, Turn::Forward)?;
    if let Some(cudnn) = means.cudnn {
        let leaves = shape.parts(qkv)?;
        let [query, key, value] = &leaves;
        let attended = cudnn.forward([query, key, value], means.window(), means.packed(shape)?)?;
        return Ok(Attention {
            shape,
            leaves: Leaves::Rotated(leaves),
            mixed: AttentionTape::Cudnn(attended.stats, None),
            attn_out: attended.output.f_view([shape.rows(), -1])?,
        });
    }
    let leaf = |x: &Tensor| Ok::<_, ComputeError>(x.f_detach()?.set_requires_grad(keep));
    let [query, key, value] = &shape.parts(qkv)?;
    let leaves = [leaf(query)?, leaf(key)?, leaf(value)?];
    let output = mix(&leaves, shape, means)?;
    let attn_out = output
        .f_detach()?
        .f_transpose(1, 2)?
        .f_reshape([shape.rows(), -1])?;
    Ok(Attention {
        shape,
        leaves: Leaves::Rotated(leaves),
        mixed: AttentionTape::Graph(output),
        attn_out,
    })
}

/// Like [`attention()`], with query and key heads normalized by the weights `norms` before rotation. Does not change
/// `qkv`.
pub(super) fn normed_attention(
    config: &ModelConfig,
    rotary: &Rotary,
    norms: [&Tensor; 2],
    shape: Shape,
    means: &Means,
    qkv: &Tensor,
    keep: bool,
) -> Result<Attention, ComputeError> {
    let leaf = |x: &Tensor| Ok::<_, ComputeError>(x.f_detach()?.set_requires_grad(keep));
    let [query, key, value] = &shape.projected(qkv)?;
    let leaves = [leaf(query)?, leaf(key)?, leaf(value)?];
    // The graph owns these values: when backward runs, the unit's buffer may hold another unit.
    let copy = |x: &Tensor| Ok::<_, ComputeError>(x.f_detach_copy()?.set_requires_grad(keep));
    let norms = [copy(norms[0])?, copy(norms[1])?];
    let form = attention::AutogradAttention {
        config,
        rotary: Some(rotary),
        head_norms: Some([&norms[0], &norms[1]]),
        window: means.window,
        documents: means.documents,
        masks: Masks::NONE,
    };
    let [query, key, value] = &leaves;
    if let Some(cudnn) = means.cudnn {
        let inputs = form.inputs([query, key, value])?;
        let [query, key, value] = &detached(&inputs)?;
        let attended = cudnn.forward([query, key, value], means.window(), means.packed(shape)?)?;
        return Ok(Attention {
            shape,
            attn_out: attended.output.f_view([shape.rows(), -1])?,
            leaves: Leaves::Projected(leaves, norms),
            mixed: AttentionTape::Cudnn(attended.stats, Some(inputs)),
        });
    }
    let output = form.forward([query, key, value])?;
    let attn_out = output.f_detach()?.f_to_kind(qkv.kind())?;
    Ok(Attention {
        shape,
        attn_out: attn_out.f_view([shape.rows(), -1])?,
        leaves: Leaves::Projected(leaves, norms),
        mixed: AttentionTape::Graph(output),
    })
}

/// Computes attention with the kernel that torch chooses; rounded to the query's kind.
fn mix(
    [query, key, value]: &[Tensor; 3],
    shape: Shape,
    means: &Means,
) -> Result<Tensor, ComputeError> {
    let share = shape.heads / shape.kv_heads;
    let (window, documents) = (means.window, means.documents);
    let attn_out = causal_attention([query, key, value], share, window, documents, &Masks::NONE)?;
    Ok(attn_out.f_to_kind(query.kind())?)
}

impl Attention {
    /// Most bytes kept: query, key and value, the result, and a number for each row and head; repeated heads
    /// (of which attention within documents needs none on a GPU, and cuDNN's never), and what the norms of heads keep for each
    /// row. Weights of these norms, some hundred bytes, are not counted.
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
        let repeats = matches!(self.mixed, AttentionTape::Graph(_));
        let repeated = if !repeats || self.shape.heads == self.shape.kv_heads {
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
        means: &Means,
        grad_mixed: &Tensor,
    ) -> Result<(Tensor, Vec<Tensor>), ComputeError> {
        let shape = self.shape;
        let kind = (grad_mixed.kind(), grad_mixed.device());
        let packed = Tensor::f_empty([shape.rows(), shape.columns()], kind)?;
        let grad = shape.by_head(grad_mixed)?;
        match (&self.leaves, &self.mixed) {
            (Leaves::Rotated([query, key, value]), AttentionTape::Cudnn(stats, _)) => {
                let [of_query, of_key, of_value] = &shape.parts(&packed)?;
                cudnn_of(means).backward(
                    [query, key, value],
                    means.window(),
                    means.packed(shape)?,
                    (&shape.by_head(&self.attn_out)?, stats),
                    &grad,
                    [of_query, of_key, of_value],
                )?;
                let rotated = shape.narrow_heads(&packed, 0, shape.heads + shape.kv_heads)?;
                ops.rotary(&rotated, &rotated, rotary, Turn::Backward)?;
                Ok((packed, Vec::new()))
            }
            (Leaves::Rotated(leaves), AttentionTape::Graph(output)) => {
                let leaves: Vec<&Tensor> = leaves.iter().collect();
                let grads = vjp(&[output], &[&grad], &leaves)?;
                let turns = [Turn::Backward, Turn::Backward, Turn::Not];
                let mut start = 0;
                for (grad, turn) in grads.iter().zip(turns) {
                    let count = grad.size()[1];
                    let from = grad.f_transpose(1, 2)?;
                    ops.rotary(
                        &from,
                        &shape.narrow_heads(&packed, start, count)?,
                        rotary,
                        turn,
                    )?;
                    start += count;
                }
                Ok((packed, Vec::new()))
            }
            (Leaves::Projected(leaves, norms), AttentionTape::Graph(output)) => {
                let grad = grad_mixed.f_to_kind(output.kind())?.f_view_as(output)?;
                let inputs: Vec<&Tensor> = leaves.iter().chain(norms).collect();
                let mut grads = vjp(&[output], &[&grad], &inputs)?;
                let of_norms = grads.split_off(leaves.len());
                shape.pack(&packed, &grads)?;
                Ok((packed, of_norms))
            }
            (Leaves::Projected(leaves, norms), AttentionTape::Cudnn(stats, inputs)) => {
                let inputs = inputs.as_ref().expect("leaves are not its inputs");
                let [query, key, value] = &detached(inputs)?;
                // That of the value in its final place.
                let (of_query, of_key) = (query.f_empty_like()?, key.f_empty_like()?);
                let [_, _, of_value] = &shape.parts(&packed)?;
                cudnn_of(means).backward(
                    [query, key, value],
                    means.window(),
                    means.packed(shape)?,
                    (&shape.by_head(&self.attn_out)?, stats),
                    &grad,
                    [&of_query, &of_key, of_value],
                )?;
                let wanted = [&leaves[0], &leaves[1], &norms[0], &norms[1]];
                let [query, key, _] = inputs;
                let mut grads = vjp(&[query, key], &[&of_query, &of_key], &wanted)?;
                let of_norms = grads.split_off(2);
                shape.pack(&packed, &grads)?;
                Ok((packed, of_norms))
            }
        }
    }
}

/// The same tensors without their graph.
fn detached([query, key, value]: &[Tensor; 3]) -> Result<[Tensor; 3], ComputeError> {
    Ok([query.f_detach()?, key.f_detach()?, value.f_detach()?])
}

/// The kernels that computed forward.
fn cudnn_of<'a>(means: &Means<'a>) -> &'a CudnnAttention {
    means
        .cudnn
        .expect("forward and backward use the same kernels")
}
