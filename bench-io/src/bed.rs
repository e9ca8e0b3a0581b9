//! Short trials of an engine alone: on each of some drives a file to read and one to write.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use offloadd::engine::EngineChoice;
use serde::Serialize;

use crate::bench::{Bench, BenchPlan, TargetPlan};
use crate::load::{StreamPlan, Timing};
use crate::place::{WorkFolder, write_file};
use crate::progress::Progress;
use crate::scale::Load;
use crate::target::device::DeviceFiles;

/// One combination, and what it reached.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Trial {
    pub(crate) engine: String,
    pub(crate) bs: u32,
    /// Of each drive and direction.
    pub(crate) iodepth: u32,
    pub(crate) load: Load,
    pub(crate) read_bytes_per_s: f64,
    pub(crate) write_bytes_per_s: f64,
    pub(crate) cpu_s_per_gb: f64,
}

impl Trial {
    pub(crate) fn bytes_per_s(&self) -> f64 {
        self.read_bytes_per_s + self.write_bytes_per_s
    }
}

/// Files to try on: one to read and one to write on each drive.
#[derive(Debug)]
pub(crate) struct Bed {
    _folders: Vec<WorkFolder>,
    files: Vec<PathBuf>,
    size: u64,
    timing: Timing,
}

impl Bed {
    /// Makes them in `parents`, for trials of `runtime`.
    ///
    /// # Errors
    /// No room.
    pub(crate) fn make(
        parents: &[PathBuf],
        size: u64,
        runtime: Duration,
        progress: &Progress,
    ) -> Result<Self> {
        progress.say("making files");
        let (mut folders, mut files) = (Vec::new(), Vec::new());
        for parent in parents {
            let folder = WorkFolder::make(parent)?;
            for name in ["read", "write"] {
                let file = folder.path().join(name);
                write_file(&file, size)?;
                files.push(file);
                crate::stop::check()?;
            }
            folders.push(folder);
        }
        Ok(Self {
            _folders: folders,
            files,
            size,
            timing: Timing {
                ramp: runtime / 4,
                runtime,
            },
        })
    }

    pub(crate) fn file_bytes(&self) -> u64 {
        self.size
    }

    /// Memory that a trial takes.
    pub(crate) fn buffer_bytes(&self, bs: u32, depth: u32) -> u64 {
        u64::from(bs) * u64::from(depth) * self.files.len() as u64
    }

    /// What one trial takes.
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
        let of = |way: &Option<crate::report::WayReport>| {
            way.as_ref().map_or(0.0, |way| way.bytes_per_s)
        };
        Ok(Trial {
            engine: engine.to_owned(),
            bs,
            iodepth: depth,
            load,
            read_bytes_per_s: of(&figures.read),
            write_bytes_per_s: of(&figures.write),
            cpu_s_per_gb: figures.cpu.s_per_gb,
        })
    }
}
