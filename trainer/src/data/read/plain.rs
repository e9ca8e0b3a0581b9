//! A file of text: one document, in pieces cut behind a line's end so that a long one is never whole in memory.

use std::io::Read;

use super::record::Document;
use super::{Piece, Place, Source};
use crate::data::DataError;

/// Tokenizing takes some hundred bytes for each of these, on several threads at once.
pub(in crate::data) const PIECE_BYTES: usize = 256 << 10;

pub(super) fn pieces(
    source: &Source,
    key: &'static str,
    any_bytes: bool,
    take: &mut dyn FnMut(Piece) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let failed = DataError::reading(key, &source.path);
    let mut file = std::fs::File::open(&source.path).map_err(&failed)?;
    let mut rest = Vec::new();
    let (mut continues, mut before_bytes) = (false, 0u64);
    loop {
        let wanted = PIECE_BYTES - rest.len();
        let mut bounded = (&mut file).take(wanted as u64);
        let read = bounded.read_to_end(&mut rest).map_err(&failed)?;
        let ended = read < wanted;
        let cut = if ended { rest.len() } else { cut(&rest) };
        let mut piece = std::mem::take(&mut rest);
        rest = piece.split_off(cut);
        if piece.is_empty() {
            return Ok(());
        }
        let bytes = piece.len() as u64;
        let place = Place {
            path: source.path.clone(),
            number: None,
            what: "",
        };
        let document = if any_bytes {
            Document::Bytes(piece)
        } else {
            Document::Text(String::from_utf8(piece).map_err(|error| DataError::Record {
                place: place.clone(),
                message: format!(
                    "is no UTF-8 from byte {} on: write it as UTF-8, or set data.tokenizer = \"bytes\"",
                    before_bytes + error.utf8_error().valid_up_to() as u64
                ),
            })?)
        };
        take(Piece {
            document,
            continues,
            place,
            bytes,
        })?;
        continues = true;
        before_bytes += bytes;
        if ended {
            return Ok(());
        }
    }
}

/// Where a full piece ends: behind its last line that the next begins without a space, as tokenizers cut there too; behind a
/// character where there is no such line.
pub(in crate::data) fn cut(piece: &[u8]) -> usize {
    let line = (1..piece.len())
        .rev()
        .find(|&at| piece[at - 1] == b'\n' && !piece[at].is_ascii_whitespace());
    let character = || {
        // At most three bytes of a character that goes on.
        let ends = (piece.len().saturating_sub(3)..=piece.len()).rev();
        ends.into_iter()
            .find(|&at| at < piece.len() && piece[at] & 0xC0 != 0x80)
            .filter(|&at| at > 0)
            .unwrap_or(piece.len())
    };
    line.unwrap_or_else(character)
}

#[cfg(test)]
mod tests {
    use super::super::Format;
    use super::*;

    fn read(content: &[u8], any_bytes: bool) -> Result<Vec<(Document, bool)>, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        std::fs::write(&path, content).unwrap();
        let source = Source {
            path,
            format: Format::Plain,
            bytes: content.len() as u64,
            version: [0; 5],
        };
        let mut found = Vec::new();
        pieces(&source, "data.files", any_bytes, &mut |piece| {
            found.push((piece.document, piece.continues));
            Ok(())
        })?;
        Ok(found)
    }

    #[test]
    fn a_long_text_comes_in_pieces_that_add_up() {
        let line = "äöü and other words\n";
        let text = line.repeat(3 * PIECE_BYTES / line.len());
        for content in [text.clone(), text.replace('\n', "")] {
            let pieces = read(content.as_bytes(), false).unwrap();
            assert!(pieces.len() >= 3);
            let mut whole = String::new();
            for (index, (piece, continues)) in pieces.iter().enumerate() {
                let Document::Text(piece) = piece else {
                    panic!("a text")
                };
                assert_eq!(*continues, index > 0);
                assert!(piece.len() <= PIECE_BYTES && piece.len() > PIECE_BYTES / 2 || index > 1);
                whole += piece;
            }
            assert!(whole == content);
        }
        let exact = vec![b'x'; PIECE_BYTES];
        assert_eq!(read(&exact, true).unwrap().concat_bytes(), exact);
        let bytes: Vec<u8> = (0..2 * PIECE_BYTES + 5).map(|i| (i % 256) as u8).collect();
        assert_eq!(read(&bytes, true).unwrap().concat_bytes(), bytes);
    }

    trait ConcatBytes {
        fn concat_bytes(self) -> Vec<u8>;
    }

    impl ConcatBytes for Vec<(Document, bool)> {
        fn concat_bytes(self) -> Vec<u8> {
            let bytes = self.into_iter().map(|(document, _)| match document {
                Document::Bytes(bytes) => bytes,
                other => panic!("{other:?}"),
            });
            bytes.collect::<Vec<_>>().concat()
        }
    }

    #[test]
    fn what_is_no_utf8_is_named_with_its_byte() {
        let mut content = vec![b'a'; PIECE_BYTES + 100];
        content[PIECE_BYTES + 7] = 0xFF;
        let text = read(&content, false).unwrap_err().to_string();
        assert!(
            text.contains(&format!("no UTF-8 from byte {} on", PIECE_BYTES + 7)),
            "{text}"
        );
    }
}
