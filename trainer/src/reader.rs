//! What a run folder holds, read tile by tile by those who know nothing but the folder: its newest state, or one of its saves.
//! Whoever wrote it, any number of ranks, one process reads it.

use std::path::{Path, PathBuf};

use kernels::adamw::Master;
use serde::Deserialize;
use serde_json::{Value, json};
use swapper::See;

use crate::at_rest::AtRest;
use crate::compute::Dtype;
use crate::config::{self, Durability, ResidentShare, RunSettings, SettingsError, Share};
use crate::model::{ModelConfig, UnitLayout};
use crate::run::{RunDescription, RunFolder, SaveName, resolved};
use crate::train::{IN_PLACE, SHARED_STORE, STORE_IN_FOLDER, TrainError};

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
    /// The run's folder, links resolved.
    pub(crate) folder: PathBuf,
    tiles: AtRest,
}

/// What the run in `folder` is.
///
/// # Errors
/// There is no run, or one that this program does not know.
/// The model that the run in `folder` trains.
///
/// # Errors
/// As of [`RunReader::open`], as far as the run's record says.
pub(crate) fn model_of_run(folder: &Path) -> Result<ModelConfig, TrainError> {
    described(folder).map(|(_, written)| written.model)
}

fn described(folder: &Path) -> Result<(RunDescription, Written), TrainError> {
    let description = RunFolder::described(folder)?.ok_or_else(|| TrainError::NoRun {
        folder: folder.to_owned(),
    })?;
    let written = written(folder, &description)?;
    Ok((description, written))
}

fn written(folder: &Path, description: &RunDescription) -> Result<Written, TrainError> {
    let unknown = |message: String| TrainError::UnknownRun {
        folder: folder.to_owned(),
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
    /// Opens the run in `folder` at its newest state, or at `save`. `socket` is the daemon's, for a run that had a shared one
    /// and does not say which.
    ///
    /// # Errors
    /// There is no run, or somebody works in it; it has no such state; its store or save says no.
    pub(crate) fn open(
        folder: &Path,
        save: Option<SaveName>,
        socket: Option<&Path>,
    ) -> Result<Self, TrainError> {
        let folder = &resolved(folder);
        let (description, written) = described(folder)?;
        let settings = settings(folder, &description, &written, socket).map_err(|error| {
            TrainError::UnknownRun {
                folder: folder.clone(),
                message: error.to_string(),
            }
        })?;
        let dtype = settings.dtype;
        let tiles = AtRest::open(settings, save)?;
        Ok(Self {
            model: written.model,
            dtype,
            units: tiles.units.clone(),
            master: tiles.master,
            step: tiles.state.step,
            folder: folder.clone(),
            tiles,
        })
    }

    /// Calls `see` with each range's param and state, units and elements in order.
    ///
    /// # Errors
    /// What the tiles' place says.
    pub(crate) fn visit(&mut self, see: &mut See) -> Result<(), TrainError> {
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
    folder: &Path,
    description: &RunDescription,
    written: &Written,
    socket: Option<&Path>,
) -> Result<RunSettings, SettingsError> {
    let in_folder = description.store == STORE_IN_FOLDER;
    let shared = description.store.starts_with(SHARED_STORE);
    let nvme = if shared {
        json!({"device": "nvme"})
    } else {
        let folders: Vec<&Path> = description
            .files
            .iter()
            .filter_map(|file| file.parent())
            .collect();
        json!({"device": "nvme", "nvme_path": folders})
    };
    let socket = socket.map(PathBuf::from).or(description.socket.clone());
    let tree = json!({
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": if in_folder {
            json!({"stage": 3})
        } else {
            json!({"stage": 3, "offload_param": nvme, "offload_optimizer": nvme})
        },
        // Not read: the run's own takes its place.
        "model": {
            "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1
        },
        "data": {"files": ["/dev/null"]},
        "train": {"steps": 1, "seq_len": 1, "run_folder": folder},
        "offload": {
            "socket": if shared { json!(socket) } else { Value::Null },
            "tile_elems": written.tile_elems,
        },
        "bf16": {"enabled": written.dtype == "bf16"},
        "fp16": {"enabled": written.dtype == "fp16"},
    });
    let mut settings = config::check(tree, "run", Some(1))?;
    settings.model = written.model.clone();
    // They pass through.
    settings.placement.resident_share = ResidentShare::Share(Share::NONE);
    if description.store.ends_with(IN_PLACE) {
        settings.offload.durability = Durability::None;
    }
    Ok(settings)
}
