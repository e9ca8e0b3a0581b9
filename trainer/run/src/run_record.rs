//! Reads the model of a run from its record, `run.json`.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use training_state::run::{DirError, RunDescription, RunDir, check_text};

use crate::model::{Dtype, ModelConfig};

/// Error of reading a directory as a run.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error(transparent)]
    Dir(#[from] DirError),
    #[error(
        "there is no run in {}: run.json is missing. Name the directory of a run (its train.run_dir)",
        dir.display()
    )]
    NoRun { dir: PathBuf },
    #[error(
        "the run in {} cannot be read: {message}. The run was made by another version of this program, or run.json is damaged",
        dir.display()
    )]
    Unknown { dir: PathBuf, message: String },
}

/// Record of what stays fixed for the life of a run.
pub(crate) struct RunRecord {
    pub(crate) description: RunDescription,
    pub(crate) model: ModelConfig,
    pub(crate) dtype: Dtype,
    pub(crate) tile_elems: u64,
    /// `optimizer.type`, `optimizer.moments` and `optimizer.master` of the run; `None` for the defaults.
    pub(crate) optimizer: Option<String>,
    pub(crate) moments: Option<String>,
    pub(crate) master: Option<String>,
}

impl RunRecord {
    /// Reads the record of the run in `dir`.
    ///
    /// # Errors
    /// There is no run, or its format is unknown.
    pub(crate) fn read(dir: &Path) -> Result<Self, RecordError> {
        #[derive(Deserialize)]
        struct RecordedLayout {
            model: ModelConfig,
            dtype: String,
            tile_elems: u64,
            optimizer: Option<String>,
            moments: Option<String>,
            master: Option<String>,
        }
        check_text(dir)?;
        let description = RunDir::described(dir)?.ok_or_else(|| RecordError::NoRun {
            dir: dir.to_owned(),
        })?;
        let unknown = |message: String| RecordError::Unknown {
            dir: dir.to_owned(),
            message,
        };
        let layout: RecordedLayout = serde_json::from_value(description.layout.clone())
            .map_err(|error| unknown(error.to_string()))?;
        let dtype = Dtype::parse(&layout.dtype)
            .ok_or_else(|| unknown(format!("its number type is {}", layout.dtype)))?;
        Ok(Self {
            description,
            model: layout.model,
            dtype,
            tile_elems: layout.tile_elems,
            optimizer: layout.optimizer,
            moments: layout.moments,
            master: layout.master,
        })
    }
}
