//! The trainer's plan of a step: its bytes and bound.

use std::path::PathBuf;

use anyhow::{Context, Result};
use trainer::with_torch::ask_torch;
use training_run::config::{self, Source};
use training_run::dry_run::DryRun;
use training_run::plan::{Hardware, Overrides, Place, Plan, Question, RunLength, read_model};

use super::{OtherMachine, PlannedMachine};
use crate::trial::Trial;

/// Tokens of the run of a model alone: those of `trainer plan` without --tokens.
const TOKENS: u64 = 1_000_000_000;

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

    fn overrides(&self) -> Overrides {
        Overrides {
            host_memory_bytes: self.machine.host_memory.map(|memory| memory.0),
            gpu_memory_bytes: self.machine.gpu_memory,
            cores: self.machine.cores,
            read_bytes_per_s: Some(self.read_bytes_per_s),
            write_bytes_per_s: Some(self.write_bytes_per_s),
            tflops: self.tflops,
            ..Overrides::default()
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
    pub(crate) wall: &'static str,
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

impl Subject {
    /// Plans a step, as `trainer plan` does.
    ///
    /// # Errors
    /// The files cannot be read, or the settings are refused.
    pub(crate) fn plan(&self, given: &PlannerInput) -> Result<PlannedStep> {
        let overrides = given.overrides();
        let plan = match self {
            Self::Run { file, sets } => {
                let source = Source {
                    run: Some(file.clone()),
                    deepspeed: None,
                    sets: sets.clone(),
                };
                let planned = || -> Result<Plan> {
                    let settings = config::read(&source, None)?;
                    Ok(DryRun::new(settings, 1, &overrides, ask_torch)?.plan?)
                };
                planned().with_context(|| format!("planning {}", file.display()))?
            }
            Self::Model {
                config,
                seq_len,
                micro_batch,
                accumulation,
            } => {
                let question = Question {
                    seq_len: *seq_len,
                    micro_batch: *micro_batch,
                    micro_batches: *accumulation,
                    fp32: false,
                    ranks: 1,
                    length: RunLength::Tokens(TOKENS),
                };
                let settings = question.settings(&read_model(config)?, &[])?;
                let hardware = Hardware::new(&settings, &overrides, ask_torch);
                Place::Drives.plan(&settings, &hardware)?
            }
        };
        Ok(PlannedStep::from(&plan))
    }
}

impl From<&Plan> for PlannedStep {
    fn from(plan: &Plan) -> Self {
        Self {
            parameters: plan.params_count as f64,
            tokens: plan.tokens as f64,
            micro_batches: plan.micro_batches as f64,
            read_bytes: plan.node_bytes.read_bytes(),
            written_bytes: plan.node_bytes.written_bytes,
            step_s: plan.bound.s,
            wall: plan.bound.wall.word(),
            compute_s: plan.compute_s(),
            device_bytes: plan.device_bytes(),
            fits: plan.problems().is_empty(),
            host_bytes: (plan.host_bytes() * u64::from(plan.local_ranks)) as f64,
            machine: PlannedMachine::from(&plan.hardware),
        }
    }
}
