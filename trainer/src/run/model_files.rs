//! What a model came with beside its weights, kept in the run's directory: `config.json`, tokenizer, chat template. An export
//! then has them all, wherever the directory they came from has gone.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::DirError;
use crate::model::parse;

/// Of a run's directory.
const DIR: &str = "model";
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
    dir: PathBuf,
}

impl ModelFiles {
    /// Those of the run in `run_dir`.
    pub(crate) fn of(run_dir: &Path) -> Self {
        Self {
            dir: run_dir.join(DIR),
        }
    }

    /// Where they are, if there are any.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Copies those that are in the directories of the model and of its tokenizer, in the place of what was there before.
    ///
    /// # Errors
    /// One cannot be copied.
    pub(crate) fn keep(
        &self,
        model: Option<&Path>,
        tokenizer: Option<&Path>,
    ) -> Result<(), DirError> {
        let failed = |verb, path: &Path| {
            let path = path.to_owned();
            move |source| DirError::Io { verb, path, source }
        };
        self.forget()?;
        let there = |path: &PathBuf| {
            let metadata = fs::metadata(path);
            metadata.is_ok_and(|found| found.is_file() && found.len() <= FILE_BYTES_MAX)
        };
        let of = |dir: Option<&Path>, names: &[&str]| {
            let paths = names.iter().filter_map(|name| Some(dir?.join(name)));
            paths.filter(there).collect::<Vec<_>>()
        };
        let mut paths = of(model, &[CONFIG, GENERATION]);
        paths.extend(of(tokenizer, TOKENIZER));
        if paths.is_empty() {
            return Ok(());
        }
        fs::create_dir(&self.dir).map_err(failed("make the directory", &self.dir))?;
        for from in paths {
            let to = self.dir.join(from.file_name().expect("a file has a name"));
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
    pub(crate) fn forget(&self) -> Result<(), DirError> {
        super::dir::remove(&self.dir, fs::remove_dir_all(&self.dir))
    }

    /// The keys of `config.json`, if there is one that can be read.
    pub(crate) fn config(&self) -> Option<Map<String, Value>> {
        let text = fs::read_to_string(self.dir.join(CONFIG)).ok()?;
        parse(&text).ok()
    }

    /// The other files that are there.
    pub(crate) fn others(&self) -> Vec<PathBuf> {
        let names = std::iter::once(&GENERATION).chain(TOKENIZER);
        let paths = names.map(|name| self.dir.join(name));
        paths.filter(|path| path.is_file()).collect()
    }
}
