//! Everything that needs libtorch, apart from `kernels` so that other users are not linked with it: safe functions over
//! unsafe parts of torch that `tch` lacks, collectives between ranks, and fused kernels over tensors.
//!
//! ```text
//! attention.rs attention_of_documents()   flash attention over sequences of several documents, by shim.cpp
//! autograd.rs  vjp()                gradients for given output gradients, by shim.cpp
//! memory.rs    HostBuffer           torch's own memory, seen as bytes
//!              with_tensor_over()   foreign bytes, seen as a tensor while a closure runs
//! settings.rs  set_threads(), set_deterministic(), exit()
//! device.rs    use_gpu()            the GPU half, opened at run time
//!              device_view()        memory of ours on a GPU, seen as a tensor
//! cudnn/       CudnnAttention       attention by cuDNN, whose backward pass repeats in bits
//! collective/  Comm, GpuComm        several processes as one, through Gloo, NCCL or RCCL
//! fused.rs     FusedKernels         kernels that do at once what torch's operators do in several passes
//! fp8.rs       Fp8Kernels           matrices in 8-bit numbers, and their products
//! ```
//!
//! A C++ exception never crosses into Rust: each shim function catches it and returns its text.
//!
//! `unsafe` is denied except in the files beside this one and in `collective/{comm,gloo,nccl}` and `cudnn/`.
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod attention;
#[allow(unsafe_code)]
mod autograd;
pub mod collective;
#[allow(unsafe_code)]
mod cudnn;
#[allow(unsafe_code)]
mod device;
#[allow(unsafe_code)]
mod ffi;
#[allow(unsafe_code)]
pub mod fp8;
#[allow(unsafe_code)]
pub mod fused;
#[allow(unsafe_code)]
mod memory;
#[allow(unsafe_code)]
mod muon;
#[allow(unsafe_code)]
mod settings;

pub use attention::{attention_of_documents, has_attention_of_documents};
pub use autograd::vjp;
pub use cudnn::{
    AttentionOutput, CudnnAttention, CudnnError, PackedDocuments, cudnn_version, find_cudnn,
};
pub use device::{
    CUBLAS_WORKSPACE, CUBLAS_WORKSPACES, TorchMemory, device_of, device_view, gpu_memory,
    load_gpu_half, use_gpu,
};
pub use memory::{HostBuffer, is_shared, with_tensor_over};
pub use muon::NewtonSchulz;
pub use settings::{exit, set_deterministic, set_threads};

/// Errors of torch and of this crate's GPU calls.
#[derive(Debug, thiserror::Error)]
pub enum TorchError {
    /// torch threw: out of memory, or a bug of ours such as shapes that do not fit.
    #[error("torch failed in {op}: {message}")]
    Torch {
        /// The operation.
        op: &'static str,
        /// torch's message.
        message: String,
    },
    /// A kernel could not be launched.
    #[error(transparent)]
    Gpu(#[from] kernels::gpu::GpuError),
    /// cuDNN's attention failed or cannot be used.
    #[error(transparent)]
    Cudnn(#[from] CudnnError),
    /// torch's GPU half is missing.
    #[error(
        "torch's GPU library was not found ({}): install a torch 2.11 with GPU support and add its torch/lib to LD_LIBRARY_PATH, or train on the CPU",
        tried.join("; ")
    )]
    NoGpuHalf {
        /// Each place tried, with the loader's answer.
        tried: Vec<String>,
    },
    /// torch's GPU half sees fewer GPUs than the driver.
    #[error(
        "GPU {index} was requested, but torch sees only {seen}: its CUDA or ROCm version may not fit the driver"
    )]
    UnseenGpu {
        /// The requested GPU.
        index: i32,
        /// GPUs that torch sees.
        seen: i64,
    },
    /// cuBLAS would not give reproducible results.
    #[error(
        "{CUBLAS_WORKSPACE} is \"{found}\": set it to {} before the process starts, or products on a GPU differ from run to run",
        CUBLAS_WORKSPACES[0]
    )]
    Workspace {
        /// The variable's value, empty if it is not set.
        found: String,
    },
    /// A buffer's length does not match its shape and kind.
    #[error(
        "a tensor of {elems} elements of {elem_bytes} bytes does not fit a buffer of {bytes} bytes exactly"
    )]
    Length {
        /// Elements of the shape.
        elems: usize,
        /// Bytes of one element.
        elem_bytes: usize,
        /// Bytes of the buffer.
        bytes: usize,
    },
    /// A buffer is not aligned to its elements.
    #[error(
        "a buffer at address {address:#x} cannot hold elements of {elem_bytes} bytes: align it"
    )]
    Alignment {
        /// Start of the buffer.
        address: usize,
        /// Bytes of one element.
        elem_bytes: usize,
    },
}

impl From<tch::TchError> for TorchError {
    fn from(error: tch::TchError) -> Self {
        let message = error.to_string();
        TorchError::Torch {
            op: "a tensor operation",
            message: first_line(&message),
        }
    }
}

/// torch appends a C++ backtrace to its messages; the first line contains the error.
fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().to_owned()
}
