//! `bench-io run`: one job on a device or through the daemon.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;

use crate::bench::Bench;
use crate::fio::Fio;
use crate::fio_compare::FioCompare;
use crate::job::{Job, JobOptions};
use crate::load::Timing;
use crate::prepared::Prepared;
use crate::progress::Progress;
use crate::report;
use crate::report::{DeviceReport, Head, Report, SettingsReport, warnings};
use crate::rounds::{median, rate_of};

pub(crate) const EXAMPLES: &str = "Examples:
  bench-io run --directory /mnt/nvme0 --directory /mnt/nvme1            # through a daemon of its own, checksums on
  bench-io run --target device --directory /mnt/nvme0 --rw randread --bs 64k
  bench-io run --filename /dev/nvme1n1 --rw read --iodepth 64 --json    # a whole drive
  bench-io run --socket /run/offloadd/offloadd.sock --rw rw             # through a running daemon
  bench-io run --rw randread --bs 1m --iodepth 1 --rounds 5             # one read at a time, alternating with fio
  bench-io run job.toml --bs 16m                                        # options override the file

A job file has the same keys:
  rw = \"randread\"
  bs = \"64k\"
  iodepth = 64
  directory = [\"/mnt/nvme0\", \"/mnt/nvme1\"]";

#[derive(Args)]
pub(crate) struct RunArgs {
    /// Read the options below from this TOML file
    #[arg(value_name = "JOB.toml")]
    file: Option<PathBuf>,
    #[command(flatten)]
    words: JobOptions,
    /// Measure N times, alternating with fio on the same drives, and compare
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Path of fio [default: search PATH]
    #[arg(long, value_name = "PROGRAM", requires = "rounds")]
    fio: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the job and prints its report.
pub(crate) fn run(args: RunArgs) -> Result<()> {
    let words = match &args.file {
        Some(path) => args.words.over(JobOptions::read(path)?),
        None => args.words,
    };
    let job = words.check()?;
    let turns = match args.rounds {
        Some(rounds) => {
            let fio = Fio::find(args.fio.as_deref())?;
            Some((rounds, FioCompare::can(&job, fio)?))
        }
        None => None,
    };
    let report = measure(&job, turns, &Progress::new())?;
    report::print(&report, args.json)?;
    Ok(())
}

/// Prepares what `job` needs, runs it and cleans up. With `turns`, alternates that often with fio.
fn measure(job: &Job, turns: Option<(u32, Fio)>, progress: &Progress) -> Result<Report> {
    let mut warnings = warnings::before();
    let prepared = Prepared::new(job, progress)?;
    let (rounds, compare) = match turns {
        Some((rounds, fio)) => (
            rounds,
            Some(FioCompare::new(job, &prepared, fio, progress)?),
        ),
        None => (1, None),
    };
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
    let mut figures_of = Vec::new();
    let mut both = Vec::new();
    for _ in 0..rounds {
        let figures = bench.run(&streams, timing, progress, job.rw.word())?;
        if let Some(compare) = &compare {
            progress.say("fio");
            both.push((figures.clone(), compare.turn(job, prepared.size)?));
        }
        figures_of.push(figures);
    }
    let (figures, _) = median(figures_of, rate_of).context("at least one round")?;
    let comparison = compare.map(|compare| compare.report(&both));
    warnings.extend(warnings::after_at(&job.place, &figures));
    let devices = prepared.devices(&bench);
    warnings.extend(warnings::of_one_drive(&devices));
    warnings.extend(warnings::of_drives(devices.iter().map(PathBuf::as_path)));
    let devices = devices.iter().map(|path| DeviceReport::of(path)).collect();
    Ok(Report {
        head: Head::new(SettingsReport::new(job, &prepared), devices, warnings),
        target: prepared.word,
        figures,
        comparison,
    })
}
