//! Reads a file with a JSON object on each line. Skips blank lines.

use std::io::{BufRead, BufReader, Read};

use chat_template::Value;

use super::open::open;
use super::{RecordResult, SourceFile};
use crate::data::DataError;

/// Longest line; a longer one suggests a file without line ends.
const LINE_BYTES_MAX: u64 = 256 << 20;
const BUFFER_BYTES: usize = 1 << 20;

pub(super) fn documents(
    source: &SourceFile,
    key: &'static str,
    take: &mut dyn FnMut(RecordResult) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let failed = DataError::reading(key, &source.path);
    let (file, read_bytes) = open(source).map_err(&failed)?;
    let mut reader = BufReader::with_capacity(BUFFER_BYTES, file);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let mut bounded = (&mut reader).take(LINE_BYTES_MAX + 1);
        let bytes = bounded.read_until(b'\n', &mut line).map_err(&failed)? as u64;
        let place = source.position("line", Some(number));
        if bytes > LINE_BYTES_MAX {
            return Err(DataError::Record {
                place,
                message: format!("is longer than {} MiB", LINE_BYTES_MAX >> 20),
            });
        }
        if bytes == 0 {
            return Ok(());
        }
        // Some editors start a file with a byte order mark.
        let text = line.strip_prefix(b"\xEF\xBB\xBF").filter(|_| number == 1);
        let text = text.unwrap_or(&line);
        if text.trim_ascii().is_empty() {
            continue;
        }
        let record = record(text.trim_ascii_end());
        take(source.piece(record, place, read_bytes.take()))?;
    }
    unreachable!("lines end before their numbers")
}

fn record(line: &[u8]) -> Result<Value, String> {
    let text = std::str::from_utf8(line).map_err(|error| {
        let at = error.valid_up_to() + 1;
        format!("is not UTF-8 from byte {at} of the line on: convert the file to UTF-8")
    })?;
    serde_json::from_str(text).map_err(|error| {
        // Positions in the error refer to the line, so its line number is always 1 and is removed.
        let (message, column) = (error.to_string(), error.column());
        let message = message.split(" at line ").next().unwrap_or_default();
        format!("is not JSON: {message} at column {column}")
    })
}
