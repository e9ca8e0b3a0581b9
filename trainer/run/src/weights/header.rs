//! The header of a safetensors file, checked completely because it is untrusted input.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;

use super::WeightsError;
use training_state::fingerprint::Fingerprint;

/// Limit defined by the format.
const HEADER_BYTES_MAX: u64 = 100_000_000;
const LENGTH_BYTES: u64 = 8;
/// How a file begins that Git LFS left in the place of a large one.
const GIT_LFS: &[u8; LENGTH_BYTES as usize] = b"version ";
/// Key of the file's own description, which is not a tensor.
const METADATA: &str = "__metadata__";
/// Bytes at the start and at the end of the data that are part of a file's fingerprint.
const SAMPLE_BYTES: u64 = 4096;

/// Open file with its tensors.
#[derive(Debug)]
pub(super) struct WeightsFile {
    pub(super) path: PathBuf,
    pub(super) file: File,
    pub(super) bytes: u64,
    /// Fingerprint of the header and of the data's start and end: distinguishes files of one shape without
    /// reading them.
    pub(super) fingerprint: u64,
    pub(super) tensors: Vec<Tensor>,
}

/// Tensor of a file whose bytes are present.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Offset in the file.
    pub(super) start: u64,
}

/// Header entry of a tensor.
#[derive(serde::Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

impl WeightsFile {
    /// Opens a file and checks its header.
    pub(super) fn open(path: &Path) -> Result<Self, WeightsError> {
        let file = File::open(path).map_err(WeightsError::io("read", path))?;
        let metadata = file.metadata().map_err(WeightsError::io("read", path))?;
        let bytes = metadata.len();
        let wrong = |what: String| WeightsError::Header {
            path: path.to_owned(),
            what,
        };
        let cut_short = |needed_bytes| WeightsError::CutShort {
            path: path.to_owned(),
            needed_bytes,
            found_bytes: bytes,
        };
        if !metadata.is_file() {
            return Err(wrong("it is not a file".into()));
        }
        if bytes < LENGTH_BYTES {
            return Err(cut_short(LENGTH_BYTES));
        }
        let read = |at: u64, buffer: &mut [u8]| {
            file.read_exact_at(buffer, at)
                .map_err(WeightsError::io("read", path))
        };
        let mut length = [0; LENGTH_BYTES as usize];
        read(0, &mut length)?;
        let header_bytes = u64::from_le_bytes(length);
        if length == *GIT_LFS {
            return Err(wrong(
                "it is a Git LFS pointer to the weights: bring them with `git lfs pull`, or download the model with `hf download`".into(),
            ));
        }
        if header_bytes > HEADER_BYTES_MAX {
            return Err(wrong(format!("its header has {header_bytes} bytes")));
        }
        let data_start = LENGTH_BYTES + header_bytes;
        if data_start > bytes {
            return Err(cut_short(data_start));
        }
        let mut header = vec![0; header_bytes as usize];
        read(LENGTH_BYTES, &mut header)?;
        let Entries(entries) = serde_json::from_slice(&header)
            .map_err(|error| wrong(format!("its header is invalid: {error}")))?;
        let (tensors, data_bytes) = tensors(path, entries, data_start)?;
        let needed_bytes = data_start.saturating_add(data_bytes);
        if needed_bytes > bytes {
            return Err(cut_short(needed_bytes));
        }
        if needed_bytes < bytes {
            let more = bytes - needed_bytes;
            return Err(wrong(format!("{more} bytes follow the last tensor")));
        }
        let mut print = Fingerprint::default();
        print.add(&header);
        let sample_bytes = SAMPLE_BYTES.min(data_bytes);
        let mut sample = vec![0; sample_bytes as usize];
        for at in [data_start, bytes - sample_bytes] {
            read(at, &mut sample)?;
            print.add(&sample);
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            bytes,
            fingerprint: print.finish(),
            tensors,
        })
    }
}

/// Returns the tensors described by `entries`, and the bytes of all together. Tensors must be stored without
/// gaps.
fn tensors(
    path: &Path,
    mut entries: Vec<(String, Value)>,
    data_start: u64,
) -> Result<(Vec<Tensor>, u64), WeightsError> {
    let mut found = Vec::with_capacity(entries.len());
    entries.retain(|(name, _)| name != METADATA);
    for (name, value) in entries {
        let wrong = |what: String| WeightsError::Tensor {
            path: path.to_owned(),
            tensor: name.clone(),
            what,
        };
        let entry: Entry = serde_json::from_value(value)
            .map_err(|error| wrong(format!("its entry in the header is invalid: {error}")))?;
        let dtype: Dtype = serde_json::from_value(Value::String(entry.dtype.clone()))
            .map_err(|_| wrong(format!("\"{}\" is not a known number type", entry.dtype)))?;
        let (start, end) = entry.data_offsets;
        let bits = entry
            .shape
            .iter()
            .try_fold(dtype.bitsize() as u64, |bits, &size| {
                bits.checked_mul(size as u64)
            });
        let held = end
            .checked_sub(start)
            .and_then(|bytes| bytes.checked_mul(8));
        if bits.is_none() || bits != held {
            return Err(wrong(format!(
                "{dtype} of shape {:?} does not have the size of bytes {start} to {end}",
                entry.shape
            )));
        }
        found.push((
            start,
            end,
            Tensor {
                name,
                dtype,
                shape: entry.shape,
                start: data_start.saturating_add(start),
            },
        ));
    }
    found.sort_by_key(|(start, end, _)| (*start, *end));
    let mut before = 0;
    for (start, end, tensor) in &found {
        if *start != before {
            return Err(WeightsError::Tensor {
                path: path.to_owned(),
                tensor: tensor.name.clone(),
                what: format!("it starts at byte {start} of the data instead of {before}"),
            });
        }
        before = *end;
    }
    let tensors = found.into_iter().map(|(_, _, tensor)| tensor);
    Ok((tensors.collect(), before))
}

/// Table of a header without duplicate names.
struct Entries(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut names = std::collections::HashSet::new();
                let mut entries = Vec::new();
                while let Some((name, value)) = map.next_entry::<String, Value>()? {
                    if !names.insert(name.clone()) {
                        let message = format!("duplicate tensor {name}");
                        return Err(serde::de::Error::custom(message));
                    }
                    entries.push((name, value));
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}
