//! Resolved settings under the keys of a run file.

use serde_json::{Map, Value, json};

use training_settings::keys::join;

use super::{OptimizerKind, RunSettings};

impl RunSettings {
    /// Returns lines `key = value` that make a run file with these settings: the given ones, and the defaults that
    /// apply to the rest. A number of epochs is replaced by the number of steps.
    pub fn written(&self) -> Vec<String> {
        let mut tree = serde_json::to_value(&self.unresolved.config).expect("plain data");
        let own = serde_json::to_value(self).expect("plain data");
        let optimizer = &self.optimizer;
        let placement = &self.placement;
        let mut defaults = json!({
            "train_micro_batch_size_per_gpu": self.batch.micro_batch,
            "gradient_accumulation_steps": self.batch.micro_batches,
            "gradient_clipping": self.gradient_clipping,
            "bf16": {"enabled": self.dtype == crate::model::Dtype::Bf16},
            "optimizer": {"type": optimizer.kind.word(), "params": {
                "lr": optimizer.lr, "betas": optimizer.betas, "eps": optimizer.eps, "weight_decay": optimizer.weight_decay,
            }, "moments": optimizer.moments.word(), "master": optimizer.master.word()},
            "zero_optimization": {
                "stage": own["placement"]["stage"],
                "offload_param": {"device": placement.param.word()},
                "offload_optimizer": {"device": placement.optimizer.word()},
            },
            "data": own["data"],
            "train": own["train"],
            "offload": own["offload"],
        });
        // Written in another form above, or derived from other settings at each start.
        for key in ["epochs", "stop_after"] {
            remove(&mut defaults, "train", key);
        }
        defaults["train"]["eval_every"] = self.train.eval_every.written();
        defaults["train"]["checkpoint_every"] = self.train.checkpoint_every.written();
        if optimizer.kind == OptimizerKind::Lion {
            remove(&mut defaults["optimizer"], "params", "eps");
        }
        if let Some(muon) = &optimizer.muon {
            let params = &mut defaults["optimizer"]["params"];
            params["muon_lr"] = optimizer.lr.into();
            params["adam_lr"] = muon.adam_lr.into();
            params["momentum"] = muon.momentum.into();
            params["nesterov"] = muon.nesterov.into();
            params["ns_steps"] = muon.ns_steps.into();
            params["ns_coefficients"] = muon.ns_coefficients.to_vec().into();
            params["adjust_lr_fn"] = muon.adjust_lr_fn.word().into();
        }
        if !placement.has_store() {
            for key in ["engine", "durability", "commit_every"] {
                remove(&mut defaults, "offload", key);
            }
        }
        if self.offload.socket.is_some() {
            remove(&mut defaults, "offload", "engine");
        }
        defaults["train"]["sequence_parallel"] = self.batch.sequence_ranks.into();
        remove(&mut tree, "train", "epochs");
        fill(&mut tree, &defaults);
        tree["train"]["steps"] = self.train.steps.into();
        let mut lines = Vec::new();
        walk("", &tree, &mut lines);
        lines
    }
}

fn remove(tree: &mut Value, table: &str, key: &str) {
    if let Some(table) = tree[table].as_object_mut() {
        table.remove(key);
    }
}

/// Adds what `tree` lacks from `defaults`.
fn fill(tree: &mut Value, defaults: &Value) {
    match (&mut *tree, defaults) {
        (Value::Object(tree), Value::Object(defaults)) => {
            for (key, default) in defaults {
                fill(tree.entry(key).or_insert(Value::Null), default);
            }
        }
        (Value::Null, default) => *tree = default.clone(),
        _ => {}
    }
}

/// Writes a line for each value.
fn walk(path: &str, value: &Value, lines: &mut Vec<String>) {
    match value {
        Value::Null => {}
        Value::Object(table) => each(path, table, lines),
        value => lines.push(format!("{path} = {}", inline(value))),
    }
}

/// Formats a value as TOML on one line. JSON's values are TOML's, except for tables and null.
fn inline(value: &Value) -> String {
    match value {
        Value::Array(values) => {
            let values: Vec<String> = values.iter().map(inline).collect();
            format!("[{}]", values.join(","))
        }
        Value::Object(table) => {
            let set = table.iter().filter(|(_, value)| !value.is_null());
            let pairs: Vec<String> = set
                .map(|(key, value)| format!("{key} = {}", inline(value)))
                .collect();
            format!("{{ {} }}", pairs.join(", "))
        }
        value => value.to_string(),
    }
}

fn each(path: &str, table: &Map<String, Value>, lines: &mut Vec<String>) {
    for (key, value) in table {
        walk(&join(path, key), value, lines);
    }
}
