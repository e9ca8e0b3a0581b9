//! Reads a file of token ids as one document, in pieces.
//!
//! ```text
//!   NAME.u16, NAME.u32   ids one after another, little endian
//!   NAME.npy             NumPy array with one dimension: integers of any width, little endian
//! ```

use std::fs::File;
use std::io::{BufReader, Read};

use super::ending::ending;
use super::plain::PIECE_BYTES;
use super::record::Document;
use super::{DocumentPosition, Piece, RecordResult, SourceFile};
use crate::data::DataError;

/// Size limit of the header; that of a one-dimensional array has about a hundred bytes.
const HEADER_BYTES_MAX: usize = 64 << 10;

/// Encoding of the numbers in a file.
#[derive(Debug, PartialEq)]
struct IdEncoding {
    start_bytes: u64,
    elem_bytes: usize,
    signed: bool,
}

pub(super) fn pieces(
    source: &SourceFile,
    key: &'static str,
    take: &mut dyn FnMut(RecordResult) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let failed = DataError::reading(key, &source.path);
    let damaged = |message: String| DataError::Damaged {
        path: source.path.clone(),
        message,
    };
    let mut file = BufReader::new(File::open(&source.path).map_err(&failed)?);
    let raw = |elem_bytes| IdEncoding {
        start_bytes: 0,
        elem_bytes,
        signed: false,
    };
    let layout = match ending(&source.path).as_str() {
        "u16" => raw(2),
        "u32" => raw(4),
        _ => npy(&mut file).map_err(|error| match error {
            HeaderError::Io(error) => failed(error),
            HeaderError::Wrong(message) => damaged(message),
        })?,
    };
    let left = source.bytes.saturating_sub(layout.start_bytes);
    if !left.is_multiple_of(layout.elem_bytes as u64) {
        return Err(damaged(format!(
            "it contains {left} bytes of ids, which is not a multiple of {} bytes",
            layout.elem_bytes
        )));
    }
    let mut bytes = Vec::new();
    let (mut first, mut header_bytes) = (0u64, layout.start_bytes);
    loop {
        bytes.clear();
        let mut bounded = (&mut file).take(PIECE_BYTES as u64);
        bounded.read_to_end(&mut bytes).map_err(&failed)?;
        // Ignores an incomplete id appended after the length was read.
        bytes.truncate(bytes.len() / layout.elem_bytes * layout.elem_bytes);
        if bytes.is_empty() {
            return Ok(());
        }
        let place = DocumentPosition {
            path: source.path.clone(),
            number: None,
            what: "",
        };
        let mut ids = Vec::with_capacity(bytes.len() / layout.elem_bytes);
        for (at, elem) in bytes.chunks_exact(layout.elem_bytes).enumerate() {
            let number = layout.number(elem);
            let id = u32::try_from(number).map_err(|_| DataError::Record {
                place: place.clone(),
                message: format!(
                    "element {} is {number}, which is not a token id",
                    first + at as u64
                ),
            })?;
            ids.push(id);
        }
        let after = (first > 0).then(String::new);
        first += ids.len() as u64;
        take(Ok(Piece {
            document: Document::Ids { ids, counts: None },
            after,
            records: None,
            place,
            bytes: bytes.len() as u64 + std::mem::take(&mut header_bytes),
        }))?;
    }
}

impl IdEncoding {
    fn number(&self, elem: &[u8]) -> i64 {
        let negative = self.signed && elem[elem.len() - 1] & 0x80 != 0;
        let mut wide = [if negative { 0xFF } else { 0 }; 8];
        wide[..elem.len()].copy_from_slice(elem);
        // Unsigned values beyond i64 become negative, which are not valid ids either.
        i64::from_le_bytes(wide)
    }
}

/// Reason why an array cannot be read.
#[derive(Debug)]
enum HeaderError {
    Io(std::io::Error),
    Wrong(String),
}

/// Parses the header of NumPy's format, versions 1 to 3: magic, version, length of the rest, a Python
/// dictionary as text.
fn npy(file: &mut impl Read) -> Result<IdEncoding, HeaderError> {
    let wrong = |message: String| HeaderError::Wrong(message);
    let mut read = |count: usize| {
        let mut bytes = vec![0; count];
        file.read_exact(&mut bytes)
            .map_err(|error| match error.kind() {
                std::io::ErrorKind::UnexpectedEof => wrong("it ends in its header".into()),
                _ => HeaderError::Io(error),
            })?;
        Ok(bytes)
    };
    let start = read(8)?;
    if &start[..6] != b"\x93NUMPY" {
        return Err(wrong("it is not a NumPy array".into()));
    }
    let length = if start[6] == 1 { read(2)? } else { read(4)? };
    let start_bytes = 8 + length.len();
    let length = (length.iter().rev()).fold(0usize, |sum, byte| sum << 8 | usize::from(*byte));
    if length > HEADER_BYTES_MAX {
        return Err(wrong(format!("its header has {length} bytes")));
    }
    let header = String::from_utf8_lossy(&read(length)?).into_owned();
    let value = |name: &str| {
        let at = header.find(&format!("'{name}'"))?;
        let rest = header[at + name.len() + 2..].trim_start_matches([':', ' ']);
        let end = if rest.starts_with('(') {
            rest.find(')')? + 1
        } else {
            rest.find(',')?
        };
        Some(rest[..end].trim())
    };
    let descr = value("descr").unwrap_or_default().trim_matches('\'');
    let elem = match descr {
        "|u1" => Some((1, false)),
        "<u2" => Some((2, false)),
        "<u4" => Some((4, false)),
        "<u8" => Some((8, false)),
        "|i1" => Some((1, true)),
        "<i2" => Some((2, true)),
        "<i4" => Some((4, true)),
        "<i8" => Some((8, true)),
        _ => None,
    };
    let Some((elem_bytes, signed)) = elem else {
        return Err(wrong(format!(
            "its element type is \"{descr}\": convert it to little-endian integers (array.astype(\"<u4\"))"
        )));
    };
    let shape = value("shape").unwrap_or_default();
    if shape.matches(',').count() != 1 || !shape.ends_with(",)") {
        return Err(wrong(format!(
            "its shape is {shape}: convert it to one dimension (array.reshape(-1))"
        )));
    }
    Ok(IdEncoding {
        start_bytes: (start_bytes + length) as u64,
        elem_bytes,
        signed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(dict: &str) -> Vec<u8> {
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((dict.len() as u16).to_le_bytes());
        bytes.extend(dict.as_bytes());
        bytes
    }

    #[test]
    fn numpys_header_determines_the_layout() {
        let of = |descr: &str, shape: &str| {
            let dict =
                format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}   \n");
            let bytes = header(&dict);
            let layout = npy(&mut &bytes[..]);
            layout.map(|layout| {
                assert_eq!(layout.start_bytes, bytes.len() as u64);
                (layout.elem_bytes, layout.signed)
            })
        };
        assert_eq!(of("<u2", "(7,)").unwrap(), (2, false));
        assert_eq!(of("<i8", "(7,)").unwrap(), (8, true));
        for (descr, shape, part) in [
            ("<f4", "(7,)", "type is \"<f4\""),
            (">u2", "(7,)", "\">u2\""),
            ("<u2", "(7, 2)", "its shape is (7, 2)"),
            ("<u2", "()", "its shape is ()"),
        ] {
            match of(descr, shape).unwrap_err() {
                HeaderError::Wrong(text) => assert!(text.contains(part), "{text}"),
                HeaderError::Io(error) => panic!("{error}"),
            }
        }
        for bytes in [&b"\x93NUM"[..], b"not a NumPy array", &header("{}")[..11]] {
            assert!(npy(&mut &bytes[..]).is_err());
        }
    }
}
