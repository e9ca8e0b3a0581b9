//! Muon between backward and the update: each block's gradients become directions, which need whole matrices.
//!
//! ```text
//!   tiles    momentum, gradients ──▶ new momentum, mixture          element by element, where the tile is
//!   buffer   mixture ──▶ other ranks' shards ──▶ direction          matrix by matrix, where blocks are computed with
//!   tiles    direction ──▶ in place of the gradients                the update subtracts it
//! ```
//!
//! The mixture takes the place of gradients, so that no memory is needed besides a block's buffer. Every rank makes each matrix orthogonal: equal inputs
//! give equal bits.

use std::ops::Range;

use kernels::gpu::Gpu;
use kernels::muon::MomentumStep;
use kernels_torch::NewtonSchulz;
use rayon::prelude::*;
use swapper::{PartMut, Revision};

use super::super::TrainError;
use super::super::clock::Clock;
use crate::compute::{ComputeError, Engine, UnitWeights};
use training_run::config::RunSettings;
use training_run::plan::Plan;
use training_state::backend::GpuBackend;
use training_state::update::{TileFormats, mix, parts};

/// What Muon does with a run's matrices.
pub(in crate::train) struct Muon {
    iteration: NewtonSchulz,
    decay: f64,
    nesterov: bool,
    formats: TileFormats,
    elem_bytes: usize,
    /// Elements of the matrices of each unit, in ascending order.
    matrices: Vec<Vec<(Range<u64>, ())>>,
}

impl Muon {
    /// Returns `None` for a run with another optimizer.
    pub(in crate::train) fn new(settings: &RunSettings, plan: &Plan) -> Option<Self> {
        let muon = settings.optimizer.muon.as_ref()?;
        let matrices = plan.units.iter().map(|unit| {
            let params = unit.params.iter();
            let matrices = params.filter(|param| param.member.is_block_matrix());
            let elems = matrices.map(|param| param.range_elems());
            elems
                .map(|elems| (elems.start as u64..elems.end as u64, ()))
                .collect()
        });
        Some(Self {
            iteration: NewtonSchulz {
                steps: muon.ns_steps,
                coefficients: muon.ns_coefficients,
            },
            decay: muon.momentum,
            nesterov: muon.nesterov,
            elem_bytes: plan.formats.master().param_bytes(),
            formats: plan.formats.clone(),
            matrices: matrices.collect(),
        })
    }

    /// The step of momenta by gradients with this factor.
    fn step(&self, grad_scale: f32) -> MomentumStep {
        MomentumStep {
            decay: self.decay,
            nesterov: self.nesterov,
            grad_scale,
        }
    }

    /// Updates the momenta of tiles and puts mixtures in place of their gradients.
    pub(super) fn mix(&self, step: &MomentumStep, tiles: &mut [Revision<'_>]) {
        tiles.par_iter_mut().for_each(|tile| {
            let format = self.formats.of_tile(tile.range);
            let steps = parts(&tile.range.elems, &self.matrices[tile.range.unit])
                .map(|(within, ())| (within, *step));
            mix(format, format.master.grad_type(), tile, steps);
        });
    }

    /// Like [`Muon::mix`], for the tiles of `unit` in a GPU's memory. The work is enqueued on the default stream.
    ///
    /// # Errors
    /// Out of memory.
    pub(super) fn mix_in_gpu(
        &self,
        engine: &Engine,
        backend: &GpuBackend,
        unit: usize,
        step: &MomentumStep,
    ) -> Result<(), ComputeError> {
        let tiles = backend.unit(unit);
        let first = tiles.elems().start;
        for (run, momenta_at) in tiles.momenta() {
            for (within, ()) in parts(&run, &self.matrices[unit]) {
                let momenta = (tiles.state(), momenta_at / size_of::<f32>() + within.start);
                let grads = (&tiles.grad, (run.start - first) as usize + within.start);
                engine.step_momentum(step, momenta, grads, within.len())?;
            }
        }
        Ok(())
    }

    /// The matrices of tiles of `unit`: offsets in the unit's buffer, and bytes of the tiles.
    pub(super) fn pieces<'a>(
        &self,
        unit: usize,
        tiles: &'a mut [PartMut<'_>],
    ) -> Vec<(usize, &'a mut [u8])> {
        let mut pieces = Vec::new();
        for (elems, bytes) in tiles {
            let mut left = &mut **bytes;
            let mut at = 0;
            for (within, ()) in parts(elems, &self.matrices[unit]) {
                let bytes = self.bytes(&within);
                let rest = left.split_at_mut(bytes.start - at).1;
                let (piece, rest) = rest.split_at_mut(bytes.len());
                at = bytes.end;
                left = rest;
                pieces.push((elems.start as usize * self.elem_bytes + bytes.start, piece));
            }
        }
        pieces
    }

    fn bytes(&self, elems: &Range<usize>) -> Range<usize> {
        elems.start * self.elem_bytes..elems.end * self.elem_bytes
    }
}

/// The directions of one step.
pub(in crate::train) struct StepDirections<'a> {
    muon: &'a Muon,
    pub(super) momentum: MomentumStep,
    /// Time of the iterations.
    clock: Clock,
}

impl<'a> StepDirections<'a> {
    /// Directions of gradients with this factor, which `gpu` or the processor makes.
    pub(in crate::train) fn new(muon: &'a Muon, grad_scale: f32, gpu: Option<&Gpu>) -> Self {
        Self {
            muon,
            momentum: muon.step(grad_scale),
            clock: Clock::new(gpu),
        }
    }

    /// The run's part of it.
    pub(super) fn muon(&self) -> &'a Muon {
        self.muon
    }

    /// Replaces each matrix of the block `unit`, which `flat` has, by its direction.
    ///
    /// # Errors
    /// Out of memory.
    pub(super) fn make_orthogonal(
        &mut self,
        engine: &Engine,
        unit: usize,
        flat: &UnitWeights,
    ) -> Result<(), TrainError> {
        let iteration = &self.muon.iteration;
        (self.clock).time(|| engine.make_orthogonal(unit, flat, iteration))
    }

    /// Returns the seconds of the iterations so far. Waits until a GPU's have ended.
    ///
    /// # Errors
    /// The GPU fails.
    pub(in crate::train) fn seconds(&self) -> Result<f64, TrainError> {
        self.clock.seconds()
    }
}

/// The gradients of revised tiles as parts of their unit.
pub(super) fn grads<'a>(tiles: &'a mut [Revision<'_>]) -> Vec<PartMut<'a>> {
    let parts = tiles.iter_mut();
    parts
        .map(|tile| (tile.range.elems.clone(), &mut *tile.grad))
        .collect()
}

/// Accepts a revision that changes nothing.
pub(super) fn unrevised(_: &mut [Revision<'_>]) -> Result<(), TrainError> {
    Ok(())
}
