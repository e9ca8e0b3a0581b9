//! What a plan is made for: memory, cores, a GPU, rates of devices. Each figure says where it comes from.
//!
//! What nobody gave and nothing measured is assumed, and shown as assumed: a plan made of assumptions is still right about
//! bytes, and its bound is as good as they are.

use kernels::gpu::{Gpu, GpuError};
use serde::Serialize;

use crate::config::{DeviceChoice, RunSettings};
use training_state::plan::Measured;

/// Forward and backward on one core, counted as 6 a parameter and token: the demo's 1,000 tokens/s of 10.5 M parameters on
/// two cores of an EPYC with AVX2.
const CORE_TFLOPS: f64 = 0.03;

/// The same on a GPU that is not in [`KNOWN_GPUS`]: what is published for one RTX 4090.
const GPU_TFLOPS: f64 = 150.0;

/// By a part of the name. One H200: forward and backward of plain PyTorch in bf16, checkpointed, reached 424.
const KNOWN_GPUS: &[(&str, f64)] = &[("H200", 400.0), ("H100", 400.0)];

/// One fast PCIe 4 drive. Generous, so that staging chosen from it does not slow a fast drive down.
const DRIVE_READ_BYTES_PER_S: f64 = 6.2e9;
const DRIVE_WRITE_BYTES_PER_S: f64 = 3.2e9;

/// PCIe 5 with 16 lanes, each way: 55.6 GB/s were measured alone, 102 both ways together.
const BUS_BYTES_PER_S: f64 = 50e9;

/// The optimizer on one core of 16: 5.0 to 5.6 G parameters a second on all of them (split bf16 master, AVX-512).
const CORE_UPDATE_PARAMS_PER_S: f64 = 0.35e9;

/// Where a figure comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Named on the command line or in the run file.
    Given,
    /// Asked from this machine, its store, or an earlier start of the run.
    Measured,
    /// Neither.
    Assumed,
}

impl Source {
    /// In a sentence.
    pub fn word(self) -> &'static str {
        match self {
            Self::Given => "given",
            Self::Measured => "measured",
            Self::Assumed => "assumed",
        }
    }
}

/// A figure and where it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figure {
    pub value: f64,
    pub source: Source,
}

impl Figure {
    /// The first that is there: given, measured, or `assumed`.
    fn of(given: Option<f64>, measured: Option<f64>, assumed: f64) -> Self {
        let (value, source) = match (given, measured) {
            (Some(value), _) => (value, Source::Given),
            (None, Some(value)) => (value, Source::Measured),
            (None, None) => (assumed, Source::Assumed),
        };
        Self { value, source }
    }
}

/// A GPU of each process.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GpuHardware {
    pub name: String,
    /// Memory that is free for the run.
    pub memory_bytes: u64,
    /// Host memory to GPU, and back, both at once.
    pub bus_bytes_per_s: Figure,
}

/// What a plan is made for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Hardware {
    /// Host memory for all processes of the run on this node. `None` where the kernel does not say.
    pub host_memory_bytes: Option<u64>,
    /// Where that comes from.
    pub host_memory_source: Source,
    /// For the optimizer, all processes together.
    pub cores: u64,
    /// One for each process, if there are any.
    pub gpu: Option<GpuHardware>,
    /// What was looked for, where there is no GPU.
    pub no_gpu: String,
    /// Forward and backward of one process, 6 operations a parameter and token, in units of 10^12 a second.
    pub tflops: Figure,
    /// Devices of the store.
    pub drives_count: u64,
    /// What each of them is rated to take over its life, if that was given.
    pub drive_rating_bytes: Option<u64>,
    /// All devices of the store together, bytes a second.
    pub read_bytes_per_s: Figure,
    pub write_bytes_per_s: Figure,
    /// Of checkpoints, where the run directory is.
    pub checkpoint_bytes_per_s: Figure,
    /// The optimizer on the processor, all processes together, parameters a second.
    pub update_params_per_s: Figure,
}

/// Figures of another machine than this one, from the command line.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overrides {
    pub host_memory_bytes: Option<u64>,
    /// 0: a machine without a GPU.
    pub gpu_memory_bytes: Option<u64>,
    pub read_bytes_per_s: Option<f64>,
    pub write_bytes_per_s: Option<f64>,
    /// Devices of the store; otherwise as many as the run file names directories.
    pub drives_count: Option<u64>,
    /// What each of them is rated to take over its life.
    pub drive_rating_bytes: Option<u64>,
    pub cores: Option<u64>,
    pub tflops: Option<f64>,
}

impl Hardware {
    /// This machine, as far as `overrides` do not say otherwise. Reads what the kernel, a GPU's driver and the run directory
    /// say; touches nothing.
    pub fn new(settings: &RunSettings, overrides: &Overrides) -> Self {
        let measured = Measured::read(&settings.train.run_dir).unwrap_or_default();
        let (found, no_gpu) = match (settings.train.device, overrides.gpu_memory_bytes) {
            (DeviceChoice::Cpu, _) => (None, "train.device is \"cpu\"".to_owned()),
            (_, Some(0)) => (None, "--gpu-memory is 0".to_owned()),
            (_, Some(memory_bytes)) => (Some(("as given".to_owned(), memory_bytes)), String::new()),
            (_, None) => match find_gpu() {
                Ok(found) => (Some(found), String::new()),
                Err(why) => (None, why),
            },
        };
        let gpu = found.map(|(name, memory_bytes)| GpuHardware {
            name,
            memory_bytes,
            bus_bytes_per_s: Figure::of(None, None, BUS_BYTES_PER_S),
        });
        let ranks = u64::from(settings.ranks);
        let threads = settings.train.threads as u64 * ranks;
        let cores = overrides.cores.unwrap_or(threads).max(1);
        let tflops = match &gpu {
            Some(gpu) => {
                let known = KNOWN_GPUS.iter().find(|(part, _)| gpu.name.contains(part));
                known.map_or(GPU_TFLOPS, |(_, tflops)| *tflops)
            }
            None => CORE_TFLOPS * cores as f64 / ranks as f64,
        };
        let named = settings.placement.nvme_paths.len() as u64;
        let drives_count = overrides.drives_count.unwrap_or(named).max(1);
        let drives = drives_count as f64;
        let (host_memory_bytes, host_memory_source) = match overrides.host_memory_bytes {
            Some(bytes) => (Some(bytes), Source::Given),
            None => (available_bytes(), Source::Measured),
        };
        Self {
            host_memory_bytes,
            host_memory_source,
            cores,
            no_gpu,
            drives_count,
            drive_rating_bytes: overrides.drive_rating_bytes,
            tflops: Figure::of(overrides.tflops, measured.tflops_on(gpu.is_some()), tflops),
            read_bytes_per_s: Figure::of(
                overrides.read_bytes_per_s,
                measured.read_bytes_per_s,
                drives * DRIVE_READ_BYTES_PER_S,
            ),
            write_bytes_per_s: Figure::of(
                overrides.write_bytes_per_s,
                measured.write_bytes_per_s,
                drives * DRIVE_WRITE_BYTES_PER_S,
            ),
            checkpoint_bytes_per_s: Figure::of(
                None,
                measured.checkpoint_bytes_per_s,
                DRIVE_WRITE_BYTES_PER_S,
            ),
            update_params_per_s: Figure::of(None, None, CORE_UPDATE_PARAMS_PER_S * cores as f64),
            gpu,
        }
    }

    /// Whether both rates of the devices are known.
    pub fn rates_known(&self) -> bool {
        self.read_bytes_per_s.source != Source::Assumed
            && self.write_bytes_per_s.source != Source::Assumed
    }
}

/// The name and the free memory of this process's GPU, or what was looked for.
fn find_gpu() -> Result<(String, u64), String> {
    // Among processes of a node, each has its own; what is no number is refused where ranks are read.
    let index = std::env::var("LOCAL_RANK")
        .ok()
        .and_then(|rank| rank.parse().ok())
        .unwrap_or(0);
    let asked = Gpu::open(index).and_then(|gpu| Ok((gpu.info().name.clone(), gpu.free_bytes()?)));
    asked.map_err(|error| match error {
        // Where it stands there is said already that there is no GPU.
        GpuError::NoDevice { message } => message,
        error => error.to_string(),
    })
}

/// What the machine, or the group this process is confined to, has left. `None` where the kernel does not say.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let machine = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10;
    let number = |name| {
        std::fs::read_to_string(format!("/sys/fs/cgroup/{name}"))
            .ok()?
            .trim()
            .parse::<u64>()
            .ok()
    };
    let group = number("memory.max")
        .zip(number("memory.current"))
        .map(|(max, current)| max.saturating_sub(current));
    Some(group.map_or(machine, |group| group.min(machine)))
}
