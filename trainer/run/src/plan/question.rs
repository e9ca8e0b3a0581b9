//! Plans a hypothetical run from a model's `config.json` and the command line. Needs no data, run directory
//! or weights.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::config::{self, RunSettings, SettingsError};
use crate::model::{ConfigError, HfModel, ModelConfig};

/// Size limit of a `config.json`.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Run directory that contains no run, so that no measurements of an earlier one are found.
const NO_DIR: &str = "/dev/null";

/// Description of the hypothetical run.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    pub seq_len: u64,
    pub micro_batch: u64,
    pub micro_batches: u64,
    /// 32-bit parameters instead of 16-bit ones.
    pub fp32: bool,
    /// Number of processes, each with a GPU.
    pub ranks: u32,
    pub length: RunLength,
}

/// Length of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunLength {
    Steps(u64),
    /// In as many steps as needed for this number of tokens.
    Tokens(u64),
}

/// Error of planning a hypothetical run.
#[derive(Debug, thiserror::Error)]
pub enum QuestionError {
    #[error("cannot read the model's configuration {}: {message}", path.display())]
    Read { path: PathBuf, message: String },
    #[error("{}: {source}", path.display())]
    Config { path: PathBuf, source: ConfigError },
    #[error(
        "--seq-len {seq_len} is more than the model's max_position_embeddings = {max}: use a lower one, or a run file that raises it (docs/training.md#longer-sequences)"
    )]
    TooLong { seq_len: u64, max: usize },
    #[error(transparent)]
    Settings(#[from] SettingsError),
}

/// Reads the model at `path`: a `config.json`, or a directory with one.
///
/// # Errors
/// The file does not exist, or does not describe a supported model.
pub fn read_model(path: &Path) -> Result<ModelConfig, QuestionError> {
    let path = if path.is_dir() {
        path.join("config.json")
    } else {
        path.to_owned()
    };
    let wrong = |message: String| QuestionError::Read {
        path: path.clone(),
        message,
    };
    let unreadable = |error: std::io::Error| {
        match error.kind() {
        std::io::ErrorKind::NotFound => wrong(
            "it does not exist (the trainer downloads nothing; use `hf download NAME --local-dir DIR`)".into(),
        ),
        _ => wrong(error.to_string()),
    }
    };
    let metadata = std::fs::metadata(&path).map_err(unreadable)?;
    if !metadata.is_file() || metadata.len() > FILE_BYTES_MAX {
        return Err(wrong(
            "it is not a file, or too large for a configuration".into(),
        ));
    }
    let text = std::fs::read_to_string(&path).map_err(|error| wrong(error.to_string()))?;
    match HfModel::from_json(&text) {
        Ok(model) => Ok(model.config),
        Err(source) => Err(QuestionError::Config { path, source }),
    }
}

impl Question {
    /// Returns the settings of such a run of `model` with its state in GPU memory, with `sets` (each
    /// `key=value`) applied.
    ///
    /// # Errors
    /// The settings are invalid.
    pub fn settings(
        &self,
        model: &ModelConfig,
        sets: &[String],
    ) -> Result<RunSettings, QuestionError> {
        if self.seq_len > model.max_position_embeddings as u64 {
            return Err(QuestionError::TooLong {
                seq_len: self.seq_len,
                max: model.max_position_embeddings,
            });
        }
        let mut tree = json!({
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.micro_batches,
            "bf16": {"enabled": !self.fp32},
            "data": {"files": [NO_DIR]},
            "train": {"seq_len": self.seq_len, "run_dir": NO_DIR},
            // A placeholder with the heads of the given model, which replaces it.
            "model": {
                "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": model.heads,
                "num_key_value_heads": model.kv_heads, "head_dim": 64, "max_position_embeddings": self.seq_len.max(1),
            },
        });
        config::apply_overrides(&mut tree, sets)?;
        let given = [
            &tree["train"]["sequence_parallel"],
            &tree["sequence_parallel_size"],
        ];
        let sequence_ranks = given.iter().find_map(|count| count.as_u64()).unwrap_or(1);
        let groups = (u64::from(self.ranks) / sequence_ranks.max(1)).max(1);
        let step_tokens = (self.seq_len * self.micro_batch)
            .saturating_mul(self.micro_batches)
            .saturating_mul(groups)
            .max(1);
        let steps = match self.length {
            RunLength::Steps(steps) => steps,
            RunLength::Tokens(tokens) => tokens.div_ceil(step_tokens),
        };
        if tree["train"]["steps"].is_null() {
            tree["train"]["steps"] = steps.into();
        }
        let mut settings = config::check(tree, "plan", Some(self.ranks))?;
        settings.model = model.clone();
        Ok(settings)
    }
}
