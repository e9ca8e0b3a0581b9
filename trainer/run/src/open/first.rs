//! Initial weights of a fresh run: random, or from a model's files or another run.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{CopyWeights, RunError};
use crate::config::{FirstWeights, RunSettings};
use crate::model::{ModelConfig, UnitLayout, init};
use crate::weights::{Weights, WeightsError};
use training_state::run::first_weights_dir;

/// Origin of the initial weights in a `run.json` that was rebuilt.
pub(super) const NOT_KNOWN: &str = "not known";

/// Initial weights, found and checked.
pub(super) enum InitialWeights {
    /// Random numbers with this seed and standard deviation.
    Random { seed: u64, range: f64 },
    /// Weights in files.
    Files(Weights),
    /// Weights of the run in `from`. The step is known once they have been read.
    Run {
        from: PathBuf,
        read: Option<(u64, Weights)>,
    },
}

impl InitialWeights {
    /// Finds the initial weights that the settings name.
    ///
    /// # Errors
    /// The weights are missing, incomplete, or belong to another model. The caller ignores the error when a
    /// run resumes.
    pub(super) fn find(settings: &RunSettings) -> Result<Self, WeightsError> {
        match (&settings.first_weights, &settings.model_dir) {
            (FirstWeights::Files, Some(dir)) => {
                Weights::open(dir, &settings.model).map(Self::Files)
            }
            (FirstWeights::Files, None) => unreachable!("weights in files have a directory"),
            (FirstWeights::Run(from), _) => Ok(Self::Run {
                from: from.clone(),
                read: None,
            }),
            (FirstWeights::Random, _) => Ok(Self::Random {
                seed: settings.train.seed,
                range: settings.model.initializer_range,
            }),
        }
    }

    /// Identifies the weights in the run's record. Null for random weights: their seed is in the model's
    /// settings.
    pub(super) fn identity(&self) -> Value {
        match self {
            Self::Random { .. } => Value::Null,
            Self::Files(weights) => weights.identity(),
            Self::Run { from, read } => {
                json!({"run": from, "step": read.as_ref().map(|(step, _)| step)})
            }
        }
    }

    /// Returns a note if a resumed run started with the weights recorded in `was` and the settings now name
    /// others.
    pub(super) fn note(&self, was: &Value) -> Option<String> {
        let Self::Files(weights) = self else {
            return None;
        };
        let now = weights.identity();
        (was != NOT_KNOWN && was["files"] != now["files"]).then(|| {
            format!(
                "note: the run resumes with its own weights; it did not start with those in {} (--fresh starts again with them)",
                weights.dir().display()
            )
        })
    }

    /// Names the weights in the console line of a fresh run.
    pub(super) fn words(&self) -> String {
        match self {
            Self::Random { .. } => "random weights".into(),
            Self::Run { from, read } => {
                let step = read.as_ref().map_or(0, |(step, _)| *step);
                format!("the weights of step {step} of {}", from.display())
            }
            Self::Files(weights) => format!("the weights in {}", weights.dir().display()),
        }
    }

    /// Returns the weights of elements `elems` of `unit`.
    ///
    /// # Errors
    /// A file cannot be read, or holds a value that cannot be trained.
    pub(super) fn fill(
        &self,
        layout: &UnitLayout,
        unit: usize,
        elems: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), WeightsError> {
        match self {
            Self::Random { seed, range } => init::fill(layout, unit, *seed, *range, elems, out),
            Self::Files(weights) => weights.fill(unit, elems, out)?,
            Self::Run { read, .. } => {
                let (_, weights) = read
                    .as_ref()
                    .expect("the other run's weights are read before the tiles are opened");
                weights.fill(unit, elems, out)?;
            }
        }
        Ok(())
    }
}

/// Exact fp32 copy of another run's weights, kept in files during a start. The other run may use another tile
/// size, and each rank reads only its own part. Takes 4 bytes a parameter, where the whole state takes 12 to
/// 16.
pub(super) struct StagedWeights {
    dir: PathBuf,
}

impl StagedWeights {
    /// Staged weights of the run in `run_dir`; they need not exist yet.
    pub(super) fn in_run_dir(run_dir: &Path) -> Self {
        Self {
            dir: first_weights_dir(run_dir),
        }
    }

    /// Copies the weights of the run in `from`. Returns the step that they are from.
    ///
    /// # Errors
    /// The run cannot be read, or the file system has too little space.
    pub(super) fn fill(&self, from: &Path, copy: CopyWeights<'_>) -> Result<u64, RunError> {
        self.remove()?;
        fs::create_dir(&self.dir).map_err(WeightsError::io("make the directory", &self.dir))?;
        copy(from, &self.dir)
    }

    /// Opens the staged weights.
    pub(super) fn open(&self, model: &ModelConfig) -> Result<Weights, WeightsError> {
        Weights::open(&self.dir, model)
    }

    /// Removes the staged weights if there are any.
    ///
    /// # Errors
    /// The directory cannot be removed.
    pub(super) fn remove(&self) -> Result<(), WeightsError> {
        match fs::remove_dir_all(&self.dir) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(WeightsError::io("remove", &self.dir)(error))
            }
            _ => Ok(()),
        }
    }
}
