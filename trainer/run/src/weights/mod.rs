//! A model's weights in safetensors files: read from a directory into tiles, and written to a directory
//! (`export`).
//!
//! ```text
//!   model.safetensors                      one file
//!   model.safetensors.index.json           or several: {"weight_map": {tensor: file}}
//!   model-00001-of-00002.safetensors ...
//!
//!   a file   header bytes u64 | header: {tensor: {dtype, shape, data_offsets}} as JSON | data
//! ```
//!
//! All headers are read and compared with the model before anything is created: every parameter must be
//! present in its shape, and nothing else. All values are then read once, before a fresh run creates its
//! first file. After that, values are read by unit and range of elements, from any thread and any rank, and
//! are never in memory as a whole. `model/names.rs` defines the names and layouts of tensors.

mod check;
mod dtype;
mod element;
mod header;
mod read;
mod source;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

pub(crate) use dtype::stored_element;
pub(crate) use element::Element;
pub use source::{Weights, look_for};

/// Names of the single file, and of the table of several files.
pub(crate) const SINGLE_FILE: &str = "model.safetensors";
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";

/// Error in the weights of a directory. Errors in headers are found before a run is created.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("cannot {verb} {}: {source}", path.display())]
    Io {
        verb: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "{} is truncated: its header describes {needed_bytes} bytes, but it has {found_bytes}: copy or download it again",
        path.display()
    )]
    CutShort {
        path: PathBuf,
        needed_bytes: u64,
        found_bytes: u64,
    },
    #[error("{} is damaged or not a safetensors file: {what}", path.display())]
    Header { path: PathBuf, what: String },
    #[error("{}, tensor {tensor}: {what}", path.display())]
    Tensor {
        path: PathBuf,
        tensor: String,
        what: String,
    },
    #[error("{}: {what}", path.display())]
    Index { path: PathBuf, what: String },
    #[error(
        "{} names the file {file}, which does not exist: copy or download it too",
        index.display()
    )]
    MissingShard { index: PathBuf, file: String },
    #[error(
        "tensor {tensor} is in {} and in {}: remove the file that does not belong to this model",
        first.display(), second.display()
    )]
    Twice {
        tensor: String,
        first: PathBuf,
        second: PathBuf,
    },
    #[error("the weights in {} have no tensor {tensor}{hint}", dir.display())]
    Missing {
        dir: PathBuf,
        tensor: String,
        hint: &'static str,
    },
    #[error(
        "{}, tensor {tensor}: the model in config.json has no such parameter{}: weights and config.json belong to different models",
        path.display(), others_words(*others)
    )]
    LeftOver {
        path: PathBuf,
        tensor: String,
        others: usize,
    },
    #[error(
        "no weights in {}: neither {SINGLE_FILE} nor {INDEX_FILE} can be opened there. {instead}; or start from random weights with model.init = \"random\"",
        dir.display()
    )]
    NotFound { dir: PathBuf, instead: String },
    #[error(
        "no weights in {}: neither {SINGLE_FILE} nor {INDEX_FILE} can be opened there. It contains no weights in other formats either: name the directory with the weights; or start from random weights with model.init = \"random\"",
        dir.display()
    )]
    None { dir: PathBuf },
    #[error(
        "{}, tensor lm_head.weight: it differs from the embedding ({tensor}), although config.json has tie_word_embeddings: element {at_elem} is {value}, the embedding's is {embedding}. To train them apart, set model.tie_word_embeddings = false, as transformers 5 loads them; to train the embedding alone, as transformers 4 does, remove lm_head.weight from the file",
        path.display()
    )]
    NotTied {
        path: PathBuf,
        tensor: String,
        at_elem: usize,
        value: f32,
        embedding: f32,
    },
    #[error(
        "cannot start {count} threads to check the weights: {message}; raise the limit of processes (ulimit -u)"
    )]
    Threads { count: usize, message: String },
    #[error(
        "{} has weights in {file} but no safetensors: convert them with Python, transformers.AutoModelForCausalLM.from_pretrained(\"{}\").save_pretrained(\"NEW_DIR\"), and name that directory; or start from random weights with model.init = \"random\"",
        dir.display(), dir.display()
    )]
    OtherFormat { dir: PathBuf, file: String },
}

impl WeightsError {
    /// Returns a conversion for `map_err` for the operation `verb` on `path`.
    pub(crate) fn io(verb: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { verb, path, source }
    }
}

fn others_words(count: usize) -> String {
    match count {
        0 => String::new(),
        1 => " (nor for one other)".into(),
        count => format!(" (nor for {count} others)"),
    }
}
