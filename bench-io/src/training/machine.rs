//! The machine that a step is planned for: this one, unless options describe another.

use std::fmt;

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use serde_json::Value;

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

impl OtherMachine {
    /// Arguments of `trainer plan`.
    pub(super) fn words(&self) -> Vec<String> {
        let bytes = |bytes: u64| format!("{bytes}B");
        let words = [
            (
                "host-memory",
                self.host_memory.map(|memory| bytes(memory.0)),
            ),
            ("gpu-memory", self.gpu_memory.map(bytes)),
            ("cores", self.cores.map(|count| count.to_string())),
        ];
        let given = words.into_iter();
        given
            .filter_map(|(word, value)| Some(format!("--{word}={}", value?)))
            .collect()
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

impl PlannedMachine {
    /// Reads the answer of `trainer plan`.
    pub(super) fn read(plan: &Value) -> Result<Self> {
        let hardware = &plan["hardware"];
        Ok(Self {
            host_memory_bytes: hardware["host_memory_bytes"].as_u64(),
            gpu_memory_bytes: hardware["gpu"]["memory_bytes"].as_u64(),
            cores: hardware["cores"].as_u64().context("the plan's cores")?,
        })
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
