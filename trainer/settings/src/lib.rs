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

mod deepspeed;
mod error;
mod files;
mod json;
pub mod keys;
pub mod package;
mod parse;
mod rate;
mod reader;
pub mod resolve;
mod schema;
pub mod source;
pub mod toml;
mod values;

pub use error::{SETTINGS_FILE, SettingsError};
pub use parse::{ParsedSettings, parse};
pub use rate::Rate;
pub use reader::{Reader, Remarks, WrittenFor};
pub use source::{Source, apply_overrides};
pub use training_state::learning_rate::{LrSchedule, MomentumCycle, OneCycle, RangeTest, Warmup};
pub use training_state::monitor::Reports;
pub use training_state::overflow::{DynamicScale, OverflowPolicy};
pub use values::{
    AdjustLr, Decaying, Fraction, MasterType, MomentsType, MuonSettings, OptimizerKind,
    OptimizerSettings, ParamGroupSettings, Tier,
};

/// Returns the key of a run file that an option `name` of another program probably stands for.
pub fn setting_like(name: &str) -> Option<String> {
    let key = keys::suggestion(name, Reader::Trainer)?;
    // A remark may follow the key, and not each answer is a key.
    let key = key.split(' ').next().unwrap_or_default();
    (!key.starts_with('-')).then(|| key.to_owned())
}
