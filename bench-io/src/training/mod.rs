//! A training step on 1 to N drives: its bytes and time, for DeepSpeed's byte counts and for the trainer's.
//!
//! ```text
//!   rates of drives ─┬─▶ DeepSpeedStep                                   predicted
//!                    ├─▶ the plan of `training-run`                      predicted
//!                    └─▶ `trainer train` on rate-limited drives (--run)         measured
//! ```

mod deepspeed;
mod machine;
mod planner;
mod trial;

use std::fmt;

use offload_support::units::{ApproxRate, CountOf};
use serde::Serialize;

use self::machine::MachineDescription;
use crate::report::About;

pub(crate) use deepspeed::DeepSpeedStep;
pub(crate) use machine::{OtherMachine, PlannedMachine};
pub(crate) use planner::{PlannedStep, PlannerInput, Subject};
pub(crate) use trial::{StepMedians, Trainer, TrialPlan, run};

/// Results for one number of drives.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TrainingRow {
    pub(crate) drives: u32,
    /// Rate of all drives, both directions at once.
    pub(crate) read_bytes_per_s: f64,
    pub(crate) write_bytes_per_s: f64,
    pub(crate) deepspeed: DeepSpeedStep,
    pub(crate) ours: PlannedStep,
    /// Measurement of the rates, if they were measured.
    pub(crate) drives_measured: Option<crate::trial::Trial>,
    /// With `--run`.
    pub(crate) measured: Option<StepMedians>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct TrainingReport {
    /// The report's devices are the measured ones; none if the rates are given.
    #[serde(flatten)]
    pub(crate) about: About<TrainingSettings>,
    /// Origin of the rates.
    pub(crate) rates: String,
    pub(crate) rows: Vec<TrainingRow>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct TrainingSettings {
    /// A run file or a model's config.json, as text: JSON cannot contain other paths.
    pub(crate) subject: String,
    /// Settings that override the run file.
    pub(crate) sets: Vec<String>,
    /// For a model alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seq_len: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) micro_batch: Option<u64>,
    pub(crate) accumulation: Option<u64>,
    /// Given compute of a process.
    pub(crate) tflops: Option<f64>,
    /// Given properties of the planned machine.
    #[serde(flatten)]
    pub(crate) machine: OtherMachine,
    /// Steps of each run, with `--run`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) steps: Option<u64>,
}

impl TrainingRow {
    /// TFLOPS at 6 operations a parameter and token.
    fn tflops(&self, step_s: f64) -> f64 {
        6.0 * self.ours.parameters * self.ours.tokens / step_s / 1e12
    }
}

impl TrainingReport {
    /// Of what step it is, and on what machine, in a few lines.
    pub(crate) fn description(&self) -> Vec<String> {
        let settings = &self.about.settings;
        let first = self.rows.first().into_iter();
        let lines = first.flat_map(|row| {
            let step = format!("{}: {}", settings.subject, step_line(&row.ours));
            [
                step,
                MachineDescription(&row.ours.machine, &settings.machine).to_string(),
            ]
        });
        lines.collect()
    }
}

impl fmt::Display for TrainingReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(first) = self.rows.first() else {
            return write!(f, "{}", self.about);
        };
        let gb = |bytes: f64| format!("{:.3} GB", bytes / 1e9);
        writeln!(f, "{HEAD}")?;
        for row in &self.rows {
            let both = |step_s: f64| format!("{step_s:.3} s, {}", Flops(row.tflops(step_s)));
            let measured = row.measured.as_ref().map_or_else(
                || " | | ".into(),
                |trial| {
                    format!(
                        "{} | {:.1} % | {} + {}",
                        both(trial.step_s),
                        100.0 * row.ours.step_s / trial.step_s,
                        gb(trial.read_bytes),
                        gb(trial.written_bytes)
                    )
                },
            );
            writeln!(
                f,
                "| {} | {} + {} | {:.3} s | {:.3} s | {} | {} | {} | {measured} |",
                row.drives,
                ApproxRate(row.read_bytes_per_s),
                ApproxRate(row.write_bytes_per_s),
                row.ours.compute_s,
                row.deepspeed.bound_s,
                both(row.deepspeed.step_s),
                both(row.ours.step_s),
                row.ours.wall
            )?;
        }
        let (ours, theirs) = (&first.ours, &first.deepspeed);
        if self.rows.iter().any(|row| row.measured.is_some()) {
            writeln!(f, "\n{COMPUTING}")?;
        }
        writeln!(f, "\n{}", step_line(ours))?;
        writeln!(
            f,
            "bytes per step: DeepSpeed {} read, {} written; ours {} read, {} written",
            gb(theirs.read_bytes),
            gb(theirs.written_bytes),
            gb(ours.read_bytes),
            gb(ours.written_bytes)
        )?;
        writeln!(
            f,
            "{}",
            MachineDescription(&ours.machine, &self.about.settings.machine)
        )?;
        writeln!(f, "rates: {}", self.rates)?;
        write!(f, "{}", self.about)
    }
}

/// Note on predictions that use the measured compute time.
const COMPUTING: &str = "\
all predictions of a row use the compute time measured in its run, so they predict what the drives add to it";

const HEAD: &str = "\
| drives | read + written | computing | DeepSpeed's bound | DeepSpeed, predicted | ours, predicted (the bound) | bottleneck | ours, measured | of the bound | measured bytes read + written |
|---|---|---|---|---|---|---|---|---|---|";

/// A number of operations a second in TFLOPS.
struct Flops(f64);

impl fmt::Display for Flops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            tflops if tflops >= 0.1 => write!(f, "{tflops:.1} TFLOPS"),
            tflops => write!(f, "{:.2} GFLOPS", tflops * 1e3),
        }
    }
}

/// Describes a step's work.
fn step_line(ours: &PlannedStep) -> String {
    format!(
        "{:.1} M parameters, {} tokens per step in {}",
        ours.parameters / 1e6,
        ours.tokens,
        CountOf(ours.micro_batches, "micro-batch")
    )
}
