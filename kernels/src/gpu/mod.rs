//! GPU memory, streams, copies, and kernels compiled at run time. Needs no torch, and no GPU to build.
//!
//! ```text
//!   Gpu::open ──▶ Gpu ──┬─▶ alloc ──▶ DeviceBuffer ──▶ at(offset) ──▶ DeviceAt ──┐
//!                       ├─▶ stream ─▶ Stream ──▶ record ──▶ Event                ├──▶ Kernels::{adamw_range, sum_squares, ..}
//!                       ├─▶ register (host memory, pinned)                       │
//!                       └─▶ kernels ─────────────────────────────────────────────┘    TileUpdater: up, adamw, down
//!
//!   library.rs   finds libcuda or libamdhip64, libnvrtc or libhiprtc        source/   CUDA C++ that all compilers take alike
//!   table.rs     their functions, one table for both vendors
//!   runtime.rs   the driver, initialised once a process                    compiler.rs, module.rs   source to kernels
//! ```
//!
//! CUDA and HIP share one code path: the same functions under other names. The libraries are opened on first use;
//! without them calls return [`GpuError::NoLibrary`].
//!
//! Results have the same bits as on the CPU (`adamw/scalar.rs`, `reduce/scalar.rs`).

mod buffer;
mod compiler;
mod copy_rates;
mod device;
mod error;
mod fp8;
mod host_copies;
mod host_stash;
mod kernels;
pub mod library;
mod module;
mod nccl_buffer;
mod pinned;
mod runtime;
mod stream;
mod table;
mod tile_updater;

use std::fmt;

pub use buffer::{DeviceAt, DeviceBuffer, Registration};
pub use compiler::{CompileOptions, Compiler};
pub use copy_rates::CopyRates;
pub use device::{Gpu, GpuInfo};
pub use error::GpuError;
pub use fp8::{FP8_ALIGN, Fp8Addresses, Fp8Format, Fp8Kernels};
pub use host_copies::HostCopies;
pub use host_stash::HostStash;
pub use kernels::{Kernels, TileAt, sum_squares_scratch_bytes};
pub use module::{Arg, Function, FunctionUse, Module};
pub use nccl_buffer::nccl_buffer;
pub use stream::{Event, Stream};
pub use tile_updater::TileUpdater;

/// Variable that cuBLAS reads when it starts. Only one of [`CUBLAS_WORKSPACES`] makes its results reproducible.
pub const CUBLAS_WORKSPACE: &str = "CUBLAS_WORKSPACE_CONFIG";

/// Values of [`CUBLAS_WORKSPACE`] that make cuBLAS deterministic; the first one is as large as torch's own choice for
/// Hopper.
pub const CUBLAS_WORKSPACES: [&str; 2] = [":4096:8", ":16:8"];

/// Declarations for every source; prepended to each when it is compiled.
pub const PRELUDE: &str = include_str!("source/prelude.h");

/// Name and text of every kernel source, for checks that compile all of them.
pub const SOURCES: &[(&str, &str)] = &[
    ("adamw", include_str!("source/adamw.cu")),
    ("reduce", include_str!("source/reduce.cu")),
    (
        "fused",
        concat!(
            include_str!("source/fused_common.h"),
            include_str!("source/fused_norm.cu"),
            include_str!("source/fused_pairs.cu"),
            include_str!("source/fused_loss.cu"),
        ),
    ),
    (
        "fp8",
        concat!(
            include_str!("source/fused_common.h"),
            include_str!("source/fp8.cu"),
        ),
    ),
];

/// Vendor of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// NVIDIA, through libcuda and NVRTC.
    Cuda,
    /// AMD, through libamdhip64 and hipRTC.
    Hip,
}

impl fmt::Display for Vendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cuda => "CUDA",
            Self::Hip => "HIP",
        })
    }
}
