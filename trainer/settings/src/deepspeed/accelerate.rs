//! Reads configurations of Hugging Face Accelerate: YAML with DeepSpeed's settings in `deepspeed_config`,
//! either in a separate file that it names or inline under Accelerate's names. Settings left open become
//! "auto", as Accelerate leaves them to the Trainer.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::{DeepSpeedFile, parse};
use crate::error::SettingsError;
use crate::files::read_text;

/// Accelerate's inline names with DeepSpeed's.
const INLINE: &[(&str, &str)] = &[
    (
        "gradient_accumulation_steps",
        "/gradient_accumulation_steps",
    ),
    ("gradient_clipping", "/gradient_clipping"),
    ("zero_stage", "/zero_optimization/stage"),
    (
        "offload_optimizer_device",
        "/zero_optimization/offload_optimizer/device",
    ),
    (
        "offload_optimizer_nvme_path",
        "/zero_optimization/offload_optimizer/nvme_path",
    ),
    (
        "offload_param_device",
        "/zero_optimization/offload_param/device",
    ),
    (
        "offload_param_nvme_path",
        "/zero_optimization/offload_param/nvme_path",
    ),
    (
        "zero3_save_16bit_model",
        "/zero_optimization/stage3_gather_16bit_weights_on_model_save",
    ),
];

/// Keys besides `deepspeed_config` that are read here or do not concern a run.
const READ: &[&str] = &[
    "deepspeed_config",
    "distributed_type",
    "mixed_precision",
    "num_processes",
    "num_machines",
    "parallelism_config",
];

/// Reads DeepSpeed's settings from the Accelerate configuration at `path`.
///
/// # Errors
/// The file cannot be read, is not YAML, has no `deepspeed_config`, or asks for an unsupported feature:
/// parallelism other than data parallelism, fp8.
pub(crate) fn read(path: &Path) -> Result<DeepSpeedFile, SettingsError> {
    let text = read_text(path, "the Accelerate configuration")?;
    let syntax = |message: String| SettingsError::Syntax {
        path: path.into(),
        format: "YAML",
        message,
    };
    let whole: Value = serde_saphyr::from_str(&text).map_err(|error| syntax(error.to_string()))?;
    let Value::Object(whole) = whole else {
        return Err(syntax("the outermost value must be a mapping".into()));
    };
    let unfit = |message: String| SettingsError::Accelerate {
        path: path.into(),
        message,
    };
    let Some(Value::Object(inner)) = whole.get("deepspeed_config") else {
        let kind = whole.get("distributed_type").and_then(Value::as_str);
        return Err(unfit(match kind {
            Some(kind) if kind != "DEEPSPEED" => format!(
                "is an Accelerate configuration for {kind} and has no deepspeed_config: write the settings into the trainer's own configuration file"
            ),
            _ => "has no deepspeed_config: expected an Accelerate configuration for DeepSpeed, or DeepSpeed's own file as JSON".into(),
        }));
    };
    check_parallelism(&whole).map_err(unfit)?;
    let named = inner
        .get("deepspeed_config_file")
        .and_then(Value::as_str)
        .filter(|name| *name != "none");
    let mut file = match named {
        Some(name) => {
            let found = beside(path, name);
            let tree = parse(&found)?;
            DeepSpeedFile::new(found, tree)
        }
        None => DeepSpeedFile::new(path.to_owned(), inline(inner)),
    };
    let precision = whole.get("mixed_precision").unwrap_or(&Value::Null);
    fill_precision(&mut file.tree, precision).map_err(unfit)?;
    let inner_read = |key: &str| {
        key == "deepspeed_config_file"
            || (named.is_none() && INLINE.iter().any(|(name, _)| *name == key))
    };
    let without_effect: Vec<String> = whole
        .keys()
        .filter(|key| !READ.contains(&key.as_str()))
        .cloned()
        .chain(
            inner
                .keys()
                .filter(|key| !inner_read(key))
                .map(|key| format!("deepspeed_config.{key}")),
        )
        .collect();
    if !without_effect.is_empty() {
        file.notes.push(format!(
            "keys of {} without effect here: {}",
            path.display(),
            without_effect.join(", ")
        ));
    }
    file.notes.extend(started_by(&whole, path));
    Ok(file)
}

/// Names the command that starts as many ranks as the configuration at `path` asks for, if there are several.
fn started_by(whole: &Map<String, Value>, path: &Path) -> Option<String> {
    let count = |key: &str| whole.get(key).and_then(Value::as_u64).unwrap_or(1);
    // Accelerate counts the processes of all machines.
    let (processes, machines) = (count("num_processes"), count("num_machines").max(1));
    let named = path.display();
    if machines > 1 {
        let each = processes.div_ceil(machines);
        Some(format!(
            "num_processes is {processes} and num_machines is {machines} in {named}: `trainer launch --nnodes {machines} --node-rank R --rendezvous HOST:PORT --nproc {each}` on each machine starts that many ranks"
        ))
    } else {
        (processes > 1).then(|| {
            format!("num_processes is {processes} in {named}: `trainer launch --nproc {processes}` starts that many ranks")
        })
    }
}

/// Resolves a path as Accelerate does, from the working directory; if nothing is there, from the
/// configuration's directory.
fn beside(yaml: &Path, name: &str) -> PathBuf {
    let named = PathBuf::from(name);
    match yaml.parent() {
        Some(parent) if !named.exists() => parent.join(named),
        _ => named,
    }
}

/// Converts inline names to DeepSpeed's tables as Accelerate does.
fn inline(inner: &Map<String, Value>) -> Value {
    let mut tree = json!({
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 2, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"},
        },
    });
    for (name, pointer) in INLINE {
        let Some(value) = inner.get(*name) else {
            continue;
        };
        // Accelerate writes "none" for a missing path.
        if name.ends_with("nvme_path") && value.as_str() == Some("none") {
            continue;
        }
        let (table, key) = pointer.rsplit_once('/').expect("a path below the root");
        tree.pointer_mut(table)
            .and_then(Value::as_object_mut)
            .expect("the tables were made above")
            .insert(key.into(), value.clone());
    }
    tree
}

/// Replaces "auto" and missing precisions by those that `mixed_precision` selects, if it is given.
fn fill_precision(tree: &mut Value, precision: &Value) -> Result<(), String> {
    let wanted = match precision {
        Value::Null => return Ok(()),
        // Older YAML parses `no` as false.
        Value::Bool(false) => "no",
        other => other.as_str().unwrap_or_default(),
    };
    if !["no", "bf16", "fp16"].contains(&wanted) {
        return Err(format!(
            "mixed_precision is {precision}: use \"bf16\", \"fp16\" or \"no\""
        ));
    }
    for key in ["bf16", "fp16"] {
        let table = tree.as_object_mut().expect("it was parsed as a table");
        let table = table.entry(key).or_insert_with(|| json!({}));
        if let Some(table) = table.as_object_mut()
            && table.get("enabled").is_none_or(|enabled| enabled == "auto")
        {
            table.insert("enabled".into(), (wanted == key).into());
        }
    }
    Ok(())
}

/// Refuses any parallelism other than data parallelism.
fn check_parallelism(whole: &Map<String, Value>) -> Result<(), String> {
    let Some(Value::Object(parallel)) = whole.get("parallelism_config") else {
        return Ok(());
    };
    for kind in ["tp", "sp", "cp"] {
        let key = format!("parallelism_config_{kind}_size");
        if parallel
            .get(&key)
            .and_then(Value::as_u64)
            .is_some_and(|size| size > 1)
        {
            return Err(format!(
                "parallelism_config.{key} is more than 1: only data parallelism is supported (zero_stage divides state among the ranks)"
            ));
        }
    }
    Ok(())
}
