//! `bench-io run`: one job on a device or through the daemon.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;

use crate::bench::Bench;
use crate::confirm;
use crate::job::{Job, JobOptions};
use crate::job_file::{self, IdleOptions};
use crate::load::Timing;
use crate::prepared::PreparedTarget;
use crate::progress::Progress;
use crate::report;
use crate::report::{About, DeviceReport, Report, SettingsReport, warnings};

pub(crate) const EXAMPLES: &str = "Examples:
  bench-io run --directory /mnt/nvme0 --directory /mnt/nvme1               # through a daemon of its own, checksums on
  bench-io run --target device --directory /mnt/nvme0 --rw randread --bs 64k
  bench-io run --filename /dev/nvme1n1 --rw read --iodepth 64 --json       # a whole drive
  bench-io run --socket /run/offloadd/offloadd.sock --rw rw                # through a running daemon
  bench-io run jobs.fio --section randread --bs 16m                        # options override the file

A job file is fio's. Keys are the options above:
  [global]
  directory=/mnt/nvme0:/mnt/nvme1
  iodepth=64

  [randread]
  rw=randread
  bs=64k
  runtime=30s";

#[derive(Args)]
pub(crate) struct RunArgs {
    /// Read the options below from this job file of fio
    #[arg(value_name = "JOBFILE")]
    file: Option<PathBuf>,
    /// Job of the file, if it has several
    #[arg(long, value_name = "NAME", requires = "file")]
    section: Option<String>,
    #[command(flatten)]
    words: JobOptions,
    #[command(flatten)]
    idle: IdleOptions,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the job and prints its report.
pub(crate) fn run(args: RunArgs) -> Result<()> {
    let mut idle = args.idle.0;
    let words = match &args.file {
        Some(path) => {
            let (file, idle_keys) = job_file::read(path, args.section.as_deref())?;
            idle.extend(idle_keys);
            args.words.over(file)
        }
        None => args.words,
    };
    let names_place = words.names_place();
    let job = words.check()?;
    let mut warnings = warnings::before();
    if !idle.is_empty() {
        warnings.push(format!(
            "fio's options without effect here: {}",
            idle.join(", ")
        ));
    }
    if !names_place {
        let bytes = job.size.context("new files have a size")?;
        confirm::current_directory(bytes)?;
    }
    let report = measure(&job, warnings, &Progress::new())?;
    report::print(&report, args.json)?;
    Ok(())
}

/// Prepares what `job` needs, runs it and cleans up.
fn measure(job: &Job, mut warnings: Vec<String>, progress: &Progress) -> Result<Report> {
    let prepared = PreparedTarget::new(job, progress)?;
    let bench = Bench::open(prepared.plan.clone())?;
    let streams = prepared.streams(job);
    if prepared.to_fill {
        bench.fill(&streams, progress)?;
    }
    warnings.extend(prepared.too_shallow(job));
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
    let figures = bench.run(&streams, timing, progress, job.rw.word())?;
    warnings.extend(warnings::after_at(&job.place, &figures));
    let devices = prepared.devices(&bench);
    warnings.extend(warnings::of_one_drive(&devices));
    warnings.extend(warnings::of_drives(devices.iter().map(PathBuf::as_path)));
    let devices = devices
        .iter()
        .map(|path| DeviceReport::describe(path))
        .collect();
    Ok(Report {
        about: About::new(SettingsReport::new(job, &prepared), devices, warnings),
        target: prepared.word,
        figures,
    })
}
