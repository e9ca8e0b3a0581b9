//! Resolves the training data: files, tokenizer, and text for evaluation.

use super::{fraction, value, word};
use crate::config::toml::{DataToml, FileToml};
use crate::config::{
    DataFile, DataSettings, LossOn, OnBadRecord, Packing, RecordFormat, SettingsError,
};

/// Largest weight of a file; a larger one is taken for a typing error.
const WEIGHT_MAX: f64 = 1000.0;

/// Resolves the data of a run of `steps` steps.
pub(super) fn data(given: &DataToml, steps: u64) -> Result<DataSettings, SettingsError> {
    let files = files(given, "data.files", given.files.as_deref())?;
    if files.is_empty() && steps > 0 {
        return Err(SettingsError::Missing {
            key: "data.files",
            message: "name text files or directories of them",
        });
    }
    let eval_files = self::files(given, "data.eval_files", given.eval_files.as_deref())?;
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
    let packing = given.packing.as_deref().map(|packing| {
        let words = [
            ("concatenate", Packing::Concatenate),
            ("documents", Packing::Documents),
        ];
        word("data.packing", Some(packing), &words)
    });
    Ok(DataSettings {
        files,
        eval_files,
        validation_fraction,
        tokenizer: given.tokenizer.clone(),
        chat_template: given.chat_template.clone(),
        packing: packing.transpose()?,
        cross_document_attention: given.cross_document_attention.unwrap_or(false),
        loss_on: word(
            "data.loss_on",
            given.loss_on.as_deref(),
            &[("all", LossOn::All), ("completions", LossOn::Completions)],
        )?,
        shuffle: given.shuffle.unwrap_or(true),
        on_bad_record: word(
            "data.on_bad_record",
            given.on_bad_record.as_deref(),
            &[("error", OnBadRecord::Error), ("skip", OnBadRecord::Skip)],
        )?,
        cache: given.cache.clone(),
    })
}

/// Resolves the entries of `key`. Settings of an entry take precedence over those of all files.
fn files(
    all: &DataToml,
    key: &'static str,
    given: Option<&[FileToml]>,
) -> Result<Vec<DataFile>, SettingsError> {
    let format = |key: &'static str, given: Option<&str>| -> Result<_, SettingsError> {
        given
            .map(|given| word(key, Some(given), &RecordFormat::ALL))
            .transpose()
    };
    let common = format("data.format", all.format.as_deref())?;
    // max_samples limits what is trained on.
    let max_samples = all.max_samples.filter(|_| key == "data.files");
    let mut files = Vec::new();
    for entry in given.unwrap_or_default() {
        let table = match entry {
            FileToml::Path(path) => {
                files.push(DataFile {
                    format: common,
                    max_samples,
                    ..DataFile::new(path.clone())
                });
                continue;
            }
            FileToml::Table(table) => table,
        };
        let wrong = |message: String| value(key, format!("{}: {message}", table.path.display()));
        let weight = table.weight.unwrap_or(1.0);
        if !(weight > 0.0 && weight <= WEIGHT_MAX) {
            return Err(wrong(format!(
                "its weight is {weight}: use a number above 0, at most {WEIGHT_MAX}"
            )));
        }
        let max_samples = table.max_samples.or(max_samples);
        if max_samples == Some(0) {
            return Err(wrong(
                "its max_samples is 0: leave the file out, or use a larger number".into(),
            ));
        }
        files.push(DataFile {
            path: table.path.clone(),
            format: format(key, table.format.as_deref())?.or(common),
            weight,
            max_samples,
        });
    }
    Ok(files)
}
