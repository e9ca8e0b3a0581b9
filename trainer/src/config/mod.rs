//! Reads a run's settings from files and `--set` into `RunSettings`. Refuses every contradiction before
//! anything is created or opened.
//!
//! ```text
//!   RUN.toml | RUN.json ──┐
//!   ds_config.json ──below┴─▶ tree ──▶ --set on top ──▶ keys/: known keys, right types? ──▶ "auto" ──▶ ConfigToml ──▶ resolve/ ──▶ RunSettings
//! ```
//!
//! Errors are collected on the way and reported together.

mod accelerate;
mod auto;
mod deepspeed;
mod json;
mod keys;
mod resolve;
mod schema;
mod settings;
mod source;
mod summary;
pub mod toml;
mod written;

use std::path::PathBuf;

use serde_json::Value;

pub use keys::listing;
pub use settings::{
    ActivationsChoice, AttentionChoice, Batch, DataFile, DataSettings, Decaying, DeviceChoice,
    Durability, FirstWeights, Fraction, GradientsChoice, Interval, LossOn, MomentsType,
    OffloadSettings, OptimizerDevice, OptimizerKind, OptimizerSettings, OptimizerStep, Packing,
    ParamGroupSettings, Placement, RecordFormat, ResidentFraction, RunSettings, ShardChoice, Tier,
    TrainSettings,
};
pub use source::Source;
pub use training_state::learning_rate::{LrSchedule, MomentumCycle, OneCycle, RangeTest, Warmup};
pub use training_state::monitor::Reports;
pub use training_state::overflow::{DynamicScale, OverflowPolicy};
pub use training_state::stage::Stage;

use source::{Tree, apply};

/// Error in a run's settings. Nothing has been created or changed when it is returned.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file cannot be read.
    #[error("cannot read {what} {}: {source}", path.display())]
    Read {
        what: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    /// The file is not TOML, or not JSON if its name ends in .json.
    #[error("{} is not valid {format}: {message}", path.display())]
    Syntax {
        path: PathBuf,
        format: &'static str,
        message: String,
    },
    /// `--set` without a key or a value.
    #[error("--set {text}: expected key=value with dots between tables, as in train.steps=100")]
    Set { text: String },
    /// `--set` with a value that starts like TOML but is not valid.
    #[error("--set {key}: {value} is not valid TOML: {message}")]
    SetSyntax {
        key: String,
        value: String,
        message: String,
    },
    /// An Accelerate configuration that cannot be used.
    #[error("{} {message}", path.display())]
    Accelerate { path: PathBuf, message: String },
    /// Several errors.
    #[error("{} settings are wrong{}", .0.len(), lines(.0))]
    Several(Vec<SettingsError>),
    /// The run's configuration and DeepSpeed's have different values for a key.
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
    /// An error in a file other than the run's own configuration.
    #[error("{}: {error}", path.display())]
    InFile {
        path: PathBuf,
        error: Box<SettingsError>,
    },
    /// Unknown key. `nearest` may carry a remark after the key.
    #[error("unknown key `{key}`{}", did_you_mean(nearest))]
    UnknownKey {
        key: String,
        nearest: Option<String>,
    },
    /// DeepSpeed key that asks for an unsupported feature.
    #[error("{key} is DeepSpeed's but not supported here: {instead}")]
    NotSupported { key: String, instead: &'static str },
    /// A key of another program that asks for something that this one does otherwise or not at all.
    #[error("{key} is not supported: {instead}")]
    OtherProgram { key: String, instead: &'static str },
    /// A value of the wrong type.
    #[error("{key}: {message}")]
    Type { key: String, message: String },
    /// A value out of its range, or a contradiction between two values.
    #[error("{key}: {message}")]
    Value { key: &'static str, message: String },
    /// A required key is missing.
    #[error("{key} is missing: {message}")]
    Missing {
        key: &'static str,
        message: &'static str,
    },
}

impl SettingsError {
    /// The key that the error is about.
    fn key(&self) -> Option<&str> {
        match self {
            Self::UnknownKey { key, .. } | Self::NotSupported { key, .. } => Some(key),
            Self::OtherProgram { key, .. } => Some(key),
            Self::Type { key, .. } => Some(key),
            Self::Value { key, .. } | Self::Missing { key, .. } => Some(key),
            _ => None,
        }
    }

    /// Combines `faults` into one error, or returns `Ok` if there are none.
    fn all(mut faults: Vec<Self>) -> Result<(), Self> {
        match faults.len() {
            0 => Ok(()),
            1 => Err(faults.remove(0)),
            _ => Err(Self::Several(faults)),
        }
    }
}

fn did_you_mean(nearest: &Option<String>) -> String {
    let Some(nearest) = nearest else {
        return String::new();
    };
    let (key, remark) = nearest.split_at(nearest.find(' ').unwrap_or(nearest.len()));
    format!("; did you mean `{key}`{remark}?")
}

/// Formats each fault on its own line.
fn lines(faults: &[SettingsError]) -> String {
    let lines = faults.iter().map(|fault| format!("\n  {fault}"));
    lines.collect()
}

/// The program whose defaults apply to keys that a file leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WrittenFor {
    /// This one: there is no DeepSpeed file.
    Us,
    /// DeepSpeed alone.
    DeepSpeed,
    /// Hugging Face's Trainer: the file contains an "auto" that it fills in.
    Trainer,
}

/// Messages for the person who wrote the settings.
#[derive(Clone, Debug, Default)]
struct Said {
    /// Choices that may differ from what was intended.
    warnings: Vec<String>,
    notes: Vec<String>,
}

/// Reads the files of `source`, applies its `sets` and checks the result.
///
/// `ranks` is the number of processes that train the run. Without it the run is only examined: the number
/// follows from the batch sizes, or is one.
///
/// # Errors
/// All errors found, each with the key's path and what to do.
pub fn read(source: &Source, ranks: Option<u32>) -> Result<RunSettings, SettingsError> {
    let Tree { tree, deepspeed } = source.tree()?;
    let mut said = Said::default();
    let mut written_for = WrittenFor::Us;
    if let Some(file) = &deepspeed {
        written_for = match file.for_trainer {
            true => WrittenFor::Trainer,
            false => WrittenFor::DeepSpeed,
        };
        said.notes.extend(file.notes.iter().cloned());
        file.note_ignored(&mut said);
    }
    check_as(tree, &source.name(), ranks, written_for, said)
        .map_err(|error| Tree::blame(&deepspeed, error))
}

/// Applies `sets`, each `key=value`, to a tree of settings. `train.steps` also replaces `train.epochs`, and the reverse: a run
/// has one of them.
///
/// # Errors
/// The first one without a key or a value.
pub fn apply_overrides(tree: &mut Value, sets: &[String]) -> Result<(), SettingsError> {
    let is_set = |name: &str| {
        let mut keys = sets.iter().filter_map(|set| set.split('=').next());
        keys.any(|key| key.trim().strip_prefix("train.") == Some(name))
    };
    for (name, other) in [("steps", "epochs"), ("epochs", "steps")] {
        if is_set(name)
            && !is_set(other)
            && let Some(Value::Object(train)) = tree.get_mut("train")
        {
            train.remove(other);
        }
    }
    sets.iter().try_for_each(|set| apply(tree, set))
}

/// Returns the key of a run file that an option `name` of another program probably stands for.
pub fn setting_like(name: &str) -> Option<String> {
    let key = keys::suggestion(name)?;
    // A remark may follow the key, and not each answer is a key.
    let key = key.split(' ').next().unwrap_or_default();
    (!key.starts_with('-')).then(|| key.to_owned())
}

/// Checks a whole tree of settings. `name` is the stem of the configuration's file name, which names the run
/// directory if no key does. `ranks` is as in [`read`].
///
/// # Errors
/// All errors found, as in [`read`].
pub fn check(tree: Value, name: &str, ranks: Option<u32>) -> Result<RunSettings, SettingsError> {
    check_as(tree, name, ranks, WrittenFor::Us, Said::default())
}

fn check_as(
    mut tree: Value,
    name: &str,
    ranks: Option<u32>,
    written_for: WrittenFor,
    mut said: Said,
) -> Result<RunSettings, SettingsError> {
    source::whole_numbers(&mut tree);
    let keys::Checked { note, mut faults } = keys::check(&tree);
    said.notes.extend(note);
    auto::resolve(&mut tree, &mut said.notes);
    faults.extend(keys::take_wrong_types(&mut tree));
    let config: toml::ConfigToml =
        serde_json::from_value(tree).expect("every value is of a type that its key takes");
    match resolve::resolve(config, name, ranks, written_for, said) {
        Ok(settings) => SettingsError::all(faults).map(|()| settings),
        Err(more) => {
            // A value with a wrong type was removed from the tree; the error that it is missing would be a duplicate.
            let told = |fault: &SettingsError| {
                let same = |other: &SettingsError| other.key() == fault.key();
                fault.key().is_some() && faults.iter().any(same)
            };
            let more: Vec<_> = more.into_iter().filter(|fault| !told(fault)).collect();
            faults.extend(more);
            Err(SettingsError::all(faults).expect_err("something was wrong"))
        }
    }
}

#[cfg(test)]
mod tests;
