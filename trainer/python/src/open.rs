//! From the plan that Python passes as JSON to an open swapper.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use kernels::adamw::{Master, Moments, TileFormat, UpdateRule};
use kernels::gpu::{Gpu, TileUpdater};
use kernels::reduce::GradType;
use pyo3::prelude::*;
use serde::Deserialize;
use swapper::private::{PrivateDaemon, PrivateSettings};
use swapper::{
    Backing, Durability, Nodes, OpenReport, Optimizer, Schedule, ScratchSettings, Staging, StepIo,
    StoreSettings, Swapper, SwapperSettings, TileBytes, UnitShape, choose_tile_elems,
};

use training_state::plan::MeasuredRates;
use training_state::ranks::{node_of, ranks_of};
use training_state::run::{RunId, resolved};
use training_state::store::{self, OtherJob, StoreFiles, device_file_bytes, other_job};
use training_state::update::{CpuUpdate, GPU_UPDATERS, GpuUpdate, tile_bytes};

use crate::OpenRun;
use crate::errors::{BEGIN_ANEW, Error, failed, no_store, refused};
use crate::format::{Format, ParamPlan, UpdateFormat};
use crate::gpu::gpu_failed;
use crate::nodes::Mailbox;
use crate::progress::{Clock, Reporter};
use crate::update::{ByParam, StepHyper};

/// A run, as `offloadd/_plan.py` describes it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Plan {
    pub(crate) units: Vec<UnitPlan>,
    /// Directories of device files; without any, tiles stay in host memory.
    pub(crate) nvme: Vec<PathBuf>,
    /// A running daemon's socket, instead of device files of the run's own.
    pub(crate) socket: Option<PathBuf>,
    /// The program `offloadd`; without it, the one beside this process or in the PATH.
    program: Option<PathBuf>,
    pub(crate) run_dir: PathBuf,
    pub(crate) job: String,
    deferred: bool,
    resident_fraction: f64,
    /// Fraction of the gradients that stays in host memory until the update.
    gradients_fraction: f64,
    /// `fp32`, `bf16` or `8bit`: how the optimizer's moments are stored.
    pub(crate) moments: String,
    /// `fp32` or `bf16`: how the masters of bf16 parameters are stored.
    pub(crate) master: String,
    /// Which optimizer updates the parameters.
    #[serde(default)]
    pub(crate) optimizer: RunOptimizer,
    commit_every: u64,
    staging_bytes: u64,
    /// Bytes on devices for inputs of checkpointed blocks; 0 where none wait there.
    #[serde(default)]
    activations_bytes: u64,
    /// Of these, bytes that a step writes and reads, where they are planned.
    #[serde(default)]
    pub(crate) moved_bytes: u64,
    pub(crate) update_threads: usize,
    /// The GPU that updates tiles too, or alone if there are no threads.
    pub(crate) update_gpu: Option<u32>,
    /// Index of the GPU that the model computes on.
    compute_gpu: Option<u32>,
    /// Bytes of weights, and with Muon of matrices, that a step brings to a GPU, where they are planned; what leaves it meanwhile is less.
    #[serde(default)]
    pub(crate) bus_bytes: u64,
    /// Number of this process, and of the processes that train the run together.
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    /// First rank of each node.
    first_ranks: Vec<u32>,
    /// Elements of a tile, where the ranks' parts of units depend on it; chosen by the units' sizes if None.
    tile_elems: Option<u64>,
    /// Identity of the run, the same on all nodes. `run_dir` and `job` are this node's.
    run: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct UnitPlan {
    pub(crate) elems: u64,
    /// `float32`, `bfloat16` or `float16`; any type where the unit is not trained.
    pub(crate) dtype: String,
    pub(crate) elem_bytes: usize,
    /// Of gradients, as they come and in tiles: `dtype`, or `float32`, whose sums over several passes are not rounded.
    pub(crate) gradient_dtype: String,
    pub(crate) trained: bool,
    /// Whether Muon updates its parameters: tiles with one moment, which directions are made of.
    #[serde(default)]
    pub(crate) muon: bool,
    pub(crate) params: Vec<ParamPlan>,
}

/// The optimizer of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) enum RunOptimizer {
    #[default]
    AdamW,
    Lion,
    /// Muon for the units that say so, AdamW for others.
    Muon,
}

impl RunOptimizer {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::AdamW => "AdamW",
            Self::Lion => "Lion",
            Self::Muon => "Muon",
        }
    }

    fn rule(self, unit: &UnitPlan) -> UpdateRule {
        match self {
            _ if unit.muon => UpdateRule::Muon,
            Self::AdamW | Self::Muon => UpdateRule::AdamW,
            Self::Lion => UpdateRule::Lion,
        }
    }
}

impl UnitPlan {
    fn format(&self, rule: UpdateRule, moments: Moments, bf16: Master) -> PyResult<Format> {
        let update = if self.trained {
            let master = master(&self.dtype, bf16)?;
            let format = TileFormat {
                rule,
                master,
                moments,
            };
            let grads = match self.gradient_dtype == self.dtype {
                true => master.grad_type(),
                false => GradType::Fp32,
            };
            Some(UpdateFormat { format, grads })
        } else {
            None
        };
        Ok(Format {
            param_bytes: self.elem_bytes,
            update,
        })
    }
}

/// Operations in flight, half of them each way.
const IODEPTH: u32 = 64;

/// The master of a parameter; `bf16` is that of bf16 ones.
fn master(dtype: &str, bf16: Master) -> PyResult<Master> {
    match dtype {
        "float32" => Ok(Master::Fp32),
        "bfloat16" => Ok(bf16),
        "float16" => Ok(Master::Fp16WholeMaster),
        _ => Err(Error::new_err(format!(
            "parameters of type {dtype} cannot be trained"
        ))),
    }
}

fn shape(elems: u64, format: &Format) -> UnitShape {
    let not_trained = TileBytes {
        param_bytes_per_elem: format.param_bytes,
        grad_bytes_per_elem: 0,
        state_tile_bytes: |_| 0,
    };
    let update = format.update;
    UnitShape {
        elems,
        tile_bytes: update.map_or(not_trained, |UpdateFormat { format, grads }| {
            tile_bytes(format, grads.elem_bytes())
        }),
        trained: update.is_some(),
        other_state: None,
        revised: (update.as_ref()).is_some_and(|update| update.format.rule == UpdateRule::Muon),
        external: false,
    }
}

/// Starts the daemon of the run's own device files, one in each directory, for the sessions of all ranks.
pub(crate) fn start_daemon(plan: &Plan) -> PyResult<PrivateDaemon> {
    // The first rank of a node has the most tiles.
    let settings = swapper_settings(plan)?;
    let memory = settings.plan().map_err(failed)?;
    let file_bytes = device_file_bytes(&memory, Durability::Committed, plan.nvme.len() as u64);
    let files = StoreFiles::new(&plan.nvme, &plan.job, file_bytes);
    files.check_space().map_err(no_store)?;
    files.link_run(&plan.run_dir).map_err(no_store)?;
    let daemon = PrivateDaemon::start(PrivateSettings {
        program: plan.program.clone(),
        dir: plan.run_dir.join("offloadd"),
        devices: (files.paths().iter())
            .map(|path| (path.clone(), file_bytes))
            .collect(),
        arena_bytes_max: settings.local_arena_bytes().map_err(failed)?,
        iodepth_max: IODEPTH + memory.scratch.slot_count,
        engine: "auto".into(),
    })
    .map_err(|error| refused(&error, error.to_string()))?;
    if plan.first_ranks.len() > 1
        && let Some(OtherJob { job, devices }) = other_job(&daemon, &plan.job).map_err(no_store)?
    {
        return Err(Error::new_err(format!(
            "node {}: the store on {devices} holds {}, not {}: set nvme_path to this node's own drives, or {BEGIN_ANEW}",
            plan.node(),
            RunId::describe_job(&job),
            RunId::describe_job(&plan.job),
        )));
    }
    Ok(daemon)
}

/// Refuses directories on drives that are not mounted: the run would begin anew on the disk below. Remembers where the others are mounted.
#[pyfunction]
pub(crate) fn check_drives(dirs: Vec<PathBuf>) -> PyResult<()> {
    let dirs: Vec<PathBuf> = dirs.iter().map(|dir| resolved(dir)).collect();
    for dir in &dirs {
        store::check_mounted(dir).map_err(|error| Error::new_err(error.to_string()))?;
    }
    store::remember_mounts(dirs.iter().map(PathBuf::as_path));
    Ok(())
}

/// Removes a run's device files; refuses while a daemon uses one.
#[pyfunction]
pub(crate) fn remove_files(py: Python<'_>, files: Vec<PathBuf>) -> PyResult<()> {
    py.detach(|| store::remove_files(&files)).map_err(no_store)
}

impl Plan {
    /// How each unit's numbers are stored.
    pub(crate) fn formats(&self) -> PyResult<Vec<Format>> {
        let moments = match self.moments.as_str() {
            "fp32" => Moments::Fp32,
            "bf16" => Moments::Bf16,
            "8bit" => Moments::EightBit,
            other => return Err(Error::new_err(format!("moments of type {other}"))),
        };
        let bf16 = match self.master.as_str() {
            "fp32" => Master::SplitBf16,
            "bf16" => Master::Bf16,
            other => return Err(Error::new_err(format!("masters of type {other}"))),
        };
        let format = |unit: &UnitPlan| unit.format(self.optimizer.rule(unit), moments, bf16);
        self.units.iter().map(format).collect()
    }

    /// Whether tiles go to devices.
    pub(crate) fn has_store(&self) -> bool {
        self.socket.is_some() || !self.nvme.is_empty()
    }

    /// Ranks of this node.
    fn local(&self) -> Range<u32> {
        ranks_of(&self.first_ranks, self.node(), self.ranks)
    }

    fn node(&self) -> u32 {
        node_of(&self.first_ranks, self.rank)
    }

    fn backing(&self, socket: PathBuf, exchange: Option<&Arc<Mailbox>>) -> Backing {
        Backing::Store(StoreSettings {
            socket,
            job: self.job.clone(),
            durability: Durability::Committed,
            nodes: exchange.map(|exchange| Nodes {
                run: self.run.clone().into_bytes(),
                node: self.node(),
                first_ranks: self.first_ranks.clone(),
                exchange: exchange.clone(),
            }),
        })
    }
}

/// The swapper's settings for `plan`. A private daemon's socket is not known yet, its path is empty.
pub(crate) fn swapper_settings(plan: &Plan) -> PyResult<SwapperSettings> {
    let units: Vec<UnitShape> = (plan.units.iter().zip(&plan.formats()?))
        .map(|(unit, format)| shape(unit.elems, format))
        .collect();
    Ok(SwapperSettings {
        tile_elems: (plan.tile_elems).unwrap_or_else(|| choose_tile_elems(&units)),
        units,
        param_fraction: plan.resident_fraction,
        state_fraction: plan.resident_fraction,
        grad_fraction: plan.gradients_fraction,
        staging: Staging::Bytes(plan.staging_bytes),
        scratch: ScratchSettings::new(plan.activations_bytes).map_err(failed)?,
        schedule: match plan.deferred {
            true => Schedule::Deferred,
            false => Schedule::Immediate,
        },
        commit_every: plan.commit_every,
        iodepth: IODEPTH,
        backing: match plan.has_store() {
            true => plan.backing(plan.socket.clone().unwrap_or_default(), None),
            false => Backing::Memory,
        },
        layout: layout_text(plan).into_bytes(),
        rank: plan.rank,
        ranks: plan.ranks,
        node_ranks: Some(plan.local()),
    })
}

/// Names the contents of tiles. A job with others is refused: its tiles may have the same size.
fn layout_text(plan: &Plan) -> String {
    let text = match (plan.optimizer, plan.moments.as_str()) {
        (RunOptimizer::AdamW, "fp32") => String::new(),
        (RunOptimizer::AdamW, other) => format!("moments in {other}"),
        (kind, moments) => format!("{}, moments in {moments}", kind.word()),
    };
    match plan.master.as_str() {
        "fp32" => text,
        other => format!("{text}, masters in {other}"),
    }
}

/// Makes the optimizers; each tile goes to one that is idle.
fn optimizers(
    plan: &Plan,
    scalars: &ByParam,
    tile_elems: u64,
) -> PyResult<Vec<Box<dyn Optimizer<StepHyper>>>> {
    let mut optimizers: Vec<Box<dyn Optimizer<StepHyper>>> = Vec::new();
    if let Some(index) = plan.update_gpu {
        let gpu = Gpu::open(index).map_err(gpu_failed)?;
        let bytes = scalars.gpu_bytes(tile_elems as usize);
        for _ in 0..GPU_UPDATERS {
            let updater = TileUpdater::new(&gpu, bytes).map_err(gpu_failed)?;
            optimizers.push(Box::new(GpuUpdate {
                scalars: scalars.clone(),
                updater,
            }));
        }
    }
    for _ in 0..plan.update_threads {
        optimizers.push(Box::new(CpuUpdate(scalars.clone())));
    }
    Ok(optimizers)
}

/// Opens the run's tiles: those on its own device files behind `socket`, with the daemon that this process started for them.
/// `exchange` connects the nodes, if there are several.
pub(crate) fn open(
    plan: Plan,
    socket: Option<PathBuf>,
    daemon: Option<PrivateDaemon>,
    exchange: Option<Arc<Mailbox>>,
) -> PyResult<(OpenRun, OpenReport)> {
    let formats = plan.formats()?;
    let mut settings = swapper_settings(&plan)?;
    if plan.has_store() {
        let socket = socket.or(plan.socket.clone()).unwrap_or_default();
        settings.backing = plan.backing(socket, exchange.as_ref());
    }
    let bytes = settings.step_bytes().map_err(failed)?;
    let mut index = 0..;
    let mut of_unit = |unit: &UnitPlan| {
        let params = unit.params.iter();
        let part = |param: &ParamPlan| {
            let elems = param.offset..param.offset + param.elems;
            (elems, index.next().expect("endless"))
        };
        params.map(part).collect::<Vec<_>>()
    };
    let params = plan.units.iter().map(&mut of_unit);
    let scalars = ByParam {
        units: Arc::new(formats.iter().copied().zip(params).collect()),
    };
    let optimizers = optimizers(&plan, &scalars, settings.tile_elems)?;
    let (swapper, opened) = Swapper::open(settings.clone(), optimizers).map_err(failed)?;
    if let Some((read, write)) = opened.rates().filter(|_| plan.rank == plan.local().start) {
        let measured = MeasuredRates {
            read_bytes_per_s: Some(read),
            write_bytes_per_s: Some(write),
            ..MeasuredRates::read(&plan.run_dir).unwrap_or_default()
        };
        // Without the file a later plan assumes rates.
        let _ = measured.write(&plan.run_dir);
    }
    let gpu = plan.compute_gpu.and_then(|index| Gpu::open(index).ok());
    let gpu = gpu.map(|gpu| gpu.info().pci.clone());
    let run = OpenRun {
        reporter: Reporter::new(&settings, bytes, &opened, gpu),
        clock: Clock::new(),
        io: StepIo::default(),
        directions: None,
        swapper,
        plan,
        formats,
        arena: opened.arena.clone(),
        _daemon: daemon,
    };
    Ok((run, opened))
}
