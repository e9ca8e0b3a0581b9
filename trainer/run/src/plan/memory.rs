//! Host and GPU memory of a process besides its tiles, and bytes that cross the bus to its GPU.
//!
//! ```text
//!   without a GPU   host   unit buffers | activations | computing                 gradients with the tiles
//!   with one        host                                                          gradients with the tiles
//!                   GPU    unit and gradient buffers | activations, kept | computing | streamed tiles | context
//!   all on the GPU  GPU    tiles and gradients | activations, kept | computing | context
//! ```

use kernels::adamw::TileFormat;
use kernels::gpu::TileUpdater;
use serde::Serialize;

use super::muon::directions;
use crate::computation::{
    AttentionKernel, Checkpointing, DEVICE_CONTEXT_BYTES, Work, device_working_bytes,
    kept_bytes_a_token, working_bytes,
};
use crate::config::{OptimizerDevice, RunSettings};
use crate::model::UnitLayout;
use training_state::update::GPU_UPDATERS;

/// Blocks whose weights are gathered at the same time on a GPU or with several ranks: the one that computes,
/// the next and the previous.
const BLOCK_BUFFERS: u64 = 3;

/// Blocks whose gradients are on a GPU, or received from other ranks, at the same time: one is computed while
/// another leaves.
const GRAD_BUFFERS: u64 = 2;

/// GPU memory that NCCL takes for each group of several GPUs: about 10 MB of buffers for each of up to 32 channels, in
/// both directions.
const LINK_BYTES: u64 = 1 << 30;

/// Memory that a process needs to compute, on the processor or on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ComputeMemory {
    /// Gathered weights; 0 if a GPU computes with tiles in place.
    pub unit_buffer_bytes: u64,
    /// Gradients of the current units. On the processor they overwrite the weights; gradients of other ranks
    /// have their own buffers.
    pub grad_buffer_bytes: u64,
    /// fp32 sums of all gradients, kept from one group of micro-batches to the next; 0 if there is one group.
    pub gradient_sum_bytes: u64,
    /// Inputs of all units for a group of micro-batches, kept from forward to backward.
    pub activation_bytes: u64,
    /// Part of the activations that is kept in host memory while a GPU computes; it takes no GPU memory.
    pub away_bytes: u64,
    /// Part of the activations that is kept on devices; it takes no memory.
    pub on_drives_bytes: u64,
    /// Values that blocks keep besides their inputs.
    pub kept_bytes: u64,
    /// Largest additional memory for computing one unit.
    pub working_bytes: u64,
    /// Tiles that are streamed through a GPU for their update.
    pub update_bytes: u64,
    /// Memory that a GPU's libraries take.
    pub context_bytes: u64,
}

/// Where the inputs of blocks are from forward to backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputsIn {
    /// In the memory of the device that computes.
    Place,
    /// In host memory while a GPU computes.
    Host,
    /// On devices of the store.
    Drives,
}

/// How a GPU is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GpuUse {
    /// All tiles are in its memory.
    pub(super) lives: bool,
    pub(super) checkpointing: Checkpointing,
    pub(super) attention: AttentionKernel,
    pub(super) optimizer_device: OptimizerDevice,
    pub(super) format: TileFormat,
    pub(super) tile_elems: u64,
    /// Groups of several GPUs that this one belongs to.
    pub(super) groups: u64,
}

impl ComputeMemory {
    /// Returns the sum of all parts.
    pub fn sum_bytes(&self) -> u64 {
        self.unit_buffer_bytes
            + self.grad_buffer_bytes
            + self.gradient_sum_bytes
            + self.activation_bytes
            + self.kept_bytes
            + self.working_bytes
            + self.update_bytes
            + self.context_bytes
    }

    /// Memory for the model of `settings` with `units`, on the processor or on a GPU as in `gpu`. `group` micro-batches are
    /// processed together, and their inputs are in `inputs`.
    pub(super) fn new(
        settings: &RunSettings,
        units: &[UnitLayout],
        (group, inputs): (usize, InputsIn),
        gpu: Option<GpuUse>,
    ) -> Self {
        let elem_bytes = settings.dtype.elem_bytes();
        let (model, batch) = (&settings.model, &settings.batch);
        let bytes = |unit: &UnitLayout| (unit.elems * elem_bytes) as u64;
        let ends = bytes(&units[0]) + bytes(&units[units.len() - 1]);
        let block = bytes(&units[1]);
        // Inputs of every block and of the head, and the gradient on its way back.
        let kept_units = units.len() as u64;
        let together_tokens = (batch.micro_batch_tokens() * group) as u64;
        let token_bytes = (model.hidden_size * elem_bytes) as u64;
        let blocks = units.len() as u64 - 2;
        let input_bytes = blocks * together_tokens * token_bytes;
        // Elsewhere, there are the newest unit's output and its input or gradient, the two inputs in transit, and the one in use.
        let micro_batch_bytes = batch.micro_batch_tokens() as u64 * token_bytes;
        let passing_bytes = 2 * together_tokens * token_bytes + 3 * micro_batch_bytes;
        let (activation_bytes, away_bytes, on_drives_bytes) = match inputs {
            InputsIn::Place => (kept_units * together_tokens * token_bytes, 0, 0),
            InputsIn::Host => (passing_bytes, input_bytes, 0),
            InputsIn::Drives => (passing_bytes, 0, input_bytes),
        };
        let work = work(
            settings,
            gpu.map_or(AttentionKernel::Torch, |gpu| gpu.attention),
        );
        let working =
            |of: fn(&_, &_, _, _) -> u64| of(model, &settings.dropout, settings.dtype, work);
        let directions_bytes = directions(settings, units).map_or(0, |all| all.working_bytes);
        let stage = settings.placement.stage;
        let all: u64 = units.iter().map(bytes).sum();
        // Below stage 2, all gradients stay whole until the end of backward; sums over several micro-batches
        // are fp32.
        let sum_elem_bytes = match batch.micro_batches {
            1 => elem_bytes,
            _ => elem_bytes.max(size_of::<f32>()),
        };
        // Between groups, all sums are kept in any stage; that of a tied embedding twice, for its two uses.
        let is_grouped = group < batch.micro_batches;
        let elems = all / elem_bytes as u64;
        let tied_elems = if model.tied { units[0].elems as u64 } else { 0 };
        // Without groups, the head's part waits beside the buffers until the embedding's own has come.
        let (gradient_sum_bytes, tied_bytes) = match is_grouped {
            true => ((elems + tied_elems) * size_of::<f32>() as u64, 0),
            false => (0, tied_elems * sum_elem_bytes as u64),
        };
        let waiting_bytes = if stage.divides_gradients() || is_grouped {
            0
        } else {
            elems * sum_elem_bytes as u64
        };
        let weight_blocks = |at_a_time: u64| match stage.divides_parameters() {
            true => at_a_time,
            false => blocks,
        };
        let Some(gpu) = gpu else {
            // Several ranks move shards while they compute, as one rank does with its GPU. Gradients of other
            // ranks have their own receive buffers.
            let (at_a_time, grads) = match settings.ranks {
                1 => (1, 0),
                _ => (BLOCK_BUFFERS, ends + GRAD_BUFFERS * block),
            };
            return Self {
                unit_buffer_bytes: ends + weight_blocks(at_a_time) * block,
                grad_buffer_bytes: grads + waiting_bytes + tied_bytes,
                gradient_sum_bytes,
                activation_bytes,
                on_drives_bytes,
                working_bytes: working(working_bytes).max(directions_bytes),
                ..Self::default()
            };
        };
        // Units that are divided among ranks are gathered into buffers, even from GPU memory.
        let in_place = gpu.lives && settings.ranks == 1;
        let buffers = |blocks: u64| if in_place { 0 } else { ends + blocks * block };
        let streams = !gpu.lives && gpu.optimizer_device != OptimizerDevice::Cpu;
        let updater_bytes = TileUpdater::device_bytes(
            gpu.format,
            gpu.format.master.grad_type(),
            gpu.tile_elems as usize,
        ) as u64;
        // With one micro-batch, gradients are computed directly in the buffers that they leave from.
        let (grad_blocks, sums) = match (stage.divides_gradients(), batch.micro_batches) {
            (true, _) => (GRAD_BUFFERS, 0),
            (false, 1) => (blocks, 0),
            (false, _) => (blocks, waiting_bytes),
        };
        let kept = |level| {
            let dropout = &settings.dropout;
            let ranks = work.sequence_ranks;
            kept_bytes_a_token(model, dropout, gpu.attention, elem_bytes, level, ranks) as f64
        };
        let kept = gpu.checkpointing.sum(blocks as usize, kept) as u64;
        Self {
            unit_buffer_bytes: buffers(weight_blocks(BLOCK_BUFFERS)),
            grad_buffer_bytes: buffers(grad_blocks) + sums + tied_bytes,
            gradient_sum_bytes,
            activation_bytes,
            away_bytes,
            on_drives_bytes,
            // With the MLP in chunks nothing is kept, because blocks are recomputed.
            kept_bytes: match work.tiles {
                1 => together_tokens * kept,
                _ => 0,
            },
            // Matrices are made orthogonal when the activations are gone.
            working_bytes: working(device_working_bytes).max(directions_bytes),
            update_bytes: u64::from(streams) * GPU_UPDATERS as u64 * updater_bytes,
            context_bytes: DEVICE_CONTEXT_BYTES + gpu.groups * LINK_BYTES,
        }
    }
}

/// What a unit processes at a time.
fn work(settings: &RunSettings, attention: AttentionKernel) -> Work {
    let (batch, train) = (&settings.batch, &settings.train);
    Work {
        micro_batch: batch.micro_batch,
        seq_len: batch.seq_len,
        sequence_ranks: batch.sequence_ranks as usize,
        micro_batches: batch.micro_batches,
        tiles: train.mlp_chunks,
        attention,
        matmuls: train.matmuls,
        deterministic: train.deterministic,
    }
}
