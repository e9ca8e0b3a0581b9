//! The GPU a process computes on: found at run time, or the reason why the processor computes.

use kernels::gpu::{Gpu, GpuError};
use kernels_torch::TorchError;

use crate::config::DeviceChoice;

/// Why a run that wants a GPU cannot start.
#[derive(Debug, thiserror::Error)]
pub enum AcceleratorError {
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error(
        "there is a GPU ({name}), but {error}. Install a torch that supports it, add its directory to LD_LIBRARY_PATH, or set train.device = \"cpu\""
    )]
    Torch { name: String, error: TorchError },
    #[error(
        "this node has {gpus} GPUs for {ranks} processes, each of which needs its own: start at most {gpus} (--nproc {gpus}), or compute on the CPU with train.device = \"cpu\""
    )]
    Few { ranks: u32, gpus: u32 },
}

/// The GPU of the process `rank` of `ranks` on this node, if `device` allows one and there are any.
///
/// # Errors
/// There are fewer GPUs than processes; there is one that cannot be used: its driver fails, or torch's half for it is not there.
pub(crate) fn open(
    device: DeviceChoice,
    rank: u32,
    ranks: u32,
) -> Result<Option<Gpu>, AcceleratorError> {
    if device == DeviceChoice::Cpu {
        return Ok(None);
    }
    // Before any of them waits for the others.
    if let Ok(gpus) = Gpu::count() {
        enough(gpus, ranks)?;
    }
    let gpu = match Gpu::open(rank) {
        Ok(gpu) => gpu,
        // The plan refuses a run that wants one, with all else that is missing.
        Err(error) if error.is_absent() => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let name = || gpu.info().name.clone();
    kernels_torch::load_gpu_half().map_err(|error| AcceleratorError::Torch {
        name: name(),
        error,
    })?;
    Ok(Some(gpu))
}

/// Whether each of `ranks` processes has a GPU, or none has.
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
