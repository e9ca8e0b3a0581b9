//! `tensorboard`: an event file in TensorBoard's format.
//!
//! ```text
//!   record   length u64 | masked crc32c of it u32 | event | masked crc32c of it u32        little endian
//!   events   "brain.Event:2", a session's start (later steps are forgotten), then one for each step with its scalars
//! ```

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crc_fast::crc32_iscsi as crc32c;
use prost::Message;

use super::{MonitorError, Scalar};
use offload_support::paths::PRIVATE;

const MONITOR: &str = "tensorboard";

/// The fields of tensorflow/core/util/event.proto that are written.
#[derive(Clone, PartialEq, Message)]
struct TensorboardEvent {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    session_log: Option<SessionLog>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    values: Vec<SummaryValue>,
}

#[derive(Clone, PartialEq, Message)]
struct SummaryValue {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

const SESSION_STARTS: i32 = 1;

/// Event file of one start of a run.
pub(super) struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Creates a file in `dir`. Its first event tells TensorBoard to discard events after `samples` samples
    /// in earlier files.
    ///
    /// # Errors
    /// Directory or file cannot be created or written.
    pub(super) fn create(dir: &Path, samples: u64) -> Result<Self, MonitorError> {
        std::fs::create_dir_all(dir).map_err(MonitorError::from_io(MONITOR, "make", dir))?;
        // TensorBoard reads the files of a directory in the order of their names.
        let (seconds, process) = (now().as_secs(), std::process::id());
        let path = dir.join(format!(
            "events.out.tfevents.{seconds:010}.offloadd.{process}.0"
        ));
        let mut options = File::options();
        options.create(true).append(true).mode(PRIVATE);
        let opened = options.open(&path);
        let file = opened.map_err(MonitorError::from_io(MONITOR, "make", &path))?;
        let mut events = Self { path, file };
        events.add(TensorboardEvent {
            file_version: Some("brain.Event:2".into()),
            ..TensorboardEvent::default()
        })?;
        events.add(TensorboardEvent {
            step: samples as i64 + 1,
            session_log: Some(SessionLog {
                status: SESSION_STARTS,
            }),
            ..TensorboardEvent::default()
        })?;
        Ok(events)
    }

    /// Adds a step's scalars.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn write(&mut self, scalars: &[Scalar], samples: u64) -> Result<(), MonitorError> {
        let values = scalars.iter().map(|(name, value)| SummaryValue {
            tag: (*name).to_owned(),
            simple_value: Some(*value as f32),
        });
        self.add(TensorboardEvent {
            step: samples as i64,
            summary: Some(Summary {
                values: values.collect(),
            }),
            ..TensorboardEvent::default()
        })
    }

    fn add(&mut self, event: TensorboardEvent) -> Result<(), MonitorError> {
        let wall_time = now().as_secs_f64();
        let event = TensorboardEvent { wall_time, ..event }.encode_to_vec();
        let length = (event.len() as u64).to_le_bytes();
        let mut record = length.to_vec();
        record.extend(masked_sum(&length).to_le_bytes());
        record.extend(&event);
        record.extend(masked_sum(&event).to_le_bytes());
        // In one write, so that a kill leaves a complete record or none.
        self.file
            .write_all(&record)
            .map_err(MonitorError::from_io(MONITOR, "write", &self.path))
    }
}

fn now() -> std::time::Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// TensorBoard's masked checksum. The mask prevents a checksum in the data from matching.
fn masked_sum(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xA282_EAD8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads the events of a directory's only file and verifies each checksum.
    fn read(dir: &Path) -> Vec<TensorboardEvent> {
        let mut files = std::fs::read_dir(dir).unwrap();
        let path = files.next().unwrap().unwrap().path();
        assert!(files.next().is_none());
        let bytes = std::fs::read(path).unwrap();
        let (mut rest, mut events) = (&bytes[..], Vec::new());
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            assert_eq!(rest[8..12], masked_sum(&rest[..8]).to_le_bytes());
            let event = &rest[12..12 + length];
            assert_eq!(
                rest[12 + length..16 + length],
                masked_sum(event).to_le_bytes()
            );
            events.push(TensorboardEvent::decode(event).unwrap());
            rest = &rest[16 + length..];
        }
        events
    }

    #[test]
    fn a_file_has_its_version_a_start_and_the_steps() {
        let dir = tempfile::tempdir().unwrap();
        let dir = &dir.path().join("tb/job");
        let mut file = EventFile::create(dir, 64).unwrap();
        let scalars = [
            ("Train/Samples/train_loss", 2.5),
            ("Train/Samples/lr", 1e-3),
        ];
        file.write(&scalars, 72).unwrap();
        let events = read(dir);
        assert_eq!(events[0].file_version.as_deref(), Some("brain.Event:2"));
        assert_eq!(
            (events[1].step, events[1].session_log.is_some()),
            (65, true)
        );
        assert_eq!((events.len(), events[2].step), (3, 72));
        let values = &events[2].summary.as_ref().unwrap().values;
        let found: Vec<_> = values
            .iter()
            .map(|value| (&*value.tag, value.simple_value))
            .collect();
        assert_eq!(
            found,
            [(scalars[0].0, Some(2.5)), (scalars[1].0, Some(1e-3))]
        );
    }

    #[test]
    fn records_have_the_bytes_that_tensorboard_reads() {
        // The first record of such a file, except for its time, as written by TensorFlow.
        let mut event = TensorboardEvent {
            file_version: Some("brain.Event:2".into()),
            ..TensorboardEvent::default()
        };
        assert_eq!(event.encode_to_vec(), b"\x1a\x0dbrain.Event:2");
        event.wall_time = 1.0;
        assert_eq!(event.encode_to_vec().len(), 24);
        // crc32c("123456789") is 0xE306_9283: rotated right by 15 and shifted.
        assert_eq!(masked_sum(b"123456789"), 0xC78A_B0E5);
    }
}
