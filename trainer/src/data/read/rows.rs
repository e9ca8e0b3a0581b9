//! Reads a parquet file: each row is a record. Reads only the known columns, a page at a time.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use minijinja::Value;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use parquet::schema::types::Type;

use super::record::{COLUMNS, Document, no_columns};
use super::{Piece, Place, Source};
use crate::data::DataError;

pub(super) fn documents(
    source: &Source,
    key: &'static str,
    take: &mut dyn FnMut(Piece) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let damaged = |message: String| DataError::Damaged {
        path: source.path.clone(),
        message: format!("{message}: create or download the parquet file again"),
    };
    let file = std::fs::File::open(&source.path).map_err(DataError::reading(key, &source.path))?;
    let reader = held(|| SerializedFileReader::new(file)).map_err(damaged)?;
    let schema = reader.metadata().file_metadata().schema();
    let columns = columns(schema);
    if columns.is_empty() {
        let found = schema.get_fields().iter().map(|field| field.name());
        return Err(DataError::Record {
            place: Place {
                path: source.path.clone(),
                number: None,
                what: "",
            },
            message: no_columns(found),
        });
    }
    let count = reader.metadata().file_metadata().num_rows().max(1) as u64;
    let projection = Type::group_type_builder(schema.name())
        .with_fields(columns)
        .build()
        .map_err(|error| damaged(error.to_string()))?;
    let rows = RowIter::from_file_into(Box::new(reader));
    let mut rows = held(|| rows.project(Some(projection))).map_err(damaged)?;
    let mut gone_bytes = 0;
    for number in 1.. {
        let place = Place {
            path: source.path.clone(),
            number: Some(number),
            what: "row",
        };
        let Some(row) = held(|| rows.next().transpose())
            .map_err(|message| damaged(format!("row {number}: {message}")))?
        else {
            return Ok(());
        };
        let document = match record(row).and_then(|record| Document::of(&record)) {
            Ok(document) => document,
            Err(message) => return Err(DataError::Record { place, message }),
        };
        // The file is compressed, so progress assumes rows of equal size.
        let upto = (u128::from(source.bytes) * u128::from(number) / u128::from(count)) as u64;
        let upto = upto.min(source.bytes);
        take(Piece {
            document,
            after: None,
            place,
            bytes: upto - gone_bytes,
        })?;
        gone_bytes = upto;
    }
    unreachable!("rows end before their numbers")
}

/// Columns of the file that are read.
fn columns(schema: &Type) -> Vec<Arc<Type>> {
    let fields = schema.get_fields().iter();
    let ours = fields.filter(|field| COLUMNS.contains(&field.name()));
    ours.cloned().collect()
}

/// Calls `read` and turns a panic into an error: the parquet library panics on some damaged files.
fn held<T>(read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("its pages contradict its schema".into()),
    }
}

/// Converts a row to the object that it would be on a JSON line.
fn record(row: Row) -> Result<Value, String> {
    let fields = row.into_columns().into_iter();
    let fields = fields.map(|(name, field)| Ok((name, value(field)?)));
    Ok(Value::from_pairs(
        fields.collect::<Result<Vec<_>, String>>()?,
    ))
}

fn value(field: Field) -> Result<Value, String> {
    Ok(match field {
        Field::Null => Value::from(()),
        Field::Bool(value) => value.into(),
        Field::Byte(value) => value.into(),
        Field::Short(value) => value.into(),
        Field::Int(value) => value.into(),
        Field::Long(value) => value.into(),
        Field::UByte(value) => value.into(),
        Field::UShort(value) => value.into(),
        Field::UInt(value) => value.into(),
        Field::ULong(value) => value.into(),
        Field::Float(value) => value.into(),
        Field::Double(value) => value.into(),
        Field::Str(text) => text.into(),
        // Some writers do not mark text columns as text.
        Field::Bytes(bytes) => std::str::from_utf8(bytes.data())
            .map_err(|_| "contains bytes that are not UTF-8")?
            .into(),
        Field::Group(row) => record(row)?,
        Field::ListInternal(list) => {
            let elements = list.elements().iter().cloned();
            Value::from(elements.map(value).collect::<Result<Vec<_>, _>>()?)
        }
        Field::MapInternal(map) => {
            let entries = map.entries().iter().cloned();
            let entries = entries.map(|(key, field)| match key {
                Field::Str(key) => Ok((key, value(field)?)),
                _ => Err("contains a map whose keys are not text".to_owned()),
            });
            Value::from_pairs(entries.collect::<Result<Vec<_>, _>>()?)
        }
        other => {
            return Err(format!(
                "contains {other}, which is neither text nor a number"
            ));
        }
    })
}
