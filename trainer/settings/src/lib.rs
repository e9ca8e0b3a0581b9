//! Reads the settings of a training run from files, for both ways in: the native trainer and the Python package. Needs no libtorch.
//!
//! ```text
//!   RUN.toml | RUN.json ──┐
//!   ds_config.json ──below┴─▶ tree ──▶ --set on top ──▶ keys/: known keys, right types? ──▶ "auto" ──▶ ConfigToml ──▶ trainer: RunSettings
//!   ds_config.json, dict ───▶ tree ───────────────────▶ keys/: known keys, right types? ────────────▶ PackageToml ──▶ package: PackageSettings
//! ```
//!
//! `keys/table.rs` has each key of DeepSpeed once, with what each of the two does with it. `resolve/` checks the values that both have; those of
//! the trainer alone are checked there. Errors are collected on the way and reported together.

#![forbid(unsafe_code)]

mod accelerate;
mod auto;
mod deepspeed;
mod error;
mod json;
pub mod keys;
pub mod package;
mod rate;
pub mod resolve;
mod schema;
pub mod source;
pub mod toml;
mod values;

use serde::de::DeserializeOwned;
use serde_json::Value;

pub use error::SettingsError;
pub use rate::Rate;
pub use source::{Source, apply_overrides};
pub use training_state::learning_rate::{LrSchedule, MomentumCycle, OneCycle, RangeTest, Warmup};
pub use training_state::monitor::Reports;
pub use training_state::overflow::{DynamicScale, OverflowPolicy};
pub use values::{
    Decaying, Fraction, MomentsType, OptimizerKind, OptimizerSettings, ParamGroupSettings, Tier,
};

/// The program that reads a file: what its keys do depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// The native trainer.
    Trainer,
    /// The Python package.
    Package,
}

/// The program whose defaults apply to keys that a file leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrittenFor {
    /// This one: there is no DeepSpeed file.
    Us,
    /// DeepSpeed alone.
    DeepSpeed,
    /// Hugging Face's Trainer: the file contains an "auto" that it fills in.
    Trainer,
}

/// Messages for the person who wrote the settings.
#[derive(Clone, Debug, Default)]
pub struct Said {
    /// Choices that may differ from what was intended.
    pub warnings: Vec<String>,
    pub notes: Vec<String>,
}

/// A tree of settings as the tables that its reader has, and the errors in it. What was wrong is left out of the tables.
pub struct Parsed<T> {
    pub config: T,
    pub faults: Vec<SettingsError>,
    /// Keys without effect.
    pub without_effect: Vec<String>,
}

/// Checks every key of `tree` and its type. `said` receives what "auto" became, for the trainer.
pub fn parse<T: schema::Typed + DeserializeOwned>(
    mut tree: Value,
    reader: Reader,
    said: &mut Said,
) -> Parsed<T> {
    source::whole_numbers(&mut tree);
    let keys::Checked {
        note,
        without_effect,
        mut faults,
    } = keys::check(&tree, reader);
    match reader {
        Reader::Trainer => {
            said.notes.extend(note);
            auto::resolve(&mut tree, &mut said.notes);
        }
        Reader::Package => auto::leave_all_out(&mut tree),
    }
    faults.extend(keys::take_wrong_types(&mut tree, &T::KIND));
    let config = serde_json::from_value(tree).expect("every value is of a type that its key takes");
    Parsed {
        config,
        faults,
        without_effect,
    }
}

/// Returns the key of a run file that an option `name` of another program probably stands for.
pub fn setting_like(name: &str) -> Option<String> {
    let key = keys::suggestion(name, Reader::Trainer)?;
    // A remark may follow the key, and not each answer is a key.
    let key = key.split(' ').next().unwrap_or_default();
    (!key.starts_with('-')).then(|| key.to_owned())
}
