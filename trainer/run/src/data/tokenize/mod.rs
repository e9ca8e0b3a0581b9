//! Turns documents into tokens: either bytes, or with Hugging Face's `tokenizer.json` and the special tokens
//! and chat template beside it.
//!
//! ```text
//!   text                  bos of the tokenizer, text, eos
//!   prompt, completion    bos of the tokenizer, prompt and completion as one text, eos       counts: the completion, and eos
//!   messages              the template's output, nothing else                                counts: the assistant's part
//!                         (several outputs if the template changes earlier answers)
//! ```
//!
//! Bytes have no special tokens: a record ends with a line end, and files follow one another directly. Token
//! ids in the data are used unchanged with any tokenizer.

mod chat;
mod hugging_face;
mod special;
mod templates;

use std::path::{Path, PathBuf};

use super::DataError;
use super::findings::Finding;
use super::read::{Document, DocumentKind};
use crate::config::LossOn;
use crate::model::BYTE_VOCAB_SIZE;
use hugging_face::HuggingFace;
use training_state::fingerprint::Fingerprint;

/// Bit that marks a token that is not a target of the loss.
pub(super) const NOT_COUNTED: u32 = 1 << 31;
/// Bit that marks the first token of a document. Token ids are smaller.
pub(super) const BEGINS: u32 = 1 << 30;
/// All marks.
pub(super) const MARKS: u32 = NOT_COUNTED | BEGINS;

/// Source of a run's tokens.
pub(super) enum Tokenizer {
    Bytes,
    HuggingFace(Box<HuggingFace>),
    /// The data is token ids below this value.
    Ids(u64),
}

/// How a run writes conversations, where it does not take the template of its tokenizer.
pub struct ChatFormat {
    /// The chat template.
    pub template: String,
    /// The special token that ends an answer.
    pub answer_end: Option<u32>,
}

/// Largest vocabulary of a model that is taken for one of bytes, with some tokens more, where no tokenizer is named.
const BYTE_VOCAB_SIZE_MAX: u64 = 2 * BYTE_VOCAB_SIZE;

/// Settings that determine a run's tokenizer.
pub(super) struct TokenizerSettings<'a> {
    /// `data.tokenizer`: a directory, a file or "bytes"; `None` for the tokenizer in the model's directory.
    pub(super) tokenizer: Option<&'a Path>,
    /// `data.chat_template`.
    pub(super) template: Option<&'a Path>,
    /// `model.path`.
    pub(super) model_dir: Option<&'a Path>,
    /// Vocabulary size of the model.
    pub(super) vocab_size: u64,
    /// Whether the data is token ids: a tokenizer then only displays them.
    pub(super) ids: bool,
}

impl TokenizerSettings<'_> {
    /// Returns the tokenizer's file and the setting that names it; `None` for bytes.
    fn file(&self) -> Result<Option<(PathBuf, &'static str)>, DataError> {
        if let Some(path) = self.tokenizer {
            if path == Path::new("bytes") {
                return Ok(None);
            }
            let file = if path.is_dir() {
                path.join("tokenizer.json")
            } else {
                path.to_path_buf()
            };
            return Ok(Some((file, "data.tokenizer")));
        }
        let Some(dir) = self.model_dir else {
            return Ok(None);
        };
        let file = dir.join("tokenizer.json");
        if file.exists() {
            return Ok(Some((file, "model.path")));
        }
        let others = ["tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"];
        match others.iter().find(|name| dir.join(name).exists()) {
            None => Ok(None),
            Some(name) => Err(DataError::Setting {
                key: "model.path",
                message: format!(
                    "{} has {name} but no tokenizer.json: create it with transformers (AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)), or set data.tokenizer = \"bytes\" to train on bytes",
                    dir.display()
                ),
            }),
        }
    }
}

/// How the documents of a run become tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Encoding {
    pub(super) loss_on: LossOn,
    /// Vocabulary size of the model.
    pub(super) vocab_size: u64,
}

/// Tokens of a document or a piece of one.
pub(super) struct EncodedDocuments {
    /// One element for each document that it becomes.
    pub(super) documents: Vec<Vec<u32>>,
    pub(super) findings: Vec<Finding>,
}

impl From<Vec<u32>> for EncodedDocuments {
    fn from(document: Vec<u32>) -> Self {
        Self {
            documents: vec![document],
            findings: Vec::new(),
        }
    }
}

impl Tokenizer {
    /// Reads the tokenizer of a run.
    ///
    /// # Errors
    /// The named tokenizer is missing or damaged, or belongs to another model.
    pub(super) fn open(wanted: &TokenizerSettings<'_>) -> Result<Self, DataError> {
        let file = match wanted.file() {
            Err(_) if wanted.ids && wanted.tokenizer.is_none() => None,
            file => file?,
        };
        let Some((file, key)) = file else {
            if wanted.ids {
                return Ok(Self::Ids(wanted.vocab_size));
            }
            if wanted.vocab_size < BYTE_VOCAB_SIZE {
                return Err(DataError::Setting {
                    key: "model.vocab_size",
                    message: format!(
                        "{}: must be at least {BYTE_VOCAB_SIZE}, because bytes are tokens",
                        wanted.vocab_size
                    ),
                });
            }
            if wanted.tokenizer.is_none() && wanted.vocab_size > BYTE_VOCAB_SIZE_MAX {
                return Err(DataError::Setting {
                    key: "data.tokenizer",
                    message: format!(
                        "missing: the model has {} tokens, and no tokenizer.json beside it. Set it to a directory with one, or to \"bytes\" to train on bytes",
                        wanted.vocab_size
                    ),
                });
            }
            if wanted.template.is_some() {
                return Err(DataError::Setting {
                    key: "data.chat_template",
                    message: "needs a tokenizer: set data.tokenizer".into(),
                });
            }
            return Ok(Self::Bytes);
        };
        let found = HuggingFace::open(&file, key, wanted.template)?;
        let tokenizer = found.ids_end();
        if tokenizer > wanted.vocab_size {
            return Err(DataError::OtherTokenizer {
                key,
                path: file,
                tokenizer,
                model: wanted.vocab_size,
            });
        }
        Ok(Self::HuggingFace(Box::new(found)))
    }

    /// Describes the tokenizer on one line.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Bytes => "bytes as tokens".into(),
            Self::Ids(_) => "token ids from the data".into(),
            Self::HuggingFace(found) => found.describe(),
        }
    }

    /// What a person should know before a run trains with it.
    pub(super) fn warning(&self) -> Option<String> {
        match self {
            Self::Bytes | Self::Ids(_) => None,
            Self::HuggingFace(found) => found.warning(),
        }
    }

    /// The format of conversations that the run names.
    pub(super) fn chat_format(&self) -> Option<ChatFormat> {
        match self {
            Self::Bytes | Self::Ids(_) => None,
            Self::HuggingFace(found) => found.chat_format(),
        }
    }

    /// Returns the upper limit (exclusive) of token ids.
    pub(super) fn ids_end(&self) -> u64 {
        match self {
            Self::Bytes => BYTE_VOCAB_SIZE,
            Self::Ids(end) => *end,
            Self::HuggingFace(found) => found.ids_end(),
        }
    }

    /// Returns a fingerprint that changes whenever tokens would.
    pub(super) fn fingerprint(&self) -> u64 {
        match self {
            Self::Bytes => Fingerprint::compute(b"bytes"),
            Self::Ids(_) => Fingerprint::compute(b"token ids"),
            Self::HuggingFace(found) => found.fingerprint(),
        }
    }

    /// Token for padding, which does not count.
    pub(super) fn padding(&self) -> u32 {
        match self {
            Self::Bytes | Self::Ids(_) => 0,
            Self::HuggingFace(found) => found.padding(),
        }
    }

    /// Refuses documents of `kind` that this tokenizer cannot handle.
    pub(super) fn check(&self, kind: DocumentKind, encoding: Encoding) -> Result<(), DataError> {
        if kind == DocumentKind::Text && encoding.loss_on == LossOn::Completions {
            return Err(DataError::Setting {
                key: "data.loss_on",
                message: "\"completions\" needs data with completions: {\"prompt\", \"completion\"} or {\"messages\"}, but this is text: leave the setting out".into(),
            });
        }
        match self {
            Self::Bytes if kind == DocumentKind::Chat => Err(DataError::Setting {
                key: "data.tokenizer",
                message: "conversations need a tokenizer with a chat template: set data.tokenizer to a directory with tokenizer.json".into(),
            }),
            Self::HuggingFace(found) if kind == DocumentKind::Chat => found.check_chat(),
            _ => Ok(()),
        }
    }

    /// Tokenizes a document or a piece of one. A conversation may become several documents. A piece that continues a document gets the end of the
    /// preceding text in `after`; `ends` says that it is the document's last.
    ///
    /// # Errors
    /// Describes the fault of the document in words that follow its position.
    pub(super) fn encode(
        &self,
        document: &Document,
        after: Option<&str>,
        ends: bool,
        encoding: Encoding,
    ) -> Result<EncodedDocuments, String> {
        match (document, self) {
            (Document::Ids { ids, counts }, _) => {
                given(ids, counts.as_deref(), encoding).map(EncodedDocuments::from)
            }
            (_, Self::Bytes) => Ok(bytes(document, encoding).into()),
            (_, Self::HuggingFace(found)) => found.encode(document, after, ends, encoding),
            (_, Self::Ids(_)) => unreachable!("this tokenizer is only chosen for token ids"),
        }
    }

    /// Converts tokens to text for display.
    pub(super) fn decode(&self, ids: &[u32]) -> String {
        match self {
            Self::Bytes => {
                let bytes: Vec<u8> = ids.iter().map(|id| *id as u8).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Self::HuggingFace(found) => found.decode(ids),
            Self::Ids(_) => {
                let words: Vec<String> = ids.iter().map(u32::to_string).collect();
                words.join(" ")
            }
        }
    }
}

/// Encodes token ids from the data.
fn given(ids: &[u32], counts: Option<&[bool]>, encoding: Encoding) -> Result<Vec<u32>, String> {
    if let Some(id) = ids.iter().find(|id| u64::from(**id) >= encoding.vocab_size) {
        return Err(format!(
            "has token id {id}, but the model's vocab_size is {}: the ids are from another tokenizer",
            encoding.vocab_size
        ));
    }
    match (counts, encoding.loss_on) {
        (Some(counts), _) => {
            let pairs = ids.iter().zip(counts);
            let marked = pairs.map(|(id, counts)| if *counts { *id } else { id | NOT_COUNTED });
            Ok(marked.collect())
        }
        (None, LossOn::All) => Ok(ids.to_vec()),
        (None, LossOn::Completions) => {
            Err("has no \"labels\", which data.loss_on = \"completions\" needs".into())
        }
    }
}

/// Encodes a record's bytes and a line end.
fn bytes(document: &Document, encoding: Encoding) -> Vec<u32> {
    let of = |text: &[u8]| text.iter().map(|byte| u32::from(*byte)).collect();
    let (mut ids, record): (Vec<u32>, bool) = match document {
        Document::Bytes(bytes) => (of(bytes), false),
        Document::Text(text) => (of(text.as_bytes()), true),
        Document::Completion { prompt, completion } => {
            let mut ids: Vec<u32> = of(prompt.as_bytes());
            if encoding.loss_on == LossOn::Completions {
                ids.iter_mut().for_each(|id| *id |= NOT_COUNTED);
            }
            ids.extend::<Vec<u32>>(of(completion.as_bytes()));
            (ids, true)
        }
        Document::Chat(_) => unreachable!("refused by check"),
        Document::Ids { .. } => unreachable!("token ids are handled by the caller"),
    };
    if record && ids.last() != Some(&u32::from(b'\n')) {
        ids.push(u32::from(b'\n'));
    }
    ids
}

#[cfg(test)]
mod tests;
