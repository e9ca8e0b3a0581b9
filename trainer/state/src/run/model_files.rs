//! Files that a model came with besides its weights, copied into the run's directory: `config.json`,
//! tokenizer, chat template. An export copies them again, even if their original directory is gone.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::DirError;

/// Name within a run's directory.
const DIR: &str = "model";
const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// Files that Hugging Face's library writes for a tokenizer.
const TOKENIZER: &[&str] = &[
    "added_tokens.json",
    CHAT_TEMPLATE,
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];
/// Keys of tokens that libraries also read from `config.json`.
const TOKEN_IDS: [&str; 3] = ["bos_token_id", EOS, "pad_token_id"];
const EOS: &str = "eos_token_id";
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

    /// Replaces the chat template, and adds the token that ends an answer to those that end a generated text.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn keep_chat_format(&self, template: &str, end: Option<u32>) -> Result<(), DirError> {
        // `None` for a file that is there and no table: it stays as it is.
        let read = |name: &str| -> Result<Option<Map<String, Value>>, DirError> {
            let path = self.dir.join(name);
            match fs::read(&path) {
                Ok(json) => Ok(serde_json::from_slice(&json).ok()),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(Some(Map::new())),
                Err(source) => Err(DirError::Io {
                    verb: "read",
                    path,
                    source,
                }),
            }
        };
        let mut files = vec![(CHAT_TEMPLATE, template.as_bytes().to_vec())];
        if let Some(end) = end
            && let Some(mut generation) = read(GENERATION)?
        {
            if generation.is_empty() {
                // Without the file, libraries take these from the model's.
                let config = read(CONFIG)?.unwrap_or_default().into_iter();
                generation.extend(config.filter(|(key, _)| TOKEN_IDS.contains(&key.as_str())));
            }
            let mut ends = match generation.remove(EOS) {
                Some(Value::Array(ends)) => ends,
                Some(Value::Null) | None => Vec::new(),
                Some(one) => vec![one],
            };
            if !ends.contains(&end.into()) {
                ends.push(end.into());
            }
            generation.insert(EOS.into(), ends.into());
            files.push((
                GENERATION,
                serde_json::to_vec_pretty(&generation).expect("plain data"),
            ));
        }
        (files.into_iter()).try_for_each(|(name, bytes)| self.replace(name, &bytes))
    }

    /// Undoes [`Self::keep_chat_format`]: has the chat template and the tokens that end a text from the directories of the tokenizer and of the model again.
    /// The files of a directory that is gone stay.
    ///
    /// # Errors
    /// A file cannot be copied or removed.
    pub fn keep_own_chat_format(
        &self,
        model: Option<&Path>,
        tokenizer: Option<&Path>,
    ) -> Result<(), DirError> {
        let read = |dir: &Path, name: &str| fs::read(dir.join(name)).ok();
        let is_gone = |dir: Option<&Path>| dir.is_some_and(|dir| !dir.is_dir());
        let own = tokenizer.and_then(|dir| read(dir, CHAT_TEMPLATE));
        if is_gone(tokenizer) || own == read(&self.dir, CHAT_TEMPLATE) {
            return Ok(());
        }
        for (from, name) in [(tokenizer, CHAT_TEMPLATE), (model, GENERATION)] {
            if is_gone(from) {
                continue;
            }
            match from.and_then(|dir| read(dir, name)) {
                Some(bytes) => self.replace(name, &bytes)?,
                None => {
                    let path = self.dir.join(name);
                    super::dir::remove(&path, fs::remove_file(&path))?;
                }
            }
        }
        Ok(())
    }

    /// Replaces a file whole, if it has other content.
    fn replace(&self, name: &str, bytes: &[u8]) -> Result<(), DirError> {
        let path = self.dir.join(name);
        if fs::read(&path).is_ok_and(|found| found == bytes) {
            return Ok(());
        }
        let new = self.dir.join(format!("{name}.new"));
        fs::create_dir_all(&self.dir)
            .and_then(|()| fs::write(&new, bytes))
            .and_then(|()| File::open(&new)?.sync_all())
            .and_then(|()| fs::rename(&new, &path))
            .map_err(|source| DirError::Io {
                verb: "write",
                path,
                source,
            })
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
