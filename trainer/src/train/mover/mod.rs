//! Brings units' weights from where they live to where they are computed with, and their gradients back.

mod gpu;
mod host;
mod rotation;
mod shards;

use kernels::adamw::Master;
use kernels::gpu::Gpu;

pub(super) use gpu::GpuMover;
pub(super) use host::HostMover;
pub(super) use shards::{Exchanged, Shards};

use super::TrainError;
use crate::backend::TileBackend;
use crate::compute::{Engine, GradSink, UnitWeights};
use crate::config::Stage;
use crate::trace::Trace;

/// The two places that compute.
pub(super) enum Mover {
    Host(Box<HostMover>),
    Gpu(Box<GpuMover>),
}

impl Mover {
    /// For `engine`, on the GPU it computes on if there is one, with `block_buffers` as in [`super::step_order`]; `live` where tiles
    /// are in the GPU.
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
        Ok(match gpu {
            None => Self::Host(Box::new(HostMover::new(
                engine,
                master,
                block_buffers,
                shards.clone(),
            )?)),
            Some(gpu) => {
                let shards = shards.clone();
                let mover = GpuMover::new(engine, gpu, master, stage, block_buffers, live, shards)?;
                Self::Gpu(Box::new(mover))
            }
        })
    }

    /// Brings a unit's weights into a buffer.
    ///
    /// # Errors
    /// What the tiles' place says, or the GPU.
    pub(super) fn gather(
        &mut self,
        engine: &Engine,
        backend: &mut TileBackend,
        unit: usize,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        match self {
            Self::Host(mover) => mover.gather(backend, unit),
            Self::Gpu(mover) => mover.gather(engine, backend, unit, trace),
        }
    }

    /// Behind this a unit's weights may be computed with. The host waits for other ranks' shards, a GPU's stream for its own.
    ///
    /// # Errors
    /// A rank is gone; the GPU's.
    pub(super) fn ready(&mut self, unit: usize, trace: &Trace) -> Result<(), TrainError> {
        match self {
            Self::Host(mover) => mover.ready(unit, trace),
            Self::Gpu(mover) => mover.ready(unit),
        }
    }

    /// A unit's weights, which were gathered and are ready.
    pub(super) fn weights(&self, unit: usize) -> &UnitWeights {
        match self {
            Self::Host(mover) => mover.weights(unit),
            Self::Gpu(mover) => mover.weights(unit),
        }
    }

    /// Gives a unit's weights back: all that is computed with them is under way, and behind it their buffer may be used again.
    /// Weights that are computed with where they live stay as they are.
    ///
    /// Panics if anything still looks at the buffer.
    ///
    /// # Errors
    /// The GPU's.
    pub(super) fn give_back(&mut self, unit: usize) -> Result<(), TrainError> {
        match self {
            Self::Host(mover) => mover.give_back(unit),
            Self::Gpu(mover) => mover.give_back(unit),
        }
    }

    /// An empty sum of a unit's gradients.
    ///
    /// # Errors
    /// Out of memory.
    pub(super) fn sink(
        &self,
        engine: &Engine,
        backend: &TileBackend,
        unit: usize,
    ) -> Result<GradSink, TrainError> {
        match self {
            Self::Host(_) => Ok(engine.new_grads(unit)),
            Self::Gpu(mover) => mover.sink(engine, backend, unit),
        }
    }

    /// Takes a unit's complete gradients. Its weights are gone from the buffer after.
    ///
    /// # Errors
    /// The GPU's; out of memory.
    pub(super) fn reduce(
        &mut self,
        backend: &TileBackend,
        unit: usize,
        grads: GradSink,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        match self {
            Self::Host(mover) => mover.reduce(unit, grads),
            Self::Gpu(mover) => mover.reduce(backend, unit, grads, trace),
        }
    }

    /// Hands a unit's gradients to where its tiles live.
    ///
    /// # Errors
    /// What the tiles' place says, or the GPU.
    pub(super) fn scatter(
        &mut self,
        backend: &mut TileBackend,
        unit: usize,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        match self {
            Self::Host(mover) => mover.scatter(backend, unit, trace),
            Self::Gpu(mover) => mover.scatter(backend, unit, trace),
        }
    }

    /// Tells `trace` what GPUs exchanged in this step, when they have; what hosts did was told as it ended.
    ///
    /// # Errors
    /// The GPU's.
    pub(super) fn tell(&mut self, trace: &Trace) -> Result<(), TrainError> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Gpu(mover) => mover.tell(trace),
        }
    }

    /// The norm of all gradients of the step, before clipping. Waits for a GPU, and for all ranks.
    ///
    /// # Errors
    /// The GPU's; a rank is gone.
    pub(super) fn norm(&self, shards: &Shards) -> Result<f64, TrainError> {
        let mut squares = match self {
            Self::Host(mover) => mover.sum_squares().to_vec(),
            Self::Gpu(mover) => mover.sum_squares()?,
        };
        shards.sum_of_shards(&mut squares)?;
        // In the units' order, whatever order their gradients came in.
        Ok(squares.iter().sum::<f64>().sqrt())
    }
}
