//! `checkpoint.json`: the description of a checkpoint, with a fingerprint of each of its files and of itself.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::write::file_name;
use super::{BUFFER_BYTES, CheckpointError};
use crate::fingerprint::Fingerprint;

/// Version of the description, raised when an older program could not read it.
///
/// 1. The first one.
const VERSION: u64 = 1;

/// Name of the description in a checkpoint's directory.
pub(in crate::run) const DESCRIPTION: &str = "checkpoint.json";

/// Size limit of a description.
const BYTES_MAX: u64 = 4 << 20;

/// The contents of `checkpoint.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointDescription {
    /// Steps done when it was made.
    pub step: u64,
    /// Seconds since 1970 when it was made.
    pub unix_s: u64,
    /// The model's shape and precision and its division into tiles, as in `run.json`.
    pub layout: Value,
    /// The run's state after the step.
    pub state: Value,
    pub files: Vec<SavedFile>,
}

/// File with tiles.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedFile {
    pub name: String,
    pub bytes: u64,
    #[serde(with = "hex")]
    pub fingerprint: u64,
}

impl SavedFile {
    /// Describes the file written by `rank`.
    pub fn of_rank(rank: u32, bytes: u64, fingerprint: u64) -> Self {
        Self {
            name: file_name(rank),
            bytes,
            fingerprint,
        }
    }

    /// Reads and describes the file `name` in `dir`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn of_file(dir: &Path, name: &str) -> std::io::Result<Self> {
        let mut file = File::open(dir.join(name))?;
        let mut described = Self {
            name: name.to_owned(),
            bytes: 0,
            fingerprint: 0,
        };
        let (mut hash, mut buffer) = (Fingerprint::default(), vec![0; BUFFER_BYTES]);
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                count => {
                    hash.add(&buffer[..count]);
                    described.bytes += count as u64;
                }
            }
        }
        described.fingerprint = hash.finish();
        Ok(described)
    }
}

impl CheckpointDescription {
    /// Bytes of all files with tiles.
    pub fn bytes(&self) -> u64 {
        let bytes = |sum: u64, file: &SavedFile| sum.saturating_add(file.bytes);
        self.files.iter().fold(0, bytes)
    }

    /// Mean loss of the checkpoint's step.
    pub fn loss(&self) -> Option<f64> {
        self.state["last"]["loss"].as_f64()
    }

    /// Writes the description into `dir` and syncs it.
    pub fn write(&self, dir: &Path) -> Result<(), CheckpointError> {
        let checkpoint = serde_json::to_value(self).expect("plain data");
        let whole = json!({
            "version": VERSION,
            "fingerprint": hex::text(fingerprint_of(&checkpoint)),
            "save": checkpoint,
        });
        let text = serde_json::to_vec_pretty(&whole).expect("plain data");
        let path = path(dir);
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&path)?;
            file.write_all(&text)?;
            file.sync_all()
        };
        write().map_err(CheckpointError::io("write", &path))
    }

    /// Reads and verifies the description of the checkpoint in `dir`.
    pub(super) fn read(dir: &Path) -> Result<Self, CheckpointError> {
        let path = path(dir);
        let bytes = fs::metadata(&path)
            .map_err(CheckpointError::io("read", &path))?
            .len();
        if bytes > BYTES_MAX {
            return Err(CheckpointError::damaged(
                &path,
                format!("it has {bytes} bytes"),
            ));
        }
        let text = fs::read(&path).map_err(CheckpointError::io("read", &path))?;
        let damaged = |error: serde_json::Error| CheckpointError::damaged(&path, error.to_string());
        let mut whole: Value = serde_json::from_slice(&text).map_err(damaged)?;
        match whole["version"].as_u64() {
            Some(VERSION) => {}
            Some(found) => {
                return Err(CheckpointError::Version {
                    path,
                    found,
                    known: VERSION,
                });
            }
            None => return Err(CheckpointError::damaged(&path, "it has no version")),
        }
        let checkpoint = whole["save"].take();
        let (says, found) = (
            &whole["fingerprint"],
            hex::text(fingerprint_of(&checkpoint)),
        );
        if *says != found {
            let message = format!("expected fingerprint {says}, found \"{found}\"");
            return Err(CheckpointError::damaged(&path, message));
        }
        serde_json::from_value(checkpoint).map_err(damaged)
    }
}

fn path(dir: &Path) -> std::path::PathBuf {
    dir.join(DESCRIPTION)
}

fn fingerprint_of(checkpoint: &Value) -> u64 {
    Fingerprint::compute(&serde_json::to_vec(checkpoint).expect("plain data"))
}

/// 64-bit numbers as 16 hexadecimal digits: many JSON parsers keep only 53 bits.
mod hex {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn text(number: u64) -> String {
        format!("{number:016x}")
    }

    pub(super) fn serialize<S: Serializer>(number: &u64, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&text(*number))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
        let text = String::deserialize(from)?;
        u64::from_str_radix(&text, 16).map_err(D::Error::custom)
    }
}
