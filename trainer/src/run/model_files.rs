//! What a model came with beside its weights, kept in the run's folder: `config.json`, tokenizer, chat template. An export
//! then has them all, wherever the directory they came from has gone.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::FolderError;
use crate::model::parse;

/// Of a run's folder.
const FOLDER: &str = "model";
const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
/// What Hugging Face's library writes of a tokenizer.
const TOKENIZER: &[&str] = &[
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];
/// The largest tokenizers have some 30 MB.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// The files that a run's model came with.
pub(crate) struct ModelFiles {
    folder: PathBuf,
}

impl ModelFiles {
    /// Those of the run in `run_folder`.
    pub(crate) fn of(run_folder: &Path) -> Self {
        Self {
            folder: run_folder.join(FOLDER),
        }
    }

    /// Where they are, if there are any.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Copies those that are in the folders of the model and of its tokenizer, in the place of what was there before.
    ///
    /// # Errors
    /// One cannot be copied.
    pub(crate) fn keep(
        &self,
        model: Option<&Path>,
        tokenizer: Option<&Path>,
    ) -> Result<(), FolderError> {
        let failed = |verb, path: &Path| {
            let path = path.to_owned();
            move |source| FolderError::Io { verb, path, source }
        };
        self.forget()?;
        let there = |path: &PathBuf| {
            let metadata = fs::metadata(path);
            metadata.is_ok_and(|found| found.is_file() && found.len() <= FILE_BYTES_MAX)
        };
        let of = |folder: Option<&Path>, names: &[&str]| {
            let paths = names.iter().filter_map(|name| Some(folder?.join(name)));
            paths.filter(there).collect::<Vec<_>>()
        };
        let mut paths = of(model, &[CONFIG, GENERATION]);
        paths.extend(of(tokenizer, TOKENIZER));
        if paths.is_empty() {
            return Ok(());
        }
        fs::create_dir(&self.folder).map_err(failed("make the folder", &self.folder))?;
        for from in paths {
            let to = self
                .folder
                .join(from.file_name().expect("a file has a name"));
            fs::copy(&from, &to)
                .and_then(|_| File::open(&to)?.sync_all())
                .map_err(failed("copy", &from))?;
        }
        Ok(())
    }

    /// Removes them.
    ///
    /// # Errors
    /// Something cannot be removed.
    pub(crate) fn forget(&self) -> Result<(), FolderError> {
        super::folder::remove(&self.folder, fs::remove_dir_all(&self.folder))
    }

    /// The keys of `config.json`, if there is one that can be read.
    pub(crate) fn config(&self) -> Option<Map<String, Value>> {
        let text = fs::read_to_string(self.folder.join(CONFIG)).ok()?;
        parse(&text).ok()
    }

    /// The other files that are there.
    pub(crate) fn others(&self) -> Vec<PathBuf> {
        let names = std::iter::once(&GENERATION).chain(TOKENIZER);
        let paths = names.map(|name| self.folder.join(name));
        paths.filter(|path| path.is_file()).collect()
    }
}
