//! A file for DeepSpeed, or a configuration of Hugging Face's Accelerate with DeepSpeed's settings in it, as one tree with
//! DeepSpeed's names of today.
//!
//! ```text
//!   ds_config.json ─────────────────────────────┐
//!   accelerate.yaml ─▶ deepspeed_config_file ───┼─▶ no nulls ─▶ names of today ─▶ without what DeepSpeed ignores ─▶ tree
//!                   └▶ deepspeed_config, inline ┘
//! ```

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::{Said, SettingsError, accelerate, json, keys};

/// What was read.
#[derive(Debug)]
pub(super) struct DeepSpeedFile {
    /// The file the settings stand in: the one that was named, or that which an Accelerate configuration names.
    pub(super) path: PathBuf,
    pub(super) tree: Value,
    /// Keys that neither DeepSpeed nor anything here reads.
    pub(super) ignored: Vec<String>,
    pub(super) notes: Vec<String>,
    /// Whether Hugging Face's Trainer fills in a part of it: some value is "auto".
    pub(super) for_trainer: bool,
}

/// Reads the file at `path`: YAML when its name ends so, JSON otherwise.
///
/// # Errors
/// It cannot be read, is neither, or is an Accelerate configuration without DeepSpeed.
pub(super) fn read(path: &Path) -> Result<DeepSpeedFile, SettingsError> {
    let is_yaml = path
        .extension()
        .is_some_and(|extension| extension == "yaml" || extension == "yml");
    let mut file = if is_yaml {
        accelerate::read(path)?
    } else {
        DeepSpeedFile::new(path.to_owned(), parse(path)?)
    };
    drop_nulls(&mut file.tree);
    rename(&mut file.tree);
    file.ignored.extend(keys::take_ignored(&mut file.tree));
    file.for_trainer = super::auto::is_asked_for(&file.tree);
    Ok(file)
}

impl DeepSpeedFile {
    pub(super) fn new(path: PathBuf, tree: Value) -> Self {
        Self {
            path,
            tree,
            ignored: Vec::new(),
            notes: Vec::new(),
            for_trainer: false,
        }
    }

    /// Names what was left aside. What looks like a key with an effect is a warning.
    pub(super) fn note_ignored(&self, said: &mut Said) {
        let shown = self.path.display();
        for (key, near) in self
            .ignored
            .iter()
            .filter_map(|key| Some((key, keys::suggestion(key)?)))
        {
            said.warnings.push(format!(
                "{key} in {shown} has no effect: DeepSpeed does not know it{}",
                super::did_you_mean(&Some(near))
            ));
        }
        let others = self
            .ignored
            .iter()
            .filter(|key| keys::suggestion(key).is_none());
        let others: Vec<&str> = others.map(String::as_str).collect();
        if !others.is_empty() {
            said.notes.push(format!(
                "{} of {shown} has no effect, nor has it in DeepSpeed",
                others.join(", ")
            ));
        }
    }
}

/// The table in a JSON file.
pub(super) fn parse(path: &Path) -> Result<Value, SettingsError> {
    let text = super::source::read_text(path, "the DeepSpeed configuration")?;
    let syntax = |message: String| SettingsError::Syntax {
        path: path.into(),
        format: "JSON",
        message,
    };
    let tree = json::parse(&text).map_err(syntax)?;
    if tree.is_object() {
        Ok(tree)
    } else {
        Err(syntax("the outermost value must be an object".into()))
    }
}

fn drop_nulls(tree: &mut Value) {
    let Value::Object(table) = tree else { return };
    table.retain(|_, value| !value.is_null());
    table.values_mut().for_each(drop_nulls);
}

/// Older spellings that DeepSpeed still takes, in those of today. What is there in both spellings stays, to be refused.
fn rename(tree: &mut Value) {
    let Value::Object(table) = tree else { return };
    if !table.contains_key("bf16")
        && let Some(bf16) = table.remove("bfloat16")
    {
        table.insert("bf16".into(), bf16);
    }
    let Some(zero) = table.get_mut("zero_optimization") else {
        return;
    };
    match zero {
        Value::Bool(on) => *zero = json!({"stage": u64::from(*on)}),
        Value::Object(zero) => {
            to_device(zero, "cpu_offload", "offload_optimizer");
            to_device(zero, "cpu_offload_param", "offload_param");
        }
        _ => {}
    }
}

/// `old = true` is `new = {"device": "cpu"}`.
fn to_device(zero: &mut Map<String, Value>, old: &str, new: &str) {
    if zero.get(old) == Some(&Value::Bool(true)) && !zero.contains_key(new) {
        zero.remove(old);
        zero.insert(new.into(), json!({"device": "cpu"}));
    }
}
