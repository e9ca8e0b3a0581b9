//! Asks `trainer plan`, which computes a step's bytes and bound.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{OtherMachine, PlannedMachine};
use crate::child;
use crate::trial::Trial;

/// The trainer's program.
#[derive(Clone, Debug)]
pub(crate) struct Trainer {
    program: PathBuf,
}

/// Subject of a plan.
#[derive(Clone, Debug)]
pub(crate) enum Subject {
    /// A run file, with settings that override it.
    Run { file: PathBuf, sets: Vec<String> },
    /// A model's config.json alone, with all state on drives.
    Model {
        config: PathBuf,
        seq_len: u64,
        micro_batch: u64,
        accumulation: u64,
    },
}

/// Rates of all drives together, compute of one process, and properties of another machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannerInput {
    pub(crate) read_bytes_per_s: f64,
    pub(crate) write_bytes_per_s: f64,
    pub(crate) tflops: Option<f64>,
    pub(crate) machine: OtherMachine,
}

impl PlannerInput {
    /// Measured rates of all drives together, both directions at once.
    pub(crate) fn measured(trial: &Trial, tflops: Option<f64>) -> Self {
        let [read_bytes_per_s, write_bytes_per_s] = trial.rates();
        Self {
            read_bytes_per_s,
            write_bytes_per_s,
            tflops,
            machine: OtherMachine::default(),
        }
    }
}

/// A planned step.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub(crate) struct PlannedStep {
    pub(crate) parameters: f64,
    pub(crate) tokens: f64,
    pub(crate) micro_batches: f64,
    pub(crate) read_bytes: f64,
    pub(crate) written_bytes: f64,
    /// The bound, which is the prediction.
    pub(crate) step_s: f64,
    pub(crate) wall: String,
    /// Compute of forward and backward alone.
    pub(crate) compute_s: f64,
    /// Space on devices.
    pub(crate) device_bytes: u64,
    /// Whether the run fits into the memory of the machine.
    pub(crate) fits: bool,
    /// Host memory of the node.
    pub(crate) host_bytes: f64,
    pub(crate) machine: PlannedMachine,
}

impl Trainer {
    /// Finds the named trainer, or the one beside this program.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn find(named: Option<&Path>) -> Result<Self> {
        let beside = std::env::current_exe()
            .ok()
            .and_then(|exe| Some(exe.parent()?.join("trainer")));
        let program = named
            .map(Path::to_owned)
            .or(beside)
            .context("a directory of this program")?;
        if !program.is_file() {
            bail!(
                "no trainer at {}: build it with `make build`, or name it with --trainer",
                program.display()
            );
        }
        Ok(Self { program })
    }

    /// A command that ends with this process.
    pub(crate) fn command(&self) -> Command {
        child::command(&self.program)
    }

    /// Makes a plan.
    ///
    /// # Errors
    /// The trainer refuses, or its output cannot be parsed.
    pub(crate) fn plan(&self, subject: &Subject, given: PlannerInput) -> Result<PlannedStep> {
        let mut command = self.command();
        command.arg("plan").arg("--json");
        match subject {
            Subject::Run { file, sets } => {
                command.arg(file);
                for set in sets {
                    command.args(["--set", set]);
                }
            }
            Subject::Model {
                config,
                seq_len,
                micro_batch,
                accumulation,
            } => {
                command.arg("--model").arg(config);
                command.args(["--seq-len", &seq_len.to_string()]);
                command.args(["--micro-batch", &micro_batch.to_string()]);
                command.args(["--accumulation", &accumulation.to_string()]);
            }
        }
        let rate = |rate: f64| format!("{:.6}GB/s", rate / 1e9);
        command.args(["--read", &rate(given.read_bytes_per_s)]);
        command.args(["--write", &rate(given.write_bytes_per_s)]);
        if let Some(tflops) = given.tflops {
            command.args(["--tflops", &format!("{tflops:.9}")]);
        }
        command.args(given.machine.words());
        let output = command
            .output()
            .with_context(|| format!("starting {}", self.program.display()))?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        if output.stdout.is_empty() {
            bail!("trainer plan: {}", stderr.trim());
        }
        let plan: Value =
            serde_json::from_slice(&output.stdout).context("parsing the output of trainer plan")?;
        planned(&plan).with_context(|| match plan["problems"].as_array() {
            Some(problems) if !problems.is_empty() => {
                format!("trainer plan refuses the run: {}", plan["problems"])
            }
            _ => format!("trainer plan: {}", stderr.trim()),
        })
    }
}

/// Reads the plan of a run, or of a model with all state on drives.
fn planned(plan: &Value) -> Result<PlannedStep> {
    let number = |value: &Value, name: &str| {
        value[name]
            .as_f64()
            .with_context(|| format!("the plan has no number `{name}`"))
    };
    let (parameters, tokens, micro_batches) = (
        number(plan, "parameters")?,
        number(plan, "tokens_per_step")?,
        number(plan, "gradient_accumulation_steps")?,
    );
    let machine = PlannedMachine::read(plan)?;
    if let Some(places) = plan["places"].as_array() {
        let drives = places.iter().find(|place| place["place"] == "drives");
        let drives = drives.context("the plan has no place `drives`")?;
        return Ok(PlannedStep {
            parameters,
            tokens,
            micro_batches,
            read_bytes: number(drives, "step_read_bytes")?,
            written_bytes: number(drives, "step_written_bytes")?,
            step_s: number(drives, "step_s")?,
            wall: drives["wall"].as_str().unwrap_or_default().to_owned(),
            compute_s: number(drives, "compute_s")?,
            device_bytes: number(drives, "device_bytes")? as u64,
            fits: drives["fits"].as_bool().unwrap_or(true),
            host_bytes: number(drives, "host_bytes")?,
            machine,
        });
    }
    let (step, bound) = (&plan["step"], &plan["bound"]);
    Ok(PlannedStep {
        parameters,
        tokens,
        micro_batches,
        read_bytes: number(step, "read_bytes")?,
        written_bytes: number(step, "written_bytes")?,
        step_s: number(bound, "s")?,
        wall: bound["wall"].as_str().unwrap_or_default().to_owned(),
        compute_s: number(bound, "forward_s")? + number(bound, "backward_s")?,
        device_bytes: number(plan, "device_bytes")? as u64,
        fits: plan["fits"].as_bool().unwrap_or(true),
        host_bytes: number(&plan["host"], "node_bytes")?,
        machine,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_of_runs_and_of_models_are_read_alike() {
        let run = serde_json::json!({
            "parameters": 100, "tokens_per_step": 10, "gradient_accumulation_steps": 2, "device_bytes": 5000, "host": {"node_bytes": 800.0},
            "hardware": {"cores": 8, "host_memory_bytes": 900, "gpu": {"memory_bytes": 70}},
            "step": {"read_bytes": 1400, "written_bytes": 1200},
            "bound": {"s": 2.0, "wall": "device writes", "forward_s": 0.5, "backward_s": 1.0},
        });
        let model = serde_json::json!({
            "parameters": 100, "tokens_per_step": 10, "gradient_accumulation_steps": 2,
            "hardware": {"cores": 8, "host_memory_bytes": 900, "gpu": {"memory_bytes": 70}},
            "places": [
                {"place": "host", "step_s": 1.0},
                {"place": "drives", "step_s": 2.0, "compute_s": 1.5, "step_read_bytes": 1400.0, "step_written_bytes": 1200.0, "device_bytes": 5000, "host_bytes": 800, "wall": "device writes"},
            ],
        });
        let (run, model) = (planned(&run).unwrap(), planned(&model).unwrap());
        assert_eq!(run, model);
        let message = planned(&serde_json::json!({"fits": false}))
            .unwrap_err()
            .to_string();
        assert!(message.contains("`parameters`"), "{message}");
    }
}
