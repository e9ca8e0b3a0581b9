//! Bytes of host and GPU memory that a process of a run takes beside its tiles, and bytes that cross the bus to its GPU.
//!
//! ```text
//!   without a GPU   host   unit buffers | activations | computing | text          gradients with the tiles
//!   with one        host   text                                                   gradients with the tiles
//!                   GPU    unit buffers | gradient buffers | activations | computing | what lives there
//! ```

use serde::Serialize;

use crate::compute::working_bytes;
use crate::config::{RunSettings, Tier, UpdatePlace};
use crate::model::UnitLayout;

/// Blocks whose weights are on the GPU at a time: one computes, one comes, one is left.
const BLOCK_BUFFERS: u64 = 3;

/// Units whose gradients are on the GPU at a time: one is computed, one leaves.
const GRAD_BUFFERS: u64 = 2;

/// Gradients are summed over micro-batches in fp32.
const SUM_BYTES: u64 = 4;

/// What a process holds of a model while it computes, wherever it computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ComputeMemory {
    /// Gathered weights.
    pub unit_buffer_bytes: u64,
    /// Gradients of the units at hand. On the processor they are written over the weights.
    pub grad_buffer_bytes: u64,
    /// Inputs of all units and micro-batches, kept from forward to backward.
    pub activation_bytes: u64,
    /// Most that computing one unit takes on top.
    pub working_bytes: u64,
}

impl ComputeMemory {
    /// All of it.
    pub fn sum_bytes(&self) -> u64 {
        self.unit_buffer_bytes + self.grad_buffer_bytes + self.activation_bytes + self.working_bytes
    }

    /// Of `settings`' model with `units`, on a GPU or on the processor.
    pub(super) fn new(settings: &RunSettings, units: &[UnitLayout], on_gpu: bool) -> Self {
        let elem_bytes = settings.dtype.elem_bytes() as u64;
        let batch = &settings.batch;
        let bytes = |unit: &UnitLayout| unit.elems as u64 * elem_bytes;
        let (embedding, head) = (bytes(&units[0]), bytes(&units[units.len() - 1]));
        let block = bytes(&units[1]);
        let largest = embedding.max(block).max(head);
        let micro_tokens = (batch.micro_batch * batch.seq_len) as u64;
        let tokens = micro_tokens * batch.micro_batches as u64;
        // Inputs of every block and of the head, and the gradient that comes back.
        let kept = units.len() as u64;
        let sums = if on_gpu && batch.micro_batches > 1 {
            largest / elem_bytes * SUM_BYTES
        } else {
            0
        };
        Self {
            unit_buffer_bytes: embedding + head + block * if on_gpu { BLOCK_BUFFERS } else { 1 },
            grad_buffer_bytes: if on_gpu {
                GRAD_BUFFERS * largest + sums
            } else {
                0
            },
            activation_bytes: kept * tokens * settings.model.hidden_size as u64 * elem_bytes,
            working_bytes: if on_gpu {
                gpu_working_bytes(settings, micro_tokens)
            } else {
                working_bytes(
                    &settings.model,
                    settings.dtype,
                    batch.micro_batch,
                    batch.seq_len,
                    batch.micro_batches,
                )
            },
        }
    }
}

/// A block recomputed with its gradients in flight, or a slice of logits; torch's own pool keeps some more.
fn gpu_working_bytes(settings: &RunSettings, micro_tokens: u64) -> u64 {
    let model = &settings.model;
    let elem_bytes = settings.dtype.elem_bytes() as u64;
    let hidden = model.hidden_size as u64;
    let attention = (model.heads * model.head_dim()) as u64;
    let feed_forward = model.intermediate_size as u64;
    let kept_elems = 8 * hidden + 8 * attention + 4 * feed_forward;
    let flying_elems = 4 * hidden.max(attention).max(feed_forward);
    let block = micro_tokens * (kept_elems + flying_elems) * elem_bytes;
    let vocab = model.vocab_size as u64;
    let slice = (micro_tokens * vocab).min(LOGITS_ELEMS_GPU.max(vocab));
    let head = slice * 2 * elem_bytes + 4 * micro_tokens * hidden * elem_bytes;
    // The libraries' own memory: context, cuBLAS workspaces.
    block.max(head) + GPU_LIBRARY_BYTES
}

/// Logits of a slice of rows on a GPU.
const LOGITS_ELEMS_GPU: u64 = 64 << 20;

/// A CUDA context with libtorch's kernels.
const GPU_LIBRARY_BYTES: u64 = 1 << 30;

/// Bytes that cross the bus to a GPU in one step of one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BusBytes {
    /// To the GPU.
    pub up_bytes: u64,
    /// From it.
    pub down_bytes: u64,
}

impl BusBytes {
    /// For a process whose tiles are `tiles`. Weights go up in forward and in backward; other ranks' parts come over links
    /// between GPUs. A share `on_gpu_share` of the update runs on the GPU with state that comes and goes.
    pub(super) fn new([param, optimizer]: [Tier; 2], tiles: &TileSums, on_gpu_share: f64) -> Self {
        if optimizer == Tier::None {
            // All state is there; a parameter that is elsewhere comes twice and goes back once.
            let away = u64::from(param != Tier::None);
            return Self {
                up_bytes: 2 * tiles.param_bytes * away,
                down_bytes: tiles.param_bytes * away,
            };
        }
        // Kept there and updated elsewhere, they come once.
        let gathers = if param == Tier::None { 1 } else { 2 };
        let streamed = |bytes: u64| (bytes as f64 * on_gpu_share) as u64;
        Self {
            up_bytes: gathers * tiles.param_bytes + streamed(tiles.sum_bytes()),
            down_bytes: tiles.grad_bytes + streamed(tiles.param_bytes + tiles.state_bytes),
        }
    }

    /// Seconds at `bytes_per_s` each way.
    pub(super) fn s(&self, bytes_per_s: f64) -> f64 {
        self.up_bytes.max(self.down_bytes) as f64 / bytes_per_s
    }
}

/// Bytes of a process's tiles, and of their gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TileSums {
    pub param_bytes: u64,
    pub state_bytes: u64,
    pub grad_bytes: u64,
}

impl TileSums {
    /// All of them.
    pub fn sum_bytes(&self) -> u64 {
        self.param_bytes + self.state_bytes + self.grad_bytes
    }

    /// Those that live in GPU memory: device `none`. Gradients stay where their update runs.
    pub(super) fn on_gpu(&self, [param, optimizer]: [Tier; 2]) -> Self {
        let of = |tier: Tier, bytes: u64| if tier == Tier::None { bytes } else { 0 };
        Self {
            param_bytes: of(param, self.param_bytes),
            state_bytes: of(optimizer, self.state_bytes),
            grad_bytes: of(optimizer, self.grad_bytes),
        }
    }

    /// Seconds of an update for which all of them go up to the GPU and come back.
    pub(super) fn streamed_s(&self, bytes_per_s: f64) -> f64 {
        self.sum_bytes() as f64 / bytes_per_s
    }
}

/// Share of the update that the GPU takes, when `place` is known and both have their rates (seconds for all of it).
pub(super) fn gpu_share(place: UpdatePlace, cpu_s: f64, gpu_s: f64) -> f64 {
    match place {
        UpdatePlace::Gpu => 1.0,
        // Both end at the same time.
        UpdatePlace::Shared => cpu_s / (cpu_s + gpu_s),
        UpdatePlace::Cpu | UpdatePlace::Auto => 0.0,
    }
}
