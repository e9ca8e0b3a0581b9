//! What needs libtorch, apart from `kernels` so that who wants arithmetic or a GPU's memory alone is not linked with it. That is everything
//! unsafe of torch, behind safe functions (what the trainer computes with torch it computes with `tch`'s safe half; what that half lacks is
//! here), and what uses it: ranks that work together and fused kernels over tensors.
//!
//! ```text
//! autograd.rs  vjp()                gradients for given output gradients, by shim.cpp
//! memory.rs    HostBuffer           torch's own memory, seen as bytes
//!              with_tensor_over()   foreign bytes, seen as a tensor while a closure runs
//! settings.rs  set_threads(), set_deterministic()
//! device.rs    use_gpu()            the GPU half, opened at run time
//!              device_view()        memory of ours on a GPU, seen as a tensor
//! collective/  Comm, GpuComm        several processes as one, through Gloo, NCCL or RCCL
//! fused.rs     Fused                kernels that do at once what torch's operators do in several passes
//! ```
//!
//! A C++ exception never crosses into Rust: each shim function catches and returns its text.
//!
//! `unsafe` is denied but in the files beside this and in `collective/{comm,gloo,nccl}`.
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod autograd;
pub mod collective;
#[allow(unsafe_code)]
mod device;
#[allow(unsafe_code)]
mod ffi;
#[allow(unsafe_code)]
pub mod fused;
#[allow(unsafe_code)]
mod memory;
#[allow(unsafe_code)]
mod settings;

pub use autograd::vjp;
pub use device::{
    CUBLAS_WORKSPACE, CUBLAS_WORKSPACES, TorchMemory, device_of, device_view, empty_gpu_cache,
    gpu_memory, load_gpu_half, use_gpu,
};
pub use memory::{HostBuffer, is_shared, with_tensor_over};
pub use settings::{set_deterministic, set_threads};

/// What can go wrong between torch and us.
#[derive(Debug, thiserror::Error)]
pub enum TorchError {
    /// torch threw. Out of memory comes this way too; so do shapes that do not fit, which is our bug.
    #[error("torch failed in {op}: {message}")]
    Torch {
        /// What was tried.
        op: &'static str,
        /// torch's own words.
        message: String,
    },
    /// A kernel of ours could not be launched.
    #[error(transparent)]
    Gpu(#[from] kernels::gpu::GpuError),
    /// torch's GPU half is not in reach.
    #[error(
        "torch's half for GPUs is not in reach ({}): install a torch 2.11 with it and put its torch/lib into LD_LIBRARY_PATH, or train on the CPU",
        tried.join("; ")
    )]
    NoGpuHalf {
        /// Each place that was tried, with the loader's answer.
        tried: Vec<String>,
    },
    /// torch's GPU half is there, but it sees fewer GPUs than the driver.
    #[error(
        "torch sees {seen} GPUs and was to use number {index}, counted from 0: its CUDA or ROCm version may not fit the driver"
    )]
    UnseenGpu {
        /// Which was asked for.
        index: i32,
        /// How many torch sees.
        seen: i64,
    },
    /// cuBLAS would not give the same bits each time.
    #[error(
        "{CUBLAS_WORKSPACE} is \"{found}\": set it to {} before the process starts, or products on a GPU differ from run to run",
        CUBLAS_WORKSPACES[0]
    )]
    Workspace {
        /// What it is, empty if it is not set.
        found: String,
    },
    /// A buffer's length is not the number of bytes its shape and kind need.
    #[error(
        "a tensor of {elems} elements of {elem_bytes} bytes does not fit a buffer of {bytes} bytes exactly"
    )]
    Length {
        /// Elements asked for.
        elems: usize,
        /// Bytes of one element.
        elem_bytes: usize,
        /// Bytes given.
        bytes: usize,
    },
    /// A buffer does not start on a multiple of its element's size.
    #[error(
        "a buffer at address {address:#x} cannot hold elements of {elem_bytes} bytes: align it"
    )]
    Alignment {
        /// Where the buffer starts.
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

/// torch appends a C++ backtrace to its messages; the first line says what is wrong.
fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().to_owned()
}
