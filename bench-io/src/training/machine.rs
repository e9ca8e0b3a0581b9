//! The machine that a step is planned for: this one, unless options describe another.

use std::fmt;

use clap::Args;
use serde::Serialize;
use training_run::plan::Hardware;

use crate::units::Bytes;

#[derive(Args, Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct OtherMachine {
    /// Plan for this much host memory, such as 512GiB [default: what is available here]
    #[arg(long, value_name = "BYTES", conflicts_with = "run")]
    pub(crate) host_memory: Option<Bytes>,
    /// Plan for GPUs with this much memory, such as 80GiB; 0 plans without a GPU [default: the GPU of this machine]
    #[arg(long, value_name = "BYTES", conflicts_with = "run", value_parser = bytes_or_none)]
    pub(crate) gpu_memory: Option<u64>,
    /// Plan for this number of cores for the optimizer [default: this machine's]
    #[arg(long, value_name = "N", conflicts_with = "run", value_parser = clap::value_parser!(u64).range(1..=65536))]
    pub(crate) cores: Option<u64>,
}

fn bytes_or_none(text: &str) -> Result<u64, String> {
    match text {
        "0" => Ok(0),
        text => text.parse::<Bytes>().map(|bytes| bytes.0),
    }
}

/// The machine that a plan was made for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct PlannedMachine {
    /// Host memory of the run; `None` if the kernel does not report it.
    pub(crate) host_memory_bytes: Option<u64>,
    /// Memory of each process's GPU; `None` without one.
    pub(crate) gpu_memory_bytes: Option<u64>,
    /// Cores of the optimizer.
    pub(crate) cores: u64,
}

impl From<&Hardware> for PlannedMachine {
    fn from(hardware: &Hardware) -> Self {
        Self {
            host_memory_bytes: hardware.host_memory_bytes,
            gpu_memory_bytes: hardware.gpu.as_ref().map(|gpu| gpu.memory_bytes),
            cores: hardware.cores,
        }
    }
}

/// The planned machine, and which of its values were given.
pub(super) struct MachineDescription<'a>(
    pub(super) &'a PlannedMachine,
    pub(super) &'a OtherMachine,
);

impl fmt::Display for MachineDescription<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(planned, overridden) = self;
        let from = |given: bool| if given { "given" } else { "found here" };
        let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64);
        let host = planned.host_memory_bytes.map_or("unknown".into(), gib);
        write!(
            f,
            "planned for: host memory {host} ({}), {} cores ({}), ",
            from(overridden.host_memory.is_some()),
            planned.cores,
            from(overridden.cores.is_some())
        )?;
        match planned.gpu_memory_bytes {
            Some(bytes) => write!(f, "GPU memory {}", gib(bytes))?,
            None => write!(f, "no GPU")?,
        }
        write!(f, " ({})", from(overridden.gpu_memory.is_some()))
    }
}
