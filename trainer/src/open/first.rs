//! What the tiles of a fresh run are filled with: random weights, or those of a model's files.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{CopyWeights, RunError};
use crate::config::{FirstWeights, RunSettings};
use crate::model::{ModelConfig, UnitLayout, init};
use crate::weights::{Weights, WeightsError};

/// Stands for the origin of first weights in a record that was made again.
pub(super) const NOT_KNOWN: &str = "not known";

/// First weights, found and checked.
pub(super) enum First {
    /// Random numbers of this seed and spread.
    Random { seed: u64, range: f64 },
    /// Weights in files.
    Files(Weights),
    /// Weights of the run in `from`, with their step once they were read.
    Run {
        from: PathBuf,
        read: Option<(u64, Weights)>,
    },
}

impl First {
    /// Looks for what the settings name.
    ///
    /// # Errors
    /// Weights that are not there, not whole, or of another model. A run that goes on does not need them.
    pub(super) fn look(settings: &RunSettings) -> Result<Self, WeightsError> {
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

    /// For the run's record: which weights these are. Nothing for random ones: the seed stands elsewhere.
    pub(super) fn identity(&self) -> Value {
        match self {
            Self::Random { .. } => Value::Null,
            Self::Files(weights) => weights.identity(),
            Self::Run { from, read } => {
                json!({"run": from, "step": read.as_ref().map(|(step, _)| step)})
            }
        }
    }

    /// A note for a run that started with the weights of the record `was` and resumes while the settings name these.
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

    /// Names the weights for the line of a fresh run.
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

    /// The weights of elements `elems` of `unit`.
    ///
    /// # Errors
    /// A file cannot be read, or holds what cannot be trained.
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

/// Another run's weights in files, exactly, for as long as a start takes: that run's tiles may be cut in another way, and each
/// rank reads only its own. 4 bytes a parameter, where the state takes 12 to 16.
pub(super) struct Staged {
    dir: PathBuf,
}

impl Staged {
    /// The staged weights of the run in `run_dir`, which need not exist.
    pub(super) fn of(run_dir: &Path) -> Self {
        Self {
            dir: run_dir.join("first-weights"),
        }
    }

    /// Brings the weights of the run in `from`. Returns the step whose result they are.
    ///
    /// # Errors
    /// The run cannot be read, or there is no space.
    pub(super) fn fill(&self, from: &Path, copy: CopyWeights<'_>) -> Result<u64, RunError> {
        self.remove()?;
        fs::create_dir(&self.dir).map_err(WeightsError::io("make the directory", &self.dir))?;
        copy(from, &self.dir)
    }

    /// Opens the staged weights.
    pub(super) fn open(&self, model: &ModelConfig) -> Result<Weights, WeightsError> {
        Weights::open(&self.dir, model)
    }

    /// Removes them, if they are there.
    ///
    /// # Errors
    /// They cannot be removed.
    pub(super) fn remove(&self) -> Result<(), WeightsError> {
        match fs::remove_dir_all(&self.dir) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(WeightsError::io("remove", &self.dir)(error))
            }
            _ => Ok(()),
        }
    }
}
