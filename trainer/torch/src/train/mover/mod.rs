//! Moves units' weights from where they live to where they are computed with, and their gradients back.
//!
//! ```text
//!   tiles live            computed with          a unit
//!   with the swapper      on the processor       copied into a buffer (host.rs)
//!   with the swapper      on a GPU               copied into a buffer (gpu.rs)
//!   in a GPU's memory     on that GPU            in place; with several ranks, gathered in a buffer (gpu.rs)
//! ```
//!
//! [`Tiles`] represents these combinations, for all units or, with tiles in both places, for some units each: [`side`] says which. Where a
//! rank has its tiles does not concern the others: all gather every unit in the same order.
//!
//! In a run on several nodes, the ranks of a node may keep copies of units in host memory (`shards.rs`): the first gather
//! of a unit after its update uses the tiles of all ranks, later ones the node's copy.

mod gpu;
mod host;
mod muon;
mod rotation;
mod shards;

use kernels::adamw::{Hyper, Master};
use kernels::gpu::Gpu;
use swapper::{StepIo, StepProgram, Swapper};

use gpu::{GpuBuffers, InPlace};
use host::HostBuffers;
pub(super) use muon::{Muon, StepDirections};
pub(super) use shards::{ExchangedBytes, NodeRanks, Shards};

use super::TrainError;
use crate::compute::{Engine, GradSink, UnitWeights};
use training_run::config::Stage;
use training_run::plan::Plan;
use training_state::backend::{Both, GpuBackend, TileBackend};
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
    /// The same, in the buffers of the units whose tiles the swapper holds.
    Shared,
}

/// What a program's own error says that joins memory with tiles that it was not taken for.
const ELSEWHERE: &str = "memory to compute in was allocated for tiles in another place";

/// The memory to compute in, taken before the tiles are opened.
pub(super) enum Memory {
    WithSwapper(WithSwapper),
    InGpu(InGpu),
    Both(WithSwapper, InGpu),
}

/// Where the tiles of a run's units are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TilesIn {
    Swapper,
    Gpu,
    Both,
}

impl TilesIn {
    /// Where the tiles of `plan` are.
    pub(super) fn from_plan(plan: &Plan) -> Self {
        match (plan.lives_in_gpu(), plan.in_gpu.contains(&true)) {
            (true, _) => Self::Gpu,
            (false, true) => Self::Both,
            (false, false) => Self::Swapper,
        }
    }
}

impl Memory {
    /// Allocates memory for `engine` on its GPU or on the host, with `block_buffers` as in
    /// [`super::step_order`].
    ///
    /// # Errors
    /// Out of memory.
    pub(super) fn new(
        engine: &Engine,
        gpu: Option<&Gpu>,
        master: Master,
        stage: Stage,
        block_buffers: usize,
        tiles_in: TilesIn,
        shards: &Shards,
    ) -> Result<Self, TrainError> {
        let Some(gpu) = gpu else {
            let buffers = HostBuffers::new(engine, master, block_buffers, shards.clone())?;
            return Ok(Self::WithSwapper(WithSwapper::Host(Box::new(buffers))));
        };
        let in_place = || {
            let in_place = InPlace::new(engine, gpu, master, shards.clone())?;
            Ok::<_, TrainError>(InGpu::InPlace(Box::new(in_place)))
        };
        let is_alone = shards.count() == 1;
        if tiles_in == TilesIn::Gpu && is_alone {
            return Ok(Self::InGpu(in_place()?));
        }
        let buffers = GpuBuffers::new(engine, gpu, master, stage, block_buffers, shards.clone())?;
        let buffers = Box::new(buffers);
        Ok(match tiles_in {
            TilesIn::Gpu => Self::InGpu(InGpu::Buffers(buffers)),
            TilesIn::Swapper => Self::WithSwapper(WithSwapper::Gpu(buffers)),
            TilesIn::Both if is_alone => Self::Both(WithSwapper::Gpu(buffers), in_place()?),
            TilesIn::Both => Self::Both(WithSwapper::Gpu(buffers), InGpu::Shared),
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
            (TileBackend::Both(both, (), ()), Self::Both(with, in_gpu)) => {
                TileBackend::Both(both, with, in_gpu)
            }
            _ => panic!("{ELSEWHERE}"),
        }
    }
}

/// A unit's tiles, and the memory to compute with them.
enum Side<'a> {
    Swapper(&'a mut Swapper<Hyper>, &'a mut WithSwapper),
    InPlace(&'a mut GpuBackend, &'a mut InPlace),
    /// In a GPU's memory, gathered in buffers.
    Buffers(&'a mut GpuBackend, &'a mut GpuBuffers),
}

/// Returns where `unit` is.
fn side(tiles: &mut Tiles, unit: usize) -> Side<'_> {
    match tiles {
        TileBackend::Swapper(swapper, with) => Side::Swapper(swapper, with),
        TileBackend::Gpu(backend, InGpu::InPlace(units)) => Side::InPlace(backend, units),
        TileBackend::Gpu(backend, InGpu::Buffers(buffers)) => Side::Buffers(backend, buffers),
        TileBackend::Both(Both { swapper, backend }, with, in_gpu) => {
            match (backend.has(unit), with, in_gpu) {
                (false, with, _) => Side::Swapper(swapper, with),
                (true, _, InGpu::InPlace(units)) => Side::InPlace(backend, units),
                (true, WithSwapper::Gpu(buffers), InGpu::Shared) => Side::Buffers(backend, buffers),
                _ => panic!("{ELSEWHERE}"),
            }
        }
        TileBackend::Gpu(_, InGpu::Shared) => panic!("{ELSEWHERE}"),
    }
}

/// [`Side`] of a unit that is computed with.
enum UnitSide<'a> {
    Host(&'a HostBuffers),
    InPlace(&'a GpuBackend, &'a InPlace),
    Buffers(&'a GpuBuffers),
}

/// Returns where `unit` is.
fn seen(tiles: &Tiles, unit: usize) -> UnitSide<'_> {
    match tiles {
        TileBackend::Gpu(backend, InGpu::InPlace(units)) => UnitSide::InPlace(backend, units),
        TileBackend::Gpu(_, InGpu::Buffers(buffers)) => UnitSide::Buffers(buffers),
        TileBackend::Both(both, _, InGpu::InPlace(units)) if both.backend.has(unit) => {
            UnitSide::InPlace(&both.backend, units)
        }
        TileBackend::Swapper(_, WithSwapper::Host(buffers)) => UnitSide::Host(buffers),
        TileBackend::Swapper(_, WithSwapper::Gpu(buffers))
        | TileBackend::Both(_, WithSwapper::Gpu(buffers), _) => UnitSide::Buffers(buffers),
        _ => panic!("{ELSEWHERE}"),
    }
}

/// Does an operation of a unit that is empty in the swapper, whose program has it too.
fn follow(
    tiles: &mut Tiles,
    unit: usize,
    empty: impl FnOnce(&mut Swapper<Hyper>) -> Result<(), TrainError>,
) -> Result<(), TrainError> {
    match tiles {
        TileBackend::Both(both, ..) if both.backend.has(unit) => empty(&mut both.swapper),
        _ => Ok(()),
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
    follow(tiles, unit, |swapper| swapper.gather(unit, |_| Ok(())))?;
    match side(tiles, unit) {
        Side::Swapper(swapper, WithSwapper::Host(buffers)) => buffers.gather(swapper, unit),
        Side::Swapper(swapper, WithSwapper::Gpu(buffers)) => {
            buffers.gather_from_swapper(swapper, unit, trace)
        }
        Side::InPlace(backend, units) => units.gather(engine, backend, unit),
        Side::Buffers(backend, buffers) => buffers.gather_from_gpu(backend, unit, trace),
    }
}

/// Gathers a unit's weights into a buffer from the copy that the node has kept of their last gather.
///
/// Panics if no copy is kept of their newest update.
///
/// # Errors
/// The GPU fails; a rank is gone.
pub(super) fn gather_copy(tiles: &mut Tiles, unit: usize, trace: &Trace) -> Result<(), TrainError> {
    match side(tiles, unit) {
        Side::Swapper(_, WithSwapper::Host(buffers)) => buffers.gather_copy(unit),
        Side::Swapper(_, WithSwapper::Gpu(buffers)) => buffers.gather_copy(unit, trace),
        Side::Buffers(_, buffers) => buffers.gather_copy(unit, trace),
        Side::InPlace(..) => panic!("one rank keeps no copy"),
    }
}

/// Ends a step as [`TileBackend::finish_step`]; copies of units that are updated are no longer used, and gathers from tiles on the GPU wait for
/// their update.
///
/// # Errors
/// The backend fails.
pub(super) fn finish_step(
    tiles: &mut Tiles,
    hyper: Option<Hyper>,
    blob: Vec<u8>,
) -> Result<StepIo, TrainError> {
    let updates = hyper.is_some();
    let io = tiles.finish_step(hyper, blob)?;
    if updates {
        match tiles {
            TileBackend::Swapper(_, WithSwapper::Host(buffers)) => buffers.updated(),
            TileBackend::Swapper(_, WithSwapper::Gpu(buffers))
            | TileBackend::Gpu(_, InGpu::Buffers(buffers))
            | TileBackend::Both(_, WithSwapper::Gpu(buffers), _) => buffers.updated()?,
            // One rank keeps no copies, and computes where it updates.
            TileBackend::Gpu(_, _) | TileBackend::Both(_, WithSwapper::Host(_), _) => {}
        }
    }
    Ok(io)
}

/// Returns when a unit's weights may be used: the host waits for other ranks' shards, a GPU's stream waits on
/// the device.
///
/// # Errors
/// A rank is gone; the GPU fails.
pub(super) fn ready(tiles: &mut Tiles, unit: usize, trace: &Trace) -> Result<(), TrainError> {
    match side(tiles, unit) {
        Side::Swapper(_, WithSwapper::Host(buffers)) => buffers.ready(unit, trace),
        Side::Swapper(_, WithSwapper::Gpu(buffers)) => buffers.ready(unit),
        Side::Buffers(_, buffers) => buffers.ready(unit),
        Side::InPlace(..) => Ok(()),
    }
}

/// Returns the weights of a unit that was gathered and is ready.
pub(super) fn weights(tiles: &Tiles, unit: usize) -> &UnitWeights {
    match seen(tiles, unit) {
        UnitSide::Host(buffers) => buffers.weights(unit),
        UnitSide::Buffers(buffers) => buffers.weights(unit),
        UnitSide::InPlace(_, units) => units.weights(unit),
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
    match side(tiles, unit) {
        Side::Swapper(_, WithSwapper::Host(buffers)) => buffers.give_back(unit),
        Side::Swapper(_, WithSwapper::Gpu(buffers)) => buffers.give_back(unit),
        Side::Buffers(_, buffers) => buffers.give_back(unit),
        Side::InPlace(..) => Ok(()),
    }
}

/// Makes an empty sum of a unit's gradients. On a GPU, matrix products write directly to where [`reduce`]
/// needs them.
///
/// # Errors
/// Out of memory.
pub(super) fn sink(tiles: &Tiles, engine: &Engine, unit: usize) -> Result<GradSink, TrainError> {
    let mut sink = engine.new_grads(unit);
    match seen(tiles, unit) {
        UnitSide::Host(_) => {}
        UnitSide::Buffers(buffers) => sink.write_to(buffers.grads_of(unit))?,
        UnitSide::InPlace(backend, _) => sink.write_to(&backend.unit(unit).grad)?,
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
    match side(tiles, unit) {
        Side::Swapper(_, WithSwapper::Host(buffers)) => buffers.reduce(unit, grads),
        Side::Swapper(_, WithSwapper::Gpu(buffers)) => buffers.reduce(None, unit, grads, trace),
        Side::Buffers(backend, buffers) => buffers.reduce(Some(backend), unit, grads, trace),
        Side::InPlace(backend, units) => units.reduce(backend, unit, grads),
    }
}

/// Returns when a unit's gradients are summed over the ranks: the host waits, a GPU's stream waits on the device.
///
/// # Errors
/// A rank is gone; the GPU fails.
pub(super) fn summed(tiles: &mut Tiles, unit: usize, trace: &Trace) -> Result<(), TrainError> {
    match side(tiles, unit) {
        Side::Swapper(_, WithSwapper::Host(buffers)) => buffers.summed(unit, trace),
        Side::Swapper(_, WithSwapper::Gpu(buffers)) => buffers.summed(unit),
        Side::Buffers(_, buffers) => buffers.summed(unit),
        Side::InPlace(..) => Ok(()),
    }
}

/// Hands a unit's summed gradients to the backend that holds its tiles.
///
/// # Errors
/// The backend or the GPU fails.
pub(super) fn scatter(tiles: &mut Tiles, unit: usize, trace: &Trace) -> Result<(), TrainError> {
    follow(tiles, unit, |swapper| swapper.scatter(unit, |_| Ok(())))?;
    match side(tiles, unit) {
        Side::Swapper(swapper, WithSwapper::Host(buffers)) => buffers.scatter(swapper, unit),
        Side::Swapper(swapper, WithSwapper::Gpu(buffers)) => {
            buffers.scatter_to_swapper(swapper, unit, trace)
        }
        Side::Buffers(_, buffers) => {
            buffers.take_complete(unit);
            Ok(())
        }
        // The update reads them in place.
        Side::InPlace(..) => Ok(()),
    }
}

/// Replaces the gradients of a block's matrices, which were scattered, by directions, and updates their momenta. The step must then be finished.
///
/// # Errors
/// The backend or the GPU fails; a rank is gone.
pub(super) fn orthogonalize(
    tiles: &mut Tiles,
    engine: &Engine,
    unit: usize,
    directions: &mut StepDirections<'_>,
    trace: &Trace,
) -> Result<(), TrainError> {
    follow(tiles, unit, |swapper| {
        swapper.revise(unit, muon::unrevised)?;
        swapper.scatter(unit, |_| Ok(()))
    })?;
    match side(tiles, unit) {
        Side::Swapper(swapper, WithSwapper::Host(buffers)) => {
            buffers.orthogonalize(swapper, engine, unit, directions, trace)
        }
        Side::Swapper(swapper, WithSwapper::Gpu(buffers)) => {
            buffers.orthogonalize_from_swapper(swapper, engine, unit, directions, trace)
        }
        Side::InPlace(backend, _) => {
            let momentum = &directions.momentum;
            (directions.muon()).mix_in_gpu(engine, backend, unit, momentum)?;
            let flat = engine.weights_in(unit, &backend.unit(unit).grad)?;
            directions.make_orthogonal(engine, unit, &flat)
        }
        Side::Buffers(backend, buffers) => {
            buffers.orthogonalize_from_gpu(backend, engine, unit, directions, trace)
        }
    }
}

/// Returns when all updates of the step before have run and the last commit has what it needs of tiles in the GPU's memory: momenta may change. The
/// operations `rest` are to come.
///
/// # Errors
/// The swapper fails.
pub(super) fn settle_updates(tiles: &mut Tiles, rest: &StepProgram) -> Result<(), TrainError> {
    match tiles {
        TileBackend::Swapper(swapper, _) | TileBackend::Both(Both { swapper, .. }, ..) => {
            Ok(swapper.settle_updates_before(rest)?)
        }
        TileBackend::Gpu(..) => Ok(()),
    }
}

/// Begins to update a block whose gradients are directions, if the swapper has it: its tiles are in slots now, and would be moved once more for an update
/// before the next step. The operations `rest` are to come.
///
/// # Errors
/// The swapper fails.
pub(super) fn update_revised(
    tiles: &mut Tiles,
    unit: usize,
    hyper: &Hyper,
    rest: &StepProgram,
) -> Result<(), TrainError> {
    match side(tiles, unit) {
        Side::Swapper(swapper, _) => Ok(swapper.update_revised(unit, hyper, rest)?),
        // All are updated at the end of the step.
        Side::InPlace(..) | Side::Buffers(..) => Ok(()),
    }
}

/// Adds the GPUs' collective operations of this step to `trace`. The host's operations were added as they
/// ended.
///
/// # Errors
/// The GPU fails.
pub(super) fn add_spans_to(tiles: &mut Tiles, trace: &Trace) -> Result<(), TrainError> {
    match tiles {
        TileBackend::Swapper(_, WithSwapper::Gpu(buffers))
        | TileBackend::Gpu(_, InGpu::Buffers(buffers))
        | TileBackend::Both(_, WithSwapper::Gpu(buffers), _) => buffers.add_spans_to(trace),
        TileBackend::Swapper(_, WithSwapper::Host(_))
        | TileBackend::Gpu(_, _)
        | TileBackend::Both(_, WithSwapper::Host(_), _) => Ok(()),
    }
}

/// Returns the sum of squares of each unit's gradients in this step, of this rank's shards. Waits for the GPU and for other ranks.
///
/// # Errors
/// The GPU fails; a rank is gone.
pub(super) fn sum_squares(tiles: &Tiles) -> Result<Vec<f64>, TrainError> {
    let with_swapper = |with: &WithSwapper| match with {
        WithSwapper::Host(buffers) => Ok(buffers.sum_squares().to_vec()),
        WithSwapper::Gpu(buffers) => buffers.sum_squares(),
    };
    match tiles {
        TileBackend::Swapper(_, with) | TileBackend::Both(_, with, InGpu::Shared) => {
            with_swapper(with)
        }
        TileBackend::Gpu(_, InGpu::Buffers(buffers)) => buffers.sum_squares(),
        TileBackend::Gpu(_, InGpu::InPlace(units)) => units.sum_squares(),
        TileBackend::Both(both, with, InGpu::InPlace(units)) => {
            let (streamed, kept) = (with_swapper(with)?, units.sum_squares()?);
            let sums = streamed.into_iter().zip(kept).enumerate();
            Ok(sums
                .map(|(unit, (streamed, kept))| match both.backend.has(unit) {
                    true => kept,
                    false => streamed,
                })
                .collect())
        }
        _ => panic!("{ELSEWHERE}"),
    }
}
