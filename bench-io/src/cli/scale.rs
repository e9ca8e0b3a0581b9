//! `bench-io scale`: options and output files.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use offloadd::api::{BLOCK_BYTES, IODEPTH_MAX, TILE_BYTES_MAX};

use crate::fio::Fio;
use crate::job::engine_of;
use crate::place::store_file_bytes;
use crate::progress::Progress;
use crate::report;
use crate::scale::{self, ScalePlan, ScaleReport};
use crate::testdrives::{DrivesPlan, OwnDrives, RateLimit};
use crate::units::{Bytes, Rate};

pub(crate) const EXAMPLES: &str = "Examples:
  bench-io scale --directory .                                              # this machine's disk, three rounds alternating with fio
  bench-io scale --directory /mnt/nvme0 --directory /mnt/nvme1 --out target/scale
  bench-io scale --testdrives 4 --read 620MB/s --write 320MB/s                      # as root, on any machine with 8 GiB to spare
  bench-io scale --testdrives 4 --read 6.2GB/s --write 3.2GB/s --loop-devices 2 --size 2g --bs 1m,4m,16m
  bench-io scale --testdrives 4 --slow-last --drives 4                        # unequal drives: the sum is the limit
  bench-io scale --testdrives 2 --read 60MB/s --write 30MB/s --size 32m --runtime 1 --tolerance 5     # as a test: fails when a rate is off";

/// Space on a drive for its file system's metadata and the daemon's log.
const DRIVE_SLACK_BYTES: u64 = 64 << 20;

#[derive(Args)]
pub(crate) struct ScaleArgs {
    /// Directory on a drive; give one for each drive
    #[arg(
        long = "directory",
        value_name = "DIR",
        required_unless_present = "testdrives",
        conflicts_with = "testdrives"
    )]
    dirs: Vec<PathBuf>,
    /// Create N rate-limited drives for the measurement; needs root
    #[arg(long, value_name = "N")]
    testdrives: Option<u32>,
    /// Read limit of each rate-limited drive
    #[arg(
        long,
        value_name = "RATE",
        default_value = "620MB/s",
        conflicts_with = "dirs"
    )]
    read: Rate,
    /// Write limit of each rate-limited drive
    #[arg(
        long,
        value_name = "RATE",
        default_value = "320MB/s",
        conflicts_with = "dirs"
    )]
    write: Rate,
    /// Loop devices that make up each rate-limited drive; one moves about 5 GB/s
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "dirs")]
    loop_devices: u32,
    /// Limit the last drive to half the rate of the others
    #[arg(long)]
    slow_last: bool,
    /// Numbers of drives to measure, separated by commas [default: 1 to all]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    drives: Vec<usize>,
    /// Sizes of an operation (a tile), separated by commas
    #[arg(
        long,
        value_name = "BYTES",
        default_value = "4m",
        value_delimiter = ','
    )]
    bs: Vec<Bytes>,
    /// Operations in flight per file and direction; through the daemon one per tile, at most 1024 in all [default: 32
    /// for fio; 8 MiB per drive and at least two through the daemon]
    #[arg(long, value_name = "N")]
    iodepth: Option<u32>,
    /// Bytes used of each drive; the drive needs five times as much free space
    #[arg(long, value_name = "BYTES", default_value = "256m")]
    size: Bytes,
    /// Seconds of each measurement
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0)]
    runtime: f64,
    /// Rounds to take the median of [default: 3; 1 for rate-limited drives]
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// The daemon's I/O engine: auto, io_uring, libaio or psync
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = engine)]
    ioengine: String,
    /// Path of fio, or "none" [default: search PATH]
    #[arg(long, value_name = "PROGRAM")]
    fio: Option<PathBuf>,
    /// Fail when a row is further than this from the rate limit
    #[arg(long, value_name = "PERCENT")]
    tolerance: Option<f64>,
    /// Write scale.json to this directory; trainer/bench/io/draw.py draws it
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Measures, prints the report and writes the files.
pub(crate) fn run(args: ScaleArgs) -> Result<()> {
    check(&args)?;
    let fio = Fio::find(args.fio.as_deref())?;
    if let Some(out) = &args.out {
        std::fs::create_dir_all(out).with_context(|| format!("creating {}", out.display()))?;
    }
    let progress = Progress::new();
    let report = match args.testdrives {
        Some(count) => on_testdrives(&args, count, fio.as_ref(), &progress)?,
        None => scale::measure(
            &plan(&args, args.dirs.clone(), 1),
            None,
            fio.as_ref(),
            &progress,
        )?,
    };
    drop(progress);
    // Printing and writing files may fail independently on a full drive; do both.
    let printed = report::print(&report, args.json);
    if let Some(out) = &args.out {
        report::leave(out, "scale", report.description(), &report)?;
    }
    printed?;
    let outside = args
        .tolerance
        .map(|percent| report.outside(percent / 100.0));
    if let Some(outside) = outside.filter(|outside| !outside.is_empty()) {
        bail!("outside --tolerance: {}", outside.join("; "));
    }
    Ok(())
}

/// The settings' name of an engine.
fn engine(word: &str) -> Result<String> {
    engine_of(word, None).map(|(_, name)| name)
}

fn check(args: &ScaleArgs) -> Result<()> {
    for bs in &args.bs {
        ensure!(
            bs.0.is_multiple_of(u64::from(BLOCK_BYTES)) && bs.0 <= u64::from(TILE_BYTES_MAX),
            "--bs {}: must be a multiple of {BLOCK_BYTES} bytes, at most {}",
            bs.0,
            Bytes(u64::from(TILE_BYTES_MAX))
        );
        ensure!(
            args.size.0 >= 2 * bs.0,
            "--size {}: must hold at least two operations of {}",
            args.size,
            bs
        );
    }
    let all = args
        .testdrives
        .map_or(args.dirs.len(), |count| count as usize);
    if let Some(wrong) = args.drives.iter().find(|count| !(1..=all).contains(*count)) {
        bail!("--drives {wrong}: there are only {all} drives");
    }
    if let Some(iodepth) = args.iodepth {
        ensure!(
            (1..=IODEPTH_MAX).contains(&iodepth),
            "--iodepth {iodepth}: must be 1 to {IODEPTH_MAX}"
        );
    }
    ensure!(
        (0.1..=3600.0).contains(&args.runtime),
        "--runtime {}: must be 0.1 to 3600 seconds",
        args.runtime
    );
    ensure!(
        args.rounds.is_none_or(|rounds| (1..=100).contains(&rounds)),
        "--rounds must be 1 to 100"
    );
    ensure!(
        args.tolerance
            .is_none_or(|percent| (0.0..=100.0).contains(&percent)),
        "--tolerance must be 0 to 100 percent"
    );
    ensure!(
        args.tolerance.is_none() || args.testdrives.is_some(),
        "--tolerance needs --testdrives: other drives have no rate limit to compare with"
    );
    ensure!(
        !args.slow_last || args.testdrives.is_some_and(|count| count >= 2),
        "--slow-last needs --testdrives 2 or more"
    );
    ensure!(args.loop_devices >= 1, "--loop-devices must be at least 1");
    Ok(())
}

fn plan(args: &ScaleArgs, dirs: Vec<PathBuf>, dirs_per_drive: u32) -> ScalePlan {
    // Ascending, for the lines of the picture.
    let mut drives = args.drives.clone();
    drives.sort_unstable();
    drives.dedup();
    ScalePlan {
        dirs,
        dirs_per_drive: dirs_per_drive as usize,
        blocks_bytes: args.bs.iter().map(|bs| bs.0 as u32).collect(),
        iodepth: args.iodepth,
        drives,
        slow_last: args.slow_last,
        size: part_bytes(args),
        ramp: Duration::from_secs_f64((args.runtime / 4.0).min(0.5)),
        runtime: Duration::from_secs_f64(args.runtime),
        engine: args.ioengine.clone(),
        rounds: args.rounds.unwrap_or(match args.testdrives {
            Some(_) => 1,
            None => 3,
        }),
    }
}

/// Bytes used of each directory.
fn part_bytes(args: &ScaleArgs) -> u64 {
    let dirs = match args.testdrives {
        Some(_) => u64::from(args.loop_devices),
        None => 1,
    };
    let blocks = args.size.0 / dirs / u64::from(BLOCK_BYTES);
    blocks * u64::from(BLOCK_BYTES)
}

fn on_testdrives(
    args: &ScaleArgs,
    count: u32,
    fio: Option<&Fio>,
    progress: &Progress,
) -> Result<ScaleReport> {
    progress.say("making rate-limited drives");
    let limit = RateLimit {
        read: args.read.0,
        write: args.write.0,
    };
    let drives = OwnDrives::create(&DrivesPlan {
        name: format!("scale-{}", std::process::id()),
        count,
        // The store, a file to read and a file to write.
        bytes: u64::from(args.loop_devices)
            * (store_file_bytes(part_bytes(args)) + 2 * part_bytes(args) + DRIVE_SLACK_BYTES),
        limit,
        loop_devices: args.loop_devices,
        raid0: false,
    })?;
    // The daemon and fio inherit the control group, and with it the limits.
    let _inside = drives.enter()?;
    let plan = plan(args, drives.state().dirs.clone(), args.loop_devices);
    scale::measure(&plan, Some((&drives, limit)), fio, progress)
}
