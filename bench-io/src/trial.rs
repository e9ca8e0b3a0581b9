//! Short trials of an engine alone, with one file to read and one to write on each drive.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use offloadd::engine::EngineChoice;
use serde::Serialize;

use crate::bench::{Bench, BenchPlan, TargetPlan};
use crate::figures::Figures;
use crate::load::{StreamPlan, Timing};
use crate::place::{WorkDir, write_file};
use crate::progress::Progress;
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
}

impl Trial {
    /// Rates of reading and writing.
    pub(crate) fn rates(&self) -> [f64; 2] {
        [&self.figures.read, &self.figures.write]
            .map(|way| way.as_ref().map_or(0.0, |way| way.bytes_per_s))
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
        let mut files = Vec::new();
        for dir in &dirs {
            for name in ["read", "write"] {
                let file = dir.path().join(name);
                write_file(&file, size)?;
                files.push(file);
                crate::stop::check()?;
            }
        }
        Ok(Self {
            _dirs: dirs,
            files,
            size,
            timing: Timing {
                ramp: runtime / 4,
                runtime,
            },
        })
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
        })?;
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
        let figures = bench.run(&[streams.collect()], self.timing, progress, &what)?;
        Ok(Trial {
            engine: engine.to_owned(),
            bs,
            iodepth: depth,
            load,
            figures,
        })
    }
}
