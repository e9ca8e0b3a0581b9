//! Operations of a step, and the time that a device's kernels need for them.
//!
//! ```text
//!   operations of the model   6 x parameters x tokens             products: forward 2, backward 4
//!                           + 12 x heads x head_dim x pairs       attention, in each layer: forward 4, backward 8
//! ```
//!
//! A pair is a query and a key that it sees: half of all in a causal sequence, fewer with a window. This is the formula of
//! every rate in TFLOPS and of the MFU. Kernels do more: backward recomputes what a block does not keep, and that of attention
//! its weights. [`Times`] counts these.

use kernels::fp8::fp8_time;

use super::GpuHardware;
use crate::computation::{ActivationCheckpointing, AttentionKernel, Checkpointing, Matmuls};
use crate::config::RunSettings;
use crate::model::{ParamRole, UnitLayout};

/// Operations of forward, for a pair of query and key and an element of a head: two products.
const PAIR_OPERATIONS: f64 = 4.0;

/// Factor from attention's forward to the operations that its backward kernels do: five products instead of two.
const BACKWARD_PRODUCTS: f64 = 2.5;

/// Operations of one process in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Operations {
    /// 6 for each parameter and token.
    pub products: f64,
    /// Three times those of attention's forward.
    pub attention: f64,
}

impl Operations {
    /// Counts those of `settings`. With `documents`, attention stays within documents of these lengths.
    pub(super) fn new(settings: &RunSettings, params_count: u64, documents: &[usize]) -> Self {
        let batch = &settings.batch;
        let forward = attention_forward(settings, documents);
        Self {
            products: 6.0 * params_count as f64 * batch.tokens() as f64,
            attention: 3.0 * forward,
        }
    }

    /// All operations, from which rates and the MFU are computed.
    pub fn sum(&self) -> f64 {
        self.products + self.attention
    }
}

/// Operations of attention's forward in all layers, for one step.
fn attention_forward(settings: &RunSettings, documents: &[usize]) -> f64 {
    let (model, batch) = (&settings.model, &settings.batch);
    let whole = [batch.seq_len];
    let documents = if documents.is_empty() {
        &whole
    } else {
        documents
    };
    let tokens: usize = documents.iter().sum();
    let pairs_a_token = |window| {
        let pairs = documents
            .iter()
            .map(|&length| visible_pairs(length, window));
        pairs.sum::<f64>() / tokens as f64
    };
    let layers = (0..model.layers).map(|layer| pairs_a_token(model.window(layer)));
    let width = (model.heads * model.head_dim()) as f64;
    PAIR_OPERATIONS * width * layers.sum::<f64>() * batch.tokens() as f64
}

/// Length of the document in which a token is, in the mean.
pub(super) fn usual_length(settings: &RunSettings, documents: &[usize]) -> f64 {
    if documents.is_empty() {
        return settings.batch.seq_len as f64;
    }
    let lengths = || documents.iter().map(|&length| length as f64);
    lengths().map(|length| length * length).sum::<f64>() / lengths().sum::<f64>()
}

/// Pairs of a query and a key that it sees: its own and those before it, within the window.
fn visible_pairs(seq_len: usize, window: Option<usize>) -> f64 {
    let reach = window.unwrap_or(seq_len).min(seq_len) as f64;
    reach * (reach + 1.0) / 2.0 + (seq_len as f64 - reach) * reach
}

/// Time of forward and backward in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Times {
    pub(super) forward_s: f64,
    pub(super) backward_s: f64,
    /// Part of both for attention.
    pub(super) attention_s: f64,
}

impl Times {
    pub(super) fn sum(&self) -> f64 {
        self.forward_s + self.backward_s
    }

    /// The same parts of another sum.
    pub(super) fn scaled_to(self, s: f64) -> Self {
        let factor = s / self.sum();
        Self {
            forward_s: self.forward_s * factor,
            backward_s: self.backward_s * factor,
            attention_s: self.attention_s * factor,
        }
    }
}

/// How a step is computed, as far as it changes the time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Computing {
    pub(super) checkpointing: Checkpointing,
    pub(super) attention: AttentionKernel,
    pub(super) deterministic: bool,
    pub(super) matmuls: Matmuls,
    /// Rate of matrix products in 10^12 operations per second.
    pub(super) products_tflops: f64,
}

/// Estimates the time of a step on `gpu`, or on the processor.
pub(super) fn times(
    settings: &RunSettings,
    (units, params_count): (&[UnitLayout], u64),
    documents: &[usize],
    gpu: Option<&GpuHardware>,
    how: Computing,
) -> Times {
    let batch = &settings.batch;
    let tokens = batch.tokens() as f64;
    let blocks_count = units.len() - 2;
    let blocks = blocks_count as f64;
    let params = 2.0 * params_count as f64 * tokens;
    let block_params = 2.0 * tokens * blocks * units[1].elems as f64;
    let recomputed =
        (how.checkpointing).sum(blocks_count, |level| recomputed_params(&units[1], level));
    let recomputed = 2.0 * tokens * recomputed;
    let share = match how.matmuls {
        Matmuls::InDtype => 1.0,
        Matmuls::Fp8 => fp8_time(settings.model.hidden_size),
    };
    // The products of blocks, and those of the head, which keep the dtype.
    let products_s =
        |of_blocks: f64, of_head: f64| (of_blocks * share + of_head) / (how.products_tflops * 1e12);
    let of_head = params - block_params;

    let forward = attention_forward(settings, documents);
    let length = usual_length(settings, documents);
    let [forward_rate, backward_rate] = attention_tflops(settings, length, gpu, how);
    let forward_s = forward / (forward_rate * 1e12);
    let again = how.checkpointing.sum(blocks_count, |level| match level {
        ActivationCheckpointing::Full => 1.0 / blocks,
        ActivationCheckpointing::Attention | ActivationCheckpointing::Matmuls => 0.0,
    });
    let backward_s = BACKWARD_PRODUCTS * forward / (backward_rate * 1e12) + again * forward_s;
    Times {
        forward_s: products_s(block_params, of_head) + forward_s,
        backward_s: products_s(2.0 * block_params + recomputed, 2.0 * of_head) + backward_s,
        attention_s: forward_s + backward_s,
    }
}

/// Parameters of a block whose products backward computes again. The last one's output is not needed.
fn recomputed_params(block: &UnitLayout, checkpointing: ActivationCheckpointing) -> f64 {
    let is_again = |role: ParamRole| match checkpointing {
        ActivationCheckpointing::Full => role != ParamRole::Down,
        ActivationCheckpointing::Attention => {
            matches!(role, ParamRole::Out | ParamRole::Gate | ParamRole::Up)
        }
        ActivationCheckpointing::Matmuls => false,
    };
    let params = block.params.iter().filter(|param| is_again(param.member));
    params.map(|param| param.elems() as f64).sum()
}

/// Rates of attention kernels on one GPU by length of sequence: forward, backward with sums in a fixed order, backward without.
struct AttentionRates {
    tokens: f64,
    cudnn: [f64; 3],
    torch: [f64; 3],
}

/// Kernels on an H200 with heads of 128, in 10^12 operations per second; `trainer/bench/MEASUREMENTS.md` has the measurement. H100 and H200 have
/// the same processor.
const HOPPER: [AttentionRates; 5] = [
    AttentionRates {
        tokens: 2048.0,
        cudnn: [512.0, 378.0, 400.0],
        torch: [276.0, 226.0, 226.0],
    },
    AttentionRates {
        tokens: 4096.0,
        cudnn: [594.0, 425.0, 482.0],
        torch: [322.0, 264.0, 264.0],
    },
    AttentionRates {
        tokens: 8192.0,
        cudnn: [552.0, 390.0, 492.0],
        torch: [279.0, 157.0, 290.0],
    },
    AttentionRates {
        tokens: 32768.0,
        cudnn: [662.0, 422.0, 600.0],
        torch: [343.0, 171.0, 318.0],
    },
    AttentionRates {
        tokens: 131_072.0,
        cudnn: [575.0, 453.0, 542.0],
        torch: [325.0, 171.0, 327.0],
    },
];

/// Fraction of the rate of matrix products that attention reaches on a GPU that is not in the table: forward, backward.
const OTHER_GPU: [f64; 2] = [0.5, 0.35];

/// Rates of attention's forward and backward for documents of `tokens` tokens, in 10^12 operations per second.
fn attention_tflops(
    settings: &RunSettings,
    tokens: f64,
    gpu: Option<&GpuHardware>,
    how: Computing,
) -> [f64; 2] {
    let Some(gpu) = gpu else {
        return [how.products_tflops; 2];
    };
    if !["H100", "H200"].iter().any(|part| gpu.name.contains(part)) {
        return OTHER_GPU.map(|share| share * how.products_tflops);
    }
    let of = |row: &AttentionRates| {
        let rates = match how.attention {
            AttentionKernel::Cudnn => row.cudnn,
            AttentionKernel::Torch => row.torch,
        };
        let backward = if how.deterministic {
            rates[1]
        } else {
            rates[2]
        };
        [rates[0], backward]
    };
    let after = HOPPER.iter().position(|row| row.tokens >= tokens);
    let rates = match after {
        Some(0) => of(&HOPPER[0]),
        None => of(&HOPPER[HOPPER.len() - 1]),
        Some(after) => {
            let (low, high) = (&HOPPER[after - 1], &HOPPER[after]);
            let share = (tokens / low.tokens).ln() / (high.tokens / low.tokens).ln();
            let (low, high) = (of(low), of(high));
            [0, 1].map(|at| low[at] + share * (high[at] - low[at]))
        }
    };
    let of_heads = of_head_dim(settings.model.head_dim());
    [rates[0] * of_heads[0], rates[1] * of_heads[1]]
}

/// Factors from the rates with heads of 128 to those with heads of `head_dim`, measured with 64 and 256.
fn of_head_dim(head_dim: usize) -> [f64; 2] {
    match head_dim {
        ..=64 => [0.7, 0.66],
        65..=128 => [1.0, 1.0],
        _ => [0.98, 0.67],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_pairs_are_those_of_the_mask() {
        for seq_len in 1..20usize {
            for window in (1..25).map(Some).chain([None]) {
                let sees = |query: usize, key: usize| {
                    key <= query && window.is_none_or(|window| query - key < window)
                };
                let pairs = (0..seq_len).flat_map(|i| (0..seq_len).map(move |j| (i, j)));
                let counted = pairs.filter(|&(i, j)| sees(i, j)).count();
                assert_eq!(visible_pairs(seq_len, window), counted as f64);
            }
        }
    }
}
