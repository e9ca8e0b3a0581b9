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
pub(super) fn trained_with(settings: &RunSettings, on_gpu: bool) -> Value {
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
        "dropout": settings.dropout.to_string(),
    });
    // Runs that are older than these settings have none.
    if settings.train.matmuls != Matmuls::InDtype {
        with["matmuls"] = lines["train"]["matmuls"].clone();
    }
    if settings.train.mlp_chunks > 1 {
        with["mlp_chunks"] = lines["train"]["mlp_chunks"].clone();
    }
    if !settings.train.deterministic {
        with["deterministic"] = false.into();
    }
    // torch divides the sums of a product among the threads of a CPU; what a GPU computes does not depend on them.
    if !on_gpu {
        with["threads"] = settings.train.threads.into();
    }
    with
}

#[cfg(test)]
mod tests {
    use super::*;
    use training_state::run::differences;

    #[test]
    fn what_changes_the_bits_of_products_is_named_and_runs_before_these_settings_had_the_defaults()
    {
        let with = |train: Value| {
            let tree = json!({
                "train_micro_batch_size_per_gpu": 1,
                "model": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
                "data": {"files": ["text"]},
                "train": train,
            });
            let mut tree = tree;
            tree["train"]["steps"] = json!(1);
            tree["train"]["seq_len"] = json!(16);
            trained_with(&crate::config::check(tree, "test", None).unwrap(), true)
        };
        let before = with(json!({"matmuls": "dtype", "mlp_chunks": 1, "deterministic": true}));
        assert_eq!(before, with(json!({})));
        for (key, value, now) in [
            ("matmuls", json!("fp8"), "fp8"),
            ("mlp_chunks", json!(2), "2"),
            ("deterministic", json!(false), "false"),
        ] {
            assert!(before.get(key).is_none());
            let changes = differences(&before, &with(json!({key: value})));
            let named: Vec<(&str, &str)> = (changes.iter())
                .map(|change| (change.what.as_str(), change.now.as_str()))
                .collect();
            assert_eq!(named, [(&*format!("train.{key}"), now)]);
        }
    }
}
