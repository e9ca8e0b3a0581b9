//! Resolves "auto" in a DeepSpeed file to what Hugging Face's Trainer fills in there, from other settings and
//! its own defaults.
//!
//! Values of the run's configuration file and of `--set` have replaced "auto" before. What is left is
//! resolved here and reported.

use serde_json::{Value, json};

use super::{is_used, join};
use crate::reader::Reader;

/// A key, the function that computes its value from all settings (`None`: the key is left out and derived
/// later), and the text that explains the choice.
type AutoKey = (&'static str, fn(&Value) -> Option<Value>, &'static str);

/// The order matters: later entries read the results of earlier ones.
pub(crate) const AUTO: &[AutoKey] = &[
    (
        "train_micro_batch_size_per_gpu",
        micro_batch,
        "8, Hugging Face's per_device_train_batch_size; derived from train_batch_size if that is given",
    ),
    (
        "gradient_accumulation_steps",
        |_| None,
        "derived from the other two sizes, or 1",
    ),
    (
        "train_batch_size",
        |_| None,
        "derived from the other two sizes and the number of ranks",
    ),
    (
        "gradient_clipping",
        |_| Some(json!(1.0)),
        "1.0, Hugging Face's max_grad_norm",
    ),
    (
        "optimizer.params.lr",
        |_| Some(json!(5e-5)),
        "5e-5, Hugging Face's learning_rate",
    ),
    (
        "optimizer.params.betas",
        |_| Some(json!([0.9, 0.999])),
        "[0.9, 0.999], Hugging Face's adam_beta1 and adam_beta2",
    ),
    (
        "optimizer.params.eps",
        |_| Some(json!(1e-8)),
        "1e-8, Hugging Face's adam_epsilon",
    ),
    (
        "optimizer.params.weight_decay",
        |_| Some(json!(0)),
        "0, Hugging Face's weight_decay",
    ),
    (
        "scheduler.params.warmup_min_lr",
        |_| Some(json!(0)),
        "0, as Hugging Face fills it in",
    ),
    (
        "scheduler.params.warmup_max_lr",
        |tree| tree.pointer("/optimizer/params/lr").cloned(),
        "optimizer.params.lr",
    ),
    (
        "scheduler.params.warmup_num_steps",
        |_| Some(json!(1)),
        "1: no warm-up, Hugging Face's warmup_steps",
    ),
    (
        "scheduler.params.total_num_steps",
        |tree| tree.pointer("/train/steps").cloned(),
        "train.steps",
    ),
    (
        "fp16.enabled",
        |_| None,
        "true where the checkpoint is in fp16, else false",
    ),
    (
        "bf16.enabled",
        |_| None,
        "true where the checkpoint is in bf16, else false",
    ),
];

/// Keys for which "auto" is a value with its own meaning, different from leaving the key out.
const AUTO_IS_A_WORD: &[&str] = &[
    "bf16.enabled",
    "fp16.enabled",
    "offload.engine",
    "offload.resident_fraction",
    "offload.gpu_resident_fraction",
    "offload.optimizer_device",
    "train.device",
    "train.activation_checkpointing",
    "train.attention",
];

/// Resolves every "auto" in `tree`. Adds the choices to `notes`, except those that the plan shows.
pub(crate) fn resolve(tree: &mut Value, notes: &mut Vec<String>) {
    for (key, choose, what) in AUTO {
        let pointer = format!("/{}", key.replace('.', "/"));
        if !is_auto(tree, &pointer) || AUTO_IS_A_WORD.contains(key) {
            continue;
        }
        notes.push(format!("{key} is \"auto\": {what}"));
        let chosen = choose(tree).filter(|chosen| chosen.as_str() != Some("auto"));
        *tree
            .pointer_mut(&pointer)
            .expect("the value was read above") = chosen.unwrap_or(Value::Null);
    }
    leave_out("", tree, notes);
}

/// Returns whether `tree` contains an "auto" that Hugging Face's Trainer fills in.
pub(crate) fn is_asked_for(tree: &Value) -> bool {
    let mut keys = AUTO.iter().map(|(key, ..)| key.replace('.', "/"));
    keys.any(|key| is_auto(tree, &format!("/{key}")))
}

fn is_auto(tree: &Value, pointer: &str) -> bool {
    tree.pointer(pointer).and_then(Value::as_str) == Some("auto")
}

/// The micro-batch size; left out if `train_batch_size` determines it.
fn micro_batch(tree: &Value) -> Option<Value> {
    let whole = tree.get("train_batch_size").is_some_and(Value::is_number);
    (!whole).then(|| json!(8))
}

/// Removes every "auto": the script knows the values, or the defaults apply.
pub(crate) fn leave_all_out(tree: &mut Value) {
    let Value::Object(table) = tree else { return };
    table.retain(|_, value| value.as_str() != Some("auto"));
    table.values_mut().for_each(leave_all_out);
}

/// Removes keys that are still "auto".
fn leave_out(prefix: &str, tree: &mut Value, notes: &mut Vec<String>) {
    let Value::Object(table) = tree else { return };
    table.retain(|key, value| {
        let path = join(prefix, key);
        let auto = value.as_str() == Some("auto") && !AUTO_IS_A_WORD.contains(&path.as_str());
        // Omitted keys of `offload` are chosen and shown by the plan. Keys without effect were named before.
        if auto && !path.starts_with("offload.") && is_used(&path, Reader::Trainer) {
            notes.push(format!("{path} is \"auto\": using the default"));
        }
        leave_out(&path, value, notes);
        !auto
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_that_may_be_auto_is_read() {
        for (key, ..) in AUTO {
            assert!(is_used(key, Reader::Trainer), "{key}");
        }
    }

    #[test]
    fn what_is_auto_becomes_what_hugging_face_fills_in() {
        let mut tree = json!({
            "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
            "optimizer": {"params": {"lr": "auto", "betas": "auto"}},
            "scheduler": {"params": {"warmup_max_lr": "auto", "total_num_steps": "auto"}},
            "zero_optimization": {"reduce_bucket_size": "auto", "stage": "auto"},
            "bf16": {"enabled": "auto"},
            "train": {"steps": 7, "device": "auto"}
        });
        assert!(is_asked_for(&tree));
        assert!(!is_asked_for(&json!({"train": {"device": "auto"}})));
        let mut notes = Vec::new();
        resolve(&mut tree, &mut notes);
        let expected = json!({
                "train_batch_size": null, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": null,
                "optimizer": {"params": {"lr": 5e-5, "betas": [0.9, 0.999]}},
                "scheduler": {"params": {"warmup_max_lr": 5e-5, "total_num_steps": 7}},
                "zero_optimization": {},
        // The checkpoint determines this one.
                "bf16": {"enabled": "auto"},
                "train": {"steps": 7, "device": "auto"}
            });
        assert_eq!(tree, expected);
        assert_eq!(notes.len(), 8, "{notes:?}");
        assert!(
            notes[3].contains("Hugging Face's learning_rate"),
            "{notes:?}"
        );
        let mut tree = json!({"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto"});
        resolve(&mut tree, &mut notes);
        assert!(tree["train_micro_batch_size_per_gpu"].is_null());
    }
}
