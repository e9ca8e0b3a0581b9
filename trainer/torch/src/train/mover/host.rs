//! Units in host memory, computed with by the processor.
//!
//! Each kind of unit has its own buffers: one for the embedding (which a tied head reads too), one for the
//! head, and one or more that blocks take in turn (one for each block if weights stay from forward to
//! backward). A buffer holds the unit's weights first, then its gradients. With several ranks, a collective
//! operation owns the buffer while it runs and returns it when its result is needed. With several nodes, the ranks of
//! each may keep a copy of what the first gather of a unit after its update has brought; later gathers use it.

use std::ops::Range;
use std::time::Instant;

use kernels::adamw::{Hyper, Master};
use kernels::reduce::{GradType, sum_squares};
use kernels_torch::HostBuffer;
use kernels_torch::collective::Pending;
use swapper::Swapper;
use tch::Kind;
use test_hooks::safeguard::{Safeguard, is_disabled};

use super::super::TrainError;
use super::super::step_order::EMBEDDING;
use super::muon::{StepDirections, grads};
use super::rotation::Rotation;
use super::shards::Shards;
use crate::compute::{ComputeError, Engine, GradSink, UnitWeights};
use training_state::trace::{Trace, Track};

/// Buffers in host memory.
pub(in crate::train) struct HostBuffers {
    elem_bytes: usize,
    grad_type: GradType,
    head: usize,
    embedding: UnitWeights,
    blocks: Vec<UnitWeights>,
    last: UnitWeights,
    rotation: Rotation,
    /// Sum of squares of this rank's shard of each unit's gradients, in this step.
    sum_squares: Vec<f64>,
    shards: Shards,
    /// This rank's part of the node's copy of each unit; empty if it keeps none.
    copies: Vec<KeptPart>,
    /// Running collective operation of each unit.
    gathering: Vec<Option<UnderWay>>,
    reducing: Vec<Option<UnderWay>>,
}

/// Part of the node's copy of a unit.
struct KeptPart {
    bytes: HostBuffer,
    /// Whether the bytes are those of the unit's newest update.
    is_current: bool,
}

/// Running collective operation and its start time.
struct UnderWay {
    pending: Pending,
    began: Instant,
}

impl UnderWay {
    fn new(pending: Pending) -> Self {
        Self {
            pending,
            began: Instant::now(),
        }
    }

    /// Waits for the operation. The timeline shows it as running until this call, because its real end is not
    /// observed.
    fn wait(self, trace: &Trace, name: impl FnOnce() -> String) -> Result<HostBuffer, TrainError> {
        let buffer = self.pending.wait()?;
        if trace.recording() {
            trace.record(Track::Collective, name(), self.began, Instant::now());
        }
        Ok(buffer)
    }
}

impl HostBuffers {
    /// Allocates buffers for `engine`'s units, `block_buffers` of them for blocks.
    ///
    /// # Errors
    /// Out of memory.
    pub(in crate::train) fn new(
        engine: &Engine,
        master: Master,
        block_buffers: usize,
        shards: Shards,
    ) -> Result<Self, ComputeError> {
        let head = engine.units().len() - 1;
        let new_weights = |unit| engine.new_padded_weights(unit, shards.buffer_elems(unit));
        let elem_bytes = master.param_bytes();
        let kept = |unit| {
            let bytes = HostBuffer::zeros(Kind::Uint8, shards.copied(unit).len() * elem_bytes)?;
            Ok::<_, ComputeError>(KeptPart {
                bytes,
                is_current: false,
            })
        };
        let copied = if shards.keeps_copies() { head + 1 } else { 0 };
        Ok(Self {
            elem_bytes,
            copies: (0..copied).map(kept).collect::<Result<_, _>>()?,
            grad_type: master.grad_type(),
            head,
            embedding: new_weights(EMBEDDING)?,
            blocks: (0..block_buffers)
                .map(|_| new_weights(1))
                .collect::<Result<_, _>>()?,
            last: new_weights(head)?,
            rotation: Rotation::new(block_buffers),
            sum_squares: vec![0.0; head + 1],
            gathering: (0..=head).map(|_| None).collect(),
            reducing: (0..=head).map(|_| None).collect(),
            shards,
        })
    }

    /// Copies a unit's weights into a buffer; with several ranks, starts gathering them.
    pub(in crate::train) fn gather(
        &mut self,
        swapper: &mut Swapper<Hyper>,
        unit: usize,
    ) -> Result<(), TrainError> {
        if self.copies.get(unit).is_some_and(|kept| kept.is_current) {
            swapper.gather(unit, |_| Ok::<(), TrainError>(()))?;
            return self.gather_copy(unit);
        }
        self.claim_buffer(unit);
        let elem_bytes = self.elem_bytes;
        let shards = self.shards.clone();
        let weights = self.buffer(unit);
        let buffer = weights.bytes_mut();
        swapper.gather(unit, |parts| {
            for (elems, bytes) in parts {
                buffer[elems.start as usize * elem_bytes..elems.end as usize * elem_bytes]
                    .copy_from_slice(bytes);
            }
            Ok::<(), TrainError>(())
        })?;
        if shards.gathers() {
            let pending = shards.gather(unit, weights)?;
            self.gathering[unit] = Some(UnderWay::new(pending));
        }
        Ok(())
    }

    /// Copies a unit's weights into a buffer from the node's copy; with several ranks on the node, starts gathering
    /// them.
    pub(in crate::train) fn gather_copy(&mut self, unit: usize) -> Result<(), TrainError> {
        self.claim_buffer(unit);
        let bytes = self.copied_bytes(unit);
        let shards = self.shards.clone();
        let mut kept = std::mem::take(&mut self.copies[unit].bytes);
        let weights = self.buffer(unit);
        weights.bytes_mut()[bytes].copy_from_slice(kept.bytes_mut());
        let pending = shards.gather_copies(unit, weights)?;
        self.copies[unit].bytes = kept;
        self.gathering[unit] = Some(UnderWay::new(pending));
        Ok(())
    }

    /// Takes a buffer for `unit`.
    fn claim_buffer(&mut self, unit: usize) {
        if unit != EMBEDDING && unit != self.head {
            self.rotation.assign(unit);
        }
    }

    /// Range of bytes in a unit's buffer that this rank keeps of the node's copy.
    fn copied_bytes(&self, unit: usize) -> Range<usize> {
        let elems = self.shards.copied(unit);
        elems.start * self.elem_bytes..elems.end * self.elem_bytes
    }

    /// Waits until all of a unit's weights have arrived, and keeps this rank's part of the node's copy of new ones.
    pub(in crate::train) fn ready(&mut self, unit: usize, trace: &Trace) -> Result<(), TrainError> {
        if let Some(under_way) = self.gathering[unit].take() {
            let whole = under_way.wait(trace, || format!("shards of unit {unit}"))?;
            self.buffer(unit).put_host(whole);
            self.keep_copy(unit);
        }
        Ok(())
    }

    fn keep_copy(&mut self, unit: usize) {
        if self.copies.get(unit).is_none_or(|kept| kept.is_current) {
            return;
        }
        let bytes = self.copied_bytes(unit);
        let mut kept = std::mem::take(&mut self.copies[unit].bytes);
        kept.bytes_mut()
            .copy_from_slice(&self.buffer(unit).bytes_mut()[bytes]);
        self.copies[unit] = KeptPart {
            bytes: kept,
            is_current: true,
        };
    }

    /// Notes that the units were updated: the node's copies are out of date.
    pub(in crate::train) fn updated(&mut self) {
        if !is_disabled(Safeguard::CopyInvalidation) {
            (self.copies.iter_mut()).for_each(|kept| kept.is_current = false);
        }
    }

    /// Returns the weights of a gathered unit.
    pub(in crate::train) fn weights(&self, unit: usize) -> &UnitWeights {
        match unit {
            EMBEDDING => &self.embedding,
            unit if unit == self.head => &self.last,
            unit => &self.blocks[self.rotation.at(unit)],
        }
    }

    /// Releases a unit's weights, which nothing reads any more.
    pub(in crate::train) fn give_back(&mut self, unit: usize) -> Result<(), TrainError> {
        Ok(self.buffer(unit).give_back()?)
    }

    /// Accepts a unit's complete gradients, which replace its weights in the buffer.
    pub(in crate::train) fn reduce(
        &mut self,
        unit: usize,
        mut grads: GradSink,
    ) -> Result<(), TrainError> {
        let grad_type = self.grad_type;
        let shards = self.shards.clone();
        let weights = self.buffer(unit);
        grads.finish(&mut weights.bytes_mut()[..grads.size_bytes()])?;
        if shards.count() > 1 {
            let pending = shards.reduce(unit, weights, grad_type)?;
            self.reducing[unit] = Some(UnderWay::new(pending));
        } else {
            self.add_squares(unit);
        }
        Ok(())
    }

    /// Adds the squares of the whole shard, not tile by tile, so that the norm's bits do not depend on the
    /// tile size.
    fn add_squares(&mut self, unit: usize) {
        let (grad_type, elem_bytes) = (self.grad_type, self.elem_bytes);
        let own = self.shards.own(unit);
        let buffer = self.buffer(unit).bytes_mut();
        let own = &buffer[own.start * elem_bytes..own.end * elem_bytes];
        self.sum_squares[unit] = sum_squares(grad_type, own);
    }

    /// Waits until a unit's gradients are summed over the ranks.
    pub(in crate::train) fn summed(
        &mut self,
        unit: usize,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        if let Some(under_way) = self.reducing[unit].take() {
            let mut summed = under_way.wait(trace, || format!("sums of unit {unit}"))?;
            if self.shards.sums_for_all() {
                let others = UnderWay::new(self.shards.gather_sums(unit, summed)?);
                summed = others.wait(trace, || format!("all sums of unit {unit}"))?;
            }
            self.buffer(unit).put_host(summed);
            self.add_squares(unit);
        }
        Ok(())
    }

    /// Hands a unit's summed gradients to the swapper.
    pub(in crate::train) fn scatter(
        &mut self,
        swapper: &mut Swapper<Hyper>,
        unit: usize,
    ) -> Result<(), TrainError> {
        let elem_bytes = self.elem_bytes;
        let buffer = self.buffer(unit).bytes_mut();
        swapper.scatter(unit, |parts| {
            for (elems, grad) in parts {
                grad.copy_from_slice(
                    &buffer[elems.start as usize * elem_bytes..elems.end as usize * elem_bytes],
                );
            }
            Ok(())
        })
    }

    /// Replaces gradients of a block by directions.
    pub(in crate::train) fn orthogonalize(
        &mut self,
        swapper: &mut Swapper<Hyper>,
        engine: &Engine,
        unit: usize,
        directions: &mut StepDirections<'_>,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        let muon = directions.muon();
        self.claim_buffer(unit);
        let shards = self.shards.clone();
        let flat = self.buffer(unit);
        let buffer = flat.bytes_mut();
        swapper.revise(unit, |tiles| {
            muon.mix(&directions.momentum, tiles);
            for (at, piece) in muon.pieces(unit, &mut grads(tiles)) {
                buffer[at..at + piece.len()].copy_from_slice(piece);
            }
            Ok::<(), TrainError>(())
        })?;
        if shards.gathers() {
            let under_way = UnderWay::new(shards.gather(unit, flat)?);
            flat.put_host(under_way.wait(trace, || format!("matrices of unit {unit}"))?);
        }
        directions.make_orthogonal(engine, unit, flat)?;
        let buffer = flat.bytes_mut();
        swapper.scatter(unit, |tiles| {
            for (at, piece) in muon.pieces(unit, tiles) {
                piece.copy_from_slice(&buffer[at..at + piece.len()]);
            }
            Ok::<(), TrainError>(())
        })?;
        self.give_back(unit)
    }

    /// Returns the sum of squares of this rank's shard of each unit's gradients, in this step.
    pub(in crate::train) fn sum_squares(&self) -> &[f64] {
        &self.sum_squares
    }

    fn buffer(&mut self, unit: usize) -> &mut UnitWeights {
        match unit {
            EMBEDDING => &mut self.embedding,
            unit if unit == self.head => &mut self.last,
            unit => &mut self.blocks[self.rotation.at(unit)],
        }
    }
}
