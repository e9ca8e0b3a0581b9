//! What a run's settings leave open, chosen from facts that Python knows: by the rules of `training_state::plan`.

use kernels::reduce::GradType;
use pyo3::prelude::*;
use serde::{Deserialize, Serialize};
use training_state::plan::choose::{script_gradients_stay, script_staging_bytes};
use training_state::plan::node_copy::ScriptRank;
use training_state::plan::updaters::{
    OptimizerDevice, script_cpu_updaters, script_optimizer_device,
};

use crate::errors::Error;
use crate::open::UnitPlan;

/// Bytes of parameters, moments and gradients of a trained element, from which staging follows.
const STATE_BYTES_PER_ELEM: u64 = 16;

/// What a run is and has, and what its settings say of what is chosen here, as `offloadd/_plan.py` describes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RunFacts {
    units: Vec<UnitPlan>,
    ranks: u64,
    /// Ranks of this node.
    local_ranks: usize,
    /// Processors of this node.
    cores: usize,
    /// Index of the GPU that the model computes on.
    gpu: Option<u32>,
    /// Whether it will compute on one that is not at hand.
    on_gpu: bool,
    /// Whether tiles go to drives.
    on_drives: bool,
    /// Free host memory; `None` if it is unknown, or if a quota limits the run.
    available_bytes: Option<u64>,
    resident_fraction: f64,
    /// `cpu` or `nvme`, if the settings say where gradients stay.
    gradients: Option<String>,
    /// 0 if it is to be chosen.
    staging_bytes: u64,
    optimizer_device: Option<OptimizerDevice>,
    update_threads: Option<usize>,
}

/// The chosen values, with their names in a run's plan.
#[derive(Serialize)]
struct Choices {
    gradients_fraction: f64,
    staging_bytes: u64,
    update_threads: usize,
    update_gpu: Option<u32>,
}

/// Chooses what the settings of the run that the JSON text `facts` describes leave open, as JSON.
#[pyfunction]
pub(crate) fn choices(facts: &str) -> PyResult<String> {
    let facts: RunFacts =
        serde_json::from_str(facts).map_err(|error| Error::new_err(error.to_string()))?;
    let (update_threads, update_gpu) = facts.updaters()?;
    let choices = Choices {
        gradients_fraction: facts.gradients_fraction()?,
        staging_bytes: facts.staging_bytes(),
        update_threads,
        update_gpu,
    };
    Ok(serde_json::to_string(&choices).expect("numbers are plain data"))
}

/// The bytes of a rank's part of a copy of all parameters that the ranks of each node keep, and why there is none. `units` has each unit's name
/// and its bytes on all ranks.
#[pyfunction]
pub(crate) fn node_copy(
    units: Vec<(String, u64)>,
    local_ranks: u64,
    pins: bool,
    host_bytes: u64,
    available_bytes: Option<u64>,
) -> (u64, String) {
    let rank = ScriptRank {
        local_ranks,
        pins,
        host_bytes,
        available_bytes,
    };
    match rank.copy_bytes(units) {
        Ok(bytes) => (bytes, String::new()),
        Err(why) => (0, why.to_string()),
    }
}

impl RunFacts {
    fn gradients_fraction(&self) -> PyResult<f64> {
        match self.gradients.as_deref() {
            Some("cpu") => return Ok(1.0),
            Some("nvme") => return Ok(0.0),
            Some(other) => return Err(Error::new_err(format!("gradients in {other}"))),
            None => {}
        }
        let trained = self.units.iter().filter(|unit| unit.trained);
        let bytes: u64 = trained.map(UnitPlan::grad_bytes).sum();
        let local_ranks = self.local_ranks as u64;
        let stay = script_gradients_stay(bytes / self.ranks, self.available_bytes, local_ranks);
        Ok(if stay { 1.0 } else { self.resident_fraction })
    }

    fn staging_bytes(&self) -> u64 {
        if self.staging_bytes > 0 {
            return self.staging_bytes;
        }
        let state_bytes = |unit: &UnitPlan| match unit.trained {
            true => unit.elems * STATE_BYTES_PER_ELEM,
            false => unit.elems * unit.elem_bytes as u64,
        };
        script_staging_bytes(self.units.iter().map(state_bytes).sum::<u64>() / self.ranks)
    }

    /// The threads that update on the CPU, and the GPU that updates beside or instead of them.
    fn updaters(&self) -> PyResult<(usize, Option<u32>)> {
        if !self.units.iter().any(|unit| unit.trained) {
            return Ok((1, None));
        }
        let wanted = self.optimizer_device.unwrap_or(OptimizerDevice::Auto);
        let device = script_optimizer_device(wanted, self.gpu.is_some(), self.on_drives);
        let computes_on_gpu = self.gpu.is_some() || self.on_gpu;
        if device != OptimizerDevice::Cpu && !computes_on_gpu {
            return Err(Error::new_err(format!(
                "offloadd.optimizer_device = '{}': the model does not compute on a GPU; leave it out",
                device.name()
            )));
        }
        let cores = (self.cores / self.local_ranks).max(1);
        let threads = self
            .update_threads
            .unwrap_or_else(|| script_cpu_updaters(cores, computes_on_gpu));
        Ok(match device {
            OptimizerDevice::Gpu => (0, self.gpu),
            OptimizerDevice::Cpu => (threads, None),
            OptimizerDevice::Auto | OptimizerDevice::Shared => (threads, self.gpu),
        })
    }
}

impl UnitPlan {
    fn grad_bytes(&self) -> u64 {
        let elem_bytes = match self.gradient_dtype == self.dtype {
            true => self.elem_bytes,
            false => GradType::Fp32.elem_bytes(),
        };
        self.elems * elem_bytes as u64
    }
}
