//! Files that a model came with besides its weights, copied into the run's directory: `config.json`,
//! tokenizer, chat template. An export copies them again, even if their original directory is gone.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::DirError;

/// Name within a run's directory.
const DIR: &str = "model";
const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
/// Files that Hugging Face's library writes for a tokenizer.
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
/// Size limit of copied files; the largest tokenizers have about 30 MB.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Files that a run's model came with.
pub struct ModelFiles {
    dir: PathBuf,
}

impl ModelFiles {
    /// Files of the run in `run_dir`.
    pub fn in_run_dir(run_dir: &Path) -> Self {
        Self {
            dir: run_dir.join(DIR),
        }
    }

    /// Directory of the files, which need not exist.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Replaces the files with those in the directories of the model and of its tokenizer.
    ///
    /// # Errors
    /// A file cannot be copied.
    pub fn keep(&self, model: Option<&Path>, tokenizer: Option<&Path>) -> Result<(), DirError> {
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
        fs::create_dir(&self.dir).map_err(failed("create the directory", &self.dir))?;
        for from in paths {
            let to = self.dir.join(from.file_name().expect("a file has a name"));
            fs::copy(&from, &to)
                .and_then(|_| File::open(&to)?.sync_all())
                .map_err(failed("copy", &from))?;
        }
        Ok(())
    }

    /// Removes all files.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn forget(&self) -> Result<(), DirError> {
        super::dir::remove(&self.dir, fs::remove_dir_all(&self.dir))
    }

    /// Reads the keys of `config.json`; `None` if it cannot be read.
    pub fn config(&self) -> Option<Map<String, Value>> {
        serde_json::from_slice(&fs::read(self.dir.join(CONFIG)).ok()?).ok()
    }

    /// All files except `config.json`.
    pub fn others(&self) -> Vec<PathBuf> {
        let names = std::iter::once(&GENERATION).chain(TOKENIZER);
        let paths = names.map(|name| self.dir.join(name));
        paths.filter(|path| path.is_file()).collect()
    }
}
