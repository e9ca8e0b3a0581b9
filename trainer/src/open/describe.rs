//! The record of what a run is for its whole life, and the settings it is trained with now.

use std::path::Path;

use serde_json::{Value, json};

use super::RunError;
use crate::config::{Durability, RunSettings};
use crate::plan::Plan;
use training_state::run::{RunDescription, RunDir, resolved};

/// Version of the description that a store keeps with a job.
const LAYOUT_VERSION: u32 = 1;

/// Words of `run.json` for state with a shared daemon.
pub(crate) const SHARED_STORE: &str = "with the daemon of offload.socket";

/// Words of `run.json` for state in checkpoints only.
pub(crate) const STORE_IN_DIR: &str = "in the run directory";

/// Words of `run.json` that follow for a store without durability.
pub(crate) const IN_PLACE: &str = ", written in place";

/// Elements of a tile in the run that the directory holds, if it holds one.
pub(super) fn tile_elems_of(run_dir: &Path) -> Result<Option<u64>, RunError> {
    let earlier = RunDir::described(run_dir)?;
    Ok(earlier.and_then(|earlier| earlier.layout["tile_elems"].as_u64()))
}

/// The record of the run.
pub(super) fn describe(settings: &RunSettings, plan: &Plan) -> RunDescription {
    let lines: Value = serde_json::to_value(settings).expect("plain data");
    RunDescription {
        layout: json!({
            "version": LAYOUT_VERSION,
            "model": settings.model,
            "dtype": lines["dtype"],
            "tile_elems": plan.swapper.tile_elems,
        }),
        store: store_words(settings),
        files: Vec::new(),
        socket: settings.offload.socket.as_deref().map(resolved),
        first_weights: Value::Null,
        id: None,
    }
}

/// Words for where the state is kept between starts.
pub(super) fn store_words(settings: &RunSettings) -> String {
    let mut store = match (&settings.offload.socket, settings.placement.has_store()) {
        (_, false) => STORE_IN_DIR.to_owned(),
        (Some(_), true) => SHARED_STORE.to_owned(),
        (None, true) => {
            let dirs = settings.placement.nvme_paths.iter();
            let dirs: Vec<String> = dirs
                .map(|path| resolved(path).display().to_string())
                .collect();
            format!("in {}", dirs.join(", "))
        }
    };
    if settings.placement.has_store() && settings.offload.durability == Durability::None {
        store += IN_PLACE;
    }
    store
}

/// Settings that may change between two starts of a run. The text is added when it was read.
pub(super) fn trained_with(settings: &RunSettings) -> Value {
    let lines = serde_json::to_value(settings).expect("plain data");
    json!({
        "batch": lines["batch"],
        "ranks": lines["ranks"],
        "stage": lines["placement"]["stage"],
        "gradient_clipping": lines["gradient_clipping"],
        "overflow": lines["overflow"],
        "optimizer": lines["optimizer"],
        "lr": lines["lr"],
        "text": Value::Null,
        "validation_fraction": lines["data"]["validation_fraction"],
        "shuffle": lines["data"]["shuffle"],
        "seed": settings.train.seed,
    })
}
