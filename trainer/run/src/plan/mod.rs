//! Plans a run before anything is created: bytes in each tier, bytes moved in a step, the shortest time of a
//! step.
//!
//! ```text
//!   settings, hardware ─▶ fractions in host memory ─▶ bytes of a step ─▶ commit interval, staging ─▶ bound
//!               tiles.rs       choices.rs             rates.rs, swapper          choices.rs             rates.rs
//!                                       host and GPU memory: memory.rs      what does not fit: problems.rs
//! ```
//!
//! Planning changes nothing and needs neither GPU, store, daemon nor data. `trainer train` refuses the same
//! runs.

mod advice;
mod checkpoints;
mod choices;
mod figures;
mod gpu_units;
mod hardware;
mod memory;
#[cfg(test)]
mod models;
mod muon;
mod operations;
mod outlook;
mod places;
mod problems;
mod question;
mod rates;
mod report;
mod sequence;
mod shared;
mod space;
mod text;
mod tiles;

use swapper::{Backing, Bound, Kind, MemoryPlan, Staging, StepBytes, StepRates, SwapperSettings};

use crate::computation::{AttentionKernel, Checkpointing};
use crate::config::{OptimizerDevice, RunSettings, Stage, Tier};
use crate::model::{UnitLayout, unit_layouts};

pub use advice::Advice;
pub use checkpoints::CheckpointsPlan;
use choices::given_group;
pub use choices::{Choice, attention_kernel_name, checkpointing_name};
pub(crate) use hardware::existing_file_bytes;
pub use hardware::{
    Figure, FigureSource, GpuHardware, Hardware, Overrides, known_gpus, peak_tflops,
};
pub use memory::{ComputeMemory, InputsIn};
pub use muon::PlannedDirections;
pub use operations::Operations;
pub use outlook::Outlook;
pub use places::{Place, PlaceReport, PlacesTable, compare_places};
pub use problems::{PlanError, Problem, ProblemKind};
pub use question::{Question, QuestionError, RunLength, read_model};
pub use rates::copied_elems;
pub use report::{REPORT_VERSION, Refusal, Report};
pub use sequence::SequenceExchange;
pub use space::{Beginning, FileSystem};
use tiles::swapper_settings;
use training_state::backend::GPU_STAGING_BYTES;
use training_state::plan::{BusBytes, TileSums};
use training_state::store::{StoreFiles, device_file_bytes};
use training_state::update::TileFormats;

/// Fewest slots that a swapper can work with.
const STAGING_LEAST: Staging = Staging::Slots {
    param: swapper::STAGING_MIN,
    state: swapper::STAGING_MIN,
    grad: swapper::STAGING_MIN,
};

/// Resources that a run needs and bytes that it moves. Figures are for one process unless stated otherwise.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Settings of the swapper. A store's socket and job are filled in when they are known.
    pub swapper: SwapperSettings,
    pub units: Vec<UnitLayout>,
    /// Storage of the tiles' numbers.
    pub formats: TileFormats,
    /// Bytes of the slots for the state of each unit.
    state_bytes: Vec<u64>,
    /// Host memory of all processes of this node.
    node_host_bytes: u64,
    /// Memory of tiles, staging and gradients.
    pub memory: MemoryPlan,
    pub step_bytes: StepBytes,
    /// Bytes of a step for all processes of the node together.
    pub node_bytes: StepBytes,
    /// Memory for computing: on the GPU if there is one, otherwise on the host.
    pub compute: ComputeMemory,
    /// Part of each block that backward recomputes on a GPU.
    pub checkpointing: Checkpointing,
    /// Kernels that compute attention.
    pub attention: AttentionKernel,
    /// What products in 8 bits change, for people; `None` without them.
    fp8_note: Option<String>,
    /// Chunks in which the MLP of a block is computed.
    pub mlp_chunks: usize,
    /// Where block inputs are until backward.
    pub inputs_in: InputsIn,
    /// Whether the plan may choose to send block inputs to drives.
    may_choose_drives: bool,
    /// Bytes of the input of a block for one micro-batch.
    pub input_bytes: u64,
    /// Whether each unit's tiles are in the memory of the GPU that computes. With a store, which has all tiles, these are the newest ones.
    pub in_gpu: Vec<bool>,
    /// Tiles in GPU memory.
    pub gpu_tiles: TileSums,
    /// Bytes that cross the bus to a GPU.
    pub bus: BusBytes,
    /// Bytes that this node sends to other nodes in a step, and that it receives.
    pub network_bytes: u64,
    /// Host memory for this process's part of a copy of all parameters that the ranks of the node keep together; 0 if
    /// they keep none.
    pub copy_bytes: u64,
    /// Where the optimizer runs; never `Auto`.
    pub optimizer_device: OptimizerDevice,
    pub hardware: Hardware,
    /// Rates of all processes of the node together.
    pub rates: StepRates,
    pub bound: Bound,
    pub params_count: u64,
    /// Lengths of documents in a sample of the training data, within which attention stays; empty if each sequence counts as one.
    documents: Vec<usize>,
    /// Operations of a step of this process, from which rates and the MFU are computed.
    pub operations: Operations,
    /// What Muon does with whole matrices after backward; `None` with another optimizer.
    pub directions: Option<PlannedDirections>,
    /// Part of the time of forward and backward for attention.
    pub attention_s: f64,
    pub stage: Stage,
    /// Number of processes of the run. The swapper's ranks are those that divide tiles among themselves.
    pub ranks: u32,
    /// Number of processes on this node.
    pub local_ranks: u32,
    /// Ranks that divide each sequence among themselves.
    pub sequence_ranks: u32,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// What these ranks exchange.
    pub exchange: SequenceExchange,
    /// Tokens of one step, for all processes together.
    pub tokens: u64,
    /// Micro-batches of a step in each process.
    pub micro_batches: usize,
    /// Micro-batches among them that are processed together.
    pub micro_batch_group: usize,
    /// Steps of the whole run.
    pub steps: u64,
    /// Passes of the whole run over its training data, if its length is known.
    pub epochs: Option<f64>,
    /// Costs of checkpoints, if the run makes any.
    pub checkpoints: Option<CheckpointsPlan>,
    /// File systems that a start writes to; empty until [`Plan::check_space`].
    pub space: Vec<FileSystem>,
    problems: Vec<Problem>,
    /// What to change if the run needs more memory than there is; `None` if nothing helps.
    pub advice: Option<Advice>,
    /// Settings that the plan chose, with reasons.
    choices: Vec<Choice>,
}

impl Plan {
    /// Plans a run on `hardware`.
    ///
    /// A run that does not fit is not an error here: [`Plan::check`] refuses it after the plan has been
    /// shown.
    ///
    /// # Errors
    /// The swapper cannot work with the settings: tiles are too large, or staging is too small.
    pub fn new(settings: &RunSettings, hardware: Hardware) -> Result<Self, PlanError> {
        let mut plan = Self::unadvised(settings, hardware)?;
        plan.advise(settings);
        Ok(plan)
    }

    /// Like [`Plan::new`], without searching for settings that would fit.
    fn unadvised(settings: &RunSettings, hardware: Hardware) -> Result<Self, PlanError> {
        let units = unit_layouts(&settings.model);
        let formats = tiles::formats(settings, &units);
        let mut swapper = swapper_settings(settings, &units, &formats);
        // Planned with the fewest slots first; staging is chosen once everything else is known.
        let staging = std::mem::replace(&mut swapper.staging, STAGING_LEAST);
        let layout = swapper.cut()?;
        let state_bytes = layout.units().iter().cloned();
        let state_bytes = state_bytes
            .map(|ranges| {
                ranges
                    .map(|range| layout.own_slot_bytes(Kind::State, range))
                    .sum()
            })
            .collect();
        let rates = StepRates::default();
        let placement = &settings.placement;
        let lives_in_gpu = hardware.gpu.is_some()
            && placement.param == Tier::None
            && placement.optimizer == Tier::None;
        let mut plan = Self {
            in_gpu: vec![lives_in_gpu; units.len()],
            memory: swapper.plan()?,
            step_bytes: swapper.step_bytes()?,
            node_bytes: StepBytes::default(),
            swapper,
            units,
            formats,
            state_bytes,
            node_host_bytes: 0,
            compute: ComputeMemory::default(),
            checkpointing: Checkpointing::default(),
            attention: AttentionKernel::Torch,
            fp8_note: None,
            inputs_in: InputsIn::Place,
            may_choose_drives: false,
            input_bytes: input_bytes(settings),
            mlp_chunks: settings.train.mlp_chunks,
            gpu_tiles: TileSums::default(),
            bus: BusBytes::default(),
            network_bytes: 0,
            copy_bytes: 0,
            optimizer_device: OptimizerDevice::Cpu,
            bound: swapper::bound(swapper::Schedule::Deferred, &StepBytes::default(), &rates),
            rates,
            documents: Vec::new(),
            operations: Operations::new(settings, settings.model.params_count() as u64, &[]),
            attention_s: 0.0,
            directions: None,
            params_count: settings.model.params_count() as u64,
            stage: settings.placement.stage,
            ranks: settings.ranks,
            local_ranks: settings.local_ranks,
            sequence_ranks: settings.batch.sequence_ranks,
            seq_len: settings.batch.seq_len,
            exchange: SequenceExchange::default(),
            tokens: settings.step_tokens(),
            micro_batches: settings.batch.micro_batches,
            micro_batch_group: given_group(settings),
            steps: settings.train.steps,
            epochs: None,
            checkpoints: None,
            hardware,
            space: Vec::new(),
            problems: Vec::new(),
            advice: None,
            choices: Vec::new(),
        };
        plan.checkpoints = plan.checkpoints_of(settings);
        let mut plan = plan.chosen(settings, staging)?;
        plan.checkpoints = plan.checkpoints_of(settings);
        plan.node_host_bytes = plan.count_node_host_bytes()?;
        plan.problems = problems::find(&plan, settings);
        Ok(plan)
    }

    /// Corrects operations and times of attention by the `documents` of a sample of the training data.
    pub fn with_documents(&mut self, settings: &RunSettings, documents: Vec<usize>) {
        self.operations = Operations::new(settings, self.params_count, &documents);
        self.documents = documents;
        self.set_rates(settings);
    }

    /// Operations of a step of all processes together.
    pub fn step_operations(&self) -> f64 {
        self.operations.sum() * f64::from(self.ranks)
    }

    /// Number of nodes like this one.
    pub fn nodes(&self) -> u32 {
        self.ranks / self.local_ranks
    }

    /// Host memory of this process.
    pub fn host_bytes(&self) -> u64 {
        let compute = match self.hardware.gpu {
            Some(_) => 0,
            None => self.compute.sum_bytes(),
        };
        self.host_resident_bytes()
            + self.memory.staging_bytes()
            + self.memory.scratch_slot_bytes()
            + self.host_grad_bytes()
            + compute
            + self.gpu_staging_bytes()
            + self.compute.away_bytes
            + self.copy_bytes
            + self.checkpoint_buffer_bytes()
    }

    /// Host memory of all processes of this node.
    pub fn node_host_bytes(&self) -> u64 {
        self.node_host_bytes
    }

    /// Adds the host memory of the processes of this node: the first rank has the most tiles, and may have the largest.
    fn count_node_host_bytes(&self) -> Result<u64, PlanError> {
        let processes = u64::from(self.local_ranks);
        let tiles = self.streamed();
        if tiles.local().len() <= 1 || self.lives_in_gpu() {
            return Ok(self.host_bytes().saturating_mul(processes));
        }
        let of_rank = |rank| {
            let tiles = SwapperSettings {
                rank,
                ..tiles.clone()
            };
            Ok(tiles.plan()?.host_bytes())
        };
        let first: u64 = of_rank(tiles.rank)?;
        let beside = self.host_bytes().saturating_sub(first);
        let all: Result<u64, PlanError> = tiles.local().map(of_rank).sum();
        Ok(all?.saturating_add(beside.saturating_mul(processes)))
    }

    /// Host memory that tiles pass through on their way to and from a GPU that has them without a store.
    pub fn gpu_staging_bytes(&self) -> u64 {
        match self.in_gpu.contains(&true) && !self.has_store() {
            true => GPU_STAGING_BYTES as u64,
            false => 0,
        }
    }

    /// Host memory that tiles pass through on their way to checkpoints.
    pub fn checkpoint_buffer_bytes(&self) -> u64 {
        (self.checkpoints).map_or(0, |checkpoints| checkpoints.buffer_bytes)
    }

    /// Host memory for the copy of all parameters that the ranks of this node keep together; 0 if they keep none.
    pub fn node_copy_bytes(&self) -> u64 {
        self.copy_bytes * u64::from(self.local_ranks)
    }

    /// Host memory of tiles that stay there.
    pub fn host_resident_bytes(&self) -> u64 {
        let elsewhere = self.tiles_elsewhere();
        self.memory.resident_bytes() - elsewhere.param_bytes - elsewhere.state_bytes
    }

    /// Host memory of gradients.
    pub fn host_grad_bytes(&self) -> u64 {
        self.memory.grad_bytes() - self.tiles_elsewhere().grad_bytes
    }

    /// Tiles in GPU memory that the memory of the swapper counts, which without a store knows nothing of them.
    fn tiles_elsewhere(&self) -> TileSums {
        match self.has_store() {
            true => TileSums::default(),
            false => self.gpu_tiles,
        }
    }

    /// Whether any state is on devices.
    pub(crate) fn has_store(&self) -> bool {
        matches!(self.swapper.backing, Backing::Store(_))
    }

    /// GPU memory of this process; 0 without a GPU.
    pub fn gpu_bytes(&self) -> u64 {
        match self.hardware.gpu {
            Some(_) => self.compute.sum_bytes() + self.gpu_tiles.sum_bytes(),
            None => 0,
        }
    }

    /// Space on devices for all processes and devices of the node together; 0 without a store.
    pub fn device_bytes(&self) -> u64 {
        match &self.swapper.backing {
            Backing::Memory => 0,
            Backing::Store(store) => self.memory.device_bytes(store.durability),
        }
    }

    /// Space on devices for block inputs of all processes of the node together.
    pub fn device_input_bytes(&self) -> u64 {
        self.swapper.scratch.bytes() * u64::from(self.local_ranks)
    }

    /// Size of each of `count` equal device files of a private store.
    pub fn device_file_bytes(&self, count: u64) -> u64 {
        match &self.swapper.backing {
            Backing::Memory => 0,
            Backing::Store(store) => device_file_bytes(&self.memory, store.durability, count),
        }
    }

    /// Whether the device files of the run's private store have room for block inputs: files that exist keep their size.
    pub(crate) fn has_store_room(&self, settings: &RunSettings) -> bool {
        let count = settings.placement.nvme_paths.len() as u64;
        let has_room = |bytes: u64| self.device_file_bytes(count) <= bytes;
        self.inputs_in != InputsIn::Drives || self.hardware.store_file_bytes.is_none_or(has_room)
    }

    /// Device files of the private store of `job`, if the run has one.
    pub(crate) fn store_files(&self, settings: &RunSettings, job: &str) -> Option<StoreFiles> {
        let private = settings.placement.has_store() && settings.offload.socket.is_none();
        private.then(|| {
            let dirs = &settings.placement.nvme_paths;
            let new_bytes = self.device_file_bytes(dirs.len() as u64);
            let file_bytes = self.hardware.store_file_bytes.unwrap_or(new_bytes);
            StoreFiles::new(dirs, job, file_bytes)
        })
    }

    /// Refuses a run that does not fit, or that needs hardware that is missing.
    ///
    /// # Errors
    /// The first problem and what to change.
    pub fn check(&self) -> Result<(), PlanError> {
        match self.problems.first() {
            Some(problem) => Err(PlanError::Refused(problem.clone())),
            None => Ok(()),
        }
    }

    /// Returns the time of the whole run and the wear of its drives, at the bound.
    pub fn outlook(&self) -> Outlook {
        Outlook::new(self)
    }

    /// Returns everything that does not fit; empty if the run can start.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Returns the settings that the plan chose, in order.
    pub fn choices(&self) -> &[Choice] {
        &self.choices
    }
}

/// Bytes of the input of a block for one micro-batch.
fn input_bytes(settings: &RunSettings) -> u64 {
    let batch = &settings.batch;
    let elems = batch.micro_batch_tokens() * settings.model.hidden_size;
    (elems * settings.dtype.elem_bytes()) as u64
}

#[cfg(test)]
mod tests;
