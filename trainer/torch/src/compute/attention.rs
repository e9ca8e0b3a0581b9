//! Causal attention with the options of models: norms of heads, a sliding window, dropout of weights.

use tch::{Device, Kind, Tensor};

use super::ComputeError;
use super::documents::Documents;
use super::dropout::{DropoutSite, Masks};
use super::linear::{at_least_fp32, product_input};
use super::norm::rms_norm;
use super::positions::Rotary;
use training_run::computation::queries_at_a_time;
use training_run::model::ModelConfig;

/// Options of one layer's attention.
pub(super) struct AutogradAttention<'a> {
    pub(super) config: &'a ModelConfig,
    /// Rotates query and key; `None` if positions are learned.
    pub(super) rotary: Option<&'a Rotary>,
    /// Weights of the norms of query and key heads.
    pub(super) head_norms: Option<[&'a Tensor; 2]>,
    /// Number of tokens that a query sees, including its own; `None`: all.
    pub(super) window: Option<usize>,
    pub(super) documents: Option<&'a Documents>,
    pub(super) masks: Masks,
}

impl AutogradAttention<'_> {
    /// Computes attention of query, key and value, each [micro_batch, seq_len, heads * head_dim]. The result
    /// has the kind that matrix products take.
    pub(super) fn forward(&self, [q, k, v]: [&Tensor; 3]) -> Result<Tensor, ComputeError> {
        let (micro_batch, seq_len, _) = q.size3()?;
        let [query, key, value] = &self.inputs([q, k, v])?;
        let share = (self.config.heads / self.config.kv_heads) as i64;
        let attn_out = causal_attention(
            [query, key, value],
            share,
            self.window,
            self.documents,
            &self.masks,
        )?;
        let attn_out = attn_out
            .f_transpose(1, 2)?
            .f_reshape([micro_batch, seq_len, -1])?;
        // Rounded like the output of bf16 attention.
        product_input(&attn_out.f_to_kind(q.kind())?)
    }

    /// Returns query and key, normalized and rotated, and value, each [micro_batch, heads, seq_len, head_dim].
    pub(super) fn inputs(&self, [q, k, v]: [&Tensor; 3]) -> Result<[Tensor; 3], ComputeError> {
        let config = self.config;
        let (micro_batch, seq_len, _) = q.size3()?;
        let head_dim = config.head_dim() as i64;
        let head_norm = |index: usize| self.head_norms.map(|norms| norms[index]);
        // [micro_batch, heads, seq_len, head_dim]
        let heads = |x: &Tensor, count: usize, norm: Option<&Tensor>| {
            let heads = x.f_view([micro_batch, seq_len, count as i64, head_dim])?;
            let heads = match norm {
                Some(weight) => rms_norm(&heads, weight, config.norm_eps)?,
                None => heads,
            };
            Ok::<_, ComputeError>(heads.f_transpose(1, 2)?)
        };
        let rotated = |x: Tensor| match self.rotary {
            Some(rotary) => rotary.turn(&x),
            None => Ok(x),
        };
        let query = rotated(heads(q, config.heads, head_norm(0))?)?;
        let key = rotated(heads(k, config.kv_heads, head_norm(1))?)?;
        Ok([query, key, heads(v, config.kv_heads, None)?])
    }
}

/// Computes causal attention of [micro_batch, heads, seq_len, head_dim], within each of `documents`; `share`
/// query heads use each key and value head. The result has the kind of [`product_input`].
pub(super) fn causal_attention(
    [query, key, value]: [&Tensor; 3],
    share: i64,
    window: Option<usize>,
    documents: Option<&Documents>,
    masks: &Masks,
) -> Result<Tensor, ComputeError> {
    let [query, key, value] = [
        product_input(query)?,
        product_input(key)?,
        product_input(value)?,
    ];
    let longest = documents.map_or(query.size()[2], |documents| documents.longest);
    // A window as long as the longest document hides nothing.
    let window = window.map(|tokens| tokens as i64).filter(|&w| w < longest);
    let weighs = masks.leave_out(DropoutSite::Attention);
    if let Some(documents) = documents.filter(|_| !weighs && Documents::at_once(&query)) {
        return documents.attend_at_once([&query, &key, &value], window);
    }
    let key = shared_heads(&key, share)?;
    let value = shared_heads(&value, share)?;
    let whole = |[query, key, value]: [&Tensor; 3]| match window {
        Some(window) if window < query.size()[2] => {
            windowed([query, key, value], window, queries_at_a_time(window))
        }
        _ => attend(query, key, value, None),
    };
    match documents {
        _ if weighs => weighed([&query, &key, &value], window, documents, masks),
        Some(documents) => documents.attend_each([&query, &key, &value], whole),
        None => whole([&query, &key, &value]),
    }
}

/// Computes each query's weighted sum over the keys that it sees: itself and those before it, or those that
/// `seen` selects.
fn attend(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    seen: Option<&Tensor>,
) -> Result<Tensor, ComputeError> {
    Ok(Tensor::f_scaled_dot_product_attention(
        query,
        key,
        value,
        seen,
        0.0,
        seen.is_none(),
        None,
        false,
    )?)
}

/// Computes causal attention within a window, some queries at a time with the keys that they see, so that
/// memory and work grow linearly with the sequence.
fn windowed(
    [query, key, value]: [&Tensor; 3],
    window: i64,
    queries: i64,
) -> Result<Tensor, ComputeError> {
    let seq_len = query.size()[2];
    let mut outputs = Vec::new();
    for start in (0..seq_len).step_by(queries as usize) {
        let count = queries.min(seq_len - start);
        // The first query sees the furthest back.
        let before = start.min(window - 1);
        let keys = |x: &Tensor| x.f_narrow(2, start - before, before + count);
        let seen = seen([count, before + count], Some(window), query.device())?;
        let query = query.f_narrow(2, start, count)?;
        outputs.push(attend(&query, &keys(key)?, &keys(value)?, Some(&seen))?);
    }
    Ok(Tensor::f_cat(&outputs, 2)?)
}

/// Computes causal attention with all weights at once and dropout. Torch's fused kernels would draw the
/// dropout from their own generator, so recomputation would differ.
fn weighed(
    [query, key, value]: [&Tensor; 3],
    window: Option<i64>,
    documents: Option<&Documents>,
    masks: &Masks,
) -> Result<Tensor, ComputeError> {
    let (seq_len, head_dim) = (query.size()[2], query.size()[3]);
    let scores = query
        .f_matmul(&key.f_transpose(-2, -1)?)?
        .f_mul_scalar(1.0 / (head_dim as f64).sqrt())?;
    let seen = seen([seq_len, seq_len], window, query.device())?;
    let seen = match documents {
        Some(documents) => documents.same()?.f_logical_and(&seen)?,
        None => seen,
    };
    let hidden = seen.f_logical_not()?;
    let weights = scores
        .f_masked_fill(&hidden, f64::NEG_INFINITY)?
        .f_softmax(-1, at_least_fp32(query.kind()))?
        .f_to_kind(query.kind())?;
    let weights = masks.apply(DropoutSite::Attention, &weights)?;
    Ok(weights.f_matmul(value)?)
}

/// Returns which keys (columns) each query (row) sees: its own token's and those before it within the window.
/// The last query and the last key belong to the same token.
fn seen(
    [queries, keys]: [i64; 2],
    window: Option<i64>,
    device: Device,
) -> Result<Tensor, ComputeError> {
    let own = keys - queries;
    let causal = Tensor::f_ones([queries, keys], (Kind::Bool, device))?.f_tril(own)?;
    Ok(match window {
        Some(tokens) => causal.f_triu(own + 1 - tokens)?,
        None => causal,
    })
}

/// Repeats each key or value head for the `share` query heads that use it. Repeating here, not with
/// `enable_gqa`, lets torch choose from all attention kernels of a device.
fn shared_heads(x: &Tensor, share: i64) -> Result<Tensor, ComputeError> {
    if share == 1 {
        return Ok(x.shallow_clone());
    }
    let (micro_batch, heads, seq_len, head_dim) = x.size4()?;
    let repeated = x
        .f_unsqueeze(2)?
        .f_expand([micro_batch, heads, share, seq_len, head_dim], false)?;
    Ok(repeated.f_reshape([micro_batch, heads * share, seq_len, head_dim])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(seed: i64) -> Tensor {
        let shape = [2, 3, 11, 4];
        let counter = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
        (counter * (1.7 + seed as f64)).sin().view(shape)
    }

    #[test]
    fn queries_in_groups_give_the_result_of_all_queries_at_once() {
        let [query, key, value] = [0, 1, 2].map(numbers);
        for window in 1..=12 {
            let seen = seen([11, 11], Some(window), Device::Cpu).unwrap();
            let whole = attend(&query, &key, &value, Some(&seen)).unwrap();
            for queries in [1, 2, 3, 5, 10, 11, 20] {
                let parts = windowed([&query, &key, &value], window, queries).unwrap();
                let apart = f64::try_from((&parts - &whole).abs().max()).unwrap();
                assert!(
                    apart < 1e-14,
                    "window {window}, {queries} at a time: {apart:.1e}"
                );
            }
        }
    }

    #[test]
    fn a_query_sees_its_own_token_and_the_window_before_it() {
        let rows = |seen: Tensor| {
            let columns = seen.size()[1] as usize;
            let flat = Vec::<bool>::try_from(seen.view([-1])).unwrap();
            let words = flat.chunks(columns).map(|row| {
                let word = row.iter().map(|&sees| if sees { 'x' } else { '.' });
                word.collect::<String>()
            });
            words.collect::<Vec<_>>()
        };
        let of = |sizes, window| rows(seen(sizes, window, Device::Cpu).unwrap());
        assert_eq!(of([3, 3], None), ["x..", "xx.", "xxx"]);
        assert_eq!(of([3, 3], Some(2)), ["x..", "xx.", ".xx"]);
        assert_eq!(of([2, 4], Some(3)), ["xxx.", ".xxx"]);
    }
}
