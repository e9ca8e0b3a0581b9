//! Opens the weights in a directory: finds each parameter and compares all headers with the model.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::header::{Tensor, WeightsFile};
use super::{Element, INDEX_FILE, SINGLE_FILE, WeightsError};
use crate::model::names::{PROJECTION, ParamLocation, is_left_aside, param_locations};
use crate::model::{ModelConfig, UnitLayout, unit_layouts};

/// Size limit of the index; that of a model with a hundred thousand tensors has about 10 MB.
const INDEX_BYTES_MAX: u64 = 100_000_000;
/// Extensions of weight files in other formats.
const OTHER_FORMATS: &[&str] = &[".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".ckpt"];
/// Extension of files that are still being downloaded, and the directory where Hugging Face's tool keeps
/// them.
const PARTIAL: &str = ".incomplete";
const DOWNLOADS: &str = ".cache/huggingface/download";

/// Refuses a directory in which no safetensors file can be opened, and reports what is there instead.
///
/// # Errors
/// Says what was searched for and what was found.
pub fn look_for(dir: &Path) -> Result<(), WeightsError> {
    if [SINGLE_FILE, INDEX_FILE]
        .iter()
        .any(|name| dir.join(name).exists())
    {
        return Ok(());
    }
    let mut names = names_in(dir);
    let hidden = names_in(&dir.join(DOWNLOADS));
    names.extend(hidden.into_iter().filter(|name| name.ends_with(PARTIAL)));
    names.sort_unstable();
    let first = |wanted: &dyn Fn(&str) -> bool| names.iter().find(|name| wanted(name)).cloned();
    let other = |name: &str| {
        // Other files, for example training_args.bin, have the same extensions.
        let weights = name.contains("model") || name.contains("consolidated");
        weights && OTHER_FORMATS.iter().any(|end| name.ends_with(end))
    };
    let adapter = |name: &str| name.starts_with("adapter_model.") || name == "adapter_config.json";
    let instead = if let Some(link) = [SINGLE_FILE, INDEX_FILE]
        .iter()
        .find_map(|name| Some((name, std::fs::read_link(dir.join(name)).ok()?)))
    {
        let (name, target) = link;
        let target = target.display();
        format!("{name} is a link to {target}, which does not exist: copy or download that file")
    } else if let Some(name) = first(&|name| name.ends_with(PARTIAL)) {
        format!("{name} is an incomplete download: let it finish, or start it again")
    } else if let Some(name) = first(&adapter) {
        format!(
            "{name} belongs to an adapter (LoRA), which changes another model: merge the two with Python (peft's merge_and_unload, then save_pretrained), and name the new directory"
        )
    } else if let Some(name) = first(&|name| name.ends_with(".safetensors")) {
        format!(
            "{name} exists, but its index is missing: copy or download {INDEX_FILE} too, or rename a single file to {SINGLE_FILE}"
        )
    } else if let Some(file) = first(&other) {
        return Err(WeightsError::OtherFormat {
            dir: dir.to_owned(),
            file,
        });
    } else {
        return Err(WeightsError::None {
            dir: dir.to_owned(),
        });
    };
    Err(WeightsError::NotFound {
        dir: dir.to_owned(),
        instead,
    })
}

fn names_in(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}

/// Weights of a model, ready to be read. The files stay open.
#[derive(Debug)]
pub struct Weights {
    pub(super) units: Vec<UnitLayout>,
    pub(super) files: Vec<WeightsFile>,
    /// Position of each parameter: `[unit][parameter]`.
    pub(super) stored: Vec<Vec<StoredParam>>,
    /// Projection in the files of a tied model, which should equal the embedding.
    pub(super) repeated: Option<StoredParam>,
    dir: PathBuf,
}

/// Position of a parameter's values.
#[derive(Debug)]
pub(super) struct StoredParam {
    /// Index in `Weights::files`.
    pub(super) file: usize,
    /// Offset of the tensor in the file.
    pub(super) start: u64,
    pub(super) element: Element,
    pub(super) place: ParamLocation,
}

impl Weights {
    /// Opens the weights of `model` in `dir`, one file or several.
    ///
    /// # Errors
    /// A tensor is missing, damaged, unknown, or has the wrong shape or type; names its file.
    pub fn open(dir: &Path, model: &ModelConfig) -> Result<Self, WeightsError> {
        look_for(dir)?;
        // As in transformers, the single file takes precedence.
        let paths = if dir.join(SINGLE_FILE).exists() {
            vec![dir.join(SINGLE_FILE)]
        } else {
            shards(dir)?
        };
        let files: Vec<WeightsFile> = paths
            .iter()
            .map(|path| WeightsFile::open(path))
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
        for (unit, places) in units.iter().zip(param_locations(model)) {
            let mut of_unit = Vec::with_capacity(places.len());
            for (param, place) in unit.params.iter().zip(places) {
                let tensor = place.names().into_iter().find_map(|name| tensors.get(name));
                let Some(&(file, tensor)) = tensor else {
                    return Err(missing(dir, &place));
                };
                used.insert(&tensor.name);
                let element = check(&files[file], tensor, &place.stored_shape(&param.shape))?;
                of_unit.push(StoredParam {
                    file,
                    start: tensor.start,
                    element,
                    place,
                });
            }
            stored.push(of_unit);
        }
        let repeated = tensors
            .get(PROJECTION)
            .filter(|_| model.tied)
            .map(|&(file, tensor)| repeated(&files[file], file, tensor, &units, &stored))
            .transpose()?;
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
            repeated,
            dir: dir.to_owned(),
        })
    }

    /// The directory of the files.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Identifies these weights by files, sizes and fingerprints, without reading all of them.
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
        json!({"directory": training_state::run::resolved(&self.dir), "files": files})
    }
}

/// Returns a tied model's own projection, which must have the size of the embedding.
fn repeated(
    opened: &WeightsFile,
    file: usize,
    tensor: &Tensor,
    units: &[UnitLayout],
    stored: &[Vec<StoredParam>],
) -> Result<StoredParam, WeightsError> {
    let embedding = &units[0].params[0];
    let place = ParamLocation {
        name: PROJECTION.to_owned(),
        ..stored[0][0].place.clone()
    };
    Ok(StoredParam {
        file,
        start: tensor.start,
        element: check(opened, tensor, &embedding.shape)?,
        place,
    })
}

/// Returns the files named by the index, without duplicates.
fn shards(dir: &Path) -> Result<Vec<PathBuf>, WeightsError> {
    let index = dir.join(INDEX_FILE);
    let wrong = |what: String| WeightsError::Index {
        path: index.clone(),
        what,
    };
    let mut text = Vec::new();
    File::open(&index)
        .and_then(|file| file.take(INDEX_BYTES_MAX + 1).read_to_end(&mut text))
        .map_err(WeightsError::io("read", &index))?;
    if text.len() as u64 > INDEX_BYTES_MAX {
        return Err(wrong(format!("it has more than {INDEX_BYTES_MAX} bytes")));
    }
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let Index { weight_map } = serde_json::from_slice(&text)
        .map_err(|error| wrong(format!("it is not a safetensors index: {error}")))?;
    let names: BTreeSet<&String> = weight_map.values().collect();
    if names.is_empty() {
        return Err(wrong("it names no file".into()));
    }
    let mut paths = Vec::with_capacity(names.len());
    for name in names {
        // Only a file name, not a path to another directory.
        if Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(wrong(format!("\"{name}\" is not a file name")));
        }
        let path = dir.join(name);
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

fn missing(dir: &Path, place: &ParamLocation) -> WeightsError {
    let hint = match place.name.as_str() {
        "lm_head.weight" => {
            ": if the model's projection is its embedding, set model.tie_word_embeddings = true; a model without a language model head cannot be trained"
        }
        _ => {
            ", which the model in config.json has: they belong to different models, or are incomplete"
        }
    };
    WeightsError::Missing {
        dir: dir.to_owned(),
        tensor: place.name.clone(),
        hint,
    }
}

fn check(file: &WeightsFile, tensor: &Tensor, shape: &[usize]) -> Result<Element, WeightsError> {
    let wrong = |what: String| WeightsError::Tensor {
        path: file.path.clone(),
        tensor: tensor.name.clone(),
        what,
    };
    if tensor.shape != shape {
        return Err(wrong(format!(
            "its shape is {:?}, but the model in config.json has {shape:?}",
            tensor.shape
        )));
    }
    Element::from_dtype(tensor.dtype).ok_or_else(|| {
        wrong(format!(
            "{} is not supported: save the model in F32, BF16 or F16",
            tensor.dtype
        ))
    })
}
