//! How much memory the arithmetic takes beside what the caller holds: known before the start, so that a run that does not
//! fit is refused.
//!
//! The caller holds the units' weights and the activations kept between units. What torch takes on top is largest in one
//! of three places: a block's graph with its gradients, a slice of logits with the projection's gradient, the
//! embedding's gradient. The counts below follow the operators in block.rs, attention.rs and head.rs; `tests/model_memory.rs` holds
//! them against what a process really takes.

use super::ActivationCheckpointing;
use super::attention::queries_at_a_time;
use super::explicit;
use super::head::LOGITS_ELEMS_MAX;
use super::values::adjacent;
use crate::model::{Dropout, Dtype, Mlp, ModelConfig, ParamRole, UnitLayout, unit_layouts};

/// What is alive at the peak times this is what the process has: freed pieces of one size do not serve another. Measured 1.5
/// to 2.3 times what is alive with glibc; giving every freed piece back instead (`M_MMAP_THRESHOLD`) takes 2.5 times as
/// long a step in page faults. The counts here are some 30 % high by themselves.
const FRAGMENTATION: f64 = 1.75;

/// Sums, gradients of losses, and all of an fp32 run.
const WIDE_BYTES: u64 = 4;

/// What a unit is computed with at a time.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Tokens of one.
    pub seq_len: usize,
    /// Micro-batches that are summed in a step: from two on, sums are fp32.
    pub micro_batches: usize,
    /// Slices of a block's feed-forward half.
    pub tiles: usize,
}

/// Most bytes torch takes at a time for micro-batches of `micro_batch` sequences of `seq_len` tokens, beside weights and
/// kept activations.
pub fn working_bytes(config: &ModelConfig, dropout: &Dropout, dtype: Dtype, work: Work) -> u64 {
    let Work {
        micro_batch,
        seq_len,
        micro_batches,
        ..
    } = work;
    let units = unit_layouts(config);
    let tokens = (micro_batch * seq_len) as u64;
    let elem_bytes = dtype.elem_bytes() as u64;
    let elems = |unit: &UnitLayout| unit.elems as u64;
    let (embedding, block, head) = (
        elems(&units[0]),
        elems(&units[1]),
        elems(&units[units.len() - 1]),
    );
    let sum_bytes = if micro_batches > 1 {
        WIDE_BYTES
    } else {
        elem_bytes
    };
    // 16-bit weights are widened for products on the CPU, and their gradients come back wide before they are rounded.
    let widened_bytes = if dtype != Dtype::Fp32 { WIDE_BYTES } else { 0 };

    let hidden = config.hidden_size as u64;
    let graph = graph_bytes(config, dropout, work);
    let largest = units[1]
        .params
        .iter()
        .map(|param| param.elems() as u64)
        .max()
        .unwrap_or(0);
    let block_bytes =
        graph + block * (widened_bytes + elem_bytes + sum_bytes) + largest * WIDE_BYTES;

    let vocab = config.vocab_size as u64;
    let slice = (tokens * vocab).min((LOGITS_ELEMS_MAX as u64).max(vocab));
    let projection = if config.tied { embedding } else { head };
    // The widened projection, its gradient and their sum; another one for a second use, another one for
    // several micro-batches.
    let copies = 3 + u64::from(config.tied) + u64::from(micro_batches > 1);
    let head_bytes = slice * 5 * WIDE_BYTES
        + 8 * tokens * hidden * WIDE_BYTES
        + projection * copies * WIDE_BYTES;
    let embedding_bytes = tokens * hidden * WIDE_BYTES + embedding * 2 * WIDE_BYTES;
    // A tied embedding's sum waits from the head to the end of backward.
    let waiting = if config.tied {
        embedding * WIDE_BYTES
    } else {
        0
    };
    let alive = block_bytes.max(head_bytes).max(embedding_bytes) + waiting;
    (alive as f64 * FRAGMENTATION) as u64
}

/// A block's graph in torch's operators, with gradients in flight, as if all were fp32.
fn graph_bytes(config: &ModelConfig, dropout: &Dropout, work: Work) -> u64 {
    let Work {
        micro_batch,
        seq_len,
        tiles,
        ..
    } = work;
    let hidden = config.hidden_size as u64;
    let attention = (config.heads * config.head_dim()) as u64;
    // One slice of it at a time.
    let feed_forward = config.intermediate_size.div_ceil(tiles) as u64;
    let form = config.architecture.form();
    // Kept for backward: two norms (input, quotient, result) and two sums; query, key, value, output twice; gate, its silu,
    // up, their product.
    let mut kept_elems = 8 * hidden + 6 * attention;
    kept_elems += match form.mlp {
        Mlp::GatedSilu => 4 * feed_forward,
        Mlp::Gelu => 2 * feed_forward,
    };
    if form.qk_norm {
        kept_elems += 6 * attention;
    }
    if dropout.residual > 0.0 {
        // Twice: what stays, and the scaled result; before, the numbers that choose.
        kept_elems += 4 * hidden;
    }
    if tiles > 1 {
        // The norm's result and its gradient, the sum of the parts, the gradient they all have; and what the slice before left in
        // pieces that do not serve this one.
        kept_elems += 4 * hidden + 4 * feed_forward;
    }
    // Then gradients in flight: of the widest, some at once.
    let flying_elems = 4 * hidden.max(attention).max(feed_forward);
    let tokens = (micro_batch * seq_len) as u64;
    tokens * (kept_elems + flying_elems) * WIDE_BYTES
        + weights_bytes(config, dropout, micro_batch, seq_len)
}

/// Copies of attention's weights that are there at a time where some are left out: scores, hidden, softmax, chosen; the
/// numbers that choose, or gradients.
const WEIGHTS_COPIES: u64 = 8;

/// What attention of one layer takes for all its weights at once where it needs them; for who sees whom, where a window hides
/// something.
fn weights_bytes(
    config: &ModelConfig,
    dropout: &Dropout,
    micro_batch: usize,
    seq_len: usize,
) -> u64 {
    let hiding = config.sliding_window.filter(|w| w.tokens < seq_len);
    if dropout.attention > 0.0 {
        let all = (micro_batch * config.heads * seq_len * seq_len) as u64;
        all * WEIGHTS_COPIES * WIDE_BYTES
    } else if let Some(window) = hiding {
        let queries = queries_at_a_time(window.tokens as i64) as usize;
        let keys = seq_len.min(queries + window.tokens);
        (seq_len * keys) as u64 * (1 + WIDE_BYTES)
    } else {
        0
    }
}

/// What torch keeps from the device beyond what is alive: pieces of one size that do not serve another.
const DEVICE_FRAGMENTATION: f64 = 1.3;

/// Buffers of cuBLAS and cuBLASLt, 32 MiB each on Hopper, and room for a vendor that takes more.
const LIBRARY_BYTES: u64 = 128 << 20;

/// Into how many parts flash attention's deterministic backward pass sums the query's gradient: so many that every
/// multiprocessor has work. An H200 has 132.
const ATTENTION_PARTS: u64 = 160;

/// What a process takes of a GPU before its first tensor: context, code of cuBLAS and torch. A guess on the safe side: with
/// it a run on an H200 was planned at 20.8 GiB and took 20.3. No part of [`device_working_bytes`].
pub const DEVICE_CONTEXT_BYTES: u64 = 1 << 30;

/// As [`working_bytes`], of a GPU's memory. The caller holds weights, gradients' buffers and kept activations.
pub fn device_working_bytes(
    config: &ModelConfig,
    dropout: &Dropout,
    dtype: Dtype,
    work: Work,
) -> u64 {
    let Work {
        micro_batch,
        seq_len,
        micro_batches,
        tiles,
    } = work;
    let units = unit_layouts(config);
    let tokens = (micro_batch * seq_len) as u64;
    let elem_bytes = dtype.elem_bytes() as u64;
    let elems = |unit: &UnitLayout| unit.elems as u64;
    let (embedding, block, head) = (
        elems(&units[0]),
        elems(&units[1]),
        elems(&units[units.len() - 1]),
    );
    let several = micro_batches > 1;
    let hidden = config.hidden_size as u64;
    let query = (config.heads * config.head_dim()) as u64;
    let key = (config.kv_heads * config.head_dim()) as u64;
    let feed_forward = config.intermediate_size as u64;
    let projected = query + 2 * key;
    let repeated = if config.heads == config.kv_heads {
        0
    } else {
        2 * query
    };

    // Computed again and kept: the first norm, query, key and value, attention's output (twice, where torch lays it out
    // otherwise).
    let attended = hidden + projected + repeated + 2 * query;
    // At the down projection: the sum, the second norm, gate and up, and their product's gradient.
    let at_down = attended + 2 * hidden + 3 * feed_forward;
    // At attention: gradients of the sum and of attention's output, of query, key and value, and those packed.
    let at_attention = attended + hidden + query + projected + repeated + projected;
    let head_dim = config.head_dim() as u64;
    let attention_parts =
        (ATTENTION_PARTS * seq_len as u64 * head_dim + tokens * query) * WIDE_BYTES;
    let graph = if tiles == 1 && explicit::block_is_written_out(config, dropout, seq_len) {
        (tokens * at_down * elem_bytes).max(tokens * at_attention * elem_bytes + attention_parts)
            + tokens * normed_bytes(config, elem_bytes)
    } else {
        graph_bytes(config, dropout, work) + attention_parts + block * elem_bytes
    };
    // From the second micro-batch on: the sums, and the largest product before it is added; twice, since a sum is new.
    let largest = (projected.max(2 * feed_forward) * hidden) * (elem_bytes + WIDE_BYTES);
    let sums = if several {
        block * WIDE_BYTES + largest
    } else {
        0
    };
    // Weights that are not adjacent are copied together, and their gradients are separate.
    let copies = if side_by_side(&units[1]) { 0 } else { 2 };
    let block_bytes = graph + sums + block * elem_bytes * copies;

    let vocab = config.vocab_size as u64;
    // A head that is not written out has some fp32 copies of its smaller slices.
    let (logits_max, logits_bytes) = if explicit::head_is_written_out(config) {
        (explicit::LOGITS_ELEMS_MAX as u64, elem_bytes)
    } else {
        (LOGITS_ELEMS_MAX as u64, 5 * WIDE_BYTES)
    };
    let projection = if config.tied { embedding } else { head };
    // Its fp32 sum over slices; where another is there already, that one and the new sum of both.
    let added = |again: bool| if again { 3 } else { 1 };
    let head_bytes = (tokens * vocab).min(logits_max.max(vocab)) * logits_bytes
        + 3 * tokens * hidden * elem_bytes
        + projection * WIDE_BYTES * added(several || config.tied);
    let embedding_bytes = tokens * hidden * WIDE_BYTES
        + tokens * 64
        + embedding * WIDE_BYTES * added(several || config.tied);
    // A tied embedding's sum waits from the head to the end of backward.
    let waiting = if config.tied {
        embedding * WIDE_BYTES
    } else {
        0
    };
    let alive = block_bytes.max(head_bytes).max(embedding_bytes) + waiting;
    (alive as f64 * DEVICE_FRAGMENTATION) as u64 + LIBRARY_BYTES
}

/// Whether a GPU can keep anything of such a model's blocks from forward to backward.
pub fn can_keep(config: &ModelConfig, dropout: &Dropout, seq_len: usize) -> bool {
    explicit::block_is_written_out(config, dropout, seq_len)
}

/// Bytes that a block keeps for each token beside its input, elements of `elem_bytes`. All blocks keep so from forward to
/// backward, for every micro-batch.
///
/// None where blocks are not written out: those are always computed again.
pub fn kept_bytes_a_token(
    config: &ModelConfig,
    dropout: &Dropout,
    seq_len: usize,
    elem_bytes: usize,
    keep: ActivationCheckpointing,
) -> usize {
    if !can_keep(config, dropout, seq_len) {
        return 0;
    }
    let query = config.heads * config.head_dim();
    let key = config.kv_heads * config.head_dim();
    let repeated = if config.heads == config.kv_heads {
        0
    } else {
        2 * query
    };
    let attention =
        (query + 2 * key + query + repeated) * elem_bytes + config.heads * size_of::<f32>();
    let attention = attention + normed_bytes(config, elem_bytes as u64) as usize;
    let products = (config.hidden_size + 2 * config.intermediate_size) * elem_bytes;
    match keep {
        ActivationCheckpointing::Full => 0,
        ActivationCheckpointing::Attention => attention,
        ActivationCheckpointing::Matmuls => attention + products,
    }
}

/// What norms of query and key heads keep for each token.
fn normed_bytes(config: &ModelConfig, elem_bytes: u64) -> u64 {
    if !config.architecture.form().qk_norm {
        return 0;
    }
    let elems = (config.heads + config.kv_heads) * config.head_dim();
    (elems * explicit::normed_elem_bytes(elem_bytes as usize)) as u64
}

/// Whether query, key and value are one matrix as they lie, and gate and up too.
fn side_by_side(block: &UnitLayout) -> bool {
    let side_by_side = |first, last| match (block.find(first), block.find(last)) {
        (Some(first), Some(last)) => adjacent(&block.params[first..=last]),
        _ => true,
    };
    side_by_side(ParamRole::Query, ParamRole::Value) && side_by_side(ParamRole::Gate, ParamRole::Up)
}
