//! The type of numbers that the weights in a directory are in, by a look at one file's header.

use std::collections::BTreeMap;
use std::path::Path;

use super::header::Opened;
use super::{Element, SINGLE_FILE};

/// What most numbers of the checkpoint in `dir` are in. `None` where there is none, or none that can be read: what reads the
/// weights says why.
pub(crate) fn stored_element(dir: &Path) -> Option<Element> {
    let single = dir.join(SINGLE_FILE);
    let path = match single.exists() {
        true => single,
        false => first_shard(dir)?,
    };
    let mut counts: BTreeMap<&str, (usize, Element)> = BTreeMap::new();
    for tensor in Opened::open(&path).ok()?.tensors {
        if let Some(element) = Element::of(tensor.dtype) {
            let numbers: usize = tensor.shape.iter().product();
            counts.entry(element.word()).or_insert((0, element)).0 += numbers;
        }
    }
    let most = counts.into_values().max_by_key(|(numbers, _)| *numbers);
    most.map(|(_, element)| element)
}

/// All shards of a checkpoint are alike in this.
fn first_shard(dir: &Path) -> Option<std::path::PathBuf> {
    let entries = std::fs::read_dir(dir).ok()?.flatten();
    let shards = entries.map(|entry| entry.path()).filter(|path| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with("model-") && name.ends_with(".safetensors"))
    });
    shards.min()
}
