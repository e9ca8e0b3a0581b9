//! Plans the same run with its state in different places: needs, speed, and which places do not fit.

use std::fmt;

use offload_support::units::ApproxBytes;
use serde::Serialize;

use super::figures::{Digits, Seconds};
use super::outlook::Span;
use super::{Hardware, Outlook, Plan, PlanError};
use crate::config::{
    ActivationsChoice, Fraction, OptimizerDevice, Placement, ResidentFraction, RunSettings, Stage,
    Tier,
};

/// Where a run's parameters and optimizer state are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// All in the memory of the GPUs that compute.
    Gpu,
    /// In host memory, except for as much as GPU memory has room for.
    HostAndGpu,
    /// All in host memory.
    Host,
    /// Parameters in host memory, optimizer state on drives.
    HostAndDrives,
    /// On drives, except for as much as GPU memory and then host memory have room for.
    DrivesHostAndGpu,
    /// On drives, except for as much as host memory has room for.
    DrivesAndHost,
    /// All on drives.
    Drives,
}

impl Place {
    /// All places, from the fastest to the slowest.
    pub const ALL: [Self; 7] = [
        Self::Gpu,
        Self::HostAndGpu,
        Self::Host,
        Self::HostAndDrives,
        Self::DrivesHostAndGpu,
        Self::DrivesAndHost,
        Self::Drives,
    ];

    /// Name for display.
    pub fn word(self) -> &'static str {
        match self {
            Self::Gpu => "GPU memory",
            Self::HostAndGpu => "host, GPU as far as it fits",
            Self::Host => "host memory",
            Self::HostAndDrives => "parameters host, state drives",
            Self::DrivesHostAndGpu => "drives, host and GPU as they fit",
            Self::DrivesAndHost => "drives, host as far as it fits",
            Self::Drives => "drives",
        }
    }

    /// Devices of parameters and optimizer state.
    pub(super) fn tiers(self) -> [Tier; 2] {
        match self {
            Self::Gpu => [Tier::None; 2],
            Self::HostAndGpu | Self::Host => [Tier::Cpu; 2],
            Self::HostAndDrives => [Tier::Cpu, Tier::Nvme],
            Self::DrivesHostAndGpu | Self::DrivesAndHost | Self::Drives => [Tier::Nvme; 2],
        }
    }

    /// Plans the run of `settings` with its state in this place. What does not fit is advised to change something other than the place.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn plan(self, settings: &RunSettings, hardware: &Hardware) -> Result<Plan, PlanError> {
        let there = self.apply_to(settings);
        let mut plan = Plan::unadvised(&there, hardware.clone())?;
        plan.advise_here(&there);
        Ok(plan)
    }

    /// Returns `settings` with their state in this place, divided among the ranks. The plan chooses what they
    /// say about another place.
    pub(super) fn apply_to(self, settings: &RunSettings) -> RunSettings {
        let mut there = settings.clone();
        let [param, optimizer] = self.tiers();
        let resident_fraction = match self {
            Self::DrivesHostAndGpu | Self::DrivesAndHost => ResidentFraction::Auto,
            _ => ResidentFraction::Fixed(Fraction::NONE),
        };
        there.placement = Placement {
            stage: Stage::Parameters,
            param,
            optimizer,
            resident_fraction,
            gpu_resident_fraction: match self {
                Self::HostAndGpu | Self::DrivesHostAndGpu => ResidentFraction::Auto,
                _ => ResidentFraction::Fixed(Fraction::NONE),
            },
            ..there.placement
        };
        there.offload.staging_bytes = None;
        if there.offload.activations == ActivationsChoice::Nvme && !there.placement.has_store() {
            there.offload.activations = ActivationsChoice::Auto;
        }
        if self == Self::Gpu {
            there.offload.optimizer_device = OptimizerDevice::Auto;
        }
        there
    }
}

/// Needs of a run in one place. Bytes are for all its processes together, except those of a GPU.
#[derive(Clone, Debug, Serialize)]
pub struct PlaceReport {
    pub place: Place,
    pub fits: bool,
    /// Everything that does not fit, and changes with which it would fit in this place.
    pub refused: Vec<String>,
    /// Memory of each GPU.
    pub gpu_bytes: u64,
    pub host_bytes: u64,
    /// Copy of all parameters that the ranks of one of several nodes keep together; 0 if they keep none.
    pub node_copy_bytes: u64,
    /// Space for both generations of tiles.
    pub device_bytes: u64,
    pub step_read_bytes: f64,
    pub step_written_bytes: f64,
    /// Bytes that a node sends to other nodes in a step, and that it receives.
    pub network_bytes: u64,
    pub network_s: f64,
    /// The shortest step in seconds.
    pub step_s: f64,
    pub wall: &'static str,
    /// Time of forward and backward alone.
    pub compute_s: f64,
    pub tokens_per_s: f64,
    pub outlook: Outlook,
}

impl PlaceReport {
    /// Report of `plan`, which has the run's state at `place`.
    pub(super) fn new(place: Place, plan: &Plan) -> Self {
        Self {
            place,
            fits: plan.problems().is_empty(),
            refused: plan.problems().iter().map(ToString::to_string).collect(),
            gpu_bytes: plan.gpu_bytes(),
            host_bytes: plan.node_host_bytes(),
            node_copy_bytes: plan.node_copy_bytes(),
            device_bytes: plan.device_bytes(),
            step_read_bytes: plan.node_bytes.all_read_bytes(),
            step_written_bytes: plan.node_bytes.all_written_bytes(),
            network_bytes: plan.network_bytes,
            network_s: plan.rates.network_s,
            step_s: plan.bound.s,
            wall: plan.bound.wall.word(),
            compute_s: plan.compute_s(),
            tokens_per_s: plan.tokens as f64 / plan.bound.s,
            outlook: plan.outlook(),
        }
    }

    fn cells(&self) -> [String; CELLS] {
        let bytes = |bytes: u64| match bytes {
            0 => "-".into(),
            bytes => ApproxBytes(bytes).to_string(),
        };
        let wear = match self.step_written_bytes {
            0.0 => "-".into(),
            _ => format!("{} TB", Digits(self.outlook.written_bytes_per_day / 1e12)),
        };
        [
            self.place.word().into(),
            if self.fits { "yes" } else { "no" }.into(),
            bytes(self.gpu_bytes),
            bytes(self.host_bytes),
            bytes(self.device_bytes),
            bytes(self.step_read_bytes as u64),
            bytes(self.step_written_bytes as u64),
            Seconds(self.step_s).to_string(),
            self.wall.into(),
            format!("{:.0}", self.tokens_per_s),
            Span(self.outlook.run_s).to_string(),
            wear,
        ]
    }
}

/// Plans the run of `settings` in every place that `hardware` has.
pub fn compare_places(settings: &RunSettings, hardware: &Hardware) -> Vec<PlaceReport> {
    Place::ALL
        .into_iter()
        // Without a GPU, these places are host memory.
        .filter(|place| {
            let with_gpu = [Place::Gpu, Place::HostAndGpu, Place::DrivesHostAndGpu];
            !with_gpu.contains(place) || hardware.gpu.is_some()
        })
        .filter_map(|place| {
            // Settings that cannot be planned fail in every place, and the run's own plan reports the error.
            let plan = place.plan(settings, hardware).ok()?;
            // With all or nothing in GPU memory it is another place.
            let divides = plan.in_gpu.contains(&true) && !plan.lives_in_gpu();
            let shares = [Place::HostAndGpu, Place::DrivesHostAndGpu].contains(&place);
            (!shares || divides).then(|| PlaceReport::new(place, &plan))
        })
        .collect()
}

const CELLS: usize = 12;
const HEADS: [&str; CELLS] = [
    "state in",
    "fits",
    "each GPU",
    "host",
    "drives",
    "read",
    "written",
    "step",
    "bottleneck",
    "tokens/s",
    "run",
    "wear a day",
];

/// Table of places, followed by a line for each one that does not fit.
pub struct PlacesTable<'a>(pub &'a [PlaceReport]);

impl fmt::Display for PlacesTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows: Vec<[String; CELLS]> = std::iter::once(HEADS.map(String::from))
            .chain(self.0.iter().map(PlaceReport::cells))
            .collect();
        let widths: Vec<usize> = (0..CELLS)
            .map(|cell| rows.iter().map(|row| row[cell].len()).max().unwrap_or(0))
            .collect();
        for row in &rows {
            let cells: Vec<String> = row
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:<width$}"))
                .collect();
            writeln!(f, "{}", cells.join("  ").trim_end())?;
        }
        for place in self.0 {
            for refused in &place.refused {
                writeln!(f, "{}: {refused}", place.place.word())?;
            }
        }
        Ok(())
    }
}
