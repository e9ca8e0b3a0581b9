//! What NVIDIA's driver says of this machine's GPUs (NVML). The library is the driver's own, opened at run time.

use std::path::Path;
use std::sync::OnceLock;

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{
    EccCounter, MemoryError, P2pCapabilitiesIndex, P2pStatus,
};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml, cuda_driver_version_major, cuda_driver_version_minor};

/// Reasons for which a GPU computes more slowly than it could, with words for each. A power limit that is reached is none: GPUs that
/// multiply matrices always reach it.
const SLOWED: [(ThrottleReasons, &str); 4] = [
    (ThrottleReasons::HW_THERMAL_SLOWDOWN, "heat"),
    (ThrottleReasons::SW_THERMAL_SLOWDOWN, "heat"),
    (
        ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN,
        "the power supply's brake",
    ),
    (ThrottleReasons::HW_SLOWDOWN, "its hardware"),
];

/// NVIDIA's GPUs of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvidiaGpus {
    /// Newest CUDA that the driver can run: major and minor version.
    pub cuda: (i32, i32),
    /// The GPUs in the driver's order.
    pub gpus: Vec<NvidiaGpu>,
    /// Pairs that cannot read each other's memory and exchange through host memory; `None` if the driver does not say.
    pub apart: Option<Vec<(usize, usize)>>,
}

/// One GPU. What the driver does not say, as of many consumer cards, is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvidiaGpu {
    /// Such as "NVIDIA H200".
    pub name: String,
    /// All of its memory.
    pub memory_bytes: u64,
    /// Errors of its memory since the driver was loaded that were found and not corrected.
    pub uncorrected_errors: Option<u64>,
    /// Milliwatts that it may take now, and those that it is made for.
    pub power_limits_mw: Option<(u32, u32)>,
    /// Why it computes more slowly now.
    pub slowed_by: Option<&'static str>,
}

/// NVIDIA's library, opened once; `None` without its driver.
pub(crate) fn nvml() -> Option<&'static Nvml> {
    static NVML: OnceLock<Option<Nvml>> = OnceLock::new();
    NVML.get_or_init(|| {
        // The name that drivers install; the library's default is the one of the development package.
        let library = Path::new("libnvidia-ml.so.1").as_os_str();
        Nvml::builder().lib_path(library).init().ok()
    })
    .as_ref()
}

impl NvidiaGpus {
    /// Asks the driver; `None` if there is none, or it does not answer.
    pub fn of_this_machine() -> Option<Self> {
        let nvml = nvml()?;
        let cuda = nvml.sys_cuda_driver_version().ok()?;
        let count = nvml.device_count().ok()?;
        let devices: Vec<Device<'_>> = (0..count)
            .map(|index| nvml.device_by_index(index))
            .collect::<Result<_, _>>()
            .ok()?;
        let apart = |(a, b)| match reach(&devices[a], &devices[b]) {
            Ok(true) => None,
            Ok(false) => Some(Ok((a, b))),
            Err(error) => Some(Err(error)),
        };
        let pairs = (0..devices.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
        Some(Self {
            cuda: (
                cuda_driver_version_major(cuda),
                cuda_driver_version_minor(cuda),
            ),
            // With one left out, the numbers of the others would be wrong.
            gpus: devices.iter().map(NvidiaGpu::ask).collect::<Option<_>>()?,
            apart: pairs.filter_map(apart).collect::<Result<_, _>>().ok(),
        })
    }
}

/// Whether each of two GPUs can read the other's memory.
fn reach(a: &Device<'_>, b: &Device<'_>) -> Result<bool, NvmlError> {
    let way = |from: &Device<'_>, to: &Device<'_>| from.p2p_status(to, P2pCapabilitiesIndex::Read);
    Ok(way(a, b)? == P2pStatus::Ok && way(b, a)? == P2pStatus::Ok)
}

impl NvidiaGpu {
    fn ask(device: &Device<'_>) -> Option<Self> {
        let errors = device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile);
        let limits = (device.power_management_limit().ok())
            .zip(device.power_management_limit_default().ok());
        let reasons = device
            .current_throttle_reasons()
            .unwrap_or(ThrottleReasons::NONE);
        let slowed = SLOWED.iter().find(|(reason, _)| reasons.contains(*reason));
        Some(Self {
            name: device.name().ok()?,
            memory_bytes: device.memory_info().ok()?.total,
            uncorrected_errors: errors.ok(),
            power_limits_mw: limits,
            slowed_by: slowed.map(|(_, words)| *words),
        })
    }
}
