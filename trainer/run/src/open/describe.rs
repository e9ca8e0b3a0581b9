//! Builds the record of what stays fixed for the life of a run, and of the settings that may change between
//! starts.

use serde_json::{Value, json};

use crate::computation::Matmuls;
use crate::config::{Durability, OptimizerKind, RunSettings};
use crate::plan::Plan;
use training_state::run::{RunDescription, STORE_IN_DIR, STORE_IN_PLACE, resolved};

/// Version of the job layout that the store keeps beside a job.
const LAYOUT_VERSION: u32 = 1;

/// `store` value in `run.json` for state held by a shared daemon.
pub(crate) const SHARED_STORE: &str = "with the daemon of offload.socket";

/// Builds the description of a run.
pub(super) fn describe(settings: &RunSettings, plan: &Plan) -> RunDescription {
    let lines: Value = serde_json::to_value(settings).expect("plain data");
    let mut layout = json!({
        "version": LAYOUT_VERSION,
        "model": settings.model,
        "dtype": lines["dtype"],
        "tile_elems": plan.swapper.tile_elems,
    });
    if settings.optimizer.kind != OptimizerKind::AdamW {
        layout["optimizer"] = lines["optimizer"]["type"].clone();
    }
    if !settings.optimizer.moments.is_fp32() {
        layout["moments"] = lines["optimizer"]["moments"].clone();
    }
    if !settings.optimizer.master.is_fp32() {
        layout["master"] = lines["optimizer"]["master"].clone();
    }
    RunDescription {
        layout,
        store: store_words(settings),
        files: Vec::new(),
        socket: settings.offload.socket.as_deref().map(resolved),
        first_weights: Value::Null,
        id: None,
        nodes: 1,
        begun_unix_ms: 0,
    }
}

/// Describes where the state is kept between starts.
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
        store += STORE_IN_PLACE;
    }
    store
}

/// Settings that may change between two starts of a run. The data's description is added once the data has
/// been read.
pub(super) fn trained_with(settings: &RunSettings) -> Value {
    let lines = serde_json::to_value(settings).expect("plain data");
    let mut with = json!({
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
        "cross_document_attention": lines["data"]["cross_document_attention"],
        "seed": settings.train.seed,
    });
    // Runs that are older than this setting have none.
    if settings.train.matmuls != Matmuls::InDtype {
        with["matmuls"] = lines["train"]["matmuls"].clone();
    }
    with
}

#[cfg(test)]
mod tests {
    use super::*;
    use training_state::run::differences;

    #[test]
    fn other_factors_of_products_are_named_and_runs_before_this_setting_had_the_dtype() {
        let with = |matmuls: &str| {
            let tree = json!({
                "train_micro_batch_size_per_gpu": 1,
                "model": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
                "data": {"files": ["text"]},
                "train": {"steps": 1, "seq_len": 16, "matmuls": matmuls},
            });
            trained_with(&crate::config::check(tree, "test", None).unwrap())
        };
        assert!(with("dtype").get("matmuls").is_none());
        let changes = differences(&with("dtype"), &with("fp8"));
        let named: Vec<(&str, &str)> = (changes.iter())
            .map(|change| (change.what.as_str(), change.now.as_str()))
            .collect();
        assert_eq!(named, [("matmuls", "fp8")]);
    }
}
