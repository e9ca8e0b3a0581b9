//! The settings of a run, from files and `--set` to `RunSettings`. Refuses every contradiction before
//! anything is created or opened.
//!
//! `training_settings` reads the files and checks keys, types and what the Python package has too; `resolve/` checks the rest, with the model.
//! Errors are collected on the way and reported together.

mod resolve;
mod settings;
mod summary;
mod written;

use serde_json::Value;

pub use settings::{
    ActivationsChoice, AttentionChoice, Batch, DataFile, DataSettings, DeviceChoice, Durability,
    FirstWeights, GradientsChoice, Interval, LossOn, OffloadSettings, OnBadRecord, OptimizerStep,
    Packing, Placement, RecordFormat, ResidentFraction, RunSettings, ShardChoice, TrainSettings,
};
pub(crate) use summary::summary_of_schedule;
pub use training_settings::keys::listing;
pub use training_settings::{
    AdjustLr, Decaying, DynamicScale, Fraction, LrSchedule, MasterType, MomentsType, MomentumCycle,
    MuonSettings, OneCycle, OptimizerKind, OptimizerSettings, OverflowPolicy, ParamGroupSettings,
    RangeTest, Reports, SettingsError, Source, Tier, Warmup, apply_overrides, setting_like,
};
pub use training_state::plan::updaters::OptimizerDevice;
pub use training_state::stage::Stage;

use training_settings::{ParsedSettings, Rate, Reader, Remarks, WrittenFor, parse, toml};

/// Reads the files of `source`, applies its `sets` and checks the result.
///
/// `ranks` is the number of processes that train the run. Without it the run is only examined: the number
/// follows from the batch sizes, or is one.
///
/// # Errors
/// All errors found, each with the key's path and what to do.
pub fn read(source: &Source, ranks: Option<u32>) -> Result<RunSettings, SettingsError> {
    let mut tree = source.tree()?;
    let mut said = Remarks::default();
    let written_for = tree.written_for(&mut said);
    let settings = std::mem::take(&mut tree.tree);
    check_as(settings, &source.name(), ranks, written_for, said).map_err(|error| tree.blame(error))
}

/// Checks a whole tree of settings. `name` is the stem of the configuration's file name, which names the run
/// directory if no key does. `ranks` is as in [`read`].
///
/// # Errors
/// All errors found, as in [`read`].
pub fn check(tree: Value, name: &str, ranks: Option<u32>) -> Result<RunSettings, SettingsError> {
    check_as(tree, name, ranks, WrittenFor::Us, Remarks::default())
}

fn check_as(
    tree: Value,
    name: &str,
    ranks: Option<u32>,
    written_for: WrittenFor,
    mut said: Remarks,
) -> Result<RunSettings, SettingsError> {
    let ParsedSettings { config, faults, .. } =
        parse::<toml::ConfigToml>(tree, Reader::Trainer, &mut said);
    match resolve::resolve(config, name, ranks, written_for, said) {
        Ok(settings) => SettingsError::all(faults).map(|()| settings),
        Err(more) => Err(SettingsError::with_more(faults, more)),
    }
}

#[cfg(test)]
mod tests;
