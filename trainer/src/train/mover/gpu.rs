//! Units in a GPU's memory.
//!
//! ```text
//!   null stream   forward 3 | forward 4 | ...          | backward 9 | backward 8 |      torch's, and ours on its tensors
//!   up            | weights 4 | weights 5 | ...            weights 8 | weights 7 |      buffers of our own, in turn
//!   down                                                | gradients 10 | gradients 9 |
//!   between GPUs    | shards 4  | shards 5  | ...  | sums 10 | shards 7 | sums 9 |      with several ranks
//! ```
//!
//! Copies run on streams of their own and the host waits for each unit's, while the GPU computes what was enqueued before.
//! Events order the streams: a buffer is written when what was computed with it is done, gradients leave when they are
//! complete. Where all tiles live in the GPU nothing is copied: units are computed with where they lie; with several ranks
//! each GPU has its shards of them, which are copied into the buffers and gathered there.

use kernels::adamw::Master;
use kernels::gpu::{DeviceBuffer, Event, Gpu, Stream, sum_squares_scratch_bytes};
use kernels::reduce::GradType;

use super::super::TrainError;
use super::super::gpu_timeline::Enqueued;
use super::super::step_order::EMBEDDING;
use super::rotation::Rotation;
use super::shards::Shards;
use crate::backend::TileBackend;
use crate::compute::{ComputeError, Engine, GradSink, UnitWeights};
use crate::config::Stage;
use crate::trace::{Trace, Track};

/// Gradients of blocks in flight: one is written by backward while the other leaves. Below stage 2 each block has its own.
const GRAD_BUFFERS: usize = 2;

/// Bytes of a unit's sum of squares.
const SQUARES_BYTES: usize = size_of::<f64>();

/// Moves on a GPU.
pub(in crate::train) struct GpuMover {
    gpu: Gpu,
    compute: Stream,
    elem_bytes: usize,
    grad_type: GradType,
    /// One f64 a unit, and the chunks' sums on the way there.
    squares: DeviceBuffer,
    scratch: DeviceBuffer,
    units: usize,
    place: Place,
    shards: Shards,
    /// With the other ranks, for a timeline.
    collectives: Enqueued,
}

/// Where units are computed with.
enum Place {
    /// Where they live, once it is known where that is.
    TileBackend(Vec<Option<UnitWeights>>),
    Buffers(Box<Buffers>),
}

impl Place {
    fn grads_of<'a>(&'a self, backend: &'a TileBackend, unit: usize) -> &'a DeviceBuffer {
        match (self, backend) {
            (Self::TileBackend(_), TileBackend::Gpu(backend)) => &backend.unit(unit).grad,
            (Self::Buffers(buffers), _) => buffers.grads_of(unit),
            _ => panic!("units are computed with where they live, or in buffers"),
        }
    }
}

impl GpuMover {
    /// Room for `engine`'s units; none where they `live` in the GPU.
    ///
    /// # Errors
    /// The GPU has too little memory free.
    pub(in crate::train) fn new(
        engine: &Engine,
        gpu: &Gpu,
        master: Master,
        stage: Stage,
        block_buffers: usize,
        live: bool,
        shards: Shards,
    ) -> Result<Self, TrainError> {
        let units = engine.units().len();
        let largest = engine.units().iter().map(|unit| unit.elems).max();
        let largest = largest.expect("a model has units");
        Ok(Self {
            gpu: gpu.clone(),
            compute: gpu.default_stream(),
            elem_bytes: master.param_bytes(),
            grad_type: GradType::of(master),
            squares: gpu.alloc(units * SQUARES_BYTES)?,
            scratch: gpu.alloc(sum_squares_scratch_bytes(largest))?,
            units,
            place: if live && shards.count() == 1 {
                Place::TileBackend((0..units).map(|_| None).collect())
            } else {
                let buffers = Buffers::new(engine, gpu, master, stage, block_buffers, &shards)?;
                Place::Buffers(Box::new(buffers))
            },
            shards,
            collectives: Enqueued::new(Track::Collective),
        })
    }

    pub(in crate::train) fn gather(
        &mut self,
        engine: &Engine,
        backend: &mut TileBackend,
        unit: usize,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        match (&mut self.place, backend) {
            (Place::TileBackend(units), TileBackend::Gpu(backend)) => {
                if units[unit].is_none() {
                    units[unit] = Some(engine.weights_in(unit, &backend.unit(unit).param)?);
                }
                Ok(())
            }
            (Place::Buffers(buffers), backend) => {
                let (elem_bytes, shards) = (self.elem_bytes, &self.shards);
                let free = buffers.take(unit).free.take();
                if let Some(free) = &free {
                    buffers.up.wait(free)?;
                    buffers.between.wait(free)?;
                }
                let (gpu, up, between) = (&self.gpu, &buffers.up, &buffers.between);
                let to = buffers.at(unit).unit.buffer().expect("weights on a GPU");
                match backend {
                    TileBackend::Swapper(swapper) => swapper.gather(unit, |parts| {
                        let pieces: Vec<(usize, &[u8])> = parts
                            .iter()
                            .map(|(elems, bytes)| (elems.start as usize * elem_bytes, *bytes))
                            .collect();
                        let bytes = pieces.iter().map(|(_, piece)| piece.len()).sum();
                        let _span = trace.copy(bytes, || format!("weights of unit {unit}"));
                        Ok::<(), TrainError>(gpu.upload(up, to, &pieces)?)
                    })?,
                    TileBackend::Gpu(backend) => {
                        if unit == EMBEDDING {
                            // The first of a pass: behind the update of what it brings.
                            between.wait(&self.compute.record()?)?;
                        }
                        let bytes = shards.own(unit).len() * elem_bytes;
                        let place = shards.own_at(unit, to, elem_bytes);
                        between.copy(backend.unit(unit).param.at(0), place, bytes)?;
                    }
                }
                if shards.gathers() {
                    let name = || format!("weights of unit {unit}");
                    self.collectives.of(trace, between, name, || {
                        shards.gather_on(between, unit, to, elem_bytes)
                    })?;
                }
                if shards.count() > 1 {
                    let arrived = between.record()?;
                    buffers.at_mut(unit).arrived = Some(arrived);
                }
                Ok(())
            }
            _ => panic!("units are computed with where they live, or in buffers"),
        }
    }

    pub(in crate::train) fn ready(&mut self, unit: usize) -> Result<(), TrainError> {
        if let Place::Buffers(buffers) = &mut self.place
            && let Some(arrived) = buffers.at_mut(unit).arrived.take()
        {
            self.compute.wait(&arrived)?;
        }
        Ok(())
    }

    pub(in crate::train) fn weights(&self, unit: usize) -> &UnitWeights {
        match &self.place {
            Place::TileBackend(units) => units[unit].as_ref().expect("gathered before it is used"),
            Place::Buffers(buffers) => &buffers.at(unit).unit,
        }
    }

    pub(in crate::train) fn give_back(&mut self, unit: usize) -> Result<(), TrainError> {
        if let Place::Buffers(buffers) = &mut self.place {
            let weights = buffers.at_mut(unit);
            weights.unit.give_back()?;
            weights.free = Some(self.compute.record()?);
        }
        Ok(())
    }

    /// A sink whose products go straight where [`GpuMover::reduce`] wants them.
    pub(in crate::train) fn sink(
        &self,
        engine: &Engine,
        backend: &TileBackend,
        unit: usize,
    ) -> Result<GradSink, TrainError> {
        let mut sink = engine.new_grads(unit);
        sink.write_to(self.place.grads_of(backend, unit))?;
        Ok(sink)
    }

    pub(in crate::train) fn reduce(
        &mut self,
        backend: &TileBackend,
        unit: usize,
        mut grads: GradSink,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        let to = self.place.grads_of(backend, unit);
        let (elem_bytes, shards) = (self.elem_bytes, &self.shards);
        grads.finish_into(to, shards.padded_elems(unit))?;
        let stream = match &self.place {
            Place::Buffers(buffers) if shards.count() > 1 => {
                let between = &buffers.between;
                between.wait(&self.compute.record()?)?;
                let name = || format!("gradients of unit {unit}");
                self.collectives.of(trace, between, name, || {
                    shards.reduce_on(between, unit, to, self.grad_type)
                })?;
                between
            }
            _ => &self.compute,
        };
        let own = shards.own_at(unit, to, elem_bytes);
        let squares = self.squares.at(unit * SQUARES_BYTES);
        // Over the whole shard, not tile by tile: the norm's bits then do not depend on how units are cut.
        match shards.own(unit).len() {
            0 => stream.fill_zero(squares, SQUARES_BYTES)?,
            elems => {
                let kernels = self.gpu.kernels()?;
                let scratch = self.scratch.at(0);
                kernels.sum_squares(stream, self.grad_type, own, elems, scratch, squares)?;
            }
        }
        if let (Place::Buffers(_), TileBackend::Gpu(backend)) = (&self.place, backend) {
            let bytes = shards.own(unit).len() * elem_bytes;
            stream.copy(own, backend.unit(unit).grad.at(0), bytes)?;
        }
        let complete = stream.record()?;
        if let Place::Buffers(buffers) = &mut self.place {
            buffers.complete[unit] = Some(complete);
        }
        Ok(())
    }

    pub(in crate::train) fn scatter(
        &mut self,
        backend: &mut TileBackend,
        unit: usize,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        let Place::Buffers(buffers) = &mut self.place else {
            // They are where the update finds them.
            return Ok(());
        };
        let complete = buffers.complete[unit].take();
        let complete = complete.expect("gradients are complete before they leave");
        if self.shards.count() > 1 {
            // Backward writes the next gradients over these, and an update in the GPU takes its copy of them.
            self.compute.wait(&complete)?;
        }
        let TileBackend::Swapper(swapper) = backend else {
            return Ok(());
        };
        buffers.down.wait(&complete)?;
        let (gpu, down, elem_bytes) = (&self.gpu, &buffers.down, self.elem_bytes);
        let from = buffers.grads_of(unit);
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

    /// Tells `trace` when ranks exchanged what; waits until they have.
    pub(in crate::train) fn tell(&mut self, trace: &Trace) -> Result<(), TrainError> {
        if let Place::Buffers(buffers) = &self.place {
            self.collectives.tell(trace, &buffers.between)?;
        }
        Ok(())
    }

    /// Of each unit's gradients, in this step. Waits until they are computed.
    pub(in crate::train) fn sum_squares(&self) -> Result<Vec<f64>, TrainError> {
        let mut bytes = vec![0; self.units * SQUARES_BYTES];
        let stream = match &self.place {
            Place::Buffers(buffers) if self.shards.count() > 1 => &buffers.between,
            _ => &self.compute,
        };
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

/// A unit's weights, the point behind which all shards are there, and the one behind which nothing reads them.
struct Weights {
    unit: UnitWeights,
    arrived: Option<Event>,
    free: Option<Event>,
}

/// Memory of our own for gathered units and for gradients on their way out.
struct Buffers {
    up: Stream,
    down: Stream,
    /// What ranks do together, in one order.
    between: Stream,
    embedding: Weights,
    blocks: Vec<Weights>,
    head: Weights,
    head_unit: usize,
    rotation: Rotation,
    embedding_grads: DeviceBuffer,
    block_grads: Vec<DeviceBuffer>,
    head_grads: DeviceBuffer,
    /// Of each unit: when its gradients are complete.
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
                unit: engine.new_padded_weights(unit, shards.padded_elems(unit))?,
                arrived: None,
                free: None,
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

    /// The buffer that `unit` comes into.
    fn take(&mut self, unit: usize) -> &mut Weights {
        if unit != EMBEDDING && unit != self.head_unit {
            self.rotation.take(unit);
        }
        self.at_mut(unit)
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
