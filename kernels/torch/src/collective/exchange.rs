//! Exchange of parts of tensors between neighbouring ranks: through Gloo for tensors on the CPU, through NCCL or RCCL for those
//! on a GPU.

use tch::{Device, Kind, Tensor};

use super::{Comm, GpuComm};
use crate::{HostBuffer, TorchError, device_of};
use kernels::gpu::Gpu;
use training_ranks::CollectiveError;

/// Neighbouring ranks that exchange parts of tensors.
///
/// All of them make the same calls in the same order, on tensors of the same shape.
pub struct TensorExchange {
    /// `None`: exchanges go through Gloo. Dropped before the connection whose heartbeats it uses.
    gpus: Option<GpuComm>,
    comm: Comm,
}

/// Error of an exchange.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    #[error(transparent)]
    Torch(#[from] TorchError),
}

impl From<tch::TchError> for ExchangeError {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(error.into())
    }
}

impl TensorExchange {
    /// Connects each `count` neighbouring ranks of `comm`; all ranks must call it. `gpu` is given if GPUs compute.
    ///
    /// Panics if the number of ranks is not a multiple of `count`.
    ///
    /// # Errors
    /// A rank is gone; an error of Gloo or NCCL.
    pub fn connect(comm: &Comm, count: u32, gpu: Option<&Gpu>) -> Result<Self, ExchangeError> {
        let comm = comm.connect_neighbours(count)?;
        let gpus = gpu.map(|gpu| GpuComm::connect(&comm, gpu)).transpose()?;
        let exchange = Self { gpus, comm };
        if let Some(gpu) = gpu {
            // The first exchange establishes connections and may wait for a dead rank: here instead of within a step.
            let parts = Tensor::f_zeros([i64::from(count), 64], (Kind::Uint8, device_of(gpu)))?;
            drop(exchange.all_to_all(&parts)?);
            gpu.default_stream()
                .synchronize()
                .map_err(TorchError::from)?;
            exchange.check()?;
            exchange.comm.barrier()?;
        }
        Ok(exchange)
    }

    /// Number of this rank among its neighbours, from 0.
    pub fn rank(&self) -> usize {
        self.comm.world().rank as usize
    }

    /// Number of neighbours, with this rank.
    pub fn ranks(&self) -> usize {
        self.comm.world().ranks as usize
    }

    /// Sends part r of `parts` along the first dimension to neighbour r, and returns a tensor of the same shape whose part r is what
    /// neighbour r has sent here. On a GPU it is enqueued where torch computes.
    ///
    /// Panics if the first dimension does not have one part for each neighbour.
    ///
    /// # Errors
    /// A rank is gone; out of memory.
    pub fn all_to_all(&self, parts: &Tensor) -> Result<Tensor, ExchangeError> {
        let shape = parts.size();
        assert_eq!(shape[0] as usize, self.ranks(), "one part for each rank");
        if let Some(gpus) = &self.gpus {
            return Ok(gpus.all_to_all_tensor(&parts.f_contiguous()?)?);
        }
        assert_eq!(parts.device(), Device::Cpu, "Gloo exchanges host memory");
        let sent = HostBuffer::zeros(parts.kind(), parts.numel())?;
        sent.view(0, &shape)?.f_copy_(&parts.f_detach()?)?;
        Ok(self.comm.all_to_all(sent)?.view(0, &shape)?)
    }

    /// Sums `values` over the neighbours in rank order, so that each gets the same bits.
    ///
    /// # Errors
    /// A rank is gone.
    pub fn sum(&self, values: &mut [f64]) -> Result<(), CollectiveError> {
        self.comm.all_reduce_sum_f64(values)
    }

    /// Checks that all exchanges between GPUs succeeded. Called after waiting for a stream and before its results are used.
    ///
    /// # Errors
    /// A rank is gone.
    pub fn check(&self) -> Result<(), CollectiveError> {
        self.gpus.as_ref().map_or(Ok(()), GpuComm::check)
    }
}
