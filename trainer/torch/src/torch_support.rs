//! What torch can do on this machine's GPU, asked by a plan and by `trainer gpu-facts`.

use kernels::gpu::GpuInfo;
use kernels_torch::collective::nccl_version;
use kernels_torch::{cudnn_version, find_cudnn, load_gpu_half};
use offload_support::gpu_facts::LibraryFact;
use training_run::TorchSupport;

/// Asks the torch that this program is linked with.
pub fn torch_support(gpu: &GpuInfo) -> TorchSupport {
    TorchSupport {
        unusable: load_gpu_half().err().map(|why| why.to_string()),
        no_cudnn: find_cudnn(gpu).err().map(|why| why.to_string()),
        cudnn: fact(cudnn_version()),
        nccl: fact(nccl_version(gpu.vendor)),
    }
}

fn fact(version: Result<String, impl ToString>) -> LibraryFact {
    match version {
        Ok(version) => LibraryFact::Version(version),
        Err(why) => LibraryFact::Missing(why.to_string()),
    }
}
