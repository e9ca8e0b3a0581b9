//! Sequences that several ranks divide among themselves: each rank computes consecutive tokens with all heads, and attention for
//! all tokens with a part of the heads.
//!
//! ```text
//!   rank 0   tokens 0 to p-1, all heads    ─┐ all-to-all ┌▶   all tokens, first half of the heads   ─┐ all-to-all ┌▶   tokens 0 to p-1
//!   rank 1   tokens p to 2p-1, all heads   ─┘            └▶   all tokens, second half of the heads  ─┘            └▶   tokens p to 2p-1
//! ```
//!
//! Backward exchanges gradients in the opposite directions. If there are more ranks than heads of keys and values, several ranks get the
//! same head, whose gradients are then added. No graph of autograd crosses an exchange.

use std::sync::Arc;

use kernels_torch::collective::TensorExchange;
use tch::Tensor;

use super::ComputeError;
use super::linear::at_least_fp32;
use training_run::model::ModelConfig;

/// The ranks that divide each sequence, and how they divide a model's attention.
pub(super) struct Sequence {
    exchange: Arc<TensorExchange>,
    /// The model with this rank's heads alone, for attention.
    attention: ModelConfig,
    /// Ranks that have the same heads of keys and values.
    sharers: i64,
    head_dim: i64,
}

impl Sequence {
    /// Panics if the heads of `config` cannot be divided among the ranks of `exchange`, which the settings' check refuses.
    pub(super) fn new(exchange: Arc<TensorExchange>, config: &ModelConfig) -> Self {
        let sharers = (exchange.ranks() / config.kv_heads).max(1);
        Self {
            attention: config.with_heads_of_rank(exchange.ranks()),
            exchange,
            sharers: sharers as i64,
            head_dim: config.head_dim() as i64,
        }
    }

    /// The model with this rank's heads alone.
    pub(super) fn attention_config(&self) -> &ModelConfig {
        &self.attention
    }

    pub(super) fn ranks(&self) -> usize {
        self.exchange.ranks()
    }

    pub(super) fn exchange(&self) -> &TensorExchange {
        &self.exchange
    }

    /// Widths of this rank's query, key and value.
    fn widths(&self) -> [i64; 3] {
        let ModelConfig {
            heads, kv_heads, ..
        } = self.attention;
        [heads, kv_heads, kv_heads].map(|heads| heads as i64 * self.head_dim)
    }

    /// Exchanges query, key and value of this rank's tokens, each [micro_batch, own tokens, all heads], for those of its heads:
    /// [micro_batch, all tokens, widths of query, key and value together].
    pub(super) fn qkv_to_heads(&self, qkv: [&Tensor; 3]) -> Result<Tensor, ComputeError> {
        let ranks = self.ranks() as i64;
        let (micro_batch, tokens, _) = qkv[0].size3()?;
        let widths = self.widths();
        let shape = [ranks, micro_batch, tokens, widths.iter().sum()];
        let parts = Tensor::f_empty(shape, (qkv[0].kind(), qkv[0].device()))?;
        let mut start = 0;
        for (x, width) in qkv.into_iter().zip(widths) {
            let x = match x.size()[2] == ranks * width {
                true => x.f_reshape([micro_batch, tokens, ranks, width])?,
                // Several ranks get the same heads.
                false => x
                    .f_reshape([micro_batch, tokens, -1, 1, width])?
                    .f_expand([-1, -1, -1, self.sharers, -1], false)?
                    .f_reshape([micro_batch, tokens, ranks, width])?,
            };
            let place = parts.f_narrow(3, start, width)?;
            place.f_permute([1, 2, 0, 3])?.f_copy_(&x)?;
            start += width;
        }
        self.joined_tokens(&self.exchange.all_to_all(&parts)?)
    }

    /// Divides the result of [`Sequence::qkv_to_heads`] into query, key and value.
    pub(super) fn parts(&self, qkv: &Tensor) -> Result<[Tensor; 3], ComputeError> {
        let parts = qkv.f_split_with_sizes(&self.widths()[..], 2)?;
        Ok(parts.try_into().expect("three widths"))
    }

    /// The opposite of [`Sequence::qkv_to_heads`], for gradients.
    pub(super) fn grads_to_tokens(&self, grads: &Tensor) -> Result<[Tensor; 3], ComputeError> {
        let parts = self.exchange_tokens(grads)?;
        let mut start = 0;
        let mut of = |width: i64, sharers: i64| {
            let grads = parts.f_narrow(3, start, width)?;
            start += width;
            self.sum_of_sharers(&grads, sharers)
        };
        let [query, key, value] = self.widths();
        Ok([
            of(query, 1)?,
            of(key, self.sharers)?,
            of(value, self.sharers)?,
        ])
    }

    /// Exchanges the attention output of this rank's heads, [micro_batch, all tokens, own width], for that of its tokens: [micro_batch, own
    /// tokens, whole width].
    pub(super) fn output_to_tokens(&self, attn_out: &Tensor) -> Result<Tensor, ComputeError> {
        Ok(self.exchange_tokens(attn_out)?.f_flatten(2, 3)?)
    }

    /// The opposite of [`Sequence::output_to_tokens`], for gradients.
    pub(super) fn grads_to_heads(&self, grad: &Tensor) -> Result<Tensor, ComputeError> {
        let (micro_batch, tokens, width) = grad.size3()?;
        let ranks = self.ranks() as i64;
        let parts = grad
            .f_reshape([micro_batch, tokens, ranks, width / ranks])?
            .f_permute([2, 0, 1, 3])?
            .f_contiguous()?;
        self.joined_tokens(&self.exchange.all_to_all(&parts)?)
    }

    /// Divides `x` [micro_batch, all tokens, width] by tokens among the ranks and returns what all of them have for this rank's tokens:
    /// [micro_batch, own tokens, ranks, width].
    fn exchange_tokens(&self, x: &Tensor) -> Result<Tensor, ComputeError> {
        let (micro_batch, tokens, width) = x.size3()?;
        let ranks = self.ranks() as i64;
        let parts = x
            .f_reshape([micro_batch, ranks, tokens / ranks, width])?
            .f_transpose(0, 1)?
            .f_contiguous()?;
        let parts = self.exchange.all_to_all(&parts)?;
        Ok(parts.f_permute([1, 2, 0, 3])?)
    }

    /// Joins the tokens that each rank has sent, [ranks, micro_batch, tokens, width]: [micro_batch, all tokens, width].
    fn joined_tokens(&self, parts: &Tensor) -> Result<Tensor, ComputeError> {
        let (ranks, micro_batch, tokens, width) = parts.size4()?;
        Ok(parts
            .f_transpose(0, 1)?
            .f_reshape([micro_batch, ranks * tokens, width])?)
    }

    /// Adds the gradients that each `sharers` ranks have for the same heads. `grads` is [micro_batch, tokens, ranks, width]; the result has
    /// the width of all heads.
    fn sum_of_sharers(&self, grads: &Tensor, sharers: i64) -> Result<Tensor, ComputeError> {
        if sharers == 1 {
            return Ok(grads.f_flatten(2, 3)?);
        }
        let (micro_batch, tokens, _, width) = grads.size4()?;
        let kind = grads.kind();
        let sum = grads
            .f_reshape([micro_batch, tokens, -1, sharers, width])?
            .f_sum_dim_intlist(&[3i64][..], false, at_least_fp32(kind))?;
        Ok(sum.f_to_kind(kind)?.f_flatten(2, 3)?)
    }
}
