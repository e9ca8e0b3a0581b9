//! Forward of a block, and backward with recomputation of everything that was not kept.

use std::rc::Rc;

use kernels_torch::CudnnAttention;
use tch::Tensor;

use super::attention::{Attention, Means, Shape, attention, normed_attention};
use super::ops::{NormOutput, Ops};
use super::products::{LargestValues, Products};
use super::projection::Projection;
use crate::compute::documents::Documents;
use crate::compute::positions::Rotary;
use crate::compute::sequence::Sequence;
use crate::compute::values::size_bytes;
use crate::compute::{ComputeError, GradSink, UnitWeights};
use training_run::computation::ActivationCheckpointing;
use training_run::model::{ModelConfig, ParamRole, UnitLayout};

/// A block's weights: query, key and value are one matrix, and so are gate and up.
pub(crate) struct BlockWeights {
    input_norm: Norm,
    qkv: Projection,
    /// Norms of query and key heads.
    head_norms: Option<[Norm; 2]>,
    out: Projection,
    post_norm: Norm,
    gate_up: Projection,
    down: Projection,
}

/// A norm's weight and its index in the layout.
struct Norm {
    weight: Tensor,
    at: usize,
}

impl BlockWeights {
    pub(crate) fn new(layout: &UnitLayout, weights: &UnitWeights) -> Result<Self, ComputeError> {
        use ParamRole::{
            Down, DownBias, Gate, GateBias, InputNorm, Key, KeyBias, KeyNorm, Out, OutBias,
            PostNorm, Query, QueryBias, QueryNorm, Up, UpBias, Value, ValueBias,
        };
        let norm = |member: ParamRole| {
            let at = layout.find(member)?;
            let weight = weights.param(&layout.params[at], false);
            Some(weight.map(|weight| Norm { weight, at }))
        };
        let always = |member| norm(member).expect("every block has both norms");
        let head_norms = match (norm(QueryNorm), norm(KeyNorm)) {
            (Some(query), Some(key)) => Some([query?, key?]),
            _ => None,
        };
        let projection = |members: &[_]| Projection::new(layout, weights, members);
        Ok(BlockWeights {
            input_norm: always(InputNorm)?,
            qkv: projection(&[(Query, QueryBias), (Key, KeyBias), (Value, ValueBias)])?,
            head_norms,
            out: projection(&[(Out, OutBias)])?,
            post_norm: always(PostNorm)?,
            gate_up: projection(&[(Gate, GateBias), (Up, UpBias)])?,
            down: projection(&[(Down, DownBias)])?,
        })
    }

    fn head_norms(&self) -> Option<[&Tensor; 2]> {
        let norms = self.head_norms.as_ref();
        norms.map(|[query, key]| [&query.weight, &key.weight])
    }
}

/// Values that a forward pass keeps for the backward pass, which recomputes the others. They own their
/// memory: the block's weights are released between the two passes ([`UnitWeights::give_back`] panics if
/// something still refers to them).
#[derive(Default)]
pub(crate) struct KeptActivations {
    attended: Option<BlockAttention>,
    /// Sum of the input and the attention output.
    sum: Option<Tensor>,
    gate_up: Option<Tensor>,
    largest: BlockLargest,
}

/// Largest values of factors, by projection.
#[derive(Default)]
struct BlockLargest {
    qkv: LargestValues,
    out: LargestValues,
    gate_up: LargestValues,
    down: LargestValues,
}

impl KeptActivations {
    /// Bytes of the kept values, without the largest values, a kibibyte each.
    pub(crate) fn size_bytes(&self) -> usize {
        let tensors = [&self.sum, &self.gate_up].into_iter().flatten();
        let attended = self.attended.as_ref().map_or(0, BlockAttention::size_bytes);
        tensors.map(size_bytes).sum::<usize>() + attended
    }
}

/// Attention, and its output for the tokens of this rank.
struct BlockAttention {
    attention: Attention,
    /// [rows, heads * head_dim]; `None` if it is attention's own output.
    exchanged: Option<Tensor>,
}

impl BlockAttention {
    fn attn_out(&self) -> &Tensor {
        self.exchanged.as_ref().unwrap_or(&self.attention.attn_out)
    }

    fn size_bytes(&self) -> usize {
        self.attention.size_bytes() + self.exchanged.as_ref().map_or(0, size_bytes)
    }
}

/// Values of a block up to gate and up, which its backward pass needs.
struct BlockActivations {
    first: NormOutput,
    attended: BlockAttention,
    sum: Tensor,
    second: NormOutput,
    gate_up: Tensor,
    largest: BlockLargest,
}

/// A block's computation with its weights.
pub(crate) struct Block<'a> {
    pub(crate) ops: &'a Ops,
    pub(crate) products: &'a Products,
    pub(crate) config: &'a ModelConfig,
    pub(crate) rotary: Rotary,
    pub(crate) documents: Option<Rc<Documents>>,
    /// Number of tokens that a query sees, including its own; `None`: all.
    pub(crate) window: Option<usize>,
    /// cuDNN's attention; `None`: torch's.
    pub(crate) cudnn: Option<&'a CudnnAttention>,
    /// The ranks that divide each sequence; `None` if this one has whole sequences.
    pub(crate) sequence: Option<&'a Sequence>,
    pub(crate) weights: BlockWeights,
}

impl Block<'_> {
    /// Computes the block's output for `input`, both [micro_batch, seq_len, hidden_size], and returns it with
    /// the values to keep.
    pub(crate) fn forward(
        &self,
        input: &Tensor,
        keep: ActivationCheckpointing,
    ) -> Result<(Tensor, KeptActivations), ComputeError> {
        let (shape, x) = rows(self.config, input)?;
        let passed = self.pass(
            shape,
            &x,
            keep != ActivationCheckpointing::Full,
            KeptActivations::default(),
        )?;
        let gated = self.ops.gated(&passed.gate_up)?;
        let down = &passed.largest.down;
        let mut output = self.weights.down.forward(self.products, &gated, down)?;
        let _ = output.f_add_(&passed.sum)?;
        let products = keep == ActivationCheckpointing::Matmuls;
        let kept = KeptActivations {
            attended: (keep != ActivationCheckpointing::Full).then_some(passed.attended),
            sum: products.then_some(passed.sum),
            gate_up: products.then_some(passed.gate_up),
            largest: passed.largest,
        };
        Ok((output.f_view_as(input)?, kept))
    }

    /// Computes the gradient of `input` and adds those of the weights to `grads`. Values that are not in
    /// `kept` are recomputed up to gate and up; the down projection's output is not needed.
    pub(crate) fn backward(
        &self,
        input: &Tensor,
        kept: KeptActivations,
        grad_output: &Tensor,
        grads: &mut GradSink,
    ) -> Result<Tensor, ComputeError> {
        let (ops, products, weights) = (self.ops, self.products, &self.weights);
        let (shape, x) = rows(self.config, input)?;
        let grad_output = grad_output.f_view_as(&x)?;
        let BlockActivations {
            first,
            attended,
            sum,
            second,
            mut gate_up,
            largest,
        } = self.pass(shape, &x, true, kept)?;

        // Down, and the product of silu(gate) and up.
        let grad = products.gradient(&grad_output)?;
        let mut gated = weights.down.back(products, &grad, &largest.down)?;
        ops.gated_backward(&mut gated, &mut gate_up)?;
        (weights.down).add_grads(products, grads, &grad, &gated, &largest.down)?;
        drop(grad);
        drop(gated);

        // Gate and up, and the second norm.
        let grad = products.gradient(&gate_up)?;
        let (projection, of) = (&weights.gate_up, &largest.gate_up);
        projection.add_grads(products, grads, &grad, &second.output, of)?;
        let grad_normed = projection.back(products, &grad, of)?;
        drop(grad);
        drop(gate_up);
        let (grad_sum, grad_norm) = ops.rms_norm_backward(
            &grad_normed,
            &sum,
            &weights.post_norm.weight,
            &second.scale,
            Some(&grad_output),
        )?;
        grads.add(weights.post_norm.at, grad_norm)?;
        drop((grad_normed, sum, second));

        // The output projection and attention.
        let grad = products.gradient(&grad_sum)?;
        let (projection, of) = (&weights.out, &largest.out);
        projection.add_grads(products, grads, &grad, attended.attn_out(), of)?;
        let grad_mixed = projection.back(products, &grad, of)?;
        drop(grad);
        let (grad_qkv, grad_head_norms) = self.attended_backward(shape, attended, grad_mixed)?;
        for (norm, grad) in weights.head_norms.iter().flatten().zip(grad_head_norms) {
            grads.add(norm.at, grad)?;
        }

        // Query, key and value, and the first norm.
        let grad = products.gradient(&grad_qkv)?;
        let (projection, of) = (&weights.qkv, &largest.qkv);
        projection.add_grads(products, grads, &grad, &first.output, of)?;
        let grad_normed = projection.back(products, &grad, of)?;
        drop(grad);
        drop(grad_qkv);
        let (grad_input, grad_norm) = ops.rms_norm_backward(
            &grad_normed,
            &x,
            &weights.input_norm.weight,
            &first.scale,
            Some(&grad_sum),
        )?;
        grads.add(weights.input_norm.at, grad_norm)?;
        Ok(grad_input.f_view_as(input)?)
    }

    /// How attention is computed.
    fn means(&self) -> Means<'_> {
        Means {
            window: self.window,
            documents: self.documents.as_deref(),
            cudnn: self.cudnn.filter(|_| {
                let documents = self.documents.as_ref();
                documents.is_none_or(|documents| documents.are_long())
            }),
        }
    }

    /// Computes the values that `kept` does not have. With `graph`, records the graph of attention. Norms are
    /// always recomputed, which costs less than keeping them.
    fn pass(
        &self,
        shape: Shape,
        x: &Tensor,
        graph: bool,
        kept: KeptActivations,
    ) -> Result<BlockActivations, ComputeError> {
        let (ops, products) = (self.ops, self.products);
        let (weights, eps) = (&self.weights, self.config.norm_eps);
        let largest = kept.largest;
        let first = ops.rms_norm(x, &weights.input_norm.weight, eps)?;
        let attended = match kept.attended {
            Some(attended) => attended,
            None => {
                let qkv = (weights.qkv).forward(products, &first.output, &largest.qkv)?;
                self.attended(shape, qkv, graph)?
            }
        };
        let (sum, second) = match kept.sum {
            Some(sum) => {
                let second = ops.rms_norm(&sum, &weights.post_norm.weight, eps)?;
                (sum, second)
            }
            None => {
                let attn_out = attended.attn_out();
                let added = weights.out.forward(products, attn_out, &largest.out)?;
                ops.add_rms_norm(x, &added, &weights.post_norm.weight, eps)?
            }
        };
        let gate_up = match kept.gate_up {
            Some(gate_up) => gate_up,
            None => (weights.gate_up).forward(products, &second.output, &largest.gate_up)?,
        };
        Ok(BlockActivations {
            first,
            attended,
            sum,
            second,
            gate_up,
            largest,
        })
    }
}

impl Block<'_> {
    /// Computes attention of `qkv` [rows, columns]. With `graph`, records its graph. Ranks that divide each sequence exchange query, key and
    /// value first, and the output afterwards.
    fn attended(
        &self,
        shape: Shape,
        qkv: Tensor,
        graph: bool,
    ) -> Result<BlockAttention, ComputeError> {
        let Some(sequence) = self.sequence else {
            return Ok(BlockAttention {
                attention: self.attention(self.config, shape, &qkv, graph)?,
                exchanged: None,
            });
        };
        let [query, key, value] = &shape.projected(&qkv)?;
        let shared = sequence.qkv_to_heads([query, key, value])?;
        drop(qkv);
        let (micro_batch, seq_len, columns) = shared.size3()?;
        let config = sequence.attention_config();
        let of_heads = Shape::new(config, micro_batch, seq_len);
        let shared = shared.f_view([of_heads.rows(), columns])?;
        let attention = self.attention(config, of_heads, &shared, graph)?;
        let attn_out = &attention.attn_out;
        let own = sequence.output_to_tokens(&attn_out.f_view([micro_batch, seq_len, -1])?)?;
        Ok(BlockAttention {
            exchanged: Some(own.f_view([shape.rows(), -1])?),
            attention,
        })
    }

    fn attention(
        &self,
        config: &ModelConfig,
        shape: Shape,
        qkv: &Tensor,
        graph: bool,
    ) -> Result<Attention, ComputeError> {
        let (rotary, means) = (&self.rotary, self.means());
        match self.weights.head_norms() {
            None => attention(self.ops, rotary, shape, &means, qkv, graph),
            Some(norms) => normed_attention(config, rotary, norms, shape, &means, qkv, graph),
        }
    }

    /// Computes the gradient of query, key and value, [rows, columns], from that of the attention output; also those of the norms of heads.
    fn attended_backward(
        &self,
        shape: Shape,
        attended: BlockAttention,
        grad_mixed: Tensor,
    ) -> Result<(Tensor, Vec<Tensor>), ComputeError> {
        let (attention, means) = (attended.attention, self.means());
        let Some(sequence) = self.sequence else {
            return attention.backward(self.ops, &self.rotary, &means, &grad_mixed);
        };
        let by_token = [shape.micro_batch, shape.seq_len, -1];
        let grad = sequence.grads_to_heads(&grad_mixed.f_view(by_token)?)?;
        drop((grad_mixed, attended.exchanged));
        let width = grad.size()[2];
        let grad = grad.f_view([-1, width])?;
        let (grad_shared, grad_norms) =
            attention.backward(self.ops, &self.rotary, &means, &grad)?;
        drop(grad);
        let columns = grad_shared.size()[1];
        let grads =
            sequence.grads_to_tokens(&grad_shared.f_view([shape.micro_batch, -1, columns])?)?;
        let packed = Tensor::f_cat(&grads, 2)?;
        Ok((packed.f_view([shape.rows(), -1])?, grad_norms))
    }
}

/// Returns the batch's sizes, and the input as [rows, hidden_size].
fn rows(config: &ModelConfig, input: &Tensor) -> Result<(Shape, Tensor), ComputeError> {
    let (micro_batch, seq_len, hidden_size) = input.size3()?;
    let shape = Shape::new(config, micro_batch, seq_len);
    Ok((shape, input.f_view([shape.rows(), hidden_size])?))
}
