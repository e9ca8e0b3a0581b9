//! How a unit's buffer is shared among ranks: equal shards, one after the other, the last ones padded.

use std::ops::Range;
use std::sync::Arc;

use kernels::collective::{CollectiveError, Comm, GpuComm, Pending};
use kernels::gpu::{DeviceAt, DeviceBuffer, Stream};
use kernels::reduce::GradType;
use swapper::{UnitShape, shard_elems};

use crate::compute::UnitWeights;

/// The shards of every unit, and the way to the other ranks.
#[derive(Clone)]
pub(in crate::train) struct Shards {
    comm: Arc<Comm>,
    /// The way between GPUs, where several ranks compute on them.
    gpus: Option<Arc<GpuComm>>,
    /// Of each unit.
    unit_elems: Vec<usize>,
    shard_elems: Vec<usize>,
}

impl Shards {
    /// Of units that are cut into tiles of `tile_elems`. Several ranks that compute on GPUs give `gpus`.
    pub(in crate::train) fn new(
        comm: Arc<Comm>,
        gpus: Option<Arc<GpuComm>>,
        units: &[UnitShape],
        tile_elems: u64,
    ) -> Self {
        let ranks = comm.world().ranks;
        let shard = |unit: &UnitShape| shard_elems(unit.elems, tile_elems, ranks) as usize;
        Self {
            unit_elems: units.iter().map(|unit| unit.elems as usize).collect(),
            shard_elems: units.iter().map(shard).collect(),
            gpus,
            comm,
        }
    }

    /// This rank, from 0.
    pub(in crate::train) fn rank(&self) -> u32 {
        self.comm.world().rank
    }

    /// How many ranks share.
    pub(in crate::train) fn count(&self) -> usize {
        self.comm.world().ranks as usize
    }

    /// Elements of a unit's buffer: all shards, the padding counted.
    pub(in crate::train) fn padded_elems(&self, unit: usize) -> usize {
        self.shard_elems[unit] * self.count()
    }

    /// This rank's elements of a unit, without padding.
    pub(in crate::train) fn own(&self, unit: usize) -> Range<usize> {
        let start = self.shard_elems[unit] * self.comm.world().rank as usize;
        let elems = self.unit_elems[unit];
        start.min(elems)..(start + self.shard_elems[unit]).min(elems)
    }

    /// Begins to bring the other ranks' shards into `buffer`, which has this rank's; the buffer is away meanwhile.
    ///
    /// # Errors
    /// A rank is gone.
    pub(in crate::train) fn gather(
        &self,
        unit: usize,
        buffer: &mut UnitWeights,
    ) -> Result<Pending, CollectiveError> {
        let elems = self.padded_elems(unit);
        self.comm.all_gather_start(buffer.take_host(), elems)
    }

    /// Begins to replace this rank's shard of the gradients in `buffer` by the sum over all ranks; the buffer is away meanwhile.
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
        self.comm.reduce_scatter_start(host, elems, grad_type)
    }

    /// As [`Shards::gather`] in a GPU's memory, enqueued on `stream`.
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
        self.between_gpus()
            .all_gather(stream, buffer.at(0), elems, elem_bytes)
    }

    /// As [`Shards::reduce`] in a GPU's memory, enqueued on `stream`.
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
        self.between_gpus()
            .reduce_scatter(stream, buffer.at(0), elems, grad_type)
    }

    /// This rank's shard of a unit in `buffer`, which holds all shards.
    pub(in crate::train) fn own_at<'a>(
        &self,
        unit: usize,
        buffer: &'a DeviceBuffer,
        elem_bytes: usize,
    ) -> DeviceAt<'a> {
        buffer.at(self.own(unit).start * elem_bytes)
    }

    /// Whether all went well between GPUs; asked after a stream was waited for, before what came over it counts.
    ///
    /// # Errors
    /// A rank is gone.
    pub(in crate::train) fn check(&self) -> Result<(), CollectiveError> {
        self.gpus.as_ref().map_or(Ok(()), |gpus| gpus.check())
    }

    fn between_gpus(&self) -> &GpuComm {
        self.gpus.as_ref().expect("several ranks compute on GPUs")
    }

    /// Sums `values` over the ranks, in their order: the same bits everywhere.
    ///
    /// # Errors
    /// A rank is gone.
    pub(in crate::train) fn sum(&self, values: &mut [f64]) -> Result<(), CollectiveError> {
        self.comm.all_reduce_sum_f64(values)
    }
}
