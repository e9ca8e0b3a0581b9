//! A run's settings: from a file and `--set` to `RunSettings`, every contradiction refused before anything is touched.
//!
//! ```text
//!   RUN.toml | RUN.json ──┐
//!   ds_config.json ──below┴─▶ tree ──▶ --set on top ──▶ keys/: every key known? ──▶ "auto" ──▶ ConfigToml ──▶ resolve/ ──▶ RunSettings
//! ```

mod auto;
mod json;
mod keys;
mod resolve;
mod schedule;
mod settings;
mod source;
mod stage;
pub mod toml;

use std::path::PathBuf;

use serde_json::Value;

pub use keys::markdown;
pub use schedule::{LrSchedule, MomentumCycle, OneCycle, RangeTest, Warmup};
pub use settings::{
    ActivationsChoice, Batch, DataSettings, Decaying, DeviceChoice, Durability, DynamicScale,
    FirstWeights, GradientsChoice, KeepChoice, LossOn, OffloadSettings, OptimizerSettings,
    Overflow, Packing, Placement, Reports, ResidentShare, RunSettings, Schedule, Share, Tier,
    TrainSettings, UpdatePlace,
};
pub use source::Source;
pub use stage::Stage;

use source::{Tree, apply};

/// Why a run file was refused. Nothing has been touched when this is answered.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file cannot be read at all.
    #[error("cannot read {what} {}: {source}", path.display())]
    Read {
        what: &'static str,
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
    /// The run file and DeepSpeed's file say different things.
    #[error(
        "{key} is {over} in {} and {under} in {}: leave it out of one of them, or write \"auto\" in the second",
        run.display(),
        deepspeed.display()
    )]
    Contradiction {
        key: String,
        run: PathBuf,
        over: String,
        deepspeed: PathBuf,
        under: String,
    },
    /// Something in a file beside the run file.
    #[error("{}: {error}", path.display())]
    InFile {
        path: PathBuf,
        error: Box<SettingsError>,
    },
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

impl SettingsError {
    /// The key it is about.
    fn key(&self) -> Option<&str> {
        match self {
            Self::UnknownKey { key, .. } | Self::NotSupported { key, .. } => Some(key),
            Self::Type { key, .. } => Some(key),
            Self::Value { key, .. } => Some(key),
            _ => None,
        }
    }
}

/// Reads the files of `source`, lays its `sets` over them and checks all of it.
///
/// `ranks` is how many processes train the run. Without it the run is only looked at: as many as its batch sizes say, or one.
///
/// # Errors
/// The first thing that is wrong, with the key's path and what to do.
pub fn read(source: &Source, ranks: Option<u32>) -> Result<RunSettings, SettingsError> {
    let Tree { tree, deepspeed } = source.tree()?;
    check(tree, &source.name(), ranks).map_err(|error| Tree::blame(&deepspeed, error))
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
    let mut notes = Vec::new();
    source::whole_numbers(&mut tree);
    let mut unused = keys::check(&tree)?;
    auto::resolve(&mut tree, &mut notes);
    notes.append(&mut unused);
    let config: toml::ConfigToml =
        serde_path_to_error::deserialize(tree).map_err(|error| SettingsError::Type {
            key: error.path().to_string(),
            message: error.into_inner().to_string(),
        })?;
    resolve::resolve(config, name, ranks, notes)
}

#[cfg(test)]
mod deepspeed_tests;
#[cfg(test)]
mod tests;
