//! Finds the GPU that a process computes on, or the reason why there is none.

use kernels::gpu::{Gpu, GpuError, GpuInfo};
use offload_support::gpu_facts::LibraryFact;
use serde::{Deserialize, Serialize};

use crate::config::DeviceChoice;

/// What the installed torch can do on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TorchSupport {
    /// Why torch cannot compute on the GPU; `None` if it can.
    pub unusable: Option<String>,
    /// Why cuDNN's attention cannot be used there; `None` if it can.
    pub no_cudnn: Option<String>,
    /// cuDNN, which attention is computed with on some GPUs.
    pub cudnn: LibraryFact,
    /// NCCL, or RCCL for AMD's GPUs.
    pub nccl: LibraryFact,
}

impl TorchSupport {
    /// Support that cannot be had, and why.
    pub fn none(why: &str) -> Self {
        Self {
            unusable: Some(why.to_owned()),
            no_cudnn: Some(why.to_owned()),
            cudnn: LibraryFact::Missing(why.to_owned()),
            nccl: LibraryFact::Missing(why.to_owned()),
        }
    }
}

/// Asks torch about a GPU that was found. The program that trains asks the torch that it is linked with; another one asks that program.
pub type AskTorch = fn(&GpuInfo) -> TorchSupport;

/// For what reads or plans without computing on a GPU of this machine.
pub fn without_torch(_: &GpuInfo) -> TorchSupport {
    TorchSupport::none("this command does not use torch")
}

/// Error of opening a GPU.
#[derive(Debug, thiserror::Error)]
pub enum AcceleratorError {
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error("there is a GPU ({name}), but {error}; train.device = \"cpu\" computes on the CPU")]
    Torch { name: String, error: String },
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
    torch: AskTorch,
) -> Result<Option<Gpu>, AcceleratorError> {
    if device == DeviceChoice::Cpu {
        return Ok(None);
    }
    match find(rank, ranks, torch) {
        // If the run needs a GPU, the plan reports it together with other problems.
        Err(AcceleratorError::Gpu(error)) if error.is_absent() => Ok(None),
        found => found.map(|(gpu, _)| Some(gpu)),
    }
}

/// Finds the GPU of process `rank` of `ranks` on this node, and what torch can do on it.
///
/// # Errors
/// Same as [`open`]; there is no GPU.
pub(crate) fn find(
    rank: u32,
    ranks: u32,
    torch: AskTorch,
) -> Result<(Gpu, TorchSupport), AcceleratorError> {
    // Checked before any process waits for the others.
    if let Ok(gpus) = Gpu::count() {
        enough(gpus, ranks)?;
    }
    let gpu = Gpu::open(rank)?;
    let support = torch(gpu.info());
    match support.unusable {
        None => Ok((gpu, support)),
        Some(error) => Err(AcceleratorError::Torch {
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
