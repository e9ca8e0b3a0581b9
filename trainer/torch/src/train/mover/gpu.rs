//! Units in a GPU's memory, copied from the host or computed with in place.
//!
//! ```text
//!   null stream   forward 3 | forward 4 | ...          | backward 9 | backward 8 |      torch's, and ours on its tensors
//!   up            | weights 4 | weights 5 | ...            weights 8 | weights 7 |      buffers of our own, in turn
//!   down                                                | gradients 10 | gradients 9 |
//!   between GPUs    | shards 4  | shards 5  | ...  | sums 10 | shards 7 | sums 9 |      with several ranks
//! ```
//!
//! Copies run on their own streams, and the host waits for each unit's copy while the GPU computes what was
//! enqueued before. Events order the streams: a buffer is overwritten only after the work that reads it, and
//! gradients leave once they are complete. If all tiles live in the GPU, nothing crosses the bus: one rank
//! computes with units in place; with several ranks, each GPU copies its shards into the buffers and gathers
//! there. With several nodes, the ranks of each may keep a copy in host memory of what the first gather of a unit after its
//! update has brought; later gathers copy it back and gather among the ranks of the node.

use kernels::adamw::{Hyper, Master};
use kernels::gpu::{DeviceBuffer, Event, Gpu, HostCopies, Stream, sum_squares_scratch_bytes};
use kernels::reduce::GradType;
use swapper::Swapper;
use test_hooks::safeguard::{Safeguard, is_disabled};

use super::super::TrainError;
use super::super::gpu_timeline::EnqueuedWork;
use super::super::step_order::EMBEDDING;
use super::muon::{StepDirections, grads};
use super::rotation::Rotation;
use super::shards::Shards;
use crate::compute::{ComputeError, Engine, GradSink, UnitWeights};
use training_run::config::Stage;
use training_state::backend::GpuBackend;
use training_state::trace::{Trace, Track};

/// Gradient buffers for blocks: backward writes one while the other leaves. Below stage 2 each block has its
/// own.
const GRAD_BUFFERS: usize = 2;

/// Bytes of one unit's sum of squares.
const SQUARES_BYTES: usize = size_of::<f64>();

/// Sums of squares of unit gradients, computed on a GPU.
struct Sums {
    gpu: Gpu,
    compute: Stream,
    grad_type: GradType,
    /// One f64 for each unit.
    squares: DeviceBuffer,
    scratch: DeviceBuffer,
    units: usize,
    shards: Shards,
}

impl Sums {
    fn new(engine: &Engine, gpu: &Gpu, master: Master, shards: Shards) -> Result<Self, TrainError> {
        let units = engine.units().len();
        let largest = engine.units().iter().map(|unit| unit.elems).max();
        let largest = largest.expect("a model has units");
        Ok(Self {
            gpu: gpu.clone(),
            compute: gpu.default_stream(),
            grad_type: master.grad_type(),
            squares: gpu.alloc(units * SQUARES_BYTES)?,
            scratch: gpu.alloc(sum_squares_scratch_bytes(largest))?,
            units,
            shards,
        })
    }

    /// Enqueues the sum of squares of this rank's shard of `unit`'s gradients in `grads` on `stream`.
    fn add(&self, stream: &Stream, unit: usize, grads: &DeviceBuffer) -> Result<(), TrainError> {
        let own = (self.shards).own_at(unit, grads, self.grad_type.elem_bytes());
        let squares = self.squares.at(unit * SQUARES_BYTES);
        // Summed over the whole shard, not tile by tile, so that the norm's bits do not depend on the tile
        // size.
        match self.shards.own(unit).len() {
            0 => stream.fill_zero(squares, SQUARES_BYTES)?,
            elems => {
                let kernels = self.gpu.kernels()?;
                let scratch = self.scratch.at(0);
                kernels.sum_squares(stream, self.grad_type, own, elems, scratch, squares)?;
            }
        }
        Ok(())
    }

    /// Returns each unit's sum in this step. Waits until `stream` has computed them.
    fn of_step(&self, stream: &Stream) -> Result<Vec<f64>, TrainError> {
        let mut bytes = vec![0; self.units * SQUARES_BYTES];
        self.gpu
            .download(stream, &self.squares, &mut [(0, &mut bytes)])?;
        self.shards.check()?;
        let (squares, _) = bytes.as_chunks::<SQUARES_BYTES>();
        Ok(squares
            .iter()
            .map(|bytes| f64::from_ne_bytes(*bytes))
            .collect())
    }
}

/// Units that are computed with in place.
pub(in crate::train) struct InPlace {
    sums: Sums,
    /// Views of the tiles, made at their first use.
    weights: Vec<Option<UnitWeights>>,
}

impl InPlace {
    /// # Errors
    /// The GPU has too little memory free.
    pub(in crate::train) fn new(
        engine: &Engine,
        gpu: &Gpu,
        master: Master,
        shards: Shards,
    ) -> Result<Self, TrainError> {
        Ok(Self {
            sums: Sums::new(engine, gpu, master, shards)?,
            weights: engine.units().iter().map(|_| None).collect(),
        })
    }

    pub(in crate::train) fn gather(
        &mut self,
        engine: &Engine,
        backend: &GpuBackend,
        unit: usize,
    ) -> Result<(), TrainError> {
        if self.weights[unit].is_none() {
            self.weights[unit] = Some(engine.weights_in(unit, &backend.unit(unit).param)?);
        }
        Ok(())
    }

    pub(in crate::train) fn weights(&self, unit: usize) -> &UnitWeights {
        let weights = self.weights[unit].as_ref();
        weights.expect("gathered before it is used")
    }

    pub(in crate::train) fn reduce(
        &mut self,
        backend: &GpuBackend,
        unit: usize,
        mut grads: GradSink,
    ) -> Result<(), TrainError> {
        let to = &backend.unit(unit).grad;
        grads.finish_into(to, self.sums.shards.padded_elems(unit))?;
        self.sums.add(&self.sums.compute, unit, to)
    }

    pub(in crate::train) fn sum_squares(&self) -> Result<Vec<f64>, TrainError> {
        self.sums.of_step(&self.sums.compute)
    }
}

/// This rank's part of the node's copy of each unit, in host memory.
struct Copies {
    host: HostCopies,
    /// Whether the part is that of the unit's newest update.
    is_current: Vec<bool>,
}

/// Units that are gathered into buffers on a GPU.
pub(in crate::train) struct GpuBuffers {
    sums: Sums,
    elem_bytes: usize,
    buffers: Buffers,
    copies: Option<Copies>,
    /// The event after which tiles in the GPU's memory have their newest update, until the first gather from them waits for it.
    tiles_updated: Option<Event>,
    /// Collective operations, for a timeline.
    collectives: EnqueuedWork,
}

impl GpuBuffers {
    /// Allocates buffers for `engine`'s units.
    ///
    /// # Errors
    /// The GPU has too little memory free.
    pub(in crate::train) fn new(
        engine: &Engine,
        gpu: &Gpu,
        master: Master,
        stage: Stage,
        block_buffers: usize,
        shards: Shards,
    ) -> Result<Self, TrainError> {
        let elem_bytes = master.param_bytes();
        let units = engine.units().len();
        let copies = || {
            let bytes = (0..units).map(|unit| shards.copied(unit).len() * elem_bytes);
            Ok::<_, TrainError>(Copies {
                host: HostCopies::new(gpu, &bytes.collect::<Vec<_>>())?,
                is_current: vec![false; units],
            })
        };
        Ok(Self {
            elem_bytes,
            copies: shards.keeps_copies().then(copies).transpose()?,
            buffers: Buffers::new(engine, gpu, master, stage, block_buffers, &shards)?,
            sums: Sums::new(engine, gpu, master, shards)?,
            tiles_updated: None,
            collectives: EnqueuedWork::new(Track::Collective),
        })
    }

    pub(in crate::train) fn gather_from_swapper(
        &mut self,
        swapper: &mut Swapper<Hyper>,
        unit: usize,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        if self.has_copy(unit) {
            swapper.gather(unit, |_| Ok::<(), TrainError>(()))?;
            return self.gather_copy(unit, trace);
        }
        self.claim_buffer(unit)?;
        let (gpu, up, elem_bytes) = (&self.sums.gpu, &self.buffers.up, self.elem_bytes);
        let to = self.buffers.weights_at(unit);
        swapper.gather(unit, |parts| {
            let pieces: Vec<(usize, &[u8])> = parts
                .iter()
                .map(|(elems, bytes)| (elems.start as usize * elem_bytes, *bytes))
                .collect();
            let bytes = pieces.iter().map(|(_, piece)| piece.len()).sum();
            let _span = trace.copy(bytes, || format!("weights of unit {unit}"));
            Ok::<(), TrainError>(gpu.upload(up, to, &pieces)?)
        })?;
        self.gather_shards(unit, trace)
    }

    pub(in crate::train) fn gather_from_gpu(
        &mut self,
        backend: &GpuBackend,
        unit: usize,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        if self.has_copy(unit) {
            return self.gather_copy(unit, trace);
        }
        self.claim_buffer(unit)?;
        let (shards, between) = (&self.sums.shards, &self.buffers.between);
        if let Some(updated) = self.tiles_updated.take() {
            between.wait(&updated)?;
        }
        let bytes = shards.own(unit).len() * self.elem_bytes;
        let own = shards.own_at(unit, self.buffers.weights_at(unit), self.elem_bytes);
        between.copy(backend.unit(unit).param.at(0), own, bytes)?;
        self.gather_shards(unit, trace)
    }

    /// Enqueues copying `unit`'s weights into a buffer from the node's copy, and gathering its parts there.
    pub(in crate::train) fn gather_copy(
        &mut self,
        unit: usize,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        self.claim_buffer(unit)?;
        let (shards, between) = (&self.sums.shards, &self.buffers.between);
        let to = self.buffers.weights_at(unit);
        let part = to.at(shards.copied(unit).start * self.elem_bytes);
        let copies = self.copies.as_mut().expect("the node keeps copies");
        copies.host.put_back(unit, part, &self.buffers.up)?;
        between.wait(&self.buffers.up.record()?)?;
        let name = || format!("node's copy of unit {unit}");
        self.collectives.record(trace, between, name, || {
            shards.gather_copies_on(between, unit, to, self.elem_bytes)
        })?;
        self.buffers.at_mut(unit).arrived = Some(between.record()?);
        Ok(())
    }

    /// Returns whether the node's copy of `unit` is that of its newest update.
    fn has_copy(&self, unit: usize) -> bool {
        let copies = self.copies.as_ref();
        copies.is_some_and(|copies| copies.is_current[unit])
    }

    /// Enqueues keeping this rank's part of the node's copy of `unit`, which arrives with `arrived`.
    fn keep_copy(&mut self, unit: usize, arrived: &Event) -> Result<(), TrainError> {
        let Some(copies) = &mut self.copies else {
            return Ok(());
        };
        let start = self.sums.shards.copied(unit).start * self.elem_bytes;
        let part = self.buffers.weights_at(unit).at(start);
        let kept = copies.host.keep(unit, part, arrived)?;
        copies.is_current[unit] = true;
        self.buffers.at_mut(unit).kept = Some(kept);
        Ok(())
    }

    /// Notes that the units' update is enqueued: the node's copies are out of date, and gathers follow it.
    ///
    /// # Errors
    /// The GPU fails.
    pub(in crate::train) fn updated(&mut self) -> Result<(), TrainError> {
        self.tiles_updated = Some(self.sums.compute.record()?);
        if let Some(copies) = &mut self.copies
            && !is_disabled(Safeguard::CopyInvalidation)
        {
            copies.is_current.fill(false);
        }
        Ok(())
    }

    /// Takes the buffer for `unit`. Writes to it wait until the work that reads it is done.
    fn claim_buffer(&mut self, unit: usize) -> Result<(), TrainError> {
        if let Some(free) = self.buffers.next_buffer(unit).free.take() {
            self.buffers.up.wait(&free)?;
            self.buffers.between.wait(&free)?;
        }
        Ok(())
    }

    /// Enqueues the gather of the other ranks' shards of `unit` into its buffer.
    fn gather_shards(&mut self, unit: usize, trace: &Trace) -> Result<(), TrainError> {
        let (shards, between) = (&self.sums.shards, &self.buffers.between);
        if shards.gathers() {
            let to = self.buffers.weights_at(unit);
            let name = || format!("weights of unit {unit}");
            self.collectives.record(trace, between, name, || {
                shards.gather_on(between, unit, to, self.elem_bytes)
            })?;
        }
        if shards.count() > 1 {
            let arrived = between.record()?;
            self.keep_copy(unit, &arrived)?;
            self.buffers.at_mut(unit).arrived = Some(arrived);
        }
        Ok(())
    }

    pub(in crate::train) fn ready(&mut self, unit: usize) -> Result<(), TrainError> {
        if let Some(arrived) = self.buffers.at_mut(unit).arrived.take() {
            self.sums.compute.wait(&arrived)?;
        }
        Ok(())
    }

    pub(in crate::train) fn weights(&self, unit: usize) -> &UnitWeights {
        &self.buffers.at(unit).unit
    }

    pub(in crate::train) fn give_back(&mut self, unit: usize) -> Result<(), TrainError> {
        let weights = self.buffers.at_mut(unit);
        // The copy was enqueued when they arrived, before the work of this unit.
        if let Some(kept) = weights.kept.take() {
            self.sums.compute.wait(&kept)?;
        }
        weights.unit.give_back()?;
        weights.free = Some(self.sums.compute.record()?);
        Ok(())
    }

    /// The buffer of a unit's gradients.
    pub(in crate::train) fn grads_of(&self, unit: usize) -> &DeviceBuffer {
        self.buffers.grads_of(unit)
    }

    /// Accepts a unit's complete gradients; tiles that live in the GPU get them at once.
    pub(in crate::train) fn reduce(
        &mut self,
        backend: Option<&GpuBackend>,
        unit: usize,
        mut grads: GradSink,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        let to = self.buffers.grads_of(unit);
        let shards = &self.sums.shards;
        grads.finish_into(to, shards.padded_elems(unit))?;
        if shards.count() > 1 {
            let between = &self.buffers.between;
            between.wait(&self.sums.compute.record()?)?;
            let name = || format!("gradients of unit {unit}");
            self.collectives.record(trace, between, name, || {
                shards.reduce_on(between, unit, to, self.sums.grad_type)
            })?;
        }
        let stream = self.sums_stream();
        self.sums.add(stream, unit, to)?;
        if let Some(backend) = backend {
            let own = shards.own_at(unit, to, self.elem_bytes);
            let bytes = shards.own(unit).len() * self.elem_bytes;
            stream.copy(own, backend.unit(unit).grad.at(0), bytes)?;
        }
        let complete = stream.record()?;
        self.buffers.complete[unit] = Some(complete);
        Ok(())
    }

    /// Makes later work on the compute stream wait until `unit`'s gradients are complete, so that it may
    /// overwrite them.
    pub(in crate::train) fn summed(&self, unit: usize) -> Result<(), TrainError> {
        if self.sums.shards.count() > 1 {
            let complete = self.buffers.complete[unit].as_ref();
            // Backward writes the next gradients into this buffer; an update on the GPU reads its own copy.
            (self.sums.compute).wait(complete.expect("gradients were reduced"))?;
        }
        Ok(())
    }

    /// Returns the event of the completion of `unit`'s gradients.
    pub(in crate::train) fn take_complete(&mut self, unit: usize) -> Event {
        let complete = self.buffers.complete[unit].take();
        complete.expect("gradients are complete before they leave")
    }

    pub(in crate::train) fn scatter_to_swapper(
        &mut self,
        swapper: &mut Swapper<Hyper>,
        unit: usize,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        let complete = self.take_complete(unit);
        let (gpu, down, elem_bytes) = (&self.sums.gpu, &self.buffers.down, self.elem_bytes);
        down.wait(&complete)?;
        let from = self.buffers.grads_of(unit);
        swapper.scatter(unit, |parts| {
            let mut pieces: Vec<(usize, &mut [u8])> = parts
                .iter_mut()
                .map(|(elems, bytes)| (elems.start as usize * elem_bytes, &mut **bytes))
                .collect();
            let bytes = pieces.iter().map(|(_, piece)| piece.len()).sum();
            let _span = trace.copy(bytes, || format!("gradients of unit {unit}"));
            Ok(gpu.download(down, from, &mut pieces)?)
        })
    }

    /// Replaces gradients of a block in the swapper's tiles by directions.
    pub(in crate::train) fn orthogonalize_from_swapper(
        &mut self,
        swapper: &mut Swapper<Hyper>,
        engine: &Engine,
        unit: usize,
        directions: &mut StepDirections<'_>,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        let muon = directions.muon();
        self.claim_buffer(unit)?;
        let (gpu, up) = (&self.sums.gpu, &self.buffers.up);
        let to = self.buffers.weights_at(unit);
        swapper.revise(unit, |tiles| {
            muon.mix(&directions.momentum, tiles);
            let mut grads = grads(tiles);
            let pieces = muon.pieces(unit, &mut grads);
            let pieces: Vec<(usize, &[u8])> = pieces
                .into_iter()
                .map(|(at, piece)| (at, &*piece))
                .collect();
            let bytes = pieces.iter().map(|(_, piece)| piece.len()).sum();
            let _span = trace.copy(bytes, || format!("matrices of unit {unit}"));
            Ok::<(), TrainError>(gpu.upload(up, to, &pieces)?)
        })?;
        self.make_orthogonal(engine, unit, directions, trace)?;
        let (gpu, down) = (&self.sums.gpu, &self.buffers.down);
        down.wait(&self.sums.compute.record()?)?;
        let from = self.buffers.weights_at(unit);
        swapper.scatter(unit, |tiles| {
            let mut pieces = muon.pieces(unit, tiles);
            let bytes = pieces.iter().map(|(_, piece)| piece.len()).sum();
            let _span = trace.copy(bytes, || format!("directions of unit {unit}"));
            Ok::<(), TrainError>(gpu.download(down, from, &mut pieces)?)
        })?;
        self.give_back(unit)
    }

    /// Replaces gradients of a block in tiles in the GPU's memory by directions.
    pub(in crate::train) fn orthogonalize_from_gpu(
        &mut self,
        backend: &GpuBackend,
        engine: &Engine,
        unit: usize,
        directions: &mut StepDirections<'_>,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        let muon = directions.muon();
        self.claim_buffer(unit)?;
        let (compute, between) = (&self.sums.compute, &self.buffers.between);
        // The shard was copied there on this stream.
        compute.wait(&between.record()?)?;
        muon.mix_in_gpu(engine, backend, unit, &directions.momentum)?;
        between.wait(&compute.record()?)?;
        let shards = &self.sums.shards;
        let bytes = shards.own(unit).len() * self.elem_bytes;
        let own = shards.own_at(unit, self.buffers.weights_at(unit), self.elem_bytes);
        let grads = backend.unit(unit).grad.at(0);
        between.copy(grads, own, bytes)?;
        self.make_orthogonal(engine, unit, directions, trace)?;
        let own = (self.sums.shards).own_at(unit, self.buffers.weights_at(unit), self.elem_bytes);
        self.sums.compute.copy(own, grads, bytes)?;
        self.give_back(unit)
    }

    /// Gathers the matrices of a block, of which this rank's shard is in the buffer, and makes them orthogonal there.
    fn make_orthogonal(
        &mut self,
        engine: &Engine,
        unit: usize,
        directions: &mut StepDirections<'_>,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        let (shards, between) = (&self.sums.shards, &self.buffers.between);
        if shards.gathers() {
            let to = self.buffers.weights_at(unit);
            let name = || format!("matrices of unit {unit}");
            self.collectives.record(trace, between, name, || {
                shards.gather_on(between, unit, to, self.elem_bytes)
            })?;
        }
        self.sums.compute.wait(&between.record()?)?;
        let flat = &self.buffers.at(unit).unit;
        directions.make_orthogonal(engine, unit, flat)
    }

    /// Adds the times of collective operations to `trace`; waits until they have ended.
    pub(in crate::train) fn add_spans_to(&mut self, trace: &Trace) -> Result<(), TrainError> {
        Ok(self.collectives.flush_to(trace, &self.buffers.between)?)
    }

    /// Returns the sum of squares of each unit's gradients in this step. Waits until they are computed.
    pub(in crate::train) fn sum_squares(&self) -> Result<Vec<f64>, TrainError> {
        self.sums.of_step(self.sums_stream())
    }

    /// Returns the stream on which gradients become complete.
    fn sums_stream(&self) -> &Stream {
        match self.sums.shards.count() {
            1 => &self.sums.compute,
            _ => &self.buffers.between,
        }
    }
}

/// A unit's weights, the event after which all shards have arrived, and the one after which nothing reads
/// them.
struct Weights {
    unit: UnitWeights,
    arrived: Option<Event>,
    free: Option<Event>,
    /// The event after which this rank's part of the node's copy was read from them.
    kept: Option<Event>,
}

/// Buffers for gathered units and for gradients on their way out.
struct Buffers {
    up: Stream,
    down: Stream,
    /// Stream of collective operations, which run in one order.
    between: Stream,
    embedding: Weights,
    blocks: Vec<Weights>,
    head: Weights,
    head_unit: usize,
    rotation: Rotation,
    embedding_grads: DeviceBuffer,
    block_grads: Vec<DeviceBuffer>,
    head_grads: DeviceBuffer,
    /// Event of each unit after which its gradients are complete.
    complete: Vec<Option<Event>>,
}

impl Buffers {
    fn new(
        engine: &Engine,
        gpu: &Gpu,
        master: Master,
        stage: Stage,
        block_buffers: usize,
        shards: &Shards,
    ) -> Result<Self, TrainError> {
        let head = engine.units().len() - 1;
        let weights = |unit: usize| -> Result<Weights, ComputeError> {
            Ok(Weights {
                unit: engine.new_padded_weights(unit, shards.buffer_elems(unit))?,
                arrived: None,
                // Zeros are written there.
                free: Some(gpu.default_stream().record()?),
                kept: None,
            })
        };
        let block_grads = if stage.divides_gradients() {
            GRAD_BUFFERS
        } else {
            head - 1
        };
        let grads = |unit: usize| gpu.alloc(shards.padded_elems(unit) * master.grad_bytes());
        Ok(Self {
            up: gpu.stream()?,
            down: gpu.stream()?,
            between: gpu.stream()?,
            embedding: weights(EMBEDDING)?,
            blocks: (0..block_buffers)
                .map(|_| weights(1))
                .collect::<Result<_, _>>()?,
            head: weights(head)?,
            head_unit: head,
            rotation: Rotation::new(block_buffers),
            embedding_grads: grads(EMBEDDING)?,
            block_grads: (0..block_grads)
                .map(|_| grads(1))
                .collect::<Result<_, _>>()?,
            head_grads: grads(head)?,
            complete: (0..=head).map(|_| None).collect(),
        })
    }

    /// Takes the next buffer for `unit`.
    fn next_buffer(&mut self, unit: usize) -> &mut Weights {
        if unit != EMBEDDING && unit != self.head_unit {
            self.rotation.assign(unit);
        }
        self.at_mut(unit)
    }

    /// Returns the memory of `unit`'s weights.
    fn weights_at(&self, unit: usize) -> &DeviceBuffer {
        self.at(unit).unit.buffer().expect("weights on a GPU")
    }

    fn at(&self, unit: usize) -> &Weights {
        match unit {
            EMBEDDING => &self.embedding,
            unit if unit == self.head_unit => &self.head,
            unit => &self.blocks[self.rotation.at(unit)],
        }
    }

    fn at_mut(&mut self, unit: usize) -> &mut Weights {
        match unit {
            EMBEDDING => &mut self.embedding,
            unit if unit == self.head_unit => &mut self.head,
            unit => &mut self.blocks[self.rotation.at(unit)],
        }
    }

    fn grads_of(&self, unit: usize) -> &DeviceBuffer {
        match unit {
            EMBEDDING => &self.embedding_grads,
            unit if unit == self.head_unit => &self.head_grads,
            unit => &self.block_grads[unit % self.block_grads.len()],
        }
    }
}
