//! What the tiles of a fresh run are filled with: random weights, or those of a model's files.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::super::TrainError;
use crate::config::{FirstWeights, RunSettings};
use crate::export::write_weights;
use crate::model::{ModelConfig, UnitLayout, init};
use crate::reader::RunReader;
use crate::weights::{Element, Weights, WeightsError};

/// In the record of a run that was made again: what its first weights were is not known.
pub(super) const NOT_KNOWN: &str = "not known";

/// As an export's.
const STAGED_SHARD_BYTES: u64 = 5_000_000_000;

/// First weights, found and checked.
pub(super) enum First {
    /// Random numbers of this seed and spread.
    Random { seed: u64, range: f64 },
    /// Those in files.
    Files(Weights),
    /// Those of the run in `from` after `step`, once they were read.
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
            (FirstWeights::Files, None) => unreachable!("files lie in a directory"),
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

    /// What to say where a run that started with the weights of the record `was` goes on while the settings name these.
    pub(super) fn note(&self, was: &Value) -> Option<String> {
        let Self::Files(weights) = self else {
            return None;
        };
        let now = weights.identity();
        (was != NOT_KNOWN && was["files"] != now["files"]).then(|| {
            format!(
                "note: the run goes on with its own weights; those in {} are not what it started with (--fresh starts with them)",
                weights.dir().display()
            )
        })
    }

    /// What a fresh run is told to have started with.
    pub(super) fn words(&self) -> String {
        match self {
            Self::Random { .. } => "fresh weights".into(),
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
                    .expect("they were read before the tiles were made");
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
    /// Those of the run in `run_dir`, which need not be there.
    pub(super) fn of(run_dir: &Path) -> Self {
        Self {
            dir: run_dir.join("first-weights"),
        }
    }

    /// Reads the weights of the run in `from`. Answers the step whose result they are.
    ///
    /// # Errors
    /// That run cannot be read; there is no room.
    pub(super) fn fill(&self, from: &Path) -> Result<u64, TrainError> {
        self.remove()?;
        fs::create_dir(&self.dir).map_err(WeightsError::io("make the directory", &self.dir))?;
        let mut reader = RunReader::open(from, None)?;
        let what = "reading the other run's weights";
        write_weights(
            &mut reader,
            &self.dir,
            Element::Fp32,
            STAGED_SHARD_BYTES,
            what,
        )
        .map_err(|error| TrainError::FirstRun(Box::new(error)))?;
        let step = reader.step;
        reader.close()?;
        Ok(step)
    }

    /// They are open: their files can go when they are closed.
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
