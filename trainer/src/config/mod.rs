//! A run's settings: from a file and `--set` to `RunSettings`, every contradiction refused before anything is touched.
//!
//! ```text
//!   RUN.toml | RUN.json ──┐
//!   ds_config.json ──below┴─▶ tree ──▶ --set on top ──▶ keys/: known keys, right types? ──▶ "auto" ──▶ ConfigToml ──▶ resolve/ ──▶ RunSettings
//! ```
//!
//! What is wrong is collected on the way and reported at once.

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

use std::path::PathBuf;

use serde_json::Value;

pub use keys::{deepspeed_keys, listing};
pub use settings::{
    ActivationsChoice, Batch, DataSettings, Decaying, DeviceChoice, Durability, FirstWeights,
    Fraction, GradientsChoice, LossOn, OffloadSettings, OptimizerDevice, OptimizerSettings,
    OptimizerStep, Packing, Placement, ResidentFraction, RunSettings, Tier, TrainSettings,
};
pub use source::Source;
pub use training_state::learning_rate::{LrSchedule, MomentumCycle, OneCycle, RangeTest, Warmup};
pub use training_state::monitor::Reports;
pub use training_state::overflow::{DynamicScale, OverflowPolicy};
pub use training_state::stage::Stage;

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
    /// `--set` with a value that begins as TOML and is none.
    #[error("--set {key}: {value} is not valid TOML: {message}")]
    SetSyntax {
        key: String,
        value: String,
        message: String,
    },
    /// An Accelerate configuration that holds no run of this kind.
    #[error("{} {message}", path.display())]
    Accelerate { path: PathBuf, message: String },
    /// More than one thing is wrong.
    #[error("{} settings are wrong{}", .0.len(), lines(.0))]
    Several(Vec<SettingsError>),
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
    /// A key nobody knows. `nearest` may carry a remark after the key.
    #[error("unknown key `{key}`{}", did_you_mean(nearest))]
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
            Self::Value { key, .. } | Self::Missing { key, .. } => Some(key),
            _ => None,
        }
    }

    /// An error of all `faults`.
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

/// Each fault on a line of its own.
fn lines(faults: &[SettingsError]) -> String {
    let lines = faults.iter().map(|fault| format!("\n  {fault}"));
    lines.collect()
}

/// Who fills in what a file leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WrittenFor {
    /// We do: there is no file for DeepSpeed.
    Us,
    /// DeepSpeed alone.
    DeepSpeed,
    /// Hugging Face's Trainer: the file has an "auto" that it fills in.
    Trainer,
}

/// What a reader of the settings should know.
#[derive(Debug, Default)]
struct Said {
    /// Choices that may be another than what was meant.
    warnings: Vec<String>,
    notes: Vec<String>,
}

/// Reads the files of `source`, lays its `sets` over them and checks all of it.
///
/// `ranks` is how many processes train the run. Without it the run is only looked at: as many as its batch sizes say, or one.
///
/// # Errors
/// All that is wrong, each with the key's path and what to do.
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

/// Lays `sets`, each `key=value`, over a tree of settings.
///
/// # Errors
/// The first that has no key or no value.
pub fn apply_overrides(tree: &mut Value, sets: &[String]) -> Result<(), SettingsError> {
    sets.iter().try_for_each(|set| apply(tree, set))
}

/// Checks a whole tree of settings. `name` is the run file's stem; it names the run directory when the file does not. `ranks` as
/// for [`read`].
///
/// # Errors
/// As for [`read`].
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
    auto::resolve(&mut tree, &mut said.notes);
    said.notes.extend(note);
    faults.extend(keys::take_wrong_types(&mut tree));
    let config: toml::ConfigToml =
        serde_json::from_value(tree).expect("every value is of a type that its key takes");
    match resolve::resolve(config, name, ranks, written_for, said) {
        Ok(settings) => SettingsError::all(faults).map(|()| settings),
        Err(more) => {
            // A value that was taken out is missing, and nobody needs to hear of it twice.
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
mod deepspeed_formulas_tests;
#[cfg(test)]
mod deepspeed_tests;
#[cfg(test)]
mod public_tests;
#[cfg(test)]
mod tests;
