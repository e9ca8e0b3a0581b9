//! The machine that a plan is made for: memory, cores, a GPU, rates of devices. Each figure has its source.
//!
//! Figures that were neither given nor measured are assumed, and shown as assumed. A plan from assumed
//! figures is still right about bytes; its bound is as accurate as the figures.

use std::path::Path;

use kernels::fp8::fp8_refusal;
use kernels::gpu::GpuError;
use offload_support::memory::available_bytes;
use offload_support::pcie::{self, Link};
use serde::Serialize;
use training_ranks::World;

use crate::accelerator::{self, AcceleratorError, AskTorch};
use crate::config::{DeviceChoice, RunSettings};
use training_state::plan::MeasuredRates;
use training_state::plan::assumed::{
    DRIVE_READ_BYTES_PER_S, DRIVE_WRITE_BYTES_PER_S, bus_bytes_per_s,
};
use training_state::plan::updaters::core_params_per_s;
use training_state::run::{RunId, resolved};
use training_state::store::StoreFiles;

/// Rate of matrix products on one core, with what is recomputed: the demo's 1,000 tokens/s with 10.5 M parameters on two
/// cores of an EPYC with AVX2.
const CORE_TFLOPS: f64 = 0.04;

/// The same rate on a GPU that is not in [`KNOWN_GPUS`]: the published figure for an RTX 4090.
const GPU_TFLOPS: f64 = 150.0;

/// Rates of matrix products of GPUs by a part of their name, with everything in a step that grows with them: norms, loss, gaps. On
/// one H200, a step of 1.345 G parameters and 16 k tokens took 0.249 s, of which attention took 0.032 s.
const KNOWN_GPUS: &[(&str, f64)] = &[("H200", 610.0), ("H100", 610.0)];

/// Peak rates of GPUs for dense 16-bit matrices, from their data sheets, by a part of their name.
const PEAK_TFLOPS: &[(&str, f64)] = &[
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("RTX 4090", 165.0),
    ("RTX 3090", 71.0),
];

/// GPUs whose rates a plan knows, by a part of their name.
pub fn known_gpus() -> impl Iterator<Item = &'static str> {
    KNOWN_GPUS.iter().map(|(part, _)| *part)
}

/// Peak rate of the GPU called `name` for dense 16-bit matrices, in 10^12 operations per second, if it is known.
pub fn peak_tflops(name: &str) -> Option<f64> {
    let known = PEAK_TFLOPS.iter().find(|(part, _)| name.contains(part));
    known.map(|(_, tflops)| *tflops)
}

/// Rate of a node in each direction: a port of 200 Gbit/s.
const NETWORK_BYTES_PER_S: f64 = 25e9;

/// Source of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FigureSource {
    /// From the command line or the configuration.
    Given,
    /// Read from this machine, its store, or an earlier start of the run.
    Measured,
    /// Calculated from what the kernel says of a device, such as the link of a GPU.
    Described,
    /// A default.
    Assumed,
}

impl FigureSource {
    /// The source as a word in a sentence.
    pub fn word(self) -> &'static str {
        match self {
            Self::Given => "given",
            Self::Measured => "measured",
            Self::Described => "by its link",
            Self::Assumed => "assumed",
        }
    }
}

/// A figure with its source.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figure {
    pub value: f64,
    pub source: FigureSource,
}

impl Figure {
    /// Returns the first available of `given`, `measured` and `assumed`.
    fn first_known(given: Option<f64>, measured: Option<f64>, assumed: f64) -> Self {
        let (value, source) = match (given, measured) {
            (Some(value), _) => (value, FigureSource::Given),
            (None, Some(value)) => (value, FigureSource::Measured),
            (None, None) => (assumed, FigureSource::Assumed),
        };
        Self { value, source }
    }
}

/// GPU of each process.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GpuHardware {
    pub name: String,
    /// Memory available to the run.
    pub memory_bytes: u64,
    /// Rate between host memory and GPU in each direction, both used at once.
    pub bus_bytes_per_s: Figure,
    /// Reason why attention cannot use cuDNN's kernels; `None` if it can.
    pub no_cudnn: Option<String>,
    /// Reason why products cannot be computed in 8 bits; `None` if they can.
    pub no_fp8: Option<String>,
}

/// The machine that a plan is made for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Hardware {
    /// Host memory for all processes of the run on this node. `None` if the kernel does not report it.
    pub host_memory_bytes: Option<u64>,
    /// Source of `host_memory_bytes`.
    pub host_memory_source: FigureSource,
    /// Cores for the optimizer, for all processes together.
    pub cores: u64,
    /// GPU of each process, if there are any.
    pub gpu: Option<GpuHardware>,
    /// Reason why there is no GPU, in a few words.
    pub no_gpu: String,
    /// The same with all libraries that were looked for.
    #[serde(skip)]
    pub no_gpu_details: String,
    /// Reason why a run does not start although there is a GPU, such as a torch without GPU support.
    pub unusable_gpu: Option<String>,
    /// Rate of forward and backward in one process, in 10^12 operations per second, counted as [`super::Operations`]. A plan
    /// estimates it from the rates of kernels if it is not known.
    pub tflops: Figure,
    /// Assumed rate of matrix products, in the same unit.
    pub products_tflops: f64,
    /// Number of devices in the store.
    pub drives_count: u64,
    /// Rated endurance of each device in bytes written, if it was given.
    pub drive_rating_bytes: Option<u64>,
    /// Read rate of all devices of the store together, in bytes per second.
    pub read_bytes_per_s: Figure,
    pub write_bytes_per_s: Figure,
    /// Write rate for checkpoints to the run directory.
    pub checkpoint_bytes_per_s: Figure,
    /// Rate of the optimizer on the processor, in parameters per second for all processes together.
    pub update_params_per_s: Figure,
    /// Rate between this node and the others, in bytes per second in each direction.
    pub network_bytes_per_s: Figure,
    /// Size of each device file of the run's private store, if it exists already.
    #[serde(skip)]
    pub store_file_bytes: Option<u64>,
}

/// Figures from the command line that replace this machine's.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overrides {
    pub host_memory_bytes: Option<u64>,
    /// GPU memory; 0: a machine without a GPU.
    pub gpu_memory_bytes: Option<u64>,
    /// Name of the GPU with that memory, which says its rates.
    pub gpu_name: Option<String>,
    pub read_bytes_per_s: Option<f64>,
    pub write_bytes_per_s: Option<f64>,
    /// Number of devices in the store; by default the number of directories in the configuration.
    pub drives_count: Option<u64>,
    /// Rated endurance of each device in bytes written.
    pub drive_rating_bytes: Option<u64>,
    pub cores: Option<u64>,
    pub tflops: Option<f64>,
    pub network_bytes_per_s: Option<f64>,
}

/// Longest reason for the lack of a GPU that a plan shows.
const NO_GPU_CHARS_MAX: usize = 80;

impl Hardware {
    /// Describes this machine with `overrides` applied. Queries the kernel, the GPU's driver, torch if
    /// there is a GPU, and the run directory; changes nothing.
    pub fn new(settings: &RunSettings, overrides: &Overrides, torch: AskTorch) -> Self {
        let measured = MeasuredRates::read(&settings.train.run_dir).unwrap_or_default();
        let mut unusable_gpu = None;
        let (found, no_gpu) = match (settings.train.device, overrides.gpu_memory_bytes) {
            (DeviceChoice::Cpu, _) => (None, "train.device is \"cpu\"".to_owned()),
            (_, Some(0)) => (None, "--gpu-memory is 0".to_owned()),
            (_, Some(memory_bytes)) => {
                let gpu = given_gpu(memory_bytes, overrides.gpu_name.as_deref());
                (Some(gpu), String::new())
            }
            (_, None) => match find_gpu(settings.local_ranks, torch) {
                Ok(found) => (Some(found), String::new()),
                // One vendor's library may be there for another package's sake.
                Err(AcceleratorError::Gpu(GpuError::NoDevice { message })) => {
                    (None, format!("no NVIDIA or AMD GPU answers ({message})"))
                }
                Err(error) => {
                    let absent =
                        matches!(&error, AcceleratorError::Gpu(error) if error.is_absent());
                    unusable_gpu = (!absent).then(|| error.to_string());
                    (None, error.to_string())
                }
            },
        };
        let is_long = no_gpu.lines().count() > 1 || no_gpu.len() > NO_GPU_CHARS_MAX;
        let (no_gpu, no_gpu_details) = match is_long {
            true => (
                "no driver was found (with train.device = \"gpu\" the error says where it was looked for)".into(),
                no_gpu,
            ),
            false => (no_gpu.clone(), no_gpu),
        };
        let gpu = found;
        let ranks = u64::from(settings.local_ranks);
        let threads = settings.train.threads as u64 * ranks;
        let cores = overrides.cores.unwrap_or(threads).max(1);
        let update_params_per_s = core_params_per_s(settings.tile_format().master);
        let tflops = products_tflops(gpu.as_ref(), cores as f64 / ranks as f64);
        let named = settings.placement.nvme_paths.len() as u64;
        let drives_count = overrides.drives_count.unwrap_or(named).max(1);
        let drives = drives_count as f64;
        let (host_memory_bytes, host_memory_source) = match overrides.host_memory_bytes {
            Some(bytes) => (Some(bytes), FigureSource::Given),
            None => (available_bytes(), FigureSource::Measured),
        };
        Self {
            host_memory_bytes,
            host_memory_source,
            cores,
            no_gpu,
            no_gpu_details,
            unusable_gpu,
            drives_count,
            drive_rating_bytes: overrides.drive_rating_bytes,
            products_tflops: tflops,
            tflops: Figure::first_known(
                overrides.tflops,
                measured.tflops_on(gpu.is_some()),
                tflops,
            ),
            read_bytes_per_s: Figure::first_known(
                overrides.read_bytes_per_s,
                measured.read_bytes_per_s,
                drives * DRIVE_READ_BYTES_PER_S,
            ),
            write_bytes_per_s: Figure::first_known(
                overrides.write_bytes_per_s,
                measured.write_bytes_per_s,
                drives * DRIVE_WRITE_BYTES_PER_S,
            ),
            // The run directory may be on such a drive, and is on one drive only.
            checkpoint_bytes_per_s: Figure::first_known(
                overrides.write_bytes_per_s.map(|rate| rate / drives),
                measured.checkpoint_bytes_per_s,
                DRIVE_WRITE_BYTES_PER_S,
            ),
            update_params_per_s: Figure::first_known(
                None,
                None,
                update_params_per_s * cores as f64,
            ),
            network_bytes_per_s: Figure::first_known(
                overrides.network_bytes_per_s,
                None,
                NETWORK_BYTES_PER_S,
            ),
            store_file_bytes: existing_file_bytes(settings, &run_job(settings)),
            gpu,
        }
    }

    /// Returns whether both rates of the devices are known.
    pub fn rates_known(&self) -> bool {
        self.read_bytes_per_s.source != FigureSource::Assumed
            && self.write_bytes_per_s.source != FigureSource::Assumed
    }
}

/// Job of the run in its directory.
pub(super) fn run_job(settings: &RunSettings) -> String {
    RunId::for_dir(&resolved(&settings.train.run_dir)).0.job
}

/// Size of each device file of the private store of `job`, if the run has one and it exists already.
pub(crate) fn existing_file_bytes(settings: &RunSettings, job: &str) -> Option<u64> {
    let private = settings.placement.has_store() && settings.offload.socket.is_none();
    let files = private.then(|| StoreFiles::new(&settings.placement.nvme_paths, job, 0))?;
    files.existing_bytes()
}

/// Assumed rate of matrix products on `gpu`, or on a process's cores.
pub(super) fn products_tflops(gpu: Option<&GpuHardware>, cores: f64) -> f64 {
    let Some(gpu) = gpu else {
        return CORE_TFLOPS * cores;
    };
    let known = KNOWN_GPUS.iter().find(|(part, _)| gpu.name.contains(part));
    known.map_or(GPU_TFLOPS, |(_, tflops)| *tflops)
}

/// A GPU of which only the memory is known, or also its name, one of [`known_gpus`].
fn given_gpu(memory_bytes: u64, name: Option<&str>) -> GpuHardware {
    let no_cudnn = match name {
        None => Some("the GPU's architecture is not known: --gpu names it".to_owned()),
        // All known ones have NVIDIA's Hopper architecture, on which it is used.
        Some(_) => None,
    };
    GpuHardware {
        name: name.unwrap_or("as given").to_owned(),
        memory_bytes,
        bus_bytes_per_s: Figure::first_known(None, None, bus_bytes_per_s(None)),
        no_cudnn,
        no_fp8: None,
    }
}

/// Rate of the bus to the GPU at `address` among the PCI `devices`, from its link.
fn bus_of(devices: &Path, address: &str) -> Figure {
    let link = Link::of_busy_gpu(&devices.join(address));
    Figure {
        value: bus_bytes_per_s(link),
        source: match link {
            Some(_) => FigureSource::Described,
            None => FigureSource::Assumed,
        },
    }
}

/// Describes this process's GPU, with its free memory.
fn find_gpu(ranks: u32, torch: AskTorch) -> Result<GpuHardware, AcceleratorError> {
    // Each process of a node has its own GPU. An invalid number is refused where ranks are read.
    let index = World::from_env().map_or(0, |world| world.local_rank);
    let (gpu, support) = accelerator::find(index, ranks, torch)?;
    Ok(GpuHardware {
        name: gpu.info().name.clone(),
        memory_bytes: gpu.free_bytes()?,
        bus_bytes_per_s: bus_of(Path::new(pcie::DEVICES), &gpu.info().pci),
        no_cudnn: support.no_cudnn,
        no_fp8: fp8_refusal(gpu.info().vendor, &gpu.info().arch),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bus_is_read_from_the_gpus_link_and_assumed_without_one() {
        let devices = tempfile::tempdir().unwrap();
        let gpu = devices.path().join("0000:41:00.0");
        std::fs::create_dir(&gpu).unwrap();
        for (name, text) in [
            ("current_link_width", "8"),
            ("current_link_speed", "2.5 GT/s PCIe"),
            ("max_link_width", "16"),
            ("max_link_speed", "16.0 GT/s PCIe"),
        ] {
            std::fs::write(gpu.join(name), text).unwrap();
        }
        let found = bus_of(devices.path(), "0000:41:00.0");
        assert!((found.value / 12.5e9 - 1.0).abs() < 1e-3, "{found:?}");
        assert_eq!(found.source, FigureSource::Described);
        let other = bus_of(devices.path(), "0000:42:00.0");
        assert_eq!((other.value, other.source), (50e9, FigureSource::Assumed));
    }
}
