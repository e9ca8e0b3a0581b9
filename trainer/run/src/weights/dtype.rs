//! Number type of the weights in a directory, from one file's header.

use std::collections::BTreeMap;
use std::path::Path;

use super::header::WeightsFile;
use super::{Element, SINGLE_FILE};

/// Type of most numbers of the checkpoint in `dir`. `None` if there is no readable checkpoint; reading the
/// weights reports why.
pub(crate) fn stored_element(dir: &Path) -> Option<Element> {
    let single = dir.join(SINGLE_FILE);
    let path = match single.exists() {
        true => single,
        false => first_shard(dir)?,
    };
    let mut counts: BTreeMap<&str, (usize, Element)> = BTreeMap::new();
    for tensor in WeightsFile::open(&path).ok()?.tensors {
        if let Some(element) = Element::from_dtype(tensor.dtype) {
            let numbers: usize = tensor.shape.iter().product();
            counts.entry(element.word()).or_insert((0, element)).0 += numbers;
        }
    }
    let most = counts.into_values().max_by_key(|(numbers, _)| *numbers);
    most.map(|(_, element)| element)
}

/// Returns one of the checkpoint's files; all have the same type.
fn first_shard(dir: &Path) -> Option<std::path::PathBuf> {
    let entries = std::fs::read_dir(dir).ok()?.flatten();
    let shards = entries.map(|entry| entry.path()).filter(|path| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with("model-") && name.ends_with(".safetensors"))
    });
    shards.min()
}
