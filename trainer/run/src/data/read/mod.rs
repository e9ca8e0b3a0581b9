//! Reads files into documents: finds the files, determines their formats, and interprets each line or row.
//!
//! ```text
//!   files and directories ─▶ files.rs ─▶ Source: path, format ─▶ plain.rs, ids.rs ─────────────────────────────────────▶ Document
//!                                                            └─▶ lines.rs, array.rs, separated.rs, rows.rs ─▶ record.rs ─┘
//! ```
//!
//! Documents are read one after another in the order of files. Only the current one is in memory. `open.rs` unpacks text
//! that is compressed.

mod array;
mod ending;
mod files;
mod ids;
mod lines;
mod open;
mod plain;
mod record;
mod rows;
mod separated;

use std::fmt;
use std::path::PathBuf;

use chat_template::Value;

pub(super) use files::{FoundFiles, find};
pub(super) use plain::{PIECE_BYTES, cut, end_of};
pub(super) use record::{Chat, Document, DocumentKind};

use super::DataError;
use crate::config::RecordFormat;

/// Format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Text; the file is one document.
    Plain,
    /// Token ids; the file is one document.
    Ids,
    /// A JSON object on each line; each is a document.
    Lines,
    /// A JSON array of objects, each a document; or lines.
    Array,
    /// Rows with separators; each is a document.
    Separated,
    /// A parquet table; each row is a document.
    Parquet,
    /// An Arrow table; each row is a document.
    Arrow,
}

impl Format {
    /// Returns whether the whole file is one document.
    pub(super) fn is_one_document(self) -> bool {
        matches!(self, Self::Plain | Self::Ids)
    }
}

/// A file to read.
#[derive(Clone, Debug)]
pub(super) struct SourceFile {
    pub(super) path: PathBuf,
    pub(super) format: Format,
    /// How its records are read; `None`: according to their fields.
    pub(super) records: Option<RecordFormat>,
    /// Number of the entry of `data.files` that it belongs to.
    pub(super) entry: usize,
    pub(super) bytes: u64,
    /// Times and inode number, which change when the file does.
    pub(super) version: [i64; 5],
    /// Device and inode number, which identify the file under any name.
    pub(super) identity: (u64, u64),
}

impl SourceFile {
    /// Returns the position of a line, row or record of this file.
    fn position(&self, what: &'static str, number: Option<u64>) -> DocumentPosition {
        DocumentPosition {
            path: self.path.clone(),
            number,
            what,
        }
    }

    /// Converts a record to a document. `bytes` of the file were consumed with it.
    ///
    /// # Errors
    /// The record could not be read, or has no known fields.
    fn piece(
        &self,
        record: Result<Value, String>,
        place: DocumentPosition,
        bytes: u64,
    ) -> Result<Piece, DataError> {
        let found = record.and_then(|record| Document::parse(&record, self.records));
        match found {
            Ok((document, format)) => Ok(Piece {
                document,
                after: None,
                records: Some(format),
                place,
                bytes,
            }),
            Err(message) => Err(DataError::Record { place, message }),
        }
    }
}

/// Position of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DocumentPosition {
    pub path: PathBuf,
    /// Number of the line or row, from 1; `None` for the whole file.
    pub number: Option<u64>,
    pub(super) what: &'static str,
}

impl fmt::Display for DocumentPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number {
            Some(number) => write!(f, "{}, {} {number}", self.path.display(), self.what),
            None => self.path.display().fmt(f),
        }
    }
}

/// A document, or a part of a long one.
pub(super) struct Piece {
    pub(super) document: Document,
    /// End of the preceding part of the same document: its last characters for a text, otherwise empty.
    /// `None` at the beginning of a document.
    pub(super) after: Option<String>,
    /// Format of the record that the document was.
    pub(super) records: Option<RecordFormat>,
    pub(super) place: DocumentPosition,
    /// Bytes of the source consumed with this piece.
    pub(super) bytes: u64,
}

/// How a source is read.
pub(super) struct Reading<'r> {
    /// The setting that names the file.
    pub(super) key: &'static str,
    /// Whether text may have bytes that are not UTF-8.
    pub(super) any_bytes: bool,
    /// Takes each record that cannot be read, and why; an error ends reading.
    pub(super) bad: &'r mut dyn FnMut(DocumentPosition, String) -> Result<(), DataError>,
}

/// What a reader makes of a record: a document, or why it is none.
type RecordResult = Result<Piece, DataError>;

/// Calls `take` for each document of `source`. `kind` is the kind of the first document; all others must have
/// the same.
pub(super) fn documents(
    source: &SourceFile,
    reading: Reading<'_>,
    kind: &mut Option<DocumentKind>,
    take: &mut dyn FnMut(Piece) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let Reading {
        key,
        any_bytes,
        bad,
    } = reading;
    let mut take = |taken: RecordResult| {
        let piece = match taken {
            Ok(piece) => piece,
            Err(DataError::Record { place, message }) => return bad(place, message),
            Err(error) => return Err(error),
        };
        let found = piece.document.kind();
        let expected = *kind.get_or_insert(found);
        if found != expected {
            let message =
                format!("{found} after {expected}: all data of a run must be of one kind");
            return bad(piece.place, message);
        }
        take(piece)
    };
    match source.format {
        Format::Plain => plain::pieces(source, key, any_bytes, &mut take),
        Format::Ids => ids::pieces(source, key, &mut take),
        // A file with either name may have either content.
        Format::Lines | Format::Array => array::documents(source, key, &mut take),
        Format::Separated => separated::documents(source, key, &mut take),
        Format::Parquet => rows::parquet(source, key, &mut take),
        Format::Arrow => rows::arrow(source, key, &mut take),
    }
}

/// Description of a document.
#[derive(Clone, Copy)]
pub(super) struct DocumentForm {
    pub(super) kind: DocumentKind,
    pub(super) records: Option<RecordFormat>,
}

/// Describes the first document found. Bad records before it are passed over if `skips`.
pub(super) fn first<'s>(
    sources: impl IntoIterator<Item = &'s SourceFile>,
    key: &'static str,
    any_bytes: bool,
    skips: bool,
) -> Result<Option<DocumentForm>, DataError> {
    let mut first_bad = None;
    for source in sources {
        let mut found = None;
        let mut kind = None;
        let mut bad = |place, message| {
            let error = DataError::Record { place, message };
            match skips {
                true => {
                    first_bad.get_or_insert(error);
                    Ok(())
                }
                false => Err(error),
            }
        };
        let reading = Reading {
            key,
            any_bytes,
            bad: &mut bad,
        };
        let ended = documents(source, reading, &mut kind, &mut |piece| {
            found = Some(DocumentForm {
                kind: piece.document.kind(),
                records: piece.records,
            });
            Err(DataError::Enough)
        });
        match ended {
            Err(DataError::Enough) => return Ok(found),
            other => other?,
        }
    }
    // Without any good record, the first bad one shows what is wrong.
    first_bad.map_or(Ok(None), Err)
}

#[cfg(test)]
mod tests;
