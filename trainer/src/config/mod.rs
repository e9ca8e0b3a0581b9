//! A run's settings: from a file and `--set` to `RunSettings`, every contradiction refused before anything is touched.
//!
//! ```text
//!   RUN.toml | RUN.json ──▶ tree ──▶ --set on top ──▶ keys.rs: every key known? ──▶ ConfigToml ──▶ resolve/ ──▶ RunSettings
//! ```

mod keys;
mod resolve;
mod settings;
mod stage;
pub mod toml;

use std::path::{Path, PathBuf};

use serde_json::Value;

pub use settings::{
    Batch, DataSettings, Decaying, DeviceChoice, Durability, KeepChoice, LrSchedule,
    OffloadSettings, OptimizerSettings, Placement, ResidentShare, RunSettings, Schedule, Share,
    Tier, TrainSettings, UpdatePlace, Warmup,
};
pub use stage::Stage;

/// Why a run file was refused. Nothing has been touched when this is answered.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file cannot be read at all.
    #[error("cannot read the run file {}: {source}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    /// The file is no TOML, or no JSON when its name ends in .json.
    #[error("{} is not valid {format}: {message}", path.display())]
    Syntax {
        path: PathBuf,
        format: &'static str,
        message: String,
    },
    /// `--set` without a key or a value.
    #[error("--set {text}: expected key=value with dots between tables, as in train.steps=100")]
    Set { text: String },
    /// A key nobody knows.
    #[error("unknown key {key}{}", match nearest { Some(near) => format!(": did you mean {near}?"), None => String::new() })]
    UnknownKey {
        key: String,
        nearest: Option<String>,
    },
    /// A key of DeepSpeed's that asks for what is not built.
    #[error("{key} is DeepSpeed's but not supported here: {instead}")]
    NotSupported { key: String, instead: &'static str },
    /// A value of the wrong type.
    #[error("{key}: {message}")]
    Type { key: String, message: String },
    /// A value out of its range, or two that contradict each other.
    #[error("{key}: {message}")]
    Value { key: &'static str, message: String },
    /// A key without which nothing can start.
    #[error("{key} is missing: {message}")]
    Missing {
        key: &'static str,
        message: &'static str,
    },
}

/// Reads a run file (TOML, or JSON when the name ends in `.json`), lays `sets` (each `key=value`) over it and checks all of it.
///
/// # Errors
/// The first thing that is wrong, with the key's path and what to do.
///
/// `ranks` is how many processes train the run. Without it the run is only looked at: as many as its batch sizes say, or one.
pub fn read(
    path: &Path,
    sets: &[String],
    ranks: Option<u32>,
) -> Result<RunSettings, SettingsError> {
    let text = std::fs::read_to_string(path).map_err(|source| SettingsError::Read {
        path: path.into(),
        source,
    })?;
    let mut tree = parse(path, &text)?;
    lay(&mut tree, sets)?;
    let name = path
        .file_stem()
        .map_or_else(|| "run".into(), |stem| stem.to_string_lossy().into_owned());
    check(tree, &name, ranks)
}

/// Lays `sets`, each `key=value`, over a tree of settings.
///
/// # Errors
/// The first that has no key or no value.
pub fn lay(tree: &mut Value, sets: &[String]) -> Result<(), SettingsError> {
    sets.iter().try_for_each(|set| apply(tree, set))
}

/// Checks a whole tree of settings. `name` is the run file's stem; it names the run folder when the file does not. `ranks` as
/// for [`read`].
pub fn check(
    mut tree: Value,
    name: &str,
    ranks: Option<u32>,
) -> Result<RunSettings, SettingsError> {
    let mut notes = keys::check(&tree)?;
    drop_auto("", &mut tree, &mut notes);
    let config: toml::ConfigToml =
        serde_path_to_error::deserialize(tree).map_err(|error| SettingsError::Type {
            key: error.path().to_string(),
            message: error.into_inner().to_string(),
        })?;
    resolve::resolve(config, name, ranks, notes)
}

fn parse(path: &Path, text: &str) -> Result<Value, SettingsError> {
    let syntax = |format, message: String| SettingsError::Syntax {
        path: path.into(),
        format,
        message,
    };
    let tree: Value = if path
        .extension()
        .is_some_and(|extension| extension == "json")
    {
        serde_json::from_str(text).map_err(|error| syntax("JSON", error.to_string()))?
    } else {
        ::toml::from_str(text).map_err(|error| syntax("TOML", error.to_string()))?
    };
    if tree.is_object() {
        Ok(tree)
    } else {
        Err(syntax(
            "JSON",
            "the outermost value must be an object".into(),
        ))
    }
}

/// Lays one `a.b=value` over the tree. The value is TOML; what is no TOML is taken as text, so that paths need no quotes.
fn apply(tree: &mut Value, set: &str) -> Result<(), SettingsError> {
    let wrong = || SettingsError::Set { text: set.into() };
    let (path, text) = set.split_once('=').ok_or_else(wrong)?;
    let path = path.trim();
    if path.is_empty() || path.split('.').any(str::is_empty) || text.trim().is_empty() {
        return Err(wrong());
    }
    let value = ::toml::from_str::<Value>(&format!("value = {text}"))
        .ok()
        .and_then(|mut table| table.get_mut("value").map(Value::take))
        .unwrap_or_else(|| Value::String(text.trim().into()));
    let mut place = tree;
    for key in path.split('.') {
        if !place.is_object() {
            *place = Value::Object(serde_json::Map::new());
        }
        place = place
            .as_object_mut()
            .expect("just made one")
            .entry(key)
            .or_insert(Value::Null);
    }
    *place = value;
    Ok(())
}

/// Our own keys for which "auto" is a word of its own, not the same as leaving them out.
const AUTO_IS_A_WORD: &[&str] = &[
    "offload.engine",
    "offload.resident_share",
    "offload.update",
    "train.device",
    "train.keep",
];

/// DeepSpeed files say "auto" for "you choose". The key is then as good as left out, and the choice is shown with the rest.
fn drop_auto(prefix: &str, tree: &mut Value, notes: &mut Vec<String>) {
    let Value::Object(table) = tree else { return };
    table.retain(|key, value| {
        let path = keys::join(prefix, key);
        let auto = value.as_str() == Some("auto") && !AUTO_IS_A_WORD.contains(&path.as_str());
        // What is left out of our own tables is the plan's to choose, and the plan is shown.
        if auto && !path.starts_with("offload.") {
            notes.push(format!("{path} is \"auto\": the default is taken"));
        }
        drop_auto(&path, value, notes);
        !auto
    });
}

#[cfg(test)]
mod tests;
