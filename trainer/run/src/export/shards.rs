//! Assigns each tensor a file and a position in it, from the model alone.

use std::collections::HashMap;

use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Map, Value, json};

use crate::model::names::{ParamLocation, param_locations};
use crate::model::{ModelConfig, UnitLayout};
use crate::weights::{Element, SINGLE_FILE};

/// Alignment of the data, as in Hugging Face's own files.
const HEADER_ALIGN_BYTES: usize = 8;

/// Files of a model.
pub(super) struct Shards {
    pub(super) element: Element,
    pub(super) units: Vec<UnitLayout>,
    /// Position of each parameter: `[unit][parameter]`.
    pub(super) targets: Vec<Vec<Target>>,
    pub(super) files: Vec<ShardFile>,
}

/// Position of a parameter's tensor.
pub(super) struct Target {
    pub(super) place: ParamLocation,
    /// Index in `Shards::files`.
    pub(super) file: usize,
    /// Offset in the file.
    pub(super) start: u64,
}

/// File to be written.
pub(super) struct ShardFile {
    pub(super) name: String,
    /// Length field and header, padded.
    pub(super) header: Vec<u8>,
    pub(super) data_bytes: u64,
    tensors: Vec<(String, TensorInfo)>,
}

impl Shards {
    /// Places tensors in the model's order; starts a new file when one would exceed `shard_bytes`.
    pub(super) fn new(
        model: &ModelConfig,
        units: &[UnitLayout],
        element: Element,
        shard_bytes: u64,
    ) -> Self {
        let mut files: Vec<ShardFile> = Vec::new();
        // By name, because several parameters may be parts of one tensor.
        let mut placed: HashMap<String, (usize, u64)> = HashMap::new();
        let mut targets = Vec::with_capacity(units.len());
        for (unit, places) in units.iter().zip(param_locations(model)) {
            let of_unit = unit.params.iter().zip(places).map(|(param, place)| {
                let (file, start) = *placed.entry(place.name.clone()).or_insert_with(|| {
                    let shape = place.stored_shape(&param.shape);
                    let bytes = (shape.iter().product::<usize>() * element.size_bytes()) as u64;
                    let full = files.last().is_none_or(|last| {
                        last.data_bytes > 0 && last.data_bytes + bytes > shard_bytes
                    });
                    if full {
                        files.push(ShardFile {
                            name: String::new(),
                            header: Vec::new(),
                            data_bytes: 0,
                            tensors: Vec::new(),
                        });
                    }
                    let number = files.len() - 1;
                    let file = &mut files[number];
                    let start = file.data_bytes;
                    file.data_bytes += bytes;
                    let info = TensorInfo {
                        dtype: element.dtype(),
                        shape,
                        data_offsets: (start as usize, file.data_bytes as usize),
                    };
                    file.tensors.push((place.name.clone(), info));
                    (number, start)
                });
                Target { place, file, start }
            });
            targets.push(of_unit.collect::<Vec<_>>());
        }
        let count = files.len();
        for (number, file) in files.iter_mut().enumerate() {
            file.name = if count == 1 {
                SINGLE_FILE.to_owned()
            } else {
                format!("model-{:05}-of-{count:05}.safetensors", number + 1)
            };
            file.header = header(&file.tensors);
        }
        // Converts offsets in the data to offsets in the file.
        for target in targets.iter_mut().flatten() {
            target.start += files[target.file].header.len() as u64;
        }
        Self {
            element,
            units: units.to_vec(),
            targets,
            files,
        }
    }

    /// Number of files.
    pub(super) fn count(&self) -> usize {
        self.files.len()
    }

    /// Bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        let files = self.files.iter();
        files
            .map(|file| file.header.len() as u64 + file.data_bytes)
            .sum()
    }

    /// Returns the index of several files; `None` for a single file.
    pub(super) fn index(&self) -> Option<Value> {
        if self.files.len() == 1 {
            return None;
        }
        let mut map = Map::new();
        for file in &self.files {
            let names = file.tensors.iter();
            map.extend(names.map(|(name, _)| (name.clone(), json!(file.name))));
        }
        let data_bytes: u64 = self.files.iter().map(|file| file.data_bytes).sum();
        Some(json!({"metadata": {"total_size": data_bytes}, "weight_map": map}))
    }
}

fn header(tensors: &[(String, TensorInfo)]) -> Vec<u8> {
    let made_by = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(made_by), tensors.to_vec())
        .expect("tensors are contiguous and have the sizes of their shapes");
    let mut text = serde_json::to_vec(&metadata).expect("plain data");
    text.resize(text.len().next_multiple_of(HEADER_ALIGN_BYTES), b' ');
    let length = (text.len() as u64).to_le_bytes();
    [&length[..], &text].concat()
}
