//! Moves units' weights from where they live to where they are computed with, and their gradients back.
//!
//! ```text
//!   tiles live            computed with          a unit
//!   with the swapper      on the processor       copied into a buffer (host.rs)
//!   with the swapper      on a GPU               copied into a buffer (gpu.rs)
//!   in a GPU's memory     on that GPU            in place; with several ranks, gathered in a buffer (gpu.rs)
//! ```
//!
//! [`Tiles`] represents exactly these combinations.
//!
//! In a run on several nodes, the ranks of a node may keep copies of units in host memory (`shards.rs`): the first gather
//! of a unit after its update uses the tiles of all ranks, later ones the node's copy.

mod gpu;
mod host;
mod rotation;
mod shards;

use kernels::adamw::{Hyper, Master};
use kernels::gpu::Gpu;
use swapper::StepIo;
use test_hooks::safeguard::{Safeguard, is_disabled};

use gpu::{GpuBuffers, InPlace};
use host::HostBuffers;
pub(super) use shards::{Exchanged, NodeRanks, Shards};

use super::TrainError;
use crate::compute::{Engine, GradSink, UnitWeights};
use training_run::config::Stage;
use training_state::backend::{BackendError, TileBackend};
use training_state::trace::Trace;

/// The tiles of one rank, and the buffers through which it computes with them.
pub(super) type Tiles = TileBackend<WithSwapper, InGpu>;

/// Buffers to compute with tiles that the swapper holds.
pub(super) enum WithSwapper {
    Host(Box<HostBuffers>),
    Gpu(Box<GpuBuffers>),
}

/// Views or buffers to compute with tiles that live in a GPU's memory.
pub(super) enum InGpu {
    /// One rank holds every unit whole.
    InPlace(Box<InPlace>),
    /// Several ranks hold shards, which are gathered.
    Buffers(Box<GpuBuffers>),
}

/// The memory to compute in, taken before the tiles are opened.
pub(super) enum Memory {
    WithSwapper(WithSwapper),
    InGpu(InGpu),
}

impl Memory {
    /// Allocates memory for `engine` on its GPU or on the host, with `block_buffers` as in
    /// [`super::step_order`]. `live` says that the
    /// tiles are in the GPU's memory.
    ///
    /// # Errors
    /// Out of memory.
    pub(super) fn new(
        engine: &Engine,
        gpu: Option<&Gpu>,
        master: Master,
        stage: Stage,
        block_buffers: usize,
        live: bool,
        shards: &Shards,
    ) -> Result<Self, TrainError> {
        let Some(gpu) = gpu else {
            let buffers = HostBuffers::new(engine, master, block_buffers, shards.clone())?;
            return Ok(Self::WithSwapper(WithSwapper::Host(Box::new(buffers))));
        };
        if live && shards.count() == 1 {
            let in_place = InPlace::new(engine, gpu, master, shards.clone())?;
            return Ok(Self::InGpu(InGpu::InPlace(Box::new(in_place))));
        }
        let buffers = GpuBuffers::new(engine, gpu, master, stage, block_buffers, shards.clone())?;
        Ok(match live {
            true => Self::InGpu(InGpu::Buffers(Box::new(buffers))),
            false => Self::WithSwapper(WithSwapper::Gpu(Box::new(buffers))),
        })
    }

    /// Joins the memory with the tiles of `backend`.
    ///
    /// Panics if the memory was allocated for tiles in another place.
    pub(super) fn attach(self, backend: TileBackend) -> Tiles {
        match (backend, self) {
            (TileBackend::Swapper(swapper, ()), Self::WithSwapper(with)) => {
                TileBackend::Swapper(swapper, with)
            }
            (TileBackend::Gpu(backend, ()), Self::InGpu(with)) => TileBackend::Gpu(backend, with),
            _ => panic!("memory to compute in was allocated for tiles in another place"),
        }
    }
}

/// Gathers a unit's weights into a buffer.
///
/// # Errors
/// The backend or the GPU fails.
pub(super) fn gather(
    tiles: &mut Tiles,
    engine: &Engine,
    unit: usize,
    trace: &Trace,
) -> Result<(), TrainError> {
    match tiles {
        TileBackend::Swapper(swapper, WithSwapper::Host(buffers)) => buffers.gather(swapper, unit),
        TileBackend::Swapper(swapper, WithSwapper::Gpu(buffers)) => {
            buffers.gather_from_swapper(swapper, unit, trace)
        }
        TileBackend::Gpu(backend, InGpu::InPlace(units)) => units.gather(engine, backend, unit),
        TileBackend::Gpu(backend, InGpu::Buffers(buffers)) => {
            buffers.gather_from_gpu(backend, unit, trace)
        }
    }
}

/// Gathers a unit's weights into a buffer from the copy that the node has kept of their last gather.
///
/// Panics if no copy is kept of their newest update.
///
/// # Errors
/// The GPU fails; a rank is gone.
pub(super) fn gather_copy(tiles: &mut Tiles, unit: usize, trace: &Trace) -> Result<(), TrainError> {
    match tiles {
        TileBackend::Swapper(_, WithSwapper::Host(buffers)) => buffers.gather_copy(unit),
        TileBackend::Swapper(_, WithSwapper::Gpu(buffers))
        | TileBackend::Gpu(_, InGpu::Buffers(buffers)) => buffers.gather_copy(unit, trace),
        TileBackend::Gpu(_, InGpu::InPlace(_)) => panic!("one rank keeps no copy"),
    }
}

/// Ends a step as [`TileBackend::finish_step`]; copies of units that are updated are no longer used.
///
/// # Errors
/// The backend fails.
pub(super) fn finish_step(
    tiles: &mut Tiles,
    hyper: Option<Hyper>,
    blob: Vec<u8>,
) -> Result<StepIo, BackendError> {
    if hyper.is_some() && !is_disabled(Safeguard::CopyInvalidation) {
        match tiles {
            TileBackend::Swapper(_, WithSwapper::Host(buffers)) => buffers.updated(),
            TileBackend::Swapper(_, WithSwapper::Gpu(buffers))
            | TileBackend::Gpu(_, InGpu::Buffers(buffers)) => buffers.updated(),
            TileBackend::Gpu(_, InGpu::InPlace(_)) => {}
        }
    }
    tiles.finish_step(hyper, blob)
}

/// Returns when a unit's weights may be used: the host waits for other ranks' shards, a GPU's stream waits on
/// the device.
///
/// # Errors
/// A rank is gone; the GPU fails.
pub(super) fn ready(tiles: &mut Tiles, unit: usize, trace: &Trace) -> Result<(), TrainError> {
    match tiles {
        TileBackend::Swapper(_, WithSwapper::Host(buffers)) => buffers.ready(unit, trace),
        TileBackend::Swapper(_, WithSwapper::Gpu(buffers))
        | TileBackend::Gpu(_, InGpu::Buffers(buffers)) => buffers.ready(unit),
        TileBackend::Gpu(_, InGpu::InPlace(_)) => Ok(()),
    }
}

/// Returns the weights of a unit that was gathered and is ready.
pub(super) fn weights(tiles: &Tiles, unit: usize) -> &UnitWeights {
    match tiles {
        TileBackend::Swapper(_, WithSwapper::Host(buffers)) => buffers.weights(unit),
        TileBackend::Swapper(_, WithSwapper::Gpu(buffers))
        | TileBackend::Gpu(_, InGpu::Buffers(buffers)) => buffers.weights(unit),
        TileBackend::Gpu(_, InGpu::InPlace(units)) => units.weights(unit),
    }
}

/// Releases a unit's weights: all work that uses them is enqueued, and later work may reuse their buffer.
/// Does nothing for weights that are used in place.
///
/// Panics if a reference to the buffer still exists.
///
/// # Errors
/// The GPU fails.
pub(super) fn give_back(tiles: &mut Tiles, unit: usize) -> Result<(), TrainError> {
    match tiles {
        TileBackend::Swapper(_, WithSwapper::Host(buffers)) => buffers.give_back(unit),
        TileBackend::Swapper(_, WithSwapper::Gpu(buffers))
        | TileBackend::Gpu(_, InGpu::Buffers(buffers)) => buffers.give_back(unit),
        TileBackend::Gpu(_, InGpu::InPlace(_)) => Ok(()),
    }
}

/// Makes an empty sum of a unit's gradients. On a GPU, matrix products write directly to where [`reduce`]
/// needs them.
///
/// # Errors
/// Out of memory.
pub(super) fn sink(tiles: &Tiles, engine: &Engine, unit: usize) -> Result<GradSink, TrainError> {
    let mut sink = engine.new_grads(unit);
    match tiles {
        TileBackend::Swapper(_, WithSwapper::Host(_)) => {}
        TileBackend::Swapper(_, WithSwapper::Gpu(buffers))
        | TileBackend::Gpu(_, InGpu::Buffers(buffers)) => sink.write_to(buffers.grads_of(unit))?,
        TileBackend::Gpu(backend, InGpu::InPlace(_)) => sink.write_to(&backend.unit(unit).grad)?,
    }
    Ok(sink)
}

/// Accepts a unit's complete gradients. They replace its weights in the buffer.
///
/// # Errors
/// The GPU fails; out of memory.
pub(super) fn reduce(
    tiles: &mut Tiles,
    unit: usize,
    grads: GradSink,
    trace: &Trace,
) -> Result<(), TrainError> {
    match tiles {
        TileBackend::Swapper(_, WithSwapper::Host(buffers)) => buffers.reduce(unit, grads),
        TileBackend::Swapper(_, WithSwapper::Gpu(buffers)) => {
            buffers.reduce(None, unit, grads, trace)
        }
        TileBackend::Gpu(backend, InGpu::Buffers(buffers)) => {
            buffers.reduce(Some(backend), unit, grads, trace)
        }
        TileBackend::Gpu(backend, InGpu::InPlace(units)) => units.reduce(backend, unit, grads),
    }
}

/// Returns when a unit's gradients are summed over the ranks: the host waits, a GPU's stream waits on the device.
///
/// # Errors
/// A rank is gone; the GPU fails.
pub(super) fn summed(tiles: &mut Tiles, unit: usize, trace: &Trace) -> Result<(), TrainError> {
    match tiles {
        TileBackend::Swapper(_, WithSwapper::Host(buffers)) => buffers.summed(unit, trace),
        TileBackend::Swapper(_, WithSwapper::Gpu(buffers))
        | TileBackend::Gpu(_, InGpu::Buffers(buffers)) => buffers.summed(unit),
        TileBackend::Gpu(_, InGpu::InPlace(_)) => Ok(()),
    }
}

/// Hands a unit's summed gradients to the backend that holds its tiles.
///
/// # Errors
/// The backend or the GPU fails.
pub(super) fn scatter(tiles: &mut Tiles, unit: usize, trace: &Trace) -> Result<(), TrainError> {
    match tiles {
        TileBackend::Swapper(swapper, WithSwapper::Host(buffers)) => buffers.scatter(swapper, unit),
        TileBackend::Swapper(swapper, WithSwapper::Gpu(buffers)) => {
            buffers.scatter_to_swapper(swapper, unit, trace)
        }
        TileBackend::Gpu(_, InGpu::Buffers(buffers)) => {
            buffers.take_complete(unit);
            Ok(())
        }
        // The update reads them in place.
        TileBackend::Gpu(_, InGpu::InPlace(_)) => Ok(()),
    }
}

/// Adds the GPUs' collective operations of this step to `trace`. The host's operations were added as they
/// ended.
///
/// # Errors
/// The GPU fails.
pub(super) fn tell(tiles: &mut Tiles, trace: &Trace) -> Result<(), TrainError> {
    match tiles {
        TileBackend::Swapper(_, WithSwapper::Gpu(buffers))
        | TileBackend::Gpu(_, InGpu::Buffers(buffers)) => buffers.tell(trace),
        TileBackend::Swapper(_, WithSwapper::Host(_)) | TileBackend::Gpu(_, InGpu::InPlace(_)) => {
            Ok(())
        }
    }
}

/// Returns the sum of squares of each unit's gradients in this step, of this rank's shards. Waits for the GPU and for other ranks.
///
/// # Errors
/// The GPU fails; a rank is gone.
pub(super) fn sum_squares(tiles: &Tiles) -> Result<Vec<f64>, TrainError> {
    match tiles {
        TileBackend::Swapper(_, WithSwapper::Host(buffers)) => Ok(buffers.sum_squares().to_vec()),
        TileBackend::Swapper(_, WithSwapper::Gpu(buffers))
        | TileBackend::Gpu(_, InGpu::Buffers(buffers)) => buffers.sum_squares(),
        TileBackend::Gpu(_, InGpu::InPlace(units)) => units.sum_squares(),
    }
}
