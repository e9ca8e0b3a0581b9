//! How much memory the arithmetic takes beside what the caller holds: known before the start, so that a run that does not
//! fit is refused.
//!
//! The caller holds the units' weights and the activations kept between units. What torch takes on top is largest in one
//! of three places: a block's graph with its gradients, a slice of logits with the projection's gradient, the
//! embedding's gradient. The counts below follow the operators in block.rs and head.rs; `tests/model_memory.rs` holds
//! them against what a process really takes.

use super::Dtype;
use super::head::LOGITS_ELEMS_MAX;
use crate::model::{LlamaConfig, UnitLayout, unit_layouts};

/// What is alive at the peak times this is what the process has: freed pieces of one size do not serve another. Measured 1.5
/// to 2.3 times what is alive with glibc; giving every freed piece back instead (`M_MMAP_THRESHOLD`) takes 2.5 times as
/// long a step in page faults. The counts here are some 30 % high by themselves.
const FRAGMENTATION: f64 = 1.75;

/// Sums, gradients of losses, and all of an fp32 run.
const WIDE_BYTES: u64 = 4;

/// Most bytes torch takes at a time for micro-batches of `micro_batch` sequences of `seq_len` tokens, beside weights and
/// kept activations. `micro_batches` of them are summed in a step: from two on, sums are fp32.
pub fn working_bytes(
    config: &LlamaConfig,
    dtype: Dtype,
    micro_batch: usize,
    seq_len: usize,
    micro_batches: usize,
) -> u64 {
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
    // bf16 weights are widened for products on the CPU, and their gradients come back wide before they are rounded.
    let widened_bytes = if dtype == Dtype::Bf16 { WIDE_BYTES } else { 0 };

    let hidden = config.hidden_size as u64;
    let attention = (config.heads * config.head_dim()) as u64;
    let feed_forward = config.intermediate_size as u64;
    // Kept for backward: two norms (input, quotient, result) and two sums; query, key, value, output twice; gate, its silu,
    // up, their product. Then gradients in flight: of the widest, some at once.
    let kept_elems = 8 * hidden + 6 * attention + 4 * feed_forward;
    let flying_elems = 4 * hidden.max(attention).max(feed_forward);
    let graph = tokens * (kept_elems + flying_elems) * WIDE_BYTES;
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
    // Widened, its gradient, and their sum; one more where it is summed over uses, one more over micro-batches.
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
