//! Checks values against their ranges and against each other, and fills in defaults: the settings that both programs have.

pub mod batch;
pub mod optimizer;
pub mod precision;
pub mod reports;
pub mod schedule;

use crate::error::SettingsError;
use crate::toml::ByteCount;
use crate::values::{Fraction, Tier};

/// Errors in the settings, collected to be reported together.
#[derive(Default)]
pub struct Faults(pub Vec<SettingsError>);

impl Faults {
    /// Returns the value in `result`, or records the error and returns `None`.
    pub fn collect<T>(&mut self, result: Result<T, SettingsError>) -> Option<T> {
        result.map_err(|fault| self.0.push(fault)).ok()
    }
}

/// Finds the choice called `given` in `words`; the first one if nothing is given.
pub fn word<T: Clone>(
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
pub fn bytes(key: &'static str, count: Option<&ByteCount>) -> Result<Option<u64>, SettingsError> {
    let Some(count) = count else { return Ok(None) };
    match count.bytes() {
        Some(bytes) if bytes > 0 => Ok(Some(bytes)),
        _ => Err(value(
            key,
            "expected a number of bytes, for example 67108864 or \"64MiB\"",
        )),
    }
}

pub fn required(
    key: &'static str,
    number: Option<u64>,
    message: &'static str,
) -> Result<u64, SettingsError> {
    number.ok_or(SettingsError::Missing { key, message })
}

pub fn at_least(key: &'static str, number: u64, least: u64) -> Result<(), SettingsError> {
    if number >= least {
        Ok(())
    } else {
        Err(value(key, format!("{number}: must be at least {least}")))
    }
}

pub fn within(key: &'static str, number: u64, least: u64, most: u64) -> Result<(), SettingsError> {
    if (least..=most).contains(&number) {
        Ok(())
    } else {
        Err(value(key, format!("{number}: must be {least} to {most}")))
    }
}

pub fn not_negative(key: &'static str, number: f64) -> Result<(), SettingsError> {
    if number.is_finite() && number >= 0.0 {
        Ok(())
    } else {
        Err(value(key, format!("{number}: must not be negative")))
    }
}

pub fn fraction(key: &'static str, number: f64) -> Result<Fraction, SettingsError> {
    Fraction::new(number).ok_or_else(|| value(key, format!("{number}: must be 0 to 1")))
}

pub fn value(key: &'static str, message: impl Into<String>) -> SettingsError {
    SettingsError::Value {
        key,
        message: message.into(),
    }
}

/// Parses where something is kept; "none" if nothing is given.
pub fn tier(key: &'static str, word: Option<&str>) -> Result<Tier, SettingsError> {
    match word.unwrap_or("none") {
        "none" => Ok(Tier::None),
        "cpu" => Ok(Tier::Cpu),
        "nvme" => Ok(Tier::Nvme),
        other => Err(value(
            key,
            format!("\"{other}\": use \"none\", \"cpu\" or \"nvme\""),
        )),
    }
}
