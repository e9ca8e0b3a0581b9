//! Checks values against their ranges and against each other, and fills in defaults.

mod batch;
mod data;
mod model;
mod offload;
mod optimizer;
mod placement;
mod precision;
mod reports;
mod schedule;
mod train;

use super::settings::STEPS_UNKNOWN;
use super::toml::{ByteCount, ConfigToml, TrainToml};
use super::{Fraction, RunSettings, Said, SettingsError, WrittenFor};

/// Longest sequence; a larger value is taken for a typing error.
const SEQ_LEN_MAX: u64 = 1 << 20;

/// Errors in the settings, collected to be reported together.
#[derive(Default)]
pub(super) struct Faults(Vec<SettingsError>);

impl Faults {
    /// Returns the value in `result`, or records the error and returns `None`.
    fn take<T>(&mut self, result: Result<T, SettingsError>) -> Option<T> {
        result.map_err(|fault| self.0.push(fault)).ok()
    }
}

/// Settings before they were resolved, to resolve them again when the number of steps is known.
#[derive(Clone, Debug)]
pub(super) struct Unresolved {
    pub(super) config: ConfigToml,
    name: String,
    written_for: WrittenFor,
    said: Said,
}

impl Unresolved {
    /// Resolves the settings of a run of `steps` steps, whatever its length was.
    pub(super) fn with_steps(&self, steps: u64, ranks: u32) -> Result<RunSettings, SettingsError> {
        let mut config = self.config.clone();
        config.train.epochs = None;
        config.train.steps = Some(steps);
        let said = self.said.clone();
        resolve(config, &self.name, Some(ranks), self.written_for, said)
            .map_err(|faults| SettingsError::all(faults).expect_err("there is at least one error"))
    }
}

/// Resolves a run.
///
/// # Errors
/// All errors found; of values that depend on each other only the first.
pub(super) fn resolve(
    config: ConfigToml,
    name: &str,
    ranks: Option<u32>,
    written_for: WrittenFor,
    mut said: Said,
) -> Result<RunSettings, Vec<SettingsError>> {
    let faults = &mut Faults::default();
    let unresolved = Box::new(Unresolved {
        config: config.clone(),
        name: name.to_owned(),
        written_for,
        said: said.clone(),
    });
    let (steps, seq_len) = steps_and_seq_len(&config.train, faults);
    // Checks that depend on an invalid number use 1 in its place.
    let (steps_or_one, seq_len_or_one) = (steps.unwrap_or(1), seq_len.unwrap_or(1));
    let batch = faults.take(batch::batch(&config, seq_len_or_one, ranks));
    let optimizer = optimizer::optimizer(&config.optimizer, &mut said, faults);
    let lr = optimizer.as_ref().map_or(0.0, |optimizer| optimizer.lr);
    let lr = faults.take(schedule::schedule(
        &config,
        lr,
        // A run without steps has a schedule too, although nothing uses it.
        steps_or_one.max(1),
        written_for,
        &mut said,
    ));
    let placement = faults.take(placement::placement(
        &config.zero_optimization,
        &config.offload,
        &mut said.notes,
    ));
    let model = faults.take(model::model(&config.model, seq_len_or_one, &mut said.notes));
    let precision = faults.take(precision::precision(&config, model.as_ref(), &mut said));
    if let (Some(optimizer), Some(model)) = (&optimizer, &model) {
        optimizer::note_unmatched(&optimizer.decay, &model.config, &mut said.notes);
        optimizer::check_groups(optimizer, &model.config, faults);
    }
    let gradient_clipping = config.gradient_clipping.unwrap_or(1.0);
    faults.take(not_negative("gradient_clipping", gradient_clipping));
    let data = faults.take(data::data(&config.data, steps_or_one));
    let all_ranks = batch.map_or(1, |(_, ranks)| ranks);
    let train = train::train(
        &config,
        name,
        steps_or_one,
        all_ranks,
        data.as_ref(),
        faults,
    );
    if let (Some(model), Some(train)) = (&model, &train) {
        faults.take(train::check_mlp_chunks(train.mlp_chunks, &model.config));
    }
    let device = train.as_ref().map(|train| train.device);
    let offload = offload::offload(&config, placement.as_ref(), device, &mut said.notes, faults);
    let reports = train
        .as_ref()
        .and_then(|train| faults.take(reports::reports(&config, &train.run_dir)));
    let found = (
        steps, seq_len, batch, optimizer, lr, placement, model, precision, data,
    );
    let (
        Some(_),
        Some(_),
        Some((batch, ranks)),
        Some(optimizer),
        Some(lr),
        Some(placement),
        Some(model),
        Some((dtype, overflow)),
        Some(data),
    ) = found
    else {
        return Err(std::mem::take(&mut faults.0));
    };
    let (Some(train), Some(offload), Some(reports), true) =
        (train, offload, reports, faults.0.is_empty())
    else {
        return Err(std::mem::take(&mut faults.0));
    };
    Ok(RunSettings {
        reports,
        model: model.config,
        model_dir: model.dir,
        first_weights: model.first_weights,
        dropout: model.dropout,
        dtype,
        overflow,
        batch,
        ranks,
        local_ranks: ranks,
        gradient_clipping,
        gradient_clipping_is_default: config.gradient_clipping.is_none(),
        optimizer,
        lr,
        data,
        train,
        offload,
        placement,
        warnings: said.warnings,
        notes: said.notes,
        unresolved,
    })
}

/// Resolves the two numbers that every run file contains. The number of steps of a run whose length is set in
/// epochs is not known yet.
fn steps_and_seq_len(train: &TrainToml, faults: &mut Faults) -> (Option<u64>, Option<u64>) {
    let steps = match (train.steps, train.epochs) {
        (Some(_), Some(_)) => Err(value(
            "train.epochs",
            "contradicts train.steps: leave one of them out",
        )),
        (None, Some(epochs)) if epochs.is_finite() && epochs > 0.0 => Ok(STEPS_UNKNOWN),
        (None, Some(epochs)) => Err(value(
            "train.epochs",
            format!("{epochs}: must be more than 0"),
        )),
        (steps, None) => required(
            "train.steps",
            steps,
            "set the number of optimizer steps, or train.epochs",
        ),
    };
    let steps = faults.take(steps);
    let seq_len = required(
        "train.seq_len",
        train.seq_len,
        "set the number of tokens in a sequence",
    );
    let seq_len = faults.take(seq_len.and_then(|seq_len| {
        within("train.seq_len", seq_len, 1, SEQ_LEN_MAX)?;
        Ok(seq_len)
    }));
    (steps, seq_len)
}

/// Finds the choice called `given` in `words`; the first one if nothing is given.
fn word<T: Clone>(
    key: &'static str,
    given: Option<&str>,
    words: &[(&str, T)],
) -> Result<T, SettingsError> {
    let given = given.unwrap_or(words[0].0);
    let found = words.iter().find(|(word, _)| *word == given);
    found.map(|(_, meaning)| meaning.clone()).ok_or_else(|| {
        let names: Vec<String> = words
            .iter()
            .map(|(word, _)| format!("\"{word}\""))
            .collect();
        let (last, others) = names.split_last().expect("there are several choices");
        value(
            key,
            format!("\"{given}\": use {} or {last}", others.join(", ")),
        )
    })
}

/// Parses a number of bytes that must not be 0.
fn bytes(key: &'static str, count: Option<&ByteCount>) -> Result<Option<u64>, SettingsError> {
    let Some(count) = count else { return Ok(None) };
    match count.bytes() {
        Some(bytes) if bytes > 0 => Ok(Some(bytes)),
        _ => Err(value(
            key,
            "expected a number of bytes, for example 67108864 or \"64MiB\"",
        )),
    }
}

fn required(
    key: &'static str,
    number: Option<u64>,
    message: &'static str,
) -> Result<u64, SettingsError> {
    number.ok_or(SettingsError::Missing { key, message })
}

fn at_least(key: &'static str, number: u64, least: u64) -> Result<(), SettingsError> {
    if number >= least {
        Ok(())
    } else {
        Err(value(key, format!("{number}: must be at least {least}")))
    }
}

fn within(key: &'static str, number: u64, least: u64, most: u64) -> Result<(), SettingsError> {
    if (least..=most).contains(&number) {
        Ok(())
    } else {
        Err(value(key, format!("{number}: must be {least} to {most}")))
    }
}

fn not_negative(key: &'static str, number: f64) -> Result<(), SettingsError> {
    if number.is_finite() && number >= 0.0 {
        Ok(())
    } else {
        Err(value(key, format!("{number}: must not be negative")))
    }
}

fn fraction(key: &'static str, number: f64) -> Result<Fraction, SettingsError> {
    Fraction::new(number).ok_or_else(|| value(key, format!("{number}: must be 0 to 1")))
}

fn value(key: &'static str, message: impl Into<String>) -> SettingsError {
    SettingsError::Value {
        key,
        message: message.into(),
    }
}
