//! Turns files into windows of tokens, in an order that is easy to reproduce in any language.
//!
//! ```text
//!   files ─▶ read: documents ─▶ tokenize: tokens, and which count ─▶ packing: windows ─▶ cache: a token file, made once
//!                                                                                           │ ranges
//!                                                       order: sample i is window ... ──────┴─▶ Windows: inputs, targets
//! ```
//!
//! [`Corpus`] is the data found and checked before tokenization; [`Data`] is the tokenized data. Sample i
//! (from 0, over the whole run) is window `order::permuted(seed, i / W, W, i % W)` of the W training windows,
//! or window i % W with `data.shuffle = false`. Nothing here has state: a resumed run needs only the number of its next sample.

mod cache;
mod corpus;
mod error;
mod findings;
mod length;
mod make;
pub mod order;
mod packing;
mod read;
pub mod show;
mod tokenize;

use std::path::Path;

use offload_support::units::CountOf;

use crate::config::Packing;
use cache::TokenFile;
use findings::Findings;
use training_state::fingerprint::Fingerprint;

pub use corpus::{Corpus, Frame};
pub use error::DataError;
pub use length::{DataLength, length};
pub use read::DocumentPosition;
pub use tokenize::ChatFormat;

/// Target that does not count in the loss, for padding or a prompt.
pub const IGNORED: i64 = -100;

/// The tokens of a run.
pub struct Data {
    train: Section,
    held_out: Section,
    /// Fingerprint of all tokens; of those in the training files first.
    fingerprint: u64,
    tokens: u64,
    documents: u64,
    unanswered: u64,
    /// Documents that repeat the beginning of a conversation for an answer that the chat template changes later.
    repeated: u64,
    counted: u64,
    masked: bool,
    packing: Packing,
    seq_len: usize,
    /// Whether attention stays within documents.
    separate: bool,
    /// Documents longer than a window.
    divided: u64,
    /// Seed of the order; `None` keeps windows in file order.
    seed: Option<u64>,
    /// Formats of the records.
    records: String,
    files: usize,
    passed_over: usize,
    findings: Findings,
    chat_format: Option<ChatFormat>,
    tokenizer_warning: Option<String>,
}

/// Tokens in which documents are counted for a plan.
const SAMPLED_TOKENS: usize = 1 << 20;

/// Range of elements in a token file.
struct Section {
    stored: std::sync::Arc<TokenFile>,
    first_elem: u64,
    windows: u64,
}

/// Windows of one micro-batch in row order: `rows * seq_len` inputs and as many targets, [`IGNORED`] where a
/// token does not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    pub inputs: Vec<i64>,
    pub targets: Vec<i64>,
    /// First tokens of documents inside a row, counted over all rows; empty if attention crosses documents.
    pub documents: Vec<usize>,
}

impl Data {
    fn open(corpus: &Corpus, dir: &Path, seed: u64) -> Result<Self, DataError> {
        let stored = |part: &corpus::CorpusPart| {
            let path = part.path(dir);
            let found = TokenFile::open(&path, part.key)?;
            found
                .map(std::sync::Arc::new)
                .ok_or_else(|| DataError::Cache {
                    verb: "read",
                    source: std::io::ErrorKind::NotFound.into(),
                    path,
                })
        };
        let train = stored(&corpus.train)?;
        let eval = corpus.eval.as_ref().map(stored).transpose()?;
        let windows = |elems| packing::windows(corpus.packing, corpus.seq_len, elems);
        let header = train.header().clone();
        let section = |stored: &std::sync::Arc<TokenFile>, first_elem, elems| Section {
            stored: stored.clone(),
            first_elem,
            windows: windows(elems),
        };
        let held_out = match &eval {
            Some(eval) => section(eval, 0, eval.header().train_elems),
            None => section(&train, header.train_elems, header.held_elems),
        };
        let train_section = section(&train, 0, header.train_elems);
        // The token file was made for other windows.
        if train_section.windows == 0 {
            return Err(too_short(corpus, corpus.train.name, header.train_elems));
        }
        if corpus.evaluates && held_out.windows == 0 {
            let (name, elems) = match &eval {
                Some(eval) => ("evaluation text", eval.header().train_elems),
                None => ("validation text", header.held_elems),
            };
            return Err(too_short(corpus, name, elems));
        }
        let headers = || {
            [Some(&train), eval.as_ref()]
                .into_iter()
                .flatten()
                .map(|stored| stored.header())
        };
        Ok(Self {
            train: train_section,
            held_out,
            fingerprint: match &eval {
                None => header.fingerprint,
                Some(eval) => {
                    let prints = [header.fingerprint, eval.header().fingerprint];
                    Fingerprint::compute(&prints.map(u64::to_le_bytes).concat())
                }
            },
            tokens: headers()
                .map(|header| header.elems().saturating_sub(header.padding))
                .sum(),
            unanswered: headers().map(|header| header.unanswered).sum(),
            repeated: headers().map(|header| header.repeated).sum(),
            documents: headers().map(|header| header.documents).sum(),
            counted: headers().map(|header| header.counted).sum(),
            masked: header.counted < header.elems(),
            packing: corpus.packing,
            seq_len: corpus.seq_len,
            separate: !corpus.cross_document_attention,
            divided: headers().map(|header| header.divided).sum(),
            seed: corpus.shuffle.then_some(seed),
            records: corpus.records(),
            files: corpus.parts().map(|part| part.found.sources.len()).sum(),
            passed_over: corpus.parts().map(|part| part.found.passed_over).sum(),
            findings: {
                let mut findings = train.findings().clone();
                if let Some(eval) = &eval {
                    findings.extend(eval.findings());
                }
                findings
            },
            chat_format: corpus.chat_format(),
            tokenizer_warning: corpus.tokenizer.warning(),
        })
    }

    /// The format of conversations, where the run names its chat template.
    pub fn chat_format(&self) -> Option<&ChatFormat> {
        self.chat_format.as_ref()
    }

    /// Number of tokens in all files, including end-of-document tokens, without padding.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Number of files read.
    pub fn files(&self) -> usize {
        self.files
    }

    /// Describes the data in one line.
    pub fn describe(&self) -> String {
        let Self {
            files,
            documents,
            tokens,
            ..
        } = self;
        let mut text = CountOf(*files as u64, "file").to_string();
        if !self.records.is_empty() {
            text += &format!(" ({})", self.records);
        }
        let documents_text = CountOf(*documents, "document");
        text += &format!(", {documents_text}, {tokens} tokens");
        // Besides the first tokens of documents.
        if self.counted + documents < *tokens {
            text += &format!(", {} of them count in the loss", self.counted);
        }
        let windows = CountOf(self.windows(), "window");
        text += &format!(", {windows} of {} tokens", self.seq_len);
        if self.holdout_windows() > 0 {
            text += &format!(" and {} more for validation", self.holdout_windows());
        }
        if self.repeated > 0 {
            let repeated = CountOf(self.repeated, "document");
            text += &format!(
                "; {repeated} for earlier answers, which the chat template changes once others follow"
            );
        }
        if self.divided > 0 {
            let divided = CountOf(self.divided, "document");
            text += &format!("; {divided} longer than a window (cut)");
        }
        if self.unanswered > 0 {
            let unanswered = CountOf(self.unanswered, "document");
            text += &format!("; {unanswered} with an empty answer, which the model learns to give");
        }
        if self.packing == Packing::Documents && self.separate {
            text += "; documents are whole, attention stays within them";
        }
        if self.passed_over > 0 {
            text += &format!("; {} other files skipped", self.passed_over);
        }
        text
    }

    /// Describes what a person should know before a run trains on the data, each finding in a line.
    pub fn warnings(&self) -> Vec<String> {
        let mut lines = self.findings.lines();
        lines.extend(self.tokenizer_warning.clone());
        lines
    }

    /// Fingerprint of the tokens, to detect that they changed between two starts.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Returns whether some tokens do not count in the loss.
    pub fn masked(&self) -> bool {
        self.masked
    }

    /// Number of training windows.
    pub fn windows(&self) -> u64 {
        self.train.windows
    }

    /// Number of validation windows.
    pub fn holdout_windows(&self) -> u64 {
        self.held_out.windows
    }

    /// What an evaluation of at most `most` micro-batches is of: losses of two compare where it is the same.
    pub fn evaluates(&self, most: Option<u64>) -> String {
        let Section {
            stored,
            first_elem,
            windows,
        } = &self.held_out;
        let mut print = Fingerprint::default();
        print.add(&stored.header().fingerprint.to_le_bytes());
        print.add(&first_elem.to_le_bytes());
        print.add(&[u8::from(self.separate)]);
        let (seq_len, print) = (self.seq_len, print.finish());
        let most = most.map_or_else(String::new, |most| {
            format!(", at most {most} micro-batches")
        });
        format!("{windows} windows of {seq_len} tokens{most}, fingerprint {print:016x}")
    }

    /// Returns `rows` samples from sample number `first` on.
    ///
    /// # Errors
    /// The token file cannot be read, or was damaged since the start.
    pub fn samples(&self, first: u64, rows: usize) -> Result<Windows, DataError> {
        let windows = self.windows();
        let order = (first..first + rows as u64).map(|sample| {
            let (epoch, index) = (sample / windows, sample % windows);
            match self.seed {
                Some(seed) => order::permuted(seed, epoch, windows, index),
                None => index,
            }
        });
        self.collect(&self.train, order)
    }

    /// Lengths of the documents in the first training windows of the run, in their order; a sample, from which a plan estimates
    /// the time of attention. Empty if attention crosses documents.
    ///
    /// # Errors
    /// Same as [`Data::samples`].
    pub fn sampled_documents(&self) -> Result<Vec<usize>, DataError> {
        if !self.separate {
            return Ok(Vec::new());
        }
        let rows = (SAMPLED_TOKENS / self.seq_len).max(1);
        let rows = self.windows().min(rows as u64) as usize;
        let found = self.samples(0, rows)?;
        let mut starts = found.documents;
        starts.extend((0..=rows).map(|row| row * self.seq_len));
        starts.sort_unstable();
        Ok(starts.windows(2).map(|pair| pair[1] - pair[0]).collect())
    }

    /// Returns `rows` validation windows from window `first` on, continuing at the first one after the last.
    ///
    /// # Errors
    /// Same as [`Data::samples`].
    pub fn holdout(&self, first: u64, rows: usize) -> Result<Windows, DataError> {
        let windows = self.holdout_windows();
        assert!(
            windows > 0,
            "opening the data checks that there are validation windows"
        );
        let order = (first..first + rows as u64).map(|window| window % windows);
        self.collect(&self.held_out, order)
    }

    fn collect(
        &self,
        section: &Section,
        order: impl Iterator<Item = u64>,
    ) -> Result<Windows, DataError> {
        let mut found = Windows {
            inputs: Vec::new(),
            targets: Vec::new(),
            documents: Vec::new(),
        };
        let stride = packing::stride(self.packing, self.seq_len);
        let mut elements = Vec::with_capacity(self.seq_len + 1);
        for window in order {
            elements.clear();
            let first = section.first_elem + window * stride;
            (section.stored).read(first, self.seq_len + 1, &mut elements)?;
            let id = |element: u32| i64::from(element & !tokenize::MARKS);
            let inputs = elements[..self.seq_len].iter();
            if self.separate {
                let row = found.inputs.len();
                let begins = inputs.clone().enumerate().skip(1);
                let begins = begins.filter(|(_, element)| *element & tokenize::BEGINS != 0);
                found.documents.extend(begins.map(|(at, _)| row + at));
            }
            found.inputs.extend(inputs.map(|element| id(*element)));
            let targets = elements[1..].iter();
            found.targets.extend(targets.map(|&element| {
                let counts = element & tokenize::NOT_COUNTED == 0;
                if counts { id(element) } else { IGNORED }
            }));
        }
        Ok(found)
    }
}

fn too_short(corpus: &Corpus, part: &'static str, tokens: u64) -> DataError {
    DataError::TooShort {
        key: match part {
            "evaluation text" => "data.eval_files",
            "validation text" => "data.validation_fraction",
            _ => "data.files",
        },
        part,
        tokens,
        needed: match corpus.packing {
            Packing::Concatenate => corpus.seq_len as u64 + 1,
            Packing::Documents => 2,
        },
        seq_len: corpus.seq_len,
    }
}

#[cfg(test)]
mod tests;
