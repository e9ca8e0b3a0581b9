//! Reads a DeepSpeed configuration into one tree with DeepSpeed's current names.
//!
//! ```text
//!   ds_config.json ─▶ no nulls ─▶ names of today ─▶ without what DeepSpeed ignores ─▶ tree
//! ```

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::error::{SettingsError, did_you_mean};
use crate::reader::{Reader, Remarks};
use crate::{files, json, keys};

/// DeepSpeed settings that were read from a file.
#[derive(Debug)]
pub(crate) struct DeepSpeedFile {
    /// File that contains the settings.
    pub(crate) path: PathBuf,
    pub(crate) tree: Value,
    /// Keys that neither DeepSpeed nor this program reads.
    pub(crate) ignored: Vec<String>,
    /// Whether Hugging Face's Trainer fills in a part of the file: some value is "auto".
    pub(crate) for_trainer: bool,
}

/// Reads the file at `path`.
///
/// # Errors
/// The file cannot be read or parsed, or is YAML.
pub(crate) fn read(path: &Path) -> Result<DeepSpeedFile, SettingsError> {
    let is_yaml = path
        .extension()
        .is_some_and(|extension| extension == "yaml" || extension == "yml");
    if is_yaml {
        return Err(SettingsError::Yaml { path: path.into() });
    }
    let mut file = DeepSpeedFile::new(path.to_owned(), parse(path)?);
    file.ignored
        .extend(simplify(&mut file.tree, Reader::Trainer));
    file.for_trainer = keys::auto::is_asked_for(&file.tree);
    Ok(file)
}

impl DeepSpeedFile {
    pub(crate) fn new(path: PathBuf, tree: Value) -> Self {
        Self {
            path,
            tree,
            ignored: Vec::new(),
            for_trainer: false,
        }
    }
}

/// Brings `tree` to DeepSpeed's current names, without what is null. Removes what DeepSpeed itself ignores, and returns it.
pub(crate) fn simplify(tree: &mut Value, reader: Reader) -> Vec<String> {
    drop_nulls(tree);
    rename(tree);
    keys::take_ignored(tree, reader)
}

/// Reports the keys of `file` that DeepSpeed ignores. One that resembles a key with an effect is a warning.
pub(crate) fn note_ignored(ignored: &[String], file: &str, reader: Reader, said: &mut Remarks) {
    let mut others = Vec::new();
    for key in ignored {
        match keys::suggestion(key, reader) {
            Some(near) => said.warnings.push(format!(
                "{key} in {file} has no effect: DeepSpeed does not know it{}",
                did_you_mean(&Some(near))
            )),
            None => others.push(key.as_str()),
        }
    }
    if !others.is_empty() {
        said.notes.push(format!(
            "{} of {file} has no effect, nor has it in DeepSpeed",
            others.join(", ")
        ));
    }
}

/// Parses the JSON file at `path`; its outermost value must be an object.
pub(crate) fn parse(path: &Path) -> Result<Value, SettingsError> {
    let text = files::read_text(path, "the DeepSpeed configuration")?;
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

/// Replaces old spellings that DeepSpeed still accepts by the current ones. A key present in both spellings
/// stays in both and is refused later.
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
            for (old, new) in keys::OLD_SPELLINGS {
                to_device(zero, old, new);
            }
        }
        _ => {}
    }
}

/// Replaces `old = true` by `new = {"device": "cpu"}`.
fn to_device(zero: &mut Map<String, Value>, old: &str, new: &str) {
    if zero.get(old) == Some(&Value::Bool(true)) && !zero.contains_key(new) {
        zero.remove(old);
        zero.insert(new.into(), json!({"device": "cpu"}));
    }
}
