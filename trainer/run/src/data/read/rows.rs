//! Reads tables: parquet files, and Arrow files as `datasets` saves them. Each row is a record. Reads only the
//! known columns, some rows at a time.

use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::panic::{AssertUnwindSafe, catch_unwind};

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type,
    UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::{ArrowError, DataType, Schema};
use chat_template::Value;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use super::record::{COLUMNS, no_columns};
use super::{RecordResult, SourceFile};
use crate::data::DataError;

/// Rows of a parquet file that are decoded at a time.
const BATCH_ROWS: usize = 64;

/// First bytes of an Arrow file; one without them is a stream, as `datasets` writes it.
const ARROW_FILE: &[u8] = b"ARROW1";

type Batches = Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>>>;

/// Calls `take` for each row of a parquet file.
pub(super) fn parquet(
    source: &SourceFile,
    key: &'static str,
    take: &mut dyn FnMut(RecordResult) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let file = File::open(&source.path).map_err(DataError::reading(key, &source.path))?;
    let opened = caught(|| ParquetRecordBatchReaderBuilder::try_new(file));
    let builder = opened.map_err(|message| damaged(source, &message))?;
    let columns = columns(source, builder.schema())?;
    let count = builder.metadata().file_metadata().num_rows();
    let mask = ProjectionMask::roots(builder.parquet_schema(), columns);
    let reader = caught(|| {
        let builder = builder.with_projection(mask);
        builder.with_batch_size(BATCH_ROWS).build()
    });
    let reader = reader.map_err(|message| damaged(source, &message))?;
    rows(source, u64::try_from(count).ok(), Box::new(reader), take)
}

/// Calls `take` for each row of an Arrow file.
pub(super) fn arrow(
    source: &SourceFile,
    key: &'static str,
    take: &mut dyn FnMut(RecordResult) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let failed = DataError::reading(key, &source.path);
    let mut file = BufReader::new(File::open(&source.path).map_err(&failed)?);
    let mut start = Vec::new();
    let mut bounded = (&mut file).take(ARROW_FILE.len() as u64);
    bounded.read_to_end(&mut start).map_err(&failed)?;
    file.rewind().map_err(&failed)?;
    let opened: Result<(Batches, Vec<usize>), DataError> = if start == ARROW_FILE {
        let reader = caught(|| FileReader::try_new(file, None));
        let reader = reader.map_err(|message| damaged(source, &message))?;
        columns(source, &reader.schema()).map(|columns| (Box::new(reader) as Batches, columns))
    } else {
        let reader = caught(|| StreamReader::try_new(file, None));
        let reader = reader.map_err(|message| damaged(source, &message))?;
        columns(source, &reader.schema()).map(|columns| (Box::new(reader) as Batches, columns))
    };
    let (batches, columns) = opened?;
    let projected = batches.map(move |batch| batch?.project(&columns));
    rows(source, None, Box::new(projected), take)
}

fn damaged(source: &SourceFile, message: &str) -> DataError {
    DataError::Damaged {
        path: source.path.clone(),
        message: format!("{message}: create or download the file again"),
    }
}

/// Returns the numbers of the known columns; there is at least one.
fn columns(source: &SourceFile, schema: &Schema) -> Result<Vec<usize>, DataError> {
    let names = || schema.fields().iter().map(|field| field.name().as_str());
    let known = names()
        .enumerate()
        .filter(|(_, name)| COLUMNS.contains(name));
    let known: Vec<usize> = known.map(|(at, _)| at).collect();
    if known.is_empty() {
        return Err(DataError::Record {
            place: source.position("", None),
            message: no_columns(names()),
        });
    }
    Ok(known)
}

/// Calls `take` for each row of `batches`, `count` in all if that is known.
fn rows(
    source: &SourceFile,
    count: Option<u64>,
    mut batches: Batches,
    take: &mut dyn FnMut(RecordResult) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let (mut number, mut gone_bytes) = (0, 0);
    loop {
        let next = caught(|| batches.next().transpose());
        let next =
            next.map_err(|message| damaged(source, &format!("row {}: {message}", number + 1)))?;
        let Some(batch) = next else { return Ok(()) };
        for row in 0..batch.num_rows() {
            number += 1;
            let place = source.position("row", Some(number));
            let record = caught(|| record(&batch, row));
            // The file is compressed, so progress assumes rows of equal size.
            let upto = match count {
                Some(count) => {
                    let bytes = u128::from(source.bytes) * u128::from(number);
                    (bytes / u128::from(count.max(1))) as u64
                }
                None => gone_bytes + (batch.get_array_memory_size() / batch.num_rows()) as u64,
            };
            let upto = upto.min(source.bytes);
            take(source.piece(record, place, upto - gone_bytes))?;
            gone_bytes = upto;
        }
    }
}

/// Calls `read` and turns a panic into an error: the libraries panic on some damaged files.
fn caught<T, E: std::fmt::Display>(read: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("its content contradicts its schema".into()),
    }
}

/// Converts a row to the object that it would be on a JSON line.
fn record(batch: &RecordBatch, row: usize) -> Result<Value, String> {
    let schema = batch.schema();
    let fields = schema.fields().iter().zip(batch.columns());
    object(
        fields.map(|(field, column)| (field.name().as_str(), column)),
        row,
    )
}

fn object<'a>(
    fields: impl Iterator<Item = (&'a str, &'a ArrayRef)>,
    row: usize,
) -> Result<Value, String> {
    let pairs = fields.map(|(name, column)| Ok((name.to_owned(), value(column, row)?)));
    Ok(Value::from_pairs(
        pairs.collect::<Result<Vec<_>, String>>()?,
    ))
}

fn list(elements: &ArrayRef) -> Result<Value, String> {
    let values = (0..elements.len()).map(|at| value(elements, at));
    Ok(Value::from(values.collect::<Result<Vec<_>, _>>()?))
}

fn value(array: &dyn Array, row: usize) -> Result<Value, String> {
    if array.is_null(row) {
        return Ok(Value::None);
    }
    // Some writers do not mark text columns as text.
    let text = |bytes: &[u8]| match std::str::from_utf8(bytes) {
        Ok(text) => Ok(Value::from(text)),
        Err(_) => Err("contains bytes that are not UTF-8".to_owned()),
    };
    Ok(match array.data_type() {
        DataType::Null => Value::None,
        DataType::Boolean => array.as_boolean().value(row).into(),
        DataType::Int8 => array.as_primitive::<Int8Type>().value(row).into(),
        DataType::Int16 => array.as_primitive::<Int16Type>().value(row).into(),
        DataType::Int32 => array.as_primitive::<Int32Type>().value(row).into(),
        DataType::Int64 => array.as_primitive::<Int64Type>().value(row).into(),
        DataType::UInt8 => array.as_primitive::<UInt8Type>().value(row).into(),
        DataType::UInt16 => array.as_primitive::<UInt16Type>().value(row).into(),
        DataType::UInt32 => array.as_primitive::<UInt32Type>().value(row).into(),
        DataType::UInt64 => array.as_primitive::<UInt64Type>().value(row).into(),
        DataType::Float16 => array
            .as_primitive::<Float16Type>()
            .value(row)
            .to_f32()
            .into(),
        DataType::Float32 => array.as_primitive::<Float32Type>().value(row).into(),
        DataType::Float64 => array.as_primitive::<Float64Type>().value(row).into(),
        DataType::Utf8 => array.as_string::<i32>().value(row).into(),
        DataType::LargeUtf8 => array.as_string::<i64>().value(row).into(),
        DataType::Utf8View => array.as_string_view().value(row).into(),
        DataType::Binary => text(array.as_binary::<i32>().value(row))?,
        DataType::LargeBinary => text(array.as_binary::<i64>().value(row))?,
        DataType::BinaryView => text(array.as_binary_view().value(row))?,
        DataType::List(_) => list(&array.as_list::<i32>().value(row))?,
        DataType::LargeList(_) => list(&array.as_list::<i64>().value(row))?,
        DataType::FixedSizeList(..) => list(&array.as_fixed_size_list().value(row))?,
        DataType::Struct(_) => {
            let fields = array.as_struct();
            object(fields.column_names().into_iter().zip(fields.columns()), row)?
        }
        DataType::Map(..) => {
            let entries = array.as_map().value(row);
            let pairs = (0..entries.len()).map(|at| match value(entries.column(0), at)?.as_str() {
                Some(key) => Ok((key.to_owned(), value(entries.column(1), at)?)),
                None => Err("contains a map whose keys are not text".to_owned()),
            });
            Value::from_pairs(pairs.collect::<Result<Vec<_>, _>>()?)
        }
        DataType::Dictionary(..) => {
            let dictionary = array.as_any_dictionary();
            let at = value(dictionary.keys(), row)?.as_i64();
            let at = at.and_then(|at| usize::try_from(at).ok());
            value(
                dictionary.values(),
                at.ok_or("contains a dictionary whose key is no index")?,
            )?
        }
        other => {
            return Err(format!(
                "contains {other}, which is neither text nor a number"
            ));
        }
    })
}
