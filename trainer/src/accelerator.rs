//! Finds the GPU that a process computes on, or the reason why there is none.

use kernels::gpu::{Gpu, GpuError};
use kernels_torch::TorchError;

use crate::config::DeviceChoice;

/// Error of opening a GPU.
#[derive(Debug, thiserror::Error)]
pub enum AcceleratorError {
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error("there is a GPU ({name}), but {error}; train.device = \"cpu\" computes on the CPU")]
    Torch { name: String, error: TorchError },
    #[error(
        "this node has {gpus} GPUs for {ranks} processes, each of which needs its own: start at most {gpus} (--nproc {gpus}), or compute on the CPU with train.device = \"cpu\""
    )]
    Few { ranks: u32, gpus: u32 },
}

/// Opens the GPU of process `rank` of `ranks` on this node, if `device` allows one and the node has any.
///
/// # Errors
/// There are fewer GPUs than processes; a GPU cannot be used, because its driver fails or torch has no
/// support for it.
pub(crate) fn open(
    device: DeviceChoice,
    rank: u32,
    ranks: u32,
) -> Result<Option<Gpu>, AcceleratorError> {
    if device == DeviceChoice::Cpu {
        return Ok(None);
    }
    match find(rank, ranks) {
        // If the run needs a GPU, the plan reports it together with other problems.
        Err(AcceleratorError::Gpu(error)) if error.is_absent() => Ok(None),
        found => found.map(Some),
    }
}

/// Finds the GPU of process `rank` of `ranks` on this node.
///
/// # Errors
/// Same as [`open`]; there is no GPU.
pub(crate) fn find(rank: u32, ranks: u32) -> Result<Gpu, AcceleratorError> {
    // Checked before any process waits for the others.
    if let Ok(gpus) = Gpu::count() {
        enough(gpus, ranks)?;
    }
    let gpu = Gpu::open(rank)?;
    match kernels_torch::load_gpu_half() {
        Ok(()) => Ok(gpu),
        Err(error) => Err(AcceleratorError::Torch {
            name: gpu.info().name.clone(),
            error,
        }),
    }
}

/// Checks that each of `ranks` processes has a GPU, or that there is none.
fn enough(gpus: u32, ranks: u32) -> Result<(), AcceleratorError> {
    if (1..ranks).contains(&gpus) {
        return Err(AcceleratorError::Few { ranks, gpus });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_processes_than_gpus_are_refused() {
        for (gpus, ranks) in [(0, 1), (0, 4), (1, 1), (4, 4), (8, 2)] {
            enough(gpus, ranks).unwrap();
        }
        let said = enough(2, 3).unwrap_err().to_string();
        assert!(
            said.contains("--nproc 2") && said.contains("\"cpu\""),
            "{said}"
        );
    }
}
