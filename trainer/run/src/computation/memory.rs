//! Memory that the computation needs besides the caller's buffers. It is known before the start, so that a
//! run that does not fit is refused.
//!
//! The caller holds the units' weights and the activations kept between units. Torch's additional memory is
//! largest in one of three places: a block's graph with its gradients, a slice of logits with the
//! projection's gradient, the embedding's gradient. The counts below follow the operators in block.rs,
//! attention.rs and head.rs of `trainer/torch/src/compute/`. `trainer/torch/tests/model_memory.rs` compares them with the memory of a real process.

use kernels::attention::{AttentionSizes, backward_workspace_bytes, cudnn_supports};
use kernels::fp8::FP8_UNIT;

use super::{
    ActivationCheckpointing, AttentionKernel, DEVICE_LOGITS_ELEMS_MAX, LOGITS_ELEMS_MAX,
    LONG_DOCUMENT_TOKENS, Matmuls, block_is_written_out, head_is_written_out, normed_elem_bytes,
    queries_at_a_time,
};
use crate::model::{
    Dropout, Dtype, Mlp, ModelConfig, ParamRole, UnitLayout, adjacent, unit_layouts,
};

/// Factor from live memory to the memory of the process: freed pieces of one size do not serve requests of
/// another. Measured 1.5 to 2.3 with glibc. Returning every freed piece (`M_MMAP_THRESHOLD`) makes a step
/// take 2.5 times as long because of page faults. The counts here are already about 30 % too high.
const FRAGMENTATION: f64 = 1.75;

/// Bytes of an fp32 element: sums, gradients of losses, and everything in an fp32 run.
const WIDE_BYTES: u64 = 4;

/// Amount of data that a unit processes at a time.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Sequences in a micro-batch.
    pub micro_batch: usize,
    /// Tokens in a sequence.
    pub seq_len: usize,
    /// Ranks that divide each sequence among themselves.
    pub sequence_ranks: usize,
    /// Micro-batches summed in a step; with two or more, sums are fp32.
    pub micro_batches: usize,
    /// Chunks of a block's MLP.
    pub tiles: usize,
    pub attention: AttentionKernel,
    pub matmuls: Matmuls,
    /// Whether sums of attention have a fixed order.
    pub deterministic: bool,
}

impl Work {
    /// Tokens of a micro-batch on one rank.
    fn tokens(&self) -> u64 {
        (self.micro_batch * self.seq_len / self.sequence_ranks) as u64
    }
}

/// Widths of what ranks exchange that divide each sequence, for each token of a rank: of query, key and value, and of the attention output;
/// 0 for whole sequences.
pub fn exchanged_widths(config: &ModelConfig, sequence_ranks: usize) -> [u64; 2] {
    if sequence_ranks == 1 {
        return [0, 0];
    }
    let own = config.with_heads_of_rank(sequence_ranks);
    let all = |heads: usize| (sequence_ranks * heads * own.head_dim()) as u64;
    [all(own.heads + 2 * own.kv_heads), all(own.heads)]
}

/// Returns the most bytes that torch takes at a time for micro-batches of `micro_batch` sequences of
/// `seq_len` tokens, besides weights and kept activations.
pub fn working_bytes(config: &ModelConfig, dropout: &Dropout, dtype: Dtype, work: Work) -> u64 {
    let micro_batches = work.micro_batches;
    let units = unit_layouts(config);
    let tokens = work.tokens();
    let elem_bytes = dtype.elem_bytes() as u64;
    let [embedding, block, head] =
        [0, 1, units.len() - 1].map(|unit: usize| units[unit].elems as u64);
    let sum_bytes = if micro_batches > 1 {
        WIDE_BYTES
    } else {
        elem_bytes
    };
    // On the CPU, 16-bit weights are widened for products, and their gradients are fp32 until they are
    // rounded.
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
    // A tied embedding's sum is kept from the head to the end of backward.
    let waiting = if config.tied {
        embedding * WIDE_BYTES
    } else {
        0
    };
    let alive = block_bytes.max(head_bytes).max(embedding_bytes) + waiting;
    (alive as f64 * FRAGMENTATION) as u64
}

/// Counts a block's graph in torch operators with the gradients that exist at the same time, as if all were
/// fp32.
fn graph_bytes(config: &ModelConfig, dropout: &Dropout, work: Work) -> u64 {
    let Work {
        micro_batch,
        seq_len,
        sequence_ranks,
        tiles,
        ..
    } = work;
    let hidden = config.hidden_size as u64;
    let attention = (config.heads * config.head_dim()) as u64;
    // One chunk at a time.
    let feed_forward = config.intermediate_size.div_ceil(tiles) as u64;
    let form = config.architecture.form();
    // Kept for backward: two norms (input, quotient, result) and two sums; query, key, value and output
    // twice; gate, its silu, up, their product.
    let mut kept_elems = 8 * hidden + 6 * attention;
    kept_elems += match form.mlp {
        Mlp::GatedSilu => 4 * feed_forward,
        Mlp::Gelu => 2 * feed_forward,
    };
    if form.qk_norm {
        kept_elems += 6 * attention;
    }
    // Query, key and value as sent, received and joined, and as leaves of a graph of their own; the attention output before and after its
    // exchange, and its gradient.
    let [projected, output] = exchanged_widths(config, sequence_ranks);
    kept_elems += 4 * projected + 3 * output;
    if dropout.residual > 0.0 {
        // Twice: the mask and the scaled result; before that, the random numbers.
        kept_elems += 4 * hidden;
    }
    if tiles > 1 {
        // The norm's result and its gradient, the sum of the chunks, their common gradient; and what previous chunks left in
        // fragments, which depends on the buffers of a processor's kernels: the same step took 135 to 158 MB.
        kept_elems += 4 * hidden + 7 * feed_forward;
    }
    // Gradients that exist at the same time, at the widest tensor.
    let flying_elems = 4 * hidden.max(attention).max(feed_forward);
    work.tokens() * (kept_elems + flying_elems) * WIDE_BYTES
        + weights_bytes(config, dropout, micro_batch, seq_len)
}

/// Copies of the attention weights that exist at the same time with dropout: scores, hidden, softmax, kept;
/// the random numbers, or gradients.
const WEIGHTS_COPIES: u64 = 8;

/// Memory of one layer's attention for all its weights at once, if it needs them, and for the visibility mask
/// of a window.
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

/// Factor from live memory to the memory that torch takes from the device, because of fragmentation.
const DEVICE_FRAGMENTATION: f64 = 1.3;

/// Buffers of cuBLAS and cuBLASLt, 32 MiB each on Hopper, with a reserve for other vendors.
const LIBRARY_BYTES: u64 = 128 << 20;

/// Parts into which the deterministic backward pass of flash attention divides the sum of the query's
/// gradient: enough for every multiprocessor. An H200 has 132.
const ATTENTION_PARTS: u64 = 160;

/// GPU memory that a process takes before its first tensor: context, code of cuBLAS and torch. A safe estimate:
/// with it a run on an H200 was planned at 20.8 GiB and took 20.3. Not part of [`device_working_bytes`].
pub const DEVICE_CONTEXT_BYTES: u64 = 1 << 30;

/// Like [`working_bytes`], for a GPU's memory. The caller holds weights, gradient buffers and kept
/// activations.
pub fn device_working_bytes(
    config: &ModelConfig,
    dropout: &Dropout,
    dtype: Dtype,
    work: Work,
) -> u64 {
    let Work {
        micro_batch,
        seq_len,
        sequence_ranks,
        micro_batches,
        tiles,
        attention,
        matmuls,
        deterministic,
    } = work;
    let units = unit_layouts(config);
    let tokens = work.tokens();
    let elem_bytes = dtype.elem_bytes() as u64;
    let [embedding, block, head] =
        [0, 1, units.len() - 1].map(|unit: usize| units[unit].elems as u64);
    let several = micro_batches > 1;
    let hidden = config.hidden_size as u64;
    let query = (config.heads * config.head_dim()) as u64;
    let key = (config.kv_heads * config.head_dim()) as u64;
    let feed_forward = config.intermediate_size as u64;
    let projected = query + 2 * key;
    let [exchanged, exchanged_output] = exchanged_widths(config, sequence_ranks);
    // Of which ranks that divide sequences have those of their heads.
    let shared = projected.max(exchanged);
    let repeated = match attention {
        AttentionKernel::Torch if config.heads != config.kv_heads => 2 * query,
        _ => 0,
    };
    let parts_of_sequences = torch_parts_bytes(config, deterministic, seq_len, tokens);
    // Documents so short that torch computes them are many, so that few parts of each are enough. Their rows are rounded up.
    let document = seq_len.min(LONG_DOCUMENT_TOKENS);
    let parts_of_documents = torch_parts_bytes(config, deterministic, document, 2 * tokens);
    // At the widest projection: both layouts of its gradients, its input, and a layout of its weights.
    let widest = projected.max(2 * feed_forward);
    let fp8_bytes = fp8_bytes(matmuls, tokens, hidden, widest);
    let written_out = |kernel: AttentionKernel, parts_of_torch: u64| {
        // Recomputed and kept: the first norm, query, key and value, the attention output (twice if torch uses
        // another memory layout).
        let outputs = match kernel {
            AttentionKernel::Torch => 2,
            AttentionKernel::Cudnn => 1,
        };
        let attended = hidden + shared + repeated + outputs * query + exchanged_output;
        // At the down projection: the sum, the second norm, gate and up, and the gradient of their product.
        let at_down = attended + 2 * hidden + 3 * feed_forward;
        // At attention: gradients of the sum and of the attention output, of query, key and value, and these
        // packed; cuDNN writes them packed unless norms of heads follow.
        let unpacked = match kernel {
            AttentionKernel::Cudnn if !config.architecture.form().qk_norm => 0,
            _ => shared + repeated,
        };
        // An exchange has what is sent, received and joined.
        let exchange = 3 * exchanged + exchanged_output;
        let at_attention = attended + hidden + query + unpacked + shared + exchange;
        let parts = match kernel {
            AttentionKernel::Torch => {
                parts_of_torch + weights_bytes(config, dropout, micro_batch, seq_len)
            }
            AttentionKernel::Cudnn => {
                backward_workspace_bytes(&attention_sizes(config, work), deterministic)
            }
        };
        (tokens * at_down * elem_bytes).max(tokens * at_attention * elem_bytes + parts)
            + tokens * normed_bytes(config, elem_bytes)
            + fp8_bytes
    };
    let graph = if tiles > 1 || !block_is_written_out(config, dropout) {
        graph_bytes(config, dropout, work) + parts_of_sequences + block * elem_bytes
    } else {
        // Short documents are computed by torch whatever was chosen.
        written_out(attention, parts_of_sequences).max(match attention {
            AttentionKernel::Torch => 0,
            AttentionKernel::Cudnn => written_out(AttentionKernel::Torch, parts_of_documents),
        })
    };
    // With several micro-batches: the sums, and the largest gradient, unless its product adds it.
    let is_added = block_is_written_out(config, dropout) && matmuls == Matmuls::InDtype;
    let largest = if is_added {
        0
    } else {
        widest * hidden * elem_bytes
    };
    let sums = if several {
        block * WIDE_BYTES + largest
    } else {
        0
    };
    // Weights that are not adjacent are copied together, and their gradients are separate.
    let copies = if side_by_side(&units[1]) { 0 } else { 2 };
    let block_bytes = graph + sums + block * elem_bytes * copies;

    let vocab = config.vocab_size as u64;
    // A head without explicit backward has some fp32 copies of its smaller slices.
    let (logits_max, logits_bytes) = if head_is_written_out(config) {
        (DEVICE_LOGITS_ELEMS_MAX as u64, elem_bytes)
    } else {
        (LOGITS_ELEMS_MAX as u64, 5 * WIDE_BYTES)
    };
    let projection = if config.tied { embedding } else { head };
    // Its fp32 sum over slices; if there is a sum already, that one and the new sum of both.
    let added = |again: bool| if again { 3 } else { 1 };
    let head_bytes = (tokens * vocab).min(logits_max.max(vocab)) * logits_bytes
        + 3 * tokens * hidden * elem_bytes
        + projection * WIDE_BYTES * added(several || config.tied);
    let embedding_bytes = tokens * hidden * WIDE_BYTES
        + tokens * 64
        + embedding * WIDE_BYTES * added(several || config.tied);
    // A tied embedding's sum is kept from the head to the end of backward.
    let waiting = if config.tied {
        embedding * WIDE_BYTES
    } else {
        0
    };
    let alive = block_bytes.max(head_bytes).max(embedding_bytes) + waiting;
    (alive as f64 * DEVICE_FRAGMENTATION) as u64 + LIBRARY_BYTES
}

/// Memory in which flash attention's backward of torch sums the query's gradient, for `rows` rows in sequences of `tokens` tokens.
fn torch_parts_bytes(config: &ModelConfig, deterministic: bool, tokens: usize, rows: u64) -> u64 {
    let head_dim = config.head_dim() as u64;
    let parts = if deterministic { ATTENTION_PARTS } else { 0 };
    (parts * tokens as u64 * head_dim + rows * config.heads as u64 * head_dim) * WIDE_BYTES
}

/// Memory of a GPU for factors in 8 bits, where the widest projection has the width `widest`.
fn fp8_bytes(matmuls: Matmuls, tokens: u64, hidden: u64, widest: u64) -> u64 {
    match matmuls {
        Matmuls::InDtype => 0,
        Matmuls::Fp8 => tokens * (2 * widest + hidden) + widest * hidden,
    }
}

/// Returns whether a GPU can keep anything of this model's blocks from forward to backward.
pub fn can_keep(config: &ModelConfig, dropout: &Dropout) -> bool {
    block_is_written_out(config, dropout)
}

/// Returns why cuDNN's attention cannot compute this model's blocks, whatever the GPU; `None` if it can.
pub fn cudnn_refusal(
    config: &ModelConfig,
    dropout: &Dropout,
    dtype: Dtype,
    tiles: usize,
) -> Option<String> {
    if dtype == Dtype::Fp32 {
        return Some("it takes 16-bit numbers only".to_owned());
    }
    if tiles > 1 || !block_is_written_out(config, dropout) {
        return Some(
            "blocks of this form, or with the MLP in chunks, have no explicit backward".to_owned(),
        );
    }
    let head_dim = config.head_dim();
    (!cudnn_supports(head_dim)).then(|| {
        format!("it takes heads of up to 256 elements in multiples of 8, and these have {head_dim}")
    })
}

/// Returns why products in 8 bits cannot compute this model's blocks for micro-batches of `tokens` tokens, whatever the GPU; `None` if
/// they can.
pub fn fp8_refusal(
    config: &ModelConfig,
    dropout: &Dropout,
    dtype: Dtype,
    tiles: usize,
    tokens: usize,
) -> Option<String> {
    if dtype != Dtype::Bf16 {
        return Some("results are rounded to bf16, so model.dtype must be \"bf16\"".to_owned());
    }
    if tiles > 1 || !block_is_written_out(config, dropout) {
        return Some(
            "blocks of this form, with dropout, or with the MLP in chunks, have no explicit backward"
                .to_owned(),
        );
    }
    let sizes = [
        ("model.hidden_size", config.hidden_size),
        ("model.intermediate_size", config.intermediate_size),
        (
            "the width of all query heads",
            config.heads * config.head_dim(),
        ),
        (
            "the width of all key heads",
            config.kv_heads * config.head_dim(),
        ),
        ("a micro-batch's number of tokens", tokens),
    ];
    let (name, size) = (sizes.into_iter()).find(|(_, size)| !size.is_multiple_of(FP8_UNIT))?;
    Some(format!(
        "{name} is {size}, which is not a multiple of {FP8_UNIT}"
    ))
}

/// Sizes of a micro-batch's attention on one rank.
fn attention_sizes(config: &ModelConfig, work: Work) -> AttentionSizes {
    let config = &config.with_heads_of_rank(work.sequence_ranks);
    AttentionSizes {
        batch: work.micro_batch as i64,
        heads: config.heads as i64,
        kv_heads: config.kv_heads as i64,
        tokens: work.seq_len as i64,
        head_dim: config.head_dim() as i64,
        // Layers may have different windows; without one, most memory is needed.
        window: None,
    }
}

/// Bytes that a block keeps for each token of a rank besides its input, with elements of `elem_bytes`. Every block
/// keeps them from forward to backward, for every micro-batch.
///
/// `None` for blocks without explicit backward, which are always recomputed.
pub fn kept_bytes_a_token(
    config: &ModelConfig,
    dropout: &Dropout,
    kernel: AttentionKernel,
    elem_bytes: usize,
    keep: ActivationCheckpointing,
    sequence_ranks: usize,
) -> usize {
    if !can_keep(config, dropout) {
        return 0;
    }
    let query = config.heads * config.head_dim();
    let key = config.kv_heads * config.head_dim();
    let repeated = match kernel {
        AttentionKernel::Torch if config.heads != config.kv_heads => 2 * query,
        _ => 0,
    };
    // The output also as it was before its exchange.
    let [shared, exchanged] = exchanged_widths(config, sequence_ranks).map(|width| width as usize);
    let elems = (query + 2 * key).max(shared) + query + exchanged + repeated;
    let attention = elems * elem_bytes + config.heads * size_of::<f32>();
    let attention = attention + normed_bytes(config, elem_bytes as u64) as usize;
    let products = (config.hidden_size + 2 * config.intermediate_size) * elem_bytes;
    match keep {
        ActivationCheckpointing::Full => 0,
        ActivationCheckpointing::Attention => attention,
        ActivationCheckpointing::Matmuls => attention + products,
    }
}

/// Bytes that norms of query and key heads keep for each token.
fn normed_bytes(config: &ModelConfig, elem_bytes: u64) -> u64 {
    if !config.architecture.form().qk_norm {
        return 0;
    }
    let elems = (config.heads + config.kv_heads) * config.head_dim();
    (elems * normed_elem_bytes(elem_bytes as usize)) as u64
}

/// Returns whether query, key and value are adjacent and form one matrix, and gate and up too.
fn side_by_side(block: &UnitLayout) -> bool {
    let side_by_side = |first, last| match (block.find(first), block.find(last)) {
        (Some(first), Some(last)) => adjacent(&block.params[first..=last]),
        _ => true,
    };
    side_by_side(ParamRole::Query, ParamRole::Value) && side_by_side(ParamRole::Gate, ParamRole::Up)
}
