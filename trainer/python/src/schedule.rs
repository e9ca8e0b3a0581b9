//! DeepSpeed's learning-rate schedules and its loss scale, which the native trainer has too.

use pyo3::prelude::*;
use training_state::learning_rate::{DEEPSPEED_SCHEDULERS, LrSchedule, betas, learning_rate};
use training_state::overflow::{OverflowPolicy, OverflowState};

use crate::errors::Error;

fn parse(schedule: &str) -> PyResult<LrSchedule> {
    serde_json::from_str(schedule).map_err(|error| Error::new_err(format!("scheduler: {error}")))
}

/// DeepSpeed's schedulers, each with the names of its parameters.
#[pyfunction]
pub(crate) fn deepspeed_schedulers() -> Vec<(&'static str, Vec<&'static str>)> {
    let with_params = DEEPSPEED_SCHEDULERS.iter();
    with_params
        .map(|(name, params)| (*name, params.to_vec()))
        .collect()
}

/// Learning rate of step `step` (from 1), and the betas where the schedule sets them. `schedule` is JSON.
#[pyfunction]
#[pyo3(name = "learning_rate")]
pub(crate) fn of_step(schedule: &str, step: u64) -> PyResult<(f64, Option<[f64; 2]>)> {
    let schedule = parse(schedule)?;
    Ok((learning_rate(&schedule, step), betas(&schedule, step)))
}

/// The loss scale of fp16 training.
#[pyclass]
pub(crate) struct LossScale {
    policy: OverflowPolicy,
    state: OverflowState,
}

#[pymethods]
impl LossScale {
    /// The scale of a policy (JSON) that the settings have.
    #[new]
    fn new(policy: &str) -> PyResult<Self> {
        let policy: OverflowPolicy =
            serde_json::from_str(policy).map_err(|error| Error::new_err(error.to_string()))?;
        let state = OverflowState::new(&policy, None);
        Ok(Self { policy, state })
    }

    /// Factor of the next step's loss.
    #[getter]
    fn scale(&self) -> f64 {
        self.state.scale
    }

    /// Steps that changed no weight.
    #[getter]
    fn skipped(&self) -> u64 {
        self.state.skipped
    }

    /// Counts a step by whether its gradients are finite.
    fn step(&mut self, finite: bool) {
        let _ = self.state.step(&self.policy, finite);
    }

    fn state_dict(&self) -> String {
        serde_json::to_string(&self.state).expect("plain data")
    }

    fn load_state_dict(&mut self, state: &str) -> PyResult<()> {
        let kept =
            serde_json::from_str(state).map_err(|error| Error::new_err(error.to_string()))?;
        self.state = OverflowState::new(&self.policy, Some(kept));
        Ok(())
    }
}
