//! What the tiles of a fresh run are filled with: random weights, or those of a model's files.

use std::ops::Range;

use serde_json::Value;

use crate::config::{FirstWeights, RunSettings};
use crate::model::{UnitLayout, init};
use crate::weights::{Weights, WeightsError};

/// First weights, found and checked.
pub(super) enum First {
    /// Random numbers of this seed and spread.
    Random { seed: u64, range: f64 },
    /// Those in files.
    Files(Weights),
}

impl First {
    /// Looks for what the settings name.
    ///
    /// # Errors
    /// Weights that are not there, not whole, or of another model. A run that goes on does not need them.
    pub(super) fn look(settings: &RunSettings) -> Result<Self, WeightsError> {
        match (&settings.first_weights, &settings.model_folder) {
            (FirstWeights::Files, Some(folder)) => {
                Weights::open(folder, &settings.model).map(Self::Files)
            }
            (FirstWeights::Files, None) => unreachable!("files lie in a folder"),
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
        }
    }

    /// What to say where a run that started with the weights of the record `was` goes on while the settings name these.
    pub(super) fn note(&self, was: &Value) -> Option<String> {
        let Self::Files(weights) = self else {
            return None;
        };
        let now = weights.identity();
        (was["files"] != now["files"]).then(|| {
            format!(
                "note: the run goes on with its own weights; those in {} are not what it started with (--fresh starts with them)",
                weights.folder().display()
            )
        })
    }

    /// What a fresh run is told to have started with.
    pub(super) fn words(&self) -> String {
        match self {
            Self::Random { .. } => "fresh weights".into(),
            Self::Files(weights) => format!("the weights in {}", weights.folder().display()),
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
        }
        Ok(())
    }
}
