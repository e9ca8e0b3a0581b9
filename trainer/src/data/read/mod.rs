//! Files into documents: which files, of which format, and what each line or row of them is.
//!
//! ```text
//!   files and directories ─▶ files.rs ─▶ Source: path, format ─▶ plain.rs, ids.rs, lines.rs, rows.rs ─▶ record.rs ─▶ Document
//! ```
//!
//! Documents come one after another, in the order of files and within them; none but the one at hand is in memory.

mod files;
mod ids;
mod lines;
mod plain;
mod record;
mod rows;

use std::fmt;
use std::path::PathBuf;

pub(super) use files::{Found, find};
pub(super) use plain::{PIECE_BYTES, cut, end_of};
pub(super) use record::{Document, Kind};

use super::DataError;

/// How a file holds its documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// It is one.
    Plain,
    /// It is one, of token ids.
    Ids,
    /// A JSON object on each line.
    Lines,
    /// A row is one.
    Parquet,
}

impl Format {
    /// Whether a file is one document as a whole.
    pub(super) fn is_one_document(self) -> bool {
        matches!(self, Self::Plain | Self::Ids)
    }
}

/// A file to read.
#[derive(Clone, Debug)]
pub(super) struct Source {
    pub(super) path: PathBuf,
    pub(super) format: Format,
    pub(super) bytes: u64,
    /// Changes when the file does: times and number of its entry.
    pub(super) version: [i64; 5],
    /// The file itself, whatever its name: device and number of its entry.
    pub(super) identity: (u64, u64),
}

/// Where a document stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub path: PathBuf,
    /// Of a line or row, from 1; `None` for the whole file.
    pub number: Option<u64>,
    pub(super) what: &'static str,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number {
            Some(number) => write!(f, "{}, {} {number}", self.path.display(), self.what),
            None => self.path.display().fmt(f),
        }
    }
}

/// A document, or a piece of a long text.
pub(super) struct Piece {
    pub(super) document: Document,
    /// Where the document before goes on: the end of what it had, for a text; nothing where a document begins.
    pub(super) after: Option<String>,
    pub(super) place: Place,
    /// Bytes of the source gone by with it.
    pub(super) bytes: u64,
}

/// Gives each document of `source` to `take`. `kind` is that of the first; all others must be alike. Text is UTF-8 unless
/// `any_bytes`.
pub(super) fn documents(
    source: &Source,
    key: &'static str,
    any_bytes: bool,
    kind: &mut Option<Kind>,
    take: &mut dyn FnMut(Piece) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let mut take = |piece: Piece| {
        let found = piece.document.kind();
        let expected = *kind.get_or_insert(found);
        if found != expected {
            return Err(DataError::Record {
                message: format!("{found} after {expected}: all data of a run must be of one kind"),
                place: piece.place,
            });
        }
        take(piece)
    };
    match source.format {
        Format::Plain => plain::pieces(source, key, any_bytes, &mut take),
        Format::Ids => ids::pieces(source, key, &mut take),
        Format::Lines => lines::documents(source, key, &mut take),
        Format::Parquet => rows::documents(source, key, &mut take),
    }
}

/// The kind of the first document there is.
pub(super) fn first_kind(
    sources: &[Source],
    key: &'static str,
    any_bytes: bool,
) -> Result<Option<Kind>, DataError> {
    for source in sources {
        let mut found = None;
        let mut kind = None;
        // There is no other way out of a visit than an error: this one is nobody's.
        let ended = documents(source, key, any_bytes, &mut kind, &mut |piece| {
            found = Some(piece.document.kind());
            Err(DataError::Setting {
                key,
                message: String::new(),
            })
        });
        match found {
            Some(kind) => return Ok(Some(kind)),
            None => ended?,
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests;
