//! One transformer block in torch operators, composed according to the configuration and equal to the blocks
//! of Hugging Face's models.

use std::rc::Rc;

use tch::Tensor;

use super::ComputeError;
use super::attention::AutogradAttention;
use super::documents::Documents;
use super::dropout::{DropoutSite, Masks};
use super::linear::{linear, product_input};
use super::norm::{NormWeights, norm};
use super::params::Params;
use super::positions::Rotary;
use training_run::model::{Mlp, ModelConfig, ParamRole};

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
}

impl AutogradBlock<'_> {
    /// Computes the block's output for input `x`, both [micro_batch, seq_len, hidden_size].
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor, ComputeError> {
        use ParamRole::*;
        let x = self.attended(x)?;
        let normed = self.norm(&x, PostNorm, PostNormBias)?;
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

    /// Computes the first half of the block: `x` plus the attention output.
    pub(super) fn attended(&self, x: &Tensor) -> Result<Tensor, ComputeError> {
        use ParamRole::*;
        let normed = self.norm(x, InputNorm, InputNormBias)?;
        let [q, k, v] = [
            self.project(&normed, Query, QueryBias)?,
            self.project(&normed, Key, KeyBias)?,
            self.project(&normed, Value, ValueBias)?,
        ];
        let head_norms = self.params.find(QueryNorm).zip(self.params.find(KeyNorm));
        let attention = AutogradAttention {
            config: self.config,
            rotary: self.rotary.as_ref(),
            head_norms: head_norms.map(|(query, key)| [query, key]),
            window: self.window,
            documents: self.documents.as_deref(),
            masks: self.masks,
        };
        let attn_out = self.project(&attention.forward([&q, &k, &v])?, Out, OutBias)?;
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
