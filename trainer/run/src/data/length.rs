//! Number of training windows of a run's data: exact once the data is tokenized, estimated from the sizes of files
//! before.

use super::read::DocumentKind;
use super::tokenize::Tokenizer;
use super::{Corpus, DataError, Frame};
use crate::config::RunSettings;

/// Bytes of text for a token of a usual tokenizer.
const TOKEN_BYTES: f64 = 4.0;

/// Bytes of a token in files of token ids, at the most.
const ID_BYTES: f64 = 4.0;

/// Number of training windows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataLength {
    pub windows: u64,
    /// Whether the windows were counted, not estimated.
    pub is_exact: bool,
    /// Lengths of documents, from [`super::Data::sampled_documents`]; empty if they are not known.
    pub documents: Vec<usize>,
}

/// Returns the number of training windows of a run's data. Tokenizes nothing.
///
/// # Errors
/// The files or the tokenizer cannot be read.
pub fn length(settings: &RunSettings) -> Result<DataLength, DataError> {
    let corpus = Corpus::find(&settings.data, &Frame::from_settings(settings))?;
    if let Ok(data) = corpus.open(settings) {
        return Ok(DataLength {
            windows: data.windows(),
            is_exact: true,
            documents: data.sampled_documents()?,
        });
    }
    let token_bytes = match (&corpus.tokenizer, corpus.train.kind) {
        (_, Some(DocumentKind::Ids)) => ID_BYTES,
        (Tokenizer::Bytes, _) => 1.0,
        _ => TOKEN_BYTES,
    };
    let tokens = corpus.train.found.unpacked_bytes() as f64 / token_bytes;
    let trained = tokens * (1.0 - corpus.train.validation_fraction);
    Ok(DataLength {
        windows: ((trained / corpus.seq_len as f64) as u64).max(1),
        is_exact: false,
        documents: Vec::new(),
    })
}
