//! What a run directory holds, read tile by tile by those who know nothing but the directory: its newest state, or one of its checkpoints.
//! Whoever wrote it, any number of ranks, one process reads it.

use std::path::{Path, PathBuf};

use kernels::adamw::Master;
use serde::Deserialize;
use serde_json::{Value, json};
use swapper::TileVisitor;

use crate::compute::Dtype;
use crate::config::{self, Durability, Fraction, ResidentFraction, RunSettings, SettingsError};
use crate::model::{ModelConfig, UnitLayout};
use crate::run::{CheckpointName, RunDescription, RunDir, resolved};
use crate::run_state_reader::RunStateReader;
use crate::train::{IN_PLACE, SHARED_STORE, STORE_IN_DIR, TrainError};

/// What `run.json` says that a reader needs.
#[derive(Deserialize)]
struct Written {
    model: ModelConfig,
    dtype: String,
    tile_elems: u64,
}

/// A run's tiles.
pub(crate) struct RunReader {
    pub(crate) model: ModelConfig,
    pub(crate) units: Vec<UnitLayout>,
    pub(crate) dtype: Dtype,
    pub(crate) master: Master,
    /// The step whose result they are.
    pub(crate) step: u64,
    /// The run's directory, links resolved.
    pub(crate) dir: PathBuf,
    tiles: RunStateReader,
}

/// The model that the run in `dir` trains.
///
/// # Errors
/// As of [`RunReader::open`], as far as the run's record says.
pub(crate) fn model_of_run(dir: &Path) -> Result<ModelConfig, TrainError> {
    described(dir).map(|(_, written)| written.model)
}

fn described(dir: &Path) -> Result<(RunDescription, Written), TrainError> {
    let description = RunDir::described(dir)?.ok_or_else(|| TrainError::NoRun {
        dir: dir.to_owned(),
    })?;
    let written = written(dir, &description)?;
    Ok((description, written))
}

fn written(dir: &Path, description: &RunDescription) -> Result<Written, TrainError> {
    let unknown = |message: String| TrainError::UnknownRun {
        dir: dir.to_owned(),
        message,
    };
    let written: Written = serde_json::from_value(description.layout.clone())
        .map_err(|error| unknown(error.to_string()))?;
    match written.dtype.as_str() {
        "fp32" | "bf16" | "fp16" => Ok(written),
        other => Err(unknown(format!("its numbers are {other}"))),
    }
}

impl RunReader {
    /// Opens the run in `dir` at its newest state, or at `checkpoint`.
    ///
    /// # Errors
    /// There is no run, or somebody works in it; it has no such state; its store or save says no.
    pub(crate) fn open(dir: &Path, checkpoint: Option<CheckpointName>) -> Result<Self, TrainError> {
        let dir = &resolved(dir);
        let (description, written) = described(dir)?;
        let settings =
            settings(dir, &description, &written).map_err(|error| TrainError::UnknownRun {
                dir: dir.clone(),
                message: error.to_string(),
            })?;
        let dtype = settings.dtype;
        let tiles = RunStateReader::open(settings, checkpoint)?;
        Ok(Self {
            model: written.model,
            dtype,
            units: tiles.units.clone(),
            master: tiles.master,
            step: tiles.state.step,
            dir: dir.clone(),
            tiles,
        })
    }

    /// Calls `see` with each range's param and state, units and elements in order.
    ///
    /// # Errors
    /// What the tiles' place says.
    pub(crate) fn visit(&mut self, see: &mut TileVisitor) -> Result<(), TrainError> {
        self.tiles.visit(see)
    }

    /// Ends in order.
    ///
    /// # Errors
    /// What the tiles' place says.
    pub(crate) fn close(self) -> Result<(), TrainError> {
        self.tiles.close()
    }
}

/// The settings of a run as far as its record has them: enough to read its tiles.
fn settings(
    dir: &Path,
    description: &RunDescription,
    written: &Written,
) -> Result<RunSettings, SettingsError> {
    let in_dir = description.store == STORE_IN_DIR;
    let shared = description.store.starts_with(SHARED_STORE);
    let nvme = if shared {
        json!({"device": "nvme"})
    } else {
        let dirs: Vec<&Path> = description
            .files
            .iter()
            .filter_map(|file| file.parent())
            .collect();
        json!({"device": "nvme", "nvme_path": dirs})
    };
    let tree = json!({
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": if in_dir {
            json!({"stage": 3})
        } else {
            json!({"stage": 3, "offload_param": nvme, "offload_optimizer": nvme})
        },
        // Not read: the run's own takes its place.
        "model": {
            "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1
        },
        "data": {"files": ["/dev/null"]},
        "train": {"steps": 1, "seq_len": 1, "run_dir": dir},
        "offload": {
            "socket": if shared { json!(description.socket) } else { Value::Null },
            "tile_elems": written.tile_elems,
        },
        "bf16": {"enabled": written.dtype == "bf16"},
        "fp16": {"enabled": written.dtype == "fp16"},
    });
    let mut settings = config::check(tree, "run", Some(1))?;
    settings.model = written.model.clone();
    // They pass through.
    settings.placement.resident_fraction = ResidentFraction::Fixed(Fraction::NONE);
    if description.store.ends_with(IN_PLACE) {
        settings.offload.durability = Durability::None;
    }
    Ok(settings)
}
