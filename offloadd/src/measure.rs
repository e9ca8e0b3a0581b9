//! Measures how fast a device reads and writes, when it is added and when it is calibrated; placement uses the rates.
//!
//! It writes first and reads what was written, because reading unwritten space would measure memory. For a device smaller than
//! its own cache the rates mean little and do no harm.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use offload_api::ids::DeviceIndex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::device::Device;
use crate::engine::{Engine, EngineChoice, EngineError, Io, IoDone, Memory};
use crate::io::{AlignedBytes, IoId, IoOp};
use crate::metrics::MovedBeside;
use crate::store::DATA_OFFSET;
use crate::store::format::MeasuredArea;
use crate::store::superblock::MeasuredRates;

/// Size of one operation, with which drives reach their rate.
const OPERATION_BYTES: usize = MeasuredArea::BYTES_MIN as usize;

/// Operations in flight.
const DEPTH: usize = 16;

/// Time for each direction.
const TIME: Duration = Duration::from_secs(1);

/// Time limit of one operation.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(60);

/// Time between two checks of operations that remain after a failure.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// Why a device cannot be measured, and so not be used.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// There is no engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// An operation failed.
    #[error("device {path}: {op:?} of {OPERATION_BYTES} bytes at {offset}: {what}")]
    Operation {
        /// Path of the device.
        path: String,
        /// Kind of operation.
        op: IoOp,
        /// First byte on the device.
        offset: u64,
        /// The error in words, or the bytes moved.
        what: String,
    },
    /// The measurement was abandoned with operations in flight, which may still write to the area.
    #[error(
        "{source}; {count} operations have not ended and may still overwrite bytes {offset} to {end}"
    )]
    LeftBehind {
        /// Why it was abandoned.
        source: Box<MeasureError>,
        /// Number of operations in flight.
        count: usize,
        /// First byte of the measured area.
        offset: u64,
        /// End of the measured area.
        end: u64,
    },
}

/// Measures a device that holds nothing from the start of its data area on. Counts the bytes moved in `moved`, also after a failure.
///
/// # Errors
/// [`MeasureError`].
pub fn measure_blank(
    device: &Device,
    choice: EngineChoice,
    moved: &mut MovedBeside,
) -> Result<MeasuredRates, MeasureError> {
    let area = MeasuredArea {
        offset: DATA_OFFSET,
        bytes: device.bytes().saturating_sub(DATA_OFFSET),
    };
    measure(device, area, choice, moved)
}

/// Overwrites `area` of a device that nobody else uses for at most a second, and reads it for at most a second. `moved` as for
/// [`measure_blank`].
///
/// # Errors
/// [`MeasureError`].
pub fn measure(
    device: &Device,
    area: MeasuredArea,
    choice: EngineChoice,
    moved: &mut MovedBeside,
) -> Result<MeasuredRates, MeasureError> {
    measure_file(device.file(), device.path(), area, choice, moved)
}

fn measure_file(
    file: &Arc<File>,
    path: &str,
    area: MeasuredArea,
    choice: EngineChoice,
    moved: &mut MovedBeside,
) -> Result<MeasuredRates, MeasureError> {
    let (engine, _) = Engine::open(choice, std::slice::from_ref(file), DEPTH + 1)?;
    measure_with(engine, path, area, OPERATION_TIMEOUT, moved)
}

fn measure_with(
    mut engine: Engine,
    path: &str,
    area: MeasuredArea,
    timeout: Duration,
    moved: &mut MovedBeside,
) -> Result<MeasuredRates, MeasureError> {
    let mut pass = Pass {
        path,
        moved,
        op: IoOp::Write,
        engine: &mut engine,
        offset: area.offset,
        timeout,
        buffers: (0..DEPTH).map(|seed| noise(seed as u64 + 1)).collect(),
    };
    let operations_max = area.bytes.min(MeasuredArea::BYTES_MAX) / OPERATION_BYTES as u64;
    let source = match pass.both_ways(operations_max) {
        Ok(rates) => return Ok(rates),
        Err(error) => error,
    };
    pass.end();
    let count = engine.inflight_count();
    if count == 0 {
        return Err(source);
    }
    // Dropping the engine would wait for them for half a minute.
    std::mem::forget(engine);
    Err(MeasureError::LeftBehind {
        source: Box::new(source),
        count,
        offset: area.offset,
        end: area.offset + area.bytes,
    })
}

struct Pass<'a> {
    path: &'a str,
    moved: &'a mut MovedBeside,
    /// Kind of the operations in flight.
    op: IoOp,
    engine: &'a mut Engine,
    offset: u64,
    /// Time after which an operation is considered lost.
    timeout: Duration,
    buffers: Vec<AlignedBytes>,
}

impl Pass<'_> {
    fn both_ways(&mut self, operations_max: u64) -> Result<MeasuredRates, MeasureError> {
        let (written, write_bytes_per_s) = self.run(IoOp::Write, operations_max)?;
        let (_, read_bytes_per_s) = self.run(IoOp::Read, written)?;
        Ok(MeasuredRates {
            read_bytes_per_s,
            write_bytes_per_s,
        })
    }

    /// After a failure, waits for the other operations as long as they can be expected to end.
    fn end(&mut self) {
        let limit = Instant::now() + self.timeout / 2;
        let mut done = Vec::new();
        while self.engine.inflight_count() > 0 {
            let left = limit.saturating_duration_since(Instant::now());
            let broken = self.engine.start().is_err() || self.engine.reap(&mut done).is_err();
            done.drain(..).for_each(|done| self.count(&done));
            if broken || left.is_zero() {
                return;
            }
            // An engine signals nobody about refused operations.
            let wait = Timespec::try_from(left.min(CHECK_INTERVAL)).expect("milliseconds");
            let _ = poll(
                &mut [PollFd::new(&self.engine.wake(), PollFlags::IN)],
                Some(&wait),
            );
        }
    }

    /// Runs up to `operations_max` operations, DEPTH at a time. Returns their number and the bytes a second.
    fn run(&mut self, op: IoOp, operations_max: u64) -> Result<(u64, u64), MeasureError> {
        let since = Instant::now();
        self.op = op;
        let mut next = 0;
        loop {
            while next < operations_max
                && since.elapsed() < TIME
                && let Some(buffer) = self.buffers.pop()
            {
                self.engine.submit(Io {
                    id: IoId(next),
                    device: DeviceIndex(0),
                    op,
                    offset: self.offset + next * OPERATION_BYTES as u64,
                    bytes: OPERATION_BYTES as u32,
                    memory: Memory::Meta(buffer),
                });
                next += 1;
            }
            if self.engine.inflight_count() == 0 {
                break;
            }
            self.collect(op, OPERATION_BYTES as u32)?;
        }
        if op == IoOp::Write {
            // Bytes that only reached the drive's cache do not count.
            self.engine.submit(Io {
                id: IoId(next),
                device: DeviceIndex(0),
                op: IoOp::Flush,
                offset: 0,
                bytes: 0,
                memory: Memory::None,
            });
            self.collect(IoOp::Flush, 0)?;
        }
        let bytes = next as f64 * OPERATION_BYTES as f64;
        let rate = bytes / since.elapsed().as_secs_f64().max(1e-9);
        Ok((next, rate as u64))
    }

    fn count(&mut self, done: &IoDone) {
        let moved_bytes = u64::from(done.outcome.unwrap_or(0));
        match self.op {
            IoOp::Read => self.moved.read_bytes += moved_bytes,
            IoOp::Write => self.moved.written_bytes += moved_bytes,
            IoOp::Flush => {}
        }
    }

    /// Waits for at least one operation and takes its buffer back.
    fn collect(&mut self, op: IoOp, asked_bytes: u32) -> Result<(), MeasureError> {
        let (path, area_offset) = (self.path, self.offset);
        let failed = |id: IoId, what: String| MeasureError::Operation {
            path: path.to_owned(),
            op,
            offset: area_offset + id.0 * OPERATION_BYTES as u64,
            what,
        };
        self.engine.start()?;
        let wait = Timespec::try_from(self.timeout).expect("a minute");
        let mut done = Vec::new();
        // The signal may be of an operation that was already taken.
        while done.is_empty() {
            let wake = self.engine.wake();
            if let Ok(0) = poll(&mut [PollFd::new(&wake, PollFlags::IN)], Some(&wait)) {
                let what = format!("no answer in {} s", self.timeout.as_secs());
                return Err(failed(IoId(0), what));
            }
            self.engine.reap(&mut done)?;
        }
        done.iter().for_each(|done| self.count(done));
        for done in done {
            match done.outcome {
                Ok(moved) if moved == asked_bytes => {}
                Ok(moved) => return Err(failed(done.id, format!("only {moved} bytes moved"))),
                Err(errno) => {
                    let what = std::io::Error::from_raw_os_error(errno).to_string();
                    return Err(failed(done.id, what));
                }
            }
            if let Memory::Meta(buffer) = done.memory {
                self.buffers.push(buffer);
            }
        }
        Ok(())
    }
}

/// Incompressible bytes: xorshift from `seed`, which is not 0.
fn noise(seed: u64) -> AlignedBytes {
    let mut bytes = AlignedBytes::zeroed(OPERATION_BYTES);
    let mut state = seed;
    for word in bytes.as_mut_slice().chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use test_hooks::rate_limit::RateLimit;

    use super::*;
    use crate::engine::rate_limited::RateLimited;

    const AREA: MeasuredArea = MeasuredArea {
        offset: MeasuredArea::BYTES_MIN,
        bytes: 2 * MeasuredArea::BYTES_MIN,
    };

    fn opened(writable: bool) -> Arc<File> {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(AREA.offset + AREA.bytes).unwrap();
        let mut options = File::options();
        Arc::new(
            options
                .read(true)
                .write(writable)
                .open(file.path())
                .unwrap(),
        )
    }

    #[test]
    fn operations_that_do_not_end_are_told() {
        let file = opened(true);
        let files = std::slice::from_ref(&file);
        let (engine, _) = Engine::open(EngineChoice::Psync, files, DEPTH + 1).unwrap();
        // In twelve days they would.
        let limit = RateLimit {
            read_bytes_per_s: 1,
            write_bytes_per_s: 1,
        };
        let limited = Engine::RateLimited(Box::new(RateLimited::new(engine, vec![limit]).unwrap()));
        let timeout = Duration::from_millis(20);
        let mut moved = MovedBeside::default();
        let error = measure_with(limited, "/dev/lost", AREA, timeout, &mut moved).unwrap_err();
        assert!(matches!(error, MeasureError::LeftBehind { .. }), "{error}");
        let told = error.to_string();
        for part in [
            "/dev/lost",
            "no answer",
            "2 operations have not ended",
            "bytes 1048576 to 3145728",
        ] {
            assert!(told.contains(part), "{part}: {told}");
        }
    }

    #[test]
    fn who_fails_has_waited_for_what_he_began() {
        let file = opened(false);
        let mut moved = MovedBeside::default();
        let found = measure_file(
            &file,
            "/dev/readonly",
            AREA,
            EngineChoice::Psync,
            &mut moved,
        );
        let error = found.unwrap_err();
        assert!(matches!(error, MeasureError::Operation { .. }), "{error}");
        assert_eq!(moved, MovedBeside::default());
    }

    #[test]
    fn what_it_moves_is_counted() {
        let file = opened(true);
        let mut moved = MovedBeside::default();
        measure_file(&file, "/dev/here", AREA, EngineChoice::Psync, &mut moved).unwrap();
        // On a slow machine a second may be over after the first of two.
        assert!(
            moved.written_bytes == AREA.bytes || moved.written_bytes == AREA.bytes / 2,
            "{moved:?}"
        );
        assert!(
            (AREA.bytes / 2..=moved.written_bytes).contains(&moved.read_bytes),
            "{moved:?}"
        );
    }
}
