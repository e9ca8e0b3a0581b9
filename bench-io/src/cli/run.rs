//! `bench-io run`: one job on a device or through the daemon.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use offloadd::config::IODEPTH_DEFAULT;

use crate::bench::{Bench, BenchPlan, TargetPlan};
use crate::job::{Job, JobWords, Place};
use crate::load::{StreamPlan, Timing};
use crate::machine::{self, Machine};
use crate::noise;
use crate::place::{OwnDaemon, WorkFolder};
use crate::progress::Progress;
use crate::report::{DeviceReport, REPORT_VERSION, Report, SettingsReport, warnings};
use crate::target::device::{DeviceFiles, bytes_of};

/// Shown below the options.
pub(crate) const EXAMPLES: &str = "Examples:
  bench-io run --directory /mnt/nvme0 --directory /mnt/nvme1            # through a daemon of its own, checksums on
  bench-io run --target device --directory /mnt/nvme0 --rw randread --bs 64k
  bench-io run --filename /dev/nvme1n1 --rw read --iodepth 64 --json    # a drive as it is
  bench-io run --socket /run/offloadd/offloadd.sock --rw rw             # a daemon that runs already
  bench-io run job.toml --bs 16m                                        # a flag wins over the file

A job file has the same keys:
  rw = \"randread\"
  bs = \"64k\"
  iodepth = 64
  directory = [\"/mnt/nvme0\", \"/mnt/nvme1\"]";

/// Measures one job.
#[derive(Args)]
pub(crate) struct RunArgs {
    /// A file with the keys below
    #[arg(value_name = "JOB.toml")]
    file: Option<PathBuf>,
    #[command(flatten)]
    words: JobWords,
    /// One JSON object instead of lines to read
    #[arg(long)]
    json: bool,
}

/// Runs it and prints its report.
///
/// # Errors
/// Settings that cannot be, or an operation that failed.
pub(crate) fn run(args: RunArgs) -> Result<()> {
    let words = match &args.file {
        Some(path) => args.words.over(JobWords::read(path)?),
        None => args.words,
    };
    let job = words.check()?;
    let report = measure(&job, &Progress::new())?;
    match args.json {
        true => println!("{}", serde_json::to_string(&report)?),
        false => print!("{report}"),
    }
    Ok(())
}

/// Prepares what `job` needs, runs it, takes it away again.
fn measure(job: &Job, progress: &Progress) -> Result<Report> {
    let mut warnings = warnings::before();
    let prepared = Prepared::new(job, progress)?;
    let bench = Bench::open(prepared.plan.clone())?;
    let streams = prepared.streams(job);
    if prepared.to_fill {
        bench.fill(&streams, progress)?;
    }
    if !job.direct {
        warnings.push(warnings::page_cache());
    }
    if job.rw.reads() {
        let read = prepared.files.iter();
        warnings.extend(read.filter_map(|path| warnings::never_written(path, prepared.size)));
    }
    let timing = Timing {
        ramp: job.ramp,
        runtime: job.runtime,
    };
    let (figures, _) = bench.run(&streams, timing, progress, job.rw.word())?;
    warnings.extend(warnings::after(&figures));
    let from_daemon = bench.devices().iter().map(|device| device.path.clone());
    let devices = prepared.files.iter().cloned().chain(from_daemon);
    Ok(Report {
        version: REPORT_VERSION,
        command: std::env::args().collect::<Vec<_>>().join(" "),
        machine: Machine::here(),
        target: prepared.word,
        devices: devices.map(|path| device_report(&path)).collect(),
        settings: SettingsReport {
            rw: job.rw.word(),
            bs: job.bs,
            iodepth: job.iodepth,
            numjobs: job.numjobs,
            runtime: job.runtime.as_secs_f64(),
            ramp_time: job.ramp.as_secs_f64(),
            ioengine: job.engine_word.clone(),
            size: prepared.size,
            direct: job.direct,
            rwmixread: (job.rw.reads() && job.rw.writes()).then_some(job.read_percent),
        },
        figures,
        warnings,
    })
}

fn device_report(path: &Path) -> DeviceReport {
    DeviceReport {
        path: path.display().to_string(),
        under: machine::under(path),
    }
}

/// What a job runs on. Dropping it takes away what was made, after the bench on it.
struct Prepared {
    plan: BenchPlan,
    word: &'static str,
    /// Files that are read and written by the engine alone.
    files: Vec<PathBuf>,
    /// Of each file or device.
    size: u64,
    /// Blocks of each job: of each file, or of all devices together.
    job_blocks: u64,
    to_fill: bool,
    _folders: Vec<WorkFolder>,
    _daemon: Option<OwnDaemon>,
}

impl Prepared {
    fn new(job: &Job, progress: &Progress) -> Result<Self> {
        let (bs, jobs) = (u64::from(job.bs), u64::from(job.numjobs));
        let slot_bytes = bs * u64::from(job.iodepth) * jobs;
        let mut folders = Vec::new();
        let mut daemon = None;
        let mut files = Vec::new();
        let mut to_fill = true;
        let size = match (&job.place, job.size) {
            (Place::Files(paths), size) => {
                to_fill = false;
                files.clone_from(paths);
                let mut smallest = size.unwrap_or(u64::MAX);
                for path in paths {
                    let bytes = bytes_of(path)?;
                    ensure!(
                        size.is_none_or(|size| size <= bytes),
                        "size = {}: {} has {bytes} bytes",
                        size.unwrap_or(0),
                        path.display()
                    );
                    smallest = smallest.min(bytes);
                }
                smallest
            }
            (_, size) => size.context("every new file has a size")?,
        };
        match &job.place {
            Place::Files(_) | Place::Socket(_) => {}
            Place::NewFiles(parents) => {
                for parent in parents {
                    let folder = WorkFolder::make(parent)?;
                    let path = folder.path().join("file");
                    progress.say("making files");
                    write_file(&path, size)?;
                    files.push(path);
                    folders.push(folder);
                }
                // Written already, so that opening them for reading alone is enough.
                to_fill = false;
            }
            Place::Private(parents) => {
                ensure!(
                    job.iodepth <= IODEPTH_DEFAULT,
                    "iodepth = {}: a private daemon grants each job {IODEPTH_DEFAULT}; use numjobs for more",
                    job.iodepth
                );
                progress.say("formatting a store");
                daemon = Some(OwnDaemon::start(
                    parents,
                    size,
                    slot_bytes,
                    &job.engine_word,
                )?);
            }
        }
        let socket = match (&job.place, &daemon) {
            (Place::Socket(socket), _) => Some(socket.clone()),
            (_, Some(daemon)) => Some(daemon.socket().to_owned()),
            _ => None,
        };
        let (target, job_blocks, depth) = match socket {
            Some(socket) => {
                let devices = match &daemon {
                    Some(daemon) => daemon.devices().len(),
                    None => offload_client::Daemon::connect(&socket)?
                        .info()
                        .devices
                        .len(),
                };
                let tile_count = size / bs * devices as u64 / jobs;
                let target = TargetPlan::Daemon {
                    socket,
                    tile_count: u32::try_from(tile_count)
                        .context("too many tiles; use a larger bs")?,
                };
                (target, tile_count, job.iodepth)
            }
            None => {
                let target = TargetPlan::Device {
                    files: DeviceFiles {
                        paths: files.clone(),
                        direct: job.direct,
                        writes: job.rw.writes(),
                    },
                    choice: job.engine,
                };
                let depth = depth_of_file(job, files.len()) * files.len() as u32;
                (target, size / bs / jobs, depth)
            }
        };
        let least = 1 + u64::from(job.rw.reads() && job.rw.writes());
        ensure!(
            job_blocks >= least,
            "size = {size}: too small for {jobs} jobs with operations of {bs} bytes"
        );
        Ok(Self {
            word: match target {
                TargetPlan::Device { .. } => "device",
                TargetPlan::Daemon { .. } => "daemon",
            },
            plan: BenchPlan {
                target,
                block_bytes: job.bs,
                depth,
                jobs: job.numjobs,
                pattern: None,
            },
            files,
            size,
            job_blocks,
            to_fill,
            _folders: folders,
            _daemon: daemon,
        })
    }

    /// A stream for each file of each job; one for each job through the daemon, which spreads tiles itself.
    fn streams(&self, job: &Job) -> Vec<Vec<StreamPlan>> {
        let stream = |device, first, depth| StreamPlan {
            device,
            blocks: (first, self.job_blocks),
            reads: job.rw.reads(),
            writes: job.rw.writes(),
            read_percent: job.read_percent,
            random: job.rw.is_random(),
            depth,
        };
        let of_job = |index: u32| match self.plan.target {
            TargetPlan::Daemon { .. } => vec![stream(0, 0, job.iodepth)],
            TargetPlan::Device { .. } => {
                let depth = depth_of_file(job, self.files.len());
                let first = u64::from(index) * self.job_blocks;
                let devices = 0..self.files.len() as u32;
                devices.map(|device| stream(device, first, depth)).collect()
            }
        };
        (0..job.numjobs).map(of_job).collect()
    }
}

/// A job's depth is shared by its files, each having one operation at least.
fn depth_of_file(job: &Job, files: usize) -> u32 {
    (job.iodepth / files as u32).max(1)
}

/// Real bytes: what is only reserved reads at the speed of memory.
pub(crate) fn write_file(path: &Path, bytes: u64) -> Result<()> {
    use std::io::Write;
    let wrote = || -> std::io::Result<()> {
        let mut file = std::fs::File::create_new(path)?;
        let mut piece = vec![0; 8 << 20];
        noise::fill(&mut piece, 1);
        let mut left = bytes;
        while left > 0 {
            let now = left.min(piece.len() as u64) as usize;
            file.write_all(&piece[..now])?;
            left -= now as u64;
        }
        file.sync_all()
    };
    wrote().with_context(|| format!("writing {bytes} bytes to {}", path.display()))
}
