//! How a unit's buffer is shared among ranks: equal shards, one after the other, the last ones padded.

use std::ops::Range;
use std::sync::Arc;

use kernels::collective::{CollectiveError, Comm};
use kernels::reduce::GradType;
use swapper::{UnitShape, shard_elems};

use crate::compute::UnitWeights;

/// The shards of every unit, and the way to the other ranks.
#[derive(Clone)]
pub(in crate::train) struct Shards {
    comm: Arc<Comm>,
    /// Of each unit.
    unit_elems: Vec<usize>,
    shard_elems: Vec<usize>,
}

impl Shards {
    /// Of units that are cut into tiles of `tile_elems`.
    pub(in crate::train) fn new(comm: Arc<Comm>, units: &[UnitShape], tile_elems: u64) -> Self {
        let ranks = comm.world().ranks;
        let shard = |unit: &UnitShape| shard_elems(unit.elems, tile_elems, ranks) as usize;
        Self {
            unit_elems: units.iter().map(|unit| unit.elems as usize).collect(),
            shard_elems: units.iter().map(shard).collect(),
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

    /// Brings the other ranks' shards into `buffer`, which has this rank's.
    ///
    /// # Errors
    /// A rank is gone.
    pub(in crate::train) fn gather(
        &self,
        unit: usize,
        buffer: &mut UnitWeights,
    ) -> Result<(), CollectiveError> {
        if self.count() == 1 {
            return Ok(());
        }
        let elems = self.padded_elems(unit);
        let gathered = self.comm.all_gather_start(buffer.take_host(), elems)?;
        buffer.put_host(gathered.wait()?);
        Ok(())
    }

    /// Replaces this rank's shard of the gradients in `buffer` by the sum over all ranks.
    ///
    /// # Errors
    /// A rank is gone.
    pub(in crate::train) fn reduce(
        &self,
        unit: usize,
        buffer: &mut UnitWeights,
        grad_type: GradType,
    ) -> Result<(), CollectiveError> {
        if self.count() == 1 {
            return Ok(());
        }
        let elems = self.padded_elems(unit);
        let host = buffer.take_host();
        let reduced = self.comm.reduce_scatter_start(host, elems, grad_type)?;
        buffer.put_host(reduced.wait()?);
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
