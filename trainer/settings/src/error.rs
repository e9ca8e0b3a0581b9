//! Errors in settings, each with the key and what to do.

use std::path::{Path, PathBuf};

use offload_support::paths::RelativeTo;

/// File in a run directory with all settings of the newest start, as a run file.
pub const SETTINGS_FILE: &str = "settings.toml";

/// Says how a run's directory, which is no run file, leads to one; empty for other paths.
fn advice_for(path: &Path) -> String {
    let settings = path.join(SETTINGS_FILE);
    match settings.is_file() {
        true => format!(
            "; it is a run's directory, whose settings are in {}",
            settings.display()
        ),
        false => String::new(),
    }
}

/// Error in a run's settings. Nothing has been created or changed when it is returned.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file cannot be read.
    #[error("cannot read {what} {}{}: {source}{}", path.display(), RelativeTo::after(path, source), advice_for(path))]
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
    /// YAML in place of DeepSpeed's JSON.
    #[error(
        "{} is YAML, as Accelerate's configurations: --deepspeed takes DeepSpeed's JSON, such as the file that deepspeed_config_file names there; write settings that stand in deepspeed_config itself as JSON",
        path.display()
    )]
    Yaml { path: PathBuf },
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
    pub fn key(&self) -> Option<&str> {
        match self {
            Self::UnknownKey { key, .. } | Self::NotSupported { key, .. } => Some(key),
            Self::OtherProgram { key, .. } => Some(key),
            Self::Type { key, .. } => Some(key),
            Self::Value { key, .. } | Self::Missing { key, .. } => Some(key),
            _ => None,
        }
    }

    /// Combines `faults` into one error, or returns `Ok` if there are none.
    pub fn all(mut faults: Vec<Self>) -> Result<(), Self> {
        match faults.len() {
            0 => Ok(()),
            1 => Err(faults.remove(0)),
            _ => Err(Self::Several(faults)),
        }
    }

    /// Combines the errors in keys and types, `faults`, with `more` about values. A value of a wrong type was left out; that it is missing
    /// is not said again.
    ///
    /// # Panics
    /// If there are none.
    pub fn with_more(mut faults: Vec<Self>, more: Vec<Self>) -> Self {
        let is_told = |fault: &Self| {
            let same = |other: &Self| other.key() == fault.key();
            fault.key().is_some() && faults.iter().any(same)
        };
        let more: Vec<_> = more.into_iter().filter(|fault| !is_told(fault)).collect();
        // The parameters of an optimizer that is refused need no answer of their own.
        if more
            .iter()
            .any(|fault| fault.key() == Some("optimizer.type"))
        {
            let is_param = |fault: &Self| {
                (fault.key()).is_some_and(|key| key.starts_with("optimizer.params."))
            };
            faults.retain(|fault| !is_param(fault));
        }
        faults.extend(more);
        Self::all(faults).expect_err("something was wrong")
    }
}

pub(crate) fn did_you_mean(nearest: &Option<String>) -> String {
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
