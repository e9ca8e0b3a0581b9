//! From the plan that Python passes as JSON to an open swapper.

use std::path::PathBuf;
use std::sync::Arc;

use kernels::adamw::{Master, state_tile_bytes};
use kernels::reduce::GradType;
use pyo3::PyResult;
use serde::Deserialize;
use swapper::private::{PrivateDaemon, PrivateSettings};
use swapper::{
    Backing, Durability, Opened, Optimizer, Schedule, Staging, StoreSettings, Swapper,
    SwapperSettings, TileBytes, UnitShape, choose_tile_elems,
};

use crate::update::{StepHyper, Update};
use crate::{Error, Held, failed};

/// A run, as `offloadd/_run.py` describes it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Plan {
    pub(crate) units: Vec<UnitPlan>,
    /// Whether gradients of 16-bit parameters lie in tiles as fp32, so that sums of several passes are not rounded.
    fp32_gradients: bool,
    /// Directories of device files; without any, tiles stay in host memory.
    nvme: Vec<PathBuf>,
    /// A running daemon's socket, instead of device files of the run's own.
    socket: Option<PathBuf>,
    /// The program `offloadd`; without it, the one beside this process or in the PATH.
    program: Option<PathBuf>,
    run_dir: PathBuf,
    job: String,
    deferred: bool,
    resident_fraction: f64,
    commit_every: u64,
    staging_bytes: u64,
    update_threads: usize,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct UnitPlan {
    #[serde(rename = "name")]
    _name: String,
    elems: u64,
    /// `float32`, `bfloat16` or `float16`; any type where the unit is not trained.
    dtype: String,
    elem_bytes: usize,
    trained: bool,
    pub(crate) params: Vec<ParamPlan>,
}

/// How a unit's numbers are stored.
#[derive(Clone, Copy)]
pub(crate) struct Format {
    pub(crate) param_bytes: usize,
    pub(crate) update: Option<Updated>,
}

/// How a trained unit's masters and gradients are stored.
#[derive(Clone, Copy)]
pub(crate) struct Updated {
    pub(crate) master: Master,
    /// In tiles; gradients come in the parameters' type.
    pub(crate) grads: GradType,
}

impl UnitPlan {
    fn format(&self, fp32_gradients: bool) -> PyResult<Format> {
        let update = if self.trained {
            let master = master(&self.dtype)?;
            let grads = match fp32_gradients {
                true => GradType::Fp32,
                false => master.grad_type(),
            };
            Some(Updated { master, grads })
        } else {
            None
        };
        Ok(Format {
            param_bytes: self.elem_bytes,
            update,
        })
    }
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ParamPlan {
    /// First element within the unit.
    pub(crate) offset: u64,
    pub(crate) elems: u64,
}

/// Room in each device file beside its part of the tiles: the store's own structures, the job's records and the space between
/// them, and what one file holds more of than another.
const FILE_OVERHEAD_BYTES: u64 = 192 << 20;

/// Operations in flight, half of them each way.
const IODEPTH: u32 = 32;

fn master(dtype: &str) -> PyResult<Master> {
    match dtype {
        "float32" => Ok(Master::Fp32),
        "bfloat16" => Ok(Master::SplitBf16),
        "float16" => Ok(Master::Fp16WholeMaster),
        _ => Err(Error::new_err(format!(
            "parameters of type {dtype} cannot be trained"
        ))),
    }
}

fn shape(elems: u64, format: &Format) -> UnitShape {
    let update = format.update.as_ref();
    UnitShape {
        elems,
        tile_bytes: TileBytes {
            param_bytes_per_elem: format.param_bytes,
            grad_bytes_per_elem: update.map_or(0, |update| update.grads.elem_bytes()),
            state_tile_bytes: match update.map(|update| update.master) {
                None => |_| 0,
                Some(Master::Fp32) => |elems| state_tile_bytes(Master::Fp32, elems),
                Some(Master::SplitBf16) => |elems| state_tile_bytes(Master::SplitBf16, elems),
                Some(Master::Fp16WholeMaster) => {
                    |elems| state_tile_bytes(Master::Fp16WholeMaster, elems)
                }
            },
        },
        trained: update.is_some(),
    }
}

/// The daemon of the run's own device files, one in each directory.
fn start(plan: &Plan, settings: &SwapperSettings) -> PyResult<PrivateDaemon> {
    let memory = settings.plan().map_err(failed)?;
    let tiles = memory.device_bytes(Durability::Committed);
    let file_bytes = tiles.div_ceil(plan.nvme.len() as u64) + FILE_OVERHEAD_BYTES;
    let file_bytes = file_bytes.next_multiple_of(1 << 20);
    let name = format!("offloadd-{}.tiles", plan.job);
    PrivateDaemon::start(PrivateSettings {
        program: plan.program.clone(),
        dir: plan.run_dir.join("offloadd"),
        devices: (plan.nvme.iter())
            .map(|dir| (dir.join(&name), file_bytes))
            .collect(),
        arena_bytes_max: memory.arena_bytes().map_err(failed)?,
        iodepth_max: IODEPTH,
        engine: "auto".into(),
    })
    .map_err(|error| Error::new_err(error.to_string()))
}

pub(crate) fn open(plan: Plan) -> PyResult<(Held, Opened)> {
    let formats = plan
        .units
        .iter()
        .map(|unit| unit.format(plan.fp32_gradients));
    let formats: Vec<Format> = formats.collect::<PyResult<_>>()?;
    let units: Vec<UnitShape> = (plan.units.iter().zip(&formats))
        .map(|(unit, format)| shape(unit.elems, format))
        .collect();
    let mut settings = SwapperSettings {
        tile_elems: choose_tile_elems(&units),
        units,
        param_share: plan.resident_fraction,
        state_share: plan.resident_fraction,
        grad_share: plan.resident_fraction,
        staging: Staging::Bytes(plan.staging_bytes),
        schedule: match plan.deferred {
            true => Schedule::Deferred,
            false => Schedule::AtOnce,
        },
        commit_every: plan.commit_every,
        iodepth: IODEPTH,
        backing: Backing::Memory,
        layout: Vec::new(),
        rank: 0,
        ranks: 1,
    };
    let store = |socket: PathBuf| {
        Backing::Store(StoreSettings {
            socket,
            job: plan.job.clone(),
            durability: Durability::Committed,
        })
    };
    let mut daemon = None;
    if let Some(socket) = &plan.socket {
        settings.backing = store(socket.clone());
    } else if !plan.nvme.is_empty() {
        settings.backing = store(PathBuf::new());
        let started = start(&plan, &settings)?;
        settings.backing = store(started.socket().to_owned());
        daemon = Some(started);
    }
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
    let update = Update {
        units: Arc::new(formats.iter().copied().zip(params).collect()),
    };
    let optimizers = (0..plan.update_threads.max(1))
        .map(|_| Box::new(update.clone()) as Box<dyn Optimizer<StepHyper>>)
        .collect();
    let (swapper, opened) = Swapper::open(settings, optimizers).map_err(failed)?;
    let held = Held {
        swapper,
        plan,
        formats,
        step: 0,
        _daemon: daemon,
    };
    Ok((held, opened))
}
