//! What torch can do on this machine's GPU, asked by a plan.

use kernels::gpu::GpuInfo;
use kernels_torch::{find_cudnn, load_gpu_half};
use training_run::TorchSupport;

/// Asks the torch that this program is linked with.
pub fn torch_support(gpu: &GpuInfo) -> TorchSupport {
    TorchSupport {
        unusable: load_gpu_half().err().map(|why| why.to_string()),
        no_cudnn: find_cudnn(gpu).err().map(|why| why.to_string()),
    }
}
