//! Resolves the training data: files, tokenizer, and text for evaluation.

use super::{fraction, value, word};
use crate::config::toml::DataToml;
use crate::config::{DataSettings, LossOn, Packing, SettingsError};

/// Resolves the data of a run of `steps` steps.
pub(super) fn data(given: &DataToml, steps: u64) -> Result<DataSettings, SettingsError> {
    let files = given.files.clone().unwrap_or_default();
    if files.is_empty() && steps > 0 {
        return Err(SettingsError::Missing {
            key: "data.files",
            message: "name text files or directories of them",
        });
    }
    let eval_files = given.eval_files.clone().unwrap_or_default();
    let validation_fraction = fraction(
        "data.validation_fraction",
        given.validation_fraction.unwrap_or(0.0),
    )?;
    if !eval_files.is_empty() && validation_fraction.get() > 0.0 {
        return Err(value(
            "data.validation_fraction",
            "contradicts data.eval_files: leave one of them out",
        ));
    }
    Ok(DataSettings {
        files,
        eval_files,
        validation_fraction,
        tokenizer: given.tokenizer.clone(),
        chat_template: given.chat_template.clone(),
        packing: word(
            "data.packing",
            given.packing.as_deref(),
            &[
                ("concatenate", Packing::Concatenate),
                ("documents", Packing::Documents),
            ],
        )?,
        loss_on: word(
            "data.loss_on",
            given.loss_on.as_deref(),
            &[("all", LossOn::All), ("completions", LossOn::Completions)],
        )?,
        shuffle: given.shuffle.unwrap_or(true),
        cache: given.cache.clone(),
    })
}
