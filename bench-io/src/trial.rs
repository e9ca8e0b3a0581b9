//! Short trials of an engine alone, with one file to read and one to write on each drive.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use offloadd::engine::EngineChoice;
use serde::Serialize;

use crate::bench::{Bench, BenchPlan, TargetPlan};
use crate::load::{StreamPlan, Timing};
use crate::place::{WorkDir, write_file};
use crate::progress::Progress;
use crate::report::Figures;
use crate::scale::Load;
use crate::targets::device::DeviceFiles;

/// A combination of settings and its results.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Trial {
    pub(crate) engine: String,
    pub(crate) bs: u32,
    /// Operations in flight per drive and direction.
    pub(crate) iodepth: u32,
    pub(crate) load: Load,
    pub(crate) figures: Figures,
    /// Seconds until the engine was open and its buffers filled.
    pub(crate) open_s: f64,
    /// Seconds from then until the last operation had ended.
    pub(crate) run_s: f64,
}

impl Trial {
    /// Rates of reading and writing.
    pub(crate) fn rates(&self) -> [f64; 2] {
        [&self.figures.read, &self.figures.write]
            .map(|way| way.as_ref().map_or(0.0, |way| way.bytes_per_s))
    }

    /// Rate of both directions. `None` if a requested direction moved nothing.
    pub(crate) fn bytes_per_s(&self) -> Option<f64> {
        let [read, write] = self.rates();
        let missing = self.load.reads() && read == 0.0 || self.load.writes() && write == 0.0;
        (!missing).then_some(read + write)
    }
}

/// Files for trials: one to read and one to write on each drive.
#[derive(Debug)]
pub(crate) struct TrialFiles {
    _dirs: Vec<WorkDir>,
    files: Vec<PathBuf>,
    size: u64,
    timing: Timing,
}

/// Size of the first part of a file, which shows how fast a drive is.
const PIECE_BYTES: u64 = 16 << 20;

/// Smallest useful file.
const FILE_BYTES_MIN: u64 = 4 << 20;

/// Bytes that can be written in `limit`, in whole blocks.
fn bytes_within(limit: Duration, s_per_byte: f64) -> u64 {
    let bytes = limit.as_secs_f64() / s_per_byte.max(1e-15);
    (bytes as u64 / 4096 * 4096).max(FILE_BYTES_MIN)
}

impl TrialFiles {
    /// Makes files in `parents` for trials of `runtime`.
    ///
    /// # Errors
    /// Not enough space.
    pub(crate) fn make(
        parents: &[PathBuf],
        size: u64,
        runtime: Duration,
        progress: &Progress,
    ) -> Result<Self> {
        progress.say("making files");
        let dirs = parents
            .iter()
            .map(|parent| WorkDir::make(parent))
            .collect::<Result<Vec<_>>>()?;
        Ok(Self::fill(dirs, size, runtime)?.0)
    }

    /// Like [`TrialFiles::make`], with files small enough to be written in about `limit`, judged by a first part on
    /// each drive. Also returns the seconds per byte in flight on all drives.
    ///
    /// # Errors
    /// Not enough space.
    pub(crate) fn make_within(
        parents: &[PathBuf],
        size: u64,
        runtime: Duration,
        limit: Duration,
        progress: &Progress,
    ) -> Result<(Self, f64)> {
        progress.say("making files");
        let (mut dirs, mut s_per_byte) = (Vec::new(), 0.0);
        for parent in parents {
            let dir = WorkDir::make(parent)?;
            let (piece, bytes) = (dir.path().join("piece"), size.min(PIECE_BYTES));
            let since = Instant::now();
            write_file(&piece, bytes)?;
            s_per_byte += since.elapsed().as_secs_f64() / bytes as f64;
            std::fs::remove_file(&piece).with_context(|| piece.display().to_string())?;
            crate::stop::check()?;
            dirs.push(dir);
        }
        let size = size.min(bytes_within(limit, 2.0 * s_per_byte));
        let (trial_files, slowest_s_per_byte) = Self::fill(dirs, size, runtime)?;
        // Files are written one after the other; bytes in flight end on all drives at once.
        Ok((trial_files, slowest_s_per_byte / parents.len() as f64))
    }

    /// Fills the files and returns the slowest drive's seconds per byte.
    fn fill(dirs: Vec<WorkDir>, size: u64, runtime: Duration) -> Result<(Self, f64)> {
        let (mut files, mut slowest_s) = (Vec::new(), 0.0_f64);
        for dir in &dirs {
            let since = Instant::now();
            for name in ["read", "write"] {
                let file = dir.path().join(name);
                write_file(&file, size)?;
                files.push(file);
                crate::stop::check()?;
            }
            slowest_s = slowest_s.max(since.elapsed().as_secs_f64());
        }
        let trial_files = Self {
            _dirs: dirs,
            files,
            size,
            timing: Timing {
                ramp: runtime / 4,
                runtime,
            },
        };
        Ok((trial_files, slowest_s / (2 * size) as f64))
    }

    pub(crate) fn file_bytes(&self) -> u64 {
        self.size
    }

    /// Memory of a trial's buffers.
    pub(crate) fn buffer_bytes(&self, bs: u32, depth: u32) -> u64 {
        u64::from(bs) * u64::from(depth) * self.files.len() as u64
    }

    /// Bytes in flight at the end of a trial: each block of a file is in flight at most once.
    pub(crate) fn inflight_bytes(&self, bs: u32, depth: u32) -> u64 {
        let of_file = u64::from(bs) * u64::from(depth);
        of_file.min(self.size) * self.files.len() as u64
    }

    /// Duration of a trial, without opening and the end of bytes in flight.
    pub(crate) fn trial_time(&self) -> Duration {
        self.timing.ramp + self.timing.runtime
    }

    /// Measures one combination on all drives at once.
    ///
    /// # Errors
    /// The engine does not run here, or an operation fails.
    pub(crate) fn try_one(
        &self,
        engine: &str,
        bs: u32,
        depth: u32,
        load: Load,
        progress: &Progress,
    ) -> Result<Trial> {
        let since = Instant::now();
        let choice = EngineChoice::from_name(engine).context("a name of its own list")?;
        let bench = Bench::open(BenchPlan {
            target: TargetPlan::Device {
                files: DeviceFiles {
                    paths: self.files.clone(),
                    direct: true,
                    writes: true,
                },
                choice,
            },
            block_bytes: bs,
            depth: depth * self.files.len() as u32,
            jobs: 1,
            pattern: None,
        })?;
        let (open_s, opened) = (since.elapsed().as_secs_f64(), Instant::now());
        let streams = (0..self.files.len() as u32).filter_map(|device| {
            // Files come in pairs.
            let reads = device % 2 == 0;
            let wanted = if reads { load.reads() } else { load.writes() };
            wanted.then_some(StreamPlan {
                device,
                blocks: (0, self.size / u64::from(bs)),
                reads,
                writes: !reads,
                read_percent: 50,
                random: false,
                depth,
            })
        });
        let what = format!(
            "{engine}, {} KiB, iodepth {depth}, {}",
            bs >> 10,
            load.word()
        );
        let (figures, _) = bench.run(&[streams.collect()], self.timing, progress, &what)?;
        Ok(Trial {
            engine: engine.to_owned(),
            bs,
            iodepth: depth,
            load,
            figures,
            open_s,
            run_s: opened.elapsed().as_secs_f64(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_as_large_as_a_drive_takes_in_time() {
        let ten = Duration::from_secs(10);
        assert_eq!(bytes_within(ten, 1.0 / 50e6), 500_000_000 / 4096 * 4096);
        // A very slow drive still gets a file, and a very fast one is bounded.
        assert_eq!(bytes_within(ten, 1.0), FILE_BYTES_MIN);
        assert!(bytes_within(ten, 0.0) > 1 << 50);
    }
}
