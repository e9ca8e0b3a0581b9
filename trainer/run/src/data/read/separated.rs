//! Reads a `.csv` or `.tsv` file: the first line names the columns, each further record is a row.

use chat_template::Value;

use super::ending::ending;
use super::open::open;
use super::record::{COLUMNS, no_columns};
use super::{RecordResult, SourceFile};
use crate::data::DataError;

/// Columns whose text is JSON.
const LISTS: [&str; 6] = [
    "input_ids",
    "labels",
    "attention_mask",
    "messages",
    "conversations",
    "history",
];

pub(super) fn documents(
    source: &SourceFile,
    key: &'static str,
    take: &mut dyn FnMut(RecordResult) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let failed = DataError::reading(key, &source.path);
    let place = |number: Option<u64>| source.position("line", number);
    let wrong = |error: csv::Error| {
        let number = error.position().map(csv::Position::line);
        match error.into_kind() {
            csv::ErrorKind::Io(error) => failed(error),
            csv::ErrorKind::Utf8 { .. } => DataError::Record {
                place: place(number),
                message: "is not UTF-8: convert the file to UTF-8".into(),
            },
            csv::ErrorKind::UnequalLengths {
                expected_len, len, ..
            } => DataError::Record {
                place: place(number),
                message: format!(
                    "has {len} fields, but the first line names {expected_len}: quote fields that contain separators or line ends"
                ),
            },
            other => DataError::Record {
                place: place(number),
                message: format!("cannot be read: {other:?}"),
            },
        }
    };
    let (file, read_bytes) = open(source).map_err(&failed)?;
    let mut reader = csv::ReaderBuilder::new()
        .delimiter(if ending(&source.path) == "tsv" {
            b'\t'
        } else {
            b','
        })
        .from_reader(file);
    let names = reader.headers().map_err(wrong)?.clone();
    let names: Vec<&str> = names
        .iter()
        .map(|name| name.trim_start_matches('\u{FEFF}'))
        .collect();
    if !names.iter().any(|name| COLUMNS.contains(name)) {
        return Err(DataError::Record {
            place: place(Some(1)),
            message: no_columns(names.iter().copied()),
        });
    }
    let mut row = csv::StringRecord::new();
    while reader.read_record(&mut row).map_err(wrong)? {
        let place = place(row.position().map(csv::Position::line));
        let record = record(&names, &row);
        take(source.piece(record, place, read_bytes.take()))?;
    }
    Ok(())
}

/// Converts a row to the object that it would be on a JSON line.
fn record(names: &[&str], row: &csv::StringRecord) -> Result<Value, String> {
    let known = names
        .iter()
        .zip(row)
        .filter(|(name, _)| COLUMNS.contains(name));
    let pairs = known.map(|(name, text)| {
        let value = match LISTS.contains(name) {
            // An empty cell is a missing value.
            true if text.is_empty() => Value::None,
            true => serde_json::from_str(text)
                .map_err(|error| format!("\"{name}\" is not JSON: {error}"))?,
            false => Value::from(text),
        };
        Ok((*name, value))
    });
    Ok(Value::from_pairs(
        pairs.collect::<Result<Vec<_>, String>>()?,
    ))
}
