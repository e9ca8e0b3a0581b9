//! The GPU a process computes on: found at run time, or the reason why the processor computes.

use kernels::gpu::{Gpu, GpuError};
use kernels::torch::TorchError;

use crate::config::DeviceChoice;

/// Why a run that wants a GPU cannot start.
#[derive(Debug, thiserror::Error)]
pub enum AcceleratorError {
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error(
        "there is a GPU ({name}), but {error}. Install the torch that is built for it, name its folder in LD_LIBRARY_PATH, or set train.device = \"cpu\""
    )]
    Torch { name: String, error: TorchError },
}

/// The GPU with number `index`, if `device` allows one and there is one.
///
/// # Errors
/// There is one that cannot be used: its driver fails, or torch's half for it is not there.
pub(crate) fn open(device: DeviceChoice, index: u32) -> Result<Option<Gpu>, AcceleratorError> {
    if device == DeviceChoice::Cpu {
        return Ok(None);
    }
    let gpu = match Gpu::open(index) {
        Ok(gpu) => gpu,
        // The plan refuses a run that wants one, with all else that is missing.
        Err(error) if error.is_absent() => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let name = || gpu.info().name.clone();
    kernels::torch::load_gpu_half().map_err(|error| AcceleratorError::Torch {
        name: name(),
        error,
    })?;
    Ok(Some(gpu))
}
