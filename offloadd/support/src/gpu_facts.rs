//! What only a program with GPU code and torch finds out about this machine's GPUs: `trainer gpu-facts` prints it as JSON, and
//! `offloadd doctor` reads it.

use serde::{Deserialize, Serialize};

/// Facts about all GPUs that a process sees.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuFacts {
    /// Each GPU that could be opened.
    pub gpus: Vec<GpuFact>,
    /// Why GPUs could not be opened, with the number of each.
    pub unopened: Vec<String>,
    /// Why torch cannot compute on the first GPU; `None` if it can.
    pub torch_unusable: Option<String>,
    /// The library for collectives of several GPUs.
    pub nccl: LibraryFact,
    /// The library for attention on Hopper GPUs.
    pub cudnn: LibraryFact,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuFact {
    /// Address among the PCI devices: `0000:41:00.0`; empty if the driver does not say.
    pub pci: String,
    /// Rates of copies from and to pinned host memory.
    pub copies: CopiesFact,
    /// The rate each way that plans assume, both ways at once, from the GPU's link.
    pub planned_bytes_per_s: f64,
}

/// Rates of copies, both ways at once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopiesFact {
    /// They were measured.
    Measured {
        /// Bytes per second to the GPU.
        to_gpu_bytes_per_s: f64,
        /// Bytes per second from the GPU.
        from_gpu_bytes_per_s: f64,
    },
    /// Why they could not be measured.
    Failed(String),
}

/// A library that is opened at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LibraryFact {
    /// Its version, such as "2.28.9".
    Version(String),
    /// Why it cannot be used, with the places where it was looked for.
    Missing(String),
}
