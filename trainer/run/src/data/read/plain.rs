//! Reads a text file as one document, in pieces, so that a long one is never in memory as a whole. Skips a
//! byte order mark.

use std::io::Read;

use super::open::open;
use super::record::Document;
use super::{DocumentPosition, Piece, RecordResult, SourceFile};
use crate::data::DataError;

/// Size of a piece. Tokenizing takes some hundred bytes for each byte of a piece, on several threads at once.
pub(in crate::data) const PIECE_BYTES: usize = 256 << 10;

/// Bytes at the end of a piece that the next piece is given as context: a few words.
const END_BYTES: usize = 64;

pub(super) fn pieces(
    source: &SourceFile,
    key: &'static str,
    any_bytes: bool,
    take: &mut dyn FnMut(RecordResult) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let failed = DataError::reading(key, &source.path);
    let (mut file, read_bytes) = open(source).map_err(&failed)?;
    let mut rest = Vec::new();
    let (mut after, mut before_bytes) = (None, 0u64);
    loop {
        let wanted = PIECE_BYTES - rest.len();
        let mut bounded = (&mut file).take(wanted as u64);
        let read = bounded.read_to_end(&mut rest).map_err(&failed)?;
        let ended = read < wanted;
        // Some editors start a file with a byte order mark.
        let mark_bytes = match rest.starts_with(b"\xEF\xBB\xBF") && after.is_none() {
            true => rest.drain(..3).len() as u64,
            false => 0,
        };
        before_bytes += mark_bytes;
        let cut = if ended { rest.len() } else { cut(&rest) };
        let mut piece = std::mem::take(&mut rest);
        rest = piece.split_off(cut);
        if piece.is_empty() {
            return Ok(());
        }
        let bytes = piece.len() as u64;
        let place = DocumentPosition {
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
                    "is not UTF-8 from byte {} on: convert it to UTF-8, or set data.tokenizer = \"bytes\"",
                    before_bytes + error.utf8_error().valid_up_to() as u64
                ),
            })?)
        };
        let end = match &document {
            Document::Text(text) => end_of(text).to_owned(),
            _ => String::new(),
        };
        take(Ok(Piece {
            document,
            after: after.replace(end),
            records: None,
            place,
            bytes: read_bytes.take(),
        }))?;
        before_bytes += bytes;
        if ended {
            return Ok(());
        }
    }
}

/// Returns where to end a full piece, so that tokenizing the pieces gives the tokens of the whole text. Uses
/// the last position of the first of these kinds that occurs:
///
/// - before a single space between two words, or before a single line end after a letter or digit: no known
///   tokenizer has a token that spans this position
/// - after a single line end that no space follows: some tokenizers encode "\r\n" as two tokens inside a text
///   and as one at its end
/// - after any character: a text without spaces and line ends gets one or two more tokens there
pub(in crate::data) fn cut(piece: &[u8]) -> usize {
    let is_word = |letter: Option<char>| letter.is_some_and(|letter| !letter.is_whitespace());
    let word = (1..piece.len()).rev().find(|&at| match piece[at] {
        b' ' => is_word(before(piece, at)) && is_word(behind(piece, at + 1)),
        b'\n' => piece[at - 1].is_ascii_alphanumeric() && is_word(behind(piece, at + 1)),
        _ => false,
    });
    let line = || {
        let mut ends = (2..piece.len()).rev();
        ends.find(|&at| {
            let single = is_word(before(piece, at - 1)) && is_word(behind(piece, at));
            piece[at - 1] == b'\n' && single
        })
    };
    let character = || {
        // An incomplete character has at most three bytes.
        let ends = (piece.len().saturating_sub(3)..=piece.len()).rev();
        ends.into_iter()
            .find(|&at| at < piece.len() && piece[at] & 0xC0 != 0x80)
            .filter(|&at| at > 0)
            .unwrap_or(piece.len())
    };
    word.or_else(line).unwrap_or_else(character)
}

/// Returns the character that ends at byte `end`.
fn before(text: &[u8], end: usize) -> Option<char> {
    let starts = (end.saturating_sub(4)..end).rev();
    let mut texts = starts.filter_map(|start| std::str::from_utf8(&text[start..end]).ok());
    texts.next()?.chars().next()
}

/// Returns the character that begins at byte `start`.
fn behind(text: &[u8], start: usize) -> Option<char> {
    let ends = start + 1..=text.len().min(start + 4);
    let mut texts = ends.filter_map(|end| std::str::from_utf8(&text[start..end]).ok());
    texts.next()?.chars().next()
}

/// Returns the end of a piece as context for the next one, so that what a tokenizer does at the beginning of
/// a text happens in the context.
pub(in crate::data) fn end_of(piece: &str) -> &str {
    let mut start = piece.len().saturating_sub(END_BYTES);
    while !piece.is_char_boundary(start) {
        start += 1;
    }
    &piece[start..]
}

#[cfg(test)]
mod tests {
    use super::super::Format;
    use super::*;

    fn read(content: &[u8], any_bytes: bool) -> Result<Vec<(Document, bool)>, DataError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        std::fs::write(&path, content).unwrap();
        let source = SourceFile {
            path,
            format: Format::Plain,
            records: None,
            entry: 0,
            bytes: content.len() as u64,
            version: [0; 5],
            identity: (0, 0),
        };
        let mut found = Vec::new();
        pieces(&source, "data.files", any_bytes, &mut |piece| {
            let piece = piece?;
            found.push((piece.document, piece.after.is_some()));
            Ok(())
        })?;
        Ok(found)
    }

    #[test]
    fn a_long_text_is_read_in_pieces_that_add_up() {
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

    #[test]
    fn a_byte_order_mark_at_the_start_of_a_file_is_not_text() {
        for any_bytes in [false, true] {
            for text in ["words", ""] {
                let with = format!("\u{FEFF}{text}");
                let found = read(with.as_bytes(), any_bytes).unwrap();
                assert_eq!(found, read(text.as_bytes(), any_bytes).unwrap());
            }
            // A mark inside a text is an ordinary character.
            let long = "x".repeat(PIECE_BYTES) + "\u{FEFF}end";
            let whole: Vec<u8> = (read(long.as_bytes(), any_bytes).unwrap().into_iter())
                .flat_map(|(document, _)| match document {
                    Document::Text(text) => text.into_bytes(),
                    Document::Bytes(bytes) => bytes,
                    other => panic!("{other:?}"),
                })
                .collect();
            assert!(whole == long.as_bytes());
        }
        let mut broken = "\u{FEFF}abc".as_bytes().to_vec();
        broken.push(0xFF);
        let text = read(&broken, false).unwrap_err().to_string();
        assert!(text.contains("not UTF-8 from byte 6 on"), "{text}");
    }

    #[test]
    fn a_piece_ends_between_tokens() {
        for (text, first) in [
            ("one two thr", "one two"),
            ("one two  three", "one"),
            ("one two\nthr", "one two"),
            ("one two.\nthr", "one"),
            ("one\n\ntwo\r\nthr", ""),
            ("東京。\n大阪", "東京。\n"),
            ("東京\u{3000} 大阪", ""),
        ] {
            let at = cut(text.as_bytes());
            if first.is_empty() {
                assert!(at + 4 > text.len(), "{text:?}: {at}");
            } else {
                assert_eq!(&text[..at], first, "{text:?}");
            }
        }
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
    fn invalid_utf8_is_reported_with_its_position() {
        let mut content = vec![b'a'; PIECE_BYTES + 100];
        content[PIECE_BYTES + 7] = 0xFF;
        let text = read(&content, false).unwrap_err().to_string();
        assert!(
            text.contains(&format!("not UTF-8 from byte {} on", PIECE_BYTES + 7)),
            "{text}"
        );
    }
}
