//! DeepSpeed's monitors that write files: scalars of each step for TensorBoard and as CSV, with DeepSpeed's
//! names.
//!
//! A run never reads them. When it resumes, later steps are taken back: rows of CSV files are removed, and an
//! event tells TensorBoard to discard the rest. `trainer` writes a step here before its line in `metrics.jsonl`, and again if a kill
//! left that line out.

mod csv;
mod events;

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::metrics::StepMetrics;
use csv::CsvDir;
use events::EventFile;

/// Reports of steps in addition to printed lines and `metrics.jsonl`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reports {
    /// Whether to print the parts of each step's time.
    pub wall_clock_breakdown: bool,
    /// Directory of TensorBoard's files.
    pub tensorboard: Option<PathBuf>,
    /// Directory of the CSV files.
    pub csv: Option<PathBuf>,
}

/// A monitor's file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb} {} for {monitor}: {source}", path.display())]
pub struct MonitorError {
    monitor: &'static str,
    verb: &'static str,
    path: PathBuf,
    source: std::io::Error,
}

impl MonitorError {
    /// Returns a conversion for `map_err` for the operation `verb` on `path`.
    fn from_io(
        monitor: &'static str,
        verb: &'static str,
        path: &Path,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self {
            monitor,
            verb,
            path,
            source,
        }
    }
}

/// The monitors of a run.
pub struct Monitors {
    events: Option<EventFile>,
    csv: Option<CsvDir>,
    /// Whether to report the parts of a step's time.
    breakdown: bool,
}

impl Monitors {
    /// Opens the monitors in `reports` for a run that has trained on `samples` samples.
    ///
    /// # Errors
    /// A directory or file cannot be created or read.
    pub fn open(reports: &Reports, samples: u64) -> Result<Self, MonitorError> {
        let events = reports.tensorboard.as_deref();
        let csv = reports.csv.as_deref();
        Ok(Self {
            events: events
                .map(|dir| EventFile::create(dir, samples))
                .transpose()?,
            csv: csv.map(|dir| CsvDir::open(dir, samples)).transpose()?,
            breakdown: reports.wall_clock_breakdown,
        })
    }

    /// Adds a step after which the run has trained on `samples` samples.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn step(&mut self, metrics: &StepMetrics, samples: u64) -> Result<(), MonitorError> {
        if self.events.is_none() && self.csv.is_none() {
            return Ok(());
        }
        let scalars = scalars(metrics, self.breakdown);
        if let Some(events) = &mut self.events {
            events.write(&scalars, samples)?;
        }
        if let Some(csv) = &mut self.csv {
            csv.write(&scalars, samples)?;
        }
        Ok(())
    }
}

/// Name in DeepSpeed's style, and value.
type Scalar = (&'static str, f64);

/// Scalars of a step, with the loss if it is known. DeepSpeed has no names for the norm and the validation loss.
fn scalars(metrics: &StepMetrics, breakdown: bool) -> Vec<Scalar> {
    let mut scalars = Vec::new();
    if !metrics.loss.is_nan() {
        scalars.push(("Train/Samples/train_loss", metrics.loss));
    }
    scalars.extend([
        ("Train/Samples/lr", metrics.lr),
        ("Train/Samples/grad_norm", metrics.grad_norm),
    ]);
    let loss_scale = metrics.loss_scale;
    scalars.extend(loss_scale.map(|scale| ("Train/Samples/loss_scale", scale)));
    if breakdown {
        let ms = 1e3;
        scalars.extend([
            (
                "Train/Samples/elapsed_time_ms_forward",
                metrics.forward_s * ms,
            ),
            (
                "Train/Samples/elapsed_time_ms_backward",
                metrics.backward_s * ms,
            ),
            // DeepSpeed's "step" is the time of the optimizer.
            ("Train/Samples/elapsed_time_ms_step", metrics.update_s * ms),
        ]);
    }
    let eval_loss = metrics.eval_loss;
    scalars.extend(eval_loss.map(|loss| ("Eval/Samples/eval_loss", loss)));
    let perplexity = metrics.eval_perplexity;
    scalars.extend(perplexity.map(|perplexity| ("Eval/Samples/eval_perplexity", perplexity)));
    scalars.extend(metrics.epoch.map(|epoch| ("Train/Samples/epoch", epoch)));
    scalars
}
