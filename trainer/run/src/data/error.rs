//! Errors of a run's data.

use std::path::{Path, PathBuf};

use offload_support::paths::RelativeTo;

use super::read::DocumentPosition;

/// Error in a run's data.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error("{key}: cannot read {}{}: {source}{}", path.display(), RelativeTo::after(path, source), hub_hint(path, source))]
    Read {
        key: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{key}: {} is empty: name a file with text in it", path.display())]
    Empty { key: &'static str, path: PathBuf },
    #[error("{key}: {} is neither a file nor a directory: name a file or directory with text in it", path.display())]
    NoFile { key: &'static str, path: PathBuf },
    #[error("{key}: {} contains no .jsonl, .json, .csv, .tsv, .parquet, .arrow, .u16, .u32, .npy or text file", path.display())]
    NoText { key: &'static str, path: PathBuf },
    #[error("{key}: {} has more than {files_max} files, or directories nested deeper than {depth_max}: name a smaller directory", path.display())]
    TooMany {
        key: &'static str,
        path: PathBuf,
        files_max: usize,
        depth_max: usize,
    },
    #[error(
        "{key}: {} and {} are the same file, which would count twice: leave one of them out",
        first.display(), second.display()
    )]
    Twice {
        key: &'static str,
        first: PathBuf,
        second: PathBuf,
    },
    #[error("{key}: {} is not a supported format: {instead}", path.display())]
    Format {
        key: &'static str,
        path: PathBuf,
        instead: &'static str,
    },
    /// A line or a row that is not a valid record.
    #[error("{place}: {message}")]
    Record {
        place: DocumentPosition,
        message: String,
    },
    /// A file whose records cannot be found.
    #[error("{} is damaged: {message}", path.display())]
    Damaged { path: PathBuf, message: String },
    #[error(
        "data.tokenizer: conversations need a chat template, but {} has none in tokenizer_config.json or chat_template.jinja: set data.chat_template to the name of a known template ({names}) or to a file",
        dir.display()
    )]
    NoTemplate { dir: PathBuf, names: String },
    #[error("{key}: {message}")]
    Setting { key: &'static str, message: String },
    #[error(
        "{key}: {} has {tokenizer} tokens, but the model's vocab_size is {model}: this is the tokenizer of another model. Name the model's own tokenizer, or set model.vocab_size = {tokenizer} for a model that is trained from scratch",
        path.display()
    )]
    OtherTokenizer {
        key: &'static str,
        path: PathBuf,
        tokenizer: u64,
        model: u64,
    },
    #[error(
        "{key}: the {part} has {tokens} tokens, but one window of train.seq_len = {seq_len} tokens needs {needed}: add more text or lower train.seq_len"
    )]
    TooShort {
        key: &'static str,
        part: &'static str,
        tokens: u64,
        needed: u64,
        seq_len: usize,
    },
    #[error(
        "data.loss_on: no token of the {part} counts in the loss, so there is nothing to learn: {findings}"
    )]
    NothingCounts {
        part: &'static str,
        /// What was found in the data.
        findings: String,
    },
    #[error("{cache}: cannot {verb} {}: {source}", path.display(), cache = "data.cache")]
    Cache {
        verb: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    /// Damage found during training. A start would find it and tokenize again.
    #[error(
        "data.cache: {} is damaged at byte {offset}: {message}. Start the run again, which recreates the tokens",
        path.display()
    )]
    DamagedCache {
        path: PathBuf,
        offset: u64,
        message: String,
    },
    #[error(
        "data.cache: another trainer holds {} and has written nothing for {waited_s} s: end it, or set another data.cache",
        path.display()
    )]
    Busy { path: PathBuf, waited_s: u64 },
    /// Not an error: reading ends because no more documents are needed.
    #[error("no more documents are needed")]
    Enough,
    #[error(
        "cannot start {count} threads for tokenizing: {message}; raise the limit of processes (ulimit -u)"
    )]
    Threads { count: usize, message: String },
}

/// Returns what to do if `path` does not exist and looks like the name of a data set on a hub, such as "owner/name".
fn hub_hint(path: &Path, error: &std::io::Error) -> &'static str {
    let is_name =
        path.is_relative() && path.components().count() == 2 && path.extension().is_none();
    if is_name && error.kind() == std::io::ErrorKind::NotFound {
        " (the trainer downloads nothing; use `hf download NAME --repo-type dataset --local-dir DIR`)"
    } else {
        ""
    }
}

impl DataError {
    /// Returns a conversion for `map_err` for reading the file `path`, which the setting `key` names.
    pub(super) fn reading(key: &'static str, path: &Path) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::Read {
            key,
            path: path.to_path_buf(),
            source,
        }
    }
}
