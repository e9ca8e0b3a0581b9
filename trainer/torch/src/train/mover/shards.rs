//! Division of a unit's buffer among ranks: equal shards in order, the last ones padded. In stage 0 shards
//! only divide the work of a sum: each rank keeps all of every unit.
//!
//! In a run on several nodes, the ranks of each node may keep a copy of every unit besides:
//!
//! ```text
//!   a unit            | shard 0 | shard 1 | shard 2 | shard 3 |      of the ranks 0 and 1 of node 0, and 2 and 3 of node 1
//!   copy of node 0    | of rank 0         | of rank 1         |
//!   copy of node 1    | of rank 2         | of rank 3         |
//! ```

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kernels::gpu::{DeviceAt, DeviceBuffer, Gpu, Stream};
use kernels::reduce::GradType;
use kernels_torch::HostBuffer;
use kernels_torch::collective::{Comm, GpuComm, Pending};
use swapper::{UnitShape, shard_elems};
use training_ranks::CollectiveError;

use crate::compute::UnitWeights;
use training_run::config::Stage;
use training_run::plan::copied_elems;

/// Shards of every unit, and the connection to the other ranks.
#[derive(Clone)]
pub(in crate::train) struct Shards {
    comm: Arc<Comm>,
    /// Connection between GPUs, if several ranks compute on them.
    gpus: Option<Arc<GpuComm>>,
    /// Elements of each unit.
    unit_elems: Vec<usize>,
    shard_elems: Vec<usize>,
    /// Whether a rank keeps only its shard of a unit.
    divided: bool,
    /// The ranks that keep a copy of every unit together, in a run on several nodes.
    node: Option<NodeRanks>,
    exchanged: Arc<[AtomicU64; 2]>,
}

/// Connections with the ranks of this node alone.
#[derive(Clone)]
pub(in crate::train) struct NodeRanks {
    comm: Arc<Comm>,
    /// Connection between their GPUs, if several compute on them.
    gpus: Option<Arc<GpuComm>>,
}

impl NodeRanks {
    /// Connects the ranks of each node; all ranks must call it. `gpu` is given if GPUs compute.
    ///
    /// # Errors
    /// A rank is gone; an error of Gloo or NCCL.
    pub(in crate::train) fn connect(
        comm: &Comm,
        gpu: Option<&Gpu>,
    ) -> Result<Self, CollectiveError> {
        let comm = comm.connect_node()?;
        let gpus = match gpu {
            Some(gpu) if comm.world().ranks > 1 => Some(Arc::new(GpuComm::connect(&comm, gpu)?)),
            _ => None,
        };
        Ok(Self {
            comm: Arc::new(comm),
            gpus,
        })
    }
}

/// Bytes of buffers that took part in collective operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::train) struct ExchangedBytes {
    /// Bytes of weights, gathered from all ranks.
    pub(in crate::train) gathered_bytes: u64,
    /// Bytes of gradients.
    pub(in crate::train) reduced_bytes: u64,
}

impl Shards {
    /// Shards of units that are cut into tiles of `tile_elems`. `gpus` is given if several ranks compute on
    /// GPUs.
    pub(in crate::train) fn new(
        comm: Arc<Comm>,
        gpus: Option<Arc<GpuComm>>,
        units: &[UnitShape],
        tile_elems: u64,
        stage: Stage,
    ) -> Self {
        let ranks = comm.world().ranks;
        let shard = |unit: &UnitShape| shard_elems(unit.elems, tile_elems, ranks) as usize;
        Self {
            unit_elems: units.iter().map(|unit| unit.elems as usize).collect(),
            shard_elems: units.iter().map(shard).collect(),
            gpus,
            comm,
            divided: stage.divides_state(),
            node: None,
            exchanged: Arc::default(),
        }
    }

    /// Lets the ranks of the node keep a copy of every unit.
    pub(in crate::train) fn with_copies(self, node: Option<NodeRanks>) -> Self {
        Self { node, ..self }
    }

    /// Returns whether the ranks of the node keep a copy of every unit.
    pub(in crate::train) fn keeps_copies(&self) -> bool {
        self.node.is_some()
    }

    /// Returns whether a unit's weights are distributed over several ranks.
    pub(in crate::train) fn gathers(&self) -> bool {
        self.divided && self.count() > 1
    }

    /// Returns whether every rank needs the whole sum of gradients, not only its shard.
    pub(in crate::train) fn sums_for_all(&self) -> bool {
        !self.divided && self.count() > 1
    }

    /// Returns the bytes exchanged since the last call.
    pub(in crate::train) fn take_exchanged(&self) -> ExchangedBytes {
        let [gathered, reduced] = &*self.exchanged;
        ExchangedBytes {
            gathered_bytes: gathered.swap(0, Ordering::Relaxed),
            reduced_bytes: reduced.swap(0, Ordering::Relaxed),
        }
    }

    fn count_gathered(&self, unit: usize, elem_bytes: usize) {
        let bytes = self.padded_elems(unit) * elem_bytes;
        self.exchanged[0].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn count_reduced(&self, unit: usize, elem_bytes: usize) {
        let bytes = self.padded_elems(unit) * elem_bytes;
        self.exchanged[1].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Number of this rank, from 0.
    pub(in crate::train) fn rank(&self) -> u32 {
        self.comm.world().rank
    }

    /// Number of ranks.
    pub(in crate::train) fn count(&self) -> usize {
        self.comm.world().ranks as usize
    }

    /// Elements of all shards of a unit, with padding.
    pub(in crate::train) fn padded_elems(&self, unit: usize) -> usize {
        self.shard_elems[unit] * self.count()
    }

    /// Elements of a unit's buffer, in which it is gathered from all ranks and from those of the node.
    pub(in crate::train) fn buffer_elems(&self, unit: usize) -> usize {
        let copies = self.node.as_ref().map_or(0, |_| self.copies_elems(unit));
        self.padded_elems(unit).max(copies)
    }

    /// Elements of all parts of the node's copy of a unit, with padding.
    fn copies_elems(&self, unit: usize) -> usize {
        let local_ranks = self.comm.world().local_ranks;
        copied_elems(self.unit_elems[unit], local_ranks) * local_ranks as usize
    }

    /// Range of a unit's buffer that this rank keeps of the node's copy.
    pub(in crate::train) fn copied(&self, unit: usize) -> Range<usize> {
        let world = self.comm.world();
        let elems = copied_elems(self.unit_elems[unit], world.local_ranks);
        let start = elems * world.local_rank as usize;
        start..start + elems
    }

    /// Like [`Shards::gather`], for the parts of the node's copy.
    ///
    /// # Errors
    /// A rank is gone.
    pub(in crate::train) fn gather_copies(
        &self,
        unit: usize,
        buffer: &mut UnitWeights,
    ) -> Result<Pending, CollectiveError> {
        let node = self.node.as_ref().expect("the node keeps copies");
        let elems = self.copies_elems(unit);
        node.comm.all_gather_start(buffer.take_host(), elems)
    }

    /// Like [`Shards::gather_on`], for the parts of the node's copy.
    ///
    /// # Errors
    /// A rank is gone.
    pub(in crate::train) fn gather_copies_on(
        &self,
        stream: &Stream,
        unit: usize,
        buffer: &DeviceBuffer,
        elem_bytes: usize,
    ) -> Result<(), CollectiveError> {
        let node = self.node.as_ref().expect("the node keeps copies");
        match &node.gpus {
            Some(gpus) => {
                gpus.all_gather(stream, buffer.at(0), self.copies_elems(unit), elem_bytes)
            }
            None => Ok(()),
        }
    }

    /// Range of this rank's elements in a unit, without padding.
    pub(in crate::train) fn own(&self, unit: usize) -> Range<usize> {
        if !self.divided {
            return 0..self.unit_elems[unit];
        }
        let start = self.shard_elems[unit] * self.comm.world().rank as usize;
        let elems = self.unit_elems[unit];
        start.min(elems)..(start + self.shard_elems[unit]).min(elems)
    }

    /// Starts gathering the other ranks' shards into `buffer`, which contains this rank's. The operation owns
    /// the buffer while it runs.
    ///
    /// # Errors
    /// A rank is gone.
    pub(in crate::train) fn gather(
        &self,
        unit: usize,
        buffer: &mut UnitWeights,
    ) -> Result<Pending, CollectiveError> {
        let host = buffer.take_host();
        self.count_gathered(unit, host.elem_bytes());
        self.comm.all_gather_start(host, self.padded_elems(unit))
    }

    /// Like [`Shards::gather`], for gradients of which each rank has summed its shard.
    ///
    /// # Errors
    /// A rank is gone.
    pub(in crate::train) fn gather_sums(
        &self,
        unit: usize,
        host: HostBuffer,
    ) -> Result<Pending, CollectiveError> {
        self.count_reduced(unit, host.elem_bytes());
        self.comm.all_gather_start(host, self.padded_elems(unit))
    }

    /// Starts replacing this rank's shard of the gradients in `buffer` by the sum over all ranks. The
    /// operation owns the buffer while it runs.
    ///
    /// # Errors
    /// A rank is gone.
    pub(in crate::train) fn reduce(
        &self,
        unit: usize,
        buffer: &mut UnitWeights,
        grad_type: GradType,
    ) -> Result<Pending, CollectiveError> {
        let elems = self.padded_elems(unit);
        let host = buffer.take_host();
        self.count_reduced(unit, host.elem_bytes());
        self.comm.reduce_scatter_start(host, elems, grad_type)
    }

    /// Like [`Shards::gather`] in a GPU's memory, enqueued on `stream`.
    ///
    /// # Errors
    /// A rank is gone.
    pub(in crate::train) fn gather_on(
        &self,
        stream: &Stream,
        unit: usize,
        buffer: &DeviceBuffer,
        elem_bytes: usize,
    ) -> Result<(), CollectiveError> {
        let elems = self.padded_elems(unit);
        self.count_gathered(unit, elem_bytes);
        self.between_gpus()
            .all_gather(stream, buffer.at(0), elems, elem_bytes)
    }

    /// Like [`Shards::reduce`] in a GPU's memory, enqueued on `stream`. If every rank needs the sum, all of
    /// it is returned.
    ///
    /// # Errors
    /// A rank is gone.
    pub(in crate::train) fn reduce_on(
        &self,
        stream: &Stream,
        unit: usize,
        buffer: &DeviceBuffer,
        grad_type: GradType,
    ) -> Result<(), CollectiveError> {
        let elems = self.padded_elems(unit);
        let elem_bytes = grad_type.elem_bytes();
        self.count_reduced(unit, elem_bytes);
        let gpus = self.between_gpus();
        gpus.reduce_scatter(stream, buffer.at(0), elems, grad_type)?;
        if self.sums_for_all() {
            self.count_reduced(unit, elem_bytes);
            gpus.all_gather(stream, buffer.at(0), elems, elem_bytes)?;
        }
        Ok(())
    }

    /// Returns the position of this rank's shard of a unit in `buffer`, which holds all shards.
    pub(in crate::train) fn own_at<'a>(
        &self,
        unit: usize,
        buffer: &'a DeviceBuffer,
        elem_bytes: usize,
    ) -> DeviceAt<'a> {
        buffer.at(self.own(unit).start * elem_bytes)
    }

    /// Checks that all operations between GPUs succeeded. Called after waiting for a stream and before its
    /// results are used.
    ///
    /// # Errors
    /// A rank is gone.
    pub(in crate::train) fn check(&self) -> Result<(), CollectiveError> {
        let node = self.node.as_ref().and_then(|node| node.gpus.as_ref());
        let mut all = self.gpus.iter().chain(node);
        all.try_for_each(|gpus| gpus.check())
    }

    fn between_gpus(&self) -> &GpuComm {
        self.gpus.as_ref().expect("several ranks compute on GPUs")
    }

    /// Returns the global norm of the step's gradients before clipping, and the step's loss. `squares` are the sums of squares of
    /// this rank's shards of each unit, and `loss` is its part of the loss.
    ///
    /// # Errors
    /// A rank is gone.
    pub(in crate::train) fn norm_and_loss(
        &self,
        mut squares: Vec<f64>,
        loss: f64,
    ) -> Result<(f64, f64), CollectiveError> {
        let mut loss = [loss];
        if self.divided {
            // In one message, because ranks wait for it on their way to the update.
            squares.push(loss[0]);
            self.sum(&mut squares)?;
            loss[0] = squares.pop().expect("the loss was pushed");
        } else {
            self.sum(&mut loss)?;
        }
        // Summed in the order of units, so that the result does not depend on the order in which gradients arrived.
        let norm = squares.iter().sum::<f64>().sqrt();
        Ok((norm, loss[0]))
    }

    /// Sums `values` over the ranks in rank order, so that every rank gets the same bits.
    ///
    /// # Errors
    /// A rank is gone.
    pub(in crate::train) fn sum(&self, values: &mut [f64]) -> Result<(), CollectiveError> {
        self.comm.all_reduce_sum_f64(values)
    }
}
