//! Reads a `.json` file: an array of objects, one at a time, or an object on each line.

use std::cell::Cell;
use std::fmt;
use std::io::{BufRead, BufReader, Read};

use chat_template::Value;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};

use super::open::open;
use super::{RecordResult, SourceFile, lines};
use crate::data::DataError;

const BUFFER_BYTES: usize = 1 << 20;

pub(super) fn documents(
    source: &SourceFile,
    key: &'static str,
    take: &mut dyn FnMut(RecordResult) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let failed = DataError::reading(key, &source.path);
    let (file, read_bytes) = open(source).map_err(&failed)?;
    let mut reader = BufReader::with_capacity(BUFFER_BYTES, file);
    let start = reader.fill_buf().map_err(&failed)?;
    // Some editors start a file with a byte order mark.
    let mark_bytes = if start.starts_with(b"\xEF\xBB\xBF") {
        3
    } else {
        0
    };
    let text = start[mark_bytes..].trim_ascii_start();
    if !text.starts_with(b"[") {
        let line = text.split(|byte| *byte == b'\n').next().unwrap_or_default();
        if line.trim_ascii() == b"{" {
            return Err(DataError::Format {
                key,
                path: source.path.clone(),
                instead: "it is one object on several lines: write an array of objects, or one object on each line",
            });
        }
        return lines::documents(source, key, take);
    }
    reader.consume(mark_bytes);
    let mut stopped = None;
    let mut each = Each {
        source,
        take,
        number: 0,
        read_bytes: &read_bytes,
        stopped: &mut stopped,
    };
    let mut parser = serde_json::Deserializer::from_reader(reader.by_ref());
    let parsed = (&mut parser).deserialize_seq(&mut each);
    let number = each.number;
    let ended = parsed.and_then(|()| parser.end());
    match (stopped, ended) {
        (Some(stopped), _) => Err(stopped),
        (None, Ok(())) => Ok(()),
        (None, Err(error)) if error.is_io() => Err(failed(error.into())),
        (None, Err(error)) => Err(DataError::Record {
            place: source.position("record", Some(number + 1)),
            message: format!("is not JSON: {error}"),
        }),
    }
}

/// Takes each element of an array.
struct Each<'a> {
    source: &'a SourceFile,
    take: &'a mut dyn FnMut(RecordResult) -> Result<(), DataError>,
    number: u64,
    /// Bytes read since the last record.
    read_bytes: &'a Cell<u64>,
    /// Error of a record, or of `take`.
    stopped: &'a mut Option<DataError>,
}

impl Each<'_> {
    fn record(&mut self, record: Value) -> Result<(), DataError> {
        let place = self.source.position("record", Some(self.number));
        let piece = self.source.piece(Ok(record), place, self.read_bytes.take());
        (self.take)(piece)
    }
}

impl<'de> Visitor<'de> for &mut Each<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        while let Some(record) = elements.next_element::<Value>()? {
            self.number += 1;
            if let Err(error) = self.record(record) {
                *self.stopped = Some(error);
                return Err(A::Error::custom("stopped"));
            }
        }
        Ok(())
    }
}
