//! What a plan must know of the computation, which `trainer-torch` does: its choices, which forms of models have an explicit backward, and
//! the memory that it takes.

mod memory;

use crate::model::{Dropout, Form, Mlp, ModelConfig, Norm, Positions};

pub use memory::{
    DEVICE_CONTEXT_BYTES, Work, can_keep, cudnn_refusal, device_working_bytes, exchanged_widths,
    fp8_refusal, kept_bytes_a_token, working_bytes,
};

/// Kernels for attention in blocks with an explicit backward. Results differ within the rounding of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionKernel {
    /// Those that torch chooses: flash attention on a GPU.
    Torch,
    /// cuDNN's, whose backward pass repeats in bits.
    Cudnn,
}

/// Numbers of the factors in the products of blocks; results keep the dtype. The choice changes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub enum Matmuls {
    /// Those of the dtype.
    #[serde(rename = "dtype")]
    InDtype,
    /// 8 bits, with one scale for each matrix, on a GPU that has matrix units for them.
    #[serde(rename = "fp8")]
    Fp8,
}

/// Part of a block that its backward pass recomputes. The choice does not change results. All levels except `Full` need
/// an explicit backward (`explicit/`), which GPUs use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationCheckpointing {
    /// Everything: only the block's input is kept.
    #[default]
    Full,
    /// Everything except query, key, value and the attention output.
    Attention,
    /// Norms and elementwise operations. The results of all matrix products are kept except the last one's,
    /// which backward does not need.
    Matmuls,
}

impl ActivationCheckpointing {
    /// The next level, which keeps more; `Matmuls` is the last.
    pub fn more(self) -> Self {
        match self {
            Self::Full => Self::Attention,
            Self::Attention | Self::Matmuls => Self::Matmuls,
        }
    }
}

/// What the blocks of a model keep from forward to backward: as many as memory has room for keep one level more than the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Checkpointing {
    /// Level of all blocks but the last `more_blocks`.
    pub level: ActivationCheckpointing,
    /// Number of blocks with the level after that.
    pub more_blocks: usize,
}

impl From<ActivationCheckpointing> for Checkpointing {
    /// All blocks have one level.
    fn from(level: ActivationCheckpointing) -> Self {
        Self {
            level,
            more_blocks: 0,
        }
    }
}

impl Checkpointing {
    /// Level of block number `block`, from 0, of `blocks`.
    pub fn of_block(self, block: usize, blocks: usize) -> ActivationCheckpointing {
        match block + self.more_blocks >= blocks {
            true => self.level.more(),
            false => self.level,
        }
    }

    /// The sum of `of` each block's level.
    pub fn sum(self, blocks: usize, of: impl Fn(ActivationCheckpointing) -> f64) -> f64 {
        let more = self.more_blocks.min(blocks);
        (blocks - more) as f64 * of(self.level) + more as f64 * of(self.level.more())
    }
}

/// Documents from which on cuDNN's attention is taken for several in a sequence. Shorter ones need many small calls: with documents of
/// 450 tokens in the mean, a step on an H200 took 0.300 s instead of 0.277 with flash attention over all of them.
pub const LONG_DOCUMENT_TOKENS: usize = 2048;

/// Logits held at a time: 16 MiB in fp32; several copies exist at once.
pub const LOGITS_ELEMS_MAX: usize = 4 << 20;

/// Logits held at a time on a GPU: 128 MiB in bf16. These are 2,097 rows of 32,000 tokens: large enough for
/// products to run at full speed. The fp32 sum of the projection's gradient is read and written once for each
/// slice.
pub const DEVICE_LOGITS_ELEMS_MAX: usize = 64 << 20;

/// Returns whether blocks of this form have an explicit backward: those of Llama, with any biases and with
/// norms of query and key heads. Other forms use autograd on a GPU too, which is correct but slower and keeps
/// nothing of a block: GPT-2, dropout.
pub fn block_is_written_out(config: &ModelConfig, dropout: &Dropout) -> bool {
    let Form {
        norm,
        positions,
        mlp,
        ..
    } = config.architecture.form();
    (norm, positions, mlp) == (Norm::Rms, Positions::Rotary, Mlp::GatedSilu) && dropout.is_none()
}

/// Returns whether a head of this form has an explicit backward.
pub fn head_is_written_out(config: &ModelConfig) -> bool {
    config.architecture.form().norm == Norm::Rms
}

/// Bytes that the norm of a query or key head keeps for each element of `elem_bytes`: the widened element if
/// it is narrower than fp32, the quotient, the rotated result.
pub fn normed_elem_bytes(elem_bytes: usize) -> usize {
    let widened = if elem_bytes < size_of::<f32>() {
        size_of::<f32>()
    } else {
        0
    };
    widened + 2 * elem_bytes
}

/// Fewest queries computed at a time with a window; fewer would make matrix products too small.
const QUERIES_MIN: i64 = 512;

/// Number of queries computed at a time for a window of `window` tokens.
pub fn queries_at_a_time(window: i64) -> i64 {
    window.max(QUERIES_MIN)
}
