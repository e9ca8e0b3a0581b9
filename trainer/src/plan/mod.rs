//! What a run will take, known before anything is touched: bytes in each tier, bytes a step moves, the shortest time of a step.
//!
//! ```text
//!   settings, hardware ─▶ shares kept in host memory ─▶ bytes of a step ─▶ commit interval, staging ─▶ bound
//!                            choose.rs                     swapper           choose.rs                  swapper
//!                                       host and GPU memory: memory.rs      what does not fit: problems.rs
//! ```
//!
//! A plan touches nothing and needs nothing: no GPU, store, daemon or data. `trainer train` refuses what it refuses.

mod amount;
mod choose;
mod hardware;
mod measured;
mod memory;
mod problems;
mod report;
mod text;

use kernels::adamw::{Master, state_tile_bytes};
use swapper::{
    Backing, Bound, MemoryPlan, Staging, StepBytes, StepRates, StoreSettings, SwapperError,
    SwapperSettings, TileBytes, UnitShape,
};

use crate::compute::{Dtype, Keep};
use crate::config::{
    Durability, KeepChoice, ResidentShare, RunSettings, Schedule, Share, Tier, UpdatePlace,
};
use crate::model::{UnitLayout, unit_layouts};

pub use amount::{parse_bytes, parse_rate};
use choose::{STAGING_BYTES_ASSUMED, Tiles};
pub use hardware::{Figure, GpuHardware, Hardware, Overrides, Source};
pub use measured::Measured;
use memory::GpuUse;
pub use memory::{BusBytes, ComputeMemory, TileSums};
pub use problems::{PlanError, Problem, ProblemKind};
pub use report::{REPORT_VERSION, Refusal, Report};

/// A device file holds more than tiles: superblocks, catalog, definitions, manifests and the space between extents.
const DEVICE_SLACK_BYTES: u64 = 32 << 20;

/// Of the host memory that is free, what choices leave: pages of files, other programs, what nobody counted.
const HOST_MARGIN_SHARE: f64 = 0.1;

/// As few slots as a swapper can do with.
const STAGING_LEAST: Staging = Staging::Slots {
    param: swapper::STAGING_MIN,
    state: swapper::STAGING_MIN,
};

/// Of a GPU's memory, what choices leave: pieces too small for anything, kernels' own needs.
const GPU_MARGIN_SHARE: f64 = 0.1;

/// Forward is a quarter of forward, recomputing and backward: 80 of 312 ms on an H200.
const FORWARD_SHARE: f64 = 0.25;

/// Another place for the update is chosen when it makes the step shorter by this share: it takes GPU time nobody counted.
const UPDATE_GAIN_MIN: f64 = 0.02;

/// What a run takes and moves. Bytes are those of one process where nothing else is said.
#[derive(Clone, Debug)]
pub struct Plan {
    /// For the swapper; a store's socket and job are filled in when they are known.
    pub swapper: SwapperSettings,
    pub units: Vec<UnitLayout>,
    pub master: Master,
    /// Of tiles, staging and gradients.
    pub memory: MemoryPlan,
    pub step_bytes: StepBytes,
    /// The same of all processes together.
    pub node_bytes: StepBytes,
    /// What computing takes, in GPU memory if there is a GPU, else in host memory.
    pub compute: ComputeMemory,
    /// What blocks keep for backward, on a GPU.
    pub keep: Keep,
    /// Whether all tiles live in the memory of the GPU that computes: both devices are `none`. With one of them elsewhere,
    /// `none` is host memory, as it is without a GPU.
    pub lives_in_gpu: bool,
    /// Tiles in GPU memory.
    pub gpu_tiles: TileSums,
    pub text_bytes: u64,
    /// What crosses the bus to a GPU.
    pub bus: BusBytes,
    /// Where the optimizer runs. Never `Auto`.
    pub update: UpdatePlace,
    pub hardware: Hardware,
    /// All processes together.
    pub rates: StepRates,
    pub bound: Bound,
    pub params_count: u64,
    /// Of one step, all processes together.
    pub tokens: u64,
    problems: Vec<Problem>,
    /// What was chosen here, and not in the run file, with the reason.
    choices: Vec<Choice>,
}

/// A setting that the plan chose.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Choice {
    /// The setting's path in a run file.
    pub key: &'static str,
    /// What it would say there.
    pub value: String,
    pub why: String,
}

impl Plan {
    /// Plans a run on `hardware`. `text_bytes` of text are held in host memory.
    ///
    /// What does not fit is not an error here: [`Plan::check`] refuses it, after a person has seen the plan.
    ///
    /// # Errors
    /// Settings the swapper cannot work with: tiles too large, staging too small.
    pub fn new(
        settings: &RunSettings,
        hardware: Hardware,
        text_bytes: u64,
    ) -> Result<Self, PlanError> {
        let units = unit_layouts(&settings.model);
        let master = match settings.dtype {
            Dtype::Bf16 => Master::SplitBf16,
            Dtype::Fp32 => Master::Fp32,
        };
        let mut swapper = swapper_settings(settings, &units, master);
        // With no more slots than it cannot do without: what of the tiles is known before staging is.
        let staging = std::mem::replace(&mut swapper.staging, STAGING_LEAST);
        let rates = StepRates::default();
        let placement = &settings.placement;
        let lives_in_gpu = hardware.gpu.is_some()
            && placement.param == Tier::None
            && placement.optimizer == Tier::None;
        let mut plan = Self {
            memory: swapper.plan()?,
            step_bytes: swapper.step_bytes()?,
            node_bytes: StepBytes::default(),
            swapper,
            units,
            master,
            compute: ComputeMemory::default(),
            lives_in_gpu,
            keep: Keep::Nothing,
            gpu_tiles: TileSums::default(),
            text_bytes,
            bus: BusBytes::default(),
            update: UpdatePlace::Cpu,
            bound: swapper::bound(swapper::Schedule::Deferred, &StepBytes::default(), &rates),
            rates,
            params_count: settings.model.params_count() as u64,
            tokens: settings.step_tokens(),
            hardware,
            problems: Vec::new(),
            choices: Vec::new(),
        };
        plan.choose(settings, staging)?;
        plan.problems = problems::of(&plan, settings);
        Ok(plan)
    }

    fn choose(&mut self, settings: &RunSettings, staging: Staging) -> Result<(), PlanError> {
        self.refresh(settings)?;
        self.choose_update(settings);
        self.choose_residents(settings)?;
        self.choose_commits(settings)?;
        match settings.offload.staging_bytes {
            Some(_) => self.swapper.staging = staging,
            None => self.choose_staging(settings),
        }
        self.refresh(settings)?;
        self.choose_update(settings);
        self.choose_keep(settings);
        Ok(())
    }

    /// Works out memory, bytes, rates and bound of the present settings.
    fn refresh(&mut self, settings: &RunSettings) -> Result<(), SwapperError> {
        self.memory = self.swapper.plan()?;
        self.step_bytes = self.swapper.step_bytes()?;
        // The tiles of one process that owns them all are those of all processes.
        let alone = SwapperSettings {
            rank: 0,
            ranks: 1,
            ..self.swapper.clone()
        };
        self.node_bytes = alone.step_bytes()?;
        if self.lives_in_gpu {
            self.gpu_tiles = self.tile_sums();
        }
        self.set_compute(settings);
        self.set_rates(settings);
        Ok(())
    }

    fn set_compute(&mut self, settings: &RunSettings) {
        let gpu = self.hardware.gpu.as_ref().map(|_| GpuUse {
            lives: self.lives_in_gpu,
            keep: self.keep,
            update: self.update,
            master: self.master,
            tile_elems: self.swapper.tile_elems,
        });
        self.compute = ComputeMemory::new(settings, &self.units, gpu);
    }

    fn set_rates(&mut self, settings: &RunSettings) {
        let hardware = &self.hardware;
        let ranks = f64::from(self.swapper.ranks);
        let compute_s = 6.0 * self.params_count as f64 * settings.batch.tokens() as f64
            / (hardware.tflops.value * 1e12);
        let cpu_s = self.params_count as f64 / hardware.update_params_per_s.value;
        let (mut update_s, mut bus_s) = (cpu_s, 0.0);
        if self.lives_in_gpu {
            // Nothing crosses the bus, and in the GPU's own memory an update takes some milliseconds.
            update_s = 0.0;
        } else if let Some(gpu) = &hardware.gpu {
            let bus_bytes_per_s = gpu.bus_bytes_per_s.value;
            let tiles = self.tile_sums();
            let streamed_s = tiles.streamed_s(bus_bytes_per_s);
            let share = memory::gpu_share(self.update, cpu_s, streamed_s);
            self.bus = BusBytes::new(&tiles, share);
            bus_s = self.bus.s(bus_bytes_per_s);
            update_s = (cpu_s * (1.0 - share)).max(streamed_s * share);
        }
        self.rates = StepRates {
            read_bytes_per_s: hardware.read_bytes_per_s.value,
            write_bytes_per_s: hardware.write_bytes_per_s.value,
            staging_bytes: self.memory.staging_bytes() as f64 * ranks,
            forward_s: compute_s * FORWARD_SHARE,
            backward_s: compute_s * (1.0 - FORWARD_SHARE),
            update_s,
            bus_s,
        };
        self.bound = swapper::bound(self.swapper.schedule, &self.node_bytes, &self.rates);
    }

    /// Bytes of this process's tiles, wherever they are.
    fn tile_sums(&self) -> TileSums {
        let memory = &self.memory;
        let all = |slot_bytes: u64| slot_bytes * u64::from(memory.range_count);
        TileSums {
            param_bytes: all(memory.param_slot_bytes),
            state_bytes: all(memory.state_slot_bytes),
            grad_bytes: all(memory.grad_slot_bytes),
        }
    }

    /// Host memory for what is still to be chosen, in this process: what it may take of the node's, less all that is there
    /// already but staging.
    fn left_bytes(&self, settings: &RunSettings) -> u64 {
        let without_margin = |bytes: u64| (bytes as f64 * (1.0 - HOST_MARGIN_SHARE)) as u64;
        let free = self
            .hardware
            .host_memory_bytes
            .map_or(u64::MAX, without_margin);
        let budget = settings.offload.host_memory_bytes.unwrap_or(u64::MAX);
        let taken = self.host_bytes() - self.memory.staging_bytes();
        (free.min(budget) / u64::from(self.swapper.ranks)).saturating_sub(taken)
    }

    fn choose_update(&mut self, settings: &RunSettings) {
        let wanted = settings.offload.update;
        let in_gpu_memory = self.lives_in_gpu;
        self.update = match (self.hardware.gpu.is_some(), wanted) {
            // What cannot be is a problem, found later.
            (false, _) => UpdatePlace::Cpu,
            (true, _) if in_gpu_memory => UpdatePlace::Gpu,
            (true, UpdatePlace::Auto) => {
                let mut best = (UpdatePlace::Cpu, f64::INFINITY);
                for place in [UpdatePlace::Cpu, UpdatePlace::Gpu, UpdatePlace::Shared] {
                    self.update = place;
                    self.set_rates(settings);
                    if self.bound.s < best.1 * (1.0 - UPDATE_GAIN_MIN) {
                        best = (place, self.bound.s);
                    }
                }
                best.0
            }
            (true, place) => place,
        };
        self.set_rates(settings);
        self.set_compute(settings);
        if wanted == UpdatePlace::Auto {
            let why = match (self.hardware.gpu.is_some(), in_gpu_memory, self.update) {
                (false, ..) => "there is no GPU",
                (_, true, _) => "the state lives in GPU memory",
                (.., UpdatePlace::Cpu) => "no other place makes the step shorter",
                _ => "it makes the step shorter",
            };
            self.chose("offload.update", update_word(self.update).to_owned(), why);
        }
    }

    /// The most that fits: all of it saves a fifth of the computing.
    fn choose_keep(&mut self, settings: &RunSettings) {
        self.keep = match settings.train.keep {
            KeepChoice::Auto | KeepChoice::Nothing => Keep::Nothing,
            KeepChoice::Attention => Keep::Attention,
            KeepChoice::Products => Keep::Products,
        };
        let Some(gpu) = self.hardware.gpu.clone() else {
            // The processor always computes again.
            self.keep = Keep::Nothing;
            return;
        };
        self.set_compute(settings);
        if settings.train.keep != KeepChoice::Auto {
            return;
        }
        let most_bytes = (gpu.memory_bytes as f64 * (1.0 - GPU_MARGIN_SHARE)) as u64;
        for keep in [Keep::Products, Keep::Attention, Keep::Nothing] {
            self.keep = keep;
            self.set_compute(settings);
            if self.gpu_bytes() <= most_bytes {
                break;
            }
        }
        self.chose(
            "train.keep",
            keep_word(self.keep).to_owned(),
            "what GPU memory holds beside the rest; what is kept is not computed again",
        );
    }

    fn choose_residents(&mut self, settings: &RunSettings) -> Result<(), PlanError> {
        if !settings.placement.has_store()
            || settings.placement.resident_share != ResidentShare::Auto
        {
            return Ok(());
        }
        let left_bytes = self.left_bytes(settings);
        let staging_bytes = match settings.offload.staging_bytes {
            Some(bytes) => bytes,
            None => self.staging_wanted(settings),
        };
        let ranges = u64::from(self.memory.range_count);
        let tiles = |tier: Tier, slot_bytes: u64| match tier {
            Tier::Nvme => Tiles {
                count: ranges,
                slot_bytes,
            },
            Tier::None | Tier::Cpu => Tiles::default(),
        };
        let placement = &settings.placement;
        let kinds = [
            tiles(placement.param, self.memory.param_slot_bytes),
            tiles(placement.optimizer, self.memory.state_slot_bytes),
        ];
        let [params, states] = choose::resident_counts(kinds, left_bytes, staging_bytes);
        let share = |tier: Tier, count: u64| match tier {
            Tier::Nvme => count as f64 / ranges as f64,
            Tier::None | Tier::Cpu => Share::ALL.get(),
        };
        self.swapper.param_share = share(placement.param, params);
        self.swapper.state_share = share(placement.optimizer, states);
        self.refresh(settings)?;
        let value = format!(
            "{:.2} of the parameters, {:.2} of the state",
            self.swapper.param_share, self.swapper.state_share
        );
        self.chose(
            "offload.resident_share",
            value,
            "what host memory holds beside the rest, parameters first: they are read twice a step",
        );
        Ok(())
    }

    fn choose_commits(&mut self, settings: &RunSettings) -> Result<(), PlanError> {
        if settings.offload.commit_every.is_some() || !settings.placement.has_store() {
            return Ok(());
        }
        self.swapper.commit_every = 0;
        self.refresh(settings)?;
        let ranks = u64::from(self.swapper.ranks);
        let resident_bytes = self.memory.resident_bytes() * ranks;
        let every = choose::commit_every(
            self.swapper.schedule,
            &self.node_bytes,
            resident_bytes,
            &self.rates,
        );
        self.swapper.commit_every = every;
        self.refresh(settings)?;
        let why = if resident_bytes == 0 {
            "every tile is written in every step anyway"
        } else {
            "the fewest steps with which the extra writes of resident tiles stay under 5 % of a step"
        };
        self.chose("offload.commit_every", every.to_string(), why);
        Ok(())
    }

    fn staging_wanted(&self, settings: &RunSettings) -> u64 {
        let ranks = u64::from(self.swapper.ranks);
        let memory = &self.memory;
        let round_bytes = 2 * memory.param_slot_bytes + memory.state_slot_bytes;
        let iodepth = settings.offload.iodepth;
        let node = choose::staging_bytes(
            &self.node_bytes,
            &self.rates,
            iodepth * self.swapper.ranks,
            round_bytes,
        );
        let assumed = !self.hardware.rates_known()
            || self.hardware.tflops.source == Source::Assumed
            || self.swapper.schedule == swapper::Schedule::AtOnce;
        let wanted = node / ranks;
        if assumed {
            wanted.max(STAGING_BYTES_ASSUMED / ranks)
        } else {
            wanted
        }
    }

    fn choose_staging(&mut self, settings: &RunSettings) {
        if !settings.placement.has_store() {
            return;
        }
        let wanted = self.staging_wanted(settings);
        let least = self.memory.staging_bytes();
        if least == 0 {
            return;
        }
        let bytes = wanted.min(self.left_bytes(settings)).max(least);
        self.swapper.staging = Staging::Bytes(bytes);
        let why = if bytes < wanted {
            "what host memory has left: the step would be shorter with more"
        } else {
            "unwritten tiles are carried into backward and read-ahead out of it until something else is the wall"
        };
        self.chose("offload.staging_bytes", bytes.to_string(), why);
    }

    fn chose(&mut self, key: &'static str, value: String, why: impl Into<String>) {
        self.choices.retain(|choice| choice.key != key);
        self.choices.push(Choice {
            key,
            value,
            why: why.into(),
        });
    }

    /// Host memory of this process.
    pub fn host_bytes(&self) -> u64 {
        let compute = match self.hardware.gpu {
            Some(_) => 0,
            None => self.compute.sum_bytes(),
        };
        let compute = if self.lives_in_gpu {
            memory::GPU_HOME_STAGING_BYTES
        } else {
            compute
        };
        self.host_resident_bytes()
            + self.memory.staging_bytes()
            + self.host_grad_bytes()
            + compute
            + self.text_bytes
    }

    /// Of tiles that stay in host memory.
    pub fn host_resident_bytes(&self) -> u64 {
        let on_gpu = self.gpu_tiles.param_bytes + self.gpu_tiles.state_bytes;
        self.memory.resident_bytes() - on_gpu
    }

    /// Of gradients in host memory.
    pub fn host_grad_bytes(&self) -> u64 {
        self.memory.grad_bytes() - self.gpu_tiles.grad_bytes
    }

    /// GPU memory of this process; 0 without a GPU.
    pub fn gpu_bytes(&self) -> u64 {
        match self.hardware.gpu {
            Some(_) => self.compute.sum_bytes() + self.gpu_tiles.sum_bytes(),
            None => 0,
        }
    }

    /// Room on devices, of all processes and devices together; 0 without a store.
    pub fn device_bytes(&self) -> u64 {
        match &self.swapper.backing {
            Backing::Memory => 0,
            Backing::Store(store) => self.memory.device_bytes(store.durability),
        }
    }

    /// Size of each of `count` equal device files of a private store.
    pub fn device_file_bytes(&self, count: u64) -> u64 {
        // Tiles go where a drive is faster: each file has room for an eighth more than its equal part, and a pair of tiles.
        let part_bytes = self.device_bytes().div_ceil(count.max(1));
        let spread_bytes = if count > 1 { part_bytes / 8 } else { 0 };
        (part_bytes + spread_bytes + 2 * self.memory.state_slot_bytes + DEVICE_SLACK_BYTES)
            .next_multiple_of(1 << 20)
    }

    /// Refuses a run that does not fit, or asks for what is not there.
    ///
    /// # Errors
    /// The first thing that does not fit, and what to change.
    pub fn check(&self) -> Result<(), PlanError> {
        match self.problems.first() {
            Some(problem) => Err(PlanError::Refused(problem.clone())),
            None => Ok(()),
        }
    }

    /// Everything that does not fit; nothing when the run can start.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// What was chosen here, in the order of choosing.
    pub fn choices(&self) -> &[Choice] {
        &self.choices
    }
}

/// The run file's word.
pub fn update_word(place: UpdatePlace) -> &'static str {
    match place {
        UpdatePlace::Auto => "auto",
        UpdatePlace::Cpu => "cpu",
        UpdatePlace::Gpu => "gpu",
        UpdatePlace::Shared => "shared",
    }
}

/// The run file's word.
pub fn keep_word(keep: Keep) -> &'static str {
    match keep {
        Keep::Nothing => "nothing",
        Keep::Attention => "attention",
        Keep::Products => "products",
    }
}

fn swapper_settings(
    settings: &RunSettings,
    units: &[UnitLayout],
    master: Master,
) -> SwapperSettings {
    let shapes: Vec<UnitShape> = units
        .iter()
        .map(|unit| UnitShape {
            elems: unit.elems as u64,
        })
        .collect();
    let offload = &settings.offload;
    let backing = if settings.placement.has_store() {
        Backing::Store(StoreSettings {
            socket: offload.socket.clone().unwrap_or_default(),
            job: String::new(),
            durability: match offload.durability {
                Durability::Full => swapper::Durability::Committed,
                Durability::None => swapper::Durability::None,
            },
        })
    } else {
        Backing::Memory
    };
    let share = match settings.placement.resident_share {
        ResidentShare::Share(share) => share,
        // Chosen when the rest is known.
        ResidentShare::Auto => Share::NONE,
    };
    let of = |tier: Tier| match tier {
        Tier::Nvme => share.get(),
        Tier::None | Tier::Cpu => Share::ALL.get(),
    };
    SwapperSettings {
        tile_elems: offload
            .tile_elems
            .unwrap_or_else(|| swapper::choose_tile_elems(&shapes)),
        units: shapes,
        tile_bytes: tile_bytes(master),
        param_share: of(settings.placement.param),
        state_share: of(settings.placement.optimizer),
        staging: Staging::Bytes(offload.staging_bytes.unwrap_or(STAGING_BYTES_ASSUMED)),
        schedule: match offload.schedule {
            Schedule::AtOnce => swapper::Schedule::AtOnce,
            Schedule::Deferred => swapper::Schedule::Deferred,
        },
        commit_every: offload.commit_every.unwrap_or(1),
        iodepth: offload.iodepth.max(swapper::IODEPTH_MIN),
        backing,
        layout: Vec::new(),
        // The first one, which owns the most.
        rank: 0,
        ranks: settings.ranks,
    }
}

fn tile_bytes(master: Master) -> TileBytes {
    let state_tile_bytes = match master {
        Master::SplitBf16 => |elems| state_tile_bytes(Master::SplitBf16, elems),
        Master::Fp32 => |elems| state_tile_bytes(Master::Fp32, elems),
        Master::Fp16WholeMaster => |elems| state_tile_bytes(Master::Fp16WholeMaster, elems),
    };
    TileBytes {
        param_bytes_per_elem: master.param_bytes(),
        grad_bytes_per_elem: master.grad_bytes(),
        state_tile_bytes,
    }
}

#[cfg(test)]
mod tests;
