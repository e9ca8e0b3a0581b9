//! How a unit's buffer is shared among ranks: equal shards, one after the other, the last ones padded. In stage 0 the shards are
//! only how a sum is divided: each rank keeps all of every unit.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kernels::gpu::{DeviceAt, DeviceBuffer, Stream};
use kernels::reduce::GradType;
use kernels_torch::HostBuffer;
use kernels_torch::collective::{CollectiveError, Comm, GpuComm, Pending};
use swapper::{UnitShape, shard_elems};

use crate::compute::UnitWeights;
use crate::config::Stage;

/// The shards of every unit, and the way to the other ranks.
#[derive(Clone)]
pub(in crate::train) struct Shards {
    comm: Arc<Comm>,
    /// The way between GPUs, where several ranks compute on them.
    gpus: Option<Arc<GpuComm>>,
    /// Elements of each unit.
    unit_elems: Vec<usize>,
    shard_elems: Vec<usize>,
    /// Whether a rank keeps its shard of a unit, and not all of it.
    divided: bool,
    exchanged: Arc<[AtomicU64; 2]>,
}

/// Bytes of buffers that this rank and the others filled together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::train) struct Exchanged {
    /// Bytes of weights.
    pub(in crate::train) gathered_bytes: u64,
    /// Bytes of gradients.
    pub(in crate::train) reduced_bytes: u64,
}

impl Shards {
    /// The shards of units that are cut into tiles of `tile_elems`. Several ranks that compute on GPUs give `gpus`.
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
            exchanged: Arc::default(),
        }
    }

    /// Whether a unit's weights lie with several ranks.
    pub(in crate::train) fn gathers(&self) -> bool {
        self.divided && self.count() > 1
    }

    /// Whether a sum of gradients is for every rank, and not a shard for each.
    pub(in crate::train) fn sums_for_all(&self) -> bool {
        !self.divided && self.count() > 1
    }

    /// Returns the bytes exchanged since the last call.
    pub(in crate::train) fn take_exchanged(&self) -> Exchanged {
        let [gathered, reduced] = &*self.exchanged;
        Exchanged {
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

    /// This rank, from 0.
    pub(in crate::train) fn rank(&self) -> u32 {
        self.comm.world().rank
    }

    /// Number of ranks.
    pub(in crate::train) fn count(&self) -> usize {
        self.comm.world().ranks as usize
    }

    /// Elements of a unit's buffer: all shards, the padding counted.
    pub(in crate::train) fn padded_elems(&self, unit: usize) -> usize {
        self.shard_elems[unit] * self.count()
    }

    /// This rank's elements of a unit, without padding.
    pub(in crate::train) fn own(&self, unit: usize) -> Range<usize> {
        if !self.divided {
            return 0..self.unit_elems[unit];
        }
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
        let host = buffer.take_host();
        self.count_gathered(unit, host.elem_bytes());
        self.comm.all_gather_start(host, self.padded_elems(unit))
    }

    /// As [`Shards::gather`], of gradients that each rank has summed its shard of.
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
        self.count_reduced(unit, host.elem_bytes());
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
        self.count_gathered(unit, elem_bytes);
        self.between_gpus()
            .all_gather(stream, buffer.at(0), elems, elem_bytes)
    }

    /// As [`Shards::reduce`] in a GPU's memory, enqueued on `stream`. Where a sum is for every rank, all of it comes.
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

    /// Sums over the ranks what each has of its shards; where each has all, nothing is to be added.
    ///
    /// # Errors
    /// A rank is gone.
    pub(in crate::train) fn sum_of_shards(
        &self,
        values: &mut [f64],
    ) -> Result<(), CollectiveError> {
        if self.divided {
            self.sum(values)?;
        }
        Ok(())
    }

    /// Sums `values` over the ranks, in their order: the same bits everywhere.
    ///
    /// # Errors
    /// A rank is gone.
    pub(in crate::train) fn sum(&self, values: &mut [f64]) -> Result<(), CollectiveError> {
        self.comm.all_reduce_sum_f64(values)
    }
}
