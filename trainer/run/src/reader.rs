//! Reads a run tile by tile from its directory: its newest state or a checkpoint. One process reads what any
//! number of ranks wrote.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::config::{self, Durability, Fraction, ResidentFraction, RunSettings, SettingsError};
use crate::model::Dtype;
use crate::open::{RunError, SHARED_STORE};
use crate::run_record::{RecordError, RunRecord};
use crate::run_state_reader::RunStateReader;
use training_state::run::{CheckpointName, STORE_IN_DIR, STORE_IN_PLACE, resolved};

/// Reader of a run's tiles.
pub(crate) struct RunReader {
    /// The run's directory without symbolic links.
    pub(crate) dir: PathBuf,
    pub(crate) record: RunRecord,
    pub(crate) tiles: RunStateReader,
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
        let settings =
            settings(dir, &record, checkpoint.is_none()).map_err(|error| RecordError::Unknown {
                dir: dir.clone(),
                message: error.to_string(),
            })?;
        Ok(Self {
            tiles: RunStateReader::open(settings, checkpoint)?,
            dir: dir.clone(),
            record,
        })
    }
}

/// Reconstructs the settings of a run from its record, as far as reading tiles needs them: from its store, or from a checkpoint, which
/// another machine than that of the store may have.
fn settings(
    dir: &Path,
    record: &RunRecord,
    reads_store: bool,
) -> Result<RunSettings, SettingsError> {
    let description = &record.description;
    let in_dir = !reads_store || description.store == STORE_IN_DIR;
    let shared = !in_dir && description.store.starts_with(SHARED_STORE);
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
        "optimizer": {"type": record.optimizer, "moments": record.moments, "master": record.master},
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
    settings.placement.gpu_resident_fraction = ResidentFraction::Fixed(Fraction::NONE);
    if !in_dir && description.store.ends_with(STORE_IN_PLACE) {
        settings.offload.durability = Durability::None;
    }
    Ok(settings)
}
