//! Finds a run's training files and reads its tokenizer, before anything is tokenized.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::read::{DocumentKind, FoundFiles, find, first};
use super::tokenize::{ChatFormat, Encoding, Tokenizer, TokenizerSettings};
use super::{Data, DataError};
use crate::config::{
    DataFile, DataSettings, Interval, LossOn, OnBadRecord, Packing, RecordFormat, RunSettings,
};
use training_state::fingerprint::Fingerprint;
use training_state::run::{resolved, tokens_dir};

/// Version of the tokenization; raised when the same files would give other tokens.
const TOKENS_VERSION: u64 = 4;

/// Data of a run before it is tokenized.
pub struct Corpus {
    pub(super) tokenizer: Tokenizer,
    pub(super) encoding: Encoding,
    pub(super) packing: Packing,
    pub(super) seq_len: usize,
    pub(super) shuffle: bool,
    pub(super) cross_document_attention: bool,
    pub(super) on_bad_record: OnBadRecord,
    pub(super) evaluates: bool,
    pub(super) train: CorpusPart,
    /// Files of `data.eval_files`.
    pub(super) eval: Option<CorpusPart>,
}

/// Files that are tokenized into one token file.
pub(super) struct CorpusPart {
    /// Name in messages.
    pub(super) name: &'static str,
    /// The setting that names the files.
    pub(super) setting: &'static str,
    pub(super) entries: Vec<DataFile>,
    pub(super) found: FoundFiles,
    pub(super) records: Vec<RecordFormat>,
    /// Kind of the documents, if there are any.
    pub(super) kind: Option<DocumentKind>,
    pub(super) validation_fraction: f64,
    pub(super) key: u64,
}

impl CorpusPart {
    pub(super) fn path(&self, dir: &Path) -> PathBuf {
        dir.join(format!("{:016x}.tokens", self.key))
    }

    /// Returns whether the last tokens are reserved for evaluation, instead of whole documents.
    pub(super) fn by_tail(&self) -> bool {
        self.found.are_whole()
    }
}

/// Directory of a run's token files.
fn dir(settings: &RunSettings) -> PathBuf {
    match &settings.data.cache {
        Some(dir) => dir.clone(),
        None => tokens_dir(&resolved(&settings.train.run_dir)),
    }
}

/// Settings outside `data` that tokens depend on.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    pub model_dir: Option<&'a Path>,
    pub vocab_size: u64,
    pub seq_len: usize,
    pub evaluates: bool,
}

impl<'a> Frame<'a> {
    /// Takes the values from a run's settings.
    pub fn from_settings(settings: &'a RunSettings) -> Self {
        Self {
            model_dir: settings.model_dir.as_deref(),
            vocab_size: settings.model.vocab_size as u64,
            seq_len: settings.batch.seq_len,
            evaluates: settings.train.eval_every != Interval::Never,
        }
    }
}

impl Corpus {
    /// Whether the training data is conversations or prompts with completions, so that `data.loss_on = "completions"`
    /// is possible.
    pub fn has_completions(&self) -> bool {
        matches!(
            self.train.kind,
            Some(DocumentKind::Chat | DocumentKind::Completion)
        )
    }

    /// Finds the files, reads the tokenizer, examines the first document.
    ///
    /// # Errors
    /// Files are missing, empty or of an unsupported kind; the tokenizer belongs to another model; the
    /// settings do not suit the data.
    pub fn find(settings: &DataSettings, frame: &Frame<'_>) -> Result<Self, DataError> {
        if settings.files.is_empty() {
            return Err(DataError::Setting {
                key: "data.files",
                message: "is empty, so the run has no data".into(),
            });
        }
        let found = find(&settings.files, "data.files")?;
        let repeated = settings.files.iter().any(|file| file.weight > 1.0);
        if repeated && settings.validation_fraction.get() > 0.0 && found.are_whole() {
            return Err(DataError::Setting {
                key: "data.validation_fraction",
                message: "cannot reserve the end of text that is used several times (weight): name other files in data.eval_files".into(),
            });
        }
        let eval_files = match settings.eval_files.as_slice() {
            [] => None,
            files => Some(find(files, "data.eval_files")?),
        };
        if let Some(eval) = &eval_files {
            refuse_same(&found, eval)?;
        }
        // The tokenizer is not known yet; any bytes are accepted while determining the kind.
        let skips = settings.on_bad_record == OnBadRecord::Skip;
        let kind = first(&found.sources, "data.files", true, skips)?.map(|first| first.kind);
        let tokenizer = Tokenizer::open(&TokenizerSettings {
            tokenizer: settings.tokenizer.as_deref(),
            template: settings.chat_template.as_deref(),
            model_dir: frame.model_dir,
            vocab_size: frame.vocab_size,
            ids: kind == Some(DocumentKind::Ids),
        })?;
        let mut corpus = Self {
            tokenizer,
            encoding: Encoding {
                loss_on: settings.loss_on,
                vocab_size: frame.vocab_size,
            },
            packing: settings.packing.unwrap_or(match kind {
                Some(DocumentKind::Completion | DocumentKind::Chat) => Packing::Documents,
                Some(DocumentKind::Text | DocumentKind::Ids) | None => Packing::Concatenate,
            }),
            seq_len: frame.seq_len,
            shuffle: settings.shuffle,
            cross_document_attention: settings.cross_document_attention,
            on_bad_record: settings.on_bad_record,
            evaluates: frame.evaluates,
            train: CorpusPart {
                name: "training text",
                setting: "data.files",
                entries: settings.files.clone(),
                records: Vec::new(),
                found,
                kind: None,
                validation_fraction: settings.validation_fraction.get(),
                key: 0,
            },
            eval: eval_files.map(|found| CorpusPart {
                entries: settings.eval_files.clone(),
                records: Vec::new(),
                name: "evaluation text",
                setting: "data.eval_files",
                found,
                kind: None,
                validation_fraction: 0.0,
                key: 0,
            }),
        };
        let any_bytes = matches!(corpus.tokenizer, Tokenizer::Bytes);
        for part in [Some(&mut corpus.train), corpus.eval.as_mut()]
            .into_iter()
            .flatten()
        {
            let entries = 0..part.entries.len();
            for entry in entries {
                let first = first(
                    part.found.sources_of_entry(entry),
                    part.setting,
                    any_bytes,
                    skips,
                )?;
                part.kind = part.kind.or(first.map(|first| first.kind));
                let records = first.and_then(|first| first.records);
                if let Some(records) = records.filter(|records| !part.records.contains(records)) {
                    part.records.push(records);
                }
            }
            if let Some(kind) = part.kind {
                corpus.tokenizer.check(kind, corpus.encoding)?;
            }
        }
        corpus.train.key = corpus.key(&corpus.train);
        let eval_key = corpus.eval.as_ref().map(|part| corpus.key(part));
        if let (Some(part), Some(key)) = (&mut corpus.eval, eval_key) {
            part.key = key;
        }
        Ok(corpus)
    }

    /// Returns whether some tokens of `part` may not count in the loss.
    pub(super) fn some_count(&self, part: &CorpusPart) -> bool {
        self.encoding.loss_on == LossOn::Completions || part.kind == Some(DocumentKind::Ids)
    }

    /// Returns the upper limit (exclusive) of the token ids of `part`.
    pub(super) fn ids_end(&self, part: &CorpusPart) -> u64 {
        match part.kind {
            Some(DocumentKind::Ids) => self.encoding.vocab_size,
            _ => self.tokenizer.ids_end(),
        }
    }

    /// Tokenizes the run's data into `data.cache` or the run directory, unless the token files exist. One
    /// process does it while others wait.
    ///
    /// # Errors
    /// Data cannot be read or is too short; the directory cannot be written.
    pub fn prepare(
        &self,
        settings: &RunSettings,
        say: &mut dyn FnMut(String),
    ) -> Result<(), DataError> {
        // The other ranks wait, so the first one may use their threads too.
        let threads = settings.train.threads * settings.local_ranks as usize;
        let owned = settings.data.cache.is_none();
        self.prepare_in(&dir(settings), owned, threads, say)
    }

    /// Opens the run's tokens, as [`Corpus::prepare`] left them.
    ///
    /// # Errors
    /// The token files are gone or damaged.
    pub fn open(&self, settings: &RunSettings) -> Result<Data, DataError> {
        Data::open(self, &dir(settings), settings.train.seed)
    }

    /// The format of conversations, where the run names its chat template.
    pub fn chat_format(&self) -> Option<ChatFormat> {
        self.tokenizer.chat_format()
    }

    /// Returns a fingerprint that changes whenever the tokens would.
    pub fn fingerprint(&self) -> u64 {
        let mut print = Fingerprint::default();
        for part in self.parts() {
            print.add(&part.key.to_le_bytes());
        }
        print.finish()
    }

    /// Describes the data on one line before it is read.
    pub fn describe(&self) -> String {
        self.tokenizer.describe()
    }

    /// Lists the formats of the records; empty if there are none.
    pub(super) fn records(&self) -> String {
        let formats = self.parts().flat_map(|part| &part.records);
        let mut names: Vec<&str> = formats.map(|format| format.name()).collect();
        names.dedup();
        names.join(", ")
    }

    pub(super) fn parts(&self) -> impl Iterator<Item = &CorpusPart> {
        [&self.train].into_iter().chain(&self.eval)
    }

    /// Returns the key of a token file: a fingerprint of everything that its tokens depend on. Files are
    /// identified by name, length and times, because reading all of them takes as long as tokenizing some.
    fn key(&self, part: &CorpusPart) -> u64 {
        let mut print = Fingerprint::default();
        let mut number = |number: u64| print.add(&number.to_le_bytes());
        number(TOKENS_VERSION);
        number(self.tokenizer.fingerprint());
        number(self.encoding.loss_on as u64);
        number(self.packing as u64);
        // Packing whole documents depends on the window's length, and so does leaving windows out.
        number(match self.packing {
            Packing::Concatenate if !self.some_count(part) => 0,
            Packing::Concatenate | Packing::Documents => self.seq_len as u64,
        });
        number(self.on_bad_record as u64);
        number(u64::from(
            self.shuffle || self.packing == Packing::Concatenate,
        ));
        number(u64::from(self.cross_document_attention));
        number(self.ids_end(part));
        number(part.validation_fraction.to_bits());
        for source in &part.found.sources {
            let path = std::path::absolute(&source.path).unwrap_or_else(|_| source.path.clone());
            let path = path.as_os_str().as_encoded_bytes();
            print.add(&(path.len() as u64).to_le_bytes());
            print.add(path);
            print.add(&source.bytes.to_le_bytes());
            for number in source.version {
                print.add(&number.to_le_bytes());
            }
            let DataFile {
                format,
                weight,
                max_samples,
                ..
            } = &part.entries[source.entry];
            let format = format.map_or(0, |format| 1 + format as u64);
            for number in [
                source.entry as u64,
                format,
                weight.to_bits(),
                max_samples.unwrap_or(u64::MAX),
            ] {
                print.add(&number.to_le_bytes());
            }
        }
        print.finish()
    }

    pub(super) fn remove_others(&self, dir: &Path) {
        let ours: Vec<PathBuf> = self.parts().map(|part| part.path(dir)).collect();
        // Failures are ignored: a file that stays only costs space.
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            let tokens = path.extension().is_some_and(|ending| ending == "tokens");
            if tokens && !ours.contains(&path) {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

/// Refuses evaluation on a training file, which would not show how well the model generalizes.
fn refuse_same(train: &FoundFiles, eval: &FoundFiles) -> Result<(), DataError> {
    let learned: HashSet<_> = train.sources.iter().map(|source| source.identity).collect();
    let mut sources = eval.sources.iter();
    match sources.find(|source| learned.contains(&source.identity)) {
        None => Ok(()),
        Some(source) => Err(DataError::Setting {
            key: "data.eval_files",
            message: format!(
                "{} is also in data.files: leave it out of one of them, or set data.validation_fraction to keep a part of data.files for evaluation",
                source.path.display()
            ),
        }),
    }
}
