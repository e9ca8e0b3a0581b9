//! Values of keys that have more than one form.

use std::path::PathBuf;

use offload_support::units::parse_bytes;
use serde::{Deserialize, Serialize};

use crate::schema::typed;

typed! {
    Steps = "a whole number";
    Switch = "true, false or \"auto\"";
    Paths = "a path or a list of paths";
    Interval = "a whole number, or \"epoch\"";
    CheckpointInterval = "a whole number of steps, a time such as \"30min\", or \"epoch\"";
    FractionOrAuto = "a fraction from 0 to 1, or \"auto\"";
    ByteCount = "a number of bytes, for example 67108864 or \"64MiB\"";
}

/// A number of steps, or Python's `Infinity` for never.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Steps {
    Number(u64),
    Never(Never),
}

/// How `Infinity` is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Never {
    #[serde(rename = "inf")]
    Never,
}

impl Steps {
    /// The number; larger than that of any run for never.
    pub fn number(self) -> u64 {
        match self {
            Self::Number(steps) => steps,
            Self::Never(_) => i64::MAX as u64,
        }
    }
}

/// A precision's `enabled`: a boolean, or "auto" for the checkpoint's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Switch {
    Said(bool),
    Auto(Auto),
}

/// The value "auto".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Auto {
    #[serde(rename = "auto")]
    Auto,
}

/// DeepSpeed accepts one path; a list makes one store over all of them.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Paths {
    One(PathBuf),
    Several(Vec<PathBuf>),
}

impl Paths {
    /// The paths in the order written.
    pub fn list(&self) -> Vec<PathBuf> {
        match self {
            Self::One(path) => vec![path.clone()],
            Self::Several(paths) => paths.clone(),
        }
    }
}

/// A number of steps, or "epoch".
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Interval {
    Steps(u64),
    Epoch(Epoch),
}

/// A number of steps, or text: a time such as "30min", or "epoch".
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum CheckpointInterval {
    Steps(u64),
    Text(String),
}

/// The value "epoch".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Epoch {
    #[serde(rename = "epoch")]
    Epoch,
}

/// A fraction from 0 to 1, or "auto" for as much as fits.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum FractionOrAuto {
    Fraction(f64),
    Word(String),
}

/// A number of bytes: an integer, or text such as "64MiB".
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ByteCount {
    Number(u64),
    Text(String),
}

impl ByteCount {
    /// Returns the bytes, or `None` if the text is not a size.
    pub fn bytes(&self) -> Option<u64> {
        match self {
            Self::Number(bytes) => Some(*bytes),
            Self::Text(text) => parse_bytes(text).ok(),
        }
    }
}
