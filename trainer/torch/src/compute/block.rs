//! One transformer block in torch operators, composed according to the configuration and equal to the blocks
//! of Hugging Face's models.

use std::rc::Rc;

use kernels_torch::vjp;
use tch::Tensor;

use super::attention::AutogradAttention;
use super::documents::Documents;
use super::dropout::{DropoutSite, Masks};
use super::linear::{linear, product_input};
use super::norm::{NormWeights, norm};
use super::params::Params;
use super::positions::Rotary;
use super::sequence::Sequence;
use super::{ComputeError, GradSink};
use training_run::model::{Mlp, ModelConfig, ParamRole};

/// Parameters of the second half of a block, the MLP.
pub(super) const HALF: [ParamRole; 8] = [
    ParamRole::PostNorm,
    ParamRole::PostNormBias,
    ParamRole::Gate,
    ParamRole::GateBias,
    ParamRole::Up,
    ParamRole::UpBias,
    ParamRole::Down,
    ParamRole::DownBias,
];

/// A block in torch operators, whose backward pass is autograd's, with its weights.
pub(super) struct AutogradBlock<'a> {
    pub(super) config: &'a ModelConfig,
    /// `None` if positions are learned.
    pub(super) rotary: Option<Rotary>,
    pub(super) params: Params<'a>,
    /// Number of tokens that a query sees, including its own; `None`: all.
    pub(super) window: Option<usize>,
    pub(super) documents: Option<Rc<Documents>>,
    pub(super) masks: Masks,
    /// The ranks that divide each sequence; `None` if this one has whole sequences.
    pub(super) sequence: Option<&'a Sequence>,
}

/// The first half of a block, up to the sum with the attention output, with what its backward pass needs.
pub(super) struct AttendedTape {
    pub(super) output: Tensor,
    leaf: Tensor,
    exchanged: Option<ExchangedTape>,
}

/// Graphs between exchanges: from the block's input to `qkv`, from `shared` to `attn_out`, and from `own` to the output.
struct ExchangedTape {
    qkv: [Tensor; 3],
    shared: [Tensor; 3],
    attn_out: Tensor,
    own: Tensor,
}

impl AutogradBlock<'_> {
    /// Computes the block's output for input `x`, both [micro_batch, seq_len, hidden_size].
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor, ComputeError> {
        self.fed(&self.attended(x)?)
    }

    /// Computes the second half of the block: `x` plus the MLP output.
    fn fed(&self, x: &Tensor) -> Result<Tensor, ComputeError> {
        use ParamRole::*;
        let normed = self.norm(x, PostNorm, PostNormBias)?;
        let wide = match self.config.architecture.form().mlp {
            Mlp::GatedSilu => self
                .project(&normed, Gate, GateBias)?
                .f_silu()?
                .f_mul(&self.project(&normed, Up, UpBias)?)?,
            Mlp::Gelu => self.project(&normed, Up, UpBias)?.f_gelu("tanh")?,
        };
        let mlp_out = self.project(&product_input(&wide)?, Down, DownBias)?;
        Ok(x.f_add(&self.masks.apply(DropoutSite::MlpOut, &mlp_out)?)?)
    }

    /// Computes the gradient of `x` in two halves, so that a rank with a part of each sequence can exchange gradients in the first one.
    /// Gradients of the parameters, which are leaves of a graph, are added to `grads`.
    pub(super) fn backward_in_halves(
        &self,
        x: &Tensor,
        grad_output: &Tensor,
        grads: &mut GradSink,
    ) -> Result<Tensor, ComputeError> {
        let tape = self.attended_tape(x)?;
        let middle = tape.output.f_detach()?.set_requires_grad(true);
        let output = self.fed(&middle)?;
        let params = self.params.indices(|member| HALF.contains(&member));
        let grad = self.back(&[&output], &[grad_output], &[&middle], &params, grads)?;
        let [grad] = exactly(grad);
        drop((output, middle));
        self.attended_backward(tape, &grad, grads)
    }

    /// Computes the first half of the block: `x` plus the attention output.
    pub(super) fn attended(&self, x: &Tensor) -> Result<Tensor, ComputeError> {
        let qkv = self.projected(x)?;
        let attn_out = match self.sequence {
            None => self.attend(&qkv)?,
            Some(sequence) => {
                let shared = self.shared(sequence, &qkv, false)?;
                sequence.output_to_tokens(&self.attend(&shared)?)?
            }
        };
        self.with_attn_out(x, &attn_out)
    }

    /// Like [`AutogradBlock::attended`], for [`AutogradBlock::attended_backward`].
    pub(super) fn attended_tape(&self, x: &Tensor) -> Result<AttendedTape, ComputeError> {
        let leaf = x.f_detach()?.set_requires_grad(true);
        let Some(sequence) = self.sequence else {
            return Ok(AttendedTape {
                output: self.attended(&leaf)?,
                leaf,
                exchanged: None,
            });
        };
        let qkv = self.projected(&leaf)?;
        let shared = self.shared(sequence, &qkv, true)?;
        let attn_out = self.attend(&shared)?;
        let own = sequence.output_to_tokens(&attn_out.f_detach()?)?;
        let own = own.set_requires_grad(true);
        Ok(AttendedTape {
            output: self.with_attn_out(&leaf, &own)?,
            leaf,
            exchanged: Some(ExchangedTape {
                qkv,
                shared,
                attn_out,
                own,
            }),
        })
    }

    /// Computes the gradient of the input from that of the output. Gradients of the parameters are added to `grads`.
    pub(super) fn attended_backward(
        &self,
        tape: AttendedTape,
        grad: &Tensor,
        grads: &mut GradSink,
    ) -> Result<Tensor, ComputeError> {
        let AttendedTape {
            output,
            leaf,
            exchanged,
        } = tape;
        let (Some(exchanged), Some(sequence)) = (exchanged, self.sequence) else {
            let params = self.params.indices(|member| !HALF.contains(&member));
            let [grad] = exactly(self.back(&[&output], &[grad], &[&leaf], &params, grads)?);
            return Ok(grad);
        };
        let is_out = |member| matches!(member, ParamRole::Out | ParamRole::OutBias);
        let is_head_norm = |member| matches!(member, ParamRole::QueryNorm | ParamRole::KeyNorm);
        let ExchangedTape {
            qkv,
            shared,
            attn_out,
            own,
        } = exchanged;
        let params = self.params.indices(is_out);
        let inputs = [&leaf, &own];
        let [of_sum, grad] = exactly(self.back(&[&output], &[grad], &inputs, &params, grads)?);
        drop((output, own));

        let grad = sequence.grads_to_heads(&grad)?;
        let params = self.params.indices(is_head_norm);
        let inputs = shared.each_ref();
        let of_shared: [Tensor; 3] =
            exactly(self.back(&[&attn_out], &[&grad], &inputs, &params, grads)?);
        drop((attn_out, shared));

        let of_qkv = sequence.grads_to_tokens(&Tensor::f_cat(&of_shared, 2)?)?;
        let params = self
            .params
            .indices(|member| !HALF.contains(&member) && !is_out(member) && !is_head_norm(member));
        let (outputs, of_outputs) = (qkv.each_ref(), of_qkv.each_ref());
        let [of_norm] = exactly(self.back(&outputs, &of_outputs, &[&leaf], &params, grads)?);
        Ok(of_sum.f_add(&of_norm)?)
    }

    /// Computes the backward pass from `outputs` and returns the gradients of `inputs`. Gradients of `params` are added to `grads`.
    pub(super) fn back(
        &self,
        outputs: &[&Tensor],
        grad_outputs: &[&Tensor],
        inputs: &[&Tensor],
        params: &[usize],
        grads: &mut GradSink,
    ) -> Result<Vec<Tensor>, ComputeError> {
        let all = self.params.all();
        let of_params = params.iter().map(|&at| &all[at]);
        let wanted: Vec<&Tensor> = of_params.chain(inputs.iter().copied()).collect();
        let mut found = vjp(outputs, grad_outputs, &wanted)?;
        let of_inputs = found.split_off(params.len());
        for (&param, grad) in params.iter().zip(found) {
            grads.add(param, grad)?;
        }
        Ok(of_inputs)
    }

    /// Computes query, key and value.
    fn projected(&self, x: &Tensor) -> Result<[Tensor; 3], ComputeError> {
        use ParamRole::*;
        let normed = self.norm(x, InputNorm, InputNormBias)?;
        Ok([
            self.project(&normed, Query, QueryBias)?,
            self.project(&normed, Key, KeyBias)?,
            self.project(&normed, Value, ValueBias)?,
        ])
    }

    /// Exchanges query, key and value of this rank's tokens for those of its heads: leaves of another graph with `graph`.
    fn shared(
        &self,
        sequence: &Sequence,
        qkv: &[Tensor; 3],
        graph: bool,
    ) -> Result<[Tensor; 3], ComputeError> {
        let [q, k, v] = qkv;
        let qkv = [&q.f_detach()?, &k.f_detach()?, &v.f_detach()?];
        let shared = sequence.qkv_to_heads(qkv)?;
        let parts = sequence.parts(&shared)?;
        Ok(parts.map(|part| part.set_requires_grad(graph)))
    }

    /// Computes attention of query, key and value.
    fn attend(&self, [q, k, v]: &[Tensor; 3]) -> Result<Tensor, ComputeError> {
        use ParamRole::{KeyNorm, QueryNorm};
        let head_norms = self.params.find(QueryNorm).zip(self.params.find(KeyNorm));
        let attention = AutogradAttention {
            config: self
                .sequence
                .map_or(self.config, Sequence::attention_config),
            rotary: self.rotary.as_ref(),
            head_norms: head_norms.map(|(query, key)| [query, key]),
            window: self.window,
            documents: self.documents.as_deref(),
            masks: self.masks,
        };
        attention.forward([q, k, v])
    }

    /// Computes `x` plus the projected attention output.
    fn with_attn_out(&self, x: &Tensor, attn_out: &Tensor) -> Result<Tensor, ComputeError> {
        let attn_out = self.project(attn_out, ParamRole::Out, ParamRole::OutBias)?;
        Ok(x.f_add(&self.masks.apply(DropoutSite::AttnOut, &attn_out)?)?)
    }

    /// Normalizes `x` and converts it to an input for matrix products.
    pub(super) fn norm(
        &self,
        x: &Tensor,
        weight: ParamRole,
        bias: ParamRole,
    ) -> Result<Tensor, ComputeError> {
        let weights = NormWeights::new(&self.params, weight, bias);
        product_input(&norm(self.config, x, &weights)?)
    }

    /// Multiplies `x`, which is in the form of [`product_input`], and rounds the product to the parameters'
    /// kind.
    fn project(
        &self,
        x: &Tensor,
        weight: ParamRole,
        bias: ParamRole,
    ) -> Result<Tensor, ComputeError> {
        let weight = self.params.get(weight);
        let bias = self.params.find(bias).map(product_input).transpose()?;
        linear(x, &product_input(weight)?, bias.as_ref(), weight.kind())
    }
}

/// As many gradients as there were inputs.
fn exactly<const N: usize>(found: Vec<Tensor>) -> [Tensor; N] {
    found.try_into().expect("each input has a gradient")
}
