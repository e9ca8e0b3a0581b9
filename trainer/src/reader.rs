//! Reads a run tile by tile from its directory: its newest state or a checkpoint. One process reads what any
//! number of ranks wrote.

use std::path::{Path, PathBuf};

use kernels::adamw::TileFormat;
use serde_json::{Value, json};
use swapper::TileVisitor;

use crate::config::{self, Durability, Fraction, ResidentFraction, RunSettings, SettingsError};
use crate::model::{Dtype, ModelConfig, UnitLayout};
use crate::open::{IN_PLACE, RunError, SHARED_STORE, STORE_IN_DIR};
use crate::run_record::{RecordError, RunRecord};
use crate::run_state_reader::RunStateReader;
use training_state::run::{CheckpointName, resolved};

/// Reader of a run's tiles.
pub(crate) struct RunReader {
    pub(crate) model: ModelConfig,
    pub(crate) units: Vec<UnitLayout>,
    pub(crate) dtype: Dtype,
    pub(crate) format: TileFormat,
    /// Step of the state that is read.
    pub(crate) step: u64,
    /// The run's directory without symbolic links.
    pub(crate) dir: PathBuf,
    tiles: RunStateReader,
}

impl RunReader {
    /// Opens the run in `dir` at its newest state, or at `checkpoint`.
    ///
    /// # Errors
    /// There is no run, or another process uses it; the state does not exist; the store or checkpoint cannot
    /// be read.
    pub(crate) fn open(dir: &Path, checkpoint: Option<CheckpointName>) -> Result<Self, RunError> {
        let dir = &resolved(dir);
        let record = RunRecord::read(dir)?;
        let settings = settings(dir, &record).map_err(|error| RecordError::Unknown {
            dir: dir.clone(),
            message: error.to_string(),
        })?;
        let tiles = RunStateReader::open(settings, checkpoint)?;
        Ok(Self {
            model: record.model,
            dtype: record.dtype,
            units: tiles.units.clone(),
            format: tiles.format,
            step: tiles.state.step,
            dir: dir.clone(),
            tiles,
        })
    }

    /// Calls `see` with the parameters and optimizer state of each range, in the order of units and elements.
    ///
    /// # Errors
    /// The backend fails.
    pub(crate) fn visit(&mut self, see: &mut TileVisitor) -> Result<(), RunError> {
        self.tiles.visit(see)
    }

    /// Closes the run.
    ///
    /// # Errors
    /// The backend fails.
    pub(crate) fn close(self) -> Result<(), RunError> {
        self.tiles.close()
    }
}

/// Reconstructs the settings of a run from its record, as far as reading tiles needs them.
fn settings(dir: &Path, record: &RunRecord) -> Result<RunSettings, SettingsError> {
    let description = &record.description;
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
        // A placeholder, which the run's own model replaces.
        "model": {
            "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1
        },
        "data": {"files": ["/dev/null"]},
        "optimizer": {"type": record.optimizer, "moments": record.moments},
        "train": {"steps": 1, "seq_len": 1, "run_dir": dir},
        "offload": {
            "socket": if shared { json!(description.socket) } else { Value::Null },
            "tile_elems": record.tile_elems,
        },
        "bf16": {"enabled": record.dtype == Dtype::Bf16},
        "fp16": {"enabled": record.dtype == Dtype::Fp16},
    });
    let mut settings = config::check(tree, "run", Some(1))?;
    settings.model = record.model.clone();
    // Tiles pass through; none stay in memory.
    settings.placement.resident_fraction = ResidentFraction::Fixed(Fraction::NONE);
    if description.store.ends_with(IN_PLACE) {
        settings.offload.durability = Durability::None;
    }
    Ok(settings)
}
