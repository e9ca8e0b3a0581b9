//! The weights in a directory: its files opened, each parameter found, all headers checked against the model.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::header::{Opened, Tensor};
use super::{Element, INDEX_FILE, SINGLE_FILE, WeightsError};
use crate::model::names::{Place, is_left_aside, places};
use crate::model::{ModelConfig, UnitLayout, unit_layouts};

/// The table of a model of a hundred thousand tensors has some 10 MB.
const INDEX_BYTES_MAX: u64 = 100_000_000;
/// Files of weights in other formats, as their names end.
const OTHER_FORMATS: &[&str] = &[".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".ckpt"];

/// What of weights a directory has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// Files of safetensors.
    Safetensors,
    /// A file of another format, by its name.
    Other(String),
    /// None.
    Nothing,
}

/// Looks for weights in `folder` without opening them.
pub fn found(folder: &Path) -> Found {
    if [SINGLE_FILE, INDEX_FILE]
        .iter()
        .any(|name| folder.join(name).exists())
    {
        return Found::Safetensors;
    }
    let mut others: Vec<String> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| OTHER_FORMATS.iter().any(|end| name.ends_with(end)))
        // Beside weights there are the like of training_args.bin.
        .filter(|name| name.contains("model") || name.contains("consolidated"))
        .collect();
    others.sort_unstable();
    match others.into_iter().next() {
        Some(name) => Found::Other(name),
        None => Found::Nothing,
    }
}

/// The weights of a model, ready to be read. Files stay open.
#[derive(Debug)]
pub struct Weights {
    pub(super) units: Vec<UnitLayout>,
    pub(super) files: Vec<Opened>,
    /// Where each parameter is: [unit][parameter].
    pub(super) stored: Vec<Vec<Stored>>,
    folder: PathBuf,
}

/// Where a parameter's values are.
#[derive(Debug)]
pub(super) struct Stored {
    /// In `Weights::files`.
    pub(super) file: usize,
    /// Of the tensor in the file.
    pub(super) start: u64,
    pub(super) element: Element,
    pub(super) place: Place,
}

impl Weights {
    /// Opens the weights of `model` in `folder`, one file or several.
    ///
    /// # Errors
    /// What is missing, damaged, of another shape or type, or left over, with its file and tensor.
    pub fn open(folder: &Path, model: &ModelConfig) -> Result<Self, WeightsError> {
        let paths = match found(folder) {
            Found::Other(file) => {
                return Err(WeightsError::OtherFormat {
                    folder: folder.to_owned(),
                    file,
                });
            }
            // As transformers has it: the one file, where there are both.
            _ if !folder.join(INDEX_FILE).exists() || folder.join(SINGLE_FILE).exists() => {
                vec![folder.join(SINGLE_FILE)]
            }
            _ => shards(folder)?,
        };
        let files: Vec<Opened> = paths
            .iter()
            .map(|path| Opened::open(path))
            .collect::<Result<_, _>>()?;
        let mut tensors: HashMap<&str, (usize, &Tensor)> = HashMap::new();
        for (number, file) in files.iter().enumerate() {
            for tensor in &file.tensors {
                if let Some((first, _)) = tensors.insert(&tensor.name, (number, tensor)) {
                    return Err(WeightsError::Twice {
                        tensor: tensor.name.clone(),
                        first: files[first].path.clone(),
                        second: file.path.clone(),
                    });
                }
            }
        }
        let units = unit_layouts(model);
        let mut used: BTreeSet<&str> = BTreeSet::new();
        let mut stored = Vec::with_capacity(units.len());
        for (unit, places) in units.iter().zip(places(model)) {
            let mut of_unit = Vec::with_capacity(places.len());
            for (param, place) in unit.params.iter().zip(places) {
                let tensor = place.names().into_iter().find_map(|name| tensors.get(name));
                let Some(&(file, tensor)) = tensor else {
                    return Err(missing(folder, &place));
                };
                used.insert(&tensor.name);
                let element = check(&files[file], tensor, &place.stored_shape(&param.shape))?;
                of_unit.push(Stored {
                    file,
                    start: tensor.start,
                    element,
                    place,
                });
            }
            stored.push(of_unit);
        }
        let mut left_over: Vec<&str> = tensors
            .keys()
            .copied()
            .filter(|name| !used.contains(name) && !is_left_aside(model, name))
            .collect();
        left_over.sort_unstable();
        if let Some(&name) = left_over.first() {
            return Err(WeightsError::LeftOver {
                path: files[tensors[name].0].path.clone(),
                tensor: name.to_owned(),
                others: left_over.len() - 1,
            });
        }
        Ok(Self {
            units,
            files,
            stored,
            folder: folder.to_owned(),
        })
    }

    /// The directory.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What tells these weights from others: files, sizes, and fingerprints that need no reading of all.
    pub fn identity(&self) -> Value {
        let files: Vec<Value> = self
            .files
            .iter()
            .map(|file| {
                let name = file.path.file_name().unwrap_or_default();
                json!({
                    "name": name.to_string_lossy(),
                    "bytes": file.bytes,
                    "fingerprint": format!("{:016x}", file.fingerprint),
                })
            })
            .collect();
        json!({"folder": crate::run::resolved(&self.folder), "files": files})
    }
}

/// The files that the index names, each once.
fn shards(folder: &Path) -> Result<Vec<PathBuf>, WeightsError> {
    let index = folder.join(INDEX_FILE);
    let wrong = |what: String| WeightsError::Index {
        path: index.clone(),
        what,
    };
    let mut text = Vec::new();
    File::open(&index)
        .and_then(|file| file.take(INDEX_BYTES_MAX + 1).read_to_end(&mut text))
        .map_err(WeightsError::io("read", &index))?;
    if text.len() as u64 > INDEX_BYTES_MAX {
        return Err(wrong(format!("more than {INDEX_BYTES_MAX} bytes")));
    }
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let Index { weight_map } = serde_json::from_slice(&text)
        .map_err(|error| wrong(format!("it is no index of safetensors: {error}")))?;
    let names: BTreeSet<&String> = weight_map.values().collect();
    if names.is_empty() {
        return Err(wrong("it names no file".into()));
    }
    let mut paths = Vec::with_capacity(names.len());
    for name in names {
        // A name, not a way to somewhere else.
        if Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(wrong(format!("\"{name}\" is no file's name")));
        }
        let path = folder.join(name);
        if !path.exists() {
            return Err(WeightsError::MissingShard {
                index: index.clone(),
                file: name.clone(),
            });
        }
        paths.push(path);
    }
    Ok(paths)
}

fn missing(folder: &Path, place: &Place) -> WeightsError {
    let hint = match place.name.as_str() {
        "lm_head.weight" => {
            ": if the model's projection is its embedding, say model.tie_word_embeddings = true; files of a model without its language model's head cannot be trained"
        }
        _ => {
            ", which the model that config.json describes has: they are of different models, or not complete"
        }
    };
    WeightsError::Missing {
        folder: folder.to_owned(),
        tensor: place.name.clone(),
        hint,
    }
}

fn check(file: &Opened, tensor: &Tensor, shape: &[usize]) -> Result<Element, WeightsError> {
    let wrong = |what: String| WeightsError::Tensor {
        path: file.path.clone(),
        tensor: tensor.name.clone(),
        what,
    };
    if tensor.shape != shape {
        return Err(wrong(format!(
            "its shape is {:?}, the model that config.json describes has {shape:?}",
            tensor.shape
        )));
    }
    Element::of(tensor.dtype).ok_or_else(|| {
        wrong(format!(
            "{} is not read: save the model in F32, BF16 or F16",
            tensor.dtype
        ))
    })
}
